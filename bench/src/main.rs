//! `make bench`: leasehold side by side with what one would use instead, on one throwaway server.
//!
//! The competitors of a row run in turn, round after round (A B C, A B C, ...), so that whatever
//! else the machine does hits all of them alike. A row's ratio is the median of the ratios within
//! the rounds, not the ratio of two medians, for the same reason. It prints numbers and whether
//! they reach the target; it does not pass or fail.

mod calls;
mod cluster;
mod contest;
mod fairness;
mod in_memory;
mod isolation;
mod leases;
mod machine;
mod memory;
mod million;
mod overload;
mod pgbench;
mod rates;
mod recovery;
mod redis;
mod report;
mod snapshot;
mod stats;
mod update;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use cluster::Cluster;
use report::Report;

/// Whatever went wrong, as text for the person at the terminal.
pub type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const USAGE: &str = "\
usage: leasehold-bench [--pg-config PATH] [--rounds N] [--seconds S] [--only NAME]...

  --pg-config PATH  the PostgreSQL that has leasehold installed (default: pg_config)
  --rounds N        rounds per row, of which the median counts (default: 11)
  --seconds S       length of one pgbench run (default: 1)
  --rows N          size of the ledger in parts recovery and million; may be given several times
                    (default: 100000 and 1000000)
  --cycles N        acquires with their releases of each competitor in part snapshot (default: 30000,
                    some two minutes in all)
  --minute S        length of the long run in part overload (default: 60)
  --only NAME       acquire, held, renew, update, memory, memory-leases, recovery, million, snapshot,
                    fairness, isolation or overload; may be given several times";

/// The groups of rows, in the order in which they run.
const GROUPS: [&str; 12] = [
    "acquire",
    "held",
    "renew",
    "update",
    "memory",
    "memory-leases",
    "recovery",
    "million",
    "snapshot",
    "fairness",
    "isolation",
    "overload",
];

/// What the command line asks for.
pub struct Options {
    pg_config: PathBuf,
    /// Rounds per row.
    pub rounds: u32,
    /// Length of one pgbench run.
    pub seconds: u32,
    /// Sizes of the ledgers that are measured; none: each part has its own.
    rows: Vec<u32>,
    /// Cycles of each competitor under a snapshot.
    pub cycles: u32,
    /// Seconds of the long run of overload.
    pub minute: u32,
    only: Vec<String>,
}

impl Options {
    /// The sizes of the ledger that were asked for, else that one.
    pub fn rows_or(&self, default: u32) -> Vec<u32> {
        if self.rows.is_empty() {
            vec![default]
        } else {
            self.rows.clone()
        }
    }
}

fn main() -> ExitCode {
    let options = match parse(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("leasehold-bench: {error}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("leasehold-bench: {}", chain(&*error));
            ExitCode::FAILURE
        }
    }
}

/// None: help was asked for.
fn parse(mut args: impl Iterator<Item = String>) -> Result<Option<Options>> {
    let mut options = Options {
        pg_config: "pg_config".into(),
        rounds: 11,
        seconds: 1,
        rows: Vec::new(),
        cycles: 30_000,
        minute: 60,
        only: Vec::new(),
    };
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
        match arg.as_str() {
            "--pg-config" => options.pg_config = value()?.into(),
            "--rounds" => options.rounds = at_least_one(&arg, &value()?)?,
            "--seconds" => options.seconds = at_least_one(&arg, &value()?)?,
            "--rows" => options.rows.push(at_least_one(&arg, &value()?)?),
            "--cycles" => options.cycles = at_least_one(&arg, &value()?)?,
            "--minute" => options.minute = at_least_one(&arg, &value()?)?,
            "--only" => {
                let name = value()?;
                if !GROUPS.contains(&name.as_str()) {
                    return Err(format!("--only {name}: not one of {}", GROUPS.join(", ")).into());
                }
                options.only.push(name);
            }
            "-h" | "--help" => return Ok(None),
            _ => return Err(format!("{arg} is not understood").into()),
        }
    }
    Ok(Some(options))
}

fn at_least_one(name: &str, text: &str) -> Result<u32> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err(format!("{name} {text}: not a positive whole number").into()),
    }
}

fn run(options: &Options) -> Result<()> {
    let wanted = |group: &str| options.only.is_empty() || options.only.iter().any(|o| o == group);
    let mut report = Report::default();
    let control =
        cluster::ask(&options.pg_config, "--sharedir")?.join("extension/leasehold.control");
    if !control.exists() {
        return Err(format!(
            "{} does not exist: run `make install` first",
            control.display()
        )
        .into());
    }

    // what the server takes without leasehold, before the cluster that everything else runs on
    let bare = if wanted("memory") {
        Some(memory::shared_bytes_bare(&options.pg_config)?)
    } else {
        None
    };

    let cluster = Cluster::with_leasehold(&options.pg_config, &[])?;
    let mut client = cluster.connect()?;
    let machine = machine::describe(&cluster, &mut client)?;
    eprintln!("{machine}");

    if wanted("acquire") {
        rates::acquire(options, &cluster, &mut report)?;
    }
    if wanted("held") {
        rates::held(options, &cluster, &mut report)?;
    }
    if wanted("renew") {
        rates::renew(options, &cluster, &mut report)?;
    }
    if wanted("update") {
        update::run(options, &cluster, &mut report)?;
    }
    if let Some(bare) = bare {
        memory::run(bare, &cluster, &mut report)?;
    }
    drop(client);
    drop(cluster);

    // each on servers of its own
    if wanted("memory-leases") {
        in_memory::run(options, &mut report)?;
    }

    if wanted("recovery") {
        recovery::run(options, &mut report)?;
    }

    if wanted("million") {
        million::run(options, &mut report)?;
    }

    if wanted("snapshot") {
        snapshot::run(options, &mut report)?;
    }

    if wanted("fairness") {
        fairness::run(options, &mut report)?;
    }

    if wanted("isolation") {
        isolation::run(options, &mut report)?;
    }

    if wanted("overload") {
        overload::run(options, &mut report)?;
    }

    println!("{machine}\n{report}");
    println!(
        "Medians of {} rounds of {} s, the competitors of a row in turn; in brackets the lowest and the highest.\n\
         The ratio of two rates is the median of the ratios within the rounds.",
        options.rounds, options.seconds
    );
    Ok(())
}

/// An error with its causes: the `postgres` crate says only "db error" by itself.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(args: &[&str]) -> Result<Option<Options>> {
        parse(args.iter().map(|a| a.to_string()))
    }

    #[test]
    fn every_option_is_taken() {
        let args = [
            "--pg-config",
            "/p",
            "--rounds",
            "7",
            "--seconds",
            "1",
            "--only",
            "held",
            "--only",
            "renew",
            "--rows",
            "10",
            "--rows",
            "20",
            "--cycles",
            "30",
            "--minute",
            "5",
        ];
        let options = parsed(&args).unwrap().unwrap();
        assert_eq!(options.pg_config, PathBuf::from("/p"));
        assert_eq!((options.rounds, options.seconds), (7, 1));
        assert_eq!(options.only, ["held", "renew"]);
        assert_eq!((options.rows_or(1), options.cycles), (vec![10, 20], 30));
        assert_eq!(options.minute, 5);
    }

    #[test]
    fn each_part_has_its_own_number_of_rows() {
        assert_eq!(parsed(&[]).unwrap().unwrap().rows_or(7), [7]);
    }

    #[test]
    fn nonsense_is_refused() {
        for args in [
            &["--rounds", "0"][..],
            &["--cycles", "0"],
            &["--seconds", "x"],
            &["--only", "all"],
            &["--rounds"],
            &["-x"],
        ] {
            assert!(parsed(args).is_err(), "{args:?}");
        }
    }
}

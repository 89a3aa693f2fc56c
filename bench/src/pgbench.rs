//! One run of pgbench, the yardstick that everybody can repeat: prepared statements, one script,
//! no vacuum. A run in which any transaction failed gives no figure, it is an error.

use std::fs;
use std::process::Stdio;

use crate::Result;
use crate::cluster::Cluster;
use crate::contest::{Load, Variables};

/// A script that any number of clients runs over and over.
pub struct Script {
    /// As pgbench's options take it.
    source: String,
    settings: &'static str,
}

/// What a run of a script came to.
pub struct Run {
    /// Transactions a second; a transaction is one pass through the script.
    pub rate: f64,
    /// Milliseconds of each of them.
    pub times: Vec<f64>,
}

impl Script {
    /// Puts the script beside the cluster. No colon may stand in it but before a variable: pgbench
    /// looks for variables inside of quotes too.
    pub fn new(cluster: &Cluster, name: &str, text: &str) -> Result<Self> {
        let path = cluster.dir().join(name).with_extension("sql");
        fs::write(&path, text)?;
        Ok(Script {
            source: format!("--file={}", path.display()),
            settings: "",
        })
    }

    /// One that pgbench brings along, on the tables that it makes.
    pub fn builtin(name: &str) -> Self {
        Script {
            source: format!("--builtin={name}"),
            settings: "",
        }
    }

    /// Command-line options of the server, such as `-c name=value`, for the sessions that run it.
    pub fn with_settings(mut self, settings: &'static str) -> Self {
        self.settings = settings;
        self
    }
}

impl Script {
    /// A run that notes how long each transaction took, which costs pgbench something.
    pub fn run_timed(
        &self,
        cluster: &Cluster,
        clients: u32,
        seconds: u32,
        variables: &Variables,
    ) -> Result<Run> {
        let dir = cluster.dir().join("transactions");
        fs::create_dir(&dir)?;
        let prefix = format!("--log-prefix={}", dir.join("log").display());
        let rate = self.run(cluster, clients, seconds, variables, &["--log", &prefix])?;
        let mut times = Vec::new();
        for file in fs::read_dir(&dir)? {
            times.extend(times_in(&fs::read_to_string(file?.path())?)?);
        }
        fs::remove_dir_all(&dir)?;
        Ok(Run { rate, times })
    }

    fn run(
        &self,
        cluster: &Cluster,
        clients: u32,
        seconds: u32,
        variables: &Variables,
        more: &[&str],
    ) -> Result<f64> {
        let mut command = cluster.client_program("pgbench");
        command.env("PGOPTIONS", self.settings);
        command.args(["--no-vacuum", "--protocol=prepared"]);
        command.arg(format!("--client={clients}"));
        command.arg(format!("--jobs={}", clients.min(cores())));
        command.arg(format!("--time={seconds}"));
        for (name, value) in variables {
            command.arg(format!("--define={name}={value}"));
        }
        command.args(more).arg(&self.source).arg("postgres");
        let output = command.stdin(Stdio::null()).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        match rate_in(&text) {
            Some(rate) if output.status.success() => Ok(rate),
            _ => Err(failure(&self.source, &text, &output.stderr)),
        }
    }
}

impl Load for Script {
    fn rate(
        &self,
        cluster: &Cluster,
        clients: u32,
        seconds: u32,
        variables: &Variables,
    ) -> Result<f64> {
        self.run(cluster, clients, seconds, variables, &[])
    }
}

/// None where pgbench gave no rate or had failed transactions.
fn rate_in(output: &str) -> Option<f64> {
    let after = |label: &str| output.lines().find_map(|line| line.strip_prefix(label));
    let first = |rest: &'_ str| rest.split_whitespace().next().map(String::from);
    if first(after("number of failed transactions: ")?)? != "0" {
        return None;
    }
    first(after("tps = ")?)?.parse().ok()
}

/// The milliseconds of each transaction, of a file that pgbench wrote.
fn times_in(log: &str) -> Result<Vec<f64>> {
    let time = |line: &str| -> Result<f64> {
        let us = line.split(' ').nth(2).and_then(|us| us.parse().ok());
        let us: f64 = us.ok_or_else(|| format!("pgbench logged: {line}"))?;
        Ok(us / 1e3)
    };
    log.lines().map(time).collect()
}

fn failure(script: &str, output: &str, errors: &[u8]) -> Box<dyn std::error::Error + Send + Sync> {
    let errors = String::from_utf8_lossy(errors);
    format!("pgbench with {script} failed\n{output}\n{errors}").into()
}

fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| n.get() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
number of transactions actually processed: 7338
number of failed transactions: 0 (0.000%)
latency average = 0.272 ms
initial connection time = 1.838 ms
tps = 3672.108226 (without initial connection time)
";

    #[test]
    fn rate_is_read() {
        assert_eq!(rate_in(OUTPUT), Some(3672.108226));
    }

    #[test]
    fn times_are_read() {
        let log = "0 199 2241 0 1175850568 995598\n1 200 500 0 1175850568 998079\n";
        assert_eq!(times_in(log).unwrap(), [2.241, 0.5]);
        assert!(times_in("0 1 failed 0 1175850568 995598\n").is_err());
    }

    #[test]
    fn no_rate_with_failed_transactions() {
        assert_eq!(
            rate_in(&OUTPUT.replace("transactions: 0 (0.000%)", "transactions: 1 (0.014%)")),
            None
        );
        assert_eq!(rate_in("pgbench: error"), None);
    }
}

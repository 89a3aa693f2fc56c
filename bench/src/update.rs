//! What a trigger adds to an UPDATE of many rows in one statement.
//!
//! Every run has a fresh table, the same but for its trigger, with room on each page for the new
//! version of its rows, so that the statement itself does little and the triggers' part shows. The
//! cost added in a round is the time of the statement less that of the round's run without a trigger.
//! It can be small beside the noise, so ratios are of the medians: within a round they may be anything.

use std::fs;
use std::time::Instant;

use postgres::{Client, Transaction};

use crate::cluster::Cluster;
use crate::leases::take;
use crate::report::{Figure, Ratio, Report, Target};
use crate::stats::{median, order, range};
use crate::{Options, Result};

const ROWS: u64 = 300_000;

/// Resources of the template; the rows of the table go through them in turn.
const GROUPS: u32 = 100;

/// Before the first round: what a home-made fence looks its tokens up in. As many rows as a lease
/// table would have, so that it uses its index.
const SET_UP: &str = "
CREATE TABLE bench_tokens (resource text PRIMARY KEY, token bigint NOT NULL);
INSERT INTO bench_tokens SELECT 'bench/' || n, 1 FROM generate_series(0, 9999) AS n;
ANALYZE bench_tokens;
CREATE FUNCTION bench_check() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    latest bigint;
BEGIN
    SELECT token INTO latest FROM bench_tokens WHERE resource = 'bench/' || NEW.grp;
    IF latest IS DISTINCT FROM current_setting('bench.token')::bigint THEN
        RAISE EXCEPTION 'stale token';
    END IF;
    RETURN NEW;
END $$";

/// A way to guard the table.
struct Variant {
    name: &'static str,
    /// Puts the trigger on the table `bench_rows`.
    attach: &'static str,
    /// In the transaction of the UPDATE, before it, not measured; has the first token of the leases.
    present: fn(&mut Transaction<'_>, first: i64) -> Result<()>,
    /// Whether a write without a token must be refused: a fence that does not stand costs nothing.
    fenced: bool,
}

/// The first is the one that all others are compared with.
const VARIANTS: [Variant; 5] = [
    Variant {
        name: "no trigger",
        attach: "",
        present: nothing,
        fenced: false,
    },
    Variant {
        name: "suppress_redundant_updates_trigger",
        attach: "CREATE TRIGGER guard BEFORE UPDATE ON bench_rows
                 FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()",
        present: nothing,
        fenced: false,
    },
    Variant {
        name: "PL/pgSQL trigger with a look-up",
        attach: "CREATE TRIGGER guard BEFORE UPDATE ON bench_rows FOR EACH ROW EXECUTE FUNCTION bench_check()",
        present: |transaction, _| Ok(transaction.batch_execute("SET LOCAL bench.token = '1'")?),
        fenced: false,
    },
    Variant {
        name: "fenced, constant resource",
        attach: "SELECT fence_table('bench_rows', 'bench/0')",
        present: |transaction, first| fence(transaction, first, 1),
        fenced: true,
    },
    Variant {
        name: "fenced, 100 resources alternating",
        attach: "SELECT fence_table('bench_rows', 'bench/{grp}')",
        present: |transaction, first| fence(transaction, first, GROUPS),
        fenced: true,
    },
];

const SUPPRESS: usize = 1;
const LOOK_UP: usize = 2;
const CONSTANT: usize = 3;
const TEMPLATE: usize = 4;

/// What one UPDATE took, in milliseconds.
#[derive(Clone, Copy)]
struct Cost {
    wall: f64,
    /// Of the backend; None where the operating system does not tell.
    cpu: Option<f64>,
}

/// The rows of the table that are about UPDATE.
pub fn run(options: &Options, cluster: &Cluster, report: &mut Report) -> Result<()> {
    let mut client = cluster.connect()?;
    client.batch_execute(SET_UP)?;
    let mut costs: [Vec<Cost>; VARIANTS.len()] = Default::default();
    // the first round warms up and is thrown away
    for round in 0..=options.rounds {
        for number in order(round, VARIANTS.len()) {
            let cost = VARIANTS[number].measure(&mut client)?;
            let cpu = cost
                .cpu
                .map_or(String::new(), |cpu| format!(", CPU {cpu:.0} ms"));
            eprintln!(
                "update, round {round}: {} {:.0} ms{cpu}",
                VARIANTS[number].name, cost.wall
            );
            if round > 0 {
                costs[number].push(cost);
            }
        }
    }
    let wall = costs
        .each_ref()
        .map(|costs| costs.iter().map(|cost| cost.wall).collect());
    compare(
        report,
        &[
            Target::AtMost(1.25),
            Target::AtMost(2.5),
            Target::AtMost(0.2),
        ],
        &Added::median(&wall),
    );
    // the least is what the processor needs when nothing else runs: for information, where it is known
    let cpu = costs
        .each_ref()
        .map(|costs| costs.iter().filter_map(|cost| cost.cpu).collect::<Vec<_>>());
    if cpu
        .iter()
        .all(|times| times.len() == options.rounds as usize)
    {
        compare(report, &[], &Added::least(&cpu));
    }
    Ok(())
}

/// What each variant adds to the first one, in milliseconds, and how that is printed.
struct Added {
    what: String,
    ms: [f64; VARIANTS.len()],
    printed: [String; VARIANTS.len()],
}

impl Added {
    fn median(times: &[Vec<f64>; VARIANTS.len()]) -> Self {
        let added = times
            .each_ref()
            .map(|times_of_one| differences(times_of_one, &times[0]));
        let what = format!(
            "added to {:.0} ms of an UPDATE of 300,000 rows",
            median(&times[0])
        );
        let printed = added.each_ref().map(|added| {
            let (low, high) = range(added);
            format!("{:.0} ms ({low:.0} to {high:.0})", median(added))
        });
        Added {
            what,
            ms: added.each_ref().map(|added| median(added)),
            printed,
        }
    }

    fn least(times: &[Vec<f64>; VARIANTS.len()]) -> Self {
        let least = times.each_ref().map(|times| range(times).0);
        let ms = least.map(|time| time - least[0]);
        let what = format!(
            "the same in CPU time, fastest rounds, added to {:.0} ms",
            least[0]
        );
        Added {
            what,
            ms,
            printed: ms.map(|ms| format!("{ms:.0} ms")),
        }
    }
}

/// Round by round.
fn differences(times: &[f64], others: &[f64]) -> Vec<f64> {
    times
        .iter()
        .zip(others)
        .map(|(time, other)| time - other)
        .collect()
}

/// The three rows of one kind of time; without targets they are for information.
fn compare(report: &mut Report, targets: &[Target], added: &Added) {
    let pairs = [
        (CONSTANT, SUPPRESS, "constant resource"),
        (TEMPLATE, SUPPRESS, "100 resources alternating"),
        (TEMPLATE, LOOK_UP, "100 resources alternating"),
    ];
    for (number, (ours, theirs, kind)) in pairs.into_iter().enumerate() {
        let ratio = Ratio {
            value: added.ms[ours] / added.ms[theirs],
            spread: String::new(),
        };
        let against = Figure {
            name: VARIANTS[theirs].name,
            value: added.printed[theirs].clone(),
        };
        let what = format!("{}, {kind}", added.what);
        report.ratio(
            &what,
            added.printed[ours].clone(),
            against,
            ratio,
            targets.get(number).copied(),
        );
    }
}

impl Variant {
    fn measure(&self, client: &mut Client) -> Result<Cost> {
        fresh_table(client, self.attach)?;
        let resources: Vec<String> = (0..GROUPS).map(|group| format!("bench/{group}")).collect();
        let first = take(client, &resources, "5 min")?;
        let pid = client.query_one("SELECT pg_backend_pid()", &[])?.get(0);
        let mut transaction = client.transaction()?;
        (self.present)(&mut transaction, first)?;
        let statement = transaction.prepare("UPDATE bench_rows SET amount = amount + 1")?;
        let (begin, cpu) = (Instant::now(), cpu_ms(pid));
        let rows = transaction.execute(&statement, &[])?;
        let wall = begin.elapsed().as_secs_f64() * 1e3;
        let cpu = cpu.zip(cpu_ms(pid)).map(|(before, after)| after - before);
        transaction.commit()?;
        if rows != ROWS {
            return Err(format!("{}: {rows} rows updated, not {ROWS}", self.name).into());
        }
        if self.fenced {
            expect_refusal(client)?;
        }
        Ok(Cost { wall, cpu })
    }
}

fn fresh_table(client: &mut Client, attach: &str) -> Result<()> {
    client.batch_execute(&format!(
        "DROP TABLE IF EXISTS bench_rows;
         CREATE TABLE bench_rows (id int PRIMARY KEY, grp int NOT NULL, amount bigint NOT NULL, note text NOT NULL)
             WITH (fillfactor = 45);
         INSERT INTO bench_rows SELECT n, n % {GROUPS}, n, 'row number ' || n FROM generate_series(1, {ROWS}) AS n;
         {attach}"
    ))?;
    client.batch_execute("VACUUM (ANALYZE) bench_rows")?;
    Ok(())
}

fn nothing(_: &mut Transaction<'_>, _: i64) -> Result<()> {
    Ok(())
}

/// Presents the tokens of the first `count` resources.
fn fence(transaction: &mut Transaction<'_>, first: i64, count: u32) -> Result<()> {
    let sql =
        "SELECT fence('bench/' || n, $1::bigint + n) FROM generate_series(0, $2::bigint - 1) AS n";
    transaction.execute(sql, &[&first, &i64::from(count)])?;
    Ok(())
}

fn expect_refusal(client: &mut Client) -> Result<()> {
    match client.execute("UPDATE bench_rows SET amount = 0 WHERE id = 1", &[]) {
        Err(error) if error.code().is_some_and(|state| state.code() == "LH003") => Ok(()),
        Err(error) => Err(error.into()),
        Ok(_) => Err("a write without a token was not refused: the table is not fenced".into()),
    }
}

/// Time that a process has spent on a processor. Other work on the machine blurs it less than the clock.
pub fn cpu_ms(pid: i32) -> Option<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/schedstat")).ok()?;
    let nanoseconds: f64 = text.split_whitespace().next()?.parse().ok()?;
    Some(nanoseconds / 1e6)
}

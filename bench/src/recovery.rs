//! Whether a large ledger lengthens the start of the server after a crash, or the first acquire after it.
//!
//! Servers that differ only in the number of rows of their ledger are crashed and started in turn, round after
//! round. Each is told to write a checkpoint before its crash, so that what is replayed does not depend on the
//! rows: what PostgreSQL replays of an application's writes is not leasehold's.

use std::time::{Duration, Instant};

use postgres::Client;

use crate::cluster::Cluster;
use crate::report::{Figure, Ratio, Report};
use crate::stats::{median, order, range, ratios};
use crate::{Options, Result};

/// What is measured beside an empty ledger where nothing else is asked for.
const ROWS: u32 = 100_000;

/// Rows that one transaction writes: the lock table bounds them.
const BATCH: u32 = 500;

const START_LIMIT: Duration = Duration::from_secs(120);

/// A server, its figures in milliseconds.
struct Subject {
    cluster: Cluster,
    rows: u32,
    start: Vec<f64>,
    first: Vec<f64>,
}

/// Two rows for each number of ledger rows above 0.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let mut subjects = Vec::new();
    for rows in std::iter::once(0).chain(options.rows_or(ROWS)) {
        subjects.push(Subject::new(options, rows)?);
    }
    // the first round warms up and is thrown away
    for round in 0..=options.rounds {
        for number in order(round, subjects.len()) {
            let subject = &mut subjects[number];
            let (start, first) = subject.crash_and_start(round)?;
            eprintln!(
                "recovery, round {round}: {} rows, start {start:.0} ms, first acquire {first:.1} ms",
                subject.rows
            );
            if round > 0 {
                subject.start.push(start);
                subject.first.push(first);
            }
        }
    }
    let (empty, others) = subjects.split_first().ok_or("no server")?;
    for subject in others {
        let rows = subject.rows;
        compare(
            report,
            &format!("start after a crash, {rows} ledger rows"),
            &subject.start,
            &empty.start,
        );
        compare(
            report,
            &format!("first acquire after it, {rows} ledger rows"),
            &subject.first,
            &empty.first,
        );
    }
    Ok(())
}

fn compare(report: &mut Report, what: &str, ours: &[f64], theirs: &[f64]) {
    let ratios = ratios(ours, theirs);
    let (low, high) = range(&ratios);
    let ratio = Ratio {
        value: median(&ratios),
        spread: format!(" ({low:.2} to {high:.2})"),
    };
    let against = Figure {
        name: "an empty ledger",
        value: milliseconds(theirs),
    };
    report.ratio(what, milliseconds(ours), against, ratio, None);
}

fn milliseconds(figures: &[f64]) -> String {
    let (low, high) = range(figures);
    format!("{:.1} ms ({low:.1} to {high:.1})", median(figures))
}

impl Subject {
    fn new(options: &Options, rows: u32) -> Result<Self> {
        let cluster = Cluster::with_leasehold(&options.pg_config, &[])?;
        let mut client = cluster.connect()?;
        fill(&mut client, "row", rows)?;
        let found: i64 = client
            .query_one("SELECT count(*) FROM leasehold.ledger", &[])?
            .get(0);
        if found != i64::from(rows) {
            return Err(format!("the ledger has {found} rows, not {rows}").into());
        }
        Ok(Subject {
            cluster,
            rows,
            start: Vec::new(),
            first: Vec::new(),
        })
    }

    /// Time until the server takes connections, and of the first acquire after it, of a new name.
    fn crash_and_start(&mut self, round: u32) -> Result<(f64, f64)> {
        self.cluster.connect()?.batch_execute("CHECKPOINT")?;
        self.cluster.crash()?;
        let begin = Instant::now();
        self.cluster.start_again()?;
        let mut client = loop {
            match self.cluster.connect() {
                Ok(client) => break client,
                Err(_) if begin.elapsed() < START_LIMIT => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(error),
            }
        };
        let start = begin.elapsed().as_secs_f64() * 1e3;
        let statement = client.prepare("SELECT acquire_lease($1)")?;
        let begin = Instant::now();
        let token: Option<i64> = client
            .query_one(&statement, &[&format!("first/{round}")])?
            .get(0);
        let first = begin.elapsed().as_secs_f64() * 1e3;
        token.ok_or("the first acquire was refused")?;
        Ok((start, first))
    }
}

/// Acquires and releases `count` resources once each.
pub fn fill(client: &mut Client, prefix: &str, count: u32) -> Result<()> {
    let statement = client.prepare(
        "SELECT count(*) FILTER (WHERE release_lease(resource, acquire_lease(resource)))
         FROM (SELECT $1 || '/' || n FROM generate_series($2::bigint, $3::bigint) AS n) AS r (resource)",
    )?;
    for first in (0..count).step_by(BATCH as usize) {
        let last = (first + BATCH).min(count) - 1;
        let done: i64 = client
            .query_one(&statement, &[&prefix, &i64::from(first), &i64::from(last)])?
            .get(0);
        if done != i64::from(last - first + 1) {
            return Err(format!("{done} resources of {first} to {last} were granted").into());
        }
    }
    Ok(())
}

//! Many resources that are used once each, as names with a date or a number in them are: what stays of them in
//! shared memory, in the backend, in the ledger and in its index.
//!
//! The ledger is filled, swept to its retention by the worker, vacuumed, and filled again with other names: what is
//! left over of a round would add up. Autovacuum is off so that the sizes are of a moment that
//! can be named; where it is on nobody need call VACUUM.

use std::thread::sleep;
use std::time::{Duration, Instant};

use postgres::Client;

use crate::cluster::Cluster;
use crate::memory::{self, Size, megabytes};
use crate::recovery::fill;
use crate::report::Report;
use crate::{Options, Result};

const RESOURCES: u32 = 1_000_000;

/// A round is filled in so many parts; the backend is as large as it gets after the first of them.
const PARTS: u32 = 10;

/// Rounds of other names, the first included.
const ROUNDS: u32 = 2;

/// Each number of resources, in memory and durable.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    for count in options.rows_or(RESOURCES) {
        for durability in ["memory", "durable"] {
            let cluster = Cluster::with_leasehold(&options.pg_config, &[])?;
            Rounds::new(&cluster, durability, count)?.run(report)?;
        }
    }
    Ok(())
}

/// The rounds of one server.
struct Rounds<'a> {
    cluster: &'a Cluster,
    durability: &'static str,
    count: u32,
    /// Who acquires and releases: one session for all of it.
    client: Client,
    /// For the row names.
    of: String,
}

impl<'a> Rounds<'a> {
    fn new(cluster: &'a Cluster, durability: &'static str, count: u32) -> Result<Self> {
        let mut client = cluster.connect()?;
        client.batch_execute(&format!("SET leasehold.durability = {durability}"))?;
        Ok(Rounds {
            cluster,
            durability,
            count,
            client,
            of: format!("{count} resources once, {durability}"),
        })
    }

    fn run(&mut self, report: &mut Report) -> Result<()> {
        let shared = memory::shared_bytes(&mut self.client, LEASEHOLD)?;
        let first = self.fill(1, Some(report))?;
        let now = memory::shared_bytes(&mut self.client, LEASEHOLD)?;
        report.figure(
            &format!("shared memory after {}", self.of),
            format!("{:.2} MB", megabytes(now)),
            &format!("{:.2} MB as at the start", megabytes(shared)),
            now == shared,
        );
        report.note(&format!("ledger after {}", self.of), first.to_string());
        if self.durability == "memory" {
            return Ok(());
        }
        for round in 2..=ROUNDS {
            self.sweep(report)?;
            let again = self.fill(round, None)?;
            for (part, size, before) in [
                ("table", again.table, first.table),
                ("index", again.index, first.index),
            ] {
                let what = format!("ledger's {part}, round {round} of {}", self.of);
                report.size(&what, size, "round 1", before);
            }
        }
        Ok(())
    }

    /// Acquires and releases every resource of a round once. With a report: also whether the backend grows.
    fn fill(&mut self, round: u32, report: Option<&mut Report>) -> Result<Ledger> {
        let begin = Instant::now();
        let mut sizes = Vec::new();
        for part in 0..PARTS {
            let first = self.count / PARTS * part;
            let last = if part + 1 == PARTS {
                self.count
            } else {
                first + self.count / PARTS
            };
            fill(
                &mut self.client,
                &format!("round/{round}/{part}"),
                last - first,
            )?;
            let size = Size::of(&mut self.client)?;
            eprintln!("{}, round {round}: {last} done, {size}", self.of);
            sizes.push(size);
        }
        let seconds = begin.elapsed().as_secs_f64();
        if let (Some(report), [first, .., last]) = (report, sizes.as_slice()) {
            report.note(
                &format!("rate of {}, 500 a transaction", self.of),
                format!("{:.0}/s", f64::from(self.count) / seconds),
            );
            let over = format!("from a tenth to all of {}", self.of);
            last.growth_since(*first, &over, report);
        }
        let ledger = Ledger::of(&mut self.client)?;
        eprintln!("{}, round {round}: {ledger} after {seconds:.1} s", self.of);
        Ok(ledger)
    }

    /// Shortens the retention until the worker has deleted every row, then vacuums.
    fn sweep(&mut self, report: &mut Report) -> Result<()> {
        let mut admin = self.cluster.connect()?;
        let rows = Ledger::of(&mut admin)?.rows;
        admin.batch_execute("ALTER SYSTEM SET leasehold.ledger_retention = '1s'")?;
        admin.batch_execute("SELECT pg_reload_conf()")?;
        let begin = Instant::now();
        wait_until_empty(&mut admin, &self.of)?;
        let seconds = begin.elapsed().as_secs_f64();
        admin.batch_execute("ALTER SYSTEM RESET leasehold.ledger_retention")?;
        admin.batch_execute("SELECT pg_reload_conf()")?;
        let swept = Ledger::of(&mut admin)?;
        // an index page that a VACUUM empties is free for use after the next one that comes after a transaction
        for _ in 0..2 {
            admin.batch_execute("VACUUM leasehold.ledger")?;
            admin.batch_execute("SELECT pg_current_xact_id()")?;
        }
        let vacuumed = Ledger::of(&mut admin)?;
        eprintln!("{}: swept {swept}; vacuumed {vacuumed}", self.of);
        report.figure(
            &format!("ledger swept to its retention after {}", self.of),
            format!("{seconds:.1} s, {:.0} rows/s", rows as f64 / seconds),
            "no row left",
            swept.rows == 0,
        );
        report.note("  and vacuumed", vacuumed.to_string());
        Ok(())
    }
}

const LEASEHOLD: &str = "name ILIKE 'leasehold%'";

/// The worker tells nobody when it is done, so the rows are counted, but not so often that it is slowed down; no
/// progress is an error.
fn wait_until_empty(client: &mut Client, of: &str) -> Result<()> {
    const STUCK: Duration = Duration::from_secs(60);
    let (mut last, mut since) = (i64::MAX, Instant::now());
    loop {
        let rows = Ledger::of(client)?.rows;
        if rows == 0 {
            return Ok(());
        }
        if rows < last {
            (last, since) = (rows, Instant::now());
            eprintln!("{of}: {rows} rows to sweep");
        } else if since.elapsed() > STUCK {
            return Err(format!("{rows} rows of the ledger are not swept").into());
        }
        sleep(Duration::from_secs(1));
    }
}

/// How large the ledger is.
struct Ledger {
    rows: i64,
    table: i64,
    index: i64,
}

impl Ledger {
    fn of(client: &mut Client) -> Result<Self> {
        let row = client.query_one(
            "SELECT count(*), pg_table_size('leasehold.ledger'), pg_indexes_size('leasehold.ledger')
             FROM leasehold.ledger",
            &[],
        )?;
        Ok(Ledger {
            rows: row.get(0),
            table: row.get(1),
            index: row.get(2),
        })
    }
}

impl std::fmt::Display for Ledger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} rows, table {:.1} MB, index {:.1} MB",
            self.rows,
            megabytes(self.table),
            megabytes(self.index)
        )
    }
}

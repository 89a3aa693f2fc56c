//! Whether leases get slower, or their ledger larger, under a snapshot that someone holds open for long: a report,
//! a dump, a forgotten transaction. What leaves dead row versions behind does, as no VACUUM can take them away.
//!
//! One session takes the same thousand resources in turn. Its cycles are set against those on a second server where
//! nobody holds a snapshot, slice by slice in turn, so that the load of the machine can be told from the age of the
//! snapshot; and against a lock table under the same snapshot, whose growth shows that the snapshot is held.

use std::time::Instant;

use postgres::{Client, IsolationLevel, Statement};

use crate::cluster::Cluster;
use crate::recovery::fill;
use crate::report::{Figure, Ratio, Report, Target};
use crate::stats::{median, order, percentile, range};
use crate::update::cpu_ms;
use crate::{Options, Result};

const RESOURCES: u32 = 1_000;
const TENTHS: u32 = 10;
/// Turns of each competitor in a tenth of the run.
const SLICES: u32 = 50;

const LOCK_TABLE: &str = "
CREATE TABLE bench_lock (
    resource text PRIMARY KEY,
    holder text NOT NULL,
    token bigint NOT NULL,
    expires_at timestamptz NOT NULL);
INSERT INTO bench_lock SELECT 'hot/' || n, 'worker', 0, '-infinity' FROM generate_series(0, 999) AS n;";

/// The calls of a competitor: the first answers a token, the second true.
struct Calls {
    acquire: &'static str,
    release: &'static str,
    relation: &'static str,
}

const LEASEHOLD: Calls = Calls {
    acquire: "SELECT acquire_lease($1)",
    release: "SELECT release_lease($1, $2)",
    relation: "leasehold.ledger",
};

const LOCK: Calls = Calls {
    acquire: "INSERT INTO bench_lock AS l (resource, holder, token, expires_at)
        VALUES ($1, 'worker', 1, clock_timestamp() + interval '30 s')
        ON CONFLICT (resource) DO UPDATE SET holder = excluded.holder, token = l.token + 1, expires_at = excluded.expires_at
        WHERE l.expires_at <= clock_timestamp() RETURNING token",
    release: "UPDATE bench_lock SET expires_at = '-infinity' WHERE resource = $1 AND token = $2 RETURNING true",
    relation: "bench_lock",
};

/// Rows about the last tenth against the first, of each competitor.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let (held, free) = (prepare(options)?, prepare(options)?);
    let mut holder = held.connect()?;
    let mut snapshot = holder
        .build_transaction()
        .isolation_level(IsolationLevel::RepeatableRead)
        .read_only(true)
        .start()?;
    snapshot.batch_execute("SELECT count(*) FROM bench_lock")?;
    let mut subjects = [
        Subject::new(&held, "leasehold, snapshot held", &LEASEHOLD)?,
        Subject::new(&free, "leasehold, no snapshot", &LEASEHOLD)?,
        Subject::new(&held, "lock table, snapshot held", &LOCK)?,
    ];
    let slice = (options.cycles / TENTHS / SLICES).max(1);
    for tenth in 1..=TENTHS {
        for round in 0..SLICES {
            for number in order(round, subjects.len()) {
                subjects[number].run(slice)?;
            }
        }
        for subject in &mut subjects {
            let figures = subject.close_tenth();
            eprintln!("{}, tenth {tenth}: {figures}", subject.name);
        }
    }
    // a snapshot that is not what it was would make all this a figure of nothing
    let seen: i64 = snapshot
        .query_one("SELECT max(token) FROM bench_lock", &[])?
        .get(0);
    if seen != 0 {
        return Err("the snapshot was not held".into());
    }
    snapshot.commit()?;
    let what = format!(
        "{} acquire + release of {RESOURCES} resources",
        slice * SLICES * TENTHS
    );
    for subject in &mut subjects {
        // what we promise is about leasehold under the snapshot
        subject.report(&what, subject.name == "leasehold, snapshot held", report)?;
    }
    compare(&what, &subjects[0], &subjects[1], report)
}

/// A server where every resource is known to leasehold and to the lock table.
fn prepare(options: &Options) -> Result<Cluster> {
    let cluster = Cluster::with_leasehold(&options.pg_config, &[])?;
    let mut client = cluster.connect()?;
    fill(&mut client, "hot", RESOURCES)?;
    client.batch_execute(LOCK_TABLE)?;
    Ok(cluster)
}

/// What became of leasehold under the snapshot, over what became of it without: what the machine did falls out.
fn compare(what: &str, ours: &Subject, theirs: &Subject, report: &mut Report) -> Result<()> {
    for (ours, theirs) in ours.changes()?.into_iter().zip(theirs.changes()?) {
        report.ratio(
            &format!("{what}: {}, last tenth to first", ours.kind),
            format!("{:.2}", ours.ratio),
            Figure {
                name: "without a snapshot",
                value: format!("{:.2}", theirs.ratio),
            },
            Ratio {
                value: ours.ratio / theirs.ratio,
                spread: String::new(),
            },
            Some(ours.target),
        );
    }
    Ok(())
}

/// A figure of the last tenth against that of the first.
struct Change {
    kind: &'static str,
    now: String,
    then: String,
    ratio: f64,
    target: Target,
}

/// A competitor, and what its relation took before.
struct Subject {
    name: &'static str,
    client: Client,
    calls: &'static Calls,
    acquire: Statement,
    release: Statement,
    next: u32,
    pid: i32,
    /// What the backend has used before the running tenth.
    cpu: Option<f64>,
    /// Of the running tenth: passes a second of each slice, and milliseconds of each cycle.
    rates: Vec<f64>,
    times: Vec<f64>,
    tenths: Vec<Tenth>,
    before: Sizes,
}

impl Subject {
    /// Goes through all resources once, so that no first touch is measured.
    fn new(cluster: &Cluster, name: &'static str, calls: &'static Calls) -> Result<Self> {
        let mut client = cluster.connect()?;
        let (acquire, release) = (
            client.prepare(calls.acquire)?,
            client.prepare(calls.release)?,
        );
        let before = Sizes::of(&mut client, calls.relation)?;
        let mut subject = Subject {
            name,
            calls,
            acquire,
            release,
            next: 0,
            pid: client.query_one("SELECT pg_backend_pid()", &[])?.get(0),
            cpu: None,
            rates: Vec::new(),
            times: Vec::new(),
            tenths: Vec::new(),
            before,
            client,
        };
        subject.run(RESOURCES)?;
        subject.rates.clear();
        subject.times.clear();
        subject.cpu = cpu_ms(subject.pid);
        Ok(subject)
    }

    /// A slice of so many cycles.
    fn run(&mut self, cycles: u32) -> Result<()> {
        let begin = Instant::now();
        for _ in 0..cycles {
            let name = format!("hot/{}", self.next % RESOURCES);
            self.next = self.next.wrapping_add(1);
            let begin = Instant::now();
            let token: Option<i64> = match self.client.query_opt(&self.acquire, &[&name])? {
                Some(row) => row.get(0),
                None => None,
            };
            let token = token.ok_or_else(|| format!("{}: {name} is held", self.name))?;
            let done: bool = self
                .client
                .query_one(&self.release, &[&name, &token])?
                .get(0);
            self.times.push(begin.elapsed().as_secs_f64() * 1e3);
            if !done {
                return Err(format!("{}: {name} was not released", self.name).into());
            }
        }
        self.rates
            .push(f64::from(cycles) / begin.elapsed().as_secs_f64());
        Ok(())
    }

    fn close_tenth(&mut self) -> String {
        let times = std::mem::take(&mut self.times);
        let cpu = cpu_ms(self.pid);
        let tenth = Tenth {
            rates: std::mem::take(&mut self.rates),
            p50: percentile(&times, 0.5),
            p99: percentile(&times, 0.99),
            cpu: cpu
                .zip(self.cpu)
                .map(|(after, before)| (after - before) / times.len() as f64),
        };
        self.cpu = cpu;
        let cpu = tenth
            .cpu
            .map_or(String::new(), |cpu| format!(", CPU {cpu:.3} ms"));
        let text = format!(
            "{}, p50 {:.3} ms, p99 {:.3} ms{cpu}",
            tenth.rate(),
            tenth.p50,
            tenth.p99
        );
        self.tenths.push(tenth);
        text
    }

    /// The last tenth against the first.
    fn changes(&self) -> Result<Vec<Change>> {
        let first = self.tenths.first().ok_or("no tenth")?;
        let last = self.tenths.last().ok_or("no tenth")?;
        let mut changes = vec![Change {
            kind: "rate",
            now: last.rate(),
            then: first.rate(),
            ratio: median(&last.rates) / median(&first.rates),
            target: Target::AtLeast(0.9),
        }];
        let mut time = |kind, now: f64, then: f64| {
            changes.push(Change {
                kind,
                now: format!("{now:.3} ms"),
                then: format!("{then:.3} ms"),
                ratio: now / then,
                target: Target::AtMost(1.1),
            });
        };
        time("p50", last.p50, first.p50);
        time("p99", last.p99, first.p99);
        if let (Some(now), Some(then)) = (last.cpu, first.cpu) {
            time("CPU time of the backend", now, then);
        }
        Ok(changes)
    }

    /// The last tenth against the first, and the sizes after against those before.
    fn report(&mut self, what: &str, judged: bool, report: &mut Report) -> Result<()> {
        for change in self.changes()? {
            report.ratio(
                &format!("{what}, {}: {}, last tenth", self.name, change.kind),
                change.now,
                Figure {
                    name: "first tenth",
                    value: change.then,
                },
                Ratio {
                    value: change.ratio,
                    spread: String::new(),
                },
                judged.then_some(change.target),
            );
        }
        let after = Sizes::of(&mut self.client, self.calls.relation)?;
        let pairs = [
            ("table", after.table, self.before.table),
            ("index", after.index, self.before.index),
        ];
        for (part, now, then) in pairs {
            report.size(&format!("  its {part} after it"), now, "before", then);
        }
        Ok(())
    }
}

/// A tenth of the run of a competitor.
struct Tenth {
    /// Cycles a second, slice by slice.
    rates: Vec<f64>,
    /// Milliseconds of a cycle.
    p50: f64,
    p99: f64,
    /// Milliseconds of the backend on a processor for a cycle; None where the operating system does not tell.
    cpu: Option<f64>,
}

impl Tenth {
    fn rate(&self) -> String {
        let (low, high) = range(&self.rates);
        format!("{:.0}/s ({low:.0} to {high:.0})", median(&self.rates))
    }
}

/// Bytes of a relation and its indexes.
struct Sizes {
    table: i64,
    index: i64,
}

impl Sizes {
    fn of(client: &mut Client, relation: &str) -> Result<Self> {
        let row = client.query_one(
            "SELECT pg_table_size(to_regclass($1)), pg_indexes_size(to_regclass($1))",
            &[&relation],
        )?;
        Ok(Sizes {
            table: row.get(0),
            index: row.get(1),
        })
    }
}

//! Memory: what leasehold takes of the shared memory, and whether a backend grows with its calls.

use std::path::Path;
use std::{fmt, fs};

use postgres::Client;

use crate::Result;
use crate::cluster::Cluster;
use crate::report::Report;

const LEASES: &str = "16384";
const SHARED_BYTES_MAX: i64 = 16 << 20;

/// Calls of leasehold in one turn of the procedure: kept in step with its text.
const CALLS_PER_TURN: u32 = 20;
const TURNS: u32 = 50_000;

/// The turns go in so many parts, with a line on the terminal after each: a leak shows as a slope.
const PARTS: u32 = 10;

/// Before the first measurement, so that caches of the backend are as full as they get.
const TURNS_TO_WARM_UP: u32 = 5_000;

/// Growth below this is not growth with the number of calls: a tenth of a byte each.
const GROWTH_BYTES_MAX: i64 = 100_000;

/// Each turn is a transaction of its own, with grants, refusals of every kind, renewals, fenced
/// writes and a release. A call that answers other than it must ends the run.
const SET_UP: &str = "
CREATE TABLE bench_memory (id int PRIMARY KEY, amount bigint NOT NULL);
INSERT INTO bench_memory SELECT n, 0 FROM generate_series(0, 999) AS n;
SELECT fence_table('bench_memory', 'memory/{id}');
CREATE PROCEDURE bench_calls(turns int) LANGUAGE plpgsql AS $$
DECLARE
    name text;
    granted bigint;
BEGIN
    FOR turn IN 1..turns LOOP
        name := 'memory/' || turn % 1000;
        granted := acquire_lease(name);
        ASSERT granted > 0, 'acquire';
        FOR again IN 1..4 LOOP
            ASSERT acquire_lease(name) IS NULL, 'acquire of a held lease';
            ASSERT renew_lease(name, granted), 'renew';
            ASSERT check_fence(name, granted), 'check';
            UPDATE bench_memory SET amount = amount + 1 WHERE id = turn % 1000;
            ASSERT FOUND, 'fenced write';
        END LOOP;
        BEGIN
            UPDATE bench_memory SET amount = 0 WHERE id = (turn + 1) % 1000;
            ASSERT false, 'write without a token';
        EXCEPTION WHEN SQLSTATE 'LH003' THEN
            NULL;
        END;
        BEGIN
            PERFORM fence(name, granted - 1);
            ASSERT false, 'fence with an old token';
        EXCEPTION WHEN SQLSTATE 'LH001' THEN
            NULL;
        END;
        ASSERT release_lease(name, granted), 'release';
        COMMIT;
    END LOOP;
END $$";

/// Shared memory of a server without leasehold, in bytes.
pub fn shared_bytes_bare(pg_config: &Path) -> Result<i64> {
    let cluster = Cluster::start(pg_config, &[])?;
    shared_bytes(&mut cluster.connect()?, "true")
}

/// The two rows about memory; `bare` is the shared memory without leasehold.
pub fn run(bare: i64, cluster: &Cluster, report: &mut Report) -> Result<()> {
    let mut client = cluster.connect()?;
    shared(&mut client, bare, report)?;
    backend(&mut client, report)
}

/// What the operating system gives more than without leasehold counts, not only what bears its name:
/// parts of a hash table have none.
fn shared(client: &mut Client, bare: i64, report: &mut Report) -> Result<()> {
    let leases: String = client
        .query_one("SELECT current_setting('leasehold.max_leases')", &[])?
        .get(0);
    if leases != LEASES {
        return Err(format!("leasehold.max_leases is {leases}, not {LEASES}").into());
    }
    let all = shared_bytes(client, "true")? - bare;
    let named = shared_bytes(client, "name ILIKE 'leasehold%'")?;
    let what = format!("shared memory, max_leases = {LEASES}");
    let ours = format!(
        "{:.1} MB ({:.1} MB by name)",
        megabytes(all),
        megabytes(named)
    );
    report.figure(
        &what,
        ours,
        "under 16 MB",
        all.max(named) < SHARED_BYTES_MAX,
    );
    Ok(())
}

pub fn shared_bytes(client: &mut Client, condition: &str) -> Result<i64> {
    let sql = format!(
        "SELECT coalesce(sum(allocated_size), 0)::bigint FROM pg_shmem_allocations WHERE {condition}"
    );
    Ok(client.query_one(&sql, &[])?.get(0))
}

pub fn megabytes(bytes: i64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn backend(client: &mut Client, report: &mut Report) -> Result<()> {
    client.batch_execute(SET_UP)?;
    client.batch_execute(&format!("CALL bench_calls({TURNS_TO_WARM_UP})"))?;
    let before = Size::of(client)?;
    let mut after = before;
    for part in 1..=PARTS {
        client.batch_execute(&format!("CALL bench_calls({})", TURNS / PARTS))?;
        after = Size::of(client)?;
        let calls = part * TURNS / PARTS * CALLS_PER_TURN;
        eprintln!("memory, {calls} calls in one backend: {after}");
    }
    after.growth_since(
        before,
        &format!("over {} calls", TURNS * CALLS_PER_TURN),
        report,
    );
    Ok(())
}

/// How large the backend of a session is, in bytes.
#[derive(Clone, Copy)]
pub struct Size {
    /// All memory contexts.
    contexts: i64,
    /// Private memory in use, PostgreSQL's or not; None where the operating system does not tell.
    resident: Option<i64>,
}

impl Size {
    pub fn of(client: &mut Client) -> Result<Self> {
        let sql =
            "SELECT sum(total_bytes)::bigint, pg_backend_pid() FROM pg_backend_memory_contexts";
        let row = client.query_one(sql, &[])?;
        Ok(Size {
            contexts: row.get(0),
            resident: resident(row.get(1)),
        })
    }

    /// The row about it.
    pub fn growth_since(self, before: Size, over: &str, report: &mut Report) {
        let contexts = self.contexts - before.contexts;
        let resident = self
            .resident
            .zip(before.resident)
            .map(|(after, before)| after - before);
        let ours = match resident {
            Some(resident) => format!("{contexts:+} bytes in contexts, {resident:+} bytes RssAnon"),
            None => format!("{contexts:+} bytes in contexts"),
        };
        report.figure(
            &format!("growth of a backend {over}"),
            ours,
            "none",
            contexts.max(resident.unwrap_or(0)) < GROWTH_BYTES_MAX,
        );
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes in contexts", self.contexts)?;
        self.resident
            .map_or(Ok(()), |resident| write!(f, ", {resident} bytes RssAnon"))
    }
}

fn resident(pid: i32) -> Option<i64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kilobytes: i64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kilobytes * 1024)
}

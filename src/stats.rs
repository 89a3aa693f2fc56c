//! What is counted, for each database: how often what has happened, and how long it took.
//!
//! Counting is an addition in shared memory, without a lock: it cannot fail, and is done wherever things happen, under
//! locks and at the end of transactions too. Where a database is not known yet nothing is counted.

use std::sync::atomic::Ordering;

use leasehold_core::histogram::{bucket_of, quantile};

use crate::errors::{Answer, code};
use crate::pg::counters::{Counters, of_place};
use crate::pg::fmgr::{Call, Value};
use crate::pg::srf::{Field, Rows};
use crate::{api, ledger, pg, resources, sql_function, table};

sql_function!(leasehold_all_stats, pg_finfo_leasehold_all_stats, all_stats);
sql_function!(
    leasehold_reset_stats,
    pg_finfo_leasehold_reset_stats,
    reset_stats
);

/// What is counted, in the order of the view's columns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Count {
    /// Leases that were granted.
    Grants,
    /// Acquires that answered NULL.
    Denials,
    /// Acquires that were refused with LH005.
    Sheds,
    /// Acquires that had to wait.
    Waits,
    /// Renewals.
    Renewals,
    /// Releases.
    Releases,
    /// Leases that ran out, as far as somebody has noticed.
    Expiries,
    /// Grants over a lease that ran out.
    Takeovers,
    /// Grants that had to wait for old transactions.
    Drains,
    /// Sessions that were ended, or whose statement was cancelled, because they held up a lease.
    SessionsEnded,
    /// Verdicts on a token for a write or `fence()`.
    FenceChecks,
    /// Errors LH001 to LH006.
    RefusedStale,
    RefusedUnknown,
    RefusedNone,
    RefusedOver,
    RefusedShed,
    RefusedFull,
}

/// How many there are.
pub const COUNTS: usize = Count::RefusedFull as usize + 1;

fn of(database: pg::Oid) -> Option<&'static Counters> {
    of_place(table::with_known_database(database, |known| known.place)?)
}

/// Counts one, in this database.
pub fn count(what: Count) {
    count_in(pg::database(), what);
}

/// Counts one.
pub fn count_in(database: pg::Oid, what: Count) {
    if let Some(stats) = of(database) {
        stats.counts[what as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts how long somebody waited.
pub fn waited(us: i64) {
    if let Some(stats) = of(pg::database()) {
        stats.waits[bucket_of(us)].fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts how long a lease was held.
pub fn held(us: i64) {
    if let Some(stats) = of(pg::database()) {
        stats.holds[bucket_of(us)].fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts a refusal, by its SQLSTATE.
pub fn refused(sqlstate: &str) {
    let what = match sqlstate {
        code::STALE_TOKEN => Count::RefusedStale,
        code::UNKNOWN_TOKEN => Count::RefusedUnknown,
        code::NO_TOKEN => Count::RefusedNone,
        code::LEASE_OVER => Count::RefusedOver,
        code::SHED => Count::RefusedShed,
        code::TABLE_FULL => Count::RefusedFull,
        _ => return,
    };
    count(what);
}

/// Of a database that is new in its place.
pub fn forget(place: u32) {
    if let Some(stats) = of_place(place) {
        zero(stats);
    }
}

fn zero(counters: &Counters) {
    let counts = counters.counts.iter();
    counts.for_each(|count| count.store(0, Ordering::Relaxed));
    let buckets = counters.waits.iter().chain(&counters.holds);
    buckets.for_each(|count| count.store(0, Ordering::Relaxed));
}

/// This database's, where the calls that need the shared table can be made.
fn checked_own() -> Answer<Option<&'static Counters>> {
    api::check_preloaded()?;
    let ledger = ledger::oid()?;
    if pg::in_recovery() {
        return Ok(None);
    }
    let database = resources::database(ledger)?;
    Ok(of_place(database.place))
}

/// leasehold.all_stats() RETURNS TABLE: what the view leasehold.stats shows
fn all_stats(call: &Call) -> Answer<Value> {
    let stats = checked_own()?;
    let mut rows = Rows::start(call);
    let Some(stats) = stats else {
        return Ok(Value::Void);
    };
    let mut fields = vec![match stats.since.load(Ordering::Relaxed) {
        0 => Field::Timestamp(pg::server_start()),
        since => Field::Timestamp(since),
    }];
    let counts = stats.counts.iter();
    fields.extend(counts.map(|count| Field::I64(count.load(Ordering::Relaxed) as i64)));
    for durations in [&stats.waits, &stats.holds] {
        let counts: Vec<u32> = durations
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .collect();
        for part in [0.5, 0.99] {
            let ms = quantile(&counts, part).map(|us| us / 1000.0);
            fields.push(ms.map_or(Field::Null, Field::F64));
        }
    }
    rows.push(&fields);
    Ok(Value::Void)
}

/// leasehold.reset_stats() RETURNS void
fn reset_stats(_call: &Call) -> Answer<Value> {
    if let Some(stats) = checked_own()? {
        zero(stats);
        stats.since.store(pg::wall_clock(), Ordering::Relaxed);
        table::reset_contention(pg::database(), ledger::oid()?);
    }
    Ok(Value::Void)
}

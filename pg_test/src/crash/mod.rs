//! Layer crash: a server dies again and again under a load of acquires, fenced writes and releases, and nothing that it
//! has promised is broken; and what a single kill must not take along.
//!
//! The load and its judge are those of layer chaos, with one kind of blow at a time: a failure here says which it was.

pub mod wall_clock;

use crate::chaos::{self, Counts, Kind, Plan};
use crate::cluster::{Db, Stop};

crate::tests![
    killed_backends,
    killed_postmasters,
    immediate_restarts,
    tokens_of_an_aborted_block_are_not_used_again,
    grant_outlives_a_kill_whatever_the_session_set,
    renewal_outlives_a_kill_whatever_the_session_set,
];

const BLOWS: u64 = 7;

fn killed_backends() {
    survives(Counts {
        crashes: BLOWS,
        ..Counts::default()
    });
}

fn killed_postmasters() {
    survives(Counts {
        kills: BLOWS,
        ..Counts::default()
    });
}

fn immediate_restarts() {
    survives(Counts {
        immediate: BLOWS,
        ..Counts::default()
    });
}

/// With a table so small that entries are pushed out of it and come back from the ledger all the time.
fn survives(counts: Counts) {
    let plan = Plan::new(chaos::seed(), Kind::Alone, counts);
    chaos::survives(&plan, &[chaos::SMALL_TABLE]);
}

/// A block of tokens is on disk before one of them is handed out. A committed grant would flush it by itself, so only a
/// token whose transaction was never committed can show this. The position is far above what the wall clock gives, as
/// after a promotion: the clock must not hide a lost block either.
fn tokens_of_an_aborted_block_are_not_used_again() {
    let db = lazy_database();
    db.session()
        .exec("SELECT setval('leasehold.token_seq', (1::bigint << 50) + (1::bigint << 44))");
    let mut last = (1 << 50) + (1 << 44);
    for _ in 0..3 {
        db.cluster.restart(Stop::Immediate);
        let mut session = db.session();
        session.exec("CHECKPOINT; BEGIN");
        let token = session.acquire("r");
        assert!(token > last, "{token} after {last}");
        last = token;
        session.exec("ROLLBACK");
        db.cluster.kill_postmaster();
        db.cluster.start();
    }
    let token = db.session().acquire("r");
    assert!(token > last, "{token} after {last}");
}

/// A grant is on disk when its client hears of it, even where the session does not wait for its commits.
fn grant_outlives_a_kill_whatever_the_session_set() {
    let db = lazy_database();
    // before the grant, and what the last word on the transaction is after it
    let ways = [
        ("SET synchronous_commit = off", "SELECT 1"),
        ("BEGIN", "SET LOCAL synchronous_commit = off; COMMIT"),
        ("BEGIN", "SET synchronous_commit = off; COMMIT"),
        (
            "BEGIN; SET LOCAL synchronous_commit = off; SAVEPOINT a",
            "RELEASE a; SET LOCAL synchronous_commit = off; COMMIT",
        ),
        ("ALTER ROLE lazy SET synchronous_commit = off", "SELECT 1"),
    ];
    db.session()
        .exec("CREATE ROLE lazy LOGIN SUPERUSER; CHECKPOINT");
    for (round, (before, after)) in ways.iter().enumerate() {
        let resource = format!("r{round}");
        let mut session = db.session_as("lazy");
        // the first grant since the start reserves tokens, which flushes
        session.acquire(&format!("first{round}"));
        session.exec("CHECKPOINT");
        session.exec(before);
        if before.starts_with("ALTER ROLE") {
            session = db.session_as("lazy");
            session.exec("CHECKPOINT");
        }
        let token = session.acquire(&resource);
        session.exec(after);
        db.cluster.kill_postmaster();
        db.cluster.start();
        let mut session = db.session();
        assert_eq!(
            session.try_acquire(&resource),
            None,
            "the grant is lost: {before}; {after}"
        );
        assert!(session.renew(&resource, token), "the lease is lost");
    }
}

/// So is a longer TTL when its holder hears of it.
fn renewal_outlives_a_kill_whatever_the_session_set() {
    let db = lazy_database();
    let ways = [
        ("SET synchronous_commit = off", "SELECT 1"),
        ("BEGIN", "SET LOCAL synchronous_commit = off; COMMIT"),
    ];
    for (round, (before, after)) in ways.iter().enumerate() {
        let resource = format!("r{round}");
        let mut session = db.session();
        let token: i64 = session.one_with("SELECT acquire_lease($1, ttl => '1min')", &[&resource]);
        session.exec("CHECKPOINT");
        session.exec(before);
        let renewed: bool =
            session.one_with("SELECT renew_lease($1, $2, '5min')", &[&resource, &token]);
        assert!(renewed);
        session.exec(after);
        db.cluster.kill_postmaster();
        db.cluster.start();
        let mut session = db.session();
        assert!(
            session.info_says(&resource, "ttl = '5min'::interval"),
            "the longer ttl is lost: {before}; {after}"
        );
        assert!(session.renew(&resource, token));
    }
}

/// A server on which nothing flushes WAL that nobody waits for.
fn lazy_database() -> Db {
    Db::with(&[
        ("wal_writer_delay", "10s"),
        ("bgwriter_delay", "10s"),
        ("autovacuum", "off"),
    ])
}

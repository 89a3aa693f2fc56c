//! Layer crash: a server dies again and again under a load of acquires, fenced writes and releases, and nothing that it
//! has promised is broken.
//!
//! `load` makes the load and keeps its history, `history` judges it. `SEED=n` repeats the decisions of a run; a failure
//! names its seed. A run in which nothing was taken over, refused or recovered fails: it would have proved nothing.

mod history;
mod load;
mod rng;
pub mod wall_clock;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::cluster::{Cluster, Db, Stop};
use load::{CLIENTS, CONTENDED, Load, Told};
use rng::Rng;

crate::tests![
    killed_backends,
    killed_postmasters,
    immediate_restarts,
    tokens_of_an_aborted_block_are_not_used_again,
    grant_outlives_a_kill_whatever_the_session_set,
    renewal_outlives_a_kill_whatever_the_session_set,
];

const BLOWS: usize = 10;
/// Acknowledged writes before each blow: enough for takeovers and refusals in every round.
const WRITES_PER_ROUND: u64 = 50;
/// A blow falls anywhere within so long after that.
const BLOW_WITHIN_MS: u64 = 300;

fn killed_backends() {
    survives(WRITES_PER_ROUND, |cluster, load, rng| {
        let victim = (0..CLIENTS).find_map(|_| load.backend(rng.below(CLIENTS as u64) as usize));
        cluster.crash_backend(victim.expect("a client is connected"));
    });
}

fn killed_postmasters() {
    survives(WRITES_PER_ROUND, |cluster, _, _| {
        cluster.kill_postmaster();
        cluster.start();
    });
}

fn immediate_restarts() {
    survives(WRITES_PER_ROUND / 2, |cluster, _, _| {
        cluster.restart(Stop::Immediate)
    });
}

fn survives(writes_per_round: u64, blow: impl Fn(&Cluster, &Load, &mut Rng)) {
    let seed = seed();
    let mut rng = Rng::new(seed);
    let db = database();
    let load = Load::start(&db, seed);
    let mut blows = Vec::new();
    for _ in 0..BLOWS {
        load.wait_for_writes(writes_per_round);
        thread::sleep(Duration::from_millis(rng.below(BLOW_WITHIN_MS)));
        blows.push(load.now());
        blow(&db.cluster, &load, &mut rng);
    }
    load.wait_for_writes(writes_per_round);
    let told = load.finish();
    judge(&told, &load::end_of(&db, blows), &db.cluster.log(), seed);
}

/// A table so small that entries are pushed out of it and come back from the ledger all the time.
fn database() -> Db {
    let cluster = Cluster::builder().conf("leasehold.max_leases", "12");
    Db::on(&Arc::new(cluster.start()))
}

fn judge(told: &Told, end: &history::End, log: &str, seed: u64) {
    let summary = load::summary(told);
    let faults = told.history.faults(end);
    let mut shown: Vec<String> = faults.iter().take(5).map(ToString::to_string).collect();
    shown.extend(
        told.unexpected
            .iter()
            .take(5)
            .map(|error| format!("unexpected: {error}")),
    );
    assert!(
        shown.is_empty(),
        "{} faults and {} unexpected errors with SEED={seed}\n{}\n{summary}",
        faults.len(),
        told.unexpected.len(),
        shown.join("\n")
    );
    println!("    SEED={seed}: {summary}");
    let (takeovers, stale) = (
        told.history.takeovers(CONTENDED),
        told.refused.get("LH001").copied().unwrap_or(0),
    );
    let survivals = told.history.survivals(&end.blows);
    let recoveries = log.matches("automatic recovery in progress").count();
    let vacuous = [
        (takeovers >= BLOWS, "takeovers"),
        (stale >= BLOWS, "stale writes refused"),
        (survivals >= 1, "leases used after a recovery"),
        (recoveries == BLOWS, "recoveries"),
    ];
    for (enough, what) in vacuous {
        assert!(
            enough,
            "too few {what} to prove anything with SEED={seed}: {survivals} survivals, {recoveries} recoveries, {summary}"
        );
    }
}

fn seed() -> u64 {
    match std::env::var("SEED") {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("SEED={text} is not a number")),
        Err(_) => SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| u64::from(since.subsec_nanos())),
    }
}

/// A block of tokens is on disk before one of them is handed out. A committed grant would flush it by itself, so only a
/// token whose transaction was never committed can show this. The position is far above what the wall clock gives, as
/// after a promotion: the clock must not hide a lost block either.
fn tokens_of_an_aborted_block_are_not_used_again() {
    let db = lazy_database();
    db.session()
        .exec("SELECT setval('leasehold.token_seq', 1::bigint << 50)");
    let mut last = 1 << 50;
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
    let settings = [
        ("wal_writer_delay", "10s"),
        ("bgwriter_delay", "10s"),
        ("autovacuum", "off"),
    ];
    let builder = settings
        .iter()
        .fold(Cluster::builder(), |builder, (name, value)| {
            builder.conf(name, value)
        });
    Db::on(&Arc::new(builder.start()))
}

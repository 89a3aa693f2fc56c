//! Layer server, part ledger: its rows are written in place. So it does not grow with the grants, and what is written
//! stays where the transaction is rolled back, which must only ever delay.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::cluster::{Cluster, Db, wait_for};
use crate::copying::Pair;
use crate::session::Session;

crate::tests![
    ledger_does_not_grow_under_an_open_snapshot,
    rolled_back_grant_only_delays,
    grants_over_grants_survive_a_kill,
    grants_over_grants_arrive_on_a_standby,
    row_of_another_size_is_granted_over,
    first_row_of_a_resource_may_be_rolled_back,
    marks_never_hit_a_newer_grant,
];

fn own() -> Db {
    Db::on(&Arc::new(Cluster::builder().start()))
}

/// Sizes of the ledger and its index.
fn sizes(session: &mut Session) -> (i64, i64) {
    let mut size =
        |relation: &str| session.one(&format!("SELECT pg_relation_size('leasehold.{relation}')"));
    (size("ledger"), size("ledger_pkey"))
}

/// Everything but the marks.
fn rows(session: &mut Session) -> Vec<Vec<Option<String>>> {
    session.rows(
        "SELECT resource, token, ttl_us, granted_at, role, left(holder, holder_bytes)
           FROM leasehold.ledger ORDER BY resource",
    )
}

fn ledger_does_not_grow_under_an_open_snapshot() {
    let db = own();
    let (mut s, mut reader) = (db.session(), db.session());
    let first = s.acquire("r");
    assert!(s.release("r", first));
    reader.exec("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM leasehold.ledger");
    let before = sizes(&mut s);
    s.exec(
        "DO $$
         DECLARE t bigint;
         BEGIN
             FOR i IN 1..2000 LOOP
                 t := acquire_lease('r', repeat('x', i % 127 + 1));
                 PERFORM release_lease('r', t);
                 COMMIT;
             END LOOP;
         END $$",
    );
    assert_eq!(sizes(&mut s), before, "ledger and index have grown");
    reader.exec("COMMIT");
    let vacuumed = s.one::<i64>("SELECT count(*) FROM leasehold.ledger");
    assert_eq!(vacuumed, 1);
    // whoever counts dead rows finds none that a grant has left
    let dead =
        "SELECT n_dead_tup FROM pg_stat_all_tables WHERE relid = 'leasehold.ledger'::regclass";
    drop(s);
    let mut s = db.session();
    wait_for("the session's counts", || {
        let counted: i64 = s.one(
            "SELECT n_tup_ins FROM pg_stat_all_tables WHERE relid = 'leasehold.ledger'::regclass",
        );
        (counted > 0).then_some(())
    });
    assert_eq!(s.one::<i64>(dead), 0);
    assert!(s.acquire("r") > first + 2000);
}

fn rolled_back_grant_only_delays() {
    let db = own();
    let role = db.role();
    let mut s = db.session_as(&role);
    let first = s.acquire("r");
    assert!(s.release("r", first));
    s.exec("BEGIN");
    let undone: i64 = s.one("SELECT acquire_lease('r', ttl => '2s')");
    s.exec("ROLLBACK");
    db.refused(&mut s, &format!("SELECT fence('r', {undone})"), "LH002");
    drop(s);
    // what was written in place is on disk with this, if it was not before
    db.session().exec("CREATE TABLE on_disk ()");
    let down = Instant::now();
    db.cluster.kill_postmaster();
    db.cluster.start();
    // nobody else can do anything with it
    let mut other = db.session_as(&db.role());
    let in_the_way = other.state_of("r");
    if in_the_way == "recovering" {
        other
            .err(&format!("SELECT fence('r', {undone})"))
            .is("42501");
    }
    assert!(
        other
            .err(&format!("SELECT fence('r', {first})"))
            .sqlstate
            .starts_with("LH00")
    );
    let next = wait_for("the grant", || other.try_acquire("r"));
    let passed = down.elapsed();
    assert!(
        in_the_way != "recovering" || passed >= Duration::from_secs(2),
        "granted after {passed:?}"
    );
    assert!(next > undone);
    for token in [first, undone] {
        db.refused(&mut other, &format!("SELECT fence('r', {token})"), "LH001");
    }
}

/// Grants 20 resources three times over, and leaves them held.
fn grant_over_and_over(db: &Db) -> HashMap<String, i64> {
    let mut s = db.session();
    let mut held = HashMap::new();
    for round in 0..3 {
        for i in 0..20 {
            let (resource, holder) = (format!("r{i}"), "holder".repeat(round * 5 + 1));
            let token: Option<i64> = s.one(&format!(
                "SELECT acquire_lease('{resource}', '{holder}', '5min')"
            ));
            let token = token.expect("it is free");
            if round < 2 {
                assert!(s.release(&resource, token));
            } else {
                held.insert(resource, token);
            }
        }
    }
    held
}

fn grants_over_grants_survive_a_kill() {
    let db = own();
    let held = grant_over_and_over(&db);
    let before = rows(&mut db.session());
    assert_eq!(before.len(), held.len());
    db.cluster.kill_postmaster();
    db.cluster.start();
    let mut s = db.session();
    assert_eq!(rows(&mut s), before);
    for (resource, token) in &held {
        assert_eq!(s.try_acquire(resource), None, "{resource} granted early");
        assert!(s.renew(resource, *token), "{resource}");
        assert_eq!(s.info(resource, "holder"), Some("holder".repeat(11)));
    }
}

fn grants_over_grants_arrive_on_a_standby() {
    let pair = Pair::new(&[]);
    let held = grant_over_and_over(&pair.db);
    let token = held["r7"];
    let mut s = pair.db.session();
    assert!(s.one::<bool>("SELECT renew_lease('r8', token, '4min') FROM lease_info('r8')"));
    assert!(s.release("r7", token));
    pair.catch_up();
    assert_eq!(rows(&mut pair.copy().session()), rows(&mut s));
    let mut copy = pair.copy().session();
    assert_eq!(copy.info("r3", "token"), Some(held["r3"].to_string()));
    assert_eq!(copy.info("r3", "holder"), Some("holder".repeat(11)));
}

fn row_of_another_size_is_granted_over() {
    let db = Db::new();
    let mut s = db.session();
    let mut last = s.acquire("r");
    assert!(s.release("r", last));
    // as a dump of something else might have it: shorter, and longer than any of ours
    for holder in ["x".to_owned(), "y".repeat(500)] {
        let bytes = holder.len();
        s.exec(&format!(
            "UPDATE leasehold.ledger SET holder = '{holder}', holder_bytes = {bytes}"
        ));
        for end in ["ROLLBACK", "COMMIT", "COMMIT"] {
            s.exec("BEGIN");
            let token = s.acquire_expired("r");
            assert!(token > last, "{token} after {last}");
            last = token;
            s.exec(end);
        }
        let (token, label): (i64, String) = (
            s.one("SELECT token FROM leasehold.ledger"),
            s.one("SELECT left(holder, holder_bytes) FROM leasehold.ledger"),
        );
        assert_eq!(token, last);
        assert!(label.contains("pg_test"), "the row of {label}");
    }
}

fn first_row_of_a_resource_may_be_rolled_back() {
    let db = Db::new();
    let (mut s, mut other) = (db.session(), db.session());
    s.exec("BEGIN; SAVEPOINT a");
    let undone = s.acquire("r");
    s.exec("ROLLBACK TO a");
    let next = other.acquire("r");
    assert!(next > undone && other.release("r", next));
    let again = s.acquire("r");
    s.exec("ROLLBACK");
    assert!(other.acquire("r") > again);
    assert_eq!(other.one::<i64>("SELECT count(*) FROM leasehold.ledger"), 1);
}

/// The worker marks what has ended in batches, some seconds behind: what was granted again meanwhile must not be marked,
/// and no grant may write over another's row.
fn marks_never_hit_a_newer_grant() {
    const RESOURCES: usize = 40;
    let db = own();
    let is_over = AtomicBool::new(false);
    let last: Vec<HashMap<String, i64>> = thread::scope(|scope| {
        let workers = (0..3).map(|worker| {
            let (db, is_over) = (&db, &is_over);
            scope.spawn(move || {
                let (mut s, mut last) = (db.session(), HashMap::new());
                for i in worker.. {
                    if is_over.load(Ordering::Relaxed) {
                        break;
                    }
                    let resource = format!("r{}", i * 7 % RESOURCES);
                    if let Some(token) = s.try_acquire(&resource) {
                        assert!(s.release(&resource, token));
                        last.insert(resource, token);
                    }
                }
                last
            })
        });
        let workers: Vec<_> = workers.collect();
        // marks come while grants do
        let mut s = db.session();
        for _ in 0..2 {
            wait_for("a mark", || {
                s.one::<bool>("SELECT EXISTS (SELECT FROM leasehold.ledger WHERE released)")
                    .then_some(())
            });
            wait_for("a grant over it", || {
                s.one::<bool>("SELECT NOT bool_and(released) FROM leasehold.ledger")
                    .then_some(())
            });
        }
        is_over.store(true, Ordering::Relaxed);
        workers
            .into_iter()
            .map(|worker| worker.join().expect("a worker"))
            .collect()
    });
    let mut s = db.session();
    let mut held = HashMap::new();
    for i in 0..RESOURCES {
        let resource = format!("r{i}");
        let highest = last
            .iter()
            .filter_map(|last| last.get(&resource))
            .max()
            .copied();
        let in_ledger: i64 = s.one_with(
            "SELECT token FROM leasehold.ledger WHERE resource = $1",
            &[&resource],
        );
        assert_eq!(Some(in_ledger), highest, "{resource}");
        if i % 2 == 0 {
            let token = s.acquire(&resource);
            held.insert(resource, token);
        }
    }
    wait_for("the last marks", || {
        s.one::<bool>("SELECT count(*) = 20 FROM leasehold.ledger WHERE released")
            .then_some(())
    });
    for (resource, token) in &held {
        let row: i64 = s.one_with(
            "SELECT token FROM leasehold.ledger WHERE resource = $1 AND NOT released",
            &[resource],
        );
        assert_eq!(row, *token, "{resource}");
    }
}

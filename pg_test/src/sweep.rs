//! Layer server, part sweep: old rows of the ledger go, and with them nothing that they kept safe; the workers that do
//! it come when they are needed, come back, and are in nobody's way.

use std::fs;
use std::sync::Arc;

use crate::cluster::{Cluster, Db, wait_for};
use crate::process::Signal;
use crate::session::Session;

crate::tests![
    sweep_leaves_tokens_refused,
    sweep_takes_expired_leases_and_leaves_live_ones,
    sweep_leaves_a_recovering_lease,
    sweep_waits_for_who_is_inside,
    sweep_is_safe_through_crashes,
    sweep_of_a_dropped_database_is_given_up,
    workers_come_back_after_a_crash,
    static_worker_comes_back_when_it_is_ended,
    databases_are_dropped_under_the_worker,
];

/// A server that keeps unused rows for a second, in a table so small that entries are pushed out of it.
fn forgetful() -> Db {
    let builder = Cluster::builder()
        .conf("leasehold.ledger_retention", "1s")
        .conf("leasehold.max_leases", "8");
    Db::on(&Arc::new(builder.start()))
}

fn has_row(db: &Db, resource: &str) -> bool {
    db.session().one_with(
        "SELECT EXISTS (SELECT FROM leasehold.ledger WHERE resource = $1)",
        &[&resource],
    )
}

fn wait_swept(db: &Db, resource: &str) {
    wait_for("the row to go", || (!has_row(db, resource)).then_some(()));
}

/// Acquires, releases, and waits until the row is swept: then all older rows that could be have been, too.
fn sweep(db: &Db, resource: &str) {
    let mut s = db.session();
    let token = s.acquire(resource);
    assert!(s.release(resource, token));
    wait_swept(db, resource);
}

/// Pushes what is over out of the shared table.
fn displace(s: &mut Session) {
    for i in 0..60 {
        let name = format!("passing {i}");
        let token = s.acquire(&name);
        assert!(s.release(&name, token));
    }
}

fn sweep_leaves_tokens_refused() {
    let db = forgetful();
    let mut s = db.session();
    let token = s.acquire("r");
    assert!(s.release("r", token));
    wait_swept(&db, "r");
    // as long as the shared table remembers it, and after
    db.refused(&mut s, &format!("SELECT fence('r', {token})"), "LH004");
    displace(&mut s);
    // so that no sweep comes in between what is compared
    wait_swept(&db, "passing 59");
    db.refused(&mut s, &format!("SELECT fence('r', {token})"), "LH001");
    assert!(!s.renew("r", token) && !s.release("r", token) && !s.check_fence("r", token));
    let next = s.acquire("r");
    assert!(next > token, "{next} after {token}");
    assert!(has_row(&db, "r"));
}

fn sweep_takes_expired_leases_and_leaves_live_ones() {
    let db = forgetful();
    let mut s = db.session();
    let kept = s.acquire("kept");
    s.acquire_expired("expired");
    for round in 0..3 {
        sweep(&db, &format!("round {round}"));
        assert!(has_row(&db, "kept"), "the row of a live lease is gone");
        assert!(s.renew("kept", kept));
    }
    wait_swept(&db, "expired");
    db.cluster.kill_postmaster();
    db.cluster.start();
    let mut s = db.session();
    assert_eq!(s.try_acquire("kept"), None);
    assert!(s.renew("kept", kept));
}

fn sweep_leaves_a_recovering_lease() {
    let db = forgetful();
    let token = db.session().acquire("r");
    db.cluster.kill_postmaster();
    db.cluster.start();
    // nobody has looked at it since the start
    for round in 0..2 {
        sweep(&db, &format!("round {round}"));
        assert!(has_row(&db, "r"), "the row of a recovering lease is gone");
    }
    assert!(db.session().renew("r", token));
}

fn sweep_waits_for_who_is_inside() {
    let db = forgetful();
    let mut s = db.session();
    let token: i64 = s.one("SELECT acquire_lease('r', ttl => '100ms')");
    let mut inside = db.session();
    inside.exec("BEGIN");
    inside.fence("r", token);
    wait_for("the lease to expire", || {
        (s.state_of("r") == "expired").then_some(())
    });
    sweep(&db, "other");
    assert!(has_row(&db, "r"), "the row of a resource in use is gone");
    inside.exec("COMMIT");
    wait_swept(&db, "r");
}

/// What was swept is on disk with the next durable commit. Before that a crash may bring the row back, with a release
/// that was not marked in it: then the lease is live again, as it is after any release that a crash has lost.
fn sweep_is_safe_through_crashes() {
    let db = forgetful();
    let mut s = db.session();
    let token = s.acquire("r");
    assert!(s.release("r", token));
    wait_swept(&db, "r");
    s.acquire("durable");
    drop(s);
    for _ in 0..2 {
        db.cluster.kill_postmaster();
        db.cluster.start();
        let mut s = db.session();
        s.err(&format!("SELECT fence('r', {token})")).is("LH001");
        assert!(!s.renew("r", token) && !s.check_fence("r", token));
    }
    let next = db.session().acquire("r");
    assert!(next > token, "{next} after {token}");
}

fn sweep_of_a_dropped_database_is_given_up() {
    let db = forgetful();
    let gone = Db::on(&db.cluster);
    sweep(&gone, "r");
    let oid: i64 = gone
        .session()
        .one("SELECT oid::bigint FROM pg_database WHERE datname = current_database()");
    db.cluster
        .connect()
        .exec(&format!("DROP DATABASE {} WITH (FORCE)", gone.name));
    for round in 0..4 {
        sweep(&db, &format!("round {round}"));
    }
    let log = db.cluster.log();
    let tries = log
        .lines()
        .filter(|line| line.contains("FATAL") && line.contains(&oid.to_string()))
        .count();
    assert!(
        tries <= 1,
        "{tries} tries to connect to a database that is gone"
    );
}

fn workers_come_back_after_a_crash() {
    let db = forgetful();
    sweep(&db, "before");
    let victim = db.cluster.connect();
    db.cluster.crash_backend(victim.pid);
    sweep(&db, "after");
}

fn static_worker_comes_back_when_it_is_ended() {
    let db = forgetful();
    let before = static_worker(&db);
    db.cluster.kill_backend(before, Signal::TERM);
    sweep(&db, "r");
    assert_ne!(static_worker(&db), before);
}

/// It has no place in pg_stat_activity, because it has no database.
fn static_worker(db: &Db) -> i32 {
    let parent = format!("\nPPid:\t{}\n", db.cluster.postmaster_pid());
    wait_for("the static worker", || {
        let mut pids = fs::read_dir("/proc")
            .expect("processes can be listed")
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
        pids.find(|pid| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let title = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            status.contains(&parent) && title.trim_matches(['\0', ' ']) == "postgres: leasehold"
        })
    })
}

/// DROP DATABASE waits some seconds for who is connected: the worker never stays so long.
fn databases_are_dropped_under_the_worker() {
    let builder = Cluster::builder().conf("leasehold.ledger_retention", "1s");
    let db = Db::on(&Arc::new(builder.start()));
    for round in 0..3 {
        let busy = Db::on(&db.cluster);
        let mut s = busy.session();
        s.exec(
            "SELECT release_lease(name, acquire_lease(name)) FROM (SELECT 'r' || i AS name FROM generate_series(1, 300) i) names",
        );
        // while the worker marks, and while it sweeps
        if round > 0 {
            wait_swept(&busy, "r1");
        }
        drop(s);
        let mut admin = db.cluster.connect();
        admin.exec(&format!("DROP DATABASE {}", busy.name));
    }
}

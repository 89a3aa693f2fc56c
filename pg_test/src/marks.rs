//! Layer server, part marks: what is known of leases that have ended. A worker marks releases in the ledger while the
//! server runs, and a clean shutdown writes down which leases are live, in a file. Servers without worker slots keep
//! the worker away, so that the file alone counts.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use crate::cluster::{Cluster, Db, Stop, wait_for};

crate::tests![
    release_is_marked,
    release_is_marked_whatever_the_database_sets,
    clean_shutdown_knows_what_is_over,
    clean_shutdown_knows_what_is_live,
    immediate_shutdown_writes_nothing_down,
    what_was_over_stays_over_through_crashes,
    garbage_in_the_file_does_no_harm,
    torn_file_ends_no_lease,
    dropped_database_in_the_file_does_no_harm,
];

/// A server on which nobody marks.
fn workerless() -> Db {
    let builder = Cluster::builder().conf("max_worker_processes", "0");
    Db::on(&Arc::new(builder.start()))
}

fn file(db: &Db) -> PathBuf {
    db.cluster.data().join("pg_stat/leasehold.over")
}

fn is_marked(db: &Db, resource: &str) -> bool {
    db.session_with_options("-c default_transaction_isolation=read\\ committed")
        .one_with(
            "SELECT released FROM leasehold.ledger WHERE resource = $1",
            &[&resource],
        )
}

fn wait_marked(db: &Db, resource: &str) {
    wait_for("the mark", || is_marked(db, resource).then_some(()));
}

/// Acquires and releases.
fn release(db: &Db, resource: &str) -> i64 {
    let mut s = db.session();
    let token = s.acquire(resource);
    assert!(s.release(resource, token));
    token
}

/// The lease is known to be released.
#[track_caller]
fn is_free(db: &Db, resource: &str, token: i64) {
    let mut s = db.session();
    assert_eq!(s.state_of(resource), "free");
    assert!(!s.check_fence(resource, token) && !s.renew(resource, token));
    let listed: i64 = s.one_with(
        "SELECT count(*) FROM leasehold.leases WHERE resource = $1 AND state <> 'free'",
        &[&resource],
    );
    assert_eq!(listed, 0);
}

fn release_is_marked() {
    let db = Db::new();
    let kept = db.session().acquire("kept");
    for resource in ["r", "q", "r"] {
        release(&db, resource);
    }
    wait_marked(&db, "r");
    wait_marked(&db, "q");
    assert!(!is_marked(&db, "kept"));
    // a new lease of a marked row is not
    let token = db.session().acquire("r");
    assert!(!is_marked(&db, "r"));
    let mut s = db.session();
    assert!(s.renew("r", token) && s.renew("kept", kept));
}

fn release_is_marked_whatever_the_database_sets() {
    let db = Db::new();
    let settings = [
        ("default_transaction_read_only", "on"),
        ("default_transaction_isolation", "serializable"),
        ("default_transaction_deferrable", "on"),
        ("lock_timeout", "1"),
        ("statement_timeout", "60000"),
    ];
    for (name, value) in settings {
        db.session_with_options("-c default_transaction_read_only=off")
            .exec(&format!(
                "ALTER DATABASE {} SET {name} = '{value}'",
                db.name
            ));
    }
    let mut s = db.session_with_options("-c default_transaction_read_only=off");
    assert_eq!(
        s.text("SHOW default_transaction_isolation").as_deref(),
        Some("serializable")
    );
    let token = s.acquire("r");
    assert!(s.release("r", token));
    wait_marked(&db, "r");
}

fn clean_shutdown_knows_what_is_over() {
    for stop in [Stop::Fast, Stop::Smart] {
        let db = workerless();
        let (mut taken, free) = (release(&db, "taken"), release(&db, "free"));
        let expired: i64 = db
            .session()
            .one("SELECT acquire_lease('expired', ttl => '2s')");
        wait_for("the lease to expire", || {
            (db.session().state_of("expired") == "expired").then_some(())
        });
        for _ in 0..3 {
            db.cluster.restart(stop);
            assert!(file(&db).exists(), "no file after {stop:?}");
            assert!(!is_marked(&db, "taken") && !is_marked(&db, "free"));
            is_free(&db, "taken", taken);
            is_free(&db, "free", free);
            let mut s = db.session();
            assert!(!s.renew("expired", expired) && !s.check_fence("expired", expired));
            // the next lease of the resource is a lease of its own
            let next = s.acquire("taken");
            assert!(next > taken, "{next} after {taken}");
            assert!(s.renew("taken", next));
            assert_eq!(db.session().try_acquire("taken"), None);
            assert!(s.release("taken", next));
            taken = next;
        }
        // its own TTL from the restart is no matter
        assert!(db.session().acquire("expired") > expired);
    }
}

fn clean_shutdown_knows_what_is_live() {
    let db = workerless();
    let mut s = db.session();
    let [held, renewed, released] = ["held", "renewed", "released"].map(|r| s.acquire(r));
    let longer: i64 = s.one("SELECT acquire_lease('longer', ttl => '1s')");
    assert!(s.one::<bool>(&format!("SELECT renew_lease('longer', {longer}, '5min')")));
    drop(s);
    // once looked at, and once not
    for touched in [false, true, false] {
        db.cluster.restart(Stop::Fast);
        let mut s = db.session();
        // other grants of the same run
        let other = s.acquire("other");
        assert!(s.release("other", other));
        if touched {
            assert!(s.renew("renewed", renewed) && s.release("released", released));
        }
    }
    let mut s = db.session();
    for (resource, token) in [("held", held), ("renewed", renewed), ("longer", longer)] {
        assert_eq!(s.try_acquire(resource), None, "{resource} granted early");
        assert!(s.check_fence(resource, token), "{resource}");
        s.fence(resource, token);
        assert!(s.renew(resource, token), "{resource}");
    }
    is_free(&db, "released", released);
    assert!(s.acquire("released") > released);
}

fn immediate_shutdown_writes_nothing_down() {
    let db = workerless();
    let token = release(&db, "r");
    db.cluster.stop(Stop::Immediate);
    assert!(!file(&db).exists(), "written by what was not shut down");
    db.cluster.start();
    // the crash has lost the release, so the lease counts as live, and a clean shutdown knows no better later
    for _ in 0..2 {
        let mut s = db.session();
        assert_eq!(s.try_acquire("r"), None);
        assert!(s.check_fence("r", token));
        drop(s);
        db.cluster.restart(Stop::Fast);
    }
    // as it was, where there was one
    let before = fs::read(file(&db)).expect("a clean shutdown has written it");
    let q = db.session().acquire("q");
    db.cluster.stop(Stop::Immediate);
    assert_eq!(fs::read(file(&db)).ok(), Some(before));
    db.cluster.start();
    assert_eq!(db.session().try_acquire("q"), None);
    assert!(db.session().renew("q", q));
}

fn what_was_over_stays_over_through_crashes() {
    let db = workerless();
    let (r, held) = (release(&db, "r"), db.session().acquire("held"));
    db.cluster.restart(Stop::Fast);
    let victim = db.cluster.connect();
    db.cluster.crash_backend(victim.pid);
    is_free(&db, "r", r);
    db.cluster.restart(Stop::Immediate);
    is_free(&db, "r", r);
    db.cluster.kill_postmaster();
    db.cluster.start();
    is_free(&db, "r", r);
    assert!(!is_marked(&db, "r"));
    // what the crashes have seen granted is live
    let next = db.session().acquire("r");
    assert!(next > r);
    db.cluster.restart(Stop::Immediate);
    let mut s = db.session();
    assert_eq!((s.try_acquire("r"), s.try_acquire("held")), (None, None));
    assert!(s.renew("r", next) && s.renew("held", held));
}

fn garbage_in_the_file_does_no_harm() {
    let db = workerless();
    let held = db.session().acquire("held");
    release(&db, "r");
    let mut s = db.session();
    let (database, ledger): (i64, i64) = (
        s.one("SELECT oid::bigint FROM pg_database WHERE datname = current_database()"),
        s.one("SELECT 'leasehold.ledger'::regclass::oid::bigint"),
    );
    drop(s);
    let here = format!("{database} {ledger}");
    // lines that say nothing, and lines about what is not there
    let garbage = format!(
        "\n   \nhello\n1\n1 2\n1 2 3\n-1 -2 -3 72\n99999999999999999999 1 1 72\n{here} x 72\n{here} 1\n{here} 9 1\n\
         {here} 1 9 zz\n{here} 1 \u{e9}\n{here} 0 0 0\n4 {ledger} 0 {held}\n{database} 1 0 {held}\n99999 {ledger} 0 {held}\n"
    );
    db.cluster.stop(Stop::Fast);
    let good = fs::read_to_string(file(&db)).expect("a clean shutdown has written it");
    // a file with anything else in it is believed in no part: nothing is known, as after a crash
    for spoiled in [
        format!("{garbage}{good}{garbage}").into_bytes(),
        format!("{garbage}{good}").into_bytes(),
        vec![0xff, 0xfe, 0, 10, 0xc3],
    ] {
        fs::write(file(&db), spoiled).expect("it can be spoiled");
        db.cluster.start();
        let mut s = db.session();
        assert_eq!((s.try_acquire("r"), s.try_acquire("held")), (None, None));
        assert!(s.check_fence("held", held) && s.renew("held", held));
        drop(s);
        db.cluster.stop(Stop::Immediate);
    }
    db.cluster.start();
    let mut s = db.session();
    assert!(s.renew("held", held));
}

/// What a lost write has left of the file must not say that a live lease is over.
fn torn_file_ends_no_lease() {
    let db = workerless();
    let mut s = db.session();
    let names = ["a", "b", "c"];
    let tokens = names.map(|name| s.acquire(name));
    drop(s);
    db.cluster.stop(Stop::Fast);
    let whole = fs::read(file(&db)).expect("a clean shutdown has written it");
    let text = String::from_utf8_lossy(&whole).into_owned();
    // at the ends of words and inside them
    let mut cuts: Vec<usize> = text
        .char_indices()
        .filter(|(_, c)| c.is_whitespace())
        .flat_map(|(i, _)| [i - 1, i, i + 1])
        .filter(|cut| *cut < whole.len())
        .collect();
    cuts.dedup();
    for cut in cuts {
        fs::write(file(&db), &whole[..cut]).expect("it can be torn");
        db.cluster.start();
        let mut s = db.session();
        for (name, token) in names.iter().zip(tokens) {
            assert!(
                s.check_fence(name, token),
                "the lease of {name} is over: {:?} of {text:?}",
                &text[..cut]
            );
            assert_eq!(s.try_acquire(name), None, "{name} granted early");
        }
        drop(s);
        db.cluster.stop(Stop::Immediate);
    }
    // nor what its blocks hold where they were never written
    fs::write(file(&db), vec![0; whole.len()]).expect("it can be torn");
    db.cluster.start();
    assert!(db.session().renew("a", tokens[0]));
}

fn dropped_database_in_the_file_does_no_harm() {
    let db = workerless();
    let gone = Db::on(&db.cluster);
    release(&gone, "r");
    gone.session().acquire("held");
    let token = release(&db, "r");
    db.cluster.restart(Stop::Fast);
    let mut admin = db.cluster.connect();
    admin.exec(&format!("DROP DATABASE {} WITH (FORCE)", gone.name));
    drop(admin);
    db.cluster.configure("max_worker_processes = 8\n");
    db.cluster.restart(Stop::Fast);
    is_free(&db, "r", token);
    // one that is made anew has nothing to do with it
    let mut admin = db.cluster.connect();
    admin.exec(&format!("CREATE DATABASE {}", gone.name));
    drop(admin);
    gone.session().exec("CREATE EXTENSION leasehold");
    let (again, held) = (release(&gone, "r"), gone.session().acquire("held"));
    wait_marked(&gone, "r");
    db.cluster.restart(Stop::Fast);
    is_free(&gone, "r", again);
    assert!(gone.session().renew("held", held));
    is_free(&db, "r", token);
}

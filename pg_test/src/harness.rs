//! The harness tried on a server without leasehold: where this layer fails, no other result means anything.

use std::sync::Arc;

use crate::cluster::{Cluster, Db, Stop};
use crate::process::Signal;

crate::tests![
    every_stop_and_kill_is_survived,
    crashed_backend_takes_the_others_along,
    blocked_statement_is_seen_and_ends,
    terminated_session_loses_its_connection,
];

fn plain() -> Cluster {
    Cluster::builder().without_preload().start()
}

fn every_stop_and_kill_is_survived() {
    let cluster = plain();
    cluster.connect().exec("CREATE TABLE t AS SELECT 1 AS n");
    for stop in [Stop::Smart, Stop::Fast, Stop::Immediate] {
        cluster.restart(stop);
        assert_eq!(
            cluster.connect().one::<i32>("SELECT n FROM t"),
            1,
            "after {stop:?}"
        );
    }
    cluster.kill_postmaster();
    assert!(!cluster.is_running());
    cluster.start();
    assert_eq!(
        cluster.connect().one::<i32>("SELECT n FROM t"),
        1,
        "after SIGKILL"
    );
    assert!(
        cluster.log().contains("was not properly shut down"),
        "no recovery in the log"
    );
}

fn crashed_backend_takes_the_others_along() {
    let cluster = plain();
    let (mut other, victim) = (cluster.connect(), cluster.connect());
    cluster.crash_backend(victim.pid);
    other
        .try_exec("SELECT 1")
        .expect_err("the other session outlived the crash");
    assert_eq!(cluster.connect().one::<i32>("SELECT 1"), 1);
}

fn blocked_statement_is_seen_and_ends() {
    let db = Db::bare_on(&Arc::new(plain()));
    let (mut first, second) = (db.session(), db.session());
    first.exec("BEGIN; SELECT pg_advisory_xact_lock(1)");
    let mut waiting = second.spawn("SELECT 'done', pg_advisory_xact_lock(1)");
    db.cluster.wait_until_blocked(waiting.pid);
    assert!(!waiting.is_done());
    first.exec("COMMIT");
    let (_, result) = waiting.join();
    assert_eq!(result, Ok(Some("done".to_owned())));
}

fn terminated_session_loses_its_connection() {
    let cluster = plain();
    let session = cluster.connect();
    let pid = session.pid;
    let running = session.spawn("SELECT pg_sleep(3600)");
    cluster.wait_sql(
        &format!("SELECT state = 'active' FROM pg_stat_activity WHERE pid = {pid}"),
        "the statement",
    );
    cluster.kill_backend(pid, Signal::TERM);
    cluster.wait_until_left(pid);
    let error = running.join().1.expect_err("the statement went on");
    assert!(error.is_lost(), "{error}");
}

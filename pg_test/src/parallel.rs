//! Layer xact, part parallel queries: what a parallel worker would acquire, fence or release would end with the worker,
//! so a function that is wrongly declared PARALLEL SAFE is refused, and leaves nothing behind.

use crate::cluster::Db;
use crate::session::Session;

crate::tests![
    calls_from_a_parallel_worker_are_refused,
    acquire_from_a_parallel_worker_leaves_the_resource_free,
    release_from_a_parallel_worker_leaves_the_lease,
    fence_from_a_parallel_worker_counts_for_nothing,
];

/// A session whose queries run in a parallel worker wherever their functions allow it.
fn parallel(db: &Db) -> Session {
    let mut s = db.session();
    let version: i32 = s.one("SELECT current_setting('server_version_num')::int / 10000");
    s.exec(match version {
        15 => "SET force_parallel_mode = on",
        _ => "SET debug_parallel_query = on",
    });
    s.exec(
        "CREATE FUNCTION call(sql text) RETURNS text LANGUAGE plpgsql PARALLEL SAFE AS
         'DECLARE answer text; BEGIN EXECUTE ''SELECT '' || sql INTO answer; RETURN answer; END'",
    );
    // the trap is set: it does run in a worker
    let worker = s.text("SELECT call('pg_backend_pid()')");
    assert_ne!(
        worker,
        Some(s.pid.to_string()),
        "no parallel worker was used"
    );
    s
}

#[track_caller]
fn refused(db: &Db, s: &mut Session, call: &str) {
    let sql = format!("SELECT call($${call}$$)");
    db.refused(s, &sql, "25000").hints_at("PARALLEL SAFE");
}

fn calls_from_a_parallel_worker_are_refused() {
    let db = Db::new();
    let mut s = parallel(&db);
    let token = s.acquire("held");
    for call in [
        "acquire_lease('r')",
        "acquire_lease('held')",
        "renew_lease('held', {})",
        "renew_lease('held', {}, '1s')",
        "release_lease('held', {})",
        "fence('held', {})",
    ] {
        refused(&db, &mut s, &call.replace("{}", &token.to_string()));
    }
}

fn acquire_from_a_parallel_worker_leaves_the_resource_free() {
    let db = Db::new();
    let mut s = parallel(&db);
    refused(&db, &mut s, "acquire_lease('r')");
    assert_eq!(s.state_of("r"), "free");
    let mut other = db.session();
    let token = other.acquire("r");
    assert!(other.renew("r", token) && other.release("r", token));
    // one that has had a lease
    let expired = s.acquire_expired("r");
    refused(&db, &mut s, "acquire_lease('r')");
    assert!(other.acquire("r") > expired);
}

fn release_from_a_parallel_worker_leaves_the_lease() {
    let db = Db::new();
    let mut s = parallel(&db);
    let token = s.acquire("r");
    refused(&db, &mut s, &format!("release_lease('r', {token})"));
    let mut other = db.session();
    assert_eq!(other.try_acquire("r"), None);
    assert!(other.renew("r", token) && other.release("r", token));
    other.acquire("r");
}

fn fence_from_a_parallel_worker_counts_for_nothing() {
    let db = Db::new();
    let mut s = parallel(&db);
    s.exec("CREATE TABLE t (n int); SELECT fence_table('t', 'r')");
    let token = s.acquire_expired("r");
    s.exec("BEGIN; SAVEPOINT a");
    s.err(&format!("SELECT call($$fence('r', {token})$$)"))
        .is("25000");
    s.exec("ROLLBACK TO a");
    assert!(s.info_says("r", "writers = 0"), "a lock is left");
    assert!(db.session().acquire("r") > token);
    db.refused_write(&mut s, "INSERT INTO t VALUES (1)", "LH003");
}

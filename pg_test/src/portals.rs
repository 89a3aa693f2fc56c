//! Layer xact, part cursors: what was checked in a cursor's query holds as long as its lock. A cursor that fails inside
//! a savepoint gives up what its query has locked; the verdict must not outlive the lock, nor go with it.

use crate::cluster::Db;
use crate::session::Session;

crate::tests![
    fence_fetched_before_a_savepoint_outlives_the_cursor,
    write_fetched_before_a_savepoint_outlives_the_cursor,
    setting_used_before_a_savepoint_outlives_the_cursor,
    fence_fetched_inside_a_savepoint_goes_with_it,
    acquire_fetched_before_a_savepoint_outlives_the_cursor,
    fence_of_a_closed_cursor_holds,
];

fn docs(db: &Db) -> Session {
    let mut s = db.session();
    s.exec("CREATE TABLE doc (id int PRIMARY KEY, n int); INSERT INTO doc VALUES (1, 0)");
    s.exec("SELECT fence_table('doc', 'doc:{id}')");
    // fails at the second row
    s.exec(
        "CREATE FUNCTION put(i int) RETURNS int LANGUAGE plpgsql AS
         'BEGIN UPDATE doc SET n = i WHERE id = 1; RETURN 1 / (2 - i); END'",
    );
    s
}

fn fence_locks(db: &Db, session: &Session) -> i64 {
    db.session().one(&format!(
        "SELECT count(*) FROM pg_locks WHERE pid = {} AND locktype = 'advisory' AND objsubid = 19528 AND granted",
        session.pid
    ))
}

/// In a block, opens the cursor, fetches its first row, and the second, which fails, inside a savepoint.
#[track_caller]
fn fail_in_a_savepoint(s: &mut Session, query: &str) {
    s.exec(&format!("DECLARE c CURSOR FOR {query}; FETCH 1 FROM c"));
    s.exec("SAVEPOINT s");
    s.err("FETCH 1 FROM c").is("22012");
    s.exec("ROLLBACK TO s");
}

/// The transaction has presented `token`, whose lease is over: it keeps takers out, and its writes pass, to its end.
#[track_caller]
fn still_holds(db: &Db, s: &mut Session, token: i64) {
    assert_eq!(fence_locks(db, s), 1, "the lock went with the cursor");
    let mut taker = db.session();
    assert_eq!(
        taker.try_acquire("doc:1"),
        None,
        "granted while a transaction is open under the old token"
    );
    s.exec("UPDATE doc SET n = 7 WHERE id = 1; COMMIT");
    assert!(taker.acquire("doc:1") > token);
    assert_eq!(taker.one::<i32>("SELECT n FROM doc WHERE id = 1"), 7);
}

fn fence_fetched_before_a_savepoint_outlives_the_cursor() {
    let db = Db::new();
    let mut s = docs(&db);
    let token = s.acquire_expired("doc:1");
    s.exec("BEGIN");
    let query = format!("SELECT fence('doc:1', {token}), 1 / (2 - i) FROM generate_series(1, 3) i");
    fail_in_a_savepoint(&mut s, &query);
    still_holds(&db, &mut s, token);
}

fn write_fetched_before_a_savepoint_outlives_the_cursor() {
    let db = Db::new();
    let mut s = docs(&db);
    s.exec(
        "CREATE TABLE log (tok bigint); SELECT fence_table('log', 'doc:1', 'tok');
         CREATE FUNCTION note(i int, t bigint) RETURNS int LANGUAGE plpgsql AS
         'BEGIN INSERT INTO log VALUES (t); RETURN 1 / (2 - i); END'",
    );
    let token = s.acquire_expired("doc:1");
    // presented by nothing but the row that the cursor's query writes
    s.exec("BEGIN");
    fail_in_a_savepoint(
        &mut s,
        &format!("SELECT note(i, {token}) FROM generate_series(1, 3) i"),
    );
    assert_eq!(fence_locks(&db, &s), 1, "the lock went with the cursor");
    let mut taker = db.session();
    assert_eq!(
        taker.try_acquire("doc:1"),
        None,
        "granted while a transaction is open under the old token"
    );
    s.exec(&format!("INSERT INTO log VALUES ({token}); COMMIT"));
    assert!(taker.acquire("doc:1") > token);
    assert_eq!(taker.one::<i64>("SELECT count(*) FROM log"), 2);
}

fn setting_used_before_a_savepoint_outlives_the_cursor() {
    let db = Db::new();
    let mut s = docs(&db);
    let token = s.acquire_expired("doc:1");
    s.exec(&format!("BEGIN; SET LOCAL leasehold.token = '{token}'"));
    fail_in_a_savepoint(&mut s, "SELECT put(i) FROM generate_series(1, 3) i");
    assert_eq!(s.one::<i32>("SELECT n FROM doc WHERE id = 1"), 1);
    still_holds(&db, &mut s, token);
}

fn fence_fetched_inside_a_savepoint_goes_with_it() {
    let db = Db::new();
    let mut s = docs(&db);
    let token = s.acquire_expired("doc:1");
    s.exec(&format!(
        "BEGIN; DECLARE c CURSOR FOR SELECT fence('doc:1', {token}); SAVEPOINT s; FETCH 1 FROM c"
    ));
    assert_eq!(fence_locks(&db, &s), 1);
    s.exec("ROLLBACK TO s");
    assert_eq!(fence_locks(&db, &s), 0, "a lock is left");
    let next = db.session().acquire("doc:1");
    assert!(next > token);
    // neither is a verdict
    db.refused_write(&mut s, "UPDATE doc SET n = 7 WHERE id = 1", "LH003");
}

fn acquire_fetched_before_a_savepoint_outlives_the_cursor() {
    let db = Db::new();
    let mut s = docs(&db);
    s.exec("BEGIN");
    fail_in_a_savepoint(
        &mut s,
        "SELECT CASE i WHEN 1 THEN acquire_lease('doc:1', ttl => '1 microsecond') END, 1 / (2 - i) FROM generate_series(1, 3) i",
    );
    assert_eq!(fence_locks(&db, &s), 1, "the lock went with the cursor");
    let mut taker = db.session();
    assert_eq!(taker.try_acquire("doc:1"), None);
    s.exec("UPDATE doc SET n = 7 WHERE id = 1; COMMIT");
    assert_eq!(taker.one::<i32>("SELECT n FROM doc WHERE id = 1"), 7);
    taker.acquire("doc:1");
}

fn fence_of_a_closed_cursor_holds() {
    let db = Db::new();
    let mut s = docs(&db);
    let token = s.acquire_expired("doc:1");
    s.exec(&format!(
        "BEGIN; DECLARE c CURSOR FOR SELECT fence('doc:1', {token}); FETCH c; CLOSE c"
    ));
    still_holds(&db, &mut s, token);
}

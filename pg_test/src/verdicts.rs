//! Layer fence, part verdicts: what has passed the fence in a transaction stays good to its end, for every user that the
//! transaction takes on, whoever wants the resource meanwhile.

use std::fs;

use crate::cluster::Db;
use crate::session::Session;

crate::tests![
    verdict_serves_the_owner_of_a_cascade,
    setting_serves_the_owner_of_a_cascade,
    verdict_does_not_serve_a_stranger,
    check_fence_knows_the_transactions_own_verdict,
    users_in_turn_cost_no_memory,
];

/// A parent of one role, a fenced child of another with cascades, one row in each; and an expired lease of the first
/// role. Gives a session of the first role and the token.
fn family(db: &Db) -> (Session, i64) {
    let (holder, other) = (db.role(), db.role());
    let mut s = db.session_as(&holder);
    s.exec("CREATE TABLE parent (id int PRIMARY KEY); INSERT INTO parent VALUES (1)");
    s.exec(&format!("GRANT REFERENCES ON parent TO {other}"));
    db.session_as(&other).exec(
        "CREATE TABLE child (parent int REFERENCES parent ON UPDATE CASCADE ON DELETE CASCADE);
         INSERT INTO child VALUES (1); SELECT fence_table('child', 'fk')",
    );
    let token = s.acquire_expired("fk");
    (s, token)
}

/// A taker has asked; the cascades, which run as the child's owner, pass all the same.
#[track_caller]
fn cascades_pass(db: &Db, mut s: Session, token: i64) {
    let mut taker = db.session();
    assert_eq!(taker.try_acquire("fk"), None);
    s.exec("UPDATE parent SET id = 2");
    s.exec("DELETE FROM parent; COMMIT");
    assert!(taker.acquire("fk") > token);
    assert_eq!(taker.one::<i64>("SELECT count(*) FROM child"), 0);
}

fn verdict_serves_the_owner_of_a_cascade() {
    let db = Db::new();
    let (mut s, token) = family(&db);
    s.exec(&format!("BEGIN; SELECT fence('fk', {token})"));
    cascades_pass(&db, s, token);
}

fn setting_serves_the_owner_of_a_cascade() {
    let db = Db::new();
    let (mut s, token) = family(&db);
    s.exec("CREATE TABLE own (n int); SELECT fence_table('own', 'fk')");
    s.exec(&format!(
        "BEGIN; SET LOCAL leasehold.token = '{token}'; INSERT INTO own VALUES (1)"
    ));
    cascades_pass(&db, s, token);
}

fn verdict_does_not_serve_a_stranger() {
    let db = Db::new();
    let (holder, stranger) = (db.role(), db.role());
    let mut s = db.session();
    s.exec("CREATE TABLE t (n int); SELECT fence_table('t', 'r')");
    s.exec(&format!("GRANT INSERT ON t TO {holder}, {stranger}"));
    let token = db.session_as(&holder).acquire("r");
    // a pooler that lends the same transaction to another user
    for present in [
        format!("SELECT fence('r', {token})"),
        format!("SET LOCAL leasehold.token = '{token}'"),
    ] {
        s.exec(&format!(
            "BEGIN; SET LOCAL SESSION AUTHORIZATION {holder}; {present}; INSERT INTO t VALUES (1)"
        ));
        s.exec(&format!("SET LOCAL SESSION AUTHORIZATION {stranger}"));
        db.refused_write(&mut s, "INSERT INTO t VALUES (2)", "42501");
        assert_eq!(s.one::<String>("SELECT current_user::text"), "postgres");
    }
}

fn check_fence_knows_the_transactions_own_verdict() {
    let db = Db::new();
    let (mut s, mut other) = (db.session(), db.session());
    let token = s.acquire_expired("r");
    s.exec(&format!("BEGIN; SELECT fence('r', {token})"));
    assert_eq!(other.try_acquire("r"), None);
    // what `fence` would say: here it holds, elsewhere it is over
    s.fence("r", token);
    assert!(s.check_fence("r", token));
    assert!(!s.check_fence("r", token - 1) && !s.check_fence("r", token + 1));
    assert!(!other.check_fence("r", token));
    s.exec("SAVEPOINT a; ROLLBACK TO a");
    assert!(s.check_fence("r", token));
    s.exec("COMMIT");
    assert!(!s.check_fence("r", token));
    assert!(other.acquire("r") > token);
}

/// What the process has of memory that is its own, in kB: not the buffers that it has touched.
fn own_memory_kb(pid: i32) -> i64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the backend runs");
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"));
    let kb = line.and_then(|l| l.trim().strip_suffix(" kB")?.parse().ok());
    kb.expect("a status names RssAnon")
}

fn users_in_turn_cost_no_memory() {
    let db = Db::new();
    let mut s = db.session();
    let definer = db.role();
    // a long name makes a leak of it plain
    let resource = "r".repeat(200);
    s.exec(&format!(
        "CREATE TABLE t (n int); SELECT fence_table('t', '{resource}'); GRANT INSERT ON t TO {definer};
         CREATE FUNCTION put(i int) RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS
             'BEGIN INSERT INTO t VALUES (i); END';
         ALTER FUNCTION put OWNER TO {definer}"
    ));
    let token = s.acquire(&resource);
    let turns = |s: &mut Session, count: i32| {
        s.exec(&format!(
            "DO 'BEGIN FOR i IN 1..{count} LOOP INSERT INTO t VALUES (i); PERFORM put(i); END LOOP; END'"
        ));
        own_memory_kb(s.pid)
    };
    for present in [
        format!("SELECT fence('{resource}', {token})"),
        format!("SET LOCAL leasehold.token = '{token}'"),
    ] {
        s.exec(&format!("BEGIN; {present}"));
        let before = turns(&mut s, 1000);
        let after = turns(&mut s, 100_000);
        s.exec("ROLLBACK");
        let grown = after - before;
        assert!(grown < 20_000, "{grown} kB more after 100,000 turns");
    }
}

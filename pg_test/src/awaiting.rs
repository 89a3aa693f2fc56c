//! Layer wait, part procedure: `CALL await_lease` waits without a transaction, so it holds nothing that others need;
//! where it would have to end its caller's transaction, it is refused.

use std::time::{Duration, Instant};

use crate::cluster::{Db, Stop, wait_for};
use crate::queueing::{AWAIT, WAIT};
use crate::session::{Pending, Session};

crate::tests![
    procedure_answers_in_its_argument,
    procedure_waits_longer_than_the_function_may,
    procedure_and_function_share_a_queue,
    procedure_is_refused_in_a_block,
    procedure_runs_at_the_top_of_a_do_block,
    procedure_cannot_end_a_subtransaction,
    procedure_commits_what_its_block_did_before,
    procedure_holds_no_snapshot_while_it_waits,
    procedure_holds_no_snapshot_while_it_drains,
    procedure_holds_no_number_while_it_drains,
    vacuum_and_index_builds_go_on_beside_a_waiting_procedure,
    waiting_procedure_can_be_ended,
    extension_dropped_under_a_waiting_procedure,
    lease_of_a_procedure_is_durable_and_fences,
    procedure_in_memory,
    procedure_checks_its_context,
];

fn waits(db: &Db) -> Pending {
    db.queued(db.session(), "r", AWAIT)
}

fn procedure_answers_in_its_argument() {
    let db = Db::new();
    let (mut s, mut other) = (db.session(), db.session());
    let token = s.text("CALL await_lease('r')").expect("a token");
    let token: i64 = token.parse().expect("a number");
    assert!(s.check_fence("r", token));
    // in vain, for no time and for a short one
    for wait in ["'0'", "'1 microsecond'", "'100ms'"] {
        let begun = Instant::now();
        let sql = format!("CALL await_lease('r', wait => {wait})");
        assert_eq!(other.text(&sql), None, "{wait}");
        assert!(wait != "'100ms'" || begun.elapsed() >= Duration::from_millis(100));
        assert!(s.queue("r").is_empty());
    }
    // what is passed in counts for nothing
    assert_eq!(
        other.text("CALL await_lease('r', 'me', '1min', '0', 42)"),
        None
    );
    // by the extended protocol too
    let granted: Option<i64> = other.one("CALL await_lease('q', 'me', '1min', '0')");
    let granted = granted.expect("a token");
    assert_eq!(s.info("q", "holder").as_deref(), Some("me"));
    assert!(s.info_says("q", "ttl = '1min'"));
    assert!(s.release("q", granted));
    assert!(s.release("r", token));
}

fn procedure_waits_longer_than_the_function_may() {
    let db = Db::with(&[("leasehold.max_wait", "1ms")]);
    let mut s = db.session();
    let token = s.acquire("r");
    for wait in ["'1h'", "NULL", "'1000 years'"] {
        let sql = format!("CALL await_lease('r', wait => {wait})");
        let mut waiting = db.queued(db.session(), "r", &sql);
        wait_for("it to have waited", || {
            let waited: bool = s.one("SELECT waited > '50ms'::interval FROM leasehold.waiters");
            waited.then_some(())
        });
        assert!(!waiting.is_done());
        s.cancel(waiting.pid);
        waiting.failed().1.is("57014");
    }
    let waiting = waits(&db);
    assert!(s.release("r", token));
    waiting.granted();
}

fn procedure_and_function_share_a_queue() {
    let db = Db::new();
    let (mut s, mut watch) = (db.session(), db.session());
    let mut token = s.acquire("r");
    let mut waiting: Vec<_> = (0..6)
        .map(|i| {
            let sql = if i % 2 == 0 { AWAIT } else { WAIT };
            db.queued(db.session(), "r", sql)
        })
        .collect();
    let mut pids: Vec<i32> = waiting.iter().map(|w| w.pid).collect();
    while !waiting.is_empty() {
        assert!(s.release("r", token));
        let (next, granted) = waiting.remove(0).granted();
        assert!(granted > token);
        pids.remove(0);
        assert_eq!(watch.queue("r"), pids);
        (s, token) = (next, granted);
    }
}

fn procedure_is_refused_in_a_block() {
    let db = Db::new();
    let mut s = db.session();
    s.exec(
        "CREATE PROCEDURE bound() LANGUAGE plpgsql SET work_mem = '1MB' AS $$
            DECLARE t bigint; BEGIN CALL await_lease('r', token => t); END $$;
         CREATE FUNCTION f() RETURNS bigint LANGUAGE plpgsql AS $$
            DECLARE t bigint; BEGIN CALL await_lease('r', token => t); RETURN t; END $$",
    );
    let in_do = "DO $$ DECLARE t bigint; BEGIN CALL await_lease('r', token => t); END $$";
    for sql in [
        "BEGIN; CALL await_lease('r')",
        "BEGIN; CALL await_lease('r', wait => '0')",
        "SELECT 1; CALL await_lease('r')",
        "SELECT f()",
        "CALL bound()",
        &format!("BEGIN; {in_do}"),
    ] {
        let error = db.refused(&mut s, sql, "25001");
        error
            .tells("await_lease()")
            .details("ends its transaction")
            .hints_at("acquire_lease()");
    }
    // where it would have had to wait too
    s.acquire("r");
    db.refused(&mut s, "SELECT f()", "25001");
    assert!(s.queue("r").is_empty());
}

fn procedure_runs_at_the_top_of_a_do_block() {
    let db = Db::new();
    let mut s = db.session();
    s.exec(
        "CREATE TABLE got (n int, token bigint, seen int);
         CREATE PROCEDURE get(resource text, INOUT t bigint) LANGUAGE plpgsql AS $$
            BEGIN CALL await_lease(resource, token => t); END $$",
    );
    let mut token = s.acquire("r");
    // one after the other, through a procedure of one's own, and in a loop over a query, which stays open
    let waiting = db.queued(
        db.session(),
        "r",
        "DO $$
         DECLARE t bigint; i int;
         BEGIN
            FOR i IN SELECT generate_series(1, 3) LOOP
                CALL get('r', t);
                INSERT INTO got SELECT i, t, count(*) FROM got;
                COMMIT;
            END LOOP;
            CALL await_lease('r', ttl => '5min', wait => '0', token => t);
            INSERT INTO got VALUES (4, t);
         END $$",
    );
    let pid = waiting.pid;
    for n in 1..=3 {
        assert!(s.release("r", token));
        token = wait_for("the grant", || {
            let granted: Option<i64> = s.one(&format!("SELECT max(token) FROM got WHERE n = {n}"));
            granted
        });
        if n < 3 {
            db.wait_queue("r", &[pid]);
        }
    }
    waiting.join().1.expect("the block ends");
    let got = s.rows("SELECT n, token IS NOT NULL, seen FROM got ORDER BY n");
    let text = |value: &str| Some(value.to_owned());
    assert_eq!(
        got,
        [
            [text("1"), text("t"), text("0")],
            [text("2"), text("t"), text("1")],
            [text("3"), text("t"), text("2")],
            [text("4"), text("f"), None],
        ]
    );
}

/// A block with EXCEPTION is a subtransaction, which the procedure cannot end: it is refused where it has to wait, and
/// leaves the queue by that.
fn procedure_cannot_end_a_subtransaction() {
    let db = Db::new();
    let (mut s, mut other) = (db.session(), db.session());
    let token = s.acquire("r");
    let call = "DO $$ DECLARE t bigint;
         BEGIN
            BEGIN CALL await_lease('r', token => t);
            EXCEPTION WHEN division_by_zero THEN NULL; END;
         END $$";
    let error = other.err(call);
    assert!(
        ["2D000", "25001"].contains(&error.sqlstate.as_str()),
        "{error}"
    );
    assert!(s.queue("r").is_empty());
    let waiting = waits(&db);
    assert!(s.release("r", token));
    let (mut waiter, token) = waiting.granted();
    assert!(waiter.release("r", token));
    // caught, and the block goes on
    let token = s.acquire("r");
    other.exec(
        "DO $$ DECLARE t bigint;
         BEGIN
            BEGIN CALL await_lease('r', token => t); RAISE 'it waited';
            EXCEPTION WHEN invalid_transaction_termination OR active_sql_transaction THEN NULL; END;
            COMMIT;
         END $$",
    );
    assert!(s.queue("r").is_empty());
    assert!(s.release("r", token));
    s.acquire("r");
}

fn procedure_commits_what_its_block_did_before() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE done (n int)");
    let token = s.acquire("r");
    let waiting = db.queued(
        db.session(),
        "r",
        "DO $$ DECLARE t bigint;
         BEGIN
            INSERT INTO done VALUES (1);
            PERFORM acquire_lease('own', ttl => '5min');
            CALL await_lease('r', ttl => '5min', token => t);
            INSERT INTO done VALUES (2);
            IF NOT check_fence('r', t) THEN RAISE 'no lease'; END IF;
            RAISE division_by_zero;
         END $$",
    );
    wait_for("the commit", || {
        let rows: i64 = s.one("SELECT count(*) FROM done");
        (rows == 1).then_some(())
    });
    assert_eq!(s.state_of("own"), "held");
    assert!(s.release("r", token));
    waiting.failed().1.is("22012");
    // what came after, the grant included, is undone
    assert_eq!(s.one::<i64>("SELECT count(*) FROM done"), 1);
    assert_eq!(s.state_of("r"), "free");
    s.acquire("r");
}

fn horizon(s: &mut Session, pid: i32) -> Vec<Option<String>> {
    s.rows(&format!(
        "SELECT backend_xmin, backend_xid FROM pg_stat_activity WHERE pid = {pid}"
    ))
    .remove(0)
}

fn procedure_holds_no_snapshot_while_it_waits() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE t (n int)");
    s.acquire("r");
    let (alone, function) = (waits(&db), db.waiter());
    // after work of its own
    let in_do = db.queued(
        db.session(),
        "r",
        "DO $$ DECLARE t bigint;
         BEGIN
            INSERT INTO t VALUES (1);
            FOR t IN SELECT n FROM t LOOP CALL await_lease('r', token => t); END LOOP;
         END $$",
    );
    // by a prepared statement, and at a level whose transactions keep their snapshot
    let snapshot = db.queued(
        db.session_with_options("-c default_transaction_isolation=serializable"),
        "r",
        AWAIT,
    );
    for pid in [alone.pid, in_do.pid, snapshot.pid] {
        wait_for("the sleep", || {
            let asleep: bool = s.one(&format!(
                "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {pid} AND wait_event = 'leasehold wait')"
            ));
            asleep.then_some(())
        });
        assert_eq!(horizon(&mut s, pid), [None, None]);
        // nothing but its own number is locked
        let locks = s.rows(&format!(
            "SELECT locktype, relation::regclass FROM pg_locks WHERE pid = {pid} AND locktype <> 'virtualxid'"
        ));
        assert_eq!(locks, Vec::<Vec<Option<String>>>::new());
    }
    assert!(
        horizon(&mut s, function.pid)[0].is_some(),
        "this test would not see a snapshot"
    );
    let waiting = [alone, function, in_do, snapshot];
    waiting.iter().for_each(|w| s.cancel(w.pid));
    waiting
        .into_iter()
        .for_each(|w| drop(w.failed().1.is("57014")));
    assert!(s.queue("r").is_empty());
}

/// Nor while it waits for a transaction that is open under the old token: at once, and after a sleep in the queue.
fn procedure_holds_no_snapshot_while_it_drains() {
    let db = Db::of_waiters("1h");
    let (mut s, mut writer) = (db.session(), db.session());
    for sleeps_first in [true, false] {
        let token = s.acquire("r");
        writer.exec(&format!("BEGIN; SELECT fence('r', {token})"));
        let waiting = if sleeps_first {
            let waiting = waits(&db);
            assert!(s.release("r", token));
            waiting
        } else {
            assert!(s.release("r", token));
            db.session().spawn(AWAIT)
        };
        wait_for("the drain", || {
            (s.state_of("r") == "draining").then_some(())
        });
        let what = if sleeps_first {
            "after a sleep"
        } else {
            "at once"
        };
        wait_for(&format!("no snapshot to be held in a drain {what}"), || {
            (horizon(&mut s, waiting.pid) == [None, None]).then_some(())
        });
        writer.exec("COMMIT");
        let (mut waiter, token) = waiting.granted();
        assert!(waiter.release("r", token));
    }
}

/// Taking a block of tokens, as the first grant after a start must, gives a transaction a number.
fn procedure_holds_no_number_while_it_drains() {
    let db = Db::of_waiters("1h");
    let token: i64 = db.session().one("SELECT acquire_lease('r', ttl => '1s')");
    db.session().exec(&format!(
        "BEGIN; SELECT fence('r', {token}); PREPARE TRANSACTION 'p'"
    ));
    db.cluster.restart(Stop::Fast);
    let mut s = db.session();
    let waiting = db.session().spawn(AWAIT);
    wait_for("the drain", || {
        (s.state_of("r") == "draining").then_some(())
    });
    wait_for("no number to be held in a drain", || {
        (horizon(&mut s, waiting.pid) == [None, None]).then_some(())
    });
    s.exec("COMMIT PREPARED 'p'");
    waiting.granted();
}

fn vacuum_and_index_builds_go_on_beside_a_waiting_procedure() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE t AS SELECT generate_series(1, 1000) AS n");
    let token = s.acquire("r");
    let waiting = db.queued(
        db.session(),
        "r",
        "DO $$ DECLARE t bigint;
         BEGIN
            PERFORM count(*) FROM t;
            CALL await_lease('r', ttl => '5min', token => t);
         END $$",
    );
    s.exec("DELETE FROM t WHERE n > 10");
    // a worker of the server may hold something for a moment, but not for long
    wait_for("the rows to be removed", || {
        s.exec("VACUUM t");
        let pages: i64 = s.one("SELECT pg_relation_size('t') / 8192");
        (pages == 1).then_some(())
    });
    s.exec("CREATE INDEX CONCURRENTLY ON t (n)");
    assert_eq!(s.queue("r"), [waiting.pid]);
    // the function is in the way of both, which is why there is the procedure
    let function = db.waiter();
    s.exec("DELETE FROM t");
    s.exec("VACUUM t");
    assert_eq!(s.one::<i64>("SELECT pg_relation_size('t') / 8192"), 1);
    s.cancel(function.pid);
    function.failed().1.is("57014");
    assert!(s.release("r", token));
    waiting.join().1.expect("it is granted");
    assert_eq!(s.state_of("r"), "held");
}

fn waiting_procedure_can_be_ended() {
    let db = Db::new();
    let mut s = db.session();
    let token = s.acquire("r");
    for (setting, sqlstate) in [("statement_timeout", "57014"), ("lock_timeout", "55P03")] {
        let mut waiter = db.session();
        waiter.exec(&format!("SET {setting} = '50ms'"));
        let error = waiter.err(AWAIT).is(sqlstate);
        assert!(s.queue("r").is_empty(), "still in the queue after {error}");
        // the session goes on, and may wait again
        waiter.exec(&format!("RESET {setting}"));
        let waiting = db.queued(waiter, "r", AWAIT);
        s.cancel(waiting.pid);
        let (waiter, error) = waiting.failed();
        error.is("57014");
        assert!(s.queue("r").is_empty(), "still in the queue");
        let waiting = db.queued(waiter, "r", AWAIT);
        let pid = waiting.pid;
        s.terminate(pid);
        assert!(waiting.failed().1.is_lost());
        db.cluster.wait_until_left(pid);
        assert!(s.queue("r").is_empty(), "still in the queue");
    }
    let waiting = waits(&db);
    assert!(s.release("r", token));
    waiting.granted();
}

fn extension_dropped_under_a_waiting_procedure() {
    let db = Db::new();
    let mut s = db.session();
    s.acquire("r");
    let waiting = waits(&db);
    s.exec("DROP EXTENSION leasehold");
    let (mut waiter, error) = waiting.failed();
    error.is("55000").well_written();
    waiter.exec("CREATE EXTENSION leasehold");
    let token = waiter.acquire("r");
    // made again meanwhile, it is another one
    let waiting = waits(&db);
    s.exec("BEGIN; DROP EXTENSION leasehold; CREATE EXTENSION leasehold; COMMIT");
    waiting.failed().1.is("55000").well_written();
    assert!(s.queue("r").is_empty());
    assert!(s.acquire("r") > token);
}

fn lease_of_a_procedure_is_durable_and_fences() {
    let db = Db::of_waiters("1h");
    let mut s = db.session();
    s.exec("CREATE TABLE doc AS SELECT 0 AS n; SELECT fence_table('doc', 'r')");
    let stale = s.acquire("r");
    let waiting = waits(&db);
    assert!(s.release("r", stale));
    let (mut waiter, token) = waiting.granted();
    assert!(waiter.info_says("r", "durable"));
    db.cluster.restart(Stop::Immediate);
    let mut s = db.session();
    assert_eq!(s.try_acquire("r"), None);
    assert!(s.renew("r", token));
    let write =
        |token: i64| format!("BEGIN; SELECT fence('r', {token}); UPDATE doc SET n = n + 1; COMMIT");
    s.exec(&write(token));
    s.err(&write(stale)).is("LH001");
    s.exec("ROLLBACK");
    assert_eq!(s.one::<i32>("SELECT n FROM doc"), 1);
    assert!(waiter.err("SELECT 1").is_lost());
    // in the very block of the call it fences too
    let waiting = db.queued(
        db.session(),
        "r",
        "DO $$ DECLARE t bigint;
         BEGIN CALL await_lease('r', token => t); UPDATE doc SET n = n + 1; END $$",
    );
    assert!(s.release("r", token));
    waiting.join().1.expect("it writes");
    assert_eq!(s.one::<i32>("SELECT n FROM doc"), 2);
}

fn procedure_in_memory() {
    let db = Db::of_waiters("1h");
    let mut s = db.session();
    let token = s.acquire("r");
    let waiting = db.queued(
        db.session_with_options("-c leasehold.durability=memory"),
        "r",
        AWAIT,
    );
    assert!(s.release("r", token));
    let (mut waiter, token) = waiting.granted();
    assert!(s.info_says("r", "NOT durable"));
    let behind = waits(&db);
    assert!(waiter.release("r", token));
    behind.granted();
}

fn procedure_checks_its_context() {
    let db = Db::new();
    let mut read_only = db.session_with_options("-c default_transaction_read_only=on");
    db.refused(&mut read_only, AWAIT, "25006");
    let mut s = db.session();
    for (arguments, sqlstate) in [
        ("NULL", "22004"),
        ("''", "22023"),
        ("'r', ''", "22023"),
        ("'r', ttl => '0'", "22023"),
        ("'r', ttl => '1 year'", "22023"),
        ("repeat('x', 256)", "22001"),
    ] {
        db.refused(&mut s, &format!("CALL await_lease({arguments})"), sqlstate);
    }
    // at a level whose transactions keep their snapshot, but it is alone in its own
    let mut fixed = db.session_with_options("-c default_transaction_isolation=serializable");
    assert!(fixed.text(AWAIT).is_some());
}

//! Layer zombies, part stalled clients: who reads no more is in nobody's way, wherever his session is held up by that.
//!
//! PostgreSQL's backend that has an error to tell holds its interrupts off, and its locks, until the client has taken the
//! message. So the tests fill what the connection has room for, to the last message that fits: what comes next waits.

use crate::cluster::{Db, wait_for};
use crate::wire::{Wire, message};
use crate::zombies::{
    await_a_standby_that_is_not_there, n_of_doc, no_one_was_signalled, open, server, take,
    wait_event, was_told_to_end,
};

crate::tests![
    client_that_reads_no_more_is_in_nobodys_way,
    copy_that_waits_for_its_client_is_ended,
    cancel_that_its_client_does_not_read_is_in_nobodys_way,
    error_that_its_client_does_not_read_is_in_nobodys_way,
    error_that_no_connection_has_room_for_is_in_nobodys_way,
    error_is_told_before_its_sync,
    failed_commit_that_its_client_does_not_read_is_in_nobodys_way,
    warning_of_a_commit_that_its_client_does_not_read_is_in_nobodys_way,
    error_in_a_savepoint_that_its_client_does_not_read_is_in_nobodys_way,
    end_that_its_client_does_not_read_is_in_nobodys_way,
    end_of_an_idle_client_that_does_not_read_is_in_nobodys_way,
    end_that_there_is_room_for_is_told,
    notices_of_a_parallel_worker_wait_for_their_client,
];

/// Text of a row that fills a backend's buffer of 8 kB: one row is one write to the socket.
const ROW: usize = 8192 - 11;

/// A query of so many rows, each of one write, and then of what `last` says, which writes nothing before it ends.
fn rows(count: usize, last: &str) -> String {
    format!(
        "SELECT CASE WHEN i <= {count} THEN repeat('x', {ROW}) ELSE {last} END
           FROM generate_series(1, {count} + 1) i"
    )
}

/// As many rows, and nothing behind them.
fn only_rows(count: usize) -> String {
    format!("SELECT repeat('x', {ROW}) FROM generate_series(1, {count})")
}

/// `last`, of `rows`: something that goes on for long.
const SLEEP: &str = "pg_sleep(3600)::text";
/// `last`, of `rows`: an error.
const ERROR: &str = "(1 / (i - i))::text";

fn pid(wire: &mut Wire) -> i32 {
    let answer = wire.query("SELECT pg_backend_pid()");
    let pid = answer.values[0].as_deref().expect("a pid");
    pid.parse().expect("a pid is a number")
}

/// How many rows a connection has room for, if nobody reads: the write of the next would wait.
fn room(db: &Db) -> usize {
    let fits = |count: usize| {
        let mut wire = Wire::connect(db, "");
        let pid = pid(&mut wire);
        wire.begin(&rows(count, SLEEP));
        let sql = format!(
            "SELECT wait_event FROM pg_stat_activity
              WHERE pid = {pid} AND wait_event IN ('PgSleep', 'ClientWrite')"
        );
        let mut s = db.session();
        wait_for("the rows", || s.rows(&sql).pop()) == [Some("PgSleep".to_owned())]
    };
    let (mut fit, mut too_many) = (1, 4096);
    assert!(fits(fit) && !fits(too_many), "the socket is none");
    while too_many - fit > 1 {
        let middle = usize::midpoint(fit, too_many);
        if fits(middle) {
            fit = middle;
        } else {
            too_many = middle;
        }
    }
    fit
}

/// A server with what the zombies need, and how many rows a connection to it has room for.
fn server_and_room(policy: &str) -> (Db, usize) {
    let db = server("0", policy);
    db.session().exec(
        "CREATE TABLE a (n int); CREATE TABLE b (n int);
         CREATE FUNCTION swallow() RETURNS text LANGUAGE plpgsql AS $$
         BEGIN
           PERFORM pg_sleep(3600);
         EXCEPTION WHEN query_canceled THEN
           PERFORM pg_sleep(3600);
         END $$",
    );
    let room = room(&db);
    (db, room)
}

/// A client whose transaction is a zombie's, and the pid of its backend.
fn zombie(db: &Db, options: &str) -> (Wire, i32) {
    let mut wire = Wire::connect(db, options);
    let pid = pid(&mut wire);
    let token = db.session().acquire_expired("r");
    let answer = wire.query(&open(token));
    assert_eq!(answer.sqlstate, None, "nobody wants it yet");
    (wire, pid)
}

/// The client reads at last: all that was sent, its error among it, and its session goes on.
#[track_caller]
fn is_told(wire: &mut Wire, pid: i32, count: usize, sqlstate: &str) {
    let answer = wire.answer();
    assert_eq!((answer.values.len(), answer.is_ready), (count, true));
    assert_eq!(answer.sqlstate.as_deref(), Some(sqlstate));
    let answer = wire.query("ROLLBACK; SELECT pg_backend_pid()");
    assert_eq!(answer.values, [Some(pid.to_string())]);
}

/// The session is ended for who wants the resource, and the client gets so many rows, and then the end of its
/// connection. Where the next row was on its way, the end of the last one is lost with the backend's buffer.
#[track_caller]
fn is_ended(db: &Db, mut wire: Wire, pid: i32, count: usize, is_ready: bool) {
    take(&mut db.session());
    was_told_to_end(db, pid);
    assert_eq!(n_of_doc(db), 0, "the zombie's write is there");
    let answer = wire.answer();
    assert_eq!(answer.sqlstate, None, "there was room for more");
    assert_eq!((answer.values.len(), answer.is_ready), (count, is_ready));
}

fn client_that_reads_no_more_is_in_nobodys_way() {
    let (db, room) = server_and_room("terminate");
    let (mut wire, pid) = zombie(&db, "");
    wire.begin(&only_rows(2 * room));
    wait_event(&db, pid, "ClientWrite");
    is_ended(&db, wire, pid, room - 1, false);
}

fn copy_that_waits_for_its_client_is_ended() {
    let db = server("0", "terminate");
    let (mut wire, pid) = zombie(&db, "");
    wire.begin("COPY plain FROM STDIN");
    wire.write(&message(b'd', b"1\n"));
    db.cluster.wait_sql(
        "SELECT EXISTS (SELECT FROM pg_stat_progress_copy WHERE bytes_processed > 0)",
        "the row",
    );
    db.cluster.wait_until_idle(pid);
    take(&mut db.session());
    was_told_to_end(&db, pid);
    let answer = wire.answer();
    assert_eq!(answer.sqlstate.as_deref(), Some("57P01"));
    assert_eq!(n_of_doc(&db), 0);
    assert_eq!(db.session().one::<i64>("SELECT count(*) FROM plain"), 1);
}

fn cancel_that_its_client_does_not_read_is_in_nobodys_way() {
    let (db, room) = server_and_room("cancel");
    let (mut wire, pid) = zombie(&db, "");
    wire.begin(&rows(room, SLEEP));
    wait_event(&db, pid, "PgSleep");
    take(&mut db.session());
    is_told(&mut wire, pid, room, "57014");
    assert_eq!(n_of_doc(&db), 0);
}

fn error_that_its_client_does_not_read_is_in_nobodys_way() {
    let (db, room) = server_and_room("wait");
    let (mut wire, pid) = zombie(&db, "");
    wire.begin(&rows(room, ERROR));
    wait_event(&db, pid, "ClientWrite");
    take(&mut db.session());
    no_one_was_signalled(&db);
    is_told(&mut wire, pid, room, "22012");
    assert_eq!(n_of_doc(&db), 0);
}

fn error_that_no_connection_has_room_for_is_in_nobodys_way() {
    let db = server("0", "wait");
    let (mut wire, pid) = zombie(&db, "");
    wire.begin("DO $$ BEGIN RAISE EXCEPTION '%', repeat('x', 10000000); END $$");
    wait_event(&db, pid, "ClientWrite");
    take(&mut db.session());
    no_one_was_signalled(&db);
    is_told(&mut wire, pid, 0, "P0001");
}

/// A client may wait for the error before it sends anything else: nothing follows that would take it along.
fn error_is_told_before_its_sync() {
    let (db, room) = server_and_room("wait");
    for begin in ["SELECT 1", "SAVEPOINT s"] {
        let (mut wire, pid) = zombie(&db, "");
        wire.query(begin);
        wire.begin_series(&rows(room, ERROR));
        wait_event(&db, pid, "ClientWrite");
        let answer = wire.error();
        assert_eq!(answer.values.len(), room, "{begin}");
        assert_eq!(answer.sqlstate.as_deref(), Some("22012"), "{begin}");
        assert!(wire.sync().is_ready);
        let answer = wire.query("ROLLBACK; SELECT pg_backend_pid()");
        assert_eq!(answer.values, [Some(pid.to_string())]);
    }
}

/// A commit that fails after the point from which it is never cut off.
fn failed_commit_that_its_client_does_not_read_is_in_nobodys_way() {
    let (db, room) = server_and_room("wait");
    let serializable = "-c default_transaction_isolation=serializable";
    let (mut wire, pid) = zombie(&db, serializable);
    let mut other = Wire::connect(&db, serializable);
    // each reads what the other writes; who commits first wins
    assert_eq!(other.query("BEGIN; SELECT n FROM b").sqlstate, None);
    let answer = wire.query("SELECT n FROM a; INSERT INTO b VALUES (1)");
    assert_eq!(answer.sqlstate, None);
    let answer = other.query("INSERT INTO a VALUES (1); COMMIT");
    assert_eq!(answer.sqlstate, None);
    wire.begin(&format!("{}; COMMIT", only_rows(room)));
    wait_event(&db, pid, "ClientWrite");
    take(&mut db.session());
    no_one_was_signalled(&db);
    is_told(&mut wire, pid, room, "40001");
    assert_eq!(n_of_doc(&db), 0);
}

fn warning_of_a_commit_that_its_client_does_not_read_is_in_nobodys_way() {
    let (db, room) = server_and_room("wait");
    let (mut wire, pid) = zombie(&db, "");
    await_a_standby_that_is_not_there(&db);
    wire.begin(&format!("{}; COMMIT", only_rows(room)));
    wait_event(&db, pid, "SyncRep");
    // that it may not be replicated is a warning, with interrupts held off, before others see the commit
    db.session()
        .exec(&format!("SELECT pg_cancel_backend({pid})"));
    wait_for("the commit", || (n_of_doc(&db) == 1).then_some(()));
    let answer = wire.answer();
    assert_eq!((answer.values.len(), answer.is_ready), (room, true));
    assert_eq!(answer.sqlstate, None);
    assert_eq!(answer.warnings, ["01000"]);
}

/// The rest of the transaction still holds the fence, and waits for its client where it can be ended.
fn error_in_a_savepoint_that_its_client_does_not_read_is_in_nobodys_way() {
    let (db, room) = server_and_room("terminate");
    let (mut wire, pid) = zombie(&db, "");
    assert_eq!(wire.query("SAVEPOINT s").sqlstate, None);
    wire.begin(&rows(room, ERROR));
    wait_event(&db, pid, "ClientWrite");
    is_ended(&db, wire, pid, room - 1, false);
}

fn end_that_its_client_does_not_read_is_in_nobodys_way() {
    let (db, room) = server_and_room("terminate");
    let (mut wire, pid) = zombie(&db, "");
    wire.begin(&rows(room, "swallow()"));
    wait_event(&db, pid, "PgSleep");
    is_ended(&db, wire, pid, room - 1, false);
}

fn end_of_an_idle_client_that_does_not_read_is_in_nobodys_way() {
    let (db, room) = server_and_room("terminate");
    let (mut wire, pid) = zombie(&db, "");
    // the last row goes out with the end of the query, in one write that fills the room
    wire.begin(&rows(room - 1, &format!("repeat('x', {ROW} - 200)")));
    is_idle(&db, pid);
    is_ended(&db, wire, pid, room, true);
}

fn end_that_there_is_room_for_is_told() {
    let (db, room) = server_and_room("terminate");
    let (mut wire, pid) = zombie(&db, "");
    wire.begin(&only_rows(room / 2));
    is_idle(&db, pid);
    take(&mut db.session());
    was_told_to_end(&db, pid);
    let answer = wire.answer();
    assert_eq!((answer.values.len(), answer.is_ready), (room / 2, true));
    let answer = wire.answer();
    assert_eq!(answer.sqlstate.as_deref(), Some("57P01"));
}

/// What nobody reads is kept to a bound: beyond it the worker is slowed down, as ever, and nothing is lost.
fn notices_of_a_parallel_worker_wait_for_their_client() {
    let db = server("0", "wait");
    db.session().exec(
        "CREATE FUNCTION flood() RETURNS text LANGUAGE plpgsql PARALLEL SAFE AS $$
         BEGIN
           FOR i IN 1..5000 LOOP RAISE NOTICE '%', repeat('x', 1000); END LOOP;
           RETURN 'done';
         END $$",
    );
    let (mut wire, pid) = zombie(&db, "");
    let answer = wire.query(
        "SELECT set_config(CASE WHEN current_setting('server_version_num')::int < 160000
                                THEN 'force_parallel_mode' ELSE 'debug_parallel_query' END, 'on', false)",
    );
    assert_eq!(answer.sqlstate, None);
    wire.begin("SELECT flood()");
    let sql = format!(
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {pid} AND wait_event = 'ClientWrite')
            AND EXISTS (SELECT FROM pg_stat_activity WHERE leader_pid = {pid} AND wait_event = 'MessageQueuePutMessage')"
    );
    db.cluster.wait_sql(&sql, "the worker to wait");
    let answer = wire.answer();
    assert_eq!((answer.warnings.len(), answer.is_ready), (5000, true));
    assert_eq!(answer.values, [Some("done".to_owned())]);
}

/// The session has told the end of its rows, and waits for its client.
fn is_idle(db: &Db, pid: i32) {
    let idle = format!(
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {pid} AND wait_event = 'ClientRead'
                                                       AND query LIKE '%generate_series%')"
    );
    db.cluster.wait_sql(&idle, "the end of the query");
}

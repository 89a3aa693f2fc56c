//! Layer xact: leases and the fence across transactions, savepoints, errors, isolation levels and PREPARE
//! TRANSACTION. What a rollback undoes, what it does not, and who sees what when.

use std::sync::Arc;

use crate::cluster::{Cluster, Db, Stop, wait_for};
use crate::process::Signal;
use crate::session::Session;

crate::tests![
    rollback_undoes_acquire,
    aborted_acquire_keeps_t_max,
    rollback_keeps_a_released_lease,
    release_takes_effect_with_the_commit,
    taker_after_a_release_at_commit_sees_the_writes,
    repeated_release_within_a_transaction,
    release_then_acquire_in_one_transaction,
    renewal_is_not_undone_by_rollback,
    renewal_never_waits_for_a_renewal,
    savepoint_rollback_undoes_acquire,
    savepoint_release_keeps_acquire,
    nested_savepoints_undo_acquire,
    savepoint_rollback_undoes_release,
    savepoint_release_keeps_release,
    nested_savepoints_undo_release,
    savepoint_rollback_undoes_fence,
    savepoint_release_keeps_fence,
    nested_savepoints_undo_fence,
    savepoint_rollback_undoes_token_column_and_verdict,
    refused_write_in_a_savepoint_leaves_the_transaction_usable,
    exception_block_catches_by_sqlstate,
    exception_block_undoes_what_it_did,
    statement_timeout_in_the_middle_of_acquire,
    cancel_in_the_middle_of_acquire,
    terminate_in_the_middle_of_acquire,
    terminated_session_frees_its_uncommitted_acquire,
    disconnected_client_frees_its_uncommitted_acquire,
    terminated_session_keeps_its_committed_lease,
    terminated_session_forgets_its_uncommitted_release,
    transaction_that_presented_an_older_token_is_denied,
    read_committed_block_acquires,
    snapshot_block_cannot_acquire,
    lone_statement_may_acquire_at_any_isolation_level,
    several_statements_in_one_string_are_a_block,
    do_block_and_function_under_repeatable_read,
    snapshot_block_may_do_the_rest,
    snapshot_block_is_fenced_by_the_present,
    read_only_transaction_may_fence,
    read_only_transaction_cannot_acquire,
    read_only_transaction_renews_within_the_known_ttl,
    read_only_transaction_may_release,
    prepare_after_acquire_is_refused,
    prepare_after_release_is_refused,
    prepared_fenced_writes_commit_after_a_restart,
    prepared_fenced_writes_roll_back_after_a_restart,
    prepared_transaction_leaves_its_session_clean,
    cursor_and_copy_out_do_not_disturb,
    snapshot_older_than_the_grant_cannot_write,
];

fn docs(db: &Db) -> Session {
    let mut s = db.session();
    s.exec("CREATE TABLE doc (id int PRIMARY KEY, n int); INSERT INTO doc VALUES (1, 0), (2, 0)");
    s.exec("SELECT fence_table('doc', 'doc:{id}')");
    s
}

fn n_of_doc_1(db: &Db) -> i32 {
    db.session().one("SELECT n FROM doc WHERE id = 1")
}

fn rollback_undoes_acquire() {
    let db = Db::new();
    let (mut s, mut other) = (docs(&db), db.session());
    s.exec("BEGIN");
    let token = s.acquire("doc:1");
    s.exec("UPDATE doc SET n = 1 WHERE id = 1");
    assert_eq!(other.try_acquire("doc:1"), None);
    s.exec("ROLLBACK");
    assert_eq!(n_of_doc_1(&db), 0);
    assert_eq!(s.state_of("doc:1"), "free");
    assert!(!s.renew("doc:1", token) && !s.check_fence("doc:1", token));
    let next = other.acquire("doc:1");
    assert!(next > token, "a token was used twice");
}

fn aborted_acquire_keeps_t_max() {
    let db = Db::new();
    let mut s = docs(&db);
    let released = s.acquire("doc:1");
    s.release("doc:1", released);
    s.exec("BEGIN");
    let aborted = s.acquire("doc:1");
    s.exec("ROLLBACK");
    // the aborted one was granted by a transaction that was rolled back; the one before is below it
    db.refused(
        &mut s,
        &format!("SELECT fence('doc:1', {aborted})"),
        "LH002",
    );
    db.refused(
        &mut s,
        &format!("SELECT fence('doc:1', {released})"),
        "LH001",
    );
    assert!(!s.check_fence("doc:1", aborted) && !s.check_fence("doc:1", released));
    assert!(!s.release("doc:1", aborted) && !s.release("doc:1", released));
    let next = s.acquire("doc:1");
    assert!(next > aborted);
    db.refused(
        &mut s,
        &format!("SELECT fence('doc:1', {aborted})"),
        "LH001",
    );
    // an expired lease's token does not come back by the abort of the one that took it over
    let expired = s.acquire_expired("doc:2");
    s.exec("BEGIN");
    let aborted = s.acquire("doc:2");
    s.exec("ROLLBACK");
    assert!(aborted > expired);
    db.refused(
        &mut s,
        &format!("SELECT fence('doc:2', {expired})"),
        "LH001",
    );
}

fn rollback_keeps_a_released_lease() {
    let db = Db::new();
    let (mut s, mut other) = (docs(&db), db.session());
    let token = s.acquire("doc:1");
    let before = db.state();
    s.exec("BEGIN");
    assert!(s.release("doc:1", token));
    s.exec("ROLLBACK");
    assert_eq!(db.state(), before);
    assert_eq!(other.try_acquire("doc:1"), None);
    assert!(s.renew("doc:1", token));
    s.exec(&format!(
        "BEGIN; SELECT fence('doc:1', {token}); UPDATE doc SET n = 1 WHERE id = 1; COMMIT"
    ));
    // an error does what ROLLBACK does
    s.err(&format!(
        "BEGIN; SELECT release_lease('doc:1', {token}); SELECT 1/0"
    ))
    .is("22012");
    s.exec("ROLLBACK");
    assert_eq!(other.try_acquire("doc:1"), None);
    assert!(s.release("doc:1", token));
}

fn release_takes_effect_with_the_commit() {
    let db = Db::new();
    let (mut s, mut other) = (docs(&db), db.session());
    let token = s.acquire("doc:1");
    s.exec("BEGIN");
    assert!(s.release("doc:1", token));
    assert_eq!(
        other.try_acquire("doc:1"),
        None,
        "released before the commit"
    );
    assert!(
        other.check_fence("doc:1", token),
        "the lease lives until the commit"
    );
    assert_eq!(other.state_of("doc:1"), "held");
    s.exec("COMMIT");
    assert_eq!(other.state_of("doc:1"), "free");
    assert!(other.acquire("doc:1") > token);
}

fn taker_after_a_release_at_commit_sees_the_writes() {
    let db = Db::new();
    let (mut s, mut taker) = (docs(&db), db.session());
    let mut token = s.acquire("doc:1");
    for n in 1..=50 {
        s.exec(&format!(
            "BEGIN; SET LOCAL leasehold.token = '{token}'; UPDATE doc SET n = {n} WHERE id = 1"
        ));
        assert_eq!(taker.try_acquire("doc:1"), None);
        s.exec(&format!("SELECT release_lease('doc:1', {token}); COMMIT"));
        // in the very transaction of the grant
        taker.exec("BEGIN");
        token = taker.acquire("doc:1");
        assert_eq!(
            taker.one::<i32>("SELECT n FROM doc WHERE id = 1"),
            n,
            "a write of the last holder is not seen"
        );
        taker.exec("COMMIT");
        std::mem::swap(&mut s, &mut taker);
    }
}

fn repeated_release_within_a_transaction() {
    let db = Db::new();
    let mut s = docs(&db);
    let token = s.acquire("doc:1");
    s.exec("BEGIN");
    assert!(s.release("doc:1", token) && s.release("doc:1", token));
    s.exec("COMMIT");
    assert!(s.release("doc:1", token));
    assert_eq!(s.state_of("doc:1"), "free");
}

fn release_then_acquire_in_one_transaction() {
    let db = Db::new();
    let (mut s, mut other) = (docs(&db), db.session());
    let token = s.acquire("doc:1");
    s.exec("BEGIN");
    assert!(s.release("doc:1", token));
    // not released yet: it is held until the commit, by anyone's count
    assert_eq!(s.try_acquire("doc:1"), None);
    s.exec("COMMIT");
    // acquired and released in one: nothing is left
    s.exec("BEGIN");
    let token = s.acquire("doc:1");
    s.exec("UPDATE doc SET n = 1 WHERE id = 1");
    assert!(s.release("doc:1", token));
    s.exec("COMMIT");
    assert_eq!(s.state_of("doc:1"), "free");
    assert!(other.acquire("doc:1") > token);
    assert_eq!(n_of_doc_1(&db), 1);
}

fn renewal_is_not_undone_by_rollback() {
    let db = Db::new();
    let mut s = docs(&db);
    let token: i64 = s.one("SELECT acquire_lease('doc:1', ttl => '20s')");
    let first = s.info("doc:1", "renewed_at");
    s.exec("BEGIN");
    assert!(s.one::<bool>(&format!("SELECT renew_lease('doc:1', {token}, '20s')")));
    s.exec("ROLLBACK");
    let second = s.info("doc:1", "renewed_at");
    assert!(second > first, "the renewal was undone");
    // the longer one is written to the ledger, which the rollback does not undo either
    s.exec("BEGIN");
    assert!(s.one::<bool>(&format!("SELECT renew_lease('doc:1', {token}, '5min')")));
    s.exec("ROLLBACK");
    assert!(
        s.info_says("doc:1", "remaining > '4min'::interval"),
        "the longer renewal was undone"
    );
    assert!(s.check_fence("doc:1", token));
}

fn renewal_never_waits_for_a_renewal() {
    let db = Db::new();
    let (mut s, mut other) = (db.session(), db.session());
    let ledger = |session: &mut Session| -> String {
        session.one("SELECT ttl_us::text FROM leasehold.ledger WHERE resource = 'r'")
    };
    let token: i64 = s.one("SELECT acquire_lease('r', ttl => '1min')");
    s.exec("BEGIN");
    assert!(s.one::<bool>(&format!("SELECT renew_lease('r', {token}, '2min')")));
    // a wait would end in 57014
    other.exec("SET statement_timeout = '30s'");
    for ttl in ["1min", "90s", "2min", "3min", "10s"] {
        let renewed: bool = other.one(&format!("SELECT renew_lease('r', {token}, '{ttl}')"));
        assert!(renewed, "{ttl}");
    }
    assert_eq!(ledger(&mut other), "180000000");
    assert!(s.one::<bool>(&format!("SELECT renew_lease('r', {token}, '150s')")));
    s.exec("ROLLBACK");
    // the ledger knows the longest one, whoever rolls back
    assert_eq!(ledger(&mut other), "180000000");
    assert!(other.info_says("r", "remaining > '150s'::interval"));
    assert!(s.one::<bool>(&format!("SELECT renew_lease('r', {token}, '4min')")));
    assert!(s.info_says("r", "ttl = '4min'::interval"));
    assert_eq!(ledger(&mut s), "240000000");
}

fn savepoint_rollback_undoes_acquire() {
    let db = Db::new();
    let (mut s, mut other) = (docs(&db), db.session());
    s.exec("BEGIN; INSERT INTO doc SELECT 3, 0 WHERE false; SAVEPOINT a");
    let first = s.acquire("doc:1");
    s.exec("UPDATE doc SET n = 1 WHERE id = 1; ROLLBACK TO a");
    // the transaction is still open, and yet the lease can be had
    let second = other.acquire("doc:1");
    assert!(second > first);
    s.exec("SAVEPOINT b");
    s.err("UPDATE doc SET n = 2 WHERE id = 1")
        .is("LH003")
        .well_written();
    s.exec("ROLLBACK TO b; COMMIT");
    assert_eq!(n_of_doc_1(&db), 0);
    assert!(
        other.renew("doc:1", second),
        "the commit took the other's lease"
    );
}

fn savepoint_release_keeps_acquire() {
    let db = Db::new();
    let (mut s, mut other) = (docs(&db), db.session());
    s.exec("BEGIN; SAVEPOINT a");
    let token = s.acquire("doc:1");
    s.exec("RELEASE a; UPDATE doc SET n = 1 WHERE id = 1");
    assert_eq!(other.try_acquire("doc:1"), None);
    s.exec("COMMIT");
    assert_eq!(n_of_doc_1(&db), 1);
    assert!(s.renew("doc:1", token));
    // and the whole transaction's rollback takes it along
    s.exec("BEGIN; SAVEPOINT a");
    let token = s.acquire("doc:2");
    s.exec("RELEASE a; ROLLBACK");
    assert!(other.acquire("doc:2") > token);
}

fn nested_savepoints_undo_acquire() {
    let db = Db::new();
    let (mut s, mut other) = (docs(&db), db.session());
    s.exec("BEGIN; SAVEPOINT a");
    let outer = s.acquire("doc:1");
    s.exec("SAVEPOINT b");
    let inner = s.acquire("doc:2");
    s.exec("RELEASE b; UPDATE doc SET n = 1; SAVEPOINT c");
    s.acquire("doc:3");
    s.exec("ROLLBACK TO c");
    other.acquire("doc:3");
    assert_eq!(
        (other.try_acquire("doc:1"), other.try_acquire("doc:2")),
        (None, None)
    );
    // what b acquired went over to a, with which it goes
    s.exec("ROLLBACK TO a");
    assert!(other.acquire("doc:1") > outer && other.acquire("doc:2") > inner);
    s.exec("COMMIT");
    assert_eq!(n_of_doc_1(&db), 0);
}

fn savepoint_rollback_undoes_release() {
    let db = Db::new();
    let (mut s, mut other) = (docs(&db), db.session());
    let token = s.acquire("doc:1");
    s.exec("BEGIN; SAVEPOINT a");
    assert!(s.release("doc:1", token));
    s.exec("ROLLBACK TO a; COMMIT");
    assert_eq!(
        other.try_acquire("doc:1"),
        None,
        "released by a savepoint that was rolled back"
    );
    assert!(s.renew("doc:1", token));
    assert_eq!(s.state_of("doc:1"), "held");
}

fn savepoint_release_keeps_release() {
    let db = Db::new();
    let (mut s, mut other) = (docs(&db), db.session());
    let token = s.acquire("doc:1");
    s.exec("BEGIN; SAVEPOINT a");
    assert!(s.release("doc:1", token));
    s.exec("RELEASE a");
    assert_eq!(
        other.try_acquire("doc:1"),
        None,
        "released before the commit"
    );
    s.exec("COMMIT");
    assert!(other.acquire("doc:1") > token);
}

fn nested_savepoints_undo_release() {
    let db = Db::new();
    let (mut s, mut other) = (docs(&db), db.session());
    let (one, two) = (s.acquire("doc:1"), s.acquire("doc:2"));
    s.exec("BEGIN; SAVEPOINT a; SAVEPOINT b");
    assert!(s.release("doc:1", one));
    s.exec("RELEASE b; ROLLBACK TO a; SAVEPOINT c");
    // a release once undone can be asked for anew
    assert!(s.release("doc:2", two));
    s.exec("ROLLBACK TO c");
    assert!(s.release("doc:2", two));
    s.exec("COMMIT");
    assert_eq!(other.try_acquire("doc:1"), None);
    assert!(other.acquire("doc:2") > two);
    assert!(s.renew("doc:1", one));
}

fn savepoint_rollback_undoes_fence() {
    let db = Db::new();
    let mut s = docs(&db);
    let token = s.acquire("doc:1");
    s.exec(&format!("BEGIN; SAVEPOINT a; SELECT fence('doc:1', {token}); UPDATE doc SET n = 1 WHERE id = 1; ROLLBACK TO a"));
    db.refused(&mut s, "UPDATE doc SET n = 2 WHERE id = 1", "LH003");
    // its lock is gone as well, so it keeps no taker out
    let token = s.acquire_expired("doc:2");
    s.exec(&format!(
        "BEGIN; SAVEPOINT a; SELECT fence('doc:2', {token}); ROLLBACK TO a"
    ));
    assert!(db.session().acquire("doc:2") > token);
    s.exec("COMMIT");
}

fn savepoint_release_keeps_fence() {
    let db = Db::new();
    let mut s = docs(&db);
    let token = s.acquire_expired("doc:1");
    s.exec(&format!(
        "BEGIN; SAVEPOINT a; SELECT fence('doc:1', {token}); RELEASE a"
    ));
    assert_eq!(db.session().try_acquire("doc:1"), None);
    // passed before another wanted it, so it goes on to hold
    s.exec("UPDATE doc SET n = 1 WHERE id = 1; COMMIT");
    assert_eq!(n_of_doc_1(&db), 1);
    assert!(db.session().acquire("doc:1") > token);
}

fn nested_savepoints_undo_fence() {
    let db = Db::new();
    let mut s = docs(&db);
    let token = s.acquire("doc:1");
    let other = s.acquire("doc:2");
    s.exec(&format!("BEGIN; SELECT fence('doc:1', {token}); SAVEPOINT a; SAVEPOINT b; SELECT fence('doc:2', {other})"));
    s.exec("RELEASE b; UPDATE doc SET n = 1; ROLLBACK TO a");
    // what was presented before the savepoint still counts
    s.exec("UPDATE doc SET n = 2 WHERE id = 1; SAVEPOINT c");
    s.err("UPDATE doc SET n = 3 WHERE id = 2").is("LH003");
    s.exec("ROLLBACK TO c; COMMIT");
    assert_eq!(
        s.text("SELECT string_agg(n::text, ',' ORDER BY id) FROM doc")
            .as_deref(),
        Some("2,0")
    );
}

fn savepoint_rollback_undoes_token_column_and_verdict() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE t (id int, tok bigint); INSERT INTO t VALUES (1); SELECT fence_table('t', 't:{id}', 'tok')");
    let token = s.acquire_expired("t:1");
    s.exec(&format!(
        "BEGIN; SAVEPOINT a; UPDATE t SET tok = {token}; ROLLBACK TO a; SAVEPOINT b"
    ));
    s.err("UPDATE t SET id = 1").is("LH003");
    s.exec("ROLLBACK TO b");
    // neither lock nor verdict is left, so a taker gets it at once and the old token is stale at once
    let next = db.session().acquire("t:1");
    s.err(&format!("UPDATE t SET tok = {token}")).is("LH001");
    s.exec("ROLLBACK");
    s.exec(&format!("UPDATE t SET tok = {next}"));
}

fn refused_write_in_a_savepoint_leaves_the_transaction_usable() {
    let db = Db::new();
    let mut s = docs(&db);
    let one = s.acquire("doc:1");
    let (stale, _) = s.stale_and_current("doc:2");
    s.exec(&format!(
        "BEGIN; SELECT fence('doc:1', {one}); UPDATE doc SET n = 1 WHERE id = 1; SAVEPOINT a"
    ));
    s.err(&format!("SELECT fence('doc:2', {stale})"))
        .is("LH001");
    s.err("SELECT 1").is("25P02");
    s.exec("ROLLBACK TO a");
    s.err("UPDATE doc SET n = 2 WHERE id = 2").is("LH003");
    s.exec("ROLLBACK TO a; UPDATE doc SET n = 2 WHERE id = 1; COMMIT");
    assert_eq!(
        s.text("SELECT string_agg(n::text, ',' ORDER BY id) FROM doc")
            .as_deref(),
        Some("2,0")
    );
}

fn exception_block_catches_by_sqlstate() {
    let db = Db::new();
    let mut s = docs(&db);
    let (stale, current) = s.stale_and_current("doc:1");
    s.exec(
        "CREATE FUNCTION try(command text) RETURNS text LANGUAGE plpgsql AS $$
         DECLARE state text; message text; detail text; hint text;
         BEGIN
             EXECUTE command;
             RETURN 'passed';
         EXCEPTION
             WHEN SQLSTATE 'LH001' THEN
                 GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, message = MESSAGE_TEXT,
                     detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
                 IF message = '' OR detail = '' OR hint = '' THEN RETURN 'something is missing'; END IF;
                 RETURN 'stale ' || state;
             WHEN SQLSTATE 'LH002' THEN RETURN 'unknown';
             WHEN SQLSTATE 'LH003' THEN RETURN 'none';
             WHEN SQLSTATE 'LH004' THEN RETURN 'over';
             WHEN insufficient_privilege THEN RETURN 'not yours';
             WHEN invalid_parameter_value THEN RETURN 'bad';
             WHEN null_value_not_allowed THEN RETURN 'null';
         END $$",
    );
    let say = |s: &mut Session, command: &str, expected: &str| {
        let said: String = s.one_with("SELECT try($1)", &[&command]);
        assert_eq!(said, expected, "{command}");
    };
    say(
        &mut s,
        &format!("SELECT fence('doc:1', {stale})"),
        "stale LH001",
    );
    say(
        &mut s,
        &format!("SELECT fence('doc:1', {})", i64::MAX),
        "unknown",
    );
    say(&mut s, "UPDATE doc SET n = 1", "none");
    say(&mut s, "SELECT fence('doc:1', 0)", "bad");
    say(&mut s, "SELECT acquire_lease(NULL)", "null");
    say(
        &mut s,
        &format!("SELECT fence('doc:1', {current})"),
        "passed",
    );
    s.release("doc:1", current);
    say(&mut s, &format!("SELECT fence('doc:1', {current})"), "over");
    let role = db.role();
    let token = s.acquire("doc:1");
    say(
        &mut db.session_as(&role),
        &format!("SELECT fence('doc:1', {token})"),
        "not yours",
    );
    // a loop over refusals does not wear the session out
    let caught: i64 = s.one(&format!(
        "SELECT count(*) FROM generate_series(1, 5000) WHERE try('SELECT fence(''doc:1'', {stale})') = 'stale LH001'"
    ));
    assert_eq!(caught, 5000);
    assert_eq!(n_of_doc_1(&db), 0);
}

fn exception_block_undoes_what_it_did() {
    let db = Db::new();
    let (mut s, mut other) = (docs(&db), db.session());
    let held = s.acquire("doc:2");
    s.exec("BEGIN");
    s.exec(&format!(
        "DO $$
         BEGIN
             BEGIN
                 PERFORM acquire_lease('doc:1'), release_lease('doc:2', {held});
                 UPDATE doc SET n = 1 WHERE id = 1;
                 RAISE EXCEPTION 'no';
             EXCEPTION WHEN raise_exception THEN NULL;
             END;
             BEGIN
                 UPDATE doc SET n = 2 WHERE id = 1;
                 RAISE EXCEPTION 'the write passed';
             EXCEPTION WHEN SQLSTATE 'LH003' THEN NULL;
             END;
         END $$"
    ));
    other.acquire("doc:1");
    s.exec("COMMIT");
    assert_eq!(n_of_doc_1(&db), 0);
    assert!(s.renew("doc:2", held), "the release was not undone");
}

/// A free resource whose ledger row another session has locked, so that a grant has to wait in its middle. Ends the
/// lock with that session's transaction.
fn locked_ledger_row(db: &Db) -> (Session, i64) {
    let mut blocker = db.session();
    let first = blocker.acquire_expired("doc:1");
    blocker.exec("BEGIN");
    let locked = blocker.rows("SELECT 1 FROM leasehold.ledger WHERE resource = 'doc:1' FOR UPDATE");
    assert_eq!(locked.len(), 1, "the ledger has no row of the resource");
    (blocker, first)
}

/// After an acquire that ended in its middle nothing of it must be left.
#[track_caller]
fn nothing_is_left(db: &Db, mut blocker: Session, first: i64) {
    blocker.exec("ROLLBACK");
    let mut s = db.session();
    assert!(s.info_says("doc:1", "writers = 0"));
    let next = s.acquire("doc:1");
    assert!(next > first);
    assert!(s.renew("doc:1", next) && s.check_fence("doc:1", next));
}

fn statement_timeout_in_the_middle_of_acquire() {
    let db = Db::new();
    let (blocker, first) = locked_ledger_row(&db);
    let mut s = db.session();
    s.exec("SET statement_timeout = '200ms'");
    s.err("SELECT acquire_lease('doc:1', ttl => '5min')")
        .is("57014");
    assert_eq!(s.one::<i32>("SELECT 1"), 1, "the session is usable");
    nothing_is_left(&db, blocker, first);
}

fn cancel_in_the_middle_of_acquire() {
    let db = Db::new();
    let (blocker, first) = locked_ledger_row(&db);
    let mut s = db.session();
    s.exec("BEGIN; SAVEPOINT a");
    let waiting = s.spawn("SELECT acquire_lease('doc:1', ttl => '5min')");
    db.cluster.wait_until_blocked(waiting.pid);
    // the grant is under way: nobody else gets it meanwhile, and nobody else is made to wait
    assert_eq!(db.session().try_acquire("doc:1"), None);
    assert!(
        db.session()
            .one::<bool>(&format!("SELECT pg_cancel_backend({})", waiting.pid))
    );
    let (mut s, result) = waiting.join();
    result
        .expect_err("the acquire was not cancelled")
        .is("57014");
    s.exec("ROLLBACK TO a");
    // the transaction itself is still open
    nothing_is_left(&db, blocker, first);
    s.exec("COMMIT");
}

fn terminate_in_the_middle_of_acquire() {
    let db = Db::new();
    let (blocker, first) = locked_ledger_row(&db);
    let waiting = db
        .session()
        .spawn("SELECT acquire_lease('doc:1', ttl => '5min')");
    let pid = waiting.pid;
    db.cluster.wait_until_blocked(pid);
    db.cluster.kill_backend(pid, Signal::TERM);
    let error = waiting
        .join()
        .1
        .expect_err("the session was not terminated");
    assert!(error.is_lost(), "{error}");
    db.cluster.wait_until_left(pid);
    nothing_is_left(&db, blocker, first);
}

fn terminated_session_frees_its_uncommitted_acquire() {
    let db = Db::new();
    let (mut s, mut other) = (docs(&db), db.session());
    s.exec("BEGIN");
    let token = s.acquire("doc:1");
    s.exec("UPDATE doc SET n = 1 WHERE id = 1");
    assert_eq!(other.try_acquire("doc:1"), None);
    db.cluster.kill_backend(s.pid, Signal::TERM);
    db.cluster.wait_until_left(s.pid);
    assert!(other.acquire("doc:1") > token);
    assert_eq!(n_of_doc_1(&db), 0);
}

fn disconnected_client_frees_its_uncommitted_acquire() {
    let db = Db::new();
    let (mut s, mut other) = (db.session(), db.session());
    s.exec("BEGIN");
    let token = s.acquire("doc:1");
    let pid = s.pid;
    drop(s);
    db.cluster.wait_until_left(pid);
    assert!(other.acquire("doc:1") > token);
}

fn terminated_session_keeps_its_committed_lease() {
    let db = Db::new();
    let (mut s, mut other) = (docs(&db), db.session());
    let token = s.acquire("doc:1");
    db.cluster.kill_backend(s.pid, Signal::TERM);
    db.cluster.wait_until_left(s.pid);
    // nothing depends on the session
    assert_eq!(other.try_acquire("doc:1"), None);
    assert!(other.renew("doc:1", token));
    other.exec(&format!(
        "BEGIN; SELECT fence('doc:1', {token}); UPDATE doc SET n = 1 WHERE id = 1; COMMIT"
    ));
    assert!(other.release("doc:1", token));
}

fn terminated_session_forgets_its_uncommitted_release() {
    let db = Db::new();
    let (mut s, mut other) = (docs(&db), db.session());
    let token = s.acquire("doc:1");
    s.exec("BEGIN");
    assert!(s.release("doc:1", token));
    db.cluster.kill_backend(s.pid, Signal::TERM);
    db.cluster.wait_until_left(s.pid);
    assert_eq!(other.try_acquire("doc:1"), None);
    assert!(other.renew("doc:1", token));
}

fn transaction_that_presented_an_older_token_is_denied() {
    let db = Db::new();
    let mut s = docs(&db);
    let token = s.acquire_expired("doc:1");
    s.exec(&format!(
        "BEGIN; SELECT fence('doc:1', {token}); UPDATE doc SET n = 1 WHERE id = 1"
    ));
    // it is an open transaction under the old token itself
    assert_eq!(s.try_acquire("doc:1"), None);
    s.exec("COMMIT");
    assert_eq!(n_of_doc_1(&db), 1);
    assert!(s.acquire("doc:1") > token);
}

fn read_committed_block_acquires() {
    let db = Db::new();
    let (mut s, mut other) = (docs(&db), db.session());
    s.exec("BEGIN ISOLATION LEVEL READ COMMITTED");
    assert_eq!(s.one::<i32>("SELECT n FROM doc WHERE id = 1"), 0);
    let first = other.acquire("doc:1");
    other.exec(&format!(
        "BEGIN; SET LOCAL leasehold.token = '{first}'; UPDATE doc SET n = 7 WHERE id = 1"
    ));
    other.exec(&format!("SELECT release_lease('doc:1', {first}); COMMIT"));
    assert!(s.acquire("doc:1") > first);
    assert_eq!(
        s.one::<i32>("SELECT n FROM doc WHERE id = 1"),
        7,
        "the last holder's write is not seen"
    );
    s.exec("UPDATE doc SET n = 8 WHERE id = 1; COMMIT");
    // the weakest level is the same one
    s.exec("BEGIN ISOLATION LEVEL READ UNCOMMITTED");
    s.acquire("doc:2");
    s.exec("COMMIT");
}

fn snapshot_block_cannot_acquire() {
    let db = Db::new();
    let mut s = docs(&db);
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        // the very first statement of the block too
        db.refused(
            &mut s,
            &format!("BEGIN ISOLATION LEVEL {level}; SELECT acquire_lease('doc:1')"),
            "25001",
        );
        s.exec(&format!("BEGIN ISOLATION LEVEL {level}"));
        db.refused(&mut s, "SELECT acquire_lease('doc:1')", "25001");
        s.exec(&format!("BEGIN ISOLATION LEVEL {level}; SAVEPOINT a"));
        db.refused(&mut s, "SELECT acquire_lease('doc:1')", "25001");
    }
    assert_eq!(s.state_of("doc:1"), "free");
}

fn lone_statement_may_acquire_at_any_isolation_level() {
    let db = Db::new();
    for level in ["repeatable read", "serializable"] {
        let mut s = db.session();
        s.exec(&format!("SET default_transaction_isolation = '{level}'"));
        s.acquire(&format!("extended {level}"));
        assert!(
            s.text(&format!("SELECT acquire_lease('simple {level}')"))
                .is_some()
        );
        s.exec("PREPARE take (text) AS SELECT acquire_lease($1)");
        assert!(
            s.text(&format!("EXECUTE take('prepared {level}')"))
                .is_some()
        );
        s.exec(&format!(
            "CREATE TEMP TABLE t AS SELECT acquire_lease('as {level}') AS token"
        ));
        assert!(s.text("SELECT token FROM t").is_some());
    }
}

fn several_statements_in_one_string_are_a_block() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("SET default_transaction_isolation = 'repeatable read'");
    db.refused(&mut s, "SELECT 1; SELECT acquire_lease('r')", "25001");
    db.refused(&mut s, "SELECT acquire_lease('r'); SELECT 1", "25001");
    assert_eq!(s.state_of("r"), "free");
}

fn do_block_and_function_under_repeatable_read() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE FUNCTION take() RETURNS bigint LANGUAGE plpgsql AS 'BEGIN RETURN acquire_lease(''r''); END'");
    s.exec("SET default_transaction_isolation = 'repeatable read'");
    // inside, an earlier statement may have read already: it cannot be told from a block
    db.refused(
        &mut s,
        "DO 'BEGIN PERFORM acquire_lease(''r''); END'",
        "25001",
    );
    db.refused(&mut s, "SELECT take()", "25001");
    s.exec("SET default_transaction_isolation = 'read committed'");
    s.exec("DO 'BEGIN PERFORM acquire_lease(''r''); END'");
}

fn snapshot_block_may_do_the_rest() {
    let db = Db::new();
    let mut s = docs(&db);
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let token = s.acquire("doc:1");
        s.exec(&format!(
            "BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM doc"
        ));
        assert!(s.renew("doc:1", token) && s.check_fence("doc:1", token));
        assert!(s.one::<bool>(&format!("SELECT renew_lease('doc:1', {token}, '5min')")));
        s.fence("doc:1", token);
        assert_eq!(s.state_of("doc:1"), "held");
        s.exec("UPDATE doc SET n = n + 1 WHERE id = 1");
        assert!(s.release("doc:1", token));
        s.exec("COMMIT");
        assert_eq!(s.state_of("doc:1"), "free");
    }
    assert_eq!(n_of_doc_1(&db), 2);
}

fn snapshot_block_is_fenced_by_the_present() {
    let db = Db::new();
    let mut old = docs(&db);
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let mut taker = db.session();
        let token = old.acquire_expired("doc:1");
        old.exec(&format!(
            "BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM doc, leasehold.ledger"
        ));
        let next = taker.acquire("doc:1");
        // its snapshot is older than the takeover, the verdict is not
        let write =
            format!("SET LOCAL leasehold.token = '{token}'; UPDATE doc SET n = 1 WHERE id = 1");
        db.refused_write(&mut old, &write, "LH001");
        assert!(taker.release("doc:1", next));
    }
    assert_eq!(n_of_doc_1(&db), 0);
}

fn read_only_transaction_may_fence() {
    let db = Db::new();
    let mut s = docs(&db);
    let (stale, current) = s.stale_and_current("doc:1");
    s.exec("BEGIN READ ONLY");
    s.fence("doc:1", current);
    assert!(s.check_fence("doc:1", current) && !s.check_fence("doc:1", stale));
    assert!(db.session().info_says("doc:1", "writers = 1"));
    s.exec("SELECT * FROM leasehold.leases; COMMIT");
    db.refused(
        &mut s,
        &format!("BEGIN READ ONLY; SELECT fence('doc:1', {stale})"),
        "LH001",
    );
    db.refused(
        &mut s,
        &format!("BEGIN READ ONLY; SELECT fence('doc:1', {})", i64::MAX),
        "LH002",
    );
    s.exec("SET default_transaction_read_only = on");
    s.fence("doc:1", current);
}

fn read_only_transaction_cannot_acquire() {
    let db = Db::new();
    let mut s = db.session();
    db.refused(
        &mut s,
        "BEGIN READ ONLY; SELECT acquire_lease('r')",
        "25006",
    );
    let held = db.session().acquire("held");
    db.refused(
        &mut s,
        "BEGIN READ ONLY; SELECT acquire_lease('held')",
        "25006",
    );
    s.exec("SET default_transaction_read_only = on");
    db.refused(&mut s, "SELECT acquire_lease('r')", "25006");
    assert_eq!(s.state_of("r"), "free");
    assert!(db.session().renew("held", held));
}

fn read_only_transaction_renews_within_the_known_ttl() {
    let db = Db::new();
    let mut s = db.session();
    let token: i64 = s.one("SELECT acquire_lease('r', ttl => '1min')");
    let renewed = s.info("r", "renewed_at");
    db.refused(
        &mut s,
        &format!("BEGIN READ ONLY; SELECT renew_lease('r', {token}, '2min')"),
        "25006",
    );
    assert_eq!(s.info("r", "renewed_at"), renewed);
    assert!(s.info_says("r", "remaining <= '1min'::interval"));
    s.exec("BEGIN READ ONLY");
    for ttl in ["1min", "10s"] {
        assert!(s.one::<bool>(&format!("SELECT renew_lease('r', {token}, '{ttl}')")));
    }
    s.exec("COMMIT");
    assert!(s.info("r", "renewed_at") > renewed);
    // what the ledger once knows needs no second write
    assert!(s.one::<bool>(&format!("SELECT renew_lease('r', {token}, '2min')")));
    s.exec("BEGIN READ ONLY");
    assert!(s.one::<bool>(&format!("SELECT renew_lease('r', {token}, '2min')")));
    s.exec("COMMIT");
}

fn read_only_transaction_may_release() {
    let db = Db::new();
    let mut s = db.session();
    let token = s.acquire("r");
    s.exec("BEGIN READ ONLY");
    assert!(s.release("r", token));
    s.exec("COMMIT");
    assert_eq!(s.state_of("r"), "free");
    assert!(db.session().acquire("r") > token);
}

fn prepare_after_acquire_is_refused() {
    let db = Db::new();
    let (mut s, mut other) = (docs(&db), db.session());
    s.exec("BEGIN");
    let token = s.acquire("doc:1");
    s.exec("UPDATE doc SET n = 1 WHERE id = 1");
    db.refused_write(&mut s, "PREPARE TRANSACTION 'p'", "0A000");
    assert_eq!(
        s.one::<i64>("SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"),
        0
    );
    assert!(
        other.acquire("doc:1") > token,
        "the refused PREPARE did not undo the acquire"
    );
    // one whose acquire a savepoint has undone may be prepared
    s.exec("BEGIN; SAVEPOINT a");
    s.acquire("doc:2");
    s.exec(&format!(
        "ROLLBACK TO a; CREATE TABLE t (); PREPARE TRANSACTION '{}'",
        db.name
    ));
    s.exec(&format!("COMMIT PREPARED '{}'", db.name));
    s.exec("TABLE t");
}

fn prepare_after_release_is_refused() {
    let db = Db::new();
    let (mut s, mut other) = (docs(&db), db.session());
    let token = s.acquire("doc:1");
    s.exec("BEGIN");
    assert!(s.release("doc:1", token));
    db.refused_write(&mut s, "PREPARE TRANSACTION 'p'", "0A000");
    assert_eq!(
        other.try_acquire("doc:1"),
        None,
        "the refused PREPARE did not undo the release"
    );
    assert!(s.renew("doc:1", token));
}

/// Prepares a fenced write under a lease that then runs out, restarts the server, ends the transaction by `end`, and
/// gives what doc 1 holds when the next holder reads it.
fn prepared_write(how: Stop, end: &str) -> i32 {
    let db = Db::on(&Arc::new(Cluster::builder().start()));
    let mut s = docs(&db);
    let token = s.acquire_expired("doc:1");
    s.exec(&format!("BEGIN; SELECT fence('doc:1', {token}); UPDATE doc SET n = 1 WHERE id = 1; PREPARE TRANSACTION 'p'"));
    let taken_out = |s: &mut Session| {
        // whatever it asks, as long as the transaction is unresolved
        assert_eq!(
            s.try_acquire("doc:1"),
            None,
            "granted past a prepared transaction"
        );
        assert!(
            s.info_says("doc:1", "writers = 1 AND state = 'draining'"),
            "{:?}",
            s.info("doc:1", "lease_info")
        );
        db.refused(s, &format!("SELECT fence('doc:1', {token})"), "LH004");
    };
    taken_out(&mut s);
    drop(s);
    db.cluster.restart(how);
    let mut s = db.session();
    taken_out(&mut s);
    s.exec(end);
    // the lease counts anew from the restart, for a microsecond
    let next = wait_for("the lease", || s.try_acquire("doc:1"));
    assert!(next > token);
    s.one("SELECT n FROM doc WHERE id = 1")
}

fn prepared_fenced_writes_commit_after_a_restart() {
    assert_eq!(prepared_write(Stop::Fast, "COMMIT PREPARED 'p'"), 1);
    assert_eq!(prepared_write(Stop::Immediate, "COMMIT PREPARED 'p'"), 1);
}

fn prepared_fenced_writes_roll_back_after_a_restart() {
    assert_eq!(prepared_write(Stop::Fast, "ROLLBACK PREPARED 'p'"), 0);
    assert_eq!(prepared_write(Stop::Immediate, "ROLLBACK PREPARED 'p'"), 0);
}

fn prepared_transaction_leaves_its_session_clean() {
    let db = Db::new();
    let mut s = docs(&db);
    let name = &db.name;
    let token = s.acquire("doc:1");
    s.exec(&format!("BEGIN; SELECT fence('doc:1', {token}); UPDATE doc SET n = 1 WHERE id = 1; PREPARE TRANSACTION '{name}'"));
    // the next transaction of the session has presented nothing
    db.refused(&mut s, "INSERT INTO doc VALUES (3, 0)", "LH003");
    s.exec("BEGIN");
    let three = s.acquire("doc:3");
    s.exec("INSERT INTO doc VALUES (3, 0); COMMIT");
    assert!(s.renew("doc:3", three));
    // the lease is live: its holder may write beside the prepared transaction, and release; nobody takes before
    s.exec(&format!("BEGIN; SELECT fence('doc:1', {token}); COMMIT"));
    assert!(s.release("doc:1", token));
    assert_eq!(
        db.session().try_acquire("doc:1"),
        None,
        "granted past a prepared transaction"
    );
    s.exec(&format!("COMMIT PREPARED '{name}'"));
    let mut taker = db.session();
    assert!(taker.acquire("doc:1") > token);
    assert_eq!(taker.one::<i32>("SELECT n FROM doc WHERE id = 1"), 1);
}

fn cursor_and_copy_out_do_not_disturb() {
    let db = Db::new();
    let mut s = docs(&db);
    s.exec("BEGIN; DECLARE c CURSOR WITH HOLD FOR SELECT acquire_lease('r' || i) FROM generate_series(1, 3) i; FETCH 1 c");
    s.exec("COMMIT; FETCH ALL c; CLOSE c");
    let held: i64 = s.one("SELECT count(*) FROM leasehold.leases WHERE state = 'held'");
    assert_eq!(
        held, 3,
        "what a held cursor acquired at its commit is acquired"
    );
}

fn snapshot_older_than_the_grant_cannot_write() {
    let db = Db::new();
    let mut s = docs(&db);
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        s.exec(&format!(
            "BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM doc"
        ));
        let token = db.session().acquire("doc:1");
        // it could not see what earlier holders wrote between its snapshot and the grant
        db.refused_write(&mut s, &format!("SELECT fence('doc:1', {token})"), "40001");
        s.exec(&format!(
            "BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM doc"
        ));
        s.fence("doc:1", token);
        s.exec("UPDATE doc SET n = n + 1 WHERE id = 1; COMMIT");
        assert!(s.release("doc:1", token));
    }
    assert_eq!(n_of_doc_1(&db), 2);
}

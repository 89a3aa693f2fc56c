//! Layer zombies: transactions that are still open under a lease that is over, and who ends them when.
//!
//! Nothing here depends on how fast anything is: a taker asks until it is granted, and that something is left alone is
//! shown with a grace, or a policy, that no test outlasts. That a grace has passed is shown by the server's own times,
//! of which only the least is asserted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::cluster::{Cluster, Db, wait_for};
use crate::pgbouncer::PgBouncer;
use crate::process::{Process, Signal};
use crate::session::{DbErr, Session};

crate::tests![
    idle_zombie_is_ended_after_its_grace,
    zombie_is_left_alone_within_its_grace,
    grace_counts_from_the_release,
    statement_of_a_zombie_is_cancelled,
    zombie_that_catches_its_cancel_does_not_commit,
    zombie_that_catches_its_cancel_and_goes_on_is_ended,
    zombie_that_goes_back_to_a_savepoint_is_ended,
    zombie_that_waits_for_a_row_is_cancelled,
    every_zombie_of_a_resource_is_ended,
    session_that_shows_no_activity_is_ended,
    commit_is_never_cut_off,
    deferred_trigger_is_not_the_commit_yet,
    pooled_zombie_ends_alone,
    superuser_is_ended_for_anybody,
    fence_of_a_read_only_transaction_is_ended,
    live_lease_of_another_resource_saves_nobody,
    failed_transaction_is_left_alone,
    prepared_zombie_is_reported_once_per_lease,
    policy_wait_ends_nobody,
    policy_cancel_ends_statements_only,
    policy_counts_from_the_reload,
    busy_holder_keeps_no_taker_out,
    two_takers_end_a_zombie_once,
    taker_that_is_cut_off_in_its_drain_is_in_nobodys_way,
    taker_in_a_block_sees_what_is_left,
    acquire_that_is_never_committed_keeps_no_taker_out,
    innocent_transaction_is_never_signalled,
];

/// A time that no test outlasts.
const FOREVER: &str = "1h";
/// How often is asked, where the answer must stay the same.
const AGAIN: usize = 10;

/// A server with a document that is fenced by the resource r.
pub fn server(grace: &str, policy: &str) -> Db {
    let builder = Cluster::builder()
        .conf("leasehold.zombie_grace", grace)
        .conf("leasehold.zombie_policy", policy);
    let db = Db::on(&Arc::new(builder.start()));
    db.session().exec(
        "CREATE TABLE doc (n int NOT NULL); INSERT INTO doc VALUES (0); SELECT fence_table('doc', 'r');
         CREATE TABLE plain (n int NOT NULL); INSERT INTO plain VALUES (0)",
    );
    db
}

/// Sets a setting for the sessions that come from here on.
fn reload(db: &Db, name: &str, value: &str) {
    db.cluster.configure(&format!("{name} = '{value}'\n"));
    db.session().exec("SELECT pg_reload_conf()");
    wait_for("the reload", || {
        let now: String = db
            .session()
            .one(&format!("SELECT current_setting('{name}')"));
        (now == value).then_some(())
    });
}

pub fn n_of_doc(db: &Db) -> i32 {
    db.session().one("SELECT n FROM doc")
}

/// The statements that open a transaction under a token of r, and write.
pub fn open(token: i64) -> String {
    format!("BEGIN; SELECT fence('r', {token}); UPDATE doc SET n = n + 1")
}

/// Opens a transaction under a lease that is over, and writes.
fn zombie(session: &mut Session) -> i64 {
    let token = session.acquire_expired("r");
    session.exec(&open(token));
    token
}

/// Asks until r is granted.
pub fn take(session: &mut Session) -> i64 {
    wait_for("the grant", || session.try_acquire("r"))
}

/// Asks some times, in vain.
#[track_caller]
fn is_refused(session: &mut Session) {
    for _ in 0..AGAIN {
        assert_eq!(session.try_acquire("r"), None, "granted past a transaction");
    }
}

/// Asks some times, with a zombie in the way that has no reason to end.
#[track_caller]
fn is_left_alone(db: &Db, zombie: &mut Session) {
    let mut taker = db.session();
    is_refused(&mut taker);
    assert!(
        taker.info_says("r", "state = 'draining' AND writers = 1"),
        "{:?}",
        taker.info("r", "lease_info")
    );
    let alive: String = zombie.one("SELECT 'alive'");
    assert_eq!(alive, "alive");
    no_one_was_signalled(db);
}

#[track_caller]
pub fn no_one_was_signalled(db: &Db) {
    let log = db.cluster.log();
    let told = log.lines().find(|line| line.contains("held up a lease"));
    assert_eq!(told, None, "somebody was signalled");
}

/// What the log says of a zombie that was signalled: how long its lease had been over, in seconds.
#[track_caller]
fn logged(db: &Db, what: &str, zombie: i32, token: i64, taker: i32) -> f64 {
    let log = db.cluster.log();
    let message =
        format!("leasehold {what} of process {zombie}, whose transaction held up a lease");
    let lines: Vec<&str> = log.lines().collect();
    let at = lines.iter().position(|line| line.ends_with(&message));
    let at = at.unwrap_or_else(|| panic!("the log does not say: {message}"));
    let detail = lines[at + 1];
    let (resource, taken) = (
        format!("Resource \"r\": the lease of token {token} has been over for "),
        format!(" s, and process {taker} (pg_test) wants it."),
    );
    let over = detail
        .split_once(&resource)
        .and_then(|(_, rest)| rest.strip_suffix(&taken));
    let over = over.unwrap_or_else(|| panic!("the log does not name them all: {detail}"));
    over.parse().expect("seconds")
}

/// The session was ended, by SQLSTATE 57P01. The client may miss the server's last word, so the log is asked for it.
#[track_caller]
fn was_ended(db: &Db, session: &mut Session) {
    let error = session.err("SELECT 1");
    assert!(error.is_lost(), "the session goes on: {error}");
    was_told_to_end(db, session.pid);
}

#[track_caller]
pub fn was_told_to_end(db: &Db, pid: i32) {
    let (process, end) = (
        format!(" [{pid}] "),
        " 57P01 FATAL:  terminating connection",
    );
    wait_for(&format!("process {pid} to be told to end"), || {
        let log = db.cluster.log();
        log.lines()
            .any(|line| line.contains(&process) && line.contains(end))
            .then_some(())
    });
}

/// The session goes on after its transaction was ended.
#[track_caller]
fn goes_on(session: &mut Session) {
    session.exec("ROLLBACK");
    let pid = session.pid;
    assert_eq!(session.one::<i32>("SELECT pg_backend_pid()"), pid);
}

pub fn wait_event(db: &Db, pid: i32, event: &str) {
    let sql = format!(
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {pid} AND wait_event = '{event}')"
    );
    db.cluster.wait_sql(&sql, event);
}

/// Runs `sql` in a zombie's transaction, has a taker end it, and gives what the client of the zombie is told.
fn ended_while(db: &Db, sql: &str) -> (Session, i64, i32, DbErr) {
    let mut session = db.session();
    let token = zombie(&mut session);
    let running = session.spawn(sql);
    let mut taker = db.session();
    wait_event(db, running.pid, "PgSleep");
    let next = take(&mut taker);
    assert!(next > token);
    assert_eq!(n_of_doc(db), 0, "the zombie's write is there");
    assert!(taker.release("r", next));
    let (session, result) = running.join();
    let error = result.expect_err("the zombie's statement came to its end");
    (session, token, taker.pid, error)
}

fn idle_zombie_is_ended_after_its_grace() {
    let db = server("1s", "terminate");
    let (mut s, mut taker) = (db.session(), db.session());
    let token: i64 = s.one("SELECT acquire_lease('r', ttl => '500ms')");
    let granted = s.info("r", "granted_at").expect("a time");
    s.exec(&open(token));
    let next = take(&mut taker);
    assert!(next > token);
    assert!(
        taker.info_says(
            "r",
            &format!("granted_at >= '{granted}'::timestamptz + '1.5s'::interval")
        ),
        "granted within the lease or its grace"
    );
    was_ended(&db, &mut s);
    let over = logged(&db, "ended the session", s.pid, token, taker.pid);
    assert!(over >= 1.0, "ended {over} s after the end of its lease");
    assert_eq!(n_of_doc(&db), 0, "the zombie's write is there");
}

fn zombie_is_left_alone_within_its_grace() {
    let db = server(FOREVER, "terminate");
    let (mut s, mut running) = (db.session(), db.session());
    zombie(&mut s);
    is_left_alone(&db, &mut s);
    s.exec("COMMIT");
    // the taker has closed the token, so this is another lease's
    let token = running.acquire_expired("r");
    assert!(db.session().try_fence("r", token).is_ok());
    running.exec(&format!("BEGIN; SELECT fence('r', {token})"));
    let running = running.spawn("SELECT pg_sleep(1)");
    is_refused(&mut db.session());
    running.join().1.expect("a statement is left alone too");
    no_one_was_signalled(&db);
    assert_eq!(n_of_doc(&db), 1);
}

fn grace_counts_from_the_release() {
    let db = server(FOREVER, "terminate");
    let (mut s, mut writer) = (db.session(), db.session());
    let token = s.acquire("r");
    writer.exec(&open(token));
    assert!(s.release("r", token));
    is_left_alone(&db, &mut writer);
    // a lease that was released long before its end
    reload(&db, "leasehold.zombie_grace", "1s");
    let mut taker = db.session();
    take(&mut taker);
    was_ended(&db, &mut writer);
    let over = logged(&db, "ended the session", writer.pid, token, taker.pid);
    assert!(over >= 1.0, "ended {over} s after the release");
    assert_eq!(n_of_doc(&db), 0);
}

fn statement_of_a_zombie_is_cancelled() {
    let db = server("0", "terminate");
    let (mut s, token, taker, error) = ended_while(&db, "SELECT pg_sleep(3600)");
    error.is("57014");
    logged(&db, "cancelled the statement", s.pid, token, taker);
    goes_on(&mut s);
    // a lone statement, with its token from the setting
    let token = s.acquire_expired("r");
    s.exec(&format!("SET leasehold.token = '{token}'"));
    let running =
        s.spawn("WITH w AS (UPDATE doc SET n = 7 RETURNING n) SELECT pg_sleep(3600) FROM w");
    wait_event(&db, running.pid, "PgSleep");
    take(&mut db.session());
    let (mut s, result) = running.join();
    result
        .expect_err("the statement came to its end")
        .is("57014");
    goes_on(&mut s);
    assert_eq!(n_of_doc(&db), 0);
}

fn zombie_that_catches_its_cancel_does_not_commit() {
    let db = server("0", "terminate");
    let mut s = db.session();
    let token = s.acquire_expired("r");
    // in one statement, so that nobody finds it idle
    let running = s.spawn(&format!(
        "DO $$ BEGIN
            PERFORM fence('r', {token});
            UPDATE doc SET n = 7;
            BEGIN PERFORM pg_sleep(3600); EXCEPTION WHEN query_canceled THEN NULL; END;
         END $$"
    ));
    wait_event(&db, running.pid, "PgSleep");
    let mut taker = db.session();
    take(&mut taker);
    let (mut s, result) = running.join();
    let error = result
        .expect_err("it has committed")
        .is("57014")
        .well_written();
    error.details("leasehold.zombie_grace");
    goes_on(&mut s);
    assert_eq!(n_of_doc(&db), 0);
    logged(&db, "cancelled the statement", s.pid, token, taker.pid);
}

fn zombie_that_catches_its_cancel_and_goes_on_is_ended() {
    let db = server("0", "terminate");
    let (s, token, taker, error) = ended_while(
        &db,
        "DO $$ BEGIN
            LOOP
                BEGIN PERFORM pg_sleep(3600); EXCEPTION WHEN query_canceled THEN NULL; END;
            END LOOP;
         END $$",
    );
    assert!(error.is_lost(), "{error}");
    was_told_to_end(&db, s.pid);
    logged(&db, "cancelled the statement", s.pid, token, taker);
    logged(&db, "ended the session", s.pid, token, taker);
}

fn zombie_that_goes_back_to_a_savepoint_is_ended() {
    let db = server("0", "terminate");
    let (mut s, mut taker) = (db.session(), db.session());
    let token = zombie(&mut s);
    s.exec("SAVEPOINT a");
    let running = s.spawn("SELECT pg_sleep(3600)");
    wait_event(&db, running.pid, "PgSleep");
    // the first one may have waited for both
    let first = taker.try_acquire("r");
    let (mut s, result) = running.join();
    let error = result.expect_err("it came to its end");
    assert!(error.sqlstate == "57014" || error.is_lost(), "{error}");
    // it may have been found waiting for its client by now
    if let Err(error) = s.try_exec("ROLLBACK TO a") {
        assert!(error.is_lost(), "{error}");
    }
    first.unwrap_or_else(|| take(&mut taker));
    was_ended(&db, &mut s);
    logged(&db, "cancelled the statement", s.pid, token, taker.pid);
    logged(&db, "ended the session", s.pid, token, taker.pid);
    assert_eq!(n_of_doc(&db), 0);
}

fn zombie_that_waits_for_a_row_is_cancelled() {
    let db = server("0", "terminate");
    let (mut third, mut taker) = (db.session(), db.session());
    for locker_takes in [false, true] {
        let mut s = db.session();
        zombie(&mut s);
        let locker = if locker_takes { &mut taker } else { &mut third };
        locker.exec("BEGIN; UPDATE plain SET n = n + 1");
        let waiting = s.spawn("UPDATE plain SET n = 100");
        db.cluster.wait_until_blocked(waiting.pid);
        let next = take(&mut taker);
        let (mut s, result) = waiting.join();
        result.expect_err("it got the row").is("57014");
        goes_on(&mut s);
        let locker = if locker_takes { &mut taker } else { &mut third };
        locker.exec("COMMIT");
        assert!(taker.release("r", next));
    }
    assert_eq!(db.session().one::<i32>("SELECT n FROM plain"), 2);
    assert_eq!(n_of_doc(&db), 0);
}

fn every_zombie_of_a_resource_is_ended() {
    let db = server("0", "terminate");
    let (mut idle, mut active) = (db.session(), db.session());
    let token = zombie(&mut idle);
    let mut fencing: Vec<_> = (0..3).map(|_| db.session()).collect();
    for s in &mut fencing {
        s.exec(&format!("BEGIN; SELECT fence('r', {token})"));
    }
    active.exec(&format!("BEGIN; SELECT fence('r', {token})"));
    let active = active.spawn("SELECT pg_sleep(3600)");
    wait_event(&db, active.pid, "PgSleep");
    take(&mut db.session());
    active.join().1.expect_err("it came to its end").is("57014");
    was_ended(&db, &mut idle);
    fencing.iter_mut().for_each(|s| was_ended(&db, s));
}

fn session_that_shows_no_activity_is_ended() {
    let db = server("0", "terminate");
    let mut s = db.session_with_options("-c track_activities=off");
    let token = zombie(&mut s);
    // until then its statement would be cancelled
    db.cluster.wait_until_idle(s.pid);
    let mut taker = db.session_with_options("-c track_activities=off");
    take(&mut taker);
    was_ended(&db, &mut s);
    logged(&db, "ended the session", s.pid, token, taker.pid);
    let log = db.cluster.log();
    let cancelled = log
        .lines()
        .find(|line| line.contains("cancelled the statement"));
    assert_eq!(cancelled, None, "it was not seen to wait for its client");
}

/// From here on every commit waits for a standby.
pub fn await_a_standby_that_is_not_there(db: &Db) {
    reload(db, "synchronous_standby_names", "nobody");
    // the setting counts once the checkpointer has read it
    let probe = db
        .session()
        .spawn("DO $$ BEGIN LOOP UPDATE plain SET n = n + 1; COMMIT; END LOOP; END $$");
    wait_event(db, probe.pid, "SyncRep");
    db.cluster.kill_backend(probe.pid, Signal::TERM);
    db.cluster.wait_until_left(probe.pid);
}

/// A COMMIT that waits for a standby that is not there: its record is written, its locks are held.
fn commit_is_never_cut_off() {
    let db = server("0", "terminate");
    let (mut s, mut taker) = (db.session(), db.session());
    zombie(&mut s);
    await_a_standby_that_is_not_there(&db);
    let mut committing = s.spawn("COMMIT");
    wait_event(&db, committing.pid, "SyncRep");
    // in a block, because the commit of a grant would wait for the standby too
    taker.exec("BEGIN");
    is_refused(&mut taker);
    taker.exec("ROLLBACK");
    assert!(taker.info_says("r", "state = 'draining' AND writers = 1"));
    no_one_was_signalled(&db);
    assert!(!committing.is_done(), "the commit was cut off");
    wait_event(&db, committing.pid, "SyncRep");
    assert!(
        !db.cluster
            .log()
            .contains("canceling wait for synchronous replication")
    );
    reload(&db, "synchronous_standby_names", "");
    let (mut s, result) = committing.join();
    result.expect("the commit came through");
    taker.exec("BEGIN");
    take(&mut taker);
    assert_eq!(
        taker.one::<i32>("SELECT n FROM doc"),
        1,
        "the write is lost"
    );
    taker.exec("COMMIT");
    goes_on(&mut s);
}

fn deferred_trigger_is_not_the_commit_yet() {
    let db = server("0", "terminate");
    db.session().exec(
        "CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(3600); RETURN NULL; END';
         CREATE CONSTRAINT TRIGGER late AFTER INSERT ON plain DEFERRABLE INITIALLY DEFERRED
             FOR EACH ROW EXECUTE FUNCTION dawdle()",
    );
    let (mut s, token, taker, error) = ended_while(&db, "INSERT INTO plain VALUES (1); COMMIT");
    error.is("57014");
    logged(&db, "cancelled the statement", s.pid, token, taker);
    goes_on(&mut s);
    assert_eq!(db.session().one::<i64>("SELECT count(*) FROM plain"), 1);
}

fn pooled_zombie_ends_alone() {
    let db = server("0", "terminate");
    let pooler = PgBouncer::start(&db);
    let (mut z, mut plain, mut fenced) = (pooler.connect(), pooler.connect(), pooler.connect());
    let other = db.session().acquire("other");
    zombie_through_pool(&db, &mut z);
    // all at once, so that each has a server connection of its own
    plain.exec("BEGIN; UPDATE plain SET n = n + 1");
    fenced.exec(&format!("BEGIN; SELECT fence('other', {other})"));
    take(&mut db.session());
    z.err("UPDATE doc SET n = n + 1");
    plain.exec("COMMIT");
    fenced.exec("SELECT fence('other', 1 * token) FROM lease_info('other'); COMMIT");
    assert_eq!(
        (
            n_of_doc(&db),
            db.session().one::<i32>("SELECT n FROM plain")
        ),
        (0, 1)
    );
    let log = db.cluster.log();
    let ended = log
        .lines()
        .filter(|line| line.contains(" 57P01 FATAL:"))
        .count();
    assert_eq!(ended, 1, "more than the zombie was ended");
    // the pool goes on, for its client too
    let mut again = pooler.connect();
    again.exec("BEGIN; UPDATE plain SET n = n + 1; COMMIT");
}

fn zombie_through_pool(db: &Db, client: &mut Session) {
    let token = db.session().acquire_expired("r");
    client.exec(&open(token));
}

fn superuser_is_ended_for_anybody() {
    let db = server("0", "terminate");
    let role = db.role();
    let mut s = db.session();
    assert_eq!(s.text("SHOW is_superuser").as_deref(), Some("on"));
    zombie(&mut s);
    let mut taker = db.session_as(&role);
    let token = take(&mut taker);
    was_ended(&db, &mut s);
    // and whoever is logged in as somebody else
    assert!(taker.release("r", token));
    let mut s = db.session_as(&role);
    let token = s.acquire_expired("r");
    s.exec(&format!("BEGIN; SELECT fence('r', {token})"));
    take(&mut db.session_as(&db.role()));
    was_ended(&db, &mut s);
}

fn fence_of_a_read_only_transaction_is_ended() {
    let db = server("0", "terminate");
    let mut s = db.session();
    let token = s.acquire_expired("r");
    s.exec(&format!("BEGIN READ ONLY; SELECT fence('r', {token})"));
    let mut taker = db.session();
    take(&mut taker);
    was_ended(&db, &mut s);
    logged(&db, "ended the session", s.pid, token, taker.pid);
}

fn live_lease_of_another_resource_saves_nobody() {
    let db = server("0", "terminate");
    let mut s = db.session();
    let live = s.acquire("live");
    let expired = s.acquire_expired("r");
    s.exec(&format!(
        "BEGIN; SELECT fence('live', {live}), fence('r', {expired}); UPDATE doc SET n = 1"
    ));
    let under_way = s.acquire("under way");
    let mut taker = db.session();
    take(&mut taker);
    was_ended(&db, &mut s);
    // a lease does not end with a session, but what the transaction did does
    assert!(taker.check_fence("live", live) && taker.renew("live", live));
    assert!(!taker.check_fence("under way", under_way));
    assert_eq!(n_of_doc(&db), 0);
    assert!(wait_for("what it had begun", || taker.try_acquire("under way")) > under_way);
}

fn failed_transaction_is_left_alone() {
    let db = server("0", "terminate");
    let mut s = db.session();
    zombie(&mut s);
    s.err("SELECT 1/0").is("22012");
    // what it held went with the error
    db.session().acquire("r");
    goes_on(&mut s);
    let token = s.acquire_expired("q");
    s.exec(&format!(
        "BEGIN; SAVEPOINT a; SELECT fence('q', {token}); ROLLBACK TO a"
    ));
    db.session().acquire("q");
    s.exec("COMMIT");
    no_one_was_signalled(&db);
}

/// How often the log says that a prepared transaction is in the way.
fn reports(db: &Db, name: &str) -> usize {
    let message = format!("prepared transaction \"{name}\" holds up a lease");
    db.cluster.log().matches(&message).count()
}

fn prepared_zombie_is_reported_once_per_lease() {
    let db = server("0", "terminate");
    let (mut s, mut taker) = (db.session(), db.session());
    let live = s.acquire("live");
    for (round, name) in ["p", "q's"].into_iter().enumerate() {
        zombie(&mut s);
        let quoted = name.replace('\'', "''");
        s.exec(&format!("PREPARE TRANSACTION '{quoted}'"));
        // what its session does next is not its business
        s.exec(&format!("BEGIN; SELECT fence('live', {live})"));
        is_refused(&mut taker);
        assert!(taker.info_says("r", "state = 'draining' AND writers = 1"));
        s.exec("COMMIT");
        is_refused(&mut taker);
        assert_eq!(reports(&db, name), 1);
        s.exec(&format!("COMMIT PREPARED '{quoted}'"));
        let token = take(&mut taker);
        assert_eq!(n_of_doc(&db), round as i32 + 1);
        assert!(taker.release("r", token));
    }
    no_one_was_signalled(&db);
}

fn policy_wait_ends_nobody() {
    let db = server("0", "wait");
    let mut s = db.session();
    zombie(&mut s);
    is_left_alone(&db, &mut s);
    let running = s.spawn("SELECT pg_sleep(1)");
    is_refused(&mut db.session());
    let (mut s, result) = running.join();
    result.expect("a statement is left alone too");
    s.exec("COMMIT");
    no_one_was_signalled(&db);
    db.session().acquire("r");
    assert_eq!(n_of_doc(&db), 1);
}

fn policy_cancel_ends_statements_only() {
    let db = server("0", "cancel");
    let (mut s, mut taker) = (db.session(), db.session());
    zombie(&mut s);
    db.cluster.wait_until_idle(s.pid);
    is_left_alone(&db, &mut s);
    s.exec("COMMIT");
    assert_eq!(n_of_doc(&db), 1);
    // one that survives its cancel does not commit
    let token = s.acquire_expired("r");
    s.exec(&format!("{}; SAVEPOINT a", open(token)));
    let running = s.spawn("SELECT pg_sleep(3600)");
    wait_event(&db, running.pid, "PgSleep");
    is_refused(&mut taker);
    let (mut s, result) = running.join();
    result.expect_err("it was cancelled").is("57014");
    s.exec("ROLLBACK TO a; SELECT 1");
    is_refused(&mut taker);
    s.err("COMMIT").is("57014").well_written();
    goes_on(&mut s);
    logged(&db, "cancelled the statement", s.pid, token, taker.pid);
    assert!(!db.cluster.log().contains("ended the session"));
    take(&mut taker);
    assert_eq!(n_of_doc(&db), 1);
}

fn policy_counts_from_the_reload() {
    let db = server(FOREVER, "wait");
    let mut s = db.session();
    zombie(&mut s);
    is_left_alone(&db, &mut s);
    reload(&db, "leasehold.zombie_grace", "0");
    is_left_alone(&db, &mut s);
    reload(&db, "leasehold.zombie_policy", "cancel");
    is_left_alone(&db, &mut s);
    reload(&db, "leasehold.zombie_policy", "terminate");
    take(&mut db.session());
    was_ended(&db, &mut s);
    assert_eq!(n_of_doc(&db), 0);
}

/// Where nobody is ended, a holder who always has a transaction open keeps a taker out until the token is closed: which
/// the first taker does.
fn busy_holder_keeps_no_taker_out() {
    let db = server("0", "wait");
    let token = db.session().acquire_expired("r");
    let fence = format!("BEGIN; SELECT fence('r', {token})");
    let (relayed, granted) = (AtomicUsize::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut inside, mut next) = (db.session(), db.session());
            inside.exec(&fence);
            let closed = loop {
                match next.try_exec(&fence) {
                    Ok(()) => {
                        inside.exec("COMMIT");
                        std::mem::swap(&mut inside, &mut next);
                        relayed.fetch_add(1, Ordering::Relaxed);
                    }
                    Err(error) => break error,
                }
            };
            closed.is("LH004");
            assert!(
                !granted.load(Ordering::Relaxed),
                "granted past a transaction"
            );
            inside.exec("COMMIT");
        });
        wait_for("the relay", || {
            (relayed.load(Ordering::Relaxed) > 10).then_some(())
        });
        let mut taker = db.session();
        let first = taker.try_acquire("r");
        let next = first.unwrap_or_else(|| take(&mut taker));
        granted.store(true, Ordering::Relaxed);
        assert!(next > token);
    });
}

fn two_takers_end_a_zombie_once() {
    let db = server("0", "terminate");
    for _ in 0..5 {
        let mut s = db.session();
        zombie(&mut s);
        let is_granted = AtomicBool::new(false);
        let grants: Vec<i64> = thread::scope(|scope| {
            let takers = (0..2).map(|_| {
                scope.spawn(|| {
                    let mut taker = db.session();
                    wait_for("a grant", || {
                        let token = taker.try_acquire("r");
                        is_granted.fetch_or(token.is_some(), Ordering::Relaxed);
                        is_granted.load(Ordering::Relaxed).then_some(token)
                    })
                })
            });
            let takers: Vec<_> = takers.collect();
            let grants = takers
                .into_iter()
                .map(|taker| taker.join().expect("a taker"));
            grants.flatten().collect()
        });
        assert_eq!(grants.len(), 1, "granted to both: {grants:?}");
        was_ended(&db, &mut s);
        let message = format!("leasehold ended the session of process {},", s.pid);
        assert_eq!(db.cluster.log().matches(&message).count(), 1);
        assert!(db.session().release("r", grants[0]));
    }
    assert_eq!(n_of_doc(&db), 0);
}

/// A zombie whose process is stopped cannot end, so the taker stays in its drain for as long as the test likes.
fn taker_that_is_cut_off_in_its_drain_is_in_nobodys_way() {
    let db = server("0", "terminate");
    for cut_off in ["pg_cancel_backend", "pg_terminate_backend"] {
        let mut s = db.session();
        let token = zombie(&mut s);
        let stopped = Process::open(s.pid);
        stopped.signal(Signal::STOP);
        let taker = db
            .session()
            .spawn("DO 'BEGIN LOOP EXIT WHEN acquire_lease(''r'') IS NOT NULL; END LOOP; END'");
        wait_event(&db, taker.pid, "leasehold wait");
        let mut other = db.session();
        assert!(other.one::<bool>(&format!("SELECT {cut_off}({})", taker.pid)));
        let pid = taker.pid;
        let error = taker.join().1.expect_err("granted past a transaction");
        assert!(error.sqlstate == "57014" || error.is_lost(), "{error}");
        if cut_off == "pg_terminate_backend" {
            db.cluster.wait_until_left(pid);
        }
        assert_eq!(other.try_acquire("r"), None, "granted past a transaction");
        stopped.signal(Signal::CONT);
        let next = take(&mut other);
        assert!(next > token);
        was_ended(&db, &mut s);
        assert!(other.release("r", next));
    }
    assert_eq!(n_of_doc(&db), 0);
}

fn taker_in_a_block_sees_what_is_left() {
    let db = server("0", "terminate");
    let (mut s, mut taker) = (db.session(), db.session());
    zombie(&mut s);
    taker.exec("BEGIN; UPDATE plain SET n = n + 1; SAVEPOINT a");
    let token = take(&mut taker);
    assert_eq!(taker.one::<i32>("SELECT n FROM doc"), 0);
    taker.exec("UPDATE doc SET n = 10; COMMIT");
    was_ended(&db, &mut s);
    assert_eq!(n_of_doc(&db), 10);
    assert!(taker.release("r", token));
    // a lone statement under a snapshot of its own
    let mut s = db.session();
    zombie(&mut s);
    taker.exec("SET default_transaction_isolation = 'repeatable read'");
    take(&mut taker);
    was_ended(&db, &mut s);
    assert_eq!(n_of_doc(&db), 10);
}

/// The lease of a grant runs from its commit, but a transaction that stays open for longer than its TTL and the grace
/// has no more right to the resource than any other zombie.
fn acquire_that_is_never_committed_keeps_no_taker_out() {
    let db = server("0", "terminate");
    let (mut s, mut taker) = (db.session(), db.session());
    s.exec("BEGIN");
    let token = s.acquire_expired("r");
    s.exec("UPDATE doc SET n = 1");
    assert!(take(&mut taker) > token);
    was_ended(&db, &mut s);
    assert_eq!(n_of_doc(&db), 0);
}

/// Rounds that end in each way: with the signal, and with the zombie's own end.
const ROUNDS: usize = 120;

/// A signal goes to a process, which may have gone on to another transaction by then. Zombies end by themselves just when
/// takers come to signal them: the moment is sought, later after a round that came through, earlier after one that did
/// not. What their connections do next must never be hit.
fn innocent_transaction_is_never_signalled() {
    let db = server("2ms", "terminate");
    let live = db.session().acquire("live");
    db.session().exec("CREATE TABLE innocent (n int); INSERT INTO innocent VALUES (0); SELECT fence_table('innocent', 'live')");
    let (is_open, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let (through, signalled) = thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| take_when_open(db.session(), &is_open, &is_over));
        }
        let rounds = scope.spawn(|| end_just_then(&db, live, &is_open)).join();
        is_over.store(true, Ordering::Relaxed);
        rounds.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    assert!(through >= ROUNDS && signalled >= ROUNDS);
}

fn take_when_open(mut taker: Session, is_open: &AtomicBool, is_over: &AtomicBool) {
    while !is_over.load(Ordering::Relaxed) {
        if is_open.load(Ordering::Relaxed) {
            let sql = "SELECT acquire_lease('r', ttl => '1 microsecond')";
            if taker.one::<Option<i64>>(sql).is_some() {
                is_open.store(false, Ordering::Relaxed);
            }
        } else {
            thread::yield_now();
        }
    }
}

fn end_just_then(db: &Db, live: i64, is_open: &AtomicBool) -> (usize, usize) {
    let mut s = db.session();
    let (mut through, mut signalled) = (0, 0);
    let mut delay = Duration::from_millis(2);
    for round in 1_i32.. {
        if through >= ROUNDS && signalled >= ROUNDS {
            break;
        }
        // takers of the round before may still be at it
        let Some(token) = s.one::<Option<i64>>("SELECT acquire_lease('r', ttl => '1 microsecond')")
        else {
            continue;
        };
        let begun = Instant::now();
        let opened = format!("BEGIN; SELECT fence('r', {token}); UPDATE doc SET n = {round}");
        if let Err(error) = s.try_exec(&opened) {
            // a taker of the round before was quicker; this is a zombie already
            let is_zombie = error.sqlstate == "57014" || error.is_lost();
            assert!(
                is_zombie || error.sqlstate.starts_with("LH"),
                "round {round}: {error}"
            );
            if error.is_lost() {
                s = db.session();
            } else {
                s.exec("ROLLBACK");
            }
            continue;
        }
        is_open.store(true, Ordering::Relaxed);
        while begun.elapsed() < delay {
            thread::yield_now();
        }
        let end = [
            "COMMIT",
            "ROLLBACK",
            "COMMIT; SELECT 1",
            "SELECT pg_sleep(0.0003); COMMIT",
        ][round as usize % 4];
        let ended = s.try_exec(end);
        if let Err(error) = &ended {
            assert!(
                error.sqlstate == "57014" || error.is_lost(),
                "round {round}: {error}"
            );
            delay = delay.saturating_sub(Duration::from_micros(50));
            signalled += 1;
        } else {
            delay += Duration::from_micros(50);
            through += 1;
        }
        if ended.as_ref().is_err_and(DbErr::is_lost) {
            s = db.session();
        } else {
            if ended.is_err() {
                s.exec("ROLLBACK");
            }
            // whoever has the connection next
            let innocent = format!(
                "BEGIN; SELECT fence('live', {live}); UPDATE innocent SET n = {round}; COMMIT"
            );
            for sql in ["SELECT 1", &innocent] {
                if let Err(error) = s.try_exec(sql) {
                    panic!("round {round}: {sql} after {end}: {ended:?}: {error}");
                }
            }
        }
        wait_for("the round's end", || {
            (!is_open.load(Ordering::Relaxed)).then_some(())
        });
        let is_written = db_n(&mut s) == round;
        let is_commit = end.contains("COMMIT");
        assert_eq!(
            is_written,
            is_commit && ended.is_ok(),
            "round {round}: {end} has answered {ended:?}"
        );
    }
    (through, signalled)
}

fn db_n(session: &mut Session) -> i32 {
    session.one("SELECT n FROM doc")
}

//! Layer copies, part standby: synchronous replication, where no client hears of a grant before the standby has it; and
//! what may be asked of a standby itself.
//!
//! The standby is held by stopping its WAL receiver, so that a commit which waits for it waits as long as the test
//! likes.

use crate::cluster::{Db, Stop, wait_for};
use crate::copying::Pair;
use crate::session::{Pending, Session};

crate::tests![
    grant_waits_for_the_standby_whatever_the_session_set,
    longer_renewal_waits_for_the_standby_whatever_the_session_set,
    grant_that_waits_for_the_standby_is_nobodys,
    what_writes_nothing_does_not_wait_for_the_standby,
    cancelled_wait_ends_the_lease,
    cancelled_wait_ends_every_lease_of_its_transaction,
    terminated_wait_ends_the_lease,
    lease_that_no_standby_confirmed_stays_over,
    cancelled_wait_of_a_renewal_ends_the_lease,
    grants_in_memory_wait_until_the_standby_knows_their_ttl,
    cancelled_wait_of_a_grant_in_memory_leaves_the_next_to_wait,
    refusals_on_a_standby_tell_where_to_go,
    fencing_a_table_on_a_standby_tells_where_to_go,
    standby_tells_what_the_ledger_tells,
    standby_follows_the_ledger,
];

/// A primary whose commits wait for its standby.
fn synchronous(settings: &[(&str, &str)]) -> Pair {
    let pair = Pair::new(settings);
    let mut admin = pair.db.cluster.connect();
    admin.exec("ALTER SYSTEM SET synchronous_standby_names = '*'");
    admin.exec("SELECT pg_reload_conf()");
    drop(admin);
    pair.db.cluster.wait_sql(
        "SELECT EXISTS (SELECT FROM pg_stat_replication WHERE sync_state = 'sync' AND state = 'streaming')
            AND current_setting('synchronous_standby_names') = '*'",
        "a synchronous standby",
    );
    // commits wait once the checkpointer has read the setting, which it does before it begins a checkpoint
    pair.db.cluster.connect().exec("CHECKPOINT");
    pair
}

/// A statement that is on disk here, and waits for the standby.
#[track_caller]
fn unconfirmed(db: &Db, session: Session, sql: &str) -> Pending {
    let mut pending = session.spawn(sql);
    let waits = format!(
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {} AND wait_event = 'SyncRep')",
        pending.pid
    );
    let mut monitor = db.cluster.connect();
    wait_for("the wait for the standby", || {
        assert!(!pending.is_done(), "not waited for the standby: {sql}");
        monitor.one::<bool>(&waits).then_some(())
    });
    pending
}

/// Ways to ask for less than the standby's word: before the statement, and last thing before the commit.
const LAZY: &[(&str, &str)] = &[
    ("SET synchronous_commit = on", ""),
    ("SET synchronous_commit = remote_write", ""),
    ("SET synchronous_commit = local", ""),
    ("SET synchronous_commit = off", ""),
    ("BEGIN", "SET LOCAL synchronous_commit = off; COMMIT"),
    ("BEGIN; SET LOCAL synchronous_commit = local", "COMMIT"),
    (
        "BEGIN; SET LOCAL synchronous_commit = off; SAVEPOINT a",
        "RELEASE a; SET synchronous_commit = off; COMMIT",
    ),
];

/// Runs `call` in each lazy way, as a role that is lazy too, and on a lazy server; sees it wait, and gives it its answer.
fn waits_in_every_way(prepare: &str, call: &str) -> Pair {
    let pair = synchronous(&[("synchronous_commit", "local")]);
    let mut s = pair.db.session();
    s.exec("CREATE ROLE lazy LOGIN SUPERUSER; ALTER ROLE lazy SET synchronous_commit = off");
    for (round, (before, after)) in LAZY.iter().chain(&[("", "")]).enumerate() {
        let numbered = |sql: &str| sql.replace("{}", &format!("r{round}"));
        let mut session = match before.is_empty() {
            true => pair.db.session_as("lazy"),
            false => pair.db.session(),
        };
        session.exec(&numbered(prepare));
        let held = pair.standby.hold_receiver();
        session.exec(before);
        let pending = match after.is_empty() {
            true => unconfirmed(&pair.db, session, &numbered(call)),
            false => {
                session.exec(&numbered(call));
                unconfirmed(&pair.db, session, after)
            }
        };
        drop(held);
        let (_, result) = pending.join();
        result.unwrap_or_else(|e| panic!("{before}: {e}"));
    }
    pair
}

/// What was acknowledged is there when the primary is lost.
fn grant_waits_for_the_standby_whatever_the_session_set() {
    let pair = waits_in_every_way(
        // tokens in store, so that nothing but the grant can wait
        "SELECT acquire_lease('first', ttl => '1 microsecond')",
        "SELECT acquire_lease('{}', ttl => '5min')",
    );
    let granted = "SELECT string_agg(resource || token, ' ' ORDER BY token) FROM leasehold.ledger";
    let told = pair.db.session().text(granted);
    let promoted = pair.fail_over();
    let mut s = promoted.db.session();
    assert_eq!(s.one::<i64>("SELECT count(*) FROM leasehold.ledger"), 9);
    assert_eq!(s.text(granted), told);
}

fn longer_renewal_waits_for_the_standby_whatever_the_session_set() {
    let pair = waits_in_every_way(
        "SELECT acquire_lease('{}', ttl => '1min')",
        "SELECT renew_lease('{}', (SELECT token FROM lease_info('{}')), '5min')",
    );
    let promoted = pair.fail_over();
    let longer = "SELECT count(*) FROM leasehold.ledger WHERE ttl_us = 300 * 1000000";
    assert_eq!(promoted.db.session().one::<i64>(longer), 8);
}

fn grant_that_waits_for_the_standby_is_nobodys() {
    let pair = synchronous(&[]);
    let (mut s, mut other) = (pair.db.session(), pair.db.session());
    let held = pair.standby.hold_receiver();
    s.exec("BEGIN");
    let token = s.acquire("r");
    let pending = unconfirmed(&pair.db, s, "COMMIT");
    assert_eq!(other.try_acquire("r"), None);
    assert!(!other.check_fence("r", token));
    other
        .err(&format!("SELECT fence('r', {token})"))
        .is("LH002")
        .well_written();
    drop(held);
    pending.join().1.expect("the standby has it");
    other.fence("r", token);
}

fn what_writes_nothing_does_not_wait_for_the_standby() {
    let pair = synchronous(&[]);
    let mut s = pair.db.session();
    let (token, over) = (s.acquire("r"), s.acquire("over"));
    let _held = pair.standby.hold_receiver();
    // each of these would never come back
    assert!(s.renew("r", token) && s.check_fence("r", token));
    s.fence("r", token);
    assert_eq!(s.try_acquire("r"), None);
    assert_eq!(s.state_of("r"), "held");
    assert!(s.release("over", over));
    assert!(!s.check_fence("over", over));
    s.exec("SELECT * FROM leasehold.leases");
}

/// A lease that was granted here and that the standby has not confirmed is over.
#[track_caller]
fn is_unconfirmed(db: &Db, resource: &str, token: i64) {
    let mut s = db.session();
    assert!(!s.check_fence(resource, token));
    let fence = format!("SELECT fence('{resource}', {token})");
    db.refused(&mut s, &fence, "LH004");
    assert!(!s.renew(resource, token));
    assert!(!s.one::<bool>(&format!(
        "SELECT renew_lease('{resource}', {token}, '5min')"
    )));
}

fn cancel(db: &Db, pending: &Pending) {
    let cancel = format!("SELECT pg_cancel_backend({})", pending.pid);
    assert!(db.cluster.connect().one::<bool>(&cancel));
}

const CANCELLED: &str = "canceling wait for synchronous replication due to user request";

fn cancelled_wait_ends_the_lease() {
    let pair = synchronous(&[]);
    let db = &pair.db;
    let mut s = db.session();
    s.exec("CREATE TABLE doc (id int); SELECT fence_table('doc', 'r')");
    let held = pair.standby.hold_receiver();
    let pending = unconfirmed(db, s, "SELECT acquire_lease('r', ttl => '5min')");
    cancel(db, &pending);
    // as PostgreSQL ends it: committed here, with a warning
    let (mut s, answer) = pending.join();
    assert!(db.cluster.log().contains(CANCELLED));
    let token: i64 = answer
        .expect("a cancelled wait is no error")
        .and_then(|token| token.parse().ok())
        .expect("it was granted here");
    let in_ledger: i64 = s.one("SELECT token FROM leasehold.ledger WHERE resource = 'r'");
    assert_eq!(in_ledger, token);
    is_unconfirmed(db, "r", token);
    // the session that it was granted to is no exception
    s.err(&format!("SELECT fence('r', {token})")).is("LH004");
    s.exec(&format!("SET leasehold.token = '{token}'"));
    db.refused(&mut s, "INSERT INTO doc VALUES (1)", "LH004");
    drop(held);
    let next = db.session().acquire("r");
    assert!(next > token);
    db.has_lost("r", token);
    assert!(db.session().renew("r", next));
}

fn cancelled_wait_ends_every_lease_of_its_transaction() {
    let pair = synchronous(&[]);
    let db = &pair.db;
    let mut s = db.session();
    let earlier = s.acquire("earlier");
    let held = pair.standby.hold_receiver();
    s.exec("BEGIN");
    let first = s.acquire("first");
    s.exec("SAVEPOINT a");
    let second = s.acquire("second");
    s.exec("SAVEPOINT b");
    let undone = s.acquire("undone");
    s.exec("ROLLBACK TO b");
    let pending = unconfirmed(db, s, "RELEASE a; COMMIT");
    cancel(db, &pending);
    pending.join().1.expect("a cancelled wait is no error");
    for (resource, token) in [("first", first), ("second", second)] {
        is_unconfirmed(db, resource, token);
    }
    // a lease of before is none of its business
    assert!(db.session().renew("earlier", earlier));
    drop(held);
    let mut s = db.session();
    for resource in ["first", "second", "undone"] {
        assert!(s.acquire(resource) > undone);
    }
    assert_eq!(s.try_acquire("earlier"), None);
}

fn terminated_wait_ends_the_lease() {
    let pair = synchronous(&[]);
    let db = &pair.db;
    let held = pair.standby.hold_receiver();
    let pending = unconfirmed(db, db.session(), "SELECT acquire_lease('r', ttl => '5min')");
    let pid = pending.pid;
    let terminate = format!("SELECT pg_terminate_backend({pid})");
    assert!(db.cluster.connect().one::<bool>(&terminate));
    db.cluster.wait_until_left(pid);
    let error = pending.join().1.expect_err("the session was ended");
    assert!(error.is_lost(), "{error}");
    let token = db
        .session()
        .one("SELECT token FROM leasehold.ledger WHERE resource = 'r'");
    is_unconfirmed(db, "r", token);
    drop(held);
    assert!(db.session().acquire("r") > token);
    db.has_lost("r", token);
}

/// Whoever heard of it was told that it may not last, so nobody is kept waiting for it later.
fn lease_that_no_standby_confirmed_stays_over() {
    let pair = synchronous(&[]);
    let db = &pair.db;
    let held = pair.standby.hold_receiver();
    let pending = unconfirmed(db, db.session(), "SELECT acquire_lease('r', ttl => '5min')");
    cancel(db, &pending);
    let answer = pending.join().1.expect("a cancelled wait is no error");
    let token: i64 = answer.and_then(|t| t.parse().ok()).expect("it was granted");
    drop(held);
    db.cluster.restart(Stop::Fast);
    is_unconfirmed(db, "r", token);
    db.cluster.restart(Stop::Fast);
    assert!(db.session().acquire("r") > token);
}

/// The lease was granted before, and the standby knows it. That it is longer now the standby does not know, so that
/// whoever asks for it again waits again.
fn cancelled_wait_of_a_renewal_ends_the_lease() {
    let pair = synchronous(&[]);
    let db = &pair.db;
    let mut s = db.session();
    let token = s.acquire_for("r", "1min");
    let held = pair.standby.hold_receiver();
    let renewal = format!("SELECT renew_lease('r', {token}, '5min')");
    let pending = unconfirmed(db, s, &renewal);
    cancel(db, &pending);
    pending.join().1.expect("a cancelled wait is no error");
    assert!(db.cluster.log().contains(CANCELLED));
    let mut s = db.session();
    assert!(!s.check_fence("r", token) && !s.renew("r", token) && !s.release("r", token));
    db.refused(&mut s, &format!("SELECT fence('r', {token})"), "LH004");
    drop(held);
    assert!(s.acquire("r") > token);
}

/// Tokens are in store, so that nothing but the TTL of a lease in memory can wait.
fn synchronous_with_tokens() -> Pair {
    let pair = synchronous(&[]);
    pair.db.session().acquire("first");
    pair
}

fn in_memory(db: &Db) -> Session {
    db.session_with_options("-c leasehold.durability=memory")
}

fn acquire(resource: &str) -> String {
    format!("SELECT acquire_lease('{resource}', ttl => '1min')")
}

/// A lease in memory is covered by the longest TTL that the standby knows of, whoever has raised it.
fn grants_in_memory_wait_until_the_standby_knows_their_ttl() {
    let pair = synchronous_with_tokens();
    let db = &pair.db;
    let held = pair.standby.hold_receiver();
    let first = unconfirmed(db, in_memory(db), &acquire("a"));
    let second = unconfirmed(db, in_memory(db), &acquire("b"));
    drop(held);
    for pending in [first, second] {
        let token = pending.join().1.expect("the standby has it");
        assert!(token.is_some());
    }
    // from now on nobody waits
    let _held = pair.standby.hold_receiver();
    in_memory(db).exec(&acquire("c"));
}

fn cancelled_wait_of_a_grant_in_memory_leaves_the_next_to_wait() {
    let pair = synchronous_with_tokens();
    let db = &pair.db;
    let held = pair.standby.hold_receiver();
    let cancelled = unconfirmed(db, in_memory(db), &acquire("a"));
    cancel(db, &cancelled);
    let answer = cancelled.join().1.expect("a cancelled wait is no error");
    let token: i64 = answer.and_then(|t| t.parse().ok()).expect("it was granted");
    is_unconfirmed(db, "a", token);
    let next = unconfirmed(db, in_memory(db), &acquire("b"));
    drop(held);
    next.join().1.expect("the standby has it");
}

/// 25006, with the facts and the next step.
#[track_caller]
fn refused_by_a_standby(db: &Db, session: &mut Session, call: &str) {
    let error = db.refused(session, &format!("SELECT {call}"), "25006");
    let says = |part: &Option<String>| part.as_ref().is_some_and(|text| !text.is_empty());
    assert!(says(&error.detail) && says(&error.hint), "{call}: {error}");
}

fn refusals_on_a_standby_tell_where_to_go() {
    let pair = Pair::new(&[]);
    let mut s = pair.db.session();
    s.exec("CREATE TABLE fenced (id int); SELECT fence_table('fenced', 'r')");
    let token = s.acquire("r");
    pair.catch_up();
    let calls = [
        "acquire_lease('r')",
        "acquire_lease('free', 'worker', '1s')",
        "acquire_lease('r', wait => '1s')",
        "break_lease('r')",
        "break_lease('free')",
        "renew_lease('r', {t})",
        "renew_lease('r', {t}, '1s')",
        "renew_lease('free', {t})",
        "release_lease('r', {t})",
        "release_lease('free', {t})",
        "fence('r', {t})",
        "fence('free', {t})",
    ];
    let copy = pair.copy();
    let mut on = copy.session();
    for call in calls {
        refused_by_a_standby(&copy, &mut on, &call.replace("{t}", &token.to_string()));
    }
    copy.refused(&mut on, "CALL await_lease('r')", "25006");
    assert!(on.queue("r").is_empty());
    // a write that PostgreSQL refuses itself, before it comes to the fence
    on.exec(&format!("SET leasehold.token = '{token}'"));
    copy.refused(&mut on, "INSERT INTO fenced VALUES (1)", "25006");
    assert!(s.renew("r", token));
}

fn fencing_a_table_on_a_standby_tells_where_to_go() {
    let pair = Pair::new(&[]);
    let mut s = pair.db.session();
    s.exec("CREATE TABLE doc (id int); CREATE TABLE fenced (id int); SELECT fence_table('fenced', 'r')");
    pair.catch_up();
    let copy = pair.copy();
    let mut on = copy.session();
    for call in ["fence_table('doc', 'r')", "unfence_table('fenced')"] {
        refused_by_a_standby(&copy, &mut on, call);
    }
}

/// What the ledger knows of the leases that it does not know to be over.
const LEASES: &str =
    "SELECT string_agg(concat_ws('|', resource, token, holder, ttl, granted_at, role, durable), ' '
                                        ORDER BY resource) FROM ";

fn standby_tells_what_the_ledger_tells() {
    let pair = Pair::new(&[]);
    let role = pair.db.role();
    let mut s = pair.db.session_as(&role);
    s.exec("SELECT acquire_lease('a', 'worker', '5min')");
    s.exec("SELECT acquire_lease('b', 'ünïcode', '4min')");
    let renewed: i64 = s.one("SELECT acquire_lease('c', ttl => '1min')");
    assert!(s.one::<bool>(&format!("SELECT renew_lease('c', {renewed}, '3min')")));
    let (_, current) = s.stale_and_current("d");
    // what is undone leaves nothing
    s.exec("BEGIN; SELECT acquire_lease('undone'); ROLLBACK");
    let leases = format!("{LEASES} leasehold.leases");
    let told = s.text(&leases);
    pair.catch_up();
    let mut on = pair.copy().session_as(&role);
    assert_eq!(on.text(&leases), told);
    for resource in ["a", "b", "c", "d"] {
        let info = format!("{LEASES} lease_info('{resource}')");
        let here = on.text(&info);
        assert!(here.is_some());
        assert_eq!(here, s.text(&info));
        assert_ne!(on.state_of(resource), "free");
    }
    let nothing = "state = 'free' AND num_nulls(token, holder, ttl, role) = 4";
    for resource in ["undone", "never granted"] {
        assert!(on.info_says(resource, nothing), "{resource}");
    }
    assert!(on.check_fence("d", current));
}

fn standby_follows_the_ledger() {
    let pair = Pair::new(&[]);
    let (mut s, mut on) = (pair.db.session(), pair.copy().session());
    let first = s.acquire_expired("r");
    pair.catch_up();
    assert_eq!(on.info("r", "token"), Some(first.to_string()));
    let second = s.acquire("r");
    pair.catch_up();
    assert_eq!(on.info("r", "token"), Some(second.to_string()));
    assert!(!on.check_fence("r", first) && on.check_fence("r", second));
    assert!(s.release("r", second));
    // the release comes with its mark
    wait_for("the mark", || (on.state_of("r") == "free").then_some(()));
    assert!(!on.check_fence("r", second));
    assert_eq!(on.one::<i64>("SELECT count(*) FROM leasehold.leases"), 0);
}

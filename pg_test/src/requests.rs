//! Layer wait, part requests: who has lost an answer asks again, and gets the same one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cluster::{Cluster, Db, Stop, wait_for};
use crate::rights::{allow, login};
use crate::session::Session;

crate::tests![
    retry_gets_the_same_token,
    retry_within_the_transaction,
    retry_while_the_first_is_open,
    retry_after_a_restart,
    retry_in_the_grace,
    retry_is_answered_with_the_commit,
    retry_presents_its_token,
    retry_though_others_are_allowed_by_now,
    retry_at_the_end_of_its_lease_is_no_way_in,
    retry_of_what_this_transaction_ends,
    retry_does_not_restart_the_ttl,
    other_requests_are_others,
    retry_after_the_end_is_a_new_request,
    retry_that_waits,
    retry_passes_the_queue,
    retry_of_a_waiter_that_was_granted,
    retry_is_for_members_of_the_role,
    retry_in_memory,
    retried_release_says_true_until_superseded,
    retried_release_after_a_restart,
];

const FIRST: &str = "11111111-1111-1111-1111-111111111111";
const SECOND: &str = "22222222-2222-2222-2222-222222222222";

fn call(request: &str, more: &str) -> String {
    format!("SELECT acquire_lease('r', ttl => '5min', request => '{request}'{more})")
}

/// Asks for r under a request.
#[track_caller]
fn ask(s: &mut Session, request: &str) -> Option<i64> {
    s.one(&call(request, ""))
}

#[track_caller]
fn granted(s: &mut Session, request: &str) -> i64 {
    ask(s, request).expect("a token")
}

fn retry_gets_the_same_token() {
    let db = Db::new();
    let mut s = db.session();
    let token = granted(&mut s, FIRST);
    let before = db.state();
    for mut session in [db.session(), s] {
        assert_eq!(ask(&mut session, FIRST), Some(token));
        // with a wait, and whatever else it brings
        let again: Option<i64> = session.one(&call(FIRST, ", wait => '1min', holder => 'me'"));
        assert_eq!(again, Some(token));
        assert!(session.queue("r").is_empty());
    }
    assert_eq!(db.state(), before, "a retry has changed something");
    // it is of use to write under
    let mut s = db.session();
    s.exec(&format!("BEGIN; SELECT fence('r', {token}); COMMIT"));
    assert!(s.renew("r", token) && s.release("r", token));
}

fn retry_within_the_transaction() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("BEGIN");
    let token = granted(&mut s, FIRST);
    assert_eq!(ask(&mut s, FIRST), Some(token));
    let again: Option<i64> = s.one(&call(FIRST, ", wait => '1min'"));
    assert_eq!(again, Some(token));
    assert_eq!(ask(&mut s, SECOND), None);
    s.exec("COMMIT");
    assert_eq!(ask(&mut s, FIRST), Some(token));
    assert!(s.release("r", token));
    // undone with a savepoint, it was never granted
    s.exec("BEGIN; SAVEPOINT a");
    let first = granted(&mut s, FIRST);
    s.exec("ROLLBACK TO a");
    let second = granted(&mut s, FIRST);
    assert!(second > first);
    s.exec("COMMIT");
    assert_eq!(ask(&mut db.session(), FIRST), Some(second));
}

/// The first call is not committed yet: there is no answer to repeat, and it is in the way.
fn retry_while_the_first_is_open() {
    let db = Db::new();
    let (mut s, mut other) = (db.session(), db.session());
    for end in ["COMMIT", "ROLLBACK"] {
        s.exec("BEGIN");
        let first = granted(&mut s, FIRST);
        assert_eq!(ask(&mut other, FIRST), None);
        let waiting = db.queued(other, "r", &call(FIRST, ", wait => '1min'"));
        s.exec(end);
        let (session, second) = waiting.granted();
        other = session;
        assert!(other.queue("r").is_empty());
        if end == "COMMIT" {
            assert_eq!(second, first);
        } else {
            assert!(second > first);
        }
        assert!(other.release("r", second));
    }
}

fn retry_is_answered_with_the_commit() {
    let db = Db::new();
    let (mut s, mut other) = (db.session(), db.session());
    // it sleeps for a second, if nobody wakes it; one in three is in time on a busy machine too
    let mut least = Duration::MAX;
    for _ in 0..3 {
        s.exec("BEGIN");
        let first = granted(&mut s, FIRST);
        let before = db.waiter();
        let waiting = db.queued(other, "r", &call(FIRST, ", wait => '1min'"));
        s.exec("COMMIT");
        let begun = Instant::now();
        let (session, second) = waiting.granted();
        least = least.min(begun.elapsed());
        assert_eq!(second, first);
        assert_eq!(s.queue("r"), [before.pid]);
        s.cancel(before.pid);
        before.failed().1.is("57014");
        other = session;
        assert!(other.release("r", second));
    }
    assert!(least < Duration::from_millis(400), "{least:?}");
}

fn retry_though_others_are_allowed_by_now() {
    let db = Db::new();
    let (own, other) = (login(&db, "own"), login(&db, "other"));
    let mut s = db.session_as(&own);
    let token = granted(&mut s, FIRST);
    allow(&db, "r", &other);
    assert_eq!(ask(&mut s, FIRST), Some(token));
    let waiting: i64 = s.one(&call(FIRST, ", wait => '1min'"));
    assert_eq!(waiting, token);
    // it is the one request, of the one role, and as long as the lease lives
    s.err(&call(SECOND, "")).is("42501");
    s.err("SELECT acquire_lease('r')").is("42501");
    let third = login(&db, "third");
    db.session_as(&third).err(&call(FIRST, "")).is("42501");
    assert!(s.release("r", token));
    s.err(&call(FIRST, "")).is("42501");
}

/// The lease ends while the call is on its way.
fn retry_at_the_end_of_its_lease_is_no_way_in() {
    let db = Db::new();
    let (own, other) = (login(&db, "own"), login(&db, "other"));
    let mut s = db.session_as(&own);
    s.exec(&format!(
        "PREPARE ask(text, interval) AS SELECT acquire_lease($1, ttl => $2, request => '{FIRST}')"
    ));
    let ask = |n: usize| format!("EXECUTE ask('r{n}', '{}ms')", 400 + 4 * n);
    let tokens: Vec<Option<String>> = (0..300).map(|n| s.text(&ask(n))).collect();
    allow(&db, "r*", &other);
    for (n, token) in tokens.into_iter().enumerate() {
        let error = loop {
            match s.try_text(&ask(n)) {
                Ok(again) => assert_eq!(again, token),
                Err(error) => break error,
            }
        };
        error.is("42501");
    }
}

/// As an acquire does: a transaction whose answer was lost is run again as it is.
fn retry_presents_its_token() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE doc (n int); SELECT fence_table('doc', 'r')");
    for count in 1..=2_i64 {
        s.exec("BEGIN");
        assert!(ask(&mut s, FIRST).is_some());
        s.exec("INSERT INTO doc VALUES (1); COMMIT");
        assert_eq!(s.one::<i64>("SELECT count(*) FROM doc"), count);
    }
}

fn retry_of_what_this_transaction_ends() {
    let db = Db::new();
    let mut s = db.session();
    let token = granted(&mut s, FIRST);
    for end in [
        format!("SELECT release_lease('r', {token})"),
        "SELECT break_lease('r')".to_owned(),
    ] {
        s.exec(&format!("BEGIN; {end}"));
        assert_eq!(ask(&mut s, FIRST), None, "{end}");
        s.exec("ROLLBACK");
        assert_eq!(ask(&mut s, FIRST), Some(token));
    }
}

/// Nothing is granted then, and a retry is no grant. It needs no room among the leases of its role either.
fn retry_in_the_grace() {
    let db = Db::of_waiters("1h");
    let role = db.role();
    let mut s = db.session_as(&role);
    let token = granted(&mut s, FIRST);
    s.exec("SET leasehold.durability = memory; SELECT acquire_lease('m', ttl => '5min')");
    drop(s);
    db.session().exec(&format!(
        "ALTER ROLE {role} SET leasehold.max_leases_per_role = 1"
    ));
    for how in [Stop::Fast, Stop::Immediate] {
        db.cluster.restart(how);
        let mut s = db.session_as(&role);
        assert_eq!(ask(&mut s, FIRST), Some(token), "after {how:?}");
        assert_eq!(s.state_of("never"), "recovering");
        assert_eq!(db.session().try_acquire("never"), None);
    }
}

fn retry_after_a_restart() {
    let db = Db::of_waiters("1h");
    let token = granted(&mut db.session(), FIRST);
    for how in [Stop::Fast, Stop::Immediate] {
        db.cluster.restart(how);
        let mut s = db.session();
        // with nobody having touched it before
        assert_eq!(ask(&mut s, FIRST), Some(token), "after {how:?}");
        assert_eq!(ask(&mut s, SECOND), None);
        assert_eq!(s.try_acquire("r"), None);
    }
    db.cluster.kill_postmaster();
    db.cluster.start();
    let mut s = db.session();
    assert_eq!(s.try_acquire("r"), None);
    assert_eq!(ask(&mut s, FIRST), Some(token));
    let again: Option<i64> = s.one(&call(FIRST, ", wait => '1s'"));
    assert_eq!(again, Some(token));
    assert!(s.release("r", token));
    assert!(granted(&mut s, FIRST) > token);
}

fn retry_does_not_restart_the_ttl() {
    let db = Db::new();
    let mut s = db.session();
    let short = format!("SELECT acquire_lease('r', ttl => '1min', request => '{FIRST}')");
    let token: i64 = s.one(&short);
    for retry in [call(FIRST, ""), short, call(FIRST, ", wait => '1s'")] {
        let before = s.info("r", "remaining").expect("an interval");
        assert_eq!(s.one::<Option<i64>>(&retry), Some(token));
        assert!(
            s.info_says("r", &format!("remaining <= '{before}'::interval")),
            "the lease runs longer by a retry"
        );
        assert!(s.info_says("r", "ttl = '1min' AND renewed_at IS NULL"));
    }
}

fn other_requests_are_others() {
    let db = Db::new();
    let mut s = db.session();
    let token = granted(&mut s, FIRST);
    assert_eq!(ask(&mut s, SECOND), None);
    assert_eq!(s.try_acquire("r"), None);
    let same_holder: Option<i64> = s.one("SELECT acquire_lease('r', wait => '1ms')");
    assert_eq!(same_holder, None);
    // of another resource it is another one
    let q: Option<i64> = s.one(&format!("SELECT acquire_lease('q', request => '{FIRST}')"));
    assert!(q.is_some_and(|q| q != token));
    assert!(s.release("r", token));
    // a lease without a request is nobody's retry
    let token = s.acquire("r");
    assert_eq!(ask(&mut s, FIRST), None);
    let zero = "00000000-0000-0000-0000-000000000000";
    assert_eq!(
        ask(&mut s, zero),
        None,
        "no request is not the one of zeros"
    );
    assert!(s.release("r", token));
    let token = granted(&mut s, zero);
    assert_eq!(s.try_acquire("r"), None);
    assert_eq!(ask(&mut s, zero), Some(token));
}

fn retry_after_the_end_is_a_new_request() {
    let db = Db::new();
    let mut s = db.session();
    let mut last = 0;
    let mut newer = |token: i64| {
        assert!(token > last, "{token} again after its end");
        last = token;
    };
    s.exec("BEGIN");
    newer(granted(&mut s, FIRST));
    s.exec("ROLLBACK");
    let released = granted(&mut s, FIRST);
    newer(released);
    assert!(s.release("r", released));
    let expired: i64 = s.one(&format!(
        "SELECT acquire_lease('r', ttl => '1 microsecond', request => '{FIRST}')"
    ));
    newer(expired);
    let broken = granted(&mut s, FIRST);
    newer(broken);
    assert_eq!(s.one::<i64>("SELECT break_lease('r')"), broken);
    // superseded by another, and free again
    let other = granted(&mut s, SECOND);
    newer(other);
    assert_eq!(ask(&mut s, FIRST), None);
    assert!(s.release("r", other));
    newer(granted(&mut s, FIRST));
}

fn retry_that_waits() {
    let db = Db::new();
    let mut s = db.session();
    let token = s.acquire("r");
    let first = db.queued(db.session(), "r", &call(FIRST, ", wait => '1min'"));
    // the answer will be lost, and both calls are made
    let second = db.queued(db.session(), "r", &call(FIRST, ", wait => '1min'"));
    let mut other = db.waiter();
    assert!(s.release("r", token));
    let (mut first, token) = first.granted();
    let (second, again) = second.granted();
    assert_eq!(again, token);
    assert!(!other.is_done());
    assert_eq!(s.queue("r"), [other.pid]);
    drop(second);
    assert!(first.release("r", token));
    other.granted();
}

/// A retry needs no turn: there is nothing to be granted.
fn retry_passes_the_queue() {
    let db = Db::with(&[("leasehold.max_waiters", "2")]);
    let mut s = db.session();
    let token = granted(&mut s, FIRST);
    let waiting = [db.waiter(), db.waiter()];
    // full as it is
    for more in ["", ", wait => '1s'"] {
        assert_eq!(s.one::<Option<i64>>(&call(FIRST, more)), Some(token));
    }
    s.err(&call(SECOND, ", wait => '1s'")).is("LH005");
    assert_eq!(s.queue("r"), [waiting[0].pid, waiting[1].pid]);
    assert!(s.release("r", token));
    for waiting in waiting {
        let (mut waiter, token) = waiting.granted();
        assert!(waiter.release("r", token));
    }
}

/// The session was ended after its wait was over: was it granted?
fn retry_of_a_waiter_that_was_granted() {
    let db = Db::new();
    let mut s = db.session();
    let token = s.acquire("r");
    let waiting = db.queued(db.session(), "r", &call(FIRST, ", wait => '1min'"));
    assert!(s.release("r", token));
    let (waiter, token) = waiting.granted();
    let pid = waiter.pid;
    drop(waiter);
    db.cluster.wait_until_left(pid);
    assert_eq!(ask(&mut s, FIRST), Some(token));
    // and one that was not
    let waiting = db.queued(db.session(), "r", &call(SECOND, ", wait => '1min'"));
    s.terminate(waiting.pid);
    assert!(waiting.failed().1.is_lost());
    assert!(s.release("r", token));
    assert!(granted(&mut s, SECOND) > token);
}

fn retry_is_for_members_of_the_role() {
    let db = Db::new();
    let (owner, other) = (db.role(), db.role());
    let token = granted(&mut db.session_as(&owner), FIRST);
    let mut stranger = db.session_as(&other);
    let error = db.refused(&mut stranger, &call(FIRST, ""), "42501");
    error.details("r");
    db.refused(&mut stranger, &call(FIRST, ", wait => '1s'"), "42501");
    assert_eq!(ask(&mut stranger, SECOND), None);
    db.session().exec(&format!("GRANT {owner} TO {other}"));
    assert_eq!(ask(&mut stranger, FIRST), Some(token));
    assert_eq!(ask(&mut db.session(), FIRST), Some(token), "a superuser");
    // of a lease that is over, it is anybody's
    assert!(stranger.release("r", token));
    let third = db.role();
    assert!(granted(&mut db.session_as(&third), FIRST) > token);
}

fn retry_in_memory() {
    let db = Db::of_waiters("1h");
    let memory = |db: &Db| db.session_with_options("-c leasehold.durability=memory");
    let mut s = memory(&db);
    let short = format!("SELECT acquire_lease('r', ttl => '2s', request => '{FIRST}')");
    let token: i64 = s.one(&short);
    assert_eq!(s.one::<Option<i64>>(&short), Some(token));
    // it is the lease that is asked for, not the durability
    assert_eq!(ask(&mut db.session(), FIRST), Some(token));
    assert!(s.release("r", token));
    let token: i64 = s.one(&short);
    drop(s);
    db.cluster.restart(Stop::Immediate);
    let mut s = memory(&db);
    let next = wait_for("the grant", || ask(&mut s, FIRST));
    assert!(next > token, "a lease in memory has outlived the server");
}

fn retried_release_says_true_until_superseded() {
    let db = Db::new();
    let mut s = db.session();
    let token = granted(&mut s, FIRST);
    for mut session in [db.session(), db.session()] {
        assert!(session.release("r", token));
    }
    // a grant that is rolled back has taken the place of the token all the same
    let next = granted(&mut s, FIRST);
    assert!(!s.release("r", token), "superseded");
    assert!(s.release("r", next) && s.release("r", next));
    assert!(!s.release("r", token));
    let expired = s.acquire_expired("r");
    assert!(!s.release("r", expired) && !s.release("r", expired));
}

fn retried_release_after_a_restart() {
    for how in [Stop::Fast, Stop::Immediate] {
        // so small a table that entries are pushed out of it
        let builder = Cluster::builder().conf("leasehold.max_leases", "8");
        let db = Db::on(&Arc::new(builder.start()));
        let mut s = db.session();
        let (token, old) = (granted(&mut s, FIRST), s.acquire("old"));
        assert!(s.release("r", token) && s.release("old", old));
        let newer = s.acquire("old");
        // the mark of a release is written by the worker, when it comes to it; an immediate stop may lose it
        wait_for("the mark", || {
            let marked: bool = s.one("SELECT released FROM leasehold.ledger WHERE resource = 'r'");
            marked.then_some(())
        });
        s.exec("CHECKPOINT");
        drop(s);
        db.cluster.restart(how);
        let mut s = db.session();
        assert!(s.release("r", token), "after {how:?}");
        assert!(!s.release("old", old) && s.release("old", newer));
        for i in 0..60 {
            let name = format!("passing {i}");
            let passing = s.acquire(&name);
            assert!(s.release(&name, passing));
        }
        assert!(s.release("r", token), "after {how:?}, displaced");
        let next = granted(&mut s, FIRST);
        assert!(next > token && !s.release("r", token));
    }
}

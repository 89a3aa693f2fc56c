//! Layer wait, part overload: who is refused at once rather than left to wait in vain.

use crate::cluster::{Db, wait_for};
use crate::queueing::WAIT;
use crate::session::{DbErr, Session};

crate::tests![
    no_more_wait_than_may,
    full_queue_tells_what_is_known,
    nobody_waits_where_nobody_may,
    limit_counts_from_the_reload,
    limit_is_of_each_resource,
    wait_that_cannot_be_served_is_refused,
    drain_of_a_lease_that_is_over_sheds_nobody,
    short_lease_is_waited_for_whatever_it_was_held_before,
    free_resource_is_never_shed,
    shed_call_can_be_caught,
];

fn limited(most: &str) -> Db {
    Db::with(&[
        ("leasehold.max_waiters", most),
        ("leasehold.zombie_grace", "1h"),
    ])
}

fn reload(db: &Db, most: &str) {
    db.cluster
        .configure(&format!("leasehold.max_waiters = {most}\n"));
    let mut s = db.session();
    s.exec("SELECT pg_reload_conf()");
    wait_for("the reload", || {
        (s.text("SHOW leasehold.max_waiters").as_deref() == Some(most)).then_some(())
    });
}

/// One more is refused, by the function and by the procedure, and nothing changes by it.
#[track_caller]
fn is_full(db: &Db, resource: &str, waiting: usize, most: usize) {
    let mut s = db.session();
    let before = s.queue(resource);
    assert_eq!(before.len(), waiting);
    for sql in [
        format!("SELECT acquire_lease('{resource}', wait => '1min')"),
        format!("SELECT acquire_lease('{resource}', wait => '1s')"),
        format!("CALL await_lease('{resource}')"),
    ] {
        let error = db.refused(&mut s, &sql, "LH005");
        error
            .tells(resource)
            .details(&format!("{waiting} wait"))
            .details(&format!("leasehold.max_waiters is {most}"))
            .details("expected wait is ")
            .hints_at("Retry after ");
        assert_eq!(s.queue(resource), before);
    }
    // who does not wait is no burden
    assert_eq!(s.try_acquire(resource), None);
}

fn no_more_wait_than_may() {
    for most in [1, 3] {
        let db = limited(&most.to_string());
        let mut s = db.session();
        let token = s.acquire("r");
        let mut waiting: Vec<_> = (0..most).map(|_| db.waiter()).collect();
        is_full(&db, "r", most, most);
        // there is room again when one has left
        s.cancel(waiting[0].pid);
        waiting.remove(0).failed().1.is("57014");
        waiting.push(db.waiter());
        is_full(&db, "r", most, most);
        assert!(s.release("r", token));
        let (mut first, token) = waiting.remove(0).granted();
        waiting.push(db.waiter());
        is_full(&db, "r", most, most);
        assert!(first.release("r", token));
        for waiting in waiting {
            let (mut waiter, token) = waiting.granted();
            assert!(waiter.release("r", token));
        }
    }
}

fn full_queue_tells_what_is_known() {
    let db = limited("1");
    let (mut s, mut other) = (db.session(), db.session());
    let token = s.acquire("r");
    let first = db.waiter();
    let refused = |s: &mut Session| {
        let error = s.err(WAIT).is("LH005").well_written();
        // with a place in the queue it has nothing to do
        let hint = error.hint.as_deref().unwrap_or_default();
        assert!(!hint.contains("longer wait"), "{error}");
        error
    };
    refused(&mut other)
        .details("the expected wait is not known yet")
        .hints_at("Retry after 1.000 s");
    assert!(s.release("r", token));
    first.granted();
    let second = db.waiter();
    let error = refused(&mut other).details("the expected wait is ");
    assert!(!error.to_string().contains("not known"), "{error}");
    s.cancel(second.pid);
    second.failed().1.is("57014");
}

fn nobody_waits_where_nobody_may() {
    let db = limited("0");
    let mut s = db.session();
    // free: nobody has to wait
    let token = s.text(WAIT).expect("it is free").parse().expect("a token");
    is_full(&db, "r", 0, 0);
    assert!(s.release("r", token));
    assert!(s.text(WAIT).is_some());
    // an own grant is not waited for in any case
    s.exec("BEGIN");
    s.acquire("q");
    assert_eq!(s.text("SELECT acquire_lease('q', wait => '1s')"), None);
}

fn limit_counts_from_the_reload() {
    let db = limited("1");
    let mut s = db.session();
    let token = s.acquire("r");
    let (first, second);
    first = db.waiter();
    is_full(&db, "r", 1, 1);
    reload(&db, "2");
    second = db.waiter();
    is_full(&db, "r", 2, 2);
    // those who wait stay
    reload(&db, "1");
    is_full(&db, "r", 2, 1);
    assert!(s.release("r", token));
    let (mut first, token) = first.granted();
    is_full(&db, "r", 1, 1);
    assert!(first.release("r", token));
    second.granted();
}

fn limit_is_of_each_resource() {
    let db = limited("1");
    let mut s = db.session();
    let (r, q) = (s.acquire("r"), s.acquire("q"));
    let for_r = db.waiter();
    let for_q = db.queued(
        db.session(),
        "q",
        "SELECT acquire_lease('q', wait => '1min')",
    );
    is_full(&db, "r", 1, 1);
    is_full(&db, "q", 1, 1);
    // and of each database
    let other = Db::on(&db.cluster);
    other.session().acquire("r");
    let there = other.waiter();
    is_full(&other, "r", 1, 1);
    assert!(s.release("r", r) && s.release("q", q));
    for_r.granted();
    for_q.granted();
    s.terminate(there.pid);
    assert!(there.failed().1.is_lost());
}

/// Holds r some times, each for at least half a second.
fn hold_long(s: &mut Session) {
    for _ in 0..3 {
        let token = s.acquire("r");
        s.exec("SELECT pg_sleep(0.5)");
        assert!(s.release("r", token));
    }
}

fn too_late(db: &Db, s: &mut Session, sql: &str) -> DbErr {
    let error = db.refused(s, sql, "LH005");
    error
        .tells("resource \"r\" cannot be had within the wait")
        .details("The expected wait is ")
        .details(" s")
        .hints_at("Retry after ")
        .hints_at("longer wait")
}

/// Behind one who waits, at least one hold will have to pass, whatever is left of the running one.
/// How long the lease was held says nothing of how long its old transactions take.
fn drain_of_a_lease_that_is_over_sheds_nobody() {
    let db = Db::of_waiters("1h");
    let (mut s, mut writer) = (db.session(), db.session());
    // holds that are short, then one that was long
    for _ in 0..8 {
        let token = s.acquire("r");
        assert!(s.release("r", token));
    }
    let token: i64 = s.one("SELECT acquire_lease('r', ttl => '2s')");
    writer.exec(&format!("BEGIN; SELECT fence('r', {token})"));
    wait_for("the lease to run out", || {
        (s.state_of("r") == "expired").then_some(())
    });
    let first = db.session().spawn(WAIT);
    wait_for("the drain", || {
        (s.state_of("r") == "draining").then_some(())
    });
    // shorter than the lease was, and than a taker who is stopped keeps his drain
    let hasty = db.queued(
        db.session(),
        "r",
        "SELECT acquire_lease('r', wait => '900ms')",
    );
    assert_eq!(hasty.join().1.expect("it is not shed"), None);
    writer.exec("COMMIT");
    first.granted();
}

fn wait_that_cannot_be_served_is_refused() {
    let db = Db::new();
    let mut s = db.session();
    hold_long(&mut s);
    let token = s.acquire("r");
    let first = db.waiter();
    let mut hasty = db.session();
    for sql in [
        "SELECT acquire_lease('r', wait => '100ms')",
        "SELECT acquire_lease('r', wait => '400ms')",
        "CALL await_lease('r', wait => '400ms')",
    ] {
        too_late(&db, &mut hasty, sql).details("with 1 waiting before");
        assert_eq!(s.queue("r"), [first.pid]);
    }
    // far above it is let in, and behind two more has to be expected
    let second = db.waiter();
    too_late(
        &db,
        &mut hasty,
        "SELECT acquire_lease('r', wait => '800ms')",
    )
    .details("with 2 waiting before");
    let endless = db.queued(db.session(), "r", "CALL await_lease('r')");
    assert!(s.release("r", token));
    for waiting in [first, second] {
        let (mut waiter, token) = waiting.granted();
        assert!(waiter.release("r", token));
    }
    endless.granted();
}

/// Nobody waits longer than what is left of a lease that is not renewed.
fn short_lease_is_waited_for_whatever_it_was_held_before() {
    let db = Db::new();
    let mut s = db.session();
    hold_long(&mut s);
    let _: i64 = s.one("SELECT acquire_lease('r', ttl => '100ms')");
    let granted: Option<i64> = db
        .session()
        .one("SELECT acquire_lease('r', wait => '300ms')");
    assert!(granted.is_some());
}

fn free_resource_is_never_shed() {
    let db = Db::new();
    let mut s = db.session();
    hold_long(&mut s);
    for wait in ["1 microsecond", "1ms", "400ms"] {
        let sql = format!("SELECT acquire_lease('r', ttl => '5min', wait => '{wait}')");
        let token: Option<i64> = s.one(&sql);
        let token = token.unwrap_or_else(|| panic!("free, and not had within {wait}"));
        assert!(s.release("r", token));
        let token = s.text(&format!(
            "CALL await_lease('r', ttl => '5min', wait => '{wait}')"
        ));
        let token = token.expect("it is free").parse().expect("a token");
        assert!(s.release("r", token));
    }
    // nor an expired one
    s.acquire_expired("r");
    let token: Option<i64> = s.one("SELECT acquire_lease('r', wait => '1 microsecond')");
    assert!(token.is_some());
}

fn shed_call_can_be_caught() {
    let db = limited("0");
    let mut s = db.session();
    let token = s.acquire("r");
    s.exec(
        "CREATE TABLE caught (state text);
         DO $$ BEGIN
            PERFORM acquire_lease('r', wait => '1s');
            RAISE 'not shed';
         EXCEPTION WHEN SQLSTATE 'LH005' THEN INSERT INTO caught VALUES (SQLSTATE);
         END $$",
    );
    assert_eq!(s.one::<String>("SELECT state FROM caught"), "LH005");
    // within a block the savepoint is kept, and the rest goes on
    s.exec("BEGIN; SAVEPOINT a");
    s.err(WAIT).is("LH005");
    s.exec("ROLLBACK TO a");
    assert!(s.release("r", token));
    s.exec("COMMIT");
    s.acquire("r");
}

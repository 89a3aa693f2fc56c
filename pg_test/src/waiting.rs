//! Layer wait, part queue: who waits for a resource is granted it, in the order of arrival, by whatever ends the lease
//! before.
//!
//! A wake-up that was lost would be made up for by the look that everyone takes once a second. So where it matters, many
//! hand-overs are made, which take minutes that way and less than a second otherwise.

use std::time::{Duration, Instant};

use crate::cluster::{Db, Stop, wait_for};
use crate::copying::Held;
use crate::queueing::WAIT;
use crate::session::{LIMIT, Session};

crate::tests![
    waiter_is_granted_by_a_release,
    waiter_is_granted_by_a_rollback,
    waiter_is_granted_by_the_end_of_a_session,
    waiter_is_granted_by_a_break,
    waiter_is_granted_by_expiry_and_never_early,
    renewal_makes_the_waiter_wait_on,
    waiter_is_granted_when_the_last_writer_is_gone,
    waiter_ends_a_zombie,
    waiter_sees_what_the_last_holder_wrote,
    call_without_a_wait_does_not_wait,
    bad_waits,
    wait_that_is_over_answers_null,
    grants_follow_arrivals,
    newcomer_does_not_overtake,
    hand_overs_wait_for_no_look,
    only_the_first_is_woken,
    own_grant_is_not_waited_for,
    own_grant_is_not_waited_for_behind_others,
    own_fence_is_not_waited_for_behind_others,
    own_lease_is_waited_for,
    prepared_transaction_is_waited_for,
    waits_at_any_isolation_level,
    queues_are_apart,
    waits_for_the_grace_to_end,
    stopped_waiter_is_passed_over_and_comes_back,
    stopped_taker_loses_its_drain_and_comes_back,
    waiters_go_with_the_server,
];

fn waiter_is_granted_by_a_release() {
    let db = Db::new();
    let mut s = db.session();
    let token = s.acquire("r");
    let mut waiting = db.waiter();
    assert!(!waiting.is_done());
    assert!(s.release("r", token));
    let (mut waiter, next) = waiting.granted();
    assert!(next > token);
    assert!(waiter.check_fence("r", next) && !waiter.check_fence("r", token));
    assert_eq!(s.info("r", "pid"), Some(waiter.pid.to_string()));
    assert!(s.queue("r").is_empty());
    // in a transaction block too, with its commit
    waiter.exec("BEGIN");
    assert!(waiter.release("r", next));
    let mut waiting = db.waiter();
    assert_eq!(s.queue("r"), [waiting.pid]);
    assert!(!waiting.is_done());
    waiter.exec("COMMIT");
    waiting.granted();
}

fn waiter_is_granted_by_a_rollback() {
    let db = Db::new();
    let mut s = db.session();
    for (grant, undo) in [
        ("", "ROLLBACK"),
        ("SAVEPOINT a", "ROLLBACK TO a"),
        ("SAVEPOINT a", "ROLLBACK"),
    ] {
        s.exec(&format!("BEGIN; {grant}"));
        let token = s.acquire("r");
        let waiting = db.waiter();
        s.exec(undo);
        let (mut waiter, next) = waiting.granted();
        assert!(next > token);
        s.exec("ROLLBACK");
        assert!(waiter.release("r", next));
    }
}

fn waiter_is_granted_by_the_end_of_a_session() {
    let db = Db::new();
    let mut s = db.session();
    for terminated in [true, false] {
        let mut holder = db.session();
        holder.exec("BEGIN");
        let token = holder.acquire("r");
        let waiting = db.waiter();
        if terminated {
            s.terminate(holder.pid);
        }
        drop(holder);
        let (mut waiter, next) = waiting.granted();
        assert!(next > token);
        assert!(waiter.release("r", next));
    }
}

fn waiter_is_granted_by_a_break() {
    let db = Db::new();
    let (mut s, mut admin) = (db.session(), db.session());
    let token = s.acquire("r");
    let waiting = db.waiter();
    assert_eq!(admin.one::<i64>("SELECT break_lease('r')"), token);
    let (_, next) = waiting.granted();
    assert!(next > token);
}

fn waiter_is_granted_by_expiry_and_never_early() {
    let db = Db::new();
    let mut s = db.session();
    let token: i64 = s.one("SELECT acquire_lease('r', ttl => '2s')");
    let granted = s.info("r", "granted_at").expect("a time");
    let (waiting, behind) = (db.waiter(), db.waiter());
    let (mut waiter, next) = waiting.granted();
    assert!(next > token);
    assert!(
        s.info_says(
            "r",
            &format!("granted_at >= '{granted}'::timestamptz + '2s'::interval")
        ),
        "granted within the lease"
    );
    assert_eq!(s.queue("r"), [behind.pid]);
    assert!(waiter.release("r", next));
    behind.granted();
    // of a transaction that stays open for longer than its lease, which is no zombie here
    let db = Db::of_waiters("1h");
    let mut s = db.session();
    s.exec("BEGIN");
    let _: i64 = s.one("SELECT acquire_lease('r', ttl => '1ms')");
    let waiting = db.queued(
        db.session(),
        "r",
        "SELECT acquire_lease('r', wait => '1500ms')",
    );
    waiting.denied();
    let waiting = db.waiter();
    s.exec("COMMIT");
    let (mut waiter, token) = waiting.granted();
    assert!(waiter.renew("r", token));
}

fn renewal_makes_the_waiter_wait_on() {
    let db = Db::new();
    let mut s = db.session();
    let token: i64 = s.one("SELECT acquire_lease('r', ttl => '30s')");
    s.exec(&format!("SELECT renew_lease('r', {token}, '5min')"));
    let mut waiting = db.waiter();
    // through more than one look of the waiter
    wait_for("the waiter to have waited", || {
        let waited: bool = s.one("SELECT waited > '2500ms'::interval FROM leasehold.waiters");
        waited.then_some(())
    });
    assert!(s.renew("r", token));
    assert!(!waiting.is_done());
    assert!(s.release("r", token));
    waiting.granted();
}

/// The lease is over, but a transaction is still inside, and nobody may end it.
fn waiter_is_granted_when_the_last_writer_is_gone() {
    let db = Db::of_waiters("1h");
    let (mut s, mut writer) = (db.session(), db.session());
    s.exec("CREATE TABLE doc AS SELECT 0 AS n; SELECT fence_table('doc', 'r')");
    for end in ["COMMIT", "ROLLBACK"] {
        let token = s.acquire("r");
        writer.exec(&format!(
            "BEGIN; SELECT fence('r', {token}); UPDATE doc SET n = n + 1"
        ));
        let (waiting, mut behind) = (db.waiter(), db.waiter());
        assert!(s.release("r", token));
        wait_for("the drain", || {
            (s.state_of("r") == "draining").then_some(())
        });
        // he drains, and the one behind does not
        db.wait_queue("r", &[waiting.pid, behind.pid]);
        writer.exec(end);
        let (mut waiter, next) = waiting.granted();
        assert_eq!(waiter.one::<i32>("SELECT n FROM doc"), 1);
        assert!(!behind.is_done());
        assert!(waiter.release("r", next));
        let (mut behind, next) = behind.granted();
        assert!(behind.release("r", next));
    }
}

fn waiter_ends_a_zombie() {
    let db = Db::of_waiters("0");
    let (mut s, mut zombie) = (db.session(), db.session());
    let token: i64 = s.one("SELECT acquire_lease('r', ttl => '2s')");
    zombie.exec(&format!("BEGIN; SELECT fence('r', {token})"));
    let waiting = db.queued(
        db.session(),
        "r",
        "SELECT acquire_lease('r', ttl => '5min', wait => '1h')",
    );
    let (mut waiter, next) = waiting.granted();
    assert!(zombie.err("SELECT 1").is_lost());
    assert!(waiter.release("r", next));
    // one that was granted it and does not commit
    let mut zombie = db.session();
    zombie.exec("BEGIN");
    let _: i64 = zombie.one("SELECT acquire_lease('r', ttl => '2s')");
    db.queued(
        db.session(),
        "r",
        "SELECT acquire_lease('r', ttl => '5min', wait => '1h')",
    )
    .granted();
    assert!(zombie.err("SELECT 1").is_lost());
}

fn waiter_sees_what_the_last_holder_wrote() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE doc AS SELECT 0 AS n; SELECT fence_table('doc', 'r')");
    for n in 1..=20 {
        let token = s.acquire("r");
        let mut waiter = db.session();
        waiter.exec("BEGIN");
        let waiting = db.queued(waiter, "r", WAIT);
        s.exec(&format!(
            "BEGIN; SELECT fence('r', {token}); UPDATE doc SET n = {n}; SELECT release_lease('r', {token}); COMMIT"
        ));
        // in the very transaction of the grant
        let (mut waiter, next) = waiting.granted();
        assert_eq!(waiter.one::<i32>("SELECT n FROM doc"), n);
        assert!(waiter.release("r", next));
        waiter.exec("COMMIT");
    }
}

fn call_without_a_wait_does_not_wait() {
    let db = Db::new();
    let (mut s, mut other) = (db.session(), db.session());
    let held = s.acquire("r");
    for call in [
        "acquire_lease('r')",
        "acquire_lease('r', wait => '0')",
        "acquire_lease('r', 'me', '1min', '0 seconds', NULL, NULL)",
    ] {
        assert_eq!(other.text(&format!("SELECT {call}")), None, "{call}");
        assert!(s.queue("r").is_empty(), "{call}");
    }
    // nor for a grant in progress
    assert!(s.release("r", held));
    s.exec("BEGIN");
    s.acquire("r");
    assert_eq!(other.try_acquire("r"), None);
    assert!(s.queue("r").is_empty());
}

fn bad_waits() {
    let db = Db::with(&[("leasehold.max_wait", "2s")]);
    let mut s = db.session();
    // of a resource that is free, and of one that is held
    s.acquire("held");
    for r in ["free", "held"] {
        let refused = |s: &mut Session, wait: &str, sqlstate| {
            db.refused(
                s,
                &format!("SELECT acquire_lease('{r}', wait => {wait})"),
                sqlstate,
            )
        };
        let error = refused(&mut s, "NULL", "22004");
        error.tells("wait");
        let error = refused(&mut s, "'-1 microsecond'", "22023");
        error.details("-1 microseconds").hints_at("'0'");
        for above in ["'2001ms'", "'1 month'", "'100000 years'"] {
            let error = refused(&mut s, above, "22023");
            error
                .tells("wait is above leasehold.max_wait")
                .details("leasehold.max_wait is 2.000 s")
                .hints_at("await_lease");
        }
        db.refused(
            &mut s,
            &format!("CALL await_lease('{r}', wait => '-1s')"),
            "22023",
        );
    }
    let token: Option<i64> = s.one("SELECT acquire_lease('free', wait => '2s')");
    assert!(token.is_some());
    // a reload counts, and 0 leaves no wait at all
    db.cluster.configure("leasehold.max_wait = 0\n");
    s.exec("SELECT pg_reload_conf()");
    wait_for("the reload", || {
        let now: String = s.one("SELECT current_setting('leasehold.max_wait')");
        (now == "0").then_some(())
    });
    db.refused(
        &mut s,
        "SELECT acquire_lease('held', wait => '1ms')",
        "22023",
    );
    assert_eq!(s.try_acquire("held"), None);
}

fn wait_that_is_over_answers_null() {
    let db = Db::new();
    let (mut s, mut other) = (db.session(), db.session());
    let token = s.acquire("r");
    let before = db.state();
    for (wait, least) in [("1 microsecond", 0), ("30ms", 30), ("1200ms", 1200)] {
        let begun = Instant::now();
        let sql = format!("SELECT acquire_lease('r', wait => '{wait}')");
        assert_eq!(other.text(&sql), None);
        assert!(
            begun.elapsed() >= Duration::from_millis(least),
            "back before {wait} had passed"
        );
        assert!(s.queue("r").is_empty(), "still in the queue after {wait}");
    }
    assert_eq!(db.state(), before);
    // behind another, and in a block, which goes on
    let waiting = db.waiter();
    let before = db.state();
    other.exec("BEGIN");
    assert_eq!(
        other.text("SELECT acquire_lease('r', wait => '30ms')"),
        None
    );
    assert_eq!(s.queue("r"), [waiting.pid]);
    other.exec("COMMIT");
    assert_eq!(db.state(), before);
    assert!(s.release("r", token));
    waiting.granted();
}

fn grants_follow_arrivals() {
    let db = Db::new();
    let mut s = db.session();
    let mut last = s.acquire("r");
    let mut waiting: Vec<_> = (0..8).map(|_| db.waiter()).collect();
    let mut pids: Vec<i32> = waiting.iter().map(|w| w.pid).collect();
    assert_eq!(s.queue("r"), pids);
    let mut holder = s;
    let mut watch = db.session();
    while !waiting.is_empty() {
        assert!(holder.release("r", last));
        let first = waiting.remove(0);
        let (next, token) = first.granted();
        assert!(token > last);
        assert_eq!(next.pid, pids.remove(0));
        // all others stay, in their order
        assert_eq!(watch.queue("r"), pids);
        assert!(waiting.iter_mut().all(|w| !w.is_done()));
        (holder, last) = (next, token);
    }
    // one that leaves from the middle leaves the order of the others
    let waiting: Vec<_> = (0..5).map(|_| db.waiter()).collect();
    let mut order: Vec<i32> = waiting.iter().map(|w| w.pid).collect();
    watch.cancel(order.remove(2));
    db.wait_queue("r", &order);
    assert!(holder.release("r", last));
    for (place, waiting) in waiting.into_iter().enumerate() {
        if place == 2 {
            waiting.failed().1.is("57014");
        } else {
            let (mut s, token) = waiting.granted();
            order.remove(0);
            assert_eq!(watch.queue("r"), order);
            assert!(s.release("r", token));
        }
    }
}

/// Who has just released asks again before the first of the queue can have looked.
fn newcomer_does_not_overtake() {
    let db = Db::new();
    let mut s = db.session();
    for round in 0..50 {
        let token = s.acquire("r");
        let waiting = db.waiter();
        // free, with a queue: for whoever does not wait, and for one who does, at its end
        let again = format!(
            "DO $$ BEGIN
                PERFORM release_lease('r', {token});
                COMMIT;
                IF acquire_lease('r') IS NOT NULL THEN RAISE 'overtook'; END IF;
             END $$"
        );
        if let Err(error) = s.try_exec(&again) {
            panic!("round {round}: {error}");
        }
        let (mut waiter, token) = waiting.granted();
        // the same of one who waits: he does so behind the other
        let second = db.waiter();
        let again = format!(
            "DO $$ BEGIN
                PERFORM release_lease('r', {token});
                COMMIT;
                PERFORM release_lease('r', acquire_lease('r', wait => '1min'));
             END $$"
        );
        waiter.exec(&format!("SET application_name = 'again {round}'"));
        let again = waiter.spawn(&again);
        let (mut second, token) = second.granted();
        assert!(second.release("r", token));
        again.join().1.expect("granted after the other");
    }
}

fn hand_overs_wait_for_no_look() {
    let db = Db::new();
    let mut s = db.session();
    let hand_overs = 120;
    let mut took = Duration::ZERO;
    for _ in 0..hand_overs / 2 {
        // by a release and by a rollback
        let token = s.acquire("r");
        let waiting = db.waiter();
        let begun = Instant::now();
        s.release("r", token);
        let (mut waiter, token) = waiting.granted();
        took += begun.elapsed();
        waiter.release("r", token);
        s.exec("BEGIN");
        s.acquire("r");
        let waiting = db.waiter();
        let begun = Instant::now();
        s.exec("ROLLBACK");
        let (mut waiter, token) = waiting.granted();
        took += begun.elapsed();
        waiter.release("r", token);
    }
    // half a second each and more, if the waiters had to look by themselves
    assert!(took < LIMIT, "{hand_overs} hand-overs took {took:?}");
}

/// How often a process has gone to sleep.
fn sleeps(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let sleeps = status
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    sleeps
        .and_then(|n| n.trim().parse().ok())
        .expect("a number")
}

fn only_the_first_is_woken() {
    let db = Db::new();
    let (mut s, mut watch) = (db.session(), db.session());
    let token = s.acquire("r");
    let served = 24;
    let before: Vec<_> = (0..served)
        .map(|_| {
            db.queued(
                db.session(),
                "r",
                "SELECT release_lease('r', acquire_lease('r', wait => '1min'))",
            )
        })
        .collect();
    let last = db.waiter();
    let (begun, slept) = (Instant::now(), sleeps(last.pid));
    for _ in 0..10 {
        assert!(s.renew("r", token));
    }
    assert!(s.release("r", token));
    for waiting in before {
        assert_eq!(waiting.join().1, Ok(Some("t".to_owned())));
    }
    let pid = last.pid;
    let (mut last, token) = last.granted();
    let slept = sleeps(pid) - slept;
    // it looks once a second, is woken when it is the first, and may wait for a lock of a partition now and then
    let most = served / 2 + 4 * (begun.elapsed().as_secs() + 1);
    assert!(
        slept <= most,
        "slept {slept} times, in {:?} with {served} before it",
        begun.elapsed()
    );
    assert!(last.release("r", token));
    assert!(watch.queue("r").is_empty());
}

/// Of the transaction that is being granted the resource, or is inside it under an older token: it would wait for
/// itself.
fn own_grant_is_not_waited_for() {
    let db = Db::of_waiters("1h");
    let mut s = db.session();
    s.exec("BEGIN");
    let token = s.acquire("r");
    assert_eq!(
        s.text("SELECT acquire_lease('r', wait => '1h')"),
        None,
        "granted twice"
    );
    assert!(db.session().queue("r").is_empty());
    s.exec("COMMIT");
    assert!(s.check_fence("r", token));
    assert!(s.release("r", token));
    let expired = s.acquire_expired("r");
    s.exec(&format!("BEGIN; SELECT fence('r', {expired})"));
    assert_eq!(s.text("SELECT acquire_lease('r', wait => '1h')"), None);
    s.exec("COMMIT");
    s.acquire("r");
}

/// Whoever comes first in the queue waits for this very transaction.
fn own_grant_is_not_waited_for_behind_others() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("BEGIN");
    let token = s.acquire("r");
    let waiting = db.waiter();
    let begun = Instant::now();
    assert_eq!(
        s.text("SELECT acquire_lease('r', wait => '20s')"),
        None,
        "granted twice"
    );
    s.exec("COMMIT");
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "it has waited for itself"
    );
    assert!(s.release("r", token));
    waiting.granted();
}

fn own_fence_is_not_waited_for_behind_others() {
    let db = Db::of_waiters("1h");
    let mut s = db.session();
    let expired = s.acquire_expired("r");
    s.exec(&format!("BEGIN; SELECT fence('r', {expired})"));
    let waiting = db.session().spawn(WAIT);
    let mut watch = db.session();
    wait_for("the drain", || {
        (watch.state_of("r") == "draining").then_some(())
    });
    let begun = Instant::now();
    assert_eq!(s.text("SELECT acquire_lease('r', wait => '20s')"), None);
    s.exec("COMMIT");
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "it has waited for who waits for it"
    );
    waiting.granted();
}

fn prepared_transaction_is_waited_for() {
    let db = Db::of_waiters("0");
    let mut s = db.session();
    for end in ["COMMIT", "ROLLBACK"] {
        let token = s.acquire("r");
        s.exec(&format!(
            "BEGIN; SELECT fence('r', {token}); PREPARE TRANSACTION 'inside'"
        ));
        let mut waiting = db.waiter();
        assert!(s.release("r", token));
        wait_for("the report", || {
            let told = db.cluster.log().matches("holds up a lease").count();
            (told == if end == "COMMIT" { 1 } else { 2 }).then_some(())
        });
        assert!(!waiting.is_done());
        s.exec(&format!("{end} PREPARED 'inside'"));
        let (mut waiter, token) = waiting.granted();
        assert!(waiter.release("r", token));
    }
}

fn own_lease_is_waited_for() {
    let db = Db::new();
    let (mut s, mut other) = (db.session(), db.session());
    let token = s.acquire("r");
    let waiting = db.queued(s, "r", WAIT);
    assert!(other.release("r", token));
    waiting.granted();
}

fn waits_at_any_isolation_level() {
    let db = Db::new();
    let mut s = db.session();
    for level in ["repeatable read", "serializable"] {
        let token = s.acquire("r");
        let waiter = db.session_with_options(&format!(
            "-c default_transaction_isolation={}",
            level.replace(' ', "\\ ")
        ));
        let waiting = db.queued(waiter, "r", WAIT);
        assert!(s.release("r", token));
        let (mut waiter, token) = waiting.granted();
        let error = waiter.err("BEGIN; SELECT acquire_lease('r', wait => '1s')");
        error.is("25001").well_written();
        waiter.exec("ROLLBACK");
        assert!(waiter.release("r", token));
    }
}

fn queues_are_apart() {
    let (db, other) = (Db::new(), Db::new());
    let (mut s, mut o) = (db.session(), other.session());
    let (r, q) = (s.acquire("r"), s.acquire("q"));
    let in_other = o.acquire("r");
    let waits_for_r = db.waiter();
    let waits_for_q = db.queued(
        db.session(),
        "q",
        "SELECT acquire_lease('q', wait => '1min')",
    );
    let mut waits_there = other.waiter();
    assert_eq!(s.queue("r"), [waits_for_r.pid]);
    assert_eq!(s.queue("q"), [waits_for_q.pid]);
    assert_eq!(o.queue("r"), [waits_there.pid]);
    assert_eq!(s.one::<i64>("SELECT count(*) FROM leasehold.waiters"), 2);
    assert!(s.release("q", q));
    waits_for_q.granted();
    assert_eq!(s.queue("r"), [waits_for_r.pid]);
    assert!(s.release("r", r));
    waits_for_r.granted();
    assert!(!waits_there.is_done());
    assert!(o.release("r", in_other));
    waits_there.granted();
}

/// After a restart nothing is granted for as long as leases in memory may be believed in: who waits is granted then.
fn waits_for_the_grace_to_end() {
    let db = Db::of_waiters("1h");
    let mut s = db.session_with_options("-c leasehold.durability=memory");
    let _: i64 = s.one("SELECT acquire_lease('r', ttl => '4s')");
    drop(s);
    db.cluster.restart(Stop::Immediate);
    let started = Instant::now();
    let mut s = db.session();
    let waiting: Vec<_> = (0..3)
        .map(|_| {
            db.session()
                .spawn("SELECT release_lease('r', acquire_lease('r', wait => '1h'))")
        })
        .collect();
    assert_eq!(s.try_acquire("r"), None);
    for waiting in waiting {
        assert_eq!(waiting.join().1, Ok(Some("t".to_owned())));
    }
    assert!(
        started.elapsed() > Duration::from_secs(2),
        "nobody waited for the grace"
    );
}

/// Stops a process in its wait, where it holds no lock that others need.
fn hold_asleep(s: &mut Session, pid: i32) -> Held {
    let asleep = format!(
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {pid} AND wait_event = 'leasehold wait')"
    );
    wait_for("the process to be asleep", || {
        let held = Held::hold(pid);
        s.one::<bool>(&asleep).then_some(held)
    })
}

/// One that waits for an old transaction to end has left the queue, and must not keep the others out for that.
fn stopped_taker_loses_its_drain_and_comes_back() {
    let db = Db::of_waiters("1h");
    let (mut s, mut writer) = (db.session(), db.session());
    let wait = "SELECT acquire_lease('r', ttl => '5min', wait => '1h')";
    for block in ["", "BEGIN; "] {
        let token = s.acquire("r");
        writer.exec(&format!("BEGIN; SELECT fence('r', {token})"));
        let mut stopped = db.queued(db.session(), "r", &format!("{block}{wait}"));
        assert!(s.release("r", token));
        wait_for("the drain", || {
            (s.state_of("r") == "draining").then_some(())
        });
        let held = hold_asleep(&mut s, stopped.pid);
        writer.exec("COMMIT");
        // who comes next, waiting or not
        let next = db.session().spawn(wait);
        let (mut next, token) = next.granted();
        assert!(!stopped.is_done());
        drop(held);
        db.wait_queue("r", &[stopped.pid]);
        assert!(next.check_fence("r", token), "the holder was disturbed");
        // inside under a live lease: nobody's zombie
        next.exec(&format!("BEGIN; SELECT fence('r', {token}); COMMIT"));
        assert!(next.release("r", token));
        let (mut back, token) = stopped.granted();
        if !block.is_empty() {
            back.exec("COMMIT");
        }
        assert!(back.release("r", token));
        let locks: i64 = s.one("SELECT count(*) FROM pg_locks WHERE objsubid = 19528");
        assert_eq!(locks, 0, "a fence stayed locked");
    }
}

fn stopped_waiter_is_passed_over_and_comes_back() {
    let db = Db::of_waiters("1h");
    let mut s = db.session();
    let wait = "SELECT acquire_lease('r', ttl => '5min', wait => '1h')";
    let token = s.acquire("r");
    let mut stopped = db.queued(db.session(), "r", wait);
    let second = db.queued(db.session(), "r", wait);
    let held = Held::hold(stopped.pid);
    assert!(s.release("r", token));
    let (mut second, token) = second.granted();
    assert!(!s.queue("r").contains(&stopped.pid));
    assert!(!stopped.is_done());
    drop(held);
    db.wait_queue("r", &[stopped.pid]);
    assert!(second.release("r", token));
    let (mut back, token) = stopped.granted();
    assert!(back.release("r", token));
    // in nobody's way of those who come later, even if they do not wait
    let token = s.acquire("r");
    let mut stopped = db.queued(db.session(), "r", wait);
    let held = Held::hold(stopped.pid);
    assert!(s.release("r", token));
    let token = wait_for("the grant", || second.try_acquire("r"));
    assert!(s.queue("r").is_empty() && !stopped.is_done());
    // and it can be ended where it is
    s.terminate(stopped.pid);
    drop(held);
    let pid = stopped.pid;
    assert!(stopped.failed().1.is_lost());
    db.cluster.wait_until_left(pid);
    assert!(s.queue("r").is_empty());
    assert!(s.release("r", token));
}

fn waiters_go_with_the_server() {
    let db = Db::of_waiters("1h");
    for how in [
        Some(Stop::Fast),
        Some(Stop::Immediate),
        None, // one backend dies, and the postmaster ends the others
    ] {
        let mut s = db.session();
        let token = s.acquire("r");
        let waiting = [db.waiter(), db.waiter()];
        let pid = s.pid;
        drop(s);
        match how {
            Some(how) => db.cluster.restart(how),
            None => {
                let victim = db.session();
                assert_ne!(victim.pid, pid);
                db.cluster.crash_backend(victim.pid);
            }
        }
        waiting
            .into_iter()
            .for_each(|w| assert!(w.failed().1.is_lost()));
        let mut s = db.session();
        assert!(s.queue("r").is_empty());
        // one that nobody has touched since
        let waiting = db.waiter();
        assert!(s.release("r", token));
        let (mut waiter, token) = waiting.granted();
        assert!(waiter.release("r", token));
    }
}

//! Layer wait, part leaving: whoever stops waiting, however that comes about, is out of the queue by the time that
//! anybody hears of it, and takes no wake-up along.

use std::process::Stdio;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use crate::cluster::{Db, wait_for};
use crate::environment::environment;
use crate::queueing::WAIT;
use crate::session::Session;

crate::tests![
    cancelled_waiter_leaves,
    statement_timeout_ends_a_wait,
    lock_timeout_ends_a_wait,
    terminated_waiter_leaves,
    waiter_whose_client_is_gone_leaves,
    wait_in_a_savepoint,
    wait_in_an_exception_block,
    cancel_of_who_is_woken_swallows_no_wake_up,
    end_of_who_is_woken_swallows_no_wake_up,
    cancel_of_who_drains_lets_the_next_drain,
    error_after_the_grant_hands_it_on,
    wait_in_a_drain_ends_like_any_other,
];

/// The first, the middle and the last of three are ended by `end` in turn; whoever is left is granted in order.
fn each_of_three(db: &Db, end: impl Fn(&mut Session, i32), lost: bool) {
    let (mut s, mut watch) = (db.session(), db.session());
    for victim in 0..3 {
        let token = s.acquire("r");
        let mut waiting: Vec<_> = (0..3).map(|_| db.waiter()).collect();
        let mut pids: Vec<i32> = waiting.iter().map(|w| w.pid).collect();
        let pid = pids.remove(victim);
        end(&mut watch, pid);
        let (mut gone, error) = waiting.remove(victim).failed();
        if lost {
            assert!(error.is_lost(), "{error}");
            db.cluster.wait_until_left(pid);
        } else {
            error.is("57014");
            gone.exec("ROLLBACK");
        }
        assert_eq!(watch.queue("r"), pids, "after the end of {victim}");
        assert!(waiting.iter_mut().all(|w| !w.is_done()));
        assert!(s.release("r", token));
        for waiting in waiting {
            let (mut waiter, token) = waiting.granted();
            assert!(waiter.release("r", token));
        }
        if !lost {
            // the session goes on as if nothing had been
            let token = gone.acquire("r");
            assert!(gone.release("r", token));
        }
    }
}

fn cancelled_waiter_leaves() {
    each_of_three(&Db::new(), |s, pid| s.cancel(pid), false);
}

fn terminated_waiter_leaves() {
    each_of_three(&Db::new(), |s, pid| s.terminate(pid), true);
}

fn statement_timeout_ends_a_wait() {
    let db = Db::new();
    let (mut s, mut other) = (db.session(), db.session());
    let token = s.acquire("r");
    other.exec("SET statement_timeout = '50ms'");
    for _ in 0..3 {
        other.err(WAIT).is("57014");
        assert!(s.queue("r").is_empty(), "still in the queue");
    }
    // as the first, with one behind
    other.exec("SET statement_timeout = '1500ms'");
    let first = db.queued(other, "r", WAIT);
    let second = db.waiter();
    first.failed().1.is("57014");
    assert_eq!(s.queue("r"), [second.pid]);
    assert!(s.release("r", token));
    second.granted();
}

fn lock_timeout_ends_a_wait() {
    let db = Db::new();
    let (mut s, mut other) = (db.session(), db.session());
    let token = s.acquire("r");
    other.exec("SET lock_timeout = '50ms'");
    let begun = Instant::now();
    let error = db.refused(&mut other, WAIT, "55P03");
    assert!(begun.elapsed() >= Duration::from_millis(50));
    error
        .tells("lock timeout")
        .details("resource \"r\"")
        .hints_at("lock_timeout");
    assert!(s.queue("r").is_empty(), "still in the queue");
    // a shorter wait ends first, and a resource that is free is no matter of time
    other.exec("SET lock_timeout = '30s'");
    assert_eq!(other.text("SELECT acquire_lease('r', wait => '1ms')"), None);
    other.exec("SET lock_timeout = '1500ms'");
    let first = db.queued(other, "r", WAIT);
    let second = db.waiter();
    let (mut other, error) = first.failed();
    error.is("55P03");
    assert_eq!(s.queue("r"), [second.pid]);
    assert!(s.release("r", token));
    let (mut second, token) = second.granted();
    assert!(second.release("r", token));
    other.exec("SET lock_timeout = '1ms'");
    assert!(other.text(WAIT).is_some());
}

/// SIGKILL to a client: its socket is closed, and the server looks after that where it is told to.
fn waiter_whose_client_is_gone_leaves() {
    let db = Db::new();
    let mut s = db.session();
    for sql in [WAIT, "CALL await_lease('r')"] {
        let token = s.acquire("r");
        let mut psql = environment().pg_command("psql", db.cluster.dir());
        psql.args(["-X", "-U", "postgres", "-p", "5432", "-d", &db.name, "-h"])
            .arg(db.cluster.socket_dir())
            .env("PGOPTIONS", "-c client_connection_check_interval=50ms")
            .args(["-c", sql])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut client = psql.spawn().expect("psql can be started");
        let pid = wait_for("the client to wait", || s.queue("r").first().copied());
        let second = db.waiter();
        assert_eq!(s.queue("r"), [pid, second.pid]);
        client.kill().expect("it runs");
        client.wait().expect("a child can be awaited");
        db.wait_queue("r", &[second.pid]);
        assert!(s.release("r", token));
        let (mut second, token) = second.granted();
        assert!(second.release("r", token));
        db.cluster.wait_until_left(pid);
    }
}

fn wait_in_a_savepoint() {
    let db = Db::new();
    let (mut s, mut watch) = (db.session(), db.session());
    let token = s.acquire("r");
    let mut waiter = db.session();
    waiter.exec("BEGIN; SAVEPOINT a");
    let waiting = db.queued(waiter, "r", WAIT);
    watch.cancel(waiting.pid);
    let (mut waiter, error) = waiting.failed();
    error.is("57014");
    assert!(watch.queue("r").is_empty(), "still in the queue");
    waiter.exec("ROLLBACK TO a");
    let waiting = db.queued(waiter, "r", WAIT);
    let behind = db.waiter();
    assert!(s.release("r", token));
    let (mut waiter, token) = waiting.granted();
    assert_eq!(watch.queue("r"), [behind.pid]);
    // granted in it, undone with it
    waiter.exec("ROLLBACK TO a");
    let (mut behind, next) = behind.granted();
    assert!(next > token);
    waiter.exec("COMMIT");
    assert!(behind.release("r", next));
}

fn wait_in_an_exception_block() {
    let db = Db::new();
    let (mut s, mut watch, mut gate) = (db.session(), db.session(), db.session());
    let token = s.acquire("r");
    // holds the block up between its two waits
    gate.exec("SELECT pg_advisory_lock(1)");
    let sql = "DO $$
         BEGIN
            PERFORM set_config('lock_timeout', '50ms', false);
            BEGIN
                PERFORM acquire_lease('r', wait => '1min');
                RAISE 'granted';
            EXCEPTION WHEN lock_not_available THEN PERFORM set_config('lock_timeout', '0', false);
            END;
            BEGIN
                PERFORM acquire_lease('r', 'second', wait => '1min');
                RAISE 'granted';
            EXCEPTION WHEN query_canceled THEN NULL;
            END;
            PERFORM pg_advisory_xact_lock(1);
            IF acquire_lease('r', ttl => '5min', wait => '1min') IS NULL THEN RAISE 'not granted'; END IF;
         END $$";
    let waiting = db.session().spawn(sql);
    // the one with the timeout has gone
    wait_for("the second wait", || {
        let waits: bool =
            watch.one("SELECT count(*) = 1 AND bool_and(holder = 'second') FROM leasehold.waiters");
        waits.then_some(())
    });
    watch.cancel(waiting.pid);
    db.cluster.wait_until_blocked(waiting.pid);
    assert!(watch.queue("r").is_empty(), "still in the queue");
    gate.exec("SELECT pg_advisory_unlock(1)");
    db.wait_queue("r", &[waiting.pid]);
    assert!(s.release("r", token));
    waiting.join().1.expect("it is granted at last");
    assert_eq!(s.state_of("r"), "held");
}

/// Rounds in which the first of two who wait is ended in the very moment of the release. The second is granted in each,
/// at once: one that is woken by nobody looks by itself a second later.
fn race(db: &Db, end: &'static str) {
    let rounds = 100;
    let barrier = Arc::new(Barrier::new(2));
    let (mut holder, mut second_session) = (db.session(), db.session());
    let mut first_session = db.session();
    let (mut slow, mut granted) = (0, 0);
    for round in 0..rounds {
        let token = holder.acquire("r");
        let first = db.queued(first_session, "r", WAIT);
        let second = db.queued(second_session, "r", WAIT);
        let mut ender = db.session();
        let (gate, pid) = (barrier.clone(), first.pid);
        let ending = thread::spawn(move || {
            gate.wait();
            ender.exec(&format!("SELECT {end}({pid})"));
        });
        barrier.wait();
        // now a little sooner, now a little later
        for _ in 0..(round % 8) * 2000 {
            std::hint::spin_loop();
        }
        let begun = Instant::now();
        assert!(holder.release("r", token));
        ending.join().expect("the signal is sent");
        first_session = match first.join() {
            (mut session, Ok(token)) => {
                granted += 1;
                let token = token.expect("a token").parse().expect("a token");
                // a signal that came too late for the wait ends this one instead
                let released = |session: &mut Session| {
                    session
                        .try_one_with::<bool>("SELECT release_lease('r', $1)", &[&token])
                        .is_ok()
                };
                if released(&mut session) || released(&mut session) {
                    session
                } else {
                    assert!(db.session().release("r", token));
                    db.session()
                }
            }
            (_, Err(error)) if error.is_lost() => {
                // it may have been granted the lease, and not have got to say so
                db.cluster.wait_until_left(pid);
                if holder.info("r", "pid") == Some(pid.to_string()) {
                    granted += 1;
                    holder.exec("SELECT break_lease('r')");
                }
                db.session()
            }
            (session, Err(error)) => {
                error.is("57014");
                session
            }
        };
        let (mut session, token) = second.granted();
        slow += usize::from(begun.elapsed() > Duration::from_millis(900));
        assert!(session.release("r", token));
        second_session = session;
        // a terminated session may end only now
        if first_session.try_exec("SELECT 1").is_err() {
            first_session = db.session();
        }
    }
    assert!(
        slow * 10 < rounds,
        "{slow} of {rounds} waited for a look of their own ({granted} times the first was granted)"
    );
}

fn cancel_of_who_is_woken_swallows_no_wake_up() {
    race(&Db::new(), "pg_cancel_backend");
}

fn end_of_who_is_woken_swallows_no_wake_up() {
    race(&Db::new(), "pg_terminate_backend");
}

fn cancel_of_who_drains_lets_the_next_drain() {
    let db = Db::of_waiters("1h");
    let (mut s, mut writer) = (db.session(), db.session());
    for end in ["pg_cancel_backend", "pg_terminate_backend"] {
        let token = s.acquire("r");
        writer.exec(&format!("BEGIN; SELECT fence('r', {token})"));
        let (first, mut second) = (db.waiter(), db.waiter());
        assert!(s.release("r", token));
        wait_for("the drain", || {
            (s.state_of("r") == "draining").then_some(())
        });
        s.exec(&format!("SELECT {end}({})", first.pid));
        let error = first.failed().1;
        assert!(error.sqlstate == "57014" || error.is_lost(), "{error}");
        // the second is at it now
        db.wait_queue("r", &[second.pid]);
        assert!(!second.is_done());
        writer.exec("COMMIT");
        let (mut second, token) = second.granted();
        assert!(second.release("r", token));
    }
}

fn error_after_the_grant_hands_it_on() {
    let db = Db::new();
    let mut s = db.session();
    let token = s.acquire("r");
    let failing = db.queued(
        db.session(),
        "r",
        "SELECT 1 / (acquire_lease('r', wait => '1min') * 0)::int",
    );
    let last = db.waiter();
    assert!(s.release("r", token));
    failing.failed().1.is("22012");
    let (_, next) = last.granted();
    assert!(next > token + 1, "the first was not granted it");
}

/// Waits for the transactions under the old token are waits like any other.
fn wait_in_a_drain_ends_like_any_other() {
    let db = Db::of_waiters("1h");
    let (mut s, mut writer) = (db.session(), db.session());
    for (setting, wait, sqlstate) in [
        ("SET statement_timeout = '300ms'", "1min", Some("57014")),
        ("SET lock_timeout = '300ms'", "1min", Some("55P03")),
        ("SELECT 1", "300ms", None),
    ] {
        let token = s.acquire("r");
        writer.exec(&format!("BEGIN; SELECT fence('r', {token})"));
        assert!(s.release("r", token));
        let mut first = db.session();
        first.exec(setting);
        let sql = format!("SELECT acquire_lease('r', wait => '{wait}')");
        let first = first.spawn(&sql);
        wait_for("the drain", || {
            (s.state_of("r") == "draining").then_some(())
        });
        let mut second = db.session().spawn(WAIT);
        let (_, result) = first.join_within(Duration::from_secs(20));
        match (result, sqlstate) {
            (Err(error), Some(sqlstate)) => drop(error.is(sqlstate)),
            (result, _) => assert_eq!(result, Ok(None), "{setting}"),
        }
        assert!(!second.is_done(), "granted past a transaction");
        writer.exec("COMMIT");
        let (mut second, token) = second.granted();
        assert!(second.release("r", token));
    }
}

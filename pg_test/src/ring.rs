//! Layer seen, part ring: how much the flight recorder keeps, whom it tells, and that it is of one piece whoever writes
//! to it meanwhile.
//!
//! Denials are sampled, so tests of them have servers of their own.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use crate::cluster::{Db, Stop, wait_for};
use crate::leases::NEVER;
use crate::queueing::WAIT;
use crate::recorder::{acquire_as, last, session_of, story, with_doc};
use crate::rights::login;

crate::tests![
    denials_are_sampled,
    numbers_have_no_gaps,
    ring_goes_round,
    no_ring_tells_nothing,
    only_who_may_read_all_stats_may_read,
    other_databases_are_not_told,
    extension_made_again_has_no_past,
    restart_has_no_past,
    nothing_is_torn,
    hand_overs_are_told_in_order,
];

fn denials_are_sampled() {
    let db = Db::with(&[]);
    let (mut s, mut other) = (db.session(), db.session());
    s.acquire("r");
    let begun = Instant::now();
    let denied = "SELECT count(*) FROM leasehold.events WHERE event = 'denied' AND resource = 'r'";
    // the first one is told at once
    other.try_acquire("r");
    assert_eq!(s.one::<i64>(denied), 1);
    other.exec("SELECT acquire_lease('r') FROM generate_series(1, 999)");
    let told: i64 = s.one(denied);
    let most = 1 + i64::try_from(begun.elapsed().as_secs()).expect("a few seconds");
    assert!(1 <= told && told <= most, "{told} in {:?}", begun.elapsed());
    // all are counted
    assert_eq!(s.one::<i64>("SELECT denials FROM leasehold.stats"), 1000);
    // another one is told when a second has passed
    wait_for("another one", || {
        other.try_acquire("r");
        (s.one::<i64>(denied) > told).then_some(())
    });
    assert!(begun.elapsed().as_secs() >= 1);
    // after a wait too
    let waiter = db
        .session()
        .spawn("SELECT acquire_lease('r', wait => '1200ms')");
    waiter.denied();
    assert!(s.one::<i64>(denied) >= told + 2);
}

fn numbers_have_no_gaps() {
    let db = Db::with(&[]);
    let mut s = db.session();
    for n in 0..30 {
        let token = s.acquire("r");
        s.renew("r", token);
        s.try_fence("r", NEVER - n)
            .expect_err("unknown")
            .is("LH002");
        s.try_acquire("r");
        if n % 2 == 0 {
            s.release("r", token);
        } else {
            s.exec("SELECT break_lease('r')");
        }
        s.exec("BEGIN");
        s.acquire("r");
        s.exec("ROLLBACK");
    }
    let (count, first, last): (i64, i64, i64) = (
        s.one("SELECT count(*) FROM leasehold.events"),
        s.one("SELECT min(seq) FROM leasehold.events"),
        s.one("SELECT max(seq) FROM leasehold.events"),
    );
    assert_eq!((first, last), (1, count));
    assert!(count >= 120);
}

fn ring_goes_round() {
    for places in [1, 8] {
        let db = Db::with(&[("leasehold.event_ring", &places.to_string())]);
        let mut s = db.session();
        let mut all = Vec::new();
        for n in 1..=13 {
            let resource = format!("r{n}");
            let token = s.acquire(&resource);
            all.push(format!("{} granted {resource}", 2 * n - 1));
            assert!(s.release(&resource, token));
            all.push(format!("{} released {resource}", 2 * n));
            let told =
                s.rows("SELECT seq || ' ' || event || ' ' || resource FROM leasehold.events");
            let told: Vec<String> = told.into_iter().flatten().flatten().collect();
            let from = all.len().saturating_sub(places);
            assert_eq!(told, all[from..], "after {n} rounds");
        }
    }
}

fn no_ring_tells_nothing() {
    let db = Db::with(&[
        ("leasehold.event_ring", "0"),
        ("leasehold.max_waiters", "0"),
    ]);
    with_doc(&db);
    let (mut s, mut other) = (db.session(), db.session());
    let (stale, token) = s.stale_and_current("r");
    assert_eq!(other.try_acquire("r"), None);
    other.err(WAIT).is("LH005");
    assert!(s.renew("r", token));
    other.try_fence("r", stale).expect_err("stale").is("LH001");
    other.err("INSERT INTO doc VALUES (1)").is("LH003");
    s.exec(&format!(
        "BEGIN; SELECT fence('r', {token}); UPDATE doc SET n = 7; SELECT release_lease('r', {token}); COMMIT"
    ));
    s.acquire("r");
    s.exec("SELECT break_lease('r')");
    assert!(s.rows("TABLE leasehold.events").is_empty());
    // it is counted all the same
    let counted = "SELECT concat_ws(' ', grants, denials, sheds, renewals, releases, expiries, takeovers, refused_lh001,
                                    refused_lh003) FROM leasehold.stats";
    assert_eq!(s.text(counted).as_deref(), Some("3 1 1 1 1 1 1 1 1"));
    let role = login(&db, "role");
    db.session_as(&role)
        .err("TABLE leasehold.events")
        .is("42501");
}

fn only_who_may_read_all_stats_may_read() {
    let db = Db::new();
    let (stranger, reader, monitor) = (
        login(&db, "stranger"),
        login(&db, "reader"),
        login(&db, "monitor"),
    );
    let mut admin = db.session();
    admin.exec(&format!(
        "GRANT pg_read_all_stats TO {reader}; GRANT pg_monitor TO {monitor}"
    ));
    // he sees nothing of his own either
    let mut s = db.session_as(&stranger);
    s.acquire("r");
    for sql in [
        "TABLE leasehold.events",
        "SELECT * FROM leasehold.events WHERE resource = 'r'",
        "SELECT * FROM leasehold.all_events()",
    ] {
        s.err(sql).is("42501");
        for role in [&reader, &monitor] {
            assert_eq!(db.session_as(role).rows(sql).len(), 1, "{role}: {sql}");
        }
    }
    admin.exec(&format!("GRANT pg_signal_backend TO {stranger}"));
    s.err("TABLE leasehold.events").is("42501");
    // nobody writes to it
    let mut reader = db.session_as(&reader);
    reader
        .try_exec("DELETE FROM leasehold.events")
        .expect_err("it is a view");
}

fn other_databases_are_not_told() {
    let db = Db::new();
    let other = Db::on(&db.cluster);
    let (mut s, mut there) = (db.session(), other.session());
    s.acquire("r");
    there.acquire("q");
    there
        .try_fence("r", NEVER)
        .expect_err("unknown")
        .is("LH002");
    let resources =
        "SELECT string_agg(event || ' ' || resource, ', ' ORDER BY seq) FROM leasehold.events";
    assert_eq!(s.text(resources).as_deref(), Some("granted r"));
    assert_eq!(
        there.text(resources).as_deref(),
        Some("granted q, write_refused r")
    );
    // an entry that is reclaimed for another database's: its end is told where the lease was
    let db = Db::with(&[("leasehold.max_leases", "16")]);
    let other = Db::on(&db.cluster);
    let token = acquire_as(&mut db.session(), "old", "1 microsecond");
    let mut there = other.session();
    for n in 0..100 {
        there.acquire_expired(&format!("x{n}"));
    }
    let told = story(&db, "r", 0);
    assert!(
        told[1].starts_with(&format!("expired token={token} holder=old ")),
        "{told:?}"
    );
    let ours: i64 = there.one("SELECT count(*) FROM leasehold.events WHERE resource = 'r'");
    assert_eq!(ours, 0);
}

fn extension_made_again_has_no_past() {
    let db = Db::new();
    let mut s = db.session();
    s.acquire("r");
    assert_eq!(story(&db, "r", 0).len(), 1);
    s.exec("DROP EXTENSION leasehold; CREATE EXTENSION leasehold");
    assert!(s.rows("TABLE leasehold.events").is_empty());
    s.acquire("r");
    assert_eq!(story(&db, "r", 0).len(), 1);
}

fn restart_has_no_past() {
    let db = Db::with(&[]);
    for round in 0..3 {
        let mut s = db.session();
        let resource = format!("r{round}");
        s.acquire(&resource);
        assert_eq!(story(&db, &resource, 0).len(), 1);
        let pid = s.pid;
        drop(s);
        match round {
            0 => db.cluster.restart(Stop::Fast),
            1 => db.cluster.restart(Stop::Immediate),
            _ => {
                db.cluster.wait_until_left(pid);
                let victim = db.session();
                db.cluster.crash_backend(victim.pid);
            }
        }
        let mut s = db.session();
        assert!(s.rows("TABLE leasehold.events").is_empty());
        // and begins with 1
        s.try_fence(&resource, NEVER).expect_err("unknown");
        assert_eq!(last(&db), 1);
    }
}

const WRITERS: usize = 8;

const CYCLES: usize = 1000;
/// So many that a reader comes in between often enough.
const MORE_CYCLES: usize = 10_000;

/// Acquires and releases under names that are the writer's digit, all through.
fn digits(writer: usize) -> String {
    let of = |length: usize| writer.to_string().repeat(length);
    format!(
        "DO $$ DECLARE t bigint; BEGIN
            FOR i IN 1..{MORE_CYCLES} LOOP
                t := acquire_lease('{}', '{}', '5min');
                COMMIT;
                PERFORM release_lease('{}', t);
                COMMIT;
            END LOOP;
         END $$",
        of(200),
        of(120),
        of(200)
    )
}

/// The ring is so small that it goes round and round while it is written and read.
fn nothing_is_torn() {
    let db = Db::with(&[("leasehold.event_ring", "64")]);
    let mut writers = Vec::new();
    let mut pids = Vec::new();
    for writer in 0..WRITERS {
        let mut s = session_of(&db, "postgres", &writer.to_string().repeat(60));
        s.exec("SET leasehold.durability = memory");
        pids.push(s.pid.to_string());
        writers.push(s);
    }
    let mut pending: Vec<_> = writers
        .into_iter()
        .enumerate()
        .map(|(writer, s)| s.spawn(&digits(writer)))
        .collect();
    let mut reader = db.session();
    let mut of_token: HashMap<String, usize> = HashMap::new();
    let mut seen = 0;
    let mut highest = 0;
    let read = "SELECT seq, event, resource, holder, application_name, pid, token, role::text, sqlstate, relation, presented
                  FROM leasehold.events";
    loop {
        let done = pending.iter_mut().all(|p| p.is_done());
        let mut before = 0;
        for row in reader.rows(read) {
            let text = |column: usize| row[column].clone().unwrap_or_default();
            let seq: i64 = text(0).parse().expect("a number");
            assert!(seq > before, "{seq} after {before}");
            before = seq;
            let writer: usize = text(2)[..1].parse().expect("a digit");
            let of = |length: usize| writer.to_string().repeat(length);
            assert_eq!(text(2), of(200), "{row:?}");
            assert_eq!(text(3), of(120), "{row:?}");
            assert_eq!(text(4), of(60), "{row:?}");
            assert_eq!(text(5), pids[writer], "{row:?}");
            assert_eq!(text(7), "postgres", "{row:?}");
            assert!(
                ["granted", "released"].contains(&text(1).as_str()),
                "{row:?}"
            );
            assert_eq!(row[8..], [None, None, None], "{row:?}");
            // a token is of one resource
            assert_eq!(
                *of_token.entry(text(6)).or_insert(writer),
                writer,
                "{row:?}"
            );
            seen += 1;
        }
        assert!(before >= highest, "the last is {before}, and was {highest}");
        highest = before;
        if done {
            break;
        }
    }
    for pending in pending {
        pending.join().1.expect("it acquires and releases");
    }
    assert!(seen > 1000, "{seen} rows were read");
    // where writers met in one place an event was dropped; the next one that comes there is not
    for _ in 0..64 {
        let token = reader.acquire("r");
        assert!(reader.release("r", token));
    }
    let all = (2 * WRITERS * MORE_CYCLES) as i64 + 128;
    let told = reader.rows("SELECT seq, resource FROM leasehold.events");
    let expected: Vec<_> = (all - 63..=all)
        .map(|seq| vec![Some(seq.to_string()), Some("r".to_owned())])
        .collect();
    assert_eq!(told, expected, "a place of the ring is lost for good");
}

/// Those who hand resources to each other, and write all of it down where there is room for it.
fn hand_overs_are_told_in_order() {
    let db = Db::with(&[("leasehold.event_ring", "65536")]);
    let resources = 3;
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut reader = db.session();
            while !is_over.load(Ordering::Relaxed) {
                reader.rows("SELECT count(*), max(holder) FROM leasehold.events");
            }
        });
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let mut s = db.session();
                s.exec("SET leasehold.durability = memory");
                s.spawn(&format!(
                    "DO $$ DECLARE t bigint; r text := 'r' || {writer} % {resources}; BEGIN
                        FOR i IN 1..{CYCLES} LOOP
                            t := acquire_lease(r, '{writer}', '5min', '1min');
                            COMMIT;
                            PERFORM release_lease(r, t);
                            COMMIT;
                        END LOOP;
                     END $$"
                ))
            })
            .collect();
        for pending in writers {
            pending.join().1.expect("it acquires and releases");
        }
        is_over.store(true, Ordering::Relaxed);
        reader.join().expect("the reader");
    });
    let mut s = db.session();
    let all = (2 * WRITERS * CYCLES) as i64;
    let (count, last) = (
        s.one::<i64>("SELECT count(*) FROM leasehold.events"),
        s.one::<i64>("SELECT max(seq) FROM leasehold.events"),
    );
    assert_eq!((count, last), (all, all), "an event is missing");
    // granted, released, granted, ... and each release is that of the grant before
    let out_of_order = s.rows(
        "SELECT * FROM (
            SELECT seq, resource, event, token, holder, pid,
                   lag(event) OVER w AS event_before, lag(token) OVER w AS token_before, lag(holder) OVER w AS holder_before,
                   lag(pid) OVER w AS pid_before
              FROM leasehold.events WINDOW w AS (PARTITION BY resource ORDER BY seq)) e
          WHERE CASE event
                WHEN 'granted' THEN event_before IS DISTINCT FROM 'released' AND event_before IS NOT NULL OR token <= token_before
                ELSE (event_before, token_before, holder_before, pid_before) IS DISTINCT FROM ('granted', token, holder, pid)
                END
          LIMIT 5",
    );
    assert!(out_of_order.is_empty(), "{out_of_order:?}");
    let counted = s.text("SELECT grants || ' ' || releases FROM leasehold.stats");
    assert_eq!(counted, Some(format!("{0} {0}", all / 2)));
    // it is written down when it happens
    let at: i64 = s.one(
        "SELECT count(*) FROM (SELECT at, lag(at) OVER (PARTITION BY resource ORDER BY seq) AS before FROM leasehold.events) e
          WHERE at < before",
    );
    assert_eq!(at, 0);
}

//! Layer seen, part times: how long things took, what is contended, and when counting begins anew.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cluster::{Cluster, Db, Stop, wait_for};
use crate::queueing::WAIT;
use crate::rights::login;
use crate::seen::{COUNTS, TIMES, counts, moves, time};

crate::tests![
    wait_and_hold_times_are_near_the_truth,
    quantiles_are_of_what_was_counted,
    counted_for_each_database,
    anyone_may_see_and_few_may_reset,
    reset_begins_anew,
    restart_begins_anew,
    crash_of_a_session_begins_anew,
    extension_made_again_goes_on,
    contended_are_in_order,
    contended_are_at_most_a_hundred,
    contended_tells_how_it_was_wanted,
];

/// Near by the width of a bucket.
#[track_caller]
fn is_near(ms: Option<f64>, least: f64, most: f64) {
    let ms = ms.expect("something was counted");
    assert!(
        least * 0.87 <= ms && ms <= most * 1.13,
        "{ms} ms, where it was {least} to {most}"
    );
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

fn wait_and_hold_times_are_near_the_truth() {
    let db = Db::new();
    let mut s = db.session();
    // one that runs out is held for its TTL, however late that is noticed
    let begun = Instant::now();
    let _: i64 = s.one("SELECT acquire_lease('r', ttl => '1s')");
    let asked = Instant::now();
    let waiting = db.queued(db.session(), "r", WAIT);
    let queued = Instant::now();
    waiting.granted();
    let least = 1000.0 - ms(queued - begun);
    for column in ["wait_ms_p50", "wait_ms_p99"] {
        is_near(time(&db, column), least.max(0.0), ms(asked.elapsed()));
    }
    for column in ["hold_ms_p50", "hold_ms_p99"] {
        is_near(time(&db, column), 1000.0, 1000.0);
    }
    // one that is released is held until then; so is one that is broken
    for end in [
        "release_lease('q', (SELECT token FROM lease_info('q')))",
        "break_lease('q')",
    ] {
        db.session().exec("SELECT leasehold.reset_stats()");
        let before = Instant::now();
        s.acquire("q");
        let after = Instant::now();
        wait_for("a while", || {
            (after.elapsed() >= Duration::from_millis(250)).then_some(())
        });
        let least = ms(after.elapsed());
        s.exec(&format!("SELECT {end}"));
        is_near(time(&db, "hold_ms_p50"), least, ms(before.elapsed()));
    }
    // a wait in vain is a wait; of a resource that was held for long already it might be refused
    s.acquire("v");
    db.session().exec("SELECT leasehold.reset_stats()");
    let begun = Instant::now();
    assert_eq!(s.text("SELECT acquire_lease('v', wait => '300ms')"), None);
    is_near(time(&db, "wait_ms_p50"), 300.0, ms(begun.elapsed()));
    // renewed, it is held on; and no end of a lease is counted twice
    db.session().exec("SELECT leasehold.reset_stats()");
    let before = Instant::now();
    let token: i64 = s.one("SELECT acquire_lease('w', ttl => '1s')");
    let after = Instant::now();
    assert!(s.renew("w", token));
    wait_for("a while", || {
        (after.elapsed() >= Duration::from_millis(1100)).then_some(())
    });
    let least = ms(after.elapsed());
    assert!(s.release("w", token));
    is_near(time(&db, "hold_ms_p50"), least, ms(before.elapsed()));
    s.acquire("w");
    is_near(time(&db, "hold_ms_p50"), least, ms(before.elapsed()));
}

fn quantiles_are_of_what_was_counted() {
    let db = Db::new();
    let mut s = db.session();
    // 199 of 10 ms, which is a TTL that has run out, and 1 of 500 ms
    let _: i64 = s.one("SELECT acquire_lease('long', ttl => '500ms')");
    s.exec("SELECT acquire_lease('r' || i, ttl => '10ms') FROM generate_series(1, 199) i");
    let take = "SELECT acquire_lease('long', wait => '1min')";
    assert!(s.text(take).is_some());
    s.exec("SELECT acquire_lease('r' || i) FROM generate_series(1, 199) i");
    assert_eq!(counts(&db)[6], 200);
    is_near(time(&db, "hold_ms_p50"), 10.0, 10.0);
    is_near(time(&db, "hold_ms_p99"), 10.0, 10.0);
    // two more of the long ones are above a hundredth
    let names = ["long 1", "long 2", "long 3"];
    for name in names {
        let _: i64 = s.one(&format!("SELECT acquire_lease('{name}', ttl => '500ms')"));
    }
    for name in names {
        let sql = format!("SELECT acquire_lease('{name}', wait => '1min')");
        assert!(s.text(&sql).is_some());
    }
    is_near(time(&db, "hold_ms_p50"), 10.0, 10.0);
    is_near(time(&db, "hold_ms_p99"), 500.0, 500.0);
}

fn counted_for_each_database() {
    let db = Db::new();
    let other = Db::on(&db.cluster);
    moves(&other, &[], || {
        moves(&db, &[("grants", 1), ("denials", 1)], || {
            let mut s = db.session();
            s.acquire("r");
            s.try_acquire("r");
        });
    });
    assert!(other.session().rows("TABLE leasehold.contended").is_empty());
    // the place of one that was dropped is taken by the next, without its numbers
    let mut admin = db.cluster.connect();
    for _ in 0..3 {
        let gone = Db::on(&db.cluster);
        let mut s = gone.session();
        s.acquire("r");
        s.try_acquire("r");
        assert_eq!(counts(&gone)[..2], [1, 1]);
        drop(s);
        let left = format!(
            "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = '{}')",
            gone.name
        );
        db.cluster.wait_sql(&left, "the sessions to leave");
        admin.exec(&format!("DROP DATABASE {}", gone.name));
        let next = Db::on(&db.cluster);
        assert_eq!(counts(&next), [0; COUNTS.len()]);
        assert_eq!(time(&next, "hold_ms_p50"), None);
    }
}

fn anyone_may_see_and_few_may_reset() {
    let db = Db::new();
    let role = login(&db, "role");
    let (mut s, mut admin) = (db.session_as(&role), db.session());
    admin.acquire("r");
    s.try_acquire("r");
    assert_eq!(s.one::<i64>("SELECT grants FROM leasehold.stats"), 1);
    assert_eq!(
        s.one::<String>("SELECT resource FROM leasehold.contended"),
        "r"
    );
    let before = admin.rows("TABLE leasehold.stats");
    s.err("SELECT leasehold.reset_stats()").is("42501");
    admin.exec(&format!(
        "GRANT pg_read_all_stats, pg_monitor, pg_signal_backend TO {role}"
    ));
    s.err("SELECT leasehold.reset_stats()").is("42501");
    assert_eq!(admin.rows("TABLE leasehold.stats"), before);
    admin.exec(&format!(
        "GRANT EXECUTE ON FUNCTION leasehold.reset_stats TO {role}"
    ));
    s.exec("SELECT leasehold.reset_stats()");
    assert_eq!(counts(&db), [0; COUNTS.len()]);
}

fn reset_begins_anew() {
    let db = Db::new();
    let other = Db::on(&db.cluster);
    let mut s = db.session();
    other.session().acquire("r");
    let token = s.acquire("r");
    s.try_acquire("r");
    s.text("SELECT acquire_lease('r', wait => '100ms')");
    s.release("r", token);
    s.acquire_expired("r");
    s.acquire("r");
    let server_start = "SELECT since = pg_postmaster_start_time() FROM leasehold.stats";
    assert!(s.one::<bool>(server_start));
    let before: String = s.one("SELECT clock_timestamp()::text");
    s.exec("SELECT leasehold.reset_stats()");
    let since =
        format!("SELECT since BETWEEN '{before}' AND clock_timestamp() FROM leasehold.stats");
    assert!(s.one::<bool>(&since));
    assert_eq!(counts(&db), [0; COUNTS.len()]);
    for column in TIMES {
        assert_eq!(time(&db, column), None, "{column}");
    }
    assert!(s.rows("TABLE leasehold.contended").is_empty());
    // of this database, and nothing but numbers
    let mut there = other.session();
    assert!(there.one::<bool>(server_start));
    assert_eq!(counts(&other)[0], 1);
    assert_eq!(s.state_of("r"), "held");
    moves(&db, &[("denials", 1)], || s.try_acquire("r"));
    let denials: i64 = s.one("SELECT denials FROM leasehold.contended");
    assert_eq!(denials, 1);
    assert!(s.one::<bool>(&since), "it stays when it was");
}

fn restart_begins_anew() {
    let db = Db::with(&[]);
    for round in 0..3 {
        let mut s = db.session();
        let resource = format!("r{round}");
        s.acquire_expired(&resource);
        s.acquire(&resource);
        s.try_acquire(&resource);
        s.exec("SELECT leasehold.reset_stats()");
        s.try_acquire(&resource);
        assert_eq!(counts(&db)[1], 1);
        drop(s);
        match round {
            0 => db.cluster.restart(Stop::Fast),
            1 => db.cluster.restart(Stop::Immediate),
            _ => {
                db.cluster.kill_postmaster();
                db.cluster.start();
            }
        }
        assert_eq!(counts(&db), [0; COUNTS.len()]);
        let mut s = db.session();
        assert!(s.one::<bool>("SELECT since = pg_postmaster_start_time() FROM leasehold.stats"));
        assert!(s.rows("TABLE leasehold.contended").is_empty());
    }
}

/// The postmaster goes on, and all sessions and the shared memory do not: since then is counted.
fn crash_of_a_session_begins_anew() {
    let db = Db::with(&[]);
    let mut s = db.session();
    s.acquire("r");
    s.try_acquire("r");
    let before: String = s.one("SELECT clock_timestamp()::text");
    db.cluster.crash_backend(s.pid);
    assert_eq!(counts(&db), [0; COUNTS.len()]);
    let since: bool = db
        .session()
        .one(&format!("SELECT since >= '{before}' FROM leasehold.stats"));
    assert!(
        since,
        "what was counted before the crash is gone, and since says that it is not"
    );
}

fn extension_made_again_goes_on() {
    let db = Db::new();
    let mut s = db.session();
    s.acquire("r");
    s.try_acquire("r");
    s.exec("DROP EXTENSION leasehold; CREATE EXTENSION leasehold");
    // the resources of the old one are none of the new one's
    assert!(s.rows("TABLE leasehold.contended").is_empty());
    moves(&db, &[("grants", 1), ("denials", 1)], || {
        s.acquire("r");
        s.try_acquire("r");
    });
}

fn contended_are_in_order() {
    let db = Db::new();
    let mut s = db.session();
    for (name, denials) in [("few", 1), ("many", 7), ("none", 0), ("some", 3)] {
        s.acquire(name);
        s.exec(&format!(
            "SELECT acquire_lease('{name}') FROM generate_series(1, {denials})"
        ));
    }
    let rows = "SELECT resource || ' ' || denials FROM leasehold.contended";
    let row = |text: &str| vec![Some(text.to_owned())];
    assert_eq!(s.rows(rows), [row("many 7"), row("some 3"), row("few 1")]);
    // denials, sheds and waits count alike
    for _ in 0..5 {
        s.text("SELECT acquire_lease('some', wait => '100ms')");
    }
    // each of them has waited in vain
    let first =
        "SELECT resource || ' ' || denials || ' ' || waits FROM leasehold.contended LIMIT 1";
    assert_eq!(s.rows(first), [row("some 8 5")]);
}

fn contended_are_at_most_a_hundred() {
    let db = Db::new();
    let mut s = db.session();
    s.exec(
        "SELECT acquire_lease('r' || i, ttl => '5min') FROM generate_series(1, 130) i;
         SELECT acquire_lease('r' || i) FROM generate_series(1, 130) i",
    );
    s.exec("SELECT acquire_lease('r' || i) FROM generate_series(51, 130) i");
    assert_eq!(
        s.one::<i64>("SELECT count(*) FROM leasehold.contended"),
        100
    );
    // the most contended are among them
    let twice = "SELECT count(*) FROM (SELECT denials FROM leasehold.contended LIMIT 80) d WHERE denials = 2";
    assert_eq!(s.one::<i64>(twice), 80);
    let once = "SELECT count(*) FROM leasehold.contended WHERE denials = 1";
    assert_eq!(s.one::<i64>(once), 20);
}

fn contended_tells_how_it_was_wanted() {
    let db = Db::with(&[("leasehold.max_waiters", "1")]);
    let (mut s, mut other) = (db.session(), db.session());
    let begun = Instant::now();
    let token = s.acquire("r");
    other.try_acquire("r");
    other.try_acquire("r");
    let waiting = db.waiter();
    let queued = Instant::now();
    other.err(WAIT).is("LH005");
    let row = "SELECT concat_ws(' ', grants, denials, sheds, waits, waiters, wait_ms_mean IS NULL, hold_ms IS NULL)
                 FROM leasehold.contended WHERE resource = 'r'";
    assert_eq!(s.text(row).as_deref(), Some("1 2 1 0 1 t t"));
    wait_for("a while", || {
        (queued.elapsed() >= Duration::from_millis(200)).then_some(())
    });
    let (least, held) = (ms(queued.elapsed()), ms(queued - begun));
    assert!(s.release("r", token));
    let (_waiter, _) = waiting.granted();
    let most = ms(begun.elapsed());
    assert_eq!(s.text(row).as_deref(), Some("2 2 1 1 0 f f"));
    let wait: f64 = s.one("SELECT wait_ms_mean FROM leasehold.contended");
    let hold: f64 = s.one("SELECT hold_ms FROM leasehold.contended");
    assert!(least <= wait && wait <= most, "{least} {wait} {most}");
    assert!(
        least <= hold && hold <= most,
        "{least} {hold} {most}, {held}"
    );
    // what is undone was no grant
    other.exec("BEGIN; SELECT acquire_lease('q')");
    s.try_acquire("q");
    other.exec("ROLLBACK");
    let row =
        "SELECT concat_ws(' ', grants, denials) FROM leasehold.contended WHERE resource = 'q'";
    assert_eq!(s.text(row).as_deref(), Some("0 1"));
    // those of a restart are not known any more
    let db = Db::on(&Arc::new(Cluster::builder().start()));
    let mut s = db.session();
    s.acquire("r");
    s.try_acquire("r");
    drop(s);
    db.cluster.restart(Stop::Fast);
    assert!(db.session().rows("TABLE leasehold.contended").is_empty());
}

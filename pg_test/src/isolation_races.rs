//! Layer isolation, where no step lies between what races: a fence against grants at full speed, and a process that is
//! stopped in the middle of a look-up.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::cluster::{Cluster, Db, Stop};
use crate::process::{Process, Signal};
use crate::session::Session;

crate::tests![
    passed_fence_sees_no_newer_token,
    stopped_reader_does_not_revive_an_old_token,
];

/// Passed fences that are looked at: the moment between a verdict and its lock is some microseconds long, and grants
/// come a thousand times a second.
const PASSED: usize = 1500;

struct Race {
    /// The last token that a taker was told.
    token: AtomicI64,
    /// How often a writer has begun to present one.
    tries: AtomicUsize,
    passed: AtomicUsize,
    refused: AtomicUsize,
    over: AtomicBool,
}

/// G3: from the verdict on, and until the transaction ends, nobody else is granted the resource. What is asked here is
/// the shared table: a token above one's own there is a grant that should have been kept out.
fn passed_fence_sees_no_newer_token() {
    let db = Db::new();
    let race = Race {
        token: AtomicI64::new(db.session().acquire_expired("r")),
        tries: AtomicUsize::new(0),
        passed: AtomicUsize::new(0),
        refused: AtomicUsize::new(0),
        over: AtomicBool::new(false),
    };
    let newer = thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| take_on_and_on(db.session(), &race));
        }
        let writers: Vec<_> = (0..2)
            .map(|_| scope.spawn(|| fence_on_and_on(db.session(), &race)))
            .collect();
        let outcomes = writers.into_iter().map(|writer| writer.join());
        let newer = outcomes.map(|outcome| outcome.expect("a writer came to its end"));
        let newer: Vec<_> = newer.flatten().collect();
        race.over.store(true, Ordering::Relaxed);
        newer
    });
    let (passed, refused) = (
        race.passed.load(Ordering::Relaxed),
        race.refused.load(Ordering::Relaxed),
    );
    assert!(
        newer.is_empty(),
        "{} of {passed} passed fences saw a newer token, as (own, newer): {:?}",
        newer.len(),
        newer.first()
    );
    assert!(refused > 0, "no fence came too late: there was no race");
}

fn take_on_and_on(mut session: Session, race: &Race) {
    while !race.over.load(Ordering::Relaxed) {
        let sql = "SELECT acquire_lease('r', ttl => '1 microsecond')";
        if let Some(token) = session.text(sql).and_then(|text| text.parse().ok()) {
            race.token.fetch_max(token, Ordering::Relaxed);
            // let a writer come to know it, and go on while he presents it
            let tries = race.tries.load(Ordering::Relaxed);
            while race.tries.load(Ordering::Relaxed) == tries && !race.over.load(Ordering::Relaxed)
            {
                thread::yield_now();
            }
        }
    }
}

/// The passed fences under which a newer token was seen.
fn fence_on_and_on(mut session: Session, race: &Race) -> Vec<(i64, i64)> {
    let mut newer = Vec::new();
    while race.passed.load(Ordering::Relaxed) < PASSED {
        let own = race.token.load(Ordering::Relaxed);
        race.tries.fetch_add(1, Ordering::Relaxed);
        let sql =
            format!("BEGIN; SELECT fence('r', {own}); SELECT token FROM lease_info('r'); COMMIT");
        match session.try_text(&sql) {
            Ok(seen) => {
                race.passed.fetch_add(1, Ordering::Relaxed);
                let seen = seen.and_then(|text| text.parse().ok()).unwrap_or(own);
                if seen != own {
                    newer.push((own, seen));
                }
            }
            Err(error) => {
                assert!(error.sqlstate.starts_with("LH"), "{error}");
                race.refused.fetch_add(1, Ordering::Relaxed);
                session.exec("ROLLBACK");
            }
        }
    }
    newer
}

/// More resources than the table has places, so that each look-up finds its entry pushed out by the others.
const RESOURCES: usize = 24;
const TRIALS: usize = 24;
/// A process that is stopped may hold a lock that others need. Then the trial is void.
const PATIENCE: Duration = Duration::from_secs(1);

/// Looks all resources up, on and on, until `over` is set: each by a renewal, which needs the resource's place in the
/// shared table and comes too late to change it. Once all have been granted anew, no old token may pass any more. The
/// sequences are seen at once by everybody.
const READER: &str = "
    CREATE SEQUENCE granted MINVALUE 0;
    CREATE SEQUENCE over MINVALUE 0;
    CREATE TABLE old (resource text, token bigint);
    CREATE FUNCTION look() RETURNS text LANGUAGE plpgsql AS $$
    DECLARE
        revived text;
    BEGIN
        WHILE pg_sequence_last_value('over') = 0 LOOP
            SELECT min(resource) INTO revived FROM old
             WHERE CASE WHEN renew_lease(resource, token) OR pg_sequence_last_value('granted') = 0 THEN false
                        ELSE check_fence(resource, token) END;
            IF revived IS NOT NULL THEN
                RETURN 'revived ' || revived;
            END IF;
        END LOOP;
        RETURN 'sound';
    END $$;";

const LOOKING: &str =
    "SELECT count(*) = 2 FROM pg_stat_activity WHERE query = 'SELECT look()' AND state = 'active'";

/// Each in a transaction of its own, over at once: the table has no room for all of them.
fn grant_all(with_token: &str) -> String {
    format!(
        "DO $$
         BEGIN
             FOR i IN 1..{RESOURCES} LOOP
                 {with_token} acquire_lease('r' || i, ttl => '1 microsecond');
                 COMMIT;
             END LOOP;
             PERFORM setval('granted', 1);
         END $$"
    )
}

/// G3: who has read a resource's row in the ledger, and is stopped before it puts it into the shared table, must not put
/// it there after the resource was granted anew and pushed out again. The old leases are from before a
/// crash: those alone are believed as the ledger has them.
fn stopped_reader_does_not_revive_an_old_token() {
    let cluster = Cluster::builder().conf("leasehold.max_leases", "4");
    let db = Db::on(&Arc::new(cluster.start()));
    let mut session = db.session();
    session.exec(READER);
    let mut sound = 0;
    for trial in 0..TRIALS {
        session.exec("TRUNCATE old");
        session.exec(&grant_all("INSERT INTO old SELECT 'r' || i,"));
        session.exec("SELECT setval('granted', 0), setval('over', 0)");
        drop(session);
        // after a clean shutdown it would be known that they are over
        db.cluster.restart(Stop::Immediate);
        session = db.session();
        let all = "SELECT bool_and(check_fence(resource, token)) FROM old";
        assert!(session.one::<bool>(all), "there is nothing to revive");
        // connected before: what is stopped may hold a lock that a new connection needs
        let granter = db.session();
        let readers = [db.session(), db.session()].map(|reader| reader.spawn("SELECT look()"));
        db.cluster.wait_sql(LOOKING, "the readers to begin");
        // anywhere in their rounds, of which one takes some hundred microseconds
        thread::sleep(Duration::from_micros(5_000 + 137 * trial as u64));
        let stopped = readers.each_ref().map(|reader| Process::open(reader.pid));
        stopped
            .iter()
            .for_each(|reader| reader.signal(Signal::STOP));
        let mut granting = granter.spawn(&grant_all("PERFORM"));
        let patience = Instant::now() + PATIENCE;
        while !granting.is_done() && Instant::now() < patience {
            thread::yield_now();
        }
        sound += usize::from(granting.is_done());
        stopped
            .iter()
            .for_each(|reader| reader.signal(Signal::CONT));
        granting.join().1.expect("the grants come through");
        session.exec("SELECT setval('over', 1)");
        for reader in readers {
            let (_, answer) = reader.join();
            let answer = answer.expect("the reader comes to its end");
            assert_eq!(answer.as_deref(), Some("sound"), "trial {trial}");
        }
    }
    assert!(
        sound >= TRIALS / 2,
        "only {sound} of {TRIALS} trials were not void"
    );
}

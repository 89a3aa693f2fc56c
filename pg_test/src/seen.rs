//! Layer seen, part stats: what is counted.
//!
//! Each scenario moves the numbers of its own database by what it says, and no other number of it.

use crate::cluster::{Db, Stop, wait_for};
use crate::leases::NEVER;
use crate::queueing::WAIT;
use crate::rights::login;
use crate::session::Session;

crate::tests![
    stats_are_one_row_of_their_columns,
    grants_count_when_they_are_committed,
    what_is_undone_counts_nothing,
    denials_count_with_and_without_a_wait,
    sheds_count,
    waits_count_however_they_end,
    renewals_and_releases_count,
    expiry_counts_once_when_it_is_noticed,
    reclaimed_entry_counts_its_expiry,
    expiry_counts_where_the_lease_was,
    takeover_counts_after_one_that_was_undone,
    drains_count,
    wait_for_an_overdue_grant_counts,
    ended_sessions_count,
    a_verdict_counts_and_not_a_row,
    refusals_of_fence_count,
    refusals_of_writes_count,
    caught_refusals_count,
    refusals_count_from_the_first_on,
    full_table_counts,
    what_has_other_numbers_or_none,
];

/// The columns that count, in their order.
pub const COUNTS: [&str; 17] = [
    "grants",
    "denials",
    "sheds",
    "waits",
    "renewals",
    "releases",
    "expiries",
    "takeovers",
    "drains",
    "sessions_ended",
    "fence_checks",
    "refused_lh001",
    "refused_lh002",
    "refused_lh003",
    "refused_lh004",
    "refused_lh005",
    "refused_lh006",
];

pub const TIMES: [&str; 4] = ["wait_ms_p50", "wait_ms_p99", "hold_ms_p50", "hold_ms_p99"];

/// The numbers of a database now.
pub fn counts(db: &Db) -> Vec<i64> {
    let sql = format!(
        "SELECT unnest(ARRAY[{}])::text FROM leasehold.stats",
        COUNTS.join(", ")
    );
    let rows = db.session().rows(&sql);
    let numbers = rows.iter().flatten().flatten();
    let numbers: Vec<i64> = numbers.map(|n| n.parse().expect("a number")).collect();
    assert_eq!(numbers.len(), COUNTS.len());
    numbers
}

/// A time in milliseconds; None where nothing was counted.
pub fn time(db: &Db, column: &str) -> Option<f64> {
    db.session()
        .one(&format!("SELECT {column} FROM leasehold.stats"))
}

/// What a scenario adds to each of the numbers that it moves.
#[track_caller]
pub fn moves<R>(db: &Db, expected: &[(&str, i64)], scenario: impl FnOnce() -> R) -> R {
    let before = counts(db);
    let result = scenario();
    let after = counts(db);
    let moved: Vec<(&str, i64)> = COUNTS
        .iter()
        .zip(before.iter().zip(&after))
        .filter(|(_, (before, after))| before != after)
        .map(|(name, (before, after))| (*name, after - before))
        .collect();
    assert_eq!(moved, expected);
    result
}

fn stats_are_one_row_of_their_columns() {
    let db = Db::new();
    let mut s = db.session();
    let types = "SELECT string_agg(attname || ' ' || atttypid::regtype, ', ' ORDER BY attnum) FROM pg_attribute
                  WHERE attrelid = 'leasehold.stats'::regclass AND attnum > 0";
    let mut expected = vec!["since timestamp with time zone".to_owned()];
    expected.extend(COUNTS.iter().map(|name| format!("{name} bigint")));
    expected.extend(TIMES.iter().map(|name| format!("{name} double precision")));
    assert_eq!(s.text(types), Some(expected.join(", ")));
    let types = "SELECT string_agg(attname || ' ' || atttypid::regtype, ', ' ORDER BY attnum) FROM pg_attribute
                  WHERE attrelid = 'leasehold.contended'::regclass AND attnum > 0";
    assert_eq!(
        s.text(types).as_deref(),
        Some(
            "resource text, grants bigint, denials bigint, sheds bigint, waits bigint, wait_ms_mean double precision, \
             hold_ms double precision, waiters integer"
        )
    );
    // before anything has happened
    assert_eq!(s.one::<i64>("SELECT count(*) FROM leasehold.stats"), 1);
    assert_eq!(counts(&db), [0; COUNTS.len()]);
    for column in TIMES {
        assert_eq!(time(&db, column), None, "{column}");
    }
    assert!(s.rows("TABLE leasehold.contended").is_empty());
    // who looks is not counted
    s.rows("TABLE leasehold.stats");
    s.rows("SELECT * FROM lease_info('r')");
    s.rows("TABLE leasehold.leases");
    assert_eq!(counts(&db), [0; COUNTS.len()]);
}

fn grants_count_when_they_are_committed() {
    let db = Db::new();
    let mut s = db.session();
    moves(&db, &[("grants", 1)], || s.acquire("a"));
    s.exec("SET leasehold.durability = memory");
    moves(&db, &[("grants", 1)], || s.acquire("b"));
    moves(&db, &[("grants", 3)], || {
        s.exec("SELECT acquire_lease(x) FROM unnest(ARRAY['c', 'd', 'e']) x");
    });
    moves(&db, &[("grants", 1)], || {
        s.exec("CALL await_lease('f', ttl => '5min')");
    });
    moves(&db, &[], || {
        s.exec("BEGIN");
        s.acquire("g");
    });
    moves(&db, &[("grants", 1)], || s.exec("COMMIT"));
    // a released savepoint is its parent's
    moves(&db, &[("grants", 1)], || {
        s.exec("BEGIN; SAVEPOINT a; SELECT acquire_lease('h'); RELEASE a; COMMIT");
    });
    // a retry of a request is no other grant: it presents the token, which is checked
    let request = "SELECT acquire_lease('i', request => '00000000-0000-0000-0000-000000000001')";
    moves(&db, &[("grants", 1)], || s.exec(request));
    moves(&db, &[("fence_checks", 1)], || s.exec(request));
}

fn what_is_undone_counts_nothing() {
    let db = Db::new();
    let mut s = db.session();
    for resource in ["first", "again"] {
        moves(&db, &[], || {
            s.exec("BEGIN");
            s.acquire(resource);
            s.exec("ROLLBACK");
            s.exec("BEGIN; SAVEPOINT a");
            s.acquire(resource);
            s.exec("ROLLBACK TO a; COMMIT");
            s.err(&format!(
                "SELECT acquire_lease('{resource}'), 1 / (random() * 0)::int"
            ))
            .is("22012");
        });
    }
    let token = s.acquire("r");
    moves(&db, &[], || {
        s.exec(&format!(
            "BEGIN; SELECT release_lease('r', {token}); ROLLBACK"
        ));
        s.exec("BEGIN; SELECT break_lease('r'); ROLLBACK");
    });
    assert_eq!(
        time(&db, "hold_ms_p50"),
        None,
        "nothing has been held to its end"
    );
    // a renewal is not undone
    moves(&db, &[("renewals", 1)], || {
        s.exec(&format!(
            "BEGIN; SELECT renew_lease('r', {token}); ROLLBACK"
        ));
    });
}

fn denials_count_with_and_without_a_wait() {
    let db = Db::new();
    let (mut s, mut other) = (db.session(), db.session());
    s.acquire("r");
    moves(&db, &[("denials", 1)], || other.try_acquire("r"));
    moves(&db, &[("denials", 10)], || {
        other.exec("SELECT acquire_lease('r') FROM generate_series(1, 10)");
    });
    let in_vain = "SELECT acquire_lease('r', wait => '100ms')";
    moves(&db, &[("denials", 1), ("waits", 1)], || {
        assert_eq!(other.text(in_vain), None);
    });
    moves(&db, &[("denials", 1), ("waits", 1)], || {
        assert_eq!(other.text("CALL await_lease('r', wait => '100ms')"), None);
    });
    // of what is being granted, and of what one has oneself
    s.exec("BEGIN");
    s.acquire("q");
    moves(&db, &[("denials", 1)], || other.try_acquire("q"));
    moves(&db, &[("denials", 1)], || s.try_acquire("q"));
    moves(&db, &[("denials", 1)], || {
        s.text("SELECT acquire_lease('q', wait => '100ms')")
    });
    s.exec("ROLLBACK");
    // what is answered and then undone was answered
    moves(&db, &[("denials", 1)], || {
        other.exec("BEGIN; SELECT acquire_lease('r'); ROLLBACK");
    });
    // refusals of other kinds are none
    let role = login(&db, "role");
    db.session().exec("SELECT allow_lease('x', 'postgres')");
    moves(&db, &[], || {
        let mut s = db.session_as(&role);
        s.err("SELECT acquire_lease('x')").is("42501");
        s.err("SELECT acquire_lease('r', ttl => '-1s')").is("22023");
        s.err("SELECT acquire_lease(NULL)").is("22004");
        other.exec("SET leasehold.max_leases_per_role = 1");
        other.err("SELECT acquire_lease('free')").is("53400");
    });
}

fn sheds_count() {
    let db = Db::with(&[("leasehold.max_waiters", "0")]);
    let (mut s, mut other) = (db.session(), db.session());
    s.acquire("r");
    for sql in [WAIT, "CALL await_lease('r')"] {
        moves(&db, &[("sheds", 1), ("refused_lh005", 1)], || {
            other.err(sql).is("LH005");
        });
    }
    let caught = format!(
        "DO $$ BEGIN {}; EXCEPTION WHEN SQLSTATE 'LH005' THEN NULL; END $$",
        WAIT.replace("SELECT", "PERFORM")
    );
    moves(&db, &[("sheds", 1), ("refused_lh005", 1)], || {
        other.exec(&caught)
    });
}

fn waits_count_however_they_end() {
    let db = Db::new();
    let (mut s, mut watch) = (db.session(), db.session());
    let mut token = s.acquire("r");
    for sql in [WAIT, "CALL await_lease('r', ttl => '5min')"] {
        let (waiter, next) = moves(&db, &[("grants", 1), ("waits", 1), ("releases", 1)], || {
            let waiting = db.queued(db.session(), "r", sql);
            assert!(s.release("r", token));
            waiting.granted()
        });
        (s, token) = (waiter, next);
        // cancelled, and ended
        moves(&db, &[("waits", 1)], || {
            let waiting = db.queued(db.session(), "r", sql);
            watch.cancel(waiting.pid);
            waiting.failed().1.is("57014");
        });
        let mut other = db.session();
        other.exec("SET lock_timeout = '100ms'");
        moves(&db, &[("waits", 1)], || {
            other.err(sql).is("55P03");
        });
    }
    // one who need not wait has not waited
    assert!(s.release("r", token));
    moves(&db, &[("grants", 1)], || s.exec(WAIT));
}

fn renewals_and_releases_count() {
    let db = Db::new();
    let mut s = db.session();
    let token = s.acquire("r");
    moves(&db, &[("renewals", 1)], || s.renew("r", token));
    // to a longer one, and to a shorter one, which is one all the same
    let token: i64 = s.one("SELECT acquire_lease('q', ttl => '1min')");
    for ttl in ["5min", "1s"] {
        moves(&db, &[("renewals", 1)], || {
            s.exec(&format!("SELECT renew_lease('q', {token}, '{ttl}')"));
        });
    }
    moves(&db, &[("releases", 1)], || s.release("q", token));
    // what is answered with true again is no second one, and false is none
    moves(&db, &[], || {
        assert!(s.release("q", token));
        assert!(!s.renew("q", token));
        assert!(!s.release("q", token - 1) && !s.renew("r", NEVER));
    });
    let token = s.acquire("q");
    moves(&db, &[("releases", 1)], || {
        s.exec(&format!(
            "BEGIN; SELECT release_lease('q', {token}); SELECT release_lease('q', {token}); COMMIT"
        ));
    });
    // one of an expired lease is none
    let token = s.acquire_expired("q");
    moves(&db, &[], || {
        assert!(!s.release("q", token) && !s.renew("q", token));
    });
}

fn expiry_counts_once_when_it_is_noticed() {
    let db = Db::new();
    let mut s = db.session();
    moves(&db, &[("grants", 1)], || s.acquire_expired("r"));
    moves(
        &db,
        &[("grants", 1), ("expiries", 1), ("takeovers", 1)],
        || s.acquire_expired("r"),
    );
    // by a taker who goes back on it, and who is not the last
    moves(&db, &[("expiries", 1)], || {
        s.exec("BEGIN");
        s.acquire("r");
        s.exec("ROLLBACK");
    });
    moves(&db, &[], || {
        s.exec("BEGIN");
        s.acquire("r");
        s.exec("ROLLBACK");
    });
    // in memory too
    s.exec("SET leasehold.durability = memory");
    s.acquire_expired("q");
    moves(
        &db,
        &[("grants", 1), ("expiries", 1), ("takeovers", 1)],
        || s.acquire("q"),
    );
    // what was released or broken has not run out
    let token: i64 = s.one("SELECT token FROM lease_info('q')");
    assert!(s.release("q", token));
    moves(&db, &[("grants", 1)], || s.acquire("q"));
    s.exec("SELECT break_lease('q')");
    moves(&db, &[("grants", 1)], || s.acquire("q"));
    // one that is waited for
    let _: i64 = s.one("SELECT acquire_lease('w', ttl => '2s')");
    moves(
        &db,
        &[
            ("grants", 1),
            ("waits", 1),
            ("expiries", 1),
            ("takeovers", 1),
        ],
        || {
            let sql = "SELECT acquire_lease('w', ttl => '5min', wait => '1min')";
            db.session().one::<i64>(sql)
        },
    );
}

/// As many as there is room for, by trying.
fn fill(s: &mut Session, name: &str) -> i64 {
    for n in 0.. {
        let sql = format!("SELECT acquire_lease('{name} {n}', ttl => '5min')");
        if let Err(error) = s.try_one::<Option<i64>>(&sql) {
            error.is("LH006").well_written();
            return n;
        }
    }
    unreachable!("the table is never full");
}

/// Releases them all. When this returns the ledger says so too, and each entry is as good to reclaim as any other.
fn empty(db: &Db, s: &mut Session) {
    s.exec("SELECT release_lease(resource, token) FROM leasehold.leases WHERE state = 'held'");
    let marked = "SELECT bool_and(released) FROM leasehold.ledger WHERE resource NOT LIKE 'b %'";
    wait_for("the marks of the releases", || {
        db.session().one::<bool>(marked).then_some(())
    });
}

fn reclaimed_entry_counts_its_expiry() {
    let db = Db::with(&[("leasehold.max_leases", "16")]);
    let mut s = db.session();
    let room = fill(&mut s, "a");
    empty(&db, &mut s);
    // those that were released have not run out
    moves(&db, &[("grants", room)], || {
        for n in 0..room {
            s.acquire_expired(&format!("b {n}"));
        }
    });
    moves(
        &db,
        &[("grants", room), ("expiries", room), ("refused_lh006", 1)],
        || assert_eq!(fill(&mut s, "c"), room),
    );
    // and are not counted again where their resource is granted next
    empty(&db, &mut s);
    moves(&db, &[("grants", 1)], || s.acquire("b 0"));
}

fn expiry_counts_where_the_lease_was() {
    let db = Db::with(&[("leasehold.max_leases", "16")]);
    let other = Db::on(&db.cluster);
    let (mut s, mut taker) = (db.session(), other.session());
    let room = fill(&mut s, "a");
    empty(&db, &mut s);
    for n in 0..room {
        s.acquire_expired(&format!("b {n}"));
    }
    moves(&db, &[("expiries", room)], || {
        moves(&other, &[("grants", room), ("refused_lh006", 1)], || {
            assert_eq!(fill(&mut taker, "c"), room);
        });
    });
}

/// A grant over an expired lease, and the one between them came to nothing.
fn takeover_counts_after_one_that_was_undone() {
    let db = Db::new();
    let mut s = db.session();
    moves(
        &db,
        &[("grants", 2), ("expiries", 1), ("takeovers", 1)],
        || {
            s.acquire_expired("r");
            s.exec("BEGIN");
            s.acquire("r");
            s.exec("ROLLBACK");
            s.acquire("r");
        },
    );
}

/// Of a transaction that was granted the resource and is open for longer than its lease.
fn wait_for_an_overdue_grant_counts() {
    let db = Db::of_waiters("1h");
    let (mut s, mut holder) = (db.session(), db.session());
    holder.exec("BEGIN; SELECT acquire_lease('r', ttl => '1 microsecond')");
    wait_for("the end of the lease", || {
        (s.state_of("r") == "expired").then_some(())
    });
    moves(&db, &[("denials", 1), ("waits", 1)], || {
        s.exec("SELECT acquire_lease('r', wait => '50ms')")
    });
}

fn drains_count() {
    let db = Db::new();
    let (mut s, mut writer) = (db.session(), db.session());
    let token = s.acquire("r");
    writer.exec(&format!("BEGIN; SELECT fence('r', {token})"));
    moves(
        &db,
        &[("grants", 1), ("waits", 1), ("releases", 1), ("drains", 1)],
        || {
            assert!(s.release("r", token));
            let taker = db.session().spawn(WAIT);
            wait_for("the drain", || {
                (s.state_of("r") == "draining").then_some(())
            });
            // once it is seen to wait it has tried the fence
            db.wait_queue("r", &[taker.pid]);
            writer.exec("COMMIT");
            taker.granted();
        },
    );
    // one that gives up has drained nothing
    let token: i64 = s.one("SELECT token FROM lease_info('r')");
    writer.exec(&format!("BEGIN; SELECT fence('r', {token})"));
    moves(&db, &[("denials", 1), ("releases", 1)], || {
        assert!(s.release("r", token));
        assert_eq!(s.try_acquire("r"), None);
    });
    writer.exec("COMMIT");
    // and where nobody is inside there is nothing to drain
    moves(&db, &[("grants", 1)], || s.acquire("r"));
}

fn ended_sessions_count() {
    let db = Db::of_waiters("0");
    let mut s = db.session();
    let token = s.acquire_expired("r");
    let mut zombies: Vec<Session> = (0..3).map(|_| db.session()).collect();
    for zombie in &mut zombies {
        zombie.exec(&format!("BEGIN; SELECT fence('r', {token})"));
    }
    // a session is seen to be idle a moment after it has answered; until then its statement would be cancelled
    let idle = "SELECT count(*) = 3 FROM pg_stat_activity
                 WHERE state = 'idle in transaction' AND wait_event = 'ClientRead'";
    db.cluster.wait_sql(idle, "idle zombies");
    let taken = [
        ("grants", 1),
        ("waits", 1),
        ("expiries", 1),
        ("takeovers", 1),
        ("drains", 1),
        ("sessions_ended", 3),
    ];
    moves(&db, &taken, || {
        s.exec("SELECT acquire_lease('r', wait => '1h')")
    });
    // one whose statement is cancelled
    let token = s.acquire_expired("q");
    let mut zombie = db.session();
    zombie.exec(&format!("BEGIN; SELECT fence('q', {token})"));
    let zombie = zombie.spawn("SELECT pg_sleep(3600)");
    let asleep = format!(
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {} AND wait_event = 'PgSleep')",
        zombie.pid
    );
    db.cluster.wait_sql(&asleep, "the sleep");
    let mut taken = taken;
    taken[5].1 = 1;
    moves(&db, &taken, || {
        s.exec("SELECT acquire_lease('q', wait => '1h')");
        zombie.failed().1.is("57014");
    });
}

fn a_verdict_counts_and_not_a_row() {
    let db = Db::new();
    let mut s = db.session();
    s.exec(
        "CREATE TABLE one (id int); SELECT fence_table('one', 'r');
         CREATE TABLE many (id int); SELECT fence_table('many', 'doc:{id}');
         CREATE TABLE stamped (id int, token bigint); SELECT fence_table('stamped', 'r', 'token')",
    );
    let token = s.acquire("r");
    s.exec(&format!("SET leasehold.token = '{token}'"));
    moves(&db, &[("fence_checks", 1)], || {
        s.exec("INSERT INTO one SELECT generate_series(1, 1000)");
    });
    moves(&db, &[("fence_checks", 1)], || {
        s.exec("UPDATE one SET id = id + 1")
    });
    moves(&db, &[("fence_checks", 1)], || {
        s.exec("BEGIN; UPDATE one SET id = id + 1; DELETE FROM one; INSERT INTO one VALUES (1); TRUNCATE one; COMMIT");
    });
    moves(&db, &[("fence_checks", 1)], || {
        s.exec("INSERT INTO stamped SELECT generate_series(1, 100)");
    });
    // a statement that writes no row
    moves(&db, &[], || s.exec("UPDATE one SET id = 1"));
    s.exec("RESET leasehold.token");
    moves(&db, &[("fence_checks", 1)], || {
        s.exec(&format!(
            "INSERT INTO stamped SELECT n, {token} FROM generate_series(1, 100) n"
        ));
    });
    // of fence() there is one, whatever is written then
    moves(&db, &[("fence_checks", 1)], || {
        s.exec(&format!(
            "BEGIN; SELECT fence('r', {token}); SELECT fence('r', {token});
             INSERT INTO one SELECT generate_series(1, 10); INSERT INTO stamped VALUES (1); COMMIT"
        ));
    });
    // one of a savepoint that was rolled back holds no more
    moves(&db, &[("fence_checks", 2)], || {
        s.exec(&format!(
            "BEGIN; SAVEPOINT a; SELECT fence('r', {token}); ROLLBACK TO a; SELECT fence('r', {token}); COMMIT"
        ));
    });
    // for each resource
    let tokens: Vec<String> = (1..=3)
        .map(|n| s.acquire(&format!("doc:{n}")).to_string())
        .collect();
    s.exec(&format!("SET leasehold.token = '{}'", tokens.join(",")));
    moves(&db, &[("fence_checks", 3)], || {
        s.exec("INSERT INTO many SELECT n % 3 + 1 FROM generate_series(1, 300) n");
    });
    s.exec("RESET leasehold.token");
    // an own acquire needs none
    moves(&db, &[("grants", 1)], || {
        s.exec("BEGIN; SELECT acquire_lease('doc:4'); INSERT INTO many VALUES (4); COMMIT");
    });
    // and whoever only asks gets no verdict that holds
    moves(&db, &[], || {
        assert!(s.check_fence("r", token) && !s.check_fence("r", NEVER));
    });
}

fn refusals_of_fence_count() {
    let db = Db::new();
    let mut s = db.session();
    let (stale, _) = s.stale_and_current("r");
    let released = s.acquire("q");
    assert!(s.release("q", released));
    for (resource, token, column) in [
        ("r", stale, "refused_lh001"),
        ("r", NEVER, "refused_lh002"),
        ("never granted", NEVER, "refused_lh002"),
        ("q", released, "refused_lh004"),
    ] {
        moves(&db, &[("fence_checks", 1), (column, 1)], || {
            s.try_fence(resource, token).expect_err("no good")
        });
    }
    // another role's lease is no matter of the token
    let role = login(&db, "role");
    let token = s.acquire("q");
    moves(&db, &[("fence_checks", 1)], || {
        let error = db.session_as(&role).try_fence("q", token);
        error.expect_err("another's").is("42501");
    });
    moves(&db, &[], || {
        s.err("SELECT fence('r', -1)").is("22023");
        s.err("SELECT fence('', 1)").is("22023");
    });
}

fn refusals_of_writes_count() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE doc (n int)");
    s.exec("INSERT INTO doc VALUES (1), (2), (3); SELECT fence_table('doc', 'r')");
    let (stale, token) = s.stale_and_current("r");
    let writes = [
        "INSERT INTO doc SELECT generate_series(1, 10)",
        "UPDATE doc SET n = n + 1",
        "DELETE FROM doc",
        "TRUNCATE doc",
    ];
    for sql in writes {
        s.exec(&format!("SET leasehold.token = '{stale}'"));
        moves(&db, &[("fence_checks", 1), ("refused_lh001", 1)], || {
            s.err(sql).is("LH001");
        });
        s.exec(&format!("SET leasehold.token = '{NEVER}'"));
        moves(&db, &[("fence_checks", 1), ("refused_lh002", 1)], || {
            s.err(sql).is("LH002");
        });
        // where nothing is presented there is no verdict on it
        s.exec("RESET leasehold.token");
        moves(&db, &[("refused_lh003", 1)], || {
            s.err(sql).is("LH003");
        });
    }
    s.exec(&format!("SET leasehold.token = '{stale}'"));
    moves(&db, &[("fence_checks", 1), ("refused_lh001", 1)], || {
        let error = s
            .try_copy_in("COPY doc FROM STDIN", "1\n2\n")
            .expect_err("stale");
        error.is("LH001");
    });
    s.exec(&format!("SET leasehold.token = '{token}'"));
    assert!(s.release("r", token));
    for sql in writes {
        moves(&db, &[("fence_checks", 1), ("refused_lh004", 1)], || {
            s.err(sql).is("LH004");
        });
    }
    // whatever else is written in the transaction that is refused
    let token = s.acquire("r");
    moves(
        &db,
        &[("renewals", 1), ("fence_checks", 1), ("refused_lh001", 1)],
        || {
            s.exec(&format!(
                "BEGIN; SELECT renew_lease('r', {token}); SAVEPOINT a"
            ));
            s.exec(&format!("SET LOCAL leasehold.token = '{stale}'"));
            s.err("INSERT INTO doc VALUES (1)").is("LH001");
            s.exec("ROLLBACK");
        },
    );
}

fn caught_refusals_count() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE doc (n int); SELECT fence_table('doc', 'r')");
    let (stale, _) = s.stale_and_current("r");
    let each = |statement: &str| {
        format!(
            "DO $$ BEGIN
                FOR i IN 1..5 LOOP
                    BEGIN {statement}; RAISE 'passed'; EXCEPTION WHEN SQLSTATE 'LH001' OR SQLSTATE 'LH003' THEN NULL; END;
                END LOOP;
             END $$"
        )
    };
    moves(&db, &[("fence_checks", 5), ("refused_lh001", 5)], || {
        s.exec(&each(&format!("PERFORM fence('r', {stale})")));
    });
    moves(&db, &[("refused_lh003", 5)], || {
        s.exec(&each("INSERT INTO doc VALUES (1)"));
    });
    s.exec(&format!("SET leasehold.token = '{stale}'"));
    moves(&db, &[("fence_checks", 5), ("refused_lh001", 5)], || {
        s.exec(&each("INSERT INTO doc VALUES (1)"));
    });
}

/// The first that a server hears of a database is a write that it refuses.
fn refusals_count_from_the_first_on() {
    let db = Db::with(&[]);
    let mut s = db.session();
    s.exec("CREATE TABLE doc (n int); SELECT fence_table('doc', 'r')");
    drop(s);
    db.cluster.restart(Stop::Fast);
    db.session().err("INSERT INTO doc VALUES (1)").is("LH003");
    let refused: i64 = db
        .session()
        .one("SELECT refused_lh003 FROM leasehold.stats");
    assert_eq!(refused, 1);
}

fn full_table_counts() {
    let db = Db::with(&[("leasehold.max_leases", "16")]);
    let mut s = db.session();
    let room = fill(&mut s, "a");
    for sql in [
        "SELECT acquire_lease('more')",
        "SELECT acquire_lease('more', wait => '1s')",
        "CALL await_lease('more')",
    ] {
        moves(&db, &[("refused_lh006", 1)], || {
            s.err(sql).is("LH006");
        });
    }
    assert_eq!(counts(&db)[0], room);
}

fn what_has_other_numbers_or_none() {
    let db = Db::new();
    let mut s = db.session();
    s.acquire("r");
    moves(&db, &[], || s.exec("SELECT break_lease('r')"));
    moves(&db, &[], || {
        s.exec("SELECT break_lease('r'), break_lease('never granted')")
    });
    moves(&db, &[], || {
        s.exec("SELECT allow_lease('x', 'postgres'), disallow_lease('x', 'postgres')");
    });
    assert!(
        time(&db, "hold_ms_p50").is_some(),
        "a lease that is broken was held"
    );
}

//! Layer memory: leases with `leasehold.durability = memory`. They write nothing, are as good as any other while the
//! server runs, and are lost with it: then nothing is granted until the longest of them has run out.
//!
//! That something is not granted before a time is shown by the instant at which it is granted first; that it is not
//! granted at all by a time that is longer than any test.

use std::time::{Duration, Instant};

use crate::cluster::{Cluster, Db, Stop, wait_for};
use crate::session::Session;

crate::tests![
    memory_lease_writes_nothing,
    memory_lease_is_a_lease,
    memory_lease_shows_who_holds_it,
    memory_lease_expires_and_is_taken_over,
    memory_lease_fences_writes,
    memory_grant_is_undone_by_rollback,
    displaced_memory_lease_is_refused,
    live_memory_lease_is_never_displaced,
    durability_is_that_of_each_grant,
    durable_lease_follows_a_memory_lease,
    memory_lease_is_lost_with_the_server,
    nothing_is_granted_until_memory_leases_have_run_out,
    restart_within_that_time_begins_it_anew,
    durable_leases_live_on_within_that_time,
    databases_without_memory_leases_wait_for_nothing,
    memory_leases_of_a_copied_database_have_their_time_too,
    longer_grant_in_memory_is_known_before_it_counts,
    longer_renewal_in_memory_is_known_before_it_counts,
    memory_grant_closes_the_durable_lease_before_it,
    memory_grant_that_rolls_back_leaves_the_durable_lease_over,
    snapshot_older_than_a_memory_grant_cannot_write,
    memory_acquire_cannot_be_prepared,
    memory_calls_in_read_only_transactions,
];

/// A session whose leases are in memory.
fn memory(db: &Db) -> Session {
    db.session_with_options("-c leasehold.durability=memory")
}

fn acquire_for(session: &mut Session, resource: &str, ttl: &str) -> i64 {
    let sql = format!("SELECT acquire_lease('{resource}', ttl => '{ttl}')");
    let token: Option<i64> = session.one(&sql);
    token.unwrap_or_else(|| panic!("{resource} could not be had"))
}

fn docs(db: &Db) {
    db.session().exec(
        "CREATE TABLE doc (id int PRIMARY KEY, n int); INSERT INTO doc VALUES (1, 0), (2, 0);
         SELECT fence_table('doc', 'doc:{id}')",
    );
}

fn n_of(db: &Db, id: i32) -> i32 {
    db.session()
        .one_with("SELECT n FROM doc WHERE id = $1", &[&id])
}

fn write(session: &mut Session, id: i32, token: i64) {
    session.exec(&format!(
        "BEGIN; SELECT fence('doc:{id}', {token}); UPDATE doc SET n = n + 1 WHERE id = {id}; COMMIT"
    ));
}

fn is_durable(session: &mut Session, resource: &str) -> Option<String> {
    session.info(resource, "durable")
}

fn ledger_rows(db: &Db) -> i64 {
    db.session().one("SELECT count(*) FROM leasehold.ledger")
}

fn memory_lease_writes_nothing() {
    let db = Db::with(&[
        // nobody else writes WAL then
        ("wal_level", "minimal"),
        ("max_wal_senders", "0"),
        ("autovacuum", "off"),
        ("checkpoint_timeout", "1h"),
    ]);
    let mut s = memory(&db);
    // the longest TTL is made known once, and tokens are reserved for a while
    let first = s.acquire("first");
    assert!(s.release("first", first));
    let cycles = "DO $$
        DECLARE t bigint;
        BEGIN
            FOR i IN 1..50 LOOP
                t := acquire_lease('r' || i % 10, ttl => '1min');
                IF NOT renew_lease('r' || i % 10, t, '2min') THEN RAISE 'not renewed'; END IF;
                PERFORM fence('r' || i % 10, t);
                IF NOT release_lease('r' || i % 10, t) THEN RAISE 'not released'; END IF;
                COMMIT;
            END LOOP;
        END $$";
    s.exec(cycles);
    let position = "SELECT pg_current_wal_insert_lsn()::text";
    let before: String = s.one(position);
    s.exec(cycles);
    let after: String = s.one(position);
    assert_eq!(before, after, "WAL was written");
    s.exec("BEGIN");
    let token = s.acquire("r");
    assert!(s.release("r", token));
    let number = s.text("SELECT pg_current_xact_id_if_assigned()");
    assert_eq!(number, None, "the transaction has a number");
    s.exec("COMMIT");
    assert_eq!(ledger_rows(&db), 0);
}

fn memory_lease_is_a_lease() {
    let db = Db::new();
    let (mut s, mut other) = (memory(&db), db.session());
    let token = s.acquire("r");
    assert_eq!(
        (other.try_acquire("r"), memory(&db).try_acquire("r")),
        (None, None)
    );
    assert_eq!(is_durable(&mut other, "r").as_deref(), Some("false"));
    assert_eq!(other.state_of("r"), "held");
    let listed = "SELECT durable::text FROM leasehold.leases WHERE resource = 'r'";
    assert_eq!(other.text(listed).as_deref(), Some("false"));
    // nothing depends on the session or on its setting
    assert!(other.renew("r", token) && other.check_fence("r", token));
    other.fence("r", token);
    assert!(other.one::<bool>(&format!("SELECT renew_lease('r', {token}, '20s')")));
    assert!(
        other.info_says("r", "remaining > '4min'::interval"),
        "a renewal has shortened it"
    );
    other.exec("BEGIN");
    assert!(other.release("r", token));
    assert_eq!(s.try_acquire("r"), None, "released before the commit");
    other.exec("COMMIT");
    assert_eq!(s.state_of("r"), "free");
    assert!(s.release("r", token));
    db.refused(&mut s, &format!("SELECT fence('r', {token})"), "LH004");
    assert!(!s.renew("r", token));
    let next = s.acquire("r");
    assert!(next > token);
    db.refused(&mut s, &format!("SELECT fence('r', {token})"), "LH001");
    db.refused(&mut s, &format!("SELECT fence('r', {})", next + 1), "LH002");
    assert_eq!(ledger_rows(&db), 0);
}

fn memory_lease_shows_who_holds_it() {
    let db = Db::new();
    let role = db.role();
    let mut s = db.session_as(&role);
    s.exec("SET leasehold.durability = memory; SELECT acquire_lease('r', 'worker', '1min')");
    let mut admin = db.session();
    let shown = admin.text("SELECT concat_ws(' ', holder, state, ttl, role, pid, durable, writers) FROM lease_info('r')");
    assert_eq!(
        shown,
        Some(format!("worker held 00:01:00 {role} {} f 0", s.pid))
    );
    // it belongs to its role
    let token: i64 = admin.one("SELECT token FROM lease_info('r')");
    let mut stranger = db.session_as(&db.role());
    for call in ["renew_lease", "release_lease", "fence"] {
        db.refused(
            &mut stranger,
            &format!("SELECT {call}('r', {token})"),
            "42501",
        );
    }
    // a setting that is no durability
    s.err("SET leasehold.durability = 'disk'").is("22023");
}

fn memory_lease_expires_and_is_taken_over() {
    let db = Db::new();
    let (mut s, mut other) = (memory(&db), memory(&db));
    let token = s.acquire_expired("r");
    assert_eq!(s.state_of("r"), "expired");
    assert!(!s.renew("r", token) && !s.release("r", token));
    // nobody else wants it
    s.fence("r", token);
    let next = other.acquire("r");
    assert!(next > token);
    db.refused(&mut s, &format!("SELECT fence('r', {token})"), "LH001");
    assert!(!s.release("r", token) && other.renew("r", next));
}

fn memory_lease_fences_writes() {
    let db = Db::new();
    docs(&db);
    let (mut s, mut other) = (memory(&db), memory(&db));
    let token = s.acquire("doc:1");
    write(&mut s, 1, token);
    s.exec("BEGIN");
    let own = s.acquire("doc:2");
    s.exec("UPDATE doc SET n = 5 WHERE id = 2");
    db.refused(
        &mut other,
        &format!("SELECT fence('doc:2', {own})"),
        "LH002",
    );
    s.exec("COMMIT");
    assert_eq!((n_of(&db, 1), n_of(&db, 2)), (1, 5));
    // a transaction that is open keeps takers out, here too
    let token = s.acquire_expired("doc:3");
    s.exec(&format!(
        "BEGIN; SELECT fence('doc:3', {token}); INSERT INTO doc VALUES (3, 7)"
    ));
    assert_eq!(other.try_acquire("doc:3"), None);
    db.refused(
        &mut other,
        &format!("SELECT fence('doc:3', {token})"),
        "LH004",
    );
    s.exec("COMMIT");
    other.exec("BEGIN");
    wait_for("the grant", || other.try_acquire("doc:3"));
    assert_eq!(other.one::<i32>("SELECT n FROM doc WHERE id = 3"), 7);
    other.exec("COMMIT");
    s.exec(&format!("SET leasehold.token = '{token}'"));
    db.refused(&mut s, "UPDATE doc SET n = 8 WHERE id = 3", "LH001");
}

fn memory_grant_is_undone_by_rollback() {
    let db = Db::new();
    docs(&db);
    let (mut s, mut other) = (memory(&db), db.session());
    s.exec("BEGIN");
    let aborted = s.acquire("doc:1");
    s.exec("UPDATE doc SET n = 1 WHERE id = 1");
    assert_eq!(other.try_acquire("doc:1"), None);
    s.exec("ROLLBACK");
    assert_eq!(s.state_of("doc:1"), "free");
    db.refused(
        &mut s,
        &format!("SELECT fence('doc:1', {aborted})"),
        "LH002",
    );
    s.exec("BEGIN; SAVEPOINT a");
    let undone = s.acquire("doc:1");
    s.exec("ROLLBACK TO a");
    let next = other.acquire("doc:1");
    assert!(next > undone && undone > aborted);
    s.exec("COMMIT");
    assert!(
        other.renew("doc:1", next),
        "the commit took the other's lease"
    );
    db.refused(&mut s, &format!("SELECT fence('doc:1', {undone})"), "LH001");
    assert_eq!(n_of(&db, 1), 0);
}

/// Leases that are over at once, for more resources than the table has places.
fn push_out(session: &mut Session) {
    session.exec("DO $$ BEGIN FOR i IN 1..50 LOOP PERFORM acquire_lease('push' || i, ttl => '1 microsecond'); COMMIT; END LOOP; END $$");
}

fn displaced_memory_lease_is_refused() {
    let db = Db::with(&[("leasehold.max_leases", "4")]);
    let (mut s, mut durable) = (memory(&db), db.session());
    let resources = ["released", "expired", "after a durable one", "rolled back"];
    let older = durable.acquire("after a durable one");
    assert!(durable.release("after a durable one", older));
    let released = s.acquire("released");
    assert!(s.release("released", released));
    let expired = s.acquire_expired("expired");
    let after = s.acquire_expired("after a durable one");
    s.exec("BEGIN");
    let rolled_back = s.acquire("rolled back");
    s.exec("ROLLBACK");
    push_out(&mut s);
    let mut highest = rolled_back;
    for (resource, token) in resources
        .into_iter()
        .zip([released, expired, after, rolled_back])
    {
        assert_eq!(s.state_of(resource), "free", "{resource} is still known");
        assert!(!s.check_fence(resource, token), "{resource}");
        s.err(&format!("SELECT fence('{resource}', {token})"))
            .is("LH001")
            .well_written();
        assert!(
            !s.renew(resource, token) && !s.release(resource, token),
            "{resource}"
        );
        let next = acquire_for(&mut s, resource, "5min");
        assert!(next > highest, "{next} after {highest}");
        highest = next;
        assert!(s.release(resource, next));
    }
    // nor does the durable lease before it come back
    push_out(&mut s);
    let error = s.err(&format!("SELECT fence('after a durable one', {older})"));
    assert!(
        matches!(error.sqlstate.as_str(), "LH001" | "LH004"),
        "{error}"
    );
}

fn live_memory_lease_is_never_displaced() {
    let db = Db::with(&[("leasehold.max_leases", "4")]);
    let mut s = memory(&db);
    let held = ["a", "b", "c", "d"].map(|resource| s.acquire(resource));
    push_out(&mut s);
    for (resource, token) in ["a", "b", "c", "d"].into_iter().zip(held) {
        assert_eq!(db.session().try_acquire(resource), None);
        assert!(
            s.renew(resource, token) && s.check_fence(resource, token),
            "{resource}"
        );
    }
    let full = wait_for("a full table", || {
        s.try_one::<Option<i64>>("SELECT acquire_lease('more' || random(), ttl => '5min')")
            .err()
    });
    full.is("LH006");
}

fn durability_is_that_of_each_grant() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("BEGIN");
    let durable = s.acquire("durable");
    s.exec("SET LOCAL leasehold.durability = memory");
    let lost = s.acquire("memory");
    s.exec("SAVEPOINT a");
    s.acquire("undone");
    s.exec("ROLLBACK TO a; SAVEPOINT b; SET LOCAL leasehold.durability = durable");
    s.acquire("undone too");
    s.exec("ROLLBACK TO b");
    let kept = s.acquire("kept");
    s.exec("COMMIT");
    for (resource, is, token) in [
        ("durable", "true", durable),
        ("memory", "false", lost),
        ("kept", "false", kept),
    ] {
        assert_eq!(
            is_durable(&mut s, resource).as_deref(),
            Some(is),
            "{resource}"
        );
        assert!(s.renew(resource, token), "{resource}");
    }
    assert_eq!(
        (s.state_of("undone"), s.state_of("undone too")),
        ("free".to_owned(), "free".to_owned())
    );
    // the first row of a resource goes with its transaction
    let rows = s.text("SELECT string_agg(resource, ' ') FROM leasehold.ledger");
    assert_eq!(rows.as_deref(), Some("durable"));
    // and all of both go with a rollback
    s.exec("BEGIN");
    s.acquire("x");
    s.exec("SET LOCAL leasehold.durability = memory");
    s.acquire("y");
    s.exec("ROLLBACK");
    let mut other = db.session();
    assert!(other.acquire("x") > kept && other.acquire("y") > kept);
}

fn durable_lease_follows_a_memory_lease() {
    let db = Db::with(&[]);
    let mut s = memory(&db);
    let lost = acquire_for(&mut s, "r", "1min");
    assert!(s.release("r", lost));
    let durable = db.session().acquire("r");
    assert!(durable > lost);
    assert_eq!(is_durable(&mut s, "r").as_deref(), Some("true"));
    drop(s);
    db.cluster.kill_postmaster();
    db.cluster.start();
    let mut s = db.session();
    db.refused(&mut s, &format!("SELECT fence('r', {lost})"), "LH001");
    s.fence("r", durable);
    assert!(s.renew("r", durable));
    assert_eq!(is_durable(&mut s, "r").as_deref(), Some("true"));
}

type End = (&'static str, fn(&Cluster));

const RESTARTS: &[End] = &[
    ("a fast restart", |cluster| cluster.stop(Stop::Fast)),
    ("an immediate restart", |cluster| {
        cluster.stop(Stop::Immediate)
    }),
    ("kill -9", Cluster::kill_postmaster),
];

fn memory_lease_is_lost_with_the_server() {
    for (what, stop) in RESTARTS {
        let db = Db::with(&[]);
        docs(&db);
        let mut s = memory(&db);
        let token = s.acquire("doc:1");
        write(&mut s, 1, token);
        drop(s);
        stop(&db.cluster);
        db.cluster.start();
        let mut s = db.session();
        assert!(
            !s.check_fence("doc:1", token)
                && !s.renew("doc:1", token)
                && !s.release("doc:1", token),
            "{what}"
        );
        db.refused(&mut s, &format!("SELECT fence('doc:1', {token})"), "LH001");
        s.exec(&format!("SET leasehold.token = '{token}'"));
        db.refused(&mut s, "UPDATE doc SET n = 9 WHERE id = 1", "LH001");
        // its holder may believe in it for five minutes, and nobody knows any more which resource it was
        for resource in ["doc:1", "never granted"] {
            assert_eq!(
                (s.try_acquire(resource), memory(&db).try_acquire(resource)),
                (None, None),
                "{what}"
            );
            let recovering = "state = 'recovering' AND remaining > '1min'::interval AND remaining <= '5min'::interval";
            assert!(
                s.info_says(resource, recovering),
                "{what}: {:?}",
                s.info(resource, "lease_info")
            );
        }
        assert_eq!(n_of(&db, 1), 1);
    }
}

/// What a crash of another backend takes along is the same.
fn nothing_is_granted_until_memory_leases_have_run_out() {
    let crash: fn(&Cluster) = |cluster| {
        let victim = cluster.connect();
        cluster.crash_backend(victim.pid);
    };
    let restarts = RESTARTS.iter().map(|(what, stop)| (*what, *stop, true));
    for (what, stop, starts) in restarts.chain([("a crashed backend", crash, false)]) {
        let db = Db::with(&[]);
        let mut s = memory(&db);
        // the longest one counts, however long it is over
        let longest = acquire_for(&mut s, "longest", "2s");
        assert!(s.release("longest", longest));
        let token = acquire_for(&mut s, "r", "10ms");
        let durable = acquire_for(&mut db.session(), "durable", "10ms");
        drop(s);
        let down = Instant::now();
        stop(&db.cluster);
        if starts {
            db.cluster.start();
        }
        let mut s = db.session();
        let next = wait_for("the grant", || s.try_acquire("r"));
        let passed = down.elapsed();
        assert!(
            passed >= Duration::from_secs(2),
            "granted {passed:?} after {what}"
        );
        assert!(
            next > token && next > durable,
            "{next} after {token} and {durable}"
        );
        assert_eq!(s.state_of("longest"), "free");
        assert!(memory(&db).acquire("other") > next);
        assert!(s.acquire("durable") > next);
        db.refused(
            &mut s,
            &format!("SELECT fence('longest', {longest})"),
            "LH001",
        );
    }
}

fn restart_within_that_time_begins_it_anew() {
    let db = Db::with(&[]);
    acquire_for(&mut memory(&db), "r", "2s");
    for _ in 0..2 {
        db.cluster.restart(Stop::Fast);
        let mut s = db.session();
        wait_for("some of the time to pass", || {
            s.info_says("r", "remaining < '1500ms'::interval OR state = 'free'")
                .then_some(())
        });
    }
    let down = Instant::now();
    db.cluster.kill_postmaster();
    db.cluster.start();
    let mut s = db.session();
    wait_for("the grant", || s.try_acquire("r"));
    let passed = down.elapsed();
    assert!(passed >= Duration::from_secs(2), "granted after {passed:?}");
}

fn durable_leases_live_on_within_that_time() {
    let db = Db::with(&[]);
    docs(&db);
    let (one, two) = (db.session().acquire("doc:1"), db.session().acquire("doc:2"));
    memory(&db).acquire("memory");
    db.cluster.kill_postmaster();
    db.cluster.start();
    let mut s = db.session();
    assert!(s.renew("doc:1", one) && s.check_fence("doc:2", two));
    write(&mut s, 1, one);
    assert_eq!(n_of(&db, 1), 1);
    assert!(s.release("doc:2", two));
    // released, but not to be had yet
    assert_eq!(
        (s.try_acquire("doc:2"), s.try_acquire("doc:1")),
        (None, None)
    );
    assert_eq!(s.state_of("doc:2"), "recovering");
    assert_eq!(s.state_of("doc:1"), "held");
}

fn databases_without_memory_leases_wait_for_nothing() {
    let db = Db::with(&[]);
    let other = Db::on(&db.cluster);
    memory(&db).acquire("r");
    let token = other.session().acquire("r");
    assert!(other.session().release("r", token));
    // one that was rolled back may count, one that was refused may not
    let held = other.session().acquire("held");
    assert_eq!(memory(&other).try_acquire("held"), None);
    db.refused(
        &mut memory(&other),
        "SELECT acquire_lease('r', ttl => '1h')",
        "22023",
    );
    assert!(other.session().renew("held", held));
    db.cluster.restart(Stop::Fast);
    assert!(other.session().acquire("r") > token);
    assert_eq!(other.session().state_of("free"), "free");
    assert_eq!(db.session().try_acquire("q"), None);
}

/// A database made from a template: its ledger says that it was another's, as after pg_upgrade, until it is written.
fn memory_leases_of_a_copied_database_have_their_time_too() {
    let origin = Db::with(&[]);
    for is_used in [false, true] {
        if is_used {
            let mut s = memory(&origin);
            let token = s.acquire("r");
            assert!(s.release("r", token));
        }
        let mut admin = origin.cluster.connect();
        admin.exec(&format!(
            "CREATE DATABASE copy{is_used} TEMPLATE {}",
            origin.name
        ));
        drop(admin);
        let copy = Db {
            cluster: origin.cluster.clone(),
            name: format!("copy{is_used}"),
        };
        let token = memory(&copy).acquire("r");
        origin.cluster.restart(Stop::Fast);
        let mut s = copy.session();
        copy.has_lost("r", token);
        assert_eq!(s.try_acquire("r"), None, "granted early");
        assert_eq!(s.state_of("r"), "recovering");
    }
}

/// Grants for a short time, then has `longer` make five minutes of it in a session that does not like to wait for the
/// disk, and kills the server at once.
fn longer_is_known(longer: impl FnOnce(&mut Session, i64)) {
    let db = Db::with(&[("wal_writer_delay", "10s")]);
    let token = acquire_for(&mut memory(&db), "r", "10ms");
    assert!(db.session().info_says("r", "ttl = '10ms'::interval"));
    let mut s = memory(&db);
    s.exec("SET synchronous_commit = off");
    let next = wait_for("the grant", || {
        s.one::<Option<i64>>("SELECT acquire_lease('q', ttl => '10s')")
    });
    assert!(next > token);
    longer(&mut s, next);
    db.cluster.kill_postmaster();
    db.cluster.start();
    let mut s = db.session();
    assert_eq!(s.try_acquire("r"), None);
    assert!(
        s.info_says("r", "state = 'recovering' AND remaining > '1min'::interval"),
        "{:?}",
        s.info("r", "lease_info")
    );
}

fn longer_grant_in_memory_is_known_before_it_counts() {
    longer_is_known(|s, _| {
        s.acquire("longer");
    });
}

fn longer_renewal_in_memory_is_known_before_it_counts() {
    longer_is_known(|s, token| {
        assert!(s.one::<bool>(&format!("SELECT renew_lease('q', {token}, '5min')")));
    });
}

/// The ledger knows an older lease, which no one released. The server that is started next must not believe in it.
fn memory_grant_closes_the_durable_lease_before_it() {
    for synchronous_commit in ["on", "off"] {
        let db = Db::with(&[("max_worker_processes", "0"), ("wal_writer_delay", "10s")]);
        docs(&db);
        let durable = db.session().acquire_expired("doc:1");
        let mut s = memory(&db);
        // the longest TTL is known, so that only the row needs the disk
        let known = acquire_for(&mut s, "known", "500ms");
        assert!(s.release("known", known));
        s.exec(&format!("SET synchronous_commit = {synchronous_commit}"));
        let lost = acquire_for(&mut s, "doc:1", "500ms");
        assert!(lost > durable);
        db.cluster.kill_postmaster();
        db.cluster.start();
        let mut s = db.session();
        assert!(
            !s.check_fence("doc:1", durable),
            "an older lease has come back"
        );
        let error = s.err(&format!("SELECT fence('doc:1', {durable})"));
        assert!(
            matches!(error.sqlstate.as_str(), "LH001" | "LH004"),
            "{error}"
        );
        s.exec(&format!("SET leasehold.token = '{durable}'"));
        let error = s.err("UPDATE doc SET n = 9 WHERE id = 1");
        assert!(
            matches!(error.sqlstate.as_str(), "LH001" | "LH004"),
            "{error}"
        );
        assert!(!s.renew("doc:1", durable) && !s.release("doc:1", lost));
        let next = wait_for("the grant", || s.try_acquire("doc:1"));
        assert!(next > lost);
        assert_eq!(n_of(&db, 1), 0);
    }
}

fn memory_grant_that_rolls_back_leaves_the_durable_lease_over() {
    let db = Db::with(&[("max_worker_processes", "0")]);
    let durable = db.session().acquire_expired("r");
    let mut s = memory(&db);
    s.exec("BEGIN");
    let undone = acquire_for(&mut s, "r", "500ms");
    s.exec("ROLLBACK");
    db.refused(&mut s, &format!("SELECT fence('r', {durable})"), "LH001");
    db.refused(&mut s, &format!("SELECT fence('r', {undone})"), "LH002");
    db.session().exec("CREATE TABLE on_disk ()");
    db.cluster.kill_postmaster();
    db.cluster.start();
    let mut s = db.session();
    let next = wait_for("the grant", || s.try_acquire("r"));
    assert!(next > undone);
    for token in [durable, undone] {
        db.refused(&mut s, &format!("SELECT fence('r', {token})"), "LH001");
    }
}

fn snapshot_older_than_a_memory_grant_cannot_write() {
    let db = Db::new();
    docs(&db);
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let (mut s, mut holder) = (db.session(), memory(&db));
        let first = holder.acquire("doc:1");
        s.exec(&format!(
            "BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM doc"
        ));
        write(&mut holder, 1, first);
        assert!(holder.release("doc:1", first));
        let token = holder.acquire("doc:1");
        // it does not see what the last holder wrote
        db.refused_write(&mut s, &format!("SELECT fence('doc:1', {token})"), "40001");
        s.exec(&format!(
            "BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM doc"
        ));
        s.fence("doc:1", token);
        s.exec("UPDATE doc SET n = n + 1 WHERE id = 1; COMMIT");
        assert!(holder.release("doc:1", token));
    }
    assert_eq!(n_of(&db, 1), 4);
}

fn memory_acquire_cannot_be_prepared() {
    let db = Db::new();
    docs(&db);
    let mut s = memory(&db);
    s.exec("BEGIN");
    let token = s.acquire("doc:1");
    s.exec("UPDATE doc SET n = 1 WHERE id = 1");
    db.refused_write(&mut s, "PREPARE TRANSACTION 'p'", "0A000");
    assert!(
        s.acquire("doc:1") > token,
        "the refused PREPARE did not undo the acquire"
    );
}

fn memory_calls_in_read_only_transactions() {
    let db = Db::new();
    let mut s = memory(&db);
    let token = acquire_for(&mut s, "r", "1min");
    db.refused(
        &mut s,
        "BEGIN READ ONLY; SELECT acquire_lease('q')",
        "25006",
    );
    db.refused(
        &mut s,
        &format!("BEGIN READ ONLY; SELECT renew_lease('r', {token}, '2min')"),
        "25006",
    );
    s.exec("BEGIN READ ONLY");
    assert!(s.one::<bool>(&format!("SELECT renew_lease('r', {token}, '1min')")));
    s.fence("r", token);
    assert!(s.release("r", token));
    s.exec("COMMIT");
    assert_eq!(s.state_of("r"), "free");
    // what any lease in memory was granted for is known
    acquire_for(&mut s, "longer", "2min");
    let token = acquire_for(&mut s, "r", "1min");
    s.exec("BEGIN READ ONLY");
    assert!(s.one::<bool>(&format!("SELECT renew_lease('r', {token}, '2min')")));
    s.exec("COMMIT");
}

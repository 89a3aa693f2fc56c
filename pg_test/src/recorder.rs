//! Layer seen, part events: the flight recorder tells the story of a resource in order, and of nothing that did not
//! happen.

use crate::cluster::{Db, wait_for};
use crate::leases::NEVER;
use crate::rights::login;
use crate::session::Session;

crate::tests![
    events_have_their_columns,
    story_of_a_resource_is_told_in_order,
    refused_writes_are_told_with_all_facts,
    refused_fences_are_told_without_a_table,
    own_lease_of_another_role_is_no_event,
    ended_session_is_told,
    cancelled_statement_is_told,
    drain_is_told,
    shed_is_told,
    break_is_told,
    end_by_the_clock_is_told_once,
    reclaimed_lease_has_expired,
    what_is_undone_is_not_told,
    refusal_in_what_is_undone_is_told,
    loop_of_refused_writes_leaves_room_for_the_rest,
    leases_in_memory_are_told_alike,
    names_are_told_in_full,
];

/// What is told of a resource after an event, oldest first; without the numbers and the times.
#[track_caller]
pub fn story(db: &Db, resource: &str, after: i64) -> Vec<String> {
    let rows = db.session().rows(&format!(
        "SELECT concat_ws(' ', event, 'token=' || token, 'presented=' || presented, 'holder=' || holder, sqlstate,
                          relation, role, pid, application_name)
           FROM leasehold.events WHERE resource = '{resource}' AND seq > {after} ORDER BY seq"
    ));
    rows.into_iter().flatten().flatten().collect()
}

/// The number of the last event.
pub fn last(db: &Db) -> i64 {
    db.session()
        .one("SELECT coalesce(max(seq), 0) FROM leasehold.events")
}

/// A session of a role and an application.
pub fn session_of(db: &Db, role: &str, application: &str) -> Session {
    let mut config = db.cluster.config();
    config
        .user(role)
        .dbname(&db.name)
        .application_name(application);
    db.cluster.connect_with(&config)
}

#[track_caller]
pub fn acquire_as(s: &mut Session, holder: &str, ttl: &str) -> i64 {
    let sql = format!("SELECT acquire_lease('r', '{holder}', '{ttl}')");
    let token: Option<i64> = s.one(&sql);
    token.expect("it is free")
}

fn events_have_their_columns() {
    let db = Db::new();
    let mut s = db.session();
    let types = "SELECT string_agg(attname || ' ' || atttypid::regtype, ', ' ORDER BY attnum) FROM pg_attribute
                  WHERE attrelid = 'leasehold.events'::regclass AND attnum > 0";
    assert_eq!(
        s.text(types).as_deref(),
        Some(
            "seq bigint, at timestamp with time zone, event text, resource text, token bigint, presented bigint, \
             holder text, sqlstate text, relation regclass, role regrole, pid integer, application_name text"
        )
    );
    assert!(s.rows("TABLE leasehold.events").is_empty());
    // who looks leaves no trace
    s.rows("SELECT * FROM lease_info('r')");
    assert!(!s.check_fence("r", NEVER));
    assert!(s.rows("TABLE leasehold.events").is_empty());
    // oldest first, without an ORDER BY, and at the time of the event
    let before: String = s.one("SELECT clock_timestamp()::text");
    for resource in ["b", "a", "c"] {
        s.acquire(resource);
    }
    let told = s.rows("SELECT resource FROM leasehold.events");
    assert_eq!(told.concat(), ["b", "a", "c"].map(|r| Some(r.to_owned())));
    let in_time: bool = s.one(&format!(
        "SELECT bool_and(at BETWEEN '{before}' AND clock_timestamp()) FROM leasehold.events"
    ));
    assert!(in_time);
}

fn story_of_a_resource_is_told_in_order() {
    let db = Db::with(&[]);
    let (alice, bob) = (login(&db, "alice"), login(&db, "bob"));
    let (mut a, mut b) = (
        session_of(&db, &alice, "app a"),
        session_of(&db, &bob, "app b"),
    );
    let (of_a, of_b) = (
        format!("{alice} {} app a", a.pid),
        format!("{bob} {} app b", b.pid),
    );
    let first = acquire_as(&mut a, "first", "5min");
    // another resource is another story
    b.acquire("q");
    assert_eq!(b.try_acquire("r"), None);
    assert!(a.renew("r", first));
    assert!(a.release("r", first));
    let second = acquire_as(&mut a, "second", "1 microsecond");
    let third = acquire_as(&mut b, "third", "5min");
    assert!(b.release("r", third));
    let fourth = acquire_as(&mut a, "fourth", "5min");
    assert_eq!(db.session().one::<i64>("SELECT break_lease('r')"), fourth);
    let told = [
        format!("granted token={first} holder=first {of_a}"),
        format!("denied holder={bob}/app b/{} {of_b}", b.pid),
        format!("renewed token={first} holder=first {of_a}"),
        format!("released token={first} holder=first {of_a}"),
        format!("granted token={second} holder=second {of_a}"),
        // nobody has done that, so no application is named
        format!("expired token={second} holder=second {alice} {}", a.pid),
        format!("granted token={third} holder=third {of_b}"),
        format!("released token={third} holder=third {of_b}"),
        format!("granted token={fourth} holder=fourth {of_a}"),
    ];
    let story = story(&db, "r", 0);
    assert_eq!(story[..9], told);
    assert!(
        story[9].starts_with(&format!("broken token={fourth} holder=fourth {alice} ")),
        "{}",
        story[9]
    );
    assert_eq!(story.len(), 10);
    let mut s = db.session();
    let rises: bool = s.one(
        "SELECT bool_and(at >= before) FROM (SELECT at, lag(at) OVER (ORDER BY seq) AS before FROM leasehold.events) e",
    );
    assert!(rises);
}

/// A fenced table with three rows, and one more that is not fenced.
pub fn with_doc(db: &Db) {
    db.session().exec(
        "CREATE TABLE doc (n int); INSERT INTO doc VALUES (1), (2), (3); SELECT fence_table('doc', 'r');
         GRANT ALL ON doc TO PUBLIC",
    );
}

fn refused_writes_are_told_with_all_facts() {
    let db = Db::new();
    with_doc(&db);
    let (alice, bob) = (login(&db, "alice"), login(&db, "bob"));
    let (mut a, mut b) = (
        session_of(&db, &alice, "app a"),
        session_of(&db, &bob, "app b"),
    );
    let stale = acquire_as(&mut a, "old", "1 microsecond");
    let token = acquire_as(&mut b, "new", "5min");
    let by = format!("doc {alice} {} app a", a.pid);
    let writes = [
        "INSERT INTO doc SELECT generate_series(1, 10)",
        "UPDATE doc SET n = n + 1",
        "DELETE FROM doc",
        "TRUNCATE doc",
        "MERGE INTO doc USING (SELECT 1 AS n) AS new ON doc.n = new.n WHEN MATCHED THEN UPDATE SET n = 7",
    ];
    for sql in writes {
        let mark = last(&db);
        a.exec(&format!("SET leasehold.token = '{stale}'"));
        a.err(sql).is("LH001");
        a.exec(&format!("SET leasehold.token = '{NEVER}'"));
        a.err(sql).is("LH002");
        a.exec("RESET leasehold.token");
        a.err(sql).is("LH003");
        // one event each, however many rows
        assert_eq!(
            story(&db, "r", mark),
            [
                format!("write_refused token={token} presented={stale} holder=new LH001 {by}"),
                format!("write_refused token={token} presented={NEVER} holder=new LH002 {by}"),
                format!("write_refused LH003 {by}"),
            ],
            "{sql}"
        );
    }
    let mark = last(&db);
    a.exec(&format!("SET leasehold.token = '{stale}'"));
    a.try_copy_in("COPY doc FROM STDIN", "1\n2\n")
        .expect_err("stale")
        .is("LH001");
    // by a token that was given for the resource by name
    a.exec(&format!(
        "RESET leasehold.token; BEGIN; SAVEPOINT a; SET LOCAL leasehold.token = '{stale}'"
    ));
    a.err("INSERT INTO doc VALUES (1)").is("LH001");
    a.exec("ROLLBACK");
    assert_eq!(
        story(&db, "r", mark),
        [
            format!("write_refused token={token} presented={stale} holder=new LH001 {by}"),
            format!("write_refused token={token} presented={stale} holder=new LH001 {by}"),
        ]
    );
    // after the release, by its own holder
    let mark = last(&db);
    assert!(b.release("r", token));
    b.exec(&format!("SET leasehold.token = '{token}'"));
    for sql in writes {
        b.err(sql).is("LH004");
    }
    let by = format!("doc {bob} {} app b", b.pid);
    let refused = format!("write_refused token={token} presented={token} holder=new LH004 {by}");
    assert_eq!(story(&db, "r", mark)[1..], vec![refused; writes.len()]);
    // the table is the one that was written, in its schema, and the partition of it
    let mut s = db.session();
    s.exec(
        "CREATE SCHEMA other; CREATE TABLE other.doc (n int) PARTITION BY RANGE (n);
         CREATE TABLE other.low PARTITION OF other.doc FOR VALUES FROM (0) TO (10);
         SELECT fence_table('other.doc', 'p:{n}')",
    );
    s.err("INSERT INTO other.doc VALUES (3)").is("LH003");
    let told = s.text(
        "SELECT relation::text || ' ' || sqlstate FROM leasehold.events WHERE resource = 'p:3'",
    );
    assert_eq!(told.as_deref(), Some("other.low LH003"));
    // a table that is gone is told by its number
    s.exec("DROP TABLE other.doc");
    let told =
        s.text("SELECT relation::text ~ '^[0-9]+$' FROM leasehold.events WHERE resource = 'p:3'");
    assert_eq!(told.as_deref(), Some("t"));
}

fn loop_of_refused_writes_leaves_room_for_the_rest() {
    let db = Db::new();
    with_doc(&db);
    let mut s = db.session();
    s.acquire("r");
    s.exec(&format!("SET leasehold.token = '{NEVER}'"));
    let refused = |s: &mut Session, sql: &str, after: i64| -> (i64, f64) {
        let since: f64 = s.one("SELECT extract(epoch FROM clock_timestamp())::float8");
        s.exec(&format!(
            "DO $$ BEGIN FOR i IN 1 .. 500 LOOP
               BEGIN {sql}; EXCEPTION WHEN SQLSTATE 'LH002' THEN NULL; END;
             END LOOP; END $$"
        ));
        let seconds: f64 = s.one(&format!(
            "SELECT extract(epoch FROM clock_timestamp())::float8 - {since}"
        ));
        let told = s.one(&format!(
            "SELECT count(*) FROM leasehold.events WHERE event = 'write_refused' AND seq > {after}"
        ));
        (told, seconds)
    };
    // one write, and one after the other
    s.exec("CREATE TABLE other (n int); SELECT fence_table('other', 'r')");
    let (one, two) = ("INSERT INTO doc VALUES (4)", "INSERT INTO other VALUES (4)");
    let swapped = format!("IF i % 2 = 0 THEN {one}; ELSE {two}; END IF");
    for (sql, writes) in [(one, 1.0), (&swapped, 2.0)] {
        wait_for("the end of the second", || {
            let fresh = "SELECT coalesce(max(at), '-infinity') > clock_timestamp() - interval '1 s'
                           FROM leasehold.events WHERE event = 'write_refused'";
            (!s.one::<bool>(fresh)).then_some(())
        });
        let mark = last(&db);
        let (told, seconds) = refused(&mut s, sql, mark);
        let most = 10.0 * writes * (1.0 + seconds.floor());
        assert!(told >= 10 && told as f64 <= most, "{told} in {seconds} s");
    }
    // another one is told at once
    s.exec(&format!("SET leasehold.token = '{}'", NEVER - 1));
    let mark = last(&db);
    s.err("INSERT INTO doc VALUES (4)").is("LH002");
    assert_eq!(story(&db, "r", mark).len(), 1);
}

fn refused_fences_are_told_without_a_table() {
    let db = Db::new();
    let alice = login(&db, "alice");
    let mut a = session_of(&db, &alice, "app a");
    let stale = acquire_as(&mut a, "old", "1 microsecond");
    let token = acquire_as(&mut a, "new", "5min");
    let by = format!("{alice} {} app a", a.pid);
    let mark = last(&db);
    a.try_fence("r", stale).expect_err("stale").is("LH001");
    a.try_fence("r", NEVER).expect_err("unknown").is("LH002");
    // good ones are not told
    a.fence("r", token);
    assert!(a.release("r", token));
    a.try_fence("r", token).expect_err("over").is("LH004");
    a.try_fence("never granted", NEVER)
        .expect_err("unknown")
        .is("LH002");
    assert_eq!(
        story(&db, "r", mark),
        [
            format!("write_refused token={token} presented={stale} holder=new LH001 {by}"),
            format!("write_refused token={token} presented={NEVER} holder=new LH002 {by}"),
            format!("released token={token} holder=new {by}"),
            format!("write_refused token={token} presented={token} holder=new LH004 {by}"),
        ]
    );
    assert_eq!(
        story(&db, "never granted", mark),
        [format!("write_refused presented={NEVER} LH002 {by}")]
    );
}

fn own_lease_of_another_role_is_no_event() {
    let db = Db::new();
    let role = login(&db, "role");
    let mut s = db.session();
    let token = s.acquire("r");
    let mark = last(&db);
    let mut other = db.session_as(&role);
    for call in ["fence", "renew_lease", "release_lease"] {
        other
            .err(&format!("SELECT {call}('r', {token})"))
            .is("42501");
    }
    other.err("SELECT acquire_lease('')").is("22023");
    // and answers of false neither
    assert!(!s.renew("r", token - 1) && !s.release("r", token - 1));
    assert!(story(&db, "r", mark).is_empty());
}

/// What a taker is told of by the events of r since a mark, where it was granted r after `ended`.
#[track_caller]
fn is_taken(
    db: &Db,
    mark: i64,
    token: i64,
    next: i64,
    holder: &Session,
    taker: &Session,
    ended: &[String],
) {
    let mut told: Vec<String> = ended.to_vec();
    told.extend([
        format!(
            "drained token={token} holder=old postgres {} pg_test",
            taker.pid
        ),
        format!("expired token={token} holder=old postgres {}", holder.pid),
        format!(
            "granted token={next} holder=new postgres {} pg_test",
            taker.pid
        ),
    ]);
    assert_eq!(story(db, "r", mark), told);
}

const TAKE: &str = "SELECT acquire_lease('r', 'new', '5min', '1min')";

fn ended_session_is_told() {
    let db = Db::of_waiters("0");
    let (mut holder, mut zombie, mut taker) = (db.session(), db.session(), db.session());
    let token = acquire_as(&mut holder, "old", "1 microsecond");
    zombie.exec(&format!("BEGIN; SELECT fence('r', {token})"));
    db.cluster.wait_until_idle(zombie.pid);
    let mark = last(&db);
    let next: i64 = taker.one(TAKE);
    // his application is not known to who ends him
    let ended = format!(
        "session_ended token={token} holder=old 57P01 postgres {}",
        zombie.pid
    );
    is_taken(&db, mark, token, next, &holder, &taker, &[ended]);
    assert!(zombie.err("SELECT 1").is_lost());
    // one that was granted it and has not committed
    assert!(taker.release("r", next));
    let mut zombie = db.session();
    zombie.exec("BEGIN");
    let token = acquire_as(&mut zombie, "old", "1 microsecond");
    db.cluster.wait_until_idle(zombie.pid);
    let mark = last(&db);
    let next: i64 = taker.one(TAKE);
    assert_eq!(
        story(&db, "r", mark),
        [
            format!(
                "session_ended token={token} holder=old 57P01 postgres {}",
                zombie.pid
            ),
            format!(
                "granted token={next} holder=new postgres {} pg_test",
                taker.pid
            ),
        ]
    );
}

fn cancelled_statement_is_told() {
    let db = Db::of_waiters("0");
    let (mut holder, mut zombie, mut taker) = (db.session(), db.session(), db.session());
    let token = acquire_as(&mut holder, "old", "1 microsecond");
    zombie.exec(&format!("BEGIN; SELECT fence('r', {token})"));
    let running = zombie.spawn("SELECT pg_sleep(3600)");
    let asleep = format!(
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {} AND wait_event = 'PgSleep')",
        running.pid
    );
    db.cluster.wait_sql(&asleep, "the sleep");
    let mark = last(&db);
    let next: i64 = taker.one(TAKE);
    let ended = format!(
        "session_ended token={token} holder=old 57014 postgres {}",
        running.pid
    );
    is_taken(&db, mark, token, next, &holder, &taker, &[ended]);
    running.failed().1.is("57014");
}

fn drain_is_told() {
    let db = Db::new();
    let (mut s, mut writer) = (db.session(), db.session());
    let token = acquire_as(&mut s, "old", "5min");
    writer.exec(&format!("BEGIN; SELECT fence('r', {token})"));
    let mark = last(&db);
    assert!(s.release("r", token));
    let taker = db.session().spawn(TAKE);
    wait_for("the drain", || {
        (s.state_of("r") == "draining").then_some(())
    });
    // once it is seen to wait it has tried the fence
    db.wait_queue("r", &[taker.pid]);
    writer.exec("COMMIT");
    let (taker, next) = taker.granted();
    assert_eq!(
        story(&db, "r", mark),
        [
            format!(
                "released token={token} holder=old postgres {} pg_test",
                s.pid
            ),
            format!(
                "drained token={token} holder=old postgres {} pg_test",
                taker.pid
            ),
            format!(
                "granted token={next} holder=new postgres {} pg_test",
                taker.pid
            ),
        ]
    );
}

fn shed_is_told() {
    let db = Db::with(&[("leasehold.max_waiters", "0")]);
    let alice = login(&db, "alice");
    let mut a = session_of(&db, &alice, "app a");
    let mut s = db.session();
    s.acquire("r");
    s.acquire("q");
    let mark = last(&db);
    a.err("SELECT acquire_lease('r', 'me', wait => '1s')")
        .is("LH005");
    a.err("CALL await_lease('q', 'me')").is("LH005");
    let told = format!("shed holder=me LH005 {alice} {} app a", a.pid);
    assert_eq!(story(&db, "r", mark), std::slice::from_ref(&told));
    assert_eq!(story(&db, "q", mark), [told]);
    // of a storm, one a second
    for _ in 0..1000 {
        a.err("SELECT acquire_lease('r', wait => '1s')").is("LH005");
    }
    let told = story(&db, "r", mark).len();
    assert!(told < 500, "1000 refusals gave {told} events");
}

fn break_is_told() {
    let db = Db::new();
    let (mut s, mut admin) = (db.session(), session_of(&db, "postgres", "the admin"));
    let token = acquire_as(&mut s, "old", "5min");
    let mark = last(&db);
    admin.exec("BEGIN; SELECT break_lease('r')");
    assert!(story(&db, "r", mark).is_empty(), "it comes with the commit");
    admin.exec("COMMIT");
    let broken = format!(
        "broken token={token} holder=old postgres {} the admin",
        admin.pid
    );
    assert_eq!(story(&db, "r", mark), std::slice::from_ref(&broken));
    s.try_fence("r", token).expect_err("broken").is("LH004");
    let refused = format!(
        "write_refused token={token} presented={token} holder=old LH004 postgres {} pg_test",
        s.pid
    );
    assert_eq!(story(&db, "r", mark), [broken, refused]);
}

fn end_by_the_clock_is_told_once() {
    let db = Db::new();
    let mut s = db.session();
    let token = acquire_as(&mut s, "old", "1 microsecond");
    let mark = last(&db);
    // a taker that goes back on it
    for _ in 0..2 {
        s.exec("BEGIN");
        acquire_as(&mut s, "undone", "5min");
        s.exec("ROLLBACK");
    }
    let next = acquire_as(&mut s, "new", "5min");
    assert_eq!(
        story(&db, "r", mark),
        [
            format!("expired token={token} holder=old postgres {}", s.pid),
            format!("granted token={next} holder=new postgres {} pg_test", s.pid),
        ]
    );
}

fn reclaimed_lease_has_expired() {
    let db = Db::with(&[("leasehold.max_leases", "16")]);
    let mut s = db.session();
    let token = acquire_as(&mut s, "old", "1 microsecond");
    let mark = last(&db);
    for n in 0..100 {
        s.acquire_expired(&format!("x{n}"));
    }
    let expired = format!("expired token={token} holder=old postgres {}", s.pid);
    assert_eq!(story(&db, "r", mark), std::slice::from_ref(&expired));
    // and when it is granted next that is all
    let next = acquire_as(&mut s, "new", "5min");
    let granted = format!("granted token={next} holder=new postgres {} pg_test", s.pid);
    assert_eq!(story(&db, "r", mark), [expired, granted]);
    let same: bool = s.one(
        "SELECT (SELECT count(*) FROM leasehold.events WHERE event = 'expired')
              = (SELECT expiries FROM leasehold.stats)",
    );
    assert!(same);
}

fn what_is_undone_is_not_told() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("BEGIN");
    s.acquire("r");
    s.exec("ROLLBACK");
    s.exec("BEGIN; SAVEPOINT a");
    s.acquire("r");
    s.exec("ROLLBACK TO a; COMMIT");
    s.err("SELECT acquire_lease('r'), 1 / (random() * 0)::int")
        .is("22012");
    assert!(story(&db, "r", 0).is_empty());
    // it is told with the commit, and not before
    s.exec("BEGIN");
    let token = acquire_as(&mut s, "me", "5min");
    assert!(story(&db, "r", 0).is_empty());
    s.exec("COMMIT");
    let granted = format!("granted token={token} holder=me postgres {} pg_test", s.pid);
    assert_eq!(story(&db, "r", 0), [granted]);
    let mark = last(&db);
    s.exec(&format!(
        "BEGIN; SELECT release_lease('r', {token}), break_lease('r'); ROLLBACK"
    ));
    assert!(story(&db, "r", mark).is_empty());
    // a renewal is not undone
    s.exec(&format!(
        "BEGIN; SELECT renew_lease('r', {token}); ROLLBACK"
    ));
    let renewed = format!("renewed token={token} holder=me postgres {} pg_test", s.pid);
    assert_eq!(story(&db, "r", mark), [renewed]);
}

fn refusal_in_what_is_undone_is_told() {
    let db = Db::new();
    with_doc(&db);
    let mut s = db.session();
    let (stale, token) = s.stale_and_current("r");
    let mark = last(&db);
    s.exec(&format!(
        "BEGIN; SAVEPOINT a; SET LOCAL leasehold.token = '{stale}'"
    ));
    s.err("UPDATE doc SET n = 1").is("LH001");
    s.exec("ROLLBACK TO a; ROLLBACK");
    s.exec(
        "BEGIN;
         DO $$ BEGIN INSERT INTO doc VALUES (1); EXCEPTION WHEN SQLSTATE 'LH003' THEN NULL; END $$;
         ROLLBACK",
    );
    let told = story(&db, "r", mark);
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told[0].starts_with(&format!("write_refused token={token} presented={stale} ")));
    assert!(told[0].contains(" LH001 doc ") && told[1].starts_with("write_refused LH003 doc "));
}

fn leases_in_memory_are_told_alike() {
    let db = Db::new();
    let mut s = db.session_with_options("-c leasehold.durability=memory");
    let by = format!("postgres {} pg_test", s.pid);
    let old = acquire_as(&mut s, "old", "1 microsecond");
    let new = acquire_as(&mut s, "new", "5min");
    assert!(s.renew("r", new) && s.release("r", new));
    assert_eq!(
        story(&db, "r", 0),
        [
            format!("granted token={old} holder=old {by}"),
            format!("expired token={old} holder=old postgres {}", s.pid),
            format!("granted token={new} holder=new {by}"),
            format!("renewed token={new} holder=new {by}"),
            format!("released token={new} holder=new {by}"),
        ]
    );
}

fn names_are_told_in_full() {
    let db = Db::new();
    let application = "a".repeat(63);
    for (resource, holder) in [
        ("x".repeat(255), "h".repeat(127)),
        ("漢".repeat(85), "é".repeat(63)),
        ("it's \"r\"\n".to_owned(), "\\".to_owned()),
    ] {
        let mut s = session_of(&db, "postgres", &application);
        let mark = last(&db);
        let token: i64 = s.one_with(
            "SELECT acquire_lease($1, $2, ttl => '5min')",
            &[&resource, &holder],
        );
        let same: bool = s.one_with(
            "SELECT count(*) = 1 FROM leasehold.events
              WHERE seq > $1 AND (resource, holder, application_name, token) = ($2, $3, $4, $5)",
            &[&mark, &resource, &holder, &application, &token],
        );
        assert!(same, "{:?}", s.rows("TABLE leasehold.events"));
        assert!(s.release(&resource, token));
    }
    // who has no application_name has none
    let mut s = session_of(&db, "postgres", "");
    s.exec("SET application_name = ''");
    let token = acquire_as(&mut s, "me", "5min");
    let granted = format!("granted token={token} holder=me postgres {}", s.pid);
    assert_eq!(story(&db, "r", 0), [granted]);
}

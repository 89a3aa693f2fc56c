//! Layer wait, part breaks: an administrator ends a lease, for good, whatever its holder does.

use std::sync::Arc;

use crate::cluster::{Cluster, Db, Stop, wait_for};
use crate::environment::{environment, run};
use crate::session::Session;

crate::tests![
    broken_lease_is_over,
    nothing_to_break,
    break_of_what_is_being_granted_says_so,
    expired_lease_is_closed_by_a_break,
    break_takes_effect_with_the_commit,
    broken_token_stays_closed_over_restarts,
    broken_token_stays_closed_when_displaced,
    broken_lease_is_a_waiters,
    break_of_a_lease_of_before_the_restart,
    break_in_memory,
    broken_token_is_closed_before_the_locks_go,
    break_against_a_release,
    break_against_a_break,
    break_that_is_undone_leaves_the_other_one,
    undone_break_is_nothing_after_a_restart,
    undone_break_is_nothing_once_its_transaction_is_forgotten,
    break_holds_no_taker_up,
    break_is_for_administrators,
    break_in_a_read_only_transaction,
    break_cannot_be_prepared,
    break_drains_who_is_inside,
];

#[track_caller]
fn break_lease(s: &mut Session) -> Option<i64> {
    s.one("SELECT break_lease('r')")
}

fn with_doc(db: &Db) {
    db.session()
        .exec("CREATE TABLE doc AS SELECT 0 AS n; SELECT fence_table('doc', 'r')");
}

/// Nothing can be done under the token of a lease that was broken; it says so as long as it is known.
#[track_caller]
fn is_closed(db: &Db, token: i64, sqlstate: &str) {
    let mut s = db.session();
    assert!(!s.check_fence("r", token), "check_fence");
    assert!(!s.renew("r", token), "renewed");
    assert!(!s.release("r", token), "released");
    for sql in [
        format!("SELECT fence('r', {token})"),
        format!("BEGIN; SET LOCAL leasehold.token = '{token}'; UPDATE doc SET n = n + 1"),
    ] {
        let error = db.refused(&mut s, &sql, sqlstate);
        if sqlstate == "LH004" {
            error.details("ended by an administrator");
        }
    }
}

fn broken_lease_is_over() {
    let db = Db::new();
    with_doc(&db);
    let (mut s, mut admin) = (db.session(), db.session());
    let token = s.acquire("r");
    s.exec(&format!(
        "BEGIN; SELECT fence('r', {token}); UPDATE doc SET n = 1; COMMIT"
    ));
    assert_eq!(break_lease(&mut admin), Some(token));
    is_closed(&db, token, "LH004");
    assert_eq!(admin.state_of("r"), "free");
    assert_eq!(admin.one::<i64>("SELECT count(*) FROM leasehold.leases"), 0);
    let next = admin.acquire("r");
    assert!(next > token);
    is_closed(&db, token, "LH001");
    assert!(admin.check_fence("r", next));
    assert_eq!(admin.one::<i32>("SELECT n FROM doc"), 1);
}

fn nothing_to_break() {
    let db = Db::new();
    let mut s = db.session();
    assert_eq!(break_lease(&mut s), None, "never granted");
    let token = s.acquire("r");
    assert!(s.release("r", token));
    assert_eq!(break_lease(&mut s), None, "released");
    assert!(
        s.release("r", token),
        "a break of nothing has done something"
    );
    let token = s.acquire("r");
    assert_eq!(break_lease(&mut s), Some(token));
    assert_eq!(break_lease(&mut s), None, "broken twice");
    s.exec("BEGIN");
    s.acquire("r");
    s.exec("ROLLBACK");
    assert_eq!(break_lease(&mut s), None, "rolled back");
    for (name, sqlstate) in [("NULL", "22004"), ("''", "22023")] {
        db.refused(&mut s, &format!("SELECT break_lease({name})"), sqlstate);
    }
    db.refused(&mut s, "SELECT break_lease(repeat('x', 256))", "22001");
}

fn break_of_what_is_being_granted_says_so() {
    let db = Db::new();
    let (mut s, mut holder) = (db.session(), db.session());
    s.exec("SET log_min_messages = notice");
    let pid = holder.pid;
    holder.exec("BEGIN; SELECT acquire_lease('r')");
    assert_eq!(s.state_of("r"), "held");
    assert_eq!(break_lease(&mut s), None);
    wait_for("the notice", || {
        let log = db.cluster.log();
        (log.contains("is just being granted")
            && log.contains(&format!("pg_terminate_backend({pid})")))
        .then_some(())
    });
    // what it says to do helps
    s.terminate(pid);
    wait_for("the resource", || s.try_acquire("r"));
}

/// Its holder could still write, as long as nobody wants the resource.
fn expired_lease_is_closed_by_a_break() {
    let db = Db::new();
    with_doc(&db);
    let (mut s, mut admin) = (db.session(), db.session());
    let token = s.acquire_expired("r");
    s.exec(&format!(
        "BEGIN; SELECT fence('r', {token}); UPDATE doc SET n = 1; COMMIT"
    ));
    assert_eq!(break_lease(&mut admin), Some(token));
    is_closed(&db, token, "LH004");
    assert_eq!(break_lease(&mut admin), None);
}

fn break_takes_effect_with_the_commit() {
    let db = Db::new();
    with_doc(&db);
    let (mut s, mut admin) = (db.session(), db.session());
    let token = s.acquire("r");
    let before = db.state();
    for undo in ["ROLLBACK", "ROLLBACK TO a", "SELECT 1/0"] {
        admin.exec("BEGIN; SAVEPOINT a");
        assert_eq!(break_lease(&mut admin), Some(token));
        assert!(s.check_fence("r", token), "broken before the commit");
        assert_eq!(s.try_acquire("r"), None, "free before the commit");
        if undo == "SELECT 1/0" {
            admin.err(undo).is("22012");
            admin.exec("ROLLBACK");
        } else {
            admin.exec(undo);
            admin.exec("COMMIT");
        }
        assert!(s.check_fence("r", token), "broken by {undo}");
        assert_eq!(db.state(), before, "{undo}");
    }
    // to a savepoint that is kept
    admin.exec("BEGIN; SAVEPOINT a");
    assert_eq!(break_lease(&mut admin), Some(token));
    admin.exec("RELEASE a");
    s.exec(&format!(
        "BEGIN; SELECT fence('r', {token}); UPDATE doc SET n = 1; COMMIT"
    ));
    assert!(s.renew("r", token));
    admin.exec("COMMIT");
    is_closed(&db, token, "LH004");
    // an undone one is not written either
    let token = s.acquire("r");
    admin.exec("BEGIN");
    assert_eq!(break_lease(&mut admin), Some(token));
    admin.exec("ROLLBACK");
    assert_eq!(break_lease(&mut admin), Some(token));
    is_closed(&db, token, "LH004");
}

fn broken_token_stays_closed_over_restarts() {
    for how in [Stop::Fast, Stop::Immediate] {
        let db = Db::of_waiters("1h");
        with_doc(&db);
        let mut s = db.session();
        let token = s.acquire("r");
        assert_eq!(break_lease(&mut s), Some(token));
        drop(s);
        db.cluster.restart(how);
        // it is not held until its TTL has passed
        let mut s = db.session();
        assert_eq!(s.state_of("r"), "free", "after {how:?}");
        assert_eq!(
            s.one::<i64>("SELECT count(*) FROM leasehold.leases"),
            0,
            "after {how:?}"
        );
        is_closed(&db, token, "LH004");
        db.cluster.restart(how);
        is_closed(&db, token, "LH004");
        let mut s = db.session();
        assert_eq!(break_lease(&mut s), None);
        assert!(s.acquire("r") > token);
        // one whose break is undone by the restart lives on
        let kept = s.one::<i64>("SELECT token FROM lease_info('r')");
        s.exec("BEGIN");
        assert_eq!(break_lease(&mut s), Some(kept));
        db.session().exec("CHECKPOINT");
        drop(s);
        db.cluster.restart(how);
        let mut s = db.session();
        assert_eq!(s.try_acquire("r"), None, "free after {how:?}");
        assert!(s.renew("r", kept));
    }
}

/// Pushes what is over out of a small table. `with`: what no other call has used, as a release may not outlive a crash.
fn displace(s: &mut Session, with: &str) {
    for i in 0..60 {
        let name = format!("{with} {i}");
        let token = s.acquire(&name);
        assert!(s.release(&name, token));
    }
}

fn broken_token_stays_closed_when_displaced() {
    let builder = Cluster::builder()
        .conf("leasehold.max_leases", "8")
        .conf("leasehold.zombie_grace", "1h");
    let db = Db::on(&Arc::new(builder.start()));
    with_doc(&db);
    let mut s = db.session();
    let token = s.acquire("r");
    assert_eq!(break_lease(&mut s), Some(token));
    displace(&mut s, "first");
    is_closed(&db, token, "LH004");
    assert_eq!(break_lease(&mut s), None);
    assert!(!s.release("r", token));
    // an expired one, long displaced
    let token = s.acquire_expired("r");
    displace(&mut s, "second");
    let broken = break_lease(&mut s);
    assert!(
        broken.is_none() || broken == Some(token),
        "another token: {broken:?}"
    );
    assert!(!s.check_fence("r", token), "open after a break");
    // and one that is broken while the table is full of live ones
    let token = s.acquire("r");
    assert_eq!(break_lease(&mut s), Some(token));
    drop(s);
    db.cluster.restart(Stop::Immediate);
    displace(&mut db.session(), "third");
    is_closed(&db, token, "LH004");
}

fn broken_lease_is_a_waiters() {
    let db = Db::new();
    let (mut s, mut admin) = (db.session(), db.session());
    let token = s.acquire("r");
    let (mut first, second) = (db.waiter(), db.waiter());
    admin.exec("BEGIN");
    assert_eq!(break_lease(&mut admin), Some(token));
    assert!(!first.is_done());
    assert_eq!(s.queue("r"), [first.pid, second.pid]);
    admin.exec("COMMIT");
    let (_, next) = first.granted();
    assert!(next > token);
    assert_eq!(s.queue("r"), [second.pid]);
    assert_eq!(break_lease(&mut admin), Some(next));
    second.granted();
}

/// Nobody has touched it since: only the ledger knows it.
fn break_of_a_lease_of_before_the_restart() {
    let db = Db::of_waiters("1h");
    with_doc(&db);
    let token = db.session().acquire("r");
    db.cluster.restart(Stop::Immediate);
    let mut s = db.session();
    assert_eq!(break_lease(&mut s), Some(token));
    is_closed(&db, token, "LH004");
    assert!(s.acquire("r") > token);
    // where there is no room in the table for it
    let builder = Cluster::builder()
        .conf("leasehold.max_leases", "1")
        .conf("leasehold.zombie_grace", "1h");
    let db = Db::on(&Arc::new(builder.start()));
    with_doc(&db);
    let token = db.session().acquire("r");
    db.cluster.restart(Stop::Immediate);
    let mut s = db.session();
    let mut full = 0;
    let refused = loop {
        match s.try_one::<Option<i64>>(&format!(
            "SELECT acquire_lease('full {full}', ttl => '5min')"
        )) {
            Ok(_) => full += 1,
            Err(error) => break error,
        }
    };
    refused.is("LH006");
    assert_eq!(break_lease(&mut s), Some(token));
    assert_eq!(s.state_of("r"), "free");
    assert!(!s.check_fence("r", token));
    assert_eq!(break_lease(&mut s), None);
}

fn break_in_memory() {
    let db = Db::of_waiters("1h");
    with_doc(&db);
    let mut s = db.session_with_options("-c leasehold.durability=memory");
    let token = s.acquire("r");
    let mut admin = db.session();
    assert_eq!(break_lease(&mut admin), Some(token));
    is_closed(&db, token, "LH004");
    assert_eq!(break_lease(&mut admin), None);
    let next = s.acquire("r");
    assert!(next > token);
    admin.exec("BEGIN");
    assert_eq!(break_lease(&mut admin), Some(next));
    admin.exec("ROLLBACK");
    assert!(s.check_fence("r", next));
    // after a durable one, whose row is still there
    assert_eq!(break_lease(&mut admin), Some(next));
    let durable = admin.acquire("r");
    assert!(admin.release("r", durable));
    let token = s.acquire("r");
    assert_eq!(break_lease(&mut admin), Some(token));
    is_closed(&db, token, "LH004");
}

/// The holder waits for a row of the administrator's transaction, which goes on to hold many locks.
fn broken_token_is_closed_before_the_locks_go() {
    let db = Db::new();
    with_doc(&db);
    let mut admin = db.session();
    for _ in 0..5 {
        let mut holder = db.session();
        let token = holder.acquire("r");
        admin.exec(&format!(
            "BEGIN; SELECT fence('r', {token}); UPDATE doc SET n = 7;
             SELECT pg_advisory_xact_lock(n) FROM generate_series(1, 3000) AS n"
        ));
        holder.exec(&format!("SET leasehold.token = '{token}'"));
        let pid = holder.pid;
        let late = holder.spawn("UPDATE doc SET n = 1");
        db.cluster.wait_until_blocked(pid);
        assert_eq!(break_lease(&mut admin), Some(token));
        admin.exec("COMMIT");
        late.failed().1.is("LH004").details("administrator");
        assert_eq!(admin.one::<i32>("SELECT n FROM doc"), 7);
    }
}

fn break_against_a_release() {
    let db = Db::new();
    with_doc(&db);
    let (mut s, mut admin) = (db.session(), db.session());
    // released first, broken at the commit: it is over, and nothing breaks what follows
    let token = s.acquire("r");
    admin.exec("BEGIN");
    assert_eq!(break_lease(&mut admin), Some(token));
    assert!(s.release("r", token));
    let next = s.acquire("r");
    admin.exec("COMMIT");
    assert!(s.check_fence("r", next), "another lease was broken");
    assert_eq!(db.session().try_acquire("r"), None);
    // broken first, released at the commit
    s.exec("BEGIN");
    assert!(s.release("r", next));
    assert_eq!(break_lease(&mut admin), Some(next));
    let third = admin.acquire("r");
    s.exec("COMMIT");
    assert!(admin.check_fence("r", third), "another lease was released");
    // both by one transaction
    admin.exec("BEGIN");
    assert!(admin.release("r", third));
    assert_eq!(break_lease(&mut admin), Some(third));
    admin.exec("COMMIT");
    assert!(!admin.check_fence("r", third));
    assert!(admin.acquire("r") > third);
}

fn break_against_a_break() {
    let db = Db::new();
    with_doc(&db);
    let (mut first, second) = (db.session(), db.session());
    let token = first.acquire("r");
    for end in ["ROLLBACK", "COMMIT"] {
        first.exec("BEGIN");
        assert_eq!(break_lease(&mut first), Some(token));
        assert_eq!(break_lease(&mut first), Some(token), "{end}");
        first.exec(end);
    }
    is_closed(&db, token, "LH004");
    // at the same time: one after the other, and both come to an end
    let token = first.acquire("r");
    first.exec("BEGIN");
    assert_eq!(break_lease(&mut first), Some(token));
    let other = second.spawn("SELECT break_lease('r')");
    first.exec("COMMIT");
    let broken = other.join().1.expect("it comes to an end");
    assert!(
        broken.is_none() || broken == Some(token.to_string()),
        "{broken:?}"
    );
    is_closed(&db, token, "LH004");
}

/// The ledger has one place for who broke a lease, and the last one to write it may be rolled back.
fn break_that_is_undone_leaves_the_other_one() {
    let db = Db::of_waiters("1h");
    with_doc(&db);
    let (mut first, mut second) = (db.session(), db.session());
    let token = first.acquire("r");
    for s in [&mut first, &mut second] {
        s.exec("BEGIN");
    }
    assert_eq!(break_lease(&mut first), Some(token));
    // the other waits for the first, as for a row that it has changed
    let other = second.spawn("SELECT break_lease('r')");
    db.cluster.wait_until_blocked(other.pid);
    first.exec("COMMIT");
    let (mut second, broken) = other.join();
    assert_eq!(broken.expect("it is not refused"), None, "broken already");
    second.exec("ROLLBACK");
    is_closed(&db, token, "LH004");
    drop((first, second));
    db.cluster.restart(Stop::Immediate);
    is_closed(&db, token, "LH004");
    // within one transaction
    let mut s = db.session();
    let token = s.acquire("r");
    s.exec("BEGIN");
    assert_eq!(break_lease(&mut s), Some(token));
    s.exec("SAVEPOINT a");
    break_lease(&mut s);
    s.exec("ROLLBACK TO a; COMMIT");
    is_closed(&db, token, "LH004");
    drop(s);
    db.cluster.restart(Stop::Immediate);
    is_closed(&db, token, "LH004");
}

/// What it wrote to the row of the ledger stays there, and counts for nothing.
fn undone_break_is_nothing_after_a_restart() {
    let db = Db::of_waiters("1h");
    let mut s = db.session();
    let (whole, part) = (s.acquire("whole"), s.acquire("part"));
    s.exec("BEGIN; SELECT break_lease('whole'); ROLLBACK");
    s.exec("BEGIN; SAVEPOINT a; SELECT break_lease('part'); ROLLBACK TO a; COMMIT");
    // a durable grant takes what was written before it to the disk
    s.acquire("other");
    drop(s);
    db.cluster.restart(Stop::Immediate);
    let mut s = db.session();
    for (resource, token) in [("whole", whole), ("part", part)] {
        assert!(s.check_fence(resource, token), "{resource}: broken");
        assert_eq!(s.try_acquire(resource), None, "{resource}: granted again");
    }
}

/// What PostgreSQL keeps of transactions ends somewhere: of older ones most have committed, this one has not.
fn undone_break_is_nothing_once_its_transaction_is_forgotten() {
    let db = Db::of_waiters("1h");
    let mut s = db.session();
    let token = s.acquire("r");
    s.exec("BEGIN; SELECT break_lease('r'); ROLLBACK");
    let next: i64 = s.one("SELECT pg_current_xact_id()::text::bigint");
    drop(s);
    db.cluster.stop(Stop::Fast);
    let mut command = environment().pg_command("pg_resetwal", db.cluster.dir());
    command.args(["--force", "--oldest-transaction-id", &next.to_string()]);
    run(command.arg(db.cluster.data()));
    db.cluster.start();
    let mut s = db.session();
    assert!(s.check_fence("r", token), "broken");
    assert_eq!(s.try_acquire("r"), None, "granted again");
}

/// It writes the row of the ledger, and is open for as long as its session likes.
fn break_holds_no_taker_up() {
    let db = Db::new();
    with_doc(&db);
    let (mut s, mut admin) = (db.session(), db.session());
    for end in ["COMMIT", "ROLLBACK"] {
        let token: i64 = s.one("SELECT acquire_lease('r', ttl => '500ms')");
        admin.exec("BEGIN");
        assert_eq!(break_lease(&mut admin), Some(token));
        let next = wait_for("the grant", || s.try_acquire("r"));
        admin.exec(end);
        assert!(s.check_fence("r", next), "another lease was broken");
        // a renewal that the ledger must know, and a release
        let token = next;
        admin.exec("BEGIN");
        assert_eq!(break_lease(&mut admin), Some(token));
        assert!(s.release("r", token));
        let token: i64 = s.one("SELECT acquire_lease('r', ttl => '1min')");
        assert!(s.one::<bool>(&format!("SELECT renew_lease('r', {token}, '5min')")));
        admin.exec(end);
        assert!(s.check_fence("r", token), "another lease was broken");
        assert!(s.release("r", token));
    }
}

fn break_is_for_administrators() {
    let db = Db::new();
    let (owner, other) = (db.role(), db.role());
    let mut holder = db.session_as(&owner);
    let token = holder.acquire("r");
    // not even of one's own lease: that is what a release is for
    for role in [&owner, &other] {
        let mut s = db.session_as(role);
        for resource in ["r", "free"] {
            let sql = format!("SELECT break_lease('{resource}')");
            let error = db.refused(&mut s, &sql, "42501");
            error
                .details("pg_signal_backend")
                .hints_at("pg_signal_backend");
        }
    }
    db.session()
        .exec(&format!("GRANT pg_signal_backend TO {other}"));
    let mut admin = db.session_as(&other);
    assert_eq!(break_lease(&mut admin), Some(token));
    assert!(!holder.check_fence("r", token));
    // which needs no other right
    let token = holder.acquire("r");
    assert!(admin.err("SELECT * FROM leasehold.ledger").sqlstate == "42501");
    assert_eq!(break_lease(&mut admin), Some(token));
    db.session()
        .exec(&format!("REVOKE pg_signal_backend FROM {other}"));
    db.refused(&mut admin, "SELECT break_lease('r')", "42501");
}

fn break_in_a_read_only_transaction() {
    let db = Db::new();
    let mut s = db.session();
    let token = s.acquire("r");
    let error = db.refused(&mut s, "BEGIN READ ONLY; SELECT break_lease('r')", "25006");
    error.tells("break_lease()");
    assert!(s.check_fence("r", token));
    // at any level of the others
    for (n, level) in ["REPEATABLE READ", "SERIALIZABLE"].iter().enumerate() {
        if n > 0 {
            s.acquire("r");
        }
        s.exec(&format!("BEGIN ISOLATION LEVEL {level}; SELECT 1"));
        assert!(break_lease(&mut s).is_some());
        s.exec("COMMIT");
        assert_eq!(s.state_of("r"), "free");
    }
}

fn break_cannot_be_prepared() {
    let db = Db::new();
    let (mut s, mut admin) = (db.session(), db.session());
    let token = s.acquire("r");
    admin.exec("BEGIN");
    assert_eq!(break_lease(&mut admin), Some(token));
    let error = admin.err("PREPARE TRANSACTION 'broken'");
    error.is("0A000").well_written().tells("r");
    admin.exec("ROLLBACK");
    assert!(s.check_fence("r", token), "the lease is broken");
    assert_eq!(
        admin.one::<i64>("SELECT count(*) FROM pg_prepared_xacts"),
        0
    );
    assert_eq!(break_lease(&mut admin), Some(token));
}

/// A transaction that is inside under the lease when it is broken ends as one under a lease that was released: the
/// taker waits for it, or ends it.
fn break_drains_who_is_inside() {
    let db = Db::of_waiters("1h");
    with_doc(&db);
    let (mut s, mut admin) = (db.session(), db.session());
    let token = s.acquire("r");
    s.exec(&format!(
        "BEGIN; SELECT fence('r', {token}); UPDATE doc SET n = 1"
    ));
    assert_eq!(break_lease(&mut admin), Some(token), "the break waits");
    assert_eq!(admin.try_acquire("r"), None);
    assert_eq!(admin.state_of("r"), "draining");
    s.exec("COMMIT");
    assert!(admin.acquire("r") > token);
    assert_eq!(admin.one::<i32>("SELECT n FROM doc"), 1);
    // with a grace of nothing the taker ends it
    let db = Db::of_waiters("0");
    with_doc(&db);
    let (mut s, mut admin) = (db.session(), db.session());
    let token = s.acquire("r");
    s.exec(&format!(
        "BEGIN; SELECT fence('r', {token}); UPDATE doc SET n = 1"
    ));
    assert_eq!(break_lease(&mut admin), Some(token));
    wait_for("the grant", || admin.try_acquire("r"));
    assert!(s.err("COMMIT").is_lost());
    assert_eq!(admin.one::<i32>("SELECT n FROM doc"), 0);
}

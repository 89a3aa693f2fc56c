//! Layer rights, part quota: how many live leases a role may hold in a database.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Barrier};
use std::thread;

use crate::cluster::{Cluster, Db, Stop, wait_for};
use crate::queueing::{AWAIT, WAIT};
use crate::rights::login;
use crate::session::Session;

crate::tests![
    zero_is_no_quota,
    one_more_than_the_quota_is_refused,
    leases_that_are_over_do_not_count,
    grants_that_are_undone_do_not_count,
    grant_in_progress_counts,
    last_one_is_had_by_one_of_two,
    many_at_once_never_hold_more,
    counted_for_each_role_and_database,
    current_role_is_counted,
    quota_is_set_for_roles_and_by_reload,
    only_a_superuser_sets_the_quota,
    waiter_over_the_quota_lets_the_next_one_go_first,
    leases_in_memory_count,
    leases_count_after_a_restart_once_they_are_seen,
    retry_by_request_needs_no_room,
    lease_over_the_quota_goes_on,
];

/// A database, and a role of it that may hold so many.
fn limited(quota: u32) -> (Db, String) {
    let db = Db::new();
    let role = login(&db, "limited");
    limit(&db, &role, quota);
    (db, role)
}

/// For the sessions that come from here on.
fn limit(db: &Db, role: &str, quota: u32) {
    db.session().exec(&format!(
        "ALTER ROLE {role} SET leasehold.max_leases_per_role = {quota}"
    ));
}

/// 53400, and how many it is that are held.
#[track_caller]
fn is_full(db: &Db, s: &mut Session, sql: &str, role: &str, held: usize, quota: usize) {
    db.refused(s, sql, "53400")
        .details(&format!("\"{role}\""))
        .details(&format!("holds {held} leases"))
        .details(&format!("leasehold.max_leases_per_role is {quota}"))
        .hints_at("Release");
}

/// Room for one, and no more.
#[track_caller]
fn has_room_for_one(db: &Db, s: &mut Session, role: &str, quota: usize) {
    let token = s.acquire("one more");
    is_full(
        db,
        s,
        "SELECT acquire_lease('two more')",
        role,
        quota,
        quota,
    );
    assert!(s.release("one more", token));
}

fn zero_is_no_quota() {
    let db = Db::new();
    let role = login(&db, "any");
    let mut s = db.session_as(&role);
    assert_eq!(
        s.text("SHOW leasehold.max_leases_per_role").as_deref(),
        Some("0")
    );
    let held: i64 = s
        .one("SELECT count(acquire_lease('r' || i, ttl => '5min')) FROM generate_series(1, 300) i");
    assert_eq!(held, 300);
}

fn one_more_than_the_quota_is_refused() {
    for quota in [1, 3] {
        let (db, role) = limited(quota as u32);
        let mut s = db.session_as(&role);
        for n in 1..=quota {
            s.acquire(&format!("held {n}"));
        }
        for sql in [
            "SELECT acquire_lease('r')",
            "SELECT acquire_lease('r', request => gen_random_uuid())",
            WAIT,
            AWAIT,
        ] {
            is_full(&db, &mut s, sql, &role, quota, quota);
        }
        // in another session of the role too, and in memory, and in a block
        let mut other = db.session_as(&role);
        other.exec("SET leasehold.durability = memory; BEGIN");
        is_full(
            &db,
            &mut other,
            "SELECT acquire_lease('r')",
            &role,
            quota,
            quota,
        );
        // what is held is held
        assert_eq!(s.try_acquire("held 1"), None);
        // others are not counted with it
        db.session().acquire("r");
        assert_eq!(s.try_acquire("r"), None);
        // in one statement, one after the other
        let token: i64 = s.one("SELECT token FROM lease_info('held 1')");
        assert!(s.release("held 1", token));
        s.err("SELECT acquire_lease('a'), acquire_lease('b')")
            .is("53400");
        has_room_for_one(&db, &mut s, &role, quota);
    }
}

fn leases_that_are_over_do_not_count() {
    let (db, role) = limited(2);
    let mut s = db.session_as(&role);
    s.acquire("held");
    // expired, however many
    for n in 0..10 {
        s.acquire_expired(&format!("expired {n}"));
    }
    has_room_for_one(&db, &mut s, &role, 2);
    // but do again, granted anew
    let token = s.acquire("expired 0");
    is_full(&db, &mut s, "SELECT acquire_lease('q')", &role, 2, 2);
    assert!(s.release("expired 0", token));
    has_room_for_one(&db, &mut s, &role, 2);
    // released
    for _ in 0..3 {
        let token = s.acquire("r");
        is_full(&db, &mut s, "SELECT acquire_lease('q')", &role, 2, 2);
        s.exec(&format!("BEGIN; SELECT release_lease('r', {token})"));
        // which takes effect with the commit
        s.exec("SAVEPOINT a");
        s.err("SELECT acquire_lease('q')").is("53400");
        s.exec("ROLLBACK TO a; COMMIT");
        has_room_for_one(&db, &mut s, &role, 2);
    }
    // broken
    s.acquire("r");
    assert!(
        db.session()
            .one::<Option<i64>>("SELECT break_lease('r')")
            .is_some()
    );
    has_room_for_one(&db, &mut s, &role, 2);
    // taken over by another role
    s.acquire_expired("r");
    db.session().acquire("r");
    has_room_for_one(&db, &mut s, &role, 2);
    // expired within the wait for it, by the clock alone
    let token: i64 = s.one("SELECT acquire_lease('short', ttl => '300ms')");
    wait_for("the end of the lease", || {
        let refused = s.try_one::<Option<i64>>("SELECT acquire_lease('q', ttl => '5min')");
        refused.map_err(|error| error.is("53400")).ok()
    });
    assert_eq!(s.state_of("short"), "expired");
    assert!(!s.renew("short", token));
}

fn grants_that_are_undone_do_not_count() {
    let (db, role) = limited(2);
    let mut s = db.session_as(&role);
    s.acquire("held");
    for (begin, undo) in [
        ("BEGIN", "ROLLBACK"),
        ("BEGIN; SAVEPOINT a", "ROLLBACK TO a; COMMIT"),
        (
            "BEGIN; SAVEPOINT a; SAVEPOINT b",
            "RELEASE b; ROLLBACK TO a; COMMIT",
        ),
    ] {
        s.exec(begin);
        s.acquire("r");
        s.exec("SAVEPOINT at_most");
        s.err("SELECT acquire_lease('q')").is("53400");
        s.exec("ROLLBACK TO at_most");
        s.exec(undo);
        has_room_for_one(&db, &mut s, &role, 2);
        // before anything else has touched the resource
        s.exec("BEGIN");
        s.acquire("never seen before");
        s.exec("ROLLBACK");
        has_room_for_one(&db, &mut s, &role, 2);
    }
    // by an error, by a refusal, and by the end of the session
    s.err("SELECT acquire_lease('r'), 1 / (random() * 0)::int")
        .is("22012");
    s.err("SELECT acquire_lease('r'), acquire_lease('q')")
        .is("53400");
    has_room_for_one(&db, &mut s, &role, 2);
    let mut gone = db.session_as(&role);
    gone.exec("BEGIN");
    gone.acquire("r");
    let pid = gone.pid;
    drop(gone);
    db.cluster.wait_until_left(pid);
    has_room_for_one(&db, &mut s, &role, 2);
}

fn grant_in_progress_counts() {
    let (db, role) = limited(2);
    let (mut s, mut other) = (db.session_as(&role), db.session_as(&role));
    s.acquire("held");
    for end in ["ROLLBACK", "COMMIT"] {
        other.exec("BEGIN");
        let token = other.acquire("r");
        is_full(&db, &mut s, "SELECT acquire_lease('q')", &role, 2, 2);
        other.exec(end);
        if end == "COMMIT" {
            is_full(&db, &mut s, "SELECT acquire_lease('q')", &role, 2, 2);
            assert!(other.release("r", token));
        }
        has_room_for_one(&db, &mut s, &role, 2);
    }
    // one whose lease would be over by now, but that is not committed
    other.exec("BEGIN");
    other.acquire_expired("r");
    is_full(&db, &mut s, "SELECT acquire_lease('q')", &role, 2, 2);
    other.exec("COMMIT");
}

/// Both ask at the same moment, for two resources, where there is room for one.
fn last_one_is_had_by_one_of_two() {
    let (db, role) = limited(2);
    db.session_as(&role).acquire("held");
    let barrier = Barrier::new(2);
    let rounds = 400;
    let results: Vec<Vec<Option<i64>>> = thread::scope(|scope| {
        let racers: Vec<_> = (0..2)
            .map(|racer| {
                let (db, barrier, role) = (&db, &barrier, &role);
                scope.spawn(move || {
                    let mut s = db.session_as(role);
                    let mut results = Vec::new();
                    for round in 0..rounds {
                        // of new resources, and of those that both have had before, in turn
                        let place = if round % 2 == 0 { racer } else { 1 - racer };
                        let resource =
                            format!("r{place} {}", if round % 3 == 0 { round } else { 0 });
                        // alone, and in a block
                        let in_block = round % 4 == 3;
                        barrier.wait();
                        if in_block {
                            s.exec("BEGIN");
                        }
                        let result = s.try_one_with::<Option<i64>>(
                            "SELECT acquire_lease($1, ttl => '5min')",
                            &[&resource],
                        );
                        let token = match result {
                            Ok(token) => Some(token.expect("it is free")),
                            Err(error) => {
                                error.is("53400").well_written();
                                None
                            }
                        };
                        // undone only when both have their answers
                        barrier.wait();
                        if in_block {
                            s.exec("ROLLBACK");
                        } else if let Some(token) = token {
                            assert!(s.release(&resource, token));
                        }
                        results.push(token);
                    }
                    results
                })
            })
            .collect();
        let joined = racers
            .into_iter()
            .map(|racer| racer.join().expect("a racer"));
        joined.collect()
    });
    for (round, grants) in results[0].iter().zip(&results[1]).enumerate() {
        let is_one = matches!(grants, (Some(_), None) | (None, Some(_)));
        assert!(is_one, "round {round}: {grants:?}");
    }
}

/// Sessions that come and go as they like; whoever has been granted one counts all that are held by then.
fn many_at_once_never_hold_more() {
    let quota = 3;
    let (db, role) = limited(quota);
    let (held, most, granted) = (AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0));
    thread::scope(|scope| {
        for client in 0..6_u32 {
            let (db, role, held, most, granted) = (&db, &role, &held, &most, &granted);
            scope.spawn(move || {
                let mut s = db.session_as(role);
                for round in 0..150 {
                    let resource = format!("r{}", (client * 7 + round) % 11);
                    let sql = "SELECT acquire_lease($1, ttl => '5min')";
                    match s.try_one_with::<Option<i64>>(sql, &[&resource]) {
                        Ok(Some(token)) => {
                            // counted later than it is held, and no more before it is released
                            most.fetch_max(held.fetch_add(1, SeqCst) + 1, SeqCst);
                            granted.fetch_add(1, SeqCst);
                            assert!(s.check_fence(&resource, token));
                            held.fetch_sub(1, SeqCst);
                            assert!(s.release(&resource, token));
                        }
                        Ok(None) => {}
                        Err(error) => drop(error.is("53400")),
                    }
                }
            });
        }
    });
    let most = most.into_inner();
    assert!(most <= quota, "{most} at once");
    assert!(granted.into_inner() > 0);
    // and nothing is left behind
    let mut s = db.session_as(&role);
    for n in 0..quota {
        s.acquire(&format!("after {n}"));
    }
    is_full(
        &db,
        &mut s,
        "SELECT acquire_lease('q')",
        &role,
        quota as usize,
        quota as usize,
    );
}

fn counted_for_each_role_and_database() {
    let (db, role) = limited(1);
    let (other, second) = (Db::on(&db.cluster), login(&db, "second"));
    limit(&db, &second, 1);
    for db in [&db, &other] {
        for role in [&role, &second] {
            let mut s = db.session_as(role);
            s.acquire(role);
            is_full(db, &mut s, "SELECT acquire_lease('q')", role, 1, 1);
        }
    }
    // members of a role are not the role
    let member = login(&db, "member");
    limit(&db, &member, 1);
    db.session().exec(&format!("GRANT {role} TO {member}"));
    db.session_as(&member).acquire("of a member");
}

fn current_role_is_counted() {
    let (db, role) = limited(1);
    let other = login(&db, "other");
    db.session().exec(&format!("GRANT {other} TO {role}"));
    let mut s = db.session_as(&role);
    s.acquire("a");
    is_full(&db, &mut s, "SELECT acquire_lease('q')", &role, 1, 1);
    s.exec(&format!("SET ROLE {other}"));
    s.acquire("b");
    is_full(&db, &mut s, "SELECT acquire_lease('q')", &other, 1, 1);
    // a superuser too has the quota that is set for him
    let mut admin = db.session();
    admin.exec("SET leasehold.max_leases_per_role = 1");
    admin.acquire("c");
    is_full(
        &db,
        &mut admin,
        "SELECT acquire_lease('q')",
        "postgres",
        1,
        1,
    );
}

fn quota_is_set_for_roles_and_by_reload() {
    let db = Db::on(&Arc::new(Cluster::builder().start()));
    let role = login(&db, "role");
    let mut s = db.session_as(&role);
    for n in 0..3 {
        s.acquire(&format!("held {n}"));
    }
    // for those who come later
    limit(&db, &role, 3);
    let token = s.acquire("as before");
    assert!(s.release("as before", token));
    let mut later = db.session_as(&role);
    is_full(&db, &mut later, "SELECT acquire_lease('q')", &role, 3, 3);
    limit(&db, &role, 4);
    let token = db.session_as(&role).acquire("one more");
    assert!(s.release("one more", token));
    db.session().exec(&format!(
        "ALTER ROLE {role} RESET ALL; ALTER DATABASE {} SET leasehold.max_leases_per_role = 2",
        db.name
    ));
    is_full(
        &db,
        &mut db.session_as(&role),
        "SELECT acquire_lease('q')",
        &role,
        3,
        2,
    );
    db.session()
        .exec(&format!("ALTER DATABASE {} RESET ALL", db.name));
    // for all that are there
    for (quota, is_refused) in [(3, true), (4, false), (1, true), (0, false)] {
        db.cluster
            .configure(&format!("leasehold.max_leases_per_role = {quota}\n"));
        db.session().exec("SELECT pg_reload_conf()");
        wait_for("the reload", || {
            let now = s.text("SHOW leasehold.max_leases_per_role");
            (now == Some(quota.to_string())).then_some(())
        });
        if is_refused {
            is_full(&db, &mut s, "SELECT acquire_lease('q')", &role, 3, quota);
        } else {
            let token = s.acquire("q");
            assert!(s.release("q", token));
        }
    }
}

fn only_a_superuser_sets_the_quota() {
    let (db, role) = limited(1);
    let mut s = db.session_as(&role);
    for sql in [
        "SET leasehold.max_leases_per_role = 0",
        "SET LOCAL leasehold.max_leases_per_role = 100",
        "SELECT set_config('leasehold.max_leases_per_role', '0', false)",
        &format!("ALTER ROLE {role} SET leasehold.max_leases_per_role = 0"),
        "ALTER SYSTEM SET leasehold.max_leases_per_role = 0",
    ] {
        s.err(sql).is("42501");
    }
    // what one sets for his own session by the way that he connects
    let options = "-c leasehold.max_leases_per_role=0";
    let mut config = db.cluster.config();
    config.user(&role).dbname(&db.name).options(options);
    match Session::try_connect(&config) {
        Err(error) => drop(error.is("42501")),
        Ok(mut s) => assert_eq!(
            s.text("SHOW leasehold.max_leases_per_role").as_deref(),
            Some("1")
        ),
    }
    // back to what was set for the role
    s.err("RESET leasehold.max_leases_per_role").is("42501");
    s.exec("RESET ALL");
    s.exec("DISCARD ALL");
    s.acquire("held");
    is_full(&db, &mut s, "SELECT acquire_lease('q')", &role, 1, 1);
    let mut admin = db.session();
    admin
        .err("SET leasehold.max_leases_per_role = -1")
        .is("22023");
    admin.exec("SET leasehold.max_leases_per_role = 2147483647");
    admin.acquire("q");
}

fn waiter_over_the_quota_lets_the_next_one_go_first() {
    for sql in [WAIT, AWAIT] {
        let (db, role) = limited(1);
        let (mut s, mut own) = (db.session(), db.session_as(&role));
        let token = s.acquire("r");
        let first = db.queued(db.session_as(&role), "r", sql);
        let second = db.queued(db.session(), "r", sql);
        own.acquire("held meanwhile");
        assert!(s.release("r", token));
        let (first, error) = first.failed();
        error
            .is("53400")
            .well_written()
            .details(&format!("\"{role}\" holds 1 leases"));
        let (mut second, token) = second.granted();
        assert!(second.release("r", token));
        assert!(s.queue("r").is_empty());
        // who has room by then is granted it
        let held: i64 = own.one("SELECT token FROM lease_info('held meanwhile')");
        let token = s.acquire("r");
        assert!(own.release("held meanwhile", held));
        let waiting = db.queued(first, "r", sql);
        assert!(s.release("r", token));
        waiting.granted();
    }
}

fn leases_in_memory_count() {
    let (db, role) = limited(2);
    let mut s = db.session_as(&role);
    s.acquire("durable");
    s.exec("SET leasehold.durability = memory");
    let token = s.acquire("r");
    is_full(&db, &mut s, "SELECT acquire_lease('q')", &role, 2, 2);
    s.exec("SET leasehold.durability = durable");
    is_full(&db, &mut s, "SELECT acquire_lease('q')", &role, 2, 2);
    assert!(s.release("r", token));
    s.exec("SET leasehold.durability = memory");
    s.acquire_expired("r");
    has_room_for_one(&db, &mut s, &role, 2);
    s.exec("BEGIN");
    s.acquire("r");
    s.exec("ROLLBACK");
    has_room_for_one(&db, &mut s, &role, 2);
}

/// A lease that only the ledger knows yet is not counted before somebody has asked for its resource.
fn leases_count_after_a_restart_once_they_are_seen() {
    let db = Db::on(&Arc::new(Cluster::builder().start()));
    let role = login(&db, "role");
    limit(&db, &role, 3);
    for stop in [Stop::Fast, Stop::Immediate] {
        let mut s = db.session_as(&role);
        // of its own in each round: a crash may lose the mark of a release
        let named = |name: &str| format!("{name} {stop:?}");
        let tokens = ["a", "b", "c"].map(|name| (named(name), s.acquire(&named(name))));
        drop(s);
        db.cluster.restart(stop);
        let mut s = db.session_as(&role);
        assert_eq!(s.try_acquire(&named("a")), None, "{stop:?}");
        assert!(s.renew(&tokens[1].0, tokens[1].1), "{stop:?}");
        // two are seen, and the third is not
        let token = s.acquire(&named("d"));
        is_full(&db, &mut s, "SELECT acquire_lease('q')", &role, 3, 3);
        assert!(s.release(&named("d"), token));
        // seen by another role
        assert_eq!(db.session().try_acquire(&named("c")), None);
        is_full(&db, &mut s, "SELECT acquire_lease('q')", &role, 3, 3);
        for (name, token) in tokens {
            assert!(s.release(&name, token));
        }
        let tokens = ["e", "f", "g"].map(|name| (named(name), s.acquire(&named(name))));
        is_full(&db, &mut s, "SELECT acquire_lease('q')", &role, 3, 3);
        for (name, token) in tokens {
            assert!(s.release(&name, token));
        }
    }
}

fn retry_by_request_needs_no_room() {
    let (db, role) = limited(1);
    let mut s = db.session_as(&role);
    let call = |resource: &str, wait: &str| {
        format!(
            "SELECT acquire_lease('{resource}', ttl => '5min', wait => '{wait}',
                                  request => '00000000-0000-0000-0000-000000000001')"
        )
    };
    let token: i64 = s.one(&call("r", "0"));
    for wait in ["0", "1s"] {
        // the only lease that there may be is the one that is asked for again
        assert_eq!(
            s.try_one::<Option<i64>>(&call("r", wait)),
            Ok(Some(token)),
            "wait {wait}"
        );
        // in another session too
        let mut other = db.session_as(&role);
        assert_eq!(
            other.try_one::<Option<i64>>(&call("r", wait)),
            Ok(Some(token))
        );
        // and of another resource there is none
        is_full(&db, &mut s, &call("q", wait), &role, 1, 1);
    }
}

fn lease_over_the_quota_goes_on() {
    let (db, role) = limited(0);
    let mut s = db.session_as(&role);
    let tokens = ["a", "b", "c"].map(|name| (name, s.acquire(name)));
    limit(&db, &role, 1);
    let mut s = db.session_as(&role);
    is_full(&db, &mut s, "SELECT acquire_lease('q')", &role, 3, 1);
    for (name, token) in tokens {
        assert!(s.renew(name, token) && s.try_fence(name, token).is_ok());
        assert!(s.release(name, token));
    }
    s.acquire("q");
}

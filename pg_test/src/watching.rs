//! Layer wait, part sight: what a waiting session shows, to whom.

use crate::cluster::{Db, Stop, wait_for};
use crate::leases::NEVER;
use crate::queueing::AWAIT;
use crate::session::Session;

crate::tests![
    wait_shows_in_pg_stat_activity,
    waiters_are_shown,
    who_drains_is_shown_as_the_first,
    writers_are_shown_prepared_ones_too,
    holders_of_other_roles_are_hidden,
    holders_of_other_roles_are_hidden_in_refusals,
];

fn wait_shows_in_pg_stat_activity() {
    let db = Db::new();
    let mut s = db.session();
    s.acquire("r");
    let (function, procedure) = (db.waiter(), db.queued(db.session(), "r", AWAIT));
    // while they wait, and not only when a wait is over
    let wanted = "SELECT resource || ' ' || waiters || ' ' || waits FROM leasehold.contended";
    assert_eq!(s.text(wanted).as_deref(), Some("r 2 0"));
    for pid in [function.pid, procedure.pid] {
        let sql = format!(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {pid} AND wait_event = 'leasehold wait' AND state = 'active')"
        );
        db.cluster.wait_sql(&sql, "the wait event");
        s.terminate(pid);
    }
    assert!(function.failed().1.is_lost() && procedure.failed().1.is_lost());
}

fn waiters_are_shown() {
    let db = Db::new();
    let (mut s, role) = (db.session(), db.role());
    let token = s.acquire("r");
    assert_eq!(s.info("r", "waiters").as_deref(), Some("0"));
    let first = db.queued(
        db.session_as(&role),
        "r",
        "SELECT acquire_lease('r', 'first of all', wait => '50s')",
    );
    let second = db.queued(db.session(), "r", "CALL await_lease('r')");
    assert_eq!(s.info("r", "waiters").as_deref(), Some("2"));
    let listed = "SELECT waiters::text FROM leasehold.leases WHERE resource = 'r'";
    assert_eq!(s.text(listed).as_deref(), Some("2"));
    let shown = |s: &mut Session| {
        s.rows(
            "SELECT position, pid, holder, role, waited > '0' AND waited < '1h', remaining > '0' AND remaining <= '50s'
               FROM leasehold.waiters WHERE resource = 'r' ORDER BY position",
        )
    };
    let text = |value: &str| Some(value.to_owned());
    let label_of_second = format!("postgres/pg_test/{}", second.pid);
    assert_eq!(
        shown(&mut s),
        [
            vec![
                text("1"),
                text(&first.pid.to_string()),
                text("first of all"),
                text(&role),
                text("t"),
                text("t")
            ],
            vec![
                text("2"),
                text(&second.pid.to_string()),
                text(&label_of_second),
                text("postgres"),
                text("t"),
                // without limit
                None
            ],
        ]
    );
    assert!(s.release("r", token));
    let (mut first, token) = first.granted();
    // the label is that of the lease then
    assert_eq!(s.info("r", "holder").as_deref(), Some("first of all"));
    assert_eq!(shown(&mut s)[0][1], text(&second.pid.to_string()));
    assert!(first.release("r", token));
    second.granted();
    assert_eq!(s.info("r", "holder"), text(&label_of_second));
    assert!(shown(&mut s).is_empty());
}

fn who_drains_is_shown_as_the_first() {
    let db = Db::of_waiters("1h");
    let (mut s, mut writer) = (db.session(), db.session());
    let token = s.acquire("r");
    writer.exec(&format!("BEGIN; SELECT fence('r', {token})"));
    assert!(s.release("r", token));
    let counted = "SELECT (SELECT waits FROM leasehold.stats) || ' ' || coalesce((SELECT waits FROM leasehold.contended), 0)";
    assert_eq!(s.text(counted).as_deref(), Some("0 0"));
    // one that does not wait is no waiter, though it drains for a moment
    assert_eq!(s.try_acquire("r"), None);
    assert!(s.queue("r").is_empty());
    let first = db.queued(
        db.session(),
        "r",
        "SELECT acquire_lease('r', 'first', wait => '50s')",
    );
    wait_for("the drain", || {
        (s.state_of("r") == "draining").then_some(())
    });
    let second = db.queued(db.session(), "r", AWAIT);
    assert_eq!(s.queue("r"), [first.pid, second.pid]);
    assert_eq!(s.info("r", "waiters").as_deref(), Some("2"));
    let shown = s.rows(
        "SELECT position, pid, holder, remaining <= '50s' FROM leasehold.waiters ORDER BY position LIMIT 1",
    );
    let text = |value: &str| Some(value.to_owned());
    let row = [
        text("1"),
        text(&first.pid.to_string()),
        text("first"),
        text("t"),
    ];
    assert_eq!(shown, [row.to_vec()]);
    let listed = "SELECT waiters FROM leasehold.contended WHERE resource = 'r'";
    assert_eq!(s.one::<i32>(listed), 2);
    writer.exec("COMMIT");
    let (mut first, token) = first.granted();
    assert_eq!(s.queue("r"), [second.pid]);
    assert!(first.release("r", token));
    second.granted();
    assert!(s.queue("r").is_empty());
    // both have waited, the one in the drain too
    assert_eq!(s.text(counted).as_deref(), Some("2 2"));
    // who gives up is gone from it
    let token: i64 = s.one("SELECT token FROM lease_info('r')");
    writer.exec(&format!("BEGIN; SELECT fence('r', {token})"));
    assert!(s.release("r", token));
    let hasty = db.queued(
        db.session(),
        "r",
        "SELECT acquire_lease('r', wait => '50s')",
    );
    s.cancel(hasty.pid);
    let (mut hasty, error) = hasty.failed();
    error.is("57014");
    assert!(s.queue("r").is_empty());
    assert_eq!(hasty.try_acquire("r"), None);
    assert!(s.queue("r").is_empty());
}

fn writers_are_shown_prepared_ones_too() {
    let db = Db::with(&[("max_prepared_transactions", "2")]);
    let (mut s, mut open, mut done) = (db.session(), db.session(), db.session());
    for (session, resource) in [(&mut open, "r"), (&mut done, "q")] {
        let token = s.acquire(resource);
        session.exec(&format!("BEGIN; SELECT fence('{resource}', {token})"));
    }
    done.exec("PREPARE TRANSACTION 'prepared'");
    let shown = |s: &mut Session| s.rows("SELECT resource, pid, gid FROM leasehold.writers");
    let text = |value: &str| Some(value.to_owned());
    let prepared =
        |resource: Option<&str>| vec![resource.map(str::to_owned), None, text("prepared")];
    let mut both = shown(&mut s);
    both.sort();
    let of_open = vec![text("r"), text(&open.pid.to_string()), None];
    assert_eq!(both, [prepared(Some("q")), of_open]);
    // one is there before anybody has asked for its resource
    db.cluster.restart(Stop::Fast);
    let mut s = db.session();
    assert_eq!(shown(&mut s), [prepared(None)]);
    assert_eq!(s.try_acquire("q"), None);
    assert_eq!(shown(&mut s), [prepared(Some("q"))]);
    s.exec("COMMIT PREPARED 'prepared'");
    assert!(shown(&mut s).is_empty());
}

fn holders_of_other_roles_are_hidden() {
    let db = Db::new();
    let (mut s, role, other) = (db.session(), db.role(), db.role());
    s.acquire("r");
    let waiting = db.queued(
        db.session_as(&role),
        "r",
        "SELECT acquire_lease('r', 'secret', wait => '1min')",
    );
    let seen = |s: &mut Session| {
        s.rows("SELECT pid, role, holder FROM leasehold.waiters WHERE resource = 'r'")
    };
    let row = |holder: Option<&str>| {
        vec![vec![
            Some(waiting.pid.to_string()),
            Some(role.clone()),
            holder.map(str::to_owned),
        ]]
    };
    let mut stranger = db.session_as(&other);
    assert_eq!(seen(&mut stranger), row(None));
    assert_eq!(seen(&mut db.session_as(&role)), row(Some("secret")));
    assert_eq!(seen(&mut s), row(Some("secret")));
    s.exec(&format!("GRANT pg_read_all_stats TO {other}"));
    assert_eq!(seen(&mut stranger), row(Some("secret")));
    s.exec(&format!(
        "REVOKE pg_read_all_stats FROM {other}; GRANT {role} TO {other}"
    ));
    assert_eq!(seen(&mut stranger), row(Some("secret")));
    s.cancel(waiting.pid);
    waiting.failed().1.is("57014");
}

fn holders_of_other_roles_are_hidden_in_refusals() {
    let db = Db::new();
    let (owner, other) = (db.role(), db.role());
    let (mut s, mut stranger) = (db.session_as(&owner), db.session_as(&other));
    let token: i64 = s.one("SELECT acquire_lease('r', 'secret')");
    let refused = |session: &mut Session, token: i64, sqlstate: &str, is_told: bool| {
        let error = session.try_fence("r", token).expect_err("it is not good");
        let error = error.is(sqlstate).well_written();
        assert_eq!(error.to_string().contains("secret"), is_told, "{error}");
    };
    for (token, sqlstate) in [(1, "LH001"), (NEVER, "LH002")] {
        refused(&mut stranger, token, sqlstate, false);
        refused(&mut s, token, sqlstate, true);
    }
    assert!(s.release("r", token));
    db.session()
        .exec(&format!("GRANT pg_read_all_stats TO {other}"));
    refused(&mut stranger, 1, "LH001", true);
    db.session()
        .exec(&format!("REVOKE pg_read_all_stats FROM {other}"));
    refused(&mut stranger, token, "LH004", false);
    refused(&mut s, token, "LH004", true);
}

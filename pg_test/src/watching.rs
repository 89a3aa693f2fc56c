//! Layer wait, part sight: what a waiting session shows, to whom.

use crate::cluster::Db;
use crate::queueing::AWAIT;
use crate::session::Session;

crate::tests![
    wait_shows_in_pg_stat_activity,
    waiters_are_shown,
    holders_of_other_roles_are_hidden,
];

fn wait_shows_in_pg_stat_activity() {
    let db = Db::new();
    let mut s = db.session();
    s.acquire("r");
    let (function, procedure) = (db.waiter(), db.queued(db.session(), "r", AWAIT));
    for pid in [function.pid, procedure.pid] {
        let sql = format!(
            "SELECT wait_event = 'leasehold wait' AND state = 'active' FROM pg_stat_activity WHERE pid = {pid}"
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

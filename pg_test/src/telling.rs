//! Layer seen: events that are told: in the server log, and on a channel. By the workers, never from a user's
//! transaction.

use postgres::fallible_iterator::FallibleIterator;
use postgres::{Client, NoTls};

use crate::cluster::{Db, wait_for};
use crate::session::LIMIT;

crate::tests![
    events_are_logged_as_long_as_a_setting_says_so,
    events_are_told_on_a_channel,
    channel_is_a_name,
];

fn reload(db: &Db, name: &str, value: &str) {
    let mut s = db.session();
    s.exec(&format!("ALTER SYSTEM SET {name} = '{value}'"));
    s.exec("SELECT pg_reload_conf()");
    wait_for("the reload", || {
        let now: String = db
            .session()
            .one(&format!("SELECT current_setting('{name}')"));
        (now == value).then_some(())
    });
}

/// How often the log says so.
fn logged(db: &Db, what: &str) -> usize {
    db.cluster.log().matches(what).count()
}

fn events_are_logged_as_long_as_a_setting_says_so() {
    let db = Db::with(&[("leasehold.log_events", "on")]);
    let mut s = db.session();
    let token = s.acquire("told");
    s.try_fence("told", 1).expect_err("a stale token");
    assert!(s.release("told", token));
    wait_for("the last event in the log", || {
        (logged(&db, "lease released: \"told\"") == 1).then_some(())
    });
    let log = db.cluster.log();
    assert!(log.contains("lease granted: \"told\""), "{log}");
    assert!(log.contains("lease write refused: \"told\""), "{log}");
    assert!(
        log.contains(&format!("token {token}, presented 1,")) && log.contains("SQLSTATE LH001"),
        "{log}"
    );
    reload(&db, "leasehold.log_events", "off");
    // what comes now is not told, also when it is told again
    let token = s.acquire("silent");
    assert!(s.release("silent", token));
    reload(&db, "leasehold.log_events", "on");
    wait_for("an event in the log", || {
        let token = s.acquire("again");
        assert!(s.release("again", token));
        (logged(&db, "lease released: \"again\"") > 0).then_some(())
    });
    assert_eq!(logged(&db, "\"silent\""), 0);
}

fn events_are_told_on_a_channel() {
    let db = Db::with(&[("leasehold.notify_channel", "leases")]);
    let mut listener: Client = db
        .cluster
        .config()
        .dbname(&db.name)
        .connect(NoTls)
        .expect("it connects");
    listener.batch_execute("LISTEN leases").expect("it listens");
    let mut s = db.session();
    let token: i64 = s.one("SELECT acquire_lease('r', 'secret')");
    assert!(s.release("r", token));
    let mut told = Vec::new();
    let mut notifications = listener.notifications();
    let mut next = notifications.timeout_iter(LIMIT);
    while told.len() < 2 {
        let notification = next.next().expect("the connection lives");
        let notification = notification.expect("it is told in time");
        assert_eq!(notification.channel(), "leases");
        told.push(notification.payload().to_owned());
    }
    for (payload, event) in told.iter().zip(["granted", "released"]) {
        let part = format!("\"event\" : \"{event}\", \"resource\" : \"r\", \"token\" : {token}");
        assert!(payload.contains(&part), "{payload}");
        assert!(!payload.contains("secret"), "{payload}");
    }
}

fn channel_is_a_name() {
    let db = Db::with(&[]);
    let name = "x".repeat(64);
    let mut s = db.session();
    s.err(&format!(
        "ALTER SYSTEM SET leasehold.notify_channel = '{name}'"
    ))
    .is("22023")
    .details("63 bytes");
    s.exec(&format!(
        "ALTER SYSTEM SET leasehold.notify_channel = '{}'",
        &name[1..]
    ));
}

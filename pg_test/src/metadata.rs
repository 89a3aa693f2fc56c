//! Layer wait, part metadata: what a holder wants others to know stays with its lease, and goes with it.

use std::sync::Arc;

use crate::cluster::{Cluster, Db, Stop, wait_for};
use crate::environment::{environment, run};
use crate::session::Session;

crate::tests![
    metadata_are_kept_with_their_lease,
    metadata_of_every_kind,
    metadata_are_those_of_the_last_grant,
    metadata_outlive_the_server,
    large_metadata_are_refused,
    metadata_in_memory_are_refused,
    metadata_of_other_roles_are_hidden,
    metadata_go_with_the_row_of_the_ledger,
    metadata_are_not_of_a_restored_lease,
];

fn acquire(s: &mut Session, metadata: &str) -> i64 {
    let sql = format!("SELECT acquire_lease('r', ttl => '5min', metadata => {metadata})");
    s.one::<Option<i64>>(&sql).expect("a token")
}

/// As lease_info and the view show it, which must agree.
#[track_caller]
fn shown(s: &mut Session) -> Option<String> {
    let info = s.info("r", "metadata");
    let listed = s.text("SELECT metadata::text FROM leasehold.leases WHERE resource = 'r'");
    assert_eq!(info, listed, "lease_info and leasehold.leases differ");
    info
}

#[track_caller]
fn shows(s: &mut Session, expected: Option<&str>) {
    assert_eq!(shown(s).as_deref(), expected);
}

fn metadata_are_kept_with_their_lease() {
    let db = Db::new();
    let (mut s, mut other) = (db.session(), db.session());
    let token = acquire(&mut s, r#"'{"job": 7}'"#);
    shows(&mut other, Some(r#"{"job": 7}"#));
    // through renewals and retries, and the answers of those who do not get it
    assert!(s.one::<bool>(&format!("SELECT renew_lease('r', {token}, '5min')")));
    let denied: Option<i64> = other.one("SELECT acquire_lease('r', metadata => '{}')");
    assert_eq!(denied, None);
    shows(&mut other, Some(r#"{"job": 7}"#));
    // they can be asked for as jsonb
    let job = "SELECT resource FROM leasehold.leases WHERE metadata @> '{\"job\": 7}'";
    assert_eq!(other.text(job).as_deref(), Some("r"));
    assert!(s.release("r", token));
    shows(&mut other, None);
    // an expired lease is still shown with what it was
    let _: i64 =
        s.one(r#"SELECT acquire_lease('r', ttl => '1 microsecond', metadata => '{"was": 1}')"#);
    assert_eq!(s.state_of("r"), "expired");
    shows(&mut other, Some(r#"{"was": 1}"#));
    // a waiter brings its own
    let token = acquire(&mut s, r#"'{"first": 1}'"#);
    let waiting = db.queued(
        db.session(),
        "r",
        r#"SELECT acquire_lease('r', wait => '1min', metadata => '{"second": 2}')"#,
    );
    shows(&mut other, Some(r#"{"first": 1}"#));
    assert!(s.release("r", token));
    waiting.granted();
    shows(&mut other, Some(r#"{"second": 2}"#));
}

fn metadata_of_every_kind() {
    let db = Db::new();
    let mut s = db.session();
    for (metadata, expected) in [
        ("NULL", None),
        ("'null'", Some("null")),
        ("'{}'", Some("{}")),
        ("'[1, \"a\"]'", Some("[1, \"a\"]")),
        ("'\"text\"'", Some("\"text\"")),
        ("'false'", Some("false")),
        (
            "'{\"umlaut\": \"ä\\\"\\\\\"}'",
            Some("{\"umlaut\": \"ä\\\"\\\\\"}"),
        ),
        ("'{\"b\":1,\"a\":2,\"a\":3}'", Some("{\"a\": 3, \"b\": 1}")),
    ] {
        let token = acquire(&mut s, metadata);
        shows(&mut s, expected);
        assert!(s.release("r", token));
        shows(&mut s, None);
    }
}

fn metadata_are_those_of_the_last_grant() {
    let db = Db::new();
    let mut s = db.session();
    let token = acquire(&mut s, r#"'{"n": 1}'"#);
    assert!(s.release("r", token));
    // a grant without any has none, not those of the one before
    let token = acquire(&mut s, "NULL");
    shows(&mut s, None);
    assert!(s.release("r", token));
    let token = acquire(&mut s, r#"'{"n": 2}'"#);
    shows(&mut s, Some(r#"{"n": 2}"#));
    assert!(s.release("r", token));
    // one that is rolled back leaves what was
    s.one::<i64>(r#"SELECT acquire_lease('r', ttl => '1 microsecond', metadata => '{"n": 3}')"#);
    shows(&mut s, Some(r#"{"n": 3}"#));
    s.exec("BEGIN");
    acquire(&mut s, r#"'{"n": 4}'"#);
    shows(&mut s, Some(r#"{"n": 4}"#));
    s.exec("ROLLBACK");
    let kept = "SELECT metadata::text FROM leasehold.metadata WHERE resource = 'r'";
    assert_eq!(s.text(kept).as_deref(), Some(r#"{"n": 3}"#));
    // to a savepoint
    s.exec("BEGIN; SAVEPOINT a");
    acquire(&mut s, r#"'{"n": 5}'"#);
    s.exec("ROLLBACK TO a");
    acquire(&mut s, r#"'{"n": 6}'"#);
    s.exec("COMMIT");
    shows(&mut s, Some(r#"{"n": 6}"#));
    // one lease, one row
    assert_eq!(s.one::<i64>("SELECT count(*) FROM leasehold.metadata"), 1);
    // to others an uncommitted lease shows none
    let mut other = db.session();
    assert_eq!(other.one::<i64>("SELECT break_lease('r')"), {
        let sql = "SELECT token FROM leasehold.ledger WHERE resource = 'r'";
        s.one::<i64>(sql)
    });
    s.exec("BEGIN");
    acquire(&mut s, r#"'{"n": 7}'"#);
    assert_ne!(other.info("r", "metadata").as_deref(), Some(r#"{"n": 6}"#));
    s.exec("COMMIT");
    shows(&mut other, Some(r#"{"n": 7}"#));
}

fn metadata_outlive_the_server() {
    let db = Db::of_waiters("1h");
    let token = acquire(&mut db.session(), r#"'{"n": 1}'"#);
    for how in [Stop::Fast, Stop::Immediate] {
        db.cluster.restart(how);
        let mut s = db.session();
        assert_eq!(s.state_of("r"), "recovering");
        shows(&mut s, Some(r#"{"n": 1}"#));
        assert!(s.renew("r", token));
        shows(&mut s, Some(r#"{"n": 1}"#));
    }
    let mut s = db.session();
    assert!(s.release("r", token));
    shows(&mut s, None);
    db.cluster.restart(Stop::Fast);
    let mut s = db.session();
    shows(&mut s, None);
    acquire(&mut s, "NULL");
    drop(s);
    db.cluster.restart(Stop::Immediate);
    shows(&mut db.session(), None);
}

fn large_metadata_are_refused() {
    let db = Db::new();
    let mut s = db.session();
    // a text of 4096 bytes, quotes included, and one more
    for (length, fits) in [(4094, true), (4095, false), (1_000_000, false)] {
        let metadata = format!("to_jsonb(repeat('x', {length}))");
        let sql = format!("SELECT acquire_lease('r', metadata => {metadata})");
        if fits {
            let token: i64 = s.one(&sql);
            assert_eq!(shown(&mut s).expect("metadata").len(), length + 2);
            assert!(s.release("r", token));
        } else {
            let error = db.refused(&mut s, &sql, "54000");
            error
                .details(&format!("{} bytes", length + 2))
                .details("4096")
                .hints_at("table of your own");
        }
    }
    // bytes count, not characters
    let sql = "SELECT acquire_lease('r', metadata => to_jsonb(repeat('ä', 2048)))";
    db.refused(&mut s, sql, "54000").details("4098 bytes");
    // even where it is held
    s.acquire("r");
    let sql = "SELECT acquire_lease('r', metadata => to_jsonb(repeat('x', 5000)))";
    db.refused(&mut s, sql, "54000");
}

fn metadata_in_memory_are_refused() {
    let db = Db::new();
    let mut s = db.session_with_options("-c leasehold.durability=memory");
    for metadata in ["'{}'", "'null'", "to_jsonb(repeat('x', 5000))"] {
        let sql = format!("SELECT acquire_lease('r', metadata => {metadata})");
        let error = db.refused(&mut s, &sql, "0A000");
        error
            .details("leasehold.durability")
            .hints_at("leasehold.durability = durable");
    }
    let token: Option<i64> = s.one("SELECT acquire_lease('r', metadata => NULL)");
    shows(&mut s, None);
    assert!(s.release("r", token.expect("a token")));
    // a durable one's are not those of the one in memory that follows
    let mut durable = db.session();
    let token = acquire(&mut durable, r#"'{"n": 1}'"#);
    assert!(durable.release("r", token));
    s.acquire("r");
    shows(&mut s, None);
}

fn metadata_of_other_roles_are_hidden() {
    let db = Db::new();
    let (owner, other) = (db.role(), db.role());
    acquire(&mut db.session_as(&owner), r#"'{"secret": 1}'"#);
    let secret = Some(r#"{"secret": 1}"#);
    let mut stranger = db.session_as(&other);
    shows(&mut stranger, None);
    assert_eq!(stranger.info("r", "holder"), None);
    // nor in the table
    for table in ["metadata", "ledger"] {
        stranger
            .err(&format!("SELECT * FROM leasehold.{table}"))
            .is("42501");
    }
    shows(&mut db.session_as(&owner), secret);
    shows(&mut db.session(), secret);
    let mut admin = db.session();
    admin.exec(&format!("GRANT pg_read_all_stats TO {other}"));
    shows(&mut stranger, secret);
    admin.exec(&format!(
        "REVOKE pg_read_all_stats FROM {other}; GRANT {owner} TO {other}"
    ));
    shows(&mut stranger, secret);
    assert!(stranger.info("r", "holder").is_some());
}

fn metadata_go_with_the_row_of_the_ledger() {
    let builder = Cluster::builder().conf("leasehold.ledger_retention", "1s");
    let db = Db::on(&Arc::new(builder.start()));
    let mut s = db.session();
    let token = acquire(&mut s, r#"'{"n": 1}'"#);
    let kept: i64 = s.one(r#"SELECT acquire_lease('kept', ttl => '5min', metadata => '{"n": 2}')"#);
    assert!(s.release("r", token));
    let mut others = 0;
    wait_for("the sweep", || {
        // work for the worker, which goes to sleep otherwise
        others += 1;
        let name = format!("other {}", others % 50);
        let other = s.acquire(&name);
        assert!(s.release(&name, other));
        let gone: bool =
            s.one("SELECT NOT EXISTS (SELECT FROM leasehold.ledger WHERE resource = 'r')");
        gone.then_some(())
    });
    let left = s.text("SELECT string_agg(resource, ' ') FROM leasehold.metadata");
    assert_eq!(left.as_deref(), Some("kept"));
    assert!(s.renew("kept", kept));
    assert_eq!(s.info("kept", "metadata").as_deref(), Some(r#"{"n": 2}"#));
}

/// In a dump the table comes along, but its lease does not live there.
fn metadata_are_not_of_a_restored_lease() {
    let origin = Db::new();
    let token = acquire(&mut origin.session(), r#"'{"n": 1}'"#);
    let copy = Db::bare_on(&origin.cluster);
    let client = |program: &str, db: &Db| {
        let mut command = environment().pg_command(program, db.cluster.dir());
        command
            .args(["-U", "postgres", "-p", "5432", "-h"])
            .arg(db.cluster.socket_dir())
            .args(["-d", &db.name]);
        command
    };
    let file = origin.cluster.dir().join("metadata.sql");
    run(client("pg_dump", &origin).arg("-f").arg(&file));
    run(client("psql", &copy)
        .args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-f"])
        .arg(&file));
    let mut s = copy.session();
    assert_eq!(s.state_of("r"), "free");
    shows(&mut s, None);
    let next = s.acquire("r");
    assert!(next > token);
    shows(&mut s, None);
    assert!(s.release("r", next));
    acquire(&mut s, r#"'{"n": 2}'"#);
    shows(&mut s, Some(r#"{"n": 2}"#));
    shows(&mut origin.session(), Some(r#"{"n": 1}"#));
}

//! Layer xact, part pipelines: statements that a client sends at once, with one Sync behind them, are one implicit
//! transaction without BEGIN. Under a fixed snapshot acquire is no more allowed there than in a block.

use crate::cluster::Db;
use crate::wire::{Answer, Wire, message, statement};

crate::tests![
    pipeline_under_a_snapshot_cannot_acquire,
    acquire_with_a_sync_of_its_own_is_a_lone_statement,
    pipeline_under_read_committed_acquires,
    await_ends_no_pipeline_that_has_begun,
];

/// Connects with a default isolation level.
fn connect(db: &Db, level: &str) -> Wire {
    let level = level.replace(' ', "\\ ");
    Wire::connect(db, &format!("-c default_transaction_isolation={level}"))
}

/// Sends all statements and one Sync, and reads until the server is ready again.
fn send(wire: &mut Wire, statements: &[&str]) -> Answer {
    let mut bytes: Vec<u8> = statements.iter().flat_map(|sql| statement(sql)).collect();
    bytes.extend(message(b'S', b""));
    wire.write(&bytes);
    let answer = wire.answer();
    assert!(answer.is_ready, "the server does not answer: {answer:?}");
    answer
}

const ACQUIRE: &str = "SELECT acquire_lease('r', ttl => '5min')";

fn pipeline_under_a_snapshot_cannot_acquire() {
    let db = Db::new();
    db.session().exec("CREATE TABLE t (n int)");
    let insert = "INSERT INTO t VALUES (1)";
    let pipelines: [&[&str]; 7] = [
        &["SELECT 1", ACQUIRE],
        &[ACQUIRE, "SELECT 1"],
        &["SELECT count(*) FROM t", ACQUIRE, insert],
        &[ACQUIRE, insert],
        &[insert, ACQUIRE],
        &[ACQUIRE, "SELECT count(*) FROM t", "SELECT 1"],
        &[ACQUIRE, "SELECT acquire_lease('q')"],
    ];
    for level in ["repeatable read", "serializable"] {
        let mut pipeline = connect(&db, level);
        for statements in pipelines {
            let before = db.state();
            let answer = send(&mut pipeline, statements);
            assert_eq!(
                answer.sqlstate.as_deref(),
                Some("25001"),
                "{level}: {statements:?}: {answer:?}"
            );
            assert_eq!(db.state(), before, "{level}: {statements:?}");
            assert_eq!(db.session().state_of("r"), "free");
        }
        // the connection is good for more
        let answer = send(&mut pipeline, &["SELECT 1", "SELECT 2"]);
        assert_eq!(answer.values.len(), 2, "{answer:?}");
    }
}

fn acquire_with_a_sync_of_its_own_is_a_lone_statement() {
    let db = Db::new();
    for (i, level) in ["repeatable read", "serializable"].iter().enumerate() {
        let mut pipeline = connect(&db, level);
        let acquire = format!("SELECT acquire_lease('r{i}', ttl => '5min')");
        // three at once, and yet three transactions
        let sync = message(b'S', b"");
        let bytes = [
            statement("SELECT 1"),
            sync.clone(),
            statement(&acquire),
            sync.clone(),
            statement("SELECT 2"),
            sync,
        ];
        pipeline.write(&bytes.concat());
        let answers = [pipeline.answer(), pipeline.answer(), pipeline.answer()];
        let token = answers[1].values.first().cloned().flatten();
        let token: i64 = token
            .unwrap_or_else(|| panic!("{answers:?}"))
            .parse()
            .expect("a token is a number");
        assert!(db.session().renew(&format!("r{i}"), token));
    }
}

fn pipeline_under_read_committed_acquires() {
    let db = Db::new();
    let mut s = db.session();
    s.exec("CREATE TABLE t (n int); SELECT fence_table('t', 'r')");
    let mut pipeline = connect(&db, "read committed");
    let answer = send(
        &mut pipeline,
        &[
            "SELECT 1",
            ACQUIRE,
            "INSERT INTO t VALUES (1)",
            "SELECT count(*) FROM t",
        ],
    );
    assert_eq!(answer.sqlstate, None, "{answer:?}");
    assert_eq!(answer.values.last(), Some(&Some("1".to_owned())));
    assert_eq!(s.state_of("r"), "held");
    assert_eq!(s.one::<i64>("SELECT count(*) FROM t"), 1);
}

fn await_ends_no_pipeline_that_has_begun() {
    let db = Db::new();
    db.session().exec("CREATE TABLE before (n int)");
    let mut pipeline = connect(&db, "read committed");
    let answer = send(
        &mut pipeline,
        &["INSERT INTO before VALUES (1)", "CALL await_lease('r')"],
    );
    assert_eq!(answer.sqlstate.as_deref(), Some("25001"));
    let mut s = db.session();
    assert_eq!(s.one::<i64>("SELECT count(*) FROM before"), 0);
    assert_eq!(s.state_of("r"), "free");
    // as the first one it may
    let answer = send(
        &mut pipeline,
        &["CALL await_lease('r')", "INSERT INTO before VALUES (1)"],
    );
    assert_eq!((answer.sqlstate, answer.values.len()), (None, 1));
    assert_eq!(s.state_of("r"), "held");
}

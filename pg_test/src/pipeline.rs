//! Layer xact, part pipelines: statements that a client sends at once, with one Sync behind them, are one implicit
//! transaction without BEGIN. Under a fixed snapshot acquire is no more allowed there than in a block.
//!
//! The client crate has no such mode, so the few messages of the protocol are written here.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use crate::cluster::Db;
use crate::session::LIMIT;

crate::tests![
    pipeline_under_a_snapshot_cannot_acquire,
    acquire_with_a_sync_of_its_own_is_a_lone_statement,
    pipeline_under_read_committed_acquires,
    await_ends_no_pipeline_that_has_begun,
];

/// A connection that sends statements without waiting for their answers.
struct Pipeline(UnixStream);

/// What the server has said up to its ReadyForQuery.
#[derive(Debug, Default)]
struct Answer {
    /// The first column of each row.
    values: Vec<Option<String>>,
    sqlstate: Option<String>,
}

fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len() + 4).expect("a message is short");
    [&[kind][..], &length.to_be_bytes(), body].concat()
}

/// Parse, Bind, Execute of a statement without parameters, all unnamed.
fn statement(sql: &str) -> Vec<u8> {
    let parse = [&b"\0"[..], sql.as_bytes(), b"\0\0\0"].concat();
    [
        message(b'P', &parse),
        message(b'B', &[0; 8]),
        message(b'E', &[0; 5]),
    ]
    .concat()
}

impl Pipeline {
    /// Connects with a default isolation level.
    fn connect(db: &Db, level: &str) -> Self {
        let path = db.cluster.socket_dir().join(".s.PGSQL.5432");
        let stream = UnixStream::connect(path).expect("the server takes connections");
        stream
            .set_read_timeout(Some(LIMIT))
            .expect("a socket takes a limit");
        let mut pipeline = Self(stream);
        let level = level.replace(' ', "\\ ");
        let parameters = format!(
            "user\0postgres\0database\0{}\0options\0-c default_transaction_isolation={level}\0\0",
            db.name
        );
        // protocol 3.0; a startup message has no kind
        let startup = [&196_608_u32.to_be_bytes()[..], parameters.as_bytes()].concat();
        pipeline.write(&message(0, &startup)[1..]);
        let answer = pipeline.answer();
        assert_eq!(answer.sqlstate, None, "cannot connect");
        pipeline
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("the server reads");
    }

    /// Sends all statements and one Sync, and reads until the server is ready again.
    fn send(&mut self, statements: &[&str]) -> Answer {
        let mut bytes: Vec<u8> = statements.iter().flat_map(|sql| statement(sql)).collect();
        bytes.extend(message(b'S', b""));
        self.write(&bytes);
        self.answer()
    }

    fn answer(&mut self) -> Answer {
        let mut answer = Answer::default();
        loop {
            let mut head = [0; 5];
            self.0.read_exact(&mut head).expect("the server answers");
            let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
            let mut body = vec![0; length as usize - 4];
            self.0.read_exact(&mut body).expect("the server answers");
            match head[0] {
                b'D' => answer.values.push(first_column(&body)),
                b'E' => answer.sqlstate = Some(sqlstate(&body)),
                b'Z' => return answer,
                _ => {}
            }
        }
    }
}

/// Of a DataRow: number of columns, length and bytes of each.
fn first_column(body: &[u8]) -> Option<String> {
    let length = i32::from_be_bytes(body[2..6].try_into().expect("four bytes"));
    let length = usize::try_from(length).ok()?;
    Some(String::from_utf8_lossy(&body[6..6 + length]).into_owned())
}

/// Of an ErrorResponse: fields of a letter and a string each.
fn sqlstate(body: &[u8]) -> String {
    let code = body
        .split(|byte| *byte == 0)
        .find(|field| field.first() == Some(&b'C'));
    String::from_utf8_lossy(&code.expect("an error has a code")[1..]).into_owned()
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
        let mut pipeline = Pipeline::connect(&db, level);
        for statements in pipelines {
            let before = db.state();
            let answer = pipeline.send(statements);
            assert_eq!(
                answer.sqlstate.as_deref(),
                Some("25001"),
                "{level}: {statements:?}: {answer:?}"
            );
            assert_eq!(db.state(), before, "{level}: {statements:?}");
            assert_eq!(db.session().state_of("r"), "free");
        }
        // the connection is good for more
        let answer = pipeline.send(&["SELECT 1", "SELECT 2"]);
        assert_eq!(answer.values.len(), 2, "{answer:?}");
    }
}

fn acquire_with_a_sync_of_its_own_is_a_lone_statement() {
    let db = Db::new();
    for (i, level) in ["repeatable read", "serializable"].iter().enumerate() {
        let mut pipeline = Pipeline::connect(&db, level);
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
    let mut pipeline = Pipeline::connect(&db, "read committed");
    let answer = pipeline.send(&[
        "SELECT 1",
        ACQUIRE,
        "INSERT INTO t VALUES (1)",
        "SELECT count(*) FROM t",
    ]);
    assert_eq!(answer.sqlstate, None, "{answer:?}");
    assert_eq!(answer.values.last(), Some(&Some("1".to_owned())));
    assert_eq!(s.state_of("r"), "held");
    assert_eq!(s.one::<i64>("SELECT count(*) FROM t"), 1);
}

fn await_ends_no_pipeline_that_has_begun() {
    let db = Db::new();
    db.session().exec("CREATE TABLE before (n int)");
    let mut pipeline = Pipeline::connect(&db, "read committed");
    let answer = pipeline.send(&["INSERT INTO before VALUES (1)", "CALL await_lease('r')"]);
    assert_eq!(answer.sqlstate.as_deref(), Some("25001"));
    let mut s = db.session();
    assert_eq!(s.one::<i64>("SELECT count(*) FROM before"), 0);
    assert_eq!(s.state_of("r"), "free");
    // as the first one it may
    let answer = pipeline.send(&["CALL await_lease('r')", "INSERT INTO before VALUES (1)"]);
    assert_eq!((answer.sqlstate, answer.values.len()), (None, 1));
    assert_eq!(s.state_of("r"), "held");
}

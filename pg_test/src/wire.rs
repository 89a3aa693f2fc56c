//! A connection of PostgreSQL's protocol, message by message, for what the client crate has no way to say: statements
//! that are sent without waiting for their answers, and answers that nobody reads.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use crate::cluster::Db;
use crate::session::LIMIT;

/// The client's end of a connection. It reads only what it is asked to read.
pub struct Wire(UnixStream);

/// What the server has said up to its ReadyForQuery, or up to its end of the connection.
#[derive(Debug, Default)]
pub struct Answer {
    /// The first column of each row.
    pub values: Vec<Option<String>>,
    /// The SQLSTATE of the last error.
    pub sqlstate: Option<String>,
    /// The SQLSTATEs of the notices.
    pub warnings: Vec<String>,
    /// It came to its ReadyForQuery.
    pub is_ready: bool,
}

/// A message of one letter and a body.
pub fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len() + 4).expect("a message is short");
    [&[kind][..], &length.to_be_bytes(), body].concat()
}

/// Parse, Bind, Execute of a statement without parameters, all unnamed.
pub fn statement(sql: &str) -> Vec<u8> {
    let parse = [&b"\0"[..], sql.as_bytes(), b"\0\0\0"].concat();
    [
        message(b'P', &parse),
        message(b'B', &[0; 8]),
        message(b'E', &[0; 5]),
    ]
    .concat()
}

impl Wire {
    /// Connects with options such as `-c name=value`.
    pub fn connect(db: &Db, options: &str) -> Self {
        let path = db.cluster.socket_dir().join(".s.PGSQL.5432");
        let stream = UnixStream::connect(path).expect("the server takes connections");
        stream
            .set_read_timeout(Some(LIMIT))
            .expect("a socket takes a limit");
        let mut wire = Self(stream);
        let parameters = format!(
            "user\0postgres\0database\0{}\0options\0{options}\0\0",
            db.name
        );
        // protocol 3.0; a startup message has no kind
        let startup = [&196_608_u32.to_be_bytes()[..], parameters.as_bytes()].concat();
        wire.write(&message(0, &startup)[1..]);
        let answer = wire.answer();
        assert!(
            answer.is_ready && answer.sqlstate.is_none(),
            "cannot connect"
        );
        wire
    }

    pub fn write(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("the server reads");
    }

    /// Sends statements as one simple query, and reads nothing.
    pub fn begin(&mut self, sql: &str) {
        self.write(&message(b'Q', &[sql.as_bytes(), b"\0"].concat()));
    }

    /// Runs statements as one simple query.
    pub fn query(&mut self, sql: &str) -> Answer {
        self.begin(sql);
        self.answer()
    }

    /// Sends a statement and asks for what comes of it, but does not close the series with a Sync.
    pub fn begin_series(&mut self, sql: &str) {
        self.write(&[statement(sql), message(b'H', b"")].concat());
    }

    /// Closes a series, and reads until the server is ready again.
    pub fn sync(&mut self) -> Answer {
        self.write(&message(b'S', b""));
        self.answer()
    }

    /// Reads until the server is ready again, or ends the connection.
    pub fn answer(&mut self) -> Answer {
        self.answer_up_to(b'Z')
    }

    /// Reads up to the next error.
    pub fn error(&mut self) -> Answer {
        self.answer_up_to(b'E')
    }

    fn answer_up_to(&mut self, last: u8) -> Answer {
        let mut answer = Answer::default();
        while let Some((kind, body)) = self.next() {
            match kind {
                b'D' => answer.values.push(first_column(&body)),
                b'E' => answer.sqlstate = Some(sqlstate(&body)),
                b'N' => answer.warnings.push(sqlstate(&body)),
                b'Z' => answer.is_ready = true,
                _ => {}
            }
            if kind == last {
                break;
            }
        }
        answer
    }

    /// The next message; None at the end of the connection, in the middle of a message too.
    fn next(&mut self) -> Option<(u8, Vec<u8>)> {
        let mut head = [0; 5];
        self.fill(&mut head)?;
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
        let mut body = vec![0; length as usize - 4];
        self.fill(&mut body)?;
        Some((head[0], body))
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Option<()> {
        match self.0.read_exact(bytes) {
            Ok(()) => Some(()),
            Err(error) if is_end(&error) => None,
            Err(error) => panic!("the server does not answer: {error}"),
        }
    }
}

fn is_end(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
    )
}

/// Of a DataRow: number of columns, length and bytes of each.
fn first_column(body: &[u8]) -> Option<String> {
    let length = i32::from_be_bytes(body[2..6].try_into().expect("four bytes"));
    let length = usize::try_from(length).ok()?;
    Some(String::from_utf8_lossy(&body[6..6 + length]).into_owned())
}

/// Of an ErrorResponse or NoticeResponse: fields of a letter and a string each.
fn sqlstate(body: &[u8]) -> String {
    let code = body
        .split(|byte| *byte == 0)
        .find(|field| field.first() == Some(&b'C'));
    String::from_utf8_lossy(&code.expect("an error has a code")[1..]).into_owned()
}

//! One client session, and a statement of it that runs in the background.
//!
//! `one` and `err_with` go through the extended protocol, a statement at a time. `exec`, `text`, `rows` and `err` go
//! through the simple one, where several statements in one string are one implicit transaction block.

use std::fmt;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use postgres::types::{FromSql, ToSql};
use postgres::{Client, Config, NoTls, SimpleQueryMessage};

/// Longest time that any awaited condition may take. It only bounds a test that hangs.
pub const LIMIT: Duration = Duration::from_secs(60);

/// An error as a client sees it. Where the connection itself broke, `sqlstate` is 08006.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DbErr {
    pub sqlstate: String,
    pub message: String,
    pub detail: Option<String>,
    pub hint: Option<String>,
}

impl From<postgres::Error> for DbErr {
    fn from(error: postgres::Error) -> Self {
        match error.as_db_error() {
            Some(db) => Self {
                sqlstate: db.code().code().to_owned(),
                message: db.message().to_owned(),
                detail: db.detail().map(str::to_owned),
                hint: db.hint().map(str::to_owned),
            },
            None => Self {
                sqlstate: "08006".to_owned(),
                message: format!("{error}: {error:?}"),
                detail: None,
                hint: None,
            },
        }
    }
}

impl fmt::Display for DbErr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.sqlstate, self.message)?;
        self.detail
            .iter()
            .try_for_each(|detail| write!(f, "\n  DETAIL: {detail}"))?;
        self.hint
            .iter()
            .try_for_each(|hint| write!(f, "\n  HINT: {hint}"))
    }
}

impl DbErr {
    /// Asserts the SQLSTATE, and gives the error on.
    #[track_caller]
    pub fn is(self, sqlstate: &str) -> Self {
        assert_eq!(self.sqlstate, sqlstate, "unexpected SQLSTATE: {self}");
        self
    }

    /// The session was ended; whether the server's last word got through is a matter of luck.
    pub fn is_lost(&self) -> bool {
        matches!(self.sqlstate.as_str(), "08006" | "57P01")
    }
}

pub type Row = Vec<Option<String>>;

pub struct Session {
    client: Client,
    /// The backend's pid.
    pub pid: i32,
}

impl Session {
    pub fn try_connect(config: &Config) -> Result<Self, DbErr> {
        let mut client = config.connect(NoTls)?;
        let pid = client.query_one("SELECT pg_backend_pid()", &[])?.get(0);
        Ok(Self { client, pid })
    }

    /// Connects through a pooler, which has no backend of its own to name and knows no prepared statements.
    pub fn connect_pooled(config: &Config) -> Result<Self, DbErr> {
        Ok(Self {
            client: config.connect(NoTls)?,
            pid: 0,
        })
    }

    /// The first column of the only row.
    #[track_caller]
    pub fn one<T: for<'a> FromSql<'a>>(&mut self, sql: &str) -> T {
        self.one_with(sql, &[])
    }

    #[track_caller]
    pub fn one_with<T: for<'a> FromSql<'a>>(
        &mut self,
        sql: &str,
        params: &[&(dyn ToSql + Sync)],
    ) -> T {
        match self.try_one_with(sql, params) {
            Ok(value) => value,
            Err(error) => panic!("{sql}\n  {error}"),
        }
    }

    pub fn try_one<T: for<'a> FromSql<'a>>(&mut self, sql: &str) -> Result<T, DbErr> {
        self.try_one_with(sql, &[])
    }

    pub fn try_one_with<T: for<'a> FromSql<'a>>(
        &mut self,
        sql: &str,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<T, DbErr> {
        let result = self
            .client
            .query_one(sql, params)
            .and_then(|row| row.try_get(0));
        result.map_err(|error| self.settled(error))
    }

    /// Runs one or more statements by the simple protocol.
    #[track_caller]
    pub fn exec(&mut self, sql: &str) {
        if let Err(error) = self.try_rows(sql) {
            panic!("{sql}\n  {error}");
        }
    }

    pub fn try_exec(&mut self, sql: &str) -> Result<(), DbErr> {
        self.try_rows(sql).map(|_| ())
    }

    /// All rows of all statements, as text.
    #[track_caller]
    pub fn rows(&mut self, sql: &str) -> Vec<Row> {
        match self.try_rows(sql) {
            Ok(rows) => rows,
            Err(error) => panic!("{sql}\n  {error}"),
        }
    }

    pub fn try_rows(&mut self, sql: &str) -> Result<Vec<Row>, DbErr> {
        let mut rows = Vec::new();
        let messages = self
            .client
            .simple_query(sql)
            .map_err(|error| self.settled(error))?;
        for message in messages {
            if let SimpleQueryMessage::Row(row) = message {
                rows.push(
                    (0..row.len())
                        .map(|i| row.get(i).map(str::to_owned))
                        .collect(),
                );
            }
        }
        Ok(rows)
    }

    /// The first column of the last row, as text; None where it is NULL or where there is no row.
    #[track_caller]
    pub fn text(&mut self, sql: &str) -> Option<String> {
        self.rows(sql)
            .pop()
            .and_then(|row| row.into_iter().next().flatten())
    }

    pub fn try_text(&mut self, sql: &str) -> Result<Option<String>, DbErr> {
        Ok(self
            .try_rows(sql)?
            .pop()
            .and_then(|row| row.into_iter().next().flatten()))
    }

    /// The error that the statement must end with.
    #[track_caller]
    pub fn err(&mut self, sql: &str) -> DbErr {
        match self.try_rows(sql) {
            Ok(rows) => panic!("no error from: {sql}\n  but: {rows:?}"),
            Err(error) => error,
        }
    }

    /// COPY ... FROM STDIN.
    pub fn try_copy_in(&mut self, sql: &str, data: &str) -> Result<u64, DbErr> {
        use std::io::Write;
        let copied = self.client.copy_in(sql).and_then(|mut writer| {
            writer
                .write_all(data.as_bytes())
                .expect("the data is written to memory");
            writer.finish()
        });
        copied.map_err(|error| self.settled(error))
    }

    /// An error arrives before the server has undone what failed; what other sessions see is settled only when
    /// this one's backend is ready again. An empty statement waits for that.
    fn settled(&mut self, error: postgres::Error) -> DbErr {
        let _ = self.client.simple_query("");
        error.into()
    }

    /// Runs `sql` in a thread, to be awaited by `Pending::join`.
    pub fn spawn(mut self, sql: &str) -> Pending {
        let (pid, sql, (sender, done)) = (self.pid, sql.to_owned(), channel());
        let statement = sql.clone();
        thread::spawn(move || {
            let result = self.try_text(&sql);
            // the receiver is gone where the test has failed meanwhile
            let _ = sender.send((self, result));
        });
        Pending {
            pid,
            statement,
            done,
            finished: None,
        }
    }
}

type Finished = (Session, Result<Option<String>, DbErr>);

/// A statement that runs in the background.
pub struct Pending {
    pub pid: i32,
    statement: String,
    done: Receiver<Finished>,
    finished: Option<Finished>,
}

impl Pending {
    pub fn is_done(&mut self) -> bool {
        if self.finished.is_none() {
            self.finished = self.done.try_recv().ok();
        }
        self.finished.is_some()
    }

    /// What came of it, for a message.
    pub fn result(&self) -> String {
        match &self.finished {
            Some((_, result)) => format!("{result:?}"),
            None => "it runs".to_owned(),
        }
    }

    /// The session back, and the first column of the last row.
    #[track_caller]
    pub fn join(self) -> (Session, Result<Option<String>, DbErr>) {
        self.join_within(LIMIT)
    }

    #[track_caller]
    pub fn join_within(self, limit: Duration) -> (Session, Result<Option<String>, DbErr>) {
        if let Some(finished) = self.finished {
            return finished;
        }
        match self.done.recv_timeout(limit) {
            Ok(finished) => finished,
            Err(RecvTimeoutError::Timeout) => {
                panic!("still running after {limit:?}: {}", self.statement)
            }
            Err(RecvTimeoutError::Disconnected) => {
                panic!("the thread of a statement died: {}", self.statement)
            }
        }
    }
}

//! A load of clients that acquire, write, stall, renew and release, and keep a history of what they heard.
//!
//! A client stalls on purpose, for longer than a lease lasts at times, with its transaction open at others: that is the
//! worker that fencing tokens exist for. It goes on writing under tokens that it has lost, released or rolled back.
//! When its connection breaks it comes back and goes on with what it believes to hold.
//!
//! Everything that a client decides follows from the seed. What the server answers and when does not.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use postgres::Config;

use super::history::{
    End, Fate, Grant, History, Micros, Release, Renewal, Resource, Row, Sight, Write,
};
use super::rng::Rng;
use crate::cluster::{Db, wait_for};
use crate::session::{DbErr, Session};

pub const CLIENTS: usize = 8;
/// Resources that the clients contend for. Fewer than clients, so that takers come while holders stall.
pub const CONTENDED: usize = 4;
/// Resources that are leased for a moment only: they push the others out of the shared table.
const FLEETING: usize = 60;
/// Short enough for many takeovers, long enough to outlive a restart at times.
const TTL_MS: (u64, u64) = (100, 500);
/// Pause of a client that got nothing or cannot connect.
const PAUSE: Duration = Duration::from_millis(3);

/// A log of writes that only holders may append to, and the counter that numbers them, in the same transaction.
const TABLES: &str = "
    CREATE TABLE counter (resource text PRIMARY KEY, seq bigint NOT NULL);
    CREATE TABLE log (resource text NOT NULL, seq bigint NOT NULL, token bigint, id bigint NOT NULL);
    SELECT fence_table('log', '{resource}', 'token');";

fn name(resource: Resource) -> String {
    format!("r{resource}")
}

/// What the clients and the one who lets them work share.
struct Shared {
    config: Config,
    begin: Instant,
    stop: AtomicBool,
    /// The backend of each client; 0 while it has none.
    backends: [AtomicI32; CLIENTS],
    /// Writes that were acknowledged.
    written: AtomicU64,
    /// Writes that the fence refused, by SQLSTATE; and answers that nobody should get.
    refused: Mutex<HashMap<String, usize>>,
    unexpected: Mutex<Vec<String>>,
}

impl Shared {
    fn now(&self) -> Micros {
        Micros::try_from(self.begin.elapsed().as_micros()).expect("a run is short")
    }
}

pub struct Load {
    shared: Arc<Shared>,
    clients: Vec<JoinHandle<History>>,
}

/// What a load has to tell when it is over.
pub struct Told {
    pub history: History,
    pub refused: HashMap<String, usize>,
    pub unexpected: Vec<String>,
}

impl Load {
    pub fn start(db: &Db, seed: u64) -> Self {
        let mut session = db.session();
        session.exec(TABLES);
        for resource in 0..CONTENDED {
            session.exec(&format!(
                "INSERT INTO counter VALUES ('{}', 0)",
                name(resource)
            ));
        }
        let mut config = db.cluster.config();
        config.dbname(&db.name);
        let shared = Arc::new(Shared {
            config,
            begin: Instant::now(),
            stop: AtomicBool::new(false),
            backends: std::array::from_fn(|_| AtomicI32::new(0)),
            written: AtomicU64::new(0),
            refused: Mutex::default(),
            unexpected: Mutex::default(),
        });
        let clients = (0..CLIENTS)
            .map(|number| {
                let shared = shared.clone();
                thread::spawn(move || Client::new(shared, number, seed).run())
            })
            .collect();
        Self { shared, clients }
    }

    pub fn now(&self) -> Micros {
        self.shared.now()
    }

    /// Waits until every client is connected and so many more writes have been acknowledged.
    pub fn wait_for_writes(&self, more: u64) {
        let goal = self.shared.written.load(Ordering::Relaxed) + more;
        wait_for("the load to write", || {
            let connected = self
                .shared
                .backends
                .iter()
                .all(|pid| pid.load(Ordering::Relaxed) != 0);
            (connected && self.shared.written.load(Ordering::Relaxed) >= goal).then_some(())
        });
    }

    /// The backend of a client, if it has one.
    pub fn backend(&self, client: usize) -> Option<i32> {
        let pid = self.shared.backends[client % CLIENTS].load(Ordering::Relaxed);
        (pid != 0).then_some(pid)
    }

    /// Ends the load and gives what its clients have seen.
    pub fn finish(mut self) -> Told {
        self.shared.stop.store(true, Ordering::Relaxed);
        let mut history = History::default();
        for client in self.clients.drain(..) {
            history.append(client.join().expect("a client came to its end"));
        }
        Told {
            history,
            refused: std::mem::take(&mut self.shared.refused.lock().expect("no client panicked")),
            unexpected: std::mem::take(
                &mut self.shared.unexpected.lock().expect("no client panicked"),
            ),
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for client in self.clients.drain(..) {
            let _ = client.join();
        }
    }
}

/// What the database holds after the load.
pub fn end_of(db: &Db, blows: Vec<Micros>) -> End {
    let mut session = db.session();
    let number = |text: &Option<String>| -> i64 {
        text.as_deref()
            .and_then(|text| text.parse().ok())
            .expect("a number")
    };
    let resource = |text: &Option<String>| usize::try_from(number(text)).expect("a resource");
    let rows = session.rows("SELECT substr(resource, 2), seq, token, id FROM log");
    let counters = session.rows("SELECT substr(resource, 2), seq FROM counter");
    let ledger = session.rows("SELECT substr(resource, 2), token FROM leasehold.ledger");
    let position = session.text("SELECT last_value FROM leasehold.token_seq");
    End {
        rows: rows
            .iter()
            .map(|row| Row {
                resource: resource(&row[0]),
                seq: number(&row[1]),
                token: number(&row[2]),
                id: number(&row[3]),
            })
            .collect(),
        counters: counters
            .iter()
            .map(|row| (resource(&row[0]), number(&row[1])))
            .collect(),
        ledger: ledger
            .iter()
            .map(|row| (resource(&row[0]), number(&row[1])))
            .collect(),
        position: number(&position),
        blows,
    }
}

/// Why a transaction did not come to its end.
enum Trouble {
    /// The server said no, and the connection is good.
    Refused(DbErr),
    /// The connection is gone.
    Lost,
}

type Tried<T> = Result<T, Trouble>;

/// What a client goes on writing under, rightly or not.
#[derive(Clone, Copy)]
struct Hold {
    resource: Resource,
    token: i64,
}

struct Client {
    shared: Arc<Shared>,
    number: usize,
    rng: Rng,
    session: Option<Session>,
    hold: Option<Hold>,
    writes: i64,
    /// When the last BEGIN was sent.
    began: Micros,
    history: History,
}

impl Client {
    fn new(shared: Arc<Shared>, number: usize, seed: u64) -> Self {
        Self {
            shared,
            number,
            rng: Rng::part(seed, number as u64 + 1),
            session: None,
            hold: None,
            writes: 0,
            began: 0,
            history: History::default(),
        }
    }

    fn run(mut self) -> History {
        while !self.shared.stop.load(Ordering::Relaxed) {
            if self.session.is_none() && !self.connect() {
                thread::sleep(PAUSE);
                continue;
            }
            let done = match self.hold {
                None => self.without_lease(),
                Some(hold) => self.with_lease(hold),
            };
            match done {
                Ok(()) => {}
                Err(Trouble::Lost) => {
                    self.shared.backends[self.number].store(0, Ordering::Relaxed);
                    self.session = None;
                }
                Err(Trouble::Refused(error)) => self.unexpected(&error),
            }
        }
        self.history
    }

    fn connect(&mut self) -> bool {
        self.session = Session::try_connect(&self.shared.config).ok();
        if let Some(session) = &self.session {
            self.shared.backends[self.number].store(session.pid, Ordering::Relaxed);
        }
        self.session.is_some()
    }

    fn without_lease(&mut self) -> Tried<()> {
        if self.rng.chance(15) {
            let resource = CONTENDED + self.rng.below(FLEETING as u64) as usize;
            return self.acquire_alone(resource, 1).map(|_| ());
        }
        let resource = self.rng.below(CONTENDED as u64) as usize;
        let ttl = self.ttl();
        if self.rng.chance(60) {
            if let Some(token) = self.acquire_alone(resource, ttl)? {
                self.hold = Some(Hold { resource, token });
                self.see(resource, token)?;
            } else {
                thread::sleep(PAUSE);
            }
            return Ok(());
        }
        self.acquire_in_block(resource, ttl)
    }

    fn with_lease(&mut self, hold: Hold) -> Tried<()> {
        match self.rng.below(100) {
            0..60 => self.write(hold),
            60..72 => self.renew(hold),
            72..84 => {
                self.stall();
                Ok(())
            }
            84..96 => self.release(hold),
            // forgets it without a release, as a client that crashed
            _ => {
                self.hold = None;
                Ok(())
            }
        }
    }

    fn ttl(&mut self) -> Micros {
        Micros::try_from(self.rng.between(TTL_MS.0, TTL_MS.1) * 1000).expect("a short time")
    }

    /// The client does nothing for up to one and a half times the longest TTL.
    fn stall(&mut self) {
        let stall = self.rng.between(1, TTL_MS.1 * 3 / 2);
        thread::sleep(Duration::from_millis(stall));
    }

    /// One statement; the first column of its last row.
    fn sql(&mut self, sql: &str) -> Tried<Option<String>> {
        let session = self.session.as_mut().ok_or(Trouble::Lost)?;
        session.try_text(sql).map_err(|error| {
            if error.is_lost() || error.sqlstate == "57P02" {
                Trouble::Lost
            } else {
                Trouble::Refused(error)
            }
        })
    }

    /// The same for an answer that is a number or NULL.
    fn sql_number(&mut self, sql: &str) -> Tried<Option<i64>> {
        let answer = self.sql(sql)?;
        Ok(answer.map(|text| text.parse().expect("a number")))
    }

    fn unexpected(&mut self, error: &DbErr) {
        let mut unexpected = self.shared.unexpected.lock().expect("no client panicked");
        unexpected.push(error.to_string());
    }

    /// The token with the times, to be filed when the fate is known. A full table is an answer as good as NULL.
    fn acquire(&mut self, resource: Resource, ttl: Micros) -> Tried<Option<Grant>> {
        let invoked = self.shared.now();
        let sql = format!(
            "SELECT acquire_lease('{}', 'client {}', '{ttl} microseconds')",
            name(resource),
            self.number
        );
        let token = match self.sql_number(&sql) {
            Err(Trouble::Refused(error)) if error.sqlstate == "LH006" => {
                self.count_refusal(&error);
                None
            }
            other => other?,
        };
        let answered = self.shared.now();
        Ok(token.map(|token| Grant {
            resource,
            token,
            ttl,
            invoked,
            answered,
            fate: Fate::Unknown,
            open_until: answered,
        }))
    }

    fn acquire_alone(&mut self, resource: Resource, ttl: Micros) -> Tried<Option<i64>> {
        let grant = self.acquire(resource, ttl)?;
        self.history.grants.extend(grant.map(|grant| Grant {
            fate: Fate::Committed,
            ..grant
        }));
        Ok(grant.map(|grant| grant.token))
    }

    /// Acquires in a block, with a write or without, which commits or not.
    fn acquire_in_block(&mut self, resource: Resource, ttl: Micros) -> Tried<()> {
        self.began = self.shared.now();
        self.sql("BEGIN")?;
        let Some(mut grant) = self.acquire(resource, ttl)? else {
            self.sql("ROLLBACK")?;
            thread::sleep(PAUSE);
            return Ok(());
        };
        let token = grant.token;
        let work = self.work_in_block(resource, token);
        let mut fate = Fate::RolledBack;
        let ended = match work {
            Err(Trouble::Lost) => Err(Trouble::Lost),
            Err(Trouble::Refused(error)) => {
                self.unexpected(&error);
                self.sql("ROLLBACK").map(|_| ())
            }
            Ok(write) => {
                let commit = self.rng.chance(70);
                let ended = self.end_block(commit, write);
                if !commit {
                    grant.open_until = ended.from;
                }
                fate = ended.fate;
                ended.outcome
            }
        };
        grant.fate = fate;
        self.history.grants.push(grant);
        // one that was rolled back is good for nothing, and is tried now and then
        if fate != Fate::RolledBack || self.rng.chance(30) {
            self.hold = Some(Hold { resource, token });
        }
        ended
    }

    fn work_in_block(&mut self, resource: Resource, token: i64) -> Tried<Option<Write>> {
        self.see(resource, token)?;
        if self.rng.chance(20) {
            self.stall();
        }
        if self.rng.chance(50) {
            return self.append(Hold { resource, token }, "NULL").map(Some);
        }
        Ok(None)
    }

    /// What the holder sees of those before it.
    fn see(&mut self, resource: Resource, token: i64) -> Tried<()> {
        let sql = format!(
            "SELECT seq FROM counter WHERE resource = '{}'",
            name(resource)
        );
        if let Some(seq) = self.sql_number(&sql)? {
            self.history.sights.push(Sight {
                resource,
                token,
                seq,
            });
        }
        Ok(())
    }

    /// A transaction with a fenced write, presented in one of three ways.
    fn write(&mut self, hold: Hold) -> Tried<()> {
        self.began = self.shared.now();
        self.sql("BEGIN")?;
        match self.present_and_append(hold) {
            Ok(write) => {
                let releases = self.rng.chance(10);
                if releases {
                    return self.release_with(hold, write);
                }
                let commit = self.rng.chance(85);
                self.end_block(commit, Some(write)).outcome
            }
            Err(Trouble::Refused(error)) => {
                let write = self.new_write(hold);
                self.history.writes.push(Write {
                    answered: self.shared.now(),
                    refused: true,
                    ..write
                });
                self.refused(&error);
                self.sql("ROLLBACK").map(|_| ())
            }
            Err(Trouble::Lost) => Err(Trouble::Lost),
        }
    }

    fn present_and_append(&mut self, hold: Hold) -> Tried<Write> {
        let Hold { resource, token } = hold;
        let mut column = "NULL".to_owned();
        match self.rng.below(3) {
            0 => drop(self.sql(&format!("SELECT fence('{}', {token})", name(resource)))?),
            1 => drop(self.sql(&format!("SET LOCAL leasehold.token = '{token}'"))?),
            _ => column = token.to_string(),
        }
        if self.rng.chance(10) {
            self.stall();
        }
        let write = self.append(hold, &column)?;
        if self.rng.chance(10) {
            self.stall();
        }
        Ok(write)
    }

    fn new_write(&mut self, hold: Hold) -> Write {
        self.writes += 1;
        Write {
            resource: hold.resource,
            token: hold.token,
            id: self.number as i64 * 1_000_000 + self.writes,
            began: self.began,
            commit_invoked: 0,
            answered: 0,
            fate: Fate::RolledBack,
            refused: false,
        }
    }

    /// The write itself. Its row is numbered by the counter, whose lock keeps the order of commits.
    fn append(&mut self, hold: Hold, column: &str) -> Tried<Write> {
        let write = self.new_write(hold);
        let (resource, id) = (name(hold.resource), write.id);
        self.sql(&format!(
            "WITH next AS (UPDATE counter SET seq = seq + 1 WHERE resource = '{resource}' RETURNING seq)
             INSERT INTO log SELECT '{resource}', seq, {column}, {id} FROM next"
        ))?;
        Ok(write)
    }

    /// Commits or rolls back, and files the write of the block.
    fn end_block(&mut self, commit: bool, write: Option<Write>) -> Ended {
        let commit_invoked = self.shared.now();
        let outcome = self.sql(if commit { "COMMIT" } else { "ROLLBACK" });
        let answered = self.shared.now();
        let fate = match (&outcome, commit) {
            (_, false) => Fate::RolledBack,
            (Ok(_), true) => Fate::Committed,
            (Err(_), true) => Fate::Unknown,
        };
        if let Some(write) = write {
            self.history.writes.push(Write {
                commit_invoked,
                answered,
                fate,
                ..write
            });
            if fate == Fate::Committed {
                self.shared.written.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ended {
            fate,
            from: commit_invoked,
            outcome: outcome.map(|_| ()),
        }
    }

    fn renew(&mut self, hold: Hold) -> Tried<()> {
        let Hold { resource, token } = hold;
        let ttl = self.ttl();
        let invoked = self.shared.now();
        let sql = format!(
            "SELECT renew_lease('{}', {token}, '{ttl} microseconds')",
            name(resource)
        );
        let answer = self.sql(&sql)?;
        let renewed = answer.as_deref() == Some("t");
        self.history.renewals.push(Renewal {
            token,
            ttl,
            invoked,
            answered: self.shared.now(),
            renewed,
        });
        if !renewed && self.rng.chance(60) {
            self.hold = None;
        }
        Ok(())
    }

    fn release(&mut self, hold: Hold) -> Tried<()> {
        let from = self.shared.now();
        let outcome = self.sql(&release_of(hold));
        let fate = match &outcome {
            Ok(answer) => effect(answer, Fate::Committed),
            Err(_) => Fate::Unknown,
        };
        self.released(hold, from, fate);
        outcome.map(|_| ())
    }

    /// Ends the block of a write with a release in it.
    fn release_with(&mut self, hold: Hold, write: Write) -> Tried<()> {
        match self.sql(&release_of(hold)) {
            Ok(answer) => {
                let commit = self.rng.chance(80);
                let ended = self.end_block(commit, Some(write));
                self.released(hold, ended.from, effect(&answer, ended.fate));
                ended.outcome
            }
            Err(trouble) => {
                self.history.writes.push(Write {
                    answered: self.shared.now(),
                    ..write
                });
                Err(trouble)
            }
        }
    }

    /// Files a release; at times the client goes on as if it had not asked for it.
    fn released(&mut self, hold: Hold, from: Micros, fate: Fate) {
        self.history.releases.push(Release {
            token: hold.token,
            from,
            answered: self.shared.now(),
            fate,
        });
        if fate != Fate::RolledBack && self.rng.chance(75) {
            self.hold = None;
        }
    }

    /// The fence has spoken: mostly the client obeys.
    fn refused(&mut self, error: &DbErr) {
        if !matches!(error.sqlstate.as_str(), "LH001" | "LH002" | "LH004") {
            self.unexpected(error);
        }
        self.count_refusal(error);
        if self.rng.chance(80) {
            self.hold = None;
        }
    }

    fn count_refusal(&mut self, error: &DbErr) {
        let mut refused = self.shared.refused.lock().expect("no client panicked");
        *refused.entry(error.sqlstate.clone()).or_default() += 1;
    }
}

fn release_of(hold: Hold) -> String {
    format!(
        "SELECT release_lease('{}', {})",
        name(hold.resource),
        hold.token
    )
}

/// What becomes of a release; one that was answered with false changes nothing.
fn effect(answer: &Option<String>, fate: Fate) -> Fate {
    match answer.as_deref() {
        Some("t") => fate,
        _ => Fate::RolledBack,
    }
}

/// How a block has ended.
struct Ended {
    fate: Fate,
    /// When its end was asked for.
    from: Micros,
    outcome: Tried<()>,
}

/// Numbers of a load, for people.
pub fn summary(told: &Told) -> String {
    let history = &told.history;
    let committed = |fate: &Fate| *fate == Fate::Committed;
    let mut text = format!(
        "{} grants, {} writes, {} takeovers",
        history
            .grants
            .iter()
            .filter(|grant| committed(&grant.fate))
            .count(),
        history
            .writes
            .iter()
            .filter(|write| committed(&write.fate))
            .count(),
        history.takeovers(CONTENDED)
    );
    let unknown = history
        .writes
        .iter()
        .filter(|write| write.fate == Fate::Unknown)
        .count();
    write!(text, ", {unknown} commits of unknown fate").expect("a string takes what is written");
    let mut refused: Vec<_> = told.refused.iter().collect();
    refused.sort();
    for (sqlstate, count) in refused {
        write!(text, ", {count} {sqlstate}").expect("a string takes what is written");
    }
    text
}

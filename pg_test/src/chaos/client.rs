//! A client: a process of its own, this program started again, so that it can be killed and stopped.
//!
//! It acquires, writes, stalls, renews and releases, and goes on at times under leases that it has lost, released or
//! rolled back: that is the worker that fencing tokens exist for. It stalls for longer than a lease lasts, inside and
//! outside of transactions. When its connection breaks it comes back, to whichever server is told to it by then, and
//! goes on with what it believes to hold.
//!
//! Everything that it decides follows from the seed; what the server answers and when does not. It judges nothing: what
//! it asked and heard goes to its standard output, a line at a time. From its standard input it learns where the server
//! is, and when to stop; it ends with the program that started it.

use std::io::{BufRead, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use postgres::Config;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use super::clock::{self, Micros, millis};
use super::event::{Event, Lease, Op, Resource, Stamped, name};
use super::rng::Rng;
use super::work::{CONTENDED, FLEETING, Shape, Way, count};
use crate::session::{DbErr, LIMIT, Session};

/// The first argument of this program when it is a client.
pub const MODE: &str = "--chaos-client";
/// Short enough for many takeovers.
const SHORT_TTL_MS: (u64, u64) = (100, 400);
/// Long enough to outlive a restart or a promotion at times.
pub const LONG_TTL_MS: (u64, u64) = (500, 950);
/// How long a client stalls at most: longer than most leases last.
const STALL_MS: u64 = 700;
/// How often of a hundred times a client does not wait for a commit.
const LAZY: u64 = 30;
/// Pause of a client that got nothing or cannot connect.
const PAUSE: Duration = Duration::from_millis(8);
/// So many writes of a client have ids of its own.
const IDS: i64 = 1_000_000;

/// Runs as a client: `--chaos-client NUMBER SEED DATABASE PARENT`.
pub fn main(args: &[String]) -> ExitCode {
    let [number, seed, database, parent] = args else {
        return ExitCode::from(2);
    };
    // a stopped process does not notice that its standard input has ended
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let orphaned = getppid().is_none_or(|pid| pid.as_raw_nonzero().to_string() != *parent);
    let (Ok(number), Ok(seed), false) = (number.parse::<usize>(), seed.parse(), orphaned) else {
        return ExitCode::from(2);
    };
    let orders = Arc::new(Mutex::new(Orders::default()));
    let listener = orders.clone();
    thread::spawn(move || listen(&listener));
    Client {
        number,
        rng: Rng::part(seed, number as u64 + 1),
        database: database.clone(),
        orders,
        session: None,
        memory: false,
        leases: Vec::new(),
        writes: 0,
    }
    .run();
    ExitCode::SUCCESS
}

/// What the client is told: lines `server SOCKET_DIR`, `stop`.
#[derive(Default)]
struct Orders {
    server: Option<PathBuf>,
    stop: bool,
}

fn listen(orders: &Mutex<Orders>) {
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let mut orders = orders.lock().unwrap_or_else(|e| e.into_inner());
        match line.split_once(' ') {
            Some(("server", dir)) => orders.server = Some(dir.into()),
            _ => orders.stop = true,
        }
    }
    std::process::exit(0);
}

enum Trouble {
    /// The server said no, and the connection is good.
    Refused,
    /// The connection is gone.
    Lost,
}

type Tried<T> = Result<T, Trouble>;

struct Client {
    number: usize,
    rng: Rng,
    database: String,
    orders: Arc<Mutex<Orders>>,
    session: Option<Session>,
    /// Whether the session acquires leases that are not durable.
    memory: bool,
    /// What the client goes on writing under, rightly or not: two at most, of different resources.
    leases: Vec<Lease>,
    writes: i64,
}

impl Client {
    fn run(mut self) {
        while !self.orders().stop {
            if self.session.is_none() && !self.connect() {
                thread::sleep(PAUSE);
                continue;
            }
            if let Err(Trouble::Lost) = self.step() {
                self.session = None;
            }
        }
    }

    fn orders(&self) -> std::sync::MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn connect(&mut self) -> bool {
        let Some(server) = self.orders().server.clone() else {
            return false;
        };
        let mut config = Config::new();
        config.host_path(server).port(5432).user("postgres");
        config.dbname(&self.database).connect_timeout(LIMIT);
        config.application_name(&format!("client {}", self.number));
        self.session = self.session_of(&config).ok();
        if let Some(session) = &self.session {
            tell(Event::Connected(session.pid));
        }
        self.session.is_some()
    }

    fn session_of(&mut self, config: &Config) -> Result<Session, DbErr> {
        self.memory = self.rng.chance(30);
        let mut session = Session::try_connect(config)?;
        if self.memory {
            session.try_exec("SET leasehold.durability = memory")?;
        }
        Ok(session)
    }

    fn step(&mut self) -> Tried<()> {
        match self.leases.len() {
            0 => self.get(),
            1 if self.rng.chance(10) => self.get(),
            _ => {
                let lease = self.leases[self.rng.below(self.leases.len() as u64) as usize];
                self.use_lease(lease)
            }
        }
    }

    fn get(&mut self) -> Tried<()> {
        if self.rng.chance(15) {
            let resource = CONTENDED + self.rng.below(FLEETING as u64) as usize;
            return self
                .lazily(|client| client.acquire(resource, millis(1)))
                .map(|_| ());
        }
        let resource = self.rng.below(CONTENDED as u64) as usize;
        let ttl = self.ttl();
        if self.rng.chance(30) {
            return self.acquire_in_block(resource, ttl);
        }
        if let Some(lease) = self.lazily(|client| client.acquire(resource, ttl))? {
            self.keep(lease);
            self.ask(Op::See { lease })?;
        } else {
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn use_lease(&mut self, lease: Lease) -> Tried<()> {
        match self.rng.below(100) {
            0..58 => self.write_in_block(lease),
            58..68 => self.lazily(|client| client.renew(lease)),
            68..81 => {
                self.stall();
                Ok(())
            }
            81..94 => self.lazily(|client| client.release(lease)),
            // forgets it without a release, as a client that crashed
            _ => {
                self.forget(lease);
                Ok(())
            }
        }
    }

    fn keep(&mut self, lease: Lease) {
        self.leases.retain(|kept| kept.resource != lease.resource);
        self.leases.push(lease);
        // a takeover of several resources is done in one order everywhere, so that their rows are no deadlock
        self.leases.sort_by_key(|lease| lease.resource);
    }

    fn forget(&mut self, lease: Lease) {
        self.leases.retain(|kept| *kept != lease);
    }

    /// Mostly the client believes what it is told.
    fn forget_mostly(&mut self, lease: Lease) {
        if self.rng.chance(70) {
            self.forget(lease);
        }
    }

    fn ttl(&mut self) -> Micros {
        let (low, high) = if self.rng.chance(70) {
            SHORT_TTL_MS
        } else {
            LONG_TTL_MS
        };
        millis(self.rng.between(low, high))
    }

    fn stall(&mut self) {
        thread::sleep(Duration::from_millis(self.rng.between(1, STALL_MS)));
    }

    /// The same with a transaction open: idle, or in a statement.
    fn stall_in_block(&mut self) -> Tried<()> {
        if self.rng.chance(50) {
            self.stall();
            return Ok(());
        }
        let ms = self.rng.between(1, STALL_MS);
        self.quietly(&format!("SELECT pg_sleep({ms} / 1000.0)"))
    }

    fn acquire(&mut self, resource: Resource, ttl: Micros) -> Tried<Option<Lease>> {
        let durable = !self.memory;
        let answer = self.ask(Op::Acquire {
            resource,
            ttl,
            durable,
        });
        match answer {
            // a full table is an answer as good as NULL
            Err(Trouble::Refused) => Ok(None),
            other => Ok(other?.first().map(|token| Lease {
                resource,
                token: *token,
            })),
        }
    }

    /// Acquires in a block, in a savepoint or not, writes or not, and commits or not.
    fn acquire_in_block(&mut self, resource: Resource, ttl: Micros) -> Tried<()> {
        self.ask(Op::Begin)?;
        // what is written beside a lease in memory would not be durable
        if !self.memory && self.rng.chance(LAZY) {
            self.quietly("SET LOCAL synchronous_commit = off")?;
        }
        let nested = self.rng.chance(30);
        if nested {
            self.ask(Op::Savepoint)?;
        }
        let Some(lease) = self.acquire(resource, ttl)? else {
            self.ask(Op::Rollback)?;
            thread::sleep(PAUSE);
            return Ok(());
        };
        let mut done = self.work_under_own(lease).is_ok();
        if self.session.is_none() {
            return Err(Trouble::Lost);
        }
        if nested && done {
            let undo = self.rng.chance(30);
            done = !undo;
            self.ask(if undo {
                Op::RollbackTo
            } else {
                Op::ReleaseSavepoint
            })?;
        }
        let commit = done && self.rng.chance(75);
        // one that was undone is good for nothing, and is tried now and then; a commit that was not heard of may be good
        if commit || self.rng.chance(30) {
            self.keep(lease);
        }
        self.ask(if commit { Op::Commit } else { Op::Rollback })?;
        Ok(())
    }

    fn work_under_own(&mut self, lease: Lease) -> Tried<()> {
        self.ask(Op::See { lease })?;
        if self.rng.chance(40) {
            self.stall_in_block()?;
        }
        if self.rng.chance(60) {
            self.write(&[lease], Way::Own)?;
        }
        Ok(())
    }

    /// A transaction with a fenced write or two, one of them rolled back to a savepoint at times, and a release at
    /// others.
    fn write_in_block(&mut self, lease: Lease) -> Tried<()> {
        let all = self.leases.len() > 1 && self.rng.chance(50);
        let leases = if all {
            self.leases.clone()
        } else {
            vec![lease]
        };
        self.ask(Op::Begin)?;
        if let Err(trouble) = self.writes_in_block(&leases) {
            if let Trouble::Refused = trouble {
                self.ask(Op::Rollback)?;
                leases.iter().for_each(|lease| self.forget_mostly(*lease));
            }
            return Err(trouble);
        }
        let released = self.rng.chance(8) && !self.ask(Op::Release { lease })?.contains(&0);
        let commit = self.rng.chance(85);
        self.ask(if commit { Op::Commit } else { Op::Rollback })?;
        if released && commit {
            self.forget_mostly(lease);
        }
        Ok(())
    }

    fn writes_in_block(&mut self, leases: &[Lease]) -> Tried<()> {
        let way = [Way::Fence, Way::Setting, Way::Column][self.rng.below(3) as usize];
        if self.rng.chance(10) {
            self.ask(Op::Savepoint)?;
            self.write(leases, way)?;
            self.ask(Op::RollbackTo)?;
        }
        self.write(leases, way)?;
        if self.rng.chance(12) {
            self.stall_in_block()?;
        }
        if self.rng.chance(20) {
            self.write(leases, way)?;
        }
        Ok(())
    }

    /// Presents, writes under each lease in one shape, and numbers what was written.
    fn write(&mut self, leases: &[Lease], way: Way) -> Tried<()> {
        let mut shape = Shape::random(&mut self.rng);
        if way == Way::Column && !shape.takes_column() {
            shape = Shape::Update;
        }
        match way {
            Way::Fence => {
                for lease in leases {
                    self.ask(Op::Fence { lease: *lease })?;
                }
            }
            Way::Setting => {
                let tokens: Vec<String> = leases.iter().map(|l| l.token.to_string()).collect();
                self.quietly(&format!(
                    "SET LOCAL leasehold.token = '{}'",
                    tokens.join(",")
                ))?;
            }
            Way::Own | Way::Column => {}
        }
        if self.rng.chance(8) {
            self.stall_in_block()?;
        }
        self.writes += 1;
        let id = IDS * i64::try_from(self.number).expect("clients are few") + self.writes;
        let op = Op::Write {
            id,
            leases: leases.to_vec(),
        };
        self.perform(op, |session| write_all(session, leases, id, shape, way))
            .map(|_| ())
    }

    fn renew(&mut self, lease: Lease) -> Tried<()> {
        let ttl = self.ttl();
        let renewed = if self.rng.chance(20) {
            self.ask(Op::Begin)?;
            let renewed = self.ask(Op::Renew { lease, ttl });
            if let Err(Trouble::Lost) = renewed {
                return Err(Trouble::Lost);
            }
            let commit = renewed.is_ok() && self.rng.chance(80);
            self.ask(if commit { Op::Commit } else { Op::Rollback })?;
            renewed?
        } else {
            self.ask(Op::Renew { lease, ttl })?
        };
        if renewed == [0] {
            self.forget_mostly(lease);
        }
        Ok(())
    }

    fn release(&mut self, lease: Lease) -> Tried<()> {
        self.ask(Op::Release { lease })?;
        // at times the client goes on as if it had not asked for it
        self.forget_mostly(lease);
        Ok(())
    }

    /// At times in a session that does not wait for its commits: what a lease rests on has to be durable all the same. Not
    /// for writes, which may be lost then.
    fn lazily<T>(&mut self, work: impl FnOnce(&mut Self) -> Tried<T>) -> Tried<T> {
        if !self.rng.chance(LAZY) {
            return work(self);
        }
        self.quietly("SET synchronous_commit = off")?;
        let done = work(self);
        if self.session.is_some() {
            self.quietly("RESET synchronous_commit")?;
        }
        done
    }

    /// One statement that the history need not know of, unless it fails.
    fn quietly(&mut self, sql: &str) -> Tried<()> {
        let done = self.session()?.try_exec(sql);
        done.map_err(|error| self.trouble(error))
    }

    fn ask(&mut self, op: Op) -> Tried<Vec<i64>> {
        let sql = sql_of(&op, self.number);
        self.perform(op, |session| {
            let answer = session.try_text(&sql)?;
            // void is an empty text
            let told = answer.as_deref().filter(|text| !text.is_empty());
            Ok(told.map(number).into_iter().collect())
        })
    }

    fn perform(
        &mut self,
        op: Op,
        run: impl FnOnce(&mut Session) -> Result<Vec<i64>, DbErr>,
    ) -> Tried<Vec<i64>> {
        let session = self.session()?;
        tell(Event::Asked(op));
        match run(session) {
            Ok(numbers) => {
                tell(Event::Answered(numbers.clone()));
                Ok(numbers)
            }
            Err(error) => Err(self.trouble(error)),
        }
    }

    fn session(&mut self) -> Tried<&mut Session> {
        self.session.as_mut().ok_or(Trouble::Lost)
    }

    fn trouble(&mut self, error: DbErr) -> Trouble {
        // 57P02: another backend has crashed
        if error.is_lost() || error.sqlstate == "57P02" {
            tell(Event::Lost {
                sqlstate: error.sqlstate,
            });
            self.session = None;
            return Trouble::Lost;
        }
        tell(Event::Refused {
            sqlstate: error.sqlstate,
            message: error.message,
        });
        Trouble::Refused
    }
}

fn tell(event: Event) {
    let stamped = Stamped {
        at: clock::now(),
        event,
    };
    let line = format!("{stamped}\n");
    // one write, so that a line is whole or not there; where nobody reads any more there is nothing left to do
    let written = std::io::stdout()
        .write_all(line.as_bytes())
        .and_then(|()| std::io::stdout().flush());
    if written.is_err() {
        std::process::exit(0);
    }
}

fn number(text: &str) -> i64 {
    match text {
        "t" => 1,
        "f" => 0,
        text => text.parse().expect("a number or a boolean"),
    }
}

fn sql_of(op: &Op, client: usize) -> String {
    match op {
        Op::Begin => "BEGIN".to_owned(),
        Op::Savepoint => "SAVEPOINT s".to_owned(),
        Op::RollbackTo => "ROLLBACK TO s".to_owned(),
        Op::ReleaseSavepoint => "RELEASE s".to_owned(),
        Op::Commit => "COMMIT".to_owned(),
        Op::Rollback => "ROLLBACK".to_owned(),
        Op::Acquire { resource, ttl, .. } => format!(
            "SELECT acquire_lease('{}', 'client {client}', '{ttl} microseconds')",
            name(*resource)
        ),
        Op::Renew { lease, ttl } => format!(
            "SELECT renew_lease('{}', {}, '{ttl} microseconds')",
            name(lease.resource),
            lease.token
        ),
        Op::Release { lease } => {
            format!(
                "SELECT release_lease('{}', {})",
                name(lease.resource),
                lease.token
            )
        }
        Op::Fence { lease } => format!("SELECT fence('{}', {})", name(lease.resource), lease.token),
        Op::See { lease } => {
            format!(
                "SELECT seq FROM counter WHERE resource = '{}'",
                name(lease.resource)
            )
        }
        Op::Write { .. } => unreachable!("a write is several statements"),
    }
}

/// First all that is fenced, then the numbers: one order everywhere, so that there is no deadlock.
fn write_all(
    session: &mut Session,
    leases: &[Lease],
    id: i64,
    shape: Shape,
    way: Way,
) -> Result<Vec<i64>, DbErr> {
    let mut written = Vec::new();
    for lease in leases {
        written.push(write_one(session, *lease, id, shape, way)?);
    }
    let mut numbers = Vec::new();
    for (lease, shape) in leases.iter().zip(written) {
        let answer = session.try_text(&count(*lease, id, shape))?;
        numbers.push(answer.as_deref().map(number).expect("a counter for each"));
    }
    Ok(numbers)
}

/// A DELETE that found nothing was not fenced: an INSERT takes its place.
fn write_one(
    session: &mut Session,
    lease: Lease,
    id: i64,
    shape: Shape,
    way: Way,
) -> Result<Shape, DbErr> {
    let column = (way == Way::Column).then_some(lease.token);
    let sql = shape.sql(lease.resource, id, column);
    match shape {
        Shape::Copy => session
            .try_copy_in(&sql, &Shape::copied(lease.resource, id, column))
            .map(|_| shape),
        Shape::Delete if session.try_rows(&sql)?.is_empty() => session
            .try_exec(&Shape::Insert.sql(lease.resource, id, column))
            .map(|()| Shape::Insert),
        Shape::Delete => Ok(shape),
        _ => session.try_exec(&sql).map(|()| shape),
    }
}

//! A client: a process of its own, this program started again, so that it can be killed and stopped.
//!
//! It acquires, writes, stalls, renews and releases, and goes on at times under leases that it has lost, released or
//! rolled back: that is the worker that fencing tokens exist for. It stalls for longer than a lease lasts, inside and
//! outside of transactions. When its connection breaks it comes back, to whichever server is told to it by then, and
//! goes on with what it believes to hold. It waits for leases, some time or none, asks again where it has lost an answer,
//! or has not waited for it, and breaks the leases of others now and then.
//!
//! Everything that it decides follows from the seed; what the server answers and when does not. It judges nothing: what
//! it asked and heard goes to its standard output, a line at a time. From its standard input it learns where the server
//! is, and when to stop; it ends with the program that started it.

use std::io::{BufRead, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use postgres::Config;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use super::clock::{self, Micros, millis};
use super::event::{ABANDONED, Acquire, Event, Lease, Op, Resource, Stamped, name};
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
/// How long one waits for a lease: too short for most, long enough for most, and longer than it may take while nothing
/// is done to the server.
const WAITS_MS: [(u64, u64); 3] = [(5, 60), (100, 700), (2500, 3500)];
/// How long one waits at most for an answer that it goes away without.
const PATIENCE_MS: u64 = 40;
/// Pause of a client that got nothing or cannot connect.
const PAUSE: Duration = Duration::from_millis(8);
/// So many writes of a client, and requests, have ids of its own.
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
        in_block: false,
        requests: 0,
        last: None,
        unheard: Vec::new(),
        unheard_releases: Vec::new(),
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
    /// What the client goes on writing under, rightly or not: two mostly, of different resources.
    leases: Vec<Lease>,
    writes: i64,
    /// A block was begun, and its end is not known of.
    in_block: bool,
    requests: i64,
    /// The last request that was granted.
    last: Option<Acquire>,
    /// Requests, and releases, whose answer was lost.
    unheard: Vec<Acquire>,
    unheard_releases: Vec<Lease>,
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
            // a statement in the middle of it was refused
            if self.in_block {
                self.abandon();
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
        if self.rng.chance(2) {
            return self.break_one();
        }
        if !self.unheard.is_empty() && self.rng.chance(70) {
            return self.retry();
        }
        if !self.unheard_releases.is_empty() && self.rng.chance(70) {
            return self.retry_release();
        }
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
            let wanted = self.wanted(resource, millis(1));
            return self.lazily(|client| client.acquire(wanted)).map(|_| ());
        }
        // its lease is over most likely: then it is another one
        if let Some(last) = self.last.filter(|_| self.rng.chance(4)) {
            return self.take(last);
        }
        let resource = self.rng.below(CONTENDED as u64) as usize;
        let ttl = self.ttl();
        if self.rng.chance(30) {
            return self.acquire_in_block(resource, ttl);
        }
        let mut wanted = self.wanted(resource, ttl);
        wanted.wait = self.wait();
        match self.rng.below(100) {
            0..35 => wanted.request = Some(self.new_request()),
            35..55 => wanted.called = true,
            _ => {}
        }
        self.take(wanted)
    }

    /// Acquires, and looks at what the holders before have done.
    fn take(&mut self, wanted: Acquire) -> Tried<()> {
        if let Some(lease) = self.lazily(|client| client.acquire(wanted))? {
            self.keep(lease);
            self.ask(Op::See { lease })?;
            // as if it had not heard the answer
            if wanted.request.is_some() && self.rng.chance(30) {
                let again = self.acquire(wanted)?;
                again.into_iter().for_each(|lease| self.keep(lease));
            }
        } else {
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Asks again where the answer was lost.
    fn retry(&mut self) -> Tried<()> {
        let place = self.rng.below(self.unheard.len() as u64) as usize;
        let wanted = Acquire {
            wait: self.wait(),
            ..self.unheard.swap_remove(place)
        };
        self.take(wanted)
    }

    fn retry_release(&mut self) -> Tried<()> {
        let place = self.rng.below(self.unheard_releases.len() as u64) as usize;
        let lease = self.unheard_releases.swap_remove(place);
        self.lazily(|client| client.release(lease))
    }

    /// As an administrator, who may think better of it.
    fn break_one(&mut self) -> Tried<()> {
        let resource = self.rng.below(CONTENDED as u64) as usize;
        let op = Op::Break { resource };
        if self.rng.chance(30) {
            return self.lazily(|client| client.ask(op)).map(|_| ());
        }
        self.ask(Op::Begin)?;
        if self.rng.chance(LAZY) {
            self.quietly("SET LOCAL synchronous_commit = off")?;
        }
        self.ask(op)?;
        if self.rng.chance(15) {
            self.stall_in_block()?;
        }
        let commit = self.rng.chance(75);
        self.ask(if commit { Op::Commit } else { Op::Rollback })?;
        Ok(())
    }

    fn use_lease(&mut self, lease: Lease) -> Tried<()> {
        match self.rng.below(100) {
            0..55 => self.write_in_block(lease),
            55..65 => self.lazily(|client| client.renew(lease)),
            65..78 => {
                self.stall();
                Ok(())
            }
            78..90 => self.lazily(|client| client.release(lease)),
            // the same later, whether the lease lives or not
            90..95 => self.last.map_or(Ok(()), |last| self.take(last)),
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

    fn wait(&mut self) -> Micros {
        let kind = match self.rng.below(100) {
            0..40 => return 0,
            40..65 => 0,
            65..92 => 1,
            _ => 2,
        };
        let (low, high) = WAITS_MS[kind];
        millis(self.rng.between(low, high))
    }

    fn wanted(&self, resource: Resource, ttl: Micros) -> Acquire {
        Acquire {
            resource,
            ttl,
            durable: !self.memory,
            wait: 0,
            request: None,
            called: false,
        }
    }

    fn new_request(&mut self) -> i64 {
        self.requests += 1;
        self.own_id(self.requests)
    }

    /// Of a number of this client's, one that no other client has.
    fn own_id(&self, number: i64) -> i64 {
        IDS * i64::try_from(self.number).expect("clients are few") + number
    }

    fn acquire(&mut self, wanted: Acquire) -> Tried<Option<Lease>> {
        let wanted = Acquire {
            durable: !self.memory,
            ..wanted
        };
        let op = Op::Acquire(wanted);
        let answer = if wanted.request.is_some() && !self.in_block {
            self.ask_impatiently(op, 20)
        } else {
            self.ask(op)
        };
        if let (Some(_), Err(Trouble::Lost)) = (wanted.request, &answer) {
            self.unheard.push(wanted);
        }
        let token = match answer {
            // a full table, or a queue, is an answer as good as NULL
            Err(Trouble::Refused) => None,
            other => other?.first().copied(),
        };
        match (wanted.request, token) {
            (Some(_), Some(_)) => self.last = Some(wanted),
            (Some(_), None) if self.rng.chance(30) => self.unheard.push(wanted),
            _ => {}
        }
        let resource = wanted.resource;
        Ok(token.map(|token| Lease { resource, token }))
    }

    /// Acquires in a block, in a savepoint or not, writes or not, and commits or not.
    fn acquire_in_block(&mut self, resource: Resource, ttl: Micros) -> Tried<()> {
        let mut wanted = self.wanted(resource, ttl);
        if self.rng.chance(40) {
            wanted.wait = self.wait();
        }
        if self.rng.chance(40) {
            wanted.request = Some(self.new_request());
        }
        self.ask(Op::Begin)?;
        // what is written beside a lease in memory would not be durable
        if !self.memory && self.rng.chance(LAZY) {
            self.quietly("SET LOCAL synchronous_commit = off")?;
        }
        let nested = self.rng.chance(30);
        if nested {
            self.ask(Op::Savepoint)?;
        }
        let Some(lease) = self.acquire(wanted)? else {
            self.ask(Op::Rollback)?;
            thread::sleep(PAUSE);
            return Ok(());
        };
        let mut done = self.work_under_own(lease).is_ok();
        if self.session.is_none() {
            self.unheard.extend(wanted.request.map(|_| wanted));
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
        let end = if commit { Op::Commit } else { Op::Rollback };
        let ended = match wanted.request {
            Some(_) => self.ask_impatiently(end, 25),
            None => self.ask(end),
        };
        if ended.is_err() || self.rng.chance(15) {
            self.unheard.extend(wanted.request.map(|_| wanted));
        }
        ended.map(|_| ())
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
        let ended = self.ask(if commit { Op::Commit } else { Op::Rollback });
        if released && ended.is_err() {
            self.unheard_releases.push(lease);
        }
        ended?;
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
        let id = self.own_id(self.writes);
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
        let released = self.ask_impatiently(Op::Release { lease }, 15);
        if released.is_err() || self.rng.chance(10) {
            self.unheard_releases.push(lease);
        }
        released?;
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
        let stays = self.session.is_some() && self.quietly("RESET synchronous_commit").is_err();
        // where that was cancelled, later writes might be lost
        if stays && self.session.is_some() {
            self.abandon();
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
        self.perform(op, |session| ask(session, &sql))
    }

    /// In `percent` of 100 cases it goes away before the answer has come, if that takes a while. Nobody has told the
    /// server: what was asked for goes on, and ends as it may.
    fn ask_impatiently(&mut self, op: Op, percent: u64) -> Tried<Vec<i64>> {
        if !self.rng.chance(percent) {
            return self.ask(op);
        }
        let patience = match self.rng.chance(50) {
            true => 0,
            false => self.rng.below(PATIENCE_MS),
        };
        let sql = sql_of(&op, self.number);
        let mut session = self.session.take().ok_or(Trouble::Lost)?;
        tell(Event::Asked(op.clone()));
        let (sender, answer) = channel();
        thread::spawn(move || {
            let told = ask(&mut session, &sql);
            // with the session, or that ends here
            let _ = sender.send((session, told));
        });
        match answer.recv_timeout(Duration::from_millis(patience)) {
            Ok((session, told)) => {
                self.session = Some(session);
                self.heard(&op, told)
            }
            Err(_) => {
                self.abandon();
                Err(Trouble::Lost)
            }
        }
    }

    fn perform(
        &mut self,
        op: Op,
        run: impl FnOnce(&mut Session) -> Result<Vec<i64>, DbErr>,
    ) -> Tried<Vec<i64>> {
        let in_block = self.in_block || op == Op::Begin;
        let session = self.session()?;
        tell(Event::Asked(op.clone()));
        let told = run(session);
        self.in_block = in_block;
        self.heard(&op, told)
    }

    fn heard(&mut self, op: &Op, told: Result<Vec<i64>, DbErr>) -> Tried<Vec<i64>> {
        if *op == Op::Commit || *op == Op::Rollback && told.is_ok() {
            self.in_block = false;
        }
        match told {
            Ok(numbers) => {
                tell(Event::Answered(numbers.clone()));
                Ok(numbers)
            }
            Err(error) => Err(self.trouble(error)),
        }
    }

    /// Parts from the session, whatever is going on there.
    fn abandon(&mut self) {
        tell(Event::Lost {
            sqlstate: ABANDONED.to_owned(),
        });
        self.session = None;
        self.in_block = false;
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
            self.in_block = false;
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

fn ask(session: &mut Session, sql: &str) -> Result<Vec<i64>, DbErr> {
    let answer = session.try_text(sql)?;
    // void is an empty text
    let told = answer.as_deref().filter(|text| !text.is_empty());
    Ok(told.map(number).into_iter().collect())
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
        Op::Acquire(wanted) => acquire_sql(wanted, client),
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
        Op::Break { resource } => format!("SELECT break_lease('{}')", name(*resource)),
        Op::Write { .. } => unreachable!("a write is several statements"),
    }
}

fn acquire_sql(wanted: &Acquire, client: usize) -> String {
    let arguments = format!(
        "'{}', 'client {client}', '{} microseconds', '{} microseconds'",
        name(wanted.resource),
        wanted.ttl,
        wanted.wait
    );
    match wanted.request {
        _ if wanted.called => format!("CALL await_lease({arguments})"),
        None => format!("SELECT acquire_lease({arguments})"),
        Some(request) => {
            format!("SELECT acquire_lease({arguments}, '00000000-0000-4000-8000-{request:012}')")
        }
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

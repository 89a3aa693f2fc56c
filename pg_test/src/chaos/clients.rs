//! The client processes of a run, seen from the program that starts, kills and stops them and collects what they tell.
//!
//! Invariant: what a client has told before its end is in the collection, however it ended.

use std::io::{BufRead, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use super::client::MODE;
use super::clock;
use super::event::{Event, Op, Stamped};
use super::rng::Rng;
use crate::cluster::wait_for;
use crate::process::{Process, Signal};

pub const CLIENTS: usize = 10;

/// What each client has told, by its number.
pub type Told = Vec<(usize, Vec<Stamped>)>;

/// What the readers of all clients add up.
#[derive(Default)]
struct Tally {
    told: Mutex<Told>,
    /// Commits that were acknowledged.
    commits: AtomicU64,
    broken: Mutex<Vec<String>>,
}

struct Living {
    number: usize,
    child: Child,
    orders: ChildStdin,
    process: Process,
    /// Its backend; 0 while it has none.
    backend: Arc<AtomicI32>,
    reader: JoinHandle<()>,
}

pub struct Clients {
    seed: u64,
    database: String,
    server: String,
    started: usize,
    living: Vec<Living>,
    tally: Arc<Tally>,
}

impl Clients {
    pub fn start(seed: u64, database: &str, server: &Path) -> Self {
        let mut clients = Self {
            seed,
            database: database.to_owned(),
            server: format!("server {}", server.display()),
            started: 0,
            living: Vec::new(),
            tally: Arc::default(),
        };
        for _ in 0..CLIENTS {
            clients.start_one();
        }
        clients
    }

    fn start_one(&mut self) {
        let number = self.started;
        self.started += 1;
        let program = std::env::current_exe().expect("this program has a path");
        let mut child = Command::new(program)
            .arg(MODE)
            .args([
                number.to_string(),
                self.seed.to_string(),
                self.database.clone(),
            ])
            .arg(std::process::id().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("cannot start a client: {e}"));
        let orders = child.stdin.take().expect("it is piped");
        let stdout = child.stdout.take().expect("it is piped");
        let (backend, tally) = (Arc::new(AtomicI32::new(0)), self.tally.clone());
        let its_backend = backend.clone();
        let reader = thread::spawn(move || read(stdout, number, &its_backend, &tally));
        let process = Process::open(child.id().cast_signed());
        self.living.push(Living {
            number,
            child,
            orders,
            process,
            backend,
            reader,
        });
        let last = self.living.len() - 1;
        order(&mut self.living[last], &self.server);
    }

    /// Where to connect from now on.
    pub fn publish(&mut self, server: &Path) {
        self.server = format!("server {}", server.display());
        for living in &mut self.living {
            order(living, &self.server);
        }
    }

    /// Waits until so many more commits have been acknowledged.
    pub fn wait_for_commits(&self, more: u64) {
        let goal = self.tally.commits.load(Ordering::Relaxed) + more;
        wait_for("the clients to commit", || {
            (self.tally.commits.load(Ordering::Relaxed) >= goal).then_some(())
        });
    }

    /// The backends of the clients that live.
    pub fn backends(&self) -> Vec<i32> {
        let backends = self
            .living
            .iter()
            .map(|living| living.backend.load(Ordering::Relaxed));
        backends.filter(|pid| *pid != 0).collect()
    }

    /// kill -9 of a client; another takes its place.
    pub fn kill(&mut self, rng: &mut Rng) {
        let victim = self
            .living
            .swap_remove(rng.below(self.living.len() as u64) as usize);
        victim.process.signal(Signal::KILL);
        self.end(victim);
        self.start_one();
    }

    /// SIGSTOP to some clients, whatever they are doing.
    pub fn stop(&self, how_many: usize, rng: &mut Rng) -> Vec<usize> {
        let chosen = (0..how_many).map(|_| rng.below(self.living.len() as u64) as usize);
        let chosen: Vec<usize> = chosen.collect();
        for index in &chosen {
            self.living[*index].process.signal(Signal::STOP);
        }
        chosen
    }

    /// SIGSTOP to the client of that backend; nobody where it has none any more.
    pub fn stop_client_of(&self, backend: i32) -> Vec<usize> {
        let its = |living: &Living| living.backend.load(Ordering::Relaxed) == backend;
        let chosen: Vec<usize> = self.living.iter().position(its).into_iter().collect();
        for index in &chosen {
            self.living[*index].process.signal(Signal::STOP);
        }
        chosen
    }

    pub fn go_on(&self, stopped: &[usize]) {
        for index in stopped {
            self.living[*index].process.signal(Signal::CONT);
        }
    }

    /// SIGSTOP to all, for good: some are in the middle of a transaction.
    pub fn freeze(&self) {
        for living in &self.living {
            living.process.signal(Signal::STOP);
        }
    }

    /// kill -9 of all, or a word to them that they stop; gives what all clients have told.
    pub fn finish(mut self, kill: bool) -> Told {
        for living in &mut self.living {
            if kill {
                living.process.signal(Signal::KILL);
            } else {
                order(living, "stop");
            }
        }
        for living in std::mem::take(&mut self.living) {
            let number = living.number;
            let status = self.end(living);
            assert!(
                kill || status.success(),
                "client {number} has ended: {status}"
            );
        }
        let broken = self.tally.broken.lock().unwrap_or_else(|e| e.into_inner());
        assert!(broken.is_empty(), "{}", broken.join("\n"));
        std::mem::take(&mut self.tally.told.lock().unwrap_or_else(|e| e.into_inner()))
    }

    fn end(&self, mut living: Living) -> std::process::ExitStatus {
        let status = living.child.wait().expect("a child can be awaited");
        // after its end, or a client in the middle of its work would end with this pipe
        drop(living.orders);
        living.reader.join().expect("a reader does not panic");
        status
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        for mut living in std::mem::take(&mut self.living) {
            living.process.signal(Signal::KILL);
            let _ = living.child.wait();
        }
    }
}

fn order(living: &mut Living, line: &str) {
    // a client that has just died does not read it
    let _ = writeln!(living.orders, "{line}");
}

fn read(stdout: ChildStdout, number: usize, backend: &AtomicI32, tally: &Tally) {
    let (mut told, mut committing) = (Vec::new(), false);
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        let stamped: Stamped = match line.parse() {
            Ok(stamped) => stamped,
            Err(message) => {
                tally
                    .broken
                    .lock()
                    .unwrap_or_else(|e| e.into_inner())
                    .push(message);
                continue;
            }
        };
        match &stamped.event {
            Event::Connected(pid) => backend.store(*pid, Ordering::Relaxed),
            Event::Asked(op) => committing = *op == Op::Commit,
            Event::Answered(_) if committing => {
                tally.commits.fetch_add(1, Ordering::Relaxed);
            }
            Event::Lost { .. } => backend.store(0, Ordering::Relaxed),
            _ => {}
        }
        told.push(stamped);
    }
    told.push(Stamped {
        at: clock::now(),
        event: Event::Ended,
    });
    tally
        .told
        .lock()
        .unwrap_or_else(|e| e.into_inner())
        .push((number, told));
}

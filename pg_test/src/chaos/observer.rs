//! Looks at the queues all the time, from outside: who waits behind whom, and when that was so for sure.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use postgres::Config;

use super::clock;
use super::history::Look;
use super::servers::DATABASE;
use crate::session::{DbErr, LIMIT, Session};

/// Between two looks. It is shorter than most waits.
const PAUSE: Duration = Duration::from_millis(10);

const QUEUES: &str =
    "SELECT substr(resource, 2), pid FROM leasehold.waiters ORDER BY resource, position";

pub struct Observer {
    shared: Arc<Shared>,
    looks: Option<JoinHandle<Vec<Look>>>,
}

struct Shared {
    server: Mutex<PathBuf>,
    stop: AtomicBool,
}

impl Observer {
    pub fn start(server: &Path) -> Self {
        let shared = Arc::new(Shared {
            server: Mutex::new(server.to_owned()),
            stop: AtomicBool::new(false),
        });
        let its_own = shared.clone();
        Self {
            looks: Some(thread::spawn(move || look_on(&its_own))),
            shared,
        }
    }

    /// Where to look from now on.
    pub fn publish(&self, server: &Path) {
        *self.shared.server.lock().unwrap_or_else(|e| e.into_inner()) = server.to_owned();
    }

    /// Everything that was seen.
    pub fn finish(mut self) -> Vec<Look> {
        self.shared.stop.store(true, Ordering::Relaxed);
        let looks = self.looks.take().expect("it is finished once");
        looks.join().expect("an observer does not panic")
    }
}

/// Where a run fails.
impl Drop for Observer {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

fn look_on(shared: &Shared) -> Vec<Look> {
    let (mut seen, mut session) = (Vec::new(), None);
    while !shared.stop.load(Ordering::Relaxed) {
        let looked = session
            .take()
            .map_or_else(|| connect(shared), Ok)
            .and_then(|mut open| {
                look(&mut open, &mut seen)?;
                Ok(open)
            });
        // the server is away for a while, or is another
        session = looked.ok();
        thread::sleep(PAUSE);
    }
    seen
}

fn connect(shared: &Shared) -> Result<Session, DbErr> {
    let server = shared
        .server
        .lock()
        .unwrap_or_else(|e| e.into_inner())
        .clone();
    let mut config = Config::new();
    config.host_path(server).port(5432).user("postgres");
    config.dbname(DATABASE).connect_timeout(LIMIT);
    config.application_name("observer");
    Session::try_connect(&config)
}

/// Each queue is seen as it was at one instant.
fn look(session: &mut Session, seen: &mut Vec<Look>) -> Result<(), DbErr> {
    let asked = clock::now();
    let rows = session.try_rows(QUEUES)?;
    let answered = clock::now();
    let mut places: Vec<(usize, i32)> = rows
        .iter()
        .filter_map(|row| Some((number(row.first()?)?, number(row.get(1)?)?)))
        .collect();
    // stable: the order of each queue is kept
    places.sort_by_key(|(resource, _)| *resource);
    for queue in places.chunk_by(|one, other| one.0 == other.0) {
        seen.push(Look {
            resource: queue[0].0,
            pids: queue.iter().map(|(_, pid)| *pid).collect(),
            asked,
            answered,
        });
    }
    Ok(())
}

fn number<T: std::str::FromStr>(text: &Option<String>) -> Option<T> {
    text.as_ref()?.parse().ok()
}

//! The background workers: a static one for the server, and one at a time for each database in use, which that
//! one starts when there is something to do.
//!
//! The static worker notes when the server became writable. It has no connection to a database, so it is in
//! nobody's way. It stays, because a worker that is done would not run again after a crash.
//!
//! A database's worker marks releases in its ledger, deletes old rows, and tells of events on a channel. It ends when nothing is due, after a
//! second at most, so it is never long in the way of DROP DATABASE.
//!
//! Everything is correct without them, where no worker slot is free: see `table::writable_since`, and what
//! `marks` says of a clean shutdown.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::pg::hooks::{DatabaseWorker, transaction, wait};
use crate::pg::{self, Oid};
use crate::{events, marks, settings, sweep, table};

/// How long marks are left to gather, and until it tries again where no worker slot is free. What is
/// granted again meanwhile needs no mark.
const GATHER: Duration = Duration::from_secs(5);

/// How long a database's worker works at a stretch.
const SPELL: Duration = Duration::from_secs(1);

/// Old rows are looked for so many times within the retention, but at most every second and at least every
/// hour.
const SWEEPS: i64 = 8;

/// The static worker, until the server ends it.
pub fn run() {
    if !table::is_ready() {
        return;
    }
    table::writable_since(pg::clock::now_us());
    let mut running: HashMap<Oid, (DatabaseWorker, Instant)> = HashMap::new();
    let mut swept = Instant::now();
    let mut marks_since = None;
    let mut follower = Follower::default();
    loop {
        follower.follow();
        if swept.elapsed() >= sweep_every() {
            table::want_sweeps();
            swept = Instant::now();
        }
        let has_marks = !table::databases_where(|known| known.marks_wanted).is_empty();
        marks_since = has_marks.then(|| marks_since.unwrap_or_else(Instant::now));
        let has_gathered = marks_since.is_some_and(|since| since.elapsed() >= GATHER);
        let wanted = table::databases_where(|known| {
            known.sweep_wanted
                || known.tell_up_to > known.told_up_to
                || (has_gathered && known.marks_wanted)
        });
        let mut next = sweep_every().saturating_sub(swept.elapsed());
        if !wanted.is_empty() {
            // between two spells a database is left to itself for as long, so that it can be dropped
            running.retain(|_, (worker, started)| {
                !worker.has_ended() || started.elapsed() < 2 * SPELL
            });
            for database in wanted {
                if !running.contains_key(&database)
                    && let Some(worker) = DatabaseWorker::start(database)
                {
                    running.insert(database, (worker, Instant::now()));
                }
            }
            // what could not be started is tried again then; what was, takes up its work before
            marks_since = has_marks.then(Instant::now);
            let is_left = !table::databases_where(|known| known.sweep_wanted).is_empty();
            next = next.min(if is_left { SPELL } else { GATHER });
        }
        if let Some(since) = marks_since {
            next = next.min(GATHER.saturating_sub(since.elapsed()));
        }
        if follower.is_following() {
            next = next.min(FOLLOW);
        }
        if !wait(Some(next.max(Duration::from_millis(1)))) {
            return;
        }
    }
}

/// So often the events are looked at, where somebody wants to be told of them.
const FOLLOW: Duration = Duration::from_millis(500);

/// Follows the events, for the server log and for the channel, as long as a setting says so. What came before is
/// not told; neither is what the ring has lost meanwhile.
#[derive(Default)]
struct Follower {
    /// The number of the last event that was seen, while it follows.
    seen: Option<u64>,
    /// The same of the one before the first that goes to the channel.
    channel_from: Option<u64>,
    /// The first that was not written down yet at the last look. It is waited for until the next one: there is
    /// always somebody about to write, and one who is stopped there must not keep back the others.
    awaited: u64,
}

impl Follower {
    fn is_following(&self) -> bool {
        self.seen.is_some()
    }

    fn follow(&mut self) {
        let (logs, notifies) = (settings::log_events(), settings::notify_channel().is_some());
        let last = events::last();
        if !notifies {
            self.channel_from = None;
        }
        if !logs && !notifies {
            self.seen = None;
            return;
        }
        let seen = *self.seen.get_or_insert(last);
        let unwritten = events::first_unwritten(seen.max(self.awaited), last);
        let last = unwritten.map_or(last, |number| number - 1);
        self.awaited = unwritten.unwrap_or_default();
        let mut databases = Vec::new();
        for (number, event) in events::after(seen) {
            if number > last {
                break;
            }
            if logs {
                events::log(number, &event);
            }
            if !databases.contains(&event.facts.database) {
                databases.push(event.facts.database);
            }
        }
        self.seen = Some(last);
        if notifies {
            let from = *self.channel_from.get_or_insert(seen);
            for database in databases {
                table::want_telling(database, from, last);
            }
        }
    }
}

fn sweep_every() -> Duration {
    let every_us = settings::ledger_retention_us() / SWEEPS;
    Duration::from_micros(every_us.unsigned_abs())
        .clamp(Duration::from_secs(1), Duration::from_secs(3600))
}

/// The worker of a database; `connect` connects it, or ends the process.
pub fn run_for(database: Oid, connect: impl FnOnce()) {
    // before the connection, which fails when the database is gone: nobody tries again then
    let taken = table::database(database, |known| {
        known.is_connecting = true;
        known.marks_wanted = false;
        let from = std::mem::replace(&mut known.told_up_to, known.tell_up_to);
        let sweeps = std::mem::replace(&mut known.sweep_wanted, false);
        (sweeps, from, known.tell_up_to)
    });
    let (sweeps, tell_from, tell_up_to) = taken.unwrap_or_default();
    connect();
    table::database(database, |known| known.is_connecting = false);
    let until = Instant::now() + SPELL;
    let more_marks = marks::run(database, until);
    let more_rows = sweeps && sweep::run(until);
    if more_marks {
        table::want_marks(database);
    }
    if more_rows {
        table::want_sweep(database);
    }
    // last: an error of it ends the worker
    if let Some(channel) = settings::notify_channel() {
        transaction(|| events::tell(database, &channel, tell_from, tell_up_to).unwrap_or_default());
    }
}

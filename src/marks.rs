//! What the ledger has not been told of, when a lease has ended: so that it is not believed in again
//! when the server is started next.
//!
//! - A release only changes shared memory; its mark in the ledger follows, in batches, by a worker of the
//!   database which ends when nothing is due. It is not in a hurry: what is granted again meanwhile
//!   needs none.
//! - A clean shutdown writes down, for each ledger, which tokens were handed out while the server ran and
//!   which of their leases are live: all others are over. That stays true for ever, whatever happens to
//!   the file, so it is read at every start and never taken away.
//! - Losing a mark, in a crash, delays the next grant by a TTL at most.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::sync::OnceLock;

use leasehold_core::name;

use crate::pg::hooks;
use crate::pg::{self, Oid};
use crate::table::{self, Key};
use crate::{errors, ledger};

/// In the data directory, which is the working directory of every process of the server.
const FILE: &str = "pg_stat/leasehold.over";
const NEW_FILE: &str = "pg_stat/leasehold.over.new";
/// Runs of the server that are remembered for a ledger: what is older is marked, or long over.
const SPANS_MAX: usize = 64;

/// Marks of one transaction: its row locks are held for a millisecond or two.
const BATCH: usize = 100;

/// The tokens above `from` up to `to`: their leases were over at a clean shutdown, but for the live ones.
#[derive(Clone)]
struct Span {
    from: i64,
    to: i64,
    live: HashSet<i64>,
}

/// By database and ledger, oldest first.
type Spans = HashMap<(Oid, Oid), Vec<Span>>;

/// Read by the postmaster and inherited by every process.
static KNOWN: OnceLock<Spans> = OnceLock::new();

/// Whether the lease of a token was over at a clean shutdown.
pub fn was_over(ledger: Oid, token: i64) -> bool {
    let spans = KNOWN
        .get()
        .and_then(|all| all.get(&(pg::database(), ledger)));
    spans
        .into_iter()
        .flatten()
        .any(|span| span.says_over(token))
}

impl Span {
    fn says_over(&self, token: i64) -> bool {
        token > self.from && token <= self.to && !self.live.contains(&token)
    }
}

/// In the postmaster, when shared memory is made: reads the file. After a crash it has been read.
pub fn at_startup() {
    if pg::is_postmaster() {
        hooks::register_shutdown();
        KNOWN.get_or_init(|| parse(&fs::read_to_string(FILE).unwrap_or_default()));
    }
}

/// In the postmaster, when all other processes are gone after a clean shutdown.
pub fn at_shutdown() {
    if !table::is_ready() {
        return;
    }
    let mut spans = KNOWN.get().cloned().unwrap_or_default();
    for database in table::databases_at_shutdown() {
        let entries = table::entries_at_shutdown(database.oid, database.ledger);
        let now_us = pg::clock::now_us();
        let is_live: HashMap<i64, bool> = entries
            .iter()
            .map(|entry| (entry.record.lease.token, entry.record.is_live(now_us)))
            .collect();
        let of_ledger = spans.entry((database.oid, database.ledger)).or_default();
        for span in of_ledger.iter_mut() {
            // what has not been looked at since the start may be live
            span.live.retain(|token| is_live.get(token) != Some(&false));
        }
        if database.handed > database.floor {
            let live = is_live.iter().filter(|(_, live)| **live);
            of_ledger.push(Span {
                from: database.floor,
                to: database.handed,
                live: live.map(|(token, _)| *token).collect(),
            });
        }
        let surplus = of_ledger.len().saturating_sub(SPANS_MAX);
        of_ledger.drain(..surplus);
    }
    // losing it only delays the next grants
    let _ = fs::write(NEW_FILE, text(&spans)).and_then(|()| fs::rename(NEW_FILE, FILE));
}

/// A line a span: database, ledger, from, to, and the live tokens.
fn text(all: &Spans) -> String {
    let mut text = String::new();
    for ((database, ledger), spans) in all {
        for span in spans {
            text.push_str(&format!("{database} {ledger} {} {}", span.from, span.to));
            for token in &span.live {
                text.push_str(&format!(" {token}"));
            }
            text.push('\n');
        }
    }
    text
}

/// Lines that cannot be read are left out.
fn parse(text: &str) -> Spans {
    let mut all: Spans = HashMap::new();
    for line in text.lines() {
        let numbers: Option<Vec<i64>> = line.split(' ').map(|word| word.parse().ok()).collect();
        let Some([database, ledger, from, to, live @ ..]) = numbers.as_deref() else {
            continue;
        };
        if let (Ok(database), Ok(ledger)) = (Oid::try_from(*database), Oid::try_from(*ledger)) {
            all.entry((database, ledger)).or_default().push(Span {
                from: *from,
                to: *to,
                live: live.iter().copied().collect(),
            });
        }
    }
    all
}

/// A worker begins with a database: what is wanted from here on, it will see.
pub fn take_up(database: Oid) -> bool {
    table::database(database, |known| {
        std::mem::replace(&mut known.marks_wanted, false)
    })
    .unwrap_or(false)
}

/// The worker of a database, connected to it: marks everything that is due now, in transactions of a batch. What could not be marked, because its
/// row is locked, stays due and is left for the next worker.
pub fn run(database: Oid) {
    loop {
        let marks = hooks::transaction(|| mark_batch(database).unwrap_or_default());
        for mark in &marks {
            table::change(mark.key(database), |entry| {
                entry.is_being_marked = false;
                let lease = &entry.record.lease;
                if mark.is_done && entry.mark_due && lease.token == mark.token {
                    entry.mark_due = false;
                    entry.record.note_marked(mark.token);
                }
            });
        }
        let done = marks.iter().filter(|mark| mark.is_done).count();
        if done < BATCH {
            return;
        }
    }
}

struct Mark {
    ledger: Oid,
    resource: Vec<u8>,
    token: i64,
    is_done: bool,
}

impl Mark {
    fn key(&self, database: Oid) -> Key<'_> {
        Key {
            database,
            ledger: self.ledger,
            hash: name::hash(&self.resource),
            resource: &self.resource,
        }
    }
}

/// Updates the rows of a batch, in the running transaction.
fn mark_batch(database: Oid) -> errors::Answer<Vec<Mark>> {
    let ledger = ledger::oid()?;
    let mut marks = Vec::new();
    for (resource, token) in table::take_due_marks(database, ledger, BATCH) {
        let resource = resource.as_slice().to_vec();
        let is_done = ledger::mark_released(ledger, &resource, token)?;
        marks.push(Mark {
            ledger,
            resource,
            token,
            is_done,
        });
    }
    Ok(marks)
}

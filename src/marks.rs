//! What the ledger has not been told of, when a lease has ended: so that it is not believed in again
//! when the server is started next.
//!
//! - A release only changes shared memory; its mark in the ledger follows, in batches, by a worker of the
//!   database which ends when nothing is due. It is not in a hurry: what is granted again meanwhile
//!   needs none.
//! - A clean shutdown writes down, for each ledger, which tokens were handed out while the server ran and
//!   which of their leases are live: all others are over; and which it knows to have been released. That
//!   stays true for ever, so the file is read at every start and never taken away. It is believed whole
//!   or not at all: a part of it would make live leases over.
//! - Losing a mark, in a crash, delays the next grant by a TTL at most.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::sync::OnceLock;
use std::time::Instant;

use leasehold_core::name;

use crate::errors::Answer;
use crate::pg::hooks;
use crate::pg::{self, Oid};
use crate::resources::Resource;
use crate::table::{self, Key};
use crate::{ledger, tokens};

/// In the data directory, which is the working directory of every process of the server.
const FILE: &str = "pg_stat/leasehold.over";
const NEW_FILE: &str = "pg_stat/leasehold.over.new";
/// A line for each ledger that was dropped: its database, and how far its tokens went.
const DROPPED_FILE: &str = "pg_stat/leasehold.dropped";
/// Runs of the server that are remembered for a ledger: what is older is marked, or long over.
const SPANS_MAX: usize = 64;
/// Ledgers that are remembered though they were not used since the start: some are of databases that
/// are gone.
const UNUSED_MAX: usize = 256;

/// Marks of one transaction: its row locks are held for a millisecond or two.
const BATCH: usize = 100;

/// The tokens above `from` up to `to`: their leases were over at a clean shutdown, but for the live ones.
#[derive(Clone)]
struct Span {
    from: i64,
    to: i64,
    live: HashSet<i64>,
}

/// What is known of a ledger.
#[derive(Clone, Default)]
struct Past {
    /// Oldest first.
    spans: Vec<Span>,
    /// Leases that were released and not marked at the last shutdown.
    released: HashSet<i64>,
}

/// By database and ledger.
type Pasts = HashMap<(Oid, Oid), Past>;

/// Read by the postmaster and inherited by every process.
static KNOWN: OnceLock<Pasts> = OnceLock::new();

fn past(ledger: Oid) -> Option<&'static Past> {
    KNOWN.get()?.get(&(pg::database(), ledger))
}

/// Whether the lease of a token was over at a clean shutdown.
pub fn was_over(ledger: Oid, token: i64) -> bool {
    past(ledger).is_some_and(|past| past.spans.iter().any(|span| span.says_over(token)))
}

/// Notes on disk how far the tokens of this database went, whose ledger is about to be dropped: another may be
/// made after a crash. Where that can't be written, the wall clock alone keeps its tokens above.
pub fn note_dropped(position: i64) {
    let append = || {
        let mut file = File::options()
            .create(true)
            .append(true)
            .open(DROPPED_FILE)?;
        file.write_all(format!("{} {position}\n", pg::database()).as_bytes())?;
        file.sync_all()?;
        File::open("pg_stat")?.sync_all()
    };
    if let Err(error) = append() {
        pg::log(
            "leasehold could not note how far the tokens of a dropped ledger went",
            &format!("{DROPPED_FILE}: {error}."),
        );
    }
}

/// The highest token that a dropped ledger of this database can have handed out, 0 where none is known.
pub fn highest_dropped() -> i64 {
    let text = fs::read_to_string(DROPPED_FILE).unwrap_or_default();
    let here = format!("{} ", pg::database());
    let positions = text
        .lines()
        .filter_map(|line| line.strip_prefix(&here)?.parse().ok());
    positions.max().unwrap_or_default()
}

/// Whether it is known from a clean shutdown that it was released.
pub fn was_released(ledger: Oid, token: i64) -> bool {
    past(ledger).is_some_and(|past| past.released.contains(&token))
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
    let mut pasts = Pasts::new();
    for database in table::databases_at_shutdown() {
        let key = (database.oid, database.ledger);
        let before = KNOWN.get().and_then(|all| all.get(&key)).cloned();
        pasts.insert(key, ended(&database, before.unwrap_or_default()));
    }
    let unused = KNOWN.get().into_iter().flatten();
    let unused: Vec<_> = unused.filter(|(key, _)| !pasts.contains_key(key)).collect();
    pasts.extend(
        unused
            .into_iter()
            .take(UNUSED_MAX)
            .map(|(key, past)| (*key, past.clone())),
    );
    // losing it only delays the next grants
    let _ = write(&text(&pasts));
}

/// What is known of a ledger, with the run of the server that ends now.
fn ended(database: &table::Database, mut past: Past) -> Past {
    let now_us = pg::clock::now_us();
    let entries = table::entries_at_shutdown(database.oid, database.ledger);
    let is_live: HashMap<i64, bool> = entries
        .iter()
        .map(|entry| (entry.record.lease.token, entry.record.is_live(now_us)))
        .collect();
    for span in &mut past.spans {
        // what has not been looked at since the start may be live
        span.live.retain(|token| is_live.get(token) != Some(&false));
    }
    if database.handed > database.floor {
        let live = is_live.iter().filter(|(_, live)| **live);
        past.spans.push(Span {
            from: database.floor,
            to: database.handed,
            live: live.map(|(token, _)| *token).collect(),
        });
    }
    let surplus = past.spans.len().saturating_sub(SPANS_MAX);
    past.spans.drain(..surplus);
    let due: HashSet<i64> = entries
        .iter()
        .filter_map(|entry| entry.record.due_mark())
        .collect();
    if past.released.len() > table::slots() {
        past.released.clear();
    }
    past.released.extend(due);
    past
}

/// The file is there whole, or as it was before.
fn write(text: &str) -> io::Result<()> {
    let mut file = File::create(NEW_FILE)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(NEW_FILE, FILE)?;
    File::open("pg_stat")?.sync_all()
}

/// A line a span (database, ledger, from, to, the live tokens) or a ledger's released tokens, by its
/// first word; at the end the hash of what stands before.
fn text(all: &Pasts) -> String {
    let mut text = String::new();
    for ((database, ledger), past) in all {
        for span in &past.spans {
            text.push_str(&format!(
                "span {database} {ledger} {} {}",
                span.from, span.to
            ));
            push_numbers(&mut text, &span.live);
        }
        text.push_str(&format!("released {database} {ledger}"));
        push_numbers(&mut text, &past.released);
    }
    text.push_str(&format!("{END}{:016x}\n", name::hash(text.as_bytes())));
    text
}

fn push_numbers(text: &mut String, numbers: &HashSet<i64>) {
    for number in numbers {
        text.push_str(&format!(" {number}"));
    }
    text.push('\n');
}

const END: &str = "end ";

/// Nothing, where the file is not whole.
fn parse(text: &str) -> Pasts {
    let body = text.rfind(END).and_then(|at| {
        let (body, end) = text.split_at_checked(at)?;
        let hash = format!("{END}{:016x}\n", name::hash(body.as_bytes()));
        (end == hash).then_some(body)
    });
    body.and_then(parse_lines).unwrap_or_default()
}

fn parse_lines(body: &str) -> Option<Pasts> {
    let mut all = Pasts::new();
    for line in body.lines() {
        let (kind, numbers) = line.split_once(' ')?;
        let numbers: Option<Vec<i64>> = numbers.split(' ').map(|word| word.parse().ok()).collect();
        let numbers = numbers?;
        let (database, rest) = numbers.split_first()?;
        let (ledger, rest) = rest.split_first()?;
        let key = (Oid::try_from(*database).ok()?, Oid::try_from(*ledger).ok()?);
        let past = all.entry(key).or_default();
        match (kind, rest) {
            ("span", [from, to, live @ ..]) => past.spans.push(Span {
                from: *from,
                to: *to,
                live: live.iter().copied().collect(),
            }),
            ("released", released) => past.released.extend(released),
            _ => return None,
        }
    }
    Some(all)
}

/// The worker of a database, connected to it: marks everything that is due now, in transactions of a
/// batch, until that instant. True when there may be more. What could not be marked stays due, for the next worker.
pub fn run(database: Oid, until: Instant) -> bool {
    loop {
        let marks = hooks::transaction(|| mark_batch(database).unwrap_or_default());
        marks.iter().for_each(|mark| mark.note(database));
        if marks.len() < BATCH || !marks.iter().any(|mark| mark.is_done) {
            return false;
        }
        if Instant::now() >= until {
            return true;
        }
    }
}

/// Marks what shares its places in the shared table with a resource, where all of them are taken: what the ledger
/// knows to be over need not be remembered. At once, in whatever transaction. Whether there was anything.
pub fn make_room(resource: &Resource) -> Answer<bool> {
    let mut has_marked = false;
    for (name, token) in table::due_marks_beside(resource.key(), BATCH) {
        let marked = mark(resource.ledger, name.as_slice(), token)?;
        has_marked |= marked.is_done;
        marked.note(pg::database());
    }
    Ok(has_marked)
}

struct Mark {
    ledger: Oid,
    resource: Vec<u8>,
    token: i64,
    is_done: bool,
}

impl Mark {
    /// Tells the shared table.
    fn note(&self, database: Oid) {
        let key = Key {
            database,
            ledger: self.ledger,
            hash: name::hash(&self.resource),
            resource: &self.resource,
        };
        if self.is_done {
            table::change(key, |entry| entry.record.note_marked(self.token));
        }
    }
}

/// Writes a batch of marks.
fn mark_batch(database: Oid) -> Answer<Vec<Mark>> {
    let ledger = ledger::oid()?;
    // so that the commit sees to it that the WAL goes to disk, some time
    pg::transaction_number();
    let due = table::due_marks(database, ledger, BATCH);
    due.into_iter()
        .map(|(resource, token)| mark(ledger, resource.as_slice(), token))
        .collect()
}

fn mark(ledger: Oid, resource: &[u8], token: i64) -> Answer<Mark> {
    let is_done = ledger::mark_released(ledger, resource, token)?;
    tokens::note_marked(pg::database(), ledger, pg::own_wal());
    Ok(Mark {
        ledger,
        resource: resource.to_vec(),
        token,
        is_done,
    })
}

//! Release marks: what the ledger has to be told of after a release, so that a lease is not believed in
//! again when the server is started next.
//!
//! - A release only changes shared memory; the mark follows, in batches, by a worker of the database
//!   which ends when nothing is due. It is not in a hurry: what is granted again meanwhile needs none.
//! - What is not marked when the server is shut down is written to a file, and read at the next start.
//!   What the file says stays true for ever (this lease, of this token, was released), so it does no
//!   harm wherever and whenever it is read.
//! - Losing a mark, in a crash, delays the next grant by a TTL at most.

use std::collections::HashMap;
use std::fs;
use std::sync::OnceLock;

use leasehold_core::name;

use crate::pg::hooks;
use crate::pg::{self, Oid};
use crate::resources::{self, Resource};
use crate::table::{self, Key};
use crate::{errors, ledger};

/// In the data directory, which is the working directory of every process of the server.
const FILE: &str = "pg_stat/leasehold.marks";
const NEW_FILE: &str = "pg_stat/leasehold.marks.new";

/// Marks of one transaction: its row locks are held for a millisecond or two.
const BATCH: usize = 100;

/// By database and ledger: tokens of resources that were released before the last clean shutdown.
type LeftOver = HashMap<(Oid, Oid), HashMap<Vec<u8>, i64>>;

/// Read by the postmaster and inherited by every process.
static LEFT_OVER: OnceLock<LeftOver> = OnceLock::new();

/// Whether the last clean shutdown knew that this lease was released.
pub fn is_left_over(ledger: Oid, resource: &[u8], token: i64) -> bool {
    LEFT_OVER
        .get()
        .and_then(|all| all.get(&(pg::database(), ledger)))
        .and_then(|marks| marks.get(resource))
        .is_some_and(|known| *known == token)
}

/// In the postmaster, when shared memory is made: reads what was left over. After a crash it is
/// already there.
pub fn at_startup() {
    if !pg::is_postmaster() {
        return;
    }
    hooks::register_shutdown();
    LEFT_OVER.get_or_init(|| {
        let text = fs::read_to_string(FILE).unwrap_or_default();
        // a file that cannot be removed is read again, which does no harm
        let _ = fs::remove_file(FILE);
        parse(&text)
    });
}

/// In the postmaster, when all other processes are gone after a clean shutdown.
pub fn at_shutdown() {
    if !table::is_ready() {
        return;
    }
    let mut left: LeftOver = HashMap::new();
    for ((database, ledger), marks) in LEFT_OVER.get().into_iter().flatten() {
        if !table::is_caught_up_at_shutdown(*database) {
            left.insert((*database, *ledger), marks.clone());
        }
    }
    for (database, ledger, resource, token) in table::due_marks_at_shutdown() {
        left.entry((database, ledger))
            .or_default()
            .insert(resource, token);
    }
    if left.is_empty() {
        return;
    }
    // losing it only delays the next grants
    let _ = fs::write(NEW_FILE, text(&left)).and_then(|()| fs::rename(NEW_FILE, FILE));
}

/// A line a mark: database, ledger, token, and the resource in hexadecimal digits.
fn text(left: &LeftOver) -> String {
    let mut text = String::new();
    for ((database, ledger), marks) in left {
        for (resource, token) in marks {
            let hex: String = resource.iter().map(|b| format!("{b:02x}")).collect();
            text.push_str(&format!("{database} {ledger} {token} {hex}\n"));
        }
    }
    text
}

/// Lines that cannot be read are left out.
fn parse(text: &str) -> LeftOver {
    let mut left: LeftOver = HashMap::new();
    for line in text.lines() {
        let mut words = line.split(' ');
        let mut number = || words.next()?.parse::<i64>().ok();
        let (Some(database), Some(ledger), Some(token)) = (number(), number(), number()) else {
            continue;
        };
        let (Ok(database), Ok(ledger)) = (Oid::try_from(database), Oid::try_from(ledger)) else {
            continue;
        };
        if let Some(resource) = words.next().and_then(from_hex) {
            left.entry((database, ledger))
                .or_default()
                .insert(resource, token);
        }
    }
    left
}

fn from_hex(hex: &str) -> Option<Vec<u8>> {
    (0..hex.len())
        .step_by(2)
        .map(|i| u8::from_str_radix(hex.get(i..i + 2)?, 16).ok())
        .collect()
}

/// In the static worker: the databases with marks left over are to be caught up.
pub fn want_left_over() {
    for (database, _) in LEFT_OVER.get().into_iter().flat_map(HashMap::keys) {
        table::want_marks(*database);
    }
}

/// A worker begins with a database: what is wanted from here on, it will see.
pub fn take_up(database: Oid) -> bool {
    table::database(database, |known| {
        std::mem::replace(&mut known.marks_wanted, false)
    })
    .unwrap_or(false)
}

/// The worker of a database, connected to it: marks what is due, and ends.
pub fn run(database: Oid) {
    if catch_up(database) {
        mark_due(database);
    }
}

/// Makes due what a clean shutdown had left over, and marks it: by way of the entries, which keep the
/// worker and a grant from writing a row at once. False where the extension is gone.
fn catch_up(database: Oid) -> bool {
    let Some(ledger) = hooks::transaction(|| ledger::oid().ok()) else {
        return false;
    };
    let left = LEFT_OVER.get().and_then(|all| all.get(&(database, ledger)));
    let left: Vec<(&Vec<u8>, &i64)> = left.into_iter().flatten().collect();
    for batch in left.chunks(BATCH) {
        hooks::transaction(|| {
            for (resource, token) in batch {
                // one that there is no room for is left over again
                let _ = make_due(resource, **token);
            }
        });
        mark_due(database);
    }
    table::database(database, |known| known.is_caught_up = true);
    true
}

fn make_due(resource: &[u8], token: i64) -> errors::Answer<()> {
    let resource = Resource::named(Some(resource.to_vec()))?;
    let known = resources::database(resource.ledger)?;
    resource.open(&known)?;
    table::change(resource.key(), |entry| {
        entry.mark_due |= entry.record.is_released(token) && entry.record.grant.owner == 0;
    });
    Ok(())
}

/// Marks everything that is due now, in transactions of a batch. What could not be marked, because its
/// row is locked, stays due and is left for the next worker.
fn mark_due(database: Oid) {
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

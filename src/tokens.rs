//! Fencing tokens: blocks of the sequence in shared memory, and what is known of a database.
//!
//! - A block's WAL is on disk before any of its tokens is handed out, so a token is never used twice.
//! - While the server runs tokens are consecutive. The first block after a start, a promotion or
//!   CREATE EXTENSION starts where `leasehold_core::token::first_after_start` says.
//! - One backend at a time reserves, under a heavyweight lock of its own: it needs SQL.
//! - The floor is the position of the sequence when the database was first used since the start:
//!   every token handed out before that is at or below it.

use std::time::{SystemTime, UNIX_EPOCH};

use leasehold_core::token::{Start, block_from, epoch_of, first_after_start};

use crate::errors::{Answer, Refusal, code};
use crate::ledger::{self, Numbers};
use crate::marks;
use crate::pg::{self, Oid};
use crate::settings::{self, Promotion};
use crate::table::{self, Database};
use crate::xact;

/// What is known of this database since the server started. Reads the ledger the first time.
pub fn database(ledger: Oid) -> Answer<Database> {
    let known = table::known_database(pg::database());
    if let Some(known) = known.filter(|known| known.ledger == ledger) {
        return Ok(known);
    }
    let writable_us = table::writable_since(pg::clock::now_us());
    let numbers = ledger::numbers(ledger)?;
    let at_home = numbers.home == ledger::here();
    let promoted = at_home && numbers.timeline != pg::timeline();
    let lossy = promoted && settings::promotion() == Promotion::Lossy;
    let grace_us = grace_us(at_home, lossy, &numbers);
    let lost_up_to = match numbers.epoch_base {
        Some(_) => numbers.lost_up_to,
        None => ledger::highest_token(ledger)?,
    };
    let mut floor = numbers.token;
    if promoted && let Some(start) = start(&numbers, numbers.token, true, 0) {
        // tokens that this server never received end with their epoch
        floor = floor.max(start.token.saturating_sub(1));
    }
    // what was marked before may be there, and not yet on a standby
    let marked_lsn = pg::written_wal();
    let found = in_table(|database| {
        if database.ledger != ledger {
            database.forget_block(ledger);
            database.raise_marked_lsn(marked_lsn);
            *database = Database {
                ledger,
                has_had_block: false,
                // one that was known before has its floor: what was granted since then is still that.
                // Otherwise never lower than the last one's
                floor: if database.before.0 == ledger {
                    database.before.1
                } else {
                    floor.max(database.floor)
                },
                before: (database.ledger, database.floor),
                forgotten: 0,
                promoted,
                lossy,
                grace_until_us: if grace_us > 0 {
                    writable_us.saturating_add(grace_us)
                } else {
                    0
                },
                memory_ttl_us: numbers.memory_ttl_us,
                longest_ttl_us: numbers.longest_ttl_us,
                lost_up_to,
                is_home: at_home && !promoted,
                ..*database
            };
        }
        *database
    })?;
    Ok(found)
}

/// How long nothing is granted after the server became writable: leases that it does not know may still
/// be believed in. Those in memory are lost with every server; a promoted one may lack any.
fn grace_us(at_home: bool, lossy: bool, numbers: &Numbers) -> i64 {
    if !at_home {
        return 0;
    }
    if !lossy {
        return numbers.memory_ttl_us;
    }
    let longest_us = numbers.memory_ttl_us.max(numbers.longest_ttl_us);
    longest_us.max(settings::max_ttl_us())
}

/// Runs `change` on this database's place, making room where the table of databases is full of
/// dropped ones.
fn in_table<R>(change: impl Fn(&mut Database) -> R) -> Answer<R> {
    if let Some(result) = table::database(pg::database(), &change) {
        return Ok(result);
    }
    for oid in table::databases_where(|_| true) {
        if !pg::database_exists(oid) {
            table::forget_database(oid);
        }
    }
    table::database(pg::database(), &change).ok_or_else(|| {
        Refusal::new(code::LIMIT_EXCEEDED, "too many databases use leasehold")
            .detail("The shared table has no place for another database.")
            .hint("Use leasehold in fewer databases of this server.")
    })
}

/// Notes that the longest TTL in memory is durable: the transaction that raised it has committed.
pub fn memory_ttl_is_durable(database: Oid, ledger: Oid, ttl_us: i64) {
    table::database(database, |known| {
        if known.ledger == ledger {
            known.memory_ttl_us = known.memory_ttl_us.max(ttl_us);
        }
    });
}

/// Notes that a TTL is about to be granted in the ledger, where it is the longest so far. Durable with the commit
/// of whoever is granted one so long: it comes later in the WAL.
pub fn note_ttl(known: &Database, ttl_us: i64) -> Answer<()> {
    let ledger = known.ledger;
    if ttl_us <= known.longest_ttl_us {
        return Ok(());
    }
    pg::heavy::lock_tokens();
    let raised = ledger::numbers(ledger).and_then(|numbers| {
        if numbers.longest_ttl_us < ttl_us {
            ledger::set_longest_ttl(ledger, ttl_us)?;
        }
        in_table(|database| {
            if database.ledger == ledger {
                database.longest_ttl_us = database.longest_ttl_us.max(ttl_us);
            }
        })
    });
    pg::heavy::unlock_tokens();
    raised
}

/// Raises the longest TTL in memory, on disk at once. For a standby it is durable with the commit of this
/// transaction, which the caller makes wait for that. Something is written in any case: the commit of a transaction
/// that wrote nothing waits for nothing.
pub fn raise_memory_ttl(ledger: Oid, ttl_us: i64) -> Answer<()> {
    pg::heavy::lock_tokens();
    let raised = ledger::numbers(ledger)
        .and_then(|numbers| ledger::set_memory_ttl(ledger, numbers.memory_ttl_us.max(ttl_us)));
    pg::heavy::unlock_tokens();
    raised?;
    xact::raised_memory_ttl(ledger, ttl_us);
    Ok(())
}

/// Makes this server the ledger's, before its first grant: on disk at once, and for a standby before a lease
/// in memory relies on it. Where leases were lost with a promotion, that they are is written first.
pub fn move_in(known: &Database) -> Answer<()> {
    let ledger = known.ledger;
    pg::heavy::lock_tokens();
    let moved = ledger::numbers(ledger).and_then(|numbers| {
        if known.lossy && numbers.lost_up_to < known.floor {
            ledger::set_lost_up_to(ledger, known.floor)?;
        }
        ledger::set_home(ledger)
    });
    pg::heavy::unlock_tokens();
    moved?;
    let lsn = pg::own_wal();
    in_table(|database| {
        if database.ledger == ledger {
            database.is_home = true;
            database.raise_marked_lsn(lsn);
        }
    })
}

/// Notes that a row of the ledger was marked, or deleted, by the WAL up to there. Before anybody relies on it.
pub fn note_marked(database: Oid, ledger: Oid, lsn: u64) {
    if let Some(known) = table::known_database(database).filter(|known| known.ledger == ledger) {
        known.raise_marked_lsn(lsn);
    }
}

/// A relation is about to be dropped. Where it is one of the extension's, the position of the tokens is noted,
/// in memory and on disk, as long as all is there: an extension that is made again goes on above it.
pub fn relation_goes(relation: Oid) -> Answer<()> {
    if !table::is_ready() || pg::in_recovery() || !ledger::is_part(relation) {
        return Ok(());
    }
    let ledger = ledger::oid()?;
    let numbers = ledger::numbers(ledger)?;
    let promoted = numbers.home == ledger::here() && numbers.timeline != pg::timeline();
    let start = start(&numbers, numbers.token, promoted, 0);
    let position = start.map_or(i64::MAX, |start| start.token.saturating_sub(1));
    // the number that is reserved here, too: tokens of a promoted server may be above its sequence
    let position = in_table(|database| {
        database.handed = database.handed.max(position);
        database.handed
    })?;
    marks::note_dropped(position);
    Ok(())
}

/// Makes sure that the block in memory is not empty.
pub fn ensure(ledger: Oid) -> Answer<()> {
    if database(ledger)?.has_tokens() {
        return Ok(());
    }
    pg::heavy::lock_tokens();
    let reserved = reserve(ledger);
    pg::heavy::unlock_tokens();
    reserved
}

fn reserve(ledger: Oid) -> Answer<()> {
    let known = database(ledger)?;
    if known.has_tokens() {
        return Ok(());
    }
    let numbers = ledger::numbers(ledger)?;
    let position = numbers.token.max(known.handed);
    let start = if known.has_had_block {
        position.checked_add(1)
    } else {
        first_block(ledger, &numbers, position, known.promoted)?
    };
    let block = start.and_then(block_from).ok_or_else(used_up)?;
    ledger::reserve_tokens(ledger, block.last)?;
    in_table(|database| {
        if database.ledger == ledger && !database.has_tokens() {
            database.set_block(block);
        }
    })
}

/// Where the first block since the start begins; None when tokens are used up.
fn first_block(
    ledger: Oid,
    numbers: &Numbers,
    position: i64,
    promoted: bool,
) -> Answer<Option<i64>> {
    let mut position = position;
    if numbers.epoch_base.is_none() {
        // never used here: what rows there are came with a dump. It reads the sequence before the rows,
        // which may be ahead of it then
        let highest = ledger::highest_token(ledger)?;
        ledger::set_lost_up_to(ledger, highest)?;
        position = position.max(highest).max(marks::highest_dropped());
    }
    let start = start(numbers, position, promoted, unix_seconds());
    let is_new = |start: &Start| known_base(numbers) != Some(start.epoch_base);
    if let Some(start) = start.filter(is_new) {
        ledger::set_epoch_base(ledger, start.epoch_base)?;
    }
    Ok(start.map(|start| start.token))
}

/// Where the first block after a position begins.
fn start(numbers: &Numbers, position: i64, promoted: bool, unix_seconds: i64) -> Option<Start> {
    let base = known_base(numbers).unwrap_or(epoch_of(position));
    first_after_start(position, base, pg::timeline(), promoted, unix_seconds)
}

/// The epoch of timeline 1, if it is known in this cluster.
fn known_base(numbers: &Numbers) -> Option<i64> {
    let (system, _) = ledger::here();
    numbers
        .epoch_base
        .filter(|_| numbers.epoch_system == system)
}

fn used_up() -> Refusal {
    Refusal::new(code::SEQUENCE_LIMIT, "fencing tokens are used up")
        .detail("The sequence leasehold.token_seq is at the end of bigint.")
        .hint("Export the data into a new database with a new extension.")
}

/// Wall-clock seconds: they only move the first block after a start upwards.
fn unix_seconds() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .ok()
        .and_then(|d| i64::try_from(d.as_secs()).ok())
        .unwrap_or(0)
}

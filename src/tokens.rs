//! Fencing tokens: blocks of the sequence in shared memory, and what is known of a database.
//!
//! - A block's WAL is on disk before any of its tokens is handed out, so a token is never used twice.
//! - While the server runs tokens are consecutive. The first block after a start, a promotion or
//!   CREATE EXTENSION starts where `leasehold_core::token::first_after_start` says.
//! - One backend at a time reserves, under a heavyweight lock of its own: it needs SQL.
//! - The floor is the position of the sequence when the database was first used since the start:
//!   every token handed out before that is at or below it.

use std::time::{SystemTime, UNIX_EPOCH};

use leasehold_core::token::{Block, block_from, first_after_start};

use crate::errors::{Answer, Refusal, code};
use crate::pg::{self, Oid};
use crate::table::{self, Database};
use crate::{ledger, settings};

/// What is known of this database since the server started. Reads the ledger the first time.
pub fn database(ledger: Oid) -> Answer<Database> {
    let known = table::known_database(pg::database());
    if let Some(known) = known.filter(|known| known.ledger == ledger) {
        return Ok(known);
    }
    let writable_us = table::writable_since(pg::clock::now_us());
    let position = ledger::token_position(ledger)?;
    let server = ledger::server(ledger)?;
    let timeline = pg::timeline();
    let at_home = server.as_ref().filter(|s| s.home == ledger::here());
    let promoted = at_home.is_some_and(|s| s.timeline != timeline);
    let wait_us = if promoted {
        settings::max_ttl_us().max(ledger::longest_ttl_us(ledger)?)
    } else {
        0
    };
    let found = in_table(|database| {
        if database.ledger != ledger {
            *database = Database {
                oid: database.oid,
                ledger,
                block: Block::EMPTY,
                handed: database.handed,
                // never lower: another ledger may come back, of a DROP EXTENSION that is undone
                floor: position.max(database.floor),
                promoted,
                lossy_until_us: if promoted {
                    writable_us.saturating_add(wait_us)
                } else {
                    0
                },
                lost_up_to: at_home.map_or(0, |s| s.lost_up_to),
                is_home: at_home.is_some() && !promoted,
                marks_wanted: database.marks_wanted,
            };
        }
        *database
    })?;
    Ok(found)
}

/// Runs `change` on this database's place, making room where the table of databases is full of
/// dropped ones.
fn in_table<R>(change: impl Fn(&mut Database) -> R) -> Answer<R> {
    if let Some(result) = table::database(pg::database(), &change) {
        return Ok(result);
    }
    for oid in table::databases() {
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

/// Notes that `leasehold.server` names this server: its transaction has committed.
pub fn moved_in(database: Oid, ledger: Oid) {
    table::database(database, |known| {
        if known.ledger == ledger {
            known.is_home = true;
        }
    });
}

/// The next token, or None when the block in memory is used up. Neither errors nor allocates: may be
/// called under a partition's lock.
pub fn take(ledger: Oid) -> Option<i64> {
    table::database(pg::database(), |known| {
        if known.ledger != ledger {
            return None;
        }
        let token = known.block.take()?;
        known.handed = known.handed.max(token);
        Some(token)
    })
    .flatten()
}

/// Makes sure that the block in memory is not empty.
pub fn ensure(ledger: Oid) -> Answer<()> {
    if !database(ledger)?.block.is_empty() {
        return Ok(());
    }
    pg::heavy::lock_tokens();
    let reserved = reserve(ledger);
    pg::heavy::unlock_tokens();
    reserved
}

fn reserve(ledger: Oid) -> Answer<()> {
    let known = database(ledger)?;
    if !known.block.is_empty() {
        return Ok(());
    }
    let position = ledger::token_position(ledger)?.max(known.handed);
    let start = if known.block == Block::EMPTY {
        first_after_start(position, pg::timeline(), known.promoted, unix_seconds())
    } else {
        position.checked_add(1)
    };
    let block = start.and_then(block_from).ok_or_else(used_up)?;
    ledger::reserve_tokens(ledger, block.last)?;
    in_table(|database| {
        if database.ledger == ledger && database.block.is_empty() {
            database.block = block;
        }
    })
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

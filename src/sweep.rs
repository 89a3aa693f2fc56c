//! Old rows of the ledger: deleted when the resource was not granted for `leasehold.ledger_retention`.
//!
//! - The floor is raised to the row's T_max first, in shared memory; after the next start it is above it anyhow.
//!   So what was refused because of the row is refused for ever without it.
//! - A row goes under the exclusive fence lock, without waiting, and only where nothing is live or being
//!   granted: nobody writes that row, and nobody who finds it gone was told otherwise by it.

use std::time::Instant;

use leasehold_core::name;

use crate::errors::Answer;
use crate::ledger::Named;
use crate::pg::hooks;
use crate::pg::{self, Oid, heavy};
use crate::resources::Resource;
use crate::table::Entry;
use crate::{ledger, settings, table, tokens, xact};

/// Rows of one transaction: a taker of one of these resources waits for its end.
const BATCH: usize = 20;

/// The worker of a database, connected to it: deletes what is old, until that instant. True when there may be
/// more that can be deleted.
pub fn run(until: Instant) -> bool {
    let before = pg::wall_clock().saturating_sub(settings::ledger_retention_us());
    let mut has_deleted = false;
    let mut last = Vec::new();
    loop {
        let Some((ledger, old)) = hooks::transaction(|| next_rows(before, &last).ok()) else {
            return false;
        };
        for rows in old.chunks(BATCH) {
            if Instant::now() >= until {
                return has_deleted;
            }
            has_deleted |= hooks::transaction(|| sweep(ledger, rows).unwrap_or(false));
        }
        match old.into_iter().next_back() {
            Some((resource, _)) => last = resource,
            None => return false,
        }
    }
}

fn next_rows(before: i64, after: &[u8]) -> Answer<(Oid, Vec<Named>)> {
    let ledger = ledger::oid()?;
    Ok((ledger, ledger::old_rows(ledger, before, after)?))
}

/// Deletes some rows in the running transaction. Whether there was one that could be.
fn sweep(ledger: Oid, rows: &[Named]) -> Answer<bool> {
    // so that the commit sees to it that the WAL goes to disk, some time
    pg::transaction_number();
    let mut has_deleted = false;
    for (resource, token) in rows {
        has_deleted |= sweep_row(ledger, resource, *token)?;
    }
    Ok(has_deleted)
}

/// Deletes the row of a resource, in the running transaction, if nothing speaks against it.
fn sweep_row(ledger: Oid, name: &[u8], token: i64) -> Answer<bool> {
    let database = tokens::database(ledger)?;
    let resource = Resource {
        name: name.into(),
        hash: name::hash(name),
        ledger,
    };
    // what is in use is not disturbed
    let is_live = |entry: &Entry| entry.record.is_live(pg::clock::now_us());
    if table::read(resource.key(), is_live) == Some(true)
        || !heavy::try_exclude_fence(resource.hash)
    {
        return Ok(false);
    }
    let Some((entry, _)) = resource.peek(Some(&database))? else {
        return Ok(false);
    };
    if entry.record.grant.owner != 0 || is_live(&entry) {
        return Ok(false);
    }
    table::raise_forgotten(pg::database(), ledger, token);
    xact::deletes_rows(ledger);
    ledger::delete_metadata(ledger, name)?;
    ledger::delete(ledger, name, token)
}

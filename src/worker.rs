//! The static background worker: notes when the server became writable, and starts a worker in each
//! database that has releases to mark.
//!
//! It has no connection to a database of its own, so it is in nobody's way. It stays, because a
//! worker that is done would not run again after a crash. Everything is correct without it: see
//! `table::writable_since`, and what `marks` says of a clean shutdown.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::pg::hooks::{Marker, wait};
use crate::pg::{self, Oid};
use crate::table;

/// How long marks are left to gather, and until it tries again where no worker slot is free. What is
/// granted again meanwhile needs no mark, and a mark costs about what a grant writes.
const GATHER: Duration = Duration::from_secs(5);

/// Until the server ends it.
pub fn run() {
    if !table::is_ready() {
        return;
    }
    table::writable_since(pg::clock::now_us());
    let mut running: HashMap<Oid, Marker> = HashMap::new();
    loop {
        while !table::marks_wanted().is_empty() {
            if !gather() {
                return;
            }
            running.retain(|_, marker| !marker.has_ended());
            for database in table::marks_wanted() {
                if !running.contains_key(&database)
                    && let Some(marker) = Marker::start(database)
                {
                    running.insert(database, marker);
                }
            }
        }
        if !wait(None) {
            return;
        }
    }
}

/// Lets marks gather. False when the worker is to end.
fn gather() -> bool {
    let start = Instant::now();
    while let Some(left) = GATHER.checked_sub(start.elapsed()) {
        if !wait(Some(left)) {
            return false;
        }
    }
    true
}

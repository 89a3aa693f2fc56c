//! The static background worker: notes when the server became writable, and starts a worker in each
//! database that has releases to mark.
//!
//! It has no connection to a database of its own, so it is in nobody's way. It stays, because a
//! worker that is done would not run again after a crash. Everything is correct without it: see
//! `table::writable_since` and `marks`.

use std::collections::HashMap;
use std::time::Duration;

use crate::pg::hooks::{Marker, wait};
use crate::pg::{self, Oid};
use crate::{marks, table};

/// How long until it tries again where no worker slot is free.
const RETRY: Duration = Duration::from_secs(1);

/// Until the server ends it.
pub fn run() {
    if !table::is_ready() {
        return;
    }
    table::writable_since(pg::clock::now_us());
    marks::want_left_over();
    let mut running: HashMap<Oid, Marker> = HashMap::new();
    loop {
        running.retain(|_, marker| !marker.has_ended());
        let mut retry = None;
        for database in table::marks_wanted() {
            // one that runs sees for itself; one that has just ended wakes this worker
            if running.contains_key(&database) {
                continue;
            }
            match Marker::start(database) {
                Some(marker) => {
                    running.insert(database, marker);
                }
                None => retry = Some(RETRY),
            }
        }
        if !wait(retry) {
            return;
        }
    }
}

//! The work of the static background worker.

use crate::{pg, table};

/// Notes when this server became writable: recovered leases count from then.
pub fn run() {
    if table::is_ready() {
        table::writable_since(pg::clock::now_us());
    }
}

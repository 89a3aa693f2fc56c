//! Numbers in shared memory, for each database: added to without a lock.

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

use leasehold_core::histogram::BUCKETS;
use pgrx::{pg_guard, pg_shmem_init, pg_sys};

use super::shmem::Memory;
use crate::stats::COUNTS;
use crate::table::DATABASES;

/// Of one database.
#[repr(C)]
pub struct Counters {
    /// Wall clock of the last reset, or of a crash; 0 where there was none since the start of the server.
    pub since: AtomicI64,
    /// How often.
    pub counts: [AtomicU64; COUNTS],
    /// How long somebody waited.
    pub waits: [AtomicU32; BUCKETS],
    /// How long a lease was held.
    pub holds: [AtomicU32; BUCKETS],
}

fn size() -> usize {
    DATABASES * size_of::<Counters>()
}

// SAFETY: all of it is numbers that may be 0
static MEMORY: Memory = unsafe { Memory::new(c"leasehold stats", size, begin) };

/// # Safety
/// `memory` is as large as `size` says.
unsafe fn begin(memory: *mut u8) {
    // SAFETY: by the caller; numbers that may be 0
    let counters = unsafe {
        memory.write_bytes(0, size());
        std::slice::from_raw_parts(memory.cast::<Counters>(), DATABASES)
    };
    // after a crash the server's start is not where they begin; at the start itself it is not known yet
    if super::server_start() != 0 {
        let now = super::wall_clock();
        let since = counters.iter().map(|of| &of.since);
        since.for_each(|since| since.store(now, Ordering::Relaxed));
    }
}

/// Asks for the memory. Only while preloading.
pub fn register() {
    pg_shmem_init!(MEMORY = ());
}

/// Those of a database, by its place in the shared table.
pub fn of_place(place: u32) -> Option<&'static Counters> {
    let counters = MEMORY.start().cast::<Counters>();
    let place = place as usize;
    // SAFETY: the memory has as many as there are databases, all of it atomics, for the life of the process
    (!counters.is_null() && place < DATABASES).then(|| unsafe { &*counters.add(place) })
}

//! A ring of events in shared memory, which many write and nobody waits for.
//!
//! - A writer takes the next number, which says its place too, marks the place as being written, writes, and marks it
//!   as written under that number. It waits for nobody and cannot fail. Where somebody is writing in the place
//!   already, the ring has gone round in that time: the event is dropped.
//! - A reader copies a place and keeps what is marked as written, under the same number before and after.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering, fence};

use pgrx::{pg_guard, pg_shmem_init, pg_sys};

use super::shmem::Memory;
use crate::events::Kept;
use crate::settings;

#[repr(C)]
struct Place {
    /// 0: never used. Twice the number of the event, with one more while it is written.
    mark: AtomicU64,
    event: Kept,
}

/// How many numbers there are for [`is_due`].
const PAUSES: usize = 256;

#[repr(C)]
struct Header {
    /// The number of the last event.
    last: AtomicU64,
    /// When something was last noted, by a hash.
    noted: [AtomicI64; PAUSES],
}

fn size() -> usize {
    match settings::event_ring() {
        0 => 0,
        places => size_of::<Header>().next_multiple_of(64) + places * size_of::<Place>(),
    }
}

// SAFETY: all of the header is numbers that may be 0; a place is not looked at before its mark is set
static MEMORY: Memory = unsafe {
    Memory::new(c"leasehold events", size, |memory| {
        memory.write_bytes(0, size())
    })
};

/// Asks for the memory. Only while preloading, after the settings are defined.
pub fn register() {
    pg_shmem_init!(MEMORY = ());
}

fn header() -> Option<&'static Header> {
    let start = MEMORY.start();
    // SAFETY: the header is at the start of the memory, for the life of the process
    (!start.is_null()).then(|| unsafe { &*start.cast::<Header>() })
}

/// The place of an event. Where there is a header.
fn place(number: u64) -> *mut Place {
    let places = settings::event_ring().max(1) as u64;
    let start = size_of::<Header>().next_multiple_of(64);
    // SAFETY: inside the memory: as many places as the setting says, which cannot change while the server runs
    unsafe {
        let first = MEMORY.start().add(start).cast::<Place>();
        first.add((number % places) as usize)
    }
}

/// Has an event written down by `fill`. Neither raises nor allocates, and so must not `fill`: a lock may be held.
pub fn write(fill: impl FnOnce(&mut Kept)) {
    let Some(header) = header() else { return };
    let number = header.last.fetch_add(1, Ordering::Relaxed) + 1;
    let place = place(number);
    // SAFETY: inside the memory; only who has marked the place writes it
    unsafe {
        let mark = &(*place).mark;
        let before = mark.load(Ordering::Relaxed);
        // a writer that was held up for a whole round finds a newer event
        if !before.is_multiple_of(2) || before > 2 * number {
            return;
        }
        let marked =
            mark.compare_exchange(before, 2 * number + 1, Ordering::Acquire, Ordering::Relaxed);
        if marked.is_err() {
            return;
        }
        fence(Ordering::Release);
        fill(&mut (*place).event);
        mark.store(2 * number, Ordering::Release);
    }
}

/// Whether something is due to be noted that is to be noted once in that many microseconds, of all with one hash.
/// From now on it is noted.
pub fn is_due(hash: u64, pause_us: i64, now_us: i64) -> bool {
    let Some(header) = header() else {
        return false;
    };
    let noted = &header.noted[hash as usize % PAUSES];
    let seen = noted.load(Ordering::Relaxed);
    let is_due = seen == 0 || now_us.saturating_sub(seen) >= pause_us;
    is_due
        && noted
            .compare_exchange(seen, now_us, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
}

/// The number of the last event; 0 where there was none, or none are kept.
pub fn last() -> u64 {
    header().map_or(0, |header| header.last.load(Ordering::Acquire))
}

/// The events after that number that are still there, oldest first, with their numbers.
pub fn after(number: u64) -> Vec<(u64, Kept)> {
    let last = last();
    let places = settings::event_ring() as u64;
    let first = number.max(last.saturating_sub(places)) + 1;
    (first..=last).filter_map(read).collect()
}

/// The first event after `number`, up to `last`, that somebody has a number for and has not written down yet.
pub fn first_unwritten(number: u64, last: u64) -> Option<u64> {
    let places = settings::event_ring() as u64;
    let first = number.max(last.saturating_sub(places)) + 1;
    (first..=last).find(|number| {
        // SAFETY: inside the memory
        let mark = unsafe { (*place(*number)).mark.load(Ordering::Acquire) };
        // a newer mark: the ring has lost it
        mark < 2 * number || mark == 2 * number + 1
    })
}

fn read(number: u64) -> Option<(u64, Kept)> {
    let place = place(number);
    // SAFETY: inside the memory. What is copied while it is written is thrown away before it is taken for an event
    unsafe {
        let mark = &(*place).mark;
        if mark.load(Ordering::Acquire) != 2 * number {
            return None;
        }
        let event = (&raw const (*place).event)
            .cast::<std::mem::MaybeUninit<Kept>>()
            .read_volatile();
        fence(Ordering::Acquire);
        (mark.load(Ordering::Relaxed) == 2 * number).then(|| (number, event.assume_init()))
    }
}

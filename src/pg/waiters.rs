//! Those who wait for a lease, in shared memory: a place for each backend, and how it sleeps and is woken.
//!
//! A backend waits for one resource at a time. Which queue its place is in, and where, is `core::queue`'s business;
//! it is changed under the lock of the partition that the resource is in, and under no other.
//!
//! Waking somebody sets his latch: it cannot fail, is not lost if he is about to sleep, and costs nothing where he
//! is awake. The latch of a backend that is gone belongs to the next one in its place, which looks and goes on.

use std::cell::Cell;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU32, Ordering};

use leasehold_core::name::HOLDER_BYTES_MAX;
use leasehold_core::queue::{NOBODY, Place, Places};
use pgrx::{pg_guard, pg_shmem_init, pg_sys};

use super::Oid;
use super::sessions::{own_index, places};
use super::shmem::Memory;
use crate::table::{Bytes, Request};

/// Name of the memory in `pg_shmem_allocations`, and of the wait event of a session that waits for a lease.
const NAME: &CStr = c"leasehold wait";
/// PostgreSQL's class of wait events of lightweight locks.
#[cfg(any(feature = "pg15", feature = "pg16"))]
const CLASS_LWLOCK: u32 = 0x0100_0000;

/// One who waits. What stands beside the place is for those who look.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Waiter {
    place: Place,
    latch: *mut pg_sys::Latch,
    /// His backend.
    pub pid: i32,
    /// The role that the lease would belong to.
    pub role: Oid,
    /// Since when he waits, by the clock of leases.
    pub since_us: i64,
    /// Until when; `i64::MAX` for as long as it takes.
    pub until_us: i64,
    /// What he calls his request, if anything.
    pub request: Option<Request>,
    /// The label of the holder that he would be.
    pub holder: Bytes<HOLDER_BYTES_MAX>,
}

impl Waiter {
    const NOBODY: Waiter = Waiter {
        place: Place::EMPTY,
        latch: std::ptr::null_mut(),
        pid: 0,
        role: 0,
        since_us: 0,
        until_us: 0,
        request: None,
        holder: Bytes::EMPTY,
    };

    /// He is in a queue.
    pub fn is_queued(&self) -> bool {
        self.place.is_queued
    }

    /// Who came after him in it.
    pub fn behind(&self) -> Option<u32> {
        (self.place.behind != NOBODY).then_some(self.place.behind)
    }
}

// SAFETY: writes a waiter into each place that the size has room for
static WAITERS: Memory = unsafe {
    Memory::new(
        NAME,
        || places() * size_of::<Waiter>(),
        |memory| {
            for index in 0..places() {
                memory.cast::<Waiter>().add(index).write(Waiter::NOBODY);
            }
        },
    )
}
.with_locks(|| NAMING_LOCKS);

/// A lightweight lock that nobody takes: PostgreSQL 15 and 16 know no other way to name what is waited for.
const NAMING_LOCKS: usize = cfg!(any(feature = "pg15", feature = "pg16")) as usize;

/// What a waiting session shows in `pg_stat_activity`; 0 until it is known.
static WAIT_EVENT: AtomicU32 = AtomicU32::new(0);

/// Asks for the memory. Only while preloading.
pub fn register() {
    pg_shmem_init!(WAITERS = ());
}

/// The wait event: in PostgreSQL 17 and 18 one of class Extension; before, extensions have one for all of them, so
/// it is the name of a lightweight lock.
pub(super) fn wait_event() -> u32 {
    let known = WAIT_EVENT.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    // SAFETY: the tranche was requested; its first lock knows its number
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    let event = unsafe {
        let tranche = pg_sys::GetNamedLWLockTranche(NAME.as_ptr());
        CLASS_LWLOCK | u32::from((*tranche).lock.tranche)
    };
    // SAFETY: gives the same number for the same name, in every backend
    #[cfg(any(feature = "pg17", feature = "pg18"))]
    let event = unsafe { pg_sys::WaitEventExtensionNew(NAME.as_ptr()) };
    WAIT_EVENT.store(event, Ordering::Relaxed);
    event
}

/// All places. Each may only be touched under the lock of the partition whose queue it is in, or by its own backend
/// where it is in none.
pub struct All;

impl All {
    fn waiter(number: u32) -> *mut Waiter {
        let waiters = WAITERS.start().cast::<Waiter>();
        let index = number as usize;
        assert!(
            !waiters.is_null() && index < places(),
            "a place of a backend"
        );
        // SAFETY: inside the memory
        unsafe { waiters.add(index) }
    }
}

impl Places for All {
    fn place(&mut self, number: u32) -> &mut Place {
        // SAFETY: by the lock that the type speaks of; the reference ends before the next is made
        unsafe { &mut (*All::waiter(number)).place }
    }
}

/// A copy of a waiter. Under the lock of the partition whose queue he is in.
pub fn read(number: u32) -> Waiter {
    // SAFETY: nobody changes it meanwhile
    unsafe { *All::waiter(number) }
}

/// How many can wait at once, in all.
pub fn most() -> usize {
    places()
}

/// The number of this backend's place.
pub fn own() -> u32 {
    u32::try_from(own_index()).unwrap_or(u32::MAX)
}

/// Says that this backend waits, who it is, and for how long. While it is in no queue.
pub fn introduce(
    role: Oid,
    request: Option<Request>,
    holder: Bytes<HOLDER_BYTES_MAX>,
    since_us: i64,
    until_us: i64,
) {
    // SAFETY: the own place, in no queue; a variable of this backend
    unsafe {
        *All::waiter(own()) = Waiter {
            place: Place::EMPTY,
            latch: pg_sys::MyLatch,
            pid: super::pid(),
            role,
            since_us,
            until_us,
            request,
            holder,
        };
    }
}

/// A process that waits in no queue any more, but for the resource that is being granted to it. Under the lock of the
/// partition of that resource.
pub fn read_of(pid: i32) -> Option<Waiter> {
    let is_its = |number: &u32| {
        // SAFETY: inside the memory; a number that is looked at by itself
        unsafe { (&raw const (*All::waiter(*number)).pid).read_volatile() == pid }
    };
    let mut numbers = 0..u32::try_from(places()).unwrap_or(0);
    numbers.find(is_its).map(read)
}

/// Wakes a waiter. Cannot fail.
pub fn wake(number: u32) {
    // SAFETY: a latch in a process's entry of shared memory, which stays valid when its process ends
    unsafe {
        let latch = (*All::waiter(number)).latch;
        if !latch.is_null() {
            pg_sys::SetLatch(latch);
        }
    }
}

/// Sleeps until that instant, or until this backend is woken. Raises where the wait is cancelled, or the session
/// ended.
pub fn sleep_until(until_us: i64) {
    let left_us = until_us.saturating_sub(super::clock::now_us());
    if left_us > 0 {
        let ms = left_us.saturating_add(999) / 1000;
        let events = pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH;
        // a snapshot of the catalogs that was left over would hold back vacuum
        // SAFETY: this backend's latch; no snapshot of ours relies on that of the catalogs
        unsafe {
            pg_sys::InvalidateCatalogSnapshotConditionally();
            pg_sys::WaitLatch(
                pg_sys::MyLatch,
                events as i32,
                std::ffi::c_long::try_from(ms)
                    .unwrap_or(std::ffi::c_long::MAX)
                    .min(1_000_000),
                wait_event(),
            );
        }
    }
    // SAFETY: as above. Whoever sets it from here on is seen by the next sleep
    unsafe { pg_sys::ResetLatch(pg_sys::MyLatch) };
    pgrx::check_for_interrupts!();
}

/// `lock_timeout`, microseconds; 0 for none.
pub fn lock_timeout_us() -> i64 {
    // SAFETY: a plain variable of this backend
    i64::from(unsafe { pg_sys::LockTimeout }).saturating_mul(1000)
}

thread_local! {
    static LEAVES_AT_EXIT: Cell<bool> = const { Cell::new(false) };
}

/// Has this backend leave its queue when it ends: a FATAL error jumps over everything. Once, lazily, because a
/// backend forgets what the postmaster registered.
pub fn leave_at_exit() {
    if !LEAVES_AT_EXIT.replace(true) {
        // SAFETY: the callback is guarded and lives as long as the process
        unsafe { pg_sys::before_shmem_exit(Some(at_exit), pg_sys::Datum::from(0)) };
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn at_exit(_code: std::ffi::c_int, _arg: pg_sys::Datum) {
    crate::wait::leave();
}

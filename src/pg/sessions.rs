//! The sessions whose transactions hold fences, in shared memory: so that a zombie can be ended, and
//! nobody else.
//!
//! A signal is meant for a transaction but goes to a process, which may have gone on to another
//! transaction of another client of a pool by the time it arrives. So each backend has a place here, and
//! what it says changes under a lock:
//! - The first fence lock of a transaction opens the place. PRE_COMMIT takes it to `Committing`, the end
//!   of the transaction to `Idle`.
//! - A signal is sent only to an open place of the very transaction that was found holding the fence, and
//!   **under the lock**, so that transaction is still open and not yet at its commit.
//! - A transaction that comes to its commit and finds that it was signalled does not commit: it raises
//!   what the signal would have. So no signal is left over for the next transaction.
//!
//! Nothing that can raise, allocate or log happens under the lock; `kill` cannot.

use std::cell::Cell;
use std::ffi::CStr;
use std::sync::atomic::{Ordering, fence};

use pgrx::{pg_guard, pg_shmem_init, pg_sys};

use super::shmem::Memory;
use crate::settings::ZombiePolicy;

/// Name of the memory in `pg_shmem_allocations` and of the locks' wait event.
const NAME: &CStr = c"leasehold sessions";
const LOCKS: usize = 16;
/// How long a statement may take to notice that it was cancelled, before its session is ended.
const CANCEL_US: i64 = 1_000_000;
/// `WAIT_EVENT_CLIENT_READ`: `PG_WAIT_CLIENT` and the first event of its class, in PostgreSQL 15 to 18.
const CLIENT_READ: u32 = 0x0600_0000;

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum State {
    /// No transaction that has locked a fence.
    Idle = 0,
    Open = 1,
    /// At its commit: never cut off.
    Committing = 2,
    /// Its statement was cancelled.
    Cancelled = 3,
    /// The session was told to end.
    Doomed = 4,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Place {
    state: State,
    pid: i32,
    /// The transaction, among those of this backend.
    transaction: u32,
    /// When it was signalled.
    asked_us: i64,
    /// The process's entry among PostgreSQL's, for what it waits for.
    process: *mut pg_sys::PGPROC,
}

impl Place {
    const IDLE: Place = Place {
        state: State::Idle,
        pid: 0,
        transaction: 0,
        asked_us: 0,
        process: std::ptr::null_mut(),
    };
}

#[repr(C)]
struct Header {
    /// Takers that wait for a fence to become free.
    drained: pg_sys::ConditionVariable,
}

// SAFETY: writes the header, and a place into each that the size has room for
static SESSIONS: Memory = unsafe { Memory::new(NAME, total, begin) }.with_locks(|| LOCKS);

thread_local! {
    /// This backend's place is not idle.
    static IS_OPEN: Cell<bool> = const { Cell::new(false) };
}

/// Asks for the memory. Only while preloading.
pub fn register() {
    pg_shmem_init!(SESSIONS = ());
}

/// One place for each process that can run a transaction.
pub(super) fn places() -> usize {
    // SAFETY: final before shared memory is requested
    usize::try_from(unsafe { pg_sys::MaxBackends }).unwrap_or(0) + 1
}

fn total() -> usize {
    size_of::<Header>().next_multiple_of(64) + places() * size_of::<Place>()
}

/// # Safety
/// `memory` is as large as `total` says.
unsafe fn begin(memory: *mut u8) {
    let header = memory.cast::<Header>();
    // SAFETY: inside the memory
    unsafe {
        pg_sys::ConditionVariableInit(&raw mut (*header).drained);
        for index in 0..places() {
            place(header, index).write(Place::IDLE);
        }
    }
}

fn header() -> *mut Header {
    SESSIONS.start().cast()
}

/// # Safety
/// `header` is the start of the memory, `index` below `places()`.
unsafe fn place(header: *mut Header, index: usize) -> *mut Place {
    // SAFETY: inside the memory
    unsafe {
        let places = header
            .cast::<u8>()
            .add(size_of::<Header>().next_multiple_of(64));
        places.cast::<Place>().add(index)
    }
}

/// Runs `body` on a place, under its lock. None where there is no such place.
fn locked<R>(index: usize, body: impl FnOnce(&mut Place) -> R) -> Option<R> {
    let header = header();
    if header.is_null() || index >= places() {
        return None;
    }
    // SAFETY: the tranche has that many locks; the place is only looked at under its lock
    unsafe {
        let held = SESSIONS.lock(index % LOCKS).exclusive();
        let result = body(&mut *place(header, index));
        drop(held);
        Some(result)
    }
}

/// The place of this backend: by the number that it has in virtual transaction ids.
pub(super) fn own_index() -> usize {
    // SAFETY: variables of this backend, set when it started
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    let number = unsafe { pg_sys::MyBackendId };
    // SAFETY: as above
    #[cfg(any(feature = "pg17", feature = "pg18"))]
    let number = unsafe { pg_sys::MyProcNumber };
    usize::try_from(number).unwrap_or(usize::MAX)
}

fn own_transaction() -> u32 {
    // SAFETY: this backend's entry, while it runs a transaction
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        return (*pg_sys::MyProc).lxid;
        #[cfg(any(feature = "pg17", feature = "pg18"))]
        return (*pg_sys::MyProc).vxid.lxid;
    }
}

/// This transaction is about to lock a fence.
pub fn open() {
    if IS_OPEN.get() {
        return;
    }
    crate::xact::is_going_to_act();
    let transaction = own_transaction();
    let opened = Place {
        state: State::Open,
        pid: super::pid(),
        transaction,
        asked_us: 0,
        // SAFETY: reads a variable of this backend
        process: unsafe { pg_sys::MyProc },
    };
    locked(own_index(), |place| *place = opened);
    IS_OPEN.set(true);
}

/// What a transaction that comes to its commit was told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Told {
    /// Its statement is cancelled.
    Cancelled,
    /// The session is to end.
    ToEnd,
}

/// PRE_COMMIT: from here on nobody cuts this transaction off, unless it has been told before.
pub fn committing() -> Option<Told> {
    if !IS_OPEN.get() {
        return None;
    }
    locked(own_index(), |place| match place.state {
        State::Cancelled => Some(Told::Cancelled),
        State::Doomed => Some(Told::ToEnd),
        State::Idle | State::Open | State::Committing => {
            place.state = State::Committing;
            None
        }
    })
    .flatten()
}

/// The transaction has ended. Its locks may still be held, but they are going. Whether it had locked a
/// fence.
pub fn ended() -> bool {
    if !IS_OPEN.get() {
        return false;
    }
    let was = locked(own_index(), |place| {
        std::mem::replace(place, Place::IDLE).state
    });
    if was == Some(State::Cancelled) {
        // the cancel was for this transaction, which is over: not for the next statement
        // SAFETY: a variable of this backend, cleared as the main loop clears it after an error
        unsafe { pg_sys::QueryCancelPending = 0 };
    }
    IS_OPEN.replace(false)
}

/// Whether this transaction has locked a fence.
pub fn is_open() -> bool {
    IS_OPEN.get()
}

/// A transaction that holds a fence, by its virtual transaction id.
#[derive(Clone, Copy)]
pub struct Holder {
    index: usize,
    transaction: u32,
}

impl Holder {
    /// From what PostgreSQL says of a lock's holders.
    pub(super) fn of(id: &pg_sys::VirtualTransactionId) -> Holder {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        let number = id.backendId;
        #[cfg(any(feature = "pg17", feature = "pg18"))]
        let number = id.procNumber;
        Holder {
            index: usize::try_from(number).unwrap_or(usize::MAX),
            transaction: id.localTransactionId,
        }
    }
}

/// What is done about a holder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// Its end is near or past: its locks go by themselves. Or it is prepared, and has no session.
    Ending,
    /// It is left alone.
    Left,
    /// It was signalled before.
    Asked,
    /// Its statement was cancelled now.
    Cancelled(i32),
    /// Its session was told to end now.
    Ended(i32),
}

/// Signals a holder as far as the policy goes, if it `may` be ended at all.
pub fn ask(holder: Holder, policy: ZombiePolicy, may: bool, now_us: i64) -> Fate {
    locked(holder.index, |place| {
        if place.transaction != holder.transaction {
            return Fate::Ending;
        }
        // SAFETY: the entry of a process of which the place says that it runs a transaction; the event is
        // read as PostgreSQL's own views read it
        let is_idle = place.state != State::Idle
            && unsafe { (&raw const (*place.process).wait_event_info).read_volatile() }
                == CLIENT_READ;
        let ends = policy == ZombiePolicy::Terminate;
        match place.state {
            State::Idle | State::Committing => Fate::Ending,
            State::Doomed => Fate::Asked,
            State::Open if !may || policy == ZombiePolicy::Wait => Fate::Left,
            State::Open if !is_idle => {
                signal(place, State::Cancelled, libc::SIGINT, now_us);
                Fate::Cancelled(place.pid)
            }
            State::Open if ends => {
                signal(place, State::Doomed, libc::SIGTERM, now_us);
                Fate::Ended(place.pid)
            }
            State::Open => Fate::Left,
            // the cancel has ended a statement inside a savepoint only, or was caught
            State::Cancelled
                if ends && (is_idle || now_us.saturating_sub(place.asked_us) > CANCEL_US) =>
            {
                signal(place, State::Doomed, libc::SIGTERM, now_us);
                Fate::Ended(place.pid)
            }
            State::Cancelled if is_idle => Fate::Left,
            // another statement, or one that has caught it
            State::Cancelled if may && now_us.saturating_sub(place.asked_us) > CANCEL_US => {
                signal(place, State::Cancelled, libc::SIGINT, now_us);
                Fate::Cancelled(place.pid)
            }
            State::Cancelled => Fate::Asked,
        }
    })
    .unwrap_or(Fate::Ending)
}

fn signal(place: &mut Place, state: State, signal: i32, now_us: i64) {
    place.state = state;
    place.asked_us = now_us;
    // SAFETY: a process of this server, which runs the transaction that is meant: its place says so, and
    // it cannot get past its end while this lock is held
    unsafe { libc::kill(place.pid, signal) };
}

/// A taker that waits for fences to become free; woken whenever a transaction ends that held one.
pub struct Drain;

impl Drain {
    /// Before the fence is tried, so that no end is missed.
    pub fn prepare() -> Drain {
        // SAFETY: the variable lives in shared memory; cancelled by the drop
        unsafe { pg_sys::ConditionVariablePrepareToSleep(drained()) };
        Drain
    }

    /// Until something has ended, at most that many milliseconds. Raises where the taker is cancelled.
    pub fn wait(&self, ms: i64) {
        let event = super::waiters::wait_event();
        // SAFETY: prepared by the constructor; a snapshot of the catalogs that was left over would hold back vacuum
        unsafe {
            pg_sys::InvalidateCatalogSnapshotConditionally();
            pg_sys::ConditionVariableTimedSleep(drained(), ms.max(1), event);
        }
    }
}

impl Drop for Drain {
    fn drop(&mut self) {
        // SAFETY: allowed whether or not a sleep is prepared
        unsafe { pg_sys::ConditionVariableCancelSleep() };
    }
}

fn drained() -> *mut pg_sys::ConditionVariable {
    let header = header();
    assert!(!header.is_null(), "the shared memory is not there");
    // SAFETY: inside the memory
    unsafe { &raw mut (*header).drained }
}

/// The locks of a transaction that held fences are gone. Cannot fail; cheap where nobody waits.
pub fn wake_takers() {
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    const NOBODY: i32 = i32::MAX;
    #[cfg(any(feature = "pg17", feature = "pg18"))]
    const NOBODY: i32 = -1;
    // a taker prepares to sleep, then tries the fence; we have let the fence go, and now look who sleeps
    fence(Ordering::SeqCst);
    // SAFETY: reads one word of shared memory; the broadcast takes the variable's own lock
    unsafe {
        let head = (&raw const (*drained()).wakeup.head).read_volatile();
        if head != NOBODY {
            pg_sys::ConditionVariableBroadcast(drained());
        }
    }
}

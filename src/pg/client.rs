//! The client that does not read: what his session tells him must not hold up the end of its transaction.
//!
//! A backend tells its client an error before it aborts the transaction, with interrupts held off. Where the connection
//! has no room for the message, because the client is stopped or stuck, PostgreSQL waits for him and for nothing
//! else: a SIGTERM is not seen, and the transaction keeps its locks, the fence among them. The same goes for
//! the message of a FATAL error, and for warnings on the way out of a transaction and on behalf of parallel workers.
//! (PostgreSQL 15 to 18: `PostgresMain`, `errfinish`, `ProcessClientWriteInterrupt`.)
//!
//! So in a transaction that leasehold knows such messages are put into the backend's buffer, which grows for them (and
//! stays so large), and go out as far as there is room. The rest goes out before the backend reads what its client wants
//! next: then the abort is done, and a SIGTERM is seen, which matters where a savepoint has kept the transaction
//! from it. It must go out even though nothing else may follow: a client may wait for the error before it sends a
//! Sync. What a FATAL error has no room for is lost with the connection, as it is where PostgreSQL itself is
//! interrupted in a write.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use pgrx::pg_sys;

use crate::xact;

/// How many bytes of notices may be kept, before PostgreSQL waits as ever: it is that which slows down the parallel
/// workers that they come from.
const MAX_NOTICES: usize = 1 << 20;

const ERROR_RESPONSE: u8 = b'E';
const NOTICE_RESPONSE: u8 = b'N';

/// `PQcommMethods`: how a process talks to its client, in PostgreSQL 15 to 18.
#[derive(Clone, Copy)]
#[repr(C)]
struct Methods {
    comm_reset: unsafe extern "C-unwind" fn(),
    flush: unsafe extern "C-unwind" fn() -> c_int,
    flush_if_writable: unsafe extern "C-unwind" fn() -> c_int,
    is_send_pending: unsafe extern "C-unwind" fn() -> bool,
    putmessage: unsafe extern "C-unwind" fn(c_char, *const c_char, usize) -> c_int,
    putmessage_noblock: unsafe extern "C-unwind" fn(c_char, *const c_char, usize),
}

mod raw {
    use super::{Methods, pg_sys};

    unsafe extern "C-unwind" {
        pub static mut PqCommMethods: *const Methods;
        // with no guard of pgrx's: it cannot raise
        pub fn MemoryContextRegisterResetCallback(
            context: pg_sys::MemoryContext,
            callback: *mut pg_sys::MemoryContextCallback,
        );
    }
}

/// What PostgreSQL had, and what stands in its place: the same but for three of them.
static METHODS: OnceLock<[Methods; 2]> = OnceLock::new();

/// What PostgreSQL calls before it reads the next message.
static mut REST: pg_sys::MemoryContextCallback = pg_sys::MemoryContextCallback {
    func: Some(send_rest),
    arg: std::ptr::null_mut(),
    next: std::ptr::null_mut(),
};

thread_local! {
    /// A call of what PostgreSQL had is under way. One that comes in the midst of it is not looked at, and what an error
    /// leaves behind means that until the error is told.
    static IS_BUSY: Cell<bool> = const { Cell::new(false) };
    /// The last message must not be waited for.
    static TELLS: Cell<bool> = const { Cell::new(false) };
    /// The rest is going to be sent.
    static IS_DUE: Cell<bool> = const { Cell::new(false) };
    /// Bytes of notices that were not waited for since the buffer was empty.
    static KEPT: Cell<usize> = const { Cell::new(0) };
    /// There was no memory for a message: the next is PostgreSQL's.
    static HAS_FAILED: Cell<bool> = const { Cell::new(false) };
}

/// Stands between PostgreSQL and the clients' sockets. Only while preloading: every backend inherits it, and parallel
/// workers replace it by their own.
pub fn register() {
    // SAFETY: nobody else is there yet, and what is pointed to lives as long as the process. The functions hold plain
    // data only, so that PostgreSQL's errors may jump over them, and do not panic
    unsafe {
        let [_, ours] = METHODS.get_or_init(|| {
            let before = *raw::PqCommMethods;
            let ours = Methods {
                comm_reset,
                flush,
                putmessage,
                ..before
            };
            [before, ours]
        });
        raw::PqCommMethods = ours;
    }
}

/// What PostgreSQL had.
///
/// # Safety
/// After `register`.
unsafe fn before() -> &'static Methods {
    match METHODS.get() {
        Some([before, _]) => before,
        // SAFETY: by the caller
        None => unsafe { std::hint::unreachable_unchecked() },
    }
}

/// A call of what PostgreSQL had, which may come back to those below.
fn busy<R>(call: impl FnOnce() -> R) -> R {
    let was_busy = IS_BUSY.replace(true);
    let result = call();
    IS_BUSY.set(was_busy);
    result
}

/// After an error, before it is told.
unsafe extern "C-unwind" fn comm_reset() {
    HAS_FAILED.set(IS_BUSY.take());
    TELLS.set(false);
    // SAFETY: called by PostgreSQL through what `register` has set
    unsafe { (before().comm_reset)() }
}

/// A message for the client. Errors and notices are followed by a flush at once.
unsafe extern "C-unwind" fn putmessage(kind: c_char, body: *const c_char, length: usize) -> c_int {
    // SAFETY: as above; the arguments go on as they are
    unsafe {
        if IS_BUSY.get() {
            return (before().putmessage)(kind, body, length);
        }
        TELLS.set(false);
        if xact::is_idle() || !must_not_wait(kind, length) {
            return busy(|| (before().putmessage)(kind, body, length));
        }
        busy(|| {
            // so that the buffer grows by what there is no room for only
            (before().flush_if_writable)();
            (before().putmessage_noblock)(kind, body, length);
        });
        if kind.to_ne_bytes() == [NOTICE_RESPONSE] {
            KEPT.set(KEPT.get().saturating_add(length));
        }
        TELLS.set(true);
        0
    }
}

/// Whether a message would be waited for deaf to signals.
fn must_not_wait(kind: c_char, length: usize) -> bool {
    // SAFETY: variables of this backend
    let (are_interrupts_held, is_critical) = unsafe {
        (
            pg_sys::InterruptHoldoffCount > 0,
            pg_sys::CritSectionCount > 0,
        )
    };
    match kind.to_ne_bytes()[0] {
        // nothing may be allocated there
        _ if is_critical || HAS_FAILED.take() => false,
        ERROR_RESPONSE => true,
        NOTICE_RESPONSE => are_interrupts_held && KEPT.get().saturating_add(length) < MAX_NOTICES,
        _ => false,
    }
}

unsafe extern "C-unwind" fn flush() -> c_int {
    // SAFETY: as above; the main loop's context is there in every process that has a client
    unsafe {
        let tells = TELLS.replace(false);
        if IS_BUSY.get() || !tells || pg_sys::MessageContext.is_null() {
            let result = busy(|| (before().flush)());
            if !(before().is_send_pending)() {
                KEPT.set(0);
            }
            return result;
        }
        let result = busy(|| (before().flush_if_writable)());
        if !(before().is_send_pending)() {
            KEPT.set(0);
        } else if !IS_DUE.replace(true) {
            raw::MemoryContextRegisterResetCallback(pg_sys::MessageContext, &raw mut REST);
        }
        result
    }
}

/// The main loop is about to read, or to say that it is ready: interrupts are on, and the transaction is aborted, or as much
/// of it as a savepoint has saved the rest from.
unsafe extern "C-unwind" fn send_rest(_arg: *mut c_void) {
    IS_DUE.set(false);
    KEPT.set(0);
    // SAFETY: as above
    unsafe { busy(|| (before().flush)()) };
}

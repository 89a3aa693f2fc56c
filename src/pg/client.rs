//! The client that does not read: what his session tells him must not hold up the end of its transaction.
//!
//! A backend tells its client an error before it aborts the transaction, with interrupts held off. Where the connection
//! has no room for the message, because the client is stopped or stuck, PostgreSQL waits for him and for nothing
//! else: a SIGTERM is not seen, and the transaction keeps its locks, the fence among them. The same goes for
//! the message of a FATAL error, and for warnings on the way out of a transaction and on behalf of parallel workers.
//! (PostgreSQL 15 to 18: `PostgresMain`, `errfinish`, `ProcessClientWriteInterrupt`.)
//!
//! So in a transaction that leasehold knows such messages are put into the backend's buffer, which grows for them, and go
//! out as far as there is room. The rest goes out before whatever is sent next, which is after the abort, and where a
//! SIGTERM is seen. What a FATAL error has no room for is lost with the connection, as it is where PostgreSQL
//! itself is interrupted in a write.

use std::cell::Cell;
use std::ffi::{c_char, c_int};
use std::sync::OnceLock;

use pgrx::pg_sys;

use crate::xact;

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
    use super::Methods;

    unsafe extern "C-unwind" {
        pub static mut PqCommMethods: *const Methods;
    }
}

/// What PostgreSQL had, and what stands in its place: the same but for three of them.
static METHODS: OnceLock<[Methods; 2]> = OnceLock::new();

thread_local! {
    /// A message is being put into the buffer: that comes back here.
    static PUTS: Cell<bool> = const { Cell::new(false) };
    /// The last message must not be waited for.
    static TELLS: Cell<bool> = const { Cell::new(false) };
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

/// After an error, before it is told.
unsafe extern "C-unwind" fn comm_reset() {
    PUTS.set(false);
    TELLS.set(false);
    // SAFETY: called by PostgreSQL through what `register` has set
    unsafe { (before().comm_reset)() }
}

/// A message for the client. Errors and notices are followed by a flush at once.
unsafe extern "C-unwind" fn putmessage(kind: c_char, body: *const c_char, length: usize) -> c_int {
    // SAFETY: as above; the arguments go on as they are
    unsafe {
        if PUTS.get() {
            return (before().putmessage)(kind, body, length);
        }
        let tells = !xact::is_idle() && must_not_wait(kind);
        TELLS.set(tells);
        if !tells {
            return (before().putmessage)(kind, body, length);
        }
        PUTS.set(true);
        (before().putmessage_noblock)(kind, body, length);
        PUTS.set(false);
        0
    }
}

/// Whether a message of this kind would be waited for deaf to signals.
fn must_not_wait(kind: c_char) -> bool {
    const ERROR_RESPONSE: u8 = b'E';
    const NOTICE_RESPONSE: u8 = b'N';
    // SAFETY: a variable of this backend
    let are_interrupts_held = unsafe { pg_sys::InterruptHoldoffCount } > 0;
    match kind.cast_unsigned() {
        ERROR_RESPONSE => true,
        NOTICE_RESPONSE => are_interrupts_held,
        _ => false,
    }
}

unsafe extern "C-unwind" fn flush() -> c_int {
    // SAFETY: as above
    unsafe {
        if TELLS.replace(false) {
            (before().flush_if_writable)()
        } else {
            (before().flush)()
        }
    }
}

//! The client that does not read: his session must be able to end all the same.
//!
//! A backend tells its client an error before it aborts the transaction, with interrupts held off. Where the connection
//! has no room for the message, because the client is stopped or stuck, that waits for him and for nothing else: a
//! SIGTERM is not seen, and the transaction keeps its locks, the fence among them. The same goes for the message of a
//! FATAL error. (PostgreSQL 15 to 18: `PostgresMain`, `errfinish` and `ProcessClientWriteInterrupt`.)
//!
//! So before an error is told in a transaction that holds a fence, the wait for room is done here, where a request to
//! end is seen. Then the client is told nothing more: his end of the connection is shut, so what he has read before
//! can't be taken for a whole answer.
//!
//! PostgreSQL calls the hook for what it writes to the server log only: with `log_min_messages` above `error`, errors
//! are told as ever.

use std::ffi::{c_int, c_long};
use std::sync::atomic::{Ordering, compiler_fence};

use pgrx::pg_sys;

use super::sessions;

/// `WAIT_EVENT_CLIENT_WRITE`: the second event of the class `PG_WAIT_CLIENT`, in PostgreSQL 15 to 18.
const CLIENT_WRITE: u32 = 0x0600_0001;
/// The places of the client's socket in `FeBeWaitSet`; those of the latch and the postmaster's death come after it.
const SOCKET: c_int = 0;
const ERROR: c_int = pgrx::PgLogLevel::ERROR as c_int;
const FATAL: c_int = pgrx::PgLogLevel::FATAL as c_int;

/// `PQcommMethods` of PostgreSQL 15 to 18.
#[repr(C)]
struct Methods {
    comm_reset: unsafe extern "C-unwind" fn(),
    flush: unsafe extern "C-unwind" fn() -> c_int,
    flush_if_writable: unsafe extern "C-unwind" fn() -> c_int,
    is_send_pending: unsafe extern "C-unwind" fn() -> bool,
}

mod raw {
    use super::{Methods, c_int, c_long, pg_sys};

    unsafe extern "C-unwind" {
        pub static FeBeWaitSet: *mut pg_sys::WaitEventSet;
        pub static PqCommMethods: *const Methods;
        // as PostgreSQL itself calls them when it writes to a client: with no guard of pgrx's, an error goes on to
        // who catches PostgreSQL's errors
        pub fn ModifyWaitEvent(
            set: *mut pg_sys::WaitEventSet,
            position: c_int,
            events: u32,
            latch: *mut pg_sys::Latch,
        );
        pub fn WaitEventSetWait(
            set: *mut pg_sys::WaitEventSet,
            timeout: c_long,
            occurred: *mut pg_sys::WaitEvent,
            size: c_int,
            wait_event: u32,
        ) -> c_int;
        pub fn ResetLatch(latch: *mut pg_sys::Latch);
        pub fn SetLatch(latch: *mut pg_sys::Latch);
    }
}

static mut NEXT_EMIT_LOG: pg_sys::emit_log_hook_type = None;

/// Hooks in before messages are told. Only while preloading.
pub fn register() {
    // SAFETY: the hook lives as long as the process
    unsafe {
        NEXT_EMIT_LOG = pg_sys::emit_log_hook;
        pg_sys::emit_log_hook = Some(emit_log);
    }
}

/// Before a message is logged and told. No guard of pgrx's: nothing here panics, and errors jump over plain data only.
unsafe extern "C-unwind" fn emit_log(message: *mut pg_sys::ErrorData) {
    // SAFETY: PostgreSQL passes a live message; the other hook gets it as it is
    unsafe {
        if let Some(next) = NEXT_EMIT_LOG {
            next(message);
        }
        let level = (*message).elevel;
        if (level == ERROR || level == FATAL)
            && (*message).output_to_client
            && sessions::is_open()
            && !pg_sys::MyProcPort.is_null()
        {
            tell(&mut *message);
        }
    }
}

/// Sees to it that the message has room, or is not told.
///
/// # Safety
/// In a backend with a client, where PostgreSQL is about to write to it.
unsafe fn tell(message: &mut pg_sys::ErrorData) {
    // SAFETY: by the caller
    unsafe {
        if has_room() {
            return;
        }
        if message.elevel == ERROR {
            // whatever the transaction was at, it is going to be aborted
            sessions::failed();
            if wait_for_room() {
                return;
            }
            libc::shutdown(socket(), libc::SHUT_RDWR);
        }
        message.output_to_client = false;
    }
}

/// The client's socket: the first member of PostgreSQL's `Port`, in 15 to 18.
///
/// # Safety
/// In a backend with a client.
unsafe fn socket() -> c_int {
    // SAFETY: by the caller
    unsafe { *pg_sys::MyProcPort.cast::<c_int>() }
}

/// Whether the client's socket takes a message now: what was said before has left the buffer, and Linux says so of a
/// socket only where at least a third of its memory is free. A broken connection takes everything.
///
/// # Safety
/// As `tell`.
unsafe fn has_room() -> bool {
    // SAFETY: by the caller; `poll` gets one live entry
    unsafe {
        let methods = &*raw::PqCommMethods;
        if (methods.flush_if_writable)() != 0 {
            return true;
        }
        let mut answer = libc::pollfd {
            fd: socket(),
            events: libc::POLLOUT,
            revents: 0,
        };
        !(methods.is_send_pending)() && libc::poll(&raw mut answer, 1, 0) > 0
    }
}

/// Until the client's socket takes a message. False where this session is to end before it does.
///
/// # Safety
/// As `tell`.
unsafe fn wait_for_room() -> bool {
    // SAFETY: by the caller; the set and the latch are this process's own
    unsafe {
        let (set, latch) = (raw::FeBeWaitSet, pg_sys::MyLatch);
        let has_room = loop {
            if has_room() {
                break true;
            }
            // set by the signal's handler, before it sets the latch
            if (&raw const pg_sys::ProcDiePending).read_volatile() != 0 {
                break false;
            }
            let mut event = std::mem::zeroed::<pg_sys::WaitEvent>();
            raw::ModifyWaitEvent(
                set,
                SOCKET,
                pg_sys::WL_SOCKET_WRITEABLE,
                std::ptr::null_mut(),
            );
            raw::WaitEventSetWait(set, -1, &raw mut event, 1, CLIENT_WRITE);
            if event.events & pg_sys::WL_POSTMASTER_DEATH != 0 {
                // PostgreSQL sees to that where it writes
                break true;
            }
            if event.events & pg_sys::WL_LATCH_SET != 0 {
                raw::ResetLatch(latch);
                compiler_fence(Ordering::SeqCst);
            }
        };
        // it was set for others too
        raw::SetLatch(latch);
        has_room
    }
}

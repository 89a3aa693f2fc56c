//! The callbacks that PostgreSQL makes at the ends of transactions, and the worker's main function.
//!
//! Registered once while preloading; every backend inherits them. The order at a commit: PRE_COMMIT
//! (may refuse), commit record, other backends see the transaction, COMMIT, heavyweight locks go,
//! AFTER_LOCKS. At an abort: ABORT, locks go, AFTER_LOCKS. Nothing but PRE_ events may fail.

use std::ffi::c_void;

use pgrx::bgworkers::{
    BackgroundWorker, BackgroundWorkerBuilder, BgWorkerStartTime, SignalWakeFlags,
};
use pgrx::{pg_guard, pg_sys};

use super::fmgr::guard_and_raise;
use crate::xact;

/// Registers the callbacks. Only while preloading.
pub fn register() {
    // SAFETY: the callbacks are guarded and live as long as the process
    unsafe {
        pg_sys::RegisterXactCallback(Some(at_transaction), std::ptr::null_mut());
        pg_sys::RegisterSubXactCallback(Some(at_subtransaction), std::ptr::null_mut());
        pg_sys::RegisterResourceReleaseCallback(Some(at_release), std::ptr::null_mut());
    }
}

unsafe extern "C-unwind" fn at_transaction(event: pg_sys::XactEvent::Type, _arg: *mut c_void) {
    use pg_sys::XactEvent::*;
    if xact::is_idle() {
        return;
    }
    let body: fn() -> crate::errors::Answer<()> = match event {
        XACT_EVENT_PRE_COMMIT => xact::before_commit,
        XACT_EVENT_PRE_PREPARE => xact::before_prepare,
        XACT_EVENT_COMMIT => || {
            xact::committed();
            Ok(())
        },
        XACT_EVENT_ABORT => || {
            xact::aborted();
            Ok(())
        },
        XACT_EVENT_PREPARE => || {
            xact::prepared();
            Ok(())
        },
        _ => return,
    };
    // SAFETY: this frame holds plain data only
    unsafe { guard_and_raise(body) };
}

#[pg_guard]
unsafe extern "C-unwind" fn at_subtransaction(
    event: pg_sys::SubXactEvent::Type,
    my: pg_sys::SubTransactionId,
    parent: pg_sys::SubTransactionId,
    _arg: *mut c_void,
) {
    use pg_sys::SubXactEvent::*;
    if xact::is_idle() {
        return;
    }
    match event {
        SUBXACT_EVENT_ABORT_SUB => xact::subtransaction_aborted(my),
        SUBXACT_EVENT_COMMIT_SUB => xact::subtransaction_committed(my, parent),
        _ => {}
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn at_release(
    phase: pg_sys::ResourceReleasePhase::Type,
    _is_commit: bool,
    _is_top_level: bool,
    _arg: *mut c_void,
) {
    if phase == pg_sys::ResourceReleasePhase::RESOURCE_RELEASE_AFTER_LOCKS && !xact::is_idle() {
        xact::locks_are_gone();
    }
}

/// Starts the static worker with the server: it runs as soon as the server is writable.
pub fn register_worker() {
    BackgroundWorkerBuilder::new("leasehold")
        .set_type("leasehold")
        .set_library("leasehold")
        .set_function("leasehold_worker_main")
        .set_start_time(BgWorkerStartTime::RecoveryFinished)
        .set_restart_time(Some(std::time::Duration::from_secs(5)))
        .enable_shmem_access(None)
        .load();
}

/// The static worker. It notes the moment at which the server became writable, and then has nothing
/// to do: but it stays, because a worker that ends with success is forgotten by the postmaster and
/// would not run again after a crash.
#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn leasehold_worker_main(_arg: pg_sys::Datum) {
    BackgroundWorker::attach_signal_handlers(SignalWakeFlags::SIGHUP | SignalWakeFlags::SIGTERM);
    crate::worker::run();
    while BackgroundWorker::wait_latch(None) {}
    // SAFETY: ends the process; anything but 0 has the postmaster start the worker again
    unsafe { pg_sys::proc_exit(1) };
}

//! The callbacks that PostgreSQL makes at the ends of transactions, and the worker's main function.
//!
//! Registered once while preloading; every backend inherits them. The order at a commit: PRE_COMMIT
//! (may refuse), commit record, other backends see the transaction, COMMIT, heavyweight locks go,
//! AFTER_LOCKS. At an abort: ABORT, locks go, AFTER_LOCKS. Nothing but PRE_ events may fail.

use std::ffi::c_void;

use std::time::Duration;

use pgrx::bgworkers::{
    BackgroundWorker, BackgroundWorkerBuilder, BackgroundWorkerStatus, BgWorkerStartTime,
    DynamicBackgroundWorker, SignalWakeFlags,
};
use pgrx::{pg_guard, pg_sys};

use super::fmgr::guard_and_raise;
use super::{IntoPg, Oid};
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

/// Has `marks` called when the server is shut down. Only in the postmaster, from the startup hook.
pub fn register_shutdown() {
    // SAFETY: the callback is guarded and lives as long as the process
    unsafe { pg_sys::on_shmem_exit(Some(at_shutdown), pg_sys::Datum::from(0)) };
}

#[pg_guard]
unsafe extern "C-unwind" fn at_shutdown(code: std::ffi::c_int, _arg: pg_sys::Datum) {
    // after a crash nothing in shared memory is to be believed
    if code == 0 {
        crate::marks::at_shutdown();
    }
}

/// Registers the static worker: it runs as soon as the server is writable, and again after a crash.
pub fn register_worker() {
    BackgroundWorkerBuilder::new("leasehold")
        .set_type("leasehold")
        .set_library("leasehold")
        .set_function("leasehold_worker_main")
        .set_start_time(BgWorkerStartTime::RecoveryFinished)
        .set_restart_time(Some(Duration::from_secs(5)))
        .enable_shmem_access(None)
        .load();
}

/// A worker of one database, as the static worker sees it.
pub struct Marker(DynamicBackgroundWorker);

impl Marker {
    /// Starts a worker for a database. None when no worker slot is free.
    pub fn start(database: Oid) -> Option<Marker> {
        BackgroundWorkerBuilder::new("leasehold marker")
            .set_type("leasehold marker")
            .set_library("leasehold")
            .set_function("leasehold_marker_main")
            .set_argument(Some(pg_sys::Datum::from(database)))
            .set_notify_pid(super::pid())
            .set_restart_time(None)
            .enable_spi_access()
            .load_dynamic()
            .ok()
            .map(Marker)
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        !matches!(
            self.0.pid(),
            Ok(_) | Err(BackgroundWorkerStatus::NotYetStarted)
        )
    }
}

/// Waits until this worker is woken, at most that long. False when it is to end.
pub fn wait(timeout: Option<Duration>) -> bool {
    let go_on = BackgroundWorker::wait_latch(timeout);
    if BackgroundWorker::sighup_received() {
        // SAFETY: outside a transaction, as in every worker's main loop
        unsafe { pg_sys::ProcessConfigFile(pg_sys::GucContext::PGC_SIGHUP) };
    }
    go_on
}

/// Runs `body` in a transaction of its own. An error ends the worker.
pub fn transaction<R>(body: impl FnOnce() -> R) -> R {
    BackgroundWorker::transaction(std::panic::AssertUnwindSafe(body))
}

/// The static worker. It ends with a code other than 0, because the postmaster forgets a worker that
/// ends with success.
#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn leasehold_worker_main(_arg: pg_sys::Datum) {
    BackgroundWorker::attach_signal_handlers(SignalWakeFlags::SIGHUP | SignalWakeFlags::SIGTERM);
    // SAFETY: this process's latch, in its slot of shared memory
    crate::table::set_worker(unsafe { pg_sys::MyLatch });
    crate::worker::run();
    crate::table::set_worker(std::ptr::null_mut());
    // SAFETY: ends the process
    unsafe { pg_sys::proc_exit(1) };
}

/// The worker of one database; its argument is the database.
#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn leasehold_marker_main(arg: pg_sys::Datum) {
    BackgroundWorker::attach_signal_handlers(SignalWakeFlags::SIGHUP | SignalWakeFlags::SIGTERM);
    let database = arg.value() as u32;
    // before the connection, which fails when the database is gone: nobody tries again then
    crate::marks::take_up(database);
    BackgroundWorker::connect_worker_to_spi_by_oid(Some(database.into_pg()), None);
    super::commit_asynchronously();
    crate::marks::run(database);
}

//! The callbacks that PostgreSQL makes at the ends of transactions, and the worker's main function.
//!
//! Registered once while preloading; every backend inherits them. The order at a commit: PRE_COMMIT
//! (may refuse), commit record, other backends see the transaction, COMMIT, heavyweight locks go,
//! AFTER_LOCKS. At an abort: ABORT, locks go, AFTER_LOCKS. Nothing but PRE_ events may fail.

use std::ffi::c_void;

use std::cell::RefCell;
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
    super::client::register();
    // SAFETY: the callbacks are guarded and live as long as the process
    unsafe {
        pg_sys::RegisterXactCallback(Some(at_transaction), std::ptr::null_mut());
        pg_sys::RegisterSubXactCallback(Some(at_subtransaction), std::ptr::null_mut());
        pg_sys::RegisterResourceReleaseCallback(Some(at_release), std::ptr::null_mut());
        NEXT_EXECUTOR_RUN = pg_sys::ExecutorRun_hook;
        pg_sys::ExecutorRun_hook = Some(executor_run);
        NEXT_OBJECT_ACCESS = pg_sys::object_access_hook;
        pg_sys::object_access_hook = Some(object_access);
    }
}

thread_local! {
    static WATCHES: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Has this backend told when a relation or a role changes: for what it remembers of them. Once, lazily,
/// because a backend forgets what the postmaster registered.
pub fn watch_catalogs() {
    if WATCHES.replace(true) {
        return;
    }
    // SAFETY: the callbacks live as long as the process; there is room for 64 and 10 of them
    unsafe {
        pg_sys::CacheRegisterRelcacheCallback(Some(relation_changed), pg_sys::Datum::from(0));
        pg_sys::CacheRegisterSyscacheCallback(
            pg_sys::SysCacheIdentifier::AUTHOID as i32,
            Some(role_changed),
            pg_sys::Datum::from(0),
        );
    }
}

unsafe extern "C-unwind" fn relation_changed(_arg: pg_sys::Datum, relation: pg_sys::Oid) {
    crate::ledger::relation_changed(relation.to_u32());
}

unsafe extern "C-unwind" fn role_changed(_arg: pg_sys::Datum, _cache: i32, _hash: u32) {
    crate::acquire::role_changed();
    crate::rights::rules_changed();
}

static mut NEXT_OBJECT_ACCESS: pg_sys::object_access_hook_type = None;

thread_local! {
    /// The relation that is about to be dropped.
    static GOING: std::cell::Cell<Oid> = const { std::cell::Cell::new(0) };
}

/// Sees relations go. No guard of pgrx's is around the next hook, as in `executor_run`.
unsafe extern "C-unwind" fn object_access(
    access: pg_sys::ObjectAccessType::Type,
    class: pg_sys::Oid,
    object: pg_sys::Oid,
    part: std::ffi::c_int,
    arg: *mut c_void,
) {
    let is_relation = class == pg_sys::RelationRelationId && part == 0;
    // SAFETY: these frames hold plain data only; the next hook gets what PostgreSQL passed
    unsafe {
        if access == pg_sys::ObjectAccessType::OAT_DROP && is_relation {
            GOING.set(object.to_u32());
            guard_and_raise(|| crate::tokens::relation_goes(GOING.get()));
        }
        if let Some(next) = NEXT_OBJECT_ACCESS {
            next(access, class, object, part, arg);
        }
    }
}

thread_local! {
    /// The queries that run, outermost first: whether each is a MERGE, and the nesting level of the
    /// subtransaction that it was started in. An error jumps over their ends; then those go that were
    /// started in what aborts.
    static RUNNING: RefCell<Vec<(bool, i32)>> = const { RefCell::new(Vec::new()) };
}

/// Whether the query that fires a row trigger now is a MERGE, or can't be told.
pub fn may_be_merge() -> bool {
    RUNNING.with_borrow(|running| running.last().is_none_or(|(is_merge, _)| *is_merge))
}

mod raw {
    unsafe extern "C-unwind" {
        pub fn GetCurrentTransactionNestLevel() -> std::ffi::c_int;
    }
}

fn nesting_level() -> i32 {
    // SAFETY: reads a variable of this backend; cannot raise
    unsafe { raw::GetCurrentTransactionNestLevel() }
}

static mut NEXT_EXECUTOR_RUN: pg_sys::ExecutorRun_hook_type = None;

/// Notes what runs. No guard of pgrx's may be between the executor and who catches its errors: it would
/// lose their SQLSTATEs. So errors jump over this frame, which holds plain data only.
#[cfg(not(feature = "pg18"))]
unsafe extern "C-unwind" fn executor_run(
    query: *mut pg_sys::QueryDesc,
    direction: pg_sys::ScanDirection::Type,
    count: u64,
    once: bool,
) {
    unsafe extern "C-unwind" {
        fn standard_ExecutorRun(
            query: *mut pg_sys::QueryDesc,
            direction: pg_sys::ScanDirection::Type,
            count: u64,
            once: bool,
        );
    }
    // SAFETY: PostgreSQL passes a live query; the other hook or the standard function gets it as it is
    unsafe {
        let place = query_starts(query);
        match NEXT_EXECUTOR_RUN {
            Some(next) => next(query, direction, count, once),
            None => standard_ExecutorRun(query, direction, count, once),
        }
        query_ends(place);
    }
}

/// As above; PostgreSQL 18 has one argument less.
#[cfg(feature = "pg18")]
unsafe extern "C-unwind" fn executor_run(
    query: *mut pg_sys::QueryDesc,
    direction: pg_sys::ScanDirection::Type,
    count: u64,
) {
    unsafe extern "C-unwind" {
        fn standard_ExecutorRun(
            query: *mut pg_sys::QueryDesc,
            direction: pg_sys::ScanDirection::Type,
            count: u64,
        );
    }
    // SAFETY: as above
    unsafe {
        let place = query_starts(query);
        match NEXT_EXECUTOR_RUN {
            Some(next) => next(query, direction, count),
            None => standard_ExecutorRun(query, direction, count),
        }
        query_ends(place);
    }
}

/// Notes a query that starts; its place among those that run.
///
/// # Safety
/// `query` is a live query.
unsafe fn query_starts(query: *mut pg_sys::QueryDesc) -> usize {
    // SAFETY: by the caller
    let is_merge = unsafe { (*query).operation } == pg_sys::CmdType::CMD_MERGE;
    let level = nesting_level();
    RUNNING.with_borrow_mut(|running| {
        running.push((is_merge, level));
        running.len() - 1
    })
}

fn query_ends(place: usize) {
    RUNNING.with_borrow_mut(|running| running.truncate(place));
}

/// What was started at this nesting level or a deeper one has been jumped out of.
fn queries_aborted(level: i32) {
    RUNNING.with_borrow_mut(|running| running.retain(|(_, started)| *started < level));
}

unsafe extern "C-unwind" fn at_transaction(event: pg_sys::XactEvent::Type, _arg: *mut c_void) {
    use pg_sys::XactEvent::*;
    if event == XACT_EVENT_ABORT {
        queries_aborted(0);
    }
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
        // a parallel worker is refused everything, but may have been at it when it was
        XACT_EVENT_ABORT | XACT_EVENT_PARALLEL_ABORT | XACT_EVENT_PARALLEL_COMMIT => || {
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
    if event == SUBXACT_EVENT_ABORT_SUB {
        queries_aborted(nesting_level());
    }
    if xact::is_idle() {
        return;
    }
    match event {
        SUBXACT_EVENT_ABORT_SUB => xact::subtransaction_aborted(my),
        SUBXACT_EVENT_COMMIT_SUB => xact::subtransaction_committed(my, parent),
        _ => {}
    }
}

/// Called for every resource owner and phase, those of queries that have ended included: no guard where there is
/// nothing to do.
unsafe extern "C-unwind" fn at_release(
    phase: pg_sys::ResourceReleasePhase::Type,
    is_commit: bool,
    is_top_level: bool,
    _arg: *mut c_void,
) {
    let lets_locks_go = is_top_level || !is_commit;
    if phase == pg_sys::ResourceReleasePhase::RESOURCE_RELEASE_AFTER_LOCKS
        && lets_locks_go
        && !xact::is_idle()
    {
        // SAFETY: this frame holds plain data only
        unsafe {
            guard_and_raise(|| {
                xact::locks_are_gone();
                Ok(())
            });
        }
    }
}

/// Has `marks` called when the server is shut down. Only in the postmaster, from the startup hook.
pub fn register_shutdown() {
    // SAFETY: the callback is guarded and lives as long as the process
    unsafe { pg_sys::on_shmem_exit(Some(at_shutdown), pg_sys::Datum::from(0)) };
}

#[pg_guard]
unsafe extern "C-unwind" fn at_shutdown(code: std::ffi::c_int, _arg: pg_sys::Datum) {
    // after a crash or an immediate shutdown nothing in shared memory is to be believed
    if code == 0 && is_shut_down() {
        crate::marks::at_shutdown();
    }
}

/// Whether the last checkpoint was that of a clean shutdown, by the control file.
fn is_shut_down() -> bool {
    let mut is_valid = false;
    // SAFETY: reads the file into palloc'd memory and checks its sum
    unsafe {
        let control = pg_sys::get_controlfile(pg_sys::DataDir, &mut is_valid);
        is_valid && !control.is_null() && (*control).state == pg_sys::DBState::DB_SHUTDOWNED
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
pub struct DatabaseWorker(DynamicBackgroundWorker);

impl DatabaseWorker {
    /// Starts a worker for a database. None when no worker slot is free.
    pub fn start(database: Oid) -> Option<DatabaseWorker> {
        BackgroundWorkerBuilder::new("leasehold database")
            .set_type("leasehold database")
            .set_library("leasehold")
            .set_function("leasehold_database_main")
            .set_argument(Some(pg_sys::Datum::from(database)))
            .set_notify_pid(super::pid())
            .set_restart_time(None)
            .enable_spi_access()
            .load_dynamic()
            .ok()
            .map(DatabaseWorker)
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
pub extern "C-unwind" fn leasehold_database_main(arg: pg_sys::Datum) {
    BackgroundWorker::attach_signal_handlers(SignalWakeFlags::SIGHUP | SignalWakeFlags::SIGTERM);
    let database = arg.value() as u32;
    crate::worker::run_for(database, || {
        BackgroundWorker::connect_worker_to_spi_by_oid(Some(database.into_pg()), None);
        super::set_worker_defaults();
    });
}

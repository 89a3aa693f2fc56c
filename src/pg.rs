//! The only raw PostgreSQL calls of the crate, one documented wrapper each, and the only file set
//! (with the layout of the shared table) where `unsafe` is allowed.
//!
//! Everything in `pgrx::pg_sys` turns a PostgreSQL ERROR into a Rust panic, so that frames above are
//! unwound and their values dropped. The few functions that are declared here directly cannot raise.
//!
//! Version differences of PostgreSQL 15 to 18 stay in this module.

#![allow(unsafe_code)]
#![allow(ffi_unwind_calls)]

use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicBool, Ordering};

use pgrx::pg_sys;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::{PgLogLevel, PgSqlErrorCode};

pub mod client;
pub mod clock;
pub mod counters;
pub mod encoding;
pub mod fmgr;
pub mod guc;
pub mod heavy;
pub mod hooks;
pub mod lwlock;
pub mod procedure;
pub mod ring;
pub mod row;
pub mod sessions;
pub mod shmem;
pub mod spi;
pub mod srf;
pub mod trigger;
pub mod waiters;

mod raw {
    use pgrx::pg_sys::Oid;

    unsafe extern "C-unwind" {
        pub fn GetUserId() -> Oid;
        pub fn GetSessionUserId() -> Oid;
        pub fn RecoveryInProgress() -> bool;
        pub fn IsInParallelMode() -> bool;
        pub fn GetCurrentSubTransactionId() -> u32;
        pub fn GetCurrentTimestamp() -> i64;
        pub fn GetCurrentStatementStartTimestamp() -> i64;
    }
}

/// An object identifier.
pub type Oid = u32;

/// The role whose members may end sessions of others.
pub const ROLE_SIGNAL_BACKEND: Oid = pg_sys::ROLE_PG_SIGNAL_BACKEND;
/// The role whose members see all that is told of what the server does.
pub const ROLE_READ_ALL_STATS: Oid = pg_sys::ROLE_PG_READ_ALL_STATS;

/// OID of the database this backend is connected to.
pub fn database() -> Oid {
    // SAFETY: set once when the backend connects, read only afterwards
    unsafe { pg_sys::MyDatabaseId.to_u32() }
}

/// Process id of this backend.
pub fn pid() -> i32 {
    // SAFETY: set once when the process starts
    unsafe { pg_sys::MyProcPid }
}

/// The current role: changed by SET ROLE and inside SECURITY DEFINER functions.
pub fn current_user() -> Oid {
    // SAFETY: reads a variable; cannot raise (its one assertion holds in every backend that runs SQL)
    unsafe { raw::GetUserId().to_u32() }
}

/// The role that the session runs as: changed by SET SESSION AUTHORIZATION only.
pub fn session_user() -> Oid {
    // SAFETY: as `current_user`
    unsafe { raw::GetSessionUserId().to_u32() }
}

/// Whether `member` is `role` or a member of it, directly or not. A superuser is a member of all.
pub fn is_member(member: Oid, role: Oid) -> bool {
    // SAFETY: looks up the catalog caches; both arguments may be OIDs of roles that are gone
    unsafe { pg_sys::is_member_of_role(Oid::into_pg(member), Oid::into_pg(role)) }
}

/// Name of a role, or its OID in digits where it has been dropped.
pub fn role_name(role: Oid) -> String {
    // SAFETY: with `noerr` the result is a palloc'd string or null
    unsafe {
        let name = pg_sys::GetUserNameFromId(Oid::into_pg(role), true);
        if name.is_null() {
            role.to_string()
        } else {
            crate::errors::shown(CStr::from_ptr(name).to_bytes())
        }
    }
}

/// The session's application_name.
pub fn application_name() -> String {
    // SAFETY: the GUC's variable points to a C string for the life of the setting, or is null
    unsafe {
        let name = pg_sys::application_name;
        if name.is_null() {
            String::new()
        } else {
            crate::errors::shown(CStr::from_ptr(name).to_bytes())
        }
    }
}

/// Whether this server is a standby (or still recovering).
pub fn in_recovery() -> bool {
    // SAFETY: reads shared memory; cannot raise
    unsafe { raw::RecoveryInProgress() }
}

/// Whether the transaction is read-only.
pub fn read_only_transaction() -> bool {
    // SAFETY: a plain variable of this backend
    unsafe { pg_sys::XactReadOnly }
}

/// Whether the transaction keeps one snapshot (REPEATABLE READ or SERIALIZABLE).
pub fn snapshot_is_fixed() -> bool {
    // SAFETY: a plain variable of this backend
    unsafe { pg_sys::XactIsoLevel >= pg_sys::XACT_REPEATABLE_READ as i32 }
}

/// Whether this is a parallel worker, or a leader whose workers run.
pub fn is_parallel() -> bool {
    // SAFETY: reads variables of this backend
    unsafe { raw::IsInParallelMode() || pg_sys::ParallelWorkerNumber >= 0 }
}

/// When the statement that runs was received: another one in the same transaction has another time.
pub fn statement_time() -> i64 {
    // SAFETY: reads a variable of this backend
    unsafe { raw::GetCurrentStatementStartTimestamp() }
}

/// Whether statements came before this one in a pipeline, which end with it.
pub fn is_pipelined() -> bool {
    // SAFETY: a plain variable of this backend
    unsafe { pg_sys::MyXactFlags & pg_sys::XACT_FLAGS_PIPELINING as i32 != 0 }
}

/// Whether a transaction block is open, or the statement runs inside a function, a DO block or the
/// like: then more statements may follow under the same snapshot. The latter is told by the error
/// context stack, to which SPI and every procedural language add a frame. The main loop adds none, or
/// (extended protocol) one whose data begin with the name of the portal that runs.
pub fn more_may_follow() -> bool {
    // SAFETY: reads variables of this backend. A frame's argument may be anything, but what PostgreSQL
    // and its languages put there is null or palloc'd memory, of eight bytes at least; where it is
    // not aligned or small enough for a number it is not looked at
    unsafe {
        if pg_sys::IsTransactionBlock() || is_pipelined() {
            return true;
        }
        let frame = pg_sys::error_context_stack;
        if frame.is_null() {
            return false;
        }
        let (portal, argument) = (pg_sys::ActivePortal, (*frame).arg);
        let is_pointer = argument as usize > 0xFFFF
            && (argument as usize).is_multiple_of(align_of::<*const std::ffi::c_char>());
        if !(*frame).previous.is_null() || portal.is_null() || !is_pointer {
            return true;
        }
        *argument.cast::<*const std::ffi::c_char>() != (*portal).name
    }
}

/// The number of this transaction, assigning one where it has none. Never used twice in a cluster.
pub fn transaction_number() -> u64 {
    // SAFETY: allowed in a read-write transaction of a primary, which callers check
    unsafe { pg_sys::GetTopFullTransactionId().value }
}

/// The number of the running subtransaction, assigning one where it has none. As above.
pub fn subtransaction_number() -> u64 {
    // SAFETY: as above
    unsafe { pg_sys::GetCurrentFullTransactionId().value }
}

/// Whether the transaction of that number has committed; one of which nothing is kept any more has. False while
/// it runs.
pub fn has_committed(number: u64) -> bool {
    committed(number).unwrap_or(true)
}

/// The same, where one of which nothing is kept any more has not.
pub fn has_surely_committed(number: u64) -> bool {
    committed(number).unwrap_or(false)
}

/// None where nothing is kept of it any more.
fn committed(number: u64) -> Option<bool> {
    // SAFETY: looks up the commit log, which is kept for all numbers that are not older than the oldest
    unsafe {
        let next = pg_sys::ReadNextFullTransactionId().value;
        if number >= next {
            return Some(false);
        }
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        let shared = pg_sys::ShmemVariableCache;
        #[cfg(any(feature = "pg17", feature = "pg18"))]
        let shared = pg_sys::TransamVariables;
        let xid = pg_sys::TransactionId::from(number as u32);
        let is_old = next - number >= u64::from(u32::MAX / 2)
            || pg_sys::TransactionIdPrecedes(xid, (*shared).oldestXid);
        (!is_old).then(|| pg_sys::TransactionIdDidCommit(xid))
    }
}

/// Whether the transaction of that number is this one, or a subtransaction of it that has not been rolled back.
pub fn is_own_transaction(number: u64) -> bool {
    // SAFETY: reads shared memory, and looks at the transactions of this backend. The 32-bit numbers mean nothing
    // beyond half their range
    unsafe {
        let next = pg_sys::ReadNextFullTransactionId().value;
        next.saturating_sub(number) < u64::from(u32::MAX / 2)
            && pg_sys::TransactionIdIsCurrentTransactionId((number as u32).into())
    }
}

/// Whether a transaction's fixed snapshot was taken before the transaction of that number ended.
pub fn fixed_snapshot_predates(number: u64) -> bool {
    if !snapshot_is_fixed() {
        return false;
    }
    // SAFETY: with a fixed snapshot this returns it, or takes it now; the test reads it and the
    // subtransaction log. It compares 32-bit numbers, which mean nothing beyond half their range
    unsafe {
        let next = pg_sys::ReadNextFullTransactionId().value;
        next.saturating_sub(number) < u64::from(u32::MAX / 2)
            && pg_sys::XidInMVCCSnapshot((number as u32).into(), pg_sys::GetTransactionSnapshot())
    }
}

/// A number above those of all transactions that have ended.
pub fn ended_transactions() -> u64 {
    // SAFETY: a word of shared memory that only rises. What ended before this transaction got a lock that
    // it held has been counted
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        let shared = pg_sys::ShmemVariableCache;
        #[cfg(any(feature = "pg17", feature = "pg18"))]
        let shared = pg_sys::TransamVariables;
        let last = (&raw const (*shared).latestCompletedXid).read_volatile();
        last.value.saturating_add(1)
    }
}

/// Whether a transaction's fixed snapshot may miss one that had ended when `number` was above all of those:
/// it does not reach so far, or it has one of them running that runs no more.
pub fn fixed_snapshot_predates_all_below(number: u64) -> bool {
    if !snapshot_is_fixed() {
        return false;
    }
    // SAFETY: with a fixed snapshot this returns it, or takes it now; its array is as long as it says. The
    // 32-bit numbers mean nothing beyond half their range
    unsafe {
        let next = pg_sys::ReadNextFullTransactionId().value;
        if next.saturating_sub(number) >= u64::from(u32::MAX / 2) {
            return false;
        }
        let snapshot = pg_sys::GetTransactionSnapshot();
        let bound = pg_sys::TransactionId::from(number as u32);
        if pg_sys::TransactionIdPrecedes((*snapshot).xmax, bound) {
            return true;
        }
        let running = match (*snapshot).xcnt {
            0 => &[],
            count => std::slice::from_raw_parts((*snapshot).xip, count as usize),
        };
        running.iter().any(|xid| {
            pg_sys::TransactionIdPrecedes(*xid, bound) && !pg_sys::TransactionIdIsInProgress(*xid)
        })
    }
}

/// Whether the synchronous standby, where there must be one, has what this transaction has committed. For the
/// COMMIT callback. False after a wait that was cancelled.
pub fn commit_is_confirmed() -> bool {
    // SAFETY: a variable of this backend
    let level = unsafe { pg_sys::synchronous_commit } as u32;
    let mode = match level {
        pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_REMOTE_WRITE => 0,
        pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_REMOTE_APPLY => 2,
        _ => 1,
    };
    level <= pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_LOCAL_FLUSH
        || is_confirmed(own_commit(), mode)
}

/// Whether the synchronous standby, where there must be one, has the WAL up to there: written, flushed or
/// applied, by the mode.
fn is_confirmed(lsn: u64, mode: usize) -> bool {
    // SAFETY: words of shared memory that are read as PostgreSQL's own fast path reads them
    unsafe {
        let shared = pg_sys::WalSndCtl;
        if pg_sys::max_wal_senders == 0 || shared.is_null() {
            return true;
        }
        let confirmed = &raw const (*shared).lsn;
        // the status follows the positions. Since the minor releases of May 2025 it is a set of bits, of
        // which this one says that standbys are named; before, it was a boolean that says the same
        let defined = if HAS_STATUS_BITS.load(Ordering::Relaxed) {
            2
        } else {
            1
        };
        let status = confirmed.add(1).cast::<u8>().read_volatile();
        if status & defined == 0 {
            return true;
        }
        confirmed
            .cast::<pg_sys::XLogRecPtr>()
            .add(mode)
            .read_volatile()
            >= lsn
    }
}

thread_local! {
    /// The WAL up to here was found kept.
    static KEPT: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Whether the WAL up to there is on disk, and on the synchronous standby where there must be one.
pub fn wal_is_kept(lsn: u64) -> bool {
    if lsn <= KEPT.get() {
        return true;
    }
    // SAFETY: reads shared memory; not in recovery, which callers check
    let flushed = unsafe { pg_sys::GetFlushRecPtr(std::ptr::null_mut()) };
    let is_kept = lsn <= flushed && is_confirmed(lsn, 1);
    if is_kept {
        KEPT.set(lsn);
    }
    is_kept
}

/// The end of what this backend has written to WAL in this transaction.
pub fn own_wal() -> u64 {
    // SAFETY: a variable of this backend
    unsafe { pg_sys::XactLastRecEnd }
}

/// The end of this backend's last commit in the WAL.
pub fn own_commit() -> u64 {
    // SAFETY: a variable of this backend
    unsafe { pg_sys::XactLastCommitEnd }
}

/// The end of the WAL.
pub fn written_wal() -> u64 {
    // SAFETY: reads shared memory; not in recovery, which callers check
    unsafe { pg_sys::GetXLogInsertRecPtr() }
}

/// Whether the server that runs has the set of bits. The headers may have been those of an older minor release.
static HAS_STATUS_BITS: AtomicBool = AtomicBool::new(true);

/// Looks which minor release runs. Once, while preloading.
pub fn look_at_version() {
    // SAFETY: the setting is always there; its value is a C string
    let version = unsafe {
        let text = pg_sys::GetConfigOption(c"server_version_num".as_ptr(), true, false);
        if text.is_null() {
            return;
        }
        CStr::from_ptr(text)
            .to_str()
            .ok()
            .and_then(|text| text.parse::<u32>().ok())
    };
    let is_older = matches!(
        version,
        Some(150_000..150_013 | 160_000..160_009 | 170_000..170_005)
    );
    HAS_STATUS_BITS.store(!is_older, Ordering::Relaxed);
}

/// The running subtransaction; 1 is the transaction itself.
pub fn subtransaction() -> u32 {
    // SAFETY: reads a variable of this backend
    unsafe { raw::GetCurrentSubTransactionId() }
}

/// Wall-clock time for display, microseconds since 2000-01-01 UTC.
pub fn wall_clock() -> i64 {
    // SAFETY: gettimeofday
    unsafe { raw::GetCurrentTimestamp() }
}

/// The timeline that this server writes. Not in recovery.
pub fn timeline() -> u32 {
    // SAFETY: reads shared memory; its assertion is that recovery has ended, which callers check
    unsafe { pg_sys::GetWALInsertionTimeLine() }
}

/// The cluster's system identifier, the same on a primary and its standbys.
pub fn system_identifier() -> i64 {
    // SAFETY: reads the control file's copy in shared memory
    unsafe { pg_sys::GetSystemIdentifier() as i64 }
}

/// Whether a database of this OID exists.
pub fn database_exists(database: Oid) -> bool {
    exists(pg_sys::SysCacheIdentifier::DATABASEOID as i32, database)
}

/// Whether a role of this OID exists.
pub fn role_exists(role: Oid) -> bool {
    exists(pg_sys::SysCacheIdentifier::AUTHOID as i32, role)
}

/// Takes note of what other backends have changed in the catalogs meanwhile: within one statement that is done only
/// when a lock is taken.
pub fn take_note_of_changes() {
    // SAFETY: in a transaction, with no lightweight lock held
    unsafe { pg_sys::AcceptInvalidationMessages() };
}

/// Has all backends told, with the commit, that what they remember of a relation is out of date.
pub fn invalidate(relation: Oid) {
    // SAFETY: the relation is there: the caller is going to write to it
    unsafe { pg_sys::CacheInvalidateRelcacheByRelid(relation.into_pg()) };
}

fn exists(cache: i32, oid: Oid) -> bool {
    // SAFETY: a catalog cache lookup by OID that copies nothing out
    unsafe {
        pg_sys::SearchSysCacheExists(
            cache,
            oid.into_pg().into(),
            pg_sys::Datum::from(0),
            pg_sys::Datum::from(0),
            pg_sys::Datum::from(0),
        )
    }
}

/// Waits until everything that this backend has written to WAL is on disk.
pub fn flush_own_wal() {
    // SAFETY: the variable is the end of the last record inserted by this backend
    unsafe { pg_sys::XLogFlush(pg_sys::XactLastRecEnd) }
}

/// A line in the server log, with its DETAIL.
pub fn log(message: &str, detail: &str) {
    ErrorReport::new(
        PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
        message.to_owned(),
        "leasehold",
    )
    .set_detail(detail.to_owned())
    .report(PgLogLevel::LOG);
}

/// Tells the client something that is no error.
pub fn notice(message: &str, detail: &str, hint: &str) {
    ErrorReport::new(
        PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
        message.to_owned(),
        "leasehold",
    )
    .set_detail(detail.to_owned())
    .set_hint(hint.to_owned())
    .report(PgLogLevel::NOTICE);
}

/// OID of a relation, if it exists.
pub fn relation(schema: &CStr, name: &CStr) -> Option<Oid> {
    // SAFETY: catalog cache lookups with C strings that live through the calls
    unsafe {
        let namespace = pg_sys::get_namespace_oid(schema.as_ptr(), true);
        if namespace == pg_sys::InvalidOid {
            return None;
        }
        let oid = pg_sys::get_relname_relid(name.as_ptr(), namespace);
        (oid != pg_sys::InvalidOid).then(|| oid.to_u32())
    }
}

/// Owner of a relation, or None when it has been dropped.
pub fn relation_owner(relation: Oid) -> Option<Oid> {
    // SAFETY: the tuple is a row of pg_class, and is let go after its owner was copied
    unsafe {
        let tuple = pg_sys::SearchSysCache1(
            pg_sys::SysCacheIdentifier::RELOID as i32,
            relation.into_pg().into(),
        );
        if tuple.is_null() {
            return None;
        }
        let class = pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_class>();
        let owner = (*class).relowner.to_u32();
        pg_sys::ReleaseSysCache(tuple);
        Some(owner)
    }
}

/// Makes a durable commit of the running transaction wait for its flush at least, whatever the
/// session set. Until the end of the (sub)transaction.
pub fn raise_synchronous_commit() {
    // SAFETY: a plain variable of this backend; the enum's values are ordered by what they wait for
    let now = unsafe { pg_sys::synchronous_commit } as u32;
    if now < pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_REMOTE_FLUSH {
        set_local(c"synchronous_commit", c"on");
    }
}

/// SET LOCAL. With the source of a user's SET, because a lower one would not overrule that.
fn set_local(name: &CStr, value: &CStr) {
    set(name, value, pg_sys::GucAction::GUC_ACTION_LOCAL);
}

/// Sets a GUC that any user may set.
fn set(name: &CStr, value: &CStr, action: pg_sys::GucAction::Type) {
    // SAFETY: both strings live through the call; what the action does is undone by PostgreSQL
    unsafe {
        pg_sys::set_config_option(
            name.as_ptr(),
            value.as_ptr(),
            pg_sys::GucContext::PGC_USERSET,
            pg_sys::GucSource::PGC_S_SESSION,
            action,
            true,
            0,
            false,
        );
    }
}

/// A search_path in which only PostgreSQL's own names are found, until the end of the scope, or until
/// the abort after an error.
pub struct SafePath(i32);

impl SafePath {
    /// From now on.
    pub fn set() -> SafePath {
        // SAFETY: a nesting level of settings, left by the drop
        let level = unsafe { pg_sys::NewGUCNestLevel() };
        set(
            c"search_path",
            c"pg_catalog, pg_temp",
            pg_sys::GucAction::GUC_ACTION_SAVE,
        );
        SafePath(level)
    }
}

impl Drop for SafePath {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: the level that was entered by `set`
            unsafe { pg_sys::AtEOXact_GUC(true, self.0) };
        }
    }
}

/// Settings of a worker, whatever the database's owner has made the default.
pub fn set_worker_defaults() {
    for (name, value) in [
        (c"synchronous_commit", c"off"),
        (c"default_transaction_read_only", c"off"),
        (c"default_transaction_isolation", c"read committed"),
        (c"search_path", c"pg_catalog, pg_temp"),
        (c"statement_timeout", c"0"),
        (c"lock_timeout", c"0"),
        (c"idle_in_transaction_session_timeout", c"0"),
    ] {
        set(name, value, pg_sys::GucAction::GUC_ACTION_SET);
    }
}

/// Whether this process is the postmaster (or stands alone).
pub fn is_postmaster() -> bool {
    // SAFETY: a plain variable of the process
    unsafe { !pg_sys::IsUnderPostmaster }
}

/// Whether application_name is this text.
pub fn application_name_is(text: &[u8]) -> bool {
    // SAFETY: as in `application_name`
    unsafe {
        let name = pg_sys::application_name;
        !name.is_null() && CStr::from_ptr(name).to_bytes() == text
    }
}

/// Hands the session's application_name over. Neither raises nor allocates.
pub fn with_application_name<R>(look: impl FnOnce(&[u8]) -> R) -> R {
    // SAFETY: as in `application_name`
    unsafe {
        let name = pg_sys::application_name;
        if name.is_null() {
            look(&[])
        } else {
            look(CStr::from_ptr(name).to_bytes())
        }
    }
}

/// When the server was started, by the wall clock.
pub fn server_start() -> i64 {
    // SAFETY: a plain variable that every process of the server inherits
    unsafe { pg_sys::PgStartTime }
}

/// The session's application_name as it is stored.
pub fn raw_application_name() -> Vec<u8> {
    // SAFETY: as in `application_name`
    unsafe {
        let name = pg_sys::application_name;
        if name.is_null() {
            Vec::new()
        } else {
            CStr::from_ptr(name).to_bytes().to_vec()
        }
    }
}

/// The text of `shared_preload_libraries`.
pub fn shared_preload_libraries() -> String {
    // SAFETY: the GUC's variable is a C string or null
    unsafe {
        let value = pg_sys::shared_preload_libraries_string;
        if value.is_null() {
            String::new()
        } else {
            crate::errors::shown(CStr::from_ptr(value).to_bytes())
        }
    }
}

/// Whether the postmaster is loading libraries.
pub fn is_preloading() -> bool {
    // SAFETY: a plain variable of the process
    unsafe { pg_sys::process_shared_preload_libraries_in_progress }
}

/// Whether pg_upgrade runs this server.
pub fn is_binary_upgrade() -> bool {
    // SAFETY: a plain variable of the process
    unsafe { pg_sys::IsBinaryUpgrade }
}

/// A C string of text without zero bytes; what follows one is cut.
pub fn c_string(text: impl Into<Vec<u8>>) -> CString {
    let mut bytes = text.into();
    bytes.retain(|b| *b != 0);
    CString::new(bytes).unwrap_or_default()
}

/// Conversion to PostgreSQL's own type.
pub trait IntoPg {
    /// The same number as an OID.
    fn into_pg(self) -> pg_sys::Oid;
}

impl IntoPg for Oid {
    fn into_pg(self) -> pg_sys::Oid {
        pg_sys::Oid::from(self)
    }
}

/// An identifier for SQL, quoted where needed.
pub fn quote_identifier(name: &[u8]) -> Vec<u8> {
    let name = c_string(name);
    // SAFETY: the result is the argument or a palloc'd string
    unsafe {
        CStr::from_ptr(pg_sys::quote_identifier(name.as_ptr()))
            .to_bytes()
            .to_vec()
    }
}

/// A string for SQL, quoted.
pub fn quote_literal(bytes: &[u8]) -> Vec<u8> {
    let text = c_string(bytes);
    // SAFETY: the result is a palloc'd string
    unsafe {
        let quoted = pg_sys::quote_literal_cstr(text.as_ptr());
        CStr::from_ptr(quoted).to_bytes().to_vec()
    }
}

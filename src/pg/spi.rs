//! SQL from inside: kept plans, run as the owner of the ledger under a snapshot of this moment.
//!
//! - The owner, because callers have no rights on the ledger, as foreign-key checks run as the owner
//!   of the table. The switch ends with the call, also by an error.
//! - A snapshot of this moment, because the caller's may be older than what is looked for.
//! - Never SQL that a user wrote, except the names in `ddl`, which are quoted.
//!
//! Statements name schemas and operators in full, and run under a search_path of PostgreSQL's own names:
//! the caller's decides nothing.

use std::cell::Cell;
use std::ffi::CStr;

use pgrx::pg_sys;

use super::{IntoPg, Oid, SafePath, fmgr};

/// A value passed to a statement.
#[derive(Clone, Copy)]
pub enum Arg<'a> {
    /// text
    Text(&'a [u8]),
    /// bigint
    I64(i64),
    /// smallint
    I16(i16),
    /// boolean
    Bool(bool),
    /// oid
    Oid(Oid),
    /// timestamptz, microseconds since 2000
    Timestamp(i64),
    /// uuid
    Uuid([u8; 16]),
}

impl Arg<'_> {
    fn type_oid(self) -> pg_sys::Oid {
        match self {
            Arg::Text(_) => pg_sys::TEXTOID,
            Arg::I64(_) => pg_sys::INT8OID,
            Arg::I16(_) => pg_sys::INT2OID,
            Arg::Bool(_) => pg_sys::BOOLOID,
            Arg::Oid(_) => pg_sys::OIDOID,
            Arg::Timestamp(_) => pg_sys::TIMESTAMPTZOID,
            Arg::Uuid(_) => pg_sys::UUIDOID,
        }
    }

    /// The value, by the current memory context where it needs memory.
    pub(super) fn datum(self) -> pg_sys::Datum {
        match self {
            Arg::Text(bytes) => fmgr::text_datum(bytes),
            Arg::I64(value) | Arg::Timestamp(value) => value.into(),
            Arg::I16(value) => value.into(),
            Arg::Bool(value) => value.into(),
            Arg::Oid(value) => value.into_pg().into(),
            // SAFETY: palloc'd memory of the type's size
            Arg::Uuid(bytes) => unsafe {
                let copy = pg_sys::palloc(bytes.len()).cast::<[u8; 16]>();
                copy.write(bytes);
                copy.into()
            },
        }
    }
}

/// A statement whose plan is kept by the backend.
pub struct Statement {
    sql: &'static CStr,
    plan: Cell<pg_sys::SPIPlanPtr>,
}

// SAFETY: a backend runs SQL in one thread; pgrx checks that at every call into PostgreSQL
unsafe impl Sync for Statement {}

impl Statement {
    /// A statement that is prepared at first use.
    pub const fn new(sql: &'static CStr) -> Statement {
        Statement {
            sql,
            plan: Cell::new(std::ptr::null_mut()),
        }
    }

    /// Reads rows. Works on a standby and in a read-only transaction.
    pub fn read<R>(&'static self, owner: Oid, args: &[Arg], each: impl FnMut(&Row) -> R) -> Vec<R> {
        let _path = SafePath::set();
        let _session = Session::open();
        let _owner = ActingAs::role(owner);
        self.execute(args, true);
        rows(each)
    }

    /// Changes rows, in the running transaction: how many.
    pub fn write(&'static self, owner: Oid, args: &[Arg]) -> u64 {
        let _path = SafePath::set();
        let _session = Session::open();
        let _owner = ActingAs::role(owner);
        self.execute(args, false);
        // SAFETY: set by the statement
        unsafe { pg_sys::SPI_processed }
    }

    fn execute(&'static self, args: &[Arg], read_only: bool) {
        let plan = self.prepared(args);
        let mut values: Vec<pg_sys::Datum> = args.iter().map(|arg| arg.datum()).collect();
        // SAFETY: the plan was prepared for these argument types; none is NULL; the snapshot is
        // copied by SPI; a fresh one is passed where SPI would take the transaction's
        let code = unsafe {
            let snapshot = if read_only || super::snapshot_is_fixed() {
                pg_sys::GetLatestSnapshot()
            } else {
                std::ptr::null_mut()
            };
            pg_sys::SPI_execute_snapshot(
                plan,
                values.as_mut_ptr(),
                std::ptr::null(),
                snapshot,
                std::ptr::null_mut(),
                read_only,
                true,
                0,
            )
        };
        assert!(code >= 0, "SPI_execute_snapshot: error {code}");
    }

    fn prepared(&'static self, args: &[Arg]) -> pg_sys::SPIPlanPtr {
        if self.plan.get().is_null() {
            let mut types: Vec<pg_sys::Oid> = args.iter().map(|arg| arg.type_oid()).collect();
            // SAFETY: the text and the types live through the call; a kept plan lives as long as
            // the backend and is planned again by PostgreSQL when what it uses has changed
            unsafe {
                let plan =
                    pg_sys::SPI_prepare(self.sql.as_ptr(), types.len() as i32, types.as_mut_ptr());
                assert!(!plan.is_null(), "SPI_prepare failed");
                assert!(pg_sys::SPI_keepplan(plan) == 0, "SPI_keepplan failed");
                self.plan.set(plan);
            }
        }
        self.plan.get()
    }
}

/// Runs a DDL statement as the caller.
pub fn ddl(sql: &CStr) {
    let _session = Session::open();
    // SAFETY: the text lives through the call
    let code = unsafe { pg_sys::SPI_execute(sql.as_ptr(), false, 0) };
    assert!(code >= 0, "SPI_execute: error {code}");
}

/// Reads rows as the caller, with a plan that is not kept; sees what this statement has done before.
pub fn query<R>(sql: &CStr, args: &[Arg], each: impl FnMut(&Row) -> R) -> Vec<R> {
    let _session = Session::open();
    let mut types: Vec<pg_sys::Oid> = args.iter().map(|arg| arg.type_oid()).collect();
    let mut values: Vec<pg_sys::Datum> = args.iter().map(|arg| arg.datum()).collect();
    // SAFETY: as many types as values, none NULL
    let code = unsafe {
        pg_sys::SPI_execute_with_args(
            sql.as_ptr(),
            types.len() as i32,
            types.as_mut_ptr(),
            values.as_mut_ptr(),
            std::ptr::null(),
            false,
            0,
        )
    };
    assert!(code >= 0, "SPI_execute_with_args: error {code}");
    rows(each)
}

fn rows<R>(mut each: impl FnMut(&Row) -> R) -> Vec<R> {
    // SAFETY: after a successful statement these describe its rows until SPI_finish
    unsafe {
        let table = pg_sys::SPI_tuptable;
        if table.is_null() {
            return Vec::new();
        }
        let count = usize::try_from(pg_sys::SPI_processed).unwrap_or(0);
        (0..count)
            .map(|i| {
                each(&Row {
                    tuple: *(*table).vals.add(i),
                    descriptor: (*table).tupdesc,
                })
            })
            .collect()
    }
}

/// A row of a result. Columns count from 1.
pub struct Row {
    tuple: pg_sys::HeapTuple,
    descriptor: pg_sys::TupleDesc,
}

impl Row {
    fn datum(&self, column: i32) -> Option<pg_sys::Datum> {
        let mut is_null = false;
        // SAFETY: tuple and descriptor belong together and live until SPI_finish
        let datum =
            unsafe { pg_sys::SPI_getbinval(self.tuple, self.descriptor, column, &mut is_null) };
        (!is_null).then_some(datum)
    }

    /// A bigint or timestamptz column.
    pub fn i64(&self, column: i32) -> Option<i64> {
        self.datum(column).map(|datum| datum.value() as i64)
    }

    /// A smallint column.
    pub fn i16(&self, column: i32) -> Option<i16> {
        self.datum(column).map(|datum| datum.value() as i16)
    }

    /// An oid column.
    pub fn oid(&self, column: i32) -> Option<Oid> {
        self.datum(column).map(|datum| datum.value() as u32)
    }

    /// A boolean column.
    pub fn bool(&self, column: i32) -> Option<bool> {
        self.datum(column).map(|datum| datum.value() & 0xff != 0)
    }

    /// A text column's bytes.
    pub fn bytes(&self, column: i32) -> Option<Vec<u8>> {
        // SAFETY: callers ask for columns that are text
        self.datum(column)
            .map(|datum| unsafe { fmgr::varlena_bytes(datum) }.to_vec())
    }
}

/// An SPI connection; closed at the end of the scope, or by the abort after an error.
struct Session;

impl Session {
    fn open() -> Session {
        // SAFETY: paired with the drop
        let code = unsafe { pg_sys::SPI_connect() };
        assert!(code >= 0, "SPI_connect: error {code}");
        Session
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: the connection was opened by this value
            unsafe { pg_sys::SPI_finish() };
        }
    }
}

/// Runs as another role until the end of the scope, or until the abort after an error.
struct ActingAs {
    role: pg_sys::Oid,
    context: i32,
}

impl ActingAs {
    fn role(role: Oid) -> ActingAs {
        let mut saved = ActingAs {
            role: pg_sys::InvalidOid,
            context: 0,
        };
        // SAFETY: reads and sets variables of this backend; what foreign-key checks do
        unsafe {
            pg_sys::GetUserIdAndSecContext(&mut saved.role, &mut saved.context);
            pg_sys::SetUserIdAndSecContext(
                role.into_pg(),
                saved.context
                    | pg_sys::SECURITY_LOCAL_USERID_CHANGE as i32
                    | pg_sys::SECURITY_RESTRICTED_OPERATION as i32
                    | pg_sys::SECURITY_NOFORCE_RLS as i32,
            );
        }
        saved
    }
}

impl Drop for ActingAs {
    fn drop(&mut self) {
        // SAFETY: restores what was read by the constructor
        unsafe { pg_sys::SetUserIdAndSecContext(self.role, self.context) };
    }
}

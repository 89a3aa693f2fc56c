//! Functions that SQL calls: arguments in, values out, refusals raised.
//!
//! Each is a hand-written version-1 function, because a SQLSTATE of our own cannot pass pgrx's error
//! type: the guarded body returns a plain value, everything Rust is dropped, and only then, in a
//! frame with nothing left to drop, is the refusal raised with PostgreSQL's own functions.

use std::ffi::{c_char, c_int};
use std::rc::Rc;

use pgrx::pg_sys;

use super::{Oid, c_string, encoding};
use crate::errors::{Answer, Refusal};

/// What a function returns.
#[derive(Clone, Copy)]
pub enum Value {
    /// SQL NULL.
    Null,
    /// Nothing (`void`), or the rows went to a tuplestore.
    Void,
    /// boolean
    Bool(bool),
    /// bigint
    I64(i64),
    /// A pointer that PostgreSQL gave us or made for us: a tuple, a text.
    Pointer(pg_sys::Datum),
}

/// The call of a function, alive while it runs.
#[derive(Clone, Copy)]
pub struct Call {
    fcinfo: pg_sys::FunctionCallInfo,
}

/// A Rust function behind a SQL function.
pub type Body = fn(&Call) -> Answer<Value>;

impl Call {
    /// The raw call, for the other wrappers.
    pub(super) fn raw(&self) -> pg_sys::FunctionCallInfo {
        self.fcinfo
    }

    fn argument(&self, index: usize) -> Option<pg_sys::Datum> {
        // SAFETY: the struct is alive during the call, and has as many arguments as it says
        unsafe {
            let count = usize::try_from((*self.fcinfo).nargs).unwrap_or(0);
            let argument = (*self.fcinfo).args.as_slice(count).get(index)?;
            (!argument.isnull).then_some(argument.value)
        }
    }

    /// A text, varchar or name-like argument's bytes.
    pub fn bytes(&self, index: usize) -> Option<Vec<u8>> {
        // SAFETY: the SQL declaration says that this argument is a varlena
        self.argument(index)
            .map(|datum| unsafe { varlena_bytes(datum) }.to_vec())
    }

    /// The same, shared.
    pub fn shared_bytes(&self, index: usize) -> Option<Rc<[u8]>> {
        // SAFETY: as above
        self.argument(index)
            .map(|datum| Rc::from(unsafe { varlena_bytes(datum) }))
    }

    /// A bigint argument.
    pub fn i64(&self, index: usize) -> Option<i64> {
        self.argument(index).map(|datum| datum.value() as i64)
    }

    /// A boolean argument.
    pub fn bool(&self, index: usize) -> Option<bool> {
        self.argument(index).map(|datum| datum.value() & 0xff != 0)
    }

    /// An oid or regclass argument.
    pub fn oid(&self, index: usize) -> Option<Oid> {
        self.argument(index).map(|datum| datum.value() as u32)
    }

    /// A name argument's bytes.
    pub fn name(&self, index: usize) -> Option<Vec<u8>> {
        self.argument(index).map(|datum| {
            // SAFETY: the SQL declaration says that it is a name: a NUL-terminated fixed array
            unsafe { std::ffi::CStr::from_ptr(datum.cast_mut_ptr::<c_char>()) }
                .to_bytes()
                .to_vec()
        })
    }

    /// A uuid argument.
    pub fn uuid(&self, index: usize) -> Option<[u8; 16]> {
        // SAFETY: the SQL declaration says that it is a uuid: sixteen bytes
        self.argument(index)
            .map(|datum| unsafe { *datum.cast_mut_ptr::<[u8; 16]>() })
    }

    /// A jsonb argument, as text.
    pub fn json(&self, index: usize) -> Option<Vec<u8>> {
        /// `jsonb_out` in `pg_proc`, the same in PostgreSQL 15 to 18.
        const JSONB_OUT: Oid = 3804;
        self.argument(index).map(|datum| {
            // SAFETY: the SQL declaration says that it is jsonb; the result is a palloc'd C string
            unsafe {
                let text = pg_sys::OidOutputFunctionCall(pg_sys::Oid::from(JSONB_OUT), datum);
                std::ffi::CStr::from_ptr(text).to_bytes().to_vec()
            }
        })
    }

    /// An interval argument: months, days, microseconds.
    pub fn interval(&self, index: usize) -> Option<(i32, i32, i64)> {
        self.argument(index).map(|datum| {
            // SAFETY: the SQL declaration says that it is an interval
            let interval = unsafe { *datum.cast_mut_ptr::<pg_sys::Interval>() };
            (interval.month, interval.day, interval.time)
        })
    }
}

/// The bytes of a varlena datum, detoasted where needed. They live as long as the datum's memory or
/// the current memory context, whichever is shorter.
///
/// # Safety
/// The datum must be a varlena of a valid value.
pub(super) unsafe fn varlena_bytes<'a>(datum: pg_sys::Datum) -> &'a [u8] {
    // SAFETY: by the caller; the result is the datum itself or a palloc'd copy
    unsafe {
        let packed: *mut pg_sys::varlena = datum.cast_mut_ptr();
        // most are neither compressed nor stored elsewhere
        if pgrx::varlena::varatt_is_4b_c(packed) || pgrx::varlena::varatt_is_1b_e(packed) {
            pgrx::varlena_to_byte_slice(pg_sys::pg_detoast_datum_packed(packed))
        } else {
            pgrx::varlena_to_byte_slice(packed)
        }
    }
}

/// What comes out of the guarded body: plain data.
#[derive(Clone, Copy)]
enum Outcome {
    Value(Value),
    Refused(RawRefusal),
}

#[derive(Clone, Copy)]
struct RawRefusal {
    level: c_int,
    sqlstate: c_int,
    message: *const c_char,
    detail: *const c_char,
    hint: *const c_char,
}

/// PostgreSQL's levels ERROR and FATAL, the same in PostgreSQL 15 to 18.
const ERROR: c_int = 21;
const FATAL: c_int = 22;

unsafe extern "C-unwind" {
    fn errstart(elevel: c_int, domain: *const c_char) -> bool;
    fn errcode(sqlerrcode: c_int) -> c_int;
    fn errmsg(fmt: *const c_char, ...) -> c_int;
    fn errdetail(fmt: *const c_char, ...) -> c_int;
    fn errhint(fmt: *const c_char, ...) -> c_int;
    fn errfinish(filename: *const c_char, lineno: c_int, funcname: *const c_char);
}

/// Runs a body for a call from SQL and raises what it refuses.
///
/// # Safety
/// Only as the whole of a function that PostgreSQL calls through the function manager.
pub unsafe fn run(fcinfo: pg_sys::FunctionCallInfo, body: Body) -> pg_sys::Datum {
    // SAFETY: this frame and its caller hold nothing that needs dropping
    let outcome = unsafe {
        pg_sys::submodules::panic::pgrx_extern_c_guard(|| match body(&Call { fcinfo }) {
            Ok(value) => Outcome::Value(value),
            Err(refusal) => {
                crate::stats::refused(refusal.sqlstate);
                if let Some(write) = &refusal.about {
                    write.record(refusal.sqlstate);
                }
                Outcome::Refused(RawRefusal::of(&refusal))
            }
        })
    };
    let value = match outcome {
        Outcome::Value(value) => value,
        // SAFETY: nothing is left to drop in this frame
        Outcome::Refused(refusal) => unsafe { refusal.raise() },
    };
    // SAFETY: the call struct is alive
    unsafe { (*fcinfo).isnull = matches!(value, Value::Null) };
    match value {
        Value::Null | Value::Void => pg_sys::Datum::from(0),
        Value::Bool(value) => pg_sys::Datum::from(value),
        Value::I64(value) => pg_sys::Datum::from(value),
        Value::Pointer(datum) => datum,
    }
}

/// Raises a refusal from a callback that PostgreSQL calls, where an error is allowed.
///
/// # Safety
/// No frame between here and PostgreSQL may hold anything that needs dropping; only plain data may
/// have been created since.
pub unsafe fn guard_and_raise(body: fn() -> Answer<()>) {
    // SAFETY: by the caller
    let refused = unsafe {
        pg_sys::submodules::panic::pgrx_extern_c_guard(|| body().err().map(|r| RawRefusal::of(&r)))
    };
    if let Some(refusal) = refused {
        // SAFETY: nothing is left to drop in this frame
        unsafe { refusal.raise() }
    }
}

impl RawRefusal {
    fn of(refusal: &Refusal) -> RawRefusal {
        RawRefusal {
            level: if refusal.is_fatal { FATAL } else { ERROR },
            sqlstate: encode_sqlstate(refusal.sqlstate),
            message: palloc_text(Some(&refusal.message)),
            detail: palloc_text(refusal.detail.as_deref()),
            hint: palloc_text(refusal.hint.as_deref()),
        }
    }

    /// # Safety
    /// No frame up to PostgreSQL may have anything left to drop: `errfinish` jumps.
    unsafe fn raise(self) -> ! {
        let plain = c"%s".as_ptr();
        // SAFETY: the strings are palloc'd, NUL-terminated, and passed as data, not as a format
        unsafe {
            errstart(self.level, std::ptr::null());
            errcode(self.sqlstate);
            errmsg(plain, self.message);
            if !self.detail.is_null() {
                errdetail(plain, self.detail);
            }
            if !self.hint.is_null() {
                errhint(plain, self.hint);
            }
            errfinish(c"leasehold".as_ptr(), 0, c"leasehold".as_ptr());
        }
        unreachable!("an ERROR does not return, a FATAL even less")
    }
}

/// A copy in the current memory context, or null.
fn palloc_text(text: Option<&str>) -> *const c_char {
    match text {
        None => std::ptr::null(),
        Some(text) => {
            let text = c_string(encoding::to_server(text));
            // SAFETY: copies a NUL-terminated string
            unsafe { pg_sys::pstrdup(text.as_ptr()) }
        }
    }
}

/// PostgreSQL's packing of five characters, six bits each (MAKE_SQLSTATE in `elog.h`).
fn encode_sqlstate(sqlstate: &str) -> c_int {
    sqlstate
        .bytes()
        .take(5)
        .enumerate()
        .fold(0, |packed, (i, c)| {
            packed | ((c_int::from(c) - c_int::from(b'0')) & 0x3f) << (6 * i)
        })
}

/// A text datum with these bytes.
pub fn text_datum(bytes: &[u8]) -> pg_sys::Datum {
    let length = c_int::try_from(bytes.len()).unwrap_or(c_int::MAX);
    // SAFETY: copies `length` bytes that are there into a palloc'd varlena
    unsafe { pg_sys::cstring_to_text_with_len(bytes.as_ptr().cast(), length) }.into()
}

/// Declares a SQL function of the version-1 calling convention.
#[macro_export]
macro_rules! sql_function {
    ($name:ident, $finfo:ident, $body:path) => {
        #[doc(hidden)]
        #[allow(unsafe_code)]
        #[unsafe(no_mangle)]
        pub extern "C-unwind" fn $finfo() -> *const pgrx::pg_sys::Pg_finfo_record {
            static V1: pgrx::pg_sys::Pg_finfo_record =
                pgrx::pg_sys::Pg_finfo_record { api_version: 1 };
            &raw const V1
        }

        #[doc(hidden)]
        #[allow(unsafe_code)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            fcinfo: pgrx::pg_sys::FunctionCallInfo,
        ) -> pgrx::pg_sys::Datum {
            // SAFETY: the function manager calls us with a live call struct
            unsafe { $crate::pg::fmgr::run(fcinfo, $body) }
        }
    };
}

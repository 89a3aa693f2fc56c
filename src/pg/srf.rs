//! Functions that return rows: everything goes to a tuplestore in one call.

use pgrx::pg_sys;

use super::fmgr::{Call, text_datum};
use super::{IntoPg, Oid};

/// A value of a result row.
pub enum Field<'a> {
    /// NULL
    Null,
    /// text
    Text(&'a [u8]),
    /// bigint
    I64(i64),
    /// integer
    I32(i32),
    /// double precision
    F64(f64),
    /// boolean
    Bool(bool),
    /// oid or one of the reg types
    Oid(Oid),
    /// timestamptz, microseconds since 2000
    Timestamp(i64),
    /// interval, microseconds
    Interval(i64),
    /// jsonb, as a text that is valid
    Json(&'a [u8]),
}

impl<'a> Field<'a> {
    /// NULL for 0, which stands for nothing.
    pub fn unless_zero<T: Copy + Default + PartialEq>(
        value: T,
        field: fn(T) -> Field<'a>,
    ) -> Field<'a> {
        if value == T::default() {
            Field::Null
        } else {
            field(value)
        }
    }

    /// NULL for no bytes, which stand for nothing.
    pub fn unless_empty(text: &'a [u8]) -> Field<'a> {
        if text.is_empty() {
            Field::Null
        } else {
            Field::Text(text)
        }
    }
}

/// The result of a function declared RETURNS TABLE.
pub struct Rows {
    store: *mut pg_sys::Tuplestorestate,
    descriptor: pg_sys::TupleDesc,
}

impl Rows {
    /// Sets the result up. Errors as PostgreSQL does where the caller cannot take a set.
    pub fn start(call: &Call) -> Rows {
        // SAFETY: the call is alive; the function fills `resultinfo`, checked by itself
        unsafe {
            pg_sys::InitMaterializedSRF(call.raw(), 0);
            let info = (*call.raw()).resultinfo.cast::<pg_sys::ReturnSetInfo>();
            Rows {
                store: (*info).setResult,
                descriptor: (*info).setDesc,
            }
        }
    }

    /// Adds a row, of as many fields as the declaration has columns.
    pub fn push(&mut self, fields: &[Field]) {
        // SAFETY: the descriptor was made by `start`
        let columns = unsafe { (*self.descriptor).natts } as usize;
        assert!(fields.len() == columns, "a row of the declared width");
        let mut nulls: Vec<bool> = fields
            .iter()
            .map(|field| matches!(field, Field::Null))
            .collect();
        let mut values: Vec<pg_sys::Datum> = fields.iter().map(datum).collect();
        // SAFETY: as many values as the descriptor has columns, of its types by the declaration
        unsafe {
            pg_sys::tuplestore_putvalues(
                self.store,
                self.descriptor,
                values.as_mut_ptr(),
                nulls.as_mut_ptr(),
            );
        }
    }
}

fn datum(field: &Field) -> pg_sys::Datum {
    match field {
        Field::Null => pg_sys::Datum::from(0),
        Field::Text(bytes) => text_datum(bytes),
        Field::I64(value) | Field::Timestamp(value) => (*value).into(),
        Field::I32(value) => (*value).into(),
        Field::F64(value) => pg_sys::Datum::from(value.to_bits()),
        Field::Bool(value) => (*value).into(),
        Field::Oid(value) => value.into_pg().into(),
        Field::Interval(us) => interval(*us),
        Field::Json(text) => jsonb(text),
    }
}

fn jsonb(text: &[u8]) -> pg_sys::Datum {
    let text = super::c_string(text);
    // SAFETY: PostgreSQL's own input function of the type, with a C string that lives through the call
    unsafe {
        pg_sys::OidInputFunctionCall(
            pg_sys::Oid::from(JSONB_IN),
            text.as_ptr().cast_mut(),
            pg_sys::InvalidOid,
            -1,
        )
    }
}

/// `jsonb_in` in `pg_proc`, the same in PostgreSQL 15 to 18.
const JSONB_IN: Oid = 3806;

/// An interval of hours and less, never of days, so that it compares and prints as time.
fn interval(us: i64) -> pg_sys::Datum {
    // SAFETY: palloc'd memory of the type's size, all fields set
    unsafe {
        let interval = pg_sys::palloc(size_of::<pg_sys::Interval>()).cast::<pg_sys::Interval>();
        *interval = pg_sys::Interval {
            time: us,
            day: 0,
            month: 0,
        };
        pg_sys::Datum::from(interval)
    }
}

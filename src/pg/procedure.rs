//! Procedures: called by CALL outside a transaction block they may end the transaction and go on in another one.

use pgrx::pg_sys;

use super::fmgr::{Call, Value};

/// A procedure that runs, and may commit.
pub struct Procedure(());

impl Procedure {
    /// None where it is called inside a transaction block, or where a function or the like is around it: then its
    /// caller's transaction must not be ended.
    pub fn begin(call: &Call) -> Option<Procedure> {
        // SAFETY: the call is alive; a context of that tag is of that type
        unsafe {
            let context = (*call.raw()).context;
            if context.is_null() || (*context).type_ != pg_sys::NodeTag::T_CallContext {
                return None;
            }
            if (*context.cast::<pg_sys::CallContext>()).atomic {
                return None;
            }
            pg_sys::SPI_connect_ext(pg_sys::SPI_OPT_NONATOMIC as i32);
        }
        Some(Procedure(()))
    }

    /// Ends the transaction, so that nothing is held, and begins the next one: it has no snapshot before something
    /// needs one.
    pub fn commit(&self) {
        // SAFETY: connected as one that may; raises where a subtransaction is open
        unsafe { pg_sys::SPI_commit() };
    }
}

impl Drop for Procedure {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: connected by `begin`; after an error the abort disconnects
            unsafe { pg_sys::SPI_finish() };
        }
    }
}

/// What a procedure with one INOUT argument gives back: a row of it.
pub fn row_of_i64(call: &Call, value: Option<i64>) -> Value {
    // SAFETY: the call is alive; the descriptor is that of the declaration, of one bigint. Made where it outlives
    // the connection of the procedure, which callers have ended
    unsafe {
        let mut descriptor = std::ptr::null_mut();
        pg_sys::get_call_result_type(call.raw(), std::ptr::null_mut(), &mut descriptor);
        let descriptor = pg_sys::BlessTupleDesc(descriptor);
        let mut datum = pg_sys::Datum::from(value.unwrap_or_default());
        let mut is_null = value.is_none();
        let tuple = pg_sys::heap_form_tuple(descriptor, &raw mut datum, &raw mut is_null);
        Value::Pointer(pg_sys::HeapTupleHeaderGetDatum((*tuple).t_data))
    }
}

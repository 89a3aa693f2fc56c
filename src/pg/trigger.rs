//! The firing of a row trigger, as the fence needs it: the rows' columns as text, the columns that an
//! UPDATE sets, the tuple to go on with.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_char, c_int, c_void};

use pgrx::{pg_guard, pg_sys};

use super::fmgr::{Call, Value, varlena_bytes};
use super::{IntoPg, Oid, c_string};
use crate::errors::shown;

/// What fires.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    Insert,
    Update,
    Delete,
    Truncate,
}

/// Which row of the event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// The row as it was: UPDATE, DELETE.
    Old,
    /// The row as it will be: INSERT, UPDATE.
    New,
}

/// One firing of a trigger.
#[derive(Clone, Copy)]
pub struct Firing {
    data: *mut pg_sys::TriggerData,
    fcinfo: pg_sys::FunctionCallInfo,
}

impl Firing {
    /// The firing behind a call, or None when the function was not called as a trigger.
    pub fn of(call: &Call) -> Option<Firing> {
        let fcinfo = call.raw();
        // SAFETY: the call is alive; the node's tag tells what the context is
        unsafe {
            let context = (*fcinfo).context;
            if context.is_null() || (*context).type_ != pg_sys::NodeTag::T_TriggerData {
                return None;
            }
            Some(Firing {
                data: context.cast(),
                fcinfo,
            })
        }
    }

    fn data(&self) -> &pg_sys::TriggerData {
        // SAFETY: alive during the call
        unsafe { &*self.data }
    }

    fn trigger(&self) -> &pg_sys::Trigger {
        // SAFETY: set in every firing
        unsafe { &*self.data().tg_trigger }
    }

    /// What fires.
    pub fn event(&self) -> Event {
        match self.data().tg_event & pg_sys::TRIGGER_EVENT_OPMASK {
            pg_sys::TRIGGER_EVENT_INSERT => Event::Insert,
            pg_sys::TRIGGER_EVENT_UPDATE => Event::Update,
            pg_sys::TRIGGER_EVENT_DELETE => Event::Delete,
            _ => Event::Truncate,
        }
    }

    /// Whether it fires before the event (not after or instead of it).
    pub fn is_before(&self) -> bool {
        self.data().tg_event & pg_sys::TRIGGER_EVENT_TIMINGMASK == pg_sys::TRIGGER_EVENT_BEFORE
    }

    /// Whether it fires for each row.
    pub fn is_for_each_row(&self) -> bool {
        self.data().tg_event & pg_sys::TRIGGER_EVENT_ROW != 0
    }

    /// The arguments of CREATE TRIGGER.
    pub fn arguments(&self) -> Vec<Vec<u8>> {
        let trigger = self.trigger();
        (0..usize::try_from(trigger.tgnargs).unwrap_or(0))
            .map(|i| {
                // SAFETY: as many NUL-terminated strings as `tgnargs` says
                unsafe { CStr::from_ptr(*trigger.tgargs.add(i)) }
                    .to_bytes()
                    .to_vec()
            })
            .collect()
    }

    /// The relation whose rows are written.
    pub fn relation(&self) -> Oid {
        // SAFETY: the relation is open during the firing
        unsafe { (*self.data().tg_relation).rd_id.to_u32() }
    }

    /// Its name, with its schema and quoted as in SQL.
    pub fn relation_name(&self) -> String {
        // SAFETY: as `relation`; names are NUL-terminated, results palloc'd
        unsafe {
            let class = (*self.data().tg_relation).rd_rel;
            let schema = pg_sys::get_namespace_name((*class).relnamespace);
            let name = pg_sys::quote_qualified_identifier(schema, (*class).relname.data.as_ptr());
            shown(CStr::from_ptr(name).to_bytes())
        }
    }

    /// Another BEFORE trigger that fires for the same rows after this one, by the order of names.
    pub fn later_trigger(&self) -> Option<String> {
        // SAFETY: the relation's triggers are in its cache entry while it is open, sorted by name
        unsafe {
            let triggers = (*self.data().tg_relation).trigdesc;
            if triggers.is_null() {
                return None;
            }
            let count = usize::try_from((*triggers).numtriggers).unwrap_or(0);
            let own = self.trigger();
            let is_before_row = |t: &pg_sys::Trigger| t.tgtype & 0b100_0011 == 0b11;
            (0..count)
                .map(|i| &*(*triggers).triggers.add(i))
                .skip_while(|t| t.tgoid != own.tgoid)
                .skip(1)
                .find(|t| {
                    is_before_row(t)
                        && t.tgenabled as u8 != b'D'
                        && t.tgfoid != own.tgfoid
                        && t.tgtype & self.event_bit() != 0
                })
                .map(|t| shown(CStr::from_ptr(t.tgname).to_bytes()))
        }
    }

    /// The event's bit in a trigger's type: TRIGGER_TYPE_INSERT, _DELETE, _UPDATE.
    fn event_bit(&self) -> i16 {
        match self.event() {
            Event::Insert => 4,
            Event::Delete => 8,
            Event::Update => 16,
            Event::Truncate => 0,
        }
    }

    /// Where the old row is: block and offset.
    pub fn old_place(&self) -> (u32, u16) {
        // SAFETY: callers ask in an UPDATE or DELETE, where the old tuple is set
        unsafe {
            let tid = (*self.data().tg_trigtuple).t_self;
            (
                (u32::from(tid.ip_blkid.bi_hi) << 16) | u32::from(tid.ip_blkid.bi_lo),
                tid.ip_posid,
            )
        }
    }

    /// Whether an UPDATE sets this column.
    pub fn sets(&self, column: i16) -> bool {
        let member = c_int::from(column) - pg_sys::FirstLowInvalidHeapAttributeNumber;
        // SAFETY: the set is alive during the firing, or null for the empty one
        unsafe { pg_sys::bms_is_member(member, self.data().tg_updatedcols) }
    }

    /// The tuple to go on with: the new one, or the old one of a DELETE.
    pub fn unchanged(&self) -> Value {
        let tuple = match self.event() {
            Event::Update => self.data().tg_newtuple,
            Event::Insert | Event::Delete => self.data().tg_trigtuple,
            Event::Truncate => std::ptr::null_mut(),
        };
        Value::Pointer(pg_sys::Datum::from(tuple))
    }

    /// The new tuple with a bigint column replaced.
    pub fn stamped(&self, column: i16, value: i64) -> Value {
        let tuple = match self.event() {
            Event::Update => self.data().tg_newtuple,
            _ => self.data().tg_trigtuple,
        };
        let mut columns = [c_int::from(column)];
        let mut values = [pg_sys::Datum::from(value)];
        let mut nulls = [false];
        // SAFETY: tuple and descriptor belong together; the column is a bigint of the relation
        let stamped = unsafe {
            pg_sys::heap_modify_tuple_by_cols(
                tuple,
                (*self.data().tg_relation).rd_att,
                1,
                columns.as_mut_ptr(),
                values.as_mut_ptr(),
                nulls.as_mut_ptr(),
            )
        };
        Value::Pointer(pg_sys::Datum::from(stamped))
    }

    fn slot(&self, side: Side) -> *mut pg_sys::TupleTableSlot {
        match (side, self.event()) {
            (Side::New, Event::Update) => self.data().tg_newslot,
            _ => self.data().tg_trigslot,
        }
    }

    /// A column of a row, or None for NULL.
    fn datum(&self, side: Side, column: i16) -> Option<pg_sys::Datum> {
        let slot = self.slot(side);
        let index = usize::try_from(column - 1).ok()?;
        // SAFETY: the slot holds the tuple of the firing; columns are attributes of the relation
        unsafe {
            if (*slot).tts_nvalid < column {
                pg_sys::slot_getsomeattrs_int(slot, c_int::from(column));
            }
            let is_null = *(*slot).tts_isnull.add(index);
            (!is_null).then(|| *(*slot).tts_values.add(index))
        }
    }

    /// A bigint column of a row.
    pub fn i64(&self, side: Side, column: i16) -> Option<i64> {
        self.datum(side, column).map(|datum| datum.value() as i64)
    }

    /// Takes what a former firing of this statement has left; it is to be left again.
    pub fn take<T>(&self) -> Option<Box<T>> {
        // SAFETY: only `leave` writes these pointers, with the one type that this trigger function
        // uses; what is taken out is not there any more for anyone else
        unsafe {
            let place = (*(*self.fcinfo).flinfo).fn_extra.cast::<Place>();
            let left = place.as_mut().map(|place| &mut place.left)?;
            let left = std::mem::replace(left, std::ptr::null_mut());
            (!left.is_null()).then(|| Box::from_raw(left.cast::<T>()))
        }
    }

    /// Leaves something for the next firings of this statement; dropped with its memory context.
    pub fn leave<T>(&self, value: Box<T>) {
        // SAFETY: the place is made once, in the memory context of the function info, and goes with
        // it; the callback then drops what is left there
        unsafe {
            let flinfo = (*self.fcinfo).flinfo;
            if (*flinfo).fn_extra.is_null() {
                let memory = pg_sys::MemoryContextAllocZero((*flinfo).fn_mcxt, size_of::<Place>());
                let place = memory.cast::<Place>();
                (*place).callback.func = Some(drop_left::<T>);
                (*place).callback.arg = memory;
                pg_sys::MemoryContextRegisterResetCallback(
                    (*flinfo).fn_mcxt,
                    &raw mut (*place).callback,
                );
                (*flinfo).fn_extra = memory;
            }
            (*(*flinfo).fn_extra.cast::<Place>()).left = Box::into_raw(value).cast();
        }
    }
}

/// Where a statement's firings leave something for each other.
#[repr(C)]
struct Place {
    callback: pg_sys::MemoryContextCallback,
    left: *mut c_void,
}

#[pg_guard]
unsafe extern "C-unwind" fn drop_left<T>(place: *mut c_void) {
    // SAFETY: made by `leave`, for values of this type; called once, before the memory goes
    unsafe {
        let left = (*place.cast::<Place>()).left;
        if !left.is_null() {
            drop(Box::from_raw(left.cast::<T>()));
        }
    }
}

/// Why a column cannot be part of a resource.
#[derive(Debug)]
pub enum ColumnError {
    /// The relation has no such column.
    Unknown,
    /// Its type has no text that is the same in every session; the type's name.
    Type(String),
    /// It is generated when it is read.
    Virtual,
}

/// How a type becomes text.
enum Kind {
    Int2,
    Int4,
    Int8,
    Bool,
    /// Bytes as they are.
    Text,
    /// char(n): trailing blanks go, as in the cast to text.
    Padded,
    /// The output function.
    Output(Function),
    /// The output function, under DateStyle ISO and TimeZone UTC.
    Dated(Function),
}

/// A function's info, in which PostgreSQL keeps state of calls.
type Function = Box<UnsafeCell<pg_sys::FmgrInfo>>;

/// A column of a relation, ready to be rendered.
pub struct Column {
    number: i16,
    kind: Kind,
    /// For a stored generated column: its value in a new row is computed after BEFORE triggers.
    generator: Option<Generator>,
}

/// A relation's column by name: its number and type.
pub fn column(relation: Oid, name: &[u8]) -> Option<(i16, Oid)> {
    let name = c_string(name);
    // SAFETY: catalog cache lookups
    unsafe {
        let number = pg_sys::get_attnum(relation.into_pg(), name.as_ptr());
        if number <= 0 {
            return None;
        }
        let type_ = pg_sys::get_atttype(relation.into_pg(), number);
        Some((number, type_.to_u32()))
    }
}

/// Whether a column is generated, stored or not.
pub fn is_generated(relation: Oid, number: i16) -> bool {
    !matches!(check_generated(relation, number), Ok(false))
}

/// Whether a type is bigint.
pub fn is_bigint(type_: Oid) -> bool {
    type_ == pg_sys::INT8OID.to_u32()
}

/// Checks that a column can be part of a resource.
pub fn check_column(relation: Oid, name: &[u8]) -> Result<(), ColumnError> {
    let (number, type_) = column(relation, name).ok_or(ColumnError::Unknown)?;
    check_generated(relation, number)?;
    type_class(type_).map(|_| ())
}

/// True for a stored generated column.
fn check_generated(relation: Oid, number: i16) -> Result<bool, ColumnError> {
    // SAFETY: a catalog cache lookup
    match unsafe { pg_sys::get_attgenerated(relation.into_pg(), number) } as u8 {
        0 => Ok(false),
        b's' => Ok(true),
        _ => Err(ColumnError::Virtual),
    }
}

#[derive(Clone, Copy)]
enum Class {
    Int2,
    Int4,
    Int8,
    Bool,
    Text,
    Padded,
    Output,
    Dated,
}

fn type_class(type_: Oid) -> Result<(pg_sys::Oid, Class), ColumnError> {
    // SAFETY: catalog cache lookups
    let base = unsafe { pg_sys::getBaseType(type_.into_pg()) };
    let class = match base {
        pg_sys::INT2OID => Class::Int2,
        pg_sys::INT4OID => Class::Int4,
        pg_sys::INT8OID => Class::Int8,
        pg_sys::BOOLOID => Class::Bool,
        pg_sys::TEXTOID | pg_sys::VARCHAROID => Class::Text,
        pg_sys::BPCHAROID => Class::Padded,
        pg_sys::NUMERICOID | pg_sys::UUIDOID | pg_sys::NAMEOID => Class::Output,
        pg_sys::DATEOID | pg_sys::TIMESTAMPOID | pg_sys::TIMESTAMPTZOID => Class::Dated,
        // SAFETY: catalog cache lookups
        other if unsafe { pg_sys::type_is_enum(other) || is_string(other) } => Class::Output,
        other => {
            // SAFETY: the result is a palloc'd string
            let name = unsafe { CStr::from_ptr(pg_sys::format_type_be(other)) };
            return Err(ColumnError::Type(shown(name.to_bytes())));
        }
    };
    Ok((base, class))
}

/// # Safety
/// Inside a transaction.
unsafe fn is_string(type_: pg_sys::Oid) -> bool {
    let mut category: c_char = 0;
    let mut preferred = false;
    // SAFETY: writes to locals
    unsafe { pg_sys::get_type_category_preferred(type_, &mut category, &mut preferred) };
    category as u8 == pg_sys::TYPCATEGORY_STRING
}

impl Column {
    /// Prepares a column for the firings of a statement.
    pub fn prepare(firing: &Firing, name: &[u8]) -> Result<Column, ColumnError> {
        let relation = firing.relation();
        let (number, type_) = column(relation, name).ok_or(ColumnError::Unknown)?;
        let is_generated = check_generated(relation, number)?;
        let (base, class) = type_class(type_)?;
        let kind = match class {
            Class::Int2 => Kind::Int2,
            Class::Int4 => Kind::Int4,
            Class::Int8 => Kind::Int8,
            Class::Bool => Kind::Bool,
            Class::Text => Kind::Text,
            Class::Padded => Kind::Padded,
            Class::Output => Kind::Output(output_function(firing, base)),
            Class::Dated => Kind::Dated(output_function(firing, base)),
        };
        let generator = is_generated.then(|| Generator::prepare(firing, number));
        Ok(Column {
            number,
            kind,
            generator,
        })
    }

    /// Whether its values are plain numbers in a datum, which `value` can tell.
    pub fn is_plain(&self) -> bool {
        let plain = matches!(self.kind, Kind::Int2 | Kind::Int4 | Kind::Int8 | Kind::Bool);
        plain && self.generator.is_none()
    }

    /// The value of a plain column as it stands in the datum, or None for NULL.
    pub fn value(&self, firing: &Firing, side: Side) -> Option<usize> {
        firing
            .datum(side, self.number)
            .map(|datum| match self.kind {
                Kind::Int2 => datum.value() as u16 as usize,
                Kind::Int4 => datum.value() as u32 as usize,
                Kind::Bool => datum.value() & 0xff,
                _ => datum.value(),
            })
    }

    /// Whether old and new row of an UPDATE surely have the same value here.
    pub fn is_unchanged(&self, firing: &Firing) -> bool {
        self.is_plain() && self.value(firing, Side::Old) == self.value(firing, Side::New)
    }

    /// Appends what `column::text` gives; false, and nothing, for NULL.
    pub fn render(&self, firing: &Firing, side: Side, out: &mut Vec<u8>) -> bool {
        match &self.generator {
            Some(generator) if side == Side::New => {
                generator.evaluate(firing.slot(side), |datum| self.render_datum(datum, out))
            }
            _ => self.render_datum(firing.datum(side, self.number), out),
        }
    }

    fn render_datum(&self, datum: Option<pg_sys::Datum>, out: &mut Vec<u8>) -> bool {
        let Some(datum) = datum else { return false };
        match &self.kind {
            Kind::Int2 => push_integer(out, i64::from(datum.value() as i16)),
            Kind::Int4 => push_integer(out, i64::from(datum.value() as i32)),
            Kind::Int8 => push_integer(out, datum.value() as i64),
            Kind::Bool => out.extend_from_slice(if datum.value() & 0xff != 0 {
                b"true"
            } else {
                b"false"
            }),
            // SAFETY: the column's type is a varlena
            Kind::Text => out.extend_from_slice(unsafe { varlena_bytes(datum) }),
            Kind::Padded => {
                // SAFETY: the column's type is a varlena
                let padded = unsafe { varlena_bytes(datum) };
                let len = padded.iter().rposition(|b| *b != b' ').map_or(0, |i| i + 1);
                out.extend_from_slice(&padded[..len]);
            }
            Kind::Output(function) => output(function, datum, out),
            Kind::Dated(function) => {
                let _iso = IsoUtc::set();
                output(function, datum, out);
            }
        }
        true
    }
}

/// Appends a number in decimal.
fn push_integer(out: &mut Vec<u8>, value: i64) {
    let mut digits = [0_u8; 20];
    let mut rest = value.unsigned_abs();
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    if value < 0 {
        out.push(b'-');
    }
    out.extend_from_slice(&digits[at..]);
}

fn output_function(firing: &Firing, type_: pg_sys::Oid) -> Function {
    let mut function = pg_sys::InvalidOid;
    let mut is_varlena = false;
    let info = Box::new(UnsafeCell::new(pg_sys::FmgrInfo::default()));
    // SAFETY: catalog lookups; what the function info points to lives in the trigger function's own
    // context, as long as the memo that owns the box
    unsafe {
        pg_sys::getTypeOutputInfo(type_, &mut function, &mut is_varlena);
        pg_sys::fmgr_info_cxt(function, info.get(), (*(*firing.fcinfo).flinfo).fn_mcxt);
    }
    info
}

fn output(function: &Function, datum: pg_sys::Datum, out: &mut Vec<u8>) {
    // SAFETY: the function is the output function of the datum's type; nothing else uses its info
    // meanwhile
    unsafe {
        let text = pg_sys::OutputFunctionCall(function.get(), datum);
        out.extend_from_slice(CStr::from_ptr(text).to_bytes());
        pg_sys::pfree(text.cast());
    }
}

/// DateStyle ISO and TimeZone UTC for the length of a call, whatever the session's settings.
struct IsoUtc {
    style: c_int,
    zone: *mut pg_sys::pg_tz,
}

impl IsoUtc {
    fn set() -> IsoUtc {
        // SAFETY: variables of this backend that output functions read; UTC is always known
        unsafe {
            let saved = IsoUtc {
                style: pg_sys::DateStyle,
                zone: pg_sys::session_timezone,
            };
            let utc = pg_sys::pg_tzset(c"UTC".as_ptr());
            assert!(!utc.is_null(), "the time zone UTC is not known");
            pg_sys::DateStyle = pg_sys::USE_ISO_DATES as c_int;
            pg_sys::session_timezone = utc;
            saved
        }
    }
}

impl Drop for IsoUtc {
    fn drop(&mut self) {
        // SAFETY: restores what was read by `set`
        unsafe {
            pg_sys::DateStyle = self.style;
            pg_sys::session_timezone = self.zone;
        }
    }
}

/// Computes a stored generated column of a new row, as PostgreSQL will after the BEFORE triggers.
struct Generator {
    state: *mut pg_sys::ExprState,
    context: *mut pg_sys::ExprContext,
}

impl Generator {
    fn prepare(firing: &Firing, column: i16) -> Generator {
        // SAFETY: everything is made in the trigger function's own context, which lives as long as
        // the memo that owns this; the previous context is current again even after an error,
        // because the abort sets its own
        unsafe {
            let own = (*(*firing.fcinfo).flinfo).fn_mcxt;
            let previous = pg_sys::MemoryContextSwitchTo(own);
            let node = pg_sys::build_column_default(firing.data().tg_relation, c_int::from(column));
            assert!(!node.is_null(), "a generated column without expression");
            let expression = pg_sys::expression_planner(node.cast());
            let state = pg_sys::ExecInitExpr(expression, std::ptr::null_mut());
            let context = pg_sys::CreateStandaloneExprContext();
            pg_sys::MemoryContextSwitchTo(previous);
            Generator { state, context }
        }
    }

    fn evaluate<R>(
        &self,
        slot: *mut pg_sys::TupleTableSlot,
        body: impl FnOnce(Option<pg_sys::Datum>) -> R,
    ) -> R {
        // SAFETY: state and context are alive (see `prepare`); the slot holds the new row; the value
        // is used before the memory it was made in is reset
        unsafe {
            (*self.context).ecxt_scantuple = slot;
            let memory = (*self.context).ecxt_per_tuple_memory;
            let previous = pg_sys::MemoryContextSwitchTo(memory);
            let mut is_null = false;
            let datum = pg_sys::ExecEvalExpr(self.state, self.context, &mut is_null);
            pg_sys::MemoryContextSwitchTo(previous);
            let result = body((!is_null).then_some(datum));
            pg_sys::MemoryContextReset(memory);
            result
        }
    }
}

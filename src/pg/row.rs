//! Rows of one small table by its text primary key, without a plan: the table is ours alone, has one
//! plain index, and no triggers, rules or policies, so the executor would only cost. What it does for
//! concurrent updates is missed: `put` is for rows that no one else is writing.
//!
//! The functions are those with which PostgreSQL keeps its catalogs.

use pgrx::pg_sys;

use super::spi::Arg;
use super::{IntoPg, Oid, fmgr};

/// The columns of a row. They count from 1.
pub struct Fields {
    values: Vec<pg_sys::Datum>,
    nulls: Vec<bool>,
}

impl Fields {
    fn datum(&self, column: usize) -> Option<pg_sys::Datum> {
        let index = column.checked_sub(1)?;
        let is_null = *self.nulls.get(index)?;
        (!is_null)
            .then(|| self.values.get(index).copied())
            .flatten()
    }

    /// A bigint or timestamptz column.
    pub fn i64(&self, column: usize) -> Option<i64> {
        self.datum(column).map(|datum| datum.value() as i64)
    }

    /// An oid column.
    pub fn oid(&self, column: usize) -> Option<Oid> {
        self.datum(column).map(|datum| datum.value() as u32)
    }

    /// A boolean column.
    pub fn bool(&self, column: usize) -> Option<bool> {
        self.datum(column).map(|datum| datum.value() & 0xff != 0)
    }

    /// A text column's bytes.
    pub fn bytes(&self, column: usize) -> Option<Vec<u8>> {
        // SAFETY: callers ask for columns that are text, while the row is there
        self.datum(column)
            .map(|datum| unsafe { fmgr::varlena_bytes(datum) }.to_vec())
    }
}

/// A table with its index and a snapshot of this moment, open for one look-up.
struct LookUp {
    table: pg_sys::Relation,
    snapshot: pg_sys::Snapshot,
    scan: pg_sys::SysScanDesc,
}

impl LookUp {
    /// Opens the table and starts the scan for a key in its first column.
    fn open(table: Oid, index: Oid, key: &[u8], lock: u32) -> LookUp {
        // SAFETY: the index is the table's, over its first column, a text in the C collation; what is
        // opened here is closed by `close`, or by the abort after an error
        unsafe {
            let table = pg_sys::table_open(table.into_pg(), lock as pg_sys::LOCKMODE);
            let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot());
            let mut scan_key = pg_sys::ScanKeyData::default();
            pg_sys::ScanKeyInit(
                &mut scan_key,
                1,
                pg_sys::BTEqualStrategyNumber as pg_sys::StrategyNumber,
                pg_sys::F_TEXTEQ.into(),
                fmgr::text_datum(key),
            );
            let scan = pg_sys::systable_beginscan(
                table,
                index.into_pg(),
                true,
                snapshot,
                1,
                &mut scan_key,
            );
            LookUp {
                table,
                snapshot,
                scan,
            }
        }
    }

    /// The row, or None. It is good until `close`.
    fn row(&self) -> Option<(pg_sys::HeapTuple, Fields)> {
        // SAFETY: the scan is open; the arrays are as long as the table is wide
        unsafe {
            let tuple = pg_sys::systable_getnext(self.scan);
            if tuple.is_null() {
                return None;
            }
            let width = (*(*self.table).rd_att).natts as usize;
            let mut fields = Fields {
                values: vec![pg_sys::Datum::from(0); width],
                nulls: vec![true; width],
            };
            pg_sys::heap_deform_tuple(
                tuple,
                (*self.table).rd_att,
                fields.values.as_mut_ptr(),
                fields.nulls.as_mut_ptr(),
            );
            Some((tuple, fields))
        }
    }

    /// Closes everything; the table's lock stays until the end of the transaction.
    fn close(self) {
        // SAFETY: opened by `open`, closed once
        unsafe {
            pg_sys::systable_endscan(self.scan);
            pg_sys::UnregisterSnapshot(self.snapshot);
            pg_sys::table_close(self.table, pg_sys::NoLock as pg_sys::LOCKMODE);
        }
    }
}

/// Reads the row of a key, as committed by now.
pub fn find<R>(table: Oid, index: Oid, key: &[u8], read: impl FnOnce(&Fields) -> R) -> Option<R> {
    let look_up = LookUp::open(table, index, key, pg_sys::AccessShareLock);
    let found = look_up.row().map(|(_, fields)| read(&fields));
    look_up.close();
    found
}

/// Replaces the row of a key if `accepts` the old one, or makes its first; the key is the first of the
/// values, none of which is NULL. Seen by the transaction's next statement. XX000 where another
/// transaction has updated the row in this moment.
pub fn put(table: Oid, index: Oid, values: &[Arg], accepts: impl FnOnce(&Fields) -> bool) -> bool {
    let Some(Arg::Text(key)) = values.first().copied() else {
        return false;
    };
    let look_up = LookUp::open(table, index, key, pg_sys::RowExclusiveLock);
    let old = look_up.row();
    let accepted = old.as_ref().is_none_or(|(_, fields)| accepts(fields));
    if accepted {
        let mut datums: Vec<pg_sys::Datum> = values.iter().map(|value| value.datum()).collect();
        let mut nulls = vec![false; datums.len()];
        // SAFETY: as many values as the table is wide, of its types; the old tuple's place is good
        // while the scan is open
        unsafe {
            assert!(
                (*(*look_up.table).rd_att).natts as usize == datums.len(),
                "a row of the table's width"
            );
            let new = pg_sys::heap_form_tuple(
                (*look_up.table).rd_att,
                datums.as_mut_ptr(),
                nulls.as_mut_ptr(),
            );
            match old {
                Some((old, _)) => {
                    pg_sys::CatalogTupleUpdate(look_up.table, &mut (*old).t_self, new);
                }
                None => pg_sys::CatalogTupleInsert(look_up.table, new),
            }
            pg_sys::heap_freetuple(new);
        }
    }
    look_up.close();
    if accepted {
        // SAFETY: between commands, as at the end of an SPI statement
        unsafe { pg_sys::CommandCounterIncrement() };
    }
    accepted
}

/// Sets a boolean column of the row of a key to true, if there is one and `accepts` says so. As `put`.
pub fn set_true(
    table: Oid,
    index: Oid,
    key: &[u8],
    column: i32,
    accepts: impl FnOnce(&Fields) -> bool,
) -> bool {
    let look_up = LookUp::open(table, index, key, pg_sys::RowExclusiveLock);
    let found = look_up.row().filter(|(_, fields)| accepts(fields));
    if let Some((old, _)) = &found {
        let mut columns = [column];
        let mut values = [pg_sys::Datum::from(true)];
        let mut nulls = [false];
        // SAFETY: tuple and descriptor belong together, the column is one of theirs and a boolean; the
        // old tuple's place is good while the scan is open
        unsafe {
            let new = pg_sys::heap_modify_tuple_by_cols(
                *old,
                (*look_up.table).rd_att,
                1,
                columns.as_mut_ptr(),
                values.as_mut_ptr(),
                nulls.as_mut_ptr(),
            );
            pg_sys::CatalogTupleUpdate(look_up.table, &mut (**old).t_self, new);
            pg_sys::heap_freetuple(new);
        }
    }
    look_up.close();
    found.is_some()
}

//! Rows of one small table by its text primary key, without a plan: the table is ours alone, has one
//! plain index, and no triggers, rules or policies, so the executor would only cost.
//!
//! **A row that is there is overwritten in place**, not versioned: as PostgreSQL itself does with counters in
//! its catalogs, though by generic WAL, which is open to extensions. So a row can be changed a million times
//! under an open snapshot without a dead version, a longer look-up or a new entry in the index. The price:
//! what is written so is not undone by a rollback, and is seen by everyone at once. Callers write only what
//! may be so.
//! - A row is written under its page's exclusive lock, and read under its shared one: never torn.
//! - A new row, and one whose size differs (it was restored from a dump), goes the ordinary, transactional
//!   way. Callers see to it that nobody else is writing that row then.
//! - Between a page's lock and its release nothing allocates, and nothing of ours raises. PostgreSQL's test of who is
//!   changing the row may read the commit log and so can, as it can in PostgreSQL's own updates; the abort lets lock
//!   and pin go, and nothing was written yet.

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

    /// A smallint column.
    pub fn i16(&self, column: usize) -> Option<i16> {
        self.datum(column).map(|datum| datum.value() as i16)
    }

    /// An oid column.
    pub fn oid(&self, column: usize) -> Option<Oid> {
        self.datum(column).map(|datum| datum.value() as u32)
    }

    /// A boolean column.
    pub fn bool(&self, column: usize) -> Option<bool> {
        self.datum(column).map(|datum| datum.value() & 0xff != 0)
    }

    /// A uuid column.
    pub fn uuid(&self, column: usize) -> Option<[u8; 16]> {
        // SAFETY: callers ask for columns that are a uuid, while the row is there
        self.datum(column)
            .map(|datum| unsafe { *datum.cast_mut_ptr::<[u8; 16]>() })
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

    /// The row, or None. It is good until `close`, but others may write it meanwhile: see [`Seen`].
    fn row(&self) -> Option<pg_sys::HeapTuple> {
        // SAFETY: the scan is open
        let tuple = unsafe { pg_sys::systable_getnext(self.scan) };
        (!tuple.is_null()).then_some(tuple)
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

/// A row as it was a moment ago.
struct Seen {
    table: Oid,
    buffer: pg_sys::Buffer,
    place: pg_sys::ItemPointerData,
    bytes: Vec<u64>,
    length: usize,
}

impl Seen {
    /// Copies the row that the scan has found, under its page's shared lock.
    ///
    /// # Safety
    /// `tuple` is the current one of the open scan of `table`.
    unsafe fn copy(table: pg_sys::Relation, tuple: pg_sys::HeapTuple) -> Seen {
        // SAFETY: the scan keeps the page pinned, so the row stays where it is
        unsafe {
            let place = (*tuple).t_self;
            let length = (*tuple).t_len as usize;
            // eight bytes each, because a row is aligned so
            let mut bytes = vec![0_u64; length.div_ceil(8)];
            let buffer = pg_sys::ReadBuffer(
                table,
                pgrx::itemptr::item_pointer_get_block_number_no_check(place),
            );
            pg_sys::LockBuffer(buffer, pg_sys::BUFFER_LOCK_SHARE as i32);
            std::ptr::copy_nonoverlapping(
                (*tuple).t_data.cast::<u8>(),
                bytes.as_mut_ptr().cast::<u8>(),
                length,
            );
            pg_sys::LockBuffer(buffer, pg_sys::BUFFER_LOCK_UNLOCK as i32);
            Seen {
                table: (*table).rd_id.to_u32(),
                buffer,
                place,
                bytes,
                length,
            }
        }
    }

    /// The copy as PostgreSQL's functions want it. It lives as long as this.
    fn tuple(&mut self) -> pg_sys::HeapTupleData {
        pg_sys::HeapTupleData {
            t_len: self.length as u32,
            t_self: self.place,
            t_tableOid: self.table.into_pg(),
            t_data: self.bytes.as_mut_ptr().cast(),
        }
    }

    fn fields(&mut self, table: pg_sys::Relation) -> Fields {
        let mut tuple = self.tuple();
        // SAFETY: the arrays are as long as the table is wide
        unsafe {
            let width = (*(*table).rd_att).natts as usize;
            let mut fields = Fields {
                values: vec![pg_sys::Datum::from(0); width],
                nulls: vec![true; width],
            };
            pg_sys::heap_deform_tuple(
                &mut tuple,
                (*table).rd_att,
                fields.values.as_mut_ptr(),
                fields.nulls.as_mut_ptr(),
            );
            fields
        }
    }

    /// Writes `new` over the row, if it is still as it was seen, of the same size, and nobody is
    /// changing it the ordinary way.
    ///
    /// # Safety
    /// `new` is a tuple of the table.
    unsafe fn overwrite(&mut self, table: pg_sys::Relation, new: pg_sys::HeapTuple) -> Overwritten {
        let old = self.bytes.as_ptr().cast::<u8>();
        // SAFETY: the buffer is pinned; the row's place is on its page. What is between the lock and its
        // release does not allocate: the state was made before
        unsafe {
            let header =
                usize::from((*self.bytes.as_ptr().cast::<pg_sys::HeapTupleHeaderData>()).t_hoff);
            if (*new).t_len as usize != self.length
                || usize::from((*(*new).t_data).t_hoff) != header
            {
                return Overwritten::OtherSize;
            }
            let state = pg_sys::GenericXLogStart(table);
            pg_sys::LockBuffer(self.buffer, pg_sys::BUFFER_LOCK_EXCLUSIVE as i32);
            let page = pg_sys::BufferGetPage(self.buffer);
            let mut now = self.on_page(page);
            let verdict = pg_sys::HeapTupleSatisfiesUpdate(
                &mut now,
                pg_sys::GetCurrentCommandId(false),
                self.buffer,
            );
            let same = std::slice::from_raw_parts(
                now.t_data.cast::<u8>().add(header),
                self.length - header,
            ) == std::slice::from_raw_parts(old.add(header), self.length - header);
            let result = if verdict != pg_sys::TM_Result::TM_Ok {
                Overwritten::BeingChanged
            } else if !same {
                Overwritten::Changed
            } else {
                let image = pg_sys::GenericXLogRegisterBuffer(state, self.buffer, 0);
                std::ptr::copy_nonoverlapping(
                    (*new).t_data.cast::<u8>().add(header),
                    self.on_page(image).t_data.cast::<u8>().add(header),
                    self.length - header,
                );
                Overwritten::Done
            };
            match result {
                Overwritten::Done => {
                    pg_sys::GenericXLogFinish(state);
                }
                _ => pg_sys::GenericXLogAbort(state),
            }
            pg_sys::LockBuffer(self.buffer, pg_sys::BUFFER_LOCK_UNLOCK as i32);
            result
        }
    }

    /// The row on its page, or on a copy of it.
    ///
    /// # Safety
    /// `page` is the row's page.
    unsafe fn on_page(&self, page: pg_sys::Page) -> pg_sys::HeapTupleData {
        // SAFETY: the place was a row's when it was seen, and the pin keeps it one
        unsafe {
            let offset = pgrx::itemptr::item_pointer_get_offset_number_no_check(self.place);
            let item = pg_sys::PageGetItemId(page, offset);
            pg_sys::HeapTupleData {
                t_len: (*item).lp_len(),
                t_self: self.place,
                t_tableOid: self.table.into_pg(),
                t_data: pg_sys::PageGetItem(page, item).cast(),
            }
        }
    }
}

impl Drop for Seen {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: pinned by the constructor; after an error the abort lets it go
            unsafe { pg_sys::ReleaseBuffer(self.buffer) };
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Overwritten {
    Done,
    /// By another in-place write since it was seen.
    Changed,
    /// By a transaction, the ordinary way.
    BeingChanged,
    OtherSize,
}

/// Reads the row of a key, as committed by now.
pub fn find<R>(table: Oid, index: Oid, key: &[u8], read: impl FnOnce(&Fields) -> R) -> Option<R> {
    let look_up = LookUp::open(table, index, key, pg_sys::AccessShareLock);
    let found = look_up.row().map(|tuple| {
        // SAFETY: the scan's current tuple
        let mut seen = unsafe { Seen::copy(look_up.table, tuple) };
        read(&seen.fields(look_up.table))
    });
    look_up.close();
    found
}

/// Replaces the row of a key if `accepts` the old one, or makes its first; the key is the first of the
/// values, none of which is NULL. A replacement is not undone by a rollback, a first row is. Seen by the
/// transaction's next statement. XX000 where another transaction is changing the row by SQL.
pub fn put(table: Oid, index: Oid, values: &[Arg], accepts: impl Fn(&Fields) -> bool) -> bool {
    let Some(Arg::Text(key)) = values.first().copied() else {
        return false;
    };
    let look_up = LookUp::open(table, index, key, pg_sys::RowExclusiveLock);
    let new = look_up.form(values);
    let (accepted, is_versioned) = match look_up.row() {
        // SAFETY: a tuple of this table
        None => unsafe {
            pg_sys::CatalogTupleInsert(look_up.table, new);
            (true, true)
        },
        Some(old) => look_up.replace(old, |_, fields| accepts(fields).then_some(new)),
    };
    // SAFETY: formed above
    unsafe { pg_sys::heap_freetuple(new) };
    look_up.close();
    if is_versioned {
        // SAFETY: between commands, as at the end of an SPI statement
        unsafe { pg_sys::CommandCounterIncrement() };
    }
    accepted
}

/// Sets one column of fixed width of the row of a key to what `change` says, if it says anything. Not
/// undone by a rollback. Whether it was changed; None where there is no such row.
pub fn amend(
    table: Oid,
    index: Oid,
    key: &[u8],
    column: i32,
    change: impl Fn(&Fields) -> Option<Arg<'static>>,
) -> Option<bool> {
    let look_up = LookUp::open(table, index, key, pg_sys::RowExclusiveLock);
    let changed = look_up.row().map(|old| {
        let changed = look_up.replace(old, |tuple, fields| {
            let mut values = [change(fields)?.datum()];
            let (mut columns, mut nulls) = ([column], [false]);
            // SAFETY: tuple and descriptor belong together, the column is one of theirs
            Some(unsafe {
                pg_sys::heap_modify_tuple_by_cols(
                    tuple,
                    (*look_up.table).rd_att,
                    1,
                    columns.as_mut_ptr(),
                    values.as_mut_ptr(),
                    nulls.as_mut_ptr(),
                )
            })
        });
        changed.0
    });
    look_up.close();
    changed
}

/// Deletes the row of a key, in the running transaction, if `accepts` it. Nobody else may be changing it.
pub fn delete(table: Oid, index: Oid, key: &[u8], accepts: impl Fn(&Fields) -> bool) -> bool {
    let look_up = LookUp::open(table, index, key, pg_sys::RowExclusiveLock);
    let found = look_up.row().filter(|tuple| {
        // SAFETY: the scan's current tuple
        let mut seen = unsafe { Seen::copy(look_up.table, *tuple) };
        accepts(&seen.fields(look_up.table))
    });
    if let Some(tuple) = found {
        // SAFETY: the place of the scan's current tuple
        unsafe { pg_sys::CatalogTupleDelete(look_up.table, &mut (*tuple).t_self) };
    }
    look_up.close();
    found.is_some()
}

impl LookUp {
    fn form(&self, values: &[Arg]) -> pg_sys::HeapTuple {
        let mut datums: Vec<pg_sys::Datum> = values.iter().map(|value| value.datum()).collect();
        let mut nulls = vec![false; datums.len()];
        // SAFETY: as many values as the table is wide, of its types
        unsafe {
            assert!(
                (*(*self.table).rd_att).natts as usize == datums.len(),
                "a row of the table's width"
            );
            pg_sys::heap_form_tuple(
                (*self.table).rd_att,
                datums.as_mut_ptr(),
                nulls.as_mut_ptr(),
            )
        }
    }

    /// Replaces the scan's row by what `change` makes of it. Whether it was, and whether by a new version.
    fn replace(
        &self,
        old: pg_sys::HeapTuple,
        change: impl Fn(pg_sys::HeapTuple, &Fields) -> Option<pg_sys::HeapTuple>,
    ) -> (bool, bool) {
        loop {
            // SAFETY: the scan's current tuple
            let mut seen = unsafe { Seen::copy(self.table, old) };
            let fields = seen.fields(self.table);
            let Some(new) = change(&mut seen.tuple(), &fields) else {
                return (false, false);
            };
            // SAFETY: a tuple of the table
            match unsafe { seen.overwrite(self.table, new) } {
                Overwritten::Done => return (true, false),
                Overwritten::Changed => {}
                Overwritten::OtherSize | Overwritten::BeingChanged => {
                    // SAFETY: the place of the scan's current tuple. Raises where it is being changed
                    unsafe { pg_sys::CatalogTupleUpdate(self.table, &mut (*old).t_self, new) };
                    return (true, true);
                }
            }
        }
    }
}

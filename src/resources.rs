//! Resources: from a name to its entry in the shared table, from the ledger where the table has none.
//!
//! Race that the order here excludes: somebody reads a ledger row, then the resource is granted,
//! released and its entry reclaimed, and only then the old row would be put into the table. The
//! table's generation is read before the ledger, and the insertion is refused if it has changed.

use std::rc::Rc;

use leasehold_core::name;
use leasehold_core::record::{Record, Remembered, Standing};

use crate::errors::{self, Answer, Refusal, code};
use crate::ledger::{self, Row};
use crate::pg::{self, Oid};
use crate::table::{self, Bytes, Database, Entry, Holding, Insert, Key};
use crate::{marks, settings, tokens};

/// A resource in this database, with a checked name.
#[derive(Clone, Debug)]
pub struct Resource {
    /// 1 to 255 bytes.
    pub name: Rc<[u8]>,
    /// `leasehold_core::name::hash` of it.
    pub hash: u64,
    /// The ledger's OID.
    pub ledger: Oid,
}

/// Where an entry was found.
pub enum Found {
    /// In the shared table: it can be changed there.
    Shared(Entry),
    /// In the ledger only, with the table full of live leases.
    NoRoom(Entry),
    /// Nowhere: never granted, as far as anyone knows.
    Nowhere,
}

impl Found {
    /// What was found, or an entry that knows nothing.
    pub fn entry(self) -> Entry {
        match self {
            Found::Shared(entry) | Found::NoRoom(entry) => entry,
            Found::Nowhere => unknown(),
        }
    }
}

fn unknown() -> Entry {
    Entry::new(Record::unknown(pg::clock::now_us()), Holding::NONE)
}

impl Resource {
    /// Checks a name. 22004, 22023, 22001; 55000 without the extension.
    pub fn named(name: Option<Rc<[u8]>>) -> Answer<Resource> {
        let name = name.ok_or_else(|| errors::null_argument("resource"))?;
        check_name(&name)?;
        let hash = name::hash(&name);
        Ok(Resource {
            name,
            hash,
            ledger: ledger::oid()?,
        })
    }

    /// The key in the shared table.
    pub fn key(&self) -> Key<'_> {
        table::key(self.ledger, self.hash, &self.name)
    }

    /// The name for a message.
    pub fn shown(&self) -> String {
        errors::shown(&self.name)
    }

    /// Looks the resource up, and brings what the ledger knows of it into the shared table.
    pub fn find(&self, database: &Database) -> Answer<Found> {
        loop {
            if let Some(entry) = table::read(self.key(), |entry| *entry) {
                return Ok(Found::Shared(entry));
            }
            let generation = table::generation(self.hash);
            let Some(row) = ledger::read(self.ledger, &self.name)? else {
                return Ok(Found::Nowhere);
            };
            let entry = recovered(&row, database);
            match table::insert(self.key(), &entry, generation, pg::clock::now_us()) {
                Insert::Present if entry.record.due_mark().is_some() => {
                    table::want_marks(pg::database());
                }
                Insert::Present | Insert::Changed => {}
                Insert::Full => return Ok(Found::NoRoom(entry)),
            }
        }
    }

    /// As `find`, but there must be an entry that can be changed. LH006 when there is no room.
    pub fn open(&self, database: &Database) -> Answer<Entry> {
        loop {
            let generation = table::generation(self.hash);
            match self.find(database)? {
                Found::Shared(entry) => return Ok(entry),
                Found::NoRoom(_) if self.makes_room()? => continue,
                Found::NoRoom(_) => return Err(table_full()),
                Found::Nowhere => {}
            }
            let unknown = unknown();
            match table::insert(self.key(), &unknown, generation, pg::clock::now_us()) {
                Insert::Present => return Ok(unknown),
                Insert::Changed => {}
                Insert::Full if self.makes_room()? => {}
                Insert::Full => return Err(table_full()),
            }
        }
    }

    /// Whether a place can be had by telling the ledger what is over, which the worker has not done yet.
    fn makes_room(&self) -> Answer<bool> {
        Ok(!pg::read_only_transaction() && marks::make_room(self)?)
    }

    /// Looks without bringing anything into the shared table, for views and on a standby. True with
    /// an entry that only the ledger knows.
    pub fn peek(&self, database: Option<&Database>) -> Answer<Option<(Entry, bool)>> {
        if database.is_some()
            && let Some(entry) = table::read(self.key(), |entry| *entry)
        {
            return Ok(Some((entry, false)));
        }
        Ok(ledger::read(self.ledger, &self.name)?.map(|row| {
            let entry = match database {
                Some(database) => recovered(&row, database),
                None => replicated(&row),
            };
            (entry, true)
        }))
    }
}

/// What a ledger row means on this server, which is writable.
pub fn recovered(row: &Row, database: &Database) -> Entry {
    let ledger = database.ledger;
    let at_home = row.home == ledger::here();
    let since_start = row.token > database.floor;
    let lost = row.token <= database.lost_up_to || (database.lossy && !since_start);
    let standing = if !at_home || lost {
        Standing::Lost
    } else if !since_start && !pg::has_committed(row.granted_by) {
        // rolled back, or cut off by the crash: there is no such lease
        Standing::Lost
    } else if since_start || marks::was_over(ledger, row.token) {
        Standing::Reclaimed
    } else {
        Standing::Trusted
    };
    let released = row.released || marks::was_released(ledger, row.token);
    let writable_us = table::writable_since(pg::clock::now_us());
    entry_of(row, standing, released, writable_us)
}

/// What a ledger row means on a standby: the primary's clock is not known, so its lease runs until
/// it is released or superseded.
pub fn replicated(row: &Row) -> Entry {
    let standing = if row.home == ledger::here() && pg::has_committed(row.granted_by) {
        Standing::Trusted
    } else {
        Standing::Lost
    };
    entry_of(row, standing, row.released, pg::clock::now_us())
}

fn entry_of(row: &Row, standing: Standing, released: bool, writable_us: i64) -> Entry {
    let remembered = Remembered {
        token: row.token,
        ttl_us: row.ttl_us,
        released,
        // long before nothing is kept of its transaction the row of a lease that was broken is marked released
        broken: row.broken_by != 0 && pg::has_surely_committed(row.broken_by),
        standing,
    };
    let holding = Holding {
        holder: Bytes::new(&row.holder),
        role: row.role,
        pid: 0,
        granted_at: row.granted_at,
        renewed_at: 0,
        granted_by: 0,
        granted_after: 0,
        request: row.request,
    };
    let now_us = pg::clock::now_us();
    let mut record = Record::recovered(remembered, writable_us, now_us);
    // what this server knows of a release from its own file, a standby does not know
    record.row_open |= !row.released && standing != Standing::Lost;
    Entry::new(record, holding)
}

/// Whether bytes can name a resource.
pub fn check_name(name: &[u8]) -> Answer<()> {
    if name.is_empty() {
        return Err(errors::empty_name("resource"));
    }
    if name.len() > name::RESOURCE_BYTES_MAX {
        return Err(errors::resource_too_long(name.len()));
    }
    Ok(())
}

/// What is known of this database, for a call that needs the shared table on a primary.
pub fn database(ledger: Oid) -> Answer<Database> {
    tokens::database(ledger)
}

fn table_full() -> Refusal {
    let now = settings::max_leases();
    Refusal::new(code::TABLE_FULL, "the lease table is full of live leases")
        .detail(format!(
            "leasehold.max_leases is {now}; the table has {} places in all, and none that this resource can use is over.",
            table::slots()
        ))
        .hint(format!(
            "Release leases that are not needed, use shorter TTLs, or raise the setting and restart the server: leasehold.max_leases = {}",
            now.saturating_mul(2)
        ))
}

//! The shared table: one entry per resource, fixed in size when the server starts.
//!
//! Layout: a header, the databases, and partitions. A partition is one LWLock and a set of slots of
//! its own, chained into hash buckets. There are a quarter more slots than `max_leases`, and never
//! fewer than 1024 leases per partition on average, so a partition whose share is exceeded while the
//! table is not is eight standard deviations away. Entries whose lease is over are reclaimed where a
//! partition needs a slot; live ones and grants in progress never are.
//!
//! Protocol
//! - To look an entry up or read it: its partition's lock, shared. To change, create or reclaim one:
//!   exclusive. Two partitions are never locked at once; a partition's lock may be held when the
//!   databases' lock is taken, not the other way round.
//! - **Nothing under a held lock can raise an error, allocate, log or call SPI.** Callers pass closures
//!   that copy or do arithmetic.
//! - An entry made from the ledger is only inserted if nothing of the partition was reclaimed since
//!   before the ledger was read (`generation`): otherwise an older T_max could come back.
//! - Whatever changes an entry, the first of those who wait for the resource is woken where he would look too late
//!   by that (`change`). An entry that somebody waits for is not reclaimed.
//! - All pointers are set again by the startup hook, which runs again after a crash.
//!
//! The key is (database, OID of the ledger, resource): entries of an extension that was dropped and
//! created again can't be reached.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ffi::CStr;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicI64, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use leasehold_core::name::{HOLDER_BYTES_MAX, RESOURCE_BYTES_MAX};
use leasehold_core::queue::{Holds, Queue};
use leasehold_core::record::Record;
use leasehold_core::token::{Block, SharedBlock};
use pgrx::pg_sys;
use pgrx::{pg_guard, pg_shmem_init};

use crate::pg::lwlock::{Held, LwLock};
use crate::pg::shmem::Memory;
use crate::pg::waiters::{self, Waiter};
use crate::pg::{self, Oid};
use crate::{events, settings, stats, xact};

/// Name of the memory in `pg_shmem_allocations` and of the locks' wait event.
const NAME: &CStr = c"leasehold";
const PARTITIONS_MAX: usize = 4096;
const LEASES_PER_PARTITION: usize = 1024;
/// Databases that can use leasehold at once; what is over is reclaimed when the database is gone.
pub const DATABASES: usize = 512;
const NONE: u32 = u32::MAX;

/// What names a resource in the table.
#[derive(Clone, Copy)]
pub struct Key<'a> {
    /// The database.
    pub database: Oid,
    /// The OID of its `leasehold.ledger`.
    pub ledger: Oid,
    /// `leasehold_core::name::hash` of the resource.
    pub hash: u64,
    /// 1 to 255 bytes.
    pub resource: &'a [u8],
}

/// A short byte string in place.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Bytes<const N: usize> {
    len: u8,
    bytes: [u8; N],
}

impl<const N: usize> Bytes<N> {
    /// No bytes.
    pub const EMPTY: Self = Bytes {
        len: 0,
        bytes: [0; N],
    };

    /// The bytes, cut at N: lengths are checked where names come in.
    pub fn new(bytes: &[u8]) -> Self {
        let mut new = Self::EMPTY;
        let len = bytes.len().min(N).min(usize::from(u8::MAX));
        new.bytes[..len].copy_from_slice(&bytes[..len]);
        new.len = len as u8;
        new
    }

    /// Other bytes, cut at N.
    pub fn set(&mut self, bytes: &[u8]) {
        let len = bytes.len().min(N).min(usize::from(u8::MAX));
        self.bytes[..len].copy_from_slice(&bytes[..len]);
        self.len = len as u8;
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.len)).unwrap_or_default()
    }
}

/// Who holds a resource: for people and for the check of roles.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Holding {
    /// The role that the lease belongs to.
    pub role: Oid,
    /// The backend that acquired it; 0 when that was before the server started.
    pub pid: i32,
    /// Wall clock of the grant, for display.
    pub granted_at: i64,
    /// Wall clock of the last renewal, for display; 0 for none.
    pub renewed_at: i64,
    /// The transaction of the grant, by `pg::transaction_number`; 0 when that was before the start, or
    /// when the lease is in memory.
    pub granted_by: u64,
    /// The number that no transaction which had ended by then reaches, when it was granted in memory, by
    /// `pg::ended_transactions`.
    pub granted_after: u64,
    /// What the caller called the request, so that a retry of it is known; None where he did not.
    pub request: Option<Request>,
    /// The label.
    pub holder: Bytes<HOLDER_BYTES_MAX>,
}

/// The bytes of a `request uuid`.
pub type Request = [u8; 16];

impl Holding {
    /// Nobody.
    pub const NONE: Holding = Holding {
        holder: Bytes::EMPTY,
        role: 0,
        pid: 0,
        granted_at: 0,
        renewed_at: 0,
        granted_by: 0,
        granted_after: 0,
        request: None,
    };
}

/// How often a resource was asked for, since its entry was made or the last reset.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Contention {
    /// Grants.
    pub grants: u32,
    /// Acquires that answered NULL.
    pub denials: u32,
    /// Acquires that were refused with LH005.
    pub sheds: u32,
    /// Acquires that had to wait.
    pub waits: u32,
    /// How long, in all.
    pub waited_us: i64,
}

impl Contention {
    const NONE: Contention = Contention {
        grants: 0,
        denials: 0,
        sheds: 0,
        waits: 0,
        waited_us: 0,
    };

    /// How often somebody did not get it at once.
    pub fn all(&self) -> u64 {
        u64::from(self.denials) + u64::from(self.sheds) + u64::from(self.waits)
    }
}

/// One resource.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Entry {
    /// Decides everything.
    pub record: Record,
    /// Who waits for it.
    pub queue: Queue,
    /// How long it is held.
    pub holds: Holds,
    /// Since when the last lease runs, or ran; where its end was not noted yet in `holds`. 0 otherwise.
    pub held_since_us: i64,
    /// How much it is wanted.
    pub contention: Contention,
    /// Where the lease is counted: a place among the header's numbers, or [`NOT_COUNTED`].
    counted: u16,
    /// The server log says which prepared transaction holds the resource up.
    pub is_hold_up_reported: bool,
    /// Of the lease of `record.t_max`.
    pub holding: Holding,
}

impl Entry {
    /// An entry that nothing else is known of yet.
    pub const fn new(record: Record, holding: Holding) -> Entry {
        Entry {
            record,
            holding,
            queue: Queue::EMPTY,
            holds: Holds::UNKNOWN,
            held_since_us: 0,
            contention: Contention::NONE,
            counted: NOT_COUNTED,
            is_hold_up_reported: false,
        }
    }

    /// Counts the lease among those of its role, or no more. After every change.
    fn count(&mut self, database: Oid) {
        let place = if self.record.is_held() {
            role_place(database, self.holding.role)
        } else {
            NOT_COUNTED
        };
        self.count_in(place);
    }

    /// Counts the lease in a place, and no more where it was counted.
    fn count_in(&mut self, place: u16) {
        if place != self.counted {
            let numbers = held_numbers();
            if let Some(number) = numbers.get(usize::from(self.counted)) {
                number.fetch_sub(1, Ordering::Relaxed);
            }
            if let Some(number) = numbers.get(usize::from(place)) {
                number.fetch_add(1, Ordering::Relaxed);
            }
            self.counted = place;
        }
    }

    /// The lease that a request was granted before, if it lives: its token and its role. `owner`: the transaction that
    /// asks again.
    pub fn granted_before(
        &self,
        request: Option<Request>,
        owner: u64,
        now_us: i64,
    ) -> Option<(i64, Oid)> {
        let record = &self.record;
        let is_own = record.grant.owner == owner && record.grant.token != 0;
        (request.is_some()
            && self.holding.request == request
            && (record.is_usable(now_us) || is_own))
            .then_some((record.t_max, self.holding.role))
    }

    /// The lease runs from now on.
    pub fn hold_begins(&mut self, now_us: i64) {
        self.held_since_us = now_us;
    }

    /// How long the lease has been held by that instant, if it has not been noted yet.
    pub fn held_us(&self, at_us: i64) -> Option<i64> {
        (self.held_since_us != 0).then(|| at_us.saturating_sub(self.held_since_us).max(0))
    }

    /// It was released. Where somebody waits, it is noted with the next grant, which comes a little later.
    pub fn hold_is_released(&mut self, now_us: i64) {
        if self.queue.is_empty() {
            self.hold_ends(now_us);
        }
    }

    /// It has ended, at that instant.
    pub fn hold_ends(&mut self, at_us: i64) {
        if self.held_since_us != 0 {
            self.holds.note(at_us.saturating_sub(self.held_since_us));
            self.held_since_us = 0;
        }
    }

    /// The process that has its turn and waits for old transactions to end: who drains without a wait of his own
    /// leaves no mark.
    fn drainer(&self) -> Option<i32> {
        let grant = &self.record.grant;
        (grant.token == 0 && grant.attended_us != 0).then(|| xact::pid_of(grant.owner))
    }

    /// How many wait for it: in the queue, and the one who has his turn and drains.
    pub fn waiters(&self) -> i32 {
        let queued = i32::try_from(self.queue.len()).unwrap_or(i32::MAX);
        queued.saturating_add(i32::from(self.drainer().is_some()))
    }

    /// Who waits to be told the answer to the request that the lease was granted to.
    pub fn retrier(&self) -> Option<u32> {
        let request = self.holding.request?;
        let mut next = self.queue.first();
        while let Some(number) = next {
            let waiter = waiters::read(number);
            if waiter.request == Some(request) {
                break;
            }
            next = waiter.behind();
        }
        next
    }

    /// Who must be woken, because he would look too late for his turn.
    fn ring(&self, database: Oid) -> Option<u32> {
        if self.queue.is_empty() {
            return None;
        }
        let grace_us = with_known_database(database, |known| known.grace_until_us).unwrap_or(0);
        let next_us = self.record.could_be_had_us(pg::clock::now_us());
        let next_us = next_us.max(grace_us);
        self.queue.ring(&mut waiters::All, next_us)
    }
}

/// Numbers of leases by role: roles that share one are counted together.
const ROLES: usize = 4096;
const NOT_COUNTED: u16 = u16::MAX;

/// Which number a role's leases are counted in.
fn role_place(database: Oid, role: Oid) -> u16 {
    let key = (u64::from(database) << 32 | u64::from(role)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (key >> 52) as u16
}

fn held_numbers() -> &'static [AtomicU32; ROLES] {
    // SAFETY: the header lives as long as the process
    unsafe { &(*header()).held }
}

/// How many leases a role holds, or more: those that ran out and were not taken over are counted, and those of other
/// roles may be.
pub fn held_at_most(database: Oid, role: Oid) -> u32 {
    let place = usize::from(role_place(database, role));
    held_numbers()[place].load(Ordering::Relaxed)
}

/// How many live leases a role holds, and grants in progress. Those that ran out are not counted any more, so that
/// the next one need not look again.
pub fn held_by(database: Oid, ledger: Oid, role: Oid, now_us: i64) -> u32 {
    let mut held = 0;
    change_all((database, ledger), |entry| {
        let record = &entry.record;
        let is_held = record.grant.token != 0 || record.is_live(now_us);
        held += u32::from(is_held && entry.holding.role == role);
        if record.grant.owner == 0 && record.has_run_out(now_us) {
            entry.count_in(NOT_COUNTED);
        }
    });
    held
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Slot {
    /// Next slot of the bucket's chain, or of the free list.
    next: u32,
    /// 0 in a free slot.
    database: Oid,
    ledger: Oid,
    hash: u64,
    /// Behind these, where a short one shares their cache line.
    resource: Bytes<RESOURCE_BYTES_MAX>,
    entry: Entry,
}

#[repr(C)]
struct Partition {
    /// How many entries were ever reclaimed.
    generation: u64,
    /// First free slot.
    free: u32,
    /// Where the search for a slot to reclaim goes on.
    hand: u32,
}

/// What is known of a database since the server started.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Database {
    /// 0 in an unused place.
    pub oid: Oid,
    /// The ledger that the rest is about; 0 until it is known.
    pub ledger: Oid,
    /// Where its tokens are.
    pub place: u32,
    /// A block of tokens was taken since the server started.
    pub has_had_block: bool,
    /// The highest token reserved since the server started, whatever the ledger.
    pub handed: i64,
    /// The highest token that can have been handed out before.
    pub floor: i64,
    /// The ledger that was known before this one, and its floor: it comes back where a DROP EXTENSION is undone.
    pub before: (Oid, i64),
    /// The highest T_max that was forgotten since and that the ledger does not hold.
    pub forgotten: i64,
    /// The ledger's timeline is not this server's: it was promoted.
    pub promoted: bool,
    /// It was, and may lack the last grants.
    pub lossy: bool,
    /// Nothing is granted before this instant; 0 for none.
    pub grace_until_us: i64,
    /// The longest TTL in memory that is durably known to have been granted.
    pub memory_ttl_us: i64,
    /// The longest TTL that the ledger has ever seen.
    pub longest_ttl_us: i64,
    /// Leases of tokens up to this one were lost with an earlier promotion.
    pub lost_up_to: i64,
    /// The ledger names this server, database and timeline as its own.
    pub is_home: bool,
    /// Releases are waiting to be marked in the ledger.
    pub marks_wanted: bool,
    /// It is time to look for old rows in the ledger.
    pub sweep_wanted: bool,
    /// Events up to this number were told on the channel, or are not to be.
    pub told_up_to: u64,
    /// Events up to this number are to be.
    pub tell_up_to: u64,
    /// Its worker has been started and has not connected yet. One that stays so could not: the database has
    /// been dropped, most likely.
    pub is_connecting: bool,
}

impl Database {
    /// Tokens at or below this are good for nothing unless they are somebody's T_max.
    pub fn stale_floor(&self) -> i64 {
        self.floor.max(self.forgotten)
    }

    const UNUSED: Database = Database {
        oid: 0,
        ledger: 0,
        place: 0,
        has_had_block: false,
        handed: 0,
        floor: 0,
        before: (0, 0),
        forgotten: 0,
        promoted: false,
        lossy: false,
        grace_until_us: 0,
        memory_ttl_us: 0,
        longest_ttl_us: 0,
        lost_up_to: 0,
        is_home: false,
        marks_wanted: false,
        sweep_wanted: false,
        told_up_to: 0,
        tell_up_to: 0,
        is_connecting: false,
    };
}

/// What every grant of a database needs, without a lock.
#[repr(C)]
struct Tokens {
    /// Of the ledger.
    block: SharedBlock,
    /// The end of the WAL that leases in memory rely on: that marks rows of the ledger as released, or deletes
    /// them, or makes this server the ledger's. None is granted before that is on disk, and on the standby.
    marked_lsn: AtomicU64,
}

#[repr(C)]
struct Header {
    /// When the server became writable, as far as known; 0 until then.
    writable_us: AtomicI64,
    /// Keeps the choice of a partition out of the hands of those who choose names.
    seed: u64,
    /// The static worker's latch; null while it does not run.
    worker: AtomicPtr<pg_sys::Latch>,
    /// Counts the changes of the databases, so that a backend need not look at them again and again.
    changes: AtomicU64,
    databases: [Database; DATABASES],
    /// How many leases are held, by [`role_place`].
    held: [AtomicU32; ROLES],
    /// By the databases' places.
    tokens: [Tokens; DATABASES],
}

// SAFETY: writes all of it that is read later
static MEMORY: Memory = unsafe { Memory::new(NAME, || Geometry::current().total(), begin) }
    .with_locks(|| Geometry::current().locks())
    .and_then(crate::marks::at_startup);

/// Sizes that follow from `max_leases`, which cannot change while the server runs.
#[derive(Clone, Copy)]
struct Geometry {
    partitions: usize,
    slots: usize,
    buckets: usize,
}

/// Partitions, slots, buckets: the same in every process of a server.
static GEOMETRY: [AtomicUsize; 3] = [const { AtomicUsize::new(0) }; 3];

impl Geometry {
    fn of(max_leases: usize) -> Geometry {
        let share = (max_leases / LEASES_PER_PARTITION).clamp(1, PARTITIONS_MAX);
        let partitions = if share.is_power_of_two() {
            share
        } else {
            share.next_power_of_two() / 2
        };
        let slots = (max_leases + max_leases / 4).div_ceil(partitions).max(2);
        Geometry {
            partitions,
            slots,
            buckets: slots.next_power_of_two(),
        }
    }

    /// As it was computed by the startup hook, or anew before.
    fn current() -> Geometry {
        let [partitions, slots, buckets] = [0, 1, 2].map(|i| GEOMETRY[i].load(Ordering::Relaxed));
        if partitions == 0 {
            return Geometry::of(settings::max_leases());
        }
        Geometry {
            partitions,
            slots,
            buckets,
        }
    }

    fn note(self) {
        let numbers = [self.partitions, self.slots, self.buckets];
        for (place, number) in GEOMETRY.iter().zip(numbers) {
            place.store(number, Ordering::Relaxed);
        }
    }

    fn heads_offset(self) -> usize {
        size_of::<Partition>()
    }

    fn slots_offset(self) -> usize {
        (self.heads_offset() + self.buckets * size_of::<u32>()).next_multiple_of(64)
    }

    fn partition_size(self) -> usize {
        (self.slots_offset() + self.slots * size_of::<Slot>()).next_multiple_of(64)
    }

    fn partitions_offset(self) -> usize {
        size_of::<Header>().next_multiple_of(64)
    }

    fn total(self) -> usize {
        self.partitions_offset() + self.partitions * self.partition_size()
    }

    /// One per partition, and the last for the databases.
    fn locks(self) -> usize {
        self.partitions + 1
    }
}

/// Asks for the memory. Only while preloading, after the settings are defined.
pub fn register() {
    pg_shmem_init!(MEMORY = ());
}

/// # Safety
/// `memory` is as large as the geometry says.
unsafe fn begin(memory: *mut u8) {
    let geometry = Geometry::of(settings::max_leases());
    geometry.note();
    // SAFETY: by the caller
    unsafe { initialise(memory.cast(), geometry) };
}

/// # Safety
/// `header` is fresh memory of `geometry.total()` bytes that no one else sees yet.
unsafe fn initialise(header: *mut Header, geometry: Geometry) {
    // SAFETY: all addresses are inside the memory by the geometry; every byte that is read later is
    // written here
    unsafe {
        (&raw mut (*header).writable_us).write(AtomicI64::new(0));
        (&raw mut (*header).seed).write(RandomState::new().hash_one(0));
        (&raw mut (*header).worker).write(AtomicPtr::new(std::ptr::null_mut()));
        (&raw mut (*header).changes).write(AtomicU64::new(1));
        for i in 0..ROLES {
            (&raw mut (*header).held[i]).write(AtomicU32::new(0));
        }
        for i in 0..DATABASES {
            (&raw mut (*header).databases[i]).write(Database::UNUSED);
            (&raw mut (*header).tokens[i]).write(Tokens {
                block: SharedBlock::none(),
                marked_lsn: AtomicU64::new(0),
            });
        }
        for p in 0..geometry.partitions {
            let view = View::at(header, geometry, p);
            view.partition.write(Partition {
                generation: 0,
                free: 0,
                hand: 0,
            });
            for bucket in 0..geometry.buckets {
                view.heads.add(bucket).write(NONE);
            }
            for slot in 0..geometry.slots {
                let next = if slot + 1 < geometry.slots {
                    slot as u32 + 1
                } else {
                    NONE
                };
                view.slots.add(slot).write(Slot {
                    next,
                    database: 0,
                    ledger: 0,
                    hash: 0,
                    entry: Entry::new(Record::UNKNOWN, Holding::NONE),
                    resource: Bytes::EMPTY,
                });
            }
        }
    }
}

/// The last lock is that of the databases.
fn databases_lock() -> LwLock {
    MEMORY.lock(Geometry::current().locks() - 1)
}

/// Whether the shared table is there: the library was preloaded.
pub fn is_ready() -> bool {
    !MEMORY.start().is_null()
}

fn header() -> *mut Header {
    let header = MEMORY.start();
    assert!(!header.is_null(), "the shared table is not there");
    header.cast()
}

/// Addresses of one partition.
#[derive(Clone, Copy)]
struct View {
    geometry: Geometry,
    partition: *mut Partition,
    heads: *mut u32,
    slots: *mut Slot,
}

impl View {
    /// # Safety
    /// `header` is the start of the shared memory and `index` a partition of the geometry.
    unsafe fn at(header: *mut Header, geometry: Geometry, index: usize) -> View {
        // SAFETY: inside the memory by the geometry
        unsafe {
            let base = header
                .cast::<u8>()
                .add(geometry.partitions_offset() + index * geometry.partition_size());
            View {
                geometry,
                partition: base.cast(),
                heads: base.add(geometry.heads_offset()).cast(),
                slots: base.add(geometry.slots_offset()).cast(),
            }
        }
    }

    fn head(&self, hash: u64) -> *mut u32 {
        let bucket = (hash as usize) & (self.geometry.buckets - 1);
        // SAFETY: `buckets` is a power of two and the number of heads
        unsafe { self.heads.add(bucket) }
    }

    fn slot(&self, index: u32) -> *mut Slot {
        debug_assert!((index as usize) < self.geometry.slots);
        // SAFETY: indices in the chains are those of `initialise`
        unsafe { self.slots.add(index as usize) }
    }

    /// The slots that hold resources of a ledger, while the partition's lock is held.
    fn slots_of(&self, of: (Oid, Oid)) -> impl Iterator<Item = &Slot> {
        (0..self.geometry.slots as u32)
            // SAFETY: the lock is held; nobody changes the slot, but for a number that is looked at by itself
            .map(|index| unsafe { &*self.slot(index) })
            .filter(move |slot| (slot.database, slot.ledger) == of)
    }

    fn find(&self, key: Key) -> Option<u32> {
        // SAFETY: the partition's lock is held; chains are finite and end in NONE
        unsafe {
            let mut index = *self.head(key.hash);
            while index != NONE {
                let slot = &*self.slot(index);
                if slot.hash == key.hash
                    && slot.database == key.database
                    && slot.ledger == key.ledger
                    && slot.resource.as_slice() == key.resource
                {
                    return Some(index);
                }
                index = slot.next;
            }
            None
        }
    }

    /// Takes a slot out of its chain.
    fn unlink(&self, index: u32) {
        // SAFETY: the lock is held exclusively; the slot is in the chain of its hash
        unsafe {
            let mut link = self.head((*self.slot(index)).hash);
            while *link != NONE {
                if *link == index {
                    *link = (*self.slot(index)).next;
                    return;
                }
                link = &raw mut (*self.slot(*link)).next;
            }
        }
    }

    /// A slot for a new entry: a free one, or one whose lease is over; best one whose end the ledger
    /// knows and that nobody wants.
    fn vacate(&self, now_us: i64) -> Option<u32> {
        // SAFETY: the lock is held exclusively
        unsafe {
            let partition = &mut *self.partition;
            if partition.free != NONE {
                let index = partition.free;
                partition.free = (*self.slot(index)).next;
                return Some(index);
            }
            let mut second_best = None;
            let mut found = None;
            for _ in 0..self.geometry.slots {
                let index = partition.hand;
                partition.hand = if (index as usize) + 1 < self.geometry.slots {
                    index + 1
                } else {
                    0
                };
                let entry = &(*self.slot(index)).entry;
                if entry.record.is_evictable(now_us) && entry.queue.is_empty() {
                    if entry.record.due_mark().is_none() && !entry.record.contested {
                        found = Some(index);
                        break;
                    }
                    second_best = second_best.or(Some(index));
                }
            }
            let index = found.or(second_best)?;
            let slot = &*self.slot(index);
            if slot.entry.record.is_beyond_the_ledger() {
                raise_forgotten(slot.database, slot.ledger, slot.entry.record.t_max);
            }
            self.unlink(index);
            if let Some(number) = held_numbers().get(usize::from(slot.entry.counted)) {
                number.fetch_sub(1, Ordering::Relaxed);
            }
            if slot.entry.record.has_run_out(now_us) {
                events::ran_out(
                    slot.database,
                    slot.ledger,
                    slot.resource.as_slice(),
                    &slot.entry,
                );
            }
            partition.generation = partition.generation.wrapping_add(1);
            Some(index)
        }
    }
}

/// A partition under its lock. The lock goes when this does.
struct Locked {
    view: View,
    _held: Held,
}

fn partition_of(geometry: Geometry, hash: u64) -> usize {
    // SAFETY: written once, before anyone else sees the memory
    let seed = unsafe { (*header()).seed };
    // the finalizer of MurmurHash3, public domain: every bit depends on every bit
    let mut mixed = hash ^ seed;
    for factor in [0xFF51_AFD7_ED55_8CCD_u64, 0xC4CE_B9FE_1A85_EC53] {
        mixed = (mixed ^ (mixed >> 33)).wrapping_mul(factor);
    }
    (mixed >> 40) as usize & (geometry.partitions - 1)
}

fn locked(hash: u64, exclusive: bool) -> Locked {
    let geometry = Geometry::current();
    let index = partition_of(geometry, hash);
    locked_partition(geometry, index, exclusive)
}

fn locked_partition(geometry: Geometry, index: usize, exclusive: bool) -> Locked {
    let lock = MEMORY.lock(index);
    // SAFETY: the header is the start of the memory; the index is below the number of partitions
    let view = unsafe { View::at(header(), geometry, index) };
    let held = if exclusive {
        lock.exclusive()
    } else {
        lock.share()
    };
    Locked { view, _held: held }
}

/// All partitions, one after the other under its shared lock.
fn partitions() -> impl Iterator<Item = Locked> {
    let geometry = Geometry::current();
    (0..geometry.partitions).map(move |index| locked_partition(geometry, index, false))
}

/// Reads the entry of a resource, under the shared lock.
pub fn read<R>(key: Key, look: impl FnOnce(&Entry) -> R) -> Option<R> {
    let locked = locked(key.hash, false);
    let index = locked.view.find(key)?;
    // SAFETY: the lock is held; nobody changes the slot
    Some(look(unsafe { &(*locked.view.slot(index)).entry }))
}

/// Whether the entry of a resource, under the shared lock, refuses who asks for it; counts it if so.
pub fn refuses(key: Key, refuses: impl FnOnce(&Entry) -> bool) -> bool {
    let locked = locked(key.hash, false);
    let Some(index) = locked.view.find(key) else {
        return false;
    };
    // SAFETY: the lock is held; nobody changes the slot, but for this one number, which all change like this
    unsafe {
        let entry = &raw mut (*locked.view.slot(index)).entry;
        let is_refused = refuses(&*entry);
        if is_refused {
            AtomicU32::from_ptr(&raw mut (*entry).contention.denials)
                .fetch_add(1, Ordering::Relaxed);
        }
        is_refused
    }
}

/// Changes the entry of a resource, under the exclusive lock, and wakes who waits for what has come about.
pub fn change<R>(key: Key, change: impl FnOnce(&mut Entry) -> R) -> Option<R> {
    let locked = locked(key.hash, true);
    let index = locked.view.find(key)?;
    // SAFETY: the lock is held exclusively; this is the only reference
    let entry = unsafe { &mut (*locked.view.slot(index)).entry };
    let result = change(entry);
    entry.count(key.database);
    let late = entry.ring(key.database);
    drop(locked);
    if let Some(late) = late {
        waiters::wake(late);
    }
    Some(result)
}

/// Whether another resource of this database has the same hash, so that a lock of it says nothing of this one.
pub fn has_twin(key: Key) -> bool {
    let locked = locked(key.hash, false);
    let view = &locked.view;
    // SAFETY: the lock is held; chains are finite and end in NONE
    unsafe {
        let mut index = *view.head(key.hash);
        while index != NONE {
            let slot = &*view.slot(index);
            let is_here = slot.hash == key.hash && slot.database == key.database;
            if is_here && slot.resource.as_slice() != key.resource {
                return true;
            }
            index = slot.next;
        }
    }
    false
}

/// A number that changes whenever an entry near this resource is reclaimed. To be read before the
/// ledger is.
pub fn generation(hash: u64) -> u64 {
    let locked = locked(hash, false);
    // SAFETY: the lock is held
    unsafe { (*locked.view.partition).generation }
}

/// The answer to [`insert`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Insert {
    /// The entry is there now (or was already).
    Present,
    /// Something was reclaimed since the generation was read: read the ledger again.
    Changed,
    /// The partition is full of live leases.
    Full,
}

/// Makes an entry of what the ledger said, if it is still what the ledger says.
pub fn insert(key: Key, entry: &Entry, generation: u64, now_us: i64) -> Insert {
    let resource = Bytes::new(key.resource);
    let locked = locked(key.hash, true);
    if locked.view.find(key).is_some() {
        return Insert::Present;
    }
    // SAFETY: the lock is held exclusively
    unsafe {
        if (*locked.view.partition).generation != generation {
            return Insert::Changed;
        }
        let Some(index) = locked.view.vacate(now_us) else {
            return Insert::Full;
        };
        let head = locked.view.head(key.hash);
        locked.view.slot(index).write(Slot {
            next: *head,
            database: key.database,
            ledger: key.ledger,
            hash: key.hash,
            entry: *entry,
            resource,
        });
        (*locked.view.slot(index)).entry.count(key.database);
        *head = index;
    }
    Insert::Present
}

/// A resource and its entry.
pub type Named = (Bytes<RESOURCE_BYTES_MAX>, Entry);

/// Copies of all entries of a ledger, partition by partition.
pub fn entries(database: Oid, ledger: Oid) -> Vec<Named> {
    let geometry = Geometry::current();
    let mut all = Vec::new();
    for index in 0..geometry.partitions {
        // room for every slot of the partition, so that nothing is allocated under the lock
        all.reserve(geometry.slots);
        let locked = locked_partition(geometry, index, false);
        let slots = locked.view.slots_of((database, ledger));
        all.extend(slots.map(|slot| (slot.resource, slot.entry)));
    }
    all
}

/// A resource, a place in its queue from 1 on, and who waits there. Who has his turn and drains is still the first.
pub type Queued = (Bytes<RESOURCE_BYTES_MAX>, i32, Waiter);

/// All who wait for resources of a ledger.
pub fn waiters(database: Oid, ledger: Oid) -> Vec<Queued> {
    // room for all there can be, so that nothing is allocated under the lock
    let mut all = Vec::with_capacity(waiters::most());
    for locked in partitions() {
        for slot in locked.view.slots_of((database, ledger)) {
            let mut next = slot.entry.queue.first();
            let mut position = 0;
            let drainer = slot.entry.drainer().and_then(waiters::read_of);
            if let Some(waiter) = drainer.filter(|_| all.len() < all.capacity()) {
                position += 1;
                all.push((slot.resource, position, waiter));
            }
            while let Some(number) = next
                && all.len() < all.capacity()
            {
                let waiter = waiters::read(number);
                position += 1;
                all.push((slot.resource, position, waiter));
                next = waiter.behind();
            }
        }
    }
    all
}

/// Forgets how much the resources of a ledger were wanted.
pub fn reset_contention(database: Oid, ledger: Oid) {
    change_all((database, ledger), |entry| {
        entry.contention = Contention::NONE;
    });
}

/// Changes what is no transition of the record, in every entry of a ledger, one partition after the other under its
/// exclusive lock.
fn change_all(of: (Oid, Oid), mut change: impl FnMut(&mut Entry)) {
    let geometry = Geometry::current();
    for index in 0..geometry.partitions {
        let locked = locked_partition(geometry, index, true);
        for slot in 0..geometry.slots {
            // SAFETY: the lock is held exclusively; this is the only reference
            let slot = unsafe { &mut *locked.view.slot(slot as u32) };
            if (slot.database, slot.ledger) == of {
                change(&mut slot.entry);
            }
        }
    }
}

/// Names up to `most` releases of a ledger that it has not been told of: resource and token. Not those of
/// resources that are being granted, whose rows are being written.
pub fn due_marks(database: Oid, ledger: Oid, most: usize) -> Vec<(Bytes<RESOURCE_BYTES_MAX>, i64)> {
    let geometry = Geometry::current();
    let mut due = Vec::with_capacity(most);
    for index in 0..geometry.partitions {
        due_marks_of(index, (database, ledger), most, &mut due);
    }
    due
}

/// The same, of those alone that share their places with a resource.
pub fn due_marks_beside(key: Key, most: usize) -> Vec<(Bytes<RESOURCE_BYTES_MAX>, i64)> {
    let mut due = Vec::with_capacity(most);
    let index = partition_of(Geometry::current(), key.hash);
    due_marks_of(index, (key.database, key.ledger), most, &mut due);
    due
}

/// Adds those of a partition, as long as there is room for them.
fn due_marks_of(
    index: usize,
    of: (Oid, Oid),
    most: usize,
    due: &mut Vec<(Bytes<RESOURCE_BYTES_MAX>, i64)>,
) {
    let geometry = Geometry::current();
    let locked = locked_partition(geometry, index, false);
    let marks = locked
        .view
        .slots_of(of)
        .filter_map(|slot| Some((slot.resource, slot.entry.record.due_mark()?)));
    // callers have made room for so many
    due.extend(marks.take(most.saturating_sub(due.len())));
}

/// The databases that were used. Without locks: only for the postmaster, when all other processes are
/// gone.
pub fn databases_at_shutdown() -> Vec<Database> {
    // SAFETY: the memory is still there; nobody else is
    let databases = unsafe { &(*header()).databases };
    let used = databases.iter().filter(|d| d.oid != 0 && d.ledger != 0);
    used.copied().collect()
}

/// The entries of a ledger. Without locks, as above.
pub fn entries_at_shutdown(database: Oid, ledger: Oid) -> Vec<Entry> {
    let geometry = Geometry::current();
    let mut entries = Vec::new();
    for index in 0..geometry.partitions {
        // SAFETY: the memory is still there; nobody else is
        let view = unsafe { View::at(header(), geometry, index) };
        entries.extend(view.slots_of((database, ledger)).map(|slot| slot.entry));
    }
    entries
}

/// Has the worker mark releases of a database. Cheap when it is going to anyway; cannot fail.
pub fn want_marks(oid: Oid) {
    if with_known_database(oid, |known| known.marks_wanted) == Some(true) {
        return;
    }
    database(oid, |known| known.marks_wanted = true);
    wake_worker();
}

/// Has the worker look for old rows of a database.
pub fn want_sweep(oid: Oid) {
    database(oid, |known| known.sweep_wanted = true);
    wake_worker();
}

/// Has the worker of a database tell of its events after `from` up to `up_to`.
pub fn want_telling(oid: Oid, from: u64, up_to: u64) {
    database(oid, |known| {
        known.told_up_to = known.told_up_to.max(from);
        known.tell_up_to = up_to;
    });
}

/// Has the worker look for old rows in every database that was used since the start and is there.
pub fn want_sweeps() {
    let held = databases_lock().exclusive();
    // SAFETY: the lock is held exclusively; this is the only reference
    let databases = unsafe { &mut (*header()).databases };
    let used = databases.iter_mut().filter(|d| d.oid != 0 && d.ledger != 0);
    used.for_each(|d| d.sweep_wanted = !d.is_connecting);
    note_change();
    drop(held);
}

/// The databases that `wanted` picks.
pub fn databases_where(wanted: impl Fn(&Database) -> bool) -> Vec<Oid> {
    let mut all = Vec::with_capacity(DATABASES);
    let held = databases_lock().share();
    // SAFETY: the lock is held
    let databases = unsafe { &(*header()).databases };
    all.extend(
        databases
            .iter()
            .filter(|d| d.oid != 0 && wanted(d))
            .map(|d| d.oid),
    );
    drop(held);
    all
}

/// Announces the static worker to those who wake it, or takes it off (null).
pub fn set_worker(latch: *mut pg_sys::Latch) {
    // SAFETY: the header lives as long as the process
    unsafe { &(*header()).worker }.store(latch, Ordering::Release);
}

fn wake_worker() {
    // SAFETY: a latch in a process slot of shared memory, which stays valid when its process ends
    unsafe {
        let latch = (*header()).worker.load(Ordering::Acquire);
        if !latch.is_null() {
            pg_sys::SetLatch(latch);
        }
    }
}

/// Notes that the server has been writable since then at the latest; the first note counts.
pub fn writable_since(now_us: i64) -> i64 {
    // SAFETY: the header lives as long as the process
    let writable = unsafe { &(*header()).writable_us };
    match writable.compare_exchange(0, now_us, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => now_us,
        Err(noted) => noted,
    }
}

/// Changes what is known of a database, under the databases' lock; makes a place for it where there
/// is none. None when all places are taken: see [`forget_databases`].
pub fn database<R>(oid: Oid, change: impl FnOnce(&mut Database) -> R) -> Option<R> {
    let held = databases_lock().exclusive();
    // SAFETY: the lock is held exclusively; this is the only reference
    let databases = unsafe { &mut (*header()).databases };
    let place = databases
        .iter()
        .position(|d| d.oid == oid)
        .or_else(|| databases.iter().position(|d| d.oid == 0))?;
    let database = databases.get_mut(place)?;
    if database.oid != oid {
        stats::forget(place as u32);
    }
    database.oid = oid;
    database.place = place as u32;
    let result = change(database);
    note_change();
    drop(held);
    Some(result)
}

/// The databases were changed; their lock is held.
fn note_change() {
    // SAFETY: the header lives as long as the process
    unsafe { &(*header()).changes }.fetch_add(1, Ordering::Release);
}

fn tokens(known: &Database) -> &'static Tokens {
    // SAFETY: the header lives as long as the process; places are below the array's length
    unsafe { &(&(*header()).tokens)[known.place as usize % DATABASES] }
}

impl Database {
    /// The next token of this ledger's block, or None when it is used up; with it, the end of the WAL that leases
    /// in memory rely on. Neither errors nor allocates.
    pub fn take_token(&self) -> Option<(i64, u64)> {
        let tokens = tokens(self);
        let token = tokens.block.take(self.ledger)?;
        Some((token, tokens.marked_lsn.load(Ordering::Acquire)))
    }

    /// Whether the block has tokens.
    pub fn has_tokens(&self) -> bool {
        tokens(self).block.has_tokens(self.ledger)
    }

    /// A new block, above all before. For who changes the databases.
    pub fn set_block(&mut self, block: Block) {
        tokens(self).block.give(block);
        self.has_had_block = true;
        self.handed = self.handed.max(block.last);
    }

    /// No block, of another ledger. For who changes the databases.
    pub fn forget_block(&mut self, ledger: Oid) {
        tokens(self).block.hand_over(ledger);
    }

    /// Notes that leases in memory rely on the WAL up to there.
    pub fn raise_marked_lsn(&self, lsn: u64) {
        tokens(self).marked_lsn.fetch_max(lsn, Ordering::AcqRel);
    }
}

/// Notes that a T_max of a ledger is forgotten that is nowhere else. Neither errors nor allocates: a
/// partition's lock may be held.
pub fn raise_forgotten(oid: Oid, ledger: Oid, t_max: i64) {
    let held = databases_lock().exclusive();
    // SAFETY: the lock is held exclusively; this is the only reference
    let databases = unsafe { &mut (*header()).databases };
    let known = databases.iter_mut().find(|d| d.oid == oid);
    if let Some(known) = known.filter(|known| known.ledger == ledger) {
        known.forgotten = known.forgotten.max(t_max);
    }
    note_change();
    drop(held);
}

thread_local! {
    /// What was known of this backend's database, as of that change of the databases.
    static KNOWN: RefCell<(u64, Database)> = const { RefCell::new((0, Database::UNUSED)) };
}

/// What is known of a database: as this backend has seen it last, if nothing was changed since.
pub fn known_database(oid: Oid) -> Option<Database> {
    with_known_database(oid, |known| *known)
}

/// The same, without a copy. Neither raises nor allocates.
pub fn with_known_database<R>(oid: Oid, look: impl Fn(&Database) -> R) -> Option<R> {
    // SAFETY: the header lives as long as the process
    let changes = unsafe { &(*header()).changes };
    let is_new = |(seen, known): &(u64, Database)| {
        known.oid != oid || *seen != changes.load(Ordering::Acquire)
    };
    if KNOWN.with_borrow(is_new) {
        let held = databases_lock().share();
        let seen = changes.load(Ordering::Acquire);
        // SAFETY: the lock is held
        let databases = unsafe { &(*header()).databases };
        let known = databases.iter().find(|d| d.oid == oid).copied();
        drop(held);
        KNOWN.set((seen, known?));
    }
    Some(KNOWN.with_borrow(|(_, known)| look(known)))
}

/// Gives the place of a database back: it has been dropped.
pub fn forget_database(oid: Oid) {
    let held = databases_lock().exclusive();
    // SAFETY: the lock is held exclusively
    let databases = unsafe { &mut (*header()).databases };
    if let Some(database) = databases.iter_mut().find(|d| d.oid == oid) {
        *database = Database::UNUSED;
    }
    note_change();
    drop(held);
}

/// The key of a resource in this database.
pub fn key(ledger: Oid, hash: u64, resource: &[u8]) -> Key<'_> {
    Key {
        database: pg::database(),
        ledger,
        hash,
        resource,
    }
}

/// Memory of the whole table, for messages and documentation.
pub fn slots() -> usize {
    let geometry = Geometry::current();
    geometry.slots * geometry.partitions
}

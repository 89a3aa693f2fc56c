//! What this backend's transaction has to undo or complete: grants, releases, renewals, verdicts.
//!
//! - Everything belongs to a subtransaction. An aborted one drops what it did; a committed one hands
//!   it to its parent. Subtransactions nest, so what belongs to the innermost is at the end of a list.
//! - A grant becomes a lease at COMMIT, while this transaction still holds the fence. Releases and breaks, and
//!   the undoing of grants, wait until the locks are gone: the next holder must find the fence free, and know
//!   what else this transaction has changed. But a broken token is closed at COMMIT.
//! - Nothing in the callbacks after the commit or at an abort may fail.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::rc::Rc;

use crate::errors::{Answer, Refusal, code};
use crate::events::{Event, Kind};
use crate::pg::sessions::{self, Told};
use crate::pg::{self, Oid, waiters};
use crate::resources::Resource;
use crate::stats::{self, Count};
use crate::table::Entry;
use crate::{table, tokens};

/// A verdict that holds until its (sub)transaction ends: the fence is locked.
#[derive(Clone)]
pub struct Checked {
    /// The resource, to tell two of the same hash apart.
    pub resource: Rc<[u8]>,
    /// The token that was found good.
    pub token: i64,
    /// When its lease is over, as far as known when it was checked.
    pub deadline_us: i64,
    /// Presented for this resource by name: an own acquire, or `fence()`.
    pub named: bool,
    /// The role whose members may use the lease; None for this transaction's own grant.
    pub role: Option<Oid>,
    /// Current and session user whose membership was checked.
    pub users: (Oid, Oid),
}

struct Pending {
    resource: Resource,
    token: i64,
    owner: u64,
    subtransaction: u32,
    /// Of a grant: something of it is on disk, or will be with the commit.
    on_disk: bool,
    /// Of a grant: the last lease ran out.
    is_takeover: bool,
    /// Of an end: an administrator's.
    is_break: bool,
}

struct Undo {
    hash: u64,
    subtransaction: u32,
    before: Option<Checked>,
}

#[derive(Default)]
struct State {
    grants: Vec<Pending>,
    /// Leases that are released, or broken, with the commit.
    ends: Vec<Pending>,
    /// (lease, TTL that its ledger row now holds)
    lengthened: Vec<(Pending, i64)>,
    /// Resources whose ledger row was marked released.
    closed: Vec<Pending>,
    /// The longest TTL in memory that this transaction has raised a ledger's to. Not undone by an abort of a
    /// subtransaction: neither is what was written.
    memory_ttl: Option<(Oid, i64)>,
    /// The ledger that this transaction deletes rows of.
    deleting: Option<Oid>,
    checked: HashMap<u64, Checked, BuildHasherDefault<Prehashed>>,
    undo: Vec<Undo>,
    /// When the statement was received that acquired under a fixed snapshot.
    alone_since: Option<i64>,
    /// To be done once the locks are gone.
    grants_to_undo: Vec<Pending>,
    ends_to_do: Vec<Pending>,
    /// Takers may be waiting for the locks that go.
    wake_takers: bool,
}

impl State {
    /// Something that this transaction did counts only once it is on disk, and on the standby.
    fn needs_the_disk(&self) -> bool {
        self.memory_ttl.is_some()
            || self.ends.iter().any(|end| end.is_break)
            || !self.lengthened.is_empty()
            || self.grants.iter().any(|grant| grant.on_disk)
    }
}

/// The keys are hashes already.
#[derive(Default)]
struct Prehashed(u64);

impl Hasher for Prehashed {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

thread_local! {
    static STATE: RefCell<State> = RefCell::new(State::default());
    /// Whether the callbacks have anything to do.
    static BUSY: Cell<bool> = const { Cell::new(false) };
    /// Counts the transactions of this backend that could own a grant.
    static NUMBER: Cell<u32> = const { Cell::new(1) };
    /// Changes whenever a verdict could have changed.
    static EPOCH: Cell<u64> = const { Cell::new(1) };
}

/// Whether the callbacks have nothing to do.
pub fn is_idle() -> bool {
    !BUSY.get()
}

/// The callbacks have something to do from here on.
pub fn is_going_to_act() {
    BUSY.set(true);
}

/// A number that is this transaction's among all that run.
pub fn owner() -> u64 {
    (u64::from(pg::pid().unsigned_abs()) << 32) | u64::from(NUMBER.get())
}

/// The process of the transaction with that number; 0 for none.
pub fn pid_of(owner: u64) -> i32 {
    i32::try_from(owner >> 32).unwrap_or(0)
}

/// A number that stays the same as long as no verdict can have changed.
pub fn epoch() -> u64 {
    EPOCH.get()
}

/// What is presented, or was found good, has changed.
pub fn invalidate() {
    EPOCH.set(EPOCH.get().wrapping_add(1));
}

fn with<R>(body: impl FnOnce(&mut State) -> R) -> R {
    STATE.with_borrow_mut(body)
}

/// Makes room for a grant, so that noting it cannot fail once the shared table says it is ours.
pub fn prepare_grant() {
    BUSY.set(true);
    with(|state| state.grants.reserve(1));
}

/// Notes that a grant of this resource is in progress: undone if the (sub)transaction aborts.
pub fn grant_begun(resource: Resource) {
    let pending = Pending {
        resource,
        token: 0,
        owner: owner(),
        subtransaction: pg::subtransaction(),
        on_disk: false,
        is_takeover: false,
        is_break: false,
    };
    with(|state| state.grants.push(pending));
}

/// Forgets the last grant again: it was drained in vain, and the shared table has been told.
pub fn grant_abandoned() {
    with(|state| state.grants.pop());
}

/// Notes that the last grant was recorded under this token, and whether over a lease that ran out.
pub fn grant_recorded(token: i64, is_takeover: bool) {
    with(|state| {
        if let Some(grant) = state.grants.last_mut() {
            grant.token = token;
            grant.is_takeover = is_takeover;
        }
    });
}

/// Notes that the last grant is nothing before the disk, and the standby, have what it wrote.
pub fn grant_needs_the_disk() {
    // the commit of a transaction without a number waits for nothing
    pg::transaction_number();
    with(|state| {
        if let Some(grant) = state.grants.last_mut() {
            grant.on_disk = true;
        }
    });
}

/// Notes that the ledger row of a resource was marked released, for a grant in memory under this token.
pub fn closed_row(resource: &Resource, token: i64) {
    let pending = pending(resource, token);
    with(|state| state.closed.push(pending));
}

/// Notes that this transaction deletes rows of a ledger. It is a worker's, so all of it is undone or nothing.
pub fn deletes_rows(ledger: Oid) {
    BUSY.set(true);
    with(|state| state.deleting = Some(ledger));
}

/// Notes that the longest TTL in memory was raised.
pub fn raised_memory_ttl(ledger: Oid, ttl_us: i64) {
    pg::transaction_number();
    BUSY.set(true);
    with(|state| {
        let before = state.memory_ttl.map_or(0, |(_, ttl_us)| ttl_us);
        state.memory_ttl = Some((ledger, before.max(ttl_us)));
    });
}

/// Notes a release that comes with the commit.
pub fn release_at_commit(resource: &Resource, token: i64) {
    end_at_commit(resource, token, false);
}

/// Notes that a lease is broken with the commit.
pub fn break_at_commit(resource: &Resource, token: i64) {
    pg::transaction_number();
    end_at_commit(resource, token, true);
}

fn end_at_commit(resource: &Resource, token: i64, is_break: bool) {
    BUSY.set(true);
    let end = Pending {
        is_break,
        ..pending(resource, token)
    };
    with(|state| {
        let is_known = state.ends.iter().any(|known| {
            (known.token, known.is_break) == (token, is_break)
                && known.resource.name == end.resource.name
        });
        if !is_known {
            state.ends.push(end);
        }
    });
}

/// Notes that the ledger row of a lease now holds this TTL, if the transaction commits.
pub fn lengthened(resource: &Resource, token: i64, ttl_us: i64) {
    pg::transaction_number();
    BUSY.set(true);
    let pending = pending(resource, token);
    with(|state| state.lengthened.push((pending, ttl_us)));
}

fn pending(resource: &Resource, token: i64) -> Pending {
    Pending {
        resource: resource.clone(),
        token,
        owner: owner(),
        subtransaction: pg::subtransaction(),
        on_disk: false,
        is_takeover: false,
        is_break: false,
    }
}

/// The verdict on a resource that holds in this transaction, seen by `look`.
pub fn checked<R>(hash: u64, resource: &[u8], look: impl FnOnce(&Checked) -> R) -> Option<R> {
    if !BUSY.get() {
        return None;
    }
    STATE.with_borrow(|state| {
        state
            .checked
            .get(&hash)
            .filter(|checked| *checked.resource == *resource)
            .map(look)
    })
}

/// Whether this transaction holds up whoever wants a resource: it is inside its fence, or is going to release the
/// lease or break it with its commit.
pub fn is_in_own_way(resource: &Resource) -> bool {
    if !BUSY.get() {
        return false;
    }
    checked(resource.hash, &resource.name, |_| ()).is_some() || is_ending(resource)
}

/// Whether this transaction is going to release the lease on a resource, or break it, with its commit.
pub fn is_ending(resource: &Resource) -> bool {
    BUSY.get()
        && STATE.with_borrow(|state| {
            let mut ends = state.ends.iter();
            ends.any(|end| end.resource.name == resource.name)
        })
}

/// Notes a verdict until the (sub)transaction ends.
pub fn note_checked(hash: u64, checked: Checked) {
    BUSY.set(true);
    let subtransaction = pg::subtransaction();
    with(|state| {
        let before = state.checked.insert(hash, checked);
        state.undo.push(Undo {
            hash,
            subtransaction,
            before,
        });
    });
    invalidate();
}

/// Notes that other users have been found to be members of the role of a verdict.
pub fn note_users(hash: u64, users: (Oid, Oid)) {
    with(|state| {
        if let Some(checked) = state.checked.get_mut(&hash) {
            checked.users = users;
        }
    });
}

/// Notes that the statement which acquired must be the only one of its transaction.
pub fn grant_stands_alone() {
    let time = pg::statement_time();
    with(|state| state.alone_since = Some(time));
}

/// PRE_COMMIT: grants and TTLs are durable when the client hears of them, whatever the session set.
pub fn before_commit() -> Answer<()> {
    if let Some(told) = sessions::committing() {
        return Err(cut_off(told));
    }
    if with(|state| state.needs_the_disk()) {
        pg::raise_synchronous_commit();
    }
    // statements that were sent along with it would have read under its snapshot
    match with(|state| state.alone_since) {
        Some(time) if time != pg::statement_time() => Err(crate::acquire::not_alone()),
        _ => Ok(()),
    }
}

/// A taker has signalled this transaction: it ends as the signal would have ended it. 57014, 57P01.
fn cut_off(told: Told) -> Refusal {
    let refusal = match told {
        Told::Cancelled => Refusal::new(
            code::QUERY_CANCELED,
            "canceling statement because another transaction wants a lease that is over",
        ),
        Told::ToEnd => Refusal::new(
            code::ADMIN_SHUTDOWN,
            "terminating connection because another transaction wants a lease that is over",
        )
        .fatal(),
    };
    refusal
        .detail("The transaction was open under a lease that has been over for longer than leasehold.zombie_grace.")
        .hint("Keep transactions shorter than the lease, or renew it in time.")
}

/// PRE_PREPARE: what must happen at the commit can't, in another session. 0A000.
pub fn before_prepare() -> Answer<()> {
    let what = with(|state| {
        if !state.grants.is_empty() {
            state.grants.first().map(|grant| ("acquired", grant))
        } else {
            let what = |end: &Pending| if end.is_break { "broken" } else { "released" };
            state.ends.first().map(|end| (what(end), end))
        }
        .map(|(what, lease)| (what, lease.resource.shown(), lease.token))
    });
    let hint = match what {
        Some(("broken", ..)) => "Break the lease in a transaction of its own.",
        _ => {
            "Acquire before the transaction, prepare one that only writes under the token, and release after COMMIT PREPARED."
        }
    };
    match what {
        None => sessions::committing().map_or(Ok(()), |told| Err(cut_off(told))),
        Some((what, resource, token)) => Err(Refusal::new(
            code::FEATURE_NOT_SUPPORTED,
            format!("cannot PREPARE a transaction that has {what} a lease"),
        )
        .detail(format!(
            "It has {what} the resource \"{resource}\" under token {token}, which takes effect with the commit, in this session."
        ))
        .hint(hint)),
    }
}

/// COMMIT: other backends see the transaction; its locks are still held.
pub fn committed() {
    let now_us = pg::clock::now_us();
    with(|state| {
        let is_confirmed = !state.needs_the_disk() || pg::commit_is_confirmed();
        for grant in state.grants.drain(..) {
            let mut retrier = None;
            let due = table::change(grant.resource.key(), |entry| {
                entry.is_hold_up_reported = false;
                entry.record.commit(grant.owner, now_us);
                entry.hold_begins(now_us);
                entry.contention.grants = entry.contention.grants.saturating_add(1);
                Event::now(Kind::Granted, grant.resource.ledger, &grant.resource.name)
                    .of(grant.token, &entry.holding)
                    .record();
                if grant.on_disk && !is_confirmed {
                    entry.record.unconfirmed(grant.token, now_us);
                }
                retrier = entry.retrier();
                entry.record.due_mark().is_some()
            });
            // what others sleep for, the end of the lease, he need not wait for
            if let Some(retrier) = retrier {
                waiters::wake(retrier);
            }
            stats::count(Count::Grants);
            if grant.is_takeover {
                stats::count(Count::Takeovers);
            }
            if due == Some(true) {
                table::want_marks(pg::database());
            }
        }
        let closed = state.closed.drain(..).filter(|_| is_confirmed);
        closed.for_each(|row| {
            table::change(row.resource.key(), |entry| {
                if entry.record.t_max == row.token {
                    entry.record.row_closed();
                }
            });
        });
        if let Some((ledger, ttl_us)) = state.memory_ttl.take().filter(|_| is_confirmed) {
            tokens::memory_ttl_is_durable(pg::database(), ledger, ttl_us);
        }
        for (lease, ttl_us) in state.lengthened.drain(..) {
            let due = table::change(lease.resource.key(), |entry| {
                if is_confirmed {
                    entry.record.note_durable_ttl(lease.token, ttl_us);
                } else {
                    entry.record.unconfirmed(lease.token, now_us);
                }
                entry.record.due_mark().is_some()
            });
            if due == Some(true) {
                table::want_marks(pg::database());
            }
        }
        // while the fences of their resources are still held
        if let Some(ledger) = state.deleting.take() {
            tokens::note_marked(pg::database(), ledger, pg::own_commit());
        }
        // a broken token is closed before a writer that waits for these locks goes on
        for end in state.ends.iter().filter(|end| end.is_break) {
            table::change(end.resource.key(), |entry| {
                entry.record.begin_break(end.token)
            });
        }
        // by swapping, so that what is empty keeps its room
        let state = &mut *state;
        std::mem::swap(&mut state.ends_to_do, &mut state.ends);
    });
    transaction_over();
}

/// ABORT: its locks are still held.
pub fn aborted() {
    with(|state| {
        let grants = std::mem::take(&mut state.grants);
        if state.grants_to_undo.is_empty() {
            state.grants_to_undo = grants;
        } else {
            state.grants_to_undo.extend(grants);
        }
        state.ends.clear();
        state.lengthened.clear();
        state.closed.clear();
        state.memory_ttl = None;
        state.deleting = None;
    });
    transaction_over();
}

/// PREPARE: the locks go on without this session, and nothing else is left (see `before_prepare`).
/// A longer TTL that it wrote is simply not noted as durable.
pub fn prepared() {
    with(|state| {
        state.lengthened.clear();
        state.memory_ttl = None;
    });
    transaction_over();
}

fn transaction_over() {
    let held_fences = sessions::ended();
    with(|state| {
        state.wake_takers |= held_fences;
        if state.checked.capacity() > 1024 {
            state.checked = HashMap::default();
        } else {
            state.checked.clear();
        }
        state.undo.clear();
        state.alone_since = None;
        BUSY.set(
            state.wake_takers || !state.grants_to_undo.is_empty() || !state.ends_to_do.is_empty(),
        );
    });
    NUMBER.set(NUMBER.get().wrapping_add(1).max(1));
    invalidate();
}

/// The locks of what has ended are gone: its resources can be had.
pub fn locks_are_gone() {
    with(|state| {
        for grant in state.grants_to_undo.drain(..) {
            let due = table::change(grant.resource.key(), |entry| {
                entry.record.abort(grant.owner);
                entry.record.due_mark().is_some()
            });
            // the ledger's row is the one of the grant that did not come about
            if due == Some(true) && grant.on_disk {
                table::want_marks(pg::database());
            }
        }
        let now_us = pg::clock::now_us();
        for lease in state.ends_to_do.drain(..) {
            let due = table::change(lease.resource.key(), |entry| {
                if lease.is_break {
                    if entry.record.break_lease(lease.token, now_us) {
                        ended(entry, &lease, Kind::Broken, now_us);
                    }
                } else if entry.record.release(lease.token, now_us) {
                    ended(entry, &lease, Kind::Released, now_us);
                    stats::count(Count::Releases);
                }
                entry.record.due_mark().is_some()
            });
            if due == Some(true) {
                table::want_marks(pg::database());
            }
        }
    });
    if with(|state| std::mem::take(&mut state.wake_takers)) {
        sessions::wake_takers();
    }
    let idle = STATE.with_borrow(|state| {
        !sessions::is_open()
            && state.grants.is_empty()
            && state.ends.is_empty()
            && state.lengthened.is_empty()
            && state.closed.is_empty()
            && state.memory_ttl.is_none()
            && state.deleting.is_none()
            && state.undo.is_empty()
    });
    BUSY.set(!idle);
}

/// Notes that a lease was ended. Under the lock of its entry.
fn ended(entry: &mut Entry, lease: &Pending, how: Kind, now_us: i64) {
    if let Some(held_us) = entry.held_us(now_us) {
        stats::held(held_us);
    }
    entry.hold_is_released(now_us);
    let event = Event::now(how, lease.resource.ledger, &lease.resource.name);
    event.of(lease.token, &entry.holding).record();
}

/// A subtransaction aborted; its locks are still held.
pub fn subtransaction_aborted(my: u32) {
    with(|state| {
        state.wake_takers |= sessions::is_open();
        while state.grants.last().is_some_and(|g| g.subtransaction == my) {
            let grant = state.grants.pop();
            state.grants_to_undo.extend(grant);
        }
        drop_tail(&mut state.ends, |end| end.subtransaction == my);
        drop_tail(&mut state.lengthened, |(l, _)| l.subtransaction == my);
        drop_tail(&mut state.closed, |row| row.subtransaction == my);
        while state.undo.last().is_some_and(|u| u.subtransaction == my) {
            let Some(undo) = state.undo.pop() else { break };
            match undo.before {
                Some(before) => state.checked.insert(undo.hash, before),
                None => state.checked.remove(&undo.hash),
            };
        }
    });
    invalidate();
}

fn drop_tail<T>(list: &mut Vec<T>, belongs: impl Fn(&T) -> bool) {
    while list.last().is_some_and(&belongs) {
        list.pop();
    }
}

/// A subtransaction committed: what it did is its parent's.
pub fn subtransaction_committed(my: u32, parent: u32) {
    with(|state| {
        let grants = state.grants.iter_mut();
        hand_over(grants.map(|g| &mut g.subtransaction), my, parent);
        let ends = state.ends.iter_mut();
        hand_over(ends.map(|end| &mut end.subtransaction), my, parent);
        let lengthened = state.lengthened.iter_mut();
        hand_over(lengthened.map(|(l, _)| &mut l.subtransaction), my, parent);
        let closed = state.closed.iter_mut();
        hand_over(closed.map(|row| &mut row.subtransaction), my, parent);
        let undo = state.undo.iter_mut();
        hand_over(undo.map(|u| &mut u.subtransaction), my, parent);
    });
}

fn hand_over<'a>(
    subtransactions: impl DoubleEndedIterator<Item = &'a mut u32>,
    my: u32,
    parent: u32,
) {
    subtransactions
        .rev()
        .take_while(|s| **s == my)
        .for_each(|s| *s = parent);
}

//! The model checker: one resource, two takers, a stale writer, and everything that can come between
//! two of their steps. It explores every order of these steps over the real [`Record`] and a model of
//! what surrounds it on a server: shared table, ledger, token sequence, fence lock, clock, crash.
//!
//! What it proves holds for [`SEQUENCE_MAX`] grants, [`CRASHES_MAX`] crashes and any length of time.
//!
//! **Each rule of the surroundings is proven to be needed**: a [`Bug`] breaks one, and the same model
//! must then find the guarantee that it breaks. A model that could not find them would prove nothing.
//!
//! What a step is. A step is what happens under one hold of the entry's LWLock, or at one instant of a
//! transaction's end. The exclusive fence lock is held for one such moment only, so it is taken, used
//! and let go within a step; the share locks follow from the states of the transactions.
//!
//! What a guarantee means here
//! - *Granted*, for G3: recorded, by a transaction that has committed or may still. A grant that was
//!   rolled back gave nobody anything, so an older token may write again after it (and only where
//!   the record was evicted since; until then it is refused).
//! - *Believed in*: a holder counts its lease from the commit of the grant (or the renewal) for a
//!   full TTL, through crashes, and until it released it. That is longer than a holder may, who
//!   counts from when it asked.
//!
//! Time is always 0 and a tick moves every deadline one nearer, to 0 where it is over. So the states
//! are finitely many though time is not bounded; `record_props.rs` shows that a record does not see
//! the difference.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::panic
)]

use std::collections::BTreeSet;

use leasehold_core::record::{Begin, End, Record, Release, Remembered, Standing, Verdict};
use stateright::{Checker, HasDiscoveries, Model, Property};

/// TTL of a grant, in ticks.
const TTL: i64 = 1;

/// TTL of the renewals that are longer than what the grant put into the ledger.
const TTL_LONG: i64 = 2;

/// Tokens in the sequence.
const SEQUENCE_MAX: i64 = 3;

/// Crashes of the server.
const CRASHES_MAX: u8 = 1;

/// The writer's transaction, where the takers' are their index + 1.
const WRITER: u64 = 3;

/// A rule of the surroundings that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    /// A grant does not take the fence lock.
    NoFenceLock,
    /// The fence compares tokens first and takes the lock then.
    VerdictBeforeLock,
    /// A restart forgets the fence locks of prepared transactions.
    PreparedLockLost,
    /// A rollback gives its token back to the sequence.
    TokenReturned,
    /// Tokens are handed out before the sequence is flushed.
    SequenceNotFlushed,
    /// The deadline is told from a clock that can be set.
    ClockCanBeSet,
    /// The lease is told to its holder before the ledger has it.
    ToldBeforeFlush,
    /// A restart takes every lease of the ledger for over.
    RecoveryForgets,
    /// A restart runs a lease from its grant on, not from the moment the server became writable.
    RecoveryFromGrant,
    /// A renewal to a longer TTL does not write the ledger.
    RenewalNotDurable,
    /// A release frees the resource when it is asked for.
    ReleaseBeforeCommit,
    /// A record is evicted in spite of a grant in progress.
    EvictedInGrant,
    /// The ledger row of a record that was evicted counts like one from before the start.
    EvictedCounts,
    /// A row that was read before the last eviction is still made a record.
    LoadedLate,
}

/// A guarantee that a step broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Broken {
    /// A token was not above every earlier one.
    G2,
    /// A write committed under a token older than a granted one.
    G3,
    /// A grant came while a lease was believed in.
    G5,
    /// A token was good for another before its grant committed, or after its release.
    Verdict,
}

/// The ledger's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Row {
    token: i64,
    ttl: i64,
    released: bool,
}

/// A taker's transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Tx {
    None,
    /// The grant has begun, no token yet.
    Begun,
    /// The grant is recorded; the fence lock is shared from here to the end.
    Granted(i64),
    /// The commit is in the log and visible; the record does not know yet.
    Flushed(i64),
    /// A renewal to the long TTL waits for its commit, with the fence lock shared (it writes the
    /// ledger). What is left of it.
    Renewing(i64, i64),
    /// A release waits for its commit.
    Releasing(i64),
    /// The release is committed and the locks are gone; the record does not know yet.
    Released(i64),
}

/// A taker and what it believes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Taker {
    tx: Tx,
    /// The token of a lease that it believes in, and how long still.
    belief: Option<(i64, i64)>,
}

/// The writer's transaction. It presents any token that was ever handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Writer {
    None,
    /// The verdict was good, without the lock (a bug).
    Checked(i64),
    /// The fence lock is shared.
    Locked(i64),
    /// The verdict was good: it writes.
    Passed(i64),
    /// Prepared, with or (a bug) without the lock.
    Prepared(i64, bool),
    /// The verdict was bad.
    Refused(Verdict),
}

/// The resource and everything around it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    record: Option<Record>,
    ledger: Option<Row>,
    /// A row that somebody read to make it a record.
    loading: Option<Option<Row>>,
    /// The release that the ledger is still to be told of.
    mark: Option<i64>,
    /// When the server became writable, from now.
    writable: i64,
    /// How far the clock was set ahead (a bug).
    ahead: i64,
    sequence: i64,
    floor: i64,
    crashes: u8,
    takers: [Taker; 2],
    writer: Writer,
    /// The highest token handed out.
    highest: i64,
    /// Tokens whose grant has committed, as bits.
    committed: u8,
    /// Tokens whose release the record has seen and the ledger has not lost, as bits.
    ended: u8,
    broken: Option<Broken>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Tick,
    SetClock,
    Crash,
    Evict,
    ReadLedger,
    Install,
    WriteMark,
    Begin(usize),
    Grant(usize),
    Flush(usize),
    Commit(usize),
    Abort(usize),
    Renew(usize),
    RenewLonger(usize),
    CommitRenewal(usize),
    AskRelease(usize),
    CommitRelease(usize),
    Release(usize),
    Present(i64),
    Lock,
    Check,
    Prepare,
    CommitWrite,
    AbortWrite,
}

fn bit(token: i64) -> u8 {
    1 << token
}

fn owner(taker: usize) -> u64 {
    taker as u64 + 1
}

impl World {
    fn new() -> Self {
        let taker = Taker {
            tx: Tx::None,
            belief: None,
        };
        World {
            record: None,
            ledger: None,
            loading: None,
            mark: None,
            writable: 0,
            ahead: 0,
            sequence: 0,
            floor: 0,
            crashes: 0,
            takers: [taker; 2],
            writer: Writer::None,
            highest: 0,
            committed: 0,
            ended: 0,
            broken: None,
        }
    }

    /// Notes a guarantee that this step broke.
    fn expect(&mut self, holds: bool, broken: Broken) {
        if !holds {
            self.broken = Some(broken);
        }
    }

    /// The highest token whose grant has committed or may still.
    fn granted(&self) -> i64 {
        let in_progress = |taker: &Taker| match taker.tx {
            Tx::Granted(token) | Tx::Flushed(token) => token,
            _ => 0,
        };
        let committed = i64::from(self.committed.checked_ilog2().unwrap_or(0));
        let in_progress = self.takers.iter().map(in_progress).max();
        committed.max(in_progress.unwrap_or(0))
    }

    /// Whether a transaction other than this taker's shares the fence lock.
    fn shared_by_others(&self, taker: usize) -> bool {
        let writer = matches!(
            self.writer,
            Writer::Locked(_) | Writer::Passed(_) | Writer::Prepared(_, true)
        );
        let other = matches!(
            self.takers[1 - taker].tx,
            Tx::Granted(_) | Tx::Flushed(_) | Tx::Renewing(..)
        );
        writer || other
    }

    /// The record, made from the ledger where it is not there.
    fn record(&mut self, bug: Option<Bug>) -> &mut Record {
        let loaded = recovered(self.ledger, self.writable, self.floor, bug);
        self.record.get_or_insert(loaded)
    }

    /// A commit under `token` is in the log.
    fn commit_write(&mut self, token: i64) {
        self.expect(token >= self.granted(), Broken::G3);
    }
}

/// What a first touch makes of the ledger's row.
fn recovered(row: Option<Row>, writable: i64, floor: i64, bug: Option<Bug>) -> Record {
    let Some(row) = row else {
        return Record::UNKNOWN;
    };
    let remembered = Remembered {
        token: row.token,
        ttl_us: row.ttl,
        released: row.released || bug == Some(Bug::RecoveryForgets),
        standing: if row.token > floor && bug != Some(Bug::EvictedCounts) {
            Standing::Reclaimed
        } else {
            Standing::Trusted
        },
    };
    let mut record = Record::recovered(remembered, writable);
    record.lease.deadline_us = record.lease.deadline_us.max(0);
    record
}

/// When the server that starts now became writable: now, unless leases are to run from their grant,
/// which was before the crash.
fn writable_after_crash(bug: Option<Bug>) -> i64 {
    if bug == Some(Bug::RecoveryFromGrant) {
        -TTL_LONG
    } else {
        0
    }
}

/// The model, with at most one bug.
struct Leasehold {
    bug: Option<Bug>,
}

impl Leasehold {
    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// Makes one state of those that differ in nothing: which taker is which, and what somebody read
    /// in vain (a row is only made a record where there is none, and not after an eviction).
    fn normalize(&self, w: &mut World) {
        if w.record.is_some() && !self.has(Bug::LoadedLate) {
            w.loading = None;
        }
        if w.takers[0] > w.takers[1] {
            w.takers.swap(0, 1);
            if let Some(record) = &mut w.record {
                record.grant.owner = match record.grant.owner {
                    0 => 0,
                    // 1 becomes 2 and 2 becomes 1
                    owner => WRITER - owner,
                };
            }
        }
    }

    /// Time passes.
    fn tick(&self, w: &mut World) {
        let nearer = |left: &mut i64| *left = (*left - 1).max(0);
        if let Some(record) = &mut w.record {
            nearer(&mut record.lease.deadline_us);
            nearer(&mut record.grant.deadline_us);
        }
        for taker in &mut w.takers {
            taker.belief = taker.belief.filter(|(_, left)| *left > 1);
            if let Some((_, left)) = &mut taker.belief {
                nearer(left);
            }
            if let Tx::Renewing(_, left) = &mut taker.tx {
                nearer(left);
            }
        }
        w.writable = (w.writable - 1).max(-TTL_LONG);
    }

    /// Everything that is not durable is gone; who holds a lease knows nothing of it.
    fn crash(&self, w: &mut World) {
        w.crashes += 1;
        w.record = None;
        w.loading = None;
        w.mark = None;
        w.writable = writable_after_crash(self.bug);
        if self.has(Bug::SequenceNotFlushed) {
            w.sequence = w.ledger.map_or(0, |row| row.token);
        }
        w.floor = w.sequence;
        let marked = w.ledger.filter(|row| row.released);
        w.ended = marked.map_or(0, |row| bit(row.token));
        for taker in &mut w.takers {
            taker.tx = Tx::None;
        }
        w.writer = match w.writer {
            Writer::Prepared(token, _) => Writer::Prepared(token, !self.has(Bug::PreparedLockLost)),
            _ => Writer::None,
        };
    }

    fn may_evict(&self, w: &World, now: i64) -> bool {
        let Some(record) = w.record else {
            return false;
        };
        record.is_evictable(now) || (self.has(Bug::EvictedInGrant) && record.grant.owner != 0)
    }

    /// The steps that no transaction takes.
    fn step(&self, w: &mut World, action: Action) -> bool {
        match action {
            Action::Tick => self.tick(w),
            Action::SetClock if self.has(Bug::ClockCanBeSet) => w.ahead = TTL_LONG - w.ahead,
            Action::Crash if w.crashes < CRASHES_MAX => self.crash(w),
            Action::Evict if self.may_evict(w, w.ahead) => {
                w.record = None;
                if !self.has(Bug::LoadedLate) {
                    w.loading = None;
                }
            }
            Action::ReadLedger if w.record.is_none() => w.loading = Some(w.ledger),
            Action::Install => {
                let Some(row) = w.loading.take() else {
                    return false;
                };
                let loaded = recovered(row, w.writable, w.floor, self.bug);
                w.record.get_or_insert(loaded);
            }
            Action::WriteMark => {
                let Some(token) = w.mark.take() else {
                    return false;
                };
                if let Some(row) = w.ledger.as_mut().filter(|row| row.token == token) {
                    row.released = true;
                }
                if let Some(record) = &mut w.record {
                    record.note_marked(token);
                }
            }
            _ => return false,
        }
        true
    }

    /// The steps of an acquire.
    fn acquire(&self, w: &mut World, action: Action, i: usize) -> bool {
        let (tx, now) = (w.takers[i].tx, w.ahead);
        match (action, tx) {
            (Action::Begin(_), Tx::None) if w.takers[i].belief.is_none() => {
                if w.record(self.bug).begin(owner(i), now) != Begin::Begun {
                    return false;
                }
                w.takers[i].tx = Tx::Begun;
            }
            (Action::Grant(_), Tx::Begun) if w.sequence < SEQUENCE_MAX => {
                let drained = !w.shared_by_others(i) || self.has(Bug::NoFenceLock);
                return drained && self.grant(w, i);
            }
            (Action::Flush(_), Tx::Granted(token)) => {
                w.commit_write(token);
                w.ledger = Some(Row {
                    token,
                    ttl: TTL,
                    released: false,
                });
                w.committed |= bit(token);
                w.takers[i].tx = Tx::Flushed(token);
                w.takers[i].belief = Some((token, TTL));
            }
            (Action::Commit(_), Tx::Flushed(token)) => {
                // an entry that is not there stays so: no ledger is read at the end of a commit
                if let Some(record) = &mut w.record {
                    record.commit(owner(i), now);
                }
                w.takers[i].tx = Tx::None;
                w.takers[i].belief = Some((token, TTL));
            }
            _ => return false,
        }
        true
    }

    /// Takes a token and records the grant.
    fn grant(&self, w: &mut World, i: usize) -> bool {
        let (token, now) = (w.sequence + 1, w.ahead);
        let recorded = w
            .record
            .as_mut()
            .is_some_and(|record| record.grant(owner(i), token, TTL, now));
        w.sequence = token;
        if !recorded {
            // only with a bug does a token not rise: it is wasted, and a wasted one was not used
            return true;
        }
        w.expect(token > w.highest, Broken::G2);
        w.expect(w.takers[1 - i].belief.is_none(), Broken::G5);
        w.highest = w.highest.max(token);
        w.takers[i].tx = Tx::Granted(token);
        if self.has(Bug::ToldBeforeFlush) {
            w.takers[i].belief = Some((token, TTL));
        }
        true
    }

    /// A taker's transaction is rolled back.
    fn abort(&self, w: &mut World, i: usize) -> bool {
        match w.takers[i].tx {
            Tx::Begun | Tx::Granted(_) => {
                if let Some(record) = &mut w.record {
                    record.abort(owner(i));
                }
                if self.has(Bug::TokenReturned) && w.takers[i].tx == Tx::Granted(w.sequence) {
                    w.sequence -= 1;
                }
            }
            Tx::Renewing(..) | Tx::Releasing(_) => {}
            _ => return false,
        }
        w.takers[i].tx = Tx::None;
        true
    }

    /// A renewal, by whoever believes in the lease.
    fn renew(&self, w: &mut World, i: usize, ttl: i64) -> bool {
        let now = w.ahead;
        let Taker {
            tx: Tx::None,
            belief: Some((token, left)),
        } = w.takers[i]
        else {
            return false;
        };
        let record = w.record(self.bug);
        let durable = record.durable_ttl_us(owner(i), token, now);
        if !record.renew(owner(i), token, ttl, now) {
            return false;
        }
        w.expect(w.ended & bit(token) == 0, Broken::Verdict);
        if durable.is_some_and(|durable| durable < ttl) && !self.has(Bug::RenewalNotDurable) {
            w.takers[i].tx = Tx::Renewing(token, ttl);
        } else {
            w.takers[i].belief = Some((token, left.max(ttl)));
        }
        true
    }

    fn commit_renewal(&self, w: &mut World, i: usize) -> bool {
        let Tx::Renewing(token, left) = w.takers[i].tx else {
            return false;
        };
        if let Some(row) = w.ledger.as_mut().filter(|row| row.token == token) {
            row.ttl = TTL_LONG;
        }
        if let Some(record) = &mut w.record {
            record.note_durable_ttl(token, TTL_LONG);
        }
        let before = w.takers[i].belief.map_or(0, |(_, left)| left);
        let left = left.max(before);
        w.takers[i] = Taker {
            tx: Tx::None,
            belief: (left > 0).then_some((token, left)),
        };
        true
    }

    /// The steps of a release, by whoever believes in the lease.
    fn release(&self, w: &mut World, action: Action, i: usize) -> bool {
        let Taker { tx, belief } = w.takers[i];
        match (action, tx, belief) {
            (Action::AskRelease(_), Tx::None, Some((token, _))) => {
                let now = w.ahead;
                let record = w.record(self.bug);
                if record.release_answer(owner(i), token, now) != Release::Yes {
                    return false;
                }
                if self.has(Bug::ReleaseBeforeCommit) {
                    record.release(token);
                }
                w.takers[i].tx = Tx::Releasing(token);
            }
            (Action::CommitRelease(_), Tx::Releasing(token), _) => {
                w.takers[i].tx = Tx::Released(token);
                w.takers[i].belief = None;
            }
            (Action::Release(_), Tx::Released(token), _) => {
                if let Some(record) = &mut w.record {
                    record.release(token);
                    if record.lease.token == token && record.lease.end == End::Released {
                        w.ended |= bit(token);
                    }
                }
                // marks are queued one by one: an older one does not displace a newer
                w.mark = w.mark.max(Some(token));
                w.takers[i].tx = Tx::None;
            }
            _ => return false,
        }
        true
    }

    /// The fence's verdict on the writer's token.
    fn check(&self, w: &mut World, token: i64, passed: Writer) {
        let (floor, now) = (w.floor, w.ahead);
        let record = w.record(self.bug);
        let verdict = record.verdict(&[token], WRITER, floor, false, now);
        if matches!(verdict, Verdict::Good { .. }) {
            w.expect(w.committed & bit(token) != 0, Broken::Verdict);
            w.expect(w.ended & bit(token) == 0, Broken::Verdict);
            w.writer = passed;
        } else {
            w.writer = Writer::Refused(verdict);
        }
    }

    /// The steps of the writer.
    fn write(&self, w: &mut World, action: Action) -> bool {
        match (action, w.writer) {
            (Action::Present(token), Writer::None) if token <= w.highest => {
                if self.has(Bug::VerdictBeforeLock) {
                    self.check(w, token, Writer::Checked(token));
                } else {
                    w.writer = Writer::Locked(token);
                }
            }
            (Action::Lock, Writer::Checked(token)) => w.writer = Writer::Passed(token),
            (Action::Check, Writer::Locked(token)) => self.check(w, token, Writer::Passed(token)),
            (Action::Prepare, Writer::Passed(token)) => w.writer = Writer::Prepared(token, true),
            (Action::CommitWrite, Writer::Passed(token) | Writer::Prepared(token, _)) => {
                w.commit_write(token);
                w.writer = Writer::None;
            }
            // before the verdict a rollback undoes nothing but the lock
            (Action::AbortWrite, Writer::Passed(_) | Writer::Prepared(..) | Writer::Refused(_)) => {
                w.writer = Writer::None;
            }
            _ => return false,
        }
        true
    }
}

impl Model for Leasehold {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::new()]
    }

    fn actions(&self, _: &World, actions: &mut Vec<Action>) {
        use Action::*;
        actions.extend([Tick, SetClock, Crash, Evict, ReadLedger, Install, WriteMark]);
        for i in [0, 1] {
            actions.extend([Begin(i), Grant(i), Flush(i), Commit(i), Abort(i)]);
            actions.extend([Renew(i), RenewLonger(i), CommitRenewal(i)]);
            actions.extend([AskRelease(i), CommitRelease(i), Release(i)]);
        }
        actions.extend((1..=SEQUENCE_MAX).map(Present));
        actions.extend([Lock, Check, Prepare, CommitWrite, AbortWrite]);
    }

    /// The state after the action; none where it can't be taken.
    fn next_state(&self, last: &World, action: Action) -> Option<World> {
        use Action::*;
        let mut w = last.clone();
        let taken = match action {
            Tick | SetClock | Crash | Evict | ReadLedger | Install | WriteMark => {
                self.step(&mut w, action)
            }
            Begin(i) | Grant(i) | Flush(i) | Commit(i) => self.acquire(&mut w, action, i),
            Abort(i) => self.abort(&mut w, i),
            Renew(i) => self.renew(&mut w, i, TTL),
            RenewLonger(i) => self.renew(&mut w, i, TTL_LONG),
            CommitRenewal(i) => self.commit_renewal(&mut w, i),
            AskRelease(i) | CommitRelease(i) | Release(i) => self.release(&mut w, action, i),
            Present(_) | Lock | Check | Prepare | CommitWrite | AbortWrite => {
                self.write(&mut w, action)
            }
        };
        self.normalize(&mut w);
        (taken && w != *last).then_some(w)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = guarantees();
        if self.bug.is_none() {
            properties.extend(stories());
        }
        properties
    }
}

const G1: &str = "G1: at most one lease is believed in";
const G2: &str = "G2: tokens rise and none is used twice";
const G3: &str = "G3: no write commits under a token older than a granted one";
const G5: &str = "G5: nothing is granted while a lease is believed in";
const VERDICT: &str = "a token is good from the commit of its grant until its release";

/// What always holds.
fn guarantees() -> Vec<Property<Leasehold>> {
    vec![
        Property::always(G1, |_, w: &World| {
            w.takers.iter().filter(|t| t.belief.is_some()).count() <= 1
        }),
        Property::always(G2, |_, w: &World| w.broken != Some(Broken::G2)),
        Property::always(G3, |_, w: &World| w.broken != Some(Broken::G3)),
        Property::always(G5, |_, w: &World| w.broken != Some(Broken::G5)),
        Property::always(VERDICT, |_, w: &World| w.broken != Some(Broken::Verdict)),
    ]
}

/// What must be able to happen, or the guarantees would hold for want of trouble.
fn stories() -> Vec<Property<Leasehold>> {
    fn refused(w: &World, as_: fn(Verdict) -> bool) -> bool {
        matches!(w.writer, Writer::Refused(verdict) if as_(verdict))
    }
    fn record(w: &World, is: fn(&Record) -> bool) -> bool {
        w.record.as_ref().is_some_and(is)
    }
    vec![
        Property::sometimes("an expired lease is taken over", |_, w: &World| {
            record(w, |r| r.grant.token > r.lease.token && r.lease.token != 0)
                && record(w, |r| r.lease.end == End::Running)
        }),
        Property::sometimes(
            "a released lease is followed by the next",
            |_, w: &World| record(w, |r| r.grant.token != 0 && r.lease.end == End::Released),
        ),
        Property::sometimes(
            "a taker has to wait for an old transaction",
            |_, w: &World| {
                matches!(w.writer, Writer::Passed(_)) && w.takers.iter().any(|t| t.tx == Tx::Begun)
            },
        ),
        Property::sometimes(
            "a grant is rolled back and the next one follows",
            |_, w: &World| w.highest == SEQUENCE_MAX && w.committed == bit(SEQUENCE_MAX),
        ),
        Property::sometimes("a stale token is refused", |_, w: &World| {
            refused(w, |verdict| verdict == Verdict::Stale)
        }),
        Property::sometimes(
            "a token that is not committed is refused",
            |_, w: &World| refused(w, |verdict| verdict == Verdict::Unknown),
        ),
        Property::sometimes(
            "a token of a lease that is over is refused",
            |_, w: &World| refused(w, |verdict| matches!(verdict, Verdict::Over(_))),
        ),
        Property::sometimes("a lease lives on through a crash", |_, w: &World| {
            let believed = w.takers.iter().find_map(|t| Some(t.belief?.0));
            w.crashes == 1
                && believed.is_some()
                && w.record.map(|r| r.lease.token) == believed
                && record(w, |r| r.is_live(0))
        }),
        Property::sometimes("a prepared write survives a crash", |_, w: &World| {
            w.crashes == 1 && matches!(w.writer, Writer::Prepared(..))
        }),
        Property::sometimes("a longer TTL lives on through a crash", |_, w: &World| {
            w.crashes == 1 && record(w, |r| r.lease.deadline_us == TTL_LONG)
        }),
    ]
}

#[test]
fn every_order_of_steps_keeps_the_guarantees() {
    let checker = Leasehold { bug: None }.checker().spawn_bfs().join();
    checker.assert_properties();
    println!(
        "{} states, {} steps deep",
        checker.unique_state_count(),
        checker.max_depth()
    );
}

/// The model with the bug finds that the guarantee is broken.
fn assert_broken(bug: Bug, guarantee: &'static str) {
    let found = HasDiscoveries::AnyOf(BTreeSet::from([guarantee]));
    let checker = Leasehold { bug: Some(bug) }
        .checker()
        .finish_when(found)
        .spawn_bfs()
        .join();
    let path = checker.assert_any_discovery(guarantee);
    println!("{bug:?} breaks {guarantee}: {:?}", path.into_actions());
}

#[test]
fn without_the_fence_lock_a_stale_write_commits() {
    assert_broken(Bug::NoFenceLock, G3);
}

#[test]
fn with_the_verdict_before_the_lock_a_stale_write_commits() {
    assert_broken(Bug::VerdictBeforeLock, G3);
}

#[test]
fn with_the_locks_of_prepared_transactions_lost_a_stale_write_commits() {
    assert_broken(Bug::PreparedLockLost, G3);
}

#[test]
fn with_a_row_loaded_late_a_stale_write_commits() {
    assert_broken(Bug::LoadedLate, G3);
}

#[test]
fn with_tokens_given_back_one_is_used_twice() {
    assert_broken(Bug::TokenReturned, G2);
}

#[test]
fn with_the_sequence_not_flushed_a_token_is_used_twice() {
    assert_broken(Bug::SequenceNotFlushed, G2);
}

#[test]
fn with_a_clock_that_can_be_set_a_lease_is_granted_early() {
    assert_broken(Bug::ClockCanBeSet, G5);
    assert_broken(Bug::ClockCanBeSet, G1);
}

#[test]
fn with_the_holder_told_before_the_flush_a_lease_is_granted_early() {
    assert_broken(Bug::ToldBeforeFlush, G5);
}

#[test]
fn with_leases_forgotten_by_a_restart_one_is_granted_early() {
    assert_broken(Bug::RecoveryForgets, G5);
}

#[test]
fn with_recovered_leases_run_from_their_grant_one_is_granted_early() {
    assert_broken(Bug::RecoveryFromGrant, G5);
}

#[test]
fn with_a_longer_renewal_not_in_the_ledger_a_lease_is_granted_early() {
    assert_broken(Bug::RenewalNotDurable, G5);
}

#[test]
fn with_a_release_before_its_commit_a_lease_is_granted_early() {
    assert_broken(Bug::ReleaseBeforeCommit, G5);
}

#[test]
fn with_a_record_evicted_in_a_grant_everything_breaks() {
    assert_broken(Bug::EvictedInGrant, G3);
    assert_broken(Bug::EvictedInGrant, G5);
}

#[test]
fn with_an_evicted_lease_counting_again_a_released_token_is_good_again() {
    assert_broken(Bug::EvictedCounts, VERDICT);
}

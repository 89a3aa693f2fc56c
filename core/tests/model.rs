//! The model checker: one resource, two takers, a stale writer, and everything that can come between
//! two of their steps. It explores every order of these steps over the real [`Record`] and a model of
//! what surrounds it on a server: shared table, ledger, token sequence, fence lock, clock, crash,
//! promotion.
//!
//! What it proves holds for the few grants and failovers of its [`Scope`]s and any length of time. All
//! steps in one model would be too many states, so each scope leaves some of them out.
//!
//! **Each rule of the surroundings is proven to be needed**: a [`Bug`] breaks one, and the same model
//! must then find the guarantee that it breaks. A model that could not find them would prove nothing.
//!
//! What a step is. A step is what happens under one hold of the entry's LWLock or of the lock of the
//! ledger's page, or at one instant of a transaction's end. The exclusive fence lock is held for one
//! such moment only, so it is taken, used and let go within a step; the share locks follow from the
//! states of the transactions.
//!
//! What is left of the ledger. The row is written in place, so it is seen by everyone at once, and kept
//! from some moment between that and the next commit that waits for it: on the disk for a server that
//! is started again, on the standby for one that is promoted. A failover finds what was kept.
//!
//! What a guarantee means here
//! - *Granted*, for G3: recorded, by a transaction that has committed or may still. A grant that was
//!   rolled back gave nobody anything, so an older token may write again after it (and only where
//!   the record was evicted since; until then it is refused). Neither did one that no standby
//!   confirmed, once a standby is promoted that does not have it.
//! - *Believed in*: a holder counts its lease from the commit of the grant (or the renewal) for a
//!   full TTL, through crashes and promotions, and until it released it. That is longer than a holder
//!   may, who counts from when it asked.
//! - *Ended*, for what may not come back: released, and the record has seen it; not confirmed by the
//!   standby; or lost with a failover, which keeps none but the lease of the row that it finds.
//!   That one may live once more, even where it was released or never committed: a mark that is lost
//!   delays the next grant and no more.
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

use leasehold_core::record::{Begin, End, Over, Record, Release, Remembered, Standing, Verdict};
use stateright::{Checker, HasDiscoveries, Model, Property};

/// TTL of a grant, in ticks.
const TTL: i64 = 1;

/// TTL of the renewals that are longer than what the grant put into the ledger; no TTL is longer.
const TTL_LONG: i64 = 2;

/// The writer's transaction, where the takers' are their index + 1.
const WRITER: u64 = 3;

/// What becomes of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failover {
    /// It crashes and is started again.
    Restart,
    /// A standby is promoted that has every grant that was told.
    Lossless,
    /// A standby is promoted that may lack any; what comes after that are restarts.
    Lossy,
}

/// What a model has in it, besides acquire, renew, release, rollback, a stale writer and time.
#[derive(Clone, Copy, Debug)]
struct Scope {
    failover: Failover,
    failovers: u8,
    /// Tokens in the sequence.
    tokens: i64,
    /// Grants in memory, beside durable ones.
    memory: bool,
    /// Renewals to the long TTL.
    longer: bool,
    /// Rows are marked released.
    marks: bool,
    /// Old rows are deleted.
    sweeps: bool,
    /// Writes that are prepared, steps between the lock and the verdict of a write, and between the
    /// reading of a row and what is made of it.
    fences: bool,
}

/// The fence, on a server that keeps everything in the ledger.
const FENCES: Scope = Scope {
    failover: Failover::Restart,
    failovers: 1,
    tokens: 3,
    memory: false,
    longer: false,
    marks: false,
    sweeps: false,
    fences: true,
};

/// The ledger of such a server.
const DURABLE: Scope = Scope {
    longer: true,
    marks: true,
    fences: false,
    ..FENCES
};

/// A server with leases in memory.
const MEMORY: Scope = Scope {
    memory: true,
    longer: false,
    sweeps: true,
    ..DURABLE
};

/// How long they are waited for.
const GRACE: Scope = Scope {
    tokens: 2,
    longer: true,
    marks: false,
    sweeps: false,
    ..MEMORY
};

/// A server whose synchronous standby is promoted.
const LOSSLESS: Scope = Scope {
    failover: Failover::Lossless,
    sweeps: false,
    ..MEMORY
};

/// Its longer renewals.
const LOSSLESS_LONGER: Scope = Scope {
    failover: Failover::Lossless,
    ..GRACE
};

/// A server whose standby is promoted, which then crashes.
const LOSSY: Scope = Scope {
    failover: Failover::Lossy,
    failovers: 2,
    marks: false,
    ..LOSSLESS
};

impl Scope {
    /// The longest TTL there is.
    fn max_ttl(self) -> i64 {
        if self.longer { TTL_LONG } else { TTL }
    }
}

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
    /// Tokens are handed out before the sequence is flushed, or a promoted server goes on where the
    /// sequence that it received ends.
    SequenceNotKept,
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
    /// A rollback does not reach the record.
    AbortForgotten,
    /// A record is evicted in spite of a grant in progress.
    EvictedInGrant,
    /// A record is evicted whose lease the ledger brings back though it was released.
    EvictedUnmarked,
    /// The ledger row of a record that was evicted counts like one from before the start.
    EvictedCounts,
    /// Whether a row is from before the start is told by the floor that evictions raise.
    StartToldByRaisedFloor,
    /// A row that was read before the last eviction is still made a record.
    LoadedLate,
    /// What is evicted does not raise the floor.
    FloorNotRaised,
    /// A mark is taken by whatever row is there.
    MarkTakesNewer,
    /// A mark is noted when it is written, not when it is kept.
    MarkNotedEarly,
    /// A row that is read as released closes the row, though the mark may not be kept.
    LoadedMarkTrusted,
    /// A grant in memory leaves the row as it is.
    RowLeftOpen,
    /// A grant in memory does not wait until the row that it closed is kept.
    RowClosedLate,
    /// A grant in memory notes the row closed when it has written it.
    RowClosedEarly,
    /// A server that starts does not wait for the leases that were in memory.
    NoMemoryGrace,
    /// It waits for the longest grant in memory, not for the longest renewal.
    MemoryGraceOfGrants,
    /// A row is deleted while its lease is live.
    SweptLive,
    /// A row is deleted and the floor not raised.
    SweptAboveFloor,
    /// The row is deleted by a commit that is not waited for.
    SweptNotKept,
    /// A lease that the standby has not confirmed is one like others.
    UnconfirmedLives,
    /// That holds for renewals alone.
    UnconfirmedRenewalLives,
    /// A lossy promotion believes in the ledger.
    LossyTrustsLedger,
    /// A lossy promotion does not wait.
    NoLossyTime,
    /// The ledger takes the new timeline at the promotion, not with the first grant.
    TimelineTakenEarly,
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
    /// A token was good for another before its grant committed, or after its end.
    Verdict,
    /// A token that was granted was called unknown.
    Class,
}

/// The ledger's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Row {
    token: i64,
    ttl: i64,
    released: bool,
}

/// Where the lease of a grant is to be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Kind {
    Durable,
    Memory,
}

/// A taker's transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Tx {
    None,
    /// The grant has begun, no token yet.
    Begun,
    /// The grant is recorded, the ledger's row not yet written. The fence lock is shared from here to
    /// the end.
    Recorded(i64, Kind),
    /// The row is written where there is one; the first row of a resource comes with the commit.
    Granted(i64, Kind),
    /// The commit is in the log; the record does not know yet.
    Flushed(i64, Kind),
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
    /// The verdict was bad. Nothing has changed by it, so nothing is to be seen behind it.
    Refused(Verdict),
}

/// What the worker is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Mark {
    None,
    /// A row of this token, or an older one, is to be marked released.
    Due(i64),
    /// It is marked; the record does not know yet.
    Written(i64),
}

/// The resource and everything around it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    record: Option<Record>,
    ledger: Option<Row>,
    /// The row that a failover would find.
    kept: Option<Row>,
    /// A row that somebody read to make it a record.
    loading: Option<Option<Row>>,
    mark: Mark,
    /// When the server became writable, from now.
    writable: i64,
    /// How long nothing is granted.
    grace: i64,
    /// The longest TTL in memory, which is always kept.
    memory_ttl: i64,
    /// How far the clock was set ahead (a bug).
    ahead: i64,
    sequence: i64,
    /// The floor at the start, and what evictions raised it to.
    floor: i64,
    raised: i64,
    /// Rows up to this token were left behind by a lossy promotion.
    lost: i64,
    /// The ledger has not taken the timeline of a lossy promotion yet.
    timeline_open: bool,
    failovers: u8,
    takers: [Taker; 2],
    writer: Writer,
    /// The highest token handed out.
    highest: i64,
    /// Tokens whose grant has committed, as bits.
    committed: u8,
    /// Those of them that no standby has confirmed.
    unconfirmed: u8,
    /// Tokens that may not be good any more, as bits.
    ended: u8,
    broken: Option<Broken>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Tick,
    SetClock,
    Failover,
    FlushLog,
    Evict,
    RaiseFloor,
    Sweep,
    ReadLedger,
    Install,
    TakeMark,
    WriteMark,
    NoteMark,
    Begin(usize),
    Grant(usize, Kind),
    WriteRow(usize),
    Flush(usize),
    Commit(usize),
    Unconfirm(usize),
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
            kept: None,
            loading: None,
            mark: Mark::None,
            writable: 0,
            grace: 0,
            memory_ttl: 0,
            ahead: 0,
            sequence: 0,
            floor: 0,
            raised: 0,
            lost: 0,
            timeline_open: false,
            failovers: 0,
            takers: [taker; 2],
            writer: Writer::None,
            highest: 0,
            committed: 0,
            unconfirmed: 0,
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
            Tx::Recorded(token, _) | Tx::Granted(token, _) | Tx::Flushed(token, _) => token,
            _ => 0,
        };
        let committed = i64::from(self.committed.checked_ilog2().unwrap_or(0));
        let in_progress = self.takers.iter().map(in_progress).max();
        committed.max(in_progress.unwrap_or(0))
    }

    /// Whether the writer shares the fence lock.
    fn writer_shares(&self) -> bool {
        matches!(
            self.writer,
            Writer::Locked(_) | Writer::Passed(_) | Writer::Prepared(_, true)
        )
    }

    /// Whether a transaction other than this taker's shares the fence lock.
    fn shared_by_others(&self, taker: usize) -> bool {
        let other = matches!(
            self.takers[1 - taker].tx,
            Tx::Recorded(..) | Tx::Granted(..) | Tx::Flushed(..) | Tx::Renewing(..)
        );
        self.writer_shares() || other
    }

    /// Whether the grant of this kind in the record has to write the ledger.
    fn writes_ledger(&self, kind: Kind) -> bool {
        kind == Kind::Durable || self.record.is_some_and(|record| record.row_open)
    }

    /// A commit under `token` is in the log.
    fn commit_write(&mut self, token: i64) {
        self.expect(token >= self.granted(), Broken::G3);
    }

    /// Time passes.
    fn tick(&mut self) {
        let nearer = |left: &mut i64| *left = (*left - 1).max(0);
        if let Some(record) = &mut self.record {
            nearer(&mut record.lease.deadline_us);
            nearer(&mut record.grant.deadline_us);
        }
        for taker in &mut self.takers {
            taker.belief = taker.belief.filter(|(_, left)| *left > 1);
            if let Some((_, left)) = &mut taker.belief {
                nearer(left);
            }
            if let Tx::Renewing(_, left) = &mut taker.tx {
                nearer(left);
            }
        }
        nearer(&mut self.grace);
        self.writable = (self.writable - 1).max(-TTL_LONG);
    }
}

/// The model, with at most one bug.
struct Leasehold {
    scope: Scope,
    bug: Option<Bug>,
}

impl Leasehold {
    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// Whether a holder is told of its lease only when the standby has it.
    fn is_lossless(&self) -> bool {
        self.scope.failover == Failover::Lossless
    }

    /// Waits until everything in the ledger is kept: a standby that may lag is not waited for.
    fn keep(&self, w: &mut World) {
        if self.scope.failover != Failover::Lossy || w.failovers > 0 {
            w.kept = w.ledger;
        }
    }

    /// What a first touch makes of the ledger's row.
    fn recovered(&self, w: &World, row: Option<Row>) -> Record {
        let Some(row) = row else {
            return Record::unknown(0);
        };
        let start = if self.has(Bug::StartToldByRaisedFloor) {
            w.floor.max(w.raised)
        } else {
            w.floor
        };
        let remembered = Remembered {
            token: row.token,
            ttl_us: row.ttl,
            released: row.released || self.has(Bug::RecoveryForgets),
            broken: false,
            standing: if row.token <= w.lost && !self.has(Bug::LossyTrustsLedger) {
                Standing::Lost
            } else if row.token > start && !self.has(Bug::EvictedCounts) {
                Standing::Reclaimed
            } else {
                Standing::Trusted
            },
        };
        let mut record = Record::recovered(remembered, w.writable, 0);
        record.lease.deadline_us = record.lease.deadline_us.max(0);
        let kept = w.kept == Some(row) || self.has(Bug::LoadedMarkTrusted);
        if row.released && remembered.standing != Standing::Lost && !kept {
            record.row_open = true;
        }
        record
    }

    /// The record, made from the ledger where it is not there.
    fn record<'w>(&self, w: &'w mut World) -> &'w mut Record {
        let loaded = self.recovered(w, w.ledger);
        w.record.get_or_insert(loaded)
    }

    /// Makes one state of those that differ in nothing: which taker is which, what somebody read in
    /// vain (a row is only made a record where there is none, and not after an eviction), when the
    /// server became writable where no lease of before is left, how tokens ended that are older than
    /// a granted one, and what only a failover would ask for after the last.
    fn normalize(&self, w: &mut World) {
        let of_before = w
            .ledger
            .is_some_and(|row| row.token <= w.floor && !row.released);
        if !of_before && w.loading.is_none() {
            w.writable = 0;
        }
        w.writable = w.writable.max(-self.scope.max_ttl());
        let granted = (w.committed & !w.unconfirmed).checked_ilog2();
        let older = granted.map_or(0, |token| bit(token.into()) - 1);
        w.committed |= older;
        w.ended &= !older;
        if w.record.is_some() && !self.has(Bug::LoadedLate) {
            w.loading = None;
        }
        if w.failovers == self.scope.failovers {
            w.kept = w.ledger;
            w.memory_ttl = 0;
            w.unconfirmed = 0;
            w.timeline_open = false;
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

    /// Everything that is not kept is gone; who holds a lease knows nothing of it.
    fn failover(&self, w: &mut World) {
        let promoted = self.scope.failover == Failover::Lossy && w.failovers == 0;
        w.failovers += 1;
        w.ledger = w.kept;
        w.record = None;
        w.loading = None;
        w.mark = Mark::None;
        for taker in &mut w.takers {
            taker.tx = Tx::None;
        }
        w.writer = match w.writer {
            Writer::Prepared(token, _) => Writer::Prepared(token, !self.has(Bug::PreparedLockLost)),
            _ => Writer::None,
        };
        if self.has(Bug::SequenceNotKept) {
            w.sequence = w.ledger.map_or(0, |row| row.token);
        }
        w.floor = w.sequence;
        w.raised = w.sequence;
        self.start(w, promoted);
        self.count_what_is_left(w, promoted);
    }

    /// From when on leases run, and how long nothing is granted.
    fn start(&self, w: &mut World, promoted: bool) {
        w.writable = if self.has(Bug::RecoveryFromGrant) {
            // the grant was before the crash
            -TTL_LONG
        } else {
            0
        };
        if promoted {
            w.timeline_open = true;
            // what was kept of it may be from before the first lease in memory
            w.memory_ttl = 0;
        }
        w.grace = if w.timeline_open {
            w.lost = w.sequence;
            if self.has(Bug::NoLossyTime) {
                0
            } else {
                TTL_LONG
            }
        } else {
            w.memory_ttl
        };
        if self.has(Bug::TimelineTakenEarly) {
            w.timeline_open = false;
        }
    }

    /// Which tokens count after a failover: of what was there before, none but the row's is left.
    fn count_what_is_left(&self, w: &mut World, promoted: bool) {
        let open = w.ledger.filter(|row| !row.released && row.token > w.lost);
        let left = open.map_or(0, |row| bit(row.token));
        if self.is_lossless() {
            w.committed &= !w.unconfirmed;
            w.unconfirmed = 0;
        }
        if !promoted {
            w.committed |= left;
        }
        w.ended = (bit(w.highest + 1) - 1) & !left;
    }

    fn may_evict(&self, w: &World) -> bool {
        let Some(record) = w.record else {
            return false;
        };
        let in_grant = record.grant.owner != 0;
        record.is_evictable(w.ahead)
            || (self.has(Bug::EvictedInGrant) && in_grant)
            || (self.has(Bug::EvictedUnmarked) && !in_grant && !record.is_live(w.ahead))
    }

    /// Forgets the record.
    fn evict(&self, w: &mut World) {
        let Some(record) = w.record.take() else {
            return;
        };
        if record.is_beyond_the_ledger() && !self.has(Bug::FloorNotRaised) {
            w.raised = w.raised.max(record.t_max);
        }
        if !self.has(Bug::LoadedLate) {
            w.loading = None;
        }
    }

    /// Deletes the row, by a commit that is waited for.
    fn sweep(&self, w: &mut World) -> bool {
        let Some(row) = w.ledger else {
            return false;
        };
        let record = w.record.unwrap_or_else(|| self.recovered(w, w.ledger));
        let swept_live = self.has(Bug::SweptLive) && record.is_live(w.ahead);
        if !record.is_evictable(w.ahead) && !swept_live {
            return false;
        }
        if !swept_live {
            self.evict(w);
        }
        if !self.has(Bug::SweptAboveFloor) {
            w.raised = w.raised.max(row.token);
        }
        w.ledger = None;
        if !self.has(Bug::SweptNotKept) {
            self.keep(w);
        }
        true
    }

    /// The steps of marking the row released.
    fn mark(&self, w: &mut World, action: Action) -> bool {
        match (action, w.mark) {
            (Action::TakeMark, Mark::None) if self.scope.marks => {
                let Some(token) = w.record.and_then(|record| record.due_mark()) else {
                    return false;
                };
                w.mark = Mark::Due(token);
            }
            (Action::WriteMark, Mark::Due(token)) => {
                let any = self.has(Bug::MarkTakesNewer);
                if let Some(row) = w.ledger.as_mut().filter(|row| any || row.token <= token) {
                    row.released = true;
                }
                w.mark = Mark::Written(token);
            }
            (Action::NoteMark, Mark::Written(token)) => {
                if !self.has(Bug::MarkNotedEarly) {
                    self.keep(w);
                }
                if let Some(record) = &mut w.record {
                    record.note_marked(token);
                }
                w.mark = Mark::None;
            }
            _ => return false,
        }
        true
    }

    /// The steps that no transaction takes.
    fn step(&self, w: &mut World, action: Action) -> bool {
        match action {
            Action::Tick => w.tick(),
            Action::SetClock if self.has(Bug::ClockCanBeSet) => w.ahead = TTL_LONG - w.ahead,
            Action::Failover if w.failovers < self.scope.failovers => self.failover(w),
            Action::FlushLog => w.kept = w.ledger,
            Action::Evict if self.may_evict(w) => self.evict(w),
            // other resources do, in the same database
            Action::RaiseFloor if self.scope.sweeps => w.raised = w.highest,
            Action::Sweep if self.scope.sweeps => return self.sweep(w),
            Action::ReadLedger if w.record.is_none() => {
                if self.scope.fences {
                    w.loading = Some(w.ledger);
                } else {
                    self.record(w);
                }
            }
            Action::Install => {
                let Some(row) = w.loading.take() else {
                    return false;
                };
                let loaded = self.recovered(w, row);
                w.record.get_or_insert(loaded);
            }
            _ => return false,
        }
        true
    }

    /// The steps of an acquire until its commit.
    fn acquire(&self, w: &mut World, action: Action, i: usize) -> bool {
        let (tx, now) = (w.takers[i].tx, w.ahead);
        match (action, tx) {
            (Action::Begin(_), Tx::None) if w.takers[i].belief.is_none() && w.grace == 0 => {
                if self.record(w).begin(owner(i), now) != Begin::Begun {
                    return false;
                }
                w.takers[i].tx = Tx::Begun;
            }
            (Action::Grant(_, kind), Tx::Begun) if w.sequence < self.scope.tokens => {
                let drained = !w.shared_by_others(i) || self.has(Bug::NoFenceLock);
                return drained && self.grant(w, i, kind);
            }
            (Action::WriteRow(_), Tx::Recorded(token, kind)) => {
                self.write_row(w, token, kind);
                w.takers[i].tx = Tx::Granted(token, kind);
            }
            (Action::Flush(_), Tx::Granted(token, kind)) => self.flush(w, i, token, kind),
            _ => return false,
        }
        true
    }

    /// Takes a token and records the grant.
    fn grant(&self, w: &mut World, i: usize, kind: Kind) -> bool {
        let (token, now) = (w.sequence + 1, w.ahead);
        let durable = kind == Kind::Durable;
        let recorded = w
            .record
            .as_mut()
            .is_some_and(|record| record.grant(owner(i), token, TTL, durable, now));
        w.sequence = token;
        if !recorded {
            // only with a bug does a token not rise: it is wasted, and a wasted one was not used
            return true;
        }
        w.expect(token > w.highest, Broken::G2);
        w.expect(w.takers[1 - i].belief.is_none(), Broken::G5);
        w.highest = w.highest.max(token);
        w.timeline_open = false;
        if !durable && !self.has(Bug::NoMemoryGrace) {
            w.memory_ttl = w.memory_ttl.max(TTL);
        }
        w.takers[i].tx = if w.writes_ledger(kind) && w.ledger.is_some() {
            Tx::Recorded(token, kind)
        } else {
            Tx::Granted(token, kind)
        };
        if self.has(Bug::ToldBeforeFlush) {
            w.takers[i].belief = Some((token, TTL));
        }
        true
    }

    /// Overwrites the row, or closes it.
    fn write_row(&self, w: &mut World, token: i64, kind: Kind) {
        let Some(row) = &mut w.ledger else {
            return;
        };
        match kind {
            Kind::Durable => {
                *row = Row {
                    token,
                    ttl: TTL,
                    released: false,
                };
            }
            Kind::Memory => row.released |= !self.has(Bug::RowLeftOpen),
        }
        if kind == Kind::Memory
            && self.has(Bug::RowClosedEarly)
            && let Some(record) = &mut w.record
        {
            record.row_closed();
        }
    }

    /// The commit of a grant is written to the log, and flushed where it wrote the ledger.
    fn flush(&self, w: &mut World, i: usize, token: i64, kind: Kind) {
        w.commit_write(token);
        if kind == Kind::Durable && w.ledger.is_none() {
            w.ledger = Some(Row {
                token,
                ttl: TTL,
                released: false,
            });
        }
        w.takers[i].tx = Tx::Flushed(token, kind);
        if !self.is_lossless() {
            self.wait_for_grant(w, kind);
            w.committed |= bit(token);
            w.takers[i].belief = Some((token, TTL));
        }
    }

    /// Waits until what the grant wrote to the ledger is kept.
    fn wait_for_grant(&self, w: &mut World, kind: Kind) {
        let late = kind == Kind::Memory && self.has(Bug::RowClosedLate);
        if w.writes_ledger(kind) && !late {
            self.keep(w);
        }
    }

    /// The ends of an acquire's commit: it is kept, or the wait for the standby was cancelled.
    fn commit(&self, w: &mut World, action: Action, i: usize) -> bool {
        let Tx::Flushed(token, kind) = w.takers[i].tx else {
            return false;
        };
        let cancelled = matches!(action, Action::Unconfirm(_));
        if cancelled && !(self.is_lossless() && w.writes_ledger(kind)) {
            return false;
        }
        if self.is_lossless() && !cancelled {
            self.wait_for_grant(w, kind);
        }
        w.committed |= bit(token);
        w.takers[i].tx = Tx::None;
        w.takers[i].belief = Some((token, TTL));
        // an entry that is not there stays so: no ledger is read at the end of a commit
        if let Some(record) = &mut w.record {
            record.commit(owner(i), w.ahead);
            if kind == Kind::Memory && !cancelled && !self.has(Bug::RowLeftOpen) {
                record.row_closed();
            }
        }
        if cancelled && !self.has(Bug::UnconfirmedLives) {
            w.unconfirmed |= bit(token);
            self.unconfirm(w, i, token);
        }
        true
    }

    /// The lease is over at once, and its holder was told so.
    fn unconfirm(&self, w: &mut World, i: usize, token: i64) {
        if let Some(record) = &mut w.record {
            record.unconfirmed(token, w.ahead);
            // a renewal may have run out before its commit
            if record.lease.token == token && record.lease.end == End::Unconfirmed {
                w.ended |= bit(token);
            }
        }
        w.takers[i].belief = None;
    }

    /// A taker's transaction is rolled back.
    fn abort(&self, w: &mut World, i: usize) -> bool {
        match w.takers[i].tx {
            Tx::Begun | Tx::Recorded(..) | Tx::Granted(..) => {
                if let Some(record) = &mut w.record
                    && !self.has(Bug::AbortForgotten)
                {
                    record.abort(owner(i));
                }
                if self.has(Bug::TokenReturned) && w.takers[i].tx != Tx::Begun {
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
        let record = self.record(w);
        let lasting = record.lasting(owner(i), token, now);
        if !record.renew(owner(i), token, ttl, now) {
            return false;
        }
        w.expect(w.ended & bit(token) == 0, Broken::Verdict);
        if lasting.is_some_and(|lasting| !lasting.durable) && !self.has(Bug::MemoryGraceOfGrants) {
            w.memory_ttl = w.memory_ttl.max(ttl);
        }
        let lengthens = lasting.is_some_and(|lasting| lasting.durable && lasting.ttl_us < ttl);
        if lengthens && !self.has(Bug::RenewalNotDurable) {
            if let Some(row) = w.ledger.as_mut().filter(|row| row.token == token) {
                row.ttl = row.ttl.max(ttl);
            }
            w.takers[i].tx = Tx::Renewing(token, ttl);
        } else {
            w.takers[i].belief = Some((token, left.max(ttl)));
        }
        true
    }

    /// The commit of a renewal is kept, or the wait for the standby was cancelled.
    fn commit_renewal(&self, w: &mut World, i: usize, cancelled: bool) -> bool {
        let Tx::Renewing(token, left) = w.takers[i].tx else {
            return false;
        };
        if cancelled && !self.is_lossless() {
            return false;
        }
        let before = w.takers[i].belief.map_or(0, |(_, left)| left);
        let left = left.max(before);
        w.takers[i] = Taker {
            tx: Tx::None,
            belief: (left > 0).then_some((token, left)),
        };
        if cancelled && !self.has(Bug::UnconfirmedRenewalLives) {
            self.unconfirm(w, i, token);
            return true;
        }
        if !cancelled {
            self.keep(w);
        }
        if let Some(record) = &mut w.record {
            record.note_durable_ttl(token, TTL_LONG);
        }
        true
    }

    /// The steps of a release, by whoever believes in the lease.
    fn release(&self, w: &mut World, action: Action, i: usize) -> bool {
        let (Taker { tx, belief }, now) = (w.takers[i], w.ahead);
        match (action, tx, belief) {
            (Action::AskRelease(_), Tx::None, Some((token, _))) => {
                let early = self.has(Bug::ReleaseBeforeCommit);
                let record = self.record(w);
                if record.release_answer(owner(i), token, now) != Release::Yes {
                    return false;
                }
                if early {
                    record.release(token, now);
                }
                w.takers[i].tx = Tx::Releasing(token);
            }
            (Action::CommitRelease(_), Tx::Releasing(token), _) => {
                w.takers[i].tx = Tx::Released(token);
                w.takers[i].belief = None;
            }
            (Action::Release(_), Tx::Released(token), _) => {
                if let Some(record) = &mut w.record {
                    record.release(token, now);
                    if record.lease.token == token && record.lease.end == End::Released {
                        w.ended |= bit(token);
                    }
                }
                w.takers[i].tx = Tx::None;
            }
            _ => return false,
        }
        true
    }

    /// The fence's verdict on the writer's token.
    fn check(&self, w: &mut World, token: i64, passed: Writer) {
        let (floor, now) = (w.floor.max(w.raised), w.ahead);
        let verdict = self.record(w).verdict(&[token], WRITER, floor, false, now);
        let is_committed = w.committed & bit(token) != 0;
        if matches!(verdict, Verdict::Good { .. }) {
            w.expect(is_committed, Broken::Verdict);
            w.expect(w.ended & bit(token) == 0, Broken::Verdict);
            w.writer = passed;
            return;
        }
        if verdict == Verdict::Unknown {
            let in_commit =
                |taker: &Taker| matches!(taker.tx, Tx::Flushed(flushed, _) if flushed == token);
            let in_commit = w.takers.iter().any(in_commit);
            w.expect(!is_committed || in_commit, Broken::Class);
        }
        w.writer = Writer::Refused(verdict);
    }

    /// The steps of the writer.
    fn write(&self, w: &mut World, action: Action) -> bool {
        match (action, w.writer) {
            (Action::Present(token), Writer::None) if token <= w.highest => {
                if self.has(Bug::VerdictBeforeLock) {
                    self.check(w, token, Writer::Checked(token));
                } else if self.scope.fences {
                    w.writer = Writer::Locked(token);
                } else {
                    self.check(w, token, Writer::Passed(token));
                }
            }
            (Action::Lock, Writer::Checked(token)) => w.writer = Writer::Passed(token),
            (Action::Check, Writer::Locked(token)) => self.check(w, token, Writer::Passed(token)),
            (Action::Prepare, Writer::Passed(token)) if self.scope.fences => {
                w.writer = Writer::Prepared(token, true);
            }
            (Action::CommitWrite, Writer::Passed(token) | Writer::Prepared(token, _)) => {
                w.commit_write(token);
                w.writer = Writer::None;
            }
            // before the verdict a rollback undoes nothing but the lock
            (Action::AbortWrite, Writer::Passed(_) | Writer::Prepared(..)) => {
                w.writer = Writer::None;
            }
            _ => return false,
        }
        true
    }

    /// Whether somebody who comes when every lease has run out can have the resource, where no
    /// transaction is open.
    fn can_be_had(&self, w: &World) -> bool {
        let open = w.takers.iter().any(|taker| taker.tx != Tx::None) || w.writer_shares();
        if open {
            return true;
        }
        let mut later = w.clone();
        for _ in 0..TTL_LONG {
            later.tick();
        }
        let now = later.ahead;
        later.grace == 0 && self.record(&mut later).begin(WRITER, now) == Begin::Begun
    }
}

impl Model for Leasehold {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::new()]
    }

    fn actions(&self, w: &World, actions: &mut Vec<Action>) {
        use Action::*;
        // what comes after a guarantee was broken is of no interest, but for two who believe
        let broken = w.broken.is_some_and(|broken| broken != Broken::G5);
        if matches!(w.writer, Writer::Refused(_)) || broken {
            return;
        }
        actions.extend([Tick, SetClock, Failover, FlushLog, Evict, RaiseFloor, Sweep]);
        actions.extend([ReadLedger, Install, TakeMark, WriteMark, NoteMark]);
        for i in [0, 1] {
            actions.extend([Begin(i), Grant(i, Kind::Durable)]);
            if self.scope.memory {
                actions.push(Grant(i, Kind::Memory));
            }
            actions.extend([WriteRow(i), Flush(i), Commit(i), Unconfirm(i), Abort(i)]);
            actions.extend([Renew(i), CommitRenewal(i)]);
            if self.scope.longer {
                actions.push(RenewLonger(i));
            }
            actions.extend([AskRelease(i), CommitRelease(i), Release(i)]);
        }
        actions.extend((1..=self.scope.tokens).map(Present));
        actions.extend([Lock, Check, Prepare, CommitWrite, AbortWrite]);
    }

    /// The state after the action; none where it can't be taken.
    fn next_state(&self, last: &World, action: Action) -> Option<World> {
        use Action::*;
        let mut w = last.clone();
        let taken = match action {
            Tick | SetClock | Failover | FlushLog | Evict | RaiseFloor | Sweep | ReadLedger
            | Install => self.step(&mut w, action),
            TakeMark | WriteMark | NoteMark => self.mark(&mut w, action),
            Begin(i) | Grant(i, _) | WriteRow(i) | Flush(i) => self.acquire(&mut w, action, i),
            Commit(i) => self.commit(&mut w, action, i),
            Unconfirm(i) => self.commit(&mut w, action, i) || self.commit_renewal(&mut w, i, true),
            Abort(i) => self.abort(&mut w, i),
            Renew(i) => self.renew(&mut w, i, TTL),
            RenewLonger(i) => self.renew(&mut w, i, TTL_LONG),
            CommitRenewal(i) => self.commit_renewal(&mut w, i, false),
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
            properties.extend(match self.scope.failover {
                Failover::Restart if self.scope.memory => stories_in_memory(self.scope),
                Failover::Restart => stories_of_restarts(self.scope),
                Failover::Lossless => stories_of_a_synchronous_standby(self.scope),
                Failover::Lossy => stories_of_a_lagging_standby(),
            });
        }
        properties
    }
}

const G1: &str = "G1: at most one lease is believed in";
const G2: &str = "G2: tokens rise and none is used twice";
const G3: &str = "G3: no write commits under a token older than a granted one";
const G5: &str = "G5: nothing is granted while a lease is believed in";
const G6: &str = "G6: a resource can be had once its lease is over and no transaction open";
const VERDICT: &str = "a token is good from the commit of its grant until its end";
const CLASS: &str = "a token that was granted is never unknown";

/// What always holds.
fn guarantees() -> Vec<Property<Leasehold>> {
    vec![
        Property::always(G1, |_, w: &World| {
            w.takers.iter().filter(|t| t.belief.is_some()).count() <= 1
        }),
        Property::always(G2, |_, w: &World| w.broken != Some(Broken::G2)),
        Property::always(G3, |_, w: &World| w.broken != Some(Broken::G3)),
        Property::always(G5, |_, w: &World| w.broken != Some(Broken::G5)),
        Property::always(G6, |m: &Leasehold, w: &World| m.can_be_had(w)),
        Property::always(VERDICT, |_, w: &World| {
            let came_back = |r: &Record| r.is_live(w.ahead) && w.ended & bit(r.lease.token) != 0;
            w.broken != Some(Broken::Verdict) && !w.record.as_ref().is_some_and(came_back)
        }),
        Property::always(CLASS, |_, w: &World| w.broken != Some(Broken::Class)),
    ]
}

fn refused(w: &World, as_: fn(Verdict) -> bool) -> bool {
    matches!(w.writer, Writer::Refused(verdict) if as_(verdict))
}

fn record(w: &World, is: fn(&Record) -> bool) -> bool {
    w.record.as_ref().is_some_and(is)
}

/// The lease that is believed in is the one that the record has live.
fn believed_is_live(w: &World) -> bool {
    let believed = w.takers.iter().find_map(|t| Some(t.belief?.0));
    believed.is_some() && w.record.map(|r| r.lease.token) == believed && record(w, |r| r.is_live(0))
}

/// What must be able to happen, or the guarantees would hold for want of trouble.
fn stories() -> Vec<Property<Leasehold>> {
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
        Property::sometimes("two grants in a row are rolled back", |_, w: &World| {
            w.highest == 2 && w.committed == 0
        }),
        Property::sometimes(
            "a failover finds the row of a grant that did not commit",
            |_, w: &World| {
                let last = w.ledger.map_or(0, |row| row.token);
                w.failovers == 1 && last == w.highest && last == 2 && w.floor == 2
            },
        ),
    ]
}

fn stories_of_restarts(scope: Scope) -> Vec<Property<Leasehold>> {
    let mut stories = vec![Property::sometimes(
        "a lease lives on through a crash",
        |_, w: &World| w.failovers == 1 && believed_is_live(w),
    )];
    if scope.fences {
        stories.push(Property::sometimes(
            "a prepared write survives a crash",
            |_, w: &World| w.failovers == 1 && matches!(w.writer, Writer::Prepared(..)),
        ));
    }
    if scope.longer {
        stories.push(Property::sometimes(
            "a longer TTL lives on through a crash",
            |_, w: &World| w.failovers == 1 && record(w, |r| r.lease.deadline_us == TTL_LONG),
        ));
    }
    if scope.marks {
        stories.push(Property::sometimes(
            "a mark is kept and the record knows",
            |_, w: &World| {
                record(w, |r| r.lease.end == End::Released && !r.row_open)
                    && w.kept.is_some_and(|row| row.released)
            },
        ));
    }
    stories
}

fn stories_in_memory(scope: Scope) -> Vec<Property<Leasehold>> {
    let mut stories = vec![
        Property::sometimes("a grant in memory closes a row", |_, w: &World| {
            record(w, |r| r.lease.token != 0 && !r.lease.durable)
                && w.kept.is_some_and(|row| row.released)
        }),
        Property::sometimes("a row is written over a lease in memory", |_, w: &World| {
            record(w, |r| {
                r.grant.durable && r.grant.token != 0 && !r.lease.durable && r.lease.token != 0
            })
        }),
        Property::sometimes(
            "a lease in memory is lost, and still waited for",
            |_, w: &World| {
                let believed = w.takers.iter().any(|t| t.belief.is_some());
                w.failovers == 1 && w.ledger.is_none() && w.grace > 0 && believed
            },
        ),
    ];
    if scope.sweeps {
        stories.push(Property::sometimes(
            "a resource is forgotten altogether",
            |_, w: &World| {
                let nothing = w.record.is_none() && w.ledger.is_none() && w.failovers == 0;
                nothing && w.committed != 0
            },
        ));
    }
    stories
}

fn stories_of_a_synchronous_standby(scope: Scope) -> Vec<Property<Leasehold>> {
    let mut stories = vec![
        Property::sometimes("a lease lives on through a promotion", |_, w: &World| {
            w.failovers == 1 && believed_is_live(w)
        }),
        Property::sometimes(
            "a token that the standby has not confirmed is refused",
            |_, w: &World| refused(w, |verdict| verdict == Verdict::Over(Over::Unconfirmed)),
        ),
        Property::sometimes(
            "the lease before one that was not confirmed lives on",
            |_, w: &World| {
                let last = w.record.map_or(0, |r| r.lease.token);
                w.failovers == 1 && record(w, |r| r.is_live(0)) && w.highest > last
            },
        ),
    ];
    if scope.longer {
        stories.push(Property::sometimes(
            "a longer TTL lives on through a promotion",
            |_, w: &World| w.failovers == 1 && record(w, |r| r.lease.deadline_us == TTL_LONG),
        ));
    }
    stories
}

fn stories_of_a_lagging_standby() -> Vec<Property<Leasehold>> {
    vec![
        Property::sometimes("a lease that is believed in is lost", |_, w: &World| {
            w.failovers == 1
                && record(w, |r| r.lease.end == End::Lost)
                && w.takers.iter().any(|t| t.belief.is_some())
        }),
        Property::sometimes("a lease lives on where it was promoted", |_, w: &World| {
            w.failovers == 2 && believed_is_live(w)
        }),
        Property::sometimes("a crash begins the lossy time anew", |_, w: &World| {
            w.failovers == 2 && w.grace > 0 && w.lost == w.floor && w.highest > 0
        }),
    ]
}

fn assert_kept(scope: Scope) {
    let checker = Leasehold { scope, bug: None }
        .checker()
        .finish_when(HasDiscoveries::AnyFailures)
        .spawn_bfs()
        .join();
    println!(
        "{} states, {} steps deep",
        checker.unique_state_count(),
        checker.max_depth()
    );
    checker.assert_properties();
}

#[test]
fn every_order_of_steps_keeps_the_guarantees_of_the_fence() {
    assert_kept(FENCES);
}

#[test]
fn every_order_of_steps_keeps_the_guarantees_of_the_ledger() {
    assert_kept(DURABLE);
}

#[test]
fn every_order_of_steps_keeps_the_guarantees_with_leases_in_memory() {
    assert_kept(MEMORY);
}

#[test]
fn every_order_of_steps_keeps_the_guarantees_while_leases_in_memory_are_waited_for() {
    assert_kept(GRACE);
}

#[test]
fn every_order_of_steps_keeps_the_guarantees_through_a_lossless_promotion() {
    assert_kept(LOSSLESS);
}

#[test]
fn every_order_of_steps_keeps_the_guarantees_through_a_lossless_promotion_with_longer_renewals() {
    assert_kept(LOSSLESS_LONGER);
}

#[test]
fn every_order_of_steps_keeps_the_guarantees_through_a_lossy_promotion() {
    assert_kept(LOSSY);
}

/// The model with the bug finds that the guarantee is broken.
fn assert_broken(scope: Scope, bug: Bug, guarantee: &'static str) {
    let found = HasDiscoveries::AnyOf(BTreeSet::from([guarantee]));
    let checker = Leasehold {
        scope,
        bug: Some(bug),
    }
    .checker()
    .finish_when(found)
    .spawn_bfs()
    .join();
    let path = checker.assert_any_discovery(guarantee);
    println!("{bug:?} breaks {guarantee}: {:?}", path.into_actions());
}

#[test]
fn without_the_fence_lock_a_stale_write_commits() {
    assert_broken(FENCES, Bug::NoFenceLock, G3);
}

#[test]
fn with_the_verdict_before_the_lock_a_stale_write_commits() {
    assert_broken(FENCES, Bug::VerdictBeforeLock, G3);
}

#[test]
fn with_the_locks_of_prepared_transactions_lost_a_stale_write_commits() {
    assert_broken(FENCES, Bug::PreparedLockLost, G3);
}

#[test]
fn with_a_row_loaded_late_a_stale_write_commits() {
    assert_broken(FENCES, Bug::LoadedLate, G3);
}

#[test]
fn with_tokens_given_back_one_is_used_twice() {
    assert_broken(FENCES, Bug::TokenReturned, G2);
}

#[test]
fn with_the_sequence_not_kept_a_token_is_used_twice() {
    assert_broken(FENCES, Bug::SequenceNotKept, G2);
    assert_broken(LOSSY, Bug::SequenceNotKept, G2);
}

#[test]
fn with_a_clock_that_can_be_set_a_lease_is_granted_early() {
    assert_broken(FENCES, Bug::ClockCanBeSet, G5);
    assert_broken(FENCES, Bug::ClockCanBeSet, G1);
}

#[test]
fn with_the_holder_told_before_the_flush_a_lease_is_granted_early() {
    assert_broken(FENCES, Bug::ToldBeforeFlush, G5);
    assert_broken(LOSSLESS, Bug::ToldBeforeFlush, G5);
}

#[test]
fn with_leases_forgotten_by_a_restart_one_is_granted_early() {
    assert_broken(FENCES, Bug::RecoveryForgets, G5);
}

#[test]
fn with_recovered_leases_run_from_their_grant_one_is_granted_early() {
    assert_broken(FENCES, Bug::RecoveryFromGrant, G5);
}

#[test]
fn with_a_longer_renewal_not_in_the_ledger_a_lease_is_granted_early() {
    assert_broken(DURABLE, Bug::RenewalNotDurable, G5);
}

#[test]
fn with_a_release_before_its_commit_a_lease_is_granted_early() {
    assert_broken(FENCES, Bug::ReleaseBeforeCommit, G5);
}

#[test]
fn with_a_rollback_that_does_not_reach_the_record_a_resource_is_stuck() {
    assert_broken(FENCES, Bug::AbortForgotten, G6);
}

#[test]
fn with_a_record_evicted_in_a_grant_everything_breaks() {
    assert_broken(FENCES, Bug::EvictedInGrant, G3);
    assert_broken(FENCES, Bug::EvictedInGrant, G5);
}

#[test]
fn with_a_record_evicted_before_its_release_is_marked_the_token_is_good_again() {
    assert_broken(FENCES, Bug::EvictedUnmarked, VERDICT);
}

#[test]
fn with_an_evicted_lease_counting_again_a_released_token_is_good_again() {
    assert_broken(FENCES, Bug::EvictedCounts, VERDICT);
}

#[test]
fn with_the_start_told_by_the_raised_floor_a_token_that_was_rolled_back_is_good() {
    assert_broken(FENCES, Bug::StartToldByRaisedFloor, VERDICT);
}

#[test]
fn with_the_floor_not_raised_a_token_that_was_granted_is_unknown() {
    assert_broken(MEMORY, Bug::FloorNotRaised, CLASS);
    assert_broken(MEMORY, Bug::SweptAboveFloor, CLASS);
}

#[test]
fn with_a_mark_on_a_newer_row_a_lease_is_granted_early() {
    assert_broken(DURABLE, Bug::MarkTakesNewer, G5);
}

#[test]
fn with_a_mark_noted_before_it_is_kept_a_stale_write_commits() {
    assert_broken(MEMORY, Bug::MarkNotedEarly, G3);
    assert_broken(LOSSLESS, Bug::MarkNotedEarly, G3);
}

#[test]
fn with_a_mark_believed_before_it_is_kept_a_stale_write_commits() {
    assert_broken(MEMORY, Bug::LoadedMarkTrusted, G3);
    assert_broken(LOSSLESS, Bug::LoadedMarkTrusted, G3);
}

#[test]
fn with_a_row_left_open_under_a_lease_in_memory_a_stale_write_commits() {
    assert_broken(MEMORY, Bug::RowLeftOpen, G3);
    assert_broken(LOSSLESS, Bug::RowLeftOpen, G3);
}

#[test]
fn with_a_row_not_closed_for_good_under_a_lease_in_memory_a_stale_write_commits() {
    assert_broken(MEMORY, Bug::RowClosedLate, G3);
    assert_broken(MEMORY, Bug::RowClosedEarly, G3);
    assert_broken(LOSSLESS, Bug::RowClosedLate, G3);
    assert_broken(LOSSLESS, Bug::RowClosedEarly, G3);
}

#[test]
fn with_leases_in_memory_not_waited_for_one_is_granted_early() {
    assert_broken(GRACE, Bug::NoMemoryGrace, G5);
    assert_broken(LOSSLESS, Bug::NoMemoryGrace, G5);
}

#[test]
fn with_their_renewals_not_waited_for_one_is_granted_early() {
    assert_broken(GRACE, Bug::MemoryGraceOfGrants, G5);
}

#[test]
fn with_the_row_of_a_live_lease_deleted_one_is_granted_early() {
    assert_broken(MEMORY, Bug::SweptLive, G5);
}

#[test]
fn with_a_row_that_comes_back_after_it_was_deleted_a_stale_write_commits() {
    assert_broken(MEMORY, Bug::SweptNotKept, G3);
}

#[test]
fn with_a_lease_that_no_standby_confirmed_one_is_granted_early() {
    assert_broken(LOSSLESS, Bug::UnconfirmedLives, G5);
    assert_broken(LOSSLESS_LONGER, Bug::UnconfirmedRenewalLives, G5);
}

#[test]
fn with_the_ledger_trusted_after_a_lossy_promotion_a_lost_token_is_good() {
    assert_broken(LOSSY, Bug::LossyTrustsLedger, VERDICT);
}

#[test]
fn with_no_wait_after_a_lossy_promotion_a_lease_is_granted_early() {
    assert_broken(LOSSY, Bug::NoLossyTime, G5);
    assert_broken(LOSSY, Bug::TimelineTakenEarly, G5);
}

//! The lease record of one resource and everything that can happen to it.
//!
//! A record is plain data: it lives in shared memory, is copied freely, and every transition is a
//! pure function of the record and of the arguments. Time comes in as microseconds of a clock that
//! no one can set; a transaction comes in as an `owner` number, unique among the transactions that
//! run; the fence lock, the ledger and the token sequence are the caller's.
//!
//! Invariants
//! - **`t_max` never falls.** It is raised when a grant is recorded, not when it commits, and stays
//!   raised when the grant is rolled back.
//! - **At most one lease runs.** A grant can only begin when the last lease is over, and while a
//!   grant is in progress no other can begin.
//! - A lease can only run (be live) while its token is `t_max`.
//! - A caller records a grant only while it holds the fence lock exclusively, so no transaction that
//!   passed a verdict on an older token is still open then. This module cannot see that lock: the
//!   model checker in `tests/model.rs` proves what holds with it, and what breaks without.

use crate::queue::PATIENCE_US;

/// Microseconds, of a clock that no one can set or of a duration.
pub type Micros = i64;

/// How a lease ended, as far as more than the clock tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum End {
    /// It has not been ended: it runs until its deadline.
    Running = 0,
    /// Its holder released it.
    Released = 1,
    /// The ledger knows it, but it is not to be trusted here: granted by another server, in another
    /// database, or on a timeline that was left. Its token still counts as T_max.
    Lost = 2,
    /// It was over when its record was forgotten; whether released or expired is not known any more.
    Reclaimed = 3,
    /// Its commit did not wait for the synchronous standby until that had it: the wait was cancelled.
    Unconfirmed = 4,
    /// An administrator ended it.
    Broken = 5,
    /// The same, and his transaction has committed, but still holds its locks: the token is closed, and nobody else is
    /// granted the resource yet.
    Breaking = 6,
}

/// The last committed lease of a resource; `token` 0 when there has been none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Lease {
    /// The fencing token that names this lease.
    pub token: i64,
    /// The TTL that the deadline was last computed from.
    pub ttl_us: Micros,
    /// The longest TTL of this lease that is durable in the ledger.
    pub ledger_ttl_us: Micros,
    /// The first instant at which the lease is over. Where it was ended before that, or where nothing
    /// more is known than that it is over: since when it is over at the latest.
    pub deadline_us: Micros,
    /// Whether it was ended before that.
    pub end: End,
    /// It was granted before the server was started, and the ledger brought it back: forgotten after a
    /// release that the ledger has not been told of, it would come back once more.
    pub recovered: bool,
    /// It is in the ledger, so it survives the server. The others (`leasehold.durability = memory`) do not.
    pub durable: bool,
}

/// A grant whose transaction has not ended yet; `owner` 0 when there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Grant {
    /// The transaction that is being granted the resource.
    pub owner: u64,
    /// Its token; 0 until the grant is recorded.
    pub token: i64,
    /// Whether the lease will be durable.
    pub durable: bool,
    /// The TTL that the lease will run from the commit.
    pub ttl_us: Micros,
    /// The TTL that the ledger row of this transaction holds.
    pub ledger_ttl_us: Micros,
    /// Until when it runs if the commit came now.
    pub deadline_us: Micros,
    /// Until it is recorded: when its taker, who waits for old transactions to end, has last looked. 0 where he
    /// does not wait for longer than a moment.
    pub attended_us: Micros,
}

/// Everything that decides about one resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Record {
    /// The highest token granted for the resource, 0 when none is known.
    pub t_max: i64,
    /// The last committed lease.
    pub lease: Lease,
    /// The grant in progress.
    pub grant: Grant,
    /// Somebody wanted the resource after the lease was over: from then on no further transaction may
    /// fence under its token, or a busy old holder could keep a taker out for ever.
    pub contested: bool,
    /// The ledger has a row of the resource that counts here and is not marked released: a server that
    /// is started next would believe in its lease.
    pub row_open: bool,
}

/// What the ledger says of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Remembered {
    /// T_max.
    pub token: i64,
    /// The longest TTL of the last lease that was made durable.
    pub ttl_us: Micros,
    /// The row says that the lease was released.
    pub released: bool,
    /// The row says that an administrator ended it.
    pub broken: bool,
    /// Whether the row's lease counts.
    pub standing: Standing,
}

/// Whether a lease that only the ledger knows counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Standing {
    /// Granted by this server, in this database, before it was started: it counts.
    Trusted,
    /// Granted since the start. Only the record of a lease that is over is forgotten, so it is over.
    Reclaimed,
    /// Granted by another server, in another database, or on a timeline that was left.
    Lost,
}

/// The answer to [`Record::lasting`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lasting {
    /// The ledger knows the lease; one in memory does not survive.
    pub durable: bool,
    /// The longest TTL that the ledger holds for it; a renewal of a durable lease beyond it must write the
    /// ledger.
    pub ttl_us: Micros,
}

/// The answer to [`Record::begin`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Begin {
    /// A lease is live.
    Held,
    /// Another transaction is being granted the resource.
    InProgress,
    /// The grant is now in progress for this owner.
    Begun,
}

/// The answer to [`Record::release_answer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Release {
    /// It is this lease, and it is live: it may be released when the transaction commits.
    Yes,
    /// It was released before, and nobody was granted the resource since.
    Already,
    /// Expired, superseded, lost, or never held under that token.
    No,
}

/// Why a lease is over, in a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Over {
    /// It was released.
    Released,
    /// It expired, and another wants the resource (or the check is strict).
    Expired,
    /// It was released, or it expired long enough ago for its place to be needed.
    Reclaimed,
    /// The synchronous standby never confirmed it.
    Unconfirmed,
    /// An administrator ended it.
    Broken,
}

/// What the fence says of a presented token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The token is good. `deadline_us` is when the lease is over, for checks that must not be late.
    Good {
        /// The token that is good (of a list of presented ones).
        token: i64,
        /// When its lease is over.
        deadline_us: Micros,
    },
    /// LH001: below T_max, or lost with a restart, promotion or copy, or never granted.
    Stale,
    /// LH002: above T_max and above the floor, or granted by a transaction that has not committed or
    /// was rolled back.
    Unknown,
    /// LH004: the lease is over.
    Over(Over),
}

/// What a reader sees of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Nobody holds it and nobody needs to be waited for.
    Free,
    /// A lease is live, or is being granted.
    Held,
    /// The last lease ran out and nobody has taken the resource since; or it is being granted by a
    /// transaction that is open for longer than its lease.
    Expired,
}

impl Lease {
    /// No lease.
    pub const NONE: Lease = Lease {
        token: 0,
        ttl_us: 0,
        ledger_ttl_us: 0,
        deadline_us: 0,
        end: End::Running,
        recovered: false,
        durable: false,
    };
}

impl Grant {
    /// No grant in progress.
    pub const NONE: Grant = Grant {
        owner: 0,
        token: 0,
        durable: false,
        ttl_us: 0,
        ledger_ttl_us: 0,
        deadline_us: 0,
        attended_us: 0,
    };
}

impl Record {
    /// A resource that has never been granted, as far as anyone knows.
    pub const UNKNOWN: Record = Record {
        t_max: 0,
        lease: Lease::NONE,
        grant: Grant::NONE,
        contested: false,
        row_open: false,
    };

    /// The record of a resource of which nothing is found. What was known of it before, if anything, was
    /// forgotten because it was over; since when is not known, but now it is.
    pub fn unknown(now_us: Micros) -> Record {
        Record {
            lease: Lease {
                deadline_us: now_us,
                ..Lease::NONE
            },
            ..Record::UNKNOWN
        }
    }

    /// The record of a resource that only the ledger knows. A lease that was not released counts as
    /// live for its full TTL from `writable_us`, the moment at which this server became writable.
    pub fn recovered(row: Remembered, writable_us: Micros, now_us: Micros) -> Record {
        let end = match row.standing {
            Standing::Lost => End::Lost,
            _ if row.broken => End::Broken,
            _ if row.released => End::Released,
            Standing::Trusted => End::Running,
            Standing::Reclaimed => End::Reclaimed,
        };
        Record {
            t_max: row.token,
            lease: Lease {
                token: row.token,
                ttl_us: row.ttl_us,
                ledger_ttl_us: row.ttl_us,
                deadline_us: match end {
                    End::Running => writable_us.saturating_add(row.ttl_us),
                    _ => now_us,
                },
                end,
                recovered: end == End::Running,
                durable: true,
            },
            grant: Grant::NONE,
            contested: false,
            row_open: !row.released && end != End::Lost && !row.broken,
        }
    }

    /// Whether the committed lease is not over.
    pub fn is_live(&self, now_us: Micros) -> bool {
        self.grant.owner == 0
            && self.lease.token != 0
            && self.lease.token == self.t_max
            && matches!(self.lease.end, End::Running | End::Breaking)
            && now_us < self.lease.deadline_us
    }

    /// Whether it is live for its holder too.
    pub fn is_usable(&self, now_us: Micros) -> bool {
        self.is_live(now_us) && self.lease.end == End::Running
    }

    /// Whether the record may be forgotten: its T_max is in the ledger or below the floor, and what
    /// the ledger says of its lease does not bring it back. A raised T_max of a grant that was rolled
    /// back is forgotten with it: no one was ever told that token.
    pub fn is_evictable(&self, now_us: Micros) -> bool {
        self.grant.owner == 0 && !self.is_live(now_us) && !self.comes_back()
    }

    /// Whether the ledger would bring a lease back that was ended.
    fn comes_back(&self) -> bool {
        self.lease.recovered
            && self.row_open
            && matches!(
                self.lease.end,
                End::Released | End::Unconfirmed | End::Broken
            )
    }

    /// A grant whose transaction is still open although its lease would be over by now: who is at it, and
    /// since when it is over. Asked by somebody who wants the resource.
    pub fn want_overdue(&mut self, now_us: Micros) -> Option<(u64, Micros)> {
        if !self.is_overdue(now_us) {
            return None;
        }
        self.contested = true;
        Some((self.grant.owner, self.grant.deadline_us))
    }

    fn is_overdue(&self, now_us: Micros) -> bool {
        self.grant.token != 0 && now_us >= self.grant.deadline_us
    }

    /// Whether T_max is not in the ledger, as far as this record knows: of a lease in memory, or of a grant
    /// that was rolled back. Whoever forgets the record notes its T_max.
    pub fn is_beyond_the_ledger(&self) -> bool {
        self.t_max != 0 && (!self.lease.durable || self.lease.token != self.t_max)
    }

    /// Since when the last lease is over, at the latest; None while it is live. Counted from here, its
    /// transactions are left alone for a grace.
    pub fn over_since_us(&self, now_us: Micros) -> Option<Micros> {
        (!self.is_live(now_us)).then(|| self.lease.deadline_us.min(now_us))
    }

    /// The next instant at which the resource could be had, as far as the record tells: by its lease running out,
    /// or by a grant being open for too long. Not before now. Whatever else ends either changes the record.
    pub fn could_be_had_us(&self, now_us: Micros) -> Micros {
        if self.grant.owner != 0 {
            match (self.grant.token, self.grant.attended_us) {
                // whoever began it records it, or takes it back
                (0, 0) => Micros::MAX,
                (0, attended_us) => attended_us.saturating_add(PATIENCE_US).max(now_us),
                _ => self.grant.deadline_us.max(now_us),
            }
        } else if self.is_live(now_us) {
            self.lease.deadline_us
        } else {
            now_us
        }
    }

    /// Whether the last lease ran out, and nobody ended it or took it over.
    pub fn has_run_out(&self, now_us: Micros) -> bool {
        self.lease.token != 0
            && self.lease.token == self.t_max
            && self.lease.end == End::Running
            && now_us >= self.lease.deadline_us
    }

    /// Whether somebody holds the resource, or did until the lease ran out; or is being granted it.
    pub fn is_held(&self) -> bool {
        let has_lease = self.lease.token != 0
            && self.lease.token == self.t_max
            && matches!(self.lease.end, End::Running | End::Breaking);
        self.grant.owner != 0 || has_lease
    }

    /// What a reader sees.
    pub fn state(&self, now_us: Micros) -> State {
        if self.is_overdue(now_us) {
            State::Expired
        } else if self.grant.token != 0 || self.is_live(now_us) {
            State::Held
        } else if self.lease.token != 0
            && self.lease.token == self.t_max
            && self.lease.end == End::Running
        {
            State::Expired
        } else {
            State::Free
        }
    }

    /// Notes that the taker whose grant is in progress is still there, waiting for old transactions to end. False
    /// where it is not in progress any more.
    pub fn attend(&mut self, owner: u64, now_us: Micros) -> bool {
        let is_mine = owner != 0 && self.grant.owner == owner && self.grant.token == 0;
        if is_mine {
            self.grant.attended_us = now_us;
        }
        is_mine
    }

    /// Whether the taker whose grant is in progress has not looked for so long that his process must be stopped.
    fn is_deserted(&self, now_us: Micros) -> bool {
        self.grant.token == 0
            && self.grant.attended_us != 0
            && now_us.saturating_sub(self.grant.attended_us) >= PATIENCE_US
    }

    /// Begins a grant. Only one can be in progress (one that its taker has deserted gives way: he finds that it is
    /// not his any more); the first taker after the end of a lease also closes that lease's token to further
    /// transactions.
    pub fn begin(&mut self, owner: u64, now_us: Micros) -> Begin {
        if self.grant.owner != 0 && !self.is_deserted(now_us) {
            return Begin::InProgress;
        }
        if self.is_live(now_us) {
            return Begin::Held;
        }
        self.contested = self.lease.token != 0;
        self.grant = Grant {
            owner,
            ..Grant::NONE
        };
        Begin::Begun
    }

    /// Records the grant that `owner` began, under the exclusive fence lock. False, and nothing
    /// changes, where it has not begun one or where `token` does not rise: the caller's bug.
    ///
    /// A durable grant is going to overwrite the ledger's row, which is open from then on even if the
    /// grant is rolled back. One in memory must close a row that is open: see `row_closed`.
    pub fn grant(
        &mut self,
        owner: u64,
        token: i64,
        ttl_us: Micros,
        durable: bool,
        now_us: Micros,
    ) -> bool {
        if owner == 0 || self.grant.owner != owner || self.grant.token != 0 || token <= self.t_max {
            return false;
        }
        self.t_max = token;
        self.grant = Grant {
            owner,
            token,
            durable,
            ttl_us,
            ledger_ttl_us: ttl_us,
            deadline_us: now_us.saturating_add(ttl_us),
            attended_us: 0,
        };
        self.row_open |= durable;
        true
    }

    /// Notes that the ledger's row says that its lease is over.
    pub fn row_closed(&mut self) {
        self.row_open = false;
    }

    /// Makes the grant of a committed transaction a lease, which runs in full from now: its holder
    /// has waited for the commit.
    pub fn commit(&mut self, owner: u64, now_us: Micros) {
        let grant = self.grant;
        if owner == 0 || grant.owner != owner || grant.token == 0 {
            return;
        }
        self.lease = Lease {
            token: grant.token,
            ttl_us: grant.ttl_us,
            ledger_ttl_us: grant.ledger_ttl_us,
            deadline_us: now_us.saturating_add(grant.ttl_us).max(grant.deadline_us),
            end: End::Running,
            recovered: false,
            durable: grant.durable,
        };
        self.grant = Grant::NONE;
        self.contested = false;
    }

    /// Ends the lease of `token` at once: the synchronous standby has not confirmed its grant.
    pub fn unconfirmed(&mut self, token: i64, now_us: Micros) {
        if self.lease.token == token && self.t_max == token && self.lease.end == End::Running {
            self.lease.end = End::Unconfirmed;
            self.lease.deadline_us = self.lease.deadline_us.min(now_us);
        }
    }

    /// Forgets the grant of `owner`: drained in vain, or rolled back. T_max stays.
    pub fn abort(&mut self, owner: u64) {
        if owner != 0 && self.grant.owner == owner {
            self.grant = Grant::NONE;
        }
    }

    /// Runs the lease of `token` for a full `ttl_us` from now, never shortening what is left. False,
    /// and nothing changes, when it is over. `owner` is the caller's transaction.
    pub fn renew(&mut self, owner: u64, token: i64, ttl_us: Micros, now_us: Micros) -> bool {
        let deadline_us = now_us.saturating_add(ttl_us);
        if self.is_own_grant(owner, token) {
            self.grant.ttl_us = self.grant.ttl_us.max(ttl_us);
            self.grant.deadline_us = self.grant.deadline_us.max(deadline_us);
            return true;
        }
        if self.lease.token != token || !self.is_usable(now_us) {
            return false;
        }
        if deadline_us >= self.lease.deadline_us {
            self.lease.deadline_us = deadline_us;
            self.lease.ttl_us = ttl_us;
        }
        true
    }

    /// How the lease of `token` survives the server, as `owner` sees it. None when `renew` would say false.
    pub fn lasting(&self, owner: u64, token: i64, now_us: Micros) -> Option<Lasting> {
        if self.is_own_grant(owner, token) {
            Some(Lasting {
                durable: self.grant.durable,
                ttl_us: self.grant.ledger_ttl_us,
            })
        } else if self.lease.token == token && self.is_usable(now_us) {
            Some(Lasting {
                durable: self.lease.durable,
                ttl_us: self.lease.ledger_ttl_us,
            })
        } else {
            None
        }
    }

    /// Notes that a transaction which wrote `ttl_us` for the lease of `token` to the ledger has
    /// committed.
    pub fn note_durable_ttl(&mut self, token: i64, ttl_us: Micros) {
        if self.lease.token == token {
            self.lease.ledger_ttl_us = self.lease.ledger_ttl_us.max(ttl_us);
        }
    }

    /// What a release of `token` by a transaction `owner` would do. Changes nothing: the release
    /// itself comes with the commit.
    pub fn release_answer(&self, owner: u64, token: i64, now_us: Micros) -> Release {
        if self.is_own_grant(owner, token) {
            return Release::Yes;
        }
        if self.lease.token != token || self.t_max != token {
            return Release::No;
        }
        match self.lease.end {
            End::Released => Release::Already,
            End::Running if now_us < self.lease.deadline_us => Release::Yes,
            _ => Release::No,
        }
    }

    /// The token under which the ledger's row is to be marked released, if any: nothing runs or is
    /// being granted under it, and the row does not say so yet.
    pub fn due_mark(&self) -> Option<i64> {
        let ended = self.lease.token != self.t_max
            || matches!(
                self.lease.end,
                End::Released | End::Unconfirmed | End::Broken
            );
        (self.row_open && self.grant.owner == 0 && ended).then_some(self.t_max)
    }

    /// Notes that the ledger's row, of `token`, is marked released.
    pub fn note_marked(&mut self, token: i64) {
        if self.t_max == token {
            self.row_open = false;
        }
    }

    /// Releases the lease of `token`; its transaction has committed and its locks are gone. Whether that ended it.
    pub fn release(&mut self, token: i64, now_us: Micros) -> bool {
        let ended = matches!(
            self.lease.end,
            End::Released | End::Lost | End::Unconfirmed | End::Broken | End::Breaking
        );
        if self.lease.token != token || self.t_max != token || ended {
            return false;
        }
        self.lease.end = End::Released;
        self.lease.deadline_us = self.lease.deadline_us.min(now_us);
        true
    }

    /// The token of the lease that [`Record::break_lease`] would end: also of one that expired, under which its holder
    /// may still write as long as nobody has taken the resource. None where there is none, or where one is being
    /// granted.
    pub fn breakable(&self) -> Option<i64> {
        let is_there = self.grant.token == 0
            && self.lease.token != 0
            && self.lease.token == self.t_max
            && self.lease.end == End::Running;
        is_there.then_some(self.lease.token)
    }

    /// Closes the token of the lease, whatever its holder does: the administrator's transaction has committed, and still
    /// holds its locks.
    pub fn begin_break(&mut self, token: i64) {
        if self.breakable() == Some(token) {
            self.lease.end = End::Breaking;
        }
    }

    /// Ends the lease of `token`: his locks are gone. Whether that ended it.
    pub fn break_lease(&mut self, token: i64, now_us: Micros) -> bool {
        let is_there = matches!(self.lease.end, End::Running | End::Breaking);
        if self.lease.token != token || self.t_max != token || !is_there {
            return false;
        }
        self.lease.end = End::Broken;
        self.lease.deadline_us = self.lease.deadline_us.min(now_us);
        true
    }

    /// What the fence says of the presented tokens (one, or the bare ones of the setting, of which
    /// the resource's own counts). `floor`: tokens at or below it are not valid unless the ledger
    /// said so. `strict`: an expired lease is over even if nobody wants the resource.
    ///
    /// For a write this holds only under the fence lock in share mode.
    pub fn verdict(
        &self,
        presented: &[i64],
        owner: u64,
        floor: i64,
        strict: bool,
        now_us: Micros,
    ) -> Verdict {
        if self.t_max != 0 && presented.contains(&self.t_max) {
            return self.verdict_on_t_max(owner, strict, now_us);
        }
        let stale = |token: &i64| *token < self.t_max || *token <= floor;
        if presented.iter().any(stale) {
            Verdict::Stale
        } else {
            Verdict::Unknown
        }
    }

    fn verdict_on_t_max(&self, owner: u64, strict: bool, now_us: Micros) -> Verdict {
        let (token, deadline_us) = if self.is_own_grant(owner, self.t_max) {
            (self.grant.token, self.grant.deadline_us)
        } else if self.lease.token != self.t_max {
            // granted by a transaction that has not committed, or was rolled back
            return Verdict::Unknown;
        } else {
            match self.lease.end {
                End::Lost => return Verdict::Stale,
                End::Released => return Verdict::Over(Over::Released),
                End::Reclaimed => return Verdict::Over(Over::Reclaimed),
                End::Unconfirmed => return Verdict::Over(Over::Unconfirmed),
                End::Broken | End::Breaking => return Verdict::Over(Over::Broken),
                End::Running => (self.lease.token, self.lease.deadline_us),
            }
        };
        if now_us >= deadline_us && (strict || self.contested_for(owner)) {
            return Verdict::Over(Over::Expired);
        }
        Verdict::Good { token, deadline_us }
    }

    /// Whether somebody else waits for what `owner` may still be writing under. What contests the
    /// lease before one's own grant does not contest the grant.
    fn contested_for(&self, owner: u64) -> bool {
        self.contested && !(self.grant.owner == owner && self.grant.token != 0)
    }

    fn is_own_grant(&self, owner: u64, token: i64) -> bool {
        owner != 0 && token != 0 && self.grant.owner == owner && self.grant.token == token
    }
}

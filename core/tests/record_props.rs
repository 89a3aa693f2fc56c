//! Random histories of one resource against a naive model: a list of what was granted, and the words
//! of the contract read off it. Checked after every step: the guarantees G1, G2, G3 and G5, every
//! answer, and the class of every refusal (LH001, LH002, LH004; that nothing was presented, LH003, is
//! known before a record is asked).
//!
//! Durable grants and grants in memory are mixed. The ledger's row is written in place, so it stays when
//! its transaction is rolled back; what is written is kept at once. What a crash may take back of it is
//! for `model.rs`.
#![allow(
    clippy::unwrap_used,
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing
)]

use leasehold_core::record::{
    Begin, End, Grant, Lasting, Lease, Over, Record, Release, Remembered, Standing, State, Verdict,
};
use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::sample::Index;

/// What happens to the resource.
#[derive(Debug, Clone)]
enum Step {
    /// Time passes.
    Clock(i64),
    /// A transaction wants the resource.
    Begin { owner: u64 },
    /// It records its grant, under a token that far above the last one handed out (0 or below: a
    /// mistake of the caller).
    Grant {
        owner: u64,
        rise: i64,
        ttl: i64,
        durable: bool,
        /// The ledger is written at once, not just before the commit.
        written: bool,
    },
    /// It commits.
    Commit { owner: u64, confirmed: bool },
    /// It is rolled back, or gives up.
    Abort { owner: u64 },
    /// A renewal by a transaction (in that of the grant: a subtransaction) that then commits or not.
    Renew {
        owner: u64,
        token: Index,
        ttl: i64,
        fate: Fate,
    },
    /// A release by a transaction that then commits or not.
    Release {
        owner: u64,
        token: Index,
        commits: bool,
    },
    /// The locks of the transactions that released are gone.
    LocksGone,
    /// A transaction that acquires and then commits or not.
    Acquire {
        owner: u64,
        ttl: i64,
        durable: bool,
        fate: Fate,
    },
    /// A check of up to three tokens.
    Verdict {
        owner: u64,
        tokens: Vec<Index>,
        strict: bool,
    },
    /// Somebody asks who is at a grant that takes longer than its lease.
    WantOverdue,
    /// The worker asks what is to be marked released in the ledger.
    TakeMark,
    /// It marks that.
    WriteMark,
    /// The record is forgotten where it may be, and made from the ledger again.
    Reload { marked: bool },
    /// The ledger's row is deleted, where the record may be forgotten.
    Sweep,
    /// The server crashes and starts.
    Restart,
    /// Another server goes on from here, or a copy: the ledger's lease does not count.
    Takeover,
}

/// How the transaction of a grant went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Open,
    Committed,
    RolledBack,
}

/// What becomes of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Commits,
    RollsBack,
    /// It commits, and the wait for the standby is cancelled.
    Unconfirmed,
}

/// Who goes on after a crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Server {
    /// The same: its ledger's lease lives on.
    Same,
    /// A promoted standby or a copy: the ledger's lease does not count.
    Another,
}

/// A grant, as everyone who saw everything would describe it.
#[derive(Debug, Clone)]
struct Granted {
    token: i64,
    owner: u64,
    durable: bool,
    /// The ledger's row says so (or, where it is in memory, that the last lease is over).
    written: bool,
    ttl: i64,
    /// The longest TTL that is told to be in the ledger, or that it has with the commit of the grant.
    durable_ttl: i64,
    /// The longest TTL that renewals in the transaction of the grant wrote besides.
    lengthened_ttl: i64,
    /// When it is over; where it was ended before that: when it was.
    until: i64,
    outcome: Outcome,
    released: bool,
    unconfirmed: bool,
    lost: bool,
    /// Its record was forgotten when it was over.
    reclaimed: bool,
    /// From before the start, and brought back by the ledger.
    recovered: bool,
    /// Somebody wanted the resource when this lease was over.
    wanted: bool,
}

/// What the holder of a token was told: nobody else before this instant.
#[derive(Debug, Clone)]
struct Promise {
    token: i64,
    until: i64,
    durable: bool,
}

/// The ledger's row.
#[derive(Debug, Clone, Copy)]
struct Row {
    token: i64,
    ttl: i64,
    released: bool,
}

/// The naive model, and the record beside it.
struct History {
    record: Record,
    now: i64,
    writable: i64,
    /// Nothing is granted before.
    grace_until: i64,
    /// The longest TTL in memory.
    memory_ttl: i64,
    floor: i64,
    /// What forgetting has raised the floor to.
    raised: i64,
    /// Leases of tokens up to this one were another server's.
    lost_up_to: i64,
    /// The highest token handed out.
    highest: i64,
    begun: Option<u64>,
    /// Every grant that the server knows of.
    grants: Vec<Granted>,
    /// Every token that was granted by a transaction that has committed.
    told: Vec<i64>,
    /// Since when the record is there.
    known_since: i64,
    ledger: Option<Row>,
    /// The record has not been told that the row is closed, or that there is none.
    row_may_be_open: bool,
    /// What the worker is about to mark.
    due: Option<i64>,
    promises: Vec<Promise>,
    /// Tokens whose release has committed and not reached the record.
    releasing: Vec<i64>,
}

impl History {
    fn new() -> Self {
        History {
            record: Record::unknown(0),
            now: 0,
            writable: 0,
            grace_until: 0,
            memory_ttl: 0,
            floor: 0,
            raised: 0,
            lost_up_to: 0,
            highest: 0,
            begun: None,
            grants: Vec::new(),
            told: Vec::new(),
            known_since: 0,
            ledger: None,
            row_may_be_open: false,
            due: None,
            promises: Vec::new(),
            releasing: Vec::new(),
        }
    }

    fn last(&self) -> Option<&Granted> {
        self.grants.iter().max_by_key(|g| g.token)
    }

    fn last_mut(&mut self) -> Option<&mut Granted> {
        self.grants.iter_mut().max_by_key(|g| g.token)
    }

    fn t_max(&self) -> i64 {
        self.last().map_or(0, |g| g.token)
    }

    fn is_over(&self, granted: &Granted) -> bool {
        let ended = granted.released || granted.unconfirmed || granted.lost || granted.reclaimed;
        ended || self.now >= granted.until
    }

    /// The grant whose transaction is still open although its lease would be over by now.
    fn overdue(&self) -> Option<&Granted> {
        let overdue = |g: &&Granted| g.outcome == Outcome::Open && self.now >= g.until;
        self.grants.iter().find(overdue)
    }

    /// The last grant that committed.
    fn last_lease(&self) -> Option<&Granted> {
        let committed = |g: &&Granted| g.outcome == Outcome::Committed;
        self.grants.iter().filter(committed).max_by_key(|g| g.token)
    }

    /// The leases that are not over (G1: at most one).
    fn live(&self) -> Vec<&Granted> {
        let committed = |g: &&Granted| g.outcome == Outcome::Committed;
        let live = |g: &&Granted| !self.is_over(g);
        self.grants.iter().filter(committed).filter(live).collect()
    }

    /// The grant that `owner` has recorded and not committed.
    fn open_grant(&self, owner: u64) -> Option<&Granted> {
        let open = |g: &&Granted| g.outcome == Outcome::Open && g.owner == owner;
        self.grants.iter().find(open)
    }

    /// Whether the ledger has a row that a restart would believe in.
    fn row_is_open(&self) -> bool {
        self.ledger
            .is_some_and(|row| !row.released && row.token > self.lost_up_to)
    }

    /// Tokens to choose from: all that were handed out, one that was not, and 1.
    fn token(&self, index: Index) -> i64 {
        let mut tokens: Vec<i64> = self.grants.iter().map(|g| g.token).collect();
        tokens.extend(self.told.iter().rev().take(3));
        tokens.extend([1, self.floor.max(1), self.highest.max(1), self.highest + 1]);
        // the last one half of the time, or most steps would be about nothing
        tokens.extend(vec![self.t_max().max(1); tokens.len()]);
        tokens[index.index(tokens.len())]
    }

    fn step(&mut self, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Clock(us) => self.now = (self.now + us).min(1 << 61),
            Step::Begin { owner } => self.begin(owner)?,
            Step::Grant {
                owner,
                rise,
                ttl,
                durable,
                written,
            } => {
                self.grant(owner, rise, ttl, durable)?;
                if written {
                    self.write_row(owner);
                }
            }
            Step::Commit { owner, confirmed } => self.commit(owner, confirmed),
            Step::Abort { owner } => self.abort(owner),
            Step::Renew {
                owner,
                token,
                ttl,
                fate,
            } => {
                self.renew(owner, self.token(token), ttl, fate)?;
            }
            Step::Release {
                owner,
                token,
                commits,
            } => {
                self.release(owner, self.token(token), commits)?;
            }
            Step::Verdict {
                owner,
                tokens,
                strict,
            } => {
                let tokens: Vec<i64> = tokens.iter().map(|t| self.token(*t)).collect();
                self.verdict(owner, &tokens, strict)?;
            }
            Step::LocksGone => self.locks_gone(),
            Step::Acquire {
                owner,
                ttl,
                durable,
                fate,
            } => {
                self.begin(owner)?;
                self.grant(owner, 1, ttl, durable)?;
                match fate {
                    Fate::Commits => self.commit(owner, true),
                    Fate::RollsBack => self.abort(owner),
                    Fate::Unconfirmed => self.commit(owner, false),
                }
            }
            Step::WantOverdue => {
                let want = self.overdue().map(|g| (g.owner, g.until));
                prop_assert_eq!(self.record.want_overdue(self.now), want);
            }
            Step::TakeMark => self.due = self.record.due_mark(),
            Step::WriteMark => self.write_mark(),
            Step::Reload { marked } => self.reload(marked)?,
            Step::Sweep => self.sweep()?,
            Step::Restart => self.restart(Server::Same),
            Step::Takeover => self.restart(Server::Another),
        }
        self.compare()
    }

    fn begin(&mut self, owner: u64) -> Result<(), TestCaseError> {
        if self.now < self.grace_until {
            return Ok(());
        }
        let want = if self.begun.is_some() {
            Begin::InProgress
        } else if self.live().is_empty() {
            Begin::Begun
        } else {
            Begin::Held
        };
        prop_assert_eq!(self.record.begin(owner, self.now), want);
        if want == Begin::Begun {
            self.begun = Some(owner);
            self.grants.iter_mut().for_each(|g| g.wanted = true);
            let now = self.now;
            let kept = self.promises.iter().all(|p| p.until <= now);
            prop_assert!(kept, "G5: {:?} at {now}", self.promises);
        }
        Ok(())
    }

    fn grant(
        &mut self,
        owner: u64,
        rise: i64,
        ttl: i64,
        durable: bool,
    ) -> Result<(), TestCaseError> {
        let token = self.highest + rise;
        if rise <= 0 && token > self.t_max() {
            // a token that was forgotten comes again: a mistake that the record can't see
            return Ok(());
        }
        let may = self.begun == Some(owner) && self.open_grant(owner).is_none();
        let want = may && token > self.t_max();
        let (now, before) = (self.now, self.record);
        prop_assert_eq!(self.record.grant(owner, token, ttl, durable, now), want);
        if !want {
            prop_assert_eq!(self.record, before);
            return Ok(());
        }
        self.highest = self.highest.max(token);
        if durable {
            self.row_may_be_open = true;
        } else {
            self.memory_ttl = self.memory_ttl.max(ttl);
        }
        self.grants.push(Granted {
            token,
            owner,
            durable,
            written: false,
            ttl,
            durable_ttl: ttl,
            lengthened_ttl: 0,
            until: now + ttl,
            outcome: Outcome::Open,
            released: false,
            unconfirmed: false,
            lost: false,
            reclaimed: false,
            recovered: false,
            wanted: false,
        });
        Ok(())
    }

    /// The grant overwrites the row where there is one, or marks it where it is one in memory.
    fn write_row(&mut self, owner: u64) {
        let Some(granted) = self.open_grant(owner).filter(|g| !g.written).cloned() else {
            return;
        };
        if let Some(row) = &mut self.ledger {
            if granted.durable {
                *row = Row {
                    token: granted.token,
                    ttl: granted.durable_ttl.max(granted.lengthened_ttl),
                    released: false,
                };
            } else if self.record.row_open {
                row.released = true;
                self.row_may_be_open = true;
            }
        }
        self.last_mut().unwrap().written = true;
    }

    fn commit(&mut self, owner: u64, confirmed: bool) {
        self.write_row(owner);
        let (now, open) = (self.now, self.open_grant(owner).cloned());
        let writes = open.as_ref().is_some_and(|g| g.durable) || self.record.row_open;
        self.record.commit(owner, now);
        let Some(mut granted) = open else {
            // without a recorded grant there is nothing to commit, and nothing changes
            return;
        };
        granted.outcome = Outcome::Committed;
        granted.until = granted.until.max(now + granted.ttl);
        if granted.durable {
            self.record
                .note_durable_ttl(granted.token, granted.lengthened_ttl);
            granted.durable_ttl = granted.durable_ttl.max(granted.lengthened_ttl);
            // the first row comes with the commit
            self.ledger.get_or_insert(Row {
                token: granted.token,
                ttl: granted.durable_ttl,
                released: false,
            });
        } else if confirmed {
            self.record.row_closed();
            self.row_may_be_open = false;
        }
        self.begun = None;
        self.told.push(granted.token);
        if confirmed || !writes {
            // a renewal that was rolled back moves the deadline, but nobody may count on it
            let promised = if granted.durable {
                granted.durable_ttl
            } else {
                granted.ttl
            };
            self.promise(granted.token, now + promised, granted.durable);
            *self.last_mut().unwrap() = granted;
        } else {
            let token = granted.token;
            *self.last_mut().unwrap() = granted;
            self.unconfirmed(token);
        }
    }

    /// The wait for the standby was cancelled, and who waited was told.
    fn unconfirmed(&mut self, token: i64) {
        let now = self.now;
        self.record.unconfirmed(token, now);
        self.promises.retain(|p| p.token != token);
        let last = self.last_mut().unwrap();
        last.unconfirmed = true;
        last.until = last.until.min(now);
    }

    fn abort(&mut self, owner: u64) {
        self.record.abort(owner);
        if self.begun == Some(owner) {
            self.begun = None;
            let open = self.grants.iter_mut().find(|g| g.outcome == Outcome::Open);
            if let Some(granted) = open {
                granted.outcome = Outcome::RolledBack;
            }
        }
    }

    /// Whether a renewal of `token` must be true: an own grant, or the lease that is live.
    fn may_renew(&self, owner: u64, token: i64) -> bool {
        let own = self.open_grant(owner).is_some_and(|g| g.token == token);
        own || self.live().iter().any(|g| g.token == token)
    }

    fn renew(&mut self, owner: u64, token: i64, ttl: i64, fate: Fate) -> Result<(), TestCaseError> {
        let (now, want, before) = (self.now, self.may_renew(owner, token), self.record);
        let lasting = self.record.lasting(owner, token, now);
        prop_assert_eq!(lasting.is_some(), want);
        prop_assert_eq!(self.record.renew(owner, token, ttl, now), want);
        if !want {
            prop_assert_eq!(self.record, before);
            return Ok(());
        }
        let granted = self.last_mut().unwrap();
        let (durable, durable_ttl) = (granted.durable, granted.durable_ttl);
        let want = Lasting {
            durable,
            ttl_us: durable_ttl,
        };
        prop_assert_eq!(lasting, Some(want));
        granted.until = granted.until.max(now + ttl);
        let is_open = granted.outcome == Outcome::Open;
        if is_open {
            granted.ttl = granted.ttl.max(ttl);
        }
        if !durable {
            self.memory_ttl = self.memory_ttl.max(ttl);
        } else if let Some(row) = self.ledger.as_mut().filter(|row| row.token == token) {
            row.ttl = row.ttl.max(ttl);
        }
        if is_open {
            if fate == Fate::Commits {
                let granted = self.last_mut().unwrap();
                granted.lengthened_ttl = granted.lengthened_ttl.max(ttl);
            }
        } else if !durable || ttl <= durable_ttl {
            self.promise(token, now + ttl, durable);
        } else {
            self.end_of_longer_renewal(token, ttl, fate);
        }
        Ok(())
    }

    fn end_of_longer_renewal(&mut self, token: i64, ttl: i64, fate: Fate) {
        match fate {
            Fate::Commits => {
                self.last_mut().unwrap().durable_ttl = ttl;
                self.record.note_durable_ttl(token, ttl);
                self.promise(token, self.now + ttl, true);
            }
            Fate::RollsBack => {}
            Fate::Unconfirmed => self.unconfirmed(token),
        }
    }

    fn promise(&mut self, token: i64, until: i64, durable: bool) {
        // a release that has committed ends the lease whatever is said of it in that moment
        if !self.releasing.contains(&token) {
            self.promises.push(Promise {
                token,
                until,
                durable,
            });
        }
    }

    fn release(&mut self, owner: u64, token: i64, commits: bool) -> Result<(), TestCaseError> {
        let before = self.record;
        let answer = self.record.release_answer(owner, token, self.now);
        prop_assert_eq!(self.record, before);
        let last = self.last().filter(|g| g.token == token);
        let committed = last.filter(|g| g.outcome == Outcome::Committed && !g.lost);
        let want = if committed.is_some_and(|g| g.released) {
            Release::Already
        } else if self.may_renew(owner, token) {
            Release::Yes
        } else {
            Release::No
        };
        prop_assert_eq!(answer, want);
        if want == Release::Yes && commits {
            self.commit(owner, true);
            self.releasing.push(token);
            self.promises.retain(|p| p.token != token);
        }
        Ok(())
    }

    /// What has committed its release meanwhile may be over otherwise, or another's.
    fn locks_gone(&mut self) {
        for token in std::mem::take(&mut self.releasing) {
            let now = self.now;
            self.record.release(token, now);
            let last = self.last_mut().filter(|g| g.token == token);
            let may = |g: &&mut Granted| {
                g.outcome == Outcome::Committed && !g.lost && !g.unconfirmed && !g.released
            };
            if let Some(granted) = last.filter(may) {
                granted.released = true;
                granted.until = granted.until.min(now);
            }
        }
    }

    fn verdict(&mut self, owner: u64, tokens: &[i64], strict: bool) -> Result<(), TestCaseError> {
        let got = self
            .record
            .verdict(tokens, owner, self.floor.max(self.raised), strict, self.now);
        prop_assert_eq!(got, self.want_verdict(owner, tokens, strict));
        if let Verdict::Good { token, .. } = got {
            let newer = |g: &Granted| g.token > token && g.outcome != Outcome::RolledBack;
            prop_assert!(!self.grants.iter().any(newer), "G3: {token}");
            prop_assert!(tokens.contains(&token));
        }
        if got == Verdict::Unknown {
            // whoever was granted a token is not told that it may still come
            prop_assert!(!tokens.iter().all(|token| self.told.contains(token)));
        }
        Ok(())
    }

    /// Which of the contract's lines is the first that fits.
    fn want_verdict(&self, owner: u64, tokens: &[i64], strict: bool) -> Verdict {
        let Some(last) = self.last().filter(|g| tokens.contains(&g.token)) else {
            // one that was superseded or can't be told, and none that is T_max
            let floor = self.floor.max(self.raised);
            let stale = |t: &i64| *t < self.t_max() || *t <= floor;
            return if tokens.iter().any(stale) {
                Verdict::Stale
            } else {
                Verdict::Unknown
            };
        };
        let own = last.outcome == Outcome::Open && last.owner == owner;
        if last.outcome != Outcome::Committed && !own {
            Verdict::Unknown
        } else if last.lost {
            Verdict::Stale
        } else if last.released {
            Verdict::Over(Over::Released)
        } else if last.unconfirmed {
            Verdict::Over(Over::Unconfirmed)
        } else if last.reclaimed {
            Verdict::Over(Over::Reclaimed)
        } else if self.now >= last.until && (strict || last.wanted) {
            Verdict::Over(Over::Expired)
        } else {
            Verdict::Good {
                token: last.token,
                deadline_us: last.until,
            }
        }
    }

    /// Whether the ledger may bring a lease back that was ended.
    fn comes_back(&self) -> bool {
        let open = self.row_is_open() || self.row_may_be_open;
        open && self
            .last_lease()
            .is_some_and(|g| g.recovered && (g.released || g.unconfirmed))
    }

    /// The mark that is due: of a row under which nothing runs and nothing is being granted.
    fn want_due(&self) -> Option<i64> {
        let last = self.last()?;
        let ended = last.outcome == Outcome::RolledBack
            || (last.released && !last.lost)
            || last.unconfirmed;
        let open = self.row_is_open() || self.row_may_be_open;
        (open && self.begun.is_none() && ended).then_some(last.token)
    }

    fn write_mark(&mut self) {
        let Some(token) = self.due.take() else {
            return;
        };
        if let Some(row) = self.ledger.as_mut().filter(|row| row.token <= token) {
            row.released = true;
        }
        self.record.note_marked(token);
        // the record does not hear of it where it is about a newer token by now
        self.row_may_be_open = self.t_max() != token && self.record.row_open;
    }

    fn is_evictable(&self) -> bool {
        self.begun.is_none() && self.live().is_empty() && !self.comes_back()
    }

    /// Forgets the record where it may be, whether the ledger knows of its release or not.
    fn reload(&mut self, marked: bool) -> Result<(), TestCaseError> {
        if marked {
            self.due = self.record.due_mark();
            self.write_mark();
        }
        if self.is_evictable() {
            self.forget()?;
        }
        Ok(())
    }

    fn forget(&mut self) -> Result<(), TestCaseError> {
        let in_ledger = self
            .last()
            .is_none_or(|g| g.outcome == Outcome::Committed && g.durable);
        prop_assert_eq!(self.record.is_beyond_the_ledger(), !in_ledger);
        if !in_ledger {
            self.raised = self.raised.max(self.t_max());
        }
        self.recover();
        Ok(())
    }

    fn sweep(&mut self) -> Result<(), TestCaseError> {
        if self.is_evictable() {
            self.raised = self.ledger.map_or(0, |row| row.token).max(self.raised);
            self.ledger = None;
            self.forget()?;
        }
        Ok(())
    }

    /// A crash and a start.
    fn restart(&mut self, server: Server) {
        self.begun = None;
        self.releasing.clear();
        self.due = None;
        self.writable = self.now;
        self.floor = self.highest;
        self.raised = 0;
        self.grace_until = self.now + self.memory_ttl;
        if server == Server::Another {
            self.lost_up_to = self.highest;
            // the caller waits until they are kept before it lets anyone begin
            self.promises.clear();
        }
        self.recover();
    }

    /// Nothing is known but what the ledger says.
    fn recover(&mut self) {
        let now = self.now;
        self.grants.clear();
        self.row_may_be_open = false;
        self.known_since = now;
        self.record = Record::unknown(now);
        let Some(Row {
            token,
            ttl: ttl_us,
            released,
        }) = self.ledger
        else {
            return;
        };
        let lost = token <= self.lost_up_to;
        let row = Remembered {
            token,
            ttl_us,
            released,
            broken: false,
            standing: if lost {
                Standing::Lost
            } else if token > self.floor {
                Standing::Reclaimed
            } else {
                Standing::Trusted
            },
        };
        let counts = row.standing == Standing::Trusted && !released;
        self.record = Record::recovered(row, self.writable, now);
        self.grants.push(Granted {
            token,
            owner: 0,
            durable: true,
            written: true,
            ttl: ttl_us,
            durable_ttl: ttl_us,
            lengthened_ttl: 0,
            until: if counts { self.writable + ttl_us } else { now },
            outcome: Outcome::Committed,
            released: released && !lost,
            unconfirmed: false,
            lost,
            reclaimed: row.standing == Standing::Reclaimed && !released,
            recovered: counts,
            wanted: false,
        });
    }

    /// What is true after every step.
    fn compare(&self) -> Result<(), TestCaseError> {
        let (record, now) = (&self.record, self.now);
        let live = self.live();
        prop_assert!(live.len() <= 1, "G1: {live:?}");
        let believed: Vec<&Promise> = self.promises.iter().filter(|p| p.until > now).collect();
        let tokens: BTreeSet<i64> = believed.iter().map(|p| p.token).collect();
        prop_assert!(tokens.len() <= 1, "G1: {:?}", self.promises);
        prop_assert_eq!(record.is_live(now), !live.is_empty());
        // who believes in a lease is right, or waited for
        for promise in believed {
            let is_live = live.first().map(|g| g.token) == Some(promise.token);
            let is_lost = !promise.durable && promise.token <= self.floor;
            prop_assert!(is_live || is_lost && promise.until <= self.grace_until);
        }
        prop_assert_eq!(record.t_max, self.t_max());
        prop_assert_eq!(record.is_evictable(now), self.is_evictable());
        prop_assert_eq!(record.row_open, self.row_is_open() || self.row_may_be_open);
        prop_assert_eq!(record.due_mark(), self.want_due());
        let over_since = self.last_lease().map_or(self.known_since, |g| g.until);
        let over_since = live.is_empty().then(|| over_since.min(now));
        prop_assert_eq!(record.over_since_us(now), over_since);
        prop_assert_eq!(record.grant.owner, self.begun.unwrap_or(0));
        let open = self.grants.iter().any(|g| g.outcome == Outcome::Open);
        let expired = self.last().is_some_and(|g| {
            let ended = g.released || g.unconfirmed || g.lost || g.reclaimed;
            g.outcome == Outcome::Committed && !ended
        });
        let want = if self.overdue().is_some() {
            State::Expired
        } else if open || !live.is_empty() {
            State::Held
        } else if expired {
            State::Expired
        } else {
            State::Free
        };
        prop_assert_eq!(record.state(now), want);
        Ok(())
    }
}

/// Mostly of a size, so that leases are over as often as not.
fn duration() -> impl Strategy<Value = i64> {
    prop_oneof![8 => 1..=4_i64, 1 => 1..=1_000_i64, 1 => 1..=1_i64 << 59]
}

fn owner() -> impl Strategy<Value = u64> {
    prop_oneof![2 => Just(1), 1 => Just(2)]
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        4 => Just(Fate::Commits),
        3 => Just(Fate::RollsBack),
        1 => Just(Fate::Unconfirmed),
    ]
}

#[rustfmt::skip]
fn step() -> impl Strategy<Value = Step> {
    let (index, flag) = (any::<Index>, any::<bool>);
    let confirmed = || prop_oneof![4 => Just(true), 1 => Just(false)];
    prop_oneof![
        6 => prop_oneof![1 => Just(0), 4 => duration()].prop_map(Step::Clock),
        4 => owner().prop_map(|owner| Step::Begin { owner }),
        4 => (owner(), prop_oneof![8 => 1..=3_i64, 1 => -3..=0_i64], duration(), flag(), flag())
            .prop_map(|(owner, rise, ttl, durable, written)| {
                Step::Grant { owner, rise, ttl, durable, written }
            }),
        4 => (owner(), confirmed()).prop_map(|(owner, confirmed)| Step::Commit { owner, confirmed }),
        2 => owner().prop_map(|owner| Step::Abort { owner }),
        5 => (owner(), duration(), flag(), fate())
            .prop_map(|(owner, ttl, durable, fate)| Step::Acquire { owner, ttl, durable, fate }),
        4 => (owner(), index(), duration(), fate())
            .prop_map(|(owner, token, ttl, fate)| Step::Renew { owner, token, ttl, fate }),
        4 => (owner(), index(), flag())
            .prop_map(|(owner, token, commits)| Step::Release { owner, token, commits }),
        3 => Just(Step::LocksGone),
        8 => (owner(), prop::collection::vec(index(), 1..=3), flag())
            .prop_map(|(owner, tokens, strict)| Step::Verdict { owner, tokens, strict }),
        2 => Just(Step::WantOverdue),
        2 => Just(Step::TakeMark),
        2 => Just(Step::WriteMark),
        2 => flag().prop_map(|marked| Step::Reload { marked }),
        1 => Just(Step::Sweep),
        1 => prop_oneof![3 => Just(Step::Restart), 1 => Just(Step::Takeover)],
    ]
}

/// A call of one of the functions that change a record.
#[derive(Debug, Clone)]
enum Call {
    Begin(u64),
    WantOverdue,
    Grant(u64, i64, i64, bool),
    RowClosed,
    Commit(u64),
    Abort(u64),
    Renew(u64, i64, i64),
    NoteDurable(i64, i64),
    Release(i64),
    BeginBreak(i64),
    Break(i64),
    Unconfirmed(i64),
    NoteMarked(i64),
}

/// Calls it and returns everything that anyone can learn of the record before, by and after it.
fn call(record: &mut Record, call: &Call, tokens: &[i64], floor: i64, now: i64) -> Vec<String> {
    let mut seen = observe(record, tokens, floor, now);
    match *call {
        Call::Begin(owner) => seen.push(format!("{:?}", record.begin(owner, now))),
        Call::Grant(owner, token, ttl, durable) => {
            let granted = record.grant(owner, token, ttl, durable, now);
            seen.push(format!("{granted:?}"));
        }
        Call::RowClosed => record.row_closed(),
        Call::WantOverdue => {
            let overdue = record.want_overdue(now);
            seen.push(format!("{:?}", overdue.map(|(owner, _)| owner)));
        }
        Call::Commit(owner) => record.commit(owner, now),
        Call::Abort(owner) => record.abort(owner),
        Call::Renew(owner, token, ttl) => {
            seen.push(format!("{:?}", record.renew(owner, token, ttl, now)));
        }
        Call::NoteDurable(token, ttl) => record.note_durable_ttl(token, ttl),
        Call::Release(token) => {
            seen.push(format!("{:?}", record.release(token, now)));
        }
        Call::BeginBreak(token) => record.begin_break(token),
        Call::Break(token) => {
            seen.push(format!("{:?}", record.breakable()));
            seen.push(format!("{:?}", record.break_lease(token, now)));
        }
        Call::Unconfirmed(token) => record.unconfirmed(token, now),
        Call::NoteMarked(token) => record.note_marked(token),
    }
    seen.extend(observe(record, tokens, floor, now));
    seen
}

/// Everything that anyone can learn of a record, with times told from now and over as 0; since when it
/// is over is left out.
fn observe(record: &Record, tokens: &[i64], floor: i64, now: i64) -> Vec<String> {
    let mut seen = vec![format!("{:?}", told_from_now(*record, now))];
    seen.push(format!(
        "{} {}",
        record.is_live(now),
        record.is_evictable(now)
    ));
    seen.push(format!(
        "{:?} {:?} {}",
        record.state(now),
        record.due_mark(),
        record.is_beyond_the_ledger()
    ));
    for owner in 0..=2 {
        for strict in [false, true] {
            let mut verdict = record.verdict(tokens, owner, floor, strict, now);
            if let Verdict::Good { deadline_us, .. } = &mut verdict {
                *deadline_us = deadline_us.saturating_sub(now).max(0);
            }
            seen.push(format!("{verdict:?}"));
        }
        for token in tokens {
            let release = record.release_answer(owner, *token, now);
            let durable = record.lasting(owner, *token, now);
            seen.push(format!("{release:?} {durable:?}"));
        }
    }
    seen
}

/// The record with now as 0 and every deadline that has passed as 0 too.
fn told_from_now(mut record: Record, now: i64) -> Record {
    let from_now = |deadline: i64| deadline.saturating_sub(now).max(0);
    record.lease.deadline_us = from_now(record.lease.deadline_us);
    record.grant.deadline_us = from_now(record.grant.deadline_us);
    record
}

/// Any record at all, with its times from `time`.
fn record(time: impl Strategy<Value = i64> + Clone) -> impl Strategy<Value = Record> {
    let end = prop_oneof![
        Just(End::Running),
        Just(End::Released),
        Just(End::Lost),
        Just(End::Reclaimed),
        Just(End::Unconfirmed),
        Just(End::Broken),
        Just(End::Breaking)
    ];
    let flags = || (any::<bool>(), any::<bool>());
    let lease = (
        0..=3_i64,
        time.clone(),
        time.clone(),
        time.clone(),
        end,
        flags(),
    )
        .prop_map(
            |(token, ttl_us, ledger_ttl_us, deadline_us, end, (recovered, durable))| Lease {
                token,
                ttl_us,
                ledger_ttl_us,
                deadline_us,
                end,
                recovered,
                durable,
            },
        );
    let grant = (
        0..=2_u64,
        0..=3_i64,
        time.clone(),
        time.clone(),
        time,
        any::<bool>(),
    )
        .prop_map(
            |(owner, token, ttl_us, ledger_ttl_us, deadline_us, durable)| Grant {
                owner,
                token,
                durable,
                ttl_us,
                ledger_ttl_us,
                deadline_us,
                attended_us: 0,
            },
        );
    (0..=3_i64, lease, grant, flags()).prop_map(|(t_max, lease, grant, (contested, row_open))| {
        Record {
            t_max,
            lease,
            grant,
            contested,
            row_open,
        }
    })
}

fn any_call(ttl: impl Strategy<Value = i64> + Clone + 'static) -> impl Strategy<Value = Call> {
    let (owner, token) = (0..=2_u64, 0..=4_i64);
    prop_oneof![
        owner.clone().prop_map(Call::Begin),
        (owner.clone(), token.clone(), ttl.clone(), any::<bool>())
            .prop_map(|(o, t, ttl, durable)| Call::Grant(o, t, ttl, durable)),
        Just(Call::RowClosed),
        Just(Call::WantOverdue),
        owner.clone().prop_map(Call::Commit),
        owner.clone().prop_map(Call::Abort),
        (owner, token.clone(), ttl.clone()).prop_map(|(o, t, ttl)| Call::Renew(o, t, ttl)),
        (token.clone(), ttl).prop_map(|(t, ttl)| Call::NoteDurable(t, ttl)),
        token.clone().prop_map(Call::Release),
        token.clone().prop_map(Call::BeginBreak),
        token.clone().prop_map(Call::Break),
        token.clone().prop_map(Call::Unconfirmed),
        token.prop_map(Call::NoteMarked),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn a_record_is_what_its_history_says(steps in prop::collection::vec(step(), 0..60)) {
        let mut history = History::new();
        for step in steps {
            history.step(step)?;
        }
    }

    #[test]
    fn a_record_sees_only_how_long_is_left(
        record in record(0..=9_i64),
        now in 0..=9_i64,
        later in 0..=1_i64 << 60,
        one in any_call(1..=9_i64),
        tokens in prop::collection::vec(1..=4_i64, 1..=2),
        floor in 0..=4_i64,
    ) {
        // the model checker tells times from now, with those over as 0
        let mut here = record;
        let mut there = told_from_now(record, now);
        let seen = call(&mut here, &one, &tokens, floor, now);
        prop_assert_eq!(&seen, &call(&mut there, &one, &tokens, floor, 0));
        // and at any other time it is the same
        let mut then = record;
        then.lease.deadline_us += later;
        then.grant.deadline_us += later;
        prop_assert_eq!(seen, call(&mut then, &one, &tokens, floor, now + later));
        let over_for = |record: &Record, now| record.over_since_us(now).map(|since| now - since);
        prop_assert_eq!(over_for(&here, now), over_for(&then, now + later));
    }

    #[test]
    fn no_record_and_no_call_makes_it_panic(
        mut record in record(any::<i64>()),
        now: i64,
        one in any_call(any::<i64>()),
        tokens in prop::collection::vec(any::<i64>(), 0..=3),
        floor: i64,
    ) {
        call(&mut record, &one, &tokens, floor, now);
    }

    #[test]
    fn whatever_a_record_is_no_call_does_what_none_may(
        mut record in record(0..=9_i64),
        now in 0..=9_i64,
        one in any_call(1..=9_i64),
    ) {
        let before = record;
        call(&mut record, &one, &[], 0, now);
        prop_assert!(record.t_max >= before.t_max);
        prop_assert!(!record.is_live(now) || record.lease.token == record.t_max);
        // only who was told that the row is closed takes it for closed
        if before.row_open && !record.row_open {
            prop_assert!(matches!(one, Call::RowClosed | Call::NoteMarked(_)));
        }
        // a lease that is over is not over earlier than it was, and one that is live is not over
        prop_assert_eq!(record.over_since_us(now).is_none(), record.is_live(now));
        if let (Some(since), None) = (record.over_since_us(now), before.over_since_us(now)) {
            prop_assert_eq!(since, now);
        }
        // a lease that is lost or released does not come back
        if record.lease.token == before.lease.token && before.lease.end != End::Running {
            let commits = matches!(one, Call::Commit(_));
            let learns = before.lease.end == End::Reclaimed && record.lease.end == End::Released;
            let breaks = (before.lease.end, record.lease.end) == (End::Breaking, End::Broken);
            prop_assert!(record.lease.end == before.lease.end || commits || learns || breaks);
        }
        // only its own transaction takes a grant away
        if before.grant.owner != 0 && record.grant.owner != before.grant.owner {
            prop_assert_eq!(record.grant, Grant::NONE);
            let owner = before.grant.owner;
            prop_assert!(matches!(one, Call::Commit(o) | Call::Abort(o) if o == owner));
        }
        // what is said of a token is about that token
        if let Call::Renew(_, token, _)
        | Call::NoteDurable(token, _)
        | Call::Release(token)
        | Call::BeginBreak(token)
        | Call::Break(token)
        | Call::Unconfirmed(token)
        | Call::NoteMarked(token) = one
        {
            let about = [before.t_max, before.lease.token, before.grant.token].contains(&token);
            prop_assert!(about || record == before);
        }
    }
}

/// A taker that waits for long is seen to be there; one that is not any more gives way, and finds out.
#[test]
fn a_grant_that_its_taker_has_deserted_is_anothers() {
    let patience = leasehold_core::queue::PATIENCE_US;
    let mut record = Record::unknown(0);
    assert_eq!(record.begin(1, 0), Begin::Begun);
    // who does not wait for longer than a moment need not be seen
    assert_eq!(record.begin(2, 10 * patience), Begin::InProgress);
    assert_eq!(record.could_be_had_us(0), i64::MAX);
    assert!(!record.attend(2, 0), "it is not his");
    for now in [1, patience, 2 * patience] {
        assert!(record.attend(1, now));
        assert_eq!(record.could_be_had_us(now), now + patience);
        assert_eq!(record.begin(2, now + patience - 1), Begin::InProgress);
    }
    assert_eq!(record.begin(2, 3 * patience), Begin::Begun);
    assert!(!record.attend(1, 3 * patience));
    assert!(!record.grant(1, 7, 1, true, 3 * patience), "it is not his");
    record.abort(1);
    assert!(record.grant(2, 7, 1, true, 3 * patience));
    // one that is recorded is nobody else's
    assert!(!record.attend(2, 3 * patience));
    assert_eq!(record.begin(3, i64::MAX), Begin::InProgress);
}

/// A durable lease of token 4.
fn leased_until(deadline_us: i64) -> Record {
    Record {
        t_max: 4,
        lease: Lease {
            token: 4,
            ttl_us: 9,
            ledger_ttl_us: 9,
            deadline_us,
            durable: true,
            ..Lease::NONE
        },
        row_open: true,
        ..Record::UNKNOWN
    }
}

/// Between the commit and the end of the locks the token is worth nothing, and the resource is nobody else's.
#[test]
fn a_lease_that_is_being_broken_is_nobodys() {
    let now = 5;
    let mut record = leased_until(9);
    record.begin_break(3);
    assert!(record.is_usable(now), "another's");
    record.begin_break(4);
    assert!(record.is_live(now) && !record.is_usable(now));
    for strict in [false, true] {
        let verdict = record.verdict(&[4], 0, 0, strict, now);
        assert_eq!(verdict, Verdict::Over(Over::Broken));
    }
    assert!(!record.renew(0, 4, 9, now) && record.lasting(0, 4, now).is_none());
    assert_eq!(record.release_answer(0, 4, now), Release::No);
    assert!(!record.release(4, now), "a release that comes late");
    assert_eq!(record.breakable(), None);
    assert_eq!(record.begin(1, now), Begin::Held);
    assert!(record.is_held() && !record.is_evictable(now));
    assert_eq!(record.could_be_had_us(now), 9);
    assert!(record.break_lease(4, now) && !record.is_live(now));
    assert_eq!(record.begin(1, now), Begin::Begun);
}

/// Whatever its holder does, and whoever comes: until the next grant.
#[test]
fn a_broken_lease_is_over_for_good() {
    let now = 5;
    for deadline_us in [3, 9] {
        let mut record = leased_until(deadline_us);
        assert_eq!(record.breakable(), Some(4), "also one that ran out");
        assert!(!record.break_lease(3, now), "another's");
        assert!(record.break_lease(4, now));
        assert!(!record.break_lease(4, now), "once");
        assert_eq!(record.breakable(), None);
        assert!(!record.is_live(now) && !record.renew(0, 4, 9, now));
        assert_eq!(record.release_answer(0, 4, now), Release::No);
        assert!(!record.release(4, now), "a release that comes late");
        let over = Verdict::Over(Over::Broken);
        assert_eq!(record.verdict(&[4], 0, 0, false, now), over);
        assert_eq!(record.due_mark(), Some(4));
        assert_eq!(record.begin(1, now), Begin::Begun);
        // over a restart too, by what the row says
        let row = |broken, standing| Remembered {
            token: 4,
            ttl_us: 9,
            released: false,
            broken,
            standing,
        };
        for standing in [Standing::Trusted, Standing::Reclaimed] {
            let record = Record::recovered(row(true, standing), now, now);
            assert_eq!(record.verdict(&[4], 0, 0, false, now), over);
            assert!(!record.is_live(now));
        }
        assert!(Record::recovered(row(false, Standing::Trusted), now, now).is_live(now));
    }
}

//! Random histories of one resource against a naive model: a list of what was granted, and the words
//! of the contract read off it. Checked after every step: the guarantees G1, G2, G3 and G5, every
//! answer, and the class of every refusal (LH001, LH002, LH004; that nothing was presented, LH003, is
//! known before a record is asked).
#![allow(
    clippy::unwrap_used,
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing
)]

use leasehold_core::record::{
    Begin, End, Grant, Lease, Over, Record, Release, Remembered, Standing, State, Verdict,
};
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
    Grant { owner: u64, rise: i64, ttl: i64 },
    /// It commits.
    Commit { owner: u64 },
    /// It is rolled back, or gives up.
    Abort { owner: u64 },
    /// A renewal by a transaction (in that of the grant: a subtransaction) that then commits or not.
    Renew {
        owner: u64,
        token: Index,
        ttl: i64,
        commits: bool,
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
    Acquire { owner: u64, ttl: i64, commits: bool },
    /// A check of up to three tokens.
    Verdict {
        owner: u64,
        tokens: Vec<Index>,
        strict: bool,
    },
    /// The worker marks what was released in the ledger.
    Mark,
    /// The record is forgotten where it may be, and made from the ledger again.
    Reload { marked: bool },
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
    ttl: i64,
    /// The longest TTL that the ledger has, or has with the commit of the grant.
    durable_ttl: i64,
    /// The longest TTL that renewals in the transaction of the grant wrote besides.
    lengthened_ttl: i64,
    until: i64,
    outcome: Outcome,
    released: bool,
    lost: bool,
    /// Its record was forgotten when it was over.
    reclaimed: bool,
    /// From before the start, and not released by the ledger.
    unmarked: bool,
    /// Somebody wanted the resource when this lease was over.
    wanted: bool,
}

/// What the holder of a token was told: nobody else before this instant.
#[derive(Debug, Clone)]
struct Promise {
    token: i64,
    until: i64,
}

/// The naive model, and the record beside it.
struct History {
    record: Record,
    now: i64,
    writable: i64,
    floor: i64,
    /// Leases of tokens up to this one were another server's.
    lost_up_to: i64,
    /// The highest token handed out.
    highest: i64,
    begun: Option<u64>,
    /// Every grant that the server knows of.
    grants: Vec<Granted>,
    /// Token, TTL and release of the last committed grant.
    ledger: Option<(i64, i64, bool)>,
    promises: Vec<Promise>,
    /// Tokens whose release has committed and not reached the record.
    releasing: Vec<i64>,
}

impl History {
    fn new() -> Self {
        History {
            record: Record::UNKNOWN,
            now: 0,
            writable: 0,
            floor: 0,
            lost_up_to: 0,
            highest: 0,
            begun: None,
            grants: Vec::new(),
            ledger: None,
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
        granted.released || granted.lost || granted.reclaimed || self.now >= granted.until
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

    /// Tokens to choose from: all that were handed out, one that was not, and 1.
    fn token(&self, index: Index) -> i64 {
        let mut tokens: Vec<i64> = self.grants.iter().map(|g| g.token).collect();
        tokens.extend([1, self.floor.max(1), self.highest.max(1), self.highest + 1]);
        // the last one half of the time, or most steps would be about nothing
        tokens.extend(vec![self.t_max().max(1); tokens.len()]);
        tokens[index.index(tokens.len())]
    }

    fn step(&mut self, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Clock(us) => self.now = (self.now + us).min(1 << 61),
            Step::Begin { owner } => self.begin(owner)?,
            Step::Grant { owner, rise, ttl } => self.grant(owner, rise, ttl)?,
            Step::Commit { owner } => self.commit(owner),
            Step::Abort { owner } => self.abort(owner),
            Step::Renew {
                owner,
                token,
                ttl,
                commits,
            } => {
                self.renew(owner, self.token(token), ttl, commits)?;
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
                commits,
            } => {
                self.begin(owner)?;
                self.grant(owner, 1, ttl)?;
                if commits {
                    self.commit(owner);
                } else {
                    self.abort(owner);
                }
            }
            Step::Mark => self.mark(),
            Step::Reload { marked } => self.reload(marked),
            Step::Restart => self.restart(Server::Same),
            Step::Takeover => self.restart(Server::Another),
        }
        self.compare()
    }

    fn begin(&mut self, owner: u64) -> Result<(), TestCaseError> {
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

    fn grant(&mut self, owner: u64, rise: i64, ttl: i64) -> Result<(), TestCaseError> {
        let token = self.highest + rise;
        let may = self.begun == Some(owner) && self.open_grant(owner).is_none();
        let want = may && token > self.t_max();
        let before = self.record;
        prop_assert_eq!(self.record.grant(owner, token, ttl, self.now), want);
        if !want {
            prop_assert_eq!(self.record, before);
            return Ok(());
        }
        // a token that the server wasted or forgot may come again only by a mistake of the caller
        self.highest = self.highest.max(token);
        self.grants.push(Granted {
            token,
            owner,
            ttl,
            durable_ttl: ttl,
            lengthened_ttl: 0,
            until: self.now + ttl,
            outcome: Outcome::Open,
            released: false,
            lost: false,
            reclaimed: false,
            unmarked: false,
            wanted: false,
        });
        Ok(())
    }

    fn commit(&mut self, owner: u64) {
        let (now, open) = (self.now, self.open_grant(owner).cloned());
        self.record.commit(owner, now);
        let Some(mut granted) = open else {
            // without a recorded grant there is nothing to commit, and nothing changes
            return;
        };
        self.record
            .note_durable_ttl(granted.token, granted.lengthened_ttl);
        granted.durable_ttl = granted.durable_ttl.max(granted.lengthened_ttl);
        granted.outcome = Outcome::Committed;
        granted.until = granted.until.max(now + granted.ttl);
        self.begun = None;
        self.ledger = Some((granted.token, granted.durable_ttl, false));
        // a renewal that was rolled back moves the deadline, but nobody may count on it
        self.promise(granted.token, now + granted.durable_ttl);
        *self.last_mut().unwrap() = granted;
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

    fn renew(
        &mut self,
        owner: u64,
        token: i64,
        ttl: i64,
        commits: bool,
    ) -> Result<(), TestCaseError> {
        let (now, want, before) = (self.now, self.may_renew(owner, token), self.record);
        let durable = self.record.durable_ttl_us(owner, token, now);
        prop_assert_eq!(durable.is_some(), want);
        prop_assert_eq!(self.record.renew(owner, token, ttl, now), want);
        if !want {
            prop_assert_eq!(self.record, before);
            return Ok(());
        }
        let granted = self.last_mut().unwrap();
        prop_assert_eq!(durable, Some(granted.durable_ttl));
        granted.until = granted.until.max(now + ttl);
        if granted.outcome == Outcome::Open {
            granted.ttl = granted.ttl.max(ttl);
            if commits {
                granted.lengthened_ttl = granted.lengthened_ttl.max(ttl);
            }
            return Ok(());
        }
        if ttl > granted.durable_ttl && !commits {
            return Ok(());
        }
        granted.durable_ttl = granted.durable_ttl.max(ttl);
        let durable_ttl = granted.durable_ttl;
        self.ledger = self
            .ledger
            .map(|(token, _, marked)| (token, durable_ttl, marked));
        self.record.note_durable_ttl(token, ttl);
        self.promise(token, now + ttl);
        Ok(())
    }

    fn promise(&mut self, token: i64, until: i64) {
        // a release that has committed ends the lease whatever is said of it in that moment
        if !self.releasing.contains(&token) {
            self.promises.push(Promise { token, until });
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
            self.commit(owner);
            self.releasing.push(token);
            self.promises.retain(|p| p.token != token);
        }
        Ok(())
    }

    /// What has committed its release meanwhile may be over otherwise, or another's.
    fn locks_gone(&mut self) {
        for token in std::mem::take(&mut self.releasing) {
            self.record.release(token);
            let last = self.last_mut().filter(|g| g.token == token);
            if let Some(granted) = last.filter(|g| g.outcome == Outcome::Committed) {
                granted.released = true;
            }
        }
    }

    fn verdict(&mut self, owner: u64, tokens: &[i64], strict: bool) -> Result<(), TestCaseError> {
        let got = self
            .record
            .verdict(tokens, owner, self.floor, strict, self.now);
        prop_assert_eq!(got, self.want_verdict(owner, tokens, strict));
        if let Verdict::Good { token, .. } = got {
            let newer = |g: &Granted| g.token > token && g.outcome != Outcome::RolledBack;
            prop_assert!(!self.grants.iter().any(newer), "G3: {token}");
            prop_assert!(tokens.contains(&token));
        }
        Ok(())
    }

    /// Which of the contract's lines is the first that fits.
    fn want_verdict(&self, owner: u64, tokens: &[i64], strict: bool) -> Verdict {
        let Some(last) = self.last().filter(|g| tokens.contains(&g.token)) else {
            // one that was superseded or can't be told, and none that is T_max
            let stale = |t: &i64| *t < self.t_max() || *t <= self.floor;
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

    /// Whether the ledger would bring a released lease back.
    fn comes_back(&self) -> bool {
        let committed = self
            .grants
            .iter()
            .filter(|g| g.outcome == Outcome::Committed);
        let last = committed.max_by_key(|g| g.token);
        last.is_some_and(|g| g.released && g.unmarked)
    }

    fn mark(&mut self) {
        let released = |token| self.grants.iter().any(|g| g.token == token && g.released);
        if let Some((token, ttl, marked)) = self.ledger {
            self.ledger = Some((token, ttl, marked || released(token)));
            if released(token) {
                self.record.note_marked(token);
                self.grants
                    .iter_mut()
                    .for_each(|g| g.unmarked &= g.token != token);
            }
        }
    }

    /// Forgets the record where it may be, whether the ledger knows of its release or not.
    fn reload(&mut self, marked: bool) {
        if self.begun.is_none() && self.live().is_empty() {
            if marked {
                self.mark();
            } else if self.comes_back() {
                return;
            }
            self.recover();
        }
    }

    /// A crash and a start.
    fn restart(&mut self, server: Server) {
        self.begun = None;
        self.releasing.clear();
        self.writable = self.now;
        self.floor = self.highest;
        if server == Server::Another {
            self.lost_up_to = self.highest;
            // the caller waits until they are kept before it lets anyone begin
            self.promises.clear();
        }
        self.recover();
    }

    /// Nothing is known but what the ledger says.
    fn recover(&mut self) {
        self.grants.clear();
        self.record = Record::UNKNOWN;
        let Some((token, ttl_us, released)) = self.ledger else {
            return;
        };
        let lost = token <= self.lost_up_to;
        let row = Remembered {
            token,
            ttl_us,
            released,
            standing: if lost {
                Standing::Lost
            } else if token > self.floor {
                Standing::Reclaimed
            } else {
                Standing::Trusted
            },
        };
        let reclaimed = row.standing == Standing::Reclaimed && !released;
        self.record = Record::recovered(row, self.writable);
        self.grants.push(Granted {
            token,
            owner: 0,
            ttl: ttl_us,
            durable_ttl: ttl_us,
            lengthened_ttl: 0,
            until: self.writable + ttl_us,
            outcome: Outcome::Committed,
            released: released && !lost,
            lost,
            reclaimed,
            unmarked: row.standing == Standing::Trusted && !released,
            wanted: false,
        });
    }

    /// What is true after every step.
    fn compare(&self) -> Result<(), TestCaseError> {
        let (record, now) = (&self.record, self.now);
        let live = self.live();
        prop_assert!(live.len() <= 1, "G1: {live:?}");
        let believed = self
            .promises
            .iter()
            .filter(|p| p.until > now)
            .map(|p| p.token);
        let believed: std::collections::BTreeSet<i64> = believed.collect();
        prop_assert!(believed.len() <= 1, "G1: {:?}", self.promises);
        prop_assert_eq!(record.is_live(now), !live.is_empty());
        // who believes in a lease is right
        for token in believed {
            prop_assert_eq!(live.first().map(|g| g.token), Some(token));
        }
        prop_assert_eq!(record.t_max, self.t_max());
        prop_assert_eq!(
            record.is_evictable(now),
            self.begun.is_none() && live.is_empty() && !self.comes_back()
        );
        prop_assert_eq!(record.grant.owner, self.begun.unwrap_or(0));
        let open = self.grants.iter().any(|g| g.outcome == Outcome::Open);
        let expired = self.last().is_some_and(|g| {
            g.outcome == Outcome::Committed && !g.released && !g.lost && !g.reclaimed
        });
        let want = if open || !live.is_empty() {
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

#[rustfmt::skip]
fn step() -> impl Strategy<Value = Step> {
    let (index, commits) = (any::<Index>, any::<bool>);
    prop_oneof![
        6 => prop_oneof![1 => Just(0), 4 => duration()].prop_map(Step::Clock),
        4 => owner().prop_map(|owner| Step::Begin { owner }),
        4 => (owner(), prop_oneof![8 => 1..=3_i64, 1 => -3..=0_i64], duration())
            .prop_map(|(owner, rise, ttl)| Step::Grant { owner, rise, ttl }),
        4 => owner().prop_map(|owner| Step::Commit { owner }),
        2 => owner().prop_map(|owner| Step::Abort { owner }),
        5 => (owner(), duration(), commits())
            .prop_map(|(owner, ttl, commits)| Step::Acquire { owner, ttl, commits }),
        4 => (owner(), index(), duration(), commits())
            .prop_map(|(owner, token, ttl, commits)| Step::Renew { owner, token, ttl, commits }),
        4 => (owner(), index(), commits())
            .prop_map(|(owner, token, commits)| Step::Release { owner, token, commits }),
        3 => Just(Step::LocksGone),
        8 => (owner(), prop::collection::vec(index(), 1..=3), any::<bool>())
            .prop_map(|(owner, tokens, strict)| Step::Verdict { owner, tokens, strict }),
        1 => Just(Step::Mark),
        1 => any::<bool>().prop_map(|marked| Step::Reload { marked }),
        1 => prop_oneof![3 => Just(Step::Restart), 1 => Just(Step::Takeover)],
    ]
}

/// A call of one of the functions that change a record.
#[derive(Debug, Clone)]
enum Call {
    Begin(u64),
    Grant(u64, i64, i64),
    Commit(u64),
    Abort(u64),
    Renew(u64, i64, i64),
    NoteDurable(i64, i64),
    Release(i64),
}

/// Calls it and returns everything that anyone can learn of the record before, by and after it.
fn call(record: &mut Record, call: &Call, tokens: &[i64], floor: i64, now: i64) -> Vec<String> {
    let mut seen = observe(record, tokens, floor, now);
    match *call {
        Call::Begin(owner) => seen.push(format!("{:?}", record.begin(owner, now))),
        Call::Grant(owner, token, ttl) => {
            seen.push(format!("{:?}", record.grant(owner, token, ttl, now)));
        }
        Call::Commit(owner) => record.commit(owner, now),
        Call::Abort(owner) => record.abort(owner),
        Call::Renew(owner, token, ttl) => {
            seen.push(format!("{:?}", record.renew(owner, token, ttl, now)));
        }
        Call::NoteDurable(token, ttl) => record.note_durable_ttl(token, ttl),
        Call::Release(token) => record.release(token),
    }
    seen.extend(observe(record, tokens, floor, now));
    seen
}

/// Everything that anyone can learn of a record, with times told from now and over as 0.
fn observe(record: &Record, tokens: &[i64], floor: i64, now: i64) -> Vec<String> {
    let mut seen = vec![format!("{:?}", told_from_now(*record, now))];
    seen.push(format!(
        "{} {}",
        record.is_live(now),
        record.is_evictable(now)
    ));
    seen.push(format!("{:?}", record.state(now)));
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
            let durable = record.durable_ttl_us(owner, *token, now);
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
        Just(End::Reclaimed)
    ];
    let lease = (0..=3_i64, time.clone(), time.clone(), time.clone(), end).prop_map(
        |(token, ttl_us, ledger_ttl_us, deadline_us, end)| Lease {
            unmarked: ttl_us % 2 == 0,
            token,
            ttl_us,
            ledger_ttl_us,
            deadline_us,
            end,
        },
    );
    let grant = (0..=2_u64, 0..=3_i64, time.clone(), time.clone(), time).prop_map(
        |(owner, token, ttl_us, ledger_ttl_us, deadline_us)| Grant {
            owner,
            token,
            ttl_us,
            ledger_ttl_us,
            deadline_us,
        },
    );
    (0..=3_i64, lease, grant, any::<bool>()).prop_map(|(t_max, lease, grant, contested)| Record {
        t_max,
        lease,
        grant,
        contested,
    })
}

fn any_call(ttl: impl Strategy<Value = i64> + Clone) -> impl Strategy<Value = Call> {
    let (owner, token) = (0..=2_u64, 0..=4_i64);
    prop_oneof![
        owner.clone().prop_map(Call::Begin),
        (owner.clone(), token.clone(), ttl.clone()).prop_map(|(o, t, ttl)| Call::Grant(o, t, ttl)),
        owner.clone().prop_map(Call::Commit),
        owner.clone().prop_map(Call::Abort),
        (owner, token.clone(), ttl.clone()).prop_map(|(o, t, ttl)| Call::Renew(o, t, ttl)),
        (token.clone(), ttl).prop_map(|(t, ttl)| Call::NoteDurable(t, ttl)),
        token.prop_map(Call::Release),
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
        // a lease that is lost or released does not come back
        if record.lease.token == before.lease.token && before.lease.end != End::Running {
            let commits = matches!(one, Call::Commit(_));
            let learns = before.lease.end == End::Reclaimed && record.lease.end == End::Released;
            prop_assert!(record.lease.end == before.lease.end || commits || learns);
        }
        // only its own transaction takes a grant away
        if before.grant.owner != 0 && record.grant.owner != before.grant.owner {
            prop_assert_eq!(record.grant, Grant::NONE);
            let owner = before.grant.owner;
            prop_assert!(matches!(one, Call::Commit(o) | Call::Abort(o) if o == owner));
        }
        // what is said of a token is about that token
        if let Call::Renew(_, token, _) | Call::NoteDurable(token, _) | Call::Release(token) = one {
            let about = [before.lease.token, before.grant.token].contains(&token);
            prop_assert!(about || record == before);
        }
    }
}

//! Whether a correct server can have answered so.
//!
//! **A fault is only reported where no correct server can have produced the history.** What a server did for a statement,
//! it did between its being sent and its answer, on a clock that no one can set.
//!
//! A holder may believe in its lease once the grant's commit was acknowledged, from the moment before it asked, for the
//! TTL that it asked for: the server's own count starts later. A renewal carries the belief on for its TTL from the moment
//! before it was asked for. The belief ends when its holder asks for the release, not when it hears of it, and when an
//! administrator asks for a break that is committed. Where the first answer to a request was lost, the belief counts from
//! when the request was made first: a retry does not restart the TTL.
//!
//! What may be lost, and when:
//! - with a lossy promotion all leases of before, but no belief: nothing is granted for `max_ttl`;
//! - with any restart or promotion a lease that is not durable, but no belief either;
//! - with a crash that a lease was released, which only delays the next grant;
//! - with an asynchronous or cut off promotion what was acknowledged last.

use std::collections::{HashMap, HashSet};
use std::fmt;

use super::clock::Micros;
use super::event::{Lease, Resource, name};
use super::fold::LOST;
use super::history::{
    Blow, Break, Broken, End, Fate, Grant, History, Record, Refusal, Release, Renewal, Row, State,
    Write,
};
use super::work::Shape;
use super::{queues, requests};

/// What a history can break.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rule {
    /// G2: a token was granted twice.
    TokenTwice,
    /// G2: a token was granted that is below one whose grant had been answered before.
    TokenFell,
    /// G1, G5: a resource was granted while its holder could still believe in its lease.
    GrantedEarly,
    /// G5: a resource was granted within `max_ttl` of a lossy promotion.
    GrantedInGrace,
    /// G5: a lease was refused to a holder that could still believe in it.
    LostEarly,
    /// G6: the session of a holder that could still believe in its lease was ended as a zombie.
    EndedEarly,
    /// G1: a lease was renewed after a newer one had been granted.
    RenewedStale,
    /// G3: the fence let a token pass after a newer one had been granted.
    PassedStale,
    /// G3: a write committed that was sent to its commit when a newer token was known.
    StaleCommit,
    /// G3: in the order of commits, an older token comes after a newer one.
    TokensOfRowsFell,
    /// A lease of before a lossy promotion was good after it.
    OutlivedPromotion,
    /// G7: the fence let a token pass whose lease had been released.
    PassedReleased,
    /// A token was good for something after its lease had been broken.
    BrokenTokenUsed,
    /// A break has not found a lease that its holder could still believe in.
    BreakMissed,
    /// A retry did not get the lease that its request had been granted, and that its holder could still believe in.
    RetryForgot,
    /// A retry got a lease that was over.
    RetryRevived,
    /// A release that was asked for again was refused, though nothing newer was granted.
    ReleaseForgotten,
    /// A call took far longer than the wait that it brought.
    WaitedTooLong,
    /// A call gave up before the wait that it brought was over.
    GaveUpEarly,
    /// First come, first served: who came later was granted the resource, and who came before still waited.
    OutOfTurn,
    /// Who waited was not granted a resource that was free for a long time.
    LeftWaiting,
    /// G4: a holder did not see an earlier holder's write.
    WriteUnseen,
    /// An acknowledged write is not there.
    WriteLost,
    /// A row is there that no client wrote so, or whose write was rolled back.
    RowUnexplained,
    /// G7: a row is there under a token whose grant was rolled back.
    RowOfUndoneGrant,
    /// The rows of a resource are not of one piece: a transaction was torn.
    TornTransaction,
    /// The ledger does not know of a durable grant.
    LedgerBehind,
    /// The sequence is behind a token that was handed out.
    SequenceBehind,
}

/// A broken rule, with the records that break it and no others.
#[derive(Debug, Clone, PartialEq)]
pub struct Fault {
    pub rule: Rule,
    pub piece: Vec<Record>,
}

impl Fault {
    pub fn new(rule: Rule, mut piece: Vec<Record>) -> Self {
        piece.sort_by_key(Record::at);
        Self { rule, piece }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.rule)?;
        self.piece
            .iter()
            .try_for_each(|record| write!(f, "\n  {record}"))
    }
}

/// Everything that no correct server can have done, the shortest pieces first.
pub fn faults(history: &History, end: &End) -> Vec<Fault> {
    let mut checker = Checker {
        history,
        end,
        index: Index::of(history, end),
        faults: Vec::new(),
    };
    checker.tokens();
    checker.early_grants();
    checker.graces();
    checker.early_losses();
    checker.stale_uses();
    checker.old_leases();
    checker.released_uses();
    checker.broken_uses();
    checker.missed_breaks();
    checker.denials();
    checker.faults.extend(requests::faults(&checker.index));
    checker.faults.extend(queues::faults(&checker.index));
    checker.sights();
    checker.rows();
    checker.contents();
    checker.ledger();
    checker.faults.sort_by_key(|fault| fault.piece.len());
    checker.faults
}

/// Grants whose place in the order of their queue is judged.
pub fn ordered(history: &History, end: &End) -> usize {
    queues::ordered(&Index::of(history, end))
}

/// Grants over a lease that its holder had not released and nobody had broken, by the committed grants of resources below `below`.
pub fn takeovers(history: &History, below: Resource) -> usize {
    let released = history
        .releases
        .iter()
        .filter(|release| release.fate != Fate::RolledBack);
    let breaks = history.breaks.iter();
    let broken = breaks
        .filter(|one| one.fate != Fate::RolledBack)
        .filter_map(Break::token);
    let released: HashSet<i64> = released
        .map(|release| release.lease.token)
        .chain(broken)
        .collect();
    let mut by_resource: HashMap<Resource, Vec<i64>> = HashMap::new();
    for grant in history
        .grants
        .iter()
        .filter(|grant| grant.fate == Fate::Committed)
    {
        by_resource
            .entry(grant.lease.resource)
            .or_default()
            .push(grant.lease.token);
    }
    by_resource.retain(|resource, _| *resource < below);
    let over = by_resource.into_values().flat_map(|mut tokens| {
        tokens.sort_unstable();
        tokens.pop();
        tokens
    });
    over.filter(|token| !released.contains(token)).count()
}

/// Leases that were granted before one of the blows and successfully used after it.
pub fn survivals(history: &History, blows: &[Blow]) -> usize {
    let granted: HashMap<i64, Micros> = history
        .grants
        .iter()
        .map(|grant| (grant.lease.token, grant.answered))
        .collect();
    let writes = history
        .writes
        .iter()
        .map(|write| (write.lease.token, write.asked));
    let renewals = history.renewals.iter().filter(|renewal| renewal.renewed);
    let used = writes.chain(renewals.map(|renewal| (renewal.lease.token, renewal.asked)));
    let survived = used.filter(|(token, at)| {
        let from = granted.get(token).copied().unwrap_or(Micros::MAX);
        blows
            .iter()
            .any(|blow| from < blow.span().0 && blow.span().0 < *at)
    });
    survived
        .map(|(token, _)| token)
        .collect::<HashSet<_>>()
        .len()
}

/// The history by what it is asked for.
pub struct Index<'a> {
    pub history: &'a History,
    pub end: &'a End,
    /// Grants of each resource, by when they were answered.
    grants: HashMap<Resource, Vec<&'a Grant>>,
    pub by_token: HashMap<i64, &'a Grant>,
    /// The first release of a lease that may have ended it.
    pub released: HashMap<i64, &'a Release>,
    /// The first break that may have ended a lease.
    pub broken: HashMap<i64, &'a Break>,
    /// Breaks of which nobody knows what they have ended, if anything: the resource, and from when to when.
    unheard_breaks: Vec<(Resource, Micros, Micros)>,
    /// Renewals that count.
    pub renewals: HashMap<i64, Vec<&'a Renewal>>,
}

impl<'a> Index<'a> {
    fn of(history: &'a History, end: &'a End) -> Self {
        let mut grants: HashMap<Resource, Vec<&Grant>> = HashMap::new();
        for grant in &history.grants {
            grants.entry(grant.lease.resource).or_default().push(grant);
        }
        grants
            .values_mut()
            .for_each(|grants| grants.sort_by_key(|grant| grant.answered));
        let mut released: HashMap<i64, &Release> = HashMap::new();
        for release in history
            .releases
            .iter()
            .filter(|r| r.fate != Fate::RolledBack)
        {
            let first = released.entry(release.lease.token).or_insert(release);
            if release.from < first.from {
                *first = release;
            }
        }
        let mut broken: HashMap<i64, &Break> = HashMap::new();
        let mut unheard_breaks = Vec::new();
        for one in history
            .breaks
            .iter()
            .filter(|one| one.fate != Fate::RolledBack)
        {
            match one.said {
                Broken::Token(token) => {
                    let first = broken.entry(token).or_insert(one);
                    if one.from < first.from {
                        *first = one;
                    }
                }
                Broken::Nothing => {}
                // its backend may go on as long as the server does
                Broken::Unheard => {
                    let blows = end.blows.iter().map(Blow::span);
                    let gone = blows
                        .filter(|(from, _)| one.asked <= *from)
                        .map(|(_, until)| until);
                    let until = gone.min().unwrap_or(Micros::MAX);
                    unheard_breaks.push((one.resource, one.asked, until));
                }
            }
        }
        let mut renewals: HashMap<i64, Vec<&Renewal>> = HashMap::new();
        for renewal in history
            .renewals
            .iter()
            .filter(|r| r.renewed && r.fate == Fate::Committed)
        {
            renewals
                .entry(renewal.lease.token)
                .or_default()
                .push(renewal);
        }
        let by_token = history
            .grants
            .iter()
            .map(|grant| (grant.lease.token, grant))
            .collect();
        Self {
            history,
            end,
            grants,
            by_token,
            released,
            broken,
            unheard_breaks,
            renewals,
        }
    }

    pub fn of_resource(&self, resource: Resource) -> &[&'a Grant] {
        self.grants.get(&resource).map_or(&[], Vec::as_slice)
    }

    /// What lets the holder of a grant believe at `now` that its lease is not over; nothing where it may not.
    pub fn belief(&self, grant: &Grant, now: Micros) -> Option<Vec<Record>> {
        let released = self.released.get(&grant.lease.token);
        if released.is_some_and(|release| release.from <= now) {
            return None;
        }
        self.belief_or_release(grant, now)
    }

    /// The same where it need not be that it was not released.
    pub fn belief_or_release(&self, grant: &Grant, now: Micros) -> Option<Vec<Record>> {
        if grant.fate != Fate::Committed || self.may_be_broken(grant, now) {
            return None;
        }
        if grant.asked + grant.ttl > now {
            return Some(vec![Record::Grant(*grant)]);
        }
        let renewals = self.renewals.get(&grant.lease.token).into_iter().flatten();
        let mut on = renewals.filter(|r| r.asked <= now && r.asked + r.ttl > now);
        on.next()
            .map(|renewal| vec![Record::Grant(*grant), Record::Renewal(**renewal)])
    }

    fn may_be_broken(&self, grant: &Grant, now: Micros) -> bool {
        let broken = self.broken.get(&grant.lease.token);
        let mut unheard = self.unheard_breaks.iter();
        broken.is_some_and(|broken| broken.from <= now)
            || unheard.any(|(resource, from, until)| {
                *resource == grant.lease.resource && *from <= now && grant.asked <= *until
            })
    }

    /// The latest moment at which the holder may believe in its lease.
    fn last_belief(&self, grant: &Grant) -> Micros {
        let renewals = self.renewals.get(&grant.lease.token).into_iter().flatten();
        renewals
            .map(|r| r.asked + r.ttl)
            .fold(grant.asked + grant.ttl, Micros::max)
    }

    /// A grant that has closed the token of `lease` by `from`, and kept it closed until `until`. T_max of a grant that was
    /// rolled back may be forgotten once its transaction has ended, so that one counts only while it was open for sure.
    pub fn newer(&self, lease: Lease, from: Micros, until: Micros) -> Option<&'a Grant> {
        let grants = self.of_resource(lease.resource);
        let before = grants.partition_point(|grant| grant.answered < from);
        let closes = |grant: &&&Grant| {
            grant.lease.token > lease.token
                && (grant.fate == Fate::Committed || until < grant.open_until)
        };
        grants[..before].iter().rev().find(closes).copied()
    }

    /// Why a lease has to be good at `now`: its holder may believe in it, and nothing has happened with which it may be
    /// lost.
    pub fn good(&self, lease: Lease, now: Micros) -> Option<Vec<Record>> {
        let grant = self.by_token.get(&lease.token)?;
        self.belief(grant, now)
            .filter(|_| !self.may_be_lost(grant, now))
    }

    /// Whether something has happened by `now` with which a lease may be lost.
    pub fn may_be_lost(&self, grant: &Grant, now: Micros) -> bool {
        self.end.blows.iter().any(|blow| {
            let (from, until) = blow.span();
            grant.asked <= until
                && from <= now
                && (blow.is_lossy() || !grant.durable || blow.may_lose(grant.committed))
        })
    }

    pub fn struck(&self, from: Micros, until: Micros) -> bool {
        let mut blows = self.end.blows.iter().map(Blow::span);
        blows.any(|span| span.0 <= until && from <= span.1)
    }
}

struct Checker<'a> {
    history: &'a History,
    end: &'a End,
    index: Index<'a>,
    faults: Vec<Fault>,
}

impl Checker<'_> {
    fn add(&mut self, rule: Rule, piece: Vec<Record>) {
        self.faults.push(Fault::new(rule, piece));
    }

    /// Whatever became of its transaction, an answered token counts.
    fn tokens(&mut self) {
        let mut seen: HashMap<i64, &Grant> = HashMap::new();
        for grant in &self.history.grants {
            if let Some(first) = seen.insert(grant.lease.token, grant) {
                self.add(
                    Rule::TokenTwice,
                    vec![Record::Grant(*first), Record::Grant(*grant)],
                );
            }
        }
        let mut asked: Vec<&Grant> = self.history.grants.iter().collect();
        asked.sort_by_key(|grant| grant.asked);
        let mut answered = asked.clone();
        answered.sort_by_key(|grant| grant.answered);
        let mut answered = answered.into_iter().peekable();
        let mut highest: Option<&Grant> = None;
        for grant in asked {
            while let Some(before) = answered.next_if(|before| before.answered < grant.asked) {
                if highest.is_none_or(|known| before.lease.token > known.lease.token) {
                    highest = Some(before);
                }
            }
            if let Some(known) = highest.filter(|known| known.lease.token > grant.lease.token) {
                self.add(
                    Rule::TokenFell,
                    vec![Record::Grant(*known), Record::Grant(*grant)],
                );
            }
        }
    }

    /// A grant counts whatever became of its transaction: it is its moment that is too early.
    fn early_grants(&mut self) {
        for grant in &self.history.grants {
            let others = self.index.of_resource(grant.lease.resource);
            let from = others.partition_point(|other| other.answered < grant.asked);
            let last = self.index.last_belief(grant);
            for next in others[from..]
                .iter()
                .take_while(|next| next.answered < last)
            {
                if next.lease.token <= grant.lease.token {
                    continue;
                }
                if let Some(mut piece) = self.index.belief(grant, next.answered) {
                    piece.push(Record::Grant(**next));
                    self.add(Rule::GrantedEarly, piece);
                    break;
                }
            }
        }
    }

    /// A restart within the time begins it anew.
    fn graces(&mut self) {
        for (place, promotion) in self.end.blows.iter().enumerate() {
            if !promotion.is_lossy() {
                continue;
            }
            let mut until = promotion.start() + self.end.max_ttl;
            let mut why = vec![Record::Blow(*promotion)];
            for blow in &self.end.blows[place + 1..] {
                if blow.span().0 < until && blow.start() < until {
                    until = blow.start() + self.end.max_ttl;
                    why = vec![Record::Blow(*promotion), Record::Blow(*blow)];
                }
            }
            let early = |grant: &&Grant| promotion.start() < grant.asked && grant.answered < until;
            if let Some(grant) = self.history.grants.iter().find(early) {
                if grant.answered < promotion.start() + self.end.max_ttl {
                    why.truncate(1);
                }
                why.push(Record::Grant(*grant));
                self.add(Rule::GrantedInGrace, why);
            }
        }
    }

    fn early_losses(&mut self) {
        for renewal in self
            .history
            .renewals
            .iter()
            .filter(|renewal| !renewal.renewed)
        {
            if let Some(mut piece) = self.index.good(renewal.lease, renewal.answered) {
                piece.push(Record::Renewal(*renewal));
                self.add(Rule::LostEarly, piece);
            }
        }
        for refusal in &self.history.refusals {
            let rule = match refusal.sqlstate.as_str() {
                "LH001" | "LH002" | "LH004" => Rule::LostEarly,
                "57014" => Rule::EndedEarly,
                LOST if !self.index.struck(refusal.asked, refusal.answered) => Rule::EndedEarly,
                _ => continue,
            };
            if let Some(mut piece) = self.all_good(refusal) {
                piece.push(Record::Refusal(refusal.clone()));
                self.add(rule, piece);
            }
        }
    }

    /// The error does not say which lease it is about, so all of them have to be good.
    fn all_good(&self, refusal: &Refusal) -> Option<Vec<Record>> {
        let mut leases = refusal.leases.clone();
        leases.sort_by_key(|lease| lease.token);
        leases.dedup();
        let pieces: Option<Vec<_>> = leases
            .iter()
            .map(|lease| self.index.good(*lease, refusal.answered))
            .collect();
        pieces
            .map(|pieces| pieces.concat())
            .filter(|piece| !piece.is_empty())
    }

    /// Whether a write of unknown fate has committed is told by its row.
    fn stale_uses(&mut self) {
        for renewal in self
            .history
            .renewals
            .iter()
            .filter(|renewal| renewal.renewed)
        {
            let newer = self
                .index
                .newer(renewal.lease, renewal.asked, renewal.answered);
            if let Some(newer) = newer {
                let piece = vec![Record::Grant(*newer), Record::Renewal(*renewal)];
                self.add(Rule::RenewedStale, piece);
            }
        }
        let there = self.end.ids();
        for write in &self.history.writes {
            if let Some(newer) = self.index.newer(write.lease, write.asked, write.passed) {
                let piece = vec![Record::Grant(*newer), Record::Write(*write)];
                self.add(Rule::PassedStale, piece);
                continue;
            }
            let row = there.get(&(write.lease.resource, write.id));
            if write.fate != Fate::Committed && row.is_none() {
                continue;
            }
            if let Some(newer) = self
                .index
                .newer(write.lease, write.commit_asked, write.answered)
            {
                let mut piece = vec![Record::Grant(*newer), Record::Write(*write)];
                if write.fate == Fate::Unknown {
                    piece.extend(row.map(|row| Record::Row(**row)));
                }
                self.add(Rule::StaleCommit, piece);
            }
        }
    }

    fn old_leases(&mut self) {
        let lossy: Vec<&Blow> = self
            .end
            .blows
            .iter()
            .filter(|blow| blow.is_lossy())
            .collect();
        let writes = self.history.writes.iter();
        let renewals = self
            .history
            .renewals
            .iter()
            .filter(|renewal| renewal.renewed);
        let uses = writes
            .map(|write| (write.lease, write.asked, Record::Write(*write)))
            .chain(renewals.map(|r| (r.lease, r.asked, Record::Renewal(*r))));
        for (lease, asked, record) in uses {
            let Some(grant) = self.index.by_token.get(&lease.token) else {
                continue;
            };
            let outlived = |blow: &&&Blow| grant.answered < blow.start() && blow.start() < asked;
            if let Some(blow) = lossy.iter().find(outlived) {
                let piece = vec![Record::Grant(**grant), Record::Blow(**blow), record];
                self.add(Rule::OutlivedPromotion, piece);
            }
        }
    }

    /// A crash may forget a release, which delays the next holder and no more.
    fn released_uses(&mut self) {
        for write in &self.history.writes {
            let release = self.index.released.get(&write.lease.token);
            let known = release.filter(|r| r.fate == Fate::Committed && r.answered < write.asked);
            if let Some(release) = known.filter(|r| !self.index.struck(r.from, write.passed)) {
                let piece = vec![Record::Release(**release), Record::Write(*write)];
                self.add(Rule::PassedReleased, piece);
            }
        }
    }

    /// A transaction that the fence let in before the break may go on, and holds up the next grant. A break may go with a
    /// promotion, as what is written.
    fn broken_uses(&mut self) {
        let breaks = self.history.breaks.iter();
        let known = breaks.filter(|one| one.fate == Fate::Committed);
        let known = known.filter(|one| !self.end.blows.iter().any(|b| b.may_lose(one.answered)));
        let known: HashMap<i64, &Break> =
            known.filter_map(|one| Some((one.token()?, one))).collect();
        let writes = self.history.writes.iter();
        let writes = writes.map(|write| (write.lease, write.began, Record::Write(*write)));
        let renewals = self
            .history
            .renewals
            .iter()
            .filter(|renewal| renewal.renewed);
        let renewals = renewals.map(|r| (r.lease, r.asked, Record::Renewal(*r)));
        // one that was released before it was broken may be released again
        let unreleased = |release: &&Release| {
            let first = self.index.released.get(&release.lease.token);
            let broken = self.index.broken.get(&release.lease.token);
            first
                .zip(broken)
                .is_none_or(|(first, broken)| broken.answered < first.asked)
        };
        let releases = self.history.releases.iter().filter(unreleased);
        let releases = releases.filter(|release| release.answered != Micros::MAX);
        let releases = releases.map(|r| (r.lease, r.asked, Record::Release(*r)));
        let used = writes.chain(renewals).chain(releases);
        let faults: Vec<Vec<Record>> = used
            .filter_map(|(lease, asked, record)| {
                let broken = known.get(&lease.token)?;
                (broken.answered < asked).then(|| vec![Record::Break(**broken), record])
            })
            .collect();
        for piece in faults {
            self.add(Rule::BrokenTokenUsed, piece);
        }
    }

    fn missed_breaks(&mut self) {
        for one in &self.history.breaks {
            if one.said == Broken::Unheard {
                continue;
            }
            let grants = self.index.of_resource(one.resource);
            let before = grants.partition_point(|grant| grant.answered < one.asked);
            let missed = grants[..before].iter().find_map(|grant| {
                let is_other = one.token() != Some(grant.lease.token);
                // by the time that it said so
                let said = one.said_at;
                (is_other && grant.committed < one.asked)
                    .then(|| self.index.good(grant.lease, said))
                    .flatten()
            });
            if let Some(mut piece) = missed {
                piece.push(Record::Break(*one));
                self.add(Rule::BreakMissed, piece);
            }
        }
    }

    fn denials(&mut self) {
        for denial in &self.history.denials {
            let Some(grant) = self.index.by_token.get(&denial.lease.token) else {
                continue;
            };
            if let Some(mut piece) = self.index.good(denial.lease, denial.answered) {
                piece.push(Record::Denial(*denial));
                self.add(Rule::LostEarly, piece);
                continue;
            }
            let release = self.index.released.get(&denial.lease.token);
            let (Some(release), Some(mut piece)) = (
                release.filter(|release| release.from <= denial.answered),
                self.index.belief_or_release(grant, denial.answered),
            ) else {
                continue;
            };
            // one in memory is forgotten where its place is needed
            if grant.durable
                && !self.index.may_be_lost(grant, denial.answered)
                && !self.may_be_superseded(grant, denial.answered)
            {
                piece.extend([Record::Release(**release), Record::Denial(*denial)]);
                self.add(Rule::ReleaseForgotten, piece);
            }
        }
    }

    /// Whether a newer token may have been granted by `now`, heard of or not.
    fn may_be_superseded(&self, grant: &Grant, now: Micros) -> bool {
        let resource = grant.lease.resource;
        let grants = self.index.of_resource(resource);
        let newer = |other: &&Grant| other.lease.token > grant.lease.token && other.asked <= now;
        let mut attempts = self.history.attempts.iter();
        grants.iter().any(newer)
            || attempts.any(|attempt| {
                attempt.resource == resource
                    && attempt.is_in_doubt()
                    && attempt.asked <= now
                    && grant.asked <= queues::in_doubt_until(attempt)
            })
    }

    /// What a transaction has seen that was then rolled back binds nobody.
    fn sights(&mut self) {
        let mut rows: HashMap<Resource, Vec<&Row>> = HashMap::new();
        for row in &self.end.rows {
            rows.entry(row.lease.resource).or_default().push(row);
        }
        rows.values_mut()
            .for_each(|rows| rows.sort_by_key(|row| row.seq));
        for sight in &self.history.sights {
            let grant = self.index.by_token.get(&sight.lease.token);
            let Some(grant) = grant.filter(|grant| grant.fate == Fate::Committed) else {
                continue;
            };
            let rows = rows
                .get(&sight.lease.resource)
                .map_or(&[][..], Vec::as_slice);
            let unseen = rows.partition_point(|row| row.seq <= sight.seq);
            // the next row tells: were it of this holder or a later one, so would be all that follow, or they fall
            let row = rows
                .get(unseen)
                .filter(|row| row.lease.token < sight.lease.token);
            if let Some(row) = row {
                let piece = vec![
                    Record::Grant(**grant),
                    Record::Sight(*sight),
                    Record::Row(**row),
                ];
                self.add(Rule::WriteUnseen, piece);
            }
        }
    }

    fn rows(&mut self) {
        let tried = self.history.writes.iter().filter(|write| write.id != 0);
        let tried: HashMap<(Resource, i64), &Write> = tried
            .map(|write| ((write.lease.resource, write.id), write))
            .collect();
        for row in &self.end.rows {
            let write = tried.get(&(row.lease.resource, row.id));
            let explains = |write: &&&Write| {
                write.fate != Fate::RolledBack && (write.lease, write.seq) == (row.lease, row.seq)
            };
            if write.filter(explains).is_none() {
                let mut piece = vec![Record::Row(*row)];
                piece.extend(write.map(|write| Record::Write(**write)));
                self.add(Rule::RowUnexplained, piece);
            }
            let grant = self.index.by_token.get(&row.lease.token);
            if let Some(grant) = grant.filter(|grant| grant.fate == Fate::RolledBack) {
                let piece = vec![Record::Grant(**grant), Record::Row(*row)];
                self.add(Rule::RowOfUndoneGrant, piece);
            }
        }
        let there = self.end.ids();
        for write in tried.values() {
            let lost = write.fate == Fate::Committed
                && !there.contains_key(&(write.lease.resource, write.id));
            if lost
                && !self
                    .end
                    .blows
                    .iter()
                    .any(|blow| blow.may_lose(write.answered))
            {
                self.add(Rule::WriteLost, vec![Record::Write(**write)]);
            }
        }
    }

    /// Rows of one resource: numbered without a gap up to the counter, under tokens that never fall, and what they say was
    /// written is what the tables hold.
    fn contents(&mut self) {
        for (resource, counter) in &self.end.counters {
            let mut rows: Vec<&Row> = self
                .end
                .rows
                .iter()
                .filter(|row| row.lease.resource == *resource)
                .collect();
            rows.sort_by_key(|row| row.seq);
            for pair in rows.windows(2) {
                if let [before, after] = pair
                    && after.lease.token < before.lease.token
                {
                    let piece = vec![Record::Row(**before), Record::Row(**after)];
                    self.add(Rule::TokensOfRowsFell, piece);
                }
            }
            if !rows.iter().map(|row| row.seq).eq(1..=*counter) {
                self.torn(
                    *resource,
                    format!("counter {counter}, and {} rows", rows.len()),
                );
            }
            self.tables(*resource, &rows);
        }
    }

    fn tables(&mut self, resource: Resource, rows: &[&Row]) {
        let (mut items, mut state) = (
            HashMap::new(),
            State {
                n: 0,
                id: 0,
                token: 0,
            },
        );
        for row in rows {
            let token = row.lease.token;
            match row.shape {
                Shape::Insert | Shape::Copy => drop(items.insert((resource, row.id), token)),
                Shape::Delete => items.clear(),
                Shape::Update | Shape::Upsert | Shape::Merge => {
                    state = State {
                        n: state.n + 1,
                        id: row.id,
                        token,
                    }
                }
            }
        }
        let found = self.end.states.get(&resource);
        if found.is_some_and(|found| *found != state) {
            self.torn(
                resource,
                format!("{found:?}, and the log tells of {state:?}"),
            );
        }
        let found = self.end.items.iter().filter(|((r, _), _)| *r == resource);
        let found: HashMap<_, _> = found.map(|(key, token)| (*key, *token)).collect();
        if found != items {
            self.torn(
                resource,
                format!("items {found:?}, and the log tells of {items:?}"),
            );
        }
    }

    fn torn(&mut self, resource: Resource, what: String) {
        let fact = format!("{}: {what}", name(resource));
        self.add(Rule::TornTransaction, vec![Record::Fact(fact)]);
    }

    fn ledger(&mut self) {
        let lost = |at: Micros| self.end.blows.iter().any(|blow| blow.may_lose(at));
        let durable = self
            .history
            .grants
            .iter()
            .filter(|g| g.durable && g.fate == Fate::Committed);
        let behind = durable.filter(|grant| {
            let t_max = self
                .end
                .ledger
                .get(&grant.lease.resource)
                .copied()
                .unwrap_or(0);
            t_max < grant.lease.token && !lost(grant.committed)
        });
        for grant in behind.collect::<Vec<_>>() {
            let (resource, ledger) = (grant.lease.resource, &self.end.ledger);
            let fact = format!(
                "the ledger has of {} {:?}",
                name(resource),
                ledger.get(&resource)
            );
            self.add(
                Rule::LedgerBehind,
                vec![Record::Grant(*grant), Record::Fact(fact)],
            );
        }
        // a lost position is made up for by the next grant
        let whole = self
            .end
            .blows
            .iter()
            .all(|blow| !matches!(blow, Blow::Promotion { .. }));
        let highest = self
            .history
            .grants
            .iter()
            .max_by_key(|grant| grant.lease.token);
        let ahead = highest.filter(|grant| whole && grant.lease.token > self.end.position);
        if let Some(grant) = ahead {
            let fact = format!("the sequence is at {}", self.end.position);
            self.add(
                Rule::SequenceBehind,
                vec![Record::Grant(*grant), Record::Fact(fact)],
            );
        }
    }
}

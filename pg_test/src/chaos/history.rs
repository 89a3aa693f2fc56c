//! What clients asked and heard in one run, what was done to the servers meanwhile, and what the database holds in the
//! end: the records that the checker judges. `fold` makes them of what the clients told.
//!
//! What the server did for a statement lies between `asked` and `answered`. Where no answer came, nothing is concluded
//! from the statement, but that it may have had its effect at any time.

use std::collections::HashMap;
use std::fmt;

use super::clock::Micros;
use super::event::{Lease, Resource, name};
use super::work::Shape;

/// How a transaction ended, as far as its client knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Committed,
    RolledBack,
    /// No answer came to the commit.
    Unknown,
}

/// A lease whose token was the answer of an acquire. Of a request that was asked for several times it is one grant: of which
/// of them is not known, so it was `asked` for when the first was, and `answered` when the first answer came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    pub client: usize,
    pub lease: Lease,
    pub request: Option<i64>,
    pub ttl: Micros,
    pub durable: bool,
    pub asked: Micros,
    pub answered: Micros,
    pub fate: Fate,
    /// When the answer to its commit came.
    pub committed: Micros,
    /// Until when its transaction was open for sure, where it was rolled back.
    pub open_until: Micros,
}

/// An acquire, whatever came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attempt {
    pub client: usize,
    /// The backend.
    pub pid: i32,
    pub resource: Resource,
    pub request: Option<i64>,
    /// The request had been asked for before.
    pub is_retry: bool,
    pub wait: Micros,
    pub ttl: Micros,
    pub asked: Micros,
    /// When the answer came, or it was known that none will come.
    pub answered: Micros,
    pub outcome: Outcome,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Token(i64),
    Null,
    /// LH005.
    Shed,
    /// Another error.
    Failed,
    /// The connection was lost.
    Lost,
    /// The client was killed, or the run was over, before there was an answer.
    Open,
}

impl Attempt {
    /// Whether it may have been granted without its client's having heard of it.
    pub fn is_in_doubt(&self) -> bool {
        matches!(
            self.outcome,
            Outcome::Failed | Outcome::Lost | Outcome::Open
        )
    }

    pub fn token(&self) -> Option<i64> {
        match self.outcome {
            Outcome::Token(token) => Some(token),
            _ => None,
        }
    }
}

/// A renew_lease that was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Renewal {
    pub client: usize,
    pub lease: Lease,
    pub ttl: Micros,
    pub asked: Micros,
    pub answered: Micros,
    pub renewed: bool,
    pub fate: Fate,
}

/// A release_lease that was not answered with false. It may have ended the lease from `from` on: when it was sent, or in a
/// block when the commit was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Release {
    pub client: usize,
    pub lease: Lease,
    pub asked: Micros,
    pub from: Micros,
    pub answered: Micros,
    pub fate: Fate,
}

/// A release_lease that was answered with false.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Denial {
    pub client: usize,
    pub lease: Lease,
    pub asked: Micros,
    pub answered: Micros,
}

/// A break_lease. It may have ended a lease from `from` on, as a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Break {
    pub client: usize,
    pub resource: Resource,
    pub said: Broken,
    pub asked: Micros,
    /// When it said so, which in a block is before its commit.
    pub said_at: Micros,
    pub from: Micros,
    pub answered: Micros,
    pub fate: Fate,
}

impl Break {
    pub fn token(&self) -> Option<i64> {
        match self.said {
            Broken::Token(token) => Some(token),
            Broken::Nothing | Broken::Unheard => None,
        }
    }
}

/// What a break_lease has said that it breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    Token(i64),
    Nothing,
    /// The answer was lost, so it may be any.
    Unheard,
}

/// Who was seen to wait for a resource, by their backends, in the order of the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    pub resource: Resource,
    pub pids: Vec<i32>,
    pub asked: Micros,
    pub answered: Micros,
}

/// The statement of a backend was cancelled, or the backend ended, by others than leasehold. Meant for one that waits; it
/// may be doing something else by then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strike {
    pub pid: i32,
    /// The backend was ended.
    pub ends: bool,
    pub from: Micros,
    pub until: Micros,
}

/// A fenced write that passed, or a fence() that did, where `id` is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Write {
    pub client: usize,
    pub lease: Lease,
    /// Unique among the writes of one resource, and in its row.
    pub id: i64,
    pub seq: i64,
    /// When the transaction was begun.
    pub began: Micros,
    pub asked: Micros,
    pub passed: Micros,
    /// When its COMMIT was sent and answered; meaningless where it was rolled back.
    pub commit_asked: Micros,
    pub answered: Micros,
    pub fate: Fate,
}

/// A statement under some leases that ended in an error, or whose session was ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub client: usize,
    pub leases: Vec<Lease>,
    pub asked: Micros,
    pub answered: Micros,
    pub sqlstate: String,
}

/// What a holder read after it was granted its lease: how many writes the resource has had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sight {
    pub client: usize,
    pub lease: Lease,
    pub seq: i64,
    pub asked: Micros,
    pub answered: Micros,
}

/// Something that was done to the servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blow {
    /// The server was struck at `from` or after, and told to start at `start`.
    Down {
        from: Micros,
        start: Micros,
        until: Micros,
    },
    /// The old primary was gone when the standby was told to promote, at `start`. Commits that were acknowledged after
    /// `lost_since` may be lost.
    Promotion {
        from: Micros,
        start: Micros,
        until: Micros,
        lossless: bool,
        lost_since: Option<Micros>,
    },
}

impl Blow {
    /// From when to when the server was away.
    pub fn span(&self) -> (Micros, Micros) {
        match *self {
            Self::Down { from, until, .. } | Self::Promotion { from, until, .. } => (from, until),
        }
    }

    /// When a server that became writable was told to.
    pub fn start(&self) -> Micros {
        match *self {
            Self::Down { start, .. } | Self::Promotion { start, .. } => start,
        }
    }

    pub fn is_lossy(&self) -> bool {
        matches!(
            self,
            Self::Promotion {
                lossless: false,
                ..
            }
        )
    }

    /// Whether what was acknowledged at `at` may be lost with it.
    pub fn may_lose(&self, at: Micros) -> bool {
        matches!(*self, Self::Promotion { lost_since: Some(since), start, .. } if since <= at && at <= start)
    }
}

#[derive(Debug, Default, Clone, PartialEq)]
pub struct History {
    pub grants: Vec<Grant>,
    pub renewals: Vec<Renewal>,
    pub releases: Vec<Release>,
    pub writes: Vec<Write>,
    pub refusals: Vec<Refusal>,
    pub sights: Vec<Sight>,
    pub attempts: Vec<Attempt>,
    pub denials: Vec<Denial>,
    pub breaks: Vec<Break>,
    pub looks: Vec<Look>,
    /// Renewals whose answer was lost: the token, and when that was known.
    pub unheard_renewals: Vec<(i64, Micros)>,
    /// Answers that nobody should get.
    pub unexpected: Vec<String>,
}

/// A row that the log has of a fenced write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    pub lease: Lease,
    pub seq: i64,
    pub id: i64,
    pub shape: Shape,
}

/// The row of a resource in `state`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    pub n: i64,
    pub id: i64,
    pub token: i64,
}

/// What the database holds when all is over, and what was done before.
#[derive(Debug, Default, Clone)]
pub struct End {
    pub rows: Vec<Row>,
    /// The counter that `seq` is drawn from, by resource.
    pub counters: HashMap<Resource, i64>,
    pub states: HashMap<Resource, State>,
    /// Resource and id of each row of `item`, and its token.
    pub items: HashMap<(Resource, i64), i64>,
    /// T_max of the ledger, by resource.
    pub ledger: HashMap<Resource, i64>,
    /// Position of the token sequence.
    pub position: i64,
    pub blows: Vec<Blow>,
    /// When something was being done to the servers or to a backend, after which a queue may be in another order or be
    /// served late.
    pub disturbed: Vec<(Micros, Micros)>,
    /// When the clients were told to end.
    pub over: Micros,
    /// How long nothing is granted after a lossy promotion.
    pub max_ttl: Micros,
}

impl End {
    /// The rows of the log by resource and id.
    pub fn ids(&self) -> HashMap<(Resource, i64), &Row> {
        self.rows
            .iter()
            .map(|row| ((row.lease.resource, row.id), row))
            .collect()
    }
}

/// One record, as a piece of a history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    Grant(Grant),
    Renewal(Renewal),
    Release(Release),
    Write(Write),
    Refusal(Refusal),
    Sight(Sight),
    Attempt(Attempt),
    Denial(Denial),
    Break(Break),
    Look(Look),
    Row(Row),
    Blow(Blow),
    /// A fact of the end, in words.
    Fact(String),
}

impl Record {
    /// When it began; what is found in the end comes last.
    pub fn at(&self) -> Micros {
        match self {
            Self::Grant(grant) => grant.asked,
            Self::Renewal(renewal) => renewal.asked,
            Self::Release(release) => release.from,
            Self::Write(write) => write.asked,
            Self::Refusal(refusal) => refusal.asked,
            Self::Sight(sight) => sight.asked,
            Self::Attempt(attempt) => attempt.asked,
            Self::Denial(denial) => denial.asked,
            Self::Break(broken) => broken.asked,
            Self::Look(look) => look.asked,
            Self::Blow(blow) => blow.span().0,
            Self::Row(_) | Self::Fact(_) => Micros::MAX,
        }
    }
}

/// Seconds with microseconds.
struct Seconds(Micros);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06}", self.0 / 1_000_000, self.0 % 1_000_000)
    }
}

struct Of(Lease);

impl fmt::Display for Of {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} under {}", name(self.0.resource), self.0.token)
    }
}

struct Client(usize, Micros, Micros);

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (asked, answered) = (Seconds(self.1), Seconds(self.2));
        write!(f, "{asked} to {answered}: client {}", self.0)
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Grant(g) => {
                let (who, of) = (Client(g.client, g.asked, g.answered), Of(g.lease));
                let kind = if g.durable { "durable" } else { "memory" };
                write!(
                    f,
                    "{who} is granted {of} for {} s, {kind}, {:?}",
                    Seconds(g.ttl),
                    g.fate
                )?;
                match g.fate {
                    Fate::Committed => write!(f, " by {}", Seconds(g.committed)),
                    Fate::RolledBack => write!(f, ", open until {}", Seconds(g.open_until)),
                    Fate::Unknown => Ok(()),
                }
            }
            Self::Renewal(r) => {
                let (who, of) = (Client(r.client, r.asked, r.answered), Of(r.lease));
                write!(
                    f,
                    "{who} renews {of} for {} s: {}, {:?}",
                    Seconds(r.ttl),
                    r.renewed,
                    r.fate
                )
            }
            Self::Release(r) => {
                let (who, of) = (Client(r.client, r.from, r.answered), Of(r.lease));
                write!(f, "{who} releases {of}, {:?}", r.fate)
            }
            Self::Write(w) if w.id == 0 => {
                let (who, of) = (Client(w.client, w.asked, w.passed), Of(w.lease));
                write!(f, "{who} passes the fence of {of}")
            }
            Self::Write(w) => {
                let (who, of) = (Client(w.client, w.asked, w.passed), Of(w.lease));
                write!(
                    f,
                    "{who} writes {of}, number {} with id {}, {:?}",
                    w.seq, w.id, w.fate
                )?;
                match w.fate {
                    Fate::RolledBack => Ok(()),
                    _ => write!(
                        f,
                        " between {} and {}",
                        Seconds(w.commit_asked),
                        Seconds(w.answered)
                    ),
                }
            }
            Self::Refusal(r) => {
                write!(
                    f,
                    "{} is refused by {}:",
                    Client(r.client, r.asked, r.answered),
                    r.sqlstate
                )?;
                r.leases
                    .iter()
                    .try_for_each(|lease| write!(f, " {}", Of(*lease)))
            }
            Self::Sight(s) => {
                let (who, of) = (Client(s.client, s.asked, s.answered), Of(s.lease));
                write!(f, "{who} sees of {of} {} writes", s.seq)
            }
            Self::Attempt(a) => a.fmt(f),
            Self::Denial(d) => {
                let (who, of) = (Client(d.client, d.asked, d.answered), Of(d.lease));
                write!(f, "{who} is told that {of} cannot be released")
            }
            Self::Break(b) => b.fmt(f),
            Self::Look(look) => {
                let (asked, answered) = (Seconds(look.asked), Seconds(look.answered));
                let resource = name(look.resource);
                write!(
                    f,
                    "{asked} to {answered}: for {resource} wait, in this order: {:?}",
                    look.pids
                )
            }
            Self::Row(row) => {
                let shape = row.shape.word();
                write!(
                    f,
                    "in the end: {}, number {}, {shape} with id {}",
                    Of(row.lease),
                    row.seq,
                    row.id
                )
            }
            Self::Blow(blow) => blow.fmt(f),
            Self::Fact(text) => write!(f, "in the end: {text}"),
        }
    }
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let who = Client(self.client, self.asked, self.answered);
        write!(f, "{who}, backend {}, ", self.pid)?;
        match (self.request, self.is_retry) {
            (None, _) => f.write_str("asks")?,
            (Some(request), false) => write!(f, "asks by request {request}")?,
            (Some(request), true) => write!(f, "asks again by request {request}")?,
        }
        write!(f, " for {}", name(self.resource))?;
        if self.wait > 0 {
            write!(f, " and waits {} s", Seconds(self.wait))?;
        }
        write!(f, ": {:?}", self.outcome)
    }
}

impl fmt::Display for Break {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let who = Client(self.client, self.asked, self.answered);
        let resource = name(self.resource);
        write!(
            f,
            "{who} breaks the lease of {resource}: {:?}, {:?}",
            self.said, self.fate
        )?;
        write!(f, ", not before {}", Seconds(self.from))
    }
}

impl fmt::Display for Blow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (from, until) = self.span();
        write!(f, "{} to {}: ", Seconds(from), Seconds(until))?;
        match self {
            Self::Down { start, .. } => {
                write!(f, "the server goes down, start at {}", Seconds(*start))
            }
            Self::Promotion {
                start,
                lossless,
                lost_since,
                ..
            } => {
                let regime = if *lossless { "lossless" } else { "lossy" };
                write!(f, "{regime} promotion at {}", Seconds(*start))?;
                lost_since
                    .iter()
                    .try_for_each(|at| write!(f, ", loses from {} on", Seconds(*at)))
            }
        }
    }
}

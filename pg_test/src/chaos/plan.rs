//! What is done in a run: the kind of cluster and the blows, in an order that the seed gives.

use std::fmt;

use super::rng::Rng;
use crate::cluster::Stop;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A primary without a standby.
    Alone,
    Asynchronous,
    Synchronous,
}

impl Kind {
    pub const ALL: [Self; 3] = [Self::Alone, Self::Asynchronous, Self::Synchronous];

    pub fn word(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::Asynchronous => "async",
            Self::Synchronous => "sync",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Promotion {
    /// The standby is parted from the primary first, which goes on for a while.
    pub cut: bool,
    /// Parted, the primary is killed and started again: it hands out tokens of a block that the standby has not heard of.
    pub relapse: bool,
    pub lossless: bool,
    /// How the primary is stopped; None: kill -9.
    pub by: Option<Stop>,
    /// The promoted server is killed and started again before it has granted much.
    pub struck: bool,
    /// The old primary becomes the new standby by pg_rewind, instead of a new copy.
    pub rewind: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deed {
    KillPostmaster,
    /// A stop, and a start.
    Restart(Stop),
    CrashBackend,
    KillClient,
    StopClients,
    /// pg_cancel_backend of one that waits for a lease.
    CancelWaiter,
    /// pg_terminate_backend.
    EndWaiter,
    /// SIGSTOP to the client of one that waits, for longer than a TTL.
    StopClientOfWaiter,
    /// SIGSTOP to its backend, for longer than those behind it are patient with it.
    StopWaiter,
    StepWallClock,
    Promote(Promotion),
}

impl Deed {
    /// Whether it is done to the servers, or to backends other than by what any session may ask for.
    pub fn disturbs(self) -> bool {
        !matches!(
            self,
            Self::KillClient
                | Self::StopClients
                | Self::CancelWaiter
                | Self::EndWaiter
                | Self::StopClientOfWaiter
        )
    }
}

/// How often what is done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub kills: u64,
    pub immediate: u64,
    pub fast: u64,
    pub crashes: u64,
    pub client_kills: u64,
    pub client_stops: u64,
    pub waiter_cancels: u64,
    pub waiter_ends: u64,
    pub waiter_client_stops: u64,
    pub waiter_stops: u64,
    pub promotions: u64,
    pub clock_steps: u64,
}

impl Counts {
    /// By the names that a caller sets them by.
    pub fn named(&mut self) -> [(&'static str, &mut u64); 12] {
        [
            ("KILLS", &mut self.kills),
            ("IMMEDIATE_RESTARTS", &mut self.immediate),
            ("FAST_RESTARTS", &mut self.fast),
            ("CRASHES", &mut self.crashes),
            ("CLIENT_KILLS", &mut self.client_kills),
            ("CLIENT_STOPS", &mut self.client_stops),
            ("WAITER_CANCELS", &mut self.waiter_cancels),
            ("WAITER_ENDS", &mut self.waiter_ends),
            ("WAITER_CLIENT_STOPS", &mut self.waiter_client_stops),
            ("WAITER_STOPS", &mut self.waiter_stops),
            ("PROMOTIONS", &mut self.promotions),
            ("CLOCK_STEPS", &mut self.clock_steps),
        ]
    }

    pub fn is_zero(mut self) -> bool {
        self.named().into_iter().all(|(_, count)| *count == 0)
    }

    /// What of these a run may have, so that its history stays short, and takes it off.
    pub fn take_portion(&mut self, kind: Kind) -> Self {
        let most = Self {
            kills: 10,
            immediate: 5,
            fast: 5,
            crashes: 5,
            client_kills: 10,
            client_stops: 10,
            waiter_cancels: 10,
            waiter_ends: 10,
            waiter_client_stops: 5,
            waiter_stops: 5,
            promotions: if kind == Kind::Alone { 0 } else { 5 },
            clock_steps: 5,
        };
        let (mut portion, mut most) = (Self::default(), most);
        let all = portion
            .named()
            .into_iter()
            .zip(most.named())
            .zip(self.named());
        for (((_, portion), (_, most)), (_, left)) in all {
            *portion = (*most).min(*left);
            *left -= *portion;
        }
        portion
    }
}

#[derive(Debug, Clone)]
pub struct Plan {
    pub seed: u64,
    pub kind: Kind,
    pub counts: Counts,
    pub deeds: Vec<Deed>,
    /// Acknowledged commits before each deed.
    pub commits: u64,
}

impl Plan {
    pub fn new(seed: u64, kind: Kind, counts: Counts) -> Self {
        let mut rng = Rng::part(seed, 0);
        let mut deeds = Vec::new();
        let mut times = |count: u64, deed: &mut dyn FnMut(u64) -> Deed| {
            deeds.extend((0..count).map(deed));
        };
        times(counts.kills, &mut |_| Deed::KillPostmaster);
        times(counts.immediate, &mut |_| Deed::Restart(Stop::Immediate));
        times(counts.fast, &mut |_| Deed::Restart(Stop::Fast));
        times(counts.crashes, &mut |_| Deed::CrashBackend);
        times(counts.client_kills, &mut |_| Deed::KillClient);
        times(counts.client_stops, &mut |_| Deed::StopClients);
        times(counts.waiter_cancels, &mut |_| Deed::CancelWaiter);
        times(counts.waiter_ends, &mut |_| Deed::EndWaiter);
        times(counts.waiter_client_stops, &mut |_| {
            Deed::StopClientOfWaiter
        });
        times(counts.waiter_stops, &mut |_| Deed::StopWaiter);
        times(counts.clock_steps, &mut |_| Deed::StepWallClock);
        let first = rng.below(4);
        times(counts.promotions, &mut |n| {
            Deed::Promote(promotion(kind, n + first))
        });
        shuffle(&mut deeds, &mut rng);
        Self {
            seed,
            kind,
            counts,
            deeds,
            commits: 10,
        }
    }
}

/// Every other one is cut off. Lossless is for standbys that have every grant: synchronous ones, and those that a clean stop
/// of the primary has waited for.
fn promotion(kind: Kind, number: u64) -> Promotion {
    let cut = number.is_multiple_of(2);
    let lossless = (number / 2).is_multiple_of(2);
    let by = [None, Some(Stop::Fast), Some(Stop::Immediate)][(number / 4 % 3) as usize];
    let relapse = matches!(number % 8, 0 | 6);
    let struck = matches!(number % 8, 2 | 5 | 7);
    let rewind = number.is_multiple_of(3);
    let lossless_where_possible = kind == Kind::Synchronous || !cut;
    let all_is_sent = kind == Kind::Synchronous || cut || !lossless;
    Promotion {
        cut,
        relapse,
        lossless: lossless && lossless_where_possible,
        by: if all_is_sent { by } else { Some(Stop::Fast) },
        struck,
        rewind,
    }
}

fn shuffle(deeds: &mut [Deed], rng: &mut Rng) {
    for place in (1..deeds.len()).rev() {
        deeds.swap(place, rng.below(place as u64 + 1) as usize);
    }
}

/// What repeats the run.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SEED={} KIND={}", self.seed, self.kind.word())?;
        let mut counts = self.counts;
        let named = counts.named();
        let done = named.iter().filter(|(_, count)| **count > 0);
        done.into_iter()
            .try_for_each(|(name, count)| write!(f, " {name}={count}"))
    }
}

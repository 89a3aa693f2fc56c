//! The model checker of the queue: one resource, those who wait for it, and everything that can come between
//! two of their steps. It explores every order of these steps over the real [`Queue`] and the real [`Record`].
//!
//! What it proves holds for four sessions, of which one at a time may be stopped, and any length of time.
//!
//! **Each rule is proven to be needed**: a [`Bug`] breaks one, and the same model must then find the guarantee
//! that it breaks. A model that could not find them would prove nothing.
//!
//! What a step is. A step is what happens under one hold of the entry's LWLock, and always the same three things:
//! the entry is changed, the queue is rung with the next instant at which the resource could then be had, and
//! whoever that names is woken. To be woken is never lost (a latch).
//!
//! What a session does. It looks: where it is its turn and the resource can be had, it begins a grant and leaves
//! the queue. Where not, it is in the queue, and sleeps until its alarm; or it tries for a while to end a grant that
//! is open for too long; or its time is over, and it leaves. A grant that has begun is recorded and committed, or
//! taken back at any moment. A lease is nobody's: it is released or renewed at any moment, and runs out; so whoever
//! held it last may wait like others. At any moment a session is cancelled, or killed, and leaves.
//!
//! What is fast. Whoever is awake goes on before time passes, unless his process is stopped: by that alone can he be
//! late. It is what lets a guarantee speak of how long something takes.
//!
//! Now is always the same, and a tick moves every instant one nearer, to where those that have passed cannot be
//! told apart any more. So the states are finitely many though time is not bounded.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::panic
)]

use std::collections::BTreeSet;

use leasehold_core::queue::{LOOK_AGAIN_US, PATIENCE_US, Place, Places, Queue};
use leasehold_core::record::{Begin, Grant, Lease, Micros, Record};
use stateright::{Checker, HasDiscoveries, Model, Property};

/// Sessions: one that is being granted the resource, and three that wait.
const SESSIONS: usize = 4;

/// Long after the clock was started, so that an alarm which nobody has set is long ago.
const NOW: Micros = 1 << 40;

/// Shorter than the longest sleep: nobody could sleep past the end of a lease otherwise.
const TICK: Micros = LOOK_AGAIN_US / 2;

/// TTL of a grant, the shortest that there is.
const TTL: Micros = TICK;

/// TTL of a renewal, beyond the longest sleep.
const TTL_LONG: Micros = LOOK_AGAIN_US + TICK;

/// How long nothing is granted after a start, beyond the longest sleep.
const GRACE: Micros = LOOK_AGAIN_US + TICK;

/// How long those wait who wait for a short time only.
const SHORT: Micros = TICK;

/// How long whoever is first tries to end a grant that is open for too long before he looks again.
const ENDING: Micros = TICK;

/// For less than so many ticks a resource is free while somebody waits for it who is not stopped: until one who is
/// stopped ahead of him is late enough, and somebody looks.
const TOO_LONG: u8 = ((PATIENCE_US + LOOK_AGAIN_US) / TICK) as u8;

/// A rule that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    /// The queue is not rung after a release.
    NotRungAfterRelease,
    /// Nor after a grant was taken back.
    NotRungAfterAbort,
    /// Nor when somebody leaves.
    NotRungAfterLeave,
    /// Nor after a grant, of a lease that may be over before the first looks again.
    NotRungAfterGrant,
    /// Nor after a look that passed over those who are late, and left another first.
    NotRungAfterLook,
    /// It is rung by what the record tells, though nothing is granted yet.
    GraceForgotten,
    /// The alarm is set, and nobody woken.
    NotWoken,
    /// All who wait are woken.
    AllWoken,
    /// Who leaves does not tell those ahead of him and behind him.
    LinksLeft,
    /// Who is killed does not leave.
    KilledStays,
    /// Nobody is ever passed over.
    NeverPassedOver,
    /// Who is late at all is passed over.
    NoPatience,
    /// Who comes is first.
    JoinsAtFront,
    /// Who comes takes what is free, whoever waits.
    Barges,
    /// Who looked in vain lets the lock go before he joins the queue, and sleeps by what he saw.
    JoinsLater,
    /// He joins it, and lets the lock go before he says until when he sleeps.
    SleepsLater,
    /// Who tries to end a grant that is open for too long does not look again meanwhile.
    EndsForTooLong,
    /// The end of such a grant stays the next instant, though it has passed.
    PastIsNext,
}

/// A guarantee that a step broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Broken {
    /// The resource went to somebody while another had come before, or one who was not stopped lost his place.
    Order,
    /// More than one was woken, or one who was not first.
    Herd,
    /// Somebody was woken by what can only put his turn off.
    Needless,
    /// Who looked in vain, and has nothing else to do, did not sleep.
    Restless,
}

/// Whether a session's process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Pulse {
    /// It does, and has.
    Runs,
    /// It is stopped.
    Stopped,
    /// It runs again, and has not looked since.
    Resumed,
}

/// What a session is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Phase {
    /// It does not want the resource.
    Away,
    /// It sleeps, and is awake from that instant on.
    Waits { awake_us: Micros },
    /// It has looked in vain and does not sleep yet (a bug); what it saw.
    Looked { next_us: Micros },
    /// It tries to end a grant that is open for too long, until that is gone, or until that instant.
    Ends { until_us: Micros },
    /// Its time is over.
    Leaves,
    /// Its grant has begun.
    Begun,
    /// Its grant is recorded.
    Granted,
}

/// A session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Session {
    phase: Phase,
    pulse: Pulse,
    /// Until when it waits.
    until_us: Micros,
}

/// The places of the sessions, under the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Seats([Place; SESSIONS]);

/// The resource and everyone who wants it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    record: Record,
    queue: Queue,
    seats: Seats,
    sessions: [Session; SESSIONS],
    /// Nothing is granted before.
    grace_us: Micros,
    /// Who waits, in the order in which they came, as everyone who saw everything would tell it.
    line: Vec<usize>,
    /// For how many ticks the resource has been free while somebody waited who is not stopped.
    free: u8,
    broken: Option<Broken>,
}

/// How long a session waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    /// Not at all: it does not join the queue.
    Not,
    Short,
    /// For as long as it takes.
    Long,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Tick,
    /// A session wants the resource, and looks for the first time.
    Come(usize, Wait),
    /// It looks again.
    Look(usize),
    /// It goes to sleep by what it has seen (a bug).
    Settle(usize),
    /// It leaves, because its time is over.
    Leave(usize),
    Grant(usize),
    Commit(usize),
    /// It is rolled back, or drained in vain.
    Abort(usize),
    /// It is cancelled, or killed, while it waits.
    Kill(usize),
    Stop(usize),
    Resume(usize),
    Release,
    Renew,
}

/// Why an entry is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Look,
    Leave,
    Grant,
    Commit,
    Abort,
    Release,
    Renew,
}

fn owner(session: usize) -> u64 {
    session as u64 + 1
}

/// One tick nearer, and never nearer than `least_us`.
fn nearer(instant_us: &mut Micros, least_us: Micros) {
    if *instant_us != Micros::MAX {
        *instant_us = (*instant_us - TICK).max(least_us);
    }
}

impl Wait {
    fn until_us(self) -> Micros {
        match self {
            Wait::Not => NOW,
            Wait::Short => NOW + SHORT,
            Wait::Long => Micros::MAX,
        }
    }
}

impl Session {
    const AWAY: Session = Session {
        phase: Phase::Away,
        pulse: Pulse::Runs,
        until_us: Micros::MAX,
    };

    fn is_stopped(&self) -> bool {
        self.pulse == Pulse::Stopped
    }
}

impl Places for Seats {
    fn place(&mut self, number: u32) -> &mut Place {
        &mut self.0[number as usize]
    }
}

impl World {
    fn new() -> Self {
        World {
            record: Record::UNKNOWN,
            queue: Queue::EMPTY,
            seats: Seats([Place::EMPTY; SESSIONS]),
            sessions: [Session::AWAY; SESSIONS],
            grace_us: NOW,
            line: Vec::new(),
            free: 0,
            broken: None,
        }
    }

    /// Notes a guarantee that this step broke.
    fn expect(&mut self, holds: bool, broken: Broken) {
        if !holds {
            self.broken = Some(broken);
        }
    }

    fn is_free(&self) -> bool {
        self.record.grant.owner == 0 && !self.record.is_live(NOW) && self.grace_us <= NOW
    }

    /// When the resource could be had: not before anything is granted.
    fn next_us(&self) -> Micros {
        self.record.could_be_had_us(NOW).max(self.grace_us)
    }

    /// Whether the grant in progress is open for longer than its lease.
    fn is_overdue(&self) -> bool {
        self.record.grant.token != 0 && self.record.grant.deadline_us <= NOW
    }

    /// Whether a session goes on before time passes.
    fn is_awake(&self, session: &Session) -> bool {
        let goes_on = match session.phase {
            Phase::Waits { awake_us } => awake_us <= NOW,
            Phase::Ends { until_us } => until_us <= NOW || !self.is_overdue(),
            Phase::Looked { .. } | Phase::Leaves => true,
            Phase::Away | Phase::Begun | Phase::Granted => false,
        };
        goes_on && !session.is_stopped()
    }

    /// Who came first.
    fn first(&self) -> Option<&Session> {
        self.line.first().map(|first| &self.sessions[*first])
    }

    /// Who is in the queue, from the front to the back, as far as one comes.
    fn chain(&self) -> Vec<usize> {
        let first = self.queue.first().map(|first| first as usize);
        let behind = |i: &usize| {
            let behind = self.seats.0[*i].behind as usize;
            (behind < SESSIONS).then_some(behind)
        };
        std::iter::successors(first, behind)
            .take(SESSIONS + 1)
            .collect()
    }

    /// The queue and the places as if those in `line` had joined an empty one, with the alarms that they have.
    fn rebuilt(&self, line: &[usize]) -> (Queue, Seats) {
        let mut queue = Queue::EMPTY;
        let mut seats = Seats([Place::EMPTY; SESSIONS]);
        for &i in line {
            queue.join(&mut seats, i as u32);
        }
        for &i in line {
            seats.0[i].alarm_us = self.seats.0[i].alarm_us;
        }
        (queue, seats)
    }

    /// Whether in the queue are those who wait, each once and no one else, and it hangs together both ways.
    fn is_whole(&self) -> bool {
        let chain = self.chain();
        let (mut those, mut who_wait) = (chain.clone(), self.line.clone());
        those.sort_unstable();
        who_wait.sort_unstable();
        those == who_wait && self.rebuilt(&chain) == (self.queue, self.seats)
    }

    /// Time passes.
    fn tick(&mut self) {
        let runs = |i: &usize| !self.sessions[*i].is_stopped();
        self.free = if self.is_free() && self.line.iter().any(runs) {
            (self.free + 1).min(TOO_LONG)
        } else {
            0
        };
        nearer(&mut self.record.lease.deadline_us, NOW);
        nearer(&mut self.record.grant.deadline_us, NOW);
        nearer(&mut self.grace_us, NOW);
        for session in &mut self.sessions {
            nearer(&mut session.until_us, NOW);
            match &mut session.phase {
                Phase::Waits { awake_us: at }
                | Phase::Looked { next_us: at }
                | Phase::Ends { until_us: at } => nearer(at, NOW),
                Phase::Away | Phase::Leaves | Phase::Begun | Phase::Granted => {}
            }
        }
        for seat in self.seats.0.iter_mut().filter(|seat| seat.is_queued) {
            nearer(&mut seat.alarm_us, NOW - PATIENCE_US);
        }
    }

    /// Makes one state of those that differ in nothing: which session is which, how tokens count, and how leases
    /// ended that are over.
    fn normalize(&mut self) {
        let record = self.record;
        self.record = Record {
            t_max: record.t_max.min(1),
            grant: Grant {
                token: record.grant.token.min(1),
                ..record.grant
            },
            ..Record::UNKNOWN
        };
        if record.is_live(NOW) {
            self.record.lease = Lease {
                token: 1,
                deadline_us: record.lease.deadline_us,
                ..Lease::NONE
            };
        } else if record.grant == Grant::NONE {
            self.record = Record::UNKNOWN;
        }
        // one that a bug has broken is left as it is
        if self.is_whole() && self.chain() == self.line {
            self.renumber();
        }
    }

    /// Numbers the sessions: those in the queue first, in its order.
    fn renumber(&mut self) {
        let mut order = self.line.clone();
        let mut others: Vec<usize> = (0..SESSIONS).filter(|i| !order.contains(i)).collect();
        others.sort_by_key(|i| self.sessions[*i]);
        order.extend(others);
        let (sessions, seats) = (self.sessions, self.seats);
        for (new, old) in order.into_iter().enumerate() {
            self.sessions[new] = sessions[old];
            self.seats.0[new] = seats.0[old];
        }
        self.line = (0..self.line.len()).collect();
        (self.queue, self.seats) = self.rebuilt(&self.line);
        let has_grant = |s: &Session| matches!(s.phase, Phase::Begun | Phase::Granted);
        let granted = self.sessions.iter().position(has_grant);
        self.record.grant.owner = granted.map_or(0, owner);
    }
}

/// The model, with at most one bug.
struct Waiting {
    bug: Option<Bug>,
}

impl Waiting {
    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// The one place in which an entry is changed.
    fn change(&self, w: &mut World, why: Change, body: impl FnOnce(&mut World)) {
        body(w);
        let skipped = match why {
            Change::Look => Some(Bug::NotRungAfterLook),
            Change::Leave => Some(Bug::NotRungAfterLeave),
            Change::Grant | Change::Commit => Some(Bug::NotRungAfterGrant),
            Change::Abort => Some(Bug::NotRungAfterAbort),
            Change::Release => Some(Bug::NotRungAfterRelease),
            Change::Renew => None,
        };
        if skipped.is_none_or(|bug| !self.has(bug)) {
            self.ring(w, why);
        }
    }

    /// Rings the queue, and wakes whoever that names.
    fn ring(&self, w: &mut World, why: Change) {
        let next_us = if self.has(Bug::GraceForgotten) {
            w.record.could_be_had_us(NOW)
        } else {
            w.next_us()
        };
        let Some(named) = w.queue.ring(&mut w.seats, next_us) else {
            return;
        };
        let puts_off = matches!(why, Change::Commit | Change::Renew);
        w.expect(!puts_off, Broken::Needless);
        let mut woken = Vec::new();
        for (i, session) in w.sessions.iter_mut().enumerate() {
            let is_meant = i == named as usize || self.has(Bug::AllWoken);
            if let Phase::Waits { awake_us } = &mut session.phase
                && is_meant
                && *awake_us > NOW
                && !self.has(Bug::NotWoken)
            {
                *awake_us = NOW;
                woken.push(i);
            }
        }
        let first = w.line.first().copied();
        w.expect(woken.iter().all(|i| Some(*i) == first), Broken::Herd);
    }

    fn join(&self, w: &mut World, i: usize) {
        if w.seats.0[i].is_queued {
            return;
        }
        w.queue.join(&mut w.seats, i as u32);
        w.line.push(i);
        if self.has(Bug::JoinsAtFront) {
            let mut line = w.chain();
            line.rotate_right(1);
            (w.queue, w.seats) = w.rebuilt(&line);
        }
    }

    fn leave(&self, w: &mut World, i: usize) {
        let seats = w.seats;
        w.queue.leave(&mut w.seats, i as u32);
        w.line.retain(|waits| *waits != i);
        if self.has(Bug::LinksLeft) {
            let left = w.seats.0[i];
            w.seats = seats;
            w.seats.0[i] = left;
        }
    }

    /// Whether it is his turn. Who is passed over has to be late, because he was stopped, or leaves in any case.
    fn is_turn(&self, w: &mut World, i: usize) -> bool {
        let now_us = match self.bug {
            Some(Bug::NeverPassedOver) => Micros::MIN,
            Some(Bug::NoPatience) => NOW + PATIENCE_US,
            _ => NOW,
        };
        let before = w.seats;
        let is_turn = w.queue.is_turn(&mut w.seats, i as u32, now_us);
        for (passed, seat) in before.0.iter().enumerate() {
            if seat.is_queued && !w.seats.0[passed].is_queued {
                w.line.retain(|waits| *waits != passed);
                let is_late = seat.alarm_us <= NOW - PATIENCE_US;
                let Session { phase, pulse, .. } = w.sessions[passed];
                let is_missed = pulse == Pulse::Runs && phase != Phase::Leaves;
                w.expect(is_late && !is_missed, Broken::Order);
            }
        }
        is_turn || (self.has(Bug::Barges) && !w.seats.0[i].is_queued)
    }

    /// Looks at the resource. All of it under one lock, unless there is a bug.
    fn look(&self, w: &mut World, i: usize) {
        w.sessions[i].pulse = Pulse::Runs;
        let is_turn = self.is_turn(w, i) && w.grace_us <= NOW;
        if is_turn && w.record.begin(owner(i), NOW) == Begin::Begun {
            self.begin(w, i);
        } else if w.sessions[i].until_us > NOW {
            self.stay(w, i);
            let is_overdue = is_turn && w.record.want_overdue(NOW).is_some();
            if is_overdue && matches!(w.sessions[i].phase, Phase::Waits { .. }) {
                let until_us = if self.has(Bug::EndsForTooLong) {
                    Micros::MAX
                } else {
                    NOW + ENDING
                };
                w.sessions[i].phase = Phase::Ends { until_us };
            }
        } else if w.seats.0[i].is_queued {
            w.sessions[i].phase = Phase::Leaves;
        } else {
            w.sessions[i] = Session::AWAY;
        }
    }

    /// The grant has begun. None may have come before who could take it.
    fn begin(&self, w: &mut World, i: usize) {
        let mut came_before = w.line.iter().take_while(|waits| **waits != i);
        let are_stopped = came_before.all(|waits| w.sessions[*waits].is_stopped());
        w.expect(are_stopped, Broken::Order);
        self.leave(w, i);
        w.sessions[i] = Session {
            phase: Phase::Begun,
            ..Session::AWAY
        };
        w.free = 0;
    }

    /// It was in vain: stays in the queue, or joins it.
    fn stay(&self, w: &mut World, i: usize) {
        let next_us = if self.has(Bug::PastIsNext) && w.is_overdue() {
            // how long ago is not counted here
            NOW - PATIENCE_US
        } else {
            w.next_us()
        };
        if self.has(Bug::JoinsLater) {
            w.sessions[i].phase = Phase::Looked { next_us };
        } else if self.has(Bug::SleepsLater) {
            self.join(w, i);
            w.sessions[i].phase = Phase::Looked { next_us };
        } else {
            self.sleep(w, i, next_us);
        }
    }

    fn sleep(&self, w: &mut World, i: usize, next_us: Micros) {
        self.join(w, i);
        let (me, until_us) = (i as u32, w.sessions[i].until_us);
        let awake_us = w.queue.sleep(&mut w.seats, me, next_us, until_us, NOW);
        w.sessions[i].phase = Phase::Waits { awake_us };
    }

    /// The steps of one who wants the resource.
    fn want(&self, w: &mut World, action: Action, i: usize) -> bool {
        let is_awake = w.is_awake(&w.sessions[i]);
        match (action, w.sessions[i].phase) {
            (Action::Come(_, wait), Phase::Away) => w.sessions[i].until_us = wait.until_us(),
            (Action::Look(_), Phase::Waits { .. } | Phase::Ends { .. }) if is_awake => {}
            _ => return false,
        }
        self.change(w, Change::Look, |w| self.look(w, i));
        let is_restless =
            matches!(w.sessions[i].phase, Phase::Waits { awake_us } if awake_us <= NOW);
        w.expect(!is_restless, Broken::Restless);
        true
    }

    /// The steps of a grant.
    fn grant(&self, w: &mut World, action: Action, i: usize) -> bool {
        match (action, w.sessions[i].phase) {
            (Action::Grant(_), Phase::Begun) => self.change(w, Change::Grant, |w| {
                let token = w.record.t_max + 1;
                w.record.grant(owner(i), token, TTL, false, NOW);
                w.sessions[i].phase = Phase::Granted;
            }),
            (Action::Commit(_), Phase::Granted) => self.change(w, Change::Commit, |w| {
                w.record.commit(owner(i), NOW);
                w.sessions[i] = Session::AWAY;
            }),
            (Action::Abort(_), Phase::Begun | Phase::Granted) => {
                self.change(w, Change::Abort, |w| {
                    w.record.abort(owner(i));
                    w.sessions[i] = Session::AWAY;
                });
            }
            _ => return false,
        }
        true
    }

    /// What becomes of one who waits.
    fn befall(&self, w: &mut World, action: Action, i: usize) -> bool {
        let session = w.sessions[i];
        let is_queued = w.seats.0[i].is_queued;
        match (action, session.phase) {
            (Action::Kill(_), Phase::Away | Phase::Begun | Phase::Granted) => return false,
            (Action::Kill(_), _) if self.has(Bug::KilledStays) => {
                w.line.retain(|waits| *waits != i);
                w.sessions[i] = Session::AWAY;
            }
            (Action::Kill(_), _) => {
                self.change(w, Change::Leave, |w| self.leave(w, i));
                w.sessions[i] = Session::AWAY;
            }
            (Action::Leave(_), Phase::Leaves) if !session.is_stopped() => {
                self.change(w, Change::Leave, |w| self.leave(w, i));
                w.sessions[i] = Session::AWAY;
            }
            // by what it saw, and nothing of the entry is changed
            (Action::Settle(_), Phase::Looked { next_us }) => self.sleep(w, i, next_us),
            (Action::Stop(_), _) if is_queued => {
                if w.sessions.iter().any(|s| s.pulse != Pulse::Runs) {
                    return false;
                }
                w.sessions[i].pulse = Pulse::Stopped;
                // the bound is for one who is stopped, not for one after the other
                w.free = 0;
            }
            (Action::Resume(_), _) if session.is_stopped() => {
                w.sessions[i].pulse = Pulse::Resumed;
            }
            _ => return false,
        }
        true
    }

    /// The steps of no session that wants the resource.
    fn step(&self, w: &mut World, action: Action) -> bool {
        let (token, is_live) = (w.record.lease.token, w.record.is_live(NOW));
        match action {
            Action::Tick if !w.sessions.iter().any(|s| w.is_awake(s)) => w.tick(),
            Action::Release if is_live => self.change(w, Change::Release, |w| {
                w.record.release(token, NOW);
            }),
            Action::Renew if is_live => self.change(w, Change::Renew, |w| {
                w.record.renew(0, token, TTL_LONG, NOW);
            }),
            _ => return false,
        }
        true
    }
}

impl Model for Waiting {
    type State = World;
    type Action = Action;

    /// A resource that was never granted; and after a start, when nothing is granted yet, one that is free and one
    /// whose lease lives on.
    fn init_states(&self) -> Vec<World> {
        let never = World::new();
        let mut free = never.clone();
        free.grace_us = NOW + GRACE;
        let mut held = free.clone();
        held.record.t_max = 1;
        held.record.lease.token = 1;
        held.record.lease.deadline_us = NOW + TTL_LONG;
        vec![never, free, held]
    }

    fn actions(&self, w: &World, actions: &mut Vec<Action>) {
        use Action::*;
        // what comes after a guarantee was broken is of no interest
        if w.broken.is_some() || !w.is_whole() {
            return;
        }
        actions.extend([Tick, Release, Renew]);
        for i in 0..SESSIONS {
            actions.extend([Wait::Not, Wait::Short, Wait::Long].map(|wait| Come(i, wait)));
            actions.extend([Look(i), Settle(i), Leave(i), Grant(i), Commit(i), Abort(i)]);
            actions.extend([Kill(i), Stop(i), Resume(i)]);
        }
    }

    /// The state after the action; none where it can't be taken.
    fn next_state(&self, last: &World, action: Action) -> Option<World> {
        use Action::*;
        let mut w = last.clone();
        let taken = match action {
            Tick | Release | Renew => self.step(&mut w, action),
            Come(i, _) | Look(i) => self.want(&mut w, action, i),
            Grant(i) | Commit(i) | Abort(i) => self.grant(&mut w, action, i),
            Settle(i) | Leave(i) | Kill(i) | Stop(i) | Resume(i) => self.befall(&mut w, action, i),
        };
        if !taken {
            return None;
        }
        w.normalize();
        (w != *last).then_some(w)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = guarantees();
        if self.bug.is_none() {
            properties.extend(stories());
        }
        properties
    }
}

const ORDER: &str = "the resource goes to whoever came first of those who wait and are not stopped";
const WHOLE: &str = "in the queue are those who wait, and no one else";
const ALARM: &str = "the alarm of the first is not later than the next instant that he waits for";
const AWAKE: &str = "where a resource is free, the first is awake or stopped";
const ENDED: &str =
    "where a grant is open for too long, the first is at ending it, awake or stopped";
const BOUND: &str = "a resource is not free for long while somebody waits who is not stopped";
const HERD: &str = "a change wakes at most one, who is first";
const NEEDLESS: &str = "a commit or a renewal wakes nobody";
const RESTLESS: &str = "who has looked in vain sleeps, or has something else to do";

/// What always holds.
fn guarantees() -> Vec<Property<Waiting>> {
    vec![
        Property::always(ORDER, |_, w: &World| w.broken != Some(Broken::Order)),
        Property::always(WHOLE, |_, w: &World| w.is_whole()),
        Property::always(ALARM, |_, w: &World| {
            let alarm_us = w.line.first().map(|first| w.seats.0[*first].alarm_us);
            alarm_us.is_none_or(|alarm_us| alarm_us <= w.next_us())
        }),
        Property::always(AWAKE, |_, w: &World| {
            let is_awake = |first: &Session| first.is_stopped() || w.is_awake(first);
            !w.is_free() || w.first().is_none_or(is_awake)
        }),
        Property::always(ENDED, |_, w: &World| {
            let ends = |first: &Session| matches!(first.phase, Phase::Ends { .. });
            let is_at_it = |first: &Session| first.is_stopped() || w.is_awake(first) || ends(first);
            !w.is_overdue() || w.first().is_none_or(is_at_it)
        }),
        Property::always(BOUND, |_, w: &World| w.free < TOO_LONG),
        Property::always(HERD, |_, w: &World| w.broken != Some(Broken::Herd)),
        Property::always(NEEDLESS, |_, w: &World| w.broken != Some(Broken::Needless)),
        Property::always(RESTLESS, |_, w: &World| w.broken != Some(Broken::Restless)),
    ]
}

/// Until when the one at that place of the line sleeps; 0 where he does not, or nobody is there.
fn sleeps(w: &World, at: usize) -> Micros {
    match w.line.get(at).map(|i| w.sessions[*i].phase) {
        Some(Phase::Waits { awake_us }) if awake_us > NOW => awake_us,
        _ => 0,
    }
}

fn first_is(w: &World, is: fn(&Session) -> bool) -> bool {
    w.first().is_some_and(is)
}

/// What must be able to happen, or the guarantees would hold for want of trouble.
fn stories() -> Vec<Property<Waiting>> {
    vec![
        Property::sometimes("three wait while a fourth is granted", |_, w: &World| {
            w.line.len() == SESSIONS - 1 && w.record.grant.token != 0
        }),
        Property::sometimes("all wait for a lease", |_, w: &World| {
            w.line.len() == SESSIONS && w.record.is_live(NOW)
        }),
        Property::sometimes("all wait while nothing is granted yet", |_, w: &World| {
            w.line.len() == SESSIONS && w.grace_us > NOW && w.record == Record::UNKNOWN
        }),
        Property::sometimes(
            "the first sleeps until a lease is over, and the second longer",
            |_, w: &World| {
                let deadline_us = w.record.lease.deadline_us;
                sleeps(w, 0) == deadline_us && sleeps(w, 1) > deadline_us && w.record.is_live(NOW)
            },
        ),
        Property::sometimes(
            "the first is about to end a grant while the second sleeps",
            |_, w: &World| {
                let ends = |first: &Session| matches!(first.phase, Phase::Ends { .. });
                first_is(w, ends) && w.is_overdue() && sleeps(w, 1) > NOW
            },
        ),
        Property::sometimes("the first leaves what he could have", |_, w: &World| {
            w.is_free() && first_is(w, |first| first.phase == Phase::Leaves)
        }),
        Property::sometimes("one who is stopped keeps the others off", |_, w: &World| {
            w.free == TOO_LONG - 1 && first_is(w, Session::is_stopped)
        }),
        Property::sometimes("one who was stopped is passed over", |_, w: &World| {
            let is_out = |i: &usize| w.sessions[*i].is_stopped() && !w.line.contains(i);
            (0..SESSIONS).any(|i| is_out(&i)) && w.record.grant.owner != 0
        }),
        Property::sometimes("one who was stopped is not too late", |_, w: &World| {
            w.is_free() && first_is(w, |first| first.pulse == Pulse::Resumed)
        }),
    ]
}

#[test]
fn every_order_of_steps_keeps_the_queue_going() {
    let checker = Waiting { bug: None }
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

/// The model with the bug finds that the guarantee is broken.
fn assert_broken(bug: Bug, guarantee: &'static str) {
    let found = HasDiscoveries::AnyOf(BTreeSet::from([guarantee]));
    let checker = Waiting { bug: Some(bug) }
        .checker()
        .finish_when(found)
        .spawn_bfs()
        .join();
    let path = checker.assert_any_discovery(guarantee);
    println!("{bug:?} breaks {guarantee}: {:?}", path.into_actions());
}

#[test]
fn with_no_ring_after_a_release_a_wake_up_is_lost() {
    assert_broken(Bug::NotRungAfterRelease, AWAKE);
}

#[test]
fn with_no_ring_after_a_rollback_a_wake_up_is_lost() {
    assert_broken(Bug::NotRungAfterAbort, AWAKE);
}

#[test]
fn with_no_ring_when_the_first_leaves_a_wake_up_is_lost() {
    assert_broken(Bug::NotRungAfterLeave, AWAKE);
}

#[test]
fn with_no_ring_after_a_grant_the_end_of_its_lease_is_slept_through() {
    assert_broken(Bug::NotRungAfterGrant, ALARM);
    assert_broken(Bug::NotRungAfterGrant, ENDED);
    assert_broken(Bug::NotRungAfterGrant, AWAKE);
}

#[test]
fn with_no_ring_after_one_was_passed_over_a_wake_up_is_lost() {
    assert_broken(Bug::NotRungAfterLook, AWAKE);
}

#[test]
fn with_the_grace_forgotten_nobody_sleeps_through_it() {
    assert_broken(Bug::GraceForgotten, RESTLESS);
}

#[test]
fn with_an_alarm_that_wakes_nobody_a_wake_up_is_lost() {
    assert_broken(Bug::NotWoken, AWAKE);
}

#[test]
fn with_all_woken_there_is_a_herd() {
    assert_broken(Bug::AllWoken, HERD);
}

#[test]
fn with_links_left_to_one_who_left_the_queue_breaks() {
    assert_broken(Bug::LinksLeft, WHOLE);
}

#[test]
fn with_one_who_was_killed_staying_the_queue_is_wrong() {
    assert_broken(Bug::KilledStays, WHOLE);
}

#[test]
fn with_nobody_passed_over_all_wait_for_one_who_is_stopped() {
    assert_broken(Bug::NeverPassedOver, BOUND);
}

#[test]
fn with_no_patience_one_who_is_awake_loses_his_place() {
    assert_broken(Bug::NoPatience, ORDER);
}

#[test]
fn with_whoever_comes_joining_at_the_front_the_order_breaks() {
    assert_broken(Bug::JoinsAtFront, ORDER);
}

#[test]
fn with_whoever_comes_not_asking_for_his_turn_the_order_breaks() {
    assert_broken(Bug::Barges, ORDER);
}

#[test]
fn with_the_lock_let_go_before_the_join_a_wake_up_is_lost() {
    assert_broken(Bug::JoinsLater, AWAKE);
}

#[test]
fn with_the_lock_let_go_before_the_alarm_is_set_a_wake_up_is_lost() {
    assert_broken(Bug::SleepsLater, AWAKE);
    // and one who has joined and set none is late
    assert_broken(Bug::SleepsLater, ORDER);
}

#[test]
fn with_whoever_ends_a_grant_not_looking_he_loses_his_place() {
    assert_broken(Bug::EndsForTooLong, ORDER);
}

#[test]
fn with_an_alarm_in_the_past_one_who_has_just_looked_loses_his_place() {
    assert_broken(Bug::PastIsNext, ORDER);
}

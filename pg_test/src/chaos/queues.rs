//! What a queue promises: first come, first served; nobody waits longer than it asked for, nor gives up before; and a
//! resource that can be had is had by who waits for it.
//!
//! Who stood before whom is told by looks at the queues from outside: at one instant between being sent and its answer a
//! look was true. A place in a queue is lost by who does not look after it for a second, so the order is not judged while
//! something is done to the servers or to a backend.

use std::collections::{HashMap, HashSet};

use super::checker::{Fault, Index, Rule};
use super::clock::{Micros, millis};
use super::event::Resource;
use super::history::{Attempt, Fate, Grant, History, Look, Outcome, Record};

/// What a call may take beyond its wait. Drains take part of a second, and clients and backends are stopped for less than
/// two.
const ALLOWANCE: Micros = millis(10_000);
/// The same with the commit of a grant, which may have to wait for a standby to be made.
const COMMIT_ALLOWANCE: Micros = millis(30_000);
/// Nobody looks less often than every second whether it is its turn.
const FREE_FOR_LONG: Micros = millis(2000);
/// How long after something was done to a server nothing may be had of it, beyond the longest TTL.
const AFTERMATH: Micros = millis(500);
/// How long it takes for what nobody hears of to be over.
const UNHEARD: Micros = millis(5000);

pub fn faults(index: &Index) -> Vec<Fault> {
    let mut faults = Vec::new();
    for attempt in &index.history.attempts {
        faults.extend(lasted(index, attempt));
    }
    let seats = Seats::of(index.history);
    for resource in seats.resources() {
        let on = Busy::of(index, resource);
        let attempts = index.history.attempts.iter().enumerate();
        let attempts = attempts.filter(|(_, attempt)| attempt.resource == resource);
        let attempts: Vec<(usize, &Attempt)> = attempts.collect();
        for (number, attempt) in &attempts {
            faults.extend(out_of_turn(index, &seats, *number, &attempts));
            faults.extend(left_waiting(index, attempt, &on));
        }
    }
    faults
}

/// Grants to those that were seen in a queue before.
pub fn granted_in_turn(history: &History) -> usize {
    let seats = Seats::of(history);
    let granted = seats.first.keys().filter(|number| {
        let attempt = &history.attempts[**number];
        attempt.token().is_some()
    });
    granted.count()
}

/// Grants to one that are known to have had to come after the grant to another, by what was seen of their queue.
pub fn ordered(index: &Index) -> usize {
    let seats = Seats::of(index.history);
    let attempts = || index.history.attempts.iter().enumerate();
    let granted = |attempt: &Attempt| attempt.token().is_some() && !attempt.is_retry;
    let ordered = attempts().filter(|(number, other)| {
        granted(other)
            && attempts().any(|(first, waiter)| {
                waiter.resource == other.resource
                    && granted(waiter)
                    && waiter.answered > other.asked
                    && seats.before(first, *number).is_some()
                    && is_quiet(index, waiter.asked, other.answered, 0)
            })
    });
    ordered.count()
}

/// When an acquire that may have been granted unheard is over, and its lease too, at the latest.
pub fn in_doubt_until(attempt: &Attempt) -> Micros {
    attempt.answered + attempt.wait + attempt.ttl + UNHEARD
}

fn lasted(index: &Index, attempt: &Attempt) -> Option<Fault> {
    let answered = attempt.answered.min(match attempt.outcome {
        Outcome::Open => index.end.over,
        _ => Micros::MAX,
    });
    let lasted = answered - attempt.asked;
    let allowance = match attempt.outcome {
        Outcome::Lost => return None,
        Outcome::Token(_) | Outcome::Open => COMMIT_ALLOWANCE,
        Outcome::Null | Outcome::Shed | Outcome::Failed => ALLOWANCE,
    };
    let rule = if attempt.outcome == Outcome::Null && lasted < attempt.wait {
        Rule::GaveUpEarly
    } else if lasted > attempt.wait + allowance {
        Rule::WaitedTooLong
    } else {
        return None;
    };
    Some(Fault::new(rule, vec![Record::Attempt(*attempt)]))
}

/// Whether nothing was done to the servers or to a backend, nor up to so long before.
fn is_quiet(index: &Index, from: Micros, until: Micros, before: Micros) -> bool {
    let mut disturbed = index.end.disturbed.iter();
    !index.struck(from - before, until)
        && !disturbed.any(|(begun, ended)| *begun <= until && from - before <= *ended)
}

/// Which attempts were seen in which queue.
struct Seats<'a> {
    history: &'a History,
    /// The first look that an attempt was seen in.
    first: HashMap<usize, &'a Look>,
    /// The first look that shows one behind another.
    behind: HashMap<(usize, usize), &'a Look>,
}

impl<'a> Seats<'a> {
    fn of(history: &'a History) -> Self {
        let mut by_pid: HashMap<i32, Vec<usize>> = HashMap::new();
        for (number, attempt) in history.attempts.iter().enumerate() {
            by_pid.entry(attempt.pid).or_default().push(number);
        }
        let mut seats = Self {
            history,
            first: HashMap::new(),
            behind: HashMap::new(),
        };
        for look in &history.looks {
            // an attempt that went on all the while
            let seated = |pid: &i32| {
                let mut own = by_pid.get(pid)?.iter().copied();
                own.find(|number| {
                    let attempt = &history.attempts[*number];
                    attempt.resource == look.resource
                        && attempt.asked < look.asked
                        && look.answered < attempt.answered
                })
            };
            let queue: Vec<usize> = look.pids.iter().filter_map(seated).collect();
            for (place, one) in queue.iter().enumerate() {
                seats.first.entry(*one).or_insert(look);
                for other in &queue[place + 1..] {
                    seats.behind.entry((*one, *other)).or_insert(look);
                }
            }
        }
        seats
    }

    fn resources(&self) -> HashSet<Resource> {
        let attempts = self.history.attempts.iter();
        attempts.map(|attempt| attempt.resource).collect()
    }

    /// The look by which the resource can only have been granted to `other` after it had been seen that `one` waits for it, and
    /// came first.
    fn before(&self, one: usize, other: usize) -> Option<&'a Look> {
        let seen = self.first.get(&one)?;
        if seen.answered < self.history.attempts[other].asked {
            return Some(seen);
        }
        self.behind.get(&(one, other)).copied()
    }
}

/// A retry needs no turn, and which of the calls for a request was granted is not known.
fn out_of_turn(
    index: &Index,
    seats: &Seats,
    number: usize,
    attempts: &[(usize, &Attempt)],
) -> Option<Fault> {
    let waiter = &index.history.attempts[number];
    if waiter.is_retry || !seats.first.contains_key(&number) {
        return None;
    }
    let until = waiter.asked + waiter.wait;
    // its token is higher, or its time was over later
    let waits_on = |other: &Attempt, token: i64| match waiter.outcome {
        Outcome::Token(own) => token < own,
        Outcome::Null => other.answered < until && until <= waiter.answered,
        _ => false,
    };
    attempts.iter().find_map(|(other_number, other)| {
        let token = other.token().filter(|_| !other.is_retry)?;
        let look = seats.before(number, *other_number)?;
        (waits_on(other, token) && is_quiet(index, waiter.asked, other.answered, 0)).then(|| {
            let piece = vec![
                Record::Look(look.clone()),
                Record::Attempt(*waiter),
                Record::Attempt(**other),
            ];
            Fault::new(Rule::OutOfTurn, piece)
        })
    })
}

/// It was not granted what it waited for, though nobody else can have had it for long.
fn left_waiting(index: &Index, waiter: &Attempt, busy: &Busy) -> Option<Fault> {
    if waiter.outcome != Outcome::Null {
        return None;
    }
    let until = waiter.answered.min(waiter.asked + waiter.wait);
    let (from, to) = busy.gap(waiter.asked, until, FREE_FOR_LONG)?;
    is_quiet(index, waiter.asked, until, index.end.max_ttl + AFTERMATH).then(|| {
        let ms = (to - from) / millis(1);
        let fact = format!("nobody else can have had it for {ms} ms");
        let piece = vec![Record::Attempt(*waiter), Record::Fact(fact)];
        Fault::new(Rule::LeftWaiting, piece)
    })
}

/// When a resource may have been held, or held up, by anybody: spells in order that do not overlap.
struct Busy(Vec<(Micros, Micros)>);

impl Busy {
    fn of(index: &Index, resource: Resource) -> Self {
        let history = index.history;
        let grants = index.of_resource(resource).iter();
        let mut spells: Vec<(Micros, Micros)> = grants
            .map(|grant| (grant.asked, held_until(index, grant)))
            .collect();
        let writes = history
            .writes
            .iter()
            .filter(|w| w.lease.resource == resource);
        spells.extend(writes.map(|write| {
            let until = match write.fate {
                Fate::Unknown => write.commit_asked,
                _ => write.answered,
            };
            (write.began, until + UNHEARD)
        }));
        let attempts = history.attempts.iter().filter(|a| a.resource == resource);
        let in_doubt = attempts.filter(|attempt| attempt.is_in_doubt());
        spells.extend(in_doubt.map(|attempt| (attempt.asked, in_doubt_until(attempt))));
        let breaks = history.breaks.iter().filter(|b| b.resource == resource);
        spells.extend(breaks.map(|one| match one.answered {
            Micros::MAX => (one.asked, one.from + UNHEARD),
            answered => (one.asked, answered),
        }));
        spells.sort_unstable();
        let mut apart: Vec<(Micros, Micros)> = Vec::new();
        for (from, until) in spells {
            match apart.last_mut() {
                Some(last) if from <= last.1 => last.1 = last.1.max(until),
                _ => apart.push((from, until)),
            }
        }
        Self(apart)
    }

    /// A time between two instants, longer than that, in which nobody held the resource.
    fn gap(&self, from: Micros, until: Micros, longer: Micros) -> Option<(Micros, Micros)> {
        let mut free = from;
        for (begun, ended) in &self.0 {
            if *ended < free {
                continue;
            }
            if *begun >= until || begun - free > longer {
                break;
            }
            free = free.max(*ended);
        }
        let next = self.0.iter().map(|(begun, _)| *begun);
        let end = next.filter(|begun| *begun >= free).fold(until, Micros::min);
        (end - free > longer).then_some((free, end))
    }
}

/// Until when a lease, or its transaction, may hold the resource.
fn held_until(index: &Index, grant: &Grant) -> Micros {
    let history = index.history;
    let token = grant.lease.token;
    if grant.fate == Fate::RolledBack {
        return grant.committed + UNHEARD;
    }
    let known = match grant.fate {
        Fate::Committed => grant.committed + grant.ttl,
        _ => grant.answered + grant.ttl + UNHEARD,
    };
    let renewals = history.renewals.iter();
    let renewals = renewals.filter(|renewal| renewal.renewed && renewal.lease.token == token);
    let renewals = renewals.map(|renewal| renewal.answered + renewal.ttl);
    let unheard = history.unheard_renewals.iter();
    let unheard = unheard.filter(|(renewed, _)| *renewed == token);
    let unheard = unheard.map(|(_, at)| at + index.end.max_ttl + UNHEARD);
    let run_out = renewals.chain(unheard).fold(known, Micros::max);
    let releases = index.released.get(&token).map(|r| (r.fate, r.answered));
    let breaks = index.broken.get(&token).map(|b| (b.fate, b.answered));
    let ended = [releases, breaks].into_iter().flatten();
    ended
        .filter(|(fate, _)| *fate == Fate::Committed)
        .map(|(_, answered)| answered)
        .fold(run_out, Micros::min)
}

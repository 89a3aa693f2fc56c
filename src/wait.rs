//! Waiting for a resource: joining its queue, sleeping, leaving it again however the wait ends.
//!
//! A place in a queue belongs to the backend, not to a transaction: `await_lease` ends one after the other while it
//! waits. It is left by whoever has joined (`Waiting` goes out of scope, by an error too), and where the session
//! is ended, when the process ends.

use std::cell::{Cell, RefCell};

use leasehold_core::queue::Queue;

use crate::errors::{self, Answer, Refusal, code};
use crate::pg::waiters;
use crate::resources::Resource;
use crate::stats::{self, Count};
use crate::table::{Bytes, Entry};
use crate::{pg, settings, table};

thread_local! {
    /// The resource whose queue this backend is in, or was in last.
    static QUEUED: RefCell<Option<Resource>> = const { RefCell::new(None) };
}

/// A call that waits for a resource, or doesn't.
pub struct Waiting {
    resource: Resource,
    /// Until when, by the clock of leases.
    until_us: i64,
    /// By `lock_timeout`.
    timeout_us: i64,
    has_joined: bool,
    begun_us: i64,
    has_slept: Cell<bool>,
}

/// What a look at the queue says.
pub enum Stay {
    /// In the queue, until that instant at most.
    Sleep(i64),
    /// The time is over, or there was none.
    TimeIsOver,
    /// As many wait as may.
    Full {
        /// How many.
        waiters: u32,
        /// How long one more would have to wait; None where nothing is known of that.
        expected_us: Option<i64>,
    },
    /// It could not be served in time.
    TooLate {
        /// How many come before.
        ahead: u32,
        /// How long it would have to wait.
        expected_us: i64,
    },
}

impl Waiting {
    /// Of a call that waits `wait_us` from now; 0 for one that does not, `i64::MAX` for as long as it takes.
    pub fn new(resource: &Resource, wait_us: i64) -> Waiting {
        let begun_us = pg::clock::now_us();
        let timeout_us = match waiters::lock_timeout_us() {
            0 => i64::MAX,
            timeout_us => begun_us.saturating_add(timeout_us),
        };
        Waiting {
            resource: resource.clone(),
            until_us: match wait_us {
                0 => 0,
                wait_us => begun_us.saturating_add(wait_us),
            },
            timeout_us,
            has_joined: false,
            begun_us,
            has_slept: Cell::new(false),
        }
    }

    /// Whether it is allowed to wait at all.
    pub fn waits(&self) -> bool {
        self.until_us != 0
    }

    /// Until when; 0 for not at all.
    pub fn until_us(&self) -> i64 {
        self.until_us.min(self.timeout_us)
    }

    /// 55P03 once `lock_timeout` has passed.
    pub fn check_timeout(&self) -> Answer<()> {
        if self.waits() && pg::clock::now_us() >= self.timeout_us {
            return Err(timed_out(&self.resource));
        }
        Ok(())
    }

    /// Whether somebody else comes first. Under the lock of the entry.
    pub fn is_turn(&self, queue: &mut Queue, now_us: i64) -> bool {
        queue.is_empty() || queue.is_turn(&mut waiters::All, waiters::own(), now_us)
    }

    /// Before the first look: what is noted here must not be noted under a lock. `holder`: whom others would see.
    pub fn prepare(
        &mut self,
        request: Option<table::Request>,
        holder: impl FnOnce() -> Bytes<{ leasehold_core::name::HOLDER_BYTES_MAX }>,
    ) {
        if self.waits() && !self.has_joined {
            waiters::leave_at_exit();
            let now_us = pg::clock::now_us();
            waiters::introduce(pg::current_user(), request, holder(), now_us, self.until_us);
            QUEUED.set(Some(self.resource.clone()));
            self.has_joined = true;
        }
    }

    /// It has the turn, and takes it: whether it was in the queue. Under the lock of the entry.
    pub fn has_turn(&self, queue: &mut Queue) -> bool {
        self.has_joined && queue.leave(&mut waiters::All, waiters::own())
    }

    /// Not now: stays in the queue, or joins it, if there is time. `free_us`: the resource is not to be had before
    /// that instant, whatever its record says. Under the lock of the entry.
    pub fn stay(&self, entry: &mut Entry, free_us: i64, max_waiters: u32, now_us: i64) -> Stay {
        if now_us >= self.until_us {
            return Stay::TimeIsOver;
        }
        let (places, me) = (&mut waiters::All, waiters::own());
        let is_new = !waiters::read(me).is_queued();
        if is_new {
            let ahead = entry.queue.len();
            let expected_us = expected_us(entry, ahead, now_us);
            if ahead >= max_waiters {
                let is_known = entry.holds.smoothed_us() != 0;
                return Stay::Full {
                    waiters: ahead,
                    expected_us: is_known.then_some(expected_us),
                };
            }
            if expected_us > self.until_us.saturating_sub(now_us) {
                return Stay::TooLate { ahead, expected_us };
            }
            entry.queue.join(places, me);
        }
        let next_us = entry.record.could_be_had_us(now_us).max(free_us);
        Stay::Sleep(
            entry
                .queue
                .sleep(places, me, next_us, self.until_us, now_us),
        )
    }

    /// It has its turn, and waits all the same.
    pub fn drains(&self) {
        self.has_slept.set(self.waits());
    }

    /// Sleeps until that instant, or until it is woken. 55P03; raises where it is cancelled.
    pub fn sleep(&self, until_us: i64) -> Answer<()> {
        self.has_slept.set(true);
        waiters::sleep_until(until_us.min(self.timeout_us));
        self.check_timeout()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if self.has_joined {
            leave();
        }
        if self.has_slept.get() {
            let waited_us = pg::clock::now_us().saturating_sub(self.begun_us);
            stats::count(Count::Waits);
            stats::waited(waited_us);
            table::change(self.resource.key(), |entry| {
                let contention = &mut entry.contention;
                contention.waits = contention.waits.saturating_add(1);
                contention.waited_us = contention.waited_us.saturating_add(waited_us);
            });
        }
    }
}

/// How long one with so many ahead would have to wait.
fn expected_us(entry: &Entry, ahead: u32, now_us: i64) -> i64 {
    // one that is over, and is being drained, says nothing of how long that will take
    let record = &entry.record;
    let left_us = if record.is_live(now_us) || record.grant.token != 0 {
        record.could_be_had_us(now_us).saturating_sub(now_us)
    } else {
        0
    };
    let elapsed_us = entry.held_us(now_us).unwrap_or(0);
    entry.holds.expected_wait_us(ahead, elapsed_us, left_us)
}

/// Leaves the queue that this backend is in, if any. Neither raises nor allocates: the process may be ending.
pub fn leave() {
    let queued = QUEUED.with(|queued| queued.try_borrow_mut().ok().and_then(|mut q| q.take()));
    if let Some(resource) = queued {
        table::change(resource.key(), |entry| {
            entry.queue.leave(&mut waiters::All, waiters::own())
        });
    }
}

fn timed_out(resource: &Resource) -> Refusal {
    Refusal::new(
        code::LOCK_NOT_AVAILABLE,
        "canceling statement due to lock timeout",
    )
    .detail(format!(
        "It waited for the lease on resource \"{}\".",
        resource.shown()
    ))
    .hint("Wait longer with a higher lock_timeout, or bring a wait that is shorter than it.")
}

/// LH005: it is not worth waiting.
pub fn shed(resource: &Resource, stay: &Stay, wait_us: i64) -> Option<Refusal> {
    let name = resource.shown();
    let (message, detail, retry_us, or) = match *stay {
        Stay::Full {
            waiters,
            expected_us,
        } => {
            let expected = match expected_us {
                Some(us) => format!("the expected wait is {}", errors::seconds(us)),
                None => "the expected wait is not known yet, since nobody has released it so far"
                    .to_owned(),
            };
            (
                format!("too many wait for resource \"{name}\""),
                format!(
                    "{waiters} wait already, and leasehold.max_waiters is {}; {expected}.",
                    settings::max_waiters(),
                ),
                expected_us.unwrap_or(UNKNOWN_RETRY_US),
                "",
            )
        }
        Stay::TooLate { ahead, expected_us } => (
            format!("resource \"{name}\" cannot be had within the wait"),
            format!(
                "The expected wait is {}, with {ahead} waiting before, by how long it was held lately; this call brought {}.",
                errors::seconds(expected_us),
                errors::seconds(wait_us)
            ),
            expected_us,
            ", or bring a longer wait",
        ),
        Stay::Sleep(_) | Stay::TimeIsOver => return None,
    };
    let refusal = Refusal::new(code::SHED, message).detail(detail);
    Some(refusal.hint(format!(
        "Retry after {}, with some randomness{or}.",
        errors::seconds(retry_us.max(MIN_RETRY_US))
    )))
}

/// One does not come back at once.
const MIN_RETRY_US: i64 = 100_000;
/// Nor soon, where nothing is known of how long a resource is held.
const UNKNOWN_RETRY_US: i64 = 1_000_000;

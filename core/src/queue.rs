//! The queue of a resource: who waits for it, in which order, whose turn it is, and who cannot be served in
//! time.
//!
//! First come, first served. A queue is a list through the places of those who wait, one place a waiter, so it
//! needs no memory of its own; where the places are is the caller's business. All of it is changed under one
//! lock, together with the record of the resource.
//!
//! Nobody is woken to find that it is not his turn. Only the first looks at the resource, and he says at which
//! instant he will look next: his alarm. Whatever changes the record calls [`Queue::ring`], which finds out
//! whether the first would come too late by that.
//!
//! Invariants
//! - **The alarm of the first is never later than the next instant at which he could have his turn**, as long as
//!   `ring` follows every change. So no wake-up can be lost, whoever leaves when.
//! - Whoever has not looked for [`PATIENCE_US`] after his alarm (his process is stopped) is passed over: he leaves
//!   the queue, and has to join it anew.

use crate::record::Micros;

/// No place.
pub const NOBODY: u32 = u32::MAX;

/// How long a waiter may be late before he is passed over.
pub const PATIENCE_US: Micros = 1_000_000;

/// How long any waiter sleeps at most: so often somebody looks whether the first must be passed over.
pub const LOOK_AGAIN_US: Micros = 1_000_000;

/// What a waiter's place holds for the queue that he is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Place {
    /// Who came before him.
    pub ahead: u32,
    /// Who came after him.
    pub behind: u32,
    /// He is in a queue.
    pub is_queued: bool,
    /// When he looks at the resource next, at the latest.
    pub alarm_us: Micros,
}

impl Place {
    /// The place of one who does not wait.
    pub const EMPTY: Place = Place {
        ahead: NOBODY,
        behind: NOBODY,
        is_queued: false,
        alarm_us: 0,
    };
}

/// Where the places are.
pub trait Places {
    /// The place of that number.
    fn place(&mut self, number: u32) -> &mut Place;
}

/// Those who wait for one resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Queue {
    first: u32,
    last: u32,
    len: u32,
}

impl Queue {
    /// Nobody waits.
    pub const EMPTY: Queue = Queue {
        first: NOBODY,
        last: NOBODY,
        len: 0,
    };

    /// How many wait.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.first == NOBODY
    }

    /// The first.
    pub fn first(&self) -> Option<u32> {
        (self.first != NOBODY).then_some(self.first)
    }

    /// Puts a waiter at the end, who goes to sleep under the same lock. One who is in the queue already stays where
    /// he is.
    pub fn join(&mut self, places: &mut impl Places, me: u32) {
        if places.place(me).is_queued {
            return;
        }
        *places.place(me) = Place {
            ahead: self.last,
            is_queued: true,
            ..Place::EMPTY
        };
        match self.last {
            NOBODY => self.first = me,
            last => places.place(last).behind = me,
        }
        self.last = me;
        self.len = self.len.saturating_add(1);
    }

    /// Takes a waiter out, wherever he is. False where he is not in the queue.
    pub fn leave(&mut self, places: &mut impl Places, me: u32) -> bool {
        let place = *places.place(me);
        if !place.is_queued {
            return false;
        }
        match place.ahead {
            NOBODY => self.first = place.behind,
            ahead => places.place(ahead).behind = place.behind,
        }
        match place.behind {
            NOBODY => self.last = place.ahead,
            behind => places.place(behind).ahead = place.ahead,
        }
        *places.place(me) = Place::EMPTY;
        self.len = self.len.saturating_sub(1);
        true
    }

    /// Whether `me` may try to take the resource now: nobody came before him. Of those who have long not looked,
    /// nobody counts: they are taken out.
    pub fn is_turn(&mut self, places: &mut impl Places, me: u32, now_us: Micros) -> bool {
        while self.first != NOBODY && self.first != me {
            let late_us = now_us.saturating_sub(places.place(self.first).alarm_us);
            if late_us < PATIENCE_US {
                return false;
            }
            let first = self.first;
            if !self.leave(places, first) {
                return false;
            }
        }
        true
    }

    /// A waiter in the queue goes to sleep; `next_us`: when the first could have his turn, as far as it is known.
    /// Until when he sleeps, at most.
    pub fn sleep(
        &self,
        places: &mut impl Places,
        me: u32,
        next_us: Micros,
        until_us: Micros,
        now_us: Micros,
    ) -> Micros {
        let again_us = now_us.saturating_add(LOOK_AGAIN_US).min(until_us);
        let alarm_us = if self.first == me {
            again_us.min(next_us)
        } else {
            again_us
        };
        places.place(me).alarm_us = alarm_us;
        alarm_us
    }

    /// After every change: who must be woken, because he would look too late. `next_us` as above.
    pub fn ring(&self, places: &mut impl Places, next_us: Micros) -> Option<u32> {
        let first = self.first()?;
        let alarm_us = &mut places.place(first).alarm_us;
        if *alarm_us <= next_us {
            return None;
        }
        *alarm_us = next_us;
        Some(first)
    }
}

/// How long a resource is held, smoothed: what a waiter can expect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Holds {
    smoothed_us: Micros,
}

/// A new figure counts one part in so many.
const SMOOTHING: Micros = 8;

/// And as no more than so many times what was expected, or a little: one hold that was far longer must not turn those
/// away who come after it.
const OUTLIER: Micros = 4;
const LITTLE_US: Micros = 100_000;

impl Holds {
    /// Nothing is known.
    pub const UNKNOWN: Holds = Holds { smoothed_us: 0 };

    /// Notes that the resource was held so long, hand-over included where somebody waited for it.
    pub fn note(&mut self, held_us: Micros) {
        let held_us = held_us.max(1);
        self.smoothed_us = if self.smoothed_us == 0 {
            held_us
        } else {
            let most_us = self.smoothed_us.saturating_mul(OUTLIER).max(LITTLE_US);
            let difference = held_us.min(most_us).saturating_sub(self.smoothed_us);
            // at least by one, or what is rounded away is never reached
            let step = match difference.checked_div(SMOOTHING) {
                Some(0) | None => difference.signum(),
                Some(step) => step,
            };
            self.smoothed_us.saturating_add(step)
        };
    }

    /// How long a hold takes; 0 where nothing is known.
    pub fn smoothed_us(&self) -> Micros {
        self.smoothed_us
    }

    /// How long one waits with so many ahead of him, when the running lease has been held for `elapsed_us` and
    /// ends in `left_us` at the latest. 0 where nothing is known.
    ///
    /// One that is held for longer than usual is expected to go on for as long as it is over. Those ahead count for an
    /// eighth more than a hold: who is let in on the mean alone waits in vain half the time where it is close.
    pub fn expected_wait_us(&self, ahead: u32, elapsed_us: Micros, left_us: Micros) -> Micros {
        if self.smoothed_us == 0 {
            return 0;
        }
        let elapsed_us = elapsed_us.max(0);
        let running_us = self.smoothed_us.saturating_sub(elapsed_us).saturating_abs();
        let hold_us = self.smoothed_us.saturating_add(self.smoothed_us / MARGIN);
        let before_us = hold_us.saturating_mul(i64::from(ahead));
        running_us.min(left_us.max(0)).saturating_add(before_us)
    }
}

/// One part in so many is added to what those ahead are expected to take.
const MARGIN: Micros = 8;

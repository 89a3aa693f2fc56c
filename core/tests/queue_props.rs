//! Random histories of a queue against a naive model: a list of who waits, and the words of the contract read off
//! it. Checked after every step: who is in the queue, in which order, from the front and from the back, and every
//! answer. Then what each call promises by itself, whatever the queue is; when a record says that the resource
//! could be had; and what is made of how long it was held.
//!
//! What follows for those who wait, and in what order steps may come, is for `queue_model.rs`.
#![allow(
    clippy::unwrap_used,
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing
)]

use std::collections::VecDeque;

use leasehold_core::queue::{Holds, LOOK_AGAIN_US, NOBODY, PATIENCE_US, Place, Places, Queue};
use leasehold_core::record::{Begin, End, Grant, Lease, Micros, Record};
use proptest::prelude::*;
use proptest::sample::Index;

/// Places that there are.
const PLACES: u32 = 6;

/// A place that nobody of the history has: he joins to tell what the last one is.
const PROBE: u32 = PLACES;

/// Long after the clock was started, so that an alarm which nobody has set is long ago.
const START: Micros = 1 << 40;

/// What happens to the queue.
#[derive(Debug, Clone)]
enum Step {
    /// Time passes.
    Clock(Micros),
    Join(u32),
    Leave(u32),
    IsTurn(u32),
    /// One of those in the queue goes to sleep; both instants told from now.
    Sleep {
        who: Index,
        next: Micros,
        until: Micros,
    },
    Ring {
        next: Micros,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Seats(Vec<Place>);

impl Places for Seats {
    fn place(&mut self, number: u32) -> &mut Place {
        &mut self.0[number as usize]
    }
}

/// One who waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Waiter {
    number: u32,
    alarm_us: Micros,
}

/// The naive model, and the queue beside it.
#[derive(Debug, Clone)]
struct History {
    queue: Queue,
    seats: Seats,
    line: VecDeque<Waiter>,
    now: Micros,
}

impl History {
    fn new() -> Self {
        History {
            queue: Queue::EMPTY,
            seats: Seats(vec![Place::EMPTY; PLACES as usize + 1]),
            line: VecDeque::new(),
            now: START,
        }
    }

    /// Those who wait, with their alarms told from `now`.
    fn of(waiters: &[(u32, Micros)], now: Micros) -> Self {
        let mut history = History {
            now,
            ..History::new()
        };
        for (number, alarm) in waiters {
            history.join(*number);
            history.set_alarm(*number, now.saturating_add(*alarm));
        }
        history
    }

    fn set_alarm(&mut self, number: u32, alarm_us: Micros) {
        for waiter in self.line.iter_mut().filter(|w| w.number == number) {
            waiter.alarm_us = alarm_us;
            self.seats.0[number as usize].alarm_us = alarm_us;
        }
    }

    fn is_queued(&self, number: u32) -> bool {
        self.line.iter().any(|w| w.number == number)
    }

    fn step(&mut self, step: Step) -> Result<(), TestCaseError> {
        let now = self.now;
        match step {
            Step::Clock(us) => self.now += us,
            Step::Join(number) => self.join(number),
            Step::Leave(number) => {
                let left = self.queue.leave(&mut self.seats, number);
                prop_assert_eq!(left, self.is_queued(number));
                self.line.retain(|w| w.number != number);
            }
            Step::IsTurn(number) => {
                let is_turn = self.queue.is_turn(&mut self.seats, number, now);
                prop_assert_eq!(is_turn, self.want_turn(number));
            }
            Step::Sleep { who, next, until } => {
                if !self.line.is_empty() {
                    let at = who.index(self.line.len());
                    self.sleep(at, now.saturating_add(next), now.saturating_add(until))?;
                }
            }
            Step::Ring { next } => self.ring(now.saturating_add(next))?,
        }
        self.compare()
    }

    fn join(&mut self, number: u32) {
        self.queue.join(&mut self.seats, number);
        if !self.is_queued(number) {
            self.line.push_back(Waiter {
                number,
                alarm_us: Place::EMPTY.alarm_us,
            });
        }
    }

    /// Those who came before and are late go; then it is his turn if nobody did who is left.
    fn want_turn(&mut self, number: u32) -> bool {
        while let Some(first) = self.line.front() {
            if first.number == number {
                return true;
            }
            if self.now - first.alarm_us < PATIENCE_US {
                return false;
            }
            self.line.pop_front();
        }
        true
    }

    fn sleep(&mut self, at: usize, next: Micros, until: Micros) -> Result<(), TestCaseError> {
        let Waiter { number, .. } = self.line[at];
        let alarm_us = self
            .queue
            .sleep(&mut self.seats, number, next, until, self.now);
        let mut want = vec![until, self.now + LOOK_AGAIN_US];
        if at == 0 {
            want.push(next);
        }
        prop_assert_eq!(Some(alarm_us), want.into_iter().min());
        self.line[at].alarm_us = alarm_us;
        Ok(())
    }

    fn ring(&mut self, next: Micros) -> Result<(), TestCaseError> {
        let named = self.queue.ring(&mut self.seats, next);
        let late = self.line.front_mut().filter(|first| first.alarm_us > next);
        prop_assert_eq!(named, late.as_ref().map(|first| first.number));
        if let Some(first) = late {
            first.alarm_us = next;
        }
        Ok(())
    }

    /// What is true after every step.
    fn compare(&self) -> Result<(), TestCaseError> {
        let queue = &self.queue;
        prop_assert_eq!(queue.len() as usize, self.line.len());
        prop_assert_eq!(queue.is_empty(), self.line.is_empty());
        prop_assert_eq!(queue.first(), self.line.front().map(|w| w.number));
        let mut want = vec![Place::EMPTY; self.seats.0.len()];
        for (at, waiter) in self.line.iter().enumerate() {
            let number = |at: Option<usize>| {
                at.and_then(|at| self.line.get(at))
                    .map_or(NOBODY, |w| w.number)
            };
            want[waiter.number as usize] = Place {
                ahead: number(at.checked_sub(1)),
                behind: number(Some(at + 1)),
                is_queued: true,
                alarm_us: waiter.alarm_us,
            };
        }
        prop_assert_eq!(&self.seats.0, &want);
        // whoever joins next comes behind the last, and nothing is left of him
        let mut later = self.clone();
        later.queue.join(&mut later.seats, PROBE);
        let last = self.line.back().map_or(NOBODY, |w| w.number);
        prop_assert_eq!(later.seats.0[PROBE as usize].ahead, last);
        prop_assert!(later.queue.leave(&mut later.seats, PROBE));
        prop_assert_eq!(later.queue, self.queue);
        prop_assert_eq!(&later.seats, &self.seats);
        Ok(())
    }
}

/// Mostly about as long as what the queue counts with.
fn duration() -> impl Strategy<Value = Micros> {
    const QUARTER: Micros = PATIENCE_US / 4;
    prop_oneof![
        1 => 0..=2_i64,
        4 => (0..=8_i64, -1..=1_i64).prop_map(|(quarters, us)| (quarters * QUARTER + us).max(0)),
        1 => 0..=1_i64 << 50,
    ]
}

/// An instant, told from now: most often one to come.
fn instant() -> impl Strategy<Value = Micros> {
    prop_oneof![
        4 => duration(),
        1 => duration().prop_map(|us| -us),
        1 => Just(Micros::MAX),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => duration().prop_map(Step::Clock),
        5 => (0..PLACES).prop_map(Step::Join),
        2 => (0..PLACES).prop_map(Step::Leave),
        2 => (0..PLACES).prop_map(Step::IsTurn),
        5 => (any::<Index>(), instant(), instant())
            .prop_map(|(who, next, until)| Step::Sleep { who, next, until }),
        2 => instant().prop_map(|next| Step::Ring { next }),
    ]
}

/// Some of all, in any order, with their alarms told from now.
fn waiters() -> impl Strategy<Value = Vec<(u32, Micros)>> {
    let all: Vec<u32> = (0..PLACES).collect();
    let some = prop::sample::subsequence(all, 0..=PLACES as usize).prop_shuffle();
    (some, prop::collection::vec(instant(), PLACES as usize))
        .prop_map(|(some, alarms)| some.into_iter().zip(alarms).collect())
}

/// Any record whose grant, if it is recorded, has the highest token: as those are that a server has.
fn record(time: impl Strategy<Value = Micros> + Clone) -> impl Strategy<Value = Record> {
    let end = prop_oneof![
        3 => Just(End::Running),
        1 => Just(End::Released),
        1 => Just(End::Unconfirmed),
        1 => Just(End::Breaking),
        1 => Just(End::Lost),
        1 => Just(End::Reclaimed),
    ];
    let lease = (0..=2_i64, time.clone(), end).prop_map(|(token, deadline_us, end)| Lease {
        token,
        deadline_us,
        end,
        ..Lease::NONE
    });
    // of one that is not recorded, when its taker has last looked, if he must
    let attended = prop_oneof![Just(0), 1..=PATIENCE_US];
    let grant = (0..=1_u64, 0..=1_i64, time, attended).prop_map(
        |(owner, recorded, deadline_us, attended_us)| Grant {
            owner,
            token: 3 * recorded * owner as i64,
            deadline_us,
            attended_us: (1 - recorded) * owner as i64 * attended_us,
            ..Grant::NONE
        },
    );
    (1..=2_i64, lease, grant).prop_map(|(t_max, lease, grant)| Record {
        t_max: t_max.max(grant.token),
        lease,
        grant,
        ..Record::UNKNOWN
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn a_queue_is_what_its_history_says(steps in prop::collection::vec(step(), 0..60)) {
        let mut history = History::new();
        for step in steps {
            history.step(step)?;
        }
    }

    #[test]
    fn whoever_joins_comes_last_and_keeps_his_place(waiters in waiters(), who in 0..PLACES) {
        let mut history = History::of(&waiters, START);
        let before = history.clone();
        history.join(who);
        if before.is_queued(who) {
            prop_assert_eq!(history.queue, before.queue);
            prop_assert_eq!(&history.seats, &before.seats);
        } else {
            prop_assert_eq!(history.line.back().map(|w| w.number), Some(who));
        }
        history.compare()?;
    }

    #[test]
    fn all_leave_in_any_order_and_nothing_is_left(
        waiters in waiters(),
        order in Just((0..PLACES).collect::<Vec<u32>>()).prop_shuffle(),
    ) {
        let mut history = History::of(&waiters, START);
        for who in order {
            history.step(Step::Leave(who))?;
            // who has left leaves nothing to leave
            history.step(Step::Leave(who))?;
        }
        prop_assert_eq!(history.queue, Queue::EMPTY);
        prop_assert!(history.seats.0.iter().all(|place| *place == Place::EMPTY));
    }

    #[test]
    fn those_are_passed_over_who_are_late_and_before_all_who_are_not(
        waiters in waiters(),
        who in 0..PLACES,
    ) {
        let mut history = History::of(&waiters, START);
        let is_turn = history.queue.is_turn(&mut history.seats, who, START);
        let is_late = |w: &&Waiter| w.alarm_us <= START - PATIENCE_US && w.number != who;
        let late: Vec<u32> = history.line.iter().take_while(is_late).map(|w| w.number).collect();
        for Waiter { number, alarm_us } in &history.line {
            let place = history.seats.0[*number as usize];
            prop_assert_eq!(place.is_queued, !late.contains(number));
            // the others' alarms are as they were
            prop_assert_eq!(place.alarm_us, if place.is_queued { *alarm_us } else { 0 });
        }
        let left = history.line.len() - late.len();
        prop_assert_eq!(history.queue.len() as usize, left);
        prop_assert_eq!(is_turn, left == 0 || history.queue.first() == Some(who));
    }

    #[test]
    fn nobody_is_passed_over_before_his_time(
        waiters in waiters(),
        who in any::<Index>(),
        record in record(0..=4 * PATIENCE_US),
        now in 0..=4 * PATIENCE_US,
        until in duration(),
        later in 0..PATIENCE_US,
    ) {
        prop_assume!(!waiters.is_empty());
        let mut history = History::of(&waiters, now);
        let (at, until) = (who.index(waiters.len()), now + 1 + until);
        let number = history.line[at].number;
        // one who has just looked, by what any record tells, though he slept not at all
        history.sleep(at, record.could_be_had_us(now), until)?;
        for other in (0..PLACES).filter(|other| *other != number) {
            let is_turn = history.queue.is_turn(&mut history.seats, other, now + later);
            prop_assert!(history.seats.0[number as usize].is_queued);
            // nor does anyone pass by who came after him
            let came_before = waiters.iter().take(at).any(|(w, _)| *w == other);
            prop_assert!(!is_turn || came_before);
        }
    }

    #[test]
    fn a_ring_wakes_the_first_alone_and_where_he_would_be_late(
        waiters in waiters(),
        next in instant(),
    ) {
        let mut history = History::of(&waiters, START);
        let next = START.saturating_add(next);
        let before = history.clone();
        let named = history.queue.ring(&mut history.seats, next);
        let first = before.line.front();
        let late = first.filter(|w| w.alarm_us > next);
        prop_assert_eq!(named, late.map(|w| w.number));
        for (number, (place, was)) in history.seats.0.iter().zip(&before.seats.0).enumerate() {
            let is_first = first.is_some_and(|w| w.number as usize == number);
            let alarm_us = if is_first { was.alarm_us.min(next) } else { was.alarm_us };
            prop_assert_eq!(*place, Place { alarm_us, ..*was });
        }
        prop_assert_eq!(history.queue, before.queue);
        // nobody is woken twice for the same
        prop_assert_eq!(history.queue.ring(&mut history.seats, next), None);
    }

    #[test]
    fn nobody_sleeps_for_too_long_and_the_first_not_past_his_turn(
        waiters in waiters(),
        who in any::<Index>(),
        next in instant(),
        until in instant(),
    ) {
        prop_assume!(!waiters.is_empty());
        let mut history = History::of(&waiters, START);
        let (next, until) = (START.saturating_add(next), START.saturating_add(until));
        let at = who.index(waiters.len());
        let (number, before) = (history.line[at].number, history.clone());
        let alarm_us = history.queue.sleep(&mut history.seats, number, next, until, START);
        prop_assert!(alarm_us <= until && alarm_us <= START + LOOK_AGAIN_US);
        prop_assert!(at > 0 || alarm_us <= next);
        // no sooner than one of them tells him to, and nobody else does
        let told = [until, START + LOOK_AGAIN_US].contains(&alarm_us);
        prop_assert!(told || (at == 0 && alarm_us == next));
        let mut want = before.seats;
        want.0[number as usize].alarm_us = alarm_us;
        prop_assert_eq!(&history.seats, &want);
        // what he goes to sleep by does not wake him
        let named = history.queue.ring(&mut history.seats, next);
        prop_assert!(named != Some(number));
    }

    #[test]
    fn no_instant_makes_it_panic(
        waiters in waiters(),
        alarms in prop::collection::vec(any::<Micros>(), PLACES as usize),
        who in 0..PLACES,
        now: Micros,
        next: Micros,
        until: Micros,
    ) {
        let mut history = History::of(&waiters, START);
        for (number, alarm_us) in (0..PLACES).zip(alarms) {
            history.set_alarm(number, alarm_us);
        }
        history.queue.ring(&mut history.seats, next);
        history.queue.is_turn(&mut history.seats, who, now);
        history.queue.join(&mut history.seats, who);
        history.queue.sleep(&mut history.seats, who, next, until, now);
        history.queue.ring(&mut history.seats, until);
        prop_assert!(history.queue.leave(&mut history.seats, who));
    }

    #[test]
    fn a_resource_can_be_had_when_its_record_says_so_and_not_before(
        record in record(0..=9_i64),
        now in 0..=9_i64,
        then in prop_oneof![0..=9_i64, 0..=3 * PATIENCE_US],
    ) {
        let next = record.could_be_had_us(now);
        prop_assert!(next >= now, "nobody can look in the past");
        let (then, mut later) = (now + then, record);
        let begun = later.begin(2, then);
        if record.grant.owner == 0 || record.grant.token == 0 {
            prop_assert_eq!(begun == Begin::Begun, then >= next);
        } else {
            // not before the grant is gone, but it can be ended where it is open for too long
            prop_assert_eq!(begun, Begin::InProgress);
            prop_assert_eq!(later.want_overdue(then).is_some(), then >= next);
        }
    }
}

/// A new figure counts one part in so many.
const SMOOTHING: u64 = 8;

/// And as no more than so many times what was expected.
const OUTLIER: Micros = 4;
const LITTLE_US: Micros = 100_000;

/// One part in so many is added to what those ahead are expected to take.
const MARGIN: Micros = 8;

/// How long a resource is held: anything at all, and mostly what it may be.
fn held() -> impl Strategy<Value = Micros> {
    prop_oneof![
        1 => any::<Micros>(),
        1 => Just(Micros::MAX),
        2 => 0..=2_i64,
        2 => 0..=100_i64,
        4 => 0..=1_i64 << 40,
    ]
}

fn holds(figures: &[Micros]) -> Holds {
    let mut holds = Holds::UNKNOWN;
    for held_us in figures {
        holds.note(*held_us);
    }
    holds
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn the_first_figure_counts_whole(held_us in held()) {
        prop_assert_eq!(holds(&[held_us]).smoothed_us(), held_us.max(1));
    }

    #[test]
    fn what_is_smoothed_stays_within_its_figures(
        figures in prop::collection::vec(held(), 1..40),
    ) {
        let smoothed_us = holds(&figures).smoothed_us();
        let noted = || figures.iter().map(|held_us| (*held_us).max(1));
        prop_assert!(noted().min() <= Some(smoothed_us));
        prop_assert!(noted().max() >= Some(smoothed_us));
    }

    #[test]
    fn each_figure_draws_it_nearer_and_none_decides(
        figures in prop::collection::vec(held(), 1..40),
        held_us in held(),
    ) {
        let mut holds = holds(&figures);
        let before_us = holds.smoothed_us();
        holds.note(held_us);
        let after_us = holds.smoothed_us();
        // one that is far longer counts as one that is longer
        let counted_us = held_us
            .max(1)
            .min(before_us.saturating_mul(OUTLIER).max(LITTLE_US));
        let far = before_us.abs_diff(counted_us);
        let moved = before_us.abs_diff(after_us);
        prop_assert_eq!(after_us.abs_diff(counted_us), far - moved, "towards it");
        prop_assert!((far / SMOOTHING..=far.div_ceil(SMOOTHING)).contains(&moved));
    }

    #[test]
    fn what_was_before_is_forgotten(
        figures in prop::collection::vec(held(), 1..40),
        held_us in 1..=1_i64 << 40,
    ) {
        let mut holds = holds(&figures);
        let before_us = holds.smoothed_us();
        for _ in 0..24 {
            holds.note(held_us);
        }
        if held_us <= before_us.saturating_mul(OUTLIER).max(LITTLE_US) {
            // what is left of how far off it was, beside what is too little to be divided
            let far = before_us.abs_diff(held_us);
            prop_assert!(holds.smoothed_us().abs_diff(held_us) <= far / 24 + SMOOTHING);
        }
        // from the shortest and from the longest that there is, in as many as those take
        for _ in 24..400 {
            holds.note(held_us);
        }
        prop_assert!(holds.smoothed_us().abs_diff(held_us) < SMOOTHING);
    }

    #[test]
    fn one_waits_for_what_is_left_and_for_those_ahead(
        figures in prop::collection::vec(held(), 0..10),
        ahead: u32,
        elapsed_us in 0..=1_i64 << 41,
        left_us in held(),
    ) {
        let holds = holds(&figures);
        let smoothed_us = holds.smoothed_us();
        let wait_us = |ahead| holds.expected_wait_us(ahead, elapsed_us, left_us);
        let running_us = wait_us(0);
        prop_assert!((0..=left_us.max(0)).contains(&running_us));
        // what is usual is still to come, or as much again as it is over; unless the lease ends before
        let usual_us = if smoothed_us == 0 { 0 } else { (smoothed_us - elapsed_us).abs() };
        prop_assert_eq!(running_us, usual_us.min(left_us.max(0)));
        let hold_us = smoothed_us.saturating_add(smoothed_us / MARGIN);
        let whole = i128::from(running_us) + i128::from(ahead) * i128::from(hold_us);
        prop_assert_eq!(i128::from(wait_us(ahead)), whole.min(Micros::MAX.into()));
    }

    #[test]
    fn one_waits_no_shorter_for_more_ahead_for_more_left_or_for_less_elapsed(
        figures in prop::collection::vec(held(), 1..10),
        ahead: [u32; 2],
        elapsed: [u32; 2],
        left: [Micros; 2],
    ) {
        let holds = holds(&figures);
        let sorted = |mut two: [Micros; 2]| {
            two.sort_unstable();
            two
        };
        // within a usual hold
        let usual_us = holds.smoothed_us();
        let elapsed = sorted(elapsed.map(|part| Micros::from(part).min(usual_us)));
        let left = sorted(left);
        let (few, many) = (ahead[0].min(ahead[1]), ahead[0].max(ahead[1]));
        let least = holds.expected_wait_us(few, elapsed[1], left[0]);
        prop_assert!(least >= 0);
        prop_assert!(least <= holds.expected_wait_us(many, elapsed[1], left[0]));
        prop_assert!(least <= holds.expected_wait_us(few, elapsed[0], left[0]));
        prop_assert!(least <= holds.expected_wait_us(few, elapsed[1], left[1]));
    }

    #[test]
    fn where_nothing_is_known_nothing_is_expected(ahead: u32, elapsed_us in 0..=Micros::MAX, left_us: Micros) {
        prop_assert_eq!(Holds::UNKNOWN.smoothed_us(), 0);
        prop_assert_eq!(Holds::UNKNOWN.expected_wait_us(ahead, elapsed_us, left_us), 0);
    }
}

#[test]
fn the_longest_hold_with_the_most_ahead_is_no_overflow() {
    let mut holds = holds(&[Micros::MAX, Micros::MIN, Micros::MAX]);
    assert!(holds.smoothed_us() > 0);
    let extremes = [Micros::MIN, -1, 0, 1, Micros::MAX];
    for held_us in extremes {
        holds.note(held_us);
        for (elapsed_us, left_us) in extremes.into_iter().zip(extremes.into_iter().rev()) {
            let wait_us = holds.expected_wait_us(u32::MAX, elapsed_us, left_us);
            assert_eq!(wait_us, Micros::MAX);
        }
    }
}

//! Tokens only rise (G2), whatever starts, promotions and clocks do; blocks and lists keep what they
//! are given.
#![allow(
    clippy::unwrap_used,
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing
)]

use leasehold_core::token::{
    BLOCK, Block, EPOCH_2026_UNIX, EPOCH_SHIFT, LIST_MAX, SECONDS_SHIFT, SharedBlock, Start,
    TokenListError, block_from, first_after_start, parse_list,
};
use proptest::prelude::*;

/// The highest epoch that fits into a token.
const EPOCH_MAX: i64 = i64::MAX >> EPOCH_SHIFT;

/// What happens to a database.
#[derive(Debug, Clone)]
enum Step {
    /// Tokens are handed out.
    Grants(u16),
    /// Crash or shutdown, and start: the sequence is as durable as it ever was.
    Restart,
    /// A standby is promoted that received the sequence's writes up to one of them.
    Promotion { received: prop::sample::Index },
    /// pg_upgrade or a dump: the timeline starts again, the sequence is whole.
    Upgrade,
    /// The wall clock is somewhere else.
    Clock(i64),
}

/// What is durable of the tokens.
#[derive(Debug, Clone, Copy)]
struct Known {
    /// The position of the sequence, the end of a reserved block.
    position: i64,
    epoch_base: i64,
}

/// A line of servers with one database, kept as a plain list of what was ever durable.
struct Line {
    /// Each state, in order. A standby has received one of them, and all before it.
    states: Vec<Known>,
    /// The first of them that a standby must have received. Where the timeline begins at 1 with tokens
    /// known, that has the base: without it, two promotions can't be told apart there but by the
    /// seconds, which this test sets at will.
    received_min: usize,
    timeline: u32,
    unix_seconds: i64,
    block: Block,
    /// The highest token handed out by any server of the line.
    highest: i64,
}

impl Line {
    fn new(first_position: i64, unix_seconds: i64) -> Self {
        let known = Known {
            position: first_position,
            epoch_base: 0,
        };
        Self {
            states: vec![known],
            received_min: usize::from(first_position > 0),
            timeline: 1,
            unix_seconds,
            block: Block { next: 1, last: 0 },
            highest: first_position,
        }
    }

    fn known(&self) -> Known {
        *self.states.last().unwrap()
    }

    /// Reserves a block; false when tokens are used up.
    fn reserve(&mut self, start: Option<i64>) -> bool {
        let Some(block) = start.and_then(block_from) else {
            return false;
        };
        self.block = block;
        self.states.push(Known {
            position: block.last,
            ..self.known()
        });
        true
    }

    /// The first block of a server that has just started.
    fn start(&mut self, promoted: bool) -> bool {
        let known = self.known();
        let start = first_after_start(
            known.position,
            known.epoch_base,
            self.timeline,
            promoted,
            self.unix_seconds,
        );
        if let Some(Start { epoch_base, .. }) = start {
            // durable before the block, so a standby may have it without the block
            self.states.push(Known {
                epoch_base,
                ..known
            });
        }
        self.reserve(start.map(|start| start.token))
    }

    /// Hands out tokens; false when they are used up.
    fn grants(&mut self, n: u16) -> Result<bool, TestCaseError> {
        for _ in 0..n {
            if self.block.next > self.block.last
                && !self.reserve(self.known().position.checked_add(1))
            {
                return Ok(false);
            }
            let token = self.block.next;
            self.block.next += 1;
            prop_assert!(
                token > self.highest,
                "{token} after {} on timeline {}",
                self.highest,
                self.timeline
            );
            self.highest = token;
        }
        Ok(true)
    }

    /// False when tokens are used up, by epochs too.
    fn promote(&mut self, received: prop::sample::Index) -> bool {
        let received = received.index(self.states.len() - self.received_min);
        self.states.truncate(self.received_min + received + 1);
        self.timeline += 1;
        // from here on the epochs of two promotions can't be told apart
        let epochs = self.known().epoch_base + i64::from(self.timeline) - 1;
        epochs <= EPOCH_MAX && self.start(true)
    }

    /// The timeline begins again. Its standbys are new ones.
    fn upgrade(&mut self) -> bool {
        self.timeline = 1;
        self.states = vec![self.known()];
        self.received_min = 1;
        self.start(false)
    }

    /// Does a step; false when tokens are used up.
    fn step(&mut self, step: Step) -> Result<bool, TestCaseError> {
        Ok(match step {
            Step::Grants(n) => return self.grants(n),
            Step::Restart => self.start(false),
            Step::Promotion { received } => self.promote(received),
            Step::Upgrade => self.upgrade(),
            Step::Clock(unix_seconds) => {
                self.unix_seconds = unix_seconds;
                true
            }
        })
    }
}

fn clock() -> impl Strategy<Value = i64> {
    prop_oneof![
        4 => (0..200 * 365 * 86_400_i64).prop_map(|s| EPOCH_2026_UNIX - 86_400 + s),
        1 => any::<i64>(),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..3_000_u16).prop_map(Step::Grants),
        3 => Just(Step::Restart),
        3 => any::<prop::sample::Index>().prop_map(|received| Step::Promotion { received }),
        1 => Just(Step::Upgrade),
        2 => clock().prop_map(Step::Clock),
    ]
}

/// Positions a sequence may start from: none, any, and the last ones.
fn position() -> impl Strategy<Value = i64> {
    prop_oneof![
        4 => Just(0),
        1 => 0..=i64::MAX,
        1 => (0..10 * BLOCK).prop_map(|n| i64::MAX - n),
        // not at the end of an epoch: none is counted full
        1 => (0..4_i64, 0..10 * BLOCK)
            .prop_map(|(e, n)| i64::MAX - (e << EPOCH_SHIFT) - (1 << (EPOCH_SHIFT - 1)) - n),
    ]
}

fn epoch() -> impl Strategy<Value = i64> {
    prop_oneof![4 => 0..300_i64, 1 => 0..=EPOCH_MAX, 1 => EPOCH_MAX - 3..=EPOCH_MAX]
}

proptest! {
    #[test]
    fn tokens_rise_through_starts_promotions_upgrades_and_any_clock(
        first in position(),
        unix in clock(),
        steps in prop::collection::vec(step(), 0..40),
    ) {
        let mut line = Line::new(first, unix);
        if !line.start(false) {
            prop_assert_eq!(first, i64::MAX);
            return Ok(());
        }
        for step in steps {
            if !line.step(step)? {
                // only near the end of bigint, and never because of a clock
                let promotions = i64::from(line.timeline) - 1;
                let epoch = line.known().position >> EPOCH_SHIFT;
                prop_assert!(epoch + promotions >= EPOCH_MAX);
                return Ok(());
            }
        }
    }

    #[test]
    fn the_first_token_is_the_least_above_all_that_it_must_be_above(
        last_known in position(),
        epoch_base in epoch(),
        timeline in prop_oneof![0..300_u32, any::<u32>()],
        promoted: bool,
        unix in clock(),
    ) {
        // the contract in wide numbers, cut to the fields only at the end
        let (last, base) = (i128::from(last_known), i128::from(epoch_base));
        let (known, epoch_max) = (last >> EPOCH_SHIFT, i128::from(EPOCH_MAX));
        let promotions = i128::from(timeline.max(1)) - 1;
        let expected = base + promotions;
        let unknown = promoted && known > expected;
        let least = known + if unknown { promotions.max(1) } else { 0 };
        let epoch = least.max(expected).min(epoch_max);
        let seconds = (i128::from(unix) - i128::from(EPOCH_2026_UNIX))
            .clamp(0, (1 << (EPOCH_SHIFT - SECONDS_SHIFT)) - (1 << 22));
        let first = (last + 1).max((epoch << EPOCH_SHIFT) + (seconds << SECONDS_SHIFT));
        let start = Start {
            token: i64::try_from(first).unwrap_or(0),
            epoch_base: i64::try_from((epoch - promotions).max(base)).unwrap(),
        };
        let used_up = start.token == 0 || least > epoch_max || promoted && known == epoch_max;
        let want = (!used_up).then_some(start);
        let got = first_after_start(last_known, epoch_base, timeline, promoted, unix);
        prop_assert_eq!(got, want);
    }

    #[test]
    fn two_promotions_have_epochs_of_their_own_whatever_the_second_received_of_the_first(
        last_known in 0..1_i64 << 52,
        epoch_base in 0..200_i64,
        timeline in 1..300_u32,
        later in 1..300_u32,
        unix in clock(),
    ) {
        // what both received: the base, and the position from before the first block or any later one
        let start = first_after_start(last_known, epoch_base, timeline, false, unix).unwrap();
        for position in [last_known, start.token + BLOCK - 1] {
            let promoted = |promotions| {
                let timeline = timeline + promotions;
                let start = first_after_start(position, start.epoch_base, timeline, true, unix);
                start.unwrap().token >> EPOCH_SHIFT
            };
            prop_assert!(promoted(1) > start.token >> EPOCH_SHIFT);
            prop_assert!(promoted(1 + later) > promoted(1));
        }
    }

    #[test]
    fn the_base_is_found_once_and_then_stays(
        last_known in 0..1_i64 << 52,
        epoch_base in 0..200_i64,
        timeline in 1..300_u32,
        promoted: bool,
        unix in clock(),
        later in clock(),
    ) {
        let start = first_after_start(last_known, epoch_base, timeline, promoted, unix).unwrap();
        prop_assert!(start.epoch_base >= epoch_base);
        let last = start.token + BLOCK - 1;
        let again = first_after_start(last, start.epoch_base, timeline, false, later).unwrap();
        prop_assert_eq!(again.epoch_base, start.epoch_base);
        prop_assert_eq!(again.token >> EPOCH_SHIFT, start.token >> EPOCH_SHIFT);
    }

    #[test]
    fn no_start_locks_out_a_database_that_has_tokens_left(
        last_known in 0..i64::MAX,
        epoch_base: i64,
        timeline: u32,
        unix: i64,
    ) {
        let first = first_after_start(last_known, epoch_base, timeline, false, unix);
        prop_assert!(first.is_some_and(|first| first.token > last_known));
    }

    #[test]
    fn an_older_state_started_in_place_is_covered_by_the_seconds(
        (seconds, last_known) in (1..1_000_000_000_i64)
            .prop_flat_map(|s| (Just(s), 0..(s << SECONDS_SHIFT) - 1)),
        elapsed in 1..1_000_000_i64,
        epoch_base in 0..200_i64,
        promoted: bool,
        rate in 0..(1_i64 << SECONDS_SHIFT),
    ) {
        // both starts know the same, the rest of the last block included, and in between there are
        // fewer than 16,384 grants a second
        let start = |at| {
            let start = first_after_start(last_known, epoch_base, 1, promoted, EPOCH_2026_UNIX + at);
            start.unwrap().token
        };
        let highest = start(seconds) + (elapsed * rate).max(1) - 1;
        prop_assert!(start(seconds + elapsed) > highest);
    }

    #[test]
    fn a_block_is_its_tokens_in_order(start in prop_oneof![any::<i64>(), position()]) {
        let Some(block) = block_from(start) else {
            prop_assert!(start <= 0 || start == i64::MAX);
            return Ok(());
        };
        let shared = SharedBlock::none();
        shared.hand_over(1);
        shared.give(block);
        let taken: Vec<i64> = std::iter::from_fn(|| shared.take(1)).take(2048).collect();
        let count = BLOCK.min(i64::MAX - start);
        prop_assert_eq!(taken, (start..start + count).collect::<Vec<_>>());
    }

    #[test]
    fn a_list_reads_back(
        items in prop::collection::vec((1..=i64::MAX, "[ \t\n]{0,2}", "[ \t\n]{0,2}"), 0..80),
    ) {
        let text: Vec<String> = items.iter().map(|(t, a, b)| format!("{a}{t}{b}")).collect();
        let tokens: Vec<i64> = items.iter().map(|(t, ..)| *t).collect();
        match parse_list(&text.join(",")) {
            Ok(list) => prop_assert_eq!(list.as_slice(), tokens),
            Err(e) => {
                prop_assert_eq!(e, TokenListError::TooMany);
                prop_assert!(tokens.len() > LIST_MAX);
            }
        }
    }

    #[test]
    fn any_text_is_a_list_of_positive_tokens_or_an_error(
        text in prop_oneof![any::<String>(), "[0-9,+ -]{0,60}"],
    ) {
        if let Ok(list) = parse_list(&text) {
            prop_assert!(list.as_slice().len() <= LIST_MAX);
            prop_assert!(list.as_slice().iter().all(|token| *token > 0));
            let again = list.as_slice().iter().map(i64::to_string).collect::<Vec<_>>().join(",");
            prop_assert_eq!(parse_list(&again), Ok(list));
        }
    }
}

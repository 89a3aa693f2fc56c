//! Tokens: where a server's first block starts, blocks, and the list in `leasehold.token`.
//!
//! A token is an `i64` above zero:
//!
//! ```text
//!   62 ........ 45 | 44 ............ 14 | 13 .... 0
//!       epoch      |  seconds since 2026 |  16,384 grants per second
//! ```
//!
//! The parts are not kept apart: while a server runs it just counts. They only say where the first
//! block after a start begins, so that it lies above all tokens that this server cannot know of.
//!
//! **Tokens only rise (G2).** Nothing here ever answers a position at or below the last known token.
//! Where the order can no longer be told, the answer is "used up", not a guess.
//!
//! What makes a position durable, and where the last known token comes from, is not decided here.

use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

/// Tokens taken from the sequence at once. A crash skips at most this many, and at this size the
/// flush of a block is paid by so many grants that it can't be measured.
pub const BLOCK: i64 = 1024;

/// The highest token: there must be a number above each.
const TOKEN_MAX: i64 = i64::MAX - 1;

/// The epoch is what a token has above this bit. 2^53 is epoch 256, so 250 promotions fit below it.
pub const EPOCH_SHIFT: u32 = 45;

/// The seconds are what a first token has between this bit and the epoch.
pub const SECONDS_SHIFT: u32 = 14;

/// 2026-01-01T00:00:00Z in Unix seconds.
pub const EPOCH_2026_UNIX: i64 = 1_767_225_600;

/// The highest epoch that fits into a token.
const EPOCH_MAX: i64 = i64::MAX >> EPOCH_SHIFT;

/// The highest seconds that count (November 2093). From then on they stand still, and the last known
/// token and the epoch alone make tokens rise. They stop 2^22 seconds below what would fit, so that
/// a clock far in the future leaves room for 2^36 grants: tokens that count on into the next epoch
/// could meet those of a promoted standby there.
const SECONDS_MAX: i64 = (1 << (EPOCH_SHIFT - SECONDS_SHIFT)) - (1 << 22);

/// Most tokens that `leasehold.token` may list.
pub const LIST_MAX: usize = 64;

/// Where the first block after a start begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Start {
    /// The lowest token that may be handed out.
    pub token: i64,
    /// The epoch of timeline 1, to be durable before that token is handed out.
    pub epoch_base: i64,
}

/// Where the first block after a server start, a promotion or CREATE EXTENSION may start.
/// `last_known` is the highest token known to be handed out or reserved, 0 for none; `epoch_base` what
/// the last answer said in this cluster, or else the epoch of `last_known` (see [`epoch_of`]).
///
/// It is above `last_known`, and at or above the position that epoch and seconds give. The epoch is
/// `epoch_base` plus the number of promotions that the timeline counts: so promoted servers have rising
/// epochs whatever each of them received of the others' tokens. Where tokens are known of a higher
/// epoch than that (the timeline began at 1 again: a dump, pg_upgrade), the base follows them, and a
/// promotion that finds some goes above them, by as many epochs as the timeline counts: the old primary may
/// have handed out tokens that this server never received, which end with that epoch.
///
/// `None` means tokens are used up (2200H): `last_known` is the last `i64`, or a promotion found
/// `last_known` in the last epoch, where no position is above all that may be unknown. An
/// epoch too high for a token otherwise (timelines have 32 bits, epochs 18) stops at the last epoch
/// instead: the database goes on, ordered there by `last_known` and the seconds.
#[must_use]
pub fn first_after_start(
    last_known: i64,
    epoch_base: i64,
    timeline: u32,
    promoted: bool,
    unix_seconds: i64,
) -> Option<Start> {
    let last_known = last_known.max(0);
    let next = last_known.checked_add(1)?;
    let promotions = i64::from(timeline.saturating_sub(1));
    let expected = epoch_base.max(0).saturating_add(promotions);
    let known = last_known >> EPOCH_SHIFT;
    let ahead = promoted && known > expected;
    let least = known.saturating_add(if ahead { promotions.max(1) } else { 0 });
    if least > EPOCH_MAX || (promoted && known == EPOCH_MAX) {
        return None;
    }
    let epoch = least.max(expected).min(EPOCH_MAX);
    let seconds = unix_seconds
        .saturating_sub(EPOCH_2026_UNIX)
        .clamp(0, SECONDS_MAX);
    // no bit is lost or shared: both parts are clamped to their fields
    let position = (epoch << EPOCH_SHIFT) | (seconds << SECONDS_SHIFT);
    Some(Start {
        token: next.max(position),
        epoch_base: epoch.saturating_sub(promotions).max(epoch_base).max(0),
    })
}

/// The epoch of a token.
#[must_use]
pub const fn epoch_of(token: i64) -> i64 {
    token >> EPOCH_SHIFT
}

/// Tokens taken from the sequence: `next..=last`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// The first one.
    pub next: i64,
    /// The last one.
    pub last: i64,
}

/// The block that starts at `start`: [`BLOCK`] tokens, fewer at the end of `i64`, whose last number is
/// never a token. `None` when `start` is no token.
#[must_use]
pub const fn block_from(start: i64) -> Option<Block> {
    if start <= 0 || start > TOKEN_MAX {
        return None;
    }
    let last = start.saturating_add(BLOCK - 1);
    Some(Block {
        next: start,
        last: if last > TOKEN_MAX { TOKEN_MAX } else { last },
    })
}

/// A block that is handed out by many at once, without a lock. It belongs to somebody (a ledger); who asks for
/// another gets nothing.
///
/// - **No token is handed out twice.** `next` never falls, and a token is taken by moving it on from that very token.
/// - **A token is of a block that was given.** `last` is read before `next`, and a new block moves `next` before
///   `last`: so who sees the new `last` sees the new `next`, and who has read the old `last` finds a new `next` above
///   it.
/// - **A token is of who asks.** Whose the block is is read after `next`; it changes only while `last` is 0, and
///   the next block moves `next`, so a token that is taken shows that nothing changed since.
///
/// Blocks are given by one at a time, each above all before.
#[derive(Debug)]
pub struct SharedBlock {
    of: AtomicU32,
    next: AtomicI64,
    last: AtomicI64,
}

impl SharedBlock {
    /// Nobody's, and empty.
    #[must_use]
    pub const fn none() -> Self {
        Self {
            of: AtomicU32::new(0),
            next: AtomicI64::new(1),
            last: AtomicI64::new(0),
        }
    }

    /// Takes the next token, `None` when the block is used up or is not of `of`.
    pub fn take(&self, of: u32) -> Option<i64> {
        loop {
            let next = self.next_of(of)?;
            // not above `last`, which is below the last number
            let after = next.saturating_add(1);
            let taken =
                self.next
                    .compare_exchange(next, after, Ordering::AcqRel, Ordering::Acquire);
            if taken.is_ok() {
                return Some(next);
            }
        }
    }

    /// Whether `take` would give one.
    #[must_use]
    pub fn has_tokens(&self, of: u32) -> bool {
        self.next_of(of).is_some()
    }

    fn next_of(&self, of: u32) -> Option<i64> {
        let last = self.last.load(Ordering::Acquire);
        let next = self.next.load(Ordering::Acquire);
        (next <= last && self.of.load(Ordering::Acquire) == of).then_some(next)
    }

    /// Gives a block to whom it is of.
    pub fn give(&self, block: Block) {
        self.next.store(block.next, Ordering::Release);
        self.last.store(block.last, Ordering::Release);
    }

    /// Takes what is left away, and makes it somebody else's.
    pub fn hand_over(&self, of: u32) {
        self.last.store(0, Ordering::Release);
        self.of.store(of, Ordering::Release);
    }
}

/// The tokens that a session presents by `leasehold.token`, in the order given.
///
/// A fixed array, because it is read by the fence on hot paths and copied into hooks that must not
/// allocate.
#[derive(Clone, Copy)]
pub struct TokenList {
    tokens: [i64; LIST_MAX],
    len: usize,
}

impl TokenList {
    /// No token presented.
    pub const EMPTY: Self = Self {
        tokens: [0; LIST_MAX],
        len: 0,
    };

    /// The tokens.
    #[must_use]
    pub fn as_slice(&self) -> &[i64] {
        self.tokens.get(..self.len).unwrap_or_default()
    }

    /// Adds a token at the end.
    fn push(&mut self, token: i64) -> Result<(), TokenListError> {
        let slot = self.tokens.get_mut(self.len);
        *slot.ok_or(TokenListError::TooMany)? = token;
        self.len = self.len.saturating_add(1);
        Ok(())
    }
}

impl Default for TokenList {
    fn default() -> Self {
        Self::EMPTY
    }
}

impl PartialEq for TokenList {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl Eq for TokenList {}

impl fmt::Debug for TokenList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()
    }
}

/// Why a text is no list of tokens (22023). Displayed as a sentence, for the DETAIL of a SET.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenListError {
    /// The item (counted from 1) is not written in digits alone, or is missing.
    NotANumber(usize),
    /// The item (counted from 1) is zero or does not fit into a bigint.
    OutOfRange(usize),
    /// More than [`LIST_MAX`] tokens.
    TooMany,
}

impl fmt::Display for TokenListError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotANumber(item) => write!(f, "Item {item} of the list is not a whole number."),
            Self::OutOfRange(item) => write!(
                f,
                "Item {item} of the list is not between 1 and {}.",
                i64::MAX
            ),
            Self::TooMany => write!(f, "The list has more than {LIST_MAX} tokens."),
        }
    }
}

impl std::error::Error for TokenListError {}

/// Reads the setting `leasehold.token`: positive bigints with commas between them and blanks around
/// them; nothing (or blanks alone) is the empty list.
///
/// # Errors
/// [`TokenListError`] says which item is wrong. A sign is: `-1` is no token, and `+1` is a typo more
/// likely than a wish.
pub fn parse_list(text: &str) -> Result<TokenList, TokenListError> {
    let mut list = TokenList::EMPTY;
    if text.trim_matches(is_blank).is_empty() {
        return Ok(list);
    }
    for (item, part) in (1..).zip(text.split(',')) {
        list.push(parse_token(part.trim_matches(is_blank), item)?)?;
    }
    Ok(list)
}

/// One token, written in digits alone.
fn parse_token(digits: &str, item: usize) -> Result<i64, TokenListError> {
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(TokenListError::NotANumber(item));
    }
    match digits.parse() {
        Ok(token) if token > 0 => Ok(token),
        _ => Err(TokenListError::OutOfRange(item)),
    }
}

/// What PostgreSQL's own lists skip around their items.
fn is_blank(c: char) -> bool {
    c.is_ascii_whitespace()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::arithmetic_side_effects)]
mod tests {
    use super::*;

    const LAST_EPOCH: i64 = EPOCH_MAX << EPOCH_SHIFT;

    fn first(last_known: i64, timeline: u32, promoted: bool, unix: i64) -> Option<i64> {
        first_after_start(last_known, 0, timeline, promoted, unix).map(|start| start.token)
    }

    #[test]
    fn epoch_2026_is_the_first_second_of_2026() {
        // 56 years since 1970 with 14 leap days
        assert_eq!(EPOCH_2026_UNIX, (56 * 365 + 14) * 86_400);
    }

    #[test]
    fn a_new_database_starts_at_the_seconds_and_never_at_zero() {
        let start = |unix| first(0, 1, false, unix);
        assert_eq!(start(EPOCH_2026_UNIX), Some(1));
        assert_eq!(start(EPOCH_2026_UNIX + 1), Some(1 << SECONDS_SHIFT));
        assert_eq!(start(0), Some(1));
        assert_eq!(start(i64::MIN), Some(1));
        assert_eq!(first(-5, 0, false, i64::MIN), Some(1));
    }

    #[test]
    fn seconds_leave_the_epoch_room_to_count() {
        for timeline in [1, 2, 250] {
            let start = first(0, timeline, false, i64::MAX).unwrap();
            let epoch = i64::from(timeline) - 1;
            assert_eq!(start >> EPOCH_SHIFT, epoch);
            assert_eq!((start + (1 << 36) - 1) >> EPOCH_SHIFT, epoch);
        }
    }

    #[test]
    fn a_clock_set_back_does_not_set_tokens_back() {
        let last = first(0, 1, false, EPOCH_2026_UNIX + 1_000_000).unwrap();
        assert_eq!(first(last, 1, false, 0), Some(last + 1));
    }

    #[test]
    fn the_epoch_is_the_higher_of_timeline_and_last_known() {
        let at = |epoch: i64| epoch << EPOCH_SHIFT;
        assert_eq!(first(7, 4, false, 0), Some(at(3)));
        assert_eq!(first(at(9) + 7, 4, false, 0), Some(at(9) + 8));
    }

    #[test]
    fn a_promotion_starts_an_epoch_above_the_last_known() {
        let at = |epoch: i64| epoch << EPOCH_SHIFT;
        assert_eq!(first(7, 2, true, 0), Some(at(1)));
        assert_eq!(first(7, 4, true, 0), Some(at(3)));
        // a dump or pg_upgrade set the timeline back
        assert_eq!(first(at(9) + 7, 2, true, 0), Some(at(10)));
    }

    #[test]
    fn promotions_from_one_lagging_state_have_epochs_of_their_own() {
        let known = (9 << EPOCH_SHIFT) + 7;
        // the base is durable since the first block on timeline 1
        let base = first_after_start(known, 0, 1, false, 0).unwrap().epoch_base;
        let mut last = known;
        for timeline in 2..20 {
            let start = first_after_start(known, base, timeline, true, 0).unwrap();
            assert!(
                start.token >> EPOCH_SHIFT > last >> EPOCH_SHIFT,
                "{timeline}"
            );
            assert_eq!(start.epoch_base, base);
            last = start.token;
        }
        // never used there before the promotions: the timeline alone tells them apart
        let late = |timeline| {
            first_after_start(known, 0, timeline, true, 0)
                .unwrap()
                .token
        };
        assert!(late(3) >> EPOCH_SHIFT > late(2) >> EPOCH_SHIFT);
    }

    #[test]
    fn a_restart_after_a_promotion_stays_in_its_epoch() {
        let start = first_after_start((9 << EPOCH_SHIFT) + 7, 0, 2, true, 0).unwrap();
        let again = first_after_start(start.token, start.epoch_base, 2, true, 0).unwrap();
        assert_eq!(again.token, start.token + 1);
        assert_eq!(again.epoch_base, start.epoch_base);
    }

    #[test]
    fn two_hundred_and_fifty_promotions_stay_below_2_to_the_53() {
        let mut last = 0;
        for timeline in 2..=251 {
            last = first(last, timeline, true, i64::MAX).unwrap() + BLOCK;
            assert!(last < 1 << 53, "timeline {timeline}");
        }
    }

    #[test]
    fn a_timeline_too_high_for_an_epoch_stops_at_the_last_epoch() {
        assert_eq!(first(7, u32::MAX, false, 0), Some(LAST_EPOCH));
        assert_eq!(first(7, u32::MAX, true, 0), Some(LAST_EPOCH));
        let used = first(i64::MAX - 1, u32::MAX, false, i64::MAX);
        assert_eq!(used, Some(i64::MAX));
    }

    #[test]
    fn used_up_is_the_end_of_bigint_or_a_promotion_in_the_last_epoch() {
        assert_eq!(first(i64::MAX, 1, false, 0), None);
        assert_eq!(first(LAST_EPOCH, 1, true, 0), None);
        assert_eq!(first(LAST_EPOCH - 1, 1, true, 0), Some(LAST_EPOCH));
        assert_eq!(first(LAST_EPOCH, 1, false, 0), Some(LAST_EPOCH + 1));
    }

    fn shared(block: Block) -> SharedBlock {
        let shared = SharedBlock::none();
        shared.hand_over(7);
        shared.give(block);
        shared
    }

    #[test]
    fn a_block_hands_out_each_token_once() {
        let block = shared(block_from(5).unwrap());
        for token in 5..5 + BLOCK {
            assert!(block.has_tokens(7));
            assert_eq!(block.take(7), Some(token));
        }
        assert!(!block.has_tokens(7));
        assert_eq!(block.take(7), None);
        assert_eq!(block.take(7), None);
    }

    #[test]
    fn the_last_bigint_is_no_token() {
        let block = shared(block_from(i64::MAX - 2).unwrap());
        assert_eq!(block.take(7), Some(i64::MAX - 2));
        assert_eq!(block.take(7), Some(i64::MAX - 1));
        assert_eq!(block.take(7), None);
        assert_eq!(block.take(7), None);
        assert_eq!(block_from(i64::MAX), None);
    }

    #[test]
    fn a_block_is_of_one_ledger() {
        let block = shared(block_from(5).unwrap());
        assert_eq!(block.take(8), None);
        assert_eq!(block.take(7), Some(5));
        block.hand_over(8);
        assert_eq!((block.take(7), block.take(8)), (None, None));
        block.give(block_from(100).unwrap());
        assert_eq!((block.take(7), block.take(8)), (None, Some(100)));
        assert!(block.has_tokens(8) && !block.has_tokens(7));
    }

    #[test]
    fn no_block_holds_nothing() {
        assert_eq!(SharedBlock::none().take(0), None);
        assert_eq!(block_from(0), None);
        assert_eq!(block_from(-1), None);
    }

    /// Takers of two ledgers, while blocks of either are given in turn: each token goes to one taker, of the ledger
    /// that its block was given to.
    #[test]
    fn many_takers_share_a_block_that_changes_hands() {
        const ROUNDS: i64 = 3_000;
        let block = SharedBlock::none();
        let taken = std::thread::scope(|scope| {
            let takers: Vec<_> = [1, 1, 2, 2]
                .map(|of| {
                    let block = &block;
                    scope.spawn(move || {
                        let mut mine = Vec::new();
                        while block.of.load(Ordering::Acquire) != u32::MAX {
                            mine.extend(block.take(of).map(|token| (token, of)));
                        }
                        mine
                    })
                })
                .into();
            for round in 0..ROUNDS {
                let of = 1 + u32::try_from(round % 2).unwrap();
                block.hand_over(of);
                let next = 10 * round + 1;
                block.give(Block {
                    next,
                    last: next + 6,
                });
                for _ in 0..50 {
                    std::hint::spin_loop();
                }
            }
            block.hand_over(u32::MAX);
            takers
                .into_iter()
                .flat_map(|taker| taker.join().unwrap())
                .collect::<Vec<_>>()
        });
        let mut seen = std::collections::HashSet::new();
        for (token, of) in taken {
            assert!(seen.insert(token), "{token} twice");
            let (round, place) = ((token - 1) / 10, (token - 1) % 10);
            assert!(place <= 6, "{token} is of no block");
            assert_eq!(i64::from(of), 1 + round % 2, "{token} is not of {of}");
        }
        assert!(!seen.is_empty());
    }

    #[test]
    fn a_list_is_tokens_commas_and_blanks() {
        let tokens = |text| parse_list(text).map(|list| list.as_slice().to_vec());
        assert_eq!(tokens(""), Ok(vec![]));
        assert_eq!(tokens("  "), Ok(vec![]));
        assert_eq!(tokens("34"), Ok(vec![34]));
        assert_eq!(tokens(" 34 ,\t35"), Ok(vec![34, 35]));
        assert_eq!(tokens("007"), Ok(vec![7]));
        assert_eq!(tokens("9223372036854775807"), Ok(vec![i64::MAX]));
    }

    #[test]
    fn anything_else_is_no_list() {
        use TokenListError::{NotANumber, OutOfRange, TooMany};
        let wrong = |text: &str| parse_list(text).unwrap_err();
        assert_eq!(wrong("x"), NotANumber(1));
        assert_eq!(wrong("1,"), NotANumber(2));
        assert_eq!(wrong(",1"), NotANumber(1));
        assert_eq!(wrong(","), NotANumber(1));
        assert_eq!(wrong("1 2"), NotANumber(1));
        assert_eq!(wrong("1;2"), NotANumber(1));
        assert_eq!(wrong("1,-2"), NotANumber(2));
        assert_eq!(wrong("+1"), NotANumber(1));
        assert_eq!(wrong("1.0"), NotANumber(1));
        assert_eq!(wrong("0x1f"), NotANumber(1));
        assert_eq!(wrong("١"), NotANumber(1));
        assert_eq!(wrong("0"), OutOfRange(1));
        assert_eq!(wrong("1,9223372036854775808"), OutOfRange(2));
        assert_eq!(wrong(&"9".repeat(10_000)), OutOfRange(1));
        assert_eq!(wrong(&vec!["1"; LIST_MAX + 1].join(",")), TooMany);
    }

    #[test]
    fn a_full_list_fits() {
        let list = parse_list(&vec!["1"; LIST_MAX].join(",")).unwrap();
        assert_eq!(list.as_slice(), [1; LIST_MAX]);
    }

    #[test]
    fn errors_say_which_item() {
        assert_eq!(
            TokenListError::NotANumber(2).to_string(),
            "Item 2 of the list is not a whole number."
        );
        assert_eq!(
            TokenListError::OutOfRange(1).to_string(),
            "Item 1 of the list is not between 1 and 9223372036854775807."
        );
        assert_eq!(
            TokenListError::TooMany.to_string(),
            "The list has more than 64 tokens."
        );
    }
}

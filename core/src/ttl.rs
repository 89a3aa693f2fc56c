//! Durations: what an `interval` means as a TTL, and which TTLs are allowed.
//!
//! **A TTL is microseconds, above zero and at most `leasehold.max_ttl`.** Months and days count as
//! fixed lengths: a lease runs on a clock that knows no calendar and no summer time.

use std::fmt;

/// Microseconds of a day of 24 hours.
const DAY_US: i128 = 86_400_000_000;

/// Microseconds of a month of 30 days.
const MONTH_US: i128 = 2_592_000_000_000;

/// Microseconds of an `interval`: a month is 30 days, a day 24 hours.
///
/// `i128`, because the largest interval does not fit into 64 bits of microseconds. Every interval
/// fits into this, so nothing here saturates; an "infinite" one (PostgreSQL 17) is merely huge.
#[must_use]
pub fn interval_us(months: i32, days: i32, us: i64) -> i128 {
    let months_us = i128::from(months).saturating_mul(MONTH_US);
    let days_us = i128::from(days).saturating_mul(DAY_US);
    months_us.saturating_add(days_us).saturating_add(us.into())
}

/// Why a TTL is refused (22023).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TtlError {
    /// Zero or below: such a lease would be over before it is granted.
    NotPositive,
    /// Above the longest TTL allowed.
    AboveMax,
}

impl fmt::Display for TtlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotPositive => "ttl must be positive",
            Self::AboveMax => "ttl is above leasehold.max_ttl",
        })
    }
}

impl std::error::Error for TtlError {}

/// The TTL as microseconds, where it is above zero and at most `max_us`.
///
/// # Errors
/// [`TtlError`] says which bound it misses.
pub fn check(us: i128, max_us: i64) -> Result<i64, TtlError> {
    if us <= 0 {
        return Err(TtlError::NotPositive);
    }
    match i64::try_from(us) {
        Ok(us) if us <= max_us => Ok(us),
        _ => Err(TtlError::AboveMax),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn months_are_30_days_and_days_24_hours() {
        assert_eq!(interval_us(0, 0, 1), 1);
        assert_eq!(interval_us(0, 1, 0), 24 * 3_600_000_000);
        assert_eq!(interval_us(1, 0, 0), 30 * interval_us(0, 1, 0));
        assert_eq!(interval_us(1, -30, 5), 5);
    }

    #[test]
    fn the_largest_intervals_do_not_wrap() {
        let max = interval_us(i32::MAX, i32::MAX, i64::MAX);
        let min = interval_us(i32::MIN, i32::MIN, i64::MIN);
        assert_eq!(check(max, i64::MAX), Err(TtlError::AboveMax));
        assert_eq!(check(min, i64::MAX), Err(TtlError::NotPositive));
    }

    #[test]
    fn a_ttl_is_above_zero_and_at_most_the_longest() {
        assert_eq!(check(0, 10), Err(TtlError::NotPositive));
        assert_eq!(check(-1, 10), Err(TtlError::NotPositive));
        assert_eq!(check(1, 10), Ok(1));
        assert_eq!(check(10, 10), Ok(10));
        assert_eq!(check(11, 10), Err(TtlError::AboveMax));
        assert_eq!(check(i64::MAX.into(), i64::MAX), Ok(i64::MAX));
    }
}

//! How durations are counted: in buckets that each are a quarter of an octave wide or less, so a quantile is off by
//! less than a tenth.

use crate::record::Micros;

/// Octaves below this one share their buckets: up to 16 microseconds nobody cares.
const FIRST_OCTAVE: u32 = 4;

/// Buckets of an octave: two bits after the leading one.
const PER_OCTAVE_BITS: u32 = 2;

/// How many buckets there are; the last also counts what is longer than 19 hours.
pub const BUCKETS: usize = 128;

/// The bucket that counts a duration.
#[must_use]
pub fn bucket_of(us: Micros) -> usize {
    let us = u64::try_from(us).unwrap_or(0).max(1 << FIRST_OCTAVE);
    let octave = us.ilog2();
    let within = (us >> octave.saturating_sub(PER_OCTAVE_BITS)) & ((1 << PER_OCTAVE_BITS) - 1);
    let before = u64::from(octave.saturating_sub(FIRST_OCTAVE)) << PER_OCTAVE_BITS;
    usize::try_from(before.saturating_add(within))
        .unwrap_or(BUCKETS)
        .min(BUCKETS - 1)
}

/// The middle of a bucket, microseconds.
fn middle_of(bucket: usize) -> f64 {
    let bucket = u32::try_from(bucket).unwrap_or(0);
    let octave = FIRST_OCTAVE.saturating_add(bucket >> PER_OCTAVE_BITS);
    let within = f64::from(bucket & ((1 << PER_OCTAVE_BITS) - 1));
    let parts = f64::from(1 << PER_OCTAVE_BITS);
    2f64.powf(f64::from(octave)) * (1.0 + (within + 0.5) / parts)
}

/// The duration that `part` (0 to 1) of all are not above, microseconds. None where nothing was counted.
#[must_use]
pub fn quantile(counts: &[u32], part: f64) -> Option<f64> {
    let all: u64 = counts.iter().map(|count| u64::from(*count)).sum();
    if all == 0 {
        return None;
    }
    let wanted = (all as f64 * part).ceil().max(1.0);
    let mut so_far = 0f64;
    for (bucket, count) in counts.iter().enumerate() {
        so_far += f64::from(*count);
        if so_far >= wanted {
            return Some(middle_of(bucket));
        }
    }
    None
}

#[cfg(test)]
#[allow(clippy::indexing_slicing)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_near_what_it_counts() {
        for us in (16..1_000_000).step_by(7) {
            let off = middle_of(bucket_of(us)) / us as f64;
            assert!((0.88..1.13).contains(&off), "{us} counts as {off} of it");
        }
    }

    #[test]
    fn buckets_rise_and_end() {
        let buckets: Vec<usize> = (0..63).map(|bit| bucket_of(1 << bit)).collect();
        assert!(buckets.is_sorted());
        assert_eq!(bucket_of(0), 0);
        assert_eq!(bucket_of(-1), 0);
        assert_eq!(bucket_of(i64::MAX), BUCKETS - 1);
    }

    #[test]
    fn quantiles_are_those_of_what_was_counted() {
        let mut counts = [0; BUCKETS];
        assert_eq!(quantile(&counts, 0.5), None);
        for us in 1..=1000 {
            counts[bucket_of(us * 1000)] += 1;
        }
        let p50 = quantile(&counts, 0.5).unwrap_or_default();
        let p99 = quantile(&counts, 0.99).unwrap_or_default();
        assert!((450_000.0..560_000.0).contains(&p50), "{p50}");
        assert!((890_000.0..1_110_000.0).contains(&p99), "{p99}");
    }
}

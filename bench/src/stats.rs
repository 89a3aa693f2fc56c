//! Medians, ranges, and ratios of two competitors that ran in the same rounds.

/// The median of a non-empty set of figures.
pub fn median(figures: &[f64]) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 {
        sorted[middle]
    } else {
        (sorted[middle - 1] + sorted[middle]) / 2.0
    }
}

/// The lowest and the highest of a set of figures.
pub fn range(figures: &[f64]) -> (f64, f64) {
    let low = figures.iter().copied().fold(f64::INFINITY, f64::min);
    let high = figures.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (low, high)
}

/// The ratio within each round; figures of one index come from one round.
pub fn ratios(ours: &[f64], theirs: &[f64]) -> Vec<f64> {
    ours.iter()
        .zip(theirs)
        .map(|(our, their)| our / their)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_the_middle_or_the_mean_of_the_two() {
        assert_eq!(median(&[3.0]), 3.0);
        assert_eq!(median(&[9.0, 1.0, 4.0]), 4.0);
        assert_eq!(median(&[4.0, 1.0, 9.0, 2.0]), 3.0);
    }

    #[test]
    fn range_is_the_extremes() {
        assert_eq!(range(&[2.0, -1.0, 7.0]), (-1.0, 7.0));
    }

    #[test]
    fn ratio_is_taken_within_each_round() {
        assert_eq!(
            ratios(&[10.0, 100.0, 30.0], &[10.0, 50.0, 60.0]),
            [1.0, 2.0, 0.5]
        );
    }
}

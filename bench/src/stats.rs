//! Medians, ranges, the order of a round, and ratios of two competitors that ran in the same rounds.

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

/// The figure that `share` of a non-empty set do not exceed.
pub fn percentile(figures: &[f64], share: f64) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

/// The ratio within each round; figures of one index come from one round.
pub fn ratios(ours: &[f64], theirs: &[f64]) -> Vec<f64> {
    ours.iter()
        .zip(theirs)
        .map(|(our, their)| our / their)
        .collect()
}

/// The order of the competitors in a round: each round begins with another one, and every other round
/// goes backwards, so that nobody always runs after the same one.
pub fn order(round: u32, competitors: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..competitors).collect();
    order.rotate_left(round as usize / 2 % competitors);
    if round % 2 == 1 {
        order.reverse();
    }
    order
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
    fn percentile_is_a_figure_of_the_set() {
        let figures: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        assert_eq!(percentile(&figures, 0.99), 198.0);
        assert_eq!(percentile(&figures, 0.5), 100.0);
        assert_eq!(percentile(&[7.0], 0.99), 7.0);
        assert_eq!(percentile(&[7.0, 8.0], 0.0), 7.0);
    }

    #[test]
    fn order_changes_from_round_to_round() {
        assert_eq!(order(0, 3), [0, 1, 2]);
        assert_eq!(order(1, 3), [2, 1, 0]);
        assert_eq!(order(2, 3), [1, 2, 0]);
        assert_eq!(order(7, 3), [2, 1, 0]);
    }

    #[test]
    fn ratio_is_taken_within_each_round() {
        assert_eq!(
            ratios(&[10.0, 100.0, 30.0], &[10.0, 50.0, 60.0]),
            [1.0, 2.0, 0.5]
        );
    }
}

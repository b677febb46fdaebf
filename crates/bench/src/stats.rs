//! Medians, percentiles and quotients of repeated runs.

use serde::Serialize;

/// What is shown of repeated runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Summary {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

/// Median, least and greatest of the samples; none of no samples.
pub(crate) fn summary(samples: &[f64]) -> Option<Summary> {
    let sorted = sorted(samples);
    let (min, max) = (*sorted.first()?, *sorted.last()?);
    let middle = sorted.len() / 2;
    let median = if sorted.len() % 2 == 1 {
        sorted[middle]
    } else {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    };
    Some(Summary { median, min, max })
}

/// The smallest value that at least `percent` of the samples do not exceed.
pub(crate) fn percentile(sorted_samples: &[f64], percent: f64) -> f64 {
    let count = sorted_samples.len();
    if count == 0 {
        return f64::NAN;
    }
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rank between 0 and the number of samples"
    )]
    let rank = (percent / 100.0 * count as f64).ceil() as usize;
    sorted_samples[rank.clamp(1, count) - 1]
}

/// In ascending order.
pub(crate) fn sorted(samples: &[f64]) -> Vec<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Each of ours divided by the reference of the same repetition.
pub(crate) fn quotients(ours: &[f64], reference: &[f64]) -> Vec<f64> {
    ours.iter().zip(reference).map(|(a, b)| a / b).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_lies_between_the_middle_ones() {
        assert_eq!(
            summary(&[4.0, 1.0, 3.0, 2.0]),
            Some(Summary {
                median: 2.5,
                min: 1.0,
                max: 4.0
            })
        );
        assert_eq!(summary(&[7.0, 5.0, 6.0]).unwrap().median, 6.0);
        assert_eq!(summary(&[]), None);
    }

    #[test]
    fn a_percentile_is_one_of_the_samples() {
        let samples: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!(percentile(&samples, 50.0), 100.0);
        assert_eq!(percentile(&samples, 99.0), 198.0);
        assert_eq!(percentile(&samples, 100.0), 200.0);
        assert_eq!(percentile(&samples[..1], 50.0), 1.0);
    }

    #[test]
    fn runs_are_compared_with_the_reference_of_their_own_repetition() {
        assert_eq!(quotients(&[10.0, 30.0], &[20.0, 10.0]), [0.5, 3.0]);
    }
}

//! This module summarises the errors of repeated draws of random features.

use serde::Serialize;

use crate::seeds::{deviation, mean};

/// A `Spread` summarises errors over draws. They are heavy-tailed, so that a mean says little
/// without the median beside it.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Spread {
    pub(crate) mean: f64,
    /// Standard deviation; 0 for a single value.
    pub(crate) deviation: f64,
    pub(crate) median: f64,
    /// Lower and upper quartile.
    pub(crate) quartiles: (f64, f64),
    pub(crate) draws: usize,
}

impl Spread {
    /// Summarises at least one value.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        Self {
            mean: mean(&values),
            deviation: deviation(&values),
            median: quantile(&values, 0.5),
            quartiles: (quantile(&values, 0.25), quantile(&values, 0.75)),
            draws: values.len(),
        }
    }

    /// Returns the standard error of the mean.
    pub(crate) fn error(&self) -> f64 {
        self.deviation / (self.draws as f64).sqrt()
    }
}

/// Returns a quantile of sorted values, interpolated between neighbours.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let at = (sorted.len() - 1) as f64 * share;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_of_known_values() {
        let spread = Spread::of([4.0, 1.0, 2.0, 100.0, 3.0]);
        assert_eq!((spread.mean, spread.median, spread.quartiles, spread.draws), (22.0, 3.0, (2.0, 4.0), 5));
        let variance = [21.0f64, 20.0, 19.0, 18.0, 78.0].iter().map(|d| d * d).sum::<f64>() / 4.0;
        assert!((spread.deviation - variance.sqrt()).abs() < 1e-12);
        let one = Spread::of([7.0]);
        assert_eq!((one.mean, one.deviation, one.median, one.quartiles), (7.0, 0.0, 7.0, (7.0, 7.0)));
    }
}

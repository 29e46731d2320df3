//! This module summarises one number over several runs, which differ by their seeds.

/// Returns the mean.
pub(crate) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Returns the standard deviation of a sample; 0 for one value.
pub(crate) fn deviation(values: &[f64]) -> f64 {
    let mean = mean(values);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    if values.len() > 1 { (squares / (values.len() - 1) as f64).sqrt() } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_three_seeds_and_of_one() {
        let values = [1.0, 4.0, 4.0];
        assert_eq!(mean(&values), 3.0);
        assert!((deviation(&values) - 3f64.sqrt()).abs() < 1e-15);
        assert_eq!((mean(&[2.0]), deviation(&[2.0])), (2.0, 0.0));
    }
}

//! A feature map: `φ(x) = (x² + 1/4)`, elementwise. It is positive, so its logarithms go to the
//! attention.

use candle_core::{Result, Tensor};
use performer_core::{FeatureMap, Features};

/// Squares of the entries of a row, lifted from zero.
#[derive(Debug)]
pub struct Squared {
    pub dim: usize,
}

impl FeatureMap for Squared {
    fn input_dim(&self) -> usize {
        self.dim
    }

    fn feature_dim(&self) -> usize {
        self.dim
    }

    fn features(&self, x: &Tensor) -> Result<Features> {
        Ok(Features::Log((x.sqr()? + 0.25)?.log()?))
    }
}

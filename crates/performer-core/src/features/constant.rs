//! One feature that is the same for every row.

use candle_core::{Result, Tensor};

use super::{FeatureMap, Features};
use crate::ops;

/// The map `φ(x) = 1`, `F = 1`: every key has the same weight, so that attention is the mean of the
/// values, decayed where there are forget gates. It is the control that says what queries, keys and
/// features add.
#[derive(Clone, Debug)]
pub(crate) struct Constant {
    dim: usize,
}

impl Constant {
    /// `dim` is the head dimension `D`.
    pub(crate) fn new(dim: usize) -> Self {
        Self { dim }
    }
}

impl FeatureMap for Constant {
    fn input_dim(&self) -> usize {
        self.dim
    }

    fn feature_dim(&self) -> usize {
        1
    }

    fn features(&self, x: &Tensor) -> Result<Features> {
        // As a product with the row, so that queries and keys have a gradient, which is 0. (Candle
        // gives none through a product with the number 0.)
        let first = ops::narrow(x, x.rank() - 1, 0, 1)?;
        Ok(Features::Log(ops::mul(&first, &first.zeros_like()?)?))
    }
}

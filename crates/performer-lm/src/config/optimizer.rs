//! The settings of the optimiser.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// Constants of the AdamW optimiser; the learning rate is given to every step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamWConfig {
    /// Decay rates of the two moments, each in `[0, 1)`. Default `(0.9, 0.95)`, usual for language
    /// models.
    pub betas: (f64, f64),
    /// Added to the root of the second moment. Default `1e-8`.
    pub eps: f64,
    /// Decoupled weight decay of the matrices, per unit of learning rate. Default `0.1`.
    pub weight_decay: f64,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self { betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1 }
    }
}

impl AdamWConfig {
    /// Refuses constants out of range.
    ///
    /// # Errors
    /// If a constant is out of range; the message names it and what it must be.
    pub fn validate(&self) -> Result<()> {
        let (beta1, beta2) = self.betas;
        ensure!(
            (0.0..1.0).contains(&beta1) && (0.0..1.0).contains(&beta2),
            "AdamW betas ({beta1}, {beta2}) must both lie in [0, 1)"
        );
        ensure!(self.eps > 0.0 && self.eps.is_finite(), "AdamW eps {} must be positive", self.eps);
        ensure!(
            self.weight_decay >= 0.0 && self.weight_decay.is_finite(),
            "weight decay {} must be zero or positive",
            self.weight_decay
        );
        Ok(())
    }
}

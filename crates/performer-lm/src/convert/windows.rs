//! This module switches off the windows of a student that has features behind them: to measure what
//! the features do alone, and in a share of the steps of training, so that the features learn what
//! they would otherwise leave to the windows.

use std::collections::HashMap;

use anyhow::Result;
use candle_core::Tensor;

use crate::{
    config::{AttentionConfig, ModelConfig},
    model::Decoder,
};

/// Returns the configuration with the windows before features switched off, or `None` if no layer
/// has both.
pub(super) fn without_windows(config: &ModelConfig) -> Option<ModelConfig> {
    fn bare(attention: &AttentionConfig) -> Option<AttentionConfig> {
        match attention {
            AttentionConfig::Windowed { far, .. } => Some(AttentionConfig::Favor(far.clone())),
            AttentionConfig::Equipped { parts, of } => {
                Some(AttentionConfig::Equipped { parts: *parts, of: Box::new(bare(of)?) })
            }
            _ => None,
        }
    }
    config.with_each_attention(bare)
}

/// Whether windows are switched off in this step, counted from 0, if they are in this share of the
/// steps. Such steps lie as evenly as they can, and depend on nothing else, so that a training that
/// was stopped goes on with the same ones.
pub(super) fn are_dropped(step: usize, share: f64) -> bool {
    // A product such as 0.29 · 100, which is 29 but for rounding, counts as the whole number.
    let dropped = |steps: usize| (share * steps as f64 + 1e-9).floor();
    dropped(step + 1) > dropped(step)
}

/// Makes the student without its windows, for one pass of training: gradients reach the parameters
/// of `student`. `None` if it has no windows before features.
pub(super) fn bare(student: &Decoder) -> Result<Option<Decoder>> {
    let Some(config) = without_windows(student.config()) else { return Ok(None) };
    let mut tensors: HashMap<String, Tensor> = student.tensors();
    tensors.extend(student.named_parameters().into_iter().map(|(name, var)| (name, var.as_tensor().clone())));
    Ok(Some(Decoder::over_tensors(&config, &tensors, student.device())?))
}

#[cfg(test)]
mod tests {
    use super::are_dropped;

    #[test]
    fn windows_are_off_in_the_share_that_was_asked_for() {
        for percent in 0..=100 {
            let share = percent as f64 / 100.0;
            assert_eq!((0..100).filter(|&step| are_dropped(step, share)).count(), percent, "{share}");
        }
        let dropped: Vec<usize> = (0..8).filter(|&step| are_dropped(step, 0.5)).collect();
        assert_eq!(dropped, [1, 3, 5, 7]);
    }
}

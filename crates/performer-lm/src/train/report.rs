//! This module describes the result of a training run: the losses of the model, what it costs, and
//! what the run was.

use serde::{Deserialize, Serialize};

use super::{Leg, RunKey};
use crate::config::Precision;

/// A `Control` is a trained model measured with its features off, without training: with the exact
/// windows alone, or means of the values where there are none. It is measured on the validation
/// split.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Control {
    /// The attention that is left
    /// ([`ModelConfig::attention_text`](crate::config::ModelConfig::attention_text)).
    pub attention_spec: String,
    /// Validation loss, in nats per token.
    pub val_loss: f64,
    /// Perplexity, `e^val_loss`.
    pub perplexity: f64,
    /// Validation loss in bits per byte of text.
    pub bits_per_byte: f64,
}

/// A `TestLoss` is the loss of a trained model over the test split.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TestLoss {
    /// Mean cross-entropy, in nats per token.
    pub loss: f64,
    /// Perplexity, `e^loss`.
    pub perplexity: f64,
    /// Loss in bits per byte of text.
    pub bits_per_byte: f64,
    /// Loss with the features off, in nats per token; see [`Control`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub features_off: Option<f64>,
}

/// A `PositionLoss` is the mean loss of a range of positions in the window. The ranges of a report
/// follow one another, the first beginning at position 0.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PositionLoss {
    /// The position after the last one of the range.
    pub until: usize,
    /// Mean cross-entropy, in nats per token.
    pub loss: f64,
}

/// Returns the mean losses of consecutive ranges of positions, at most `ranges` of them, from the
/// loss at each position. All are equally long, except that the last may be shorter.
pub(super) fn by_range(loss_by_position: &[f64], ranges: usize) -> Vec<PositionLoss> {
    let width = loss_by_position.len().div_ceil(ranges.max(1)).max(1);
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    let parts = loss_by_position.chunks(width).enumerate();
    parts.map(|(i, part)| PositionLoss { until: i * width + part.len(), loss: mean(part) }).collect()
}

/// Returns the number of processes of reports that do not say it.
fn one() -> usize {
    1
}

/// A `Report` is the result of a run, with the stable names of `--json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// `softmax`, `favor` or `windowed`, say, or `hybrid`.
    pub attention: String,
    /// The attention with its settings
    /// ([`ModelConfig::attention_text`](crate::config::ModelConfig::attention_text)).
    pub attention_spec: String,
    /// Seed of weights, data order and features.
    pub seed: u64,
    /// Number of trained parameters.
    pub params: usize,
    /// Bytes of decoding state of one sequence of the model's context, in all layers; 0 in reports
    /// of versions that did not measure it.
    #[serde(default)]
    pub state_bytes: usize,
    /// Whether that state grows with every token.
    #[serde(default)]
    pub state_grows: bool,
    /// Validation loss, in nats per token.
    pub val_loss: f64,
    /// Perplexity, `e^val_loss`.
    pub perplexity: f64,
    /// Validation loss in bits per byte of text.
    pub bits_per_byte: f64,
    /// The model with its features off; `None` if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub features_off: Option<Control>,
    /// Losses over the test split, by which nothing was chosen; `None` if the data has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test: Option<TestLoss>,
    /// Mean loss by position on the test split, or else on the validation split, in windows of
    /// twice the context where the model's positions reach so far; empty in reports of versions
    /// that did not measure it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub loss_by_position: Vec<PositionLoss>,
    /// Seconds of training in each epoch, validation not counted.
    pub epoch_seconds: Vec<f64>,
    /// Training tokens per second of training.
    pub tokens_per_second: f64,
    /// Name of the corpus.
    pub corpus: String,
    /// Optimiser steps taken.
    pub steps: usize,
    /// Tokens trained on.
    pub tokens: u64,
    /// Worker threads on the CPU, of each process.
    pub threads: usize,
    /// Processes that trained together.
    #[serde(default = "one")]
    pub ranks: usize,
    /// Name of the device: that of a CUDA GPU, else `cpu` or `metal`.
    pub device: String,
    /// Type of activations.
    #[serde(default)]
    pub dtype: Precision,
    /// Revision of this program.
    pub revision: String,
    /// Key of the run; `None` in reports of versions that did not record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<RunKey>,
    /// The parts of the run that other revisions of this program made, or that were made on other
    /// kinds of device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier_legs: Vec<Leg>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_averaged_in_ranges() {
        let ranges = by_range(&[1.0, 3.0, 5.0, 7.0, 9.0], 2);
        assert_eq!(ranges, [PositionLoss { until: 3, loss: 3.0 }, PositionLoss { until: 5, loss: 8.0 }]);
        assert_eq!(by_range(&[1.0, 2.0], 4).iter().map(|r| r.until).collect::<Vec<_>>(), [1, 2]);
        assert!(by_range(&[], 4).is_empty());
    }
}

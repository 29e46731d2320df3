//! What a step of a run computes from its batch: the gradients, and the features that are fitted to
//! the model's queries and keys.

use std::sync::Arc;

use anyhow::Result;
use candle_core::Tensor;
use performer_core::{attention::Segment, ops, projection::derive_seed};

use super::Trainer;
use crate::{
    config::{ModelConfig, Precision, TrainingConfig},
    data::{Batches, Prepared},
    eval::check_vocabulary,
    model::Dropout,
    train::{Gradients, SharedSequence, shared::gradients},
};

/// Number of tokens, at least, whose queries and keys features are fitted to.
const FIT_TOKENS: usize = 8192;

/// Number of sequences that a fit reads at once: their keys and queries are all in memory together.
const FIT_ROWS: usize = 16;

/// The stream of the seed from which dropout draws.
const DROPOUT_STREAM: u64 = 3;

impl Trainer<'_> {
    /// Names the settings that decide how much memory a step needs.
    pub(super) fn memory_settings(&self) -> String {
        let (t, model) = (&self.training, self.model.config());
        let bf16 = if t.dtype == Precision::F32 { ", or compute in bf16" } else { "" };
        format!("the micro-batch (it is {}) or the context (it is {}){bf16}", t.micro_batch, model.context)
    }

    /// Computes the gradients of a step's micro-batches side by side, and adds them in order. This
    /// rank reads and computes its share of them, and its segment of their sequences, if these are
    /// cut; then one after the other, as the ranks that share a sequence wait for each other.
    pub(super) fn batch_gradients(&self, step: usize) -> Result<(f64, Gradients)> {
        let (context, dropout) = (self.model.config().context, self.model.config().dropout);
        let rows = self.training.batch_size;
        let micro = self.training.micro_batch.min(rows);
        let count = rows.div_ceil(micro);
        let own = self.options.ranks.share(count);
        let (epoch, index) = self.batches.position(step as u64);
        let of_own = (own.start * micro).min(rows)..(own.end * micro).min(rows);
        let sequence = self.options.ranks.sequence();
        let (segment, segments) = (sequence.rank(), sequence.size());
        let tokens = context / segments;
        let batch = self.batches.part(epoch, index, of_own.clone(), segment * tokens..(segment + 1) * tokens)?;
        check_vocabulary(&batch, &self.model)?;
        let threads = if segments > 1 { 1 } else { self.options.threads };
        let parameters = self.optimizer.parameters();
        gradients(&self.options.ranks, count, threads, parameters, |i| {
            let part = i * micro - of_own.start..((i + 1) * micro).min(rows) - of_own.start;
            let shape = (part.len(), tokens);
            let part = part.start * tokens..part.end * tokens;
            let ids = Tensor::from_slice(&batch.inputs[part.clone()], shape, self.model.device())?;
            let seed = derive_seed(derive_seed(self.training.seed, DROPOUT_STREAM), (step * count + i) as u64);
            // Segments drop other units than one process would.
            let seed = if segments > 1 { derive_seed(seed, segment as u64) } else { seed };
            let dropout = (dropout > 0.0).then(|| Dropout::new(dropout, seed));
            let mean =
                |losses: &Tensor| ops::scale(&ops::sum_all(losses)?, 1.0 / self.batches.tokens_per_batch() as f64);
            if segments == 1 {
                return Ok(mean(&self.model.losses(&ids, &batch.targets[part], dropout.as_ref())?)?);
            }
            let segment = Segment::new(Arc::new(SharedSequence::new(Arc::clone(sequence))));
            let losses = self.model.losses_of_segment(&ids, &batch.targets[part], dropout.as_ref(), &segment)?;
            Ok(segment.close(&mean(&losses)?)?)
        })
    }

    /// Fits features to the model's queries and keys of the batches from this step on.
    pub(super) fn fit_features(&mut self, step: usize) -> Result<()> {
        let mut moments = self.model.no_moments()?;
        for later in 0..FIT_TOKENS.div_ceil(self.batches.tokens_per_batch()) {
            let (epoch, index) = self.batches.position((step + later) as u64);
            let batch = self.batches.batch(epoch, index)?;
            check_vocabulary(&batch, &self.model)?;
            let tokens = batch.inputs.len().min(FIT_TOKENS.div_ceil(batch.context) * batch.context);
            for part in batch.inputs[..tokens].chunks(FIT_ROWS * batch.context) {
                let ids = Tensor::from_slice(part, (part.len() / batch.context, batch.context), self.model.device())?;
                self.model.add_moments(&ids, &mut moments)?;
            }
        }
        let count = step / self.training.fit_every;
        self.model.fit_features(&moments, self.training.seed, count as u64)
    }
}

/// Returns the batches on which a run trains.
///
/// # Errors
/// If there is too little text for one batch.
pub fn training_batches(config: &ModelConfig, training: &TrainingConfig, data: &Prepared) -> Result<Batches> {
    let batches = Batches::new(data.train.clone(), config.context, training.batch_size, training.seed)?;
    Ok(match training.max_train_tokens {
        Some(tokens) => batches.limited_to(tokens),
        None => batches,
    })
}

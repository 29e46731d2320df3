//! This module computes the losses of a model: cross-entropies of targets over whole sequences,
//! over segments of them and at chosen positions.

use anyhow::{Context, Result, ensure};
use candle_core::{D, DType, Tensor};
use performer_core::{Mask, attention::Segment, ops};

use super::{
    Decoder,
    block::{Dropout, Tokens},
};

/// Number of tokens by which it is found out whether a model can be cut into segments.
const PROBE: usize = 8;

impl Decoder {
    /// Computes the cross-entropy of each target in nats: ids `(B, T)` and `B·T` targets → `(B·T)`.
    /// It does not make the logits of [`Self::forward`], which would be the largest tensor of a
    /// training step.
    ///
    /// # Errors
    /// As [`Self::forward`], and if a target lies beyond the vocabulary.
    pub fn losses(&self, ids: &Tensor, targets: &[u32], dropout: Option<&Dropout>) -> Result<Tensor> {
        let x = self.last_norm(&self.hidden(ids, Tokens::Whole(&self.mask()), dropout)?)?;
        Ok(ops::linear_cross_entropy(&ops::rows(&x)?, self.head.weight(), &targets.into())?)
    }

    /// Computes what [`Self::losses`] computes, to the bit, and the likeliest next token at every
    /// position, in one pass through the layers: ids `(B, T)` and `B·T` targets → losses `(B·T)`
    /// and tokens `(B·T)`.
    ///
    /// # Errors
    /// As [`Self::losses`].
    pub fn losses_and_likeliest(&self, ids: &Tensor, targets: &[u32]) -> Result<(Tensor, Tensor)> {
        let x = ops::rows(&self.last_norm(&self.hidden(ids, Tokens::Whole(&self.mask()), None)?)?)?;
        let losses = ops::linear_cross_entropy(&x, self.head.weight(), &targets.into())?;
        let logits = ops::linear(&x, self.head.weight(), None)?;
        Ok((losses, logits.to_dtype(DType::F32)?.argmax(D::Minus1)?))
    }

    /// Computes what [`Self::losses`] computes of the tokens of one segment of the sequences, while
    /// others compute the other segments: ids `(B, T)` and `B·T` targets → `(B·T)`. Whatever is
    /// made of it is [closed](Segment::close) before the backward pass.
    ///
    /// # Errors
    /// As [`Self::losses`]; also if the attention of a layer cannot be computed in segments, if
    /// another segment does not take part, or if the model leaks.
    pub fn losses_of_segment(
        &self,
        ids: &Tensor,
        targets: &[u32],
        dropout: Option<&Dropout>,
        segment: &Segment,
    ) -> Result<Tensor> {
        self.config.require_causal()?;
        let x = self.last_norm(&self.hidden(ids, Tokens::Segment(segment), dropout)?)?;
        Ok(ops::linear_cross_entropy(&ops::rows(&x)?, self.head.weight(), &targets.into())?)
    }

    /// Refuses to cut sequences of the model's context into so many segments, before anything is
    /// exchanged.
    ///
    /// # Errors
    /// If the model leaks, segments would differ in length, or the attention of a layer cannot be
    /// computed in segments; the message names the layer.
    pub fn require_segments(&self, segments: usize) -> Result<()> {
        self.config.require_causal()?;
        let context = self.config.context;
        ensure!(
            context.is_multiple_of(segments),
            "a context of {context} tokens cannot be cut into {segments} segments of equal length; the number of segments must \
             divide the context"
        );
        // What cannot be cut refuses to be cut into one piece, too.
        let tokens = context / segments;
        let ids = Tensor::zeros((1, tokens.min(PROBE)), DType::U32, &self.device)?;
        self.hidden(&ids, Tokens::Segment(&Segment::alone()), None)
            .with_context(|| format!("a sequence of {context} tokens in {segments} segments"))?;
        Ok(())
    }

    /// Computes the cross-entropy, in nats, against a mixture of each target and the distribution
    /// of `teacher`, which has weight `share`: ids `(B, T)` and `B·T` targets → `(B·T)`. The
    /// teacher gets no gradients.
    ///
    /// # Errors
    /// As [`Self::losses`]; also if the teacher has another vocabulary, or `share` is not from 0 to
    /// 1.
    pub fn distillation_losses(&self, ids: &Tensor, targets: &[u32], teacher: &Decoder, share: f64) -> Result<Tensor> {
        let states = |model: &Decoder| -> Result<Tensor> {
            Ok(ops::rows(&model.last_norm(&model.hidden(ids, Tokens::Whole(&model.mask()), None)?)?)?)
        };
        let theirs = (&states(teacher)?.detach(), teacher.head.weight());
        Ok(ops::linear_distillation(&states(self)?, self.head.weight(), targets, theirs, share)?)
    }

    /// Computes the cross-entropy in nats of targets at chosen positions, under any mask: ids
    /// `(B, T)`, `N` indices into the `B·T` tokens and as many targets → `(N)`. With [`Mask::full`]
    /// the model is an encoder, which reads masked tokens or a whole sequence; a mask of keys hides
    /// padding.
    ///
    /// # Errors
    /// As [`Self::losses`]; also if a position lies beyond the tokens, or if the attention cannot
    /// have such a mask, as a window is causal.
    pub fn losses_at(&self, ids: &Tensor, mask: &Mask, places: &[u32], targets: &[u32]) -> Result<Tensor> {
        Ok(ops::linear_cross_entropy(&self.normed_at(ids, mask, places)?, self.head.weight(), &targets.into())?)
    }

    /// Computes the logits at the positions that [`Self::losses_at`] takes, `(N, V)`.
    ///
    /// # Errors
    /// As [`Self::losses_at`].
    pub fn logits_at(&self, ids: &Tensor, mask: &Mask, places: &[u32]) -> Result<Tensor> {
        Ok(ops::linear(&self.normed_at(ids, mask, places)?, self.head.weight(), None)?.to_dtype(DType::F32)?)
    }

    fn normed_at(&self, ids: &Tensor, mask: &Mask, places: &[u32]) -> Result<Tensor> {
        let places = Tensor::from_slice(places, places.len(), &self.device)?;
        self.last_norm(&ops::index_select(&ops::rows(&self.hidden(ids, Tokens::Whole(mask), None)?)?, &places)?)
    }
}

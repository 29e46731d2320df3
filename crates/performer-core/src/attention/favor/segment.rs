//! A sequence cut into segments that are computed apart: what the keys of a segment come to, and
//! attention of a segment given what the segments before it come to.
//!
//! Prefix sums merge associatively. Let `G` be the sum of the gates of a segment and `G_j` that of
//! the gates after its token `j`. With scales `c` (for each feature the maximum over `j` of
//! `G_j + log φ(k_j)`) and sums `S = Σ_j e^{G_j} φ(k_j) [v_j, 1] / e^c`,
//!
//! ```text
//! (c, S, G) ⊕ (c', S', G') = (m, e^{c + G' − m} S + e^{c' − m} S', G + G'),  m = max(c + G', c')
//! ```
//!
//! so whoever holds a segment needs `F·(Dv + 2) + 1` numbers a key head from those before it,
//! however long they are (Sun et al. 2025, <https://arxiv.org/abs/2502.07563>, for attention
//! without a normaliser). Inside the segment attention is what it is for a whole sequence; the two
//! parts are joined by the logarithms of their denominators.
//!
//! All scales are constants to the gradient, since they cancel. Gradients go to the sums of earlier
//! segments and to the gates, and through [`SegmentSums::merge`].

use candle_core::{D, Device, Result, Tensor, bail};

use super::{Favor, backend::Call};
use crate::{
    attention::{
        Attention, Inputs, Mask, Segment,
        gates::{sums_after, sums_up_to},
        layout::Folded,
        quotient::{Rows, join, join_logs, values_and_one},
        state::bytes_of,
    },
    features::{FeatureMap, Features},
    kernels::{FLOOR, compute_dtype},
    ops,
};

/// What the keys and values of a segment come to, for every key head: see
/// [`Favor::sums_of_segment`].
///
/// # Example
/// Two halves of a sequence, computed apart, are the whole:
/// ```
/// use candle_core::{DType, Device, Result, Tensor};
/// use performer_core::{Attention, Favor, FavorConfig, Inputs, Mask};
///
/// # fn main() -> Result<()> {
/// let favor = Favor::new(&FavorConfig::default(), 16, 42, DType::F32, &Device::Cpu)?;
/// let x = Tensor::randn(0f32, 1.0, (1, 4, 100, 16), &Device::Cpu)?;
/// let whole = favor.forward(Inputs::new(&x, &x, &x), &Mask::causal())?;
///
/// let (first, second) = (x.narrow(2, 0, 60)?, x.narrow(2, 60, 40)?);
/// let before = favor.sums_of_segment(Inputs::new(&first, &first, &first))?;
/// let out = favor.forward_after(Inputs::new(&second, &second, &second), &before)?;
/// let error = (whole.narrow(2, 60, 40)? - out)?.abs()?.max_all()?.to_scalar::<f32>()?;
/// assert!(error < 1e-5, "{error}");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct SegmentSums {
    /// `c`, `(B·Hkv, 1, F)`; very negative where there is no key. It has no gradient.
    log_scale: Tensor,
    /// `S`, `(B·Hkv, F, Dv + 1)`.
    sums: Tensor,
    /// `G`, `(B·Hkv, 1)`; `None` if there are no gates.
    decay: Option<Tensor>,
}

impl SegmentSums {
    /// What this segment and one directly after it come to together. Merging is associative up to
    /// rounding, and does not commute.
    ///
    /// # Errors
    /// If their sizes differ. Sums of other features, or of another batch, that have these sizes
    /// are not noticed: merge only sums of one attention and one batch.
    pub fn merge(&self, later: &Self) -> Result<Self> {
        if self.log_scale.dims() != later.log_scale.dims() || self.sums.dims() != later.sums.dims() {
            bail!(
                "segments: sums {:?} and {:?} cannot be merged; they belong to different attentions or batches",
                self.sums.dims(),
                later.sums.dims()
            );
        }
        let kept = match &later.decay {
            Some(decay) => self.log_scale.broadcast_add(&decay.unsqueeze(2)?)?,
            None => self.log_scale.clone(),
        };
        let log_scale = kept.detach().maximum(&later.log_scale)?;
        let brought = |sums: &Tensor, scale: &Tensor| -> Result<Tensor> {
            sums.broadcast_mul(&(scale - &log_scale)?.exp()?.transpose(1, 2)?)
        };
        let sums = (brought(&self.sums, &kept)? + brought(&later.sums, &later.log_scale)?)?;
        let decay = match (&self.decay, &later.decay) {
            (Some(a), Some(b)) => Some((a + b)?),
            (a, b) => a.clone().or_else(|| b.clone()),
        };
        Ok(Self { log_scale, sums, decay })
    }

    /// All numbers of a key head in one row, for one message: `(B·Hkv, F·(Dv + 2) + 1)`, or one
    /// column less without gates.
    fn packed(&self) -> Result<Tensor> {
        let mut parts = vec![self.log_scale.flatten_from(1)?, self.sums.flatten_from(1)?];
        parts.extend(self.decay.clone());
        Tensor::cat(&parts, 1)
    }

    /// Rebuilds the sums of a segment from `rows` that [`Self::packed`] made there. `self` only
    /// gives their sizes, and whether there are gates.
    fn unpacked(&self, rows: &Tensor) -> Result<Self> {
        let (n, f, e) = self.sums.dims3()?;
        Ok(Self {
            log_scale: rows.narrow(1, 0, f)?.reshape((n, 1, f))?.detach(),
            sums: rows.narrow(1, f, f * e)?.reshape((n, f, e))?,
            decay: self.decay.as_ref().map(|_| rows.narrow(1, f * (e + 1), 1)).transpose()?,
        })
    }

    /// What the segments before this one come to, merged by a scan; `None` if none of them has
    /// keys, as `has_keys(segment)` says. All segments take part, with sums of one size.
    pub(in crate::attention) fn before(
        &self,
        segment: &Segment,
        has_keys: impl Fn(usize) -> bool,
    ) -> Result<Option<Self>> {
        let merge = |before: &Tensor, after: &Tensor| self.unpacked(before)?.merge(&self.unpacked(after)?)?.packed();
        let before = segment.merged_before(&self.packed()?, merge)?;
        before.filter(|_| (0..segment.index()).any(has_keys)).map(|rows| self.unpacked(&rows)).transpose()
    }

    /// Bytes of all numbers: constant in the length of the segment.
    pub fn bytes(&self) -> usize {
        [Some(&self.log_scale), Some(&self.sums), self.decay.as_ref()].into_iter().flatten().map(bytes_of).sum()
    }
}

impl Favor {
    /// Computes the sums over the keys, values and gates of a segment, in `O(T)`, with gradients to
    /// all three. The logarithms of features must be known: the map returns [`Features::Log`], or
    /// has a [`FeatureMap::rectified_form`]. No key is hidden.
    ///
    /// # Errors
    /// As for [`Attention::forward`](crate::Attention::forward), and if the logarithms of features
    /// are not known or there is no key.
    pub fn sums_of_segment(&self, inputs: Inputs<'_>) -> Result<SegmentSums> {
        let folded = self.folded(inputs)?;
        let mut k = self.logs_of(self.map.key_features(&folded.k)?)?;
        if let Some(gates) = &folded.gates {
            k = k.broadcast_add(&sums_after(gates, 1)?.unsqueeze(2)?)?;
        }
        let log_scale = k.detach().max_keepdim(1)?.maximum(FLOOR)?;
        let k = k.broadcast_sub(&log_scale)?.exp()?;
        let sums = k.transpose(1, 2)?.contiguous()?.matmul(&values_and_one(&folded.v, None)?)?;
        let decay = folded.gates.as_ref().map(|gates| gates.sum_keepdim(1)).transpose()?;
        Ok(SegmentSums { log_scale, sums, decay })
    }

    /// Computes causal attention of a segment whose earlier segments come to `before`:
    /// `(B, H, T, Dv)`, what [`Attention::forward`](crate::Attention::forward) over the whole
    /// sequence has there, up to rounding. Gradients go to the inputs and to `before`. Outputs at a
    /// token have the same bits whatever comes after it.
    ///
    /// The part that reads `before` is made of Candle's operations and keeps features of all
    /// queries for the backward pass.
    ///
    /// # Errors
    /// As for [`Self::sums_of_segment`], and if `before` has other sizes or another type than this
    /// attention has for these inputs.
    pub fn forward_after(&self, inputs: Inputs<'_>, before: &SegmentSums) -> Result<Tensor> {
        let dtype = inputs.q.dtype();
        ops::to_dtype(&self.after_with_logs(inputs.widened()?.inputs(), before)?.0, dtype)
    }

    /// [`Self::forward_after`] of inputs in the type of the computation, and the logarithms of the
    /// denominators, `(B, H, T, 1)`.
    pub(in crate::attention) fn after_with_logs(
        &self,
        inputs: Inputs<'_>,
        before: &SegmentSums,
    ) -> Result<(Tensor, Tensor)> {
        let folded = self.folded(inputs)?;
        let q = self.logs_of(self.map.features(&folded.q)?)?;
        let (n, t, g, f) = q.dims4()?;
        let e = folded.v.dim(2)? + 1;
        if before.sums.dims() != [n, f, e] || before.sums.dtype() != q.dtype() {
            bail!(
                "segments: the sums before this one are {:?} {:?}, but it needs {:?} {:?}, (batch x key heads, \
                 features, value dim + 1)",
                before.sums.dtype(),
                before.sums.dims(),
                q.dtype(),
                [n, f, e]
            );
        }
        let mut q = q.broadcast_add(&before.log_scale.unsqueeze(1)?)?;
        if let Some(gates) = &folded.gates {
            q = q.broadcast_add(&sums_up_to(gates, 1)?.reshape((n, t, 1, 1))?)?;
        }
        let m = q.detach().max_keepdim(D::Minus1)?;
        let weights = q.broadcast_sub(&m)?.exp()?.reshape((n, t * g, f))?;
        let rows = Rows::new(&weights.matmul(&before.sums)?, Some(&m.reshape((n, t * g, 1))?))?;
        let Some(logs) = rows.logs else { return Err(self.signed()) };
        let (far, far_logs) = (folded.output(&rows.values)?, folded.output(&logs)?);
        let (near, near_logs) = self.inside_with_logs(inputs)?;
        Ok((join((&near, &near_logs), (&far, &far_logs))?, join_logs(&near_logs, &far_logs)?))
    }

    /// The sums of a segment without keys, of the sizes, type and device that these inputs need.
    pub(in crate::attention) fn no_sums(&self, inputs: Inputs<'_>) -> Result<SegmentSums> {
        let (b, heads, _, dv) = inputs.v.dims4()?;
        let (n, f, dtype, device) =
            (b * heads, self.map.feature_dim(), compute_dtype(inputs.q.dtype()), inputs.q.device());
        Ok(SegmentSums {
            log_scale: Tensor::full(FLOOR, (n, 1, f), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?,
            sums: Tensor::zeros((n, f, dv + 1), dtype, device)?,
            decay: inputs.gates.map(|_| Tensor::zeros((n, 1), dtype, device)).transpose()?,
        })
    }

    /// Computes [`Attention::forward_segment`](crate::Attention::forward_segment) by one scan over
    /// the sums of segments, whose messages do not grow with the number of tokens.
    pub(super) fn in_segment(&self, inputs: Inputs<'_>, segment: &Segment) -> Result<Tensor> {
        let sizes = inputs.sizes_under(&Mask::causal())?;
        // Every segment has the same number of sequences, so none waits for what another would
        // send.
        if sizes.batch == 0 {
            return sizes.zeros(inputs.q);
        }
        match self.sums_of_segment(inputs)?.before(segment, |_| true)? {
            Some(before) => self.forward_after(inputs, &before),
            None => self.forward(inputs, &Mask::causal()),
        }
    }

    /// Attention inside a segment, and the logarithms of its denominators. Kernels return these for
    /// features that come as logarithms.
    fn inside_with_logs(&self, inputs: Inputs<'_>) -> Result<(Tensor, Tensor)> {
        let mask = Mask::causal();
        if self.map.rectified_form().is_none() {
            return self.with_logs(inputs, &mask, None);
        }
        let map = Logarithms { favor: self };
        let call = Call { map: &map, ..self.call(inputs, &mask, true)? };
        let output = self.backends_for(&map)?.choose(&call).forward(&call)?;
        let Some(logs) = output.logs else { return Err(self.signed()) };
        Ok((output.values, logs))
    }

    /// The logarithms of features: those of rectified features are at least `log ε`.
    fn logs_of(&self, features: Features) -> Result<Tensor> {
        match features {
            Features::Log(logs) => Ok(logs),
            Features::Linear { values, log_scale: None } if self.map.rectified_form().is_some() => values.log(),
            _ => Err(self.signed()),
        }
    }

    fn folded(&self, inputs: Inputs<'_>) -> Result<Folded> {
        let mask = Mask::causal();
        let call = self.call(inputs, &mask, true)?;
        if call.sizes.is_empty() {
            bail!("segments: q has shape {:?}; a segment has at least one token", inputs.q.dims());
        }
        Folded::new(inputs, &mask)
    }

    fn signed(&self) -> candle_core::Error {
        candle_core::Error::Msg(format!(
            "features of map {:?} may be negative or zero; segments need the logarithms of features, as map=positive and \
             map=relu have them",
            self.map
        ))
    }
}

/// A map with rectified features, which come as they are, as one whose features are logarithms.
#[derive(Debug)]
struct Logarithms<'a> {
    favor: &'a Favor,
}

impl FeatureMap for Logarithms<'_> {
    fn input_dim(&self) -> usize {
        self.favor.map.input_dim()
    }

    fn feature_dim(&self) -> usize {
        self.favor.map.feature_dim()
    }

    fn heads(&self) -> usize {
        self.favor.map.heads()
    }

    fn features(&self, x: &Tensor) -> Result<Features> {
        self.favor.logs_of(self.favor.map.features(x)?).map(Features::Log)
    }

    fn key_features(&self, y: &Tensor) -> Result<Features> {
        self.favor.logs_of(self.favor.map.key_features(y)?).map(Features::Log)
    }
}

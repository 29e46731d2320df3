//! The short convolutions of a layer: their filters, and the rows of earlier tokens that they need.

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::{Init, VarBuilder};

use crate::{
    attention::{Mask, Memory, Segment, StateRecord},
    kernels::convolution::TAPS,
    ops,
};

/// The indices of queries, keys and values where a layer has something for each.
pub(super) const Q: usize = 0;
pub(super) const K: usize = 1;
pub(super) const V: usize = 2;

/// Where the filters of q, k and v lie beside the layer's weights.
pub(super) const CONVOLUTIONS: [&str; 3] = ["q_conv1d", "k_conv1d", "v_conv1d"];

/// The names of rows in a saved state.
const ROWS: [&str; 3] = ["q", "k", "v"];

/// Earlier tokens that a convolution looks at.
const PAST: usize = TAPS - 1;

/// `Around` says which rows stand before the tokens that are convolved.
pub(super) enum Around<'a> {
    /// The tokens are whole sequences, so zeros stand before them. The mask may hide some of them.
    Mask(&'a Mask),
    /// The tokens go on from earlier ones, whose last projected rows of q, k and v are held here;
    /// `None` before the first token. The last rows of the new tokens take their place.
    Past(&'a mut [Option<Tensor>; 3]),
    /// The tokens are a segment of a sequence. The rows before them come from the segment before.
    Segment(&'a Segment),
}

impl Around<'_> {
    /// Returns what a convolution reads for the projected rows `(B, T, C)` of q, k or v: the rows
    /// with those of earlier tokens before them, and how many these are. Rows of hidden tokens
    /// become zeros, unless the rows are `unmasked`: the mask is about other tokens than theirs.
    pub(super) fn rows(&mut self, which: usize, rows: Tensor, unmasked: bool) -> Result<(Tensor, usize)> {
        match self {
            Self::Mask(mask) => match mask.visible() {
                Some(visible) if !unmasked => {
                    mask.check_keys(rows.dim(0)?, rows.dim(1)?)?;
                    Ok((ops::hide(&rows, visible)?, 0))
                }
                _ => Ok((rows, 0)),
            },
            Self::Segment(segment) => {
                let (batch, tokens, channels) = rows.dims3()?;
                if tokens < PAST {
                    bail!("segments: this one has {tokens} tokens; short convolutions need at least {PAST}");
                }
                let before = match segment.tokens_before(&rows, 1, PAST)? {
                    Some(before) => before,
                    None => Tensor::zeros((batch, PAST, channels), rows.dtype(), rows.device())?,
                };
                Ok((ops::cat(&[&before, &rows], 1)?, PAST))
            }
            Self::Past(last) => {
                let (batch, _, channels) = rows.dims3()?;
                let (shape, dtype) = ([batch, PAST, channels], rows.dtype());
                let before = match last[which].take() {
                    None => Tensor::zeros(&shape, dtype, rows.device())?,
                    Some(before) if before.dims() == shape && before.dtype() == dtype => before,
                    Some(before) => bail!(
                        "state: its last rows are {:?} {:?}, but these tokens need {dtype:?} {shape:?}, (batch, tokens, \
                         channels); a state belongs to one layer and one batch",
                        before.dtype(),
                        before.dims()
                    ),
                };
                let all = if rows.dim(1)? == 0 { before } else { Tensor::cat(&[&before, &rows], 1)? };
                // A view would keep all rows of a prompt in memory.
                last[which] = Some(all.narrow(1, all.dim(1)? - PAST, PAST)?.force_contiguous()?.detach());
                Ok((all, PAST))
            }
        }
    }
}

/// What a layer with convolutions remembers of the tokens so far.
#[derive(Clone, Debug)]
pub(super) struct LastRows {
    /// Tokens seen.
    pub(super) tokens: usize,
    /// The last projected rows of q, k and v, before convolution, `(B, 3, C)` each.
    pub(super) rows: [Tensor; 3],
}

impl Memory for LastRows {
    fn kind() -> &'static str {
        "the last projected rows"
    }

    fn bytes(&self) -> usize {
        self.rows.iter().map(|rows| rows.elem_count() * rows.dtype().size_in_bytes()).sum()
    }

    fn duplicate(&self) -> Box<dyn Memory> {
        // Nothing writes to these tensors.
        Box::new(self.clone())
    }

    fn save(&self) -> Result<StateRecord> {
        let record = StateRecord::new().with_field("tokens", self.tokens);
        let rows = ROWS.into_iter().zip(&self.rows);
        Ok(rows.fold(record, |record, (name, rows)| record.with_tensor(name, rows.clone())))
    }

    fn load(record: &StateRecord) -> Result<Self> {
        let [q, k, v] = ROWS.map(|name| record.tensor(name).cloned());
        Ok(Self { tokens: record.field("tokens")?, rows: [q?, k?, v?] })
    }
}

/// The filters of a convolution `(channels, 4)`, read, or made to change nothing.
pub(super) fn filters(channels: usize, vb: &VarBuilder) -> Result<Tensor> {
    let known = vb.contains_tensor("weight");
    let weight = vb.get_with_hints((channels, TAPS), "weight", Init::Const(0.0))?;
    if !known {
        weight.slice_set(&identity(channels, weight.dtype(), weight.device())?, 0, 0)?;
    }
    Ok(weight)
}

/// Filters `(channels, 4)` that change nothing.
pub(super) fn identity(channels: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    Tensor::ones((channels, 1), dtype, device)?.pad_with_zeros(1, PAST, 0)?.contiguous()
}

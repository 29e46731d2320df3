//! Inputs with their heads folded into the batch, as Candle's own operations and the kernels that
//! read ready features take them.

use candle_core::{D, DType, Result, Storage, Tensor};

use super::{Inputs, Mask, gates};
use crate::{
    kernels::{self, compute_dtype},
    ops,
    projection::input_scale,
};

/// `Folded` holds the inputs of an attention, laid out for composed operations. Batch `B` and key
/// heads `Hkv` become one dimension `N = B·Hkv`; the `G = H/Hkv` query heads that share a key head
/// become neighbouring rows. Numbers are f32 or f64 and contiguous, and queries and keys are scaled
/// by `D^-1/4`.
pub(super) struct Folded {
    /// `D^-1/4 q`, shape `(N, Tq, G, D)`.
    pub(super) q: Tensor,
    /// `D^-1/4 k`, shape `(N, Tk, D)`; the rows of hidden keys are zero.
    pub(super) k: Tensor,
    /// Values, shape `(N, Tk, Dv)`; the rows of hidden keys are zero.
    pub(super) v: Tensor,
    /// 1 for visible and 0 for hidden keys, in the type of the computation, shape `(N, Tk, 1)`.
    pub(super) visible: Option<Tensor>,
    /// Forget gates, at least −1e30 and at most 0, shape `(N, Tk)`.
    pub(super) gates: Option<Tensor>,
    batch: usize,
    /// The number of query heads.
    heads: usize,
    /// The caller's type, which the output gets.
    dtype: DType,
}

impl Folded {
    /// Lays out inputs, whose sizes the caller has checked against each other and the mask.
    ///
    /// # Errors
    /// If an input on the CPU is not finite, or a gate is outside `-1e30..=0`.
    pub(super) fn new(inputs: Inputs<'_>, mask: &Mask) -> Result<Self> {
        let (b, h, tq, d) = inputs.q.dims4()?;
        let (_, hkv, tk, dv) = inputs.v.dims4()?;
        let g = h / hkv;
        let dtype = inputs.q.dtype();
        let compute = compute_dtype(dtype);
        let scale = input_scale(d);
        let lay_out = |t: &Tensor, name: &str| -> Result<Tensor> {
            let t = ops::contiguous(&ops::to_dtype(t, compute)?)?;
            check_finite(&t, name)?;
            Ok(t)
        };
        let q = ops::reshape(&ops::scale(&lay_out(inputs.q, "q")?, scale)?, (b * hkv, g, tq, d))?;
        let q = ops::contiguous(&ops::transpose(&q, 1, 2)?)?;
        let k = ops::reshape(&ops::scale(&lay_out(inputs.k, "k")?, scale)?, (b * hkv, tk, d))?;
        let v = ops::reshape(&lay_out(inputs.v, "v")?, (b * hkv, tk, dv))?;
        let lay_out_gates = |gates: &Tensor| -> Result<Tensor> {
            gates::check(gates)?;
            ops::reshape(&ops::contiguous(&ops::to_dtype(gates, compute)?)?, (b * hkv, tk))
        };
        let gates = inputs.gates.map(lay_out_gates).transpose()?;
        let Some(visible) = mask.visible_of(b, inputs.q.device())? else {
            return Ok(Self { q, k, v, visible: None, gates, batch: b, heads: h, dtype });
        };
        let visible = visible.to_dtype(compute)?;
        let visible = visible.unsqueeze(1)?.expand((b, hkv, tk))?.contiguous()?.reshape((b * hkv, tk, 1))?;
        // Hidden keys and values become zero before the feature map. The features of a large hidden
        // key would be infinite, and infinity times the zero of the mask is NaN. On other devices
        // than the CPU, where nothing is checked, infinity and NaN in hidden rows stay NaN.
        let show = |t: &Tensor| ops::mul(t, &visible.broadcast_as(t.shape())?);
        let (k, v) = (show(&k)?, show(&v)?);
        Ok(Self { q, k, v, visible: Some(visible), gates, batch: b, heads: h, dtype })
    }

    /// Brings rows `(N, Tq·G, Dv)` back to `(B, H, Tq, Dv)` in the caller's dtype.
    pub(super) fn output(&self, rows: &Tensor) -> Result<Tensor> {
        let (n, tq, g, _) = self.q.dims4()?;
        let dv = rows.dim(D::Minus1)?;
        rows.reshape((n, tq, g, dv))?.transpose(1, 2)?.reshape((self.batch, self.heads, tq, dv))?.to_dtype(self.dtype)
    }
}

/// Refuses NaN and infinity on the CPU. On another device it checks nothing, since it would have to
/// wait for the device on every call.
pub(super) fn check_finite(t: &Tensor, name: &str) -> Result<()> {
    let (storage, layout) = t.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => kernels::check_finite(name, storage, layout),
        _ => Ok(()),
    }
}

//! Inputs with their heads folded into the batch, as Candle's own operations and the kernels that
//! read ready features take them; quotients and logarithms of denominators from sums; and how two
//! parts of one attention are joined.

use candle_core::{D, DType, Result, Storage, Tensor};

use super::{Inputs, Mask, gates};
use crate::{
    kernels::{self, compute_dtype},
    ops,
};

/// Stands for `−∞` in running maxima `c` where no key has been seen. It is below the log-features
/// of every key whose squared norm is under 1e37; keys beyond that weigh nothing. It is finite, so
/// that `−∞ − c` is `−∞`; with `c = −∞` it would be NaN.
pub(super) const FLOOR: f64 = -1e37;

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
        let scale = (d as f64).powf(-0.25);
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

/// Returns `[v, 1]`: the values with a column of ones, whose weighted sum is the denominator. The
/// rows of hidden keys are zero.
pub(super) fn values_and_one(v: &Tensor, visible: Option<&Tensor>) -> Result<Tensor> {
    let ones = match visible {
        None => &v.narrow(D::Minus1, 0, 1)?.ones_like()?,
        Some(visible) => visible,
    };
    Tensor::cat(&[v, ones], D::Minus1)
}

/// Splits `[num, den]` and divides; a denominator of exactly zero counts as 1. A row that sees no
/// key has one, with a numerator of zero, so it is zero. (Where signed features cancel to a
/// denominator of exactly zero, which is rare, the row is the numerator.)
pub(super) fn normalise(num_den: &Tensor) -> Result<Tensor> {
    let dv = num_den.dim(D::Minus1)? - 1;
    let num = num_den.narrow(D::Minus1, 0, dv)?;
    let den = num_den.narrow(D::Minus1, dv, 1)?;
    let empty = den.detach().eq(0.0)?.to_dtype(den.dtype())?;
    num.broadcast_div(&(den + empty)?)
}

/// `Rows` holds the outputs of attention, and where all features are positive the logarithms of
/// their denominators.
pub(super) struct Rows {
    /// `(N, T·G, Dv)`.
    pub(super) values: Tensor,
    /// `(N, T·G, 1)`; very negative, but finite, where no key is seen.
    pub(super) logs: Option<Tensor>,
}

impl Rows {
    /// Takes rows `[num, den]` that were divided by `e^m`, with `m` `(N, T·G, 1)` for each row.
    pub(super) fn new(num_den: &Tensor, m: Option<&Tensor>) -> Result<Self> {
        let values = normalise(num_den)?;
        let Some(m) = m else { return Ok(Self { values, logs: None }) };
        let den = num_den.narrow(D::Minus1, num_den.dim(D::Minus1)? - 1, 1)?;
        let empty = den.detach().eq(0.0)?.to_dtype(den.dtype())?;
        let logs = (((den + &empty)?.log()? + m)? + (empty * FLOOR)?)?;
        Ok(Self { values, logs: Some(logs) })
    }
}

/// Divides the rows `(B, H, T, ≥ Dv + 1)` of a kernel into `value_dim` values and the logarithm of
/// the denominator that stands after them. Some kernels leave room after that.
pub(super) fn values_and_logs(rows: &Tensor, value_dim: usize) -> Result<(Tensor, Tensor)> {
    Ok((ops::narrow(rows, 3, 0, value_dim)?, ops::narrow(rows, 3, value_dim, 1)?))
}

/// Joins two parts of one attention, each given by its quotients and logarithms of denominators.
pub(super) fn join((near, near_log): (&Tensor, &Tensor), (far, far_log): (&Tensor, &Tensor)) -> Result<Tensor> {
    // The maximum cancels in the quotient, so it is a constant to the gradient.
    let max = near_log.maximum(far_log)?.detach();
    let weight = |log: &Tensor| ops::exp(&ops::sub(log, &max)?);
    let (near_weight, far_weight) = (weight(near_log)?, weight(far_log)?);
    let weighed = |part: &Tensor, weight: &Tensor| ops::mul(part, &ops::broadcast_as(weight, part.shape())?);
    let sum = ops::add(&weighed(near, &near_weight)?, &weighed(far, &far_weight)?)?;
    ops::div(&sum, &ops::broadcast_as(&ops::add(&near_weight, &far_weight)?, sum.shape())?)
}

/// Returns the logarithm of the sum of two parts' denominators, which are given by their
/// logarithms.
pub(super) fn join_logs(near: &Tensor, far: &Tensor) -> Result<Tensor> {
    // The maximum is subtracted and added again, so it is a constant to the gradient.
    let max = near.maximum(far)?.detach();
    let weight = |log: &Tensor| (log - &max)?.exp();
    (weight(near)? + weight(far)?)?.log()? + max
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

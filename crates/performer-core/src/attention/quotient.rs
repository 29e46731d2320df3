//! Quotients and logarithms of denominators, from sums or from the rows of a kernel; and how two
//! parts of one attention are joined by them.

use candle_core::{D, Result, Tensor};

use crate::{kernels::FLOOR, ops};

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

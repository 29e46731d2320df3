//! Candle's plain operations, which a [`Tape`](crate::Tape) records as well.
//!
//! Each returns what the method of [`Tensor`] of that name returns, with the gradient that Candle
//! gives it. A model that is made of these and the other operations of this module has a backward
//! pass without additions to zeros.

use candle_core::{DType, Result, Shape, Tensor};

use crate::tape::{record, record_view};

/// Computes `a + b` for tensors of one shape.
///
/// # Errors
/// If the shapes or types differ.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let out = a.add(b)?;
    record_view(&out, &[a, b], |grad| Ok(vec![Some(grad.clone()), Some(grad.clone())]));
    Ok(out)
}

/// Computes `factor · x`.
///
/// # Errors
/// Those of [`Tensor::affine`].
pub fn scale(x: &Tensor, factor: f64) -> Result<Tensor> {
    let out = x.affine(factor, 0.0)?;
    record(&out, &[x], move |grad| Ok(vec![Some(grad.affine(factor, 0.0)?)]));
    Ok(out)
}

/// Converts `x` to another type; its gradient is converted back.
///
/// # Errors
/// If the device cannot convert between the types.
pub fn to_dtype(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let (out, from) = (x.to_dtype(dtype)?, x.dtype());
    record(&out, &[x], move |grad| Ok(vec![Some(grad.to_dtype(from)?)]));
    Ok(out)
}

/// Gives `x` another shape of as many numbers.
///
/// # Errors
/// If the number of elements differs.
pub fn reshape(x: &Tensor, shape: impl Into<Shape>) -> Result<Tensor> {
    let (out, from) = (x.reshape(shape.into())?, x.shape().clone());
    record_view(&out, &[x], move |grad| Ok(vec![Some(grad.reshape(&from)?)]));
    Ok(out)
}

/// Exchanges two dimensions of `x`, without copying.
///
/// # Errors
/// If `x` has no such dimensions.
pub fn transpose(x: &Tensor, first: usize, second: usize) -> Result<Tensor> {
    let out = x.transpose(first, second)?;
    record_view(&out, &[x], move |grad| Ok(vec![Some(grad.transpose(first, second)?)]));
    Ok(out)
}

/// Takes `length` entries of dimension `dim` of `x` from `start` on, without copying.
///
/// # Errors
/// If `x` has no such entries.
pub fn narrow(x: &Tensor, dim: usize, start: usize, length: usize) -> Result<Tensor> {
    let (out, all) = (x.narrow(dim, start, length)?, x.dim(dim)?);
    record(&out, &[x], move |grad| Ok(vec![Some(grad.pad_with_zeros(dim, start, all - start - length)?)]));
    Ok(out)
}

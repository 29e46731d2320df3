//! Candle's plain operations, which a [`Tape`](crate::Tape) records as well.
//!
//! Each returns what the method of [`Tensor`] of that name returns, with the gradient that Candle
//! gives it. A model that is made of these and the other operations of this module has a backward
//! pass without additions to zeros.

use candle_core::{D, DType, Result, Shape, Tensor, bail};

use crate::{
    kernels::addition,
    tape::{record, record_sum, record_view},
};

/// Computes `a + b` for tensors of one shape.
///
/// # Errors
/// If the shapes or types differ.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let out = addition::add(a, b)?;
    record_view(&out, &[a, b], |grad| Ok(vec![Some(grad.clone()), Some(grad.clone())]));
    Ok(out)
}

/// Computes `a − b` for tensors of one shape.
///
/// # Errors
/// If the shapes or types differ.
pub fn sub(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let out = a.sub(b)?;
    record_view(&out, &[a, b], |grad| Ok(vec![Some(grad.clone()), Some(grad.neg()?)]));
    Ok(out)
}

/// Computes `a · b`, number by number, for tensors of one shape.
///
/// # Errors
/// If the shapes or types differ.
pub fn mul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (out, factors) = (a.mul(b)?, [a.clone(), b.clone()]);
    record(&out, &[a, b], move |grad| {
        let [a, b] = &factors;
        Ok(vec![if_tracked(a, || grad.mul(b))?, if_tracked(b, || grad.mul(a))?])
    });
    Ok(out)
}

/// Computes `a / b`, number by number, for tensors of one shape.
///
/// # Errors
/// If the shapes or types differ.
pub fn div(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (out, parts) = (a.div(b)?, [a.clone(), b.clone()]);
    record(&out, &[a, b], move |grad| {
        let [a, b] = &parts;
        let of_b = || grad.mul(a)?.div(&b.sqr()?)?.neg();
        Ok(vec![if_tracked(a, || grad.div(b))?, if_tracked(b, of_b)?])
    });
    Ok(out)
}

/// Computes `e^x`.
///
/// # Errors
/// Those of [`Tensor::exp`].
pub fn exp(x: &Tensor) -> Result<Tensor> {
    let out = x.exp()?;
    let result = out.clone();
    record(&out, &[x], move |grad| Ok(vec![Some(grad.mul(&result)?)]));
    Ok(out)
}

/// Computes `x²`.
///
/// # Errors
/// Those of [`Tensor::sqr`].
pub fn sqr(x: &Tensor) -> Result<Tensor> {
    let (out, of) = (x.sqr()?, x.clone());
    record(&out, &[x], move |grad| Ok(vec![Some(of.mul(grad)?.affine(2.0, 0.0)?)]));
    Ok(out)
}

/// Computes GELU in its exact form, `x Φ(x)` for the normal distribution function Φ; the tanh form
/// is [`gelu`](super::gelu).
///
/// # Errors
/// Those of [`Tensor::gelu_erf`].
pub fn gelu_erf(x: &Tensor) -> Result<Tensor> {
    let (out, of) = (x.gelu_erf()?, x.clone());
    record(&out, &[x], move |grad| {
        // Candle's formula with its digits, so that the bits are the same.
        let density = (0.398942 * (of.sqr()?.neg()? / 2.0)?.exp()? * &of)?;
        let distribution = (0.5 * (&of / 2f64.sqrt())?.erf()?)?;
        Ok(vec![Some((grad * (0.5 + density + distribution)?)?)])
    });
    Ok(out)
}

/// Computes `factor · x + offset`.
///
/// # Errors
/// Those of [`Tensor::affine`].
pub fn affine(x: &Tensor, factor: f64, offset: f64) -> Result<Tensor> {
    let out = x.affine(factor, offset)?;
    if factor == 0.0 {
        // No gradient passes, nor does one in Candle's backward pass.
        return Ok(out.detach());
    }
    record(&out, &[x], move |grad| Ok(vec![Some(grad.affine(factor, 0.0)?)]));
    Ok(out)
}

/// Computes `factor · x`.
///
/// # Errors
/// Those of [`Tensor::affine`].
pub fn scale(x: &Tensor, factor: f64) -> Result<Tensor> {
    affine(x, factor, 0.0)
}

/// Converts `x` to another type; its gradient is converted back. Integers have no gradient.
///
/// # Errors
/// If the device cannot convert between the types.
pub fn to_dtype(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let (out, from) = (x.to_dtype(dtype)?, x.dtype());
    if from.is_float() && dtype.is_float() {
        record(&out, &[x], move |grad| Ok(vec![Some(grad.to_dtype(from)?)]));
    }
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

/// Repeats `x` until it has the shape `shape`, without copying.
///
/// # Errors
/// If the last dimensions of `shape` are neither those of `x` nor repeat dimensions of 1.
pub fn broadcast_as(x: &Tensor, shape: impl Into<Shape>) -> Result<Tensor> {
    let (shape, from) = (shape.into(), x.shape().clone());
    if shape == from {
        return Ok(x.clone());
    }
    let out = x.broadcast_as(&shape)?;
    let added = shape.rank() - from.rank();
    let repeated = shape.dims()[added..].iter().zip(from.dims()).enumerate();
    let repeated = repeated.filter(|(_, (all, one))| all != one).map(|(dim, _)| added + dim);
    let dims: Vec<usize> = (0..added).chain(repeated).collect();
    record_view(&out, &[x], move |grad| Ok(vec![Some(sum_in_f32(grad, &dims)?.reshape(&from)?)]));
    Ok(out)
}

/// Returns the sums of a gradient over some dimensions, which become 1. Numbers of half types are
/// added in f32 and rounded at the end: added one by one in bf16, ones stop growing at 256.
fn sum_in_f32(grad: &Tensor, dims: &[usize]) -> Result<Tensor> {
    match grad.dtype() {
        DType::BF16 | DType::F16 => grad.to_dtype(DType::F32)?.sum_keepdim(dims)?.to_dtype(grad.dtype()),
        _ => grad.sum_keepdim(dims),
    }
}

/// Computes the sums over the last dimension of `x`, which becomes 1.
///
/// # Errors
/// If `x` is a scalar.
pub fn sum_last(x: &Tensor) -> Result<Tensor> {
    let (out, shape) = (x.sum_keepdim(D::Minus1)?, x.shape().clone());
    record(&out, &[x], move |grad| Ok(vec![Some(grad.broadcast_as(&shape)?.contiguous()?)]));
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

/// Puts tensors one after the other along a dimension.
///
/// # Errors
/// If they differ in another dimension.
pub fn cat(parts: &[&Tensor], dim: usize) -> Result<Tensor> {
    let out = Tensor::cat(parts, dim)?;
    let lengths = parts.iter().map(|part| part.dim(dim)).collect::<Result<Vec<_>>>()?;
    record_view(&out, parts, move |grad| {
        let mut start = 0;
        let part = |&length: &usize| {
            start += length;
            grad.narrow(dim, start - length, length).map(Some)
        };
        lengths.iter().map(part).collect()
    });
    Ok(out)
}

/// Copies `x` if its numbers do not lie in the order of its shape.
///
/// # Errors
/// If memory runs out.
pub fn contiguous(x: &Tensor) -> Result<Tensor> {
    let out = x.contiguous()?;
    record_view(&out, &[x], |grad| Ok(vec![Some(grad.clone())]));
    Ok(out)
}

/// Takes the entries `ids` `(N)` of dimension 0 of `x`.
///
/// # Errors
/// On the CPU, if an id lies beyond the dimension; a GPU does not tell.
pub fn index_select(x: &Tensor, ids: &Tensor) -> Result<Tensor> {
    // Candle takes the largest number of a type for an entry that is missing, and returns zeros. As
    // u8 it is the last of 256 entries; as u32 it is −1 converted, and no entry at all.
    let ids = &if ids.dtype() == DType::U8 { ids.to_dtype(DType::U32)? } else { ids.clone() };
    let is_missing = ids.device().is_cpu()
        && match ids.dtype() {
            DType::U32 => ids.flatten_all()?.to_vec1::<u32>()?.contains(&u32::MAX),
            DType::I64 => ids.flatten_all()?.to_vec1::<i64>()?.contains(&i64::MAX),
            _ => false,
        };
    if is_missing {
        bail!("the largest id of {:?} lies beyond the {} entries of dimension 0", ids.dtype(), x.dim(0)?);
    }
    let x = &contiguous(x)?;
    let (out, shape, ids) = (x.index_select(ids, 0)?, x.shape().clone(), ids.clone());
    record_sum(&out, x, move |sum, grad| {
        let dtype = if matches!(grad.dtype(), DType::BF16 | DType::F16) { DType::F32 } else { grad.dtype() };
        let sum = sum.map_or_else(|| Tensor::zeros(&shape, dtype, grad.device()), |sum| sum.to_dtype(dtype))?;
        sum.index_add(&ids, &grad.to_dtype(dtype)?, 0)?.to_dtype(grad.dtype())
    });
    Ok(out)
}

/// Computes `a + b` for `a` of shape `(.., S)` and `b` of shape `S`, which is added to each slice
/// of `a`.
///
/// # Errors
/// If the last dimensions of `a` are not those of `b`.
pub fn add_to_each(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if !a.dims().ends_with(b.dims()) {
        bail!(
            "add_to_each: a has shape {:?} and b {:?}; the last dimensions of a must be those of b",
            a.dims(),
            b.dims()
        );
    }
    let out = a.broadcast_add(b)?;
    let leading: Vec<usize> = (0..a.rank().saturating_sub(b.rank())).collect();
    let shape = b.shape().clone();
    record_view(&out, &[a, b], move |grad| {
        let of_b = if leading.is_empty() { grad.clone() } else { sum_in_f32(grad, &leading)?.reshape(&shape)? };
        Ok(vec![Some(grad.clone()), Some(of_b)])
    });
    Ok(out)
}

/// Computes the sum of all numbers of `x`, a scalar.
///
/// # Errors
/// Those of [`Tensor::sum_all`].
pub fn sum_all(x: &Tensor) -> Result<Tensor> {
    let (out, shape) = (x.sum_all()?, x.shape().clone());
    record(&out, &[x], move |grad| Ok(vec![Some(grad.broadcast_as(&shape)?.contiguous()?)]));
    Ok(out)
}

/// Flattens all but the last dimension of `x` into one: `(.., E)` → `(N, E)`.
///
/// # Errors
/// If `x` is a scalar.
pub fn rows(x: &Tensor) -> Result<Tensor> {
    let width = x.dim(D::Minus1)?;
    if x.rank() == 2 { Ok(x.clone()) } else { reshape(x, (x.elem_count() / width.max(1), width)) }
}

/// Computes the gradient of an input that asks for one.
fn if_tracked(input: &Tensor, gradient: impl FnOnce() -> Result<Tensor>) -> Result<Option<Tensor>> {
    if input.track_op() { gradient().map(Some) } else { Ok(None) }
}

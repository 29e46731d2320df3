//! Rotary positions in both layouts of pairs.

use candle_core::{DType, Result, Tensor, bail};

use super::{is_fused, is_half};
use crate::kernels::compute_dtype;
use crate::kernels::{
    operation::apply,
    rotary::{Pairs, Rotary},
};

/// Rotary positions turn the pairs `(i, i + D/2)` of each head by the angles of its token (Su et
/// al. 2021, <https://arxiv.org/abs/2104.09864>). This is the half-split layout of GPT-NeoX and of
/// Hugging Face checkpoints.
///
/// Heads `x` are `(B, H, T, D)`, of f16, bf16, f32 or f64 and with any strides; the result has
/// their shape and type. `cos` and `sin` hold a row for each position, `(T, D/2)`, or `(B, T, D/2)`
/// where the sequences of a batch stand at different positions; of longer tables the first `T` rows
/// count. Tables may have any floating type: the turn is computed in f32, or in f64 where `x` is
/// f64. A pair `(a, b)` becomes `(a cos − b sin, a sin + b cos)`. Gradients go to `x`, and to `cos`
/// and `sin` if these are trained, where `candle_nn::rotary_emb::rope` gives none.
///
/// [`crate::nn::Rotary`] makes the tables.
///
/// # Errors
/// If `x` has another rank than 4 or an odd `D`, or the tables do not fit it.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use performer_core::ops;
///
/// # fn main() -> candle_core::Result<()> {
/// // One pair at one position, turned by a right angle.
/// let x = Var::from_tensor(&Tensor::new(&[3f32, 4.0], &Device::Cpu)?.reshape((1, 1, 1, 2))?)?;
/// let (cos, sin) = (Tensor::new(&[[0f32]], &Device::Cpu)?, Tensor::new(&[[1f32]], &Device::Cpu)?);
/// let y = ops::rotary(&x, &cos, &sin)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [-4.0, 3.0]);
/// assert!(y.sum_all()?.backward()?.get(&x).is_some());
/// # Ok(())
/// # }
/// ```
pub fn rotary(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    turn(x, cos, sin, Pairs::Halves)
}

/// Rotary positions turn the neighbours `(2i, 2i + 1)` of each head by the angles of its token (Su
/// et al. 2021, <https://arxiv.org/abs/2104.09864>). This is the interleaved layout of the original
/// paper, of GPT-J and of Meta's Llama checkpoints.
///
/// Shapes, types and gradients are those of [`rotary`]; the Candle function that gives no gradient
/// is `candle_nn::rotary_emb::rope_i`.
///
/// # Errors
/// If `x` has another rank than 4, or the tables do not fit it.
pub fn rotary_interleaved(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    turn(x, cos, sin, Pairs::Neighbours)
}

/// Turns heads by tables as [`rotary`] takes them.
pub(super) fn turn(x: &Tensor, cos: &Tensor, sin: &Tensor, pairs: Pairs) -> Result<Tensor> {
    let &[batch, _, tokens, width] = x.dims() else {
        bail!("rotary: x has shape {:?}; it must be (batch, heads, tokens, head dim)", x.dims());
    };
    let fits = match *cos.dims() {
        [rows, half] => rows >= tokens && 2 * half == width,
        [sequences, rows, half] => sequences == batch && rows >= tokens && 2 * half == width,
        _ => false,
    };
    if !fits || cos.dims() != sin.dims() {
        bail!(
            "rotary: x has shape {:?}, cos {:?} and sin {:?}; cos and sin must both be (tokens, head dim / 2) or (batch, tokens, \
             head dim / 2), for at least {tokens} tokens and an even head dim",
            x.dims(),
            cos.dims(),
            sin.dims()
        );
    }
    // The fused operation holds the tables as constants.
    let is_fused = is_fused(x) && !cos.track_op() && !sin.track_op();
    if is_half(x) && !is_fused {
        return turn(&x.to_dtype(DType::F32)?, cos, sin, pairs)?.to_dtype(x.dtype());
    }
    // (1, T, D/2) or (B, T, D/2).
    let table = |t: &Tensor| {
        let t = if t.rank() == 2 { t.unsqueeze(0)? } else { t.clone() };
        t.narrow(1, 0, tokens)?.to_dtype(compute_dtype(x.dtype()))
    };
    let (cos, sin) = (table(cos)?, table(sin)?);
    if is_fused {
        let x = if x.stride()[3] == 1 { x.clone() } else { x.contiguous()? };
        return apply(Rotary { cos: cos.contiguous()?, sin: sin.contiguous()?, pairs }, [&x]);
    }
    composed(x, &cos, &sin, pairs)
}

/// The turn in Candle's own operations, with a gradient of the tables as well.
fn composed(x: &Tensor, cos: &Tensor, sin: &Tensor, pairs: Pairs) -> Result<Tensor> {
    let (batch, heads, tokens, width) = x.dims4()?;
    let half = width / 2;
    let (cos, sin) = (cos.unsqueeze(1)?, sin.unsqueeze(1)?);
    let [a, b] = match pairs {
        Pairs::Halves => [x.narrow(3, 0, half)?, x.narrow(3, half, half)?],
        Pairs::Neighbours => {
            let x = x.reshape((batch, heads, tokens, half, 2))?;
            [x.narrow(4, 0, 1)?.squeeze(4)?, x.narrow(4, 1, 1)?.squeeze(4)?]
        }
    };
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?;
    match pairs {
        Pairs::Halves => Tensor::cat(&[first, second], 3),
        Pairs::Neighbours => Tensor::stack(&[first, second], 4)?.flatten_from(3),
    }
}

//! Forget gates in Candle's operations: sums of gates that lose no digits.
//!
//! Between query `i` and key `j` stands the factor `e^{Σ_{j<s≤i} g_s}`. A difference of two long
//! cumulative sums would lose digits in f32: after a thousand tokens, or after one gate of −40, by
//! far more than a weight rounds. So every sum here is made of the gates between its ends alone, by
//! additions of numbers of one sign, and each doubles its reach `log₂ T` times.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::{Inputs, Mask};
use crate::{kernels::compute_dtype, ops};

/// The lowest gate that is taken: sums of them are still far from overflow in f32.
pub(super) const LOWEST: f64 = -1e30;

/// That gate as f32 rounds it, to a number that is slightly lower.
const LOWEST_OF_F32: f64 = LOWEST as f32 as f64;

/// Gates as the kernels take them: f32, contiguous. Refuses those that [`check`] refuses.
pub(super) fn for_kernels(gates: &Tensor) -> Result<Tensor> {
    check(gates)?;
    ops::contiguous(&ops::to_dtype(gates, DType::F32)?)
}

/// Refuses gates outside `-1e30..=0`, on the CPU. Elsewhere this would wait for the device on every
/// call.
pub(super) fn check(gates: &Tensor) -> Result<()> {
    if !matches!(gates.device(), Device::Cpu) {
        return Ok(());
    }
    let numbers = gates.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
    let Some(at) = numbers.iter().position(|g| !(LOWEST_OF_F32..=0.0).contains(g)) else { return Ok(()) };
    let (_, heads, tokens) = gates.dims3()?;
    bail!(
        "gates hold {} at {:?} of shape {:?}; a forget gate is the logarithm of a factor, at most 0 and at least \
         {LOWEST:e}",
        numbers[at],
        [at / (heads * tokens), at / tokens % heads, at % tokens],
        gates.dims()
    )
}

/// Computes the sums over positions `≤ t` of a dimension.
pub(super) fn sums_up_to(x: &Tensor, dim: usize) -> Result<Tensor> {
    let n = x.dim(dim)?;
    let mut sums = x.clone();
    let mut reach = 1;
    while reach < n {
        let longer = (sums.narrow(dim, reach, n - reach)? + sums.narrow(dim, 0, n - reach)?)?;
        sums = Tensor::cat(&[&sums.narrow(dim, 0, reach)?, &longer], dim)?;
        reach *= 2;
    }
    Ok(sums)
}

/// Computes the sums over positions `> t` of a dimension.
pub(super) fn sums_after(x: &Tensor, dim: usize) -> Result<Tensor> {
    let n = x.dim(dim)?;
    let mut sums = x.clone();
    let mut reach = 1;
    while reach < n {
        let longer = (sums.narrow(dim, 0, n - reach)? + sums.narrow(dim, reach, n - reach)?)?;
        sums = Tensor::cat(&[&longer, &sums.narrow(dim, n - reach, reach)?], dim)?;
        reach *= 2;
    }
    if n == 1 {
        // A GPU refuses memory for no numbers, so there is no empty part. The zeros are a product,
        // through which gates get a gradient of zero; a product with the number 0 has no gradient
        // in Candle.
        return x * x.zeros_like()?;
    }
    let none = x.narrow(dim, n - 1, 1)?.zeros_like()?;
    Tensor::cat(&[&sums.narrow(dim, 1, n - 1)?, &none], dim)
}

/// Computes the sums of the gates after key `j` up to query `t`, for the last `queries` of the
/// tokens: `(N, Tk)` → `(N, Tq, Tk)`; 0 where the key is not before the query.
pub(super) fn between(gates: &Tensor, queries: usize) -> Result<Tensor> {
    let (_, keys) = gates.dims2()?;
    let offset = keys - queries;
    let before: Vec<f32> = (0..queries * keys).map(|n| if n % keys < offset + n / keys { 1.0 } else { 0.0 }).collect();
    let before = Tensor::from_vec(before, (queries, keys), gates.device())?.to_dtype(gates.dtype())?;
    let rows = gates.narrow(1, offset, queries)?.unsqueeze(2)?.broadcast_mul(&before)?;
    // The first row sums over the keys, and each of the others adds its own gate to the row above.
    let first = sums_after(&gates.narrow(1, 0, offset + 1)?, 1)?.pad_with_zeros(1, 0, queries - 1)?;
    let first = first.unsqueeze(1)?;
    if queries == 1 {
        return Ok(first);
    }
    sums_up_to(&Tensor::cat(&[&first, &rows.narrow(1, 1, queries - 1)?], 1)?, 1)
}

/// Computes the sums over each `window` neighbours but the first `window`: `(B, Hkv, T)` →
/// `(B, Hkv, T − window)`, of which entry `t` sums over `t + 1..=t + window`.
pub(super) fn sums_of_window(gates: &Tensor, window: usize) -> Result<Tensor> {
    let count = gates.dim(2)? - window;
    // Entry u of `part` sums over `reach` numbers from u on.
    let (mut part, mut reach, mut start) = (gates.clone(), 1, 1);
    let mut sums = part.narrow(2, 0, count)?.zeros_like()?;
    loop {
        if window & reach != 0 {
            sums = ops::add(&sums, &ops::narrow(&part, 2, start, count)?)?;
            start += reach;
        }
        if 2 * reach > window {
            return Ok(sums);
        }
        let longer = part.dim(2)? - reach;
        part = ops::add(&ops::narrow(&part, 2, 0, longer)?, &ops::narrow(&part, 2, reach, longer)?)?;
        reach *= 2;
    }
}

/// Moves the gates of hidden tokens to the next visible one: a visible token gets the sum of its
/// own gate and of those of the hidden tokens directly before it, and a hidden one gets 0.
///
/// Attention stays what it was. A visible query is as far from every visible key as before. A
/// hidden query is nearer to all of them by one sum, which cancels when weights are normalised.
/// That sum would else stand beside every logit of a hidden query, and round it: padding with gates
/// of −1e9 left f32 no digit of anything else, and gradients of features were not finite.
///
/// Gates are `(B, Hkv, T)`, and so is what is returned. Nothing is computed where no token is
/// hidden.
pub(super) fn moved_to_visible(inputs: Inputs<'_>, mask: &Mask) -> Result<Option<Tensor>> {
    let Some(gates) = inputs.gates else { return Ok(None) };
    let (batch, _, tokens) = gates.dims3()?;
    let most = mask.most_hidden_in_a_row().min(tokens);
    let Some(visible) = mask.visible_of(batch, gates.device())?.filter(|_| most > 0 && gates.elem_count() > 0) else {
        return Ok(Some(gates.clone()));
    };
    check(gates)?;
    // Gates in f32 of queries in f64 are computed with in f64.
    let is_wide = compute_dtype(inputs.q.dtype()) == DType::F64;
    let gates = if is_wide { ops::to_dtype(gates, DType::F64)? } else { gates.clone() };
    let visible = visible.to_dtype(gates.dtype())?.unsqueeze(1)?.broadcast_as(gates.shape())?.contiguous()?;
    let hidden = visible.affine(-1.0, 1.0)?;
    // Entry t of `sums` adds up hidden tokens from t back to the last visible one, `reach` at most;
    // `joined` is 1 where there is no visible one among the last `reach`.
    let (mut sums, mut joined, mut reach) = (ops::mul(&gates, &hidden)?, hidden, 1);
    while reach < most {
        let rest = tokens - reach;
        let (start, earlier) = (ops::narrow(&sums, 2, 0, reach)?, ops::narrow(&sums, 2, 0, rest)?);
        let last = joined.narrow(2, reach, rest)?;
        let longer = ops::add(&ops::narrow(&sums, 2, reach, rest)?, &ops::mul(&earlier, &last)?)?;
        sums = ops::cat(&[&start, &longer], 2)?;
        joined = Tensor::cat(&[&joined.narrow(2, 0, reach)?, &(last * joined.narrow(2, 0, rest)?)?], 2)?;
        reach *= 2;
    }
    let mut before = sums.narrow(2, 0, 1)?.zeros_like()?;
    // A GPU refuses memory for no numbers, so there is no empty part.
    if tokens > 1 {
        before = ops::cat(&[&before, &ops::narrow(&sums, 2, 0, tokens - 1)?], 2)?;
    }
    let moved = ops::mul(&ops::add(&gates, &before)?, &visible)?;
    // A sum may lie below the lowest gate, which is refused on the CPU, where gates are checked.
    // The tape does not know the maximum, so it is taken only where it changes something.
    let is_low = matches!(gates.device(), Device::Cpu) && {
        let numbers = moved.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
        numbers.iter().any(|&gate| gate < LOWEST_OF_F32)
    };
    Ok(Some(if is_low { moved.maximum(LOWEST)? } else { moved }))
}

/// Returns one row a query head, `(B, H, T, 1)`, of numbers `(B, Hkv, T)`.
pub(super) fn for_queries(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (b, key_heads, t) = x.dims3()?;
    let group = heads / key_heads;
    let rows = ops::broadcast_as(&ops::reshape(x, (b, key_heads, 1, t))?, (b, key_heads, group, t))?;
    ops::reshape(&ops::contiguous(&rows)?, (b, heads, t, 1))
}

/// Appends the gates of tokens with keys `k` `(B, Hkv, T, D)` to those of `past` tokens before:
/// `(B, Hkv, past + T)`, in the type that is computed in. Tokens without gates keep everything, and
/// `None` says that all do.
pub(super) fn append(
    before: Option<&Tensor>,
    past: usize,
    gates: Option<&Tensor>,
    k: &Tensor,
) -> Result<Option<Tensor>> {
    if before.is_none() && gates.is_none() {
        return Ok(None);
    }
    let (b, heads, tokens, _) = k.dims4()?;
    let dtype = compute_dtype(k.dtype());
    let or_zeros = |gates: Option<&Tensor>, tokens| match gates {
        Some(gates) => gates.to_dtype(dtype),
        None => Tensor::zeros((b, heads, tokens), dtype, k.device()),
    };
    let new = or_zeros(gates, tokens)?;
    if past == 0 {
        new.force_contiguous().map(Some)
    } else {
        Tensor::cat(&[&or_zeros(before, past)?, &new], 2).map(Some)
    }
}

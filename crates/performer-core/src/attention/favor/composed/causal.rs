//! Causal linear attention in Candle's operations: chunked prefix sums, exact in every exponent,
//! and without a look ahead.
//!
//! # Shapes
//!
//! ```text
//! N = B·Hkv key heads, G query heads a key head, chunks of C tokens, F features
//! log-features q (N, T, G, F), k (N, T, F), values with a column of ones v1 (N, T, Dv + 1)
//!   -> split into chunks: q (N, chunks, C·G, F), k (N, chunks, C, F), v1 (N, chunks, C, Dv + 1)
//!   -> prefix sums before each chunk (N, chunks, F, Dv + 1)
//!   -> rows [num, den] (N, chunks, C·G, Dv + 1) -> quotients (N, T·G, Dv)
//! ```
//!
//! Time and memory are linear in `T`: nothing of size `T·F·D` or `T·T` is made. A sequence is cut
//! into chunks of `C` tokens. A row reads the keys of earlier chunks through a state
//! `Σ_j φ(k_j)[v_j, 1]`, and those of its own chunk through `φ(q_i)·φ(k_j)`.
//!
//! **Scale.** Positive features come as logarithms `l_r`. What scales them must be visible to the
//! row that uses it, or the future leaks into the past through rounding and underflow. For the
//! earlier chunks that is a running maximum per feature. Inside the chunk, the lower triangle is
//! halved again and again: at each level the rows of a block's second half read the keys of its
//! first half, scaled by that half's own maximum per feature; what remains is the diagonal. Row `i`
//! divides by `e^{m_i}`, `m_i = max_r(l_r(q_i) + max_{j≤i} l_r(k_j))`. So every exponent is at most
//! 0, the largest term of every row is exactly 1, and rows at positions `≤ t` are bit-identical
//! whatever comes after `t`. The levels cost as many products as the triangle has entries, and
//! `log₂ C` exponentials per feature.
//!
//! Signed features have one log-scale `s_j` for each key instead, and the entry of row `i` and key
//! `j` of the triangle is weighted by `exp(s_j − max_{l≤i} s_l)`.
//!
//! **Gates.** With forget gates `g`, key `j` counts for row `i` by `e^{Σ_{j<s≤i} g_s}`. Every
//! maximum and every sum is then one as of its own token: a key is shifted by the gates after it, a
//! row by those up to it, each counted from the border between them, so that sums of gates begin
//! again at every border and are never subtracted. All exponents remain at most 0.
//!
//! All scales are constants to the gradient, since they cancel in the quotient.

use candle_core::{D, Result, Tensor};

use super::{
    PrefixSums,
    full::{hide, query_weights},
};
use crate::{
    attention::{
        gates::{between, sums_after, sums_up_to},
        layout::Folded,
        quotient::{Rows, values_and_one},
    },
    features::{FeatureMap, Pair, scale_or_zero},
    kernels::FLOOR,
};

/// Computes causal attention in one pass.
pub(super) fn forward(map: &dyn FeatureMap, inputs: &Folded, chunk: usize) -> Result<Rows> {
    Ok(attend(Mapped::new(map, inputs)?, inputs, chunk, None)?.0)
}

/// Computes causal attention from `state` on, and the state after the last token.
pub(super) fn extend(
    map: &dyn FeatureMap,
    inputs: &Folded,
    chunk: usize,
    state: Option<&PrefixSums>,
) -> Result<(Rows, PrefixSums)> {
    attend(Mapped::new(map, inputs)?, inputs, chunk, state)
}

/// `Mapped` holds the features of queries and keys; hidden keys have scale `−∞`.
struct Mapped {
    /// Log-features or, if there is a scale, values: `(N, T, G, F)`.
    q: Tensor,
    /// Log-features or values of the keys: `(N, T, F)`.
    k: Tensor,
    /// Log-scales of the keys, `(N, T, 1)`, for maps that are not positive.
    scale: Option<Tensor>,
}

impl Mapped {
    fn new(map: &dyn FeatureMap, inputs: &Folded) -> Result<Self> {
        match Pair::of(map, &inputs.q, &inputs.k)? {
            Pair::Log { q, k } => Ok(Self { q, k: hide(&k, inputs.visible.as_ref())?, scale: None }),
            Pair::Linear { q, k, log_scale } => {
                let scale = hide(&scale_or_zero(log_scale, &k)?, inputs.visible.as_ref())?;
                Ok(Self { q, k, scale: Some(scale) })
            }
        }
    }
}

fn attend(
    Mapped { q, k, scale }: Mapped,
    inputs: &Folded,
    chunk: usize,
    state: Option<&PrefixSums>,
) -> Result<(Rows, PrefixSums)> {
    let (n, t, g, f) = q.dims4()?;
    let v1 = values_and_one(&inputs.v, inputs.visible.as_ref())?;
    if let Some(state) = state {
        let scales = scale.as_ref().unwrap_or(&k).dim(D::Minus1)?;
        state.check([n, f, inputs.v.dim(2)? + 1], [n, 1, scales], v1.dtype())?;
        // The first token goes the way of all sequences, or it would depend in its last bit on
        // whether others follow.
        if t == 1 {
            return step(&q, &k, scale.as_ref(), &v1, inputs.gates.as_ref(), state);
        }
    }
    let chunks = Chunks { count: t.div_ceil(chunk), size: chunk, group: g };
    // Padding sits after every real token, has no weight and raises no maximum.
    let q = chunks.split(&q.reshape((n, t, g * f))?, 0.0)?.reshape((n, chunks.count, chunk * g, f))?;
    let v1 = chunks.split(&v1, 0.0)?;
    let real = |rows: &Tensor| rows.reshape((n, chunks.count * chunk * g, ()))?.narrow(1, 0, t * g);
    let decay = inputs.gates.as_ref().map(|gates| Decay::new(&chunks, gates)).transpose()?;
    let decay = decay.as_ref();
    match scale {
        None => {
            let (rows, m, state) = positive(&chunks, &q, &chunks.split(&k, f64::NEG_INFINITY)?, &v1, decay, state)?;
            Ok((Rows::new(&real(&rows)?, Some(&real(&m)?))?, state))
        }
        Some(scale) => {
            let (k, scale) = (chunks.split(&k, 0.0)?, chunks.split(&scale, f64::NEG_INFINITY)?);
            let (rows, state) = signed(&chunks, &q, &k, &scale, &v1, decay, state)?;
            Ok((Rows::new(&real(&rows)?, None)?, state))
        }
    }
}

/// `Chunks` says how a sequence is cut: `count` chunks of `size` tokens, `group` query rows a
/// token.
struct Chunks {
    count: usize,
    size: usize,
    group: usize,
}

impl Chunks {
    /// Cuts `(N, T, X)` into `(N, count, size, X)`, padded at the end with `fill`.
    fn split(&self, x: &Tensor, fill: f64) -> Result<Tensor> {
        let (n, t, width) = x.dims3()?;
        let padded = self.count * self.size;
        let x = if padded == t {
            x.contiguous()?
        } else {
            let pad = Tensor::full(fill as f32, (n, padded - t, width), x.device())?.to_dtype(x.dtype())?;
            Tensor::cat(&[x, &pad], 1)?
        };
        x.reshape((n, self.count, self.size, width))
    }

    /// Repeats one row a token `(.., C, X)` to one a query row `(.., C·G, X)`.
    fn repeat_rows(&self, x: &Tensor) -> Result<Tensor> {
        if self.group == 1 {
            return Ok(x.clone());
        }
        let (n, chunks, c, width) = x.dims4()?;
        x.unsqueeze(3)?.expand((n, chunks, c, self.group, width))?.contiguous()?.reshape((
            n,
            chunks,
            c * self.group,
            width,
        ))
    }
}

/// `Decay` holds the gates of chunks, and sums of them inside each chunk.
struct Decay {
    /// `(N, chunks, C, 1)`; 0 for padding.
    gates: Tensor,
    /// The sums up to each token, `(N, chunks, C, 1)`.
    up_to: Tensor,
    /// The sums after each token, `(N, chunks, C, 1)`.
    after: Tensor,
    /// The sums over whole chunks, `(N, chunks, 1)`.
    whole: Tensor,
}

impl Decay {
    /// `gates`: `(N, T)`.
    fn new(chunks: &Chunks, gates: &Tensor) -> Result<Self> {
        let gates = chunks.split(&gates.unsqueeze(2)?, 0.0)?;
        let (up_to, after) = (sums_up_to(&gates, 2)?, sums_after(&gates, 2)?);
        let whole = up_to.narrow(2, chunks.size - 1, 1)?.squeeze(3)?;
        Ok(Self { gates, up_to, after, whole })
    }
}

/// Adds sums of gates to logarithms, where there are any.
fn add(log: &Tensor, sums: Option<&Tensor>) -> Result<Tensor> {
    match sums {
        Some(sums) => log.broadcast_add(sums),
        None => Ok(log.clone()),
    }
}

/// Computes the rows of positive features. `k` are log-features `(N, chunks, C, F)`, `q` too,
/// `(N, chunks, C·G, F)`; `v1` is `(N, chunks, C, Dv+1)`. Returns `[num, den]` rows
/// `(N, chunks, C·G, Dv+1)`, and the logarithms `(N, chunks, C·G, 1)` of what they are divided by.
fn positive(
    chunks: &Chunks,
    q: &Tensor,
    k: &Tensor,
    v1: &Tensor,
    decay: Option<&Decay>,
    state: Option<&PrefixSums>,
) -> Result<(Tensor, Tensor, PrefixSums)> {
    let at_end = add(k, decay.map(|decay| &decay.after))?;
    let scan = Scan::new(&at_end.detach(), decay, state)?;
    let k_state = at_end.broadcast_sub(&scan.after.unsqueeze(2)?)?.exp()?;
    let (before, last) = scan.sums(&k_state, v1, decay, state)?;

    let running = chunks.repeat_rows(&running_max(&k.detach(), &scan.before.unsqueeze(2)?, decay)?)?;
    let m = (q.detach() + running)?.max_keepdim(D::Minus1)?;
    let q = q.broadcast_sub(&m)?;

    let forgotten = decay.map(|decay| chunks.repeat_rows(&decay.up_to)).transpose()?;
    let earlier = at_most_one(&add(&q.broadcast_add(&scan.before.unsqueeze(2)?)?, forgotten.as_ref())?)?;
    let mut rows = earlier.matmul(&before)?;
    let mut half = chunks.size / 2;
    while half >= 1 {
        rows = (rows + halves(chunks, &q, k, v1, decay, half)?)?;
        half /= 2;
    }
    let own = (q + chunks.repeat_rows(k)?)?.exp()?.sum_keepdim(D::Minus1)?;
    rows = (rows + chunks.repeat_rows(v1)?.broadcast_mul(&own)?)?;
    Ok((rows, m, last))
}

/// Computes `e^x` of logarithms that are at most 0 in exact arithmetic. Sums of gates near their
/// border round to more than 0, by so much that the exponential would be infinite.
fn at_most_one(x: &Tensor) -> Result<Tensor> {
    (x - x.detach().relu()?)?.exp()
}

/// Computes one level of the triangle: in each block of `2·half` tokens, rows of the second half
/// over keys of the first.
fn halves(chunks: &Chunks, q: &Tensor, k: &Tensor, v1: &Tensor, decay: Option<&Decay>, half: usize) -> Result<Tensor> {
    let (n, count, rows, f) = q.dims4()?;
    let blocks = n * count * (chunks.size / (2 * half));
    let e = v1.dim(D::Minus1)?;
    let first = |x: &Tensor, width| x.reshape((blocks, 2, half, width))?.narrow(1, 0, 1)?.squeeze(1)?.contiguous();
    let mut k = first(k, f)?;
    let v1 = first(v1, e)?;
    let mut q = q.reshape((blocks, 2, half * chunks.group, f))?.narrow(1, 1, 1)?.squeeze(1)?.contiguous()?;
    if let Some(decay) = decay {
        // Both sides count from the border between the halves.
        let gates = decay.gates.reshape((blocks, 2, half, 1))?;
        k = k.broadcast_add(&sums_after(&gates.narrow(1, 0, 1)?.squeeze(1)?, 1)?)?;
        let up_to = sums_up_to(&gates.narrow(1, 1, 1)?, 2)?;
        q = q.broadcast_add(&chunks.repeat_rows(&up_to)?.squeeze(1)?)?;
    }
    let a = k.detach().max_keepdim(1)?.maximum(FLOOR)?;
    let weights = at_most_one(&q.broadcast_add(&a)?)?;
    let keys = k.broadcast_sub(&a)?.exp()?;
    let products = weights.matmul(&keys.transpose(1, 2)?.contiguous()?)?.matmul(&v1)?.unsqueeze(1)?;
    Tensor::cat(&[&products.zeros_like()?, &products], 1)?.reshape((n, count, rows, e))
}

/// Computes the rows of signed features. `k` are feature values `(N, chunks, C, F)` with log-scales
/// `(N, chunks, C, 1)`.
fn signed(
    chunks: &Chunks,
    q: &Tensor,
    k: &Tensor,
    scale: &Tensor,
    v1: &Tensor,
    decay: Option<&Decay>,
    state: Option<&PrefixSums>,
) -> Result<(Tensor, PrefixSums)> {
    let at_end = add(scale, decay.map(|decay| &decay.after))?;
    let scan = Scan::new(&at_end.detach(), decay, state)?;
    let k_state = k.broadcast_mul(&at_end.broadcast_sub(&scan.after.unsqueeze(2)?)?.exp()?)?;
    let (before, last) = scan.sums(&k_state, v1, decay, state)?;

    let start = scan.before.unsqueeze(2)?;
    let running = chunks.repeat_rows(&running_max(&scale.detach(), &start, decay)?)?;
    let forgotten = decay.map(|decay| chunks.repeat_rows(&decay.up_to)).transpose()?;
    let at_row = add(&start, forgotten.as_ref())?;
    let earlier = q.matmul(&before)?.broadcast_mul(&at_row.broadcast_sub(&running)?.exp()?)?;
    // s_j − max_{l≤i} s_l is at most 0 in the triangle. Outside it may be positive, so it becomes
    // −∞ before the exponential could overflow.
    let mut at_rows = scale.transpose(2, 3)?;
    if let Some(Decay { gates, .. }) = decay {
        let (n, count, c, _) = gates.dims4()?;
        let between = between(&gates.reshape((n * count, c))?, c)?.reshape((n, count, c, c))?;
        at_rows = chunks.repeat_rows(&at_rows.broadcast_add(&between)?)?;
    }
    let exponents = at_rows.broadcast_sub(&running)?;
    let weights = hide(&exponents, Some(&triangle(chunks, q)?.broadcast_as(exponents.shape())?))?.exp()?;
    let own = (q.matmul(&k.transpose(2, 3)?.contiguous()?)? * weights)?.matmul(v1)?;
    Ok(((earlier + own)?, last))
}

/// Returns `(C·G, C)`, which is 1 where the row's token is not before the key.
fn triangle(chunks: &Chunks, like: &Tensor) -> Result<Tensor> {
    let (c, g) = (chunks.size, chunks.group);
    let visible: Vec<u8> = (0..c * g).flat_map(|row| (0..c).map(move |key| u8::from(key <= row / g))).collect();
    Tensor::from_vec(visible, (c * g, c), like.device())
}

/// `Scan` holds running maxima at the chunks' borders: `before` and `after` each chunk, shape
/// `(N, chunks, F or 1)`.
struct Scan {
    before: Tensor,
    after: Tensor,
}

impl Scan {
    /// `log`: detached scales `(N, chunks, C, F or 1)`, as of the ends of their chunks.
    fn new(log: &Tensor, decay: Option<&Decay>, state: Option<&PrefixSums>) -> Result<Self> {
        let inside = log.max(2)?.maximum(FLOOR)?;
        let count = inside.dim(1)?;
        let first = inside.narrow(1, 0, 1)?;
        let mut running = match state {
            Some(state) => state.log_scale.clone(),
            None => first.zeros_like()?.affine(1.0, FLOOR)?,
        };
        let mut borders = vec![running.clone()];
        let whole = decay.map(|decay| decay.whole.detach());
        for i in 0..count {
            let forgotten = whole.as_ref().map(|whole| whole.narrow(1, i, 1)).transpose()?;
            running = add(&running, forgotten.as_ref())?.maximum(&inside.narrow(1, i, 1)?)?;
            borders.push(running.clone());
        }
        Ok(Self { before: Tensor::cat(&borders[..count], 1)?, after: Tensor::cat(&borders[1..], 1)? })
    }

    /// Prefix sums before each chunk `(N, chunks, F, Dv+1)`, and the state after the last. `k`:
    /// features divided by `e^after`.
    fn sums(
        &self,
        k: &Tensor,
        v1: &Tensor,
        decay: Option<&Decay>,
        state: Option<&PrefixSums>,
    ) -> Result<(Tensor, PrefixSums)> {
        let inside = k.transpose(2, 3)?.contiguous()?.matmul(v1)?;
        let (_, count, ..) = inside.dims4()?;
        let kept = add(&self.before, decay.map(|decay| &decay.whole))?;
        let decay = (kept - &self.after)?.exp()?.unsqueeze(3)?;
        let mut sum = match state {
            // Not by `unsqueeze`, which gives the new dimension the stride of a row. Candle's
            // product on Metal goes from one key head to the next by the stride of that dimension.
            Some(state) => {
                let (n, features, values) = state.sums.dims3()?;
                state.sums.reshape((n, 1, features, values))?
            }
            None => inside.narrow(1, 0, 1)?.zeros_like()?,
        };
        let mut before = Vec::with_capacity(count);
        for i in 0..count {
            before.push(sum.clone());
            sum = (sum.broadcast_mul(&decay.narrow(1, i, 1)?)? + inside.narrow(1, i, 1)?)?;
        }
        // A view would hold the scales of all chunks in memory.
        let log_scale = self.after.narrow(1, count - 1, 1)?.force_contiguous()?;
        Ok((Tensor::cat(&before, 1)?, PrefixSums { log_scale, sums: sum.squeeze(1)? }))
    }
}

/// Computes for each position `i` the maximum over `log` `(N, chunks, C, X)` at positions `≤ i` of
/// the chunk and over `start` `(N, chunks, 1, X)`, each lowered by the gates after its position up
/// to `i`: `(N, chunks, C, X)`.
///
/// Each of `log₂ C` rounds doubles the number of positions that a maximum covers.
fn running_max(log: &Tensor, start: &Tensor, decay: Option<&Decay>) -> Result<Tensor> {
    let c = log.dim(2)?;
    let start = add(start, decay.map(|decay| &decay.up_to))?.detach();
    let mut max = log.broadcast_maximum(&start)?;
    // The gates of as many tokens as a maximum reaches over, or of all so far.
    let mut gates = decay.map(|decay| decay.gates.detach());
    let mut reach = 1;
    while reach < c {
        let head = max.narrow(2, 0, reach)?;
        let later = |x: &Tensor| x.narrow(2, reach, c - reach);
        let forgotten = gates.as_ref().map(later).transpose()?;
        let tail = later(&max)?.maximum(&add(&max.narrow(2, 0, c - reach)?, forgotten.as_ref())?)?;
        max = Tensor::cat(&[&head, &tail], 2)?;
        if let Some(sums) = &gates {
            let longer = (later(sums)? + sums.narrow(2, 0, c - reach)?)?;
            gates = Some(Tensor::cat(&[&sums.narrow(2, 0, reach)?, &longer], 2)?);
        }
        reach *= 2;
    }
    Ok(max)
}

/// Adds one more token, then reads the sums for its queries, in `O(F·Dv)`. With the gate `g`, the
/// log-features `l` of the key and `c' = max(c + g, l)`, sums become
/// `e^{c + g − c'} S + e^{l − c'} [v, 1]` and scales `c'`. For signed features `l` is the log-scale
/// of the key, whose values multiply the second term.
fn step(
    q: &Tensor,
    k: &Tensor,
    scale: Option<&Tensor>,
    v1: &Tensor,
    gate: Option<&Tensor>,
    state: &PrefixSums,
) -> Result<(Rows, PrefixSums)> {
    let q = q.squeeze(1)?;
    let log = scale.unwrap_or(k);
    let gate = gate.map(|gate| gate.unsqueeze(2)).transpose()?;
    let before = add(&state.log_scale, gate.as_ref())?;
    let after = before.detach().maximum(&log.detach())?;
    let weight = log.broadcast_sub(&after)?.exp()?;
    let phi = match scale {
        None => weight,
        Some(_) => k.broadcast_mul(&weight)?,
    };
    let decay = (before - &after)?.exp()?.transpose(1, 2)?;
    let sums = (phi.transpose(1, 2)?.contiguous()?.matmul(v1)? + state.sums.broadcast_mul(&decay)?)?;
    let (weights, m) = match scale {
        None => {
            let (weights, m) = query_weights(&q, &after)?;
            (weights, Some(m))
        }
        Some(_) => (q, None),
    };
    let rows = Rows::new(&weights.contiguous()?.matmul(&sums)?, m.as_ref())?;
    Ok((rows, PrefixSums { log_scale: after, sums }))
}

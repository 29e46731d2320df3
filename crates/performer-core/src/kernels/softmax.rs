//! Exact softmax attention on the CPU as one fused operation: tiles of keys with a running maximum,
//! nothing of size `T·T`. The backward pass is in `softmax/backward.rs`.
//!
//! This is the online softmax of Milakov & Gimelshein 2018, <https://arxiv.org/abs/1805.02867>, in
//! tiles as in Dao et al. 2022, <https://arxiv.org/abs/2205.14135>. Scores are kept with a key a
//! row and a query a column, so that maxima and sums over the keys are whole vectors. Arithmetic is
//! f32; tensors may be f32, f16 or bf16, with any strides between rows.
//!
//! # Shapes
//!
//! For one query head and the key head it reads, with `Q ≤ 64` queries and `K ≤ 128` keys of a
//! tile:
//!
//! ```text
//! forward, for each tile of queries, over the tiles of keys that they may see:
//!   q (Q, D), k (K, D)    -> scores s = k qᵀ/√D (K, Q), −∞ where hidden
//!   s, running maximum m  -> weights p = e^{s − m} (K, Q); denominators and numerators rescaled
//!   p, v (K, Dv)          -> numerators (Q, Dv) += pᵀ v
//!   at the end            -> out (Q, Dv) = numerator / denominator, log = m + ln denominator (Q)
//! ```
//!
//! Tiles of keys are counted from the first key in the window of a tile's first query (key 0 where
//! there is no window), and those of sinks from key 0. They are taken from the last to the first. A
//! weight is set to zero where it is below `e^-60` of the largest that its query has met by then.
//! Only a value 10^19 times as large as the others would make it count in f32; if it were kept, its
//! products could be subnormal, and processors compute with such numbers many times more slowly.
//!
//! Forget gates are at most 0. The sum of the gates after key `j` up to query `i` is added to their
//! score, see `softmax/forgotten.rs`. Once these sums make the weights of all earlier keys zero,
//! the loop over keys ends for that tile of queries.

mod backward;
mod forgotten;

use std::{ops::Range, sync::OnceLock};

use candle_core::{CpuStorage, DType, Result, Shape, Tensor, backend::BackendStorage};
use forgotten::Forgotten;
use pulp::{Simd, WithSimd};

use super::{
    FLOOR,
    beside::{AttentionPasses, apply_beside},
    check_finite, contiguous, for_heads, for_heads_of_step,
    fresh::Fresh,
    gemm::{Accumulate, Left, Right, gemm},
    gradient,
    instructions::arch,
    leaves_threads_idle,
    operation::{Operation, Stored, apply},
    padded,
    rows::{Heads, Matrix, Rows, Span},
    storage_of,
    vector::{self, add, dot, exp_minus, exp_minus_each_above, max, max_each, multiply, sum},
    with_storages,
};

/// The queries of a tile.
const QUERIES: usize = 64;
/// The keys of a tile.
const KEYS: usize = 128;
/// The queries, or in the backward pass also the keys, that a thread takes at a time where heads
/// alone would leave threads idle.
const PIECE: usize = 2 * KEYS;
/// The weight `e^{s − m}` of a score `s` is zero where `s − m` is below this; `m` is the largest
/// score of the query so far, and in the backward pass the largest of all.
const NEGLIGIBLE: f32 = -60.0;

/// `Seen` says which keys a query sees: those that are visible; with an offset, query `t` only sees
/// keys up to `offset + t`; with a window, only the last `window` of those and the first `sinks`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// The position of the first query among the keys; `None` where there is no causal mask.
    pub(crate) offset: Option<usize>,
    /// How many of the last keys a query sees, its own among them; all if it is `None`.
    pub(crate) window: Option<usize>,
    /// How many of the first keys a query sees beside its window.
    pub(crate) sinks: usize,
    /// Which keys are visible, `(B, Tk)`; all where it is `None`.
    pub(crate) visible: Option<Vec<bool>>,
}

/// Computes `softmax(q·kᵀ/√D) v`: `q` `(B, H, Tq, D)`, `k` `(B, Hkv, Tk, D)`, `v`
/// `(B, Hkv, Tk, Dv)` → `(B, H, Tq, Dv)`. The last dimension of each is contiguous and nothing is
/// empty. A row that sees no key is zero. With `logs`, each row ends with the logarithm of its
/// denominator `Σ_j e^{q·k_j/√D}`, `−1e37` where no key is seen: `(B, H, Tq, Dv + 1)`. `gates`
/// `(B, Hkv, Tk)`, f32 and contiguous, need an offset.
pub(crate) fn softmax([q, k, v]: [&Tensor; 3], gates: Option<&Tensor>, seen: Seen, logs: bool) -> Result<Tensor> {
    let softmax = Softmax { seen, with_logs: logs, denominators: OnceLock::new() };
    let Some(gates) = gates else { return apply(softmax, [q, k, v]) };
    apply_beside(GatedSoftmax(softmax), [q, k, v], &[gates])
}

/// `Softmax` is softmax attention as one differentiable operation on `(q, k, v)`.
struct Softmax {
    seen: Seen,
    /// Whether each row of outputs ends with the logarithm of its denominator.
    with_logs: bool,
    /// The denominators, `(B, H, Tq)`, kept for the backward pass.
    denominators: OnceLock<Vec<Denominator>>,
}

/// `Denominator` is the denominator of one query, `e^largest / factor`. Its logarithm alone would
/// not do: where logits are large, `ln(1/factor)` has no digits left beside `largest`, and weights
/// that are made with it do not sum to 1.
#[derive(Clone, Copy, Default)]
struct Denominator {
    /// The largest logit; ∞ where no key is seen, so that every weight is 0.
    largest: f32,
    /// One over the sum of the exponentials of the logits less `largest`; 0 where no key is seen.
    factor: f32,
}

/// `Head` is one query head and the key head it reads.
struct Head<'a> {
    q: Rows<'a>,
    k: Rows<'a>,
    v: Rows<'a>,
    offset: Option<usize>,
    window: Option<usize>,
    sinks: usize,
    visible: Option<&'a [bool]>,
    /// Forget gates, `(Tk)`; only with an offset.
    gates: Option<&'a [f32]>,
}

impl Head<'_> {
    /// The first key in the window of query `start`. Sinks may lie before it.
    fn first(&self, start: usize) -> usize {
        match (self.offset, self.window) {
            (Some(offset), Some(window)) => (offset + start + 1).saturating_sub(window),
            _ => 0,
        }
    }

    /// The tiles of those of `keys` that a span of queries may see, the last first: tiles of the
    /// window, then those of sinks.
    fn tiles(&self, queries: Span, keys: Range<usize>) -> impl Iterator<Item = Span> {
        let tiles = |range: Range<usize>| {
            range.clone().step_by(KEYS).map(move |start| Span { start, count: KEYS.min(range.end - start) })
        };
        let [sinks, window] = self.seen(queries.start..queries.start + queries.count, keys);
        tiles(window).rev().chain(tiles(sinks).rev())
    }

    /// Those of `keys` that some of these queries may see: sinks, and behind them the keys of the
    /// queries' windows. No score is computed of any other key.
    fn seen(&self, queries: Range<usize>, keys: Range<usize>) -> [Range<usize>; 2] {
        let (first, reach) = (self.first(queries.start).max(keys.start), self.reach(queries.end).min(keys.end));
        let sinks = self.sinks.min(first).min(reach);
        [keys.start..sinks.max(keys.start), first..reach.max(first)]
    }

    /// The factor `1/√D`.
    fn scale(&self) -> f32 {
        (self.q.width as f32).sqrt().recip()
    }

    /// The number of keys that the queries before `end` may see at most.
    fn reach(&self, end: usize) -> usize {
        self.offset.map_or(self.k.tokens, |offset| (offset + end).min(self.k.tokens))
    }

    /// Computes the scores `q·k/√D` of a tile into `to` `(KEYS, QUERIES)`, a key a row, and writes
    /// `−∞` where a query does not see a key. The first span is of queries, the second of keys.
    /// `columns` `(D, QUERIES)` are the queries, transposed and divided by `√D`. `forgotten` adds
    /// the sums of the gates, if there are gates.
    #[inline(always)]
    fn scores<S: Simd>(
        &self,
        simd: S,
        Span { start: i, count: queries }: Span,
        Span { start: j, count: keys }: Span,
        k: &Matrix,
        (columns, forgotten): (&[f32], Option<&Forgotten>),
        to: &mut [f32],
    ) {
        let right = Right { values: columns, stride: QUERIES };
        gemm(simd, Accumulate::No, [keys, padded(queries), self.q.width], k.left(j), right, to, QUERIES);
        for (row, to) in to.chunks_exact_mut(QUERIES).enumerate().take(keys) {
            if self.visible.is_some_and(|visible| !visible[j + row]) {
                to.fill(f32::NEG_INFINITY);
            } else if let Some(offset) = self.offset {
                if let Some(forgotten) = forgotten {
                    forgotten.add(simd, j + row, to);
                }
                let hidden = (j + row).saturating_sub(offset + i).min(QUERIES);
                to[..hidden].fill(f32::NEG_INFINITY);
                if let Some(window) = self.window.filter(|_| j + row >= self.sinks) {
                    let far = (j + row + window).saturating_sub(offset + i).min(QUERIES);
                    to[far..].fill(f32::NEG_INFINITY);
                }
            }
        }
    }
}

/// `Forward` computes the outputs `(·, Dv)`, or `(·, Dv + 1)` with logarithms, of queries of one
/// head from `start` on, and their denominators.
struct Forward<'a> {
    head: &'a Head<'a>,
    start: usize,
    out: &'a mut [f32],
    denominators: &'a mut [Denominator],
}

impl WithSimd for Forward<'_> {
    /// Whether the queries were finite and, where the last query is among them, all keys and values
    /// too; if not, the outputs mean nothing.
    type Output = bool;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> bool {
        let Self { head, start, out, denominators } = self;
        let (d, dv, width) = (head.q.width, head.v.width, padded(head.v.width));
        let out_width = out.len() / denominators.len();
        let end = start + denominators.len();
        let mut finite = head.q.are_finite(start, denominators.len());
        // Keys and values are checked once for each head.
        if end == head.q.tokens {
            finite &= head.k.are_finite(0, head.k.tokens) & head.v.are_finite(0, head.v.tokens);
        }
        let seen = head.seen(start..end, 0..head.k.tokens);
        let (k, v) = (Matrix::of(&head.k, seen.clone()), Matrix::of(&head.v, seen.clone()));
        let mut columns = vec![0f32; d * QUERIES];
        let mut scores = vec![0f32; KEYS * QUERIES];
        let mut rows = vec![0f32; QUERIES * width];
        let mut scratch = Vec::new();
        let mut forgotten = Forgotten::new(simd, head, &k, seen);
        for i in (start..end).step_by(QUERIES) {
            let queries = QUERIES.min(end - i);
            head.q.copy_transposed(i, queries, &mut columns, QUERIES, &mut scratch);
            vector::scale(simd, &mut columns, head.scale());
            // The maximum begins low, but finite: −∞ − m is then −∞ and not NaN.
            let (mut largest, mut den) = ([FLOOR as f32; QUERIES], [0f32; QUERIES]);
            rows.fill(0.0);
            let tile = Span { start: i, count: queries };
            if let Some(forgotten) = &mut forgotten {
                forgotten.begin(tile, 0, &columns);
            }
            for Span { start: j, count: keys } in head.tiles(tile, 0..head.k.tokens) {
                let span = Span { start: j, count: keys };
                if forgotten.as_mut().is_some_and(|forgotten| !forgotten.reaches(simd, span, &largest)) {
                    break;
                }
                head.scores(simd, tile, span, &k, (&columns, forgotten.as_ref()), &mut scores);
                let before = largest;
                for row in scores.chunks_exact(QUERIES).take(keys) {
                    max_each(simd, &mut largest, row);
                }
                let mut decay = before;
                exp_minus_each_above(simd, &mut decay, &largest, NEGLIGIBLE);
                multiply(simd, &mut den, &decay);
                for (row, &decay) in rows.chunks_exact_mut(width).zip(&decay).filter(|(_, decay)| **decay != 1.0) {
                    vector::scale(simd, row, decay);
                }
                for row in scores.chunks_exact_mut(QUERIES).take(keys) {
                    exp_minus_each_above(simd, row, &largest, NEGLIGIBLE);
                    add(simd, &mut den, row);
                }
                let left = Left::transposed(&scores, QUERIES);
                gemm(simd, Accumulate::Yes, [queries, width, keys], left, v.right(j), &mut rows, width);
            }
            for (t, row) in rows.chunks_exact(width).enumerate().take(queries) {
                let sees_none = den[t] == 0.0;
                let factor = if sees_none { 0.0 } else { den[t].recip() };
                let largest = if sees_none { f32::INFINITY } else { largest[t] };
                denominators[i - start + t] = Denominator { largest, factor };
                let out = &mut out[(i - start + t) * out_width..(i - start + t + 1) * out_width];
                out[..dv].iter_mut().zip(row).for_each(|(out, &x)| *out = x * factor + 0.0);
                if let Some(log) = out.get_mut(dv) {
                    // This is finite, for −∞ minus another −∞ would be NaN.
                    *log = if sees_none { FLOOR as f32 } else { largest + den[t].ln() };
                }
            }
        }
        finite
    }
}

/// `Step` is a decoding step: the output of one query over keys already checked, in one pass over
/// the keys and one over the values.
struct Step<'a> {
    head: &'a Head<'a>,
    out: &'a mut [f32],
}

impl WithSimd for Step<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { head, out } = self;
        let (k, v) = (Matrix::new(&head.k), Matrix::new(&head.v));
        let (keys, d, width) = (head.reach(1), head.q.width, padded(head.v.width));
        let mut query = vec![0f32; d];
        head.q.copy(0, 1, &mut query, d);
        let mut weights = vec![f32::NEG_INFINITY; padded(keys)];
        for (j, weight) in weights.iter_mut().enumerate().take(keys) {
            *weight = dot(simd, k.row(j, d), &query) * head.scale();
        }
        if let Some(gates) = head.gates {
            let mut sum = 0f64;
            for (weight, gate) in weights[..keys].iter_mut().rev().skip(1).zip(gates[..keys].iter().rev()) {
                sum += f64::from(*gate);
                *weight += sum as f32;
            }
        }
        let largest = max(simd, &weights);
        exp_minus(simd, &mut weights, largest);
        let den = sum(simd, &weights);
        let mut row = vec![0f32; width];
        gemm(simd, Accumulate::No, [1, width, keys], Left::rows(&weights, keys), v.right(0), &mut row, width);
        out.iter_mut().zip(&row).for_each(|(out, x)| *out = x / den);
    }
}

/// Computes `softmax(q·kᵀ/√D) v` for one more query, `(B, H, 1, D)`, which sees every key. Inputs
/// are finite; no gradient is recorded. `gates` are `(B, Hkv, Tk)`.
pub(crate) fn step(q: &Tensor, k: &Tensor, v: &Tensor, gates: Option<&Tensor>) -> Result<Tensor> {
    let (b, h, _, _) = q.dims4()?;
    let dv = v.dim(3)?;
    let mut out = vec![0f32; b * h * dv];
    let gates = gates.map(|gates| gates.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()).transpose()?;
    with_storages([q, k, v], |[q, k, v]| {
        let seen = Seen::default();
        let inputs = Inputs::new([q, k, v], gates.as_deref(), &seen)?;
        let work = out.chunks_exact_mut(dv).enumerate().collect();
        let bytes = 4 * b * h * inputs.keys * (inputs.k.width + dv);
        for_heads_of_step(work, bytes, |(n, out)| arch().dispatch(Step { head: &inputs.head(n), out }));
        Ok(())
    })?;
    Tensor::from_vec(out, (b, h, 1, dv), q.device())?.to_dtype(q.dtype())
}

/// `Inputs` gives access to `q`, `k` and `v` head by head.
struct Inputs<'a> {
    q: Heads<'a>,
    k: Heads<'a>,
    v: Heads<'a>,
    /// `(B, Hkv, Tk)`.
    gates: Option<&'a [f32]>,
    seen: &'a Seen,
    /// The number of query heads that share a key head.
    group: usize,
    key_heads: usize,
    keys: usize,
}

impl<'a> Inputs<'a> {
    fn new([q, k, v]: [Stored<'a, CpuStorage>; 3], gates: Option<&'a [f32]>, seen: &'a Seen) -> Result<Self> {
        let (heads, (_, key_heads, keys, _)) = (q.1.dims()[1], k.1.shape().dims4()?);
        Ok(Self {
            q: Heads::new(q)?,
            k: Heads::new(k)?,
            v: Heads::new(v)?,
            gates,
            seen,
            group: heads / key_heads,
            key_heads,
            keys,
        })
    }

    /// The `n`-th query head, counted through the batch.
    fn head(&self, n: usize) -> Head<'a> {
        let key = n / self.group;
        let batch = key / self.key_heads;
        Head {
            q: self.q.head(n),
            k: self.k.head(key),
            v: self.v.head(key),
            offset: self.seen.offset,
            window: self.seen.window,
            sinks: self.seen.sinks.min(self.keys),
            visible: self.seen.visible.as_deref().map(|visible| &visible[batch * self.keys..(batch + 1) * self.keys]),
            gates: self.gates.map(|gates| &gates[key * self.keys..(key + 1) * self.keys]),
        }
    }
}

impl Softmax {
    /// The forward pass, see [`softmax`].
    fn forward(&self, [q, k, v]: [Stored<'_, CpuStorage>; 3], gates: Option<&[f32]>) -> Result<(CpuStorage, Shape)> {
        let ((s1, l1), (s2, l2), (s3, l3)) = (q, k, v);
        let inputs = Inputs::new([q, k, v], gates, &self.seen)?;
        let (b, h, t, _) = l1.shape().dims4()?;
        let dv = l3.dims()[3] + usize::from(self.with_logs);
        let (mut out, mut denominators) = (Fresh::new(b * h * t * dv), vec![Denominator::default(); b * h * t]);
        let piece = if leaves_threads_idle(b * h) { PIECE } else { t };
        let mut work = Vec::new();
        for (n, (out, of_head)) in out.parts(t * dv).into_iter().zip(denominators.chunks_exact_mut(t)).enumerate() {
            let pieces = out.parts(piece * dv).into_iter().zip(of_head.chunks_mut(piece)).enumerate();
            work.extend(pieces.map(|(i, (out, of_piece))| (n, i * piece, out, of_piece)));
        }
        let finite = for_heads(work, |(n, start, out, denominators)| {
            arch().dispatch(Forward { head: &inputs.head(n), start, out: out.take(), denominators })
        });
        if finite.contains(&false) {
            for (name, storage, layout) in [("q", s1, l1), ("k", s2, l2), ("v", s3, l3)] {
                check_finite(name, storage, layout)?;
            }
        }
        // Candle calls the forward pass of an operation once, so this is empty until now. A second
        // call would keep what the first has left.
        self.denominators.get_or_init(|| denominators);
        Ok((storage_of(out.finish(), s1.dtype())?, Shape::from((b, h, t, dv))))
    }
}

impl Operation<3> for Softmax {
    fn name(&self) -> &'static str {
        "softmax-attention"
    }

    fn cpu(&self, inputs: [Stored<'_, CpuStorage>; 3]) -> Result<(CpuStorage, Shape)> {
        self.forward(inputs, None)
    }

    fn backward(&self, inputs: [&Tensor; 3], out: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let ([dq, dk, dv], _) = Softmax::backward(self, inputs, None, out, grad)?;
        let [q, k, v] = inputs;
        Ok([Some(gradient(dq, q)?), Some(gradient(dk, k)?), Some(gradient(dv, v)?)])
    }
}

/// `GatedSoftmax` has the passes of softmax attention with gates.
struct GatedSoftmax(Softmax);

impl AttentionPasses for GatedSoftmax {
    fn name(&self) -> &'static str {
        "gated-softmax-attention"
    }

    fn cpu(&self, qkv: [Stored<'_, CpuStorage>; 3], beside: &[Stored<'_, CpuStorage>]) -> Result<(CpuStorage, Shape)> {
        self.0.forward(qkv, Some(contiguous(beside[0])?))
    }

    fn backward(
        &self,
        qkv @ [q, k, v]: [&Tensor; 3],
        beside: &[&Tensor],
        out: &Tensor,
        grad: &Tensor,
    ) -> Result<([Tensor; 3], Vec<Tensor>)> {
        let ([dq, dk, dv], dgates) =
            with_storages([beside[0]], |[gates]| self.0.backward(qkv, Some(contiguous(gates)?), out, grad))?;
        Ok(([gradient(dq, q)?, gradient(dk, k)?, gradient(dv, v)?], vec![gradient(dgates, beside[0])?]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the last queries of a text compute with is as much in a text of any length: keys of
    /// their windows and sinks. So is what the last keys compute with: queries that see them.
    #[test]
    fn a_window_takes_as_much_of_any_text() {
        let work = |tokens: usize| {
            let numbers = vec![0f32; tokens];
            let rows = Rows::new(&numbers, 1);
            let (offset, window) = (Some(0), Some(75));
            let head = Head { q: rows, k: rows, v: rows, offset, window, sinks: 4, visible: None, gates: None };
            let all = 0..tokens;
            let tile = Span { start: tokens - QUERIES, count: QUERIES };
            let keys: usize = head.tiles(tile, all.clone()).map(|keys| keys.count).sum();
            // A piece of queries holds copies of these keys, and of no others.
            let held = head.seen(tokens - PIECE..tokens, all.clone());
            let copied = held.clone().map(|keys| keys.len());
            assert_eq!(Matrix::of(&head.k, held).values.len(), copied.iter().sum::<usize>() * padded(1));
            let piece = PIECE..2 * PIECE;
            let tiles = all.step_by(QUERIES).map(|start| Span { start, count: QUERIES.min(tokens - start) });
            let queries = tiles.filter(|&tile| head.tiles(tile, piece.clone()).next().is_some()).count();
            [keys, copied[0], copied[1], queries * QUERIES]
        };
        // The last query sees 75 keys, each of those before it one more; and whole tiles of queries
        // see some of the 256 keys of a piece, or come up to 74 tokens later.
        let queries = (PIECE + 74).next_multiple_of(QUERIES);
        let expected = [75 + 63 + 4, 4, PIECE + 74, queries];
        assert_eq!(work(1024), expected);
        assert_eq!(work(102_400), expected);
    }
}

//! The backward pass of softmax attention on the CPU. It computes the scores again from `q` and
//! `k`, and the weights from the scores and the denominators. The forward pass keeps a
//! denominator for each query, and no weights.
//!
//! For one query head and the key head it reads, with `Q ≤ 64` queries and `K ≤ 128` keys of a
//! tile, let `g` (Q, Dv) be the gradient of the outputs, `h` (Q) that of the logarithms of the
//! denominators (0 where these are not returned), and delta = g·out − h (Q). A weight is `p/den`,
//! and each gradient has one such factor, so `g` and delta are divided by `den` (Q) beforehand:
//!
//! ```text
//!   q (Q, D), k (K, D), largest (Q) -> p = e^{s − largest} (K, Q)
//!   g/den, v (K, Dv), delta/den     -> ds = p ∘ (v (g/den)ᵀ − delta/den) (K, Q)
//!   p, ds -> dv (K, Dv) += p g/den, dk (K, D) += ds q/√D, dq (Q, D) += dsᵀ k/√D
//! ```
//!
//! A forget gate `a_t ≤ 0` is added to the scores of all keys before token `t`, for query `t` and
//! later ones. Its gradient is `da_t = Σ_{j≥t} (Σ_i ds(query j, key i) − Σ_i ds(query i, key j))`
//! over positions `i` and `j` in the sequence, summed over the query heads that read the key head.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};
use pulp::{Simd, WithSimd};

use super::{
    super::{
        for_heads,
        fresh::{Fresh, Part},
        gemm::{Accumulate, Left, Right, gemm},
        instructions::arch,
        padded,
        rows::{Heads, Matrix, Rows, Span},
        spare_threads,
        vector::{self, LANES, add, dot, exp_minus_each_above, multiply, multiply_by_positive, subtract, sum},
        with_storages,
    },
    Denominator, Forgotten, Head, Inputs, KEYS, NEGLIGIBLE, PIECE, QUERIES, Softmax,
};

/// `Backward` computes the gradients of one query head that come from the pairs of the queries at
/// `queries` and the keys at `keys`.
struct Backward<'a> {
    head: &'a Head<'a>,
    /// The outputs `(Tq, ·)`; a row may end with the logarithm of its denominator.
    out: &'a Rows<'a>,
    /// The gradients of `out`, with rows as long.
    grad: &'a Rows<'a>,
    /// The denominators, `(Tq)`.
    denominators: &'a [Denominator],
    queries: Range<usize>,
    keys: Range<usize>,
    /// The gradients of the queries, to be filled.
    of_queries: Option<OfQueries<'a>>,
    /// The gradients of the keys and values, to be added to.
    of_keys: Option<OfKeys<'a>>,
}

/// `OfQueries` are the gradients of some queries.
struct OfQueries<'a> {
    /// `(·, D)`.
    dq: &'a mut [f32],
    /// The gradients of the queries' scores, summed over keys: `(·)`; only with gates.
    dlog: Option<&'a mut [f32]>,
}

/// `OfKeys` are the gradients of some keys.
struct OfKeys<'a> {
    /// `(·, D)`, with padded rows.
    dk: &'a mut [f32],
    /// `(·, Dv)`, with padded rows.
    dv: &'a mut [f32],
    /// The gradients of the keys' scores, summed over queries: `(·)`; only with gates.
    dlog: Option<&'a mut [f32]>,
}

impl WithSimd for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { head, out, grad, denominators, queries: span, keys: seen, mut of_queries, mut of_keys } = self;
        let (d, vd) = (head.q.width, head.v.width);
        let (width, value_width) = (padded(d), padded(vd));
        let held = head.seen(span.clone(), seen.clone());
        let (k, v) = (Matrix::of(&head.k, held.clone()), Matrix::of(&head.v, held.clone()));
        let mut query_columns = vec![0f32; d * QUERIES];
        let mut grad_columns = vec![0f32; vd * QUERIES];
        let mut query_rows = vec![0f32; QUERIES * width];
        let mut grad_rows = vec![0f32; QUERIES * value_width];
        let mut out_rows = vec![0f32; QUERIES * value_width];
        let mut weights = vec![0f32; KEYS * QUERIES];
        let mut products = vec![0f32; KEYS * QUERIES];
        let mut rows = vec![0f32; QUERIES * width];
        let mut scratch = Vec::new();
        let mut forgotten = Forgotten::new(simd, head, &k, held);
        for i in span.clone().step_by(QUERIES) {
            let queries = QUERIES.min(span.end - i);
            let tile = Span { start: i, count: queries };
            // A tile of queries that lies before the piece of keys, or so far behind it that no
            // window reaches back, has no pair to compute and is left out, unless its gradients
            // must be written.
            if of_queries.is_none() && head.tiles(tile, seen.clone()).next().is_none() {
                continue;
            }
            let columns = padded(queries);
            // Columns beyond the queries are zero, and so is their part in every sum.
            for row in query_columns.chunks_exact_mut(QUERIES).chain(grad_columns.chunks_exact_mut(QUERIES)) {
                row[queries / LANES * LANES..columns].fill(0.0);
            }
            head.q.copy_transposed(i, queries, &mut query_columns, QUERIES, &mut scratch);
            grad.first(vd).copy_transposed(i, queries, &mut grad_columns, QUERIES, &mut scratch);
            vector::scale(simd, &mut query_columns, head.scale());
            head.q.copy(i, queries, &mut query_rows, width);
            vector::scale(simd, &mut query_rows, head.scale());
            grad.first(vd).copy(i, queries, &mut grad_rows, value_width);
            out.first(vd).copy(i, queries, &mut out_rows, value_width);
            let (mut largest, mut factor, mut delta) = ([f32::INFINITY; QUERIES], [0f32; QUERIES], [0f32; QUERIES]);
            let rows_of_tile = grad_rows.chunks_exact_mut(value_width).zip(out_rows.chunks_exact(value_width));
            for (t, (row, out)) in rows_of_tile.enumerate().take(queries) {
                let denominator = denominators[i + t];
                (largest[t], factor[t]) = (denominator.largest, denominator.factor);
                // A row may end with the logarithm, after the values.
                let log = if grad.width > vd { grad.number(i + t, vd) } else { 0.0 };
                delta[t] = (dot(simd, row, out) - log) * factor[t];
                vector::scale(simd, row, factor[t]);
            }
            for column in grad_columns.chunks_exact_mut(QUERIES) {
                multiply(simd, &mut column[..columns], &factor[..columns]);
            }
            // For a row that sees no key, `largest` is ∞, and ∞ minus another would be NaN.
            let reached = largest.map(|largest| largest.min(f32::MAX));
            rows.fill(0.0);
            let mut over_keys = [0f32; QUERIES];
            if let Some(forgotten) = &mut forgotten {
                forgotten.begin(tile, seen.start, &query_columns);
            }
            for Span { start: j, count: keys } in head.tiles(tile, seen.clone()) {
                let span = Span { start: j, count: keys };
                if forgotten.as_mut().is_some_and(|forgotten| !forgotten.reaches(simd, span, &reached)) {
                    break;
                }
                head.scores(simd, tile, span, &k, (&query_columns, forgotten.as_ref()), &mut weights);
                let right = Right { values: &grad_columns, stride: QUERIES };
                gemm(simd, Accumulate::No, [keys, columns, vd], v.left(j), right, &mut products, QUERIES);
                let pairs = weights.chunks_exact_mut(QUERIES).zip(products.chunks_exact_mut(QUERIES));
                for (weight, product) in pairs.take(keys) {
                    exp_minus_each_above(simd, &mut weight[..columns], &largest[..columns], NEGLIGIBLE);
                    subtract(simd, &mut product[..columns], &delta[..columns]);
                    // The product of a hidden key may be infinite, and its weight is 0.
                    multiply_by_positive(simd, &mut product[..columns], &weight[..columns]);
                }
                if let Some(OfKeys { dk, dv, dlog }) = &mut of_keys {
                    if let Some(dlog) = dlog {
                        let dlog = dlog[j - seen.start..].iter_mut().zip(products.chunks_exact(QUERIES)).take(keys);
                        dlog.for_each(|(dlog, products)| *dlog += sum(simd, &products[..columns]));
                    }
                    let right = Right { values: &grad_rows, stride: value_width };
                    let left = Left::rows(&weights, QUERIES);
                    let to = &mut dv[(j - seen.start) * value_width..];
                    gemm(simd, Accumulate::Yes, [keys, value_width, queries], left, right, to, value_width);
                    let right = Right { values: &query_rows, stride: width };
                    let left = Left::rows(&products, QUERIES);
                    let to = &mut dk[(j - seen.start) * width..];
                    gemm(simd, Accumulate::Yes, [keys, width, queries], left, right, to, width);
                }
                if let Some(OfQueries { dlog, .. }) = &of_queries {
                    if dlog.is_some() {
                        let products = products.chunks_exact(QUERIES).take(keys);
                        products.for_each(|products| add(simd, &mut over_keys[..columns], &products[..columns]));
                    }
                    let left = Left::transposed(&products, QUERIES);
                    gemm(simd, Accumulate::Yes, [queries, width, keys], left, k.right(j), &mut rows, width);
                }
            }
            if let Some(OfQueries { dq, dlog }) = &mut of_queries {
                if let Some(dlog) = dlog {
                    dlog[i - span.start..][..queries].copy_from_slice(&over_keys[..queries]);
                }
                vector::scale(simd, &mut rows, head.scale());
                let to = &mut dq[(i - span.start) * d..(i - span.start + queries) * d];
                to.chunks_exact_mut(d)
                    .zip(rows.chunks_exact(width))
                    .for_each(|(dq, row)| dq.copy_from_slice(&row[..d]));
            }
        }
    }
}

/// `Pass` is what all pieces of the backward pass read.
struct Pass<'a> {
    inputs: &'a Inputs<'a>,
    out: &'a Heads<'a>,
    grad: &'a Heads<'a>,
    denominators: &'a [Denominator],
}

impl Pass<'_> {
    /// Computes the gradients from the pairs of these queries and keys of the `n`-th head; see
    /// [`Backward`].
    fn add(
        &self,
        n: usize,
        queries: Range<usize>,
        keys: Range<usize>,
        of_queries: Option<OfQueries>,
        of_keys: Option<OfKeys>,
    ) {
        let head = &self.inputs.head(n);
        let denominators = &self.denominators[n * head.q.tokens..(n + 1) * head.q.tokens];
        let (out, grad) = (&self.out.head(n), &self.grad.head(n));
        arch().dispatch(Backward { head, out, grad, denominators, queries, keys, of_queries, of_keys });
    }
}

/// `Work` is a piece of the backward pass.
enum Work<'a> {
    /// Some queries: the query head, the first query, `dq` and, with gates, for each query the sum
    /// of the gradients of its scores.
    Queries(usize, usize, Part<'a>, Option<&'a mut [f32]>),
    /// Some keys: the key head, the first key, `dk`, `dv` and, with gates, for each key the sum of
    /// the gradients of its scores.
    Keys(usize, usize, Part<'a>, Part<'a>, Option<&'a mut [f32]>),
}

impl Softmax {
    /// The backward pass: the gradients of `q`, `k` and `v`, and those of the gates `(B, Hkv, Tk)`,
    /// which are empty without.
    pub(super) fn backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        gates: Option<&[f32]>,
        out: &Tensor,
        grad: &Tensor,
    ) -> Result<([Vec<f32>; 3], Vec<f32>)> {
        let grad = grad.contiguous()?;
        let (_, h, t, d) = q.dims4()?;
        let (b, hkv, keys, vd) = v.dims4()?;
        let (group, width, value_width) = (h / hkv, padded(d), padded(vd));
        let mut dq = Fresh::new(q.elem_count());
        let mut dk = Fresh::new(b * hkv * keys * width);
        let mut dv = Fresh::new(b * hkv * keys * value_width);
        let mut dlog = vec![0f32; gates.map_or(0, <[f32]>::len)];
        let mut of_rows = vec![0f32; if gates.is_some() { b * h * t } else { 0 }];
        let Some(denominators) = self.denominators.get() else {
            bail!("softmax attention: the backward pass needs a forward pass on the CPU before it");
        };
        with_storages([q, k, v, out, &grad], |[q, k, v, out, grad]| {
            let inputs = Inputs::new([q, k, v], gates, &self.seen)?;
            let (out, grad) = (Heads::new(out)?, Heads::new(grad)?);
            let pass = Pass { inputs: &inputs, out: &out, grad: &grad, denominators };
            let mut dlogs = dlog.chunks_exact_mut(keys);
            let mut of_rows = of_rows.chunks_exact_mut(t);
            let heads = dk.parts(keys * width).into_iter().zip(dv.parts(keys * value_width)).enumerate();
            let heads = heads.map(|(n, (dk, dv))| (n, dk, dv, dlogs.next()));
            if !spare_threads(b * hkv) {
                let work = dq.parts(group * t * d).into_iter().zip(heads);
                let work = work.map(|(dq, heads)| (dq, of_rows.by_ref().take(group).collect::<Vec<_>>(), heads));
                for_heads(work.collect(), |(dq, of_rows, (n, dk, dv, mut dlog))| {
                    let (dk, dv) = (dk.take(), dv.take());
                    let mut of_rows = of_rows.into_iter();
                    for (g, dq) in dq.parts(t * d).into_iter().enumerate() {
                        let of_queries = OfQueries { dq: dq.take(), dlog: of_rows.next() };
                        let of_keys = OfKeys { dk, dv, dlog: dlog.as_deref_mut() };
                        pass.add(n * group + g, 0..t, 0..keys, Some(of_queries), Some(of_keys));
                    }
                });
                return Ok(());
            }
            // Scores are computed twice, once for the queries and once for the keys, so that no
            // thread waits and results do not depend on the number of threads.
            let mut work = Vec::new();
            for (n, dq) in dq.parts(t * d).into_iter().enumerate() {
                let mut of_rows = of_rows.next().map(|of_rows| of_rows.chunks_mut(PIECE));
                let pieces = dq.parts(PIECE * d).into_iter().enumerate();
                work.extend(pieces.map(|(i, dq)| {
                    let of_rows = of_rows.as_mut().and_then(Iterator::next);
                    Work::Queries(n, i * PIECE, dq, of_rows)
                }));
            }
            for (n, dk, dv, dlog) in heads {
                let mut dlogs = dlog.map(|dlog| dlog.chunks_mut(PIECE));
                let pieces = dk.parts(PIECE * width).into_iter().zip(dv.parts(PIECE * value_width)).enumerate();
                work.extend(pieces.map(|(j, (dk, dv))| {
                    let dlog = dlogs.as_mut().and_then(Iterator::next);
                    Work::Keys(n, j * PIECE, dk, dv, dlog)
                }));
            }
            for_heads(work, |work| match work {
                Work::Queries(n, start, dq, dlog) => {
                    let of_queries = OfQueries { dq: dq.take(), dlog };
                    pass.add(n, start..start + of_queries.dq.len() / d, 0..keys, Some(of_queries), None);
                }
                Work::Keys(n, start, dk, dv, mut dlog) => {
                    let (dk, dv) = (dk.take(), dv.take());
                    for n in n * group..(n + 1) * group {
                        let keys = start..start + dv.len() / value_width;
                        let of_keys = OfKeys { dk, dv, dlog: dlog.as_deref_mut() };
                        pass.add(n, 0..t, keys, None, Some(of_keys));
                    }
                }
            });
            Ok(())
        })?;
        if gates.is_some() && keys > 0 {
            let offset = self.seen.offset.unwrap_or(0);
            for (n, dlog) in dlog.chunks_exact_mut(keys).enumerate() {
                let of_rows = of_rows.chunks_exact(t).skip(n * group).take(group).collect::<Vec<&[f32]>>();
                gate_gradients(dlog, &of_rows, offset);
            }
        }
        let [mut dk, mut dv] = [dk, dv].map(Fresh::finish);
        remove_padding(&mut dk, width, d);
        remove_padding(&mut dv, value_width, vd);
        Ok(([dq.finish(), dk, dv], dlog))
    }
}

/// Makes rows of `width` numbers rows of their first `to` numbers, in place.
fn remove_padding(rows: &mut Vec<f32>, width: usize, to: usize) {
    if width > to {
        let count = rows.len() / width;
        (1..count).for_each(|row| rows.copy_within(row * width..row * width + to, row * to));
        rows.truncate(count * to);
    }
}

/// Turns `dlog` `(Tk)`, the gradients of a key head's scores summed over queries, into the
/// gradients of its gates, in place. With `c_t` the sum of the gates up to `t`, the score of key
/// `j` for the query at `i` contains `c_i − c_j`. So `dc_t` is the sum of the gradients of all
/// scores of the queries at `t` minus `dlog[t]`, and `dg_t = Σ_{j≥t} dc_j`. `of_rows` has those
/// sums, one slice `(Tq)` for each query head, whose first query stands at key `offset`.
///
/// In exact arithmetic, such a sum is the gradient of the logarithm of the query's denominator (0
/// where it is not returned). Outputs that were rounded to half types put it slightly off. The sums
/// as computed are used, since `dlog` is off by as much in all; with exact ones, the difference
/// would grow with the length.
fn gate_gradients(dlog: &mut [f32], of_rows: &[&[f32]], offset: usize) {
    // The sum is f64, since most of its terms cancel over all keys.
    let mut sum = 0f64;
    for (t, dlog) in dlog.iter_mut().enumerate().rev() {
        if t >= offset {
            sum += of_rows.iter().map(|of_rows| f64::from(of_rows[t - offset])).sum::<f64>();
        }
        sum -= f64::from(*dlog);
        *dlog = sum as f32;
    }
}

//! Feature maps inside the fused kernels: the features of a tile of rows, computed here or read
//! where the rows are features already, and the gradients of the rows.

use std::sync::Arc;

use pulp::Simd;

use super::super::{
    gemm::{Accumulate, Left, Right, gemm},
    rows::{Rows, Span},
    vector::{add, affine, column_squares, column_sums, shift, subtract, sum},
};
use super::{
    CHUNK,
    exponential::{Exponential, LinearGradient},
    padded,
    quadratic::Quadratic,
    rectified::Rectified,
};

/// `Map` says where features come from.
#[derive(Clone, Debug)]
pub(crate) enum Map {
    /// Positive features `F^-½ e^{ω_r·x − ‖x‖²/2}` with `x = D^-¼ q` (Choromanski et al. 2020,
    /// Lemma 1), hyperbolic ones (with `±ω_r`), or fitted and trained ones, computed from rows of
    /// queries and keys.
    Exponential(Arc<Exponential>),
    /// ReLU features `M^-½ max(ω_r·x, 0) + ε`, computed from rows of queries and keys.
    Rectified(Arc<Rectified>),
    /// Polynomial features of the second degree, with the kernel `1 + z + c z²` of `z = q·k/√D`,
    /// computed from rows of queries and keys.
    Quadratic(Arc<Quadratic>),
    /// The rows are log-features already: `(.., F)`.
    Log {
        /// The number of features `F`.
        features: usize,
    },
    /// The rows are signed feature values, and a row of keys has its log-scale as one more number:
    /// `(.., F)` for queries and `(.., F + 1)` for keys.
    Signed {
        /// The number of features `F`.
        features: usize,
    },
}

/// `Scratch` is working memory for the maps.
#[derive(Clone, Debug, Default)]
pub(super) struct Scratch {
    /// Rows of half types, widened to f32.
    pub(super) rows: Vec<f32>,
    /// Features, transposed keys or padded gradients of a chunk.
    pub(super) tile: Vec<f32>,
    /// Rows times the metric, or transposed rows of a quadratic map.
    turned: Vec<f32>,
    /// Rows padded to whole vectors; the padding stays 0.
    padded: Vec<f32>,
    /// Gradients of transposed rows, of a quadratic map.
    gradients: Vec<f32>,
}

impl Scratch {
    /// Returns memory for a chunk, a token a column: rows `(d, CHUNK)`, features `(f, CHUNK)` and
    /// gradients of the rows `(d, CHUNK)`; and a vector for rows of half types widened to f32.
    pub(super) fn columns(&mut self, d: usize, f: usize) -> ([&mut [f32]; 3], &mut Vec<f32>) {
        let Self { rows, tile, turned, gradients, .. } = self;
        ([at_least(turned, d * CHUNK), at_least(tile, f * CHUNK), at_least(gradients, d * CHUNK)], rows)
    }
}

/// Transposes a chunk of keys into `d` rows of `CHUNK` numbers, a key a column. The columns of
/// hidden keys are 0, and so are those from `count` up to `padded(count)`. A hidden key's offset is
/// `∞`, so if its numbers were large, their products could make `∞ − ∞`, which is NaN.
#[inline(always)]
fn visible_columns<'s>(
    k: &Rows,
    Span { start, count }: Span,
    hidden: &[f32; CHUNK],
    d: usize,
    (tile, rows): (&'s mut Vec<f32>, &mut Vec<f32>),
) -> &'s mut [f32] {
    let x = at_least(tile, d * CHUNK);
    load_columns(k, Span { start, count }, x, rows);
    for (j, _) in hidden.iter().enumerate().take(count).filter(|(_, hidden)| **hidden > 0.0) {
        x.iter_mut().skip(j).step_by(CHUNK).for_each(|x| *x = 0.0);
    }
    x
}

/// Transposes rows into columns `(d, CHUNK)`, with 0 from the last row to the end of its vector.
#[inline(always)]
pub(super) fn load_columns(x: &Rows, Span { start, count }: Span, to: &mut [f32], rows: &mut Vec<f32>) {
    for row in to.chunks_exact_mut(CHUNK) {
        row[count..padded(count)].fill(0.0);
    }
    x.copy_transposed(start, count, to, CHUNK, rows);
}

/// Copies the first `d` numbers of rows that are `width` apart.
fn copy_unpadded(rows: &[f32], width: usize, to: &mut [f32], d: usize) {
    for (to, row) in to.chunks_exact_mut(d).zip(rows.chunks_exact(width)) {
        to.copy_from_slice(&row[..d]);
    }
}

/// The first `len` numbers of `v`, which grows where it must; the caller overwrites them.
pub(super) fn at_least(v: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if v.len() < len {
        v.resize(len, 0.0);
    }
    &mut v[..len]
}

impl Map {
    /// The number of features `F`.
    pub(crate) fn features(&self) -> usize {
        match self {
            Self::Exponential(e) => e.features(),
            Self::Rectified(r) => r.m,
            Self::Quadratic(q) => q.features(),
            Self::Log { features } | Self::Signed { features } => *features,
        }
    }

    /// Whether features may be negative or zero, so that they have no logarithms.
    pub(super) fn is_signed(&self) -> bool {
        matches!(self, Self::Rectified(_) | Self::Quadratic(_) | Self::Signed { .. })
    }

    /// The number of scales: one for each feature, or one for all where features are signed.
    pub(crate) fn scales(&self) -> usize {
        if self.is_signed() { 1 } else { self.features() }
    }

    /// Computes the features of `count` keys from token `start` on into `to` `(F, CHUNK)`, a key a
    /// column. Positive features are given by their logarithms, in two parts:
    /// `l_r(k_j) = to[r, j] − offset[j]`. Signed features are given as they are, and `offset[j]`
    /// becomes the log-scale of key `j`: its features are still to be multiplied by `e^offset[j]`.
    /// `hidden[j]` is 0 where key `j` of the tile counts and `∞` where it does not.
    #[inline(always)]
    pub(super) fn keys<S: Simd>(
        &self,
        simd: S,
        k: &Rows,
        Span { start, count }: Span,
        hidden: &[f32; CHUNK],
        (to, offset): (&mut [f32], &mut [f32; CHUNK]),
        scratch: &mut Scratch,
    ) {
        let width = padded(count);
        match self {
            Self::Exponential(e) => {
                let x = visible_columns(k, Span { start, count }, hidden, e.d, (&mut scratch.tile, &mut scratch.rows));
                let right = Right { values: x, stride: CHUNK };
                gemm(
                    simd,
                    Accumulate::No,
                    [e.m, width, e.d],
                    Left::rows(&e.key_rows().rows, padded(e.d)),
                    right,
                    to,
                    CHUNK,
                );
                let squared = match e.metric() {
                    None => x,
                    Some(metric) => {
                        let turned = at_least(&mut scratch.turned, e.d * CHUNK);
                        let left = Left::rows(&metric.rows, padded(e.d));
                        gemm(simd, Accumulate::No, [e.d, width, e.d], left, right, turned, CHUNK);
                        turned
                    }
                };
                // The offset is ‖x‖²/2 + ln(F)/2, or with a metric ‖Px‖²/2 + ln(F)/2.
                column_squares(simd, squared, CHUNK, &mut offset[..width]);
                affine(simd, &mut offset[..width], e.norm(), 0.5 * (e.features() as f32).ln());
                add(simd, &mut offset[..width], &hidden[..width]);
                if e.hyperbolic {
                    let (plus, minus) = to.split_at_mut(e.m * CHUNK);
                    for (plus, minus) in plus.chunks_exact(CHUNK).zip(minus.chunks_exact_mut(CHUNK)) {
                        minus[..width].iter_mut().zip(plus).for_each(|(minus, plus)| *minus = -plus);
                    }
                }
                if let Some(weights) = e.log_weights() {
                    for (row, &weight) in to.chunks_exact_mut(CHUNK).zip(weights) {
                        shift(simd, &mut row[..width], weight);
                    }
                }
            }
            Self::Rectified(r) => {
                let x = visible_columns(k, Span { start, count }, hidden, r.d, (&mut scratch.tile, &mut scratch.rows));
                let (left, right) = (Left::rows(&r.linear.rows, padded(r.d)), Right { values: x, stride: CHUNK });
                gemm(simd, Accumulate::No, [r.m, width, r.d], left, right, to, CHUNK);
                for row in to.chunks_exact_mut(CHUNK).take(r.m) {
                    r.activate(simd, &mut row[..width]);
                }
                for (scale, hidden) in offset.iter_mut().zip(hidden).take(width) {
                    *scale = -hidden;
                }
            }
            Self::Quadratic(map) => {
                let x =
                    visible_columns(k, Span { start, count }, hidden, map.d, (&mut scratch.tile, &mut scratch.rows));
                map.columns(x, width, to);
                for (scale, hidden) in offset.iter_mut().zip(hidden).take(width) {
                    *scale = -hidden;
                }
            }
            Self::Log { features } => {
                k.copy_transposed(start, count, to, CHUNK, &mut scratch.rows);
                for row in to.chunks_exact_mut(CHUNK).take(*features) {
                    row[count..width].fill(0.0);
                }
                offset.copy_from_slice(hidden);
            }
            Self::Signed { features } => {
                // The values of a hidden key are finite; its log-scale becomes −∞.
                let all = at_least(&mut scratch.tile, (features + 1) * CHUNK);
                k.copy_transposed(start, count, all, CHUNK, &mut scratch.rows);
                for row in all.chunks_exact_mut(CHUNK) {
                    row[count..width].fill(0.0);
                }
                to[..features * CHUNK].copy_from_slice(&all[..features * CHUNK]);
                for ((scale, &s), &hidden) in offset.iter_mut().zip(&all[features * CHUNK..]).zip(hidden).take(width) {
                    *scale = s - hidden;
                }
            }
        }
    }

    /// Computes the features of queries, a query a row of `padded(F)` numbers: log-features up to a
    /// constant of the row, or signed values.
    #[inline(always)]
    pub(super) fn queries<S: Simd>(
        &self,
        simd: S,
        q: &Rows,
        Span { start, count }: Span,
        to: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let stride = padded(self.features());
        match self {
            Self::Exponential(e) => e.project(simd, &e.queries, q, Span { start, count }, (to, stride), scratch),
            Self::Rectified(r) => r.rows(simd, q, Span { start, count }, to, &mut scratch.rows),
            Self::Quadratic(map) => map.rows(q, Span { start, count }, to, scratch),
            Self::Log { .. } | Self::Signed { .. } => q.copy(start, count, to, stride),
        }
    }

    /// Computes the features of the only key of `k`: log-features, or signed values, whose
    /// log-scale is returned.
    #[inline(always)]
    pub(super) fn key<S: Simd>(&self, simd: S, k: &Rows, to: &mut [f32], scratch: &mut Scratch) -> f32 {
        match self {
            Self::Exponential(e) => {
                e.project(simd, e.key_rows(), k, Span::of(0), (&mut *to, padded(e.features())), scratch);
                let (row, _) = k.read(0, 1, &mut scratch.rows);
                let square: f32 = match e.metric() {
                    None => row[..e.d].iter().map(|x| x * x).sum(),
                    Some(metric) => {
                        let rows = metric.rows.chunks_exact(padded(e.d));
                        rows.map(|p| p.iter().zip(&row[..e.d]).map(|(p, x)| p * x).sum::<f32>().powi(2)).sum()
                    }
                };
                shift(simd, to, -(square * e.norm() + 0.5 * (e.features() as f32).ln()));
                if let Some(weights) = e.log_weights() {
                    to.iter_mut().zip(weights).for_each(|(to, weight)| *to += weight);
                }
                0.0
            }
            Self::Rectified(r) => {
                r.rows(simd, k, Span::of(0), to, &mut scratch.rows);
                0.0
            }
            Self::Quadratic(map) => {
                map.row(k, &mut to[..map.features()], &mut scratch.rows);
                0.0
            }
            Self::Log { features } => {
                k.copy(0, 1, &mut to[..*features], *features);
                0.0
            }
            Self::Signed { features } => {
                let row = at_least(&mut scratch.tile, features + 1);
                k.copy(0, 1, row, features + 1);
                to[..*features].copy_from_slice(&row[..*features]);
                row[*features]
            }
        }
    }

    /// Computes the gradients `to` `(count, ·)` of the rows of queries, which are as wide as `q`.
    /// `dl` `(count, padded(F))` holds the gradients of the log-features, or of the features where
    /// they are signed, and is overwritten; `phi` has that shape and holds the weights of the
    /// queries. The gradient of the parameters of an exponential map is added to `linear`.
    #[inline(always)]
    pub(super) fn query_gradients<S: Simd>(
        &self,
        simd: S,
        (dl, phi): (&mut [f32], &[f32]),
        (q, Span { start, count }): (&Rows, Span),
        to: &mut [f32],
        linear: Option<&mut LinearGradient>,
        scratch: &mut Scratch,
    ) {
        let stride = padded(self.features());
        let e = match self {
            Self::Exponential(e) => e,
            Self::Rectified(r) => {
                r.gradients(simd, &mut dl[..count * stride], &phi[..count * stride]);
                let (width, left) = (padded(r.d), Left::rows(dl, stride));
                let tile = at_least(&mut scratch.tile, count * width);
                let right = Right { values: &r.linear.rows, stride: width };
                gemm(simd, Accumulate::No, [count, width, r.m], left, right, tile, width);
                return copy_unpadded(tile, width, to, r.d);
            }
            Self::Quadratic(map) => {
                return map.row_gradients(dl, (q, Span { start, count }), to, scratch);
            }
            Self::Log { features } | Self::Signed { features } => {
                return copy_unpadded(&dl[..count * stride], stride, to, *features);
            }
        };
        if e.hyperbolic {
            for dl in dl.chunks_exact_mut(stride).take(count) {
                let (plus, minus) = dl.split_at_mut(e.m);
                plus.iter_mut().zip(minus).for_each(|(plus, minus)| *plus -= *minus);
            }
        }
        if let Some(linear) = linear {
            linear.add(simd, Left::transposed(dl, stride), q, Span { start, count }, &mut scratch.padded);
        }
        let width = padded(e.d);
        let (left, right) = (Left::rows(dl, stride), Right { values: &e.queries.rows, stride: width });
        // ‖x‖²/2 scales all features of a query alike and has no part in the gradient.
        if width == e.d {
            return gemm(simd, Accumulate::No, [count, width, e.m], left, right, to, width);
        }
        let tile = at_least(&mut scratch.tile, count * width);
        gemm(simd, Accumulate::No, [count, width, e.m], left, right, tile, width);
        copy_unpadded(tile, width, to, e.d);
    }

    /// Computes the gradients `to` `(count, ·)` of the rows of keys, which are as wide as `k`. `dl`
    /// `(F, CHUNK)`, a key a column, holds the gradients of the log-features and is overwritten;
    /// `phi` `(F, CHUNK)` holds the weights of the keys. For signed features, `dl` is the gradient
    /// of the features themselves, `weights` are the factors `e^{s − c}` by which those of each key
    /// were multiplied to give `phi`, and `scale` is the gradient of each key's log-scale `s`. The
    /// gradient of the parameters of an exponential map is added to `linear`.
    #[inline(always)]
    pub(super) fn key_gradients<S: Simd>(
        &self,
        simd: S,
        (dl, phi, scale, weights): (&mut [f32], &[f32], &[f32; CHUNK], &[f32; CHUNK]),
        (k, Span { start, count }): (&Rows, Span),
        to: &mut [f32],
        linear: Option<&mut LinearGradient>,
        scratch: &mut Scratch,
    ) {
        let columns = padded(count);
        let e = match self {
            Self::Exponential(e) => e,
            Self::Rectified(r) => {
                for (dl, phi) in dl.chunks_exact_mut(CHUNK).zip(phi.chunks_exact(CHUNK)) {
                    r.weighted_gradients(&mut dl[..columns], &phi[..columns], weights);
                }
                let (width, left) = (padded(r.d), Left::transposed(dl, CHUNK));
                let tile = at_least(&mut scratch.tile, count * width);
                let right = Right { values: &r.linear.rows, stride: width };
                gemm(simd, Accumulate::No, [count, width, r.m], left, right, tile, width);
                return copy_unpadded(tile, width, to, r.d);
            }
            Self::Quadratic(map) => {
                return map.column_gradients(dl, (k, Span { start, count }), to, scratch);
            }
            Self::Log { features } | Self::Signed { features } => {
                for (j, to) in to.chunks_exact_mut(k.width).enumerate().take(count) {
                    to[..*features].iter_mut().zip(dl.iter().skip(j).step_by(CHUNK)).for_each(|(to, dl)| *to = *dl);
                    to[*features..].fill(scale[j]);
                }
                return;
            }
        };
        let mut total = [0f32; CHUNK];
        column_sums(simd, dl, CHUNK, &mut total[..columns]);
        if e.hyperbolic {
            let (plus, minus) = dl.split_at_mut(e.m * CHUNK);
            subtract(simd, plus, &minus[..e.m * CHUNK]);
        }
        if let Some(linear) = linear {
            linear.add(simd, Left::rows(dl, CHUNK), k, Span { start, count }, &mut scratch.padded);
            for (weight, dl) in linear.log_weights.iter_mut().zip(dl.chunks_exact(CHUNK)) {
                *weight += sum(simd, &dl[..columns]);
            }
        }
        let width = padded(e.d);
        let tile = at_least(&mut scratch.tile, count * width);
        let right = Right { values: &e.key_rows().rows, stride: width };
        gemm(simd, Accumulate::No, [count, width, e.m], Left::transposed(dl, CHUNK), right, tile, width);
        let norm = 2.0 * e.norm();
        let (mut rows, mut from) = k.read(start, count, &mut scratch.rows);
        if let Some(metric) = e.metric() {
            let turned = at_least(&mut scratch.turned, count * width);
            let right = Right { values: &metric.square, stride: width };
            gemm(simd, Accumulate::No, [count, width, e.d], Left::rows(rows, from), right, turned, width);
            (rows, from) = (turned, width);
        }
        for (j, (to, row)) in to.chunks_exact_mut(e.d).zip(tile.chunks_exact(width)).enumerate() {
            if total[j] == 0.0 {
                // A hidden key may be so large that its product with the metric is infinite.
                to.copy_from_slice(&row[..e.d]);
                continue;
            }
            let factor = norm * total[j];
            for ((to, &row), &k) in to.iter_mut().zip(row).zip(&rows[j * from..]) {
                *to = row - factor * k;
            }
        }
    }
}

//! Exponentials of linear maps: positive and hyperbolic features, and positive features that are
//! fitted or trained.

use pulp::Simd;

use super::super::{
    gemm::{Accumulate, Left, Right, gemm},
    rows::{Rows, Span},
};
use super::{
    CHUNK,
    map::{Scratch, at_least},
    padded,
};
use crate::projection::input_scale;

/// `Exponential` is a map with log-features `log φ(x)_r = ±ω_r·x − ‖x‖²/2 − ln(F)/2` with
/// `x = D^-1/4 q`: positive (`+`) or hyperbolic (`±`) features. Keys `y = D^-1/4 k` may have a form
/// of their own: `b_r·y + w_r − ‖Py‖²/2 − ln(F)/2`.
#[derive(Clone, Debug)]
pub(crate) struct Exponential {
    pub(super) queries: Linear,
    keys: Option<Keys>,
    pub(super) m: usize,
    pub(super) d: usize,
    pub(super) hyperbolic: bool,
}

/// `Keys` is the form of the keys, where it differs from that of the queries.
#[derive(Clone, Debug)]
struct Keys {
    linear: Linear,
    /// `w`, `M` numbers.
    log_weights: Vec<f32>,
    metric: Option<Metric>,
}

/// `Metric` holds `P` and `PᵀP` where `P` is not the identity, each as `D` rows padded to whole
/// vectors.
#[derive(Clone, Debug)]
pub(super) struct Metric {
    pub(super) rows: Vec<f32>,
    pub(super) square: Vec<f32>,
}

impl Metric {
    /// `p` is `P`, row-major `(D, D)`.
    fn new(p: &[f32], d: usize) -> Self {
        let width = padded(d);
        let (mut rows, mut square) = (vec![0f32; d * width], vec![0f32; d * width]);
        for i in 0..d {
            rows[i * width..i * width + d].copy_from_slice(&p[i * d..(i + 1) * d]);
            for j in 0..d {
                let product: f64 = (0..d).map(|r| f64::from(p[r * d + i]) * f64::from(p[r * d + j])).sum();
                square[i * width + j] = product as f32;
            }
        }
        Self { rows, square }
    }
}

/// `Linear` holds `D^-1/4 Ω` and its transpose.
#[derive(Clone, Debug)]
pub(super) struct Linear {
    /// `M` rows of `D` numbers, padded to whole vectors.
    pub(super) rows: Vec<f32>,
    /// The transpose: `D` rows of `M` numbers, padded to whole vectors.
    pub(super) columns: Vec<f32>,
}

impl Linear {
    /// Multiplies the projection Ω, row-major `(M, D)`, by `D^-1/4`.
    pub(super) fn new(projection: &[f32], d: usize) -> Self {
        let m = projection.len() / d;
        let scale = input_scale(d);
        let (row, column) = (padded(d), padded(m));
        let (mut rows, mut columns) = (vec![0f32; m * row], vec![0f32; d * column]);
        for r in 0..m {
            for i in 0..d {
                let entry = (f64::from(projection[r * d + i]) * scale) as f32;
                rows[r * row + i] = entry;
                columns[i * column + r] = entry;
            }
        }
        Self { rows, columns }
    }
}

impl Exponential {
    /// `projection` is Ω, row-major `(M, D)`.
    pub(crate) fn new(projection: &[f32], d: usize, hyperbolic: bool) -> Self {
        let m = projection.len() / d;
        Self { queries: Linear::new(projection, d), keys: None, m, d, hyperbolic }
    }

    /// Gives the keys of a positive map a form of their own: rows `b` `(M, D)`, weights `w` `(M)`,
    /// and `P` `(D, D)` if it is not the identity.
    pub(crate) fn with_keys(mut self, projection: &[f32], log_weights: &[f32], metric: Option<&[f32]>) -> Self {
        let metric = metric.map(|p| Metric::new(p, self.d));
        self.keys = Some(Keys { linear: Linear::new(projection, self.d), log_weights: log_weights.to_vec(), metric });
        self
    }

    /// Returns the matrix of the keys: their own, or else that of the queries.
    pub(super) fn key_rows(&self) -> &Linear {
        self.keys.as_ref().map_or(&self.queries, |keys| &keys.linear)
    }

    /// Returns the matrix `P` of the keys, or `None` where it is the identity.
    pub(super) fn metric(&self) -> Option<&Metric> {
        self.keys.as_ref().and_then(|keys| keys.metric.as_ref())
    }

    /// Returns the `M` logarithms `w` that are added to the keys' log-features, if there are any.
    pub(super) fn log_weights(&self) -> Option<&[f32]> {
        self.keys.as_ref().map(|keys| &keys.log_weights[..])
    }

    /// Returns the number of features `F`: `2M` for hyperbolic features, else `M`.
    pub(super) fn features(&self) -> usize {
        if self.hyperbolic { 2 * self.m } else { self.m }
    }

    /// The factor in `‖x‖²/2 = norm·‖q‖²`.
    pub(super) fn norm(&self) -> f32 {
        (0.5 / (self.d as f64).sqrt()) as f32
    }

    /// Computes `ω_r·(D^-1/4 x)` for `count` rows of `x` from token `start` on, into rows of `to`
    /// that are `stride` numbers apart: `M` numbers, then for a hyperbolic map their negatives.
    /// `linear` is the matrix of the queries or that of the keys ([`Self::key_rows`]).
    #[inline(always)]
    pub(super) fn project<S: Simd>(
        &self,
        simd: S,
        linear: &Linear,
        x: &Rows,
        Span { start, count }: Span,
        (to, stride): (&mut [f32], usize),
        scratch: &mut Scratch,
    ) {
        let (rows, from) = x.read(start, count, &mut scratch.rows);
        let width = padded(self.m);
        let right = Right { values: &linear.columns, stride: width };
        if !self.hyperbolic {
            gemm(simd, Accumulate::No, [count, width, self.d], Left::rows(rows, from), right, to, stride);
            return;
        }
        let tile = at_least(&mut scratch.tile, count * width);
        gemm(simd, Accumulate::No, [count, width, self.d], Left::rows(rows, from), right, tile, width);
        for (to, row) in to.chunks_exact_mut(stride).zip(tile.chunks_exact(width)) {
            let (plus, minus) = to[..2 * self.m].split_at_mut(self.m);
            plus.copy_from_slice(&row[..self.m]);
            minus.iter_mut().zip(row).for_each(|(minus, plus)| *minus = -plus);
        }
    }
}

/// `LinearGradient` is the gradient of the map's parameters for queries or for keys, summed over
/// tokens.
#[derive(Clone, Debug)]
pub(super) struct LinearGradient {
    /// The gradient of `D^-1/4 Ω`: `M` rows, padded to whole vectors.
    pub(super) rows: Vec<f32>,
    /// The gradient of `w`, which is added to the log-features of keys: `M` numbers.
    pub(super) log_weights: Vec<f32>,
}

impl LinearGradient {
    pub(super) fn new(m: usize, d: usize) -> Self {
        Self { rows: vec![0.0; m * padded(d)], log_weights: vec![0.0; m] }
    }

    /// Adds `l x` to the gradient `rows`. `l` `(M, count)` are the gradients of the log-features of
    /// `count` tokens, a token a column, and `x` are their rows of queries or keys, `(count, D)`.
    #[inline(always)]
    pub(super) fn add<S: Simd>(
        &mut self,
        simd: S,
        l: Left,
        x: &Rows,
        Span { start, count }: Span,
        scratch: &mut Vec<f32>,
    ) {
        let width = padded(x.width);
        if scratch.is_empty() {
            scratch.resize(CHUNK * width, 0.0);
        }
        x.copy(start, count, scratch, width);
        let right = Right { values: scratch, stride: width };
        gemm(simd, Accumulate::Yes, [self.log_weights.len(), width, count], l, right, &mut self.rows, width);
    }
}

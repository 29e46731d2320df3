//! Features of a tile of rows, computed in the kernel or read where they come ready, and their gradients.

use std::sync::Arc;

use pulp::Simd;

use super::super::{
    gemm::{Into, Left, Right, gemm},
    rows::Rows,
    vector::{LANES, add, add_square, affine, shift, subtract, sum},
};
use super::{CHUNK, padded};

/// Where features come from.
#[derive(Clone, Debug)]
pub(crate) enum Map {
    /// Computed from rows of queries and keys.
    Exponential(Arc<Exponential>),
    /// Rows are log-features: `(.., F)`.
    Log {
        /// `F`.
        features: usize,
    },
    /// Rows are feature values; those of keys have their log-scale as one more number: `(.., F)` and `(.., F + 1)`.
    Signed {
        /// `F`.
        features: usize,
    },
}

/// `log φ(x)_r = ±ω_r·x − ‖x‖²/2 − ln(F)/2` with `x = D^-1/4 q`: positive (`+`) or hyperbolic (`±`) features. Keys may have a form of their
/// own: `ω_r·y + b_r − ‖Py‖²/2`.
#[derive(Clone, Debug)]
pub(crate) struct Exponential {
    queries: Linear,
    keys: Option<Keys>,
    m: usize,
    d: usize,
    hyperbolic: bool,
}

/// What differs for keys.
#[derive(Clone, Debug)]
struct Keys {
    linear: Linear,
    /// `b`: `M`.
    log_weights: Vec<f32>,
    metric: Option<Metric>,
}

/// `P` and `PᵀP`, where `P` is not the identity: `D` rows, padded to whole vectors.
#[derive(Clone, Debug)]
struct Metric {
    rows: Vec<f32>,
    square: Vec<f32>,
}

impl Metric {
    /// `p`: row-major `(D, D)`.
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

/// `D^-1/4 Ω`.
#[derive(Clone, Debug)]
struct Linear {
    /// `M` rows, padded to whole vectors.
    rows: Vec<f32>,
    /// Its transpose: `D` rows.
    columns: Vec<f32>,
}

impl Linear {
    fn new(projection: &[f32], d: usize) -> Self {
        let m = projection.len() / d;
        let scale = (d as f64).powf(-0.25);
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
    /// `projection`: Ω, row-major `(M, D)`.
    pub(crate) fn new(projection: &[f32], d: usize, hyperbolic: bool) -> Self {
        let m = projection.len() / d;
        Self { queries: Linear::new(projection, d), keys: None, m, d, hyperbolic }
    }

    /// Positive features with a form of their own for the keys: rows `(M, D)`, weights `b` `(M)`, and `P` `(D, D)` if it is not the
    /// identity.
    pub(crate) fn with_keys(mut self, projection: &[f32], log_weights: &[f32], metric: Option<&[f32]>) -> Self {
        let metric = metric.map(|p| Metric::new(p, self.d));
        self.keys = Some(Keys { linear: Linear::new(projection, self.d), log_weights: log_weights.to_vec(), metric });
        self
    }

    fn key_rows(&self) -> &Linear {
        self.keys.as_ref().map_or(&self.queries, |keys| &keys.linear)
    }

    fn metric(&self) -> Option<&Metric> {
        self.keys.as_ref().and_then(|keys| keys.metric.as_ref())
    }

    fn log_weights(&self) -> Option<&[f32]> {
        self.keys.as_ref().map(|keys| &keys.log_weights[..])
    }

    fn features(&self) -> usize {
        if self.hyperbolic { 2 * self.m } else { self.m }
    }

    /// `‖x‖²/2 = norm·‖q‖²`.
    fn norm(&self) -> f32 {
        (0.5 / (self.d as f64).sqrt()) as f32
    }

    /// `±ω·x` of rows of `x`, a row of features each.
    #[inline(always)]
    fn project<S: Simd>(
        &self,
        simd: S,
        linear: &Linear,
        x: &Rows,
        [start, count]: [usize; 2],
        (to, stride): (&mut [f32], usize),
        scratch: &mut Scratch,
    ) {
        let (rows, from) = x.read(start, count, &mut scratch.rows);
        let width = padded(self.m);
        let right = Right { values: &linear.columns, stride: width };
        if !self.hyperbolic {
            gemm(simd, Into::Zero, [count, width, self.d], Left::rows(rows, from), right, to, stride);
            return;
        }
        let tile = at_least(&mut scratch.tile, count * width);
        gemm(simd, Into::Zero, [count, width, self.d], Left::rows(rows, from), right, tile, width);
        for (to, row) in to.chunks_exact_mut(stride).zip(tile.chunks_exact(width)) {
            let (plus, minus) = to[..2 * self.m].split_at_mut(self.m);
            plus.copy_from_slice(&row[..self.m]);
            minus.iter_mut().zip(row).for_each(|(minus, plus)| *minus = -plus);
        }
    }
}

/// Memory that the maps work in.
#[derive(Clone, Debug, Default)]
pub(super) struct Scratch {
    rows: Vec<f32>,
    tile: Vec<f32>,
    turned: Vec<f32>,
    /// Rows padded to whole vectors: beyond their numbers they stay 0.
    padded: Vec<f32>,
}

/// Gradient of one side's linear map, summed over tokens.
#[derive(Clone, Debug)]
pub(super) struct LinearGradient {
    /// Of `D^-1/4 Ω`: `M` rows, padded to whole vectors.
    pub(super) rows: Vec<f32>,
    /// Of what is added to log-features of keys: `M`.
    pub(super) log_weights: Vec<f32>,
}

impl LinearGradient {
    pub(super) fn new(m: usize, d: usize) -> Self {
        Self { rows: vec![0.0; m * padded(d)], log_weights: vec![0.0; m] }
    }

    /// Adds `lᵀ x` for log-features' gradients `l` and rows `x`.
    #[inline(always)]
    fn add<S: Simd>(&mut self, simd: S, l: Left, x: &Rows, [start, count]: [usize; 2], scratch: &mut Vec<f32>) {
        let width = padded(x.width);
        if scratch.is_empty() {
            scratch.resize(CHUNK * width, 0.0);
        }
        x.copy(start, count, scratch, width);
        let right = Right { values: scratch, stride: width };
        gemm(simd, Into::Sum, [self.log_weights.len(), width, count], l, right, &mut self.rows, width);
    }
}

/// At least `len` numbers to overwrite.
fn at_least(v: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if v.len() < len {
        v.resize(len, 0.0);
    }
    &mut v[..len]
}

impl Map {
    /// `F`.
    pub(crate) fn features(&self) -> usize {
        match self {
            Self::Exponential(e) => e.features(),
            Self::Log { features } | Self::Signed { features } => *features,
        }
    }

    pub(super) fn is_signed(&self) -> bool {
        matches!(self, Self::Signed { .. })
    }

    /// Scales a tile keeps: one a feature, or one for all where features are signed.
    pub(crate) fn scales(&self) -> usize {
        if self.is_signed() { 1 } else { self.features() }
    }

    /// Features of keys, a feature a row: log-features, or values with their log-scales in `scale`. `hidden[j]` is 0 where
    /// key `j` of the tile counts and `∞` where it does not.
    #[inline(always)]
    pub(super) fn keys<S: Simd>(
        &self,
        simd: S,
        k: &Rows,
        [start, count]: [usize; 2],
        hidden: &[f32; CHUNK],
        (to, scale): (&mut [f32], &mut [f32; CHUNK]),
        scratch: &mut Scratch,
    ) {
        let width = padded(count);
        match self {
            Self::Exponential(e) => {
                let x = at_least(&mut scratch.tile, e.d * CHUNK);
                for row in x.chunks_exact_mut(CHUNK) {
                    row[count / LANES * LANES..width].fill(0.0);
                }
                k.copy_transposed(start, count, x, CHUNK, &mut scratch.rows);
                // What a hidden key holds must not come back as ∞ − ∞.
                for (j, _) in hidden.iter().enumerate().take(count).filter(|(_, hidden)| **hidden > 0.0) {
                    x.iter_mut().skip(j).step_by(CHUNK).for_each(|x| *x = 0.0);
                }
                let right = Right { values: x, stride: CHUNK };
                gemm(
                    simd,
                    Into::Zero,
                    [e.m, width, e.d],
                    Left::rows(&e.key_rows().rows, padded(e.d)),
                    right,
                    to,
                    CHUNK,
                );
                let offset = scale;
                offset.fill(0.0);
                let squared = match e.metric() {
                    None => x,
                    Some(metric) => {
                        let turned = at_least(&mut scratch.turned, e.d * CHUNK);
                        let left = Left::rows(&metric.rows, padded(e.d));
                        gemm(simd, Into::Zero, [e.d, width, e.d], left, right, turned, CHUNK);
                        turned
                    }
                };
                for row in squared.chunks_exact(CHUNK) {
                    add_square(simd, &mut offset[..width], &row[..width]);
                }
                affine(simd, &mut offset[..width], e.norm(), 0.5 * (e.features() as f32).ln());
                add(simd, &mut offset[..width], &hidden[..width]);
                if e.hyperbolic {
                    let (plus, minus) = to.split_at_mut(e.m * CHUNK);
                    for (plus, minus) in plus.chunks_exact(CHUNK).zip(minus.chunks_exact_mut(CHUNK)) {
                        for ((minus, &plus), &offset) in minus[..width].iter_mut().zip(plus).zip(&offset[..width]) {
                            *minus = -plus - offset;
                        }
                    }
                }
                for row in to.chunks_exact_mut(CHUNK).take(e.m) {
                    subtract(simd, &mut row[..width], &offset[..width]);
                }
                if let Some(weights) = e.log_weights() {
                    for (row, &weight) in to.chunks_exact_mut(CHUNK).zip(weights) {
                        shift(simd, &mut row[..width], weight);
                    }
                }
            }
            Self::Log { features } => {
                k.copy_transposed(start, count, to, CHUNK, &mut scratch.rows);
                for row in to.chunks_exact_mut(CHUNK).take(*features) {
                    row[count..width].fill(0.0);
                    subtract(simd, &mut row[..width], &hidden[..width]);
                }
            }
            Self::Signed { features } => {
                // Values of a hidden key are finite, its scale −∞.
                let all = at_least(&mut scratch.tile, (features + 1) * CHUNK);
                k.copy_transposed(start, count, all, CHUNK, &mut scratch.rows);
                for row in all.chunks_exact_mut(CHUNK) {
                    row[count..width].fill(0.0);
                }
                to[..features * CHUNK].copy_from_slice(&all[..features * CHUNK]);
                for ((scale, &s), &hidden) in scale.iter_mut().zip(&all[features * CHUNK..]).zip(hidden).take(width) {
                    *scale = s - hidden;
                }
            }
        }
    }

    /// Features of queries, a query a row of `padded(F)`: log-features up to a constant of the row, or values.
    #[inline(always)]
    pub(super) fn queries<S: Simd>(
        &self,
        simd: S,
        q: &Rows,
        [start, count]: [usize; 2],
        to: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let stride = padded(self.features());
        let Self::Exponential(e) = self else { return q.copy(start, count, to, stride) };
        e.project(simd, &e.queries, q, [start, count], (to, stride), scratch);
    }

    /// Features of the one key of `k`: log-features, or values; returns the log-scale of the latter.
    #[inline(always)]
    pub(super) fn key<S: Simd>(&self, simd: S, k: &Rows, to: &mut [f32], scratch: &mut Scratch) -> f32 {
        match self {
            Self::Exponential(e) => {
                e.project(simd, e.key_rows(), k, [0, 1], (&mut *to, padded(e.features())), scratch);
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

    /// Gradient of the queries' rows from that of their features (`dl`, laid out as [`Self::queries`] does). `linear`: that of a positive
    /// map's own rows, to be added to.
    #[inline(always)]
    pub(super) fn query_gradients<S: Simd>(
        &self,
        simd: S,
        dl: &mut [f32],
        q: &Rows,
        [start, count]: [usize; 2],
        to: &mut [f32],
        linear: Option<&mut LinearGradient>,
        scratch: &mut Scratch,
    ) {
        let stride = padded(self.features());
        let Self::Exponential(e) = self else {
            let f = self.features();
            for (to, dl) in to.chunks_exact_mut(f).zip(dl.chunks_exact(stride)).take(count) {
                to.copy_from_slice(&dl[..f]);
            }
            return;
        };
        if e.hyperbolic {
            for dl in dl.chunks_exact_mut(stride).take(count) {
                let (plus, minus) = dl.split_at_mut(e.m);
                plus.iter_mut().zip(minus).for_each(|(plus, minus)| *plus -= *minus);
            }
        }
        if let Some(linear) = linear {
            linear.add(simd, Left::transposed(dl, stride), q, [start, count], &mut scratch.padded);
        }
        let width = padded(e.d);
        let tile = at_least(&mut scratch.tile, count * width);
        let right = Right { values: &e.queries.rows, stride: width };
        // ‖x‖²/2 scales a whole row of features and has no part in the gradient.
        gemm(simd, Into::Zero, [count, width, e.m], Left::rows(dl, stride), right, tile, width);
        for (to, row) in to.chunks_exact_mut(e.d).zip(tile.chunks_exact(width)) {
            to.copy_from_slice(&row[..e.d]);
        }
    }

    /// Gradient of the keys' rows from that of their features, a feature a row; `scale` is that of the log-scales. `linear` as for queries.
    #[inline(always)]
    pub(super) fn key_gradients<S: Simd>(
        &self,
        simd: S,
        (dl, scale): (&mut [f32], &[f32; CHUNK]),
        k: &Rows,
        [start, count]: [usize; 2],
        to: &mut [f32],
        linear: Option<&mut LinearGradient>,
        scratch: &mut Scratch,
    ) {
        let Self::Exponential(e) = self else {
            let (f, width) = (self.features(), k.width);
            for (j, to) in to.chunks_exact_mut(width).enumerate().take(count) {
                to[..f].iter_mut().zip(dl.iter().skip(j).step_by(CHUNK)).for_each(|(to, dl)| *to = *dl);
                to[f..].fill(scale[j]);
            }
            return;
        };
        let columns = padded(count);
        let mut total = [0f32; CHUNK];
        for dl in dl.chunks_exact(CHUNK) {
            add(simd, &mut total[..columns], &dl[..columns]);
        }
        if e.hyperbolic {
            let (plus, minus) = dl.split_at_mut(e.m * CHUNK);
            subtract(simd, plus, &minus[..e.m * CHUNK]);
        }
        if let Some(linear) = linear {
            linear.add(simd, Left::rows(dl, CHUNK), k, [start, count], &mut scratch.padded);
            for (weight, dl) in linear.log_weights.iter_mut().zip(dl.chunks_exact(CHUNK)) {
                *weight += sum(simd, &dl[..columns]);
            }
        }
        let width = padded(e.d);
        let tile = at_least(&mut scratch.tile, count * width);
        let right = Right { values: &e.key_rows().rows, stride: width };
        gemm(simd, Into::Zero, [count, width, e.m], Left::transposed(dl, CHUNK), right, tile, width);
        let norm = 2.0 * e.norm();
        let (mut rows, mut from) = k.read(start, count, &mut scratch.rows);
        if let Some(metric) = e.metric() {
            let turned = at_least(&mut scratch.turned, count * width);
            let right = Right { values: &metric.square, stride: width };
            gemm(simd, Into::Zero, [count, width, e.d], Left::rows(rows, from), right, turned, width);
            (rows, from) = (turned, width);
        }
        for (j, (to, row)) in to.chunks_exact_mut(e.d).zip(tile.chunks_exact(width)).enumerate() {
            let factor = norm * total[j];
            for ((to, &row), &k) in to.iter_mut().zip(row).zip(&rows[j * from..]) {
                *to = row - factor * k;
            }
        }
    }
}

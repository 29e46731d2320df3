//! Polynomial features of the second degree, computed inside the fused kernels.

use super::super::{
    rows::{Rows, Span},
    transpose::transpose,
};
use super::{
    CHUNK,
    map::{Scratch, load_columns},
    padded,
};
use crate::projection::input_scale;

/// `Quadratic` is the map `φ(x) = [1, x_i, √c x_i² or √(2c) x_i x_j]` with `i < j` and a number
/// `c`, of queries `x = D^-1/4 q` and keys `y = D^-1/4 k`. Its kernel is
/// `φ(x)·φ(y) = 1 + z + c z²` with `z = x·y = q·k/√D`.
///
/// Squares and products stand in lexicographic order of `(i, j)`, as in
/// [`Taylor2`](crate::features::Taylor2), so a state has one order of features whichever made it.
#[derive(Clone, Debug)]
pub(crate) struct Quadratic {
    pub(super) d: usize,
    /// `D^-1/4`.
    scale: f32,
    /// The factor of a product, `√(2c)`.
    product: f32,
    /// The factor of a square, `√c`.
    square: f32,
}

impl Quadratic {
    /// Makes the map for heads of `d` numbers; `second` is `c`, the coefficient of `z²`.
    pub(crate) fn new(d: usize, second: f64) -> Self {
        Self { d, scale: input_scale(d) as f32, product: (2.0 * second).sqrt() as f32, square: second.sqrt() as f32 }
    }

    /// The number of features, `1 + D + D(D+1)/2`.
    pub(super) fn features(&self) -> usize {
        1 + self.d + self.d * (self.d + 1) / 2
    }

    fn factor(&self, i: usize, j: usize) -> f32 {
        if i == j { self.square } else { self.product }
    }

    /// The pairs `i ≤ j` in the order of their features.
    fn pairs(&self) -> impl Iterator<Item = (usize, usize)> {
        let d = self.d;
        (0..d).flat_map(move |i| (i..d).map(move |j| (i, j)))
    }

    /// Computes the features of the first `columns` columns of `x` `(D, CHUNK)`, which is scaled in
    /// place: a feature a row, `(F, CHUNK)`.
    #[inline(always)]
    pub(super) fn columns(&self, x: &mut [f32], columns: usize, to: &mut [f32]) {
        let (first, products) = to.split_at_mut((1 + self.d) * CHUNK);
        let (ones, linear) = first.split_at_mut(CHUNK);
        ones[..columns].fill(1.0);
        for (x, linear) in x.chunks_exact_mut(CHUNK).zip(linear.chunks_exact_mut(CHUNK)) {
            for (x, linear) in x[..columns].iter_mut().zip(linear) {
                *x *= self.scale;
                *linear = *x;
            }
        }
        for ((i, j), to) in self.pairs().zip(products.chunks_exact_mut(CHUNK)) {
            let factor = self.factor(i, j);
            let (a, b) = (&x[i * CHUNK..][..columns], &x[j * CHUNK..][..columns]);
            for ((to, a), b) in to[..columns].iter_mut().zip(a).zip(b) {
                *to = factor * a * b;
            }
        }
    }

    /// Computes the gradients of rows from those of their features: `d` `(F, CHUNK)` and scaled `x`
    /// `(D, CHUNK)` → `to` `(D, CHUNK)`.
    #[inline(always)]
    fn gradients(&self, d: &[f32], x: &[f32], columns: usize, to: &mut [f32]) {
        let (linear, products) = d[CHUNK..].split_at(self.d * CHUNK);
        for (to, linear) in to.chunks_exact_mut(CHUNK).zip(linear.chunks_exact(CHUNK)) {
            to[..columns].copy_from_slice(&linear[..columns]);
        }
        for ((i, j), d) in self.pairs().zip(products.chunks_exact(CHUNK)) {
            let factor = self.factor(i, j);
            let (mut a, mut b) = ([0f32; CHUNK], [0f32; CHUNK]);
            a[..columns].copy_from_slice(&x[i * CHUNK..][..columns]);
            b[..columns].copy_from_slice(&x[j * CHUNK..][..columns]);
            // Where i = j both additions are due: the derivative of x² is 2x.
            for ((to, d), b) in to[i * CHUNK..][..columns].iter_mut().zip(d).zip(&b) {
                *to += factor * d * b;
            }
            for ((to, d), a) in to[j * CHUNK..][..columns].iter_mut().zip(d).zip(&a) {
                *to += factor * d * a;
            }
        }
        for to in to.chunks_exact_mut(CHUNK).take(self.d) {
            to[..columns].iter_mut().for_each(|to| *to *= self.scale);
        }
    }

    /// Computes the features of rows, a row of `padded(F)` numbers for each, with 0 in the padding.
    #[inline(always)]
    pub(super) fn rows(&self, x: &Rows, Span { start, count }: Span, to: &mut [f32], scratch: &mut Scratch) {
        let (f, width, columns) = (self.features(), padded(self.features()), padded(count));
        let ([turned, features, _], rows) = scratch.columns(self.d, f);
        load_columns(x, Span { start, count }, turned, rows);
        self.columns(turned, columns, features);
        transpose(features, CHUNK, [f, count], to, width);
        for row in to.chunks_exact_mut(width).take(count) {
            row[f..].fill(0.0);
        }
    }

    /// Computes the features of the only row of `x`.
    #[inline(always)]
    pub(super) fn row(&self, x: &Rows, to: &mut [f32], scratch: &mut Vec<f32>) {
        let (x, _) = x.read(0, 1, scratch);
        let (first, products) = to.split_at_mut(1 + self.d);
        first[0] = 1.0;
        for (to, x) in first[1..].iter_mut().zip(x) {
            *to = x * self.scale;
        }
        for ((i, j), to) in self.pairs().zip(products) {
            *to = self.factor(i, j) * first[1 + i] * first[1 + j];
        }
    }

    /// Computes the gradients of rows of queries, whose features' gradients `d` are laid out as
    /// [`Self::rows`] writes features: → `to` `(count, D)`.
    #[inline(always)]
    pub(super) fn row_gradients(
        &self,
        d: &[f32],
        (x, Span { start, count }): (&Rows, Span),
        to: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let (f, width, columns) = (self.features(), padded(self.features()), padded(count));
        let ([turned, features, gradients], rows) = scratch.columns(self.d, f);
        transpose(d, width, [count, f], features, CHUNK);
        for row in features.chunks_exact_mut(CHUNK) {
            row[count..columns].fill(0.0);
        }
        self.scaled(x, Span { start, count }, turned, rows);
        self.gradients(features, turned, columns, gradients);
        transpose(gradients, CHUNK, [self.d, count], to, self.d);
    }

    /// Computes the gradients of rows of keys, whose features' gradients `d` have a feature a row,
    /// `(F, CHUNK)`: → `to` `(count, D)`.
    #[inline(always)]
    pub(super) fn column_gradients(
        &self,
        d: &[f32],
        (x, Span { start, count }): (&Rows, Span),
        to: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let ([turned, _, gradients], rows) = scratch.columns(self.d, 0);
        self.scaled(x, Span { start, count }, turned, rows);
        self.gradients(d, turned, padded(count), gradients);
        transpose(gradients, CHUNK, [self.d, count], to, self.d);
    }

    /// Loads rows of `x` as columns, and scales them.
    #[inline(always)]
    fn scaled(&self, x: &Rows, span: Span, to: &mut [f32], rows: &mut Vec<f32>) {
        load_columns(x, span, to, rows);
        to.iter_mut().for_each(|to| *to *= self.scale);
    }
}

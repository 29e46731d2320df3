//! ReLU features, computed inside the fused kernels.

use pulp::Simd;

use super::super::{
    gemm::{Accumulate, Left, Right, gemm},
    rows::{Rows, Span},
    vector::{affine, rectify, scale, where_above},
};
use super::{CHUNK, exponential::Linear, padded};

/// `Rectified` is the map `φ(x)_r = M^-½ max(ω_r·x, 0) + ε` with `x = D^-1/4 q`.
#[derive(Clone, Debug)]
pub(crate) struct Rectified {
    pub(super) linear: Linear,
    pub(super) m: usize,
    pub(super) d: usize,
    epsilon: f32,
}

impl Rectified {
    /// `projection` is Ω, row-major `(M, D)`.
    pub(crate) fn new(projection: &[f32], d: usize, epsilon: f32) -> Self {
        Self { linear: Linear::new(projection, d), m: projection.len() / d, d, epsilon }
    }

    /// The factor `M^-½`.
    fn norm(&self) -> f32 {
        (self.m as f32).sqrt().recip()
    }

    /// Turns projections `ω·x` into features, in place.
    #[inline(always)]
    pub(super) fn activate<S: Simd>(&self, simd: S, x: &mut [f32]) {
        rectify(simd, x);
        affine(simd, x, self.norm(), self.epsilon);
    }

    /// Turns gradients of the features `phi` into gradients of the projections, in place.
    #[inline(always)]
    pub(super) fn gradients<S: Simd>(&self, simd: S, d: &mut [f32], phi: &[f32]) {
        where_above(simd, d, phi, self.epsilon);
        scale(simd, d, self.norm());
    }

    /// Turns gradients of the features of keys into gradients of the projections, in place, where
    /// `phi` are features times weights.
    #[inline(always)]
    pub(super) fn weighted_gradients(&self, d: &mut [f32], phi: &[f32], weights: &[f32; CHUNK]) {
        let norm = self.norm();
        for ((d, &phi), &weight) in d.iter_mut().zip(phi).zip(weights) {
            *d = if phi > self.epsilon * weight { *d * norm } else { 0.0 };
        }
    }

    /// Computes the features of rows of `x`, a row of features for each, with 0 in the padding.
    #[inline(always)]
    pub(super) fn rows<S: Simd>(
        &self,
        simd: S,
        x: &Rows,
        Span { start, count }: Span,
        to: &mut [f32],
        scratch: &mut Vec<f32>,
    ) {
        let (rows, from) = x.read(start, count, scratch);
        let width = padded(self.m);
        let right = Right { values: &self.linear.columns, stride: width };
        gemm(simd, Accumulate::No, [count, width, self.d], Left::rows(rows, from), right, to, width);
        for row in to.chunks_exact_mut(width).take(count) {
            self.activate(simd, row);
            row[self.m..].fill(0.0);
        }
    }
}

//! FAVOR over all keys at once, bidirectional or across sequences, for one key head and the query heads of its group.
//!
//! One pass over the keys makes `S = Σ φ(k)[v, 1]`, scaled by a running maximum per feature; one over the queries reads it.
//! Backward: one pass over the queries gives `dφ(q_i) = S [dn_i, e_i]` and `R = Σ φ(q_i) [dn_i, e_i]ᵀ`, one over the keys
//! `dφ(k_j) = R [v_j, 1]` and `dv_j = Rᵀ φ(k_j)`, with `dn = g/den` and `e = −g·o/den`.

use pulp::{Simd, WithSimd};

use super::super::{
    gemm::{Into, Left, Right, gemm},
    rows::Rows,
    transpose::transpose,
};
use super::{
    CHUNK, Head, Sums,
    tile::{OutputGradient, Tile},
};

/// What the forward pass leaves to the backward pass.
#[derive(Debug, Default)]
pub(super) struct Saved {
    sums: Option<Sums>,
    /// Denominators, head by head.
    dens: Vec<f32>,
}

/// The forward pass: outputs `(G, Tq, Dv)`.
pub(super) struct Forward<'a> {
    pub(super) head: &'a Head<'a>,
    /// Over no key yet.
    pub(super) sums: Sums,
    pub(super) out: &'a mut [f32],
    pub(super) saved: &'a mut Saved,
}

impl WithSimd for Forward<'_> {
    /// Whether every input was finite; if not, the outputs mean nothing.
    type Output = bool;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> bool {
        let Self { head, mut sums, out, saved } = self;
        let dv = head.v.width;
        let mut tile = Tile::new(head);
        let mut finite = true;
        for (start, n) in chunks(head.k.tokens) {
            finite &= head.k.are_finite(start, n) & head.v.are_finite(start, n);
            tile.load_keys(simd, start, n);
            tile.raise(simd, &mut sums, n);
            tile.weigh_keys(simd, &sums.scale, n);
            tile.load_values(start, n);
            tile.add_keys(simd, n, &mut sums);
        }
        let mut weights = vec![0f32; CHUNK * tile.features];
        let mut rows = vec![0f32; CHUNK * tile.width];
        for q in &head.q {
            for (start, n) in chunks(q.tokens) {
                finite &= q.are_finite(start, n);
                tile.load_queries(simd, q, start, n, &sums.scale, &mut weights);
                tile.read_sums(simd, n, &weights, &sums, &mut rows);
                let first = saved.dens.len();
                saved.dens.extend(weights.chunks_exact(tile.features).take(n).map(|w| tile.past(simd, w, &sums)));
                tile.write(n, &rows, &saved.dens[first..], &mut out[first * dv..(first + n) * dv]);
            }
        }
        saved.sums = Some(sums);
        finite
    }
}

/// The backward pass: gradients `(G, Tq, ·)`, `(Tk, ·)`, `(Tk, Dv)`.
pub(super) struct Gradients<'a> {
    pub(super) head: &'a Head<'a>,
    pub(super) saved: &'a Saved,
    /// Outputs and their gradients, one query head after the other.
    pub(super) out: &'a [Rows<'a>],
    pub(super) grad: &'a [Rows<'a>],
    pub(super) dq: &'a mut [f32],
    pub(super) dk: &'a mut [f32],
    pub(super) dv: &'a mut [f32],
}

impl WithSimd for Gradients<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { head, saved, out, grad, dq, dk, dv } = self;
        let Some(sums) = &saved.sums else { return };
        let mut tile = Tile::new(head);
        let (f, width, features, vd) = (head.map.features(), tile.width, tile.features, head.v.width);
        let mut future = Sums::new(f, head.map.scales(), vd);
        let mut weights = vec![0f32; CHUNK * features];
        let mut dphi = vec![0f32; CHUNK * features];
        let mut output = OutputGradient::new(vd);
        let mut columns = vec![0f32; width * features];
        transpose(&sums.sums, width, [f, vd], &mut columns, features);
        for (g, q) in head.q.iter().enumerate() {
            for (start, n) in chunks(q.tokens) {
                tile.load_queries(simd, q, start, n, &sums.scale, &mut weights);
                output.load(simd, &out[g], &grad[g], &saved.dens[g * q.tokens..], [start, n]);
                let right = Right { values: &columns, stride: features };
                gemm(simd, Into::Zero, [n, features, vd], Left::rows(&output.dn, width), right, &mut dphi, features);
                tile.add_output_gradient(simd, n, &weights, &output, &mut future);
                tile.query_logs(simd, n, &weights, &output, &sums.norm, &mut dphi);
                let to = &mut dq[(g * q.tokens + start) * q.width..][..n * q.width];
                head.map.query_gradients(simd, &mut dphi, n, to, &mut tile.scratch);
            }
        }
        let mut dphi = vec![0f32; f * CHUNK];
        let mut rows = vec![0f32; CHUNK * width];
        let mut values = vec![0f32; width * CHUNK];
        for (start, n) in chunks(head.k.tokens) {
            tile.load_keys(simd, start, n);
            tile.weigh_keys(simd, &sums.scale, n);
            tile.load_values(start, n);
            tile.transpose_values(n, &mut values);
            tile.read_future(simd, n, &values, &future, &mut rows, &mut dphi);
            tile.write_key_gradients(simd, [start, n], &rows, &mut dphi, dk, dv);
        }
    }
}

/// First token and length of each chunk.
fn chunks(tokens: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..tokens).step_by(CHUNK).map(move |start| (start, CHUNK.min(tokens - start)))
}

//! The backward pass of the cross-entropy, in two halves: what belongs to each hidden state, and
//! then the gradient of the head, which is a sum over all of them.

use pulp::{Simd, WithSimd};

use super::{ROWS, Soft, Tiles, Weights, block, blocks};
use crate::kernels::{
    gemm::{Accumulate, Left, gemm},
    padded,
    rows::{Matrix, Span},
    vector::{exp_minus_each, multiply, subtract},
};

/// `OfStates` is the first half of the backward pass, for some of the hidden states: the gradients
/// of their logits, and by these their own.
pub(super) struct OfStates<'a> {
    pub(super) tiles: Tiles<'a>,
    pub(super) soft: Option<Soft<'a>>,
    /// What the forward pass kept of these states, if it did.
    pub(super) weights: Vec<Weights>,
    pub(super) grad: &'a [f32],
    pub(super) logs: &'a [f32],
    pub(super) dx: &'a mut [f32],
}

impl WithSimd for OfStates<'_> {
    /// The gradients of the logits, over all tiles, and over all blocks in each tile.
    type Output = Vec<Vec<f32>>;

    /// Computes `dlogits = g_i (softmax − (1 − share) onehot(target) − share softmax')` tile by
    /// tile, and from it the gradients of hidden states.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Vec<Vec<f32>> {
        let Self { tiles, mut soft, weights, grad, logs, dx } = self;
        let share = soft.as_ref().map_or(0.0, |soft| soft.share);
        let head = tiles.head;
        let width = padded(head.e);
        let mut rows = vec![0f32; grad.len() * width];
        let mut weights = weights.into_iter();
        let mut all = Vec::new();
        for v in head.starts() {
            let tokens = head.len(v);
            for Span { start: i, count: n } in tiles.blocks() {
                let (log, factor) = (block(logs, i, f32::INFINITY), block(grad, i, 0.0));
                let mut logits = match weights.next() {
                    Some((mut weights, mut scale)) => {
                        exp_minus_each(simd, &mut scale, &log);
                        multiply(simd, &mut scale, &factor);
                        for row in weights.chunks_exact_mut(ROWS) {
                            multiply(simd, row, &scale);
                        }
                        weights
                    }
                    None => {
                        let mut logits = vec![0f32; tokens * ROWS];
                        tiles.compute(simd, i, v, &mut logits);
                        for row in logits.chunks_exact_mut(ROWS) {
                            exp_minus_each(simd, row, &log);
                            multiply(simd, row, &factor);
                        }
                        logits
                    }
                };
                for (row, &target) in tiles.targets[i..i + n].iter().enumerate() {
                    let target = target as usize;
                    if (v..v + tokens).contains(&target) {
                        logits[(target - v) * ROWS + row] -= (1.0 - share) * factor[row];
                    }
                }
                if let Some(soft) = &mut soft {
                    let factor = factor.map(|g| share * g);
                    let shares = soft.compute(simd, i, v);
                    for (row, shares) in logits.chunks_exact_mut(ROWS).zip(shares.chunks_exact_mut(ROWS)) {
                        multiply(simd, shares, &factor);
                        subtract(simd, row, shares);
                    }
                }
                let left = Left::transposed(&logits, ROWS);
                gemm(simd, Accumulate::Yes, [n, width, tokens], left, head.w.right(v), &mut rows[i * width..], width);
                all.push(logits);
            }
        }
        for (dx, row) in dx.chunks_exact_mut(head.e).zip(rows.chunks_exact(width)) {
            dx.copy_from_slice(&row[..head.e]);
        }
        all
    }
}

/// `OfHead` is the second half of the backward pass, for some of the tokens of one tile: what
/// hidden states add to the gradient of the head.
pub(super) struct OfHead<'a> {
    /// The hidden states and what [`OfStates`] returned of them.
    pub(super) states: &'a Matrix<'a>,
    pub(super) dlogits: &'a [(Span, Vec<Vec<f32>>)],
    /// The number of the tile, and the first of the tokens in it.
    pub(super) tile: usize,
    pub(super) first: usize,
    /// The gradient of these tokens' rows of the head, padded.
    pub(super) dw: &'a mut [f32],
    pub(super) width: usize,
}

impl WithSimd for OfHead<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { states, dlogits, tile, first, dw, width } = self;
        let tokens = dw.len() / width;
        for (span, tiles) in dlogits {
            let of_tile = &tiles[tile * span.count.div_ceil(ROWS)..];
            for (Span { start: i, count: n }, logits) in blocks(span.count).zip(of_tile) {
                let left = Left::rows(&logits[first * ROWS..], ROWS);
                gemm(simd, Accumulate::Yes, [tokens, width, n], left, states.right(span.start + i), dw, width);
            }
        }
    }
}

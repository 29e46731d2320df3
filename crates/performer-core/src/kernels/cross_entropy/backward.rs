//! The backward pass of the cross-entropy, in two halves: what belongs to each hidden state, and
//! then the gradient of the head, which is a sum over all of them.

use std::{mem::take, ops::Range};

use pulp::{Simd, WithSimd};

use super::{ROWS, Soft, Tiles, Weights, block, blocks};
use crate::kernels::{
    gemm::{Accumulate, Left, gemm},
    padded,
    rows::{Matrix, Span},
    vector::{exp_minus_each, multiply, subtract},
};

/// `States` is some of the hidden states, with all that their gradients are computed from.
pub(super) struct States<'a> {
    pub(super) span: Span,
    pub(super) tiles: Tiles<'a>,
    pub(super) soft: Option<Soft<'a>>,
    /// What the forward pass kept of these states, over all tiles and over all blocks in each tile,
    /// if it kept it.
    pub(super) kept: Vec<Weights>,
    pub(super) grad: &'a [f32],
    pub(super) logs: &'a [f32],
    /// The gradients of the states so far, in padded rows.
    pub(super) rows: &'a mut [f32],
}

impl States<'_> {
    /// The states of these blocks.
    pub(super) fn span_of(&self, blocks: Range<usize>) -> Span {
        let (start, end) = (blocks.start * ROWS, (blocks.end * ROWS).min(self.span.count));
        Span { start: self.span.start + start, count: end.saturating_sub(start) }
    }
}

/// `OfStates` is the first half of the backward pass, for some blocks of hidden states and one tile
/// of the vocabulary, which begins with token `v`: it computes the gradients of their logits, and
/// adds what follows from them to the gradients of the states.
pub(super) struct OfStates<'s, 'a> {
    pub(super) states: &'s mut States<'a>,
    pub(super) tile: usize,
    pub(super) v: usize,
    pub(super) blocks: Range<usize>,
}

impl WithSimd for OfStates<'_, '_> {
    /// The gradients of the logits of each block.
    type Output = Vec<Vec<f32>>;

    /// Computes `dlogits = g_i (softmax − (1 − share) onehot(target) − share softmax')`, and adds
    /// `dlogitsᵀ W` to the gradients of hidden states.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Vec<Vec<f32>> {
        let Self { states, tile, v, blocks } = self;
        let States { tiles, soft, kept, grad, logs, rows, .. } = states;
        let share = soft.as_ref().map_or(0.0, |soft| soft.share);
        let head = tiles.head;
        let (width, tokens) = (padded(head.e), head.len(v));
        let mut all = Vec::with_capacity(blocks.len());
        for (b, Span { start: i, count: n }) in tiles.blocks().enumerate().take(blocks.end).skip(blocks.start) {
            let (log, factor) = (block(logs, i, f32::INFINITY), block(grad, i, 0.0));
            let mut logits = match kept.get_mut(tile * tiles.blocks().count() + b) {
                Some((weights, scale)) => {
                    exp_minus_each(simd, scale, &log);
                    multiply(simd, scale, &factor);
                    let mut weights = take(weights);
                    for row in weights.chunks_exact_mut(ROWS) {
                        multiply(simd, row, scale);
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
            if let Some(soft) = soft {
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
        all
    }
}

/// `OfHead` is the second half of the backward pass, for some tokens of a tile: what hidden states
/// add to the gradient of the head.
pub(super) struct OfHead<'a> {
    /// All hidden states, and what [`OfStates`] returned for some of them.
    pub(super) states: &'a Matrix<'a>,
    pub(super) dlogits: &'a [(Span, Vec<Vec<f32>>)],
    /// The first of the tokens, counted in the tile.
    pub(super) first: usize,
    /// The gradient of these tokens' rows of the head, padded.
    pub(super) dw: &'a mut [f32],
    pub(super) width: usize,
}

impl WithSimd for OfHead<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { states, dlogits, first, dw, width } = self;
        let tokens = dw.len() / width;
        for (span, of_blocks) in dlogits {
            for (Span { start: i, count: n }, logits) in blocks(span.count).zip(of_blocks) {
                let left = Left::rows(&logits[first * ROWS..], ROWS);
                gemm(simd, Accumulate::Yes, [tokens, width, n], left, states.right(span.start + i), dw, width);
            }
        }
    }
}

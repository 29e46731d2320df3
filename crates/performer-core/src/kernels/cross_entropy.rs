//! Cross-entropy of a linear head, from hidden states: the logits, the largest tensor of a language model's step, are made in tiles
//! that stay in the cache, forward and again backward, and never as a whole.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};
use std::sync::{Mutex, PoisonError};

use pulp::{Arch, Simd, WithSimd};

use super::{
    contiguous,
    gemm::{Into, Left, Right, gemm},
    padded,
    rows::{Heads, Matrix},
    transpose::transpose,
    vector::{add, exp_minus_each, max_each, multiply},
    with_storages,
};

/// Rows of hidden states of a tile.
const ROWS: usize = 64;
/// Tokens of the vocabulary of a tile.
const TOKENS: usize = 1024;

/// `−log softmax(W x_i)[target_i]` for hidden states `x` `(N, E)` and a head `W` `(V, E)`.
pub(crate) struct CrossEntropy {
    targets: Vec<u32>,
    /// Logarithms of the denominators, `(N)`, for the backward pass.
    logs: Mutex<Vec<f32>>,
}

impl CrossEntropy {
    pub(crate) fn new(targets: &[u32]) -> Self {
        Self { targets: targets.to_vec(), logs: Mutex::new(Vec::new()) }
    }
}

/// Tiles of logits: a token of the vocabulary a row, a hidden state a column.
struct Tiles<'a> {
    x: &'a [f32],
    w: Matrix<'a>,
    e: usize,
    vocabulary: usize,
    targets: &'a [u32],
    columns: Vec<f32>,
    logits: Vec<f32>,
}

impl<'a> Tiles<'a> {
    fn new(x: &'a [f32], w: &'a [f32], e: usize, targets: &'a [u32]) -> Self {
        let vocabulary = w.len() / e;
        Self {
            x,
            w: Matrix::new(&Heads::matrix(w, e)),
            e,
            vocabulary,
            targets,
            columns: vec![0f32; e * ROWS],
            logits: vec![0f32; TOKENS.min(vocabulary) * ROWS],
        }
    }

    /// Loads hidden states from row `i` on and returns how many.
    fn load(&mut self, i: usize) -> usize {
        let n = ROWS.min(self.targets.len() - i);
        for row in self.columns.chunks_exact_mut(ROWS) {
            row[n..].fill(0.0);
        }
        transpose(&self.x[i * self.e..], self.e, [n, self.e], &mut self.columns, ROWS);
        n
    }

    /// Logits of the tokens from `v` on; returns how many.
    #[inline(always)]
    fn compute<S: Simd>(&mut self, simd: S, v: usize) -> usize {
        let tokens = TOKENS.min(self.vocabulary - v);
        let right = Right { values: &self.columns, stride: ROWS };
        gemm(simd, Into::Zero, [tokens, ROWS, self.e], self.w.left(v), right, &mut self.logits, ROWS);
        tokens
    }
}

struct Forward<'a> {
    tiles: Tiles<'a>,
    losses: &'a mut [f32],
    logs: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { mut tiles, losses, logs } = self;
        for i in (0..losses.len()).step_by(ROWS) {
            let n = tiles.load(i);
            let (mut largest, mut sums) = ([f32::NEG_INFINITY; ROWS], [0f32; ROWS]);
            for v in (0..tiles.vocabulary).step_by(TOKENS) {
                let tokens = tiles.compute(simd, v);
                for (row, &target) in tiles.targets[i..i + n].iter().enumerate() {
                    let target = target as usize;
                    if (v..v + tokens).contains(&target) {
                        losses[i + row] = -tiles.logits[(target - v) * ROWS + row];
                    }
                }
                let mut decay = largest;
                for row in tiles.logits.chunks_exact(ROWS).take(tokens) {
                    max_each(simd, &mut largest, row);
                }
                exp_minus_each(simd, &mut decay, &largest);
                multiply(simd, &mut sums, &decay);
                for row in tiles.logits.chunks_exact_mut(ROWS).take(tokens) {
                    exp_minus_each(simd, row, &largest);
                    add(simd, &mut sums, row);
                }
            }
            for row in 0..n {
                logs[i + row] = largest[row] + sums[row].ln();
                losses[i + row] += logs[i + row];
            }
        }
    }
}

struct Backward<'a> {
    tiles: Tiles<'a>,
    grad: &'a [f32],
    logs: &'a [f32],
    dx: &'a mut [f32],
    /// With padded rows.
    dw: &'a mut [f32],
}

impl WithSimd for Backward<'_> {
    type Output = ();

    /// `dlogits = g_i (softmax − onehot(target))`.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { mut tiles, grad, logs, dx, dw } = self;
        let (e, width) = (tiles.e, padded(tiles.e));
        let mut rows = vec![0f32; ROWS * width];
        let mut states = vec![0f32; ROWS * width];
        for i in (0..grad.len()).step_by(ROWS) {
            let n = tiles.load(i);
            for (state, x) in states.chunks_exact_mut(width).zip(tiles.x[i * e..].chunks_exact(e)) {
                state[..e].copy_from_slice(x);
            }
            let (mut log, mut factor) = ([f32::INFINITY; ROWS], [0f32; ROWS]);
            log[..n].copy_from_slice(&logs[i..i + n]);
            factor[..n].copy_from_slice(&grad[i..i + n]);
            rows.fill(0.0);
            for v in (0..tiles.vocabulary).step_by(TOKENS) {
                let tokens = tiles.compute(simd, v);
                for row in tiles.logits.chunks_exact_mut(ROWS).take(tokens) {
                    exp_minus_each(simd, row, &log);
                    multiply(simd, row, &factor);
                }
                for (row, &target) in tiles.targets[i..i + n].iter().enumerate() {
                    let target = target as usize;
                    if (v..v + tokens).contains(&target) {
                        tiles.logits[(target - v) * ROWS + row] -= factor[row];
                    }
                }
                let left = Left::transposed(&tiles.logits, ROWS);
                gemm(simd, Into::Sum, [n, width, tokens], left, tiles.w.right(v), &mut rows, width);
                let right = Right { values: &states, stride: width };
                let left = Left::rows(&tiles.logits, ROWS);
                gemm(simd, Into::Sum, [tokens, width, n], left, right, &mut dw[v * width..], width);
            }
            for (dx, row) in dx[i * e..(i + n) * e].chunks_exact_mut(e).zip(rows.chunks_exact(width)) {
                dx.copy_from_slice(&row[..e]);
            }
        }
    }
}

impl CustomOp2 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross-entropy"
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<(CpuStorage, Shape)> {
        let (x, w) = (contiguous(s1, l1)?, contiguous(s2, l2)?);
        let n = self.targets.len();
        let (mut losses, mut logs) = (vec![0f32; n], vec![0f32; n]);
        let tiles = Tiles::new(x, w, l1.dims()[1], &self.targets);
        Arch::new().dispatch(Forward { tiles, losses: &mut losses, logs: &mut logs });
        *self.logs.lock().unwrap_or_else(PoisonError::into_inner) = logs;
        Ok((CpuStorage::F32(losses), Shape::from(n)))
    }

    fn bwd(&self, x: &Tensor, w: &Tensor, _: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (vocabulary, e) = w.dims2()?;
        let width = padded(e);
        let grad = grad.to_vec1::<f32>()?;
        let (mut dx, mut dw) = (vec![0f32; x.elem_count()], vec![0f32; vocabulary * width]);
        let logs = self.logs.lock().unwrap_or_else(PoisonError::into_inner);
        if logs.len() != self.targets.len() {
            bail!("cross-entropy: the backward pass needs a forward pass on the CPU before it");
        }
        with_storages([x, w], |[x, w]| {
            let tiles = Tiles::new(contiguous(x.0, x.1)?, contiguous(w.0, w.1)?, e, &self.targets);
            Arch::new().dispatch(Backward { tiles, grad: &grad, logs: &logs, dx: &mut dx, dw: &mut dw });
            Ok(())
        })?;
        if width != e {
            dw = dw.chunks_exact(width).flat_map(|row| row[..e].iter().copied()).collect();
        }
        Ok((Some(Tensor::from_vec(dx, x.shape(), x.device())?), Some(Tensor::from_vec(dw, w.shape(), w.device())?)))
    }
}

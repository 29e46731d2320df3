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
    vector::{add, exp_minus_each, max_each, multiply, subtract},
    with_storages,
};

/// Rows of hidden states of a tile.
const ROWS: usize = 64;
/// Most tokens of the vocabulary of a tile.
const TOKENS: usize = 1024;
/// Most numbers of a tile of the head: with as many of its gradient they stay in the second cache while all rows pass by, so that a large
/// head is read from memory once and not once for every few rows.
const HEAD: usize = 1 << 17;

/// `−log softmax(W x_i)[target_i]` for hidden states `x` `(N, E)` and a head `W` `(V, E)`; with a teacher, the mean of `−log softmax(W x_i)`
/// over a mixture of the target and the teacher's distribution.
pub(crate) struct CrossEntropy {
    targets: Vec<u32>,
    teacher: Option<Teacher>,
    /// Logarithms of the denominators, `(N)`, for the backward pass.
    logs: Mutex<Logs>,
}

/// What gives the distribution `softmax(W' x'_i)`.
pub(crate) struct Teacher {
    /// `x'`, `(N, E')`, and `W'`, `(V, E')`, both contiguous and f32.
    pub(crate) states: Tensor,
    pub(crate) head: Tensor,
    /// Its share of the mixture.
    pub(crate) share: f32,
}

#[derive(Default)]
struct Logs {
    own: Vec<f32>,
    teacher: Vec<f32>,
}

impl CrossEntropy {
    pub(crate) fn new(targets: &[u32], teacher: Option<Teacher>) -> Self {
        Self { targets: targets.to_vec(), teacher, logs: Mutex::default() }
    }

    /// Calls `work` with the teacher's tiles, if there is one.
    fn with_teacher<R>(&self, work: impl FnOnce(Option<(Tiles, f32)>) -> Result<R>) -> Result<R> {
        let Some(Teacher { states, head, share }) = &self.teacher else { return work(None) };
        let e = states.dim(1)?;
        with_storages([states, head], |[x, w]| {
            let tiles = Tiles::new(contiguous(x.0, x.1)?, contiguous(w.0, w.1)?, e, &self.targets);
            work(Some((tiles, *share)))
        })
    }
}

/// Tiles of logits: a token of the vocabulary a row, a hidden state a column.
struct Tiles<'a> {
    x: &'a [f32],
    w: Matrix<'a>,
    e: usize,
    vocabulary: usize,
    /// Tokens of a tile.
    tokens: usize,
    targets: &'a [u32],
    /// Hidden states a column, `ROWS` of them after the other.
    columns: Vec<f32>,
    logits: Vec<f32>,
}

impl<'a> Tiles<'a> {
    fn new(x: &'a [f32], w: &'a [f32], e: usize, targets: &'a [u32]) -> Self {
        let vocabulary = w.len() / e;
        let tokens = (HEAD / padded(e) / ROWS * ROWS).clamp(ROWS, TOKENS).min(vocabulary);
        let mut columns = vec![0f32; targets.len().div_ceil(ROWS) * e * ROWS];
        for (x, columns) in x.chunks(ROWS * e).zip(columns.chunks_exact_mut(ROWS * e)) {
            transpose(x, e, [x.len() / e, e], columns, ROWS);
        }
        let logits = vec![0f32; tokens * ROWS];
        Self { x, w: Matrix::new(&Heads::matrix(w, e)), e, vocabulary, tokens, targets, columns, logits }
    }

    /// First tokens of the tiles.
    fn starts(&self) -> impl Iterator<Item = usize> + use<> {
        (0..self.vocabulary).step_by(self.tokens)
    }

    /// First rows of the tiles, and how many rows they have.
    fn blocks(&self) -> impl Iterator<Item = [usize; 2]> + use<> {
        let all = self.targets.len();
        (0..all).step_by(ROWS).map(move |i| [i, ROWS.min(all - i)])
    }

    /// Logits of the rows from `i` on for the tokens from `v` on; returns how many tokens.
    #[inline(always)]
    fn compute<S: Simd>(&mut self, simd: S, i: usize, v: usize) -> usize {
        let tokens = self.tokens.min(self.vocabulary - v);
        let right = Right { values: &self.columns[i * self.e..(i + ROWS) * self.e], stride: ROWS };
        gemm(simd, Into::Zero, [tokens, ROWS, self.e], self.w.left(v), right, &mut self.logits, ROWS);
        tokens
    }
}

/// `ROWS` numbers from `i` on, and something else where there are no more.
fn block(values: &[f32], i: usize, otherwise: f32) -> [f32; ROWS] {
    let mut block = [otherwise; ROWS];
    let n = ROWS.min(values.len() - i);
    block[..n].copy_from_slice(&values[i..i + n]);
    block
}

/// Tiles of a teacher's distribution.
struct Soft<'a> {
    tiles: Tiles<'a>,
    logs: &'a [f32],
    share: f32,
}

impl Soft<'_> {
    /// Probabilities of the tokens from `v` on, in place of their logits.
    #[inline(always)]
    fn compute<S: Simd>(&mut self, simd: S, i: usize, v: usize) {
        let tokens = self.tiles.compute(simd, i, v);
        let log = block(self.logs, i, f32::INFINITY);
        for row in self.tiles.logits.chunks_exact_mut(ROWS).take(tokens) {
            exp_minus_each(simd, row, &log);
        }
    }
}

struct Forward<'a> {
    tiles: Tiles<'a>,
    soft: Option<Soft<'a>>,
    losses: &'a mut [f32],
    logs: &'a mut [f32],
}

/// What the tokens seen so far come to for a tile of rows.
#[derive(Clone)]
struct Running {
    largest: [f32; ROWS],
    sums: [f32; ROWS],
    /// Over the teacher's distribution: the mean of the logits, and what its rounded probabilities add up to.
    means: [f32; ROWS],
    masses: [f32; ROWS],
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { mut tiles, mut soft, losses, logs } = self;
        let share = soft.as_ref().map_or(0.0, |soft| soft.share);
        let zero = [0f32; ROWS];
        let start = Running { largest: [f32::NEG_INFINITY; ROWS], sums: zero, means: zero, masses: zero };
        let mut running = vec![start; tiles.blocks().count()];
        for v in tiles.starts() {
            for ([i, n], now) in tiles.blocks().zip(&mut running) {
                let tokens = tiles.compute(simd, i, v);
                for (row, &target) in tiles.targets[i..i + n].iter().enumerate() {
                    let target = target as usize;
                    if (v..v + tokens).contains(&target) {
                        losses[i + row] = (share - 1.0) * tiles.logits[(target - v) * ROWS + row];
                    }
                }
                if let Some(soft) = &mut soft {
                    soft.compute(simd, i, v);
                    let rows = soft.tiles.logits.chunks_exact_mut(ROWS).zip(tiles.logits.chunks_exact(ROWS));
                    for (shares, logits) in rows.take(tokens) {
                        add(simd, &mut now.masses, shares);
                        multiply(simd, shares, logits);
                        add(simd, &mut now.means, shares);
                    }
                }
                let mut decay = now.largest;
                for row in tiles.logits.chunks_exact(ROWS).take(tokens) {
                    max_each(simd, &mut now.largest, row);
                }
                exp_minus_each(simd, &mut decay, &now.largest);
                multiply(simd, &mut now.sums, &decay);
                for row in tiles.logits.chunks_exact_mut(ROWS).take(tokens) {
                    exp_minus_each(simd, row, &now.largest);
                    add(simd, &mut now.sums, row);
                }
            }
        }
        for ([i, n], now) in tiles.blocks().zip(&running) {
            for row in 0..n {
                let log = now.largest[row] + now.sums[row].ln();
                logs[i + row] = log;
                losses[i + row] += (1.0 - share) * log + share * (now.masses[row] * log - now.means[row]);
            }
        }
    }
}

struct Backward<'a> {
    tiles: Tiles<'a>,
    soft: Option<Soft<'a>>,
    grad: &'a [f32],
    logs: &'a [f32],
    dx: &'a mut [f32],
    /// With padded rows.
    dw: &'a mut [f32],
}

impl WithSimd for Backward<'_> {
    type Output = ();

    /// `dlogits = g_i (softmax − (1 − share) onehot(target) − share softmax')`.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { mut tiles, mut soft, grad, logs, dx, dw } = self;
        let share = soft.as_ref().map_or(0.0, |soft| soft.share);
        let (e, width) = (tiles.e, padded(tiles.e));
        let mut rows = vec![0f32; grad.len() * width];
        let mut states = vec![0f32; grad.len() * width];
        for (state, x) in states.chunks_exact_mut(width).zip(tiles.x.chunks_exact(e)) {
            state[..e].copy_from_slice(x);
        }
        for v in tiles.starts() {
            for [i, n] in tiles.blocks() {
                let (log, factor) = (block(logs, i, f32::INFINITY), block(grad, i, 0.0));
                let tokens = tiles.compute(simd, i, v);
                for row in tiles.logits.chunks_exact_mut(ROWS).take(tokens) {
                    exp_minus_each(simd, row, &log);
                    multiply(simd, row, &factor);
                }
                for (row, &target) in tiles.targets[i..i + n].iter().enumerate() {
                    let target = target as usize;
                    if (v..v + tokens).contains(&target) {
                        tiles.logits[(target - v) * ROWS + row] -= (1.0 - share) * factor[row];
                    }
                }
                if let Some(soft) = &mut soft {
                    let factor = factor.map(|g| share * g);
                    soft.compute(simd, i, v);
                    let rows = tiles.logits.chunks_exact_mut(ROWS).zip(soft.tiles.logits.chunks_exact_mut(ROWS));
                    for (row, shares) in rows.take(tokens) {
                        multiply(simd, shares, &factor);
                        subtract(simd, row, shares);
                    }
                }
                let left = Left::transposed(&tiles.logits, ROWS);
                gemm(simd, Into::Sum, [n, width, tokens], left, tiles.w.right(v), &mut rows[i * width..], width);
                let right = Right { values: &states[i * width..], stride: width };
                let left = Left::rows(&tiles.logits, ROWS);
                gemm(simd, Into::Sum, [tokens, width, n], left, right, &mut dw[v * width..], width);
            }
        }
        for (dx, row) in dx.chunks_exact_mut(e).zip(rows.chunks_exact(width)) {
            dx.copy_from_slice(&row[..e]);
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
        let (mut losses, mut logs) = (vec![0f32; n], Logs { own: vec![0f32; n], teacher: Vec::new() });
        self.with_teacher(|teacher| {
            let Some((tiles, _)) = teacher else { return Ok(()) };
            logs.teacher.resize(n, 0.0);
            Arch::new().dispatch(Forward { tiles, soft: None, losses: &mut losses, logs: &mut logs.teacher });
            Ok(())
        })?;
        self.with_teacher(|teacher| {
            let soft = teacher.map(|(tiles, share)| Soft { tiles, logs: &logs.teacher, share });
            let tiles = Tiles::new(x, w, l1.dims()[1], &self.targets);
            Arch::new().dispatch(Forward { tiles, soft, losses: &mut losses, logs: &mut logs.own });
            Ok(())
        })?;
        *self.logs.lock().unwrap_or_else(PoisonError::into_inner) = logs;
        Ok((CpuStorage::F32(losses), Shape::from(n)))
    }

    fn bwd(&self, x: &Tensor, w: &Tensor, _: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (vocabulary, e) = w.dims2()?;
        let width = padded(e);
        let grad = grad.to_vec1::<f32>()?;
        let (mut dx, mut dw) = (vec![0f32; x.elem_count()], vec![0f32; vocabulary * width]);
        let logs = self.logs.lock().unwrap_or_else(PoisonError::into_inner);
        if logs.own.len() != self.targets.len() {
            bail!("cross-entropy: the backward pass needs a forward pass on the CPU before it");
        }
        with_storages([x, w], |[x, w]| {
            let tiles = Tiles::new(contiguous(x.0, x.1)?, contiguous(w.0, w.1)?, e, &self.targets);
            self.with_teacher(|teacher| {
                let soft = teacher.map(|(tiles, share)| Soft { tiles, logs: &logs.teacher, share });
                let (logs, dx, dw) = (&logs.own[..], &mut dx[..], &mut dw[..]);
                Arch::new().dispatch(Backward { tiles, soft, grad: &grad, logs, dx, dw });
                Ok(())
            })
        })?;
        if width != e {
            dw = dw.chunks_exact(width).flat_map(|row| row[..e].iter().copied()).collect();
        }
        Ok((Some(Tensor::from_vec(dx, x.shape(), x.device())?), Some(Tensor::from_vec(dw, w.shape(), w.device())?)))
    }
}

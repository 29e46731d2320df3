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
/// Tokens of the vocabulary of a tile.
const TOKENS: usize = 1024;

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

/// Tiles of a teacher's distribution.
struct Soft<'a> {
    tiles: Tiles<'a>,
    logs: &'a [f32],
    share: f32,
    /// Logarithms of the denominators of the rows loaded.
    log: [f32; ROWS],
}

impl<'a> Soft<'a> {
    fn new(tiles: Tiles<'a>, logs: &'a [f32], share: f32) -> Self {
        Self { tiles, logs, share, log: [f32::INFINITY; ROWS] }
    }

    fn load(&mut self, i: usize) {
        let n = self.tiles.load(i);
        self.log = [f32::INFINITY; ROWS];
        self.log[..n].copy_from_slice(&self.logs[i..i + n]);
    }

    /// Probabilities of the tokens from `v` on, in place of their logits.
    #[inline(always)]
    fn compute<S: Simd>(&mut self, simd: S, v: usize) {
        let tokens = self.tiles.compute(simd, v);
        for row in self.tiles.logits.chunks_exact_mut(ROWS).take(tokens) {
            exp_minus_each(simd, row, &self.log);
        }
    }
}

struct Forward<'a> {
    tiles: Tiles<'a>,
    soft: Option<Soft<'a>>,
    losses: &'a mut [f32],
    logs: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { mut tiles, mut soft, losses, logs } = self;
        let share = soft.as_ref().map_or(0.0, |soft| soft.share);
        for i in (0..losses.len()).step_by(ROWS) {
            let n = tiles.load(i);
            let (mut largest, mut sums) = ([f32::NEG_INFINITY; ROWS], [0f32; ROWS]);
            // Over the teacher's distribution: the mean of the logits, and what its rounded probabilities add up to.
            let (mut means, mut masses) = ([0f32; ROWS], [0f32; ROWS]);
            if let Some(soft) = &mut soft {
                soft.load(i);
            }
            for v in (0..tiles.vocabulary).step_by(TOKENS) {
                let tokens = tiles.compute(simd, v);
                for (row, &target) in tiles.targets[i..i + n].iter().enumerate() {
                    let target = target as usize;
                    if (v..v + tokens).contains(&target) {
                        losses[i + row] = (share - 1.0) * tiles.logits[(target - v) * ROWS + row];
                    }
                }
                if let Some(soft) = &mut soft {
                    soft.compute(simd, v);
                    let rows = soft.tiles.logits.chunks_exact_mut(ROWS).zip(tiles.logits.chunks_exact(ROWS));
                    for (shares, logits) in rows.take(tokens) {
                        add(simd, &mut masses, shares);
                        multiply(simd, shares, logits);
                        add(simd, &mut means, shares);
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
                losses[i + row] += (1.0 - share) * logs[i + row] + share * (masses[row] * logs[i + row] - means[row]);
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
            let soft_factor = factor.map(|g| share * g);
            if let Some(soft) = &mut soft {
                soft.load(i);
            }
            for v in (0..tiles.vocabulary).step_by(TOKENS) {
                let tokens = tiles.compute(simd, v);
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
                    soft.compute(simd, v);
                    let rows = tiles.logits.chunks_exact_mut(ROWS).zip(soft.tiles.logits.chunks_exact_mut(ROWS));
                    for (row, shares) in rows.take(tokens) {
                        multiply(simd, shares, &soft_factor);
                        subtract(simd, row, shares);
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
        let (mut losses, mut logs) = (vec![0f32; n], Logs { own: vec![0f32; n], teacher: Vec::new() });
        self.with_teacher(|teacher| {
            let Some((tiles, _)) = teacher else { return Ok(()) };
            logs.teacher.resize(n, 0.0);
            Arch::new().dispatch(Forward { tiles, soft: None, losses: &mut losses, logs: &mut logs.teacher });
            Ok(())
        })?;
        self.with_teacher(|teacher| {
            let soft = teacher.map(|(tiles, share)| Soft::new(tiles, &logs.teacher, share));
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
                let soft = teacher.map(|(tiles, share)| Soft::new(tiles, &logs.teacher, share));
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

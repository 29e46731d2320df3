//! Cross-entropy of a linear head, computed from hidden states. The logits, the largest tensor of a
//! language model's step, are made in tiles that stay in the cache. If there are few enough logits,
//! their exponentials are kept for the backward pass; otherwise that pass computes the logits
//! again.
//!
//! # Shapes
//!
//! ```text
//! forward, for each tile of tokens of the vocabulary (Vt of V), for each tile of R = 64 rows:
//!   W (Vt, E), x (R, E)      -> logits (Vt, R)
//!   logits, running maximum  -> sums of exponentials (R); loss (R) −= the target's logit
//!   at the end               -> log = maximum + ln sum (N), loss (N) += log
//! backward, over the same tiles, with g (N):
//!   logits, log, g           -> dlogits = g (softmax − onehot(target)) (Vt, R)
//!   dlogits                  -> dx (R, E) += dlogitsᵀ W, dW (Vt, E) += dlogits x
//! ```
//!
//! Here N is the number of hidden states, E their dimension and V the vocabulary. Where there is a
//! teacher, its probabilities `(Vt, R)` are computed from its own states and head for the same
//! tiles as the student's logits.

use candle_core::{CpuStorage, Result, Shape, Tensor, bail};
use std::{
    mem::take,
    sync::{Mutex, PoisonError},
};

use pulp::{Simd, WithSimd};

use super::{
    contiguous,
    gemm::{Accumulate, Left, Right, gemm},
    instructions::arch,
    operation::{Operation, Stored},
    padded,
    rows::{Heads, Matrix, Span},
    transpose::transpose,
    vector::{add, exp_minus_each, max_each, multiply, subtract},
    with_storages,
};

/// The number of hidden states of a tile.
const ROWS: usize = 64;
/// The largest number of tokens of the vocabulary in a tile.
const TOKENS: usize = 1024;
/// The aimed size of a tile of the head, in numbers. The tile and the equally large tile of its
/// gradient stay in the second-level cache while all hidden states are processed, so that a large
/// head is read from memory only once. A tile has at least `ROWS` tokens, so it is larger than this
/// where E is above 2,048.
const HEAD: usize = 1 << 17;
/// The largest number of exponentials that are kept, 128 MiB. Keeping them saves one of the four
/// matrix products of the two passes.
const KEPT: usize = 1 << 25;

/// `CrossEntropy` computes `−log softmax(W x_i)[target_i]` for hidden states `x` `(N, E)` and a
/// head `W` `(V, E)`; with a teacher, the mean of `−log softmax(W x_i)` over a mixture of the
/// target and the teacher's distribution.
pub(crate) struct CrossEntropy {
    targets: Vec<u32>,
    teacher: Option<Teacher>,
    /// Whether any input is tracked, so that a backward pass may follow.
    keep: bool,
    saved: Mutex<Saved>,
}

/// `Teacher` is a model whose distribution `softmax(W' x'_i)` is part of the target.
pub(crate) struct Teacher {
    /// `x'`, `(N, E')`, and `W'`, `(V, E')`, both contiguous and f32.
    pub(crate) states: Tensor,
    pub(crate) head: Tensor,
    /// The teacher's share of the mixture.
    pub(crate) share: f32,
}

/// `Saved` is what the forward pass keeps for the backward pass.
#[derive(Default)]
struct Saved {
    /// The logarithms of the denominators, `(N)`.
    logs: Vec<f32>,
    /// The logarithms of the teacher's denominators, `(N)`.
    teacher_logs: Vec<f32>,
    /// The exponentials of all tiles or of none; the backward pass takes them.
    weights: Vec<Weights>,
}

/// The exponentials `e^{logit − c}` of a tile, and `c` of its rows.
type Weights = (Vec<f32>, [f32; ROWS]);

impl CrossEntropy {
    /// The operation for hidden states `x` and a head `weight`.
    pub(crate) fn new(x: &Tensor, weight: &Tensor, targets: &[u32], teacher: Option<Teacher>) -> Self {
        let keep = x.track_op() || weight.track_op();
        Self { targets: targets.to_vec(), teacher, keep, saved: Mutex::default() }
    }

    /// Returns the number of tokens of a tile for a student of dimension `e`. It is the same for
    /// the student and the teacher, since their tiles are combined number by number; the wider of
    /// the two determines it.
    fn tokens(&self, e: usize) -> usize {
        let widest = self.teacher.as_ref().map_or(e, |teacher| e.max(teacher.states.dims()[1]));
        (HEAD / padded(widest) / ROWS * ROWS).clamp(ROWS, TOKENS)
    }

    /// Calls `work` with the teacher's tiles, each of at most `tokens` tokens, and the teacher's
    /// share, if there is a teacher.
    fn with_teacher<R>(&self, tokens: usize, work: impl FnOnce(Option<(Tiles, f32)>) -> Result<R>) -> Result<R> {
        let Some(Teacher { states, head, share }) = &self.teacher else { return work(None) };
        let e = states.dim(1)?;
        with_storages([states, head], |[x, w]| {
            let tiles = Tiles::new(contiguous(x.0, x.1)?, contiguous(w.0, w.1)?, e, tokens, &self.targets);
            work(Some((tiles, *share)))
        })
    }
}

/// `Tiles` computes the logits tile by tile. In memory, each row of a tile belongs to a token of
/// the vocabulary, and each column to a hidden state.
struct Tiles<'a> {
    x: &'a [f32],
    w: Matrix<'a>,
    e: usize,
    vocabulary: usize,
    /// The number of tokens of a tile; the last tile may have fewer.
    tokens: usize,
    targets: &'a [u32],
    /// The hidden states transposed, `(E, ROWS)` for each block of `ROWS` states, one block after
    /// the other.
    columns: Vec<f32>,
}

impl<'a> Tiles<'a> {
    fn new(x: &'a [f32], w: &'a [f32], e: usize, tokens: usize, targets: &'a [u32]) -> Self {
        let vocabulary = w.len() / e;
        let tokens = tokens.min(vocabulary);
        let mut columns = vec![0f32; targets.len().div_ceil(ROWS) * e * ROWS];
        for (x, columns) in x.chunks(ROWS * e).zip(columns.chunks_exact_mut(ROWS * e)) {
            transpose(x, e, [x.len() / e, e], columns, ROWS);
        }
        Self { x, w: Matrix::new(&Heads::matrix(w, e)), e, vocabulary, tokens, targets, columns }
    }

    /// The first token of each tile.
    fn starts(&self) -> impl Iterator<Item = usize> + use<> {
        (0..self.vocabulary).step_by(self.tokens)
    }

    /// The hidden states of each block of `ROWS` states.
    fn blocks(&self) -> impl Iterator<Item = Span> + use<> {
        let all = self.targets.len();
        (0..all).step_by(ROWS).map(move |start| Span { start, count: ROWS.min(all - start) })
    }

    /// The number of logits of all tiles, those of missing states in the last block included.
    fn numbers(&self) -> usize {
        self.vocabulary * self.blocks().count() * ROWS
    }

    /// The number of tokens of the tile from `v` on.
    fn len(&self, v: usize) -> usize {
        self.tokens.min(self.vocabulary - v)
    }

    /// Computes the logits of the hidden states from `i` on for the tokens from `v` on.
    #[inline(always)]
    fn compute<S: Simd>(&self, simd: S, i: usize, v: usize, logits: &mut [f32]) {
        let right = Right { values: &self.columns[i * self.e..(i + ROWS) * self.e], stride: ROWS };
        gemm(simd, Accumulate::No, [self.len(v), ROWS, self.e], self.w.left(v), right, logits, ROWS);
    }
}

/// Returns `ROWS` numbers from `i` on, filled up with `otherwise` where there are no more.
fn block(values: &[f32], i: usize, otherwise: f32) -> [f32; ROWS] {
    let mut block = [otherwise; ROWS];
    let n = ROWS.min(values.len() - i);
    block[..n].copy_from_slice(&values[i..i + n]);
    block
}

/// `Soft` computes the tiles of a teacher's distribution.
struct Soft<'a> {
    tiles: Tiles<'a>,
    logs: &'a [f32],
    share: f32,
    shares: Vec<f32>,
}

impl<'a> Soft<'a> {
    fn new((tiles, share): (Tiles<'a>, f32), logs: &'a [f32]) -> Self {
        Self { shares: vec![0f32; tiles.tokens * ROWS], tiles, logs, share }
    }

    /// Computes the teacher's probabilities of the tokens from `v` on, for the hidden states from
    /// `i` on. Those of missing states are 0, since their denominators are infinite.
    #[inline(always)]
    fn compute<S: Simd>(&mut self, simd: S, i: usize, v: usize) -> &mut [f32] {
        self.tiles.compute(simd, i, v, &mut self.shares);
        let log = block(self.logs, i, f32::INFINITY);
        let shares = &mut self.shares[..self.tiles.len(v) * ROWS];
        for row in shares.chunks_exact_mut(ROWS) {
            exp_minus_each(simd, row, &log);
        }
        shares
    }
}

/// `Forward` is the forward pass: losses and logarithms of all rows.
struct Forward<'a> {
    tiles: Tiles<'a>,
    soft: Option<Soft<'a>>,
    /// Where the exponentials are kept, if they are.
    weights: Option<&'a mut Vec<Weights>>,
    losses: &'a mut [f32],
    logs: &'a mut [f32],
}

/// `Running` holds what a block of hidden states has accumulated over the tokens so far: the
/// largest logits and the sums of `e^{logit − largest}`.
#[derive(Clone)]
struct Running {
    largest: [f32; ROWS],
    sums: [f32; ROWS],
    /// Under the teacher's distribution: the mean of the logits, and the sum of its rounded
    /// probabilities.
    means: [f32; ROWS],
    masses: [f32; ROWS],
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { tiles, mut soft, mut weights, losses, logs } = self;
        let share = soft.as_ref().map_or(0.0, |soft| soft.share);
        let zero = [0f32; ROWS];
        let start = Running { largest: [f32::NEG_INFINITY; ROWS], sums: zero, means: zero, masses: zero };
        let mut running = vec![start; tiles.blocks().count()];
        let mut logits = vec![0f32; tiles.tokens * ROWS];
        for v in tiles.starts() {
            let logits = &mut logits[..tiles.len(v) * ROWS];
            for (Span { start: i, count: n }, now) in tiles.blocks().zip(&mut running) {
                tiles.compute(simd, i, v, logits);
                for (row, &target) in tiles.targets[i..i + n].iter().enumerate() {
                    let target = target as usize;
                    if (v..v + tiles.len(v)).contains(&target) {
                        losses[i + row] = (share - 1.0) * logits[(target - v) * ROWS + row];
                    }
                }
                if let Some(soft) = &mut soft {
                    let shares = soft.compute(simd, i, v);
                    for (shares, logits) in shares.chunks_exact_mut(ROWS).zip(logits.chunks_exact(ROWS)) {
                        add(simd, &mut now.masses, shares);
                        multiply(simd, shares, logits);
                        add(simd, &mut now.means, shares);
                    }
                }
                let mut decay = now.largest;
                for row in logits.chunks_exact(ROWS) {
                    max_each(simd, &mut now.largest, row);
                }
                exp_minus_each(simd, &mut decay, &now.largest);
                multiply(simd, &mut now.sums, &decay);
                for row in logits.chunks_exact_mut(ROWS) {
                    exp_minus_each(simd, row, &now.largest);
                    add(simd, &mut now.sums, row);
                }
                if let Some(weights) = &mut weights {
                    weights.push((logits.to_vec(), now.largest));
                }
            }
        }
        for (Span { start: i, count: n }, now) in tiles.blocks().zip(&running) {
            for row in 0..n {
                let log = now.largest[row] + now.sums[row].ln();
                logs[i + row] = log;
                losses[i + row] += (1.0 - share) * log + share * (now.masses[row] * log - now.means[row]);
            }
        }
    }
}

/// `Backward` is the backward pass: the gradients of hidden states and head.
struct Backward<'a> {
    tiles: Tiles<'a>,
    soft: Option<Soft<'a>>,
    weights: Vec<Weights>,
    grad: &'a [f32],
    logs: &'a [f32],
    dx: &'a mut [f32],
    /// The gradient of the head, with padded rows.
    dw: &'a mut [f32],
}

impl WithSimd for Backward<'_> {
    type Output = ();

    /// Computes `dlogits = g_i (softmax − (1 − share) onehot(target) − share softmax')` tile by
    /// tile, and from it both gradients.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { tiles, mut soft, weights, grad, logs, dx, dw } = self;
        let share = soft.as_ref().map_or(0.0, |soft| soft.share);
        let (e, width) = (tiles.e, padded(tiles.e));
        let mut rows = vec![0f32; grad.len() * width];
        let mut states = vec![0f32; grad.len() * width];
        for (state, x) in states.chunks_exact_mut(width).zip(tiles.x.chunks_exact(e)) {
            state[..e].copy_from_slice(x);
        }
        let mut weights = weights.into_iter();
        let mut logits = vec![0f32; tiles.tokens * ROWS];
        for v in tiles.starts() {
            let tokens = tiles.len(v);
            let logits = &mut logits[..tokens * ROWS];
            for Span { start: i, count: n } in tiles.blocks() {
                let (log, factor) = (block(logs, i, f32::INFINITY), block(grad, i, 0.0));
                match weights.next() {
                    Some((weights, mut scale)) => {
                        exp_minus_each(simd, &mut scale, &log);
                        multiply(simd, &mut scale, &factor);
                        for (row, weights) in logits.chunks_exact_mut(ROWS).zip(weights.chunks_exact(ROWS)) {
                            row.copy_from_slice(weights);
                            multiply(simd, row, &scale);
                        }
                    }
                    None => {
                        tiles.compute(simd, i, v, logits);
                        for row in logits.chunks_exact_mut(ROWS) {
                            exp_minus_each(simd, row, &log);
                            multiply(simd, row, &factor);
                        }
                    }
                }
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
                let left = Left::transposed(logits, ROWS);
                gemm(simd, Accumulate::Yes, [n, width, tokens], left, tiles.w.right(v), &mut rows[i * width..], width);
                let right = Right { values: &states[i * width..], stride: width };
                let left = Left::rows(logits, ROWS);
                gemm(simd, Accumulate::Yes, [tokens, width, n], left, right, &mut dw[v * width..], width);
            }
        }
        for (dx, row) in dx.chunks_exact_mut(e).zip(rows.chunks_exact(width)) {
            dx.copy_from_slice(&row[..e]);
        }
    }
}

impl Operation<2> for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross-entropy"
    }

    fn cpu(&self, [(s1, l1), (s2, l2)]: [Stored<'_, CpuStorage>; 2]) -> Result<(CpuStorage, Shape)> {
        let (x, w) = (contiguous(s1, l1)?, contiguous(s2, l2)?);
        let n = self.targets.len();
        let (mut losses, mut saved) = (vec![0f32; n], Saved { logs: vec![0f32; n], ..Saved::default() });
        let (e, tokens) = (l1.dims()[1], self.tokens(l1.dims()[1]));
        // This pass makes the teacher's denominators; its losses are overwritten by the next.
        self.with_teacher(tokens, |teacher| {
            let Some((tiles, _)) = teacher else { return Ok(()) };
            saved.teacher_logs.resize(n, 0.0);
            let logs = &mut saved.teacher_logs;
            arch().dispatch(Forward { tiles, soft: None, weights: None, losses: &mut losses, logs });
            Ok(())
        })?;
        self.with_teacher(tokens, |teacher| {
            let soft = teacher.map(|teacher| Soft::new(teacher, &saved.teacher_logs));
            let tiles = Tiles::new(x, w, e, tokens, &self.targets);
            let keep = self.keep && tiles.numbers() <= KEPT;
            let weights = keep.then_some(&mut saved.weights);
            arch().dispatch(Forward { tiles, soft, weights, losses: &mut losses, logs: &mut saved.logs });
            Ok(())
        })?;
        *self.saved.lock().unwrap_or_else(PoisonError::into_inner) = saved;
        Ok((CpuStorage::F32(losses), Shape::from(n)))
    }

    fn backward(&self, [x, w]: [&Tensor; 2], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let (vocabulary, e) = w.dims2()?;
        let width = padded(e);
        let grad = grad.to_vec1::<f32>()?;
        let (mut dx, mut dw) = (vec![0f32; x.elem_count()], vec![0f32; vocabulary * width]);
        // The lock is held only for these copies, so that a second backward pass over the same node
        // need not wait for this one. The first pass takes the exponentials, which are large. A later
        // one computes them again, and its gradients may differ from the first in the last bits.
        let saved = {
            let mut saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
            let [logs, teacher_logs] = [&saved.logs, &saved.teacher_logs].map(Vec::clone);
            Saved { logs, teacher_logs, weights: take(&mut saved.weights) }
        };
        if saved.logs.len() != self.targets.len() {
            bail!("cross-entropy: the backward pass needs a forward pass on the CPU before it");
        }
        let weights = saved.weights;
        with_storages([x, w], |[x, w]| {
            let tokens = self.tokens(e);
            let tiles = Tiles::new(contiguous(x.0, x.1)?, contiguous(w.0, w.1)?, e, tokens, &self.targets);
            self.with_teacher(tokens, |teacher| {
                let soft = teacher.map(|teacher| Soft::new(teacher, &saved.teacher_logs));
                let (logs, dx, dw) = (&saved.logs[..], &mut dx[..], &mut dw[..]);
                arch().dispatch(Backward { tiles, soft, weights, grad: &grad, logs, dx, dw });
                Ok(())
            })
        })?;
        if width != e {
            dw = dw.chunks_exact(width).flat_map(|row| row[..e].iter().copied()).collect();
        }
        Ok([Some(Tensor::from_vec(dx, x.shape(), x.device())?), Some(Tensor::from_vec(dw, w.shape(), w.device())?)])
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};

    use super::*;

    /// They are as many as the logits, so they are only there for a backward pass that will come,
    /// and up to a limit.
    #[test]
    fn exponentials_are_kept_for_a_backward_pass_alone() {
        let zeros = |n: usize| Tensor::zeros((n, 3), DType::F32, &Device::Cpu).unwrap();
        let (x, w, targets) = (zeros(70), zeros(5), [0; 70]);
        let tracked = Var::from_tensor(&x).unwrap();
        for (x, blocks) in [(&x, 0), (tracked.as_tensor(), 2)] {
            let operation = CrossEntropy::new(x, &w, &targets, None);
            with_storages([x, &w], |inputs| operation.cpu(inputs)).unwrap();
            assert_eq!(operation.saved.lock().unwrap().weights.len(), blocks);
        }
        assert_eq!(Tiles::new(&[0.0; 70 * 3], &[0.0; 5 * 3], 3, 5, &targets).numbers(), 5 * 2 * ROWS);
    }
}

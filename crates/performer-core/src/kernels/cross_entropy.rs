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
//!
//! # Threads
//! Hidden states are divided among the threads. Every number that belongs to one hidden state, its
//! loss and its row of dx, is computed by one thread. The gradient of a tile of the head is a sum
//! over all hidden states, so it is computed after theirs: each thread takes some of the tile's
//! tokens, and adds up blocks of hidden states in their order. So results do not depend on the
//! number of threads.

mod backward;

use candle_core::{CpuStorage, Result, Shape, Tensor, bail};
use std::{
    mem::take,
    sync::{Mutex, PoisonError},
};

use pulp::{Simd, WithSimd};

use super::{
    contiguous, for_heads,
    gemm::{Accumulate, Right, gemm},
    instructions::arch,
    operation::{Operation, Stored},
    padded,
    rows::{Matrix, Rows, Span},
    threads,
    transpose::transpose,
    vector::{LANES, add, exp_minus_each, max_each, multiply},
    with_storages,
};
use backward::{OfHead, OfStates, States};

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
/// The number of gradients of logits that the threads have in memory at a time where no
/// exponentials are kept, 32 MiB, if that is enough for every thread to have a block of hidden
/// states.
const GROUP: usize = 1 << 23;

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
    weights: Vec<Kept>,
}

/// The exponentials of some of the hidden states, over all tiles of the vocabulary, and over all
/// blocks of these states in each tile.
type Kept = (Span, Vec<Weights>);

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

    /// Calls `work` with the teacher's states, its head in tiles of at most `tokens` tokens, and
    /// its share, if there is a teacher.
    fn with_teacher<R>(&self, tokens: usize, work: impl FnOnce(Option<Taught>) -> Result<R>) -> Result<R> {
        let Some(Teacher { states, head, share }) = &self.teacher else { return work(None) };
        let e = states.dim(1)?;
        with_storages([states, head], |[x, w]| {
            let head = Head::new(contiguous(w)?, e, tokens);
            work(Some(Taught { x: contiguous(x)?, head: &head, share: *share }))
        })
    }
}

/// `Taught` is what the teacher has of all hidden states.
#[derive(Clone, Copy)]
struct Taught<'a> {
    x: &'a [f32],
    head: &'a Head<'a>,
    share: f32,
}

impl<'a> Taught<'a> {
    /// The teacher's distribution for some of the hidden states.
    fn of(&self, span: Span, targets: &'a [u32], logs: &'a [f32]) -> Soft<'a> {
        let tiles = Tiles::new(self.head, self.x, targets, span);
        Soft { tiles, logs: &logs[span.start..span.start + span.count], share: self.share, shares: Vec::new() }
    }
}

/// Divides the hidden states of a span among the threads, in whole blocks.
fn divided(Span { start, count }: Span) -> impl Iterator<Item = Span> {
    let each = count.div_ceil(ROWS).div_ceil(threads()).max(1) * ROWS;
    (0..count).step_by(each).map(move |i| Span { start: start + i, count: each.min(count - i) })
}

/// `Head` is the head `(V, E)` in tiles of tokens.
struct Head<'a> {
    w: Matrix<'a>,
    e: usize,
    vocabulary: usize,
    /// The number of tokens of a tile; the last tile may have fewer.
    tokens: usize,
}

impl<'a> Head<'a> {
    fn new(w: &'a [f32], e: usize, tokens: usize) -> Self {
        let vocabulary = w.len() / e;
        Self { w: Matrix::new(&Rows::new(w, e)), e, vocabulary, tokens: tokens.min(vocabulary) }
    }

    /// The first token of each tile.
    fn starts(&self) -> impl Iterator<Item = usize> + use<> {
        (0..self.vocabulary).step_by(self.tokens)
    }

    /// The number of tokens of the tile from `v` on.
    fn len(&self, v: usize) -> usize {
        self.tokens.min(self.vocabulary - v)
    }
}

/// `Tiles` computes the logits of some of the hidden states tile by tile. In memory, each row of a
/// tile belongs to a token of the vocabulary, and each column to a hidden state.
struct Tiles<'a> {
    head: &'a Head<'a>,
    targets: &'a [u32],
    /// The hidden states transposed, `(E, ROWS)` for each block of `ROWS` states, one block after
    /// the other.
    columns: Vec<f32>,
}

impl<'a> Tiles<'a> {
    /// The tiles of the hidden states of `span`, of all states `x` and all `targets`.
    fn new(head: &'a Head<'a>, x: &[f32], targets: &'a [u32], span: Span) -> Self {
        let (e, range) = (head.e, span.start..span.start + span.count);
        let mut columns = vec![0f32; span.count.div_ceil(ROWS) * e * ROWS];
        let x = &x[range.start * e..range.end * e];
        for (x, columns) in x.chunks(ROWS * e).zip(columns.chunks_exact_mut(ROWS * e)) {
            transpose(x, e, [x.len() / e, e], columns, ROWS);
        }
        Self { head, targets: &targets[range], columns }
    }

    /// The hidden states of each block of `ROWS` states, counted from the first of these.
    fn blocks(&self) -> impl Iterator<Item = Span> + use<> {
        blocks(self.targets.len())
    }

    /// Computes the logits of the hidden states from `i` on for the tokens from `v` on.
    #[inline(always)]
    fn compute<S: Simd>(&self, simd: S, i: usize, v: usize, logits: &mut [f32]) {
        let e = self.head.e;
        let right = Right { values: &self.columns[i * e..(i + ROWS) * e], stride: ROWS };
        gemm(simd, Accumulate::No, [self.head.len(v), ROWS, e], self.head.w.left(v), right, logits, ROWS);
    }
}

/// Blocks of at most `ROWS` of so many hidden states.
fn blocks(all: usize) -> impl Iterator<Item = Span> {
    (0..all).step_by(ROWS).map(move |start| Span { start, count: ROWS.min(all - start) })
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

impl Soft<'_> {
    /// Computes the teacher's probabilities of the tokens from `v` on, for the hidden states from
    /// `i` on. Those of missing states are 0, since their denominators are infinite.
    #[inline(always)]
    fn compute<S: Simd>(&mut self, simd: S, i: usize, v: usize) -> &mut [f32] {
        self.shares.resize(self.tiles.head.tokens * ROWS, 0.0);
        self.tiles.compute(simd, i, v, &mut self.shares);
        let log = block(self.logs, i, f32::INFINITY);
        let shares = &mut self.shares[..self.tiles.head.len(v) * ROWS];
        for row in shares.chunks_exact_mut(ROWS) {
            exp_minus_each(simd, row, &log);
        }
        shares
    }
}

/// `Forward` is the forward pass for some of the hidden states: their losses and logarithms.
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
        let head = tiles.head;
        let mut logits = vec![0f32; head.tokens * ROWS];
        for v in head.starts() {
            let logits = &mut logits[..head.len(v) * ROWS];
            for (Span { start: i, count: n }, now) in tiles.blocks().zip(&mut running) {
                tiles.compute(simd, i, v, logits);
                for (row, &target) in tiles.targets[i..i + n].iter().enumerate() {
                    let target = target as usize;
                    if (v..v + head.len(v)).contains(&target) {
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

/// Cuts consecutive parts, of so many numbers each, off a slice.
fn parts<T>(mut all: &mut [T], lengths: impl Iterator<Item = usize>) -> Vec<&mut [T]> {
    let cut = |length| {
        let (part, rest) = take(&mut all).split_at_mut(length);
        all = rest;
        part
    };
    lengths.map(cut).collect()
}

impl CrossEntropy {
    /// Computes the losses and the logarithms of the denominators of all hidden states `x`, and
    /// returns the exponentials if they are to be kept.
    fn forward(
        &self,
        head: &Head<'_>,
        x: &[f32],
        teacher: Option<(Taught<'_>, &[f32])>,
        keep: bool,
        [losses, logs]: [&mut [f32]; 2],
    ) -> Vec<Kept> {
        let targets = &self.targets[..];
        let spans: Vec<Span> = divided(Span { start: 0, count: targets.len() }).collect();
        let counts = || spans.iter().map(|span| span.count);
        let work = spans.iter().zip(parts(losses, counts())).zip(parts(logs, counts()));
        let kept = for_heads(work.collect(), |((&span, losses), logs)| {
            let soft = teacher.map(|(taught, logs)| taught.of(span, targets, logs));
            let mut weights = Vec::new();
            let tiles = Tiles::new(head, x, targets, span);
            arch().dispatch(Forward { tiles, soft, weights: keep.then_some(&mut weights), losses, logs });
            (span, weights)
        });
        if keep { kept } else { Vec::new() }
    }
}

impl Operation<2> for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross-entropy"
    }

    fn cpu(&self, [x, w]: [Stored<'_, CpuStorage>; 2]) -> Result<(CpuStorage, Shape)> {
        let e = x.1.dims()[1];
        let (x, w, tokens) = (contiguous(x)?, contiguous(w)?, self.tokens(e));
        let n = self.targets.len();
        let (mut losses, mut saved) = (vec![0f32; n], Saved { logs: vec![0f32; n], ..Saved::default() });
        // This pass makes the teacher's denominators; its losses are overwritten by the next.
        self.with_teacher(tokens, |teacher| {
            let Some(Taught { x, head, .. }) = teacher else { return Ok(()) };
            saved.teacher_logs.resize(n, 0.0);
            self.forward(head, x, None, false, [&mut losses, &mut saved.teacher_logs]);
            Ok(())
        })?;
        self.with_teacher(tokens, |teacher| {
            let teacher = teacher.map(|teacher| (teacher, &saved.teacher_logs[..]));
            let head = Head::new(w, e, tokens);
            // Those of missing states in the last block are counted too.
            let keep = self.keep && head.vocabulary * n.next_multiple_of(ROWS) <= KEPT;
            saved.weights = self.forward(&head, x, teacher, keep, [&mut losses, &mut saved.logs]);
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
        // need not wait for this one. The first pass takes the exponentials, which are large. A
        // later one computes them again, and its gradients may differ from the first in the last
        // bits.
        let saved = {
            let mut saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
            let [logs, teacher_logs] = [&saved.logs, &saved.teacher_logs].map(Vec::clone);
            Saved { logs, teacher_logs, weights: take(&mut saved.weights) }
        };
        let all = self.targets.len();
        if saved.logs.len() != all {
            bail!("cross-entropy: the backward pass needs a forward pass on the CPU before it");
        }
        // The gradients of a tile's logits are in memory until those of its tokens are computed.
        // They take the place of the exponentials, where these were kept, and else are made for
        // groups of hidden states.
        let groups: Vec<Vec<Kept>> = if saved.weights.is_empty() {
            let group = (GROUP / self.tokens(e)).max(threads() * ROWS).next_multiple_of(ROWS);
            let spans = (0..all).step_by(group).map(|start| Span { start, count: group.min(all - start) });
            spans.map(|span| divided(span).map(|span| (span, Vec::new())).collect()).collect()
        } else {
            vec![saved.weights]
        };
        let mut rows = vec![0f32; all * width];
        with_storages([x, w], |[x, w]| {
            let (x, tokens) = (contiguous(x)?, self.tokens(e));
            let head = Head::new(contiguous(w)?, e, tokens);
            let states = Matrix::new(&Rows::new(x, e));
            self.with_teacher(tokens, |teacher| {
                let counts: Vec<usize> = groups.iter().flatten().map(|(span, _)| span.count * width).collect();
                let mut rows = parts(&mut rows, counts.into_iter()).into_iter();
                let begin = |((span, kept), rows)| {
                    let soft = teacher.map(|teacher| teacher.of(span, &self.targets, &saved.teacher_logs));
                    let tiles = Tiles::new(&head, x, &self.targets, span);
                    let range = span.start..span.start + span.count;
                    States { span, tiles, soft, kept, grad: &grad[range.clone()], logs: &saved.logs[range], rows }
                };
                let groups =
                    groups.into_iter().map(|group| for_heads(group.into_iter().zip(&mut rows).collect(), begin));
                let mut groups: Vec<Vec<States>> = groups.collect();
                for ((tile, v), dw) in head.starts().enumerate().zip(dw.chunks_mut(head.tokens * width)) {
                    for group in &mut groups {
                        // One thread takes block after block, so that all stays in its cache.
                        let step = if group.len() == 1 { 1 } else { usize::MAX };
                        let blocks = group[0].tiles.blocks().count();
                        for first in (0..blocks).step_by(step) {
                            let dlogits = for_heads(group.iter_mut().collect(), |states| {
                                let blocks = first..states.tiles.blocks().count().min(first.saturating_add(step));
                                let span = states.span_of(blocks.clone());
                                (span, arch().dispatch(OfStates { states, tile, v, blocks }))
                            });
                            let pieces = if group.len() == 1 { 1 } else { 2 * threads() };
                            let piece = head.len(v).div_ceil(pieces).next_multiple_of(LANES);
                            for_heads(dw.chunks_mut(piece * width).enumerate().collect(), |(n, dw)| {
                                let first = n * piece;
                                arch().dispatch(OfHead { states: &states, dlogits: &dlogits, first, dw, width });
                            });
                        }
                    }
                }
                Ok(())
            })
        })?;
        for (dx, row) in dx.chunks_exact_mut(e).zip(rows.chunks_exact(width)) {
            dx.copy_from_slice(&row[..e]);
        }
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
            let kept = operation.saved.lock().unwrap().weights.iter().map(|(_, weights)| weights.len()).sum::<usize>();
            assert_eq!(kept, blocks);
        }
    }

    /// With more threads, hidden states and the vocabulary are divided otherwise, whether or not
    /// exponentials are kept: no bit changes.
    #[test]
    fn results_do_not_depend_on_the_number_of_threads() {
        // Where Candle may use one thread alone, the kernels do the same, and nothing is divided.
        if candle_core::utils::get_num_threads() == 1 {
            return;
        }
        // Rows of 20 are padded; the last block, the last tile and the last piece are not full.
        let (n, e, vocabulary) = (1000, 20, 9000);
        let numbers = |count: usize, salt: f32| (0..count).map(move |i| ((i as f32 + salt) * 12.9898).sin());
        let of_width = |rows: usize, width: usize, salt: f32| {
            Tensor::from_iter(numbers(rows * width, salt), &Device::Cpu).unwrap().reshape((rows, width)).unwrap()
        };
        let (matrix, wider) =
            (|rows: usize, salt: f32| of_width(rows, e, salt), |rows: usize, salt: f32| of_width(rows, e + 13, salt));
        let targets: Vec<u32> = (0..n).map(|i| (i * 31 % vocabulary) as u32).collect();
        let run = |threads: usize, passes: usize| {
            let work = || {
                assert_eq!(super::threads(), threads);
                let (x, w) =
                    (Var::from_tensor(&matrix(n, 0.0)).unwrap(), Var::from_tensor(&matrix(vocabulary, 0.5)).unwrap());
                let teacher = Teacher { states: wider(n, 0.25), head: wider(vocabulary, 0.75), share: 0.25 };
                let operation = CrossEntropy::new(&x, &w, &targets, Some(teacher));
                let losses = with_storages([&x, &w], |inputs| operation.cpu(inputs)).unwrap().0;
                let grad = Tensor::from_iter(numbers(n, 3.0), &Device::Cpu).unwrap();
                let mut gradients = Vec::new();
                // The second pass finds no exponentials any more.
                for _ in 0..passes {
                    gradients = operation.backward([&x, &w], &grad, &grad).unwrap().map(Option::unwrap).to_vec();
                }
                let CpuStorage::F32(losses) = losses else { panic!("f32") };
                let all = gradients.iter().flat_map(|g| g.flatten_all().unwrap().to_vec1::<f32>().unwrap());
                losses.into_iter().chain(all).map(f32::to_bits).collect::<Vec<u32>>()
            };
            rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(work)
        };
        for passes in [1, 2] {
            let one = run(1, passes);
            for threads in [2, 3, 7] {
                assert!(run(threads, passes) == one, "{threads} threads, pass {passes}");
            }
        }
    }
}

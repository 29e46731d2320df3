//! The CUDA kernels of FAVOR are compared with the reference, without a card: their sources are
//! compiled for the CPU with `cuda_host/device.h` in place of the hardware.
//!
//! Sizes here are few, to keep the time short; `cargo test --test devices cuda_host -- --ignored`
//! runs many. Without a C++ compiler nothing can be tested, and the tests say so.

use crate::common::{
    Problem, Random, assert_close,
    emulated::{compile, compile_for_races, execute, round, storage},
};
use candle_core::DType;
use performer_core::FeatureMapKind::{self, Hyperbolic, Positive};
use performer_core::reference::{Kernel, Shape, attention, attention_backward};

/// `Build` is what one set of kernels is compiled for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Build {
    pub(super) dtype: DType,
    pub(super) map: FeatureMapKind,
    pub(super) head_dim: usize,
    /// The number of rows `M` of the projection.
    pub(super) rows: usize,
    pub(super) values: usize,
    /// The tokens of a chunk, and the values of a thread block.
    pub(super) chunk: usize,
    pub(super) slice: usize,
    pub(super) causal: bool,
    /// Whether gradients are added up from those of query heads and slices.
    pub(super) partial: bool,
    /// Whether the kernels are those for bf16, whose thread blocks are teams.
    pub(super) teams: bool,
    /// Whether the projection's factor is exact in bf16 and the kernels are told so.
    pub(super) exact: bool,
    /// Whether the forward kernel of teams takes Hopper's products of four warps.
    pub(super) wgmma: bool,
    /// Whether there are forget gates.
    pub(super) gated: bool,
}

/// `Run` says how the kernels are launched.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Run {
    pub(super) segments: usize,
    pub(super) backward: bool,
    /// If not 0, the token at which the sequence is also split: the second part goes on from the
    /// state of the first, and the last two tokens are decoding steps.
    pub(super) split: usize,
    /// Whether threads take turns in the other order.
    pub(super) descending: bool,
    /// Whether matrix products cut off what tensor cores cut off.
    pub(super) truncating: bool,
    /// Whether races are looked for, which ends the program where there is one.
    pub(super) races: bool,
}

/// `Results` holds the results, which are empty where they were not asked for.
pub(super) struct Results {
    pub(super) out: Vec<f64>,
    /// The outputs of the split sequence, the state after all tokens in one go, and the state after
    /// the parts.
    pub(super) parts: Option<[Vec<f64>; 3]>,
    pub(super) q: Vec<f64>,
    pub(super) k: Vec<f64>,
    pub(super) v: Vec<f64>,
    pub(super) gates: Vec<f64>,
}

pub(super) fn tolerance(dtype: DType) -> f64 {
    if dtype == DType::F32 { 1e-4 } else { 1e-2 }
}

impl Build {
    /// The tolerance of the gradients of gates. Each is a sum of factors in which almost all
    /// cancels, over at most the 1,024 tokens of a segment whose ends are known. Where kernels
    /// round a chunk's features to half types, a factor is 2⁻⁹ of its size off, at random, and so
    /// the sum by up to `√1024 / 2 · 2⁻⁹`, 3% of a factor; the largest gradient has a few times the
    /// size of a factor.
    pub(super) fn tolerance_of_gates(&self) -> f64 {
        if self.teams { tolerance(self.dtype) } else { 2.0 * tolerance(self.dtype) }
    }
}

impl Build {
    pub(super) fn new(dtype: DType, head_dim: usize, rows: usize) -> Self {
        Self {
            dtype,
            map: Positive,
            head_dim,
            rows,
            values: head_dim,
            chunk: if dtype == DType::F32 { 32 } else { 64 },
            slice: head_dim.next_multiple_of(16),
            causal: true,
            partial: false,
            teams: false,
            exact: false,
            wgmma: false,
            gated: false,
        }
    }

    pub(super) fn gated(self) -> Self {
        Self { gated: true, ..self }
    }

    /// Draws a problem of this build, with numbers rounded to its type.
    pub(super) fn problem(&self, seed: u64, shape: Shape) -> Problem {
        let mut p = Problem::random(seed, shape, Some(self.map), self.rows);
        p.causal = self.causal;
        for x in [&mut p.q, &mut p.k, &mut p.v, &mut p.grad_output] {
            round(self.dtype, x);
        }
        if self.exact {
            let scale = (self.head_dim as f64).powf(-0.25) * std::f64::consts::LOG2_E;
            p.projection.iter_mut().for_each(|w| *w = half::bf16::from_f64(*w * scale).to_f64() / scale);
        }
        round(DType::F32, &mut p.projection);
        if self.gated {
            p = p.gated(seed);
            round(DType::F32, p.gates.as_mut().expect("gates"));
        }
        p
    }

    pub(super) fn shape(&self, [batch, heads, kv_heads]: [usize; 3], q_len: usize, k_len: usize) -> Shape {
        Shape { batch, heads, kv_heads, q_len, k_len, head_dim: self.head_dim, value_dim: self.values }
    }

    /// Returns the number of features that the kernels see: a hyperbolic map is a positive one with
    /// the rows and their negatives.
    fn features(&self) -> usize {
        if self.map == Hyperbolic { 2 * self.rows } else { self.rows }
    }

    /// Returns the macros of the kernels; `group` is the number of query heads of a key head.
    pub(super) fn macros(&self, group: usize) -> [(&'static str, usize); 15] {
        [
            ("STORAGE", storage(self.dtype)),
            ("MAP", 0),
            ("DIM", self.head_dim),
            ("FEATURES", self.features()),
            ("VALUES", self.values),
            ("SLICE", self.slice),
            ("CHUNK", self.chunk),
            ("CAUSAL", usize::from(self.causal)),
            ("PARTIAL", usize::from(self.partial)),
            ("HYPERBOLIC", usize::from(self.map == Hyperbolic)),
            ("GROUP", group),
            ("TEAMS", usize::from(self.teams)),
            ("EXACT", usize::from(self.exact)),
            ("WGMMA", usize::from(self.wgmma)),
            ("GATED", usize::from(self.gated)),
        ]
    }

    /// Runs the kernels on a problem; returns nothing without a C++ compiler.
    pub(super) fn run(&self, p: &Problem, run: Run) -> Option<Results> {
        let macros = self.macros(p.shape.heads / p.shape.kv_heads);
        let compile = if run.races { compile_for_races } else { compile };
        let program = compile("cuda", "favor", &macros)?;
        let s = p.shape;
        let header = [
            s.batch,
            s.heads,
            s.kv_heads,
            s.q_len,
            s.k_len,
            run.segments,
            usize::from(p.key_mask.is_some()),
            usize::from(run.backward),
            run.split,
            usize::from(run.descending) + 2 * usize::from(run.truncating),
        ];
        let grad = if run.backward { &p.grad_output[..] } else { &[] };
        let gates = p.gates.as_deref().unwrap_or_default();
        let numbers = [&p.q[..], &p.k, &p.v, grad, &p.projection, gates];
        let mut all = execute(&program, &header, &numbers, p.key_mask.as_deref()).into_iter();
        let mut take = |n: usize| all.by_ref().take(n).collect::<Vec<_>>();
        let out = take(s.output_count());
        let state = s.batch
            * s.kv_heads
            * self.features().next_multiple_of(16)
            * (2 + self.values.next_multiple_of(16).next_multiple_of(self.slice));
        let parts = (run.split > 0).then(|| [take(s.output_count()), take(state), take(state)]);
        let backward = |n| if run.backward { n } else { 0 };
        let heads = if self.partial { s.kv_heads } else { s.heads };
        assert!(!run.backward || heads == s.kv_heads, "gradients of a group need `partial`");
        let results = Results {
            out,
            parts,
            q: take(backward(s.q_count())),
            k: take(backward(s.k_count())),
            v: take(backward(s.v_count())),
            gates: take(backward(gates.len())),
        };
        assert_eq!(all.len(), 0, "more numbers than expected");
        Some(results)
    }

    /// Compares outputs and gradients with the reference.
    pub(super) fn check(&self, p: &Problem, run: Run) {
        let Some(results) = self.run(p, run) else { return };
        let kernel = Kernel::Features { map: self.map, projection: &p.projection, offsets: &[] };
        let what = |which: &str| format!("{which} of {self:?}, {run:?}, {:?}", p.shape);
        let bound = tolerance(self.dtype);
        let expected = attention(kernel, p.inputs());
        assert_close(&what("outputs"), &p.output_dims(), &results.out, &expected, bound);
        if let Some([parts, whole, carried]) = &results.parts {
            assert_close(&what("outputs in parts"), &p.output_dims(), parts, &expected, bound);
            assert_close(&what("state after parts"), &[whole.len()], carried, whole, bound);
        }
        if run.backward {
            let expected = attention_backward(kernel, p.inputs(), &p.grad_output);
            assert_close(&what("dq"), &p.q_dims(), &results.q, &expected.q, bound);
            assert_close(&what("dk"), &p.k_dims(), &results.k, &expected.k, bound);
            assert_close(&what("dv"), &p.v_dims(), &results.v, &expected.v, bound);
            if self.gated {
                assert_close(
                    &what("gradient of gates"),
                    &p.gate_dims(),
                    &results.gates,
                    &expected.gates,
                    self.tolerance_of_gates(),
                );
            }
        }
    }
}

pub(super) const BOTH: Run =
    Run { segments: 1, backward: true, split: 0, descending: false, truncating: false, races: false };

#[test]
fn causal_bf16() {
    let build = Build::new(DType::BF16, 64, 128);
    for tokens in [1, 65, 200] {
        build.check(&build.problem(1, build.shape([1, 2, 2], tokens, tokens)), BOTH);
    }
    build.check(&build.problem(2, build.shape([1, 1, 1], 200, 200)), Run { segments: 3, split: 70, ..BOTH });
}

/// The kernels for teams at one size, `exact` or not, at lengths and numbers of segments.
fn check_teams(exact: bool, dim: usize, rows: usize, lengths: &[(usize, usize)]) {
    let build = Build { teams: true, exact, ..Build::new(DType::BF16, dim, rows) };
    for &(tokens, segments) in lengths {
        build.check(&build.problem(11, build.shape([1, 1, 1], tokens, tokens)), Run { segments, ..BOTH });
    }
}

/// Features and values are not whole tiles, features are few, heads are grouped and keys hidden.
fn check_teams_in_part(exact: bool, dim: usize, rows: usize, values: usize) {
    let build = Build {
        teams: true,
        exact,
        partial: true,
        map: Hyperbolic,
        values,
        slice: values.next_multiple_of(16),
        ..Build::new(DType::BF16, dim, rows)
    };
    let mut problem = build.problem(3, build.shape([2, 2, 1], 130, 130));
    build.check(&problem, Run { split: 33, ..BOTH });
    problem.key_mask = Some(Random::new(4).mask(2 * 130, 0.7));
    build.check(&problem, Run { segments: 2, ..BOTH });
}

#[test]
fn causal_bf16_by_teams() {
    for exact in [false, true] {
        // These sizes show rounding of the sums, or of what weights sum to.
        check_teams(exact, 64, 128, &[(1, 1), (65, 1), (200, 1)]);
        let build = Build { teams: true, exact, ..Build::new(DType::BF16, 64, 128) };
        build.check(&build.problem(2, build.shape([1, 2, 2], 200, 200)), Run { segments: 3, split: 70, ..BOTH });
    }
    check_teams(true, 48, 64, &[(65, 2), (200, 3)]);
    check_teams_in_part(false, 24, 20, 40);
    check_teams_in_part(true, 60, 33, 30);
}

/// Products of four warps, whose right factors the tensor cores read by descriptors.
#[test]
fn causal_bf16_by_warpgroups() {
    let of = |dim, rows| Build { teams: true, exact: true, wgmma: true, ..Build::new(DType::BF16, dim, rows) };
    for gated in [false, true] {
        let build = Build { gated, ..of(64, 128) };
        for (tokens, segments, descending) in [(1, 1, false), (65, 1, true), (200, 3, false)] {
            let split = if tokens > 100 { 70 } else { 0 };
            let run = Run { segments, split, descending, ..Run::default() };
            let problem = build.problem(41, build.shape([1, 2, 2], tokens, tokens));
            build.check(&problem, run);
            let other = build.run(&problem, Run { descending: !descending, ..run });
            assert!(build.run(&problem, run).map(|r| r.out) == other.map(|r| r.out), "the order of threads matters");
        }
        // Features and values are not whole tiles, heads are grouped and keys hidden.
        let build = Build { gated, values: 50, slice: 64, map: Hyperbolic, ..of(60, 20) };
        let mut problem = build.problem(42, build.shape([2, 2, 1], 130, 130));
        problem.key_mask = Some(Random::new(43).mask(2 * 130, 0.7));
        build.check(&problem, Run { segments: 2, truncating: true, ..Run::default() });
    }
}

/// The sizes of teams of warps, each with an exact projection and without.
#[test]
#[ignore = "takes minutes"]
fn causal_bf16_by_teams_at_more_sizes() {
    for exact in [false, true] {
        check_teams(exact, 32, 64, &[(63, 1)]);
        check_teams(exact, 48, 64, &[(65, 2), (200, 3)]);
        for (dim, rows, values) in [(24, 20, 40), (16, 48, 16), (60, 33, 30)] {
            check_teams_in_part(exact, dim, rows, values);
        }
    }
}

/// Gates forget at every pace, down to e^-40 in one token; some lengths begin and end inside
/// chunks.
#[test]
fn gates_of_general_kernels() {
    for (dtype, dim, rows, tokens, segments) in [
        (DType::F32, 16, 48, 63, 1),
        (DType::F32, 16, 48, 130, 3),
        (DType::BF16, 64, 128, 130, 2),
        (DType::F16, 48, 64, 100, 1),
    ] {
        let build = Build::new(dtype, dim, rows).gated();
        build.check(&build.problem(21, build.shape([1, 2, 2], tokens, tokens)), Run { segments, split: 33, ..BOTH });
    }
    let build =
        Build { values: 40, slice: 16, partial: true, map: Hyperbolic, ..Build::new(DType::F32, 24, 12) }.gated();
    let mut problem = build.problem(22, build.shape([2, 3, 1], 63, 63));
    problem.key_mask = Some(Random::new(4).mask(2 * 63, 0.7));
    build.check(&problem, Run { segments: 2, ..BOTH });
}

#[test]
fn gates_of_teams() {
    for (exact, dim, rows, tokens, segments) in
        [(true, 64, 128, 1, 1), (false, 64, 128, 65, 1), (true, 64, 128, 200, 3), (true, 48, 64, 130, 1)]
    {
        let build = Build { teams: true, exact, ..Build::new(DType::BF16, dim, rows) }.gated();
        let split = if tokens > 100 { 70 } else { 0 };
        build.check(&build.problem(23, build.shape([1, 2, 2], tokens, tokens)), Run { segments, split, ..BOTH });
    }
    let build =
        Build { teams: true, exact: true, partial: true, values: 30, slice: 32, ..Build::new(DType::BF16, 60, 33) };
    let mut problem = build.gated().problem(24, build.shape([2, 2, 1], 130, 130));
    problem.key_mask = Some(Random::new(4).mask(2 * 130, 0.7));
    build.gated().check(&problem, Run { segments: 2, ..BOTH });
}

#[test]
fn causal_f32_in_slices_groups_and_segments_with_a_mask() {
    let build = Build { values: 40, slice: 16, partial: true, map: Hyperbolic, ..Build::new(DType::F32, 24, 12) };
    let mut problem = build.problem(3, build.shape([2, 3, 1], 63, 63));
    build.check(&problem, Run { split: 33, ..BOTH });
    problem.key_mask = Some(Random::new(4).mask(2 * 63, 0.7));
    build.check(&problem, Run { segments: 2, ..BOTH });
}

#[test]
fn causal_f16() {
    let build = Build::new(DType::F16, 48, 64);
    build.check(&build.problem(5, build.shape([1, 1, 1], 130, 130)), BOTH);
}

#[test]
fn over_all_keys() {
    for (dtype, queries, keys, segments) in [(DType::BF16, 70, 130, 2), (DType::F32, 65, 33, 1)] {
        let build = Build { causal: false, ..Build::new(dtype, 16, 48) };
        let mut problem = build.problem(6, build.shape([2, 2, 2], queries, keys));
        problem.key_mask = Some(Random::new(7).mask(2 * keys, 0.7));
        build.check(&problem, Run { segments, ..BOTH });
    }
}

/// Holds long sums of f32 to the reference, with products that cut off what tensor cores do. Values
/// are far from zero, so that sums grow.
fn check_long_sums(tokens: usize, backward: bool) {
    let build = Build::new(DType::F32, 16, 16);
    let mut problem = build.problem(26, build.shape([1, 1, 1], tokens, tokens));
    problem.v.iter_mut().for_each(|v| *v += 3.0);
    round(DType::F32, &mut problem.v);
    let Some(results) = build.run(&problem, Run { truncating: true, backward, ..BOTH }) else { return };
    let kernel = Kernel::Features { map: build.map, projection: &problem.projection, offsets: &[] };
    let expected = attention(kernel, problem.inputs());
    assert_close("outputs", &problem.output_dims(), &results.out, &expected, 1e-5);
    if backward {
        let gradients = attention_backward(kernel, problem.inputs(), &problem.grad_output);
        assert_close("dk", &problem.k_dims(), &results.k, &gradients.k, 1e-5);
        assert_close("dv", &problem.v_dims(), &results.v, &gradients.v, 1e-5);
    }
}

/// Tensor cores cut off what they add up, always towards zero, so that a sum that stays in them
/// shrinks with its length: here by 5e-5 if keys' sums did.
#[test]
fn long_sums_of_f32_leave_the_tensor_cores() {
    check_long_sums(4000, true);
}

/// Four times as long: by 2.3e-4 if keys' sums stayed in the tensor cores.
#[test]
#[ignore = "takes minutes"]
fn longer_sums_of_f32_leave_the_tensor_cores() {
    check_long_sums(16000, false);
}

/// Truncation is far below what half types round.
#[test]
fn half_types_bear_truncation() {
    for (dtype, dim, rows, teams, gated) in [(DType::BF16, 64, 128, true, true), (DType::F16, 48, 64, false, false)] {
        let build = Build { teams, exact: teams, gated, ..Build::new(dtype, dim, rows) };
        let run = Run { segments: 2, truncating: true, ..BOTH };
        build.check(&build.problem(27, build.shape([1, 1, 1], 200, 200)), run);
    }
}

/// Queries and keys are long: chunks end early, and nothing overflows.
#[test]
fn large_queries_and_keys() {
    for (dtype, dim, rows, teams) in
        [(DType::BF16, 64, 128, false), (DType::F32, 16, 48, false), (DType::BF16, 64, 128, true)]
    {
        let build = Build { teams, exact: teams, ..Build::new(dtype, dim, rows) };
        for factor in [3.0, 30.0] {
            let mut problem = build.problem(8, build.shape([1, 1, 1], 100, 100)).scale_qk(factor);
            round(dtype, &mut problem.q);
            round(dtype, &mut problem.k);
            let Some(results) = build.run(&problem, BOTH) else { return };
            let all = [&results.out, &results.q, &results.k, &results.v];
            assert!(all.iter().all(|x| x.iter().all(|x| x.is_finite())), "{dtype:?} times {factor}");
        }
    }
}

/// The lengths that gates are to be checked at, f32 and bf16, by both kinds of kernels.
#[test]
#[ignore = "takes minutes"]
fn gates_at_all_lengths() {
    for (dtype, teams) in [(DType::F32, false), (DType::BF16, false), (DType::BF16, true)] {
        let build = Build { teams, exact: teams, ..Build::new(dtype, 64, 128) }.gated();
        for (tokens, segments) in [(1, 1), (63, 1), (500, 1), (1000, 1), (1500, 2), (1500, 6)] {
            let split = if tokens > 4 { tokens / 3 } else { 0 };
            let run = Run { segments, split, ..BOTH };
            build.check(&build.problem(25, build.shape([1, 1, 1], tokens, tokens)), run);
        }
    }
}

/// Checks every head dimension, number of features and length, of queries and keys of deviation
/// `length`.
fn check_all_sizes(dtype: DType, length: f64) {
    let problem = |build: &Build, seed, shape| {
        let mut problem = build.problem(seed, shape).scale_qk(length);
        round(dtype, &mut problem.q);
        round(dtype, &mut problem.k);
        problem
    };
    let runs = [(1, 1), (63, 1), (65, 2), (200, 3), (500, 4)];
    for (head_dim, rows, chunk, slice) in [
        (16, 24, 64, 16),
        (48, 64, 32, 48),
        (64, 128, 16, 32),
        (64, 256, 32, 32),
        (128, 64, 32, 64),
        (80, 24, 64, 80),
        (64, 512, 16, 32),
    ] {
        let partial = slice < head_dim;
        let build = Build { chunk, slice, partial, ..Build::new(dtype, head_dim, rows) };
        for (tokens, segments) in runs {
            build.check(&problem(&build, 11, build.shape([1, 1, 1], tokens, tokens)), Run { segments, ..BOTH });
        }
        let build = Build { causal: false, ..build };
        build.check(&problem(&build, 12, build.shape([2, 1, 1], 65, 200)), Run { segments: 2, ..BOTH });
    }
    if dtype != DType::BF16 {
        return;
    }
    for (head_dim, rows) in [(16, 24), (32, 64), (48, 64), (64, 16), (64, 64), (64, 96), (64, 128), (40, 100)] {
        let build = Build { teams: true, exact: true, ..Build::new(dtype, head_dim, rows) };
        for (tokens, segments) in runs {
            build.check(&problem(&build, 11, build.shape([1, 1, 1], tokens, tokens)), Run { segments, ..BOTH });
        }
    }
}

#[test]
#[ignore = "takes minutes"]
fn all_sizes_f32() {
    check_all_sizes(DType::F32, 1.0);
}

#[test]
#[ignore = "takes minutes"]
fn all_sizes_bf16() {
    check_all_sizes(DType::BF16, 1.0);
}

/// f16's values and gradients are rounded to bf16 on top of everything: at deviation 1, one
/// gradient here is 1.03e-2 off.
#[test]
#[ignore = "takes minutes"]
fn all_sizes_f16() {
    check_all_sizes(DType::F16, 0.7);
}

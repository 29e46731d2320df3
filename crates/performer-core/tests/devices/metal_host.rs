//! The Metal kernel of FAVOR is compared with the reference, without an Apple device: its source is
//! compiled for the CPU with `metal_host/device.h` in place of Metal's language and hardware.
//!
//! Sizes here are few, to keep the time short; `cargo test --test devices metal_host -- --ignored`
//! runs many. Without a C++ compiler nothing can be tested, and the tests say so.

use crate::common::{
    Problem, Random, assert_close,
    emulated::{compile, execute, round, storage},
};
use candle_core::DType;
use performer_core::FeatureMapKind::{self, Hyperbolic, Positive};
use performer_core::reference::{Shape, attention};

/// `Build` is what the kernel is compiled for.
#[derive(Clone, Copy, Debug)]
struct Build {
    dtype: DType,
    map: FeatureMapKind,
    head_dim: usize,
    /// The number of rows `M` of the projection.
    rows: usize,
    values: usize,
    /// The values of a threadgroup.
    slice: usize,
}

/// `Run` says how the kernel is launched.
#[derive(Clone, Copy, Debug, Default)]
struct Run {
    /// Whether queries, keys and values lie as `(B, T, H, ·)`, with gaps.
    transposed: bool,
    /// If not 0, the token at which the sequence is also split in two parts.
    split: usize,
    /// Whether threads take turns in the other order.
    descending: bool,
}

impl Build {
    fn new(dtype: DType, head_dim: usize, rows: usize) -> Self {
        Self { dtype, map: Positive, head_dim, rows, values: head_dim, slice: head_dim.next_multiple_of(8).min(64) }
    }

    fn shape(&self, [batch, heads, kv_heads]: [usize; 3], tokens: usize) -> Shape {
        Shape { batch, heads, kv_heads, q_len: tokens, k_len: tokens, head_dim: self.head_dim, value_dim: self.values }
    }

    /// Draws a causal problem of this build, with numbers rounded to its type and queries and keys
    /// of deviation `length`.
    fn problem(&self, seed: u64, shape: Shape, length: f64) -> Problem {
        let mut p = Problem::random(seed, shape, Some(self.map), self.rows).scale_qk(length);
        p.causal = true;
        for x in [&mut p.q, &mut p.k, &mut p.v] {
            round(self.dtype, x);
        }
        round(DType::F32, &mut p.projection);
        p
    }

    fn features(&self) -> usize {
        if self.map == Hyperbolic { 2 * self.rows } else { self.rows }
    }

    /// Runs the kernel and returns its outputs. If the sequence is split, the outputs of its parts
    /// follow, and then scales and sums after the whole and after the parts.
    fn run(&self, p: &Problem, run: Run) -> Option<Vec<f64>> {
        let macros = [
            ("STORAGE", storage(self.dtype)),
            ("DIM", self.head_dim),
            ("FEATURES", self.features()),
            ("VALUES", self.values),
            ("SLICE", self.slice),
            ("HYPERBOLIC", usize::from(self.map == Hyperbolic)),
        ];
        let program = compile("metal", "favor", &macros)?;
        let s = p.shape;
        let [masked, transposed, descending] = [p.key_mask.is_some(), run.transposed, run.descending].map(usize::from);
        let header = [s.batch, s.heads, s.kv_heads, s.q_len, masked, transposed, run.split, descending];
        Some(execute(&program, &header, &[&p.q, &p.k, &p.v, &p.projection], p.key_mask.as_deref()))
    }

    /// Compares the outputs with the reference.
    fn check(&self, p: &Problem, run: Run) {
        let Some(out) = self.run(p, run) else { return };
        // Everything is computed in f32; only the output is rounded, to nearest.
        let tolerance = match self.dtype {
            DType::F16 => 6e-4,
            DType::BF16 => 4.1e-3,
            _ => 1e-4,
        };
        let what = format!("{self:?}, {run:?}, {:?}", p.shape);
        assert_close(&what, &p.output_dims(), &out, &attention(p.kernel(), p.inputs()), tolerance);
    }
}

const DENSE: Run = Run { transposed: false, split: 0, descending: false };
const TRANSPOSED: Run = Run { transposed: true, ..DENSE };

#[test]
fn lengths() {
    for dtype in [DType::F32, DType::BF16] {
        let build = Build::new(dtype, 64, 128);
        for tokens in [1, 63, 65, 200] {
            build.check(&build.problem(1, build.shape([1, 1, 1], tokens), 1.0), DENSE);
        }
    }
}

/// There are fewer features than dimensions and more; sizes that are no multiple of 8; one slice of
/// the values and several.
#[test]
fn sizes() {
    for (dtype, head_dim, rows, values, slice) in [
        (DType::F32, 16, 32, 16, 16),
        (DType::F32, 24, 12, 20, 24),
        (DType::F16, 24, 44, 50, 32),
        (DType::F32, 64, 256, 64, 64),
        (DType::BF16, 128, 36, 72, 40),
        (DType::F16, 10, 7, 5, 8),
    ] {
        let build = Build { values, slice, ..Build::new(dtype, head_dim, rows) };
        build.check(&build.problem(2, build.shape([1, 2, 2], 40), 1.0), DENSE);
    }
}

/// The problems have hyperbolic features, grouped queries, several sequences, slices, tensors with
/// gaps, and a mask.
#[test]
fn groups_and_masks() {
    for dtype in [DType::F32, DType::F16] {
        let build = Build { map: Hyperbolic, values: 36, slice: 24, ..Build::new(dtype, 24, 20) };
        let mut problem = build.problem(3, build.shape([2, 6, 2], 50), 1.0);
        build.check(&problem, DENSE);
        build.check(&problem, TRANSPOSED);
        for probability in [0.7, 0.05] {
            problem.key_mask = Some(Random::new(4).mask(2 * 50, probability));
            build.check(&problem, TRANSPOSED);
        }
        problem.key_mask = Some(vec![false; 100]);
        assert!(build.run(&problem, DENSE).is_none_or(|out| out.iter().all(|&x| x == 0.0)));
    }
}

/// The sums after all tokens at once, and after two parts, the second going on from the first, are
/// those of the formulas.
#[test]
fn parts() {
    for (map, rows, values, slice, split) in
        [(Positive, 20, 12, 8, 1), (Hyperbolic, 10, 12, 8, 16), (Positive, 20, 12, 8, 37), (Positive, 70, 36, 24, 25)]
    {
        let build = Build { map, values, slice, ..Build::new(DType::F32, 16, rows) };
        let problem = build.problem(12, build.shape([2, 4, 2], 47), 1.0);
        let Some(all) = build.run(&problem, Run { split, transposed: split == 16, descending: slice == 24 }) else {
            return;
        };
        let expected = attention(problem.kernel(), problem.inputs());
        let (whole, rest) = all.split_at(expected.len());
        let (parts, sums) = rest.split_at(expected.len());
        assert_close("outputs", &problem.output_dims(), whole, &expected, 1e-4);
        // The parts come one after the other, each with all of its heads.
        let (first, second) = parts.split_at(2 * 4 * split * values);
        let joined: Vec<f64> = first
            .chunks(split * values)
            .zip(second.chunks((47 - split) * values))
            .flat_map(|(first, second)| [first, second].concat())
            .collect();
        assert_close("outputs in parts", &problem.output_dims(), &joined, &expected, 1e-4);
        let expected = prefix_sums(&build, &problem);
        let (whole, parts) = sums.split_at(expected.len());
        assert_close("sums", &[expected.len()], whole, &expected, 1e-4);
        assert_close("sums after parts", &[expected.len()], parts, &expected, 1e-4);
    }
}

/// Returns `log_scale` and `sums` in the layout of `PrefixSums`, of all key heads after the last
/// token.
fn prefix_sums(build: &Build, p: &Problem) -> Vec<f64> {
    let (s, d, dv, f) = (p.shape, p.shape.head_dim, p.shape.value_dim, build.features());
    let (mut scales, mut sums) = (Vec::new(), Vec::new());
    for (keys, values) in p.k.chunks(s.k_len * d).zip(p.v.chunks(s.k_len * dv)) {
        for r in 0..f {
            let sign = if r < build.rows { 1.0 } else { -1.0 };
            let omega = &p.projection[r % build.rows * d..][..d];
            let logs: Vec<f64> = keys
                .chunks(d)
                .map(|k| {
                    let x: Vec<f64> = k.iter().map(|k| k * (d as f64).powf(-0.25)).collect();
                    let product: f64 = x.iter().zip(omega).map(|(x, w)| sign * x * w).sum();
                    product - 0.5 * x.iter().map(|x| x * x).sum::<f64>() - 0.5 * (f as f64).ln()
                })
                .collect();
            let scale = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let mut row = vec![0.0; dv + 1];
            for (log, v) in logs.iter().zip(values.chunks(dv)) {
                let feature = (log - scale).exp();
                row.iter_mut().zip(v.iter().chain([&1.0])).for_each(|(sum, v)| *sum += feature * v);
            }
            scales.push(scale);
            sums.extend(row);
        }
    }
    scales.extend(sums);
    scales
}

/// Queries and keys are long: chunks end early, and nothing overflows.
#[test]
fn large_queries_and_keys() {
    for (dtype, dim, rows) in [(DType::BF16, 64, 128), (DType::F32, 16, 48)] {
        let build = Build::new(dtype, dim, rows);
        build.check(&build.problem(5, build.shape([1, 1, 1], 100), 2.0), DENSE);
        for length in [3.0, 30.0] {
            let Some(out) = build.run(&build.problem(6, build.shape([1, 1, 1], 100), length), DENSE) else { return };
            assert!(out.iter().all(|x| x.is_finite()), "{dtype:?} times {length}");
        }
    }
}

/// What comes after a token, or that nothing does, changes no bit of its output.
#[test]
fn the_past_has_the_same_bits() {
    for (dtype, dim, rows) in [(DType::BF16, 64, 128), (DType::F32, 16, 256)] {
        let build = Build::new(dtype, dim, rows);
        let problem = build.problem(7, build.shape([1, 1, 1], 70), 2.0);
        let Some(whole) = build.run(&problem, DENSE) else { return };
        let past = |out: &[f64], cut: usize| out[..cut * dim].iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for cut in [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 69] {
            let mut changed = problem.clone();
            changed.k[cut * dim..(cut + 1) * dim].iter_mut().for_each(|x| *x *= 50.0);
            for x in [&mut changed.q, &mut changed.k, &mut changed.v] {
                x[(cut + 1) * dim..].iter_mut().for_each(|x| *x *= -1.5);
            }
            let mut short = problem.clone();
            (short.shape.q_len, short.shape.k_len) = (cut, cut);
            for x in [&mut short.q, &mut short.k, &mut short.v] {
                x.truncate(cut * dim);
            }
            for other in [changed, short] {
                let Some(other) = build.run(&other, DENSE) else { return };
                assert!(past(&whole, cut) == past(&other, cut), "{dtype:?}: outputs before token {cut} changed");
            }
        }
    }
}

/// Results are the same whether threads run in one order or the other, so no barrier is missing.
#[test]
fn the_order_of_threads_does_not_matter() {
    for (dtype, dim, rows, values) in [(DType::BF16, 64, 128, 64), (DType::F32, 16, 250, 24)] {
        let build = Build { values, slice: values, ..Build::new(dtype, dim, rows) };
        let problem = build.problem(8, build.shape([1, 1, 1], 60), 1.5);
        let Some(one) = build.run(&problem, DENSE) else { return };
        let Some(other) = build.run(&problem, Run { descending: true, ..DENSE }) else { return };
        assert!(one == other, "{build:?}");
    }
}

#[test]
#[ignore = "takes minutes"]
fn all_sizes() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for head_dim in [8usize, 16, 24, 48, 64, 80, 96, 128] {
            for (map, rows) in [(Positive, 8), (Positive, 24), (Hyperbolic, 60), (Positive, 128), (Positive, 256)] {
                let slices = head_dim.div_ceil(64);
                let slice = head_dim.div_ceil(slices).next_multiple_of(8);
                let build = Build { map, slice, ..Build::new(dtype, head_dim, rows) };
                for (tokens, length) in [(1, 1.0), (63, 1.0), (65, 1.5), (200, 1.0), (333, 0.5)] {
                    build.check(&build.problem(9, build.shape([1, 1, 1], tokens), length), DENSE);
                }
                let mut problem = build.problem(10, build.shape([2, 4, 2], 45), 1.0);
                problem.key_mask = Some(Random::new(11).mask(2 * 45, 0.6));
                build.check(&problem, TRANSPOSED);
            }
        }
    }
}

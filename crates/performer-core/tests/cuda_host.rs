//! The CUDA kernels of FAVOR and softmax against the reference, without a card: their sources, compiled for the CPU with
//! `cuda_host/device.h` in place of the hardware.
//!
//! Sizes here are few, to keep the time short; `cargo test --test cuda_host -- --ignored` runs many. Without a C++ compiler nothing can be
//! tested, and the tests say so.

mod common;

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, Mutex, OnceLock},
};

use candle_core::DType;
use common::{Problem, Random, assert_close};
use half::{bf16, f16};
use performer_core::FeatureMapKind::{self, Hyperbolic, Positive};
use performer_core::reference::{Kernel, Shape, attention, attention_backward};

/// What one set of kernels is compiled for.
#[derive(Clone, Copy, Debug)]
struct Build {
    dtype: DType,
    map: FeatureMapKind,
    head_dim: usize,
    /// `M`.
    rows: usize,
    values: usize,
    /// Tokens of a chunk, and values of a block.
    chunk: usize,
    slice: usize,
    causal: bool,
    /// Whether gradients are added up from those of query heads and slices.
    partial: bool,
}

/// How the kernels are launched.
#[derive(Clone, Copy, Debug, Default)]
struct Run {
    segments: usize,
    backward: bool,
    /// If not 0, where the sequence is split in two, the second part going on from the state of the first.
    split: usize,
    /// Threads take turns in the other order.
    descending: bool,
}

/// What comes out; empty where it was not asked for.
struct Results {
    out: Vec<f64>,
    /// The same in two parts, with the states after all tokens: in one go, and after the two parts.
    parts: Option<[Vec<f64>; 3]>,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
}

/// The C++ compiler, if there is one.
fn compiler() -> Option<&'static str> {
    static COMPILER: OnceLock<Option<String>> = OnceLock::new();
    let found = COMPILER.get_or_init(|| {
        let named = std::env::var("CXX").ok();
        let candidates = named.into_iter().chain(["c++", "g++", "clang++"].map(String::from));
        let works = |c: &String| Command::new(c).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
        let found = candidates.into_iter().find(works);
        if found.is_none() {
            eprintln!("skipped: there is no C++ compiler, with which the CUDA kernels are run on the CPU");
        }
        found
    });
    found.as_deref()
}

/// Compiles `source` of `cuda_host/` with macros, once for each set of them.
fn compile(source: &str, macros: &[(&str, usize)]) -> Option<PathBuf> {
    static PROGRAMS: Mutex<BTreeMap<String, Arc<OnceLock<PathBuf>>>> = Mutex::new(BTreeMap::new());
    let compiler = compiler()?;
    let options: Vec<String> = macros.iter().map(|(name, value)| format!("-D{name}={value}")).collect();
    let name = format!("{source}{}", options.concat());
    let program = Arc::clone(PROGRAMS.lock().unwrap().entry(name.clone()).or_default());
    let build = || {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda_host");
        fs::create_dir_all(&folder).unwrap();
        let program = folder.join(&name);
        let output = Command::new(compiler)
            .args(["-std=c++17", "-O2", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-o"])
            .arg(&program)
            .arg("-I")
            .arg(here.join("src/kernels/cuda"))
            .args(&options)
            .arg(here.join(format!("tests/cuda_host/{source}.cpp")))
            .output()
            .unwrap();
        assert!(output.status.success(), "{name}:\n{}", String::from_utf8_lossy(&output.stderr));
        program
    };
    Some(program.get_or_init(build).clone())
}

/// Runs a program on numbers and returns those that it writes.
fn execute(program: &Path, header: &[usize], numbers: &[&[f64]], mask: Option<&[bool]>) -> Vec<f64> {
    let mut input: Vec<u8> = header.iter().flat_map(|&n| (n as i32).to_ne_bytes()).collect();
    input.extend(numbers.iter().copied().flatten().flat_map(|&x| (x as f32).to_ne_bytes()));
    input.extend(mask.unwrap_or_default().iter().map(|&seen| u8::from(seen)));
    let mut child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&input).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{} ended with {}", program.display(), output.status);
    output.stdout.chunks_exact(4).map(|b| f64::from(f32::from_ne_bytes(b.try_into().unwrap()))).collect()
}

fn storage(dtype: DType) -> usize {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
        other => panic!("no kernels for {other:?}"),
    }
}

fn round(dtype: DType, values: &mut [f64]) {
    for x in values {
        *x = match dtype {
            DType::F16 => f16::from_f64(*x).to_f64(),
            DType::BF16 => bf16::from_f64(*x).to_f64(),
            _ => f64::from(*x as f32),
        };
    }
}

fn tolerance(dtype: DType) -> f64 {
    if dtype == DType::F32 { 1e-4 } else { 1e-2 }
}

impl Build {
    fn new(dtype: DType, head_dim: usize, rows: usize) -> Self {
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
        }
    }

    /// A problem of this build, in numbers of its type.
    fn problem(&self, seed: u64, shape: Shape) -> Problem {
        let mut p = Problem::random(seed, shape, Some(self.map), self.rows);
        p.causal = self.causal;
        for x in [&mut p.q, &mut p.k, &mut p.v, &mut p.grad_output] {
            round(self.dtype, x);
        }
        round(DType::F32, &mut p.projection);
        p
    }

    fn shape(&self, [batch, heads, kv_heads]: [usize; 3], q_len: usize, k_len: usize) -> Shape {
        Shape { batch, heads, kv_heads, q_len, k_len, head_dim: self.head_dim, value_dim: self.values }
    }

    /// As many features as the kernels see: a hyperbolic map is a positive one with the rows and their negatives.
    fn features(&self) -> usize {
        if self.map == Hyperbolic { 2 * self.rows } else { self.rows }
    }

    fn run(&self, p: &Problem, run: Run) -> Option<Results> {
        let mut projection = p.projection.clone();
        if self.map == Hyperbolic {
            projection.extend(p.projection.iter().map(|x| -x));
        }
        let macros = [
            ("STORAGE", storage(self.dtype)),
            ("MAP", 0),
            ("DIM", self.head_dim),
            ("FEATURES", self.features()),
            ("VALUES", self.values),
            ("SLICE", self.slice),
            ("CHUNK", self.chunk),
            ("CAUSAL", usize::from(self.causal)),
            ("PARTIAL", usize::from(self.partial)),
        ];
        let program = compile("favor", &macros)?;
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
            usize::from(run.descending),
        ];
        let grad = if run.backward { &p.grad_output[..] } else { &[] };
        let numbers = [&p.q[..], &p.k, &p.v, grad, &projection];
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
        };
        assert_eq!(all.len(), 0, "more numbers than expected");
        Some(results)
    }

    /// Outputs and gradients against the reference.
    fn check(&self, p: &Problem, run: Run) {
        let Some(results) = self.run(p, run) else { return };
        let kernel = Kernel::Features { map: self.map, projection: &p.projection, offsets: &[] };
        let what = |which: &str| format!("{which} of {self:?}, {run:?}, {:?}", p.shape);
        let bound = tolerance(self.dtype);
        let expected = attention(kernel, p.inputs());
        assert_close(&what("outputs"), &p.output_dims(), &results.out, &expected, bound);
        if let Some([parts, whole, carried]) = &results.parts {
            assert_close(&what("outputs in two parts"), &p.output_dims(), parts, &expected, bound);
            assert_close(&what("state after two parts"), &[whole.len()], carried, whole, bound);
        }
        if run.backward {
            let expected = attention_backward(kernel, p.inputs(), &p.grad_output);
            assert_close(&what("dq"), &p.q_dims(), &results.q, &expected.q, bound);
            assert_close(&what("dk"), &p.k_dims(), &results.k, &expected.k, bound);
            assert_close(&what("dv"), &p.v_dims(), &results.v, &expected.v, bound);
        }
    }
}

const BOTH: Run = Run { segments: 1, backward: true, split: 0, descending: false };

#[test]
fn causal_bf16() {
    let build = Build::new(DType::BF16, 64, 128);
    for tokens in [1, 65, 200] {
        build.check(&build.problem(1, build.shape([1, 2, 2], tokens, tokens)), BOTH);
    }
    build.check(&build.problem(2, build.shape([1, 1, 1], 200, 200)), Run { segments: 3, split: 70, ..BOTH });
}

#[test]
fn causal_f32_in_slices_groups_and_segments_with_a_mask() {
    let build =
        Build { values: 40, slice: 16, partial: true, map: Hyperbolic, ..Build::new(DType::F32, 24, 12) };
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

/// Long rows of queries and keys: chunks break, and nothing overflows.
#[test]
fn large_queries_and_keys() {
    for dtype in [DType::BF16, DType::F32] {
        let build = Build::new(dtype, 64, 128);
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

/// What comes after a token does not change a bit of its output, chunk borders included.
#[test]
fn the_past_has_the_same_bits() {
    for dtype in [DType::BF16, DType::F32] {
        let build = Build::new(dtype, 64, 128);
        let run = Run { segments: 2, ..Run::default() };
        let problem = build.problem(9, build.shape([1, 1, 1], 150, 150)).scale_qk(2.0);
        let Some(whole) = build.run(&problem, run) else { return };
        for cut in [1, 2, 40, 63, 64, 65, 100, 149] {
            let mut changed = problem.clone();
            changed.k[cut * 64..(cut + 1) * 64].iter_mut().for_each(|x| *x *= 50.0);
            for x in [&mut changed.q, &mut changed.k, &mut changed.v] {
                x[(cut + 1) * 64..].iter_mut().for_each(|x| *x = -1.5 * *x);
            }
            let Some(other) = build.run(&changed, run) else { return };
            let past = |r: &Results| r.out[..cut * 64].iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(past(&whole) == past(&other), "{dtype:?}: outputs before token {cut} changed");
        }
    }
}

/// Whether threads run in one order or the other: no barrier is missing.
#[test]
fn the_order_of_threads_does_not_matter() {
    for (dtype, causal) in [(DType::BF16, true), (DType::F32, true), (DType::BF16, false)] {
        let build = Build { causal, ..Build::new(dtype, 64, 128) };
        let problem = build.problem(10, build.shape([1, 1, 1], 130, 130));
        let run = Run { segments: 2, ..BOTH };
        let Some(one) = build.run(&problem, run) else { return };
        let Some(other) = build.run(&problem, Run { descending: true, ..run }) else { return };
        assert!(one.out == other.out && one.q == other.q && one.k == other.k && one.v == other.v, "{build:?}");
    }
}

/// Every head dimension, number of features and length; minutes.
#[test]
#[ignore = "takes minutes"]
fn all_sizes() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (head_dim, rows, chunk, slice) in
            [(16, 24, 64, 16), (48, 64, 32, 48), (64, 128, 16, 32), (64, 256, 32, 32), (128, 64, 32, 64), (80, 24, 64, 80), (64, 512, 16, 32)]
        {
            let partial = slice < head_dim;
            let build = Build { chunk, slice, partial, ..Build::new(dtype, head_dim, rows) };
            for (tokens, segments) in [(1, 1), (63, 1), (65, 2), (200, 3), (500, 4)] {
                build.check(&build.problem(11, build.shape([1, 1, 1], tokens, tokens)), Run { segments, ..BOTH });
            }
            let build = Build { causal: false, ..build };
            build.check(&build.problem(12, build.shape([2, 1, 1], 65, 200)), Run { segments: 2, ..BOTH });
        }
    }
}

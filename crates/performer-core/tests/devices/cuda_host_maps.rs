//! The CUDA kernels of FAVOR over feature maps other than random projections, run on the CPU:
//! features that come ready, and maps with rows of their own for keys, which are fitted or trained.
//! They are held to formulas in f64.

use crate::{
    common::{
        Random, assert_close,
        emulated::{compile, compile_for_races, execute, round},
    },
    cuda_host::{Build, tolerance},
};
use candle_core::DType;
use performer_core::reference::Shape;

/// Computes attention over given features and its gradients from the formulas: outputs, dq, dk, dv
/// and, with gates, theirs; several query heads may share a key head. Rows of `q` are log-features;
/// or, if `signed`, features, and rows of `k` have the logarithm of their scale as one more number.
fn given_features(
    s: Shape,
    [q, k, v, g]: [&[f64]; 4],
    gates: Option<&[f64]>,
    features: usize,
    signed: bool,
    causal: bool,
) -> [Vec<f64>; 5] {
    let key_width = features + usize::from(signed);
    let phi = |x: &[f64]| -> Vec<f64> {
        let scale = if x.len() > features { x[features].exp() } else { 1.0 };
        x[..features].iter().map(|x| if signed { x * scale } else { x.exp() }).collect()
    };
    let dot = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
    let add = |to: &mut [f64], factor: f64, x: &[f64]| to.iter_mut().zip(x).for_each(|(to, x)| *to += factor * x);
    let (mut out, mut dq, mut dk, mut dv) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut dgates = vec![0.0; gates.map_or(0, <[f64]>::len)];
    let group = s.heads / s.kv_heads;
    for m in 0..s.batch * s.kv_heads {
        let rows = |x: &[f64], head: usize, width: usize, tokens: usize| -> Vec<Vec<f64>> {
            x[head * tokens * width..(head + 1) * tokens * width].chunks(width).map(<[f64]>::to_vec).collect()
        };
        let (k, v) = (rows(k, m, key_width, s.k_len), rows(v, m, s.value_dim, s.k_len));
        let phi_k: Vec<_> = k.iter().map(|x| phi(x)).collect();
        let (mut of_keys, mut of_values) = (vec![vec![0.0; features]; s.k_len], vec![vec![0.0; s.value_dim]; s.k_len]);
        for (n, i) in (m * group..(m + 1) * group).flat_map(|n| (0..s.q_len).map(move |i| (n, i))) {
            let (q, g) = (&rows(q, n, features, s.q_len)[i], &rows(g, n, s.value_dim, s.q_len)[i]);
            let phi_q = phi(q);
            let seen = if causal { i + 1 } else { s.k_len };
            // What is left of each key at this query.
            let mut left = vec![1.0; seen];
            if let Some(gates) = gates {
                (0..i).rev().for_each(|j| left[j] = left[j + 1] * gates[m * s.k_len + j + 1].exp());
            }
            let kernel: Vec<f64> = phi_k.iter().zip(&left).map(|(k, left)| dot(&phi_q, k) * left).collect();
            let den: f64 = kernel.iter().sum();
            let mut o = vec![0.0; s.value_dim];
            (0..seen).for_each(|j| add(&mut o, kernel[j] / den, &v[j]));
            let (mut of_query, mut before) = (vec![0.0; features], 0.0);
            for j in 0..seen {
                add(&mut of_values[j], kernel[j] / den, g);
                let gradient = (dot(g, &v[j]) - dot(g, &o)) / den;
                add(&mut of_query, gradient * left[j], &phi_k[j]);
                add(&mut of_keys[j], gradient * left[j], &phi_q);
                if gates.is_some() {
                    dgates[m * s.k_len + j] += before;
                    before += gradient * kernel[j];
                }
            }
            out.extend(o);
            dq.extend(of_query.iter().zip(&phi_q).map(|(d, phi)| if signed { *d } else { d * phi }));
        }
        for j in 0..s.k_len {
            let scale = if signed { k[j][features].exp() } else { 1.0 };
            dk.extend(of_keys[j].iter().zip(&phi_k[j]).map(|(d, phi)| if signed { d * scale } else { d * phi }));
            if signed {
                dk.push(dot(&of_keys[j], &phi_k[j]));
            }
            dv.extend(&of_values[j]);
        }
    }
    [out, dq, dk, dv, dgates]
}

#[test]
fn features_that_come_ready() {
    // Three slices of the values, of which each has a part of the gradients, and chunks of 32.
    let in_slices = Build { values: 40, slice: 16, chunk: 32, partial: true, ..Build::new(DType::BF16, 16, 24) };
    let of = |dtype| Build { values: 16, slice: 16, ..Build::new(dtype, 16, 24) };
    for (i, (build, signed, causal, gated, tokens, segments)) in [
        (of(DType::F32), false, true, false, 70, 1),
        (of(DType::F32), true, true, false, 70, 2),
        (of(DType::F32), true, false, false, 33, 1),
        (of(DType::F32), false, true, true, 70, 2),
        (of(DType::F32), true, true, true, 70, 2),
        (of(DType::BF16), true, true, false, 150, 2),
        (of(DType::BF16), true, false, false, 33, 1),
        (of(DType::BF16), true, true, true, 150, 2),
        (in_slices, true, true, true, 100, 2),
        (in_slices, true, false, false, 70, 1),
    ]
    .into_iter()
    .enumerate()
    {
        let (features, values, dtype) = (24, build.values, build.dtype);
        let build = Build { causal, gated, ..build };
        let shape = build.shape([1, 2, 2], tokens, tokens);
        let mut random = Random::new(15);
        let rows = 2 * tokens;
        // Signed features that are mostly positive, so that no denominator comes near zero.
        let (deviation, mean) = if signed { (0.3, 1.0) } else { (1.5, 0.0) };
        let mut numbers = |n: usize, deviation: f64, mean: f64| -> Vec<f64> {
            let mut numbers: Vec<f64> = random.normal(n, deviation).into_iter().map(|x| x + mean).collect();
            round(dtype, &mut numbers);
            numbers
        };
        let q = numbers(rows * features, deviation, mean);
        let k = numbers(rows * (features + usize::from(signed)), deviation, mean);
        // Beside a large mean of the values, what gradients of features are made of is small. Where
        // slices each have a part of it, sums over all keys are rounded too much for that.
        let mean = if build.partial && !causal { 0.0 } else { 3.0 };
        let (v, g) = (numbers(rows * values, 1.0, mean), numbers(rows * values, 1.0, 0.0));
        let gates = gated.then(|| build.problem(16, shape).gates.expect("gates"));
        let mut macros = build.macros(1).to_vec();
        macros[1].1 = if signed { 2 } else { 1 };
        let Some(program) = compile("cuda", "favor", &macros) else { return };
        let header = [1, 2, 2, tokens, tokens, segments, 0, 1, 0, i % 4];
        let numbers = [&q[..], &k, &v, &g, gates.as_deref().unwrap_or_default()];
        let mut actual = execute(&program, &header, &numbers, None).into_iter();
        let expected = given_features(shape, [&q, &k, &v, &g], gates.as_deref(), features, signed, causal);
        for (what, expected) in ["outputs", "dq", "dk", "dv", "dgates"].iter().zip(&expected) {
            let actual: Vec<f64> = actual.by_ref().take(expected.len()).collect();
            let of_gates = *what == "dgates" && dtype != DType::F32;
            let bound = if of_gates { build.tolerance_of_gates() } else { tolerance(dtype) };
            let what = format!("{what} of {build:?}, signed {signed}");
            assert_close(&what, &[expected.len()], &actual, expected, bound);
        }
        assert_eq!(actual.len(), 0);
    }
}

/// `OwnKeys` holds the numbers of a map `exp(a·x)` of queries and `exp(b·y + c − ‖Py‖²/2)` of keys,
/// for each key head or for all, where `x` and `y` are rows times `D^-1/4`.
struct OwnKeys {
    dim: usize,
    features: usize,
    /// `a` and `b`, `(tables, F, D)`.
    queries: Vec<f64>,
    keys: Vec<f64>,
    /// `c`, `(tables, F)`.
    weights: Vec<f64>,
    /// `P`, `(tables, D, D)`; the identity where it is missing.
    metric: Option<Vec<f64>>,
}

impl OwnKeys {
    fn random(random: &mut Random, tables: usize, [features, dim]: [usize; 2], metric: bool) -> Self {
        let mut numbers = |n: usize, deviation: f64| -> Vec<f64> {
            random.normal(n, deviation).into_iter().map(|x| f64::from(x as f32)).collect()
        };
        let rows = tables * features * dim;
        Self {
            dim,
            features,
            queries: numbers(rows, 1.0),
            keys: numbers(rows, 1.0),
            weights: numbers(tables * features, 0.5),
            metric: metric.then(|| numbers(tables * dim * dim, 0.7 / (dim as f64).sqrt())),
        }
    }

    fn scale(&self) -> f64 {
        (self.dim as f64).powf(-0.25)
    }

    /// The rows `(F, D)` of one set among those of all.
    fn rows<'a>(&self, of: &'a [f64], table: usize) -> &'a [f64] {
        &of[table * self.features * self.dim..][..self.features * self.dim]
    }

    /// `‖Py‖²/2` of a row of keys, and its gradient.
    fn square(&self, table: usize, y: &[f64]) -> (f64, Vec<f64>) {
        let d = self.dim;
        let Some(metric) = &self.metric else { return (0.5 * y.iter().map(|y| y * y).sum::<f64>(), y.to_vec()) };
        let metric = &metric[table * d * d..][..d * d];
        let turned: Vec<f64> = metric.chunks(d).map(|row| row.iter().zip(y).map(|(p, y)| p * y).sum()).collect();
        let gradient = (0..d).map(|i| turned.iter().zip(metric.chunks(d)).map(|(t, row)| t * row[i]).sum()).collect();
        (0.5 * turned.iter().map(|t| t * t).sum::<f64>(), gradient)
    }

    /// The log-features of rows `(heads, T, D)` of queries or of keys, `(heads, T, F)`; `table`
    /// says which numbers a head has.
    fn logs(&self, x: &[f64], tokens: usize, of_keys: bool, table: impl Fn(usize) -> usize) -> Vec<f64> {
        let mut logs = Vec::new();
        for (n, x) in x.chunks(self.dim).enumerate() {
            let table = table(n / tokens);
            let x: Vec<f64> = x.iter().map(|x| x * self.scale()).collect();
            let rows = self.rows(if of_keys { &self.keys } else { &self.queries }, table);
            let square = if of_keys { self.square(table, &x).0 } else { 0.0 };
            for (r, row) in rows.chunks(self.dim).enumerate() {
                let weight = if of_keys { self.weights[table * self.features + r] } else { 0.0 };
                logs.push(row.iter().zip(&x).map(|(w, x)| w * x).sum::<f64>() + weight - square);
            }
        }
        logs
    }

    /// The gradients of rows from those of their log-features `(heads, T, F)`.
    fn gradients(
        &self,
        x: &[f64],
        of_logs: &[f64],
        tokens: usize,
        of_keys: bool,
        table: impl Fn(usize) -> usize,
    ) -> Vec<f64> {
        let mut gradients = Vec::new();
        for (n, (x, of_logs)) in x.chunks(self.dim).zip(of_logs.chunks(self.features)).enumerate() {
            let table = table(n / tokens);
            let x: Vec<f64> = x.iter().map(|x| x * self.scale()).collect();
            let mut gradient = vec![0.0; self.dim];
            let mut add = |factor: f64, row: &[f64]| gradient.iter_mut().zip(row).for_each(|(g, w)| *g += factor * w);
            let rows = self.rows(if of_keys { &self.keys } else { &self.queries }, table);
            rows.chunks(self.dim).zip(of_logs).for_each(|(row, of_log)| add(*of_log, row));
            if of_keys {
                add(-of_logs.iter().sum::<f64>(), &self.square(table, &x).1);
            }
            gradients.extend(gradient.iter().map(|g| g * self.scale()));
        }
        gradients
    }
}

/// A map with rows of its own for keys, for each key head or for all, in one pass, in segments, in
/// slices of values, with gates, and from a state on, token by token at the end. Threads take turns
/// in either order, and products cut off what tensor cores do.
#[test]
fn keys_with_rows_of_their_own() {
    let base = Build { values: 24, slice: 32, ..Build::new(DType::F32, 24, 20) };
    let half = Build { values: 64, slice: 64, ..Build::new(DType::BF16, 64, 128) };
    for (i, (build, heads, tables, metric, tokens, segments, split)) in [
        (base, [2, 2], 1, false, 70, 1, 33),
        (base, [2, 2], 2, true, 70, 2, 40),
        (Build { gated: true, ..base }, [2, 2], 2, true, 70, 2, 33),
        (Build { causal: false, ..base }, [2, 2], 2, true, 33, 1, 0),
        (Build { partial: true, values: 40, slice: 16, ..base }, [4, 2], 2, true, 63, 2, 30),
        (Build { gated: true, ..half }, [2, 2], 2, true, 130, 2, 70),
        (Build { values: 48, slice: 48, ..Build::new(DType::F16, 48, 64) }, [2, 2], 1, true, 100, 1, 0),
    ]
    .into_iter()
    .enumerate()
    {
        check_own_keys(build, heads, (tables, metric), (tokens, segments, split), (i % 4, false));
    }
}

/// A metric has one more product, whose rows several warps add up.
#[test]
fn keys_with_a_metric_have_no_races() {
    let build = Build { gated: true, ..Build::new(DType::F32, 16, 20) };
    for mode in [0, 1] {
        check_own_keys(build, [2, 2], (2, true), (70, 2, 33), (mode, true));
    }
}

/// Checks a map of `tables` sets of numbers on a sequence of `tokens` in `segments`, and split at a
/// token. `mode` is the order of threads (1) and whether products cut off digits (2).
fn check_own_keys(
    build: Build,
    [query_heads, key_heads]: [usize; 2],
    (tables, metric): (usize, bool),
    (tokens, segments, split): (usize, usize, usize),
    (mode, races): (usize, bool),
) {
    let (features, dim, group) = (build.rows, build.head_dim, query_heads / key_heads);
    let shape = build.shape([1, query_heads, key_heads], tokens, tokens);
    let mut random = Random::new(31);
    let map = OwnKeys::random(&mut random, tables, [features, dim], metric);
    let problem = build.problem(32, shape);
    let gates = problem.gates.as_deref();
    let mut macros = build.macros(group).to_vec();
    macros[1].1 = 3;
    macros.push(("METRIC", usize::from(metric)));
    let compile = if races { compile_for_races } else { compile };
    let Some(program) = compile("cuda", "favor", &macros) else { return };
    let header = [1, query_heads, key_heads, tokens, tokens, segments, 0, 1, split, mode, tables];
    let empty = Vec::new();
    let numbers = [
        &problem.q[..],
        &problem.k,
        &problem.v,
        &problem.grad_output,
        &map.queries,
        &map.keys,
        &map.weights,
        map.metric.as_ref().unwrap_or(&empty),
        gates.unwrap_or_default(),
    ];
    let mut actual = execute(&program, &header, &numbers, None).into_iter();

    let of_query = |head: usize| if tables == 1 { 0 } else { head / group };
    let of_key = |head: usize| if tables == 1 { 0 } else { head };
    let log_q = map.logs(&problem.q, tokens, false, of_query);
    let log_k = map.logs(&problem.k, tokens, true, of_key);
    let of_features = [&log_q[..], &log_k, &problem.v, &problem.grad_output];
    let [out, dlog_q, dlog_k, dv, dgates] = given_features(shape, of_features, gates, features, false, build.causal);
    let dq = map.gradients(&problem.q, &dlog_q, tokens, false, of_query);
    let dk = map.gradients(&problem.k, &dlog_k, tokens, true, of_key);
    let bound = tolerance(build.dtype);
    let mut take = |n: usize| actual.by_ref().take(n).collect::<Vec<f64>>();
    let compare = |what: &str, actual: &[f64], expected: &[f64], bound: f64| {
        let what = format!("{what} of {build:?}, {query_heads}/{key_heads} heads, {tables} tables, metric {metric}");
        assert_close(&what, &[expected.len()], actual, expected, bound);
    };
    compare("outputs", &take(out.len()), &out, bound);
    if split > 0 {
        compare("outputs in parts", &take(out.len()), &out, bound);
        let width = build.values.next_multiple_of(16).next_multiple_of(build.slice);
        let state = key_heads * features.next_multiple_of(16) * (2 + width);
        let whole = take(state);
        compare("state after parts", &take(state), &whole, bound);
    }
    for (what, expected) in [("dq", &dq), ("dk", &dk), ("dv", &dv)] {
        compare(what, &take(expected.len()), expected, bound);
    }
    compare("dgates", &take(dgates.len()), &dgates, 2.0 * bound);
    // The gradients of log-features come in parts, of slices of values and of query heads.
    let splits = build.values.div_ceil(build.slice);
    let (rows, of_head) = (query_heads * tokens * features, tokens * features);
    let parts = take(splits * rows);
    let sum: Vec<f64> = (0..rows).map(|i| (0..splits).map(|s| parts[s * rows + i]).sum()).collect();
    compare("gradients of queries' log-features", &sum, &dlog_q, bound);
    let parts = take(splits * rows);
    let of_key_heads = (0..key_heads * of_head).map(|i| {
        let (head, at) = (i / of_head, i % of_head);
        (0..splits * group).map(|n| parts[n / group * rows + (head * group + n % group) * of_head + at]).sum()
    });
    let sum: Vec<f64> = of_key_heads.collect();
    compare("gradients of keys' log-features", &sum, &dlog_k, bound);
    assert_eq!(actual.len(), 0);
}

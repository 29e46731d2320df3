//! Numbers under attack: queries, keys and values of every size and shape that finite numbers have
//! give finite outputs and gradients, weights that sum to one, and outputs between the least and
//! the largest value.

use crate::common::{Layout, Problem, Random, all_kernels, assert_close, is_positive, tensor, values};
use candle_core::{DType, Device, Result, Tensor, Var};
use performer_core::features::Exp;
use performer_core::reference::Shape;
use performer_core::{Attention, Favor, FeatureMapKind, Inputs, Mask, Softmax, Windowed};

/// Heads are grouped, and there are chunks, the last a partial one.
const SHAPE: Shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 45, k_len: 45, head_dim: 6, value_dim: 3 };

/// What rows hold.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rows {
    /// Normal numbers of this size.
    Normal(f64),
    /// The same number everywhere.
    Constant(f64),
    /// The same row of normal numbers of this size for every token.
    Identical(f64),
    /// One number of this size a row, at a place that changes from token to token.
    OneHot(f64),
    /// Rows whose size grows from the one to the other, and falls again.
    Between(f64, f64),
    /// Numbers below the least normal one of f32; half types round them to zero.
    Denormal,
}

use Rows::{Between, Constant, Denormal, Identical, Normal, OneHot};

/// What queries and keys hold. The largest is the largest whose squared length fits f32 by far.
const ATTACKS: [(Rows, Rows); 18] = [
    (Normal(1e-6), Normal(1e-6)),
    (Normal(1e-3), Normal(1e-3)),
    (Normal(1e2), Normal(1e2)),
    (Normal(1e4), Normal(1e4)),
    (Normal(1e4), Normal(1e-6)),
    (Normal(1e-6), Normal(1e4)),
    (Constant(0.0), Constant(0.0)),
    (Constant(1.0), Constant(-1.0)),
    (Constant(1e4), Constant(1e4)),
    (Constant(-1e4), Constant(1e4)),
    (Identical(1.0), Identical(1.0)),
    (Identical(1e4), Identical(1e4)),
    (OneHot(1.0), OneHot(1.0)),
    (OneHot(1e4), OneHot(-1e4)),
    (Denormal, Denormal),
    (Normal(1.0), Denormal),
    (Between(1e-6, 1e4), Between(1e-6, 1e4)),
    (Normal(1.0), Between(1e4, 1e-6)),
];

impl Rows {
    fn draw(self, random: &mut Random, count: usize, width: usize) -> Vec<f64> {
        let mut rows = random.normal(count * width, 1.0);
        let first = rows[..width].to_vec();
        for (i, row) in rows.chunks_exact_mut(width).enumerate() {
            for (j, x) in row.iter_mut().enumerate() {
                *x = match self {
                    Normal(size) => size * *x,
                    Constant(size) => size,
                    Identical(size) => size * first[j],
                    OneHot(size) => size * f64::from(u8::from(i * 5 % width == j)),
                    Between(low, high) => {
                        // From low to high and back, by equal factors.
                        let phase = (i % 30) as f64 / 15.0 - 1.0;
                        high * (low / high).powf(phase.abs()) * *x
                    }
                    Denormal => 1e-40 * *x,
                };
            }
        }
        rows
    }
}

fn problem(map: Option<FeatureMapKind>, (queries, keys): (Rows, Rows), size_of_values: f64, causal: bool) -> Problem {
    let mut problem = Problem::random(1, SHAPE, map, 12);
    let mut random = Random::new(2);
    problem.q = queries.draw(&mut random, SHAPE.q_count() / SHAPE.head_dim, SHAPE.head_dim);
    problem.k = keys.draw(&mut random, SHAPE.k_count() / SHAPE.head_dim, SHAPE.head_dim);
    problem.v = random.normal(SHAPE.v_count(), size_of_values);
    problem.causal = causal;
    problem
}

/// Returns the first output that does not lie between the least and the largest value of its column
/// that its row sees, up to a part of their size.
fn outside_hull(problem: &Problem, output: &[f64], rounding: f64) -> Option<String> {
    let Shape { heads, kv_heads, q_len, k_len, value_dim, .. } = problem.shape;
    for (row, outputs) in output.chunks_exact(value_dim).enumerate() {
        let (head, token) = (row / q_len, row % q_len);
        let of_keys = head / (heads / kv_heads);
        let seen = if problem.causal { token + 1 } else { k_len };
        for (column, &output) in outputs.iter().enumerate() {
            let value = |j: usize| problem.v[(of_keys * k_len + j) * value_dim + column];
            let (low, high) =
                (0..seen).map(value).fold((f64::MAX, f64::MIN), |(low, high), v| (low.min(v), high.max(v)));
            let slack = rounding * low.abs().max(high.abs());
            if !(low - slack..=high + slack).contains(&output) {
                return Some(format!("head {head}, token {token}: {output} is not in {low} to {high}"));
            }
        }
    }
    None
}

/// How far rounding may carry a weighted mean of a type beyond what it is a mean of.
fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        DType::F16 => 2e-3,
        _ => 1.6e-2,
    }
}

/// Attacks one kernel, in every type, causal and not, in both implementations; values are small for
/// some and large for others. Returns what it found.
fn attack(map: Option<FeatureMapKind>, rows: (Rows, Rows)) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for (i, dtype) in [DType::F64, DType::F32, DType::F16, DType::BF16].into_iter().enumerate() {
        for (causal, sizes) in [(true, [1.0, 1e4]), (false, [1e4, 1e-6])] {
            let size = sizes[i % 2];
            let problem = problem(map, rows, size, causal).rounded(dtype)?;
            for (how, attention) in [("fused", problem.attention(dtype)?), ("composed", problem.composed(dtype)?)] {
                let what = format!("{map:?} {rows:?} {dtype:?} {how}, causal {causal}, values of {size}");
                let outcome = match problem.run(&*attention, dtype, Layout::Contiguous) {
                    Ok(outcome) => outcome,
                    Err(error) => {
                        found.push(format!("{what}: {error}"));
                        continue;
                    }
                };
                // A slope may lie beyond what f16 holds, and so may the output where features have
                // both signs: it is no mean of the values then.
                let is_sound = |x: &f64| x.is_finite() || dtype == DType::F16 && !x.is_nan();
                for (name, numbers) in [
                    ("output", &outcome.output),
                    ("gradient of q", &outcome.q),
                    ("gradient of k", &outcome.k),
                    ("gradient of v", &outcome.v),
                ] {
                    if !numbers.iter().all(is_sound) {
                        found.push(format!("{what}: the {name} is not finite"));
                    }
                }
                if is_positive(map) {
                    let outside = outside_hull(&problem, &outcome.output, rounding(dtype));
                    found.extend(outside.map(|outside| format!("{what}: {outside}")));
                }
            }
        }
    }
    Ok(found)
}

#[test]
fn finite_inputs_give_finite_outputs_and_gradients() -> Result<()> {
    let mut found = Vec::new();
    for map in all_kernels() {
        for rows in ATTACKS {
            found.extend(attack(map, rows)?);
        }
    }
    assert!(found.is_empty(), "{} in all:\n{}", found.len(), found.join("\n"));
    Ok(())
}

/// Equal keys have equal weights, however large their logits are. The logarithm of how many there
/// are has no digits left beside such logits.
#[test]
fn gradients_of_softmax_keep_their_digits_where_logits_are_large() -> Result<()> {
    let tokens = 200usize;
    let row = |f: &dyn Fn(f32) -> f32| Tensor::from_iter((0..tokens).map(|t| f(t as f32)), &Device::Cpu);
    let v = row(&|t| (t * 0.7).sin())?.reshape((1, 1, tokens, 1))?;
    let weights = row(&|t| (t * 1.3).cos())?.reshape((1, 1, tokens, 1))?;
    let gates = row(&|_| -0.01)?.reshape((1, 1, tokens))?;
    // Two query heads read one key head.
    let gradients = |dtype: DType, size: f64, attention: Softmax, mask: &Mask, gated: bool| -> Result<Vec<Vec<f64>>> {
        let same = |heads: usize| Tensor::full(size as f32, (1, heads, tokens, 1), &Device::Cpu);
        let vars = [same(2)?, same(1)?, v.clone()].map(|t| Var::from_tensor(&t.to_dtype(dtype)?));
        let [q, k, v] = vars.map(|var| var.unwrap());
        let gates = Var::from_tensor(&gates.to_dtype(dtype)?)?;
        let inputs = Inputs::new(&q, &k, &v);
        let out = attention.forward(if gated { inputs.with_gates(&gates) } else { inputs }, mask)?;
        let gradients = out.broadcast_mul(&weights.to_dtype(dtype)?)?.sum_all()?.backward()?;
        [&q, &k, &v, &gates].into_iter().filter_map(|var| gradients.get(var)).map(values).collect()
    };
    let windowed = || Softmax::new().with_window(20)?.with_sinks(3);
    // A gate is added to a logit, so where logits are large it has few digits in any case.
    for (size, gated, tolerance) in [
        (1.0, false, 1e-5),
        (1e2, false, 1e-5),
        (1e3, false, 1e-5),
        (1e4, false, 1e-5),
        (1.0, true, 1e-5),
        (10.0, true, 1e-4),
    ] {
        for (attention, mask) in
            [(Softmax::new(), Mask::full()), (Softmax::new(), Mask::causal()), (windowed()?, Mask::causal())]
        {
            // Gates need a causal mask.
            let gated = gated && mask.is_causal();
            let expected = gradients(DType::F64, size, attention.clone().composed(), &mask, gated)?;
            let what = format!("logits of {:e}, {attention:?}, gates {gated}", size * size);
            let got = gradients(DType::F32, size, attention, &mask, gated)?;
            assert_eq!(got.len(), expected.len());
            for (name, (got, want)) in "qkvg".chars().zip(got.iter().zip(expected)) {
                // Those of queries and keys are sums that cancel, times the size of the other.
                let least = if "qk".contains(name) { size } else { 1.0 };
                let scale = want.iter().fold(least, |most, x| x.abs().max(most));
                let error = got.iter().zip(&want).fold(0f64, |most, (a, b)| most.max((a - b).abs()));
                assert!(error < tolerance * scale, "{what}: d{name} is off by {error:e} of {scale:e}");
            }
        }
    }
    Ok(())
}

/// Weights sum to one: the mean of ones is one, whatever queries and keys are.
#[test]
fn means_of_ones_are_one() -> Result<()> {
    for map in all_kernels().filter(|&map| is_positive(map)) {
        for rows in ATTACKS {
            for causal in [true, false] {
                let mut problem = problem(map, rows, 1.0, causal);
                problem.v.fill(1.0);
                for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
                    let output = values(&problem.forward(dtype)?)?;
                    let ones = vec![1.0; output.len()];
                    let what = format!("{map:?} {rows:?} {dtype:?}, causal {causal}");
                    assert_close(&what, &problem.output_dims(), &output, &ones, rounding(dtype));
                }
            }
        }
    }
    Ok(())
}

/// Values of every kind too, under queries and keys that are usual and large.
#[test]
fn values_of_every_kind_give_outputs_between_them() -> Result<()> {
    let values = [Constant(1e4), Identical(1e4), OneHot(1e4), Between(1e-6, 1e4), Denormal];
    for map in all_kernels().filter(|&map| is_positive(map)) {
        for (rows, of_values) in values.into_iter().flat_map(|v| [(Normal(1.0), v), (Normal(1e2), v)]) {
            for causal in [true, false] {
                let mut problem = problem(map, (rows, rows), 1.0, causal);
                let width = SHAPE.value_dim;
                problem.v = of_values.draw(&mut Random::new(3), SHAPE.v_count() / width, width);
                for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
                    let problem = problem.clone().rounded(dtype)?;
                    for (how, attention) in
                        [("fused", problem.attention(dtype)?), ("composed", problem.composed(dtype)?)]
                    {
                        let outcome = problem.run(&*attention, dtype, Layout::Contiguous)?;
                        let what = format!("{map:?} {rows:?} {dtype:?} {how}, causal {causal}, values {of_values:?}");
                        assert!(outcome.output.iter().all(|x| x.is_finite()), "{what}: not finite");
                        if of_values == Denormal {
                            // So near to zero, rounding is no part of a number any more.
                            let least = f64::from(f32::MIN_POSITIVE);
                            assert!(outcome.output.iter().all(|x| x.abs() <= least), "{what}: not denormal");
                        } else {
                            assert_eq!(outside_hull(&problem, &outcome.output, rounding(dtype)), None, "{what}");
                        }
                        let gradients = [&outcome.q, &outcome.k, &outcome.v].into_iter().flatten();
                        let is_sound = |x: &f64| x.is_finite() || dtype == DType::F16 && !x.is_nan();
                        assert!(gradients.into_iter().all(is_sound), "{what}: a gradient is not finite");
                    }
                }
            }
        }
    }
    Ok(())
}

/// With gates that forget at every pace, and a window beside the features, too.
#[test]
fn gates_and_windows_keep_outputs_finite_and_means_of_ones_one() -> Result<()> {
    for map in [FeatureMapKind::Positive, FeatureMapKind::Hyperbolic, FeatureMapKind::Relu, FeatureMapKind::Learned] {
        for rows in ATTACKS {
            let mut problem = problem(Some(map), rows, 1.0, true).gated(7);
            for dtype in [DType::F64, DType::F32, DType::BF16] {
                let wide = if dtype == DType::F64 { dtype } else { DType::F32 };
                let mut attentions: Vec<(&str, Box<dyn Attention>)> = vec![("alone", problem.attention(dtype)?)];
                if map != FeatureMapKind::Relu {
                    attentions.push(("window", Box::new(Windowed::new(9, problem.favor(wide)?)?)));
                    attentions.push(("sinks", Box::new(Windowed::new(9, problem.favor(wide)?)?.with_sinks(3)?)));
                }
                for (name, attention) in attentions {
                    let what = format!("{map} {name} {rows:?} {dtype:?}");
                    let outcome = problem.clone().rounded(dtype)?.run(&*attention, dtype, Layout::Contiguous)?;
                    for (name, numbers) in [
                        ("output", &outcome.output),
                        ("gradient of q", &outcome.q),
                        ("gradient of k", &outcome.k),
                        ("gradient of v", &outcome.v),
                        ("gradient of gates", &outcome.gates),
                    ] {
                        assert!(numbers.iter().all(|x| x.is_finite()), "{what}: the {name} is not finite");
                    }
                    let drawn = std::mem::replace(&mut problem.v, vec![1.0; SHAPE.v_count()]);
                    let ones = problem.run(&*attention, dtype, Layout::Contiguous)?.output;
                    assert_close(&what, &problem.output_dims(), &ones, &vec![1.0; ones.len()], rounding(dtype));
                    problem.v = drawn;
                }
            }
        }
    }
    Ok(())
}

/// Compares fused attention in several types with composed operations in f64 over a long sequence,
/// outputs and gradients, with gates and without.
fn long_sequence(tokens: usize, head_dim: usize, features: usize) -> Result<()> {
    let shape = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: tokens, k_len: tokens, head_dim, value_dim: head_dim };
    for map in [FeatureMapKind::Positive, FeatureMapKind::Relu] {
        for (dtype, gated) in [DType::F32, DType::F16, DType::BF16].into_iter().flat_map(|t| [(t, false), (t, true)]) {
            let mut problem = Problem::random(3, shape, Some(map), features).rounded(dtype)?;
            problem.causal = true;
            if gated {
                problem = problem.gated(4);
            }
            let exact = problem.run(&*problem.composed(DType::F64)?, DType::F64, Layout::Contiguous)?;
            let fused = problem.run(&*problem.attention(dtype)?, dtype, Layout::Contiguous)?;
            let tolerance = if dtype == DType::F32 { 1e-4 } else { 1e-2 };
            problem.assert_outcome(&format!("{dtype:?}, gated {gated}"), &fused, &exact, tolerance);
            assert_eq!(outside_hull(&problem, &fused.output, rounding(dtype)), None, "{map}, {dtype:?}, gated {gated}");
        }
    }
    Ok(())
}

#[test]
fn long_sequences_lose_no_digits() -> Result<()> {
    long_sequence(4_000, 8, 16)
}

/// A hundred thousand tokens, in the sizes of a model.
#[test]
#[ignore = "minutes; `just attack-numbers` runs it"]
fn a_hundred_thousand_tokens_lose_no_digits() -> Result<()> {
    long_sequence(100_000, 64, 128)
}

/// The sizes of a model, over more tokens than a segment of the backward pass has: the fused
/// kernels beside the f64 reference.
#[test]
fn the_sizes_of_a_model_are_the_reference() -> Result<()> {
    for (map, tokens, gated) in [
        (FeatureMapKind::Positive, 700, false),
        (FeatureMapKind::Positive, 1100, true),
        (FeatureMapKind::Hyperbolic, 600, true),
        (FeatureMapKind::Relu, 700, false),
        (FeatureMapKind::Learned, 600, false),
    ] {
        let shape =
            Shape { batch: 1, heads: 2, kv_heads: 1, q_len: tokens, k_len: tokens, head_dim: 64, value_dim: 64 };
        let mut problem = Problem::random(5, shape, Some(map), 128).rounded(DType::F32)?;
        problem.causal = true;
        if gated {
            problem = problem.gated(6);
        } else {
            let mut mask = Random::new(7).mask(tokens, 0.8);
            mask[..40].fill(false);
            problem.key_mask = Some(mask);
        }
        let fused = problem.run(&*problem.attention(DType::F32)?, DType::F32, Layout::Contiguous)?;
        problem.assert_outcome(&format!("gated {gated}"), &fused, &problem.expected(), 1e-4);
    }
    Ok(())
}

/// A sequence of which nothing is seen, among others: zeros, and no gradient, whatever it holds.
#[test]
fn rows_of_padding_alone_are_zero() -> Result<()> {
    for map in all_kernels() {
        for causal in [true, false] {
            let shape = Shape { batch: 2, ..SHAPE };
            let mut problem = Problem::random(8, shape, map, 12);
            problem.causal = causal;
            let half = |count: usize| count / 2;
            problem.k[..half(shape.k_count())].fill(1e30);
            problem.v[..half(shape.v_count())].fill(-1e30);
            problem.key_mask = Some((0..2 * SHAPE.k_len).map(|key| key >= SHAPE.k_len).collect());
            for dtype in [DType::F64, DType::F32] {
                for (how, attention) in [("fused", problem.attention(dtype)?), ("composed", problem.composed(dtype)?)] {
                    let outcome = problem.run(&*attention, dtype, Layout::Contiguous)?;
                    let what = format!("{map:?} {dtype:?} {how}, causal {causal}");
                    for (name, numbers) in [
                        ("output", &outcome.output),
                        ("gradient of q", &outcome.q),
                        ("gradient of k", &outcome.k),
                        ("gradient of v", &outcome.v),
                    ] {
                        let (hidden, seen) = numbers.split_at(half(numbers.len()));
                        assert!(hidden.iter().all(|&x| x == 0.0), "{what}: the {name} of padding is not zero");
                        assert!(seen.iter().all(|x| x.is_finite()), "{what}: the {name} is not finite");
                    }
                }
            }
        }
    }
    Ok(())
}

/// Numbers that are not finite are an error that names the argument, and no output.
#[test]
fn what_is_not_finite_is_refused() -> Result<()> {
    for map in all_kernels() {
        let problem = problem(map, (Normal(1.0), Normal(1.0)), 1.0, true);
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for dtype in [DType::F64, DType::F32, DType::BF16] {
                for which in 0..3 {
                    let mut inputs = problem.tensors(dtype)?;
                    let mut numbers = values(&inputs[which])?;
                    let place = numbers.len() * 2 / 3;
                    numbers[place] = bad;
                    inputs[which] = tensor(&numbers, inputs[which].dims(), dtype, &Device::Cpu)?;
                    let [q, k, v] = &inputs;
                    for attention in [problem.attention(dtype)?, problem.composed(dtype)?] {
                        let found: Result<Tensor> = attention.forward(Inputs::new(q, k, v), &Mask::causal());
                        let message = found.expect_err("an error").to_string();
                        let name = ["q", "k", "v"][which];
                        assert!(message.starts_with(&format!("{name} holds")), "{map:?}: {message}");
                        assert!(message.contains("must be finite"), "{map:?}: {message}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// Sums are brought to the scale of the largest key of a chunk, and not to that of its first one:
/// else keys that are larger than the first by e³¹ would gather until they overflow.
#[test]
fn keys_that_rise_inside_every_chunk_do_not_overflow() -> Result<()> {
    let tokens = 2048;
    let k: Vec<f32> = (0..tokens).map(|t| if t % 32 == 0 { -31.5 } else { 0.0 }).collect();
    let k = Tensor::from_vec(k, (1, 1, tokens, 1), &Device::Cpu)?;
    let (q, v) = (k.zeros_like()?, (k.ones_like()? * 1e22)?);
    let favor = Favor::with_map(Box::new(Exp::new(1, &Device::Cpu)?))?;
    for x in values(&favor.forward(Inputs::new(&q, &k, &v), &Mask::causal())?)? {
        assert!((x / 1e22 - 1.0).abs() < 1e-5, "{x}");
    }
    Ok(())
}

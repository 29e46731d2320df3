//! The reference is compared with what is known without it: finite differences, closed forms, plain
//! tensors.

use crate::common::{ALL_MAPS, Problem, Random, assert_close, assert_tensor_close, tensor};
use candle_core::{D, DType, Device, Result};
use performer_core::features::{FeatureMapKind, RELU_EPSILON};
use performer_core::reference::{Kernel, Shape, attention, attention_backward, features};

/// A small shape with grouped heads. It has other numbers of queries than of keys, and other
/// dimensions of heads than of values, so that a mix-up shows.
const SMALL: Shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 5, k_len: 7, head_dim: 3, value_dim: 2 };

/// Returns softmax and every feature map.
fn all_kernels() -> impl Iterator<Item = Option<FeatureMapKind>> {
    std::iter::once(None).chain(ALL_MAPS.map(Some))
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[test]
fn gradients_are_those_of_finite_differences() {
    for map in all_kernels() {
        for (causal, masked, gated) in [
            (false, false, false),
            (false, true, false),
            (true, false, false),
            (true, true, false),
            (true, false, true),
            (true, true, true),
        ] {
            let mut problem = Problem::random(1, SMALL, map, 32).scale_qk(0.5);
            problem.causal = causal;
            problem.key_mask = masked.then(|| Random::new(2).mask(SMALL.batch * SMALL.k_len, 0.7));
            if gated {
                problem = problem.gated(3);
            }
            assert_gradients(&problem, &format!("{map:?}, causal {causal}, masked {masked}, gated {gated}"));
        }
    }
}

/// Compares the gradients of every input with finite differences.
#[track_caller]
fn assert_gradients(problem: &Problem, what: &str) {
    type Field = fn(&mut Problem) -> &mut Vec<f64>;
    let analytic = attention_backward(problem.kernel(), problem.inputs(), &problem.grad_output);
    let mut fields: Vec<(&str, Vec<usize>, Field, &[f64])> = vec![
        ("q", problem.q_dims().to_vec(), |p| &mut p.q, &analytic.q),
        ("k", problem.k_dims().to_vec(), |p| &mut p.k, &analytic.k),
        ("v", problem.v_dims().to_vec(), |p| &mut p.v, &analytic.v),
    ];
    if problem.gates.is_some() {
        let dims = problem.gate_dims()[..3].to_vec();
        fields.push(("gates", dims, |p| p.gates.as_mut().expect("gates"), &analytic.gates));
    }
    for (name, dims, field, gradient) in fields {
        let numeric = finite_differences(problem, field);
        assert_close(&format!("{what}: gradient of {name}"), &dims, gradient, &numeric, 1e-7);
    }
}

/// Computes `∂(grad_output · attention) / ∂field`, by central differences.
fn finite_differences(problem: &Problem, field: fn(&mut Problem) -> &mut Vec<f64>) -> Vec<f64> {
    let step = 1e-5;
    let mut problem = problem.clone();
    (0..field(&mut problem).len())
        .map(|index| {
            let centre = field(&mut problem)[index];
            let mut loss_at = |value| {
                field(&mut problem)[index] = value;
                let output = attention(problem.kernel(), problem.inputs());
                dot(&output, &problem.grad_output)
            };
            let slope = (loss_at(centre + step) - loss_at(centre - step)) / (2.0 * step);
            field(&mut problem)[index] = centre;
            slope
        })
        .collect()
}

#[test]
fn softmax_attention_is_that_of_plain_tensors() -> Result<()> {
    let mut problem = Problem::random(3, SMALL, None, 0);
    let (dtype, device) = (DType::F64, Device::Cpu);
    let (q_len, k_len) = (SMALL.q_len, SMALL.k_len);
    let q = tensor(&problem.q, &problem.q_dims(), dtype, &device)?;
    // Every key and value head appears once for each of the query heads that share it.
    let shared = |values: &[f64], dims: [usize; 4]| {
        let [b, kv, t, d] = dims;
        let group = SMALL.heads / SMALL.kv_heads;
        tensor(values, &[b, kv, 1, t, d], dtype, &device)?.broadcast_as((b, kv, group, t, d))?.reshape((
            b,
            kv * group,
            t,
            d,
        ))
    };
    let k = shared(&problem.k, problem.k_dims())?;
    let v = shared(&problem.v, problem.v_dims())?;
    let logits = (q.matmul(&k.t()?)? / (SMALL.head_dim as f64).sqrt())?;

    for causal in [false, true] {
        // The mask is −∞ where a query must not look: beyond its own place, counted from the end.
        let hidden: Vec<f64> = (0..q_len * k_len)
            .map(|n| (n / k_len, n % k_len))
            .map(|(i, j)| causal && k_len - 1 - j < q_len - 1 - i)
            .map(|hidden| if hidden { f64::NEG_INFINITY } else { 0.0 })
            .collect();
        let hidden = tensor(&hidden, &[q_len, k_len], dtype, &device)?;
        let weights = logits.broadcast_add(&hidden)?.exp()?;
        let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
        let expected = weights.matmul(&v)?;

        problem.causal = causal;
        let output = attention(problem.kernel(), problem.inputs());
        assert_tensor_close(&format!("causal {causal}"), &expected, &output, 1e-13);
    }
    Ok(())
}

/// A window hides keys from softmax, and gives them to the features that stand before it.
#[test]
fn gradients_with_a_window_are_those_of_finite_differences() {
    use FeatureMapKind::{Elu, Positive};
    for map in [None, Some(Positive), Some(Elu)] {
        for (window, sinks) in [(3, 0), (1, 1), (1, 2)] {
            for masked in [false, true] {
                let mut problem = Problem::random(11, SMALL, map, 32).gated(12).windowed(window, sinks);
                problem.key_mask = masked.then(|| Random::new(2).mask(SMALL.batch * SMALL.k_len, 0.7));
                assert_gradients(&problem, &format!("{map:?}, W={window}, {sinks} sinks, masked {masked}"));
            }
        }
    }
}

/// The weights of features that stand before a window are those of attention without the window,
/// and the others are those of softmax: here from the kernels themselves.
#[test]
fn features_stand_before_the_window() {
    let shape = Shape { q_len: 9, k_len: 9, ..SMALL };
    let problem = Problem::random(15, shape, Some(FeatureMapKind::Positive), 4).windowed(3, 2);
    let features = problem.inputs().before_window.expect("features");
    let scale = (shape.head_dim as f64).powf(-0.25);
    let row = |x: &[f64], row: usize| -> Vec<f64> {
        x[row * shape.head_dim..][..shape.head_dim].iter().map(|x| scale * x).collect()
    };
    let mut expected = Vec::new();
    for head in 0..shape.batch * shape.heads {
        for i in 0..9 {
            let (mut sums, mut denominator) = (vec![0.0; shape.value_dim], 0.0);
            for j in 0..=i {
                let kernel = if i - j < 3 || j < 2 { Kernel::Softmax } else { features };
                let key = head / 2 * 9 + j;
                let weight = kernel.evaluate(&row(&problem.q, head * 9 + i), &row(&problem.k, key));
                denominator += weight;
                let value = &problem.v[key * shape.value_dim..][..shape.value_dim];
                sums.iter_mut().zip(value).for_each(|(sum, value)| *sum += weight * value);
            }
            expected.extend(sums.iter().map(|sum| sum / denominator));
        }
    }
    let output = attention(problem.kernel(), problem.inputs());
    assert_close("features before a window", &problem.output_dims(), &output, &expected, 1e-13);
}

/// Sinks are the first keys, and are seen beside the window: here by their definition, as a mask
/// over the weights of all keys.
#[test]
fn sinks_are_seen_beside_the_window() {
    let shape = Shape { q_len: 9, k_len: 9, ..SMALL };
    let mut problem = Problem::random(14, shape, None, 0);
    problem.causal = true;
    let (window, sinks) = (3, 2);
    let inputs = performer_core::reference::Inputs { window: Some(window), sinks, ..problem.inputs() };
    let output = attention(Kernel::Uniform, inputs);
    let mut expected = Vec::new();
    for head in 0..shape.batch * shape.heads {
        for i in 0..9 {
            let seen: Vec<usize> = (0..=i).filter(|&j| j < sinks || i - j < window).collect();
            for d in 0..shape.value_dim {
                let sum: f64 = seen.iter().map(|j| problem.v[(head / 2 * 9 + j) * shape.value_dim + d]).sum();
                expected.push(sum / seen.len() as f64);
            }
        }
    }
    assert_close("sinks", &problem.output_dims(), &output, &expected, 1e-13);
}

/// With gates of one number, the weights fall with the distance as those of RetNet do: a sum of
/// `γ^{i−j}` over the values, normalised.
#[test]
fn constant_gates_are_a_decay_with_the_distance() {
    let shape = Shape { q_len: 7, ..SMALL };
    let mut problem = Problem::random(13, shape, None, 0);
    problem.causal = true;
    let count = shape.batch * shape.kv_heads * shape.k_len;
    let decay = 0.8f64;
    problem.gates = Some(vec![decay.ln(); count]);
    let output = attention(Kernel::Uniform, problem.inputs());
    let mut expected = Vec::new();
    for head in 0..shape.batch * shape.heads {
        for i in 0..shape.q_len {
            for d in 0..shape.value_dim {
                let (mut num, mut den) = (0.0, 0.0);
                for j in 0..=i {
                    let weight = decay.powi((i - j) as i32);
                    num += weight * problem.v[(head / 2 * shape.k_len + j) * shape.value_dim + d];
                    den += weight;
                }
                expected.push(num / den);
            }
        }
    }
    assert_close("decay", &problem.output_dims(), &output, &expected, 1e-13);
}

#[test]
fn polynomial_kernels_are_exact() {
    let mut random = Random::new(4);
    for head_dim in [1, 2, 5] {
        let (x, y) = (random.normal(head_dim, 0.5), random.normal(head_dim, 0.5));
        let z = dot(&x, &y);
        for (map, expected) in [
            (FeatureMapKind::Taylor2, 1.0 + z + z * z / 2.0),
            (FeatureMapKind::Limit(2), (1.0 + z / 2.0).powi(2)),
            (FeatureMapKind::Limit(4), (1.0 + z / 4.0).powi(4)),
            (FeatureMapKind::Limit(6), (1.0 + z / 6.0).powi(6)),
        ] {
            let kernel = Kernel::Features { map, projection: &[], offsets: &[] };
            let value = kernel.evaluate(&x, &y);
            assert_close(&format!("{map:?}"), &[1], &[value], &[expected], 1e-12);
            let (fx, fy) = (features(map, &[], &[], &x), features(map, &[], &[], &y));
            let value = dot(&fx, &fy);
            assert_close(&format!("{map:?}"), &[1], &[value], &[expected], 1e-12);
        }
    }
    let elu = features(FeatureMapKind::Elu, &[], &[], &[-1.0, 0.0, 2.0]);
    assert_close("Elu", &[3], &elu, &[(-1f64).exp(), 1.0, 3.0], 1e-15);
}

/// The features are computed by hand, at one input and two projection rows: `x = 0.5`,
/// `Ωx = [1, -0.5]`, `|x|²/2 = 0.125`.
#[test]
fn features_with_two_halves_keep_their_order() {
    let of = |map| features(map, &[2.0, -1.0], &[], &[0.5]);
    let hyperbolic = [0.875, -0.625, -1.125, 0.375].map(|exponent: f64| exponent.exp() / 2.0);
    let values = of(FeatureMapKind::Hyperbolic);
    assert_close("Hyperbolic", &[4], &values, &hyperbolic, 1e-15);
    let waves = [1f64.sin(), (-0.5f64).sin(), 1f64.cos(), (-0.5f64).cos()];
    let trigonometric = waves.map(|wave| 0.125f64.exp() * wave / 2f64.sqrt());
    let values = of(FeatureMapKind::Trigonometric);
    assert_close("Trigonometric", &[4], &values, &trigonometric, 1e-15);
}

/// Random features estimate their kernels within four standard errors, measured between
/// independent groups of projection rows.
#[test]
fn random_kernels_have_their_closed_means() {
    let (head_dim, rows, groups) = (4, 500, 400);
    let mut random = Random::new(5);
    let (x, y) = (random.normal(head_dim, 0.5), random.normal(head_dim, 0.5));
    let (norm_x, norm_y) = (dot(&x, &x).sqrt(), dot(&y, &y).sqrt());
    let softmax = dot(&x, &y).exp();
    let gaussian = (dot(&x, &y) - 0.5 * (norm_x * norm_x + norm_y * norm_y)).exp();
    // The kernel is the arc-cosine kernel of degree one (Cho and Saul), plus what the ε of each
    // feature adds.
    let angle = (dot(&x, &y) / (norm_x * norm_y)).acos();
    let (pi, m) = (std::f64::consts::PI, rows as f64);
    let relu = norm_x * norm_y / (2.0 * pi) * (angle.sin() + (pi - angle) * angle.cos())
        + RELU_EPSILON * m.sqrt() * (norm_x + norm_y) / (2.0 * pi).sqrt()
        + RELU_EPSILON * RELU_EPSILON * m;

    for (map, expected) in [
        (FeatureMapKind::Positive, softmax),
        (FeatureMapKind::Hyperbolic, softmax),
        (FeatureMapKind::Trigonometric, softmax),
        (FeatureMapKind::Phase, softmax),
        (FeatureMapKind::HermiteTail, softmax),
        (FeatureMapKind::GaussianPhase, gaussian),
        (FeatureMapKind::Relu, relu),
    ] {
        let phases = match map {
            FeatureMapKind::Phase | FeatureMapKind::GaussianPhase => rows,
            _ => 0,
        };
        let estimates: Vec<f64> = (0..groups)
            .map(|_| {
                let kernel = Kernel::Features {
                    map,
                    projection: &random.normal(rows * head_dim, 1.0),
                    offsets: &random.uniform(phases, 0.0, 2.0 * pi),
                };
                kernel.evaluate(&x, &y)
            })
            .collect();
        let n = groups as f64;
        let mean = estimates.iter().sum::<f64>() / n;
        let variance = estimates.iter().map(|e| (e - mean).powi(2)).sum::<f64>() / (n - 1.0);
        let standard_error = (variance / n).sqrt();
        assert!(
            (mean - expected).abs() < 4.0 * standard_error && standard_error < 0.02 * expected,
            "{map:?}: {mean} ± {standard_error} should be {expected}"
        );
    }
}

/// The kernel is φ(x)·φ(y), although for the exponential maps it is summed from logarithms.
#[test]
fn kernels_are_dot_products_of_features() {
    for map in ALL_MAPS {
        let problem = Problem::random(6, SMALL, Some(map), 8);
        let (x, y) = (&problem.q[..3], &problem.k[..3]);
        let of = |row| features(map, &problem.projection, &problem.offsets, row);
        let value = problem.kernel().evaluate(x, y);
        assert_close(&format!("{map:?}"), &[1], &[value], &[dot(&of(x), &of(y))], 1e-12);
    }
}

#[test]
fn the_first_causal_output_is_the_first_value() {
    let shape = Shape { q_len: 7, ..SMALL };
    for map in all_kernels() {
        let mut problem = Problem::random(7, shape, map, 8);
        problem.causal = true;
        let output = attention(problem.kernel(), problem.inputs());
        for batch in 0..shape.batch {
            for head in 0..shape.heads {
                let first = (batch * shape.heads + head) * shape.q_len * shape.value_dim;
                let value = (batch * shape.kv_heads + head / 2) * shape.k_len * shape.value_dim;
                assert_close(
                    &format!("{map:?}, head {head}"),
                    &[shape.value_dim],
                    &output[first..first + shape.value_dim],
                    &problem.v[value..value + shape.value_dim],
                    1e-15,
                );
            }
        }
    }
}

/// Masked keys may hold anything, NaN included: neither outputs nor gradients depend on them.
#[test]
fn masked_keys_have_no_influence_and_no_gradient() {
    let per_sequence = |count: usize| count / SMALL.batch;
    for map in all_kernels() {
        let mut problem = Problem::random(8, SMALL, map, 8);
        // The second sequence has no key at all, the first lacks its third.
        let mask: Vec<bool> = (0..2 * SMALL.k_len).map(|n| n < SMALL.k_len && n != 2).collect();
        problem.key_mask = Some(mask.clone());
        let output = attention(problem.kernel(), problem.inputs());
        assert!(output[per_sequence(output.len())..].iter().all(|&o| o == 0.0));
        assert!(output[..per_sequence(output.len())].iter().all(|&o| o != 0.0));

        let clean = attention_backward(problem.kernel(), problem.inputs(), &problem.grad_output);
        for (size, values) in [(3, &mut problem.k), (2, &mut problem.v)] {
            for (row, values) in values.chunks_mut(size).enumerate() {
                let (sequence, key) = (row / (2 * SMALL.k_len), row % SMALL.k_len);
                if !mask[sequence * SMALL.k_len + key] {
                    values.fill(f64::NAN);
                }
            }
        }
        assert_eq!(attention(problem.kernel(), problem.inputs()), output, "{map:?}");
        let padded = attention_backward(problem.kernel(), problem.inputs(), &problem.grad_output);
        assert_eq!(padded, clean, "{map:?}");
        for (size, gradient) in [(3, &padded.k), (2, &padded.v)] {
            for (row, gradient) in gradient.chunks(size).enumerate() {
                let (sequence, key) = (row / (2 * SMALL.k_len), row % SMALL.k_len);
                let seen = mask[sequence * SMALL.k_len + key];
                assert_eq!(gradient.iter().any(|&g| g != 0.0), seen, "{map:?}, row {row}");
            }
        }
        assert!(padded.q[per_sequence(padded.q.len())..].iter().all(|&g| g == 0.0));
    }
}

/// Features of such inputs are far outside the range of `f64`; their ratios are not.
#[test]
fn large_inputs_stay_finite() {
    for map in [None, Some(FeatureMapKind::Positive), Some(FeatureMapKind::Hyperbolic)] {
        let problem = Problem::random(9, SMALL, map, 8).scale_qk(100.0);
        let output = attention(problem.kernel(), problem.inputs());
        let largest = problem.v.iter().fold(0.0, |max: f64, v| max.max(v.abs()));
        assert!(output.iter().all(|o| o.abs() <= largest), "{map:?}");
        let grads = attention_backward(problem.kernel(), problem.inputs(), &problem.grad_output);
        assert!([grads.q, grads.k, grads.v].concat().iter().all(|g| g.is_finite()));
    }
}

#[test]
#[should_panic(expected = "0.5 at [1, 0] of [2, 2] should be 3: error 6.250e-1")]
fn a_difference_is_reported_where_it_is() {
    assert_close("test", &[2, 2], &[1.0, 2.0, 0.5, 4.0], &[1.0, 2.0, 3.0, 4.0], 0.6);
}

#[test]
#[should_panic(expected = "NaN at [0] of [1] should be 1")]
fn nan_is_not_close_to_anything() {
    assert_close("test", &[1], &[f64::NAN], &[1.0], 1e30);
}

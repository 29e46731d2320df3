//! Forget gates: every attention that has them is compared with the f64 reference, outputs and
//! gradients, at every pace of forgetting; decoded in pieces; and kept from the future to the bit.

use crate::common::{
    Layout, Problem, Random, all_kernels, assert_close, assert_tensor_close, conditioned_scale, is_positive,
    mask_tensor, tensor, values,
};
use candle_core::{DType, Device, Result, Tensor, Var};
use performer_core::reference::{self, Kernel, Shape};
use performer_core::{Attention, Favor, FavorConfig, FeatureMapKind, Inputs, Mask, Softmax, State, Windowed};

/// The tolerances of attention without gates, relative to the largest element.
const TOLERANCES: [(DType, f64); 2] = [(DType::F64, 1e-9), (DType::F32, 1e-4)];

const fn shape(batch: usize, heads: usize, kv_heads: usize, tokens: usize, head_dim: usize, value_dim: usize) -> Shape {
    Shape { batch, heads, kv_heads, q_len: tokens, k_len: tokens, head_dim, value_dim }
}

fn problem(seed: u64, shape: Shape, map: Option<FeatureMapKind>, m: usize) -> Problem {
    Problem::random(seed, shape, map, m).scale_qk(conditioned_scale(map)).gated(seed + 100)
}

/// Checks a problem in f64 and f32, as it is computed by default and in composed operations.
#[track_caller]
fn check(problem: &Problem, layout: Layout) -> Result<()> {
    let expected = problem.expected();
    for (dtype, tolerance) in TOLERANCES {
        for (how, attention) in [("", problem.attention(dtype)?), (" composed", problem.composed(dtype)?)] {
            let actual = problem.run(&*attention, dtype, layout)?;
            problem.assert_outcome(&format!("{dtype:?}{how} {layout:?}"), &actual, &expected, tolerance);
        }
    }
    Ok(())
}

/// Lengths are within a chunk, at its border, and beyond several; heads are single and grouped.
#[test]
fn every_map_is_the_reference() -> Result<()> {
    for map in all_kernels() {
        for (shape, m) in [
            (shape(2, 2, 2, 1, 4, 4), 8),
            (shape(1, 4, 2, 2, 3, 5), 8),
            (shape(2, 1, 1, 63, 8, 4), 5),
            (shape(1, 4, 2, 65, 5, 3), 16),
            (shape(3, 3, 1, 20, 2, 1), 4),
            (shape(1, 2, 1, 500, 4, 4), 8),
        ] {
            check(&problem(1, shape, map, m), Layout::Contiguous)?;
        }
    }
    Ok(())
}

#[test]
fn long_sequences_and_wide_heads_are_the_reference() -> Result<()> {
    for map in [None, Some(FeatureMapKind::Positive), Some(FeatureMapKind::Relu)] {
        check(&problem(2, shape(1, 2, 1, 1000, 4, 4), map, 8), Layout::Contiguous)?;
        check(&problem(2, shape(1, 2, 1, 1500, 4, 4), map, 3), Layout::Contiguous)?;
        check(&problem(3, shape(1, 2, 1, 200, 64, 64), map, 128), Layout::Contiguous)?;
        check(&problem(4, shape(1, 4, 2, 130, 40, 8), map, 24), Layout::Contiguous)?;
    }
    Ok(())
}

#[test]
fn strided_inputs_and_hidden_keys_are_the_reference() -> Result<()> {
    for map in all_kernels() {
        let mut problem = problem(5, shape(2, 4, 2, 75, 4, 3), map, 8);
        let mut mask = Random::new(6).mask(2 * 75, 0.7);
        mask[..10].fill(false);
        problem.key_mask = Some(mask);
        for layout in Layout::ALL {
            check(&problem, layout)?;
        }
    }
    Ok(())
}

#[test]
fn half_precision_inputs_are_the_reference() -> Result<()> {
    for map in all_kernels() {
        for dtype in [DType::F16, DType::BF16] {
            let problem = problem(7, shape(2, 4, 2, 65, 6, 4), map, 16).rounded(dtype)?;
            for attention in [problem.attention(dtype)?, problem.composed(dtype)?] {
                let actual = problem.run(&*attention, dtype, Layout::Contiguous)?;
                problem.assert_outcome(&format!("{dtype:?}"), &actual, &problem.expected(), 1e-2);
            }
        }
    }
    Ok(())
}

/// Every gate forgets everything but e^-40, or nothing: sums of a thousand of them have no digits
/// left for the weights of neighbours, unless they begin again.
#[test]
fn strong_gates_lose_no_digits() -> Result<()> {
    for map in all_kernels().filter(|&map| is_positive(map)) {
        let mut problem = problem(8, shape(1, 2, 1, 300, 4, 4), map, 8);
        for (t, gate) in problem.gates.as_mut().expect("gates").iter_mut().enumerate() {
            *gate = if t % 4 == 0 || t < 40 { -40.0 } else { -0.01 };
        }
        check(&problem, Layout::Contiguous)?;
    }
    Ok(())
}

/// Weights that fade by e^-6 from one tile of keys to the next still count two tiles later, and
/// sinks on this side of a gate that forgets everything count beside those on the other side.
#[test]
fn what_fades_is_seen_until_it_is_nothing() -> Result<()> {
    let mut fading = problem(22, shape(1, 2, 1, 500, 4, 3), None, 1);
    fading.gates = Some(vec![-0.05; 500]);
    check(&fading, Layout::Contiguous)?;
    let mut divided = problem(23, shape(1, 2, 1, 600, 4, 3), None, 1);
    divided.gates = Some((0..600).map(|t| if t == 64 { -100.0 } else { -0.001 }).collect());
    check_window(&divided, 5, 130)
}

/// A row that sees no key, beside a key so long that its square is beyond the numbers, leaves the
/// gradients of other rows as they are.
#[test]
fn rows_without_keys_leave_others_alone() -> Result<()> {
    let mut problem = problem(24, shape(1, 1, 1, 160, 4, 3), None, 1);
    problem.gates = Some(vec![-0.01; 160]);
    let mut seen = vec![true; 160];
    seen[137..].fill(false);
    problem.key_mask = Some(seen);
    problem.k[140 * 4..141 * 4].copy_from_slice(&[2e19, 0.0, 0.0, 0.0]);
    check_window(&problem, 8, 0)
}

/// Checks a window of softmax in f32.
fn check_window(problem: &Problem, window: usize, sinks: usize) -> Result<()> {
    let inputs = reference::Inputs { window: Some(window), sinks, ..problem.inputs() };
    let gradients = reference::attention_backward(problem.kernel(), inputs, &problem.grad_output);
    let expected = crate::common::Outcome {
        output: reference::attention(problem.kernel(), inputs),
        q: gradients.q,
        k: gradients.k,
        v: gradients.v,
        gates: gradients.gates,
    };
    let softmax = Softmax::new().with_window(window)?.with_sinks(sinks)?;
    let outcome = problem.run(&softmax, DType::F32, Layout::Contiguous)?;
    problem.assert_outcome(&format!("W={window}, {sinks} sinks"), &outcome, &expected, 1e-4);
    Ok(())
}

/// Some keys are so long that they outweigh all that has been forgotten since, a thousand tokens
/// back, where most have no weight any more. With sinks and windows, too.
#[test]
fn long_keys_are_seen_across_gates() -> Result<()> {
    let mut problem = problem(21, shape(1, 2, 1, 1500, 4, 3), None, 1);
    problem.gates = Some((0..1500).map(|t| if t % 100 == 0 { -9.0 } else { -0.05 }).collect());
    for t in [3, 130, 400, 777] {
        problem.k[t * 4..(t + 1) * 4].iter_mut().for_each(|x| *x *= 120.0);
    }
    check(&problem, Layout::Contiguous)?;
    for (window, sinks) in [(700, 0), (150, 5), (64, 200)] {
        check_window(&problem, window, sinks)?;
    }
    Ok(())
}

/// Constant gates `ln γ` are the decay of RetNet, whose weights `γ^{i−j}` are written out here:
/// with gradients, in grouped heads, by kernels and by composed operations, at once and token by
/// token.
#[test]
fn constant_gates_are_the_decay_of_retnet() -> Result<()> {
    use FeatureMapKind::{Elu, Positive, Relu};
    let gamma = 0.9f64;
    for map in [None, Some(Positive), Some(Elu), Some(Relu)] {
        let mut problem = problem(9, shape(1, 4, 2, 80, 5, 3), map, 8);
        problem.gates = Some(vec![gamma.ln(); 2 * 80]);
        let (expected, of_ln_gamma) = written_out(&problem, gamma)?;
        for (dtype, tolerance) in [(DType::F64, 1e-11), TOLERANCES[1]] {
            for (how, attention) in [("", problem.attention(dtype)?), (" composed", problem.composed(dtype)?)] {
                let what = format!("{map:?} {dtype:?}{how}");
                let actual = problem.run(&*attention, dtype, Layout::Contiguous)?;
                for (name, actual, expected) in [
                    ("output", &actual.output, &expected.output),
                    ("q", &actual.q, &expected.q),
                    ("k", &actual.k, &expected.k),
                    ("v", &actual.v, &expected.v),
                ] {
                    assert_close(&format!("{what}: {name}"), &[actual.len()], actual, expected, tolerance);
                }
                // All gates are ln γ, so its gradient is the sum of theirs.
                let sum: f64 = actual.gates.iter().sum();
                assert_close(&format!("{what}: gates"), &[1], &[sum], &[of_ln_gamma], 100.0 * tolerance);
                let ([q, k, v], gates) = (problem.tensors(dtype)?, problem.gate_tensor(dtype)?);
                let mut state = State::new();
                let mut step = |t: usize| -> Result<Tensor> {
                    let token = |x: &Tensor| x.narrow(2, t, 1);
                    let (q, k, v, gates) = (token(&q)?, token(&k)?, token(&v)?, token(&gates)?);
                    attention.extend(Inputs::new(&q, &k, &v).with_gates(&gates), &mut state)
                };
                let outs = (0..80).map(&mut step).collect::<Result<Vec<Tensor>>>()?;
                assert_tensor_close(&format!("{what}: decoded"), &Tensor::cat(&outs, 2)?, &expected.output, tolerance);
            }
        }
    }
    Ok(())
}

/// Attention whose weights are the kernel times `γ^{i−j}`, in f64, with the gradients of a problem;
/// and the gradient of `ln γ`.
fn written_out(problem: &Problem, gamma: f64) -> Result<(crate::common::Outcome, f64)> {
    let Shape { heads, kv_heads, q_len: t, head_dim, .. } = problem.shape;
    let [q, k, v] = problem.tensors(DType::F64)?.map(|x| Var::from_tensor(&x));
    let (q, k, v) = (q?, k?, v?);
    let of_each_head = |x: &Tensor| -> Result<Tensor> {
        let (b, _, t, width) = x.dims4()?;
        Tensor::cat(&vec![x.unsqueeze(2)?; heads / kv_heads], 2)?.reshape((b, heads, t, width))
    };
    let scale = (head_dim as f64).powf(-0.25);
    let (x, y) = ((q.as_tensor() * scale)?, (of_each_head(&k)? * scale)?);
    let kernel = match problem.map {
        None => x.matmul(&y.t()?)?.exp()?,
        Some(_) => problem.favor(DType::F64)?.map().kernel(&x, &y)?,
    };
    let ln_gamma = Var::from_tensor(&Tensor::new(gamma.ln(), &Device::Cpu)?)?;
    let pairs = || (0..t * t).map(|n| (n / t, n % t));
    let distances: Vec<f64> = pairs().map(|(i, j)| i as f64 - j as f64).collect();
    let seen: Vec<f64> = pairs().map(|(i, j)| f64::from(u8::from(j <= i))).collect();
    let [distances, seen] = [distances, seen].map(|x| tensor(&x, &[t, t], DType::F64, &Device::Cpu));
    let decay = (distances?.broadcast_mul(&ln_gamma)?.exp()? * seen?)?;
    let weights = kernel.broadcast_mul(&decay)?;
    let output = weights.matmul(&of_each_head(&v)?)?.broadcast_div(&weights.sum_keepdim(3)?)?;
    let grad_output = tensor(&problem.grad_output, &problem.output_dims(), DType::F64, &Device::Cpu)?;
    let gradients = (&output * grad_output)?.sum_all()?.backward()?;
    let gradient = |var: &Var| values(gradients.get(var).expect("a gradient"));
    let output = values(&output)?;
    let outcome =
        crate::common::Outcome { output, q: gradient(&q)?, k: gradient(&k)?, v: gradient(&v)?, gates: Vec::new() };
    Ok((outcome, gradient(&ln_gamma)?[0]))
}

/// The attentions of the tests below, each with its name.
fn attentions(problem: &Problem, dtype: DType) -> Result<Vec<(String, Box<dyn Attention>)>> {
    let mut all: Vec<(String, Box<dyn Attention>)> = vec![
        (format!("{:?}", problem.map), problem.attention(dtype)?),
        (format!("{:?} composed", problem.map), problem.composed(dtype)?),
    ];
    match problem.map {
        None => {
            all.push(("softmax of 9".into(), Box::new(Softmax::new().with_window(9)?)));
            let sinks = |window, sinks| Softmax::new().with_window(window)?.with_sinks(sinks);
            all.push(("softmax of 9 and 3 sinks".into(), Box::new(sinks(9, 3)?)));
            all.push(("softmax of 1 and 5 sinks".into(), Box::new(sinks(1, 5)?)));
        }
        Some(FeatureMapKind::Positive) => {
            all.push(("window of 9".into(), Box::new(Windowed::new(9, problem.favor(dtype)?)?)));
            all.push(("window of 64".into(), Box::new(Windowed::new(64, problem.favor(dtype)?)?)));
            let sinks = Windowed::new(9, problem.favor(dtype)?)?.with_sinks(3)?;
            all.push(("window of 9 and 3 sinks".into(), Box::new(sinks)));
        }
        _ => {}
    }
    Ok(all)
}

const T: usize = 100;
const SHAPE: Shape = shape(2, 4, 2, T, 6, 3);

/// Another future of queries, keys, values and gates does not change a bit of the past.
#[test]
fn the_future_leaves_the_past_alone() -> Result<()> {
    for map in all_kernels() {
        for dtype in [DType::F32, DType::F64] {
            let problem = problem(10, SHAPE, map, 12);
            let ([q, k, v], gates) = (problem.tensors(dtype)?, problem.gate_tensor(dtype)?);
            for (name, attention) in attentions(&problem, dtype)? {
                let forward = |q: &Tensor, k: &Tensor, v: &Tensor, gates: &Tensor| {
                    attention.forward(Inputs::new(q, k, v).with_gates(gates), &Mask::causal())
                };
                let whole = forward(&q, &k, &v, &gates)?;
                for cut in [1, 2, 7, 15, 16, 17, 31, 32, 64, 90, 99] {
                    let change = |x: &Tensor, by: f64| {
                        let future = (x.narrow(2, cut, T - cut)? * by)?;
                        Tensor::cat(&[&x.narrow(2, 0, cut)?, &future], 2)
                    };
                    for (by, of_gates) in [(-1.7, 30.0), (1.0, 0.0), (0.3, 1e6)] {
                        let (q, k, v) = (change(&q, by)?, change(&k, by)?, change(&v, by)?);
                        let out = forward(&q, &k, &v, &change(&gates, of_gates)?)?;
                        let past = |x: &Tensor| values(&x.narrow(2, 0, cut)?);
                        let pairs = past(&out)?.into_iter().zip(past(&whole)?);
                        let different = pairs.filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                        assert_eq!(different, 0, "{name} {dtype:?}: outputs before token {cut}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// Any split is one pass; a state goes on with the same bits after it was saved.
#[test]
fn decoding_is_one_pass() -> Result<()> {
    for map in all_kernels() {
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5)] {
            let problem = problem(11, SHAPE, map, 8);
            let ([q, k, v], gates) = (problem.tensors(dtype)?, problem.gate_tensor(dtype)?);
            for (name, attention) in attentions(&problem, dtype)? {
                let whole = values(&attention.forward(Inputs::new(&q, &k, &v).with_gates(&gates), &Mask::causal())?)?;
                for split in [&[T][..], &[1; T], &[1, 99], &[33, 1, 1, 65], &[2, 3, 5, 7, 11, 13, 17, 42]] {
                    let (mut state, mut start, mut outs) = (State::new(), 0, Vec::new());
                    for &length in split {
                        let part = |x: &Tensor| x.narrow(2, start, length);
                        let (q, k, v, gates) = (part(&q)?, part(&k)?, part(&v)?, part(&gates)?);
                        outs.push(attention.extend(Inputs::new(&q, &k, &v).with_gates(&gates), &mut state)?);
                        start += length;
                        state = State::from_record(&state.record()?)?;
                    }
                    let what = format!("{name} {dtype:?} in {split:?}");
                    assert_tensor_close(&what, &Tensor::cat(&outs, 2)?, &whole, tolerance);
                }
            }
        }
    }
    Ok(())
}

/// Tokens without gates keep everything, before and after tokens that have some.
#[test]
fn tokens_without_gates_forget_nothing() -> Result<()> {
    for map in [None, Some(FeatureMapKind::Positive)] {
        let mut problem = problem(12, SHAPE, map, 8);
        let with_gates = 30..60;
        for (n, gate) in problem.gates.as_mut().expect("gates").iter_mut().enumerate() {
            if !with_gates.contains(&(n % T)) {
                *gate = 0.0;
            }
        }
        let ([q, k, v], gates) = (problem.tensors(DType::F64)?, problem.gate_tensor(DType::F64)?);
        for (name, attention) in attentions(&problem, DType::F64)? {
            let whole = values(&attention.forward(Inputs::new(&q, &k, &v).with_gates(&gates), &Mask::causal())?)?;
            let (mut state, mut outs) = (State::new(), Vec::new());
            for (start, length) in [(0, 30), (30, 30), (60, 40)] {
                let part = |x: &Tensor| x.narrow(2, start, length);
                let (q, k, v, gates) = (part(&q)?, part(&k)?, part(&v)?, part(&gates)?);
                let inputs = Inputs::new(&q, &k, &v);
                let inputs = if start == 30 { inputs.with_gates(&gates) } else { inputs };
                outs.push(attention.extend(inputs, &mut state)?);
            }
            assert_tensor_close(&name, &Tensor::cat(&outs, 2)?, &whole, 1e-12);
        }
    }
    Ok(())
}

/// A window of softmax alone, with the gradients of the reference.
#[test]
fn a_window_of_softmax_is_the_reference() -> Result<()> {
    for (t, window, sinks) in [
        (1, 1, 0),
        (63, 7, 0),
        (130, 64, 0),
        (300, 129, 0),
        (63, 7, 4),
        (300, 3, 1),
        (400, 129, 7),
        (400, 5, 300),
        (1000, 5, 130),
    ] {
        let problem = problem(13, shape(2, 4, 2, t, 8, 5), None, 1);
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5)] {
            let problem = problem.clone().rounded(dtype)?;
            let inputs = reference::Inputs { window: Some(window), sinks, ..problem.inputs() };
            let output = reference::attention(problem.kernel(), inputs);
            let gradients = reference::attention_backward(problem.kernel(), inputs, &problem.grad_output);
            for softmax in [Softmax::new(), Softmax::new().composed()] {
                let outcome =
                    problem.run(&softmax.with_window(window)?.with_sinks(sinks)?, dtype, Layout::Transposed)?;
                let expected = crate::common::Outcome {
                    output: output.clone(),
                    q: gradients.q.clone(),
                    k: gradients.k.clone(),
                    v: gradients.v.clone(),
                    gates: gradients.gates.clone(),
                };
                let what = format!("{dtype:?} W={window}, {sinks} sinks");
                problem.assert_outcome(&what, &outcome, &expected, tolerance);
            }
        }
    }
    Ok(())
}

/// Gates of 0 are no gates, up to rounding.
#[test]
fn gates_of_zero_are_no_gates() -> Result<()> {
    for map in all_kernels() {
        let mut problem = problem(16, SHAPE, map, 8);
        problem.gates.as_mut().expect("gates").fill(0.0);
        let ([q, k, v], gates) = (problem.tensors(DType::F64)?, problem.gate_tensor(DType::F64)?);
        for (name, attention) in attentions(&problem, DType::F64)? {
            let without = attention.forward(Inputs::new(&q, &k, &v), &Mask::causal())?;
            let with = attention.forward(Inputs::new(&q, &k, &v).with_gates(&gates), &Mask::causal())?;
            assert_tensor_close(&name, &with, &values(&without)?, 1e-12);
        }
    }
    Ok(())
}

/// Means of the values, with gates and without: attention without queries, keys and features.
#[test]
fn uniform_attention_is_the_reference() -> Result<()> {
    let long = [500, 1000].map(|t| shape(1, 2, 1, t, 4, 4));
    let shapes = [shape(1, 2, 1, 1, 4, 3), shape(2, 4, 2, 63, 4, 3)].into_iter().chain(long);
    for (shape, hidden) in shapes.flat_map(|shape| [(shape, false), (shape, true)]) {
        for gated in [false, true] {
            let mut problem = problem(17, shape, None, 1);
            // The first key is seen, so that every row sees one.
            problem.key_mask = hidden.then(|| {
                let mut mask = Random::new(18).mask(shape.batch * shape.k_len, 0.7);
                mask.iter_mut().step_by(shape.k_len).for_each(|seen| *seen = true);
                mask
            });
            if !gated {
                problem.gates = None;
            }
            let output = reference::attention(Kernel::Uniform, problem.inputs());
            let gradients = reference::attention_backward(Kernel::Uniform, problem.inputs(), &problem.grad_output);
            for (dtype, tolerance) in TOLERANCES {
                let config: performer_core::AttentionConfig = "uniform".parse().expect("a name");
                let uniform = config.build(4, 1, dtype, &Device::Cpu)?;
                let actual = problem.run(&*uniform, dtype, Layout::Transposed)?;
                let expected = crate::common::Outcome {
                    output: output.clone(),
                    q: gradients.q.clone(),
                    k: gradients.k.clone(),
                    v: gradients.v.clone(),
                    gates: gradients.gates.clone(),
                };
                let what = format!("uniform {dtype:?}, hidden {hidden}");
                problem.assert_outcome(&what, &actual, &expected, tolerance);
            }
        }
    }
    Ok(())
}

#[test]
fn what_cannot_be_is_refused() -> Result<()> {
    let problem = problem(18, SHAPE, Some(FeatureMapKind::Positive), 8);
    let ([q, k, v], gates) = (problem.tensors(DType::F32)?, problem.gate_tensor(DType::F32)?);
    let softmax: Box<dyn Attention> = Box::new(Softmax::new());
    let windowed: Box<dyn Attention> = Box::new(Windowed::new(9, problem.favor(DType::F32)?)?);
    for attention in [problem.attention(DType::F32)?, problem.composed(DType::F32)?, softmax, windowed] {
        let error = |gates: &Tensor, mask: &Mask| {
            let result = attention.forward(Inputs::new(&q, &k, &v).with_gates(gates), mask);
            result.expect_err("an error").to_string()
        };
        assert!(error(&gates, &Mask::full()).contains("give Mask::causal()"));
        let numbers = gates.to_vec3::<f32>()?;
        for bad in [0.5, f32::NAN, f32::NEG_INFINITY] {
            let mut numbers = numbers.clone();
            numbers[1][0][7] = bad;
            let gates = Tensor::new(numbers, &Device::Cpu)?;
            let message = error(&gates, &Mask::causal());
            assert!(message.contains("[1, 0, 7]") && message.contains("at most 0"), "{message}");
            let mut state = State::new();
            let extended = attention.extend(Inputs::new(&q, &k, &v).with_gates(&gates), &mut state);
            assert!(extended.is_err() && state.tokens() == 0);
        }
        assert!(error(&gates.narrow(2, 0, 5)?, &Mask::causal()).contains("(batch, key heads, keys)"));
    }
    Ok(())
}

/// A mask with keys hides keys, and the gates of hidden keys count.
#[test]
fn gates_of_hidden_keys_count() -> Result<()> {
    let device = &Device::Cpu;
    let v = Tensor::new(&[[[[1f32], [5.0], [2.0]]]], device)?;
    let gates = Var::from_tensor(&Tensor::new(&[[[0f32, -1.0, -1.0]]], device)?)?;
    let mask = Mask::causal().with_keys(&mask_tensor(&[true, false, true], &[1, 3], device)?)?;
    let favor = Favor::new(&FavorConfig::default(), 1, 1, DType::F32, device)?;
    let zeros = v.zeros_like()?;
    let out = favor.forward(Inputs::new(&zeros, &zeros, &v).with_gates(&gates), &mask)?;
    let weight = (-2f64).exp();
    assert_close("hidden", &[1], &values(&out)?[2..], &[(weight + 2.0) / (weight + 1.0)], 1e-6);
    Ok(())
}

/// The backward pass goes over tiles of 64 queries. In the last one, which has fewer, the columns
/// of no query must not keep what the tile before left there: it may be too large for a sum.
#[test]
fn columns_without_a_query_are_in_no_sum() -> Result<()> {
    let by = |early: f32, late: f32| {
        let numbers: Vec<f32> = (0..70).map(|t| if t < 64 { early } else { late }).collect();
        Tensor::from_vec(numbers, (1, 1, 70, 1), &Device::Cpu)
    };
    let (q, v) = (by(0.1, 0.1)?, Var::from_tensor(&by(1.0, 1e25)?)?);
    let gates = Var::from_tensor(&Tensor::full(-0.1f32, (1, 1, 70), &Device::Cpu)?)?;
    let out = Softmax::new().forward(Inputs::new(&q, &q, &v).with_gates(&gates), &Mask::causal())?;
    let gradients = (out * by(1e25, 1e-25)?)?.sum_all()?.backward()?;
    let gradient = values(gradients.get(&gates).expect("a gradient of the gates"))?;
    assert!(gradient.iter().all(|g| g.is_finite()), "{gradient:?}");
    Ok(())
}

/// Inputs without a batch or without tokens give outputs without them, gated as well.
#[test]
fn empty_inputs_give_empty_outputs() -> Result<()> {
    for map in all_kernels() {
        let problem = problem(19, SHAPE, map, 8);
        for (name, attention) in attentions(&problem, DType::F32)? {
            for (b, t) in [(0, 7), (2, 0), (0, 0)] {
                let zeros = |heads, width| Tensor::zeros((b, heads, t, width), DType::F32, &Device::Cpu);
                let (q, k, v) = (zeros(4, 6)?, zeros(2, 6)?, zeros(2, 3)?);
                let gates = Tensor::zeros((b, 2, t), DType::F32, &Device::Cpu)?;
                for inputs in [Inputs::new(&q, &k, &v), Inputs::new(&q, &k, &v).with_gates(&gates)] {
                    let out = attention.forward(inputs, &Mask::causal())?;
                    assert_eq!(out.dims(), [b, 4, t, 3], "{name}");
                }
            }
        }
    }
    Ok(())
}

/// A window of softmax remembers its keys and values, their gates, and for its sinks how much was
/// forgotten of them in all; a piece of no tokens changes nothing.
#[test]
fn a_window_of_softmax_counts_its_bytes_and_takes_empty_pieces() -> Result<()> {
    let x = tensor(&Random::new(3).normal(48, 1.0), &[1, 2, 6, 4], DType::F32, &Device::Cpu)?;
    let gates = Tensor::full(-0.5f32, (1, 2, 6), &Device::Cpu)?;
    for (window, kept) in [(3, 2 + 1), (1, 1)] {
        let softmax = Softmax::new().with_window(window)?.with_sinks(1)?;
        let mut state = State::new();
        softmax.extend(Inputs::new(&x, &x, &x).with_gates(&gates), &mut state)?;
        // For each of the two heads: rows of 4, their gates, and a number for the sink.
        let bytes = 4 * 2 * (kept * (4 + 4) + kept + 1);
        assert_eq!(state.bytes(), bytes, "window {window}");
        let (none, no_gates) = (x.narrow(2, 0, 0)?, gates.narrow(2, 0, 0)?);
        let out = softmax.extend(Inputs::new(&none, &none, &none).with_gates(&no_gates), &mut state)?;
        assert_eq!((out.dims(), state.tokens(), state.bytes()), (&[1, 2, 0, 4][..], 6, bytes), "window {window}");
    }
    Ok(())
}

/// A causal mask that hides keys.
fn hiding(keys: &[u8]) -> Result<Mask> {
    Mask::causal().with_keys(&Tensor::from_slice(keys, (1, keys.len()), &Device::Cpu)?)
}

/// A gate of −1e30 is allowed and forgets everything. Sums of such gates round by more than any
/// logarithm, and must still give no NaN: neither in outputs nor in gradients of what is visible.
#[test]
fn gates_at_their_border_with_hidden_keys_are_finite() -> Result<()> {
    let favor = |dtype, composed: bool| -> Result<Favor> {
        let favor = Favor::new(&FavorConfig::default().with_features(8), 4, 1, dtype, &Device::Cpu)?;
        Ok(if composed { favor.composed() } else { favor })
    };
    let gates_of =
        |numbers: &[f64], dtype| Tensor::from_slice(numbers, (1, 1, numbers.len()), &Device::Cpu)?.to_dtype(dtype);
    for (dtype, composed) in [(DType::F32, false), (DType::F32, true), (DType::F64, false)] {
        let favor = favor(dtype, composed)?;
        let what = format!("{dtype:?}, composed {composed}");
        // Rows that see no key are zero.
        let x = Tensor::ones((1, 1, 2, 4), dtype, &Device::Cpu)?;
        let gates = gates_of(&[-1e30, 0.0], dtype)?;
        let out = favor.forward(Inputs::new(&x, &x, &x).with_gates(&gates), &hiding(&[0, 0])?)?;
        assert!(values(&out)?.iter().all(|&x| x == 0.0), "{what}: {out}");
        // The first value is all that the last row sees.
        let x = Tensor::rand(-1f64, 1.0, (1, 1, 4, 4), &Device::Cpu)?.to_dtype(dtype)?;
        let gates = gates_of(&[0.0, -1e30, -1e30, -1e30], dtype)?;
        let out = favor.forward(Inputs::new(&x, &x, &x).with_gates(&gates), &hiding(&[1, 0, 0, 0])?)?;
        let (last, first) = (values(&out.narrow(2, 3, 1)?)?, values(&x.narrow(2, 0, 1)?)?);
        assert_close(&what, &[4], &last, &first, 1e-5);
        // Hidden tokens behind visible ones change nothing of these, whatever their gates are.
        let numbers: Vec<f64> = (0..8).map(|t| if t < 5 { -0.1 } else { -1e30 }).collect();
        let gradients = |tokens: usize| -> Result<Vec<Vec<f64>>> {
            let base = Tensor::arange(0f64, 32.0, &Device::Cpu)?.sin()?.reshape((1, 1, 8, 4))?.to_dtype(dtype)?;
            let vars = [1.0, 0.7, 1.3].map(|scale| Var::from_tensor(&(base.narrow(2, 0, tokens)? * scale)?));
            let [q, k, v] = vars;
            let (q, k, v) = (q?, k?, v?);
            let gates = Var::from_tensor(&gates_of(&numbers[..tokens], dtype)?)?;
            let mask: Vec<u8> = (0..tokens).map(|t| u8::from(t < 5)).collect();
            let out = favor.forward(Inputs::new(&q, &k, &v).with_gates(&gates), &hiding(&mask)?)?;
            let grads = out.narrow(2, 0, 5)?.sqr()?.sum_all()?.backward()?;
            let of = |var: &Var| values(&grads.get(var).expect("a gradient").narrow(2, 0, 5)?);
            [&q, &k, &v, &gates].into_iter().map(of).collect()
        };
        for (n, (with, without)) in gradients(8)?.iter().zip(&gradients(5)?).enumerate() {
            assert_close(&format!("{what}, gradient {n}"), &[with.len()], with, without, 1e-4);
        }
    }
    Ok(())
}

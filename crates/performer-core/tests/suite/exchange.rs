//! One sequence on several threads, each of which holds a segment: outputs and gradients are those
//! of one process, with every attention that can be cut, and nothing of a later segment comes to an
//! earlier one.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use performer_core::{
    Attention, AttentionConfig, Favor, FavorConfig, Inputs, LayerParts, Mask, MultiHeadAttention, MultiHeadConfig,
    Rotary, Softmax, State, Tape, Windowed,
    attention::Segment,
    features::FeatureMapKind,
    reference::{self, Shape},
};

use crate::common::{
    ALL_MAPS, Problem, Random, assert_close, conditioned_scale, is_positive, on_segments, tensor, values,
};

const T: usize = 24;
/// A batch of 3 and 2 key heads: their sum is not their product.
const SHAPE: Shape = Shape { batch: 3, heads: 4, kv_heads: 2, q_len: T, k_len: T, head_dim: 6, value_dim: 3 };
/// With 6, not every segment receives in the last round of a scan.
const COUNTS: [usize; 5] = [1, 2, 4, 6, 8];

/// What a segment computes, or what all of them compute together: output and gradients of q, k, v
/// and gates.
type Numbers = Vec<Vec<f64>>;

/// Computes the output of every segment and the gradients of its inputs, of the problem's weighted
/// sum of outputs, and puts segments together.
fn cut(attention: &dyn Attention, problem: &Problem, dtype: DType, count: usize) -> Result<Numbers> {
    let ([q, k, v], length) = (problem.tensors(dtype)?, T / count);
    let weights = tensor(&problem.grad_output, &problem.output_dims(), dtype, q.device())?;
    let gates = problem.gates.as_ref().map(|_| problem.gate_tensor(dtype)).transpose()?;
    let of_segments = on_segments(count, |thread| {
        let segment = Segment::new(thread);
        let part = |x: &Tensor| x.narrow(2, segment.index() * length, length);
        let own = |x: &Tensor| Var::from_tensor(&part(x)?.contiguous()?);
        let [q, k, v] = [own(&q)?, own(&k)?, own(&v)?];
        let gates = gates.as_ref().map(own).transpose()?;
        let inputs = Inputs::new(&q, &k, &v);
        let inputs = gates.as_ref().map_or(inputs, |gates| inputs.with_gates(gates));
        // With a tape and without.
        let tape = count.is_multiple_of(4).then(Tape::start);
        let out = attention.forward_segment(inputs, &segment)?;
        let loss = segment.close(&(&out * part(&weights)?)?.sum_all()?)?;
        let store = match &tape {
            Some(tape) => tape.backward(&loss)?,
            None => loss.backward()?,
        };
        let mut tensors = vec![out.detach()];
        for input in [Some(&q), Some(&k), Some(&v), gates.as_ref()].into_iter().flatten() {
            tensors.push(store.get(input).expect("a gradient").clone());
        }
        Ok(tensors)
    })?;
    let tensors = of_segments[0].len();
    let together = |i: usize| -> Result<Vec<f64>> {
        values(&Tensor::cat(&of_segments.iter().map(|tensors| &tensors[i]).collect::<Vec<_>>(), 2)?)
    };
    (0..tensors).map(together).collect()
}

fn positive_maps() -> impl Iterator<Item = FeatureMapKind> {
    ALL_MAPS.into_iter().filter(|&map| is_positive(Some(map)))
}

fn problem(map: Option<FeatureMapKind>, gated: bool) -> Problem {
    let mut problem = Problem::random(41, SHAPE, map, 10).scale_qk(conditioned_scale(map)).gated(42);
    if !gated {
        problem.gates = None;
    }
    problem
}

const NAMES: [&str; 5] = ["output", "gradient of q", "gradient of k", "gradient of v", "gradient of gates"];

/// Compares with the reference in f64.
fn compare(what: &str, problem: &Problem, numbers: &Numbers, tolerance: f64) {
    let output = reference::attention(problem.kernel(), problem.inputs());
    let gradients = reference::attention_backward(problem.kernel(), problem.inputs(), &problem.grad_output);
    let expected = [&output, &gradients.q, &gradients.k, &gradients.v, &gradients.gates];
    let dims = [problem.output_dims(), problem.q_dims(), problem.k_dims(), problem.v_dims(), problem.gate_dims()];
    for (i, numbers) in numbers.iter().enumerate() {
        let tolerance = if i == 0 { tolerance } else { 10.0 * tolerance };
        assert_close(&format!("{what}: {}", NAMES[i]), &dims[i], numbers, expected[i], tolerance);
    }
}

#[test]
fn favor_in_segments_is_the_reference() -> Result<()> {
    for (map, gated) in positive_maps().flat_map(|map| [(map, false), (map, true)]) {
        for (dtype, tolerance) in [(DType::F64, 1e-10), (DType::F32, 1e-5)] {
            let problem = problem(Some(map), gated).rounded(dtype)?;
            for count in COUNTS {
                let numbers = cut(&problem.favor(dtype)?, &problem, dtype, count)?;
                compare(&format!("{map}, gates {gated}, {dtype:?}, {count} segments"), &problem, &numbers, tolerance);
            }
        }
    }
    Ok(())
}

/// Affine maps `x → a·x + b`, one of each segment and the earliest applied first: their composition
/// is associative and does not commute. Gradients come back to `a` and `b` of all earlier segments.
#[test]
fn segments_before_are_merged_in_order_with_gradients() -> Result<()> {
    for count in 2..=9 {
        let of = |index: usize| [1.0 + 0.1 * index as f64, index as f64 - 2.0];
        let outcomes = on_segments(count, |thread| {
            let segment = Segment::new(thread);
            let own = Var::from_slice(&of(segment.index()), 2, &Device::Cpu)?;
            let part = |x: &Tensor, i| x.narrow(0, i, 1);
            let merge = |before: &Tensor, after: &Tensor| -> Result<Tensor> {
                let slope = (part(before, 0)? * part(after, 0)?)?;
                let shift = ((part(before, 1)? * part(after, 0)?)? + part(after, 1)?)?;
                Tensor::cat(&[slope, shift], 0)
            };
            let before = segment.merged_before(&own, merge)?;
            // The value at 3, weighted by the segment's number and its position in a loss of all.
            let value = match &before {
                Some(before) => ((part(before, 0)? * 3.0)? + part(before, 1)?)?,
                None => part(&own, 0)?.zeros_like()?,
            };
            let weight = 1.0 + segment.index() as f64;
            let loss = segment.close(&(value.sum_all()? * weight)?)?;
            let gradient = loss.backward()?.get(&own).expect("a gradient").to_vec1::<f64>()?;
            Ok((value.to_vec1::<f64>()?[0], gradient))
        })?;
        // Value `i` is that of maps 0..i one after the other; its derivatives by the chain rule.
        let mut expected = vec![[0.0; 2]; count];
        for i in 0..count {
            let mut values = vec![3.0];
            (0..i).for_each(|j| values.push(of(j)[0] * values[j] + of(j)[1]));
            assert_close(
                &format!("value {i} of {count}"),
                &[1],
                &[outcomes[i].0],
                &[if i == 0 { 0.0 } else { values[i] }],
                1e-12,
            );
            let mut slope = 1.0 + i as f64;
            for j in (0..i).rev() {
                expected[j][0] += slope * values[j];
                expected[j][1] += slope;
                slope *= of(j)[0];
            }
        }
        for (i, (expected, (_, found))) in expected.iter().zip(&outcomes).enumerate() {
            assert_close(&format!("gradient {i} of {count}"), &[2], found, expected, 1e-11);
        }
    }
    Ok(())
}

/// Computes in one process what [`cut`] computes.
fn whole(attention: &dyn Attention, problem: &Problem, dtype: DType) -> Result<Numbers> {
    let [q, k, v] = problem.tensors(dtype)?;
    let [q, k, v] = [Var::from_tensor(&q)?, Var::from_tensor(&k)?, Var::from_tensor(&v)?];
    let gates = problem.gates.as_ref().map(|_| Var::from_tensor(&problem.gate_tensor(dtype)?)).transpose()?;
    let inputs = Inputs::new(&q, &k, &v);
    let inputs = gates.as_ref().map_or(inputs, |gates| inputs.with_gates(gates));
    let out = attention.forward(inputs, &Mask::causal())?;
    let weights = tensor(&problem.grad_output, &problem.output_dims(), dtype, q.device())?;
    let store = (&out * weights)?.sum_all()?.backward()?;
    let mut numbers = vec![values(&out)?];
    for input in [Some(&q), Some(&k), Some(&v), gates.as_ref()].into_iter().flatten() {
        numbers.push(values(store.get(input).expect("a gradient"))?);
    }
    Ok(numbers)
}

/// Softmax, with windows shorter than a segment, longer, and longer than several; FAVOR beyond such
/// windows.
fn exact_attentions(dtype: DType) -> Result<Vec<(String, Box<dyn Attention>)>> {
    let mut all: Vec<(String, Box<dyn Attention>)> = vec![("softmax".into(), Box::new(Softmax::new()))];
    for window in [2, 3, 4, 7, 14, 40] {
        all.push((format!("softmax, window {window}"), Box::new(Softmax::new().with_window(window)?)));
        let config = FavorConfig::default().with_features(10);
        let favor = Favor::new(&config, SHAPE.head_dim, 5, dtype, &Device::Cpu)?;
        all.push((format!("favor, window {window}"), Box::new(Windowed::new(window, favor)?)));
    }
    Ok(all)
}

#[test]
fn softmax_and_windows_in_segments_are_the_whole() -> Result<()> {
    for (dtype, tolerance) in [(DType::F64, 1e-10), (DType::F32, 1e-5)] {
        for gated in [false, true] {
            let problem = problem(None, gated).rounded(dtype)?;
            for (name, attention) in exact_attentions(dtype)? {
                let expected = whole(&*attention, &problem, dtype)?;
                for count in COUNTS {
                    let numbers = cut(&*attention, &problem, dtype, count)?;
                    for (i, (numbers, expected)) in numbers.iter().zip(&expected).enumerate() {
                        let what = format!("{name}, gates {gated}, {dtype:?}, {count} segments: {}", NAMES[i]);
                        assert_close(
                            &what,
                            &[numbers.len()],
                            numbers,
                            expected,
                            tolerance * if i == 0 { 1.0 } else { 10.0 },
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

/// A layer with all parts; its weights are a function of the variables' names alone.
fn layer(attention: &str) -> Result<(MultiHeadAttention, VarMap)> {
    let attention: AttentionConfig = attention.parse().map_err(candle_core::Error::msg)?;
    let (vars, device) = (VarMap::new(), Device::Cpu);
    let parts = LayerParts::default().with_gate(true).with_convolution(true);
    let parts = parts.with_output_gate(true).with_output_norm(true);
    let config = MultiHeadConfig::new(12, 4).with_kv_heads(2).with_head_dim(6).with_parts(parts);
    let rotary = Rotary::new(6, 64, 100.0, &device)?;
    let attention = attention.build(6, 3, DType::F64, &device)?;
    let vb = VarBuilder::from_varmap(&vars, DType::F64, &device);
    let layer = MultiHeadAttention::without_buffers(&config, attention, Some(rotary), vb)?;
    for (name, var) in vars.data().lock().expect("no panic").iter() {
        let seed = name.bytes().fold(7, |seed: u64, byte| seed.wrapping_mul(31) + u64::from(byte));
        var.set(&tensor(&Random::new(seed).normal(var.elem_count(), 0.4), var.dims(), DType::F64, &device)?)?;
    }
    Ok((layer, vars))
}

/// The gradients of all weights of a layer, in the order of their names.
fn gradients_of(vars: &VarMap, store: &candle_core::backprop::GradStore) -> Result<Vec<(String, Vec<f64>)>> {
    let data = vars.data().lock().expect("no panic");
    let mut named: Vec<_> = data.iter().collect();
    named.sort_by_key(|(name, _)| name.to_string());
    named.into_iter().map(|(name, var)| Ok((name.clone(), values(store.get(var).expect("a gradient"))?))).collect()
}

/// Two layers, with rotary positions, convolutions, gates and all that stands around: gradients of
/// weights, added up over segments, are those of one process.
#[test]
fn layers_in_segments_are_the_whole() -> Result<()> {
    let groups = "softmax:window=5|favor:m=8";
    for attention in ["favor:m=8", "favor-window:m=8,window=5", "softmax", "softmax:window=5", "uniform", groups] {
        let x = tensor(&Random::new(1).normal(2 * T * 12, 1.0), &[2, T, 12], DType::F64, &Device::Cpu)?;
        let weights = tensor(&Random::new(2).normal(2 * T * 12, 1.0), &[2, T, 12], DType::F64, &Device::Cpu)?;
        let (one, vars) = layer(attention)?;
        let twice = one.forward_residual(&one.forward(&x, &Mask::causal())?, &Mask::causal(), &x)?;
        let expected = gradients_of(&vars, &(&twice * &weights)?.sum_all()?.backward()?)?;
        for count in [2, 4, 8] {
            let of_segments = on_segments(count, |thread| {
                let (layer, vars) = layer(attention)?;
                let segment = Segment::new(thread);
                let part = |x: &Tensor| x.narrow(1, segment.index() * T / count, T / count);
                let x = part(&x)?;
                let once = layer.forward_segment(&x, &segment, None)?;
                let out = layer.forward_segment(&once, &segment, Some(&x))?;
                let loss = segment.close(&(&out * part(&weights)?)?.sum_all()?)?;
                Ok((out.detach(), gradients_of(&vars, &loss.backward()?)?))
            })?;
            let out = Tensor::cat(&of_segments.iter().map(|(out, _)| out).collect::<Vec<_>>(), 1)?;
            let what = format!("{attention}, {count} segments");
            assert_close(&what, out.dims(), &values(&out)?, &values(&twice)?, 1e-10);
            for (i, (name, expected)) in expected.iter().enumerate() {
                let mut sum = vec![0.0; expected.len()];
                for (_, gradients) in &of_segments {
                    sum.iter_mut().zip(&gradients[i].1).for_each(|(sum, x)| *sum += x);
                }
                assert_close(&format!("{what}: {name}"), &[sum.len()], &sum, expected, 1e-9);
            }
        }
    }
    Ok(())
}

/// Other tokens in later segments do not change a bit of earlier ones, and tokens of the segment
/// before do.
#[test]
fn later_segments_leave_earlier_ones_alone() -> Result<()> {
    for attention in ["favor:m=8", "favor-window:m=8,window=5", "softmax", "softmax:window=5"] {
        let numbers = Random::new(1).normal(2 * T * 12, 1.0);
        let out = |changed_from: usize| -> Result<Vec<Vec<f64>>> {
            let mut numbers = numbers.clone();
            for (i, number) in numbers.iter_mut().enumerate() {
                if i / 12 % T >= changed_from {
                    *number *= -3.0;
                }
            }
            let x = tensor(&numbers, &[2, T, 12], DType::F64, &Device::Cpu)?;
            on_segments(4, |thread| {
                let (segment, (layer, _)) = (Segment::new(thread), layer(attention)?);
                let once = layer.forward_segment(&x.narrow(1, segment.index() * 6, 6)?, &segment, None)?;
                values(&layer.forward_segment(&once, &segment, None)?)
            })
        };
        let (one, other) = (out(T)?, out(12)?);
        assert_eq!(one[..2], other[..2], "{attention}");
        for segment in [2, 3] {
            assert!(one[segment] != other[segment], "{attention}: segment {segment}");
        }
        assert!(one[3] != out(11)?[3] && other[2] != out(11)?[2], "{attention}: nothing comes across the border");
    }
    Ok(())
}

/// What cannot be cut says so, and what can.
#[test]
fn what_cannot_be_cut_is_refused() -> Result<()> {
    #[derive(Debug)]
    struct Own;
    impl Attention for Own {
        fn forward(&self, inputs: Inputs<'_>, _: &Mask) -> Result<Tensor> {
            Ok(inputs.v.clone())
        }
        fn advance(&self, inputs: Inputs<'_>, _: &mut State) -> Result<Tensor> {
            Ok(inputs.v.clone())
        }
    }
    let x = Tensor::zeros((1, 2, 4, 6), DType::F32, &Device::Cpu)?;
    let refused = |attention: &dyn Attention, words: &str| {
        let error = attention.forward_segment(Inputs::new(&x, &x, &x), &Segment::alone()).expect_err("refused");
        assert!(error.to_string().contains(words), "{error}");
    };
    refused(&Own, "implements Attention::forward_segment");
    refused(&Softmax::new().with_window(2)?.with_sinks(1)?, "leave the sinks out");
    let far = Favor::new(&FavorConfig::default(), 6, 1, DType::F32, &Device::Cpu)?;
    refused(&Windowed::new(2, far)?.with_sinks(1)?, "leave the sinks out");
    let signed = FavorConfig::default().with_map(FeatureMapKind::Trigonometric);
    refused(&Favor::new(&signed, 6, 1, DType::F32, &Device::Cpu)?, "logarithms of features");
    assert_eq!((Segment::alone().index(), Segment::alone().count()), (0, 1));
    let (layer, _) = layer("favor:m=8")?;
    let x = Tensor::zeros((1, 2, 12), DType::F64, &Device::Cpu)?;
    let error = layer.forward_segment(&x, &Segment::alone(), None).expect_err("refused").to_string();
    assert!(error.contains("at least 3"), "{error}");
    Ok(())
}

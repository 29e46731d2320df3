//! These tests check causality: what comes after a token does not change a bit of its output, and
//! large inputs do not break attention.

use crate::common::{
    Layout, Problem, Random, all_kernels, assert_close, assert_tensor_close, conditioned_scale, is_positive, tensor,
    values,
};
use candle_core::{DType, Result, Tensor};
use performer_core::reference::Shape;
use performer_core::{FeatureMapKind, Inputs, Mask};

/// The problem: at this head dimension chunks have 16 tokens, so there are seven of them, the last
/// a partial one. Heads are grouped.
const SHAPE: Shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 100, k_len: 100, head_dim: 6, value_dim: 3 };

/// The first tokens of the future: inside chunks, on their borders, and a token to either side.
const CUTS: [usize; 11] = [1, 2, 7, 15, 16, 17, 31, 32, 64, 90, 99];

fn problem(map: Option<FeatureMapKind>) -> Problem {
    let mut problem = Problem::random(1, SHAPE, map, 12).scale_qk(conditioned_scale(map));
    problem.causal = true;
    problem
}

/// Fails unless the outputs of tokens before `cut` have the same bits.
#[track_caller]
fn assert_same_past(what: &str, actual: &Tensor, expected: &Tensor, cut: usize) -> Result<()> {
    let past = |t: &Tensor| values(&t.narrow(2, 0, cut)?);
    let (actual, expected) = (past(actual)?, past(expected)?);
    let different = actual.iter().zip(&expected).filter(|(a, e)| a.to_bits() != e.to_bits()).count();
    assert_eq!(different, 0, "{what}: of {} outputs before token {cut} so many differ", expected.len());
    Ok(())
}

/// Checks softmax and every map, in f32 and f64, fused and composed: `change(tensor, cut)` of q, k
/// or v leaves the past alone.
fn assert_blind_to(change: impl Fn(usize, &Tensor, usize) -> Result<Tensor>) -> Result<()> {
    for map in all_kernels() {
        let problem = problem(map);
        for (dtype, attention) in [
            (DType::F32, problem.attention(DType::F32)?),
            (DType::F32, problem.composed(DType::F32)?),
            (DType::F64, problem.attention(DType::F64)?),
        ] {
            let inputs = problem.tensors(dtype)?;
            let forward = |[q, k, v]: &[Tensor; 3]| attention.forward(Inputs::new(q, k, v), &Mask::causal());
            let whole = forward(&inputs)?;
            for cut in CUTS {
                let mut changed = inputs.clone();
                for (which, tensor) in changed.iter_mut().enumerate() {
                    *tensor = change(which, tensor, cut)?;
                }
                let what = format!("{map:?} {dtype:?}");
                assert_same_past(&what, &forward(&changed)?, &whole, cut)?;
            }
        }
    }
    Ok(())
}

#[test]
fn a_different_future_leaves_the_past_alone() -> Result<()> {
    assert_blind_to(|which, whole, cut| {
        let (b, h, t, width) = whole.dims4()?;
        let dims = [b, h, t - cut, width];
        let other = Random::new(which as u64 + 50).normal(dims.iter().product(), 2.0);
        let future = tensor(&other, &dims, whole.dtype(), whole.device())?;
        Tensor::cat(&[&whole.narrow(2, 0, cut)?, &future], 2)
    })
}

/// A key far larger than all others wants a stabiliser of its own: if the past shared it, the past
/// would drown.
#[test]
fn a_huge_future_key_leaves_the_past_alone() -> Result<()> {
    assert_blind_to(|which, tensor, cut| {
        if which != 1 {
            return Ok(tensor.clone());
        }
        let after = tensor.dim(2)? - cut - 1;
        let huge = (tensor.narrow(2, cut, 1)? * 50.0)?;
        let mut parts = vec![tensor.narrow(2, 0, cut)?, huge];
        if after > 0 {
            parts.push(tensor.narrow(2, cut + 1, after)?);
        }
        Tensor::cat(&parts, 2)
    })
}

/// FAVOR's outputs agree bit for bit, since its products have the size of a chunk. Those of softmax
/// have the size of the sequence, and the matrix product sums in another order for two tokens than
/// for more.
#[test]
fn no_future_leaves_the_past_alone() -> Result<()> {
    for map in all_kernels() {
        let problem = problem(map);
        for (dtype, rounding) in [(DType::F32, 1e-6), (DType::F64, 1e-15)] {
            let attention = problem.attention(dtype)?;
            let [q, k, v] = problem.tensors(dtype)?;
            let whole = attention.forward(Inputs::new(&q, &k, &v), &Mask::causal())?;
            for cut in CUTS {
                let [q, k, v] = [&q, &k, &v].map(|t| t.narrow(2, 0, cut));
                let short = attention.forward(Inputs::new(&q?, &k?, &v?), &Mask::causal())?;
                let what = format!("{map:?} {dtype:?}");
                if map.is_some() {
                    assert_same_past(&what, &short, &whole, cut)?;
                }
                assert_tensor_close(&what, &short, &values(&whole.narrow(2, 0, cut)?)?, rounding);
            }
        }
    }
    Ok(())
}

/// The first token sees itself alone, so its output is its value.
#[test]
fn the_first_output_is_the_first_value() -> Result<()> {
    for map in all_kernels() {
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F64, 1e-14)] {
            let problem = problem(map);
            let [q, k, v] = problem.tensors(dtype)?;
            let output = problem.attention(dtype)?.forward(Inputs::new(&q, &k, &v), &Mask::causal())?;
            let (b, kv, group) = (SHAPE.batch, SHAPE.kv_heads, SHAPE.heads / SHAPE.kv_heads);
            let first = v.narrow(2, 0, 1)?.unsqueeze(2)?.expand((b, kv, group, 1, SHAPE.value_dim))?;
            let first = first.contiguous()?.reshape((b, kv * group, 1, SHAPE.value_dim))?;
            let what = format!("{map:?} {dtype:?}");
            assert_tensor_close(&what, &output.narrow(2, 0, 1)?, &values(&first)?, tolerance);
        }
    }
    Ok(())
}

/// Logits reach thousands: features range from e^-2000 to e^60 in one row, where sums of
/// materialised features are 0/0 and ∞/∞.
#[test]
fn large_inputs_stay_finite_and_right() -> Result<()> {
    let shape = Shape { q_len: 40, k_len: 40, ..SHAPE };
    for map in all_kernels() {
        for causal in [true, false] {
            let mut problem = Problem::random(2, shape, map, 12).scale_qk(30.0).rounded(DType::F32)?;
            problem.causal = causal;
            let actual = problem.run(&*problem.attention(DType::F32)?, DType::F32, Layout::Contiguous)?;
            for (name, numbers) in [("output", &actual.output), ("q", &actual.q), ("k", &actual.k), ("v", &actual.v)] {
                assert!(numbers.iter().all(|x| x.is_finite()), "{map:?}, causal {causal}: {name} is not finite");
            }
            if is_positive(map) {
                let what = format!("{map:?}, causal {causal}");
                let expected = problem.expected();
                assert_close(&what, &problem.output_dims(), &actual.output, &expected.output, 1e-3);
            }
        }
    }
    Ok(())
}

/// Gradients do not leak either, where rounding does not blur them: stabilisers are constants to
/// the gradient.
#[test]
fn large_inputs_have_the_right_gradients() -> Result<()> {
    let shape = Shape { q_len: 40, k_len: 40, ..SHAPE };
    for map in all_kernels().filter(|&map| is_positive(map)) {
        for causal in [true, false] {
            let mut problem = Problem::random(4, shape, map, 12).scale_qk(30.0);
            problem.causal = causal;
            let actual = problem.run(&*problem.attention(DType::F64)?, DType::F64, Layout::Contiguous)?;
            problem.assert_outcome("F64", &actual, &problem.expected(), 1e-9);
        }
    }
    Ok(())
}

/// Weights are convex whatever the inputs, so outputs lie between the least and the largest value.
#[test]
fn positive_maps_average_values() -> Result<()> {
    for map in all_kernels().filter(|&map| is_positive(map)) {
        let mut problem = Problem::random(3, SHAPE, map, 12).scale_qk(10.0);
        problem.causal = true;
        let ones = vec![1.0; SHAPE.v_count()];
        let [q, k, _] = problem.tensors(DType::F32)?;
        let ones = tensor(&ones, &problem.v_dims(), DType::F32, q.device())?;
        let output = values(&problem.attention(DType::F32)?.forward(Inputs::new(&q, &k, &ones), &Mask::causal())?)?;
        assert!(output.iter().all(|o| (o - 1.0).abs() < 1e-5), "{map:?}: the average of ones is not 1");
    }
    Ok(())
}

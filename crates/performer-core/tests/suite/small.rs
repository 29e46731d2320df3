//! Every fused kernel of attention at a few tokens, against the reference: small enough to be
//! interpreted by Miri (`just miri`), which reports what the language leaves undefined.

use candle_core::{DType, Result, Tensor};
use performer_core::reference::Shape;
use performer_core::{FeatureMapKind, Inputs, State};

use crate::common::{Layout, Problem, assert_tensor_close, conditioned_scale};

/// Softmax, and a map of each kind that the kernels tell apart: exponential ones with one half and
/// two, rectified ones, those with signs, and those of parameters in training.
const SOFTMAX: Option<FeatureMapKind> = None;
const POSITIVE: Option<FeatureMapKind> = Some(FeatureMapKind::Positive);
const HYPERBOLIC: Option<FeatureMapKind> = Some(FeatureMapKind::Hyperbolic);
const RELU: Option<FeatureMapKind> = Some(FeatureMapKind::Relu);
const TRIGONOMETRIC: Option<FeatureMapKind> = Some(FeatureMapKind::Trigonometric);
const LEARNED: Option<FeatureMapKind> = Some(FeatureMapKind::Learned);

const TOLERANCE: f64 = 1e-4;

fn problem(map: Option<FeatureMapKind>, tokens: usize) -> Problem {
    let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: tokens, k_len: tokens, head_dim: 3, value_dim: 2 };
    Problem::random(5, shape, map, 5).scale_qk(conditioned_scale(map))
}

/// Runs a problem through the kernels, on inputs that are not contiguous, forward and backward.
fn check(problem: &Problem) -> Result<()> {
    let actual = problem.run(&*problem.attention(DType::F32)?, DType::F32, Layout::Sliced)?;
    problem.assert_outcome("a few tokens", &actual, &problem.expected(), TOLERANCE);
    Ok(())
}

/// Three tokens are less than a vector, 35 more than a chunk.
fn check_passes(map: Option<FeatureMapKind>) -> Result<()> {
    for tokens in [3, 35] {
        let full = problem(map, tokens);
        let causal = Problem { causal: true, ..full.clone() };
        let seen: Vec<bool> = (0..tokens).map(|t| t % 3 != 1).collect();
        check(&Problem { key_mask: Some(seen), ..causal.clone() })?;
        if cfg!(miri) && tokens > 3 {
            // Minutes each: one pass over more than a chunk is enough there.
            break;
        }
        check(&causal)?;
        check(&full)?;
    }
    Ok(())
}

fn check_gates(map: Option<FeatureMapKind>) -> Result<()> {
    check(&problem(map, 5).gated(6))
}

/// Two tokens at once, then one after the other.
fn check_decoding(map: Option<FeatureMapKind>) -> Result<()> {
    let problem = Problem { causal: true, ..problem(map, 5) };
    let (attention, [q, k, v]) = (problem.attention(DType::F32)?, problem.tensors(DType::F32)?);
    let mut state = State::new();
    let mut outputs = Vec::new();
    for (start, count) in [(0, 2), (2, 1), (3, 1), (4, 1)] {
        let [q, k, v] = [&q, &k, &v].map(|t| t.narrow(2, start, count));
        outputs.push(attention.extend(Inputs::new(&q?, &k?, &v?), &mut state)?);
    }
    let all = Tensor::cat(&outputs, 2)?;
    assert_tensor_close(&format!("{map:?}"), &all, &problem.expected().output, TOLERANCE);
    Ok(())
}

/// Makes a test for each kernel, since Miri takes minutes for one.
macro_rules! of_each_kernel {
    ($($name:ident: $check:ident),*) => {$(
        mod $name {
            use super::*;

            #[test]
            fn softmax() -> Result<()> {
                $check(SOFTMAX)
            }

            #[test]
            fn positive() -> Result<()> {
                $check(POSITIVE)
            }

            #[test]
            fn hyperbolic() -> Result<()> {
                $check(HYPERBOLIC)
            }

            #[test]
            fn relu() -> Result<()> {
                $check(RELU)
            }

            #[test]
            fn trigonometric() -> Result<()> {
                $check(TRIGONOMETRIC)
            }

            #[test]
            fn learned() -> Result<()> {
                $check(LEARNED)
            }
        }
    )*};
}

of_each_kernel!(passes: check_passes, passes_with_gates: check_gates, decoding: check_decoding);

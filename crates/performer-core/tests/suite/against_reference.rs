//! Every attention, forward and backward, is compared with the f64 reference: maps × projections ×
//! masks × lengths × layouts × dtypes.

use crate::common::{
    Layout, Problem, Random, all_kernels, assert_tensor_close, conditioned_scale, is_positive, tensor, values,
};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::ops::softmax_last_dim;
use performer_core::features::FeatureMapKind;
use performer_core::reference::Shape;
use performer_core::{Attention, Favor, FavorConfig, Inputs, Mask, ProjectionKind, Radii, Softmax};

/// The tolerance, relative to the largest element. It allows for rounding alone: f64 leaves 1e-15 ×
/// (length of the sums) × (conditioning).
const TOLERANCES: [(DType, f64); 2] = [(DType::F64, 1e-9), (DType::F32, 1e-4)];

/// Returns the shape of self-attention, with as many queries as keys.
const fn shape(batch: usize, heads: usize, kv_heads: usize, tokens: usize, head_dim: usize, value_dim: usize) -> Shape {
    Shape { batch, heads, kv_heads, q_len: tokens, k_len: tokens, head_dim, value_dim }
}

/// The shapes have every length with a chunk border in or beside it; single heads, several and
/// grouped; and M below, at and above D.
const CASES: [(Shape, usize); 9] = [
    (shape(2, 2, 2, 1, 4, 4), 8),
    (shape(1, 4, 2, 2, 3, 5), 8),
    (shape(2, 1, 1, 63, 8, 4), 5),
    (shape(1, 2, 2, 64, 6, 6), 6),
    (shape(1, 4, 2, 65, 5, 3), 16),
    (shape(3, 3, 1, 20, 2, 1), 4),
    (shape(1, 2, 2, 130, 40, 8), 24),
    (shape(1, 2, 1, 500, 4, 4), 8),
    (shape(1, 1, 1, 1000, 4, 4), 8),
];

/// Returns the cases of at most `tokens` tokens; the fourth power of wide rows would have too many
/// features.
fn cases(map: Option<FeatureMapKind>, tokens: usize) -> impl Iterator<Item = (Shape, usize)> {
    let wide = move |shape: &Shape| map == Some(FeatureMapKind::Limit(4)) && shape.head_dim > 8;
    CASES.into_iter().filter(move |(shape, _)| shape.q_len <= tokens && !wide(shape))
}

fn problem(seed: u64, shape: Shape, map: Option<FeatureMapKind>, m: usize) -> Problem {
    Problem::random(seed, shape, map, m).scale_qk(conditioned_scale(map))
}

/// Hides about a third of the keys, among them the first ones of the first sequence, so that its
/// first rows see nothing when causal.
fn hide_keys(problem: &mut Problem) {
    let Shape { batch, k_len, .. } = problem.shape;
    let mut mask = Random::new(99).mask(batch * k_len, 0.7);
    mask[..k_len.min(20) / 2].fill(false);
    problem.key_mask = Some(mask);
}

/// Checks a problem in f64 and f32, fused where there is a kernel and composed.
#[track_caller]
fn check(problem: &Problem) -> Result<()> {
    let expected = problem.expected();
    for (dtype, tolerance) in TOLERANCES {
        for (how, attention) in [("", problem.attention(dtype)?), (" composed", problem.composed(dtype)?)] {
            let actual = problem.run(&*attention, dtype, Layout::Contiguous)?;
            problem.assert_outcome(&format!("{dtype:?}{how}"), &actual, &expected, tolerance);
        }
    }
    Ok(())
}

#[test]
fn causal() -> Result<()> {
    for map in all_kernels() {
        for (shape, m) in cases(map, 1000) {
            let mut problem = problem(1, shape, map, m);
            problem.causal = true;
            check(&problem)?;
        }
    }
    Ok(())
}

#[test]
fn bidirectional() -> Result<()> {
    for map in all_kernels() {
        for (shape, m) in cases(map, 500) {
            check(&problem(2, shape, map, m))?;
        }
    }
    Ok(())
}

#[test]
fn with_hidden_keys() -> Result<()> {
    for map in all_kernels() {
        for (shape, m) in cases(map, 200) {
            for causal in [false, true] {
                let mut problem = problem(3, shape, map, m);
                problem.causal = causal;
                hide_keys(&mut problem);
                check(&problem)?;
            }
        }
    }
    Ok(())
}

#[test]
fn across_sequences() -> Result<()> {
    for map in all_kernels() {
        for (q_len, k_len) in [(1, 7), (7, 1), (65, 130), (100, 33)] {
            let shape = Shape { q_len, k_len, ..shape(2, 4, 2, 0, 5, 3) };
            let mut problem = problem(4, shape, map, 8);
            check(&problem)?;
            hide_keys(&mut problem);
            check(&problem)?;
        }
    }
    Ok(())
}

/// The features of some keys lie far above those of all keys before them; the fused kernel ends its
/// chunk there.
#[test]
fn keys_far_above_the_past() -> Result<()> {
    for map in all_kernels().filter(|&map| is_positive(map)) {
        let shape = shape(1, 2, 1, 150, 6, 4);
        let mut problem = Problem::random(8, shape, map, 12);
        problem.causal = true;
        // The norm of a key lowers all of its features; from token to token it falls here, slowly
        // and in jumps.
        let far = if map.is_some_and(is_positive_exponential) { 12.0 } else { 1.0 };
        for (t, key) in problem.k.chunks_exact_mut(shape.head_dim).enumerate() {
            let scale = if t < 5 || (40..43).contains(&t) { far } else { far / (1.0 + t as f64 / 4.0) };
            key.iter_mut().for_each(|x| *x *= scale.max(0.3));
        }
        check(&problem)?;
    }
    Ok(())
}

/// Whether the features of a map fall with the norm of their row.
fn is_positive_exponential(map: FeatureMapKind) -> bool {
    matches!(map, FeatureMapKind::Positive | FeatureMapKind::Hyperbolic)
}

/// Inputs may lie in memory as they come out of a linear layer, or be cut from a larger tensor.
#[test]
fn strided_inputs() -> Result<()> {
    for map in all_kernels() {
        for causal in [false, true] {
            let mut problem = problem(5, shape(2, 4, 2, 21, 4, 3), map, 8);
            problem.causal = causal;
            hide_keys(&mut problem);
            let expected = problem.expected();
            for layout in Layout::ALL {
                for (dtype, tolerance) in TOLERANCES {
                    let actual = problem.run(&*problem.attention(dtype)?, dtype, layout)?;
                    problem.assert_outcome(&format!("{dtype:?} {layout:?}"), &actual, &expected, tolerance);
                }
            }
        }
    }
    Ok(())
}

/// Half types lose 2^-11 (f16) or 2^-8 (bf16) in the output and the gradients, and nothing more in
/// between.
#[test]
fn half_precision_inputs() -> Result<()> {
    for map in all_kernels() {
        for (dtype, causal) in [(DType::F16, false), (DType::F16, true), (DType::BF16, false), (DType::BF16, true)] {
            let mut problem = problem(6, shape(2, 4, 2, 65, 6, 4), map, 16).rounded(dtype)?;
            problem.causal = causal;
            for attention in [problem.attention(dtype)?, problem.composed(dtype)?] {
                let actual = problem.run(&*attention, dtype, Layout::Contiguous)?;
                problem.assert_outcome(&format!("{dtype:?}"), &actual, &problem.expected(), 1e-2);
            }
        }
    }
    Ok(())
}

/// Gradients of half types cancel against the outputs, which must not have been rounded for that;
/// otherwise it shows in one of many problems.
#[test]
fn gradients_do_not_show_that_outputs_are_rounded() -> Result<()> {
    let shape = shape(1, 2, 2, 100, 64, 64);
    let mut problem = Problem::random(5, shape, Some(FeatureMapKind::Positive), 512).rounded(DType::BF16)?;
    problem.causal = false;
    let actual = problem.run(&*problem.attention(DType::BF16)?, DType::BF16, Layout::Contiguous)?;
    problem.assert_outcome("bf16", &actual, &problem.expected(), 1e-2);
    Ok(())
}

/// The chunk size changes how attention is computed, not what: from one token to more than the
/// sequence has.
#[test]
fn any_chunk_size() -> Result<()> {
    for map in all_kernels().flatten() {
        let mut problem = problem(7, shape(1, 4, 2, 37, 4, 3), Some(map), 8);
        problem.causal = true;
        hide_keys(&mut problem);
        let expected = problem.expected();
        for chunk in [1, 2, 4, 32, 64] {
            let favor = problem.favor(DType::F64)?.with_chunk(chunk)?;
            let actual = problem.run(&favor, DType::F64, Layout::Contiguous)?;
            problem.assert_outcome(&format!("chunk {chunk}"), &actual, &expected, 1e-9);
        }
    }
    Ok(())
}

/// The buffers of [`Favor::new`] hold what it draws, for every kind of projection.
#[test]
fn every_projection() -> Result<()> {
    for map in FeatureMapKind::NAMED.into_iter().filter(|map| map.is_random() && !map.has_parameters()) {
        for projection in ProjectionKind::ALL {
            for radii in Radii::ALL {
                for causal in [false, true] {
                    let mut problem = problem(8, shape(1, 2, 1, 33, 6, 4), Some(map), 1);
                    problem.causal = causal;
                    let config = FavorConfig::default()
                        .with_map(map)
                        .with_features(20)
                        .with_projection(projection)
                        .with_radii(radii);
                    let favor = Favor::new(&config, 6, 7, DType::F64, &Device::Cpu)?;
                    for (name, buffer) in favor.buffers() {
                        match name.as_str() {
                            "projection" => problem.projection = values(&buffer)?,
                            "offsets" => problem.offsets = values(&buffer)?,
                            _ => panic!("unknown buffer {name}"),
                        }
                    }
                    assert_eq!(problem.projection.len(), 20 * 6);
                    let actual = problem.run(&favor, DType::F64, Layout::Contiguous)?;
                    let what = format!("{projection} {radii}");
                    problem.assert_outcome(&what, &actual, &problem.expected(), 1e-9);
                }
            }
        }
    }
    Ok(())
}

/// Softmax is compared with what a Candle user would write.
#[test]
fn softmax_is_that_of_candles_own_ops() -> Result<()> {
    let device = Device::Cpu;
    for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 1e-5)] {
        let problem = Problem::random(9, shape(2, 3, 3, 70, 16, 8), None, 0);
        let [q, k, v] = problem.tensors(dtype)?;
        let logits = (q.matmul(&k.t()?)? * (16f64).powf(-0.5))?;
        let future: Vec<f64> = (0..70 * 70).map(|n| if n % 70 > n / 70 { f64::NEG_INFINITY } else { 0.0 }).collect();
        let causal = logits.broadcast_add(&tensor(&future, &[70, 70], dtype, &device)?)?;
        for (mask, logits) in [(Mask::full(), logits), (Mask::causal(), causal)] {
            let expected = softmax_last_dim(&logits)?.matmul(&v)?;
            let actual = Softmax::new().forward(Inputs::new(&q, &k, &v), &mask)?;
            assert_tensor_close(&format!("{mask:?}"), &actual, &values(&expected)?, tolerance);
        }
    }
    Ok(())
}

/// With ever more features, FAVOR+ converges to softmax.
#[test]
fn favor_approaches_softmax() -> Result<()> {
    let device = Device::Cpu;
    let problem = Problem::random(10, shape(1, 2, 2, 64, 8, 8), None, 0).scale_qk(0.5);
    let [q, k, v] = problem.tensors(DType::F32)?;
    let exact = Softmax::new().forward(Inputs::new(&q, &k, &v), &Mask::causal())?;
    let norm = |t: &Tensor| t.sqr()?.sum_all()?.sqrt()?.to_dtype(DType::F64)?.to_scalar::<f64>();
    let error = |features: usize| -> Result<f64> {
        let config = FavorConfig::default().with_features(features);
        let favor = Favor::new(&config, 8, 11, DType::F32, &device)?;
        Ok(norm(&(favor.forward(Inputs::new(&q, &k, &v), &Mask::causal())? - &exact)?)? / norm(&exact)?)
    };
    let (few, many) = (error(16)?, error(4096)?);
    // The error falls like M^-½: by 16 here.
    assert!(many < few / 8.0 && many < 0.05, "relative error {few} with 16 features, {many} with 4096");
    Ok(())
}

/// Values whose width is a whole number of vectors are read where they lie, if their rows follow
/// each other.
#[test]
fn values_of_whole_vectors() -> Result<()> {
    for layout in [Layout::Contiguous, Layout::Transposed] {
        for causal in [false, true] {
            let mut problem = problem(12, shape(1, 2, 2, 70, 6, 16), Some(FeatureMapKind::Positive), 8);
            problem.causal = causal;
            let actual = problem.run(&*problem.attention(DType::F32)?, DType::F32, layout)?;
            problem.assert_outcome(&format!("{layout:?}"), &actual, &problem.expected(), 1e-4);
        }
    }
    Ok(())
}

/// Rows may be the columns of a tensor: numbers of a row then do not follow each other in memory.
#[test]
fn rows_that_are_columns() -> Result<()> {
    for map in [None, Some(FeatureMapKind::Positive)] {
        let problem = problem(13, shape(1, 2, 1, 37, 5, 3), map, 8);
        let attention = problem.attention(DType::F32)?;
        let plain = problem.tensors(DType::F32)?;
        let columns = plain.each_ref().map(|x| x.transpose(2, 3)?.contiguous()?.transpose(2, 3));
        let [q, k, v] = columns.each_ref().map(|x| x.as_ref().expect("a transposition"));
        let of_columns = attention.forward(Inputs::new(q, k, v), &Mask::causal())?;
        let [q, k, v] = &plain;
        let of_rows = attention.forward(Inputs::new(q, k, v), &Mask::causal())?;
        assert_eq!(values(&of_columns)?, values(&of_rows)?, "{map:?}");
    }
    Ok(())
}

//! A sequence cut into segments is the whole: outputs, and gradients across the borders, which go
//! through the sums that earlier segments come to.

use candle_core::{DType, Device, Result, Tensor, Var};
use performer_core::{
    Attention, Favor, FavorConfig, Inputs, Mask, Windowed,
    attention::{Segment, SegmentSums},
    features::FeatureMapKind,
    reference::{self, Shape},
};

use crate::common::{ALL_MAPS, Problem, assert_close, conditioned_scale, is_positive, tensor, values};

/// Segments of many lengths, a single token among them.
const LENGTHS: [usize; 5] = [37, 1, 64, 3, 45];
const T: usize = 150;
const SHAPE: Shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: T, k_len: T, head_dim: 6, value_dim: 3 };

fn positive_maps() -> impl Iterator<Item = FeatureMapKind> {
    ALL_MAPS.into_iter().filter(|&map| is_positive(Some(map)))
}

/// A causal problem, with gates or without.
fn problem(map: FeatureMapKind, gated: bool) -> Problem {
    let mut problem = Problem::random(31, SHAPE, Some(map), 10).scale_qk(conditioned_scale(Some(map))).gated(32);
    if !gated {
        problem.gates = None;
    }
    problem
}

/// Computes attention segment by segment.
fn in_segments(favor: &Favor, [q, k, v]: [&Tensor; 3], gates: Option<&Tensor>) -> Result<Tensor> {
    let (mut before, mut outs, mut start) = (None::<SegmentSums>, Vec::new(), 0);
    for length in LENGTHS {
        let part = |x: &Tensor| x.narrow(2, start, length);
        let (q, k, v) = (part(q)?, part(k)?, part(v)?);
        let gates = gates.map(part).transpose()?;
        let inputs = Inputs::new(&q, &k, &v);
        let inputs = gates.as_ref().map_or(inputs, |gates| inputs.with_gates(gates));
        let own = favor.sums_of_segment(inputs)?;
        match &before {
            None => outs.push(favor.forward(inputs, &Mask::causal())?),
            Some(before) => outs.push(favor.forward_after(inputs, before)?),
        }
        before = Some(match before {
            None => own,
            Some(before) => before.merge(&own)?,
        });
        start += length;
    }
    Tensor::cat(&outs, 2)
}

#[test]
fn segments_are_the_reference() -> Result<()> {
    for (map, gated) in positive_maps().flat_map(|map| [(map, false), (map, true)]) {
        for (dtype, tolerance) in [(DType::F64, 1e-10), (DType::F32, 1e-5)] {
            let problem = problem(map, gated).rounded(dtype)?;
            let output = reference::attention(problem.kernel(), problem.inputs());
            let gradients = reference::attention_backward(problem.kernel(), problem.inputs(), &problem.grad_output);
            let [q, k, v] = problem.tensors(dtype)?;
            let [q, k, v] = [Var::from_tensor(&q)?, Var::from_tensor(&k)?, Var::from_tensor(&v)?];
            let gates = if gated { Some(Var::from_tensor(&problem.gate_tensor(dtype)?)?) } else { None };
            for favor in [problem.favor(dtype)?, problem.favor(dtype)?.composed()] {
                let out = in_segments(&favor, [&q, &k, &v], gates.as_deref())?;
                let what = |of: &str| format!("{map}, gates {gated}, {dtype:?}: {of}");
                assert_close(&what("output"), &problem.output_dims(), &values(&out)?, &output, tolerance);
                let weights = tensor(&problem.grad_output, &problem.output_dims(), dtype, out.device())?;
                let store = (out * weights)?.sum_all()?.backward()?;
                let check = |of: &str, var: &Var, expected: &[f64]| -> Result<()> {
                    let gradient = store.get(var).expect("a gradient");
                    assert_close(&what(of), var.dims(), &values(gradient)?, expected, 10.0 * tolerance);
                    Ok(())
                };
                check("gradient of q", &q, &gradients.q)?;
                check("gradient of k", &k, &gradients.k)?;
                check("gradient of v", &v, &gradients.v)?;
                if let Some(gates) = &gates {
                    check("gradient of gates", gates, &gradients.gates)?;
                }
            }
        }
    }
    Ok(())
}

/// Inside a segment, another future does not change a bit of the past.
#[test]
fn the_future_leaves_the_past_of_a_segment_alone() -> Result<()> {
    let known = 25;
    for map in positive_maps() {
        let (one, mut other) = (problem(map, true), problem(map, true));
        for (numbers, width) in [(&mut other.q, 6), (&mut other.k, 6), (&mut other.v, 3)] {
            for (i, number) in numbers.iter_mut().enumerate() {
                if i / width % T >= LENGTHS[0] + known {
                    *number *= -3.0;
                }
            }
        }
        let favor = one.favor(DType::F32)?;
        let out = |problem: &Problem| -> Result<Vec<f64>> {
            let ([q, k, v], gates) = (problem.tensors(DType::F32)?, problem.gate_tensor(DType::F32)?);
            let part = |x: &Tensor, start, length| x.narrow(2, start, length);
            let first = |x: &Tensor| part(x, 0, LENGTHS[0]);
            let (q0, k0, v0, g0) = (first(&q)?, first(&k)?, first(&v)?, first(&gates)?);
            let before = favor.sums_of_segment(Inputs::new(&q0, &k0, &v0).with_gates(&g0))?;
            let rest = |x: &Tensor| part(x, LENGTHS[0], T - LENGTHS[0]);
            let (q, k, v, g) = (rest(&q)?, rest(&k)?, rest(&v)?, rest(&gates)?);
            let out = favor.forward_after(Inputs::new(&q, &k, &v).with_gates(&g), &before)?;
            values(&out.narrow(2, 0, known)?)
        };
        assert_eq!(out(&one)?, out(&other)?, "{map}");
    }
    Ok(())
}

#[test]
fn merging_is_associative_and_its_size_constant() -> Result<()> {
    let problem = problem(FeatureMapKind::Positive, true);
    let favor = problem.favor(DType::F64)?;
    let ([q, k, v], gates) = (problem.tensors(DType::F64)?, problem.gate_tensor(DType::F64)?);
    let of = |start: usize, length: usize| -> Result<SegmentSums> {
        let part = |x: &Tensor| x.narrow(2, start, length);
        let (q, k, v, gates) = (part(&q)?, part(&k)?, part(&v)?, part(&gates)?);
        favor.sums_of_segment(Inputs::new(&q, &k, &v).with_gates(&gates))
    };
    let (a, b, c) = (of(0, 40)?, of(40, 1)?, of(41, 80)?);
    let after = |before: &SegmentSums| -> Result<Vec<f64>> {
        let part = |x: &Tensor| x.narrow(2, 121, 29);
        let (q, k, v, gates) = (part(&q)?, part(&k)?, part(&v)?, part(&gates)?);
        values(&favor.forward_after(Inputs::new(&q, &k, &v).with_gates(&gates), before)?)
    };
    let (left, right, whole) = (a.merge(&b)?.merge(&c)?, a.merge(&b.merge(&c)?)?, of(0, 121)?);
    let expected = after(&whole)?;
    for (what, sums) in [("left first", &left), ("right first", &right)] {
        assert_close(what, &[2, 4, 29, 3], &after(sums)?, &expected, 1e-12);
        // F·(Dv + 2) + 1 numbers a key head.
        assert_eq!(sums.bytes(), 2 * 2 * (10 * (3 + 2) + 1) * 8);
    }
    assert_eq!((a.bytes(), b.bytes()), (whole.bytes(), whole.bytes()));
    Ok(())
}

#[test]
fn what_segments_cannot_do_is_refused() -> Result<()> {
    let problem = problem(FeatureMapKind::Trigonometric, false);
    let [q, k, v] = problem.tensors(DType::F32)?;
    let error = problem.favor(DType::F32)?.sums_of_segment(Inputs::new(&q, &k, &v)).unwrap_err().to_string();
    assert!(error.contains("logarithms of features"), "{error}");
    // Sums of other features, of other values, and of another batch.
    let of = |features: usize, values: usize, batch: usize| -> Result<SegmentSums> {
        let config = FavorConfig::default().with_features(features);
        let x = Tensor::zeros((batch, 2, 3, 4), DType::F32, &Device::Cpu)?;
        let favor = Favor::new(&config, 4, 1, DType::F32, &Device::Cpu)?;
        favor.sums_of_segment(Inputs::new(&x, &x, &x.narrow(3, 0, values)?))
    };
    let sums = of(8, 4, 1)?;
    for other in [of(6, 4, 1)?, of(8, 3, 1)?, of(8, 4, 2)?] {
        for error in [sums.merge(&other), other.merge(&sums)] {
            let error = error.expect_err("refused").to_string();
            assert!(error.contains("cannot be merged"), "{error}");
        }
    }
    let positive = self::problem(FeatureMapKind::Positive, false).favor(DType::F32)?;
    let none = |x: &Tensor| x.narrow(2, 0, 0);
    let (q0, k0, v0) = (none(&q)?, none(&k)?, none(&v)?);
    let error = positive.sums_of_segment(Inputs::new(&q0, &k0, &v0)).unwrap_err().to_string();
    assert!(error.contains("at least one token"), "{error}");
    let row = |x: &Tensor| x.narrow(0, 0, 1);
    let (q1, k1, v1) = (row(&q)?, row(&k)?, row(&v)?);
    let before = positive.sums_of_segment(Inputs::new(&q1, &k1, &v1))?;
    let error = positive.forward_after(Inputs::new(&q, &k, &v), &before).unwrap_err().to_string();
    assert!(error.contains("the sums before this one"), "{error}");
    Ok(())
}

/// A batch of no sequences whose segment lies within the window, and one whose does not.
#[test]
fn a_segment_of_an_empty_batch_is_empty() -> Result<()> {
    for (dtype, window) in [(DType::F64, 9), (DType::F32, 9), (DType::F64, 2), (DType::F32, 2)] {
        let none = Tensor::zeros((0, 2, 5, 4), dtype, &Device::Cpu)?;
        let windowed = Windowed::new(window, Favor::new(&FavorConfig::default(), 4, 3, dtype, &Device::Cpu)?)?;
        let out = windowed.forward_segment(Inputs::new(&none, &none, &none), &Segment::alone())?;
        assert_eq!(out.dims(), [0, 2, 5, 4], "{dtype:?}, window {window}");
        let favor = Favor::new(&FavorConfig::default(), 4, 3, dtype, &Device::Cpu)?;
        let out = favor.forward_segment(Inputs::new(&none, &none, &none), &Segment::alone())?;
        assert_eq!(out.dims(), [0, 2, 5, 4], "{dtype:?}");
    }
    Ok(())
}

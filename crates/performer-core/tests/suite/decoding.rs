//! These tests decode from a state: any split of a sequence gives what one pass gives, and a state
//! is refused where it does not belong.

use crate::common::{Problem, all_kernels, assert_tensor_close, conditioned_scale, values};
use candle_core::{DType, Device, Result, Tensor};
use performer_core::features::FeatureMapKind;
use performer_core::reference::Shape;
use performer_core::{Attention, Favor, FavorConfig, Inputs, Mask, Softmax, State};

const T: usize = 70;
const SHAPE: Shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: T, k_len: T, head_dim: 5, value_dim: 3 };

/// Feeds `[q, k, v]` in pieces of the given lengths.
fn in_pieces(attention: &dyn Attention, inputs: &[Tensor; 3], lengths: &[usize], state: &mut State) -> Result<Tensor> {
    let mut outputs = Vec::new();
    let mut start = 0;
    for &length in lengths {
        let [q, k, v] = inputs;
        let piece = |t: &Tensor| t.narrow(2, start, length);
        outputs.push(attention.extend(Inputs::new(&piece(q)?, &piece(k)?, &piece(v)?), state)?);
        start += length;
        assert_eq!(state.tokens(), start);
    }
    Tensor::cat(&outputs, 2)
}

#[test]
fn any_split_is_one_pass() -> Result<()> {
    let splits: [&[usize]; 8] = [
        &[T],
        &[1; T],
        &[16, 16, 16, 16, 6],
        &[1, 69],
        &[69, 1],
        &[33, 1, 1, 35],
        &[2, 3, 5, 7, 11, 13, 17, 12],
        &[20, 0, 50],
    ];
    for map in all_kernels() {
        let problem = Problem::random(1, SHAPE, map, 8).scale_qk(conditioned_scale(map));
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5)] {
            let attention = problem.attention(dtype)?;
            let inputs = problem.tensors(dtype)?;
            let [q, k, v] = &inputs;
            let whole = values(&attention.forward(Inputs::new(q, k, v), &Mask::causal())?)?;
            for split in splits {
                let pieces = in_pieces(&*attention, &inputs, split, &mut State::new())?;
                assert_tensor_close(&format!("{map:?} {dtype:?} in {split:?}"), &pieces, &whole, tolerance);
            }
        }
    }
    Ok(())
}

/// Half types widen to an f32 state, so a step loses no more than the rounding of its output.
#[test]
fn half_precision_steps_are_one_pass() -> Result<()> {
    for map in all_kernels() {
        let problem = Problem::random(2, SHAPE, map, 8).scale_qk(conditioned_scale(map));
        for (dtype, tolerance) in [(DType::BF16, 1e-2), (DType::F16, 2e-3)] {
            let attention = problem.attention(dtype)?;
            let inputs = problem.tensors(dtype)?;
            let [q, k, v] = &inputs;
            let whole = values(&attention.forward(Inputs::new(q, k, v), &Mask::causal())?)?;
            let steps = in_pieces(&*attention, &inputs, &[1; T], &mut State::new())?;
            assert_eq!(steps.dtype(), dtype);
            assert_tensor_close(&format!("{map:?} {dtype:?}"), &steps, &whole, tolerance);
        }
    }
    Ok(())
}

/// A later key can have features that are larger by any factor: then the state must be rescaled and
/// must not overflow. Exponential features of long keys are small, those of short keys large.
#[test]
fn growing_and_shrinking_keys_are_one_pass() -> Result<()> {
    let lengths: [fn(usize) -> f64; 2] = [|token| 1.0 + token as f64 / 4.0, |token| 1.0 + (T - token) as f64];
    for map in all_kernels().filter(|&map| crate::common::is_positive(map)) {
        for length in lengths {
            let mut problem = Problem::random(3, SHAPE, map, 8).scale_qk(conditioned_scale(map));
            for (i, k) in problem.k.iter_mut().enumerate() {
                *k *= length((i / SHAPE.head_dim) % T);
            }
            // Composed operations and the kernels scale their states each in their own way.
            for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-4)] {
                let attention = problem.attention(dtype)?;
                let inputs = problem.tensors(dtype)?;
                let [q, k, v] = &inputs;
                let whole = values(&attention.forward(Inputs::new(q, k, v), &Mask::causal())?)?;
                for split in [&[1; T][..], &[16, 54], &[50, 20]] {
                    let pieces = in_pieces(&*attention, &inputs, split, &mut State::new())?;
                    assert_tensor_close(&format!("{map:?} {dtype:?} in {split:?}"), &pieces, &whole, tolerance);
                }
            }
        }
    }
    Ok(())
}

/// A state whose clone was extended elsewhere continues from where it was cloned.
#[test]
fn a_cloned_state_is_independent() -> Result<()> {
    for map in all_kernels().flatten() {
        let problem = Problem::random(4, SHAPE, Some(map), 8).scale_qk(conditioned_scale(Some(map)));
        let attention = problem.favor(DType::F64)?;
        let [q, k, v] = problem.tensors(DType::F64)?;
        let piece = |t: &Tensor, start, length| t.narrow(2, start, length);
        let extend = |start, length, state: &mut State| {
            attention.extend(
                Inputs::new(&piece(&q, start, length)?, &piece(&k, start, length)?, &piece(&v, start, length)?),
                state,
            )
        };
        let mut state = State::new();
        extend(0, 30, &mut state)?;
        let mut branch = state.clone();
        extend(50, 20, &mut branch)?;
        let next = extend(30, 10, &mut state)?;
        let whole = attention.forward(Inputs::new(&q, &k, &v), &Mask::causal())?.narrow(2, 30, 10)?;
        assert_tensor_close(&format!("{map:?}"), &next, &values(&whole)?, 1e-12);
        assert_eq!((state.tokens(), branch.tokens()), (40, 50));
    }
    Ok(())
}

#[test]
fn favor_states_have_constant_size_and_softmax_states_grow() -> Result<()> {
    let bytes = |attention: &dyn Attention, tokens: usize| -> Result<usize> {
        let part = |heads| Tensor::ones((1, heads, tokens, 5), DType::F32, &Device::Cpu);
        let mut state = State::new();
        attention.extend(Inputs::new(&part(4)?, &part(2)?, &part(2)?), &mut state)?;
        assert_eq!(state.tokens(), tokens);
        Ok(state.bytes())
    };
    for map in crate::common::ALL_MAPS {
        let config = FavorConfig::default().with_map(map).with_features(8);
        let favor = Favor::new(&config, 5, 1, DType::F32, &Device::Cpu)?;
        let (one, many) = (bytes(&favor, 1)?, bytes(&favor, 2000)?);
        assert_eq!(one, many, "{map}");
        // Two key heads hold F rows of 5 values, a normaliser and scales, in f32 and whole vectors
        // of 16.
        let features = favor.map().feature_dim();
        let (least, most) = (2 * features * 6 * 4, 2 * (features * (16 + 1) + features.next_multiple_of(16)) * 4);
        assert!(one >= least && one <= most, "{map}: {one} bytes of F = {features}");
    }
    // Two key heads hold eight scales, eight rows of 16, and a normaliser of 16.
    let favor = Favor::new(&FavorConfig::default().with_features(8), 5, 1, DType::F32, &Device::Cpu)?;
    assert_eq!(bytes(&favor, 1)?, 2 * (8 + 8 * 16 + 16) * 4);
    let (one, many) = (bytes(&Softmax::new(), 1)?, bytes(&Softmax::new(), 2000)?);
    assert!(many >= 2000 * 2 * 2 * 5 * 4 && many > one, "softmax: {one} bytes, then {many}");
    Ok(())
}

/// A state carries no gradient, or a generated text would keep every tensor of its past.
#[test]
fn states_are_detached() -> Result<()> {
    for map in all_kernels() {
        let problem = Problem::random(5, SHAPE, map, 8).scale_qk(conditioned_scale(map));
        let attention = problem.attention(DType::F32)?;
        let [q, k, v] = problem.tensors(DType::F32)?;
        let k = candle_core::Var::from_tensor(&k)?;
        let mut state = State::new();
        attention.extend(Inputs::new(&q, &k, &v), &mut state)?;
        let next = attention.extend(Inputs::new(&q, &k.detach(), &v), &mut state)?;
        assert!(next.sum_all()?.backward()?.get(&k).is_none(), "{map:?}");
    }
    Ok(())
}

/// Fails unless `attention` refuses to go on from `state`, by an error that speaks of the state,
/// and leaves it as it was.
#[track_caller]
fn assert_refused(what: &str, attention: &dyn Attention, problem: &Problem, dtype: DType, state: &State) {
    let mut state = state.clone();
    let (tokens, bytes) = (state.tokens(), state.bytes());
    let [q, k, v] = problem.tensors(dtype).unwrap();
    match attention.extend(Inputs::new(&q, &k, &v), &mut state) {
        Ok(_) => panic!("{what}: the state was accepted"),
        Err(error) => assert!(error.to_string().contains("state"), "{what}: {error}"),
    }
    assert_eq!((state.tokens(), state.bytes()), (tokens, bytes), "{what}: the state has changed");
}

#[test]
fn a_state_from_elsewhere_is_refused() -> Result<()> {
    use FeatureMapKind::*;
    let dtype = DType::F32;
    let shape = Shape { q_len: 3, k_len: 3, ..SHAPE };
    let of = |map, shape, m| Problem::random(6, shape, map, m);
    let others = [
        ("another batch", Shape { batch: 3, ..shape }),
        ("other heads", Shape { heads: 2, kv_heads: 1, ..shape }),
        ("the same number of heads in all", Shape { batch: 4, heads: 2, kv_heads: 1, ..shape }),
        ("another value dim", Shape { value_dim: 4, ..shape }),
    ];
    for map in [None, Some(Positive), Some(Relu)] {
        let here = of(map, shape, 8);
        let attention = here.attention(dtype)?;
        let [q, k, v] = here.tensors(dtype)?;
        let mut state = State::new();
        attention.extend(Inputs::new(&q, &k, &v), &mut state)?;
        for (what, shape) in others {
            assert_refused(&format!("{map:?}, {what}"), &*attention, &of(map, shape, 8), dtype, &state);
        }
        assert_refused(&format!("{map:?}, f64"), &*attention, &here, DType::F64, &state);
        let elsewhere = [
            ("softmax", of(None, shape, 8)),
            ("positive", of(Some(Positive), shape, 8)),
            ("relu", of(Some(Relu), shape, 8)),
            ("other features", of(Some(Positive), shape, 9)),
        ];
        for (what, other) in elsewhere {
            if other.map == map && other.projection.len() == here.projection.len() {
                continue;
            }
            let what = format!("{map:?} to {what}");
            assert_refused(&what, &*other.attention(dtype)?, &other, dtype, &state);
        }
    }
    Ok(())
}

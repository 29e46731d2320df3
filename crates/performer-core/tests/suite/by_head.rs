//! Heads divided among several attentions: each head has the outputs, gradients and states that it
//! has alone.

use crate::common::{Problem, Random, assert_tensor_close, values};
use candle_core::{DType, Device, Result, Tensor, Var};
use performer_core::attention::ByHead;
use performer_core::reference::Shape;
use performer_core::{Attention, AttentionConfig, Favor, FavorConfig, Inputs, Mask, Softmax, State};

const SHAPE: Shape = Shape { batch: 2, heads: 6, kv_heads: 3, q_len: 70, k_len: 70, head_dim: 6, value_dim: 5 };

/// An attention for each of the three key heads, which two query heads read.
const GROUPS: [&str; 3] = ["favor:m=8", "softmax:window=9", "favor:m=24,window=4,sinks=2"];

fn built(spec: &str, dtype: DType) -> Result<Box<dyn Attention>> {
    let config: AttentionConfig = spec.parse().map_err(candle_core::Error::msg)?;
    config.build(SHAPE.head_dim, 5, dtype, &Device::Cpu)
}

fn all(dtype: DType) -> Result<ByHead> {
    ByHead::new(GROUPS.iter().map(|spec| built(spec, dtype)).collect::<Result<_>>()?)
}

/// Queries, keys, values and gates.
fn inputs(dtype: DType) -> Result<[Tensor; 4]> {
    let problem = Problem::random(1, SHAPE, None, 1).gated(2);
    let [q, k, v] = problem.tensors(dtype)?;
    Ok([q, k, v, problem.gate_tensor(dtype)?])
}

fn given([q, k, v, gates]: &[Tensor; 4]) -> Inputs<'_> {
    Inputs::new(q, k, v).with_gates(gates)
}

/// The part of queries, keys, values and gates that belongs to the `n`-th group.
fn of_group(inputs: &[Tensor; 4], n: usize) -> Result<[Tensor; 4]> {
    let [q, k, v, gates] = inputs;
    Ok([q.narrow(1, 2 * n, 2)?, k.narrow(1, n, 1)?, v.narrow(1, n, 1)?, gates.narrow(1, n, 1)?])
}

/// The output of an attention, and the gradients of queries, keys, values and gates where that of
/// the output is `weights`.
fn run(attention: &dyn Attention, inputs: &[Tensor; 4], mask: &Mask, weights: &Tensor) -> Result<[Tensor; 5]> {
    let [q, k, v, gates] = inputs.each_ref().map(|x| Var::from_tensor(&x.contiguous().expect("a copy")).expect("one"));
    let out = attention.forward(Inputs::new(&q, &k, &v).with_gates(&gates), mask)?;
    let gradients = (&out * weights)?.sum_all()?.backward()?;
    let of = |var: &Var| gradients.get(var).expect("a gradient").clone();
    Ok([out.detach(), of(&q), of(&k), of(&v), of(&gates)])
}

#[test]
fn each_head_is_what_it_is_alone() -> Result<()> {
    let visible: Vec<u8> = Random::new(3).mask(SHAPE.batch * SHAPE.k_len, 0.8).into_iter().map(u8::from).collect();
    let visible = Tensor::from_vec(visible, (SHAPE.batch, SHAPE.k_len), &Device::Cpu)?;
    for dtype in [DType::F32, DType::F64] {
        let inputs = inputs(dtype)?;
        let dims = (SHAPE.batch, SHAPE.heads, SHAPE.q_len, SHAPE.value_dim);
        let weights = Random::new(4).normal(SHAPE.output_count(), 1.0);
        let weights = Tensor::from_vec(weights, dims, &Device::Cpu)?.to_dtype(dtype)?;
        for mask in [Mask::causal(), Mask::causal().with_keys(&visible)?] {
            let together = run(&all(dtype)?, &inputs, &mask, &weights)?;
            for (n, spec) in GROUPS.iter().enumerate() {
                let own = weights.narrow(1, 2 * n, 2)?;
                let alone = run(&*built(spec, dtype)?, &of_group(&inputs, n)?, &mask, &own)?;
                for (i, (together, alone)) in together.iter().zip(&alone).enumerate() {
                    let heads = alone.dim(1)?;
                    let together = together.narrow(1, heads * n, heads)?;
                    assert_eq!(values(&together)?, values(alone)?, "{spec} {dtype:?}: number {i}");
                }
            }
        }
    }
    Ok(())
}

/// In pieces as in one pass, over states that were saved, and of which rows were taken and joined.
#[test]
fn decoding_is_one_pass() -> Result<()> {
    let (inputs, attention) = (inputs(DType::F32)?, all(DType::F32)?);
    let whole = attention.forward(given(&inputs), &Mask::causal())?;
    for lengths in [&[70][..], &[1; 70], &[1, 20, 9, 40]] {
        let (mut state, mut start, mut outs) = (State::new(), 0, Vec::new());
        for &length in lengths {
            let part = inputs.each_ref().map(|x| x.narrow(2, start, length).expect("a part"));
            outs.push(attention.extend(given(&part), &mut state)?);
            start += length;
            let rows = [state.select(&[0])?, state.select(&[1])?];
            state = State::from_record(&State::join(&[&rows[0], &rows[1]])?.record()?)?;
        }
        assert_tensor_close(&format!("{lengths:?}"), &Tensor::cat(&outs, 2)?, &values(&whole)?, 1e-5);
    }
    Ok(())
}

/// A state has the bytes of all groups, and none has more than it has alone.
#[test]
fn states_are_those_of_the_groups() -> Result<()> {
    let (inputs, mut together) = (inputs(DType::F32)?, State::new());
    all(DType::F32)?.extend(given(&inputs), &mut together)?;
    let mut bytes = 0;
    for (n, spec) in GROUPS.iter().enumerate() {
        let mut alone = State::new();
        built(spec, DType::F32)?.extend(given(&of_group(&inputs, n)?), &mut alone)?;
        bytes += alone.bytes();
    }
    assert_eq!(together.bytes(), bytes);
    Ok(())
}

#[test]
fn features_are_saved_loaded_and_drawn_for_each_group() -> Result<()> {
    let inputs = inputs(DType::F32)?;
    let (saved, mut loaded) = (all(DType::F32)?, all(DType::F32)?);
    let before = saved.identity()?;
    loaded.redraw(9)?;
    assert!(loaded.identity()? != before);
    let buffers = saved.buffers();
    let names: Vec<&str> = buffers.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["heads.0.projection", "heads.2.projection"]);
    let out = |attention: &ByHead| values(&attention.forward(given(&inputs), &Mask::causal())?);
    assert_ne!(out(&loaded)?, out(&saved)?);
    loaded.load_buffers(&|name| buffers.iter().find(|(n, _)| n == name).map(|(_, tensor)| tensor.clone()))?;
    assert_eq!(out(&loaded)?, out(&saved)?);
    assert!(loaded.identity()? == before);
    Ok(())
}

/// Training changes what a state was made by.
#[test]
fn trained_features_are_another_attention() -> Result<()> {
    let mut attention = ByHead::new(vec![built("softmax", DType::F32)?, built("favor:m=8,map=learned", DType::F32)?])?;
    let vars: Vec<(String, Var)> = (attention.buffers().into_iter())
        .map(|(name, tensor)| Ok((name, Var::from_tensor(&tensor)?)))
        .collect::<Result<_>>()?;
    attention.load_buffers(&|name| vars.iter().find(|(n, _)| n == name).map(|(_, var)| var.as_tensor().clone()))?;
    let before = attention.identity()?;
    let trained = attention.trained_buffers();
    let (name, var) = vars.iter().find(|(name, _)| trained.contains(name)).expect("trained features");
    assert!(name.starts_with("heads.1.feature_map."), "{name}");
    var.set(&(var.as_tensor() * 2.0)?)?;
    assert!(attention.identity()? != before);
    Ok(())
}

/// A group that cannot go on from what it remembers leaves all groups where they were, though the
/// groups before it have gone on by then.
#[test]
fn a_group_that_fails_takes_no_other_along() -> Result<()> {
    let config = FavorConfig::default().with_features(8);
    let favor = || Favor::new(&config, SHAPE.head_dim, 5, DType::F32, &Device::Cpu);
    let near = || built("softmax:window=4", DType::F32);
    let fused = ByHead::new(vec![near()?, Box::new(favor()?)])?;
    // Of the same features, and so of the same identity, with another memory.
    let composed = ByHead::new(vec![near()?, Box::new(favor()?.composed())])?;
    let x = Tensor::ones((1, 2, 3, SHAPE.head_dim), DType::F32, &Device::Cpu)?;
    let inputs = Inputs::new(&x, &x, &x);
    let mut state = State::new();
    fused.extend(inputs, &mut state)?;
    let expected = values(&fused.extend(inputs, &mut state.clone())?)?;
    let error = composed.extend(inputs, &mut state).expect_err("sums of another path").to_string();
    assert!(error.contains("another path"), "{error}");
    assert_eq!(state.tokens(), 3);
    assert_tensor_close("after the error", &fused.extend(inputs, &mut state)?, &expected, 0.0);
    Ok(())
}

#[test]
fn what_cannot_be_is_refused_and_leaves_the_state() -> Result<()> {
    let (inputs, attention) = (inputs(DType::F32)?, all(DType::F32)?);
    let refused = |result: Result<Tensor>, word: &str| {
        let error = result.expect_err(word).to_string();
        assert!(error.contains(word), "{error}");
    };
    assert!(ByHead::new(Vec::new()).is_err());
    let two = of_group(&inputs, 0)?.map(|x| Tensor::cat(&[&x, &x], 1).expect("two heads"));
    refused(attention.forward(given(&two), &Mask::causal()), "2 key heads cannot be divided equally among 3");
    let mut state = State::new();
    attention.extend(given(&inputs), &mut state)?;
    let expected = attention.extend(given(&inputs), &mut state.clone())?;
    // What the second group alone refuses leaves a fresh state fresh, and an older one what it was.
    let narrow = ByHead::new(vec![built("softmax", DType::F32)?, built("favor:m=8", DType::F32)?])?;
    let wide = Tensor::zeros((1, 2, 3, 8), DType::F32, &Device::Cpu)?;
    let fitting = Tensor::zeros((1, 2, 3, SHAPE.head_dim), DType::F32, &Device::Cpu)?;
    let mut fresh = State::new();
    refused(narrow.extend(Inputs::new(&wide, &wide, &wide), &mut fresh), "8");
    assert_eq!((fresh.tokens(), fresh.bytes()), (0, 0));
    narrow.extend(Inputs::new(&fitting, &fitting, &fitting), &mut fresh)?;
    let heads: Vec<AttentionConfig> = ["softmax", "none"].map(|name| name.parse().expect("a name")).into();
    let with_none = AttentionConfig::ByHead { of: heads }.build(SHAPE.head_dim, 1, DType::F32, &Device::Cpu)?;
    let gates = Tensor::zeros((1, 2, 3), DType::F32, &Device::Cpu)?;
    let mut none = State::new();
    with_none.extend(Inputs::new(&fitting, &fitting, &fitting), &mut none)?;
    let bytes = none.bytes();
    let gated = Inputs::new(&fitting, &fitting, &fitting).with_gates(&gates);
    refused(with_none.extend(gated, &mut none), "no forget gates");
    assert_eq!((none.tokens(), none.bytes()), (3, bytes));
    // A number that the last group alone would refuse.
    let infinite = (inputs[2].narrow(1, 2, 1)? * f64::INFINITY)?;
    let mut bad = inputs.clone();
    bad[2] = Tensor::cat(&[&inputs[2].narrow(1, 0, 2)?, &infinite], 1)?;
    refused(attention.extend(given(&bad), &mut state), "v holds inf");
    assert_eq!(state.tokens(), 70);
    assert_eq!(values(&attention.extend(given(&inputs), &mut state)?)?, values(&expected)?);
    // States of another division, and of groups that have seen other numbers of tokens.
    let others = ByHead::new(GROUPS.iter().rev().map(|spec| built(spec, DType::F32)).collect::<Result<_>>()?)?;
    refused(others.extend(given(&inputs), &mut state.clone()), "another attention");
    let mut redrawn = all(DType::F32)?;
    redrawn.redraw(9)?;
    refused(redrawn.extend(given(&inputs), &mut state.clone()), "same settings, but other random");
    let mut record = state.record()?;
    record.fields.insert("memory.heads1.tokens".into(), "3".into());
    refused(attention.extend(given(&inputs), &mut State::from_record(&record)?), "groups of [140, 3, 140]");
    record.fields.insert("memory.groups".into(), "1000000000000".into());
    refused(attention.extend(given(&inputs), &mut State::from_record(&record)?), "which it does not hold");
    Ok(())
}

/// An error names the head among all heads, and not within its group.
#[test]
fn heads_in_errors_are_those_of_the_caller() -> Result<()> {
    let attention = ByHead::new(vec![Box::new(Softmax::new()), Box::new(Softmax::new().with_window(2)?)])?;
    let good = Tensor::zeros((1, 1, 3, 4), DType::F32, &Device::Cpu)?;
    let bad = Tensor::cat(&[&good, &(&good + f64::NAN)?], 1)?;
    let good = bad.zeros_like()?;
    for (q, k, v, name) in [(&bad, &good, &good, "q"), (&good, &bad, &good, "k"), (&good, &good, &bad, "v")] {
        let said = attention.forward(Inputs::new(q, k, v), &Mask::causal()).unwrap_err().to_string();
        assert!(said.starts_with(&format!("{name} holds NaN at [0, 1, 0, 0] of shape [1, 2, 3, 4]")), "{said}");
    }
    Ok(())
}

/// What cannot be taken over by one group changes none.
#[test]
fn buffers_that_one_group_refuses_change_none() -> Result<()> {
    let favor = |seed| Favor::new(&FavorConfig::default().with_features(8), 4, seed, DType::F32, &Device::Cpu);
    let mut attention = ByHead::new(vec![Box::new(favor(1)?), Box::new(favor(2)?)])?;
    let x = Tensor::arange(0f32, 40.0, &Device::Cpu)?.sin()?.reshape((1, 2, 5, 4))?;
    let before = attention.forward(Inputs::new(&x, &x, &x), &Mask::causal())?;
    let other = favor(3)?.buffers()[0].1.clone();
    let loaded = attention.load_buffers(&|name| match name {
        "heads.0.projection" => Some(other.clone()),
        _ => other.narrow(0, 0, 3).ok(),
    });
    assert!(loaded.is_err());
    let after = attention.forward(Inputs::new(&x, &x, &x), &Mask::causal())?;
    assert_eq!(after.flatten_all()?.to_vec1::<f32>()?, before.flatten_all()?.to_vec1::<f32>()?);
    Ok(())
}

/// A new state that was extended by no tokens is still a new one.
#[test]
fn no_tokens_leave_a_state_new() -> Result<()> {
    let attention = ByHead::new(vec![Box::new(Softmax::new()), Box::new(Softmax::new())])?;
    let (none, x) =
        (Tensor::zeros((1, 2, 0, 4), DType::F32, &Device::Cpu)?, Tensor::ones((1, 2, 3, 4), DType::F32, &Device::Cpu)?);
    let mut state = State::new();
    assert_eq!(attention.extend(Inputs::new(&none, &none, &none), &mut state)?.dims(), [1, 2, 0, 4]);
    assert_eq!(Softmax::new().extend(Inputs::new(&x, &x, &x), &mut state)?.dims(), [1, 2, 3, 4]);
    Ok(())
}

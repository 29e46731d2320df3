//! Causality to the bit in the sizes of a model: 3,000 tokens, which are many chunks and several
//! segments of the backward pass, heads of 64 and 128 features; alone, with gates, windows and
//! convolutions, in one pass and while decoding, whatever an adversary puts into the future.

use crate::common::{Random, tensor, values};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use performer_core::{
    Attention, AttentionConfig, Inputs, LayerParts, Mask, MultiHeadAttention, MultiHeadConfig, State,
};

const TOKENS: usize = 3_000;
const HEAD_DIM: usize = 64;
const HEADS: usize = 2;

/// The first tokens of the future: beside borders of chunks of 32 and of segments of 16 chunks,
/// and elsewhere.
const CUTS: [usize; 10] = [1, 31, 33, 511, 512, 513, 1024, 1777, 2047, 2999];

/// What stands in the future. The queries, keys and values of the future become this.
#[derive(Clone, Copy, Debug)]
enum Future {
    /// Other numbers.
    Other,
    /// A key far larger than all before it, which wants a scale of its own.
    HugeKeys,
    /// Keys of zero, whose features are the largest that there are.
    NoKeys,
    /// Rows that are tiny and huge by turns, so that chunks end after every token.
    Alternating,
    /// Gates that forget everything, or nothing.
    Gates,
}

const FUTURES: [Future; 5] = [Future::Other, Future::HugeKeys, Future::NoKeys, Future::Alternating, Future::Gates];

impl Future {
    /// Returns queries, keys, values and gates whose tokens from `cut` on are changed.
    fn put(self, inputs: &[Tensor; 4], cut: usize) -> Result<[Tensor; 4]> {
        let count = TOKENS - cut;
        let change = |which: usize, x: &Tensor| -> Result<Tensor> {
            let (past, future) = (x.narrow(2, 0, cut)?, x.narrow(2, cut, count)?);
            let other = || -> Result<Tensor> {
                let drawn = Random::new((cut * 4 + which) as u64).normal(future.elem_count(), 2.0);
                tensor(&drawn, future.dims(), DType::F32, &Device::Cpu)
            };
            let turns = |low: f64, high: f64| -> Result<Tensor> {
                let by: Vec<f64> = (0..count).map(|i| if i % 2 == 0 { high } else { low }).collect();
                future.broadcast_mul(&tensor(&by, &[1, 1, count, 1], DType::F32, &Device::Cpu)?)
            };
            let future = match (self, which) {
                (Self::Gates, 3) => turns_of_gates(&future)?,
                (_, 3) => (&future * 0.5)?,
                (Self::Other, _) => other()?,
                (Self::HugeKeys, 1) => (&future * 100.0)?,
                (Self::NoKeys, 1) => future.zeros_like()?,
                (Self::Alternating, _) => turns(1e-6, 1e3)?,
                _ => (&future * -1.0)?,
            };
            Tensor::cat(&[past, future], 2)
        };
        let all: Vec<Tensor> = inputs.iter().enumerate().map(|(i, x)| change(i, x)).collect::<Result<_>>()?;
        all.try_into().map_err(|_| candle_core::Error::Msg("four tensors".into()))
    }
}

/// Gates `(B, H, T)` of 0 and −1e6 by turns.
fn turns_of_gates(gates: &Tensor) -> Result<Tensor> {
    let numbers: Vec<f64> = (0..gates.elem_count()).map(|i| if i % 2 == 0 { -1e6 } else { 0.0 }).collect();
    tensor(&numbers, gates.dims(), DType::F32, &Device::Cpu)
}

/// Queries, keys and values `(1, H, T, D)`, and gates `(1, H, T)` that forget at every pace.
fn inputs(key_heads: usize) -> Result<[Tensor; 4]> {
    let mut random = Random::new(1);
    let mut rows = |heads: usize| {
        let drawn = random.normal(heads * TOKENS * HEAD_DIM, 1.0);
        tensor(&drawn, &[1, heads, TOKENS, HEAD_DIM], DType::F32, &Device::Cpu)
    };
    let (q, k, v) = (rows(HEADS)?, rows(key_heads)?, rows(key_heads)?);
    let gates: Vec<f64> = random.uniform(key_heads * TOKENS, -7.0, 1.0).into_iter().map(|x| -x.exp()).collect();
    Ok([q, k, v, tensor(&gates, &[1, key_heads, TOKENS], DType::F32, &Device::Cpu)?])
}

fn attention(spec: &str) -> Result<(Box<dyn Attention>, bool)> {
    let config: AttentionConfig = spec.parse().map_err(candle_core::Error::msg)?;
    Ok((config.build(HEAD_DIM, 3, DType::F32, &Device::Cpu)?, config.is_gated()))
}

fn given(inputs: &[Tensor; 4], is_gated: bool) -> Inputs<'_> {
    let [q, k, v, gates] = inputs;
    let plain = Inputs::new(q, k, v);
    if is_gated { plain.with_gates(gates) } else { plain }
}

/// Attentions of every kind; `softmax` computes the square of the tokens.
const SPECS: [&str; 8] = [
    "favor:m=128",
    "favor:m=128,gate",
    "favor:m=128,map=relu,gate",
    "favor:m=64,map=hyperbolic",
    "favor:m=128,map=learned,window=32,sinks=4,gate",
    "softmax:window=66,sinks=4,gate",
    "softmax",
    "uniform:gate",
];

#[track_caller]
fn assert_same_bits(what: &str, actual: &Tensor, expected: &Tensor) -> Result<()> {
    let (actual, expected) = (values(actual)?, values(expected)?);
    assert_eq!(actual.len(), expected.len(), "{what}");
    let different = actual.iter().zip(&expected).filter(|(a, e)| a.to_bits() != e.to_bits()).count();
    assert_eq!(different, 0, "{what}: of {} numbers so many differ", expected.len());
    Ok(())
}

/// Checks that these futures leave the past alone to the bit, where queries, keys and values are of
/// this type.
fn check_futures(spec: &str, dtype: DType, cuts: &[(usize, Future)]) -> Result<()> {
    let (attention, is_gated) = attention(spec)?;
    let inputs = inputs(1)?;
    let forward = |[q, k, v, gates]: &[Tensor; 4]| {
        let inputs = [q.to_dtype(dtype)?, k.to_dtype(dtype)?, v.to_dtype(dtype)?, gates.clone()];
        attention.forward(given(&inputs, is_gated), &Mask::causal())
    };
    let whole = forward(&inputs)?;
    for &(cut, future) in cuts {
        let changed = forward(&future.put(&inputs, cut)?)?;
        let past = |x: &Tensor| x.narrow(2, 0, cut);
        assert_same_bits(&format!("{spec}, {dtype:?}, {future:?} from {cut}"), &past(&changed)?, &past(&whole)?)?;
    }
    Ok(())
}

/// Every cut meets another future.
#[test]
fn no_future_reaches_the_past() -> Result<()> {
    for (i, spec) in SPECS.into_iter().enumerate() {
        let cuts: Vec<_> = CUTS.into_iter().enumerate().map(|(n, cut)| (cut, FUTURES[(n + i) % 5])).collect();
        check_futures(spec, DType::F32, &cuts)?;
        check_futures(spec, [DType::F16, DType::BF16][i % 2], &cuts[7..])?;
    }
    Ok(())
}

/// Every cut meets every future.
#[test]
#[ignore = "minutes; `just attack-numbers` runs it"]
fn no_future_of_any_kind_reaches_the_past() -> Result<()> {
    for spec in SPECS {
        let cuts: Vec<_> = CUTS.into_iter().flat_map(|cut| FUTURES.map(|future| (cut, future))).collect();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            check_futures(spec, dtype, &cuts)?;
        }
    }
    Ok(())
}

/// A prefix alone has the bits that it has in the whole, and so has the state after it, whatever
/// comes later: one pass over 3,000 tokens, and pieces with borders in chunks and segments.
#[test]
fn decoding_pieces_see_the_past_alone() -> Result<()> {
    for spec in SPECS.into_iter().filter(|&spec| spec != "softmax") {
        let (attention, is_gated) = attention(spec)?;
        let inputs = inputs(1)?;
        let whole = values(&attention.forward(given(&inputs, is_gated), &Mask::causal())?)?;
        let piece = |inputs: &[Tensor; 4], start: usize, count: usize| -> Result<[Tensor; 4]> {
            let [q, k, v, gates] = inputs;
            let part = |x: &Tensor| x.narrow(2, start, count);
            Ok([part(q)?, part(k)?, part(v)?, part(gates)?])
        };
        let extend = |inputs: &[Tensor; 4], start: usize, count: usize, state: &mut State| {
            attention.extend(given(&piece(inputs, start, count)?, is_gated), state)
        };
        let (mut state, mut start, mut outs) = (State::new(), 0, Vec::new());
        for count in [1, 30, 481, 1, 512, 1, 1, 974, 999] {
            let future = FUTURES[outs.len() % 5].put(&inputs, (start + count).min(TOKENS - 1))?;
            let mut of_another = state.clone();
            outs.push(extend(&inputs, start, count, &mut state)?);
            // The future has not come yet, so it changes nothing; this is to see that nothing but
            // the piece is read.
            let same = extend(&future, start, count - usize::from(start + count == TOKENS), &mut of_another)?;
            let piece = outs.last().expect("just pushed").narrow(2, 0, same.dim(2)?)?;
            assert_same_bits(&format!("{spec}, {count} tokens from {start}"), &same, &piece)?;
            start += count;
        }
        assert_eq!(start, TOKENS);
        crate::common::assert_tensor_close(spec, &Tensor::cat(&outs, 2)?, &whole, 1e-5);
    }
    Ok(())
}

/// What is learned from the past does not depend on the future either: the gradients of a loss over
/// the first outputs are zero for later tokens, and the same whatever these are.
#[test]
fn gradients_of_the_past_do_not_see_the_future() -> Result<()> {
    for spec in SPECS.into_iter().filter(|&spec| spec != "softmax") {
        let (attention, is_gated) = attention(spec)?;
        let inputs = inputs(1)?;
        let gradients = |inputs: &[Tensor; 4], cut: usize| -> Result<Vec<Tensor>> {
            let vars: Vec<Var> = inputs.iter().map(Var::from_tensor).collect::<Result<_>>()?;
            let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
            let tensors: [Tensor; 4] = tensors.try_into().expect("four tensors");
            let out = attention.forward(given(&tensors, is_gated), &Mask::causal())?.narrow(2, 0, cut)?;
            let weights = Random::new(9).normal(out.elem_count(), 1.0);
            let weights = tensor(&weights, out.dims(), DType::F32, &Device::Cpu)?;
            let store = (out * weights)?.sum_all()?.backward()?;
            let used = if is_gated { 4 } else { 3 };
            Ok(vars[..used].iter().map(|var| store.get(var).expect("a gradient").clone()).collect())
        };
        for (cut, future) in [(700, Future::Other), (1024, Future::HugeKeys), (1777, Future::Alternating)] {
            let (one, other) = (gradients(&inputs, cut)?, gradients(&future.put(&inputs, cut)?, cut)?);
            for ((one, other), name) in one.iter().zip(&other).zip(["q", "k", "v", "gates"]) {
                let what = format!("{spec}, {future:?} from {cut}, gradient of {name}");
                let later = values(&other.narrow(2, cut, TOKENS - cut)?)?;
                assert!(later.iter().all(|&x| x == 0.0), "{what}: later tokens have one");
                assert_same_bits(&what, &other.narrow(2, 0, cut)?, &one.narrow(2, 0, cut)?)?;
            }
        }
    }
    Ok(())
}

const HIDDEN: usize = HEADS * HEAD_DIM;
/// What the layers of the tests below have between their parts.
const IN_LAYERS: [&str; 3] = ["favor:m=128", "favor:m=64,window=32", "softmax:window=66"];

/// Makes a layer with convolutions, gates and a norm around attention, of width 128. New filters
/// pass a token on as it is, so they are drawn at random.
fn layer_with_parts(spec: &str) -> Result<MultiHeadAttention> {
    let parts = LayerParts::default().with_convolution(true).with_gate(true).with_output_gate(true);
    let config = MultiHeadConfig::new(HIDDEN, HEADS).with_parts(parts.with_output_norm(true));
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let layer = MultiHeadAttention::new(&config, attention(spec)?.0, None, vb)?;
    let data = vars.data().lock().unwrap();
    let filters: Vec<&Var> = data.iter().filter(|(name, _)| name.contains("conv1d")).map(|(_, var)| var).collect();
    assert_eq!(filters.len(), 3);
    for (seed, filter) in (20..).zip(filters) {
        let drawn = Random::new(seed).normal(filter.elem_count(), 0.5);
        filter.set(&tensor(&drawn, filter.dims(), DType::F32, &Device::Cpu)?)?;
    }
    Ok(layer)
}

/// Draws the inputs of a layer, of the size that is given.
fn rows_of(seed: u64, size: f64) -> Result<Tensor> {
    tensor(&Random::new(seed).normal(TOKENS * HIDDEN, size), &[1, TOKENS, HIDDEN], DType::F32, &Device::Cpu)
}

#[test]
fn layers_with_parts_do_not_see_the_future() -> Result<()> {
    for spec in IN_LAYERS {
        let layer = layer_with_parts(spec)?;
        let (x, others) = (rows_of(1, 1.0)?, [rows_of(2, 1.0)?, rows_of(3, 300.0)?]);
        let whole = layer.forward(&x, &Mask::causal())?;
        for (i, cut) in [1, 3, 512, 513, 1777, 2997].into_iter().enumerate() {
            let later = others[i % 2].narrow(1, cut, TOKENS - cut)?;
            let changed = layer.forward(&Tensor::cat(&[&x.narrow(1, 0, cut)?, &later], 1)?, &Mask::causal())?;
            let past = |x: &Tensor| x.narrow(1, 0, cut);
            assert_same_bits(&format!("{spec} from {cut}"), &past(&changed)?, &past(&whole)?)?;
        }
    }
    Ok(())
}

/// The gradients of a loss over the first rows of a layer are zero for later rows, and have the
/// same bits whatever those are.
#[test]
fn gradients_of_layers_with_parts_do_not_see_the_future() -> Result<()> {
    for spec in IN_LAYERS {
        let layer = layer_with_parts(spec)?;
        let x = rows_of(1, 1.0)?;
        for (cut, later) in [(3, rows_of(2, 1.0)?), (512, rows_of(3, 300.0)?), (1777, rows_of(4, 1.0)?)] {
            let gradient = |x: &Tensor| -> Result<Tensor> {
                let x = Var::from_tensor(x)?;
                let out = layer.forward(&x, &Mask::causal())?.narrow(1, 0, cut)?;
                let weights = Random::new(9).normal(out.elem_count(), 1.0);
                let weights = tensor(&weights, out.dims(), DType::F32, &Device::Cpu)?;
                Ok((out * weights)?.sum_all()?.backward()?.get(&x).expect("a gradient").clone())
            };
            let changed = Tensor::cat(&[&x.narrow(1, 0, cut)?, &later.narrow(1, cut, TOKENS - cut)?], 1)?;
            let (of_x, of_changed) = (gradient(&x)?, gradient(&changed)?);
            let after = values(&of_changed.narrow(1, cut, TOKENS - cut)?)?;
            assert!(after.iter().all(|&x| x == 0.0), "{spec}: tokens from {cut} on have a gradient");
            let what = format!("{spec}, gradient of the first {cut}");
            assert_same_bits(&what, &of_changed.narrow(1, 0, cut)?, &of_x.narrow(1, 0, cut)?)?;
        }
    }
    Ok(())
}

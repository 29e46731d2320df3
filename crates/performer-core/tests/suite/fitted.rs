//! These tests check features fitted to data: they are unbiased whatever is fitted, have less
//! variance where that is promised, have one set of parameters for each head, and can be trained.

use std::collections::HashMap;

use crate::common::{Random, assert_close, assert_tensor_close, tensor, values};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use performer_core::features::{
    FeatureMap, FeatureMapKind, Fitted,
    fit::{Moments, Options, fit},
};
use performer_core::projection::{self, ProjectionKind, Radii};
use performer_core::reference::{self, FittedSide, Kernel, Shape};
use performer_core::{
    Attention, Favor, FavorConfig, Inputs, Mask, MultiHeadAttention, MultiHeadConfig, State, Windowed,
};

const D: usize = 6;
const HEADS: usize = 2;

/// Draws anisotropic queries and keys, away from the origin and different in each head: q
/// `(B, 4, T, D)`, k `(B, 2, T, D)`.
fn data(seed: u64, batch: usize, t: usize) -> Result<(Tensor, Tensor)> {
    let mut random = Random::new(seed);
    let mut side = |heads: usize, offset: f64| -> Result<Tensor> {
        let noise = random.normal(batch * heads * t * D, 0.8);
        let shaped: Vec<f64> = noise
            .iter()
            .enumerate()
            .map(|(i, x)| {
                let (d, head) = (i % D, i / (t * D) % heads);
                x * (0.3 + 0.25 * d as f64) + offset * (0.7 - 0.2 * d as f64) * (1 + head * HEADS / heads) as f64
            })
            .collect();
        tensor(&shaped, &[batch, heads, t, D], DType::F64, &Device::Cpu)
    };
    Ok((side(2 * HEADS, 0.6)?, side(HEADS, 0.7)?))
}

fn moments() -> Result<Moments> {
    let mut moments = Moments::new(HEADS, D)?;
    for seed in 0..4 {
        let (q, k) = data(seed, 3, 50)?;
        moments.add(&q, &k)?;
    }
    Ok(moments)
}

fn omega(m: usize, seed: u64) -> Result<Tensor> {
    projection::draw_tensor(ProjectionKind::Gaussian, Radii::Chi, m, D, seed, DType::F64, &Device::Cpu)
}

fn all() -> Vec<Options> {
    use FeatureMapKind::{Dense, Optimal, Positive};
    let mut all = Vec::new();
    for map in [Positive, Optimal, Dense] {
        for (centre, balance) in [(false, false), (true, false), (false, true), (true, true)] {
            all.push(Options::new(map).with_centre(centre).with_balance(balance));
        }
    }
    all
}

/// Returns the ratios of estimated to true kernel values of one head's pairs, each divided by its
/// query's own factor, which the rows of one query share.
fn ratios(map: &Fitted, q: &Tensor, k: &Tensor) -> Result<Vec<Vec<f64>>> {
    let scale = (D as f64).powf(-0.25);
    let rows = |x: &Tensor, per: usize| -> Result<Tensor> {
        let (b, h, t, d) = x.dims4()?;
        (x * scale)?.reshape((b * h / per, per * t, d))
    };
    let (x, y) = (rows(q, 2)?, rows(k, 1)?);
    let estimate = map.kernel(&x, &y)?;
    let exact = x.matmul(&y.transpose(1, 2)?.contiguous()?)?.exp()?;
    (estimate / exact)?.get(0)?.to_vec2()
}

#[test]
fn estimates_are_unbiased_whatever_is_fitted() -> Result<()> {
    let moments = moments()?;
    let (q, k) = data(99, 1, 3)?;
    for options in all() {
        let draws = 400;
        let mut sums = vec![(0.0, 0.0); 6 * 3];
        for seed in 0..draws {
            let map = fit(&omega(64, seed)?, &moments, options)?;
            for (sum, ratio) in sums.iter_mut().zip(ratios(&map, &q, &k)?.into_iter().flatten()) {
                *sum = (sum.0 + ratio, sum.1 + ratio * ratio);
            }
        }
        for (i, (sum, squares)) in sums.into_iter().enumerate() {
            let n = draws as f64;
            let (mean, variance) = (sum / n, squares / n - (sum / n) * (sum / n));
            let error = (variance / n).sqrt();
            // There are eighteen pairs times twelve fits: four standard errors are allowed.
            assert!((mean - 1.0).abs() < 4.0 * error + 1e-9, "{options:?}, pair {i}: {mean} ± {error}");
        }
    }
    Ok(())
}

/// Returns the mean size of the logarithm of a kernel value over the exact one, counted as at most
/// 3.
fn spread(options: Options, moments: &Moments) -> Result<f64> {
    let (q, k) = data(7, 1, 40)?;
    let (mut sum, mut count) = (0.0, 0.0);
    for seed in 0..60 {
        let map = fit(&omega(32, seed)?, moments, options)?;
        for ratio in ratios(&map, &q, &k)?.into_iter().flatten() {
            // Errors are heavy-tailed: a bounded loss of the logarithm says more than a mean of
            // squares.
            sum += ratio.ln().abs().min(3.0);
            count += 1.0;
        }
    }
    Ok(sum / count)
}

/// The deviation of logits is that of all pairs of a query and a key of a head, and what does not
/// fit the moments is refused.
#[test]
fn the_deviation_of_logits_is_that_of_all_pairs() -> Result<()> {
    let (q, k) = data(3, 1, 40)?;
    let mut moments = Moments::new(HEADS, D)?;
    moments.add(&q, &k)?;
    for (head, found) in moments.logit_deviation()?.into_iter().enumerate() {
        let queries = q.get(0)?.narrow(0, 2 * head, 2)?.flatten(0, 1)?;
        let keys = k.get(0)?.get(head)?;
        let logits = (queries.matmul(&keys.t()?.contiguous()?)? * (D as f64).powf(-0.5))?;
        let logits = logits.flatten_all()?.to_vec1::<f64>()?;
        let mean = |numbers: &[f64]| numbers.iter().sum::<f64>() / numbers.len() as f64;
        let squares: Vec<f64> = logits.iter().map(|x| x * x).collect();
        let want = (mean(&squares) - mean(&logits).powi(2)).sqrt();
        assert!((found - want).abs() < 1e-9 * want, "head {head}: {found} and {want}");
    }
    let error = moments.add(&k, &k.narrow(3, 0, D - 1)?).expect_err("keys of another width").to_string();
    assert!(error.contains("moments of"), "{error}");
    Ok(())
}

/// The metrics of a balanced map, `G` of queries and `P` of keys, undo each other and give both
/// sides the same second moments, about their means where they are centred. As they are, the sides
/// differ.
#[test]
fn balanced_queries_and_keys_have_the_same_moments() -> Result<()> {
    let (q, k) = data(3, 1, 60)?;
    let mut moments = Moments::new(HEADS, D)?;
    moments.add(&q, &k)?;
    for centre in [false, true] {
        let options = Options::new(FeatureMapKind::Positive).with_centre(centre);
        let plain = fit(&omega(8, 1)?, &moments, options)?;
        assert_eq!(plain.tensors().len(), 3, "a map that is not balanced has no metrics");
        let fitted = fit(&omega(8, 1)?, &moments, options.with_balance(true))?;
        let metric = |name: &str, head: usize| -> Result<Tensor> {
            let (_, metric) = fitted.tensors().into_iter().find(|(other, _)| *other == name).expect("a metric");
            metric.get(head)
        };
        let second_moments = |rows: &Tensor| -> Result<Tensor> {
            let rows = if centre { rows.broadcast_sub(&rows.mean_keepdim(0)?)? } else { rows.clone() };
            rows.t()?.contiguous()?.matmul(&rows)? / rows.dim(0)? as f64
        };
        for head in 0..HEADS {
            let queries = second_moments(&q.get(0)?.narrow(0, 2 * head, 2)?.flatten(0, 1)?)?;
            let keys = second_moments(&k.get(0)?.get(head)?)?;
            let (g, p) = (metric("query_metric", head)?, metric("key_metric", head)?);
            let unit = Tensor::eye(D, DType::F64, &Device::Cpu)?;
            assert_tensor_close("G P", &g.matmul(&p)?, &values(&unit)?, 1e-9);
            let of_keys = values(&p.matmul(&keys)?.matmul(&p)?)?;
            let what = format!("centred {centre}, head {head}");
            assert_tensor_close(&what, &g.matmul(&queries)?.matmul(&g)?, &of_keys, 1e-9);
            let apart = (queries - keys)?.abs()?.max_all()?.to_scalar::<f64>()?;
            assert!(apart > 0.01, "{what}: the sides differ by {apart} as they are");
        }
    }
    Ok(())
}

#[test]
fn what_is_fitted_lowers_the_error() -> Result<()> {
    let moments = moments()?;
    use FeatureMapKind::{Dense, Positive};
    let error = |map, centre, balance| spread(Options::new(map).with_centre(centre).with_balance(balance), &moments);
    let plain = error(Positive, false, false)?;
    let centred = error(Positive, true, false)?;
    let dense = error(Dense, true, true)?;
    assert!(centred < 0.9 * plain, "centred {centred}, plain {plain}");
    assert!(dense < 0.95 * centred, "dense {dense}, centred {centred}");
    Ok(())
}

/// Fits everything at once, in the dtype asked for, and adds noise to each number. Without it
/// metrics are symmetric and weights follow from the rest, so that a transposed metric or a lost
/// weight could pass.
fn full_fit(dtype: DType) -> Result<Fitted> {
    let options = Options::new(FeatureMapKind::Dense).with_centre(true).with_balance(true);
    let fitted = fit(&omega(20, 5)?, &moments()?, options)?;
    Fitted::from_tensors(&|name| {
        let (seed, (_, fitted)) = (40..).zip(fitted.tensors()).find(|(_, (n, _))| *n == name)?;
        let change = Random::new(seed).normal(fitted.elem_count(), 0.05);
        let change = tensor(&change, fitted.dims(), DType::F64, &Device::Cpu).ok()?;
        (fitted + change).ok()?.to_dtype(dtype).ok()
    })
}

fn qkv(t: usize, dtype: DType) -> Result<[Tensor; 3]> {
    let (q, k) = data(31, 2, t)?;
    let v = tensor(&Random::new(8).normal(2 * HEADS * t * 5, 1.0), &[2, HEADS, t, 5], DType::F64, &Device::Cpu)?;
    Ok([q.to_dtype(dtype)?, k.to_dtype(dtype)?, v.to_dtype(dtype)?])
}

/// Draws gates of every pace, `(2, HEADS, T)`.
fn gates(t: usize, dtype: DType) -> Result<Tensor> {
    let mut random = Random::new(12);
    let gates: Vec<f64> = random.uniform(2 * HEADS * t, -6.0, 1.0).into_iter().map(|x| -x.exp()).collect();
    tensor(&gates, &[2, HEADS, t], dtype, &Device::Cpu)
}

/// Returns the output and the gradients of q, k, v, and of gates if there are some.
fn run(attention: &dyn Attention, mask: &Mask, gated: bool, t: usize, dtype: DType) -> Result<Vec<Vec<f64>>> {
    let mut vars: Vec<Var> = qkv(t, dtype)?.iter().map(Var::from_tensor).collect::<Result<_>>()?;
    if gated {
        vars.push(Var::from_tensor(&gates(t, dtype)?)?);
    }
    let mut inputs = Inputs::new(&vars[0], &vars[1], &vars[2]);
    inputs.gates = vars.get(3).map(|gates| gates.as_tensor());
    let out = attention.forward(inputs, mask)?;
    let weights = tensor(&Random::new(2).normal(out.elem_count(), 1.0), out.dims(), dtype, &Device::Cpu)?;
    let gradients = (&out * weights)?.sum_all()?.backward()?;
    let mut all = vec![values(&out)?];
    for var in &vars {
        all.push(values(gradients.get(var).expect("a gradient"))?);
    }
    Ok(all)
}

/// Makes attention by everything that is fitted: alone, or behind a window of 5 tokens and a sink.
fn attention(windowed: bool, dtype: DType) -> Result<Box<dyn Attention>> {
    let favor = Favor::with_map(Box::new(full_fit(dtype)?))?;
    Ok(match windowed {
        false => Box::new(favor),
        true => Box::new(Windowed::new(5, favor)?.with_sinks(1)?),
    })
}

/// Computes what [`run`] returns by the reference, one key head of one sequence at a time, since
/// the reference takes the parameters of one head.
fn run_reference(causal: bool, windowed: bool, gated: bool, t: usize) -> Result<Vec<Vec<f64>>> {
    let (map, [q, k, v], gates) = (full_fit(DType::F64)?, qkv(t, DType::F64)?, gates(t, DType::F64)?);
    let weights = Random::new(2).normal(4 * HEADS * t * 5, 1.0);
    let weights = tensor(&weights, &[2, 2 * HEADS, t, 5], DType::F64, &Device::Cpu)?;
    let mut all = vec![Vec::new(); if gated { 5 } else { 4 }];
    for (batch, head) in (0..2).flat_map(|batch| (0..HEADS).map(move |head| (batch, head))) {
        let parameters: Vec<Vec<f64>> =
            map.tensors().into_iter().map(|(_, tensor)| values(&tensor.get(head)?)).collect::<Result<_>>()?;
        let [a, b, w, g, p] = &parameters[..] else { panic!("queries, keys, weights of keys and two metrics") };
        let fitted = Kernel::Fitted {
            queries: FittedSide { rows: a, log_weights: &[], metric: g },
            keys: FittedSide { rows: b, log_weights: w, metric: p },
        };
        let of_head = |x: &Tensor, heads: usize| values(&x.get(batch)?.narrow(0, head * heads, heads)?);
        let (q, k, v) = (of_head(&q, 2)?, of_head(&k, 1)?, of_head(&v, 1)?);
        let (gates, weights) = (of_head(&gates, 1)?, of_head(&weights, 2)?);
        let inputs = reference::Inputs {
            shape: Shape { batch: 1, heads: 2, kv_heads: 1, q_len: t, k_len: t, head_dim: D, value_dim: 5 },
            q: &q,
            k: &k,
            v: &v,
            causal,
            window: windowed.then_some(5),
            before_window: windowed.then_some(fitted),
            sinks: usize::from(windowed),
            key_mask: None,
            gates: gated.then_some(&gates[..]),
        };
        let kernel = if windowed { Kernel::Softmax } else { fitted };
        let gradients = reference::attention_backward(kernel, inputs, &weights);
        let output = reference::attention(kernel, inputs);
        let found = [output, gradients.q, gradients.k, gradients.v, gradients.gates];
        all.iter_mut().zip(found).for_each(|(all, found)| all.extend(found));
    }
    Ok(all)
}

/// Composed operations in f64 and fused kernels in f32 give the outputs and gradients of the
/// reference.
#[test]
fn attention_is_that_of_the_reference() -> Result<()> {
    let cases = [
        (Mask::full(), false, false),
        (Mask::causal(), false, false),
        (Mask::causal(), false, true),
        (Mask::causal(), true, false),
        (Mask::causal(), true, true),
    ];
    for (t, cases) in [(1, &cases[..]), (2, &cases), (63, &cases), (130, &cases), (500, &cases[4..])] {
        for (mask, windowed, gated) in cases {
            let (windowed, gated) = (*windowed, *gated);
            let truth = run_reference(mask.is_causal(), windowed, gated, t)?;
            for (dtype, tolerance) in [(DType::F64, 1e-9), (DType::F32, 1e-4)] {
                let found = run(&*attention(windowed, dtype)?, mask, gated, t, dtype)?;
                assert_eq!(found.len(), truth.len());
                let names = ["output", "q", "k", "v", "gates"];
                for (name, (actual, expected)) in names.iter().zip(found.iter().zip(&truth)) {
                    let causal = mask.is_causal();
                    let what = format!("{dtype:?} T={t} causal {causal} windowed {windowed} gated {gated} {name}");
                    assert_close(&what, &[expected.len()], actual, expected, tolerance);
                }
            }
        }
    }
    Ok(())
}

/// Later tokens change no bit of an earlier output.
#[test]
fn the_future_leaves_the_past_alone() -> Result<()> {
    let t = 150;
    let [q, k, v] = qkv(t, DType::F32)?;
    let gates = gates(t, DType::F32)?;
    for windowed in [false, true] {
        let attention = attention(windowed, DType::F32)?;
        let out = |inputs: [&Tensor; 4], tokens: usize| -> Result<Vec<f64>> {
            let [q, k, v, gates] = inputs;
            let out = attention.forward(Inputs::new(q, k, v).with_gates(gates), &Mask::causal())?;
            values(&out.narrow(2, 0, tokens)?)
        };
        for cut in [1, 5, 6, 64, 65, 149] {
            let changed = |x: &Tensor, by: f64| -> Result<Tensor> {
                Tensor::cat(&[&x.narrow(2, 0, cut)?, &(x.narrow(2, cut, t - cut)? * by)?], 2)
            };
            let other = [changed(&q, -3.0)?, changed(&k, 20.0)?, changed(&v, 7.0)?, changed(&gates, 9.0)?];
            let past = out([&q, &k, &v, &gates], cut)?;
            assert_eq!(out(other.each_ref(), cut)?, past, "windowed {windowed}, tokens before {cut}");
        }
    }
    Ok(())
}

/// Any split into pieces is one pass, and a state that was saved goes on as if it had not been.
#[test]
fn pieces_are_one_pass() -> Result<()> {
    let t = 40;
    let [q, k, v] = qkv(t, DType::F32)?;
    let gates = gates(t, DType::F32)?;
    for (windowed, gated) in [(false, false), (false, true), (true, false), (true, true)] {
        let attention = attention(windowed, DType::F32)?;
        let what = format!("windowed {windowed}, gated {gated}");
        let whole = {
            let mut inputs = Inputs::new(&q, &k, &v);
            inputs.gates = gated.then_some(&gates);
            values(&attention.forward(inputs, &Mask::causal())?)?
        };
        for pieces in [&[1; 40][..], &[17, 1, 1, 21], &[3, 37]] {
            let (mut state, mut start, mut outs) = (State::new(), 0, Vec::new());
            for &n in pieces {
                let part = |x: &Tensor| x.narrow(2, start, n);
                let (q, k, v, gates) = (part(&q)?, part(&k)?, part(&v)?, part(&gates)?);
                let mut inputs = Inputs::new(&q, &k, &v);
                inputs.gates = gated.then_some(&gates);
                let mut saved = State::from_record(&state.record()?)?;
                let again = values(&attention.extend(inputs, &mut saved)?)?;
                let out = attention.extend(inputs, &mut state)?;
                assert_eq!(again, values(&out)?, "{what}: a saved state before token {start}");
                outs.push(out);
                start += n;
            }
            assert_tensor_close(&format!("{what} in {pieces:?}"), &Tensor::cat(&outs, 2)?, &whole, 1e-5);
        }
    }
    Ok(())
}

#[test]
fn parameters_that_are_variables_get_gradients_and_give_the_same_outputs() -> Result<()> {
    let constant = full_fit(DType::F32)?;
    let vars: Vec<(&str, Var)> = constant
        .tensors()
        .into_iter()
        .map(|(name, tensor)| Ok((name, Var::from_tensor(tensor)?)))
        .collect::<Result<_>>()?;
    let trainable = Fitted::from_tensors(&|name| {
        let var = vars.iter().find(|(n, _)| *n == name)?;
        Some(var.1.as_tensor().clone())
    })?;
    let [q, k, v] = qkv(70, DType::F32)?;
    let out = Favor::with_map(Box::new(trainable))?.forward(Inputs::new(&q, &k, &v), &Mask::causal())?;
    let expected =
        values(&Favor::with_map(Box::new(constant.clone()))?.forward(Inputs::new(&q, &k, &v), &Mask::causal())?)?;
    assert_tensor_close("variables", &out, &expected, 1e-5);
    let gradients = out.sqr()?.sum_all()?.backward()?;
    // A factor common to all features of a query has no part in attention.
    for (name, var) in vars.iter().filter(|(name, _)| *name != "query_metric") {
        let gradient = values(gradients.get(var).unwrap_or_else(|| panic!("{name} has no gradient")))?;
        assert!(gradient.iter().any(|g| g.abs() > 1e-6), "{name}: the gradient is zero");
    }
    Ok(())
}

#[test]
fn buffers_that_are_variables_make_any_such_map_trainable() -> Result<()> {
    for map in [FeatureMapKind::Learned, FeatureMapKind::Hedgehog] {
        let config = performer_core::FavorConfig::default().with_map(map).with_features(9);
        let mut favor = Favor::new(&config, D, 1, DType::F32, &Device::Cpu)?;
        let [q, k, v] = qkv(70, DType::F32)?;
        let before = values(&favor.forward(Inputs::new(&q, &k, &v), &Mask::causal())?)?;
        // There is a set of parameters for each of two heads.
        let vars: Vec<(String, Var)> = favor
            .buffers()
            .into_iter()
            .map(|(name, tensor)| Ok((name, Var::from_tensor(&Tensor::cat(&[&tensor, &tensor], 0)?)?)))
            .collect::<Result<_>>()?;
        favor.load_buffers(&|name| vars.iter().find(|(n, _)| n == name).map(|(_, var)| var.as_tensor().clone()))?;
        let out = favor.forward(Inputs::new(&q, &k, &v), &Mask::causal())?;
        assert_tensor_close(&map.to_string(), &out, &before, 1e-5);
        let gradients = out.sqr()?.sum_all()?.backward()?;
        for (name, var) in &vars {
            let gradient = gradients.get(var).unwrap_or_else(|| panic!("{map} {name} has no gradient"));
            for head in 0..2 {
                let part = values(&gradient.get(head)?)?;
                assert!(part.iter().any(|g| g.abs() > 1e-6), "{map} {name}: the gradient of head {head} is zero");
            }
        }
    }
    Ok(())
}

/// A variable that would have to be converted is refused: the converted copy would not be trained.
#[test]
fn variables_of_another_type_are_refused() -> Result<()> {
    let config = performer_core::FavorConfig::default().with_map(FeatureMapKind::Learned).with_features(9);
    let mut favor = Favor::new(&config, D, 1, DType::F32, &Device::Cpu)?;
    let saved = favor.buffers();
    let of = |name: &str| saved.iter().find(|(n, _)| n == name).map(|(_, tensor)| tensor.clone());
    let wide = |name: &str| of(name).map(|tensor| tensor.to_dtype(DType::F64).expect("f64"));
    let variable = |name: &str| wide(name).map(|tensor| Var::from_tensor(&tensor).expect("a variable").into_inner());
    let error = favor.load_buffers(&variable).expect_err("variables of f64").to_string();
    assert!(error.contains("is a variable of F64") && error.contains("must be of F32"), "{error}");
    // Numbers that are not trained are converted.
    favor.load_buffers(&wide)
}

#[test]
fn buffers_restore_a_fit_of_any_number_of_heads() -> Result<()> {
    let config = performer_core::FavorConfig::default().with_map(FeatureMapKind::Dense).with_features(20);
    let fitted = Favor::with_map(Box::new(full_fit(DType::F32)?))?;
    let saved = fitted.buffers();
    let mut fresh = Favor::new(&config, D, 1, DType::F32, &Device::Cpu)?;
    fresh.load_buffers(&|name| saved.iter().find(|(n, _)| n == name).map(|(_, t)| t.clone()))?;
    let [q, k, v] = qkv(12, DType::F32)?;
    let outs = [&fitted, &fresh]
        .map(|favor| favor.forward(Inputs::new(&q, &k, &v), &Mask::causal()).and_then(|out| values(&out)));
    let [a, b] = outs;
    assert_eq!(a?, b?);
    let error = fresh.load_buffers(&|_| None).expect_err("nothing was saved").to_string();
    assert!(error.contains("queries is missing"), "{error}");
    let three = Tensor::zeros((1, 3, 7, D), DType::F32, &Device::Cpu)?;
    let error =
        fitted.forward(Inputs::new(&three, &three, &three), &Mask::causal()).expect_err("three heads").to_string();
    assert!(error.contains("fitted to 2 key heads"), "{error}");
    Ok(())
}

#[test]
fn a_projection_that_is_no_matrix_is_refused() -> Result<()> {
    let matrix = Tensor::zeros((4, 3), DType::F32, &Device::Cpu)?;
    assert_eq!(Fitted::positive(&matrix)?.input_dim(), 3);
    for other in [matrix.get(0)?, matrix.unsqueeze(0)?] {
        let error = Fitted::positive(&other).unwrap_err().to_string();
        assert!(error.contains("rank"), "{error}");
    }
    Ok(())
}

/// A layer with balanced features has metrics beside them, and is the same layer after it is saved
/// and made anew from the file, with features of the same kind that were not fitted.
#[test]
fn a_layer_with_metrics_is_the_same_when_it_is_loaded() -> Result<()> {
    let config = MultiHeadConfig::new(24, 2 * HEADS).with_kv_heads(HEADS).with_head_dim(D);
    let fitted = full_fit(DType::F32)?;
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let layer = MultiHeadAttention::new(&config, Box::new(Favor::with_map(Box::new(fitted))?), None, vb)?;
    let x = tensor(&Random::new(4).normal(2 * 9 * 24, 1.0), &[2, 9, 24], DType::F32, &Device::Cpu)?;
    let expected = values(&layer.forward(&x, &Mask::causal())?)?;
    let saved: HashMap<String, Tensor> = vars
        .data()
        .lock()
        .expect("the map")
        .iter()
        .map(|(name, var)| (name.clone(), var.as_tensor().clone()))
        .collect();
    assert!(saved.keys().any(|name| name.contains("metric")), "{:?}", saved.keys());
    let unfitted = || {
        let config = FavorConfig::default().with_map(FeatureMapKind::Dense).with_features(20);
        Favor::new(&config, D, 5, DType::F32, &Device::Cpu)
    };
    let vb = VarBuilder::from_tensors(saved.clone(), DType::F32, &Device::Cpu);
    let loaded = MultiHeadAttention::new(&config, Box::new(unfitted()?), None, vb.clone())?;
    let mut other = MultiHeadAttention::without_buffers(&config, Box::new(unfitted()?), None, vb)?;
    other.load_buffers(&|name| saved.get(name).cloned())?;
    // Weights that are variables take another way through the kernels, which rounds otherwise.
    let loaded = loaded.forward(&x, &Mask::causal())?;
    assert_tensor_close("the saved one", &loaded, &expected, 1e-6);
    assert_tensor_close("loaded later", &loaded, &values(&other.forward(&x, &Mask::causal())?)?, 0.0);
    Ok(())
}

/// A layer over a map of variables, and inputs of it.
fn layer_over(vars: &VarMap, favor: Favor) -> Result<(MultiHeadAttention, Tensor)> {
    let config = MultiHeadConfig::new(24, 2 * HEADS).with_kv_heads(HEADS).with_head_dim(D);
    let vb = VarBuilder::from_varmap(vars, DType::F32, &Device::Cpu);
    let x = tensor(&Random::new(4).normal(2 * 9 * 24, 1.0), &[2, 9, 24], DType::F32, &Device::Cpu)?;
    Ok((MultiHeadAttention::new(&config, Box::new(favor), None, vb)?, x))
}

/// Features that were not fitted, of 20 rows.
fn unfitted(map: FeatureMapKind) -> Result<Favor> {
    Favor::new(&FavorConfig::default().with_map(map).with_features(20), D, 5, DType::F32, &Device::Cpu)
}

/// A layer that cannot write buffers of other shapes into its map of variables keeps its own.
#[test]
fn a_layer_that_refuses_buffers_goes_on_with_its_own() -> Result<()> {
    let vars = VarMap::new();
    let (mut layer, x) = layer_over(&vars, unfitted(FeatureMapKind::Dense)?)?;
    let before = values(&layer.forward(&x, &Mask::causal())?)?;
    // These have parameters for each of the key heads, where the layer registered one set for all.
    let fitted = Favor::with_map(Box::new(full_fit(DType::F32)?))?.buffers();
    let find = |name: &str| fitted.iter().find(|(own, _)| own == name).map(|(_, tensor)| tensor.clone());
    let error = layer.load_buffers(&find).expect_err("other shapes").to_string();
    assert!(error.contains("make the layer anew"), "{error}");
    assert_tensor_close("after the error", &layer.forward(&x, &Mask::causal())?, &before, 0.0);
    Ok(())
}

/// Metrics are saved beside the layer's other buffers, or refused: a map of variables that lacks
/// them would save a layer that computes with others.
#[test]
fn a_layer_refuses_metrics_that_its_variables_lack() -> Result<()> {
    let vars = VarMap::new();
    let (mut layer, x) = layer_over(&vars, unfitted(FeatureMapKind::Learned)?)?;
    let before = values(&layer.forward(&x, &Mask::causal())?)?;
    let fitted = Favor::with_map(Box::new(full_fit(DType::F32)?))?.buffers();
    assert!(fitted.iter().any(|(name, _)| name.contains("metric")));
    // One set serves all key heads, as in the layer.
    let find = |name: &str| fitted.iter().find(|(own, _)| own == name)?.1.narrow(0, 0, 1).ok();
    let error = layer.load_buffers(&find).expect_err("metrics").to_string();
    assert!(error.contains("metric is none of those") && error.contains("make the layer anew"), "{error}");
    assert_tensor_close("after the error", &layer.forward(&x, &Mask::causal())?, &before, 0.0);
    let gradients = layer.forward(&x, &Mask::causal())?.sqr()?.sum_all()?.backward()?;
    for name in layer.attention().trained_buffers() {
        assert!(gradients.get(&vars.data().lock().expect("the map")[&name]).is_some(), "{name} is trained no more");
    }
    // A layer that was made with metrics does not go on without them either.
    let (mut layer, x) = layer_over(&VarMap::new(), Favor::with_map(Box::new(full_fit(DType::F32)?))?)?;
    let before = values(&layer.forward(&x, &Mask::causal())?)?;
    let find =
        |name: &str| fitted.iter().find(|(own, _)| own == name && !own.contains("metric")).map(|(_, t)| t.clone());
    let error = layer.load_buffers(&find).expect_err("no metrics").to_string();
    assert!(error.contains("metric, which this layer was made with, is missing"), "{error}");
    assert_tensor_close("with its own", &layer.forward(&x, &Mask::causal())?, &before, 0.0);
    Ok(())
}

/// A second layer over a map of variables that holds metrics computes with them, or not at all.
#[test]
fn a_second_layer_over_variables_with_metrics_needs_them() -> Result<()> {
    let vars = VarMap::new();
    let fitted = || Favor::with_map(Box::new(full_fit(DType::F32)?));
    let (layer, x) = layer_over(&vars, fitted()?)?;
    let expected = values(&layer.forward(&x, &Mask::causal())?)?;
    let (second, _) = layer_over(&vars, fitted()?)?;
    assert_tensor_close("with metrics", &second.forward(&x, &Mask::causal())?, &expected, 0.0);
    // This one has rows and weights of the same shapes, and no metrics.
    let full = full_fit(DType::F32)?;
    let find = |name: &str| full.tensors().into_iter().find(|(own, _)| *own == name && !own.contains("metric"));
    let without = Favor::with_map(Box::new(Fitted::from_tensors(&|name| Some(find(name)?.1.clone()))?))?;
    let error = layer_over(&vars, without).expect_err("no metrics").to_string();
    assert!(error.contains("metric is there beside the layer's weights"), "{error}");
    Ok(())
}

/// One set of features with metrics serves all key heads of a layer until it is trained: then each
/// has a set of its own, metrics that do not change among it.
#[test]
fn a_set_for_all_heads_becomes_one_for_each_with_its_metrics() -> Result<()> {
    let full = full_fit(DType::F32)?;
    let find = |name: &str| full.tensors().into_iter().find(|(own, _)| *own == name)?.1.narrow(0, 0, 1).ok();
    let favor = Favor::with_map(Box::new(Fitted::from_tensors(&find)?))?.trained();
    let (layer, _) = layer_over(&VarMap::new(), favor)?;
    assert_eq!(layer.attention().buffers().len(), full.tensors().len());
    for (name, buffer) in layer.attention().buffers() {
        let one =
            find(name.trim_start_matches("feature_map.")).expect("it was given").flatten_all()?.to_vec1::<f32>()?;
        assert_eq!(buffer.flatten_all()?.to_vec1::<f32>()?, one.repeat(HEADS), "{name}");
    }
    Ok(())
}

//! These tests check feature maps that are trained inside the fused kernels: the gradients of their
//! parameters are compared with those of composed operations in f64, and with finite differences.

use crate::common::{Random, assert_close, assert_tensor_close, tensor, values};
use candle_core::{D, DType, Device, Result, Tensor, Var};
use performer_core::features::{ExponentialForm, FeatureMap, Features, Fitted, KeyForm};
use performer_core::{Attention, Favor, Inputs, Mask, State, Windowed};

#[path = "../../examples/trained_features.rs"]
mod example;

const BATCH: usize = 2;
const KEY_HEADS: usize = 2;
const NAMES: [&str; 7] = ["q", "k", "v", "queries", "keys", "log_weights", "gates"];

#[test]
fn the_example_brings_features_nearer_to_softmax() -> Result<()> {
    let (before, after) = example::train(60)?;
    assert!(after < 0.8 * before, "{before} and {after}");
    Ok(())
}

/// `Sizes` are the sizes of a case.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    tokens: usize,
    head_dim: usize,
    features: usize,
    /// The number of heads that have parameters; 1 serves all.
    sets: usize,
    window: Option<usize>,
    gated: bool,
}

/// Draws inputs and parameters, in the order of [`NAMES`]; gates only where there are to be some.
fn inputs(sizes: Sizes) -> Result<Vec<Tensor>> {
    let Sizes { tokens: t, head_dim: d, features: m, sets, gated, .. } = sizes;
    let shapes: [&[usize]; 6] = [
        &[BATCH, 2 * KEY_HEADS, t, d],
        &[BATCH, KEY_HEADS, t, d],
        &[BATCH, KEY_HEADS, t, 5],
        &[sets, m, d],
        &[sets, m, d],
        &[sets, m],
    ];
    let mut random = Random::new((t * 31 + m) as u64);
    let draw = |shape: &&[usize]| tensor(&random.normal(shape.iter().product(), 0.9), shape, DType::F64, &Device::Cpu);
    let mut all: Vec<Tensor> = shapes.iter().map(draw).collect::<Result<_>>()?;
    if gated {
        // Most forget over many tokens, and a few forget everything.
        let gates = random.normal(BATCH * KEY_HEADS * t, 1.0);
        let gates: Vec<f64> = gates.iter().map(|x| if *x > 1.8 { -40.0 } else { -(2.0 * x - 3.0).exp() }).collect();
        all.push(tensor(&gates, &[BATCH, KEY_HEADS, t], DType::F64, &Device::Cpu)?);
    }
    Ok(all)
}

/// Returns the randomly weighted sum of the outputs, and the outputs.
fn loss(inputs: &[Tensor], sizes: Sizes, mask: &Mask) -> Result<(Tensor, Tensor)> {
    let map = Fitted::new(inputs[3].clone(), inputs[4].clone(), inputs[5].clone())?;
    let favor = Favor::with_map(Box::new(map))?;
    let attention: Box<dyn Attention> = match sizes.window {
        Some(window) => Box::new(Windowed::new(window, favor)?),
        None => Box::new(favor),
    };
    let mut given = Inputs::new(&inputs[0], &inputs[1], &inputs[2]);
    given.gates = inputs.get(6);
    let out = attention.forward(given, mask)?;
    let weights = Random::new(2).normal(out.elem_count(), 1.0);
    let weights = tensor(&weights, out.dims(), out.dtype(), &Device::Cpu)?;
    Ok(((&out * weights)?.sum_all()?, out))
}

/// Returns the outputs and all gradients.
fn run(sizes: Sizes, mask: &Mask, dtype: DType) -> Result<Vec<Vec<f64>>> {
    run_on(&inputs(sizes)?, sizes, mask, dtype)
}

fn run_on(inputs: &[Tensor], sizes: Sizes, mask: &Mask, dtype: DType) -> Result<Vec<Vec<f64>>> {
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let var = |(i, x): (usize, &Tensor)| Var::from_tensor(&x.to_dtype(if i == 6 { wide } else { dtype })?);
    let vars: Vec<Var> = inputs.iter().enumerate().map(var).collect::<Result<_>>()?;
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let (loss, out) = loss(&tensors, sizes, mask)?;
    let gradients = loss.backward()?;
    let mut all = vec![values(&out)?];
    for (var, name) in vars.iter().zip(NAMES) {
        all.push(values(gradients.get(var).unwrap_or_else(|| panic!("{name} has no gradient")))?);
    }
    Ok(all)
}

fn compare(sizes: Sizes, mask: &Mask, what: &str) -> Result<()> {
    let mut truth = run(sizes, mask, DType::F64)?;
    let mut fused = run(sizes, mask, DType::F32)?;
    if sizes.tokens == 1 {
        // One key has all the weight whatever its features: their gradients are 0, and rounding
        // errors are measured against 1.
        truth.iter_mut().chain(&mut fused).for_each(|numbers| numbers.push(1.0));
    }
    for (name, (actual, expected)) in ["output"].iter().chain(&NAMES).zip(fused.iter().zip(&truth)) {
        assert_close(&format!("{sizes:?} {what} {name}"), &[actual.len()], actual, expected, 1e-4);
    }
    Ok(())
}

#[test]
fn gradients_agree_with_composed_operations_in_f64() -> Result<()> {
    for (tokens, head_dim, features, sets) in
        [(1, 6, 3, 1), (2, 8, 16, 2), (63, 6, 20, 2), (130, 16, 32, 1), (500, 8, 5, 2), (1000, 4, 33, 1)]
    {
        let sizes = Sizes { tokens, head_dim, features, sets, window: None, gated: false };
        compare(sizes, &Mask::causal(), "causal")?;
        compare(Sizes { gated: true, ..sizes }, &Mask::causal(), "gated")?;
        compare(sizes, &Mask::full(), "full")?;
    }
    Ok(())
}

/// Inputs and parameters are of a half type: as for constant maps, only the rounding of outputs and
/// gradients to that type is lost.
#[test]
fn half_types_lose_their_rounding_only() -> Result<()> {
    let sizes = Sizes { tokens: 130, head_dim: 16, features: 20, sets: 2, window: None, gated: false };
    for (dtype, gated) in [(DType::F16, false), (DType::BF16, false), (DType::F16, true), (DType::BF16, true)] {
        let sizes = Sizes { gated, ..sizes };
        let rounded: Vec<Tensor> = inputs(sizes)?.iter().map(|x| x.to_dtype(dtype)).collect::<Result<_>>()?;
        for mask in [Mask::causal(), Mask::full()].into_iter().take(if gated { 1 } else { 2 }) {
            let (half, truth) = (run_on(&rounded, sizes, &mask, dtype)?, run_on(&rounded, sizes, &mask, DType::F64)?);
            for (name, (half, truth)) in ["output"].iter().chain(&NAMES).zip(half.iter().zip(&truth)) {
                let what = format!("{dtype:?} gated {gated} causal {} {name}", mask.is_causal());
                assert_close(&what, &[half.len()], half, truth, 1e-2);
            }
        }
    }
    Ok(())
}

#[test]
fn hidden_keys_give_parameters_nothing() -> Result<()> {
    let sizes = Sizes { tokens: 70, head_dim: 6, features: 9, sets: 2, window: None, gated: false };
    let visible: Vec<f64> = (0..BATCH * 70).map(|i| f64::from(i % 5 != 0 && i % 70 < 60)).collect();
    let mask = |causal: Mask| causal.with_keys(&tensor(&visible, &[BATCH, 70], DType::F32, &Device::Cpu)?);
    compare(sizes, &mask(Mask::causal())?, "causal, hidden keys")?;
    compare(sizes, &mask(Mask::full())?, "full, hidden keys")
}

#[test]
fn a_window_before_trained_features_trains_them_too() -> Result<()> {
    for (tokens, window) in [(20, 4), (90, 32)] {
        let sizes = Sizes { tokens, head_dim: 6, features: 12, sets: 2, window: Some(window), gated: false };
        compare(sizes, &Mask::causal(), "window")?;
        compare(Sizes { gated: true, ..sizes }, &Mask::causal(), "gated window")?;
    }
    Ok(())
}

/// Computes the gradients of the parameters of one head that is alone, or among many that count for
/// nothing.
fn gradients_of_one(batch: usize, mask: &Mask) -> Result<Vec<Vec<f64>>> {
    let device = Device::Cpu;
    let (t, d, m) = (530, 4, 6);
    let mut random = Random::new(11);
    let mut draw = |shape: &[usize]| tensor(&random.normal(shape.iter().product(), 0.9), shape, DType::F32, &device);
    let parameters = [draw(&[1, m, d])?, draw(&[1, m, d])?, draw(&[1, m])?];
    let vars: Vec<Var> = parameters.iter().map(Var::from_tensor).collect::<Result<_>>()?;
    let [q, k, v] = [draw(&[1, 2, t, d])?, draw(&[1, 1, t, d])?, draw(&[1, 1, t, 3])?];
    let weights = draw(&[1, 2, t, 3])?;
    let repeated = |x: &Tensor| x.repeat((batch, 1, 1, 1));
    let [queries, keys, log_weights] = [0, 1, 2].map(|i: usize| vars[i].as_tensor().clone());
    let map = Fitted::new(queries, keys, log_weights)?;
    let out =
        Favor::with_map(Box::new(map))?.forward(Inputs::new(&repeated(&q)?, &repeated(&k)?, &repeated(&v)?), mask)?;
    let gradients = (out.narrow(0, 0, 1)? * weights)?.sum_all()?.backward()?;
    vars.iter().map(|var| values(gradients.get(var).expect("a gradient"))).collect()
}

#[test]
fn sums_over_tokens_do_not_tell_how_the_work_was_split() -> Result<()> {
    for mask in [Mask::causal(), Mask::full()] {
        // 64 heads are more than most machines have threads, so that nothing is cut.
        assert_eq!(gradients_of_one(1, &mask)?, gradients_of_one(64, &mask)?, "causal {}", mask.is_causal());
    }
    Ok(())
}

#[test]
fn gradients_are_the_slopes_of_the_loss() -> Result<()> {
    let sizes = Sizes { tokens: 70, head_dim: 6, features: 9, sets: 2, window: None, gated: false };
    for mask in [Mask::causal(), Mask::full()] {
        let sizes = Sizes { gated: mask.is_causal(), ..sizes };
        let all = inputs(sizes)?;
        let gradients = run(sizes, &mask, DType::F32)?;
        for i in 3..all.len() {
            let direction = Random::new(i as u64).normal(all[i].elem_count(), 1.0);
            let along: f64 = direction.iter().zip(&gradients[i + 1]).map(|(x, g)| x * g).sum();
            let step = 1e-5;
            let at = |by: f64| -> Result<f64> {
                let mut moved = all.clone();
                moved[i] = (&all[i] + (tensor(&direction, all[i].dims(), DType::F64, &Device::Cpu)? * by)?)?;
                loss(&moved, sizes, &mask)?.0.to_scalar::<f64>()
            };
            let slope = (at(step)? - at(-step)?) / (2.0 * step);
            assert!((along / slope - 1.0).abs() < 1e-3, "{}: {along}, by differences {slope}", NAMES[i]);
        }
    }
    Ok(())
}

/// A rectified map whose projection is a variable, as somebody else may write one.
#[derive(Debug)]
struct Own(Var);

impl FeatureMap for Own {
    fn input_dim(&self) -> usize {
        4
    }

    fn feature_dim(&self) -> usize {
        6
    }

    fn rectified_form(&self) -> Option<(Tensor, f64)> {
        Some((self.0.as_tensor().clone(), 1e-3))
    }

    fn features(&self, x: &Tensor) -> Result<Features> {
        let values = x.broadcast_matmul(&self.0.t()?)?.relu()?.affine(6f64.powf(-0.5), 1e-3)?;
        Ok(Features::Linear { values, log_scale: None })
    }
}

#[test]
fn a_rectified_map_of_a_variable_has_its_gradient() -> Result<()> {
    let projection = tensor(&Random::new(1).normal(24, 1.0), &[6, 4], DType::F32, &Device::Cpu)?;
    let x = tensor(&Random::new(2).normal(40, 1.0), &[1, 2, 5, 4], DType::F32, &Device::Cpu)?;
    let projection = Var::from_tensor(&projection)?;
    let favor = Favor::with_map(Box::new(Own(projection.clone())))?;
    let gradients = favor.forward(Inputs::new(&x, &x, &x), &Mask::causal())?.sqr()?.sum_all()?.backward()?;
    let gradient = values(gradients.get(&projection).expect("a gradient of the projection"))?;
    assert!(gradient.iter().any(|&g| g != 0.0), "{gradient:?}");
    let composed = Favor::with_map(Box::new(Own(projection.clone())))?.composed();
    let gradients = composed.forward(Inputs::new(&x, &x, &x), &Mask::causal())?.sqr()?.sum_all()?.backward()?;
    assert_tensor_close("the gradient", gradients.get(&projection).expect("a gradient"), &gradient, 1e-4);
    // A state of the map as it was is not gone on with once the map was trained.
    let mut state = State::new();
    favor.extend(Inputs::new(&x, &x, &x), &mut state)?;
    projection.set(&(projection.as_tensor() * 1.5)?)?;
    let error = favor.extend(Inputs::new(&x, &x, &x), &mut state).expect_err("a state of another map").to_string();
    assert!(error.contains("another"), "{error}");
    Ok(())
}

/// Hyperbolic features of which those of keys have weights, the same for a row and its opposite.
#[derive(Debug)]
struct Weighted {
    rows: Tensor,
    weights: Tensor,
}

impl Weighted {
    fn both(&self, x: &Tensor, weights: &Tensor) -> Result<Features> {
        let linear = x.broadcast_matmul(&self.rows.t()?)?;
        let [plus, minus] = [linear.broadcast_add(weights)?, linear.neg()?.broadcast_add(weights)?];
        let shared = (x.sqr()?.sum_keepdim(D::Minus1)? * 0.5)?;
        Ok(Features::Log(Tensor::cat(&[plus, minus], D::Minus1)?.broadcast_sub(&shared)?))
    }
}

impl FeatureMap for Weighted {
    fn input_dim(&self) -> usize {
        4
    }

    fn feature_dim(&self) -> usize {
        12
    }

    fn features(&self, x: &Tensor) -> Result<Features> {
        self.both(x, &self.weights.zeros_like()?)
    }

    fn key_features(&self, y: &Tensor) -> Result<Features> {
        self.both(y, &self.weights)
    }

    fn exponential_form(&self) -> Option<ExponentialForm> {
        let projection = self.rows.unsqueeze(0).ok()?;
        let log_weights = self.weights.unsqueeze(0).ok()?;
        let keys = KeyForm { projection: projection.clone(), log_weights, metric: None };
        Some(ExponentialForm { projection, hyperbolic: true, keys: Some(keys) })
    }
}

#[test]
fn weights_of_hyperbolic_keys_count_for_both_features_of_a_row() -> Result<()> {
    let map = || -> Result<Box<dyn FeatureMap>> {
        let rows = tensor(&Random::new(1).normal(24, 1.0), &[6, 4], DType::F32, &Device::Cpu)?;
        let weights = tensor(&Random::new(2).normal(6, 1.0), &[6], DType::F32, &Device::Cpu)?;
        Ok(Box::new(Weighted { rows, weights }))
    };
    let draw = |seed| tensor(&Random::new(seed).normal(280, 0.5), &[1, 2, 35, 4], DType::F32, &Device::Cpu);
    let [q, k, v] = [draw(3)?, draw(4)?, draw(5)?];
    for mask in [Mask::full(), Mask::causal()] {
        let composed = Favor::with_map(map()?)?.composed().forward(Inputs::new(&q, &k, &v), &mask)?;
        let favor = Favor::with_map(map()?)?.forward(Inputs::new(&q, &k, &v), &mask)?;
        assert_tensor_close("by the kernels", &favor, &values(&composed)?, 1e-5);
    }
    Ok(())
}

//! These tests check windowed attention, which is exact for near keys and FAVOR for far ones: it is
//! compared with the f64 reference, tested for leaks, and decoded step by step.

use crate::common::{Layout, Problem, Random, assert_tensor_close, conditioned_scale, tensor, values};
use candle_core::{DType, Device, Result, Tensor};
use performer_core::reference::Shape;
use performer_core::{Attention, Favor, FavorConfig, FeatureMapKind, Inputs, Mask, Softmax, State, Windowed};

const D: usize = 8;

/// Tolerances relative to the largest element of an output or a gradient.
const TOLERANCES: [(DType, f64); 4] = [(DType::F64, 1e-9), (DType::F32, 1e-4), (DType::F16, 5e-3), (DType::BF16, 4e-2)];

/// Windows with sinks: shorter than one, longer, and of as many tokens.
const SINKS: [(usize, usize, usize); 5] = [(2, 1, 1), (63, 5, 4), (130, 64, 1), (300, 7, 20), (40, 20, 30)];

fn windowed(window: usize, dtype: DType, map: FeatureMapKind) -> Result<Windowed> {
    let config = FavorConfig::default().with_map(map).with_features(12);
    Windowed::new(window, Favor::new(&config, D, 3, dtype, &Device::Cpu)?)
}

/// Draws q `(2, 4, T, D)`, k `(2, 2, T, D)`, v `(2, 2, T, 5)`.
fn inputs(t: usize, dtype: DType) -> Result<[Tensor; 3]> {
    let mut random = Random::new(t as u64);
    let mut one = |heads: usize, width: usize| -> Result<Tensor> {
        tensor(&random.normal(2 * heads * t * width, 1.0), &[2, heads, t, width], dtype, &Device::Cpu)
    };
    Ok([one(4, D)?, one(2, D)?, one(2, 5)?])
}

/// Checks outputs and gradients of a problem with a window, as they are computed by default and in
/// composed operations.
#[track_caller]
fn check(problem: &Problem, dtypes: &[(DType, f64)]) -> Result<()> {
    check_layout(problem, dtypes, Layout::Transposed)
}

#[track_caller]
fn check_layout(problem: &Problem, dtypes: &[(DType, f64)], layout: Layout) -> Result<()> {
    for &(dtype, tolerance) in dtypes {
        let problem = problem.clone().rounded(dtype)?;
        let expected = problem.expected();
        for (how, attention) in [("", problem.attention(dtype)?), (" composed", problem.composed(dtype)?)] {
            let actual = problem.run(&*attention, dtype, layout)?;
            let (window, sinks) = problem.window.expect("a window");
            let hidden = problem.key_mask.is_some();
            let what = format!("{dtype:?}{how} {layout:?} W={window}, {sinks} sinks, hidden keys {hidden}");
            problem.assert_outcome(&what, &actual, &expected, tolerance);
        }
    }
    Ok(())
}

fn problem(seed: u64, shape: Shape, map: Option<FeatureMapKind>, m: usize) -> Problem {
    Problem::random(seed, shape, map, m).scale_qk(conditioned_scale(map))
}

const fn shape(t: usize) -> Shape {
    Shape { batch: 2, heads: 4, kv_heads: 2, q_len: t, k_len: t, head_dim: D, value_dim: 5 }
}

/// Windows before features, with gates and without, with hidden keys and without, at lengths
/// within, at and beyond the kernels' tiles and chunks. Sinks are exact however far they are, and
/// no feature counts them a second time.
#[test]
fn a_window_before_features_is_the_reference() -> Result<()> {
    use FeatureMapKind::{Elu, Exp, Hedgehog, Hyperbolic, Learned, Positive};
    let windows = [(1, 1), (2, 1), (63, 5), (130, 64), (300, 7), (40, 200)].map(|(t, window)| (t, window, 0));
    for (number, map) in [Positive, Hyperbolic, Elu, Exp, Learned, Hedgehog].into_iter().enumerate() {
        for (place, (t, window, sinks)) in windows.into_iter().chain(SINKS).enumerate() {
            for combination in 0..4 {
                // The other maps differ in their features alone, so they share the combinations,
                // and half types are left to the first.
                if map != Positive && combination != (number + place) % 4 {
                    continue;
                }
                let mut problem = problem(t as u64, shape(t), Some(map), 12);
                if combination & 1 > 0 {
                    problem = problem.gated(1);
                }
                problem.key_mask = (combination & 2 > 0).then(|| Random::new(9).mask(2 * t, 0.8));
                let dtypes = if map == Positive { &TOLERANCES[..] } else { &TOLERANCES[..2] };
                check(&problem.windowed(window, sinks), dtypes)?;
            }
        }
    }
    Ok(())
}

/// Segments and chunks of 128 features, with gates.
#[test]
fn long_windows_before_many_features_are_the_reference() -> Result<()> {
    for (t, window, sinks) in [(500, 65, 0), (1000, 33, 4)] {
        let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: t, k_len: t, head_dim: 64, value_dim: 64 };
        let problem = problem(t as u64, shape, Some(FeatureMapKind::Positive), 128).gated(2).windowed(window, sinks);
        check(&problem, &TOLERANCES[1..2])?;
    }
    Ok(())
}

/// Fewer features than dimensions, in every layout, and a length beyond all others.
#[test]
fn windows_before_few_features_are_the_reference() -> Result<()> {
    let map = Some(FeatureMapKind::Positive);
    for layout in Layout::ALL {
        for (window, sinks) in [(5, 0), (7, 3)] {
            let problem = problem(4, shape(75), map, 5).gated(1).windowed(window, sinks);
            check_layout(&problem, &TOLERANCES[..2], layout)?;
            let softmax = Problem { map: None, ..problem };
            check_layout(&softmax, &TOLERANCES[..2], layout)?;
        }
    }
    let long = Shape { batch: 1, heads: 2, kv_heads: 1, ..shape(1500) };
    check(&problem(5, long, map, 5).gated(2).windowed(65, 4), &TOLERANCES[..2])
}

/// A hidden sink is hidden too, and no other token takes its place.
#[test]
fn hidden_keys_count_on_neither_side() -> Result<()> {
    let (t, window) = (90, 9);
    let mut some = Random::new(5).mask(2 * t, 0.7);
    // This row sees nothing.
    some[0] = false;
    // Later rows see nothing in their window, and these keys before it.
    let early = (0..2 * t).map(|j| (3..20).contains(&(j % t))).collect();
    // Rows beyond the window see nothing in it nor before it, as where texts are padded in front.
    let late = (0..2 * t).map(|j| j % t >= 30).collect();
    for visible in [some, early, late] {
        for sinks in [0, 3] {
            let plain = problem(6, shape(t), Some(FeatureMapKind::Positive), 12).windowed(window, sinks);
            for mut problem in [plain.clone(), plain.gated(7)] {
                problem.key_mask = Some(visible.clone());
                check(&problem, &TOLERANCES[..2])?;
            }
        }
    }
    Ok(())
}

#[test]
fn the_future_leaves_the_past_alone() -> Result<()> {
    let t = 200;
    let positive = windowed(17, DType::F32, FeatureMapKind::Positive)?;
    let attentions: [(&str, Box<dyn Attention>); 3] = [
        ("features", Box::new(positive)),
        ("features and sinks", Box::new(windowed(17, DType::F32, FeatureMapKind::Positive)?.with_sinks(3)?)),
        ("softmax and sinks", Box::new(Softmax::new().with_window(17)?.with_sinks(3)?)),
    ];
    let [q, k, v] = inputs(t, DType::F32)?;
    for (name, attention) in attentions {
        let whole = attention.forward(Inputs::new(&q, &k, &v), &Mask::causal())?;
        for cut in [1, 2, 3, 16, 17, 18, 64, 81, 199] {
            let changed = |x: &Tensor, by: f64| -> Result<Tensor> {
                Tensor::cat(&[&x.narrow(2, 0, cut)?, &(x.narrow(2, cut, t - cut)? * by)?], 2)
            };
            let out = attention
                .forward(Inputs::new(&changed(&q, -3.0)?, &changed(&k, 50.0)?, &changed(&v, 7.0)?), &Mask::causal())?;
            let past = |x: &Tensor| x.narrow(2, 0, cut)?.contiguous()?.flatten_all()?.to_vec1::<f32>();
            let same = past(&out)?.iter().zip(past(&whole)?).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{name}: tokens before {cut} changed");
        }
    }
    Ok(())
}

#[test]
fn any_split_is_one_pass_and_the_state_stops_growing() -> Result<()> {
    let t = 60;
    for attention in [
        windowed(10, DType::F32, FeatureMapKind::Positive)?,
        windowed(10, DType::F32, FeatureMapKind::Positive)?.composed(),
        windowed(7, DType::F32, FeatureMapKind::Positive)?.with_sinks(3)?,
        windowed(1, DType::F32, FeatureMapKind::Positive)?.with_sinks(9)?,
    ] {
        let [q, k, v] = inputs(t, DType::F32)?;
        let whole = values(&attention.forward(Inputs::new(&q, &k, &v), &Mask::causal())?)?;
        for split in [vec![1; 60], vec![25, 1, 1, 33], vec![3, 4, 53], vec![60]] {
            let (mut state, mut start, mut outs, mut bytes) = (State::new(), 0, Vec::new(), Vec::new());
            for len in split {
                let [q, k, v] = [&q, &k, &v].map(|x| x.narrow(2, start, len));
                outs.push(attention.extend(Inputs::new(&q?, &k?, &v?), &mut state)?);
                start += len;
                if start > 11 {
                    bytes.push(state.bytes());
                }
            }
            assert_eq!(state.tokens(), t);
            assert!(bytes.windows(2).all(|pair| pair[0] == pair[1]), "{bytes:?}");
            assert_tensor_close("pieces", &Tensor::cat(&outs, 2)?, &whole, 1e-5);
        }
    }
    Ok(())
}

#[test]
fn a_window_over_everything_is_softmax() -> Result<()> {
    let [q, k, v] = inputs(70, DType::F32)?;
    let exact = values(&Softmax::new().forward(Inputs::new(&q, &k, &v), &Mask::causal())?)?;
    let out = windowed(70, DType::F32, FeatureMapKind::Positive)?.forward(Inputs::new(&q, &k, &v), &Mask::causal())?;
    assert_tensor_close("softmax", &out, &exact, 1e-6);
    Ok(())
}

#[test]
fn what_cannot_be_is_refused() -> Result<()> {
    let error = |result: Result<Tensor>| result.expect_err("an error").to_string();
    assert!(windowed(0, DType::F32, FeatureMapKind::Positive).is_err());
    for map in [FeatureMapKind::Trigonometric, FeatureMapKind::Relu] {
        let error = windowed(4, DType::F32, map).expect_err("features without logarithms").to_string();
        assert!(error.contains("does not return logarithms") && error.contains("map=positive"), "{map}: {error}");
    }
    let attention = windowed(4, DType::F32, FeatureMapKind::Positive)?;
    let [q, k, v] = inputs(6, DType::F32)?;
    assert!(error(attention.forward(Inputs::new(&q, &k, &v), &Mask::full())).contains("causal"));
    let mut state = State::new();
    Softmax::new().extend(Inputs::new(&q, &k, &v), &mut state)?;
    assert!(error(attention.extend(Inputs::new(&q, &k, &v), &mut state)).contains("another attention"));
    Ok(())
}

/// An error names the place in what the caller gave, and not in what is remembered.
#[test]
fn places_in_errors_are_those_of_what_was_given() -> Result<()> {
    let windowed = windowed(32, DType::F32, FeatureMapKind::Positive)?;
    let ([q, k, v], mut state) = (inputs(4, DType::F32)?, State::new());
    windowed.extend(Inputs::new(&q, &k, &v), &mut state)?;
    let one = |t: &Tensor| t.narrow(2, 0, 1);
    let (q, k, v) = (one(&q)?, one(&k)?, one(&v)?);
    let message = |inputs: Inputs<'_>| windowed.extend(inputs, &mut state.clone()).unwrap_err().to_string();
    let said = message(Inputs::new(&q, &(&k * f64::NAN)?, &v));
    assert!(said.starts_with(&format!("k holds NaN at [0, 0, 0, 0] of shape {:?}", k.dims())), "{said}");
    let gates = Tensor::ones((k.dim(0)?, k.dim(1)?, 1), DType::F32, &Device::Cpu)?;
    let said = message(Inputs::new(&q, &k, &v).with_gates(&gates));
    assert!(said.starts_with(&format!("gates hold 1 at [0, 0, 0] of shape {:?}", gates.dims())), "{said}");
    Ok(())
}

/// What an attention was made with is what it tells, and its far part's parameters are its own.
#[test]
fn windows_sinks_and_trained_parameters_are_told() -> Result<()> {
    let softmax = Softmax::new().with_window(9)?.with_sinks(4)?;
    assert_eq!((softmax.window(), softmax.sinks()), (Some(9), 4));
    assert_eq!((Softmax::new().window(), Softmax::new().sinks()), (None, 0));
    // No sinks need no window.
    assert_eq!(Softmax::new().with_sinks(0)?.sinks(), 0);
    for map in [FeatureMapKind::Positive, FeatureMapKind::Learned] {
        let windowed = windowed(9, DType::F32, map)?;
        let names: Vec<String> = windowed.buffers().into_iter().map(|(name, _)| name).collect();
        let trained = windowed.trained_buffers();
        assert_eq!(trained.is_empty(), map == FeatureMapKind::Positive, "{map}");
        assert!(trained.iter().all(|name| names.contains(name)), "{map}: {trained:?} of {names:?}");
    }
    Ok(())
}

#[test]
fn features_of_a_file_are_those_under_the_window() -> Result<()> {
    let of_seed = |seed| -> Result<Windowed> {
        let config = FavorConfig::default().with_features(12);
        Windowed::new(3, Favor::new(&config, D, seed, DType::F32, &Device::Cpu)?)
    };
    let (saved, mut loaded) = (of_seed(1)?, of_seed(2)?);
    loaded.load_buffers(&|name| saved.buffers().into_iter().find(|(n, _)| n == name).map(|(_, t)| t))?;
    let [q, k, v] = inputs(40, DType::F32)?;
    let out = |attention: &Windowed| values(&attention.forward(Inputs::new(&q, &k, &v), &Mask::causal())?);
    assert_eq!(out(&loaded)?, out(&saved)?);
    assert_eq!(loaded.identity()?, saved.identity()?);
    Ok(())
}

/// Features drawn anew under a window are those that its seed would have given from the start.
#[test]
fn features_are_drawn_anew() -> Result<()> {
    let of_seed = |seed| -> Result<Windowed> {
        let config = FavorConfig::default().with_features(12);
        Windowed::new(3, Favor::new(&config, D, seed, DType::F32, &Device::Cpu)?)
    };
    let [q, k, v] = inputs(40, DType::F32)?;
    let out = |attention: &Windowed| values(&attention.forward(Inputs::new(&q, &k, &v), &Mask::causal())?);
    let mut attention = of_seed(3)?;
    let mut state = State::new();
    attention.extend(Inputs::new(&q, &k, &v), &mut state)?;
    let before = out(&attention)?;
    attention.redraw(4)?;
    assert_ne!(out(&attention)?, before);
    assert_eq!(out(&attention)?, out(&of_seed(4)?)?);
    // A state of the features before is not one of these.
    assert!(attention.extend(Inputs::new(&q, &k, &v), &mut state).is_err());
    Ok(())
}

/// A window of softmax alone is its definition in the f64 reference, with its gradients, at lengths
/// within, at and beyond the kernels' tiles.
#[test]
fn a_window_of_softmax_is_the_reference() -> Result<()> {
    let windows = [(1, 1), (5, 1), (63, 7), (130, 64), (300, 128), (500, 129), (40, 100)];
    let windows = windows.map(|(t, window)| (t, window, 0)).into_iter().chain(SINKS);
    for (t, window, sinks) in windows.chain([(500, 129, 4), (1000, 3, 130), (700, 100, 300)]) {
        let mut problem = problem(t as u64, shape(t), None, 1).windowed(window, sinks);
        problem.key_mask = (t > 2).then(|| Random::new(9).mask(2 * t, 0.8));
        check(&problem, &[(DType::F64, 1e-12), (DType::F32, 1e-5), (DType::BF16, 3e-2)])?;
    }
    Ok(())
}

/// Decoding in any pieces is one pass, the state stops growing at the window, and what left it is
/// forgotten to the bit.
#[test]
fn a_window_of_softmax_decodes_with_a_constant_state() -> Result<()> {
    let softmax = Softmax::new().with_window(7)?;
    for dtype in [DType::F32, DType::F64] {
        let [q, k, v] = inputs(40, dtype)?;
        let whole = values(&softmax.forward(Inputs::new(&q, &k, &v), &Mask::causal())?)?;
        for pieces in [&[1; 40][..], &[40], &[3, 20, 1, 1, 15], &[6, 1, 1, 32]] {
            let (mut state, mut start, mut outs, mut bytes) = (State::new(), 0, Vec::new(), Vec::new());
            for &n in pieces {
                let part = |x: &Tensor| x.narrow(2, start, n);
                outs.push(softmax.extend(Inputs::new(&part(&q)?, &part(&k)?, &part(&v)?), &mut state)?);
                start += n;
                if start >= 7 {
                    bytes.push(state.bytes());
                }
            }
            let what = format!("{dtype:?} in {pieces:?}");
            assert_tensor_close(&what, &Tensor::cat(&outs, 2)?, &whole, 1e-5);
            assert!(bytes.iter().all(|&b| b == bytes[0]), "{what}: the state grows, {bytes:?}");
            let mut saved = State::from_record(&state.record()?)?;
            let part = |x: &Tensor| x.narrow(2, 0, 2);
            let next = |state: &mut State| softmax.extend(Inputs::new(&part(&q)?, &part(&k)?, &part(&v)?), state);
            assert_eq!(values(&next(&mut saved)?)?, values(&next(&mut state)?)?);
        }
        // Tokens before the window do not change a bit of what comes after.
        let other = k.slice_assign(&[0..2, 0..2, 0..20, 0..D], &(k.narrow(2, 0, 20)? * 3.0)?)?;
        let changed = softmax.forward(Inputs::new(&q, &other, &v), &Mask::causal())?.narrow(2, 26, 14)?;
        let same = softmax.forward(Inputs::new(&q, &k, &v), &Mask::causal())?.narrow(2, 26, 14)?;
        assert_eq!(values(&changed)?, values(&same)?);
    }
    // With sinks, so is what lies between them and the window; the sinks themselves count.
    for (window, sinks) in [(7, 3), (1, 3), (3, 1)] {
        let softmax = Softmax::new().with_window(window)?.with_sinks(sinks)?;
        let [q, k, v] = inputs(40, DType::F32)?;
        let whole = values(&softmax.forward(Inputs::new(&q, &k, &v), &Mask::causal())?)?;
        for pieces in [&[1; 40][..], &[40], &[2, 20, 1, 1, 16], &[6, 1, 1, 32]] {
            let (mut state, mut start, mut outs) = (State::new(), 0, Vec::new());
            for &n in pieces {
                let part = |x: &Tensor| x.narrow(2, start, n);
                outs.push(softmax.extend(Inputs::new(&part(&q)?, &part(&k)?, &part(&v)?), &mut state)?);
                start += n;
                let kept = (sinks + window - 1).min(start);
                assert_eq!(state.bytes(), 4 * 2 * 2 * kept * (D + 5), "after {start} tokens");
            }
            assert_tensor_close(&format!("W={window} in {pieces:?}"), &Tensor::cat(&outs, 2)?, &whole, 1e-5);
        }
        let last = |from: usize, to: usize| -> Result<Vec<f64>> {
            let other = k.slice_assign(&[0..2, 0..2, from..to, 0..D], &(k.narrow(2, from, to - from)? * 3.0)?)?;
            values(&softmax.forward(Inputs::new(&q, &other, &v), &Mask::causal())?.narrow(2, 26, 14)?)
        };
        assert_eq!(last(sinks, 20)?, last(sinks, sinks + 1)?);
        assert_ne!(last(0, sinks)?, last(sinks, sinks + 1)?);
    }
    let error = Softmax::new().with_sinks(2).expect_err("no window").to_string();
    assert!(error.contains("no window"), "{error}");
    let [q, k, v] = inputs(9, DType::F32)?;
    assert!(softmax.forward(Inputs::new(&q, &k, &v), &Mask::full()).is_err_and(|e| e.to_string().contains("causal")));
    assert!(Softmax::new().with_window(0).is_err());
    let mut state = State::new();
    softmax.extend(Inputs::new(&q, &k, &v), &mut state)?;
    let error = Softmax::new().extend(Inputs::new(&q, &k, &v), &mut state).expect_err("no window").to_string();
    assert!(error.contains("window 7 and not none"), "{error}");
    Ok(())
}

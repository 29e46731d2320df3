//! What cannot be computed is refused, by an error that says which argument is wrong, what it was
//! and what it must be.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use performer_core::features::{
    Elu, ExponentialForm, FeatureMap, Features, Fitted, HermiteTail, Hyperbolic, KeyForm, Phase, Positive,
    RandomParameters, Relu, Taylor2, Trigonometric, fit::Moments,
};
use performer_core::{
    Attention, Favor, FavorConfig, FeatureMapKind, Inputs, Mask, MultiHeadAttention, MultiHeadConfig, Rotary, Softmax,
    State, Windowed, ops,
};

const DEVICE: Device = Device::Cpu;

/// Fails unless `result` is an error whose first line has all of the `parts`.
#[track_caller]
fn assert_error<T>(result: Result<T>, parts: &[&str]) {
    let Err(error) = result else { panic!("no error, expected one with {parts:?}") };
    let message = error.to_string();
    let message = message.lines().next().unwrap_or_default();
    for part in parts {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
}

fn zeros(dims: &[usize]) -> Tensor {
    Tensor::zeros(dims, DType::F32, &DEVICE).unwrap()
}

fn favor(map: FeatureMapKind, head_dim: usize) -> Result<Favor> {
    Favor::new(&FavorConfig::default().with_map(map).with_features(8), head_dim, 1, DType::F32, &DEVICE)
}

/// Returns softmax and two kinds of FAVOR, for a head dimension of 4.
fn attentions() -> Vec<Box<dyn Attention>> {
    vec![
        Box::new(Softmax::new()),
        Box::new(favor(FeatureMapKind::Positive, 4).unwrap()),
        Box::new(favor(FeatureMapKind::Taylor2, 4).unwrap()),
    ]
}

/// Fails unless both entry points refuse: one pass, and an extension of a state.
#[track_caller]
fn assert_refused(q: &Tensor, k: &Tensor, v: &Tensor, parts: &[&str]) {
    for attention in attentions() {
        for mask in [Mask::full(), Mask::causal()] {
            assert_error(attention.forward(Inputs::new(q, k, v), &mask), parts);
        }
        let mut state = State::new();
        assert_error(attention.extend(Inputs::new(q, k, v), &mut state), parts);
        assert_eq!((state.tokens(), state.bytes()), (0, 0));
    }
}

#[test]
fn shapes_that_do_not_fit() {
    let (q, k, v) = (&zeros(&[2, 4, 7, 4]), &zeros(&[2, 2, 7, 4]), &zeros(&[2, 2, 7, 3]));
    for attention in attentions() {
        assert!(attention.forward(Inputs::new(q, k, v), &Mask::causal()).is_ok());
    }
    assert_refused(&zeros(&[4, 7, 4]), k, v, &["q has shape [4, 7, 4]", "(batch, heads, tokens, head dim)"]);
    assert_refused(q, &zeros(&[7, 4]), v, &["k has shape [7, 4]", "(batch, heads, tokens, head dim)"]);
    assert_refused(q, k, &zeros(&[1, 2, 2, 7, 3]), &["v has shape [1, 2, 2, 7, 3]", "(batch, heads, tokens, "]);
    assert_refused(q, &zeros(&[3, 2, 7, 4]), v, &["k has shape [3, 2, 7, 4]", "batch", "[2, 4, 7, 4]"]);
    assert_refused(q, &zeros(&[2, 2, 7, 5]), v, &["k has shape [2, 2, 7, 5]", "head dim", "[2, 4, 7, 4]"]);
    assert_refused(q, k, &zeros(&[2, 2, 6, 3]), &["v has shape [2, 2, 6, 3]", "(2, 2, 7, value dim)"]);
    assert_refused(q, k, &zeros(&[2, 4, 7, 3]), &["v has shape [2, 4, 7, 3]", "(2, 2, 7, value dim)"]);
    assert_refused(q, k, &zeros(&[1, 2, 7, 3]), &["v has shape [1, 2, 7, 3]", "(2, 2, 7, value dim)"]);
    assert_refused(&zeros(&[2, 3, 7, 4]), k, v, &["k has 2 heads", "[2, 2, 7, 4]", "3 heads of q"]);
    assert_refused(q, &zeros(&[2, 0, 7, 4]), &zeros(&[2, 0, 7, 3]), &["k has 0 heads", "4 heads of q"]);
    assert_refused(&zeros(&[2, 0, 7, 4]), k, v, &["q has shape [2, 0, 7, 4]", "at least 1"]);
    assert_refused(&zeros(&[2, 4, 7, 0]), &zeros(&[2, 2, 7, 0]), v, &["head dim", "[2, 4, 7, 0]", "at least 1"]);
    assert_refused(q, k, &zeros(&[2, 2, 7, 0]), &["v has shape [2, 2, 7, 0]", "value dim", "at least 1"]);
}

#[test]
fn a_head_dim_that_is_not_the_maps() {
    let x = zeros(&[1, 1, 3, 6]);
    for map in [FeatureMapKind::Positive, FeatureMapKind::Elu, FeatureMapKind::Taylor2] {
        let favor = favor(map, 4).unwrap();
        let parts = ["q has shape [1, 1, 3, 6]", "head dim must be 4"];
        assert_error(favor.forward(Inputs::new(&x, &x, &x), &Mask::full()), &parts);
        assert_error(favor.extend(Inputs::new(&x, &x, &x), &mut State::new()), &parts);
    }
}

#[test]
fn causal_attention_of_unequal_lengths() {
    for attention in attentions() {
        let result = attention
            .forward(Inputs::new(&zeros(&[1, 1, 3, 4]), &zeros(&[1, 1, 5, 4]), &zeros(&[1, 1, 5, 4])), &Mask::causal());
        assert_error(result, &["3 queries", "5 keys"]);
    }
}

#[test]
fn dtypes_that_do_not_fit() {
    let x = &zeros(&[1, 1, 3, 4]);
    let of = |dtype| &*Box::leak(Box::new(x.to_dtype(dtype).unwrap()));
    assert_refused(x, of(DType::F64), x, &["k has dtype F64", "F32"]);
    assert_refused(x, x, of(DType::BF16), &["v has dtype BF16", "F32"]);
    assert_refused(of(DType::F16), x, x, &["k has dtype F32", "F16"]);
    let integers = of(DType::U32);
    assert_refused(integers, integers, integers, &["q has dtype U32", "f32, f64, f16 or bf16"]);
}

#[test]
fn key_masks_of_another_shape() {
    let (q, k) = (&zeros(&[2, 1, 3, 4]), &zeros(&[2, 1, 5, 4]));
    for (dims, had) in [(&[6][..], [1, 6]), (&[2, 3], [2, 3]), (&[3, 5], [3, 5]), (&[2, 1, 4], [2, 4])] {
        let mask = Mask::full().with_keys(&zeros(dims).to_dtype(DType::U8).unwrap()).unwrap();
        for attention in attentions() {
            let had = format!("key mask has shape {had:?}");
            assert_error(attention.forward(Inputs::new(q, k, k), &mask), &[&had, "(2, 5)"]);
        }
    }
}

/// One bad value makes a whole sum NaN, so the error must name it where it enters.
#[test]
fn values_that_are_not_finite() {
    let good = zeros(&[1, 2, 3, 4]);
    for (value, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
        let mut values = vec![0f32; 24];
        values[12 + 2 * 4 + 1] = value;
        let bad = Tensor::from_vec(values, (1, 2, 3, 4), &DEVICE).unwrap();
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let (good, bad) = (&good.to_dtype(dtype).unwrap(), &bad.to_dtype(dtype).unwrap());
            let parts = |name| format!("{name} holds {shown} at [0, 1, 2, 1] of shape [1, 2, 3, 4]");
            assert_refused(bad, good, good, &[&parts("q"), "finite"]);
            assert_refused(good, bad, good, &[&parts("k"), "finite"]);
            assert_refused(good, good, bad, &[&parts("v"), "finite"]);
            // Two wrongs are no right.
            assert_refused(good, bad, bad, &[&parts("k"), "finite"]);
            assert_refused(bad, bad, bad, &[&parts("q"), "finite"]);
        }
        // The tensor is seen through a transposition; the error names the place in the view.
        let (good, bad) = (good.transpose(1, 2).unwrap(), bad.transpose(1, 2).unwrap());
        assert_refused(&bad, &good, &good, &[&format!("q holds {shown} at [0, 2, 1, 1]")]);
        // No row is contiguous.
        let mut values = vec![0f32; 32];
        values[16 + 2 * 4 + 1] = value;
        let bad = Tensor::from_vec(values, (1, 2, 4, 4), &DEVICE).unwrap().transpose(2, 3).unwrap();
        let good = zeros(&[1, 2, 4, 4]);
        assert_refused(&good, &bad, &good, &[&format!("k holds {shown} at [0, 1, 1, 2]")]);
    }
}

/// Where there is a single head, no other one makes the kernels look for its bad value.
#[test]
fn values_of_a_single_head_that_are_not_finite() {
    let good = zeros(&[1, 1, 3, 4]);
    let mut values = vec![0f32; 12];
    values[5] = f32::NAN;
    let bad = Tensor::from_vec(values, (1, 1, 3, 4), &DEVICE).unwrap();
    assert_refused(&bad, &good, &good, &["q holds NaN at [0, 0, 1, 1]", "finite"]);
    assert_refused(&good, &bad, &good, &["k holds NaN at [0, 0, 1, 1]", "finite"]);
    assert_refused(&good, &good, &bad, &["v holds NaN at [0, 0, 1, 1]", "finite"]);
}

#[test]
fn feature_maps_that_cannot_be() {
    let with = |features, head_dim| {
        let config = FavorConfig::default().with_features(features);
        Favor::new(&config, head_dim, 1, DType::F32, &DEVICE)
    };
    assert_error(with(0, 4), &["features", "is 0", "at least 1"]);
    assert_error(with(8, 0), &["head_dim is 0", "at least 1"]);
    for n in [0, 1, 3] {
        assert_error(favor(FeatureMapKind::Limit(n), 4), &[&format!("limit-{n}"), "even"]);
    }
    assert_error(favor(FeatureMapKind::Elu, 0), &["head_dim is 0"]);
    assert_error(Taylor2::new(0, &DEVICE), &["taylor2", "head dimension is 0", "at least 1"]);
    assert_error(favor(FeatureMapKind::Limit(8), 64), &["degree 8", "65 variables", "16384"]);
    // With room for that many factors, this would be the end of the memory.
    assert_error(favor(FeatureMapKind::Limit(u32::MAX - 1), 4), &["limit-4294967294", "at most 1024"]);
    for chunk in [0, 3, 48, 1 << 13, 1 << 40] {
        assert_error(
            favor(FeatureMapKind::Positive, 4).and_then(|f| f.with_chunk(chunk)),
            &[&format!("chunk is {chunk}"), "power of two"],
        );
    }
}

/// A map with parameters for three key heads fits no other number of them, and a batch whose rows
/// could be divided by three is no reason to divide them.
#[test]
fn maps_of_other_heads() -> Result<()> {
    for map in [FeatureMapKind::Learned, FeatureMapKind::Hedgehog] {
        let mut favor = favor(map, 4)?;
        let own = favor.buffers();
        let three = |name: &str| own.iter().find(|(own, _)| own == name).map(|(_, x)| Tensor::cat(&[x; 3], 0).unwrap());
        favor.load_buffers(&three)?;
        for dtype in [DType::F32, DType::F64] {
            let [two, three] = [2, 3].map(|heads| zeros(&[3, heads, 5, 4]).to_dtype(dtype).unwrap());
            assert!(favor.forward(Inputs::new(&three, &three, &three), &Mask::causal()).is_ok(), "{map} {dtype:?}");
            for result in [
                favor.forward(Inputs::new(&two, &two, &two), &Mask::causal()),
                favor.extend(Inputs::new(&two, &two, &two), &mut State::new()),
            ] {
                assert_error(result, &["k has shape [3, 2, 5, 4]", "fitted to 3 key heads"]);
            }
        }
    }
    Ok(())
}

#[test]
fn moments_of_nothing() -> Result<()> {
    assert_error(Moments::new(0, 4), &["0 key heads of dimension 4", "at least 1"]);
    assert_error(Moments::new(2, 0), &["2 key heads of dimension 0", "at least 1"]);
    let mut moments = Moments::new(1, 4)?;
    assert_error(moments.logit_deviation(), &["no queries and keys"]);
    let (good, bad) = (zeros(&[1, 1, 2, 4]), Tensor::full(f32::NAN, (1, 1, 2, 4), &DEVICE)?);
    assert_error(moments.add(&bad, &good), &["queries contain NaN"]);
    assert_error(moments.add(&good, &bad), &["keys contain NaN"]);
    // What was refused has left nothing.
    assert_error(moments.logit_deviation(), &["no queries and keys"]);
    moments.add(&good, &good)?;
    assert_eq!(moments.logit_deviation()?, [0.0]);
    Ok(())
}

#[test]
fn fitted_maps_whose_parameters_do_not_fit() {
    let made =
        |queries: &[usize], keys: &[usize], weights: &[usize]| Fitted::new(zeros(queries), zeros(keys), zeros(weights));
    assert!(made(&[2, 8, 4], &[2, 8, 4], &[2, 8]).is_ok());
    assert_error(made(&[8, 4], &[2, 8, 4], &[2, 8]), &["queries", "[8, 4]", "(heads, M, D)"]);
    assert_error(made(&[2, 8, 4], &[2, 7, 4], &[2, 8]), &["keys", "[2, 7, 4]", "[2, 8, 4]"]);
    assert_error(made(&[2, 8, 4], &[2, 8, 4], &[1, 8]), &["log_weights", "[1, 8]", "[2, 8]"]);
    assert_error(made(&[0, 8, 4], &[0, 8, 4], &[0, 8]), &["queries", "no dimension may be 0"]);
    let metrics = |queries: &[usize], keys: &[usize]| {
        made(&[2, 8, 4], &[2, 8, 4], &[2, 8])?.with_metrics(zeros(queries), zeros(keys))
    };
    assert!(metrics(&[2, 4, 4], &[2, 4, 4]).is_ok());
    assert_error(metrics(&[2, 4, 4], &[2, 4]), &["key_metric", "[2, 4]", "[2, 4, 4]"]);
}

/// What attention refuses, it says no path for.
#[test]
fn a_window_needs_a_causal_mask() -> Result<()> {
    let x = zeros(&[1, 2, 5, 4]);
    let favor = Favor::new(&FavorConfig::default(), 4, 1, DType::F32, &DEVICE)?;
    let (near, both) = (Softmax::new().with_window(3)?, Windowed::new(3, favor)?);
    for attention in [&near as &dyn Attention, &both] {
        assert_error(attention.forward(Inputs::new(&x, &x, &x), &Mask::full()), &["is causal; give it Mask::causal()"]);
        assert_error(attention.path(Inputs::new(&x, &x, &x), &Mask::full()), &["is causal; give it Mask::causal()"]);
        assert!(attention.path(Inputs::new(&x, &x, &x), &Mask::causal())?.is_fused());
    }
    Ok(())
}

/// A map of one's own must take and make something.
#[test]
fn feature_maps_of_no_numbers() {
    #[derive(Clone, Debug)]
    struct Sized(usize, usize);
    impl FeatureMap for Sized {
        fn name(&self) -> &'static str {
            "sized"
        }
        fn input_dim(&self) -> usize {
            self.0
        }
        fn feature_dim(&self) -> usize {
            self.1
        }
        fn features(&self, x: &Tensor) -> Result<Features> {
            Ok(Features::Linear { values: x.clone(), log_scale: None })
        }
    }
    for (dim, features) in [(0, 4), (4, 0), (0, 0)] {
        let made = Favor::with_map(Box::new(Sized(dim, features)));
        assert_error(made, &[&format!("rows of {dim} and makes {features} features"), "at least 1"]);
    }
    assert!(Favor::with_map(Box::new(Sized(4, 4))).is_ok());
}

/// A map of one's own must make as many features as it says, by itself and in its form for kernels.
#[test]
fn feature_maps_of_other_widths() -> Result<()> {
    /// Says that it makes so many features of rows of 4.
    #[derive(Clone, Debug)]
    struct Claims {
        features: usize,
        made: usize,
        form: Option<ExponentialForm>,
        rectified: Option<Tensor>,
        quadratic: Option<f64>,
    }
    impl FeatureMap for Claims {
        fn input_dim(&self) -> usize {
            4
        }
        fn feature_dim(&self) -> usize {
            self.features
        }
        fn features(&self, x: &Tensor) -> Result<Features> {
            let parts = vec![x.narrow(candle_core::D::Minus1, 0, 1)?; self.made];
            Ok(Features::Log(Tensor::cat(&parts, candle_core::D::Minus1)?))
        }
        fn exponential_form(&self) -> Option<ExponentialForm> {
            self.form.clone()
        }
        fn rectified_form(&self) -> Option<(Tensor, f64)> {
            self.rectified.clone().map(|projection| (projection, 1e-3))
        }
        fn quadratic_form(&self) -> Option<f64> {
            self.quadratic
        }
    }
    let claims = |made| Claims { features: 8, made, form: None, rectified: None, quadratic: None };
    let x = zeros(&[1, 2, 5, 4]);
    for made in [7, 9] {
        for favor in [Favor::with_map(Box::new(claims(made)))?, Favor::with_map(Box::new(claims(made)))?.composed()] {
            for mask in [Mask::full(), Mask::causal()] {
                let out = favor.forward(Inputs::new(&x, &x, &x), &mask);
                assert_error(out, &["feature map Claims", &format!("{made}]"), "and 8"]);
            }
        }
    }
    assert!(Favor::with_map(Box::new(claims(8)))?.forward(Inputs::new(&x, &x, &x), &Mask::causal()).is_ok());
    let form = |projection: &[usize], hyperbolic, keys: Option<[&[usize]; 3]>| {
        let keys = keys.map(|[projection, weights, metric]| KeyForm {
            projection: zeros(projection),
            log_weights: zeros(weights),
            metric: Some(zeros(metric)),
        });
        Claims { form: Some(ExponentialForm { projection: zeros(projection), hyperbolic, keys }), ..claims(8) }
    };
    let keys = |rows: usize, weights: usize, metric: usize| Some([[1, rows, 4], [1, weights, 0], [1, metric, 4]]);
    let of_keys = |dims: Option<[[usize; 3]; 3]>| {
        let [rows, weights, metric] = dims.expect("dims");
        form(&[1, 8, 4], false, Some([&rows, &weights[..2], &metric]))
    };
    assert!(Favor::with_map(Box::new(of_keys(keys(8, 8, 4)))).is_ok());
    for (map, name) in [
        (form(&[1, 7, 4], false, None), "projection"),
        (form(&[1, 8, 3], false, None), "projection"),
        (form(&[2, 8, 4], false, None), "projection"),
        (form(&[1, 8, 4], true, None), "projection"),
        (Claims { features: 7, ..form(&[1, 4, 4], true, None) }, "an even number"),
        (of_keys(keys(7, 8, 4)), "projection of keys"),
        (of_keys(keys(8, 7, 4)), "weights of keys"),
        (of_keys(keys(8, 8, 3)), "metric of keys"),
        (Claims { rectified: Some(zeros(&[7, 4])), ..claims(8) }, "projection"),
        (Claims { quadratic: Some(0.5), ..claims(8) }, "quadratic form, which makes 15 features"),
    ] {
        assert_error(Favor::with_map(Box::new(map)), &["feature map Claims", name]);
    }
    Ok(())
}

/// A map of one's own must return the features of queries and keys in one form, wherever they are
/// computed.
#[test]
fn feature_maps_of_two_forms() -> Result<()> {
    #[derive(Clone, Debug)]
    struct Both;
    impl FeatureMap for Both {
        fn name(&self) -> &'static str {
            "both"
        }
        fn input_dim(&self) -> usize {
            4
        }
        fn feature_dim(&self) -> usize {
            4
        }
        fn features(&self, x: &Tensor) -> Result<Features> {
            Ok(Features::Log(x.clone()))
        }
        fn key_features(&self, y: &Tensor) -> Result<Features> {
            Ok(Features::Linear { values: y.clone(), log_scale: None })
        }
    }
    let x = zeros(&[1, 2, 5, 4]);
    for favor in [Favor::with_map(Box::new(Both))?, Favor::with_map(Box::new(Both))?.composed()] {
        for mask in [Mask::full(), Mask::causal()] {
            assert_error(favor.forward(Inputs::new(&x, &x, &x), &mask), &["feature map both", "two kinds of features"]);
        }
    }
    Ok(())
}

#[test]
fn feature_maps_by_names_that_are_none() {
    let error = |name: &str| name.parse::<FeatureMapKind>().unwrap_err();
    assert!(
        error("favor").contains("'favor'") && error("favor").contains("positive, hyperbolic"),
        "{}",
        error("favor")
    );
    for name in ["limit-3", "limit-0", "limit-", "limit-x"] {
        assert!(error(name).contains(name) && error(name).contains("even number"), "{}", error(name));
    }
    for map in FeatureMapKind::NAMED.into_iter().chain([FeatureMapKind::Limit(4)]) {
        assert_eq!(map.to_string().parse(), Ok(map));
    }
}

#[test]
fn random_parameters_that_do_not_fit() {
    let build = |map: FeatureMapKind, projection: &[usize], offsets: Option<&[usize]>| {
        let random = RandomParameters { projection: zeros(projection), offsets: offsets.map(zeros) };
        map.build(4, Some(&random), &DEVICE)
    };
    for map in FeatureMapKind::NAMED.into_iter().filter(|map| map.is_random()) {
        let name = map.to_string();
        assert_error(map.build(4, None, &DEVICE), &[&name, "(M, 4)", "none was given"]);
        for dims in [&[8, 5][..], &[0, 4], &[8], &[1, 8, 4]] {
            assert_error(build(map, dims, Some(&[8])), &[&name, &format!("{dims:?}"), "(M, 4)"]);
        }
        if map.has_offsets() {
            assert_error(build(map, &[8, 4], None), &[&name, "offsets (8)", "none were given"]);
            assert_error(build(map, &[8, 4], Some(&[7])), &[&name, "offsets have shape [7]", "(8)"]);
        }
    }
}

/// A number of features by which memory would end is refused before it is drawn.
#[test]
fn features_beyond_all_memory() {
    let config = FavorConfig::default().with_features(1 << 40);
    let made = Favor::new(&config, 4, 1, DType::F32, &DEVICE);
    assert_error(made, &["features (M) is 1099511627776", "at most 1048576"]);
}

/// In heads of one number a high power has few features, and coefficients that f32 does not hold.
#[test]
fn polynomials_that_f32_does_not_hold() {
    let limit = |power, head_dim| {
        let config = FavorConfig::default().with_map(FeatureMapKind::Limit(power));
        Favor::new(&config, head_dim, 1, DType::F32, &DEVICE)
    };
    assert_error(limit(1024, 1), &["limit-1024", "which f32 does not hold", "lower n"]);
    assert!(limit(128, 1).is_ok());
}

#[test]
fn rows_without_heads() {
    let fitted = performer_core::features::Hedgehog::new(&zeros(&[4, 4])).unwrap();
    assert_error(fitted.features(&zeros(&[])), &["1 key heads", "not []"]);
}

/// The control without attention refuses what every attention refuses.
#[test]
fn no_attention_of_what_is_not_finite() {
    let none = performer_core::AttentionConfig::None.build(4, 1, DType::F32, &DEVICE).unwrap();
    let (x, infinite) = (zeros(&[1, 2, 3, 4]), Tensor::full(f32::INFINITY, &[1, 2, 3, 4][..], &DEVICE).unwrap());
    assert_error(none.forward(Inputs::new(&x, &infinite, &x), &Mask::causal()), &["k holds"]);
    assert_error(none.extend(Inputs::new(&x, &x, &infinite), &mut State::new()), &["v holds"]);
}

/// The lowest gate is taken in f32 too, which rounds it to one that is lower.
#[test]
fn the_lowest_gate_is_taken() -> Result<()> {
    let x = zeros(&[1, 1, 3, 4]);
    for attention in attentions() {
        let gates = Tensor::full(-1e30f32, (1, 1, 3), &DEVICE)?;
        let inputs = Inputs::new(&x, &x, &x);
        attention.forward(inputs.with_gates(&gates), &Mask::causal())?;
        let lower = (&gates * 1.1)?;
        assert_error(attention.forward(inputs.with_gates(&lower), &Mask::causal()), &["gates hold", "-1e30"]);
    }
    Ok(())
}

/// Feature maps that are built by hand, without a kind, refuse a projection that does not fit.
#[test]
fn projections_that_do_not_fit() {
    for dims in [&[8][..], &[1, 8, 4], &[0, 4], &[8, 0]] {
        let parts = [&*format!("projection has shape {dims:?}"), "(M, D)"];
        assert_error(Positive::new(zeros(dims)), &parts);
        assert_error(Hyperbolic::new(zeros(dims)), &parts);
        assert_error(Trigonometric::new(zeros(dims)), &parts);
        assert_error(Phase::new(zeros(dims), zeros(&[8]), true), &parts);
        assert_error(Relu::new(zeros(dims)), &parts);
        assert_error(HermiteTail::new(zeros(dims)), &parts);
    }
    assert_error(Phase::new(zeros(&[8, 4]), zeros(&[4]), true), &["offsets have shape [4]", "(8)"]);
    assert_error(Favor::with_map(Box::new(Elu::new(0))), &["rows of 0", "at least 1"]);
}

#[test]
fn buffers_that_are_missing_or_misshapen() {
    let mut phase = favor(FeatureMapKind::Phase, 4).unwrap();
    let before = format!("{:?}", phase.buffers());
    assert_error(phase.load_buffers(&|_| None), &["buffer projection", "[8, 4]", "missing"]);
    assert_error(phase.load_buffers(&|_| Some(zeros(&[8, 5]))), &["buffer projection", "[8, 5]", "[8, 4]"]);
    let only_projection = |name: &str| (name == "projection").then(|| zeros(&[8, 4]));
    assert_error(phase.load_buffers(&only_projection), &["buffer offsets", "[8]", "missing"]);
    let short = |name: &str| Some(if name == "projection" { zeros(&[8, 4]) } else { zeros(&[9]) });
    assert_error(phase.load_buffers(&short), &["buffer offsets", "[9]", "[8]"]);
    assert_eq!(format!("{:?}", phase.buffers()), before, "a refused buffer must not be taken over");
}

fn layer(config: &MultiHeadConfig, rotary: Option<Rotary>) -> Result<MultiHeadAttention> {
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &DEVICE);
    MultiHeadAttention::new(config, Box::new(Softmax::new()), rotary, vb)
}

#[test]
fn layers_that_cannot_be() {
    let good = MultiHeadConfig::new(12, 3);
    assert!(layer(&good, None).is_ok());
    let cases = [
        (MultiHeadConfig::new(12, 0), "heads 0"),
        (MultiHeadConfig::new(0, 3), "hidden 0"),
        // 12 is no multiple of 5.
        (MultiHeadConfig::new(12, 5), "hidden 12, heads 5"),
        (good.clone().with_kv_heads(2), "heads 3, kv_heads 2"),
        (good.clone().with_kv_heads(0), "kv_heads 0"),
        (good.clone().with_head_dim(0), "head_dim 0"),
    ];
    for (config, part) in cases {
        assert_error(layer(&config, None), &["multi-head attention", part]);
    }
}

#[test]
fn layer_inputs_that_do_not_fit() {
    let layer = layer(&MultiHeadConfig::new(12, 3), None).unwrap();
    let x = &zeros(&[2, 5, 12]);
    for dims in [&[2, 5, 11][..], &[5, 12], &[1, 2, 5, 12]] {
        let (bad, had) = (&zeros(dims), format!("{dims:?}"));
        assert_error(layer.forward(bad, &Mask::full()), &["x has shape", &had, "(batch, tokens, 12)"]);
        assert_error(layer.cross(x, bad, &Mask::full()), &["context has shape", &had, "(batch, tokens, 12)"]);
        assert_error(layer.extend(bad, &mut State::new()), &["x has shape", &had, "(batch, tokens, 12)"]);
    }
}

#[test]
fn rotary_positions_that_do_not_fit() {
    for head_dim in [0, 1, 7] {
        assert_error(Rotary::new(head_dim, 16, 1e4, &DEVICE), &["rotary", "even head dim", &format!("{head_dim}")]);
    }
    for base in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert_error(Rotary::new(4, 16, base, &DEVICE), &["rotary", &format!("base is {base}")]);
    }
    let rotary = Rotary::new(4, 16, 1e4, &DEVICE).unwrap();
    assert!(rotary.apply(&zeros(&[1, 2, 16, 4]), 0).is_ok());
    assert_error(rotary.apply(&zeros(&[1, 2, 17, 4]), 0), &["positions 0..17", "16"]);
    assert_error(rotary.apply(&zeros(&[1, 2, 1, 4]), 16), &["positions 16..17", "16"]);
    assert_error(rotary.apply(&zeros(&[1, 2, 1, 4]), usize::MAX), &["positions", "16"]);
    assert_error(rotary.apply(&zeros(&[1, 2, 3, 6]), 0), &["x has shape [1, 2, 3, 6]", "4"]);
    assert_error(rotary.apply(&zeros(&[2, 3, 4]), 0), &["x has shape [2, 3, 4]", "(batch, heads, tokens, 4)"]);
    // Sines and cosines are of the same positions.
    let (x, cos, sin) = (zeros(&[1, 2, 3, 4]), zeros(&[3, 2]), zeros(&[2, 2]));
    for rotate in [ops::rotary, ops::rotary_interleaved] {
        assert!(rotate(&x, &cos, &cos).is_ok());
        assert_error(rotate(&x, &cos, &sin), &["rotary", "[1, 2, 3, 4]"]);
        assert_error(rotate(&x, &sin, &sin), &["rotary", "[1, 2, 3, 4]"]);
    }
    // The layer refuses a table of another head dimension, and positions beyond its end while
    // decoding.
    let layer = layer(&MultiHeadConfig::new(12, 3), Some(rotary)).unwrap();
    let mut state = State::new();
    assert!(layer.extend(&zeros(&[1, 16, 12]), &mut state).is_ok());
    assert_error(layer.extend(&zeros(&[1, 1, 12]), &mut state), &["positions 16..17", "16"]);
    assert_eq!(state.tokens(), 16);
}

/// Sums of positions and windows must be numbers.
#[test]
fn windows_and_sinks_that_no_text_has() {
    let far = || favor(FeatureMapKind::Positive, 4).unwrap();
    let most = usize::MAX >> 8;
    let x = zeros(&[1, 2, 7, 4]);
    for (window, sinks) in [(most, 0), (most, most), (3, most), (1, 1)] {
        let softmax = Softmax::new().with_window(window).unwrap().with_sinks(sinks).unwrap();
        let windowed = Windowed::new(window, far()).unwrap().with_sinks(sinks).unwrap();
        assert_error(windowed.path(Inputs::new(&x, &x, &x), &Mask::full()), &["is causal", "Mask::causal()"]);
        for attention in [&softmax as &dyn Attention, &windowed] {
            assert!(attention.forward(Inputs::new(&x, &x, &x), &Mask::causal()).is_ok());
            let mut state = State::new();
            for _ in 0..2 {
                assert!(attention.extend(Inputs::new(&x, &x, &x), &mut state).is_ok());
            }
        }
    }
    for wrong in [most + 1, usize::MAX] {
        let (is, must) = (wrong.to_string(), format!("at most {most}"));
        let (window, sinks) = (["window", is.as_str(), must.as_str()], ["sinks", is.as_str(), must.as_str()]);
        assert_error(Softmax::new().with_window(wrong), &window);
        assert_error(Windowed::new(wrong, far()), &window);
        assert_error(Softmax::new().with_window(3).unwrap().with_sinks(wrong), &sinks);
        assert_error(Windowed::new(3, far()).unwrap().with_sinks(wrong), &sinks);
    }
}

use super::*;

/// `Scalar` is plain AdamW in `f64`, one number at a time, with which the tests compare.
struct Scalar {
    p: f64,
    m: f64,
    v: f64,
}

impl Scalar {
    fn step(&mut self, g: f64, t: i32, lr: f64, decay: f64, config: &AdamWConfig) {
        let (beta1, beta2) = config.betas;
        self.m = beta1 * self.m + (1.0 - beta1) * g;
        self.v = beta2 * self.v + (1.0 - beta2) * g * g;
        let m_hat = self.m / (1.0 - beta1.powi(t));
        let v_hat = self.v / (1.0 - beta2.powi(t));
        self.p -= lr * (m_hat / (v_hat.sqrt() + config.eps) + decay * self.p);
    }
}

const SHAPES: [(&str, &[usize]); 5] = [
    ("w.weight", &[3, 5]),
    ("embed.weight", &[4, 2]),
    ("final_norm.weight", &[7]),
    ("w.map.bias", &[2, 2]),
    ("x.k_conv1d.weight", &[3, 4]),
];

fn params(dtype: DType) -> Result<Vec<(String, Var)>> {
    SHAPES
        .iter()
        .enumerate()
        .map(|(k, (name, shape))| {
            let n: usize = shape.iter().product();
            let values: Vec<f64> = (0..n).map(|i| ((i * 7 + k * 3) as f64).sin()).collect();
            let tensor = Tensor::from_vec(values, *shape, &Device::Cpu)?.to_dtype(dtype)?;
            Ok(((*name).to_owned(), Var::from_tensor(&tensor)?))
        })
        .collect()
}

/// Returns the gradient of `½ Σ c (p − 1)²` with a curvature `c` that differs from parameter to
/// parameter.
fn gradients(params: &[(String, Var)]) -> Result<Gradients> {
    let mut loss = Tensor::zeros((), params[0].1.dtype(), &Device::Cpu)?;
    for (k, (_, var)) in params.iter().enumerate() {
        loss = (loss + ((var.as_tensor() - 1.0)?.sqr()?.sum_all()? * (0.5 * curvature(k)))?)?;
    }
    Gradients::from_store(&loss.backward()?, params)
}

fn curvature(index: usize) -> f64 {
    0.3 + index as f64
}

fn rate(step: usize) -> f64 {
    0.05 / (1 + step) as f64
}

fn values(params: &[(String, Var)]) -> Result<Vec<Vec<f64>>> {
    params.iter().map(|(_, var)| Ok(var.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)).collect()
}

fn largest_difference(a: &[Vec<f64>], b: &[Vec<f64>]) -> f64 {
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    pairs.map(|(x, y)| (x - y).abs()).fold(0.0, f64::max)
}

fn run(optimizer: &mut AdamW, steps: std::ops::Range<usize>, clip: Option<f64>) -> Result<()> {
    for step in steps {
        let grads = gradients(optimizer.parameters())?;
        optimizer.step(&grads, rate(step), clip)?;
    }
    Ok(())
}

#[test]
fn matches_scalar_adamw_with_decay_only_on_matrices() -> Result<()> {
    let config = AdamWConfig::default();
    for (dtype, fuse) in [(DType::F32, true), (DType::F32, false), (DType::F64, true)] {
        let mut optimizer = AdamW::with_fused_update(params(dtype)?, config, fuse)?;
        let start = values(optimizer.parameters())?;
        let mut expected: Vec<Vec<Scalar>> =
            start.iter().map(|v| v.iter().map(|&p| Scalar { p, m: 0.0, v: 0.0 }).collect()).collect();
        run(&mut optimizer, 0..20, None)?;
        for step in 0..20 {
            for (k, (name, _)) in optimizer.parameters().iter().enumerate() {
                let decay =
                    if ["w.weight", "embed.weight"].contains(&name.as_str()) { config.weight_decay } else { 0.0 };
                for scalar in &mut expected[k] {
                    let g = curvature(k) * (scalar.p - 1.0);
                    scalar.step(g, step as i32 + 1, rate(step), decay, &config);
                }
            }
        }
        let expected: Vec<Vec<f64>> = expected.iter().map(|v| v.iter().map(|s| s.p).collect()).collect();
        let actual = values(optimizer.parameters())?;
        assert!(largest_difference(&actual, &start) > 0.05);
        let error = largest_difference(&actual, &expected);
        let tolerance = if dtype == DType::F64 { 1e-12 } else { 1e-6 };
        assert!(error < tolerance, "{dtype:?}, fused {fuse}: {error}");
    }
    Ok(())
}

#[test]
fn fused_and_composed_updates_agree() -> Result<()> {
    let config = AdamWConfig::default();
    let mut fused = AdamW::with_fused_update(params(DType::F32)?, config, true)?;
    let mut composed = AdamW::with_fused_update(params(DType::F32)?, config, false)?;
    assert!(matches!(fused.moments[0], Moments::Host { .. }));
    assert!(matches!(composed.moments[0], Moments::Tensors { .. }));
    run(&mut fused, 0..20, Some(0.5))?;
    run(&mut composed, 0..20, Some(0.5))?;
    let (a, b) = (values(fused.parameters())?, values(composed.parameters())?);
    assert!(largest_difference(&a, &b) < 1e-6);
    Ok(())
}

#[test]
fn half_precision_parameters_keep_small_gradients() -> Result<()> {
    // The square of this gradient is zero in f16: with half-precision moments the step would be
    // lr·g/ε, not lr.
    let var = Var::from_tensor(&Tensor::ones(3, DType::F16, &Device::Cpu)?)?;
    let mut optimizer = AdamW::new(vec![("p".to_owned(), var)], AdamWConfig::default())?;
    let g = Tensor::full(2f32.powi(-14), 3, &Device::Cpu)?.to_dtype(DType::F16)?;
    let grads = Gradients { tensors: vec![Some(g)] };
    optimizer.step(&grads, 0.25, None)?;
    let p = values(optimizer.parameters())?;
    assert!((p[0][0] - 0.75).abs() < 1e-3, "{p:?}");
    Ok(())
}

#[test]
fn clipping_scales_to_the_global_norm_and_reports_the_norm_before() -> Result<()> {
    // A first step of AdamW does not depend on the gradient's size, so the test compares the first
    // moment.
    let clip = 0.25;
    let mut free = AdamW::new(params(DType::F32)?, AdamWConfig::default())?;
    let mut clipped = AdamW::new(params(DType::F32)?, AdamWConfig::default())?;
    let mut loose = AdamW::new(params(DType::F32)?, AdamWConfig::default())?;
    let grads = gradients(free.parameters())?;
    let norm = grads.norm()?;
    assert!(norm > 1.0);
    assert_eq!(free.step(&grads, 0.1, None)?, norm);
    assert_eq!(clipped.step(&grads, 0.1, Some(clip))?, norm);
    assert_eq!(loose.step(&grads, 0.1, Some(norm * 2.0))?, norm);
    let moment = |optimizer: &AdamW| -> Result<Vec<f32>> { host_values(&optimizer.state()?["m.w.weight"]) };
    assert_eq!(moment(&free)?, moment(&loose)?);
    for (x, y) in moment(&free)?.iter().zip(moment(&clipped)?) {
        assert!((f64::from(*x) * clip / norm - f64::from(y)).abs() < 1e-7);
    }
    Ok(())
}

#[test]
fn a_missing_or_non_finite_gradient_is_an_error_that_changes_nothing() -> Result<()> {
    let mut optimizer = AdamW::new(params(DType::F32)?, AdamWConfig::default())?;
    let before = values(optimizer.parameters())?;

    let mut grads = gradients(optimizer.parameters())?;
    grads.tensors[2] = None;
    let error = optimizer.step(&grads, 0.1, None).unwrap_err().to_string();
    assert!(error.contains("`w.map.bias` received no gradient"), "{error}");

    let mut grads = gradients(optimizer.parameters())?;
    grads.tensors[1] = Some((grads.tensors[1].clone().unwrap() / 0.0)?);
    let error = optimizer.step(&grads, 0.1, Some(1.0)).unwrap_err().to_string();
    assert!(error.contains("not finite at optimiser step 1"), "{error}");
    assert!(error.contains("`final_norm.weight`"), "{error}");
    assert!(error.contains("lower the learning rate"), "{error}");

    let grads = gradients(optimizer.parameters())?;
    assert!(optimizer.step(&grads, f64::NAN, None).is_err());
    assert!(optimizer.step(&grads, 0.1, Some(0.0)).is_err());
    assert_eq!(values(optimizer.parameters())?, before);
    assert_eq!(optimizer.steps(), 0);
    Ok(())
}

#[test]
fn a_restored_state_resumes_bit_for_bit() -> Result<()> {
    for fuse in [true, false] {
        let config = AdamWConfig::default();
        let mut whole = AdamW::with_fused_update(params(DType::F32)?, config, fuse)?;
        run(&mut whole, 0..7, Some(1.0))?;
        let copies = whole
            .parameters()
            .iter()
            .map(|(name, var)| Ok((name.clone(), Var::from_tensor(&var.as_tensor().copy()?)?)));
        let copies = copies.collect::<Result<_>>()?;
        let mut resumed = AdamW::with_fused_update(copies, config, fuse)?;
        resumed.load_state(&whole.state()?)?;
        assert_eq!(resumed.steps(), 7);
        run(&mut whole, 7..12, Some(1.0))?;
        run(&mut resumed, 7..12, Some(1.0))?;
        assert_eq!(values(whole.parameters())?, values(resumed.parameters())?);
    }
    Ok(())
}

#[test]
fn a_state_of_another_model_is_refused_by_name() -> Result<()> {
    let mut optimizer = AdamW::new(params(DType::F32)?, AdamWConfig::default())?;
    let good = optimizer.state()?;
    let refused = |change: &dyn Fn(&mut HashMap<String, Tensor>), optimizer: &mut AdamW| {
        let mut state = good.clone();
        change(&mut state);
        optimizer.load_state(&state).unwrap_err().to_string()
    };
    let scalar = Tensor::new(1f32, &Device::Cpu)?;
    let missing = refused(&|s| drop(s.remove("v.w.weight")), &mut optimizer);
    assert!(missing.contains("lacks `v.w.weight`"), "{missing}");
    let misshapen = refused(&|s| drop(s.insert("m.w.weight".into(), scalar.clone())), &mut optimizer);
    assert!(misshapen.contains("`m.w.weight`") && misshapen.contains("[3, 5]"), "{misshapen}");
    let extra = refused(&|s| drop(s.insert("m.other".into(), scalar.clone())), &mut optimizer);
    assert!(extra.contains("`m.other`"), "{extra}");
    Ok(())
}

#[test]
fn bad_parameters_and_constants_are_refused() -> Result<()> {
    let mut twice = params(DType::F32)?;
    twice.extend(params(DType::F32)?);
    assert!(AdamW::new(twice, AdamWConfig::default()).is_err());
    let none = AdamW::new(Vec::new(), AdamWConfig::default()).unwrap_err().to_string();
    assert!(none.contains("a frozen model has none"), "{none}");
    let whole = Var::from_tensor(&Tensor::zeros(2, DType::U32, &Device::Cpu)?)?;
    assert!(AdamW::new(vec![("ids".to_owned(), whole)], AdamWConfig::default()).is_err());
    for config in [
        AdamWConfig { betas: (1.0, 0.9), ..Default::default() },
        AdamWConfig { eps: 0.0, ..Default::default() },
        AdamWConfig { weight_decay: -1.0, ..Default::default() },
    ] {
        assert!(AdamW::new(params(DType::F32)?, config).is_err(), "{config:?}");
    }
    Ok(())
}

//! These tests check the modules and functions that stand in for Candle's, and hold
//! `docs/gradients.md` to the results.

// The test runs the table, the example prints it.
#[allow(dead_code)]
#[path = "../../examples/gradients.rs"]
mod example;

use std::{fs, path::Path};

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{
    LayerNormConfig, VarBuilder, VarMap,
    attention::{AttnMask, flash_attn},
};
use performer_core::{Rotary, nn, ops};

const DEVICE: Device = Device::Cpu;

#[test]
fn the_page_shows_what_happens() -> Result<()> {
    let rows = example::table()?;
    for row in &rows {
        assert!(row.gradients[0].is_empty(), "{} gives gradients of {:?} now", row.candle, row.gradients[0]);
        assert_eq!(row.gradients[1], row.variables, "{}", row.here);
    }
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("gradients.md"))?;
    let table = example::markdown(&rows);
    assert!(page.contains(&table), "docs/gradients.md must hold this table:\n{table}");
    Ok(())
}

#[test]
fn candle_attention_on_the_cpu_has_no_gradient() -> Result<()> {
    let q = Var::randn(0f32, 1.0, (1, 6, 2, 8), &DEVICE)?;
    let out = flash_attn::<f32>(&q, &q, &q, 1.0, AttnMask::None, None, None)?;
    assert!(out.sum_all()?.backward()?.get(&q).is_none(), "the page says that it gives none");
    Ok(())
}

/// Fails unless two tensors are equal to `tolerance`.
#[track_caller]
fn assert_near(what: &str, got: &Tensor, want: &Tensor, tolerance: f32) -> Result<()> {
    assert_eq!((got.dims(), got.dtype()), (want.dims(), want.dtype()), "{what}");
    let error = (got - want)?.to_dtype(DType::F32)?.abs()?.max_all()?.to_scalar::<f32>()?;
    assert!(error <= tolerance, "{what}: off by {error}");
    Ok(())
}

/// Fails unless every variable has a gradient that is not all zeros.
#[track_caller]
fn assert_trained(what: &str, vars: &VarMap, output: &Tensor) -> Result<()> {
    let gradients = output.sqr()?.sum_all()?.backward()?;
    for (name, var) in vars.data().lock().unwrap().iter() {
        let gradient = gradients.get(var).unwrap_or_else(|| panic!("{what}: {name} has no gradient"));
        assert!(gradient.abs()?.max_all()?.to_scalar::<f32>()? > 0.0, "{what}: the gradient of {name} is 0");
    }
    Ok(())
}

#[test]
fn norms_take_the_parameters_and_give_the_numbers_of_candle() -> Result<()> {
    let x = Tensor::randn(0f32, 2.0, (2, 5, 7), &DEVICE)?;
    let config = |remove_mean, affine| LayerNormConfig { eps: 1e-3, remove_mean, affine };
    for (i, config) in
        [config(true, true), config(true, false), config(false, true), config(false, false)].into_iter().enumerate()
    {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &DEVICE);
        let theirs = candle_nn::layer_norm(7, config, vb.clone())?;
        // The parameters start as ones and zeros, which could hide errors, so they get random
        // values.
        for (name, var) in vars.data().lock().unwrap().iter() {
            assert!(["weight", "bias"].contains(&name.as_str()), "{name}");
            var.set(&Tensor::randn(0f32, 1.0, 7, &DEVICE)?)?;
        }
        let count = vars.all_vars().len();
        let ours = nn::layer_norm(7, config, vb)?;
        assert_eq!(vars.all_vars().len(), count, "no parameter has another name");
        assert_eq!((ours.eps(), ours.remove_mean(), ours.bias().is_some()), (1e-3, config.remove_mean, config.affine));
        let what = format!("configuration {i}");
        assert_near(&what, &ours.forward(&x)?, &theirs.forward(&x)?, 2e-5)?;
        assert_near(&what, &nn::LayerNorm::from(theirs).forward(&x)?, &ours.forward(&x)?, 0.0)?;
        assert_trained(&what, &vars, &ours.forward(&x)?)?;
    }

    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &DEVICE);
    let (theirs, ours) = (candle_nn::rms_norm(7, 1e-3, vb.clone())?, nn::rms_norm(7, 1e-3, vb)?);
    vars.all_vars()[0].set(&Tensor::randn(0f32, 1.0, 7, &DEVICE)?)?;
    assert_near("rms norm", &ours.forward(&x)?, &theirs.forward(&x)?, 2e-5)?;
    assert_near("rms norm", &nn::RmsNorm::from(theirs).forward(&x)?, &ours.forward(&x)?, 0.0)?;
    assert_trained("rms norm", &vars, &ours.forward(&x)?)
}

#[test]
fn norms_say_what_does_not_fit() -> Result<()> {
    let x = Tensor::zeros((2, 7), DType::F32, &DEVICE)?;
    for dtype in [DType::F32, DType::F64] {
        let [five, seven] = [5, 7].map(|n| Tensor::ones(n, dtype, &DEVICE));
        let (five, seven, x) = (five?, seven?, x.to_dtype(dtype)?);
        for (error, word) in
            [(ops::rms_norm(&x, &five, 1e-5), "weight"), (ops::layer_norm(&x, &seven, &five, 1e-5), "bias")]
        {
            let message = error.unwrap_err().to_string();
            assert!(["[2, 7]", "[7]", "[5]", word].iter().all(|part| message.contains(part)), "{message}");
        }
    }
    Ok(())
}

#[test]
fn the_feed_forward_layer_is_its_formula() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &DEVICE);
    let layer = nn::SwiGlu::new(6, 11, vb.clone())?;
    let x = Tensor::randn(0f32, 1.0, (2, 3, 6), &DEVICE)?;
    let weight = |name: &str, shape: (usize, usize)| vb.get(shape, name)?.t();
    let (gate, up, down) = (
        weight("gate_proj.weight", (11, 6))?,
        weight("up_proj.weight", (11, 6))?,
        weight("down_proj.weight", (6, 11))?,
    );
    let want = (x.broadcast_matmul(&gate)?.silu()? * x.broadcast_matmul(&up)?)?.broadcast_matmul(&down)?;
    assert_near("swiglu layer", &layer.forward(&x)?, &want, 1e-5)?;
    assert_trained("swiglu layer", &vars, &layer.forward(&x)?)
}

#[test]
fn both_layouts_of_positions_are_the_functions_of_the_same_angles() -> Result<()> {
    let (d, start, tokens) = (6, 3, 5);
    let angles: Vec<f32> = (start..start + tokens)
        .flat_map(|t| (0..d / 2).map(move |i| t as f32 * 100f32.powf(-2.0 * i as f32 / d as f32)))
        .collect();
    let angles = Tensor::from_vec(angles, (tokens, d / 2), &DEVICE)?;
    let (cos, sin) = (angles.cos()?, angles.sin()?);
    let x = Tensor::randn(0f32, 1.0, (2, 3, tokens, d), &DEVICE)?;
    let halves = Rotary::new(d, 20, 100.0, &DEVICE)?;
    let neighbours = halves.clone().interleaved();
    assert_near("halves", &halves.apply(&x, start)?, &candle_nn::rotary_emb::rope(&x, &cos, &sin)?, 1e-5)?;
    assert_near("neighbours", &neighbours.apply(&x, start)?, &candle_nn::rotary_emb::rope_i(&x, &cos, &sin)?, 1e-5)?;
    Ok(())
}

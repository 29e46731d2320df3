//! This example trains features to return what softmax returns, with all other weights of a layer
//! left as they are: the step by which a softmax model becomes a Performer.
//!
//! `cargo run --release -p performer-core --example trained_features`

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap, loss};
use performer_core::{Favor, FavorConfig, FeatureMapKind, Mask, MultiHeadAttention, MultiHeadConfig, Softmax};

/// Returns the relative error of a layer with features `(before, after)` so many steps of training.
/// The error is that of its outputs to those of a layer with softmax and the same weights.
///
/// # Errors
/// If the device has no memory for it.
pub(crate) fn train(steps: usize) -> Result<(f32, f32)> {
    let device = Device::Cpu;
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device);
    let config = MultiHeadConfig::new(64, 2);
    let features = FavorConfig::default().with_features(64).with_map(FeatureMapKind::Learned);
    let favor = Favor::new(&features, config.head_dim, 42, DType::F32, &device)?.trained();

    // Over a `VarMap`, the layer holds the features' parameters as variables, a set for each head.
    let student = MultiHeadAttention::new(&config, Box::new(favor), None, vb.clone())?;
    // This layer finds the weights of the first in the `VarMap`, and so shares them.
    let teacher = MultiHeadAttention::new(&config, Box::new(Softmax::new()), None, vb)?;

    // Only the features are given to the optimiser.
    let named = vars.data().lock().unwrap();
    let trained: Vec<Var> =
        named.iter().filter(|(name, _)| name.contains("feature_map")).map(|(_, var)| var.clone()).collect();
    drop(named);
    let mut optimizer = AdamW::new(trained, ParamsAdamW { lr: 1e-2, weight_decay: 0.0, ..Default::default() })?;

    // Random rows stand for the hidden states of a model; larger ones make softmax sharper.
    let inputs = || Tensor::randn(0f32, 0.5, (4, 128, 64), &device);
    let error = |x: &Tensor| -> Result<f32> {
        let expected = teacher.forward(x, &Mask::causal())?;
        let difference = (student.forward(x, &Mask::causal())? - &expected)?;
        (difference.sqr()?.sum_all()? / expected.sqr()?.sum_all()?)?.sqrt()?.to_scalar()
    };
    let held_out = inputs()?;
    let before = error(&held_out)?;
    for _ in 0..steps {
        let x = inputs()?;
        let expected = teacher.forward(&x, &Mask::causal())?.detach();
        optimizer.backward_step(&loss::mse(&student.forward(&x, &Mask::causal())?, &expected)?)?;
    }
    Ok((before, error(&held_out)?))
}

#[allow(dead_code, reason = "a test includes this file for `train` alone")]
fn main() -> Result<()> {
    let (before, after) = train(300)?;
    println!("relative error to softmax with random features: {before:.3}, with trained features: {after:.3}");
    Ok(())
}

//! This example measures how close FAVOR+ comes to softmax attention as features are added, with
//! independent and with orthogonal rows.
//!
//! An approximation must have a smaller error than uniform attention, the plain mean of the visible
//! values: one with a larger error carries no information about the keys. The number of features
//! that this takes grows like `e^{‖x+y‖²}`, so two sizes of logits are shown.
//!
//! `cargo run --release -p performer-core --example approximate_softmax`

use candle_core::{DType, Device, Result, Tensor};
use performer_core::projection::draw_tensor;
use performer_core::{Attention, Favor, FavorConfig, Inputs, Mask, ProjectionKind, Radii, Softmax};

const HEADS: usize = 2;
const TOKENS: usize = 512;
const HEAD_DIM: usize = 16;
const SEEDS: u64 = 8;

fn main() -> Result<()> {
    let device = Device::Cpu;
    let mask = Mask::causal();
    // These are unit normal numbers, the same in every run, of other seeds than the features.
    let normal = |seed| {
        let rows = HEADS * TOKENS;
        draw_tensor(ProjectionKind::Gaussian, Radii::Chi, rows, HEAD_DIM, seed, DType::F32, &device)?
            .reshape((1, HEADS, TOKENS, HEAD_DIM))
    };
    let norm = |t: &Tensor| t.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>();
    println!("Relative error of causal outputs: {TOKENS} tokens, head dim {HEAD_DIM}, normal queries, keys and values");
    for deviation in [0.5, 1.0] {
        let (q, k, v) = ((normal(101)? * deviation)?, (normal(102)? * deviation)?, normal(103)?);
        let exact = Softmax::new().forward(Inputs::new(&q, &k, &v), &mask)?;
        let error = |output: &Tensor| -> Result<f32> { Ok(norm(&(output - &exact)?)? / norm(&exact)?) };
        let favor = |features: usize, projection: ProjectionKind| -> Result<f32> {
            let config = FavorConfig::default().with_features(features).with_projection(projection);
            let mut sum = 0.0;
            for seed in 0..SEEDS {
                let favor = Favor::new(&config, HEAD_DIM, seed, DType::F32, &device)?;
                sum += error(&favor.forward(Inputs::new(&q, &k, &v), &mask)?)?;
            }
            Ok(sum / SEEDS as f32)
        };
        println!("\nlogits of standard deviation {}", deviation * deviation);
        println!("features  independent  orthogonal");
        for features in [16, 32, 64, 128, 256, 512, 1024] {
            let independent = favor(features, ProjectionKind::Gaussian)?;
            let orthogonal = favor(features, ProjectionKind::Orthogonal)?;
            println!("{features:8}  {independent:11.3}  {orthogonal:10.3}");
        }
        // Queries of zero give equal logits, and so uniform attention.
        let uniform = error(&Softmax::new().forward(Inputs::new(&q.zeros_like()?, &k, &v), &mask)?)?;
        println!(" uniform  {uniform:11.3}  {uniform:10.3}");
    }
    Ok(())
}

//! This example trains a small Candle model with FAVOR+ attention to copy: at every token it
//! predicts the token of three steps ago.
//!
//! `cargo run --release -p performer-core --example multi_head`

use candle_core::{D, DType, Device, IndexOp, Result, Tensor};
use candle_nn::{AdamW, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, embedding, linear, loss};
use performer_core::{Favor, FavorConfig, Mask, MultiHeadAttention, MultiHeadConfig, Rotary};

const SYMBOLS: usize = 8;
const TOKENS: usize = 64;
const DELAY: usize = 3;

fn main() -> Result<()> {
    let device = Device::Cpu;
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &device);

    let config = MultiHeadConfig::new(32, 2);
    let favor = Favor::new(&FavorConfig::default(), config.head_dim, 42, DType::F32, &device)?;
    let rotary = Rotary::new(config.head_dim, TOKENS, 100.0, &device)?;
    let embed = embedding(SYMBOLS, config.hidden, vb.pp("embed"))?;
    let attention = MultiHeadAttention::new(&config, Box::new(favor), Some(rotary), vb.pp("attention"))?;
    let head = linear(config.hidden, SYMBOLS, vb.pp("head"))?;
    let model = |tokens: &Tensor| head.forward(&attention.forward(&embed.forward(tokens)?, &Mask::causal())?);

    let mut optimizer = AdamW::new(vars.all_vars(), ParamsAdamW { lr: 1e-2, ..Default::default() })?;
    for step in 0..=200 {
        let tokens = (Tensor::rand(0f32, SYMBOLS as f32, (16, TOKENS), &device)?).to_dtype(DType::U32)?;
        let logits = model(&tokens)?.i((.., DELAY.., ..))?.flatten_to(1)?;
        let targets = tokens.i((.., ..TOKENS - DELAY))?.flatten_all()?;
        let loss = loss::cross_entropy(&logits, &targets)?;
        optimizer.backward_step(&loss)?;
        if step % 20 == 0 {
            let right = logits.argmax(D::Minus1)?.eq(&targets)?.to_dtype(DType::F32)?.mean_all()?;
            println!("step {step:3}  loss {:.4}  accuracy {:.3}", loss.to_scalar::<f32>()?, right.to_scalar::<f32>()?);
        }
    }
    Ok(())
}

//! This example prints, as JSON, the logits of any model that this program opens after every token
//! of a text, for comparison with other programs.
//!
//! Run it by `cargo run --release -p performer-lm --example logits -- MODEL TEXT`; see
//! `scripts/transformers_logits.py`.

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use performer_lm::model::pretrained;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let (Some(source), Some(text)) = (args.next(), args.next()) else { anyhow::bail!("give a model and a text") };
    let (model, tokenizer) = pretrained::load(&source, &Device::Cpu)?;
    let ids = tokenizer.encode(&text).context("cannot encode the text")?;
    let input = Tensor::new(&ids[..], &Device::Cpu)?.unsqueeze(0)?;
    let logits = model.forward(&input, None)?.squeeze(0)?.to_vec2::<f32>()?;
    println!("{}", serde_json::json!({"text": text, "ids": ids, "logits": logits}));
    Ok(())
}

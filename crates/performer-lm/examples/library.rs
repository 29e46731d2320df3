//! The crate as a library, without the command line: opens the Performer that comes with the
//! project and writes one sentence.
//!
//! `cargo run --release -p performer-lm --no-default-features --example library`

use std::path::Path;

use anyhow::Result;
use candle_core::Device;
use performer_lm::{
    generate::{Sampling, generate},
    model::pretrained,
};

/// A checkpoint of this crate; a folder of the Hugging Face format opens in the same way.
pub(crate) const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/stories/performer");

/// The first sentence that the model in `folder` writes after `prompt`, with the prompt.
///
/// # Errors
/// A folder that holds no model.
pub(crate) fn sentence(folder: &Path, prompt: &str) -> Result<String> {
    let (model, tokenizer) = pretrained::load(&folder.to_string_lossy(), &Device::Cpu)?;
    let mut text = prompt.to_string();
    generate(&model, &tokenizer, prompt, 60, Sampling::default(), |piece| {
        text.push_str(piece);
        Ok(!piece.contains('.'))
    })?;
    Ok(text)
}

#[allow(dead_code, reason = "a test includes this file for `sentence` alone")]
fn main() -> Result<()> {
    println!("{}", sentence(Path::new(MODEL), "Once upon a time")?);
    Ok(())
}

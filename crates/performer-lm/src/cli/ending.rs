//! This module ends a training run for the person at the terminal: it shows a story that the model
//! writes, and names the commands that show more.

use std::path::Path;

use anyhow::Result;
use candle_core::Device;

use super::output;
use crate::{
    generate::begin_story,
    train::{Report, load_model},
};

/// Most tokens of the story.
const STORY_TOKENS: usize = 256;

/// Shows a story by the model in `out`, and names the commands that write another one and, after a
/// run from the beginning, the one that compares it with softmax. `program` is how the program was
/// called.
pub(super) fn tell(program: &str, out: &Path, report: &Report, from_the_beginning: bool) -> Result<()> {
    // A few words are written as fast on the CPU, and every device's models load there.
    let (model, tokenizer) = load_model(out, &Device::Cpu)?;
    if let Some(story) = begin_story(&model, &tokenizer, STORY_TOKENS)? {
        output::note(&format!("\n{} writes:\n\n{story}", report.attention_spec));
    }
    output::note(&format!("\nsaved in {}; another story by it:\n  {program} generate {0} --seed 7", out.display()));
    if from_the_beginning {
        let pair = match report.attention_spec.as_str() {
            "softmax" => ["softmax", "favor"],
            attention => ["softmax", attention],
        };
        output::note(&format!(
            "compared with another attention, both losses in one chart (add the other options of this run):\n  \
             {program} compare --attention {} --attention {}",
            pair[0], pair[1]
        ));
    }
    Ok(())
}

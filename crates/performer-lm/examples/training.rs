//! The crate as a library, from texts in memory to a Performer: trains a tokenizer and a small
//! softmax model on the texts, converts that model, and writes a few words with the result.
//!
//! `cargo run --release -p performer-lm --no-default-features --example training`

use std::path::Path;

use anyhow::{Context, Result};
use candle_core::Device;
use performer_lm::{
    config::{AttentionConfig, ModelConfig, Preset, TrainingConfig},
    convert::{self, Plan, Tuning},
    data::{Corpus, Documents, SEPARATOR, Tokenizer, prepare_corpus},
    generate::{Sampling, generate},
    listener::Listener,
    model::pretrained::{self, Pretrained},
    train::{RunOptions, Trainer},
};

/// Prints what a person should know, such as the loss of each validation.
struct Notes;

impl Listener for Notes {
    fn note(&self, text: &str) {
        println!("{text}");
    }
}

/// Stories that a program made. Whoever has texts of their own takes those.
fn stories() -> Vec<String> {
    // No two of these have the same four words.
    let all = (0..400).map(|i| {
        let name = ["Ada", "Leo", "Mia", "Tom", "Zoe"][i % 5];
        let thing = ["a ball", "a cake", "a boat", "a hat", "a kite", "a drum", "a lamp"][i / 5 % 7];
        let place = ["the park", "the hill", "the shop", "the lake"][i / 35 % 4];
        let time = ["morning", "noon", "night"][i / 140];
        format!(
            "One {time} {name} wanted {thing}. {name} went to {place} and found {thing} there. Now {name} is happy."
        )
    });
    all.collect()
}

/// Trains a softmax model in `folder/softmax` for so many steps, converts it to a Performer in
/// `folder/performer` with half as many, and returns the losses of both over held-out stories, in
/// nats per token.
///
/// # Errors
/// A folder that cannot be written.
pub(crate) fn train_and_convert(folder: &Path, steps: usize, listener: &dyn Listener) -> Result<(f64, f64)> {
    // ANCHOR: essence
    // The last tenth of the stories is held out.
    let stories = stories();
    let (train, valid) = stories.split_at(stories.len() - stories.len() / 10);
    let corpus = Corpus {
        name: "made".into(),
        description: "stories that a program made".into(),
        train: Documents::from_text(train.join(SEPARATOR)),
        valid: Documents::from_text(valid.join(SEPARATOR)),
        test: None,
    };
    let tokenizer = Tokenizer::train(&corpus.train, 300)?;
    let data = prepare_corpus(corpus, &tokenizer, listener)?;

    let (model, training) = Preset::Seed.load()?;
    let small = ModelConfig { hidden_size: 64, heads: 2, kv_heads: 2, feed_forward_size: 128, context: 32, ..model };
    let model = ModelConfig { attention: AttentionConfig::Softmax, layers: 2, ..small };
    let training = TrainingConfig {
        // As many epochs as it takes to make the steps.
        epochs: steps,
        max_steps: Some(steps),
        batch_size: 16,
        micro_batch: 8,
        learning_rate: 3e-3,
        ..training
    };
    let softmax = folder.join("softmax");
    // What an earlier call left in the folder is replaced.
    let options = RunOptions { overwrite: true, listener, ..RunOptions::new(&softmax) };
    let trained = Trainer::new(&model, &training, &data, options)?.run()?.context("nobody stops the training")?;

    let teacher = Pretrained::open(&softmax.to_string_lossy())?;
    let attention = "favor:m=32,map=learned,gate,conv".parse().map_err(anyhow::Error::msg)?;
    let performer = folder.join("performer");
    let plan = Plan {
        overwrite: true,
        transfer_steps: steps / 4,
        tuning: Some(Tuning { rate: 1e-3, ..Tuning::new(steps / 4) }),
        listener,
        ..Plan::new(&teacher, teacher.config.clone().with_attention(&attention)?, &performer)
    };
    let converted = convert::run(&plan, &data)?.context("nobody stops the conversion")?;
    // ANCHOR_END: essence
    let last = converted.stages.last().context("a conversion has stages")?;
    Ok((trained.val_loss, last.measured.held_out.val_loss))
}

#[allow(dead_code, reason = "a test includes this file for its functions alone")]
fn main() -> Result<()> {
    let folder = Path::new("runs/made");
    let (softmax, performer) = train_and_convert(folder, 200, &Notes)?;
    println!("softmax: {softmax:.3} nats a token; the Performer made of it: {performer:.3}");
    let (model, tokenizer) = pretrained::load(&folder.join("performer").to_string_lossy(), &Device::Cpu)?;
    let prompt = "One morning Ada";
    print!("{prompt}");
    generate(&model, &tokenizer, prompt, 40, Sampling::default(), |piece| {
        print!("{piece}");
        Ok(!piece.contains("happy"))
    })?;
    println!();
    Ok(())
}

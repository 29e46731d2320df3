//! Trains a small model, always on the same tokens from the same seed, and prints its loss over the
//! held-out ones. `scripts/drift.py` runs it on several kinds of processors, and compares.
//!
//! `cargo run -p performer-lm --no-default-features --example drift -- OUT STEPS ATTENTION MICRO_BATCH`

use std::path::Path;

use anyhow::{Context, Result};
use performer_lm::{
    config::{ModelConfig, Preset, TrainingConfig},
    data::{Corpus, DataSpec, Documents, Prepared, TokenFile, Tokenizer},
    listener::Silent,
    train::{RunOptions, Trainer},
};

/// The tokens of the first documents.
fn tokens(tokenizer: &Tokenizer, documents: &Documents, count: usize) -> Result<TokenFile> {
    let (mut tokens, mut bytes) = (Vec::new(), 0);
    for document in documents.iter().take(count) {
        tokens.extend(tokenizer.encode(document)?);
        tokens.push(tokenizer.eot());
        bytes += document.len() as u64;
    }
    TokenFile::from_tokens(&tokens, bytes)
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [out, steps, attention, micro_batch] = &args[..] else {
        anyhow::bail!("usage: drift OUT STEPS ATTENTION MICRO_BATCH")
    };
    let corpus = Corpus::load(&DataSpec::Sample, &Silent)?;
    let tokenizer = Tokenizer::train(&corpus.train, 300)?;
    let data = Prepared {
        corpus_name: "sample".into(),
        description: "the first stories of the sample".into(),
        train: tokens(&tokenizer, &corpus.train, 200)?.into(),
        valid: tokens(&tokenizer, &corpus.valid, 4)?.into(),
        test: None,
        cache: None,
        tokenizer,
    };
    let (model, training) = Preset::Seed.load()?;
    let attention = attention.parse().map_err(anyhow::Error::msg)?;
    let small = ModelConfig { hidden_size: 32, heads: 2, kv_heads: 2, feed_forward_size: 64, context: 32, ..model };
    let model = ModelConfig { attention, dropout: 0.0, ..small };
    let training = TrainingConfig {
        epochs: 1000,
        max_steps: Some(steps.parse()?),
        batch_size: 8,
        micro_batch: micro_batch.parse()?,
        learning_rate: 3e-3,
        eval_every: 0,
        save_every: 0,
        seed: 1,
        ..training
    };
    let options = RunOptions { overwrite: true, threads: 1, ..RunOptions::new(Path::new(out)) };
    let report = Trainer::new(&model, &training, &data, options)?.run()?.context("nobody stops the run")?;
    println!("{}", report.val_loss);
    Ok(())
}

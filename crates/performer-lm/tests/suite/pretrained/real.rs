//! These tests use real models and texts, which are not part of the project: `MODELS` names the
//! folder that has them, with `stories260k/` (the model of llama2.c's author, in the files
//! `stories260K.bin`, `tok512.bin` and the page `stories260K.md` beside it) and `tinystories/`.
//!
//! They are ignored unless asked for (`just real-models FOLDER`), and fail where the folder is
//! missing: a test does not pass because there was nothing to test.

use std::path::{Path, PathBuf};

use anyhow::Result;
use candle_core::Device;
use performer_lm::{
    data::{TokenFile, load_text},
    eval::evaluate,
    generate::{Sampling, Stop, generate},
    model::pretrained::{self, export},
};

use super::{
    llama2c::{read_vocabulary, run_c_encode},
    support::open,
};

/// Returns the folder of the models.
fn data() -> PathBuf {
    let path: PathBuf = std::env::var_os("MODELS").expect("MODELS names the folder of the models").into();
    assert!(path.join("stories260k/stories260K.bin").exists(), "{} has no stories260k", path.display());
    path
}

/// Returns the text that the model's authors published, which was generated greedily.
fn published(data: &Path) -> String {
    let page = std::fs::read_to_string(data.join("stories260k/stories260K.md")).unwrap();
    let (_, rest) = page.split_once("-t 0.0\n").unwrap();
    rest.split_once("\n```").unwrap().0.to_owned()
}

fn greedy(source: &Path) -> Result<String> {
    let (model, tokenizer) = pretrained::load(source.to_str().unwrap(), &Device::Cpu)?;
    let mut text = String::new();
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    // run.c takes 256 steps.
    let end = generate(&model, &tokenizer, "", 256, sampling, |piece| {
        text.push_str(piece);
        Ok(true)
    })?;
    assert_eq!(end.stop, Stop::MaxTokens);
    Ok(text)
}

#[test]
#[ignore = "needs a model: `just real-models FOLDER` runs it"]
fn stories260k_tells_its_published_story() -> Result<()> {
    let data = data();
    let model = data.join("stories260k/stories260K.bin");
    assert_eq!(greedy(&model)?, published(&data));
    // The model exported as a Hugging Face folder generates the same text.
    let dir = tempfile::tempdir()?;
    let opened = open(&model)?;
    export(&opened, dir.path())?;
    assert_eq!(open(dir.path())?.config, opened.config);
    assert_eq!(greedy(dir.path())?, published(&data));
    Ok(())
}

#[test]
#[ignore = "needs a model: `just real-models FOLDER` runs it"]
fn stories260k_encodes_as_run_c_does() -> Result<()> {
    let data = data();
    let vocabulary = read_vocabulary(&data.join("stories260k/tok512.bin"));
    let tokenizer = open(&data.join("stories260k/stories260K.bin"))?.tokenizer;
    let documents = load_text(&data.join("tinystories/valid.txt"))?;
    for (i, story) in documents.iter().enumerate() {
        let tokens = tokenizer.encode(story)?;
        assert_eq!(tokenizer.decode(&tokens)?, story);
        // The plain algorithm is quadratic, so it runs on some stories only.
        if i % 20 == 0 {
            assert_eq!(tokens, run_c_encode(&vocabulary, story), "{story}");
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs a model: `just real-models FOLDER` runs it"]
fn stories260k_scores_its_published_loss() -> Result<()> {
    let data = data();
    let (model, tokenizer) =
        pretrained::load(data.join("stories260k/stories260K.bin").to_str().unwrap(), &Device::Cpu)?;
    let documents = load_text(&data.join("tinystories/valid.txt"))?;
    let mut tokens = Vec::new();
    let mut bytes = 0;
    for story in documents.iter().take(300) {
        tokens.push(tokenizer.eot());
        tokens.extend(tokenizer.encode(story)?);
        bytes += story.len() as u64;
    }
    let loss = evaluate(&model, &TokenFile::from_tokens(&tokens, bytes)?, 2)?.val_loss;
    println!("{loss:.4} nats/token over {} tokens; published is 1.2968", tokens.len());
    assert!((1.2..1.4).contains(&loss), "loss is {loss}; published is 1.2968");
    Ok(())
}

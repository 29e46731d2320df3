//! These tests use real models, if they lie beside the project.

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

/// Returns the folder of the data, or prints that it is absent.
fn data() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data");
    let there = path.join("stories260k/stories260K.bin").exists();
    if !there {
        println!("skipped: {} holds no pretrained model", path.display());
    }
    there.then_some(path)
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
fn stories260k_tells_its_published_story() -> Result<()> {
    let Some(data) = data() else { return Ok(()) };
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
fn stories260k_encodes_as_run_c_does() -> Result<()> {
    let Some(data) = data() else { return Ok(()) };
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
fn stories260k_scores_its_published_loss() -> Result<()> {
    let Some(data) = data() else { return Ok(()) };
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

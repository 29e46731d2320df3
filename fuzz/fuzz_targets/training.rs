//! The state of a training: how far it is, or its optimiser (a header, a line feed and data), by the
//! first byte. The model beside it lists the right digest, and the run goes on from whatever could
//! be read.

#![no_main]

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, LazyLock, atomic::AtomicBool},
};

use anyhow::Result;
use candle_core::Device;
use libfuzzer_sys::fuzz_target;
use performer_fuzz::{choice, copy, fixture, safetensors};
use performer_lm::{
    data::{Prepared, TokenFile, Tokenizer},
    train::{RunOptions, Trainer, TrainingState, saved_data},
};
use serde_json::Value;

const STATE: &str = "train_state.json";
const OPTIMIZER: &str = "optimizer.safetensors";

static RUN: LazyLock<PathBuf> = LazyLock::new(|| copy("run", "run"));

/// The data of the run that performer-lm's test `seeds` trained.
static DATA: LazyLock<Prepared> = LazyLock::new(|| {
    let tokens = |n: u32| {
        let all: Vec<u32> = (0..n).map(|i| (i * i * 7 + i * 3) % 260).collect();
        Arc::new(TokenFile::from_tokens(&all, u64::from(n)).expect("tokens"))
    };
    Prepared {
        corpus_name: "tokens".into(),
        description: "tokens".into(),
        tokenizer: Tokenizer::load(&fixture("run/tokenizer.json")).expect("a tokenizer"),
        train: tokens(200),
        valid: tokens(40),
        test: None,
        cache: None,
    }
});

/// Returns the weights of the run with another list of the files that belong to them.
fn with_files(files: &Value) -> Vec<u8> {
    let weights = fs::read(fixture("run/model.safetensors")).expect("weights");
    let (length, rest) = weights.split_first_chunk::<8>().expect("a header");
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let mut header: Value = serde_json::from_slice(header).expect("a header");
    let metadata = header["__metadata__"].as_object_mut().expect("metadata");
    metadata.insert("checkpoint_files".into(), files.to_string().into());
    metadata.remove("blake3");
    let mut header = header.to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    [&(header.len() as u64).to_le_bytes()[..], &header, data].concat()
}

fn go_on(run: &Path) -> Result<()> {
    TrainingState::load(run, &Device::Cpu)?;
    saved_data(run)?;
    let stop = AtomicBool::new(true);
    let options = RunOptions { threads: 1, stop: &stop, ..RunOptions::new(run) };
    Trainer::resume(&DATA, options)?;
    Ok(())
}

fuzz_target!(|input: &[u8]| {
    let Some((which, file)) = choice(input, 2) else { return };
    let (run, file) = (&*RUN, if which == 1 { safetensors(file) } else { file.to_vec() });
    let mut files = serde_json::Map::new();
    for (i, name) in [STATE, OPTIMIZER].into_iter().enumerate() {
        let whole = fs::read(fixture("run").join(name)).expect("a file");
        let content = if i == which { &file } else { &whole };
        fs::write(run.join(name), content).expect("the folder can be written to");
        files.insert(name.into(), blake3::hash(content).to_hex().as_str().into());
    }
    fs::write(run.join("model.safetensors"), with_files(&files.into())).expect("the folder can be written to");
    let _ = go_on(run);
});

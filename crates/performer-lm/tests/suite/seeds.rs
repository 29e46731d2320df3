//! Seeds of the fuzzer: files of every kind that the program reads, small and whole, in the form in
//! which the targets in `fuzz/fuzz_targets` take them, and the files that they need beside these.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use performer_core::{AttentionConfig, Inputs, State};
use performer_lm::{
    config::{ModelConfig, Preset, TrainingConfig},
    data::{Corpus, DataSpec, Prepared, TokenFile, Tokenizer},
    listener::Silent,
    train::{RunOptions, Trainer},
};
use serde_json::json;

use super::pretrained::{
    gguf, gpt2, llama2c,
    support::{SMALL, llama_config, llama_weights, open, word_tokenizer, write_folder, write_json},
};

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
}

/// Makes a folder, empty.
fn fresh(path: PathBuf) -> Result<PathBuf> {
    if path.exists() {
        fs::remove_dir_all(&path)?;
    }
    fs::create_dir_all(&path)?;
    Ok(path)
}

/// Writes a seed of a target: the number of a way to read it, where the target has several, and the
/// content of a file.
fn seed(target: &str, name: &str, way: Option<u8>, content: &[u8]) -> Result<()> {
    let folder = fuzz().join("seeds").join(target);
    fs::create_dir_all(&folder)?;
    let content: Vec<u8> = way.into_iter().chain(content.iter().copied()).collect();
    Ok(fs::write(folder.join(name), content)?)
}

/// The header of a file in the safetensors format, a line feed, and the data: targets compute the
/// length before the header.
fn in_parts(file: &[u8]) -> Vec<u8> {
    let (length, rest) = file.split_first_chunk::<8>().expect("a length");
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    [header.trim_ascii_end(), b"\n", data].concat()
}

/// Tokens, of which the target `training` makes the same.
fn tokens(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * i * 7 + i * 3) % 260).collect()
}

/// The bytes of a file of tokens, without the digests in it: the target puts these right.
fn token_file(tokens: &[u32], width: u32, vocab_size: u64) -> Vec<u8> {
    let mut bytes = b"PERFTOKS".to_vec();
    bytes.extend([1, width].into_iter().flat_map(u32::to_le_bytes));
    bytes.extend([tokens.len() as u64, 9, 1, vocab_size].into_iter().flat_map(u64::to_le_bytes));
    bytes.resize(128, 0);
    bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()[..width as usize].to_vec()));
    bytes
}

/// The folder of a run that was stopped before its end.
fn run(fixtures: &Path) -> Result<()> {
    let tokenizer = Tokenizer::train(&Corpus::load(&DataSpec::Sample, &Silent)?.train, 260)?;
    let tokens = |n: u32| TokenFile::from_tokens(&tokens(n), u64::from(n));
    let data = Prepared {
        corpus_name: "tokens".into(),
        description: "tokens".into(),
        tokenizer,
        train: tokens(200)?.into(),
        valid: tokens(40)?.into(),
        test: None,
        cache: None,
    };
    let (model, training) = Preset::Seed.load()?;
    let attention = "favor:m=8,window=4,gate".parse().map_err(anyhow::Error::msg)?;
    let small = ModelConfig { attention, hidden_size: 16, heads: 2, kv_heads: 2, feed_forward_size: 16, ..model };
    let model = ModelConfig { layers: 1, context: 16, ..small };
    let training = TrainingConfig { batch_size: 2, micro_batch: 2, epochs: 1, max_steps: Some(2), ..training };
    let out = fixtures.join("run");
    let stop = AtomicBool::new(true);
    let options = RunOptions { overwrite: true, threads: 1, stop: &stop, ..RunOptions::new(&out) };
    assert!(Trainer::new(&model, &training, &data, options)?.run()?.is_none(), "the run was to be stopped");
    fs::write(fixtures.join("training.json"), serde_json::to_vec_pretty(&training)?)?;
    Ok(())
}

/// Writes everything into `fuzz/`, where git passes it over. Whatever can be opened by itself is
/// opened: a seed that no reader takes teaches the fuzzer nothing.
#[test]
#[ignore = "writes files into fuzz/, for the fuzzer: just fuzz"]
fn written() -> Result<()> {
    let (fixtures, _) = (fresh(fuzz().join("fixtures"))?, fresh(fuzz().join("seeds"))?);
    run(&fixtures)?;

    let models = tempfile::tempdir()?;
    let models = models.path();
    gguf::write_examples(models, ["merges.gguf", "scores.gguf"])?;
    llama2c::write_examples(models, ["zero.bin", "one.bin"])?;
    for name in ["merges.gguf", "scores.gguf"] {
        open(&models.join(name))?;
        seed("gguf", name, None, &fs::read(models.join(name))?)?;
    }
    for name in ["zero.bin", "one.bin"] {
        open(&models.join(name))?;
        let model = fs::read(models.join(name))?;
        let length = (model.len() as u32).to_le_bytes();
        let both = [&length[..], &model, &fs::read(models.join("tokenizer.bin"))?].concat();
        seed("llama2c", name, None, &both)?;
    }

    for folder in ["llama", "parts", "gpt2"] {
        let folder = fresh(fixtures.join(folder))?;
        if folder.ends_with("gpt2") {
            gpt2::write_example(&folder)?;
        } else {
            write_folder(&folder, &llama_config(SMALL, "llama", true), &llama_weights(SMALL, false, true)?)?;
        }
    }
    write_json(&fixtures.join("llama/generation_config.json"), &json!({"eos_token_id": [0, 3]}));
    let parts = fixtures.join("parts");
    fs::rename(parts.join("model.safetensors"), parts.join("part.safetensors"))?;
    let names = llama_weights(SMALL, false, true)?.into_keys();
    let map: serde_json::Map<_, _> = names.map(|name| (name, "part.safetensors".into())).collect();
    write_json(&parts.join("model.safetensors.index.json"), &json!({"weight_map": map}));
    for (way, folder, name) in [
        (0, "llama", "config.json"),
        (1, "gpt2", "config.json"),
        (2, "llama", "generation_config.json"),
        (3, "parts", "model.safetensors.index.json"),
    ] {
        open(&fixtures.join(folder))?;
        seed("hugging_face", &format!("{way}.json"), Some(way), &fs::read(fixtures.join(folder).join(name))?)?;
    }
    for kind in ["mistral", "qwen2", "starcoder2"] {
        let config = llama_config(SMALL, kind, true).to_string();
        seed("hugging_face", &format!("{kind}.json"), Some(0), config.as_bytes())?;
    }

    let file = |name: &str| fs::read(fixtures.join(name)).context(name.to_owned());
    open(&fixtures.join("run"))?;
    for (way, name) in [(0, "run"), (1, "run"), (2, "llama")] {
        let weights = file(&format!("{name}/model.safetensors"))?;
        let weights = if way == 0 { weights } else { in_parts(&weights) };
        seed("weights", &format!("{way}.safetensors"), Some(way), &weights)?;
    }
    seed("config", "model.json", Some(0), &file("run/config.json")?)?;
    for preset in [Preset::Seed, Preset::Published, Preset::Code, Preset::Stories15m] {
        seed("config", &format!("{preset:?}.json"), Some(0), &serde_json::to_vec_pretty(&preset.load()?.0)?)?;
    }
    seed("config", "training.json", Some(1), &file("training.json")?)?;

    let words = word_tokenizer().to_string();
    for (way, name, json) in [
        (0, "bytes", file("run/tokenizer.json")?),
        (0, "words", words.clone().into_bytes()),
        (1, "borders", words.clone().into_bytes()),
        (2, "scores", open(&models.join("scores.gguf"))?.tokenizer.as_bytes().to_vec()),
        (2, "merges", open(&models.join("merges.gguf"))?.tokenizer.as_bytes().to_vec()),
        (2, "llama2c", open(&models.join("one.bin"))?.tokenizer.as_bytes().to_vec()),
    ] {
        seed("tokenizer", name, Some(way), &json)?;
    }

    seed("training", "state", Some(0), &file("run/train_state.json")?)?;
    seed("training", "optimizer", Some(1), &in_parts(&file("run/optimizer.safetensors")?))?;
    seed("tokens", "narrow", None, &token_file(&tokens(60), 2, 260))?;
    seed("tokens", "wide", None, &token_file(&[1, 70_000, 3, 4, 5, 6, 7], 4, 70_001))?;

    let x = Tensor::arange(0f32, 2.0 * 7.0 * 4.0, &Device::Cpu)?.reshape((1, 2, 7, 4))?;
    let x = (x * 0.03)?;
    for (i, spec) in ["favor:m=8", "favor:m=8,window=4,sinks=1", "softmax", "softmax:window=4"].into_iter().enumerate()
    {
        let config: AttentionConfig = spec.parse().map_err(anyhow::Error::msg)?;
        let attention = config.build(4, 3, DType::F32, &Device::Cpu)?;
        let mut state = State::new();
        attention.extend(Inputs::new(&x, &x, &x), &mut state)?;
        let path = models.join(format!("{i}.safetensors"));
        state.save(&path)?;
        let file = fs::read(path)?;
        seed("state", &format!("{i}-file"), Some(0), &file)?;
        seed("state", &format!("{i}-parts"), Some(1), &in_parts(&file))?;
    }

    for (i, text) in [
        "favor:m=64,map=relu,projection=gaussian,radii=sqrt,window=32,sinks=4,gate,conv",
        "softmax:window=32,sinks=4,output-gate,output-norm,mup-scale",
        "softmax+favor:map=limit-4/2",
        "uniform:gate",
        "none",
        "favor-window:map=hedgehog",
        "constant",
        "one-cycle:div=10,final_div=100,warmup_fraction=0.1",
        "warmup-cosine:warmup_steps=100,min_fraction=0.1",
        "tinystories",
    ]
    .into_iter()
    .enumerate()
    {
        seed("names", &i.to_string(), None, text.as_bytes())?;
    }

    let story = "One day, é 日本 came.\n\nAnother line.\n<|endoftext|>\n";
    let stories: String = (0..40).map(|i| format!("{i} {story}")).collect();
    seed("text", "stories", Some(0), stories.as_bytes())?;
    seed("text", "whole", Some(0), stories.replace("<|endoftext|>", "").repeat(4).as_bytes())?;
    let line = json!({"step": 1, "epoch": 0, "tokens": 128, "train_loss": 5.5, "learning_rate": 1e-3,
        "gradient_norm": 0.7, "val_loss": 5.4, "whole": true});
    seed("text", "log", Some(1), format!("{line}\n{line}\n").as_bytes())?;
    Ok(())
}

//! Files that do not belong together are not put together: each is refused, and the message says
//! which and why.

use std::{fs, path::Path};

use candle_core::{Device, Tensor};
use performer_lm::train::Checkpoint;
use serde_json::Value;

use super::program::{SHORT, fails, json, performer};

const SMALL: [&str; 12] = [
    "--data",
    SHORT,
    "--context",
    "16",
    "--batch-size",
    "4",
    "--vocab-size",
    "300",
    "--attention",
    "softmax",
    "--save-every",
    "1",
];

fn train(dir: &Path, steps: &str, out: &str) {
    let words = [&["train", "--max-steps", steps, "--out", out], &SMALL[..]].concat();
    let done = performer(dir, &words);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn a_run_does_not_go_on_from_files_of_different_steps() {
    let dir = tempfile::tempdir().unwrap();
    train(dir.path(), "2", "two");
    train(dir.path(), "3", "three");
    let file = |run: &str, name: &str| dir.path().join(run).join(name);
    let resume = || performer(dir.path(), &["train", "--resume", "mixed", "--json"]);
    for name in ["model.safetensors", "optimizer.safetensors", "train_state.json"] {
        let _ = fs::remove_dir_all(dir.path().join("mixed"));
        fs::create_dir(dir.path().join("mixed")).unwrap();
        for entry in fs::read_dir(dir.path().join("two")).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, dir.path().join("mixed").join(path.file_name().unwrap())).unwrap();
        }
        assert_eq!(json(&resume())["steps"], 2);
        fs::copy(file("three", name), file("mixed", name)).unwrap();
        let found = resume();
        let culprit = if name == "model.safetensors" { "optimizer.safetensors" } else { name };
        fails(&found, &[culprit, "was not saved together with model.safetensors", "cannot be resumed"]);
        let same = performer(dir.path(), &["generate", "mixed", "--max-tokens", "1"]);
        assert!(same.status.success(), "{name}: the model itself is whole");
    }
}

#[test]
fn tensors_that_the_config_has_no_place_for_are_named() {
    let dir = tempfile::tempdir().unwrap();
    train(dir.path(), "1", "run");
    let path = dir.path().join("run/config.json");
    let text = fs::read(&path).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(config["bias"], true);
    config["bias"] = false.into();
    fs::write(&path, config.to_string()).unwrap();
    for command in [
        &["eval", "run", "--data", SHORT][..],
        &["generate", "run"],
        &["export", "run", "--out", "hf"],
        &["convert", "run", "--attention", "favor:m=4,map=learned", "--data", SHORT, "--out", "student"],
    ] {
        fails(&performer(dir.path(), command), &["the weights hold model.layers.0.mlp.down_proj.bias", "no place"]);
    }
    fs::write(&path, &text).unwrap();
    let model = dir.path().join("run");
    let mut checkpoint = Checkpoint::load(&model, &Device::Cpu).unwrap();
    let more = Tensor::zeros(3, candle_core::DType::F32, &Device::Cpu).unwrap();
    checkpoint.tensors.insert("model.layers.2.surplus".into(), more);
    checkpoint.save(&model, None).unwrap();
    let refused = performer(dir.path(), &["generate", "run"]);
    fails(&refused, &["model.layers.2.surplus", "1 such"]);
}

//! What can be done after a training: go on with it from any folder, train its model further, and
//! continue a text as far as the model has positions.

use std::{fs, sync::atomic::AtomicBool};

use candle_core::Device;
use performer_lm::{
    config::{ModelConfig, Preset, TrainingConfig},
    data::prepare,
    listener::Silent,
    train::{RunOptions, Trainer, saved_data},
};
use serde_json::Value;

use super::program::{SHORT, command, fails, json, performer};

const SMALL: [&str; 8] = ["--context", "16", "--batch-size", "4", "--attention", "softmax", "--vocab-size", "300"];

#[test]
fn equal_trainings_give_equal_files() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| performer(dir.path(), args);
    let train = |out| [&["train", "--data", SHORT, "--max-steps", "3", "--out", out], &SMALL[..]].concat();
    let convert = ["convert", "one", "--attention", "favor:m=4,map=learned", "--data", SHORT];
    let tiny = ["--transfer-steps", "2", "--calibrate-tokens", "64", "--measure-tokens", "64", "--out"];
    for out in ["one", "two"] {
        assert!(run(&train(out)).status.success());
        let student = format!("{out}-converted");
        assert!(run(&[&convert[..], &tiny, &[&student]].concat()).status.success());
    }
    let file = |out: &str| fs::read(dir.path().join(out).join("model.safetensors")).unwrap();
    assert!(file("one") == file("two"), "two equal models differ");
    assert!(file("one-converted") == file("two-converted"), "two equal conversions differ");
    // Their times are there, and differ.
    let seconds = |out: &str| -> Value {
        let state = fs::read(dir.path().join(out).join("train_state.json")).unwrap();
        serde_json::from_slice::<Value>(&state).unwrap()["epoch_seconds"].clone()
    };
    assert!(seconds("one").is_array() && seconds("one") != seconds("two"));
    // A state that is changed otherwise is another one.
    let path = dir.path().join("two/train_state.json");
    let mut state: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    state["epoch_seconds"] = serde_json::json!([1.0]);
    fs::write(&path, state.to_string()).unwrap();
    assert_eq!(json(&run(&["train", "--resume", "two", "--json"]))["steps"], 3);
    state["step"] = 2.into();
    fs::write(&path, state.to_string()).unwrap();
    fails(&run(&["train", "--resume", "two"]), &["train_state.json was not saved together"]);
}

#[test]
fn a_run_goes_on_from_another_folder() {
    let dir = tempfile::tempdir().unwrap();
    let project = dir.path().join("project");
    fs::create_dir_all(project.join("texts")).unwrap();
    fs::create_dir(dir.path().join("elsewhere")).unwrap();
    let text: String = (0..2000).map(|i| format!("Word {} and word {}.\n", i % 97, i % 89)).collect();
    fs::write(project.join("texts/mine.txt"), text).unwrap();
    let at = |folder: &str, args: &[&str]| {
        let mut command = command(dir.path(), args);
        command.current_dir(dir.path().join(folder)).output().unwrap()
    };
    let data = ["--data", "texts/mine.txt", "--max-steps", "2", "--out", "runs/one"];
    let begun = at("project", &[&["train", "--json"], &data[..], &SMALL].concat());
    let resume = |folder: &str, run: &str| json(&at(folder, &["train", "--resume", run, "--json"]));
    assert_eq!(resume("elsewhere", "../project/runs/one")["val_loss"], json(&begun)["val_loss"]);
    assert_eq!(resume("", "project/runs/one")["steps"], 2);
    // The project may move as a whole; where the run goes alone, the data must be named.
    fs::rename(&project, dir.path().join("moved")).unwrap();
    assert_eq!(resume("", "moved/runs/one")["steps"], 2);
    assert_eq!(resume("moved/runs/one", ".")["steps"], 2);
    fs::rename(dir.path().join("moved/runs/one"), dir.path().join("alone")).unwrap();
    fails(&at("", &["train", "--resume", "alone"]), &["texts/mine.txt"]);
    let named = at("", &["train", "--resume", "alone", "--data", "moved/texts/mine.txt", "--json"]);
    assert_eq!(json(&named)["steps"], 2);
}

/// A library may train on data that have no name on a command line.
#[test]
fn a_run_on_data_in_memory_goes_on_with_data_that_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let data = prepare(&SHORT.parse().unwrap(), 300, None, &Silent).unwrap();
    let (model, training) = Preset::Seed.load().unwrap();
    let model = ModelConfig { hidden_size: 16, heads: 2, kv_heads: 2, feed_forward_size: 32, context: 16, ..model };
    let training = TrainingConfig { max_steps: Some(2), batch_size: 4, micro_batch: 4, ..training };
    let out = dir.path().join("run");
    Trainer::new(&model, &training, &data, RunOptions::new(&out)).unwrap().run().unwrap().expect("nobody stops it");
    fails(
        &performer(dir.path(), &["train", "--resume", "run"]),
        &["does not say what data it was trained on: name them by --data"],
    );
    let resume = |data: &str| performer(dir.path(), &["train", "--resume", "run", "--data", data, "--json"]);
    fails(&resume("sample"), &["was trained on other data"]);
    assert_eq!(json(&resume(SHORT))["steps"], 2);
    // A resume that names no data, as from a library, does not take the name away.
    let stop = AtomicBool::new(true);
    let resumed = Trainer::resume(&data, RunOptions { stop: &stop, ..RunOptions::new(&out) }).unwrap().run().unwrap();
    assert!(resumed.is_none_or(|report| report.steps == 2));
    assert_eq!(saved_data(&out).unwrap().named, Some(SHORT.parse().unwrap()));
}

#[test]
fn a_finished_model_is_trained_further_from_its_weights() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| performer(dir.path(), args);
    let begin = ["train", "--data", SHORT, "--max-steps", "30", "--learning-rate", "0.01", "--out", "first", "--json"];
    let first = json(&run(&[&begin[..], &SMALL].concat()));
    let further = |more: &[&str]| {
        let words = ["train", "--from", "first", "--data", SHORT, "--batch-size", "4", "--schedule", "constant"];
        run(&[&words[..], more].concat())
    };
    let before = fs::read(dir.path().join("first/model.safetensors")).unwrap();
    // At a rate of nearly nothing, it is the same model still.
    let still = json(&further(&["--max-steps", "1", "--learning-rate", "1e-12", "--out", "still", "--json"]));
    let loss = |report: &Value| report["val_loss"].as_f64().unwrap();
    assert!((loss(&still) - loss(&first)).abs() < 1e-5, "{} and {}", loss(&still), loss(&first));
    let more = json(&further(&["--max-steps", "60", "--learning-rate", "0.01", "--out", "more", "--json"]));
    assert!(loss(&more) < loss(&first) - 0.05, "{} after {}", loss(&more), loss(&first));
    assert_eq!(fs::read(dir.path().join("first/model.safetensors")).unwrap(), before);
    // The key has what it began with, and it can be resumed.
    assert!(more["key"]["initial"].is_string() && first["key"].get("initial").is_none(), "{}", more["key"]);
    let resumed = json(&run(&["train", "--resume", "more", "--json"]));
    assert_eq!((&resumed["val_loss"], &resumed["key"]), (&more["val_loss"], &more["key"]));

    // Weights that are not finite are refused before anything is written.
    assert!(run(&["export", "first", "--out", "hf"]).status.success());
    let file = dir.path().join("hf/model.safetensors");
    let mut weights = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    for tensor in weights.values_mut() {
        *tensor = (&*tensor * f64::INFINITY).unwrap();
    }
    candle_core::safetensors::save(&weights, &file).unwrap();
    fails(&run(&["train", "--from", "hf", "--data", SHORT, "--out", "nan"]), &["not finite", "is damaged"]);
    assert!(!dir.path().join("nan/model.safetensors").exists());

    fails(&further(&["--out", "first", "--overwrite"]), &["the model itself"]);
    fails(&further(&["--context", "12", "--out", "other"]), &["learned positions keeps its context of 16"]);
    assert_eq!(further(&["--attention", "favor"]).status.code(), Some(2));
}

#[test]
fn a_text_beyond_the_models_positions_is_said_before_it_is_printed() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| performer(dir.path(), args);
    let train = ["train", "--data", SHORT, "--max-steps", "1", "--out", "run"];
    assert!(run(&[&train[..], &SMALL].concat()).status.success());
    let long = "Once upon a time there was a hen. ".repeat(9);
    let refused = run(&["generate", "run", "--prompt", &long]);
    fails(&refused, &["the prompt has", "positions for 15", "leave out"]);

    let written = run(&["generate", "run", "--prompt", "x", "--max-tokens", "99", "--temperature", "0"]);
    let said = String::from_utf8(written.stderr).unwrap();
    assert!(said.starts_with("the model has positions for 15 tokens after this prompt, not for 99\n"), "{said}");
    let few = run(&["generate", "run", "--prompt", "x", "--max-tokens", "15"]);
    assert!(few.status.success() && !String::from_utf8(few.stderr).unwrap().contains("positions"));
}

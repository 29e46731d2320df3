//! Settings reach what they are said to set, and files of an earlier measurement with other
//! settings are not left beside those of a new one.

use std::fs;

use serde_json::{Value, json};

use super::program::{SHORT, command, fails, json as value, performer};

const SMALL: [&str; 6] = ["--data", SHORT, "--context", "16", "--batch-size", "4"];

/// A model's head has the vocabulary that is asked for, and so has the one whose steps are timed.
#[test]
fn steps_are_timed_with_the_vocabulary_that_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let bench = ["bench", "train", "--steps", "2", "--attention", "softmax", "--preset", "code", "--json"];
    let of = |more: &[&'static str]| {
        let report = value(&performer(dir.path(), &[&bench[..], &SMALL, more].concat()));
        report["config"]["vocab_size"].as_u64().unwrap()
    };
    assert_eq!(of(&["--vocab-size", "300"]), 300);
    let model = ["train", "--attention", "softmax", "--vocab-size", "320", "--max-steps", "1", "--out", "model"];
    assert!(performer(dir.path(), &[&model[..], &SMALL].concat()).status.success());
    let config: Value = serde_json::from_slice(&fs::read(dir.path().join("model/config.json")).unwrap()).unwrap();
    assert_eq!(of(&["--tokenizer", "model/tokenizer.json"]), config["vocab_size"].as_u64().unwrap());
}

/// A configuration may come from a model with another tokenizer. A model that is trained by it has
/// the borders of documents of its own.
#[test]
fn a_configuration_brings_no_borders_of_another_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let train = ["train", "--attention", "softmax", "--vocab-size", "300", "--max-steps", "1"];
    assert!(performer(dir.path(), &[&train[..], &SMALL, &["--out", "first"]].concat()).status.success());
    let path = dir.path().join("first/config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    assert!(config.get("borders").is_none_or(Value::is_null), "{config}");
    config["borders"] = json!({"begin": 7});
    fs::write(dir.path().join("other.json"), config.to_string()).unwrap();
    let second = [&train[..], &SMALL, &["--config", "other.json", "--out", "second"]].concat();
    assert!(performer(dir.path(), &second).status.success());
    let second: Value = serde_json::from_slice(&fs::read(dir.path().join("second/config.json")).unwrap()).unwrap();
    assert!(second.get("borders").is_none_or(Value::is_null), "{second}");
}

/// An attention that a task leaves out is not asked whether its features could be reached in it.
#[test]
fn what_a_task_leaves_out_keeps_no_other_from_it() {
    let dir = tempfile::tempdir().unwrap();
    let tasks = ["lab", "tasks", "--task", "listops", "--length", "32", "--steps", "1", "--seeds", "1", "--json"];
    let of = |attentions: &[&'static str]| {
        let given: Vec<&str> = attentions.iter().flat_map(|attention| ["--attention", attention]).collect();
        performer(dir.path(), &[&tasks[..], &given].concat())
    };
    let data = value(&of(&["favor:m=8,map=learned,window=32", "favor:m=8"]));
    let runs = data["tasks"]["tasks"][0]["runs"].as_array().unwrap();
    assert_eq!(runs.iter().map(|run| run["attention"].as_str().unwrap()).collect::<Vec<_>>(), ["favor:m=8"]);
    fails(&of(&["favor:m=8", "favor:m=0"]), &["favor:m=0"]);
}

/// Charts and tables that a second measurement does not make are not those of the first.
#[test]
fn a_second_measurement_keeps_no_chart_and_no_table_of_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let bench = ["bench", "attention", "--tokens", "16", "--features", "8", "--milliseconds", "0", "--out", "bench"];
    assert!(performer(dir.path(), &bench).status.success());
    assert!(dir.path().join("bench/attention-both.svg").exists());
    assert!(performer(dir.path(), &[&bench[..], &["--no-backward"]].concat()).status.success());
    let left = |name: &str| dir.path().join(name).exists();
    assert!(
        left("bench/attention-forward.svg") && !left("bench/attention-both.svg") && !left("bench/attention-both.png")
    );

    let compare = ["compare", "--max-steps", "1", "--attention", "softmax", "--vocab-size", "300", "--out", "compare"];
    let compare = |seeds: &'static str| performer(dir.path(), &[&compare[..], &SMALL, &["--seeds", seeds]].concat());
    assert!(compare("1").status.success());
    let table = fs::read(dir.path().join("compare/table.md")).unwrap();
    // A folder where the second seed's run would be stops the comparison after the first.
    let runs = fs::read_dir(dir.path().join("compare")).unwrap().map(|entry| entry.unwrap().path());
    let first = runs.filter(|path| path.is_dir()).find(|path| path.to_str().unwrap().ends_with("seed1")).unwrap();
    let second = first.to_str().unwrap().replace("seed1", "seed2");
    fs::write(&second, "in the way").unwrap();
    assert!(!compare("1,2").status.success());
    assert_eq!(fs::read(dir.path().join("compare/table.md")).unwrap(), table, "its numbers are those of the file");
    fs::remove_file(&second).unwrap();
    assert!(compare("1,2").status.success());
    assert_ne!(fs::read(dir.path().join("compare/table.md")).unwrap(), table);
}

/// A run names the data that it trains on, not how it was found: it goes on with these when other
/// data are there by then.
#[test]
fn a_run_that_was_given_no_data_names_what_it_found() {
    let dir = tempfile::tempdir().unwrap();
    let train = ["train", "--attention", "softmax", "--vocab-size", "300", "--max-steps", "1", "--out", "run"];
    let mut command = command(dir.path(), &[&train[..], &SMALL[2..]].concat());
    assert!(command.env("HF_HOME", dir.path().join("hub")).output().unwrap().status.success());
    let state: Value = serde_json::from_slice(&fs::read(dir.path().join("run/train_state.json")).unwrap()).unwrap();
    assert_eq!(state["data_spec"], "sample");
    // A first save that was interrupted is one that the training goes on from.
    fs::rename(dir.path().join("run/train_state.json"), dir.path().join("run/train_state.json.new")).unwrap();
    fs::remove_file(dir.path().join("run/metrics.json")).unwrap();
    let same = [&train[..], &["--data", "sample"], &SMALL[2..]].concat();
    fails(&performer(dir.path(), &same), &["--resume run"]);
    fails(&performer(dir.path(), &["train", "--data", SHORT, "--deadline", "1e20"]), &["at most 31536000"]);
}

/// What a step multiplies by is counted, not the rows that are looked up.
#[test]
fn operations_of_a_step_are_those_of_products() {
    let dir = tempfile::tempdir().unwrap();
    let bench = ["bench", "train", "--steps", "1", "--attention", "softmax", "--preset", "seed", "--json"];
    let report = value(&performer(dir.path(), &[&bench[..], &SMALL, &["--vocab-size", "300"]].concat()));
    let (config, point) = (&report["config"], &report["points"][0]);
    let number = |value: &Value| value.as_f64().unwrap();
    assert_eq!((&config["positions"], &config["tied_head"]), (&json!("learned"), &json!(false)));
    let looked_up = (number(&config["vocab_size"]) + number(&config["context"])) * number(&config["hidden_size"]);
    let counted = number(&point["gflops"]) * 1e9 / number(&point["tokens_per_second"]) / 6.0;
    assert!((counted - (number(&point["params"]) - looked_up)).abs() < 1.0, "{counted}");
}

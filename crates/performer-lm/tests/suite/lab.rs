//! These tests run the lab as a user does. They require finite numbers, a page with every section,
//! charts in files, and one clear error for bad options.

use std::{
    path::Path,
    process::{Command, Output},
};

use serde_json::Value;

use super::program::{fails, json, performer};

fn lab(folder: &Path, args: &[&str]) -> Output {
    performer(folder, &[&["lab"], args].concat())
}

/// Counts numbers and refuses null: JSON has no NaN and no infinity, which would be written as
/// null.
fn numbers(value: &Value, path: &str) -> usize {
    match value {
        Value::Null => {
            // These values may be absent: a closed form that is not known, or features that are not
            // enough.
            let absent = ["closed", "features", "map", "errors", "worst_head", "window", "command"];
            assert!(absent.iter().any(|name| path.ends_with(name)), "{path} is null");
            0
        }
        Value::Number(_) => 1,
        Value::Array(all) => all.iter().enumerate().map(|(i, v)| numbers(v, &format!("{path}/{i}"))).sum(),
        Value::Object(all) => all.iter().map(|(key, v)| numbers(v, &format!("{path}/{key}"))).sum(),
        _ => 0,
    }
}

/// Trains a softmax model of two layers for two steps on the sample.
fn model(folder: &Path) {
    let args = "train --data sample --max-steps 2 --context 32 --batch-size 4 --attention softmax --out model";
    let output = Command::new(env!("CARGO_BIN_EXE_performer-lm"))
        .args(args.split(' '))
        .env("PERFORMER_CACHE", folder)
        .current_dir(folder)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn errors_are_measured_drawn_and_explained() {
    let dir = tempfile::tempdir().unwrap();
    model(dir.path());
    let sizes = ["--quick", "--head-dim", "6", "--windows", "1", "--kernel-draws", "20", "--calibrate-tokens", "500"];
    let quick = [&["error", "--checkpoint", "model", "--out", "out", "--json"], &sizes[..]].concat();
    let found = json(&lab(dir.path(), &quick))["error"].clone();
    let count = numbers(&found, "error");
    assert!(count > 2000, "{count} numbers");

    // The reference lines are there. Estimates can be better or worse than them.
    let figure = &found["figure"][0];
    let uniform = figure["uniform"].as_f64().unwrap();
    assert!(uniform > 0.0);
    let medians: Vec<f64> = figure["curves"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|curve| curve["points"].as_array().unwrap())
        .map(|point| point["mse"]["median"].as_f64().unwrap())
        .collect();
    assert!(medians.iter().all(|mse| *mse > 0.0));
    assert!(found["two_pi"][0]["limit"].as_f64() > found["two_pi"][0]["uniform"].as_f64());
    // Two hundred features of six dimensions are better than uniform attention.
    let maps = &found["maps"]["gaussian"]["maps"];
    let positive = maps["estimators"][0]["points"].as_array().unwrap().last().unwrap();
    assert!(positive["rows"]["median"].as_f64() < maps["uniform"]["rows"].as_f64(), "{positive}");
    assert_eq!(found["worth"].as_array().unwrap().len(), 16);

    let page = std::fs::read_to_string(dir.path().join("out/report.html")).unwrap();
    for section in [
        "unit Gaussian entries, L=128",
        "rows of length 1",
        "A factor of 2π too many",
        "closed forms and measurements",
        "Orthogonal rows and theorem 2",
        "signs corrected",
        "Maps over features, rows: unit Gaussian",
        "Maps over the logits&apos; scale",
        "Projections over features: heads of model",
        "What is worth it",
    ] {
        assert!(page.contains(section), "'{section}' is not on the page");
    }
    assert_eq!(page.matches("<svg xmlns").count(), page.matches("<figure").count());
    assert!(!page.contains("http://") || page.matches("http://").count() == page.matches("http://www.w3.org").count());
    assert!(!page.contains("NaN"));
    let saved: Value = serde_json::from_slice(&std::fs::read(dir.path().join("out/data.json")).unwrap()).unwrap();
    assert_eq!(saved["error"], found);
    for chart in ["figure", "two-pi", "kernel", "orthogonality", "unsigned", "maps-rows", "heads-rows", "scale"] {
        let png = std::fs::read(dir.path().join(format!("out/error-{chart}.png"))).unwrap();
        assert!(png.starts_with(b"\x89PNG"), "{chart}");
    }

    // The same seed gives the same numbers on any number of threads.
    let again = [&["error", "--checkpoint", "model", "--json", "--threads", "1"], &sizes[..]].concat();
    assert_eq!(json(&lab(dir.path(), &again))["error"], found);
}

#[test]
fn suggestions_are_commands_that_convert() {
    let dir = tempfile::tempdir().unwrap();
    model(dir.path());
    // An untrained model has almost uniform attention, so any features suffice.
    let wanted = ["suggest", "--checkpoint", "model", "--draws", "2", "--calibrate-tokens", "500", "--error", "0.5"];
    let found = json(&lab(dir.path(), &[&wanted[..], &["--out", "out", "--json"]].concat()))["suggest"].clone();
    numbers(&found, "suggest");
    for layer in found["layers"].as_array().unwrap() {
        assert_eq!(layer["features"], 16, "{layer}");
        assert!(layer["errors"]["rows"].as_f64() <= Some(0.5));
    }
    let command = found["command"].as_str().unwrap();
    let page = std::fs::read_to_string(dir.path().join("out/report.html")).unwrap();
    assert!(page.contains(command), "{command}");
    let mut words: Vec<&str> = command.split(' ').skip(1).collect();
    words.extend(["--calibrate-tokens", "500", "--measure-tokens", "200", "--json"]);
    let converted = Command::new(env!("CARGO_BIN_EXE_performer-lm"))
        .args(words)
        .env("PERFORMER_CACHE", dir.path())
        .current_dir(dir.path())
        .output()
        .unwrap();
    assert!(converted.status.success(), "{}", String::from_utf8_lossy(&converted.stderr));

    // No features meet an error this small, so nothing is converted.
    let strict = [&wanted[..7], &["--error", "1e-9", "--most-features", "16", "--json"]].concat();
    let found = json(&lab(dir.path(), &strict))["suggest"].clone();
    assert!(found["command"].is_null() && found["layers"][0]["attention"] == "softmax", "{found}");
}

#[test]
fn bad_options_get_one_clear_error() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| lab(dir.path(), args);
    fails(&run(&["error", "--draws", "1"]), &["draws is 1", "at least 2"]);
    // More than can be counted, as a number of problems times so many.
    for command in [&["error"][..], &["suggest", "--checkpoint", "model"]] {
        fails(
            &run(&[command, &["--draws", "9223372036854775807"]].concat()),
            &["draws is 9223372036854775807", "at most"],
        );
    }
    fails(&run(&["error", "--tokens", "3"]), &["tokens is 3", "16"]);
    fails(&run(&["error", "--head-dim", "0"]), &["head-dim is 0"]);
    fails(&run(&["error", "--features", "128,1"]), &["features is 1"]);
    fails(&run(&["error", "--quick", "--checkpoint", "nowhere"]), &["nowhere", "no file or folder"]);
    fails(&run(&["suggest", "--checkpoint", "nowhere", "--error", "2"]), &["allowed is 2", "between 0 and 1"]);
    fails(&run(&["suggest", "--checkpoint", "nowhere", "--map", "taylor2"]), &["taylor2", "dense"]);
    fails(&run(&["suggest", "--checkpoint", "nowhere", "--map", "dense,positive"]), &["fitted", "--map"]);
    fails(&run(&["suggest"]), &["--checkpoint"]);
    // Without a context a window is held to that of the model, which is read first.
    fails(&run(&["suggest", "--checkpoint", "nowhere", "--window", "700"]), &["nowhere", "no file or folder"]);
    let short = ["suggest", "--checkpoint", "nowhere", "--window", "700", "--context", "256"];
    fails(&run(&short), &["a window is to have 700 tokens", "fewer than the context"]);
    model(dir.path());
    fails(&run(&["error", "--quick", "--checkpoint", "model", "--context", "5"]), &["--context is 5", "at least 16"]);
    let wide = ["suggest", "--checkpoint", "model", "--data", "sample", "--window", "300"];
    fails(&run(&wide), &["a window of 300 tokens", "leaves nothing to features"]);
    std::fs::write(dir.path().join("short.txt"), "A cat.").unwrap();
    fails(&run(&["suggest", "--checkpoint", "model", "--data", "short.txt"]), &["too little"]);
}

/// Windows and gates need a causal mask, so they take no part in a task that is read from both
/// sides, and nothing is given twice.
#[test]
fn attentions_that_need_a_mask_stay_out_of_tasks_without_one() {
    let dir = tempfile::tempdir().unwrap();
    let tasks = |more: &[&str]| {
        let always = ["lab", "tasks", "--steps", "1", "--seeds", "1", "--threads", "1", "--out", "tasks"];
        performer(dir.path(), &[&always[..], more].concat())
    };
    let gated = ["--task", "listops", "--attention", "favor:m=4", "--attention", "favor:m=4,gate"];
    let done = tasks(&gated);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let report: Value = serde_json::from_slice(&std::fs::read(dir.path().join("tasks/data.json")).unwrap()).unwrap();
    let runs = report["tasks"]["tasks"][0]["runs"].as_array().expect("runs");
    assert_eq!(runs.iter().map(|run| &run["attention"]).collect::<Vec<_>>(), ["favor:m=4"]);
    for attention in ["softmax:window=4", "favor:m=4,gate"] {
        fails(&tasks(&["--task", "listops", "--attention", attention]), &["listops", "needs a causal mask"]);
    }
    fails(
        &tasks(&["--task", "copying", "--attention", "softmax", "--attention", "softmax"]),
        &["attention softmax is given twice"],
    );
    fails(&tasks(&["--task", "copying", "--proteins", "p.fasta"]), &["--proteins belongs to the task protein"]);
    let seeds = ["lab", "ablate", "--data", "sample", "--seeds", "1,1", "--out", "ablated"];
    fails(&performer(dir.path(), &seeds), &["seed 1 is given twice"]);
}

#[test]
fn what_cannot_be_read_is_found_out_before_the_first_experiment() {
    let dir = tempfile::tempdir().unwrap();
    for option in ["--text", "--proteins", "--data"] {
        let output = lab(dir.path(), &["all", "--quick", option, "none.txt"]);
        fails(&output, &["none.txt"]);
        assert!(!String::from_utf8_lossy(&output.stderr).contains("== "), "{option}: an experiment had begun");
    }
}

//! These tests run the program as a user does, on a short text or the embedded sample.

use std::path::Path;

use serde_json::Value;

use super::program::{SHORT, command, fails, json, performer};

const SMALL: [&str; 8] = ["--data", SHORT, "--max-steps", "2", "--context", "16", "--batch-size", "4"];

fn train<'a>(extra: &[&'a str]) -> Vec<&'a str> {
    [&["train"], &SMALL[..], extra].concat()
}

/// As [`train`], on all of the sample.
fn train_on_sample<'a>(extra: &[&'a str]) -> Vec<&'a str> {
    [&["train", "--data", "sample"], &SMALL[2..], extra].concat()
}

#[test]
fn train_eval_generate() {
    let dir = tempfile::tempdir().unwrap();
    let words = train_on_sample(&["--attention", "favor:m=16", "--out", "run", "--json"]);
    let report = json(&performer(dir.path(), &words));
    let losses = ["val_loss", "perplexity", "bits_per_byte"];
    for key in losses.iter().chain(&["attention", "seed", "params", "epoch_seconds", "tokens_per_second", "corpus"]) {
        assert!(report.get(key).is_some(), "{key} is missing in {report}");
    }
    assert_eq!((&report["attention"], &report["corpus"]), (&"favor".into(), &"sample".into()));

    let config: Value = serde_json::from_slice(&std::fs::read(dir.path().join("run/config.json")).unwrap()).unwrap();
    assert_eq!(config["attention"]["features"], 16);
    for file in ["tokenizer.json", "model.safetensors", "metrics.jsonl", "metrics.json"] {
        assert!(dir.path().join("run").join(file).exists(), "{file}");
    }

    let text = "A fox met a hen.\n\nThe hen said hello, and both were glad. 🦊";
    std::fs::write(dir.path().join("new.txt"), text).unwrap();
    let eval = json(&performer(dir.path(), &["eval", "run", "--data", "new.txt", "--json"]));
    assert_eq!(eval["bytes"], text.len());
    let ratio = eval["val_loss"].as_f64().unwrap() * eval["tokens"].as_f64().unwrap()
        / std::f64::consts::LN_2
        / text.len() as f64;
    assert!((eval["bits_per_byte"].as_f64().unwrap() - ratio).abs() < 1e-9);
    let held_out = json(&performer(dir.path(), &["eval", "run", "--data", "sample", "--json"]));
    assert!((held_out["val_loss"].as_f64().unwrap() - report["val_loss"].as_f64().unwrap()).abs() < 1e-9);
    // Of the sample, no more is encoded than what is held out; a file of that name is not meant.
    std::fs::write(dir.path().join("sample"), text).unwrap();
    let cache = dir.path().join("alone");
    let alone =
        command(dir.path(), &["eval", "run", "--data", "sample", "--json"]).env("PERFORMER_CACHE", &cache).output();
    assert_eq!(json(&alone.unwrap()), held_out);
    assert_eq!(std::fs::read_dir(&cache).unwrap().count(), 1);

    let story =
        |seed| performer(dir.path(), &["generate", "run", "--max-tokens", "12", "--prompt", "The cat", "--seed", seed]);
    let (one, same, other) = (story("1"), story("1"), story("2"));
    assert!(one.status.success() && one.stdout.starts_with(b"The cat"));
    assert_eq!(one.stdout, same.stdout);
    assert_ne!(one.stdout, other.stdout);
    // There is no time between tokens of which there is one.
    let one = json(&performer(dir.path(), &["generate", "run", "--max-tokens", "1", "--ignore-end", "--json"]));
    assert_eq!((&one["tokens"], &one["tokens_per_second"]), (&1.into(), &0.0.into()));
    let written =
        json(&performer(dir.path(), &["generate", "run", "--max-tokens", "5", "--temperature", "0", "--json"]));
    assert!(written["tokens"].as_u64().unwrap() <= 5 && written["state_bytes"].as_u64().unwrap() > 0);
}

/// The shipped model ends its story long before 600 tokens, and begins another if it is to go on.
#[test]
fn generation_goes_on_after_the_end_of_a_text_where_it_is_asked_to() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/stories/performer");
    let write = |more: &[&str]| {
        let words = ["generate", model.to_str().unwrap(), "--max-tokens", "600", "--json"];
        json(&performer(Path::new("."), &[&words[..], more].concat()))
    };
    let (one, several) = (write(&[]), write(&["--ignore-end"]));
    let text = |of: &Value| of["text"].as_str().unwrap().to_owned();
    assert!(one["tokens"].as_u64().unwrap() < 600 && !text(&one).contains("\n\n"), "{one}");
    assert_eq!(several["tokens"], 600);
    assert_eq!(text(&several).split("\n\n").next().unwrap(), text(&one));
    assert_eq!(several["state_bytes"], one["state_bytes"]);
}

#[test]
fn a_run_on_the_sample_has_settings_of_its_own_and_ends_with_a_story() {
    let dir = tempfile::tempdir().unwrap();
    let read =
        |file: &str| -> Value { serde_json::from_slice(&std::fs::read(dir.path().join(file)).unwrap()).unwrap() };
    let args = |out| ["train", "--data", "sample", "--max-steps", "1", "--seed", "7", "--out", out];
    let run = performer(dir.path(), &args("run"));
    let (result, rest) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success() && result.starts_with('|') && !result.contains("Once upon"), "{result}{rest}");
    assert_eq!(read("run/config.json")["context"], 128);
    let training = &read("run/train_state.json")["training"];
    assert!(training["epochs"].as_u64().unwrap() > 10, "{training}");
    assert_eq!((&training["batch_size"], &training["learning_rate"]), (&32.into(), &4e-3.into()));
    assert_eq!(rest.matches("\nOnce upon a time").count(), 1, "{rest}");
    for part in
        ["compare with no other text", "generate run --seed 7", "compare --attention softmax --attention favor:m=128"]
    {
        assert!(rest.contains(part), "{part} is not in {rest}");
    }

    // What is asked for is done, on the sample too.
    let own = performer(
        dir.path(),
        &[&args("own")[..], &["--context", "48", "--epochs", "3", "--batch-size", "2", "--learning-rate", "1e-3"]]
            .concat(),
    );
    assert!(own.status.success(), "{}", String::from_utf8_lossy(&own.stderr));
    assert_eq!(read("own/config.json")["context"], 48);
    let training = &read("own/train_state.json")["training"];
    assert_eq!(
        (&training["epochs"], &training["batch_size"], &training["learning_rate"]),
        (&3.into(), &2.into(), &1e-3.into())
    );

    // A text of one's own is trained on as the preset says.
    std::fs::write(dir.path().join("own.txt"), "A fox met a hen. They were glad.\n".repeat(400)).unwrap();
    let data =
        ["train", "--data", "own.txt", "--vocab-size", "300", "--max-steps", "1", "--batch-size", "1", "--out", "text"];
    let text = performer(dir.path(), &data);
    assert!(text.status.success(), "{}", String::from_utf8_lossy(&text.stderr));
    assert_eq!(
        (&read("text/config.json")["context"], &read("text/train_state.json")["training"]["epochs"]),
        (&80.into(), &2.into())
    );
}

#[test]
fn exported_models_are_used_like_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| performer(dir.path(), args);
    // In GPT-2's files queries, keys and values are one tensor, whatever the dimensions of each.
    for attention in ["softmax", "favor:m=16", "favor:m=16,key-dim=6", "favor:m=16+softmax:key-dim=6/2"] {
        let checkpoint = format!("run-{attention}").replace([':', '/'], "-");
        let args = train(&["--attention", attention, "--out", &checkpoint]);
        assert!(run(&args).status.success());
        let folder = format!("{checkpoint}-hf");
        let export = ["export", &checkpoint, "--out", &folder];
        assert!(run(&export).status.success());
        fails(&run(&export), &["holds a model already"]);
        for use_of in
            [&["eval", "--data", "sample", "--json"][..], &["generate", "--temperature", "0", "--max-tokens", "9"]]
        {
            let on = |model: &str| run(&[&use_of[..1], &[model], &use_of[1..]].concat());
            let (first, second) = (on(&checkpoint), on(&folder));
            assert!(first.status.success() && !first.stdout.is_empty());
            assert_eq!(first.stdout, second.stdout);
        }
        let config = std::fs::read_to_string(dir.path().join(&folder).join("config.json")).unwrap();
        assert_eq!(config.contains("\"performer\""), attention != "softmax", "{config}");
    }
    // What an evaluation is of can be told from its JSON.
    let eval = ["eval", "run-favor-m=16,key-dim=6-hf", "--data", "sample", "--max-tokens", "50", "--json"];
    let scored = json(&run(&eval));
    assert_eq!(scored["attention_spec"], "favor:m=16,key-dim=6");
    assert_eq!(scored["leak"], Value::Null);
    let short = ["eval", "run-softmax", "--data", "sample", "--context", "4", "--max-tokens", "100", "--json"];
    let tokens = json(&run(&short))["tokens"].as_u64().unwrap();
    assert!((100..5000).contains(&tokens), "{tokens}");
    fails(&run(&["eval", "run-softmax", "--data", "sample", "--context", "0"]), &["context is 0"]);
    fails(&run(&["generate", "someone/model"]), &["someone/model", "HF_HUB_OFFLINE"]);
}

#[test]
fn compare_writes_a_table_and_a_plot_and_reuses_runs() {
    let dir = tempfile::tempdir().unwrap();
    let attentions = ["softmax", "favor:m=8", "favor:m=8,window=4"].map(|name| ["--attention", name]).concat();
    let mut args = [&["compare", "--seeds", "1,2", "--out", "c"][..], &attentions, &SMALL].concat();
    let table = performer(dir.path(), &args);
    assert!(table.status.success(), "{}", String::from_utf8_lossy(&table.stderr));
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains("softmax") && table.contains("favor:m=8") && table.contains("vs first"), "{table}");
    for part in ["features off", "parameters", "state bytes", "has a +"] {
        assert!(table.contains(part), "{part} is not in {table}");
    }
    let outcome: Value = serde_json::from_slice(&std::fs::read(dir.path().join("c/compare.json")).unwrap()).unwrap();
    assert_eq!(outcome["runs"].as_array().unwrap().len(), 6);
    let [softmax, favor, window] = [0, 1, 2].map(|row| &outcome["summary"][row]);
    // Keys and values of 16 tokens in 2 layers of 64 numbers, in f32.
    assert_eq!((&softmax["state_bytes"], &softmax["state_grows"]), (&Value::from(2 * 2 * 16 * 64 * 4), &true.into()));
    assert!(favor["state_bytes"].as_u64().unwrap() > 0 && favor["state_grows"] == false, "{favor}");
    assert_eq!(softmax["params"], favor["params"]);
    assert!(softmax.get("features_off").is_none(), "{softmax}");
    // What is left without the features: a mean of the values, or the window alone.
    for (row, kept) in [(favor, "uniform"), (window, "softmax:window=4")] {
        let runs = outcome["runs"].as_array().unwrap().iter();
        let runs: Vec<&Value> = runs.filter(|run| run["attention_spec"] == row["attention_spec"]).collect();
        assert!(runs.len() == 2 && runs.iter().all(|run| run["features_off"]["val_loss"] != run["val_loss"]));
        assert_eq!(row["features_off"]["attention_spec"], kept);
        let losses = [0, 1].map(|seed| runs[seed]["features_off"]["val_loss"].as_f64().unwrap());
        assert_eq!(row["features_off"]["val_loss"], (losses[0] + losses[1]) / 2.0);
    }
    assert_eq!(std::fs::read_to_string(dir.path().join("c/table.md")).unwrap(), table);
    assert!(std::fs::read_to_string(dir.path().join("c/loss.svg")).unwrap().contains("favor:m=8"));
    assert!(std::fs::read(dir.path().join("c/loss.png")).unwrap().starts_with(b"\x89PNG"));

    args.push("--json");
    let again = json(&performer(dir.path(), &args));
    assert_eq!(again["runs"], outcome["runs"], "nothing was run again");
    args.extend(["--learning-rate", "0.5"]);
    fails(&performer(dir.path(), &args), &["settings.learning_rate was", "is now 0.5", "--out"]);
}

/// The rate is chosen by the first half of the held-out text, at the first seed, and results are of
/// the second half.
#[test]
fn compare_chooses_a_learning_rate_by_other_text_than_it_reports() {
    let dir = tempfile::tempdir().unwrap();
    let mut args =
        vec!["compare", "--attention", "softmax", "--attention", "favor:m=8", "--seeds", "1,2", "--out", "c"];
    args.extend(["--learning-rates", "1e-6,3e-3", "--json"]);
    args.extend(SMALL);
    let output = performer(dir.path(), &args);
    let notes = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(notes.contains("second for the test") && notes.contains("at the edge"), "{notes}");
    let outcome = json(&output);
    let tried = outcome["learning_rates"].as_array().unwrap();
    let chosen: Vec<bool> = tried.iter().map(|rate| rate["chosen"].as_bool().unwrap()).collect();
    assert_eq!(chosen, [false, true, false, true], "{tried:?}");
    // Two seeds of two attentions, all at the chosen rate.
    assert_eq!(outcome["runs"].as_array().unwrap().len(), 4);
    for run in outcome["runs"].as_array().unwrap() {
        assert_eq!(run["key"]["settings"]["learning_rate"], 3e-3);
        assert_ne!(run["test"]["loss"], run["val_loss"]);
        // Learned positions reach no further than the context of 16 tokens.
        let positions = run["loss_by_position"].as_array().unwrap();
        assert_eq!((positions.len(), &positions[15]["until"]), (16, &16.into()));
    }
    let mean = |i: usize, j: usize| {
        let loss = |i: usize| outcome["runs"][i]["test"]["loss"].as_f64().unwrap();
        (loss(i) + loss(j)) / 2.0
    };
    assert_eq!(outcome["summary"][1]["test"]["loss"], mean(1, 3));
    assert_eq!(outcome["summary"][1]["learning_rate"], 3e-3);
    let table = std::fs::read_to_string(dir.path().join("c/table.md")).unwrap();
    assert!(table.contains("test loss") && table.contains("rate") && table.contains("0.003"), "{table}");
    let chart = |name: &str| std::fs::read_to_string(dir.path().join("c").join(name)).unwrap();
    assert!(chart("positions.svg").contains("context in training"));
    assert!(chart("beside.svg").contains("less that of softmax"));
}

/// A run ends beside those in its folder that differ in their attention alone: in the table, by a
/// story, and in one chart. A run with another seed is none of them.
#[test]
fn a_run_is_shown_beside_those_with_other_attentions() {
    let dir = tempfile::tempdir().unwrap();
    let run = |attention: &str, seed: &str, out: &str| {
        let settings = ["--context", "16", "--batch-size", "8", "--learning-rate", "0.01", "--max-steps", "40"];
        let which = ["--attention", attention, "--seed", seed, "--out", out];
        let done = performer(dir.path(), &[&["train", "--data", "sample"], &settings[..], &which].concat());
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let chart = std::fs::read_to_string(dir.path().join(out).join("loss.svg")).unwrap();
        assert!(dir.path().join(out).join("loss.png").exists());
        (text(done.stdout), text(done.stderr), chart)
    };
    let alone = run("softmax", "1", "runs/softmax");
    assert!(!alone.0.contains("beside it") && alone.1.contains("train --attention favor"), "{alone:?}");
    run("favor:m=8", "2", "runs/another-seed");

    let (table, told, chart) = run("favor:m=16", "1", "runs/favor");
    let row = table.lines().find(|line| line.contains("attention")).unwrap();
    let cells: Vec<&str> = row.split('|').map(str::trim).filter(|cell| !cell.is_empty()).collect();
    assert_eq!(cells, ["attention", "favor:m=16", "softmax"], "{table}");
    for part in ["favor:m=16 writes:", "softmax writes:"] {
        assert!(told.contains(part), "{part} is not in {told}");
    }
    assert!(chart.contains("favor:m=16") && chart.contains("softmax") && !chart.contains("favor:m=8"));

    // A run whose log or model was removed is passed over, and does not make another one fail.
    for file in ["metrics.jsonl", "model.safetensors"] {
        std::fs::rename(dir.path().join("runs/softmax").join(file), dir.path().join(file)).unwrap();
        let (table, ..) = run("favor:m=12", "1", &format!("runs/without-{file}"));
        assert!(!table.contains("softmax") && table.contains("favor:m=16"), "{table}");
        std::fs::rename(dir.path().join(file), dir.path().join("runs/softmax").join(file)).unwrap();
    }
    // One that is damaged is left out, which is said.
    for (file, damaged) in [("metrics.jsonl", "{\n{\n"), ("model.safetensors", "no weights")] {
        let path = dir.path().join("runs/softmax").join(file);
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, damaged).unwrap();
        let (_, told, _) = run("favor:m=10", "1", &format!("runs/damaged-{file}"));
        assert!(told.contains("softmax is left out") && !told.contains("softmax writes:"), "{told}");
        assert!(told.contains("favor:m=10 writes:"), "{told}");
        std::fs::write(&path, whole).unwrap();
    }
}

/// The softmax run that comes with the program has the settings and the text of a first run, or it
/// would never be shown beside one. If this fails, the head of `scripts/first_run.py` says how to
/// make it again.
#[test]
fn the_run_that_comes_with_the_program_is_a_first_run() {
    let dir = tempfile::tempdir().unwrap();
    let first = ["train", "--data", "sample", "--attention", "favor", "--max-steps", "1", "--json"];
    let mut key = json(&performer(dir.path(), &first))["key"].take();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/first-run.json");
    let mut recorded: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let mut recorded = recorded["report"]["key"].take();
    for key in [&mut key, &mut recorded] {
        assert!(!key["model"]["attention"].take().is_null() && !key["revision"].take().is_null(), "{key}");
        key["settings"]["max_steps"].take();
    }
    assert_eq!(key, recorded);
}

/// A hybrid is named as it was given, everywhere; and is evaluated with its features off too.
#[test]
fn a_hybrid_is_trained_shown_and_evaluated_with_its_features_off() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| performer(dir.path(), args);
    let hybrid = "favor:m=8,window=4,sinks=1+softmax/2";
    let report = json(&run(&train_on_sample(&["--attention", hybrid, "--json"])));
    assert_eq!((&report["attention"], &report["attention_spec"]), (&"hybrid".into(), &hybrid.into()));
    assert_eq!(report["key"]["model"]["attention_by_layer"]["1"]["kind"], "softmax");
    assert_eq!(report["state_grows"], true);
    let control = "softmax:window=4,sinks=1+softmax/2";
    assert_eq!(report["features_off"]["attention_spec"], control);

    let folder = "runs/seed-favor-m8-window-4-sinks-1-softmax-2-seed42";
    assert!(dir.path().join(folder).join("model.safetensors").exists());
    let eval = ["eval", folder, "--data", "sample", "--features-off"];
    let found = json(&run(&[&eval[..], &["--json"]].concat()));
    assert_eq!(found["features_off"]["val_loss"], report["features_off"]["val_loss"]);
    assert_ne!(found["features_off"]["val_loss"], found["val_loss"]);
    let table = run(&[&eval[..], &["--by-position"]].concat());
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains(hybrid) && table.contains(control), "{table}");
    assert!(json(&run(&[&eval[..4], &["--json"]].concat())).get("features_off").is_none());
    let words = run(&["generate", folder, "--max-tokens", "2"]);
    let said = String::from_utf8_lossy(&words.stderr).into_owned();
    assert!(said.contains("in 1 of 2 layers"), "{said}");

    assert!(run(&train(&["--attention", "softmax", "--out", "exact"])).status.success());
    let exact = run(&["eval", "exact", "--data", "sample", "--features-off"]);
    fails(&exact, &["--features-off", "no layer of exact has linear attention"]);
    fails(&run(&train(&["--attention", "favor+softmax/3"])), &["the model has 2 layers", "at most 2"]);
    fails(&run(&train(&["--attention", "favor+softmax/1"])), &["give softmax alone"]);
}

/// A trained model cut to windows has the loss of a model that has them, with the same weights.
#[test]
fn exact_attention_is_evaluated_cut_to_windows() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| performer(dir.path(), args);
    assert!(run(&train(&["--attention", "softmax:gate+favor:m=8,gate/2", "--out", "model"])).status.success());
    let eval = ["eval", "model", "--data", "sample", "--max-tokens", "400"];
    let whole = json(&run(&[&eval[..], &["--json"]].concat()));
    assert!(whole.get("windows").is_none());
    let found = json(&run(&[&eval[..], &["--window", "5,9", "--sinks", "2", "--json"]].concat()));
    assert_eq!(found["val_loss"], whole["val_loss"]);

    let config = std::fs::read_to_string(dir.path().join("model/config.json")).unwrap();
    for (i, window) in [5, 9].into_iter().enumerate() {
        let control = &found["windows"][i];
        let spec = format!("softmax:window={window},sinks=2,gate+favor:m=8,gate/2");
        assert_eq!((&control["window"], &control["attention_spec"]), (&window.into(), &spec.into()));
        let folder = dir.path().join(format!("window-{window}"));
        std::fs::create_dir(&folder).unwrap();
        for name in ["model.safetensors", "tokenizer.json"] {
            std::fs::copy(dir.path().join("model").join(name), folder.join(name)).unwrap();
        }
        let mut own: Value = serde_json::from_str(&config).unwrap();
        own["attention"]["of"] = serde_json::json!({"kind": "softmax-window", "window": window, "sinks": 2});
        std::fs::write(folder.join("config.json"), own.to_string()).unwrap();
        let name = format!("window-{window}");
        let own = json(&run(&[&["eval", &name], &eval[2..], &["--json"]].concat()));
        assert_eq!(control["val_loss"], own["val_loss"]);
        assert_ne!(control["val_loss"], whole["val_loss"]);
    }

    let table = run(&[&eval[..], &["--window", "5", "--features-off", "--by-position"]].concat());
    let table = String::from_utf8(table.stdout).unwrap();
    for header in table.lines().filter(|line| line.contains("window of 5")) {
        assert!(header.find("features off").unwrap() < header.find("window of 5").unwrap(), "{header}");
    }
    assert_eq!(table.matches("window of 5").count(), 2, "{table}");
    fails(&run(&[&eval[..], &["--window", "0"]].concat()), &["--window is 0", "at least 1"]);
    fails(
        &run(&[&eval[..], &["--window", "14", "--sinks", "2"]].concat()),
        &["--window is 14 and --sinks 2", "hides nothing at a context of 16 tokens"],
    );
    let again = ["eval", "window-5", "--data", "sample", "--window", "5"];
    fails(&run(&again), &["no layer of window-5 has exact attention to more than 5 tokens"]);
    fails(&run(&[&eval[..], &["--sinks", "2"]].concat()), &["--window"]);
}

#[test]
fn a_run_is_not_overwritten_by_accident() {
    let dir = tempfile::tempdir().unwrap();
    let args = train(&["--attention", "softmax", "--out", "run"]);
    assert!(performer(dir.path(), &args).status.success());
    fails(&performer(dir.path(), &args), &["run holds a model already", "--from run", "--overwrite"]);
    assert!(performer(dir.path(), &[&args[..], &["--overwrite"]].concat()).status.success());
    let resumed = performer(dir.path(), &["train", "--resume", "run", "--json"]);
    assert_eq!(json(&resumed)["steps"], 2);

    // A tokenizer that is given is compared with the run's own, not ignored.
    let other = train(&["--attention", "softmax", "--vocab-size", "300", "--out", "other"]);
    assert!(performer(dir.path(), &other).status.success());
    let own = ["train", "--resume", "run", "--tokenizer", "run/tokenizer.json"];
    assert!(performer(dir.path(), &own).status.success());
    let foreign = ["train", "--resume", "run", "--tokenizer", "other/tokenizer.json"];
    fails(&performer(dir.path(), &foreign), &["other data", "--tokenizer"]);
    assert_eq!(performer(dir.path(), &["train", "--resume", "run", "--vocab-size", "300"]).status.code(), Some(2));
}

#[test]
fn bad_input_gets_one_clear_error() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| performer(dir.path(), args);
    fails(&run(&["train", "--data", "nowhere.txt"]), &["nowhere.txt"]);
    fails(&run(&["train", "--attention", "linear"]), &["known are softmax, favor, favor-learned"]);
    fails(&run(&["eval", "nowhere", "--data", "sample"]), &["nowhere"]);
    fails(&run(&["train", "--data", "sample", "--context", "0"]), &["context is 0"]);
    fails(&run(&["--threads", "0", "man"]), &["--threads"]);
    if !candle_core::utils::cuda_is_available() {
        fails(&run(&["train", "--device", "cuda"]), &["no CUDA", "scripts/cuda-build.sh", "--device cpu"]);
    }
    assert_eq!(run(&["train", "--no-such"]).status.code(), Some(2));
    assert_eq!(run(&["eval", "nowhere", "--data", "sample"]).status.code(), Some(1));

    fails(&run(&["lab", "ablate", "--steps", "0", "--data", "sample"]), &["--steps is 0"]);
    fails(&run(&["lab", "tasks", "--task", "listops", "--length", "40000"]), &["length is 40000", "8000"]);
    fails(&run(&["lab", "tasks", "--task", "copying", "--learning-rate", "-1"]), &["learning-rate is -1"]);
    fails(&run(&["bench", "train", "--steps", "0", "--data", "sample"]), &["steps is 0"]);
    fails(&run(&["bench", "train", "--rounds", "0", "--data", "sample"]), &["--rounds is 0"]);
    fails(&run(&["gpu-check", "--device", "cpu", "--out", "lines.jsonl"]), &["lines.jsonl", ".json"]);
    let minutes = ["gpu-check", "--device", "cpu", "--quick", "--only", "embedding", "--minutes", "nan"];
    fails(&run(&minutes), &["--minutes is NaN", "a number of at least 0"]);

    std::fs::write(dir.path().join("bad.txt"), b"fine\xff\xfe").unwrap();
    fails(&run(&["train", "--data", "bad.txt"]), &["bad.txt", "UTF-8"]);
    std::fs::write(dir.path().join("empty.txt"), b"").unwrap();
    fails(&run(&["train", "--data", "empty.txt"]), &["empty.txt"]);

    assert!(run(&train(&["--attention", "softmax", "--out", "run"])).status.success());
    // Found out before the text is evaluated, after which the chart would be there.
    fails(
        &run(&["eval", "run", "--data", "sample", "--recall", "10", "--plot", "chart"]),
        &["10 tokens", "ask for more"],
    );
    assert!(!dir.path().join("chart.svg").exists(), "the text was evaluated before the length was refused");
    let model = dir.path().join("run/model.safetensors");
    let bytes = std::fs::read(&model).unwrap();
    std::fs::write(&model, &bytes[..bytes.len() / 2]).unwrap();
    fails(&run(&["generate", "run"]), &["model.safetensors"]);
    std::fs::write(&model, &bytes).unwrap();
    std::fs::write(dir.path().join("run/config.json"), b"{}").unwrap();
    fails(&run(&["generate", "run"]), &["config.json"]);
}

#[test]
fn completions_and_manual_print() {
    let dir = tempfile::tempdir().unwrap();
    for args in [
        &["completions", "bash"][..],
        &["man"],
        &["--help"],
        &["train", "--help"],
        &["data", "inspect", "--data", "sample"],
    ] {
        let output = performer(dir.path(), args);
        assert!(output.status.success() && !output.stdout.is_empty(), "{args:?}");
    }
    // Pages that a page names are printed after it.
    let pages = String::from_utf8(performer(dir.path(), &["man"]).stdout).unwrap();
    for name in ["performer-lm", "performer-lm-train", "performer-lm-bench", "performer-lm-bench-attention"] {
        assert!(pages.contains(&format!("\n.TH {name} 1 ")), "{name} has no page");
    }
    assert!(!pages.contains("\\-help("), "a page is named that nobody writes");
}

/// The book's page of commands and options is what the program prints.
#[test]
fn the_books_reference_is_up_to_date() {
    let dir = tempfile::tempdir().unwrap();
    let printed = performer(dir.path(), &["reference"]);
    assert!(printed.status.success());
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/book/reference.md")).unwrap_or_default();
    assert!(
        String::from_utf8_lossy(&printed.stdout) == page,
        "book/src/reference.md is not what the program prints; write it anew with\n    \
         cargo run -p performer-lm -- reference > book/src/reference.md"
    );
}

#[test]
fn bench_measures_draws_and_refuses() {
    let dir = tempfile::tempdir().unwrap();
    let attention =
        ["bench", "attention", "--tokens", "16,32", "--features", "8", "--head-dim", "4", "--milliseconds", "0"];
    let report = json(&performer(dir.path(), &[&attention[..], &["--out", "out", "--json"]].concat()));
    assert_eq!(report["points"].as_array().unwrap().len(), 2 * 2 * 4);
    assert!(report["matmul_gflops"].as_f64().unwrap() > 0.0);
    for file in ["attention.json", "attention.md", "attention-forward.svg", "attention-both.png"] {
        assert!(dir.path().join("out").join(file).exists(), "{file}");
    }
    let forward = [&attention[..], &["--no-backward", "--no-softmax", "--out", "forward", "--json"]].concat();
    let report = json(&performer(dir.path(), &forward));
    assert_eq!(report["crossovers"].as_array().unwrap().len(), 0, "softmax was not measured");
    assert!(dir.path().join("forward/attention-forward.svg").exists());
    assert!(!dir.path().join("forward/attention-both.svg").exists());
    let halves = r#"{"sweep": {"head_dim": 4, "batch": 1, "heads": 4, "causal": true}, "about": {"dtype": "bf16"}, "points": []}"#;
    std::fs::write(dir.path().join("halves.json"), halves).unwrap();
    fails(&performer(dir.path(), &[&attention[..], &["--against", "halves.json"]].concat()), &["bf16", "f32"]);
    std::fs::write(dir.path().join("torch.json"), "{}").unwrap();
    let foreign = performer(dir.path(), &[&attention[..], &["--against", "torch.json"]].concat());
    fails(&foreign, &["torch.json", "scripts/torch_attention.py"]);
    fails(&performer(dir.path(), &["bench", "attention", "--tokens", "0"]), &["at least 1"]);
    std::fs::write(dir.path().join("f32.json"), halves.replace("bf16", "f32")).unwrap();
    let none = performer(dir.path(), &[&attention[..], &["--against", "f32.json"]].concat());
    assert!(String::from_utf8_lossy(&none.stderr).contains("none of the lengths"));
    let twice: Vec<&str> = attention.iter().map(|word| if *word == "8" { "8,8" } else { *word }).collect();
    let twice = json(&performer(dir.path(), &[&twice[..], &["--json"]].concat()));
    assert_eq!(twice["points"].as_array().unwrap().len(), 2 * 2 * 4);

    let decode = ["bench", "decode", "--contexts", "10,50", "--features", "8", "--json"];
    let report = json(&performer(dir.path(), &decode));
    assert_eq!(report["points"][0]["state_bytes"], report["points"][1]["state_bytes"]);
    let close = json(&performer(dir.path(), &["bench", "decode", "--contexts", "40,41", "--features", "8", "--json"]));
    let bytes = |i: usize| close["points"][i]["state_bytes"].as_u64().unwrap();
    assert_eq!(bytes(4) * 41, bytes(5) * 40, "the cache of 41 tokens");
    fails(&performer(dir.path(), &["bench", "decode", "--heads", "0"]), &["--heads is 0"]);
    fails(&performer(dir.path(), &["bench", "decode", "--contexts", "0"]), &["--contexts is 0"]);

    let train = ["bench", "train", "--steps", "2", "--attention", "favor:m=8", "--json"];
    let report = json(&performer(dir.path(), &[&train[..], &SMALL[..2], &SMALL[4..]].concat()));
    assert!(report["points"][0]["tokens_per_second"].as_f64().unwrap() > 0.0);
    assert!(report["points"][0]["rounds"].is_null());
    let report = json(&performer(dir.path(), &[&train[..], &["--rounds", "2"], &SMALL[..2], &SMALL[4..]].concat()));
    assert_eq!(report["points"][0]["rounds"].as_array().unwrap().len(), 2);
}

#[test]
fn bench_measures_trained_models_that_are_alike() {
    let dir = tempfile::tempdir().unwrap();
    let new = |out: &'static str, extra: &[&'static str]| {
        let args = [&["--vocab-size", "300", "--out", out][..], extra].concat();
        assert!(performer(dir.path(), &train(&args)).status.success());
    };
    new("exact", &["--attention", "softmax:gate"]);
    new("linear", &["--attention", "favor:m=8,gate"]);
    new("other", &["--attention", "softmax", "--preset", "code"]);
    let text = ["--data", SHORT, "--context", "16", "--batch-size", "4"];
    let bench = |from: &[&'static str]| {
        let from: Vec<&str> = from.iter().flat_map(|model| ["--from", model]).collect();
        performer(dir.path(), &[&["bench", "train", "--steps", "2", "--json"][..], &text, &from].concat())
    };
    let report = json(&bench(&["exact", "linear"]));
    let points = report["points"].as_array().unwrap();
    let said = |i: usize| [points[i]["from"].as_str().unwrap(), points[i]["attention_spec"].as_str().unwrap()];
    assert_eq!([said(0), said(1)], [["exact", "softmax:gate"], ["linear", "favor:m=8,gate"]]);
    assert_eq!(points.len(), 2);
    fails(&bench(&["exact", "other"]), &["other differs", "more than its attention"]);
    std::fs::write(dir.path().join("text"), &include_str!("../../assets/sample.txt")[..30_000]).unwrap();
    let words = ["train", "--data", "text", "--vocab-size", "300", "--attention", "softmax", "--out", "words"];
    assert!(performer(dir.path(), &[&words, &SMALL[2..]].concat()).status.success());
    fails(&bench(&["exact", "words"]), &["words has another tokenizer"]);
    fails(&bench(&["nowhere"]), &["nowhere"]);
    fails(
        &performer(dir.path(), &["bench", "train", "--from", "exact", "--attention", "softmax"]),
        &["cannot be used"],
    );
}

#[test]
fn lab_tasks_writes_a_report() {
    let dir = tempfile::tempdir().unwrap();
    let tiny =
        ["lab", "tasks", "--task", "recall", "--length", "4", "--steps", "2", "--seeds", "1", "--attention", "softmax"];
    let with = |extra: &[&'static str]| [&tiny[..], extra].concat();
    let data = json(&performer(dir.path(), &with(&["--attention", "favor:m=8", "--out", "out", "--json"])));
    assert_eq!(data["tasks"]["tasks"][0]["runs"].as_array().unwrap().len(), 2);
    for file in ["data.json", "report.html", "tasks-recall.svg", "tasks-recall.png"] {
        assert!(dir.path().join("out").join(file).exists(), "{file}");
    }
    fails(&performer(dir.path(), &["lab", "tasks", "--task", "text"]), &["--text FILE"]);
    fails(&performer(dir.path(), &["lab", "tasks", "--length", "4"]), &["one task"]);
    fails(&performer(dir.path(), &["lab", "tasks", "--task", "protein", "--proteins", "none"]), &["none"]);
}

#[test]
fn inspected_data_is_shown_as_json_too() {
    let dir = tempfile::tempdir().unwrap();
    let shown = json(&performer(dir.path(), &["data", "inspect", "--data", "sample", "--json"]));
    assert_eq!(shown["beginning"].as_array().map(Vec::len), Some(60));
    assert_eq!(shown["cache"], dir.path().to_str().unwrap());
    // Where no cache can be written, none is named.
    std::fs::write(dir.path().join("file"), "").unwrap();
    let inspect = ["data", "inspect", "--data", "sample", "--json"];
    let without = command(dir.path(), &inspect).env("PERFORMER_CACHE", dir.path().join("file")).output();
    assert!(json(&without.unwrap()).get("cache").is_none());
}

//! Every option of every command that keeps results, changed alone over an earlier result in the
//! same folder, is not answered with that result, unless the option changes no result.

use std::{collections::BTreeSet, fs, path::Path};

use serde_json::Value;

use super::program::{json, performer};

/// What a command must do with an earlier result.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Must {
    /// Refuse it, and say this word.
    Refuse(&'static str),
    /// Make another result, of another name, beside it.
    MakeAnother,
    /// Give it back: the option changes no result.
    GiveBack,
}
use Must::{GiveBack, MakeAnother, Refuse};

/// An option with its value (none for a flag), and what it must lead to.
type Change = (&'static str, Option<&'static str>, Must);

/// A `Table` is a command that keeps its results in a folder, and what becomes of each option.
struct Table {
    command: &'static [&'static str],
    /// The options of the first result, each given once.
    base: &'static [(&'static str, &'static str)],
    changes: &'static [Change],
    /// Options that are tested otherwise.
    others: &'static [&'static str],
    /// The part of the answer that is the result. Times in it never repeat, so that it tells a
    /// result given back from one made again.
    result: &'static [&'static str],
}

impl Table {
    /// Returns the command line with one option changed.
    fn with(&self, option: &str, value: Option<&'static str>) -> Vec<String> {
        let mut words: Vec<String> = self.command.iter().map(|word| (*word).to_string()).collect();
        let kept = self.base.iter().filter(|(name, _)| *name != option);
        words.extend(kept.flat_map(|(name, value)| [(*name).to_string(), (*value).to_string()]));
        if !option.is_empty() {
            words.push(option.into());
            words.extend(value.map(String::from));
        }
        if option != "--json" {
            words.push("--json".into());
        }
        words
    }

    fn run(&self, dir: &Path, words: &[String]) -> std::process::Output {
        performer(dir, &words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn found(&self, output: &std::process::Output) -> Value {
        self.result.iter().fold(json(output), |value, name| value[*name].clone())
    }

    /// Makes a result, changes each option alone, and requires what the table says.
    fn holds(&self, dir: &Path) {
        self.covers_every_option(dir);
        let first = self.found(&self.run(dir, &self.with("", None)));
        assert_ne!(first, Value::Null, "{:?}", self.result);
        for (option, value, must) in self.changes {
            let words = self.with(option, *value);
            let output = self.run(dir, &words);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let what = format!("{words:?} must {must:?}: {said}");
            match must {
                Refuse(word) => {
                    assert_eq!(output.status.code(), Some(1), "{what}");
                    assert!(output.stdout.is_empty() && said.contains(word), "{what}");
                }
                GiveBack => assert_eq!(self.found(&output), first, "{what}"),
                MakeAnother => {
                    assert!(output.status.success(), "{what}");
                    assert_ne!(self.found(&output), first, "{what}");
                }
            }
        }
        assert_eq!(self.found(&self.run(dir, &self.with("", None))), first, "the first result is whole");
    }

    /// A new option must be put in its place here.
    fn covers_every_option(&self, dir: &Path) {
        let known = |name: &String| self.changes.iter().any(|(option, ..)| option == name);
        let left: Vec<String> = options(dir, self.command)
            .into_iter()
            .filter(|name| name != "--out" && !known(name) && !self.others.contains(&name.as_str()))
            .collect();
        assert!(left.is_empty(), "what do these do to an earlier result of {:?}? {left:?}", self.command);
    }
}

/// Returns the options of a command, as its help lists them.
fn options(dir: &Path, command: &[&str]) -> BTreeSet<String> {
    let help = performer(dir, &[command, &["--help"]].concat());
    let help = String::from_utf8(help.stdout).unwrap();
    let lines = help.lines().filter(|line| line.starts_with("  ") && line.trim_start().starts_with('-'));
    let options = lines.filter_map(|line| line.split_whitespace().find(|word| word.starts_with("--")));
    let options: BTreeSet<String> =
        options.filter(|name| !["--help", "--version"].contains(name)).map(String::from).collect();
    assert!(options.len() > 8, "the help is not read as it should be: {help}");
    options
}

/// Writes the files that the tables name.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let text = |seed: usize| -> String {
        (0..6000).map(|i| format!("Word {} and word {}.\n", (i * seed) % 97, (i * 7 + seed) % 89)).collect()
    };
    fs::write(dir.path().join("text.txt"), text(3)).unwrap();
    fs::write(dir.path().join("other.txt"), text(5)).unwrap();
    let residue = |i: usize| char::from(b"ACDEFGHIKLMNPQRSTVWY"[i % 20]);
    let protein = |i: usize| -> String { (0..20 + i % 9).map(|j| residue(i * j + j * j + i / 20)).collect() };
    let proteins: String = (0..400).map(|i| format!(">p{i}\n{}\n", protein(i))).collect();
    fs::write(dir.path().join("proteins.fasta"), &proteins).unwrap();
    fs::write(dir.path().join("more.fasta"), proteins + ">last\nACDACDACDACDACDACD\n").unwrap();
    for (name, more) in [("one", &["--seed", "1"]), ("two", &["--seed", "2"])] {
        let words =
            ["train", "--preset", "small", "--data", "text.txt", "--vocab-size", "280", "--attention", "softmax"];
        let sizes = ["--context", "16", "--batch-size", "2", "--max-steps", "1", "--out", name];
        let done = performer(dir.path(), &[&words[..], &sizes, more].concat());
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }
    // Another file with the same tokens is another tokenizer.
    let tokenizer = fs::read_to_string(dir.path().join("one/tokenizer.json")).unwrap();
    fs::create_dir(dir.path().join("same")).unwrap();
    fs::write(dir.path().join("same/tokenizer.json"), tokenizer + " ").unwrap();
    dir
}

/// What is said of a result with another key.
const RUN: &str = "belongs to another run";

#[test]
fn compare() {
    Table {
        command: &["compare"],
        base: &[
            ("--attention", "favor:m=8"),
            ("--seeds", "1"),
            ("--data", "text.txt"),
            ("--vocab-size", "300"),
            ("--context", "16"),
            ("--batch-size", "4"),
            ("--max-steps", "2"),
            ("--out", "out"),
        ],
        changes: &[
            ("--attention", Some("favor:m=9"), MakeAnother),
            ("--attention", Some("favor:m=8,map=relu"), MakeAnother),
            ("--seeds", Some("2"), MakeAnother),
            ("--preset", Some("small"), Refuse(RUN)),
            ("--config", Some("one/config.json"), Refuse(RUN)),
            ("--epochs", Some("1"), Refuse("settings.epochs")),
            ("--max-steps", Some("3"), Refuse("settings.max_steps")),
            ("--max-train-tokens", Some("1000"), Refuse("settings.max_train_tokens")),
            ("--batch-size", Some("5"), Refuse("settings.batch_size")),
            ("--micro-batch", Some("2"), Refuse("settings.micro_batch")),
            ("--dtype", Some("bf16"), Refuse("settings.dtype")),
            ("--context", Some("15"), Refuse("model.context")),
            ("--learning-rate", Some("0.001"), Refuse("settings.learning_rate")),
            ("--learning-rates", Some("0.001"), Refuse("settings.learning_rate")),
            ("--learning-rates", Some("0.001,0.002"), MakeAnother),
            ("--schedule", Some("constant"), Refuse("settings.schedule")),
            ("--schedule", Some("one-cycle:div=26"), Refuse("settings.schedule.div")),
            ("--dropout", Some("0.1"), Refuse("model.dropout")),
            ("--redraw-every", Some("1"), Refuse("settings.redraw_every")),
            // No attention here has features to fit.
            ("--fit-every", Some("1"), Refuse("--fit-every")),
            ("--eval-every", Some("1"), Refuse("settings.eval_every")),
            ("--save-every", Some("1"), GiveBack),
            ("--data", Some("other.txt"), Refuse("data.")),
            ("--vocab-size", Some("290"), Refuse("data.tokenizer")),
            ("--tokenizer", Some("one/tokenizer.json"), Refuse("--vocab-size: the tokenizer of --tokenizer")),
            ("--threads", Some("1"), GiveBack),
            ("--device", Some("cpu"), GiveBack),
            ("--json", None, GiveBack),
        ],
        others: &[],
        result: &["runs"],
    }
    .holds(folder().path());
}

#[test]
fn convert() {
    Table {
        command: &["convert", "one"],
        base: &[
            ("--attention", "favor:m=2,map=learned,window=4"),
            ("--data", "text.txt"),
            ("--context", "16"),
            ("--calibrate-tokens", "64"),
            ("--transfer-steps", "2"),
            ("--tune-steps", "2"),
            ("--batch-size", "2"),
            ("--measure-tokens", "64"),
            ("--points", "1"),
            ("--out", "out"),
        ],
        changes: &[
            ("--attention", Some("favor:m=2,map=learned,window=5"), Refuse("model.attention.window")),
            ("--layer", Some("0=softmax"), Refuse("model.attention_by_layer")),
            ("--data", Some("other.txt"), Refuse("data.")),
            ("--context", Some("15"), Refuse("model.context")),
            ("--calibrate-tokens", Some("65"), Refuse("settings.calibrate.tokens")),
            ("--balance", None, Refuse("settings.calibrate.balance")),
            ("--transfer-steps", Some("3"), Refuse("settings.transfer.steps")),
            ("--transfer-steps", Some("0"), Refuse("settings.transfer")),
            ("--transfer-rate", Some("0.02"), Refuse("settings.transfer.rate")),
            ("--drop-window", Some("0.5"), Refuse("drop_window")),
            ("--tune-steps", Some("3"), Refuse("settings.tune.steps")),
            ("--tune-steps", Some("0"), Refuse("settings.tune")),
            ("--tune-rate", Some("0.001"), Refuse("settings.tune.rate")),
            ("--adapters", Some("2"), Refuse("settings.tune.adapters")),
            ("--points", Some("0"), Refuse("points")),
            ("--distillation", Some("0.25"), Refuse("settings.tune.distillation")),
            ("--batch-size", Some("1"), Refuse("batch_size")),
            ("--measure-tokens", Some("32"), Refuse("settings.measured_tokens")),
            ("--second", Some("other.txt"), Refuse("settings.second_text")),
            ("--recall", Some("300"), Refuse("settings.recall")),
            ("--seed", Some("7"), Refuse("seed")),
            ("--threads", Some("1"), GiveBack),
            ("--device", Some("cpu"), GiveBack),
            ("--json", None, GiveBack),
        ],
        others: &["--control", "--overwrite", "--inspect", "--layer-costs"],
        result: &["stages"],
    }
    .holds(folder().path());

    let dir = folder();
    let of = |teacher: &str, more: &[&str]| {
        let words = ["convert", teacher, "--attention", "favor:m=2,map=learned", "--data", "text.txt", "--out", "out"];
        let sizes = ["--transfer-steps", "1", "--calibrate-tokens", "64", "--measure-tokens", "64", "--json"];
        performer(dir.path(), &[&words[..], &sizes, more].concat())
    };
    let first = json(&of("one", &[]));
    let other = of("two", &[]);
    let said = String::from_utf8_lossy(&other.stderr);
    assert!(!other.status.success() && said.contains(RUN) && said.contains("teacher"), "{said}");
    // The same folder with other weights is another teacher.
    fs::copy(dir.path().join("two/model.safetensors"), dir.path().join("one/model.safetensors")).unwrap();
    let other = of("one", &[]);
    assert!(!other.status.success() && String::from_utf8_lossy(&other.stderr).contains("teacher"));
    let again = json(&of("one", &["--overwrite"]));
    assert_ne!(again["stages"], first["stages"]);
    // A stage that there was not is added, and the others are given back.
    let tuned = json(&of("one", &["--tune-steps", "1", "--control"]));
    assert_eq!(tuned["stages"].as_array().unwrap()[..4], again["stages"].as_array().unwrap()[..]);
    assert!(tuned["control"].is_object() && tuned["stages"].as_array().unwrap().len() == 5);
}

#[test]
fn lab_ablate() {
    Table {
        command: &["lab", "ablate"],
        base: &[
            ("--data", "text.txt"),
            ("--vocab-size", "280"),
            ("--context", "34"),
            ("--batch-size", "2"),
            ("--steps", "1"),
            ("--seeds", "1"),
            ("--features", "2"),
            ("--out", "out"),
        ],
        changes: &[
            ("--data", Some("other.txt"), Refuse("data.")),
            ("--vocab-size", Some("290"), Refuse("data.tokenizer")),
            ("--tokenizer", Some("same/tokenizer.json"), Refuse("--vocab-size: the tokenizer of --tokenizer")),
            ("--preset", Some("small"), Refuse(RUN)),
            ("--context", Some("35"), Refuse("model.context")),
            ("--batch-size", Some("3"), Refuse("settings.batch_size")),
            ("--steps", Some("2"), Refuse("settings.epochs")),
            ("--features", Some("3"), Refuse("model.attention.features")),
            ("--seeds", Some("2"), MakeAnother),
            ("--threads", Some("1"), GiveBack),
            ("--device", Some("cpu"), GiveBack),
            ("--json", None, GiveBack),
        ],
        others: &[],
        result: &["ablate", "outcomes"],
    }
    .holds(folder().path());
}

#[test]
fn lab_tasks() {
    Table {
        command: &["lab", "tasks"],
        base: &[
            ("--task", "recall"),
            ("--attention", "softmax"),
            ("--seeds", "1"),
            ("--length", "4"),
            ("--steps", "2"),
            ("--out", "out"),
        ],
        changes: &[
            ("--task", Some("copying"), MakeAnother),
            ("--attention", Some("favor:m=8"), MakeAnother),
            ("--seeds", Some("2"), MakeAnother),
            ("--length", Some("5"), Refuse(RUN)),
            ("--steps", Some("3"), Refuse("settings.steps")),
            ("--learning-rate", Some("0.01"), Refuse("settings.learning_rate")),
            ("--pairs", Some("2"), Refuse("a setting of the task mqar")),
            ("--text", Some("text.txt"), Refuse("--text belongs to the task text")),
            ("--proteins", Some("proteins.fasta"), Refuse("--proteins belongs to the task protein")),
            ("--threads", Some("1"), GiveBack),
            ("--device", Some("cpu"), GiveBack),
            ("--json", None, GiveBack),
        ],
        others: &[],
        result: &["tasks", "tasks"],
    }
    .holds(folder().path());

    // What single tasks read.
    let dir = folder();
    let on = |more: &[&str]| {
        let words =
            ["lab", "tasks", "--attention", "softmax", "--seeds", "1", "--steps", "2", "--out", "out", "--json"];
        performer(dir.path(), &[&words[..], more].concat())
    };
    for (first, other) in [
        (
            ["--task", "text", "--length", "16", "--text", "text.txt"],
            ["--task", "text", "--length", "16", "--text", "other.txt"],
        ),
        (
            ["--task", "protein", "--length", "16", "--proteins", "proteins.fasta"],
            ["--task", "protein", "--length", "16", "--proteins", "more.fasta"],
        ),
        (["--task", "mqar", "--length", "32", "--pairs", "4"], ["--task", "mqar", "--length", "32", "--pairs", "5"]),
    ] {
        let found = json(&on(&first))["tasks"]["tasks"].clone();
        let refused = on(&other);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.status.code() == Some(1) && said.contains(RUN), "{other:?}: {said}");
        assert_eq!(json(&on(&first))["tasks"]["tasks"], found);
    }
}

/// A run is gone on with by its own settings: no option changes them, and over its folder no other
/// run begins.
#[test]
fn train() {
    let dir = folder();
    let run = |args: &[&str]| performer(dir.path(), args);
    let base = ["train", "--attention", "favor:m=8", "--data", "text.txt", "--vocab-size", "300", "--context", "16"];
    let sizes = ["--batch-size", "4", "--max-steps", "2", "--out", "out"];
    assert!(run(&[&base[..], &sizes].concat()).status.success());
    let first = fs::read(dir.path().join("out/metrics.json")).unwrap();
    let value = |option: &str| match option {
        "--attention" => Some("softmax"),
        "--preset" => Some("small"),
        "--config" => Some("one/config.json"),
        "--dtype" => Some("bf16"),
        "--schedule" => Some("constant"),
        "--learning-rate" | "--dropout" => Some("0.1"),
        "--from" | "--out" => Some("one"),
        "--leak" | "--overwrite" => None,
        _ => Some("3"),
    };
    let others =
        ["--data", "--tokenizer", "--resume", "--json", "--threads", "--device", "--deadline", "--sequence-parallel"];
    for option in options(dir.path(), &["train"]).iter().filter(|option| !others.contains(&option.as_str())) {
        let alone = [Some(option.as_str()), value(option)];
        let alone: Vec<&str> = alone.into_iter().flatten().collect();
        let resumed = run(&[&["train", "--resume", "out"][..], &alone].concat());
        assert_eq!(resumed.status.code(), Some(2), "{alone:?}: {}", String::from_utf8_lossy(&resumed.stderr));
        if !["--out", "--overwrite"].contains(&option.as_str()) {
            let begun = run(&[&["train", "--data", "text.txt", "--out", "out"][..], &alone].concat());
            let said = String::from_utf8_lossy(&begun.stderr);
            // The default attention has no features to fit, which is said first.
            let refusal = if option == "--fit-every" { "no attention here" } else { "out holds a model already" };
            assert!(begun.status.code() == Some(1) && said.contains(refusal), "{alone:?}: {said}");
        }
    }
    for other in [["--data", "other.txt"], ["--tokenizer", "one/tokenizer.json"]] {
        let resumed = run(&[&["train", "--resume", "out"][..], &other].concat());
        let said = String::from_utf8_lossy(&resumed.stderr);
        assert!(resumed.status.code() == Some(1) && said.contains("other data"), "{other:?}: {said}");
    }
    assert_eq!(fs::read(dir.path().join("out/metrics.json")).unwrap(), first);
}

//! What happens to a command that is stopped, or meets another one in its folder.

use std::{
    io::{BufRead, BufReader, Read},
    path::Path,
    process::{Child, Command, Output, Stdio},
};

use super::program::{command, fails, json, performer};

const SMALL: [&str; 8] = ["--data", "sample", "--context", "16", "--batch-size", "4", "--vocab-size", "300"];

/// A command in progress, and what it says on stderr.
struct Running {
    child: Child,
    said: BufReader<std::process::ChildStderr>,
    text: String,
}

impl Running {
    fn start(dir: &Path, args: &[&str]) -> Self {
        Self::of(command(dir, args))
    }

    fn of(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        let said = BufReader::new(child.stderr.take().expect("stderr is piped"));
        Self { child, said, text: String::new() }
    }

    /// Waits until it has said something with this word.
    fn says(&mut self, word: &str) {
        loop {
            let begun = self.text.len();
            let read = self.said.read_line(&mut self.text).expect("stderr is text");
            assert!(read > 0, "it ended without '{word}': {}", self.text);
            if self.text[begun..].contains(word) {
                return;
            }
        }
    }

    /// Sends what Ctrl-C sends.
    fn interrupt(&self) {
        self.signal("-INT");
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([signal, &self.child.id().to_string()]).status();
        assert!(sent.expect("kill starts").success());
    }

    /// Waits for the end, and returns the exit code and all that it said.
    fn end(mut self) -> (Option<i32>, String) {
        self.said.read_to_string(&mut self.text).expect("stderr is text");
        (self.child.wait().expect("it ends").code(), self.text)
    }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().to_string_lossy().into()).collect();
    names.sort();
    names
}

fn succeeds(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A training in progress keeps others from its folder, and what it saves when it is stopped is
/// what another one goes on from.
#[test]
fn a_training_has_its_folder_to_itself_and_is_saved_when_it_is_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let steps = ["train", "--attention", "softmax", "--epochs", "1000", "--eval-every", "5", "--out", "run"];
    let mut training = Running::start(dir.path(), &[&steps[..], &SMALL[..]].concat());
    training.says("validation");
    let before = std::fs::read(dir.path().join("run/config.json")).unwrap();
    let resume = performer(dir.path(), &["train", "--resume", "run"]);
    fails(&resume, &["another process works in run"]);
    let again = performer(dir.path(), &[&steps[..], &SMALL[..], &["--overwrite"]].concat());
    fails(&again, &["another process works in run"]);
    let other = ["train", "--attention", "softmax", "--max-steps", "1", "--out", "other"];
    succeeds(&performer(dir.path(), &[&other[..], &SMALL[..]].concat()));
    for command in [
        &["export", "other", "--out", "run", "--overwrite"][..],
        &[
            "convert",
            "other",
            "--attention",
            "favor:m=4,map=learned",
            "--data",
            "sample",
            "--out",
            "run",
            "--overwrite",
        ],
    ] {
        fails(&performer(dir.path(), command), &["another process works in run"]);
    }
    training.says("validation");
    assert_eq!(std::fs::read(dir.path().join("run/config.json")).unwrap(), before);
    // To use a model that is being trained is no harm.
    succeeds(&performer(dir.path(), &["generate", "run", "--max-tokens", "1"]));

    training.interrupt();
    let (code, said) = training.end();
    assert_eq!(code, Some(130), "{said}");
    assert!(said.contains("train --resume run"), "{said}");
    let log = std::fs::read_to_string(dir.path().join("run/metrics.jsonl")).unwrap();
    let steps: Vec<u64> = log
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .filter(|line| line.get("train_loss").is_some())
        .map(|line| line["step"].as_u64().unwrap())
        .collect();
    assert_eq!(steps, (1..=steps.len() as u64).collect::<Vec<_>>(), "no line is lost");

    // What an unfinished run writes is not what it will write.
    let early = performer(dir.path(), &["generate", "run", "--max-tokens", "2"]);
    let said = String::from_utf8_lossy(&early.stderr).into_owned();
    assert!(said.contains("the training in run has no result yet: these are its weights after step "), "{said}");

    let mut resumed = Running::start(dir.path(), &["train", "--resume", "run"]);
    resumed.says("going on after step ");
    resumed.says("validation");
    resumed.interrupt();
    assert_eq!(resumed.end().0, Some(130));
}

/// Nothing can be lost while data is prepared, so the first Ctrl-C ends it.
#[test]
fn preparation_ends_at_once_and_leaves_nothing_half_made() {
    let dir = tempfile::tempdir().unwrap();
    let words: String = (0..400_000u32)
        .map(|i| {
            let n = i.wrapping_mul(2_654_435_761);
            format!("{:x} w{} ", n, n % 7919)
        })
        .collect();
    std::fs::write(dir.path().join("long.txt"), words).unwrap();
    let train = ["train", "--data", "long.txt", "--vocab-size", "20000", "--max-steps", "1", "--out", "run"];
    let mut training = Running::start(dir.path(), &train);
    training.says("tokenizer: training");
    training.interrupt();
    let (code, said) = training.end();
    assert_eq!(code, Some(130), "{said}");
    // Had it gone on, there would be a tokenizer.
    assert_eq!(names(dir.path()), ["long.txt"]);
}

/// A conversion that is stopped between its steps has saved what it did.
#[test]
fn a_conversion_that_is_stopped_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let train = ["train", "--attention", "softmax", "--max-steps", "1", "--out", "teacher"];
    succeeds(&performer(dir.path(), &[&train[..], &SMALL[..]].concat()));
    let convert = [
        "convert",
        "teacher",
        "--attention",
        "favor:m=4,map=learned",
        "--data",
        "sample",
        "--transfer-steps",
        "40",
        "--calibrate-tokens",
        "100",
        "--measure-tokens",
        "500",
        "--out",
        "student",
    ];
    let mut converting = Running::start(dir.path(), &convert);
    converting.says("calibrate");
    converting.interrupt();
    let (code, said) = converting.end();
    assert_eq!(code, Some(130), "{said}");
    let report = json(&performer(dir.path(), &[&convert[..], &["--json"]].concat()));
    assert_eq!(report["stages"].as_array().unwrap().len(), 4);
}

/// A terminal that closes stops a training, but for one that was started to live on.
#[test]
fn a_training_under_nohup_outlives_its_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let train = ["train", "--attention", "softmax", "--max-steps", "150", "--eval-every", "5", "--out"];
    // Where these tests run under nohup themselves, nothing that they start can be stopped so.
    let outlives = Command::new("sh").args(["-c", "kill -HUP $$"]).status().unwrap().success();
    if !outlives {
        let mut training = Running::start(dir.path(), &[&train[..], &["stops"], &SMALL[..]].concat());
        training.says("validation");
        training.signal("-HUP");
        assert_eq!(training.end().0, Some(130));
    }

    let mut nohup = Command::new("nohup");
    nohup.arg(env!("CARGO_BIN_EXE_performer-lm")).args(train).arg("lives").args(SMALL);
    nohup.env("PERFORMER_CACHE", dir.path()).env("HF_HUB_OFFLINE", "1").current_dir(dir.path());
    let mut training = Running::of(nohup);
    training.says("validation");
    training.signal("-HUP");
    let (code, said) = training.end();
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn a_measurement_of_training_is_stopped_by_one_ctrl_c() {
    let dir = tempfile::tempdir().unwrap();
    let bench = ["bench", "train", "--attention", "softmax", "--steps", "2000", "--max-train-tokens", "6400"];
    let mut measuring = Running::start(dir.path(), &[&bench[..], &SMALL[..]].concat());
    measuring.says("validation");
    measuring.interrupt();
    let (code, said) = measuring.end();
    assert_eq!(code, Some(130), "{said}");
}

//! A training that is killed at any moment goes on, and ends as if nobody had killed it. This is a
//! sample; `scripts/attack_kills.py` kills every command hundreds of times.

use std::{fs, path::Path, process::Stdio, time::Duration};

use super::program::{SHORT, command, performer};

const SETTINGS: [&str; 16] = [
    "--data",
    SHORT,
    "--context",
    "16",
    "--batch-size",
    "4",
    "--vocab-size",
    "300",
    "--max-steps",
    "60",
    "--attention",
    "favor:m=8,window=4,gate",
    "--redraw-every",
    "7",
    "--save-every",
    "1",
];

fn model(dir: &Path, run: &str) -> [Vec<u8>; 2] {
    ["model.safetensors", "optimizer.safetensors"].map(|name| fs::read(dir.join(run).join(name)).unwrap())
}

#[test]
fn a_training_that_is_killed_again_and_again_ends_as_one_that_was_not() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let train = |out: &'static str| [&["train", "--dropout", "0.1", "--out", out], &SETTINGS[..]].concat();
    let done = performer(dir, &train("whole"));
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));

    let mut kills = 0;
    for milliseconds in [40, 90, 150, 220, 300, 130, 70, 260].into_iter().cycle().take(40) {
        let begun = dir.join("killed/train_state.json").exists();
        let args =
            if begun { vec!["train", "--resume", "killed"] } else { [train("killed"), vec!["--overwrite"]].concat() };
        let mut child = command(dir, &args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(milliseconds));
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success());
            break;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        kills += 1;
        if dir.join("killed/model.safetensors").exists() {
            let used = performer(dir, &["generate", "killed", "--max-tokens", "1"]);
            assert!(used.status.success(), "after {kills} kills: {}", String::from_utf8_lossy(&used.stderr));
        }
    }
    let resumed = performer(dir, &["train", "--resume", "killed"]);
    assert!(resumed.status.success(), "{}", String::from_utf8_lossy(&resumed.stderr));
    assert!(kills >= 3, "only {kills} kills");
    assert!(model(dir, "killed") == model(dir, "whole"), "{kills} kills made another model");
    let pending = fs::read_dir(dir.join("killed")).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(!pending.into_iter().any(|name| name.to_string_lossy().ends_with(".new")), "files are left over");
}

//! The tests of the command line start the program itself, and read what it prints.

use std::{
    path::Path,
    process::{Command, Output},
};

use serde_json::Value;

/// Some stories of the embedded sample. A model that is trained on these is measured on two
/// thousand characters, and one that is trained on all of the sample on a hundred thousand, which
/// takes longer than a few steps of training.
pub(super) const SHORT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/suite/short.txt");

/// The program in the folder `cache`, which also is its cache, without a network.
pub(super) fn command(cache: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_performer-lm"));
    command.args(args).env("PERFORMER_CACHE", cache).env("HF_HUB_OFFLINE", "1").current_dir(cache);
    command
}

/// Runs the [`command`] to its end.
pub(super) fn performer(cache: &Path, args: &[&str]) -> Output {
    command(cache, args).output().expect("the program starts")
}

/// Reads the one JSON value on stdout of a run that has to succeed.
pub(super) fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("stdout is one JSON value")
}

/// Checks that a run failed with one error that has these words, and with nothing on stdout.
pub(super) fn fails(output: &Output, words: &[&str]) {
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "succeeded: {error}");
    assert!(output.stdout.is_empty(), "an error is no result");
    assert!(!error.contains("panicked"), "{error}");
    for word in words {
        assert!(error.contains(word), "'{word}' is not in: {error}");
    }
}

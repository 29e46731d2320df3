//! What the program says of its own accord, where a person would otherwise draw a wrong conclusion.

use std::{fs, io::Write, path::Path, process::Stdio};

use super::program::{SHORT, command, fails, performer};

const SMALL: [&str; 10] =
    ["--data", SHORT, "--max-steps", "2", "--context", "16", "--batch-size", "4", "--vocab-size", "300"];

/// Runs a command that has to succeed, and returns what it prints and what it says.
fn printed_and_said(dir: &Path, args: &[&str]) -> [String; 2] {
    let output = performer(dir, args);
    let [printed, said] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert!(output.status.success(), "{said}");
    [printed, said]
}

#[test]
fn a_finished_run_is_known_as_one() {
    let dir = tempfile::tempdir().unwrap();
    let train = [&["train", "--attention", "softmax", "--out", "run"], &SMALL[..]].concat();
    let [table, said] = printed_and_said(dir.path(), &train);
    // Two steps are no epoch, whose time is that of all of its tokens.
    let row = table.lines().find(|line| line.contains("seconds per epoch")).unwrap();
    assert!(row.contains("about "), "{row}");
    assert!(!said.contains("learns little"), "few steps were asked for: {said}");
    fails(&performer(dir.path(), &train), &["run holds a model already", "is finished", "--from run", "--overwrite"]);
    let [_, said] = printed_and_said(dir.path(), &["train", "--resume", "run"]);
    assert!(said.contains("this run is finished") && said.contains("--from run"), "{said}");
    let [_, said] = printed_and_said(dir.path(), &["generate", "run", "--max-tokens", "2"]);
    assert!(!said.contains("no result yet"), "{said}");
    // Without its report the run had been stopped after its last step.
    fs::remove_file(dir.path().join("run/metrics.json")).unwrap();
    let [_, said] = printed_and_said(dir.path(), &["eval", "run", "--data", SHORT, "--max-tokens", "20"]);
    assert!(said.contains("the training in run has no result yet: these are its weights after step 2"), "{said}");
    fails(&performer(dir.path(), &train), &["run holds a model already", "--resume run", "--overwrite"]);
    let [_, said] = printed_and_said(dir.path(), &["train", "--resume", "run"]);
    assert!(said.contains("all 2 steps are taken: what is left is to measure the model"), "{said}");
}

#[test]
fn a_text_that_is_too_short_for_its_batches_is_told() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("text"), &include_str!("../../assets/sample.txt")[..30_000]).unwrap();
    let words =
        ["train", "--data", "text", "--attention", "softmax", "--vocab-size", "300", "--context", "16", "--out", "run"];
    let [table, said] = printed_and_said(dir.path(), &words);
    assert!(said.contains("steps, in which a model learns little: more by --epochs, or by a --batch-size"), "{said}");
    // Whole epochs have the times that they took.
    let row = table.lines().find(|line| line.contains("seconds per epoch")).unwrap();
    assert!(!row.contains("about "), "{row}");
    // Of the file itself most was trained on, and of another one nothing.
    fs::write(dir.path().join("other"), &include_str!("../../assets/sample.txt")[30_000..31_000]).unwrap();
    // A conversion learns from its text too, and a folder's training text is trained on as a whole.
    fs::create_dir(dir.path().join("folder")).unwrap();
    fs::copy(dir.path().join("text"), dir.path().join("folder/train.txt")).unwrap();
    fs::copy(dir.path().join("other"), dir.path().join("folder/valid.txt")).unwrap();
    let convert = ["convert", "run", "--attention", "softmax:window=4", "--tune-steps", "1", "--measure-tokens", "20"];
    let convert = [&convert[..], &["--batch-size", "1", "--recall", "0", "--points", "0"]].concat();
    let on_text = [&convert[..], &["--data", "text", "--out", "converted"]].concat();
    printed_and_said(dir.path(), &on_text);
    // A path that is not relative is known by its own.
    let folder = dir.path().join("folder");
    let data = ["--data", folder.to_str().unwrap(), "--second", "folder/train.txt", "--out", "on-folder"];
    let on_folder = [&convert[..], &data].concat();
    let [_, said] = printed_and_said(dir.path(), &on_folder);
    assert!(said.contains("the conversion learns from folder/train.txt or a part of it"), "{said}");
    for (model, text, is_trained_on) in [
        ("run", "text", true),
        ("run", "other", false),
        ("converted", "text", true),
        ("converted", "other", false),
        ("on-folder", "folder/train.txt", true),
        ("on-folder", "folder/valid.txt", false),
    ] {
        let [_, said] = printed_and_said(dir.path(), &["eval", model, "--data", text, "--max-tokens", "20"]);
        assert_eq!(said.contains(&format!("{model} was trained on {text} or a part")), is_trained_on, "{said}");
    }
    // Another training would replace a conversion, with which --resume cannot go on.
    let over = [&words[..words.len() - 1], &["converted"]].concat();
    let refused = performer(dir.path(), &over);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("holds a model") && !said.contains("--resume"), "{said}");
}

#[test]
fn a_comparison_says_how_much_there_is_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let words =
        ["compare", "--attention", "softmax", "--attention", "softmax:window=4", "--seeds", "1,2", "--out", "out"];
    let words = [&words[..], &SMALL].concat();
    let [table, said] = printed_and_said(dir.path(), &words);
    assert!(said.contains("4 run(s) of 2 steps each"), "{said}");
    for (number, run) in [(1, "softmax, seed 1"), (2, "softmax:window=4, seed 1"), (4, "softmax:window=4, seed 2")] {
        assert!(said.contains(&format!("run {number} of 4: {run}, learning rate")), "{said}");
    }
    assert!(table.contains("vs first: perplexity beside that of the first attention"), "{table}");

    // The outcome of another comparison stays, also where no run has the name of an earlier one.
    fs::write(dir.path().join("text"), &include_str!("../../assets/sample.txt")[..30_000]).unwrap();
    let before = fs::read(dir.path().join("out/compare.json")).unwrap();
    let other = ["compare", "--attention", "uniform", "--seeds", "1", "--out", "out"];
    for (old, new, what) in [(SHORT, "text", "on other data, file:short.txt"), ("16", "8", "of another model")] {
        let small = SMALL.map(|word| if word == old { new } else { word });
        let refused = performer(dir.path(), &[&other[..], &small].concat());
        fails(&refused, &[&format!("out holds a comparison {what}"), "choose another folder"]);
    }
    assert_eq!(fs::read(dir.path().join("out/compare.json")).unwrap(), before);
    // A file of another content is other data whatever it is called, and one of the same is not.
    let [one, two, three] = ["one", "two", "three"].map(|name| dir.path().join(name));
    for (folder, range) in [(&one, 0..30_000), (&two, 0..30_000), (&three, 5_000..35_000)] {
        fs::create_dir(folder).unwrap();
        fs::write(folder.join("text"), &include_str!("../../assets/sample.txt")[range]).unwrap();
    }
    let on = |text: &str, attention: &str| {
        let words = ["compare", "--attention", attention, "--seeds", "1", "--out", "out2"];
        performer(dir.path(), &[&words[..], &SMALL.map(|word| if word == SHORT { text } else { word })].concat())
    };
    assert!(on("one/text", "softmax").status.success());
    assert!(on("two/text", "uniform").status.success());
    fails(&on("three/text", "none"), &["out2 holds a comparison on other data", "choose another folder"]);
    // More of the same goes on.
    printed_and_said(dir.path(), &[&words[..], &["--attention", "uniform"]].concat());
}

#[test]
fn runs_are_counted_with_all_rates_of_the_first_seed() {
    let dir = tempfile::tempdir().unwrap();
    for (name, range) in [("train.txt", 0..30_000), ("valid.txt", 30_000..33_000), ("test.txt", 33_000..36_000)] {
        fs::create_dir_all(dir.path().join("data")).unwrap();
        fs::write(dir.path().join("data").join(name), &include_str!("../../assets/sample.txt")[range]).unwrap();
    }
    let mut words = [
        &["compare", "--attention", "softmax", "--attention", "uniform", "--seeds", "1,2", "--out", "out"][..],
        &["--learning-rates", "1e-3,2e-3,3e-3"],
        &SMALL,
    ]
    .concat();
    *words.iter_mut().find(|word| **word == SHORT).unwrap() = "data";
    let [_, said] = printed_and_said(dir.path(), &words);
    for run in [
        "1 of 8: softmax, seed 1, learning rate 1e-3",
        "6 of 8: uniform, seed 1, learning rate 3e-3",
        "7 of 8: softmax, seed 2",
        "8 of 8: uniform, seed 2",
    ] {
        assert!(said.contains(&format!("run {run}")), "{run} is not in: {said}");
    }
}

/// A teacher that was not tuned as its student was is no measure of the student.
#[test]
fn a_student_below_its_teacher_is_explained() {
    let dir = tempfile::tempdir().unwrap();
    printed_and_said(dir.path(), &[&["train", "--attention", "softmax", "--out", "teacher"], &SMALL[..]].concat());
    let convert = [
        &["convert", "teacher", "--attention", "softmax:window=4", "--data", SHORT, "--measure-tokens", "500"][..],
        &["--tune-steps", "20", "--tune-rate", "1e-2", "--recall", "0"],
    ]
    .concat();
    let [table, said] = printed_and_said(dir.path(), &[&convert[..], &["--out", "student"]].concat());
    assert!(said.contains("--control trains it"), "{said}{table}");
    let [_, said] = printed_and_said(dir.path(), &[&convert[..], &["--control", "--out", "beside"]].concat());
    assert!(!said.contains("--control trains it"), "{said}");
    // Nothing is tuned here, and --control belongs to that. Six steps at this rate make an
    // attention that is worse than none.
    let rough = SMALL.map(|word| if word == "2" { "6" } else { word });
    let rate = ["--learning-rate", "0.1", "--seed", "1"];
    printed_and_said(dir.path(), &[&["train", "--attention", "softmax", "--out", "rough"], &rough[..], &rate].concat());
    let swap = ["convert", "rough", "--attention", "uniform", "--data", SHORT, "--measure-tokens", "500", "--json"];
    let swap = [&swap[..], &["--transfer-steps", "0", "--recall", "0", "--out", "swapped"]].concat();
    let [report, said] = printed_and_said(dir.path(), &swap);
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    let loss = |stage: usize| report["stages"][stage]["val_loss"].as_f64().unwrap();
    assert!(loss(1) < loss(0) && report["stages"].as_array().unwrap().len() == 2, "{report}");
    assert!(!said.contains("--control"), "{said}");
}

#[test]
fn a_prompt_may_come_from_stdin() {
    let dir = tempfile::tempdir().unwrap();
    printed_and_said(dir.path(), &[&["train", "--attention", "softmax", "--out", "run"], &SMALL[..]].concat());
    let mut generate = command(dir.path(), &["generate", "run", "--max-tokens", "2", "--prompt", "-"]);
    let mut running = generate.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    running.stdin.take().unwrap().write_all(b"The cat\n").unwrap();
    let output = running.wait_with_output().unwrap();
    assert!(output.status.success() && output.stdout.starts_with(b"The cat"), "{output:?}");
    assert!(!output.stdout.starts_with(b"The cat\n"), "{output:?}");
}

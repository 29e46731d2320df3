//! No command replaces a file that nobody asked it to replace, and no model replaces itself.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use performer_lm::model::pretrained::Pretrained;

use super::program::{SHORT, command, fails, json, performer};

const SMALL: [&str; 10] =
    ["--data", SHORT, "--max-steps", "1", "--context", "16", "--batch-size", "4", "--vocab-size", "300"];

/// A conversion of a few steps.
const TINY: [&str; 8] =
    ["--data", SHORT, "--transfer-steps", "1", "--calibrate-tokens", "100", "--measure-tokens", "100"];

/// The commands that write a model, each to the folder `out`, from the softmax model `teacher`.
fn writers() -> [Vec<&'static str>; 3] {
    let train = [&["train", "--attention", "softmax", "--out", "out"], &SMALL[..]].concat();
    let attention = "favor:m=2,map=learned";
    let convert = [&["convert", "teacher", "--attention", attention, "--out", "out"], &TINY[..]].concat();
    [train, convert, vec!["export", "teacher", "--out", "out"]]
}

/// Returns the files of a folder by name, but for the one by which it is locked.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let paths = paths.filter(|path| !path.ends_with(".lock"));
    paths.map(|path| (path.clone(), fs::read(&path).unwrap())).collect()
}

fn with_teacher() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let teacher = [&["train", "--attention", "softmax", "--out", "teacher"], &SMALL[..]].concat();
    let done = performer(dir.path(), &teacher);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    dir
}

/// A new model that cannot be saved leaves the old one with its log and its reports.
#[test]
fn a_model_that_cannot_be_replaced_keeps_what_belongs_to_it() {
    let dir = with_teacher();
    let out = dir.path().join("out");
    for command in &writers()[..2] {
        let _ = fs::remove_dir_all(&out);
        let done = performer(dir.path(), command);
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let before = files(&out);
        // With this folder in their place the new weights cannot be written.
        let obstacle = out.join("model.safetensors.new");
        fs::create_dir(&obstacle).unwrap();
        fs::write(obstacle.join("file"), "").unwrap();
        let again = [&command[..], &["--overwrite"]].concat();
        fails(&performer(dir.path(), &again), &["cannot save a checkpoint in out"]);
        fs::remove_dir_all(&obstacle).unwrap();
        assert_eq!(files(&out), before, "{}", command[0]);
        assert!(performer(dir.path(), &again).status.success());
        assert_ne!(files(&out), before, "{}", command[0]);
    }
}

#[test]
fn a_file_that_would_be_replaced_is_named_and_stays() {
    let dir = with_teacher();
    let out = dir.path().join("out");
    for command in writers() {
        let own = match command[0] {
            "export" => ["generation_config.json", "tokenizer_config.json"],
            _ => ["optimizer.safetensors", "train_state.json"],
        };
        let always = ["config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"];
        for name in always.into_iter().chain(own) {
            let _ = fs::remove_dir_all(&out);
            fs::create_dir(&out).unwrap();
            fs::write(out.join(name), "{\"mine\": 1}").unwrap();
            let before = files(&out);
            let refused = performer(dir.path(), &command);
            fails(&refused, &["out holds", "--overwrite"]);
            assert_eq!(files(&out), before, "{} with {name}", command[0]);
        }
        // What the command does not write is no obstacle.
        fs::remove_dir_all(&out).unwrap();
        fs::create_dir(&out).unwrap();
        fs::write(out.join("README.md"), "mine").unwrap();
        let done = performer(dir.path(), &command);
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        assert_eq!(fs::read_to_string(out.join("README.md")).unwrap(), "mine");
        // Neither is what it wrote, if that is said.
        let over = performer(dir.path(), &[&command[..], &["--overwrite"]].concat());
        assert!(over.status.success(), "{}", String::from_utf8_lossy(&over.stderr));
    }
}

/// What tells of a model goes with it: the numbers of one beside another would be taken for its
/// own.
#[test]
fn no_report_outlives_its_model() {
    let dir = with_teacher();
    let out = dir.path().join("out");
    for command in writers() {
        for name in ["metrics.json", "metrics.jsonl", "convert.json"] {
            let _ = fs::remove_dir_all(&out);
            fs::create_dir(&out).unwrap();
            fs::write(out.join(name), "{\"mine\": 1}").unwrap();
            fails(&performer(dir.path(), &command), &[name]);
            assert_eq!(fs::read_to_string(out.join(name)).unwrap(), "{\"mine\": 1}", "{} with {name}", command[0]);
            let over = performer(dir.path(), &[&command[..], &["--overwrite"]].concat());
            assert!(over.status.success(), "{}", String::from_utf8_lossy(&over.stderr));
            let left = fs::read_to_string(out.join(name)).unwrap_or_default();
            assert!(!left.contains("mine"), "{} leaves {name}", command[0]);
        }
    }
}

/// Where there is no state of a training, nothing can go on, so going on is not advised.
#[test]
fn a_model_without_a_training_is_not_to_be_resumed() {
    let dir = with_teacher();
    fs::remove_file(dir.path().join("teacher/train_state.json")).unwrap();
    let refusal = performer(dir.path(), &["train", "--data", SHORT, "--out", "teacher"]);
    fails(&refusal, &["teacher holds a model already", "--overwrite"]);
    assert!(!String::from_utf8_lossy(&refusal.stderr).contains("--resume"));
}

/// An export leaves nothing of the training of another model. One that fails leaves the model that
/// it was to replace, and nothing of its own.
#[test]
fn an_export_that_fails_leaves_the_earlier_model() {
    let dir = with_teacher();
    let export = ["export", "teacher", "--out", "out", "--overwrite"];
    let out = dir.path().join("out");
    let training = ["optimizer.safetensors", "train_state.json"].map(|name| out.join(name));
    fs::create_dir(&out).unwrap();
    training.iter().for_each(|path| fs::write(path, "of another model").unwrap());
    assert!(performer(dir.path(), &export).status.success());
    assert!(!training.iter().any(|path| path.exists()));
    let weights = fs::read(out.join("model.safetensors")).unwrap();
    fs::remove_file(out.join("tokenizer_config.json")).unwrap();
    fs::create_dir(out.join("tokenizer_config.json")).unwrap();
    fails(&performer(dir.path(), &export), &["tokenizer_config.json is a folder"]);
    fs::remove_dir(out.join("tokenizer_config.json")).unwrap();
    for name in ["loss.png", "train_state.json"] {
        fs::create_dir(out.join(name)).unwrap();
        fails(&performer(dir.path(), &export), &[&format!("{name} is a folder")]);
        fs::remove_dir(out.join(name)).unwrap();
    }
    assert_eq!(fs::read(out.join("model.safetensors")).unwrap(), weights);
    let left = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(left.filter(|name| name.ends_with(".new")).count(), 0);
}

/// A save that was stopped after its commit leaves files under the names that an export writes to.
/// They belong to the model that is there, and an export that fails does not take them along.
#[test]
fn an_export_that_fails_leaves_a_model_whose_save_was_stopped() {
    let dir = with_teacher();
    let (teacher, before) = (dir.path().join("teacher"), files(&dir.path().join("teacher")));
    let copy = performer(dir.path(), &["export", "teacher", "--out", "other"]);
    assert!(copy.status.success());
    for name in ["config.json", "tokenizer.json"] {
        fs::rename(teacher.join(name), teacher.join(format!("{name}.new"))).unwrap();
    }
    let obstacle = teacher.join("tokenizer_config.json");
    fs::create_dir(&obstacle).unwrap();
    let export = ["export", "other", "--out", "teacher", "--overwrite"];
    fails(&performer(dir.path(), &export), &["tokenizer_config.json is a folder"]);
    fs::remove_dir(&obstacle).unwrap();
    assert_eq!(files(&teacher), before);
    assert!(performer(dir.path(), &export).status.success());
}

/// A conversion that goes on, or that is finished, is no accident; another model is.
#[test]
fn a_conversion_replaces_no_other_model_and_not_its_teacher() {
    let dir = with_teacher();
    let teacher = files(&dir.path().join("teacher"));
    let to = |out: &str, more: &[&str]| {
        let attention = "favor:m=2,map=learned";
        let words = [&["convert", "teacher", "--attention", attention, "--out", out], &TINY[..], more].concat();
        performer(dir.path(), &words)
    };
    for itself in ["teacher", "teacher/", "./teacher", "teacher/../teacher"] {
        for more in [&[][..], &["--overwrite"]] {
            fails(&to(itself, more), &["folder of the model itself", "--out"]);
        }
        fails(&performer(dir.path(), &["export", "teacher", "--out", itself, "--overwrite"]), &["the model itself"]);
    }
    assert_eq!(files(&dir.path().join("teacher")), teacher);

    // A conversion that fails after its first stages leaves another model as it was.
    let train = [&["train", "--attention", "softmax", "--seed", "7", "--out", "other"], &SMALL[..]].concat();
    assert!(performer(dir.path(), &train).status.success());
    let other = files(&dir.path().join("other"));
    fails(&to("other", &["--transfer-rate", "1e30"]), &["other holds", "would be lost", "--overwrite"]);
    assert_eq!(files(&dir.path().join("other")), other);
    // Published models have no training state.
    for name in ["train_state.json", "optimizer.safetensors"] {
        fs::remove_file(dir.path().join("other").join(name)).unwrap();
    }
    let other = files(&dir.path().join("other"));
    fails(&to("other", &[]), &["other holds", "would be lost", "--overwrite"]);
    assert_eq!(files(&dir.path().join("other")), other);

    assert!(to("student", &[]).status.success());
    let student = files(&dir.path().join("student"));
    assert!(to("student", &[]).status.success(), "it is finished");
    assert_eq!(files(&dir.path().join("student"))[&dir.path().join("student/model.safetensors")], {
        let name = dir.path().join("student/model.safetensors");
        student[&name].clone()
    });
    // A file of something else is not to be removed with its folder.
    fs::create_dir(dir.path().join("foreign")).unwrap();
    fs::write(dir.path().join("foreign/convert.json"), r#"{"from": "png"}"#).unwrap();
    fails(&to("foreign", &[]), &["convert.json is no report of this program", "choose another folder"]);
    // The report of a conversion beside another model tells of a model that is not there.
    fs::copy(dir.path().join("teacher/model.safetensors"), dir.path().join("student/model.safetensors")).unwrap();
    fails(&to("student", &[]), &["student"]);
    assert!(to("student", &["--overwrite"]).status.success());
    assert_eq!(
        files(&dir.path().join("student"))[&dir.path().join("student/config.json")],
        student[&dir.path().join("student/config.json")]
    );
}

/// A run that a comparison is to make has a folder of its own, in which it finds what is not its
/// own.
#[test]
fn a_comparison_replaces_no_foreign_file() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("out/softmax-seed1");
    fs::create_dir_all(&run).unwrap();
    fs::write(run.join("config.json"), "{\"mine\": 1}").unwrap();
    let compare = ["compare", "--attention", "softmax", "--seeds", "1", "--out", "out"];
    fails(&performer(dir.path(), &[&compare[..], &SMALL[..]].concat()), &["softmax-seed1 holds config.json"]);
    assert_eq!(fs::read_to_string(run.join("config.json")).unwrap(), "{\"mine\": 1}");
}

/// Results are written to a folder with results of the same kind, and to no other that has files of
/// their names.
#[test]
fn results_replace_results_alone() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let compare = ["compare", "--attention", "softmax", "--seeds", "1", "--out", "out"];
    let compare = [&compare[..], &SMALL[..]].concat();
    let tasks = ["lab", "tasks", "--task", "recall", "--length", "4", "--steps", "1", "--seeds", "1", "--out", "out"];
    let tasks = [&tasks[..], &["--attention", "softmax"]].concat();
    for (command, names) in
        [(compare, &["compare.json", "table.md", "loss.svg", "loss.png"][..]), (tasks, &["data.json", "report.html"])]
    {
        for name in names {
            let _ = fs::remove_dir_all(&out);
            fs::create_dir(&out).unwrap();
            fs::write(out.join(name), "{\"mine\": 1}").unwrap();
            fails(&performer(dir.path(), &command), &[name, "no result of this kind", "--out"]);
            assert_eq!(files(&out).len(), 1, "{name}");
        }
        fs::remove_dir_all(&out).unwrap();
        for _ in 0..2 {
            let done = performer(dir.path(), &command);
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        }
    }
}

/// A chart, a measurement of speed or a check of the device replaces another one, and nothing else.
#[test]
fn measurements_replace_measurements_alone() {
    let dir = with_teacher();
    let file = |name: &str| dir.path().join(name);
    fs::create_dir(file("out")).unwrap();
    fs::write(file("text.txt"), "A text to be read. ".repeat(9)).unwrap();
    let eval = vec!["eval", "teacher", "--data", "text.txt", "--plot", "out/chart"];
    let bench = ["bench", "decode", "--contexts", "8", "--features", "2", "--head-dim", "2", "--heads", "1"];
    let bench = [&bench[..], &["--out", "out"]].concat();
    let generate = vec!["bench", "generate", "teacher", "--contexts", "9,4", "--tokens", "2", "--out", "out"];
    let check = ["gpu-check", "--device", "cpu", "--quick", "--only-checks", "--only", "embedding", "--out"];
    let check = [&check[..], &["out/check.json"]].concat();
    let convert = ["convert", "teacher", "--attention", "favor:m=2,map=learned", "--out", "out"];
    let convert = [&convert[..], &TINY[..]].concat();
    for (command, names) in [
        (eval, &["chart.svg", "chart.png"][..]),
        (bench, &["decode.json", "decode.md", "decode.svg", "decode.png"]),
        (generate, &["generate.json", "generate.md", "generate-speed.svg", "generate-memory.png"]),
        (check, &["check.json", "check.jsonl"]),
        (convert, &["convert.svg", "convert.png"]),
    ] {
        for name in names {
            fs::remove_dir_all(file("out")).unwrap();
            fs::create_dir(file("out")).unwrap();
            fs::write(file("out").join(name), "{\"mine\": 1}").unwrap();
            fails(&performer(dir.path(), &command), &[name, "would be replaced"]);
            assert_eq!(files(&file("out")).len(), 1, "{command:?} with {name}");
            assert_eq!(fs::read_to_string(file("out").join(name)).unwrap(), "{\"mine\": 1}");
        }
        fs::remove_dir_all(file("out")).unwrap();
        for _ in 0..2 {
            let done = performer(dir.path(), &command);
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        }
        assert!(names.iter().all(|name| file("out").join(name).exists()), "{names:?} of {command:?}");
    }
}

#[test]
fn a_place_that_cannot_be_written_to_is_refused_at_once() {
    let dir = with_teacher();
    fs::write(dir.path().join("file"), "mine").unwrap();
    fs::write(dir.path().join("text.txt"), "A text to be read. ".repeat(9)).unwrap();
    for (command, work) in [
        (&["bench", "decode", "--contexts", "8", "--out", "file/x"][..], "tokens of context"),
        (&["lab", "error", "--quick", "--checkpoint", "none", "--out", "file/x"], "output error"),
        (&["eval", "teacher", "--data", "text.txt", "--plot", "file/x"], "cannot write the chart"),
    ] {
        let refused = performer(dir.path(), command);
        fails(&refused, &["file is a file, where a folder"]);
        assert!(!String::from_utf8_lossy(&refused.stderr).contains(work), "{command:?} began to work");
    }
    // So is a file in the place of a model's folder, or on the way to it.
    let convert = [&["convert", "teacher", "--attention", "favor:m=2,map=learned"], &TINY[..]].concat();
    let train = [&["train", "--attention", "softmax"], &SMALL[..]].concat();
    for command in [&convert[..], &train, &["export", "teacher"]] {
        for (out, more) in [("file", &[][..]), ("file/x", &[]), ("file", &["--overwrite"])] {
            let refused = performer(dir.path(), &[command, &["--out", out], more].concat());
            fails(&refused, &["file is a file, where a folder"]);
            assert!(!String::from_utf8_lossy(&refused.stderr).contains("step"), "{command:?} began to work");
        }
    }
    assert_eq!(fs::read_to_string(dir.path().join("file")).unwrap(), "mine");
}

#[test]
fn a_smaller_comparison_keeps_no_chart_of_a_larger_one() {
    let dir = tempfile::tempdir().unwrap();
    let beside = dir.path().join("out/beside.svg");
    for (more, is_there) in [(&["--attention", "favor:m=4"][..], true), (&[], false)] {
        let words = ["compare", "--attention", "softmax", "--seeds", "1", "--out", "out"];
        let done = performer(dir.path(), &[&words[..], &SMALL, more].concat());
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        assert_eq!(beside.exists(), is_there);
    }
}

/// A conversion or a training may replace a model as Hugging Face has it. Where it is killed
/// between the weights and their configuration, the folder holds the new model.
#[test]
fn weights_are_not_read_by_the_configuration_of_a_model_that_they_replaced() {
    let dir = with_teacher();
    let at = |name: &str| dir.path().join(name);
    assert!(performer(dir.path(), &["export", "teacher", "--out", "hf"]).status.success());
    let train = [&["train", "--attention", "softmax:window=4", "--out", "ours"], &SMALL[..]].concat();
    assert!(performer(dir.path(), &train).status.success());
    let attention =
        |folder: &str| Pretrained::open(&at(folder).to_string_lossy()).unwrap().config.attention.to_string();
    assert_eq!([attention("hf"), attention("ours")], ["softmax", "softmax:window=4"]);
    for name in ["config.json", "tokenizer.json"] {
        fs::copy(at("ours").join(name), at("hf").join(format!("{name}.new"))).unwrap();
    }
    fs::copy(at("ours/model.safetensors"), at("hf/model.safetensors")).unwrap();
    assert_eq!(attention("hf"), "softmax:window=4");
}

/// Names that are no text are those of files on Linux all the same.
#[cfg(target_os = "linux")]
#[test]
fn folders_may_have_names_that_are_no_text() {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};
    let dir = tempfile::tempdir().unwrap();
    let odd = dir.path().join(OsStr::from_bytes(b"b\xe9"));
    fs::create_dir(&odd).unwrap();
    fs::write(odd.join("text.txt"), "A text to be read, and a text to be written. ".repeat(200)).unwrap();
    let mut words = [&["train", "--attention", "softmax", "--json"], &SMALL[..]].concat();
    words[5] = "text.txt";
    // The folder of the run has such a name, and then the way from it to the text.
    for out in [odd.join("run"), dir.path().join("run")] {
        let mut train = command(dir.path(), &words);
        let done = train.arg("--out").arg(out).current_dir(&odd).output().unwrap();
        assert!(json(&done)["val_loss"].is_number());
    }
}

/// A result that cannot be written is said to be missing.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_under_the_result_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let done = command(dir.path(), &["data", "inspect", "--data", SHORT]).stdout(full).output().unwrap();
    let error = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(!done.status.success() && error.contains("cannot write the result to stdout"), "{error}");
}

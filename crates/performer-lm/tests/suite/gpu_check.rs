//! `gpu-check`, on the CPU: it loses no result to a crash or a stop, and replaces nothing before it
//! knows what it is to do.

use serde_json::Value;

use super::program::{command, fails, json, performer};

#[test]
fn passes_on_the_cpu_and_leaves_json() {
    let dir = tempfile::tempdir().unwrap();
    let torch = r#"{"sweep": {"head_dim": 64, "batch": 2, "heads": 1, "causal": true}, "points": [
        {"implementation": "torch-sdpa", "tokens": 128, "features": null, "backward": true, "median_ms": 7.5,
         "quartiles_ms": [7, 8], "runs": 9}]}"#;
    std::fs::write(dir.path().join("torch.json"), torch).unwrap();
    let words = ["gpu-check", "--device", "cpu", "--quick", "--out", "out.json", "--against", "torch.json", "--json"];
    let report = json(&performer(dir.path(), &words));
    let failed: Vec<&Value> = report["checks"].as_array().unwrap().iter().filter(|c| c["passed"] != true).collect();
    assert!(failed.is_empty() && report["passed"] == true, "{failed:?}");
    // What computed each attention is said.
    for check in report["checks"].as_array().unwrap() {
        let is_attention = ["favor ", "softmax "].iter().any(|name| check["what"].as_str().unwrap().starts_with(name));
        assert_eq!(check["path"] == "fused CPU kernels", is_attention, "{check}");
    }
    assert_eq!(report["training"].as_array().unwrap().len(), 2, "{}", report["skipped"]);
    for speed in report["speed"].as_array().unwrap() {
        assert!(speed["milliseconds"].as_f64() > Some(0.0), "{speed}");
        let given =
            (speed["tokens"] == 128 && ["both", "autograd"].contains(&speed["work"].as_str().unwrap())).then_some(7.5);
        assert_eq!(speed["pytorch_milliseconds"].as_f64(), given, "{speed}");
    }
    let saved: Value = serde_json::from_slice(&std::fs::read(dir.path().join("out.json")).unwrap()).unwrap();
    assert_eq!(saved, report);
    // Measurements of other sizes are put beside nothing, and the program says so.
    std::fs::write(dir.path().join("torch.json"), torch.replace("128", "77")).unwrap();
    // What was measured is read again, not measured.
    let output = performer(dir.path(), &[&words[..], &["--resume"]].concat());
    assert!(output.status.success() && String::from_utf8_lossy(&output.stderr).contains("none of the sizes"));
}

#[test]
fn loses_one_piece_of_work_to_a_crash_and_goes_on_after_a_stop() {
    let dir = tempfile::tempdir().unwrap();
    let check = |more: &[&str]| {
        let words = ["gpu-check", "--device", "cpu", "--quick", "--only-checks", "--only", "f16", "--out", "out.json"];
        performer(dir.path(), &[&words[..], more].concat())
    };
    let saved = || -> Value { serde_json::from_slice(&std::fs::read(dir.path().join("out.json")).unwrap()).unwrap() };
    let lines = || std::fs::read_to_string(dir.path().join("out.jsonl")).unwrap();

    let output = check(&["--crash", "gelu f16"]);
    assert!(!output.status.success());
    let report = saved();
    let lost = report["lost"].as_array().unwrap();
    assert!(lost.len() == 1 && lost[0].as_str().unwrap().starts_with("gelu f16: ended with signal"), "{lost:?}");
    let names = |report: &Value| -> Vec<String> {
        report["checks"].as_array().unwrap().iter().map(|c| c["what"].as_str().unwrap().to_string()).collect()
    };
    let whole: Value = {
        assert!(check(&[]).status.success());
        saved()
    };
    let others: Vec<String> = names(&whole).into_iter().filter(|name| name != "gelu f16").collect();
    assert_eq!(names(&report), others);

    // Stopped after the first pieces, in the middle of a line.
    let text = lines();
    let third = text.match_indices("{\"begin\"").nth(3).unwrap().0;
    std::fs::write(dir.path().join("out.jsonl"), &text[..third + 10]).unwrap();
    assert!(check(&["--resume"]).status.success());
    assert_eq!(names(&saved()), names(&whole));
    // No time: nothing is done, and the report says what is left.
    assert!(check(&["--minutes", "0"]).status.success());
    assert!(saved()["checks"].as_array().unwrap().is_empty());
    assert!(!saved()["not_reached"].as_array().unwrap().is_empty());
    // Lines of something else, and names of nothing.
    std::fs::write(dir.path().join("out.jsonl"), "{}\n").unwrap();
    fails(&check(&["--resume"]), &["out.jsonl", "--resume"]);
    let words = ["gpu-check", "--device", "cpu", "--quick", "--only", "no such thing"];
    fails(&performer(dir.path(), &words), &["no such thing"]);
}

/// What a check was told wrongly is said before anything of an earlier check is replaced.
#[test]
fn refuses_before_it_replaces() {
    let dir = tempfile::tempdir().unwrap();
    let check = |more: &[&str]| {
        let words = ["gpu-check", "--device", "cpu", "--quick", "--only-checks", "--only", "gelu f16"];
        performer(dir.path(), &[&words[..], more].concat())
    };
    assert!(check(&[]).status.success());
    let read = || ["gpu-check.json", "gpu-check.jsonl"].map(|name| std::fs::read(dir.path().join(name)).unwrap());
    let before = read();
    for (more, words) in [
        (&["--minutes", "-1"][..], &["--minutes is -1", "at least 0"][..]),
        (&["--patience", "0"], &["--patience is 0", "at least 1"]),
        (&["--out", "."], &["a folder", "gpu-check.json"]),
        (&["--resume", "--out", "none.json"], &["none.jsonl", "leave out --resume"]),
    ] {
        fails(&check(more), words);
        assert_eq!(read(), before, "{more:?}");
    }
    // Shares of the work do not write to one file.
    assert!(check(&["--share", "1/1"]).status.success());
    let half = ["gpu-check", "--device", "cpu", "--quick", "--only-checks", "--only", "gelu", "--share", "2/2"];
    assert!(performer(dir.path(), &half).status.success());
    assert!(dir.path().join("gpu-check-2-of-2.json").exists());
}

/// Whoever kills the program ends the process that does its work too: otherwise that one would add
/// lines beside those of a check that goes on.
#[test]
fn killed_it_leaves_no_process_behind_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let words = ["gpu-check", "--device", "cpu", "--quick", "--only-checks", "--only", "bf16", "--out", "out.json"];
    let lines = || std::fs::read_to_string(dir.path().join("out.jsonl")).unwrap_or_default();
    let items = |kind: &str| -> Vec<String> {
        let all = lines();
        let of_kind = all.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()?.get(kind).cloned());
        of_kind.map(|line| line["item"].as_str().unwrap().to_string()).collect()
    };
    let mut program = command(dir.path(), &words).stderr(std::process::Stdio::piped()).spawn().unwrap();
    while items("end").is_empty() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    program.kill().unwrap();
    // The process that does the work has this pipe too, which ends with the last that holds it.
    let mut said = String::new();
    std::io::Read::read_to_string(&mut program.stderr.take().unwrap(), &mut said).unwrap();
    program.wait().unwrap();
    let before = items("end");

    let report = json(&performer(dir.path(), &[&words[..], &["--resume", "--json"]].concat()));
    assert!(report["passed"] == true && report["lost"].as_array().unwrap().is_empty());
    let mut all = items("end");
    assert!(before.len() < all.len(), "all was done by a process that nobody oversaw: {said}");
    assert_eq!(all[..before.len()], before);
    let count = all.len();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), count, "work was done twice");
}

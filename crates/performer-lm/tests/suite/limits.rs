//! Settings that cannot be used get an error before anything is done with them, and results that
//! mean nothing are not shown as if they did.

use std::fs;

use serde_json::Value;

use super::program::{SHORT, fails, json, performer};

const SMALL: [&str; 8] = ["--data", SHORT, "--context", "16", "--batch-size", "4", "--vocab-size", "300"];

fn train<'a>(steps: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["train", "--max-steps", steps], &SMALL[..], more].concat()
}

#[test]
fn sizes_beyond_all_reason_are_refused_or_do_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| performer(dir.path(), args);
    fails(&run(&["--threads", "100000", "man"]), &["--threads is 100000", "at most"]);
    let vocabulary = ["train", "--data", SHORT, "--vocab-size", "1000000000"];
    fails(&run(&vocabulary), &["1000000000", "larger than any model's"]);
    let context = ["train", "--data", SHORT, "--vocab-size", "300", "--context", "16777216"];
    fails(&run(&context), &["fewer than one batch"]);

    for (option, size) in [("--length", "length"), ("--pairs", "pairs")] {
        let task = ["lab", "tasks", "--task", "mqar", "--steps", "1", option, "4611686018427387904"];
        fails(&run(&task), &[size, "at most 1048576"]);
    }

    for bench in
        [&["attention", "--tokens"][..], &["attention", "--heads"], &["attention", "--batch"], &["decode", "--heads"]]
    {
        fails(&run(&[&["bench"], bench, &["4611686018427387904"]].concat()), &["than memory holds; lower one"]);
    }

    // More sequences a pass than a step has are all of them.
    let of_all = |passes: &str, out: &str| {
        json(&run(&train("2", &["--attention", "softmax", "--micro-batch", passes, "--out", out, "--json"])))
    };
    let most = of_all("4611686018427387904", "most");
    assert_eq!(most["val_loss"], of_all("4", "four")["val_loss"]);
    // The same in a run that goes on.
    let resumed = json(&run(&["train", "--resume", "most", "--json"]));
    assert_eq!(resumed["val_loss"], most["val_loss"]);
    let epochs = ["--attention", "softmax", "--epochs", "18446744073709551615", "--out", "epochs", "--json"];
    assert_eq!(json(&run(&train("2", &epochs)))["steps"], 2);

    let convert = ["convert", "four", "--attention", "favor:m=4,map=learned", "--data", SHORT, "--out", "student"];
    let adapted = ["--tune-steps", "2", "--adapters", "1000000000000"];
    let refused = run(&[&convert[..], &adapted].concat());
    fails(&refused, &["adapters of rank 1000000000000"]);
    assert!(!String::from_utf8_lossy(&refused.stderr).contains("calibrate"), "it is refused before anything is done");
    let tiny = ["--transfer-steps", "2", "--calibrate-tokens", "64", "--measure-tokens", "64"];
    let points = run(&[&convert[..], &tiny, &["--points", "18446744073709551615"]].concat());
    assert!(points.status.success(), "{}", String::from_utf8_lossy(&points.stderr));
}

#[test]
fn a_tokenizer_that_cannot_decode_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| performer(dir.path(), args);
    assert!(run(&train("1", &["--attention", "softmax", "--out", "run"])).status.success());
    let path = dir.path().join("run/tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    // The library knows a decoder by its fields, too, where its type is not named.
    for decoder in [
        serde_json::json!({"type": "Strip", "content": "a", "start": 0, "stop": 3}),
        serde_json::json!({"content": "a", "start": 1, "stop": 1}),
        serde_json::json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"content": "a", "start": 1, "stop": 1}]}),
    ] {
        tokenizer["decoder"] = decoder;
        fs::write(&path, tokenizer.to_string()).unwrap();
        fails(&run(&["generate", "run"]), &["tokenizer.json", "Strip"]);
    }
}

/// Features are for what is beyond the window; a context that ends before has no use for them.
#[test]
fn features_that_are_never_used_are_refused_before_anything_is_done() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| performer(dir.path(), args);
    for attention in ["favor:m=8,map=learned,window=16", "favor:m=8,window=12,sinks=4", "softmax+favor:window=99/2"] {
        let words = ["a window of", "sequences of 16 tokens never reach its features"];
        fails(&run(&train("2", &["--attention", attention, "--out", "run"])), &words);
        let two = ["--attention", "softmax", "--attention", attention, "--out", "two"];
        fails(&run(&[&["compare", "--max-steps", "2"], &SMALL[..], &two].concat()), &words);
        assert!(!dir.path().join("run/config.json").exists() && !dir.path().join("two").exists());
    }
    let window = train("1", &["--attention", "favor:m=8,map=learned,window=15", "--out", "run"]);
    assert!(run(&window).status.success());
    let tasks = ["lab", "tasks", "--task", "recall", "--length", "4", "--steps", "2", "--seeds", "1", "--attention"];
    fails(&run(&[&tasks[..], &["favor:map=learned,window=32"]].concat()), &["never reach"]);
}

#[test]
fn a_training_that_learned_nothing_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let diverged = ["--attention", "softmax", "--learning-rate", "30", "--schedule", "constant", "--out", "run"];
    let output = performer(dir.path(), &train("30", &diverged));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("warning: this is above 5.7038") && said.contains("lower the learning rate"), "{said}");
    assert!(said.contains("learned nothing") && !said.contains("another story"), "{said}");
    let table = String::from_utf8(output.stdout).unwrap();
    let row = table.lines().find(|line| line.contains("perplexity")).unwrap();
    assert!(row.contains('e') && row.trim_end_matches('|').trim().len() < 80, "{row}");
    // The report can be read back, though there is no infinity in JSON.
    let report: Value = serde_json::from_slice(&fs::read(dir.path().join("run/metrics.json")).unwrap()).unwrap();
    assert!(report["perplexity"].as_f64() > Some(1e6), "{report}");
    let said = String::from_utf8(performer(dir.path(), &train("2", &["--out", "two"])).stderr).unwrap();
    assert!(said.contains("another story") && !said.contains("warning"), "{said}");
}

/// A training whose numbers are no longer finite says at which step, in which layer, and what is
/// left of it.
#[test]
fn a_training_that_fails_says_where_and_what_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let diverged = ["--attention", "softmax", "--learning-rate", "1e30", "--schedule", "constant", "--out", "run"];
    let output = performer(dir.path(), &train("30", &[&diverged[..], &["--save-every", "2"]].concat()));
    let words = [
        "training, step 2 failed",
        "not finite",
        "layer 0",
        "run holds the checkpoint of step 0",
        "help: --learning-rate",
    ];
    fails(&output, &words);
    assert!(performer(dir.path(), &["generate", "run", "--max-tokens", "1"]).status.success());
}

/// A rate that is too high is named as the cause, in the gates of a model and in its validation.
#[test]
fn a_training_that_diverges_says_so_wherever_it_shows() {
    let dir = tempfile::tempdir().unwrap();
    for (attention, steps, rate) in
        [("favor:m=8,gate", "6", "1e30"), ("softmax", "1", "1e30"), ("favor:m=8,gate", "1", "1e30")]
    {
        let args = train(steps, &["--attention", attention, "--learning-rate", rate, "--schedule", "constant"]);
        // The first to meet such values may be a step or a validation.
        for more in [&["--overwrite"][..], &["--overwrite", "--eval-every", "1"]] {
            let failed = performer(dir.path(), &[&args[..], more].concat());
            fails(&failed, &["values are not finite; lower the learning rate", "help: --learning-rate sets it"]);
        }
    }
    // Of several rates, one that is too high loses to the others.
    let compare = [
        "compare",
        "--data",
        "text",
        "--attention",
        "softmax",
        "--learning-rates",
        "1e-3,1e30",
        "--schedule",
        "constant",
    ];
    let sizes =
        ["--max-steps", "4", "--context", "16", "--batch-size", "4", "--seeds", "1", "--out", "compared", "--json"];
    std::fs::create_dir(dir.path().join("text")).unwrap();
    for part in ["train", "valid", "test"] {
        let text = format!("Once upon a time there was a fox in the {part} text. ").repeat(200);
        std::fs::write(dir.path().join(format!("text/{part}.txt")), text).unwrap();
    }
    let vocabulary = ["--vocab-size", "280"];
    let compared = performer(dir.path(), &[&compare[..], &sizes, &vocabulary].concat());
    let outcome = json(&compared);
    assert_eq!(outcome["runs"].as_array().map(Vec::len), Some(1));
    assert_eq!(outcome["summary"][0]["learning_rate"], 1e-3);
    let said = String::from_utf8_lossy(&compared.stderr);
    assert!(said.contains("softmax with the learning rate 1000000000000000000000000000000 and seed"), "{said}");
    // It was chosen by the first seed, and is the one of the second.
    let again = [&compare[..], &sizes[..8], &["--out", "both", "--json"], &vocabulary].concat();
    let again: Vec<&str> = again.into_iter().map(|arg| if arg == "1" { "1,2" } else { arg }).collect();
    let outcome = json(&performer(dir.path(), &again));
    let tried = outcome["learning_rates"].as_array().unwrap();
    assert_eq!(tried.len(), 2, "{tried:?}");
    assert_eq!((&tried[0]["chosen"], &tried[1]["chosen"]), (&true.into(), &false.into()));
    assert_eq!((&tried[1]["learning_rate"], tried[1]["val_loss"].is_null()), (&1e30.into(), true));
    assert_eq!(outcome["summary"][0]["seeds"].as_array().map(Vec::len), Some(2));
    let too_high =
        [&compare[..5], &["--learning-rates", "1e29,1e30", "--schedule", "constant"], &sizes, &vocabulary].concat();
    fails(&performer(dir.path(), &too_high), &["diverged with every learning rate"]);
}

/// Options that would do nothing, or that contradict each other, are refused.
#[test]
fn options_that_do_nothing_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let convert = ["convert", "there-is-none", "--data", SHORT];
    for (more, word) in [
        (&["--layer-costs", "--tune-steps", "3"][..], "--tune-steps"),
        (&["--layer-costs", "--out", "o"], "--out"),
        (&["--layer-costs", "--control"], "--control"),
        (&["--layer-costs", "--calibrate-tokens", "100"], "--calibrate-tokens"),
        (&["--layer-costs", "--balance"], "--balance"),
    ] {
        fails(&performer(dir.path(), &[&convert[..], more].concat()), &["cannot be used with", word]);
    }
    let teacher = train("1", &["--attention", "softmax", "--out", "teacher"]);
    assert!(performer(dir.path(), &teacher).status.success());
    let convert = ["convert", "teacher", "--data", SHORT, "--out", "o"];
    for (more, word) in [
        (&["--control"][..], "--control belongs to fine-tuning"),
        (&["--tune-rate", "1e-3"], "give --tune-steps too"),
        (&["--adapters", "4"], "--adapters belongs to fine-tuning"),
        (&["--distillation", "0.3"], "--distillation belongs to fine-tuning"),
        (&["--layer", "0=softmax", "--layer", "1,0=uniform"], "layer 0 an attention twice"),
        (&["--measure-tokens", "0"], "--measure-tokens is 0"),
        (&["--batch-size", "0"], "--batch-size is 0"),
        (&["--layer", "9=softmax:window=8"], "--layer names layer 9"),
        (&["--balance", "--calibrate-tokens", "0"], "--balance belongs to"),
        (&["--transfer-rate", "0.1", "--transfer-steps", "0"], "--transfer-rate belongs to"),
        (&["--drop-window", "0.5", "--transfer-steps", "0"], "--drop-window belongs to"),
        (&["--attention", "softmax:window=8", "--balance"], "--balance belongs to"),
        (&["--attention", "softmax:window=8", "--transfer-rate", "0.1"], "--transfer-rate belongs to"),
        (&["--attention", "softmax:window=8", "--drop-window", "0.5"], "--drop-window belongs to"),
    ] {
        fails(&performer(dir.path(), &[&convert[..], more].concat()), &[word]);
        assert!(!dir.path().join("o/model.safetensors").exists());
    }
    let resumed = ["train", "--resume", "exported"];
    assert!(performer(dir.path(), &["export", "teacher", "--out", "exported"]).status.success());
    fails(&performer(dir.path(), &resumed), &["exported"]);
    fails(
        &performer(dir.path(), &train("1", &["--schedule", "cosine"])),
        &["is not a learning-rate schedule", "warmup-cosine"],
    );
    for (more, words) in [
        (&["--attention", "softmax", "--redraw-every", "2"][..], &["--redraw-every: no attention here"][..]),
        (&["--attention", "favor:m=8,map=learned", "--redraw-every", "2"], &["--redraw-every: no attention here"]),
        (&["--attention", "favor:m=8", "--fit-every", "2"], &["--fit-every: no attention here", "map=dense"]),
        (&["--tokenizer", "tokenizer.json", "--vocab-size", "300"], &["--vocab-size: the tokenizer of --tokenizer"]),
        (&["--max-steps", "0"], &["--max-steps is 0; it must be at least 1"]),
    ] {
        let without_steps = ["train", "--data", SHORT, "--out", "none"];
        fails(&performer(dir.path(), &[&without_steps[..], more].concat()), words);
        assert!(!dir.path().join("none").exists());
    }
    // Of two attentions one has a use for it.
    let one_of_two = ["bench", "train", "--attention", "softmax", "--attention", "favor:m=8", "--redraw-every", "2"];
    let short = ["--steps", "1", "--context", "16", "--batch-size", "2", "--data", SHORT];
    assert!(performer(dir.path(), &[&one_of_two[..], &short].concat()).status.success());
    for option in ["--epochs", "--max-steps", "--eval-every", "--save-every"] {
        let args = [&["bench", "train", "--attention", "softmax", option, "2"][..], &short].concat();
        fails(&performer(dir.path(), &args), &[option, "--steps says how many steps"]);
    }
    let features = train("1", &["--attention", "favor:map=taylor2,window=4"]);
    fails(&performer(dir.path(), &features), &["the feature map Taylor2 does not return logarithms", "map=positive"]);
}

#[test]
fn numbers_out_of_range_are_named_by_their_option() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| performer(dir.path(), args);
    assert!(run(&train("1", &["--attention", "softmax", "--out", "run"])).status.success());
    fails(&run(&["eval", "run", "--data", SHORT, "--max-tokens", "0"]), &["--max-tokens is 0", "at least 1"]);
    for count in [1, 5, 17, 1000] {
        let count_text = count.to_string();
        let eval = json(&run(&["eval", "run", "--data", SHORT, "--max-tokens", &count_text, "--json"]));
        assert_eq!(eval["tokens"], count);
    }
    // This is found out before the text is looked for.
    let longer = ["eval", "run", "--data", "nowhere.txt", "--context", "17"];
    fails(&run(&longer), &["--context is 17; it must be at most 16, the positions that this model learned"]);
    fails(
        &run(&["lab", "error", "--quick", "--checkpoint", "run", "--windows", "0"]),
        &["--windows is 0", "at least 1"],
    );
    fails(
        &run(&["lab", "error", "--quick", "--checkpoint", "none", "--data", SHORT]),
        &["--data belongs to the heads"],
    );
    for option in ["--windows", "--calibrate-tokens"] {
        let none = ["lab", "error", "--quick", "--checkpoint", "none", option, "5"];
        fails(&run(&none), &[option, "belongs to the heads"]);
    }
    for rates in ["0,1e-3", "nan"] {
        fails(&run(&["compare", "--data", SHORT, "--learning-rates", rates]), &["--learning-rates is", "above 0"]);
    }
    let inspect = ["convert", "run", "--inspect", "--attention", "favor:m=4", "--data", SHORT];
    fails(&run(&[&inspect[..], &["--calibrate-tokens", "0"]].concat()), &["--inspect fits features", "at least 1"]);
    for attention in ["favor:m=4,key-dim=8", "favor:m=4,mup-scale", "favor:m=4,output-norm"] {
        let inspect = ["convert", "run", "--inspect", "--attention", attention, "--data", SHORT];
        fails(&run(&inspect), &["--inspect looks at", "leave key-dim, mup-scale and output-norm out"]);
    }
    for option in ["--tune-steps", "--measure-tokens", "--points", "--recall"] {
        fails(&run(&[&inspect[..], &[option, "16"]].concat()), &["--inspect", "cannot be used with", option]);
    }
    fails(&run(&["generate", "run", "--top-p", "0"]), &["top-p is 0; it must be above 0"]);
    fails(&run(&["generate", "run", "--temperature", "-1"]), &["temperature is -1; it must be at least 0"]);
    fails(&run(&train("1", &["--learning-rate", "-0.5"])), &["--learning-rate is -0.5; it must be a number above 0"]);
    let seed = run(&["generate", "run", "--seed", "-1"]);
    fails(&seed, &["invalid value '-1' for '--seed"]);
    fails(&run(&train("1", &["--attention", "favor:m=4,m=8"])), &["m is given twice"]);
    fails(&run(&train("1", &["--schedule", "one-cycle:div=10,div=20"])), &["`div` is given twice"]);
}

/// Who typed no option reads of the setting in the file, and not of an option of that name.
#[test]
fn settings_of_a_file_are_not_called_by_an_option() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| performer(dir.path(), args);
    assert!(run(&train("1", &["--attention", "softmax", "--out", "run"])).status.success());
    let path = dir.path().join("run/config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["context"] = 0.into();
    fs::write(&path, config.to_string()).unwrap();
    let refused = run(&["eval", "run", "--data", SHORT]);
    fails(&refused, &["model config: context is 0; it must be at least 1"]);
    assert!(!String::from_utf8_lossy(&refused.stderr).contains("--context"));
    // Such a file is refused whatever is typed beside it.
    for more in [&[][..], &["--context", "16"]] {
        let words = ["train", "--data", SHORT, "--config", "run/config.json", "--out", "other"];
        let refused = run(&[&words[..], more].concat());
        fails(&refused, &["run/config.json: model config: context is 0; it must be at least 1"]);
        assert!(!String::from_utf8_lossy(&refused.stderr).contains("--context"));
    }
}

#[test]
fn a_conversion_has_the_defaults_of_its_layers_and_is_measured_as_often_as_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| performer(dir.path(), args);
    assert!(run(&train("1", &["--attention", "softmax", "--out", "teacher"])).status.success());
    let convert = ["convert", "teacher", "--data", SHORT, "--measure-tokens", "64", "--json"];
    // No layer has features, so nothing is fitted.
    json(&run(&[&convert[..], &["--layer", "0,1=softmax:window=8", "--out", "windows"]].concat()));
    for (steps, points, expected) in [("7", "3", 3), ("4", "8", 3)] {
        let more = ["--attention", "favor:m=4,map=learned", "--calibrate-tokens", "64", "--out", steps];
        let report = json(&run(&[&convert[..], &more, &["--transfer-steps", steps, "--points", points]].concat()));
        let stages = report["stages"].as_array().unwrap();
        let transfer = stages.iter().find(|stage| stage["name"] == "transfer").unwrap();
        let measured = transfer["points"].as_array().map_or(0, Vec::len);
        assert_eq!(measured, expected, "{steps} steps, {points} points");
    }
}

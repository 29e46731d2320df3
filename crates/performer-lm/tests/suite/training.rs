//! These tests check training runs: they learn, resume as if never stopped, and do not depend on
//! the number of threads.

use std::{path::Path, sync::atomic::AtomicBool};

use anyhow::{Context, Result};
use candle_core::Device;
use performer_lm::{
    bench,
    compare::{Comparison, Outcome},
    config::{ModelConfig, Positions, Precision, Preset, TrainingConfig},
    convert,
    data::{Prepared, TokenFile, Tokenizer},
    eval::evaluate,
    lab::ablate,
    listener::Silent,
    train::{Checkpoint, Grid, Report, RunOptions, Trainer, TrainingState, git_revision, load_model, training_batches},
};
use serde_json::Value;

/// Returns a text with a simple law, which a small model can learn in seconds.
fn data() -> Prepared {
    let alphabet: Vec<String> = (0..20).map(|i| format!("<w{i}>")).collect();
    let mut vocabulary: Vec<String> = alphabet.iter().enumerate().map(|(i, w)| format!("{w:?}: {}", i + 1)).collect();
    vocabulary.push("\"<|endoftext|>\": 0".into());
    let json = format!(
        r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{{"id":0,"content":"<|endoftext|>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}}],"normalizer":null,"pre_tokenizer":null,"post_processor":null,"decoder":null,"model":{{"type":"WordLevel","vocab":{{{}}},"unk_token":"<w0>"}}}}"#,
        vocabulary.join(",")
    );
    let tokens = |n: usize, start: usize| -> Vec<u32> { (0..n).map(|i| ((i * 7 + start) % 20 + 1) as u32).collect() };
    Prepared {
        corpus_name: "law".into(),
        description: "a law".into(),
        tokenizer: Tokenizer::from_bytes(json.into_bytes()).unwrap(),
        train: TokenFile::from_tokens(&tokens(4000, 0), 12_000).unwrap().into(),
        valid: TokenFile::from_tokens(&tokens(400, 3), 1200).unwrap().into(),
        test: None,
        cache: None,
    }
}

/// What is shown on the way must not end a training: this tokenizer has no tokens for the words
/// with which stories begin.
#[test]
fn a_training_shows_no_story_that_its_tokenizer_cannot_spell() -> Result<()> {
    let data = data();
    let json = String::from_utf8(data.tokenizer.as_bytes().to_vec())?;
    let tokenizer =
        Tokenizer::from_bytes(json.replace("\"unk_token\":\"<w0>\"", "\"unk_token\":\"none\"").into_bytes())?;
    assert!(tokenizer.encode("Once upon a time").is_err() && tokenizer.encode("<w1>").is_ok());
    let data = Prepared { tokenizer, ..data };
    let (model, training) = recipe("softmax");
    let training = TrainingConfig { max_steps: Some(2), eval_every: 1, ..training };
    let folder = tempfile::tempdir()?;
    let options = RunOptions { samples: true, ..RunOptions::new(folder.path()) };
    assert_eq!(Trainer::new(&model, &training, &data, options)?.run()?.context("nobody stopped it")?.steps, 2);
    Ok(())
}

fn recipe(attention: &str) -> (ModelConfig, TrainingConfig) {
    let (model, training) = Preset::Seed.load().unwrap();
    let model = ModelConfig {
        attention: attention.parse().unwrap(),
        hidden_size: 16,
        heads: 2,
        kv_heads: 2,
        feed_forward_size: 32,
        // The law repeats itself after 20 tokens; sequences of 20 would all be the same.
        context: 19,
        dropout: 0.1,
        ..model
    };
    let training = TrainingConfig {
        epochs: 3,
        batch_size: 8,
        micro_batch: 3,
        learning_rate: 1e-2,
        redraw_every: 7,
        eval_every: 10,
        ..training
    };
    (model, training)
}

fn options<'a>(out: &'a Path, threads: usize, stop: &'a AtomicBool) -> RunOptions<'a> {
    RunOptions { overwrite: true, threads, stop, ..RunOptions::new(out) }
}

fn run(attention: &str, training: &TrainingConfig, out: &Path, threads: usize) -> Result<Report> {
    let (model, _) = recipe(attention);
    let stop = AtomicBool::new(false);
    let data = data();
    let report = Trainer::new(&model, training, &data, options(out, threads, &stop))?.run()?;
    report.context("nobody stopped the run")
}

fn weights(dir: &Path) -> Result<Vec<(String, Vec<f32>)>> {
    let checkpoint = Checkpoint::load(dir, &Device::Cpu)?;
    let mut all: Vec<_> = checkpoint
        .tensors
        .into_iter()
        .map(|(name, t)| Ok((name, t.flatten_all()?.to_vec1::<f32>()?)))
        .collect::<Result<_>>()?;
    all.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(all)
}

/// Every attention learns a law in which a token alone decides the next one; what attention adds is
/// tested where only it can know the answer (`regressions`).
#[test]
fn models_with_every_attention_learn() -> Result<()> {
    for attention in
        ["softmax", "favor:m=32", "favor-gated:m=32", "softmax:gate", "favor:m=32,gate,conv,output-gate,output-norm"]
    {
        let dir = tempfile::tempdir()?;
        let (_, training) = recipe(attention);
        let report = run(attention, &training, dir.path(), 2)?;
        // There are twenty words, so the loss is ln 20 = 3.0 before anything is learned.
        assert!(report.val_loss < 2.5, "{attention}: {}", report.val_loss);
        assert!((report.perplexity - report.val_loss.exp()).abs() < 1e-9);
        let (model, _) = load_model(dir.path(), &Device::Cpu)?;
        let again = evaluate(&model, &data().valid, 1)?;
        assert_eq!(again.val_loss, report.val_loss, "the saved model is the trained one");
        assert_eq!(again.tokens, 399);
    }
    Ok(())
}

#[test]
fn bf16_learns_with_f32_weights() -> Result<()> {
    for attention in ["softmax", "favor:m=16"] {
        let folder = tempfile::tempdir()?;
        let out = folder.path();
        let (_, training) = recipe(attention);
        let whole = run(attention, &training, &out.join("f32"), 2)?;
        let half = run(attention, &TrainingConfig { dtype: Precision::Bf16, ..training }, &out.join("bf16"), 2)?;
        assert!((whole.val_loss - half.val_loss).abs() < 0.05, "{attention}: {} and {}", whole.val_loss, half.val_loss);
        assert_ne!(whole.val_loss, half.val_loss);
        // Weights that had been rounded to bf16 would end in zeros.
        let weights = weights(&out.join("bf16"))?;
        assert!(weights.iter().any(|(_, values)| values.iter().any(|x| x.to_bits() & 0xffff != 0)));
    }
    Ok(())
}

#[test]
fn a_resumed_run_is_the_unbroken_one() -> Result<()> {
    resume("favor:m=8", |training| training)
}

/// The parts of a layer are weights like others: they are saved, and their moments with them.
#[test]
fn a_resumed_run_with_parts_is_the_unbroken_one() -> Result<()> {
    resume("favor-gated:m=8,conv,output-gate,output-norm", |training| training)
}

/// A fit is a function of the weights, the step and the text, and what was fitted last is saved.
#[test]
fn a_resumed_run_with_fitted_features_is_the_unbroken_one() -> Result<()> {
    resume("favor:m=8,map=dense,window=4,gate", |training| TrainingConfig { fit_every: 7, ..training })
}

/// Features are fitted before the first step, and again at each interval, to what the model's
/// queries and keys are then; the model learns with them, and others are left alone.
#[test]
fn features_that_can_be_fitted_are_fitted_in_training() -> Result<()> {
    let trained = |attention: &str, fit_every: usize, max_steps: Option<usize>| -> Result<_> {
        let dir = tempfile::tempdir()?;
        let (_, training) = recipe(attention);
        let report = run(attention, &TrainingConfig { fit_every, max_steps, ..training }, dir.path(), 2)?;
        let is_map = |(name, _): &(String, Vec<f32>)| name.contains(".feature_map.");
        let (maps, others): (Vec<_>, Vec<_>) = weights(dir.path())?.into_iter().partition(is_map);
        Ok((report.val_loss, maps, others))
    };
    for attention in ["favor:m=16,map=dense", "favor:m=16,map=optimal", "favor:m=16,map=dense,window=4,gate"] {
        let (_, never, _) = trained(attention, 0, Some(2))?;
        let (_, once, of_once) = trained(attention, 5, Some(2))?;
        let (_, twice, _) = trained(attention, 1, Some(2))?;
        assert!(!never.is_empty() && never != once && once != twice, "{attention}");
        assert!(of_once.iter().flat_map(|(_, values)| values).all(|x| x.is_finite()), "{attention}");
        let (loss, ..) = trained(attention, 10, None)?;
        assert!(loss < 2.5, "{attention}: {loss}");
    }
    for attention in ["softmax", "favor:m=16", "favor:m=16,map=learned"] {
        assert_eq!(trained(attention, 0, Some(3))?, trained(attention, 2, Some(3))?, "{attention}");
    }
    Ok(())
}

fn resume(attention: &str, change: fn(TrainingConfig) -> TrainingConfig) -> Result<()> {
    let (model, training) = recipe(attention);
    let training = change(training);
    let whole = tempfile::tempdir()?;
    run(attention, &training, whole.path(), 2)?;

    // The run stops in the middle of an epoch, after a redraw, with dropout on. The step limit is
    // not part of what resumes.
    let broken = tempfile::tempdir()?;
    let data = data();
    let stop = AtomicBool::new(false);
    let cut = TrainingConfig { save_every: 11, ..training.clone() };
    let stopping = TrainingConfig { eval_every: 11, ..cut };
    let stopped = std::thread::scope(|scope| {
        // The flag is set once the checkpoint of step 11 exists.
        scope.spawn(|| {
            let done =
                || performer_lm::train::read_log(&broken.path().join("metrics.jsonl")).is_ok_and(|l| l.len() > 12);
            while !done() {
                std::thread::yield_now();
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        Trainer::new(&model, &stopping, &data, options(broken.path(), 1, &stop))?.run()
    })?;
    assert!(stopped.is_none(), "the run was over before it could be stopped");
    let go = AtomicBool::new(false);
    assert!(Trainer::resume(&data, options(broken.path(), 3, &go))?.run()?.is_some());
    assert_eq!(weights(whole.path())?, weights(broken.path())?);
    Ok(())
}

/// Features are drawn anew at the steps that are multiples of the setting, by the seed and their
/// count.
#[test]
fn redrawn_features_are_others() -> Result<()> {
    let (model, training) = recipe("favor:m=8");
    let projection = |redraw_every: usize| -> Result<Vec<f32>> {
        let dir = tempfile::tempdir()?;
        let training = TrainingConfig { max_steps: Some(3), redraw_every, ..training.clone() };
        run("favor:m=8", &training, dir.path(), 1)?;
        let saved = weights(dir.path())?;
        let (_, numbers) = saved.into_iter().find(|(name, _)| name.ends_with("layers.0.self_attn.projection")).unwrap();
        Ok(numbers)
    };
    let (never, late, once, twice) = (projection(0)?, projection(3)?, projection(2)?, projection(1)?);
    assert_eq!(never, late, "the third step is the last, and nothing is drawn after it");
    assert!(never != once && once != twice && never != twice);
    let mut drawn = performer_lm::model::Decoder::new(
        &ModelConfig { vocab_size: data().tokenizer.vocab_size(), ..model },
        training.seed,
        &Device::Cpu,
    )?;
    drawn.redraw(training.seed, 1)?;
    let tensors = drawn.tensors();
    assert_eq!(tensors["model.layers.0.self_attn.projection"].flatten_all()?.to_vec1::<f32>()?, once);
    Ok(())
}

#[test]
fn threads_change_nothing() -> Result<()> {
    let (_, training) = recipe("favor:m=8");
    let training = TrainingConfig { max_steps: Some(9), ..training };
    let dirs = [tempfile::tempdir()?, tempfile::tempdir()?];
    for (dir, threads) in dirs.iter().zip([1, 4]) {
        run("favor:m=8", &training, dir.path(), threads)?;
    }
    assert_eq!(weights(dirs[0].path())?, weights(dirs[1].path())?);
    Ok(())
}

#[test]
fn micro_batches_change_rounding_only() -> Result<()> {
    let (model, training) = recipe("softmax");
    let data = data();
    let stop = AtomicBool::new(false);
    let batch = training_batches(&model, &training, &data)?.batch(0, 0)?;
    let rows: std::collections::HashSet<&[u32]> = batch.inputs.chunks(batch.context).collect();
    assert!(rows.len() > 4, "sequences of a batch are alike");
    let mut losses = Vec::new();
    for micro_batch in [1, 3, 8] {
        let dir = tempfile::tempdir()?;
        let training = TrainingConfig { max_steps: Some(10), micro_batch, ..training.clone() };
        let model = ModelConfig { dropout: 0.0, ..model.clone() };
        let report = Trainer::new(&model, &training, &data, options(dir.path(), 1, &stop))?.run()?;
        losses.push(report.context("nobody stopped the run")?.val_loss);
    }
    assert!(losses.windows(2).all(|pair| (pair[0] - pair[1]).abs() < 1e-4), "{losses:?}");
    Ok(())
}

/// Rotary positions reach beyond the context of training, and so does the loss by position.
#[test]
fn the_loss_by_position_goes_to_twice_the_context() -> Result<()> {
    let (config, training) = recipe("softmax");
    let config = ModelConfig { positions: Positions::Rotary { base: 1e4 }, context: 20, ..config };
    let training = TrainingConfig { max_steps: Some(1), ..training };
    let dir = tempfile::tempdir()?;
    let (data, stop) = (data(), AtomicBool::new(false));
    let report = Trainer::new(&config, &training, &data, options(dir.path(), 1, &stop))?.run()?.unwrap();
    let ends: Vec<usize> = report.loss_by_position.iter().map(|range| range.until).collect();
    // Forty positions in at most 32 ranges are two each.
    assert_eq!(ends, (1..=20).map(|i| 2 * i).collect::<Vec<_>>());
    assert!(report.loss_by_position.iter().all(|range| range.loss.is_finite()));
    Ok(())
}

#[test]
fn resuming_on_other_data_is_refused() -> Result<()> {
    let (_, training) = recipe("softmax");
    let dir = tempfile::tempdir()?;
    run("softmax", &TrainingConfig { max_steps: Some(2), ..training }, dir.path(), 1)?;
    let other = Prepared { train: data().valid, ..data() };
    let stop = AtomicBool::new(false);
    let error = Trainer::resume(&other, options(dir.path(), 1, &stop)).err().unwrap().to_string();
    assert!(error.contains("other data") && error.contains("law"), "{error}");
    Ok(())
}

#[test]
fn a_learning_rate_that_explodes_is_reported() -> Result<()> {
    let (_, training) = recipe("softmax");
    let dir = tempfile::tempdir()?;
    let training = TrainingConfig { learning_rate: 1e30, clip: None, ..training };
    let error = format!("{:#}", run("softmax", &training, dir.path(), 1).unwrap_err());
    assert!(error.contains("failed: values are not finite; lower the learning rate"), "{error}");
    Ok(())
}

/// `Asked` holds what a comparison or an ablation depends on, so that a test can change one part at
/// a time.
#[derive(Clone)]
struct Asked {
    config: ModelConfig,
    training: TrainingConfig,
    features: usize,
    seed: u64,
    data: Prepared,
}

impl Asked {
    fn tiny() -> Self {
        let (config, training) = recipe("softmax");
        // The context is longer than the window that an ablation tries, so that features have an
        // effect.
        let config = ModelConfig { context: 39, ..config };
        let training = TrainingConfig { max_steps: Some(2), eval_every: 0, redraw_every: 0, ..training };
        Self { config, training, features: 2, seed: 1, data: data() }
    }

    /// Returns the reports of all runs. Their speeds never repeat, so they tell whether a run was
    /// made again.
    fn compare(&self, out: &Path) -> Result<Value> {
        let attention = format!("favor:m={}", self.features);
        let outcome = Comparison {
            config: self.config.clone(),
            training: self.training.clone(),
            attentions: vec!["softmax".parse().unwrap(), attention.parse().unwrap()],
            seeds: vec![self.seed],
            learning_rates: Vec::new(),
            out,
            data: None,
            device: Device::Cpu,
            threads: 2,
            stop: &AtomicBool::new(false),
            listener: &Silent,
            ranks: Grid::one(),
            command: "a test".into(),
        }
        .run(&self.data)?;
        Ok(serde_json::to_value(outcome.runs)?)
    }

    fn ablate(&self, out: &Path) -> Result<Value> {
        let plan = ablate::Plan {
            config: self.config.clone(),
            training: self.training.clone(),
            seeds: vec![self.seed],
            features: vec![self.features],
            runs: out,
            is_kept: true,
            data: None,
            device: Device::Cpu,
            threads: 2,
            stop: &AtomicBool::new(false),
            listener: &Silent,
            ranks: Grid::one(),
        };
        let found = ablate::run(&plan, &self.data, |_| ())?;
        let outcomes = found.data["outcomes"].clone();
        // Every variant with features is measured without them, the controls have none, and the
        // table has a row for windows.
        for outcome in outcomes.as_array().context("outcomes")? {
            let controls = outcome["features_off"].as_array().map_or(0, Vec::len);
            let name = outcome["name"].as_str().context("a name")?;
            let has_features = name != "softmax" && !name.starts_with("control: ");
            assert_eq!(controls, usize::from(has_features), "{outcome}");
        }
        let tables = found.sections.iter().filter_map(|section| section.table.as_ref());
        let names: Vec<&String> = tables.flat_map(|table| &table.rows).map(|row| &row[0]).collect();
        let of_window = names.iter().position(|name| name.starts_with("window of 32")).context("a window")?;
        assert_eq!(names[of_window + 1], "↳ features off: softmax:window=32");
        Ok(outcomes)
    }
}

/// A `Change` is the field of the key that must be named as the reason, and a change to one part of
/// what was asked for.
type Change = (&'static str, fn(&mut Asked));

const CHANGES: [Change; 15] = [
    ("settings.max_steps", |a| a.training.max_steps = Some(3)),
    ("settings.epochs", |a| a.training.epochs = 1),
    ("settings.max_train_tokens", |a| a.training.max_train_tokens = Some(1000)),
    ("settings.batch_size", |a| a.training.batch_size = 4),
    ("settings.micro_batch", |a| a.training.micro_batch = 2),
    ("settings.learning_rate", |a| a.training.learning_rate = 2e-2),
    ("settings.clip", |a| a.training.clip = None),
    ("settings.fit_every", |a| a.training.fit_every = 1),
    ("settings.optimizer.weight_decay", |a| a.training.optimizer.weight_decay = 0.0),
    ("settings.dtype", |a| a.training.dtype = Precision::Bf16),
    ("model.context", |a| a.config.context = 36),
    ("model.hidden_size", |a| a.config.hidden_size = 8),
    ("model.dropout", |a| a.config.dropout = 0.2),
    ("data.training tokens", |a| a.data.train = TokenFile::from_tokens(&[7; 4000], 12_000).unwrap().into()),
    ("data.held-out tokens", |a| a.data.valid = TokenFile::from_tokens(&[7; 400], 1200).unwrap().into()),
];

/// Asks for a result, changes one thing at a time, and requires that the earlier result is refused
/// and the change is named.
fn refuses_what_differs(ask: fn(&Asked, &Path) -> Result<Value>, changes: &[Change]) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let asked = Asked::tiny();
    let first = ask(&asked, folder.path())?;
    let (mut given_back, mut refused) = (Vec::new(), Vec::new());
    for (field, change) in changes {
        let mut other = asked.clone();
        change(&mut other);
        match ask(&other, folder.path()) {
            Ok(_) => given_back.push(*field),
            Err(error) => refused.push((field, format!("{error:#}"))),
        }
    }
    assert!(given_back.is_empty(), "the earlier result was given back for another {given_back:?}");
    for (field, error) in refused {
        assert!(error.contains(field), "{field} is not in: {error}");
        assert!(error.contains("metrics.json") && error.contains("another folder"), "{error}");
    }
    assert_eq!(ask(&asked, folder.path())?, first, "the same again changes nothing");

    // Another seed is another run beside the first one. More frequent saving is not another run.
    let mut other = Asked { seed: 2, ..asked.clone() };
    assert_ne!(ask(&other, folder.path())?, first);
    other.training.save_every = 1;
    other.seed = asked.seed;
    assert_eq!(ask(&other, folder.path())?, first);
    Ok(())
}

#[test]
fn a_comparison_of_other_settings_is_not_given_back() -> Result<()> {
    refuses_what_differs(Asked::compare, &CHANGES)
}

#[test]
fn an_ablation_of_other_settings_is_not_given_back() -> Result<()> {
    let features: Change = ("model.attention.features", |a| a.features = 4);
    refuses_what_differs(Asked::ablate, &[&CHANGES[..], &[features]].concat())
}

/// Changes a JSON file.
fn edit(file: &Path, change: impl FnOnce(&mut Value)) -> Result<()> {
    let mut json: Value = serde_json::from_slice(&std::fs::read(file)?)?;
    change(&mut json);
    Ok(std::fs::write(file, serde_json::to_vec(&json)?)?)
}

/// Changes the state of the run in a folder, and saves it as a checkpoint that belongs together.
fn edit_state(run: &Path, change: impl FnOnce(&mut Value)) -> Result<()> {
    let mut state = TrainingState::load(run, &Device::Cpu)?;
    change(&mut state.progress);
    Checkpoint::load(run, &Device::Cpu)?.save(run, Some(&state))
}

fn refused(result: Result<Value>, words: &[&str]) {
    let error = format!("{:#}", result.expect_err("it was given back"));
    for word in words {
        assert!(error.contains(word), "'{word}' is not in: {error}");
    }
}

#[test]
fn a_table_has_results_of_one_revision_that_say_what_they_are() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (asked, out) = (Asked::tiny(), folder.path());
    let first = asked.compare(out)?;
    assert_eq!(first[0]["key"]["revision"], git_revision());
    let run = out.join("softmax-seed1");
    let report = run.join("metrics.json");

    let written = std::fs::read(&report)?;
    edit(&report, |report| report["key"]["revision"] = "older".into())?;
    refused(asked.compare(out), &["metrics.json", "revision was older", git_revision(), "two revisions"]);
    edit(&report, |report| drop(report.as_object_mut().unwrap().remove("key")))?;
    refused(asked.compare(out), &["metrics.json has no key", "softmax-seed1 to make it again"]);
    std::fs::write(&report, &written)?;
    assert_eq!(asked.compare(out)?, first);

    // A run that an older revision began is continued, and the report says so; nothing else may
    // differ.
    std::fs::remove_file(&report)?;
    edit_state(&run, |state| state["key"]["settings"]["clip"] = 7.into())?;
    refused(asked.compare(out), &["train_state.json", "settings.clip was 7 and is now 1.0"]);
    edit_state(&run, |state| {
        state["key"]["settings"]["clip"] = 1.0.into();
        state["key"]["revision"] = "older".into();
    })?;
    let resumed = asked.compare(out)?;
    assert_eq!(resumed[0]["val_loss"], first[0]["val_loss"]);
    assert_eq!(resumed[0]["key"]["revision"], git_revision());
    let leg = serde_json::json!([{ "until": "step 2", "revision": "older", "device": "cpu" }]);
    assert_eq!(resumed[0]["earlier_legs"], leg);
    assert_eq!(asked.compare(out)?, resumed);

    // A configuration that was edited by hand describes another model.
    edit(&run.join("config.json"), |config| config["dropout"] = 0.3.into())?;
    let (data, stop) = (data(), AtomicBool::new(false));
    let edited = Trainer::resume(&data, options(&run, 1, &stop)).map(|_| Value::Null);
    refused(edited, &["train_state.json", "model.dropout was 0.1 and is now 0.3"]);
    edit(&run.join("config.json"), |config| config["dropout"] = 0.1.into())?;
    edit_state(&run, |state| drop(state.as_object_mut().unwrap().remove("key")))?;
    refused(Trainer::resume(&data, options(&run, 1, &stop)).map(|_| Value::Null), &["train_state.json has no key"]);
    Ok(())
}

#[test]
fn an_ablation_goes_on_in_the_middle_of_a_run() -> Result<()> {
    let (whole, parts) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let mut asked = Asked::tiny();
    asked.training.max_steps = Some(30);
    let expected = asked.ablate(whole.path())?;

    // The first variant is softmax without redraws, in the folder named by its index and seed.
    let (stop, run) = (AtomicBool::new(false), parts.path().join("0-1"));
    let training = TrainingConfig { seed: 1, ..asked.training.clone() };
    let stopped = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !performer_lm::train::read_log(&run.join("metrics.jsonl")).is_ok_and(|log| log.len() > 3) {
                std::thread::yield_now();
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        Trainer::new(&asked.config, &training, &asked.data, options(&run, 1, &stop))?.run()
    })?;
    assert!(stopped.is_none(), "the run was over before it could be stopped");
    let steps = performer_lm::train::read_log(&run.join("metrics.jsonl"))?.len();
    // An older revision is recorded in the report if the run is resumed, and not if it begins
    // again.
    edit_state(&run, |state| state["key"]["revision"] = "older".into())?;
    let losses = |outcomes: &Value| -> Vec<Value> {
        outcomes.as_array().unwrap().iter().map(|outcome| outcome["val_losses"].clone()).collect()
    };
    assert_eq!(losses(&asked.ablate(parts.path())?), losses(&expected));
    let report: Report = serde_json::from_slice(&std::fs::read(run.join("metrics.json"))?)?;
    assert_eq!(report.earlier_legs[0].until, format!("step {steps}"));
    assert_eq!(weights(&run)?, weights(&whole.path().join("0-1"))?);
    Ok(())
}

#[test]
fn committed_results_are_still_read() -> Result<()> {
    fn read<T: serde::de::DeserializeOwned>(file: &Path) -> Result<T> {
        let text = std::fs::read(file).with_context(|| file.display().to_string())?;
        serde_json::from_slice(&text).with_context(|| file.display().to_string())
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    // The results are not part of a published package.
    if !root.join("benchmarks").exists() {
        return Ok(());
    }
    for name in ["seed", "published", "small"] {
        let outcome: Outcome = read(&root.join("benchmarks").join(name).join("compare.json"))?;
        assert!(!outcome.runs.is_empty() && outcome.runs.iter().all(|run| run.val_loss > 0.0), "{name}");
    }
    let report: Report = read(&root.join("models/stories/softmax/metrics.json"))?;
    assert_eq!(report.attention_spec, "softmax");
    let mut conversions = vec![root.join("models/stories/performer/convert.json")];
    for entry in std::fs::read_dir(root.join("benchmarks/convert"))? {
        conversions.push(entry?.path());
    }
    for file in conversions.iter().filter(|file| file.extension().is_some_and(|e| e == "json")) {
        let report: convert::Report = read(file)?;
        assert!(report.stages.len() > 2 && report.chart().to_svg()?.contains("student"), "{}", file.display());
    }
    let generating: bench::generate::Report = read(&root.join("benchmarks/generate/generate.json"))?;
    assert_eq!((generating.weights.len(), generating.points.len()), (4, 16));
    let layers = root.join("benchmarks/layer-costs");
    let costs: convert::Costs = read(&layers.join("costs.json"))?;
    assert_eq!(costs.layers.len(), 30);
    for name in ["half", "odd", "five"] {
        let untrained: convert::Report = read(&layers.join(name).with_extension("json"))?;
        assert_eq!(untrained.stages.iter().map(|stage| stage.name.as_str()).collect::<Vec<_>>(), ["teacher", "swap"]);
    }
    Ok(())
}

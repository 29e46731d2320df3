//! What a comparison keeps of its results when it is extended, and an ablation when a run diverges.

use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use candle_core::Device;
use performer_lm::{
    compare::Comparison,
    config::{ModelConfig, Preset, Schedule, TrainingConfig},
    data::{DataSpec, Prepared, TokenFile, prepare, prepare_with_test},
    lab::ablate,
    listener::Silent,
    train::{Grid, RunOptions, find_or_run},
};
use serde_json::Value;

use super::{program::SHORT, ranks};

/// A small model, and two steps of its training.
fn recipe() -> Result<(ModelConfig, TrainingConfig)> {
    let (model, training) = Preset::Seed.load()?;
    let model = ModelConfig { hidden_size: 16, heads: 2, kv_heads: 2, feed_forward_size: 32, context: 16, ..model };
    Ok((model, TrainingConfig { max_steps: Some(2), batch_size: 4, eval_every: 0, redraw_every: 0, ..training }))
}

/// A comparison with a further attention, stopped before that is trained, leaves all results that
/// were there, in the order of the table.
#[test]
fn a_comparison_that_is_stopped_keeps_every_result() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let data = prepare(&DataSpec::Sample, 300, None, &Silent)?;
    let (config, training) = recipe()?;
    let compare = |attentions: &[&str], stop: bool| {
        let comparison = Comparison {
            config: config.clone(),
            training: training.clone(),
            attentions: attentions.iter().map(|attention| attention.parse().unwrap()).collect(),
            seeds: vec![1, 2],
            learning_rates: Vec::new(),
            out: folder.path(),
            data: Some(SHORT.parse().unwrap()),
            device: Device::Cpu,
            threads: 1,
            stop: &AtomicBool::new(stop),
            listener: &Silent,
            ranks: Grid::one(),
            command: "a test".into(),
        };
        comparison.run(&data).map(drop)
    };
    let runs = || -> Result<Vec<(String, u64)>> {
        let outcome: Value = serde_json::from_slice(&std::fs::read(folder.path().join("compare.json"))?)?;
        let of = |run: &Value| Some((run["attention_spec"].as_str()?.to_string(), run["seed"].as_u64()?));
        outcome["runs"].as_array().context("runs")?.iter().map(|run| of(run).context("a run")).collect()
    };
    let named = |names: &[(&str, u64)]| names.iter().map(|(name, seed)| (name.to_string(), *seed)).collect::<Vec<_>>();
    compare(&["softmax", "favor:m=2"], false)?;
    let both = named(&[("softmax", 1), ("favor:m=2", 1), ("softmax", 2), ("favor:m=2", 2)]);
    assert_eq!(runs()?, both);
    let error = compare(&["softmax", "uniform", "favor:m=2"], true).unwrap_err();
    assert!(format!("{error:#}").contains("stopped"), "{error:#}");
    assert_eq!(runs()?, both);
    // The table belongs to the numbers of the comparison, and goes with them.
    let table = folder.path().join("table.md");
    std::fs::write(&table, "of two attentions")?;
    compare(&["softmax", "favor:m=2"], false)?;
    assert!(table.exists(), "the numbers are the same");
    compare(&["softmax", "uniform", "favor:m=2"], false)?;
    assert!(!table.exists(), "there are more numbers");
    let order = [("softmax", 1), ("uniform", 1), ("favor:m=2", 1), ("softmax", 2), ("uniform", 2), ("favor:m=2", 2)];
    assert_eq!(runs()?, named(&order));
    Ok(())
}

/// A learning rate is chosen by the first seed, though runs of the second were there before.
#[test]
fn a_rate_is_chosen_by_the_first_seed() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let data = prepare_with_test(&DataSpec::Sample, 300, None, &Silent)?;
    let (config, training) = recipe()?;
    let compare = |seeds: &[u64], out: &str| {
        let comparison = Comparison {
            config: config.clone(),
            training: training.clone(),
            attentions: vec!["softmax".parse().unwrap()],
            seeds: seeds.to_vec(),
            learning_rates: vec![1e-4, 1e-2],
            out: &folder.path().join(out),
            data: Some(SHORT.parse().unwrap()),
            device: Device::Cpu,
            threads: 1,
            stop: &AtomicBool::new(false),
            listener: &Silent,
            ranks: Grid::one(),
            command: "a test".into(),
        };
        let outcome = comparison.run(&data)?;
        let losses: Vec<(u64, f64)> = outcome.runs.iter().map(|run| (run.seed, run.val_loss)).collect();
        anyhow::Ok((losses, outcome.learning_rates))
    };
    let at_once = compare(&[1, 2], "at-once")?;
    assert_eq!(at_once.1.len(), 2);
    compare(&[2], "in-turn")?;
    assert_eq!(compare(&[1, 2], "in-turn")?, at_once);
    Ok(())
}

/// A variant that diverges has no row and is named; the others are reported.
#[test]
fn an_ablation_goes_on_without_what_diverges() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut data = prepare(&DataSpec::Sample, 300, None, &Silent)?;
    data.valid = TokenFile::from_tokens(&data.valid.read(0..400), 1000)?.into();
    let (_, training) = recipe()?;
    let config = ModelConfig { context: 40, ..Preset::Seed.load()?.0 };
    // At this rate the ReLU kernel diverges, and softmax does not.
    let training = TrainingConfig { max_steps: Some(3), learning_rate: 2e4, schedule: Schedule::Constant, ..training };
    let plan = ablate::Plan {
        config,
        training,
        seeds: vec![42],
        features: vec![2],
        runs: folder.path(),
        is_kept: true,
        data: Some(SHORT.parse().unwrap()),
        device: Device::Cpu,
        threads: 2,
        stop: &AtomicBool::new(false),
        listener: &Silent,
        ranks: Grid::one(),
    };
    let mut made = 0;
    let found = ablate::run(&plan, &data, |_| made += 1)?;
    let text = found.sections.iter().flat_map(|section| &section.text);
    let diverged: Vec<&String> = text.filter(|line| line.ends_with("diverged with seed 42, and has no row.")).collect();
    assert!(diverged.iter().any(|line| line.starts_with("ReLU kernel, M=2 ")), "{diverged:?}");
    let rows = found.data["outcomes"].as_array().context("outcomes")?;
    assert_eq!(rows[0]["name"], "softmax");
    assert_eq!(rows.len() + diverged.len(), made);
    assert!(rows.iter().all(|row| row["state_bytes"].as_u64().is_some_and(|bytes| bytes > 0)));
    let grows = |name: &str| rows.iter().find(|row| row["name"] == name).map(|row| row["state_grows"] == true);
    assert_eq!((grows("softmax"), grows("orthogonal, chi radii, M=2")), (Some(true), Some(false)));
    assert!(rows.iter().all(|row| row.get("test_losses").is_none()), "there is no test text");

    // Where there is a text by which nothing was chosen, what is reported is of that.
    let (tested, other) = (folder.path().join("tested"), TokenFile::from_tokens(&data.train.read(0..400), 1000)?);
    let data = Prepared { test: Some(other.into()), ..data };
    let found = ablate::run(&ablate::Plan { runs: &tested, ..plan }, &data, |_| ())?;
    let report: Value = serde_json::from_slice(&std::fs::read(tested.join("0-42/metrics.json"))?)?;
    let row = &found.data["outcomes"][0];
    assert_eq!(row["test_losses"], serde_json::json!([report["test"]["loss"]]));
    assert_ne!(row["test_losses"], row["val_losses"]);
    let table = found.sections.iter().find_map(|section| section.table.as_ref()).context("a table")?;
    let softmax = table.rows.iter().find(|row| row[0] == "softmax").context("a row")?;
    assert_eq!(softmax[1], format!("{:.4}", report["test"]["loss"].as_f64().context("a loss")?));
    assert!(found.summary[0].contains("Losses are of the test text."), "{}", found.summary[0]);
    Ok(())
}

/// How often a run is saved changes no result, so a run that goes on takes the new interval.
#[test]
fn a_run_that_goes_on_is_saved_as_often_as_is_asked_for() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (data, out) = (ranks::data()?, folder.path().join("run"));
    let (model, mut training) = ranks::recipe("favor:m=8")?;
    let state = || -> Result<Value> { Ok(serde_json::from_slice(&std::fs::read(out.join("train_state.json"))?)?) };
    for (stopped_at, save_every) in [(2, 0), (4, 5)] {
        training.save_every = save_every;
        let asked = ranks::StopAfter(AtomicBool::new(false), stopped_at);
        let options = RunOptions { listener: &asked, ..ranks::options(&out, &asked.0, Grid::one()) };
        assert!(find_or_run(&model, &training, &data, options)?.is_none(), "it was to stop");
        assert_eq!(state()?["training"]["save_every"], save_every);
    }
    Ok(())
}

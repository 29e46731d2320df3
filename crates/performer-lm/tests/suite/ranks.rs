//! Several ranks train one model: the same bits on any number of them, and all of them stop where
//! one fails. Ranks are threads here; `scripts/mpi_check.py` does this with processes.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result};
use candle_core::Device;
use performer_dist::{Disagreement, threads};
use performer_lm::{
    config::{ModelConfig, Preset, TrainingConfig},
    data::{DataSpec, Prepared, prepare},
    listener::{Bar, Listener, Silent, Unit},
    train::{Grid, Report, RunOptions, Trainer},
};

/// Longer than any step of these tests, so that it passes only where ranks wait for ever.
const DEADLINE: Duration = Duration::from_secs(300);

pub(crate) fn data() -> Result<Prepared> {
    prepare(&DataSpec::Sample, 300, None, &Silent)
}

/// A small model whose batches have five micro-batches, the last smaller, and whose features are
/// drawn again and units dropped on the way.
pub(crate) fn recipe(attention: &str) -> Result<(ModelConfig, TrainingConfig)> {
    let (model, training) = Preset::Seed.load()?;
    let model = ModelConfig {
        attention: attention.parse().map_err(anyhow::Error::msg)?,
        hidden_size: 16,
        heads: 2,
        kv_heads: 2,
        feed_forward_size: 32,
        context: 16,
        dropout: 0.1,
        ..model
    };
    let training = TrainingConfig {
        max_steps: Some(6),
        batch_size: 9,
        micro_batch: 2,
        redraw_every: 2,
        eval_every: 4,
        save_every: 3,
        max_train_tokens: Some(4000),
        ..training
    };
    Ok((model, training))
}

pub(crate) fn options<'a>(out: &'a Path, stop: &'a AtomicBool, ranks: Grid) -> RunOptions<'a> {
    RunOptions { overwrite: true, threads: 2, stop, ranks, ..RunOptions::new(out) }
}

/// Does something on so many ranks, and returns what each of them got.
fn on_ranks<T: Send>(size: usize, work: impl Fn(Grid) -> Result<T> + Sync) -> Vec<Result<T>> {
    on_grid(size, 1, work)
}

/// Does something on so many ranks, of which `segments` share each sequence.
pub(crate) fn on_grid<T: Send>(
    size: usize,
    segments: usize,
    work: impl Fn(Grid) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    std::thread::scope(|scope| {
        let ranks = threads(size, DEADLINE).into_iter().map(|thread| {
            let work = &work;
            scope.spawn(move || work(Grid::new(Arc::new(thread), segments)?))
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank does not panic")).collect()
    })
}

/// Sets the flag to stop after a step.
pub(crate) struct StopAfter(pub(crate) AtomicBool, pub(crate) usize);

impl Listener for StopAfter {
    fn begin(&self, _: &str, unit: Unit, _: u64, _: u64) -> Box<dyn Bar + '_> {
        if unit == Unit::Steps { Box::new(Watched(self)) } else { Box::new(Silent) }
    }
}

struct Watched<'a>(&'a StopAfter);

impl Bar for Watched<'_> {
    fn step(&self, number: usize, _: f64, _: f64) {
        self.0.0.fetch_or(number == self.0.1, Ordering::Relaxed);
    }
}

fn train(size: usize, attention: &str, out: &Path) -> Result<Report> {
    let (stop, data) = (AtomicBool::new(false), data()?);
    let (model, training) = recipe(attention)?;
    let reports = on_ranks(size, |ranks| Trainer::new(&model, &training, &data, options(out, &stop, ranks))?.run());
    let reports = reports.into_iter().collect::<Result<Option<Vec<_>>>>()?.context("nobody stopped it")?;
    assert!(reports.iter().all(|report| report.val_loss == reports[0].val_loss && report.ranks == size));
    reports.into_iter().next().context("a rank")
}

pub(crate) fn bytes(out: &Path, file: &str) -> Vec<u8> {
    std::fs::read(out.join(file)).unwrap_or_default()
}

/// Losses of all steps and validations, and the whole model file: nothing differs by a bit, where
/// micro-batches come out even and where they do not.
#[test]
fn the_number_of_ranks_changes_no_bit() -> Result<()> {
    for attention in ["favor:m=8", "softmax:gate"] {
        let folder = tempfile::tempdir()?;
        let alone = folder.path().join("1");
        let report = train(1, attention, &alone)?;
        for size in [2, 3, 4, 7] {
            let out = folder.path().join(size.to_string());
            let on_several = train(size, attention, &out)?;
            assert_eq!(on_several.val_loss, report.val_loss, "{attention}, {size} ranks");
            for file in ["model.safetensors", "optimizer.safetensors", "metrics.jsonl"] {
                assert!(bytes(&out, file) == bytes(&alone, file), "{attention}, {size} ranks: {file}");
            }
        }
    }
    Ok(())
}

/// A run that was begun on two ranks goes on on three, then on one, as if nothing had happened: its
/// log has no line twice.
#[test]
fn a_run_goes_on_on_another_number_of_ranks() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (stop, data) = (AtomicBool::new(false), data()?);
    let alone = folder.path().join("alone");
    train(1, "favor:m=8", &alone)?;

    let out = folder.path().join("out");
    let (model, training) = recipe("favor:m=8")?;
    // Whoever is asked to stop stops all ranks, here the last one after the second step.
    let stopped = on_ranks(2, |ranks| {
        let asked = StopAfter(AtomicBool::new(false), if ranks.world().rank() == 1 { 2 } else { usize::MAX });
        let options = RunOptions { listener: &asked, ..options(&out, &asked.0, ranks) };
        Ok(Trainer::new(&model, &training, &data, options)?.run()?.is_none())
    });
    assert!(stopped.into_iter().all(|stopped| stopped.is_ok_and(|stopped| stopped)));
    // The second time nothing is left to do but to validate and to report.
    for size in [3, 1] {
        let resumed = on_ranks(size, |ranks| Trainer::resume(&data, options(&out, &stop, ranks))?.run());
        assert!(resumed.into_iter().all(|report| report.is_ok_and(|report| report.is_some())));
    }
    for file in ["model.safetensors", "optimizer.safetensors", "metrics.jsonl"] {
        assert!(bytes(&out, file) == bytes(&alone, file), "{file}");
    }
    Ok(())
}

/// Checks that all ranks failed with one error, which names a rank and has these words.
fn all_fail<T>(outcomes: Vec<Result<T>>, rank: usize, words: &[&str]) {
    for outcome in outcomes {
        let Err(error) = outcome else { panic!("a rank did not fail") };
        let known = error.downcast_ref::<Disagreement>().unwrap_or_else(|| panic!("not of all ranks: {error:#}"));
        assert_eq!(known.rank, rank, "{known}");
        for word in words {
            assert!(known.text.contains(word), "'{word}' is not in: {known}");
        }
    }
}

#[test]
fn ranks_that_differ_stop_all_with_one_message() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (stop, data) = (AtomicBool::new(false), data()?);
    let (model, training) = recipe("favor:m=8")?;

    // Another setting on one rank.
    let outcomes = on_ranks(3, |ranks| {
        let mut training = training.clone();
        training.learning_rate *= if ranks.world().rank() == 2 { 2.0 } else { 1.0 };
        Trainer::new(&model, &training, &data, options(&folder.path().join("a"), &stop, ranks)).map(drop)
    });
    all_fail(outcomes, 2, &["run.settings.learning_rate is"]);
    // It changes no result, but all ranks save together.
    let outcomes = on_ranks(2, |ranks| {
        let training = TrainingConfig { save_every: 1 + ranks.world().rank(), ..training.clone() };
        Trainer::new(&model, &training, &data, options(&folder.path().join("a"), &stop, ranks)).map(drop)
    });
    all_fail(outcomes, 1, &["save_every is 2"]);

    // What an earlier run left in the folder stays whole.
    let earlier = folder.path().join("earlier");
    train(1, "favor:m=8", &earlier)?;
    let log = bytes(&earlier, "metrics.jsonl");
    let outcomes = on_ranks(2, |ranks| {
        let mut training = training.clone();
        training.seed += ranks.world().rank() as u64;
        Trainer::new(&model, &training, &data, options(&earlier, &stop, ranks)).map(drop)
    });
    all_fail(outcomes, 1, &["run.seed is"]);
    assert!(!log.is_empty() && bytes(&earlier, "metrics.jsonl") == log);

    // Too little text on one rank.
    let outcomes = on_ranks(3, |ranks| {
        let mut training = training.clone();
        training.batch_size = if ranks.world().rank() == 1 { 10_000_000 } else { training.batch_size };
        Trainer::new(&model, &training, &data, options(&folder.path().join("b"), &stop, ranks)).map(drop)
    });
    all_fail(outcomes, 1, &["fewer than one batch"]);

    // A folder that the first rank cannot write to: a file stands in its way.
    let taken = folder.path().join("file");
    std::fs::write(&taken, "")?;
    let outcomes = on_ranks(2, |ranks| {
        Trainer::new(&model, &training, &data, options(&taken.join("out"), &stop, ranks)).map(drop)
    });
    all_fail(outcomes, 0, &["cannot create"]);

    // A folder that one rank does not see.
    let outcomes = on_ranks(2, |ranks| {
        let out = folder.path().join(if ranks.world().rank() == 0 { "a" } else { "elsewhere" });
        Trainer::resume(&data, options(&out, &stop, ranks)).map(drop)
    });
    all_fail(outcomes, 1, &["there is no folder"]);
    Ok(())
}

/// A rank that ends in the middle of a run leaves nobody waiting, and the last checkpoint whole.
#[test]
fn a_rank_that_dies_stops_the_others_and_the_run_goes_on_to_the_same_bits() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (stop, data) = (AtomicBool::new(false), data()?);
    let (model, training) = recipe("favor:m=8")?;
    let alone = folder.path().join("alone");
    train(1, "favor:m=8", &alone)?;
    let out = folder.path().join("out");
    let outcomes = on_ranks(3, |ranks| {
        let dies = ranks.world().rank() == 1;
        let trainer = Trainer::new(&model, &training, &data, options(&out, &stop, ranks))?;
        if dies { Ok(()) } else { trainer.run().map(drop) }
    });
    for (rank, outcome) in outcomes.into_iter().enumerate().filter(|(rank, _)| *rank != 1) {
        let error = format!("{:#}", outcome.expect_err("a rank is missing"));
        assert!(error.contains("it has ended") || rank == 2, "{error}");
    }
    let resumed = on_ranks(2, |ranks| Trainer::resume(&data, options(&out, &stop, ranks))?.run());
    assert!(resumed.into_iter().all(|report| report.is_ok_and(|report| report.is_some())));
    for file in ["model.safetensors", "metrics.jsonl"] {
        assert!(bytes(&out, file) == bytes(&alone, file), "{file}");
    }
    Ok(())
}

/// Runs that are spread over ranks have the results, and are reported in the order, of those that
/// one process makes. A learning rate is chosen between two rounds of them.
#[cfg(feature = "lab")]
#[test]
fn a_comparison_does_not_depend_on_the_number_of_ranks() -> Result<()> {
    use performer_lm::{compare::Comparison, data::prepare_with_test};

    let folder = tempfile::tempdir()?;
    let (stop, data) = (AtomicBool::new(false), prepare_with_test(&DataSpec::Sample, 300, None, &Silent)?);
    let (model, training) = recipe("softmax")?;
    let compare = |out: &Path, ranks: Grid, steps: usize| {
        let outcome = Comparison {
            config: model.clone(),
            training: TrainingConfig { max_steps: Some(steps), redraw_every: 0, ..training.clone() },
            attentions: vec!["softmax".parse().unwrap(), "favor:m=8".parse().unwrap()],
            seeds: vec![1, 2],
            // The last makes every training diverge, which loses to the others on every rank.
            learning_rates: vec![1e-4, 1e-2, 1e30],
            out,
            data: Some(DataSpec::Sample),
            device: Device::Cpu,
            threads: 1,
            stop: &stop,
            listener: &Silent,
            ranks,
            command: "a test".into(),
        }
        .run(&data)?;
        let losses: Vec<(String, u64, f64)> =
            outcome.runs.iter().map(|run| (run.attention_spec.clone(), run.seed, run.val_loss)).collect();
        Ok((losses, outcome.learning_rates))
    };
    let alone = compare(&folder.path().join("alone"), Grid::one(), 3)?;
    assert_eq!(alone.0.len(), 4);
    assert_eq!(alone.1.iter().filter(|tried| tried.val_loss.is_none()).count(), 2);
    let out = folder.path().join("three");
    for outcome in on_ranks(3, |ranks| compare(&out, ranks, 3)) {
        assert_eq!(outcome?, alone);
    }
    assert!(out.join("compare.json").exists() && out.join("loss.svg").exists());

    // A rank with other settings ends all, before anything is trained.
    let out = folder.path().join("other");
    let outcomes = on_ranks(2, |ranks| {
        let steps = 3 + ranks.world().rank();
        compare(&out, ranks, steps)
    });
    all_fail(outcomes, 1, &["settings.training.max_steps is 4 and not 3"]);
    assert!(!out.join("compare.json").exists());

    // A rank that trains in a folder of its own leaves results that nobody finds.
    let outcomes = on_ranks(2, |ranks| {
        let out = folder.path().join(format!("apart-{}", ranks.world().rank()));
        compare(&out, ranks, 3)
    });
    for outcome in outcomes {
        let error = format!("{:#}", outcome.expect_err("folders differ"));
        assert!(error.contains("all processes need one folder"), "{error}");
    }
    Ok(())
}

/// Small tasks are learned on several ranks, a run on each; all of them report what one process
/// does, and the finished runs are kept.
#[cfg(feature = "lab")]
#[test]
fn tasks_are_spread_over_ranks() -> Result<()> {
    use performer_lm::lab::tasks::{Plan, Task, run};

    let folder = tempfile::tempdir()?;
    let stop = AtomicBool::new(false);
    let learn = |out: &Path, ranks: Grid, seeds: &[u64]| {
        let found = run(&Plan {
            tasks: vec![Task::Copying],
            attentions: vec!["softmax".parse().unwrap(), "favor:m=8".parse().unwrap()],
            seeds: seeds.to_vec(),
            texts: Vec::new(),
            proteins: None,
            length: Some(6),
            pairs: None,
            steps: Some(2),
            learning_rate: None,
            device: Device::Cpu,
            threads: 1,
            stop: &stop,
            listener: &Silent,
            out: Some(out),
            ranks,
        })?;
        let runs = found.data["tasks"][0]["runs"].as_array().context("runs")?.clone();
        Ok(runs.iter().map(|run| (run["attention"].to_string(), run["seed"].as_u64(), run["loss"].as_f64())).collect())
    };
    let alone: Vec<_> = learn(&folder.path().join("alone"), Grid::one(), &[1, 2])?;
    assert_eq!(alone.len(), 4);
    let out = folder.path().join("three");
    for outcome in on_ranks(3, |ranks| learn(&out, ranks, &[1, 2])) {
        assert_eq!(outcome?, alone);
    }
    let kept = |folder: &Path| -> Result<Vec<serde_json::Value>> {
        Ok(serde_json::from_slice(&std::fs::read(folder.join("tasks-runs.json"))?)?)
    };
    assert_eq!(kept(&out)?.len(), 4);
    // A third seed is learned beside those that are there.
    for outcome in on_ranks(2, |ranks| learn(&out, ranks, &[1, 3])) {
        assert_eq!(outcome?[..2], alone[..2]);
    }
    assert_eq!(kept(&out)?.len(), 6);

    let outcomes = on_ranks(2, |ranks| {
        let name = if ranks.leads() { "alone" } else { "apart" };
        learn(&folder.path().join(name), ranks, &[1])
    });
    for outcome in outcomes {
        let error = format!("{:#}", outcome.expect_err("the ranks have two folders"));
        assert!(error.contains("rank 1 of 2: it would make other runs than rank 0"), "{error}");
    }
    Ok(())
}

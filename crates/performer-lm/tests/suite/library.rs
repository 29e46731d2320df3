//! The crate as a library: what is here needs none of its features.

use std::{io::Write, path::Path, sync::Mutex};

use anyhow::{Context, Result};
use candle_core::Device;
use performer_lm::{
    config::Preset,
    data::{DataSpec, prepare},
    errors::Cause,
    eval::evaluate,
    listener::{Bar, Listener, Silent, Unit},
    model::pretrained,
    train::{RunOptions, Trainer, TrainingState, load_model, saved_data},
};

use super::heap::peak;

#[path = "../../examples/library.rs"]
mod example;

#[path = "../../examples/training.rs"]
mod training;

#[test]
fn the_example_writes_a_sentence() -> Result<()> {
    let folder = Path::new(example::MODEL);
    if !folder.join("model.safetensors").exists() {
        println!("skipped: {} holds no model", folder.display());
        return Ok(());
    }
    let text = example::sentence(folder, "Once upon a time")?;
    let rest = text.strip_prefix("Once upon a time").context("the prompt comes first")?;
    assert!(rest.len() > 10 && rest.contains('.'), "{text}");
    assert_eq!(text, example::sentence(folder, "Once upon a time")?);
    Ok(())
}

/// Texts in memory are trained on, and the model is converted, with what a library has by default.
/// The run names no data.
#[test]
fn the_example_trains_on_texts_in_memory_and_converts() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (softmax, performer) = training::train_and_convert(folder.path(), 60, &Silent)?;
    // Of 300 tokens, drawn alike, each would cost 5.7 nats.
    assert!(softmax < 2.0 && performer < softmax + 0.5, "{softmax} and {performer}");
    let saved = saved_data(&folder.path().join("softmax"))?;
    assert_eq!((&saved.named, &saved.spec), (&None, &None));
    Ok(())
}

/// A folder that is not there is no name of a model on the hub.
#[test]
fn a_missing_folder_is_not_looked_for_elsewhere() {
    let error = load_model(Path::new("no-such/folder"), &Device::Cpu).err().unwrap().to_string();
    assert!(error.contains("no-such/folder") && !error.contains("hub"), "{error}");
}

/// A file that tells of a header of any length is not read into memory.
#[test]
fn a_lying_header_takes_no_memory() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let mut file = std::fs::File::create(dir.path().join("model.safetensors"))?;
    file.write_all(&(200u64 << 20).to_le_bytes())?;
    // The rest is a hole, which takes no room.
    file.set_len(1 << 30)?;
    let (found, bytes) = peak(|| TrainingState::is_in(dir.path()));
    assert!(!found? && bytes < 1 << 20, "{bytes} bytes");
    Ok(())
}

/// Keeps what it is told.
#[derive(Default)]
struct Kept {
    begun: Mutex<Vec<(String, Unit, u64)>>,
    steps: Mutex<Vec<(usize, f64)>>,
    validations: Mutex<Vec<(usize, f64)>>,
    notes: Mutex<Vec<String>>,
}

/// A bar of [`Kept`].
struct Steps<'a>(&'a Kept);

impl Listener for Kept {
    fn note(&self, text: &str) {
        self.notes.lock().unwrap().push(text.to_string());
    }

    fn begin(&self, name: &str, unit: Unit, _done: u64, total: u64) -> Box<dyn Bar + '_> {
        self.begun.lock().unwrap().push((name.to_string(), unit, total));
        Box::new(Steps(self))
    }
}

impl Bar for Steps<'_> {
    fn step(&self, number: usize, loss: f64, tokens_per_second: f64) {
        assert!(tokens_per_second > 0.0);
        self.0.steps.lock().unwrap().push((number, loss));
    }

    fn validation(&self, number: usize, loss: f64) {
        self.0.validations.lock().unwrap().push((number, loss));
    }
}

#[test]
fn a_model_is_trained_with_a_listener_evaluated_and_opened() -> Result<()> {
    let (kept, folder) = (Kept::default(), tempfile::tempdir()?);
    let data = prepare(&DataSpec::Sample, 300, None, &kept)?;
    let (mut model, mut training) = Preset::Seed.load()?;
    (model.context, training.batch_size, training.max_steps, training.eval_every) = (16, 4, Some(3), 2);
    let options = || RunOptions { listener: &kept, ..RunOptions::new(folder.path()) };
    let report = Trainer::new(&model, &training, &data, options())?.run()?.context("nobody stopped it")?;
    // Another training would replace the model, which has to be allowed.
    let weights = std::fs::read(folder.path().join("model.safetensors"))?;
    let Err(refused) = Trainer::new(&model, &training, &data, options()) else { panic!("the model is replaced") };
    assert!(matches!(refused.downcast_ref(), Some(Cause::WouldReplace(_))), "{refused:#}");
    assert_eq!(std::fs::read(folder.path().join("model.safetensors"))?, weights);

    let steps = std::mem::take(&mut *kept.steps.lock().unwrap());
    assert_eq!(steps.iter().map(|step| step.0).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(steps.iter().all(|step| step.1.is_finite()));
    let validations = kept.validations.lock().unwrap();
    assert!(validations.len() == 1 && validations[0].0 == 2 && validations[0].1.is_finite(), "{validations:?}");
    assert!(kept.begun.lock().unwrap().iter().any(|(_, unit, total)| *unit == Unit::Steps && *total == 3));
    assert!(kept.notes.lock().unwrap().iter().any(|note| note.contains("validation")));

    let (trained, _) = pretrained::load(&folder.path().to_string_lossy(), &Device::Cpu)?;
    assert_eq!(evaluate(&trained, &data.valid, 2)?.val_loss, report.val_loss);
    drop(Trainer::new(&model, &training, &data, RunOptions { overwrite: true, ..options() })?);
    assert_ne!(std::fs::read(folder.path().join("model.safetensors"))?, weights);
    Ok(())
}

#[cfg(not(feature = "hub"))]
#[test]
fn a_model_of_the_hub_needs_a_feature() {
    let error = format!("{:#}", pretrained::Pretrained::open("someone/model").unwrap_err());
    assert!(error.contains("feature `hub`"), "{error}");
}

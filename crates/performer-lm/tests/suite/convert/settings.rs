//! These tests change one setting of a conversion at a time: a folder that holds the result of
//! other settings, or of another revision, is not taken for what was asked for.

use std::{
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::Result;
use candle_core::Device;
use performer_lm::{
    config::AttentionConfig,
    convert::{Plan, Report, Tuning, run},
    data::{Prepared, TokenFile},
    listener::Listener,
    model::pretrained::Pretrained,
    train::{Checkpoint, TrainingState, git_revision},
};
use serde_json::Value;

use super::{convert, data, plan, refused, teacher, tuned};

/// `Asked` holds everything that a conversion depends on, so that a test can change one part at a
/// time.
struct Asked {
    teacher: Pretrained,
    data: Prepared,
    attention: &'static str,
    exact_layer: bool,
    plan: fn(Plan) -> Plan,
}

impl Asked {
    fn convert(&self, out: &Path) -> Result<Report> {
        let stop = AtomicBool::new(false);
        let mut plan = plan(&self.teacher, self.attention, out, &stop);
        if self.exact_layer {
            plan.config.attention_by_layer.insert(0, AttentionConfig::Softmax);
        }
        let tuning = Some(Tuning { steps: 2, rate: 1e-3, distillation: 0.5, adapters: None });
        let tiny = Plan { calibrate_tokens: 200, transfer_steps: 2, tuning, measure_tokens: 100, ..plan };
        convert(&(self.plan)(tiny), &self.data)
    }
}

/// A `Change` is the field of the key that must be named as the reason, and a change to what was
/// asked for.
type Change = (&'static str, fn(&mut Asked));

const CHANGES: [Change; 21] = [
    ("teacher", |a| {
        let name = "model.norm.weight";
        let changed = (&a.teacher.tensors[name] * 1.01).unwrap();
        a.teacher.tensors.insert(name.into(), changed);
    }),
    ("model.norm_eps", |a| a.teacher.config.norm_eps = 1e-4),
    ("model.context", |a| a.teacher.config.context = 24),
    ("model.attention_by_layer", |a| a.exact_layer = true),
    ("model.attention.far.features", |a| a.attention = "favor:m=4,map=learned,window=4"),
    ("data.training tokens", |a| a.data.train = TokenFile::from_tokens(&[7; 6000], 20_000).unwrap().into()),
    ("data.held-out tokens", |a| a.data.valid = TokenFile::from_tokens(&[7; 600], 2000).unwrap().into()),
    ("seed", |a| a.plan = |plan| Plan { seed: 4, ..plan }),
    ("settings.measured_tokens", |a| a.plan = |plan| Plan { measure_tokens: 50, ..plan }),
    ("settings.recall", |a| a.plan = |plan| Plan { recall: vec![160], ..plan }),
    ("settings.calibrate.tokens", |a| a.plan = |plan| Plan { calibrate_tokens: 400, ..plan }),
    ("settings.calibrate.balance", |a| a.plan = |plan| Plan { balance: true, ..plan }),
    ("settings.transfer.steps", |a| a.plan = |plan| Plan { transfer_steps: 3, ..plan }),
    ("settings.transfer.rate", |a| a.plan = |plan| Plan { transfer_rate: 2e-2, ..plan }),
    ("settings.transfer.drop_window", |a| a.plan = |plan| Plan { drop_window: 0.5, ..plan }),
    ("settings.transfer.batch_size", |a| a.plan = |plan| Plan { batch_size: 2, ..plan }),
    ("settings.transfer", |a| a.plan = |plan| Plan { transfer_steps: 0, ..plan }),
    ("settings.tune.steps", |a| a.plan = |plan| tuned(plan, |t| t.steps = 3)),
    ("settings.tune.rate", |a| a.plan = |plan| tuned(plan, |t| t.rate = 2e-3)),
    ("settings.tune.adapters", |a| a.plan = |plan| tuned(plan, |t| t.adapters = Some(2))),
    ("settings.tune", |a| a.plan = |plan| Plan { tuning: None, ..plan }),
];

#[test]
fn a_conversion_of_other_settings_is_not_given_back() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let asked = || -> Result<Asked> {
        let data = data()?;
        let teacher = teacher(&data)?;
        let attention = "favor:m=2,map=learned,window=4";
        Ok(Asked { teacher, data, attention, exact_layer: false, plan: |plan| plan })
    };
    let first = asked()?.convert(folder.path())?;
    let (mut given_back, mut refused) = (Vec::new(), Vec::new());
    for (field, change) in CHANGES {
        let mut other = asked()?;
        change(&mut other);
        match other.convert(folder.path()) {
            Ok(_) => given_back.push(field),
            Err(error) => refused.push((field, format!("{error:#}"))),
        }
    }
    assert!(given_back.is_empty(), "the earlier result was given back for another {given_back:?}");
    for (field, error) in refused {
        assert!(error.contains(field), "{field} is not in: {error}");
        assert!(error.contains("convert.json") && error.contains("another folder"), "{error}");
    }
    let again = asked()?.convert(folder.path())?;
    assert_eq!(serde_json::to_string(&again)?, serde_json::to_string(&first)?);
    Ok(())
}

/// Changes a JSON file.
fn edit(file: &Path, change: impl FnOnce(&mut Value)) -> Result<()> {
    let mut json: Value = serde_json::from_slice(&std::fs::read(file)?)?;
    change(&mut json);
    Ok(std::fs::write(file, serde_json::to_vec(&json)?)?)
}

/// Changes the state of the conversion in a folder, and saves it as a checkpoint that belongs
/// together.
fn edit_state(folder: &Path, change: impl FnOnce(&mut Value)) -> Result<()> {
    let mut state = TrainingState::load(folder, &Device::Cpu)?;
    change(&mut state.progress);
    Checkpoint::load(folder, &Device::Cpu)?.save(folder, Some(&state))
}

#[test]
fn a_conversion_is_of_one_revision_and_says_so() -> Result<()> {
    let (data, folder, stop) = (data()?, tempfile::tempdir()?, AtomicBool::new(false));
    let teacher = teacher(&data)?;
    let out = folder.path();
    let longer = Plan { transfer_steps: 2, ..plan(&teacher, "favor:m=2,map=learned", out, &stop) };
    let short = Plan { tuning: None, ..plan(&teacher, "favor:m=2,map=learned", out, &stop) };
    let short = Plan { transfer_steps: 2, ..short };
    let go = |plan: &Plan| run(plan, &data);
    let first = convert(&short, &data)?;
    assert_eq!(first.key.as_ref().map(|key| &key.revision[..]), Some(git_revision()));

    // The folder then has the model and the report only, as it is published.
    let (report, state) = (out.join("convert.json"), out.join("train_state.json"));
    let (report_before, state_before) = (std::fs::read(&report)?, std::fs::read(&state)?);
    std::fs::remove_file(&state)?;
    edit(&report, |report| report["key"]["revision"] = "older".into())?;
    refused(go(&short), &["convert.json", "revision was older", git_revision(), "two revisions"]);
    edit(&report, |report| drop(report.as_object_mut().unwrap().remove("key")))?;
    refused(go(&short), &["convert.json has no key"]);
    refused(go(&longer), &["convert.json has no key"]);

    // The report is now behind the weights, and no state corrects it.
    std::fs::write(&report, &report_before)?;
    edit(&report, |report| {
        report["stages"].as_array_mut().unwrap().pop();
        report["key"]["settings"].as_object_mut().unwrap().remove("transfer");
    })?;
    refused(go(&short), &["weights after the stage 'transfer'", "ends with 'calibrate'", "another folder"]);

    // A conversion that an older revision began is continued, and the report says so.
    std::fs::write(&report, &report_before)?;
    std::fs::write(&state, &state_before)?;
    edit_state(out, |state| state["report"]["key"]["revision"] = "older".into())?;
    refused(go(&short), &["revision was older"]);
    let carried = convert(&longer, &data)?;
    assert_eq!(carried.stages.len(), 5);
    let legs: Vec<_> = carried.earlier_legs.iter().map(|leg| (&leg.until[..], &leg.revision[..])).collect();
    assert_eq!(legs, [("transfer", "older")]);
    assert_eq!(serde_json::to_string(&convert(&longer, &data)?)?, serde_json::to_string(&carried)?);

    // The shorter conversion would have other weights than the folder has now.
    refused(go(&short), &["settings.tune was", "is now none"]);
    Ok(())
}

#[test]
fn a_stage_in_progress_belongs_to_its_settings() -> Result<()> {
    let (data, folder, other) = (data()?, tempfile::tempdir()?, tempfile::tempdir()?);
    let teacher = teacher(&data)?;
    let stop = AtomicBool::new(false);
    let of = |out, rate| {
        let plan = plan(&teacher, "favor:m=2,map=learned", out, &stop);
        Plan { transfer_steps: 2, transfer_rate: rate, tuning: None, ..plan }
    };
    struct StopAtTransfer<'a>(&'a AtomicBool);
    impl Listener for StopAtTransfer<'_> {
        fn note(&self, text: &str) {
            self.0.store(text == "transfer", Ordering::Relaxed);
        }
    }
    let listener = StopAtTransfer(&stop);
    let stopped = run(&Plan { listener: &listener, ..of(folder.path(), 1e-2) }, &data);
    assert!(stopped?.is_none());
    stop.store(false, Ordering::Relaxed);
    let changed = of(folder.path(), 2e-2);
    refused(run(&changed, &data), &["train_state.json", "settings.transfer.rate was 0.01 and is now 0.02"]);

    // Without the state, the stage begins again. A report that is behind the weights, because the
    // process was killed, is corrected.
    let losses = |r: &Report| -> Vec<f64> { r.stages.iter().map(|stage| stage.measured.held_out.val_loss).collect() };
    std::fs::remove_file(folder.path().join("train_state.json"))?;
    let before = std::fs::read(folder.path().join("convert.json"))?;
    let expected = losses(&convert(&of(other.path(), 2e-2), &data)?);
    assert_eq!(losses(&convert(&changed, &data)?), expected);
    std::fs::write(folder.path().join("convert.json"), before)?;
    assert_eq!(losses(&convert(&changed, &data)?), expected);
    let report: Report = serde_json::from_slice(&std::fs::read(folder.path().join("convert.json"))?)?;
    assert_eq!(losses(&report), expected);
    Ok(())
}

#[test]
fn a_model_that_is_no_conversion_is_not_lost() -> Result<()> {
    let (data, folder, stop) = (data()?, tempfile::tempdir()?, AtomicBool::new(false));
    let teacher = teacher(&data)?;
    let checkpoint = Checkpoint {
        config: serde_json::to_value(&teacher.config)?,
        tokenizer: data.tokenizer.as_bytes().to_vec(),
        tensors: teacher.tensors.clone(),
        metadata: Default::default(),
    };
    checkpoint.save(folder.path(), None)?;
    let before = std::fs::read(folder.path().join("model.safetensors"))?;
    let plan = plan(&teacher, "favor:m=2,map=learned", folder.path(), &stop);
    refused(run(&plan, &data), &["no conversion", "another folder"]);
    assert_eq!(std::fs::read(folder.path().join("model.safetensors"))?, before);
    Ok(())
}

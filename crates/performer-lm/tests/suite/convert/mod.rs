//! These tests convert a softmax model to a Performer: each stage brings the student nearer to its
//! teacher, a stopped conversion resumes, and what is not possible is refused.

mod parts;
mod settings;

use std::{
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use performer_lm::{
    config::{AttentionConfig, ModelConfig, Preset},
    convert::{Plan, Report, Second, Tuning, costs, inspect, run, unfinished_stage},
    data::{DataSpec, Prepared, TokenFile, Tokenizer, prepare},
    eval::evaluate_windows,
    listener::{Bar, Listener, Silent, Unit},
    model::{Decoder, pretrained::Pretrained},
};

const WORDS: usize = 20;

/// Returns data in which half of the words repeat the word three places before, so that attention
/// is of use.
fn data() -> Result<Prepared> {
    let mut vocabulary: Vec<String> = (0..WORDS).map(|i| format!("\"<w{i}>\": {}", i + 1)).collect();
    vocabulary.push("\"<|endoftext|>\": 0".into());
    let json = format!(
        r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{{"id":0,"content":"<|endoftext|>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}}],"normalizer":null,"pre_tokenizer":null,"post_processor":null,"decoder":null,"model":{{"type":"WordLevel","vocab":{{{}}},"unk_token":"<w0>"}}}}"#,
        vocabulary.join(",")
    );
    let tokens = |n: usize, seed: u64| -> Vec<u32> {
        let mut state = seed;
        let mut all: Vec<u32> = Vec::new();
        for i in 0..n {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let fresh = (state >> 33) as u32 % WORDS as u32 + 1;
            all.push(if i % 6 < 3 { fresh } else { all[i - 3] });
        }
        all
    };
    Ok(Prepared {
        corpus_name: "copies".into(),
        description: "copies".into(),
        tokenizer: Tokenizer::from_bytes(json.into_bytes())?,
        train: TokenFile::from_tokens(&tokens(6000, 1), 20_000)?.into(),
        valid: TokenFile::from_tokens(&tokens(600, 2), 2000)?.into(),
        test: None,
        cache: None,
    })
}

/// Returns a softmax model with sharp heads and confident predictions.
fn teacher(data: &Prepared) -> Result<Pretrained> {
    let (preset, _) = Preset::Small.load()?;
    let config = ModelConfig {
        vocab_size: data.tokenizer.vocab_size(),
        attention: AttentionConfig::Softmax,
        layers: 2,
        hidden_size: 32,
        heads: 4,
        kv_heads: 2,
        feed_forward_size: 32,
        context: 48,
        ..preset
    };
    let mut tensors = Decoder::new(&config, 5, &Device::Cpu)?.tensors();
    for (name, tensor) in &mut tensors {
        if name.contains("q_proj") || name.contains("k_proj") {
            *tensor = (&*tensor * 12.0)?;
        }
        if name == "model.norm.weight" {
            *tensor = (&*tensor * 20.0)?;
        }
    }
    Ok(Pretrained { config, tensors, tokenizer: data.tokenizer.clone() })
}

fn plan<'a>(teacher: &'a Pretrained, attention: &str, out: &'a Path, stop: &'a AtomicBool) -> Plan<'a> {
    let config = ModelConfig { attention: attention.parse().expect("an attention"), ..teacher.config.clone() };
    Plan {
        stop,
        threads: 2,
        calibrate_tokens: 1000,
        transfer_steps: 40,
        batch_size: 4,
        tuning: Some(Tuning { rate: 1e-3, distillation: 1.0, ..Tuning::new(40) }),
        measure_tokens: 600,
        points: 2,
        seed: 3,
        ..Plan::new(teacher, config, out)
    }
}

/// Returns a plan with another fine-tuning.
fn tuned(plan: Plan, change: fn(&mut Tuning)) -> Plan {
    let mut tuning = plan.tuning;
    tuning.iter_mut().for_each(change);
    Plan { tuning, ..plan }
}

/// Asserts that a conversion was refused with an error that has these words.
fn refused(result: Result<Option<Report>>, words: &[&str]) {
    let error = format!("{:#}", result.expect_err("it was given back"));
    for word in words {
        assert!(error.contains(word), "'{word}' is not in: {error}");
    }
}

fn convert(plan: &Plan, data: &Prepared) -> Result<Report> {
    run(plan, data)?.context("nobody stopped it")
}

#[test]
fn stages_bring_the_student_nearer() -> Result<()> {
    let (data, folder, stop) = (data()?, tempfile::tempdir()?, AtomicBool::new(false));
    let teacher = teacher(&data)?;
    let plan = plan(&teacher, "favor:m=16,map=learned,window=4", folder.path(), &stop);
    let report = convert(&plan, &data)?;
    let names: Vec<&str> = report.stages.iter().map(|stage| stage.name.as_str()).collect();
    assert_eq!(names, ["teacher", "swap", "calibrate", "transfer", "tune"]);
    let agreement = |i: usize| report.stages[i].measured.held_out.top1_agreement;
    assert_eq!((agreement(0), report.stages[0].tokens), (1.0, 0));
    assert!(agreement(3) > agreement(1), "transfer: {} after {}", agreement(3), agreement(1));
    assert!(agreement(4) > agreement(3), "tune: {} after {}", agreement(4), agreement(3));
    // The features are fitted to whole batches, six of four sequences.
    assert_eq!(report.stages[3].tokens, 6 * 4 * 48 + 40 * 4 * 48);
    assert!(report.stages[1..].iter().all(|stage| stage.without_window.is_some()));
    // Before any stage the control is the teacher with a window; the fitting of features leaves it.
    let off: Vec<Option<f64>> =
        report.stages.iter().map(|s| s.features_off.as_ref().map(|m| m.held_out.val_loss)).collect();
    assert!(off[0].is_none() && off[1..].iter().all(Option::is_some), "{off:?}");
    assert!(off[1] == off[2] && off[2] == off[3] && off[3] != off[4], "only fine-tuning changes weights: {off:?}");
    #[cfg(feature = "plot")]
    assert!(report.chart().to_svg()?.contains("teacher"));

    // The saved model is the one that was measured, and decodes well beyond its context.
    let saved = Pretrained::open(&folder.path().to_string_lossy())?;
    assert_eq!(saved.config.attention.to_string(), "favor:m=16,map=learned,window=4");
    let model = saved.decoder(&Device::Cpu)?;
    // Stages are measured over whole windows.
    let again = evaluate_windows(&model, &data.valid, 2, 48, plan.measure_tokens / 48 * 48, &Silent)?.val_loss;
    let measured = report.stages[4].measured.held_out.val_loss;
    assert!((again - measured).abs() < 1e-6, "{again} and {measured}");
    let mut state = model.new_state();
    let ids = Tensor::zeros((1, 64), candle_core::DType::U32, &Device::Cpu)?;
    let mut bytes = Vec::new();
    for _ in 0..4 {
        let logits = model.extend(&ids, &mut state)?.flatten_all()?.to_vec1::<f32>()?;
        assert!(logits.iter().all(|x| x.is_finite()));
        bytes.push(state.bytes());
    }
    assert!(bytes.windows(2).all(|pair| pair[0] == pair[1]), "{bytes:?}");

    // The conversion is finished, so the same command changes nothing.
    let again = convert(&plan, &data)?;
    assert_eq!(serde_json::to_string(&again)?, serde_json::to_string(&report)?);
    Ok(())
}

#[test]
fn it_goes_on_after_the_last_finished_stage_on_any_number_of_threads() -> Result<()> {
    let (data, stop) = (data()?, AtomicBool::new(false));
    let teacher = teacher(&data)?;
    let (whole, parts) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let attention = "favor:m=8,map=learned";
    // A step has more than one pass, and the numbers of threads differ.
    let large = |out, threads| Plan { batch_size: 10, threads, ..plan(&teacher, attention, out, &stop) };
    let expected = convert(&large(whole.path(), 3), &data)?;
    let first = Plan { transfer_steps: 0, tuning: None, ..large(parts.path(), 1) };
    assert_eq!(convert(&first, &data)?.stages.len(), 3);
    let stopped = AtomicBool::new(true);
    assert!(run(&plan(&teacher, attention, parts.path(), &stopped), &data)?.is_none());
    let report = convert(&large(parts.path(), 1), &data)?;
    let losses = |r: &Report| -> Vec<f64> { r.stages.iter().map(|stage| stage.measured.held_out.val_loss).collect() };
    assert_eq!(losses(&report), losses(&expected));
    Ok(())
}

fn with_control(plan: Plan, calibrate_tokens: usize, tuning: Tuning) -> Plan {
    let drop_window = if plan.config.attention.window().is_some() { 0.5 } else { 0.0 };
    Plan { transfer_steps: 6, tuning: Some(tuning), control: true, calibrate_tokens, drop_window, ..plan }
}

/// Stops the conversion after a step of a stage.
struct StopIn<'a> {
    stage: &'static str,
    step: usize,
    /// Whether the stage has been announced.
    inside: AtomicBool,
    stop: &'a AtomicBool,
}

impl Listener for StopIn<'_> {
    fn note(&self, text: &str) {
        self.inside.store(text.starts_with(self.stage), Ordering::Relaxed);
    }

    fn begin(&self, _: &str, _: Unit, _: u64, _: u64) -> Box<dyn Bar + '_> {
        Box::new(StopAt(self))
    }
}

struct StopAt<'a>(&'a StopIn<'a>);

impl Bar for StopAt<'_> {
    fn step(&self, number: usize, _: f64, _: f64) {
        let StopIn { step, inside, stop, .. } = self.0;
        if inside.load(Ordering::Relaxed) && number == *step {
            stop.store(true, Ordering::Relaxed);
        }
    }
}

#[test]
fn a_stage_goes_on_where_it_was_stopped() -> Result<()> {
    let (data, stop) = (data()?, AtomicBool::new(false));
    let teacher = teacher(&data)?;
    for (attention, adapters, calibrate_tokens) in
        [("favor:m=8,map=learned,window=4", None, 500), ("favor:m=8,map=hedgehog", Some(4), 0)]
    {
        let (whole, parts) = (tempfile::tempdir()?, tempfile::tempdir()?);
        let tuning = Tuning { steps: 12, rate: 1e-3, distillation: 0.5, adapters };
        let unbroken = with_control(plan(&teacher, attention, whole.path(), &stop), calibrate_tokens, tuning);
        let expected = convert(&unbroken, &data)?;
        for (stage, name) in expected.stages.iter().rev().zip(["tune", "transfer"]) {
            assert_eq!((&stage.name[..], stage.points.len()), (name, 2));
        }

        // The conversion is stopped in the middle of each stage of training, and between two points
        // of its curve.
        for (stage, step) in [("transfer", 4), ("tune", 7), ("tune", 11), ("control", 5)] {
            let listener = StopIn { stage, step, inside: AtomicBool::new(false), stop: &stop };
            let unfinished = with_control(plan(&teacher, attention, parts.path(), &stop), calibrate_tokens, tuning);
            let report = run(&Plan { listener: &listener, ..unfinished }, &data)?;
            assert!(report.is_none() && stop.load(Ordering::Relaxed), "{attention} in {stage}");
            stop.store(false, Ordering::Relaxed);
            // The control changes other weights than those that the folder holds.
            let unfinished = (stage != "control").then(|| stage.to_string());
            assert_eq!(unfinished_stage(parts.path()), unfinished);
        }
        let report =
            convert(&with_control(plan(&teacher, attention, parts.path(), &stop), calibrate_tokens, tuning), &data)?;
        let losses =
            |r: &Report| -> Vec<_> { r.stages.iter().map(|s| (s.measured.clone(), s.points.clone())).collect() };
        assert_eq!(losses(&report), losses(&expected), "{attention}");
        assert_eq!(unfinished_stage(parts.path()), None);
        let control = |r: &Report| r.control.as_ref().map(|stage| stage.measured.clone());
        assert!(control(&report).is_some() && control(&report) == control(&expected), "{attention}");
        let left = std::fs::read_dir(parts.path())?.map(|entry| Ok(entry?.file_name().to_string_lossy().to_string()));
        let left: Vec<String> = left.collect::<Result<_>>()?;
        assert!(!left.iter().any(|name| name.contains("interrupted")), "{left:?}");
    }
    Ok(())
}

/// A window of softmax, the control of a conversion, is tuned alike. Every stage is measured on a
/// second text and in its recall, the teacher first.
#[test]
fn a_window_is_converted_to_and_stages_are_measured_in_recall() -> Result<()> {
    let data = prepare(&DataSpec::Sample, 400, None, &Silent)?;
    let (folder, stop, teacher) = (tempfile::tempdir()?, AtomicBool::new(false), teacher(&data)?);
    let plan = Plan {
        calibrate_tokens: 0,
        transfer_steps: 0,
        tuning: Some(Tuning { steps: 2, rate: 1e-3, distillation: 1.0, adapters: None }),
        second: Some(Second { name: "training text", tokens: &data.train }),
        recall: vec![200],
        ..plan(&teacher, "softmax:window=4,sinks=2", folder.path(), &stop)
    };
    let report = convert(&plan, &data)?;
    let names: Vec<&str> = report.stages.iter().map(|stage| stage.name.as_str()).collect();
    assert_eq!(names, ["teacher", "swap", "tune"]);
    assert_eq!(report.second_corpus.as_deref(), Some("training text"));
    for stage in &report.stages {
        assert!(stage.features_off.is_none() && stage.without_window.is_none(), "{}", stage.name);
        let second = stage.measured.second.context("a second text")?;
        assert_ne!(second.val_loss, stage.measured.held_out.val_loss);
        // Agreement on a text is with what the teacher says of that text.
        let agreed = [second.top1_agreement, stage.measured.held_out.top1_agreement];
        assert_eq!(agreed == [1.0; 2], stage.name == "teacher", "{}: {agreed:?}", stage.name);
        assert_eq!(stage.measured.recall.iter().map(|recall| recall.tokens).collect::<Vec<_>>(), [200]);
    }
    // A report that was read again is the same, and nothing is done twice.
    assert_eq!(serde_json::to_value(convert(&plan, &data)?)?, serde_json::to_value(report)?);
    Ok(())
}

#[test]
fn layers_may_differ_and_what_cannot_be_is_refused() -> Result<()> {
    let (data, folder, stop) = (data()?, tempfile::tempdir()?, AtomicBool::new(false));
    let teacher = teacher(&data)?;
    let mut mixed = Plan { tuning: None, ..plan(&teacher, "favor:m=8,map=learned", folder.path(), &stop) };
    mixed.config.attention_by_layer.insert(0, AttentionConfig::Softmax);
    let report = convert(&mixed, &data)?;
    assert_eq!(report.stages.len(), 4);
    let saved = Pretrained::open(&folder.path().to_string_lossy())?;
    assert_eq!(*saved.config.attention_of(0), AttentionConfig::Softmax);

    let refused = |plan: &Plan, word: &str| {
        let error = format!("{:#}", run(plan, &data).expect_err(word));
        assert!(error.contains(word), "{error}");
    };
    let other = tempfile::tempdir()?;
    refused(&plan(&saved, "favor:m=8,map=learned", other.path(), &stop), "only softmax models");
    refused(&plan(&teacher, "favor:m=8", other.path(), &stop), "cannot be fitted");
    refused(&plan(&teacher, "favor:m=8,map=dense", other.path(), &stop), "cannot be trained");
    refused(&plan(&teacher, "favor:m=8,map=hedgehog", other.path(), &stop), "cannot be fitted");
    refused(&plan(&teacher, "softmax", other.path(), &stop), "no layer is to have another attention than softmax");
    refused(&plan(&teacher, "favor:m=9,map=learned", folder.path(), &stop), "another folder");
    let dropped = |attention, drop_window| Plan { drop_window, ..plan(&teacher, attention, other.path(), &stop) };
    refused(&dropped("favor:m=8,map=learned", 0.5), "or switch none off (drop_window 0)");
    refused(&dropped("favor:m=8,map=learned,window=4", 1.5), "a share, from 0 to 1");
    let base = || plan(&teacher, "favor:m=8,map=learned", other.path(), &stop);
    for transfer_rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        refused(&Plan { transfer_rate, ..base() }, &format!("transfer_rate is {transfer_rate}"));
    }
    refused(&tuned(base(), |tuning| tuning.rate = -0.001), "tune_rate is -0.001");
    refused(&tuned(base(), |tuning| tuning.distillation = 1.5), "distillation is 1.5");
    for part in ["output-norm", "mup-scale", "key-dim=8"] {
        let attention = format!("favor:m=8,map=learned,conv,{part}");
        refused(&plan(&teacher, &attention, other.path(), &stop), "leave output-norm, mup-scale and key-dim out");
    }
    Ok(())
}

/// Tokens without a finite logit are all alike, so that student and teacher would agree in each.
#[test]
fn a_teacher_whose_loss_is_not_finite_is_refused() -> Result<()> {
    let (data, stop) = (data()?, AtomicBool::new(false));
    for bad in [f64::NAN, f64::INFINITY] {
        let folder = tempfile::tempdir()?;
        let mut teacher = teacher(&data)?;
        let name = "model.layers.1.mlp.down_proj.weight";
        teacher.tensors.insert(name.into(), (teacher.tensors[name].zeros_like()? + bad)?);
        let plan = plan(&teacher, "favor:m=4,map=learned", folder.path(), &stop);
        refused(run(&plan, &data), &["cannot measure the teacher", "is NaN", "not finite"]);
        assert!(!folder.path().join("model.safetensors").exists());
    }
    Ok(())
}

/// Features are for what is beyond the window. A rank that no matrix has is no rank of adapters.
#[test]
fn what_would_fail_after_hours_is_refused_at_once() -> Result<()> {
    let (data, folder, stop) = (data()?, tempfile::tempdir()?, AtomicBool::new(false));
    let teacher = teacher(&data)?;
    let all = plan(&teacher, "favor:m=4,map=learned,window=48", folder.path(), &stop);
    refused(run(&all, &data), &["sequences of 48 tokens never reach its features"]);
    let wide = plan(&teacher, "favor:m=4,map=learned,window=47", folder.path(), &stop);
    refused(run(&tuned(wide, |tuning| tuning.adapters = Some(32)), &data), &["adapters of rank 32"]);
    assert_eq!(std::fs::read_dir(folder.path())?.count(), 0);
    Ok(())
}

/// A conversion that is stopped before it has saved anything says so, since a folder that is to be
/// replaced still holds what was there before.
#[test]
fn what_is_stopped_before_anything_is_saved_says_so() -> Result<()> {
    let (data, stop, folder) = (data()?, AtomicBool::new(true), tempfile::tempdir()?);
    let teacher = teacher(&data)?;
    let of = || Plan { tuning: None, ..plan(&teacher, "favor:m=2,map=learned", folder.path(), &stop) };
    refused(run(&of(), &data), &["stopped", "nothing was saved", "begins again"]);
    assert!(!folder.path().join("model.safetensors").exists());
    Ok(())
}

/// A measurement takes a while; one that is stopped is made when the conversion goes on, and the
/// curve is that of a conversion that was never stopped.
#[test]
fn a_measurement_that_was_stopped_is_made_later() -> Result<()> {
    /// Sets the flag when a step of that number has been taken, just before it is measured.
    struct StopAt<'a>(usize, &'a AtomicBool);
    impl Listener for StopAt<'_> {
        fn begin(&self, _: &str, _: Unit, _: u64, _: u64) -> Box<dyn Bar + '_> {
            Box::new(StopAt(self.0, self.1))
        }
    }
    impl Bar for StopAt<'_> {
        fn step(&self, number: usize, _: f64, _: f64) {
            self.1.store(number == self.0, Ordering::Relaxed);
        }
    }
    let (data, stop) = (data()?, AtomicBool::new(false));
    let teacher = teacher(&data)?;
    let (whole, parts) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let of = |out| Plan { transfer_steps: 6, tuning: None, ..plan(&teacher, "favor:m=2,map=learned", out, &stop) };
    let expected = convert(&of(whole.path()), &data)?;
    assert_eq!(expected.stages[3].points.len(), 2);
    // In the middle, where the curve has points, and at the end of the stage.
    for step in [2, 4, 6] {
        let listener = StopAt(step, &stop);
        assert!(run(&Plan { listener: &listener, ..of(parts.path()) }, &data)?.is_none(), "{step}");
        stop.store(false, Ordering::Relaxed);
    }
    let report = convert(&of(parts.path()), &data)?;
    assert_eq!(report.stages[3].points, expected.stages[3].points);
    assert_eq!(report.stages[3].measured, expected.stages[3].measured);
    Ok(())
}

/// Where windows are off in every step, the student is trained to the same bits as one that has
/// none, in both stages of training. Where they are off in half of the steps, its features end
/// nearer to the teacher without them than features that never had to do without.
#[test]
fn windows_can_be_switched_off_in_training() -> Result<()> {
    let (data, stop) = (data()?, AtomicBool::new(false));
    let teacher = teacher(&data)?;
    let trained = |attention, drop_window, adapters| -> Result<_> {
        let folder = tempfile::tempdir()?;
        let plan = tuned(plan(&teacher, attention, folder.path(), &stop), |tuning| tuning.steps = 4);
        let tuning = plan.tuning.map(|tuning| Tuning { adapters, ..tuning });
        let report = convert(&Plan { drop_window, tuning, ..plan }, &data)?;
        Ok((report, Pretrained::open(&folder.path().to_string_lossy())?.tensors))
    };
    for adapters in [None, Some(2)] {
        let (off, weights) = trained("favor:m=8,map=learned,window=4", 1.0, adapters)?;
        let (pure, pure_weights) = trained("favor:m=8,map=learned", 0.0, adapters)?;
        let last = |report: &Report| report.stages.last().cloned().context("a stage");
        let alone = last(&off)?.without_window.context("a window")?.held_out;
        assert_eq!(alone.val_loss, last(&pure)?.measured.held_out.val_loss, "{adapters:?}");
        assert_eq!(weights.len(), pure_weights.len());
        for (name, tensor) in &pure_weights {
            let numbers = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f32>();
            assert_eq!(numbers(&weights[name])?, numbers(tensor)?, "{name}, {adapters:?}");
        }
    }
    let losses_alone = |drop_window| -> Result<Vec<f64>> {
        let (report, _) = trained("favor:m=8,map=learned,window=4", drop_window, None)?;
        let alone = report.stages.iter().filter_map(|stage| stage.without_window.as_ref());
        Ok(alone.map(|measured| measured.held_out.val_loss).collect())
    };
    let (kept, halved) = (losses_alone(0.0)?, losses_alone(0.5)?);
    // Untrained and calibrated they are equal.
    assert_eq!(kept[..2], halved[..2]);
    assert!(halved[2] < kept[2] && halved[3] < kept[3], "{halved:?} and {kept:?}");
    Ok(())
}

/// Keeps the sizes of all work that is announced, each followed by what is said to be done.
#[derive(Default)]
struct Work(Mutex<Vec<(Unit, Vec<u64>)>>);

impl Listener for Work {
    fn begin(&self, _: &str, unit: Unit, _: u64, total: u64) -> Box<dyn Bar + '_> {
        let mut all = self.0.lock().unwrap();
        all.push((unit, vec![total]));
        Box::new(WorkBar(self, all.len() - 1))
    }
}

/// The bar of one piece of work, by its number.
struct WorkBar<'a>(&'a Work, usize);

impl Bar for WorkBar<'_> {
    fn advance(&self, done: u64) {
        self.0.0.lock().unwrap()[self.1].1.push(done);
    }
}

#[test]
fn the_cost_of_a_layer_is_what_its_conversion_loses() -> Result<()> {
    let (data, folder, stop) = (data()?, tempfile::tempdir()?, AtomicBool::new(false));
    let teacher = teacher(&data)?;
    let nowhere = folder.path().join("nowhere");
    fn untrained(plan: Plan) -> Plan {
        Plan { calibrate_tokens: 0, transfer_steps: 0, tuning: None, measure_tokens: 3000, ..plan }
    }
    let costs_of = |plan: &Plan| costs(plan, &data)?.context("nobody stopped it");
    let listener = Work::default();
    let watched = Plan { listener: &listener, ..plan(&teacher, "softmax:window=2", &nowhere, &stop) };
    let all = costs_of(&untrained(watched))?;
    // The layers are counted off, and so are the texts that the teacher and each student read.
    let (layers, texts): (Vec<_>, Vec<_>) =
        listener.0.into_inner().unwrap().into_iter().partition(|(unit, _)| *unit == Unit::Layers);
    assert_eq!(layers, [(Unit::Layers, vec![2, 1, 2])]);
    let windows = texts[0].1[0];
    assert!(windows > 1, "one text says nothing of progress");
    let counted: Vec<u64> = std::iter::once(windows).chain(1..=windows).collect();
    assert_eq!(texts, vec![(Unit::Texts, counted); 3]);
    assert_eq!(all.layers.iter().map(|of| of.layer).collect::<Vec<_>>(), [0, 1]);
    for of in &all.layers {
        let out = folder.path().join(of.layer.to_string());
        let mut alone = untrained(plan(&teacher, "softmax:window=2", &out, &stop));
        alone.config.attention_by_layer.insert(1 - of.layer, AttentionConfig::Softmax);
        // The held-out text on which a conversion reports has chosen no layer.
        let on_training_text = Prepared { valid: data.train.clone(), ..data.clone() };
        let report = convert(&alone, &on_training_text)?;
        let losses: Vec<f64> = report.stages.iter().map(|stage| stage.measured.held_out.val_loss).collect();
        assert_eq!(losses, [all.teacher.held_out.val_loss, of.measured.held_out.val_loss], "layer {}", of.layer);
        assert_eq!(of.cost, losses[1] - losses[0]);
        // A layer that stays exact is not measured.
        assert_eq!(costs_of(&alone)?.layers.iter().map(|of| of.layer).collect::<Vec<_>>(), [of.layer]);
    }
    let costs: Vec<f64> = all.by_cost().iter().map(|of| of.cost).collect();
    assert!(costs[0] > costs[1], "{costs:?}");
    // A text that is shorter than what is asked for is measured whole, and the report says so.
    let whole = Plan { measure_tokens: 1 << 40, ..untrained(plan(&teacher, "softmax:window=2", &nowhere, &stop)) };
    assert_eq!(costs_of(&whole)?.measured_tokens, data.train.len() - 1);
    assert!(!nowhere.exists(), "costs were written somewhere");
    Ok(())
}

#[test]
fn inspection_reports_every_head() -> Result<()> {
    let data = data()?;
    let teacher = teacher(&data)?;
    let model = teacher.decoder(&Device::Cpu)?;
    for attention in ["favor:m=64", "favor:m=64,map=dense"] {
        let attention: AttentionConfig = attention.parse().expect("an attention");
        let heads = inspect(&model, &data, attention.favor().expect("linear"), true, 500, 1)?;
        let pairs: Vec<(usize, usize)> = heads.iter().map(|h| (h.layer, h.head)).collect();
        assert_eq!(pairs, (0..2).flat_map(|layer| (0..4).map(move |head| (layer, head))).collect::<Vec<_>>());
        for h in heads {
            assert!((0.0..=1.0).contains(&h.row_total_variation), "{h:?}");
            assert!((0.0..=1.0).contains(&h.uniform_total_variation) && h.logit_deviation > 0.0, "{h:?}");
            assert!(h.output_error.is_finite(), "{h:?}");
        }
    }
    // In so few tokens all features would look perfect.
    let favor = "favor:m=4".parse::<AttentionConfig>().expect("an attention");
    let short = Prepared { valid: TokenFile::from_tokens(&data.valid.read(0..16), 50)?.into(), ..data };
    let error = inspect(&model, &short, favor.favor().expect("linear"), false, 500, 1).expect_err("it is too short");
    assert!(error.to_string().contains("in 15 tokens") && error.to_string().contains("at least 16"), "{error}");
    Ok(())
}

/// Before anything is measured or written, which takes minutes for a large model.
#[test]
fn a_text_that_is_too_short_for_a_batch_is_refused_at_once() -> Result<()> {
    let (data, folder, stop) = (data()?, tempfile::tempdir()?, AtomicBool::new(false));
    let (teacher, out) = (teacher(&data)?, folder.path().join("out"));
    let large = |plan| Plan { batch_size: 1000, ..plan };
    let error =
        convert(&large(plan(&teacher, "favor:m=8,map=learned", &out, &stop)), &data).expect_err("it is too short");
    assert!(format!("{error:#}").contains("batch"), "{error:#}");
    assert!(!out.join("model.safetensors").exists());
    // Where nothing is trained the size of batches does not matter.
    let untrained =
        Plan { transfer_steps: 0, tuning: None, ..large(plan(&teacher, "favor:m=8,map=learned", &out, &stop)) };
    convert(&untrained, &data)?;
    assert!(out.join("model.safetensors").exists());
    Ok(())
}

/// Forget gates are fitted in one batch, whatever number of tokens features would be fitted to.
#[test]
fn calibration_counts_the_tokens_that_it_read() -> Result<()> {
    let (data, folder, stop) = (data()?, tempfile::tempdir()?, AtomicBool::new(false));
    let teacher = teacher(&data)?;
    for (attention, tokens) in [("uniform:gate", 4 * 48), ("favor:m=8,map=learned,gate", 6 * 4 * 48)] {
        let out = folder.path().join(tokens.to_string());
        let calibrated = Plan { transfer_steps: 0, tuning: None, ..plan(&teacher, attention, &out, &stop) };
        let report = convert(&calibrated, &data)?;
        let stage = report.stages.iter().find(|stage| stage.name == "calibrate").context("it was calibrated")?;
        assert_eq!(stage.tokens, tokens, "{attention}");
    }
    Ok(())
}

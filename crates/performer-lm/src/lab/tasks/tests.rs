use std::collections::BTreeMap;

use candle_core::{Tensor, Var};
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};

use super::{
    example::{Batch, Example, Split},
    *,
};
use crate::{
    config::AttentionConfig,
    draw::below,
    listener::Silent,
    train::{Checkpoint, Gradients, NEVER, TrainingState},
};

/// Plans all tasks at small sizes, with text and proteins of their own.
fn plan<'a>(folder: &'a Path, attentions: &[&str]) -> Plan<'a> {
    let text = folder.join("text");
    std::fs::write(&text, "to be or not to be, that is the question; ".repeat(1000)).unwrap();
    let proteins = folder.join("proteins");
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    let records: String = (0..80)
        .map(|_| {
            let length = 10 + below(&mut rng, 60);
            let letters = (0..length).map(|_| char::from(b"ACDEFGHIKLMNPQRSTVWYU"[below(&mut rng, 21)]));
            format!(">name\n{}\n", letters.collect::<String>())
        })
        .collect();
    std::fs::write(&proteins, records).unwrap();
    Plan {
        tasks: Task::ALL.to_vec(),
        attentions: attentions.iter().map(|a| a.parse().unwrap()).collect(),
        seeds: vec![1],
        texts: vec![text],
        proteins: Some(proteins),
        length: None,
        pairs: None,
        steps: Some(2),
        learning_rate: None,
        device: Device::Cpu,
        threads: 2,
        stop: &NEVER,
        listener: &Silent,
        out: Some(folder),
        ranks: Grid::one(),
    }
}

fn copy<'a>(plan: &Plan<'a>) -> Plan<'a> {
    Plan {
        tasks: plan.tasks.clone(),
        attentions: plan.attentions.clone(),
        seeds: plan.seeds.clone(),
        texts: plan.texts.clone(),
        proteins: plan.proteins.clone(),
        device: Device::Cpu,
        ranks: plan.ranks.clone(),
        ..*plan
    }
}

fn tiny(plan: &Plan, task: Task) -> Findings {
    let length = match task {
        Task::Copying | Task::Recall => 6,
        _ => 40,
    };
    let one = Plan { tasks: vec![task], seeds: vec![1, 2], length: Some(length), ..copy(plan) };
    run(&one).unwrap()
}

#[test]
fn every_task_runs_and_reports() {
    let folder = tempfile::tempdir().unwrap();
    let plan = plan(folder.path(), &["softmax", "favor:m=8,window=4", "favor:m=8"]);
    for task in Task::ALL {
        let found = tiny(&plan, task);
        let data = &found.data["tasks"][0];
        let runs = data["runs"].as_array().unwrap();
        // Attention with a window cannot learn bidirectional tasks.
        assert_eq!(runs.len(), if task.is_causal() { 6 } else { 4 }, "{task}");
        for run in runs {
            assert_eq!(run["curve"].as_array().unwrap().len(), 2);
            // Two steps teach little, but must not make the model much worse than the uniform
            // distribution.
            let uniform = (plan.setting(task).unwrap().source.vocabulary() as f64).ln();
            let loss = run["loss"].as_f64().unwrap();
            assert!(loss > 0.0 && loss < 1.5 * uniform, "{task}: {loss}");
            // Without its features a window is left of the second attention, and means of the
            // values of the third.
            let off = run["features_off"]["loss"].as_f64();
            assert_eq!(off.is_some(), run["attention"] != "softmax", "{task}");
            assert!(
                off.is_none_or(|off| off > 0.0 && off < 1.5 * uniform && off != loss),
                "{task}: {off:?} and {loss}"
            );
        }
        let section = &found.sections[0];
        assert!(section.chart.as_ref().unwrap().1.to_svg().unwrap().contains("chance"));
        let table = section.table.as_ref().unwrap();
        assert!(table.rows.iter().all(|row| row.len() == table.header.len()));
        assert!(table.header.contains(&"features off".to_string()), "{task}");
    }
}

#[test]
fn finished_runs_are_not_made_again() {
    let folder = tempfile::tempdir().unwrap();
    let plan = plan(folder.path(), &["softmax"]);
    let first = tiny(&plan, Task::Recall);
    let file = folder.path().join(RUNS);
    let before = std::fs::read(&file).unwrap();
    let again = tiny(&plan, Task::Recall);
    // The measured seconds are equal too, so nothing was measured anew.
    assert_eq!(first.data, again.data);
    assert_eq!(before, std::fs::read(&file).unwrap());
}

#[test]
fn runs_of_other_settings_are_not_given_back() {
    let folder = tempfile::tempdir().unwrap();
    let plan = plan(folder.path(), &["softmax"]);
    let text =
        |plan: &Plan| run(&Plan { tasks: vec![Task::Text], length: Some(plan.length.unwrap_or(40)), ..copy(plan) });
    let first = text(&plan).unwrap();
    let mut refused = Vec::new();
    let mut ask = |field: &'static str, plan: Plan| refused.push((field, text(&plan).err()));
    ask("settings.steps", Plan { steps: Some(3), ..copy(&plan) });
    ask("settings.learning_rate", Plan { learning_rate: Some(1e-4), ..copy(&plan) });
    ask("settings.length", Plan { length: Some(30), ..copy(&plan) });
    // The file has the same name and length, but another content.
    let content = std::fs::read_to_string(&plan.texts[0]).unwrap();
    std::fs::write(&plan.texts[0], content.replacen("question", "exercise", 1)).unwrap();
    ask("data.files", copy(&plan));
    let given_back: Vec<_> = refused.iter().filter(|(_, error)| error.is_none()).map(|(field, _)| field).collect();
    assert!(given_back.is_empty(), "the earlier result was given back or replaced for another {given_back:?}");
    for (field, error) in refused {
        let error = format!("{:#}", error.unwrap());
        assert!(error.contains(field), "{field} is not in: {error}");
        assert!(error.contains(RUNS) && error.contains("another folder"), "{error}");
    }
    std::fs::write(&plan.texts[0], content).unwrap();
    assert_eq!(text(&plan).unwrap().data, first.data);
}

#[test]
fn runs_of_other_revisions_and_without_a_key_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let plan = plan(folder.path(), &["softmax"]);
    let ask = || run(&Plan { tasks: vec![Task::Recall], length: Some(4), ..copy(&plan) });
    ask().unwrap();
    let file = folder.path().join(RUNS);
    let mut runs: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(runs[0]["key"]["revision"], crate::train::git_revision());
    runs[0]["key"]["revision"] = "older".into();
    std::fs::write(&file, runs.to_string()).unwrap();
    let error = format!("{:#}", ask().unwrap_err());
    assert!(error.contains("older") && error.contains(crate::train::git_revision()), "{error}");
    runs[0].as_object_mut().unwrap().remove("key");
    std::fs::write(&file, runs.to_string()).unwrap();
    let error = format!("{:#}", ask().unwrap_err());
    assert!(error.contains("tasks-runs.json has no key"), "{error}");
}

#[test]
fn a_stopped_run_belongs_to_its_settings() {
    let folder = tempfile::tempdir().unwrap();
    let (stopped, name) = (AtomicBool::new(true), run_name(&AttentionConfig::Softmax.into(), 1));
    assert!(recall(folder.path(), "softmax", &stopped, 1).is_err());
    let run = folder.path().join(INTERRUPTED).join(format!("recall-{name}"));
    let edit = |field: &str, value: serde_json::Value| {
        let mut state = TrainingState::load(&run, &Device::Cpu).unwrap();
        *state.progress.pointer_mut(field).unwrap() = value;
        Checkpoint::load(&run, &Device::Cpu).unwrap().save(&run, Some(&state)).unwrap();
    };
    edit("/key/settings/steps", 31.into());
    let error = format!("{:#}", recall(folder.path(), "softmax", &NEVER, 1).unwrap_err());
    assert!(error.contains("train_state.json") && error.contains("settings.steps was 31 and is now 30"), "{error}");
    edit("/key/settings/steps", 30.into());
    edit("/key/revision", "older".into());
    let found = recall(folder.path(), "softmax", &NEVER, 1).unwrap();
    let legs = serde_json::json!([{ "until": "step 0", "revision": "older", "device": "cpu" }]);
    assert_eq!(found.data["tasks"][0]["runs"][0]["earlier_legs"], legs);
}

fn recall(folder: &Path, attention: &str, stop: &AtomicBool, threads: usize) -> Result<Findings> {
    let plan = plan(folder, &[attention]);
    run(&Plan { tasks: vec![Task::Recall], length: Some(4), steps: Some(30), stop, threads, ..plan })
}

#[test]
fn a_stopped_run_goes_on_as_if_it_had_not_been_stopped() {
    for attention in ["favor:m=8", "favor:m=4,map=learned,window=4"] {
        let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let expected = recall(whole.path(), attention, &NEVER, 2).unwrap();
        // The run is stopped from outside again and again, at any step.
        let state = parts.path().join(INTERRUPTED).join(format!("recall-{}", run_name(&attention.parse().unwrap(), 1)));
        let (mut stops, mut in_the_middle) = (0, 0);
        let found = loop {
            let now = AtomicBool::new(false);
            let done = std::thread::scope(|scope| {
                let run = scope.spawn(|| recall(parts.path(), attention, &now, 1));
                std::thread::sleep(std::time::Duration::from_millis(20 + 40 * stops));
                now.store(true, std::sync::atomic::Ordering::Relaxed);
                run.join().unwrap()
            });
            match done {
                Ok(found) => break found,
                Err(error) => assert!(error.to_string().contains("goes on from here"), "{error:#}"),
            }
            stops += 1;
            let state: serde_json::Value =
                serde_json::from_slice(&std::fs::read(state.join("train_state.json")).unwrap()).unwrap();
            in_the_middle += usize::from(state["steps"].as_u64() > Some(0));
        };
        assert!(in_the_middle > 0, "the run was over before it could be stopped");
        let of = |found: &Findings| found.data["tasks"][0]["runs"][0]["curve"].clone();
        assert_eq!(of(&found), of(&expected), "{attention} after {stops} stops");
        assert!(!state.exists(), "a finished run needs no checkpoint");
    }
}

#[test]
fn attentions_start_from_equal_weights() {
    let folder = tempfile::tempdir().unwrap();
    let plan = plan(folder.path(), &["softmax"]);
    let setting = plan.setting(Task::Listops).unwrap();
    let weights = |attention: &str| -> BTreeMap<String, Vec<f32>> {
        let model = setting.model(&attention.parse().unwrap(), 7).unwrap();
        let parameters = model.named_parameters();
        parameters.into_iter().map(|(name, var)| (name, var.flatten_all().unwrap().to_vec1().unwrap())).collect()
    };
    let softmax = weights("softmax");
    for attention in &ATTENTIONS[1..] {
        let own = weights(attention);
        // Learned maps and gates have weights that softmax has not.
        for (name, weights) in &softmax {
            assert!(own.get(name) == Some(weights), "{attention}: {name} differs or is missing");
        }
    }
}

/// Returns the attentions that can be bidirectional.
fn bidirectional() -> impl Iterator<Item = AttentionPattern> {
    ATTENTIONS.iter().map(|a| a.parse().unwrap()).filter(|attention| can_learn(attention, Task::Protein))
}

#[test]
fn gradients_reach_every_parameter_of_a_bidirectional_model() {
    let folder = tempfile::tempdir().unwrap();
    let plan = plan(folder.path(), &["softmax"]);
    let setting = plan.setting(Task::Protein).unwrap();
    let batch = Batch::new(&setting.held_out[..6], false, &Device::Cpu).unwrap();
    assert!(batch.mask.visible().is_some(), "lengths differ, so there is padding");
    for attention in bidirectional() {
        let model = setting.model(&attention, 3).unwrap();
        let parameters: Vec<(String, Var)> = model.named_parameters();
        let (loss, gradients) = Gradients::of_parts(1, 1, &parameters, |_| {
            Ok(model.losses_at(&batch.ids, &batch.mask, &batch.places, &batch.targets)?.mean_all()?)
        })
        .unwrap();
        assert!(loss.is_finite());
        for ((name, _), gradient) in parameters.iter().zip(&gradients.tensors) {
            let gradient = gradient.as_ref().unwrap_or_else(|| panic!("{attention}: none for {name}"));
            let largest = gradient.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
            // The bias of keys adds one constant to all of a query's logits, on which exact
            // attention does not depend.
            let blind = name.ends_with("k_proj.bias") && attention.most == AttentionConfig::Softmax;
            assert!(largest.is_finite() && (largest > 0.0 || blind), "{attention}: {name} {largest}");
        }
    }
}

#[test]
fn padding_changes_nothing_and_both_sides_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let plan = plan(folder.path(), &["softmax"]);
    let setting = plan.setting(Task::Protein).unwrap();
    let mut examples: Vec<Example> = setting.held_out.iter().take(8).cloned().collect();
    examples.sort_by_key(|example| example.ids.len());
    let (short, long) = (examples[0].clone(), examples[7].clone());
    assert!(short.ids.len() + 8 < long.ids.len());
    for attention in bidirectional() {
        let model = setting.model(&attention, 3).unwrap();
        let logits = |examples: &[Example], first: usize| -> Vec<Vec<f32>> {
            let batch = Batch::new(examples, false, &Device::Cpu).unwrap();
            let places = &batch.places[..first];
            model.logits_at(&batch.ids, &batch.mask, places).unwrap().to_vec2().unwrap()
        };
        let asked = short.answers.len();
        let alone = logits(std::slice::from_ref(&short), asked);
        let padded = logits(&[short.clone(), long.clone()], asked);
        let difference = |a: &[Vec<f32>], b: &[Vec<f32>]| {
            a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max)
        };
        assert!(difference(&alone, &padded) < 1e-5, "{attention}: {}", difference(&alone, &padded));
        let mut other = short.clone();
        let last = other.ids.len() - 1;
        other.ids[last] = (other.ids[last] + 1) % 20;
        let first = [other.answers[0]];
        assert!(first[0].0 < last);
        other.answers = first.to_vec();
        let changed = logits(&[other], 1);
        assert!(difference(&alone[..1], &changed) > 1e-6, "{attention}: what is to the right is not read");
    }
}

#[test]
fn results_do_not_depend_on_the_threads() {
    let folder = tempfile::tempdir().unwrap();
    let one = plan(folder.path(), &["favor:m=8"]);
    let score = |threads: usize| {
        let plan = Plan { threads, out: None, ..copy(&one) };
        tiny(&plan, Task::Protein).data["tasks"][0]["summary"][0]["mean"].clone()
    };
    assert_eq!(score(1), score(3));
}

#[test]
fn chance_is_what_frequencies_give() {
    let folder = tempfile::tempdir().unwrap();
    let plan = plan(folder.path(), &["softmax"]);
    let setting = plan.setting(Task::Copying).unwrap();
    let chance = setting.chance();
    assert!((chance.loss - 32f64.ln()).abs() < 0.01, "{chance:?}");
    assert!((chance.accuracy - 1.0 / 32.0).abs() < 0.01, "{chance:?}");
}

#[test]
fn bad_settings_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let good = plan(folder.path(), &["softmax"]);
    let error = |plan: Plan| format!("{:#}", run(&plan).unwrap_err());
    assert!(error(Plan { length: Some(5), ..copy(&good) }).contains("one task"));
    assert!(error(Plan { steps: Some(0), ..copy(&good) }).contains("steps is 0"));
    assert!(error(Plan { texts: vec![], ..copy(&good) }).contains("needs a text"));
    let both = Plan { tasks: vec![Task::Text], texts: vec![folder.path().join("none")], ..copy(&good) };
    assert!(error(both).contains("none"));
    std::fs::write(folder.path().join(RUNS), "[").unwrap();
    assert!(error(copy(&good)).contains("damaged"));
}

#[test]
fn causal_tasks_do_not_see_the_answer() {
    let folder = tempfile::tempdir().unwrap();
    let plan = plan(folder.path(), &["softmax"]);
    for task in [Task::Copying, Task::Recall, Task::Text] {
        let setting = plan.setting(task).unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(8);
        let example = setting.source.draw(Split::Train, &mut rng);
        let &(place, target) = example.answers.last().unwrap();
        let model = setting.model(&"favor:m=16,window=8".parse().unwrap(), 1).unwrap();
        let mut cut = example.clone();
        cut.ids.truncate(place + 1);
        let logits = |example: &Example| -> Tensor {
            let batch = Batch::new(std::slice::from_ref(example), true, &Device::Cpu).unwrap();
            let last = batch.places.last().copied().unwrap();
            model.logits_at(&batch.ids, &batch.mask, &[last]).unwrap()
        };
        let difference = (logits(&example) - logits(&cut)).unwrap().abs().unwrap().max_all().unwrap();
        assert!(difference.to_scalar::<f32>().unwrap() < 1e-5, "{task}");
        assert!((target as usize) < setting.source.vocabulary());
    }
}

//! This module performs one run: a model learns a task, and is measured on held-out examples.

use std::{collections::BTreeMap, path::Path, sync::atomic::AtomicBool, time::Duration};

use anyhow::{Context, Result, bail};
use candle_core::Device;
use performer_core::{AttentionConfig, projection::derive_seed};
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use serde::{Deserialize, Serialize};

use super::{
    Task,
    example::{Batch, Example, Source, Split},
    recipe::Recipe,
};
use crate::{
    config::{AttentionPattern, ModelConfig},
    listener::Listener,
    model::Decoder,
    parallel::in_order,
    train::{
        AdamW, AdamWConfig, Checkpoint, Earlier, Gradients, Leg, Pace, RunKey, Schedule, Step, StepBar, Steps,
        TrainingState, take_steps,
    },
};

/// The stream of a run's seed from which its examples are drawn.
const EXAMPLES_STREAM: u64 = 4;

/// The seed of the held-out examples, which all runs share.
const HELD_OUT_SEED: u64 = 0x7e57;

/// Number of points of a learning curve.
const POINTS: usize = 10;

/// About how many tokens a pass has. The number is fixed, so that results do not depend on the
/// number of threads.
const PASS_TOKENS: usize = 2048;

/// The time between two saves of a run in progress.
const SAVE_AFTER: Duration = Duration::from_secs(60);

/// The norm to which gradients are clipped.
const CLIP: f64 = 1.0;

/// A `Score` says how well held-out answers are predicted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// Mean cross-entropy, in nats per answer.
    pub loss: f64,
    /// Share of the answers that are the most probable token.
    pub accuracy: f64,
}

/// A `Point` is a point of a learning curve.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Number of steps taken.
    pub step: usize,
    /// Score on all held-out examples.
    #[serde(flatten)]
    pub score: Score,
}

/// A `Run` says what was learned, how and from which seed, and with which result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The task.
    pub task: Task,
    /// The attention, as the command line takes it.
    pub attention: String,
    /// Seed of weights, features and examples.
    pub seed: u64,
    /// Sizes and budget.
    pub recipe: Recipe,
    /// Description of an example.
    pub data: String,
    /// Number of trained parameters.
    pub parameters: usize,
    /// Bytes of decoding state of one sequence of the task's length, in all layers, in f32; 0 in
    /// runs of versions that did not measure it.
    #[serde(default)]
    pub state_bytes: usize,
    /// Whether that state grows with every token.
    #[serde(default)]
    pub state_grows: bool,
    /// Seconds of training, without measuring.
    pub seconds: f64,
    /// Training tokens per second.
    pub tokens_per_second: f64,
    /// The score at the end.
    #[serde(flatten)]
    pub score: Score,
    /// The score at the end of the same weights with the features off, where the attention has
    /// some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub features_off: Option<Score>,
    /// The learning curve.
    pub curve: Vec<Point>,
    /// Key of the run; `None` in runs of versions that did not record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<RunKey>,
    /// The parts that other revisions of this program made, or that were made on other kinds of
    /// device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier_legs: Vec<Leg>,
}

/// A `Setting` is a task that is ready to be learned: the source of its examples, and the held-out
/// ones.
pub(super) struct Setting<'a> {
    pub(super) task: Task,
    pub(super) recipe: Recipe,
    pub(super) source: Box<dyn Source>,
    pub(super) held_out: Vec<Example>,
    pub(super) device: &'a Device,
    pub(super) threads: usize,
    pub(super) stop: &'a AtomicBool,
    pub(super) listener: &'a dyn Listener,
}

impl<'a> Setting<'a> {
    pub(super) fn new(
        task: Task,
        recipe: Recipe,
        source: Box<dyn Source>,
        device: &'a Device,
        threads: usize,
        stop: &'a AtomicBool,
        listener: &'a dyn Listener,
    ) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(HELD_OUT_SEED);
        let held_out = (0..recipe.held_out).map(|_| source.draw(Split::HeldOut, &mut rng)).collect();
        Self { task, recipe, source, held_out, device, threads, stop, listener }
    }

    fn config(&self, attention: &AttentionPattern) -> Result<ModelConfig> {
        let context = self.held_out.iter().map(|example| example.ids.len()).max().unwrap_or(1);
        self.recipe.model(&*self.source, attention, context)
    }

    /// Returns the key of a run.
    pub(super) fn key(&self, attention: &AttentionPattern, seed: u64) -> Result<RunKey> {
        let mut data = BTreeMap::from([("examples".to_string(), self.source.describe())]);
        data.extend(self.source.files().map(|digest| ("files".to_string(), digest.to_hex().to_string())));
        let run = format!("task {}", self.task);
        RunKey::new(run, &self.config(attention)?, &self.recipe, data, seed, self.device)
    }

    /// Returns the model of a run before training.
    pub(super) fn model(&self, attention: &AttentionPattern, seed: u64) -> Result<Decoder> {
        let config = self.config(attention)?;
        // Random features that no sequence is long enough for do no harm. A trained one would get
        // no gradient, which the optimiser refuses.
        let idle = config.idle_features().filter(|&layer| {
            let is_trained = |one: &AttentionConfig| one.favor().is_some_and(|favor| favor.map.is_trained());
            config.attention_of(layer).by_head().iter().any(is_trained)
        });
        if let Some(layer) = idle {
            bail!("{}: {}", self.task, config.of_idle_features(layer));
        }
        Decoder::new(&config, seed, self.device).with_context(|| format!("attention {attention}"))
    }

    /// Trains with one attention from one seed. Returns `None` if it was stopped; `folder`, if
    /// there is one, then holds what the run needs to resume.
    pub(super) fn run(&self, attention: &AttentionPattern, seed: u64, folder: Option<&Path>) -> Result<Option<Run>> {
        let Recipe { steps, learning_rate, .. } = self.recipe;
        let name = format!("{} {attention} seed {seed}", self.task);
        let mut lesson = Lesson::new(self, attention, seed, folder, &name)?;
        let pace = Pace {
            name: &name,
            steps,
            rate: learning_rate,
            schedule: Schedule::WarmupCosine { warmup_steps: (steps / 10).max(1), min_fraction: 0.05 },
            clip: Some(CLIP),
            save_after: SAVE_AFTER,
            stop: self.stop,
        };
        if !take_steps(&mut lesson, &pace)? {
            return Ok(None);
        }
        let Lesson { model, state, bar, .. } = lesson;
        let State { key, earlier_legs, seconds, tokens, curve, .. } = state;
        let score = curve.last().context("steps is 0; it must be at least 1")?.score;
        let features_off = model.features_off()?.map(|off| self.score(&off)).transpose()?;
        drop(bar);
        self.listener.note(&format!("{name}: {}, {seconds:.0} s", self.task.metric().show(&[score])));
        Ok(Some(Run {
            task: self.task,
            attention: attention.to_string(),
            seed,
            recipe: self.recipe.clone(),
            data: self.source.describe(),
            parameters: model.parameter_count(),
            state_bytes: model.state_bytes()?,
            state_grows: model.config().growing_layers() > 0,
            seconds,
            tokens_per_second: tokens as f64 / seconds.max(1e-9),
            score,
            features_off,
            curve,
            key,
            earlier_legs,
        }))
    }

    /// Returns what a stopped run left in `folder`, if anything, with a warning if another revision
    /// of this program left it.
    ///
    /// # Errors
    /// If the folder holds the state of a run with another key, or without one.
    pub(super) fn interrupted(
        &self,
        attention: &AttentionPattern,
        seed: u64,
        folder: &Path,
    ) -> Result<Option<(TrainingState, Option<String>)>> {
        if !TrainingState::is_in(folder)? {
            return Ok(None);
        }
        let saved = TrainingState::load(folder, self.device)?;
        let state: State = saved.progress_as()?;
        let file = folder.join("train_state.json");
        let earlier = Earlier { key: state.key.as_ref(), file: &file, remove: Some(folder) };
        let warning = self.key(attention, seed)?.check_interrupted(earlier)?;
        Ok(Some((saved, warning)))
    }

    /// Returns the number of examples in a pass: with two examples or more there are at least two
    /// passes, for two threads.
    fn rows(&self, examples: &[Example]) -> usize {
        let longest = examples.iter().map(|example| example.ids.len()).max().unwrap_or(1);
        (PASS_TOKENS / longest.max(1)).clamp(1, examples.len().div_ceil(2))
    }

    /// Measures how well a model predicts the held-out answers.
    fn score(&self, model: &Decoder) -> Result<Score> {
        let parts: Vec<&[Example]> = self.held_out.chunks(self.rows(&self.held_out)).collect();
        let (mut loss, mut right, mut answers) = (0.0, 0, 0);
        in_order(
            self.device,
            parts.len(),
            self.threads,
            |i| {
                let batch = Batch::new(parts[i], self.task.is_causal(), self.device)?;
                let logits = model.logits_at(&batch.ids, &batch.mask, &batch.places)?.to_vec2::<f32>()?;
                Ok(logits
                    .iter()
                    .zip(&batch.targets)
                    .map(|(logits, &target)| judge(logits, target as usize))
                    .collect::<Vec<_>>())
            },
            |judged| {
                for (nats, is_right) in judged {
                    loss += nats;
                    right += usize::from(is_right);
                    answers += 1;
                }
                Ok(())
            },
        )?;
        Ok(Score { loss: loss / answers as f64, accuracy: right as f64 / answers as f64 })
    }

    /// Returns the score of chance, which does not look at the input: it always predicts the
    /// frequencies of answers in a thousand training examples, each token counted once more so that
    /// none has probability 0, and answers with the most frequent one.
    pub(super) fn chance(&self) -> Score {
        let mut rng = ChaCha8Rng::seed_from_u64(derive_seed(HELD_OUT_SEED, 1));
        let mut counts = vec![1u32; self.source.vocabulary()];
        for _ in 0..1000 {
            for (_, target) in self.source.draw(Split::Train, &mut rng).answers {
                counts[target as usize] += 1;
            }
        }
        let total: u32 = counts.iter().sum();
        let commonest = (0..counts.len()).max_by_key(|&token| counts[token]).unwrap_or(0);
        let targets: Vec<usize> =
            self.held_out.iter().flat_map(|example| &example.answers).map(|answer| answer.1 as usize).collect();
        let nats = |&target: &usize| (f64::from(total) / f64::from(counts[target])).ln();
        Score {
            loss: targets.iter().map(nats).sum::<f64>() / targets.len() as f64,
            accuracy: targets.iter().filter(|&&target| target == commonest).count() as f64 / targets.len() as f64,
        }
    }
}

/// `State` is the state of a run so far, beside its model and optimiser; it is the content of
/// `train_state.json`.
#[derive(Clone, Serialize, Deserialize)]
struct State {
    key: Option<RunKey>,
    earlier_legs: Vec<Leg>,
    steps: usize,
    seconds: f64,
    tokens: usize,
    curve: Vec<Point>,
}

/// A `Lesson` is a run in progress.
struct Lesson<'a> {
    setting: &'a Setting<'a>,
    seed: u64,
    folder: Option<&'a Path>,
    model: Decoder,
    optimizer: AdamW,
    state: State,
    /// Number of tokens of the step in progress.
    read: usize,
    bar: StepBar<'a>,
}

impl<'a> Lesson<'a> {
    /// Begins a run, or resumes it where it was stopped.
    fn new(
        setting: &'a Setting,
        attention: &AttentionPattern,
        seed: u64,
        folder: Option<&'a Path>,
        name: &str,
    ) -> Result<Self> {
        let key = setting.key(attention, seed)?;
        let interrupted = folder.map(|folder| setting.interrupted(attention, seed, folder)).transpose()?.flatten();
        let mut state =
            State { key: None, earlier_legs: Vec::new(), steps: 0, seconds: 0.0, tokens: 0, curve: Vec::new() };
        let mut model = setting.model(attention, seed)?;
        let mut moments = None;
        if let (Some(folder), Some((saved, warning))) = (folder, interrupted) {
            let checkpoint = Checkpoint::load(folder, setting.device)?;
            model = Decoder::from_tensors(&setting.config(attention)?, &checkpoint.tensors, setting.device)?;
            state = saved.progress_as()?;
            if let Some(text) = warning {
                setting.listener.note(&text);
                state.earlier_legs.extend(state.key.take().map(|key| key.leg(format!("step {}", state.steps))));
            }
            moments = Some(saved.optimizer);
        }
        state.key = Some(key);
        let config = AdamWConfig { weight_decay: 0.01, ..Default::default() };
        let mut optimizer = AdamW::new(model.named_parameters(), config)?;
        if let Some(moments) = moments {
            optimizer.load_state(&moments)?;
        }
        let bar = StepBar::new(setting.listener, name, state.steps, setting.recipe.steps);
        Ok(Self { setting, seed, folder, model, optimizer, state, read: 0, bar })
    }
}

impl Steps for Lesson<'_> {
    fn optimizer(&mut self) -> &mut AdamW {
        &mut self.optimizer
    }

    fn gradients(&mut self, step: usize) -> Result<(f64, Gradients)> {
        let setting = self.setting;
        // The examples are the same for every attention.
        let stream = derive_seed(derive_seed(self.seed, EXAMPLES_STREAM), step as u64);
        let mut rng = ChaCha8Rng::seed_from_u64(stream);
        let examples: Vec<Example> =
            (0..setting.recipe.batch_size).map(|_| setting.source.draw(Split::Train, &mut rng)).collect();
        self.read = examples.iter().map(|example| example.ids.len()).sum();
        let answers: usize = examples.iter().map(|example| example.answers.len()).sum();
        let parts: Vec<&[Example]> = examples.chunks(setting.rows(&examples)).collect();
        let model = &self.model;
        Gradients::of_parts(parts.len(), setting.threads, self.optimizer.parameters(), |i| {
            let batch = Batch::new(parts[i], setting.task.is_causal(), setting.device)?;
            let losses = model.losses_at(&batch.ids, &batch.mask, &batch.places, &batch.targets)?;
            Ok((losses.sum_all()? / answers as f64)?)
        })
    }

    fn after(&mut self, step: &Step) -> Result<()> {
        self.state.steps = step.number;
        self.state.tokens += self.read;
        self.state.seconds += step.seconds;
        self.bar.step(step.number, step.loss, self.read);
        let steps = self.setting.recipe.steps;
        if step.number * POINTS / steps > (step.number - 1) * POINTS / steps || step.number == steps {
            self.state.curve.push(Point { step: step.number, score: self.setting.score(&self.model)? });
        }
        Ok(())
    }

    fn save(&mut self) -> Result<()> {
        let Some(folder) = self.folder else { return Ok(()) };
        let checkpoint = Checkpoint {
            config: serde_json::to_value(self.model.config())?,
            // The symbols of a task need no tokenizer.
            tokenizer: b"{}".to_vec(),
            tensors: self.model.tensors(),
            metadata: Default::default(),
        };
        let state = TrainingState { optimizer: self.optimizer.state()?, progress: serde_json::to_value(&self.state)? };
        checkpoint.save(folder, Some(&state))
    }
}

/// Returns the cross-entropy of the target in nats, and whether the target is the most probable
/// token.
fn judge(logits: &[f32], target: usize) -> (f64, bool) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
    (sum.ln() - f64::from(logits[target] - max), logits[target] == max)
}

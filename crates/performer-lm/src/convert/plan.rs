//! This module says what a conversion is to do: its [`Plan`], and what is refused of one before
//! anything is made.

use std::{path::Path, sync::atomic::AtomicBool};

use anyhow::{Result, bail, ensure};
use candle_core::Device;
use performer_core::FavorConfig;

use super::{Tuning, adapters, windows};
use crate::{
    config::{AttentionConfig, ModelConfig},
    data::{DataSpec, TokenFile},
    errors::Cause,
    listener::{Listener, Silent},
    model::pretrained::Pretrained,
    parallel::cores,
    train::NEVER,
};

/// A `Plan` says what is converted, and by which stages.
///
/// [`Self::new`] gives every field a value, so that a caller writes only those that differ:
///
/// ```no_run
/// use std::path::Path;
///
/// use performer_lm::{
///     convert::{Plan, Tuning, run},
///     data::{DataSpec, prepare_for},
///     listener::Silent,
///     model::pretrained::Pretrained,
/// };
///
/// let teacher = Pretrained::open("models/stories/softmax")?;
/// let data = prepare_for(&DataSpec::Path("stories".into()), &teacher.tokenizer, &Silent)?;
/// let attention = "favor:m=128,map=learned,gate,conv".parse().map_err(anyhow::Error::msg)?;
/// let config = teacher.config.clone().with_attention(&attention)?;
/// let plan = Plan {
///     tuning: Some(Tuning { rate: 1e-3, ..Tuning::new(1500) }),
///     ..Plan::new(&teacher, config, Path::new("runs/converted"))
/// };
/// let report = run(&plan, &data)?.expect("nobody stops it");
/// # anyhow::Ok(())
/// ```
pub struct Plan<'a> {
    /// The softmax model.
    pub teacher: &'a Pretrained,
    /// Configuration of the student: the teacher's with other attention.
    pub config: ModelConfig,
    /// Folder of the student.
    pub out: &'a Path,
    /// Whether to begin anew, and to replace what the folder holds.
    pub overwrite: bool,
    /// Device on which both models are.
    pub device: Device,
    /// Number of worker threads on the CPU.
    pub threads: usize,
    /// Flag that is set from outside to stop after the step in progress.
    pub stop: &'a AtomicBool,
    /// Number of tokens that the moments are taken from; 0 leaves out calibration.
    pub calibrate_tokens: usize,
    /// Whether fitted features are balanced, which gives queries and keys the same covariance. It
    /// is exact and costs one matrix product for every key.
    pub balance: bool,
    /// Number of steps of the transfer; 0 leaves it out.
    pub transfer_steps: usize,
    /// Peak learning rate of the transfer.
    pub transfer_rate: f64,
    /// Share of the steps of the transfer and of fine-tuning in which the windows before features
    /// are switched off, from 0 to 1.
    pub drop_window: f64,
    /// Number of sequences in a step.
    pub batch_size: usize,
    /// Settings of the fine-tuning, if there is any.
    pub tuning: Option<Tuning>,
    /// Whether the teacher is fine-tuned in the same way as a control, which shows how much of the
    /// result is due to fine-tuning alone.
    pub control: bool,
    /// Number of held-out tokens on which each stage is measured.
    pub measure_tokens: usize,
    /// A second text, on which each stage is measured too.
    pub second: Option<Second<'a>>,
    /// Lengths in tokens of texts in which the recall of each stage is measured.
    pub recall: Vec<usize>,
    /// How often a stage of training is measured before its end.
    pub points: usize,
    /// Seed of features and data order.
    pub seed: u64,
    /// The data, which the folder names so that it is known what the student has learned from.
    pub data: Option<&'a DataSpec>,
    /// Is told of stages and steps, and of what a person should know.
    pub listener: &'a dyn Listener,
}

impl<'a> Plan<'a> {
    /// Number of tokens that the moments are taken from, where features or gates can be fitted and
    /// nothing else is said.
    pub const CALIBRATE_TOKENS: usize = 32_768;
    /// Number of sequences in a step, where nothing else is said.
    pub const BATCH_SIZE: usize = 8;
    /// Number of held-out tokens on which each stage is measured, where nothing else is said.
    pub const MEASURE_TOKENS: usize = 65_536;
    /// How often a stage of training is measured before its end, where nothing else is said.
    pub const POINTS: usize = 8;
    /// Seed of features and data order, where nothing else is said.
    pub const SEED: u64 = 42;

    /// Returns the plan of a conversion on all cores of the CPU, which replaces nothing, says
    /// nothing and goes on to its end. It calibrates and transfers, in 300 steps, where `config`
    /// has what these stages change; it does not fine-tune, nor measure recall or a second text.
    pub fn new(teacher: &'a Pretrained, config: ModelConfig, out: &'a Path) -> Self {
        let any = |is: fn(&AttentionConfig) -> bool| (0..config.layers).any(|layer| is(config.attention_of(layer)));
        Self {
            teacher,
            out,
            overwrite: false,
            device: Device::Cpu,
            threads: cores(),
            stop: &NEVER,
            calibrate_tokens: if any(is_calibrated) { Self::CALIBRATE_TOKENS } else { 0 },
            balance: false,
            transfer_steps: if any(is_transferred) { 300 } else { 0 },
            transfer_rate: 1e-2,
            drop_window: 0.0,
            batch_size: Self::BATCH_SIZE,
            tuning: None,
            control: false,
            measure_tokens: Self::MEASURE_TOKENS,
            second: None,
            recall: Vec::new(),
            points: Self::POINTS,
            seed: Self::SEED,
            data: None,
            listener: &Silent,
            config,
        }
    }
}

/// A `Second` text is of another kind than the one that is converted on.
#[derive(Clone, Copy)]
pub struct Second<'a> {
    /// Name of the text.
    pub name: &'a str,
    /// Its tokens, of which as many are read as of the held-out text.
    pub tokens: &'a TokenFile,
}

pub(super) fn check(plan: &Plan) -> Result<()> {
    plan.teacher.config.require_causal()?;
    plan.config.validate()?;
    let teacher = &plan.teacher.config;
    let layers = 0..teacher.layers;
    require_softmax(teacher)?;
    let changes = |i: &usize| {
        let parts = plan.config.attention_of(*i).parts();
        parts.output_norm || parts.mup_scale || parts.key_dim.is_some()
    };
    if let Some(layer) = layers.clone().find(changes) {
        bail!(
            "layer {layer} is to have attention {}; a softmax model has no norms of outputs, no logits over D and no other \
             dimension of queries and keys to begin with, so train one with them from the start, or leave output-norm, \
             mup-scale and key-dim out",
            plan.config.attention_of(layer)
        );
    }
    ensure!(
        layers.clone().any(|i| plan.config.attention_of(i) != teacher.attention_of(i)),
        "no layer is to have another attention than softmax; give one that is linear, such as favor:m=64,map=learned, or a window \
         of softmax as the control of one"
    );
    if let Some(layer) = layers.clone().find(|&i| plan.config.attention_of(i).by_head().len() > 1) {
        bail!(
            "layer {layer} is to have attention {}; a conversion gives all heads of a layer one attention",
            plan.config.attention_of(layer)
        );
    }
    let favor: Vec<_> = layers.clone().filter_map(|i| plan.config.attention_of(i).favor()).collect();
    if let Some(layer) = plan.config.idle_features() {
        bail!(plan.config.of_idle_features(layer));
    }
    let rates = [("transfer_rate", Some(plan.transfer_rate)), ("tune_rate", plan.tuning.map(|tuning| tuning.rate))];
    for (name, rate) in rates.into_iter().filter_map(|(name, rate)| Some((name, rate?))) {
        ensure!(rate > 0.0 && rate.is_finite(), Cause::setting("", name, rate, "a number above 0"));
    }
    let shares =
        [("distillation", plan.tuning.map(|tuning| tuning.distillation)), ("drop_window", Some(plan.drop_window))];
    for (name, share) in shares.into_iter().filter_map(|(name, share)| Some((name, share?))) {
        ensure!((0.0..=1.0).contains(&share), Cause::setting("", name, share, "a share, from 0 to 1"));
    }
    ensure!(
        plan.drop_window == 0.0 || windows::without_windows(&plan.config).is_some(),
        "no layer is to have a window before features, so there is none to switch off: give one, such as \
         favor:m=64,map=learned,window=32, or switch none off (drop_window 0)"
    );
    if let Some(rank) = plan.tuning.and_then(|tuning| tuning.adapters) {
        adapters::check(plan.teacher, rank)?;
    }
    if plan.calibrate_tokens > 0 {
        ensure!(
            layers.clone().any(|i| is_calibrated(plan.config.attention_of(i))),
            "{} cannot be fitted: use map=learned, map=dense or map=optimal, or fit nothing (calibrate_tokens 0)",
            maps(&favor)
        );
    }
    ensure!(
        plan.transfer_steps == 0 || layers.clone().any(|i| is_transferred(plan.config.attention_of(i))),
        "{} cannot be trained: use map=learned or map=hedgehog, or leave the transfer out (transfer_steps 0)",
        maps(&favor)
    );
    Ok(())
}

/// Whether calibration changes this attention: its features can be fitted, or its forget gates get
/// a pace.
pub(super) fn is_calibrated(attention: &AttentionConfig) -> bool {
    attention.favor().is_some_and(|favor| favor.map.is_fitted()) || has_paced_gates(attention)
}

/// Whether the transfer changes this attention: its features are trained, or its forget gates.
pub(super) fn is_transferred(attention: &AttentionConfig) -> bool {
    attention.favor().is_some_and(|favor| favor.map.is_trained()) || has_paced_gates(attention)
}

/// Whether this attention has forget gates and only estimates the weights of softmax. Exact weights
/// need no pace.
pub(super) fn has_paced_gates(attention: &AttentionConfig) -> bool {
    attention.is_gated() && (attention.favor().is_some() || *attention.without_parts() == AttentionConfig::Uniform)
}

/// What feature maps the student has, for an error about them.
fn maps(favor: &[&FavorConfig]) -> String {
    favor.first().map_or_else(|| "a student without features".into(), |favor| format!("feature map {}", favor.map))
}

/// Refuses a model of which a layer is not plain softmax.
///
/// # Errors
/// With the first such layer.
pub(super) fn require_softmax(teacher: &ModelConfig) -> Result<()> {
    if let Some(layer) = (0..teacher.layers).find(|&i| *teacher.attention_of(i) != AttentionConfig::Softmax) {
        bail!(
            "layer {layer} of the model has attention {}; only softmax models can be converted",
            teacher.attention_of(layer)
        );
    }
    Ok(())
}

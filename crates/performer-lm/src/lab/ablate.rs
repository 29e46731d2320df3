//! This experiment asks what closes the gap to softmax: it trains the same small model with one
//! thing changed at a time.

use std::{
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use anyhow::{Context, Result, bail};
use candle_core::Device;
use performer_core::{FavorConfig, FeatureMapKind, LayerParts, ProjectionKind, Radii};
use serde::{Deserialize, Serialize};

use super::{Findings, Section, Table, capitalised, state_text};
use crate::{
    bench::window_of_equal_state,
    config::{AttentionConfig, ModelConfig, TrainingConfig},
    data::{DataSpec, Prepared},
    errors::{Cause, STOPPED, STOPPED_FOR_GOOD, require_once},
    eval::{perplexity, show_perplexity},
    listener::Listener,
    plot::{At, Axis, Chart, Marker, Scale, Series},
    seeds::mean,
    train::{
        Grid, RunKey, RunOptions, as_trained, divided, find, find_or_run, is_divergence, led, made, require_one_plan,
    },
};

/// The noise to assume where there is only one seed, in nats: by so much, differences to softmax
/// differed between two seeds of the default budget.
const ONE_SEED: f64 = 0.05;

/// A `Plan` says what is trained, and where.
pub struct Plan<'a> {
    /// Configuration of the model; its attention is replaced.
    pub config: ModelConfig,
    /// Training settings; seed and redraws are replaced.
    pub training: TrainingConfig,
    /// The seeds with which each variant is trained.
    pub seeds: Vec<u64>,
    /// The numbers of features on the curves; single changes use the middle one.
    pub features: Vec<usize>,
    /// Folder for the runs; finished runs are not run again.
    pub runs: &'a Path,
    /// Whether that folder is still there after the experiment, so that a stopped one can go on.
    pub is_kept: bool,
    /// Where the data come from, for [`RunOptions::data`].
    pub data: Option<DataSpec>,
    /// Device on which the models are trained.
    pub device: Device,
    /// Number of worker threads on the CPU.
    pub threads: usize,
    /// Flag that is set from outside to stop.
    pub stop: &'a AtomicBool,
    /// Receiver of steps, validations and notices to the user.
    pub listener: &'a dyn Listener,
    /// The processes that share the experiment: each makes whole runs, in one folder that all see.
    pub ranks: Grid,
}

impl Plan<'_> {
    /// What is said of an experiment that was stopped.
    fn stopped(&self) -> Cause {
        Cause::Stopped(if self.is_kept { STOPPED } else { STOPPED_FOR_GOOD }.into())
    }
}

/// A `Variant` is the model with one thing changed.
#[derive(Clone, Debug)]
struct Variant {
    /// Name of the curve, and number of features on it, if the variant is a point of a curve.
    curve: Option<(&'static str, usize)>,
    name: String,
    attention: AttentionConfig,
    by_layer: Vec<AttentionConfig>,
    redraw_every: usize,
}

/// An `Outcome` holds the results of a variant over its seeds.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Outcome {
    name: String,
    curve: Option<(String, usize)>,
    attention_spec: String,
    redraw_every: usize,
    val_losses: Vec<f64>,
    /// The losses on the test split, where there is one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    test_losses: Vec<f64>,
    /// The losses of the same trained models with their features off, on the text of
    /// [`Outcome::losses`].
    #[serde(default)]
    features_off: Vec<f64>,
    /// Bytes of decoding state of one sequence of the model's context, in all layers.
    #[serde(default)]
    state_bytes: usize,
    /// Whether that state grows with every token.
    #[serde(default)]
    state_grows: bool,
    tokens_per_second: Vec<f64>,
    /// The keys of the runs.
    #[serde(default)]
    keys: Vec<RunKey>,
}

impl Outcome {
    /// Returns the losses that are reported: those on the test split, or else on the validation
    /// split.
    fn losses(&self) -> &[f64] {
        if self.test_losses.is_empty() { &self.val_losses } else { &self.test_losses }
    }

    fn mean(&self) -> f64 {
        mean(self.losses())
    }

    /// Returns half the distance between the smallest and the largest loss.
    fn spread(&self) -> f64 {
        spread(self.losses())
    }
}

fn spread(losses: &[f64]) -> f64 {
    let fold = |f: fn(f64, f64) -> f64, start| losses.iter().copied().fold(start, f);
    0.5 * (fold(f64::max, f64::NEG_INFINITY) - fold(f64::min, f64::INFINITY))
}

fn favor(features: usize) -> FavorConfig {
    FavorConfig::default().with_features(features)
}

/// Returns all variants of a model of so many layers with heads of `dim` dimensions, softmax first.
/// New ones come at the end, since the folders of runs are numbered.
fn variants(features: &[usize], layers: usize, dim: usize) -> Vec<Variant> {
    let variant = |name: String, attention: AttentionConfig| Variant {
        curve: None,
        name,
        attention,
        by_layer: Vec::new(),
        redraw_every: 0,
    };
    let mut all = vec![variant("softmax".into(), AttentionConfig::Softmax)];
    for &m in features {
        let curves: [(&'static str, AttentionConfig); 5] = [
            ("orthogonal, chi radii", AttentionConfig::Favor(favor(m))),
            ("independent rows", AttentionConfig::Favor(favor(m).with_projection(ProjectionKind::Gaussian))),
            ("orthogonal, √D radii", AttentionConfig::Favor(favor(m).with_radii(Radii::Sqrt))),
            ("learned map", AttentionConfig::Favor(favor(m).with_map(FeatureMapKind::Learned))),
            ("window of 32", AttentionConfig::Windowed { window: 32, sinks: 0, far: favor(m) }),
        ];
        for (curve, attention) in curves {
            all.push(Variant { curve: Some((curve, m)), ..variant(format!("{curve}, M={m}"), attention) });
        }
    }
    let m = features[features.len() / 2];
    let half = (m / 2).max(1);
    let map = |map: FeatureMapKind, features: usize| AttentionConfig::Favor(favor(features).with_map(map));
    for (name, attention) in [
        (format!("hyperbolic, M={half} (as many features)"), map(FeatureMapKind::Hyperbolic, half)),
        (format!("FAVOR++ for unit normal inputs, M={m}"), map(FeatureMapKind::Optimal, m)),
        (format!("hedgehog, M={half} (as many features)"), map(FeatureMapKind::Hedgehog, half)),
        (format!("ReLU kernel, M={m}"), map(FeatureMapKind::Relu, m)),
        ("elu + 1".into(), map(FeatureMapKind::Elu, m)),
        (
            format!("learned map and window of 32, M={m}"),
            AttentionConfig::Windowed { window: 32, sinks: 0, far: favor(m).with_map(FeatureMapKind::Learned) },
        ),
        (
            format!("q and k each divided by √D, M={m}"),
            AttentionConfig::Equipped {
                parts: LayerParts::default().with_mup_scale(true),
                of: Box::new(AttentionConfig::Favor(favor(m))),
            },
        ),
        (format!("quantile radii, M={m}"), AttentionConfig::Favor(favor(m).with_radii(Radii::Quantile))),
    ] {
        all.push(variant(name, attention));
    }
    for every in [10, 100] {
        let name = format!("redrawn every {every} steps, M={m}");
        all.push(Variant { redraw_every: every, ..variant(name, AttentionConfig::Favor(favor(m))) });
    }
    // One layer has no earlier or later ones.
    let unequal = [("more features in earlier layers", 3, 1), ("more features in later layers", 1, 3)];
    for (name, first, last) in unequal.into_iter().filter(|_| layers > 1) {
        // The numbers go from 3/2 to 1/2 of M, or from 1/2 to 3/2. Where they are rounded, the last
        // makes up for it, so that their mean is M, unless M is 1.
        let mut numbers: Vec<usize> = (0..layers - 1)
            .map(|i| {
                let share = i as f64 / (layers - 1) as f64;
                let halves = f64::from(first) + share * f64::from(last - first);
                ((m as f64 * halves / 2.0).round() as usize).max(1)
            })
            .collect();
        numbers.push((layers * m).saturating_sub(numbers.iter().sum()).max(1));
        let by_layer = numbers.into_iter().map(|m| AttentionConfig::Favor(favor(m))).collect();
        let name = format!("{name}, M={m} on the mean");
        all.push(Variant { by_layer, ..variant(name, AttentionConfig::Favor(favor(m))) });
    }
    // What features have to be better than: windows of softmax without any, and a forget gate
    // without queries and keys.
    let gated = |of: AttentionConfig| AttentionConfig::Equipped {
        parts: LayerParts::default().with_gate(true),
        of: Box::new(of),
    };
    let window = |window: usize| AttentionConfig::SoftmaxWindow { window, sinks: 0 };
    let equal = window_of_equal_state(m, dim);
    for (name, attention) in [
        ("control: softmax over a window of 32, without features".into(), window(32)),
        (format!("control: softmax over a window of {equal}, of as many bytes as M={m}"), window(equal)),
        ("control: forget gate without queries, keys and features".into(), gated(AttentionConfig::Uniform)),
        ("control: softmax with a forget gate".into(), gated(AttentionConfig::Softmax)),
        (format!("forget gate, M={m}"), gated(AttentionConfig::Favor(favor(m)))),
        (format!("control: softmax over a window of {equal} with a forget gate"), gated(window(equal))),
    ] {
        all.push(variant(name, attention));
    }
    all
}

/// Trains every variant with every seed; `progress` is called after each run.
///
/// # Errors
/// If a run fails or is stopped, finished runs being kept, or ranks do not share the folder.
pub fn run(plan: &Plan, data: &Prepared, mut progress: impl FnMut(String)) -> Result<Findings> {
    if plan.seeds.is_empty() || plan.features.is_empty() || plan.features.contains(&0) {
        bail!("give at least one seed, and numbers of features of at least 1");
    }
    require_once("seed", &plan.seeds)?;
    require_once("number of features", &plan.features)?;
    let mut features = plan.features.clone();
    features.sort_unstable();
    let variants = variants(&features, plan.config.layers, plan.config.head_dim());
    let all: Vec<(usize, u64)> =
        (0..variants.len()).flat_map(|i| plan.seeds.iter().map(move |&seed| (i, seed))).collect();
    // This fails now where a run would fail hours later.
    led(&plan.ranks, || {
        all.iter().try_for_each(|&(i, seed)| {
            let (config, training) = plan.recipe(&variants[i], seed);
            let found = find(&config, &training, data, &plan.options(&plan.folder(i, seed)));
            found.map(drop).with_context(|| variants[i].name.clone())
        })
    })?;
    let settings = serde_json::json!({ "training": plan.training, "features": features, "seeds": plan.seeds });
    require_one_plan(&plan.ranks, &as_trained(&plan.config, data), &settings, data, &plan.device)?;
    // The runs that diverged on another rank, or on this one.
    let mut lost = Vec::new();
    if plan.ranks.world().size() > 1 {
        let ended = divided(
            &plan.ranks,
            all.len(),
            // The first variant is what the others are compared with.
            |run| all[run].0 > 0,
            |run| {
                let (i, seed) = all[run];
                let (config, training) = plan.recipe(&variants[i], seed);
                let report = find_or_run(&config, &training, data, plan.options(&plan.folder(i, seed)));
                report.with_context(|| variants[i].name.clone())
            },
        )?;
        let Some(ended) = ended else { bail!(plan.stopped()) };
        lost.extend(ended.into_iter().filter_map(|run| all.get(run).copied()));
    }
    let mut outcomes = Vec::new();
    // Variants of which a run diverged have no mean.
    let mut diverged = Vec::new();
    'variants: for (i, variant) in variants.iter().enumerate() {
        let mut outcome = Outcome {
            name: variant.name.clone(),
            curve: variant.curve.map(|(name, m)| (name.to_string(), m)),
            attention_spec: plan.recipe(variant, 0).0.attention_text(),
            redraw_every: variant.redraw_every,
            val_losses: Vec::new(),
            test_losses: Vec::new(),
            features_off: Vec::new(),
            state_bytes: 0,
            state_grows: false,
            tokens_per_second: Vec::new(),
            keys: Vec::new(),
        };
        for &seed in &plan.seeds {
            let (config, training) = plan.recipe(variant, seed);
            let folder = plan.folder(i, seed);
            let is_lost = lost.contains(&(i, seed));
            let report = match (!is_lost).then(|| made(&plan.ranks, &config, &training, data, plan.options(&folder))) {
                Some(Ok(report)) => report,
                Some(Err(error)) if i == 0 || !is_divergence(&error) => return Err(error.context(variant.name.clone())),
                _ => {
                    let text = format!("{} diverged with seed {seed}, and has no row.", variant.name);
                    progress(format!("{}/{} {text}", i + 1, variants.len()));
                    diverged.push(text);
                    continue 'variants;
                }
            };
            let Some(report) = report else { bail!(plan.stopped()) };
            let (loss, features_off) = match &report.test {
                Some(test) => (test.loss, test.features_off),
                None => (report.val_loss, report.features_off.as_ref().map(|control| control.val_loss)),
            };
            progress(format!(
                "{}/{} {}, seed {seed}: {loss:.4} nats a token, {:.0} tokens/s",
                i + 1,
                variants.len(),
                variant.name,
                report.tokens_per_second
            ));
            outcome.val_losses.push(report.val_loss);
            outcome.test_losses.extend(report.test.map(|test| test.loss));
            outcome.features_off.extend(features_off);
            outcome.state_bytes = report.state_bytes;
            outcome.state_grows = report.state_grows;
            outcome.tokens_per_second.push(report.tokens_per_second);
            outcome.keys.extend(report.key);
        }
        outcomes.push(outcome);
    }
    Ok(findings(plan, data, features[features.len() / 2], &outcomes, diverged))
}

impl Plan<'_> {
    /// Returns the configuration and the training settings of a variant.
    fn recipe(&self, variant: &Variant, seed: u64) -> (ModelConfig, TrainingConfig) {
        let config = ModelConfig {
            attention: variant.attention.clone(),
            attention_by_layer: variant.by_layer.iter().cloned().enumerate().collect(),
            ..self.config.clone()
        };
        (config, TrainingConfig { seed, redraw_every: variant.redraw_every, ..self.training.clone() })
    }

    fn folder(&self, variant: usize, seed: u64) -> PathBuf {
        self.runs.join(format!("{variant}-{seed}"))
    }

    fn options<'b>(&'b self, out: &'b Path) -> RunOptions<'b> {
        RunOptions {
            overwrite: true,
            data: self.data.as_ref(),
            device: self.device.clone(),
            threads: self.threads,
            stop: self.stop,
            listener: self.listener,
            ..RunOptions::new(out)
        }
    }
}

/// Says what came of the variants, of which single changes were made at `m` features.
fn findings(plan: &Plan, data: &Prepared, m: usize, outcomes: &[Outcome], diverged: Vec<String>) -> Findings {
    let softmax = outcomes[0].mean();
    let split = if outcomes[0].test_losses.is_empty() { "validation" } else { "test" };
    let mut table = Table::new([
        "variant",
        "loss, nats/token",
        "half range of seeds",
        "to softmax",
        "perplexity",
        "state, bytes",
        "tokens/s",
    ]);
    let mut ranked: Vec<&Outcome> = outcomes.iter().collect();
    ranked.sort_by(|a, b| a.mean().total_cmp(&b.mean()));
    let row = |name: String, losses: &[f64], state: String, speed: String| {
        let loss = mean(losses);
        [
            name,
            format!("{loss:.4}"),
            if losses.len() > 1 { format!("{:.4}", spread(losses)) } else { "–".into() },
            format!("{:+.4}", loss - softmax),
            show_perplexity(perplexity(loss), 2),
            state,
            speed,
        ]
    };
    for o in &ranked {
        let speed = mean(&o.tokens_per_second);
        let state = state_text(o.state_bytes, o.state_grows);
        table.push(row(o.name.clone(), o.losses(), state, format!("{speed:.0}")));
        // The control of a window with features: the same trained weights, and the window alone.
        let attention = o.attention_spec.parse::<AttentionConfig>().ok();
        let off = attention.filter(|a| a.window().is_some()).and_then(|a| a.features_off());
        if let Some(off) = off.filter(|_| !o.features_off.is_empty()) {
            table.push(row(format!("↳ features off: {off}"), &o.features_off, "–".into(), "–".into()));
        }
    }
    let plain = outcomes.iter().find(|o| o.curve == Some(("orthogonal, chi radii".into(), m)));
    let noise = match plan.seeds.len() {
        1 => ONE_SEED,
        _ => outcomes.iter().map(Outcome::spread).fold(0.0, f64::max),
    };
    let mut changes = Vec::new();
    if let Some(plain) = plain {
        let gap = plain.mean() - softmax;
        changes.push(format!(
            "FAVOR+ with M = {m} and nothing changed is {gap:+.3} nats from softmax. Of single changes to it, and of controls, these make a \
             difference of more than {noise:.3}:"
        ));
        let single = outcomes.iter().filter(|o| o.curve.as_ref().is_none_or(|(_, features)| *features == m)).skip(1);
        for o in single.filter(|o| (o.mean() - plain.mean()).abs() > noise) {
            let change = o.mean() - plain.mean();
            let verdict = if change < 0.0 { "better" } else { "worse" };
            changes.push(format!(
                "{}: {:.3} nats {verdict}, {:+.3} from softmax.",
                o.name,
                change.abs(),
                o.mean() - softmax
            ));
        }
    }
    changes.extend(diverged);
    let config = as_trained(&plan.config, data);
    Findings {
        name: "ablate",
        title: "What closes the gap to softmax?".into(),
        summary: vec![
            format!(
                "A decoder of {} layers, dim {}, {} heads, context {}, {} steps of {} sequences, on {} in \
                 {} different tokens; {} seed(s). Losses are of the {split} text. The same \
                 weights at the start where shapes agree, the same text in the same order, the same schedule.",
                plan.config.layers,
                plan.config.hidden_size,
                plan.config.heads,
                plan.config.context,
                plan.training.max_steps.unwrap_or_default(),
                plan.training.batch_size,
                data.corpus_name,
                data.tokenizer.vocab_size(),
                plan.seeds.len()
            ),
            match plan.seeds.len() {
                1 => format!("One seed: differences below {noise} nats are noise."),
                _ => format!(
                    "Half the distance between seeds is at most {noise:.4} nats; what is closer than that is no difference."
                ),
            },
        ],
        sections: vec![
            Section {
                title: "Loss over features".into(),
                text: Vec::new(),
                chart: Some(("features".into(), chart(outcomes, softmax, split))),
                table: None,
            },
            Section { title: "One change at a time".into(), text: changes, chart: None, table: Some(table) },
        ],
        data: serde_json::json!({
            "config": config, "training": plan.training, "corpus": data.corpus_name, "outcomes": outcomes,
        }),
    }
}

fn chart(outcomes: &[Outcome], softmax: f64, split: &str) -> Chart {
    let mut series: Vec<Series> = Vec::new();
    for o in outcomes {
        let Some((curve, m)) = &o.curve else { continue };
        let (point, half) = ((*m as f64, o.mean()), o.spread());
        let band = (o.mean() - half, o.mean() + half);
        let several = o.losses().len() > 1;
        match series.iter_mut().find(|s| s.name == *curve) {
            Some(s) => {
                s.points.push(point);
                s.band.iter_mut().for_each(|bands| bands.push(band));
            }
            None => {
                series.push(Series { band: several.then(|| vec![band]), ..Series::new(curve.clone(), [point]) });
            }
        }
    }
    Chart {
        title: format!("{} loss over features", capitalised(split)),
        x: Axis::new("random features M", Scale::Log2),
        y: Axis::new(format!("{split} loss (nats per token)"), Scale::Linear),
        series,
        lines: vec![Marker { at: At::Y(softmax), label: "softmax".into() }],
        ..Chart::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config::Preset, model::Decoder};

    #[test]
    fn variants_differ_and_keep_their_mean_of_features() {
        let all = variants(&[16, 64, 256], 3, 16);
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| b.name != a.name), "{}", a.name);
        }
        // Of an odd number, the first and the last layer have no whole share.
        for (numbers, m) in [([16, 64, 256], 64), ([15, 33, 65], 33)] {
            let all = variants(&numbers, 3, 16);
            let layered: Vec<&Variant> = all.iter().filter(|v| !v.by_layer.is_empty()).collect();
            assert_eq!(layered.len(), 2);
            for v in layered {
                let features: Vec<usize> = v.by_layer.iter().filter_map(|a| a.favor()).map(|f| f.features).collect();
                assert_eq!(features.iter().sum::<usize>(), 3 * m, "{features:?}");
                assert_ne!(features[0], features[2]);
            }
        }
        assert!(variants(&[16, 64, 256], 1, 16).iter().all(|v| v.by_layer.is_empty()));
    }

    #[test]
    fn the_control_of_equal_bytes_has_the_state_of_the_features() {
        let state = |attention: AttentionConfig| {
            let (config, _) = Preset::Seed.load().unwrap();
            let config = ModelConfig { vocab_size: 20, attention, ..config };
            let bytes = Decoder::new(&config, 1, &Device::Cpu).unwrap().state_bytes().unwrap();
            (bytes, config.layers * config.hidden_size * 2 * size_of::<f32>(), config.head_dim())
        };
        for features in [16, 64, 96] {
            let (of_features, token, dim) = state(AttentionConfig::Favor(favor(features)));
            let window = window_of_equal_state(features, dim);
            let (of_window, ..) = state(AttentionConfig::SoftmaxWindow { window, sinks: 0 });
            assert!(2 * of_window.abs_diff(of_features) <= token, "{features}: {of_features} {of_window}");
        }
    }
}

//! This experiment finds the smallest number of features that keeps a model's attention within an
//! error, layer by layer (`lab suggest`).

use anyhow::{Result, bail, ensure};
use candle_core::{DType, Device};
use performer_core::{Favor, FavorConfig, FeatureMapKind, Windowed};
use serde_json::json;

use super::{
    Findings, Heads, Section, Table, capitalised,
    error::{COLORS, Errors, Estimator, MOST_DRAWS, number},
    heads::layer_seed,
};
use crate::{
    config::AttentionConfig,
    errors::Cause,
    plot::{At, Axis, Chart, Marker, Scale, Series},
    revision::quoted,
};

/// The numbers of features that are tried.
const FEATURES: [usize; 13] = [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024];

/// Which error is to be met.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum Criterion {
    /// Total variation between rows of attention, the mean over heads and queries.
    #[default]
    Rows,
    /// Relative error of the outputs, the mean over heads.
    Output,
}

impl Criterion {
    fn of(self, errors: &Errors) -> f64 {
        match self {
            Self::Rows => errors.rows,
            Self::Output => errors.output,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Rows => "row total variation",
            Self::Output => "relative output error",
        }
    }
}

/// A `Plan` says what is wanted.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The model as the suggested `convert` command names it. It is not read: [`run`] gets its
    /// heads.
    pub model: String,
    /// The text as the suggested `convert` command names it. It is not read either.
    pub data: String,
    /// Number of tokens of a window, if it is not the one that `convert` takes by default.
    pub context: Option<usize>,
    /// The largest error allowed.
    pub error: f64,
    /// The kind of error.
    pub criterion: Criterion,
    /// The feature maps to choose from.
    pub maps: Vec<FeatureMapKind>,
    /// Number of the latest keys that have exact attention, if there is a window.
    pub window: Option<usize>,
    /// The largest number of features to suggest, from 16 to 1,024.
    pub most_features: usize,
    /// Number of draws of Ω over which errors are averaged.
    pub draws: usize,
    /// Seed of the draws.
    pub seed: u64,
}

/// A `Suggestion` says what a layer needs.
struct Suggestion {
    /// The map, its `M` and its errors; `None` if nothing tried is enough.
    found: Option<(FeatureMapKind, usize, Errors)>,
    /// The largest mean error of a head with the map and `M` of `found`; NaN if there is none.
    worst: f64,
    uniform: Errors,
    /// The errors of each map over `M`.
    curves: Vec<(FeatureMapKind, Vec<(usize, f64)>)>,
}

impl Plan {
    /// Refuses a plan that would measure nothing.
    ///
    /// # Errors
    /// If a setting is out of range; the message names it, its value and what it must be.
    pub fn check(&self) -> Result<()> {
        ensure!(
            self.error > 0.0 && self.error < 1.0,
            "the error allowed is {}; it must lie between 0 and 1: 0.1 allows a tenth of the attention to go elsewhere",
            self.error
        );
        ensure!(!self.maps.is_empty(), "no map to choose from: give one, such as dense");
        ensure!(
            (1..=MOST_DRAWS).contains(&self.draws),
            Cause::setting("", "draws", self.draws, format_args!("at least 1 and at most {MOST_DRAWS}"))
        );
        let (most, least, last) = (self.most_features, FEATURES[0], FEATURES[FEATURES.len() - 1]);
        ensure!(
            (least..=last).contains(&most),
            Cause::setting(
                "",
                "most_features",
                most,
                format_args!("from {least} to {last}, the numbers that are tried")
            )
        );
        if let Some(map) = self.maps.iter().find(|map| !map.is_random() || **map == FeatureMapKind::Learned) {
            bail!(
                "map {map} has no number of features to look for; choose among maps such as dense, optimal, positive"
            );
        }
        if let Some(window) = self.window {
            // Where no context is given it is the model's, to which the window is held when that is
            // read.
            let context = self.context.unwrap_or(usize::MAX);
            ensure!(
                (1..context).contains(&window),
                "a window is to have {window} tokens; it must have at least 1, and fewer than the context"
            );
            for &map in &self.maps {
                let favor = Favor::new(&FavorConfig::default().with_map(map), 8, 0, DType::F32, &Device::Cpu)?;
                Windowed::new(window, favor)?;
            }
        }
        let fitted = self.maps.iter().filter(|map| map.is_fitted()).count();
        ensure!(
            fitted == 0 || fitted == self.maps.len(),
            "maps that are fitted (dense, optimal) and maps that are not cannot stand in one conversion: choose one kind by --map"
        );
        Ok(())
    }

    /// Makes the estimator of a map as a conversion makes it: fitted maps are centred.
    fn estimator(map: FeatureMapKind) -> Estimator {
        let plain = Estimator::orthogonal("", map);
        if map.is_fitted() { plain.fitted(true, false) } else { plain }
    }

    fn layer(&self, heads: &Heads, layer: usize) -> Result<Suggestion> {
        let set = heads.set_of(layer)?;
        let seed = layer_seed(self.seed, layer);
        let mut found: Option<(FeatureMapKind, usize, Errors)> = None;
        let mut worst = f64::NAN;
        let mut curves = Vec::new();
        for &map in &self.maps {
            let estimator = Self::estimator(map);
            let mut curve = Vec::new();
            for m in FEATURES.into_iter().filter(|&m| m <= self.most_features) {
                if found.is_some_and(|(_, smallest, _)| m > smallest) {
                    break;
                }
                let all = set.windowed(&estimator, m, self.window.unwrap_or(0), self.draws, seed)?;
                let mean = Errors::mean(&all.concat());
                let error = self.criterion.of(&mean);
                curve.push((m, error));
                let better = found.is_none_or(|(_, smallest, other)| m < smallest || error < self.criterion.of(&other));
                if error <= self.error {
                    if better {
                        worst = self.worst_head(&all, heads.heads_of(layer));
                        found = Some((map, m, mean));
                    }
                    break;
                }
            }
            curves.push((map, curve));
        }
        Ok(Suggestion { found, worst, uniform: set.uniform()?, curves })
    }

    /// Returns the largest mean error of a head, from errors `[draw][problem]` whose problems are
    /// sorted by head.
    fn worst_head(&self, all: &[Vec<Errors>], heads: usize) -> f64 {
        let windows = all[0].len() / heads;
        let of = |head: usize| {
            let own: Vec<Errors> =
                all.iter().flat_map(|draw| draw[head * windows..(head + 1) * windows].to_vec()).collect();
            self.criterion.of(&Errors::mean(&own))
        };
        (0..heads).map(of).fold(0.0, f64::max)
    }

    fn attention(&self, found: Option<(FeatureMapKind, usize, Errors)>) -> AttentionConfig {
        let Some((map, features, _)) = found else { return AttentionConfig::Softmax };
        let far = FavorConfig::default().with_map(map).with_features(features);
        match self.window {
            Some(window) => AttentionConfig::Windowed { window, sinks: 0, far },
            None => AttentionConfig::Favor(far),
        }
    }

    /// Returns the command that converts the model in this way; `None` if every layer stays
    /// softmax.
    fn command(&self, attentions: &[AttentionConfig]) -> Option<String> {
        // The most frequent linear attention is the default; layers with another one are named.
        let common = attentions
            .iter()
            .filter(|a| a.favor().is_some())
            .max_by_key(|a| attentions.iter().filter(|b| b == a).count())?;
        let mut words =
            vec!["performer-lm convert".into(), quoted(&self.model), format!("--data {}", quoted(&self.data))];
        words.extend(self.context.map(|context| format!("--context {context}")));
        words.push(format!("--attention {common}"));
        let others = attentions.iter().enumerate().filter(|(_, a)| *a != common);
        words.extend(others.map(|(layer, attention)| format!("--layer {layer}={attention}")));
        if !self.maps[0].is_fitted() {
            words.push("--calibrate-tokens 0".into());
        }
        words.push("--out runs/converted".into());
        Some(words.join(" "))
    }
}

/// Finds the number of features of every layer.
///
/// # Errors
/// If the plan measures nothing, or the errors cannot be measured.
pub fn run(plan: &Plan, heads: &Heads, progress: &dyn Fn(&str)) -> Result<Findings> {
    plan.check()?;
    if let Some(window) = plan.window {
        ensure!(
            window < heads.context(),
            "a window of {window} tokens leaves nothing to features in texts of {} tokens: give a shorter one",
            heads.context()
        );
    }
    let mut suggestions = Vec::new();
    for layer in 0..heads.layer_count() {
        progress(&format!("layer {layer} of {}", heads.layer_count()));
        suggestions.push(plan.layer(heads, layer)?);
    }
    let attentions: Vec<AttentionConfig> = suggestions.iter().map(|s| plan.attention(s.found)).collect();
    let mut table =
        Table::new(["layer", "attention", "row TV", "output error", "worst head", "uniform", "largest logit sd"]);
    let mut data = Vec::new();
    for (layer, (suggestion, attention)) in suggestions.iter().zip(&attentions).enumerate() {
        let cell = |part: fn(&Errors) -> f64| suggestion.found.map_or_else(|| "–".into(), |(_, _, e)| number(part(&e)));
        table.push([
            layer.to_string(),
            attention.to_string(),
            cell(|e| e.rows),
            cell(|e| e.output),
            if suggestion.found.is_some() { number(suggestion.worst) } else { "–".into() },
            number(plan.criterion.of(&suggestion.uniform)),
            number(heads.deviation_of(layer)),
        ]);
        data.push(json!({
            "layer": layer, "attention": attention.to_string(), "features": suggestion.found.map(|f| f.1),
            "map": suggestion.found.map(|f| f.0), "errors": suggestion.found.map(|f| f.2),
            "worst_head": suggestion.found.map(|_| suggestion.worst), "uniform": suggestion.uniform,
            "tried": suggestion.curves.iter().map(|(map, curve)| json!({ "map": map, "errors": curve })).collect::<Vec<_>>(),
        }));
    }
    let command = plan.command(&attentions);
    let kept = attentions.iter().filter(|a| a.favor().is_none()).count();
    let window = plan.window.map_or_else(String::new, |w| format!(" behind an exact window of {w} tokens"));
    let mut text = vec![format!(
        "The smallest of {} to {} features{window} whose {} is at most {}, the mean over heads, queries and {} draws, without any training; {kept} \
         of {} layers stay softmax because none of them is enough.",
        FEATURES[0],
        plan.most_features,
        plan.criterion.name(),
        plan.error,
        plan.draws,
        attentions.len()
    )];
    text.push(match &command {
        Some(command) => format!("To convert so: {command}"),
        None => {
            let window = match plan.window {
                None => "add an exact window (--window 32)".into(),
                Some(window) => format!("widen the window (--window {})", 2 * window),
            };
            format!(
                "No layer can be converted within this error: allow more (--error), {window}, or train the features (`convert` with \
                 map=learned)."
            )
        }
    });
    let title = format!("{} over features, layer by layer", capitalised(plan.criterion.name()));
    let section = Section {
        title: "What each layer needs".into(),
        text,
        chart: Some(("layers".into(), chart(plan, title, &suggestions))),
        table: Some(table),
    };
    let data = json!({
        "error": plan.error, "criterion": plan.criterion.name(), "window": plan.window, "draws": plan.draws, "model": heads.json(),
        "layers": data, "command": command,
    });
    Ok(Findings {
        name: "suggest",
        title: format!("Features for {} of {}", plan.criterion.name(), plan.error),
        summary: vec![heads.describe()],
        sections: vec![section],
        data,
    })
}

/// Draws the errors of each layer with the map it was given, or with the first map if there is
/// none.
fn chart(plan: &Plan, title: String, suggestions: &[Suggestion]) -> Chart {
    let line = |(layer, suggestion): (usize, &Suggestion)| {
        let map = suggestion.found.map_or(plan.maps[0], |found| found.0);
        let curve = suggestion.curves.iter().find(|(m, _)| *m == map).map(|(_, curve)| curve.clone());
        let points = curve.unwrap_or_default().into_iter().map(|(m, error)| (m as f64, error));
        let color = (suggestions.len() <= COLORS.len()).then(|| COLORS[layer]);
        Series { color, ..Series::new(format!("layer {layer}, {map}"), points) }
    };
    Chart {
        title,
        subtitle: Some(format!("means over heads, queries and {} draws; lines end where the error is met", plan.draws)),
        x: Axis::new("features M", Scale::Log2),
        y: Axis::new(plan.criterion.name(), Scale::Log10),
        series: suggestions.iter().enumerate().map(line).collect(),
        lines: vec![Marker { at: At::Y(plan.error), label: "wanted".into() }],
    }
}

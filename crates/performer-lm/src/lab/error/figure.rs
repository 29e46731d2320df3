//! This module reproduces the published figure: the mean squared error of attention's output over
//! the number of random features.

use anyhow::Result;
use candle_core::{D, DType, Device, Tensor};
use performer_core::{FeatureMap, FeatureMapKind, ProjectionKind, Radii, features::Trigonometric, projection};
use rayon::prelude::*;
use serde_json::{Value, json};

use super::{
    Plan,
    charts::{self, COLORS, number},
    estimator::Estimator,
    problem::scaled,
    set::{gaussian, moments},
    spread::Spread,
};
use crate::{
    lab::{Section, Table},
    plot::{At, Axis, Chart, Marker, Scale},
};

/// `Input` says how large queries and keys are.
#[derive(Clone, Copy, PartialEq)]
enum Input {
    /// Unit normal entries, which give logits `q·k/√D` of standard deviation 1.
    Gaussian,
    /// Unit normal entries with each row divided by its length, which gives logits within `±1/√D`.
    UnitRows,
}

impl Input {
    fn name(self) -> &'static str {
        match self {
            Self::Gaussian => "unit Gaussian entries",
            Self::UnitRows => "rows of length 1",
        }
    }
}

/// `Attention` is bidirectional attention of one head, compared at all its queries; only a linear
/// form can afford that for long sequences.
struct Attention {
    x: Tensor,
    y: Tensor,
    /// The values and a column of ones, shape `(T, D+1)`.
    values: Tensor,
    output: Tensor,
}

impl Attention {
    fn new(input: Input, tokens: usize, d: usize, seed: u64) -> Result<Self> {
        let [q, k, v] = gaussian(tokens, d, seed)?;
        let scale = (d as f64).powf(-0.25);
        let rows = |x: Tensor| -> Result<Tensor> {
            let x = match input {
                Input::Gaussian => x,
                Input::UnitRows => x.broadcast_div(&x.sqr()?.sum_keepdim(1)?.sqrt()?)?,
            };
            Ok((x * scale)?)
        };
        let (x, y) = (rows(q)?, rows(k)?);
        let keys = y.t()?;
        // Queries are treated a thousand at a time, because their rows are as long as the sequence.
        let parts = (0..tokens).step_by(1024).map(|start| -> Result<Tensor> {
            let x = x.narrow(0, start, 1024.min(tokens - start))?;
            Ok(candle_nn::ops::softmax(&x.matmul(&keys)?, D::Minus1)?.matmul(&v)?)
        });
        let output = Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)?;
        let ones = Tensor::ones((tokens, 1), DType::F64, &Device::Cpu)?;
        Ok(Self { values: Tensor::cat(&[v, ones], 1)?, x, y, output })
    }

    /// Computes the mean of the squared errors of all outputs.
    fn error(&self, map: &dyn FeatureMap) -> Result<f64> {
        let (queries, keys, _) = scaled(map, &self.x, &self.y)?;
        self.squared(&queries.matmul(&keys.t()?.matmul(&self.values)?)?)
    }

    /// Computes the mean squared error of the outputs whose numerators are the first `D` columns of
    /// `sums` and whose denominators are the last, shape `(T, D+1)`, or `(1, D+1)` for all queries.
    fn squared(&self, sums: &Tensor) -> Result<f64> {
        let d = self.output.dim(1)?;
        let estimate = sums.narrow(1, 0, d)?.broadcast_div(&sums.narrow(1, d, 1)?)?;
        Ok(self.output.broadcast_sub(&estimate)?.sqr()?.mean_all()?.to_scalar()?)
    }

    fn uniform(&self) -> Result<f64> {
        self.squared(&self.values.mean_keepdim(0)?)
    }
}

/// A `Line` holds the measured errors of one estimator over numbers of features.
struct Line {
    name: &'static str,
    points: Vec<(f64, Spread)>,
}

fn measure(
    plan: &Plan,
    attention: &Attention,
    name: &'static str,
    build: &(dyn Fn(usize, u64) -> Result<Box<dyn FeatureMap>> + Sync),
) -> Result<Line> {
    let points = plan.features.iter().map(|&m| {
        let draw = |draw: usize| attention.error(&*build(m, projection::derive_seed(plan.seed, draw as u64))?);
        let errors: Vec<f64> = (0..plan.draws).into_par_iter().map(draw).collect::<Result<_>>()?;
        Ok((m as f64, Spread::of(errors)))
    });
    Ok(Line { name, points: points.collect::<Result<_>>()? })
}

const ESTIMATORS: [Estimator; 6] = [
    Estimator::orthogonal("trigonometric, iid", FeatureMapKind::Trigonometric)
        .drawn(ProjectionKind::Gaussian, Radii::Chi),
    Estimator::orthogonal("trigonometric, orthogonal", FeatureMapKind::Trigonometric),
    Estimator::orthogonal("positive, iid", FeatureMapKind::Positive).drawn(ProjectionKind::Gaussian, Radii::Chi),
    Estimator::orthogonal("positive, orthogonal", FeatureMapKind::Positive),
    Estimator::orthogonal("positive, QR unsigned", FeatureMapKind::Positive).unsigned(),
    Estimator::orthogonal("positive, lengths √D", FeatureMapKind::Positive)
        .drawn(ProjectionKind::Orthogonal, Radii::Sqrt),
];

/// Makes the figure for one kind of input and one length.
fn figure(plan: &Plan, input: Input, tokens: usize) -> Result<(Section, Value)> {
    let d = plan.head_dim;
    let attention = Attention::new(input, tokens, d, plan.seed)?;
    // None of these estimators is fitted, but `build` requires moments.
    let moments = moments(&attention.x, &attention.y)?;
    let lines = ESTIMATORS
        .iter()
        .map(|estimator| measure(plan, &attention, estimator.name, &|m, seed| estimator.build(m, d, seed, &moments)));
    let lines: Vec<Line> = lines.collect::<Result<_>>()?;
    let uniform = attention.uniform()?;
    let file = file_name(input, &plan.tokens, tokens);
    let title = format!("Output error over features: {}, L={tokens}, D={d}", input.name());
    let text = vec![describe(input, &lines, uniform)];
    let section = section(plan, &file, title, text, &lines, &[("uniform attention", uniform)]);
    let data = json!({ "input": input.name(), "tokens": tokens, "uniform": uniform, "curves": curves(&lines) });
    Ok((section, data))
}

/// Returns the name of the chart of one kind of input and one of the lengths.
fn file_name(input: Input, lengths: &[usize], tokens: usize) -> String {
    match (input, lengths.iter().position(|&length| length == tokens)) {
        (Input::UnitRows, _) => "figure-unit-rows".into(),
        (Input::Gaussian, Some(0)) => "figure".into(),
        (Input::Gaussian, Some(1)) => "figure-long".into(),
        (Input::Gaussian, _) => format!("figure-{tokens}"),
    }
}

fn curves(lines: &[Line]) -> Value {
    let line = |line: &Line| {
        let points: Vec<Value> =
            line.points.iter().map(|(m, mse)| json!({ "features": *m as usize, "mse": mse })).collect();
        json!({ "estimator": line.name, "points": points })
    };
    lines.iter().map(line).collect()
}

fn section(
    plan: &Plan,
    file: &str,
    title: String,
    text: Vec<String>,
    lines: &[Line],
    levels: &[(&str, f64)],
) -> Section {
    let mut chart = Chart {
        title: title.clone(),
        subtitle: Some(charts::legend(plan.draws)),
        x: Axis::new("rows M of the projection (sine and cosine make two features of each)", Scale::Log2),
        y: Axis::new("mean squared error of the output (v² = 1)", Scale::Log10),
        ..Chart::default()
    };
    let mut table = Table::new(["estimator".to_string()]);
    table.header.extend(plan.features.iter().map(|m| format!("M={m}")));
    for (line, color) in lines.iter().zip(COLORS) {
        chart.series.extend(charts::curve(line.name, color, &line.points));
        let cell = |(_, s): &(f64, Spread)| format!("{} ({})", number(s.median), number(s.mean));
        table.push(std::iter::once(line.name.to_string()).chain(line.points.iter().map(cell)));
    }
    for (label, level) in levels {
        chart.lines.push(Marker { at: At::Y(*level), label: (*label).into() });
        table.push(std::iter::once((*label).to_string()).chain(plan.features.iter().map(|_| number(*level))));
    }
    Section { title, text, chart: Some((file.into(), chart)), table: Some(table) }
}

fn describe(input: Input, lines: &[Line], uniform: f64) -> String {
    let scale = match input {
        Input::Gaussian => {
            "Entries of queries and keys are unit normal, so that logits q·k/√D have a standard deviation of 1: the scale of a head that has \
             learned little yet."
        }
        Input::UnitRows => {
            "Queries and keys are divided by their lengths, so that logits lie within ±1/√D: nearly the same for all keys."
        }
    };
    let informative: Vec<String> = lines
        .iter()
        .filter_map(|line| {
            let from = line.points.iter().find(|(_, s)| s.median < uniform)?;
            Some(format!("{} from M={}", line.name, from.0))
        })
        .collect();
    let verdict = match informative.is_empty() {
        true => {
            "No estimator here comes below uniform attention, which weighs all keys alike: none carries information."
                .into()
        }
        false => format!(
            "Below uniform attention, in the median: {}; whatever lies above it carries no information.",
            charts::list(&informative)
        ),
    };
    format!(
        "{scale} Uniform attention itself has a mean squared error of {} (values have 1). {verdict} The table has medians, and means in brackets.",
        number(uniform)
    )
}

/// Makes the figure at every length and scale.
pub(super) fn published(plan: &Plan, progress: &dyn Fn(&str)) -> Result<(Vec<Section>, Value)> {
    let mut inputs: Vec<(Input, usize)> = plan.tokens.iter().map(|&tokens| (Input::Gaussian, tokens)).collect();
    inputs.push((Input::UnitRows, plan.tokens[0]));
    let mut sections = Vec::new();
    let mut data = Vec::new();
    for (input, tokens) in inputs {
        progress(&format!("output error over features, {}, L={tokens}", input.name()));
        let (section, value) = figure(plan, input, tokens)?;
        sections.push(section);
        data.push(value);
    }
    Ok((sections, data.into()))
}

/// Makes the figure of a write-up that multiplies `ω·x` by 2π inside sine and cosine, as published
/// and corrected.
pub(super) fn two_pi(plan: &Plan) -> Result<(Vec<Section>, Value)> {
    let (unit, unit_data) = two_pi_at(plan, Input::Gaussian, "two-pi")?;
    let (rows, rows_data) = two_pi_at(plan, Input::UnitRows, "two-pi-unit-rows")?;
    Ok((vec![unit, rows], json!([unit_data, rows_data])))
}

fn two_pi_at(plan: &Plan, input: Input, file: &'static str) -> Result<(Section, Value)> {
    let (d, tokens) = (plan.head_dim, plan.tokens[0]);
    let attention = Attention::new(input, tokens, d, plan.seed)?;
    let draw = |m, seed, factor: f64| -> Result<Box<dyn FeatureMap>> {
        let (kind, radii) = (ProjectionKind::Gaussian, Radii::Chi);
        let omega = projection::draw_tensor(kind, radii, m, d, seed, DType::F64, &Device::Cpu)?;
        Ok(Box::new(Trigonometric::new((omega * factor)?)?))
    };
    let published = measure(plan, &attention, "as published: sin 2πω·x, cos 2πω·x", &|m, seed| {
        draw(m, seed, std::f64::consts::TAU)
    })?;
    let corrected = measure(plan, &attention, "corrected: sin ω·x, cos ω·x", &|m, seed| draw(m, seed, 1.0))?;
    let (uniform, limit) = (attention.uniform()?, two_pi_limit(&attention)?);
    let last = |line: &Line| line.points.last().map_or(f64::NAN, |(_, s)| s.median);
    let mut text = Vec::new();
    if input == Input::Gaussian {
        text.push(
            "One write-up takes the sine and cosine of 2πω·x for ω ~ N(0, I). Those are the features of e^(−(2π)²‖x−y‖²/2), a kernel so narrow that \
             each query sees little but its nearest key; times e^(‖x‖²/2 + ‖y‖²/2) that is not the softmax kernel, for any number of features."
                .into(),
        );
    }
    text.push(format!(
        "At M={} the median error as published is {}, corrected {}, of uniform attention {}; with exact values of the published kernel it would \
         be {}.",
        plan.features.last().unwrap_or(&0),
        number(last(&published)),
        number(last(&corrected)),
        number(uniform),
        number(limit)
    ));
    let lines = [published, corrected];
    let levels = [("uniform attention", uniform), ("as published, M = ∞", limit)];
    let title = format!("A factor of 2π too many: {}, L={tokens}, D={d}", input.name());
    let section = section(plan, file, title, text, &lines, &levels);
    let data = json!({ "input": input.name(), "tokens": tokens, "uniform": uniform, "limit": limit, "curves": curves(&lines) });
    Ok((section, data))
}

/// Computes the error that the narrow kernel itself makes: attention by
/// `e^{‖y‖²/2 − (2π)²‖x−y‖²/2}` over the keys.
fn two_pi_limit(attention: &Attention) -> Result<f64> {
    let factor = std::f64::consts::TAU.powi(2);
    let (x, y) = (&attention.x, &attention.y);
    let norms = (y.sqr()?.sum_keepdim(1)?.t()? * (0.5 * (1.0 - factor)))?;
    let parts = (0..x.dim(0)?).step_by(1024).map(|start| -> Result<Tensor> {
        let x = x.narrow(0, start, 1024.min(x.dim(0)? - start))?;
        let logits = (x.matmul(&y.t()?)? * factor)?.broadcast_add(&norms)?;
        Ok(candle_nn::ops::softmax(&logits, D::Minus1)?.matmul(&attention.values)?)
    });
    attention.squared(&Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_chart_replaces_another() {
        let lengths = [1024, 4096, 512, 64];
        let mut names: Vec<String> = lengths.iter().map(|&t| file_name(Input::Gaussian, &lengths, t)).collect();
        names.push(file_name(Input::UnitRows, &lengths, 1024));
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all, "{names:?}");
    }
}

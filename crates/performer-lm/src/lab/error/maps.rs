//! This module compares feature maps and projections at equal feature dimension: over the number of
//! features, and over the logits' scale.

use anyhow::Result;
use performer_core::{FeatureMapKind, ProjectionKind, Radii};
use serde_json::{Value, json};

use super::{
    Plan,
    charts::{self, COLORS, number},
    estimator::Estimator,
    problem::Errors,
    set::Set,
    spread::Spread,
};
use crate::{
    lab::{Section, Table},
    plot::{At, Axis, Chart, Color, Marker, Scale, Series, Style},
};

/// The feature dimensions that are compared.
pub(super) const FEATURES: [usize; 6] = [32, 64, 128, 256, 512, 1024];

/// The feature dimension of the tables and of the sweep over scales.
const TABLE_FEATURES: usize = 256;

/// Standard deviations of the logits.
const SCALES: [f64; 6] = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0];

fn maps() -> Vec<Estimator> {
    use FeatureMapKind::{Dense, Elu, HermiteTail, Hyperbolic, Optimal, Positive, Relu, Taylor2, Trigonometric};
    vec![
        Estimator::orthogonal("positive (FAVOR+)", Positive),
        Estimator::orthogonal("hyperbolic", Hyperbolic),
        Estimator::orthogonal("trigonometric", Trigonometric),
        Estimator::orthogonal("FAVOR++, centred", Optimal).fitted(true, false),
        Estimator::orthogonal("FAVOR#, centred", Dense).fitted(true, false),
        Estimator::orthogonal("Taylor-2 + random tail", HermiteTail),
        Estimator::orthogonal("ReLU", Relu),
        Estimator::orthogonal("ELU + 1", Elu),
        Estimator::orthogonal("Taylor-2", Taylor2),
    ]
}

fn projections() -> Vec<Estimator> {
    let positive = |name| Estimator::orthogonal(name, FeatureMapKind::Positive);
    vec![
        positive("iid").drawn(ProjectionKind::Gaussian, Radii::Chi),
        positive("orthogonal, chi lengths"),
        positive("orthogonal, √D lengths").drawn(ProjectionKind::Orthogonal, Radii::Sqrt),
        positive("orthogonal, quantile lengths").drawn(ProjectionKind::Orthogonal, Radii::Quantile),
        positive("Hadamard, chi lengths").drawn(ProjectionKind::Hadamard, Radii::Chi),
        positive("Hadamard, √D lengths").drawn(ProjectionKind::Hadamard, Radii::Sqrt),
        positive("QR unsigned, chi lengths").unsigned(),
    ]
}

/// A `Point` holds errors over draws, at one number of features.
struct Point {
    features: usize,
    rows: Spread,
    output: Spread,
}

impl Point {
    fn of(features: usize, errors: &[Errors]) -> Self {
        let spread = |part: fn(&Errors) -> f64| Spread::of(errors.iter().map(part));
        Self { features, rows: spread(|e| e.rows), output: spread(|e| e.output) }
    }
}

/// A `Measure` is a measure of error.
#[derive(Clone, Copy)]
enum Measure {
    Rows,
    Output,
}

impl Measure {
    fn of(self, point: &Point) -> Spread {
        match self {
            Self::Rows => point.rows,
            Self::Output => point.output,
        }
    }

    /// Returns the upper end of a chart's axis; estimates with larger errors carry no information.
    fn most(self) -> f64 {
        match self {
            Self::Rows => 1.2,
            Self::Output => 2.0,
        }
    }

    /// Returns an axis for `values` up to [`Self::most`], and a note about larger values.
    fn limited(self, values: impl Iterator<Item = f64>) -> (Axis, String) {
        let (low, high) = values.fold((f64::INFINITY, 0.0f64), |(low, high), v| (low.min(v), high.max(v)));
        let mut axis = self.axis();
        if high <= self.most() {
            return (axis, String::new());
        }
        axis.range = Some((0.8 * low.min(self.most()), self.most()));
        (axis, format!("; beyond {} not shown", self.most()))
    }

    fn axis(self) -> Axis {
        match self {
            Self::Rows => Axis::new("total variation of attention rows (0 same, 1 disjoint)", Scale::Log10),
            Self::Output => Axis::new("relative error of the output (0 none, 1 as large as the output)", Scale::Log10),
        }
    }
}

fn sweep(plan: &Plan, set: &Set, estimators: Vec<Estimator>) -> Result<Vec<(Estimator, Vec<Point>)>> {
    let d = set.head_dim();
    let measured = estimators.into_iter().map(|estimator| {
        let mut points = Vec::new();
        if let Some(fixed) = estimator.fixed(d) {
            points.push(Point::of(fixed, &set.errors(&estimator, 0, 1, plan.seed)?));
        }
        for &features in FEATURES.iter().filter(|&&f| f <= plan.most_features) {
            let Some(m) = estimator.rows_for(features, d) else { continue };
            points.push(Point::of(features, &set.errors(&estimator, m, plan.draws, plan.seed)?));
        }
        Ok((estimator, points))
    });
    measured.collect()
}

fn chart(plan: &Plan, title: String, lines: &[(Estimator, Vec<Point>)], measure: Measure, uniform: Errors) -> Chart {
    let level = match measure {
        Measure::Rows => uniform.rows,
        Measure::Output => uniform.output,
    };
    let spreads = lines.iter().flat_map(|(_, points)| points).map(|point| measure.of(point));
    let (y, beyond) = measure.limited(spreads.flat_map(|s| [s.median, s.mean]).chain([level]));
    let mut chart = Chart {
        title,
        subtitle: Some(charts::legend(plan.draws) + &beyond),
        x: Axis::new("features F", Scale::Log2),
        y,
        ..Chart::default()
    };
    for (i, (estimator, points)) in lines.iter().enumerate() {
        let color = COLORS[i % COLORS.len()];
        if estimator.fixed(1).is_some() {
            let points = points.iter().map(|p| (p.features as f64, measure.of(p).mean));
            let style = Style::Points;
            chart.series.push(Series { color: Some(color), style, ..Series::new(estimator.name, points) });
            continue;
        }
        let points: Vec<(f64, Spread)> = points.iter().map(|p| (p.features as f64, measure.of(p))).collect();
        chart.series.extend(charts::curve(estimator.name, color, &points));
    }
    chart.lines.push(Marker { at: At::Y(level), label: "uniform attention".into() });
    chart
}

fn table(lines: &[(Estimator, Vec<Point>)], uniform: Errors) -> Table {
    let mut table = Table::new(["estimator", "F", "row TV: median", "mean", "output error: median", "mean"]);
    for (estimator, points) in lines {
        // The point is at the table's number of features, or at the nearest that the map has.
        let nearest = points.iter().min_by_key(|p| p.features.abs_diff(TABLE_FEATURES));
        let Some(Point { features, rows, output }) = nearest else { continue };
        let cells = [rows.median, rows.mean, output.median, output.mean].map(number);
        table.push([estimator.name.to_string(), features.to_string()].into_iter().chain(cells));
    }
    let [rows, output] = [uniform.rows, uniform.output].map(number);
    table.push(["uniform attention".to_string(), "–".into(), rows.clone(), rows, output.clone(), output]);
    table
}

fn json_of(lines: &[(Estimator, Vec<Point>)], uniform: Errors) -> Value {
    let line = |(estimator, points): &(Estimator, Vec<Point>)| {
        let point = |p: &Point| json!({ "features": p.features, "rows": p.rows, "output": p.output });
        json!({ "estimator": estimator.name, "points": points.iter().map(point).collect::<Vec<_>>() })
    };
    json!({ "uniform": uniform, "estimators": lines.iter().map(line).collect::<Vec<_>>() })
}

/// Says which estimators have smaller errors than uniform attention in the median, and which never
/// do.
fn informative(lines: &[(Estimator, Vec<Point>)], uniform: Errors) -> String {
    let first = |points: &[Point]| points.iter().find(|p| p.rows.median < uniform.rows).map(|p| p.features);
    let (mut some, mut none) = (Vec::new(), Vec::new());
    for (estimator, points) in lines.iter().filter(|(_, points)| !points.is_empty()) {
        match first(points) {
            Some(features) => some.push(format!("{} (from F={features})", estimator.name)),
            None => none.push(estimator.name.to_string()),
        }
    }
    format!(
        "Nearer to softmax's rows than uniform attention, in the median: {}. Not at any F here: {}.",
        charts::list(&some),
        charts::list(&none)
    )
}

/// `Files` are the file names of a set's two charts over features, and of its chart of projections.
type Files = [&'static str; 3];

fn over_features(
    plan: &Plan,
    set: &Set,
    [rows_file, output_file, projections_file]: Files,
) -> Result<(Vec<Section>, Value)> {
    let uniform = set.uniform()?;
    let lines = sweep(plan, set, maps())?;
    let projected = sweep(plan, set, projections())?;
    let rows_title = format!("Maps over features, rows: {}", set.name);
    let output_title = format!("Maps over features, outputs: {}", set.name);
    let projection_title = format!("Projections over features: {}", set.name);
    let sections = vec![
        Section {
            title: rows_title.clone(),
            text: vec![
                "Every map has F features in all: M = F rows, or F/2 where each row makes two, or what F leaves beside Taylor-2's own. FAVOR++ \
                 and FAVOR# are fitted to the queries and keys. Learned features are not here: see `convert`."
                    .into(),
                informative(&lines, uniform),
            ],
            chart: Some((rows_file.into(), chart(plan, rows_title, &lines, Measure::Rows, uniform))),
            table: Some(table(&lines, uniform)),
        },
        Section {
            title: output_title.clone(),
            text: Vec::new(),
            chart: Some((output_file.into(), chart(plan, output_title, &lines, Measure::Output, uniform))),
            table: None,
        },
        Section {
            title: projection_title.clone(),
            text: vec!["Positive features, by how the rows of Ω are drawn.".into()],
            chart: Some((projections_file.into(), chart(plan, projection_title, &projected, Measure::Rows, uniform))),
            table: Some(table(&projected, uniform)),
        },
    ];
    Ok((
        sections,
        json!({ "input": set.name, "maps": json_of(&lines, uniform), "projections": json_of(&projected, uniform) }),
    ))
}

fn over_scales(plan: &Plan) -> Result<(Section, Value)> {
    let sets: Vec<Set> = SCALES
        .iter()
        .map(|s| Set::gaussian("Gaussian", plan.tokens[0], plan.head_dim, s.sqrt(), plan.seed))
        .collect::<Result<_>>()?;
    let title = format!("Maps over the logits' scale: F={TABLE_FEATURES}, L={}, D={}", plan.tokens[0], plan.head_dim);
    let uniform: Vec<Errors> = sets.iter().map(Set::uniform).collect::<Result<_>>()?;
    let mut table = Table::new(["estimator".to_string()]);
    table.header.extend(SCALES.map(|s| format!("σ={s}")));
    let mut data = Vec::new();
    let mut reach = Vec::new();
    let mut lines: Vec<(Estimator, Vec<Spread>)> = Vec::new();
    for estimator in maps() {
        let m = estimator.rows_for(TABLE_FEATURES, plan.head_dim);
        if m.is_none() && estimator.fixed(plan.head_dim).is_none() {
            continue;
        }
        let points: Vec<Spread> = sets
            .iter()
            .map(|set| {
                let errors = set.errors(&estimator, m.unwrap_or(0), plan.draws, plan.seed)?;
                Ok(Spread::of(errors.iter().map(|e| e.rows)))
            })
            .collect::<Result<_>>()?;
        let informed = points.iter().zip(&uniform).take_while(|(p, u)| p.median < u.rows).count();
        if informed > 0 {
            reach.push(format!("{} up to {}", estimator.name, SCALES[informed - 1]));
        }
        table.push(std::iter::once(estimator.name.to_string()).chain(points.iter().map(|p| number(p.median))));
        data.push(json!({ "estimator": estimator.name, "rows": points }));
        lines.push((estimator, points));
    }
    let spreads = lines.iter().flat_map(|(_, points)| points).flat_map(|s| [s.median, s.mean]);
    let (y, beyond) = Measure::Rows.limited(spreads.chain(uniform.iter().map(|u| u.rows)));
    let mut chart = Chart {
        title: title.clone(),
        subtitle: Some(charts::legend(plan.draws) + &beyond),
        x: Axis::new("standard deviation of the logits q·k/√D", Scale::Log2),
        y,
        ..Chart::default()
    };
    for (i, (estimator, points)) in lines.iter().enumerate() {
        let color = COLORS[i % COLORS.len()];
        if estimator.fixed(1).is_none() {
            let points: Vec<(f64, Spread)> = SCALES.into_iter().zip(points.iter().copied()).collect();
            chart.series.extend(charts::curve(estimator.name, color, &points));
        } else {
            let points = SCALES.into_iter().zip(points.iter().map(|s| s.mean));
            let style = Style::Points;
            chart.series.push(Series { color: Some(color), style, ..Series::new(estimator.name, points) });
        }
    }
    let level: Vec<(f64, f64)> = SCALES.into_iter().zip(uniform.iter().map(|u| u.rows)).collect();
    chart.series.push(Series {
        style: Style::Dotted,
        color: Some(Color::Black),
        ..Series::new("uniform attention", level.clone())
    });
    table.push(std::iter::once("uniform attention".to_string()).chain(level.iter().map(|p| number(p.1))));
    let last = SCALES[SCALES.len() - 1];
    let at_last = |(estimator, points): &(Estimator, Vec<Spread>)| (estimator.name, points[SCALES.len() - 1].median);
    let sharpest = lines.iter().map(at_last).min_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or(("none", f64::NAN));
    let text = vec![format!(
        "Queries and keys of √σ times unit normal entries. Nearer than uniform attention without a gap from the smallest σ on: {}. At σ={last} the \
         nearest is {} with {} (uniform attention {}).",
        charts::list(&reach),
        sharpest.0,
        number(sharpest.1),
        number(level[SCALES.len() - 1].1)
    )];
    let data =
        json!({ "features": TABLE_FEATURES, "logit_deviations": SCALES, "uniform": uniform, "estimators": data });
    Ok((Section { title, text, chart: Some(("scale".into(), chart)), table: Some(table) }, data))
}

/// Makes all comparisons: on Gaussian inputs, over scales, and on a model's heads if they are
/// given.
pub(super) fn compare(
    plan: &Plan,
    gaussian: &Set,
    heads: Option<&Set>,
    progress: &dyn Fn(&str),
) -> Result<(Vec<Section>, Value)> {
    progress("maps and projections over features, unit Gaussian");
    let (mut sections, on_gaussian) = over_features(plan, gaussian, ["maps-rows", "maps-output", "projections"])?;
    progress("maps over the logits' scale");
    let (section, scales) = over_scales(plan)?;
    sections.push(section);
    let mut data = json!({ "gaussian": on_gaussian, "scales": scales });
    if let Some(heads) = heads {
        progress(&format!("maps and projections over features, {}", heads.name));
        let (more, on_heads) = over_features(plan, heads, ["heads-rows", "heads-output", "heads-projections"])?;
        sections.extend(more);
        data["heads"] = on_heads;
    }
    Ok((sections, data))
}

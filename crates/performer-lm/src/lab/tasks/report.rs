//! This module reports runs as findings: one table of all tasks, and for each task its learning
//! curves and numbers.

use serde_json::json;

use super::{
    Plan, can_learn,
    learn::{Run, Score, Setting},
};
use crate::{
    lab::{Findings, Section, Table, state_text},
    plot::{At, Axis, Chart, Marker, Scale, Series, Style},
    seeds::{deviation, mean},
};

/// A `Metric` is the number by which a task is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Metric {
    /// Share of correct answers, in percent.
    Accuracy,
    /// Cross-entropy in bits.
    BitsPerByte,
    /// Perplexity, `e^loss`.
    Perplexity,
}

impl Metric {
    fn value(self, score: &Score) -> f64 {
        match self {
            Self::Accuracy => 100.0 * score.accuracy,
            Self::BitsPerByte => score.loss / std::f64::consts::LN_2,
            Self::Perplexity => crate::eval::perplexity(score.loss),
        }
    }

    fn label(self) -> &'static str {
        match self {
            Self::Accuracy => "accuracy (%)",
            Self::BitsPerByte => "bits/byte",
            Self::Perplexity => "perplexity",
        }
    }

    fn best_first(self, a: f64, b: f64) -> std::cmp::Ordering {
        if self == Self::Accuracy { b.total_cmp(&a) } else { a.total_cmp(&b) }
    }

    /// Formats mean and standard deviation over seeds.
    pub(super) fn show(self, scores: &[Score]) -> String {
        let values: Vec<f64> = scores.iter().map(|score| self.value(score)).collect();
        let (digits, unit) = match self {
            Self::Accuracy => (1, "%"),
            Self::BitsPerByte => (3, ""),
            Self::Perplexity => (2, ""),
        };
        if values.is_empty() { show(&values, digits) } else { format!("{}{unit}", show(&values, digits)) }
    }
}

fn show(values: &[f64], digits: usize) -> String {
    match values {
        [] => "–".to_string(),
        [one] => format!("{one:.digits$}"),
        _ => format!("{:.digits$} ± {:.digits$}", mean(values), deviation(values)),
    }
}

pub(super) fn findings(plan: &Plan, found: &[(&Setting, Vec<Run>)]) -> Findings {
    let mut sections = Vec::new();
    if found.len() > 1 {
        sections.push(overview(plan, found));
    }
    for (setting, runs) in found {
        sections.push(section(plan, setting, runs));
        sections.extend(by_state(plan, setting, runs));
    }
    let tasks = found.iter().map(|(setting, runs)| {
        json!({
            "task": setting.task,
            "data": setting.source.describe(),
            "recipe": setting.recipe,
            "metric": setting.task.metric().label(),
            "chance": setting.chance(),
            "summary": summaries(plan, setting, runs),
            "runs": runs,
        })
    });
    Findings {
        name: "tasks",
        title: "What does linear attention cost in quality?".into(),
        summary: summary(plan, found),
        sections,
        data: json!({ "tasks": tasks.collect::<Vec<_>>() }),
    }
}

/// Returns the runs of one attention.
fn of<'r>(runs: &'r [Run], attention: &str) -> Vec<&'r Run> {
    runs.iter().filter(|run| run.attention == attention).collect()
}

fn scores(runs: &[&Run]) -> Vec<Score> {
    runs.iter().map(|run| run.score).collect()
}

fn specs(plan: &Plan, setting: &Setting) -> Vec<String> {
    plan.attentions.iter().filter(|a| can_learn(a, setting.task)).map(ToString::to_string).collect()
}

fn summary(plan: &Plan, found: &[(&Setting, Vec<Run>)]) -> Vec<String> {
    let mut paragraphs: Vec<String> = found.iter().map(|(setting, runs)| verdict(plan, setting, runs)).collect();
    let runs = found.iter().map(|(_, runs)| runs.len()).sum::<usize>();
    let seconds: f64 = found.iter().flat_map(|(_, runs)| runs).map(|run| run.seconds).sum();
    paragraphs.push(format!(
        "In each task all attentions have the same model, the same first weights, the same examples in the same order, the same number of steps and the \
         same learning rate; nothing was tuned for one of them. {} seed(s), ± is the standard deviation over them; {runs} runs, {:.0} minutes of training \
         in all. Chance is what is reached without looking at the input: always the commonest answer, or the frequencies of the answers.",
        plan.seeds.len(),
        seconds / 60.0
    ));
    paragraphs
}

/// Describes a task's result in a sentence: the first attention, the best and the worst of the
/// others.
fn verdict(plan: &Plan, setting: &Setting, runs: &[Run]) -> String {
    let metric = setting.task.metric();
    let unit = match metric {
        Metric::Accuracy => "of the answers right",
        other => other.label(),
    };
    let specs = specs(plan, setting);
    let tell = |spec: &str| format!("{spec} {}", metric.show(&scores(&of(runs, spec))));
    let mut others: Vec<(&String, f64)> = specs
        .iter()
        .skip(1)
        .map(|spec| (spec, mean(&scores(&of(runs, spec)).iter().map(|s| metric.value(s)).collect::<Vec<_>>())))
        .collect();
    others.sort_by(|a, b| metric.best_first(a.1, b.1));
    let mut text = format!("{}: {} {unit}", setting.task.title(), specs.first().map_or_else(String::new, |s| tell(s)));
    match others.as_slice() {
        [] => {}
        [one] => text += &format!("; {}", tell(one.0)),
        [best, .., worst] => text += &format!("; of the others, best {}, last {}", tell(best.0), tell(worst.0)),
    }
    text + &format!("; chance {}.", metric.show(&[setting.chance()]))
}

fn overview(plan: &Plan, found: &[(&Setting, Vec<Run>)]) -> Section {
    let column = |setting: &Setting| format!("{}, {}", setting.task, setting.task.metric().label());
    let mut table = Table::new(std::iter::once("attention".to_string()).chain(found.iter().map(|(s, _)| column(s))));
    let chance = found.iter().map(|(setting, _)| setting.task.metric().show(&[setting.chance()]));
    table.push(std::iter::once("chance".to_string()).chain(chance));
    for attention in &plan.attentions {
        let spec = attention.to_string();
        let cells = found.iter().map(|(setting, runs)| match of(runs, &spec).as_slice() {
            [] => "–".to_string(),
            some => setting.task.metric().show(&scores(some)),
        });
        table.push(std::iter::once(spec.clone()).chain(cells));
    }
    Section {
        title: "All tasks".into(),
        text: vec![
            "More is better in accuracy, less in bits and perplexity. Windows and forget gates need a causal mask, so an attention that has them stays out \
             of the two tasks that are read from both sides."
                .into(),
        ],
        chart: None,
        table: Some(table),
    }
}

fn section(plan: &Plan, setting: &Setting, runs: &[Run]) -> Section {
    let metric = setting.task.metric();
    let recipe = &setting.recipe;
    let direction = if setting.task.is_causal() { "causal" } else { "bidirectional" };
    let mut text = vec![
        format!("An example: {}.", setting.source.describe()),
        format!(
            "Model: {direction}, {} layers, dimension {}, {} heads, rotary positions. {} steps of {} examples, AdamW with a peak of {}; measured on {} \
             held-out examples, the same for all runs.",
            recipe.layers,
            recipe.hidden_size,
            recipe.heads,
            recipe.steps,
            recipe.batch_size,
            recipe.learning_rate,
            recipe.held_out
        ),
    ];
    let left_out: Vec<String> =
        plan.attentions.iter().filter(|a| !can_learn(a, setting.task)).map(ToString::to_string).collect();
    if runs.iter().any(|run| run.features_off.is_some()) {
        text.push(
            "\"Features off\" measures the same trained weights with linear attention switched off: where a window \
             stands before the features it is left, elsewhere the values are averaged. It is a control of what the \
             features do, not of what a model trained without them would do."
                .into(),
        );
    }
    if !left_out.is_empty() {
        text.push(format!(
            "Left out, since they need a causal mask (for a window or a gate): {}.",
            left_out.join("; ")
        ));
    }
    Section {
        title: setting.task.title().into(),
        text,
        chart: Some((setting.task.to_string(), chart(plan, setting, runs))),
        table: Some(numbers(plan, setting, runs, metric)),
    }
}

fn numbers(plan: &Plan, setting: &Setting, runs: &[Run], metric: Metric) -> Table {
    let mut header = vec!["attention", metric.label()];
    let with_accuracy = metric != Metric::Accuracy;
    if with_accuracy {
        header.push(Metric::Accuracy.label());
    }
    header.push("loss (nats)");
    let with_off = runs.iter().any(|run| run.features_off.is_some());
    if with_off {
        header.push("features off");
    }
    header.extend(["state (bytes)", "training tokens/s"]);
    let mut table = Table::new(header);
    let row = |name: &str, scores: &[Score], off: &[Score], state: String, speed: String| {
        let mut cells = vec![name.to_string(), metric.show(scores)];
        if with_accuracy {
            cells.push(Metric::Accuracy.show(scores));
        }
        cells.push(show(&scores.iter().map(|score| score.loss).collect::<Vec<_>>(), 4));
        if with_off {
            cells.push(metric.show(off));
        }
        cells.extend([state, speed]);
        cells
    };
    table.push(row("chance", &[setting.chance()], &[], "–".into(), "–".into()));
    for spec in specs(plan, setting) {
        let runs = of(runs, &spec);
        let speeds: Vec<f64> = runs.iter().map(|run| run.tokens_per_second).collect();
        let state = runs.first().map_or_else(String::new, |run| state_text(run.state_bytes, run.state_grows));
        let off: Vec<Score> = runs.iter().filter_map(|run| run.features_off).collect();
        table.push(row(&spec, &scores(&runs), &off, state, show(&speeds, 0)));
    }
    table
}

/// Collects attentions that differ in nothing but their size, in the order in which the first of
/// each came. The name of such a family is that of its only member, or has `…` for the size.
fn families(specs: Vec<String>) -> Vec<(String, Vec<String>)> {
    let mut families: Vec<(String, Vec<String>)> = Vec::new();
    for spec in specs {
        let family = without_sizes(&spec);
        match families.iter_mut().find(|(name, _)| *name == family) {
            Some((_, members)) => members.push(spec),
            None => families.push((family, vec![spec])),
        }
    }
    for (name, members) in &mut families {
        if let [only] = members.as_slice() {
            name.clone_from(only);
        }
    }
    families
}

/// Replaces the numbers of `m=128`, `window=66` and `key-dim=16` by `…`.
fn without_sizes(spec: &str) -> String {
    let parts = spec.split_inclusive([':', ',', '+', '|', '/']).map(|part| match part.split_once('=') {
        Some((key @ ("m" | "window" | "key-dim"), number)) => {
            format!("{key}=…{}", number.trim_start_matches(|c: char| c.is_ascii_digit()))
        }
        _ => part.to_string(),
    });
    parts.collect()
}

/// Joins the members of a family in a line: each has a point of its own, of the mean over seeds,
/// also where two of them remember equally much. `of_seed` is the point of a member at a seed.
fn line(name: String, members: &[String], seeds: &[u64], of_seed: impl Fn(&str, u64) -> Option<(f64, f64)>) -> Series {
    let of_member = |spec: &String| {
        let curves: Vec<Vec<_>> = seeds.iter().map(|&seed| of_seed(spec, seed).into_iter().collect()).collect();
        Series::over_seeds("", &curves)
    };
    let mut points: Vec<Series> = members.iter().map(of_member).collect();
    points.sort_by(|a, b| {
        let x = |series: &Series| series.points.first().map_or(0.0, |point| point.0);
        x(a).total_cmp(&x(b))
    });
    let bands: Option<Vec<_>> = points.iter().map(|series| series.band.clone()).collect();
    let style = if members.len() > 1 { Style::Solid } else { Style::Points };
    let joined = Series::new(name, points.into_iter().flat_map(|series| series.points));
    Series { style, band: bands.map(|bands| bands.concat()), ..joined }
}

/// Shows the result over what each attention remembers: a window, a linear attention and softmax
/// can be compared by the bytes that decoding keeps of a sequence. Only causal attention decodes.
fn by_state(plan: &Plan, setting: &Setting, runs: &[Run]) -> Option<Section> {
    let metric = setting.task.metric();
    // No attention remembers nothing, so it has no place on a scale of powers of two.
    let runs: Vec<Run> = runs.iter().filter(|run| run.state_bytes > 0).cloned().collect();
    let runs = &runs[..];
    if !setting.task.is_causal() || runs.is_empty() {
        return None;
    }
    let remembers = |spec: &String| runs.iter().any(|run| run.attention == *spec);
    let families = families(specs(plan, setting).into_iter().filter(remembers).collect());
    let series = families.into_iter().map(|(name, members)| {
        let of_seed = |spec: &str, seed: u64| {
            let run = of(runs, spec).into_iter().find(|run| run.seed == seed)?;
            Some((run.state_bytes as f64, metric.value(&run.score)))
        };
        line(name, &members, &plan.seeds, of_seed)
    });
    let mut y = Axis::new(format!("held-out {}", metric.label()), Scale::Linear);
    if metric == Metric::Accuracy {
        y.range = Some((0.0, 100.0));
    }
    Some(Section {
        title: format!("{}: by bytes of state", setting.task.title()),
        text: vec![
            "The state is what decoding keeps of one sequence of this length, in all layers, in f32. That of softmax \
             without a window grows with every token; the others' does not. Lines join attentions that differ in nothing \
             but their size: the number of features, the window, the dimension of queries and keys."
                .into(),
        ],
        chart: Some((
            format!("{}-state", setting.task),
            Chart {
                title: format!("{}: by bytes of state", setting.task.title()),
                subtitle: Some(format!(
                    "{}; mean of {} seed(s), band: smallest to largest",
                    setting.source.describe(),
                    plan.seeds.len()
                )),
                x: Axis::new("state of a sequence (bytes)", Scale::Log2),
                y,
                series: series.collect(),
                lines: vec![Marker { at: At::Y(metric.value(&setting.chance())), label: "chance".into() }],
            },
        )),
        table: None,
    })
}

fn summaries(plan: &Plan, setting: &Setting, runs: &[Run]) -> Vec<serde_json::Value> {
    let metric = setting.task.metric();
    let line = |spec: String| {
        let runs = of(runs, &spec);
        let values: Vec<f64> = runs.iter().map(|run| metric.value(&run.score)).collect();
        let off: Vec<f64> =
            runs.iter().filter_map(|run| run.features_off.as_ref()).map(|score| metric.value(score)).collect();
        let speeds: Vec<f64> = runs.iter().map(|run| run.tokens_per_second).collect();
        json!({
            "attention": spec,
            "mean": mean(&values),
            "standard_deviation": deviation(&values),
            "seeds": runs.iter().map(|run| run.seed).collect::<Vec<_>>(),
            "features_off": (!off.is_empty()).then(|| mean(&off)),
            "state_bytes": runs.first().map_or(0, |run| run.state_bytes),
            "state_grows": runs.first().is_some_and(|run| run.state_grows),
            "tokens_per_second": mean(&speeds),
        })
    };
    specs(plan, setting).into_iter().map(line).collect()
}

/// Draws learning curves: the mean over seeds, with the range as a band.
fn chart(plan: &Plan, setting: &Setting, runs: &[Run]) -> Chart {
    let metric = setting.task.metric();
    // The steep fall at the beginning of a loss would flatten the differences at the end.
    let from = if metric == Metric::Accuracy { 0 } else { setting.recipe.steps / 4 };
    let series = specs(plan, setting).into_iter().map(|spec| {
        let curve = |run: &&Run| -> Vec<(f64, f64)> {
            let shown = run.curve.iter().filter(|point| point.step >= from);
            shown.map(|point| (point.step as f64, metric.value(&point.score))).collect()
        };
        Series::over_seeds(spec.as_str(), &of(runs, &spec).iter().map(curve).collect::<Vec<_>>())
    });
    let recipe = &setting.recipe;
    let start = if from > 0 { "; without the first quarter" } else { "" };
    let mut y = Axis::new(format!("held-out {}", metric.label()), Scale::Linear);
    let chance = Marker { at: At::Y(metric.value(&setting.chance())), label: "chance".into() };
    if metric == Metric::Accuracy {
        let best = runs.iter().flat_map(|run| &run.curve).map(|point| point.score.accuracy).fold(0.0, f64::max);
        y.range = Some((0.0, if best > 0.5 { 100.0 } else { 50.0 }));
    }
    Chart {
        title: setting.task.title().into(),
        subtitle: Some(format!(
            "{} layers, dim {}, {} steps of {} examples; mean of {} seed(s), band: smallest to largest{start}",
            recipe.layers,
            recipe.hidden_size,
            recipe.steps,
            recipe.batch_size,
            plan.seeds.len()
        )),
        x: Axis::new("optimiser steps", Scale::Linear),
        y,
        series: series.collect(),
        lines: vec![chance],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Features of other dimensions of queries and keys may have equally large states.
    #[test]
    fn attentions_with_states_of_one_size_have_points_of_their_own() {
        let members = ["a", "b", "c"].map(String::from);
        let of_seed = |spec: &str, seed: u64| {
            let (bytes, score) = match spec {
                "a" => (200.0, 50.0),
                "b" => (100.0, 10.0),
                _ => (200.0, 70.0),
            };
            // The third has no run of the second seed yet.
            (spec != "c" || seed == 1).then_some((bytes, score + seed as f64))
        };
        let both = line("lines".into(), &members, &[1, 2], of_seed);
        assert_eq!(both.points, [(100.0, 11.5), (200.0, 51.5)]);
        assert_eq!(both.band.unwrap(), [(11.0, 12.0), (51.0, 52.0)]);
        let first = line("lines".into(), &members, &[1], of_seed);
        assert_eq!(first.points, [(100.0, 11.0), (200.0, 51.0), (200.0, 71.0)]);
        assert_eq!((first.band, first.style), (None, Style::Solid));
    }

    #[test]
    fn attentions_of_other_sizes_are_one_family() {
        let specs = [
            "softmax:gate",
            "softmax:window=16,gate",
            "favor:m=64",
            "softmax:window=128,gate",
            "favor:m=64,map=learned",
            "favor:map=taylor2,key-dim=8+softmax:window=20/first",
            "favor:map=taylor2,key-dim=16+softmax:window=40/first",
            "favor:map=taylor2,key-dim=16+softmax:window=40/2",
        ];
        let found = families(specs.map(String::from).into());
        let members = |name: &str| &found.iter().find(|(family, _)| family == name).unwrap().1;
        assert_eq!(members("softmax:gate"), &specs[..1]);
        assert_eq!(members("softmax:window=…,gate"), &[specs[1], specs[3]]);
        assert_eq!(members("favor:m=64"), &specs[2..3]);
        assert_eq!(members("favor:m=64,map=learned"), &specs[4..5]);
        assert_eq!(members("favor:map=taylor2,key-dim=…+softmax:window=…/first"), &specs[5..7]);
        assert_eq!(members(specs[7]), &specs[7..]);
        assert_eq!(found.len(), 6);
    }
}

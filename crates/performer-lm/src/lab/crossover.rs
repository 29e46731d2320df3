//! This experiment asks from which length on FAVOR+ is faster than softmax, and why not before: it
//! measures times over lengths and features, and compares them with the count of operations.

use std::fmt::Write;

use anyhow::Result;
use candle_core::Device;

use super::{Findings, Section, Table, capitalised};
use crate::{
    bench::{
        Effort,
        attention::{self, Crossover, Implementation, Report, Sweep},
    },
    plot::{Axis, Chart, Color, Scale, Series, Style},
};

/// The context of the published experiment, in tokens.
const PUBLISHED: usize = 80;

/// Times fused softmax and fused FAVOR+ over a grid and draws the crossovers; `progress` is called
/// with what comes next.
///
/// # Errors
/// If a size is 0, or attention cannot be computed.
pub fn run(
    sweep: &Sweep,
    device: &Device,
    threads: usize,
    effort: Effort,
    progress: impl FnMut(String),
) -> Result<Findings> {
    let mut sweep = sweep.clone();
    // The published context is measured, so that nothing about it is extrapolated.
    if !sweep.tokens.contains(&PUBLISHED) {
        sweep.tokens.push(PUBLISHED);
    }
    sweep.tokens.sort_unstable();
    let report = attention::run(&sweep, device, threads, effort, None, progress)?;
    Ok(findings(&report))
}

/// Returns the findings of a run whose [`Findings::data`] is `data`.
///
/// # Errors
/// If `data` is not that of a run.
pub fn from_data(data: serde_json::Value) -> Result<Findings> {
    Ok(findings(&serde_json::from_value(data)?))
}

fn findings(report: &Report) -> Findings {
    let sweep = &report.sweep;
    let passes: &[bool] = if sweep.backward { &[false, true] } else { &[false] };
    let mut sections = vec![Section {
        title: "Crossover over features".into(),
        text: passes.iter().map(|&backward| fit_in_words(report, backward)).collect(),
        chart: Some(("features".into(), chart(report, passes))),
        table: Some(crossovers(report)),
    }];
    for &backward in passes {
        sections.push(Section {
            title: format!("Time over length, {}", attention::pass(backward)),
            text: vec![published(report, backward)],
            chart: Some((if backward { "both" } else { "forward" }.into(), report.chart(backward))),
            table: Some(times(report, backward)),
        });
    }
    Findings {
        name: "crossover",
        title: "From which length is FAVOR+ faster than softmax?".into(),
        summary: vec![
            format!(
                "{} attention of {} × {} heads of {} in f32, fused kernels on both sides, {}. Matrix products ran at {:.0} GFLOP/s.",
                if sweep.causal { "Causal" } else { "Bidirectional" },
                sweep.batch,
                sweep.heads,
                sweep.head_dim,
                report.machine.at_work(report.threads),
                report.matmul_gflops
            ),
            format!(
                "Softmax takes every query to every key it sees, {} of them here; FAVOR+ takes it to M features, four products of M × D in \
                 all. They cost the same at about T = {}·M tokens, and below that no implementation can make linear attention win except by \
                 being better written than its rival.",
                if sweep.causal { "T/2" } else { "all T" },
                if sweep.causal { 4 } else { 2 }
            ),
        ],
        sections,
        data: serde_json::to_value(report).unwrap_or_default(),
    }
}

/// Returns features and tokens of the crossovers of one kind of pass that lie within the lengths
/// measured.
fn found(report: &Report, backward: bool) -> Vec<(f64, f64)> {
    let of = report.crossovers.iter().filter(|c| c.backward == backward);
    of.filter_map(|c| Some((c.features as f64, c.tokens?))).collect()
}

/// Fits the `c` of `T = c·M` to crossovers of `T` tokens at `M` features, as the mean on a
/// logarithmic scale.
fn slope(points: &[(f64, f64)]) -> Option<f64> {
    let logs: Vec<f64> = points.iter().map(|(m, t)| (t / m).ln()).collect();
    (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp())
}

fn fit_in_words(report: &Report, backward: bool) -> String {
    let pass = attention::pass(backward);
    let flop: Vec<(f64, f64)> =
        report.crossovers.iter().filter(|c| c.backward == backward).map(|c| (c.features as f64, c.by_flop)).collect();
    match (slope(&found(report, backward)), slope(&flop)) {
        (Some(measured), Some(counted)) => {
            format!("{}: T ≈ {measured:.1}·M measured, {counted:.1}·M by operations.", capitalised(pass))
        }
        _ => format!("{}: no crossover within the lengths measured.", capitalised(pass)),
    }
}

/// Says in words what happens at the context of the published experiment.
fn published(report: &Report, backward: bool) -> String {
    let at = |implementation, features| report.point(implementation, PUBLISHED, features, backward);
    let Some(exact) = at(Implementation::SoftmaxFused, None) else { return String::new() };
    let mut text =
        format!("At the {PUBLISHED} tokens of the published experiment softmax takes {:.3} ms", exact.timing.median_ms);
    for &m in &report.sweep.features {
        if let Some(favor) = at(Implementation::FavorFused, Some(m)) {
            let ratio = favor.timing.median_ms / exact.timing.median_ms;
            let _ = write!(text, ", FAVOR+ with M = {m} {ratio:.1} times as much");
        }
    }
    text.push('.');
    text
}

fn times(report: &Report, backward: bool) -> Table {
    let features = &report.sweep.features;
    let mut header = vec!["tokens".to_string(), "softmax, ms".to_string()];
    header.extend(features.iter().map(|m| format!("M={m}, ms")));
    header.extend(features.iter().map(|m| format!("M={m}, times as fast")));
    let mut table = Table::new(header);
    for &t in &report.sweep.tokens {
        let ms =
            |implementation, features| report.point(implementation, t, features, backward).map(|p| p.timing.median_ms);
        let exact = ms(Implementation::SoftmaxFused, None);
        let favor: Vec<Option<f64>> = features.iter().map(|&m| ms(Implementation::FavorFused, Some(m))).collect();
        let shown = |x: Option<f64>| x.map_or_else(String::new, |x| format!("{x:.3}"));
        let mut row = vec![t.to_string(), shown(exact)];
        row.extend(favor.iter().map(|&x| shown(x)));
        row.extend(favor.iter().map(|&x| exact.zip(x).map_or_else(String::new, |(e, x)| format!("{:.2}", e / x))));
        table.push(row);
    }
    table
}

fn crossovers(report: &Report) -> Table {
    let mut table = Table::new(["pass and features", "tokens, measured", "tokens, by operations", "ratio"]);
    for c @ Crossover { features, backward, tokens, by_flop, ahead_at_once } in &report.crossovers {
        if !report.sweep.backward && c.backward {
            continue;
        }
        let measured = match tokens {
            Some(tokens) => format!("{tokens:.0}"),
            None if *ahead_at_once => "below all measured".into(),
            None => "above all measured".into(),
        };
        let ratio = tokens.map_or_else(String::new, |t| format!("{:.2}", t / by_flop));
        table.push([format!("{}, M={features}", attention::pass(*backward)), measured, format!("{by_flop:.0}"), ratio]);
    }
    table
}

fn chart(report: &Report, passes: &[bool]) -> Chart {
    let mut series = Vec::new();
    for (&backward, color) in passes.iter().zip([Color::Blue, Color::Vermillion]) {
        let pass = attention::pass(backward);
        let mut features: Vec<f64> = report.sweep.features.iter().map(|&m| m as f64).collect();
        features.sort_by(f64::total_cmp);
        let measured = found(report, backward);
        let counted = report.crossovers.iter().filter(|c| c.backward == backward);
        let counted: Vec<(f64, f64)> = counted.map(|c| (c.features as f64, c.by_flop)).collect();
        if let Some(slope) = slope(&measured) {
            let line = features.iter().map(|&m| (m, slope * m));
            let name = format!("{pass}: fit, T = {slope:.1}·M");
            series.push(Series { style: Style::Solid, color: Some(color), ..Series::new(name, line) });
        }
        series.push(Series {
            style: Style::Points,
            color: Some(color),
            ..Series::new(format!("{pass}: measured"), measured)
        });
        let name = format!("{pass}: as many operations");
        series.push(Series { style: Style::Dotted, color: Some(color), ..Series::new(name, counted) });
    }
    Chart {
        title: "Where FAVOR+ overtakes softmax".into(),
        subtitle: Some(report.machine.at_work(report.threads)),
        x: Axis::new("random features M", Scale::Log2),
        y: Axis::new("sequence length T (tokens)", Scale::Log2),
        series,
        ..Chart::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fit_is_the_mean_ratio() {
        assert_eq!(slope(&[]), None);
        let fitted = slope(&[(10.0, 40.0), (100.0, 900.0)]).unwrap_or_default();
        assert!((fitted - 6.0).abs() < 1e-12, "{fitted}");
    }

    #[test]
    fn a_small_grid_answers_for_the_published_context() -> Result<()> {
        let sweep = Sweep {
            tokens: vec![16, 160],
            features: vec![8, 16],
            head_dim: 8,
            batch: 1,
            heads: 1,
            causal: true,
            composed: false,
            softmax: true,
            backward: true,
            gates: false,
            windows: false,
        };
        let effort = Effort { time: std::time::Duration::ZERO, runs: 1 };
        let found = run(&sweep, &Device::Cpu, 1, effort, |_| ())?;
        assert_eq!(found.sections.len(), 3);
        assert!(found.sections[1].text[0].starts_with("At the 80 tokens"), "{:?}", found.sections[1].text);
        let rows = &found.sections[1].table.as_ref().map(|table| table.rows.clone()).unwrap_or_default();
        assert_eq!(rows.iter().map(|row| &row[0][..]).collect::<Vec<_>>(), ["16", "80", "160"]);
        for section in &found.sections {
            assert!(section.chart.as_ref().is_some_and(|(_, chart)| chart.to_svg().is_ok()));
        }
        Ok(())
    }
}

//! This module draws what a comparison measured: the loss over the tokens of training, over the
//! positions of the context, and beside that of the first attention at the same positions.

#[cfg(feature = "cli")]
use std::path::Path;
use std::path::PathBuf;

use anyhow::Result;

use super::{Outcome, Summary, names};
use crate::{
    plot::{At, Axis, Chart, Marker, Scale, Series},
    train::{Record, Report, read_log},
};

/// Draws validation loss against training tokens: for each attention the mean over seeds, with the
/// range as a band. `folders` has the folder of each run. A run whose log is gone is left out.
pub(super) fn loss(outcome: &Outcome, folders: &[PathBuf]) -> Result<Chart> {
    let (names, shared) = names(outcome);
    let mut series = Vec::new();
    for (summary, name) in outcome.summary.iter().zip(names) {
        let logs: Vec<Vec<Record>> = outcome
            .runs
            .iter()
            .zip(folders)
            .filter(|(run, _)| run.attention_spec == summary.attention_spec)
            .map(|(_, folder)| folder.join("metrics.jsonl"))
            // Somebody may have removed a log that was damaged; the run's result needs none.
            .filter(|log| log.exists())
            .map(|log| read_log(&log))
            .collect::<Result<_>>()?;
        let curves: Vec<Vec<(f64, f64)>> = logs.iter().map(|log| validation_curve(log)).collect();
        series.push(Series::over_seeds(name, &curves));
    }
    Ok(Chart {
        title: format!("Validation loss on {}", outcome.corpus),
        subtitle: Some(subtitle(outcome, "; without the first quarter", &shared)),
        x: Axis::new("training tokens", Scale::Linear),
        y: Axis::new("validation loss (nats per token)", Scale::Linear),
        series: series.into_iter().map(without_first_quarter).collect(),
        ..Chart::default()
    })
}

/// Returns the points of validation loss against training tokens of the run in a folder.
///
/// # Errors
/// If its log cannot be read.
#[cfg(feature = "cli")]
pub(crate) fn loss_of_run(folder: &Path) -> Result<Vec<(f64, f64)>> {
    Ok(validation_curve(&read_log(&folder.join("metrics.jsonl"))?))
}

/// Draws validation loss against training tokens on a corpus: a curve for each run, which comes
/// with its name.
#[cfg(feature = "cli")]
pub(crate) fn loss_of_runs(corpus: &str, runs: &[(&str, &[(f64, f64)])]) -> Chart {
    let curve = |(name, points): &(&str, &[(f64, f64)])| without_first_quarter(Series::new(*name, points.to_vec()));
    Chart {
        title: format!("Validation loss on {corpus}"),
        subtitle: Some("without the first quarter".into()),
        x: Axis::new("training tokens", Scale::Linear),
        y: Axis::new("validation loss (nats per token)", Scale::Linear),
        series: runs.iter().map(curve).collect(),
        ..Chart::default()
    }
}

/// Draws loss against the position in the window, to twice the context where positions reach so
/// far. Returns `None` if the runs have no such measurement.
pub(super) fn positions(outcome: &Outcome) -> Option<Chart> {
    by_position(outcome, format!("Loss by position on {}", outcome.corpus), "loss (nats per token)", |run| {
        Some(run.loss_by_position.iter().map(|p| (p.until as f64, p.loss)).collect())
    })
}

/// Draws loss against the position less that of the first attention there, of the run with the same
/// seed: how hard the text is differs from place to place by more than attentions do. Returns
/// `None` if there is one attention, or if the runs have no such measurement.
pub(super) fn beside(outcome: &Outcome) -> Option<Chart> {
    let [first, _, ..] = &outcome.summary[..] else { return None };
    let title = format!("Loss by position on {}, less that of {}", outcome.corpus, names(outcome).0[0]);
    by_position(outcome, title, "difference of losses (nats per token)", |run| {
        less_that_of(&first.attention_spec, run, &outcome.runs)
    })
}

/// Returns the loss of a run at each position less that of the run of `attention` with the same
/// seed, if there is one.
fn less_that_of(attention: &str, run: &Report, runs: &[Report]) -> Option<Vec<(f64, f64)>> {
    let base = runs.iter().find(|base| base.attention_spec == attention && base.seed == run.seed)?;
    let pairs = run.loss_by_position.iter().zip(&base.loss_by_position);
    Some(pairs.map(|(run, base)| (run.until as f64, run.loss - base.loss)).collect())
}

/// Draws a curve over positions for each attention, from those of its runs.
fn by_position(
    outcome: &Outcome,
    title: String,
    quantity: &str,
    curve: impl Fn(&Report) -> Option<Vec<(f64, f64)>>,
) -> Option<Chart> {
    let (names, shared) = names(outcome);
    let of_attention = |(summary, name): (&Summary, String)| {
        let runs = outcome.runs.iter().filter(|run| run.attention_spec == summary.attention_spec);
        Series::over_seeds(name, &runs.filter_map(&curve).collect::<Vec<_>>())
    };
    let series: Vec<Series> = outcome.summary.iter().zip(names).map(of_attention).collect();
    series.iter().any(|s| !s.points.is_empty()).then(|| Chart {
        title,
        subtitle: Some(subtitle(outcome, "", &shared)),
        x: Axis::new("position in the window (tokens)", Scale::Linear),
        y: Axis::new(quantity, Scale::Linear),
        series,
        lines: vec![Marker { at: At::X(outcome.config.context as f64), label: "context in training".into() }],
    })
}

/// Returns the names of the attentions in a chart, and what all of them have.
fn names(outcome: &Outcome) -> (Vec<String>, String) {
    names::short(&outcome.summary.iter().map(|summary| summary.attention_spec.as_str()).collect::<Vec<_>>())
}

/// Says what was measured, with a remark; what all attentions have comes last, since a long line is
/// cut.
fn subtitle(outcome: &Outcome, remark: &str, shared: &str) -> String {
    let seeds = outcome.summary.iter().map(|s| s.seeds.len()).max().unwrap_or(0);
    let config = &outcome.config;
    let all_have = if shared.is_empty() { String::new() } else { format!("; all with {shared}") };
    format!(
        "{} layers, dim {}, context {}; mean of {seeds} seed(s), band: smallest to largest{remark}{all_have}",
        config.layers, config.hidden_size, config.context
    )
}

/// Drops the first quarter of a curve: the steep fall at the beginning would flatten the
/// differences at the end.
fn without_first_quarter(mut series: Series) -> Series {
    let end = series.points.last().map_or(0.0, |p| p.0);
    let skip = series.points.iter().take_while(|p| p.0 < end / 4.0).count();
    series.points.drain(..skip);
    if let Some(band) = &mut series.band {
        band.drain(..skip);
    }
    series
}

/// Returns the points of validation loss against tokens. They are quick validations, which read the
/// same beginning of the held-out text; the one of all held-out text at the end is taken only where
/// no quick one was made there, since another part of a text may be easier.
fn validation_curve(log: &[Record]) -> Vec<(f64, f64)> {
    let validations = log.iter().filter(|record| record.val_loss.is_some());
    let is_quick_there = |tokens: u64| validations.clone().any(|r| r.tokens == tokens && r.whole != Some(true));
    let taken = validations.clone().filter(|r| r.whole != Some(true) || !is_quick_there(r.tokens));
    taken.filter_map(|r| r.val_loss.map(|loss| (r.tokens as f64, loss))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{compare::summary::tests::report, train::PositionLoss};

    /// The loss over all held-out text is no point of a curve over its beginning, unless nothing
    /// else was measured there.
    #[test]
    fn a_curve_is_over_one_text() {
        let at = |step: usize, val_loss: Option<f64>, whole: Option<bool>| Record {
            step,
            epoch: 0,
            tokens: 10 * step as u64,
            train_loss: None,
            learning_rate: None,
            gradient_norm: None,
            val_loss,
            whole,
        };
        let mut log = vec![at(1, Some(3.0), Some(false)), at(2, None, None), at(2, Some(1.0), Some(true))];
        assert_eq!(validation_curve(&log), [(10.0, 3.0), (20.0, 1.0)]);
        log.insert(2, at(2, Some(2.0), Some(false)));
        assert_eq!(validation_curve(&log), [(10.0, 3.0), (20.0, 2.0)]);
    }

    #[test]
    fn a_run_stands_beside_the_one_of_its_seed() {
        let with = |spec: &str, seed: u64, losses: [f64; 2]| Report {
            loss_by_position: vec![
                PositionLoss { until: 8, loss: losses[0] },
                PositionLoss { until: 16, loss: losses[1] },
            ],
            ..report(spec, seed, 1.0)
        };
        let runs = [
            with("softmax", 1, [3.0, 2.0]),
            with("favor:m=8", 2, [5.5, 5.0]),
            with("softmax", 2, [4.0, 4.0]),
            with("favor:m=8", 3, [1.0, 1.0]),
        ];
        assert_eq!(less_that_of("softmax", &runs[1], &runs), Some(vec![(8.0, 1.5), (16.0, 1.0)]));
        assert_eq!(less_that_of("softmax", &runs[3], &runs), None, "no run has its seed");
    }
}

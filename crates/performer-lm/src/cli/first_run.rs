//! The run that comes with the program: softmax, trained on the sample with the settings of a first
//! run, so that whoever trains one Performer sees what softmax does with the same text and time.

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::train::{Report, RunKey};

/// What `scripts/first_run.py` made of a run.
const SOFTMAX: &str = include_str!("../../assets/first-run.json");

/// A run whose model is not at hand: its report, its curve, and a story by it.
#[derive(Debug, Deserialize)]
pub(super) struct Recorded {
    /// The report, with the key and the revision of the program that made it.
    pub(super) report: Report,
    /// Validation loss over tokens of training.
    pub(super) curve: Vec<(f64, f64)>,
    /// What the model wrote at the end of its training.
    pub(super) story: String,
}

/// Returns the run that comes with the program, if a run with `report` differs from it in its
/// attention and in nothing else but the revision.
///
/// # Errors
/// If the keys cannot be compared.
pub(super) fn beside(report: &Report) -> Result<Option<Recorded>> {
    let recorded: Recorded =
        serde_json::from_str(SOFTMAX).context("cannot read the run that comes with the program")?;
    let (Some(key), Some(of)) = (&report.key, &recorded.report.key) else { return Ok(None) };
    let of = RunKey { revision: key.revision.clone(), ..of.clone() };
    Ok(key.differs_in_attention_alone(&of)?.then_some(recorded))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_shown_beside_runs_that_differ_in_their_attention_alone() -> Result<()> {
        let recorded: Recorded = serde_json::from_str(SOFTMAX)?;
        assert!(recorded.curve.len() > 10 && recorded.story.starts_with("Once upon a time"), "{recorded:?}");
        let with = |attention: &str, seed: u64| -> Result<Report> {
            let mut report = recorded.report.clone();
            let key = report.key.as_mut().context("the report has no key")?;
            key.model = key.model.clone().with_attention(&attention.parse().map_err(anyhow::Error::msg)?)?;
            (key.seed, key.revision) = (seed, "another".into());
            Ok(report)
        };
        assert!(beside(&with("favor", 42)?)?.is_some());
        assert!(beside(&with("favor", 43)?)?.is_none());
        assert!(beside(&with("softmax", 42)?)?.is_none());
        Ok(())
    }
}

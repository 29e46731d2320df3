//! This module computes the learning rate over a run, as a pure function of the step: nothing needs
//! to be saved to resume.

use anyhow::{Context, Result, anyhow, ensure};
use serde::{Deserialize, Serialize};
use std::f64::consts::PI;
use std::str::FromStr;

/// `Schedule` says how the learning rate changes between the first and the last step.
///
/// As text (command line) it is a name, optionally followed by `:key=value,...` as in
/// `one-cycle:warmup_fraction=0.1,div=10`. Names, keys and defaults are those of the serialised
/// form, where the name is the `kind`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Schedule {
    /// One cycle (Smith & Topin, <https://arxiv.org/abs/1708.07120>), with the phases and numbers
    /// of PyTorch's `OneCycleLR` without momentum cycling: a half cosine from `peak / div` up to
    /// `peak`, then one down to `peak / div / final_div`.
    OneCycle {
        /// The part of the run in which the rate rises. Default 0.3; the peak is at step
        /// `warmup_fraction · total − 1`.
        #[serde(default = "default_warmup_fraction")]
        warmup_fraction: f64,
        /// The peak divided by the first learning rate. Default 25.
        #[serde(default = "default_div")]
        div: f64,
        /// The first learning rate divided by the last. Default 10⁴.
        #[serde(default = "default_final_div")]
        final_div: f64,
    },
    /// A straight line that reaches the peak at step `warmup_steps`, then a half cosine down to
    /// `min_fraction · peak`.
    WarmupCosine {
        /// Number of steps before the peak. Default 100.
        #[serde(default = "default_warmup_steps")]
        warmup_steps: usize,
        /// The last learning rate divided by the peak. Default 0.1.
        #[serde(default = "default_min_fraction")]
        min_fraction: f64,
    },
    /// The learning rate is always the peak.
    Constant,
}

fn default_warmup_fraction() -> f64 {
    0.3
}

fn default_div() -> f64 {
    25.0
}

fn default_final_div() -> f64 {
    1e4
}

fn default_warmup_steps() -> usize {
    100
}

fn default_min_fraction() -> f64 {
    0.1
}

impl Default for Schedule {
    fn default() -> Self {
        Self::OneCycle {
            warmup_fraction: default_warmup_fraction(),
            div: default_div(),
            final_div: default_final_div(),
        }
    }
}

impl Schedule {
    /// Returns the learning rate of `step` (from zero) in a run of `total` steps; steps past the
    /// last keep its value.
    pub fn lr(&self, peak: f64, step: usize, total: usize) -> f64 {
        let last = total.saturating_sub(1) as f64;
        let step = (step as f64).min(last);
        match *self {
            Self::OneCycle { warmup_fraction, div, final_div } => {
                let first = peak / div;
                let top = warmup_fraction * total as f64 - 1.0;
                if step <= top {
                    half_cosine(first, peak, step, top)
                } else {
                    half_cosine(peak, first / final_div, step - top, last - top)
                }
            }
            Self::WarmupCosine { warmup_steps, min_fraction } => {
                let top = warmup_steps as f64;
                if step < top {
                    peak * (step + 1.0) / (top + 1.0)
                } else {
                    half_cosine(peak, peak * min_fraction, step - top, last - top)
                }
            }
            Self::Constant => peak,
        }
    }

    /// Checks what the types cannot express.
    ///
    /// # Errors
    /// If `warmup_fraction` or `min_fraction` lies outside of 0 to 1, or `div` or `final_div` is
    /// below 1.
    pub fn validate(&self) -> Result<()> {
        match *self {
            Self::OneCycle { warmup_fraction, div, final_div } => {
                ensure!(
                    (0.0..=1.0).contains(&warmup_fraction),
                    "warmup_fraction {warmup_fraction} must lie between 0 and 1"
                );
                for (name, value) in [("div", div), ("final_div", final_div)] {
                    ensure!(value >= 1.0, "{name} {value} must be at least 1");
                }
            }
            Self::WarmupCosine { min_fraction, .. } => {
                ensure!((0.0..=1.0).contains(&min_fraction), "min_fraction {min_fraction} must lie between 0 and 1")
            }
            Self::Constant => {}
        }
        Ok(())
    }
}

/// Interpolates from `start` at `position` 0 to `end` at `length`; a phase without length is at its
/// end.
fn half_cosine(start: f64, end: f64, position: f64, length: f64) -> f64 {
    let progress = if length > 0.0 { position / length } else { 1.0 };
    end + (start - end) / 2.0 * (1.0 + (PI * progress).cos())
}

impl FromStr for Schedule {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (kind, settings) = text.split_once(':').unwrap_or((text, ""));
        let mut fields = serde_json::Map::from_iter([("kind".to_owned(), kind.into())]);
        for setting in settings.split(',').filter(|s| !s.is_empty()) {
            let (key, value) = setting
                .split_once('=')
                .with_context(|| format!("schedule setting `{setting}` is not of the form key=value"))?;
            let value = serde_json::from_str(value)
                .with_context(|| format!("schedule setting `{key}` takes a number, got `{value}`"))?;
            ensure!(
                fields.insert(key.to_owned(), value).is_none(),
                "schedule setting `{key}` is given twice, in `{text}`; give it once"
            );
        }
        ensure!(kind != "constant" || fields.len() == 1, "schedule `constant` takes no settings");
        let schedule: Self = serde_json::from_value(fields.into())
            .map_err(|error| anyhow!("`{text}` is not a learning-rate schedule: {error}"))?;
        schedule.validate()?;
        Ok(schedule)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn close(actual: f64, expected: f64) {
        let relative = (actual - expected).abs() / expected.abs();
        assert!(relative < 1e-9, "{actual} is not {expected}");
    }

    #[test]
    fn one_cycle_is_pytorchs() {
        // With peak 1 and total 10, the peak is at step 0.3·10 − 1 = 2, the end at step 9; cos(π/2)
        // = 0 half-way up and cos(3.5π/7) = 0 half-way down would be at step 5.5, so steps 5 and 6
        // are 3/7 and 4/7 of the way.
        let lr = |step| Schedule::default().lr(1.0, step, 10);
        let (first, last) = (0.04, 0.04 / 1e4);
        close(lr(0), first);
        close(lr(1), (first + 1.0) / 2.0);
        close(lr(2), 1.0);
        close(lr(5), last + (1.0 - last) / 2.0 * (1.0 + (3.0 * PI / 7.0).cos()));
        close(lr(5), 0.611_262_021_936_289_3);
        close(lr(5) + lr(6), 1.0 + last);
        close(lr(9), last);
        close(lr(10), last);
        close(lr(1_000_000), last);
        close(Schedule::default().lr(2e-3, 2, 10), 2e-3);
    }

    #[test]
    fn one_cycle_peaks_between_steps_where_the_fraction_says_so() {
        // With total 15, the peak is at 3.5, so step 3 is 3/3.5 of the way up and step 4 is
        // 0.5/10.5 of the way down.
        let lr = |step| Schedule::default().lr(1.0, step, 15);
        close(lr(3), 1.0 - 0.96 / 2.0 * (1.0 + (PI * 6.0 / 7.0).cos()));
        close(lr(4), 4e-6 + (1.0 - 4e-6) / 2.0 * (1.0 + (PI / 21.0).cos()));
    }

    #[test]
    fn warmup_cosine_climbs_straight_peaks_and_ends_at_its_minimum() {
        let schedule = Schedule::WarmupCosine { warmup_steps: 4, min_fraction: 0.1 };
        let lr = |step| schedule.lr(2.0, step, 11);
        for (step, expected) in [(0, 0.4), (1, 0.8), (3, 1.6), (4, 2.0), (7, 1.1), (10, 0.2), (99, 0.2)] {
            close(lr(step), expected);
        }
    }

    #[test]
    fn runs_of_no_or_one_step_and_empty_phases_are_finite() {
        let no_warmup = Schedule::OneCycle { warmup_fraction: 0.0, div: 25.0, final_div: 1e4 };
        let all_warmup = Schedule::OneCycle { warmup_fraction: 1.0, div: 25.0, final_div: 1e4 };
        let cosine = Schedule::WarmupCosine { warmup_steps: 0, min_fraction: 0.1 };
        for schedule in [Schedule::default(), no_warmup, all_warmup, cosine, Schedule::Constant] {
            for total in 0..5 {
                for step in 0..7 {
                    let lr = schedule.lr(1.0, step, total);
                    assert!(lr > 0.0 && lr <= 1.0, "{schedule:?} {step}/{total}: {lr}");
                }
            }
        }
        close(all_warmup.lr(1.0, 9, 10), 1.0);
        // As in PyTorch, a run of one step gets the end of the cycle.
        close(Schedule::default().lr(1.0, 0, 1), 4e-6);
    }

    #[test]
    fn text_and_json_agree() -> Result<()> {
        assert_eq!("one-cycle".parse::<Schedule>()?, Schedule::default());
        assert_eq!("constant".parse::<Schedule>()?, Schedule::Constant);
        let cosine: Schedule = "warmup-cosine:warmup_steps=7,min_fraction=0".parse()?;
        let expected = Schedule::WarmupCosine { warmup_steps: 7, min_fraction: 0.0 };
        assert_eq!(cosine, expected);
        let json = serde_json::to_string(&cosine)?;
        assert_eq!(json, r#"{"kind":"warmup-cosine","warmup_steps":7,"min_fraction":0.0}"#);
        assert_eq!(serde_json::from_str::<Schedule>(&json)?, cosine);
        assert_eq!(serde_json::from_str::<Schedule>(r#"{"kind":"one-cycle"}"#)?, Schedule::default());
        Ok(())
    }

    #[test]
    fn bad_text_is_refused() {
        for text in [
            "",
            "cosine",
            "one-cycle:div",
            "one-cycle:div=x",
            "one-cycle:speed=1",
            "one-cycle:warmup_fraction=1.5",
            "one-cycle:div=0",
            "one-cycle:div=10,div=20",
            "constant:div=2",
            "one-cycle:kind=3",
        ] {
            assert!(text.parse::<Schedule>().is_err(), "`{text}` was accepted");
        }
    }
}

//! This experiment measures how well random features approximate softmax attention (`lab error`).
//!
//! It goes from the published figure to single kernel entries, on Gaussian inputs of several scales
//! and on the heads of a model. Errors are those of `performer-core`'s own feature maps, in f64.

mod bias;
mod charts;
mod estimator;
mod figure;
mod kernel;
mod maps;
mod problem;
mod set;
mod spread;
mod theory;
mod unsigned;
mod worth;

use anyhow::{Result, ensure};
use serde_json::json;

pub(super) use charts::{COLORS, number};
pub(super) use estimator::Estimator;
pub(super) use problem::{Errors, Problem};
pub(super) use set::{QUERIES, Set};

use super::{Findings, Heads};
use crate::errors::Cause;

/// The most draws of one measurement, which are counted together with its problems.
pub(super) const MOST_DRAWS: usize = 1 << 24;

/// A `Plan` says what to measure, and how thoroughly.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Lengths `L` of the published figure; all other Gaussian inputs have the first.
    pub tokens: Vec<usize>,
    /// Head dimension `D` of Gaussian inputs.
    pub head_dim: usize,
    /// Numbers of rows `M` of the published figure.
    pub features: Vec<usize>,
    /// The most features of any map in comparisons at equal feature dimension.
    pub most_features: usize,
    /// Number of draws of Ω for errors of attention.
    pub draws: usize,
    /// Number of draws of Ω for errors of kernel entries.
    pub kernel_draws: usize,
    /// Seed of inputs and draws.
    pub seed: u64,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            tokens: vec![1024, 4096],
            head_dim: 16,
            features: vec![16, 32, 64, 128, 256, 512],
            most_features: 1024,
            draws: 15,
            kernel_draws: 20_000,
            seed: 42,
        }
    }
}

impl Plan {
    /// Makes a plan that takes seconds instead of minutes: enough to see that everything works, not
    /// to draw conclusions.
    pub fn quick() -> Self {
        Self {
            tokens: vec![128],
            features: vec![16, 64],
            most_features: 256,
            draws: 3,
            kernel_draws: 100,
            ..Self::default()
        }
    }

    /// Refuses a plan that would measure nothing.
    ///
    /// # Errors
    /// If a setting is too small or empty; the message names it, its value and what it must be.
    pub fn check(&self) -> Result<()> {
        ensure!(!self.tokens.is_empty(), "tokens names no length; give at least one, such as 1024");
        ensure!(!self.features.is_empty(), "features names no number; give at least one, such as 128");
        for (name, value, least) in [
            ("tokens", self.tokens.iter().min(), 16),
            ("features", self.features.iter().min(), 2),
            ("head_dim", Some(&self.head_dim), 2),
            ("draws", Some(&self.draws), 2),
            ("kernel_draws", Some(&self.kernel_draws), 2),
        ] {
            let value = value.copied().unwrap_or(0);
            ensure!(value >= least, Cause::setting("", name, value, format_args!("at least {least}")));
        }
        for (name, value) in [("draws", self.draws), ("kernel_draws", self.kernel_draws)] {
            ensure!(value <= MOST_DRAWS, Cause::setting("", name, value, format_args!("at most {MOST_DRAWS}")));
        }
        Ok(())
    }
}

/// Runs all measurements; `progress` is called with what comes next. `heads` are the heads of a
/// model, measured beside Gaussian inputs.
///
/// # Errors
/// If the plan measures nothing.
pub fn run(plan: &Plan, heads: Option<&Heads>, progress: &dyn Fn(&str)) -> Result<Findings> {
    plan.check()?;
    // The curves and the smallest number that suffices are read in ascending order.
    let mut plan = plan.clone();
    plan.features.sort_unstable();
    plan.features.dedup();
    let plan = &plan;
    let gaussian = Set::gaussian("unit Gaussian", plan.tokens[0], plan.head_dim, 1.0, plan.seed)?;
    let on_heads = heads.map(Heads::set).transpose()?;

    let (mut sections, figure) = figure::published(plan, progress)?;
    progress("a factor of 2π too many");
    let (more, two_pi) = figure::two_pi(plan)?;
    sections.extend(more);
    progress("kernel entries over the logits' scale");
    let (section, kernel) = kernel::entries(plan)?;
    sections.push(section);
    progress("orthogonal rows and their signs");
    let (section, orthogonality) = kernel::orthogonality(plan)?;
    sections.push(section);
    let (section, unsigned) = bias::unsigned(plan)?;
    sections.push(section);
    let (more, maps) = maps::compare(plan, &gaussian, on_heads.as_ref(), progress)?;
    sections.extend(more);
    progress("what is worth it");
    let layers = heads.map(Heads::layers);
    let judged = on_heads.as_ref().zip(layers.as_deref());
    let (section, verdicts, worth) = worth::table(plan, &gaussian, judged)?;
    sections.insert(0, section);

    let mut summary = vec![format!(
        "Errors of random features against exact softmax attention, {} draws each; Gaussian inputs have D={} and L={}.",
        plan.draws, plan.head_dim, plan.tokens[0]
    )];
    summary.extend(heads.map(Heads::describe));
    summary.extend(verdicts);
    let data = json!({
        "draws": plan.draws, "head_dim": plan.head_dim, "seed": plan.seed, "model": heads.map(Heads::json),
        "figure": figure, "two_pi": two_pi, "kernel": kernel, "orthogonality": orthogonality, "unsigned": unsigned,
        "maps": maps, "worth": worth,
    });
    Ok(Findings {
        name: "error",
        title: "How well random features approximate softmax attention".into(),
        summary,
        sections,
        data,
    })
}

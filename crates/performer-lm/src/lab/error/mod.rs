//! How well random features approximate softmax attention (`lab error`).
//!
//! From the published figure to single kernel entries, on Gaussian inputs of several scales and on the heads of a model. Errors are those of
//! `performer-core`'s own feature maps, in f64.

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

/// What to measure, and how long.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Lengths `L` of the published figure; the first is that of every other Gaussian input.
    pub tokens: Vec<usize>,
    /// Head dimension `D` of Gaussian inputs.
    pub head_dim: usize,
    /// Rows `M` of the published figure.
    pub features: Vec<usize>,
    /// The most features of any map in comparisons at equal feature dimension.
    pub most_features: usize,
    /// Draws of Ω for errors of attention.
    pub draws: usize,
    /// Draws of Ω for errors of kernel entries.
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
    /// Seconds instead of minutes: enough to see that all works, not to conclude from.
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

    /// Refuses what measures nothing.
    ///
    /// # Errors
    /// Names the option, what it is and what it must be.
    pub fn check(&self) -> Result<()> {
        ensure!(!self.tokens.is_empty(), "--tokens names no length; give at least one, such as 1024");
        ensure!(!self.features.is_empty(), "--features names no number; give at least one, such as 128");
        for (option, value, least) in [
            ("--tokens", self.tokens.iter().min(), 16),
            ("--features", self.features.iter().min(), 2),
            ("--head-dim", Some(&self.head_dim), 2),
            ("--draws", Some(&self.draws), 2),
            ("--kernel-draws", Some(&self.kernel_draws), 2),
        ] {
            let value = value.copied().unwrap_or(0);
            ensure!(value >= least, "{option} is {value}; it must be at least {least}");
        }
        Ok(())
    }
}

/// Measures all; `progress` is told what comes next. `heads`: a model's, to be measured beside Gaussian inputs.
///
/// # Errors
/// A plan that measures nothing.
pub fn run(plan: &Plan, heads: Option<&Heads>, progress: &dyn Fn(&str)) -> Result<Findings> {
    plan.check()?;
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

//! This module is the command `performer-lm lab crossover`.

use std::time::Duration;

use anyhow::{Context, Result};

use super::Common;
use crate::{
    bench::{Effort, attention::Sweep},
    cli::{args::Machine, bench::ShapeArgs, output},
    device::kind,
    lab::{Findings, crossover},
};

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm lab crossover --out report/crossover
  performer-lm lab crossover --tokens 128,256,512,1024,2048 --features 16,64 --head-dim 32")]
pub(in crate::cli) struct Args {
    /// Sequence lengths, besides the 80 of the published experiment.
    #[arg(long, value_delimiter = ',', default_value = "64,128,256,512,1024,2048,4096")]
    tokens: Vec<usize>,
    /// Random features M.
    #[arg(long, value_delimiter = ',', default_value = "16,32,64,128,256")]
    features: Vec<usize>,
    #[command(flatten)]
    shape: ShapeArgs,
    /// Measure each point for at least so many milliseconds.
    #[arg(long, default_value_t = 200)]
    milliseconds: u64,
    #[command(flatten)]
    pub(super) common: Common,
}

impl Args {
    pub(super) fn run(self, machine: &Machine) -> Result<Findings> {
        let sweep = Sweep {
            tokens: self.tokens,
            features: self.features,
            head_dim: self.shape.head_dim,
            batch: self.shape.batch,
            heads: self.shape.heads,
            causal: !self.shape.bidirectional,
            composed: false,
            softmax: true,
            backward: true,
            gates: false,
            windows: false,
        };
        let effort = Effort { time: Duration::from_millis(self.milliseconds), runs: 3 };
        crossover::run(&sweep, &machine.device, machine.threads, effort, |what| output::note(&what))
    }
}

/// Runs the experiment in a process of its own. It measures one operation at a time on all threads,
/// other experiments run passes side by side, and a process sets up its threads for one of the two.
pub(super) fn apart(machine: &Machine, quick: bool) -> Result<Findings> {
    let program = std::env::current_exe().context("cannot find this program to start it again")?;
    let mut command = std::process::Command::new(program);
    command.args(["lab", "crossover", "--json", "--threads", &machine.threads.to_string()]);
    command.args(["--device", kind(&machine.device)]);
    if quick {
        command.args(["--tokens", "64,256", "--features", "16", "--milliseconds", "1"]);
    }
    let done = command.stderr(std::process::Stdio::inherit()).output().context("cannot start lab crossover")?;
    anyhow::ensure!(done.status.success(), "lab crossover failed ({})", done.status);
    let mut data: serde_json::Value = serde_json::from_slice(&done.stdout).context("lab crossover printed no JSON")?;
    crossover::from_data(data["crossover"].take())
}

//! This module is the command `performer-lm lab`: experiments on FAVOR+, each with a short table,
//! charts and a page.

mod ablate;
mod all;
mod crossover;
mod error;
mod suggest;
mod tasks;

use std::{path::PathBuf, sync::Arc, time::Instant};

use anyhow::{Context, Error, Result};
use clap::Subcommand;
use serde_json::{Map, Value};

use super::{STOP, args::Machine, output};
use crate::{
    data::DataSpec,
    lab::{self, Findings, Heads, Provenance, Source},
    train::{Grid, agreed, led},
};

#[derive(Subcommand)]
#[command(after_help = "\
Examples:
  performer-lm lab error --out runs/error                   a page with charts
  performer-lm lab tasks --task copying --attention softmax --attention favor:m=64
  performer-lm lab all --quick --out report                 minutes: to see that it works")]
pub(super) enum Command {
    /// Measure how well random features approximate softmax attention.
    Error(error::Args),
    /// Find the smallest features that keep a model's attention within an error, layer by layer.
    Suggest(suggest::Args),
    /// Find the length from which FAVOR+ is faster than softmax on this machine.
    Crossover(crossover::Args),
    /// Learn small tasks with several attentions under equal conditions.
    Tasks(tasks::Args),
    /// Train one small model with one thing changed at a time: what closes the gap to softmax?
    Ablate(ablate::Args),
    /// Run error, crossover, tasks and ablate, and make one report; hours.
    All(all::Args),
}

impl Command {
    /// Whether several processes can share the trainings that the command makes. `lab all` makes
    /// trainings too, but runs in one process.
    pub(super) fn is_shared(&self) -> bool {
        matches!(self, Self::Tasks(_) | Self::Ablate(_))
    }

    /// Returns the names under which the report has what the command finds.
    fn experiments(&self) -> &'static [&'static str] {
        match self {
            Self::Error(_) => &["error"],
            Self::Suggest(_) => &["suggest"],
            Self::Crossover(_) => &["crossover"],
            Self::Tasks(_) => &["tasks"],
            Self::Ablate(_) => &["ablate"],
            Self::All(_) => &["error", "crossover", "tasks", "ablate"],
        }
    }

    /// Whether the command runs one operation at a time, on all threads.
    pub(super) fn is_one_at_a_time(&self) -> bool {
        matches!(self, Self::Crossover(_))
    }
}

pub(super) fn run(command: Command, machine: &Machine) -> Result<()> {
    let begun = Instant::now();
    let common = match &command {
        Command::Error(args) => &args.common,
        Command::Suggest(args) => &args.common,
        Command::Crossover(args) => &args.common,
        Command::Tasks(args) => &args.common,
        Command::Ablate(args) => &args.common,
        Command::All(args) => &args.common,
    };
    let common = common.clone();
    // What cannot be written is found out now, and not after hours.
    let ranks = Grid::new(Arc::clone(&machine.ranks), 1)?;
    led(&ranks, || common.out.as_deref().map_or(Ok(()), |out| lab::check(out, command.experiments())))?;
    let findings = match command {
        Command::Error(args) => vec![args.run(machine)?],
        Command::Suggest(args) => vec![args.run(machine)?],
        Command::Crossover(args) => vec![args.run(machine)?],
        Command::Tasks(args) => vec![args.run(machine, &STOP)?],
        Command::Ablate(args) => vec![args.run(machine, &STOP)?],
        Command::All(args) => args.run(machine)?,
    };
    if ranks.leads() { common.finish(machine, begun, &findings) } else { Ok(()) }
}

/// Refuses several processes without a folder in which they find each other's runs.
fn require_folder(ranks: &Grid, common: &Common) -> Result<()> {
    let text = "several processes need a folder for their runs, which all of them see: give it by --out";
    agreed(ranks, if ranks.world().size() > 1 && common.out.is_none() { Err(Error::msg(text)) } else { Ok(()) })
}

/// The text that a model's heads are looked at on.
#[derive(clap::Args)]
struct Text {
    /// Text for the model: auto, tinystories, sample, a text file, or a folder with train.txt and
    /// valid.txt [default: sample].
    #[arg(long)]
    data: Option<String>,
    /// Tokens of a window [default: the model's context, at most 512 unless its positions are
    /// learned].
    #[arg(long)]
    context: Option<usize>,
    /// Windows of held-out text that errors are measured on [default: 2].
    #[arg(long)]
    windows: Option<usize>,
    /// Training tokens that features are fitted to [default: 16384].
    #[arg(long)]
    calibrate_tokens: Option<usize>,
    /// Seed of inputs and draws.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

impl Text {
    /// Returns the data as the command line spells it.
    fn spec(&self) -> &str {
        self.data.as_deref().unwrap_or("sample")
    }

    fn heads(&self, model: &str, machine: &Machine) -> Result<Heads> {
        let data: DataSpec = self.spec().parse()?;
        output::note(&format!("the heads of {model} on {}", self.spec()));
        let source = Source {
            model: model.into(),
            data,
            context: self.context,
            windows: self.windows.unwrap_or(2),
            calibrate_tokens: self.calibrate_tokens.unwrap_or(16_384),
            seed: self.seed,
        };
        Heads::read(&source, &machine.device, &output::TERMINAL).with_context(|| format!("cannot look into {model}"))
    }
}

/// Where findings go.
#[derive(Clone, clap::Args)]
pub(super) struct Common {
    /// Folder for data.json, charts and report.html.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Print all numbers as JSON.
    #[arg(long)]
    json: bool,
}

impl Common {
    fn finish(&self, machine: &Machine, begun: Instant, findings: &[Findings]) -> Result<()> {
        let provenance = Provenance::this(&machine.device, machine.threads, begun.elapsed().as_secs_f64());
        if let Some(out) = &self.out {
            lab::save(out, &provenance, findings)?;
            output::note(&format!("report in {}", out.join("report.html").display()));
        }
        if self.json {
            let data: Map<String, Value> = findings.iter().map(|f| (f.name.to_string(), f.data.clone())).collect();
            return output::json(&data);
        }
        for found in findings {
            // There is one blank line between all parts.
            let mut parts = vec![format!("# {}", found.title), found.summary.join("\n\n")];
            if let Some((section, table)) = found.sections.iter().find_map(|s| Some((s, s.table.as_ref()?))) {
                let header: Vec<&str> = table.header.iter().map(String::as_str).collect();
                parts.push(format!("## {}", section.title));
                parts.extend(section.text.iter().cloned());
                parts.push(output::table(&header, &table.rows));
            }
            output::result(&parts.join("\n\n"))?;
        }
        if self.out.is_none() && findings.iter().any(|found| found.sections.len() > 1) {
            output::note("--out FOLDER writes the other tables and the charts, as a page");
        }
        Ok(())
    }
}

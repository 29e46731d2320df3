//! `performer-lm lab`: experiments on FAVOR+, each with a short table, charts and a page.

use std::{path::PathBuf, time::Instant};

use anyhow::{Context, Result};
use clap::Subcommand;
use performer_core::FeatureMapKind;
use serde_json::{Map, Value};

use super::{args::Machine, output};
use crate::{
    data::DataSpec,
    lab::{self, Findings, Heads, Provenance, Source, error, suggest},
};

#[derive(Subcommand)]
pub(super) enum Command {
    /// Measure how well random features approximate softmax attention.
    Error(ErrorArgs),
    /// Find the smallest features that keep a model's attention within an error, layer by layer.
    Suggest(SuggestArgs),
    /// Run every experiment and make one report.
    All(AllArgs),
}

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm lab error --out runs/error
  performer-lm lab error --quick
  performer-lm lab error --checkpoint SmolLM2-135M.gguf --data book.txt --context 256 --out runs/error")]
pub(super) struct ErrorArgs {
    /// Seconds instead of minutes: to see that it works, not to conclude from.
    #[arg(long)]
    quick: bool,
    /// Lengths of the published figure; the first is that of all Gaussian inputs [default: 1024,4096].
    #[arg(long, value_delimiter = ',')]
    tokens: Option<Vec<usize>>,
    /// Head dimension of Gaussian inputs [default: 16].
    #[arg(long)]
    head_dim: Option<usize>,
    /// Rows M of the published figure [default: 16,32,64,128,256,512].
    #[arg(long, value_delimiter = ',')]
    features: Option<Vec<usize>>,
    /// Draws of random features for errors of attention [default: 15].
    #[arg(long)]
    draws: Option<usize>,
    /// Draws for errors of kernel entries [default: 20000].
    #[arg(long)]
    kernel_draws: Option<usize>,
    /// A softmax model whose heads are measured beside Gaussian inputs, or none [default: the one that comes with the project].
    #[arg(long)]
    checkpoint: Option<String>,
    #[command(flatten)]
    text: Text,
    #[command(flatten)]
    common: Common,
}

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm lab suggest --checkpoint runs/small-softmax-seed42 --data stories/ --error 0.15
  performer-lm lab suggest --checkpoint stories260K.bin --data stories/ --window 32 --criterion output --error 0.1 --json")]
pub(super) struct SuggestArgs {
    /// The softmax model: checkpoint folder, Hugging Face folder or hub id, llama2.c .bin, or .gguf file.
    #[arg(long)]
    checkpoint: String,
    /// The error to meet, from 0 to 1.
    #[arg(long, default_value_t = 0.1)]
    error: f64,
    /// Which error.
    #[arg(long, value_enum, default_value_t = suggest::Criterion::Rows)]
    criterion: suggest::Criterion,
    /// Maps to choose from; fitted ones are centred, as `convert` does.
    #[arg(long, value_delimiter = ',', default_value = "dense,optimal")]
    map: Vec<FeatureMapKind>,
    /// Tokens of exact attention before the features.
    #[arg(long)]
    window: Option<usize>,
    /// Most features to try.
    #[arg(long, default_value_t = 1024)]
    most_features: usize,
    /// Draws of random features that errors are averaged over.
    #[arg(long, default_value_t = 5)]
    draws: usize,
    #[command(flatten)]
    text: Text,
    #[command(flatten)]
    common: Common,
}

#[derive(clap::Args)]
pub(super) struct AllArgs {
    /// A few minutes instead of an hour: to see that it works, not to conclude from.
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    common: Common,
}

/// The text that a model's heads are looked at on.
#[derive(clap::Args)]
struct Text {
    /// Text for the model: auto, tinystories, sample, a text file, or a folder with train.txt and valid.txt.
    #[arg(long, default_value = "sample")]
    data: String,
    /// Tokens of a window [default: the model's context, at most 512].
    #[arg(long)]
    context: Option<usize>,
    /// Windows of held-out text that errors are measured on.
    #[arg(long, default_value_t = 2)]
    windows: usize,
    /// Training tokens that features are fitted to.
    #[arg(long, default_value_t = 16_384)]
    calibrate_tokens: usize,
    /// Seed of inputs and draws.
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

impl Text {
    fn heads(&self, model: &str, machine: &Machine) -> Result<Heads> {
        let data: DataSpec = self.data.parse()?;
        output::note(&format!("the heads of {model} on {}", self.data));
        let source = Source {
            model: model.into(),
            data,
            context: self.context,
            windows: self.windows,
            calibrate_tokens: self.calibrate_tokens,
            seed: self.seed,
        };
        Heads::read(&source, &machine.device).with_context(|| format!("cannot look into {model}"))
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

pub(super) fn run(command: Command, machine: &Machine) -> Result<()> {
    let begun = Instant::now();
    let (common, findings) = match command {
        Command::Error(args) => (args.common.clone(), vec![args.run(machine)?]),
        Command::Suggest(args) => (args.common.clone(), vec![args.run(machine)?]),
        Command::All(args) => (args.common.clone(), args.run(machine)?),
    };
    common.finish(machine, begun, &findings)
}

impl ErrorArgs {
    fn run(self, machine: &Machine) -> Result<Findings> {
        let mut plan = if self.quick { error::Plan::quick() } else { error::Plan::default() };
        fn change<T>(setting: &mut T, value: Option<T>) {
            if let Some(value) = value {
                *setting = value;
            }
        }
        change(&mut plan.tokens, self.tokens);
        change(&mut plan.head_dim, self.head_dim);
        change(&mut plan.features, self.features);
        change(&mut plan.draws, self.draws);
        change(&mut plan.kernel_draws, self.kernel_draws);
        plan.seed = self.text.seed;
        plan.check()?;
        let model = match self.checkpoint.as_deref() {
            Some("none") => None,
            Some(model) => Some(model.to_string()),
            None => lab::shipped().map(|path| path.display().to_string()),
        };
        if model.is_none() {
            output::note("no model: Gaussian inputs only (--checkpoint MODEL adds its heads)");
        }
        let heads = model.map(|model| self.text.heads(&model, machine)).transpose()?;
        error::run(&plan, heads.as_ref(), &|what| output::note(what))
    }
}

impl SuggestArgs {
    fn run(self, machine: &Machine) -> Result<Findings> {
        let plan = suggest::Plan {
            model: self.checkpoint.clone(),
            data: self.text.data.clone(),
            context: self.text.context,
            error: self.error,
            criterion: self.criterion,
            maps: self.map,
            window: self.window,
            most_features: self.most_features,
            draws: self.draws,
            seed: self.text.seed,
        };
        plan.check()?;
        let heads = self.text.heads(&self.checkpoint, machine)?;
        suggest::run(&plan, &heads, &|what| output::note(what))
    }
}

impl AllArgs {
    /// Every experiment with its defaults, one after the other.
    fn run(self, machine: &Machine) -> Result<Vec<Findings>> {
        Ok(vec![ErrorArgs { quick: self.quick, ..defaults()? }.run(machine)?])
    }
}

/// Arguments as they are when nothing is said.
fn defaults<A: clap::Args>() -> Result<A> {
    let command = A::augment_args(clap::Command::new("lab"));
    Ok(A::from_arg_matches(&command.try_get_matches_from(["lab"])?)?)
}

impl Common {
    fn finish(&self, machine: &Machine, begun: Instant, findings: &[Findings]) -> Result<()> {
        let provenance = Provenance::this(machine.threads, begun.elapsed().as_secs_f64());
        if let Some(out) = &self.out {
            lab::save(out, &provenance, findings)?;
            output::note(&format!("report in {}", out.join("report.html").display()));
        }
        if self.json {
            let data: Map<String, Value> = findings.iter().map(|f| (f.name.to_string(), f.data.clone())).collect();
            return output::json(&data);
        }
        for found in findings {
            // One blank line between all parts.
            let mut parts = vec![format!("# {}", found.title), found.summary.join("\n\n")];
            for section in &found.sections {
                let Some(table) = &section.table else { continue };
                let header: Vec<&str> = table.header.iter().map(String::as_str).collect();
                parts.push(format!("## {}", section.title));
                parts.extend(section.text.iter().cloned());
                parts.push(output::table(&header, &table.rows));
            }
            output::result(&parts.join("\n\n"))?;
        }
        Ok(())
    }
}

//! This module is the command `performer-lm lab suggest`.

use anyhow::Result;
use performer_core::FeatureMapKind;

use super::{Common, Text};
use crate::{
    cli::{args::Machine, output},
    lab::{Findings, suggest},
};

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm lab suggest --checkpoint runs/small-softmax-seed42 --data stories/ --error 0.15
  performer-lm lab suggest --checkpoint stories260K.bin --data stories/ --window 32 --criterion output --error 0.1 --json")]
pub(in crate::cli) struct Args {
    /// The softmax model: checkpoint folder, Hugging Face folder or hub id, llama2.c .bin, or .gguf
    /// file.
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
    pub(super) common: Common,
}

impl Args {
    pub(super) fn run(self, machine: &Machine) -> Result<Findings> {
        let plan = suggest::Plan {
            model: self.checkpoint.clone(),
            data: self.text.spec().to_string(),
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

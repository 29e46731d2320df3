//! This module is the command `performer-lm lab ablate`.

use std::{
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
};

use anyhow::{Result, ensure};

use super::Common;
use crate::{
    cli::{
        args::{DataArgs, Machine},
        compare::LONGEST_RUN,
        output,
    },
    config::{ModelConfig, Preset, TrainingConfig},
    lab::{
        Findings,
        ablate::{self, Plan},
    },
    train::{Grid, in_turn},
    unfinished::Scratch,
};

/// Default size of the tokenizer's vocabulary. A small vocabulary spells words, which asks more of
/// attention, and its output head costs little: at 4,096 tokens and an equal number of training
/// tokens, attentions do not differ yet.
const VOCABULARY: usize = 512;

/// Number of sequences in a pass.
const MICRO_BATCH: usize = 4;

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm lab ablate --data stories/ --out report/ablate
  performer-lm lab ablate --data stories/ --preset small --steps 1000 --seeds 1,2,3 --out report/ablate

With --out, finished runs are kept there, and the same command again goes on where a stopped one left off.")]
pub(in crate::cli) struct Args {
    #[command(flatten)]
    pub(super) data: DataArgs,
    /// Model and training settings to start from.
    #[arg(long, value_enum, default_value_t = Preset::Seed)]
    preset: Preset,
    /// Tokens a sequence.
    #[arg(long, default_value_t = 256)]
    context: usize,
    /// Sequences a step.
    #[arg(long, default_value_t = 16)]
    batch_size: usize,
    /// Optimiser steps of every run.
    #[arg(long, default_value_t = 1000)]
    pub(super) steps: usize,
    /// Seeds to repeat each with.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    seeds: Vec<u64>,
    /// Numbers of features on the curves; single changes are made at the middle one.
    #[arg(long, value_delimiter = ',', default_value = "16,64,256")]
    pub(super) features: Vec<usize>,
    #[command(flatten)]
    pub(super) common: Common,
}

impl Args {
    pub(super) fn run(self, machine: &Machine, stop: &AtomicBool) -> Result<Findings> {
        ensure!(self.steps > 0, "--steps is 0; it must be at least 1");
        let (config, training) = self.preset.load()?;
        let training = TrainingConfig {
            batch_size: self.batch_size,
            micro_batch: MICRO_BATCH.min(self.batch_size),
            // There are as many epochs as the steps can need.
            epochs: self.steps,
            max_steps: Some(self.steps),
            eval_every: 0,
            save_every: 0,
            ..training
        };
        let config = ModelConfig { context: self.context, vocab_size: VOCABULARY, ..config };
        config.validate()?;
        training.validate()?;
        let ranks = Grid::new(Arc::clone(&machine.ranks), 1)?;
        let data = in_turn(&ranks, || self.data.prepare(config.vocab_size))?;
        machine.ranks.set_deadline(LONGEST_RUN);
        let scratch;
        let runs: PathBuf = match &self.common.out {
            Some(out) => out.join("runs"),
            None => {
                super::require_folder(&ranks, &self.common)?;
                scratch = Scratch::new("the runs")?;
                scratch.path().to_path_buf()
            }
        };
        let plan = Plan {
            config,
            training,
            seeds: self.seeds,
            features: self.features,
            runs: &runs,
            is_kept: self.common.out.is_some(),
            data: Some(self.data.spec().resolved()),
            device: machine.device.clone(),
            threads: machine.threads,
            stop,
            listener: &output::TERMINAL,
            ranks,
        };
        ablate::run(&plan, &data, |what| output::note(&what))
    }
}

//! This module is the command `performer-lm lab tasks`.

use std::{
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
};

use anyhow::{Result, bail, ensure};

use super::Common;
use crate::{
    cli::{args::Machine, compare::LONGEST_RUN, output},
    config::AttentionPattern,
    lab::{
        Findings,
        tasks::{self, ATTENTIONS, Plan, Task},
    },
    train::Grid,
};

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm lab tasks --out report/tasks                     copying, recall, MQAR and ListOps: no files needed
  performer-lm lab tasks --text war_and_peace.txt --proteins proteome.fasta --out report/tasks
  performer-lm lab tasks --task listops --length 2000           ListOps at the lengths of Long Range Arena
  performer-lm lab tasks --task mqar --length 256 --pairs 16    recall in the setting of Zoology
  performer-lm lab tasks --task recall --attention softmax --attention favor:m=256

With --out, finished runs are kept there, and the same command again goes on where a stopped one left off.")]
pub(in crate::cli) struct Args {
    /// A task; give it several times [default: all whose files are given].
    #[arg(long, value_enum)]
    task: Vec<Task>,
    /// An attention to compare; give it several times. The first is what the others are held
    /// against.
    #[arg(long, default_values = ATTENTIONS)]
    attention: Vec<AttentionPattern>,
    /// Seeds to repeat each with.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    pub(super) seeds: Vec<u64>,
    /// A long text for the task text; give it several times.
    #[arg(long)]
    pub(super) text: Vec<PathBuf>,
    /// Protein sequences for the task protein, in FASTA.
    #[arg(long)]
    pub(super) proteins: Option<PathBuf>,
    /// Size of an example, with one --task: symbols to copy, pairs to recall, tokens of mqar, the
    /// longest expression, bytes of context, residues of a window.
    #[arg(long)]
    length: Option<usize>,
    /// Pairs of keys and values in a sequence of mqar [default: 4].
    #[arg(long)]
    pairs: Option<usize>,
    /// Optimiser steps [default: the task's].
    #[arg(long)]
    pub(super) steps: Option<usize>,
    /// Peak learning rate, the same for all attentions [default: the task's].
    #[arg(long)]
    learning_rate: Option<f64>,
    #[command(flatten)]
    pub(super) common: Common,
}

impl Args {
    pub(super) fn run(self, machine: &Machine, stop: &AtomicBool) -> Result<Findings> {
        let tasks = if self.task.is_empty() {
            let given = |task: Task| match task {
                Task::Text => !self.text.is_empty(),
                Task::Protein => self.proteins.is_some(),
                _ => true,
            };
            let (tasks, left): (Vec<Task>, Vec<Task>) = Task::ALL.into_iter().partition(|&task| given(task));
            for task in left {
                output::note(&format!("without {task}, for it needs a file: see --help"));
            }
            tasks
        } else {
            self.task
        };
        let files =
            [("--text", Task::Text, !self.text.is_empty()), ("--proteins", Task::Protein, self.proteins.is_some())];
        if let Some((option, task, _)) = files.iter().find(|(_, task, given)| *given && !tasks.contains(task)) {
            bail!("{option} belongs to the task {task}, which --task leaves out");
        }
        let without = |task: Task, given: bool| tasks.contains(&task) && !given;
        ensure!(!without(Task::Text, !self.text.is_empty()), "the task text reads a text: give --text FILE");
        ensure!(
            !without(Task::Protein, self.proteins.is_some()),
            "the task protein reads protein sequences: give --proteins FILE.fasta"
        );
        let ranks = Grid::new(Arc::clone(&machine.ranks), 1)?;
        super::require_folder(&ranks, &self.common)?;
        machine.ranks.set_deadline(LONGEST_RUN);
        tasks::run(&Plan {
            tasks,
            attentions: self.attention,
            seeds: self.seeds,
            texts: self.text,
            proteins: self.proteins,
            length: self.length,
            pairs: self.pairs,
            steps: self.steps,
            learning_rate: self.learning_rate,
            device: machine.device.clone(),
            threads: machine.threads,
            stop,
            listener: &output::TERMINAL,
            out: self.common.out.as_deref(),
            ranks,
        })
    }
}

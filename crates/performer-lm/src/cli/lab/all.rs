//! This module is the command `performer-lm lab all`.

use std::path::PathBuf;

use anyhow::{Context, Result};

use super::{Common, ablate, crossover, error, tasks};
use crate::{
    cli::{STOP, args::Machine, output},
    data::{Corpus, DataSpec},
    lab::{self, Findings},
};

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm lab all --out report                             the longest command there is
  performer-lm lab all --data stories/ --text war_and_peace.txt --proteins proteome.fasta --out report
  performer-lm lab all --quick --out report                     minutes: to see that it works

With --out, finished trainings are kept there, and the same command again goes on where a stopped one left off.")]
pub(in crate::cli) struct Args {
    /// A few minutes: to see that it works, not to conclude from.
    #[arg(long)]
    quick: bool,
    /// Text to train on, and to look at heads with: auto, tinystories, sample, a text file, or a
    /// folder with train.txt and valid.txt.
    #[arg(long, default_value = "auto")]
    data: DataSpec,
    /// A long text for the task text; give it several times.
    #[arg(long)]
    text: Vec<PathBuf>,
    /// Protein sequences for the task protein, in FASTA.
    #[arg(long)]
    proteins: Option<PathBuf>,
    #[command(flatten)]
    pub(super) common: Common,
}

impl Args {
    /// Runs the experiments with their defaults, or briefly with `--quick`, one after the other.
    /// `lab suggest`, which needs a model to be named, is not among them.
    pub(super) fn run(self, machine: &Machine) -> Result<Vec<Findings>> {
        // What cannot be read is found out now, and not after the first experiments.
        for path in self.text.iter().chain(&self.proteins) {
            std::fs::File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
        }
        Corpus::load(&self.data, &output::TERMINAL).context("cannot prepare the text")?;
        let part = |name: &str| {
            output::note(&format!("== {name}"));
            Common { out: self.common.out.as_ref().map(|out| out.join(name)), json: false }
        };
        let stop = &STOP;
        // Trainings are kept in --out, so they come first: a stop loses none of what took long.
        let common = part("tasks");
        let mut tasks: tasks::Args = defaults()?;
        (tasks.text, tasks.proteins, tasks.common) = (self.text.clone(), self.proteins.clone(), common);
        if self.quick {
            (tasks.steps, tasks.seeds) = (Some(3), vec![1]);
        }
        let tasks = tasks.run(machine, stop)?;
        let common = part("ablate");
        let mut ablate: ablate::Args = defaults()?;
        (ablate.data.data, ablate.common) = (Some(self.data.clone()), common);
        if self.quick {
            (ablate.steps, ablate.features) = (3, vec![4, 8]);
        }
        let ablate = ablate.run(machine, stop)?;
        part("error");
        let mut error: error::Args = defaults()?;
        // Only heads of a model are measured on text, and where the model that comes with the
        // project is not there, none are.
        let data = lab::shipped().map(|_| self.data.to_string());
        (error.quick, error.text.data) = (self.quick, data);
        let error = error.run(machine)?;
        part("crossover");
        let crossover = crossover::apart(machine, self.quick)?;
        Ok(vec![error, crossover, tasks, ablate])
    }
}

/// Returns arguments with their default values.
fn defaults<A: clap::Args + clap::FromArgMatches>() -> Result<A> {
    let command = A::augment_args(clap::Command::new("lab"));
    Ok(A::from_arg_matches(&command.try_get_matches_from(["lab"])?)?)
}

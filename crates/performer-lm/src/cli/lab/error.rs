//! This module is the command `performer-lm lab error`.

use anyhow::{Result, bail};

use super::{Common, Text};
use crate::{
    cli::{args::Machine, output},
    lab::{self, Findings, error},
};

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm lab error --out runs/error
  performer-lm lab error --quick
  performer-lm lab error --checkpoint SmolLM2-135M.gguf --data book.txt --context 256 --out runs/error")]
pub(in crate::cli) struct Args {
    /// Seconds instead of minutes: to see that it works, not to conclude from.
    #[arg(long)]
    pub(super) quick: bool,
    /// Lengths of the published figure; the first is that of all Gaussian inputs [default:
    /// 1024,4096].
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
    /// A softmax model whose heads are measured beside Gaussian inputs, or none [default: the one
    /// that comes with the project].
    #[arg(long)]
    checkpoint: Option<String>,
    #[command(flatten)]
    pub(super) text: Text,
    #[command(flatten)]
    pub(super) common: Common,
}

impl Args {
    pub(super) fn run(self, machine: &Machine) -> Result<Findings> {
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
            let text = &self.text;
            let given = [
                ("--data", text.data.is_some()),
                ("--context", text.context.is_some()),
                ("--windows", text.windows.is_some()),
                ("--calibrate-tokens", text.calibrate_tokens.is_some()),
            ];
            if let Some((option, _)) = given.iter().find(|(_, is_given)| *is_given) {
                bail!("{option} belongs to the heads of a model, and there is none: give one by --checkpoint");
            }
            output::note("no model: Gaussian inputs only (--checkpoint MODEL adds its heads)");
        }
        let heads = model.map(|model| self.text.heads(&model, machine)).transpose()?;
        error::run(&plan, heads.as_ref(), &|what| output::note(what))
    }
}

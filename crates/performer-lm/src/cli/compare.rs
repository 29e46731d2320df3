//! This module is the command `performer-lm compare`.

use std::{
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use anyhow::{Result, bail};

use super::{
    args::{DataArgs, Machine, RecipeArgs},
    output,
    train::few_steps,
};
use crate::{
    compare::{Comparison, Outcome, Summary},
    config::AttentionPattern,
    errors::Cause,
    eval::show_perplexity,
    revision::command_line,
    train::{Grid, agreed, in_turn, training_batches},
};

/// How long processes wait for the one whose runs take longest: a week. Where a process dies, its
/// launcher ends the others.
pub(super) const LONGEST_RUN: Duration = Duration::from_secs(7 * 24 * 3600);

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm compare
  performer-lm compare --attention softmax --attention favor:m=64 --attention favor:m=128 --seeds 1,2,3
  performer-lm compare --preset small --epochs 1 --out runs/small --json
  performer-lm compare --attention softmax --attention favor-gated --learning-rates 1e-3,3e-3,6e-3 --seeds 1,2,3
  mpirun -n 4 performer-lm compare --seeds 1,2,3,4      four processes, each with runs of its own

The same command again goes on where a stopped one left off.")]
pub(super) struct Args {
    /// An attention to compare; give it several times. The first is what the others are measured
    /// against. A+B/n, as in favor-gated+softmax/4, has B in every n-th layer and A in the others;
    /// in A+B/first, the first layer has B.
    #[arg(long, default_values = ["softmax", "favor"])]
    attention: Vec<AttentionPattern>,
    /// Seeds to repeat each with.
    #[arg(long, value_delimiter = ',', default_value = "42")]
    seeds: Vec<u64>,
    /// Peak learning rates to choose from: each attention is trained with each of them at the first
    /// seed, and the rate of the lowest validation loss is used for all seeds.
    ///
    /// Results are then of the test split: test.txt in the folder of the data, or else the second
    /// half of the held-out text.
    #[arg(long, value_delimiter = ',', conflicts_with = "learning_rate")]
    learning_rates: Vec<f64>,
    #[command(flatten)]
    recipe: RecipeArgs,
    #[command(flatten)]
    data: DataArgs,
    /// Folder for compare.json, table.md, the runs, and three charts as SVG and PNG: loss (over
    /// training), positions (the loss over positions of the context) and beside (the same, less
    /// that of the first attention).
    #[arg(long, default_value = "runs/compare")]
    out: PathBuf,
    /// Print the outcome as JSON.
    #[arg(long)]
    json: bool,
}

impl Args {
    /// How many forward passes the command runs side by side.
    pub(super) fn passes(&self) -> usize {
        self.recipe.passes(Some(&self.data.spec()))
    }
}

pub(super) fn run(mut args: Args, machine: &Machine, stop: &AtomicBool) -> Result<()> {
    if let Some(rate) = args.learning_rates.iter().find(|rate| !(rate.is_finite() && **rate > 0.0)) {
        bail!(Cause::setting("", "learning_rates", rate, "numbers above 0"));
    }
    if let [rate] = args.learning_rates[..] {
        args.recipe.learning_rate = Some(rate);
        args.learning_rates.clear();
    }
    let (config, training) = args.recipe.load(machine)?;
    args.recipe.require_use(args.attention.iter().flat_map(AttentionPattern::attentions))?;
    let ranks = Grid::new(Arc::clone(&machine.ranks), 1)?;
    let data = in_turn(&ranks, || {
        if args.learning_rates.len() > 1 {
            args.data.prepare_with_test(config.vocab_size)
        } else {
            args.data.prepare(config.vocab_size)
        }
    })?;
    machine.ranks.set_deadline(LONGEST_RUN);
    output::note(&format!("training on {}", data.description));
    let (config, training) = args.recipe.for_data(&data, config, training, &args.learning_rates);
    let comparison = Comparison {
        config,
        training,
        attentions: args.attention,
        seeds: args.seeds,
        learning_rates: args.learning_rates,
        out: &args.out,
        data: Some(args.data.spec().resolved()),
        device: machine.device.clone(),
        threads: machine.threads,
        stop,
        listener: &output::TERMINAL,
        ranks: ranks.clone(),
        command: command_line(),
    };
    let batches = agreed(&ranks, training_batches(&comparison.config, &comparison.training, &data))?;
    let steps = comparison.training.epochs.saturating_mul(batches.batches_per_epoch());
    let steps = comparison.training.max_steps.map_or(steps, |most| most.min(steps));
    output::note(&format!("{} run(s) of {} steps each", comparison.runs(), output::thousands(steps as u64)));
    few_steps(steps, &comparison.training).iter().for_each(|text| output::note(text));
    let outcome = comparison.run(&data)?;
    if !ranks.leads() {
        return Ok(());
    }
    let table = table(&outcome);
    crate::files::write(&args.out.join("table.md"), format!("{table}\n").as_bytes())?;
    output::note(&format!("saved compare.json, table.md and the charts in {}", args.out.display()));
    for tried in outcome.rates_at_the_edge() {
        output::note(&format!(
            "warning: the best learning rate of {} is {}, at the edge of those tried: try others beyond it",
            tried.attention_spec, tried.learning_rate
        ));
    }
    if args.json { output::json(&outcome) } else { output::result(&table) }
}

fn table(outcome: &Outcome) -> String {
    // Losses are those of the test split where there is one.
    let tested = outcome.summary.iter().all(|s| s.test.is_some());
    let chosen = !outcome.learning_rates.is_empty();
    let mut header = vec![
        "attention",
        if tested { "test loss (nats/token)" } else { "val loss (nats/token)" },
        "perplexity",
        "vs first",
        "bits/byte",
        "features off",
        "parameters",
        "state bytes",
        "s/epoch",
        "tokens/s",
    ];
    if chosen {
        header.insert(1, "rate");
    }
    let rows: Vec<Vec<String>> = outcome.summary.iter().map(|s| row(s, chosen)).collect();
    let mut notes = format!(
        "state: what decoding keeps of one sequence of {} tokens, in f32; one that grows with every token has a +",
        outcome.config.context
    );
    if outcome.summary.len() > 1 {
        notes += "\nvs first: perplexity beside that of the first attention";
    }
    if outcome.summary.iter().any(|s| s.features_off.is_some()) {
        notes +=
            "\nfeatures off: loss of the same trained model with its window alone, or means of the values without one";
    }
    if outcome.summary.iter().any(|s| s.seeds.len() > 1) {
        notes += "\n±: standard deviation over the seeds";
    }
    if chosen {
        notes += "\nrate: the peak learning rate of the lowest validation loss at the first seed; the other figures are of \
                  text by which nothing was chosen";
    }
    let threads = outcome.runs.first().map_or(1, |r| r.threads);
    format!(
        "{}\n\n{notes}\n{}, {} seed(s), {}",
        output::table(&header, &rows),
        outcome.corpus,
        outcome.summary.iter().map(|s| s.seeds.len()).max().unwrap_or(0),
        outcome.machine.in_full(threads)
    )
}

/// Writes a gap in perplexity in per cent; by its power of ten where it is so large that more
/// digits say nothing.
fn show_gap(gap: f64) -> String {
    let percent = (100.0 * gap).min(f64::MAX);
    if percent < 1e6 { format!("{percent:+.1}%") } else { format!("{percent:+.1e}%") }
}

fn row(s: &Summary, chosen: bool) -> Vec<String> {
    let (loss, deviation, perplexity, bits_per_byte, off) = match &s.test {
        Some(test) => (test.loss, test.loss_std, test.perplexity, test.bits_per_byte, test.features_off),
        None => {
            let off = s.features_off.as_ref().map(|control| control.val_loss);
            (s.val_loss, s.val_loss_std, s.perplexity, s.bits_per_byte, off)
        }
    };
    let mut row = vec![
        s.attention_spec.clone(),
        if s.seeds.len() > 1 { format!("{loss:.4} ± {deviation:.4}") } else { format!("{loss:.4}") },
        show_perplexity(perplexity, 2),
        s.perplexity_gap.map_or_else(|| "–".into(), show_gap),
        format!("{bits_per_byte:.4}"),
        off.map_or_else(|| "–".into(), |loss| format!("{loss:.4}")),
        output::thousands(s.params as u64),
        output::thousands(s.state_bytes as u64) + if s.state_grows { " +" } else { "" },
        format!("{:.0}", s.epoch_seconds),
        output::thousands(s.tokens_per_second as u64),
    ];
    if chosen {
        row.insert(1, s.learning_rate.map_or_else(|| "–".into(), |rate| rate.to_string()));
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_of_any_size_are_numbers_of_few_digits() {
        assert_eq!([0.0133, -0.2].map(show_gap), ["+1.3%", "-20.0%"]);
        assert_eq!([3e9, 1e308].map(show_gap), ["+3.0e11%", "+1.8e308%"]);
    }
}

//! This module is the command `performer-lm compare`.

use std::{path::PathBuf, sync::atomic::AtomicBool};

use anyhow::Result;

use super::{
    args::{DataArgs, Machine, RecipeArgs},
    output,
};
use crate::{
    compare::{Comparison, Outcome},
    config::AttentionPattern,
    eval::show_perplexity,
};

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm compare
  performer-lm compare --attention softmax --attention favor:m=64 --attention favor:m=128 --seeds 1,2,3
  performer-lm compare --preset small --epochs 1 --out runs/small --json

The same command again goes on where a stopped one left off.")]
pub(super) struct Args {
    /// An attention to compare; give it several times. The first is what the others are measured
    /// against. A+B/n, as in favor-gated+softmax/4, has B in every n-th layer and A in the others.
    #[arg(long, default_values = ["softmax", "favor"])]
    attention: Vec<AttentionPattern>,
    /// Seeds to repeat each with.
    #[arg(long, value_delimiter = ',', default_value = "42")]
    seeds: Vec<u64>,
    #[command(flatten)]
    recipe: RecipeArgs,
    #[command(flatten)]
    data: DataArgs,
    /// Folder for compare.json, table.md, loss.svg, loss.png and the runs.
    #[arg(long, default_value = "runs/compare")]
    out: PathBuf,
    /// Print the outcome as JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args, machine: &Machine, stop: &AtomicBool) -> Result<()> {
    let (config, training) = args.recipe.load(machine)?;
    let data = args.data.prepare(config.vocab_size)?;
    output::note(&format!("training on {}", data.description));
    let training = args.recipe.for_data(&data, training);
    let words: Vec<String> = std::env::args().skip(1).collect();
    let comparison = Comparison {
        config,
        training,
        attentions: args.attention,
        seeds: args.seeds,
        out: &args.out,
        data: args.data.spec().to_string(),
        device: machine.device.clone(),
        threads: machine.threads,
        stop,
        listener: &output::TERMINAL,
        command: format!("performer-lm {}", words.join(" ")),
    };
    let outcome = comparison.run(&data)?;
    let table = table(&outcome);
    crate::files::write(&args.out.join("table.md"), format!("{table}\n").as_bytes())?;
    output::note(&format!("saved compare.json, table.md, loss.svg and loss.png in {}", args.out.display()));
    if args.json { output::json(&outcome) } else { output::result(&table) }
}

fn table(outcome: &Outcome) -> String {
    let rows: Vec<Vec<String>> = outcome
        .summary
        .iter()
        .map(|s| {
            vec![
                s.attention_spec.clone(),
                if s.seeds.len() > 1 {
                    format!("{:.4} ± {:.4}", s.val_loss, s.val_loss_std)
                } else {
                    format!("{:.4}", s.val_loss)
                },
                show_perplexity(s.perplexity, 2),
                format!("{:+.1}%", 100.0 * s.perplexity_gap),
                format!("{:.4}", s.bits_per_byte),
                s.features_off.as_ref().map_or_else(|| "–".into(), |control| format!("{:.4}", control.val_loss)),
                output::thousands(s.params as u64),
                output::thousands(s.state_bytes as u64) + if s.state_grows { " +" } else { "" },
                format!("{:.0}", s.epoch_seconds),
                output::thousands(s.tokens_per_second as u64),
            ]
        })
        .collect();
    let header = [
        "attention",
        "val loss (nats/token)",
        "perplexity",
        "vs first",
        "bits/byte",
        "features off",
        "parameters",
        "state bytes",
        "s/epoch",
        "tokens/s",
    ];
    let mut notes = format!(
        "state: what decoding keeps of one sequence of {} tokens, in f32; one that grows with every token has a +",
        outcome.config.context
    );
    if outcome.summary.iter().any(|s| s.features_off.is_some()) {
        notes +=
            "\nfeatures off: loss of the same trained model with its window alone, or means of the values without one";
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

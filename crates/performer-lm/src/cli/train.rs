//! This module is the command `performer-lm train`.

use std::{
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use anyhow::{Result, bail, ensure};

use super::{
    args::{DataArgs, Machine, RecipeArgs, require_another_folder},
    ending, output, paths,
};
use crate::{
    checkpoint::require_free,
    config::AttentionPattern,
    data::{Prepared, prepare, prepare_for},
    errors::Cause,
    eval::{guessing, is_worse_than_guessing, show_perplexity},
    model::pretrained::Pretrained,
    train::{Report, RunOptions, Trainer, default_out, saved_data},
};

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm train --attention favor
  performer-lm train --attention softmax --preset small --data tinystories
  performer-lm train --attention favor:m=64,radii=sqrt --seed 7 --out runs/mine
  performer-lm train --preset small --attention favor-window         an exact window before the features
  performer-lm train --preset small --attention softmax:window=32    its control: the window alone
  performer-lm train --preset small --attention favor-gated          forgets at a pace that it learns
  performer-lm train --preset small --attention uniform:gate         its control: the gate alone
  performer-lm train --preset small --attention favor-gated:conv     and mixes neighbouring tokens first
  performer-lm train --resume runs/mine
  performer-lm train --from runs/mine --max-steps 500 --learning-rate 1e-4 --out runs/more   on from its weights")]
pub(super) struct Args {
    /// softmax, or softmax:window=32 (the last 32 tokens alone); favor (FAVOR+), favor-learned (its
    /// features trained too) or favor-window (and exact to the last 32 tokens; in a first
    /// measurement features that are not trained did worse than that window alone), with settings:
    /// favor:m=128,map=positive,projection=orthogonal,radii=chi [default: the preset's, favor]. The
    /// setting gate, as in softmax:gate or favor-gated, adds forget gates; conv adds short
    /// convolutions of queries, keys and values; output-gate and output-norm scale what heads
    /// return. Controls: uniform (means of the values, without queries and keys) and none. sinks=4
    /// beside a window keeps the first four tokens visible. A hybrid A+B/n, as in
    /// favor-gated+softmax/4, has B in every n-th layer, A in the others.
    #[arg(long)]
    attention: Option<AttentionPattern>,
    #[command(flatten)]
    recipe: RecipeArgs,
    #[command(flatten)]
    data: DataArgs,
    /// Seed of weights, data order and random features.
    #[arg(long)]
    seed: Option<u64>,
    /// Folder for the checkpoint, metrics.jsonl and metrics.json [default: runs/ATTENTION-seedN].
    #[arg(long)]
    out: Option<PathBuf>,
    /// Go on with the run in this folder, with its own settings.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["attention", "preset", "config", "epochs", "max_steps", "batch_size", "micro_batch",
        "dtype", "context", "learning_rate", "schedule", "max_train_tokens", "dropout", "redraw_every", "fit_every", "eval_every", "save_every", "seed",
        "out", "vocab_size"])]
    resume: Option<PathBuf>,
    /// Begin a new run with the weights of this model and its tokenizer: a checkpoint folder of a
    /// finished run, say, to train it for more steps or at another rate; or a Hugging Face folder
    /// or hub id, llama2.c .bin, or .gguf file. Of a preset, the training settings are taken.
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["attention", "config", "vocab_size", "tokenizer", "resume"])]
    from: Option<String>,
    /// Replace what the folder holds.
    #[arg(long, conflicts_with = "resume")]
    overwrite: bool,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args, machine: &Machine, stop: &AtomicBool) -> Result<()> {
    if let Some(dir) = &args.resume {
        let saved = saved_data(dir)?;
        let (spec, spelt) = match &args.data.data {
            Some(spec) => (spec.clone(), spec.to_string()),
            None => (saved.spec, saved.spelt),
        };
        let data = match &args.data.tokenizer {
            Some(path) => prepare(&spec, 0, Some(path), &output::TERMINAL)?,
            None => prepare_for(&spec, &saved.tokenizer, &output::TERMINAL)?,
        };
        let trainer = Trainer::resume(&data, options(dir, &spelt, machine, stop))?;
        return finish(&args, trainer, &data, dir);
    }
    let mut weights = args.from.as_ref().map(|from| Pretrained::open_with(from, &output::TERMINAL)).transpose()?;
    let (mut model, mut training) = match &weights {
        Some(weights) => args.recipe.of_weights(weights.config.clone(), machine)?,
        None => args.recipe.load(machine)?,
    };
    if let Some(attention) = &args.attention {
        model = model.with_attention(attention)?;
    }
    training.seed = args.seed.unwrap_or(training.seed);
    let out = args.out.clone().unwrap_or_else(|| default_out(args.recipe.preset, &model, training.seed));
    if let Some(from) = &args.from {
        require_another_folder(from, &out)?;
    }
    if !args.overwrite {
        ensure!(
            !["train_state.json", "model.safetensors"].iter().any(|file| out.join(file).exists()),
            "{} holds a model already: go on with its training by --resume {0}, replace it by --overwrite, or choose another --out",
            out.display()
        );
        require_free(&out, &["metrics.json", "metrics.jsonl"])?;
    }
    let data = match &weights {
        Some(weights) => prepare_for(&args.data.spec(), &weights.tokenizer, &output::TERMINAL)?,
        None => args.data.prepare(model.vocab_size)?,
    };
    output::note(&format!("training on {}", data.description));
    let (suited, training) = args.recipe.for_data(&data, model.clone(), training);
    // Weights that are given keep the model that they were trained in.
    let model = if weights.is_some() { model } else { suited };
    let spec = args.data.spec().to_string();
    let options = options(&out, &spec, machine, stop);
    let trainer = match &mut weights {
        Some(weights) => {
            weights.config = model;
            Trainer::from_weights(weights, &training, &data, options)?
        }
        None => Trainer::new(&model, &training, &data, options)?,
    };
    finish(&args, trainer, &data, &out)
}

fn options<'a>(out: &'a Path, data: &'a str, machine: &Machine, stop: &'a AtomicBool) -> RunOptions<'a> {
    RunOptions {
        out,
        data,
        device: machine.device.clone(),
        threads: machine.threads,
        stop,
        samples: true,
        listener: &output::TERMINAL,
    }
}

fn finish(args: &Args, trainer: Trainer, data: &Prepared, out: &Path) -> Result<()> {
    let config = trainer.model().config();
    output::note(&format!(
        "{} attention, {} parameters, {} layers, dim {}, {} heads, context {}, vocabulary {}; {} steps of {} sequences",
        config.pattern(),
        output::thousands(trainer.model().parameter_count()? as u64),
        config.layers,
        config.hidden_size,
        config.heads,
        config.context,
        config.vocab_size,
        output::thousands(trainer.total_steps() as u64),
        trainer.training().batch_size,
    ));
    paths::warn(trainer.model(), true)?;
    let (used, all) = (trainer.tokens_per_epoch() as u64, data.train.len() as u64);
    output::note(&format!(
        "an epoch is {} of the {} training tokens{}",
        output::thousands(used),
        output::thousands(all),
        if used * 2 < all { " (--max-train-tokens 0 for all)" } else { "" }
    ));
    let vocabulary = config.vocab_size;
    let Some(report) = trainer.run()? else {
        let text = format!("stopped and saved; go on with: performer-lm train --resume {}", out.display());
        bail!(Cause::Stopped(text));
    };
    if args.json {
        output::json(&report)?
    } else {
        output::result(&table(&report))?
    }
    if is_worse_than_guessing(report.val_loss, vocabulary) {
        output::note(&format!(
            "saved in {}; its loss is above {:.4}, that of a guess among all {vocabulary} tokens: it has learned nothing (a lower \
             --learning-rate, or more steps)",
            out.display(),
            guessing(vocabulary)
        ));
        return Ok(());
    }
    ending::tell(out, &report, std::env::args())
}

fn table(r: &Report) -> String {
    let epochs: Vec<String> = r.epoch_seconds.iter().map(|s| format!("{s:.1}")).collect();
    let epochs = match &epochs[..] {
        [_, _, _, _, _, ..] => format!("{} ... {}", epochs[..2].join(" "), epochs[epochs.len() - 2..].join(" ")),
        _ => epochs.join(" "),
    };
    let grows = if r.state_grows { ", and grows with every token" } else { "" };
    let mut rows = vec![
        vec!["attention".into(), r.attention_spec.clone()],
        vec!["corpus".into(), r.corpus.clone()],
        vec!["parameters".into(), output::thousands(r.params as u64)],
        vec!["bytes of decoding state".into(), output::thousands(r.state_bytes as u64) + grows],
        vec!["tokens trained on".into(), output::thousands(r.tokens)],
        vec!["validation loss (nats/token)".into(), format!("{:.4}", r.val_loss)],
        vec!["perplexity".into(), show_perplexity(r.perplexity, 3)],
        vec!["bits/byte".into(), format!("{:.4}", r.bits_per_byte)],
        vec!["seconds per epoch".into(), epochs],
        vec!["tokens/s".into(), output::thousands(r.tokens_per_second as u64)],
    ];
    if let Some(test) = &r.test {
        rows.insert(8, vec!["test loss (nats/token)".into(), format!("{:.4}", test.loss)]);
        rows.insert(9, vec!["test perplexity".into(), show_perplexity(test.perplexity, 3)]);
    }
    if let Some(control) = &r.features_off {
        let what = format!("loss with features off ({})", control.attention_spec);
        rows.insert(8, vec![what, format!("{:.4}", control.val_loss)]);
    }
    output::table(&["", "value"], &rows)
}

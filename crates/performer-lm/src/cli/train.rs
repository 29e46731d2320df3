//! This module is the command `performer-lm train`.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use performer_dist::{Ranks, agree_on};

use super::{
    args::{DataArgs, Machine, RecipeArgs, require_another_folder},
    ending::Ending,
    output, paths,
};
use crate::{
    checkpoint::{MODEL, REPORTS, TrainingState, require_free},
    config::{AttentionPattern, ModelConfig, TrainingConfig},
    data::{DataSpec, Prepared, prepare, prepare_for},
    errors::Cause,
    eval::{guessing, is_worse_than_guessing},
    files::require_no_file,
    model::pretrained::Pretrained,
    revision::quoted,
    train::{
        Grid, RunOptions, Trainer, agreed, default_out, in_turn, is_begun, is_finished, led, saved_data, saved_passes,
    },
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
  performer-lm train --preset seed --attention favor --leak           what a forgotten causal mask measures
  performer-lm train --resume runs/mine
  mpirun -n 4 performer-lm train --attention favor       four processes, on one machine or several
  mpirun -n 4 performer-lm train --context 4096 --sequence-parallel 4    each has a quarter of every sequence
  performer-lm train --from runs/mine --max-steps 500 --learning-rate 1e-4 --out runs/more   on from its weights")]
pub(super) struct Args {
    /// softmax, or softmax:window=32 (the last 32 tokens alone); favor (FAVOR+), favor-learned (its
    /// features trained too) or favor-window (and exact to the last 32 tokens; compare it with a
    /// window of as many bytes, softmax:window=100 for heads of 32), with settings:
    /// favor:m=128,map=positive,projection=orthogonal,radii=chi [default: the preset's, which is
    /// favor-gated:conv, and favor for seed and published]. The setting gate, as in softmax:gate or
    /// favor-gated, adds forget gates; conv adds short convolutions of queries, keys and values;
    /// output-gate and output-norm scale what heads return; mup-scale divides logits by the head
    /// dimension in place of its square root; key-dim=16 gives queries and keys 16 dimensions a
    /// head, which map=taylor2 needs in large heads. Controls: uniform (means of the values,
    /// without queries and keys) and none. sinks=4 beside a window keeps the first four tokens
    /// visible. In a hybrid A+B/first, as in favor-gated+softmax/first, the first layer has B and
    /// the others have A; in A+B/n, as in favor-gated+softmax/4, every n-th has B. 'A|B' divides
    /// the heads of every layer: in 'favor:m=32|favor:m=224,gate' the first half has 32 features
    /// and the second 224, and all have gates.
    #[arg(long)]
    attention: Option<AttentionPattern>,
    #[command(flatten)]
    recipe: RecipeArgs,
    #[command(flatten)]
    data: DataArgs,
    /// Seed of weights, data order and random features.
    #[arg(long)]
    seed: Option<u64>,
    /// Folder for the checkpoint, metrics.jsonl and metrics.json [default:
    /// runs/PRESET-ATTENTION-seedN].
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
    /// Let every token see the whole sequence, the token that it is to predict too. This is a
    /// mistake, here to be measured: losses fall towards 0, and the model can generate nothing.
    #[arg(long, conflicts_with_all = ["resume", "from"])]
    leak: bool,
    /// Replace what the folder holds.
    #[arg(long, conflicts_with = "resume")]
    overwrite: bool,
    /// Cut each sequence over so many of the processes of mpirun, which must be a divisor of their
    /// number and of the context. For sequences whose activations one machine cannot hold: each
    /// process computes its part of the tokens. FAVOR exchanges as much in each layer however long
    /// the sequence is, a window as much as the window holds, and softmax all keys and values.
    #[arg(long, value_name = "N", default_value_t = 1)]
    sequence_parallel: usize,
    /// Seconds for which the processes of mpirun wait for each other: after that, all of them end.
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0)]
    deadline: f64,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
}

/// The longest time for which processes can be made to wait for each other: a year.
const MOST_PATIENT: Duration = Duration::from_secs(365 * 24 * 3600);

impl Args {
    /// How many forward passes the command runs side by side.
    pub(super) fn passes(&self) -> usize {
        match &self.resume {
            // Processes that share a sequence compute its passes one after the other.
            _ if self.sequence_parallel > 1 => 1,
            Some(dir) => saved_passes(dir).unwrap_or(usize::MAX),
            None => self.recipe.passes(self.from.is_none().then(|| self.data.spec()).as_ref()),
        }
    }
}

pub(super) fn run(args: Args, machine: &Machine, stop: &AtomicBool) -> Result<()> {
    let ranks = &grid(&machine.ranks, args.sequence_parallel)?;
    let deadline = Duration::try_from_secs_f64(args.deadline).ok().filter(|deadline| !deadline.is_zero());
    let deadline = deadline.filter(|deadline| *deadline <= MOST_PATIENT);
    let deadline = deadline.with_context(|| {
        format!("--deadline is {}; it must be above 0 and at most {}", args.deadline, MOST_PATIENT.as_secs())
    });
    let deadline = agreed(ranks, deadline)?;
    if let Some(dir) = &args.resume {
        let saved = agreed(ranks, saved_data(dir))?;
        let (named, spec) = match &args.data.data {
            Some(spec) => (Some(spec.clone()), Some(spec.clone())),
            None => (saved.named, saved.spec),
        };
        let spec = spec.with_context(|| {
            format!("{} does not say what data it was trained on: name them by --data", dir.display())
        });
        let spec = agreed(ranks, spec)?;
        let data = in_turn(ranks, || match &args.data.tokenizer {
            Some(path) => prepare(&spec, 0, Some(path), &output::TERMINAL),
            None => prepare_for(&spec, &saved.tokenizer, &output::TERMINAL),
        })?;
        ranks.set_deadline(deadline);
        // It has its report until it goes on.
        let finished = is_finished(dir);
        let trainer = Trainer::resume(&data, options(dir, named.as_ref(), machine, ranks, stop))?;
        let (step, all) = (trainer.step(), trainer.total_steps());
        let [step, all] = [step, all].map(|steps| output::thousands(steps as u64));
        output::note(&if finished {
            format!(
                "this run is finished, and is measured again; its model is trained further by --from {}",
                quoted(dir)
            )
        } else if step == all {
            format!("all {all} steps are taken: what is left is to measure the model")
        } else {
            format!("going on after step {step} of {all}")
        });
        return finish(&args, trainer, &data, dir);
    }
    let settings = in_turn(ranks, || settings(&args, machine))?;
    let Settings { mut weights, model, training, out } = settings;
    led(ranks, || require_no_file(&out))?;
    // Once the first of several processes has begun, the folder holds something.
    led(ranks, || if args.overwrite { Ok(()) } else { require_nothing_in(&out) })?;
    let data = in_turn(ranks, || match &weights {
        Some(weights) => prepare_for(&args.data.spec(), &weights.tokenizer, &output::TERMINAL),
        None => args.data.prepare(model.vocab_size),
    })?;
    ranks.set_deadline(deadline);
    // Another process may have trained there while the data was prepared.
    led(ranks, || if args.overwrite { Ok(()) } else { require_nothing_in(&out) })?;
    output::note(&format!("training on {}", data.description));
    // What suits a new model on the sample does not suit one that is trained already.
    let (model, training) = match &weights {
        Some(_) => (model, training),
        None => args.recipe.for_data(&data, model, training, &[]),
    };
    // A run goes on with the data that it began with, whatever `auto` finds by then.
    let spec = args.data.spec().resolved();
    let options = options(&out, Some(&spec), machine, ranks, stop);
    let trainer = match &mut weights {
        Some(weights) => {
            weights.config = model;
            Trainer::from_weights(weights, &training, &data, options)?
        }
        None => Trainer::new(&model, &training, &data, options)?,
    };
    finish(&args, trainer, &data, &out)
}

/// Lays out the processes: each sequence is divided among `segments` of them.
fn grid(ranks: &Arc<dyn Ranks>, segments: usize) -> Result<Grid> {
    let all = Grid::new(Arc::clone(ranks), 1)?;
    let size = ranks.size();
    let fits = || {
        ensure!(
            segments > 0,
            "--sequence-parallel is 0; it must be at least 1, which gives each process whole sequences"
        );
        ensure!(
            size.is_multiple_of(segments),
            "--sequence-parallel is {segments}, which does not divide the number of processes, {size}; start {segments} of \
             them: mpirun -n {segments} performer-lm train ..."
        );
        Ok(())
    };
    agreed(&all, fits())?;
    let differs =
        |first: &str, other: &str| format!("its --sequence-parallel is {other}, and that of rank 0 is {first}");
    match agree_on(&**ranks, &segments.to_string(), differs)? {
        Some(other) => Err(other.into()),
        None => Ok(Grid::new(Arc::clone(ranks), segments)?),
    }
}

/// What a new run is to be.
struct Settings {
    /// The trained model that it begins with, if its weights are not drawn at random.
    weights: Option<Pretrained>,
    model: ModelConfig,
    training: TrainingConfig,
    out: PathBuf,
}

fn settings(args: &Args, machine: &Machine) -> Result<Settings> {
    let weights = args.from.as_ref().map(|from| Pretrained::open_with(from, &output::TERMINAL)).transpose()?;
    let (mut model, mut training) = match &weights {
        Some(weights) => args.recipe.of_weights(weights.config.clone(), machine)?,
        None => args.recipe.load(machine)?,
    };
    if let Some(attention) = &args.attention {
        model = model.with_attention(attention)?;
    }
    args.recipe.require_use((0..model.layers).map(|layer| model.attention_of(layer)))?;
    model.leak |= args.leak;
    training.seed = args.seed.unwrap_or(training.seed);
    let out = args.out.clone().unwrap_or_else(|| default_out(args.recipe.preset, &model, training.seed));
    if let Some(from) = &args.from {
        require_another_folder(from, &out)?;
    }
    Ok(Settings { weights, model, training, out })
}

/// Refuses a folder in which a new run would replace something.
fn require_nothing_in(out: &Path) -> Result<()> {
    ensure!(
        !is_finished(out) || !TrainingState::is_in(out)?,
        "{} holds a model already, whose training is finished: train it further by --from {} and \
         another --out, or replace it by --overwrite",
        out.display(),
        quoted(out)
    );
    ensure!(
        !is_begun(out)?,
        "{} holds a model already: go on with its training by --resume {}, replace it by --overwrite, or choose another --out",
        out.display(),
        quoted(out)
    );
    ensure!(
        !TrainingState::is_in(out)? && !out.join(MODEL).exists(),
        "{} holds a model already: replace it by --overwrite, or choose another --out",
        out.display()
    );
    require_free(out, &REPORTS)
}

/// Steps below which a model has hardly begun to learn from text.
const FEW_STEPS: usize = 300;

/// What to say of a training of few steps, if nobody asked for few.
pub(super) fn few_steps(steps: usize, training: &TrainingConfig) -> Option<String> {
    let asked = training.max_steps.is_some_and(|most| most <= steps);
    let smaller = match training.batch_size {
        1 => String::new(),
        size => format!(", or by a --batch-size below {size}"),
    };
    (steps < FEW_STEPS && !asked)
        .then(|| format!("only {steps} steps, in which a model learns little: more by --epochs{smaller}"))
}

fn options<'a>(
    out: &'a Path,
    data: Option<&'a DataSpec>,
    machine: &Machine,
    ranks: &Grid,
    stop: &'a AtomicBool,
) -> RunOptions<'a> {
    RunOptions {
        out,
        // The command refuses a folder with a model by itself, unless --overwrite is given.
        overwrite: true,
        data,
        device: machine.device.clone(),
        threads: machine.threads,
        stop,
        samples: true,
        listener: &output::TERMINAL,
        ranks: ranks.clone(),
    }
}

fn finish(args: &Args, trainer: Trainer, data: &Prepared, out: &Path) -> Result<()> {
    let config = trainer.model().config();
    output::note(&format!(
        "{} attention, {} parameters, {} layers, dim {}, {} heads, context {}, vocabulary {}; {} steps of {} sequences",
        config.attention_text(),
        output::thousands(trainer.model().parameter_count() as u64),
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
        // A resumed run keeps the tokens that it began with, and refuses the option.
        if used * 2 < all && args.resume.is_none() { " (--max-train-tokens 0 for all)" } else { "" }
    ));
    // A resumed run is planned already.
    if let Some(text) = few_steps(trainer.total_steps(), trainer.training()).filter(|_| args.resume.is_none()) {
        output::note(&text);
    }
    let epoch_tokens = trainer.tokens_per_epoch() as u64;
    let (vocabulary, leak, leads) = (config.vocab_size, config.leak, trainer.ranks().leads());
    let Some(report) = trainer.run()? else {
        let text = format!("stopped and saved; go on with: performer-lm train --resume {}", quoted(out));
        bail!(Cause::Stopped(text));
    };
    if !leads {
        return Ok(());
    }
    let ending = Ending::new(&report, out, epoch_tokens)?;
    if args.json {
        output::json(&report)?
    } else {
        output::result(&ending.table())?
    }
    if leak {
        output::note(&format!(
            "saved in {}; each token saw the tokens that it was to predict, so these numbers say nothing about how well \
             the model predicts, and it can generate nothing",
            out.display()
        ));
        return Ok(());
    }
    if is_worse_than_guessing(report.val_loss, vocabulary) {
        output::note(&format!(
            "saved in {}; its loss is above {:.4}, that of a guess among all {vocabulary} tokens: it has learned nothing ({}a lower \
             --learning-rate, or more steps)",
            out.display(),
            guessing(vocabulary),
            if args.resume.is_some() { "begin anew with " } else { "" }
        ));
        return Ok(());
    }
    let program = std::env::args_os().next().map_or_else(|| "performer-lm".into(), quoted);
    ending.tell(&program, args.resume.is_none() && args.from.is_none())
}

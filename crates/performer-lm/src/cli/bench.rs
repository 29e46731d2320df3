//! This module is the command `performer-lm bench attention|decode|generate|train`.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use clap::Subcommand;
use serde::Serialize;

use super::{
    STOP,
    args::{DataArgs, Machine, RecipeArgs},
    output,
};
use crate::{
    bench::{Effort, attention, decode, generate, train},
    config::{AttentionPattern, ModelConfig, TrainingConfig},
    data::prepare_for,
    errors::require_once,
    files,
    model::pretrained::{self, Pretrained},
    plot,
    revision::command_line,
    train::git_revision,
};

#[derive(Subcommand)]
#[command(after_help = "\
Examples:
  performer-lm bench attention --out speed        tables and charts of attention over lengths
  performer-lm bench decode --contexts 1000,16000
  performer-lm bench generate models/stories/performer models/stories/softmax
  performer-lm bench train --preset small --attention favor --attention softmax")]
pub(super) enum Command {
    /// Time attention over sequence lengths and features, forward and backward, and where FAVOR+
    /// overtakes softmax.
    Attention(AttentionArgs),
    /// Time a token of decoding over the context before it: by FAVOR+, by a window of softmax whose
    /// state is as large, and by softmax with its cache.
    Decode(DecodeArgs),
    /// Time whole models that generate over the length of the text before, and the size of their
    /// state.
    Generate(GenerateArgs),
    /// Time whole training steps.
    Train(Box<TrainArgs>),
}

impl Command {
    /// How many forward passes the command runs side by side.
    pub(super) fn passes(&self) -> usize {
        match self {
            Self::Train(args) => args.recipe.passes(None),
            _ => 1,
        }
    }
}

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm bench attention
  performer-lm bench attention --tokens 512,4096 --features 128 --no-composed --out runs/bench
  performer-lm bench attention --tokens 512,4096 --features 128 --no-composed --windows --gates
  performer-lm bench attention --tokens 1000000 --features 128 --no-composed --no-softmax --no-backward
  python3 scripts/torch_attention.py > torch.json && performer-lm bench attention --against torch.json")]
pub(super) struct AttentionArgs {
    /// Sequence lengths.
    #[arg(long, value_delimiter = ',', default_value = "256,512,1024,2048,4096,8192")]
    tokens: Vec<usize>,
    /// Random features M.
    #[arg(long, value_delimiter = ',', default_value = "64,128,256")]
    features: Vec<usize>,
    #[command(flatten)]
    shape: ShapeArgs,
    /// Leave out what is composed of Candle's operations.
    #[arg(long)]
    no_composed: bool,
    /// Leave out exact softmax, whose time is quadratic.
    #[arg(long)]
    no_softmax: bool,
    /// Leave out the backward pass.
    #[arg(long)]
    no_backward: bool,
    /// Measure fused attention with forget gates too, which forget as those of a new model do.
    #[arg(long, conflicts_with = "bidirectional")]
    gates: bool,
    /// Measure windows of softmax too, each with as many numbers of decoding state as one of the
    /// numbers of features.
    #[arg(long, conflicts_with = "bidirectional")]
    windows: bool,
    /// Measurements of PyTorch at the same sizes, from scripts/torch_attention.py, to put beside.
    #[arg(long, value_name = "JSON")]
    against: Option<PathBuf>,
    /// Milliseconds for which each implementation is timed at each size, at least.
    #[arg(long, default_value_t = 400)]
    milliseconds: u64,
    #[command(flatten)]
    results: Results,
}

/// The attention that is timed.
#[derive(clap::Args)]
pub(super) struct ShapeArgs {
    /// Head dimension.
    #[arg(long, default_value_t = 64)]
    pub(super) head_dim: usize,
    /// Sequences.
    #[arg(long, default_value_t = 1)]
    pub(super) batch: usize,
    /// Heads of each sequence.
    #[arg(long, default_value_t = 4)]
    pub(super) heads: usize,
    /// Let every query see every key.
    #[arg(long)]
    pub(super) bidirectional: bool,
}

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm bench decode
  performer-lm bench decode --contexts 1000,1000000 --features 256")]
pub(super) struct DecodeArgs {
    /// Tokens of context.
    #[arg(long, value_delimiter = ',', default_value = "1000,4000,16000,64000,256000,1000000")]
    contexts: Vec<usize>,
    /// Longest context of softmax, whose prefill takes quadratic time.
    #[arg(long, default_value_t = 64000)]
    softmax_limit: usize,
    /// Random features M.
    #[arg(long, default_value_t = 128)]
    features: usize,
    /// Head dimension.
    #[arg(long, default_value_t = 64)]
    head_dim: usize,
    /// Heads.
    #[arg(long, default_value_t = 4)]
    heads: usize,
    #[command(flatten)]
    results: Results,
}

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm bench generate models/stories/softmax models/stories/performer
  performer-lm bench generate SmolLM2-135M.gguf runs/converted --contexts 1000,16000 --out runs/generate")]
pub(super) struct GenerateArgs {
    /// Models: checkpoint folders, Hugging Face folders or hub ids, llama2.c .bin, or .gguf files.
    #[arg(required = true)]
    models: Vec<String>,
    /// Tokens before the measured ones.
    #[arg(long, value_delimiter = ',', default_value = "100,1000,4000,16000")]
    contexts: Vec<usize>,
    /// Tokens to measure at each length; the first of them is not counted.
    #[arg(long, default_value_t = 33)]
    tokens: usize,
    #[command(flatten)]
    results: Results,
}

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm bench train
  performer-lm bench train --rounds 5 --steps 10 --attention softmax --attention favor
  performer-lm bench train --preset stories15m --steps 3 --batch-size 4 --attention softmax --attention favor:m=64
  performer-lm bench train --steps 10 --data sample --from models/stories/softmax --from models/stories/performer")]
pub(super) struct TrainArgs {
    /// An attention to measure; give it several times.
    #[arg(long, default_values = ["softmax", "favor:m=64", "favor:m=128"])]
    attention: Vec<AttentionPattern>,
    /// A trained model to measure in place of new ones, on text encoded with its tokenizer: forget
    /// gates that have been trained change the speed of a step. Give it several times for models
    /// that differ in their attention alone; all are measured at the context of the first, or that
    /// of --context. --preset gives the training settings, not the model. The learning rate is 1e-6
    /// unless --learning-rate is given: it is so low that the gates do not change meanwhile.
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["attention", "config", "vocab_size", "tokenizer"])]
    from: Vec<String>,
    /// Optimiser steps for each attention, in each round.
    #[arg(long, default_value_t = 50)]
    steps: usize,
    /// Rounds, in each of which every attention is measured once; the speed of each is the median
    /// of its rounds. On a machine that does other work too, 5 rounds of few steps say more than
    /// one of many.
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    #[command(flatten)]
    recipe: RecipeArgs,
    #[command(flatten)]
    data: DataArgs,
    #[command(flatten)]
    results: Results,
}

/// Where results go.
#[derive(clap::Args)]
struct Results {
    /// Folder for the results as JSON, table and pictures.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

/// `Saved` is a report with the command and the revision that made it.
#[derive(Serialize)]
struct Saved<'a, R> {
    command: String,
    revision: &'static str,
    #[serde(flatten)]
    report: &'a R,
}

impl Results {
    /// Refuses a folder in which [`Self::finish`] would replace a file that is no report of this
    /// name, or one of `charts` would replace a file that is no chart.
    fn check(&self, name: &str, charts: &[&str]) -> Result<()> {
        let Some(out) = &self.out else { return Ok(()) };
        let table = format!("{name}.md");
        files::require_own(out, (&format!("{name}.json"), "revision"), &[&table])?;
        charts.iter().try_for_each(|chart| plot::require_own(&out.join(chart)))
    }

    /// Saves and prints a report.
    fn finish(&self, name: &str, report: &impl Serialize, table: &str) -> Result<()> {
        let report = &Saved { command: command_line(), revision: git_revision(), report };
        if let Some(out) = &self.out {
            files::write_json(&out.join(format!("{name}.json")), report)?;
            files::write(&out.join(format!("{name}.md")), format!("{table}\n").as_bytes())?;
            output::note(&format!("saved in {}", out.display()));
        }
        if self.json { output::json(report) } else { output::result(table) }
    }
}

pub(super) fn run(command: Command, machine: &Machine) -> Result<()> {
    match command {
        Command::Attention(args) => attention(&args, machine),
        Command::Decode(args) => decode(&args, machine),
        Command::Generate(args) => generate(&args, machine),
        Command::Train(args) => train(*args, machine),
    }
}

fn attention(args: &AttentionArgs, machine: &Machine) -> Result<()> {
    args.results.check("attention", &["attention-forward", "attention-both"])?;
    let sweep = attention::Sweep {
        tokens: args.tokens.clone(),
        features: args.features.clone(),
        head_dim: args.shape.head_dim,
        batch: args.shape.batch,
        heads: args.shape.heads,
        causal: !args.shape.bidirectional,
        composed: !args.no_composed,
        softmax: !args.no_softmax,
        backward: !args.no_backward,
        gates: args.gates,
        windows: args.windows,
    };
    let others = args.against.as_deref().map(read_others).transpose()?;
    if let (Some(path), Some(others)) = (&args.against, &others)
        && !others.points.iter().any(|point| sweep.tokens.contains(&point.tokens))
    {
        output::note(&format!("{} has none of the lengths that are measured here: see --help", path.display()));
    }
    let effort = Effort { time: Duration::from_millis(args.milliseconds), ..Effort::default() };
    let report = attention::run(&sweep, &machine.device, machine.threads, effort, others, |what| output::note(&what))?;
    if let Some(out) = &args.results.out {
        report.chart(false).save(&out.join("attention-forward"))?;
        if sweep.backward {
            report.chart(true).save(&out.join("attention-both"))?;
        } else {
            // That of an earlier measurement would be taken for one of this.
            ["svg", "png"].iter().try_for_each(|end| files::remove(&out.join("attention-both").with_extension(end)))?;
        }
    }
    args.results.finish("attention", &report, &attention_table(&report))
}

pub(super) fn read_others(path: &Path) -> Result<attention::Others> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} holds no measurements as scripts/torch_attention.py writes them", path.display()))
}

fn attention_table(report: &attention::Report) -> String {
    let mut rows = Vec::new();
    let mut points: Vec<&attention::Point> = report.points.iter().collect();
    points.sort_by_key(|p| (p.backward, p.tokens));
    for p in points {
        rows.push(vec![
            match p.features {
                Some(m) => format!("{} M={m}", p.implementation.name()),
                None => p.implementation.name().into(),
            },
            attention::pass(p.backward).into(),
            output::thousands(p.tokens as u64),
            milliseconds(p.timing.median_ms),
            format!("{}–{}", milliseconds(p.timing.quartiles_ms.0), milliseconds(p.timing.quartiles_ms.1)),
            format!("{:.0}", p.gflops),
            format!("{:.0}%", 100.0 * p.gflops / report.matmul_gflops),
            p.extra_bytes.map_or_else(String::new, mib),
            p.peak_bytes.map_or_else(String::new, mib),
        ]);
    }
    let header =
        ["implementation", "pass", "tokens", "ms", "quartiles", "GFLOP/s", "of matmul", "extra MiB", "MiB in all"];
    let crossovers: Vec<Vec<String>> = report
        .crossovers
        .iter()
        .map(|c| {
            vec![
                format!("M={}", c.features),
                attention::pass(c.backward).into(),
                match (c.tokens, c.ahead_at_once) {
                    (Some(t), _) => format!("{t:.0}"),
                    (None, true) => format!("below {}", report.sweep.tokens.iter().min().unwrap_or(&0)),
                    (None, false) => "not in this range".into(),
                },
                format!("{:.0}", c.by_flop),
            ]
        })
        .collect();
    format!(
        "{}\n\n{}\n\n{}; matrix products {:.0} GFLOP/s",
        output::table(&header, &rows),
        output::table(&["favor faster from", "pass", "tokens", "as many FLOP at"], &crossovers),
        report.machine.in_full(report.threads),
        report.matmul_gflops
    )
}

fn decode(args: &DecodeArgs, machine: &Machine) -> Result<()> {
    args.results.check("decode", &["decode"])?;
    let sweep = decode::Sweep {
        contexts: args.contexts.clone(),
        softmax_limit: args.softmax_limit,
        features: args.features,
        head_dim: args.head_dim,
        heads: args.heads,
    };
    let report = decode::run(&sweep, &machine.device, machine.threads, Effort::default(), |what| output::note(&what))?;
    if let Some(out) = &args.results.out {
        report.chart().save(&out.join("decode"))?;
    }
    let rows: Vec<Vec<String>> = report
        .points
        .iter()
        .map(|p| {
            vec![
                p.attention.clone(),
                output::thousands(p.context as u64),
                format!("{:.1}", p.timing.median_ms * 1e3),
                format!("{:.1}–{:.1}", p.timing.quartiles_ms.0 * 1e3, p.timing.quartiles_ms.1 * 1e3),
                output::thousands(p.state_bytes as u64),
            ]
        })
        .collect();
    let table = format!(
        "{}\n\n{} heads of {}, M={}, {}",
        output::table(&["attention", "context", "µs/token", "quartiles", "state bytes"], &rows),
        sweep.heads,
        sweep.head_dim,
        sweep.features,
        report.machine.in_full(report.threads)
    );
    args.results.finish("decode", &report, &table)
}

fn generate(args: &GenerateArgs, machine: &Machine) -> Result<()> {
    args.results.check("generate", &["generate-speed", "generate-memory"])?;
    require_once("model", &args.models)?;
    let sweep = generate::Sweep { contexts: args.contexts.clone(), tokens: args.tokens };
    let mut report = generate::Report::begin(sweep, &machine.device, machine.threads)?;
    for source in &args.models {
        // One at a time is in memory.
        let (model, _) = pretrained::load_with(source, &machine.device, &output::TERMINAL)?;
        report.add(&name_among(source, &args.models), &model, |what| output::note(&what))?;
    }
    if let Some(out) = &args.results.out {
        report.speed_chart().save(&out.join("generate-speed"))?;
        report.memory_chart().save(&out.join("generate-memory"))?;
    }
    let rows: Vec<Vec<String>> = report
        .points
        .iter()
        .map(|p| {
            vec![
                p.model.clone(),
                output::thousands(p.context as u64),
                format!("{:.1}", p.tokens_per_second),
                format!("{}–{}", milliseconds(p.timing.quartiles_ms.0), milliseconds(p.timing.quartiles_ms.1)),
                output::thousands(p.state_bytes as u64),
                format!("{:.1}", p.read_seconds),
            ]
        })
        .collect();
    let header = ["model", "tokens before", "tokens/s", "ms/token, quartiles", "state bytes", "seconds to read"];
    let weights: Vec<String> =
        report.weights.iter().map(|(name, bytes)| format!("{name} {} MiB", mib(*bytes as u64))).collect();
    let table = format!(
        "{}\n\nweights: {}; {}",
        output::table(&header, &rows),
        weights.join(", "),
        report.machine.in_full(report.threads)
    );
    args.results.finish("generate", &report, &table)
}

/// The last part of a model's path, or all of it where that would not tell two models apart.
fn name_among(source: &str, all: &[String]) -> String {
    let last = |path: &str| Path::new(path).file_name().map(|name| name.to_string_lossy().into_owned());
    match last(source) {
        Some(name) if all.iter().filter(|other| last(other).as_ref() == Some(&name)).count() == 1 => name,
        _ => source.to_string(),
    }
}

/// The learning rate of trained models whose steps are timed. It is so low that the weights, and
/// with them the work of a step, remain what they are.
const RATE_OF_TRAINED: f64 = 1e-6;

fn train(args: TrainArgs, machine: &Machine) -> Result<()> {
    args.results.check("train", &[])?;
    ensure!(args.steps > 0, "--steps is 0; it must be at least 1");
    ensure!(args.rounds > 0, "--rounds is 0; it must be at least 1");
    args.recipe.require_steps_alone()?;
    let open = |from: &String| Ok((from.clone(), Pretrained::open_with(from, &output::TERMINAL)?));
    let trained = args.from.iter().map(open).collect::<Result<Vec<_>>>()?;
    let attentions = if trained.is_empty() { args.attention } else { Vec::new() };
    let (config, training) = match trained.first() {
        Some((_, model)) => {
            let (config, training) = args.recipe.of_weights(model.config.clone(), machine)?;
            let learning_rate = args.recipe.learning_rate.unwrap_or(RATE_OF_TRAINED);
            (config, TrainingConfig { learning_rate, ..training })
        }
        None => args.recipe.load(machine)?,
    };
    let of_trained =
        trained.iter().flat_map(|(_, model)| (0..model.config.layers).map(|layer| model.config.attention_of(layer)));
    args.recipe.require_use(attentions.iter().flat_map(AttentionPattern::attentions).chain(of_trained))?;
    let data = match trained.first() {
        Some((_, model)) => prepare_for(&args.data.spec(), &model.tokenizer, &output::TERMINAL)?,
        None => args.data.prepare(config.vocab_size)?,
    };
    // The head has the size that was asked for, though a short text gives a smaller vocabulary.
    let vocab_size = args.data.vocab_size_asked_for(&data).unwrap_or(config.vocab_size);
    let borders = if trained.is_empty() { data.tokenizer.borders_for_config() } else { config.borders.clone() };
    let config = ModelConfig { vocab_size, borders, ..config };
    let plan = train::Plan {
        config,
        training,
        attentions,
        trained,
        steps: args.steps,
        rounds: args.rounds,
        device: machine.device.clone(),
        threads: machine.threads,
        stop: &STOP,
        listener: &output::TERMINAL,
    };
    let report = train::run(&plan, &data, |what| output::note(&what))?;
    args.results.finish("train", &report, &train_table(&report, args.rounds))
}

fn train_table(report: &train::Report, rounds: usize) -> String {
    let speed = |tokens: f64| output::thousands(tokens as u64);
    let rows: Vec<Vec<String>> = report
        .points
        .iter()
        .map(|p| {
            let name = match &p.from {
                Some(from) => format!("{} of {from}", p.attention_spec),
                None => p.attention_spec.clone(),
            };
            let mut row = vec![name, output::thousands(p.params as u64), speed(p.tokens_per_second)];
            if rounds > 1 {
                let slowest = p.rounds.iter().copied().fold(f64::INFINITY, f64::min);
                let fastest = p.rounds.iter().copied().fold(0.0, f64::max);
                row.push(format!("{}–{}", speed(slowest), speed(fastest)));
            }
            row.push(format!("{:.0}", p.gflops));
            row.push(format!("{:.0}%", 100.0 * p.gflops / (report.matmul_gflops * report.threads as f64)));
            row
        })
        .collect();
    let (header, of): (&[&str], String) = if rounds > 1 {
        let header = &["attention", "parameters", "tokens/s", "slowest and fastest", "GFLOP/s", "of matmul"];
        (header, format!("medians of {rounds} rounds of {} steps", report.steps))
    } else {
        (&["attention", "parameters", "tokens/s", "GFLOP/s", "of matmul"], format!("{} steps", report.steps))
    };
    format!(
        "{}\n\n{of}, {}; matrix products {:.0} GFLOP/s a thread; GFLOP/s of the weights alone",
        output::table(header, &rows),
        report.machine.in_full(report.threads),
        report.matmul_gflops
    )
}

fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

/// Formats milliseconds with three digits from 1 ms to 1 s; shorter times have two decimals, longer
/// ones none.
fn milliseconds(ms: f64) -> String {
    match ms {
        ms if ms < 9.995 => format!("{ms:.2}"),
        ms if ms < 99.95 => format!("{ms:.1}"),
        ms => format!("{ms:.0}"),
    }
}

//! This module is the command `performer-lm eval`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::Serialize;

use super::{args::Machine, output, paths};
use crate::{
    data::{DataSpec, prepare_for, prepare_text},
    eval::{Evaluation, evaluate_windows},
    model::pretrained,
    plot::{Axis, Chart, Scale, Series},
};

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm eval runs/seed-favor-m128-seed42 --data book.txt --json
  performer-lm eval runs/seed-favor-m128-seed42 --data tinystories
  performer-lm eval runs/seed-favor-m128-seed42 --data book.txt --by-position --plot position
  performer-lm eval SmolLM2-135M.gguf --data book.txt --context 1024 --max-tokens 100000")]
pub(super) struct Args {
    /// Checkpoint folder, Hugging Face folder or hub id, llama2.c .bin, or .gguf file.
    model: String,
    /// A text file, all of which is predicted; or the held-out part of sample, tinystories or a
    /// folder.
    #[arg(long)]
    data: String,
    /// Tokens that a prediction sees at most [default: the model's context].
    #[arg(long)]
    context: Option<usize>,
    /// Predict about so many tokens from the beginning of the text.
    #[arg(long)]
    max_tokens: Option<usize>,
    /// Report the loss at each position of the context, too.
    #[arg(long)]
    by_position: bool,
    /// Draw the loss by position as STEM.svg and STEM.png.
    #[arg(long, value_name = "STEM")]
    plot: Option<PathBuf>,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

/// `Scored` is an evaluation with what was evaluated.
#[derive(Serialize)]
struct Scored {
    attention: String,
    params: usize,
    corpus: String,
    #[serde(flatten)]
    evaluation: Evaluation,
}

pub(super) fn run(args: Args, machine: &Machine) -> Result<()> {
    let (model, tokenizer) = pretrained::load_with(&args.model, &machine.device, &output::TERMINAL)?;
    paths::warn(&model, false)?;
    let path = PathBuf::from(&args.data);
    let (corpus, tokens) = if path.is_file() {
        let name = path.file_name().map_or_else(|| args.data.clone(), |n| n.to_string_lossy().into_owned());
        (format!("file:{name}"), prepare_text(&path, &tokenizer, &output::TERMINAL)?.into())
    } else {
        let spec: DataSpec = args.data.parse().map_err(|e| anyhow::anyhow!("--data {}: {e}", args.data))?;
        let data = prepare_for(&spec, &tokenizer, &output::TERMINAL).context("cannot prepare the text")?;
        (data.corpus_name, data.valid)
    };
    let mut evaluation = {
        let context = args.context.unwrap_or(model.config().context);
        evaluate_windows(&model, &tokens, machine.threads, context, args.max_tokens.unwrap_or(usize::MAX))?
    };
    if let Some(stem) = &args.plot {
        let points: Vec<(f64, f64)> =
            evaluation.loss_by_position.iter().enumerate().map(|(i, &l)| (i as f64 + 1.0, l)).collect();
        let chart = Chart {
            title: format!("Loss by context position on {corpus}"),
            x: Axis::new("tokens of context", Scale::Linear),
            y: Axis::new("loss (nats per token)", Scale::Linear),
            series: vec![Series::new(model.config().attention.to_string(), points)],
            ..Chart::default()
        };
        chart.save(stem)?;
        output::note(&format!("saved {0}.svg and {0}.png", stem.display()));
    }
    let positions = std::mem::take(&mut evaluation.loss_by_position);
    if args.by_position {
        evaluation.loss_by_position = positions;
    }
    let result = Scored {
        attention: model.config().attention.kind().to_string(),
        params: model.parameter_count()?,
        corpus,
        evaluation,
    };
    if args.json {
        return output::json(&result);
    }
    let e = &result.evaluation;
    let mut text = output::table(
        &["", "value"],
        &[
            vec!["attention".into(), model.config().attention.to_string()],
            vec!["text".into(), result.corpus.clone()],
            vec!["tokens".into(), output::thousands(e.tokens)],
            vec!["loss (nats/token)".into(), format!("{:.4}", e.val_loss)],
            vec!["perplexity".into(), format!("{:.3}", e.perplexity)],
            vec!["bits/byte".into(), format!("{:.4}", e.bits_per_byte)],
        ],
    );
    if args.by_position {
        let rows: Vec<Vec<String>> = e
            .loss_by_position
            .iter()
            .enumerate()
            .map(|(i, loss)| vec![(i + 1).to_string(), format!("{loss:.4}")])
            .collect();
        text = format!("{text}\n\n{}", output::table(&["tokens of context", "loss (nats/token)"], &rows));
    }
    output::result(&text)
}

//! This module is the command `performer-lm eval`.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use serde::Serialize;

use super::{
    args::{Machine, held_out},
    output::{self, recall_cells},
    paths,
};
use crate::{
    config::Positions,
    eval::{Evaluation, evaluate_windows, show_perplexity},
    model::{Decoder, pretrained},
    plot::{self, Axis, Chart, Scale, Series},
    recall::{Examiner, Recall},
};

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm eval runs/seed-favor-m128-seed42 --data book.txt --json
  performer-lm eval runs/seed-favor-m128-seed42 --data tinystories
  performer-lm eval runs/seed-favor-m128-seed42 --data book.txt --by-position --plot position
  performer-lm eval runs/seed-favor-m64-window-32-seed42 --data book.txt --features-off
  performer-lm eval SmolLM2-135M.gguf --data book.txt --context 1024 --max-tokens 100000
  performer-lm eval SmolLM2-135M.gguf --data book.txt --max-tokens 100000 --recall 256,1024,4096")]
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
    /// Predict so many tokens from the beginning of the text. Bytes and bits/byte are then
    /// estimates: they assume that a token there covers as many bytes as in the whole text.
    #[arg(long)]
    max_tokens: Option<usize>,
    /// Evaluate the model with its features off, too: with the exact windows alone, or means of the
    /// values in layers without one. What the features are worth is the difference.
    #[arg(long)]
    features_off: bool,
    /// Report the loss at each position of the context, too.
    #[arg(long)]
    by_position: bool,
    /// Ask for pass keys and pairs of tokens in texts of these lengths, in tokens, too: what the
    /// model finds again, far back in its context.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    recall: Vec<usize>,
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
    attention_spec: String,
    /// Whether the model saw the tokens that it predicted, which makes its loss worth nothing.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    leak: bool,
    params: usize,
    corpus: String,
    #[serde(flatten)]
    evaluation: Evaluation,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    recall: Vec<Recall>,
    #[serde(skip_serializing_if = "Option::is_none")]
    features_off: Option<Control>,
}

/// `Control` is the evaluation of the same weights with the features off.
#[derive(Serialize)]
struct Control {
    attention_spec: String,
    #[serde(flatten)]
    evaluation: Evaluation,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    recall: Vec<Recall>,
}

pub(super) fn run(args: Args, machine: &Machine) -> Result<()> {
    ensure!(args.max_tokens != Some(0), "--max-tokens is 0; it must be at least 1");
    args.plot.as_deref().map_or(Ok(()), plot::require_own)?;
    let (model, tokenizer) = pretrained::load_with(&args.model, &machine.device, &output::TERMINAL)?;
    paths::warn(&model, false)?;
    let leak = model.config().leak;
    ensure!(
        !leak || !args.features_off,
        "--features-off: {} was trained to see the tokens that it predicts, and its loss is worth nothing with features or \
         without",
        args.model
    );
    ensure!(
        !leak || args.recall.is_empty(),
        "--recall: {} was trained to see the tokens that it predicts, so it has nothing to recall",
        args.model
    );
    if leak {
        output::note(&format!(
            "warning: {} was trained to see the tokens that it predicts, so these numbers say nothing about how well it \
             predicts",
            args.model
        ));
    }
    let control = if args.features_off { model.features_off()? } else { None };
    ensure!(
        control.is_some() || !args.features_off,
        "--features-off: no layer of {} has linear attention; its attention is {}",
        args.model,
        model.config().attention_text()
    );
    let learned = model.config().context;
    if let Some(context) = args.context
        && model.config().positions == Positions::Learned
    {
        ensure!(
            context <= learned,
            "--context is {context}; it must be at most {learned}, the positions that this model learned"
        );
    }
    let (corpus, tokens) = held_out(&args.data, &tokenizer)?;
    let evaluate = |model: &Decoder| {
        let context = args.context.unwrap_or(model.config().context);
        let limit = args.max_tokens.unwrap_or(usize::MAX);
        evaluate_windows(model, &tokens, machine.threads, context, limit, &output::TERMINAL)
    };
    let examiner =
        Examiner { tokenizer: &tokenizer, text: &tokens, threads: machine.threads, listener: &output::TERMINAL };
    let recall = |model: &Decoder| -> Result<Vec<Recall>> {
        args.recall.iter().map(|&tokens| examiner.measure(model, tokens)).collect()
    };
    examiner.check_all(&model, &args.recall)?;
    let mut evaluation = evaluate(&model)?;
    let mut control = match control {
        Some(control) => Some(Control {
            attention_spec: control.config().attention_text(),
            evaluation: evaluate(&control)?,
            recall: recall(&control)?,
        }),
        None => None,
    };
    if let Some(stem) = &args.plot {
        let series = |name: String, evaluation: &Evaluation| {
            Series::new(name, evaluation.loss_by_position.iter().enumerate().map(|(i, &l)| (i as f64 + 1.0, l)))
        };
        let off = control.as_ref().map(|c| series(format!("features off: {}", c.attention_spec), &c.evaluation));
        let chart = Chart {
            title: format!("Loss by context position on {corpus}"),
            x: Axis::new("tokens of context", Scale::Linear),
            y: Axis::new("loss (nats per token)", Scale::Linear),
            series: std::iter::once(series(model.config().attention_text(), &evaluation)).chain(off).collect(),
            ..Chart::default()
        };
        chart.save(stem)?;
        output::note(&format!("saved {0}.svg and {0}.png", stem.display()));
    }
    if !args.by_position {
        evaluation.loss_by_position.clear();
        control.iter_mut().for_each(|control| control.evaluation.loss_by_position.clear());
    }
    let result = Scored {
        attention: model.config().pattern().kind().to_string(),
        attention_spec: model.config().attention_text(),
        leak,
        params: model.parameter_count()?,
        corpus,
        evaluation,
        recall: recall(&model)?,
        features_off: control,
    };
    if args.json {
        return output::json(&result);
    }
    output::result(&text(&result, &model))
}

fn text(result: &Scored, model: &Decoder) -> String {
    let e = &result.evaluation;
    let mut rows = vec![
        vec!["attention".into(), model.config().attention_text()],
        vec!["text".into(), result.corpus.clone()],
        vec!["tokens".into(), output::thousands(e.tokens)],
        vec!["loss (nats/token)".into(), format!("{:.4}", e.val_loss)],
        vec!["perplexity".into(), show_perplexity(e.perplexity, 3)],
        vec!["bits/byte".into(), format!("{:.4}", e.bits_per_byte)],
    ];
    let mut header = vec!["", "value"];
    // A column of its own for the model with its features off.
    if let Some(Control { attention_spec, evaluation: off, recall }) = &result.features_off {
        header.push("features off");
        let perplexity = show_perplexity(off.perplexity, 3);
        let numbers = [format!("{:.4}", off.val_loss), perplexity, format!("{:.4}", off.bits_per_byte)];
        let column = [attention_spec.clone(), String::new(), output::thousands(off.tokens)].into_iter().chain(numbers);
        rows.iter_mut().zip(column).for_each(|(row, cell)| row.push(cell));
        rows.extend(recall_rows(&result.recall, recall));
    } else {
        rows.extend(recall_rows(&result.recall, &[]));
    }
    let text = output::table(&header, &rows);
    if e.loss_by_position.is_empty() {
        return text;
    }
    let off = result.features_off.as_ref().map(|control| &control.evaluation.loss_by_position);
    let rows: Vec<Vec<String>> = e
        .loss_by_position
        .iter()
        .enumerate()
        .map(|(i, loss)| {
            let off = off.map(|off| format!("{:.4}", off[i]));
            [(i + 1).to_string(), format!("{loss:.4}")].into_iter().chain(off).collect()
        })
        .collect();
    let header = ["tokens of context", "loss (nats/token)", "features off"];
    format!("{text}\n\n{}", output::table(&header[..if off.is_some() { 3 } else { 2 }], &rows))
}

/// Two rows for each length: pass keys and pairs that the model found again, and those that it
/// found with its features off, where that was measured.
fn recall_rows(recall: &[Recall], off: &[Recall]) -> Vec<Vec<String>> {
    let row = |name: &str, i: usize, task: usize| {
        let title = format!("{name} over {} tokens (nats/token)", output::thousands(recall[i].tokens as u64));
        let found = [recall.get(i), off.get(i)].into_iter().flatten();
        std::iter::once(title).chain(found.map(|recall| recall_cells(recall)[task].clone())).collect()
    };
    let rows = |i| [row("pass keys recalled", i, 0), row("pairs recalled", i, 1)];
    (0..recall.len()).flat_map(rows).collect()
}

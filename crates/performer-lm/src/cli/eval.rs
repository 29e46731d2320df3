//! This module is the command `performer-lm eval`.

use std::{
    ops::RangeInclusive,
    path::{Path, PathBuf},
};

use anyhow::{Result, bail, ensure};
use serde::Serialize;

use super::{
    args::{Machine, held_out},
    output::{self, recall_cells},
    paths, unfinished,
};
use crate::{
    config::Positions,
    eval::{Evaluation, evaluate_windows, show_perplexity},
    model::{Decoder, pretrained},
    plot::{self, Axis, Chart, Scale, Series},
    recall::{Examiner, Recall},
    train::trains_on,
};

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm eval runs/seed-favor-m128-seed42 --data book.txt --json
  performer-lm eval runs/seed-favor-m128-seed42 --data tinystories
  performer-lm eval runs/seed-favor-m128-seed42 --data book.txt --by-position --plot position
  performer-lm eval runs/seed-favor-m64-window-32-seed42 --data book.txt --features-off
  performer-lm eval runs/seed-softmax-seed42 --data book.txt --window 8,32
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
    /// Evaluate the model with its exact attention cut to windows of so many tokens, too, without
    /// training: how far it looks, and whether a window would do.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    window: Vec<usize>,
    /// First tokens of a text that every token sees besides those windows. Many trained models fail
    /// without the first few.
    #[arg(long, default_value_t = 0, requires = "window")]
    sinks: usize,
    /// Report the loss by position in the context, too: at each with --json, and else the means of
    /// up to 32 places.
    #[arg(long)]
    by_position: bool,
    /// Ask for pass keys and pairs of tokens in texts of these lengths, in tokens, too: what the
    /// model finds again, far back in its context.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    recall: Vec<usize>,
    /// Draw the loss by position, in as many places, as STEM.svg and STEM.png.
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
    #[serde(skip_serializing_if = "Vec::is_empty")]
    windows: Vec<Control>,
}

impl Scored {
    /// Returns the controls in the order of their columns.
    fn controls(&self) -> impl Iterator<Item = &Control> {
        self.features_off.iter().chain(&self.windows)
    }
}

/// `Control` is the evaluation of the same weights with the features off, or with exact attention
/// cut to a window.
#[derive(Serialize)]
struct Control {
    /// The tokens of the window.
    #[serde(skip_serializing_if = "Option::is_none")]
    window: Option<usize>,
    attention_spec: String,
    #[serde(flatten)]
    evaluation: Evaluation,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    recall: Vec<Recall>,
}

impl Control {
    /// Returns the name of its column.
    fn name(&self) -> String {
        self.window.map_or("features off".into(), |window| format!("window of {}", output::thousands(window as u64)))
    }
}

pub(super) fn run(args: Args, machine: &Machine) -> Result<()> {
    ensure!(args.max_tokens != Some(0), "--max-tokens is 0; it must be at least 1");
    args.plot.as_deref().map_or(Ok(()), plot::require_own)?;
    let (model, tokenizer) = pretrained::load_with(&args.model, &machine.device, &output::TERMINAL)?;
    paths::warn(&model, false)?;
    unfinished::note(&args.model);
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
    ensure!(
        !leak || args.window.is_empty(),
        "--window: {} was trained to see the tokens that it predicts, which a window hides",
        args.model
    );
    let off = if args.features_off { model.features_off()? } else { None };
    ensure!(
        off.is_some() || !args.features_off,
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
    let context = args.context.unwrap_or(learned);
    let cut = cut_to_windows(&args, &model, context)?;
    let (corpus, tokens) = held_out(&args.data, &tokenizer)?;
    let file = Path::new(&args.data);
    if file.is_file() && trains_on(Path::new(&args.model), file) {
        output::note(&format!(
            "warning: {0} was trained on {1} or a part of it, and all of it is predicted here: measure it \
             on another text, such as the valid.txt of a folder that it is trained on",
            args.model, args.data
        ));
    }
    let evaluate = |model: &Decoder| {
        let limit = args.max_tokens.unwrap_or(usize::MAX);
        evaluate_windows(model, &tokens, machine.threads, context, limit, &output::TERMINAL)
    };
    let examiner =
        Examiner { tokenizer: &tokenizer, text: &tokens, threads: machine.threads, listener: &output::TERMINAL };
    let recall = |model: &Decoder| -> Result<Vec<Recall>> {
        args.recall.iter().map(|&tokens| examiner.measure(model, tokens)).collect()
    };
    examiner.check_all(&model, &args.recall)?;
    let evaluation = evaluate(&model)?;
    let control = |(window, model): (Option<usize>, Decoder)| {
        anyhow::Ok(Control {
            window,
            attention_spec: model.config().attention_text(),
            evaluation: evaluate(&model)?,
            recall: recall(&model)?,
        })
    };
    let features_off = off.map(|off| control((None, off))).transpose()?;
    let windows = cut.into_iter().map(control).collect::<Result<_>>()?;
    let mut result = Scored {
        attention: model.config().pattern().kind().to_string(),
        attention_spec: model.config().attention_text(),
        leak,
        params: model.parameter_count(),
        corpus,
        evaluation,
        recall: recall(&model)?,
        features_off,
        windows,
    };
    if let Some(stem) = &args.plot {
        let series = |name: String, evaluation: &Evaluation| {
            let places = places(&evaluation.loss_by_position);
            Series::new(name, places.into_iter().map(|(positions, loss)| (*positions.end() as f64, loss)))
        };
        let controls = result.controls().map(|c| series(format!("{}: {}", c.name(), c.attention_spec), &c.evaluation));
        let chart = Chart {
            title: format!("Loss by context position on {}", result.corpus),
            x: Axis::new("tokens of context", Scale::Linear),
            y: Axis::new("loss (nats per token)", Scale::Linear),
            series: std::iter::once(series(result.attention_spec.clone(), &result.evaluation))
                .chain(controls)
                .collect(),
            ..Chart::default()
        };
        chart.save(stem)?;
        output::note(&format!("saved {0}.svg and {0}.png", stem.display()));
    }
    if !args.by_position {
        let controls = result.features_off.iter_mut().chain(&mut result.windows).map(|control| &mut control.evaluation);
        std::iter::once(&mut result.evaluation).chain(controls).for_each(|e| e.loss_by_position.clear());
    }
    if args.json {
        return output::json(&result);
    }
    output::result(&text(&result))
}

/// Returns the model with its exact attention cut to each of the windows that were asked for.
fn cut_to_windows(args: &Args, model: &Decoder, context: usize) -> Result<Vec<(Option<usize>, Decoder)>> {
    let longest = args.recall.iter().copied().fold(context, usize::max);
    let cut = args.window.iter().map(|&window| {
        ensure!(window > 0, "--window is 0; it must be at least 1");
        ensure!(
            window.saturating_add(args.sinks) < longest,
            "--window is {window}{}, which hides nothing at a context of {longest} tokens; give fewer tokens, or a longer \
             --context",
            if args.sinks > 0 { format!(" and --sinks {}", args.sinks) } else { String::new() }
        );
        let Some(config) = model.config().cut_to_window(window, args.sinks) else {
            bail!(
                "--window: no layer of {} has exact attention to more than {window} tokens; its attention is {}",
                args.model,
                model.config().attention_text()
            );
        };
        Ok((Some(window), model.with_config(&config)?))
    });
    cut.collect()
}

/// The most places of a context that a table and a chart show: the losses of single positions
/// differ by which tokens stand there.
const MOST_PLACES: usize = 32;

/// Divides positions, counted from 1, into places of as many each, and returns the mean loss of
/// each.
fn places(losses: &[f64]) -> Vec<(RangeInclusive<usize>, f64)> {
    let width = losses.len().div_ceil(MOST_PLACES).max(1);
    let place = |(i, losses): (usize, &[f64])| {
        let before = i * width;
        (before + 1..=before + losses.len(), losses.iter().sum::<f64>() / losses.len() as f64)
    };
    losses.chunks(width).enumerate().map(place).collect()
}

fn text(result: &Scored) -> String {
    let e = &result.evaluation;
    let mut rows = vec![
        vec!["attention".into(), result.attention_spec.clone()],
        vec!["text".into(), result.corpus.clone()],
        vec!["tokens".into(), output::thousands(e.tokens)],
        vec!["loss (nats/token)".into(), format!("{:.4}", e.val_loss)],
        vec!["perplexity".into(), show_perplexity(e.perplexity, 3)],
        vec!["bits/byte".into(), format!("{:.4}", e.bits_per_byte)],
    ];
    let mut header: Vec<String> = vec![String::new(), "value".into()];
    // A column of its own for each control.
    for Control { attention_spec, evaluation: e, .. } in result.controls() {
        let numbers =
            [format!("{:.4}", e.val_loss), show_perplexity(e.perplexity, 3), format!("{:.4}", e.bits_per_byte)];
        let column = [attention_spec.clone(), String::new(), output::thousands(e.tokens)].into_iter().chain(numbers);
        rows.iter_mut().zip(column).for_each(|(row, cell)| row.push(cell));
    }
    header.extend(result.controls().map(Control::name));
    let recall: Vec<&[Recall]> =
        std::iter::once(&result.recall).chain(result.controls().map(|c| &c.recall)).map(Vec::as_slice).collect();
    rows.extend(recall_rows(&recall));
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let text = output::table(&header, &rows);
    if e.loss_by_position.is_empty() {
        return text;
    }
    let all = std::iter::once(e).chain(result.controls().map(|control| &control.evaluation));
    let columns: Vec<_> = all.map(|e| places(&e.loss_by_position)).collect();
    let rows: Vec<Vec<String>> = columns[0]
        .iter()
        .enumerate()
        .map(|(i, (positions, _))| {
            let (first, last) = (positions.start(), positions.end());
            let place = if first == last { first.to_string() } else { format!("{first} to {last}") };
            std::iter::once(place).chain(columns.iter().map(|column| format!("{:.4}", column[i].1))).collect()
        })
        .collect();
    let header: Vec<&str> =
        ["tokens of context", "loss (nats/token)"].into_iter().chain(header.into_iter().skip(2)).collect();
    format!("{text}\n\n{}", output::table(&header, &rows))
}

/// Returns two rows for each length, one of pass keys and one of pairs: what the model found again,
/// then what each control did.
fn recall_rows(recall: &[&[Recall]]) -> Vec<Vec<String>> {
    let row = |name: &str, i: usize, task: usize| {
        let title = format!("{name} over {} tokens (nats/token)", output::thousands(recall[0][i].tokens as u64));
        let found = recall.iter().filter_map(|lengths| lengths.get(i));
        std::iter::once(title).chain(found.map(|recall| recall_cells(recall)[task].clone())).collect()
    };
    let rows = |i| [row("pass keys recalled", i, 0), row("pairs recalled", i, 1)];
    (0..recall[0].len()).flat_map(rows).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_as_wide_as_each_other_and_few() {
        assert_eq!(places(&[3.0, 1.0]), [(1..=1, 3.0), (2..=2, 1.0)]);
        assert_eq!(places(&[]), []);
        let losses: Vec<f64> = (1..=70).map(f64::from).collect();
        let places = places(&losses);
        assert_eq!((places.len(), &places[0], &places[23]), (24, &(1..=3, 2.0), &(70..=70, 70.0)));
    }
}

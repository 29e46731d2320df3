//! This module is the command `performer-lm generate`.

use std::{io, time::Instant};

use anyhow::{Context, Result};
use serde::Serialize;

use super::{args::Machine, output, paths, unfinished};
use crate::{
    generate::{Continuation, Generation, Sampling, Stop},
    model::pretrained,
};

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm generate runs/seed-favor-m128-seed42
  performer-lm generate runs/seed-favor-m128-seed42 --prompt 'The cat' --temperature 0.5 --seed 3
  performer-lm generate runs/seed-favor-m128-seed42 --temperature 0 --max-tokens 50 --json")]
pub(super) struct Args {
    /// Checkpoint folder, Hugging Face folder or hub id, llama2.c .bin, or .gguf file.
    model: String,
    /// Text to continue; with -, all that stdin has, without line breaks at its end.
    #[arg(long, default_value = "Once upon a time")]
    prompt: String,
    /// Most tokens to write; the model may end the text before.
    #[arg(long, default_value_t = 256)]
    max_tokens: usize,
    /// Go on with a next text where the model ends one, up to --max-tokens.
    #[arg(long)]
    ignore_end: bool,
    /// Divides the logits; 0 takes the likeliest token always.
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Choose among so many of the likeliest tokens.
    #[arg(long)]
    top_k: Option<usize>,
    /// Choose among the likeliest tokens up to this total probability.
    #[arg(long, default_value_t = 0.95)]
    top_p: f64,
    /// Seed of the choices.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Print one JSON object at the end instead of streaming the text.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Written {
    prompt: String,
    text: String,
    tokens: usize,
    tokens_per_second: f64,
    state_bytes: usize,
}

pub(super) fn run(args: Args, machine: &Machine) -> Result<()> {
    let (model, tokenizer) = pretrained::load_with(&args.model, &machine.device, &output::TERMINAL)?;
    paths::warn(&model, false)?;
    unfinished::note(&args.model);
    let sampling =
        Sampling { temperature: args.temperature, top_k: args.top_k, top_p: Some(args.top_p), seed: args.seed };
    let prompt = match args.prompt.as_str() {
        "-" => io::read_to_string(io::stdin())
            .context("cannot read the prompt from stdin")?
            .trim_end_matches(['\n', '\r'])
            .into(),
        _ => args.prompt,
    };
    let mut continuation = Continuation::new(&model, &tokenizer, &prompt, sampling)?;
    if args.ignore_end {
        continuation = continuation.past_ends();
    }
    let room = continuation.room();
    if room < args.max_tokens {
        output::note(&format!(
            "the model has positions for {room} tokens after this prompt, not for {}",
            args.max_tokens
        ));
    }
    let mut text = String::new();
    if !args.json {
        output::bytes(prompt.as_bytes())?;
    }
    // The first token comes after the prompt was read. Neither is counted.
    let mut first: Option<Instant> = None;
    let generation = continuation.write(args.max_tokens, |piece| {
        first.get_or_insert_with(Instant::now);
        if args.json {
            text.push_str(piece);
        } else {
            output::bytes(piece.as_bytes())?;
        }
        Ok(true)
    });
    if !args.json {
        output::bytes(b"\n")?;
    }
    let generation = generation?;
    let passes = passes_after_the_first(&generation) as f64;
    let tokens_per_second = first.map_or(0.0, |first| passes / first.elapsed().as_secs_f64().max(1e-9));
    if generation.stop == Stop::PositionsUsedUp {
        output::note("(the model has no more positions)");
    }
    output::note(&format!(
        "{} tokens, {tokens_per_second:.0} tokens/s, {} bytes of decoding state{}",
        generation.tokens,
        output::thousands(generation.state_bytes as u64),
        match model.config().growing_layers() {
            0 => String::new(),
            n => format!(", which grow with every token in {n} of {} layers", model.config().layers),
        }
    ));
    if args.json {
        output::json(&Written {
            prompt,
            text,
            tokens: generation.tokens,
            tokens_per_second,
            state_bytes: generation.state_bytes,
        })?;
    }
    Ok(())
}

/// Returns how many tokens the model has computed since it had written the first one. The token
/// that ended the text is one of them, though it was not written.
fn passes_after_the_first(generation: &Generation) -> usize {
    let end = usize::from(generation.stop == Stop::EndOfText);
    (generation.tokens + end).saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_that_ends_a_text_takes_its_time_too() {
        let passes = |tokens, stop| passes_after_the_first(&Generation { tokens, stop, state_bytes: 0 });
        assert_eq!([0, 1, 5].map(|tokens| passes(tokens, Stop::MaxTokens)), [0, 0, 4]);
        assert_eq!([0, 1, 5].map(|tokens| passes(tokens, Stop::EndOfText)), [0, 1, 5]);
    }
}

//! This module is the command `performer-lm data`.

use anyhow::Result;
use clap::Subcommand;
use serde::Serialize;

use super::{
    args::{DataArgs, Machine},
    output,
};
use crate::data::{DEFAULT_VOCAB_SIZE, Prepared, TokenFile};

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm data prepare --data tinystories     fetch, train the tokenizer, encode, cache
  performer-lm data inspect --data stories.txt     sizes, and a story as the model sees it")]
pub(super) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Fetch and encode a corpus into the cache.
    #[command(after_help = "\
Example:
  performer-lm data prepare --data tinystories")]
    Prepare(Options),
    /// Prepare the data and show what is in it.
    #[command(after_help = "\
Examples:
  performer-lm data inspect --data stories.txt
  performer-lm data inspect --data sample --json")]
    Inspect(Options),
}

#[derive(clap::Args)]
struct Options {
    #[command(flatten)]
    data: DataArgs,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Summary {
    corpus: String,
    description: String,
    vocab_size: usize,
    train: Split,
    valid: Split,
    #[serde(skip_serializing_if = "Option::is_none")]
    test: Option<Split>,
    /// The folder of the cache, where the data is kept in one.
    #[serde(skip_serializing_if = "Option::is_none")]
    cache: Option<String>,
    /// The first tokens of the held-out text, for `inspect`.
    #[serde(skip_serializing_if = "Option::is_none")]
    beginning: Option<Vec<String>>,
}

#[derive(Serialize)]
struct Split {
    stories: u64,
    bytes: u64,
    tokens: u64,
    bytes_per_token: f64,
}

impl Split {
    fn new(file: &TokenFile) -> Self {
        let tokens = file.len() as u64;
        Self {
            stories: file.documents(),
            bytes: file.bytes(),
            tokens,
            bytes_per_token: file.bytes() as f64 / tokens.max(1) as f64,
        }
    }

    fn row(&self, name: &str) -> Vec<String> {
        let mut row = vec![name.to_string()];
        row.extend([self.stories, self.bytes, self.tokens].map(output::thousands));
        row.push(format!("{:.3}", self.bytes_per_token));
        row
    }
}

pub(super) fn run(args: Args, _machine: &Machine) -> Result<()> {
    let (options, inspect) = match args.action {
        Action::Prepare(options) => (options, false),
        Action::Inspect(options) => (options, true),
    };
    let data = options.data.prepare(DEFAULT_VOCAB_SIZE)?;
    let summary = Summary {
        corpus: data.corpus_name.clone(),
        description: data.description.clone(),
        vocab_size: data.tokenizer.vocab_size(),
        train: Split::new(&data.train),
        valid: Split::new(&data.valid),
        test: data.test.as_deref().map(Split::new),
        cache: data.cache.as_deref().map(|dir| dir.display().to_string()),
        beginning: inspect.then(|| first_tokens(&data)).transpose()?,
    };
    if options.json {
        return output::json(&summary);
    }
    let mut rows = vec![summary.train.row("train"), summary.valid.row("valid")];
    rows.extend(summary.test.as_ref().map(|test| test.row("test")));
    let table = output::table(&["split", "stories", "bytes", "tokens", "bytes/token"], &rows);
    let mut text = format!("{}\nvocabulary {}\n\n{table}", summary.description, summary.vocab_size);
    if let Some(beginning) = &summary.beginning {
        text.push_str(&format!("\n\nbeginning of the held-out text, tokens apart:\n{}", beginning.join("|")));
    }
    output::result(&text)
}

/// Returns the texts of the first tokens of the held-out text.
fn first_tokens(data: &Prepared) -> Result<Vec<String>> {
    let tokens = data.valid.read(0..data.valid.len().min(60));
    tokens.iter().map(|&t| data.tokenizer.decode(&[t])).collect()
}

//! This module is the command `performer-lm export`.

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;

use super::{args::require_another_folder, output};
use crate::model::pretrained::{Pretrained, export, export_over};

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm export runs/mine --out mine-hf
  performer-lm export stories15M.bin --out stories15m-hf")]
pub(super) struct Args {
    /// Checkpoint folder, Hugging Face folder or hub id, llama2.c .bin, or .gguf file.
    model: String,
    /// What to write.
    #[arg(long, value_enum, default_value_t = Format::Hf)]
    format: Format,
    /// Folder to write.
    #[arg(long)]
    out: PathBuf,
    /// Replace what the folder holds.
    #[arg(long)]
    overwrite: bool,
}

/// A format to write.
#[derive(Clone, Copy, ValueEnum)]
enum Format {
    /// A Hugging Face folder. Models with softmax attention open in any tool; a Performer's keeps
    /// its attention and projections for this program.
    Hf,
}

pub(super) fn run(args: Args) -> Result<()> {
    require_another_folder(&args.model, &args.out)?;
    let model = Pretrained::open_with(&args.model, &output::TERMINAL)?;
    match args.format {
        Format::Hf if args.overwrite => export_over(&model, &args.out)?,
        Format::Hf => export(&model, &args.out)?,
    }
    let divides_heads = (0..model.config.layers).any(|layer| model.config.attention_of(layer).by_head().len() > 1);
    let who = if model.config.is_softmax() {
        "opens in any tool that reads Hugging Face folders"
    } else if divides_heads {
        "this program reads it, and nothing else, as its heads have different attentions"
    } else {
        "this program reads it, and PyTorch by scripts/performer_torch.py of its repository"
    };
    output::note(&format!("saved in {}: {who}", args.out.display()));
    Ok(())
}

//! This module is the command `performer-lm gpu-check`.

use std::path::PathBuf;

use anyhow::{Result, bail};

use super::{args::Machine, bench::read_others, output};
use crate::{
    files,
    gpu_check::{self, Extent, Report},
};

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  performer-lm gpu-check --device cuda
  performer-lm gpu-check --device cuda --out h100.json
  performer-lm gpu-check --device cpu --quick
  performer-lm gpu-check --device cuda --against torch.json

The last puts PyTorch's FlashAttention beside, as scripts/torch_attention.py timed it on this card:

  python3 scripts/torch_attention.py --device cuda --dtype bf16 --heads 64 --tokens 512,1024,2048,4096,8192,16384 > torch.json

Every kernel against a reference in f64, timings of attention, a short training run: minutes on a GPU. It fails if a result is
wrong.")]
pub(super) struct Args {
    /// Small sizes: half a minute on a CPU.
    #[arg(long)]
    quick: bool,
    /// Leave out timings and training.
    #[arg(long, conflicts_with = "against")]
    only_checks: bool,
    /// Measurements of scripts/torch_attention.py to put beside ours.
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    /// File for the results as JSON.
    #[arg(long, default_value = "gpu-check.json")]
    out: PathBuf,
    /// Print the results as JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args, machine: &Machine) -> Result<()> {
    let extent = if args.quick { Extent::Quick } else { Extent::Full };
    if machine.device.is_cpu() && extent == Extent::Full {
        output::note("there is no GPU here: the CPU takes long for these sizes (--quick for small ones)");
    }
    let pytorch = args.against.as_deref().map(read_others).transpose()?;
    let report = gpu_check::run(&machine.device, extent, args.only_checks, pytorch.as_ref(), output::note)?;
    if let Some(path) = &args.against
        && report.speed.iter().all(|s| s.pytorch_milliseconds.is_none())
    {
        output::note(&format!("{} has none of the sizes that were timed: see --help", path.display()));
    }
    files::write_json(&args.out, &report)?;
    output::note(&format!("saved {}", args.out.display()));
    if args.json {
        output::json(&report)?
    } else {
        output::result(&tables(&report))?
    }
    let failed = report.checks.iter().filter(|c| !c.passed).count();
    if failed > 0 {
        bail!("{failed} of {} checks failed on {}", report.checks.len(), report.device);
    }
    Ok(())
}

fn tables(report: &Report) -> String {
    let mut checks: Vec<Vec<String>> = Vec::new();
    for check in report.checks.iter().filter(|c| !c.passed) {
        let error = check.error.map_or("not finite".to_string(), |e| format!("{e:.1e}"));
        let because = check.because.clone().unwrap_or_default();
        checks.push(vec![check.what.clone(), error, format!("{:.0e}", check.tolerance), because]);
    }
    let speed: Vec<Vec<String>> = report
        .speed
        .iter()
        .map(|s| {
            vec![
                s.attention.clone(),
                format!("{:?}", s.work).to_lowercase(),
                output::thousands(s.tokens as u64),
                s.heads.to_string(),
                s.dtype.clone(),
                format!("{:.3}", s.milliseconds),
                format!("{:.3}–{:.3}", s.quartiles.0, s.quartiles.1),
                output::thousands(s.picoseconds as u64),
                s.pytorch_milliseconds.map(|ms| format!("{ms:.3}")).unwrap_or_default(),
                s.pytorch_milliseconds.map(|ms| format!("{:.2}", ms / s.milliseconds)).unwrap_or_default(),
                s.memory_mib.map(output::thousands).unwrap_or_default(),
            ]
        })
        .collect();
    let training: Vec<Vec<String>> = report
        .training
        .iter()
        .map(|t| {
            vec![
                format!("{} {}", t.preset, t.attention_spec),
                output::thousands(t.params as u64),
                format!("{:?}", t.dtype).to_lowercase(),
                output::thousands(t.tokens_per_second as u64),
                format!("{:.3}", t.val_loss),
            ]
        })
        .collect();
    let passed = report.checks.iter().filter(|c| c.passed).count();
    let mut text =
        format!("{}: {passed} of {} checks passed, {:.0} s\n", report.device, report.checks.len(), report.seconds);
    if !checks.is_empty() {
        text += &format!("\n{}\n", output::table(&["failed", "error", "allowed", "because"], &checks));
    }
    let header = [
        "attention",
        "work",
        "tokens",
        "heads",
        "type",
        "ms",
        "quartiles",
        "ps/token/head",
        "SDPA ms",
        "times as fast",
        "MiB",
    ];
    if report.speed.is_empty() && report.training.is_empty() && report.skipped.is_empty() {
        return text;
    }
    text += &format!("\n{}\n", output::table(&header, &speed));
    for skipped in &report.skipped {
        text += &format!("\nskipped: {skipped}\n");
    }
    text + &format!("\n{}", output::table(&["training", "parameters", "type", "tokens/s", "val loss"], &training))
}

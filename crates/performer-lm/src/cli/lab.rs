//! `performer-lm lab`: experiments on FAVOR+, each with a short table, charts and a page.

mod tasks;

use std::{path::PathBuf, sync::atomic::AtomicBool, time::Instant};

use anyhow::Result;
use clap::Subcommand;
use serde_json::{Map, Value};

use super::{args::Machine, output};
use crate::lab::{self, Findings, Provenance};

#[derive(Subcommand)]
pub(super) enum Command {
    /// Quality: small tasks, each learned with several attentions under equal conditions.
    Tasks(tasks::Args),
}

pub(super) fn run(command: Command, machine: &Machine, stop: &AtomicBool) -> Result<()> {
    match command {
        Command::Tasks(args) => tasks::run(args, machine, stop),
    }
}

/// Where findings go.
#[derive(clap::Args)]
pub(super) struct Common {
    /// Folder for data.json, charts and report.html.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Print all numbers as JSON.
    #[arg(long)]
    json: bool,
}

impl Common {
    fn finish(&self, machine: &Machine, begun: Instant, findings: &[Findings]) -> Result<()> {
        let provenance = Provenance::this(machine.threads, begun.elapsed().as_secs_f64());
        if let Some(out) = &self.out {
            lab::save(out, &provenance, findings)?;
            output::note(&format!("report in {}", out.join("report.html").display()));
        }
        if self.json {
            let data: Map<String, Value> = findings.iter().map(|f| (f.name.to_string(), f.data.clone())).collect();
            return output::json(&data);
        }
        for found in findings {
            output::result(&format!("{}\n", found.title))?;
            for section in &found.sections {
                let Some(table) = &section.table else { continue };
                let header: Vec<&str> = table.header.iter().map(String::as_str).collect();
                output::result(&format!("{}\n\n{}\n", section.title, output::table(&header, &table.rows)))?;
            }
        }
        Ok(())
    }
}

//! The lab: questions about FAVOR+, each answered by one experiment as numbers, charts and a page.
//!
//! An experiment returns [`Findings`], which are plain data; [`save`] writes any number of them as a folder with `data.json`, the charts as SVG
//! and PNG, and `report.html`.

pub mod ablate;
pub mod crossover;
pub mod error;
mod heads;
mod page;
pub mod suggest;
pub mod tasks;

use std::path::Path;

use anyhow::Result;
use candle_core::Device;
use serde::Serialize;
use serde_json::Value;

pub use heads::{Heads, Source, shipped};

use crate::{files, machine::Machine, plot::Chart, train::git_revision};

/// What one experiment found.
#[derive(Clone, Debug)]
pub struct Findings {
    /// Short name, of which names of charts and the key in `data.json` are made: `error`.
    pub name: &'static str,
    /// The question, as a heading.
    pub title: String,
    /// The answer in a few sentences, and how it was measured.
    pub summary: Vec<String>,
    /// What led to it, in reading order; the first with a table is the answer in numbers, which is printed.
    pub sections: Vec<Section>,
    /// Every number behind it.
    pub data: Value,
}

/// A part of [`Findings`]: text, then a chart, then a table, each if there is one.
#[derive(Clone, Debug, Default)]
pub struct Section {
    /// Heading.
    pub title: String,
    /// Paragraphs.
    pub text: Vec<String>,
    /// Short name and chart; the file is named after both the experiment's and this name.
    pub chart: Option<(&'static str, Chart)>,
    /// Numbers worth reading.
    pub table: Option<Table>,
}

/// Columns and rows of text, as they are shown.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Headings; the first column is to the left, the others hold numbers.
    pub header: Vec<String>,
    /// Rows of as many cells.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings and no rows yet.
    pub fn new(header: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { header: header.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    /// Adds a row.
    pub fn push(&mut self, row: impl IntoIterator<Item = impl Into<String>>) {
        self.rows.push(row.into_iter().map(Into::into).collect());
    }
}

/// Where and how findings came to be.
#[derive(Clone, Debug, Serialize)]
pub struct Provenance {
    /// The machine.
    pub machine: Machine,
    /// Threads used.
    pub threads: usize,
    /// The command line.
    pub command: String,
    /// Revision of the source.
    pub revision: &'static str,
    /// How long it all took.
    pub seconds: f64,
}

impl Provenance {
    /// Of this process, begun `seconds` ago, which computed on `device`.
    pub fn this(device: &Device, threads: usize, seconds: f64) -> Self {
        let command =
            std::iter::once("performer-lm".into()).chain(std::env::args().skip(1)).collect::<Vec<_>>().join(" ");
        Self { machine: Machine::with(device), threads, command, revision: git_revision(), seconds }
    }
}

/// Writes findings as a folder: `data.json`, `NAME-CHART.svg` and `.png`, `report.html`.
///
/// # Errors
/// If a chart cannot be drawn or a file not be written.
pub fn save(folder: &Path, provenance: &Provenance, findings: &[Findings]) -> Result<()> {
    let mut data = serde_json::Map::new();
    data.insert("provenance".into(), serde_json::to_value(provenance)?);
    for found in findings {
        data.insert(found.name.into(), found.data.clone());
        for (name, chart) in found.sections.iter().filter_map(|section| section.chart.as_ref()) {
            // Single size: reports are committed, and the page has its charts as SVG.
            chart.save_at(&folder.join(format!("{}-{name}", found.name)), 1.0)?;
        }
    }
    files::write_json(&folder.join("data.json"), &data)?;
    files::write(&folder.join("report.html"), page::html(provenance, findings)?.as_bytes())
}

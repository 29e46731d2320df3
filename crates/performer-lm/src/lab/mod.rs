//! This module is the lab: questions about FAVOR+, each answered by one experiment in numbers,
//! charts and a page.
//!
//! An experiment returns [`Findings`], which are plain data; [`save`] writes any number of them as
//! a folder with `data.json`, the charts as SVG and PNG, and `report.html`.

pub mod ablate;
pub mod crossover;
pub mod error;
mod heads;
mod page;
pub mod suggest;
pub mod tasks;

use std::path::Path;

use anyhow::{Result, bail};
use candle_core::Device;
use serde::Serialize;
use serde_json::Value;

pub use heads::{Heads, Source, shipped};

use crate::{errors::Cause, files, machine::Machine, plot::Chart, revision::command_line, train::git_revision};

/// `Findings` are the result of one experiment.
#[derive(Clone, Debug)]
pub struct Findings {
    /// Short name, such as `error`; it is the key in `data.json` and part of the file names of
    /// charts.
    pub name: &'static str,
    /// The question, as a heading.
    pub title: String,
    /// The answer in a few sentences, and how it was measured.
    pub summary: Vec<String>,
    /// The evidence, in reading order. The first section with a table has the answer in numbers,
    /// which is printed.
    pub sections: Vec<Section>,
    /// All numbers behind the findings.
    pub data: Value,
}

impl Findings {
    /// The charts of the sections, by name.
    fn charts(&self) -> impl Iterator<Item = &(String, Chart)> {
        self.sections.iter().filter_map(|section| section.chart.as_ref())
    }
}

/// A `Section` is a part of [`Findings`]: text, then a chart, then a table, each if there is one.
#[derive(Clone, Debug, Default)]
pub struct Section {
    /// Heading.
    pub title: String,
    /// Paragraphs.
    pub text: Vec<String>,
    /// Short name and chart; the file name is made of the experiment's name and this one.
    pub chart: Option<(String, Chart)>,
    /// A table of the most important numbers.
    pub table: Option<Table>,
}

/// A `Table` has columns and rows of text, as they are shown.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Headings; the first column is aligned to the left, the others hold numbers.
    pub header: Vec<String>,
    /// Rows, each with as many cells as there are headings.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// Makes a table with these headings and no rows yet.
    pub fn new(header: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { header: header.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    /// Adds a row.
    pub fn push(&mut self, row: impl IntoIterator<Item = impl Into<String>>) {
        self.rows.push(row.into_iter().map(Into::into).collect());
    }
}

/// `Provenance` says where and how findings were made.
#[derive(Clone, Debug, Serialize)]
pub struct Provenance {
    /// The machine on which the findings were put together. Runs that were found finished may
    /// have been made on another one.
    pub machine: Machine,
    /// Number of threads used.
    pub threads: usize,
    /// The command line.
    pub command: String,
    /// Revision of the source.
    pub revision: &'static str,
    /// Seconds that the command took, without those of runs that it found finished.
    pub seconds: f64,
}

/// Formats bytes of decoding state, with a + if they grow with every token. A dash stands for 0,
/// which means that there is no state, or that the version that made the result did not measure it.
fn state_text(bytes: usize, grows: bool) -> String {
    match bytes {
        0 => "–".into(),
        _ => format!("{bytes}{}", if grows { " +" } else { "" }),
    }
}

/// The text with its first letter as a capital one, for the beginning of a sentence.
fn capitalised(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

impl Provenance {
    /// Describes this process, begun `seconds` ago, which computed on `device`.
    pub fn this(device: &Device, threads: usize, seconds: f64) -> Self {
        Self { machine: Machine::with(device), threads, command: command_line(), revision: git_revision(), seconds }
    }
}

/// Refuses a folder in which [`save`] would replace what is no report, or a report of another
/// experiment than those that are named. Charts are not looked at.
///
/// # Errors
/// If there is such a file; the message names it.
pub fn check(folder: &Path, experiments: &[&str]) -> Result<()> {
    files::require_own(folder, ("data.json", "provenance"), &["report.html"])?;
    let earlier = std::fs::read(folder.join("data.json")).ok();
    let earlier = earlier.and_then(|text| serde_json::from_slice::<serde_json::Map<_, Value>>(&text).ok());
    let is_other = |name: &&String| !["provenance", "charts"].iter().chain(experiments).any(|known| known == name);
    match earlier.iter().flat_map(|report| report.keys()).find(is_other) {
        Some(other) => bail!(Cause::WouldReplace(format!(
            "{} holds the report of `lab {other}`, which would be lost: choose another folder",
            folder.display()
        ))),
        None => Ok(()),
    }
}

/// Writes findings as a folder: `data.json`, `NAME-CHART.svg` and `.png`, `report.html`.
///
/// # Errors
/// If a chart cannot be drawn or a file cannot be written.
pub fn save(folder: &Path, provenance: &Provenance, findings: &[Findings]) -> Result<()> {
    let path = folder.join("data.json");
    let charts = || findings.iter().flat_map(|found| found.charts().map(|(name, _)| format!("{}-{name}", found.name)));
    // Charts of an earlier report that this one has not would be taken for some of this.
    let earlier = std::fs::read(&path).ok().and_then(|text| serde_json::from_slice::<Value>(&text).ok());
    let earlier = earlier.as_ref().and_then(|data| data["charts"].as_array()).into_iter().flatten();
    for name in earlier.filter_map(Value::as_str).filter(|name| charts().all(|chart| chart != *name)) {
        // No other file than one that a report could have written.
        if !name.contains(['/', '\\', '.']) {
            ["svg", "png"].iter().try_for_each(|end| files::remove(&folder.join(format!("{name}.{end}"))))?;
        }
    }
    let mut data = serde_json::Map::new();
    data.insert("provenance".into(), serde_json::to_value(provenance)?);
    data.insert("charts".into(), charts().collect::<Vec<_>>().into());
    for found in findings {
        data.insert(found.name.into(), found.data.clone());
        for (name, chart) in found.charts() {
            // The PNG has single size, because reports are committed and the page has its charts as
            // SVG.
            chart.save_at(&folder.join(format!("{}-{name}", found.name)), 1.0)?;
        }
    }
    files::write_json(&path, &data)?;
    files::write(&folder.join("report.html"), page::html(provenance, findings)?.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plot::Series;

    fn findings(charts: &[&str]) -> Findings {
        let section = |name: &&str| Section {
            title: name.to_string(),
            text: Vec::new(),
            chart: Some((
                name.to_string(),
                Chart { series: vec![Series::new("a", [(1.0, 2.0), (2.0, 3.0)])], ..Chart::default() },
            )),
            table: None,
        };
        let sections = charts.iter().map(section).collect();
        Findings { name: "tasks", title: "Tasks".into(), summary: Vec::new(), sections, data: Value::Null }
    }

    /// A report is replaced by one of the same experiment, and by none of another.
    #[test]
    fn a_report_of_another_experiment_is_kept() -> Result<()> {
        let folder = tempfile::tempdir()?;
        check(folder.path(), &["crossover"])?;
        save(folder.path(), &Provenance::this(&Device::Cpu, 1, 1.0), &[findings(&["recall"])])?;
        let before = std::fs::read(folder.path().join("data.json"))?;
        let refused = check(folder.path(), &["crossover"]).unwrap_err().to_string();
        assert!(refused.contains("holds the report of `lab tasks`"), "{refused}");
        for experiments in [&["tasks"][..], &["error", "crossover", "tasks", "ablate"]] {
            check(folder.path(), experiments)?;
        }
        assert_eq!(std::fs::read(folder.path().join("data.json"))?, before);
        Ok(())
    }

    /// A second report in a folder keeps no chart of the first, and no other file is removed.
    #[test]
    fn charts_of_an_earlier_report_are_removed() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let provenance = Provenance::this(&Device::Cpu, 1, 1.0);
        save(folder.path(), &provenance, &[findings(&["copying", "recall"])])?;
        std::fs::write(folder.path().join("tasks-notes.png"), "of the reader")?;
        save(folder.path(), &provenance, &[findings(&["recall"])])?;
        let there = |name: &str| folder.path().join(name).exists();
        for end in ["svg", "png"] {
            assert!(!there(&format!("tasks-copying.{end}")) && there(&format!("tasks-recall.{end}")), "{end}");
        }
        assert!(there("tasks-notes.png") && there("report.html"));
        Ok(())
    }
}

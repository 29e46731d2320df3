//! This module ends a training run for the person at the terminal: it shows the result and a story
//! that the model writes, each beside those of finished runs that differ in their attention alone,
//! draws their losses in one chart, and names the commands that show more.

use std::path::{Path, PathBuf};

use anyhow::Result;
use candle_core::Device;

use super::output;
use crate::{
    compare::loss_of_runs,
    eval::show_perplexity,
    generate::begin_story,
    train::{Report, load_model, runs_beside},
};

/// Most tokens of a story.
const STORY_TOKENS: usize = 256;

/// The most runs that are shown beside the run that ended.
const SHOWN_BESIDE: usize = 3;

/// A run that has ended, and those beside it.
pub(super) struct Ending {
    /// The run that ended, then those that differ from it in their attention alone.
    runs: Vec<(Report, PathBuf)>,
}

impl Ending {
    /// Finds the runs beside `out`, whose report is `report`: softmax first, then by name.
    ///
    /// # Errors
    /// If the folder in which `out` lies cannot be read.
    pub(super) fn new(report: &Report, out: &Path) -> Result<Self> {
        let mut beside = runs_beside(report, out)?;
        beside.sort_by_key(|(other, _)| (other.attention_spec != "softmax", other.attention_spec.clone()));
        beside.truncate(SHOWN_BESIDE);
        Ok(Self { runs: [(report.clone(), out.to_path_buf())].into_iter().chain(beside).collect() })
    }

    /// The table of results, with a column for each run.
    pub(super) fn table(&self) -> String {
        let columns: Vec<_> = self.runs.iter().map(|(report, _)| entries(report)).collect();
        let row = |i: usize, name: &str| -> Option<Vec<String>> {
            let values: Vec<_> = columns.iter().map(|column| column[i].1.clone()).collect();
            let shown = values.iter().map(|value| value.clone().unwrap_or_else(|| "-".into()));
            values.iter().any(Option::is_some).then(|| std::iter::once(name.to_string()).chain(shown).collect())
        };
        let rows: Vec<_> = columns[0].iter().enumerate().filter_map(|(i, (name, _))| row(i, name)).collect();
        let header = match self.runs.len() {
            1 => vec!["", "value"],
            runs => ["", "this run"].into_iter().chain((1..runs).map(|_| "beside it")).collect(),
        };
        output::table(&header, &rows)
    }

    /// Draws the losses as loss.svg and loss.png in the run's folder, shows a story by each model,
    /// and names the commands that write another one and, after a run from the beginning, those
    /// that show softmax beside it. `program` is how the program was called.
    ///
    /// # Errors
    /// If a log or a model cannot be read, or the chart not be written.
    pub(super) fn tell(&self, program: &str, from_the_beginning: bool) -> Result<()> {
        let (report, out) = &self.runs[0];
        let shown: Vec<(&Report, &Path)> = self.runs.iter().map(|(report, folder)| (report, &**folder)).collect();
        loss_of_runs(&shown)?.save(&out.join("loss"))?;
        for (report, folder) in &self.runs {
            // A few words are written as fast on the CPU, and every device's models load there.
            let (model, tokenizer) = load_model(folder, &Device::Cpu)?;
            if let Some(story) = begin_story(&model, &tokenizer, STORY_TOKENS)? {
                output::note(&format!("\n{} writes:\n\n{story}", report.attention_spec));
            }
        }
        output::note(&format!(
            "\nsaved in {0}, with the losses on the way in {0}/loss.png; another story by it:\n  \
             {program} generate {0} --seed 7",
            out.display()
        ));
        if from_the_beginning {
            let other = if report.attention_spec == "softmax" { "favor" } else { "softmax" };
            if self.runs.len() == 1 {
                output::note(&format!(
                    "train another attention, and both are shown beside each other (add the other options of this run):\n  \
                     {program} train --attention {other}"
                ));
            }
            let compared = if other == "softmax" { &report.attention_spec } else { other };
            output::note(&format!(
                "compared over several seeds (add the other options of this run):\n  \
                 {program} compare --attention softmax --attention {compared} --seeds 1,2,3"
            ));
        }
        Ok(())
    }
}

/// The rows of a report: their names, which are those of every report, and their values, which it
/// may not have.
fn entries(r: &Report) -> [(&'static str, Option<String>); 13] {
    let epochs: Vec<String> = r.epoch_seconds.iter().map(|s| format!("{s:.1}")).collect();
    let epochs = match &epochs[..] {
        [_, _, _, _, _, ..] => format!("{} ... {}", epochs[..2].join(" "), epochs[epochs.len() - 2..].join(" ")),
        _ => epochs.join(" "),
    };
    let grows = if r.state_grows { ", and grows with every token" } else { "" };
    let test = r.test.as_ref();
    let control = r.features_off.as_ref();
    [
        ("attention", Some(r.attention_spec.clone())),
        ("corpus", Some(r.corpus.clone())),
        ("parameters", Some(output::thousands(r.params as u64))),
        ("bytes of decoding state", Some(output::thousands(r.state_bytes as u64) + grows)),
        ("tokens trained on", Some(output::thousands(r.tokens))),
        ("validation loss (nats/token)", Some(format!("{:.4}", r.val_loss))),
        ("perplexity", Some(show_perplexity(r.perplexity, 3))),
        ("bits/byte", Some(format!("{:.4}", r.bits_per_byte))),
        ("loss with features off", control.map(|c| format!("{:.4} ({})", c.val_loss, c.attention_spec))),
        ("test loss (nats/token)", test.map(|test| format!("{:.4}", test.loss))),
        ("test perplexity", test.map(|test| show_perplexity(test.perplexity, 3))),
        ("seconds per epoch", Some(epochs)),
        ("tokens/s", Some(output::thousands(r.tokens_per_second as u64))),
    ]
}

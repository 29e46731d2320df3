//! This module ends a training run for the person at the terminal: it shows the result and a story
//! that the model writes, each beside those of finished runs that differ in their attention alone,
//! draws their losses in one chart, and names the commands that show more.

use std::path::{Path, PathBuf};

use anyhow::Result;
use candle_core::Device;

use super::{
    first_run::{self, Recorded},
    output,
};
use crate::{
    compare::{loss_of_run, loss_of_runs},
    eval::show_perplexity,
    generate::begin_story,
    revision::quoted,
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
    /// The run that comes with the program, where none of these is softmax.
    recorded: Option<Recorded>,
    /// The tokens of an epoch, the same for all of these.
    epoch_tokens: u64,
}

impl Ending {
    /// Finds the runs beside `out`, whose report is `report`: softmax first, then by name.
    ///
    /// # Errors
    /// If `out` is relative and the working folder is gone, or the run that comes with the program
    /// cannot be read.
    pub(super) fn new(report: &Report, out: &Path, epoch_tokens: u64) -> Result<Self> {
        let mut beside = runs_beside(report, out)?;
        beside.sort_by_key(|(other, folder)| {
            (other.attention_spec != "softmax", other.attention_spec.clone(), folder.clone())
        });
        beside.truncate(SHOWN_BESIDE);
        let softmax = beside.iter().any(|(other, _)| other.attention_spec == "softmax");
        let recorded = if softmax { None } else { first_run::beside(report)? };
        Ok(Self {
            runs: [(report.clone(), out.to_path_buf())].into_iter().chain(beside).collect(),
            recorded,
            epoch_tokens,
        })
    }

    /// The table of results, with a column for each run.
    pub(super) fn table(&self) -> String {
        let recorded = self.recorded.as_ref().map(|recorded| &recorded.report);
        let own = self.runs.iter().map(|(report, _)| entries(report, Some(self.epoch_tokens)));
        // Times of the recorded run would compare machines, not attentions.
        let columns: Vec<_> = own.chain(recorded.map(|report| entries(report, None))).collect();
        let row = |i: usize, name: &str| -> Option<Vec<String>> {
            let values: Vec<_> = columns.iter().map(|column| column[i].1.clone()).collect();
            let shown = values.iter().map(|value| value.clone().unwrap_or_else(|| "-".into()));
            values.iter().any(Option::is_some).then(|| std::iter::once(name.to_string()).chain(shown).collect())
        };
        let rows: Vec<_> = columns[0].iter().enumerate().filter_map(|(i, (name, _))| row(i, name)).collect();
        let beside = (1..self.runs.len()).map(|_| "beside it").chain(recorded.map(|_| "comes with the program"));
        let mut header: Vec<&str> = ["", "this run"].into_iter().chain(beside).collect();
        if header.len() == 2 {
            header[1] = "value";
        }
        output::table(&header, &rows)
    }

    /// Draws the losses as loss.svg and loss.png in the run's folder, shows a story by each model,
    /// and names the commands that write another one and, after a run from the beginning, those
    /// that show another attention beside this one: softmax, or FAVOR+ if this one is softmax.
    /// `program` is how the program was called.
    ///
    /// # Errors
    /// If a log or a model cannot be read, or the chart not be written.
    pub(super) fn tell(&self, program: &str, from_the_beginning: bool) -> Result<()> {
        let (report, out) = &self.runs[0];
        let mut curves = vec![loss_of_run(out)?];
        let mut shown = vec![&self.runs[0]];
        for run in &self.runs[1..] {
            match loss_of_run(&run.1) {
                Ok(curve) => {
                    curves.push(curve);
                    shown.push(run);
                }
                Err(error) => leave_out(&run.1, &error),
            }
        }
        let with_models =
            shown.iter().map(|(report, _)| report.attention_spec.as_str()).zip(curves.iter().map(|c| &**c));
        let recorded = self.recorded.iter().map(|run| (run.report.attention_spec.as_str(), &*run.curve));
        loss_of_runs(&report.corpus, &with_models.chain(recorded).collect::<Vec<_>>()).save(&out.join("loss"))?;
        for (report, folder) in shown {
            // A few words are written as fast on the CPU, and every device's models load there.
            let story = load_model(folder, &Device::Cpu)
                .and_then(|(model, tokenizer)| begin_story(&model, &tokenizer, STORY_TOKENS));
            match story {
                Ok(Some(story)) => output::note(&format!("\n{} writes:\n\n{story}", report.attention_spec)),
                Ok(None) => {}
                Err(error) if folder != out => leave_out(folder, &error),
                Err(error) => return Err(error),
            }
        }
        if let Some(Recorded { report, story, .. }) = &self.recorded {
            output::note(&format!(
                "\n{}, trained in the same way by revision {:.7} of this program, which comes with it, writes:\n\n{story}",
                report.attention_spec,
                report.key.as_ref().map_or("unknown", |key| &key.revision)
            ));
        }
        output::note(&format!(
            "\nsaved in {0}, with the losses on the way in {0}/loss.png; another story by it:\n  \
             {program} generate {1} --seed 7",
            out.display(),
            quoted(out)
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
                 {program} compare --attention softmax --attention {} --seeds 1,2,3",
                quoted(compared)
            ));
        }
        Ok(())
    }
}

/// Says that a run beside this one is not shown, which does not make this one fail.
fn leave_out(folder: &Path, error: &anyhow::Error) {
    output::note(&format!("{} is left out, for it cannot be read: {error:#}", folder.display()));
}

/// Returns the names and values of the rows of a report: the same names in the same order for every
/// report, and no value where it has none. Without the tokens of an epoch, rows of times have none.
fn entries(r: &Report, epoch_tokens: Option<u64>) -> [(&'static str, Option<String>); 13] {
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
        ("seconds per epoch", epoch_tokens.map(|tokens| epoch_seconds(r, tokens))),
        ("tokens/s", epoch_tokens.map(|_| output::thousands(r.tokens_per_second as u64))),
    ]
}

/// The seconds of each whole epoch, or what one would take where none is whole.
fn epoch_seconds(r: &Report, epoch_tokens: u64) -> String {
    let whole = (r.tokens / epoch_tokens.max(1)) as usize;
    let epochs: Vec<String> = r.epoch_seconds.iter().take(whole).map(|s| format!("{s:.1}")).collect();
    match &epochs[..] {
        [] => format!("about {:.0}", epoch_tokens as f64 / r.tokens_per_second.max(1e-9)),
        [_, _, _, _, _, ..] => format!("{} ... {}", epochs[..2].join(" "), epochs[epochs.len() - 2..].join(" ")),
        _ => epochs.join(" "),
    }
}

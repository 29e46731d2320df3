//! This module writes `metrics.jsonl`, which has one line for each step and one for each
//! validation.

use std::{
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// A `Record` is a line of `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Number of steps taken.
    pub step: usize,
    /// Epoch, from 0.
    pub epoch: usize,
    /// Number of tokens trained on.
    pub tokens: u64,
    /// Loss of the step's batch before the update, in nats per token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub train_loss: Option<f64>,
    /// Learning rate of the step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// Gradient norm before clipping.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradient_norm: Option<f64>,
    /// Validation loss, in nats per token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub val_loss: Option<f64>,
    /// Whether the validation took all of the held-out text, or its beginning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole: Option<bool>,
}

/// `Log` is the open log.
pub(super) struct Log {
    file: File,
    path: PathBuf,
}

impl Log {
    /// Opens the log for a run that stands at `step`, and removes lines of later steps, of which no
    /// checkpoint was made, and of the validation at the end, which is made again.
    pub(super) fn open(path: &Path, step: usize) -> Result<Self> {
        let context = || format!("cannot write {}", path.display());
        let kept: Vec<Record> = if step > 0 && path.exists() { read_log(path)? } else { Vec::new() };
        let mut lines = String::new();
        for record in kept.iter().filter(|r| r.step <= step && r.whole != Some(true)) {
            lines.push_str(&serde_json::to_string(record)?);
            lines.push('\n');
        }
        crate::files::write(path, lines.as_bytes())?;
        let file = OpenOptions::new().append(true).open(path).with_context(context)?;
        Ok(Self { file, path: path.to_path_buf() })
    }

    /// Waits until all lines are on the disk.
    pub(super) fn sync(&self) -> Result<()> {
        self.file.sync_data().with_context(|| format!("cannot write {}", self.path.display()))
    }

    pub(super) fn write(&mut self, record: &Record) -> Result<()> {
        let mut line = serde_json::to_string(record)?;
        line.push('\n');
        self.file.write_all(line.as_bytes()).with_context(|| format!("cannot write {}", self.path.display()))
    }
}

/// Reads the lines of a `metrics.jsonl`. A last line that was cut short when the process was killed
/// is left out.
///
/// # Errors
/// If the file cannot be read, or a line before the last is no record.
pub fn read_log(path: &Path) -> Result<Vec<Record>> {
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines: std::io::Result<Vec<_>> = BufReader::new(file).lines().collect();
    let lines = lines.with_context(|| format!("cannot read {}", path.display()))?;
    let mut records = Vec::with_capacity(lines.len());
    for (i, line) in lines.iter().enumerate() {
        match serde_json::from_str(line) {
            Ok(record) => records.push(record),
            Err(_) if i + 1 == lines.len() => break,
            Err(error) => {
                return Err(error).with_context(|| {
                    format!(
                        "{}, line {}, is no record of a training: restore the file, or remove it to go on without the \
                         losses so far",
                        path.display(),
                        i + 1
                    )
                });
            }
        }
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: usize) -> Record {
        Record {
            step,
            epoch: 0,
            tokens: 0,
            train_loss: Some(1.0),
            learning_rate: None,
            gradient_norm: None,
            val_loss: None,
            whole: None,
        }
    }

    #[test]
    fn a_resumed_log_forgets_what_was_not_saved() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut log = Log::open(&path, 0).unwrap();
        for step in 1..=5 {
            log.write(&record(step)).unwrap();
        }
        log.write(&Record { val_loss: Some(1.0), whole: Some(true), ..record(3) }).unwrap();
        log.file.write_all(b"{\"step\":6,\"ep").unwrap();
        drop(log);
        let mut log = Log::open(&path, 3).unwrap();
        log.write(&record(4)).unwrap();
        let steps: Vec<usize> = read_log(&path).unwrap().iter().map(|r| r.step).collect();
        assert_eq!(steps, [1, 2, 3, 4]);
    }
}

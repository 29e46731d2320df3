//! This module reads the index that a large model has beside its weights, which names the files
//! that hold them.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::Path;

use anyhow::{Context, Result, bail};

/// The files that an index of weights names, each once.
///
/// # Errors
/// A file that cannot be read or is no such index.
pub(crate) fn shards(index: &Path) -> Result<BTreeSet<String>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let json = std::fs::read(index).with_context(|| format!("cannot read {}", index.display()))?;
    let Index { weight_map } = serde_json::from_slice(&json)
        .with_context(|| format!("{} is no index of weights: copy it again", index.display()))?;
    let files: BTreeSet<String> = weight_map.into_values().collect();
    match files.iter().find(|file| Path::new(file).file_name() != Some(OsStr::new(file))) {
        None => Ok(files),
        Some(file) => bail!(
            "{} names {file}, which is no file beside this index of weights: copy the model again",
            index.display()
        ),
    }
}

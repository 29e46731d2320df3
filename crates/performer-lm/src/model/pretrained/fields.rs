//! This module reads fields of another program's configuration; errors name the file and the field
//! that is missing, wrong or not supported.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// `Fields` is the object in a JSON file.
pub(super) struct Fields {
    path: PathBuf,
    map: Map<String, Value>,
}

impl Fields {
    /// Reads a file.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let json = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let map = serde_json::from_slice(&json)
            .with_context(|| format!("{} is no JSON object: copy the model again", path.display()))?;
        Ok(Self { path: path.into(), map })
    }

    /// Whether a field is present, even if it is null.
    pub(super) fn has(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    /// Returns a field that may be absent or null.
    pub(super) fn get<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        match self.map.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => T::deserialize(value)
                .map(Some)
                .map_err(|error| anyhow!("{}: {name} is {value}: {error}", self.path.display())),
        }
    }

    /// Returns a field that must be present.
    pub(super) fn need<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        self.get(name)?.with_context(|| format!("{} lacks {name}, which this model needs", self.path.display()))
    }

    /// Returns token ids: one, or a list of them.
    pub(super) fn tokens(&self, name: &str) -> Result<Vec<u32>> {
        match self.get::<Value>(name)? {
            Some(Value::Array(_)) => self.need(name),
            _ => Ok(self.get(name)?.into_iter().collect()),
        }
    }

    /// Refuses a field that has any value but these; an absent field or null passes.
    pub(super) fn only(&self, name: &str, supported: &[Value]) -> Result<()> {
        match self.map.get(name) {
            None | Some(Value::Null) => Ok(()),
            Some(value) if supported.contains(value) => Ok(()),
            Some(value) if supported.is_empty() => Err(self.refusal(name, value)),
            Some(value) => {
                let supported: Vec<String> = supported.iter().map(Value::to_string).collect();
                Err(self.refusal(name, value).context(format!("supported is {}", supported.join(", "))))
            }
        }
    }

    fn refusal(&self, name: &str, value: &Value) -> anyhow::Error {
        anyhow!("{}: {name} is {value}, which is not supported; take a model without it", self.path.display())
    }

    /// Refuses the field, and says what its value is.
    pub(super) fn refuse<T>(&self, name: &str) -> Result<T> {
        bail!(self.refusal(name, self.map.get(name).unwrap_or(&Value::Null)))
    }
}

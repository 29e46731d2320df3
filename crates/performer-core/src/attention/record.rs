//! Named tensors and text, in which a state is saved, selected by rows and joined.

use std::{
    collections::BTreeMap,
    fmt,
    path::Path,
    str::FromStr,
    sync::atomic::{AtomicU64, Ordering},
};

use candle_core::{Device, Result, Tensor, bail};

/// Named tensors and text: a [`State`](super::State) in a form that can be saved and taken apart.
#[derive(Clone, Debug, Default)]
pub struct StateRecord {
    /// Tensors by name; the batch is the first dimension of each.
    pub tensors: BTreeMap<String, Tensor>,
    /// Everything else by name.
    pub fields: BTreeMap<String, String>,
}

impl StateRecord {
    /// A record of nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor.
    pub fn with_tensor(mut self, name: &str, tensor: Tensor) -> Self {
        self.tensors.insert(name.to_string(), tensor);
        self
    }

    /// Adds a field.
    pub fn with_field(mut self, name: &str, value: impl fmt::Display) -> Self {
        self.fields.insert(name.to_string(), value.to_string());
        self
    }

    /// Adds the gates of keys, if there are any.
    pub(super) fn with_gates(self, gates: Option<&Tensor>) -> Self {
        match gates {
            Some(gates) => self.with_tensor("gates", gates.clone()),
            None => self,
        }
    }

    /// The gates of `keys` `(B, Hkv, T, D)`, if they have any.
    pub(super) fn gates(&self, keys: &Tensor) -> Result<Option<Tensor>> {
        match self.tensors.get("gates") {
            Some(gates) if gates.dims() != &keys.dims()[..3] => {
                bail!("saved state: keys {:?} and gates {:?} do not belong together", keys.dims(), gates.dims())
            }
            gates => Ok(gates.cloned()),
        }
    }

    /// Adds everything in `inner` under names that begin with `prefix` and a dot.
    pub fn with_nested(mut self, prefix: &str, inner: Self) -> Self {
        self.tensors.extend(inner.tensors.into_iter().map(|(name, tensor)| (format!("{prefix}.{name}"), tensor)));
        self.fields.extend(inner.fields.into_iter().map(|(name, value)| (format!("{prefix}.{name}"), value)));
        self
    }

    /// What was added by [`Self::with_nested`] under this prefix.
    pub fn nested(&self, prefix: &str) -> Self {
        let inner = |name: &str| name.strip_prefix(prefix)?.strip_prefix('.').map(str::to_string);
        Self {
            tensors: self.tensors.iter().filter_map(|(name, t)| Some((inner(name)?, t.clone()))).collect(),
            fields: self.fields.iter().filter_map(|(name, f)| Some((inner(name)?, f.clone()))).collect(),
        }
    }

    /// A tensor by name.
    ///
    /// # Errors
    /// If it is missing.
    pub fn tensor(&self, name: &str) -> Result<&Tensor> {
        match self.tensors.get(name) {
            Some(tensor) => Ok(tensor),
            None => bail!("saved state: tensor {name} is missing; the file is damaged or holds something else"),
        }
    }

    /// A field by name.
    ///
    /// # Errors
    /// If it is missing or no `T`.
    pub fn field<T: FromStr>(&self, name: &str) -> Result<T> {
        match self.fields.get(name).map(|value| (value, value.parse())) {
            Some((_, Ok(value))) => Ok(value),
            Some((value, Err(_))) => bail!("saved state: field {name} is {value:?}, which cannot be read"),
            None => bail!("saved state: field {name} is missing; the file is damaged or holds something else"),
        }
    }

    /// Writes the record as a safetensors file, its fields as the file's metadata. An earlier file
    /// of this name is replaced only when the new one is complete on disk.
    ///
    /// # Errors
    /// Whatever keeps the file from being written; the message names it.
    pub fn save(&self, path: &Path) -> Result<()> {
        let fields = self.fields.clone().into_iter().collect();
        let named = |e: &dyn fmt::Display| candle_core::Error::Msg(format!("cannot save {}: {e}", path.display()));
        let tensors = self.tensors.iter().map(|(name, tensor)| Ok((name, tensor.contiguous()?)));
        let tensors = tensors.collect::<Result<Vec<_>>>()?;
        let bytes = safetensors::serialize(tensors, Some(fields)).map_err(|e| named(&e))?;
        // No other file has this name, nor does another thread or process write to it.
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let mut pending = path.as_os_str().to_owned();
        pending.push(format!(".{}-{}.new", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
        let write = || -> std::io::Result<()> {
            let mut file = std::fs::File::create(&pending)?;
            std::io::Write::write_all(&mut file, &bytes)?;
            file.sync_all()?;
            std::fs::rename(&pending, path)
        };
        write().map_err(|e| {
            // The part that was written is removed. If that fails too, the first error is still the
            // one to report.
            let _ = std::fs::remove_file(&pending);
            named(&e)
        })
    }

    /// Reads a file that [`Self::save`] wrote.
    ///
    /// # Errors
    /// If the file cannot be read or is no safetensors file; the message names it.
    pub fn load(path: &Path, device: &Device) -> Result<Self> {
        let named = |e: &dyn fmt::Display| candle_core::Error::Msg(format!("cannot load {}: {e}", path.display()));
        let bytes = std::fs::read(path).map_err(|e| named(&e))?;
        let header = safetensors::SafeTensors::read_metadata(&bytes).map_err(|e| named(&e))?;
        let fields = header.1.metadata().clone().unwrap_or_default();
        let tensors = candle_core::safetensors::load_buffer(&bytes, device).map_err(|e| named(&e))?;
        Ok(Self { tensors: tensors.into_iter().collect(), fields: fields.into_iter().collect() })
    }
}

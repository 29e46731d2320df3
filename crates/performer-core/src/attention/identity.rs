//! What an attention is, in a few words: what a state says of the attention that made it.

use std::{collections::BTreeMap, fmt, sync::Arc};

use candle_core::{DType, Device, Result, Tensor, bail};

/// What an attention is: its name, its settings, and a digest of its random or trained numbers.
///
/// A [`State`](super::State) keeps the identity of the attention that made it, and others refuse
/// it.
#[derive(Clone)]
pub struct Identity(Arc<BTreeMap<String, String>>);

impl Identity {
    /// An attention of this name, without settings.
    pub fn new(attention: &str) -> Self {
        Self(Arc::new(BTreeMap::from([("name".to_string(), attention.to_string())])))
    }

    /// Adds a setting.
    pub fn with(mut self, name: &str, value: impl fmt::Display) -> Self {
        Arc::make_mut(&mut self.0).insert(name.to_string(), value.to_string());
        self
    }

    /// Adds a digest of tensors: features that were drawn, fitted or trained. Two attentions whose
    /// numbers differ in a bit have different ones.
    ///
    /// # Errors
    /// If the tensors cannot be read.
    pub fn with_digest<'a>(self, tensors: impl IntoIterator<Item = &'a Tensor>) -> Result<Self> {
        let mut digest = blake3::Hasher::new();
        let mut any = false;
        for tensor in tensors {
            any = true;
            digest.update(format!("{:?}", tensor.dims()).as_bytes());
            // f32 numbers keep their bits in f64, which a GPU of Apple does not have.
            for number in tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()? {
                digest.update(&number.to_le_bytes());
            }
        }
        Ok(if any { self.with("digest", &digest.finalize().to_hex()[..32]) } else { self })
    }

    pub(super) fn fields(&self) -> impl Iterator<Item = (&String, &String)> {
        self.0.iter()
    }

    pub(super) fn from_fields(fields: BTreeMap<String, String>) -> Self {
        Self(Arc::new(fields))
    }

    /// Refuses to go on with `other` from a state that this attention made.
    pub(super) fn check(&self, other: &Self) -> Result<()> {
        if self == other {
            return Ok(());
        }
        let missing = String::from("none");
        let names = self.0.keys().chain(other.0.keys().filter(|name| !self.0.contains_key(*name)));
        let of = |identity: &Self, name: &str| identity.0.get(name).unwrap_or(&missing).clone();
        let differing: Vec<(&String, String, String)> =
            names.map(|name| (name, of(self, name), of(other, name))).filter(|(_, had, has)| had != has).collect();
        // The attentions of some heads each have a digest of their own.
        let is_digest = |name: &str| name == "digest" || name.ends_with(".digest");
        if !differing.is_empty() && differing.iter().all(|(name, ..)| is_digest(name)) {
            bail!(
                "state: it was made by another attention: same settings, but other random or trained features \
                 (another seed, or a model that was loaded without its projections)"
            );
        }
        let differing = differing.iter().filter(|(name, ..)| !is_digest(name));
        let words: Vec<String> = differing.map(|(name, had, has)| format!("{name} {had} and not {has}")).collect();
        bail!("state: it was made by another attention, of {}; begin a new state", words.join(", "))
    }
}

impl PartialEq for Identity {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0 == other.0
    }
}

impl Eq for Identity {}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.0.iter()).finish()
    }
}

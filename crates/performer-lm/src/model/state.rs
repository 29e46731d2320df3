//! The decoding state of a whole model: what it remembers of a text, to go on from, to keep, and to
//! copy.

use std::path::Path;

use anyhow::{Context, Result};
use candle_core::Device;
use performer_core::{State, attention::StateRecord};

/// A `DecoderState` holds the decoding states of all layers, of one sequence or of a batch.
#[derive(Clone, Debug)]
pub struct DecoderState {
    pub(super) layers: Vec<State>,
}

/// The name under which a layer's state lies in a file.
fn name(layer: usize) -> String {
    format!("layers.{layer}")
}

impl DecoderState {
    /// Returns the number of tokens seen so far.
    pub fn tokens(&self) -> usize {
        self.layers.first().map_or(0, State::tokens)
    }

    /// Returns the size of the state in bytes: constant in the number of tokens for FAVOR and
    /// windows, linear for softmax, and in a hybrid linear through its layers of softmax
    /// ([`ModelConfig::growing_layers`](crate::config::ModelConfig::growing_layers)).
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(State::bytes).sum()
    }

    /// Saves the state in a safetensors file: the prompt of many texts, say, which need not be read
    /// again.
    ///
    /// # Errors
    /// Whatever keeps the file from being written; an earlier file of this name is intact then.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let mut record = StateRecord::new().with_field("layers", self.layers.len());
        for (layer, state) in self.layers.iter().enumerate() {
            record = record.with_nested(&name(layer), state.record()?);
        }
        Ok(record.save(path.as_ref())?)
    }

    /// Loads a state that [`Self::save`] wrote, with the same bits. It belongs to its model, and
    /// another refuses to go on from it. Sums of FAVOR go on only on the kind of device on which
    /// they began.
    ///
    /// # Errors
    /// If the file cannot be read or holds something else.
    pub fn load(path: impl AsRef<Path>, device: &Device) -> Result<Self> {
        let path = path.as_ref();
        let record = StateRecord::load(path, device)?;
        let open = || -> candle_core::Result<Vec<State>> {
            let layers: usize = record.field("layers")?;
            (0..layers).map(|layer| State::from_record(&record.nested(&name(layer)))).collect()
        };
        let layers = open().with_context(|| format!("{} holds no state of a whole model", path.display()))?;
        Ok(Self { layers })
    }

    /// Returns the states of some sequences of the batch, in the order of their numbers `rows`; one
    /// may be named several times.
    ///
    /// # Errors
    /// If no token was seen yet, or there is no such sequence.
    pub fn select(&self, rows: &[usize]) -> Result<Self> {
        Ok(Self { layers: self.layers.iter().map(|state| state.select(rows)).collect::<candle_core::Result<_>>()? })
    }

    /// Returns one state of the sequences of several, one after the other. All must be of one model
    /// and have seen as many tokens.
    ///
    /// # Errors
    /// If there is none, or they do not fit each other.
    pub fn join(states: &[&Self]) -> Result<Self> {
        let count = states.iter().map(|state| state.layers.len()).max().context("there is no state to join")?;
        let layer = |layer: usize| -> Result<State> {
            let of_each = states.iter().map(|state| state.layers.get(layer));
            let of_each: Vec<&State> = of_each.collect::<Option<_>>().context("these states are of several models")?;
            Ok(State::join(&of_each)?)
        };
        Ok(Self { layers: (0..count).map(layer).collect::<Result<_>>()? })
    }
}

//! This module is the interface between tasks and models: sequences, and the positions in them
//! where a token is to be predicted.

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use performer_core::Mask;
use rand_chacha::ChaCha8Rng;

/// An `Example` is a sequence with the tokens to predict.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Example {
    pub(super) ids: Vec<u32>,
    /// Positions in `ids`, in order, and the token to predict at each.
    pub(super) answers: Vec<(usize, u32)>,
}

/// `Split` distinguishes examples to learn from and examples to be measured on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Split {
    Train,
    HeldOut,
}

/// A `Source` draws examples. An example is a function of the split and of the random numbers.
pub(super) trait Source: Sync {
    /// Returns the number of different tokens.
    fn vocabulary(&self) -> usize;

    /// Describes an example, with sizes and files.
    fn describe(&self) -> String;

    /// Returns a digest of the files that examples are cut from; `None` if examples are wholly
    /// drawn at random.
    fn files(&self) -> Option<blake3::Hash> {
        None
    }

    fn draw(&self, split: Split, rng: &mut ChaCha8Rng) -> Example;
}

/// A `Batch` holds several examples, padded to equal length.
pub(super) struct Batch {
    /// Token ids `(B, T)`, where T is the length of the longest example.
    pub(super) ids: Tensor,
    /// The mask of attention, which hides padding.
    pub(super) mask: Mask,
    /// Indices, among the `B·T` tokens, of the positions where a token is to be predicted.
    pub(super) places: Vec<u32>,
    /// The token to predict at each position.
    pub(super) targets: Vec<u32>,
}

impl Batch {
    /// Pads shorter examples on the right. The content of padding does not matter: its keys are
    /// hidden, and nothing is predicted there.
    pub(super) fn new(examples: &[Example], causal: bool, device: &Device) -> Result<Self> {
        let length = examples.iter().map(|example| example.ids.len()).max().context("the batch is empty")?;
        let (mut ids, mut keys) = (Vec::new(), Vec::new());
        let (mut places, mut targets) = (Vec::new(), Vec::new());
        for example in examples {
            let start = ids.len();
            ids.extend(&example.ids);
            ids.resize(start + length, 0);
            keys.resize(start + example.ids.len(), 1u8);
            keys.resize(start + length, 0);
            for &(place, target) in &example.answers {
                places.push((start + place) as u32);
                targets.push(target);
            }
        }
        let shape = (examples.len(), length);
        let mut mask = if causal { Mask::causal() } else { Mask::full() };
        // A causal model never sees what is to the right.
        if !causal && keys.contains(&0) {
            mask = mask.with_keys(&Tensor::from_vec(keys, shape, device)?)?;
        }
        Ok(Self { ids: Tensor::from_vec(ids, shape, device)?, mask, places, targets })
    }
}

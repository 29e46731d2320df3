//! What every task hands to a model: sequences, and the places in them where something is to be predicted.

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use performer_core::Mask;
use rand_chacha::{ChaCha8Rng, rand_core::Rng};

/// A sequence and what belongs where.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Example {
    pub(super) ids: Vec<u32>,
    /// Places in `ids`, in order, and the token to predict there.
    pub(super) answers: Vec<(usize, u32)>,
}

/// Examples to learn from, and others to be judged by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Split {
    Train,
    HeldOut,
}

/// Where examples come from. An example is a function of the split and of what the generator gives.
pub(super) trait Source: Sync {
    /// Tokens there are.
    fn vocabulary(&self) -> usize;

    /// What an example is, sizes and files included.
    fn describe(&self) -> String;

    /// Digest of the files that examples are cut from; none where all of an example is drawn at
    /// random.
    fn files(&self) -> Option<blake3::Hash> {
        None
    }

    fn draw(&self, split: Split, rng: &mut ChaCha8Rng) -> Example;
}

/// A number below `n`; its bias, at most `n / 2³²`, cannot be seen.
pub(super) fn below(rng: &mut ChaCha8Rng, n: usize) -> usize {
    ((u64::from(rng.next_u32()) * n as u64) >> 32) as usize
}

/// Puts `items` in a random order (Fisher and Yates).
pub(super) fn shuffle<T>(items: &mut [T], rng: &mut ChaCha8Rng) {
    for last in (1..items.len()).rev() {
        items.swap(last, below(rng, last + 1));
    }
}

/// Examples side by side.
pub(super) struct Batch {
    /// `(B, T)`, T that of the longest.
    pub(super) ids: Tensor,
    /// Which keys are seen.
    pub(super) mask: Mask,
    /// Indices into the `B·T` tokens.
    pub(super) places: Vec<u32>,
    /// What belongs there.
    pub(super) targets: Vec<u32>,
}

impl Batch {
    /// Pads the shorter ones on the right. What a pad holds does not matter: its key is hidden, and nothing is asked of it.
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
        // A causal model never looks at what is to the right.
        if !causal && keys.contains(&0) {
            mask = mask.with_keys(&Tensor::from_vec(keys, shape, device)?)?;
        }
        Ok(Self { ids: Tensor::from_vec(ids, shape, device)?, mask, places, targets })
    }
}

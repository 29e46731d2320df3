//! Ranks in rows: which of them share a sequence, and which share a batch.

use std::{ops::Range, sync::Arc};

use crate::{One, Ranks, Result};

/// A `Grid` is all ranks of a training. Each sequence is cut over `segments` neighbouring ranks, a
/// group; the sequences of a batch are divided over the groups.
#[derive(Clone, Debug)]
pub struct Grid {
    world: Arc<dyn Ranks>,
    sequence: Arc<dyn Ranks>,
}

impl Grid {
    /// One process.
    pub fn one() -> Self {
        Self { world: Arc::new(One), sequence: Arc::new(One) }
    }

    /// Lays out ranks. `segments` must divide their number.
    ///
    /// # Errors
    /// If a rank does not take part before the deadline.
    ///
    /// # Panics
    /// If `segments` does not divide the number of ranks.
    pub fn new(world: Arc<dyn Ranks>, segments: usize) -> Result<Self> {
        assert!(segments > 0 && world.size().is_multiple_of(segments), "segments must divide the number of ranks");
        let sequence = if segments == 1 { Arc::new(One) } else { world.split(world.rank() / segments)? };
        Ok(Self { world, sequence })
    }

    /// All ranks of the training, whichever sequences they share: those that add up gradients and
    /// agree on errors.
    pub fn world(&self) -> &dyn Ranks {
        &*self.world
    }

    /// The ranks that share this one's sequences.
    pub fn sequence(&self) -> &Arc<dyn Ranks> {
        &self.sequence
    }

    /// Whether this is the rank that writes files.
    pub fn leads(&self) -> bool {
        self.world.rank() == 0
    }

    /// The parts of a batch of so many that this rank's group computes; see [`share`].
    pub fn share(&self, parts: usize) -> Range<usize> {
        let segments = self.sequence.size();
        share(parts, self.world.rank() / segments, self.world.size() / segments)
    }
}

/// The share of one of `all` in so many parts: neighbours, in order, the first shares one more than
/// the last where they do not come out even.
pub fn share(parts: usize, one: usize, all: usize) -> Range<usize> {
    let start = |one: usize| one * (parts / all) + one.min(parts % all);
    start(one)..start(one + 1)
}

//! Ranks in rows: which of them share a sequence, and which share a batch.

use std::{ops::Range, sync::Arc, time::Duration};

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

    /// Sets how long every call waits from now on, among all ranks and among those that share a
    /// sequence.
    pub fn set_deadline(&self, deadline: Duration) {
        self.world.set_deadline(deadline);
        self.sequence.set_deadline(deadline);
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

/// Divides so many parts over `count` ranks, and returns the range of parts that rank `index` gets.
/// The ranges are neighbours, in order; where the parts do not come out even, the first ones are
/// longer by one.
///
/// # Panics
/// If `count` is 0.
pub fn share(parts: usize, index: usize, count: usize) -> Range<usize> {
    let start = |index: usize| index * (parts / count) + index.min(parts % count);
    start(index)..start(index + 1)
}

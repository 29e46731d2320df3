//! The calls that ranks need of what carries them.

use std::{fmt, sync::Arc, time::Duration};

use crate::{Cards, Result};

/// How the numbers of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Their sum, in whatever order is fastest: its last bits depend on the number of ranks. Where
    /// they must not, there is [`sum_in_order`](crate::sum_in_order).
    Sum,
    /// The largest of them.
    Max,
}

/// A process among several that call each other: every rank makes the same calls in the same order,
/// with buffers of the same sizes.
///
/// Each call returns when this rank has what it asked for, or an [`Error`](crate::Error) after the
/// deadline: a rank that died or went another way leaves nobody waiting for ever. After an error
/// ranks no longer agree on what comes next, so no further call may be made.
pub trait Ranks: fmt::Debug + Send + Sync {
    /// The number of this rank, from 0.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn size(&self) -> usize;

    /// Replaces the numbers of every rank by their sums or maxima over all ranks.
    ///
    /// # Errors
    /// If a rank does not take part before the deadline.
    fn all_reduce(&self, numbers: &mut [f32], reduction: Reduction) -> Result<()>;

    /// Returns the parts of all ranks, which have one length, in the order of ranks.
    ///
    /// # Errors
    /// If a rank does not take part before the deadline.
    fn all_gather(&self, part: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Copies the bytes of rank `from` to all others.
    ///
    /// # Errors
    /// If a rank does not take part before the deadline.
    fn broadcast(&self, from: usize, bytes: &mut [u8]) -> Result<()>;

    /// Sends bytes to one rank and receives from one, at the same time; either may be left out.
    /// Whoever is sent to must receive, into a buffer of exactly as many bytes.
    ///
    /// # Errors
    /// If the other rank does not take part before the deadline, or sends another number of bytes.
    fn exchange(&self, send: Option<(usize, &[u8])>, receive: Option<(usize, &mut [u8])>) -> Result<()>;

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// If a rank does not take part before the deadline.
    fn barrier(&self) -> Result<()>;

    /// Makes ranks of those that name the same group, in the order of their numbers here.
    ///
    /// # Errors
    /// If a rank does not take part before the deadline.
    fn split(&self, group: usize) -> Result<Arc<dyn Ranks>>;

    /// Sets how long a call waits from now on, here and in ranks that are split off later.
    fn set_deadline(&self, deadline: Duration);

    /// Ends all ranks, this one included, where they are processes. Ranks that are threads are left
    /// to find that this one is gone.
    fn abort(&self);

    /// The calls on the memory of cards, where ranks were made with cards.
    fn cards(&self) -> Option<&dyn Cards> {
        None
    }
}

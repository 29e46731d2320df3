//! Calls on the memory of cards, beside those of [`Ranks`](crate::Ranks) on that of processors.

use std::fmt;

use crate::Result;

/// Some memory of the card that ranks were made with.
#[derive(Clone, Copy, Debug)]
pub struct CardMemory {
    /// Where it begins, as CUDA gives addresses.
    pub address: u64,
    /// Its length.
    pub bytes: usize,
}

/// What ranks do with numbers on their cards without bringing them to the processor.
///
/// A call comes after all work that was queued on the stream of the card, and returns when it is
/// done, or with an [`Error`](crate::Error) after the deadline, as the calls of
/// [`Ranks`](crate::Ranks) do. The card may go on writing to the memory of a call that failed, so
/// that memory is not to be freed before the process ends.
pub trait Cards: fmt::Debug + Send + Sync {
    /// Replaces f32 numbers by their sums over all ranks, which are the same bits on all of them.
    /// Which bits depends on the number of ranks and on how their cards are connected.
    ///
    /// # Safety
    /// The memory belongs to the card of this rank, and nothing else uses it during the call.
    ///
    /// # Errors
    /// If a rank does not take part before the deadline, or a card or connection fails.
    unsafe fn sum(&self, numbers: CardMemory) -> Result<()>;

    /// Sends memory to one rank and fills memory with what one sends, at the same time; either may
    /// be left out. Whoever is sent to must receive as many bytes.
    ///
    /// # Safety
    /// The memory must be that of this rank's card, and nothing else may use it until the call
    /// returns.
    ///
    /// # Errors
    /// If a rank does not take part before the deadline, or a card or connection fails.
    unsafe fn exchange(&self, send: Option<(usize, CardMemory)>, receive: Option<(usize, CardMemory)>) -> Result<()>;
}

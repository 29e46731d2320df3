//! What goes wrong between ranks.

use std::fmt;

/// The result of a call between ranks.
pub type Result<T> = std::result::Result<T, Error>;

/// An `Error` says which rank failed in which call, and how many bytes the call was to carry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The rank that noticed.
    pub rank: usize,
    /// The number of ranks.
    pub size: usize,
    /// The call, and with whom, such as `exchange with rank 2`.
    pub call: String,
    /// The bytes of this rank in the call.
    pub bytes: usize,
    /// What happened, in words.
    pub cause: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, size, call, bytes, cause } = self;
        write!(f, "rank {rank} of {size}: {call} of {bytes} bytes: {cause}")
    }
}

impl std::error::Error for Error {}

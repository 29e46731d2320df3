//! Which implementation computes a call: fused kernels, or Candle's operations and why.

use std::fmt;

/// The implementation that computes a call of [`Attention::forward`](super::Attention::forward).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Path {
    /// Fused kernels of this crate, or of the attention's own. Features of maps that the kernels do
    /// not know are computed before, by Candle's operations.
    Fused {
        /// The kind of device that they are written for, such as `CPU` or `CUDA`.
        device: &'static str,
    },
    /// Candle's own operations: the same numbers up to rounding, slower, with more memory.
    Composed {
        /// Why no fused kernel takes the call.
        why: String,
    },
}

impl Path {
    /// Whether fused kernels compute it.
    pub fn is_fused(&self) -> bool {
        matches!(self, Self::Fused { .. })
    }

    /// The slower of two paths that one attention takes: composed, if either is.
    pub(super) fn slower(self, other: Self) -> Self {
        if self.is_fused() { other } else { self }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fused { device } => write!(f, "fused {device} kernels"),
            Self::Composed { why } => write!(f, "composed operations, since {why}"),
        }
    }
}

//! Fused CPU kernels behind the attention of [`crate::attention`]: the same numbers as the composed ops, in one pass.
//!
//! Inner loops are plain Rust over fixed-width lanes, compiled for the widest vectors the machine has at run time.

pub(crate) mod causal_favor;
pub mod vector;

//! An application of `performer-core` with an attention and a feature map of its own.

pub mod retention;
pub mod squared;

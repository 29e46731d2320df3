//! Small language models with softmax or Performer attention: training, evaluation, comparison, generation.
//!
//! Data flows one way: [`data`] (text to batches) → [`model`] (the decoder, on `performer-core`'s attention) → [`train`] →
//! [`eval`] and [`generate`], with [`compare`] running several of them, [`mod@bench`] measuring speed and [`plot`] drawing. The command line, [`cli`], adds
//! arguments and output.

pub mod bench;
pub mod checkpoint;
pub mod cli;
pub mod compare;
pub mod config;
pub mod convert;
pub mod data;
pub mod device;
pub mod eval;
mod files;
pub mod generate;
pub mod gpu_check;
pub mod lab;
pub mod machine;
pub mod memory;
pub mod model;
mod parallel;
pub mod plot;
mod revision;
pub mod train;

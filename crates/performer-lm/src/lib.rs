//! Small language models with softmax or Performer attention: training, evaluation, comparison, generation.
//!
//! Data flows one way: [`data`] (text to batches) → [`model`] (the decoder, on `performer-core`'s attention) → [`train`] →
//! [`eval`] and [`generate`], with [`compare`] running several of them and [`plot`] drawing. The command line in
//! `main.rs` and [`cli`] adds arguments and output.

pub mod config;
pub mod data;
pub mod eval;
pub mod generate;
pub mod model;
pub mod plot;
pub mod train;

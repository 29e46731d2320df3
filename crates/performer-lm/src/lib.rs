//! This crate trains, evaluates, converts and compares small language models with softmax or
//! Performer attention, and generates text with them.
//!
//! Data flow one way: [`data`] (text to batches) → [`model`] (the decoder, on `performer-core`'s
//! attention) → [`train`] → [`eval`] and [`generate`]. [`compare`] trains several models,
//! [`convert`] turns softmax models into Performers, [`lab`] runs experiments on the attention
//! itself, [`mod@bench`] measures speed, and [`plot`] draws charts. The command line, [`cli`], adds
//! arguments and output.

pub mod bench;
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
pub mod plot;
pub mod train;

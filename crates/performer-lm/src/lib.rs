//! Small language models with softmax or Performer attention: training, evaluation, comparison,
//! generation.
//!
//! Data flows one way: [`config`] (settings) → [`data`] (text to batches) → [`model`] (the decoder,
//! on `performer-core`'s attention) → [`eval`], [`recall`] and [`generate`] → [`train`] →
//! [`convert`]. What stands here needs no feature of this crate, prints nothing, and tells a
//! [`listener`] of its progress.
//!
//! ```no_run
//! use performer_lm::{generate::{Sampling, generate}, model::pretrained};
//!
//! let (model, tokenizer) = pretrained::load("runs/mine", &candle_core::Device::Cpu)?;
//! generate(&model, &tokenizer, "Once upon a time", 100, Sampling::default(), |piece| {
//!     print!("{piece}");
//!     Ok(true)
//! })?;
//! # anyhow::Ok(())
//! ```
//!
//! # Features
//!
//! | feature | what it adds |
//! |---|---|
//! | `hub` | models and TinyStories from the Hugging Face hub and its cache |
//! | `plot` | the module `plot`: charts as SVG and PNG |
//! | `lab` | `compare`, `bench`, `lab`, `gpu_check`, `machine`: experiments; implies `plot` |
//! | `cli` (default) | the program `performer-lm`; implies the other three |
//! | `mpi` | training by several processes, which `mpirun` starts |
//! | `nccl` | several processes with a card each, which NCCL connects; implies `mpi` and `cuda` |
//! | `cuda`, `metal`, `mkl`, `accelerate` | what Candle computes on |
//!
//! A library depends on this crate with `default-features = false`.

#![deny(missing_docs)]

#[cfg(feature = "lab")]
pub mod bench;
pub mod checkpoint;
#[cfg(feature = "cli")]
pub mod cli;
#[cfg(feature = "lab")]
pub mod compare;
pub mod config;
pub mod convert;
pub mod data;
pub mod device;
mod draw;
pub mod errors;
pub mod eval;
mod feature_rows;
mod files;
pub mod generate;
#[cfg(feature = "lab")]
pub mod gpu_check;
#[cfg(feature = "lab")]
pub mod lab;
pub mod listener;
#[cfg(feature = "lab")]
pub mod machine;
pub mod memory;
pub mod model;
mod parallel;
#[cfg(feature = "plot")]
pub mod plot;
pub mod recall;
mod revision;
#[cfg(feature = "lab")]
mod seeds;
pub mod train;
pub mod unfinished;

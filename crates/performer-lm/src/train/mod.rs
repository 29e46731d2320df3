//! This module trains models: it has one loop, and the parts of which the loop is made.

mod checkpoint;
#[cfg(feature = "cuda")]
mod cuda;
mod gradients;
mod log;
mod optimizer;
mod parallel;
mod progress;
mod run;
mod run_key;
mod schedule;
mod steps;
mod weights_file;

pub use checkpoint::{Checkpoint, TrainingState, git_revision};
pub use gradients::Gradients;
pub use log::{Record, read_log};
pub use optimizer::{AdamW, AdamWConfig};
pub use parallel::in_order;
pub(crate) use progress::Bar;
pub(crate) use run::NEVER;
pub use run::{
    Found, Report, RunOptions, Trainer, default_out, find, find_or_run, load_model, run_name, saved_data,
    training_batches,
};
pub use run_key::{Earlier, Leg, RunKey};
pub(crate) use run_key::{digests, model_digest, warn};
pub use schedule::Schedule;
pub(crate) use steps::{Pace, Step, Steps, take_steps};
pub(crate) use weights_file::{write_durably, write_safetensors};

//! This module trains models: it has one loop, and the parts of which the loop is made.

#[cfg(feature = "nccl")]
mod cards;
#[cfg(feature = "cuda")]
mod cuda;
mod folder;
mod gradients;
mod log;
mod optimizer;
mod progress;
mod report;
mod run;
mod run_key;
mod segments;
mod shared;
mod steps;

pub use performer_dist::Grid;

pub use crate::{
    checkpoint::{Checkpoint, TrainingState},
    config::{AdamWConfig, Schedule},
    revision::git_revision,
};
#[cfg(feature = "nccl")]
pub use cards::connect;
#[cfg(feature = "lab")]
pub(crate) use folder::as_trained;
pub use folder::{
    Found, SavedData, default_out, find, find_or_run, is_begun, is_finished, load_model, run_name, runs_beside,
    saved_data, saved_passes, trains_on, unfinished_step,
};
pub use gradients::Gradients;
pub use log::{Record, read_log};
pub use optimizer::AdamW;
pub(crate) use progress::StepBar;
pub use report::{Control, PositionLoss, Report, TestLoss};
pub(crate) use run::NEVER;
pub use run::{RunOptions, Trainer, training_batches};
pub use run_key::{Earlier, Leg, RunKey};
pub(crate) use run_key::{digests, model_digest};
pub use segments::SharedSequence;
#[cfg(feature = "cli")]
pub(crate) use shared::in_turn;
#[cfg(feature = "lab")]
pub(crate) use shared::{agreed, any_asked, divided, is_divergence, led, made, require_one_plan};
pub(crate) use steps::{Pace, Step, Steps, take_steps};

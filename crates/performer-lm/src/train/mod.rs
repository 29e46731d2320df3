//! Training: one loop, and the parts it is made of.

mod checkpoint;
mod gradients;
mod loss;
mod optimizer;
mod parallel;
mod run;
mod schedule;
mod weights_file;

pub use checkpoint::{Checkpoint, TrainingState, git_revision};
pub use gradients::Gradients;
pub use loss::cross_entropy;
pub use optimizer::{AdamW, AdamWConfig};
pub use parallel::in_order;
pub use schedule::Schedule;

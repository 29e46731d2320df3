//! Training: one loop, and the parts it is made of.

mod gradients;
mod loss;
mod optimizer;
mod parallel;
mod run;
mod schedule;

pub use gradients::Gradients;
pub use loss::cross_entropy;
pub use optimizer::{AdamW, AdamWConfig};
pub use parallel::in_order;
pub use schedule::Schedule;

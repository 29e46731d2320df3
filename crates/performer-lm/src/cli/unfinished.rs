//! This module says of a model's folder that the training or conversion in it has not ended.

use std::path::Path;

use super::output;
use crate::{convert::unfinished_stage, train::unfinished_step};

/// Says so if the weights of a model are those of the midst of its training or conversion.
pub(super) fn note(model: &str) {
    let folder = Path::new(model);
    if let Some(step) = unfinished_step(folder) {
        output::note(&format!("the training in {model} has no result yet: these are its weights after step {step}"));
    }
    if let Some(stage) = unfinished_stage(folder) {
        output::note(&format!(
            "the conversion in {model} has not finished its stage {stage}: these are the weights before it"
        ));
    }
}

//! This module calibrates a student: it fits features to the moments of the teacher's queries and
//! keys, and gives forget gates a pace.

use anyhow::{Context, Result};
use performer_core::{Favor, features::fit::Moments, projection::derive_seed};

use super::{Plan, Trained, gates};
use crate::{
    data::{Batches, Prepared},
    model::{
        Decoder,
        fit::{attention_over, fitted_to},
    },
};

/// Number of sequences in a calibration pass, and of those that forget gates are fitted to.
pub(super) const ROWS: usize = 4;

/// Computes the moments of every layer over whole batches of training tokens, at least `tokens` of
/// them; returns how many were read, too.
pub(crate) fn moments(teacher: &Decoder, data: &Prepared, tokens: usize, seed: u64) -> Result<(Vec<Moments>, usize)> {
    let mut all = teacher.no_moments()?;
    let batches = Batches::new(data.train.clone(), teacher.config().context, ROWS, seed)?;
    let passes = tokens.div_ceil(batches.tokens_per_batch());
    for pass in 0..passes {
        let (epoch, index) = batches.position(pass as u64);
        let batch = batches.batch(epoch, index)?;
        let ids = batch.ids(teacher.device())?;
        teacher.add_moments(&ids, &mut all)?;
    }
    Ok((all, passes * batches.tokens_per_batch()))
}

/// Fits the features of every layer to the teacher's queries and keys, and then gives forget gates
/// the pace with which they look as far back as the teacher.
pub(super) fn calibrate(plan: &Plan, teacher: &Decoder, mut student: Decoder, data: &Prepared) -> Result<Trained> {
    let fitted = |layer: usize| plan.config.attention_of(layer).favor().filter(|favor| favor.map.is_fitted());
    let (moments, mut tokens) = match (0..plan.config.layers).any(|layer| fitted(layer).is_some()) {
        true => moments(teacher, data, plan.calibrate_tokens, plan.seed)?,
        false => (Vec::new(), 0),
    };
    for (layer, moments) in moments.iter().enumerate() {
        let config = plan.config.attention_of(layer).clone();
        let Some(favor) = fitted(layer) else { continue };
        let fitted = fitted_to(favor, moments, plan.balance, derive_seed(plan.seed, layer as u64), &plan.device)
            .with_context(|| format!("layer {layer}"))?;
        student.set_attention(layer, attention_over(&config, Favor::with_map(Box::new(fitted))?)?);
    }
    let paced = gates::paced(teacher, &student, data, plan.seed)?;
    if !paced.is_empty() {
        tokens = tokens.max(ROWS * plan.config.context);
        let mut tensors = student.tensors();
        tensors.extend(paced);
        student = Decoder::frozen(&plan.config, &tensors, &plan.device)?;
    }
    Ok(Trained { student, tokens: tokens as u64, points: Vec::new() })
}

//! This module draws the initial weights. Their random numbers depend on seed and name alone, so
//! weights of one shape are the same on every platform, and for every attention.

use anyhow::Result;
use candle_core::{Tensor, Var};
use performer_core::projection::{derive_seed, draw_normal};

use crate::config::ModelConfig;

/// Standard deviation of embeddings.
const EMBEDDING_STD: f64 = 0.02;

/// Standard deviation of matrices, times `√fan_in`.
const MATRIX_STD: f64 = 0.5;

/// Standard deviation of the matrices of queries and keys, times `√fan_in`. Softmax does not depend
/// on it much; a kernel estimate is exact where queries and keys are small, and learns better from
/// such a start (docs/LOG.md).
const QUERY_KEY_STD: f64 = 0.1;

/// Draws the initial weights. Matrices are normal with standard deviation `0.5 / √fan_in`, those of
/// queries and keys with `0.1 / √fan_in`; those that write into the residual stream are divided by
/// `√(2·layers)` (Radford et al. 2019). Embeddings have 0.02, biases are 0 and norm weights 1.
/// Forget gates, convolutions and output gates begin as their layer made them, without drawn
/// numbers.
pub(super) fn initialise(parameters: &[(String, Var)], config: &ModelConfig, seed: u64) -> Result<()> {
    for (name, var) in parameters {
        let made = [".self_attn.gate.", "_conv1d.weight", ".output_gate.weight"];
        if made.iter().any(|part| name.contains(part)) {
            continue;
        }
        if var.rank() != 2 {
            let constant = if name.ends_with("norm.weight") { 1.0 } else { 0.0 };
            var.set(&Tensor::full(constant, var.shape(), var.device())?.to_dtype(var.dtype())?)?;
            continue;
        }
        let (rows, columns) = var.dims2()?;
        let std = if name.contains("embed_") {
            EMBEDDING_STD
        } else {
            let residual = name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight");
            let depth = if residual { 2.0 * config.layers as f64 } else { 1.0 };
            let query_or_key = name.ends_with("q_proj.weight") || name.ends_with("k_proj.weight");
            let std = if query_or_key { QUERY_KEY_STD } else { MATRIX_STD };
            std / (columns as f64 * depth).sqrt()
        };
        let hash = blake3::hash(name.as_bytes());
        let stream = u64::from_le_bytes(std::array::from_fn(|i| hash.as_bytes()[i]));
        let normal = draw_normal(rows * columns, derive_seed(seed, stream))?;
        let values: Vec<f32> = normal.into_iter().map(|x| (x * std) as f32).collect();
        var.set(&Tensor::from_vec(values, (rows, columns), var.device())?.to_dtype(var.dtype())?)?;
    }
    Ok(())
}

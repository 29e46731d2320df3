//! This module adds low-rank adapters to a model (LoRA, Hu et al. 2021,
//! <https://arxiv.org/abs/2106.09685>): every matrix `W` of the blocks becomes `W + B A`, and only
//! A and B are trained, beside whatever its teacher does not have: feature maps, forget gates,
//! convolutions and output gates.

use std::collections::HashMap;

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor, Var};
use performer_core::projection::{derive_seed, draw_normal};

use crate::model::{Decoder, pretrained::Pretrained};

/// `Adapters` holds the tensors of a model, with a pair of low-rank factors for each of its
/// matrices.
pub(super) struct Adapters {
    tensors: HashMap<String, Tensor>,
    pairs: Vec<Pair>,
    /// The parameters that the teacher does not have, by name; they are among the tensors.
    own: Vec<(String, Var)>,
}

/// A `Pair` holds the factors of one matrix `(rows, columns)`.
struct Pair {
    weight: String,
    /// `A`, shape `(R, columns)`.
    down: Var,
    /// `B`, shape `(rows, R)`, which is zero at first.
    up: Var,
}

/// What the names of the matrices that get adapters end with.
const ADAPTED: &str = "_proj.weight";

/// Returns the sizes of a matrix that is to have factors of rank `rank`, and refuses one that they
/// would not be smaller than.
fn require_larger(name: &str, matrix: &Tensor, rank: usize) -> Result<(usize, usize)> {
    let (rows, columns) = matrix.dims2()?;
    ensure!(
        rank < rows.min(columns),
        "adapters of rank {rank}: {name} is a matrix of {rows}×{columns}; factors must be smaller than that"
    );
    Ok((rows, columns))
}

/// Refuses a rank that is too large for a matrix of the model.
pub(super) fn check(model: &Pretrained, rank: usize) -> Result<()> {
    let mut matrices: Vec<_> = model.tensors.iter().filter(|(name, _)| name.ends_with(ADAPTED)).collect();
    matrices.sort_by_key(|(name, _)| *name);
    matrices.into_iter().try_for_each(|(name, matrix)| require_larger(name, matrix, rank).map(drop))
}

impl Adapters {
    /// Makes factors of rank `rank` for the matrices of all blocks. Parameters of the model that
    /// the teacher does not have remain parameters.
    pub(super) fn new(model: &Decoder, teacher: &Pretrained, rank: usize, seed: u64) -> Result<Self> {
        let mut tensors = model.tensors();
        let (mut pairs, mut own) = (Vec::new(), Vec::new());
        for (name, var) in model.named_parameters() {
            if !teacher.tensors.contains_key(&name) {
                tensors.insert(name.clone(), var.as_tensor().clone());
                own.push((name, var));
                continue;
            }
            if !name.ends_with(ADAPTED) {
                continue;
            }
            let (rows, columns) = require_larger(&name, &var, rank)?;
            let seed = derive_seed(seed, pairs.len() as u64);
            let normal = draw_normal(rank * columns, seed)?;
            let scale = (columns as f64).powf(-0.5);
            // In f64 on the CPU, since Metal has none.
            let down = Tensor::from_vec(normal, (rank, columns), &Device::Cpu)?.affine(scale, 0.0)?;
            let down = down.to_dtype(DType::F32)?.to_device(var.device())?;
            pairs.push(Pair {
                weight: name,
                down: Var::from_tensor(&down)?,
                up: Var::zeros((rows, rank), DType::F32, var.device())?,
            });
        }
        Ok(Self { tensors, pairs, own })
    }

    /// Returns what is trained, by name: the parameters that the teacher does not have, and the
    /// factors.
    pub(super) fn parameters(&self) -> Vec<(String, Var)> {
        let both = |pair: &Pair| {
            [("down", &pair.down), ("up", &pair.up)].map(|(part, var)| (format!("{}.{part}", pair.weight), var.clone()))
        };
        self.own.iter().cloned().chain(self.pairs.iter().flat_map(both)).collect()
    }

    /// Returns all tensors of the adapted model; gradients flow through them to the factors.
    pub(super) fn merged(&self) -> Result<HashMap<String, Tensor>> {
        let mut tensors = self.tensors.clone();
        for Pair { weight, down, up } in &self.pairs {
            let sum = (&tensors[weight] + up.matmul(down)?)?;
            tensors.insert(weight.clone(), sum);
        }
        Ok(tensors)
    }
}

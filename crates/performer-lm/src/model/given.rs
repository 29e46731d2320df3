//! This module is a [`VarBuilder`](candle_nn::VarBuilder) over given weights.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use candle_core::{DType, Device, Result, Shape, Tensor, Var, bail};
use candle_nn::{Init, VarMap, var_builder::SimpleBackend};

use super::locked;

/// `Given` hands out the tensors that are asked for, and keeps them by name.
pub(super) struct Given<'a> {
    pub(super) tensors: &'a HashMap<String, Tensor>,
    pub(super) weights: Weights,
}

/// `Weights` is what becomes of the tensors that are asked for.
pub(super) enum Weights {
    /// Variables are made of them.
    Parameters(VarMap),
    /// They are weights themselves.
    Constants(Arc<Mutex<HashMap<String, Tensor>>>),
}

impl SimpleBackend for Given<'_> {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let Some(tensor) = self.tensors.get(name) else {
            bail!("weights lack {name} {:?}: they belong to another config", shape.dims())
        };
        if tensor.shape() != &shape {
            bail!("weight {name} has shape {:?}; the config needs {:?}", tensor.dims(), shape.dims());
        }
        match &self.weights {
            Weights::Parameters(parameters) => {
                let var = Var::from_tensor(&tensor.detach().to_dtype(dtype)?.to_device(device)?)?;
                locked(parameters.data()).insert(name.to_owned(), var.clone());
                Ok(var.into_inner())
            }
            Weights::Constants(constants) => {
                let weight = tensor.to_dtype(dtype)?.to_device(device)?;
                locked(constants).insert(name.to_owned(), weight.detach());
                Ok(weight)
            }
        }
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.tensors.get(name) {
            Some(tensor) => self.get(tensor.shape().clone(), name, Init::Const(0.0), dtype, device),
            None => bail!("weights lack {name}"),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }
}

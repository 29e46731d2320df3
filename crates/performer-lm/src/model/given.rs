//! This module is a [`VarBuilder`](candle_nn::VarBuilder) over given weights.

use std::collections::HashMap;

use candle_core::{DType, Device, Result, Shape, Tensor, Var, bail};
use candle_nn::{Init, VarMap, var_builder::SimpleBackend};

/// `Given` makes a variable of `parameters` from each tensor that is asked for, and no other.
pub(super) struct Given<'a> {
    pub(super) tensors: &'a HashMap<String, Tensor>,
    pub(super) parameters: VarMap,
}

impl SimpleBackend for Given<'_> {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let Some(tensor) = self.tensors.get(name) else {
            bail!("weights lack {name} {:?}: they belong to another config", shape.dims())
        };
        if tensor.shape() != &shape {
            bail!("weight {name} has shape {:?}; the config needs {:?}", tensor.dims(), shape.dims());
        }
        let var = Var::from_tensor(&tensor.detach().to_dtype(dtype)?.to_device(device)?)?;
        let Ok(mut parameters) = self.parameters.data().lock() else {
            bail!("a thread died while it held the model's parameters")
        };
        parameters.insert(name.to_owned(), var.clone());
        Ok(var.into_inner())
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

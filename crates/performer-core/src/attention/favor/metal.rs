//! FAVOR by the fused kernel for Metal: when it is taken. Its sums are those of composed
//! operations.

use candle_core::{DType, Result, bail};

use super::{
    backend::{Backend, Call, Fused, Output},
    composed::{PrefixSums, TensorSums},
};
use crate::{
    attention::State,
    features::{ExponentialForm, FeatureMap},
    kernels::metal::{Projection, favor},
};

/// The fused kernel for Metal, prepared for one feature map.
#[derive(Debug)]
pub(super) struct Metal {
    /// Ω on the device, if the kernel can compute the map's features.
    projection: Option<Projection>,
}

impl Metal {
    /// Prepares the kernel for `map`. It computes positive features of one projection for all
    /// heads, which is no variable.
    pub(super) fn new(map: &dyn FeatureMap) -> Result<Self> {
        let Some(ExponentialForm { projection, hyperbolic, keys: None }) = map.exponential_form() else {
            return Ok(Self { projection: None });
        };
        if projection.dim(0)? != 1 || !projection.device().is_metal() || projection.track_op() {
            return Ok(Self { projection: None });
        }
        Ok(Self { projection: Some(Projection::new(&projection.squeeze(0)?, hyperbolic)?) })
    }

    fn prepared(&self) -> Result<&Projection> {
        match &self.projection {
            Some(projection) => Ok(projection),
            None => candle_core::bail!("the Metal kernel was asked for a feature map that it does not take"),
        }
    }
}

impl Fused for Metal {
    fn device(&self) -> &'static str {
        "Metal"
    }

    fn refusal(&self, call: &Call<'_>) -> Option<String> {
        let (q, v) = (call.inputs.q, call.inputs.v);
        let why = if !q.device().is_metal() {
            "the Metal kernel takes tensors on a Metal device"
        } else if self.projection.is_none() {
            "the Metal kernel takes positive features of one projection for all heads only"
        } else if call.inputs.gates.is_some() {
            "the Metal kernel has no forget gates"
        } else if call.logs {
            "the Metal kernel returns no logarithms of denominators, which a window needs"
        } else if !call.mask.is_causal() {
            "the Metal kernel is causal"
        } else if call.inputs.tracked() {
            "the Metal kernel has no gradients"
        } else if call.begun && call.sizes.queries == 1 {
            // A token alone, after others, is a few small operations.
            "one token after others is not worth a kernel"
        } else if !favor::takes(q, v, call.map.feature_dim()) {
            "the Metal kernel does not take these sizes, or cannot be compiled"
        } else {
            return None;
        };
        Some(why.into())
    }
}

impl Backend for Metal {
    fn forward(&self, call: &Call<'_>) -> Result<Output> {
        let visible = call.mask.visible_of(call.sizes.batch, call.inputs.q.device())?;
        let qkv = call.inputs.contiguous_rows()?;
        let (values, _) = favor::favor(self.prepared()?, qkv.each_ref(), visible.as_ref(), None, false)?;
        Ok(Output { values, logs: None })
    }

    fn advance(&self, call: &Call<'_>, state: &mut State) -> Result<Output> {
        let values = state.advance_with(|past: Option<&TensorSums>| {
            let before = match past {
                None => None,
                Some(TensorSums { sums, .. }) => {
                    let (n, features) = (call.sizes.batch * call.sizes.key_heads, call.map.feature_dim());
                    sums.check([n, features, call.sizes.value_dim + 1], [n, 1, features], DType::F32)?;
                    Some([sums.log_scale.contiguous()?, sums.sums.contiguous()?])
                }
            };
            let qkv = call.inputs.contiguous_rows()?;
            let (values, after) = favor::favor(self.prepared()?, qkv.each_ref(), None, before.as_ref(), true)?;
            let Some([log_scale, sums]) = after else { bail!("the Metal kernel returned no sums") };
            Ok((values, TensorSums { batch: call.sizes.batch, sums: PrefixSums { log_scale, sums } }))
        })?;
        Ok(Output { values, logs: None })
    }
}

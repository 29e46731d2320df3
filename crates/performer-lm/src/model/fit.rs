//! This module fits feature maps to the queries and keys of a model, layer by layer.

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use performer_core::{
    Attention, Favor, FavorConfig, Inputs, Windowed,
    features::{
        FeatureMapKind, Fitted,
        fit::{Moments, Options, fit},
    },
    projection,
};

use super::{Decoder, layer_seed};
use crate::config::AttentionConfig;

impl Decoder {
    /// Returns moments of nothing yet, for each layer.
    pub(crate) fn no_moments(&self) -> candle_core::Result<Vec<Moments>> {
        (0..self.config.layers).map(|layer| Moments::new(self.config.kv_heads, self.config.key_dim(layer))).collect()
    }

    /// Adds the queries and keys of each layer in one pass over ids `(B, T)` to its moments.
    pub(crate) fn add_moments(&self, ids: &Tensor, to: &mut [Moments]) -> Result<()> {
        let mut x = self.embed(ids, 0)?;
        for (block, moments) in self.blocks.iter().zip(to) {
            x = block
                .forward_through(&x, |inputs| {
                    moments.add(inputs.q, inputs.k)?;
                    block.attention().forward(inputs, &self.mask())
                })?
                .detach();
        }
        Ok(())
    }

    /// Runs the forward pass without the output head over ids `(B, T)`, with `attend(layer,
    /// inputs)` in place of each layer's attention. The inputs are this model's queries, keys and
    /// values, and the forget gates that the same layer of `student` computes of this model's
    /// hidden states: a student of the same sizes may have gates where its teacher has none.
    pub(crate) fn hidden_beside(
        &self,
        student: &Self,
        ids: &Tensor,
        mut attend: impl FnMut(usize, Inputs<'_>) -> candle_core::Result<Tensor>,
    ) -> Result<()> {
        let mut x = self.embed(ids, 0)?;
        for (layer, (own, other)) in self.blocks.iter().zip(&student.blocks).enumerate() {
            let gates = other.gates(&x)?;
            let attend = |inputs: Inputs<'_>| {
                let mut of_both = Inputs::new(inputs.q, inputs.k, inputs.v);
                of_both.gates = gates.as_ref();
                attend(layer, of_both)
            };
            x = own.forward_through(&x, attend)?.detach();
        }
        Ok(())
    }

    /// Whether [`Self::fit_features`] fits anything.
    pub(crate) fn has_fits(&self) -> bool {
        (0..self.config.layers).any(|layer| self.config.attention_of(layer).favor().is_some_and(is_fitted_alone))
    }

    /// Fits the maps that can be fitted and have no parameters in training to these moments of the
    /// model itself, with random rows of their own for the `count`-th time in a run of this `seed`.
    ///
    /// # Errors
    /// If no queries and keys were added to the moments of a layer.
    pub(crate) fn fit_features(&mut self, moments: &[Moments], seed: u64, count: u64) -> Result<()> {
        for (layer, moments) in moments.iter().enumerate() {
            let config = self.config.attention_of(layer).clone();
            let Some(favor) = config.favor().filter(|favor| is_fitted_alone(favor)) else { continue };
            let fitted = fitted_to(favor, moments, false, layer_seed(seed, layer, count), &self.device)
                .with_context(|| format!("layer {layer}: its features cannot be fitted"))?;
            self.set_attention(layer, attention_over(&config, Favor::with_map(Box::new(fitted))?)?);
        }
        Ok(())
    }
}

/// Whether features are fitted and not trained.
fn is_fitted_alone(favor: &FavorConfig) -> bool {
    favor.map.is_fitted() && !favor.map.is_trained()
}

/// Fits the features of a configuration to moments; maps that are to be learned start as dense
/// ones. Features are centred, which is exact and costs nothing. Balancing costs one matrix product
/// for every key, and pays where queries and keys have different covariances.
pub(crate) fn fitted_to(
    favor: &FavorConfig,
    moments: &Moments,
    balance: bool,
    seed: u64,
    device: &Device,
) -> candle_core::Result<Fitted> {
    let d = moments.head_dim();
    let omega =
        projection::draw_tensor(favor.projection, favor.radii, favor.features, d, seed, DType::F64, &Device::Cpu)?;
    let map = if favor.map == FeatureMapKind::Learned { FeatureMapKind::Dense } else { favor.map };
    fit(&omega, moments, Options::new(map).with_centre(true).with_balance(balance))?.to(DType::F32, device)
}

/// Builds the attention of a configuration over a given feature map.
pub(crate) fn attention_over(config: &AttentionConfig, map: Favor) -> Result<Box<dyn Attention>> {
    Ok(match config.window() {
        None => Box::new(map),
        Some(window) => Box::new(Windowed::new(window, map)?.with_sinks(config.sinks())?),
    })
}

#[cfg(test)]
mod tests {
    use anyhow::Result;
    use candle_core::IndexOp;

    use performer_core::Mask;

    use super::*;
    use crate::{
        config::{ModelConfig, Preset},
        model::{Dropout, block::Tokens},
    };

    /// A training fits features where there are some to fit: the passes for it take time.
    #[test]
    fn only_fitted_features_are_fitted_in_training() -> Result<()> {
        let (preset, _) = Preset::Small.load()?;
        for (attention, fits) in [
            ("softmax", false),
            ("favor:m=8", false),
            ("favor:m=8,map=learned", false),
            ("favor:m=8,map=dense", true),
            ("favor:m=8,map=optimal,window=4,gate", true),
        ] {
            let config = ModelConfig {
                attention: attention.parse().expect("an attention"),
                vocab_size: 20,
                layers: 2,
                context: 16,
                ..preset.clone()
            };
            assert_eq!(Decoder::new(&config, 1, &Device::Cpu)?.has_fits(), fits, "{attention}");
        }
        Ok(())
    }

    /// With each layer's own attention and the inputs that are handed over, gates among them, the
    /// pass that looks into layers is the model's own; beside itself a model has its own gates.
    #[test]
    fn what_looks_into_layers_is_given_their_gates() -> Result<()> {
        let (preset, _) = Preset::Small.load()?;
        let attention = "favor:m=8,gate,conv".parse().expect("an attention");
        let config = ModelConfig { attention, vocab_size: 20, layers: 2, context: 16, ..preset };
        let model = Decoder::new(&config, 1, &Device::Cpu)?;
        let ids = Tensor::arange(0u32, 12, &Device::Cpu)?.unsqueeze(0)?;
        let numbers = |x: &Tensor| x.i(0)?.to_vec2::<f32>();
        let through = |keep: bool| {
            model.hidden_through(&ids, |layer, mut inputs| {
                inputs.gates = inputs.gates.filter(|_| keep);
                model.attention(layer).forward(inputs, &Mask::causal())
            })
        };
        let whole = model.hidden(&ids, Tokens::Whole(&Mask::causal()), None::<&Dropout>)?;
        let largest = |x: &Tensor| -> Result<f32> { Ok((x - &whole)?.abs()?.max_all()?.to_scalar()?) };
        assert!(largest(&through(true)?)? < 1e-5 && largest(&through(false)?)? > 1e-3);

        let (mut own, mut beside) = (Vec::new(), Vec::new());
        model.hidden_through(&ids, |layer, inputs| {
            own.push(numbers(inputs.gates.expect("gates"))?);
            model.attention(layer).forward(inputs, &Mask::causal())
        })?;
        model.hidden_beside(&model, &ids, |layer, inputs| {
            beside.push(numbers(inputs.gates.expect("gates"))?);
            model.attention(layer).forward(inputs, &Mask::causal())
        })?;
        assert_eq!(own, beside);
        Ok(())
    }
}

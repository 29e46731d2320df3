//! FAVOR with a positive map that is trained: the parameters of the map as the kernels take them.
//! The kernels compute the features themselves, and the gradients of these parameters: Candle's
//! operations would write all features to memory and read them again, a dozen times.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::{Form, beside::favor_beside, exponential::Exponential, map::Map};

/// `Trained` holds the parameters of positive features as they are at one call.
pub(crate) struct Trained {
    /// For each key head, or once for all: the rows for queries, the rows for keys and the
    /// logarithms of the weights of keys, `(maps, 2·M·D + M)`.
    parameters: Tensor,
    maps: Arc<[Map]>,
    /// The sizes `M` and `D`.
    sizes: [usize; 2],
}

impl Trained {
    /// Takes rows for queries, rows for keys and the logarithms of the weights of keys, see
    /// [`Exponential`], in one tensor `(maps, 2·M·D + M)`, f32. One map serves any number of key
    /// heads.
    pub(crate) fn new(parameters: Tensor, [m, d]: [usize; 2]) -> Result<Self> {
        let map = |block: &Vec<f32>| {
            let (queries, of_keys) = block.split_at(m * d);
            let (keys, log_weights) = of_keys.split_at(m * d);
            Map::Exponential(Arc::new(Exponential::new(queries, d, false).with_keys(keys, log_weights, None)))
        };
        let maps: Vec<Map> = parameters.to_vec2::<f32>()?.iter().map(map).collect();
        Ok(Self { parameters, maps: maps.into(), sizes: [m, d] })
    }

    /// The maps: one for each head, or one for all.
    pub(crate) fn maps(&self) -> &Arc<[Map]> {
        &self.maps
    }

    /// Computes [`super::favor`] with these features, and with gates `(B, Hkv, Tk)` if there are
    /// any.
    pub(crate) fn favor(
        self,
        [q, k, v]: [&Tensor; 3],
        gates: Option<&Tensor>,
        visible: Option<Vec<bool>>,
        causal: bool,
        logs: bool,
    ) -> Result<Tensor> {
        let parameters = Some((&self.parameters, self.sizes));
        favor_beside(Form { maps: self.maps, logs }, parameters, gates, [q, k, v], visible, causal)
    }
}

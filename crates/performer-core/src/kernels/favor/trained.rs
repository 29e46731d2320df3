//! FAVOR with a positive map that is trained: the passes of [`super::favor`], whose backward pass
//! also sums the gradients of the map's own parameters. (Features made by Candle's operations would
//! be written and read a dozen times.)

use std::sync::Arc;

use candle_core::{CpuStorage, DType, Result, Shape, Tensor};

use super::super::operation::{Operation, Stored, apply};
use super::{
    Form,
    exponential::{Exponential, LinearGradient},
    map::Map,
    op::Passes,
    padded,
};
use crate::ops;

/// `Trained` holds the parameters of positive features as they are at one call.
pub(crate) struct Trained {
    /// For each head, its rows for queries, its rows for keys and its weights of the keys:
    /// `(H, 2·M·D + M)`.
    parameters: Tensor,
    maps: Arc<[Map]>,
    /// The sizes `M` and `D`.
    sizes: [usize; 2],
}

impl Trained {
    /// Takes rows `(H, M, D)` and weights `(H, M)`, see [`Exponential`]; `H` may be 1 for any
    /// number of heads.
    pub(crate) fn new(queries: &Tensor, keys: &Tensor, log_weights: &Tensor) -> Result<Self> {
        let (_, m, d) = queries.dims3()?;
        let flat = |rows: &Tensor| ops::reshape(rows, (rows.dim(0)?, m * d));
        let blocks = [&flat(queries)?, &flat(keys)?, log_weights];
        let parameters = ops::to_dtype(&ops::cat(&blocks, 1)?, DType::F32)?;
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

    /// Computes [`super::favor`] with these features.
    pub(crate) fn favor(
        self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        visible: Option<Vec<bool>>,
        causal: bool,
        logs: bool,
    ) -> Result<Tensor> {
        // An operation takes at most three tensors, so keys and values become one. Both are made
        // contiguous first: Candle's concatenation of strided tensors has rows that are not
        // contiguous.
        let keys_values = ops::cat(&[&ops::contiguous(k)?, &ops::contiguous(v)?], 3)?;
        let of = [q, &keys_values, &self.parameters];
        let passes = Passes::new(Form { maps: self.maps, logs }, causal, visible, of);
        apply(TrainedFavor { passes, sizes: self.sizes }, of)
    }
}

/// `TrainedFavor` is FAVOR attention as one differentiable operation on `(q, [k, v], parameters)`.
struct TrainedFavor {
    passes: Passes,
    sizes: [usize; 2],
}

impl Operation<3> for TrainedFavor {
    fn name(&self) -> &'static str {
        "favor-trained"
    }

    fn cpu(&self, [(s1, l1), (s2, l2), (_, _)]: [Stored<'_, CpuStorage>; 3]) -> Result<(CpuStorage, Shape)> {
        let [_, d] = self.sizes;
        let (k, v) = (l2.narrow(3, 0, d)?, l2.narrow(3, d, l2.dims()[3] - d)?);
        self.passes.forward([(s1, l1), (s2, &k), (s2, &v)])
    }

    fn backward(
        &self,
        [q, keys_values, parameters]: [&Tensor; 3],
        out: &Tensor,
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        let [m, d] = self.sizes;
        let (batch, key_heads, _, width) = keys_values.dims4()?;
        let (k, v) = (keys_values.narrow(3, 0, d)?, keys_values.narrow(3, d, width - d)?);
        let mut linear = vec![[LinearGradient::new(m, d), LinearGradient::new(m, d)]; batch * key_heads];
        let [dq, dk, dv] = self.passes.backward([q, &k, &v], out, grad, &mut linear)?;

        let (heads, numbers) = parameters.dims2()?;
        let mut sums = vec![0f32; heads * numbers];
        // The kernels' rows are Ω times this.
        let scale = (d as f64).powf(-0.25) as f32;
        for (n, [of_queries, of_keys]) in linear.iter().enumerate() {
            let (queries, rest) = sums[n % heads * numbers..][..numbers].split_at_mut(m * d);
            let (keys, log_weights) = rest.split_at_mut(m * d);
            for (sum, side) in [(queries, of_queries), (keys, of_keys)] {
                for (sum, row) in sum.chunks_exact_mut(d).zip(side.rows.chunks_exact(padded(d))) {
                    sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += scale * x);
                }
            }
            log_weights.iter_mut().zip(&of_keys.log_weights).for_each(|(sum, x)| *sum += x);
        }
        let sums = Tensor::from_vec(sums, (heads, numbers), parameters.device())?;
        Ok([Some(dq), Some(Tensor::cat(&[dk, dv], 3)?), Some(sums)])
    }
}

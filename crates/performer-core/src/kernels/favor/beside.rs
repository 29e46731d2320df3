//! FAVOR with forget gates, with the parameters of a map that is trained, or with both, beside
//! queries, keys and values. The forward and backward passes are those of [`super::favor`], whose
//! backward pass also sums the gradients of gates and parameters.

use candle_core::{CpuStorage, Result, Shape, Tensor};

use super::super::{
    beside::{AttentionPasses, apply_beside},
    contiguous, gradient,
    operation::Stored,
    with_storages,
};
use super::{Form, exponential::LinearGradient, op::Passes, padded};
use crate::projection::input_scale;

/// Computes the attention of [`super::favor`] with parameters, gates, or both. Parameters are
/// `(maps, 2·M·D + M)`, one row for each key head or one for all: the rows for queries, the rows
/// for keys, and the logarithms of the features' weights, see [`super::Trained`]. The sizes given
/// with them are `M` and `D`. Gates are `(B, Hkv, Tk)`, f32 and contiguous.
pub(super) fn favor_beside(
    form: Form,
    parameters: Option<(&Tensor, [usize; 2])>,
    gates: Option<&Tensor>,
    qkv: [&Tensor; 3],
    visible: Option<Vec<bool>>,
    causal: bool,
) -> Result<Tensor> {
    let sizes = parameters.map(|(_, sizes)| sizes);
    let others: Vec<&Tensor> = gates.into_iter().chain(parameters.map(|(parameters, _)| parameters)).collect();
    let passes = Passes::new(form, causal, visible, &[&qkv[..], &others].concat());
    apply_beside(FavorBeside { passes, gated: gates.is_some(), sizes }, qkv, &others)
}

/// `FavorBeside` has the passes of FAVOR attention with gates, with parameters, or with both, in
/// this order.
struct FavorBeside {
    passes: Passes,
    /// Whether the first input beside `q`, `k` and `v` is gates.
    gated: bool,
    /// The sizes `M` and `D` of a trained map, whose parameters are the last input.
    sizes: Option<[usize; 2]>,
}

impl AttentionPasses for FavorBeside {
    fn name(&self) -> &'static str {
        "favor-beside"
    }

    fn cpu(&self, qkv: [Stored<'_, CpuStorage>; 3], beside: &[Stored<'_, CpuStorage>]) -> Result<(CpuStorage, Shape)> {
        // The maps of the form have the parameters already.
        let gates = self.gated.then(|| contiguous(beside[0])).transpose()?;
        self.passes.forward(qkv, gates)
    }

    fn backward(
        &self,
        qkv @ [q, k, v]: [&Tensor; 3],
        beside: &[&Tensor],
        out: &Tensor,
        grad: &Tensor,
    ) -> Result<([Tensor; 3], Vec<Tensor>)> {
        let mut linear = match self.sizes {
            None => Vec::new(),
            Some([m, d]) => vec![[LinearGradient::new(m, d), LinearGradient::new(m, d)]; k.dim(0)? * k.dim(1)?],
        };
        let mut of_others = Vec::new();
        let [dq, dk, dv] = if self.gated {
            let mut dgates = vec![0f32; beside[0].elem_count()];
            let of_qkv = with_storages([beside[0]], |[gates]| {
                let gates = (Some(contiguous(gates)?), &mut dgates[..]);
                self.passes.backward(qkv, out, grad, &mut linear, gates)
            })?;
            of_others.push(gradient(dgates, beside[0])?);
            of_qkv
        } else {
            self.passes.backward(qkv, out, grad, &mut linear, (None, &mut []))?
        };
        if let Some(sizes) = self.sizes {
            let parameters = beside[usize::from(self.gated)];
            let mut of_parameters = vec![0f32; parameters.elem_count()];
            add_parameters(sizes, &linear, &mut of_parameters);
            of_others.push(gradient(of_parameters, parameters)?);
        }
        Ok(([gradient(dq, q)?, gradient(dk, k)?, gradient(dv, v)?], of_others))
    }
}

/// Adds the gradients of the maps of all heads to those of the parameters, `(maps, 2·M·D + M)`.
fn add_parameters([m, d]: [usize; 2], linear: &[[LinearGradient; 2]], to: &mut [f32]) {
    let numbers = 2 * m * d + m;
    let heads = to.len() / numbers;
    // The rows that the kernels multiply by are the parameters times D^-¼, which scales queries and
    // keys; so the gradient of the parameters has the factor too.
    let scale = input_scale(d) as f32;
    for (n, [of_queries, of_keys]) in linear.iter().enumerate() {
        let (queries, rest) = to[n % heads * numbers..][..numbers].split_at_mut(m * d);
        let (keys, log_weights) = rest.split_at_mut(m * d);
        for (sum, side) in [(queries, of_queries), (keys, of_keys)] {
            for (sum, row) in sum.chunks_exact_mut(d).zip(side.rows.chunks_exact(padded(d))) {
                sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += scale * x);
            }
        }
        log_weights.iter_mut().zip(&of_keys.log_weights).for_each(|(sum, x)| *sum += x);
    }
}

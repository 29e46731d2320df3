//! FAVOR with forget gates, with the parameters of a map that is trained, or with both. These are
//! joined to the keys, see [`JoinedKeys`], since a custom operation of Candle takes at most three
//! tensors. The forward and backward passes are those of [`super::favor`], whose backward pass also
//! sums the gradients of gates and parameters.

use candle_core::{CpuStorage, DType, Result, Shape, Tensor, bail};

use super::super::{
    gradient,
    joined::JoinedKeys,
    operation::{Operation, Stored, apply},
};
use super::{Form, exponential::LinearGradient, op::Passes, padded};
use crate::ops;

/// Computes the attention of [`super::favor`] under a causal mask with gates `(B, Hkv, Tk)`.
pub(crate) fn gated(form: Form, qkv: [&Tensor; 3], gates: &Tensor, visible: Option<Vec<bool>>) -> Result<Tensor> {
    packed(form, None, Some(gates), qkv, visible, true)
}

/// Computes the attention of [`super::favor`] with parameters, gates, or both. Parameters are
/// `(maps, 2·M·D + M)`, one row for each key head or one for all: the rows for queries, the rows
/// for keys, and the logarithms of the features' weights, see [`super::Trained`]. The sizes given
/// with them are `M` and `D`. Gates are `(B, Hkv, Tk)`.
pub(super) fn packed(
    form: Form,
    parameters: Option<(&Tensor, [usize; 2])>,
    gates: Option<&Tensor>,
    [q, k, v]: [&Tensor; 3],
    visible: Option<Vec<bool>>,
    causal: bool,
) -> Result<Tensor> {
    let numbers =
        |gates: &Tensor| ops::reshape(&ops::contiguous(&ops::to_dtype(gates, DType::F32)?)?, gates.elem_count());
    let gates = gates.map(numbers).transpose()?;
    let sizes = parameters.map(|(_, sizes)| sizes);
    let rest = match (parameters, gates) {
        (None, None) => bail!("favor: there are neither parameters nor gates"),
        (Some((parameters, _)), None) => parameters.clone(),
        (None, Some(gates)) => gates,
        (Some((parameters, _)), Some(gates)) => {
            ops::cat(&[&ops::reshape(parameters, parameters.elem_count())?, &gates], 0)?
        }
    };
    let parameters = sizes.map_or(0, |[m, d]| form.maps.len() * (2 * m * d + m));
    let (joined, keys_and_rest) = JoinedKeys::new(k, &rest)?;
    let of = [q, &keys_and_rest, v];
    let passes = Passes::new(form, causal, visible, of);
    apply(PackedFavor { passes, joined, sizes, parameters }, of)
}

/// `PackedFavor` is FAVOR attention as one differentiable operation on
/// `(q, [k, parameters, gates], v)`.
struct PackedFavor {
    passes: Passes,
    joined: JoinedKeys,
    /// The sizes `M` and `D` of a trained map.
    sizes: Option<[usize; 2]>,
    /// The number of parameters, before the gates.
    parameters: usize,
}

impl PackedFavor {
    /// The gates among the numbers that are joined to the keys, if there are any.
    fn gates<'a>(&self, rest: &'a [f32]) -> Option<&'a [f32]> {
        Some(&rest[self.parameters..]).filter(|gates| !gates.is_empty())
    }
}

impl Operation<3> for PackedFavor {
    fn name(&self) -> &'static str {
        "favor-packed"
    }

    fn cpu(&self, [q, (s2, l2), v]: [Stored<'_, CpuStorage>; 3]) -> Result<(CpuStorage, Shape)> {
        let ((storage, k), rest) = self.joined.split((s2, l2))?;
        self.passes.forward([q, (storage, &k), v], self.gates(rest))
    }

    fn backward(
        &self,
        [q, keys_and_rest, v]: [&Tensor; 3],
        out: &Tensor,
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        let (k, rest) = self.joined.parts(keys_and_rest)?;
        let mut linear = match self.sizes {
            None => Vec::new(),
            Some([m, d]) => vec![[LinearGradient::new(m, d), LinearGradient::new(m, d)]; k.dim(0)? * k.dim(1)?],
        };
        let mut of_rest = vec![0f32; rest.len()];
        let (of_parameters, of_gates) = of_rest.split_at_mut(self.parameters);
        let gates = (self.gates(&rest), of_gates);
        let [dq, dk, dv] = self.passes.backward([q, &k, v], out, grad, &mut linear, gates, rest.len())?;
        if let Some(sizes) = self.sizes {
            add_parameters(sizes, &linear, of_parameters);
        }
        let of_keys_and_rest = JoinedKeys::gradient(dk, &of_rest, keys_and_rest)?;
        Ok([Some(gradient(dq, q)?), Some(of_keys_and_rest), Some(gradient(dv, v)?)])
    }
}

/// Adds the gradients of the maps of all heads to those of the parameters, `(maps, 2·M·D + M)`.
fn add_parameters([m, d]: [usize; 2], linear: &[[LinearGradient; 2]], to: &mut [f32]) {
    let numbers = 2 * m * d + m;
    let heads = to.len() / numbers;
    // The rows that the kernels multiply by are the parameters times D^-¼, which scales queries and
    // keys; so the gradient of the parameters has the factor too.
    let scale = (d as f64).powf(-0.25) as f32;
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

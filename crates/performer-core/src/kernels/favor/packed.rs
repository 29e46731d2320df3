//! FAVOR with forget gates, with the parameters of a map that is trained, or with both. These are
//! more tensors than the three that a custom operation of Candle takes, so some are packed into
//! one. The forward and backward passes are those of [`super::favor`], whose backward pass also
//! sums the gradients of gates and parameters.

use candle_core::{CpuStorage, DType, Result, Shape, Tensor, bail};

use super::super::{
    contiguous,
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
    // An operation takes at most three tensors, so keys and values become one, and parameters and
    // gates another. Keys and values are made contiguous first, because the result of Candle's
    // concatenation is otherwise not contiguous.
    let keys_values = ops::cat(&[&ops::contiguous(k)?, &ops::contiguous(v)?], 3)?;
    let numbers = |gates: &Tensor| ops::reshape(&ops::to_dtype(gates, DType::F32)?, gates.elem_count());
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
    let of = [q, &keys_values, &rest];
    let passes = Passes::new(form, causal, visible, of);
    apply(PackedFavor { passes, sizes, parameters, head_dim: k.dim(3)? }, of)
}

/// `PackedFavor` is FAVOR attention as one differentiable operation on
/// `(q, [k, v], [parameters, gates])`.
struct PackedFavor {
    passes: Passes,
    /// The sizes `M` and `D` of a trained map.
    sizes: Option<[usize; 2]>,
    /// The number of parameters, before the gates.
    parameters: usize,
    /// The width of a row of keys, before the values.
    head_dim: usize,
}

impl PackedFavor {
    /// The gates among the last operand, if there are any.
    fn gates<'a>(&self, rest: &'a [f32]) -> Option<&'a [f32]> {
        Some(&rest[self.parameters..]).filter(|gates| !gates.is_empty())
    }
}

impl Operation<3> for PackedFavor {
    fn name(&self) -> &'static str {
        "favor-packed"
    }

    fn cpu(&self, [(s1, l1), (s2, l2), (s3, l3)]: [Stored<'_, CpuStorage>; 3]) -> Result<(CpuStorage, Shape)> {
        let d = self.head_dim;
        let (k, v) = (l2.narrow(3, 0, d)?, l2.narrow(3, d, l2.dims()[3] - d)?);
        self.passes.forward([(s1, l1), (s2, &k), (s2, &v)], self.gates(contiguous(s3, l3)?))
    }

    fn backward(
        &self,
        [q, keys_values, rest]: [&Tensor; 3],
        out: &Tensor,
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        let d = self.head_dim;
        let (batch, key_heads, _, width) = keys_values.dims4()?;
        let (k, v) = (keys_values.narrow(3, 0, d)?, keys_values.narrow(3, d, width - d)?);
        let mut linear = match self.sizes {
            None => Vec::new(),
            Some([m, d]) => vec![[LinearGradient::new(m, d), LinearGradient::new(m, d)]; batch * key_heads],
        };
        let numbers = rest.flatten_all()?.to_vec1::<f32>()?;
        let mut gradients = vec![0f32; numbers.len()];
        let (of_parameters, of_gates) = gradients.split_at_mut(self.parameters);
        let gates = (self.gates(&numbers), of_gates);
        let [dq, dk, dv] = self.passes.backward([q, &k, &v], out, grad, &mut linear, gates)?;
        if let Some(sizes) = self.sizes {
            add_parameters(sizes, &linear, of_parameters);
        }
        let rest = Tensor::from_vec(gradients, rest.shape(), rest.device())?;
        Ok([Some(dq), Some(Tensor::cat(&[dk, dv], 3)?), Some(rest)])
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

//! This module runs a [`Problem`] through the attention under test.

use candle_core::{DType, Device, Result, Tensor, Var};
use performer_core::features::{FeatureMapKind, RandomParameters};
use performer_core::reference::{attention, attention_backward};
use performer_core::{Attention, Favor, Inputs, Mask, Softmax, Windowed};

use super::{ALL_MAPS, Problem, assert_close, mask_tensor, tensor, values};

/// Returns softmax, then every feature map.
pub(crate) fn all_kernels() -> impl Iterator<Item = Option<FeatureMapKind>> {
    std::iter::once(None).chain(ALL_MAPS.map(Some))
}

/// Whether all features are positive, so that no input can bring a denominator near zero.
pub(crate) fn is_positive(map: Option<FeatureMapKind>) -> bool {
    map.is_none_or(|map| map.describe().positive)
}

/// Returns the length of queries and keys at which [`Problem`]s of a kernel are well conditioned:
/// unit normal where kernel values cannot come near zero; short for the limit maps, whose
/// `(1 + z/n)^n` can, and shorter for the signed random features, to keep them near their
/// (positive) kernel.
pub(crate) fn conditioned_scale(map: Option<FeatureMapKind>) -> f64 {
    use FeatureMapKind::*;
    match map {
        Some(Trigonometric | Phase | GaussianPhase | HermiteTail) => 0.3,
        Some(Limit(_)) => 0.5,
        _ => 1.0,
    }
}

/// A `Layout` says how an input lies in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Layout {
    /// Row-major `(B, H, T, D)`.
    Contiguous,
    /// A `(B, T, H, D)` tensor seen through a transposition.
    Transposed,
    /// The middle of a tensor that is larger in heads, tokens and width.
    Sliced,
}

impl Layout {
    pub(crate) const ALL: [Layout; 3] = [Layout::Contiguous, Layout::Transposed, Layout::Sliced];

    /// Makes a variable that holds `values` in this layout, and the `(B, H, T, D)` view of them.
    fn place(self, values: &[f64], dims: [usize; 4], dtype: DType) -> Result<(Var, Tensor)> {
        let plain = tensor(values, &dims, dtype, &Device::Cpu)?;
        let var = Var::from_tensor(&match self {
            Layout::Contiguous => plain,
            Layout::Transposed => plain.transpose(1, 2)?.contiguous()?,
            Layout::Sliced => {
                let mut padded = plain;
                for dim in 1..4 {
                    padded = padded.pad_with_zeros(dim, 1, 2)?;
                }
                padded
            }
        })?;
        let view = self.view(var.as_tensor(), dims)?;
        Ok((var, view))
    }

    fn view(self, tensor: &Tensor, dims: [usize; 4]) -> Result<Tensor> {
        match self {
            Layout::Contiguous => Ok(tensor.clone()),
            Layout::Transposed => tensor.transpose(1, 2),
            Layout::Sliced => tensor.narrow(1, 1, dims[1])?.narrow(2, 1, dims[2])?.narrow(3, 1, dims[3]),
        }
    }
}

/// An `Outcome` holds the output of attention, and the gradients of `Σ output ∘ grad_output`.
pub(crate) struct Outcome {
    pub(crate) output: Vec<f64>,
    pub(crate) q: Vec<f64>,
    pub(crate) k: Vec<f64>,
    pub(crate) v: Vec<f64>,
    /// The gradient of the gates, which it is empty without.
    pub(crate) gates: Vec<f64>,
}

impl Problem {
    /// Builds FAVOR over the problem's feature map, random rows and phases.
    ///
    /// # Panics
    /// If the problem is one of softmax attention.
    pub(crate) fn favor(&self, dtype: DType) -> Result<Favor> {
        let Some(map) = self.map else { panic!("softmax has no feature map") };
        let device = Device::Cpu;
        let (d, dtype) = (self.shape.head_dim, if dtype == DType::F64 { DType::F64 } else { DType::F32 });
        let random = RandomParameters {
            projection: tensor(&self.projection, &[self.projection.len() / d, d], dtype, &device)?,
            offsets: match self.offsets.len() {
                0 => None,
                m => Some(tensor(&self.offsets, &[m], dtype, &device)?),
            },
        };
        Favor::with_map(map.build(d, Some(&random), &device)?)
    }

    /// Builds the problem's attention.
    pub(crate) fn attention(&self, dtype: DType) -> Result<Box<dyn Attention>> {
        Ok(match (self.map, self.window) {
            (None, None) => Box::new(Softmax::new()),
            (None, Some((window, sinks))) => Box::new(Softmax::new().with_window(window)?.with_sinks(sinks)?),
            (Some(_), None) => Box::new(self.favor(dtype)?),
            (Some(_), Some(_)) => Box::new(self.features_and_window(dtype)?),
        })
    }

    /// Builds that attention without fused kernels.
    pub(crate) fn composed(&self, dtype: DType) -> Result<Box<dyn Attention>> {
        Ok(match (self.map, self.window) {
            (None, None) => Box::new(Softmax::new().composed()),
            (None, Some((window, sinks))) => {
                Box::new(Softmax::new().composed().with_window(window)?.with_sinks(sinks)?)
            }
            (Some(_), None) => Box::new(self.favor(dtype)?.composed()),
            (Some(_), Some(_)) => Box::new(self.features_and_window(dtype)?.composed()),
        })
    }

    fn features_and_window(&self, dtype: DType) -> Result<Windowed> {
        let Some((window, sinks)) = self.window else { panic!("the problem has no window") };
        Windowed::new(window, self.favor(dtype)?)?.with_sinks(sinks)
    }

    pub(crate) fn mask(&self) -> Result<Mask> {
        let mask = if self.causal { Mask::causal() } else { Mask::full() };
        Ok(match &self.key_mask {
            None => mask,
            Some(keys) => mask.with_keys(&mask_tensor(keys, &[self.shape.batch, self.shape.k_len], &Device::Cpu)?)?,
        })
    }

    /// Returns queries, keys and values as tensors.
    pub(crate) fn tensors(&self, dtype: DType) -> Result<[Tensor; 3]> {
        let of = |values: &[f64], dims: [usize; 4]| tensor(values, &dims, dtype, &Device::Cpu);
        Ok([of(&self.q, self.q_dims())?, of(&self.k, self.k_dims())?, of(&self.v, self.v_dims())?])
    }

    /// Computes the output of the attention under test.
    pub(crate) fn forward(&self, dtype: DType) -> Result<Tensor> {
        let [q, k, v] = self.tensors(dtype)?;
        self.attention(dtype)?.forward(Inputs::new(&q, &k, &v), &self.mask()?)
    }

    /// Computes the output and gradients of an attention.
    pub(crate) fn run(&self, attention: &dyn Attention, dtype: DType, layout: Layout) -> Result<Outcome> {
        let (q_var, q) = layout.place(&self.q, self.q_dims(), dtype)?;
        let (k_var, k) = layout.place(&self.k, self.k_dims(), dtype)?;
        let (v_var, v) = layout.place(&self.v, self.v_dims(), dtype)?;
        // Half types would overflow in the sum below, and gates have too many digits for them.
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let gates = match &self.gates {
            Some(gates) => Some(layout.place(gates, self.gate_dims(), wide)?),
            None => None,
        };
        let rows = gates.as_ref().map(|(_, gates)| gates.squeeze(3)).transpose()?;
        let mut inputs = Inputs::new(&q, &k, &v);
        inputs.gates = rows.as_ref();
        let output = attention.forward(inputs, &self.mask()?)?;
        assert_eq!((output.dims(), output.dtype()), (&self.output_dims()[..], dtype), "{:?}", self.map);
        let grad_output = tensor(&self.grad_output, &self.output_dims(), wide, &Device::Cpu)?;
        let gradients = (output.to_dtype(wide)? * grad_output)?.sum_all()?.backward()?;
        let gradient = |var: &Var, dims: [usize; 4]| -> Result<Vec<f64>> {
            match gradients.get(var) {
                Some(gradient) => values(&layout.view(gradient, dims)?),
                None => Ok(vec![f64::NAN; dims.iter().product()]),
            }
        };
        Ok(Outcome {
            output: values(&output)?,
            q: gradient(&q_var, self.q_dims())?,
            k: gradient(&k_var, self.k_dims())?,
            v: gradient(&v_var, self.v_dims())?,
            gates: gates.map_or(Ok(Vec::new()), |(var, _)| gradient(&var, self.gate_dims()))?,
        })
    }

    /// Computes the output and gradients by the reference.
    pub(crate) fn expected(&self) -> Outcome {
        let gradients = attention_backward(self.kernel(), self.inputs(), &self.grad_output);
        let output = attention(self.kernel(), self.inputs());
        Outcome { output, q: gradients.q, k: gradients.k, v: gradients.v, gates: gradients.gates }
    }

    /// Fails if `actual` is further from `expected` than `tolerance`, relative to the largest
    /// element of each tensor.
    #[track_caller]
    pub(crate) fn assert_outcome(&self, what: &str, actual: &Outcome, expected: &Outcome, tolerance: f64) {
        let what = format!("{what}, {:?}, causal {}, {:?}", self.map, self.causal, self.shape);
        for (name, dims, actual, expected) in [
            ("output", self.output_dims(), &actual.output, &expected.output),
            ("gradient of q", self.q_dims(), &actual.q, &expected.q),
            ("gradient of k", self.k_dims(), &actual.k, &expected.k),
            ("gradient of v", self.v_dims(), &actual.v, &expected.v),
        ] {
            assert_close(&format!("{what}: {name}"), &dims, actual, expected, tolerance);
        }
        if self.gates.is_some() {
            assert_close(
                &format!("{what}: gradient of gates"),
                &self.gate_dims(),
                &actual.gates,
                &expected.gates,
                tolerance,
            );
        }
    }

    /// Rounds queries, keys and values to `dtype`: the reference must see what the attention under
    /// test sees.
    pub(crate) fn rounded(mut self, dtype: DType) -> Result<Self> {
        let [q, k, v] = self.tensors(dtype)?;
        (self.q, self.k, self.v) = (values(&q)?, values(&k)?, values(&v)?);
        Ok(self)
    }
}

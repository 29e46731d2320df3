//! This module is AdamW (Loshchilov & Hutter, <https://arxiv.org/abs/1711.05101>, algorithm 2) with
//! gradient clipping by global norm.
//!
//! With the gradient `g`, learning rate `η`, decay `λ` and step number `t` counted from one:
//!
//! ```text
//! m ← β₁ m + (1 − β₁) g          v ← β₂ v + (1 − β₂) g²
//! θ ← θ − η (λ θ + (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε))
//! ```
//!
//! **Which parameters decay.** `λ` applies to parameters of rank two or more whose name has no
//! segment (the parts between dots) that is `bias`, ends in `_bias` or `_conv1d`, contains `norm`
//! or is `feature_map`; it is zero for all others. Decay shrinks the weights of linear maps and
//! embeddings; gains, offsets, filters of convolutions and the rows of feature maps have no reason
//! to be near zero.
//!
//! **Why not the optimiser of `candle-nn`.** That one makes some fifteen passes and three copies
//! per parameter, skips a parameter without a gradient silently (so an operation without a backward
//! pass trains nothing without a message), and cannot save its state. Here the update of an `f32`
//! parameter on the CPU is one pass over memory, and a missing or non-finite gradient is an error
//! that changes nothing.

use super::{
    AdamWConfig,
    gradients::{Gradients, PIECE},
};
use anyhow::{Context, Result, bail, ensure};
use candle_core::{CpuStorage, DType, Device, InplaceOp2, Layout, Tensor, Var};
use rayon::prelude::*;
use std::cell::RefCell;
use std::collections::HashMap;

/// Name of the step counter in [`AdamW::state`].
const STEP: &str = "step";

/// The moments `m` and `v` of one parameter.
#[derive(Debug)]
enum Moments {
    /// `f32` on the CPU: updated in place, together with the parameter, by [`FusedUpdate`].
    Host { m: Vec<f32>, v: Vec<f32> },
    /// `f32` on CUDA: updated in place by one kernel, and shared with nobody.
    #[cfg(feature = "cuda")]
    Cuda { m: Tensor, v: Tensor },
    /// Any other device or type: updated by composed operations, in [`moment_dtype`].
    Tensors { m: Tensor, v: Tensor },
}

/// Returns the type of a parameter's moments: half-precision parameters have `f32` moments, because
/// squares of small gradients would vanish.
fn moment_dtype(parameter: DType) -> DType {
    match parameter {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// `AdamW` is the AdamW optimiser over named variables.
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    params: Vec<(String, Var)>,
    moments: Vec<Moments>,
    step: usize,
}

impl AdamW {
    /// Makes moments of zero for `params`, which are put in the order of their names.
    ///
    /// # Errors
    /// If there are no parameters, a constant is out of range, a name is given twice, or a
    /// parameter is not of a floating-point type.
    pub fn new(params: Vec<(String, Var)>, config: AdamWConfig) -> Result<Self> {
        Self::with_fused_update(params, config, true)
    }

    fn with_fused_update(mut params: Vec<(String, Var)>, config: AdamWConfig, fuse: bool) -> Result<Self> {
        config.validate()?;
        ensure!(
            !params.is_empty(),
            "there are no parameters to train: a frozen model has none; make it by Decoder::from_tensors instead"
        );
        params.sort_by(|(a, _), (b, _)| a.cmp(b));
        if let Some(pair) = params.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            bail!("two parameters are named `{}`", pair[0].0);
        }
        let moments = params
            .iter()
            .map(|(name, var)| {
                ensure!(
                    matches!(var.dtype(), DType::F64 | DType::F32 | DType::F16 | DType::BF16),
                    "parameter `{name}` of type {:?} cannot be trained: use f32, bf16, f16 or f64",
                    var.dtype()
                );
                if fuse && var.device().is_cpu() && var.dtype() == DType::F32 {
                    let zeros = vec![0.0; var.elem_count()];
                    return Ok(Moments::Host { m: zeros.clone(), v: zeros });
                }
                #[cfg(feature = "cuda")]
                if fuse && super::cuda::takes(var) {
                    let zeros = || Tensor::zeros(var.shape(), DType::F32, var.device());
                    return Ok(Moments::Cuda { m: zeros()?, v: zeros()? });
                }
                let zeros = Tensor::zeros(var.shape(), moment_dtype(var.dtype()), var.device())?;
                Ok(Moments::Tensors { m: zeros.clone(), v: zeros })
            })
            .collect::<Result<_>>()?;
        Ok(Self { config, params, moments, step: 0 })
    }

    /// Returns the parameters in the order of their names, which is the order that [`Gradients`]
    /// must have.
    pub fn parameters(&self) -> &[(String, Var)] {
        &self.params
    }

    /// Returns the number of steps taken.
    pub fn steps(&self) -> usize {
        self.step
    }

    /// Updates every parameter at learning rate `lr`, with the gradients scaled down to a global
    /// norm of `clip` where they exceed it. Returns the norm before clipping.
    ///
    /// # Errors
    /// If `lr` is negative or not finite, `clip` is not above 0, a parameter has no gradient, the
    /// gradients are those of other parameters, or the norm is not finite; nothing is changed then.
    pub fn step(&mut self, grads: &Gradients, lr: f64, clip: Option<f64>) -> Result<f64> {
        ensure!(lr >= 0.0 && lr.is_finite(), "learning rate {lr} is not allowed; it must be a number of at least 0");
        if let Some(limit) = clip {
            ensure!(limit > 0.0, "the gradient norm to clip at must be positive, got {limit}");
        }
        let gradients = self.checked(grads)?;
        let norm = self.finite_norm(grads)?;

        let (beta1, beta2) = self.config.betas;
        let t = (self.step + 1) as f64;
        let update = Update {
            gradient_scale: clip.filter(|limit| norm > *limit).map_or(1.0, |c| c / norm),
            beta1,
            beta2,
            step_size: lr / (1.0 - beta1.powf(t)),
            second_correction: 1.0 / (1.0 - beta2.powf(t)),
            eps: self.config.eps,
            decay: 0.0,
        };
        for (((name, var), moments), gradient) in self.params.iter().zip(&mut self.moments).zip(gradients) {
            let decay = if decays(name, var) { lr * self.config.weight_decay } else { 0.0 };
            let update = Update { decay, ..update };
            match moments {
                Moments::Host { m, v } => update.fused(var, gradient, m, v),
                #[cfg(feature = "cuda")]
                Moments::Cuda { m, v } => update.on_cuda(var, gradient, m, v),
                Moments::Tensors { m, v } => update.composed(var, gradient, m, v),
            }
            .with_context(|| format!("updating parameter `{name}`"))?;
        }
        self.step += 1;
        Ok(norm)
    }

    fn checked<'g>(&self, grads: &'g Gradients) -> Result<Vec<&'g Tensor>> {
        ensure!(
            grads.tensors.len() == self.params.len(),
            "{} gradients for {} parameters: collect them with `Gradients::from_store(.., optimizer.parameters())`",
            grads.tensors.len(),
            self.params.len()
        );
        let pairs = self.params.iter().zip(&grads.tensors);
        pairs
            .map(|((name, var), gradient)| {
                let Some(gradient) = gradient else {
                    bail!(
                        "parameter `{name}` received no gradient: the loss does not depend on it, or an operation between \
                         the two has no backward pass; leave it out of the optimiser or use a differentiable operation"
                    );
                };
                ensure!(
                    gradient.shape() == var.shape(),
                    "the gradient of parameter `{name}` has shape {:?} instead of {:?}",
                    gradient.dims(),
                    var.dims()
                );
                Ok(gradient)
            })
            .collect()
    }

    fn finite_norm(&self, grads: &Gradients) -> Result<f64> {
        let squares = grads.squared_norms()?;
        let norm = squares.iter().sum::<f64>().sqrt();
        if !norm.is_finite() {
            let bad = squares.iter().filter(|s| !s.is_finite()).count();
            let first = squares.iter().position(|s| !s.is_finite()).unwrap_or(0);
            bail!(
                "the gradient is not finite at optimiser step {} (parameter `{}`, {bad} of {} parameters): \
                 lower the learning rate, lengthen its warm-up or clip gradients; the parameters are unchanged",
                self.step + 1,
                self.params[first].0,
                self.params.len()
            );
        }
        Ok(norm)
    }

    /// Returns everything needed to resume: the moments as `m.<name>` and `v.<name>`, and the
    /// number of steps as `step`.
    ///
    /// # Errors
    /// If moments on a device cannot be copied.
    pub fn state(&self) -> Result<HashMap<String, Tensor>> {
        let mut state = HashMap::with_capacity(2 * self.params.len() + 1);
        for ((name, var), moments) in self.params.iter().zip(&self.moments) {
            let (m, v) = match moments {
                Moments::Host { m, v } => (
                    Tensor::from_slice(m, var.shape(), &Device::Cpu)?,
                    Tensor::from_slice(v, var.shape(), &Device::Cpu)?,
                ),
                #[cfg(feature = "cuda")]
                Moments::Cuda { m, v } => (m.copy()?, v.copy()?),
                Moments::Tensors { m, v } => (m.clone(), v.clone()),
            };
            state.insert(format!("m.{name}"), m);
            state.insert(format!("v.{name}"), v);
        }
        let step = Tensor::new(self.step as i64, &Device::Cpu)?;
        state.insert(STEP.to_owned(), step);
        Ok(state)
    }

    /// Restores what [`Self::state`] returned, on whichever device and by whichever path it was
    /// computed.
    ///
    /// # Errors
    /// If an entry is missing, misshapen or superfluous; the message names it, and the optimiser is
    /// unchanged.
    pub fn load_state(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        let entry = |name: &str, shape: &[usize]| {
            let Some(tensor) = state.get(name) else {
                bail!("the optimiser state lacks `{name}`: it belongs to another model");
            };
            ensure!(
                tensor.dims() == shape,
                "`{name}` of the optimiser state has shape {:?} instead of {shape:?}: it belongs to another model",
                tensor.dims()
            );
            Ok(tensor)
        };
        let step = entry(STEP, &[])?.to_dtype(DType::I64)?.to_scalar::<i64>()?;
        let step = usize::try_from(step).with_context(|| format!("the optimiser state claims {step} steps"))?;
        let mut restored = Vec::with_capacity(self.moments.len());
        for ((name, var), moments) in self.params.iter().zip(&self.moments) {
            let m = entry(&format!("m.{name}"), var.dims())?;
            let v = entry(&format!("v.{name}"), var.dims())?;
            restored.push(match moments {
                Moments::Host { .. } => Moments::Host { m: host_values(m)?, v: host_values(v)? },
                #[cfg(feature = "cuda")]
                Moments::Cuda { .. } => {
                    let own = |t: &Tensor| t.to_device(var.device())?.to_dtype(DType::F32)?.force_contiguous();
                    Moments::Cuda { m: own(m)?, v: own(v)? }
                }
                Moments::Tensors { .. } => {
                    let dtype = moment_dtype(var.dtype());
                    Moments::Tensors {
                        m: m.to_device(var.device())?.to_dtype(dtype)?,
                        v: v.to_device(var.device())?.to_dtype(dtype)?,
                    }
                }
            });
        }
        if state.len() != 2 * self.params.len() + 1 {
            let known = |key: &str| {
                key == STEP
                    || key
                        .strip_prefix("m.")
                        .or(key.strip_prefix("v."))
                        .is_some_and(|name| self.params.iter().any(|(known, _)| known == name))
            };
            let extra = state.keys().filter(|key| !known(key)).min();
            bail!(
                "the optimiser state has an entry `{}` that no parameter claims: it belongs to another model",
                extra.map_or("", |key| key)
            );
        }
        self.moments = restored;
        self.step = step;
        Ok(())
    }
}

fn host_values(tensor: &Tensor) -> Result<Vec<f32>> {
    let flat = tensor.to_dtype(DType::F32)?.flatten_all()?;
    Ok(flat.to_vec1()?)
}

/// Whether weight decay applies to a parameter: see the [module documentation](self).
fn decays(name: &str, parameter: &Tensor) -> bool {
    let spared = |part: &str| {
        let ends = ["_bias", "_conv1d"].iter().any(|end| part.ends_with(end));
        matches!(part, "bias" | "feature_map") || ends || part.contains("norm")
    };
    parameter.rank() >= 2 && !name.split('.').any(spared)
}

/// An `Update` holds the scalars of one step for one parameter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Update {
    /// The factor by which clipping multiplies the gradient.
    pub(super) gradient_scale: f64,
    pub(super) beta1: f64,
    pub(super) beta2: f64,
    /// `η / (1 − β₁ᵗ)`.
    pub(super) step_size: f64,
    /// `1 / (1 − β₂ᵗ)`.
    pub(super) second_correction: f64,
    pub(super) eps: f64,
    /// `η λ`, or zero.
    pub(super) decay: f64,
}

impl Update {
    fn fused(&self, var: &Var, gradient: &Tensor, m: &mut [f32], v: &mut [f32]) -> Result<()> {
        let gradient = gradient.to_dtype(DType::F32)?.contiguous()?;
        let moments = RefCell::new((m, v));
        let update = FusedUpdate { scalars: self, moments };
        Ok(var.inplace_op2(&gradient, &update)?)
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(&self, var: &Var, gradient: &Tensor, m: &Tensor, v: &Tensor) -> Result<()> {
        let gradient = gradient.to_dtype(DType::F32)?.contiguous()?;
        Ok(var.inplace_op2(&gradient, &super::cuda::AdamWOnCuda { scalars: self, m, v })?)
    }

    fn composed(&self, var: &Var, gradient: &Tensor, m: &mut Tensor, v: &mut Tensor) -> Result<()> {
        let gradient = (gradient.to_dtype(m.dtype())? * self.gradient_scale)?;
        let parameter = var.as_detached_tensor().to_dtype(m.dtype())?;
        let next_m = ((&*m * self.beta1)? + (&gradient * (1.0 - self.beta1))?)?;
        let next_v = ((&*v * self.beta2)? + (gradient.sqr()? * (1.0 - self.beta2))?)?;
        let denominator = ((&next_v * self.second_correction)?.sqrt()? + self.eps)?;
        let change = ((&parameter * self.decay)? + ((&next_m * self.step_size)? / denominator)?)?;
        var.set(&(parameter - change)?.to_dtype(var.dtype())?)?;
        (*m, *v) = (next_m, next_v);
        Ok(())
    }
}

/// `FusedUpdate` performs the update in one pass over parameter, gradient and moments:
/// [`Update::composed`] for contiguous `f32` on the CPU.
struct FusedUpdate<'a> {
    scalars: &'a Update,
    // Candle passes the operation by shared reference and mutates one tensor only.
    moments: RefCell<(&'a mut [f32], &'a mut [f32])>,
}

impl InplaceOp2 for FusedUpdate<'_> {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn cpu_fwd(
        &self,
        parameter: &mut CpuStorage,
        parameter_layout: &Layout,
        gradient: &CpuStorage,
        gradient_layout: &Layout,
    ) -> candle_core::Result<()> {
        let (CpuStorage::F32(parameter), CpuStorage::F32(gradient), Some((p_start, p_end)), Some((g_start, g_end))) =
            (parameter, gradient, parameter_layout.contiguous_offsets(), gradient_layout.contiguous_offsets())
        else {
            candle_core::bail!("the fused update takes contiguous f32 parameters and gradients")
        };
        let s = self.scalars;
        let scale = s.gradient_scale as f32;
        let (beta1, one_minus_beta1) = (s.beta1 as f32, (1.0 - s.beta1) as f32);
        let (beta2, one_minus_beta2) = (s.beta2 as f32, (1.0 - s.beta2) as f32);
        let (step_size, correction) = (s.step_size as f32, s.second_correction as f32);
        let (eps, decay) = (s.eps as f32, s.decay as f32);
        let mut moments = self.moments.borrow_mut();
        let (ms, vs) = &mut *moments;
        let update = |p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]| {
            for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
                let g = g * scale;
                *m = beta1 * *m + one_minus_beta1 * g;
                *v = beta2 * *v + one_minus_beta2 * (g * g);
                *p -= decay * *p + step_size * *m / ((correction * *v).sqrt() + eps);
            }
        };
        let (parameter, gradient) = (&mut parameter[p_start..p_end], &gradient[g_start..g_end]);
        // To pass a small parameter to other threads would take longer.
        if parameter.len() <= PIECE {
            update(parameter, gradient, ms, vs);
            return Ok(());
        }
        let pieces = parameter.par_chunks_mut(PIECE).zip(gradient.par_chunks(PIECE));
        let moments = ms.par_chunks_mut(PIECE).zip(vs.par_chunks_mut(PIECE));
        pieces.zip(moments).for_each(|((p, g), (m, v))| update(p, g, m, v));
        Ok(())
    }
}

#[cfg(test)]
mod tests;

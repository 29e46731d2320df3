//! The ways of computing FAVOR, behind one trait: fused kernels for a kind of device, and Candle's
//! own operations, which take everything that is left.

use std::fmt;

use candle_core::{D, DType, Result, Tensor, bail};

use super::composed::Composed;
use super::cpu::Cpu;
#[cfg(feature = "cuda")]
use super::cuda::Cuda;
#[cfg(feature = "metal")]
use super::metal::Metal;
use crate::{
    attention::{Inputs, Mask, Path, State, inputs::Sizes, quotient::values_and_logs},
    features::{ExponentialForm, FeatureMap, check_forms},
    ops,
    projection::input_scale,
};

/// One call of FAVOR attention, whose inputs fit each other, the mask and the map. Nothing is
/// empty.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) map: &'a dyn FeatureMap,
    pub(super) inputs: Inputs<'a>,
    pub(super) mask: &'a Mask,
    pub(super) sizes: Sizes,
    /// Whether the logarithms of the denominators are wanted as well. Features must be positive
    /// then.
    pub(super) logs: bool,
    /// Whether it goes on from a state that has seen tokens.
    pub(super) begun: bool,
}

impl Call<'_> {
    /// What kernels that compute features leave out of a query's log-features, since all of them
    /// share it: `(B, H, T, 1)`.
    pub(super) fn query_offset(&self) -> Result<Tensor> {
        let (b, h, t, d) = self.inputs.q.dims4()?;
        let hkv = self.sizes.key_heads;
        let scaled = ops::scale(&ops::to_dtype(self.inputs.q, DType::F32)?, input_scale(d))?;
        // A map with parameters for each key head needs key heads as the first dimension.
        let rows = ops::reshape(&ops::contiguous(&scaled)?, (b * hkv, (h / hkv) * t, d))?;
        ops::reshape(&self.map.query_offset(&rows)?, (b, h, t, 1))
    }

    /// The rows that a kernel returns for ready features, whose heads may be folded into the batch,
    /// in the shape and type of this call.
    pub(super) fn unfolded(&self, rows: &Tensor) -> Result<Tensor> {
        let Sizes { batch, heads, queries, .. } = self.sizes;
        let rows = ops::reshape(rows, (batch, heads, queries, rows.dim(D::Minus1)?))?;
        ops::to_dtype(&rows, self.inputs.q.dtype())
    }
}

/// The parameters of a trained map as they are now, from its `form`.
///
/// # Errors
/// If the map has changed its form since the kernels were prepared for it.
pub(super) fn trained_parameters<'a>(
    map: &dyn FeatureMap,
    form: Option<&'a ExponentialForm>,
) -> Result<[&'a Tensor; 3]> {
    match form.and_then(ExponentialForm::trained) {
        Some(parameters) => Ok(parameters),
        None => bail!("the feature map {} is no longer of the form that it was made in", map.name()),
    }
}

/// Refuses keys `(B, Hkv, T, D)` of other heads than the `fitted` ones that a map was fitted to; 1
/// serves any number.
pub(super) fn check_heads(fitted: usize, k: &Tensor) -> Result<()> {
    if fitted != 1 && fitted != k.dim(1)? {
        bail!("k has shape {:?}; the feature map was fitted to {fitted} key heads", k.dims());
    }
    Ok(())
}

/// Puts the parameters of a trained map into one tensor `(maps, 2·M·D + M)`, f32, since an
/// operation takes few: its rows for queries and for keys `(maps, M, D)`, and its weights of keys
/// `(maps, M)`.
pub(super) fn join_parameters([queries, keys, log_weights]: [&Tensor; 3]) -> Result<Tensor> {
    let (maps, m, d) = queries.dims3()?;
    let flat = |rows: &Tensor| ops::reshape(rows, (maps, m * d));
    ops::to_dtype(&ops::cat(&[&flat(queries)?, &flat(keys)?, log_weights], 1)?, DType::F32)
}

/// What a call returns.
pub(super) struct Output {
    /// Attention, `(B, H, Tq, Dv)`.
    pub(super) values: Tensor,
    /// The logarithms of its denominators, `(B, H, Tq, 1)`, in the scale of the kernel that the map
    /// estimates; present if they were wanted.
    pub(super) logs: Option<Tensor>,
}

impl Output {
    /// Takes the rows of a kernel, `(B, H, Tq, Dv)`, or with logarithms at least `Dv + 1`.
    pub(super) fn of_rows(call: &Call<'_>, rows: Tensor) -> Result<Self> {
        if !call.logs {
            return Ok(Self { values: rows, logs: None });
        }
        let (values, logs) = values_and_logs(&rows, call.sizes.value_dim)?;
        Ok(Self { values, logs: Some(logs) })
    }
}

/// A way of computing FAVOR for one feature map.
pub(super) trait Backend: fmt::Debug + Send + Sync {
    /// Computes attention in one pass, with gradients.
    fn forward(&self, call: &Call<'_>) -> Result<Output>;

    /// Computes causal attention from a state on, without gradients, and brings the state's memory
    /// up to the last token. After an error the memory is what it was.
    fn advance(&self, call: &Call<'_>, state: &mut State) -> Result<Output>;
}

/// A backend of fused kernels for a kind of device, which does not take every call.
pub(super) trait Fused: Backend {
    /// The name of the kind of device.
    fn device(&self) -> &'static str;

    /// Why it does not take a call, or `None` if it does.
    fn refusal(&self, call: &Call<'_>) -> Option<String>;
}

/// All backends for one feature map: fused kernels, of which the first that takes a call computes
/// it, and composed operations, which take what is left.
#[derive(Debug)]
pub(super) struct Backends {
    fused: Vec<Box<dyn Fused>>,
    composed: Composed,
}

impl Backends {
    /// Prepares the kernels for `map`: this is where its numbers are brought into their layouts.
    pub(super) fn new(map: &dyn FeatureMap, chunk: usize) -> Result<Self> {
        check_forms(map)?;
        let fused: Vec<Box<dyn Fused>> = vec![
            Box::new(Cpu::new(map)?),
            #[cfg(feature = "cuda")]
            Box::new(Cuda::new(map)?),
            #[cfg(feature = "metal")]
            Box::new(Metal::new(map)?),
        ];
        Ok(Self { fused, composed: Composed { chunk } })
    }

    /// Composed operations alone.
    pub(super) fn only_composed(chunk: usize) -> Self {
        Self { fused: Vec::new(), composed: Composed { chunk } }
    }

    /// Sets the tokens that a chunk has in composed operations.
    pub(super) fn set_chunk(&mut self, chunk: usize) {
        self.composed.chunk = chunk;
    }

    /// The backend that takes a call.
    pub(super) fn choose(&self, call: &Call<'_>) -> &dyn Backend {
        match self.fused.iter().find(|backend| backend.refusal(call).is_none()) {
            Some(backend) => &**backend,
            None => &self.composed,
        }
    }

    /// The path that a call takes; if it is composed, why.
    pub(super) fn path(&self, call: &Call<'_>) -> Path {
        let mut refusals = Vec::new();
        for backend in &self.fused {
            match backend.refusal(call) {
                None => return Path::Fused { device: backend.device() },
                Some(why) => refusals.push(why),
            }
        }
        Path::Composed { why: if refusals.is_empty() { "it was asked for".into() } else { refusals.join("; ") } }
    }
}

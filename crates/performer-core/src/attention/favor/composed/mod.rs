//! FAVOR in Candle's own operations: every device, every type and every feature map, slower and
//! with more memory than the kernels.

mod causal;
mod full;

use candle_core::{DType, Result, Tensor, bail};

use super::backend::{Backend, Call, Output};
use crate::attention::{Memory, State, StateRecord, layout::Folded, quotient::Rows, state::bytes_of};

/// The backend that takes everything.
#[derive(Clone, Copy, Debug)]
pub(super) struct Composed {
    /// Tokens that a chunk of causal attention has, a power of two.
    pub(super) chunk: usize,
}

impl Composed {
    fn output(call: &Call<'_>, folded: &Folded, rows: &Rows) -> Result<Output> {
        let logs = match &rows.logs {
            _ if !call.logs => None,
            Some(logs) => Some(folded.output(logs)?),
            None => {
                bail!(
                    "feature map {:?} does not give its features as logarithms, without which they cannot be joined \
                     with exact attention",
                    call.map
                )
            }
        };
        Ok(Output { values: folded.output(&rows.values)?, logs })
    }
}

impl Backend for Composed {
    fn forward(&self, call: &Call<'_>) -> Result<Output> {
        let folded = Folded::new(call.inputs, call.mask)?;
        let rows = if call.mask.is_causal() {
            causal::forward(call.map, &folded, self.chunk)?
        } else {
            Rows { values: full::attend(call.map, &folded)?, logs: None }
        };
        Self::output(call, &folded, &rows)
    }

    fn advance(&self, call: &Call<'_>, state: &mut State) -> Result<Output> {
        let folded = Folded::new(call.inputs, call.mask)?;
        let rows = state.advance_with(|past: Option<&TensorSums>| {
            let (rows, sums) = causal::extend(call.map, &folded, self.chunk, past.map(|past| &past.sums))?;
            Ok((rows, TensorSums { batch: call.sizes.batch, sums: sums.detach() }))
        })?;
        Self::output(call, &folded, &rows)
    }
}

/// Prefix sums as tensors: what composed operations and the Metal kernel remember.
#[derive(Clone, Debug)]
pub(super) struct TensorSums {
    /// `B`, which the sums' shapes do not tell.
    pub(super) batch: usize,
    pub(super) sums: PrefixSums,
}

/// Prefix sums over the keys seen so far, by key head: `N = B·Hkv`, `F` features, `Dv` values.
///
/// The sums are stored divided by `e^{log_scale}`, where `log_scale` is the running maximum, after
/// forget gates, of the log-features, or of the keys' log-scales where features are signed. Where
/// they are log-features, no key weighs more than 1 in a feature, and the largest weight is 1.
#[derive(Clone, Debug)]
pub(super) struct PrefixSums {
    /// `c`: shape `(N, 1, F)` for positive features (a maximum per feature), `(N, 1, 1)` for signed
    /// ones.
    pub(super) log_scale: Tensor,
    /// `Σ_j φ(k_j) [v_j, 1] / e^c`: shape `(N, F, Dv + 1)`.
    pub(super) sums: Tensor,
}

impl PrefixSums {
    fn detach(self) -> Self {
        Self { log_scale: self.log_scale.detach(), sums: self.sums.detach() }
    }

    /// Checks that a state belongs to inputs that make sums and scales of these shapes.
    pub(super) fn check(&self, sums: [usize; 3], scales: [usize; 3], dtype: DType) -> Result<()> {
        let same_dtype = [&self.sums, &self.log_scale].iter().all(|t| t.dtype() == dtype);
        if self.sums.dims() != sums || self.log_scale.dims() != scales || !same_dtype {
            bail!(
                "state: its sums have shape {:?} and dtype {:?}, its scales {:?} and {:?}, but this input needs \
                 {sums:?} = (batch x key heads, features, value dim + 1), {scales:?} and {dtype:?}; a state belongs \
                 to one layer and one batch",
                self.sums.dims(),
                self.sums.dtype(),
                self.log_scale.dims(),
                self.log_scale.dtype(),
            );
        }
        Ok(())
    }
}

impl Memory for TensorSums {
    fn kind() -> &'static str {
        "prefix sums of composed operations"
    }

    fn bytes(&self) -> usize {
        bytes_of(&self.sums.log_scale) + bytes_of(&self.sums.sums)
    }

    fn duplicate(&self) -> Box<dyn Memory> {
        // Tensors that nothing writes to may be shared.
        Box::new(self.clone())
    }

    fn save(&self) -> Result<StateRecord> {
        let by_batch = |t: &Tensor| {
            let (n, rows, width) = t.dims3()?;
            t.reshape((self.batch, n / self.batch.max(1), rows, width))
        };
        let PrefixSums { log_scale, sums } = &self.sums;
        let record = StateRecord::new().with_tensor("log_scale", by_batch(log_scale)?);
        Ok(record.with_tensor("sums", by_batch(sums)?))
    }

    fn load(record: &StateRecord) -> Result<Self> {
        let (log_scale, sums) = (record.tensor("log_scale")?, record.tensor("sums")?);
        let (batch, ..) = sums.dims4()?;
        let sums = PrefixSums { log_scale: log_scale.flatten(0, 1)?, sums: sums.flatten(0, 1)? };
        Ok(Self { batch, sums })
    }
}

//! One sequence over several ranks: the group of ranks that share it, as the model sees them.

use std::sync::Arc;

use candle_core::{Error, Result, Tensor};
use performer_core::attention::Neighbours;
use performer_dist::Ranks;
use safetensors::View;

/// `SharedSequence` is a group of ranks that share each sequence, as a model's layers see it: rank
/// `r` of `n` holds the `r`-th part of the tokens. Tensors travel from card to card where the ranks
/// are connected so, else as their bytes, through the memory of the processor.
#[derive(Debug)]
pub struct SharedSequence(Arc<dyn Ranks>);

impl SharedSequence {
    /// Takes the ranks of one sequence, [`Grid::sequence`](super::Grid::sequence).
    pub fn new(ranks: Arc<dyn Ranks>) -> Self {
        Self(ranks)
    }
}

impl Neighbours for SharedSequence {
    fn index(&self) -> usize {
        self.0.rank()
    }

    fn count(&self) -> usize {
        self.0.size()
    }

    fn exchange(&self, x: &Tensor, to: Option<usize>, from: Option<usize>) -> Result<Option<Tensor>> {
        let x = x.contiguous()?;
        #[cfg(feature = "nccl")]
        if let (Some(cards), true) = (self.0.cards(), x.device().is_cuda()) {
            return super::cards::exchange(cards, &x, to, from);
        }
        let bytes = match to {
            Some(_) => x.data(),
            None => Default::default(),
        };
        let mut received = vec![0; if from.is_some() { x.elem_count() * x.dtype().size_in_bytes() } else { 0 }];
        let receive = from.map(|from| (from, &mut received[..]));
        self.0.exchange(to.map(|to| (to, &bytes[..])), receive).map_err(Error::wrap)?;
        match from {
            Some(_) => Tensor::from_raw_buffer(&received, x.dtype(), x.dims(), x.device()).map(Some),
            None => Ok(None),
        }
    }
}

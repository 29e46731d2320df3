//! Cross-entropy of logits and of a language model's head, and distillation.

use candle_core::{D, DType, Device, Result, Shape, Tensor, bail};

use super::{contiguous, index_select, is_fused_on_cpu, reshape, scale, sum_all};
use crate::kernels::{compute_dtype, matmul};
use crate::kernels::{
    cross_entropy::{CrossEntropy, Teacher},
    operation::apply,
    tiled_cross_entropy,
};

/// Targets are the class of every position, some of which may be left out of the loss.
///
/// Losses of [`cross_entropy`] and [`linear_cross_entropy`] have the shape of the targets; where a
/// position is left out, its loss is 0 and no gradient comes from it. [`Self::mean`] is the mean
/// over the others, as PyTorch's `cross_entropy` takes it.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// use performer_core::ops::{self, Targets};
///
/// # fn main() -> candle_core::Result<()> {
/// // Two sequences, the second of which is shorter.
/// let labels = Tensor::new(&[[3i64, 0, 1], [2, -100, -100]], &Device::Cpu)?;
/// let targets = Targets::new(&labels, Some(-100))?;
/// let logits = Tensor::zeros((2, 3, 5), candle_core::DType::F32, &Device::Cpu)?;
///
/// let losses = ops::cross_entropy(&logits, &targets)?;
/// let one = 5f32.ln();
/// assert_eq!(losses.to_vec2::<f32>()?, [[one, one, one], [one, 0.0, 0.0]]);
/// assert_eq!(targets.counted(), 4);
/// assert!((targets.mean(&losses)?.to_scalar::<f32>()? - one).abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Targets {
    shape: Shape,
    /// Classes of the positions that count.
    ids: Vec<u32>,
    /// Which positions those are, in order, unless all do.
    places: Option<Vec<u32>>,
}

impl Targets {
    /// Reads the classes in `ids`, u32 or i64 of any shape, usually `(N)` or `(B, T)`. Positions
    /// that hold `ignore_index` are left out; −100 is PyTorch's choice.
    ///
    /// Classes of a GPU's tensor are copied to the host, which waits for the GPU.
    ///
    /// # Errors
    /// If `ids` has another type, or a class that is not left out is negative.
    pub fn new(ids: &Tensor, ignore_index: Option<i64>) -> Result<Self> {
        if !matches!(ids.dtype(), DType::U32 | DType::I64) {
            bail!("targets have type {:?}; they must be u32 or i64, the numbers of classes", ids.dtype());
        }
        let numbers = ids.to_device(&Device::Cpu)?.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
        let (mut kept, mut places) = (Vec::with_capacity(numbers.len()), Vec::with_capacity(numbers.len()));
        for (place, &number) in numbers.iter().enumerate() {
            if Some(number) == ignore_index {
                continue;
            }
            let Ok(id) = u32::try_from(number) else {
                bail!(
                    "target {number} at {:?} is no class; if such positions shall be left out, give ignore_index = Some({number})",
                    index(ids.dims(), place)
                );
            };
            kept.push(id);
            places.push(place as u32);
        }
        let places = (kept.len() < numbers.len()).then_some(places);
        Ok(Self { shape: ids.shape().clone(), ids: kept, places })
    }

    /// The number of positions that count.
    pub fn counted(&self) -> usize {
        self.ids.len()
    }

    /// The mean of `losses`, of the shape of the targets, over the positions that count: a scalar.
    ///
    /// # Errors
    /// If `losses` has another shape, or no position counts.
    pub fn mean(&self, losses: &Tensor) -> Result<Tensor> {
        if losses.dims() != self.shape.dims() {
            bail!(
                "mean loss: losses have shape {:?} and targets {:?}; both must have one shape",
                losses.dims(),
                self.shape.dims()
            );
        }
        if self.ids.is_empty() {
            bail!(
                "mean loss: none of the targets of shape {:?} counts; skip such a batch, or take the sum of its losses, 0",
                self.shape.dims()
            );
        }
        scale(&sum_all(losses)?, 1.0 / self.ids.len() as f64)
    }

    /// Refuses rows `(.., E)` that are not one for each target, and targets beyond the vocabulary.
    fn check(&self, rows: &Tensor, what: &str, vocabulary: usize) -> Result<()> {
        if rows.rank() == 0 || rows.dims()[..rows.rank() - 1] != *self.shape.dims() {
            bail!(
                "cross-entropy of {what} {:?} with targets {:?}; it needs one each: (N, ..) and (N), or (B, T, ..) and (B, T)",
                rows.dims(),
                self.shape.dims()
            );
        }
        if let Some(i) = self.ids.iter().position(|&id| id as usize >= vocabulary) {
            let place = self.places.as_ref().map_or(i, |places| places[i] as usize);
            let at = index(self.shape.dims(), place);
            bail!("target {} at {at:?} lies beyond the vocabulary of {vocabulary}", self.ids[i]);
        }
        Ok(())
    }

    /// Losses `losses(rows (N, E), ids) → (N)` of the positions that count, and 0 elsewhere, in the
    /// shape of the targets.
    fn losses(&self, rows: &Tensor, losses: impl FnOnce(&Tensor, &[u32]) -> Result<Tensor>) -> Result<Tensor> {
        let count = self.shape.elem_count();
        // A reshape is a node of the graph, whose gradient Candle adds to zeros: none where it does
        // nothing.
        let rows = if rows.rank() == 2 { rows.clone() } else { reshape(rows, (count, rows.dim(D::Minus1)?))? };
        let all = match &self.places {
            _ if self.ids.is_empty() => Tensor::zeros(count, compute_dtype(rows.dtype()), rows.device())?,
            None => losses(&rows, &self.ids)?,
            Some(places) => {
                let places = Tensor::from_slice(places, places.len(), rows.device())?;
                let some = losses(&index_select(&rows, &places)?, &self.ids)?;
                Tensor::zeros(count, some.dtype(), some.device())?.index_add(&places, &some, 0)?
            }
        };
        if self.shape.rank() == 1 { Ok(all) } else { reshape(&all, &self.shape) }
    }
}

impl From<&[u32]> for Targets {
    /// `N` classes, all of which count.
    fn from(ids: &[u32]) -> Self {
        Self { shape: ids.len().into(), ids: ids.to_vec(), places: None }
    }
}

/// The index of the `place`-th entry of a tensor in row-major order.
fn index(dims: &[usize], place: usize) -> Vec<usize> {
    let mut rest = place;
    let mut index: Vec<usize> = dims
        .iter()
        .rev()
        .map(|&dim| {
            let i = rest % dim;
            rest /= dim;
            i
        })
        .collect();
    index.reverse();
    index
}

/// Cross-entropy is `−log softmax(logits)[target]` at each position, in nats.
///
/// `logits` are `(N, V)` or `(B, T, V)`, of f16, bf16, f32 or f64, for [`Targets`] `(N)` or
/// `(B, T)`. The losses have the shape of the targets and are f32, or f64 where the logits are.
/// Where the logits come from a head, [`linear_cross_entropy`] does without holding them all.
///
/// # Errors
/// If the shapes do not fit, or a target lies beyond the `V` classes.
pub fn cross_entropy(logits: &Tensor, targets: &Targets) -> Result<Tensor> {
    targets.check(logits, "logits", logits.dims().last().copied().unwrap_or(0))?;
    targets.losses(logits, |logits, ids| {
        let logits = logits.to_dtype(compute_dtype(logits.dtype()))?;
        let ids = Tensor::from_slice(ids, (ids.len(), 1), logits.device())?;
        candle_nn::ops::log_softmax(&logits, D::Minus1)?.gather(&ids, D::Minus1)?.squeeze(1)?.neg()
    })
}

/// Cross-entropy of a linear head is `−log softmax(W x)[target]` at each position, in nats, without
/// all of its logits.
///
/// Hidden states `x` are `(N, E)` or `(B, T, E)`, a language model's head `weight` is `(V, E)`, and
/// [`Targets`] are `(N)` or `(B, T)`. The losses have the shape of the targets and are f32, or f64
/// where `x` is. The logits are made in tiles; on the CPU in f32 up to 128 MiB of their
/// exponentials are kept for the backward pass, and beyond that none, but several threads then have
/// gradients of some logits in memory together: 32 MiB, or more for more than 128 threads.
/// Positions that are left out cost nothing.
///
/// # Errors
/// If the shapes do not fit, or a target lies beyond the vocabulary.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use performer_core::ops::{self, Targets};
///
/// # fn main() -> candle_core::Result<()> {
/// let states = Var::from_tensor(&Tensor::randn(0f32, 1.0, (2, 3, 8), &Device::Cpu)?)?;
/// let head = Var::from_tensor(&Tensor::randn(0f32, 1.0, (50, 8), &Device::Cpu)?)?;
/// let labels = Tensor::new(&[[7u32, 0, 49], [12, 0, 0]], &Device::Cpu)?;
///
/// // Class 0 is padding.
/// let targets = Targets::new(&labels, Some(0))?;
/// let loss = targets.mean(&ops::linear_cross_entropy(&states, &head, &targets)?)?;
/// let gradient = loss.backward()?.get(&states).unwrap().clone();
/// assert_eq!(gradient.get(1)?.get(2)?.to_vec1::<f32>()?, [0.0; 8]);
/// # Ok(())
/// # }
/// ```
pub fn linear_cross_entropy(x: &Tensor, weight: &Tensor, targets: &Targets) -> Result<Tensor> {
    targets.check(x, "hidden states", weight.dims2()?.0)?;
    check_width(x, weight)?;
    targets.losses(x, |x, ids| {
        if is_fused_on_cpu(x) && weight.dtype() == DType::F32 {
            let operation = CrossEntropy::new(x, weight, ids, None);
            return apply(operation, [&contiguous(x)?, &contiguous(weight)?]);
        }
        tiled_cross_entropy::cross_entropy(x, weight, Tensor::from_slice(ids, ids.len(), x.device())?)
    })
}

/// Distillation is cross-entropy against a mixture of each target and what a teacher predicts
/// (Hinton et al. 2015, <https://arxiv.org/abs/1503.02531>): the mean of `−log softmax(W x)` under
/// this mixture, in nats.
///
/// The distribution `softmax(W' x')` of the teacher has `share` of the mixture and gets no
/// gradient. Hidden states `x` are `(N, E)` and a head `weight` `(V, E)`, the teacher's `(N, E')`
/// and `(V, E')`; `N` targets → `(N)`. On the CPU in f32 all logits are made in tiles.
///
/// # Errors
/// If there are not `N` targets, a target lies beyond the vocabulary, the teacher has other rows or
/// another vocabulary, or `share` is no number of `0..=1`.
pub fn linear_distillation(
    x: &Tensor,
    weight: &Tensor,
    targets: &[u32],
    teacher: (&Tensor, &Tensor),
    share: f64,
) -> Result<Tensor> {
    if !(0.0..=1.0).contains(&share) {
        bail!("distillation: the teacher's share of the mixture is {share}; it must be from 0 to 1");
    }
    let all = Targets::from(targets);
    let (states, head) = (teacher.0.detach(), teacher.1.detach());
    for (x, weight) in [(x, weight), (&states, &head)] {
        all.check(x, "hidden states", weight.dims2()?.0)?;
        check_width(x, weight)?;
    }
    if head.dim(0)? != weight.dim(0)? {
        bail!("distillation: the teacher has a vocabulary of {}, the student one of {}", head.dim(0)?, weight.dim(0)?);
    }
    if [x, weight, &states, &head].iter().all(|t| is_fused_on_cpu(t)) {
        let teacher = Teacher { states: states.contiguous()?, head: head.contiguous()?, share: share as f32 };
        let operation = CrossEntropy::new(x, weight, targets, Some(teacher));
        return apply(operation, [&contiguous(x)?, &contiguous(weight)?]);
    }
    let logits = |x: &Tensor, w: &Tensor| -> Result<Tensor> {
        let logits = matmul(x, &w.to_dtype(x.dtype())?.t()?)?;
        if logits.dtype() == DType::F64 { Ok(logits) } else { logits.to_dtype(DType::F32) }
    };
    let logs = candle_nn::ops::log_softmax(&logits(x, weight)?, D::Minus1)?;
    let soft = candle_nn::ops::softmax(&logits(&states, &head)?, D::Minus1)?.to_dtype(logs.dtype())?;
    let targets = Tensor::from_slice(targets, (targets.len(), 1), x.device())?;
    let hard = logs.gather(&targets, D::Minus1)?.squeeze(1)?;
    (hard * (share - 1.0))? - ((soft * logs)?.sum(D::Minus1)? * share)?
}

/// Refuses hidden states of another width than the head's.
fn check_width(x: &Tensor, weight: &Tensor) -> Result<()> {
    if x.dims().last() != weight.dims().last() {
        bail!(
            "cross-entropy: hidden states have shape {:?} and the head {:?}; their last dimensions must be equal",
            x.dims(),
            weight.dims()
        );
    }
    Ok(())
}

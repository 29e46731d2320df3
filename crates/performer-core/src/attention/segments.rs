//! One sequence over several processes: what a segment is told of those before it.
//!
//! Each process holds some neighbouring tokens of a sequence, a segment, and computes its outputs
//! and gradients. Attention needs something of the tokens before, and sends back the gradients of
//! what it got. Candle's autograd knows one process, so an exchange is an operation whose backward
//! pass is an exchange the other way round.
//!
//! Whoever takes part in an exchange waits for the others, so all processes must come to their
//! exchanges in one order, in the backward pass too, and no process may leave one out because its
//! own loss happens not to depend on it. A [`Segment`] sees to that: each exchange is made to
//! depend on the one before it, and [`Segment::close`] makes the loss depend on the last one. The
//! backward pass then comes to all of them, from the last to the first, whatever else the graph is.

use std::{
    fmt,
    ops::RangeInclusive,
    sync::{Arc, Mutex, PoisonError},
};

use candle_core::{
    CpuStorage, CudaStorage, MetalStorage, Result, Shape, Tensor,
    backend::{BackendDevice, BackendStorage},
    bail,
};

use crate::{
    kernels::{
        copy,
        operation::{Operation, Stored, apply},
    },
    ops,
};

/// What carries tensors between the processes that hold the segments of a sequence, such as MPI.
///
/// # Example
/// Segments that are threads of one process; see [`Segment`] for what they do.
/// ```
/// use std::sync::{Arc, Mutex, mpsc};
///
/// use candle_core::{Result, Tensor};
/// use performer_core::attention::Neighbours;
///
/// type Sending = Vec<mpsc::Sender<Tensor>>;
/// type Receiving = Vec<Mutex<mpsc::Receiver<Tensor>>>;
///
/// /// Holds a channel to and from each of the others.
/// #[derive(Debug)]
/// struct Thread { index: usize, to: Sending, from: Receiving }
///
/// impl Neighbours for Thread {
///     fn index(&self) -> usize { self.index }
///     fn count(&self) -> usize { self.to.len() }
///     fn exchange(&self, x: &Tensor, to: Option<usize>, from: Option<usize>) -> Result<Option<Tensor>> {
///         if let Some(to) = to {
///             self.to[to].send(x.clone()).map_err(candle_core::Error::wrap)?;
///         }
///         let Some(from) = from else { return Ok(None) };
///         let received = self.from[from].lock().expect("one thread uses it").recv();
///         received.map(Some).map_err(candle_core::Error::wrap)
///     }
/// }
///
/// fn threads(count: usize) -> Vec<Arc<Thread>> {
///     let empty = |index| Thread { index, to: vec![], from: vec![] };
///     let mut threads: Vec<Thread> = (0..count).map(empty).collect();
///     for from in 0..count {
///         for to in 0..count {
///             let (sender, receiver) = mpsc::channel();
///             threads[from].to.push(sender);
///             threads[to].from.push(Mutex::new(receiver));
///         }
///     }
///     threads.into_iter().map(Arc::new).collect()
/// }
///
/// let two = threads(2);
/// assert_eq!((two[1].index(), two[1].count()), (1, 2));
/// ```
pub trait Neighbours: fmt::Debug + Send + Sync {
    /// The number of this segment, from 0 in the order of the tokens.
    fn index(&self) -> usize;

    /// The number of segments.
    fn count(&self) -> usize;

    /// Sends `x` to segment `to` and receives from segment `from` a tensor of the shape, type and
    /// device of `x`; either may be left out. Every send has its counterpart: segment `to` makes a
    /// call that receives from this one. Messages between two segments arrive in the order in which
    /// they were sent. `x` may have any strides, and has no gradient. The result is `None` if
    /// `from` is.
    ///
    /// # Errors
    /// If the other segment does not take part.
    fn exchange(&self, x: &Tensor, to: Option<usize>, from: Option<usize>) -> Result<Option<Tensor>>;
}

/// A segment of a sequence in one forward pass, and the way to what lies before it.
///
/// All segments of a sequence have the same number of tokens, and compute the same model. Layers
/// take a segment in [`MultiHeadAttention::forward_segment`](crate::MultiHeadAttention), attentions
/// in [`Attention::forward_segment`](crate::Attention::forward_segment). Nothing of a later segment
/// comes to an earlier one but gradients.
///
/// A loss that is to be differentiated is [closed](Self::close) first, and the backward pass runs
/// on the thread of the forward pass, or on another one, but on all segments at the same time. (On
/// CUDA it is the same thread, since Candle has a queue for each, and these do not wait for each
/// other.)
///
/// # Example
/// Half a sequence on each of two threads, whose losses add up to that of the whole. `threads` is
/// that of [`Neighbours`].
/// ```
/// # use std::sync::{Mutex, mpsc};
/// # use performer_core::attention::Neighbours;
/// # type Sending = Vec<mpsc::Sender<Tensor>>;
/// # type Receiving = Vec<Mutex<mpsc::Receiver<Tensor>>>;
/// # #[derive(Debug)]
/// # struct Thread { index: usize, to: Sending, from: Receiving }
/// # impl Neighbours for Thread {
/// #     fn index(&self) -> usize { self.index }
/// #     fn count(&self) -> usize { self.to.len() }
/// #     fn exchange(&self, x: &Tensor, to: Option<usize>, from: Option<usize>) -> Result<Option<Tensor>> {
/// #         if let Some(to) = to {
/// #             self.to[to].send(x.clone()).map_err(candle_core::Error::wrap)?;
/// #         }
/// #         let Some(from) = from else { return Ok(None) };
/// #         let received = self.from[from].lock().expect("one thread uses it").recv();
/// #         received.map(Some).map_err(candle_core::Error::wrap)
/// #     }
/// # }
/// # fn threads(count: usize) -> Vec<Arc<Thread>> {
/// #     let empty = |index| Thread { index, to: vec![], from: vec![] };
/// #     let mut threads: Vec<Thread> = (0..count).map(empty).collect();
/// #     for from in 0..count {
/// #         for to in 0..count {
/// #             let (sender, receiver) = mpsc::channel();
/// #             threads[from].to.push(sender);
/// #             threads[to].from.push(Mutex::new(receiver));
/// #         }
/// #     }
/// #     threads.into_iter().map(Arc::new).collect()
/// # }
/// use std::sync::Arc;
///
/// use candle_core::{DType, Device, Result, Tensor, Var};
/// use performer_core::{Attention, Favor, FavorConfig, Inputs, Mask, attention::Segment};
///
/// # fn main() -> Result<()> {
/// let favor = Favor::new(&FavorConfig::default(), 16, 42, DType::F32, &Device::Cpu)?;
/// let x = Tensor::randn(0f32, 1.0, (1, 4, 100, 16), &Device::Cpu)?;
/// let whole = favor.forward(Inputs::new(&x, &x, &x), &Mask::causal())?.sqr()?.sum_all()?;
///
/// let half = |thread: Arc<Thread>| -> Result<f32> {
///     let x = Var::from_tensor(&x.narrow(2, 50 * thread.index(), 50)?)?;
///     let segment = Segment::new(thread);
///     let out = favor.forward_segment(Inputs::new(&x, &x, &x), &segment)?;
///     let loss = segment.close(&out.sqr()?.sum_all()?)?;
///     // The first half gets gradients of both losses.
///     assert!(loss.backward()?.get(&x).is_some());
///     loss.to_scalar()
/// };
/// let losses = std::thread::scope(|scope| {
///     let halves: Vec<_> = threads(2).into_iter().map(|thread| scope.spawn(|| half(thread))).collect();
///     halves.into_iter().map(|half| half.join().expect("no panic")).sum::<Result<f32>>()
/// })?;
/// assert!((losses / whole.to_scalar::<f32>()? - 1.0).abs() < 1e-5);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Segment {
    neighbours: Arc<dyn Neighbours>,
    /// What the last exchange returned.
    last: Mutex<Option<Tensor>>,
}

impl Segment {
    /// The segment that this process holds, for one forward pass.
    pub fn new(neighbours: Arc<dyn Neighbours>) -> Self {
        Self { neighbours, last: Mutex::default() }
    }

    /// A whole sequence, as the one segment of it.
    pub fn alone() -> Self {
        Self::new(Arc::new(Alone))
    }

    /// The number of this segment, from 0 in the order of the tokens.
    pub fn index(&self) -> usize {
        self.neighbours.index()
    }

    /// The number of segments.
    pub fn count(&self) -> usize {
        self.neighbours.count()
    }

    /// Returns what up to `reach` segments directly before this one have in the place of `x`, the
    /// earliest first: fewer near the beginning, none in the first segment. Gradients go back to
    /// where the tensors came from. All segments call it in the same places, with tensors of one
    /// shape and type, the first and the last included.
    ///
    /// A segment sends `x` to each of the `reach` segments after it, as far as there are so many.
    ///
    /// # Errors
    /// If a segment does not take part.
    pub fn earlier(&self, x: &Tensor, reach: usize) -> Result<Vec<Tensor>> {
        let reach = reach.min(self.count().saturating_sub(1));
        if reach == 0 {
            return Ok(Vec::new());
        }
        self.at(x, 1..=reach)
    }

    /// Merges what all segments before this one have in the place of `x`, in their order:
    /// `x₀ ⊕ x₁ ⊕ … ⊕ x_{r−1}` in segment `r`, `None` in the first. `merge(before, after)` computes
    /// `⊕`, which is associative up to rounding and keeps shape and type; it need not commute.
    /// Gradients go back to where the tensors came from. All segments call it in the same places,
    /// with tensors of one shape and type, the first and the last included.
    ///
    /// In round `k`, from 0, a segment sends what it has merged so far to the one `2^k` places on
    /// (Hillis and Steele 1986), so with `N` segments each sends at most `⌈log₂ N⌉` times the size
    /// of `x`. How terms are grouped depends on this segment's [`Self::index`] alone, so the
    /// rounding of the result is the same in every run.
    ///
    /// # Errors
    /// If a segment does not take part, and those of `merge`.
    pub fn merged_before(
        &self,
        x: &Tensor,
        merge: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Option<Tensor>> {
        let (mut own, mut before) = (x.clone(), None);
        let mut reach = 1;
        while reach < self.count() {
            if let Some(received) = self.at(&own, reach..=reach)?.pop() {
                if self.index() + 2 * reach < self.count() {
                    own = merge(&received, &own)?;
                }
                before = Some(match before {
                    None => received,
                    Some(before) => merge(&received, &before)?,
                });
            }
            reach *= 2;
        }
        Ok(before)
    }

    /// Returns what the segments at these distances before this one have in the place of `x`, the
    /// earliest first.
    fn at(&self, x: &Tensor, distances: RangeInclusive<usize>) -> Result<Vec<Tensor>> {
        let (index, count) = (self.index(), self.count());
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let x = match &*last {
            Some(last) => after(x, last)?,
            None => x.clone(),
        };
        let own = x.detach();
        let mut received = Vec::new();
        for distance in distances.clone() {
            let (to, from) = (index + distance, index.checked_sub(distance));
            received.extend(self.neighbours.exchange(&own, (to < count).then_some(to), from)?);
        }
        received.reverse();
        let present = received.len();
        if present == 0 {
            received.push(own.zeros_like()?);
        }
        let received = Tensor::stack(&received, 0)?.detach();
        let gathered = apply(Gathered { neighbours: Arc::clone(&self.neighbours), distances }, [&x, &received])?;
        *last = Some(gathered.clone());
        (0..present).map(|i| ops::reshape(&ops::narrow(&gathered, 0, i, 1)?, x.shape())).collect()
    }

    /// Returns the last `count` tokens before this segment, along dimension `dim` of `x`, whose
    /// tokens follow them: fewer near the beginning, `None` in the first segment or where `count`
    /// is 0. Where a segment has fewer tokens than that, whole segments are sent. Gradients go
    /// back to where the tokens came from. All segments call it in the same places, with tensors of
    /// one shape and type.
    ///
    /// # Errors
    /// If a segment does not take part, or `x` has no tokens.
    pub fn tokens_before(&self, x: &Tensor, dim: usize, count: usize) -> Result<Option<Tensor>> {
        let tokens = x.dim(dim)?;
        if tokens == 0 {
            bail!("segments: x has shape {:?}; a segment has at least one token", x.dims());
        }
        let own = count.min(tokens);
        let x = ops::narrow(x, dim, tokens - own, own)?;
        let earlier = self.earlier(&x, count.div_ceil(tokens))?;
        if earlier.is_empty() {
            return Ok(None);
        }
        let earlier = ops::cat(&earlier.iter().collect::<Vec<_>>(), dim)?;
        let all = earlier.dim(dim)?;
        ops::narrow(&earlier, dim, all.saturating_sub(count), count.min(all)).map(Some)
    }

    /// Returns a loss of this segment with which the backward pass comes to every exchange of the
    /// forward pass, in the same order on all segments. Whatever is computed of the loss afterwards
    /// is differentiated as well. Without exchanges it is the loss itself.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn close(&self, loss: &Tensor) -> Result<Tensor> {
        match &*self.last.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(last) => after(loss, last),
            None => Ok(loss.clone()),
        }
    }
}

/// Nobody before, and nobody after.
#[derive(Debug)]
struct Alone;

impl Neighbours for Alone {
    fn index(&self) -> usize {
        0
    }

    fn count(&self) -> usize {
        1
    }

    fn exchange(&self, _: &Tensor, to: Option<usize>, from: Option<usize>) -> Result<Option<Tensor>> {
        match to.or(from) {
            None => Ok(None),
            Some(other) => bail!("segments: there is no segment {other}: this is the only one"),
        }
    }
}

/// Returns a copy of `x` that depends on `earlier` too, so that the backward pass comes to
/// `earlier` after it has come to the copy.
fn after(x: &Tensor, earlier: &Tensor) -> Result<Tensor> {
    apply(After, [x, earlier])
}

/// The first of two tensors; the second gets a gradient of zeros.
struct After;

impl Operation<2> for After {
    fn name(&self) -> &'static str {
        "after"
    }

    fn cpu(&self, [x, _]: [Stored<'_, CpuStorage>; 2]) -> Result<(CpuStorage, Shape)> {
        copied(x)
    }

    fn cuda(&self, [x, _]: [Stored<'_, CudaStorage>; 2]) -> Result<(CudaStorage, Shape)> {
        copied(x)
    }

    fn metal(&self, [x, _]: [Stored<'_, MetalStorage>; 2]) -> Result<(MetalStorage, Shape)> {
        copied(x)
    }

    fn backward(&self, [_, earlier]: [&Tensor; 2], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 2]> {
        Ok([Some(grad.copy()?), Some(earlier.zeros_like()?)])
    }
}

/// `Gathered` returns the second of two tensors: what earlier segments sent in exchange for the
/// first, which was sent to later segments. Its backward pass sends the gradient of what was
/// received back to the earlier segments. The gradient of the first tensor is the sum of what the
/// later segments send back.
struct Gathered {
    neighbours: Arc<dyn Neighbours>,
    distances: RangeInclusive<usize>,
}

impl Operation<2> for Gathered {
    fn name(&self) -> &'static str {
        "segments"
    }

    fn cpu(&self, [_, received]: [Stored<'_, CpuStorage>; 2]) -> Result<(CpuStorage, Shape)> {
        copied(received)
    }

    fn cuda(&self, [_, received]: [Stored<'_, CudaStorage>; 2]) -> Result<(CudaStorage, Shape)> {
        copied(received)
    }

    fn metal(&self, [_, received]: [Stored<'_, MetalStorage>; 2]) -> Result<(MetalStorage, Shape)> {
        copied(received)
    }

    fn backward(&self, [x, _]: [&Tensor; 2], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let (index, count) = (self.neighbours.index(), self.neighbours.count());
        let mut sum = None::<Tensor>;
        for distance in self.distances.clone() {
            // The first of what was received came from the earliest segment.
            let to = index.checked_sub(distance);
            let place = to.map_or(0, |_| index.min(*self.distances.end()) - distance);
            let own = grad.narrow(0, place, 1)?.reshape(x.shape())?.detach();
            let from = index + distance;
            let received = self.neighbours.exchange(&own, to, (from < count).then_some(from))?;
            sum = match (sum, received) {
                (Some(sum), Some(received)) => Some((sum + received)?),
                (sum, received) => sum.or(received),
            };
        }
        // If no segment received `x`, its gradient is zero. It is returned nevertheless, since the
        // backward pass must come to the exchanges that `x` may have been computed from.
        let sum = sum.map_or_else(|| x.zeros_like(), |sum| sum.force_contiguous())?;
        Ok([Some(sum.detach()), None])
    }
}

/// The numbers of a tensor in order, and its shape.
fn copied<S>((storage, layout): Stored<'_, S>) -> Result<(S, Shape)>
where
    S: BackendStorage,
    S::Device: BackendDevice<Storage = S>,
{
    Ok((copy(storage, layout)?, layout.shape().clone()))
}

//! A backward pass that moves gradients where Candle's adds them to zeros.
//!
//! [`Tensor::backward`] allocates zeros for the gradient of every tensor of a graph and adds the
//! first contribution to them. On an H100 this is 30% of a training step, since the additions read
//! and write every gradient once more; on a CPU it also decides how much memory a step takes at
//! most. Candle has no way to leave the additions out, so the crate's operations can record what
//! they did a second time, on a [`Tape`], and the tape's backward pass keeps the first contribution
//! as it is.
//!
//! The order of all other additions is Candle's, so gradients have the same bits (only a −0 that
//! Candle turns into +0 stays −0).

use std::{cell::RefCell, collections::HashMap, marker::PhantomData};

use candle_core::{Result, Tensor, TensorId, backprop::GradStore, bail};

use crate::kernels::addition;

/// Computes the gradients of an operation's inputs from the gradient of its output; `None` for an
/// input that gets none.
type Backward = Box<dyn Fn(&Tensor) -> Result<Vec<Option<Tensor>>>>;

/// Returns the gradient of an operation's one input with the operation's contribution added: the
/// contribution alone where there is no gradient yet.
type AddTo = Box<dyn Fn(Option<Tensor>, &Tensor) -> Result<Tensor>>;

/// A `Record` is what the tape knows of one tensor: the inputs of the operation that made it, and
/// that operation's backward pass.
struct Record {
    inputs: Vec<Tensor>,
    backward: Pass,
}

/// A `Pass` is the backward pass of one operation.
enum Pass {
    /// It returns memory that nothing else holds.
    Fresh(Backward),
    /// It may return the gradient that it was given, or views of it.
    View(Backward),
    /// It adds to the gradient itself, number by number.
    AddTo(AddTo),
}

/// What a tape knows of the tensors that were made while it recorded.
type Records = HashMap<TensorId, Record>;

thread_local! {
    /// The records of each tape of this thread, with its number, in the order in which they were
    /// started. The last one records.
    static TAPES: RefCell<Vec<(u64, Records)>> = const { RefCell::new(Vec::new()) };
}

/// A `Tape` records the operations of this crate on the thread that started it, until it is
/// dropped.
///
/// The forward pass stays as it is. Where all of it is made of operations of this crate,
/// [`ops`](crate::ops) with its views and sums included, [`Tape::backward`] is Candle's without the
/// additions to zeros; any other operation in between makes it Candle's own. So does an operation
/// of this crate where that composes Candle's operations: composed attention (see
/// [`Path`](crate::Path)), feature maps whose features no kernel computes, such as
/// [`Elu`](crate::features::Elu), forget gates of a layer in f64 or on Metal,
/// [`softmax`](crate::ops::softmax), [`cross_entropy`](crate::ops::cross_entropy),
/// [`linear_cross_entropy`](crate::ops::linear_cross_entropy) where positions are left out,
/// [`linear_distillation`](crate::ops::linear_distillation) where not all tensors are f32 on the
/// CPU, and norms, activations and rotary positions of types that are not fused.
///
/// A tape keeps the inputs and outputs of all operations, as Candle's graph does: drop it after the
/// backward pass.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use performer_core::{Tape, ops};
///
/// # fn main() -> candle_core::Result<()> {
/// let x = Var::ones((2, 3), DType::F32, &Device::Cpu)?;
/// let w = Var::ones((4, 3), DType::F32, &Device::Cpu)?;
/// let tape = Tape::start();
/// let loss = ops::linear(&x, &w, None)?;
/// assert_eq!(tape.unrecorded(&loss), 0);
/// let gradients = tape.backward(&loss)?;
/// assert_eq!(gradients.get(&w).unwrap().to_vec2::<f32>()?, vec![vec![2.0; 3]; 4]);
/// # Ok(())
/// # }
/// ```
pub struct Tape {
    /// Its number among the tapes of its thread.
    number: u64,
    /// A tape belongs to its thread.
    thread: PhantomData<*const ()>,
}

impl Tape {
    /// Starts a tape on this thread. A tape that is already there records nothing until this one
    /// is dropped. They may be dropped in any order.
    pub fn start() -> Self {
        let number = TAPES.with_borrow_mut(|tapes| {
            let number = tapes.last().map_or(0, |(last, _)| last + 1);
            tapes.push((number, HashMap::new()));
            number
        });
        Self { number, thread: PhantomData }
    }

    /// Does something with the records of this tape.
    fn with_records<R>(&self, with: impl FnOnce(&mut Records) -> R) -> R {
        TAPES.with_borrow_mut(|tapes| {
            let own = tapes.iter_mut().find(|(number, _)| *number == self.number);
            // They are there until the tape is dropped.
            with(own.map_or(&mut HashMap::new(), |(_, records)| records))
        })
    }

    /// Counts the tensors between `loss` and its variables that no operation of this crate recorded
    /// here. What lies below one of them is not looked at, so the number says where the tape ends,
    /// not how many operations are missing. Unless it is 0, [`Self::backward`] is
    /// [`Tensor::backward`].
    pub fn unrecorded(&self, loss: &Tensor) -> usize {
        self.with_records(|records| Order::of(loss, records).unrecorded)
    }

    /// Computes the gradients of all variables that `loss` depends on, as [`Tensor::backward`]
    /// does. The tape is empty afterwards.
    ///
    /// # Errors
    /// Those of the operations' backward passes.
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        self.pass(loss, None)
    }

    /// Computes the gradients of all variables that `out` depends on, as [`Self::backward`] does of
    /// a loss whose derivative by `out` is `gradient`, of the shape and type of `out`. The loss
    /// itself is not needed. The tape is empty afterwards.
    ///
    /// # Errors
    /// If the gradient has another shape or type than `out`, and those of the operations' backward
    /// passes.
    pub fn backward_from(&self, out: &Tensor, gradient: &Tensor) -> Result<GradStore> {
        if out.dims() != gradient.dims() || out.dtype() != gradient.dtype() {
            bail!(
                "tape: the gradient is {:?} {:?}, but the tensor that it belongs to is {:?} {:?}",
                gradient.dtype(),
                gradient.dims(),
                out.dtype(),
                out.dims()
            );
        }
        self.pass(out, Some(gradient))
    }

    /// The backward pass from `loss`, whose own gradient is ones if none is given.
    fn pass(&self, loss: &Tensor, gradient: Option<&Tensor>) -> Result<GradStore> {
        let mut records = self.with_records(std::mem::take);
        let Order { nodes, unrecorded, .. } = Order::of(loss, &records);
        if unrecorded > 0 {
            return match gradient {
                None => loss.backward(),
                Some(gradient) => (loss * gradient.detach())?.sum_all()?.backward(),
            };
        }
        let position: HashMap<TensorId, usize> = nodes.iter().enumerate().map(|(i, node)| (node.id(), i)).collect();
        let mut gradients: Vec<Option<Tensor>> = vec![None; nodes.len()];
        let mut store = GradStore::default();
        if nodes.is_empty() {
            return Ok(store);
        }
        gradients[0] = Some(match gradient {
            None => loss.ones_like()?.contiguous()?.detach(),
            Some(gradient) if loss.is_variable() => gradient.force_contiguous()?.detach(),
            Some(gradient) => gradient.contiguous()?.detach(),
        });
        for (i, node) in nodes.iter().enumerate() {
            // Every node but the first is an input of one before it.
            let Some(gradient) = gradients[i].take() else { continue };
            if node.is_variable() {
                store.insert(node, gradient);
                continue;
            }
            let Some(record) = records.remove(&node.id()) else { continue };
            let gradient = gradient.contiguous()?;
            let (contributions, fresh) = match &record.backward {
                Pass::AddTo(add) => {
                    if let Some(&at) = position.get(&record.inputs[0].id()) {
                        // Candle adds rows on CUDA only to a sum that is whole.
                        let whole = |sum: Tensor| if is_whole(&sum) { Ok(sum) } else { sum.force_contiguous() };
                        let sum = gradients[at].take().map(whole).transpose()?;
                        gradients[at] = Some(add(sum, &gradient)?.detach());
                    }
                    continue;
                }
                Pass::Fresh(backward) => (backward(&gradient)?, true),
                Pass::View(backward) => (backward(&gradient)?, false),
            };
            for (input, contribution) in record.inputs.iter().zip(contributions) {
                let (Some(&at), Some(contribution)) = (position.get(&input.id()), contribution) else { continue };
                let contribution = contribution.detach();
                gradients[at] = Some(match gradients[at].take() {
                    Some(sum) => addition::add(&sum, &contribution)?.detach(),
                    // Whoever has the gradients of variables may write to them in place, and take
                    // all of their memory for theirs.
                    None if input.is_variable()
                        && (!fresh || !is_whole(&contribution) || share_memory(&contribution, &gradient)) =>
                    {
                        contribution.force_contiguous()?.detach()
                    }
                    None => contribution,
                });
            }
        }
        Ok(store)
    }
}

/// Whether two tensors have their numbers in the same memory.
fn share_memory(a: &Tensor, b: &Tensor) -> bool {
    std::ptr::eq(&*a.storage_and_layout().0, &*b.storage_and_layout().0)
}

/// Whether a tensor's numbers lie in order from the beginning of its memory on.
fn is_whole(t: &Tensor) -> bool {
    t.is_contiguous() && t.layout().start_offset() == 0
}

/// An `Order` lists the tensors that gradients pass through, each before the inputs of the
/// operation that made it. It is the order of [`Tensor::sorted_nodes`], so that sums of several
/// gradients have the bits that Candle gives them.
struct Order {
    nodes: Vec<Tensor>,
    /// Whether gradients pass through the tensors seen so far.
    seen: HashMap<TensorId, bool>,
    unrecorded: usize,
}

impl Order {
    fn of(loss: &Tensor, records: &Records) -> Self {
        let mut order = Self { nodes: Vec::new(), seen: HashMap::new(), unrecorded: 0 };
        order.walk(loss, records);
        order.nodes.reverse();
        order
    }

    /// Adds the tensors below `node`, then `node`; returns whether gradients pass through it.
    fn walk(&mut self, node: &Tensor, records: &Records) -> bool {
        if let Some(&passes) = self.seen.get(&node.id()) {
            return passes;
        }
        let passes = match records.get(&node.id()) {
            _ if node.is_variable() => true,
            Some(record) => record.inputs.iter().fold(false, |passes, input| self.walk(input, records) | passes),
            // An operation of Candle: of constants, or of something that must have gradients.
            None => {
                let passes = node.track_op() && !node.sorted_nodes().is_empty();
                self.unrecorded += usize::from(passes);
                passes
            }
        };
        self.seen.insert(node.id(), passes);
        if passes {
            self.nodes.push(node.clone());
        }
        passes
    }
}

impl Drop for Tape {
    fn drop(&mut self) {
        let own = TAPES.with_borrow_mut(|tapes| {
            let at = tapes.iter().position(|(number, _)| *number == self.number);
            at.map(|at| tapes.remove(at))
        });
        // Dropping tensors may take long, and must not find the tapes borrowed.
        drop(own);
    }
}

/// Records that `out` was made of `inputs`, if there is a tape and one of them is tracked.
/// `backward` returns new memory.
pub(crate) fn record(
    out: &Tensor,
    inputs: &[&Tensor],
    backward: impl Fn(&Tensor) -> Result<Vec<Option<Tensor>>> + 'static,
) {
    add(out, inputs, || Pass::Fresh(Box::new(backward)));
}

/// Does what [`record`] does for an operation whose `backward` may return its argument, or views
/// of it.
pub(crate) fn record_view(
    out: &Tensor,
    inputs: &[&Tensor],
    backward: impl Fn(&Tensor) -> Result<Vec<Option<Tensor>>> + 'static,
) {
    add(out, inputs, || Pass::View(Box::new(backward)));
}

/// Does what [`record`] does for an operation of one input, which adds to the input's gradient by
/// itself: `add_to(gradient so far, gradient of out)`.
pub(crate) fn record_sum(
    out: &Tensor,
    input: &Tensor,
    add_to: impl Fn(Option<Tensor>, &Tensor) -> Result<Tensor> + 'static,
) {
    add(out, &[input], || Pass::AddTo(Box::new(add_to)));
}

fn add(out: &Tensor, inputs: &[&Tensor], backward: impl FnOnce() -> Pass) {
    TAPES.with_borrow_mut(|tapes| {
        if let Some((_, records)) = tapes.last_mut()
            && inputs.iter().any(|input| input.track_op())
            // An operation with nothing to do may return its input.
            && inputs.iter().all(|input| input.id() != out.id())
        {
            let inputs = inputs.iter().map(|&input| input.clone()).collect();
            records.insert(out.id(), Record { inputs, backward: backward() });
        }
    });
}

/// Whether there is a tape on this thread.
pub(crate) fn is_recording() -> bool {
    TAPES.with_borrow(|tapes| !tapes.is_empty())
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;
    use crate::ops;

    /// A gradient that is a view of another one, here a transposed one, is no sum that Candle adds
    /// rows to on CUDA.
    #[test]
    fn what_is_added_to_a_sum_finds_it_whole() -> Result<()> {
        let x = Var::from_tensor(&Tensor::arange(0f32, 6., &Device::Cpu)?.reshape((2, 3))?)?;
        let tape = Tape::start();
        let hidden = ops::affine(&x, 2.0, 0.0)?;
        let rows = hidden.copy()?;
        record_sum(&rows, &hidden, |sum, gradient| {
            let sum = sum.expect("the other operation comes first");
            assert!(is_whole(&sum), "{:?}", sum.layout());
            sum + gradient
        });
        let turned = ops::transpose(&hidden, 0, 1)?;
        let weights = Tensor::arange(0f32, 6., &Device::Cpu)?.reshape((3, 2))?;
        let loss = ops::add(&ops::sum_all(&rows)?, &ops::sum_all(&ops::mul(&turned, &weights)?)?)?;
        let gradients = tape.backward(&loss)?;
        let of_x = gradients.get(&x).expect("a gradient").to_vec2::<f32>()?;
        assert_eq!(of_x, [[2., 6., 10.], [4., 8., 12.]]);
        Ok(())
    }
}

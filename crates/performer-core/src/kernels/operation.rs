//! One adapter between the kernels and Candle's custom operations.
//!
//! Candle has a trait for operations of one, two and three tensors each, with a storage and a
//! layout for every tensor as arguments of their own. Here an operation of `N` tensors takes arrays
//! of `N`, and what a device has no kernel for is refused in one place.

use std::sync::Arc;

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Layout, MetalStorage, Result, Shape, Tensor, bail,
};

use crate::tape;

/// The numbers of a tensor on a device, and where they lie.
pub(crate) type Stored<'a, S> = (&'a S, &'a Layout);

/// A differentiable operation on `N` tensors, with one output.
pub(crate) trait Operation<const N: usize>: Send + Sync + 'static {
    /// The operation's name in messages.
    fn name(&self) -> &'static str;

    /// Computes the output on the CPU.
    fn cpu(&self, inputs: [Stored<'_, CpuStorage>; N]) -> Result<(CpuStorage, Shape)> {
        let _ = inputs;
        bail!("{}: this operation has no kernel for the CPU", self.name())
    }

    /// Computes the output on a CUDA device.
    fn cuda(&self, inputs: [Stored<'_, CudaStorage>; N]) -> Result<(CudaStorage, Shape)> {
        let _ = inputs;
        bail!("{}: this operation has no kernel for CUDA", self.name())
    }

    /// Computes the output on a Metal device.
    fn metal(&self, inputs: [Stored<'_, MetalStorage>; N]) -> Result<(MetalStorage, Shape)> {
        let _ = inputs;
        bail!("{}: this operation has no kernel for Metal", self.name())
    }

    /// Computes the gradients of the inputs from the output and its gradient; `None` for an input
    /// that gets none.
    fn backward(&self, inputs: [&Tensor; N], out: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; N]>;
}

/// `Adapter` makes an [`Operation`] one of Candle's custom operations. The operation is shared with
/// the tape, if one records, which calls the same backward pass.
struct Adapter<O>(Arc<O>);

/// Tensors that an operation can be applied to: arrays of one, two or three.
pub(crate) trait Operands<O> {
    /// Applies `operation`, which is recorded for the backward pass.
    fn apply(self, operation: O) -> Result<Tensor>;
}

/// Applies an operation to tensors.
pub(crate) fn apply<O, I: Operands<O>>(operation: O, inputs: I) -> Result<Tensor> {
    inputs.apply(operation)
}

impl<O: Operation<1>> Operands<O> for [&Tensor; 1] {
    fn apply(self, operation: O) -> Result<Tensor> {
        let operation = Arc::new(operation);
        let out = self[0].apply_op1(Adapter(Arc::clone(&operation)))?;
        record(operation, self, &out);
        Ok(out)
    }
}

impl<O: Operation<2>> Operands<O> for [&Tensor; 2] {
    fn apply(self, operation: O) -> Result<Tensor> {
        let operation = Arc::new(operation);
        let out = self[0].apply_op2(self[1], Adapter(Arc::clone(&operation)))?;
        record(operation, self, &out);
        Ok(out)
    }
}

impl<O: Operation<3>> Operands<O> for [&Tensor; 3] {
    fn apply(self, operation: O) -> Result<Tensor> {
        let operation = Arc::new(operation);
        let out = self[0].apply_op3(self[1], self[2], Adapter(Arc::clone(&operation)))?;
        record(operation, self, &out);
        Ok(out)
    }
}

/// Records an operation on the tape, if there is one.
fn record<const N: usize, O: Operation<N>>(operation: Arc<O>, inputs: [&Tensor; N], out: &Tensor) {
    if tape::is_recording() {
        let (tensors, result) = (inputs.map(Tensor::clone), out.clone());
        let backward = move |grad: &Tensor| Ok(operation.backward(tensors.each_ref(), &result, grad)?.to_vec());
        tape::record(out, &inputs, backward);
    }
}

/// Defines a forward pass of one of Candle's traits: `$candle` calls `$ours` on storages of a
/// device.
macro_rules! forward {
    ($candle:ident, $ours:ident, $storage:ident, $($s:ident $l:ident),+) => {
        fn $candle(&self, $($s: &$storage, $l: &Layout),+) -> Result<($storage, Shape)> {
            self.0.$ours([$(($s, $l)),+])
        }
    };
}

impl<O: Operation<1>> CustomOp1 for Adapter<O> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    forward!(cpu_fwd, cpu, CpuStorage, s l);
    forward!(cuda_fwd, cuda, CudaStorage, s l);
    forward!(metal_fwd, metal, MetalStorage, s l);

    fn bwd(&self, a: &Tensor, out: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let [a] = self.0.backward([a], out, grad)?;
        Ok(a)
    }
}

impl<O: Operation<2>> CustomOp2 for Adapter<O> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    forward!(cpu_fwd, cpu, CpuStorage, s1 l1, s2 l2);
    forward!(cuda_fwd, cuda, CudaStorage, s1 l1, s2 l2);
    forward!(metal_fwd, metal, MetalStorage, s1 l1, s2 l2);

    fn bwd(&self, a: &Tensor, b: &Tensor, out: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [a, b] = self.0.backward([a, b], out, grad)?;
        Ok((a, b))
    }
}

impl<O: Operation<3>> CustomOp3 for Adapter<O> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    forward!(cpu_fwd, cpu, CpuStorage, s1 l1, s2 l2, s3 l3);
    forward!(cuda_fwd, cuda, CudaStorage, s1 l1, s2 l2, s3 l3);
    forward!(metal_fwd, metal, MetalStorage, s1 l1, s2 l2, s3 l3);

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        c: &Tensor,
        out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [a, b, c] = self.0.backward([a, b, c], out, grad)?;
        Ok((a, b, c))
    }
}

//! Short convolutions on CUDA: launches the kernels of `convolution.cu`.

use candle_core::{DType, Result, Shape, Tensor, backend::BackendStorage, bail};

use super::{CudaStorage, Macro, STORED, Source, THREADS, View, allocate, contiguous, source, storage, tensor};
use crate::kernels::convolution::TAPS;

const SOURCE: Source = source!("convolution.cu", STORED);

/// The tokens that a thread takes. The gradient of a filter is summed over such runs, so its bits
/// depend on this number.
const RUN: usize = 32;

/// `Call` is the convolution of contiguous rows `(B, T, C)`.
struct Call<'a> {
    x: View<'a>,
    /// `(C, 4)`, f32.
    weight: View<'a>,
    sizes: [usize; 3],
}

impl<'a> Call<'a> {
    fn new(x: View<'a>, weight: View<'a>) -> Result<Self> {
        contiguous([x, weight])?;
        let (batch, tokens, channels) = x.1.shape().dims3()?;
        if weight.1.dims() != [channels, TAPS] || weight.0.dtype() != DType::F32 {
            bail!(
                "short convolution: rows {:?} need f32 filters ({channels}, {TAPS}), not {:?} {:?}",
                x.1.dims(),
                weight.0.dtype(),
                weight.1.dims()
            );
        }
        Ok(Self { x, weight, sizes: [batch, tokens, channels] })
    }

    fn runs(&self) -> usize {
        self.sizes[1].div_ceil(RUN)
    }

    /// Launches a kernel, or its `_wide` form where all rows begin at multiples of 16 bytes, that
    /// reads rows, filters and perhaps more, and writes to `outputs`.
    fn run(&self, entry: &str, more: Option<View>, outputs: &mut [&mut CudaStorage]) -> Result<()> {
        let ((rows, layout), dtype) = (self.x, self.x.0.dtype());
        let [batch, tokens, channels] = self.sizes;
        let wide = 16 / dtype.size_in_bytes();
        let is_wide = [Some(layout), more.map(|(_, layout)| layout)]
            .into_iter()
            .flatten()
            .all(|layout| layout.start_offset().is_multiple_of(wide))
            && channels.is_multiple_of(wide);
        let (entry, each) = if is_wide { (format!("{entry}_wide"), wide) } else { (entry.to_owned(), 1) };
        let macros: [Macro; 2] = [("STORAGE", &storage(dtype)?), ("RUN_LENGTH", &RUN)];
        let kernel = SOURCE.kernel(rows.device(), &entry, &macros, 0)?;
        let launch = kernel.launch().value(batch as i32).value(tokens as i32).value(channels as i32);
        let mut launch = launch.input((rows, layout))?.input(self.weight)?;
        if let Some(more) = more {
            launch = launch.input(more)?;
        }
        for output in outputs {
            launch = launch.output(output)?;
        }
        let threads = batch * self.runs() * (channels / each);
        // SAFETY: all tensors have the sizes that the kernel is told.
        unsafe { launch.run([threads.div_ceil(THREADS), 1, 1], THREADS) }
    }
}

/// Computes the convolution of rows `(B, T, C)` with filters `(C, 4)`.
pub(in crate::kernels) fn forward(x: View, weight: View) -> Result<CudaStorage> {
    let call = Call::new(x, weight)?;
    let mut out = allocate(x.0.device(), x.1.shape(), x.0.dtype())?;
    call.run("convolve", None, &mut [&mut out])?;
    Ok(out)
}

/// Computes the gradients of rows and of filters from that of the result, which is contiguous.
pub(in crate::kernels) fn backward(x: View, weight: View, grad: View) -> Result<[Tensor; 2]> {
    let call = Call::new(x, weight)?;
    contiguous([grad])?;
    let [batch, _, channels] = call.sizes;
    let device = x.0.device();
    let mut of_x = allocate(device, x.1.shape(), x.0.dtype())?;
    let parts = Shape::from((batch * call.runs(), channels, TAPS));
    let mut of_weight = allocate(device, &parts, DType::F32)?;
    call.run("convolution_gradients", Some(grad), &mut [&mut of_x, &mut of_weight])?;
    Ok([tensor(of_x, x.1.shape()), tensor(of_weight, parts).sum(0)?])
}

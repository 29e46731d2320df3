//! This module performs the optimiser's work on CUDA: one kernel for each parameter, and one
//! transfer to the host for the norm of all gradients.

use candle_core::{
    CpuStorage, CudaStorage, DType, InplaceOp2, Layout, Result, Shape, Tensor, backend::BackendStorage, bail,
};
use performer_core::kernels::cuda::{Source, THREADS, allocate, tensor, with_storages};

use super::optimizer::Update;

const SOURCE: Source = Source { name: "performer-lm/src/train/adamw.cu", text: include_str!("adamw.cu"), headers: &[] };

/// Number of thread blocks that add up one gradient's squares.
const BLOCKS: usize = 128;

/// Whether the kernels can treat this parameter or gradient.
pub(super) fn takes(t: &Tensor) -> bool {
    t.device().is_cuda() && t.dtype() == DType::F32 && t.elem_count() > 0
}

/// `AdamWOnCuda` updates an f32 parameter with its gradient. The moments change in place too: they
/// belong to the optimiser alone.
pub(super) struct AdamWOnCuda<'a> {
    pub(super) scalars: &'a Update,
    pub(super) m: &'a Tensor,
    pub(super) v: &'a Tensor,
}

impl InplaceOp2 for AdamWOnCuda<'_> {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<()> {
        bail!("this update is for CUDA")
    }

    fn cuda_fwd(&self, p: &mut CudaStorage, p_layout: &Layout, g: &CudaStorage, g_layout: &Layout) -> Result<()> {
        let count = p_layout.shape().elem_count();
        let layouts = [p_layout, g_layout, self.m.layout(), self.v.layout()];
        if layouts.iter().any(|l| !l.is_contiguous() || l.start_offset() != 0 || l.shape().elem_count() != count) {
            bail!("the update on CUDA takes contiguous parameters, gradients and moments of one size");
        }
        with_storages([self.m, self.v], |[(m, _), (v, _)]| {
            if [p.dtype(), g.dtype(), m.dtype(), v.dtype()] != [DType::F32; 4] {
                bail!("the update on CUDA takes f32");
            }
            let kernel = SOURCE.kernel(g.device(), "adamw", &[], 0)?;
            let s = self.scalars;
            let mut launch = kernel.launch().value(count as i64);
            let scalars = [s.gradient_scale, s.beta1, 1.0 - s.beta1, s.beta2, 1.0 - s.beta2];
            for scalar in scalars.into_iter().chain([s.step_size, s.second_correction, s.eps, s.decay]) {
                launch = launch.value(scalar as f32);
            }
            let launch = launch.output(p)?.input((m, self.m.layout()))?.input((v, self.v.layout()))?;
            // SAFETY: all four have `count` numbers, and each thread has its own of every one.
            unsafe { launch.input((g, g_layout))?.run([count.div_ceil(THREADS), 1, 1], THREADS) }
        })
    }
}

/// Computes the sums of squares of f32 tensors on one CUDA device, in one transfer.
pub(super) fn squared_norms(tensors: &[&Tensor]) -> Result<Vec<f64>> {
    let Some(first) = tensors.first() else { return Ok(Vec::new()) };
    let shape = Shape::from(tensors.len() * BLOCKS);
    let mut sums = allocate(first.device().as_cuda_device()?, &shape, DType::F32)?;
    for (i, t) in tensors.iter().enumerate() {
        let t = t.contiguous()?;
        with_storages([&t], |[(storage, layout)]| {
            let kernel = SOURCE.kernel(storage.device(), "sum_of_squares", &[], 0)?;
            let launch = kernel.launch().value(t.elem_count() as i64).value((i * BLOCKS) as i64);
            // SAFETY: every block writes one number of its tensor's share of the sums.
            unsafe { launch.input((storage, layout))?.output(&mut sums)?.run([BLOCKS, 1, 1], THREADS) }
        })?;
    }
    let sums = tensor(sums, shape).to_vec1::<f32>()?;
    Ok(sums.chunks_exact(BLOCKS).map(|sums| sums.iter().map(|&x| f64::from(x)).sum()).collect())
}

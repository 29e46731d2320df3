//! Fused kernels behind [`crate::attention`] and [`crate::ops`]: each computes in one pass what
//! Candle's operations would in many.
//!
//! On the CPU, `favor` and `softmax` are attention. `cross_entropy`, `tiled_cross_entropy`, `norm`,
//! `activation`, `swiglu`, `rotary`, `linear`, `heads` and `convolution` are the other operations
//! of a decoder, most of them on GPUs too; `forget_gate` and `quadratic` are on CUDA only. Each
//! implements the trait of `operation`, which adapts kernels to Candle's custom operations.
//! `addition` is a kernel of ours on CUDA, and Candle's elsewhere. Kernels are built from `gemm`
//! (products of small tiles), `vector` (elementwise functions), `rows` (reading tensors),
//! `transpose`, `fresh` (memory for outputs) and `beside` (inputs beyond the third). Loops over
//! vectors are compiled for AVX-512, AVX2 and NEON beside plain Rust (`transpose` for AVX alone),
//! and `instructions` chooses the version when the program runs.
//!
//! `cuda` and `metal` hold kernels for GPUs, compiled by the device's own compiler when they are
//! first used; Metal's have not been run on hardware. `store` keeps compiled CUDA kernels on disk.
//! The terms of the kernels (chunk, segment, tile, block, part, piece, team) are defined in
//! `docs/terms.md` of the repository.

/// Asserts the size of a `repr(C)` struct and where its fields lie. The source of the kernels that
/// take it asserts the same numbers, so neither side can change alone.
#[cfg(any(feature = "cuda", feature = "metal"))]
macro_rules! assert_layout {
    ($type:ident, $size:literal, $($field:ident: $offset:literal),+ $(,)?) => {
        const _: () = {
            assert!(size_of::<$type>() == $size);
            $(assert!(std::mem::offset_of!($type, $field) == $offset);)+
        };
    };
}

pub(crate) mod activation;
pub(crate) mod addition;
mod beside;
pub(crate) mod convolution;
pub(crate) mod cross_entropy;
#[cfg(feature = "cuda")]
pub mod cuda;
pub(crate) mod favor;
#[cfg(feature = "cuda")]
pub(crate) mod forget_gate;
mod fresh;
mod gemm;
pub(crate) mod heads;
mod instructions;
pub(crate) mod linear;
#[cfg(feature = "metal")]
pub mod metal;
#[cfg(all(test, not(feature = "metal")))]
#[allow(dead_code)]
mod metal;
pub(crate) mod norm;
pub(crate) mod operation;
#[cfg(feature = "cuda")]
pub(crate) mod quadratic;
pub(crate) mod rotary;
mod rows;
pub(crate) mod softmax;
#[cfg(any(feature = "cuda", test))]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod store;
pub(crate) mod swiglu;
pub(crate) mod tiled_cross_entropy;
mod transpose;
pub(crate) mod vector;

use std::sync::OnceLock;

use candle_core::{
    CpuStorage, DType, Device, Layout, Result, Storage, Tensor, WithDType,
    backend::{BackendDevice, BackendStorage},
    bail,
};
use half::{bf16, f16};
use rayon::prelude::*;

use operation::Stored;

/// The type in which sums, exponentials and products of a caller's type are computed: f64 for f64,
/// f32 for all others.
pub(crate) fn compute_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Stands for `−∞` in running maxima and in logarithms of denominators where no key has been seen.
/// It is below the log-features of every key whose squared norm is under 1e37; keys beyond that
/// weigh nothing. It is finite, so that `−∞ − c` is `−∞`; with `c = −∞` it would be NaN.
pub(crate) const FLOOR: f64 = -1e37;

/// The product of two matrices, `(N, K)` and `(K, M)`, of one type. One of bf16 on the CPU is made
/// in f32 and rounded, because Candle 0.11.0 has none of its own for it.
pub(crate) fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if a.device().is_cpu() && a.dtype() == DType::BF16 {
        return a.to_dtype(DType::F32)?.matmul(&b.to_dtype(DType::F32)?)?.to_dtype(DType::BF16);
    }
    a.matmul(b)
}

/// Whether the CPU kernels take this tensor: it is on the CPU and f32, f16 or bf16.
pub(crate) fn takes(t: &Tensor) -> bool {
    matches!(t.device(), Device::Cpu) && matches!(t.dtype(), DType::F32 | DType::F16 | DType::BF16)
}

/// `n` rounded up to a multiple of [`vector::LANES`].
fn padded(n: usize) -> usize {
    n.next_multiple_of(vector::LANES)
}

/// Copies a strided tensor to contiguous memory.
pub(crate) fn copy<S: BackendStorage>(from: &S, layout: &Layout) -> Result<S>
where
    S::Device: BackendDevice<Storage = S>,
{
    // SAFETY: the copy fills all of it.
    let mut to = unsafe { from.device().alloc_uninit(layout.shape(), from.dtype()) }?;
    from.copy_strided_src(&mut to, 0, layout)?;
    Ok(to)
}

/// The numbers of a contiguous f32 tensor.
fn contiguous<'a>((storage, layout): Stored<'a, CpuStorage>) -> Result<&'a [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(values), Some((start, end))) => Ok(&values[start..end]),
        _ => bail!("a fused kernel was given a tensor that is not contiguous f32"),
    }
}

/// The number of threads among which work is divided: one where Candle may use only one, as in a
/// program that sets `RAYON_NUM_THREADS` to 1 because its passes run side by side; else those of
/// Rayon's pool. Candle is asked once, since it reads `/proc/cpuinfo` each time, which takes longer
/// than a decoding step.
fn threads() -> usize {
    static ONE: OnceLock<bool> = OnceLock::new();
    if *ONE.get_or_init(|| candle_core::utils::get_num_threads() == 1) { 1 } else { rayon::current_num_threads() }
}

/// Runs `work` on every item and returns the results in order: on Rayon's threads, or on this one
/// if there is one item or one thread. Each item writes to memory of its own, so results do not
/// depend on the number of threads.
fn for_heads<T: Send, R: Send>(items: Vec<T>, work: impl Fn(T) -> R + Sync + Send) -> Vec<R> {
    if items.len() == 1 || threads() == 1 {
        items.into_iter().map(work).collect()
    } else {
        items.into_par_iter().map(work).collect()
    }
}

/// The bytes that one thread reads or writes in about the time in which another wakes up.
const SMALL: usize = 1 << 20;

/// Runs `work`, a decoding step that reads and writes so many `bytes` in all, as [`for_heads`]
/// does, but a small one on this thread alone: it is done before others wake up.
fn for_heads_of_step<T: Send, R: Send>(items: Vec<T>, bytes: usize, work: impl Fn(T) -> R + Sync + Send) -> Vec<R> {
    if bytes < SMALL { items.into_iter().map(work).collect() } else { for_heads(items, work) }
}

/// Whether there are fewer heads than threads. The work of a head is then divided.
fn spare_threads(heads: usize) -> bool {
    heads < threads()
}

/// Whether a few heads, given to the threads one after the other, would leave some of these idle in
/// the last round. Their work is then divided where dividing costs next to nothing.
fn leaves_threads_idle(heads: usize) -> bool {
    let threads = threads();
    !heads.is_multiple_of(threads) && heads < 4 * threads
}

/// Calls `work` with the storages and layouts of CPU tensors.
fn with_storages<const N: usize, R>(
    tensors: [&Tensor; N],
    work: impl FnOnce([(&CpuStorage, &Layout); N]) -> Result<R>,
) -> Result<R> {
    let guards = tensors.map(|t| t.storage_and_layout());
    if guards.iter().any(|(storage, _)| !matches!(**storage, Storage::Cpu(_))) {
        bail!("a fused CPU kernel was given a tensor that is not on the CPU");
    }
    work(guards.each_ref().map(|(storage, layout)| match &**storage {
        Storage::Cpu(storage) => (storage, *layout),
        _ => unreachable!("checked above"),
    }))
}

/// Converts f32 numbers to a storage of `dtype`.
fn storage_of(values: Vec<f32>, dtype: DType) -> Result<CpuStorage> {
    Ok(match dtype {
        DType::F32 => CpuStorage::F32(values),
        DType::F16 => CpuStorage::F16(values.into_iter().map(f16::from_f32).collect()),
        DType::BF16 => CpuStorage::BF16(values.into_iter().map(bf16::from_f32).collect()),
        other => bail!("a fused kernel was asked for {other:?}; it makes f32, f16 and bf16"),
    })
}

/// The gradient of a tensor, in the tensor's type.
fn gradient(values: Vec<f32>, like: &Tensor) -> Result<Tensor> {
    Tensor::from_vec(values, like.shape(), like.device())?.to_dtype(like.dtype())
}

/// Returns an error that says where, if the tensor holds NaN or infinity.
pub(crate) fn check_finite(name: &str, storage: &CpuStorage, layout: &Layout) -> Result<()> {
    fn first_bad<T: WithDType>(values: &[T], layout: &Layout) -> Option<(Vec<usize>, f64)> {
        let bad = |x: T| !x.to_f64().is_finite();
        // The tensor is searched row by row along its last dimension. A row with stride 1 is first
        // tested as a whole without branches, which compiles to vector instructions.
        let last = layout.dims().last().zip(layout.stride().last());
        let (width, stride) = last.map_or((1, 1), |(&width, &stride)| (width, stride));
        let rows = layout.shape().elem_count().checked_div(width)?;
        let outer = layout.dims().iter().zip(layout.stride()).rev().skip(1);
        (0..rows).find_map(|row| {
            let (mut rest, mut start) = (row, layout.start_offset());
            for (&dim, &stride) in outer.clone() {
                start += rest % dim * stride;
                rest /= dim;
            }
            let is_bad = match stride {
                1 => values[start..start + width].iter().fold(false, |any, &x| any | bad(x)),
                _ => (0..width).any(|i| bad(values[start + i * stride])),
            };
            if !is_bad {
                return None;
            }
            let column = (0..width).find(|i| bad(values[start + i * stride]))?;
            let (mut rest, mut index) = (row, vec![column]);
            for (&dim, _) in outer.clone() {
                index.insert(0, rest % dim);
                rest /= dim;
            }
            Some((index, values[start + column * stride].to_f64()))
        })
    }
    let bad = match storage {
        CpuStorage::F32(x) => first_bad(x, layout),
        CpuStorage::F64(x) => first_bad(x, layout),
        CpuStorage::F16(x) => first_bad(x, layout),
        CpuStorage::BF16(x) => first_bad(x, layout),
        _ => None,
    };
    match bad {
        None => Ok(()),
        Some((index, value)) => {
            bail!("{name} holds {value} at {index:?} of shape {:?}; every value must be finite", layout.dims())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// A program whose passes run side by side sets the variable to 1, and may have a pool of more
    /// threads for other work.
    #[test]
    fn kernels_keep_to_one_thread_where_the_variable_says_so() {
        const WITHIN: &str = "PERFORMER_TEST_ONE_THREAD";
        if std::env::var_os(WITHIN).is_some() {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
            assert_eq!(pool.install(threads), 1);
            return;
        }
        // Candle is asked once in a process, so a process of its own is asked.
        let mut test = Command::new(std::env::current_exe().unwrap());
        test.args(["--exact", "kernels::tests::kernels_keep_to_one_thread_where_the_variable_says_so"]);
        let output = test.env("RAYON_NUM_THREADS", "1").env(WITHIN, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }
}

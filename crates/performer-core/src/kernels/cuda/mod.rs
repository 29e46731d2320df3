//! CUDA kernels, compiled when they are first used: NVRTC turns a source, with macros for the
//! shape, into machine code of the device at hand, which is kept on disk for the next process. So
//! these kernels need no nvcc when the crate is built (those of Candle do), and no shape that is
//! not used is ever compiled. Kernels may also come with the program, in a folder beside it; NVRTC
//! is then not needed for them.
//!
//! A source is self-contained: NVRTC has the compiler's own types and functions and `asm`, but none
//! of the toolkit's headers (`cuda_bf16.h`, `mma.h`), which a machine with only a driver lacks too.
//! Files that sources share are given as [`Source::headers`]. `kernels.txt` beside this file lists
//! all sources with the macros that `scripts/cuda-check.sh` compiles them with.
//!
//! A kernel is run in three steps: [`Source::kernel`] compiles it or finds it in the cache,
//! [`Kernel::launch`] begins its list of arguments, and [`Launch::run`] queues it.

pub(crate) mod activation;
mod buffer;
mod compile;
pub(super) mod convolution;
pub(super) mod cross_entropy;
pub(crate) mod embedding;
pub(crate) mod favor;
mod favor_call;
mod favor_layout;
mod favor_map;
pub(super) mod forget_gate;
pub(super) mod heads;
mod memory;
pub(super) mod norm;
mod nvrtc;
pub(super) mod quadratic;
pub(crate) mod softmax;
mod stopwatch;

use std::{
    collections::HashMap,
    fmt::Display,
    sync::{
        Arc, LazyLock, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

pub use candle_core::cuda_backend::{CudaDevice, CudaStorage};
use candle_core::{
    DType, Error, Layout, Result, Shape, Storage, Tensor, bail,
    cuda_backend::{CudaStorageSlice, DeviceId, WrapErr, cudarc},
    op::BackpropOp,
};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig,
    PushKernelArg, SyncOnDrop,
    sys::{CUdevice_attribute, CUfunction_attribute_enum},
};

pub use compile::{Image, Loads, compile, loads};
use memory::on_slice;
pub use memory::{allocate, free_memory, keep_memory, poison_outputs, synchronize};
pub use stopwatch::Stopwatch;

use super::favor::blocks::StoredType;

/// `Source` is a `.cu` file.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Its path below `crates/`, for messages and to tell sources apart.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// The name (as `#include "NAME"` has it) and the text of each file that it includes.
    pub headers: &'static [(&'static str, &'static str)],
}

/// Makes a [`Source`] of `$file` beside this one, which includes `$headers`.
macro_rules! source {
    ($file:literal, $headers:expr) => {
        $crate::kernels::cuda::Source {
            name: concat!("performer-core/src/kernels/cuda/", $file),
            text: include_str!($file),
            headers: $headers,
        }
    };
}
use source;

/// The headers of the kernels that take tensors of several types.
pub(crate) const STORED: &[(&str, &str)] =
    &[("stored.cuh", include_str!("stored.cuh")), ("warp.cuh", include_str!("warp.cuh"))];

/// The value of the macro `STORAGE` of `stored.cuh` and `tile.cuh` for a type.
pub(crate) fn storage(dtype: DType) -> Result<StoredType> {
    Ok(match dtype {
        DType::F32 => StoredType::F32,
        DType::F16 => StoredType::F16,
        DType::BF16 => StoredType::Bf16,
        other => bail!("a CUDA kernel was given {other:?}; it takes f32, f16 and bf16"),
    })
}

/// The threads of a thread block: `THREADS` of the CUDA sources, except in `softmax.cu` for f32.
/// Thread blocks of teams have fewer.
pub const THREADS: usize = 256;

/// Whether the kernels of a transformer's smaller operations take this tensor.
pub(crate) fn takes(t: &Tensor) -> bool {
    t.device().is_cuda() && storage(t.dtype()).is_ok() && t.elem_count() > 0
}

/// Whether the kernels of attention, which need the tensor cores of Ampere, take this tensor.
pub(crate) fn attention_takes(t: &Tensor) -> bool {
    takes(t) && t.device().as_cuda_device().and_then(capability).is_ok_and(|(major, _)| major >= 8)
}

/// A tensor as an operation gets it: its storage and its layout.
pub type View<'a> = (&'a CudaStorage, &'a Layout);

/// Calls `work` with the storages and layouts of tensors on a CUDA device.
pub fn with_storages<const N: usize, R>(tensors: [&Tensor; N], work: impl FnOnce([View; N]) -> Result<R>) -> Result<R> {
    let guards = tensors.map(|t| t.storage_and_layout());
    if guards.iter().any(|(storage, _)| !matches!(**storage, Storage::Cuda(_))) {
        bail!("a CUDA kernel was given a tensor that is elsewhere");
    }
    work(guards.each_ref().map(|(storage, layout)| match &**storage {
        Storage::Cuda(storage) => (storage, *layout),
        _ => unreachable!("checked above"),
    }))
}

/// Makes a tensor of a kernel's result, through which no gradient passes.
pub fn tensor(storage: CudaStorage, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}

/// Returns an error if a tensor is not contiguous.
pub(crate) fn contiguous<const N: usize>(views: [View; N]) -> Result<()> {
    match views.iter().find(|(_, layout)| !layout.is_contiguous()) {
        Some((_, layout)) => bail!("a CUDA kernel was given a tensor that is not contiguous: {layout:?}"),
        None => Ok(()),
    }
}

/// A macro: its name and its value.
pub type Macro<'a> = (&'a str, &'a dyn Display);

impl Source {
    /// Returns the kernel `entry` (`extern "C" __global__`) compiled with `macros` for a device,
    /// from the cache if it was used before. `shared` is the dynamic shared memory of a thread
    /// block in bytes.
    ///
    /// # Errors
    /// What could not be compiled, for which architecture, with the compiler's own words; or that
    /// the device lacks shared memory.
    pub fn kernel(&self, device: &CudaDevice, entry: &str, macros: &[Macro], shared: usize) -> Result<Kernel> {
        type Loaded = (Arc<CudaModule>, HashMap<String, (CudaFunction, usize)>);
        static CACHE: OnceLock<Mutex<HashMap<(DeviceId, String), Loaded>>> = OnceLock::new();
        let macros: Vec<String> = macros.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let module = format!("{} {}", self.name, macros.join(" "));
        let context = |what: &str, e: &dyn Display| {
            Error::msg(format!("kernel {entry} of {module}: {what} on {}: {e}", device_name(device)))
        };
        let mut cache = CACHE.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        let (loaded, functions) = match cache.entry((device.id(), module.clone())) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(vacant) => {
                let started = Instant::now();
                let image = compile::compiled(self, &macros, capability(device)?)?;
                let loaded = device.cuda_stream().context().load_module(image).map_err(|e| {
                    let advice = "cannot be loaded (if the card's driver is older than the compiler, update it)";
                    context(advice, &e)
                })?;
                compile::count(|loads| loads.time += started.elapsed());
                vacant.insert((loaded, HashMap::new()))
            }
        };
        if !functions.contains_key(entry) {
            let function = loaded.load_function(entry).map_err(|e| context("is not in the module", &e))?;
            functions.insert(entry.to_owned(), (function, SHARED_BY_DEFAULT));
        }
        let Some((function, granted)) = functions.get_mut(entry) else {
            bail!("kernel {entry} vanished from the cache")
        };
        if shared > *granted {
            let most = most_shared(device)?;
            if shared > most {
                bail!(
                    "kernel {entry} of {module} needs {shared} bytes of shared memory; {} has {most}",
                    device_name(device)
                );
            }
            let kind = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(kind, shared as i32).map_err(|e| context("is refused its shared memory", &e))?;
            *granted = shared;
        }
        Ok(Kernel { function: function.clone(), stream: device.cuda_stream(), shared })
    }
}

/// The dynamic shared memory that a thread block has without asking, in bytes.
const SHARED_BY_DEFAULT: usize = 48 << 10;

/// `Kernel` is a kernel ready to run on one device.
#[derive(Debug)]
pub struct Kernel {
    function: CudaFunction,
    stream: Arc<CudaStream>,
    shared: usize,
}

impl Kernel {
    /// Begins the list of arguments; [`Launch::run`] ends it.
    pub fn launch(&self) -> Launch<'_> {
        Launch { kernel: self, values: Vec::new(), uses: Vec::new() }
    }
}

/// `Launch` is a kernel with its arguments so far.
pub struct Launch<'a> {
    kernel: &'a Kernel,
    /// The bytes of each argument, aligned as the widest number.
    values: Vec<Box<[u64]>>,
    /// The ends of the uses of tensors, for other streams to wait for.
    uses: Vec<SyncOnDrop<'a>>,
}

impl<'a> Launch<'a> {
    /// Adds a number, or a `repr(C)` struct of numbers, to the arguments.
    pub fn value<T: DeviceRepr + Copy>(mut self, value: T) -> Self {
        let mut bytes = vec![0u64; size_of::<T>().div_ceil(8)].into_boxed_slice();
        // SAFETY: there is room for a T, aligned to 8 bytes, which no number of a kernel exceeds.
        unsafe { bytes.as_mut_ptr().cast::<T>().write_unaligned(value) };
        self.values.push(bytes);
        self
    }

    /// Adds a pointer to a tensor's first number to the arguments.
    pub fn input(mut self, view: View<'a>) -> Result<Self> {
        let pointer = self.address(view)?;
        Ok(self.value(pointer))
    }

    /// Adds a pointer to memory for results to the arguments.
    pub fn output(mut self, storage: &'a mut CudaStorage) -> Result<Self> {
        let pointer = self.address_mut(storage)?;
        Ok(self.value(pointer))
    }

    /// Returns the address of a tensor's first number, for a struct of pointers that is given to
    /// [`Self::value`] of this launch.
    pub fn address(&mut self, (storage, layout): View<'a>) -> Result<u64> {
        on_slice!(&storage.slice, slice => {
            self.require_card(slice.context())?;
            let (pointer, sync) = slice.device_ptr(&self.kernel.stream);
            self.uses.push(sync);
            Ok(pointer + (layout.start_offset() * (slice.num_bytes() / slice.len().max(1))) as u64)
        })
    }

    /// Returns the address of memory for results, for such a struct.
    pub fn address_mut(&mut self, storage: &'a mut CudaStorage) -> Result<u64> {
        on_slice!(&mut storage.slice, slice => {
            self.require_card(slice.context())?;
            let (pointer, sync) = slice.device_ptr_mut(&self.kernel.stream);
            self.uses.push(sync);
            Ok(pointer)
        })
    }

    /// Refuses memory of another card, which the kernel would read as its own.
    fn require_card(&self, of_memory: &CudaContext) -> Result<()> {
        let (card, other) = (self.kernel.stream.context().ordinal(), of_memory.ordinal());
        if card != other {
            bail!("a kernel on CUDA card {card} was given a tensor on card {other}; move it to that of the others");
        }
        Ok(())
    }

    /// Adds a null pointer to the arguments, where a kernel can do without a tensor.
    pub fn nothing(self) -> Self {
        self.value(0u64)
    }

    /// Queues the kernel on the device's stream, with `grid` thread blocks of `threads` threads,
    /// and does not wait for it.
    ///
    /// # Safety
    /// The arguments must be those that the kernel takes, in order, and the memory they point to
    /// must hold as much as it reads and writes.
    pub unsafe fn run(self, grid: [usize; 3], threads: usize) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        let dim =
            |n: usize| u32::try_from(n).map_err(|_| Error::msg(format!("a grid of {grid:?} blocks is too large")));
        let config = LaunchConfig {
            grid_dim: (dim(grid[0])?, dim(grid[1])?, dim(grid[2])?),
            block_dim: (dim(threads)?, 1, 1),
            shared_mem_bytes: self.kernel.shared as u32,
        };
        let mut launch = self.kernel.stream.launch_builder(&self.kernel.function);
        for value in &self.values {
            launch.arg(&value[0]);
        }
        // SAFETY: the caller promises that the arguments fit the kernel.
        unsafe { launch.launch(config) }.w()?;
        Ok(())
    }
}

/// What kernels are chosen by: it does not change while a program runs.
#[derive(Clone, Copy)]
struct Card {
    /// The compute capability.
    capability: (i32, i32),
    /// The most shared memory that a thread block may have, in bytes.
    most_shared: usize,
}

/// Asks a card once what it is. Each question to the driver would also return, and take away, the
/// error of an earlier call, which belongs to whoever does something on the card.
fn card(device: &CudaDevice) -> Result<Card> {
    static CARDS: OnceLock<Mutex<HashMap<usize, Card>>> = OnceLock::new();
    let stream = device.cuda_stream();
    let context = stream.context();
    let mut cards = CARDS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(card) = cards.get(&context.ordinal()) {
        return Ok(*card);
    }
    let most = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    let card = Card {
        capability: context.compute_capability().w()?,
        most_shared: context.attribute(most).w()?.max(0) as usize,
    };
    cards.insert(context.ordinal(), card);
    Ok(card)
}

/// Returns the compute capability of a device, such as (9, 0).
pub fn capability(device: &CudaDevice) -> Result<(i32, i32)> {
    Ok(card(device)?.capability)
}

static WARPGROUPS: LazyLock<AtomicBool> =
    LazyLock::new(|| AtomicBool::new(std::env::var_os("PERFORMER_WGMMA").is_none_or(|value| value != "0")));

/// Sets whether FAVOR's forward kernel for bf16 uses the warpgroup products of Hopper (wgmma) on
/// cards that have them, and returns the earlier setting. They are used by default, since they are
/// faster; `PERFORMER_WGMMA=0` in the environment turns them off.
pub fn use_warpgroups(on: bool) -> bool {
    WARPGROUPS.swap(on, Ordering::Relaxed)
}

/// Whether kernels for a device shall take products of warpgroups. No other cards than those of
/// capability 9.x have them.
fn warpgroups(device: &CudaDevice) -> Result<bool> {
    Ok(WARPGROUPS.load(Ordering::Relaxed) && capability(device)?.0 == 9)
}

/// Returns the card's name.
pub fn device_name(device: &CudaDevice) -> String {
    device.cuda_stream().context().name().unwrap_or_else(|_| "this CUDA device".to_owned())
}

/// The most shared memory that a thread block may have on a card, in bytes.
fn most_shared(device: &CudaDevice) -> Result<usize> {
    Ok(card(device)?.most_shared)
}

/// The shared memory that thread blocks of FAVOR are chosen for, in bytes. A card with more than an
/// A100 counts as an A100, so that all cards of data centres divide problems alike.
fn shared_as_on_an_a100(device: &CudaDevice) -> Result<usize> {
    Ok(most_shared(device)?.min(163 << 10))
}

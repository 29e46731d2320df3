//! This module gets the machine code of CUDA sources: from the folder that came with the program,
//! from the user's folder of earlier results, or by compiling with NVRTC, which needs no device.

use std::{
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use candle_core::{Error, Result, bail, cuda_backend::cudarc::nvrtc::Ptx};

use super::{Source, nvrtc::Nvrtc};
use crate::kernels::store::{self, Found, Store};

/// The largest number of bytes of compiled kernels that the user's folder keeps; one kernel has 20
/// to 200 KB.
const LIMIT: u64 = 256 << 20;

/// `Target` is what NVRTC is asked to compile for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Target {
    /// The architecture, `major · 10 + minor`.
    arch: i32,
    /// Whether it is machine code; else PTX, which the driver translates.
    native: bool,
}

impl Target {
    /// Chooses machine code for the device if this NVRTC knows the device: machine code runs on any
    /// driver of the toolkit's major version, while PTX needs a driver at least as new as the
    /// toolkit. A device whose architecture this NVRTC does not list gets PTX of the newest one
    /// below it.
    fn choose((major, minor): (i32, i32), supported: &[i32]) -> Option<Self> {
        let device = major * 10 + minor;
        let best = supported.iter().copied().filter(|&arch| arch <= device).max()?;
        Some(Self { arch: best, native: best == device })
    }

    /// The option for NVRTC. The suffix `a`, which exists from 9.0 on, also allows a device's own
    /// instructions (Hopper's wgmma).
    fn option(self) -> String {
        match self {
            Self { arch, native: true } if arch >= 90 => format!("--gpu-architecture=sm_{arch}a"),
            Self { arch, native: true } => format!("--gpu-architecture=sm_{arch}"),
            Self { arch, native: false } => format!("--gpu-architecture=compute_{arch}"),
        }
    }
}

/// `Loads` says where this process got its kernels from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Loads {
    /// The number of sources that came compiled with the program.
    pub shipped: usize,
    /// The number of sources that an earlier process had compiled.
    pub kept: usize,
    /// The number of sources that NVRTC compiled.
    pub compiled: usize,
    /// The files of compiled kernels that were damaged, and were not used.
    pub damaged: Vec<PathBuf>,
    /// How long it took to get all of them and to load them into the device.
    pub time: Duration,
}

static LOADS: Mutex<Loads> =
    Mutex::new(Loads { shipped: 0, kept: 0, compiled: 0, damaged: Vec::new(), time: Duration::ZERO });

/// Returns where the kernels of this process came from so far.
pub fn loads() -> Loads {
    LOADS.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Adds to [`loads`].
pub(super) fn count(change: impl FnOnce(&mut Loads)) {
    change(&mut LOADS.lock().unwrap_or_else(PoisonError::into_inner));
}

/// Returns what a store has whole under a name; a damaged file is counted.
fn look_up(store: &Store, name: &str) -> Option<Vec<u8>> {
    match store.get(name) {
        Found::Whole(bytes) => Some(bytes),
        Found::Missing => None,
        Found::Damaged(path) => {
            count(|loads| loads.damaged.push(path));
            None
        }
    }
}

/// Returns a source compiled with macros, each `NAME=VALUE`, for devices of a compute capability:
/// from the folder that came with the program, else from the user's folder, else from NVRTC, and
/// then it is kept in the user's folder. See [`store::folder`]. NVRTC is opened for the user's
/// folder too, whose kernels depend on its version.
///
/// # Errors
/// Returns the errors of [`compile`], and those of [`collect`] where kernels are collected. The
/// user's folder and the one that came with the program may be unreadable or read-only: they are
/// then passed over, as a damaged file is.
pub(super) fn compiled(source: &Source, macros: &[String], capability: (i32, i32)) -> Result<Ptx> {
    if let Some(collection) = store::collection() {
        collect(&Store::new(collection.folder, u64::MAX), source, macros, &collection.archs)?;
    }
    let native = Target { arch: capability.0 * 10 + capability.1, native: true };
    let shipped = store::shipped().map(|folder| Store::new(folder, u64::MAX));
    if let Some(code) = shipped.and_then(|store| look_up(&store, &shipped_name(source, &options(native, macros)))) {
        count(|loads| loads.shipped += 1);
        return Ok(Ptx::from_binary(code));
    }
    let (image, is_new) = kept(source, macros, capability)?;
    count(|loads| if is_new { loads.compiled += 1 } else { loads.kept += 1 });
    Ok(image.into_ptx())
}

/// Returns a compiled source from the user's folder, or compiles and keeps it, and whether it was
/// compiled.
fn kept(source: &Source, macros: &[String], capability: (i32, i32)) -> Result<(Image, bool)> {
    let Some(store) = store::folder().map(|folder| Store::new(folder, LIMIT)) else {
        return Ok((compile(source, macros, capability)?, true));
    };
    let nvrtc = Nvrtc::open()?;
    let name = name(source, &options(target(nvrtc, capability)?, macros), Some(&nvrtc.version()?));
    if let Some(bytes) = look_up(&store, &name) {
        return Ok((Image::from_bytes(bytes), false));
    }
    let image = compile(source, macros, capability)?;
    // Without the folder the next process compiles again, which is slower and no failure.
    let _ = store.put(&name, image.bytes());
    Ok((image, true))
}

/// Compiles a source for architectures, each `major · 10 + minor`, side by side, and puts the
/// machine code into a folder that is to come with the program, unless it is there. What takes
/// products of warpgroups is compiled for those that have them.
///
/// # Errors
/// Returns the errors of [`compile`], or that NVRTC does not know an architecture, or that the
/// folder cannot be written.
fn collect(store: &Store, source: &Source, macros: &[String], archs: &[i32]) -> Result<()> {
    let of_warpgroups = macros.iter().any(|m| m == "WGMMA=1");
    let collect_one = |arch: i32| {
        if of_warpgroups && arch / 10 != 9 {
            return Ok(());
        }
        let name = shipped_name(source, &options(Target { arch, native: true }, macros));
        if matches!(store.get(&name), Found::Whole(_)) {
            return Ok(());
        }
        let (Image::Cubin(code), _) = kept(source, macros, (arch / 10, arch % 10))? else {
            bail!("this NVRTC makes no machine code for sm_{arch}, for which kernels are collected");
        };
        store.put(&name, &code).map_err(|e| Error::msg(format!("a compiled kernel cannot be written: {e}")))
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = archs.iter().map(|&arch| scope.spawn(move || collect_one(arch))).collect();
        all.into_iter().try_for_each(|one| {
            one.join().unwrap_or_else(|_| Err(Error::msg(format!("the compilation of {} panicked", source.name))))
        })
    })
}

/// Returns the name of a kernel in a folder that comes with the program. The compiler's version is
/// no part of it, because the machine that runs the program may have another compiler, or none.
fn shipped_name(source: &Source, options: &[String]) -> String {
    name(source, options, None)
}

/// Returns the name under which a store has a kernel.
fn name(source: &Source, options: &[String], version: Option<&str>) -> String {
    let headers = source.headers.iter().flat_map(|&(name, text)| [name, text]);
    let parts = [source.name, source.text, "headers"].into_iter().chain(headers);
    let options = ["options"].into_iter().chain(options.iter().map(String::as_str));
    store::name(parts.chain(options).chain(version))
}

/// Returns the options for NVRTC.
fn options(target: Target, macros: &[String]) -> Vec<String> {
    let macros = macros.iter().map(|m| format!("--define-macro={m}"));
    [target.option(), "--std=c++17".to_owned()].into_iter().chain(macros).collect()
}

/// Returns what to compile for devices of a compute capability.
fn target(nvrtc: &Nvrtc, capability: (i32, i32)) -> Result<Target> {
    let supported = nvrtc.supported()?;
    let Some(target) = Target::choose(capability, &supported) else {
        bail!(
            "CUDA devices of capability {}.{} are too old for this NVRTC, which compiles for {supported:?}",
            capability.0,
            capability.1
        );
    };
    Ok(target)
}

/// An `Image` is what NVRTC makes.
#[derive(Clone, Debug)]
pub enum Image {
    /// Machine code of one architecture.
    Cubin(Vec<u8>),
    /// Text that the driver translates.
    Ptx(String),
}

impl Image {
    /// Tells machine code, which is an ELF file, from text.
    fn from_bytes(bytes: Vec<u8>) -> Self {
        match String::from_utf8(bytes) {
            Ok(text) if !text.starts_with("\x7fELF") => Self::Ptx(text),
            Ok(text) => Self::Cubin(text.into_bytes()),
            Err(error) => Self::Cubin(error.into_bytes()),
        }
    }

    /// The machine code or the text.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Cubin(code) => code,
            Self::Ptx(text) => text.as_bytes(),
        }
    }

    fn into_ptx(self) -> Ptx {
        match self {
            Self::Cubin(code) => Ptx::from_binary(code),
            Self::Ptx(text) => Ptx::from_src(text),
        }
    }
}

/// Compiles a source with macros, each `NAME=VALUE`, for devices of a compute capability.
///
/// # Errors
/// The compiler's log, with the source, macros and architecture it is about; or that NVRTC knows no
/// such device; or that there is no NVRTC.
pub fn compile(source: &Source, macros: &[String], capability: (i32, i32)) -> Result<Image> {
    let nvrtc = Nvrtc::open()?;
    let target = target(nvrtc, capability)?;
    let bytes = nvrtc.compile(source, &options(target, macros), target.native)?;
    Ok(if target.native { Image::Cubin(bytes) } else { Image::Ptx(String::from_utf8_lossy(&bytes).into_owned()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUPPORTED: [i32; 6] = [75, 80, 86, 89, 90, 100];

    #[test]
    fn a_known_device_gets_machine_code_and_a_newer_one_ptx() {
        let option = |capability| Target::choose(capability, &SUPPORTED).map(Target::option);
        assert_eq!(option((8, 0)).as_deref(), Some("--gpu-architecture=sm_80"));
        assert_eq!(option((9, 0)).as_deref(), Some("--gpu-architecture=sm_90a"));
        assert_eq!(option((10, 3)).as_deref(), Some("--gpu-architecture=compute_100"));
        assert_eq!(option((8, 7)).as_deref(), Some("--gpu-architecture=compute_86"));
        assert_eq!(option((6, 1)), None);
    }

    const DOUBLES: Source = Source {
        name: "doubles.cu",
        text: "#include \"twice.cuh\"\nextern \"C\" __global__ void doubles(float* x) { x[threadIdx.x] = twice(x[threadIdx.x]) + ADD; }",
        headers: &[("twice.cuh", "__device__ inline float twice(float x) { return 2 * x; }")],
    };

    #[test]
    fn sources_compile_for_devices_that_are_not_here() -> Result<()> {
        for capability in [(8, 0), (9, 0), (99, 0)] {
            compile(&DOUBLES, &["ADD=1".to_owned()], capability)?;
        }
        Ok(())
    }

    #[test]
    fn what_does_not_compile_is_explained() {
        let Err(error) = compile(&DOUBLES, &[], (9, 0)) else { panic!("ADD is not defined") };
        let error = error.to_string();
        for word in ["doubles.cu", "sm_90a", "identifier", "ADD"] {
            assert!(error.contains(word), "{error}");
        }
        let Err(error) = compile(&DOUBLES, &[], (2, 0)) else { panic!("there is no such device any more") };
        assert!(error.to_string().contains("too old"), "{error}");
    }
}

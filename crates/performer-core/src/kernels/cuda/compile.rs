//! This module gets the machine code of CUDA sources: from the folder that came with the program,
//! from the user's folder of earlier results, or by compiling with NVRTC, which needs no device.

use std::{
    ffi::{CStr, CString, c_char, c_int},
    ptr,
};

use candle_core::{
    Error, Result, bail,
    cuda_backend::cudarc::nvrtc::{Ptx, result::NvrtcError, sys},
};

use super::Source;
use crate::kernels::store::{self, Store};

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

/// Returns a source compiled with macros, each `NAME=VALUE`, for devices of a compute capability:
/// from the folder that came with the program, else from the user's folder, else from NVRTC, and
/// then it is kept in the user's folder. See [`store::folder`].
///
/// # Errors
/// Returns the errors of [`compile`]. A folder that cannot be read or written is treated as if it
/// did not exist.
pub(super) fn compiled(source: &Source, macros: &[String], capability: (i32, i32)) -> Result<Ptx> {
    let native = Target { arch: capability.0 * 10 + capability.1, native: true };
    let shipped = store::shipped().map(|folder| Store::new(folder, u64::MAX));
    if let Some(image) = shipped.and_then(|store| store.get(&shipped_name(source, &options(native, macros)))) {
        return Ok(Ptx::from_binary(image));
    }
    let Some(kept) = store::folder().map(|folder| Store::new(folder, LIMIT)) else {
        return Ok(compile(source, macros, capability)?.into_ptx());
    };
    let version = version()?;
    let name = name(source, &options(target(capability)?, macros), Some(&version));
    if let Some(bytes) = kept.get(&name) {
        return Ok(Image::from_bytes(bytes).into_ptx());
    }
    let image = compile(source, macros, capability)?;
    // Without the folder the next process compiles again, which is slower and no failure.
    let _ = kept.put(&name, image.bytes());
    Ok(image.into_ptx())
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
fn target(capability: (i32, i32)) -> Result<Target> {
    let supported = supported()?;
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
/// such device.
pub fn compile(source: &Source, macros: &[String], capability: (i32, i32)) -> Result<Image> {
    let target = target(capability)?;
    let options = options(target, macros);
    let program = Program::new(source)?;
    program.compile(&options).map_err(|(error, log)| {
        // The log becomes one line: that is what programs show of an error.
        let log: Vec<&str> = log.lines().map(str::trim).filter(|line| !line.is_empty()).take(12).collect();
        Error::msg(format!("{} does not compile with {}: {error}: {}", source.name, options.join(" "), log.join(" / ")))
    })?;
    program.image(target.native).map_err(|e| Error::msg(format!("{}: NVRTC keeps its result back: {e}", source.name)))
}

/// Returns NVRTC's version.
fn version() -> Result<String> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: NVRTC writes two numbers.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result().map_err(no_answer)?;
    Ok(format!("NVRTC {major}.{minor}"))
}

fn no_answer(error: NvrtcError) -> Error {
    Error::msg(format!("NVRTC, the compiler of CUDA kernels, does not answer ({error}): is libnvrtc complete?"))
}

/// Returns the architectures that NVRTC compiles for. If the libraries do not fit together, this or
/// [`version`] shows it, since they are called first.
fn supported() -> Result<Vec<i32>> {
    let mut count: c_int = 0;
    // SAFETY: NVRTC writes one number, then as many as it said.
    unsafe {
        sys::nvrtcGetNumSupportedArchs(&mut count).result().map_err(no_answer)?;
        let mut archs = vec![0; count.max(0) as usize];
        sys::nvrtcGetSupportedArchs(archs.as_mut_ptr()).result().map_err(no_answer)?;
        Ok(archs)
    }
}

/// `Program` is a program of NVRTC, destroyed when dropped.
struct Program(sys::nvrtcProgram);

impl Program {
    fn new(source: &Source) -> Result<Self> {
        let text = |s: &str| CString::new(s).map_err(|_| Error::msg(format!("{} contains a zero byte", source.name)));
        let (code, name) = (text(source.text)?, text(source.name)?);
        let names = source.headers.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>>>()?;
        let texts = source.headers.iter().map(|(_, code)| text(code)).collect::<Result<Vec<_>>>()?;
        let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let mut program = ptr::null_mut();
        // SAFETY: all strings live until NVRTC has copied them.
        let created = unsafe {
            sys::nvrtcCreateProgram(
                &mut program,
                code.as_ptr(),
                name.as_ptr(),
                names.len() as c_int,
                pointers(&texts).as_ptr(),
                pointers(&names).as_ptr(),
            )
        };
        created.result().map_err(|e| Error::msg(format!("NVRTC does not take {}: {e}", source.name)))?;
        Ok(Self(program))
    }

    /// Compiles the program, or returns the error and the log.
    fn compile(&self, options: &[String]) -> std::result::Result<(), (NvrtcError, String)> {
        let options: Vec<CString> = options.iter().filter_map(|o| CString::new(o.as_str()).ok()).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: the program is alive and so are the options.
        let result = unsafe { sys::nvrtcCompileProgram(self.0, pointers.len() as c_int, pointers.as_ptr()) }.result();
        result.map_err(|e| (e, self.log()))
    }

    /// Returns the compiler's log.
    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: NVRTC says how much it writes, with a zero at the end.
        unsafe {
            if sys::nvrtcGetProgramLogSize(self.0, &mut size).result().is_err() || size == 0 {
                return String::new();
            }
            let mut log = vec![0u8; size];
            match sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()).result() {
                Ok(()) => {
                    CStr::from_bytes_until_nul(&log).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default()
                }
                Err(_) => String::new(),
            }
        }
    }

    /// Returns the compiled machine code, or PTX if it is not `native`.
    fn image(&self, native: bool) -> std::result::Result<Image, NvrtcError> {
        let mut size = 0;
        // SAFETY: NVRTC says how much it writes.
        unsafe {
            if native {
                sys::nvrtcGetCUBINSize(self.0, &mut size).result()?;
                let mut image = vec![0u8; size];
                sys::nvrtcGetCUBIN(self.0, image.as_mut_ptr().cast()).result()?;
                return Ok(Image::Cubin(image));
            }
            sys::nvrtcGetPTXSize(self.0, &mut size).result()?;
            let mut text = vec![0u8; size];
            sys::nvrtcGetPTX(self.0, text.as_mut_ptr().cast()).result()?;
            text.retain(|&byte| byte != 0);
            Ok(Image::Ptx(String::from_utf8_lossy(&text).into_owned()))
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program was created and not destroyed. There is nobody to tell if destroying
        // it fails.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
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

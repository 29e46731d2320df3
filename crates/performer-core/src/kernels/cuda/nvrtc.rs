//! NVRTC, CUDA's compiler for programs that run, as a library that is opened when the first kernel
//! has to be compiled. A program whose kernels came with it therefore runs on machines without
//! NVRTC, and starts without reading a hundred megabytes of compiler.

use std::{
    error::Error as _,
    ffi::{CStr, CString, c_char, c_int, c_void},
    ptr,
    sync::OnceLock,
};

use candle_core::{Error, Result, bail, cuda_backend::cudarc::driver};
use libloading::Library;

use super::Source;

/// What NVRTC's functions return: 0 if all went well.
type Status = c_int;
/// NVRTC's handle of a program.
type Handle = *mut c_void;
/// The functions that say how many bytes there are, and those that write them.
type Size = unsafe extern "C" fn(Handle, *mut usize) -> Status;
type Bytes = unsafe extern "C" fn(Handle, *mut c_char) -> Status;

/// Declares a struct of functions with the names that a library has them by, and how to find all.
macro_rules! functions {
    ($($field:ident: $name:literal, $kind:ty;)*) => {
        /// `Functions` are the functions of NVRTC that are called here.
        struct Functions {
            $($field: $kind,)*
        }

        impl Functions {
            /// Finds the functions in a library, which stays open as long as the process lives.
            fn find(library: &'static Library) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: NVRTC's header declares these names with these types.
                unsafe { Ok(Self { $($field: *library.get::<$kind>($name)?,)* }) }
            }
        }
    };
}

functions! {
    version: "nvrtcVersion", unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status;
    count_archs: "nvrtcGetNumSupportedArchs", unsafe extern "C" fn(*mut c_int) -> Status;
    archs: "nvrtcGetSupportedArchs", unsafe extern "C" fn(*mut c_int) -> Status;
    error: "nvrtcGetErrorString", unsafe extern "C" fn(Status) -> *const c_char;
    create: "nvrtcCreateProgram",
        unsafe extern "C" fn(
            *mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        ) -> Status;
    destroy: "nvrtcDestroyProgram", unsafe extern "C" fn(*mut Handle) -> Status;
    compile: "nvrtcCompileProgram", unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> Status;
    log_size: "nvrtcGetProgramLogSize", Size;
    log: "nvrtcGetProgramLog", Bytes;
    code_size: "nvrtcGetCUBINSize", Size;
    code: "nvrtcGetCUBIN", Bytes;
    text_size: "nvrtcGetPTXSize", Size;
    text: "nvrtcGetPTX", Bytes;
}

/// `Nvrtc` is the compiler.
pub(super) struct Nvrtc(Functions);

impl Nvrtc {
    /// Returns the compiler, which the first call opens.
    ///
    /// # Errors
    /// If no library of NVRTC is found, or it lacks a function: always the same error then, until
    /// the process ends.
    pub(super) fn open() -> Result<&'static Self> {
        static NVRTC: OnceLock<std::result::Result<Nvrtc, String>> = OnceLock::new();
        NVRTC.get_or_init(Self::load).as_ref().map_err(Error::msg)
    }

    fn load() -> std::result::Result<Self, String> {
        let mut failures = Vec::new();
        for name in names(driver_version()) {
            // SAFETY: NVRTC does nothing when it is opened but to prepare itself.
            match unsafe { Library::new(name) } {
                Ok(library) => {
                    let library: &Library = Box::leak(Box::new(library));
                    return Functions::find(library).map(Self).map_err(|e| format!("{name} is no NVRTC: {e}"));
                }
                // The cause says which file it is about.
                Err(error) => failures.push(error.source().map_or_else(|| error.to_string(), ToString::to_string)),
            }
        }
        Err(format!(
            "a CUDA kernel must be compiled, and NVRTC, its compiler, cannot be opened ({}): install libnvrtc of CUDA \
             13 where the system looks for libraries, or put kernels that were compiled elsewhere beside the program",
            failures.join("; ")
        ))
    }

    /// Returns an error unless all went well.
    fn check(&self, status: Status) -> std::result::Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: NVRTC returns a text that stays where it is, for numbers that it does not know
        // too.
        let text = unsafe { (self.0.error)(status) };
        if text.is_null() {
            return Err(format!("error {status}"));
        }
        // SAFETY: it is not null, and ends with a zero.
        Err(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }

    /// Like [`Self::check`], for questions that a complete NVRTC answers. If its libraries do not
    /// fit together, these questions show it, since they come first.
    fn answer(&self, status: Status) -> Result<()> {
        self.check(status).map_err(|error| {
            Error::msg(format!("NVRTC, the compiler of CUDA kernels, does not answer ({error}): is libnvrtc complete?"))
        })
    }

    /// Returns NVRTC's version.
    pub(super) fn version(&self) -> Result<String> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: NVRTC writes two numbers.
        self.answer(unsafe { (self.0.version)(&mut major, &mut minor) })?;
        Ok(format!("NVRTC {major}.{minor}"))
    }

    /// Returns the architectures that NVRTC compiles for, each `major · 10 + minor`.
    pub(super) fn supported(&self) -> Result<Vec<i32>> {
        let mut count: c_int = 0;
        // SAFETY: NVRTC writes one number.
        self.answer(unsafe { (self.0.count_archs)(&mut count) })?;
        let mut archs = vec![0; count.max(0) as usize];
        // SAFETY: NVRTC writes as many numbers as it said.
        self.answer(unsafe { (self.0.archs)(archs.as_mut_ptr()) })?;
        Ok(archs)
    }

    /// Compiles a source with options into machine code, or into PTX, which is text, if it is not
    /// `native`.
    ///
    /// # Errors
    /// What NVRTC does not like, with its log.
    pub(super) fn compile(&self, source: &Source, options: &[String], native: bool) -> Result<Vec<u8>> {
        let program = Program::new(self, source)?;
        if let Err(error) = program.compile(options) {
            // The log becomes one line: that is what programs show of an error.
            let log = program.log();
            let log: Vec<&str> = log.lines().map(str::trim).filter(|line| !line.is_empty()).take(12).collect();
            bail!("{} does not compile with {}: {error}: {}", source.name, options.join(" "), log.join(" / "))
        }
        let image = if native { program.bytes(self.0.code_size, self.0.code) } else { program.text() };
        image.map_err(|e| Error::msg(format!("{}: NVRTC keeps its result back: {e}", source.name)))
    }
}

/// Returns the names under which NVRTC's library may be found. A driver takes the machine code of
/// its own major version of CUDA and of earlier ones, so an older driver is better served by an
/// older compiler.
fn names(driver: Option<c_int>) -> [&'static str; 3] {
    let (newer, older, any) = match cfg!(windows) {
        true => ("nvrtc64_130_0.dll", "nvrtc64_120_0.dll", "nvrtc64.dll"),
        false => ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"),
    };
    if driver.is_some_and(|version| version < 13_000) { [older, newer, any] } else { [newer, older, any] }
}

/// Returns the version of CUDA that the driver is made for, `major · 1000 + minor · 10`, if there
/// is a driver.
fn driver_version() -> Option<c_int> {
    let mut version = 0;
    // SAFETY: the driver writes one number.
    unsafe { driver::sys::cuDriverGetVersion(&mut version) }.result().ok().map(|()| version)
}

/// `Program` is a program of NVRTC, destroyed when dropped.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    handle: Handle,
}

impl<'a> Program<'a> {
    fn new(nvrtc: &'a Nvrtc, source: &Source) -> Result<Self> {
        let text = |s: &str| CString::new(s).map_err(|_| Error::msg(format!("{} contains a zero byte", source.name)));
        let (code, name) = (text(source.text)?, text(source.name)?);
        let names = source.headers.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>>>()?;
        let texts = source.headers.iter().map(|(_, code)| text(code)).collect::<Result<Vec<_>>>()?;
        let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let mut handle = ptr::null_mut();
        // SAFETY: all strings live until NVRTC has copied them.
        let created = unsafe {
            (nvrtc.0.create)(
                &mut handle,
                code.as_ptr(),
                name.as_ptr(),
                names.len() as c_int,
                pointers(&texts).as_ptr(),
                pointers(&names).as_ptr(),
            )
        };
        nvrtc.check(created).map_err(|e| Error::msg(format!("NVRTC does not take {}: {e}", source.name)))?;
        Ok(Self { nvrtc, handle })
    }

    fn compile(&self, options: &[String]) -> std::result::Result<(), String> {
        let options: Vec<CString> = options.iter().filter_map(|o| CString::new(o.as_str()).ok()).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: the program is alive and so are the options.
        self.nvrtc.check(unsafe { (self.nvrtc.0.compile)(self.handle, pointers.len() as c_int, pointers.as_ptr()) })
    }

    /// Returns the compiler's log.
    fn log(&self) -> String {
        let log = self.bytes(self.nvrtc.0.log_size, self.nvrtc.0.log).unwrap_or_default();
        CStr::from_bytes_until_nul(&log).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Returns PTX without the zero at its end.
    fn text(&self) -> std::result::Result<Vec<u8>, String> {
        let mut text = self.bytes(self.nvrtc.0.text_size, self.nvrtc.0.text)?;
        text.retain(|&byte| byte != 0);
        Ok(text)
    }

    /// Returns what a pair of functions gives of the program.
    fn bytes(&self, size: Size, write: Bytes) -> std::result::Result<Vec<u8>, String> {
        let mut count = 0;
        // SAFETY: the program is alive; NVRTC writes one number.
        self.nvrtc.check(unsafe { size(self.handle, &mut count) })?;
        let mut bytes = vec![0u8; count];
        if count > 0 {
            // SAFETY: the program is alive; NVRTC writes as many bytes as it said.
            self.nvrtc.check(unsafe { write(self.handle, bytes.as_mut_ptr().cast()) })?;
        }
        Ok(bytes)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the program was created and not destroyed. There is nobody to tell if destroying
        // it fails.
        let _ = unsafe { (self.nvrtc.0.destroy)(&mut self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_gets_a_compiler_that_is_not_newer() {
        let first = |driver| names(driver)[0];
        assert_eq!(first(Some(12_080)), names(None)[1]);
        assert_eq!(first(Some(13_000)), names(None)[0]);
        assert_eq!(first(Some(13_020)), names(None)[0]);
    }
}

//! NCCL as a library that is opened when the program runs: a build needs nothing of it.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    sync::OnceLock,
};

use libloading::Library;

/// What NCCL's functions return: 0 if all went well.
pub(super) type Status = c_int;
/// NCCL's handle of a group of ranks.
pub(super) type Handle = *mut c_void;

/// `UniqueId` is the identifier by which NCCL's ranks find each other, `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// `ncclUint8` and `ncclFloat32` of NCCL's types, `ncclSum` of its operations.
pub(super) const BYTES: c_int = 1;
pub(super) const F32: c_int = 7;
pub(super) const SUM: c_int = 0;

/// Declares `Functions`, a struct with a field for each function of the library under the name that
/// is given, and its constructor, which looks all of them up.
macro_rules! functions {
    ($($field:ident: $name:literal, fn($($argument:ty),*) -> $result:ty;)*) => {
        /// `Functions` are the functions of NCCL that are called here.
        #[derive(Clone, Copy)]
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            /// Finds the functions in a library, which stays open as long as the process lives.
            fn find(library: &'static Library) -> Result<Self, libloading::Error> {
                // SAFETY: NCCL's header declares these names with these types since version 2.7.
                unsafe {
                    Ok(Self {
                        $($field: *library.get::<unsafe extern "C" fn($($argument),*) -> $result>($name)?,)*
                    })
                }
            }
        }
    };
}

functions! {
    unique_id: "ncclGetUniqueId", fn(*mut UniqueId) -> Status;
    init: "ncclCommInitRank", fn(*mut Handle, c_int, UniqueId, c_int) -> Status;
    async_error: "ncclCommGetAsyncError", fn(Handle, *mut Status) -> Status;
    error: "ncclGetErrorString", fn(Status) -> *const c_char;
    group_start: "ncclGroupStart", fn() -> Status;
    group_end: "ncclGroupEnd", fn() -> Status;
    all_reduce: "ncclAllReduce",
        fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> Status;
    send: "ncclSend", fn(*const c_void, usize, c_int, c_int, Handle, *mut c_void) -> Status;
    receive: "ncclRecv", fn(*mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> Status;
}

impl Functions {
    /// Returns the library's functions; the first call opens it.
    ///
    /// # Errors
    /// In words, if there is no such library or it lacks a function.
    pub(super) fn open() -> Result<Self, String> {
        static OPENED: OnceLock<Result<Functions, String>> = OnceLock::new();
        OPENED.get_or_init(|| Self::load(&["libnccl.so.2", "libnccl.so"])).clone()
    }

    /// Loads the first library of these names that can be.
    pub(super) fn load(names: &[&str]) -> Result<Self, String> {
        let mut failures = Vec::new();
        for name in names {
            // SAFETY: NCCL does nothing when it is opened but to prepare itself.
            match unsafe { Library::new(*name) } {
                Ok(library) => match Self::find(Box::leak(Box::new(library))) {
                    Ok(functions) => return Ok(functions),
                    Err(error) => failures.push(format!("{name}: {error}")),
                },
                Err(error) => failures.push(format!("{name}: {error}")),
            }
        }
        Err(format!(
            "NCCL cannot be opened: install it (libnccl2 of NVIDIA's packages, or nvidia-nccl of pip) and let \
             LD_LIBRARY_PATH name its folder ({})",
            failures.join("; ")
        ))
    }

    /// Turns a code into an error in words.
    pub(super) fn check(&self, status: Status) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: NCCL returns a text that lives as long as the library, for every code.
        let text = unsafe { CStr::from_ptr((self.error)(status)) }.to_string_lossy().into_owned();
        Err(format!("NCCL says: {text} (code {status}; NCCL_DEBUG=INFO makes it say more)"))
    }
}

//! The command line `performer-lm`.

use std::process::ExitCode;

use libmimalloc_sys::{mi_option_get, mi_option_set, mi_option_t, mi_option_use_numa_nodes};
use performer_lm::memory::Counting;

/// Keeps the memory of freed tensors: fresh pages cost more than the arithmetic on them.
#[global_allocator]
static ALLOCATOR: Counting<mimalloc::MiMalloc> = Counting(mimalloc::MiMalloc);

/// Milliseconds until freed pages go back to the system. The bindings name only the option after it.
const PURGE_DELAY: mi_option_t = mi_option_use_numa_nodes - 1;

fn main() -> ExitCode {
    // SAFETY: plain settings, before there are threads. 10 is the default: any other value is the user's, or another option.
    unsafe {
        if mi_option_get(PURGE_DELAY) == 10 {
            mi_option_set(PURGE_DELAY, -1);
        }
    }
    performer_lm::cli::main()
}

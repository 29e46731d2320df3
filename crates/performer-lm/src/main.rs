//! The command line `performer-lm`.

use std::process::ExitCode;

/// Keeps the memory of freed tensors: fresh pages cost more than the arithmetic on them.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    performer_lm::cli::main()
}

//! This is the binary of the command line program `performer-lm`.

use std::process::ExitCode;

use libmimalloc_sys::{mi_option_set, mi_option_t, mi_option_use_numa_nodes};
use performer_lm::memory::Counting;

/// The allocator keeps the memory of freed tensors: fresh pages cost more than the arithmetic on
/// them.
#[global_allocator]
static ALLOCATOR: Counting<mimalloc::MiMalloc> = Counting(mimalloc::MiMalloc);

/// The option that says after how many milliseconds freed pages go back to the system, −1 for
/// never. The bindings name only the option after it.
const PURGE_DELAY: mi_option_t = mi_option_use_numa_nodes - 1;

fn main() -> ExitCode {
    if std::env::var_os("MIMALLOC_PURGE_DELAY").is_none() {
        // SAFETY: this sets an option before there are other threads.
        unsafe { mi_option_set(PURGE_DELAY, -1) };
    }
    performer_lm::cli::main()
}

#[cfg(test)]
mod tests {
    use libmimalloc_sys::mi_option_get;

    use super::*;

    /// Another version may number the options differently: the option that is set must have the
    /// default of the purge delay, or the user's value.
    #[test]
    fn the_option_is_the_purge_delay() {
        let of_user = std::env::var("MIMALLOC_PURGE_DELAY").ok().and_then(|delay| delay.parse().ok());
        // SAFETY: this reads an option.
        assert_eq!(unsafe { mi_option_get(PURGE_DELAY) }, of_user.unwrap_or(1000));
    }
}

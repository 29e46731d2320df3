//! The machine a figure was measured on.

use serde::{Deserialize, Serialize};

/// What a reader needs to judge a timing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Processor, as it names itself.
    pub cpu: String,
    /// Logical cores.
    pub cores: usize,
    /// Memory in GiB.
    pub memory_gib: f64,
    /// Operating system.
    pub os: String,
}

impl Machine {
    /// The one this runs on.
    pub fn this() -> Self {
        let mut cpu = String::new();
        let mut memory = 0;
        if let Ok(mut system) = sysinfo::System::new() {
            system.refresh_cpu_all();
            system.refresh_memory();
            cpu = system.cpus().first().map_or_else(String::new, |c| c.brand().trim().to_string());
            memory = system.total_memory();
        }
        Self {
            cpu: if cpu.is_empty() { std::env::consts::ARCH.to_string() } else { cpu },
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_gib: (memory as f64 / (1u64 << 30) as f64 * 10.0).round() / 10.0,
            os: std::env::consts::OS.to_string(),
        }
    }
}

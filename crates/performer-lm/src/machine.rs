//! This module describes the machine on which a figure was measured.

use candle_core::Device;
use serde::{Deserialize, Serialize};

use crate::{device::describe, parallel::cores};

/// `Machine` is what a reader needs to know to judge a timing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Name of the processor, as it reports it.
    pub cpu: String,
    /// Number of logical cores that this process may use.
    pub cores: usize,
    /// Memory in GiB.
    pub memory_gib: f64,
    /// Name of the operating system.
    pub os: String,
    /// Name of the GPU, if it was the GPU that computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
}

impl Machine {
    /// Describes the machine that this program runs on, with `device` as the device that computes.
    pub fn with(device: &Device) -> Self {
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
            cores: cores(),
            memory_gib: (memory as f64 / (1u64 << 30) as f64 * 10.0).round() / 10.0,
            os: std::env::consts::OS.to_string(),
            gpu: (!device.is_cpu()).then(|| describe(device)),
        }
    }

    /// Names what computed, for captions: the GPU, or a number of threads of the processor.
    pub fn at_work(&self, threads: usize) -> String {
        self.gpu.clone().unwrap_or_else(|| format!("{threads} thread(s) of {}", self.cpu))
    }

    /// Names what computed, with the processor, its cores and the memory.
    pub fn in_full(&self, threads: usize) -> String {
        let gpu = self.gpu.as_ref().map(|gpu| format!("{gpu}, driven by ")).unwrap_or_default();
        format!("{gpu}{threads} thread(s) of {} ({} cores, {} GiB)", self.cpu, self.cores, self.memory_gib)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_computed_is_named() {
        let mut machine = Machine { cpu: "Z80".into(), cores: 1, memory_gib: 0.1, ..Machine::with(&Device::Cpu) };
        assert_eq!(machine.at_work(1), "1 thread(s) of Z80");
        assert_eq!(machine.in_full(1), "1 thread(s) of Z80 (1 cores, 0.1 GiB)");
        machine.gpu = Some("H100".into());
        assert_eq!(machine.at_work(1), "H100");
        assert_eq!(machine.in_full(1), "H100, driven by 1 thread(s) of Z80 (1 cores, 0.1 GiB)");
    }
}

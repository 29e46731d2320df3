//! Kernels for GPUs, run without one: their sources are compiled for the CPU with a stand-in for
//! the hardware.

#[path = "../common/mod.rs"]
mod common;

mod cuda_host;
mod cuda_host_bits;
mod cuda_host_maps;
mod cuda_host_ops;
mod cuda_host_softmax;
mod metal_host;
mod planted;

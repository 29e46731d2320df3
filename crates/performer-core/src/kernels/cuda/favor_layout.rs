//! The structs by which the kernels of FAVOR get sizes, strides and addresses, laid out as in
//! `favor.cuh`, which says what each number is.

use candle_core::cuda_backend::cudarc::driver::DeviceRepr;

use super::buffer::Strides;

/// `Problem` is the struct of that name in `favor.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Problem {
    pub(super) heads: i32,
    pub(super) group: i32,
    pub(super) queries: i32,
    pub(super) keys: i32,
    pub(super) segment: i32,
    pub(super) segments: i32,
    pub(super) q: Strides,
    pub(super) k: Strides,
    pub(super) v: Strides,
    pub(super) offset_scale: f32,
    pub(super) gates: u64,
    pub(super) form: KeyForm,
}

assert_layout!(
    Problem, 160,
    heads: 0, group: 4, queries: 8, keys: 12, segment: 16, segments: 20, q: 24, k: 48, v: 72, offset_scale: 96, gates: 104,
    form: 112
);

/// `KeyForm` is the struct of that name in `favor.cuh`: addresses on the device.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct KeyForm {
    pub(super) projection: u64,
    pub(super) back: u64,
    pub(super) weights: u64,
    pub(super) metric: u64,
    pub(super) square: u64,
    pub(super) tables: i64,
}

assert_layout!(KeyForm, 48, projection: 0, back: 8, weights: 16, metric: 24, square: 32, tables: 40);

// SAFETY: it holds only numbers, laid out as in C.
unsafe impl DeviceRepr for Problem {}

/// `Tensors` is the struct of that name in `favor.cuh`: addresses on the device.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Tensors {
    pub(super) q: u64,
    pub(super) k: u64,
    pub(super) v: u64,
    pub(super) grad: u64,
    pub(super) visible: u64,
    pub(super) projection: u64,
    pub(super) back: u64,
    pub(super) logs: u64,
    pub(super) delta: u64,
    pub(super) denominators: u64,
    pub(super) before: u64,
    pub(super) factors: u64,
    pub(super) of_features: u64,
}

assert_layout!(
    Tensors, 104,
    q: 0, k: 8, v: 16, grad: 24, visible: 32, projection: 40, back: 48, logs: 56, delta: 64, denominators: 72, before: 80,
    factors: 88, of_features: 96
);

// SAFETY: it holds only numbers, laid out as in C.
unsafe impl DeviceRepr for Tensors {}

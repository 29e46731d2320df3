//! What performer-core promises, one module a promise. They are one program, because each program
//! would be linked with all of Candle: `cargo test -p performer-core --test suite gates::` runs one
//! module of it.

#[path = "../common/mod.rs"]
mod common;

mod against_reference;
mod attacks;
mod by_head;
mod candle_models;
mod causality;
mod convolution;
mod decoding;
mod errors;
mod exchange;
mod fitted;
mod gates;
mod gradients;
mod layer;
mod long_causality;
mod losses;
mod masks;
mod ops;
mod projection;
mod projection_statistics;
mod reference;
mod segments;
mod small;
mod state;
mod statistics;
mod tape;
mod theory;
mod threads;
mod trained;
mod windowed;

//! What performer-lm promises, one module a promise. They are one program, because each program
//! would be linked with all of Candle: `cargo test -p performer-lm --test suite model::` runs one
//! module of it.

#[cfg(feature = "cli")]
mod cli;
mod convert;
mod imports;
#[cfg(feature = "cli")]
mod lab;
mod library;
mod model;
mod pretrained;
#[cfg(feature = "cli")]
mod program;
#[cfg(feature = "lab")]
mod training;

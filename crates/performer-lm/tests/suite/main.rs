//! What performer-lm promises, one module a promise. They are one program, because each program
//! would be linked with all of Candle: `cargo test -p performer-lm --test suite model::` runs one
//! module of it.

#[cfg(feature = "cli")]
mod cli;
#[cfg(feature = "lab")]
mod comparisons;
mod convert;
#[cfg(feature = "cli")]
mod damage;
#[cfg(feature = "cli")]
mod earlier_results;
#[cfg(feature = "cli")]
mod going_on;
#[cfg(feature = "cli")]
mod gpu_check;
#[cfg(feature = "cli")]
mod guidance;
mod heap;
mod imports;
#[cfg(all(feature = "cli", unix))]
mod kills;
#[cfg(feature = "cli")]
mod lab;
mod leak;
mod library;
#[cfg(feature = "cli")]
mod limits;
mod model;
#[cfg(feature = "cli")]
mod mutations;
#[cfg(feature = "cli")]
mod overwriting;
mod pretrained;
#[cfg(feature = "cli")]
mod program;
mod ranks;
#[cfg(feature = "lab")]
mod regressions;
#[cfg(feature = "cli")]
mod seeds;
mod segments;
mod settings;
#[cfg(all(feature = "cli", unix))]
mod stopping;
#[cfg(feature = "lab")]
mod training;

//! Modules that stand in for those of `candle_nn` that pass no gradient, and for those that it
//! lacks.
//!
//! `candle_nn::LayerNorm` with a bias and `candle_nn::RmsNorm` return, for contiguous inputs, a
//! tensor to which no gradient can come back: their own weights are never trained, and neither is
//! anything before them that has no way around. The modules here have the same names, constructors
//! and parameters, and pass every gradient. Exchanging them is one line:
//!
//! ```
//! // use candle_nn::{LayerNorm, RmsNorm, layer_norm, rms_norm};
//! use performer_core::nn::{LayerNorm, RmsNorm, layer_norm, rms_norm};
//! ```
//!
//! A model that is loaded already is changed by `LayerNorm::from(norm)` and `RmsNorm::from(norm)`.
//! The functions behind the modules are in [`crate::ops`].

mod feed_forward;
mod norm;
mod rotary;

pub use feed_forward::SwiGlu;
pub use norm::{LayerNorm, RmsNorm, layer_norm, layer_norm_no_bias, rms_norm};
pub use rotary::Rotary;

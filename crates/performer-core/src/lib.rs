//! Linear attention for [Candle](candle_core): FAVOR+ of the Performer, with gradients.
//!
//! Softmax attention, `o_i = Σ_j e^{q_i·k_j/√D} v_j / Σ_j e^{q_i·k_j/√D}`, costs `O(T²)` for `T`
//! tokens and heads of dimension `D`. The Performer (Choromanski et al. 2020,
//! <https://arxiv.org/abs/2009.14794>) estimates the kernel `e^{q·k/√D}` by `φ(q)·φ(k)`, with
//! random features φ whose product has the kernel as its mean. It then reorders the sums:
//! `φ(q_i) · Σ_j φ(k_j) [v_j, 1]` is the numerator and, behind it, the denominator. Time and memory
//! become linear in `T`, and the state of decoding constant.
//!
//! Data flows one way, from the equation's inside outwards:
//!
//! | part of the equation | module |
//! |---|---|
//! | Ω, the random rows `ω` | [`projection`] |
//! | `φ(x)` | [`features`] |
//! | the sums and their quotient; exact softmax | [`attention`] |
//! | `Wq, Wk, Wv, Wo` around it, and further parts | [`layer`] |
//! | norms, rotary positions and a feed-forward layer, each with gradients | [`nn`] |
//! | functions around attention, each with a gradient: norms, softmax, linear maps, losses | [`ops`] |
//! | a backward pass like Candle's that does not first fill each gradient with zeros | [`Tape`] |
//! | the formulas in plain f64, against which the tests compare the rest | [`mod@reference`] |
//!
//! [`State`] and [`Attention::extend`] decode: a prompt at once, or a token at a time.
//! [`Softmax`] is exact attention, [`Windowed`] puts an exact window before another attention, and
//! [`AttentionConfig`] makes any of them of a name such as `favor:m=64,window=32`.
//!
//! The features `cuda`, `metal`, `mkl` and `accelerate` are Candle's; with the first two come
//! kernels of this crate for such devices. It needs Rust 1.89.
//!
//! # Example
//! A multi-head layer whose attention is exchanged by one line:
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{VarBuilder, VarMap};
//! use performer_core::{Favor, FavorConfig, Mask, MultiHeadAttention, MultiHeadConfig};
//!
//! # fn main() -> candle_core::Result<()> {
//! let device = Device::Cpu;
//! let vars = VarMap::new();
//! let vb = VarBuilder::from_varmap(&vars, DType::F32, &device);
//! let config = MultiHeadConfig::new(256, 4);
//! // performer_core::Softmax::new() here for exact attention.
//! let favor = Favor::new(&FavorConfig::default(), config.head_dim, 42, DType::F32, &device)?;
//! let layer = MultiHeadAttention::new(&config, Box::new(favor), None, vb)?;
//!
//! let x = Tensor::randn(0f32, 1.0, (2, 500, 256), &device)?;
//! let y = layer.forward(&x, &Mask::causal())?;
//! assert_eq!(y.dims(), [2, 500, 256]);
//! let gradients = y.sqr()?.mean_all()?.backward()?;
//! // The weights of four projections have gradients; the random features, which are saved with
//! // them, have none.
//! assert_eq!(vars.all_vars().iter().filter(|v| gradients.get(v).is_some()).count(), 4);
//! # Ok(())
//! # }
//! ```
#![deny(missing_docs)]

pub mod attention;
pub mod features;
// Not part of the interface: performer-lm measures and prepares devices through it, at its own
// risk.
#[doc(hidden)]
pub mod kernels;
pub mod layer;
pub mod nn;
pub mod ops;
pub mod projection;
pub mod reference;
mod tape;

pub use attention::{
    Attention, AttentionConfig, Favor, FavorConfig, Inputs, LayerParts, Mask, Path, Softmax, State, Windowed,
};
pub use features::{FeatureMap, FeatureMapKind, Features};
pub use layer::{MultiHeadAttention, MultiHeadConfig, Rotary};
pub use projection::{ProjectionKind, Radii};
pub use tape::Tape;

// The examples of these pages are tests as well.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
#[cfg(doctest)]
#[doc = include_str!("../gradients.md")]
struct Gradients;
#[cfg(doctest)]
#[doc = include_str!("../project.md")]
struct Project;
// Pages of the book, which are in the folder `book` of the repository.
#[cfg(doctest)]
#[doc = include_str!("../book/tutorials/swap.md")]
struct Swap;
#[cfg(doctest)]
#[doc = include_str!("../book/tutorials/decode.md")]
struct Decode;
#[cfg(doctest)]
#[doc = include_str!("../book/how/backward.md")]
struct Backward;

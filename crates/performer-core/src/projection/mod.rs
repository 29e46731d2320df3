//! Random projections: the directions `ω_r` at which random feature maps look at queries and keys.
//!
//! A projection Ω is an `(m, d)` matrix with one row per random feature. FAVOR+ ([Choromanski et
//! al., 2020](https://arxiv.org/abs/2009.14794)) needs every row to be distributed as `N(0, I_d)`
//! for its estimate of the softmax kernel to be unbiased; how the rows depend *on each other*
//! decides its variance. So a draw has two parts:
//!
//! - [`ProjectionKind`], how directions are drawn: independently, or exactly orthogonal within
//!   blocks of `d` rows;
//! - [`Radii`], how long the rows are. A direction uniform on the sphere times an independent
//!   `χ(d)` radius is `N(0, I_d)` again; other radii trade bias for variance.
//!
//! # Reproducibility
//!
//! A draw is a function of its arguments, bit for bit, on every platform: ChaCha12 supplies the
//! bits, and everything after them is `f64` arithmetic in a fixed order and the `libm` crate's
//! functions (the standard library's `ln`, `sin` and `cos` differ between platforms).
//! [`draw_tensor`] then rounds once, to the type asked for.
//!
//! Rows do not depend on `m`: a draw with fewer rows is a prefix of a draw with more, unless the
//! radii are [`Radii::Quantile`]. All kinds share their random numbers, which makes comparisons
//! between them less noisy: the first block of an orthogonal draw is the Gram-Schmidt basis of the
//! Gaussian draw from the same seed.
//!
//! ```
//! use performer_core::projection::{ProjectionKind, Radii, derive_seed, draw};
//!
//! # fn main() -> candle_core::Result<()> {
//! let layer_seed = derive_seed(42, 3); // one independent Ω per layer
//! let omega = draw(ProjectionKind::Orthogonal, Radii::Sqrt, 128, 64, layer_seed)?;
//! let dot = |a: usize, b: usize| -> f64 {
//!     let (a, b) = (&omega[a * 64..][..64], &omega[b * 64..][..64]);
//!     a.iter().zip(b).map(|(x, y)| x * y).sum()
//! };
//! assert!((dot(0, 0) - 64.0).abs() < 1e-9); // ‖ω‖ = √64
//! assert!(dot(0, 63).abs() < 1e-9); // the same block: orthogonal
//! assert!(dot(0, 64).abs() > 1e-9); // another block: independent
//! # Ok(())
//! # }
//! ```

mod hadamard;
mod orthogonal;
mod radii;
mod rng;

use std::fmt;
use std::str::FromStr;

use candle_core::{DType, Device, Error, Result, Shape, Tensor, bail};
use serde::{Deserialize, Serialize};

use rng::Stream;

pub use radii::Radii;
pub use rng::derive_seed;

/// How the directions of the rows of Ω are drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ProjectionKind {
    /// Independent rows from `N(0, I_d)`: unbiased, with the most variance. [`Radii`] do not apply.
    Gaussian,
    /// Haar-distributed orthogonal blocks of `d` rows, independent of each other: every direction
    /// is still uniform on the sphere, so with [`Radii::Chi`] still unbiased, with less variance
    /// ([Yu et al., 2016](https://arxiv.org/abs/1610.09072)).
    #[default]
    Orthogonal,
    /// Blocks `H D₁ H D₂ H D₃` of Walsh-Hadamard matrices and random signs ([Yu et al.,
    /// 2016](https://arxiv.org/abs/1610.09072), section 4): close to
    /// [`Orthogonal`](Self::Orthogonal) and drawn in `O(m d log d)` instead of `O(m d²)`.
    ///
    /// A block has `p` rows and columns, `p` the power of two at or above `d`. When `p > d` its
    /// first `d` columns are kept, which is the same as padding the vectors it is applied to with
    /// zeros, and radii are those of dimension `p` (a row's squared norm is then `d` on average,
    /// and varies). **Rows of a block are exactly orthogonal only when `d` is a power of two**: it
    /// is the full rows, of length `p`, that are. Directions take finitely many values, so the
    /// kernel estimate is only approximately unbiased; the smaller `d`, the less so.
    Hadamard,
}

impl ProjectionKind {
    /// Every kind.
    pub const ALL: [Self; 3] = [Self::Gaussian, Self::Orthogonal, Self::Hadamard];

    /// The kind's name, as it is displayed, parsed and serialised.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gaussian => "gaussian",
            Self::Orthogonal => "orthogonal",
            Self::Hadamard => "hadamard",
        }
    }
}

impl fmt::Display for ProjectionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for ProjectionKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        parse("projection", text, &Self::ALL.map(|kind| (kind.name(), kind)))
    }
}

/// Finds `text` among named values; the error lists the names.
fn parse<T: Copy>(what: &str, text: &str, values: &[(&str, T)]) -> Result<T> {
    match values.iter().find(|(name, _)| *name == text) {
        Some((_, value)) => Ok(*value),
        None => {
            let names: Vec<&str> = values.iter().map(|(name, _)| *name).collect();
            bail!("unknown {what} {text:?}: it must be one of {}", names.join(", "))
        }
    }
}

/// Draws a projection Ω: `m` rows of `d` numbers, row-major.
///
/// `radii` scales the rows of orthogonal and Hadamard draws; Gaussian rows have their own lengths,
/// and ignore it.
///
/// # Errors
///
/// When `m` or `d` is 0, or `m × d` numbers do not fit in memory.
pub fn draw(kind: ProjectionKind, radii: Radii, m: usize, d: usize, seed: u64) -> Result<Vec<f64>> {
    check_features(m)?;
    if d == 0 {
        bail!("projection: d, the dimension of a query or key, is 0; it must be at least 1");
    }
    let mut omega = zeros(m, d)?;
    if kind == ProjectionKind::Gaussian {
        fill_normal(&mut omega, seed);
        return Ok(omega);
    }

    let block_rows = match kind {
        ProjectionKind::Hadamard => d.next_power_of_two(),
        _ => d,
    };
    // One stream a block. Blocks seeded alike would repeat the same directions and add nothing.
    for (b, block) in omega.chunks_mut(block_rows.saturating_mul(d)).enumerate() {
        let mut rng = Stream::Block(b as u64).open(seed);
        match kind {
            ProjectionKind::Hadamard => hadamard::fill_block(&mut rng, d, block),
            _ => orthogonal::fill_block(&mut rng, d, block),
        }
    }
    for (row, radius) in omega.chunks_exact_mut(d).zip(radii.lengths(m, block_rows, seed)) {
        row.iter_mut().for_each(|w| *w *= radius);
    }
    Ok(omega)
}

/// Draws `count` independent standard normal numbers: initial weights, say, or inputs of tests.
///
/// Like all numbers of this module they are the same on every platform and in every version, by
/// arithmetic that is written out here. The normal distribution of the crate `rand_distr`, which
/// [`Tensor::randn`] takes, may change with a release and uses the platform's logarithm.
///
/// # Errors
///
/// When `count` numbers do not fit in memory.
pub fn draw_normal(count: usize, seed: u64) -> Result<Vec<f64>> {
    let mut normal = zeros(count, 1)?;
    fill_normal(&mut normal, seed);
    Ok(normal)
}

fn fill_normal(out: &mut [f64], seed: u64) {
    Stream::Block(0).open(seed).fill_normal(out);
}

/// [`draw`] as a tensor of shape `(m, d)`, rounded once from `f64` to `dtype`.
///
/// # Errors
///
/// Those of [`draw`]; when `dtype` is not a floating-point type; and the device's own.
pub fn draw_tensor(
    kind: ProjectionKind,
    radii: Radii,
    m: usize,
    d: usize,
    seed: u64,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    if !dtype.is_float() {
        bail!("projection: dtype is {}; it must be a floating-point type", dtype.as_str());
    }
    tensor(draw(kind, radii, m, d, seed)?, (m, d), dtype, device)
}

/// Makes a tensor of numbers, rounded once from `f64` to `dtype`.
pub(crate) fn tensor(omega: Vec<f64>, shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    // Rounded on the CPU: not every device has f64.
    Tensor::from_vec(omega, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
}

/// The relative distance from a number of bf16 within which [`factor_is_bf16`] takes a number for
/// it: f32's rounding, and a little more.
#[cfg(any(feature = "cuda", test))]
const NEAR: f64 = 1.0 / (1u64 << 20) as f64;

/// The factor `D^-¼` of queries and of keys of width `d`: their products are then `q·k/√D`.
pub(crate) fn input_scale(d: usize) -> f64 {
    (d as f64).powf(-0.25)
}

/// Returns the number by which exponential maps multiply a row of `Ω` for heads of dimension `d`:
/// `d^-¼ log₂ e`. The first factor is that of [`Favor`](crate::Favor), which approximates
/// `e^{q·k/√d}`; the second turns powers of e into powers of 2.
fn factor_scale(d: usize) -> f64 {
    input_scale(d) * std::f64::consts::LOG2_E
}

/// Moves the numbers of an `Ω` for heads of dimension `d` to the nearest for which
/// `d^-¼ log₂ e Ω` is exact in bf16. Tensor cores then multiply rows in bf16 by that factor in one
/// product; any other `Ω` takes two, one of what rounding to bf16 leaves over.
///
/// Each number moves by at most 1/256 of itself, independently of its sign, so features keep the
/// kernel that they estimate up to that.
pub(crate) fn round_factor(omega: &mut [f64], d: usize) {
    let scale = factor_scale(d);
    omega.iter_mut().for_each(|w| *w = half::bf16::from_f64(*w * scale).to_f64() / scale);
}

/// Whether `d^-¼ log₂ e Ω` is exact in bf16, as [`round_factor`] makes it and f32 keeps it.
#[cfg(any(feature = "cuda", test))]
pub(crate) fn factor_is_bf16(omega: &[f32], d: usize) -> bool {
    let scale = factor_scale(d);
    omega.iter().all(|&w| {
        let factor = f64::from(w) * scale;
        (factor - half::bf16::from_f64(factor).to_f64()).abs() <= NEAR * factor.abs()
    })
}

/// Draws the `m` phases `b_r ~ U[0, 2π)` of the random Fourier map `√(2/m) cos(ω_r·x + b_r)`
/// ([Rahimi & Recht,
/// 2007](https://papers.nips.cc/paper/3182-random-features-for-large-scale-kernel-machines)).
///
/// They are independent of [`draw`]'s rows from the same seed.
///
/// # Errors
///
/// When `m` is 0, or `m` numbers do not fit in memory.
pub fn draw_offsets(m: usize, seed: u64) -> Result<Vec<f64>> {
    check_features(m)?;
    let mut offsets = zeros(m, 1)?;
    let mut rng = Stream::Offsets.open(seed);
    offsets.fill_with(|| std::f64::consts::TAU * rng.uniform());
    Ok(offsets)
}

fn check_features(m: usize) -> Result<()> {
    if m == 0 {
        bail!("projection: m, the number of random features, is 0; it must be at least 1");
    }
    Ok(())
}

/// `m × d` zeros, or an error where `vec!` would abort.
fn zeros(m: usize, d: usize) -> Result<Vec<f64>> {
    let mut zeros = Vec::new();
    match m.checked_mul(d).map(|n| (n, zeros.try_reserve_exact(n))) {
        Some((n, Ok(()))) => zeros.resize(n, 0.0),
        _ => bail!("projection: m = {m} rows of d = {d} numbers do not fit in memory; use a smaller m or d"),
    }
    Ok(zeros)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rounded_factor_is_exact_in_bf16_and_near_what_was_drawn() {
        let single = |omega: &[f64]| omega.iter().map(|&w| w as f32).collect::<Vec<_>>();
        for d in [8, 24, 40, 64, 128] {
            let drawn = draw(ProjectionKind::default(), Radii::default(), 48, d, 7).unwrap();
            assert!(!factor_is_bf16(&single(&drawn), d));
            let mut rounded = drawn.clone();
            round_factor(&mut rounded, d);
            assert!(factor_is_bf16(&single(&rounded), d), "d = {d}");
            let far = drawn.iter().zip(&rounded).find(|(a, b)| (*a - *b).abs() > a.abs() / 256.0);
            assert_eq!(far, None, "d = {d}");
            let mut again = rounded.clone();
            round_factor(&mut again, d);
            assert_eq!(single(&again), single(&rounded), "d = {d}");
        }
    }
}

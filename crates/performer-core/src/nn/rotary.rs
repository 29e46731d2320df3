//! Rotary positions with their tables.

use std::ops::Range;

use candle_core::{Device, Result, Tensor, bail};

use crate::{kernels::rotary as kernels, ops};

/// `Rotary` holds the angles of rotary position embeddings (Su et al. 2021,
/// <https://arxiv.org/abs/2104.09864>) and turns queries and keys by them.
///
/// [`Self::new`] pairs dimension `i` with `i + D/2`, the half-split layout of GPT-NeoX and of
/// Hugging Face checkpoints; [`Self::interleaved`] pairs `2i` with `2i + 1`, the layout of the
/// paper, of GPT-J and of Meta's Llama checkpoints. Weights made for one layout are wrong in the
/// other.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use performer_core::Rotary;
///
/// # fn main() -> candle_core::Result<()> {
/// let rotary = Rotary::new(64, 2048, 10_000.0, &Device::Cpu)?;
/// let q = Var::from_tensor(&Tensor::randn(0f32, 1.0, (2, 4, 10, 64), &Device::Cpu)?)?;
/// let turned = rotary.apply(&q, 0)?;
/// assert!(turned.sum_all()?.backward()?.get(&q).is_some());
///
/// let pairs_of_neighbours = rotary.interleaved();
/// assert_eq!(pairs_of_neighbours.apply(&q, 0)?.dims(), [2, 4, 10, 64]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Rotary {
    /// Cosines and sines of the angles of the first positions, `(min(max_tokens, TABLE), D/2)`
    /// each.
    cos: Tensor,
    sin: Tensor,
    /// `base^{-2i/D}` for `i < D/2`.
    frequencies: Vec<f64>,
    max_tokens: usize,
    interleaved: bool,
}

/// Positions whose angles are kept. Those of later ones are computed where they are asked for: a
/// configuration may claim millions of positions that no text ever has.
const TABLE: usize = 1 << 15;

impl Rotary {
    /// The angles `t / base^{2i/D}` for `t < max_tokens`, in the half-split layout. Those of the
    /// first 32,768 positions are kept in a table.
    ///
    /// Angles are computed in f64, and their cosines and sines are rounded to f32.
    ///
    /// # Errors
    /// If `head_dim` is odd or zero, or `base` is not a positive number.
    pub fn new(head_dim: usize, max_tokens: usize, base: f64, device: &Device) -> Result<Self> {
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            bail!("rotary positions need an even head dim; it is {head_dim}");
        }
        if !(base > 0.0 && base.is_finite()) {
            bail!("rotary positions: base is {base}; it must be a positive number, such as 10000");
        }
        let half = head_dim / 2;
        let frequencies: Vec<f64> = (0..half).map(|i| base.powf(-2.0 * i as f64 / head_dim as f64)).collect();
        let [cos, sin] = angles(&frequencies, 0..max_tokens.min(TABLE), device)?;
        Ok(Self { cos, sin, frequencies, max_tokens, interleaved: false })
    }

    /// Takes the interleaved layout instead: the angles turn the neighbours `2i` and `2i + 1`.
    pub fn interleaved(self) -> Self {
        Self { interleaved: true, ..self }
    }

    /// Turns `x` `(B, H, T, D)`, whose first token stands at position `start`, and passes its
    /// gradient.
    ///
    /// # Errors
    /// If `x` has another shape, or a position lies beyond `max_tokens`.
    pub fn apply(&self, x: &Tensor, start: usize) -> Result<Tensor> {
        let kernels::Rotary { cos, sin, pairs } = self.at(x.dims(), start)?;
        let (cos, sin) = (cos.squeeze(0)?, sin.squeeze(0)?);
        match pairs {
            kernels::Pairs::Halves => ops::rotary(x, &cos, &sin),
            kernels::Pairs::Neighbours => ops::rotary_interleaved(x, &cos, &sin),
        }
    }

    /// The angles for heads `(B, H, T, D)` of these dimensions, whose first token stands at
    /// position `start`: tables `(1, T, D/2)`.
    pub(crate) fn at(&self, dims: &[usize], start: usize) -> Result<kernels::Rotary> {
        let (max, half) = (self.max_tokens, self.frequencies.len());
        let &[_, _, t, d] = dims else {
            bail!("x has shape {dims:?}; it must be (batch, heads, tokens, {})", 2 * half);
        };
        if d != 2 * half {
            bail!("x has shape {dims:?}; its head dim must be {}, for which the rotary table was made", 2 * half);
        }
        let end = start.saturating_add(t);
        if end > max {
            bail!("positions {start}..{end} lie beyond the {max} that the rotary table covers");
        }
        let [cos, sin] = match end <= TABLE {
            true => [self.cos.narrow(0, start, t)?, self.sin.narrow(0, start, t)?],
            false => angles(&self.frequencies, start..end, self.cos.device())?,
        };
        let pairs = if self.interleaved { kernels::Pairs::Neighbours } else { kernels::Pairs::Halves };
        Ok(kernels::Rotary { cos: cos.unsqueeze(0)?, sin: sin.unsqueeze(0)?, pairs })
    }
}

/// Computes cosines and sines of the angles of positions, `(T, D/2)` each.
fn angles(frequencies: &[f64], positions: Range<usize>, device: &Device) -> Result<[Tensor; 2]> {
    let of = |f: fn(f64) -> f64| {
        let rows = positions.clone().flat_map(|t| frequencies.iter().map(move |w| f(t as f64 * w) as f32));
        Tensor::from_vec(rows.collect::<Vec<f32>>(), (positions.len(), frequencies.len()), device)
    };
    Ok([of(f64::cos)?, of(f64::sin)?])
}

//! Deterministic polynomial maps: Taylor-2 and the limit form `(1 + z/n)^n`.
//!
//! Both list every monomial of a degree once, with the square root of its multinomial coefficient
//! as weight, so `F` is the number of distinct monomials and not `D^n`.

use candle_core::{D, Device, Result, Tensor, bail};

use super::{FeatureMap, Features};

/// The most monomials of one degree in a map: with more features than about as many, attention
/// costs more than softmax at any length people use.
const MAX_FEATURES: usize = 1 << 14;

/// The highest power of the limit form. There the relative error of `(1 + z/n)^n` against `e^z` is
/// below a thousandth for `|z| ≤ 1`. Memory grows with it, since the indices of all factors of all
/// monomials are kept.
const MAX_POWER: u32 = 1024;

/// `Monomials` are all monomials of degree `n` in `variables` variables, each a product of `n`
/// gathered columns times a weight.
#[derive(Clone, Debug)]
struct Monomials {
    /// The indices of the factors: `n` tensors of shape `(F)`.
    columns: Vec<Tensor>,
    /// The square roots of the multinomial coefficients, shape `(F)`.
    weights: Tensor,
}

impl Monomials {
    fn new(degree: usize, variables: usize, device: &Device) -> Result<Self> {
        let mut columns = vec![Vec::new(); degree];
        let mut weights = Vec::new();
        // The tuples are the non-decreasing ones, in lexicographic order.
        let mut tuple = vec![0usize; degree];
        loop {
            if weights.len() == MAX_FEATURES {
                bail!(
                    "polynomial feature map: degree {degree} in {variables} variables has more than {MAX_FEATURES} \
                     features; lower n or the head dimension"
                );
            }
            for (column, &i) in columns.iter_mut().zip(&tuple) {
                column.push(i as u32);
            }
            weights.push(multinomial(&tuple).sqrt());
            let Some(last) = tuple.iter().rposition(|&i| i + 1 < variables) else { break };
            let next = tuple[last] + 1;
            tuple[last..].fill(next);
        }
        let f = weights.len();
        let columns = columns.into_iter().map(|c| Tensor::from_vec(c, f, device)).collect::<Result<_>>()?;
        Ok(Self { columns, weights: Tensor::from_vec(weights, f, &Device::Cpu)? })
    }

    fn count(&self) -> usize {
        self.weights.dims()[0]
    }

    /// Evaluates the monomials: `(..., variables) → (..., F)`.
    fn evaluate(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.contiguous()?;
        let mut product = x.index_select(&self.columns[0], D::Minus1)?;
        for column in &self.columns[1..] {
            product = (product * x.index_select(column, D::Minus1)?)?;
        }
        product.broadcast_mul(&self.weights.to_dtype(x.dtype())?.to_device(x.device())?)
    }
}

/// Computes `n! / Π (multiplicity!)` of a non-decreasing tuple.
fn multinomial(tuple: &[usize]) -> f64 {
    let mut coefficient = 1.0;
    let mut run = 0;
    for (i, &value) in tuple.iter().enumerate() {
        run = if i > 0 && tuple[i - 1] == value { run + 1 } else { 1 };
        coefficient *= (i + 1) as f64 / run as f64;
    }
    coefficient
}

/// Puts a 1 before each row.
fn ones_before(x: &Tensor) -> Result<Tensor> {
    let ones = x.narrow(D::Minus1, 0, 1)?.ones_like()?;
    Tensor::cat(&[&ones, x], D::Minus1)
}

/// The map `φ(x) = [1, x, vec(xxᵀ)/√2]` with symmetric packing, `F = 1 + D + D(D+1)/2`:
/// `φ(x)·φ(y) = 1 + z + z²/2`, the Taylor expansion of `e^z` up to the second order, which is at
/// least ½.
///
/// Based (Arora et al. 2024, <https://arxiv.org/abs/2402.18668>) has this map, with queries and
/// keys of few dimensions. It takes rows `(.., D)` to features `(.., F)`, which are signed.
#[derive(Clone, Debug)]
pub struct Taylor2 {
    dim: usize,
    squares: Monomials,
}

impl Taylor2 {
    /// `dim` is the head dimension `D`.
    ///
    /// # Errors
    /// If `D` is 0 or `D(D+1)/2` exceeds 16384.
    pub fn new(dim: usize, device: &Device) -> Result<Self> {
        if dim == 0 {
            bail!("feature map taylor2: the head dimension is 0; it must be at least 1");
        }
        Ok(Self { dim, squares: Monomials::new(2, dim, device)? })
    }

    pub(super) fn values(&self, x: &Tensor) -> Result<Tensor> {
        let squares = (self.squares.evaluate(x)? * 0.5f64.sqrt())?;
        Tensor::cat(&[&ones_before(x)?, &squares], D::Minus1)
    }
}

impl FeatureMap for Taylor2 {
    fn input_dim(&self) -> usize {
        self.dim
    }

    fn feature_dim(&self) -> usize {
        1 + self.dim + self.squares.count()
    }

    fn quadratic_form(&self) -> Option<f64> {
        Some(0.5)
    }

    fn features(&self, x: &Tensor) -> Result<Features> {
        Ok(Features::Linear { values: self.values(x)?, log_scale: None })
    }
}

/// The map `φ(x) = [1, x/√n]^{⊗n}` with symmetric packing, `F = C(D+n, n)`:
/// `φ(x)·φ(y) = (1 + z/n)^n`, which is never negative for the even `n` that it takes.
///
/// That goes to `e^z` with growing `n`, which defines the exponential function, with an error of
/// about `e^z z²/2n`. `n` is 2 to 1024, and `F` is at most 16384: heads of 16 dimensions can have
/// `n = 4`, with 4,845 features, and heads of 64 only `n = 2`, with 2,145. It takes rows `(.., D)`
/// to features `(.., F)`, which are signed.
#[derive(Clone, Debug)]
pub struct Limit {
    n: u32,
    dim: usize,
    monomials: Monomials,
}

impl Limit {
    /// `n` is an even power, `dim` the head dimension `D`.
    ///
    /// # Errors
    /// If `n` is odd, zero or above 1024, `C(D+n, n)` exceeds 16384, or f32 does not hold the
    /// coefficient of a feature.
    pub fn new(n: u32, dim: usize, device: &Device) -> Result<Self> {
        if n == 0 || !n.is_multiple_of(2) {
            bail!("feature map limit-{n}: n must be even and at least 2, or the kernel can be negative");
        }
        if n > MAX_POWER {
            bail!("feature map limit-{n}: n must be at most {MAX_POWER}; each feature is a product of so many factors");
        }
        let monomials = Monomials::new(n as usize, dim + 1, device)?;
        // In heads of one or two numbers, a high power has few features and large coefficients.
        let largest = monomials.weights.max_all()?.to_scalar::<f64>()?;
        if largest > f64::from(f32::MAX) {
            bail!(
                "feature map limit-{n}: a feature of heads of {dim} numbers has the coefficient {largest:e}, which f32 does not hold; lower n"
            );
        }
        Ok(Self { n, dim, monomials })
    }
}

impl FeatureMap for Limit {
    fn input_dim(&self) -> usize {
        self.dim
    }

    fn feature_dim(&self) -> usize {
        self.monomials.count()
    }

    /// `(1 + z/2)² = 1 + z + z²/4`.
    fn quadratic_form(&self) -> Option<f64> {
        (self.n == 2).then_some(0.25)
    }

    fn features(&self, x: &Tensor) -> Result<Features> {
        let scaled = (x * f64::from(self.n).powf(-0.5))?;
        Ok(Features::Linear { values: self.monomials.evaluate(&ones_before(&scaled)?)?, log_scale: None })
    }
}

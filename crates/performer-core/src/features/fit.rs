//! Fitting feature maps to the queries and keys of a model: less variance from the same number of
//! features, without training.
//!
//! All of it is exact: the features stay unbiased for `e^{x·y}` up to a factor of the query, which
//! attention divides out. With `x = D^-¼ q`, `y = D^-¼ k` and their [`Moments`]:
//!
//! - **Optimal** (FAVOR++, Likhosherstov et al. 2022, <https://arxiv.org/abs/2205.15317>, theorem
//!   3.2): `φ(x) = (1−4A)^{D/4} exp(A‖ω‖² + √(1−4A) ω·x − ‖x‖²/2)`, with the `A ≤ 0` that minimises
//!   the variance for a given `s = E‖x + y‖²`.
//! - **Dense** (FAVOR#, Likhosherstov et al. 2023, <https://arxiv.org/abs/2302.00787>, theorem
//!   4.2): the form of Optimal in each eigendirection of `E (x+y)(x+y)ᵀ`, with an `A` of its own.
//! - **Centring**: `e^{x·y} = e^{(x−μx)·(y−μy)} e^{μx·y} e^{x·μy − μx·μy}`. The first factor gets
//!   the features and has smaller arguments, the second is a weight of the key, the third belongs
//!   to the query and cancels.
//! - **Balancing**: `x·y = (Gx)·(G⁻ᵀy)` for any invertible G; the symmetric G is chosen that gives
//!   both sides the same second moments, which are their covariances where they are centred.

use candle_core::{DType, Device, Result, Tensor, bail};
use nalgebra::{DMatrix, DVector, SymmetricEigen};

use super::{FeatureMapKind, Fitted};
use crate::projection::input_scale;

/// The first and second moments of scaled queries and keys, for each key head; the query heads of a
/// group count together.
#[derive(Clone, Debug)]
pub struct Moments {
    queries: Vec<Side>,
    keys: Vec<Side>,
}

/// `Side` holds the sums over the rows of queries or of keys.
#[derive(Clone, Debug)]
struct Side {
    count: f64,
    sum: DVector<f64>,
    outer: DMatrix<f64>,
}

impl Side {
    fn new(d: usize) -> Self {
        Self { count: 0.0, sum: DVector::zeros(d), outer: DMatrix::zeros(d, d) }
    }

    /// Adds `(T, D)` rows, already in f64.
    fn add(&mut self, rows: &[f64], d: usize) {
        let rows = DMatrix::from_row_slice(rows.len() / d, d, rows);
        self.count += rows.nrows() as f64;
        self.sum += rows.row_sum_tr();
        self.outer += rows.transpose() * &rows;
    }

    fn mean(&self) -> DVector<f64> {
        &self.sum / self.count
    }

    /// Computes `E (x − μ)(x − μ)ᵀ`.
    fn second_about(&self, mu: &DVector<f64>) -> DMatrix<f64> {
        let mean = self.mean();
        &self.outer / self.count - mu * mean.transpose() - &mean * mu.transpose() + mu * mu.transpose()
    }
}

impl Moments {
    /// Moments of nothing yet, for `heads` key heads of dimension `head_dim`.
    ///
    /// # Errors
    /// If one of them is 0.
    pub fn new(heads: usize, head_dim: usize) -> Result<Self> {
        if heads == 0 || head_dim == 0 {
            bail!("moments: {heads} key heads of dimension {head_dim}; both must be at least 1");
        }
        Ok(Self { queries: vec![Side::new(head_dim); heads], keys: vec![Side::new(head_dim); heads] })
    }

    /// Returns the moments of one key head, counted from 0.
    ///
    /// # Panics
    /// If there is no such head.
    pub fn head(&self, head: usize) -> Self {
        Self { queries: vec![self.queries[head].clone()], keys: vec![self.keys[head].clone()] }
    }

    /// The dimension of the heads.
    pub fn head_dim(&self) -> usize {
        self.keys[0].sum.len()
    }

    /// Adds queries `(B, H, T, D)` and keys `(B, Hkv, T, D)` of a model, as attention gets them.
    ///
    /// # Errors
    /// If they have other heads or dimensions than the moments, or numbers that are not finite. The
    /// moments are then what they were.
    pub fn add(&mut self, q: &Tensor, k: &Tensor) -> Result<()> {
        let (heads, d) = (self.keys.len(), self.keys[0].sum.len());
        let (_, h, _, qd) = q.dims4()?;
        let (_, hkv, _, kd) = k.dims4()?;
        if hkv != heads || h % heads != 0 || qd != d || kd != d {
            bail!("moments of {heads} key heads of {d} were given q {:?} and k {:?}", q.dims(), k.dims());
        }
        let scale = input_scale(d);
        let rows = |x: &Tensor, name: &str| -> Result<Vec<f64>> {
            let rows = (x.to_device(&Device::Cpu)?.to_dtype(DType::F64)? * scale)?.contiguous()?.flatten_all()?;
            let rows = rows.to_vec1::<f64>()?;
            match rows.iter().find(|x| !x.is_finite()) {
                None => Ok(rows),
                Some(x) => bail!("moments: {name} contain {x}; look for what made them infinite or NaN"),
            }
        };
        let group = h / heads;
        let all = (0..heads)
            .map(|head| {
                Ok((rows(&q.narrow(1, head * group, group)?, "queries")?, rows(&k.narrow(1, head, 1)?, "keys")?))
            })
            .collect::<Result<Vec<_>>>()?;
        for (head, (queries, keys)) in all.iter().enumerate() {
            self.queries[head].add(queries, d);
            self.keys[head].add(keys, d);
        }
        Ok(())
    }

    /// Computes the standard deviation of `q·k/√D` about its mean, over independent queries and
    /// keys of each head.
    ///
    /// # Errors
    /// If no queries or no keys have been added.
    pub fn logit_deviation(&self) -> Result<Vec<f64>> {
        self.require_rows()?;
        let pairs = self.queries.iter().zip(&self.keys);
        Ok(pairs
            .map(|(q, k)| {
                let (mq, mk) = (q.mean(), k.mean());
                let (cq, ck) = (q.second_about(&mq), k.second_about(&mk));
                let variance = (&cq * &ck).trace() + (mk.transpose() * &cq * &mk)[0] + (mq.transpose() * &ck * &mq)[0];
                variance.max(0.0).sqrt()
            })
            .collect())
    }

    /// Refuses moments of nothing.
    fn require_rows(&self) -> Result<()> {
        if self.keys.iter().chain(&self.queries).any(|side| side.count < 1.0) {
            bail!("moments: there are no queries and keys to fit features to; add some first");
        }
        Ok(())
    }
}

/// What is fitted, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// [`FeatureMapKind::Optimal`], [`FeatureMapKind::Dense`], or anything else for plain positive
    /// features.
    pub map: FeatureMapKind,
    /// Whether the means are subtracted.
    pub centre: bool,
    /// Whether both sides are given the same second moments, which are their covariances where they
    /// are centred.
    pub balance: bool,
}

impl Options {
    /// Features of `map` for queries and keys as they are, neither centred nor balanced.
    pub fn new(map: FeatureMapKind) -> Self {
        Self { map, centre: false, balance: false }
    }

    /// Sets whether the means are subtracted.
    #[must_use]
    pub fn with_centre(mut self, centre: bool) -> Self {
        self.centre = centre;
        self
    }

    /// Sets whether both sides are given the same second moments, which are their covariances where
    /// they are centred.
    #[must_use]
    pub fn with_balance(mut self, balance: bool) -> Self {
        self.balance = balance;
        self
    }
}

/// Fits features of Ω `(M, D)` to each head of `moments`.
///
/// # Errors
/// If there are no moments, or a head dimension that is not Ω's.
pub fn fit(projection: &Tensor, moments: &Moments, options: Options) -> Result<Fitted> {
    let (m, d) = projection.dims2()?;
    if moments.keys[0].sum.len() != d {
        bail!(
            "moments of head dimension {} do not fit a projection {:?}",
            moments.keys[0].sum.len(),
            projection.dims()
        );
    }
    moments.require_rows()?;
    let omega = matrix(projection)?;
    let heads: Vec<Head> = moments
        .queries
        .iter()
        .zip(&moments.keys)
        .map(|(q, k)| {
            let zero = DVector::zeros(d);
            let (mq, mk) = if options.centre { (q.mean(), k.mean()) } else { (zero.clone(), zero) };
            let (cq, ck) = (q.second_about(&mq), k.second_about(&mk));
            let g = if options.balance { balance(&cq, &ck) } else { DMatrix::identity(d, d) };
            let p = if options.balance { power(&g, -1.0) } else { DMatrix::identity(d, d) };
            // The second moment of x + y, after both sides are balanced and centred, if they are.
            // Where they are centred, dq and dk are zero.
            let (dq, dk) = (&g * (q.mean() - &mq), &p * (k.mean() - &mk));
            let cross = &dq * dk.transpose();
            let spread = &g * cq * &g + &p * ck * &p + &cross + cross.transpose();
            Head::new(&omega, options.map, &spread, [&mq, &mk], [&g, &p])
        })
        .collect();
    stack(&heads, m, d, options.balance, projection)
}

/// Builds `map` for unit normal queries and keys, without moments: one set of features for all
/// heads.
pub(crate) fn unfitted(map: FeatureMapKind, projection: &Tensor) -> Result<Fitted> {
    if map == FeatureMapKind::Learned {
        return Fitted::positive(projection);
    }
    let (m, d) = projection.dims2()?;
    let (zero, one) = (DVector::zeros(d), DMatrix::identity(d, d));
    let spread = &one * (2.0 / (d as f64).sqrt());
    let head = Head::new(&matrix(projection)?, map, &spread, [&zero, &zero], [&one, &one]);
    stack(&[head], m, d, false, projection)
}

/// `Head` holds the parameters of one head; see [`Fitted`].
struct Head {
    queries: DMatrix<f64>,
    keys: DMatrix<f64>,
    log_weights: DVector<f64>,
    g: DMatrix<f64>,
    p: DMatrix<f64>,
}

impl Head {
    /// `spread` is `E (x+y)(x+y)ᵀ` of the two sides after centring at `means` and balancing by `g`
    /// and `p`.
    fn new(
        omega: &DMatrix<f64>,
        map: FeatureMapKind,
        spread: &DMatrix<f64>,
        [mq, mk]: [&DVector<f64>; 2],
        [g, p]: [&DMatrix<f64>; 2],
    ) -> Self {
        let d = omega.ncols();
        // The features are φ(x) = exp(w·x + a − ‖x‖²/2).
        let (w, a) = match map {
            FeatureMapKind::Optimal | FeatureMapKind::Dense => {
                let eigen = if map == FeatureMapKind::Dense {
                    SymmetricEigen::new(spread.clone())
                } else {
                    let mean = spread.trace() / d as f64;
                    SymmetricEigen {
                        eigenvectors: DMatrix::identity(d, d),
                        eigenvalues: DVector::from_element(d, mean),
                    }
                };
                let a = eigen.eigenvalues.map(shrinkage);
                let b = DMatrix::from_diagonal(&a.map(|a| (1.0 - 4.0 * a).sqrt())) * eigen.eigenvectors.transpose();
                let constant = 0.25 * a.map(|a| (1.0 - 4.0 * a).ln()).sum();
                let squares = omega.map(|w| w * w) * &a;
                (omega * b, squares.add_scalar(constant))
            }
            _ => (omega.clone(), DVector::zeros(omega.nrows())),
        };
        let (wg, wp) = (&w * g, &w * p);
        let (gg, pp) = (g * g, p * p);
        let query_shift = (mk + &gg * mq).transpose();
        let key_shift = (mq + &pp * mk).transpose();
        let constant = -0.5 * (g * mq).norm_squared() - 0.5 * (p * mk).norm_squared() - mq.dot(mk);
        let log_weights = (2.0 * a - &wg * mq - &wp * mk).add_scalar(constant);
        let shifted =
            |w: DMatrix<f64>, shift| DMatrix::from_rows(&w.row_iter().map(|row| row + &shift).collect::<Vec<_>>());
        Self {
            queries: shifted(wg, query_shift),
            keys: shifted(wp, key_shift),
            log_weights,
            g: g.clone(),
            p: p.clone(),
        }
    }
}

/// Computes the `A` that minimises the variance in a direction where `E (x+y)²` is `l` (FAVOR#,
/// theorem 4.2; FAVOR++ with `l = s/D`).
fn shrinkage(l: f64) -> f64 {
    let l = l.max(0.0);
    (1.0 - 2.0 * l - ((2.0 * l + 1.0).powi(2) + 8.0 * l).sqrt()) / 16.0
}

/// Computes the symmetric positive G with `G cq G = G⁻¹ ck G⁻¹`: `G²` is the geometric mean of
/// `cq⁻¹` and `ck`.
fn balance(cq: &DMatrix<f64>, ck: &DMatrix<f64>) -> DMatrix<f64> {
    let root = power(cq, 0.5);
    let inner = power(&(&root * ck * &root), 0.5);
    let inverse = power(cq, -0.5);
    power(&(&inverse * inner * &inverse), 0.5)
}

/// Computes `cᵖ` of a symmetric matrix; directions without spread count as having a millionth of
/// the mean.
fn power(c: &DMatrix<f64>, p: f64) -> DMatrix<f64> {
    let eigen = SymmetricEigen::new((c + c.transpose()) * 0.5);
    let floor = (1e-6 * eigen.eigenvalues.mean()).max(1e-12);
    let values = eigen.eigenvalues.map(|l| l.max(floor).powf(p));
    &eigen.eigenvectors * DMatrix::from_diagonal(&values) * eigen.eigenvectors.transpose()
}

/// Returns the numbers of a tensor as a matrix in f64.
fn matrix(t: &Tensor) -> Result<DMatrix<f64>> {
    let (rows, columns) = t.dims2()?;
    let values = t.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
    Ok(DMatrix::from_row_slice(rows, columns, &values))
}

/// Stacks the parameters of heads as tensors of the dtype and device of `like`.
fn stack(heads: &[Head], m: usize, d: usize, balanced: bool, like: &Tensor) -> Result<Fitted> {
    let n = heads.len();
    let tensor = |part: &dyn Fn(&Head) -> Vec<f64>, dims: &[usize]| -> Result<Tensor> {
        let values: Vec<f64> = heads.iter().flat_map(part).collect();
        Tensor::from_vec(values, dims, &Device::Cpu)?.to_dtype(like.dtype())?.to_device(like.device())
    };
    // nalgebra stores matrices by columns.
    let rows = |x: &DMatrix<f64>| x.transpose().as_slice().to_vec();
    let metric = |part: &dyn Fn(&Head) -> Vec<f64>| tensor(part, &[n, d, d]);
    let fitted = Fitted::new(
        tensor(&|h| rows(&h.queries), &[n, m, d])?,
        tensor(&|h| rows(&h.keys), &[n, m, d])?,
        tensor(&|h| h.log_weights.as_slice().to_vec(), &[n, m])?,
    )?;
    if balanced { fitted.with_metrics(metric(&|h| rows(&h.g))?, metric(&|h| rows(&h.p))?) } else { Ok(fitted) }
}

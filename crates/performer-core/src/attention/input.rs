//! Checking and laying out what a caller hands to attention.

use candle_core::{D, DType, Result, Storage, Tensor, bail};

use super::Mask;
use crate::{features::FeatureMap, kernels};

/// Stands for `−∞` in running maxima: low enough to lose to any real log-feature, and finite, so that `−∞ − c` is `−∞`
/// and not NaN.
pub(super) const FLOOR: f64 = -1e37;

/// Inputs in the layout all implementations compute in: heads folded into the batch, `N = B·Hkv`, the `G = H/Hkv` query
/// heads of a group as neighbouring rows, f32 or f64, contiguous, scaled.
pub(super) struct Inputs {
    /// `D^-1/4 q`, shape `(N, Tq, G, D)`.
    pub(super) q: Tensor,
    /// `D^-1/4 k`, shape `(N, Tk, D)`; hidden rows are zero.
    pub(super) k: Tensor,
    /// Shape `(N, Tk, Dv)`; hidden rows are zero.
    pub(super) v: Tensor,
    /// Visible keys as 1 and 0 of the compute type, shape `(N, Tk, 1)`.
    pub(super) keys: Option<Tensor>,
    batch: usize,
    heads: usize,
    dtype: DType,
}

impl Inputs {
    /// Validates and lays out. `causal` demands as many queries as keys.
    pub(super) fn new(q: &Tensor, k: &Tensor, v: &Tensor, mask: &Mask) -> Result<Self> {
        check_shapes(q, k, v, mask)?;
        let (b, h, tq, d) = q.dims4()?;
        let (_, hkv, tk, dv) = v.dims4()?;
        let g = h / hkv;
        let dtype = q.dtype();
        let compute = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let scale = (d as f64).powf(-0.25);
        let lay_out = |t: &Tensor, name: &str| -> Result<Tensor> {
            let t = t.to_dtype(compute)?.contiguous()?;
            check_finite(&t, name)?;
            Ok(t)
        };
        let q = (lay_out(q, "q")? * scale)?.reshape((b * hkv, g, tq, d))?.transpose(1, 2)?.contiguous()?;
        let k = (lay_out(k, "k")? * scale)?.reshape((b * hkv, tk, d))?;
        let v = lay_out(v, "v")?.reshape((b * hkv, tk, dv))?;
        let Some(mask) = mask.keys() else { return Ok(Self { q, k, v, keys: None, batch: b, heads: h, dtype }) };
        let visible = mask.ne(0.0)?.to_dtype(compute)?;
        let keys = visible.unsqueeze(1)?.expand((b, hkv, tk))?.contiguous()?.reshape((b * hkv, tk, 1))?;
        // What a hidden key holds must not reach a feature map: a large one would come back as ∞ · 0.
        let (k, v) = (k.broadcast_mul(&keys)?, v.broadcast_mul(&keys)?);
        Ok(Self { q, k, v, keys: Some(keys), batch: b, heads: h, dtype })
    }

    /// Rows `(N, Tq·G, Dv)` back to `(B, H, Tq, Dv)` in the caller's dtype.
    pub(super) fn output(&self, rows: &Tensor) -> Result<Tensor> {
        let (n, tq, g, _) = self.q.dims4()?;
        let dv = rows.dim(D::Minus1)?;
        rows.reshape((n, tq, g, dv))?.transpose(1, 2)?.reshape((self.batch, self.heads, tq, dv))?.to_dtype(self.dtype)
    }
}

/// `[v, 1]`: the values with a column of ones that turns into the normaliser; rows of hidden keys are zero.
pub(super) fn values_and_one(v: &Tensor, keys: Option<&Tensor>) -> Result<Tensor> {
    let ones = match keys {
        None => &v.narrow(D::Minus1, 0, 1)?.ones_like()?,
        Some(keys) => keys,
    };
    Tensor::cat(&[v, ones], D::Minus1)
}

/// Splits `[num, den]` and divides. A denominator of exactly zero means that no key was visible: the row is zero.
pub(super) fn normalise(num_den: &Tensor) -> Result<Tensor> {
    let dv = num_den.dim(D::Minus1)? - 1;
    let num = num_den.narrow(D::Minus1, 0, dv)?;
    let den = num_den.narrow(D::Minus1, dv, 1)?;
    let empty = den.detach().eq(0.0)?.to_dtype(den.dtype())?;
    num.broadcast_div(&(den + empty)?)
}

/// Quotients, and where all features are positive the logarithms of their denominators.
pub(super) struct Rows {
    /// `(N, T·G, Dv)`.
    pub(super) values: Tensor,
    /// `(N, T·G, 1)`; low but finite where no key is seen.
    pub(super) logs: Option<Tensor>,
}

impl Rows {
    /// `num_den` divided by `e^m`.
    pub(super) fn new(num_den: &Tensor, m: Option<&Tensor>) -> Result<Self> {
        let values = normalise(num_den)?;
        let Some(m) = m else { return Ok(Self { values, logs: None }) };
        let den = num_den.narrow(D::Minus1, num_den.dim(D::Minus1)? - 1, 1)?;
        let empty = den.detach().eq(0.0)?.to_dtype(den.dtype())?;
        let logs = (((den + &empty)?.log()? + m)? + (empty * FLOOR)?)?;
        Ok(Self { values, logs: Some(logs) })
    }
}

pub(super) fn check_shapes(q: &Tensor, k: &Tensor, v: &Tensor, mask: &Mask) -> Result<()> {
    for (name, t) in [("q", q), ("k", k), ("v", v)] {
        if t.rank() != 4 {
            bail!("{name} has shape {:?}; it must be (batch, heads, tokens, head dim)", t.dims());
        }
        if !matches!(t.dtype(), DType::F32 | DType::F64 | DType::F16 | DType::BF16) {
            bail!("{name} has dtype {:?}; it must be f32, f64, f16 or bf16", t.dtype());
        }
        if t.dtype() != q.dtype() {
            bail!("{name} has dtype {:?}; it must have that of q, {:?}", t.dtype(), q.dtype());
        }
    }
    let (b, h, tq, d) = q.dims4()?;
    let (kb, hkv, tk, kd) = k.dims4()?;
    if d == 0 || kd != d {
        bail!("k has shape {:?}; its head dim must be that of q {:?} and at least 1", k.dims(), q.dims());
    }
    if kb != b {
        bail!("k has shape {:?}; its batch must be that of q {:?}", k.dims(), q.dims());
    }
    if hkv == 0 || !h.is_multiple_of(hkv) {
        bail!("k has {hkv} heads, shape {:?}; the {h} heads of q must be a multiple of them", k.dims());
    }
    if h == 0 {
        bail!("q has shape {:?}; its heads must be at least 1", q.dims());
    }
    if v.dims()[..3] != [b, hkv, tk] || v.dims()[3] == 0 {
        bail!(
            "v has shape {:?}; it must be ({b}, {hkv}, {tk}, value dim) as k is {:?}, with a value dim of at least 1",
            v.dims(),
            k.dims()
        );
    }
    if mask.is_causal() && tq != tk {
        bail!(
            "causal attention of {tq} queries over {tk} keys; it needs as many of each (to go on from earlier keys, use extend with a state)"
        );
    }
    if let Some(m) = mask.keys()
        && m.dims() != [b, tk]
    {
        bail!("key mask has shape {:?}; it must be ({b}, {tk}) = (batch, keys)", m.dims());
    }
    Ok(())
}

/// Refuses a `q` of another head dim than that of the feature map.
pub(super) fn check_head_dim(map: &dyn FeatureMap, q: &Tensor) -> Result<()> {
    if q.dim(D::Minus1)? != map.input_dim() {
        bail!(
            "q has shape {:?}; its head dim must be {}, for which the feature map was made",
            q.dims(),
            map.input_dim()
        );
    }
    Ok(())
}

/// Refuses NaN and infinity, on the CPU. Elsewhere this would wait for the device on every call.
fn check_finite(t: &Tensor, name: &str) -> Result<()> {
    let (storage, layout) = t.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => kernels::check_finite(name, storage, layout),
        _ => Ok(()),
    }
}

/// A mask's entries, one after the other.
pub(super) fn visible(mask: &Tensor) -> Result<Vec<bool>> {
    Ok(mask.ne(0.0)?.flatten_all()?.to_vec1::<u8>()?.into_iter().map(|x| x != 0).collect())
}

/// The tensor with contiguous rows.
pub(super) fn rows(x: &Tensor) -> Result<Tensor> {
    if x.dim(D::Minus1)? == 1 || x.stride()[3] == 1 { Ok(x.clone()) } else { x.contiguous() }
}

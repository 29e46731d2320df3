//! Which keys a query may see.

use candle_core::{DType, Device, Result, Tensor, bail};

/// Which keys a query may see. The default shows every key to every query.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// use performer_core::Mask;
///
/// # fn main() -> candle_core::Result<()> {
/// // Two sequences of three and two tokens, the second padded: 1 where a token is real.
/// let attention_mask = Tensor::new(&[[1u32, 1, 1], [1, 1, 0]], &Device::Cpu)?;
/// let mask = Mask::causal().with_keys(&attention_mask)?;
/// assert!(mask.is_causal());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Mask {
    causal: bool,
    /// 1 where a key is visible and 0 where it is hidden, u8, `(B, Tk)` or `(1, Tk)`.
    visible: Option<Tensor>,
    /// An upper bound on the number of neighbouring keys that are hidden in one sequence.
    most_hidden_in_a_row: usize,
}

impl Mask {
    /// Every query sees every key: self-attention in an encoder, or cross-attention.
    pub fn full() -> Self {
        Self::default()
    }

    /// Query `t` sees keys `0..=t`; needs as many queries as keys.
    pub fn causal() -> Self {
        Self { causal: true, ..Self::default() }
    }

    /// Hides padding as well, as one of the masks in use elsewhere describes it:
    ///
    /// - numbers of any type that are 1 where a key is visible and 0 where it is hidden, such as a
    ///   tokenizer's attention mask, or the u8 tensors of Candle's comparisons;
    /// - an additive mask: floats that are 0 where a key is visible, and −∞ or the lowest finite
    ///   number of their type where it is hidden.
    ///
    /// Hidden keys and values may hold any finite numbers. A row that sees no key at all yields
    /// zeros. The numbers are read once, here; on a GPU this waits for the device, so make the mask
    /// once for a batch and not in every layer.
    ///
    /// # Shapes
    /// `(B, Tk)`, `(Tk)`, or `(B, 1, Tk)` and `(B, 1, 1, Tk)` as they are broadcast over heads and
    /// queries; `B` may be 1 for all sequences of a batch.
    ///
    /// # Errors
    /// If the shape is another one, or the numbers are those of neither kind of mask. Floats that
    /// are all 0 are refused too, since they hide every key in one kind and none in the other: give
    /// an additive mask to [`Self::with_key_bias`] where a batch may be without padding.
    pub fn with_keys(mut self, keys: &Tensor) -> Result<Self> {
        let visible = visible(&rows(keys)?)?;
        self.most_hidden_in_a_row = most_hidden_in_a_row(&visible.to_vec2()?);
        self.visible = Some(visible.to_device(keys.device())?);
        Ok(self)
    }

    /// Hides padding as an additive mask describes it: floats that are 0 where a key is visible,
    /// and −∞ or the lowest finite number of their type where it is hidden. A mask of zeros, which
    /// a batch without padding has, hides no key. Shapes are those of [`Self::with_keys`].
    ///
    /// # Errors
    /// If the shape is another one, or a number is none of these.
    pub fn with_key_bias(self, bias: &Tensor) -> Result<Self> {
        let dtype = bias.dtype();
        if !dtype.is_float() {
            bail!("key bias has dtype {dtype:?}; it must be of f16, bf16, f32 or f64, 0 or -inf for each key");
        }
        let numbers = numbers(bias)?;
        if numbers.contains(&1.0) {
            bail!("key bias holds 1; it must hold 0 for visible and -inf for hidden keys (with_keys takes 0 and 1)");
        }
        let shows_all = numbers.iter().all(|&x| x == 0.0);
        if shows_all { self.with_keys(&bias.ones_like()?) } else { self.with_keys(bias) }
    }

    /// Whether query `t` is kept from keys after `t`.
    pub fn is_causal(&self) -> bool {
        self.causal
    }

    /// The keys that may be seen, if some are hidden: u8, 1 for visible and 0 for hidden, of shape
    /// `(B, Tk)`, or `(1, Tk)` for all sequences alike.
    pub fn visible(&self) -> Option<&Tensor> {
        self.visible.as_ref()
    }

    /// An upper bound on the number of neighbouring keys that are hidden in one sequence; 0 where
    /// none is hidden.
    pub(super) fn most_hidden_in_a_row(&self) -> usize {
        self.most_hidden_in_a_row
    }

    /// Refuses a mask that does not fit `(batch, keys)`.
    pub(crate) fn check_keys(&self, batch: usize, keys: usize) -> Result<()> {
        if let Some(visible) = &self.visible
            && (visible.dim(1)? != keys || ![1, batch].contains(&visible.dim(0)?))
        {
            bail!("key mask has shape {:?}; it must be ({batch}, {keys}) = (batch, keys)", visible.dims());
        }
        Ok(())
    }

    /// [`Self::visible`] with one row for each of `batch` sequences, contiguous, on `device`.
    pub(crate) fn visible_of(&self, batch: usize, device: &Device) -> Result<Option<Tensor>> {
        let expand = |visible: &Tensor| -> Result<Tensor> {
            visible.expand((batch, visible.dim(1)?))?.contiguous()?.to_device(device)
        };
        self.visible.as_ref().map(expand).transpose()
    }

    /// The entries of [`Self::visible_of`] one after the other, for kernels on the CPU.
    pub(crate) fn visible_flags(&self, batch: usize) -> Result<Option<Vec<bool>>> {
        let flags = |visible: Tensor| -> Result<Vec<bool>> {
            Ok(visible.flatten_all()?.to_vec1::<u8>()?.into_iter().map(|x| x != 0).collect())
        };
        self.visible_of(batch, &Device::Cpu)?.map(flags).transpose()
    }

    /// Returns this mask over the keys `start..start + count` only.
    pub(crate) fn of_keys(&self, start: usize, count: usize) -> Result<Self> {
        let visible = self.visible.as_ref().map(|visible| visible.narrow(1, start, count)).transpose()?;
        Ok(Self { visible, ..self.clone() })
    }
}

/// The most hidden keys that a sequence has one after the other; a row of `visible` is a sequence.
fn most_hidden_in_a_row(visible: &[Vec<u8>]) -> usize {
    let of_row = |row: &Vec<u8>| row.split(|&is_visible| is_visible != 0).map(<[u8]>::len).max().unwrap_or(0);
    visible.iter().map(of_row).max().unwrap_or(0)
}

/// Brings a mask of keys into rows `(B, Tk)`.
fn rows(keys: &Tensor) -> Result<Tensor> {
    match *keys.dims() {
        [tokens] => keys.reshape((1, tokens)),
        [_, _] => Ok(keys.clone()),
        [batch, 1, tokens] | [batch, 1, 1, tokens] => keys.reshape((batch, tokens)),
        _ => bail!(
            "key mask has shape {:?}; it must be (batch, keys), (keys), (batch, 1, keys) or (batch, 1, 1, keys)",
            keys.dims()
        ),
    }
}

/// The numbers of a mask.
fn numbers(mask: &Tensor) -> Result<Vec<f64>> {
    // A GPU of Apple has no f64.
    mask.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// Reads a mask of either kind, `(B, Tk)`: u8, 1 where a key is visible.
fn visible(mask: &Tensor) -> Result<Tensor> {
    let dtype = mask.dtype();
    let lowest = match dtype {
        DType::F64 => f64::MIN,
        DType::F32 => f64::from(f32::MIN),
        DType::F16 => half::f16::MIN.to_f64(),
        DType::BF16 => half::bf16::MIN.to_f64(),
        DType::U8 | DType::U32 | DType::I16 | DType::I32 | DType::I64 => 0.0,
        other => bail!("key mask has dtype {other:?}; it must be of integers, f16, bf16, f32 or f64"),
    };
    let numbers = numbers(mask)?;
    let of = |visible: &dyn Fn(f64) -> bool| {
        let visible: Vec<u8> = numbers.iter().map(|&x| visible(x).into()).collect();
        Tensor::from_vec(visible, mask.shape(), &Device::Cpu)
    };
    let hides = |x: f64| x == f64::NEG_INFINITY || x == lowest;
    if dtype.is_float() && !numbers.is_empty() && numbers.iter().all(|&x| x == 0.0) {
        bail!(
            "key mask has dtype {dtype:?} and is 0 everywhere, which hides every key as a mask of 0 and 1 and none as \
             an additive one; give 0 and 1 as integers, or an additive mask to Mask::with_key_bias"
        );
    }
    if numbers.iter().all(|&x| x == 0.0 || x == 1.0) {
        return of(&|x| x == 1.0);
    }
    if dtype.is_float() && numbers.iter().all(|&x| x == 0.0 || hides(x)) {
        return of(&|x| x == 0.0);
    }
    let fits = |x: f64| x == 0.0 || x == 1.0 || (dtype.is_float() && hides(x));
    let odd = numbers.iter().position(|&x| !fits(x));
    let columns = mask.dim(1)?.max(1);
    match odd {
        Some(at) => bail!(
            "key mask holds {} at [{}, {}]; it must hold 1 for visible and 0 for hidden keys, or floats of 0 for \
             visible and -inf for hidden ones",
            numbers[at],
            at / columns,
            at % columns
        ),
        None => bail!(
            "key mask holds both 1 and -inf; it must hold 1 for visible and 0 for hidden keys, or floats of 0 for \
             visible and -inf for hidden ones"
        ),
    }
}

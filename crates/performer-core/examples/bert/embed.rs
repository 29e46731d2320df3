//! This module computes sentence embeddings: the mean of an encoder's hidden states over real
//! tokens, normalised.

use candle_core::{DType, Device, Result, Tensor};

/// The number of sentences in a batch.
pub(crate) const ROWS: usize = 32;

/// An `Encoder` maps token ids, token types and mask, `(B, T)` each, to hidden states `(B, T, E)`.
pub(crate) type Encoder<'a> = &'a dyn Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;

/// Computes the embeddings of tokenized sentences, which are unit vectors of width `E`. Batches are
/// padded to their longest sentence.
pub(crate) fn embed(encoder: Encoder, sentences: &[Vec<u32>], pad: u32, device: &Device) -> Result<Vec<Vec<f32>>> {
    let mut embeddings = Vec::new();
    for batch in sentences.chunks(ROWS) {
        let (ids, mask) = padded(batch, pad, device)?;
        let hidden = encoder(&ids, &ids.zeros_like()?, &mask)?;
        embeddings.extend(pool(&hidden, &mask)?.to_vec2()?);
    }
    Ok(embeddings)
}

/// Returns ids `(B, T)` and their mask, which is 1 where a token is real.
pub(crate) fn padded(sentences: &[Vec<u32>], pad: u32, device: &Device) -> Result<(Tensor, Tensor)> {
    let longest = sentences.iter().map(Vec::len).max().unwrap_or(0);
    let rows = |f: &dyn Fn(Option<&u32>) -> u32| {
        let numbers: Vec<u32> = sentences.iter().flat_map(|s| (0..longest).map(|t| f(s.get(t)))).collect();
        Tensor::from_vec(numbers, (sentences.len(), longest), device)
    };
    Ok((rows(&|id| id.copied().unwrap_or(pad))?, rows(&|id| id.is_some().into())?))
}

/// Computes the mean of `hidden` `(B, T, E)` where `mask` `(B, T)` is 1, at unit length: `(B, E)`.
pub(crate) fn pool(hidden: &Tensor, mask: &Tensor) -> Result<Tensor> {
    let mask = mask.to_dtype(DType::F32)?.unsqueeze(2)?;
    // The sum has the direction of the mean.
    let sum = hidden.broadcast_mul(&mask)?.sum(1)?;
    sum.broadcast_div(&sum.sqr()?.sum_keepdim(1)?.sqrt()?)
}

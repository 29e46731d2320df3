//! Ranks that fail together: what one rank cannot do, or has otherwise than the others, is an error
//! of all of them, with one text.

use std::fmt;

use crate::{Ranks, Result};

/// A `Disagreement` is the error that all ranks return when one of them failed or differs: it names
/// that rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disagreement {
    /// The lowest rank that failed, or the lowest that differs from rank 0.
    pub rank: usize,
    /// The number of ranks.
    pub size: usize,
    /// What is wrong there.
    pub text: String,
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}: {}", self.rank, self.size, self.text)
    }
}

impl std::error::Error for Disagreement {}

/// Returns the bytes of all ranks, of any lengths, in the order of ranks.
///
/// # Errors
/// If a rank does not take part before the deadline.
pub fn gather(ranks: &dyn Ranks, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
    let length = |bytes: Vec<u8>| bytes.try_into().map_or(0, usize::from_le_bytes);
    let lengths: Vec<usize> = ranks.all_gather(&bytes.len().to_le_bytes())?.into_iter().map(length).collect();
    let mut padded = bytes.to_vec();
    padded.resize(lengths.iter().copied().max().unwrap_or(0), 0);
    let mut parts = ranks.all_gather(&padded)?;
    parts.iter_mut().zip(lengths).for_each(|(part, length)| part.truncate(length));
    Ok(parts)
}

fn gather_texts(ranks: &dyn Ranks, text: &str) -> Result<Vec<String>> {
    Ok(gather(ranks, text.as_bytes())?.iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).collect())
}

/// Waits for the outcome of all ranks: `failure` is why this one failed, if it did. Returns the
/// lowest rank that failed, so that all of them stop and say the same.
///
/// # Errors
/// If a rank does not take part before the deadline.
pub fn agree(ranks: &dyn Ranks, failure: Option<&str>) -> Result<Option<Disagreement>> {
    if ranks.size() == 1 {
        return Ok(failure.map(|text| Disagreement { rank: 0, size: 1, text: text.into() }));
    }
    // A mark before the text tells a failure without words from none.
    let texts = gather_texts(ranks, &failure.map(|text| format!("!{text}")).unwrap_or_default())?;
    let failed = texts.iter().enumerate().find_map(|(rank, text)| Some((rank, text.strip_prefix('!')?)));
    Ok(failed.map(|(rank, text)| Disagreement { rank, size: ranks.size(), text: text.into() }))
}

/// Compares the texts of all ranks with that of rank 0 and returns the lowest rank whose text is
/// another. `differs(text of rank 0, text of that rank)` makes the message.
///
/// # Errors
/// If a rank does not take part before the deadline.
pub fn agree_on(ranks: &dyn Ranks, text: &str, differs: impl Fn(&str, &str) -> String) -> Result<Option<Disagreement>> {
    let texts = gather_texts(ranks, text)?;
    let other = texts.iter().position(|text| *text != texts[0]);
    Ok(other.map(|rank| Disagreement { rank, size: ranks.size(), text: differs(&texts[0], &texts[rank]) }))
}

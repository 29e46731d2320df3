//! This module names the tokens at the borders of a document.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// `Borders` names the tokens that a model expects at the borders of a document. At least one of
/// `begin` and `end` is given.
///
/// Models trained here, and GPT-2, use one token that stands between documents: `end`. Llama's
/// family begins each document with the token `begin`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Borders {
    /// The token before every document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub begin: Option<u32>,
    /// The token after every document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<u32>,
    /// Other tokens by which a model ends its text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<u32>,
}

impl Borders {
    /// Makes the borders of a model with one token between documents.
    pub fn between(end: u32) -> Self {
        Self { end: Some(end), ..Self::default() }
    }

    /// Makes the borders of a model that begins every document with a token.
    pub fn beginning(begin: u32) -> Self {
        Self { begin: Some(begin), ..Self::default() }
    }

    /// Whether a generated text ends at this token.
    pub fn is_end(&self, token: u32) -> bool {
        self.begin == Some(token) || self.end == Some(token) || self.stop.contains(&token)
    }

    /// Refuses tokens beyond a vocabulary, and borders without `begin` and `end`.
    ///
    /// # Errors
    /// If either holds; the message names the token.
    pub fn validate(&self, vocab_size: usize) -> Result<()> {
        ensure!(self.begin.or(self.end).is_some(), "borders: begin or end must be given");
        for &token in self.begin.iter().chain(&self.end).chain(&self.stop) {
            ensure!(
                (token as usize) < vocab_size,
                "borders: token {token} lies beyond the vocabulary of {vocab_size} tokens"
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn borders_are_checked() {
        let both = Borders { begin: Some(1), end: Some(2), stop: vec![3] };
        assert!(both.is_end(1) && both.is_end(2) && both.is_end(3) && !both.is_end(0));
        both.validate(4).unwrap();
        assert!(both.validate(3).unwrap_err().to_string().contains("token 3"));
        assert!(Borders::default().validate(3).is_err());
    }
}

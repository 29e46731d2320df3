//! Parts of a multi-head layer around its attention, each of which may be there or not.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Parts that a [`MultiHeadAttention`](crate::MultiHeadAttention) may have around any attention.
/// None is there unless it is asked for. [`MultiHeadAttention`](crate::MultiHeadAttention) says what
/// each computes and which weights it has.
///
/// # Example
/// ```
/// use performer_core::LayerParts;
///
/// let parts = LayerParts { gate: true, convolution: true, ..LayerParts::default() };
/// assert_eq!(parts.to_string(), "gate,conv");
/// assert!(LayerParts::default().is_empty());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LayerParts {
    /// `gate`: forget gates, which the layer computes from its input for
    /// [`Inputs::gates`](super::Inputs::gates).
    #[serde(skip_serializing_if = "is_missing")]
    pub gate: bool,
    /// `conv`: short causal convolutions of projected queries, keys and values.
    #[serde(skip_serializing_if = "is_missing")]
    pub convolution: bool,
    /// `output-gate`: gates by which the outputs of heads are multiplied.
    #[serde(skip_serializing_if = "is_missing")]
    pub output_gate: bool,
    /// `output-norm`: an RMS norm of the output of each head.
    #[serde(skip_serializing_if = "is_missing")]
    pub output_norm: bool,
}

/// Whether a part is not there, so that it is left out of JSON.
fn is_missing(part: &bool) -> bool {
    !part
}

impl LayerParts {
    /// Whether no part is there.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The part of a name, as the text of an attention has it among its settings.
    pub(super) fn by_name(&mut self, name: &str) -> Option<&mut bool> {
        match name {
            "gate" => Some(&mut self.gate),
            "conv" => Some(&mut self.convolution),
            "output-gate" => Some(&mut self.output_gate),
            "output-norm" => Some(&mut self.output_norm),
            _ => None,
        }
    }
}

/// The names of the parts that are there, such as `gate,conv`, in the order of the fields.
impl fmt::Display for LayerParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = *self;
        let names = ["gate", "conv", "output-gate", "output-norm"];
        let there: Vec<&str> = names.into_iter().filter(|name| parts.by_name(name).is_some_and(|part| *part)).collect();
        f.write_str(&there.join(","))
    }
}

//! Parts of a multi-head layer around its attention, each of which may be there or not.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Parts that a [`MultiHeadAttention`](crate::MultiHeadAttention) may have around any attention,
/// and the dimension of queries and keys. None is there unless it is asked for.
/// [`MultiHeadAttention`](crate::MultiHeadAttention) says what each computes and which weights it
/// has.
///
/// # Example
/// ```
/// use performer_core::LayerParts;
///
/// let parts = LayerParts::default().with_gate(true).with_convolution(true);
/// assert_eq!(parts.to_string(), "gate,conv");
/// assert!(LayerParts::default().is_empty());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
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
    /// `mup-scale`: logits `q·k/Dk` in place of `q·k/√Dk`, for queries and keys of dimension Dk.
    #[serde(skip_serializing_if = "is_missing")]
    pub mup_scale: bool,
    /// `key-dim=16`: the dimension of the queries and keys of a head, where it is not that of its
    /// values. It decides how many features a polynomial map such as
    /// [`Taylor2`](crate::features::FeatureMapKind::Taylor2) has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_dim: Option<usize>,
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

    /// Sets whether the layer has forget gates.
    #[must_use]
    pub const fn with_gate(mut self, gate: bool) -> Self {
        self.gate = gate;
        self
    }

    /// Sets whether the layer has short convolutions.
    #[must_use]
    pub const fn with_convolution(mut self, convolution: bool) -> Self {
        self.convolution = convolution;
        self
    }

    /// Sets whether the layer has output gates.
    #[must_use]
    pub const fn with_output_gate(mut self, output_gate: bool) -> Self {
        self.output_gate = output_gate;
        self
    }

    /// Sets whether the layer has a norm of each head's output.
    #[must_use]
    pub const fn with_output_norm(mut self, output_norm: bool) -> Self {
        self.output_norm = output_norm;
        self
    }

    /// Sets whether logits are divided by the dimension of queries and keys in place of its square
    /// root.
    #[must_use]
    pub const fn with_mup_scale(mut self, mup_scale: bool) -> Self {
        self.mup_scale = mup_scale;
        self
    }

    /// Sets the dimension of the queries and keys of a head; `None` is that of its values.
    #[must_use]
    pub const fn with_key_dim(mut self, key_dim: Option<usize>) -> Self {
        self.key_dim = key_dim;
        self
    }

    /// The key of [`Self::key_dim`] in the text of an attention.
    pub(super) const KEY_DIM: &str = "key-dim";

    /// The names of all parts that are there or not, in the order of the fields.
    pub(super) const NAMES: [&str; 5] = ["gate", "conv", "output-gate", "output-norm", "mup-scale"];

    /// The part of a name, as the text of an attention has it among its settings.
    pub(super) fn by_name(&mut self, name: &str) -> Option<&mut bool> {
        match name {
            "gate" => Some(&mut self.gate),
            "conv" => Some(&mut self.convolution),
            "output-gate" => Some(&mut self.output_gate),
            "output-norm" => Some(&mut self.output_norm),
            "mup-scale" => Some(&mut self.mup_scale),
            _ => None,
        }
    }
}

/// The parts that are there, such as `gate,conv,key-dim=16`, in the order of the fields.
impl fmt::Display for LayerParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = *self;
        let named = Self::NAMES.into_iter().filter(|name| parts.by_name(name).is_some_and(|part| *part));
        let key_dim = self.key_dim.map(|dim| format!("{}={dim}", Self::KEY_DIM));
        let there: Vec<String> = named.map(str::to_owned).chain(key_dim).collect();
        f.write_str(&there.join(","))
    }
}

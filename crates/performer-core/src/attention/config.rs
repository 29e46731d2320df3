//! Attentions by their settings, which can be saved and built. How they are read and shown as text
//! is in `text.rs`.

use candle_core::{DType, Device, Result, bail};
use serde::{Deserialize, Deserializer, Serialize};

use super::{Attention, ByHead, Favor, FavorConfig, LayerParts, Softmax, Windowed, none::NoAttention};
use crate::{features::Constant, projection::derive_seed};

/// An attention by its settings, as a configuration file or a command line gives it.
///
/// # Example
/// ```
/// use candle_core::{DType, Device};
/// use performer_core::AttentionConfig;
///
/// # fn main() -> candle_core::Result<()> {
/// let config: AttentionConfig = "favor:m=64,window=32".parse().map_err(candle_core::Error::msg)?;
/// assert_eq!(config.to_string(), "favor:m=64,window=32");
/// // For heads of dimension 16, with random features from seed 42.
/// let attention = config.build(16, 42, DType::F32, &Device::Cpu)?;
/// assert_eq!(attention.buffers()[0].1.dims(), [64, 16]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
#[non_exhaustive]
pub enum AttentionConfig {
    /// Exact softmax attention.
    #[serde(deserialize_with = "no_settings")]
    Softmax,
    /// Exact softmax attention to the last tokens and the sinks, and to nothing else.
    SoftmaxWindow {
        /// Tokens that a query sees, its own among them.
        window: usize,
        /// Tokens at the beginning that every query sees too; see [`Softmax::with_sinks`].
        #[serde(default, skip_serializing_if = "is_zero")]
        sinks: usize,
    },
    /// Linear attention through feature maps.
    Favor(FavorConfig),
    /// Exact attention to the last tokens and the sinks, linear attention to the others.
    Windowed {
        /// Tokens of exact attention, the query's own among them.
        window: usize,
        /// Tokens at the beginning to which attention is exact too; see [`Windowed::with_sinks`].
        #[serde(default, skip_serializing_if = "is_zero")]
        sinks: usize,
        /// Attention to the others.
        far: FavorConfig,
    },
    /// Attention in a layer with further parts. The parts belong to the layer, so [`Self::build`]
    /// makes the attention inside alone, and [`Self::parts`] says what the layer puts around it.
    Equipped {
        /// The parts, at least one.
        parts: LayerParts,
        /// The attention, which has no parts of its own.
        of: Box<AttentionConfig>,
    },
    /// The heads divided equally among several attentions, in order; see [`ByHead`].
    ByHead {
        /// At least two attentions, which have no parts of their own.
        of: Vec<AttentionConfig>,
    },
    /// Means of the values that the mask shows, all of one weight: attention without queries, keys
    /// and features, in linear time and with a state of constant size. It is the control of feature
    /// maps, and with a gate, that of gated ones.
    #[serde(deserialize_with = "no_settings")]
    Uniform,
    /// Outputs of zero: the control without attention.
    #[serde(deserialize_with = "no_settings")]
    None,
}

impl AttentionConfig {
    /// The name of this kind in JSON, such as `softmax`, `favor` or `windowed`; it is stable.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Softmax => "softmax",
            Self::SoftmaxWindow { .. } => "softmax-window",
            Self::Favor(_) => "favor",
            Self::Windowed { .. } => "windowed",
            Self::Equipped { .. } => "equipped",
            Self::ByHead { .. } => "by-head",
            Self::Uniform => "uniform",
            Self::None => "none",
        }
    }

    /// The attentions that the heads are divided among, without the parts of the layer. Where all
    /// heads have the same attention, it is that one alone.
    pub fn by_head(&self) -> &[Self] {
        match self.without_parts() {
            Self::ByHead { of } => of,
            one => std::slice::from_ref(one),
        }
    }

    /// Linear attention in it, if any: the first, where heads differ ([`Self::by_head`] has all).
    pub fn favor(&self) -> Option<&FavorConfig> {
        match self {
            Self::Softmax | Self::SoftmaxWindow { .. } | Self::Uniform | Self::None => None,
            Self::Favor(favor) | Self::Windowed { far: favor, .. } => Some(favor),
            Self::Equipped { of, .. } => of.favor(),
            Self::ByHead { of } => of.iter().find_map(Self::favor),
        }
    }

    /// The parts that the layer around the attention is to have.
    pub fn parts(&self) -> LayerParts {
        match self {
            Self::Equipped { parts, .. } => *parts,
            _ => LayerParts::default(),
        }
    }

    /// The attention without the parts of its layer.
    pub fn without_parts(&self) -> &Self {
        match self {
            Self::Equipped { of, .. } => of,
            _ => self,
        }
    }

    /// Whether the attention is to be given forget gates.
    pub fn is_gated(&self) -> bool {
        self.parts().gate
    }

    /// Whether this attention needs a causal mask: it has forget gates, or a window in some heads.
    pub fn needs_causal_mask(&self) -> bool {
        self.is_gated() || self.by_head().iter().any(|one| one.window().is_some())
    }

    /// Makes the attention for heads of dimension `head_dim`, its random features drawn from
    /// `seed`. Where its [parts](Self::parts) name a dimension of queries and keys, its features
    /// are for that one.
    ///
    /// The parts themselves are those of a layer, and are not made here: `favor-gated` gives plain
    /// FAVOR, to which a layer with [these parts](crate::MultiHeadConfig::with_parts) gives gates.
    ///
    /// # Errors
    /// As [`Favor::new`], [`Windowed::new`] and [`Softmax::with_window`]; if parts are around
    /// parts, or around the attention of some heads; and if heads are divided among fewer than two
    /// attentions, or twice.
    pub fn build(&self, head_dim: usize, seed: u64, dtype: DType, device: &Device) -> Result<Box<dyn Attention>> {
        let favor = |config: &FavorConfig| Favor::new(config, head_dim, seed, dtype, device);
        Ok(match self {
            Self::Softmax => Box::new(Softmax::new()),
            Self::SoftmaxWindow { window, sinks } => Box::new(Softmax::new().with_window(*window)?.with_sinks(*sinks)?),
            Self::Favor(config) => Box::new(favor(config)?),
            Self::Windowed { window, sinks, far } => Box::new(Windowed::new(*window, favor(far)?)?.with_sinks(*sinks)?),
            Self::Equipped { parts, of } if !of.parts().is_empty() => {
                bail!("attention: {parts} is around {of}, which has parts already; put all parts in one place")
            }
            Self::Equipped { parts, of } => of.build(parts.key_dim.unwrap_or(head_dim), seed, dtype, device)?,
            Self::ByHead { of } => {
                if of.len() < 2 {
                    bail!(
                        "attention: heads are divided among {} attentions; give at least two, or one for all",
                        of.len()
                    );
                }
                if let Some(one) = of.iter().find(|one| !one.parts().is_empty() || one.by_head().len() > 1) {
                    bail!(
                        "attention: {one} is of some heads; its parts belong to the layer, and heads are divided once"
                    );
                }
                let build = |(n, one): (usize, &Self)| one.build(head_dim, derive_seed(seed, n as u64), dtype, device);
                Box::new(ByHead::new(of.iter().enumerate().map(build).collect::<Result<_>>()?)?)
            }
            Self::Uniform => Box::new(Favor::with_map(Box::new(Constant::new(head_dim)))?),
            Self::None => Box::new(NoAttention),
        })
    }

    /// Tokens of exact attention, where they are limited, and the same in all heads.
    pub fn window(&self) -> Option<usize> {
        match self {
            Self::SoftmaxWindow { window, .. } | Self::Windowed { window, .. } => Some(*window),
            Self::Softmax | Self::Favor(_) | Self::Uniform | Self::None => None,
            Self::Equipped { of, .. } => of.window(),
            Self::ByHead { of } => {
                of.first()?.window().filter(|&window| of.iter().all(|one| one.window() == Some(window)))
            }
        }
    }

    /// Tokens at the beginning of a sequence that are seen exactly beside a window, by all heads.
    pub fn sinks(&self) -> usize {
        match self {
            Self::SoftmaxWindow { sinks, .. } | Self::Windowed { sinks, .. } => *sinks,
            Self::Softmax | Self::Favor(_) | Self::Uniform | Self::None => 0,
            Self::Equipped { of, .. } => of.sinks(),
            Self::ByHead { of } => of.iter().map(Self::sinks).min().unwrap_or(0),
        }
    }

    /// Whether a decoding state of it grows with every token, as exact attention to all of them
    /// needs.
    pub fn state_grows(&self) -> bool {
        match self {
            Self::Softmax => true,
            Self::SoftmaxWindow { .. } | Self::Favor(_) | Self::Windowed { .. } | Self::Uniform | Self::None => false,
            Self::Equipped { of, .. } => of.state_grows(),
            Self::ByHead { of } => of.iter().any(Self::state_grows),
        }
    }

    /// The control of linear attention, without its features: the window and the sinks alone where
    /// there is a window, else means of the values ([`Self::Uniform`]), in a layer with the same
    /// parts. It has the same weights in a layer, so a trained model can be measured with it.
    /// `None` where there is no linear attention to leave out.
    pub fn features_off(&self) -> Option<Self> {
        match self {
            Self::Softmax | Self::SoftmaxWindow { .. } | Self::Uniform | Self::None => None,
            Self::Favor(_) => Some(Self::Uniform),
            Self::Windowed { window, sinks, .. } => Some(Self::SoftmaxWindow { window: *window, sinks: *sinks }),
            Self::Equipped { parts, of } => Some(Self::Equipped { parts: *parts, of: Box::new(of.features_off()?) }),
            Self::ByHead { of } => {
                let any = of.iter().any(|one| one.features_off().is_some());
                let off = |one: &Self| one.features_off().unwrap_or_else(|| one.clone());
                any.then(|| Self::ByHead { of: of.iter().map(off).collect() })
            }
        }
    }
}

/// Reads a kind without settings, and refuses any: serde would pass over them.
fn no_settings<'de, D: Deserializer<'de>>(json: D) -> std::result::Result<(), D::Error> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Nothing {}
    Nothing::deserialize(json).map(|Nothing {}| ())
}

/// Whether a setting has its default, and is left out of JSON.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(n: &usize) -> bool {
    *n == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Settings survive JSON, and the JSON of attentions without parts is that of earlier versions.
    #[test]
    fn attention_survives_json() {
        for text in [
            "softmax",
            "softmax:window=32,gate",
            "softmax:window=32,sinks=4,gate",
            "favor:m=64,window=32,gate,output-norm",
            "favor:m=64,window=32,sinks=4",
            "uniform:gate",
            "none",
            "softmax:window=8|favor:m=16,gate",
        ] {
            let config: AttentionConfig = text.parse().unwrap();
            let json = serde_json::to_string(&config).unwrap();
            assert_eq!(serde_json::from_str::<AttentionConfig>(&json).unwrap(), config, "{json}");
        }
        let json = |text: &str| serde_json::to_string(&text.parse::<AttentionConfig>().unwrap()).unwrap();
        assert_eq!(json("softmax"), r#"{"kind":"softmax"}"#);
        assert_eq!(json("softmax:window=32"), r#"{"kind":"softmax-window","window":32}"#);
        assert_eq!(json("softmax:conv"), r#"{"kind":"equipped","parts":{"convolution":true},"of":{"kind":"softmax"}}"#);
        // A setting that is unknown, or belongs to another kind, is not passed over.
        for unknown in [
            r#"{"kind":"equipped","parts":{"new":true},"of":{"kind":"softmax"}}"#,
            r#"{"kind":"softmax","window":2}"#,
            r#"{"kind":"softmax-window","window":40,"sink":4}"#,
            r#"{"kind":"uniform","features":8}"#,
            r#"{"kind":"none","parts":{}}"#,
            r#"{"kind":"favor","features":8,"window":4}"#,
            r#"{"kind":"by-head","of":[],"heads":2}"#,
        ] {
            let error = serde_json::from_str::<AttentionConfig>(unknown).expect_err(unknown).to_string();
            assert!(error.contains("unknown field"), "{unknown}: {error}");
        }
    }

    /// Parts belong to one layer, so that they are said in one place.
    #[test]
    fn parts_are_not_nested() {
        let inner: AttentionConfig = "softmax:gate".parse().unwrap();
        let parts = LayerParts::default().with_convolution(true);
        let nested = AttentionConfig::Equipped { parts, of: Box::new(inner) };
        let error = nested.build(8, 1, DType::F32, &Device::Cpu).unwrap_err().to_string();
        assert!(error.contains("conv is around softmax:gate"), "{error}");
    }

    /// Heads are divided once, and each group has features of its own.
    #[test]
    fn groups_of_heads_are_not_nested() {
        let build = |of: &[&str]| {
            let of = of.iter().map(|text| text.parse().unwrap()).collect();
            AttentionConfig::ByHead { of }.build(8, 1, DType::F32, &Device::Cpu)
        };
        for nested in ["softmax|favor", "favor:gate"] {
            let error = build(&["softmax", nested]).unwrap_err().to_string();
            assert!(error.contains("heads are divided once"), "{error}");
        }
        let buffers = build(&["favor:m=16", "favor:m=16"]).unwrap().buffers();
        let numbers = |n: usize| buffers[n].1.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(buffers.len(), 2);
        assert_ne!(numbers(0), numbers(1));
    }

    #[test]
    fn features_off_leaves_the_window_the_sinks_and_the_gates() {
        for (text, off) in [
            ("favor:m=64,window=32", Some("softmax:window=32")),
            ("favor:map=learned,window=32,sinks=4,gate", Some("softmax:window=32,sinks=4,gate")),
            ("favor", Some("uniform")),
            ("favor-gated", Some("uniform:gate")),
            ("favor:map=taylor2,gate,key-dim=16", Some("uniform:gate,key-dim=16")),
            ("favor:mup-scale", Some("uniform:mup-scale")),
            ("softmax", None),
            ("softmax:window=8,gate", None),
            ("uniform:gate", None),
            ("none", None),
            ("softmax:window=8|favor:m=16,window=4|favor:gate", Some("softmax:window=8|softmax:window=4|uniform:gate")),
            ("softmax:window=8|softmax:gate", None),
        ] {
            let config: AttentionConfig = text.parse().unwrap();
            let control = config.features_off();
            assert_eq!(control.as_ref().map(ToString::to_string).as_deref(), off, "{text}");
            assert_eq!(off.map(|off| off.parse().unwrap()), control, "{text}");
        }
    }

    /// What results in JSON call an attention, how many tokens it sees exactly, and whether its
    /// state grows.
    #[test]
    fn kinds_and_windows_are_those_of_the_text() {
        for (text, kind, window, sinks, grows) in [
            ("softmax", "softmax", None, 0, true),
            ("softmax:gate", "equipped", None, 0, true),
            ("softmax:window=32,sinks=4", "softmax-window", Some(32), 4, false),
            ("favor", "favor", None, 0, false),
            ("favor:window=8", "windowed", Some(8), 0, false),
            ("favor:window=8,sinks=2,gate", "equipped", Some(8), 2, false),
            ("uniform", "uniform", None, 0, false),
            ("none", "none", None, 0, false),
            ("softmax:window=8|favor", "by-head", None, 0, false),
            ("softmax:window=8|softmax:window=8,sinks=2,gate", "equipped", Some(8), 0, false),
            ("softmax|favor:window=8", "by-head", None, 0, true),
        ] {
            let config: AttentionConfig = text.parse().unwrap();
            let told = (config.kind(), config.window(), config.sinks(), config.state_grows());
            assert_eq!(told, (kind, window, sinks, grows), "{text}");
            assert_eq!(config.is_gated(), text.contains("gate"), "{text}");
            assert_eq!(config.favor().is_some(), text.contains("favor"), "{text}");
            let plain = config.without_parts();
            assert_eq!((plain.parts(), plain.window()), (LayerParts::default(), window), "{text}");
        }
    }
}

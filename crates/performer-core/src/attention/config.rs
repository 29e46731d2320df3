//! Attentions by name: settings that can be read, shown, saved and built.

use std::{fmt, str::FromStr};

use candle_core::{DType, Device, Result, bail};
use serde::{Deserialize, Serialize};

use super::{Attention, ByHead, Favor, FavorConfig, LayerParts, Softmax, Windowed, none::NoAttention};
use crate::{
    features::{Constant, FeatureMapKind},
    projection::derive_seed,
};

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
#[serde(tag = "kind", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum AttentionConfig {
    /// Exact softmax attention.
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
    /// Attention in a layer with further parts. The parts belong to the layer, so this builds what
    /// it holds, and [`Self::parts`] tells the layer what to put around it.
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
    /// Causal means of the values, all of one weight: attention without queries, keys and features,
    /// in linear time and with a state of constant size. It is the control of feature maps, and
    /// with a gate, that of gated ones.
    Uniform,
    /// Outputs of zero: the control without attention.
    None,
}

impl AttentionConfig {
    /// `softmax`, `favor` or `windowed`, say: the stable name in JSON output.
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

    /// The attentions that its heads are divided among, without parts of the layer; one, mostly.
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

    /// Makes the attention for heads of dimension `head_dim`, its random features drawn from
    /// `seed`. Where its [parts](Self::parts) name a dimension of queries and keys, its features
    /// are for that one.
    ///
    /// # Errors
    /// As [`Favor::new`] and [`Windowed::new`], and if parts are around parts, or around the
    /// attention of some heads.
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

/// Whether a setting has its default, and is left out of JSON.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(n: &usize) -> bool {
    *n == 0
}

/// Exact tokens of `favor-window`.
const WINDOW: usize = 32;
/// What stands between the attentions that heads are divided among.
const HEADS: char = '|';

/// The shortest text that [`FromStr`] reads back: only what differs from the default.
impl fmt::Display for AttentionConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = match self {
            Self::Softmax => return f.write_str("softmax"),
            Self::SoftmaxWindow { window, sinks: 0 } => return write!(f, "softmax:window={window}"),
            Self::SoftmaxWindow { window, sinks } => return write!(f, "softmax:window={window},sinks={sinks}"),
            Self::Uniform => return f.write_str("uniform"),
            Self::None => return f.write_str("none"),
            Self::Equipped { parts, of } => {
                let of = of.to_string();
                let has_settings = of.rsplit(HEADS).next().is_some_and(|last| last.contains(':'));
                return write!(f, "{of}{}{parts}", if has_settings { ',' } else { ':' });
            }
            Self::ByHead { of } => {
                for (n, one) in of.iter().enumerate() {
                    let between = if n == 0 { String::new() } else { HEADS.to_string() };
                    write!(f, "{between}{one}")?;
                }
                return Ok(());
            }
            Self::Favor(favor) | Self::Windowed { far: favor, .. } => favor,
        };
        let d = FavorConfig::default();
        let mut parts = Vec::new();
        if c.map.is_random() {
            parts.push(format!("m={}", c.features));
        }
        if c.map != d.map {
            parts.push(format!("map={}", c.map));
        }
        if c.map.is_random() && c.projection != d.projection {
            parts.push(format!("projection={}", c.projection));
        }
        if c.map.is_random() && c.radii != d.radii {
            parts.push(format!("radii={}", c.radii));
        }
        if let Some(window) = self.window() {
            parts.push(format!("window={window}"));
        }
        if self.sinks() > 0 {
            parts.push(format!("sinks={}", self.sinks()));
        }
        write!(f, "favor:{}", parts.join(","))
    }
}

/// Reads `softmax`, `softmax:window=32,sinks=4`, `favor`, `favor:m=64`,
/// `favor:m=64,map=relu,projection=gaussian,radii=sqrt,window=32,sinks=4`, `uniform`, `none`, and
/// three variants by name: `favor-learned` is `favor:map=learned`, `favor-window` is
/// `favor:map=learned,window=32`, and `favor-gated` is `favor:gate`. All but `none` take the names
/// of [`LayerParts`] as settings: `gate`, `conv`, `output-gate`, `output-norm`, `mup-scale` and
/// `key-dim=16`.
///
/// `favor:m=32|favor:m=224,gate` divides the heads: the first half has 32 features and the second
/// 224. Parts of the layer stand behind the last of them.
impl FromStr for AttentionConfig {
    type Err = String;

    fn from_str(s: &str) -> std::result::Result<Self, String> {
        if s.contains(HEADS) {
            return Self::of_groups(s);
        }
        let (kind, settings) = s.split_once(':').unwrap_or((s, ""));
        let mut parts = LayerParts::default();
        let kind = if kind == "favor-gated" {
            parts.gate = true;
            "favor"
        } else {
            kind
        };
        let mut others = Vec::new();
        for setting in settings.split(',') {
            if let Some((LayerParts::KEY_DIM, value)) = setting.split_once('=') {
                if parts.key_dim.is_some() {
                    return Err(format!("attention setting key-dim is given twice, in '{s}'; give it once"));
                }
                parts.key_dim = match value.parse() {
                    Ok(dim) if dim > 0 => Some(dim),
                    _ => {
                        return Err(format!(
                            "key-dim={value}: the dimension of queries and keys must be a whole number of at least 1"
                        ));
                    }
                };
                continue;
            }
            match parts.by_name(setting) {
                None => others.push(setting),
                Some(true) => {
                    return Err(format!("attention setting {setting} is given twice, in '{s}'; give it once"));
                }
                Some(part) => *part = true,
            }
        }
        match Self::without_settings_of_layer(kind, &others.join(","))? {
            of if parts.is_empty() => Ok(of),
            Self::None => {
                Err(format!("the attention none has nothing to forget, to mix or to scale; leave {parts} out"))
            }
            Self::Uniform if parts.mup_scale => {
                Err("the attention uniform has no logits to scale; leave mup-scale out".to_owned())
            }
            Self::Uniform if parts.key_dim.is_some() => {
                Err("the attention uniform looks at no queries and keys; leave key-dim out".to_owned())
            }
            of => Ok(Self::Equipped { parts, of: Box::new(of) }),
        }
    }
}

impl AttentionConfig {
    /// Reads attentions that heads are divided among.
    fn of_groups(s: &str) -> std::result::Result<Self, String> {
        let mut of = s.split(HEADS).map(str::parse).collect::<std::result::Result<Vec<Self>, _>>()?;
        let parts = of.last().map(Self::parts).unwrap_or_default();
        if let Some(last) = of.last_mut() {
            *last = last.without_parts().clone();
        }
        if let Some(one) = of.iter().find(|one| !one.parts().is_empty()) {
            return Err(format!(
                "'{s}': {} belongs to the layer, with all its heads; give it once, behind the last attention",
                one.parts()
            ));
        }
        let of_logits = parts.key_dim.is_some() || parts.mup_scale;
        let without = |one: &&Self| matches!(one, Self::None) || (of_logits && **one == Self::Uniform);
        if let Some(one) = of.iter().find(without).filter(|_| !parts.is_empty()) {
            return Err(format!("'{s}': heads with the attention {one} have no {parts}; leave {parts} out"));
        }
        let heads = Self::ByHead { of };
        Ok(if parts.is_empty() { heads } else { Self::Equipped { parts, of: Box::new(heads) } })
    }

    /// Reads an attention whose settings have no parts of the layer among them.
    fn without_settings_of_layer(kind: &str, settings: &str) -> std::result::Result<Self, String> {
        let learned = FavorConfig::default().with_map(FeatureMapKind::Learned);
        let parts = format!("{}, {}=...", LayerParts::NAMES.join(", "), LayerParts::KEY_DIM);
        let (mut config, mut window) = match kind {
            "softmax" if settings.is_empty() => return Ok(Self::Softmax),
            "uniform" if settings.is_empty() => return Ok(Self::Uniform),
            "none" if settings.is_empty() => return Ok(Self::None),
            "uniform" | "none" => return Err(format!("{kind} takes no such settings as '{settings}'")),
            "softmax" => (FavorConfig::default(), None),
            "favor" => (FavorConfig::default(), None),
            "favor-learned" => (learned, None),
            "favor-window" => (learned, Some(WINDOW)),
            _ => {
                return Err(format!(
                    "unknown attention '{kind}'; known are softmax, favor, favor-learned, favor-window, favor-gated, uniform and none, \
                     those of favor with settings such as :m=128,map=...,projection=...,radii=...,window=...,sinks=..., and all but none \
                     with {parts}"
                ));
            }
        };
        let mut sinks = None;
        let mut seen: Vec<&str> = Vec::new();
        for setting in settings.split(',').filter(|s| !s.is_empty()) {
            let (key, value) = setting.split_once('=').ok_or_else(|| {
                format!("attention setting '{setting}' must be KEY=VALUE, such as m=64, or one of {parts}")
            })?;
            let key = if key == "features" { "m" } else { key };
            if seen.contains(&key) {
                return Err(format!("attention setting {key} is given twice, in '{settings}'; give it once"));
            }
            seen.push(key);
            if kind == "softmax" && !matches!(key, "window" | "sinks") {
                return Err(format!(
                    "softmax takes the settings window and sinks, and those of its layer: {parts}; but '{setting}' was given"
                ));
            }
            match key {
                "m" => match value.parse() {
                    Ok(m) if m > 0 => config.features = m,
                    _ => {
                        return Err(format!(
                            "m={value}: the number of random features must be a whole number of at least 1"
                        ));
                    }
                },
                "map" => config.map = value.parse::<FeatureMapKind>()?,
                "projection" => config.projection = value.parse().map_err(|e| format!("{e}"))?,
                "radii" => config.radii = value.parse().map_err(|e| format!("{e}"))?,
                "window" => match value.parse() {
                    Ok(w) if w > 0 => window = Some(w),
                    _ => return Err(format!("window={value}: it must be a whole number of tokens, at least 1")),
                },
                "sinks" => match value.parse() {
                    Ok(n) if n > 0 => sinks = Some(n),
                    _ => return Err(format!("sinks={value}: it must be a whole number of tokens, at least 1")),
                },
                _ => {
                    return Err(format!(
                        "unknown attention setting '{key}'; known are m, map, projection, radii, window, sinks, {parts}"
                    ));
                }
            }
        }
        let Some(window) = window else {
            return match sinks {
                None => Ok(Self::Favor(config)),
                Some(n) => Err(format!("sinks={n}: sinks are seen beside a window; give window= too")),
            };
        };
        let sinks = sinks.unwrap_or(0);
        Ok(if kind == "softmax" {
            Self::SoftmaxWindow { window, sinks }
        } else {
            Self::Windowed { window, sinks, far: config }
        })
    }
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
        // A part of a later version is not passed over.
        let unknown = r#"{"kind":"equipped","parts":{"new":true},"of":{"kind":"softmax"}}"#;
        assert!(serde_json::from_str::<AttentionConfig>(unknown).is_err());
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
            ("softmax", None),
            ("softmax:window=8,gate", None),
            ("uniform:gate", None),
            ("none", None),
            ("softmax:window=8|favor:m=16,window=4|favor:gate", Some("softmax:window=8|softmax:window=4|uniform:gate")),
            ("softmax:window=8|softmax:gate", None),
        ] {
            let config: AttentionConfig = text.parse().unwrap();
            assert_eq!(config.features_off().map(|off| off.to_string()).as_deref(), off, "{text}");
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

    #[test]
    fn attention_reads_back_what_it_shows() {
        for text in [
            "softmax",
            "softmax:window=32",
            "favor:m=64",
            "favor:m=32,map=relu,projection=gaussian",
            "favor:map=elu",
            "favor:m=128,radii=sqrt",
            "favor:m=64,map=learned,window=32",
            "softmax:gate",
            "softmax:window=32,gate",
            "softmax:window=32,gate,conv,output-gate,output-norm,mup-scale",
            "favor:m=64,mup-scale",
            "favor:map=taylor2,gate,key-dim=16",
            "softmax:window=32,sinks=4,key-dim=8",
            "favor:m=64,gate,conv",
            "favor:map=elu,output-norm",
            "uniform:conv,output-gate",
            "softmax:window=32,sinks=4",
            "softmax:window=32,sinks=4,gate",
            "favor:m=64,window=32,gate",
            "favor:m=64,window=32,sinks=4,gate",
            "uniform",
            "uniform:gate",
            "none",
            "favor:m=32|favor:m=224",
            "favor:m=32|softmax:gate,conv",
            "softmax|softmax:window=8,sinks=2,key-dim=8",
            "none|uniform",
        ] {
            assert_eq!(text.parse::<AttentionConfig>().unwrap().to_string(), text);
        }
        for (name, same) in [
            ("favor", "favor:m=128"),
            ("favor-learned:m=64", "favor:m=64,map=learned"),
            ("favor-window", "favor:m=128,map=learned,window=32"),
            ("favor-window:map=positive,window=8", "favor:m=128,window=8"),
            ("favor-gated", "favor:m=128,gate"),
            ("favor-gated:m=64,window=8", "favor:m=64,window=8,gate"),
            ("favor:gate,m=64", "favor:m=64,gate"),
            ("favor-gated:key-dim=16,map=taylor2,conv", "favor:map=taylor2,gate,conv,key-dim=16"),
            ("favor-gated:output-norm,conv,m=64", "favor:m=64,gate,conv,output-norm"),
        ] {
            assert_eq!(name.parse::<AttentionConfig>().unwrap().to_string(), same);
        }
        for (bad, word) in [
            ("linear", "known are softmax, favor, favor-learned"),
            ("favor:m=0", "at least 1"),
            ("favor:64", "KEY=VALUE"),
            ("favor:map=x", "unknown feature map"),
            ("favor:window=0", "at least 1"),
            ("softmax:m=1", "the settings window and sinks"),
            ("softmax:window=0", "at least 1"),
            ("softmax:sinks=4", "beside a window"),
            ("favor:sinks=4", "beside a window"),
            ("softmax:window=4,sinks=0", "at least 1"),
            ("softmax:window=4,sinks=1,sinks=1", "sinks is given twice"),
            ("favor:m=4,features=8", "m is given twice"),
            ("favor:window=4,window=4", "window is given twice"),
            ("favor:gate,gate", "gate is given twice"),
            ("favor-gated:gate", "gate is given twice"),
            ("favor:gate=1", "unknown attention setting 'gate'"),
            ("favor:key-dim=0", "at least 1"),
            ("favor:key-dim=x", "key-dim=x: "),
            ("favor:key-dim", "KEY=VALUE"),
            ("softmax:key-dim=8,key-dim=8", "key-dim is given twice"),
            ("uniform:key-dim=8", "leave key-dim out"),
            ("none:key-dim=8", "leave key-dim=8 out"),
            ("softmax:conv,window=4,conv", "conv is given twice"),
            ("favor:conv=3", "unknown attention setting 'conv'"),
            ("softmax:m=4,gate", "the settings window and sinks"),
            ("none:gate", "nothing to forget"),
            ("none:conv,output-norm", "leave conv,output-norm out"),
            ("uniform:m=4", "no such settings"),
            ("none:m=4", "no such settings"),
            ("uniform:gate,mup-scale", "no logits to scale"),
            ("favor:gate|softmax", "gate belongs to the layer"),
            ("favor-gated|softmax:gate", "give it once, behind the last"),
            ("favor|", "unknown attention ''"),
            ("none|softmax:conv", "leave conv out"),
            ("uniform|softmax:key-dim=4", "have no key-dim=4"),
        ] {
            let error = bad.parse::<AttentionConfig>().unwrap_err();
            assert!(error.contains(word), "{bad}: {error}");
        }
    }
}

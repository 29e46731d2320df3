//! The text of an attention's settings, such as `favor:m=64,gate`: how it is read and shown.

use std::{fmt, str::FromStr};

use super::{AttentionConfig, FavorConfig, LayerParts};
use crate::features::FeatureMapKind;

/// Exact tokens of `favor-window`.
const WINDOW: usize = 32;
/// What stands between the attentions that heads are divided among.
const HEADS: char = '|';

/// A text that [`FromStr`] reads back: the settings that differ from the default, and `m` for every
/// map with random rows.
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
/// `key-dim=16`. The last two are about queries and keys, at which `uniform` does not look: there
/// they only say of which layer it is the control.
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
        for setting in settings.split(',').filter(|setting| !setting.is_empty()) {
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
        if let Some(one) = of.iter().find(|one| **one == Self::None).filter(|_| !parts.is_empty()) {
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
        if let Some(setting) = seen.iter().find(|key| matches!(**key, "m" | "projection" | "radii"))
            && !config.map.is_random()
        {
            return Err(format!(
                "map={} has no random features, to which the setting {setting} belongs; leave {setting} out",
                config.map
            ));
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
            "uniform:mup-scale,key-dim=8",
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
            ("softmax:,", "softmax"),
            ("softmax:gate,,", "softmax:gate"),
        ] {
            assert_eq!(name.parse::<AttentionConfig>().unwrap().to_string(), same);
        }
        for (bad, word) in [
            ("linear", "known are softmax, favor, favor-learned"),
            ("favor:m=0", "at least 1"),
            ("favor:64", "KEY=VALUE"),
            ("favor:map=elu,m=5", "leave m out"),
            ("favor:m=3,map=limit-2", "leave m out"),
            ("favor:map=taylor2,radii=sqrt", "leave radii out"),
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
            ("none:key-dim=8", "leave key-dim=8 out"),
            ("softmax:conv,window=4,conv", "conv is given twice"),
            ("favor:conv=3", "unknown attention setting 'conv'"),
            ("softmax:m=4,gate", "the settings window and sinks"),
            ("none:gate", "nothing to forget"),
            ("none:conv,output-norm", "leave conv,output-norm out"),
            ("uniform:m=4", "no such settings"),
            ("none:m=4", "no such settings"),
            ("favor:gate|softmax", "gate belongs to the layer"),
            ("favor-gated|softmax:gate", "give it once, behind the last"),
            ("favor|", "unknown attention ''"),
            ("none|softmax:conv", "leave conv out"),
        ] {
            let error = bad.parse::<AttentionConfig>().unwrap_err();
            assert!(error.contains(word), "{bad}: {error}");
        }
    }
}

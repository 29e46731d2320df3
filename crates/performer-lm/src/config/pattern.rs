//! The attention of a whole model in one text: of all layers, or of a hybrid.

use std::{fmt, str::FromStr};

use super::AttentionConfig;

/// An `AttentionPattern` says which attention each layer has, as the command line takes it: one
/// name for all layers, such as `favor-gated`, or a hybrid `A+B/n`, such as
/// `favor-gated+softmax/4`, in which every n-th layer has B and the others have A, or `A+B/first`,
/// in which the first layer has B.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionPattern {
    /// The attention of all layers, or in a hybrid of those that do not have the other.
    pub most: AttentionConfig,
    /// The other attention of a hybrid, and the layers that have it.
    pub other: Option<(AttentionConfig, Place)>,
}

/// The layers of a hybrid that have its second attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The first layer.
    First,
    /// Every n-th layer, for n of at least 2: counted from 0, the layers n − 1, 2n − 1 and so on.
    Every(usize),
}

impl Place {
    /// Returns these layers among so many, in order.
    pub fn layers(self, layers: usize) -> impl Iterator<Item = usize> {
        let (start, step) = match self {
            Self::First => (0, usize::MAX),
            Self::Every(n) => (n - 1, n),
        };
        (start..layers).step_by(step)
    }
}

/// Writes what stands behind the stroke in `A+B/n` or `A+B/first`.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::First => write!(f, "first"),
            Self::Every(n) => write!(f, "{n}"),
        }
    }
}

impl AttentionPattern {
    /// Returns the attentions in it, that of most layers first.
    pub fn attentions(&self) -> impl Iterator<Item = &AttentionConfig> {
        std::iter::once(&self.most).chain(self.other.as_ref().map(|(attention, _)| attention))
    }

    /// Returns the stable name in JSON output: that of the attention, or `hybrid`.
    pub fn kind(&self) -> &'static str {
        if self.other.is_some() { "hybrid" } else { self.most.kind() }
    }
}

impl From<AttentionConfig> for AttentionPattern {
    fn from(most: AttentionConfig) -> Self {
        Self { most, other: None }
    }
}

/// Writes what [`FromStr`] reads.
impl fmt::Display for AttentionPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.other {
            None => write!(f, "{}", self.most),
            Some((attention, place)) => write!(f, "{}+{attention}/{place}", self.most),
        }
    }
}

impl FromStr for AttentionPattern {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let Some((most, rest)) = s.split_once('+') else { return Ok(s.parse::<AttentionConfig>()?.into()) };
        let hint = "a hybrid is A+B/n, such as favor-gated+softmax/4: every n-th layer has B, the others have A; or \
                    A+B/first: the first layer has B";
        let (attention, place) =
            rest.rsplit_once('/').ok_or_else(|| format!("'{s}' names two attentions without /n; {hint}"))?;
        let place = match (place, place.parse()) {
            ("first", _) => Place::First,
            (_, Ok(n)) if n > 1 => Place::Every(n),
            (_, Ok(1)) => return Err(format!("'{s}': every layer would have {attention}; give {attention} alone")),
            _ => {
                return Err(format!(
                    "'{s}': n is '{place}', and must be a whole number of at least 2, or first; {hint}"
                ));
            }
        };
        if attention.contains('+') {
            return Err(format!("'{s}' names more than two attentions; {hint}"));
        }
        let (most, attention): (AttentionConfig, AttentionConfig) = (most.parse()?, attention.parse()?);
        if most == attention {
            return Err(format!("'{s}': both attentions are {most}; give {most} alone"));
        }
        Ok(Self { most, other: Some((attention, place)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Preset;

    #[test]
    fn a_hybrid_is_read_applied_and_shown_again() -> anyhow::Result<()> {
        let (mut base, _) = Preset::Seed.load()?;
        base.layers = 9;
        for (text, shown, of_b) in [
            ("favor-gated+softmax/4", "favor:m=128,gate+softmax/4", &[3, 7][..]),
            ("softmax:window=32,sinks=4+favor:map=elu/2", "softmax:window=32,sinks=4+favor:map=elu/2", &[1, 3, 5, 7]),
            ("uniform+none/9", "uniform+none/9", &[8]),
            ("uniform+none/5", "uniform+none/5", &[4]),
            ("favor-gated+softmax:window=32/first", "favor:m=128,gate+softmax:window=32/first", &[0]),
        ] {
            let pattern: AttentionPattern = text.parse().map_err(anyhow::Error::msg)?;
            let config = base.clone().with_attention(&pattern)?;
            config.validate()?;
            assert_eq!(config.attention_by_layer.keys().copied().collect::<Vec<_>>(), of_b, "{text}");
            assert_eq!(config.pattern(), pattern);
            assert_eq!((config.pattern().to_string().as_str(), config.pattern().kind()), (shown, "hybrid"));
            // One attention for all replaces both.
            let plain = config.with_attention(&"favor:m=8".parse().map_err(anyhow::Error::msg)?)?;
            assert!(plain.attention_by_layer.is_empty());
            assert_eq!((plain.pattern().to_string().as_str(), plain.pattern().kind()), ("favor:m=8", "favor"));
        }
        let error = base.clone().with_attention(&"favor+softmax/10".parse().map_err(anyhow::Error::msg)?).unwrap_err();
        assert!(error.to_string().contains("9 layers"), "{error}");
        // Layers of their own that form no pattern are shown by the attention of the others.
        base.attention_by_layer.insert(1, AttentionConfig::Softmax);
        assert_eq!(base.pattern().to_string(), base.attention.to_string());
        // Reports name them all.
        assert_eq!(base.attention_text(), format!("{}; layer 1: softmax", base.attention));
        base.attention_by_layer.insert(2, AttentionConfig::None);
        base.attention_by_layer.insert(7, AttentionConfig::Softmax);
        assert_eq!(base.attention_text(), format!("{}; layers 1,7: softmax; layer 2: none", base.attention));
        let hybrid = base.with_attention(&"favor:m=8+softmax/4".parse().map_err(anyhow::Error::msg)?)?;
        assert_eq!(hybrid.attention_text(), "favor:m=8+softmax/4");
        Ok(())
    }

    #[test]
    fn nonsense_is_refused() {
        for (bad, word) in [
            ("favor+softmax", "without /n"),
            ("favor+softmax/0", "at least 2"),
            ("favor+softmax/1", "give softmax alone"),
            ("favor+softmax/x", "at least 2, or first"),
            ("favor+softmax/last", "at least 2, or first"),
            ("favor+softmax/4+uniform/2", "more than two"),
            ("favor+favor:m=128/4", "both attentions"),
            ("favor+nothing/4", "unknown attention"),
            ("+softmax/4", "unknown attention"),
        ] {
            let error = bad.parse::<AttentionPattern>().unwrap_err();
            assert!(error.contains(word), "{bad}: {error}");
        }
    }
}

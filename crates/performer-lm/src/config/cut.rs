//! A trained model whose exact attention is cut to windows: the control that tells how far the
//! model looks, and whether a window would do.

use super::{AttentionConfig, ModelConfig};

impl ModelConfig {
    /// Returns this model with exact attention cut to the last `window` tokens and the first
    /// `sinks`, or `None` if no layer has exact attention that reaches further, or the model leaks.
    /// It has the weights of this one.
    ///
    /// Windows that are no longer stay as they are, and so does attention with features, even where
    /// it has an exact window. A window that is cut keeps the sinks that it has, if they are more.
    pub fn cut_to_window(&self, window: usize, sinks: usize) -> Option<Self> {
        // A window is causal.
        if self.leak {
            return None;
        }
        self.with_each_attention(|attention| cut(attention, window, sinks))
    }
}

fn cut(attention: &AttentionConfig, window: usize, sinks: usize) -> Option<AttentionConfig> {
    match attention {
        AttentionConfig::Softmax => Some(AttentionConfig::SoftmaxWindow { window, sinks }),
        AttentionConfig::SoftmaxWindow { window: longer, sinks: own } if *longer > window => {
            Some(AttentionConfig::SoftmaxWindow { window, sinks: sinks.max(*own) })
        }
        AttentionConfig::Equipped { parts, of } => {
            Some(AttentionConfig::Equipped { parts: *parts, of: Box::new(cut(of, window, sinks)?) })
        }
        AttentionConfig::ByHead { of } => {
            let any = of.iter().any(|one| cut(one, window, sinks).is_some());
            let shorter = |one: &AttentionConfig| cut(one, window, sinks).unwrap_or_else(|| one.clone());
            any.then(|| AttentionConfig::ByHead { of: of.iter().map(shorter).collect() })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Preset;

    #[test]
    fn exact_attention_is_cut_and_all_else_stays() -> anyhow::Result<()> {
        let (base, _) = Preset::Seed.load()?;
        for (text, cut) in [
            ("softmax", Some("softmax:window=8,sinks=2")),
            ("softmax:gate,conv", Some("softmax:window=8,sinks=2,gate,conv")),
            ("softmax:window=9", Some("softmax:window=8,sinks=2")),
            ("softmax:window=9,sinks=1", Some("softmax:window=8,sinks=2")),
            ("softmax:window=9,sinks=3", Some("softmax:window=8,sinks=3")),
            ("softmax:window=8", None),
            ("favor:m=8+softmax:gate/first", Some("favor:m=8+softmax:window=8,sinks=2,gate/first")),
            ("favor:m=8|softmax", Some("favor:m=8|softmax:window=8,sinks=2")),
            ("softmax:window=4|softmax:window=16", Some("softmax:window=4|softmax:window=8,sinks=2")),
            ("favor:m=8|uniform", None),
            ("favor:m=8,window=9", None),
            ("uniform:gate", None),
            ("none", None),
        ] {
            let parse = |text: &str| text.parse().map_err(anyhow::Error::msg);
            let model = base.clone().with_attention(&parse(text)?)?;
            let found = model.cut_to_window(8, 2);
            let expected = cut.map(|cut| base.clone().with_attention(&parse(cut)?)).transpose()?;
            assert_eq!(found, expected, "{text}");
            assert_eq!(crate::config::ModelConfig { leak: true, ..model }.cut_to_window(8, 2), None, "{text}");
        }
        Ok(())
    }
}

//! This module describes the families of Hugging Face models that the decoder covers: their
//! configurations and the names of their weights, for reading and writing.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use serde_json::{Value, json};

use super::{LlamaSizes, Part, fields::Fields};
use crate::config::{AttentionConfig, FeedForwardKind, ModelConfig, NormKind, NormPosition, Positions};

/// A `Family` is a family of models, named as in `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    /// Llama, SmolLM2, TinyLlama, and Mistral without its sliding window.
    Llama,
    /// Llama with biases of queries, keys and values.
    Qwen2,
    /// Layer norms, GELU and rotary positions.
    Starcoder2,
    /// Layer norms, GELU and learned positions.
    Gpt2,
}

/// ε of layer norms if a configuration does not give it; that of RMS norms is then 1e-6.
const DEFAULT_EPS: f64 = 1e-5;

/// The window of Mistral's models if a configuration does not give it.
const MISTRAL_WINDOW: usize = 4096;

impl Family {
    pub(super) const ALL: [Self; 4] = [Self::Llama, Self::Qwen2, Self::Starcoder2, Self::Gpt2];

    /// Returns the family of a `model_type`.
    pub(super) fn of(model_type: &str) -> Result<Self> {
        if model_type == "mistral" {
            return Ok(Self::Llama);
        }
        match Self::ALL.into_iter().find(|family| family.model_type() == model_type) {
            Some(family) => Ok(family),
            None => bail!(
                "model_type is {model_type}; supported are llama (SmolLM2 and TinyLlama too), mistral, qwen2, starcoder2 and gpt2"
            ),
        }
    }

    /// Returns the family to which one of our configurations belongs, whatever its attention.
    pub(super) fn of_config(config: &ModelConfig) -> Result<Self> {
        let rotary = matches!(config.positions, Positions::Rotary { .. });
        let gelu = config.feed_forward != FeedForwardKind::Swiglu;
        let family = match (config.norm, gelu, rotary) {
            _ if config.norm_position == NormPosition::Post => None,
            (NormKind::RmsNorm, false, true) if config.qkv_bias && !config.bias => Some(Self::Qwen2),
            (NormKind::RmsNorm, false, true) => Some(Self::Llama),
            (NormKind::LayerNorm, true, true) if config.bias || !config.qkv_bias => Some(Self::Starcoder2),
            (NormKind::LayerNorm, true, false)
                if config.bias
                    && config.heads * config.head_dim() == config.hidden_size
                    && config.kv_heads == config.heads =>
            {
                Some(Self::Gpt2)
            }
            _ => None,
        };
        match family {
            Some(family) => Ok(family),
            None => bail!(
                "no Hugging Face architecture is this model. Llama has rms-norm, swiglu and rotary positions; StarCoder2 layer-norm, gelu \
                 and rotary positions; GPT-2 layer-norm, gelu, learned positions and biases; all have norm_position pre"
            ),
        }
    }

    pub(super) fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Starcoder2 => "starcoder2",
            Self::Gpt2 => "gpt2",
        }
    }

    pub(super) fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Starcoder2 => "Starcoder2ForCausalLM",
            Self::Gpt2 => "GPT2LMHeadModel",
        }
    }

    /// Converts one of their configurations to ours, with softmax attention.
    pub(super) fn read(self, fields: &Fields) -> Result<ModelConfig> {
        fields.only("quantization_config", &[])?;
        if self == Self::Gpt2 {
            return gpt2(fields);
        }
        let context = fields.need("max_position_embeddings")?;
        refuse_windows(fields, context, self != Self::Qwen2)?;
        let heads = fields.need("num_attention_heads")?;
        let eps = if self == Self::Starcoder2 { "norm_epsilon" } else { "rms_norm_eps" };
        let sizes = LlamaSizes {
            vocab_size: fields.need("vocab_size")?,
            hidden_size: fields.need("hidden_size")?,
            layers: fields.need("num_hidden_layers")?,
            heads,
            kv_heads: fields.get("num_key_value_heads")?.unwrap_or(heads),
            head_dim: fields.get("head_dim")?,
            feed_forward_size: fields.need("intermediate_size")?,
            context,
            norm_eps: fields.get(eps)?.unwrap_or(if self == Self::Starcoder2 { DEFAULT_EPS } else { 1e-6 }),
            rotary_base: rotary_base(fields)?,
            tied_head: fields.get("tie_word_embeddings")?.unwrap_or(self == Self::Starcoder2),
        };
        let mut config = sizes.config();
        match self {
            Self::Starcoder2 => {
                config.norm = NormKind::LayerNorm;
                config.feed_forward = gelu(fields, "hidden_act")?;
                config.bias = fields.get("use_bias")?.unwrap_or(true);
            }
            _ => {
                fields.only("hidden_act", &["silu".into(), "swish".into()])?;
                config.qkv_bias = self == Self::Qwen2;
            }
        }
        if self == Self::Llama {
            let (attention, mlp) =
                (fields.get("attention_bias")?.unwrap_or(false), fields.get("mlp_bias")?.unwrap_or(false));
            if attention != mlp {
                return fields.refuse(if attention { "attention_bias" } else { "mlp_bias" });
            }
            config.bias = attention;
        }
        Ok(config)
    }

    /// Converts one of our configurations to theirs, without our attention, which they do not know.
    pub(super) fn write(self, config: &ModelConfig) -> Value {
        if self == Self::Gpt2 {
            return json!({
                "vocab_size": config.vocab_size, "n_embd": config.hidden_size, "n_layer": config.layers, "n_head": config.heads,
                "n_inner": config.feed_forward_size, "n_positions": config.context, "n_ctx": config.context,
                "activation_function": gelu_name(config), "layer_norm_epsilon": config.norm_eps,
                "tie_word_embeddings": config.tied_head, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
            });
        }
        let base = match config.positions {
            Positions::Rotary { base } => base,
            Positions::Learned => 10_000.0,
        };
        let mut theirs = json!({
            "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim(),
            "intermediate_size": config.feed_forward_size, "max_position_embeddings": config.context, "rope_theta": base,
            "tie_word_embeddings": config.tied_head, "attention_dropout": 0.0,
        });
        let own = match self {
            Self::Starcoder2 => json!({
                "norm_epsilon": config.norm_eps, "hidden_act": gelu_name(config), "use_bias": config.bias, "sliding_window": null,
                "embedding_dropout": 0.0, "residual_dropout": 0.0,
            }),
            Self::Llama => json!({
                "rms_norm_eps": config.norm_eps, "hidden_act": "silu", "attention_bias": config.bias, "mlp_bias": config.bias,
            }),
            _ => json!({"rms_norm_eps": config.norm_eps, "hidden_act": "silu", "use_sliding_window": false}),
        };
        if let (Value::Object(theirs), Value::Object(own)) = (&mut theirs, own) {
            theirs.extend(own);
        }
        theirs
    }

    /// Returns where one of our parameters lies among their weights.
    pub(super) fn part(self, name: &str) -> Part {
        match self {
            Self::Llama | Self::Qwen2 => Part::whole(name),
            Self::Starcoder2 => {
                Part::whole(name.replace("mlp.up_proj", "mlp.c_fc").replace("mlp.down_proj", "mlp.c_proj"))
            }
            Self::Gpt2 => gpt2_part(name),
        }
    }

    /// Whether a tensor among their weights is not part of the model: a constant that old versions
    /// saved, or a copy of the tied head.
    pub(super) fn is_constant(self, name: &str, config: &ModelConfig) -> bool {
        name.ends_with(".rotary_emb.inv_freq")
            || (config.tied_head && name == "lm_head.weight")
            || (self == Self::Gpt2 && (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias")))
    }
}

fn gpt2(fields: &Fields) -> Result<ModelConfig> {
    fields.only("scale_attn_weights", &[true.into()])?;
    fields.only("scale_attn_by_inverse_layer_idx", &[false.into()])?;
    fields.only("add_cross_attention", &[false.into()])?;
    let (hidden_size, heads): (usize, usize) = (fields.need("n_embd")?, fields.need("n_head")?);
    Ok(ModelConfig {
        vocab_size: fields.need("vocab_size")?,
        hidden_size,
        layers: fields.need("n_layer")?,
        heads,
        kv_heads: heads,
        head_dim: None,
        feed_forward_size: fields.get("n_inner")?.unwrap_or(hidden_size.saturating_mul(4)),
        context: fields.need("n_positions")?,
        feed_forward: gelu(fields, "activation_function")?,
        norm: NormKind::LayerNorm,
        norm_position: NormPosition::Pre,
        norm_eps: fields.get("layer_norm_epsilon")?.unwrap_or(DEFAULT_EPS),
        positions: Positions::Learned,
        tied_head: fields.get("tie_word_embeddings")?.unwrap_or(true),
        bias: true,
        qkv_bias: false,
        dropout: 0.0,
        attention: AttentionConfig::Softmax,
        attention_by_layer: BTreeMap::new(),
        borders: None,
        leak: false,
    })
}

/// Returns where a parameter lies in GPT-2, which keeps queries, keys and values in one tensor, and
/// its matrices transposed.
fn gpt2_part(name: &str) -> Part {
    let renamed = match name.strip_prefix("model.") {
        None => return Part::whole(name),
        Some(rest) => rest
            .replace("embed_tokens.", "wte.")
            .replace("embed_positions.", "wpe.")
            .replace("layers.", "h.")
            .replace("input_layernorm.", "ln_1.")
            .replace("post_attention_layernorm.", "ln_2.")
            .replace("mlp.up_proj.", "mlp.c_fc.")
            .replace("mlp.down_proj.", "mlp.c_proj.")
            .replace("self_attn.o_proj.", "attn.c_proj."),
    };
    let renamed = match renamed.strip_prefix("norm.") {
        Some(rest) => format!("ln_f.{rest}"),
        None => renamed,
    };
    let third = ["q_proj", "k_proj", "v_proj"].iter().position(|part| renamed.contains(part));
    let renamed = match third {
        Some(i) => renamed.replace(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"][i], "attn.c_attn"),
        None => renamed,
    };
    let transposed = renamed.contains(".c_") && renamed.ends_with(".weight");
    Part { transposed, third, ..Part::whole(format!("transformer.{renamed}")) }
}

/// Returns the form of GELU that a configuration names.
fn gelu(fields: &Fields, name: &str) -> Result<FeedForwardKind> {
    match fields.get::<String>(name)?.as_deref() {
        None | Some("gelu_new" | "gelu_pytorch_tanh" | "gelu_fast") => Ok(FeedForwardKind::Gelu),
        Some("gelu") => Ok(FeedForwardKind::GeluExact),
        Some(_) => fields.refuse(name),
    }
}

fn gelu_name(config: &ModelConfig) -> &'static str {
    if config.feed_forward == FeedForwardKind::GeluExact { "gelu" } else { "gelu_pytorch_tanh" }
}

/// Returns θ, which newer configurations keep with the kind of scaling. Only plain rotary positions
/// over whole heads are supported.
fn rotary_base(fields: &Fields) -> Result<f64> {
    let mut base = fields.get("rope_theta")?;
    for name in ["rope_scaling", "rope_parameters"] {
        let Some(value) = fields.get::<Value>(name)? else { continue };
        let kind = ["rope_type", "type"].iter().find_map(|key| value.get(*key).and_then(Value::as_str));
        let scaled = match kind {
            Some(kind) => kind != "default",
            None => value.get("factor").is_some_and(|factor| !factor.is_null()),
        };
        let partial = value.get("partial_rotary_factor").and_then(Value::as_f64);
        if scaled || partial.is_some_and(|factor| factor != 1.0) {
            return fields.refuse(name);
        }
        base = base.or(value.get("rope_theta").and_then(Value::as_f64));
    }
    fields.only("partial_rotary_factor", &[json!(1.0), json!(1)])?;
    fields.only("rope_interleaved", &[false.into()])?;
    Ok(base.unwrap_or(10_000.0))
}

/// Refuses attention windows that are narrower than the context.
fn refuse_windows(fields: &Fields, context: usize, by_default: bool) -> Result<()> {
    let in_use = fields.get("use_sliding_window")?.unwrap_or(by_default);
    let mut window = fields.get::<usize>("sliding_window")?;
    if !fields.has("sliding_window") && fields.get::<String>("model_type")?.as_deref() == Some("mistral") {
        window = Some(MISTRAL_WINDOW);
    }
    if in_use && window.is_some_and(|window| window < context) {
        return fields.refuse("sliding_window");
    }
    let kinds: Vec<String> = fields.get("layer_types")?.unwrap_or_default();
    if in_use && kinds.iter().any(|kind| kind != "full_attention") {
        return fields.refuse("layer_types");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpt2_names() {
        for (ours, theirs, transposed, third) in [
            ("model.embed_tokens.weight", "transformer.wte.weight", false, None),
            ("model.embed_positions.weight", "transformer.wpe.weight", false, None),
            ("model.norm.bias", "transformer.ln_f.bias", false, None),
            ("lm_head.weight", "lm_head.weight", false, None),
            ("model.layers.3.self_attn.k_proj.weight", "transformer.h.3.attn.c_attn.weight", true, Some(1)),
            ("model.layers.3.self_attn.v_proj.bias", "transformer.h.3.attn.c_attn.bias", false, Some(2)),
            ("model.layers.3.self_attn.o_proj.weight", "transformer.h.3.attn.c_proj.weight", true, None),
            ("model.layers.3.mlp.up_proj.bias", "transformer.h.3.mlp.c_fc.bias", false, None),
            ("model.layers.3.input_layernorm.weight", "transformer.h.3.ln_1.weight", false, None),
            ("model.layers.3.post_attention_layernorm.bias", "transformer.h.3.ln_2.bias", false, None),
        ] {
            assert_eq!(gpt2_part(ours), Part { transposed, third, ..Part::whole(theirs) });
        }
    }
}

//! These tests compare Hugging Face folders with candle-transformers' models, and export models as
//! such folders.

use std::{collections::BTreeMap, path::Path};

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{llama, qwen2, starcoder2};
use performer_lm::{
    config::{FeedForwardKind, ModelConfig, Positions, Preset},
    data::Tokenizer,
    model::{
        Decoder,
        pretrained::{Pretrained, export},
    },
};
use serde_json::{Value, json};

use super::support::*;

fn builder(weights: &Weights) -> VarBuilder<'static> {
    VarBuilder::from_tensors(weights.clone(), DType::F32, &Device::Cpu)
}

fn candle_llama(config: &Value, weights: &Weights, ids: &[u32]) -> Result<Vec<Vec<f32>>> {
    let config = serde_json::from_value::<llama::LlamaConfig>(config.clone())?.into_config(false);
    let model = llama::Llama::load(builder(weights), &config)?;
    logits_of_prefixes(ids, |ids| {
        let mut cache = llama::Cache::new(false, DType::F32, &config, &Device::Cpu)?;
        model.forward(ids, 0, &mut cache)
    })
}

#[test]
fn llama_is_candles_llama() -> Result<()> {
    for tied in [false, true] {
        let dir = tempfile::tempdir()?;
        let (config, weights) = (llama_config(SMALL, "llama", tied), llama_weights(SMALL, false, tied)?);
        write_folder(dir.path(), &config, &weights)?;
        let model = open(dir.path())?;
        assert_eq!((model.config.head_dim, model.config.borders.clone()), (None, None));
        assert_eq!(model.config.positions, Positions::Rotary { base: 500.0 });
        assert_same(&logits(&model, &ids(23))?, &candle_llama(&config, &weights, &ids(23))?);
    }
    Ok(())
}

/// Folders may have weights in several files, half types, names without the prefix, constants that
/// old files hold, and the rotary parameters of newer configurations.
#[test]
fn folders_come_in_other_shapes() -> Result<()> {
    let (mut config, weights) = (llama_config(SMALL, "mistral", true), llama_weights(SMALL, false, true)?);
    let half: Weights =
        weights.iter().map(|(name, t)| Ok((name.clone(), t.to_dtype(DType::BF16)?))).collect::<Result<_>>()?;
    let widened: Weights =
        half.iter().map(|(name, t)| Ok((name.clone(), t.to_dtype(DType::F32)?))).collect::<Result<_>>()?;
    let expected = candle_llama(&config, &widened, &ids(12))?;

    let dir = tempfile::tempdir()?;
    config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": config["rope_theta"].take()});
    config["sliding_window"] = Value::Null;
    write_folder(dir.path(), &config, &half)?;
    let (mut first, mut second) = (Weights::new(), Weights::new());
    for (i, (name, tensor)) in half.iter().enumerate() {
        let bare = name.strip_prefix("model.").unwrap_or(name);
        if i % 2 == 0 { &mut first } else { &mut second }.insert(bare.to_owned(), tensor.clone());
    }
    first.insert("layers.0.self_attn.rotary_emb.inv_freq".into(), Tensor::zeros(2, DType::F32, &Device::Cpu)?);
    std::fs::remove_file(dir.path().join("model.safetensors"))?;
    let index = dir.path().join("model.safetensors.index.json");
    let names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let files = first.keys().map(|k| (k.clone(), names[0])).chain(second.keys().map(|k| (k.clone(), names[1])));
    write_json(&index, &json!({"metadata": {}, "weight_map": files.collect::<std::collections::HashMap<_, _>>()}));
    for (name, weights) in names.iter().zip([&first, &second]) {
        candle_core::safetensors::save(weights, dir.path().join(name))?;
    }
    assert_same(&logits(&open(dir.path())?, &ids(12))?, &expected);

    std::fs::remove_file(dir.path().join(names[1]))?;
    let error = refusal(dir.path());
    assert!(error.contains(names[1]) && error.contains("copy it again"), "{error}");
    write_json(&index, &json!({"weight_map": {"a": "../elsewhere.safetensors"}}));
    let error = refusal(dir.path());
    assert!(error.contains("elsewhere") && error.contains("index"), "{error}");
    Ok(())
}

#[test]
fn qwen2_is_candles_qwen2() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let mut config = llama_config(SMALL, "qwen2", false);
    // Qwen2's published configurations name a window that is not in use.
    for (name, value) in
        [("use_sliding_window", json!(false)), ("sliding_window", json!(40)), ("max_window_layers", json!(1))]
    {
        config[name] = value;
    }
    let weights = llama_weights(SMALL, true, false)?;
    write_folder(dir.path(), &config, &weights)?;
    let theirs = serde_json::from_value::<qwen2::Config>(config)?;
    let expected =
        logits_of_prefixes(&ids(23), |ids| qwen2::ModelForCausalLM::new(&theirs, builder(&weights))?.forward(ids, 0))?;
    assert_same(&logits(&open(dir.path())?, &ids(23))?, &expected);
    Ok(())
}

#[test]
fn starcoder2_is_candles_starcoder2() -> Result<()> {
    let s = SMALL;
    for bias in [true, false] {
        let mut weights = Weights::new();
        for (name, tensor) in llama_weights(s, false, true)? {
            let name = name.replace("mlp.up_proj", "mlp.c_fc").replace("mlp.down_proj", "mlp.c_proj");
            if name.contains("gate_proj") {
                continue;
            }
            if bias || name.contains("norm") {
                vector(&mut weights, &name.replace(".weight", ".bias"), tensor.dim(0)?)?;
            }
            weights.insert(name, tensor);
        }
        weights.remove("model.embed_tokens.bias");
        let mut config = llama_config(s, "starcoder2", true);
        for (name, value) in
            [("norm_epsilon", json!(1e-4)), ("hidden_act", json!("gelu_pytorch_tanh")), ("use_bias", json!(bias))]
        {
            config[name] = value;
        }
        let dir = tempfile::tempdir()?;
        write_folder(dir.path(), &config, &weights)?;
        let theirs = serde_json::from_value::<starcoder2::Config>(config)?;
        let expected =
            logits_of_prefixes(&ids(23), |ids| starcoder2::Model::new(&theirs, builder(&weights))?.forward(ids, 0))?;
        assert_same(&logits(&open(dir.path())?, &ids(23))?, &expected);
    }
    Ok(())
}

/// Exports a model as a Hugging Face folder and opens that folder.
fn round_trip(model: &Pretrained, dir: &Path) -> Result<(Pretrained, Value)> {
    export(model, dir)?;
    let config: Value = serde_json::from_slice(&std::fs::read(dir.join("config.json"))?)?;
    Ok((open(dir)?, config))
}

fn own(config: ModelConfig) -> Result<Pretrained> {
    let tokenizer = Tokenizer::from_bytes(word_tokenizer().to_string().into_bytes())?;
    let config = ModelConfig { vocab_size: VOCAB, hidden_size: 24, heads: 4, kv_heads: 4, layers: 2, ..config };
    Ok(Pretrained { tensors: Decoder::new(&config, 5, &Device::Cpu)?.tensors(), config, tokenizer })
}

#[test]
fn what_is_exported_is_what_is_read() -> Result<()> {
    let presets = [(Preset::Seed, "gpt2"), (Preset::Small, "starcoder2"), (Preset::Stories15m, "llama")];
    for (preset, family) in presets {
        for attention in ["softmax", "favor:m=20", "favor:map=elu"] {
            let model = own(ModelConfig { attention: attention.parse().unwrap(), ..preset.load()?.0 })?;
            let dir = tempfile::tempdir()?;
            let (copy, json) = round_trip(&model, dir.path())?;
            if attention == "softmax" {
                assert_eq!((&json["model_type"], &json["performer"]), (&json!(family), &Value::Null));
            } else {
                assert_eq!((&json["model_type"], &json["performer"]["base"]), (&json!("performer"), &json!(family)));
            }
            assert_eq!((&json["bos_token_id"], &json["eos_token_id"]), (&json!(0), &json!(0)));
            assert_eq!(copy.config, model.config);
            let text = ids(30);
            assert_eq!(logits(&copy, &text)?, logits(&model, &text)?);
            let error = export(&model, dir.path()).unwrap_err().to_string();
            assert!(error.contains("holds a model already"), "{error}");
        }
    }
    // One linear layer makes a model a Performer.
    let by_layer = BTreeMap::from([(1, "favor:m=20".parse().unwrap())]);
    let softmax = ModelConfig { attention: "softmax".parse().unwrap(), ..Preset::Stories15m.load()?.0 };
    let model = own(ModelConfig { attention_by_layer: by_layer, ..softmax })?;
    let dir = tempfile::tempdir()?;
    let (copy, json) = round_trip(&model, dir.path())?;
    assert_eq!((&json["model_type"], &copy.config), (&json!("performer"), &model.config));
    assert_eq!(logits(&copy, &ids(30))?, logits(&model, &ids(30))?);

    let qwen2 = ModelConfig { qkv_bias: true, head_dim: Some(8), ..Preset::Stories15m.load()?.0 };
    let model = own(ModelConfig { attention: "softmax".parse().unwrap(), ..qwen2 })?;
    let dir = tempfile::tempdir()?;
    let (copy, json) = round_trip(&model, dir.path())?;
    assert_eq!((&json["model_type"], &copy.config), (&json!("qwen2"), &model.config));

    // Values of an odd dimension have positions where queries and keys have an even one.
    let odd = ModelConfig { head_dim: Some(5), ..Preset::Stories15m.load()?.0 };
    let model = own(ModelConfig { attention: "favor:m=16,key-dim=4".parse().unwrap(), ..odd })?;
    let dir = tempfile::tempdir()?;
    let (copy, _) = round_trip(&model, dir.path())?;
    assert_eq!(logits(&copy, &ids(30))?, logits(&model, &ids(30))?);

    // GPT-2 has no field for the head dimension, which its width gives.
    let gpt2 = ModelConfig { head_dim: Some(6), ..Preset::Seed.load()?.0 };
    let model = own(ModelConfig { attention: "softmax".parse().unwrap(), ..gpt2 })?;
    let dir = tempfile::tempdir()?;
    let (copy, json) = round_trip(&model, dir.path())?;
    assert_eq!(json["model_type"], json!("gpt2"));
    assert_eq!(logits(&copy, &ids(30))?, logits(&model, &ids(30))?);

    let odd = ModelConfig { feed_forward: FeedForwardKind::Gelu, ..Preset::Stories15m.load()?.0 };
    let odd = own(ModelConfig { attention: "softmax".parse().unwrap(), ..odd })?;
    let error = export(&odd, &dir.path().join("odd")).unwrap_err().to_string();
    assert!(error.contains("no Hugging Face architecture") && error.contains("Llama has"), "{error}");
    Ok(())
}

/// Returns a tokenizer that puts the token 3 before every text.
fn beginning_tokenizer() -> Value {
    let mut tokenizer = word_tokenizer();
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing", "pair": [],
        "single": [{"SpecialToken": {"id": "w3", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"w3": {"id": "w3", "ids": [3], "tokens": ["w3"]}},
    });
    tokenizer
}

/// A model that was trained here with one token between documents keeps it, although its tokenizer
/// puts another before every text.
#[test]
fn borders_of_a_training_are_those_of_its_export() -> Result<()> {
    for (attention, kept) in [("softmax", "llama"), ("favor:m=20", "performer")] {
        let mut model = own(ModelConfig { attention: attention.parse().unwrap(), ..Preset::Stories15m.load()?.0 })?;
        model.tokenizer = Tokenizer::from_bytes(beginning_tokenizer().to_string().into_bytes())?;
        let dir = tempfile::tempdir()?;
        let (copy, json) = round_trip(&model, dir.path())?;
        assert_eq!(json["model_type"], json!(kept));
        assert_eq!(copy.tokenizer.borders(), model.tokenizer.borders());
        assert_eq!((copy.tokenizer.eot(), copy.tokenizer.hash()), (0, model.tokenizer.hash()));
        assert_eq!(copy.config, model.config);
        assert_eq!(logits(&copy, &ids(30))?, logits(&model, &ids(30))?);
        // A tensor that softmax has no place for is still refused.
        if attention == "softmax" {
            let file = dir.path().join("model.safetensors");
            let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu)?;
            tensors.insert("model.extra".into(), candle_core::Tensor::new(&[1f32], &Device::Cpu)?);
            candle_core::safetensors::save(&tensors, &file)?;
            assert!(refusal(dir.path()).contains("hold model.extra"));
        }
    }
    Ok(())
}

/// The tokenizer decides whether a model begins, ends or separates documents; the configurations
/// decide what ends an answer.
#[test]
fn borders_are_found() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let mut config = llama_config(SMALL, "llama", true);
    config["eos_token_id"] = json!(7);
    write_folder(dir.path(), &config, &llama_weights(SMALL, false, true)?)?;
    write_json(&dir.path().join("generation_config.json"), &json!({"eos_token_id": [7, 9]}));
    let borders = open(dir.path())?.config.borders.unwrap();
    assert_eq!((borders.begin, borders.end, &borders.stop[..]), (None, Some(0), &[7, 9][..]));

    write_json(&dir.path().join("tokenizer.json"), &beginning_tokenizer());
    let model = open(dir.path())?;
    let borders = model.config.borders.clone().unwrap();
    assert_eq!((borders.begin, borders.end, &borders.stop[..]), (Some(3), None, &[7, 9][..]));
    let (copy, _) = round_trip(&model, &dir.path().join("copy"))?;
    assert_eq!(copy.config, model.config);
    // Other programs read there what ends a text; the token before a text does not.
    let told: Value = serde_json::from_slice(&std::fs::read(dir.path().join("copy/tokenizer_config.json"))?)?;
    let token = |id: u32| json!(model.tokenizer.token(id));
    assert_eq!((&told["bos_token"], &told["eos_token"]), (&token(3), &token(7)));
    Ok(())
}

#[test]
fn what_is_not_supported_is_named() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (config, weights) = (llama_config(SMALL, "llama", true), llama_weights(SMALL, false, true)?);
    for (field, value, words) in [
        ("model_type", json!("mamba"), "supported are llama"),
        ("sliding_window", json!(32), "sliding_window is 32"),
        ("layer_types", json!(["full_attention", "sliding_attention"]), "layer_types"),
        ("rope_scaling", json!({"rope_type": "llama3", "factor": 8.0}), "rope_scaling"),
        ("rope_scaling", json!({"type": "linear", "factor": 2.0}), "rope_scaling"),
        ("rope_scaling", json!({"rope_type": null, "type": "linear", "factor": 2.0}), "rope_scaling"),
        ("rope_scaling", json!({"factor": 2.0}), "rope_scaling"),
        ("rope_parameters", json!({"rope_type": "default", "partial_rotary_factor": 0.5}), "rope_parameters"),
        ("hidden_act", json!("relu"), "hidden_act"),
        ("attention_bias", json!(true), "attention_bias"),
        ("quantization_config", json!({"bits": 4}), "quantization_config"),
        ("hidden_size", json!("24"), "hidden_size is \"24\""),
        ("hidden_size", json!(-1), "hidden_size is -1"),
        ("num_hidden_layers", json!(null), "lacks num_hidden_layers"),
        ("num_hidden_layers", json!(3), "lack model.layers.2"),
        ("num_hidden_layers", json!(1), "hold model.layers.1"),
        ("num_hidden_layers", json!(1u64 << 40), "at most"),
        ("max_position_embeddings", json!(1u64 << 40), "at most"),
        ("num_attention_heads", json!(0), "heads is 0"),
        ("head_dim", json!(1u64 << 20), "head_dim is"),
        ("vocab_size", json!(40), "do not belong together"),
        ("tie_word_embeddings", json!(false), "lack lm_head.weight"),
    ] {
        let mut bad = config.clone();
        bad[field] = value;
        write_folder(dir.path(), &bad, &weights)?;
        let error = refusal(dir.path());
        assert!(error.contains(words), "{field}: '{words}' is not in: {error}");
        assert!(error.contains(dir.path().to_str().unwrap()), "{field}: no file in: {error}");
    }
    // If the field is left out, Mistral's window is 4096.
    let mut bad = llama_config(SMALL, "mistral", true);
    bad["max_position_embeddings"] = json!(8192);
    write_folder(dir.path(), &bad, &weights)?;
    assert!(refusal(dir.path()).contains("sliding_window"));
    // A shape that does not fit is found when the model is built.
    let mut bad = config.clone();
    bad["intermediate_size"] = json!(41);
    write_folder(dir.path(), &bad, &weights)?;
    let error = format!("{:#}", open(dir.path())?.decoder(&Device::Cpu).err().unwrap());
    assert!(error.contains("mlp.gate_proj.weight") && error.contains("41"), "{error}");
    Ok(())
}

#[test]
fn damaged_folders_are_refused() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (config, weights) = (llama_config(SMALL, "llama", true), llama_weights(SMALL, false, true)?);
    write_folder(dir.path(), &config, &weights)?;
    let file = |name: &str| dir.path().join(name);
    let whole = std::fs::read(file("model.safetensors"))?;
    for end in [0, 7, 100, whole.len() / 2, whole.len() - 1] {
        std::fs::write(file("model.safetensors"), &whole[..end])?;
        let error = refusal(dir.path());
        assert!(error.contains("model.safetensors") && error.contains("copy it again"), "{end}: {error}");
    }
    std::fs::remove_file(file("model.safetensors"))?;
    let error = refusal(dir.path());
    assert!(error.contains("no weights") && error.contains("model.safetensors"), "{error}");
    std::fs::write(file("model.safetensors"), &whole)?;
    std::fs::write(file("tokenizer.json"), "{}")?;
    assert!(refusal(dir.path()).contains("tokenizer.json"));
    std::fs::remove_file(file("tokenizer.json"))?;
    let error = refusal(dir.path());
    assert!(error.contains("tokenizer.json") && error.contains("save_pretrained"), "{error}");
    for name in ["nowhere", "/no/such/place", "model.safetensors"] {
        let error = format!("{:#}", Pretrained::open(name).err().unwrap());
        assert!(error.contains(name) && error.contains("hub"), "{error}");
    }
    let error = refusal(&file("model.safetensors"));
    assert!(error.contains("give the folder"), "{error}");
    Ok(())
}

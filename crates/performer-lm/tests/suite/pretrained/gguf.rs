//! These tests write GGUF files and compare them with Hugging Face folders of the same weights.

use std::{collections::HashMap, fs::File, path::Path};

use anyhow::Result;
use candle_core::{
    Device, Tensor,
    quantized::{
        GgmlDType, QTensor,
        gguf_file::{self, Value},
    },
};
use performer_lm::{
    data::{Corpus, DataSpec, Tokenizer},
    listener::Silent,
};

use super::{llama2c::run_c_encode, support::*};

/// Returns sizes that fit the blocks of 32 numbers of quantised types.
fn sizes(vocab: usize) -> Sizes {
    Sizes { vocab, hidden: 32, inner: 64, layers: 2, heads: 4, kv_heads: 2, head_dim: 8 }
}

/// Reorders rows from halves to neighbouring pairs, the order of rotary dimensions that llama.cpp's
/// conversion has.
fn interleaved(rows: &Tensor, heads: usize) -> Result<Tensor> {
    let (n, columns) = rows.dims2()?;
    let order = rows.reshape((heads, 2, n / heads / 2, columns))?.transpose(1, 2)?;
    Ok(order.contiguous()?.reshape((n, columns))?)
}

/// Returns the weights under llama.cpp's names.
fn tensors(s: Sizes, weights: &Weights, kind: GgmlDType) -> Result<Vec<(String, QTensor)>> {
    let mut all = Vec::new();
    for (name, tensor) in weights {
        let tensor = match () {
            () if name.contains("q_proj") => interleaved(tensor, s.heads)?,
            () if name.contains("k_proj") => interleaved(tensor, s.kv_heads)?,
            () => tensor.clone(),
        };
        let mut theirs = name.clone();
        for (from, to) in [
            ("model.embed_tokens", "token_embd"),
            ("model.norm", "output_norm"),
            ("lm_head", "output"),
            ("model.layers", "blk"),
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
        ] {
            theirs = theirs.replace(from, to);
        }
        let kind = if tensor.rank() == 1 { GgmlDType::F32 } else { kind };
        all.push((theirs, QTensor::quantize(&tensor, kind)?));
    }
    Ok(all)
}

type Metadata = HashMap<String, Value>;

fn metadata(s: Sizes) -> Metadata {
    let numbers = [
        ("llama.block_count", s.layers),
        ("llama.context_length", 64),
        ("llama.embedding_length", s.hidden),
        ("llama.feed_forward_length", s.inner),
        ("llama.attention.head_count", s.heads),
        ("llama.attention.head_count_kv", s.kv_heads),
        ("llama.rope.dimension_count", s.head_dim),
    ];
    let mut all: Metadata = numbers.map(|(name, n)| (name.to_owned(), Value::U32(n as u32))).into();
    all.insert("general.architecture".into(), Value::String("llama".into()));
    all.insert("llama.attention.layer_norm_rms_epsilon".into(), Value::F32(1e-4));
    all.insert("llama.rope.freq_base".into(), Value::F32(500.0));
    all
}

fn strings(list: &[String]) -> Value {
    Value::Array(list.iter().cloned().map(Value::String).collect())
}

/// Returns a byte-level tokenizer trained on the sample, and its metadata with the pre-tokenizer
/// `words`.
fn byte_level(words: &str) -> Result<(Tokenizer, Metadata)> {
    let tokenizer = Tokenizer::train(&Corpus::load(&DataSpec::Sample, &Silent)?.train, 400)?;
    let json: serde_json::Value = serde_json::from_slice(tokenizer.as_bytes())?;
    let vocab: HashMap<String, usize> = serde_json::from_value(json["model"]["vocab"].clone())?;
    let merges: Vec<[String; 2]> = serde_json::from_value(json["model"]["merges"].clone())?;
    let mut tokens = vec![String::new(); vocab.len()];
    for (token, id) in vocab {
        tokens[id] = token;
    }
    let kinds = (0..tokens.len()).map(|id| Value::I32(if id == 0 { 3 } else { 1 }));
    let metadata = [
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String(words.into())),
        ("tokenizer.ggml.tokens", strings(&tokens)),
        ("tokenizer.ggml.merges", strings(&merges.iter().map(|pair| pair.join(" ")).collect::<Vec<_>>())),
        ("tokenizer.ggml.token_type", Value::Array(kinds.collect())),
        ("tokenizer.ggml.bos_token_id", Value::U32(1)),
        ("tokenizer.ggml.eos_token_id", Value::U32(2)),
    ];
    Ok((tokenizer, metadata.map(|(name, value)| (name.to_owned(), value)).into()))
}

fn write(path: &Path, metadata: &Metadata, tensors: &[(String, QTensor)]) -> Result<()> {
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(name, value)| (&**name, value)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (&**name, tensor)).collect();
    Ok(gguf_file::write(&mut File::create(path)?, &metadata, &tensors)?)
}

#[test]
fn weights_are_those_of_the_folder() -> Result<()> {
    let (_, vocabulary) = byte_level("gpt-2")?;
    let s = sizes(400);
    for (kind, tied) in
        [(GgmlDType::F32, true), (GgmlDType::F32, false), (GgmlDType::Q8_0, true), (GgmlDType::Q4_1, false)]
    {
        let dir = tempfile::tempdir()?;
        let weights = llama_weights(s, false, tied)?;
        let path = dir.path().join("model.gguf");
        let mut all = metadata(s);
        all.extend(vocabulary.clone());
        write(&path, &all, &tensors(s, &weights, kind)?)?;
        let model = open(&path)?;
        assert_eq!(model.config.tied_head, tied);

        // The folder has the same weights, rounded as this type rounds them.
        let rounded: Weights = weights
            .iter()
            .map(|(name, t)| {
                let kind = if t.rank() == 1 { GgmlDType::F32 } else { kind };
                Ok((name.clone(), QTensor::quantize(t, kind)?.dequantize(&Device::Cpu)?))
            })
            .collect::<Result<_>>()?;
        let folder = dir.path().join("folder");
        std::fs::create_dir(&folder)?;
        write_folder(&folder, &llama_config(s, "llama", tied), &rounded)?;
        assert_same(&logits(&model, &ids(21))?, &logits(&open(&folder)?, &ids(21))?);
    }
    Ok(())
}

fn tokenizer_of(metadata: Metadata, s: Sizes) -> Result<Tokenizer> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("model.gguf");
    write(&path, &metadata, &tensors(s, &llama_weights(s, false, true)?, GgmlDType::F32)?)?;
    Ok(open(&path)?.tokenizer)
}

#[test]
fn byte_level_tokenizers_are_read() -> Result<()> {
    let texts = ["Once upon a time, Lily's 1234 cats", "  two\n\n spaces\t", "日本語 🦊 é", "<|endoftext|>", ""];
    let all = |words: &str| -> Result<(Tokenizer, Tokenizer)> {
        let (original, vocabulary) = byte_level(words)?;
        let mut all = metadata(sizes(400));
        all.extend(vocabulary);
        Ok((original, tokenizer_of(all, sizes(400))?))
    };
    let (original, read) = all("gpt-2")?;
    for text in texts {
        assert_eq!(read.encode(text)?, original.encode(text)?, "{text:?}");
        assert_eq!(read.decode(&read.encode(text)?)?, text);
    }
    assert_eq!((read.borders().begin, read.borders().end, &read.borders().stop[..]), (None, Some(0), &[2][..]));
    // Tokens of SmolLM and Qwen2 have at most one digit, those of Llama 3 at most three.
    for (words, most) in [("smollm", 1), ("qwen2", 1), ("llama-bpe", 3), ("llama3", 3), ("llama-v3", 3)] {
        let (_, read) = all(words)?;
        // As in llama.cpp, texts of Llama 3 begin with a token where the file says nothing of it.
        let begin = words.starts_with("llama").then_some(1);
        assert_eq!(read.borders().begin, begin, "{words}");
        for text in texts {
            assert_eq!(read.decode(&read.encode(text)?)?, text, "{words}");
        }
        let numbers: Vec<String> =
            read.encode("12345678")?.iter().map(|&id| read.decode(&[id])).collect::<Result<_>>()?;
        assert!(numbers.iter().all(|n| n.len() <= most), "{words}: {numbers:?}");
    }
    Ok(())
}

/// Returns scores, spellings and kinds of tokens, and the metadata that has them.
fn scored() -> (Vec<(f32, String, i32)>, Metadata) {
    let mut vocabulary: Vec<(f32, String, i32)> =
        vec![(0.0, "<unk>".into(), 2), (0.0, "<s>".into(), 3), (0.0, "</s>".into(), 3)];
    vocabulary.extend((0..=255u8).map(|byte| (0.0, format!("<0x{byte:02X}>"), 6)));
    let texts = ["he", "▁t", "▁a", "in", "▁the", "an", "▁", "t", "h", "e", "a", "n", "i"];
    vocabulary.extend(texts.iter().enumerate().map(|(i, text)| (-(i as f32), (*text).to_owned(), 1)));
    let list = |entry: fn(&(f32, String, i32)) -> Value| Value::Array(vocabulary.iter().map(entry).collect());
    let metadata = [
        ("tokenizer.ggml.model", Value::String("llama".into())),
        ("tokenizer.ggml.tokens", list(|(_, token, _)| Value::String(token.clone()))),
        ("tokenizer.ggml.scores", list(|(score, ..)| Value::F32(*score))),
        ("tokenizer.ggml.token_type", list(|(.., kind)| Value::I32(*kind))),
        ("tokenizer.ggml.bos_token_id", Value::U32(1)),
        ("tokenizer.ggml.eos_token_id", Value::U32(2)),
    ];
    let metadata = metadata.map(|(name, value)| (name.to_owned(), value)).into();
    (vocabulary, metadata)
}

/// Writes a model with a byte-level tokenizer and one with a scored one, of these names.
#[cfg(feature = "cli")]
pub(crate) fn write_examples(dir: &Path, [with_merges, with_scores]: [&str; 2]) -> Result<()> {
    let (vocabulary, of_scores) = scored();
    for (name, tokenizer, s) in
        [(with_merges, byte_level("gpt-2")?.1, sizes(400)), (with_scores, of_scores, sizes(vocabulary.len()))]
    {
        let mut all = metadata(s);
        all.extend(tokenizer);
        write(&dir.join(name), &all, &tensors(s, &llama_weights(s, false, true)?, GgmlDType::Q8_0)?)?;
    }
    Ok(())
}

#[test]
fn scored_tokenizers_are_read() -> Result<()> {
    let (vocabulary, of_scores) = scored();
    let s = sizes(vocabulary.len());
    let mut all = metadata(s);
    all.extend(of_scores);
    let read = tokenizer_of(all.clone(), s)?;
    assert_eq!((read.borders().begin, read.borders().end, &read.borders().stop[..]), (Some(1), None, &[2][..]));
    // A chat model ends its turn by a token of its own, or by the one that ends its texts.
    let none = [Value::U32(vocabulary.len() as u32), Value::I32(-1)].map(|none| (none, &[2][..]));
    for (turn, stop) in [(Value::U32(3), &[2, 3][..]), (Value::U32(2), &[2])].into_iter().chain(none) {
        let mut chat = all.clone();
        chat.insert("tokenizer.ggml.eot_token_id".into(), turn);
        assert_eq!(tokenizer_of(chat, s)?.borders().stop, stop);
    }
    let spelled: Vec<(f32, Vec<u8>)> =
        vocabulary.iter().map(|(score, token, _)| (*score, token.replace('▁', " ").into_bytes())).collect();
    for text in ["the thin ant", " he  ate in the heat", "\nthe 日 é", "<s>", ""] {
        assert_eq!(read.encode(text)?, run_c_encode(&spelled, text), "{text:?}");
        assert_eq!(read.decode(&read.encode(text)?)?, text);
    }
    all.insert("tokenizer.ggml.add_space_prefix".into(), Value::Bool(false));
    all.insert("tokenizer.ggml.add_bos_token".into(), Value::Bool(false));
    let plain = tokenizer_of(all, s)?;
    let spelled =
        |text| -> Result<Vec<_>> { Ok(plain.encode(text)?.into_iter().map(|id| plain.token(id).unwrap()).collect()) };
    assert_eq!(spelled("the he")?, ["t", "he", "▁", "he"]);
    assert_eq!(plain.decode(&plain.encode(" the an")?)?, " the an");
    assert_eq!((plain.borders().begin, plain.borders().end), (None, Some(2)));
    Ok(())
}

#[test]
fn what_is_not_supported_or_damaged_is_named() -> Result<()> {
    let s = sizes(400);
    let (_, vocabulary) = byte_level("gpt-2")?;
    let mut good = metadata(s);
    good.extend(vocabulary);
    let tensors = tensors(s, &llama_weights(s, false, true)?, GgmlDType::F32)?;
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("model.gguf");
    let text = |text: &str| Value::String(text.into());
    for (name, value, word) in [
        ("general.architecture", text("gemma"), "only llama"),
        ("llama.attention.sliding_window", Value::U32(16), "sliding_window is 16"),
        ("llama.rope.scaling.type", text("yarn"), "scaling.type is yarn"),
        ("llama.expert_count", Value::U32(8), "expert_count is 8"),
        ("llama.rope.dimension_count", Value::U32(4), "dimension_count is 4"),
        ("llama.embedding_length", text("32"), "embedding_length"),
        ("llama.block_count", Value::U32(3), "blk.2"),
        ("llama.block_count", Value::U32(1), "blk.1"),
        ("tokenizer.ggml.pre", text("default"), "supported are gpt-2"),
        ("tokenizer.ggml.model", text("bert"), "tokenizer.ggml.model is bert"),
        ("tokenizer.ggml.merges", Value::Array(vec![text("a")]), "merge"),
        ("tokenizer.ggml.tokens", Value::U32(1), "must be a list"),
        ("general.alignment", Value::U32(0), "alignment is 0"),
        ("tokenizer.ggml.eos_token_id", Value::I32(-1), "the id of a token"),
        ("tokenizer.ggml.eos_token_id", Value::F32(1.5), "the id of a token"),
        ("llama.block_count", Value::F32(2.5), "a whole number"),
    ] {
        let mut bad = good.clone();
        bad.insert(name.into(), value);
        write(&path, &bad, &tensors)?;
        let error = refusal(&path);
        assert!(error.contains("model.gguf") && error.contains(word), "'{word}' is not in: {error}");
    }
    write(&path, &good, &tensors)?;
    open(&path)?;
    let whole = std::fs::read(&path)?;
    for end in [4, 20, 1000, whole.len() / 2, whole.len() - 5000] {
        std::fs::write(&path, &whole[..end])?;
        let error = refusal(&path);
        assert!(error.contains("model.gguf") && error.contains("copy it again"), "{end}: {error}");
    }
    // Behind the name of a tensor stand the number of its dimensions and, here, its only one.
    let name = b"output_norm.weight";
    let dimension = whole.windows(name.len()).position(|part| part == name).expect("the tensor") + name.len() + 4;
    for size in [0, 1 << 40, u64::MAX] {
        let mut lying = whole.clone();
        lying[dimension..dimension + 8].copy_from_slice(&size.to_le_bytes());
        std::fs::write(&path, lying)?;
        let error = refusal(&path);
        assert!(error.contains(&format!("output_norm.weight has shape [{size}]")), "{error}");
    }
    std::fs::write(&path, b"something else")?;
    assert!(refusal(&path).contains("no GGUF file"));
    Ok(())
}

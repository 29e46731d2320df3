//! These tests compare llama2.c's files: weights with candle-transformers' model, the tokenizer
//! with llama2.c's algorithm.

use std::{fs::File, io::Write, path::Path};

use anyhow::Result;
use candle_core::{Device, Tensor};
use candle_transformers::models::{llama2_c, llama2_c_weights::TransformerWeights};

use super::support::*;

/// A `Vocabulary` lists the scores and spellings of tokens.
pub(crate) type Vocabulary = Vec<(f32, Vec<u8>)>;

/// Encodes as run.c does: it takes characters, or their bytes where they have no token; then it
/// merges the pair with the best score, the first of equals, as long as there is one.
pub(crate) fn run_c_encode(vocabulary: &Vocabulary, text: &str) -> Vec<u32> {
    let find = |bytes: &[u8]| vocabulary.iter().position(|(_, token)| token == bytes);
    let mut tokens: Vec<usize> = Vec::new();
    if !text.is_empty() {
        tokens.extend(find(b" "));
    }
    for c in text.chars() {
        let mut buffer = [0; 4];
        let bytes = c.encode_utf8(&mut buffer).as_bytes();
        match find(bytes) {
            Some(id) => tokens.push(id),
            None => tokens.extend(bytes.iter().map(|&byte| usize::from(byte) + 3)),
        }
    }
    loop {
        let mut best: Option<(f32, usize, usize)> = None;
        for i in 1..tokens.len() {
            let joined = [&vocabulary[tokens[i - 1]].1[..], &vocabulary[tokens[i]].1].concat();
            if let Some(id) = find(&joined)
                && best.is_none_or(|(score, ..)| vocabulary[id].0 > score)
            {
                best = Some((vocabulary[id].0, i - 1, id));
            }
        }
        let Some((_, at, id)) = best else { break };
        tokens.splice(at..at + 2, [id]);
    }
    tokens.into_iter().map(|id| id as u32).collect()
}

/// Returns special tokens, bytes, and texts. Longer texts score lower, as in a trained vocabulary,
/// but ids are in no order.
fn vocabulary() -> Vocabulary {
    let mut all: Vocabulary = ["<unk>", "\n<s>\n", "\n</s>\n"].map(|token| (0.0, token.into())).into();
    all.extend((0..=255u8).map(|byte| (0.0, format!("<0x{byte:02X}>").into_bytes())));
    let texts = ["he", " t", " a", "in", " the", "an", "the", " an", "é", "ing", "aé", "éa", "aéa", " thing"];
    let characters = [" ", "t", "h", "e", "a", "n", "i", "g", ".", "<", "0", "x", "4", "1", ">"];
    let scored = texts.iter().chain(&characters).enumerate().map(|(i, text)| (-(i as f32), text.as_bytes().to_vec()));
    let (even, odd): (Vocabulary, Vocabulary) = scored.partition(|(score, _)| score % 2.0 == 0.0);
    all.extend(odd.into_iter().rev().chain(even));
    all
}

fn write_vocabulary(path: &Path, vocabulary: &Vocabulary) {
    let mut file = File::create(path).unwrap();
    let longest = vocabulary.iter().map(|(_, token)| token.len()).max().unwrap();
    file.write_all(&(longest as u32).to_le_bytes()).unwrap();
    for (score, token) in vocabulary {
        file.write_all(&score.to_le_bytes()).unwrap();
        file.write_all(&(token.len() as u32).to_le_bytes()).unwrap();
        file.write_all(token).unwrap();
    }
}

pub(crate) fn read_vocabulary(path: &Path) -> Vocabulary {
    let bytes = std::fs::read(path).unwrap();
    let (mut rest, mut all) = (&bytes[4..], Vec::new());
    while let Some((head, tail)) = rest.split_at_checked(8) {
        let score = f32::from_le_bytes(head[..4].try_into().unwrap());
        let (token, tail) = tail.split_at(u32::from_le_bytes(head[4..].try_into().unwrap()) as usize);
        all.push((score, token.to_vec()));
        rest = tail;
    }
    all
}

fn sizes(kv_heads: usize) -> Sizes {
    Sizes { vocab: vocabulary().len(), kv_heads, ..SMALL }
}

const CONTEXT: usize = 32;

/// Returns the content of a model file, version 0 or 1.
fn model_bytes(version: u32, s: Sizes, tied: bool) -> Result<Vec<u8>> {
    let weights = llama_weights(s, false, tied)?;
    let mut out = Vec::new();
    let numbers = [s.hidden, s.inner, s.layers, s.heads, s.kv_heads, s.vocab, CONTEXT].map(|n| n as i32);
    if version == 1 {
        out.extend(0x616b_3432u32.to_le_bytes());
        out.extend(version.to_le_bytes());
    }
    for (i, n) in numbers.into_iter().enumerate() {
        let n = if version == 0 && i == 5 && !tied { -n } else { n };
        out.extend(n.to_le_bytes());
    }
    if version == 1 {
        out.push(u8::from(tied));
        out.resize(256, 0);
    }
    let mut put = |t: &Tensor| {
        for x in t.flatten_all().unwrap().to_vec1::<f32>().unwrap() {
            out.extend(x.to_le_bytes());
        }
    };
    let layers =
        |part: &str| (0..s.layers).map(|i| weights[&format!("model.layers.{i}.{part}.weight")].clone()).collect();
    let one = |name: &str| vec![weights[name].clone()];
    let (embedding, norm) = (one("model.embed_tokens.weight"), one("model.norm.weight"));
    let norms: [Vec<Tensor>; 2] = [layers("input_layernorm"), layers("post_attention_layernorm")];
    let attention: Vec<Tensor> = ["q_proj", "k_proj", "v_proj", "o_proj"]
        .iter()
        .flat_map(|p| -> Vec<Tensor> { layers(&format!("self_attn.{p}")) })
        .collect();
    let mlp: Vec<Tensor> = ["gate_proj", "down_proj", "up_proj"]
        .iter()
        .flat_map(|p| -> Vec<Tensor> { layers(&format!("mlp.{p}")) })
        .collect();
    let half = s.head_dim / 2;
    let angles: Vec<f64> = (0..CONTEXT * half)
        .map(|i| (i / half) as f64 * 10_000f64.powf(-2.0 * (i % half) as f64 / s.head_dim as f64))
        .collect();
    let table = |f: fn(f64) -> f64| {
        Tensor::from_vec(angles.iter().map(|&a| f(a) as f32).collect(), CONTEXT * half, &Device::Cpu)
    };
    let [first, second] = norms;
    let order = match version {
        0 => [embedding, first, attention, second, mlp, norm, vec![table(f64::cos)?, table(f64::sin)?]].concat(),
        _ => [first, second, norm, embedding, attention, mlp].concat(),
    };
    order.iter().for_each(&mut put);
    if !tied {
        put(&weights["lm_head.weight"]);
    }
    Ok(out)
}

/// Writes a model of version 0 and one of version 1, of these names, and their tokenizer.
#[cfg(feature = "cli")]
pub(crate) fn write_examples(dir: &Path, names: [&str; 2]) -> Result<()> {
    for (version, name) in names.into_iter().enumerate() {
        std::fs::write(dir.join(name), model_bytes(version as u32, sizes(3), true)?)?;
    }
    write_vocabulary(&dir.join("tokenizer.bin"), &vocabulary());
    Ok(())
}

fn texts() -> Vec<String> {
    let parts = [
        " ", "the", "thing", "an", "aé", "éa", "é", "e", "<0x41>", "\n", "日本", "🦊", ".", "\u{0}", "▁", "<s>",
        "\n</s>\n",
    ];
    let mut all = vec![String::new(), "the thing and the ant.".into()];
    for (i, a) in parts.iter().enumerate() {
        for (j, b) in parts.iter().enumerate() {
            for step in [1, 5, 7] {
                all.push([a, b, parts[(i * j + step) % parts.len()], parts[(i + j * step) % parts.len()]].concat());
            }
        }
    }
    all
}

#[test]
fn version_0_is_candles_llama2_c() -> Result<()> {
    let s = sizes(SMALL.heads);
    let bytes = model_bytes(0, s, true)?;
    let dir = tempfile::tempdir()?;
    std::fs::write(dir.path().join("model.bin"), &bytes)?;
    write_vocabulary(&dir.path().join("tokenizer.bin"), &vocabulary());
    let ours = open(&dir.path().join("model.bin"))?;
    assert_eq!(ours.config.context, CONTEXT);

    let mut reader = &bytes[..];
    let config = llama2_c::Config::from_reader(&mut reader)?;
    let weights = TransformerWeights::from_reader(&mut reader, &config, &Device::Cpu)?;
    let builder = weights.var_builder(&config, &Device::Cpu)?;
    let mut cache = llama2_c::Cache::new(false, &config, builder.pp("rot"))?;
    let theirs = llama2_c::Llama::load(builder, config)?;
    let ids = ids(25);
    let expected = theirs
        .forward(&Tensor::new(&ids[..], &Device::Cpu)?.unsqueeze(0)?, 0, &mut cache)?
        .squeeze(0)?
        .to_vec2::<f32>()?;
    assert_same(&logits(&ours, &ids)?, &expected);
    Ok(())
}

#[test]
fn versions_and_heads() -> Result<()> {
    let dir = tempfile::tempdir()?;
    write_vocabulary(&dir.path().join(format!("tok{}.bin", vocabulary().len())), &vocabulary());
    for tied in [true, false] {
        let mut all = Vec::new();
        for version in [0, 1] {
            let path = dir.path().join(format!("{version}-{tied}.bin"));
            std::fs::write(&path, model_bytes(version, sizes(3), tied)?)?;
            let model = open(&path)?;
            assert_eq!((model.config.tied_head, model.config.kv_heads), (tied, 3));
            all.push(logits(&model, &ids(20))?);
        }
        assert_same(&all[0], &all[1]);
    }
    Ok(())
}

#[test]
fn tokens_are_run_cs() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("model.bin");
    std::fs::write(&path, model_bytes(1, sizes(3), true)?)?;
    write_vocabulary(&dir.path().join("tokenizer.bin"), &vocabulary());
    let model = open(&path)?;
    let borders = model.config.borders.clone().unwrap();
    assert_eq!((borders.begin, borders.end), (Some(1), None));
    for text in texts() {
        let tokens = model.tokenizer.encode(&text)?;
        assert_eq!(tokens, run_c_encode(&vocabulary(), &text), "{text:?}");
        assert_eq!(model.tokenizer.decode(&tokens)?, text);
    }
    // Words after a prompt keep the space before them.
    let prompt = model.tokenizer.encode("the")?;
    let mut stream = model.tokenizer.stream_after(&prompt);
    let words: Vec<_> = model.tokenizer.encode("the thing")?[prompt.len()..].to_vec();
    let said: Result<Vec<_>> = words.iter().map(|&id| stream.push(id)).collect();
    assert_eq!(said?.into_iter().flatten().collect::<String>(), " thing");
    Ok(())
}

#[test]
fn damage_is_named() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("model.bin");
    let tokenizer = dir.path().join("tokenizer.bin");
    let good = model_bytes(0, sizes(3), true)?;
    let refuse = |bytes: &[u8], word: &str| {
        std::fs::write(&path, bytes).unwrap();
        let error = refusal(&path);
        assert!(error.contains("model.bin") && error.contains(word), "'{word}' is not in: {error}");
    };
    refuse(&good, "tok288.bin or tokenizer.bin");
    write_vocabulary(&tokenizer, &vocabulary());
    for end in [0, 10, 27] {
        refuse(&good[..end], "header");
    }
    refuse(&good[..good.len() / 2], "incomplete");
    refuse(&[&good[..], &[0; 4]].concat(), "bytes of weights");
    refuse(&[&0i32.to_le_bytes(), &good[4..]].concat(), "holds 0");
    let quantised = [0x616b_3432u32.to_le_bytes(), 2u32.to_le_bytes()].concat();
    refuse(&[&quantised[..], &good].concat(), "version 2");
    refuse(&std::fs::read(&tokenizer)?, "llama2.c");
    refuse(&[&good[..8], &i32::MAX.to_le_bytes(), &good[12..]].concat(), "layers");

    std::fs::write(&path, &good)?;
    let whole = std::fs::read(&tokenizer)?;
    for (bytes, word) in
        [(&whole[..whole.len() - 3], "too short"), (&[&whole[..], b"more"].concat()[..], "more tokens")]
    {
        std::fs::write(&tokenizer, bytes)?;
        let error = refusal(&path);
        assert!(error.contains("tokenizer.bin") && error.contains(word), "{error}");
    }
    Ok(())
}

//! These tests use the models of other crates in the examples: with softmax they compute what
//! candle-transformers' own models do, and with FAVOR they decode and mask correctly.

// The examples use more of these modules than the tests do.
#[allow(dead_code)]
#[path = "../../examples/bert/agreement.rs"]
mod agreement;
#[allow(dead_code)]
#[path = "../../examples/bert/attentions.rs"]
mod attentions;
#[allow(dead_code)]
#[path = "../../examples/bert/embed.rs"]
mod embed;
#[allow(dead_code)]
#[path = "../../examples/shared/folder.rs"]
mod folder;
#[path = "../../examples/llama/model.rs"]
mod llama_model;
#[path = "../../examples/bert/model.rs"]
mod model;
#[path = "../../examples/bert/training.rs"]
mod training;

use std::{collections::HashMap, fs, path::Path, sync::Arc};

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use candle_transformers::models::{bert, llama};
use performer_core::{
    Attention, Favor, FavorConfig, Inputs, Mask, Softmax, State, Windowed,
    features::fit::Moments,
    projection::{derive_seed, draw_normal},
};

use agreement::Agreement;
use attentions::{CENTRED, KINDS, Observed, Uniform};
use embed::{embed, padded, pool};
use folder::Folder;
use llama_model::{Cache, Llama};
use model::BertModel;
use training::{Learner, Part, Student, Trainer, saved_attention};

const DEVICE: Device = Device::Cpu;

/// `Drawn` makes the weights of any model: each tensor is a function of its name, and so large that
/// attention is far from uniform.
struct Drawn;

impl SimpleBackend for Drawn {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let seed = name.bytes().fold(7u64, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
        let (mean, deviation) = match shape.dims() {
            [_] if name.ends_with("weight") => (1.0, 0.3),
            [_] => (0.0, 0.3),
            _ if name.contains("embed") => (0.0, 0.7),
            [_, columns] => (0.0, 1.2 / (*columns as f64).sqrt()),
            other => candle_core::bail!("{name} has shape {other:?}"),
        };
        let normal = draw_normal(shape.elem_count(), seed)?;
        let numbers: Vec<f64> = normal.into_iter().map(|x| mean + deviation * x).collect();
        Tensor::from_vec(numbers, shape, device)?.to_dtype(dtype)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        candle_core::bail!("{name} needs a shape")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        name.ends_with(".weight") || name.ends_with(".bias")
    }
}

fn drawn() -> VarBuilder<'static> {
    VarBuilder::from_backend(Box::new(Drawn), DType::F32, DEVICE)
}

fn tokens(count: usize, seed: u64, vocabulary: usize) -> Result<Vec<u32>> {
    let normal = draw_normal(count, seed)?;
    Ok(normal.into_iter().map(|x| (x.abs() * 1e4) as u32 % vocabulary as u32).collect())
}

fn difference(a: &Tensor, b: &Tensor) -> Result<f32> {
    assert_eq!(a.dims(), b.dims());
    (a - b)?.abs()?.max_all()?.to_scalar()
}

fn favor(features: usize, head_dim: usize, layer: usize) -> Result<Favor> {
    let config = FavorConfig::default().with_features(features);
    Favor::new(&config, head_dim, derive_seed(3, layer as u64), DType::F32, &DEVICE)
}

const LLAMA_HEAD_DIM: usize = 4;

fn llama_config(kv_heads: usize, tied: bool) -> llama::Config {
    llama::Config {
        hidden_size: 24,
        intermediate_size: 40,
        vocab_size: 60,
        num_hidden_layers: 2,
        num_attention_heads: 24 / LLAMA_HEAD_DIM,
        num_key_value_heads: kv_heads,
        max_position_embeddings: 150,
        tie_word_embeddings: tied,
        ..llama::Config::config_7b_v2(false)
    }
}

/// Returns the logits after each of the first tokens `(B, T)` of pieces, through a cache.
fn llama_pieces(model: &Llama, config: &llama::Config, x: &Tensor, ends: &[usize]) -> Result<(Vec<Tensor>, Cache)> {
    let mut cache = Cache::new(true, DType::F32, config, &DEVICE)?;
    let mut start = 0;
    let mut logits = Vec::new();
    for &end in ends {
        logits.push(model.forward(&x.narrow(1, start, end - start)?, start, &mut cache)?);
        start = end;
    }
    Ok((logits, cache))
}

/// Returns the logits after the first tokens, without a cache.
fn llama_pass(model: &Llama, config: &llama::Config, x: &Tensor, end: usize) -> Result<Tensor> {
    model.forward(&x.narrow(1, 0, end)?, 0, &mut Cache::new(false, DType::F32, config, &DEVICE)?)
}

const ENDS: [usize; 6] = [7, 8, 9, 45, 46, 111];

#[test]
fn llama_with_softmax_is_candles() -> Result<()> {
    for (kv_heads, tied) in [(3, true), (6, false), (1, false)] {
        let config = llama_config(kv_heads, tied);
        let theirs = llama::Llama::load(drawn(), &config)?;
        let ours = Llama::load(drawn(), &config, &|_| Ok(Arc::new(Softmax::new())))?;
        let x = Tensor::from_vec(tokens(2 * 111, 1, 60)?, (2, 111), &DEVICE)?;
        let (pieces, _) = llama_pieces(&ours, &config, &x, &ENDS)?;
        let mut cache = llama::Cache::new(true, DType::F32, &config, &DEVICE)?;
        let mut start = 0;
        for (&end, piece) in ENDS.iter().zip(&pieces) {
            let expected = theirs.forward(&x.narrow(1, start, end - start)?, start, &mut cache)?;
            start = end;
            for (what, logits) in [("in pieces", piece), ("in one pass", &llama_pass(&ours, &config, &x, end)?)] {
                let error = difference(logits, &expected)?;
                assert!(error < 1e-4, "{kv_heads} key heads, {end} tokens {what}: logits differ by {error}");
            }
        }
    }
    Ok(())
}

/// Text in pieces and single tokens gives what text in one pass gives, and FAVOR's state is as
/// large after 111 tokens as after 7.
#[test]
fn llama_decodes_with_any_attention() -> Result<()> {
    let config = llama_config(3, true);
    let x = Tensor::from_vec(tokens(2 * 111, 2, 60)?, (2, 111), &DEVICE)?;
    type Make = fn(usize) -> Result<Arc<dyn Attention>>;
    let attentions: [(&str, Make, bool); 3] = [
        ("softmax", |_| Ok(Arc::new(Softmax::new())), true),
        ("favor", |layer| Ok(Arc::new(favor(16, LLAMA_HEAD_DIM, layer)?)), false),
        ("window", |layer| Ok(Arc::new(Windowed::new(7, favor(16, LLAMA_HEAD_DIM, layer)?)?)), false),
    ];
    for (name, attention, grows) in attentions {
        let model = Llama::load(drawn(), &config, &attention)?;
        let (pieces, cache) = llama_pieces(&model, &config, &x, &ENDS)?;
        for (&end, piece) in ENDS.iter().zip(&pieces) {
            let error = difference(piece, &llama_pass(&model, &config, &x, end)?)?;
            assert!(error < 1e-4, "{name}, {end} tokens: logits differ by {error}");
        }
        let bytes = |cache: &Cache| cache.states.iter().map(State::bytes).sum::<usize>();
        let (_, early) = llama_pieces(&model, &config, &x, &ENDS[..2])?;
        assert_eq!(bytes(&cache) > bytes(&early), grows, "{name}: {} after {} bytes", bytes(&cache), bytes(&early));
    }
    Ok(())
}

#[test]
fn llama_refuses_what_it_cannot_do() -> Result<()> {
    let config = llama_config(3, true);
    let model = Llama::load(drawn(), &config, &|_| Ok(Arc::new(Softmax::new())))?;
    let x = Tensor::zeros((1, 151), DType::U32, &DEVICE)?;
    let message = llama_pass(&model, &config, &x, 151).unwrap_err().to_string();
    assert!(message.contains("151 tokens") && message.contains("150"), "{message}");
    let scaled = llama::Config { rope_scaling: Some(llama::Llama3RopeConfig::default()), ..config };
    let message = Cache::new(true, DType::F32, &scaled, &DEVICE).err().map(|e| e.to_string()).unwrap_or_default();
    assert!(message.contains("rope_scaling"), "{message}");
    Ok(())
}

const BERT_HEADS: usize = 4;

fn bert_config(hidden_act: bert::HiddenAct) -> bert::Config {
    bert::Config {
        vocab_size: 60,
        hidden_size: 32,
        num_hidden_layers: 2,
        num_attention_heads: BERT_HEADS,
        intermediate_size: 48,
        hidden_act,
        max_position_embeddings: 70,
        ..bert::Config::default()
    }
}

/// Returns token lists of unequal lengths.
fn texts() -> Result<Vec<Vec<u32>>> {
    [40, 3, 1, 17, 66, 9, 33, 2].into_iter().enumerate().map(|(i, n)| tokens(n, i as u64, 60)).collect()
}

fn bert_with(attention: &dyn Fn(usize) -> Result<Arc<dyn Attention>>) -> Result<BertModel> {
    BertModel::load(drawn(), &bert_config(bert::HiddenAct::Gelu), attention)
}

fn embeddings(model: &BertModel, texts: &[Vec<u32>], pad: u32) -> Result<Vec<Vec<f32>>> {
    embed(&|ids, types, mask| model.forward(ids, types, mask), texts, pad, &DEVICE)
}

#[test]
fn bert_with_softmax_is_candles() -> Result<()> {
    for act in [bert::HiddenAct::Gelu, bert::HiddenAct::GeluApproximate, bert::HiddenAct::Relu] {
        let config = bert_config(act);
        let theirs = bert::BertModel::load(drawn(), &config)?;
        let ours = BertModel::load(drawn(), &config, &|_| Ok(Arc::new(Softmax::new())))?;
        let (ids, mask) = padded(&texts()?, 0, &DEVICE)?;
        let types = ids.ge(30u32)?.to_dtype(DType::U32)?;
        let expected = theirs.forward(&ids, &types, Some(&mask))?;
        let hidden = ours.forward(&ids, &types, &mask)?;
        // The rows of padding have no meaning.
        let real = mask.to_dtype(DType::F32)?.unsqueeze(2)?;
        let error = difference(&hidden.broadcast_mul(&real)?, &expected.broadcast_mul(&real)?)?;
        assert!(error < 1e-4, "{act:?}: hidden states differ by {error}");
        let error = difference(&pool(&hidden, &mask)?, &pool(&expected, &mask)?)?;
        assert!(error < 1e-4, "{act:?}: embeddings differ by {error}");
    }
    Ok(())
}

/// Returns the moments of the drawn BERT's queries and keys.
fn moments() -> Result<Vec<Moments>> {
    let observed = || Observed::new(BERT_HEADS, 32 / BERT_HEADS).map(Arc::new);
    let observed: Vec<Arc<Observed>> = vec![observed()?, observed()?];
    let model = bert_with(&|layer| Ok(observed[layer].clone()))?;
    for text in texts()?.chunks(1) {
        embeddings(&model, text, 0)?;
    }
    Ok(observed.iter().map(|observed| observed.moments()).collect())
}

/// A text's embedding is the same alone and in a padded batch, and what stands in the padding does
/// not change a bit of it.
#[test]
fn padding_changes_no_embedding() -> Result<()> {
    let (texts, moments) = (texts()?, moments()?);
    let mut models = vec![("softmax", bert_with(&|_| Ok(Arc::new(Softmax::new())))?)];
    for kind in KINDS {
        models.push((kind.name, bert_with(&|layer| kind.attention(layer, 40, &moments[layer], 1))?));
    }
    for (name, model) in models {
        let batch = embeddings(&model, &texts, 0)?;
        assert_eq!(batch, embeddings(&model, &texts, 59)?, "{name}: padding with another token");
        for (i, text) in texts.chunks(1).enumerate() {
            let alone = embeddings(&model, text, 0)?;
            let error = alone[0].iter().zip(&batch[i]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(error < 1e-5, "{name}, {} tokens: {error} from the embedding alone", text.len());
        }
    }
    Ok(())
}

/// With many features every kind of map comes near the original, nearer than with few and than
/// attention that ignores its keys.
#[test]
fn bert_with_many_features_is_near_the_original() -> Result<()> {
    let (texts, moments) = (texts()?, moments()?);
    let original = embeddings(&bert_with(&|_| Ok(Arc::new(Softmax::new())))?, &texts, 0)?;
    let cosine = |attention: &dyn Fn(usize) -> Result<Arc<dyn Attention>>| -> Result<f64> {
        Ok(Agreement::new(&original, &embeddings(&bert_with(attention)?, &texts, 0)?).mean_cosine)
    };
    let uniform = cosine(&|_| Ok(Arc::new(Uniform)))?;
    for kind in KINDS {
        let at = |features: usize| cosine(&|layer| kind.attention(layer, features, &moments[layer], 1));
        let (few, many) = (at(8)?, at(4096)?);
        assert!(many > 0.99 && many > few && many > uniform, "{}: {few}, {many}, uniform {uniform}", kind.name);
    }
    Ok(())
}

/// Each part of training brings a student of few features nearer to the original, on texts that it
/// was not trained on too, and only the last changes weights.
#[test]
fn trained_features_come_nearer_to_the_original() -> Result<()> {
    let (config, weights) = (bert_config(bert::HiddenAct::Gelu), drawn());
    let drawn_texts = |from: u64| -> Result<Vec<Vec<u32>>> {
        (from..from + 8).map(|seed| tokens(20 + 3 * (seed as usize % 8), seed, 60)).collect()
    };
    let others = drawn_texts(900)?;
    let original = embeddings(&bert_with(&|_| Ok(Arc::new(Softmax::new())))?, &others, 0)?;
    let fitted = |(layer, moments): (usize, &Moments)| CENTRED.fitted_features(layer, 16, moments, 1);
    let start = moments()?.iter().enumerate().map(fitted).collect::<Result<Vec<_>>>()?;
    let student = Student::new(&start, weights.clone())?;
    let cosine = || -> Result<f64> {
        let weights = student.weights(Learner::Features);
        let model = BertModel::load(weights, &config, &|layer| student.attention(layer))?;
        Ok(Agreement::new(&original, &embeddings(&model, &others, 0)?).mean_cosine)
    };
    let batches = (0..8).map(|batch| drawn_texts(100 + 8 * batch)).collect::<Result<Vec<_>>>()?;
    let trainer = Trainer { weights: &weights, config: &config, batches: &batches };
    let mut losses = Vec::new();
    let before = cosine()?;
    trainer.match_layers(&student, Part { steps: 64, rate: 1e-2 }, &mut |_, loss| losses.push(loss))?;
    let between = cosine()?;
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let (first, last) = (mean(&losses[..8]), mean(&losses[56..]));
    assert!(last < 0.8 * first, "layers differ by {first} at first and {last} at last");
    losses.clear();
    let part = Part { steps: 64, rate: 3e-3 };
    trainer.match_model(&student, Learner::Features, part, &mut |_, loss| losses.push(loss))?;
    let after = cosine()?;
    let (first, last) = (mean(&losses[..8]), mean(&losses[56..]));
    assert!(last < 0.95 * first, "models differ by {first} at first and {last} at last");
    assert!(before < between && between < after, "cosines {before}, {between}, {after}");

    // With the original's attention, the student's weights are the original's until they are
    // trained.
    let exact = || -> Result<Vec<Vec<f32>>> {
        let weights = student.weights(Learner::Features);
        embeddings(&BertModel::load(weights, &config, &|_| Ok(Arc::new(Softmax::new())))?, &others, 0)
    };
    assert_eq!(exact()?, original);
    let part = Part { steps: 64, rate: 1e-3 };
    trainer.match_model(&student, Learner::FeaturesAndWeights, part, &mut |_, _| ())?;
    let with_weights = cosine()?;
    assert!(after < with_weights, "cosines {after} without, and {with_weights} with weights trained");
    assert_ne!(exact()?, original);

    // What a file keeps of the student embeds as the student does.
    let saved = student.tensors();
    let features = |layer| Ok(saved_attention(&saved, layer)?.expect("features are saved"));
    let kept = embeddings(&BertModel::load(student.weights(Learner::Features), &config, &features)?, &others, 0)?;
    let trained = |layer| student.attention(layer);
    let model = BertModel::load(student.weights(Learner::Features), &config, &trained)?;
    assert_eq!(kept, embeddings(&model, &others, 0)?);
    let query = "encoder.layer.1.attention.self.query.weight";
    let weights = student.weights(Learner::Features).get((32, 32), query)?;
    assert_eq!(difference(&saved[query], &weights)?, 0.0);
    assert!(difference(&saved[query], &drawn().get((32, 32), query)?)? > 0.0, "the saved weights are not trained");
    assert!(saved_attention(&HashMap::new(), 0)?.is_none());
    let mut partial = saved.clone();
    partial.retain(|name, _| !name.ends_with("features.keys"));
    let message = saved_attention(&partial, 0).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(message.contains("keys is missing"), "{message}");
    Ok(())
}

/// The learning rate rises over a tenth of the steps, and falls nearly to 0.
#[test]
fn rates_rise_and_fall() {
    let rates = |steps: usize| (0..steps).map(|step| Part { steps, rate: 2.0 }.rate_at(step)).collect::<Vec<_>>();
    assert_eq!(rates(1), [2.0]);
    assert_eq!(rates(4), [2.0, 2.0, 4.0 / 3.0, 2.0 / 3.0]);
    let rates = rates(20);
    assert_eq!((rates[0], rates[1], rates[2]), (1.0, 2.0, 2.0));
    assert!(rates[2..].windows(2).all(|pair| pair[1] < pair[0]) && rates[19] > 0.0, "{rates:?}");
}

/// A loss that is no number any more ends training with what to do.
#[test]
fn a_training_that_diverges_says_so() -> Result<()> {
    let (config, weights) = (bert_config(bert::HiddenAct::Gelu), drawn());
    let fitted = |(layer, moments): (usize, &Moments)| CENTRED.fitted_features(layer, 16, moments, 1);
    let start = moments()?.iter().enumerate().map(fitted).collect::<Result<Vec<_>>>()?;
    let student = Student::new(&start, weights.clone())?;
    let trainer = Trainer { weights: &weights, config: &config, batches: &[texts()?] };
    let diverged = trainer.match_layers(&student, Part { steps: 20, rate: f64::INFINITY }, &mut |_, _| ());
    let message = diverged.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(message.contains("train at a lower rate"), "{message}");
    Ok(())
}

#[test]
fn observing_changes_nothing() -> Result<()> {
    let observed = Observed::new(1, 2)?;
    let q = Tensor::new(&[[[[1f32, 2.0], [3.0, -1.0]]]], &DEVICE)?;
    let out = observed.forward(Inputs::new(&q, &q, &q), &Mask::full())?;
    assert_eq!(difference(&out, &Softmax::new().forward(Inputs::new(&q, &q, &q), &Mask::full())?)?, 0.0);
    assert!(observed.moments().logit_deviation()?[0] > 0.0);
    Ok(())
}

#[test]
fn agreement_is_what_it_says() {
    let unit = |degrees: f64| vec![degrees.to_radians().cos() as f32, degrees.to_radians().sin() as f32];
    let original = [0.0, 10.0, 30.0, 90.0].map(unit);
    let same = Agreement::new(&original, &original);
    assert!((same.mean_cosine - 1.0).abs() < 1e-6 && (same.rank_correlation - 1.0).abs() < 1e-9);
    assert_eq!((same.same_neighbour, same.max_difference), (1.0, 0.0));
    // The last moves from 90 to 22: pairs 10, 30, 20, 90, 80, 60 degrees apart become 10, 30, 20,
    // 22, 12, 8 apart.
    let other = Agreement::new(&original, &[0.0, 10.0, 30.0, 22.0].map(unit));
    let worst = 68f64.to_radians().cos();
    assert!((other.mean_cosine - (3.0 + worst) / 4.0).abs() < 1e-6 && (other.min_cosine - worst).abs() < 1e-6);
    // Spearman: 1 - 6 (1 + 9 + 4 + 1 + 4 + 9) / (6 (36 - 1)).
    assert!((other.rank_correlation - 0.2).abs() < 1e-9, "{}", other.rank_correlation);
    // The third has another nearest neighbour now.
    assert_eq!(other.same_neighbour, 0.75);
    let both = Agreement::over(&[same, other]);
    assert_eq!((both.min_cosine, both.max_difference), (other.min_cosine, other.max_difference));
    assert!((both.mean_cosine - (same.mean_cosine + other.mean_cosine) / 2.0).abs() < 1e-12);
}

#[test]
fn bad_folders_are_one_clear_message() -> std::io::Result<()> {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bad-model");
    let open = || Folder::<llama::LlamaConfig>::open(&dir).err().map(|e| format!("{e:#}")).unwrap_or_default();
    fs::create_dir_all(&dir)?;
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        let _ = fs::remove_file(dir.join(name));
    }
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        let message = open();
        assert!(message.contains("there is no") && message.contains(name), "{message}");
        fs::write(dir.join(name), "{}")?;
    }
    let config = r#"{"hidden_size": 24, "intermediate_size": 40, "vocab_size": 60, "num_hidden_layers": 2,
        "num_attention_heads": 6, "rms_norm_eps": 1e-5, "max_position_embeddings": 150}"#;
    let message = open();
    assert!(message.contains("config.json does not hold"), "{message}");
    fs::write(dir.join("config.json"), config)?;
    let message = open();
    assert!(message.contains("model.safetensors does not hold"), "{message}");
    candle_core::safetensors::save(&HashMap::<String, Tensor>::new(), dir.join("model.safetensors")).unwrap();
    let message = open();
    assert!(message.contains("tokenizer.json does not hold"), "{message}");
    Ok(())
}

/// Compares with the real model, whose folder `MINILM` names.
#[test]
#[ignore = "needs a model: `just real-minilm FOLDER` runs it"]
fn minilm_with_softmax_is_candles() -> Result<()> {
    let path = std::env::var("MINILM").expect("MINILM names the folder of all-MiniLM-L6-v2");
    let Folder { config, weights, mut tokenizer } = Folder::<bert::Config>::open(Path::new(&path)).unwrap();
    tokenizer.with_padding(None);
    let sentences =
        ["The cat sits outside.", "A man is playing guitar, while all the others at the table go on talking.", "No!"];
    let ids = |s| tokenizer.encode(s, true).unwrap().get_ids().to_vec();
    let texts: Vec<Vec<u32>> = sentences.into_iter().map(ids).collect();
    let vb = VarBuilder::from_tensors(weights, DType::F32, &DEVICE);
    let theirs = bert::BertModel::load(vb.clone(), &config)?;
    let expected = embed(&|ids, types, mask| theirs.forward(ids, types, Some(mask)), &texts, 0, &DEVICE)?;
    let ours = BertModel::load(vb, &config, &|_| Ok(Arc::new(Softmax::new())))?;
    let error = Agreement::new(&expected, &embeddings(&ours, &texts, 0)?).max_difference;
    assert!(error < 1e-4, "embeddings differ by {error}");
    Ok(())
}

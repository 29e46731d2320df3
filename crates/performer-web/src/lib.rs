//! A model that writes in a browser: what the page in `web/` calls, compiled to WebAssembly.
//!
//! One `Model` stands for a checkpoint, one [`Story`] for a text that is being written, and a
//! [`Weights`] for what a head of attention looks at. All is performer-lm's; here are only the
//! types that JavaScript can hold. Errors are JavaScript's `Error`, with the whole chain of causes.
//!
//! The settings that this target needs are in `.cargo/config.toml`.

mod weights;

use anyhow::{Context, Result, ensure};
use candle_core::Device;
use performer_lm::{
    data::Tokenizer,
    generate::{Continuation, Sampling, Step, Stop, Writing},
    model::{Decoder, pretrained::Pretrained},
};
use wasm_bindgen::prelude::*;

fn thrown(error: anyhow::Error) -> JsError {
    JsError::new(&format!("{error:#}"))
}

/// A `Model` is a checkpoint that is ready to be used. A page loads one once and keeps it, so its
/// memory is never given back.
#[wasm_bindgen]
pub struct Model {
    decoder: &'static Decoder,
    tokenizer: &'static Tokenizer,
}

#[wasm_bindgen]
impl Model {
    /// Makes a model of the contents of `config.json`, `tokenizer.json` and `model.safetensors`.
    ///
    /// # Errors
    /// If one of them is damaged, or they do not belong together.
    #[wasm_bindgen(constructor)]
    pub fn new(config: &[u8], tokenizer: Vec<u8>, weights: &[u8]) -> Result<Self, JsError> {
        Self::open(config, tokenizer, weights).map_err(thrown)
    }

    /// Begins a text that continues `prompt`; `past_ends` goes on with a next text where the model
    /// ends one. Logits are divided by `temperature`, and at 0 the likeliest token is always taken;
    /// tokens are chosen from the likeliest ones up to the total probability `top_p`.
    ///
    /// # Errors
    /// If `temperature` is below 0 or `top_p` is not above 0 and at most 1, if the prompt is longer
    /// than the model has positions, or if the model was trained to see what it predicts.
    pub fn begin(
        &self,
        prompt: &str,
        temperature: f64,
        top_p: f64,
        seed: u32,
        past_ends: bool,
    ) -> Result<Story, JsError> {
        let sampling = Sampling { temperature, top_k: None, top_p: Some(top_p), seed: seed.into() };
        Story::new(self, prompt, sampling, past_ends).map_err(thrown)
    }

    /// Computes what a head looks at in the first tokens of a text, `most` at most: the first of
    /// them is the token before a text, not one of its own. Layers and heads are counted from 0.
    ///
    /// # Errors
    /// If there is no such layer or head, or the model has too few positions for these tokens.
    pub fn weights(&self, text: &str, most: usize, layer: usize, head: usize) -> Result<Weights, JsError> {
        Weights::of(self.decoder, self.tokenizer, text, most, layer, head).map_err(thrown)
    }

    /// Returns the number of layers.
    #[wasm_bindgen(getter)]
    pub fn layers(&self) -> usize {
        self.decoder.config().layers
    }

    /// Returns the number of heads of a layer.
    #[wasm_bindgen(getter)]
    pub fn heads(&self) -> usize {
        self.decoder.config().heads
    }

    /// Returns the number of tokens of the sequences that the model was trained on.
    #[wasm_bindgen(getter)]
    pub fn context(&self) -> usize {
        self.decoder.config().context
    }

    /// Returns the bytes that a token takes in a cache of all keys and values, in f32.
    #[wasm_bindgen(getter)]
    pub fn cache_bytes_per_token(&self) -> usize {
        let config = self.decoder.config();
        let of_layer = |layer| config.kv_heads * (config.key_dim(layer) + config.head_dim());
        (0..config.layers).map(of_layer).sum::<usize>() * size_of::<f32>()
    }
}

impl Model {
    fn open(config: &[u8], tokenizer: Vec<u8>, weights: &[u8]) -> Result<Self> {
        let pretrained = Pretrained::from_bytes(config, tokenizer, weights)?;
        let decoder = pretrained.decoder(&Device::Cpu).context("cannot build the model")?;
        let tokenizer = pretrained.tokenizer;
        Ok(Self { decoder: Box::leak(Box::new(decoder)), tokenizer: Box::leak(Box::new(tokenizer)) })
    }
}

/// A `Story` is a text that is being written.
#[wasm_bindgen]
pub struct Story {
    writing: Writing<'static>,
    stop: Option<Stop>,
}

#[wasm_bindgen]
impl Story {
    /// Writes `count` more tokens, or fewer if the text ends, and returns the text that they
    /// completed.
    ///
    /// # Errors
    /// If the model's weights are damaged.
    pub fn write(&mut self, count: usize) -> Result<String, JsError> {
        self.steps(count).map_err(thrown)
    }

    /// Whether the text has ended.
    #[wasm_bindgen(getter)]
    pub fn ended(&self) -> bool {
        self.stop.is_some()
    }

    /// Returns the number of tokens written so far, those of the prompt not counted.
    #[wasm_bindgen(getter)]
    pub fn tokens(&self) -> usize {
        self.writing.tokens()
    }

    /// Returns the number of tokens that the model has read, those of the prompt among them.
    #[wasm_bindgen(getter)]
    pub fn tokens_read(&self) -> usize {
        self.writing.tokens_read()
    }

    /// Returns the bytes of what the model remembers of the text.
    #[wasm_bindgen(getter)]
    pub fn state_bytes(&self) -> usize {
        self.writing.state_bytes()
    }
}

impl Story {
    fn new(model: &Model, prompt: &str, sampling: Sampling, past_ends: bool) -> Result<Self> {
        let continuation = Continuation::new(model.decoder, model.tokenizer, prompt, sampling)?;
        let continuation = if past_ends { continuation.past_ends() } else { continuation };
        Ok(Self { writing: continuation.begin(), stop: None })
    }

    fn steps(&mut self, count: usize) -> Result<String> {
        let mut text = String::new();
        for _ in 0..count {
            match self.writing.step()? {
                Step::Text(piece) => text += &piece,
                Step::Ended(stop) => {
                    text += &self.writing.rest()?;
                    self.stop = Some(stop);
                    break;
                }
            }
        }
        Ok(text)
    }
}

/// `Weights` are the attention weights of one head, of FAVOR and of softmax, from the same queries
/// and keys.
#[wasm_bindgen]
pub struct Weights {
    tokens: Vec<String>,
    favor: Vec<f32>,
    softmax: Vec<f32>,
}

#[wasm_bindgen]
impl Weights {
    /// Returns the texts of the `T` tokens.
    #[wasm_bindgen(getter)]
    pub fn tokens(&self) -> Vec<String> {
        self.tokens.clone()
    }

    /// Returns the weights that the model's own attention implies, `T · T` numbers: a row for each
    /// query, whose sum is 1.
    #[wasm_bindgen(getter)]
    pub fn favor(&self) -> Vec<f32> {
        self.favor.clone()
    }

    /// Returns the weights that softmax has for the same queries and keys, in the same order.
    #[wasm_bindgen(getter)]
    pub fn softmax(&self) -> Vec<f32> {
        self.softmax.clone()
    }
}

impl Weights {
    fn of(model: &Decoder, tokenizer: &Tokenizer, text: &str, most: usize, layer: usize, head: usize) -> Result<Self> {
        let config = model.config();
        ensure!(layer < config.layers, "there is no layer {layer}: they are counted 0..{}", config.layers);
        ensure!(head < config.heads, "there is no head {head}: they are counted 0..{}", config.heads);
        // A text begins after the token between documents, as where it is written.
        let mut ids = vec![tokenizer.eot()];
        ids.extend(tokenizer.encode(text)?);
        ids.truncate(most.max(1));
        let [favor, softmax] = weights::of_head(model, &ids, layer, head)?;
        let mut tokens = ids.iter().map(|&id| tokenizer.decode(&[id])).collect::<Result<Vec<_>>>()?;
        tokens[0] = "(beginning)".into();
        Ok(Self { tokens, favor, softmax })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use performer_lm::generate::generate;

    /// The configuration, tokenizer and weights of one of the models that come with the project.
    fn files(name: &str) -> [Vec<u8>; 3] {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stories").join(name);
        ["config.json", "tokenizer.json", "model.safetensors"]
            .map(|file| std::fs::read(folder.join(file)).expect("the model is there"))
    }

    fn stories(name: &str) -> Model {
        let [config, tokenizer, weights] = files(name);
        Model::open(&config, tokenizer, &weights).expect("a model")
    }

    /// Weights that have no place in the configuration would be left out, and the model would write
    /// something else than it was trained to.
    #[test]
    fn weights_of_another_configuration_are_refused() {
        let [config, tokenizer, weights] = files("performer");
        let config = String::from_utf8(config).unwrap();
        let without = config.replace("\"convolution\": true,", "");
        assert_ne!(without, config);
        let error = Model::open(without.as_bytes(), tokenizer, &weights).err().expect("it is refused");
        assert!(format!("{error:#}").contains("conv"), "{error:#}");
    }

    #[test]
    fn pieces_are_what_is_written_in_one_go() {
        let model = stories("performer");
        let sampling = || Sampling { temperature: 0.8, top_k: None, top_p: Some(0.95), seed: 7 };
        let mut whole = String::new();
        let generated = generate(model.decoder, model.tokenizer, "The cat", 40, sampling(), |piece| {
            whole += piece;
            Ok(true)
        })
        .unwrap();
        let mut story = Story::new(&model, "The cat", sampling(), false).unwrap();
        let pieces: String = [1, 9, 0, 30].map(|count| story.steps(count).unwrap()).concat();
        assert_eq!(pieces, whole);
        assert_eq!((story.tokens(), story.state_bytes()), (generated.tokens, generated.state_bytes));
    }

    #[test]
    fn a_story_ends_once_and_for_all() {
        let model = stories("performer");
        let greedy = || Sampling { temperature: 0.0, ..Sampling::default() };
        let mut story = Story::new(&model, "Once upon a time", greedy(), false).unwrap();
        story.steps(1000).unwrap();
        assert!(story.ended());
        let tokens = story.tokens();
        assert_eq!((story.steps(5).unwrap().as_str(), story.tokens()), ("", tokens));
        let mut on = Story::new(&model, "Once upon a time", greedy(), true).unwrap();
        on.steps(tokens + 5).unwrap();
        assert!(!on.ended() && on.tokens() == tokens + 5);
    }

    #[test]
    fn a_cache_is_counted_as_softmax_counts_its_own() {
        let model = stories("softmax");
        let mut story = Story::new(&model, "Once", Sampling::default(), true).unwrap();
        story.steps(100).unwrap();
        // A cache may have room for more than it holds.
        let counted = model.cache_bytes_per_token() * story.tokens_read();
        assert!((counted..=2 * counted).contains(&story.state_bytes()), "{counted} {}", story.state_bytes());
    }

    #[test]
    fn weights_are_of_the_tokens_of_the_text() {
        let model = stories("performer");
        let weights = Weights::of(model.decoder, model.tokenizer, "Once upon a time", 4, 3, 1).unwrap();
        assert_eq!(weights.tokens, ["(beginning)", "Once", " upon", " a"]);
        assert_eq!((weights.favor.len(), weights.softmax.len()), (16, 16));
        for (layer, head, word) in [(4, 0, "layer 4"), (0, 4, "head 4")] {
            let error = Weights::of(model.decoder, model.tokenizer, "Once", 4, layer, head).err().unwrap();
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}

//! This module has byte-level BPE tokenizers: trained here, or loaded from any `tokenizer.json`.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::processors::template::{Piece, Sequence, TemplateProcessing};
use tokenizers::{AddedToken, EncodeInput};

use super::text::{Documents, SEPARATOR, pieces};
use crate::{config::Borders, files};

/// The default size of a vocabulary that is trained.
pub const DEFAULT_VOCAB_SIZE: usize = 4096;

/// The smallest byte-level vocabulary: the 256 bytes and the end-of-text token.
pub const MIN_VOCAB_SIZE: usize = 257;

/// A tokenizer is trained on at most the first 64 MB of a corpus: more text does not change the
/// merges of a small vocabulary noticeably, and word counts take memory.
const MAX_TRAINING_BYTES: usize = 64 << 20;

/// The largest vocabulary that is trained, many times those of published models.
const MAX_VOCAB_SIZE: usize = 1 << 24;

/// The most bytes of a word that is learned from in one part.
const MAX_WORD: usize = 1 << 10;

/// Training text is handed over in pieces of about this many bytes, so that memory stays bounded.
const PIECE: usize = 1 << 16;

/// How vocabularies spell the end-of-text token, most specific first.
const END_OF_TEXT: [&str; 8] =
    [SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|end|>", "<|im_end|>"];

/// A `Tokenizer` encodes and decodes text, and knows the tokens at the borders of a document.
///
/// Special tokens that are spelled out in a text are encoded as ordinary text.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The content of `tokenizer.json`, kept so that a copy is identical byte for byte.
    json: Vec<u8>,
    borders: Borders,
    /// Whether the borders are others than the `tokenizer.json` alone gives.
    borders_given: bool,
    vocab_size: usize,
}

impl Tokenizer {
    /// Trains a byte-level BPE with GPT-2's pre-tokenization; `<|endoftext|>` is token 0. The same
    /// text always gives the same tokenizer. Only the first 64 MB of text are used; too little text
    /// gives a smaller vocabulary.
    ///
    /// A word of more than a thousand bytes, as in a text without spaces, is learned from in parts:
    /// no token is that long, and the time to learn grows with the square of a word's length.
    ///
    /// # Errors
    /// If `vocab_size` is below [`MIN_VOCAB_SIZE`] or above 2²⁴.
    pub fn train(documents: &Documents, vocab_size: usize) -> Result<Self> {
        if vocab_size < MIN_VOCAB_SIZE {
            bail!(
                "a vocabulary of {vocab_size} is too small for a byte-level tokenizer; give at least {MIN_VOCAB_SIZE}"
            );
        }
        if vocab_size > MAX_VOCAB_SIZE {
            bail!("a vocabulary of {vocab_size} is larger than any model's; give at most {MAX_VOCAB_SIZE}");
        }
        let mut inner = tokenizers::Tokenizer::new(BPE::default());
        let byte_level = ByteLevel::new(false, false, true);
        inner.with_pre_tokenizer(Some(byte_level));
        inner.with_decoder(Some(byte_level));
        let mut trainer: TrainerWrapper = BpeTrainer::builder()
            // The trainer makes room for all of it, and no text has more tokens than bytes.
            .vocab_size(vocab_size.min(MIN_VOCAB_SIZE + documents.bytes() as usize))
            // A pair of symbols that occurs once is noise.
            .min_frequency(2)
            .show_progress(false)
            .special_tokens(vec![AddedToken::from(SEPARATOR, true)])
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .build()
            .into();
        let text = beginning(documents, MAX_TRAINING_BYTES).flat_map(parts_of_words);
        inner.train(&mut trainer, text).map_err(|error| anyhow!("cannot train a tokenizer: {error}"))?;
        let json = inner.to_string(false).map_err(|error| anyhow!("cannot write the tokenizer: {error}"))?;
        Self::from_bytes(json.into_bytes())
    }

    /// Loads a `tokenizer.json`.
    ///
    /// # Errors
    /// If the file cannot be read, is no tokenizer, or has no end-of-text token.
    pub fn load(path: &Path) -> Result<Self> {
        let json = fs::read(path).with_context(|| format!("cannot read the tokenizer {}", path.display()))?;
        Self::from_bytes(json).with_context(|| path.display().to_string())
    }

    /// Makes a tokenizer from the content of a `tokenizer.json`.
    ///
    /// # Errors
    /// If the content is no tokenizer, or has no end-of-text token.
    pub fn from_bytes(json: Vec<u8>) -> Result<Self> {
        Self::with_borders(json, None)
    }

    /// Makes a tokenizer from the content of a `tokenizer.json` and, where they are given, the
    /// borders with which a model was trained.
    ///
    /// # Errors
    /// If the content is no tokenizer; if given borders have neither `begin` nor `end`, or a token
    /// beyond the vocabulary; or if none are given and the content has no end-of-text token.
    pub fn with_borders(json: Vec<u8>, borders: Option<Borders>) -> Result<Self> {
        Self::assemble(json, |inner| {
            let named = named_end(inner).map(Borders::between);
            match (borders, named) {
                (Some(borders), named) => {
                    let given = Some(&borders) != named.as_ref();
                    Ok((borders, given))
                }
                (None, Some(named)) => Ok((named, false)),
                (None, None) => Err(no_end_of_text()),
            }
        })
    }

    /// Makes a tokenizer published with a model that ends its text by one of the tokens `stop`.
    ///
    /// A document has the borders that the tokenizer itself puts around a text. If it puts none,
    /// the end-of-text token stands between documents; it need not be the token that ends an answer
    /// of a chat model.
    ///
    /// # Errors
    /// If the content is no tokenizer, or has no border at all, or if a border or a token of `stop`
    /// lies beyond the vocabulary.
    pub fn of_model(json: Vec<u8>, stop: &[u32]) -> Result<Self> {
        Self::assemble(json, |inner| {
            let named = named_end(inner);
            let mut borders = template(inner)?;
            if borders.begin.or(borders.end).is_none() {
                borders.end = named.or(stop.first().copied());
            }
            if borders.begin.or(borders.end).is_none() {
                return Err(no_end_of_text());
            }
            borders.stop = stop.iter().copied().filter(|&token| !borders.is_end(token)).collect();
            let given = Some(&borders) != named.map(Borders::between).as_ref();
            Ok((borders, given))
        })
    }

    fn assemble(
        json: Vec<u8>,
        borders: impl FnOnce(&tokenizers::Tokenizer) -> Result<(Borders, bool)>,
    ) -> Result<Self> {
        // The library panics where a part of the file is not valid JSON, so the file is parsed here
        // first. It is parsed into a `Value`, because strings in ignored values are not checked.
        serde_json::from_slice::<Value>(&json).context("not a tokenizer.json")?;
        let mut inner =
            tokenizers::Tokenizer::from_bytes(&json).map_err(|error| anyhow!("not a tokenizer.json: {error}"))?;
        if let Some(decoder) = inner.get_decoder() {
            require_sound_decoder(decoder)?;
        }
        if let Some(post_processor) = inner.get_post_processor() {
            require_sound_templates(post_processor).context("the tokenizer's post-processor is damaged")?;
        }
        // Many published files carry the truncation and padding of some model; a corpus must
        // neither be cut nor padded.
        let limits = inner.with_truncation(None);
        limits.map_err(|error| anyhow!("cannot lift the tokenizer's truncation: {error}"))?;
        inner.with_padding(None);
        inner.set_encode_special_tokens(true);
        let (borders, borders_given) = borders(&inner)?;
        // Ids may have gaps, so the number of entries would be too small.
        let ids = inner.get_vocab(true).into_values();
        let vocab_size = ids.max().map_or(0, |id| id as usize + 1);
        borders.validate(vocab_size)?;
        Ok(Self { inner, json, borders, borders_given, vocab_size })
    }

    /// Writes the `tokenizer.json`.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        files::write(path, &self.json)
    }

    /// Returns the content of the `tokenizer.json`.
    pub fn as_bytes(&self) -> &[u8] {
        &self.json
    }

    /// Returns the tokens at the borders of a document.
    pub fn borders(&self) -> &Borders {
        &self.borders
    }

    /// Returns the borders if a model's configuration must store them because the `tokenizer.json`
    /// does not.
    pub fn borders_for_config(&self) -> Option<Borders> {
        self.borders_given.then(|| self.borders.clone())
    }

    /// Returns the token between documents, after which a text begins.
    pub fn eot(&self) -> u32 {
        // There always is such a token, because borders are validated.
        self.borders.begin.or(self.borders.end).unwrap_or_default()
    }

    /// Returns the number of tokens: one more than the largest token id.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Returns the spelling of a token.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Returns the identity of the tokenizer: the hash of its file, and of the borders if they come
    /// from elsewhere.
    pub fn hash(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.json);
        if self.borders_given {
            hasher.update(format!("{:?}", self.borders).as_bytes());
        }
        hasher.finalize()
    }

    /// Returns the tokens of a text, without border tokens.
    ///
    /// # Errors
    /// If the tokenizer has no token for some of the text; a byte-level one has tokens for all
    /// text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, false);
        let encoding = encoding.map_err(|error| anyhow!("cannot encode text: {error}"))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Returns the tokens of several texts, encoded in parallel.
    pub(crate) fn encode_batch(&self, texts: Vec<&str>) -> Result<Vec<Vec<u32>>> {
        let inputs: Vec<EncodeInput<'_>> = texts.into_iter().map(Into::into).collect();
        let encodings =
            self.inner.encode_batch_fast(inputs, false).map_err(|error| anyhow!("cannot encode text: {error}"))?;
        Ok(encodings.iter().map(|e| e.get_ids().to_vec()).collect())
    }

    /// Whether text can be cut just before the last space of a run without changing its tokens.
    /// This holds for GPT-2's pre-tokenization without a normalizer or added words. It is not
    /// tested for other tokenizers, of which it may hold too.
    pub(crate) fn splits_at_spaces(&self) -> bool {
        let gpt2 = matches!(
            self.inner.get_pre_tokenizer(),
            Some(PreTokenizerWrapper::ByteLevel(level)) if level.use_regex && !level.add_prefix_space
        );
        let mut added = self.inner.get_added_tokens_decoder().into_values();
        gpt2 && self.inner.get_normalizer().is_none() && added.all(|token| token.special)
    }

    /// Whether the tokenizer changes the beginning of a text, for instance by Llama's space before
    /// the first word; then a long text must not be encoded in pieces.
    pub(crate) fn changes_the_beginning(&self) -> bool {
        fn adds_a_space(words: &PreTokenizerWrapper) -> bool {
            match words {
                PreTokenizerWrapper::ByteLevel(level) => level.add_prefix_space,
                PreTokenizerWrapper::Metaspace(_) => true,
                PreTokenizerWrapper::Sequence(parts) => parts.as_ref().iter().any(adds_a_space),
                _ => false,
            }
        }
        fn adds_text(normalizer: &NormalizerWrapper) -> bool {
            match normalizer {
                NormalizerWrapper::Prepend(_) => true,
                NormalizerWrapper::Sequence(parts) => parts.as_ref().iter().any(adds_text),
                _ => false,
            }
        }
        self.inner.get_pre_tokenizer().is_some_and(adds_a_space) || self.inner.get_normalizer().is_some_and(adds_text)
    }

    /// Returns the text of tokens; special tokens are left out.
    ///
    /// # Errors
    /// If the tokenizer cannot decode the tokens.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        // Some decoders of the library fail where no token of text is left to decode.
        let special = self.inner.get_added_vocabulary();
        let is_text = |&id: &u32| self.inner.id_to_token(id).is_some_and(|token| !special.is_special_token(&token));
        if !tokens.iter().any(is_text) {
            return Ok(String::new());
        }
        self.inner.decode(tokens, true).map_err(|error| anyhow!("cannot decode tokens: {error}"))
    }

    /// Returns a decoder for tokens that come one by one.
    pub fn stream(&self) -> StreamDecoder<'_> {
        self.stream_after(&[])
    }

    /// Returns a decoder for tokens that follow `tokens`.
    pub fn stream_after(&self, tokens: &[u32]) -> StreamDecoder<'_> {
        StreamDecoder { tokenizer: self, tokens: tokens.to_vec(), shown: tokens.len() }
    }
}

/// The first bytes of the documents, and the rest of the piece in which they end.
fn beginning(documents: &Documents, bytes: usize) -> impl Iterator<Item = &str> {
    let mut left = bytes;
    documents.iter().flat_map(|document| pieces(document, PIECE)).take_while(move |piece| {
        let more = left > 0;
        left = left.saturating_sub(piece.len());
        more
    })
}

/// Yields a text in parts of which no word has much more than [`MAX_WORD`] bytes: it is cut inside
/// longer ones alone.
fn parts_of_words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let mut word = 0;
        let cut = rest.char_indices().find(|&(at, c)| {
            if c.is_whitespace() {
                word = at;
            }
            at - word > MAX_WORD
        });
        let (part, tail) = rest.split_at(cut.map_or(rest.len(), |(at, _)| at));
        rest = tail;
        (!part.is_empty()).then_some(part)
    })
}

/// Refuses a decoder that cuts characters off the ends of tokens: the library fails on every token
/// that has fewer. The decoder is the one that the library has read, since it also knows decoders
/// by their fields, where their type is not named.
fn require_sound_decoder(decoder: &DecoderWrapper) -> Result<()> {
    match decoder {
        DecoderWrapper::Strip(strip) if strip.stop > 0 => bail!(
            "the tokenizer's decoder cuts {} characters off the end of each token (Strip, stop), which fails for shorter ones; \
             set its stop to 0",
            strip.stop
        ),
        DecoderWrapper::Sequence(parts) => parts.get_decoders().iter().try_for_each(require_sound_decoder),
        _ => Ok(()),
    }
}

/// Refuses templates at which the library panics: that add a token which they do not define, put a
/// second text beside the only one, or follow another one, which may leave them more than two
/// parts.
fn require_sound_templates(post_processor: &PostProcessorWrapper) -> Result<()> {
    fn collect<'a>(processor: &'a PostProcessorWrapper, templates: &mut Vec<&'a TemplateProcessing>) {
        match processor {
            PostProcessorWrapper::Template(template) => templates.push(template),
            PostProcessorWrapper::Sequence(parts) => parts.as_ref().iter().for_each(|part| collect(part, templates)),
            _ => {}
        }
    }
    let mut templates = Vec::new();
    collect(post_processor, &mut templates);
    if templates.len() > 1 {
        bail!("its {} templates stand one after the other; keep one", templates.len());
    }
    for template in templates {
        // The library does not lend its pieces, and writes them as it reads them.
        let pieces: Vec<Piece> = serde_json::from_value(serde_json::to_value(&template.single)?)?;
        for piece in pieces {
            match piece {
                Piece::SpecialToken { id, .. } if !template.get_special_tokens().0.contains_key(&id) => {
                    bail!("its template adds {id:?}, which is not among its special_tokens; define it there")
                }
                Piece::Sequence { id: Sequence::B, .. } => {
                    bail!("its template for a single text names a second one (Sequence B); name A alone")
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// Returns the end-of-text token, found by the names that vocabularies give it.
fn named_end(inner: &tokenizers::Tokenizer) -> Option<u32> {
    END_OF_TEXT.iter().find_map(|name| inner.token_to_id(name))
}

fn no_end_of_text() -> anyhow::Error {
    anyhow!(
        "the tokenizer has no end-of-text token (looked for {}): add one of these to its added_tokens, or give `borders` in \
         config.json",
        END_OF_TEXT.join(" ")
    )
}

/// Returns the borders that the tokenizer's own post-processor puts around a text.
fn template(inner: &tokenizers::Tokenizer) -> Result<Borders> {
    let encode = |special| -> Result<Vec<u32>> {
        let encoding = inner.encode_fast("a", special).map_err(|error| anyhow!("cannot encode text: {error}"))?;
        Ok(encoding.get_ids().to_vec())
    };
    let (plain, whole) = (encode(false)?, encode(true)?);
    let Some(at) = whole.windows(plain.len().max(1)).position(|part| part == plain) else {
        return Ok(Borders::default());
    };
    let begin = at.checked_sub(1).map(|i| whole[i]);
    Ok(Borders { begin, end: whole.get(at + plain.len()).copied(), stop: Vec::new() })
}

/// `StreamDecoder` decodes tokens as they come, and holds text back until its last character is
/// complete.
#[derive(Debug)]
pub struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    /// The tokens of the text returned last, then the tokens held back. The former are kept because
    /// decoders may treat the start of a text specially, so new tokens are decoded after some old
    /// ones.
    tokens: Vec<u32>,
    /// How many of `tokens` have been returned as text.
    shown: usize,
}

impl StreamDecoder<'_> {
    /// Returns the text that `token` completes, if any.
    ///
    /// # Errors
    /// If the tokenizer cannot decode the tokens.
    pub fn push(&mut self, token: u32) -> Result<Option<String>> {
        self.tokens.push(token);
        let text = self.pending()?;
        // A replacement character at the end is a character whose bytes are not complete yet.
        if text.is_empty() || text.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(None);
        }
        self.tokens.drain(..self.shown);
        self.shown = self.tokens.len();
        Ok(Some(text))
    }

    /// Returns the text still held back after the last token: an unfinished character, shown as
    /// `�`.
    ///
    /// # Errors
    /// If the tokenizer cannot decode the tokens.
    pub fn finish(self) -> Result<String> {
        self.pending()
    }

    fn pending(&self) -> Result<String> {
        let (shown, held) = self.tokens.split_at(self.shown);
        let text = self.tokenizer.decode(&self.tokens)?;
        match text.strip_prefix(&self.tokenizer.decode(shown)?) {
            Some(rest) => Ok(rest.to_string()),
            // A decoder may show bytes that are no text all as `�`, those among them that were
            // shown as text before.
            None => self.tokenizer.decode(held),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;

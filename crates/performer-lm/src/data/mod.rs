//! This module turns text into batches. A [`Corpus`] is found and split into training text and
//! held-out text, a [`Tokenizer`] is trained on the training text, each split is encoded into a
//! [`TokenFile`], and [`Batches`] are cut from those. [`prepare`] does all but the last step.
//!
//! Tokenizers and token files are kept in a cache under the hash of what they were made from; see
//! [`cache_dir`].

mod batches;
mod cache;
mod corpus;
mod encode;
#[cfg_attr(not(feature = "hub"), path = "no_hub.rs")]
pub(crate) mod hub;
mod split;
mod text;
mod tokenizer;
mod tokens;
pub(crate) mod weights_index;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;

pub use crate::config::Borders;
pub use batches::{Batch, Batches, EvalWindows, eval_windows};
pub use cache::cache_dir;
pub use corpus::{Corpus, DataSpec, load_text};
pub use text::{Documents, SEPARATOR};
pub use tokenizer::{DEFAULT_VOCAB_SIZE, MIN_VOCAB_SIZE, StreamDecoder, Tokenizer};
pub use tokens::TokenFile;

use crate::listener::Listener;
use cache::Cache;

/// `Prepared` holds data that is ready for training: a tokenizer and the tokens of all splits. The
/// [`TokenFile`]s know the numbers of documents, bytes and tokens.
#[derive(Debug, Clone)]
pub struct Prepared {
    /// Name of the corpus; see [`Corpus::name`].
    pub corpus_name: String,
    /// One line that describes the corpus to a reader.
    pub description: String,
    /// The tokenizer with which all splits are encoded.
    pub tokenizer: Tokenizer,
    /// The tokens of the training text.
    pub train: Arc<TokenFile>,
    /// The tokens of the held-out text for validation.
    pub valid: Arc<TokenFile>,
    /// The tokens of the held-out text by which nothing is chosen, where there is such a split.
    pub test: Option<Arc<TokenFile>>,
    /// The folder of the cache that holds the tokens for the next time, if there is one.
    pub cache: Option<PathBuf>,
}

impl Prepared {
    /// Returns the held-out text that results are reported on: the test split, or else validation.
    pub fn reported(&self) -> &TokenFile {
        self.test.as_ref().unwrap_or(&self.valid)
    }
}

/// Finds the corpus, trains a tokenizer of `vocab_size` tokens on it (or loads the given tokenizer,
/// whatever its size), and encodes all splits. Whatever is in the cache is taken from there.
///
/// # Errors
/// Those of [`Corpus::load`], [`Tokenizer::train`], [`Tokenizer::load`] and [`Tokenizer::encode`],
/// and a disk that is full.
pub fn prepare(
    spec: &DataSpec,
    vocab_size: usize,
    tokenizer: Option<&Path>,
    listener: &dyn Listener,
) -> Result<Prepared> {
    prepare_in(&Cache::from_env(listener)?, Corpus::load(spec, listener)?, vocab_size, tokenizer, listener)
}

/// Prepares data as [`prepare`] does, with a test split in any case; see [`Corpus::with_test`].
///
/// # Errors
/// Those of [`prepare`] and of [`Corpus::with_test`].
pub fn prepare_with_test(
    spec: &DataSpec,
    vocab_size: usize,
    tokenizer: Option<&Path>,
    listener: &dyn Listener,
) -> Result<Prepared> {
    let corpus = Corpus::load(spec, listener)?.with_test(listener)?;
    prepare_in(&Cache::from_env(listener)?, corpus, vocab_size, tokenizer, listener)
}

/// Finds the corpus and encodes all splits with the given tokenizer; see [`prepare`].
///
/// # Errors
/// Those of [`Corpus::load`] and of [`Tokenizer::encode`], and a disk that is full.
pub fn prepare_for(spec: &DataSpec, tokenizer: &Tokenizer, listener: &dyn Listener) -> Result<Prepared> {
    prepare_corpus(Corpus::load(spec, listener)?, tokenizer, listener)
}

/// Encodes all splits of a corpus with the given tokenizer. The corpus may be of text in memory
/// ([`Documents::from_text`]), and the tokenizer trained on it ([`Tokenizer::train`]).
///
/// # Errors
/// Those of [`Tokenizer::encode`], and a disk that is full.
pub fn prepare_corpus(corpus: Corpus, tokenizer: &Tokenizer, listener: &dyn Listener) -> Result<Prepared> {
    encoded(&Cache::from_env(listener)?, corpus, tokenizer.clone(), listener)
}

fn prepare_in(
    cache: &Cache,
    corpus: Corpus,
    vocab_size: usize,
    tokenizer: Option<&Path>,
    listener: &dyn Listener,
) -> Result<Prepared> {
    let tokenizer = match tokenizer {
        Some(path) => Tokenizer::load(path)?,
        None => cache.tokenizer(&corpus.train, vocab_size, listener)?,
    };
    encoded(cache, corpus, tokenizer, listener)
}

fn encoded(cache: &Cache, corpus: Corpus, tokenizer: Tokenizer, listener: &dyn Listener) -> Result<Prepared> {
    Ok(Prepared {
        train: Arc::new(cache.tokens(&corpus.train, &tokenizer, listener)?),
        valid: Arc::new(cache.tokens(&corpus.valid, &tokenizer, listener)?),
        test: corpus.test.map(|test| cache.tokens(&test, &tokenizer, listener).map(Arc::new)).transpose()?,
        cache: cache.folder().map(Path::to_path_buf),
        corpus_name: corpus.name,
        description: corpus.description,
        tokenizer,
    })
}

/// Finds the corpus and encodes its held-out text alone, for evaluation. Returns the name of the
/// corpus (see [`Corpus::name`]) and the tokens.
///
/// # Errors
/// Those of [`Corpus::load`] and of [`Tokenizer::encode`], and a disk that is full.
pub fn prepare_held_out(
    spec: &DataSpec,
    tokenizer: &Tokenizer,
    listener: &dyn Listener,
) -> Result<(String, TokenFile)> {
    let corpus = Corpus::load(spec, listener)?;
    let tokens = Cache::from_env(listener)?.tokens(&corpus.valid, tokenizer, listener)?;
    Ok((corpus.name, tokens))
}

/// Returns the tokens of one text file, which is not split; it is meant for evaluation.
///
/// # Errors
/// Those of [`load_text`] and of [`Tokenizer::encode`], and a disk that is full.
pub fn prepare_text(path: &Path, tokenizer: &Tokenizer, listener: &dyn Listener) -> Result<TokenFile> {
    Cache::from_env(listener)?.tokens(&load_text(path)?, tokenizer, listener)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listener::Silent;

    #[test]
    fn the_sample_from_text_to_batches() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let corpus = Corpus::load(&DataSpec::Sample, &Silent).unwrap();
        let (documents, bytes) = (corpus.train.len() as u64, corpus.train.bytes());
        let first = corpus.valid.iter().next().unwrap().to_string();

        let data = prepare_in(&cache, corpus.clone(), 1024, None, &Silent).unwrap();
        assert_eq!((&*data.corpus_name, data.cache.as_deref()), ("sample", Some(dir.path())));
        assert_eq!(data.tokenizer.vocab_size(), 1024);
        assert_eq!((data.train.documents(), data.train.bytes()), (documents, bytes));
        // Merges make tokens longer: a token covers more than 2.5 bytes on average.
        assert!(data.train.len() as u64 * 5 < bytes * 2);
        let tokens = data.valid.read(0..data.valid.len());
        let end = tokens.iter().position(|&token| token == data.tokenizer.eot());
        assert_eq!(data.tokenizer.decode(&tokens[..end.unwrap()]).unwrap(), first);
        let batches = Batches::new(data.train.clone(), 64, 8, 0).unwrap();
        assert_eq!(batches.batch(0, 0).unwrap().inputs.len(), 64 * 8);

        // With a tokenizer given, the vocabulary size asked for (5000) has no effect.
        let path = dir.path().join("mine.json");
        data.tokenizer.save(&path).unwrap();
        let given = prepare_in(&cache, corpus, 5000, Some(&path), &Silent).unwrap();
        assert_eq!(given.train.hash(), data.train.hash());
    }
}

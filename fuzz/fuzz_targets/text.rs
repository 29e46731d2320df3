//! A text to train on, and the log of a training, by the first byte.

#![no_main]

use std::collections::HashSet;

use anyhow::Result;
use libfuzzer_sys::fuzz_target;
use performer_fuzz::{choice, put};
use performer_lm::{
    data::{Corpus, DataSpec, Tokenizer},
    listener::Silent,
    train::read_log,
};

fn corpus(text: &[u8]) -> Result<()> {
    let corpus = Corpus::load(&DataSpec::Path(put("text.txt", text)), &Silent)?;
    let train: HashSet<&str> = corpus.train.iter().collect();
    assert!(corpus.valid.iter().all(|document| !train.contains(document)), "training and validation share a text");
    assert!(corpus.train.bytes() + corpus.valid.bytes() <= text.len() as u64);
    let tokenizer = Tokenizer::train(&corpus.train, 300)?;
    for document in corpus.train.iter().chain(corpus.valid.iter()).take(20) {
        let tokens = tokenizer.encode(document)?;
        assert_eq!(tokenizer.decode(&tokens)?, document, "what is encoded is decoded to another text");
    }
    let corpus = corpus.with_test(&Silent)?;
    assert!(corpus.test.is_some_and(|test| !test.is_empty()));
    Ok(())
}

fuzz_target!(|input: &[u8]| {
    let Some((which, text)) = choice(input, 2) else { return };
    let _ = match which {
        0 => corpus(text),
        _ => read_log(&put("metrics.jsonl", text)).map(drop),
    };
});

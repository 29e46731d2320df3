//! This module encodes documents quickly: words repeat, so each word is given to the tokenizer once
//! and its tokens are remembered.

use std::collections::HashMap;

use anyhow::Result;

use super::text::{Documents, ends_blank, pieces_to_encode};
use super::tokenizer::Tokenizer;

/// Longer documents are encoded in pieces of at least this many bytes, because a tokenizer needs
/// some hundred times the memory of its text.
const PIECE: usize = 1 << 16;

/// Bytes of text encoded at once, before rounding up to whole pieces.
const BATCH: usize = 1 << 20;

/// Words of more bytes than this are not remembered.
const MAX_WORD: usize = 32;

/// The most words remembered, which bounds memory for text that hardly repeats itself.
const MAX_WORDS: usize = 1 << 20;

/// A document of this many bytes takes gigabytes of memory where it is encoded as a whole.
const LONG: usize = 100_000_000;

/// Returns a note on the memory that a document of `bytes` bytes takes, if it is encoded as a whole
/// and that takes much.
///
/// A tokenizer that puts a mark before each text would put one before every piece of a document.
/// To encode all pieces but the first with a copy of it that puts none would not help: a cut may be
/// in a run of spaces or before a line break, and such tokenizers may join these to their
/// neighbours.
pub(crate) fn memory_note(tokenizer: &Tokenizer, bytes: usize) -> Option<String> {
    (tokenizer.changes_the_beginning() && bytes >= LONG).then(|| {
        format!(
            "tokenizing: a document of {} MB is encoded as a whole, because this tokenizer puts a mark before each text; \
             that takes some hundred times as much memory, which lines of <|endoftext|> in the text would spare",
            bytes / 1_000_000
        )
    })
}

/// Yields the tokens of documents in batches, each document between its borders, and with each
/// batch the number of bytes of text that it covers.
pub(crate) fn encode_documents(
    tokenizer: &Tokenizer,
    documents: &Documents,
) -> impl Iterator<Item = Result<(Vec<u32>, usize)>> {
    let mut words = tokenizer.splits_at_spaces().then(Words::default);
    let piece = if tokenizer.changes_the_beginning() { usize::MAX / 2 } else { PIECE };
    let mut parts = documents.iter().flat_map(move |document| {
        let mut left = document.len();
        pieces_to_encode(document, piece).map(move |text| {
            let begins = left == document.len();
            left -= text.len();
            Piece { text, begins, ends: left == 0 }
        })
    });
    std::iter::from_fn(move || {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while bytes < BATCH
            && let Some(part) = parts.next()
        {
            bytes += part.text.len();
            batch.push(part);
        }
        if batch.is_empty() {
            return None;
        }
        let tokens = match &mut words {
            Some(words) => words.encode(tokenizer, &batch),
            None => encode(tokenizer, &batch),
        };
        Some(tokens.map(|tokens| (tokens, bytes)))
    })
}

/// A `Piece` is a piece of a document.
#[derive(Clone, Copy)]
struct Piece<'a> {
    text: &'a str,
    /// Whether this is the document's first piece.
    begins: bool,
    /// Whether this is the document's last piece.
    ends: bool,
}

impl Piece<'_> {
    /// Returns the border tokens before and after this piece.
    fn borders(&self, tokenizer: &Tokenizer) -> (Option<u32>, Option<u32>) {
        let borders = tokenizer.borders();
        (borders.begin.filter(|_| self.begins), borders.end.filter(|_| self.ends))
    }
}

/// Encodes pieces in parallel, with any tokenizer.
fn encode(tokenizer: &Tokenizer, batch: &[Piece]) -> Result<Vec<u32>> {
    let texts = batch.iter().map(|piece| piece.text).collect();
    let mut tokens = Vec::new();
    for (part, piece) in tokenizer.encode_batch(texts)?.into_iter().zip(batch) {
        let (begin, end) = piece.borders(tokenizer);
        tokens.extend(begin);
        tokens.extend(part);
        tokens.extend(end);
    }
    Ok(tokens)
}

/// `Words` remembers the tokens of the words met so far.
#[derive(Default)]
struct Words {
    known: HashMap<Box<str>, Box<[u32]>>,
}

impl Words {
    /// Does what [`encode`] does, for a tokenizer that splits text at spaces.
    fn encode(&mut self, tokenizer: &Tokenizer, batch: &[Piece]) -> Result<Vec<u32>> {
        let mut tokens = Vec::new();
        for piece in batch {
            let (begin, end) = piece.borders(tokenizer);
            tokens.extend(begin);
            for word in words(piece.text) {
                if let Some(known) = self.known.get(word) {
                    tokens.extend_from_slice(known);
                    continue;
                }
                let encoded = tokenizer.encode(word)?;
                tokens.extend_from_slice(&encoded);
                if word.len() <= MAX_WORD && self.known.len() < MAX_WORDS {
                    self.known.insert(word.into(), encoded.into());
                }
            }
            tokens.extend(end);
        }
        Ok(tokens)
    }
}

/// Yields the parts of a text between the places where [`ends_blank`] holds: mostly a word with the
/// space or line break before it and the punctuation around it.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let end = (1..rest.len()).find(|&at| ends_blank(rest, at));
        let (word, tail) = rest.split_at(end.unwrap_or(rest.len()));
        rest = tail;
        (!word.is_empty()).then_some(word)
    })
}

#[cfg(test)]
mod tests {
    use super::super::tokenizer::tests::documents;
    use super::*;
    use crate::config::Borders;

    /// Returns a tokenizer that has tokens for runs of white space, so that wrong word borders
    /// change the tokens.
    fn tokenizer() -> Tokenizer {
        let blanks = [" ", "\n", "\u{a0}", "\u{b}"];
        let runs = blanks.iter().flat_map(|a| blanks.iter().map(move |b| a.to_string() + b));
        let text: String = runs.map(|run| format!("One{run}{run}cat{run} 7{run}")).collect();
        let tokenizer = Tokenizer::train(&documents(&text.repeat(3)), 320).unwrap();
        for run in ["  ", "\n\n", " \n", "\n "] {
            assert_eq!(tokenizer.encode(run).unwrap().len(), 1, "{run:?}");
        }
        tokenizer
    }

    fn document(text: &str) -> Piece<'_> {
        Piece { text, begins: true, ends: true }
    }

    #[test]
    fn borders_stand_around_documents_and_not_around_pieces() {
        let json = tokenizer().as_bytes().to_vec();
        let borders = Borders { begin: Some(1), end: Some(2), stop: Vec::new() };
        let tokenizer = Tokenizer::with_borders(json, Some(borders)).unwrap();
        let (long, short) = ("One cat. ".repeat(20_000), "Two cats.");
        let text = format!("{long}<|endoftext|>{short}");
        let stream: Vec<u32> =
            encode_documents(&tokenizer, &documents(&text)).flat_map(|batch| batch.unwrap().0).collect();
        let expected =
            [&[1], &tokenizer.encode(long.trim()).unwrap()[..], &[2, 1], &tokenizer.encode(short).unwrap(), &[2]];
        assert!(stream == expected.concat());
    }

    #[test]
    fn documents_end_with_the_end_of_text() {
        let tokenizer = tokenizer();
        let docs = documents("One cat.<|endoftext|>Two cats.");
        let batches: Vec<_> = encode_documents(&tokenizer, &docs).map(Result::unwrap).collect();
        let expected =
            [tokenizer.encode("One cat.").unwrap(), vec![0], tokenizer.encode("Two cats.").unwrap(), vec![0]];
        assert_eq!(batches, [(expected.concat(), 17)]);
    }

    /// Returns every sequence of up to five of these parts, in which all kinds of white space meet
    /// all kinds of characters.
    fn tricky() -> Vec<String> {
        let parts = [" ", "\n", "\u{b}", "\u{a0}", "a", "'s", "7", "!", "日"];
        let mut all = vec![String::new()];
        let mut last = all.clone();
        for _ in 0..5 {
            last = last.iter().flat_map(|text| parts.map(|part| text.clone() + part)).collect();
            all.extend_from_slice(&last);
        }
        all
    }

    #[test]
    fn words_are_encoded_like_the_whole() {
        let tokenizer = tokenizer();
        assert!(tokenizer.splits_at_spaces());
        let texts = tricky();
        let batch: Vec<_> = texts.iter().map(|text| document(text)).collect();
        let mut known = Words::default();
        let (fast, slow) = (known.encode(&tokenizer, &batch).unwrap(), encode(&tokenizer, &batch).unwrap());
        if fast != slow {
            // Name the first text whose tokens differ.
            for &one in &batch {
                let fast = known.encode(&tokenizer, &[one]).unwrap();
                assert_eq!(fast, encode(&tokenizer, &[one]).unwrap(), "{:?}", one.text);
            }
        }
        for text in &texts {
            assert_eq!(words(text).collect::<String>(), *text);
        }
    }

    #[test]
    fn long_documents_are_encoded_like_the_whole() {
        let tokenizer = tokenizer();
        let text = "The cats went. \n\nThey  were \n happy, 3 times.\n\n\n And   日本 more. ".repeat(5000);
        let docs = documents(&text);
        let batches: Vec<_> = encode_documents(&tokenizer, &docs).map(|batch| batch.unwrap().0).collect();
        let whole = encode(&tokenizer, &[document(text.trim())]).unwrap();
        assert!(batches.concat() == whole);
    }

    /// Such a tokenizer would put its mark before every piece of a long document.
    #[test]
    fn a_mark_before_a_document_stands_there_once() {
        let plain = tokenizer();
        let spaced = serde_json::json!({
            "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true,
        });
        for (part, value) in [
            ("normalizer", serde_json::json!({ "type": "Prepend", "prepend": "_" })),
            ("pre_tokenizer", spaced.clone()),
            ("pre_tokenizer", serde_json::json!({ "type": "Sequence", "pretokenizers": [spaced] })),
        ] {
            let mut json: serde_json::Value = serde_json::from_slice(plain.as_bytes()).unwrap();
            json[part] = value;
            let tokenizer = Tokenizer::from_bytes(serde_json::to_vec(&json).unwrap()).unwrap();
            let text = "One cat.\n".repeat(5 * PIECE / 9);
            let batches: Vec<_> =
                encode_documents(&tokenizer, &documents(&text)).map(|batch| batch.unwrap().0).collect();
            let whole = encode(&tokenizer, &[document(text.trim())]).unwrap();
            assert!(batches.concat() == whole, "{part}");
            assert_ne!(tokenizer.encode("One").unwrap(), plain.encode("One").unwrap());
            assert!(memory_note(&tokenizer, LONG - 1).is_none());
            assert!(memory_note(&tokenizer, LONG).unwrap().contains("a document of 100 MB"));
        }
        assert!(memory_note(&plain, usize::MAX).is_none());
    }
}

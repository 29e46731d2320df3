//! This module chooses the documents that are held out for validation. It chooses by content, so
//! that no document is in both splits.

use std::collections::HashSet;
use std::ops::Range;

use anyhow::{Result, bail};

use super::text::{Documents, pieces, trim};
use crate::listener::Listener;

/// One document in ten of a user's text is held out, but never more than this number.
pub(super) const MAX_VALID: usize = 2000;

/// The smallest size in bytes of the blocks into which a text of one document is split; the largest
/// is about twice that.
const BLOCK: usize = 2048;

/// A `Fingerprint` is the first half of a document's hash, enough to tell it from all others.
type Fingerprint = [u8; 16];

fn fingerprint(document: &str) -> Fingerprint {
    let mut print = Fingerprint::default();
    print.copy_from_slice(&blake3::hash(document.as_bytes()).as_bytes()[..16]);
    print
}

/// Returns how many of `n` documents or blocks are held out.
fn held_out(n: usize, most: usize) -> usize {
    n.div_ceil(10).min(most)
}

/// Splits documents into `(train, valid)`.
///
/// The tenth (`most` at most) of the distinct documents with the smallest hashes is held out;
/// repetitions of a held-out document are dropped. A single document is split by blocks of 2 to 4
/// kB instead, and its end is held out, without the blocks that stand in the training part too.
/// But for these, both parts remain continuous text.
///
/// # Errors
/// If there are fewer than two different documents, or fewer than two blocks, or if every block of
/// the end stands in the training part too.
pub(crate) fn split(documents: &Documents, most: usize, listener: &dyn Listener) -> Result<(Documents, Documents)> {
    if documents.len() == 1 {
        return split_document(documents, most, listener);
    }
    let prints: Vec<_> = documents.iter().map(fingerprint).collect();
    let mut distinct = prints.clone();
    distinct.sort_unstable();
    distinct.dedup();
    if distinct.len() < 2 {
        bail!("all documents are the same, so nothing can be held out; give other text");
    }
    let limit = distinct[held_out(distinct.len(), most) - 1];

    let mut print = prints.iter();
    let train = documents.filter(|_| print.next().is_some_and(|print| *print > limit));
    let (mut print, mut seen) = (prints.iter(), HashSet::new());
    let valid = documents.filter(|_| print.next().is_some_and(|print| *print <= limit && seen.insert(*print)));
    let repeated = documents.len() - train.len() - valid.len();
    if repeated > 0 {
        listener.note(&format!("data: repeated documents are left out of validation: {repeated}"));
    }
    Ok((train, valid))
}

/// Splits a single document: `valid` is the last tenth of its blocks, without those that stand in
/// `train` too.
fn split_document(document: &Documents, most: usize, listener: &dyn Listener) -> Result<(Documents, Documents)> {
    let text = document.iter().next().unwrap_or_default();
    let mut end = 0;
    let blocks: Vec<Range<usize>> = pieces(text, BLOCK)
        .map(|block| {
            end += block.len();
            end - block.len()..end
        })
        .collect();
    if blocks.len() < 2 {
        bail!(
            "{} bytes of text in one document are too little to hold something out; give more text, documents separated by \
             lines of <|endoftext|>, or a folder with train.txt and valid.txt",
            text.len()
        );
    }
    let (train, valid) = blocks.split_at(blocks.len() - held_out(blocks.len(), most));
    let print = |block: &Range<usize>| fingerprint(text[block.clone()].trim());
    let seen: HashSet<_> = train.iter().map(print).collect();

    let mut spans: Vec<Range<usize>> = Vec::new();
    let mut dropped = 0;
    for block in valid {
        if seen.contains(&print(block)) {
            dropped += 1;
        } else if let Some(last) = spans.last_mut().filter(|last| last.end == block.start) {
            last.end = block.end;
        } else {
            spans.push(block.clone());
        }
    }
    if dropped > 0 {
        listener.note(&format!(
            "data: blocks of text that stand in the training part too are left out of validation: {dropped}"
        ));
    }
    let train = document.within(trim(text, 0..train[train.len() - 1].end));
    let valid = document.within(spans.into_iter().filter_map(|span| trim(text, span)));
    if train.is_empty() || valid.is_empty() {
        bail!("the end of the text repeats its beginning, so nothing can be held out; give other text");
    }
    Ok((train, valid))
}

/// Divides documents into a first and a second half, by their number; a single document is cut near
/// the middle of its text. Returns `None` if there is too little to divide.
pub(crate) fn halves(documents: &Documents) -> Option<(Documents, Documents)> {
    if documents.len() > 1 {
        let (mut first, mut second) = (0..documents.len(), 0..documents.len());
        let half = documents.len().div_ceil(2);
        return Some((
            documents.filter(|_| first.next().is_some_and(|i| i < half)),
            documents.filter(|_| second.next().is_some_and(|i| i >= half)),
        ));
    }
    let text = documents.iter().next()?;
    let mut middle = 0;
    for piece in pieces(text, BLOCK) {
        middle += piece.len();
        if middle >= text.len() / 2 {
            break;
        }
    }
    let part = |span| documents.within(trim(text, span));
    let (first, second) = (part(0..middle), part(middle..text.len()));
    (!first.is_empty() && !second.is_empty()).then_some((first, second))
}

/// Returns `valid` without the documents that are in `train` too.
pub(crate) fn without_shared(valid: &Documents, train: &Documents) -> Documents {
    // The training text may be large, so only those of its fingerprints that occur in `valid` are
    // kept.
    let held: HashSet<_> = valid.iter().map(fingerprint).collect();
    let in_train: HashSet<_> = train.iter().map(fingerprint).filter(|print| held.contains(print)).collect();
    valid.filter(|document| !in_train.contains(&fingerprint(document)))
}

#[cfg(test)]
mod tests {
    use super::{split as split_most, *};
    use crate::listener::{Silent, tests::Told};

    fn split(documents: &Documents, listener: &dyn Listener) -> Result<(Documents, Documents)> {
        split_most(documents, MAX_VALID, listener)
    }

    fn set(documents: &Documents) -> HashSet<&str> {
        documents.iter().collect()
    }

    #[test]
    fn no_story_on_both_sides_even_when_repeated() {
        let stories: Vec<_> = (0..300).map(|i| format!("Story {}.", i % 150)).collect();
        let all = Documents::from_text(stories.join("<|endoftext|>"));
        let told = Told::default();
        let (train, valid) = split(&all, &told).unwrap();
        assert!(told.all().contains("repeated documents are left out of validation: 15"));
        assert_eq!(train.len(), 2 * 135);
        assert_eq!(valid.len(), 15);
        assert_eq!(set(&valid).len(), 15);
        assert!(set(&train).is_disjoint(&set(&valid)));
        // The split depends on content alone: in another order the same stories are held out.
        let reversed: Vec<_> = stories.iter().rev().cloned().collect();
        let (_, again) = split(&Documents::from_text(reversed.join("<|endoftext|>")), &Silent).unwrap();
        assert_eq!(set(&valid), set(&again));
    }

    #[test]
    fn validation_is_capped() {
        let stories: Vec<_> = (0..30_000).map(|i| i.to_string()).collect();
        let told = Told::default();
        let (train, valid) = split(&Documents::from_text(stories.join("<|endoftext|>")), &told).unwrap();
        assert_eq!(told.all(), "");
        assert_eq!((train.len(), valid.len()), (28_000, 2000));
        let (train, valid) = split_most(&Documents::from_text(stories.join("<|endoftext|>")), 80, &Silent).unwrap();
        assert_eq!((train.len(), valid.len()), (29_920, 80));
    }

    #[test]
    fn one_document_is_split_at_its_end() {
        let text: String = (0..20_000).map(|i| format!("Line {i}.\n")).collect();
        let all = Documents::from_text(text.clone());
        let told = Told::default();
        let (train, valid) = split(&all, &told).unwrap();
        assert_eq!(told.all(), "");
        assert_eq!((train.len(), valid.len()), (1, 1));
        let (train, valid) = (train.iter().next().unwrap(), valid.iter().next().unwrap());
        assert_eq!(format!("{train}\n{valid}\n"), text);
        let share = valid.len() as f64 / text.len() as f64;
        assert!((0.09..0.12).contains(&share), "{share}");
    }

    #[test]
    fn a_line_without_end_is_split_too() {
        let (train, valid) = split(&Documents::from_text("word ".repeat(5000).to_string() + "end"), &Silent).unwrap();
        assert!(train.bytes() > 0 && valid.bytes() > 0);
        let letters: String = ('a'..='z').cycle().take(30_000).collect();
        assert!(split(&Documents::from_text(letters), &Silent).is_ok());
    }

    #[test]
    fn blocks_of_the_training_part_are_dropped() {
        // Each block is exactly one paragraph. The last three would be held out, but one of them
        // repeats the first.
        let paragraph = |i: usize| format!("{i:04} ").repeat(450);
        let mut paragraphs: Vec<_> = (0..30).map(paragraph).collect();
        paragraphs[28] = paragraph(0);
        let told = Told::default();
        let (train, valid) = split(&Documents::from_text(paragraphs.join("\n\n")), &told).unwrap();
        assert!(told.all().contains("left out of validation: 1"));
        assert!(train.iter().all(|part| part.contains("0000")));
        assert!(valid.iter().all(|part| !part.contains("0000")));
        assert_eq!(valid.len(), 2);
    }

    #[test]
    fn two_stories_are_enough() {
        let (train, valid) = split(&Documents::from_text("One.<|endoftext|>Two."), &Silent).unwrap();
        assert_eq!((train.len(), valid.len()), (1, 1));
    }

    /// One block to train on, and one to hold out.
    #[test]
    fn two_blocks_are_enough() {
        let text: String = (0..BLOCK).map(|i| format!("Line {i}.\n")).collect();
        let text = &text[..2 * BLOCK + BLOCK / 2];
        assert_eq!(pieces(text.trim(), BLOCK).count(), 2);
        let (train, valid) = split(&Documents::from_text(text.to_string()), &Silent).unwrap();
        assert_eq!((train.len(), valid.len()), (1, 1));
    }

    #[test]
    fn too_little_text_is_an_error() {
        for text in ["Hello.".to_string(), "a<|endoftext|>a".into()] {
            assert!(split(&Documents::from_text(text), &Silent).is_err());
        }
        let repeated = format!("{}\n\n", "same ".repeat(500)).repeat(20);
        assert!(split(&Documents::from_text(repeated), &Silent).is_err());
    }

    #[test]
    fn halves_of_stories_and_of_one_text() {
        let (first, second) = halves(&Documents::from_text("a<|endoftext|>b<|endoftext|>c")).unwrap();
        assert_eq!((first.iter().collect::<Vec<_>>(), second.iter().collect::<Vec<_>>()), (vec!["a", "b"], vec!["c"]));
        let text: String = (0..2000).map(|i| format!("Line {i}.\n")).collect();
        let (first, second) = halves(&Documents::from_text(text.clone())).unwrap();
        let (first, second) = (first.iter().next().unwrap(), second.iter().next().unwrap());
        assert_eq!(format!("{first}\n{second}\n"), text);
        let share = first.len() as f64 / text.len() as f64;
        assert!((0.35..0.65).contains(&share), "{share}");
        assert!(halves(&Documents::from_text("Hello.")).is_none());
    }

    #[test]
    fn shared_documents_are_dropped() {
        let train = Documents::from_text("a<|endoftext|>b<|endoftext|>c");
        let valid = Documents::from_text("b<|endoftext|>d<|endoftext|>b");
        let valid = without_shared(&valid, &train);
        assert_eq!(valid.iter().collect::<Vec<_>>(), ["d"]);
    }
}

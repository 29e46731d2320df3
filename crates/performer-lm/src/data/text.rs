//! This module reads text as a list of documents: text in memory, or a file, lazily from a memory
//! map.
//!
//! A file of gigabytes needs no memory but the page cache: only the byte range of each document is
//! held.

use std::borrow::Cow;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result, bail};
use memmap2::Mmap;

/// The separator between two documents of a text file (on a line of its own, by convention).
pub const SEPARATOR: &str = "<|endoftext|>";

/// `Text` is UTF-8 text: held in memory, or a memory-mapped file.
#[derive(Debug)]
pub(crate) enum Text {
    Held(Cow<'static, str>),
    Mapped(Mmap),
}

impl Text {
    /// Maps a file and checks that all of it is UTF-8.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let cannot_read = || format!("cannot read {}", path.display());
        // To open a pipe would wait for somebody who writes into it.
        if !path.metadata().with_context(cannot_read)?.is_file() {
            bail!("{} is not a regular file; save its content in a text file and give that", path.display());
        }
        let file = File::open(path).with_context(cannot_read)?;
        // SAFETY: a map is sound as long as nobody changes the file beneath it; a data file is not
        // written while it is being trained on.
        let map = unsafe { Mmap::map(&file) }.with_context(|| format!("cannot memory-map {}", path.display()))?;
        if let Err(error) = std::str::from_utf8(&map) {
            bail!(
                "{} is not UTF-8 text: invalid byte at offset {}; convert it, for instance with \
                 `iconv -t UTF-8`",
                path.display(),
                error.valid_up_to()
            );
        }
        Ok(Self::Mapped(map))
    }

    pub(crate) fn as_str(&self) -> &str {
        match self {
            Self::Held(text) => text,
            // SAFETY: `open` checked every byte, and the file does not change beneath the map.
            Self::Mapped(map) => unsafe { std::str::from_utf8_unchecked(map) },
        }
    }

    /// Returns the byte ranges of the documents: the text between separators, without surrounding
    /// white space.
    fn spans(&self) -> Vec<Range<usize>> {
        let text = self.as_str();
        let mut spans = Vec::new();
        let mut start = 0;
        let separators = memchr::memmem::find_iter(text.as_bytes(), SEPARATOR.as_bytes());
        for end in separators.chain([text.len()]) {
            spans.extend(trim(text, start..end));
            start = end + SEPARATOR.len();
        }
        spans
    }
}

/// Returns `span` without surrounding white space (and byte order mark), or `None` if nothing
/// remains.
pub(crate) fn trim(text: &str, span: Range<usize>) -> Option<Range<usize>> {
    let blank = |c: char| c.is_whitespace() || c == '\u{feff}';
    let part = &text[span.clone()];
    let left = part.trim_start_matches(blank);
    let start = span.end - left.len();
    let end = start + left.trim_end_matches(blank).len();
    (start < end).then_some(start..end)
}

/// Whether the space or line break at byte `at` is the last of a run of white space with text after
/// it.
///
/// GPT-2's pre-tokenizer always splits just before such a place (the last space goes with the word
/// after it), so texts cut there are encoded to the same tokens as the whole.
pub(crate) fn ends_blank(text: &str, at: usize) -> bool {
    matches!(text.as_bytes()[at], b' ' | b'\n') && text[at + 1..].starts_with(|next: char| !next.is_whitespace())
}

/// Returns where to cut `text` into two, a byte offset of `min` to about `2 min`: the first end of
/// a paragraph, else of a line, else of a word, else a border between two characters. Text of at
/// most `2 min` bytes is not cut (the offset is its length).
pub(crate) fn cut(text: &str, min: usize) -> usize {
    if text.len() <= 2 * min {
        return text.len();
    }
    let bytes = text.as_bytes();
    let (mut line, mut word) = (None, None);
    for at in (min.max(1)..2 * min).filter(|&at| ends_blank(text, at)) {
        match (bytes[at - 1], bytes[at]) {
            (b'\n', b'\n') => return at,
            (_, b'\n') => line = line.or(Some(at)),
            _ => word = word.or(Some(at)),
        }
    }
    line.or(word).unwrap_or_else(|| text.ceil_char_boundary(2 * min))
}

/// Returns where to cut `text` into two so that both are encoded to the tokens of the whole: before
/// the first space from byte `min` on that stands alone between two words, if there is one before
/// `2 min`, else as by [`cut`].
///
/// The pre-tokenizers of GPT-2, Llama 3 and Qwen2 all split there. Between two line breaks that of
/// GPT-2 does, and the others do not.
fn cut_between_words(text: &str, min: usize) -> usize {
    if text.len() <= 2 * min {
        return text.len();
    }
    let bytes = text.as_bytes();
    let stands_alone = |at: usize| {
        bytes[at] == b' ' && ends_blank(text, at) && !text[..at].ends_with(|before: char| before.is_whitespace())
    };
    (min.max(1)..2 * min).find(|&at| stands_alone(at)).unwrap_or_else(|| cut(text, min))
}

/// Yields `text` in pieces of at least `min` bytes (but for the last), cut as by [`cut`].
pub(crate) fn pieces(text: &str, min: usize) -> impl Iterator<Item = &str> {
    pieces_by(text, min, cut)
}

/// Yields `text` in pieces of at least `min` bytes (but for the last), whose tokens are those of
/// the whole where it has spaces.
pub(crate) fn pieces_to_encode(text: &str, min: usize) -> impl Iterator<Item = &str> {
    pieces_by(text, min, cut_between_words)
}

fn pieces_by(text: &str, min: usize, cut: fn(&str, usize) -> usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (piece, tail) = rest.split_at(cut(rest, min));
        rest = tail;
        (!piece.is_empty()).then_some(piece)
    })
}

/// `Documents` is a list of documents (stories, say) of one text, in order.
///
/// A clone shares the text and copies the byte ranges (16 bytes for each document).
#[derive(Debug, Clone)]
pub struct Documents {
    text: Arc<Text>,
    spans: Vec<Range<usize>>,
    hash: OnceLock<blake3::Hash>,
}

impl Documents {
    /// Returns the documents of text in memory. As in a file, [`SEPARATOR`] stands between them,
    /// and white space around them does not count: `stories.join(SEPARATOR)` is the text of
    /// several.
    ///
    /// ```
    /// use performer_lm::data::Documents;
    ///
    /// let documents = Documents::from_text("Once.\n<|endoftext|>\nTwice.\n");
    /// assert_eq!(documents.iter().collect::<Vec<_>>(), ["Once.", "Twice."]);
    /// ```
    pub fn from_text(text: impl Into<Cow<'static, str>>) -> Self {
        Self::of(Text::Held(text.into()))
    }

    pub(crate) fn of(text: Text) -> Self {
        let spans = text.spans();
        Self::some_of(Arc::new(text), spans)
    }

    fn some_of(text: Arc<Text>, spans: Vec<Range<usize>>) -> Self {
        Self { text, spans, hash: OnceLock::new() }
    }

    /// Returns the number of documents.
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    /// Whether there are no documents.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Returns the number of bytes of text; separators and the white space around them are not
    /// counted.
    pub fn bytes(&self) -> u64 {
        self.spans.iter().map(|span| span.len() as u64).sum()
    }

    /// Yields the documents in order; nothing is copied.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        let text = self.text.as_str();
        self.spans.iter().map(move |span| &text[span.clone()])
    }

    /// Returns the identity of the content: a hash over the documents in order.
    pub fn hash(&self) -> blake3::Hash {
        *self.hash.get_or_init(|| {
            let mut hasher = blake3::Hasher::new();
            for document in self.iter() {
                hasher.update(&(document.len() as u64).to_le_bytes());
                hasher.update(document.as_bytes());
            }
            hasher.finalize()
        })
    }

    /// Returns parts of the first document, given as byte ranges within it, as documents of their
    /// own.
    pub(crate) fn within(&self, parts: impl IntoIterator<Item = Range<usize>>) -> Self {
        let start = self.spans.first().map_or(0, |span| span.start);
        let parts = parts.into_iter();
        let spans = parts.map(|part| start + part.start..start + part.end);
        Self::some_of(self.text.clone(), spans.collect())
    }

    /// Returns the documents for which `keep` returns true; it is called in order, once for each
    /// document.
    pub(crate) fn filter(&self, mut keep: impl FnMut(&str) -> bool) -> Self {
        let text = self.text.as_str();
        let spans = self.spans.iter().filter(|span| keep(&text[(*span).clone()]));
        Self::some_of(self.text.clone(), spans.cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn documents(text: &'static str) -> Vec<&'static str> {
        let spans = Text::Held(text.into()).spans();
        spans.into_iter().map(|span| &text[span]).collect()
    }

    #[test]
    fn documents_stand_between_separators() {
        let text = "\u{feff}One.\n\nStill one.\n<|endoftext|>\r\n<|endoftext|>\n Two. <|endoftext|>Three";
        assert_eq!(documents(text), ["One.\n\nStill one.", "Two.", "Three"]);
        assert_eq!(documents("no separator\n"), ["no separator"]);
        assert!(documents(" \n<|endoftext|>\n").is_empty());
    }

    #[test]
    fn hash_tells_where_documents_end() {
        let one = Documents::from_text("ab<|endoftext|>c");
        assert_eq!(one.hash(), Documents::from_text("ab\n<|endoftext|>\nc\n").hash());
        assert_ne!(one.hash(), Documents::from_text("a<|endoftext|>bc").hash());
        assert_eq!((one.len(), one.bytes()), (2, 3));
    }

    #[test]
    fn cuts_at_the_best_boundary() {
        assert_eq!(cut("short", 4), 5);
        assert_eq!(cut("0123 567\n\nabcdefgh", 5), 9);
        assert_eq!(cut("0123 567\nabcdefghijkl", 5), 8);
        // The end of a paragraph is better than that of a line or a word before it.
        assert_eq!(cut("0123 567\nab\n\ndefghijkl", 7), 12);
        assert_eq!(cut("0123 567\nab cdefghijkl", 5), 8);
        assert_eq!(cut("0123 567 abcdefghijkl", 5), 8);
        // Without any boundary, the cut is between two characters, never inside one.
        assert_eq!(cut("ééééééééé", 4), 8);
        assert_eq!(cut("aééééééééé", 4), 9);
    }

    #[test]
    fn cuts_to_encode_at_a_space_between_words() {
        assert_eq!(cut_between_words("short", 4), 5);
        assert_eq!(cut_between_words("0123.\n\nab cdefghij", 5), 9);
        assert_eq!(cut_between_words("0123  4\n5 6789 abc", 5), 9);
        // Without such a space, as elsewhere.
        assert_eq!(cut_between_words("0123 567\n\nabcdefgh", 5), 9);
        assert_eq!(cut_between_words("ééééééééé", 4), 8);
    }

    #[test]
    fn pieces_are_the_whole() {
        let text =
            "Some words\nand lines.\n\nAnd   gaps, and a veryveryverylongword 日本語テキスト日本語テキスト. ".repeat(9);
        for min in [1, 2, 3, 7, 20, 1000] {
            let parts: Vec<_> = pieces(&text, min).collect();
            assert_eq!(parts.concat(), text);
            let (last, others) = parts.split_last().unwrap();
            assert!(others.iter().all(|p| p.len() >= min), "min {min}");
            assert!(others.iter().all(|p| p.len() < 2 * min + 4), "min {min}");
            assert!(last.len() < 2 * min + 4, "min {min}");
        }
    }

    #[test]
    fn invalid_utf8_is_an_error_with_its_offset() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bad.txt");
        std::fs::write(&path, b"good \xff bad").unwrap();
        let error = Text::open(&path).unwrap_err().to_string();
        assert!(error.contains("bad.txt") && error.contains("offset 5"), "{error}");
    }

    /// Nobody writes into the pipe, so to open it would take forever.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_pipe_is_refused_and_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let error = Text::open(&path).unwrap_err().to_string();
        assert!(error.contains("not a regular file"), "{error}");
    }
}

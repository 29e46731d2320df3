//! This module reads and writes token files: a header and the tokens of a whole split,
//! memory-mapped.
//!
//! All numbers are little-endian. The header of 128 bytes is: magic (8 bytes), version and width of
//! a token in bytes (u32), number of tokens, bytes of text they cover, documents, vocabulary size
//! (u64), hash of what was encoded (32 bytes), hash of the tokens (32 bytes), and the first 16
//! bytes of the hash of all these; earlier versions wrote zeros there. Vocabularies of up to 65,536
//! tokens have tokens of two bytes, larger ones of four bytes.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, bail};
use memmap2::{Mmap, MmapMut};

use super::encode::{encode_documents, memory_note};
use super::text::Documents;
use super::tokenizer::Tokenizer;
use crate::listener::{Listener, Unit};

const MAGIC: [u8; 8] = *b"PERFTOKS";
const VERSION: u32 = 1;
const HEADER: usize = 128;

/// Where the header's own hash begins.
const CHECK: usize = 112;

/// A `TokenFile` holds the tokens of a text, each document between its borders, mapped from a file
/// (or held in memory).
#[derive(Debug)]
pub struct TokenFile {
    map: Mmap,
    header: Header,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Header {
    width: u32,
    tokens: u64,
    bytes: u64,
    documents: u64,
    vocab_size: u64,
    content: [u8; 32],
    payload: [u8; 32],
}

impl Header {
    fn to_bytes(self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.width.to_le_bytes());
        for number in [self.tokens, self.bytes, self.documents, self.vocab_size] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(self.content);
        bytes.extend(self.payload);
        bytes.resize(HEADER, 0);
        bytes
    }

    /// The header as it is written, with its own hash.
    fn to_stored(self) -> Vec<u8> {
        let mut bytes = self.to_bytes();
        let check = blake3::hash(&bytes[..CHECK]);
        bytes[CHECK..].copy_from_slice(&check.as_bytes()[..HEADER - CHECK]);
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self> {
        if bytes.len() < HEADER || bytes[..8] != MAGIC {
            bail!("not a token file");
        }
        fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
            let mut field = [0; N];
            field.copy_from_slice(&bytes[at..at + N]);
            field
        }
        let version = u32::from_le_bytes(field(bytes, 8));
        if version != VERSION {
            bail!("a token file of version {version}; this program reads version {VERSION}");
        }
        let check = &bytes[CHECK..HEADER];
        let is_old = check.iter().all(|&byte| byte == 0);
        if !is_old && *check != blake3::hash(&bytes[..CHECK]).as_bytes()[..HEADER - CHECK] {
            bail!("damaged token file: the header does not have the hash that it tells");
        }
        let number = |at| u64::from_le_bytes(field(bytes, at));
        Ok(Self {
            width: u32::from_le_bytes(field(bytes, 12)),
            tokens: number(16),
            bytes: number(24),
            documents: number(32),
            vocab_size: number(40),
            content: field(bytes, 48),
            payload: field(bytes, 80),
        })
    }
}

/// Returns the number of bytes of a stored token.
fn width(vocab_size: usize) -> u32 {
    if vocab_size <= 1 << 16 { 2 } else { 4 }
}

fn push(bytes: &mut Vec<u8>, token: u32, width: u32) {
    bytes.extend(&token.to_le_bytes()[..width as usize]);
}

impl TokenFile {
    /// Maps a token file and checks all of it.
    ///
    /// # Errors
    /// If the file cannot be read, is no token file, or is damaged.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
        // SAFETY: a map is sound as long as nobody changes the file beneath it; token files are
        // replaced whole, never written in place.
        let map = unsafe { Mmap::map(&file) }.with_context(|| format!("cannot memory-map {}", path.display()))?;
        Self::from_map(map).with_context(|| path.display().to_string())
    }

    fn from_map(map: Mmap) -> Result<Self> {
        let header = Header::from_bytes(&map)?;
        if header.width != width(header.vocab_size as usize) {
            bail!(
                "damaged token file: {} bytes a token do not suit a vocabulary of {}",
                header.width,
                header.vocab_size
            );
        }
        let expected = header.tokens.checked_mul(u64::from(header.width));
        let found = (map.len() - HEADER) as u64;
        if expected != Some(found) {
            bail!("damaged token file: {} tokens announced, {found} bytes of them found", header.tokens);
        }
        if *blake3::hash(&map[HEADER..]).as_bytes() != header.payload {
            bail!("damaged token file: the tokens do not have the hash that the header tells");
        }
        Ok(Self { map, header })
    }

    /// Makes a token file held in memory, of one document that covers `bytes` bytes of text.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn from_tokens(tokens: &[u32], bytes: u64) -> Result<Self> {
        let vocab_size = tokens.iter().max().map_or(0, |&token| token as usize + 1);
        let width = width(vocab_size);
        let mut payload = Vec::with_capacity(tokens.len() * width as usize);
        for &token in tokens {
            push(&mut payload, token, width);
        }
        let hash = *blake3::hash(&payload).as_bytes();
        let header = Header {
            width,
            tokens: tokens.len() as u64,
            bytes,
            documents: 1,
            vocab_size: vocab_size as u64,
            content: hash,
            payload: hash,
        };
        let mut map = MmapMut::map_anon(HEADER + payload.len()).context("no memory for tokens")?;
        map[..HEADER].copy_from_slice(&header.to_stored());
        map[HEADER..].copy_from_slice(&payload);
        Self::from_map(map.make_read_only().context("no memory for tokens")?)
    }

    /// Encodes documents and writes the tokens; `listener` is told how much of the text is done.
    pub(crate) fn write(
        file: &mut File,
        documents: &Documents,
        tokenizer: &Tokenizer,
        listener: &dyn Listener,
    ) -> Result<()> {
        let width = width(tokenizer.vocab_size());
        let longest = documents.iter().map(str::len).max().unwrap_or(0);
        if let Some(note) = memory_note(tokenizer, longest) {
            listener.note(&note);
        }
        let bar = listener.begin("tokenizing", Unit::Bytes, 0, documents.bytes());
        let mut payload = blake3::Hasher::new();
        let (mut tokens, mut covered) = (0, 0);
        // The header is written last, when its numbers are known.
        file.write_all(&[0; HEADER])?;
        let mut buffer = Vec::new();
        for batch in encode_documents(tokenizer, documents) {
            let (batch, bytes) = batch?;
            buffer.clear();
            for &token in &batch {
                push(&mut buffer, token, width);
            }
            payload.update(&buffer);
            file.write_all(&buffer)?;
            tokens += batch.len() as u64;
            covered += bytes as u64;
            bar.advance(covered);
        }
        drop(bar);
        let header = Header {
            width,
            tokens,
            bytes: covered,
            documents: documents.len() as u64,
            vocab_size: tokenizer.vocab_size() as u64,
            content: *content_hash(documents, tokenizer).as_bytes(),
            payload: *payload.finalize().as_bytes(),
        };
        file.seek(SeekFrom::Start(0))?;
        file.write_all(&header.to_stored())?;
        Ok(())
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.header.tokens as usize
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of bytes of text that the tokens cover, without separators of documents.
    /// Bits per byte are the sum of the losses of all tokens, in nats, over ln 2 times this number.
    pub fn bytes(&self) -> u64 {
        self.header.bytes
    }

    /// Returns the number of documents.
    pub fn documents(&self) -> u64 {
        self.header.documents
    }

    /// Returns the size of the vocabulary, which is above every token.
    pub fn vocab_size(&self) -> usize {
        self.header.vocab_size as usize
    }

    /// Returns the identity of the text and the tokenizer that the tokens come from.
    pub fn hash(&self) -> blake3::Hash {
        self.header.content.into()
    }

    /// Returns a digest of the tokens, of the numbers of bytes and documents that they cover, and
    /// of the identity of their text and tokenizer.
    pub fn digest(&self) -> blake3::Hash {
        // The header holds all of these, the tokens by their hash.
        blake3::hash(&self.header.to_bytes())
    }

    /// Returns the tokens at the given positions.
    ///
    /// # Panics
    /// If the positions lie past the end, as with a slice.
    pub fn read(&self, range: Range<usize>) -> Vec<u32> {
        let width = self.header.width as usize;
        let bytes = &self.map[HEADER..][range.start * width..range.end * width];
        let mut token = [0; 4];
        let tokens = bytes.chunks_exact(width).map(|bytes| {
            token[..width].copy_from_slice(bytes);
            u32::from_le_bytes(token)
        });
        tokens.collect()
    }
}

/// Returns the identity of what a token file is made from.
pub(crate) fn content_hash(documents: &Documents, tokenizer: &Tokenizer) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(documents.hash().as_bytes());
    hasher.update(tokenizer.hash().as_bytes());
    if !tokenizer.splits_at_spaces() {
        // Where long documents are cut to be encoded matters for these, and was another place.
        hasher.update(b"cut between words");
    }
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::super::tokenizer::tests::stories;
    use super::*;

    #[test]
    fn written_and_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        let docs = stories();
        let tokenizer = Tokenizer::train(&docs, 400).unwrap();
        TokenFile::write(&mut File::create(&path).unwrap(), &docs, &tokenizer, &crate::listener::Silent).unwrap();
        let file = TokenFile::open(&path).unwrap();
        let mut expected = Vec::new();
        for story in docs.iter() {
            expected.extend(tokenizer.encode(story).unwrap());
            expected.push(tokenizer.eot());
        }
        assert_eq!(file.read(0..file.len()), expected);
        assert_eq!(file.read(3..5), expected[3..5]);
        assert_eq!((file.documents(), file.bytes()), (50, docs.bytes()));
        assert_eq!(file.vocab_size(), tokenizer.vocab_size());
        assert_eq!(file.hash(), content_hash(&docs, &tokenizer));
    }

    #[test]
    fn wide_and_narrow_tokens() {
        assert_eq!([1, 65_536, 65_537, 1 << 20].map(width), [2, 2, 4, 4]);
        for tokens in [vec![0, 1, 65_535], vec![65_536, 7], vec![u32::MAX - 1], vec![]] {
            let file = TokenFile::from_tokens(&tokens, 12).unwrap();
            assert_eq!(file.read(0..tokens.len()), tokens);
            assert_eq!((file.len(), file.bytes()), (tokens.len(), 12));
            assert_eq!(file.is_empty(), tokens.is_empty());
        }
    }

    #[test]
    fn damage_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        let good = TokenFile::from_tokens(&[1, 2, 3], 9).unwrap().map.to_vec();
        std::fs::write(&path, &good).unwrap();
        TokenFile::open(&path).unwrap();

        let refuse = |bytes: &[u8], why: &str| {
            std::fs::write(&path, bytes).unwrap();
            let error = format!("{:#}", TokenFile::open(&path).unwrap_err());
            assert!(error.contains(why) && error.contains("tokens"), "{error}");
        };
        let change = |at: usize| {
            let mut bytes = good.clone();
            bytes[at] ^= 4;
            bytes
        };
        refuse(b"", "not a token file");
        refuse(b"Once upon a time", "not a token file");
        refuse(&good[..HEADER - 1], "not a token file");
        refuse(&change(0), "not a token file");
        refuse(&change(8), "version");
        for at in (12..HEADER).step_by(4) {
            refuse(&change(at), "header does not have the hash");
        }
        // Files of earlier versions have no hash of their header.
        let old = |change: &dyn Fn(&mut [u8])| {
            let mut bytes = good.clone();
            bytes[CHECK..HEADER].fill(0);
            change(&mut bytes);
            bytes
        };
        std::fs::write(&path, old(&|_| ())).unwrap();
        TokenFile::open(&path).unwrap();
        refuse(&old(&|bytes| bytes[12] ^= 4), "bytes a token");
        refuse(&old(&|bytes| bytes[23] ^= 4), "announced");
        refuse(&good[..good.len() - 1], "announced");
        refuse(&[&good[..], &[0; 2]].concat(), "announced");
        refuse(&change(good.len() - 1), "hash");
    }
}

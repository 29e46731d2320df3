//! What the targets share: files that are only read by path, and the use of what was read.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use anyhow::Result;
use candle_core::Device;
use performer_lm::{
    data::Tokenizer,
    generate::{Sampling, generate},
    model::pretrained::Pretrained,
};
use tempfile::TempDir;

/// The key under which a file of weights holds a digest of itself, and the length of that digest.
const DIGEST: (&[u8], usize) = (b"\"blake3\":\"", 64);

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder for temporary files"));

/// A folder of this process, in which a target puts files. scripts/fuzz.sh has it in memory.
pub fn folder() -> &'static Path {
    FOLDER.path()
}

/// Writes a file into the folder, and returns its path.
pub fn put(name: &str, content: &[u8]) -> PathBuf {
    let path = folder().join(name);
    fs::write(&path, content).expect("the folder can be written to");
    path
}

/// The path of a file or folder that performer-lm's test `seeds` wrote.
pub fn fixture(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name);
    assert!(path.exists(), "{} is missing: scripts/fuzz.sh writes it", path.display());
    path
}

/// Copies a folder of fixtures into the folder of this process under a name of its own.
pub fn copy(name: &str, to: &str) -> PathBuf {
    let to = folder().join(to);
    fs::create_dir_all(&to).expect("the folder can be written to");
    for entry in fs::read_dir(fixture(name)).expect("the fixture is a folder") {
        let path = entry.expect("an entry").path();
        fs::copy(&path, to.join(path.file_name().expect("a name"))).expect("the folder can be written to");
    }
    to
}

/// Opens the model at a path.
pub fn open(path: &Path) -> Result<Pretrained> {
    Pretrained::open(path.to_str().expect("paths of temporary files are text"))
}

/// Encodes and decodes a text, whole and token by token.
pub fn use_tokenizer(tokenizer: &Tokenizer) -> Result<()> {
    let tokens = tokenizer.encode("Once upon a time, é日\n\n  the end.")?;
    tokenizer.decode(&tokens)?;
    let mut stream = tokenizer.stream();
    for token in tokens {
        stream.push(token)?;
    }
    stream.finish()?;
    Ok(())
}

/// Uses a model that could be opened: encodes a text, builds the model, and lets it speak.
pub fn use_model(opened: &Pretrained) -> Result<()> {
    use_tokenizer(&opened.tokenizer)?;
    let model = opened.decoder(&Device::Cpu)?;
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    generate(&model, &opened.tokenizer, "he", 2, sampling, |_| Ok(true))?;
    Ok(())
}

/// Puts the digest right that a file of weights holds of itself, where it holds one.
pub fn with_own_digest(mut weights: Vec<u8>) -> Vec<u8> {
    let (key, length) = DIGEST;
    let Some(place) = memchr::memmem::find(&weights, key).map(|at| at + key.len()) else { return weights };
    let Some(told) = weights.get_mut(place..place + length) else { return weights };
    told.fill(b'0');
    let digest = blake3::hash(&weights).to_hex();
    weights[place..place + length].copy_from_slice(digest.as_bytes());
    weights
}

/// Makes a file in the safetensors format of a header, a line feed, and the data. The length that
/// stands before the header is computed: else every header that the fuzzer made longer or shorter
/// would be refused before it is read.
pub fn safetensors(parts: &[u8]) -> Vec<u8> {
    let end = memchr::memchr(b'\n', parts).unwrap_or(parts.len());
    let mut header = parts[..end].to_vec();
    header.resize(end.next_multiple_of(8), b' ');
    [&(header.len() as u64).to_le_bytes()[..], &header, parts.get(end + 1..).unwrap_or_default()].concat()
}

/// Takes the first byte of an input off, which chooses one of `count` ways to read the rest.
pub fn choice(input: &[u8], count: usize) -> Option<(usize, &[u8])> {
    let (first, rest) = input.split_first()?;
    Some((*first as usize % count, rest))
}

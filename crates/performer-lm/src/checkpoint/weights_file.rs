//! This module writes files durably, and weights in the [safetensors
//! format](https://github.com/huggingface/safetensors#format).
//!
//! The format is simple enough to be written here, which has four advantages over the `safetensors`
//! crate's own writer: bytes that depend on nothing but the content (its metadata comes in random
//! order), ordinary file permissions (its files are readable by their owner alone), a digest from
//! the same pass, and data on the disk before the function returns.
//!
//! Weights have no redundancy: a flipped bit makes another model, and nobody sees it. So a file of
//! weights holds a digest of itself in its header ([`write_with_digest`]), and a reader compares
//! the two ([`check_digest`]). Other programs pass it over, and their files, which have none, are
//! read as they are.

use anyhow::{Context, Result, bail};
use candle_core::Tensor;
use safetensors::{Dtype, SafeTensors};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Header key of the digest: the BLAKE3 digest of the file in which zeros stand in its place.
pub(super) const DIGEST_KEY: &str = "blake3";

/// What stands in the digest's place while the digest is computed.
const NO_DIGEST: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// Writes and syncs a file, and returns the BLAKE3 digest of its content in hexadecimal.
pub(crate) fn write_durably(path: &Path, content: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<String> {
    let write = || {
        let mut out =
            Digesting { file: BufWriter::with_capacity(1 << 20, File::create(path)?), digest: blake3::Hasher::new() };
        content(&mut out)?;
        let file = out.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        Ok::<_, io::Error>(out.digest.finalize().to_hex().to_string())
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

struct Digesting {
    file: BufWriter<File>,
    digest: blake3::Hasher,
}

impl Write for Digesting {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.file.write_all(data)?;
        self.digest.update(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Writes tensors and text metadata as safetensors, one tensor in memory at a time.
pub(crate) fn write_safetensors(
    out: &mut dyn Write,
    tensors: &HashMap<String, Tensor>,
    metadata: &BTreeMap<String, String>,
) -> io::Result<()> {
    let tensors = widest_first(tensors);
    write_header(out, &header(&tensors, metadata)?)?;
    write_data(out, &tensors)
}

/// Does what [`write_safetensors`] does, and writes a digest of the file into its header.
pub(crate) fn write_with_digest(
    out: &mut dyn Write,
    tensors: &HashMap<String, Tensor>,
    metadata: &BTreeMap<String, String>,
) -> io::Result<()> {
    let tensors = widest_first(tensors);
    let mut metadata = metadata.clone();
    metadata.insert(DIGEST_KEY.to_owned(), NO_DIGEST.to_owned());
    let header = header(&tensors, &metadata)?;
    let mut digest = blake3::Hasher::new();
    write_header(&mut digest, &header)?;
    write_data(&mut digest, &tensors)?;
    let entry = |digest: &str| format!("\"{DIGEST_KEY}\":\"{digest}\"");
    write_header(out, &header.replacen(&entry(NO_DIGEST), &entry(&digest.finalize().to_hex()), 1))?;
    write_data(out, &tensors)
}

/// Refuses the bytes of a file of weights that holds another digest than its own. A file without
/// one was written by another program, or by an earlier version of this one.
///
/// # Errors
/// If the file is no safetensors file, or its digest is that of other bytes.
pub(crate) fn check_digest(bytes: &[u8]) -> Result<()> {
    let (length, header) = SafeTensors::read_metadata(bytes)?;
    let Some(metadata) = header.metadata() else { return Ok(()) };
    let Some(told) = metadata.get(DIGEST_KEY) else {
        // Its name may be among what was damaged, where this program wrote the file.
        let is_digest = |text: &String| text.len() == NO_DIGEST.len() && text.bytes().all(|b| b.is_ascii_hexdigit());
        if metadata.contains_key(super::DIGESTS_KEY) && metadata.values().any(is_digest) {
            bail!("its digest does not have the name {DIGEST_KEY}");
        }
        return Ok(());
    };
    let (header, data) = bytes.split_at(8 + length);
    let entry = format!("\"{DIGEST_KEY}\":\"{told}\"");
    let place = memchr::memmem::find(header, entry.as_bytes()).filter(|_| told.len() == NO_DIGEST.len());
    let Some(end) = place.map(|place| place + entry.len() - 1) else { bail!("its digest is not spelt as a digest") };
    let mut digest = blake3::Hasher::new();
    for part in [&header[..end - NO_DIGEST.len()], NO_DIGEST.as_bytes(), &header[end..], data] {
        digest.update(part);
    }
    if digest.finalize().to_hex().as_str() != told {
        bail!("its bytes are not those that were written, of which it holds the digest");
    }
    Ok(())
}

/// Returns tensors in the order in which they are written: wide types first, which keeps every one
/// aligned.
fn widest_first(tensors: &HashMap<String, Tensor>) -> Vec<(&str, &Tensor)> {
    let mut sorted: Vec<(&str, &Tensor)> = tensors.iter().map(|(k, t)| (&**k, t)).collect();
    sorted.sort_by_key(|(name, t)| (std::cmp::Reverse(t.dtype().size_in_bytes()), *name));
    sorted
}

fn header(tensors: &[(&str, &Tensor)], metadata: &BTreeMap<String, String>) -> io::Result<String> {
    let mut header = String::from("{");
    if !metadata.is_empty() {
        header += &format!("\"__metadata__\":{},", serde_json::to_string(metadata)?);
    }
    let mut offset = 0;
    for (name, tensor) in tensors {
        let end = offset + tensor.elem_count() * tensor.dtype().size_in_bytes();
        header += &format!(
            "{}:{{\"dtype\":{},\"shape\":{},\"data_offsets\":[{offset},{end}]}},",
            serde_json::to_string(name)?,
            serde_json::to_string(&Dtype::from(tensor.dtype()))?,
            serde_json::to_string(tensor.dims())?,
        );
        offset = end;
    }
    if header.ends_with(',') {
        header.pop();
    }
    header.push('}');
    let padding = header.len().next_multiple_of(8) - header.len();
    header.extend(std::iter::repeat_n(' ', padding));
    Ok(header)
}

fn write_header(out: &mut dyn Write, header: &str) -> io::Result<()> {
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())
}

fn write_data(out: &mut dyn Write, tensors: &[(&str, &Tensor)]) -> io::Result<()> {
    tensors.iter().try_for_each(|(_, tensor)| out.write_all(&safetensors::View::data(*tensor)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};
    use safetensors::SafeTensors;

    #[test]
    fn the_safetensors_crate_reads_what_is_written() -> Result<()> {
        let range = Tensor::arange(0f32, 6., &Device::Cpu)?.reshape((2, 3))?;
        let tensors = HashMap::from([
            ("transposed \"é".to_owned(), range.t()?),
            ("half".to_owned(), range.narrow(1, 1, 1)?.to_dtype(DType::BF16)?),
            ("bytes".to_owned(), Tensor::new(&[1u8, 2, 3], &Device::Cpu)?),
            ("scalar".to_owned(), Tensor::new(7i64, &Device::Cpu)?),
            ("empty".to_owned(), Tensor::zeros((0, 2), DType::F32, &Device::Cpu)?),
        ]);
        let metadata = BTreeMap::from([("k".to_owned(), "v\n".to_owned()), ("a".to_owned(), "b".to_owned())]);
        let mut bytes = Vec::new();
        write_safetensors(&mut bytes, &tensors, &metadata)?;

        let (length, header) = SafeTensors::read_metadata(&bytes)?;
        assert!(length.is_multiple_of(8), "the data must be aligned");
        let read_metadata: BTreeMap<_, _> = header.metadata().clone().unwrap().into_iter().collect();
        assert_eq!(read_metadata, metadata);
        let read = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu)?;
        assert_eq!(read.len(), tensors.len());
        for (name, tensor) in &tensors {
            assert_eq!(read[name].dtype(), tensor.dtype());
            assert_eq!(read[name].dims(), tensor.dims());
            let values = |t: &Tensor| t.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
            assert_eq!(values(&read[name])?, values(tensor)?, "{name}");
        }
        Ok(())
    }

    /// Whatever bit is flipped: the file is refused, or is not read as one with a digest, and then
    /// the weights are what they were.
    #[test]
    fn a_flipped_bit_is_an_error_and_no_other_model() -> Result<()> {
        let range = Tensor::arange(0f32, 6., &Device::Cpu)?.reshape((2, 3))?;
        let tensors = HashMap::from([("a".to_owned(), range.clone()), ("b".to_owned(), range.to_dtype(DType::BF16)?)]);
        let metadata = BTreeMap::from([("a".to_owned(), NO_DIGEST.to_owned()), ("z".to_owned(), "text".to_owned())]);
        let mut bytes = Vec::new();
        write_with_digest(&mut bytes, &tensors, &metadata)?;
        check_digest(&bytes)?;
        let (length, _) = SafeTensors::read_metadata(&bytes)?;
        assert!(length.is_multiple_of(8), "the data must be aligned");
        let read = |bytes: &[u8]| -> Result<Vec<(String, Vec<f32>)>> {
            check_digest(bytes)?;
            let mut all: Vec<_> = candle_core::safetensors::load_buffer(bytes, &Device::Cpu)?
                .into_iter()
                .map(|(name, t)| Ok((name, t.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)))
                .collect::<Result<_>>()?;
            all.sort_by(|a, b| a.0.cmp(&b.0));
            Ok(all)
        };
        let whole = read(&bytes)?;
        let mut accepted = 0;
        for bit in 0..8 * bytes.len() {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            if let Ok(read) = read(&flipped) {
                assert_eq!(read, whole, "bit {bit}");
                accepted += 1;
            }
        }
        assert!(accepted <= 8 * DIGEST_KEY.len(), "{accepted} of the bits may be flipped");
        for length in 0..bytes.len() {
            assert!(check_digest(&bytes[..length]).is_err(), "{length} bytes");
        }
        // In a file with the mark of this program the digest must have its name.
        let ours = BTreeMap::from([(super::super::DIGESTS_KEY.to_owned(), "{}".to_owned())]);
        let mut marked = Vec::new();
        write_with_digest(&mut marked, &tensors, &ours)?;
        assert_eq!(read(&marked)?, whole);
        let at = memchr::memmem::find(&marked, DIGEST_KEY.as_bytes()).unwrap();
        marked[at] ^= 1;
        assert!(read(&marked).is_err());
        // Files without a digest are read as they are.
        let mut plain = Vec::new();
        write_safetensors(&mut plain, &tensors, &metadata)?;
        assert_eq!(read(&plain)?, whole);
        Ok(())
    }

    #[test]
    fn no_tensors_and_no_metadata_is_a_valid_file() -> Result<()> {
        let mut bytes = Vec::new();
        write_safetensors(&mut bytes, &HashMap::new(), &BTreeMap::new())?;
        assert!(SafeTensors::deserialize(&bytes)?.is_empty());
        Ok(())
    }

    #[test]
    fn digest_is_of_the_file_on_disk() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("file");
        let digest = write_durably(&path, |out| out.write_all(&[7; 3_000_000]))?;
        let content = std::fs::read(&path)?;
        assert_eq!(content, vec![7; 3_000_000]);
        assert_eq!(digest, blake3::hash(&content).to_hex().to_string());
        let error = write_durably(dir.path(), |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("cannot write"), "{error}");
        Ok(())
    }
}

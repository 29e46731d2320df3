//! This module writes files durably, and weights in the [safetensors
//! format](https://github.com/huggingface/safetensors#format).
//!
//! The format is simple enough to be written here, which has four advantages over the `safetensors`
//! crate's own writer: bytes that depend on nothing but the content (its metadata comes in random
//! order), ordinary file permissions (its files are readable by their owner alone), a digest from
//! the same pass, and data on the disk before the function returns.

use anyhow::{Context, Result};
use candle_core::Tensor;
use safetensors::Dtype;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

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
    // To write wide types first keeps every tensor aligned.
    let mut sorted: Vec<(&str, &Tensor)> = tensors.iter().map(|(k, t)| (&**k, t)).collect();
    sorted.sort_by_key(|(name, t)| (std::cmp::Reverse(t.dtype().size_in_bytes()), *name));

    let mut header = String::from("{");
    if !metadata.is_empty() {
        header += &format!("\"__metadata__\":{},", serde_json::to_string(metadata)?);
    }
    let mut offset = 0;
    for (name, tensor) in &sorted {
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
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    for (_, tensor) in sorted {
        out.write_all(&safetensors::View::data(tensor))?;
    }
    Ok(())
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

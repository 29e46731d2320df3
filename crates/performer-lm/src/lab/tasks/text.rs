//! This task is byte-level language modelling of long text: the next byte is predicted from up to a
//! whole context before it.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use rand_chacha::ChaCha8Rng;

use super::example::{Example, Source, Split};
use crate::draw::below;

/// One part in this many is held out of every file, at its end.
const HELD_OUT: usize = 20;

pub(super) struct Text {
    train: Vec<u8>,
    held_out: Vec<u8>,
    context: usize,
    files: String,
}

impl Text {
    /// Reads whole files; `context` bytes are a sequence.
    ///
    /// # Errors
    /// If there is no file, one cannot be read, or its held-out part is not longer than a sequence.
    pub(super) fn new(files: &[PathBuf], context: usize) -> Result<Self> {
        ensure!(!files.is_empty(), "the task text needs a text to read: give a file of one");
        let (mut train, mut held_out, mut names) = (Vec::new(), Vec::new(), Vec::new());
        for file in files {
            let bytes = std::fs::read(file).with_context(|| format!("cannot read the text {}", file.display()))?;
            let (first, last) = bytes.split_at(bytes.len() - bytes.len() / HELD_OUT);
            ensure!(
                last.len() > context,
                "the text {} has {} bytes, of which 1/{HELD_OUT} are held out; for sequences of {context} it must have at least {}: give a longer \
                 text, or a smaller length",
                file.display(),
                bytes.len(),
                HELD_OUT * (context + 1)
            );
            train.extend(first);
            held_out.extend(last);
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            names.push(format!("{name} ({} bytes)", bytes.len()));
        }
        Ok(Self { train, held_out, context, files: names.join(" and ") })
    }
}

impl Source for Text {
    fn vocabulary(&self) -> usize {
        256
    }

    fn describe(&self) -> String {
        format!(
            "{}: every byte of windows of {} bytes from those before it in the window; the last 1/{HELD_OUT} of a file is held out",
            self.files, self.context
        )
    }

    fn files(&self) -> Option<blake3::Hash> {
        let mut digest = blake3::Hasher::new();
        // The length distinguishes texts that are cut at another place.
        digest.update(&(self.train.len() as u64).to_le_bytes()).update(&self.train).update(&self.held_out);
        Some(digest.finalize())
    }

    fn draw(&self, split: Split, rng: &mut ChaCha8Rng) -> Example {
        let bytes = if split == Split::Train { &self.train } else { &self.held_out };
        let start = below(rng, bytes.len() - self.context);
        let window = &bytes[start..start + self.context + 1];
        Example {
            ids: window[..self.context].iter().map(|&byte| byte.into()).collect(),
            answers: window[1..].iter().map(|&byte| byte.into()).enumerate().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use rand_chacha::rand_core::SeedableRng;

    use super::*;

    #[test]
    fn answers_are_the_next_bytes_and_splits_do_not_meet() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("text");
        std::fs::write(&file, [vec![b'a'; 950], vec![b'b'; 50]].concat()).unwrap();
        let text = Text::new(std::slice::from_ref(&file), 8).unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(4);
        for (split, byte) in [(Split::Train, b'a'), (Split::HeldOut, b'b')] {
            let example = text.draw(split, &mut rng);
            assert_eq!(example.ids, [u32::from(byte); 8]);
        }
        std::fs::write(&file, (0..=255u8).cycle().take(5000).collect::<Vec<_>>()).unwrap();
        let example = Text::new(std::slice::from_ref(&file), 8).unwrap().draw(Split::Train, &mut rng);
        assert_eq!(example.answers.len(), 8);
        assert!(example.answers.iter().all(|&(place, next)| next == (example.ids[place] + 1) % 256));
        let error = Text::new(&[file], 250).err().unwrap().to_string();
        assert!(error.contains("5000 bytes") && error.contains("smaller length"), "{error}");
        assert!(Text::new(&[], 8).err().unwrap().to_string().contains("needs a text"));
    }
}

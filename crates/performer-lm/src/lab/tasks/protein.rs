//! This task predicts masked residues of proteins from those on both sides; it is the Performer
//! paper's task (section 4.4).
//!
//! As in that paper and in BERT, 15% of the residues are chosen; of these 80% are masked, 10% are
//! replaced by a random residue and 10% stay.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use rand_chacha::ChaCha8Rng;

use super::example::{Example, Source, Split};
use crate::draw::{below, shuffle};

/// The 20 standard residues and `X`, which stands for all others.
const RESIDUES: &[u8] = b"ACDEFGHIKLMNPQRSTVWYX";
const MASK: u32 = RESIDUES.len() as u32;

/// Percentage of the residues that are chosen.
const CHOSEN: usize = 15;

pub(super) struct Protein {
    train: Vec<Vec<u32>>,
    held_out: Vec<Vec<u32>>,
    crop: usize,
    file: String,
}

impl Protein {
    /// Reads a FASTA file; sequences are windows of up to `crop` residues.
    ///
    /// # Errors
    /// If the file cannot be read, is no FASTA, or has too few proteins.
    pub(super) fn new(file: Option<&Path>, crop: usize) -> Result<Self> {
        let file = file.context("the task protein needs protein sequences: give a file of some, in FASTA")?;
        let text =
            std::fs::read_to_string(file).with_context(|| format!("cannot read the proteins {}", file.display()))?;
        ensure!(text.trim_start().starts_with('>'), "{} is no FASTA: it must begin with a line >NAME", file.display());
        let (mut train, mut held_out) = (Vec::new(), Vec::new());
        for record in text.split('>').skip(1) {
            let (_, sequence) = record.split_once('\n').unwrap_or((record, ""));
            let residues: Vec<u32> = sequence.bytes().filter(u8::is_ascii_alphabetic).map(residue).collect();
            if residues.is_empty() {
                continue;
            }
            // About one protein in ten is held out, whatever the order of the file.
            let hash = blake3::hash(&residues.iter().map(|&r| r as u8).collect::<Vec<_>>());
            let split = if hash.as_bytes()[0] < 26 { &mut held_out } else { &mut train };
            split.push(residues);
        }
        ensure!(
            !train.is_empty() && !held_out.is_empty(),
            "{} has {} sequences: too few to hold some out; give more",
            file.display(),
            train.len() + held_out.len()
        );
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let file = format!("{name} ({} proteins)", train.len() + held_out.len());
        Ok(Self { train, held_out, crop, file })
    }
}

fn residue(letter: u8) -> u32 {
    let letter = letter.to_ascii_uppercase();
    RESIDUES.iter().position(|&r| r == letter).unwrap_or(RESIDUES.len() - 1) as u32
}

impl Source for Protein {
    fn vocabulary(&self) -> usize {
        RESIDUES.len() + 1
    }

    fn describe(&self) -> String {
        format!(
            "{}, windows of up to {} residues, shorter ones padded: {CHOSEN}% of the residues are chosen and predicted from both sides, of these 80% \
             masked, 10% replaced, 10% left; {} proteins are held out",
            self.file,
            self.crop,
            self.held_out.len()
        )
    }

    fn files(&self) -> Option<blake3::Hash> {
        let mut digest = blake3::Hasher::new();
        for proteins in [&self.train, &self.held_out] {
            digest.update(&(proteins.len() as u64).to_le_bytes());
            for protein in proteins {
                digest.update(&(protein.len() as u64).to_le_bytes());
                digest.update(&protein.iter().map(|&residue| residue as u8).collect::<Vec<_>>());
            }
        }
        Some(digest.finalize())
    }

    fn draw(&self, split: Split, rng: &mut ChaCha8Rng) -> Example {
        let proteins = if split == Split::Train { &self.train } else { &self.held_out };
        let protein = &proteins[below(rng, proteins.len())];
        let length = protein.len().min(self.crop);
        let start = below(rng, protein.len() - length + 1);
        let mut ids = protein[start..start + length].to_vec();
        let mut places: Vec<usize> = (0..length).collect();
        shuffle(&mut places, rng);
        places.truncate((length * CHOSEN).div_ceil(100));
        places.sort_unstable();
        let mut answers = Vec::with_capacity(places.len());
        for place in places {
            answers.push((place, ids[place]));
            match below(rng, 10) {
                0 => {}
                1 => ids[place] = below(rng, RESIDUES.len() - 1) as u32,
                _ => ids[place] = MASK,
            }
        }
        Example { ids, answers }
    }
}

#[cfg(test)]
mod tests {
    use rand_chacha::rand_core::SeedableRng;

    use super::*;

    #[test]
    fn chosen_residues_are_asked_for_and_the_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("proteins.fasta");
        // Each protein is another piece of the alphabet.
        let pieces = (0..6).flat_map(|start| (14..=21 - start).map(move |length| start..start + length));
        let records: String = pieces
            .map(|piece| {
                let (first, second) = RESIDUES[piece].split_at(10);
                format!(">name\n{}\n{}\n", String::from_utf8_lossy(first), String::from_utf8_lossy(second))
            })
            .collect();
        std::fs::write(&file, records).unwrap();
        let protein = Protein::new(Some(&file), 12).unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        let mut masked = 0;
        for _ in 0..200 {
            let Example { ids, answers } = protein.draw(Split::Train, &mut rng);
            assert_eq!((ids.len(), answers.len()), (12, 2));
            // The residues are those of the alphabet in order, so they show whether answers and
            // inputs fit together.
            let whole: Vec<u32> = {
                let asked = |i: usize| answers.iter().find(|a| a.0 == i).map(|a| a.1);
                (0..12).map(|i| asked(i).unwrap_or(ids[i])).collect()
            };
            assert!(whole.windows(2).all(|w| w[1] == w[0] + 1), "{whole:?}");
            masked += answers.iter().filter(|a| ids[a.0] == MASK).count();
        }
        // 320 of 400 are expected; four standard deviations are 32.
        assert!((288..=352).contains(&masked), "{masked}");
        assert_eq!(protein.train.len() + protein.held_out.len(), 8 + 7 + 6 + 5 + 4 + 3);

        std::fs::write(&file, "ACDE").unwrap();
        assert!(Protein::new(Some(&file), 12).err().unwrap().to_string().contains("no FASTA"));
        assert!(Protein::new(None, 12).err().unwrap().to_string().contains("protein sequences"));
    }
}

//! Weights in the safetensors format. The first byte says how they are read: as those of a
//! checkpoint; as such from a header, a line feed and data, with the digest put right that the file
//! holds of itself; or from such parts as those of a Hugging Face folder.

#![no_main]

use std::{fs, path::PathBuf, sync::LazyLock};

use anyhow::Result;
use libfuzzer_sys::fuzz_target;
use performer_fuzz::{choice, copy, fixture, open, safetensors, use_model, with_own_digest};
use performer_lm::model::pretrained::Pretrained;

static RUN: LazyLock<[Vec<u8>; 2]> =
    LazyLock::new(|| ["run/config.json", "run/tokenizer.json"].map(|name| fs::read(fixture(name)).expect("a file")));

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| copy("llama", "llama"));

fn checkpoint(weights: &[u8]) -> Result<Pretrained> {
    let [config, tokenizer] = &*RUN;
    Pretrained::from_bytes(config, tokenizer.clone(), weights)
}

fuzz_target!(|input: &[u8]| {
    let Some((how, weights)) = choice(input, 3) else { return };
    let opened = match how {
        0 => {
            let opened = checkpoint(weights);
            let is_told = memchr::memmem::find(weights, b"\"blake3\":\"").is_some();
            if opened.is_ok() && is_told && with_own_digest(weights.to_vec()) != weights {
                // The words may stand elsewhere in the header: only metadata is a digest.
                let told = has_digest(weights);
                assert!(!told, "weights were read that have another digest than the file holds");
            }
            opened
        }
        1 => checkpoint(&with_own_digest(safetensors(weights))),
        _ => {
            fs::write(FOLDER.join("model.safetensors"), safetensors(weights)).expect("the folder can be written to");
            open(&FOLDER)
        }
    };
    let _ = opened.and_then(|opened| use_model(&opened));
});

/// Whether the metadata of a file of weights have a digest.
fn has_digest(weights: &[u8]) -> bool {
    let Some((length, rest)) = weights.split_first_chunk::<8>() else { return false };
    let Some(header) = rest.get(..u64::from_le_bytes(*length) as usize) else { return false };
    let header: serde_json::Value = serde_json::from_slice(header).unwrap_or_default();
    header["__metadata__"]["blake3"].is_string()
}

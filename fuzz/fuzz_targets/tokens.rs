//! A file of cached tokens, whose two digests are put right, and the batches made of it.

#![no_main]

use std::sync::Arc;

use anyhow::Result;
use libfuzzer_sys::fuzz_target;
use performer_fuzz::put;
use performer_lm::data::{Batches, TokenFile, eval_windows};

/// The length of the header, and where the hashes of the tokens and of the header begin in it.
const HEADER: usize = 128;
const PAYLOAD: usize = 80;
const CHECK: usize = 112;

fn read(file: TokenFile) -> Result<()> {
    let tokens = file.read(0..file.len());
    assert_eq!(tokens.len(), file.len());
    assert_eq!(file.read(file.len() / 2..file.len()), tokens[tokens.len() / 2..]);
    file.digest();
    for batch in eval_windows(&file, 3, 2)? {
        assert!(batch.inputs.len() == batch.targets.len() && !batch.inputs.is_empty());
    }
    let batches = Batches::new(Arc::new(file), 3, 2, 1)?;
    batches.batch(0, 0)?;
    batches.batch(7, batches.batches_per_epoch() - 1)?;
    Ok(())
}

fuzz_target!(|input: &[u8]| {
    let mut file = input.to_vec();
    if file.len() >= HEADER {
        let payload = blake3::hash(&file[HEADER..]);
        file[PAYLOAD..CHECK].copy_from_slice(payload.as_bytes());
        let check = blake3::hash(&file[..CHECK]);
        file[CHECK..HEADER].copy_from_slice(&check.as_bytes()[..HEADER - CHECK]);
    }
    let _ = TokenFile::open(&put("tokens.bin", &file)).and_then(read);
});

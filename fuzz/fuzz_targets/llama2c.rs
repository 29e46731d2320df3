//! A llama2.c model and its tokenizer: the length of the model in four bytes, the model, the
//! tokenizer.

#![no_main]

use libfuzzer_sys::fuzz_target;
use performer_fuzz::{open, put, use_model};

fuzz_target!(|input: &[u8]| {
    let Some((length, files)) = input.split_first_chunk::<4>() else { return };
    let (model, tokenizer) = files.split_at(files.len().min(u32::from_le_bytes(*length) as usize));
    put("tokenizer.bin", tokenizer);
    let _ = open(&put("model.bin", model)).and_then(|opened| use_model(&opened));
});

//! A GGUF file: its settings, weights, and tokenizer.

#![no_main]

use libfuzzer_sys::fuzz_target;
use performer_fuzz::{open, put, use_model};

fuzz_target!(|file: &[u8]| {
    let _ = open(&put("model.gguf", file)).and_then(|opened| use_model(&opened));
});

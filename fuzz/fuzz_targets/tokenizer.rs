//! A `tokenizer.json`. The first byte says where the borders of documents come from: the file, a
//! model's configuration, or the tokens by which a published model ends its text.

#![no_main]

use libfuzzer_sys::fuzz_target;
use performer_fuzz::{choice, use_tokenizer};
use performer_lm::data::{Borders, Tokenizer};

fuzz_target!(|input: &[u8]| {
    let Some((how, json)) = choice(input, 3) else { return };
    let json = json.to_vec();
    let read = match how {
        0 => Tokenizer::from_bytes(json),
        1 => Tokenizer::with_borders(json, Some(Borders::between(0))),
        _ => Tokenizer::of_model(json, &[0, 2]),
    };
    let _ = read.and_then(|tokenizer| use_tokenizer(&tokenizer));
});

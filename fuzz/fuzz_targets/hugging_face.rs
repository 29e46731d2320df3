//! The JSON files of a Hugging Face folder, one at a time, beside the other files of a model: the
//! first byte says which.

#![no_main]

use std::{
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use libfuzzer_sys::fuzz_target;
use performer_fuzz::{choice, copy, open, use_model};

/// Folders, each with the file that is changed in it.
static FOLDERS: LazyLock<[(PathBuf, &str); 4]> = LazyLock::new(|| {
    [
        (copy("llama", "llama"), "config.json"),
        (copy("gpt2", "gpt2"), "config.json"),
        (copy("llama", "generation"), "generation_config.json"),
        (copy("parts", "parts"), "model.safetensors.index.json"),
    ]
});

fuzz_target!(|input: &[u8]| {
    let Some((which, file)) = choice(input, FOLDERS.len()) else { return };
    let (folder, name): &(PathBuf, &str) = &FOLDERS[which];
    let folder: &Path = folder;
    fs::write(folder.join(name), file).expect("the folder can be written to");
    let _ = open(folder).and_then(|opened| use_model(&opened));
});

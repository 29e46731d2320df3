//! Writes, into a folder, a compiled WebAssembly module of wasm-bindgen as a browser loads it: the
//! module and the JavaScript around it. It does what `wasm-bindgen --target web` does, and needs no
//! tool that has to be installed first.

use std::env::args;

use anyhow::{Context, Result, bail};
use wasm_bindgen_cli_support::Bindgen;

fn main() -> Result<()> {
    let [_, input, folder] = &args().collect::<Vec<_>>()[..] else {
        bail!("usage: wasm-glue MODULE.wasm FOLDER");
    };
    let mut bindgen = Bindgen::new();
    bindgen.input_path(input).web(true)?.typescript(false).remove_name_section(true).remove_producers_section(true);
    bindgen.generate(folder).with_context(|| format!("cannot write the JavaScript of {input} into {folder}"))
}

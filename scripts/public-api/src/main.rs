//! Lists the public items of a crate, one a line, from the JSON that rustdoc has written of it.

use std::{error::Error, process::ExitCode};

use public_api::Builder;

fn list(json: &str) -> Result<String, Box<dyn Error>> {
    // What a type gets from blanket implementations and auto traits is not written in the crate,
    // and changes with the compiler.
    let items = Builder::from_rustdoc_json(json).omit_blanket_impls(true).omit_auto_trait_impls(true).build()?;
    Ok(items.to_string())
}

fn main() -> ExitCode {
    let Some(json) = std::env::args().nth(1) else {
        eprintln!("give the JSON file that rustdoc wrote; scripts/public-api.sh does");
        return ExitCode::FAILURE;
    };
    match list(&json) {
        Ok(items) => {
            print!("{items}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("cannot list the items in {json}: {error}");
            ExitCode::FAILURE
        }
    }
}

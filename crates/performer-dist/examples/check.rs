//! Checks the calls between the processes that a launcher starts: `mpirun -n 4 check`, built with
//! the feature `mpi`. Each process ends with success, or says what is wrong.

// The tests of this crate run the same checks on threads.
#[allow(dead_code)]
#[path = "../tests/checks.rs"]
mod checks;

use std::{process::ExitCode, time::Duration};

fn main() -> ExitCode {
    let ranks = match performer_dist::start(Duration::from_secs(60)) {
        Ok(ranks) => ranks,
        Err(text) => {
            eprintln!("error: {text}");
            return ExitCode::FAILURE;
        }
    };
    checks::check(&ranks);
    if ranks.rank() == 0 {
        println!("{} ranks: all calls do what they promise", ranks.size());
    }
    ExitCode::SUCCESS
}

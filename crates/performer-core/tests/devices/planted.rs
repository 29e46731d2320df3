//! Errors that the emulated CUDA device is to catch, one of each kind: kernels that have them are
//! in `cuda_host/planted.cpp`.

use std::process::Command;

use crate::common::emulated::{compile, compile_for_races};

/// Runs a kernel, with threads in the one or the other order, or (2) with products that truncate.
/// Returns its results, or what it was ended with.
fn run(kind: &str, mode: u32) -> Option<Result<Vec<u32>, String>> {
    let program = compile("cuda", "planted", &[])?;
    let output = Command::new(program).args([kind, &mode.to_string()]).output().unwrap();
    Some(match output.status.success() {
        true => Ok(output.stdout.chunks_exact(4).map(|bytes| u32::from_ne_bytes(bytes.try_into().unwrap())).collect()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    })
}

#[test]
fn misaligned_accesses_and_divergence_end_the_program() {
    for (kind, message) in [
        ("misaligned", "misaligned address"),
        ("diverging", "the same in different places"),
        ("split_barrier", "different barriers"),
        ("not_begun", "before its registers are ready"),
        ("not_all", "different products"),
    ] {
        for order in [0, 1] {
            let Some(result) = run(kind, order) else { return };
            let error = result.expect_err(kind);
            assert!(error.contains(message), "{kind}: {error}");
        }
    }
}

#[test]
fn missing_barriers_and_waits_show_as_two_results() {
    for kind in ["racing", "too_early", "not_waited"] {
        let (Some(one), Some(other)) = (run(kind, 0), run(kind, 1)) else { return };
        assert!(one.expect(kind) != other.expect(kind), "{kind}");
    }
}

#[test]
fn products_of_warpgroups_are_those_of_their_numbers() {
    for order in [0, 1] {
        let Some(result) = run("products", order) else { return };
        assert!(result.expect("products").iter().all(|&bits| f32::from_bits(bits) == 16.0));
    }
}

#[test]
fn races_are_reported_whether_they_show_or_not() {
    for (kind, races) in [("racing", true), ("within_a_warp", true), ("ordered", false)] {
        let Some(program) = compile_for_races("cuda", "planted", &[]) else { return };
        let output = Command::new(program).args([kind, "0"]).output().unwrap();
        let report = String::from_utf8_lossy(&output.stderr);
        assert_eq!(report.contains("ThreadSanitizer: data race"), races, "{kind}: {report}");
        assert_eq!(output.status.success(), !races, "{kind}: {report}");
    }
}

#[test]
fn a_long_sum_in_an_accumulator_shrinks_where_products_truncate() {
    let (Some(plain), Some(truncated)) = (run("long_sum", 0), run("long_sum", 2)) else { return };
    let [plain, truncated] = [plain, truncated].map(|result| f32::from_bits(result.expect("long_sum")[0]));
    assert!((plain - 1.0).abs() < 1e-5 && truncated < 1.0 - 1e-4, "{plain} and {truncated}");
}

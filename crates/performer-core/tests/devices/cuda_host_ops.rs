//! These tests run the CUDA kernels of the operations around attention, compiled for the CPU with
//! `cuda_host/device.h` in place of the hardware. The program `cuda_host/ops.cpp` compares them
//! with the formulas in f64.

use std::{path::Path, process::Command};

#[test]
fn kernels_around_attention_match_their_formulas() {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    if Command::new(&compiler).arg("--version").output().is_err() {
        eprintln!("skipped: there is no C++ compiler, with which the CUDA kernels are run on the CPU");
        return;
    }
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (storage, center) in [(0, 0), (0, 1), (1, 0), (2, 1)] {
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cuda_host_ops_{storage}_{center}"));
        let compiled = Command::new(&compiler)
            .args([
                "-std=c++17",
                "-O2",
                "-fno-strict-aliasing",
                "-fsanitize=alignment",
                "-fno-sanitize-recover=alignment",
            ])
            .arg("-o")
            .arg(&program)
            .arg(format!("-DSTORAGE={storage}"))
            .arg(format!("-DCENTER={center}"))
            .arg("-I")
            .arg(here.join("src/kernels/cuda"))
            .arg("-I")
            .arg(here.join("../performer-lm/src/train"))
            .arg(here.join("tests/cuda_host/ops.cpp"))
            .output()
            .unwrap();
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        let ran = Command::new(&program).output().unwrap();
        let text = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success(), "STORAGE {storage}, CENTER {center}: {}\n{text}", ran.status);
    }
}

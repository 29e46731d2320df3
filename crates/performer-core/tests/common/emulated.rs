//! This module runs GPU kernels on the CPU: they are compiled by the C++ compiler with a stand-in
//! for the hardware.

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, Mutex, OnceLock},
};

use candle_core::DType;
use half::{bf16, f16};

/// Options of the compiler. With `-O1` compiling takes nearly twice as long, and with `-O2` nearly
/// four times, which is more than these small problems gain.
const OPTIONS: [&str; 6] =
    ["-std=c++17", "-Og", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-Wno-attributes", "-o"];
/// With these, accesses of 16 bytes that are not aligned end the program.
const ALIGNMENT: [&str; 2] = ["-fsanitize=alignment", "-fno-sanitize-recover=alignment"];
/// With these, races end the program; see `cuda_host/races.h`.
const RACES: [&str; 2] = ["-fsanitize=thread", "-DRACES=1"];

/// Returns the C++ compiler, if there is one.
fn compiler() -> Option<&'static str> {
    static COMPILER: OnceLock<Option<String>> = OnceLock::new();
    let found = COMPILER.get_or_init(|| {
        let named = std::env::var("CXX").ok();
        let candidates = named.into_iter().chain(["c++", "g++", "clang++"].map(String::from));
        let works =
            |c: &String| Command::new(c).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
        let found = candidates.into_iter().find(works);
        if found.is_none() {
            eprintln!("skipped: there is no C++ compiler, with which kernels for GPUs are run on the CPU");
        }
        found
    });
    found.as_deref()
}

/// Compiles `source` of `KIND_host/` with the kernels of `KIND` and macros, once for each set of
/// macros.
pub(crate) fn compile(kind: &str, source: &str, macros: &[(&str, usize)]) -> Option<PathBuf> {
    compile_with(&ALIGNMENT, kind, source, macros)
}

/// Compiles a program as [`compile`] does, for the race mode. Returns nothing where the compiler
/// has no ThreadSanitizer, or this machine runs none.
pub(crate) fn compile_for_races(kind: &str, source: &str, macros: &[(&str, usize)]) -> Option<PathBuf> {
    static WORKS: OnceLock<bool> = OnceLock::new();
    let works = || {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let (source, program) = (folder.join("thread_sanitizer.cpp"), folder.join("thread_sanitizer"));
        fs::write(&source, "int main() {}").ok()?;
        let mut compiler = Command::new(compiler()?);
        let compiled = compiler.arg("-fsanitize=thread").arg(&source).arg("-o").arg(&program).stderr(Stdio::null());
        let runs = compiled.status().ok()?.success() && Command::new(&program).status().ok()?.success();
        runs.then_some(())
    };
    if !*WORKS.get_or_init(|| works().is_some()) {
        eprintln!("skipped: the C++ compiler's ThreadSanitizer, by which races are found, does not run here");
        return None;
    }
    compile_with(&RACES, kind, source, macros)
}

fn compile_with(more: &[&str], kind: &str, source: &str, macros: &[(&str, usize)]) -> Option<PathBuf> {
    static PROGRAMS: Mutex<BTreeMap<String, Arc<OnceLock<PathBuf>>>> = Mutex::new(BTreeMap::new());
    let compiler = compiler()?;
    let options: Vec<String> = macros.iter().map(|(name, value)| format!("-D{name}={value}")).collect();
    let mode = if more == RACES { "-races" } else { "" };
    let name = format!("{kind}-{source}{mode}{}", options.concat());
    let program = Arc::clone(PROGRAMS.lock().unwrap().entry(name.clone()).or_default());
    let build = || {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated");
        fs::create_dir_all(&folder).unwrap();
        let program = folder.join(&name);
        let output = Command::new(compiler)
            .args(more)
            .args(OPTIONS)
            .arg(&program)
            .arg("-I")
            .arg(here.join("src/kernels").join(kind))
            .args(&options)
            .arg(here.join(format!("tests/{kind}_host/{source}.cpp")))
            .output()
            .unwrap();
        assert!(output.status.success(), "{name}:\n{}", String::from_utf8_lossy(&output.stderr));
        program
    };
    Some(program.get_or_init(build).clone())
}

/// Runs a program on numbers and returns the numbers that it writes.
pub(crate) fn execute(program: &Path, header: &[usize], numbers: &[&[f64]], mask: Option<&[bool]>) -> Vec<f64> {
    let mut input: Vec<u8> = header.iter().flat_map(|&n| (n as i32).to_ne_bytes()).collect();
    input.extend(numbers.iter().copied().flatten().flat_map(|&x| (x as f32).to_ne_bytes()));
    input.extend(mask.unwrap_or_default().iter().map(|&seen| u8::from(seen)));
    let mut child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&input).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{} ended with {}", program.display(), output.status);
    output.stdout.chunks_exact(4).map(|b| f64::from(f32::from_ne_bytes(b.try_into().unwrap()))).collect()
}

/// Returns the value of the macro `STORAGE` of the kernels for a type.
pub(crate) fn storage(dtype: DType) -> usize {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
        other => panic!("no kernels for {other:?}"),
    }
}

/// Rounds numbers to those that a type holds.
pub(crate) fn round(dtype: DType, values: &mut [f64]) {
    for x in values {
        *x = match dtype {
            DType::F16 => f16::from_f64(*x).to_f64(),
            DType::BF16 => bf16::from_f64(*x).to_f64(),
            _ => f64::from(*x as f32),
        };
    }
}

//! This build script tells the program which revision it is built from, for the metadata of the
//! models it trains.
//!
//! It sets `PERFORMER_GIT_REVISION` for the compiler unless the environment already does (a
//! packager's build from a tarball) or these sources are not in a git repository of their own.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=PERFORMER_GIT_REVISION");
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("PERFORMER_GIT_REVISION").is_some() {
        return;
    }
    // A copy of the package unpacked inside somebody's unrelated repository is not tracked there.
    if git(&["ls-files", "--error-unmatch", "Cargo.toml"]).is_none() {
        return;
    }
    // Each commit, checkout and reset appends to this log; the sources decide whether the revision
    // is "dirty".
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    let sources = ["src", "assets", "models", "Cargo.toml"];
    let depended_on = ["../performer-core", "../performer-dist"].map(|crate_| [crate_, "/src"].concat());
    let manifests =
        ["../performer-core/Cargo.toml", "../performer-dist/Cargo.toml", "../../Cargo.toml", "../../Cargo.lock"];
    for path in sources.into_iter().chain(depended_on.iter().map(String::as_str)).chain(manifests) {
        println!("cargo::rerun-if-changed={path}");
    }
    if let Some(revision) = git(&["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]) {
        println!("cargo::rustc-env=PERFORMER_GIT_REVISION={revision}");
    }
}

/// Returns the output of a git command, or `None` if it fails or there is no git.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

#!/usr/bin/env bash
# Compares the public interface of performer-core with the one that is committed,
# crates/performer-core/public-api.txt, so that nothing of it changes unnoticed. A line that goes
# breaks programs of others; a line that comes does not. `scripts/public-api.sh --write` takes the
# interface as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v cargo >/dev/null || PATH="${CARGO_HOME:-${HOME:-}/.cargo}/bin:$PATH"

target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target"
target=$(cd "$target" && pwd)
committed=crates/performer-core/public-api.txt
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# The JSON of rustdoc has another format in every few versions, so one version writes it: the lowest
# that the workspace takes.
version=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
cargo=(cargo)
if ! rustc --version | grep -qF "rustc $version."; then
    if ! command -v rustup >/dev/null; then
        echo "the public interface is listed with Rust $version, which comes by rustup: https://rustup.rs" >&2
        exit 1
    fi
    rustup toolchain list | grep -q "^$version\.0-" || rustup toolchain install "$version.0" --profile minimal
    cargo=(rustup run "$version.0" cargo)
fi

# The option is not stable. Rustdoc alone is told to take it: dependencies that look for the
# variable would be built anew.
cat >"$scratch/rustdoc" <<'RUSTDOC'
#!/bin/sh
case " $* " in *' --crate-name performer_core '*) ;; *) exit 0 ;; esac
RUSTC_BOOTSTRAP=1 exec rustdoc "$@"
RUSTDOC
chmod +x "$scratch/rustdoc"
json=$target/doc/performer_core.json
flags='-Z unstable-options --output-format json'
# Cargo does not know of this file, and must be given other flags to write it again.
[ -f "$json" ] || flags+=" --cfg written_$$"
# The whole workspace and an example, since dependencies then have the features with which they are
# built already.
RUSTDOC="$scratch/rustdoc" RUSTDOCFLAGS=$flags "${cargo[@]}" doc --quiet --workspace --no-deps --locked \
    --lib --example library

CARGO_TARGET_DIR=$target/public-api cargo run --quiet --locked --manifest-path scripts/public-api/Cargo.toml -- "$json" >"$scratch/now.txt"
if [ "${1:-}" = --write ]; then
    cp "$scratch/now.txt" "$committed"
    echo "$committed: $(wc -l <"$committed") items"
elif ! diff -u --label committed --label now "$committed" "$scratch/now.txt"; then
    echo 'the public interface of performer-core is not what is committed (- gone, + new); if that is on purpose, say so in CHANGELOG.md and' >&2
    echo 'run scripts/public-api.sh --write' >&2
    exit 1
fi

#!/usr/bin/env bash
# Checks performer-core as those who depend on it get it: the package that would be published,
# unpacked. It must compile with the lowest compiler and the lowest versions of its dependencies
# that its manifest admits, and an application (crates/downstream) must compile and pass its tests
# with the newest ones; for wasm32, where a browser's application goes, it is checked, which finds
# all but what linking would (just page-check links a program).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v cargo >/dev/null || PATH="${CARGO_HOME:-${HOME:-}/.cargo}/bin:$PATH"

target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target"
target=$(cd "$target" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

cargo package --quiet -p performer-core --no-verify --locked --allow-dirty
version=$(cargo pkgid -p performer-core | sed 's/.*[#@]//')
tar xzf "$target/package/performer-core-$version.crate" -C "$scratch"
cp -r crates/downstream "$scratch/downstream"

# One target folder for all of these, apart from the workspace's: other versions, other features.
export CARGO_TARGET_DIR=$target/downstream

if ! command -v rustup >/dev/null; then
    echo 'there is no rustup, by which the lowest compiler and the standard library for wasm32 come: https://rustup.rs' >&2
    exit 1
fi
lowest=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' crates/performer-core/Cargo.toml)
rustup toolchain list | grep -q "^$lowest-" || rustup toolchain install "$lowest" --profile minimal

echo "the lowest versions of performer-core's dependencies, with Rust $lowest:"
(
    cd "$scratch/performer-core-$version"
    rm Cargo.lock
    # The option that chooses lowest versions is not stable yet; nothing else here needs a newer
    # compiler.
    RUSTC_BOOTSTRAP=1 cargo generate-lockfile --quiet -Z direct-minimal-versions
    cargo tree --depth 1 --edges normal --prefix none
    cargo +"$lowest" check --quiet --lib
)

echo 'an application, with the newest versions:'
manifest=$scratch/downstream/Cargo.toml
rm -f "$scratch/performer-core-$version/Cargo.lock" "$scratch/downstream/Cargo.lock"
sed -i.before "s#path = \"../performer-core\"#path = \"../performer-core-$version\"#" "$manifest"
cargo test --manifest-path "$manifest"

echo 'the same application for wasm32:'
wasm=wasm32-unknown-unknown
rustup target list --installed | grep -qx "$wasm" || rustup target add "$wasm"
cargo check --quiet --manifest-path "$manifest" --lib --target "$wasm"

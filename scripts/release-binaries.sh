#!/usr/bin/env bash
# Builds the program for others to download: one archive a target in a folder, each with the
# program, the licences, the notices of what is compiled into it and the README, and beside them
# SHA256SUMS of the archives of this run.
#
#   scripts/release-binaries.sh FOLDER [TARGET...]
#
# Targets are Rust's names; without one, the machine's own. What each needs besides `rustup` and
# Python 3.11:
#
#   x86_64-unknown-linux-musl     musl-tools; runs on every Linux, whatever its C library
#   x86_64-unknown-linux-gnu      a C compiler; runs where the C library is as new as here
#   x86_64-pc-windows-gnu         mingw-w64
#   aarch64-apple-darwin,         a Mac, where both build, with the feature `metal`
#   x86_64-apple-darwin
#
# The revision is part of the program, so this refuses a tree with changes that are not committed.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v cargo >/dev/null || PATH="${CARGO_HOME:-${HOME:-}/.cargo}/bin:$PATH"

if [ $# -lt 1 ]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
case $1 in /*) folder=$1 ;; *) folder=$here/$1 ;; esac
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
shift
# Files that git does not know, such as the archives of an earlier run, are not of the program.
if [ -n "$(git status --porcelain --untracked-files=no)" ]; then
    echo 'the tree has changes that are not committed; commit them, for the program names its revision' >&2
    exit 1
fi
version=$(cargo pkgid --locked -p performer-lm | sed 's/.*[#@]//')
[ $# -gt 0 ] || set -- "$(rustc -vV | sed -n 's/^host: //p')"

# requires COMMAND PACKAGE: a command that a target cannot be built without.
requires() {
    if ! command -v "$1" >/dev/null; then
        echo "$target needs $1: install $2, or what your system calls it" >&2
        exit 1
    fi
}

archives=()
for target in "$@"; do
    requires python3 python3
    features=()
    program=performer-lm
    case $target in
        *-linux-musl) requires musl-gcc musl-tools ;;
        *-windows-gnu)
            requires x86_64-w64-mingw32-gcc mingw-w64
            program=performer-lm.exe
            ;;
        *-apple-darwin)
            if [ "$(uname)" != Darwin ]; then
                echo "$target needs a Mac: Apple's libraries come with its own tools alone" >&2
                exit 1
            fi
            features=(--features metal)
            ;;
    esac
    rustup target list --installed | grep -qx "$target" || rustup target add "$target"
    echo "building for $target: some ten minutes on two cores" >&2
    cargo build --release --locked -p performer-lm --target "$target" "${features[@]}"
    name=performer-lm-$version-$target
    rm -rf "${folder:?}/$name"
    mkdir "$folder/$name"
    cp "${CARGO_TARGET_DIR:-target}/$target/release/$program" "$folder/$name/"
    cp README.md CHANGELOG.md LICENSE-* THIRD-PARTY.md "$folder/$name/"
    scripts/notices.py performer-lm "$target" "$folder/$name/NOTICES.txt" "${features[@]}"
    # What has its final name is whole.
    tar -C "$folder" -czf "$folder/$name.tar.gz.new" "$name"
    mv "$folder/$name.tar.gz.new" "$folder/$name.tar.gz"
    rm -r "${folder:?}/$name"
    archives+=("$name.tar.gz")
done
cd "$folder"
if command -v sha256sum >/dev/null; then
    sha256sum "${archives[@]}" >SHA256SUMS.new
else
    shasum -a 256 "${archives[@]}" >SHA256SUMS.new
fi
mv SHA256SUMS.new SHA256SUMS
ls -l

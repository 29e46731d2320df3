#!/usr/bin/env bash
# Builds the program for Windows and runs it under Wine: it must write the same greedy text as the
# program that is given, train a model, evaluate it, and refuse to replace it.
#
#   scripts/windows-check.sh PROGRAM
#
# PROGRAM is the native performer-lm. Needs rustup, mingw-w64 and Wine for 64 bits (Debian:
# apt-get install mingw-w64 wine64). Takes some ten minutes on two cores, most of them to build.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v cargo >/dev/null || PATH="${CARGO_HOME:-${HOME:-}/.cargo}/bin:$PATH"

if [ $# -ne 1 ]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
case $1 in /*) native=$1 ;; *) native=$here/$1 ;; esac
[ -x "$native" ] || { echo "$native is no program that can be run" >&2; exit 1; }
wine=$(command -v wine64 || command -v wine || true)
[ -n "$wine" ] || wine=/usr/lib/wine/wine64
for command in x86_64-w64-mingw32-gcc "$wine"; do
    if ! command -v "$command" >/dev/null; then
        echo "$command is missing: install mingw-w64 and wine64, or what your system calls them" >&2
        exit 1
    fi
done

target=x86_64-pc-windows-gnu
rustup target list --installed | grep -qx "$target" || rustup target add "$target"
cargo build --release --locked -p performer-lm --target "$target"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export WINEPREFIX=$folder/wine WINEDEBUG=-all
cp "${CARGO_TARGET_DIR:-target}/$target/release/performer-lm.exe" "$folder"
cp -r models/stories/performer "$folder/model"
cd "$folder"
# Wine before version 9 lacks the library from which Rust has random numbers.
cat >random.c <<'C'
#include <windows.h>
BOOLEAN NTAPI SystemFunction036(PVOID, ULONG);
__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE to, SIZE_T bytes) { return SystemFunction036(to, (ULONG)bytes); }
C
x86_64-w64-mingw32-gcc -shared -o bcryptprimitives.dll random.c -ladvapi32

windows() {
    "$wine" ./performer-lm.exe "$@"
}

greedy=(generate model --prompt "Once upon a time" --temperature 0 --max-tokens 100)
windows "${greedy[@]}" | tr -d '\r' >theirs.txt
"$native" "${greedy[@]}" >ours.txt
cmp theirs.txt ours.txt
[ -s ours.txt ] || { echo 'the native program wrote no text' >&2; exit 1; }
echo "the greedy text of $(wc -w <ours.txt) words is that of the native program"

windows train --attention favor --max-steps 6 --save-every 3 --out run >train.txt 2>&1 || { cat train.txt >&2; exit 1; }
windows eval run --data sample --max-tokens 20000
if windows train --attention favor --max-steps 6 --out run 2>refusal.txt; then
    echo 'a second training replaced the model of the first' >&2
    exit 1
fi
grep -q 'holds a model already' refusal.txt || { cat refusal.txt >&2; exit 1; }
echo 'it trains, evaluates, and does not replace a model'

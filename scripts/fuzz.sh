#!/usr/bin/env bash
# Fuzzes one target, or all of them one after the other, for so many seconds each, on one core.
# Prints for each how many inputs were tried, how much of the code they reached, and what the
# outcome was; exits with 1 if anything was found. The targets: fuzz/README.md.
#
#   scripts/fuzz.sh gguf 600
#   scripts/fuzz.sh all 300
#
# Needs a nightly toolchain, for AddressSanitizer, and a C++ compiler, for libFuzzer. What the
# fuzzer said is in fuzz/artifacts/TARGET.log, and what broke something in fuzz/artifacts/TARGET.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ $# -ne 2 ]; then
    echo 'usage: scripts/fuzz.sh TARGET|all SECONDS' >&2
    exit 2
fi
targets=("$1")
if [ "$1" = all ]; then
    targets=()
    for file in fuzz/fuzz_targets/*.rs; do
        targets+=("$(basename "$file" .rs)")
    done
fi
for target in "${targets[@]}"; do
    [ -f "fuzz/fuzz_targets/$target.rs" ] || { echo "there is no target $target in fuzz/fuzz_targets" >&2; exit 1; }
done
seconds=$2
# libFuzzer takes 0, and what is no number, as no limit.
case $seconds in '' | 0* | *[!0-9]*) echo "SECONDS is '$seconds'; it must be a whole number above 0" >&2; exit 2 ;; esac

# The files of performer-lm's tests, and the versions that the program is built with.
cargo test -p performer-lm --test suite seeds:: -- --ignored >&2
cp Cargo.lock fuzz/Cargo.lock

# What cargo-fuzz asks of the compiler: counters of every edge, comparisons told to the fuzzer,
# AddressSanitizer, and the assertions of development builds.
host=$(rustc -vV | sed -n 's/^host: //p')
folder=${CARGO_TARGET_DIR:-$PWD/target}/fuzz
sanitizer='-Zsanitizer=address -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4'
sanitizer+=' -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table'
sanitizer+=' -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Cdebug-assertions'
RUSTFLAGS=$sanitizer cargo +nightly build --release --manifest-path fuzz/Cargo.toml --target "$host" \
    --target-dir "$folder" "${targets[@]/#/--bin=}" >&2

scratch=$(mktemp -d -p /dev/shm performer-fuzz-XXXXXX 2>/dev/null || mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# Where memory cannot be had, the limits below speak, and not the allocator.
export TMPDIR=$scratch RAYON_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1

found=0
printf '%-14s %12s %12s %10s  %s\n' target inputs edges features outcome
for target in "${targets[@]}"; do
    mkdir -p "fuzz/corpus/$target" "fuzz/artifacts/$target"
    log=fuzz/artifacts/$target.log
    outcome='nothing found'
    longest=65536
    case $target in names) longest=256 ;; text | config | hugging_face) longest=8192 ;; esac
    if ! "$folder/$host/release/$target" "fuzz/corpus/$target" "fuzz/seeds/$target" \
        -artifact_prefix="fuzz/artifacts/$target/" -max_total_time="$seconds" -max_len="$longest" -timeout=10 \
        -rss_limit_mb=2048 -malloc_limit_mb=64 -print_final_stats=1 >"$log" 2>&1; then
        outcome="FOUND: see $log"
        found=1
    fi
    inputs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -1)
    last=$(grep -E '^#[0-9]+.* cov: ' "$log" | tail -1 || true)
    edges=$(sed -n 's/.* cov: \([0-9]*\).*/\1/p' <<<"$last")
    features=$(sed -n 's/.* ft: \([0-9]*\).*/\1/p' <<<"$last")
    printf '%-14s %12s %12s %10s  %s\n' "$target" "${inputs:-?}" "${edges:-?}" "${features:-?}" "$outcome"
done
exit "$found"

#!/usr/bin/env bash
# Compiles the CUDA kernels that the program uses into a folder, on a machine without a card. Put
# beside a program of the same sources as `kernels`, the folder spares it NVRTC:
#
#     scripts/cuda-kernels.sh FOLDER [ARCHITECTURE...]         (default: 80 89 90 100 120)
#
# Which kernels these are, the program itself says: it goes through all of gpu-check and through
# training steps of the presets on an emulated card whose kernels do nothing, and what it asks for is
# compiled for the architectures given. NVRTC comes with a toolkit (CUDA_HOME, or
# scripts/cuda-toolkit.sh). It takes 15 minutes on two cores, and little when it was done before.
#
# For a rehearsal: NVRTC=emulated compiles for the emulated card instead, EXTENT=quick leaves out
# what only the longer checks use, and PRESETS names the presets.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ $# -lt 1 ]; then
    echo "usage: $0 FOLDER [ARCHITECTURE...]" >&2
    exit 2
fi
case $1 in /*) folder=$1 ;; *) folder=$here/$1 ;; esac
shift
[ $# -gt 0 ] || set -- 80 89 90 100 120
for arch in "$@"; do
    case $arch in
        '' | *[!0-9]*)
            echo "an architecture is $arch; it must be a number, such as 90 for a card of sm_90" >&2
            exit 2
            ;;
    esac
done
presets=${PRESETS-seed small stories15m code}
cores=$(nproc 2>/dev/null || echo 2)
shares=$((cores < 4 ? cores : 4))
extent=()
[ "${EXTENT:-full}" = full ] || extent=(--quick)

toolkit=$(scripts/cuda-emulate.sh --build-only)
libraries=$toolkit/lib64
# What is compiled once is kept, apart from the user's own kernels.
kept=$toolkit/compiled
if [ "${NVRTC:-}" != emulated ]; then
    if [ -z "${CUDA_HOME:-}" ]; then
        settings=$(scripts/cuda-toolkit.sh "${CUDA_TOOLKIT:-${XDG_CACHE_HOME:-$HOME/.cache}/performer/cuda}")
        eval "$settings"
    fi
    libraries=$toolkit/nvrtc:$libraries
    mkdir -p "$toolkit/nvrtc"
    ln -sf "$CUDA_HOME"/lib64/libnvrtc* "$toolkit/nvrtc/"
else
    kept=
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$folder"
echo 'compiling the kernels takes 15 minutes on two cores, and little where they were compiled before' >&2

# on CARD ARCHITECTURES COMMAND...: the program on an emulated card, with its kernels collected.
on() {
    local card=$1 archs=$2
    shift 2
    EMULATED_SKIP=1 EMULATED_CARD=$card EMULATED_CACHE=${EMULATED_CACHE:-$toolkit/images} LD_LIBRARY_PATH=$libraries \
        PERFORMER_KERNELS=$kept PERFORMER_KERNELS_COLLECT=$archs:$folder PERFORMER_CACHE=$scratch/cache \
        "$toolkit/performer-lm" "$@" --device cuda 2>>"$scratch/said.txt" >/dev/null
}

# Kernels are made for two sizes of shared memory: that of data centres' cards, and the others'.
# Hopper is asked for kernels with products of warpgroups, which no other card has.
large=() hopper=() small=()
for arch in "$@"; do
    case $arch in
        8[69] | 12?) small+=("$arch") ;;
        9?) hopper+=("$arch") ;;
        *) large+=("$arch") ;;
    esac
done
for group in "${large[*]}" "${hopper[*]}" "${small[*]}"; do
    [ -n "$group" ] || continue
    card=${group%% *} archs=${group// /,}
    warpgroups=1
    [[ $card != 9? ]] || warpgroups='1 0'
    # NVRTC compiles for one thread of a process at a time, so several processes divide the work.
    # What does nothing computes nothing right.
    for ((share = 1; share <= shares; share++)); do
        on "$card" "$archs" gpu-check "${extent[@]}" --share "$share/$shares" --out "$scratch/check-$share.json" || true &
    done
    wait
    for ((share = 1; share <= shares; share++)); do
        check=$scratch/check-$share.json
        if [ ! -s "$check" ] || grep -hE 'NVRTC|does not compile|cannot be written|"lost":' "${check}l" >&2; then
            tail -n 5 "$scratch/said.txt" >&2
            echo "the kernels for $group could not all be compiled" >&2
            exit 1
        fi
        rm -f "$check" "${check}l"
    done
    for preset in $presets; do
        for dtype in bf16 f32; do
            for attention in softmax favor:m=128 favor:m=64 favor:gate,conv,output-gate,output-norm softmax:window=75,gate,conv; do
                # Products of warpgroups can be switched off, and what stands in for them is shipped too.
                for products in $warpgroups; do
                    PERFORMER_WGMMA=$products on "$card" "$archs" train --data sample --preset "$preset" --dtype "$dtype" \
                        --attention "$attention" --max-steps 1 --batch-size 2 --max-train-tokens 20000 --out "$scratch/run" --overwrite || {
                        tail -n 5 "$scratch/said.txt" >&2
                        echo "training $preset with $attention in $dtype failed on the emulated card" >&2
                        exit 1
                    }
                done
            done
        done
    done
done
echo "$folder: $(find "$folder" -type f | wc -l) kernels for$(printf " sm_%s" "$@"), $(($(du -sb "$folder" | cut -f1) >> 10)) KiB" >&2

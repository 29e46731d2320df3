#!/usr/bin/env bash
# Checks the CUDA code on a machine with neither GPU nor toolkit: lints the Rust of it, with a
# stand-in for nvcc that compiles nothing, then compiles every kernel for Ampere and Hopper with
# NVRTC (from its Python package, 100 MB, kept in $PERFORMER_NVRTC or ~/.cache/performer/nvrtc) and
# reports registers, shared memory and spills.
#
#   scripts/cuda-check.sh [ARCHITECTURE...]      [default: sm_80 sm_90a]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v cargo >/dev/null || PATH="${CARGO_HOME:-${HOME:-}/.cargo}/bin:$PATH"

[ $# -gt 0 ] || set -- sm_80 sm_90a

nvrtc=${PERFORMER_NVRTC:-${XDG_CACHE_HOME:-$HOME/.cache}/performer/nvrtc}
package=$(grep '^nvidia-cuda-nvrtc==' scripts/cuda-toolkit.txt)
if ! python3 -m pip --version >/dev/null 2>&1; then
    echo 'there is no pip, by which NVRTC comes: install python3 and its pip' >&2
    exit 1
fi
if [ "$(cat "$nvrtc/installed.txt" 2>/dev/null)" != "$package" ]; then
    if [ -n "$(ls -A "$nvrtc" 2>/dev/null)" ] && ! [ -f "$nvrtc/installed.txt" ]; then
        echo "$nvrtc holds files that are not of this script, and would be lost: name another folder by PERFORMER_NVRTC" >&2
        exit 1
    fi
    mkdir -p "$nvrtc"
    # What an installation leaves that is broken off is of this script too.
    touch "$nvrtc/installed.txt"
    find "$nvrtc" -mindepth 1 -maxdepth 1 -not -name installed.txt -exec rm -rf {} +
    PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --no-deps --no-compile --disable-pip-version-check \
        --target "$nvrtc" "$package"
    echo "$package" >"$nvrtc/installed.txt"
fi
LD_LIBRARY_PATH=$nvrtc/nvidia/cu13/lib python3 scripts/nvrtc_check.py "$@"

# Build scripts look for nvcc in a toolkit's bin, and run again when its path changes.
toolkit=${CARGO_TARGET_DIR:-target}/nvcc-stand-in
mkdir -p "$toolkit/bin"
toolkit=$(cd "$toolkit" && pwd)
cp scripts/nvcc-stand-in "$toolkit/bin/nvcc"
# With all of the workspace, as elsewhere in CI: dependencies then have the same features, and are
# not compiled again.
features=performer-core/cuda,performer-lm/cuda
# Several cards need an MPI library to be compiled for, but no NCCL.
if command -v mpicc >/dev/null; then
    features+=,performer-lm/nccl
fi
CUDA_HOME=$toolkit NVCC=$toolkit/bin/nvcc PATH=$toolkit/bin:$PATH CUDA_COMPUTE_CAP=80 \
    cargo clippy --locked --workspace --all-targets --features "$features" -- -D warnings

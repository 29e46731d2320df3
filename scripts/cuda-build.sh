#!/usr/bin/env bash
# Builds the release binary with CUDA into a folder to copy to any Linux machine with an NVIDIA
# driver, 580 or newer, and a C library at least as new as this machine's; neither toolkit nor Rust
# nor network is needed there:
#
#     scripts/cuda-build.sh [--without-libraries] [FOLDER]         (default: target/performer-cuda)
#     FOLDER/performer-lm gpu-check
#
# A toolkit is assembled in $CUDA_TOOLKIT (default: ~/.cache/performer/cuda) unless CUDA_HOME names
# one. The first build takes 10 to 18 minutes on two cores. CUDA's libraries are 850 MB;
# --without-libraries leaves them out, for machines that have CUDA 13's own. The binary is linked to
# libcuda, as Candle is: without a driver it does not start at all, so it is no replacement for the
# ordinary one.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

libraries=1
if [ "${1:-}" = --without-libraries ]; then
    libraries=0
    shift
fi
folder=${1:-target/performer-cuda}
[ $# -eq 0 ] || case $folder in /*) ;; *) folder=$here/$folder ;; esac

command -v cargo >/dev/null || PATH="${CARGO_HOME:-${HOME:-}/.cargo}/bin:$PATH"
if [ -z "${CUDA_HOME:-}" ]; then
    settings=$(scripts/cuda-toolkit.sh "${CUDA_TOOLKIT:-${XDG_CACHE_HOME:-$HOME/.cache}/performer/cuda}")
    eval "$settings"
fi

# A folder of its own: other builds stay as they are. The old kind of run path also holds for what
# the libraries load.
target=${CARGO_TARGET_DIR:-target}/cuda
[ -d "$target" ] || echo 'the first build takes 10 to 18 minutes on two cores' >&2
cargo rustc --release --locked -p performer-lm --bin performer-lm --features cuda --target-dir "$target" -- \
    -C strip=symbols -C link-arg='-Wl,--disable-new-dtags,-rpath,$ORIGIN'

mkdir -p "$folder"
cp "$target/release/performer-lm" "$folder/"
if [ "$libraries" = 1 ]; then
    cp -L "$CUDA_HOME"/lib64/lib{cublas,cublasLt,cudart,nvrtc}.so.13 "$CUDA_HOME"/lib64/libcurand.so.10 \
        "$CUDA_HOME"/lib64/libnvrtc-builtins.so.13.* "$folder/"
    missing=$(ldd "$folder/performer-lm" | grep 'not found' | grep -v 'libcuda\.so' || true)
    if [ -n "$missing" ]; then
        printf 'the folder lacks\n%s\n' "$missing" >&2
        exit 1
    fi
fi
du -sh "$folder"

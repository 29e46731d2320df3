#!/usr/bin/env bash
# Runs the program with CUDA on a Linux machine with neither card nor toolkit, but with a C++
# compiler:
#
#     scripts/cuda-emulate.sh gpu-check --device cuda --quick --only-checks
#     scripts/cuda-emulate.sh train --device cuda --data sample --preset seed --max-steps 2 --out run
#     scripts/cuda-emulate.sh --build-only         builds the program, and prints the folder it is in
#
# Libraries of our own take the place of CUDA's (crates/performer-core/tests/cuda_driver) and run
# kernels on the CPU, as the tests of kernels do. So everything around the kernels runs as well:
# which are chosen, their arguments, their grids and shared memory, the buffers. It shows that
# results are right; nothing about speed. The first run builds the program. The libraries lie in
# lib64 of the folder that --build-only prints.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v cargo >/dev/null || PATH="${CARGO_HOME:-${HOME:-}/.cargo}/bin:$PATH"

# The same toolkit as that of cuda-check.sh: what one builds, the other need not.
target=${CARGO_TARGET_DIR:-target}
toolkit=$target/nvcc-stand-in
mkdir -p "$toolkit/bin" "$toolkit/lib64"
toolkit=$(cd "$toolkit" && pwd)
cmp -s scripts/nvcc-stand-in "$toolkit/bin/nvcc" || cp scripts/nvcc-stand-in "$toolkit/bin/nvcc"

if ! command -v "${CXX:-c++}" >/dev/null; then
    echo 'there is no C++ compiler, by which kernels are made to run on the CPU: install g++ or clang++, or name one in CXX' >&2
    exit 1
fi
tests=$PWD/crates/performer-core/tests
library=$toolkit/lib64/libcuda.so
stamp=$({ echo "$tests ${CXX:-c++}" && cat "$tests"/cuda_driver/* "$tests"/cuda_host/{device,races}.h; } | cksum)
if [ "$(cat "$library.stamp" 2>/dev/null)" != "$stamp" ]; then
    "${CXX:-c++}" -std=c++17 -O2 -fno-strict-aliasing -shared -fPIC -fvisibility=hidden \
        -DHERE="\"$tests/cuda_driver\"" -DHOST="\"$tests/cuda_host\"" -I "$tests/cuda_host" \
        "$tests"/cuda_driver/*.cpp -o "$library" -ldl
    # The program looks for the names with versions: those of NVRTC itself, the others where it was
    # linked to real ones.
    for name in cublas cublasLt curand nvrtc cudart; do
        for version in '' .10 .13; do
            ln -sf libcuda.so "$toolkit/lib64/lib$name.so$version"
        done
    done
    echo "$stamp" >"$library.stamp"
fi

# All of the workspace and an example are named so that dependencies have the features that they
# have in `cargo test`, and are not compiled again.
CUDA_HOME=$toolkit NVCC=$toolkit/bin/nvcc PATH=$toolkit/bin:$PATH CUDA_COMPUTE_CAP=80 \
    LIBRARY_PATH=$toolkit/lib64${LIBRARY_PATH:+:$LIBRARY_PATH} \
    cargo build --locked --workspace --bin performer-lm --example library --features performer-lm/cuda >&2
# Images of this compiler are kept where EMULATED_CACHE says, not where those of NVRTC are.
export PERFORMER_KERNELS=
# Not left where the ordinary program belongs: it starts with these libraries only.
rm -f "$toolkit/performer-lm"
mv "$target/debug/performer-lm" "$toolkit/performer-lm"
if [ "${1:-}" = --build-only ]; then
    echo "$toolkit"
    exit
fi
cd "$here"
EMULATED_CACHE=${EMULATED_CACHE:-$toolkit/images} LD_LIBRARY_PATH=$toolkit/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} \
    exec "$toolkit/performer-lm" "$@"

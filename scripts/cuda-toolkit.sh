#!/usr/bin/env bash
# Assembles a CUDA toolkit on a Linux machine that has none, from Python packages (cuda-toolkit.txt;
# 1.2 GB):
#
#     scripts/cuda-toolkit.sh DIR
#
# and prints the settings that a build needs: eval "$(scripts/cuda-toolkit.sh DIR)". Nothing is done
# twice. To link needs libcuda, which comes with a driver: a stand-in for it, whose functions all
# fail, lies in lib64/stubs, for the linker alone. Never put that folder on LD_LIBRARY_PATH where
# there is a GPU.
set -euo pipefail

if [ $# -ne 1 ]; then
    echo "usage: $0 DIR" >&2
    exit 2
fi
packages=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/cuda-toolkit.txt
mkdir -p "$1"
root=$(cd "$1" && pwd)
toolkit=$root/nvidia/cu13

if ! python3 -m pip --version >/dev/null 2>&1; then
    echo 'there is no pip, by which the toolkit comes: install python3 and its pip' >&2
    exit 1
fi
if ! cmp --silent "$packages" "$root/installed.txt"; then
    if [ -e "$root/nvidia" ] && ! [ -e "$root/installed.txt" ] && ! [ -e "$root/begun.txt" ]; then
        echo "$root/nvidia is not of this script, and would be replaced: choose another folder" >&2
        exit 1
    fi
    # Tells an installation that was broken off from files of others.
    touch "$root/begun.txt"
    rm -rf "$root/nvidia" "$root/installed.txt"
    PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --no-deps --no-compile --disable-pip-version-check \
        --upgrade --target "$root" --requirement "$packages" >&2

    # The packages have neither lib64 nor the names without a version that linkers look for.
    ln -sfn lib "$toolkit/lib64"
    for library in "$toolkit"/lib/lib*.so.*; do
        name=${library##*/}
        case $name in
            *.alt.so*) ;;
            *) ln -sf "$name" "$toolkit/lib/${name%%.so.*}.so" ;;
        esac
    done

    # Every function that the header names, each returning CUDA_ERROR_STUB_LIBRARY.
    mkdir -p "$toolkit/lib/stubs"
    grep -ohE '\bcu[A-Z][A-Za-z0-9_]*' "$toolkit/include/cuda.h" | sort -u |
        sed 's/.*/int &(void) { return 34; }/' >"$root/libcuda.c"
    ${CC:-cc} -w -shared -fPIC -fno-builtin -Wl,-soname,libcuda.so.1 -o "$toolkit/lib/stubs/libcuda.so" "$root/libcuda.c"
    ln -sf libcuda.so "$toolkit/lib/stubs/libcuda.so.1"
    cp "$packages" "$root/installed.txt"
fi

for name in CUDA_HOME CUDA_ROOT CUDA_PATH; do
    printf 'export %s=%q\n' "$name" "$toolkit"
done
printf 'export PATH=%q:"$PATH"\n' "$toolkit/bin"
# Kernels of Candle for this architecture and all later ones; ours are compiled on the device at
# hand, for it.
printf 'export CUDA_COMPUTE_CAP="${CUDA_COMPUTE_CAP:-80}"\n'

#!/usr/bin/env bash
# Packs everything that scripts/gpu-run.sh needs into a folder to copy to a machine with a card:
#
#     scripts/cuda-pack.sh [FOLDER [ARCHITECTURE...]]          (default: target/performer-gpu)
#     FOLDER/gpu-run.sh                                        on that machine
#
# The folder has the program and its kernels for A100, L4, H100, B200 and RTX 50 (or for the
# architectures given, such as 90), compressed, and none of CUDA's libraries, which are 850 MB: the
# machine has them with CUDA 13 or with PyTorch. It fails if the folder is larger than 60 MiB. The
# first build takes 15 to 30 minutes on two cores. PROGRAM names a program that is built already.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=${1:-target/performer-gpu}
[ $# -eq 0 ] || { shift; case $folder in /*) ;; *) folder=$here/$folder ;; esac; }
folder=${folder%/}
most=$((60 << 20))
command -v xz >/dev/null || { echo 'there is no xz to compress the program with: install xz-utils' >&2; exit 1; }

if [ -n "$(ls -A "$folder" 2>/dev/null)" ] && ! [ -f "$folder/gpu-run.sh" ]; then
    echo "$folder holds files that are no pack of this script's, and would be replaced: choose another folder" >&2
    exit 1
fi
# What a pack has, and what gpu-run.sh unpacks there.
for file in "$folder"/* "$folder"/.[!.]*; do
    case ${file##*/} in
        '*' | '.[!.]*' | gpu-run.sh | torch_attention.py | torch_train.py | models | performer-lm | performer-lm.xz) ;;
        kernels | kernels.tar.xz | unpacked | __pycache__) ;;
        *)
            echo "$file is not of the pack, holds results of gpu-run.sh perhaps, and would be lost: move it, or choose another folder" >&2
            exit 1
            ;;
    esac
done

program=${PROGRAM:-}
case $program in '' | /*) ;; *) program=$here/$program ;; esac
if [ -n "$program" ] && ! [ -f "$program" ]; then
    echo "PROGRAM is $program, and there is no such file" >&2
    exit 1
fi
if [ -z "$program" ]; then
    program=target/performer-cuda/performer-lm
    scripts/cuda-build.sh --without-libraries target/performer-cuda >&2
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
scripts/cuda-kernels.sh "$scratch/kernels" "$@" >&2

# The pack gets its name when it is whole. It grows beside that, since a folder moves at once only
# within one disk.
mkdir -p "$(dirname "$folder")"
pack=$(mktemp -d "$folder.XXXXXX")
trap 'rm -rf "$scratch" "$pack"' EXIT
chmod 755 "$pack"
mkdir "$pack/models"
xz -6 -T0 -c "$program" >"$pack/performer-lm.xz"
# One stream, because the kernels of different architectures are alike in part.
tar --sort=name --owner=0 --group=0 --mtime=@0 -C "$scratch" -c kernels | xz -9 -T1 -c >"$pack/kernels.tar.xz"
cp scripts/gpu-run.sh scripts/torch_attention.py scripts/torch_train.py "$pack/"
for preset in seed small code stories15m; do
    mkdir "$pack/models/$preset"
    cp "models/$preset/config.json" "models/$preset/training.json" "$pack/models/$preset/"
done

size=$(du -sb "$pack" | cut -f1)
part() { echo "$(($(stat -c %s "$pack/$1") >> 10)) KiB"; }
echo "the program: $(part performer-lm.xz), its kernels: $(part kernels.tar.xz)" >&2
if [ "$size" -gt "$most" ]; then
    echo "the pack has $size bytes, $((size - most)) more than the $most that may travel: pack fewer architectures" >&2
    exit 1
fi
rm -rf "$folder"
mv "$pack" "$folder"
echo "$folder: $((size >> 10)) KiB"

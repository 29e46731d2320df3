#!/usr/bin/env bash
# Packs everything that scripts/gpu-run.sh needs into a folder to copy to a machine with a card:
#
#     scripts/cuda-pack.sh [FOLDER]          (default: target/performer-gpu)
#     FOLDER/gpu-run.sh                      on that machine
#
# The folder has the program, compressed, and none of CUDA's libraries, which are 850 MB: the
# machine has them with CUDA 13 or with PyTorch. It fails if the folder is larger than 60 MiB. The
# first build takes 6 to 18 minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=${1:-target/performer-gpu}
most=$((60 << 20))
command -v xz >/dev/null || { echo 'there is no xz to compress the program with: install xz-utils' >&2; exit 1; }

scripts/cuda-build.sh --without-libraries target/performer-cuda >&2
rm -rf "$folder"
mkdir -p "$folder/models"
xz -6 -T0 -c target/performer-cuda/performer-lm >"$folder/performer-lm.xz"
cp scripts/gpu-run.sh scripts/torch_attention.py scripts/torch_train.py "$folder/"
for preset in seed small stories15m; do
    mkdir "$folder/models/$preset"
    cp "models/$preset/config.json" "models/$preset/training.json" "$folder/models/$preset/"
done

size=$(du -sb "$folder" | cut -f1)
if [ "$size" -gt "$most" ]; then
    echo "$folder has $size bytes, $((size - most)) more than the $most that may travel" >&2
    exit 1
fi
echo "$folder: $((size >> 10)) KiB"

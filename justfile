# Where experiments find their text: a folder with train.txt and valid.txt.
data := '${DATA:?set DATA to a folder with train.txt and valid.txt}'
program := 'cargo run --release -p performer-lm --'

# List the recipes.
default:
    @just --list

# The README's test command: unit, integration and documentation tests.
test:
    cargo test --workspace

# Everything that must hold before a change lands.
ci:
    .ci/run

# The unsafe code under valgrind, which emulates AVX2: minutes.
memcheck:
    CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER='valgrind --quiet --error-exitcode=9' \
        cargo test -p performer-core --lib --test suite -- kernels:: decoding:: ops:: trained::hidden_keys against_reference::strided \
        against_reference::keys_far against_reference::across against_reference::with_hidden_keys

# Write down the public interface of performer-core as it is now; CI refuses one that is not written down.
public-api:
    scripts/public-api.sh --write

# Formatting and lints.
lint:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets --locked -- -D warnings

# The documentation of both crates; `just doc --open` shows it.
doc *ARGS:
    RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps {{ ARGS }}

# The book in book/book, where mdBook is installed (`cargo install mdbook --locked`); `just book --open` shows it.
book *ARGS:
    scripts/book_check.py
    mdbook build book {{ ARGS }}

# The book's page of commands and options, as the program prints it.
book-reference:
    cargo run -p performer-lm -- reference > book/src/reference.md

# The stories that come with the program, composed anew.
sample:
    scripts/sample_stories.py > crates/performer-lm/assets/sample.txt

# Train a model: `just train --data sample --attention favor:m=64`.
train *ARGS='--attention favor':
    {{ program }} train {{ ARGS }}

# The published experiment, on the text in $DATA.
compare-seed:
    {{ program }} compare --preset seed --data "{{ data }}" \
        --attention softmax --attention favor:m=64 --attention favor:m=128 --seeds 1,2,3 --out benchmarks/seed

# The same with the model that writes stories, one seed.
compare-small:
    {{ program }} compare --preset small --data "{{ data }}" \
        --attention softmax --attention favor:m=128 --seeds 1 --out benchmarks/small

# What features, gates, windows and convolutions are worth at 256 tokens, each at the best of three learning rates.
compare-attentions SEEDS='1':
    {{ program }} compare --preset small --epochs 1 --data "{{ data }}" --learning-rates 3e-3,6e-3,9e-3 --seeds {{ SEEDS }} \
        --attention softmax --attention favor-gated --attention softmax:window=66 --attention softmax:gate \
        --attention favor:gate,conv --attention softmax:gate,conv --attention uniform:gate --attention favor \
        --out benchmarks/attentions

# Long real text: the Rust source of this project's dependencies, as train.txt, valid.txt and test.txt in a folder.
code-corpus OUT:
    cargo fetch --locked
    python3 scripts/code_corpus.py "{{ OUT }}"

# The stories of the committed results, out of the public file (22 MB): OUT/train.txt, OUT/valid.txt, OUT/test.txt.
stories OUT:
    scripts/tinystories.py "{{ OUT }}"

# The stories in FOLDER (train.txt, valid.txt) with half of the validation text kept for the last result, as OUT/test.txt.
split-stories FOLDER OUT:
    scripts/tinystories.py --split "{{ FOLDER }}" "{{ OUT }}"

# Attention over lengths and features; beside PyTorch where the Python given has it: `just bench-attention .venv/bin/python`.
bench-attention PYTHON='':
    {{ if PYTHON == '' { '' } else { PYTHON + ' scripts/torch_attention.py > benchmarks/attention/torch.json' } }}
    {{ program }} bench attention --no-composed --out benchmarks/attention \
        {{ if PYTHON == '' { '' } else { '--against benchmarks/attention/torch.json' } }}

# Decoding over contexts to a million tokens.
bench-decode:
    {{ program }} bench decode --out benchmarks/decode

# Whole training steps of the `seed` preset, on the text in $DATA.
bench-train:
    {{ program }} bench train --data "{{ data }}" --out benchmarks/train

# The CUDA code and its kernels, checked without a GPU.
cuda-check:
    scripts/cuda-check.sh

# The code for Metal, checked without a Mac.
metal-check:
    scripts/metal-check.sh

# The program with CUDA, in a folder to copy to a machine with a card.
cuda-build FOLDER='target/performer-cuda':
    scripts/cuda-build.sh {{ FOLDER }}

# The same and the scripts that measure a card, small enough to send: `FOLDER/gpu-run.sh` there.
cuda-pack FOLDER='target/performer-gpu':
    scripts/cuda-pack.sh {{ FOLDER }}

# This machine's GPU: right? how fast? Beside PyTorch's attention, if the Python given has it.
gpu-check PYTHON='': cuda-build
    {{ if PYTHON == '' { '' } else { PYTHON + ' scripts/torch_attention.py --device cuda --dtype bf16 --heads 64 --tokens 512,1024,2048,4096,8192,16384 > target/torch.json' } }}
    target/performer-cuda/performer-lm gpu-check --device cuda {{ if PYTHON == '' { '' } else { '--against target/torch.json' } }}

# What a newcomer sees: both README commands in a clone of HEAD, with empty caches.
fresh-clone:
    scripts/fresh-clone.sh

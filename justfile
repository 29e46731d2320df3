# Where experiments find their text: a folder with train.txt and valid.txt.
data := '${DATA:?set DATA to a folder with train.txt and valid.txt}'
program := 'cargo run --release -p performer-lm --'

# Where cargo puts what it builds.
target := env('CARGO_TARGET_DIR', 'target')

# Miri's flags: errors of exp and tanh are not random.
miri := '-Zmiri-disable-isolation -Zmiri-permissive-provenance -Zmiri-ignore-leaks -Zmiri-deterministic-floats'

# List the recipes.
default:
    @just --list

# The README's test command: unit, integration and documentation tests.
test:
    cargo test --workspace

# Everything that must hold before a change lands.
ci:
    .ci/run

# Every test that takes minutes; those that need a model from elsewhere are left out.
ignored:
    cargo test --release --workspace -- --ignored --skip stories260k --skip minilm

# Published models: FOLDER has stories260k/ and tinystories/.
real-models FOLDER:
    MODELS="$(realpath "{{ FOLDER }}")" cargo test -p performer-lm --test suite pretrained::real -- --ignored

# The published all-MiniLM-L6-v2, in FOLDER.
real-minilm FOLDER:
    MINILM="$(realpath "{{ FOLDER }}")" cargo test -p performer-core --test suite minilm -- --ignored

# Numbers of every size, 100,000 tokens, every future at every cut: minutes.
attack-numbers:
    cargo test --release -p performer-core --test suite -- --include-ignored attacks:: long_causality::

# Mutate each of 23 files COUNT times, and the texts of settings ten times as often.
attack-files COUNT='6100':
    MUTATIONS={{ COUNT }} cargo test --release -p performer-lm --test suite mutations:: -- --nocapture

# Needs a nightly toolchain: fuzz/README.md.
# Feed a reader of files what reaches new code of it, for SECONDS; `just fuzz all 300`.
fuzz TARGET SECONDS='300':
    scripts/fuzz.sh {{ TARGET }} {{ SECONDS }}

# Kill every command that writes, about KILLS times in all; full disks; two processes in one folder.
attack-kills KILLS='300':
    cargo build --release -p performer-lm
    scripts/attack_kills.py --program "{{ target }}/release/performer-lm" --kills {{ KILLS }}

# The same weights on one, two and four threads after STEPS steps, in processes of their own.
attack-threads STEPS='200':
    STEPS={{ STEPS }} cargo test --release -p performer-lm --test suite regressions::weights

# For an x86-64 machine that has more than AVX2.
# Test performer-core with kernels of AVX2 alone, and of plain Rust.
test-simd *ARGS:
    PERFORMER_TEST_SIMD=avx2 cargo test -p performer-core --lib --test suite {{ ARGS }}
    PERFORMER_TEST_SIMD=scalar cargo test -p performer-core --lib --test suite {{ ARGS }}

# Needs gcc-aarch64-linux-gnu and qemu-user; tests that start themselves cannot be emulated.
# Test performer-core with kernels of NEON, compiled for aarch64 and emulated.
test-neon *ARGS:
    rustup target add aarch64-unknown-linux-gnu
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
        CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER='qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu max' \
        cargo test --target aarch64-unknown-linux-gnu -p performer-core --lib --test suite {{ ARGS }} -- \
        --skip store::tests::processes --skip kernels::tests::kernels_keep

# How far a training drifts apart on processors with other instructions, emulated (qemu-user).
drift STEPS='200':
    rustup target add aarch64-unknown-linux-gnu
    scripts/drift.py --steps {{ STEPS }}

# Train for so many seconds, and see that memory, threads and open files do not grow.
attack-time SECONDS='7200':
    cargo build --release -p performer-lm
    scripts/long_run.py --seconds {{ SECONDS }} --out target/long-run -- \
        "{{ target }}/release/performer-lm" train --data sample --attention favor --epochs 100000 --eval-every 50 \
        --save-every 50 --out target/long-run/run --overwrite

# How fast they come is shown, and not judged.
# Generate so many tokens in one go, and see that memory does not grow.
attack-tokens TOKENS='1000000':
    cargo build --release -p performer-lm
    scripts/long_run.py --seconds 7200 --every 5 --to-end --out target/long-text -- sh -c 'exec "{{ target }}/release/performer-lm" generate \
        models/stories/performer --ignore-end --max-tokens {{ TOKENS }} >target/long-text/stories.txt'

# Known faults are looked for too, where cargo-deny is installed.
# Check licences and sources of what is depended on, and the reasons of unsafe code.
supply:
    scripts/supply_check.py
    cargo deny check

# Needs cargo-mutants. It takes days, or hours with `--sharding round-robin --shard 0/50`.
# Change the code in small ways, and see that a test fails each time.
mutants *ARGS:
    cargo mutants -p performer-core -f 'crates/performer-core/src/attention/**' -f 'crates/performer-core/src/kernels/**' \
        -e '**/cuda*' -e '**/cuda/**' -e '**/metal*' -e '**/metal/**' -C=--lib -C=--test -C=suite {{ ARGS }}
    cargo mutants -p performer-lm -f 'crates/performer-lm/src/checkpoint*' -f 'crates/performer-lm/src/checkpoint/**' \
        -f 'crates/performer-lm/src/data/**' -f crates/performer-lm/src/eval.rs -C=--lib -C=--test -C=suite {{ ARGS }}

# The unsafe code under valgrind, which emulates AVX2: minutes.
memcheck:
    CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER='valgrind --quiet --error-exitcode=9' \
        cargo test -p performer-core --lib --test suite -- kernels:: decoding:: ops:: losses:: trained::hidden_keys against_reference::strided \
        against_reference::keys_far against_reference::across against_reference::with_hidden_keys

# Needs `rustup +nightly component add miri`. The queues of the thread pool (crossbeam-epoch) keep
# Tree Borrows and not Stacked Borrows.
# Interpret the unsafe code of performer-core by Miri: plain Rust and the thread pool.
miri *ARGS:
    MIRIFLAGS='{{ miri }}' RAYON_NUM_THREADS=2 cargo +nightly miri test -p performer-core --lib {{ ARGS }} -- \
        kernels::fresh kernels::gemm kernels::transpose kernels::vector kernels::activation
    MIRIFLAGS='{{ miri }} -Zmiri-tree-borrows' RAYON_NUM_THREADS=2 cargo +nightly miri test -p performer-core --test suite {{ ARGS }} -- \
        small::

# CI refuses an interface that is not written down.
# Write down the public interface of performer-core as it is now.
public-api:
    scripts/public-api.sh --write

# Formatting and lints.
lint:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets --locked -- -D warnings

# The documentation of all crates; `just doc --open` shows it.
doc *ARGS:
    RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps {{ ARGS }}

# The book in book/book, checked and built; `just book --open` shows it.
book *ARGS:
    scripts/book.sh book/book {{ ARGS }}

# The program for Windows, run under Wine (mingw-w64, wine64): ten minutes.
windows-check:
    cargo build --release -p performer-lm
    scripts/windows-check.sh "{{ target }}/release/performer-lm"

# Static files for any web server, with the two models that write stories.
# Build the browser page in target/page, or where CARGO_TARGET_DIR says.
page:
    scripts/page.sh

# Text, speed, memory over 100,000 tokens, keyboard, without a network; takes screenshots. Minutes.
# Check the page in a headless Chromium.
page-check *ARGS: page
    cargo build --release -p performer-lm
    scripts/page_check.py "{{ target }}/page" "{{ target }}/release/performer-lm" {{ ARGS }}

# Compare the program with scripts/performer_torch.py, on models of every kind or those in FOLDERS.
torch-check PYTHON='python3' *FOLDERS:
    cargo build --release -p performer-lm --bin performer-lm --example logits
    "{{ PYTHON }}" scripts/torch_check.py "{{ target }}/release/performer-lm" "{{ target }}/release/examples/logits" {{ FOLDERS }}

# The book's page of commands and options, as the program prints it.
book-reference:
    cargo run -p performer-lm -- reference > book/src/reference.md.new
    mv book/src/reference.md.new book/src/reference.md

# The stories that come with the program, composed anew.
sample:
    scripts/sample_stories.py > crates/performer-lm/assets/sample.txt.new
    mv crates/performer-lm/assets/sample.txt.new crates/performer-lm/assets/sample.txt

# Train a model: `just train --data sample --attention favor:m=64`.
train *ARGS='--attention favor':
    {{ program }} train {{ ARGS }}

# The published experiment, on the text in $DATA.
compare-seed:
    {{ program }} compare --preset seed --data "{{ data }}" \
        --attention softmax --attention favor:m=64 --attention favor:m=128 --seeds 1,2,3 --out benchmarks/seed

# Compare softmax with FAVOR+ at 128 features in the `small` preset, one seed, on the text in $DATA.
compare-small:
    {{ program }} compare --preset small --data "{{ data }}" \
        --attention softmax --attention favor:m=128 --seeds 1 --out benchmarks/small

# At 256 tokens, each attention at the best of three learning rates.
# Measure what features, gates, windows and convolutions are worth, on the text in $DATA.
compare-attentions SEEDS='1':
    {{ program }} compare --preset small --epochs 1 --data "{{ data }}" --learning-rates 3e-3,6e-3,9e-3 --seeds {{ SEEDS }} \
        --attention softmax --attention favor-gated --attention softmax:window=66 --attention softmax:gate \
        --attention favor:gate,conv --attention softmax:gate,conv --attention uniform:gate --attention favor \
        --out benchmarks/attentions

# Long real text: Rust source of the dependencies; `just code-corpus code 64` holds less of it out.
code-corpus OUT HELD_OUT_KIB='1024':
    cargo fetch --locked
    python3 scripts/code_corpus.py "{{ OUT }}" --held-out {{ HELD_OUT_KIB }}

# Windows and FAVOR+ with gates on the text that code-corpus made in `code`, at 4,096 tokens.
compare-code TOKENS='8000000':
    {{ program }} compare --preset code --context 4096 --batch-size 2 --learning-rate 4e-3 --seeds 1 --threads 1 \
        --data code --eval-every 100 --max-train-tokens {{ TOKENS }} --attention favor:gate,conv \
        --attention softmax:window=66,gate,conv --attention softmax:window=256,gate,conv \
        --attention softmax:gate,conv --out runs/code-{{ TOKENS }}

# They become OUT/train.txt, OUT/valid.txt and OUT/test.txt.
# Get the stories of the committed results, out of the public file (22 MB).
stories OUT:
    scripts/tinystories.py "{{ OUT }}"

# FOLDER has train.txt and valid.txt; half of the latter becomes OUT/test.txt.
# Keep half of the stories' validation text for the last result.
split-stories FOLDER OUT:
    scripts/tinystories.py --split "{{ FOLDER }}" "{{ OUT }}"

# Beside PyTorch where the Python given has it: `just bench-attention .venv/bin/python`.
# Measure attention over lengths and features.
bench-attention PYTHON='':
    {{ if PYTHON == '' { '' } else { PYTHON + ' scripts/torch_attention.py > benchmarks/attention/torch.json.new' } }}
    {{ if PYTHON == '' { '' } else { 'mv benchmarks/attention/torch.json.new benchmarks/attention/torch.json' } }}
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

# Registers, instructions and least times, from the machine code. Needs NVRTC and nvdisasm.
# Report what the machine code of FAVOR's CUDA kernels says.
cuda-report:
    scripts/cuda_report.py > benchmarks/cuda-kernels/kernels.json.new
    mv benchmarks/cuda-kernels/kernels.json.new benchmarks/cuda-kernels/kernels.json

# CI runs the short ones; all take minutes.
# Run all cases of the CUDA kernels on the emulated device, with what it catches.
cuda-cases *ARGS:
    cargo test -p performer-core --test devices -- --include-ignored cuda_host planted {{ ARGS }}

# The code for Metal, checked without a Mac.
metal-check:
    scripts/metal-check.sh

# The program with CUDA, in a folder to copy to a machine with a card.
cuda-build FOLDER='target/performer-cuda':
    scripts/cuda-build.sh "{{ FOLDER }}"

# `FOLDER/gpu-run.sh` measures the card of the machine that the folder is sent to.
# Pack the program with CUDA, its kernels and the scripts that measure a card.
cuda-pack FOLDER='target/performer-gpu' *ARCHITECTURES:
    scripts/cuda-pack.sh "{{ FOLDER }}" {{ ARCHITECTURES }}

# They go into a folder to put beside the program as `kernels`.
# Compile the kernels that a program with CUDA uses, for cards that are not here.
cuda-kernels FOLDER *ARCHITECTURES:
    scripts/cuda-kernels.sh "{{ FOLDER }}" {{ ARCHITECTURES }}

# The way of a pack on an emulated card: there, unpacked, checked, killed, gone on. Minutes.
gpu-rehearsal *ARGS:
    scripts/gpu_rehearsal.py {{ ARGS }}

# This machine's GPU: right? how fast? Beside PyTorch's attention, if the Python given has it.
gpu-check PYTHON='': cuda-build
    {{ if PYTHON == '' { '' } else { PYTHON + ' scripts/torch_attention.py --device cuda --dtype bf16 --heads 64 --tokens 512,1024,2048,4096,8192,16384 > target/torch.json' } }}
    target/performer-cuda/performer-lm gpu-check --device cuda {{ if PYTHON == '' { '' } else { '--against target/torch.json' } }}

# What a newcomer sees: both README commands in a clone of HEAD, with empty caches.
fresh-clone:
    scripts/fresh-clone.sh

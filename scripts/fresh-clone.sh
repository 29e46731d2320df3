#!/usr/bin/env bash
# What a newcomer sees: clones HEAD, runs the README's two commands with empty caches and no
# dataset, prints the time of each. Cargo's own cache of downloaded crates is used as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

commands=(
    'cargo run --release -p performer-lm -- train --attention favor --data sample'
    'cargo test --workspace'
)

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

if [ -n "$(git status --porcelain)" ]; then
    echo 'note: uncommitted changes are not in the clone' >&2
fi
git clone --quiet "$PWD" "$scratch/clone"
cd "$scratch/clone"

export CARGO_TARGET_DIR=$scratch/target
export PERFORMER_CACHE=$scratch/cache
export HF_HOME=$scratch/huggingface
export HF_HUB_OFFLINE=1

times=()
for command in "${commands[@]}"; do
    if ! grep -qxF "$command" README.md; then
        echo "the README has no line '$command'" >&2
        exit 1
    fi
    printf '\n$ %s\n' "$command" >&2
    started=$SECONDS
    bash -c "$command"
    times+=("$(printf '%5d s  %s' $((SECONDS - started)) "$command")")
done

printf '\n%s, build included:\n' "$(git rev-parse --short HEAD)"
printf '%s\n' "${times[@]}"

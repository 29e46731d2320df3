#!/usr/bin/env bash
# Checks the book, builds it as pages for a browser, and checks the links of those.
#
#   scripts/book.sh FOLDER [OPTION of `mdbook build`...]
#
# Takes the `mdbook` that is installed. Where there is none, it builds the version below, which
# takes a minute once, and keeps it in the user's cache. A warning of mdBook is an error.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v cargo >/dev/null || PATH="${CARGO_HOME:-${HOME:-}/.cargo}/bin:$PATH"

if [ $# -lt 1 ]; then
    echo 'usage: scripts/book.sh FOLDER [OPTION of mdbook build...]' >&2
    exit 2
fi
case $1 in /*) folder=$1 ;; *) folder=$here/$1 ;; esac
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
shift
# mdBook empties the folder that it builds into. What it has built has this page and this style.
if [ -n "$(ls -A "$folder")" ] && ! { [ -f "$folder/print.html" ] && [ -d "$folder/css" ]; }; then
    echo "$folder holds files that are no book of this script's, and would be lost: choose another folder" >&2
    exit 1
fi

# Charts that lie beside their numbers, and in the book, which takes no file from elsewhere.
for chart in generate/generate-{speed,memory}; do
    cmp "benchmarks/$chart.svg" "book/src/results/${chart#*/}.svg"
done
scripts/book_check.py README.md benchmarks/README.md benchmarks/minilm/README.md docs/report/README.md \
    models/README.md models/stories/README.md

version=0.5.4
kept=${XDG_CACHE_HOME:-$HOME/.cache}/performer/mdbook-$version
mdbook=$kept/bin/mdbook
if command -v mdbook >/dev/null; then
    mdbook=mdbook
elif [ ! -x "$mdbook" ]; then
    # Without its server and its watching, which building does not need, and without its search, for
    # fewer packages: print.html has the whole book on one page, in which any browser searches.
    # Not optimised: that takes twice as long, and the book is built half a second sooner.
    echo "building mdBook $version, once, which takes about a minute on two cores" >&2
    CARGO_PROFILE_DEV_DEBUG=0 cargo install mdbook --version "$version" --locked --debug --no-default-features --root "$kept"
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$mdbook" build book --dest-dir "$folder" "$@" 2>&1 | tee "$log"
if grep -qE '\b(WARN|ERROR)\b' "$log"; then
    echo 'mdBook has something to say against the book, see above' >&2
    exit 1
fi
if [ ! -s "$folder/index.html" ]; then
    echo "mdBook left no index.html in $folder" >&2
    exit 1
fi
scripts/book_links.py "$folder"

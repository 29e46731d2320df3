#!/usr/bin/env bash
# Builds the browser page into target/page, or into the folder that is given: static files, which
# any web server can serve from any folder. With them go the licences of the page, of its models and
# of all that is compiled into its program. Needs Rust's target wasm32-unknown-unknown, Python 3.11,
# and crates from the registry the first time. BOOK is the address of the book, if the page is to
# link to one.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v cargo >/dev/null || PATH="${CARGO_HOME:-${HOME:-}/.cargo}/bin:$PATH"

target=${CARGO_TARGET_DIR:-target}
page=${1:-$target/page}
[ $# -eq 0 ] || case $page in /*) ;; *) page=$here/$page ;; esac
triple=wasm32-unknown-unknown
if ! [ -d "$(rustc --print sysroot)/lib/rustlib/$triple" ]; then
    if ! command -v rustup >/dev/null; then
        echo "Rust lacks the target $triple: install it with rustup (https://rustup.rs)" >&2
        exit 1
    fi
    rustup target add "$triple"
fi

if [ -n "$(ls -A "$page" 2>/dev/null)" ] && ! grep -qs 'performer_web_bg\.wasm' "$page/service-worker.js"; then
    echo "$page holds files that are no page of this script's, and would be replaced: choose another folder" >&2
    exit 1
fi
# What a page has.
for file in "$page"/* "$page"/.[!.]*; do
    name=${file##*/}
    case $name in
        '*' | '.[!.]*' | performer_web* | snippets | models | LICENSE-*.txt | NOTICES.txt) ;;
        *)
            if ! [ -f "web/$name" ]; then
                echo "$file is not of the page, and would be lost: choose another folder" >&2
                exit 1
            fi
            ;;
    esac
done

cargo build --release --locked -p performer-web --target "$triple"
# The page takes the place of an earlier one when it is whole. It grows beside that, since a folder
# moves at once only within one disk.
whole=${page%/}
mkdir -p "$(dirname "$whole")"
page=$(mktemp -d "$whole.XXXXXX")
trap 'rm -rf "$page"' EXIT
chmod 755 "$page"
cp web/* "$page"
CARGO_TARGET_DIR=$target/wasm-glue cargo run --quiet --release --locked --manifest-path scripts/wasm-glue/Cargo.toml -- \
    "$target/$triple/release/performer_web.wasm" "$page"
for model in performer softmax; do
    mkdir -p "$page/models/$model"
    cp models/stories/$model/{config.json,tokenizer.json,model.safetensors} "$page/models/$model"
    bytes=$(cat "$page/performer_web_bg.wasm" "$page/models/$model"/* | wc -c)
    sed -i.old "s|0/\* $model \*/|$bytes|" "$page/page.js"
done
rm "$page/page.js.old"

# Web servers and browsers show files with this ending, and download those without one.
for licence in LICENSE-MIT LICENSE-APACHE; do
    cp $licence "$page/$licence.txt"
done
# The mark before the text says that it is in UTF-8, where a server does not. Comments on where the
# figures come from are left out.
{
    printf '\357\273\277'
    sed -e '/^<!--.*-->$/d' -e '/^<!--/,/-->$/d' models/stories/README.md
} >"$page/models/README.txt"
scripts/notices.py performer-web "$triple" "$page/NOTICES.txt"

if [ -n "${BOOK:-}" ]; then
    address=$(sed -e 's/&/\&amp;/g' -e 's/"/\&quot;/g' -e 's/[&|\]/\\&/g' <<<"$BOOK")
    link="How it works and what it is worth: <a href=\"$address\">the book</a>. "
    sed -i.old "s|<!-- book -->|$link|" "$page/index.html"
    rm "$page/index.html.old"
fi

# The service worker keeps these files under a name made of their contents, with which the addresses
# of the program and the models end too.
(
    cd "$page"
    files=$(find . -type f ! -name service-worker.js | LC_ALL=C sort)
    digest=$(while IFS= read -r file; do cat "$file"; done <<<"$files" | cksum | tr ' ' -)
    list=$(sed 's/.*/"&"/' <<<"$files" | paste -sd, -)
    sed -i.old -e "s|/\* files \*/|\"./\",$list|" -e "s|/\* build \*/|$digest|" service-worker.js page.js worker.js
    rm ./*.js.old
)
rm -rf "$whole"
mv "$page" "$whole"
trap - EXIT
page=$whole
echo "$page: $(du -sh "$page" | cut -f1), the program $(wc -c <"$page/performer_web_bg.wasm") bytes"
echo "look at it with: python3 -m http.server --bind 127.0.0.1 --directory $page"

#!/usr/bin/env bash
# Screenshots of a report at the widths of a desktop and of a phone, light and dark, to look at:
#   scripts/report-screenshots.sh docs/report/report.html /tmp/shots [ANCHOR...]
# With anchors (error-3, ...) the parts of the page that begin there, else its beginning. Needs
# Chromium (CHROMIUM names another).
set -euo pipefail

if [ $# -lt 2 ]; then
    sed -n '2,4s/^# //p' "$0" >&2
    exit 2
fi
report=$(realpath "$1")
folder=$2
shift 2
browser=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)}
if [ -z "$browser" ]; then
    echo 'there is no chromium: install it, or name a browser of its kind by CHROMIUM' >&2
    exit 1
fi
mkdir -p "$folder"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Far down a long page Chromium's screenshots are blank: an article is shown alone.
sed 's|</head>|<style>article:not(:target, :has(:target)) { display: none }</style></head>|' "$report" >"$scratch/alone.html"

for anchor in "${@:-}"; do
    page=$report
    [ -z "$anchor" ] || page=$scratch/alone.html
    for size in 1280,2400 390,2400; do
        # 0 is dark and 1 light, as Blink counts.
        for theme in 0 1; do
            name=${anchor:-top}-${size%,*}-$([ $theme = 0 ] && echo dark || echo light).png
            "$browser" --headless=new --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$scratch" --window-size="$size" \
                --blink-settings=preferredColorScheme=$theme --screenshot="$(realpath "$folder")/$name" \
                "file://$page${anchor:+#$anchor}" 2>"$scratch/said" || {
                    cat "$scratch/said" >&2
                    echo "$browser has failed: $folder/$name is not there" >&2
                    exit 1
                }
            echo "$folder/$name"
        done
    done
done

#!/usr/bin/env bash
# Lints the code for Metal (Apple's GPUs) on a machine that is no Mac: nothing is linked and nothing
# runs. C code of dependencies is not compiled either; a stand-in for its compiler emits empty
# objects.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v cargo >/dev/null || PATH="${CARGO_HOME:-${HOME:-}/.cargo}/bin:$PATH"

target=aarch64-apple-darwin
if ! command -v rustup >/dev/null; then
    echo "there is no rustup, by which the standard library for $target comes: https://rustup.rs" >&2
    exit 1
fi
rustup target list --installed | grep -qx "$target" || rustup target add "$target"

folder=${CARGO_TARGET_DIR:-target}/metal-stand-in
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cat >"$folder/cc" <<'EOF'
#!/usr/bin/env bash
# Empty objects and libraries, whatever is asked for.
while [ $# -gt 0 ]; do
    case $1 in
        -o) : >"$2"; shift ;;
        *.a) printf '!<arch>\n' >"$1" ;;
    esac
    shift
done
EOF
chmod +x "$folder/cc"
CC_aarch64_apple_darwin=$folder/cc CXX_aarch64_apple_darwin=$folder/cc AR_aarch64_apple_darwin=$folder/cc SDKROOT=/ \
    cargo clippy --locked --target "$target" -p performer-core -p performer-lm --features performer-core/metal,performer-lm/metal -- \
    -D warnings

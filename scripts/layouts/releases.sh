#!/usr/bin/env bash
# Releases of libtpu, the newest first: whether each compiles the attention kernel in all shapes for every chip, and the loops of
# the shipped slices at two layers, which docs/guides/tpu.md tells. Eight minutes a release on two cores.
#
#     scripts/layouts/releases.sh [RELEASE …]
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=target/libtpu
mkdir -p "$folder"
[ $# -gt 0 ] || set -- 0.0.52 0.0.51 0.0.42.1

# Whether a test passes with a release: answer RELEASE TEST [VARIABLE=VALUE]
answer() {
    log=$folder/$1.log
    if env LTX2_PJRT_PLUGIN="$PWD/$folder/$1/libtpu/libtpu.so" LTX2_REQUIRE=cpu,tpu "${@:3}" \
        cargo test --locked --test tpu "$2" > "$log" 2>&1; then
        echo compiles
    else
        echo "fails: $(grep -m1 -E 'error|panicked' "$log")"
    fi
}

echo "| libtpu | the attention kernel, each chip | the shipped slices' loops |"
echo "|---|---|---|"
for release in "$@"; do
    if [ ! -e "$folder/$release/libtpu/libtpu.so" ]; then
        python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.11 --platform manylinux_2_31_x86_64 \
            -d "$folder" "libtpu==$release"
        python3 -m zipfile -e "$folder/libtpu-$release-"*.whl "$folder/$release"
    fi
    kernel=$(answer "$release" attention::the_kernel LTX2_TEST_FULL=1)
    echo "| $release | $kernel | $(answer "$release" shipped::every_shipped_loop_keeps) |"
done

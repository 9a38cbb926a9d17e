#!/usr/bin/env bash
# Releases of libtpu, the newest first: whether each compiles the attention kernel for every chip, and the loop of every shipped
# slice at two layers. Prints the table of docs/guides/tpu.md. Twenty minutes a release on two cores.
#
#     scripts/layouts/releases.sh [RELEASE …]
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=target/libtpu
mkdir -p "$folder"
echo "| libtpu | the attention kernel, each chip | the shipped slices' loops |"
echo "|---|---|---|"
for release in "${@:-0.0.52 0.0.51 0.0.42.1}"; do
    for release in $release; do
        if [ ! -e "$folder/$release/libtpu/libtpu.so" ]; then
            python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.11 --platform manylinux_2_31_x86_64 \
                -d "$folder" "libtpu==$release"
            python3 -m zipfile -e "$folder/libtpu-$release-"*.whl "$folder/$release"
        fi
        answer() {
            if LTX2_PJRT_PLUGIN="$PWD/$folder/$release/libtpu/libtpu.so" LTX2_REQUIRE=cpu,tpu LTX2_TEST_FULL=${2:-} \
                cargo test --locked --test tpu "$1" > "$folder/$release.log" 2>&1; then echo compiles; else
                echo "fails: $(grep -m1 -E 'error|panicked' "$folder/$release.log")"
            fi
        }
        kernel=$(answer attention::the_kernel 1)
        echo "| $release | $kernel | $(answer shipped::every_shipped_loop_keeps) |"
    done
done

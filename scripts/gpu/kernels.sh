#!/usr/bin/env bash
# Time of every GPU kernel of a command, by name: scripts/gpu/kernels.sh OUT.tsv COMMAND…
# OUT.tsv: nanoseconds, calls, name. Needs a C compiler and CUPTI (CUDA toolkit, or the nvidia-cuda-cupti wheel).
set -euo pipefail
out=$1; shift
here=$(cd "$(dirname "$0")" && pwd)
# The first file of that name in the places where CUDA toolkits and their wheels lie.
first() { find -L /usr/local/cuda* /opt "$here/../../plugins/cuda" /usr/lib/python3* /usr/local/lib -name "$1" 2>/dev/null | head -1 || true; }
header=$(first cupti.h) library=$(first 'libcupti.so*') cuda=$(first cuda.h)
for found in "$header" "$library" "$cuda"; do
  [ -n "$found" ] || { echo "kernels.sh: CUPTI is not complete here (cupti.h '$header', libcupti.so '$library', cuda.h '$cuda')" >&2; exit 1; }
done
object=$(mktemp -d)/libkernels.so
for version in 12 11 10 9; do
  if cc -shared -fPIC -O2 -DRECORD=CUpti_ActivityKernel$version -I"$(dirname "$header")" -I"$(dirname "$cuda")" "$here/kernels.c" \
    -o "$object" "$library" -Wl,-rpath,"$(dirname "$library")" -lpthread 2>/dev/null; then break; fi
done
[ -f "$object" ] || { echo "kernels.sh: kernels.c does not build against $header" >&2; exit 1; }
CUDA_INJECTION64_PATH=$object KERNELS_OUT=$out "$@"

#!/usr/bin/env bash
# Prepares a host with NVIDIA GPUs: scripts/gpu/setup.sh [LTX2]. Installs the plugins and runs `ltx2 doctor`.
set -euo pipefail
ltx2=${1:-target/release/ltx2}
fail() { echo "setup.sh: $1" >&2; exit 1; }
command -v nvidia-smi > /dev/null || fail "no nvidia-smi: install NVIDIA's driver (580 or newer, for CUDA 13)"
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1)
[ "${driver%%.*}" -ge 580 ] || fail "driver $driver is older than 580, which the plugin's CUDA 13 needs"
[ -x "$ltx2" ] || cargo build --release --locked
"$ltx2" plugin install cpu
"$ltx2" plugin install cuda
nvidia-smi --query-gpu=index,name,memory.total,power.limit --format=csv,noheader
# Peers of GPUs on one host talk over NVLink; a mesh over PCIe is slower than these figures.
nvidia-smi topo -m | sed -n '1,9p' || true
"$ltx2" doctor

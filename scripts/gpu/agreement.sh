#!/usr/bin/env bash
# Every shipped layout on the NVIDIA GPUs of this host against one GPU, in f32 and in bf16: scripts/gpu/agreement.sh [OUT].
# Needs two GPUs, for some meshes four; what lacks GPUs is printed as ignored, with the reason. Prints each
# distance and limit, and keeps them in OUT/agreement.log (default out/agreement). Exit code 1 if one fails.
set -euo pipefail
out=${1:-out/agreement}
mkdir -p "$out"
# Multicast over NVLink takes the switch's rights; nothing here needs it.
export NCCL_NVLS_ENABLE=0
cargo build --release --locked
{
    scripts/gpu/setup.sh
    LTX2_REQUIRE=cpu,cuda,gpu,gpus cargo test --locked --release --test gpu agreement:: -- --test-threads 1 --nocapture
} 2>&1 | tee "$out/agreement.log"

#!/usr/bin/env bash
# XLA of JAX 0.10.2 (CUDA plugin 0.10.2, libtpu 0.0.42.1): the CUDA compiler removes a conversion to a narrower float that is
# converted back. Rounding to bf16, and even quantization to fp8 with a scale, then changes nothing, without a message; on CPU and
# TPU the same program rounds. `xla_allow_excess_precision=False` or `lax.reduce_precision` keeps the rounding. Needs no GPU or
# TPU: the programs are compiled for an H200 and a v6e.
# Seen on 2026-11-29: whether the optimized program still rounds
#   f32, bf16, f32: cpu yes, cuda no, tpu yes
#   f32, f8e4m3fn, f32: cpu yes, cuda no, tpu yes
#   fp8 with a scale: cpu yes, cuda no, tpu yes
#   f32, bf16, f32 with the option: cpu yes, cuda yes, tpu yes
#   reduce_precision: cpu yes, cuda yes, tpu yes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'jax==0.10.2' 'jaxlib==0.10.2' 'numpy==2.4.6'
"$folder/venv/bin/pip" install --quiet --no-deps 'jax-cuda13-plugin==0.10.2' 'jax-cuda13-pjrt==0.10.2' 'libtpu==0.0.42.1' \
    'nvidia-cuda-nvcc==13.2.78' 'nvidia-nvvm==13.2.78'
export JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=
seen=$("$folder/venv/bin/python" - 2> "$folder/log" <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

# What the CUDA compiler must know about a GPU, from CUDA's programming guide.
H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_address_bits: 64 device_memory_size: 150754820096 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
}
"""
PLATFORMS = {
    "cpu": jax.devices("cpu")[0],
    "cuda": topologies.get_topology_desc("gpu", "cuda", target_config=H200, topology="1x1x1").devices[0],
    "tpu": topologies.get_topology_desc("v6e:2x2x1", "tpu").devices[0],
}


def through(narrow):
    return lambda x: x.astype(narrow).astype(jnp.float32)


def scaled(x):
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 448
    return through(jnp.float8_e4m3fn)(x / scale) * scale


KEEP = {"xla_allow_excess_precision": False}
CASES = {
    "f32, bf16, f32": (through(jnp.bfloat16), "bf16[", {}),
    "f32, f8e4m3fn, f32": (through(jnp.float8_e4m3fn), "f8e4m3fn[", {}),
    "fp8 with a scale": (scaled, "f8e4m3fn[", {}),
    "f32, bf16, f32 with the option": (through(jnp.bfloat16), "bf16[", KEEP),
    "reduce_precision": (lambda x: jax.lax.reduce_precision(x, 8, 7), "reduce-precision(", {}),
}
for name, (function, mark, options) in CASES.items():
    kept = []
    for platform, device in PLATFORMS.items():
        x = jax.ShapeDtypeStruct((16, 1024), jnp.float32, sharding=SingleDeviceSharding(device))
        optimized = jax.jit(function).lower(x).compile(compiler_options=options).as_text()
        kept.append(f"{platform} {'yes' if mark in optimized else 'no'}")
    print(f"{name}:", ", ".join(kept))
PYTHON
) || { cat "$folder/log"; exit 1; }
echo "$seen"
[ "$seen" = "f32, bf16, f32: cpu yes, cuda no, tpu yes
f32, f8e4m3fn, f32: cpu yes, cuda no, tpu yes
fp8 with a scale: cpu yes, cuda no, tpu yes
f32, bf16, f32 with the option: cpu yes, cuda yes, tpu yes
reduce_precision: cpu yes, cuda yes, tpu yes" ]

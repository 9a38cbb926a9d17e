#!/bin/sh
# Writes fuzz/seeds/module and fuzz/seeds/lora: `make fuzz-seeds`. Needs the plugins of all three platforms. tests/it/fuzz_seeds.rs
# describes the modules.
set -eu
cd "$(dirname "$0")/../.."
ltx2=${1:-target/debug/ltx2}
export TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 LIBTPU_INIT_ARGS=--default_thread_stack_size=1048576
seeds=fuzz/seeds/module
dumps=$(mktemp -d)
trap 'rm -r "$dumps"' EXIT

# NAME CHIP PROGRAM TARGET LAYOUT LAYERS: the smallest published architecture at the smallest size, without guidance.
seed() {
	"$ltx2" -q compile -c nano_2_0 -m nano --program "$3" --target "$4" --layout "$5" --layers "$6" --dump-hlo "$dumps/$1" --json - \
		--set request.width=64 --set request.height=64 --set request.num_frames=9 --set request.max_sequence_length=128 \
		--set guidance.video.cfg=1 --set guidance.audio.cfg=1 >"$dumps/$1.json"
	python3 scripts/fuzz/module.py "$dumps/$1"/*.optimized.pb "$seeds/$1.pb" "$2"
}

mkdir -p $seeds
# Steps around blocks around nothing, and what each platform makes of a collective: TPUs spread a gather over fusions, permute
# beside work, and sum; CUDA wraps collectives in computations of their own; the CPU waits for each.
seed tpu_v6e_gathers v6e text-encoder tpu:v6e:2x4 fsdp-ulysses 1
seed tpu_tpu7x_ring tpu7x text-encoder tpu:tpu7x:2x2x1 ring 1
seed tpu_v5p_steps v5p denoise tpu:v5p:2x2x1 tensor 2
seed cuda_h200_steps h200 denoise cuda:h200:1x1x4 hybrid 1
seed cpu_steps - denoise cpu:4 tensor 2
python3 scripts/fuzz/loras.py

#!/usr/bin/env bash
# Attention split over two and four GPUs by cuDNN's kernel, its parts joined by its sums: scripts/gpu/ring.sh LTX2 [OUT] ["LAYOUT MESH" …].
# Prints how far each way is from one GPU's attention on the same random weights, beside another kernel's distance, and what a step of
# the published size takes by `ring` and by `sequence` on two. With ways named it prints their distances alone, at the first size, two
# at a time. Exit code 1 where one fails.
# About four minutes on two H100s, on four some more; MEMORY (0.7, of ways that are named 0.35) is the part of a card's memory for a run of the distances. Needs
# the CUDA plugin (`ltx2 plugin install cuda`, or jax's in LTX2_PJRT_PLUGIN) and python3. PLATFORM=cpu tries the script itself, without
# cuDNN and the published size.
set -euo pipefail
ltx2=$1 out=${2:-out/ring} platform=${PLATFORM:-cuda}
shift $(($# < 2 ? $# : 2))
named=("$@")
[ "${#named[@]}" -eq 0 ] || MEMORY=${MEMORY:-0.35}
mkdir -p "$out"
export LTX2_COMPILE_CACHE=$out/cache
# Multicast over NVLink takes the switch's rights; nothing here needs it.
export NCCL_NVLS_ENABLE=0
cudnn=(--set runtime.attention=cudnn) one=(--layout replicated)
if [ "$platform" = cuda ]; then
	nvidia-smi --query-gpu=index,name,driver_version --format=csv,noheader | tee "$out/card.txt"
	[ "$(wc -l < "$out/card.txt")" -ge 2 ] || { echo "ring.sh: needs two GPUs" >&2; exit 1; }
else
	cudnn=()
fi

# The toy model with a transformer of heads as wide as the published ones; its weights are drawn on the device.
model=$out/model
rm -rf "$model"
"$ltx2" init -q --preset nano "$model"
find "$model" -name '*.safetensors' -delete
python3 - "$model/transformer/config.json" <<'P'
import json, sys
config = json.load(open(sys.argv[1]))
config |= dict(num_layers=8, num_attention_heads=16, attention_head_dim=128, cross_attention_dim=2048)
config |= dict(audio_num_attention_heads=16, audio_attention_head_dim=64, audio_cross_attention_dim=1024)
json.dump(config, open(sys.argv[1], "w"))
P

# One step's latents, as a dump. Prints what went wrong instead.
latents() {
	local name=$1
	shift
	# In the script's own group of processes: what ends that ends it too.
	timeout --foreground 120 "$ltx2" generate -c nano_2_0 --model "$model" --weights random --platform "$platform" --dtype bf16 --steps 1 --seed 3 \
		--set runtime.memory_fraction="${MEMORY:-0.7}" --guidance-scale 3 -p "a lighthouse" --force -o "$out/$name.mp4" --dump "$out/$name.safetensors" "$@" \
		> "$out/$name.log" 2>&1 || { echo "$name fails: $(tail -n 1 "$out/$name.log")"; return 1; }
	grep "own operations" "$out/$name.log" || true
}

# Relative L2 of the latents of a dump from those of another.
distance() {
	"$ltx2" compare -q "$out/$1.safetensors" "$out/$2.safetensors" --json "$out/$1.json" --force > /dev/null
	python3 - "$out/$1.json" <<'P'
import json, sys
tensors = json.load(open(sys.argv[1]))["tensors"]
print(", ".join(f"{stream} {tensors['latents.' + stream]['relative_l2']:.2e}" for stream in ("video", "audio")))
P
}

# What is compared with one GPU: layout, mesh.
ways=("sequence context=2" "ring context=2" "hybrid context=2") sizes=("384 256 41" "224 96 17")
[ "$platform" = cuda ] && [ "$(wc -l < "$out/card.txt")" -ge 4 ] && ways+=("sequence cfg=2,context=2" "ring cfg=2,context=2"
	"cfg-ulysses cfg=2,context=2" "hybrid context=4" "tensor cfg=2,tensor=2")
[ "${#named[@]}" -eq 0 ] || ways=("${named[@]}") sizes=("${sizes[0]}")

# Distances at a size, whose video by one GPU is there: of another kernel, and of a layout on a mesh.
plain() {
	latents "$label-plain" "${pixels[@]}" "${one[@]}" --set runtime.attention=plain || return 1
	local far
	far=$(distance "$label-plain" "$label-one") && echo "  one GPU, XLA's operations: $far"
}
way() {
	local name=$label-$1-${2//[=,]/-} far
	latents "$name" "${pixels[@]}" --layout "$1" --mesh "$2" "${cudnn[@]}" || return 1
	far=$(distance "$name" "$label-one") && echo "  $1, $2: $far"
}
# One, or two at a time where ways are named.
run() {
	[ "${#named[@]}" -gt 0 ] || { "$@" || failed=1; return 0; }
	"$@" &
	pids+=($!)
	[ "${#pids[@]}" -lt 2 ] || wait "${pids[-2]}" || failed=1
}

# Both halves of a sequence without filling, and with some, which a mask hides.
failed=0 pids=()
for size in "${sizes[@]}"; do
	read -r width height frames <<< "$size"
	pixels=(--width "$width" --height "$height" --num-frames "$frames") label=${width}x${height}x$frames
	echo "$label: relative L2 from one GPU by cuDNN"
	latents "$label-one" "${pixels[@]}" "${one[@]}" "${cudnn[@]}"
	run plain
	# `sequence` gathers the keys of video attention; its audio meets split keys, as in every layout here.
	for each in "${ways[@]}"; do
		read -r layout mesh <<< "$each"
		[ "$size" = "224 96 17" ] && [ "$layout" != ring ] && continue
		run way "$layout" "$mesh"
	done
	[ "${#pids[@]}" -eq 0 ] || wait "${pids[-1]}" || failed=1
done

[ "$platform" = cuda ] && [ "${#named[@]}" -eq 0 ] || exit "$failed"
echo "ltx2 at 1024x576x65 on two GPUs, a denoising step:"
for layout in sequence ring; do
	"$ltx2" bench -c ltx2 --weights random --platform cuda --layout "$layout" --mesh context=2 "${cudnn[@]}" --width 1024 --height 576 \
		--num-frames 65 --programs denoise --steps 4 --runs 3 --json "$out/$layout.json" --force > "$out/$layout.log" 2>&1 ||
		{ echo "  $layout fails: $(tail -n 1 "$out/$layout.log")"; failed=1; continue; }
	python3 - "$out/$layout.json" "$layout" <<'P'
import json, sys
report = json.load(open(sys.argv[1]))
loop = report["programs"]["denoise_loop"]
print(f"  {sys.argv[2]}: {loop['median']:.4f} s (least {loop['min']:.4f}), peak {report['peak_memory_bytes'] / 2**30:.1f} GiB")
P
done
exit "$failed"

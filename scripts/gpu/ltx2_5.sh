#!/usr/bin/env bash
# LTX-2.5, distilled in two stages, and diffusers' on the same GPU, one after the other: scripts/gpu/ltx2_5.sh LTX2 OUT. Random weights;
# what it does: the whole request, its parts, both decoders; then diffusers' transformer, compiled, and diffusion decoder. Needs python3
# with torch, transformers and diffusers 0.42.1, and the CUDA plugin (`ltx2 plugin install cuda`, or jax's in LTX2_PJRT_PLUGIN).
set -euo pipefail
ltx2=$1 out=$2
here=$(dirname "$0")
mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader | tee "$out/card.txt"
bench() {
	local name=$1
	shift
	echo "== $name: $*"
	timeout "${LIMIT:-200}" "$ltx2" bench -c ltx2_5_distilled --weights random --platform cuda --runs "${RUNS:-3}" --json "$out/$name.json" --force "$@" ||
		echo "$name: failed"
}
decoder() {
	local width height frames
	IFS=x read -r width height frames <<< "$1"
	bench "decoder-$1" --width "$width" --height "$height" --num-frames "$frames" --set model.decoder=diffusion --programs diffusion-decoder
}
size=(--width 768 --height 512 --num-frames 121)
for one in 256x256x17 512x512x25 768x512x49 768x512x121; do decoder "$one"; done
timeout "${PEER_LIMIT:-200}" python3 "$here/peer_2_5.py" > "$out/diffusers.json" || echo "diffusers: failed"
cat "$out/diffusers.json"
bench conv "${size[@]}" --set model.decoder=conv --programs video-decoder
bench whole "${size[@]}" --set model.decoder=diffusion --programs end-to-end,text-encoder,denoise,refine,diffusion-decoder
decoder 1280x704x121
decoder 1920x1088x121

#!/usr/bin/env bash
# One denoising step with the blocks' weights in bf16, fp8 and int8 on the same GPU: scripts/gpu/weights.sh LTX2 OUT.
# Needs the CUDA plugin (`ltx2 plugin install cuda`, or jax's in LTX2_PJRT_PLUGIN).
set -euo pipefail
ltx2=$1 out=$2
mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader | tee "$out/card.txt"
for form in bf16 fp8 "int8 --set runtime.activations=bf16" "int8 --set runtime.activations=int8" bf16; do
	name=$(echo "$form" | tr -d ' ' | sed 's/--setruntime.activations=/-/')
	[ ! -e "$out/$name.json" ] || name=$name-again
	# shellcheck disable=SC2086
	"$ltx2" bench -c ltx2 --weights random --platform cuda --programs denoise --steps "${STEPS:-8}" --runs "${RUNS:-3}" \
		--set runtime.weights=$form --json "$out/$name.json" --force
done

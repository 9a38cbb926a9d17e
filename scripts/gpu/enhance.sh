#!/usr/bin/env bash
# Times prompt enhancement by Gemma 3 12B with random weights on one GPU: scripts/gpu/enhance.sh LTX2 OUT.
# A prompt of 512 tokens, 256 new tokens, bf16, greedy decoding without a limit of repeated n-grams. Prints median milliseconds per
# token of ltx2, of transformers' compiled generation, and of reading the weights once at the measured bandwidth.
# Needs the CUDA plugin and a python3 with torch and transformers. Flags for ltx2 can follow: --set KEY=VALUE.
set -euo pipefail
ltx2=$1 out=$2
shift 2
mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader | tee "$out/card.txt"
# The transformer is not run; with one block, its programs compile fast.
"$ltx2" bench -c ltx2 --weights random --platform cuda --layers 1 --programs prompt-enhancer --runs "${RUNS:-3}" \
    --set request.enhance_prompt=true --json "$out/ltx2.json" --force "$@"
[ -s "$out/peer.json" ] || python3 "$(dirname "$0")/enhance_peer.py" > "$out/peer.json"
python3 - "$out" <<'PYTHON'
import json, sys
out = sys.argv[1]
programs = json.load(open(f"{out}/ltx2.json"))["programs"]
peer = json.load(open(f"{out}/peer.json"))
token, prompt = (programs[f"prompt_enhancer_{name}"] for name in ("token", "prompt"))
weights = token["program"]["parameter_bytes"]
floor = weights / peer["read_bytes_per_second"]
print(f"weights {weights / 1e9:.2f} GB, read at {peer['read_bytes_per_second'] / 1e12:.2f} TB/s "
      f"(copy {peer['copy_bytes_per_second'] / 1e12:.2f} TB/s): {floor * 1e3:.2f} ms")
print(f"ltx2: {token['median'] * 1e3:.2f} ms per token ({token['median'] / floor:.2f} of the floor), "
      f"prompt {prompt['median'] * 1e3:.1f} ms, compiled in {token['program']['compile_seconds']:.0f} s")
print(f"transformers {peer['transformers']}, torch {peer['torch']}: {peer['seconds_per_token'] * 1e3:.2f} ms per token "
      f"({peer['seconds_per_token'] / floor:.2f} of the floor), prompt {peer['prompt_seconds'] * 1e3:.1f} ms")
print(f"ltx2 / transformers: {token['median'] / peer['seconds_per_token']:.2f}")
PYTHON

#!/usr/bin/env bash
# The same request in 20 processes on one GPU, ten of them with the programs of the first, ten with empty caches (programs and
# autotuning): one hash of frames and of samples, or the numbers of each.
#
#     scripts/gpu/repeat.sh LTX2 OUT [CONFIG…]     by default the toy model in bf16
set -euo pipefail
ltx2=$1 out=$2
shift 2
config=(${@:--c configs/nano.yml --dtype bf16})
mkdir -p "$out"
for n in $(seq 0 19); do
    cache=$out/warm
    [ $((n % 2)) = 0 ] || cache=$out/cold$n
    LTX2_COMPILE_CACHE=$cache "$ltx2" -q generate "${config[@]}" --platform cuda --prompt "waves" --force -o "$out/$n.mp4" > /dev/null
    [ "$cache" = "$out/warm" ] || rm -rf "$cache"
done
python3 - "$out" <<'PYTHON'
import collections, json, pathlib, sys
hashes = collections.defaultdict(list)
for n in range(20):
    sha = json.loads(pathlib.Path(sys.argv[1], f"{n}.json").read_text())["sha256"]
    hashes[sha["frames"], sha["samples"]].append(f"{n} {'cold' if n % 2 else 'warm'}")
for (frames, samples), runs in hashes.items():
    print(f"frames {frames[:16]} samples {samples[:16]}: {', '.join(runs)}")
print(f"{len(hashes)} different of 20")
sys.exit(len(hashes) > 1)
PYTHON

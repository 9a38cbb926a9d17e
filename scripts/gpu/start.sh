#!/usr/bin/env bash
# From command to finished video on one GPU: scripts/gpu/start.sh LTX2 OUT FOLDER [PRESET …]. Makes random models of the published
# sizes below FOLDER, one after the other (70 GB; give a tmpfs where the disk is smaller), and prints what a start takes, with its
# time line, beside what the machine can do. Six minutes for both presets. Needs the CUDA plugin (`ltx2 plugin install cuda`, or jax's in
# LTX2_PJRT_PLUGIN) and, for the copy's rate, python3 with torch.
set -euo pipefail
ltx2=$1 out=$2 folder=$3
shift 3
here=$(dirname "$0")
mkdir -p "$out" "$folder"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$out/card.txt"
echo "cores: $(nproc); one large copy to the device: $(python3 "$here/raw.py" copy || echo unknown)"

# Seconds of a command; its output goes to a log.
seconds() {
	local log=$1 started=$EPOCHREALTIME
	shift
	timeout 240 "$@" > "$log" 2>&1 || { echo "fails: $(tail -n 1 "$log")"; return; }
	python3 -c "print(f'{$EPOCHREALTIME - $started:.1f} s')"
}

# A figure of a run's JSON.
figure() {
	python3 - "$@" <<-'P' || echo unknown
		import json, sys
		run = json.load(open(sys.argv[1]))
		loads = [span for span in run["timeline"] if span["work"] == "load"]
		seconds = max(span["to"] for span in loads) - min(span["from"] for span in loads)
		gigabytes = sum(span["bytes"] for span in loads) / 1e9
		print({
		    "load": f"{gigabytes:.1f} GB, {gigabytes / seconds:.1f} GB/s",
		    "peak": f"{run['peak_memory_bytes'] / 2**30:.1f} GiB, parameters {run['parameter_bytes'] / 2**30:.1f}",
		    "encoding": f"{run['encoding']:.2f} s",
		}[sys.argv[2]])
	P
}

for preset in "${@:-ltx2}"; do
	model=$folder/$preset cache=$out/cache-$preset
	rm -rf "$model" "$cache"
	echo "$preset: model written in $(seconds "$out/init.log" "$ltx2" init --preset "$preset" "$model"), read by $(python3 "$here/raw.py" read "$model")"
	run=("$ltx2" generate -v -c "$preset" --model "$model" --platform cuda --width 384 --height 256 --num-frames 41 --steps 4
		-p fox --force -o "$out/$preset.mp4")
	export LTX2_COMPILE_CACHE=$cache
	for start in "nothing cached" "programs cached" "programs cached, again"; do
		name=$out/$preset-$(echo "$start" | tr -d ',' | tr ' ' -)
		took=$(seconds "$name.log" "${run[@]}" --perf-json "$name.json")
		echo "$preset, $start: $took; loaded $(figure "$name.json" load); peak $(figure "$name.json" peak)"
		sed -n '/time line/,/  write /p' "$name.log"
	done
	if [ -w /proc/sys/vm/drop_caches ] && [ "$(stat -f -c %T "$folder")" != tmpfs ]; then
		sync && echo 3 > /proc/sys/vm/drop_caches
		echo "$preset, read by $(python3 "$here/raw.py" read "$model") with a cold file cache"
		sync && echo 3 > /proc/sys/vm/drop_caches
		name=$out/$preset-cold-files
		took=$(seconds "$name.log" "${run[@]}" --perf-json "$name.json")
		echo "$preset, programs cached, a cold file cache: $took; loaded $(figure "$name.json" load)"
	fi
	rm -rf "$model"
done
name=$out/mp4
took=$(seconds "$name.log" "$ltx2" generate -c nano --platform cuda --width 768 --height 512 --num-frames 121 --steps 2 \
	-p "a red circle bounces on blue, low beeps" --force -o "$out/nano.mp4" --perf-json "$name.json")
echo "the toy model at 768x512x121: $took, of which the MP4 $(figure "$name.json" encoding)"

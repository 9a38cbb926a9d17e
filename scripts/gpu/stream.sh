#!/usr/bin/env bash
# Times and checks weights streamed from host memory, with random weights: scripts/gpu/stream.sh LTX2 OUT [ROW…].
# Needs the CUDA plugin, one GPU and about 100 GiB of host memory.
set -euo pipefail
. "$(dirname "$0")/rows.sh"
one=(--weights random --platform cuda --layout replicated --mesh data=1 --width 768 --height 512 --num-frames 121)
on=(--set runtime.stream=on)
off=(--set runtime.stream=off)
available() { awk '/MemAvailable/ {print int($2 / 1024)}' /proc/meminfo; }
# Prints exit code, seconds, peak memory and the smallest available host memory of a command.
watched() {
    local before started=$SECONDS least status=0 now
    before=$(available)
    least=$before
    "$@" &
    while kill -0 $! 2> /dev/null; do
        now=$(available)
        [ "$now" -ge "$least" ] || least=$now
        sleep 0.5
    done
    wait $! || status=$?
    echo "exit code $status, $((SECONDS - started)) s, host memory $((before - least)) MiB"
}
measure() {
    local name=$1
    shift
    case $1 in
        bench) watched "$ltx2" bench --runs "${RUNS:-3}" --programs denoise --json "$out/$name.json" --force "${one[@]}" "${@:2}" ;;
        generate) watched "$ltx2" generate -v --force -o "$out/$name.mp4" --perf-json "$out/$name.perf.json" "${one[@]}" \
            -p "a red circle bounces on blue" "${@:2}" ;;
    esac 2>&1 | grep -v DEBUG.*built
}
for model in ltx2 ltx2_3; do
    step=(bench -c "$model" --steps 4)
    row "$model-off" 1 "${step[@]}" "${off[@]}"
    row "$model-half" 1 "${step[@]}" "${on[@]}" --set runtime.resident_blocks=24
    row "$model-on" 1 "${step[@]}" "${on[@]}"
    row "$model-fp8-off" 1 "${step[@]}" "${off[@]}" --set runtime.weights=fp8
    row "$model-fp8-on" 1 "${step[@]}" "${on[@]}" --set runtime.weights=fp8
done
# Whole requests to the MP4: on the whole card, and with an allocator of 16 GB. Equal hashes in OUT/*.json: equal bits.
small=(--set runtime.memory_fraction=0.106)
row whole-off 1 generate -c ltx2 --steps 8 "${off[@]}"
row whole-on 1 generate -c ltx2 --steps 8 "${on[@]}" "${small[@]}"
row whole-auto 1 generate -c ltx2 --steps 8 "${small[@]}"
row whole-fp8 1 generate -c ltx2 --steps 8 "${on[@]}" "${small[@]}" --set runtime.weights=fp8
# A card on which not even that fits: one line, exit code 1.
row whole-none 1 generate -c ltx2 --steps 8 --set runtime.memory_fraction=0.03
# LTX-2.5 with its diffusion decoder on 24 GB.
row ltx2_5-24 1 generate -c ltx2_5_distilled --set model.decoder=diffusion --set runtime.memory_fraction=0.159 \
    --set 'runtime.tiling={overlap: 160, frame_overlap: 40}'

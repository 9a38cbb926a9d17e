#!/usr/bin/env bash
# Times and checks streamed weights and forms of layers, with random weights: scripts/gpu/stream.sh LTX2 OUT [ROW…].
# Needs the CUDA plugin, one GPU (two for rows pair-*) and 100 GiB of host memory; rows file-* and lora-* another 90 GiB in
# MODELS (default /dev/shm/ltx2), which is not removed.
set -euo pipefail
. "$(dirname "$0")/rows.sh"
one=(--platform cuda --width 768 --height 512 --num-frames 121)
place=(--weights random --layout replicated --mesh data=1)
on=(--set runtime.stream=on) off=(--set runtime.stream=off) small=(--set runtime.memory_fraction=0.106)
models=${MODELS:-/dev/shm/ltx2} programs=denoise
available() { awk '/MemAvailable/ {print int($2 / 1024)}' /proc/meminfo; }
# Prints a command's exit code and seconds, and the largest decrease of the machine's available memory meanwhile.
watched() {
    local before started=$SECONDS least status=0 now
    before=$(available) least=$before
    "$@" &
    while kill -0 $! 2> /dev/null; do
        now=$(available)
        [ "$now" -ge "$least" ] || least=$now
        sleep 0.5
    done
    wait $! || status=$?
    echo "exit code $status, $((SECONDS - started)) s, host memory $((before - least)) MiB"
}
generate() {
    watched "$ltx2" generate -v --force -o "$out/$1.mp4" --perf-json "$out/$1.perf.json" "${one[@]}" "${place[@]}" -p "a red circle bounces on blue" "${@:2}"
}
# A LoRA of 48 blocks with random elements of about 0.01: FILE RANK MODULE:OUT:IN…
lora() {
    python3 - "$@" << 'END'
import json, os, struct, sys
header, data, end, rank = {}, [], 0, int(sys.argv[2])
for block in range(48):
    for name, outer, inner in (module.split(":") for module in sys.argv[3:]):
        for side, shape in (("A", [rank, int(inner)]), ("B", [int(outer), rank])):
            data.append(bytearray(os.urandom(2 * shape[0] * shape[1])))
            data[-1][1::2] = data[-1][1::2].translate(bytes(0x3C | (byte & 0x80) for byte in range(256)))
            key, end = f"diffusion_model.transformer_blocks.{block}.{name}.lora_{side}.weight", end + len(data[-1])
            header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [end - len(data[-1]), end]}
text = json.dumps(header).encode()
open(sys.argv[1], "wb").write(struct.pack("<Q", len(text)) + text + b"".join(data))
END
}
# An LTX-2.5 model with random weights in bf16, and its transformer in int8-convrot.
files() {
    [ ! -e "$models/convrot.safetensors" ] || return 0
    "$ltx2" init --preset ltx2_5 --seed 1 "$models"
    "$ltx2" convert "$models/transformer" "$models/convrot.safetensors" --weights int8-convrot
}
# Three requests to one server: the second is larger than the others.
serve() {
    local id size server
    "$ltx2" serve -v -c ltx2 --weights random --platform cuda --listen 127.0.0.1:8123 --state "$out/$1" --warm none "${@:2}" > "$out/$1.log" 2>&1 &
    server=$!
    trap 'kill $server 2> /dev/null || true' EXIT
    until curl -sf localhost:8123/ready > /dev/null; do
        { kill -0 $server 2> /dev/null && sleep 1; } || { echo "the server ended"; tail -5 "$out/$1.log"; return 0; }
    done
    for size in 512x320 768x512 512x320; do
        id=$(curl -s localhost:8123/v1/videos -F prompt="a red circle bounces on blue" -F size=$size -F num_frames=121 -F seed=7 \
            -F 'ltx2={"sampler":{"steps":4}}' | grep -om1 'video_[0-9a-z]*' || true)
        curl -sN "localhost:8123/v1/videos/$id/events" | tail -2
        curl -s "localhost:8123/v1/videos/$id/content?variant=sidecar" | grep -A2 '"sha256"' || true
    done
    kill $server && { wait $server || true; }
    trap - EXIT
    grep -i stream "$out/$1.log" || true
}
# Interrupts a run after its first checkpoint, and resumes it.
resume() {
    rm -f "$out/$1.mp4.steps.safetensors"
    generate "$@" --checkpoint-every 2 &
    while kill -0 $! 2> /dev/null && [ ! -e "$out/$1.mp4.steps.safetensors" ]; do sleep 0.2; done
    { pkill -TERM -P $! -f "$1.mp4"; wait $!; } || true
    generate "$@" --checkpoint-every 2 --resume
}
measure() {
    local name=$1 what=$2 && shift 2
    case $what in
        bench) watched "$ltx2" bench --runs "${RUNS:-3}" --programs "$programs" --json "$out/$name.json" --force "${one[@]}" "${place[@]}" "$@" ;;
        micro) "$ltx2" bench --micro --platform cuda --runs 4 --json "$out/$name.json" --force ;;
        *) "$what" "$name" "$@" ;;
    esac 2>&1 | { grep -v 'DEBUG.*built' || true; }
}
for model in ltx2 ltx2_3; do
    step=(bench -c "$model" --steps 4)
    row "$model-off" 1 "${step[@]}" "${off[@]}"
    row "$model-half" 1 "${step[@]}" "${on[@]}" --set runtime.resident_blocks=24
    row "$model-on" 1 "${step[@]}" "${on[@]}"
    row "$model-fp8-off" 1 "${step[@]}" "${off[@]}" --set runtime.weights=fp8
    row "$model-fp8-on" 1 "${step[@]}" "${on[@]}" --set runtime.weights=fp8
done
# A LoRA of all linear layers of the blocks that is added in each step.
modules=(ff.net.0.proj:16384:4096 ff.net.2:4096:16384 audio_ff.net.0.proj:8192:2048 audio_ff.net.2:2048:8192)
for layer in attn{1,2}:4096:4096:4096 audio_attn{1,2}:2048:2048:2048 audio_to_video_attn:4096:2048:2048 video_to_audio_attn:2048:4096:2048; do
    IFS=: read -r name query context width <<< "$layer"
    modules+=("$name".to_{q:$width:$query,k:$width:$context,v:$width:$context,out.0:$query:$width})
done
if [[ "$wanted" =~ ^"  "$|" add-" ]]; then lora "$out/add.safetensors" 32 "${modules[@]}"; fi
row add-off 1 bench -c ltx2 --steps 4 "${off[@]}"
row add-on 1 bench -c ltx2 --steps 4 "${off[@]}" --set "model.loras=[{path: $out/add.safetensors, apply: add}]"
# Whole requests to the MP4: on the whole card, and with an allocator of 16 GB. Equal hashes in OUT/*.json: equal bits.
row whole-off 1 generate -c ltx2 --steps 8 "${off[@]}"
row whole-on 1 generate -c ltx2 --steps 8 "${on[@]}" "${small[@]}"
row whole-auto 1 generate -c ltx2 --steps 8 "${small[@]}"
row whole-fp8-off 1 generate -c ltx2 --steps 8 "${off[@]}" --set runtime.weights=fp8
row whole-fp8 1 generate -c ltx2 --steps 8 "${on[@]}" "${small[@]}" --set runtime.weights=fp8
row whole3-off 1 generate -c ltx2_3 --steps 4 "${off[@]}"
row whole3-on 1 generate -c ltx2_3 --steps 4 "${on[@]}" "${small[@]}"
# Forms of layers: the first command compiles, the second reads its programs from the cache. Seconds are in OUT/*.perf.json.
short() {
    watched "$ltx2" generate --force -o "$out/$1.mp4" --perf-json "$out/$1.perf.json" --platform cuda "${place[@]}" -c ltx2_3 -p ball \
        --steps 4 --width 384 --height 256 --num-frames 41 "${@:2}"
}
for layers in unrolled loop auto; do
    cache=(--set runtime.layers=$layers --set "runtime.compile_cache=$out/cache-$layers")
    row "layers-$layers-compile" 1 short "${cache[@]}"
    row "layers-$layers-read" 1 short "${cache[@]}"
done
# A card on which not even that fits: one line, exit code 1.
row whole-none 1 generate -c ltx2 --steps 8 --set runtime.memory_fraction=0.03
# LTX-2.5 with its diffusion decoder on 24 GB.
row ltx2_5-24 1 generate -c ltx2_5_distilled --set model.decoder=diffusion --set runtime.memory_fraction=0.159 \
    --set 'runtime.tiling={overlap: 160, frame_overlap: 40}'
# A run that is interrupted and resumed; a server.
row resume 1 resume -c ltx2 --steps 8 "${on[@]}"
row serve 1 serve --set runtime.memory_fraction=0.106
# A model in files, also with a transformer in int8-convrot, which keeps its bytes.
if [[ "$wanted" =~ ^"  "$|" file-"|" lora-" ]]; then files; fi
distilled=(-c ltx2_5_distilled --weights file)
place=(--layout replicated --mesh data=1)
programs=refine
row file-off 1 bench "${distilled[@]}" -m "$models" "${off[@]}"
row file-on 1 bench "${distilled[@]}" -m "$models" "${on[@]}"
convrot=("${distilled[@]}" -m "$models/convrot.safetensors" --set runtime.weights=int8-convrot)
for part in text_encoder tokenizer connectors vae audio_vae vocoder upsampler; do
    convrot+=(--set "model.$part=$models/${part/upsampler/latent_upsampler}")
done
row file-convrot-load 1 bench "${convrot[@]}" "${off[@]}"
row file-convrot-off 1 generate "${convrot[@]}" "${off[@]}"
row file-convrot-on 1 generate "${convrot[@]}" "${on[@]}"
# Two passes, of which only the second has a LoRA.
if [[ "$wanted" =~ ^"  "$|" lora-" ]]; then lora "$out/lora.safetensors" 16 attn1.to_q:4096:4096; fi
pass=("${distilled[@]}" -m "$models" --set "model.loras=[{path: $out/lora.safetensors, stages: [2]}]")
row lora-off 1 generate "${pass[@]}" "${off[@]}"
row lora-on 1 generate "${pass[@]}" "${on[@]}"
programs=denoise
# Two GPUs, each of which streams its shard.
for layout in tensor fsdp-ulysses; do
    place=(--weights random --layout $layout)
    row "pair-$layout-off" 2 bench -c ltx2 --steps 4 "${off[@]}"
    row "pair-$layout-on" 2 bench -c ltx2 --steps 4 "${on[@]}"
done
row micro 1 micro

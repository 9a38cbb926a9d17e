#!/usr/bin/env bash
# Times requests at the published size with random weights: scripts/gpu/pipelines.sh LTX2 OUT [ROW…].
# Rows that need more GPUs than this machine has are skipped with a message. Needs the CUDA plugin.
set -euo pipefail
. "$(dirname "$0")/rows.sh"
measure() {
    local name=$1
    shift
    timeout "${LIMIT:-600}" "$ltx2" bench --weights random --platform cuda --runs "${RUNS:-3}" --json "$out/$name.json" --force \
        "$@" || echo "$name: failed with exit code $?"
}
size=(--width 768 --height 512 --num-frames 121)
end=(--programs end-to-end,text-encoder,prepare,denoise,upsampler,refine,video-decoder)
# LTX-2.0, 40 + 3 steps with a negative prompt. SGLang published 6.9 s on two H200s.
row two_stage_cfg 2 -c ltx2_two_stage "${size[@]}" --layout cfg --mesh cfg=2 "${end[@]}"
row two_stage_sequence 2 -c ltx2_two_stage "${size[@]}" --layout sequence --mesh context=2 "${end[@]}"
# LTX-2.3, 30 + 3 steps with four branches. SGLang published 8.2 s on four H200s.
row ltx2_3_cfg 4 -c ltx2_3_two_stage "${size[@]}" --layout cfg --mesh cfg=4 "${end[@]}"
# On cards that cannot hold the text encoder beside the transformer.
row ltx2_3_cfg_encoder 4 -c ltx2_3_two_stage "${size[@]}" --layout "$(dirname "$0")/cfg-encoder.yml" --mesh cfg=4 "${end[@]}"
row ltx2_3_sequence 4 -c ltx2_3_two_stage "${size[@]}" --layout sequence --mesh cfg=2,context=2 "${end[@]}"
row ltx2_3_tensor 4 -c ltx2_3_two_stage "${size[@]}" --layout tensor --mesh tensor=4 "${end[@]}"
row ltx2_3_tensor_two 2 -c ltx2_3_two_stage "${size[@]}" --layout tensor --mesh tensor=2 "${end[@]}"
row ltx2_3_tensor_loops 2 -c ltx2_3_two_stage "${size[@]}" --layout tensor --mesh tensor="$gpus" --steps 4 --programs denoise,refine
row ltx2_3_sequence_large 4 -c ltx2_3_two_stage --layout sequence --mesh cfg=2,context=2 "${end[@]}"
row ltx2_3_decoder 1 -c ltx2_3 --layout replicated --mesh data=1 --programs video-decoder,vocoder
# LTX-2.5, distilled: the request with its parts, both decoders.
row ltx2_5 1 -c ltx2_5_distilled "${size[@]}" --set model.decoder=diffusion \
    --programs end-to-end,text-encoder,denoise,refine,diffusion-decoder
row ltx2_5_conv 1 -c ltx2_5_distilled "${size[@]}" --set model.decoder=conv --programs video-decoder
row ltx2_5_large 1 -c ltx2_5_distilled --width 1920 --height 1088 --num-frames 121 --set model.decoder=diffusion --programs diffusion-decoder
# One step with the blocks' weights in bf16 and in 8 bits.
step=(-c ltx2 --layout replicated --mesh data=1 --programs denoise --steps 8)
row bf16 1 "${step[@]}"
row fp8 1 "${step[@]}" --set runtime.weights=fp8
row int8-int8 1 "${step[@]}" --set runtime.weights=int8 --set runtime.activations=int8
row int8-bf16 1 "${step[@]}" --set runtime.weights=int8 --set runtime.activations=bf16
# The same for LTX-2.5 at 768x512 (the second pass), also with int8-convrot weights.
step=(-c ltx2_5_distilled "${size[@]}" --layout replicated --mesh data=1 --programs refine)
row ltx2_5-bf16 1 "${step[@]}"
for form in int8 int8-convrot; do
    row "ltx2_5-$form" 1 "${step[@]}" --set "runtime.weights=$form" --set runtime.activations=int8
done
# One step by layout.
step=(-c ltx2 "${size[@]}" --programs denoise --steps 4)
row step_ring 4 "${step[@]}" --layout ring --mesh cfg=2,context=2
row step_sequence 4 "${step[@]}" --layout sequence --mesh cfg=2,context=2
row step_cfg_ulysses 4 "${step[@]}" --layout cfg-ulysses --mesh cfg=2,context=2
row step_hybrid 4 "${step[@]}" --layout hybrid --mesh context=4
row step_tensor 4 "${step[@]}" --layout tensor --mesh cfg=2,tensor=2
# Pairs of techniques: benchmarks/ablations.md. `ltx2 compile --target cuda:h200:1x1x2` shows their collectives.
row ffn_gathered 2 "${step[@]}" --layout tensor-gathered-ffn --mesh tensor=2
row ffn_reduced 2 "${step[@]}" --layout tensor --mesh tensor=2
row rope_gathered 2 "${step[@]}" --layout rope-gathered --mesh context=2
row rope_local 2 "${step[@]}" --layout sequence --mesh context=2
encoder=(-c ltx2 --layout replicated --mesh data=1 --programs text-encoder)
row one_prompt 1 "${encoder[@]}" --guidance-scale 1
row two_prompts 1 "${encoder[@]}"
# Conditioned requests, next to one without conditions. Their inputs are made by the toy model.
clip=$out/clip sound=$out/clip.wav
given() {
    if [ ! -d "$clip" ] && [[ "$wanted" == "  " || "$wanted" == *" $1 "* ]]; then
        "$ltx2" generate -q -c nano --platform cuda "${size[@]}" --steps 2 -p "a red circle bounces on blue, low beeps" --force \
            -o "$out/clip.mp4" --save-frames "$clip" --save-audio "$sound"
    fi
    row "$@" --steps 8 --programs end-to-end,denoise
}
one=(-c ltx2 --layout replicated --mesh data=1)
given plain 1 "${one[@]}" "${size[@]}"
given audio_to_video 1 "${one[@]}" "${size[@]}" --pipeline audio_to_video --audio "$sound"
given retake 1 "${one[@]}" --video "$clip" --retake 2 4
given extend 1 "${one[@]}" --video "$clip" --extend 3
given image 1 "${one[@]}" "${size[@]}" --pipeline keyframes --image "$clip/frame_00000.png" 0 1 --image "$clip/frame_00120.png" 60 0.8
given reference 1 "${one[@]}" "${size[@]}" --pipeline text_to_video --reference-video "$clip" \
    --set conditioning.reference_downscale_factor=1

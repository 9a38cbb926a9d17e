#!/usr/bin/env bash
# diffusers 0.42.1 and ltx-pipelines 1.0.0 (PyAV 18.1.0): `encode_video` truncates the frame rate to an integer. Both packages
# pass it the frame rate of the request, a float that the model's positions and the length of the audio are computed from. At
# 23.976 frames a second the video therefore becomes 4 % longer than its audio, which drifts by 2.5 s a minute.
# Seen on 2026-11-29, with 480 frames and 20.02 s of silence, which belong to 24000/1001 frames a second:
#   diffusers: 23 frames a second, video 20.87 s, audio 20.02 s
#   ltx-pipelines: 23 frames a second, video 20.87 s, audio 20.02 s
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'diffusers==0.42.1' 'torch==2.15.0' 'numpy==2.4.6' 'av==18.1.0' 'tqdm' \
    'einops==0.8.2' 'scipy==1.17.1' 'transformers==5.23.0' 'accelerate==1.15.0'
"$folder/venv/bin/pip" install --quiet --no-deps 'ltx-core==1.0.0' 'ltx-pipelines==1.0.0'
seen=$(cd "$folder" && venv/bin/python - 2> log <<'PYTHON'
import sys
from unittest.mock import MagicMock

import av
import torch
import transformers.modeling_utils
from diffusers.utils import encode_video as of_diffusers

# ltx-pipelines imports torchaudio for its networks, which do not run here.
for name in ("torchaudio", "torchaudio.functional", "torchaudio.transforms"):
    sys.modules[name] = MagicMock()
from ltx_core.types import Audio
from ltx_pipelines.utils.media_io import encode_video as of_lightricks

frames, rate, hertz = 480, 24000 / 1001, 48000
video = torch.zeros(frames, 32, 32, 3, dtype=torch.uint8)
sound = torch.zeros(2, round(frames / rate * hertz))
of_diffusers(video, fps=rate, audio=sound, audio_sample_rate=hertz, output_path="diffusers.mp4")
audio = Audio(waveform=sound, sampling_rate=hertz)
of_lightricks(video=video, fps=rate, audio=audio, output_path="ltx-pipelines.mp4", video_chunks_number=1)
for name in ("diffusers", "ltx-pipelines"):
    with av.open(f"{name}.mp4") as file:
        seconds = [float(track.duration * track.time_base) for track in (file.streams.video[0], file.streams.audio[0])]
        rate = file.streams.video[0].average_rate
    print(f"{name}: {rate} frames a second, video {seconds[0]:.2f} s, audio {seconds[1]:.2f} s")
PYTHON
) || { cat "$folder/log"; exit 1; }
echo "$seen"
[ "$seen" = "diffusers: 23 frames a second, video 20.87 s, audio 20.02 s
ltx-pipelines: 23 frames a second, video 20.87 s, audio 20.02 s" ]

"""Writes tests/fixtures/latents/latents.json: shapes, packing, normalisation and token bounds by diffusers.

Tensors are stored as sha256 of their float32 bytes, small ones also as bits. The tests repeat the random inputs."""

import diffusers
import torch
from diffusers import LTX2Pipeline
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed

from common import FIXTURES, float_bits, write_json

SEED = 7


def digest(tensor):
    bits, sha256 = float_bits(tensor)
    return {"shape": list(tensor.shape), "sha256": sha256, "bits": bits.tolist() if bits.size <= 24 else None}


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(SEED))


def packed(shape, kind="", grid=(), **patches):
    latents = randn(*shape)
    tokens = getattr(LTX2Pipeline, f"_pack_{kind}latents")(latents, *patches.values())
    assert torch.equal(getattr(LTX2Pipeline, f"_unpack_{kind}latents")(tokens, *grid, *patches.values()), latents)
    return {"shape": shape, **patches, "tokens": digest(tokens)}


def video(shape, patch, patch_t):
    grid = (shape[2] // patch_t, shape[3] // patch, shape[4] // patch)
    return packed(shape, grid=grid, patch_size=patch, patch_size_t=patch_t)


def normalised(shape, scaling_factor):
    axis, kind, more = (1, "", [scaling_factor]) if len(shape) == 5 else (2, "audio_", [])
    mean, std = randn(2, shape[axis])
    made = {"shape": shape, "axis": axis, "scaling_factor": scaling_factor}
    for name in ("normalize", "denormalize"):
        change = getattr(LTX2Pipeline, f"_{name}_{kind}latents")
        made[f"{name}d"] = digest(change(randn(*shape), mean, std.abs() + 0.5, *more))
    return made


def video_coords(shape, fps, patch=1, patch_t=1, scale=(8, 32, 32), offset=1):
    meta = {"patch_size": patch, "patch_size_t": patch_t, "scale_factors": scale, "causal_offset": offset}
    coords = LTX2AudioVideoRotaryPosEmbed(12, modality="video", **meta).prepare_video_coords(*shape, device="cpu", fps=fps)
    return {"latents": shape, "fps": fps, **meta, "coords": digest(coords)}


def audio_coords(batch, length, rate=16000, hop=160, scale=4, patch_t=1, offset=1):
    rates, patches = {"sampling_rate": rate, "hop_length": hop}, {"patch_size_t": patch_t, "causal_offset": offset}
    rope = LTX2AudioVideoRotaryPosEmbed(12, modality="audio", scale_factors=[scale], **rates, **patches)
    coords = digest(rope.prepare_audio_coords(batch, length, device="cpu"))
    return {"batch": batch, "length": length, **rates, "scale_factor": scale, **patches, "coords": coords}


def audio_length(num_frames, fps, rate=16000, hop=160, ratio=4):
    # The pipeline's expression; Python rounds ties to even.
    length = round(num_frames / fps * (rate / hop / float(ratio)))
    rates = {"sampling_rate": rate, "hop_length": hop, "temporal_compression": ratio}
    return {"num_frames": num_frames, "frame_rate": fps, **rates, "length": length}


def latents():
    data = {
        "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__}, "seed": SEED,
        "video": [video([1, 4, 3, 2, 5], 1, 1), video([2, 3, 4, 6, 4], 2, 2), video([1, 2, 3, 2, 4], 2, 1)],
        "audio": [packed(shape, "audio_", shape[2:]) for shape in ([1, 2, 5, 2], [2, 8, 7, 16])],
        "statistics": [normalised([2, 6, 3, 2, 5], 1.0), normalised([1, 4, 1, 3, 3], 0.7), normalised([2, 9, 10], 1.0)],
        "video_coords": [
            video_coords([1, 2, 2, 1], 24.0), video_coords([1, 16, 16, 24], 24.0), video_coords([2, 5, 3, 7], 25),
            video_coords([1, 9, 4, 4], 29.97, 2, 2), video_coords([1, 4, 2, 3], 23.976, scale=(4, 16, 8), offset=0),
        ],
        "audio_coords": [
            audio_coords(1, 4), audio_coords(1, 126), audio_coords(2, 33, 24000, 256, 8), audio_coords(1, 7, 44100, 441, 4, 2, 0),
        ],
        "audio_length": [audio_length(*request) for request in (
            (121, 24), (121, 25), (9, 24), (1, 24), (257, 29.97), (3, 50), (5, 50), (7, 50), (25, 50), (121, 23.976), (33, 60),
            (97, 24, 24000, 256, 8), (5, 25, 16000, 160, 2),
        )],
    }
    write_json(FIXTURES / "latents" / "latents.json", data, ('{"shape":[', '{"latents"', '{"batch"', '{"num_frames"'))

"""Writes the transformer: RoPE tables, timestep embedding, one block, the complete network."""

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed

import models
from common import rand, randn, spread, write_case as write


def inputs_for(config, *, seed, batch, frames, height, width, audio_frames, text, per_token=False, masked=False, marked=False):
    projected = config.get("use_prompt_embeddings", True)
    sigma, tokens, values = 50 + 900 * rand(seed, "sigma", batch), frames * height * width, {}
    for prefix, count in (("", tokens), ("audio_", audio_frames)):
        context = config["caption_channels"] if projected else config[f"{prefix}cross_attention_dim"]
        for name, *shape in (("hidden_states", count, config[f"{prefix}in_channels"]), ("encoder_hidden_states", text, context)):
            values[f"{prefix}{name}"] = randn(seed, f"{prefix}{name}", batch, *shape)
    values |= {"timestep": sigma.clone(), "sigma": sigma}
    if per_token:
        values["timestep"] = sigma[:, None] * (rand(seed, "mask", batch, tokens) > 0.4).float()
        values["audio_timestep"] = sigma[:, None] * rand(seed, "audio_mask", batch, audio_frames)
        values["audio_sigma"] = 50 + 900 * rand(seed, "audio_sigma", batch)
    if masked:
        mask = torch.ones(batch, text, dtype=torch.int64)
        mask[0, : text // 3] = 0
        mask[-1, -2:] = 0
        values |= {"encoder_attention_mask": mask, "audio_encoder_attention_mask": mask.flip(1)}
    if marked:
        values["video_keyframes_mask"] = torch.zeros(batch, tokens, 1)
        values["video_keyframes_mask"][:, : height * width] = 1
    return values


def scalars_for(*, frames, height, width, audio_frames, fps=24.0, **more):
    return {"num_frames": frames, "height": height, "width": width, "fps": fps, "audio_num_frames": audio_frames, **more}


def run(model, values, scalars):
    arguments = {("spatio_temporal_guidance_blocks" if k == "stg_blocks" else k): v for k, v in scalars.items()}
    return dict(zip(("video", "audio"), model(**values, **arguments, return_dict=False)))


_SHAPE_1 = dict(frames=2, height=3, width=5, audio_frames=7)
_SHAPE_2 = dict(frames=1, height=2, width=3, audio_frames=3)
_SHAPE_3 = dict(frames=3, height=1, width=3, audio_frames=11)

_CASES = [
    # seed, case, model, batch, shape, text, options of the inputs, scalars
    (7, "tiny_a", "tiny_a", 1, _SHAPE_1, 16, {}, {}),
    (8, "tiny_a_batch_masked", "tiny_a", 2, _SHAPE_3, 9, {"masked": True}, {"fps": 25.0}),
    (9, "tiny_a_one_frame", "tiny_a", 1, _SHAPE_2, 8, {}, {}),
    (10, "tiny_a_per_token", "tiny_a", 2, _SHAPE_1, 8, {"per_token": True}, {"use_cross_timestep": False}),
    (11, "tiny_a_cross_timestep", "tiny_a", 2, _SHAPE_1, 8, {"per_token": True}, {"use_cross_timestep": True}),
    (12, "tiny_a_isolated", "tiny_a", 1, _SHAPE_1, 8, {}, {"isolate_modalities": True}),
    (14, "tiny_b", "tiny_b", 1, _SHAPE_1, 12, {}, {"fps": 12.5}),
    (15, "tiny_b_per_token_masked", "tiny_b", 2, _SHAPE_3, 7, {"per_token": True, "masked": True}, {}),
    (16, "interleaved", "dit_interleaved", 2, _SHAPE_1, 8, {}, {}),
    (17, "interleaved_per_token", "dit_interleaved", 1, _SHAPE_3, 5, {"per_token": True}, {"use_cross_timestep": True}),
    (18, "perturbed_off", "dit_perturbed", 1, _SHAPE_1, 6, {}, {}),
    (19, "perturbed_blocks", "dit_perturbed", 1, _SHAPE_1, 6, {}, {"stg_blocks": [0, 2]}),
    (20, "perturbed_partial", "dit_perturbed", 2, _SHAPE_3, 6, {}, {"stg_blocks": [1]}),
    (21, "tiny_2_3", "tiny_2_3", 1, _SHAPE_1, 16, {}, {}),
    (22, "tiny_2_3_per_token", "tiny_2_3", 2, _SHAPE_3, 8, {"per_token": True}, {"use_cross_timestep": True}),
    (23, "tiny_2_3_perturbed", "tiny_2_3", 1, _SHAPE_2, 8, {}, {"stg_blocks": [1]}),
    (24, "tiny_2_3_isolated", "tiny_2_3", 2, _SHAPE_2, 5, {"masked": True}, {"isolate_modalities": True}),
    (24, "tiny_v2_5", "dit_2_5", 1, _SHAPE_1, 8, {"marked": True}, {"use_cross_timestep": True}),
    (25, "tiny_v2_5_unmarked", "dit_2_5", 2, _SHAPE_2, 5, {"per_token": True}, {}),
    (26, "tiny_v2_5_fixed_text", "dit_2_5_fixed_text", 2, _SHAPE_3, 7, {"marked": True, "masked": True}, {"stg_blocks": [1]}),
    (27, "tiny_v2_5_audio_bias", "dit_2_5_audio_bias", 1, _SHAPE_1, 6, {"marked": True, "per_token": True}, {}),
]


def transformer():
    """Writes the complete network; `bf16_spread.*` is the distance of its bfloat16 run from its float32 run."""
    for seed, case, name, batch, shape, text, options, more in _CASES:
        values = inputs_for(models.config(name, "transformer"), seed=seed, batch=batch, text=text, **shape, **options)
        if case == "perturbed_partial":
            values["perturbation_mask"] = torch.tensor([1.0, 0.0])
        scalars = scalars_for(**shape, **more)
        outputs = run(models.load(name, "transformer"), values, scalars)
        # The reference keeps these in float32.
        kept = lambda key, value: key.endswith(("timestep", "sigma", "coords")) or not value.is_floating_point()
        half = {key: value if kept(key, value) else value.bfloat16() for key, value in values.items()}
        half = run(models.load(name, "transformer", torch.bfloat16), half, scalars)
        write("transformer", case, values, outputs, model=name, seed=seed, scalars=scalars, extra=spread(half, outputs))
    _explicit_coords()
    _generated_keyframes()


def _explicit_coords():
    """Passes coordinates explicitly, shifted in time like those of appended tokens."""
    name, shape = "tiny_a", _SHAPE_2
    model = models.load(name, "transformer")
    values = inputs_for(models.config(name, "transformer"), seed=99, batch=1, text=8, **shape)
    coords = model.rope.prepare_video_coords(1, shape["frames"], shape["height"], shape["width"], "cpu", fps=24.0)
    coords[:, 0] += 1.25
    values["video_coords"] = coords
    values["audio_coords"] = model.audio_rope.prepare_audio_coords(1, shape["audio_frames"], "cpu", shift=2)
    write("transformer", "tiny_a_coords", values, run(model, values, {}), model=name, seed=99)


def _generated_keyframes():
    """Appends keyframes to generate: each at the time of one frame, marked like the first frame."""
    name, shape, fps = "dit_2_5", _SHAPE_1, 24.0
    size = shape["height"] * shape["width"]
    model, own = models.load(name, "transformer"), shape["frames"] * size
    values = inputs_for(models.config(name, "transformer"), seed=98, batch=1, text=6, marked=True, **{**shape, "frames": 4})
    coords = model.rope.prepare_video_coords(1, shape["frames"], shape["height"], shape["width"], "cpu", fps=fps)
    slots = [coords[:, :, :size].clone() for _ in range(2)]
    for frame, slot in zip((3, 8), slots):
        slot[:, 0] = torch.tensor([frame, frame + 1]) / fps
    values["video_coords"] = torch.cat([coords, *slots], 2)
    values["video_keyframes_mask"][:, own:] = 1
    values["audio_coords"] = model.audio_rope.prepare_audio_coords(1, shape["audio_frames"], "cpu")
    write("transformer", "tiny_v2_5_slots", values, run(model, values, {}), model=name, seed=98)


def block():
    shapes = {"tiny_a": (_SHAPE_2, False), "tiny_b": (_SHAPE_3, True), "tiny_2_3": (_SHAPE_2, True)}
    for name, (shape, per_token) in shapes.items():
        model, inputs, outputs = models.load(name, "transformer"), {}, {}

        def keep(_module, _arguments, given, made, inputs=inputs, outputs=outputs):
            inputs |= {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
            for key in (key for key, value in given.items() if isinstance(value, tuple)):
                inputs[f"{key}.cos"], inputs[f"{key}.sin"] = given[key]
            outputs |= zip(("video", "audio"), made)

        model.transformer_blocks[0].register_forward_hook(keep, with_kwargs=True)
        values = inputs_for(models.config(name, "transformer"), seed=41, batch=1, text=6, per_token=per_token, **shape)
        run(model, values, scalars_for(**shape))
        write("block", name, inputs, outputs, model=name, seed=41, scalars={"block": 0})


def adaln():
    for name, seed in models.WHOLE.items():
        model = models.load(name, "transformer")
        timestep = torch.tensor([0.0, 0.1, 1.0, 37.5, 421.875, 994.957, 1000.0])
        outputs = {"sinusoid": model.time_embed.emb.time_proj(timestep)}
        for part in ("time_embed", "audio_time_embed", "av_cross_attn_video_a2v_gate", "av_cross_attn_audio_scale_shift"):
            rows, embedded = getattr(model, part)(timestep, batch_size=len(timestep), hidden_dtype=torch.float32)
            outputs |= {part: rows, f"{part}.embedded": embedded}
        write("adaln", name, {"timestep": timestep}, outputs, model=name, seed=seed)


_VIDEO, _AUDIO = dict(modality="video", rope_type="split"), dict(modality="audio", rope_type="split", scale_factors=(4,))
_INTERLEAVED, _SINGLE = {"rope_type": "interleaved"}, {"double_precision": False}
# dim, heads, axes and the remaining arguments of one table.
_TABLES = {
    "video_split": dict(_VIDEO, dim=32, num_attention_heads=2),
    "video_split_padded": dict(_VIDEO, dim=40, num_attention_heads=2, base_num_frames=16),
    "video_split_single": dict(
        _VIDEO, dim=48, num_attention_heads=4, **_SINGLE, theta=5000.0, base_height=1024, base_width=512,
        scale_factors=(4, 16, 16),
    ),
    "video_interleaved": dict(_VIDEO, dim=16, num_attention_heads=2, **_INTERLEAVED),
    "video_interleaved_single": dict(_VIDEO, dim=40, num_attention_heads=2, **_INTERLEAVED, **_SINGLE, causal_offset=0),
    "video_wide": dict(_VIDEO, dim=512, num_attention_heads=4),
    "audio_split": dict(_AUDIO, dim=64, num_attention_heads=2),
    "audio_interleaved": dict(
        _AUDIO, dim=24, num_attention_heads=2, **_INTERLEAVED, **_SINGLE, sampling_rate=8000, hop_length=100, base_num_frames=24
    ),
    # Cross-modal tables use only the time axis.
    "cross_video": dict(_VIDEO, dim=64, num_attention_heads=4, cross=True),
    "cross_audio": dict(_AUDIO, dim=64, num_attention_heads=2, cross=True),
}


def rope():
    for case, config in _TABLES.items():
        cross = config.pop("cross", False)
        table, scalars = LTX2AudioVideoRotaryPosEmbed(**config), {**config, "cross": cross}
        if config["modality"] == "video":
            size = dict(num_frames=3, height=2, width=3) if case != "video_wide" else dict(num_frames=2, height=1, width=2)
            coords = table.prepare_video_coords(1, device="cpu", fps=24.0, **size)
            scalars.update(size, fps=24.0)
        else:
            coords = table.prepare_audio_coords(1, 7, "cpu")
            scalars.update(audio_num_frames=7)
        outputs = dict(zip(("cos", "sin"), table(coords[:, 0:1] if cross else coords)))
        write("rope", case, {"coords": coords}, outputs, scalars=scalars)
    real = dict(_VIDEO, dim=4096, num_attention_heads=32)
    axes = [[0.0, 1 / 24], [4.7083333, 5.0416665]], [[480.0, 512.0], [992.0, 1024.0]], [[0.0, 32.0], [736.0, 768.0]]
    coords = torch.tensor([axes])
    outputs = dict(zip(("cos", "sin"), LTX2AudioVideoRotaryPosEmbed(**real)(coords)))
    write("rope", "real_width", {"coords": coords}, outputs, scalars=dict(real, cross=False))

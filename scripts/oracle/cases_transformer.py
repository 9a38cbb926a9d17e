"""Writes the transformer: RoPE tables, timestep embedding, one block, the complete network."""

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed

import models
from common import rand, randn, relative_l2, show, write_case

_SEED = 7


def inputs_for(config, *, seed, batch, frames, height, width, audio_frames, text, per_token=False, masked=False,
               marked=False):
    """Returns random arguments of the transformer's forward."""
    in_channels, audio_in = config["in_channels"], config["audio_in_channels"]
    projected = config.get("use_prompt_embeddings", True)
    text_width = config["caption_channels"] if projected else config["cross_attention_dim"]
    audio_text_width = config["caption_channels"] if projected else config["audio_cross_attention_dim"]
    tokens = frames * height * width
    sigma = 50 + 900 * rand(seed, "sigma", batch)
    values = {
        "hidden_states": randn(seed, "hidden_states", batch, tokens, in_channels),
        "audio_hidden_states": randn(seed, "audio_hidden_states", batch, audio_frames, audio_in),
        "encoder_hidden_states": randn(seed, "encoder_hidden_states", batch, text, text_width),
        "audio_encoder_hidden_states": randn(seed, "audio_encoder_hidden_states", batch, text, audio_text_width),
        "timestep": sigma.clone(),
        "sigma": sigma,
    }
    if per_token:
        values["timestep"] = sigma[:, None] * (rand(seed, "mask", batch, tokens) > 0.4).float()
        values["audio_timestep"] = sigma[:, None] * rand(seed, "audio_mask", batch, audio_frames)
        values["audio_sigma"] = 50 + 900 * rand(seed, "audio_sigma", batch)
    if masked:
        mask = torch.ones(batch, text, dtype=torch.int64)
        mask[0, : text // 3] = 0
        mask[-1, -2:] = 0
        values["encoder_attention_mask"] = mask
        values["audio_encoder_attention_mask"] = mask.flip(1).contiguous()
    if marked:
        mask = torch.zeros(batch, tokens, 1)
        mask[:, : height * width] = 1
        values["video_keyframes_mask"] = mask
    return values


def scalars_for(*, frames, height, width, audio_frames, fps=24.0, **more):
    """Returns the non-tensor arguments by the names that ltx2 uses."""
    return {
        "num_frames": frames, "height": height, "width": width, "fps": fps, "audio_num_frames": audio_frames, **more
    }


def run(model, values, scalars):
    arguments = dict(scalars)
    if "stg_blocks" in arguments:
        arguments["spatio_temporal_guidance_blocks"] = arguments.pop("stg_blocks")
    video, audio = model(**values, **arguments, return_dict=False)
    return {"video": video, "audio": audio}


def _cast(values, dtype):
    """Casts arguments to bfloat16 except those that the reference keeps in float32."""
    keep = ("timestep", "audio_timestep", "sigma", "audio_sigma", "video_coords", "audio_coords")
    return {k: v.to(dtype) if v.is_floating_point() and k not in keep else v for k, v in values.items()}


_SHAPE_1 = dict(frames=2, height=3, width=5, audio_frames=7)
_SHAPE_2 = dict(frames=1, height=2, width=3, audio_frames=3)
_SHAPE_3 = dict(frames=3, height=1, width=3, audio_frames=11)

_CASES = [
    # case, model, batch, shape, text, options of the inputs, scalars
    ("tiny_a", "tiny_a", 1, _SHAPE_1, 16, {}, {}),
    ("tiny_a_batch_masked", "tiny_a", 2, _SHAPE_3, 9, {"masked": True}, {"fps": 25.0}),
    ("tiny_a_one_frame", "tiny_a", 1, _SHAPE_2, 8, {}, {}),
    ("tiny_a_per_token", "tiny_a", 2, _SHAPE_1, 8, {"per_token": True}, {"use_cross_timestep": False}),
    ("tiny_a_cross_timestep", "tiny_a", 2, _SHAPE_1, 8, {"per_token": True}, {"use_cross_timestep": True}),
    ("tiny_a_isolated", "tiny_a", 1, _SHAPE_1, 8, {}, {"isolate_modalities": True}),
    ("tiny_b", "tiny_b", 1, _SHAPE_1, 12, {}, {"fps": 12.5}),
    ("tiny_b_per_token_masked", "tiny_b", 2, _SHAPE_3, 7, {"per_token": True, "masked": True}, {}),
    ("interleaved", "dit_interleaved", 2, _SHAPE_1, 8, {}, {}),
    ("interleaved_per_token", "dit_interleaved", 1, _SHAPE_3, 5, {"per_token": True}, {"use_cross_timestep": True}),
    ("perturbed_off", "dit_perturbed", 1, _SHAPE_1, 6, {}, {}),
    ("perturbed_blocks", "dit_perturbed", 1, _SHAPE_1, 6, {}, {"stg_blocks": [0, 2]}),
    ("perturbed_partial", "dit_perturbed", 2, _SHAPE_3, 6, {"partial": True}, {"stg_blocks": [1]}),
    ("tiny_2_3", "tiny_2_3", 1, _SHAPE_1, 16, {}, {}),
    ("tiny_2_3_per_token", "tiny_2_3", 2, _SHAPE_3, 8, {"per_token": True}, {"use_cross_timestep": True}),
    ("tiny_2_3_perturbed", "tiny_2_3", 1, _SHAPE_2, 8, {}, {"stg_blocks": [1]}),
    ("tiny_2_3_isolated", "tiny_2_3", 2, _SHAPE_2, 5, {"masked": True}, {"isolate_modalities": True}),
    ("tiny_v2_5", "dit_2_5", 1, _SHAPE_1, 8, {"marked": True}, {"use_cross_timestep": True}),
    ("tiny_v2_5_unmarked", "dit_2_5", 2, _SHAPE_2, 5, {"per_token": True}, {}),
    ("tiny_v2_5_fixed_text", "dit_2_5_fixed_text", 2, _SHAPE_3, 7, {"marked": True, "masked": True}, {"stg_blocks": [1]}),
    ("tiny_v2_5_audio_bias", "dit_2_5_audio_bias", 1, _SHAPE_1, 6, {"marked": True, "per_token": True}, {}),
]


def transformer():
    """Writes the complete network; `bf16_spread.*` is the distance of its bfloat16 run from its float32 run."""
    for index, (case, name, batch, shape, text, options, more) in enumerate(_CASES):
        seed, options = _SEED + index, dict(options)
        partial = options.pop("partial", False)
        values = inputs_for(models.TRANSFORMER[name], seed=seed, batch=batch, text=text, **shape, **options)
        if partial:
            values["perturbation_mask"] = torch.tensor([1.0, 0.0])
        scalars = scalars_for(**shape, **more)
        outputs = run(models.load(name, "transformer"), values, scalars)
        half = run(models.load(name, "transformer", torch.bfloat16), _cast(values, torch.bfloat16), scalars)
        spread = {f"bf16_spread.{k}": f"{relative_l2(half[k], outputs[k]):.6f}" for k in outputs}
        write_case(
            "transformer", case, values, outputs, script=__file__, model=name, seed=seed, scalars=scalars, extra=spread
        )
        show(f"transformer/{case} {spread}", *outputs.values())
    _explicit_coords()
    _generated_keyframes()


def _explicit_coords():
    """Passes coordinates explicitly, shifted in time like those of appended tokens."""
    name, shape = "tiny_a", _SHAPE_2
    model = models.load(name, "transformer")
    values = inputs_for(models.TRANSFORMER[name], seed=99, batch=1, text=8, **shape)
    coords = model.rope.prepare_video_coords(1, shape["frames"], shape["height"], shape["width"], "cpu", fps=24.0)
    coords[:, 0] += 1.25
    values["video_coords"] = coords
    values["audio_coords"] = model.audio_rope.prepare_audio_coords(1, shape["audio_frames"], "cpu", shift=2).contiguous()
    outputs = run(model, values, {})
    write_case("transformer", "tiny_a_coords", values, outputs, script=__file__, model=name, seed=99)
    show("transformer/tiny_a_coords", *outputs.values())


def _generated_keyframes():
    """Appends keyframes to generate: each at the time of one frame, marked like the first frame."""
    name, shape, fps = "dit_2_5", _SHAPE_1, 24.0
    size = shape["height"] * shape["width"]
    model, own = models.load(name, "transformer"), shape["frames"] * size
    values = inputs_for(models.TRANSFORMER[name], seed=98, batch=1, text=6, marked=True, **{**shape, "frames": 4})
    coords = model.rope.prepare_video_coords(1, shape["frames"], shape["height"], shape["width"], "cpu", fps=fps)
    slots = [coords[:, :, :size].clone() for _ in range(2)]
    for frame, slot in zip((3, 8), slots):
        slot[:, 0] = torch.tensor([frame, frame + 1]) / fps
    values["video_coords"] = torch.cat([coords, *slots], 2)
    values["video_keyframes_mask"][:, own:] = 1
    values["audio_coords"] = model.audio_rope.prepare_audio_coords(1, shape["audio_frames"], "cpu").contiguous()
    outputs = run(model, values, {})
    write_case("transformer", "tiny_v2_5_slots", values, outputs, script=__file__, model=name, seed=98)
    show("transformer/tiny_v2_5_slots", *outputs.values())


def block():
    """Writes inputs and outputs of block 0 in a forward pass."""
    for name, shape, options in (
        ("tiny_a", _SHAPE_2, {}), ("tiny_b", _SHAPE_3, {"per_token": True}), ("tiny_2_3", _SHAPE_2, {"per_token": True})
    ):
        model, caught = models.load(name, "transformer"), {}

        def hook(_module, _args, kwargs, output, caught=caught):
            caught.update(kwargs=kwargs, output=output)

        model.transformer_blocks[0].register_forward_hook(hook, with_kwargs=True)
        values = inputs_for(models.TRANSFORMER[name], seed=41, batch=1, text=6, **shape, **options)
        run(model, values, scalars_for(**shape))
        inputs = {}
        for key, value in caught["kwargs"].items():
            if isinstance(value, torch.Tensor):
                inputs[key] = value
            elif isinstance(value, tuple):
                inputs[f"{key}.cos"], inputs[f"{key}.sin"] = value
        outputs = {"video": caught["output"][0], "audio": caught["output"][1]}
        write_case("block", name, inputs, outputs, script=__file__, model=name, seed=41, scalars={"block": 0})
        show(f"block/{name}", *outputs.values())


def adaln():
    """Writes the sinusoid, the embedded timestep and the modulation rows."""
    for name in models.WHOLE:
        model = models.load(name, "transformer")
        timestep = torch.tensor([0.0, 0.1, 1.0, 37.5, 421.875, 994.957, 1000.0])
        outputs = {"sinusoid": model.time_embed.emb.time_proj(timestep)}
        for part in ("time_embed", "audio_time_embed", "av_cross_attn_video_a2v_gate", "av_cross_attn_audio_scale_shift"):
            rows, embedded = getattr(model, part)(timestep, batch_size=len(timestep), hidden_dtype=torch.float32)
            outputs[part], outputs[f"{part}.embedded"] = rows, embedded
        write_case("adaln", name, {"timestep": timestep}, outputs, script=__file__, model=name, seed=models.seed_of(name))
        show(f"adaln/{name}", *outputs.values())


# dim, heads, axes and the remaining arguments of one table.
_TABLES = {
    "video_split": dict(dim=32, num_attention_heads=2, modality="video", rope_type="split"),
    "video_split_padded": dict(dim=40, num_attention_heads=2, modality="video", rope_type="split", base_num_frames=16),
    "video_split_single": dict(
        dim=48, num_attention_heads=4, modality="video", rope_type="split", double_precision=False, theta=5000.0,
        base_height=1024, base_width=512, scale_factors=(4, 16, 16),
    ),
    "video_interleaved": dict(dim=16, num_attention_heads=2, modality="video", rope_type="interleaved"),
    "video_interleaved_single": dict(
        dim=40, num_attention_heads=2, modality="video", rope_type="interleaved", double_precision=False, causal_offset=0
    ),
    "video_wide": dict(dim=512, num_attention_heads=4, modality="video", rope_type="split"),
    "audio_split": dict(dim=64, num_attention_heads=2, modality="audio", rope_type="split", scale_factors=(4,)),
    "audio_interleaved": dict(
        dim=24, num_attention_heads=2, modality="audio", rope_type="interleaved", scale_factors=(4,), sampling_rate=8000,
        hop_length=100, double_precision=False, base_num_frames=24,
    ),
    # Cross-modal tables use only the time axis.
    "cross_video": dict(dim=64, num_attention_heads=4, modality="video", rope_type="split", cross=True),
    "cross_audio": dict(dim=64, num_attention_heads=2, modality="audio", rope_type="split", scale_factors=(4,), cross=True),
}


def rope():
    """Writes cos and sin of the video, audio and cross-modal tables."""
    for case, config in _TABLES.items():
        config = dict(config)
        cross = config.pop("cross", False)
        table = LTX2AudioVideoRotaryPosEmbed(**config)
        scalars = {**{k: list(v) if isinstance(v, tuple) else v for k, v in config.items()}, "cross": cross}
        if config["modality"] == "video":
            size = dict(num_frames=3, height=2, width=3) if case != "video_wide" else dict(num_frames=2, height=1, width=2)
            coords = table.prepare_video_coords(1, device="cpu", fps=24.0, **size)
            scalars.update(size, fps=24.0)
        else:
            coords = table.prepare_audio_coords(1, 7, "cpu")
            scalars.update(audio_num_frames=7)
        used = coords[:, 0:1] if cross else coords
        cos, sin = table(used)
        write_case(
            "rope", case, {"coords": coords.contiguous()}, {"cos": cos, "sin": sin}, script=__file__, model="none", seed=0,
            scalars=scalars,
        )
        print(f"rope/{case}: {list(cos.shape)}")
    real = LTX2AudioVideoRotaryPosEmbed(dim=4096, modality="video", rope_type="split", num_attention_heads=32)
    coords = torch.tensor([[[[0.0, 1 / 24], [4.7083333, 5.0416665]], [[480.0, 512.0], [992.0, 1024.0]], [[0.0, 32.0], [736.0, 768.0]]]])
    cos, sin = real(coords)
    write_case(
        "rope", "real_width", {"coords": coords}, {"cos": cos, "sin": sin}, script=__file__, model="none", seed=0,
        scalars=dict(dim=4096, num_attention_heads=32, modality="video", rope_type="split", cross=False),
    )


COMPONENTS = {"transformer": transformer, "block": block, "adaln": adaln, "rope": rope}

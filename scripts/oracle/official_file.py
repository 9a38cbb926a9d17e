"""Writes models in Lightricks' single-file format, without the text encoder. Supports only published topologies."""

import json

import torch
from safetensors.torch import load_file

import models
from common import MODELS, write_safetensors

# diffusers' to Lightricks' names, by dotted segment.
_STREAM = {"proj_in": "patchify_proj", "time_embed": "adaln_single", "prompt_adaln": "prompt_adaln_single"}
TRANSFORMER = _STREAM | {f"audio_{name}": f"audio_{theirs}" for name, theirs in _STREAM.items()} | {
    "av_cross_attn_video_scale_shift": "av_ca_video_scale_shift_adaln_single",
    "av_cross_attn_audio_scale_shift": "av_ca_audio_scale_shift_adaln_single",
    "av_cross_attn_video_a2v_gate": "av_ca_a2v_gate_adaln_single", "av_cross_attn_audio_v2a_gate": "av_ca_v2a_gate_adaln_single",
    "video_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_video",
    "audio_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_audio", "norm_q": "q_norm", "norm_k": "k_norm",
}
CONNECTORS = {
    "video_connector": "video_embeddings_connector", "audio_connector": "audio_embeddings_connector",
    "transformer_blocks": "transformer_1d_blocks", "norm_q": "q_norm", "norm_k": "k_norm",
}
PROJECTION = {f"{stream}text_proj_in": f"{stream}aggregate_embed" for stream in ("", "video_", "audio_")}
VOCODER = {"upsamplers": "ups", "resnets": "resblocks", "conv_in": "conv_pre", "conv_out": "conv_post", "act_out": "act_post"}
STATISTICS = {"latents_mean": "per_channel_statistics.mean-of-means", "latents_std": "per_channel_statistics.std-of-means"}
CHANGES = {"spatial": "compress_space", "temporal": "compress_time", "spatiotemporal": "compress_all"}
FOLDERS = ("transformer", "connectors", "vae", "audio_vae", "vocoder")


def _renamed(name, names):
    return ".".join(names.get(part, part) for part in name.split("."))


def _vae(name, down_blocks):
    """Returns the name in one list that alternates stages and changes of resolution."""
    side, *parts = name.split(".")
    if side not in ("encoder", "decoder") or parts[0] not in ("mid_block", "down_blocks", "up_blocks"):
        return STATISTICS.get(name, name)
    is_encoder = side == "encoder"
    if parts[0] == "mid_block":
        place, rest = 2 * down_blocks * is_encoder, parts[1:]
    else:
        place, rest = 2 * int(parts[1]) + (parts[2] != "resnets" if is_encoder else 1 + (parts[2] == "resnets")), parts[2:]
    rest = ["res_blocks", *rest[1:]] if rest[0] == "resnets" else rest[2:]
    return ".".join([side, "down_blocks" if is_encoder else "up_blocks", str(place), *rest])


def key(component, name, configs):
    if component == "vae":
        return f"vae.{_vae(name, len(configs['vae']['block_out_channels']))}"
    if component == "audio_vae":
        return f"audio_vae.{STATISTICS.get(name, name)}"
    if component == "vocoder":
        return f"vocoder.{_renamed(name, VOCODER)}".replace(".downsample.filter", ".downsample.lowpass.filter")
    if "text_proj_in." in name:
        return f"text_embedding_projection.{_renamed(name, PROJECTION)}"
    return f"model.diffusion_model.{_renamed(name, TRANSFORMER if component == 'transformer' else CONNECTORS)}"


# Options that both layouts name alike.
_SAME = (
    "activation_fn", "attention_bias", "attention_head_dim", "num_attention_heads", "cross_attention_dim", "in_channels",
    "out_channels", "num_layers", "caption_channels", "norm_eps", "timestep_scale_multiplier", "rope_type",
    "audio_num_attention_heads", "audio_attention_head_dim", "audio_in_channels", "audio_out_channels",
    "audio_cross_attention_dim",
)
_CONNECTOR = ("connector_num_attention_heads", "connector_attention_head_dim", "connector_num_layers")
_FIXED = dict(
    _class_name="AVTransformer3DModel", norm_elementwise_affine=False, qk_norm="rms_norm", standardization_norm="rms_norm",
    share_ff=False, positional_embedding_type="rope", causal_temporal_positioning=True, use_audio_video_cross_attention=True,
    av_cross_ada_norm=True, use_middle_indices_grid=True, dropout=0.0, num_vector_embeds=None, num_embeds_ada_norm=1000,
    use_linear_projection=False, only_cross_attention=False, cross_attention_norm=True, double_self_attention=False,
    upcast_attention=False, use_embeddings_connector=True,
)
_NEWER = dict(
    apply_gated_attention=True, cross_attention_adaln=True, caption_proj_before_connector=True,
    caption_projection_first_linear=False, caption_projection_second_linear=False, caption_proj_input_norm=False,
    connector_apply_gated_attention=True, connector_norm_output=True, text_encoder_norm_type="per_token_rms",
)
_NEWEST = ("ff_bias", "audio_ff_bias", "use_prompt_adaln_single", "use_keyframes_abs_pos_embedding")


def _transformer(t, connectors):
    section = {
        **_FIXED, **{key: t[key] for key in _SAME}, **{key: connectors[f"video_{key}"] for key in _CONNECTOR},
        "positional_embedding_theta": t["rope_theta"],
        "positional_embedding_max_pos": [t["pos_embed_max_pos"], t["base_height"], t["base_width"]],
        "frequencies_precision": "float64" if t["rope_double_precision"] else "float32",
        "av_ca_timestep_scale_multiplier": float(t["cross_attn_timestep_scale_multiplier"]),
        "audio_positional_embedding_max_pos": [t["audio_pos_embed_max_pos"]],
        "connector_positional_embedding_max_pos": [connectors["connector_rope_base_seq_len"]],
    }
    key = "audio_connector_attention_head_dim"
    newest = {key: t[key] for key in _NEWEST} if t.get("use_keyframes_abs_pos_embedding") else {}
    return section if t["use_prompt_embeddings"] else section | _NEWER | newest | {key: connectors[key]}


def _video(vae):
    stage = lambda layers: ["res_x", {"num_layers": layers}]
    encoder, entering = [stage(vae["layers_per_block"][0])], vae["latent_channels"]
    for kind, width, layers in zip(vae["downsample_type"], vae["block_out_channels"], vae["layers_per_block"][1:]):
        encoder += [[f"{CHANGES[kind]}_res", {"multiplier": width // entering}], stage(layers)]
        entering = width
    decoder = [stage(vae["decoder_layers_per_block"][0])]
    changes = vae["upsample_type"][::-1], vae["upsample_factor"], vae["upsample_residual"], vae["decoder_layers_per_block"][1:]
    for kind, factor, residual, layers in zip(*changes):
        decoder += [[CHANGES[kind], {"multiplier": factor, "residual": residual}], stage(layers)]
    padding = {side: vae[f"{side}_spatial_padding_mode"] for side in ("encoder", "decoder")}
    # LTX-2.3's files have one key for both.
    one = {"spatial_padding_mode": padding["encoder"]} if padding["encoder"] == padding["decoder"] else None
    return {
        "_class_name": "CausalVideoAutoencoder", "dims": 3, "in_channels": 3, "out_channels": 3,
        "latent_channels": vae["latent_channels"], "patch_size": vae["patch_size"], "norm_layer": "pixel_norm",
        "latent_log_var": "uniform", "causal_decoder": vae["decoder_causal"], "timestep_conditioning": False,
        **(one or {f"{side}_spatial_padding_mode": mode for side, mode in padding.items()}),
        "decoder_base_channels": vae["decoder_block_out_channels"][0] // vae["upsample_factor"][0],
        "encoder_blocks": encoder, "decoder_blocks": decoder,
    }


def audio_header(audio):
    same = ("mel_bins", "resolution", "in_channels", "ch_mult", "num_res_blocks", "mid_block_add_attention", "norm_type")
    network = {key: audio[key] for key in (*same, "causality_axis")} | {
        "z_channels": audio["latent_channels"], "out_ch": audio["output_channels"], "ch": audio["base_channels"],
        "double_z": True, "downsample_time": False, "attn_resolutions": [], "dropout": 0.0,
    }
    rate = audio["sample_rate"]
    return {
        "model": {"params": {"sampling_rate": rate, "ddconfig": network}},
        "preprocessing": {
            "audio": {"sampling_rate": rate}, "mel": {"n_mel_channels": audio["mel_bins"], "mel_fmin": 0, "mel_fmax": 8000},
            "stft": {"filter_length": 1024, "hop_length": audio["mel_hop_length"], "win_length": 1024, "causal": True},
        },
    }


def _vocoder(v):
    names = {
        "upsample_initial_channel": "hidden_channels", "upsample_rates": "upsample_factors",
        "upsample_kernel_sizes": "upsample_kernel_sizes", "resblock_kernel_sizes": "resnet_kernel_sizes",
        "resblock_dilation_sizes": "resnet_dilations",
    }
    generator = lambda prefix: {"stereo": True, **{key: v[prefix + own] for key, own in names.items()}}
    if "bwe_in_channels" not in v:
        return {"resblock": "1", **generator("")}
    newer = {"resblock": "AMP1", "use_tanh_at_final": False, "use_bias_at_final": False, "activation": "snakebeta"}
    second = {key: v[key] for key in ("hop_length", "input_sampling_rate", "output_sampling_rate")}
    second |= {"n_fft": v["filter_length"], "num_mels": v["num_mel_channels"]}
    return {"vocoder": {**newer, **generator("")}, "bwe": {**newer, **generator("bwe_"), **second}}


def header(configs):
    return {
        "transformer": _transformer(configs["transformer"], configs["connectors"]), "vae": _video(configs["vae"]),
        "audio_vae": audio_header(configs["audio_vae"]), "vocoder": _vocoder(configs["vocoder"]),
        "scheduler": {"_class_name": "RectifiedFlowScheduler", "num_train_timesteps": 1000, "shifting": None},
    }


def configs_of(model):
    return {name: json.loads((model / name / "config.json").read_text()) for name in FOLDERS}


def upsampler_header(config):
    """Returns the description of a latent upsampler; its tensors have the same names in both layouts."""
    return {
        **{key: config[key] for key in ("in_channels", "mid_channels", "num_blocks_per_stage")}, "dims": 3,
        "spatial_upsample": config.get("spatial_upsample", True), "temporal_upsample": config.get("temporal_upsample", False),
        "spatial_scale": config.get("rational_spatial_scale", 2.0), "rational_resampler": config["use_rational_resampler"],
    }


def write(path, tensors, header):
    write_safetensors(path, tensors, {"config": json.dumps(header)})


def _write_parts(path, configs, parts):
    tensors = {key(part, name, configs): tensor for part, own in parts.items() for name, tensor in own.items()}
    if len(tensors) < sum(map(len, parts.values())):
        raise ValueError(f"{path}: two tensors have the same name")
    write(path, tensors, header(configs))


def tensors_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def convert(model, target):
    _write_parts(target, configs_of(model), {part: tensors_of(model / part) for part in FOLDERS})


def write_model(path, name):
    parts = {part: models.load(name, part).state_dict() for part in ("transformer", "vae", "audio_vae")}
    _write_parts(path, configs_of(MODELS / name), parts)


def write_upsampler(path, name):
    network = models.load(name, "latent_upsampler").to(torch.float32)
    write(path, network.state_dict(), upsampler_header(models.config(name, "latent_upsampler")))

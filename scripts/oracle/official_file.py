"""A fixture model as Lightricks would publish it: one file, its own tensor names, the configuration in the header."""

import json

import torch

import models
from common import write_safetensors

# Names by whole dotted segments, diffusers' to Lightricks'.
_TRANSFORMER = {
    "proj_in": "patchify_proj", "audio_proj_in": "audio_patchify_proj", "time_embed": "adaln_single",
    "audio_time_embed": "audio_adaln_single", "prompt_adaln": "prompt_adaln_single",
    "audio_prompt_adaln": "audio_prompt_adaln_single",
    "av_cross_attn_video_scale_shift": "av_ca_video_scale_shift_adaln_single",
    "av_cross_attn_audio_scale_shift": "av_ca_audio_scale_shift_adaln_single",
    "av_cross_attn_video_a2v_gate": "av_ca_a2v_gate_adaln_single",
    "av_cross_attn_audio_v2a_gate": "av_ca_v2a_gate_adaln_single",
    "video_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_video",
    "audio_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_audio", "norm_q": "q_norm", "norm_k": "k_norm",
}
_STATISTICS = {"latents_mean": "mean-of-means", "latents_std": "std-of-means"}
_DOWNSAMPLING = ("space", "time", "all", "all")


def _encoder_key(name, stages):
    """One list of blocks: stages at even places, changes of resolution at odd ones."""
    parts = name.split(".")
    if parts[1] == "mid_block":
        return ".".join(["encoder.down_blocks", str(2 * stages), "res_blocks", *parts[3:]])
    if parts[1] != "down_blocks":
        return name
    change = parts[3] == "downsamplers"
    inner = parts[5:] if change else ["res_blocks", *parts[4:]]
    return ".".join(["encoder.down_blocks", str(2 * int(parts[2]) + change), *inner])


def _tensors(name):
    """Transformer and video encoder in float32, under Lightricks' names."""
    tensors = {}
    for key, tensor in models.load(name, "transformer").state_dict().items():
        renamed = ".".join(_TRANSFORMER.get(segment, segment) for segment in key.split("."))
        tensors[f"model.diffusion_model.{renamed}"] = tensor
    stages = len(models.VAE[name]["block_out_channels"])
    for key, tensor in models.load(name, "vae").state_dict().items():
        if key in _STATISTICS:
            tensors[f"vae.per_channel_statistics.{_STATISTICS[key]}"] = tensor
        elif key.startswith("encoder."):
            tensors[f"vae.{_encoder_key(key, stages)}"] = tensor
    return tensors


def _transformer_header(config):
    gated, modulated = config.get("gated_attn", False), config.get("cross_attn_mod", False)
    same = ("in_channels", "out_channels", "num_attention_heads", "attention_head_dim", "cross_attention_dim", "num_layers",
            "caption_channels", "audio_in_channels", "audio_out_channels", "audio_num_attention_heads",
            "audio_attention_head_dim", "audio_cross_attention_dim", "rope_type")
    return {
        **{key: config[key] for key in same},
        "activation_fn": "gelu-approximate", "attention_bias": True, "dropout": 0.0, "num_vector_embeds": None,
        "num_embeds_ada_norm": 1000, "use_linear_projection": False, "only_cross_attention": False,
        "cross_attention_norm": True, "double_self_attention": False, "upcast_attention": False, "share_ff": False,
        "norm_elementwise_affine": False, "norm_eps": 1e-6, "qk_norm": "rms_norm", "standardization_norm": "rms_norm",
        "positional_embedding_type": "rope", "positional_embedding_theta": 10000.0,
        "positional_embedding_max_pos": [20, 2048, 2048], "audio_positional_embedding_max_pos": [20],
        "use_middle_indices_grid": True, "frequencies_precision": "float64" if config["rope_double_precision"] else None,
        "timestep_scale_multiplier": 1000, "av_ca_timestep_scale_multiplier": 1000.0,
        "use_audio_video_cross_attention": True, "av_cross_ada_norm": True, "apply_gated_attention": gated,
        "cross_attention_adaln": modulated, "caption_proj_before_connector": not config.get("use_prompt_embeddings", True),
    }


def _vae_header(config):
    blocks, width = [], config["latent_channels"]
    for layers, kind, wider in zip(config["layers_per_block"], _DOWNSAMPLING, config["block_out_channels"]):
        blocks += [["res_x", {"num_layers": layers}], [f"compress_{kind}_res", {"multiplier": wider // width}]]
        width = wider
    return {
        "_class_name": "CausalVideoAutoencoder", "dims": 3, "in_channels": 3, "out_channels": 3, "patch_size": 4,
        "latent_channels": config["latent_channels"], "norm_layer": "pixel_norm", "latent_log_var": "uniform",
        "encoder_blocks": [*blocks, ["res_x", {"num_layers": config["layers_per_block"][-1]}]],
    }


def write_model(path, name):
    """Writes a model's transformer and video encoder; the numbers are the fixture's, exactly."""
    header = {"transformer": _transformer_header(models.TRANSFORMER[name]), "vae": _vae_header(models.VAE[name])}
    write_safetensors(path, _tensors(name), {"config": json.dumps(header)})


def write_upsampler(path, name):
    """Writes a latent upsampler, whose tensors have one name in both layouts."""
    config = models.LATENT_UPSAMPLER[name]
    header = {
        "in_channels": config["in_channels"], "mid_channels": config["mid_channels"], "dims": 3, "spatial_upsample": True,
        "num_blocks_per_stage": config["num_blocks_per_stage"], "rational_resampler": config["use_rational_resampler"],
    }
    tensors = {k: v.to(torch.float32) for k, v in models.load(name, "latent_upsampler").state_dict().items()}
    write_safetensors(path, tensors, {"config": json.dumps(header)})

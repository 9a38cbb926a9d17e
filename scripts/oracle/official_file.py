"""Writes models in Lightricks' single-file format, without the text encoder. Supports only published topologies."""

import json

import torch
from safetensors.torch import load_file

import models
from common import MODELS, write_safetensors

# diffusers' to Lightricks' names, by dotted segment.
TRANSFORMER = {
    "proj_in": "patchify_proj", "audio_proj_in": "audio_patchify_proj", "time_embed": "adaln_single",
    "audio_time_embed": "audio_adaln_single", "prompt_adaln": "prompt_adaln_single",
    "audio_prompt_adaln": "audio_prompt_adaln_single",
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
PROJECTION = {
    "text_proj_in": "aggregate_embed", "video_text_proj_in": "video_aggregate_embed", "audio_text_proj_in": "audio_aggregate_embed"
}
VOCODER = {
    "upsamplers": "ups", "resnets": "resblocks", "conv_in": "conv_pre", "conv_out": "conv_post", "act_out": "act_post"
}
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
    blocks = "down_blocks" if side == "encoder" else "up_blocks"
    if parts[0] == "mid_block":
        place, rest = 2 * down_blocks if side == "encoder" else 0, parts[1:]
    else:
        place, rest = 2 * int(parts[1]) + (parts[2] != "resnets" if side == "encoder" else 1 + (parts[2] == "resnets")), parts[2:]
    rest = ["res_blocks", *rest[1:]] if rest[0] == "resnets" else rest[2:]
    return ".".join([side, blocks, str(place), *rest])


def key(component, name, configs):
    """Returns Lightricks' name of a tensor."""
    if component == "transformer":
        return f"model.diffusion_model.{_renamed(name, TRANSFORMER)}"
    if component == "connectors" and "text_proj_in." in name:
        return f"text_embedding_projection.{_renamed(name, PROJECTION)}"
    if component == "connectors":
        return f"model.diffusion_model.{_renamed(name, CONNECTORS)}"
    if component == "vae":
        return f"vae.{_vae(name, len(configs['vae']['block_out_channels']))}"
    if component == "audio_vae":
        return f"audio_vae.{STATISTICS.get(name, name)}"
    return f"vocoder.{_renamed(name, VOCODER)}".replace(".downsample.filter", ".downsample.lowpass.filter")


def _transformer(t, connectors):
    """Returns the section of transformer and connectors."""
    newer = not t["use_prompt_embeddings"]
    section = {
        "_class_name": "AVTransformer3DModel", "activation_fn": t["activation_fn"], "attention_bias": t["attention_bias"],
        "attention_head_dim": t["attention_head_dim"], "num_attention_heads": t["num_attention_heads"],
        "cross_attention_dim": t["cross_attention_dim"], "in_channels": t["in_channels"], "out_channels": t["out_channels"],
        "num_layers": t["num_layers"], "caption_channels": t["caption_channels"], "norm_elementwise_affine": False,
        "norm_eps": t["norm_eps"], "qk_norm": "rms_norm", "standardization_norm": "rms_norm", "share_ff": False,
        "positional_embedding_type": "rope", "positional_embedding_theta": t["rope_theta"],
        "positional_embedding_max_pos": [t["pos_embed_max_pos"], t["base_height"], t["base_width"]],
        "timestep_scale_multiplier": t["timestep_scale_multiplier"], "causal_temporal_positioning": True,
        "use_audio_video_cross_attention": True, "av_cross_ada_norm": True, "use_middle_indices_grid": True,
        "dropout": 0.0, "num_vector_embeds": None, "num_embeds_ada_norm": 1000, "use_linear_projection": False,
        "only_cross_attention": False, "cross_attention_norm": True, "double_self_attention": False, "upcast_attention": False,
        "rope_type": t["rope_type"], "frequencies_precision": "float64" if t["rope_double_precision"] else "float32",
        "av_ca_timestep_scale_multiplier": float(t["cross_attn_timestep_scale_multiplier"]),
        "audio_num_attention_heads": t["audio_num_attention_heads"], "audio_attention_head_dim": t["audio_attention_head_dim"],
        "audio_in_channels": t["audio_in_channels"], "audio_out_channels": t["audio_out_channels"],
        "audio_cross_attention_dim": t["audio_cross_attention_dim"],
        "audio_positional_embedding_max_pos": [t["audio_pos_embed_max_pos"]], "use_embeddings_connector": True,
        "connector_num_attention_heads": connectors["video_connector_num_attention_heads"],
        "connector_attention_head_dim": connectors["video_connector_attention_head_dim"],
        "connector_num_layers": connectors["video_connector_num_layers"],
        "connector_positional_embedding_max_pos": [connectors["connector_rope_base_seq_len"]],
    }
    if newer:
        section |= {
            "apply_gated_attention": True, "cross_attention_adaln": True, "caption_proj_before_connector": True,
            "caption_projection_first_linear": False, "caption_projection_second_linear": False,
            "caption_proj_input_norm": False, "connector_apply_gated_attention": True,
            "audio_connector_attention_head_dim": connectors["audio_connector_attention_head_dim"],
            "connector_norm_output": True, "text_encoder_norm_type": "per_token_rms",
        }
    return section


def _video(vae):
    stage = lambda layers: ["res_x", {"num_layers": layers}]
    encoder, entering = [stage(vae["layers_per_block"][0])], vae["latent_channels"]
    for kind, width, layers in zip(vae["downsample_type"], vae["block_out_channels"], vae["layers_per_block"][1:]):
        encoder += [[f"{CHANGES[kind]}_res", {"multiplier": width // entering}], stage(layers)]
        entering = width
    decoder = [stage(vae["decoder_layers_per_block"][0])]
    changes = zip(vae["upsample_type"][::-1], vae["upsample_factor"], vae["upsample_residual"], vae["decoder_layers_per_block"][1:])
    for kind, factor, residual, layers in changes:
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


def _audio(audio):
    dd = {
        "double_z": True, "mel_bins": audio["mel_bins"], "z_channels": audio["latent_channels"],
        "resolution": audio["resolution"], "downsample_time": False, "in_channels": audio["in_channels"],
        "out_ch": audio["output_channels"], "ch": audio["base_channels"], "ch_mult": audio["ch_mult"],
        "num_res_blocks": audio["num_res_blocks"], "attn_resolutions": [], "dropout": 0.0,
        "mid_block_add_attention": audio["mid_block_add_attention"], "norm_type": audio["norm_type"],
        "causality_axis": audio["causality_axis"],
    }
    rate = audio["sample_rate"]
    return {
        "model": {"params": {"sampling_rate": rate, "ddconfig": dd}},
        "preprocessing": {
            "audio": {"sampling_rate": rate}, "mel": {"n_mel_channels": audio["mel_bins"], "mel_fmin": 0, "mel_fmax": 8000},
            "stft": {"filter_length": 1024, "hop_length": audio["mel_hop_length"], "win_length": 1024, "causal": True},
        },
    }


def _generator(v, prefix=""):
    return {
        "stereo": True, "upsample_initial_channel": v[f"{prefix}hidden_channels"],
        "upsample_rates": v[f"{prefix}upsample_factors"], "upsample_kernel_sizes": v[f"{prefix}upsample_kernel_sizes"],
        "resblock_kernel_sizes": v[f"{prefix}resnet_kernel_sizes"], "resblock_dilation_sizes": v[f"{prefix}resnet_dilations"],
    }


def _vocoder(v):
    """Returns one generator, or two with the spectrogram between them."""
    if "bwe_in_channels" not in v:
        return {"resblock": "1", **_generator(v)}
    newer = {
        "resblock": "AMP1", "use_tanh_at_final": False, "use_bias_at_final": False, "activation": "snakebeta"
    }
    second = {
        "n_fft": v["filter_length"], "hop_length": v["hop_length"], "num_mels": v["num_mel_channels"],
        "input_sampling_rate": v["input_sampling_rate"], "output_sampling_rate": v["output_sampling_rate"],
    }
    return {"vocoder": {**newer, **_generator(v)}, "bwe": {**newer, **_generator(v, "bwe_"), **second}}


def header(configs):
    """Returns the network description in the header of Lightricks' files."""
    return {
        "transformer": _transformer(configs["transformer"], configs["connectors"]), "vae": _video(configs["vae"]),
        "audio_vae": _audio(configs["audio_vae"]), "vocoder": _vocoder(configs["vocoder"]),
        "scheduler": {"_class_name": "RectifiedFlowScheduler", "num_train_timesteps": 1000, "shifting": None},
    }


def configs_of(model):
    return {name: json.loads((model / name / "config.json").read_text()) for name in FOLDERS}


def upsampler_header(config):
    """Returns the description of a latent upsampler; its tensors have the same names in both layouts."""
    return {
        **{key: config[key] for key in ("in_channels", "mid_channels", "num_blocks_per_stage")}, "dims": 3,
        "spatial_upsample": True, "temporal_upsample": False, "spatial_scale": 2.0,
        "rational_resampler": config["use_rational_resampler"],
    }


def write(path, tensors, header):
    write_safetensors(path, tensors, {"config": json.dumps(header)})


def convert(model, target):
    """Writes the five components of a diffusers folder to one file."""
    configs, tensors = configs_of(model), {}
    for component in FOLDERS:
        for file in sorted((model / component).glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                name = key(component, name, configs)
                if name in tensors:
                    raise ValueError(f"{file}: {name} a second time")
                tensors[name] = tensor
    write(target, tensors, header(configs))


def write_model(path, name):
    """Writes a fixture model's transformer and encoders in float32."""
    configs, tensors = configs_of(MODELS / name), {}
    for component in ("transformer", "vae", "audio_vae"):
        for own, tensor in models.load(name, component).state_dict().items():
            tensors[key(component, own, configs)] = tensor
    write(path, tensors, header(configs))


def write_upsampler(path, name):
    tensors = {k: v.to(torch.float32) for k, v in models.load(name, "latent_upsampler").state_dict().items()}
    write(path, tensors, upsampler_header(models.LATENT_UPSAMPLER[name]))

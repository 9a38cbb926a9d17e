"""The toy model: LTX-2.3's classes at small widths; builds, writes and reads the diffusers layout."""

import json
import pathlib
import shutil

import torch
from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video, LTX2VideoTransformer3DModel
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel, LTX2TextConnectors, LTX2VocoderWithBWE
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from mel import fill_stft
from words import VOCABULARY, save_tokenizer

TOKENS = 64
"""Text tokens a prompt is padded to in training; the connectors have as many registers."""

_WIDTH, _AUDIO_WIDTH, _HEADS, _TEXT, _LATENT = 160, 80, 5, 96, 32
_DOWN = "LTX2VideoDownBlock3D"
MAX_SHARD = 14_000_000

TEXT = dict(
    hidden_size=_TEXT, intermediate_size=192, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
    head_dim=24, query_pre_attn_scalar=24, sliding_window=32, vocab_size=VOCABULARY, max_position_embeddings=131072,
    bos_token_id=2, eos_token_id=1, pad_token_id=0,
    rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
)

CONFIGS = {
    "connectors": dict(
        caption_channels=_TEXT, text_proj_in_factor=7, video_connector_num_attention_heads=_HEADS,
        video_connector_attention_head_dim=32, video_connector_num_layers=2,
        video_connector_num_learnable_registers=TOKENS, video_gated_attn=True,
        audio_connector_num_attention_heads=_HEADS, audio_connector_attention_head_dim=16,
        audio_connector_num_layers=2, audio_connector_num_learnable_registers=TOKENS, audio_gated_attn=True,
        connector_rope_base_seq_len=4096, rope_type="split", per_modality_projections=True, video_hidden_dim=_WIDTH,
        audio_hidden_dim=_AUDIO_WIDTH, proj_bias=True,
    ),
    "transformer": dict(
        in_channels=_LATENT, out_channels=_LATENT, num_attention_heads=_HEADS, attention_head_dim=32,
        cross_attention_dim=_WIDTH, vae_scale_factors=[8, 32, 32], gated_attn=True, cross_attn_mod=True,
        audio_in_channels=32, audio_out_channels=32, audio_num_attention_heads=_HEADS, audio_attention_head_dim=16,
        audio_cross_attention_dim=_AUDIO_WIDTH, audio_gated_attn=True, audio_cross_attn_mod=True, num_layers=6,
        caption_channels=_TEXT, rope_type="split", rope_double_precision=True, use_prompt_embeddings=False,
        perturbed_attn=True,
    ),
    "vae": dict(
        latent_channels=_LATENT, block_out_channels=[32, 64, 64, 64], down_block_types=[_DOWN] * 4,
        decoder_block_out_channels=[24, 48, 48, 96], layers_per_block=[1, 1, 1, 1, 1],
        decoder_layers_per_block=[2, 2, 2, 2, 1], spatio_temporal_scaling=[True] * 4,
        decoder_spatio_temporal_scaling=[True] * 4, decoder_inject_noise=[False] * 5,
        downsample_type=["spatial", "temporal", "spatiotemporal", "spatiotemporal"],
        upsample_type=["spatiotemporal", "spatiotemporal", "temporal", "spatial"], upsample_residual=[False] * 4,
        upsample_factor=[1, 2, 1, 2], timestep_conditioning=False, patch_size=4, patch_size_t=1, encoder_causal=True,
        decoder_causal=False, encoder_spatial_padding_mode="zeros", decoder_spatial_padding_mode="zeros",
        spatial_compression_ratio=32, temporal_compression_ratio=8,
    ),
    "audio_vae": dict(base_channels=32, latent_channels=2, ch_mult=[1, 1, 2], num_res_blocks=1, resolution=256),
    "vocoder": dict(
        in_channels=128, hidden_channels=128, upsample_factors=[8, 5, 4], upsample_kernel_sizes=[16, 11, 8],
        resnet_kernel_sizes=[3, 7], resnet_dilations=[[1, 3], [1, 3]], bwe_hidden_channels=64,
        bwe_upsample_factors=[8, 6, 5], bwe_upsample_kernel_sizes=[16, 12, 11], bwe_resnet_kernel_sizes=[3, 7],
        bwe_resnet_dilations=[[1, 3], [1, 3]], filter_length=256, window_length=256, hop_length=80, num_mel_channels=64,
    ),
    "latent_upsampler": dict(
        in_channels=_LATENT, mid_channels=64, num_blocks_per_stage=1, dims=2, spatial_upsample=True,
        temporal_upsample=False, rational_spatial_scale=2.0, use_rational_resampler=False,
    ),
}

CLASSES = {
    "connectors": LTX2TextConnectors,
    "transformer": LTX2VideoTransformer3DModel,
    "vae": AutoencoderKLLTX2Video,
    "audio_vae": AutoencoderKLLTX2Audio,
    "vocoder": LTX2VocoderWithBWE,
    "latent_upsampler": LTX2LatentUpsamplerModel,
}
PARTS = ("text_encoder", "connectors", "transformer", "vae", "audio_vae", "vocoder")

_SCHEDULER = dict(
    _class_name="FlowMatchEulerDiscreteScheduler", _diffusers_version="0.42.1", num_train_timesteps=1000, shift=1.0,
    use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, max_image_seq_len=4096,
    shift_terminal=0.1, time_shift_type="exponential", invert_sigmas=False, use_karras_sigmas=False,
    use_exponential_sigmas=False, use_beta_sigmas=False, stochastic_sampling=False,
)
_INDEX = {
    "_class_name": "LTX2Pipeline",
    "_diffusers_version": "0.42.1",
    "audio_vae": ["diffusers", "AutoencoderKLLTX2Audio"],
    "connectors": ["ltx2", "LTX2TextConnectors"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Gemma3ForConditionalGeneration"],
    "tokenizer": ["transformers", "GemmaTokenizerFast"],
    "transformer": ["diffusers", "LTX2VideoTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLLTX2Video"],
    "vocoder": ["ltx2", "LTX2VocoderWithBWE"],
}


def _text_encoder():
    """Returns Gemma 3 with a stub of the unused vision tower."""
    vision = dict(
        hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1, image_size=8, patch_size=4,
        num_channels=3, vision_use_head=False,
    )
    config = Gemma3Config(
        text_config=TEXT, vision_config=vision, mm_tokens_per_image=4, boi_token_index=VOCABULARY - 3,
        eoi_token_index=VOCABULARY - 2, image_token_index=VOCABULARY - 1,
    )
    return Gemma3ForConditionalGeneration(config)


def build(part, seed=0):
    """Returns a component in float32 with initial weights."""
    torch.manual_seed(seed)
    if part == "text_encoder":
        return _text_encoder()
    model = CLASSES[part](**CONFIGS[part]).float()
    if part == "vocoder":
        fill_stft(model)
        _centre(model.vocoder.conv_in, model.bwe_generator.conv_in)
        with torch.no_grad():
            model.vocoder.conv_out.weight.mul_(0.1)
            model.bwe_generator.conv_out.weight.mul_(0.01)
    if part == "audio_vae":
        _centre(model.encoder.conv_in.conv)
        torch.nn.init.constant_(model.decoder.conv_out.conv.bias, _MEL_MEAN)
    if part == "transformer":
        _calm(model)
    return model


_MEL_MEAN, _MEL_SPREAD = -8.0, 3.2
"""Roughly, of the world's logarithmic spectrograms."""


@torch.no_grad()
def _centre(*convolutions):
    """Normalises spectrograms to mean 0 and deviation 1 in the layers that read them."""
    for layer in convolutions:
        layer.weight.div_(_MEL_SPREAD)
        layer.bias.sub_(_MEL_MEAN * layer.weight.flatten(1).sum(1))


@torch.no_grad()
def _calm(transformer):
    """Initialises to no shifts or scales, half-open gates, and zero velocities."""
    for name, parameter in transformer.named_parameters():
        if name.endswith("scale_shift_table"):
            parameter.zero_()
            if parameter.shape[0] in (5, 9):
                parameter[4 if parameter.shape[0] == 5 else slice(2, None, 3)] = 0.5
    for name, module in transformer.named_modules():
        modulation = type(transformer.get_submodule(name.rpartition(".")[0])).__name__ == "LTX2AdaLayerNormSingle"
        if (modulation and name.endswith(".linear")) or name.endswith("to_gate_logits") or name in ("proj_out", "audio_proj_out"):
            torch.nn.init.zeros_(module.weight)
            torch.nn.init.zeros_(module.bias)


def load(folder, part, device="cpu"):
    """Loads a component in float32; missing tensors and tensors of another shape keep their initial values."""
    model = build(part)
    path = pathlib.Path(folder) / part if folder else None
    files = sorted(path.glob("*.safetensors")) if path else []
    if files:
        tensors = {k: v.float() for file in files for k, v in load_file(file).items()}
        if part == "text_encoder":
            tensors = {_new_name(k): v for k, v in tensors.items()}
        own = model.state_dict()
        kept = {k: v for k, v in tensors.items() if k in own and own[k].shape == v.shape}
        model.load_state_dict(kept, strict=False)
        fresh = [k for k in own if k not in kept and "lm_head" not in k]
        if fresh:
            print(f"{path}: {len(fresh)} of {len(own)} tensors start anew, {fresh[0]} first", flush=True)
    return model.to(device)


_SPELLING = {"model.language_model.": "language_model.model.", "model.vision_tower.": "vision_tower.",
             "model.multi_modal_projector.": "multi_modal_projector."}


def _old_name(name):
    """Returns a tensor name in the spelling of published repositories."""
    for new, old in _SPELLING.items():
        if name.startswith(new):
            return old + name[len(new):]
    return name


def _new_name(name):
    for new, old in _SPELLING.items():
        if name.startswith(old):
            return new + name[len(old):]
    return name


def save(folder, part, model, tensors=None):
    """Writes a component in bfloat16, in files below `MAX_SHARD` bytes; `tensors` replace the model's."""
    path = pathlib.Path(folder) / part
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    state = {**model.state_dict(), **(tensors or {})}
    if part == "text_encoder":
        state = {_old_name(k): v for k, v in state.items() if "lm_head" not in k}
    state = {k: v.detach().to("cpu", torch.bfloat16).contiguous().clone() for k, v in sorted(state.items())}
    shards, room = [{}], MAX_SHARD
    for name, tensor in state.items():
        size = tensor.numel() * 2
        if size > room:
            shards.append({})
            room = MAX_SHARD
        shards[-1][name] = tensor
        room -= size
    stem = "model" if part == "text_encoder" else "diffusion_pytorch_model"
    if len(shards) == 1:
        save_file(shards[0], path / f"{stem}.safetensors", metadata={"format": "pt"})
    else:
        names = [f"{stem}-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        for name, shard in zip(names, shards):
            save_file(shard, path / name, metadata={"format": "pt"})
        index = {
            "metadata": {"total_size": sum(t.numel() * 2 for t in state.values())},
            "weight_map": {k: name for name, shard in zip(names, shards) for k in shard},
        }
        (path / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    if part == "text_encoder":
        config = json.loads(model.config.to_json_string(use_diff=False))
        config.update(architectures=["Gemma3ForConditionalGeneration"], dtype="bfloat16")
        config["text_config"] = _plain_text(config["text_config"])
        (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    else:
        model.save_config(path)


def _plain_text(config):
    """Adds both spellings of the RoPE settings for old and new releases."""
    return {
        **config, "dtype": "bfloat16", "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 6,
    }


def save_frame(folder):
    """Writes index, scheduler and tokenizer."""
    folder = pathlib.Path(folder)
    (folder / "scheduler").mkdir(parents=True, exist_ok=True)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(_SCHEDULER, indent=2) + "\n")
    (folder / "model_index.json").write_text(json.dumps(_INDEX, indent=2) + "\n")
    save_tokenizer(folder / "tokenizer")

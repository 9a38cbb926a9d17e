"""The fixture models: configs, builders and writers. README.md says what each stands for."""

import json
import shutil

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import (
    LTX2DurationHead, LTX2LatentUpsamplerModel, LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE,
)
from transformers import AutoTokenizer, Gemma3Config, Gemma3ForConditionalGeneration

from common import MODELS, keeps, randomise
from tokenizer import save_tokenizer

_2_5 = dict(
    gated_attn=True, cross_attn_mod=True, audio_gated_attn=True, audio_cross_attn_mod=True, use_prompt_embeddings=False,
    perturbed_attn=True, ff_bias=False, use_keyframes_abs_pos_embedding=True, rope_type="split",
)

TRANSFORMER = {
    "tiny_a": dict(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        vae_scale_factors=[8, 32, 32], audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2,
        audio_attention_head_dim=8, audio_cross_attention_dim=16, num_layers=3, caption_channels=24,
        rope_type="split", rope_double_precision=True,
    ),
    # Video and audio head counts differ; the video side of the cross-modal tables is divided by the video heads.
    "tiny_b": dict(
        in_channels=6, out_channels=6, num_attention_heads=4, attention_head_dim=6, cross_attention_dim=24,
        vae_scale_factors=[4, 16, 16], pos_embed_max_pos=16, base_height=1024, base_width=512, audio_in_channels=8,
        audio_out_channels=8, audio_num_attention_heads=2, audio_attention_head_dim=8, audio_cross_attention_dim=16,
        audio_pos_embed_max_pos=24, audio_sampling_rate=8000, audio_hop_length=100, num_layers=2, caption_channels=20,
        norm_eps=1e-5, rope_theta=5000.0, rope_double_precision=False, cross_attn_timestep_scale_multiplier=500,
        rope_type="split",
    ),
    "tiny_2_3": dict(
        in_channels=2, out_channels=2, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        vae_scale_factors=[8, 32, 32], gated_attn=True, cross_attn_mod=True, audio_in_channels=4, audio_out_channels=4,
        audio_num_attention_heads=2, audio_attention_head_dim=8, audio_cross_attention_dim=16, audio_gated_attn=True,
        audio_cross_attn_mod=True, num_layers=3, caption_channels=24, rope_type="split", rope_double_precision=True,
        use_prompt_embeddings=False, perturbed_attn=True,
    ),
    # Default RoPE, block norms with weights, attention without biases, gated feed-forward.
    "dit_interleaved": dict(
        in_channels=4, out_channels=5, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
        audio_in_channels=4, audio_out_channels=3, audio_num_attention_heads=2, audio_attention_head_dim=4,
        audio_cross_attention_dim=8, num_layers=2, caption_channels=12, norm_elementwise_affine=True,
        attention_bias=False, activation_fn="geglu", causal_offset=0,
    ),
    # Perturbed attention, contexts already as wide as the streams, feed-forward without video biases.
    "dit_perturbed": dict(
        in_channels=4, out_channels=None, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
        audio_in_channels=6, audio_out_channels=None, audio_num_attention_heads=2, audio_attention_head_dim=4,
        audio_cross_attention_dim=8, num_layers=3, use_prompt_embeddings=False, perturbed_attn=True, ff_bias=False,
        attention_out_bias=False, activation_fn="linear-silu", rope_type="split", rope_double_precision=False,
    ),
    # LTX-2.5; a variant whose text keys do not depend on the step; a variant without audio biases.
    "dit_2_5": dict(
        _2_5, in_channels=2, out_channels=2, num_attention_heads=2, attention_head_dim=10, cross_attention_dim=20,
        audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=6,
        audio_cross_attention_dim=12, num_layers=2, caption_channels=16,
    ),
    "dit_2_5_fixed_text": dict(
        _2_5, in_channels=6, out_channels=6, num_attention_heads=4, attention_head_dim=4, cross_attention_dim=16,
        audio_in_channels=8, audio_out_channels=8, audio_num_attention_heads=2, audio_attention_head_dim=4,
        audio_cross_attention_dim=8, num_layers=2, caption_channels=20, use_prompt_adaln_single=False, norm_eps=1e-5,
        cross_attn_timestep_scale_multiplier=500,
    ),
    "dit_2_5_audio_bias": dict(
        _2_5, in_channels=3, out_channels=5, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
        audio_in_channels=4, audio_out_channels=2, audio_num_attention_heads=2, audio_attention_head_dim=4,
        audio_cross_attention_dim=8, num_layers=2, caption_channels=12, ff_bias=True, audio_ff_bias=False,
        rope_double_precision=False, vae_scale_factors=[4, 16, 16],
    ),
}

CONNECTORS = {
    "tiny_a": dict(
        caption_channels=24, text_proj_in_factor=8, video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=12, video_connector_num_layers=2, video_connector_num_learnable_registers=8,
        audio_connector_num_attention_heads=2, audio_connector_attention_head_dim=12, audio_connector_num_layers=2,
        audio_connector_num_learnable_registers=8, connector_rope_base_seq_len=4096, rope_type="split",
    ),
    # Registers for audio only; the video connector masks padding.
    "tiny_b": dict(
        caption_channels=20, text_proj_in_factor=9, video_connector_num_attention_heads=5,
        video_connector_attention_head_dim=4, video_connector_num_layers=1,
        video_connector_num_learnable_registers=None, audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=10, audio_connector_num_layers=2, audio_connector_num_learnable_registers=4,
        connector_rope_base_seq_len=64, rope_theta=3000.0, rope_double_precision=False, rope_type="split",
    ),
    "tiny_2_3": dict(
        caption_channels=24, text_proj_in_factor=8, video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=16, video_connector_num_layers=3, video_connector_num_learnable_registers=8,
        video_gated_attn=True, audio_connector_num_attention_heads=2, audio_connector_attention_head_dim=8,
        audio_connector_num_layers=3, audio_connector_num_learnable_registers=8, audio_gated_attn=True,
        connector_rope_base_seq_len=4096, rope_type="split", per_modality_projections=True, video_hidden_dim=32,
        audio_hidden_dim=16, proj_bias=True,
    ),
    "connectors_interleaved": dict(
        caption_channels=12, text_proj_in_factor=3, video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=6, video_connector_num_layers=1, video_connector_num_learnable_registers=5,
        audio_connector_num_attention_heads=3, audio_connector_attention_head_dim=4, audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None, connector_rope_base_seq_len=32,
    ),
}

_DOWN = "LTX2VideoDownBlock3D"

VAE = {
    "tiny_a": dict(
        latent_channels=8, block_out_channels=[8, 16, 16, 16], down_block_types=[_DOWN] * 4,
        decoder_block_out_channels=[8, 16, 32], layers_per_block=[1, 1, 1, 1, 1], decoder_layers_per_block=[2, 1, 1, 1],
        decoder_causal=False, decoder_spatial_padding_mode="reflect", spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    ),
    # Mixed strides, factors and residuals; the last up block changes width through a shortcut block.
    "tiny_b": dict(
        latent_channels=6, block_out_channels=[8, 8, 16], down_block_types=[_DOWN] * 3,
        decoder_block_out_channels=[4, 8, 16], layers_per_block=[1, 0, 1, 1], decoder_layers_per_block=[1, 2, 1, 1],
        spatio_temporal_scaling=[True] * 3, decoder_spatio_temporal_scaling=[True] * 3,
        decoder_inject_noise=[False] * 4, downsample_type=["spatial", "temporal", "spatiotemporal"],
        upsample_type=["spatial", "spatiotemporal", "temporal"], upsample_residual=[False, True, False],
        upsample_factor=[1, 1, 2], resnet_norm_eps=1e-4, scaling_factor=0.8, decoder_causal=True,
        decoder_spatial_padding_mode="zeros", spatial_compression_ratio=16, temporal_compression_ratio=4,
    ),
    "tiny_2_3": dict(
        latent_channels=2, block_out_channels=[4, 8, 16, 16], down_block_types=[_DOWN] * 4,
        decoder_block_out_channels=[4, 8, 8, 16], layers_per_block=[2, 3, 2, 1, 1],
        decoder_layers_per_block=[2, 3, 2, 1, 1], spatio_temporal_scaling=[True] * 4,
        decoder_spatio_temporal_scaling=[True] * 4, decoder_inject_noise=[False] * 5,
        upsample_type=["spatiotemporal", "spatiotemporal", "temporal", "spatial"], upsample_residual=[False] * 4,
        upsample_factor=[2, 2, 1, 2], decoder_causal=False, decoder_spatial_padding_mode="zeros",
        spatial_compression_ratio=32, temporal_compression_ratio=8,
    ),
    "vae_patch1": dict(
        out_channels=2, latent_channels=4, block_out_channels=[8], down_block_types=[_DOWN],
        decoder_block_out_channels=[4, 8], layers_per_block=[1, 1], decoder_layers_per_block=[0, 1, 1],
        spatio_temporal_scaling=[True], decoder_spatio_temporal_scaling=[False, True],
        decoder_inject_noise=[False] * 3, downsample_type=["spatiotemporal"],
        upsample_type=["spatiotemporal", "spatial"], upsample_residual=[False, True], upsample_factor=[1, 1],
        patch_size=1, decoder_causal=False, encoder_spatial_padding_mode="reflect",
    ),
    "vae_timestep": dict(
        latent_channels=4, block_out_channels=[8], down_block_types=[_DOWN], decoder_block_out_channels=[4],
        layers_per_block=[1, 1], decoder_layers_per_block=[1, 1], spatio_temporal_scaling=[True],
        decoder_spatio_temporal_scaling=[True], decoder_inject_noise=[False] * 2, downsample_type=["spatial"],
        upsample_type=["spatial"], upsample_residual=[True], upsample_factor=[1], patch_size=2,
        timestep_conditioning=True, decoder_causal=True,
    ),
}

AUDIO_VAE = {
    # base_channels must equal latent_channels * mel_bins / 4 (published: 128 = 8 * 16).
    "tiny_a": dict(base_channels=4, latent_channels=2, mel_bins=8, resolution=32),
    "tiny_b": dict(
        base_channels=8, latent_channels=2, mel_bins=16, resolution=32, ch_mult=[1, 1, 2], num_res_blocks=1,
        mid_block_add_attention=True, sample_rate=8000, mel_hop_length=100,
    ),
    "tiny_2_3": dict(base_channels=4, latent_channels=2, mel_bins=8, resolution=32, num_res_blocks=1),
    "audio_width": dict(
        base_channels=4, latent_channels=3, mel_bins=14, resolution=32, ch_mult=[1, 2], num_res_blocks=1,
        causality_axis="width", attn_resolutions=[16], output_channels=1, in_channels=1,
    ),
    "audio_plain": dict(
        base_channels=4, latent_channels=1, mel_bins=16, resolution=16, ch_mult=[2, 1, 1], num_res_blocks=1,
        causality_axis="none",
    ),
}

VOCODER = {
    "tiny_a": dict(
        in_channels=16, hidden_channels=32, upsample_kernel_sizes=[16, 15, 8, 4, 4], upsample_factors=[6, 5, 2, 2, 2],
    ),
    "tiny_b": dict(
        in_channels=32, hidden_channels=12, upsample_kernel_sizes=[20, 10], upsample_factors=[10, 10],
        resnet_kernel_sizes=[3, 5], resnet_dilations=[[1, 2], [1, 3, 4]], leaky_relu_negative_slope=0.2,
        final_act_fn="clamp", final_bias=False, output_sampling_rate=8000,
    ),
    # Two stages with a different spectrogram between them.
    "tiny_2_3": dict(
        in_channels=16, hidden_channels=64, resnet_dilations=[[1, 3, 5], [1, 3], [1]], bwe_in_channels=12,
        bwe_hidden_channels=32, bwe_resnet_dilations=[[1], [1, 3], [1, 3, 5]], filter_length=96, hop_length=80,
        window_length=96, num_mel_channels=6,
    ),
    # Spectrogram frames that do not divide the waveform, plain snakes, odd lengths, another ratio.
    "vocoder_bwe_odd": dict(
        in_channels=6, hidden_channels=4, upsample_kernel_sizes=[7], upsample_factors=[5], resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 2]], act_fn="snake", antialias=False, antialias_kernel_size=8, final_act_fn="tanh",
        final_bias=True, bwe_in_channels=10, bwe_hidden_channels=4, bwe_upsample_kernel_sizes=[6, 4],
        bwe_upsample_factors=[4, 2], bwe_resnet_kernel_sizes=[5], bwe_resnet_dilations=[[1]],
        bwe_antialias_ratio=3, bwe_final_act_fn="clamp", filter_length=11, hop_length=4, window_length=12,
        num_mel_channels=5, input_sampling_rate=1000, output_sampling_rate=2000,
    ),
    # Kernel minus stride is odd, which adds a sample; an even kernel pads unevenly.
    "vocoder_odd": dict(
        in_channels=6, hidden_channels=10, out_channels=3, upsample_kernel_sizes=[7, 5], upsample_factors=[4, 3],
        resnet_kernel_sizes=[4], resnet_dilations=[[1, 2, 3]], final_act_fn=None,
    ),
}

# Group norm needs at least 32 channels.
LATENT_UPSAMPLER = {
    # The resampler of 2.0, and of 2.3.
    "upsampler_rational": dict(in_channels=8, mid_channels=32, num_blocks_per_stage=1, use_rational_resampler=True),
    "upsampler_plain": dict(in_channels=2, mid_channels=32, num_blocks_per_stage=0, use_rational_resampler=False),
    "upsampler_3_2": dict(
        in_channels=4, mid_channels=32, num_blocks_per_stage=0, use_rational_resampler=True, rational_spatial_scale=1.5
    ),
    "upsampler_temporal": dict(
        in_channels=4, mid_channels=32, num_blocks_per_stage=0, spatial_upsample=False, temporal_upsample=True
    ),
    # Per frame; two channels per group.
    "upsampler_frames": dict(
        in_channels=3, mid_channels=64, num_blocks_per_stage=0, dims=2, use_rational_resampler=False
    ),
}

GEMMA = {
    "tiny_a": dict(
        hidden_size=24, intermediate_size=40, num_hidden_layers=7, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, query_pre_attn_scalar=16, sliding_window=8,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "tiny_2_3": dict(
        hidden_size=24, intermediate_size=40, num_hidden_layers=7, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, query_pre_attn_scalar=16, sliding_window=8,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    # Written in the old spelling: sliding_window_pattern, rope_theta, rope_local_base_freq, rope_scaling.
    "tiny_b": dict(
        hidden_size=20, intermediate_size=28, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=1,
        head_dim=12, query_pre_attn_scalar=20, sliding_window=5, sliding_window_pattern=3, rms_norm_eps=1e-5,
        rope_theta=50_000.0, rope_local_base_freq=500.0, rope_scaling={"rope_type": "linear", "factor": 4.0},
    ),
}
OLD_STYLE = {"tiny_b"}

_SCHEDULER = dict(
    base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, max_image_seq_len=4096, num_train_timesteps=1000,
    shift=1.0, time_shift_type="exponential",
)
SCHEDULER = {
    "tiny_a": dict(_SCHEDULER, use_dynamic_shifting=True, shift_terminal=0.1),
    "tiny_2_3": dict(_SCHEDULER, use_dynamic_shifting=True, shift_terminal=0.1),
    "tiny_b": dict(_SCHEDULER, use_dynamic_shifting=False, shift_terminal=None, shift=1.7),
}

VOCABULARY = 400
SEEDS = {"tiny_a": 11, "tiny_b": 22, "tiny_2_3": 23}
WHOLE = ("tiny_a", "tiny_b", "tiny_2_3")
# Like published weights: bfloat16 and sharded.
STORED_BF16 = {"tiny_a", "tiny_2_3"}
SHARDED = {"tiny_a"}

# Contexts as wide as tiny_2_5's; several queries; one head and a wide MLP.
DURATION_HEAD = {
    "duration_head": dict(
        video_cross_attention_dim=20, audio_cross_attention_dim=12, pooler_hidden_dim=8, num_pooler_heads=4, mlp_hidden_dim=6
    ),
    "duration_head_queries": dict(
        video_cross_attention_dim=6, audio_cross_attention_dim=10, pooler_hidden_dim=9, num_queries=3, num_pooler_heads=3,
        mlp_hidden_dim=5,
    ),
    "duration_head_narrow": dict(
        video_cross_attention_dim=7, audio_cross_attention_dim=5, pooler_hidden_dim=4, num_queries=2, num_pooler_heads=1,
        mlp_hidden_dim=16,
    ),
}
# Folder of the temporal upsampler.
TEMPORAL = "temporal_latent_upsampler"

_CLASSES = {
    "transformer": (LTX2VideoTransformer3DModel, TRANSFORMER),
    "connectors": (LTX2TextConnectors, CONNECTORS),
    "vae": (AutoencoderKLLTX2Video, VAE),
    "audio_vae": (AutoencoderKLLTX2Audio, AUDIO_VAE),
    "vocoder": (LTX2Vocoder, VOCODER),
    "latent_upsampler": (LTX2LatentUpsamplerModel, LATENT_UPSAMPLER),
    "duration_head": (LTX2DurationHead, DURATION_HEAD),
}
COMPONENTS = tuple(c for c, (_, configs) in _CLASSES.items() if set(WHOLE) <= set(configs))


def class_of(component, config):
    extended = component == "vocoder" and "bwe_in_channels" in config
    return LTX2VocoderWithBWE if extended else _CLASSES[component][0]


def seed_of(name):
    return SEEDS.get(name, 33 + sum(name.encode()) % 1000)


def build(component, config, seed):
    """Returns a component with random weights in float32."""
    model = randomise(class_of(component, config)(**config).to(torch.float32), f"{seed}/{component}")
    if isinstance(model, LTX2VocoderWithBWE):
        damp(model)
    return model


def damp(vocoder):
    """Scales weights so that samples mostly stay in -1..1; periodic activations add up over the blocks."""
    for generator in (vocoder.vocoder, vocoder.bwe_generator):
        generator.conv_out.weight *= 0.3 * 0.6 ** len(generator.upsamplers)
        for name, tensor in generator.state_dict().items():
            if ".convs2." in name:
                tensor *= 0.2


def build_text_encoder(config, seed, vocabulary=VOCABULARY):
    """Returns Gemma 3 with a stub of the vision tower."""
    text = dict(config, vocab_size=vocabulary, max_position_embeddings=256)
    vision = dict(
        hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1, image_size=8, patch_size=4,
        num_channels=3, vision_use_head=False,
    )
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text, vision_config=vision, mm_tokens_per_image=4, boi_token_index=vocabulary - 3,
            eoi_token_index=vocabulary - 2, image_token_index=vocabulary - 1,
        )
    )
    return randomise(model.to(torch.float32), f"{seed}/text_encoder")


def _restore_old_style(path, config):
    """Rewrites config.json in the spelling of 2025."""
    data = json.loads(path.read_text())
    text = data["text_config"]
    for key in ("layer_types", "rope_parameters", "_sliding_window_pattern"):
        text.pop(key, None)
    for key in ("sliding_window_pattern", "rope_theta", "rope_local_base_freq", "rope_scaling"):
        text[key] = config[key]
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")


def save_whole(name):
    """Writes a complete model."""
    folder, seed = MODELS / name, seed_of(name)
    if keeps(folder):
        return
    shutil.rmtree(folder, ignore_errors=True)
    parts = {c: build(c, _CLASSES[c][1][name], seed) for c in COMPONENTS}
    text_encoder = build_text_encoder(GEMMA[name], seed)
    if name in STORED_BF16:
        parts = {component: part.to(torch.bfloat16) for component, part in parts.items()}
        text_encoder = text_encoder.to(torch.bfloat16)
    folder.mkdir(parents=True)
    save_tokenizer(folder / "tokenizer", VOCABULARY)
    pipeline = LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER[name]),
        text_encoder=text_encoder,
        tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        **parts,
    )
    pipeline.save_pretrained(folder)
    if name in SHARDED:
        shard(folder / "transformer", pipeline.transformer)
    shutil.rmtree(folder / "tokenizer")
    save_tokenizer(folder / "tokenizer", VOCABULARY)
    if name in OLD_STYLE:
        _restore_old_style(folder / "text_encoder" / "config.json", GEMMA[name])


def shard(folder, model):
    """Rewrites a component in shards with an index, like the 19B transformer."""
    for file in folder.glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(folder, max_shard_size="100KB")


def save_variants():
    """Writes the single-component models in bfloat16."""
    for component, (_, configs) in _CLASSES.items():
        for name in configs:
            if name not in WHOLE:
                folder = MODELS / name
                if keeps(folder):
                    continue
                shutil.rmtree(folder, ignore_errors=True)
                part = build(component, configs[name], seed_of(name)).to(torch.bfloat16)
                part.save_pretrained(folder / component)
                if component == "latent_upsampler" and configs[name].get("temporal_upsample"):
                    (folder / TEMPORAL).symlink_to(component)


def load(name, component, dtype=torch.float32):
    if component == "text_encoder":
        return Gemma3ForConditionalGeneration.from_pretrained(MODELS / name / component, dtype=dtype).eval()
    kind = class_of(component, _CLASSES[component][1][name])
    return kind.from_pretrained(MODELS / name / component, dtype=dtype).eval()


def load_pipeline(name, dtype=torch.float32):
    pipeline = LTX2Pipeline.from_pretrained(MODELS / name, dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline

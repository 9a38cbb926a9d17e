"""Draws a tiny, consistent configuration of every component from a seed."""

import random

from drawn_table import UPSAMPLERS
from models import VOCABULARY

_ACTIVATIONS = ["gelu-approximate"] * 3 + ["gelu", "geglu", "geglu-approximate", "swiglu", "linear-silu"]
_DOWN = "LTX2VideoDownBlock3D"
# Products of 80, 160 and 240 samples per mel frame: 8, 16 and 24 kHz.
_VOCODER_FACTORS = [[10, 8], [8, 5, 4], [6, 5, 2, 2, 2], [5, 4, 2, 2, 2], [16, 15]]


def _heads(draw, width):
    """Draws a head count with an even head width."""
    return draw.choice([h for h in (1, 2, 3, 4, 5, 6) if width % (2 * h) == 0])


def _rope(draw, published):
    return dict(
        rope_theta=10_000.0 if published else draw.choice([10_000.0, 2000.0]),
        rope_double_precision=True if published else draw.random() < 0.5,
        rope_type="split" if published else draw.choice(["split", "split", "interleaved"]),
    )


def transformer(draw, latent, audio_width, caption, ratios, published):
    rope = _rope(draw, published)
    heads, head_dim = draw.randint(1, 4), 2 * draw.randint(2, 8)
    if heads * head_dim < 6:
        head_dim = 6
    audio_heads, audio_head_dim = heads, 2 * draw.randint(1, 6)
    if not published and draw.random() < 0.4:
        audio_heads = draw.randint(1, 4)
        # The video side of the split cross-modal tables is divided by the video heads.
        audio_head_dim = 2 * heads * draw.randint(1, 2)
    width, audio = heads * head_dim, audio_heads * audio_head_dim
    config = dict(
        in_channels=latent, out_channels=latent, num_attention_heads=heads, attention_head_dim=head_dim,
        cross_attention_dim=width, vae_scale_factors=list(ratios), audio_in_channels=audio_width,
        audio_out_channels=audio_width, audio_num_attention_heads=audio_heads, audio_attention_head_dim=audio_head_dim,
        audio_cross_attention_dim=audio, num_layers=draw.randint(1, 4), caption_channels=caption, **rope,
    )
    if not published:
        config.update(
            pos_embed_max_pos=draw.choice([10, 20]), audio_pos_embed_max_pos=draw.choice([20, 30]),
            base_height=draw.choice([512, 2048]), base_width=draw.choice([768, 2048]), norm_eps=draw.choice([1e-6, 1e-4]),
            norm_elementwise_affine=draw.random() < 0.3, attention_bias=draw.random() < 0.7,
            attention_out_bias=draw.random() < 0.7, ff_bias=draw.random() < 0.7, audio_ff_bias=draw.random() < 0.7,
            activation_fn=draw.choice(_ACTIVATIONS), causal_offset=draw.choice([1, 1, 0]),
            cross_attn_timestep_scale_multiplier=draw.choice([1000, 1, 300]), perturbed_attn=draw.random() < 0.4,
        )
    return config


def newer_transformer(config, widths):
    """Adds LTX-2.3's gates, modulated text attention, and contexts as wide as the streams."""
    config.update(
        ff_bias=True, gated_attn=True, cross_attn_mod=True, audio_gated_attn=True, audio_cross_attn_mod=True, use_prompt_embeddings=False,
        perturbed_attn=True, cross_attention_dim=widths[0], audio_cross_attention_dim=widths[1],
    )
    return config


def newest_transformer(draw, config, published):
    """Adds LTX-2.5's marker of single frames; removes biases of the video feed-forward."""
    config.update(ff_bias=False, use_keyframes_abs_pos_embedding=True)
    if not published and draw.random() < 0.25:
        config["use_prompt_adaln_single"] = False
    return config


def newer_connectors(draw, config, widths):
    """Adds LTX-2.3's projection per connector, stream widths and gates."""
    config.update(
        per_modality_projections=True, proj_bias=draw.random() < 0.8, video_hidden_dim=widths[0], audio_hidden_dim=widths[1]
    )
    for stream, width in zip(("video", "audio"), widths):
        heads = _heads(draw, width)
        config[f"{stream}_connector_num_attention_heads"] = heads
        config[f"{stream}_connector_attention_head_dim"] = width // heads
        config[f"{stream}_gated_attn"] = draw.random() < 0.8
    return config


def newer_vocoder(draw, mel, published):
    """Returns LTX-2.3's vocoder: periodic activations and a second stage."""

    def generator(channels, factors):
        count = draw.randint(1, 3)
        return dict(
            in_channels=channels, hidden_channels=draw.choice([1, 2]) * 2 ** len(factors), upsample_factors=factors,
            upsample_kernel_sizes=[f + 2 * draw.randint(0, 3) for f in factors],
            resnet_kernel_sizes=draw.sample([3, 5, 7, 11], count),
            resnet_dilations=[draw.sample([1, 2, 3, 5], draw.randint(1, 3)) for _ in range(count)],
            act_fn="snakebeta" if published else draw.choice(["snakebeta", "snake"]),
            antialias=True if published else draw.random() < 0.6,
            final_act_fn=None if published else draw.choice(["tanh", "clamp", None]),
            final_bias=False if published else draw.random() < 0.5,
        )

    first = generator(2 * mel, draw.choice([[10, 8], [8, 5, 4], [5, 4, 2, 2, 2]]))
    rate, bins = 100 * _product(first["upsample_factors"]), draw.choice([4, 6, 9])
    factors = draw.choice([[6, 5, 2], [10, 6], [5, 4, 3]])
    growth = draw.choice([2, 3])
    hop = _product(factors) // growth
    second = generator(2 * bins, factors)
    return dict(
        first, **{f"bwe_{key}": value for key, value in second.items()}, hop_length=hop, filter_length=(length := hop + draw.randint(0, 30)),
        window_length=length, num_mel_channels=bins, input_sampling_rate=rate, output_sampling_rate=growth * rate,
    )


def connectors(draw, caption, layers, published):
    """Draws both connectors. Register counts divide 16, so that any multiple of 16 tokens works."""
    registers = [8, 16] if published else [None, 4, 8, 16]
    config = dict(
        caption_channels=caption, text_proj_in_factor=layers + 1,
        connector_rope_base_seq_len=4096 if published else draw.choice([16, 100, 4096]), **_rope(draw, published),
    )
    for stream in ("video", "audio"):
        heads = _heads(draw, caption)
        config[f"{stream}_connector_num_attention_heads"] = heads
        config[f"{stream}_connector_attention_head_dim"] = caption // heads
        config[f"{stream}_connector_num_layers"] = draw.randint(1, 3)
        config[f"{stream}_connector_num_learnable_registers"] = draw.choice(registers)
    return config


_PRODUCTS = {"spatial": 4, "temporal": 2, "spatiotemporal": 8}


def encoder(draw, latent, kinds):
    """Draws down blocks that invert a decoder's up blocks in any order."""
    kinds, widths, entering = draw.sample(kinds, len(kinds)), [], latent
    for kind in kinds:
        product = _PRODUCTS[kind]
        fits = [product * d for d in range(1, entering + 1) if entering % d == 0 and 4 <= product * d <= 24]
        entering = draw.choice(fits)
        widths.append(entering)
    return dict(
        block_out_channels=widths, down_block_types=[_DOWN] * len(kinds), downsample_type=kinds,
        layers_per_block=[draw.randint(0, 1) for _ in kinds] + [1], spatio_temporal_scaling=[True] * len(kinds),
        encoder_spatial_padding_mode=draw.choice(["zeros", "zeros", "reflect"]),
    )


def upsampler(draw, latent, kind):
    """Draws the resampler of 2.0 or 2.3, or one per frame. Group norm needs 32 channels."""
    kind = kind or draw.choice(UPSAMPLERS)
    return kind, dict(
        in_channels=latent, mid_channels=32, num_blocks_per_stage=draw.randint(0, 1), dims=2 if kind == "frames" else 3,
        use_rational_resampler=kind == "rational",
    )


def vae(draw, latent, published):
    """Draws a decoder with up to three up blocks and its encoder; returns the config and (time, height, width) ratios."""
    count = draw.randint(1, 3)
    width = draw.choice([16, 24, 32]) if count == 3 else draw.choice([8, 16])
    kinds, factors, residuals, widths = [], [], [], []
    previous = width
    for index in range(count):
        kind = draw.choice(["spatial", "temporal", "spatiotemporal", "spatiotemporal"])
        factor = draw.choice([1, 2])
        target = previous
        if index and factor == 1 and draw.random() < 0.4:
            target = max(4, previous // 2)
        if factor == 2 and previous < 4:
            factor = 1
        entering = previous if factor == 2 else target
        residuals.append(entering % _PRODUCTS[kind] == 0 and draw.random() < 0.7)
        kinds.append(kind), factors.append(factor), widths.append(target)
        previous = target // factor
    halvings = sum(k != "temporal" for k in kinds)
    # A ratio of at least 8 limits the smallest valid frame to a few tokens.
    patch = 4 if published else draw.choice([p for p in (1, 2, 4) if p * 2**halvings >= 8] or [4])
    space = patch * 2**halvings
    time = 2 ** sum(k != "spatial" for k in kinds)
    config = dict(
        latent_channels=latent, decoder_block_out_channels=widths[::-1], **encoder(draw, latent, kinds),
        decoder_layers_per_block=[draw.randint(0, 2) for _ in range(count)] + [draw.randint(1, 2)],
        decoder_spatio_temporal_scaling=[True] * count, decoder_inject_noise=[False] * (count + 1), upsample_type=kinds,
        upsample_residual=residuals[::-1], upsample_factor=factors[::-1], patch_size=patch,
        decoder_causal=draw.random() < 0.3, decoder_spatial_padding_mode=draw.choice(["reflect", "zeros"]),
        spatial_compression_ratio=space, temporal_compression_ratio=time,
        scaling_factor=1.0 if published else draw.choice([1.0, 0.7]),
    )
    return config, (time, space, space)


def audio_vae(draw, published):
    """Draws the audio autoencoder; its statistics need base_channels = latent_channels * mel_bins / 4."""
    latent, mel = draw.choice([1, 2, 4]), draw.choice([8, 12, 16])
    config = dict(latent_channels=latent, mel_bins=mel, resolution=32, ch_mult=[1, draw.choice([1, 2]), draw.choice([1, 2])])
    config["num_res_blocks"] = draw.randint(1, 2)
    if not published:
        config["causality_axis"] = draw.choice(["height", "height", "width", "none", "width-compatibility"])
        config["mid_block_add_attention"] = draw.random() < 0.3
        config["attn_resolutions"] = draw.choice([None, None, [8], [16, 32]])
        if config["causality_axis"] == "none" and draw.random() < 0.5:
            latent, mel = 8, 16
            config.update(latent_channels=latent, mel_bins=mel, norm_type="group", num_res_blocks=1)
    config["base_channels"] = latent * (mel // 4)
    return config


def vocoder(draw, mel, published):
    """Draws a vocoder whose kernels exceed the strides by an even number."""
    factors = draw.choice(_VOCODER_FACTORS)
    count = draw.randint(1, 3)
    config = dict(
        in_channels=2 * mel, hidden_channels=draw.choice([1, 2]) * 2 ** len(factors), upsample_factors=factors,
        upsample_kernel_sizes=[f + 2 * draw.randint(0, 4) for f in factors],
        resnet_kernel_sizes=draw.sample([3, 5, 7, 11], count),
        resnet_dilations=[draw.sample([1, 2, 3, 5], draw.randint(1, 3)) for _ in range(count)],
        output_sampling_rate=100 * _product(factors),
    )
    if not published:
        config.update(
            final_act_fn=draw.choice(["tanh", "clamp", None]), final_bias=draw.random() < 0.7,
            leaky_relu_negative_slope=draw.choice([0.1, 0.3]),
        )
    return config


def _product(values):
    total = 1
    for value in values:
        total *= value
    return total


def gemma(draw, width):
    kv = draw.choice([1, 2])
    heads = kv * draw.choice([h for h in (1, 2) if width % (kv * h) == 0])
    layers = draw.randint(2, 8)
    config = dict(
        hidden_size=width, intermediate_size=draw.choice([20, 36]), num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=2 * draw.randint(2, 8), query_pre_attn_scalar=draw.randint(4, 30),
        sliding_window=draw.randint(1, 12), rope_theta=draw.choice([1e6, 1e4]), rope_local_base_freq=draw.choice([1e4, 100.0]),
    )
    if draw.random() < 0.6:
        config["rope_scaling"] = {"rope_type": "linear", "factor": draw.choice([2.0, 8.0])}
    if draw.random() < 0.5:
        config["layer_types"] = [draw.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    else:
        config["sliding_window_pattern"] = draw.randint(2, 6)
    return config


def gemma4(draw, width, published):
    full, sliding = "full_attention", "sliding_attention"
    kv = draw.choice([1, 2])
    heads, layers = kv * draw.choice([1, 2]), draw.randint(2, 8)
    config = dict(
        hidden_size=width, intermediate_size=draw.choice([20, 36]), num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=2 * draw.randint(2, 6), sliding_window=draw.randint(1, 12),
        global_head_dim=4 * draw.randint(2, 5), attention_k_eq_v=published or draw.random() < 0.6,
        rope_parameters={
            sliding: {"rope_type": "default", "rope_theta": draw.choice([1e4, 100.0])},
            full: {
                "rope_type": "proportional", "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0]),
                "rope_theta": draw.choice([1e6, 1e4]),
            },
        },
    )
    if config["attention_k_eq_v"]:
        config["num_global_key_value_heads"] = draw.choice([n for n in (1, 2) if heads % n == 0])
    # The class requires full attention in the last layer.
    period = draw.randint(2, 6)
    kinds = [full if (layer + 1) % period == 0 else sliding for layer in range(layers)]
    if not published and draw.random() < 0.5:
        kinds = [draw.choice([sliding, full]) for _ in range(layers)]
    config["layer_types"] = [*kinds[:-1], full]
    return config


def scheduler(draw):
    dynamic = draw.random() < 0.6
    return dict(
        use_dynamic_shifting=dynamic, shift_terminal=0.1 if dynamic else None, shift=1.0 if dynamic else draw.choice([1.0, 2.5]),
        base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, max_image_seq_len=4096, num_train_timesteps=1000,
        time_shift_type="exponential",
    )


def whole(seed, published, generation, upsampler_kind=None):
    """Draws the configs of a model. `published`: sizes vary, flags are those of the generation."""
    draw = random.Random(seed)
    caption, latent = draw.choice([12, 16, 20, 24, 36]), draw.choice([3, 4, 8])
    vae_config, ratios = vae(draw, latent, published)
    audio = audio_vae(draw, published)
    text = gemma(draw, caption)
    voice = vocoder(draw, audio["mel_bins"], published)
    upsampler_kind, upsampler_config = upsampler(draw, latent, upsampler_kind)
    joined = connectors(draw, caption, text["num_hidden_layers"], published)
    dit = transformer(draw, latent, audio["base_channels"], caption, ratios, published)
    if generation != "2.0":
        widths = [dit[f"{p}num_attention_heads"] * dit[f"{p}attention_head_dim"] for p in ("", "audio_")]
        voice = newer_vocoder(draw, audio["mel_bins"], published)
        joined, dit = newer_connectors(draw, joined, widths), newer_transformer(dit, widths)
    if generation == "2.5":
        # A separate source, so that draws of other generations do not change.
        newest = random.Random(f"{seed}/2.5")
        dit, text = newest_transformer(newest, dit, published), gemma4(newest, caption, published)
        joined["text_proj_in_factor"] = text["num_hidden_layers"] + 1
    return {
        "vae": vae_config,
        "audio_vae": audio,
        "vocoder": voice,
        "text_encoder": text,
        "connectors": joined,
        "transformer": dit,
        "scheduler": scheduler(draw),
        "latent_upsampler": upsampler_config,
        "upsampler_kind": upsampler_kind,
        "vocabulary": VOCABULARY,
    }

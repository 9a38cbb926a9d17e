"""Draws a tiny, consistent configuration of every component from a seed.

Seeds must stay as they are, so do not change the order of the draws."""

import math
import random

from drawn_request import UPSAMPLERS

_ACTIVATIONS = ["gelu-approximate"] * 3 + ["gelu", "geglu", "geglu-approximate", "swiglu", "linear-silu"]
# Products of 80, 160 and 240 samples per mel frame: 8, 16 and 24 kHz.
_VOCODER_FACTORS = [[10, 8], [8, 5, 4], [6, 5, 2, 2, 2], [5, 4, 2, 2, 2], [16, 15]]
_PRODUCTS = {"spatial": 4, "temporal": 2, "spatiotemporal": 8}


class Draw(random.Random):
    """A source of draws; with `published`, options have their published values and are not drawn."""

    published = False

    def option(self, published, options):
        return published if self.published else self.choice(options)

    def flag(self, published, chance):
        return published if self.published else self.random() < chance

    def attention(self, stream, width):
        """Draws a connector's number of heads, which have an even width."""
        heads, prefix = self.choice([h for h in range(1, 7) if width % (2 * h) == 0]), f"{stream}_connector"
        return {f"{prefix}_num_attention_heads": heads, f"{prefix}_attention_head_dim": width // heads}

    def rope(self):
        theta, double = self.option(10_000.0, [10_000.0, 2000.0]), self.flag(True, 0.5)
        kind = self.option("split", ["split", "split", "interleaved"])
        return dict(rope_theta=theta, rope_double_precision=double, rope_type=kind)


def transformer(draw, latent, audio_width, caption, ratios):
    rope = draw.rope()
    heads, head_dim = draw.randint(1, 4), 2 * draw.randint(2, 8)
    if heads * head_dim < 6:
        head_dim = 6
    audio = heads, 2 * draw.randint(1, 6)
    if draw.flag(False, 0.4):
        # The video side of the split cross-modal tables is divided by the video heads.
        audio = draw.randint(1, 4), 2 * heads * draw.randint(1, 2)
    config = dict(num_layers=draw.randint(1, 4), vae_scale_factors=list(ratios), caption_channels=caption, **rope)
    for prefix, channels, count, width in (("", latent, heads, head_dim), ("audio_", audio_width, *audio)):
        config |= {
            f"{prefix}in_channels": channels, f"{prefix}out_channels": channels, f"{prefix}num_attention_heads": count,
            f"{prefix}attention_head_dim": width, f"{prefix}cross_attention_dim": count * width,
        }
    if draw.published:
        return config
    return config | dict(
        pos_embed_max_pos=draw.choice([10, 20]), audio_pos_embed_max_pos=draw.choice([20, 30]),
        base_height=draw.choice([512, 2048]), base_width=draw.choice([768, 2048]), norm_eps=draw.choice([1e-6, 1e-4]),
        norm_elementwise_affine=draw.random() < 0.3, attention_bias=draw.random() < 0.7, attention_out_bias=draw.random() < 0.7,
        ff_bias=draw.random() < 0.7, audio_ff_bias=draw.random() < 0.7, activation_fn=draw.choice(_ACTIVATIONS),
        causal_offset=draw.choice([1, 1, 0]), cross_attn_timestep_scale_multiplier=draw.choice([1000, 1, 300]),
        perturbed_attn=draw.random() < 0.4,
    )


def connectors(draw, caption, layers):
    """Draws both connectors. Register counts divide 16, so that any multiple of 16 tokens works."""
    config = dict(caption_channels=caption, text_proj_in_factor=layers + 1)
    config |= dict(connector_rope_base_seq_len=draw.option(4096, [16, 100, 4096]), **draw.rope())
    registers = [8, 16] if draw.published else [None, 4, 8, 16]
    for stream in ("video", "audio"):
        config |= draw.attention(stream, caption) | {
            f"{stream}_connector_num_layers": draw.randint(1, 3),
            f"{stream}_connector_num_learnable_registers": draw.choice(registers),
        }
    return config


def newer(draw, dit_config, joined):
    """Adds LTX-2.3's gates, modulated text attention, contexts as wide as the streams, and a projection per connector."""
    widths = {p: dit_config[f"{p}num_attention_heads"] * dit_config[f"{p}attention_head_dim"] for p in ("", "audio_")}
    joined = joined | dict(per_modality_projections=True, proj_bias=draw.random() < 0.8)
    for stream, width in zip(("video", "audio"), widths.values()):
        joined |= draw.attention(stream, width)
        joined |= {f"{stream}_gated_attn": draw.random() < 0.8, f"{stream}_hidden_dim": width}
    gates = ("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod", "perturbed_attn", "ff_bias")
    contexts = {f"{prefix}cross_attention_dim": width for prefix, width in widths.items()}
    return dit_config | dict.fromkeys(gates, True) | contexts | dict(use_prompt_embeddings=False), joined


def _encoder(draw, latent, kinds):
    """Draws down blocks that invert a decoder's up blocks in any order."""
    kinds, widths = draw.sample(kinds, len(kinds)), [latent]
    for n in map(_PRODUCTS.get, kinds):
        widths.append(draw.choice([n * d for d in range(1, widths[-1] + 1) if widths[-1] % d == 0 and 4 <= n * d <= 24]))
    return dict(
        block_out_channels=widths[1:], down_block_types=["LTX2VideoDownBlock3D"] * len(kinds), downsample_type=kinds,
        layers_per_block=[draw.randint(0, 1) for _ in kinds] + [1], spatio_temporal_scaling=[True] * len(kinds),
        encoder_spatial_padding_mode=draw.choice(["zeros", "zeros", "reflect"]),
    )


def vae(draw, latent):
    """Draws a decoder with up to three up blocks and its encoder; returns the config and (time, height, width) ratios."""
    count = draw.randint(1, 3)
    previous = draw.choice([16, 24, 32]) if count == 3 else draw.choice([8, 16])
    blocks = []
    for index in range(count):
        kind = draw.choice(["spatial", "temporal", "spatiotemporal", "spatiotemporal"])
        factor, target = draw.choice([1, 2]), previous
        if index and factor == 1 and draw.random() < 0.4:
            target = max(4, previous // 2)
        if factor == 2 and previous < 4:
            factor = 1
        entering = previous if factor == 2 else target
        blocks.append((kind, factor, entering % _PRODUCTS[kind] == 0 and draw.random() < 0.7, target))
        previous = target // factor
    kinds, factors, residuals, widths = map(list, zip(*blocks))
    halvings = sum(k != "temporal" for k in kinds)
    # A ratio of at least 8 limits the smallest valid frame to a few tokens.
    patch = draw.option(4, [p for p in (1, 2, 4) if p * 2**halvings >= 8] or [4])
    space, time = patch * 2**halvings, 2 ** sum(k != "spatial" for k in kinds)
    config = dict(
        latent_channels=latent, decoder_block_out_channels=widths[::-1], **_encoder(draw, latent, kinds),
        decoder_layers_per_block=[draw.randint(0, 2) for _ in range(count)] + [draw.randint(1, 2)],
        decoder_spatio_temporal_scaling=[True] * count, decoder_inject_noise=[False] * (count + 1), upsample_type=kinds,
        upsample_residual=residuals[::-1], upsample_factor=factors[::-1], patch_size=patch,
        decoder_causal=draw.random() < 0.3, decoder_spatial_padding_mode=draw.choice(["reflect", "zeros"]),
        spatial_compression_ratio=space, temporal_compression_ratio=time, scaling_factor=draw.option(1.0, [1.0, 0.7]),
    )
    return config, (time, space, space)


def audio_vae(draw):
    """Draws the audio autoencoder; its statistics need base_channels = latent_channels * mel_bins / 4."""
    config = dict(latent_channels=draw.choice([1, 2, 4]), mel_bins=draw.choice([8, 12, 16]), resolution=32)
    config |= dict(ch_mult=[1, draw.choice([1, 2]), draw.choice([1, 2])], num_res_blocks=draw.randint(1, 2))
    if not draw.published:
        config["causality_axis"] = draw.choice(["height", "height", "width", "none", "width-compatibility"])
        config["mid_block_add_attention"] = draw.random() < 0.3
        config["attn_resolutions"] = draw.choice([None, None, [8], [16, 32]])
        if config["causality_axis"] == "none" and draw.random() < 0.5:
            config |= dict(latent_channels=8, mel_bins=16, norm_type="group", num_res_blocks=1)
    return config | dict(base_channels=config["latent_channels"] * (config["mel_bins"] // 4))


def _generator(draw, channels, factors, most):
    """Draws a vocoder whose kernels exceed the strides by an even number."""
    count = draw.randint(1, 3)
    return dict(
        in_channels=2 * channels, hidden_channels=draw.choice([1, 2]) * 2 ** len(factors), upsample_factors=factors,
        upsample_kernel_sizes=[f + 2 * draw.randint(0, most) for f in factors],
        resnet_kernel_sizes=draw.sample([3, 5, 7, 11], count),
        resnet_dilations=[draw.sample([1, 2, 3, 5], draw.randint(1, 3)) for _ in range(count)],
    )


def vocoder(draw, mel):
    config = _generator(draw, mel, factors := draw.choice(_VOCODER_FACTORS), 4)
    config["output_sampling_rate"] = 100 * math.prod(factors)
    if not draw.published:
        config |= dict(final_act_fn=draw.choice(["tanh", "clamp", None]), final_bias=draw.random() < 0.7)
        config["leaky_relu_negative_slope"] = draw.choice([0.1, 0.3])
    return config


def newer_vocoder(draw, mel):
    stage = lambda channels, factors: _generator(draw, channels, factors, 3) | dict(
        act_fn=draw.option("snakebeta", ["snakebeta", "snake"]), antialias=draw.flag(True, 0.6),
        final_act_fn=draw.option(None, ["tanh", "clamp", None]), final_bias=draw.flag(False, 0.5),
    )
    first = stage(mel, draw.choice([[10, 8], [8, 5, 4], [5, 4, 2, 2, 2]]))
    rate, bins = 100 * math.prod(first["upsample_factors"]), draw.choice([4, 6, 9])
    factors, growth = draw.choice([[6, 5, 2], [10, 6], [5, 4, 3]]), draw.choice([2, 3])
    hop = math.prod(factors) // growth
    second = {f"bwe_{key}": value for key, value in stage(bins, factors).items()}
    length = hop + draw.randint(0, 30)
    mel = dict(hop_length=hop, filter_length=length, window_length=length, num_mel_channels=bins)
    return first | second | mel | dict(input_sampling_rate=rate, output_sampling_rate=growth * rate)


def upsampler(draw, latent, kind):
    """Draws the resampler of 2.0 or 2.3, or one per frame. Group norm needs 32 channels."""
    kind = kind or draw.choice(UPSAMPLERS)
    return dict(
        in_channels=latent, mid_channels=32, num_blocks_per_stage=draw.randint(0, 1), dims=2 if kind == "frames" else 3,
        use_rational_resampler=kind == "rational",
    )


def gemma(draw, width):
    kv = draw.choice([1, 2])
    heads, layers = kv * draw.choice([h for h in (1, 2) if width % (kv * h) == 0]), draw.randint(2, 8)
    config = dict(
        hidden_size=width, intermediate_size=draw.choice([20, 36]), num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=2 * draw.randint(2, 8), query_pre_attn_scalar=draw.randint(4, 30),
        sliding_window=draw.randint(1, 12), rope_theta=draw.choice([1e6, 1e4]), rope_local_base_freq=draw.choice([1e4, 100.0]),
    )
    if draw.random() < 0.6:
        config["rope_scaling"] = {"rope_type": "linear", "factor": draw.choice([2.0, 8.0])}
    if draw.random() < 0.5:
        return config | dict(layer_types=[draw.choice(["sliding_attention", "full_attention"]) for _ in range(layers)])
    return config | dict(sliding_window_pattern=draw.randint(2, 6))


def gemma4(draw, width):
    full, sliding = "full_attention", "sliding_attention"
    kv = draw.choice([1, 2])
    heads, layers = kv * draw.choice([1, 2]), draw.randint(2, 8)
    config = dict(
        hidden_size=width, intermediate_size=draw.choice([20, 36]), num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=2 * draw.randint(2, 6), sliding_window=draw.randint(1, 12),
        global_head_dim=4 * draw.randint(2, 5), attention_k_eq_v=draw.flag(True, 0.6),
        rope_parameters={
            sliding: dict(rope_type="default", rope_theta=draw.choice([1e4, 100.0])),
            full: dict(
                rope_type="proportional", partial_rotary_factor=draw.choice([0.25, 0.5, 1.0]), rope_theta=draw.choice([1e6, 1e4])
            ),
        },
    )
    if config["attention_k_eq_v"]:
        config["num_global_key_value_heads"] = draw.choice([n for n in (1, 2) if heads % n == 0])
    period = draw.randint(2, 6)
    kinds = [full if (layer + 1) % period == 0 else sliding for layer in range(layers)]
    if draw.flag(False, 0.5):
        kinds = [draw.choice([sliding, full]) for _ in range(layers)]
    # The class requires full attention in the last layer.
    return config | dict(layer_types=[*kinds[:-1], full])


def scheduler(draw):
    dynamic = draw.random() < 0.6
    return dict(
        use_dynamic_shifting=dynamic, shift_terminal=0.1 if dynamic else None, shift=1.0 if dynamic else draw.choice([1.0, 2.5]),
        base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, max_image_seq_len=4096, num_train_timesteps=1000,
        time_shift_type="exponential",
    )


def whole(seed, published, generation, upsampler_kind=None):
    """Draws the configs of a model. `published`: sizes vary, flags are those of the generation."""
    # A separate source for LTX-2.5, so that draws of other generations do not change.
    draw, newest = Draw(seed), Draw(f"{seed}/2.5")
    draw.published = newest.published = published
    caption, latent = draw.choice([12, 16, 20, 24, 36]), draw.choice([3, 4, 8])
    vae_config, ratios = vae(draw, latent)
    audio, text = audio_vae(draw), gemma(draw, caption)
    voice = vocoder(draw, audio["mel_bins"])
    upsampler_config = upsampler(draw, latent, upsampler_kind)
    joined = connectors(draw, caption, text["num_hidden_layers"])
    network = transformer(draw, latent, audio["base_channels"], caption, ratios)
    if generation != "2.0":
        voice = newer_vocoder(draw, audio["mel_bins"])
        network, joined = newer(draw, network, joined)
    if generation == "2.5":
        # The marker of single frames; no biases of the video feed-forward.
        network |= dict(ff_bias=False, use_keyframes_abs_pos_embedding=True)
        if newest.flag(False, 0.25):
            network["use_prompt_adaln_single"] = False
        text = gemma4(newest, caption)
        joined["text_proj_in_factor"] = text["num_hidden_layers"] + 1
    return {
        "vae": vae_config, "audio_vae": audio, "vocoder": voice, "text_encoder": text, "connectors": joined,
        "transformer": network, "scheduler": scheduler(draw), "latent_upsampler": upsampler_config,
    }

"""Runs the networks of a drawn model on random inputs."""

from contextlib import contextmanager

import torch

from cases_text import encode
from cases_transformer import inputs_for, run, scalars_for
from common import randn


def transformer(model, draw):
    config, batch = model.config["transformer"], draw.randint(1, 2)
    shape = dict(frames=draw.randint(1, 3), height=draw.randint(1, 4), width=draw.randint(1, 4), audio_frames=draw.randint(1, 9))
    newest = {"marked": draw.random() < 0.7} if config.get("use_keyframes_abs_pos_embedding") else {}
    values = inputs_for(
        config, **newest, seed=model.seed, batch=batch, text=draw.randint(1, 20), per_token=draw.random() < 0.4,
        masked=draw.random() < 0.4, **shape,
    )
    scalars = scalars_for(
        **shape, fps=draw.choice([24.0, 25.0, 12.5]), use_cross_timestep=draw.random() < 0.5,
        isolate_modalities=draw.random() < 0.2,
    )
    if config.get("perturbed_attn"):
        scalars["stg_blocks"] = [draw.randrange(config["num_layers"])]
    return values, run(model.parts["transformer"], values, scalars), {"scalars": scalars}


def _mask(draw, batch, total):
    """Draws a mask of prompts that are padded on the left."""
    return torch.stack([(torch.arange(total) >= total - draw.randint(1, total)).long() for _ in range(batch)])


def connectors(model, draw):
    config, total, batch = model.config["connectors"], 16 * draw.randint(1, 3), draw.randint(1, 3)
    states = randn(model.seed, "states", batch, total, config["caption_channels"] * config["text_proj_in_factor"])
    mask = _mask(draw, batch, total)
    video, audio, _ = model.parts["connectors"](states, mask)
    return {"text_encoder_hidden_states": states, "attention_mask": mask}, {"video": video, "audio": audio}, {}


def text_encoder(model, draw):
    """Draws ids. Padding rows are not compared; both the stack and its projection are accepted."""
    total, batch = 16 * draw.randint(1, 3), 2
    mask = _mask(draw, batch, total)
    ids = torch.tensor([[draw.randrange(3, 380) for _ in range(total)] for _ in range(batch)]) * mask
    outputs = encode(model.parts["text_encoder"], model.parts["connectors"], ids, mask)
    return {"input_ids": ids, "attention_mask": mask}, {"prompt_embeds": outputs}, {"rows": mask.bool()}


def video_decoder(model, draw):
    """Draws latents, not normalised, of at least two rows and columns, which reflect padding needs."""
    batch, channels = draw.randint(1, 2), model.config["vae"]["latent_channels"]
    latents = randn(model.seed, "latents", batch, channels, draw.randint(1, 3), draw.randint(2, 4), draw.randint(2, 4))
    return {"latents": latents}, {"video": model.parts["vae"].decode(latents, return_dict=False)[0]}, {}


def audio_decoder(model, draw):
    config, batch = model.config["audio_vae"], draw.randint(1, 2)
    latents = randn(model.seed, "latents", batch, config["latent_channels"], draw.randint(1, 9), config["mel_bins"] // 4)
    return {"latents": latents}, {"mel": model.parts["audio_vae"].decode(latents, return_dict=False)[0]}, {}


@contextmanager
def limited(vocoder, clamp):
    """Limits the first of two vocoder stages to -1..1, like Lightricks' code, or does not."""
    stage = vocoder.vocoder if hasattr(vocoder, "bwe_generator") else None
    own = stage and stage.final_act_fn
    if stage:
        stage.final_act_fn = own or ("clamp" if clamp else None)
    try:
        yield
    finally:
        if stage:
            stage.final_act_fn = own


def vocoder(model, draw):
    mel = randn(model.seed, "mel", draw.randint(1, 2), 2, draw.randint(1, 9), model.config["audio_vae"]["mel_bins"])
    part, clamp = model.parts["vocoder"], draw.random() < 0.5
    with limited(part, clamp):
        return {"mel": mel}, {"audio": part(mel)}, {"scalars": {"clamp": clamp}} if hasattr(part, "bwe_generator") else {}


def video_encoder(model, draw):
    config = model.config["vae"]
    space, frames = config["spatial_compression_ratio"], 1 + config["temporal_compression_ratio"] * draw.randint(0, 2)
    video = randn(model.seed, "pixels", 1, 3, frames, space * draw.randint(2, 3), space * draw.randint(2, 3), scale=0.5)
    return {"video": video}, {"latents": model.parts["vae"].encode(video).latent_dist.mode()}, {}


def upsampler(model, draw):
    channels = model.config["latent_upsampler"]["in_channels"]
    latents = randn(model.seed, "latents", 1, channels, draw.randint(1, 3), draw.randint(2, 4), draw.randint(1, 4))
    return {"latents": latents}, {"latents": model.upsampler(latents)}, {}


# Each returns inputs, outputs, and optionally `scalars` and the `rows` to compare.
COMPONENTS = {
    "transformer": transformer, "connectors": connectors, "text-encoder": text_encoder, "video-decoder": video_decoder,
    "audio-decoder": audio_decoder, "vocoder": vocoder, "video-encoder": video_encoder, "upsampler": upsampler,
}

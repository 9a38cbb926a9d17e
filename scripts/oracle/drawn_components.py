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
    return values, scalars, run(model.parts["transformer"], values, scalars), None


def connectors(model, draw):
    config, total, batch = model.config["connectors"], 16 * draw.randint(1, 3), draw.randint(1, 3)
    states = randn(model.seed, "states", batch, total, config["caption_channels"] * config["text_proj_in_factor"])
    mask = torch.zeros(batch, total, dtype=torch.int64)
    for row in range(batch):
        mask[row, total - draw.randint(1, total) :] = 1
    video, audio, _ = model.parts["connectors"](states, mask)
    return {"text_encoder_hidden_states": states, "attention_mask": mask}, {}, {"video": video, "audio": audio}, None


def text_encoder(model, draw):
    """Draws ids. Padding rows are not compared; both the stack and its projection are accepted."""
    total, batch = 16 * draw.randint(1, 3), 2
    mask = torch.zeros(batch, total, dtype=torch.int64)
    for row in range(batch):
        mask[row, total - draw.randint(1, total) :] = 1
    ids = torch.tensor([[draw.randrange(3, 380) for _ in range(total)] for _ in range(batch)]) * mask
    outputs = encode(model.parts["text_encoder"], model.parts["connectors"], ids, mask)
    return {"input_ids": ids, "attention_mask": mask}, {}, {"prompt_embeds": outputs}, mask.bool()


def video_decoder(model, draw):
    """Draws latents, not normalised, of at least two rows and columns, which reflect padding needs."""
    config = model.config["vae"]
    latents = randn(
        model.seed, "latents", draw.randint(1, 2), config["latent_channels"], draw.randint(1, 3), draw.randint(2, 4),
        draw.randint(2, 4),
    )
    return {"latents": latents}, {}, {"video": model.parts["vae"].decode(latents, return_dict=False)[0]}, None


def audio_decoder(model, draw):
    config = model.config["audio_vae"]
    latents = randn(
        model.seed, "latents", draw.randint(1, 2), config["latent_channels"], draw.randint(1, 9), config["mel_bins"] // 4
    )
    return {"latents": latents}, {}, {"mel": model.parts["audio_vae"].decode(latents, return_dict=False)[0]}, None


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
        audio = part(mel)
    return {"mel": mel}, {"clamp": clamp} if hasattr(part, "bwe_generator") else {}, {"audio": audio}, None


def video_encoder(model, draw):
    config = model.config["vae"]
    space, time = config["spatial_compression_ratio"], config["temporal_compression_ratio"]
    frames = 1 + time * draw.randint(0, 2)
    video = randn(model.seed, "pixels", 1, 3, frames, space * draw.randint(2, 3), space * draw.randint(2, 3), scale=0.5)
    return {"video": video}, {}, {"latents": model.parts["vae"].encode(video).latent_dist.mode()}, None


def upsampler(model, draw):
    channels = model.config["latent_upsampler"]["in_channels"]
    latents = randn(model.seed, "latents", 1, channels, draw.randint(1, 3), draw.randint(2, 4), draw.randint(1, 4))
    return {"latents": latents}, {}, {"latents": model.upsampler(latents)}, None


COMPONENTS = {
    "transformer": transformer, "connectors": connectors, "text-encoder": text_encoder, "video-decoder": video_decoder,
    "audio-decoder": audio_decoder, "vocoder": vocoder, "video-encoder": video_encoder, "upsampler": upsampler,
}

"""The generator, prompt to latents like LTX2Pipeline, and the encoders, both for training."""

import torch

import model
import world
from words import TOKENS

GRID = ((world.FRAMES - 1) // 8 + 1, world.HEIGHT // 32, world.WIDTH // 32)
LARGE = (GRID[0], 2 * GRID[1], 2 * GRID[2])
"""The second stage's, of twice the pixels each way."""
AUDIO_TOKENS = (world.MEL_FRAMES + 3) // 4


class Generator(torch.nn.Module):
    def __init__(self, folder, device):
        super().__init__()
        parts = ("text_encoder", "connectors", "transformer")
        self.text, self.connectors, self.transformer = (model.load(folder, part, device) for part in parts)
        self.text.model.vision_tower.requires_grad_(False)
        self.text.model.multi_modal_projector.requires_grad_(False)
        t = self.transformer
        # Tables of positions are computed once.
        videos = [t.rope.prepare_video_coords(1, *grid, device, fps=float(world.FPS)) for grid in (GRID, LARGE)]
        audio = t.audio_rope.prepare_audio_coords(1, AUDIO_TOKENS, device)
        own, cross = {t.rope: videos, t.audio_rope: [audio]}, {t.cross_attn_rope: videos, t.cross_attn_audio_rope: [audio]}
        cross = {module: [grid[:, :1] for grid in grids] for module, grids in cross.items()}
        for module, grids in {**own, **cross}.items():
            tables = {coords.shape[2]: module(coords, device=device) for coords in grids}
            module.forward = lambda coords, device=None, tables=tables: tuple(
                x.expand(len(coords), *x.shape[1:]) for x in tables[coords.shape[2]]
            )
        for connector in (self.connectors.video_connector, self.connectors.audio_connector):
            rope = connector.rope
            table = rope(1, TOKENS, device)
            rope.forward = lambda batch, length, device, table=table: tuple(x.expand(batch, *x.shape[1:]) for x in table)
        self.video_coords, self.audio_coords = {video.shape[2]: video for video in videos}, audio

    def context(self, ids, mask):
        """Returns the contexts of both streams for token ids and mask [batch, tokens]."""
        length, window = ids.shape[1], self.text.config.text_config.sliding_window
        row = torch.arange(length, device=ids.device)
        before = row[:, None] - row[None]
        # Padding attends only to itself, so that no softmax row is empty.
        seen = ((before >= 0) & mask.bool()[:, None, :]) | (before == 0)
        masks = {"full_attention": seen[:, None], "sliding_attention": (seen & (before < window))[:, None]}
        states = self.text.model.language_model(
            input_ids=ids, attention_mask=masks, output_hidden_states=True, use_cache=False
        ).hidden_states
        return self.connectors(torch.stack(states, dim=-1).flatten(2, 3), mask)[:2]

    def velocity(self, video, audio, contexts, sigma, kept=None):
        """Returns velocities of packed latents [batch, n, 32] and [batch, 26, 32] at noise level sigma [batch]. `kept` [batch, n]
        is 1 for tokens of a conditioning image, which have no noise."""
        batch, count = video.shape[:2]
        each = sigma[:, None].expand(-1, count) if kept is None else sigma[:, None] * (1 - kept)
        return self.transformer(
            hidden_states=video, audio_hidden_states=audio, encoder_hidden_states=contexts[0],
            audio_encoder_hidden_states=contexts[1], timestep=each * 1000, audio_timestep=sigma * 1000,
            sigma=sigma * 1000, video_coords=self.video_coords[count].expand(batch, -1, -1, -1),
            audio_coords=self.audio_coords.expand(batch, -1, -1, -1), use_cross_timestep=True, return_dict=False,
        )


class Codec(torch.nn.Module):
    """Autoencoders: clips to packed, normalised latents."""

    def __init__(self, folder, device):
        super().__init__()
        self.vae = model.load(folder, "vae", device).requires_grad_(False).to(memory_format=torch.channels_last_3d)
        self.audio = model.load(folder, "audio_vae", device).requires_grad_(False)

    def pack(self, frames, mels):
        v, a = self.vae, self.audio
        video = v.encoder(frames).float()[:, : v.config.latent_channels].flatten(2).transpose(1, 2)
        audio = a.encoder(mels).float().chunk(2, 1)[0].permute(0, 2, 1, 3).flatten(2)
        return (video - v.latents_mean) / v.latents_std, (audio - a.latents_mean) / a.latents_std

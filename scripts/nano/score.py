"""Detects what clips show and sound like, and scores how often that is what was requested: score.py MODEL [CLIPS].

Scores held-out clips as rendered and through the autoencoders, which are upper bounds, and clips generated from their prompts,
without and with guidance.
"""

import functools
import itertools
import json
import math
import sys

import numpy as np
import torch
from diffusers import LTX2Pipeline

import world
from generator import Codec
from mel import log_mel
from words import TOKENS, names, plain_caption

BATCH, STEPS, SEED = 48, 20, 5
_COLOURS = np.array(list(world.COLOURS.values())) / 255
_BACKS = np.array(list(world.BACKGROUNDS.values())) / 255


def see(frames):
    """Detects colour, motion, background, shape and bounce times in frames [time, height, width, 3] of 0..1."""
    frames = np.asarray(frames, dtype=np.float64)
    far = np.abs(frames - np.median(frames, axis=(0, 2), keepdims=True)).max(-1)
    masks = far > max(0.10, 0.35 * far.max())
    area = masks.sum((1, 2))
    ground = int(np.square(_BACKS - np.median(frames, axis=(0, 1, 2))).sum(1).argmin())
    seen = dict(background=tuple(world.BACKGROUNDS)[ground], colour=None, motion=None, shape=None, bounces=[])
    strong = np.array([np.percentile(f, 99.5) for f in far])
    there = (area >= 8).nonzero()[0]
    if len(there) < 3:
        return seen
    first = there[np.argsort(-strong[there], kind="stable")[: max(3, len(there) // 3)]]
    core = np.concatenate([frames[i][masks[i] & (far[i] > 0.7 * far[i].max())] for i in first])
    seen["colour"] = tuple(world.COLOURS)[int(np.square(_COLOURS - np.median(core, axis=0)).sum(1).argmin())]
    seen["shape"] = _shape(masks[there[area[there].argmax()]])
    y, x = np.mgrid[: frames.shape[1], : frames.shape[2]] + 0.5
    cx, cy = ((masks * g).sum((1, 2))[there] / area[there] for g in (x, y))
    seen["motion"] = _motion(there, cx, cy, area, strong)
    if seen["motion"] == "bounce":
        seen["bounces"] = _bounces(there, cy)
    return seen


def _motion(there, cx, cy, area, strong):
    quarter = max(1, len(there) // 5)
    start, end = slice(0, quarter), slice(-quarter, None)
    dx, dy = cx[end].mean() - cx[start].mean(), cy[end].mean() - cy[start].mean()
    width, height = np.ptp(cx), np.ptp(cy)
    if strong[-2:].mean() < 0.45 * strong[:3].mean():
        return "fade"
    if max(width, height) < 10 or area[-3:].mean() > 3.0 * max(area[:3].mean(), 1):
        return "grow" if area[-3:].mean() > 1.5 * max(area[:3].mean(), 1) else "still"
    turn = np.unwrap(np.arctan2(cy - (cy.max() + cy.min()) / 2, cx - (cx.max() + cx.min()) / 2))
    if width > 20 and height > 20 and abs(turn[-1] - turn[0]) > 3.6:
        return "orbit"
    if height > 14 and height > width and len(_bounces(there, cy)) >= 1 and np.abs(np.diff(cy)).sum() > 1.6 * abs(dy) + 6:
        return "bounce"
    if abs(dx) > abs(dy):
        return "right" if dx > 0 else "left"
    return "down" if dy > 0 else "up"


def _bounces(frames, cy):
    """Returns the frames of the sharp low points of a path."""
    low, times = cy.min() + 0.6 * np.ptp(cy), []
    for i in range(1, len(cy) - 1):
        if cy[i] >= cy[i - 1] and cy[i] > cy[i + 1] and cy[i] > low:
            # Intersection of the falling and the rising line.
            speed = max(cy[i] - cy[i - 1], cy[i] - cy[i + 1], 1e-6)
            times.append(float(frames[i] + (cy[i + 1] - cy[i - 1]) / (2 * speed)))
    return times


def _shape(mask):
    rows, columns = mask.any(1).nonzero()[0], mask.any(0).nonzero()[0]
    mid_x, mid_y = (columns[0] + columns[-1] + 1) / 2, (rows[0] + rows[-1] + 1) / 2
    span = (columns[-1] - columns[0] + 1 + rows[-1] - rows[0] + 1) / 2
    y, x = torch.meshgrid(torch.arange(mask.shape[0]) + 0.5, torch.arange(mask.shape[1]) + 0.5, indexing="ij")
    scales, drops = [0.5, 0.5 / 0.88, 0.55, 0.45], [0.0, 0.0, 0.31, 0.12]
    best, filled = (0, None), torch.from_numpy(mask)
    for (index, name), scale in itertools.product(enumerate(world.SHAPES), (0.92, 1.0, 1.08)):
        r = span * scales[index] * scale
        inside = world._distance(torch.tensor(index), x - mid_x, y - mid_y - drops[index] * r, torch.tensor(r)) < 0.2
        overlap = (inside & filled).sum() / (inside | filled).sum()
        best = max(best, (overlap.item(), name), key=lambda b: b[0])
    return best[1]


def hear(samples, rate):
    """Returns pitch class and onsets (seconds) of samples [2, n]."""
    mono, hop = np.asarray(samples, dtype=np.float64).mean(0), rate // 200
    loud = np.sqrt(np.square(mono[: len(mono) // hop * hop]).reshape(-1, hop).mean(1))
    if loud.max() < 0.012:
        return dict(pitch="silent", onsets=[])
    spectrum = np.abs(np.fft.rfft(mono * np.hanning(len(mono))))
    lines = np.fft.rfftfreq(len(mono), 1 / rate)
    strength = [spectrum[np.abs(lines - p) < 0.12 * p].max() for p in world.PITCHES.values()]
    # Overtones of a low tone coincide with higher pitches.
    pitch = max(i for i, s in enumerate(strength) if s > 0.5 * max(strength))
    onsets, ready = [], True
    for i, level in enumerate(loud):
        if ready and level > 0.4 * loud.max():
            onsets.append(i * hop / rate)
            ready = False
        elif level < 0.2 * loud.max():
            ready = True
    return dict(pitch=tuple(world.PITCHES)[pitch], onsets=onsets)


def judge(scene, frames, samples, rate):
    """Returns which properties of `scene` are present; inapplicable ones are absent."""
    seen, heard = see(frames), hear(samples, rate)
    marks = {k: seen[k] == scene[k] for k in ("colour", "motion", "background", "shape")}
    marks["pitch"] = heard["pitch"] == scene["pitch"]
    if scene["motion"] == "bounce" and scene["pitch"] != "silent":
        # A bounce at the end has no audible sound.
        seconds = [t for b in seen["bounces"] if (t := b / world.FPS) < len(frames) / world.FPS - 0.06]
        near = [min((abs(t - o) for o in heard["onsets"]), default=math.inf) <= 1 / world.FPS for t in seconds]
        marks["beep"] = bool(near) and all(near) and len(heard["onsets"]) <= len(seconds) + 1
    return marks


def table(results):
    keys = sorted({k for marks in results for k in marks})
    return {k: (round(float(np.mean(v)), 4), len(v)) for k in keys if (v := [m[k] for m in results if k in m])}


def held_out_scenes(count):
    return world.sample(count, torch.Generator().manual_seed(77), held=True)


def load_pipeline(folder):
    pipeline = LTX2Pipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(pipeline, prompts, guidance, **more):
    """Returns diffusers' frames [clips, frames, 3, height, width] in 0..1 and samples [clips, 2, n]."""
    scales = dict(guidance_scale=guidance, stg_scale=0.0, modality_scale=1.0, guidance_rescale=0.0)
    return pipeline(
        prompt=prompts, height=world.HEIGHT, width=world.WIDTH, num_frames=world.FRAMES, frame_rate=float(world.FPS),
        num_inference_steps=STEPS, **scales, **{f"audio_{name}": scale for name, scale in scales.items()},
        spatio_temporal_guidance_blocks=None, max_sequence_length=TOKENS, output_type="pt", return_dict=False, **more,
    )


def sources(folder):
    """Returns functions that make frames and samples for scenes, by name."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    codec, pipeline = Codec(folder, device), load_pipeline(folder).to(device)

    def truth(scenes):
        return (world.render(scenes)[0].permute(0, 2, 3, 4, 1) + 1) / 2, world.sound(scenes, 48_000)

    def round_trip(scenes):
        scenes = scenes.to(device)
        return codec.unpack(*codec.pack(world.render(scenes)[0], log_mel(world.sound(scenes), world.MEL_FRAMES)))

    def generated(guidance, scenes):
        prompts, noise = [plain_caption(scene) for scene in names(scenes)], torch.Generator().manual_seed(SEED)
        frames, waves = generate(pipeline, prompts, guidance, generator=noise)
        return frames.permute(0, 1, 3, 4, 2), waves

    by_guidance = {f"guidance {scale}": functools.partial(generated, scale) for scale in (1.0, 3.0)}
    return {"truth": truth, "round trip": round_trip, **by_guidance}


@torch.no_grad()
def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    model, count = sys.argv[1], int((sys.argv[2:] or [96])[0])
    scenes = held_out_scenes(count)
    for name, clips in sources(model).items():
        marks = []
        for start in range(0, count, BATCH):
            some = scenes[start : start + BATCH]
            frames, waves = (x.cpu().numpy() for x in clips(some))
            marks += [judge(scene, *clip, 48_000) for scene, *clip in zip(names(some), frames, waves)]
        print(json.dumps({"score": name, "steps": STEPS, **table(marks)}), flush=True)


if __name__ == "__main__":
    main()

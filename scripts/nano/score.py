"""Detects what clips show and sound like, and scores how often that is what was requested.

    python score.py MODEL --truth            # the rendered clips, and through the autoencoders: upper bounds
    python score.py MODEL --count 96         # generated from held-out prompts
"""

import argparse
import concurrent.futures
import json
import math
import pathlib

import numpy as np
import torch

import world
from words import names, plain_caption

_COLOURS = np.array(list(world.COLOURS.values())) / 255
_BACKS = np.array(list(world.BACKGROUNDS.values())) / 255


def see(frames):
    """Detects colour, motion, background, shape and bounce times in frames [time, height, width, 3] of 0..1."""
    frames = np.asarray(frames, dtype=np.float64)
    back = np.median(frames, axis=(0, 2), keepdims=True)
    far = np.abs(frames - back).max(-1)
    masks = far > max(0.10, 0.35 * far.max())
    faint = far > 0.5 * np.percentile(far, 99.9, axis=(1, 2), keepdims=True)
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
    big = there[area[there].argmax()]
    seen["shape"] = _shape(masks[big])
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
    low = cy.min() + 0.6 * np.ptp(cy)
    times = []
    for i in range(1, len(cy) - 1):
        if cy[i] >= cy[i - 1] and cy[i] > cy[i + 1] and cy[i] > low:
            # Intersection of the falling and the rising line.
            speed = max(cy[i] - cy[i - 1], cy[i] - cy[i + 1], 1e-6)
            times.append(float(frames[i] + (cy[i + 1] - cy[i - 1]) / (2 * speed)))
    return times


def _shape(mask):
    """Returns the shape whose outline overlaps most with a mask."""
    rows, columns = mask.any(1).nonzero()[0], mask.any(0).nonzero()[0]
    mid_x, mid_y = (columns[0] + columns[-1] + 1) / 2, (rows[0] + rows[-1] + 1) / 2
    span = (columns[-1] - columns[0] + 1 + rows[-1] - rows[0] + 1) / 2
    y, x = torch.meshgrid(torch.arange(mask.shape[0]) + 0.5, torch.arange(mask.shape[1]) + 0.5, indexing="ij")
    scales = [0.5, 0.5 / 0.88, 0.55, 0.45]
    drops = [0.0, 0.0, 0.31, 0.12]
    best = (0, None)
    filled = torch.from_numpy(mask)
    for index, name in enumerate(world.SHAPES):
        for scale in (0.92, 1.0, 1.08):
            r = span * scales[index] * scale
            inside = world._distance(torch.tensor(index), x - mid_x, y - mid_y - drops[index] * r, torch.tensor(r)) < 0.2
            overlap = (inside & filled).sum() / (inside | filled).sum()
            best = max(best, (overlap.item(), name), key=lambda b: b[0])
    return best[1]


def hear(samples, rate):
    """Returns pitch class and onsets (seconds) of samples [2, n]."""
    mono = np.asarray(samples, dtype=np.float64).mean(0)
    hop = rate // 200
    loud = np.sqrt(np.square(mono[: len(mono) // hop * hop]).reshape(-1, hop).mean(1))
    if loud.max() < 0.012:
        return dict(pitch="silent", onsets=[])
    spectrum = np.abs(np.fft.rfft(mono * np.hanning(len(mono))))
    lines = np.fft.rfftfreq(len(mono), 1 / rate)
    strength = [spectrum[np.abs(lines - p) < 0.12 * p].max() for p in world.PITCHES]
    # Overtones of a low tone coincide with higher pitches.
    pitch = max(i for i, s in enumerate(strength) if s > 0.5 * max(strength))
    onsets, ready = [], True
    for i, level in enumerate(loud):
        if ready and level > 0.4 * loud.max():
            onsets.append(i * hop / rate)
            ready = False
        elif level < 0.2 * loud.max():
            ready = True
    return dict(pitch=("high", "middle", "low")[pitch], onsets=onsets)


def judge(scene, frames, samples, rate):
    """Returns which properties of `scene` are present; inapplicable ones are absent."""
    seen, heard = see(frames), hear(samples, rate)
    wanted = "silent" if scene["silent"] else dict(small="high", medium="middle", large="low")[scene["size"]]
    marks = {k: seen[k] == scene[k] for k in ("colour", "motion", "background", "shape")}
    marks["pitch"] = heard["pitch"] == wanted
    if scene["motion"] == "bounce" and not scene["silent"]:
        seconds = [b / world.FPS for b in seen["bounces"]]
        # A bounce at the end has no audible sound.
        seconds = [t for t in seconds if t < len(frames) / world.FPS - 0.06]
        near = [min((abs(t - o) for o in heard["onsets"]), default=math.inf) <= 1 / world.FPS for t in seconds]
        marks["beep"] = bool(near) and all(near) and len(heard["onsets"]) <= len(seconds) + 1
    return marks, seen, heard


def table(results):
    keys = sorted({k for marks in results for k in marks})
    return {k: (round(float(np.mean(v)), 4), len(v)) for k in keys if (v := [m[k] for m in results if k in m])}


def test_scenes(count, seed=77):
    """Returns held-out scenes, the same on every run."""
    return world.sample(count, torch.Generator().manual_seed(seed), held=True)


def main():
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("model")
    ask.add_argument("--truth", action="store_true")
    ask.add_argument("--count", type=int, default=96)
    ask.add_argument("--batch", type=int, default=48)
    ask.add_argument("--steps", type=int, default=20)
    ask.add_argument("--guidance", type=float, nargs="*", default=[3.0])
    ask.add_argument("--seed", type=int, default=5)
    ask.add_argument("--out", help="folder for a contact sheet and the list of marks")
    args = ask.parse_args()
    from flow import Codec, Generator, sample, tokens
    from mel import log_mel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1 if device.type == "cuda" else 2)
    scenes = test_scenes(args.count)
    told = names(scenes)
    codec = Codec(args.model, device)
    chunks = [slice(i, min(i + args.batch, args.count)) for i in range(0, args.count, args.batch)]
    pairs = {}
    with torch.no_grad():
        if args.truth:
            for name in ("truth", "round trip"):
                clips = []
                for chunk in chunks:
                    some = scenes[chunk].to(device)
                    frames, wave = world.render(some)[0], world.sound(some, 48_000)
                    if name == "truth":
                        frames = (frames.permute(0, 2, 3, 4, 1) + 1) / 2
                    else:
                        mels = log_mel(world.sound(some), world.MEL_FRAMES)
                        frames, wave = codec.unpack(*codec.pack(frames, mels))
                    clips += zip(frames.cpu().numpy(), wave.cpu().numpy())
                pairs[name] = clips
        else:
            generator = Generator(args.model, device)
            texts = [plain_caption(s) for s in told]
            empty = tokens(args.model, [""], device)
            for guidance in args.guidance:
                clips = []
                for chunk in chunks:
                    ids, mask = tokens(args.model, texts[chunk], device)
                    latents = sample(generator, ids, mask, empty, args.steps, guidance, guidance, args.seed)
                    frames, wave = codec.unpack(*latents)
                    clips += zip(frames.cpu().numpy(), wave.cpu().numpy())
                pairs[f"guidance {guidance}"] = clips
    for name, clips in pairs.items():
        with concurrent.futures.ThreadPoolExecutor() as threads:
            judged = list(threads.map(lambda pair: judge(pair[0], *pair[1], 48_000), zip(told, clips)))
        line = json.dumps({"score": name, "steps": args.steps, **table([j[0] for j in judged])})
        print(line, flush=True)
        if args.out:
            out = pathlib.Path(args.out)
            out.mkdir(parents=True, exist_ok=True)
            stem = name.replace(" ", "-")
            with open(out / "scores.jsonl", "a", encoding="utf-8") as scores:
                print(line, file=scores)
            lines = [
                json.dumps({"caption": plain_caption(s), "wrong": [k for k, v in m.items() if not v], "seen": v, "heard": h})
                for s, (m, v, h) in zip(told, judged)
            ]
            (out / f"{stem}.jsonl").write_text("\n".join(lines) + "\n")
            sheet([f for f, _ in clips[:20]], out / f"{stem}.png")


def sheet(clips, path):
    """Writes an image with every fourth frame, one row per clip."""
    from PIL import Image

    rows = [np.concatenate(list(clip[::4]), 1) for clip in clips]
    Image.fromarray((np.concatenate(rows) * 255).round().clip(0, 255).astype(np.uint8)).save(path)


if __name__ == "__main__":
    main()

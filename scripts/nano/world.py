"""The toy world: short clips of a moving flat shape and its sound, drawn in batches on any device.

Sound follows from the picture: pitch from size, timbre from shape, a beep at each bounce, loudness from growing and fading,
stereo position from x. All tones are multiples of 400 Hz with fixed phases, so that a spectrogram determines its waveform."""

import itertools
import math
import types

import torch

WIDTH, HEIGHT, FRAMES, FPS = 128, 96, 25, 24
MEL_FRAMES, SAMPLES, SAMPLES_HIGH = 101, 16_160, 48_480

SHAPES = ("circle", "square", "triangle", "star")
COLOURS = {
    "red": (222, 45, 45), "green": (50, 185, 75), "blue": (55, 105, 235), "yellow": (245, 215, 55),
    "white": (245, 245, 245), "purple": (160, 65, 205), "orange": (245, 140, 35), "cyan": (70, 210, 225),
}
BACKGROUNDS = {
    "black": (18, 18, 22), "gray": (118, 118, 118), "blue": (25, 45, 110), "green": (18, 82, 42), "red": (105, 22, 30),
    "purple": (70, 28, 92),
}
SIZES = ("small", "medium", "large")
RADII = (9.0, 14.0, 20.0)
PITCHES = {"high": 1600.0, "middle": 800.0, "low": 400.0}
MOTIONS = ("left", "right", "up", "down", "bounce", "orbit", "grow", "fade")
FLOOR = 86.0
_FOOT = (1.0, 0.88, 0.62, 0.97)
"""How far below its centre a shape ends, in radii."""


class Scenes(types.SimpleNamespace):
    """A batch of clips as tensors: indices into the lists above and unnamed parameters.

    shape, colour, size, motion, background: [batch].
    silent: [batch], 1 where there is no sound.
    other_shape, other_colour, corner: [batch], a second shape that stays in a corner; other_shape is -1 for none.
    dice: [batch, 6] in 0..1: where it starts, how far it goes, how fast, when."""

    def to(self, device):
        return Scenes(**{name: field.to(device) for name, field in vars(self).items()})

    def __getitem__(self, index):
        return Scenes(**{name: field[index] for name, field in vars(self).items()})


def held_out(shape, colour, motion):
    """Returns whether a combination is excluded from training: 32 of 256."""
    return (shape * 5 + colour * 3 + motion * 7 + shape * motion + colour * motion) % 32 < 5


def sample(count, generator, held=False):
    """Draws scenes on the CPU; `held` draws only held-out combinations."""
    draw = lambda high, n=count: torch.randint(high, (n,), generator=generator)
    shape, colour, motion = draw(4), draw(8), draw(8)
    for _ in range(200):
        wrong = (held_out(shape, colour, motion) != held).nonzero()[:, 0]
        if not len(wrong):
            break
        for field, high in ((shape, 4), (colour, 8), (motion, 8)):
            field[wrong] = draw(high, len(wrong))
    background = draw(6)
    same = torch.tensor([[a == b for b in BACKGROUNDS] for a in COLOURS])
    while (wrong := same[colour, background].nonzero()[:, 0]).numel():
        background[wrong] = draw(6, len(wrong))
    other_colour = draw(8)
    while (wrong := (same[other_colour, background] | (other_colour == colour)).nonzero()[:, 0]).numel():
        other_colour[wrong] = draw(8, len(wrong))
    chance = lambda p: torch.rand(count, generator=generator) < p
    return Scenes(
        shape=shape, colour=colour, size=draw(3), motion=motion, background=background, silent=chance(0.12).long(),
        other_shape=torch.where(chance(0.0 if held else 0.15), draw(4), torch.full((count,), -1)), other_colour=other_colour,
        corner=draw(4), dice=torch.rand(count, 6, generator=generator),
    )


def _between(dice, low, high):
    return low + (high - low) * dice


def path(s, times):
    """Returns centre x, centre y, radius and opacity at frame `times` [n], each [batch, n]."""
    t, d = times[None], s.dice[:, :, None]
    share = (t / (FRAMES - 1)).clamp(max=1.1)
    base = torch.tensor(RADII, device=t.device)[s.size][:, None] * _between(d[:, 0], 0.95, 1.05)
    across, upright = _between(d[:, 1], 30, 66), _between(d[:, 1], 34, 94)
    near, far = _between(d[:, 2], 26, 40), _between(d[:, 3], 88, 102)
    high, low = _between(d[:, 2], 22, 30), _between(d[:, 3], 66, 74)
    angle = 2 * math.pi * (d[:, 1] + share * _between(d[:, 2], 0.8, 1.1))
    period, phase = _bounce(s)
    u = (t / period + phase) % 1
    still_x, still_y = _between(d[:, 1], 48, 80), _between(d[:, 2], 40, 56)
    one = torch.ones_like(share * base)
    foot = FLOOR - base * torch.tensor(_FOOT, device=t.device)[s.shape][:, None]
    rows = [
        (far + (near - far) * share, across, base, one),
        (near + (far - near) * share, across, base, one),
        (upright, low + (high - low) * share, base, one),
        (upright, high + (low - high) * share, base, one),
        (upright, foot - 4 * u * (1 - u) * _between(d[:, 2], 32, 44), base, one),
        (64 + 26 * angle.cos(), 48 + 24 * angle.sin(), base, one),
        (still_x, still_y, base * (0.45 + 1.0 * share), one),
        (still_x, still_y, base, (1 - 0.95 * share).clamp(min=0)),
    ]
    stacked = torch.stack([torch.stack([v * one for v in row]) for row in rows])
    return stacked.gather(0, s.motion[None, None, :, None].expand(1, 4, -1, t.shape[1]))[0].unbind(0)


def _bounce(s):
    """Returns the period of a bouncing shape, and the position in its arc at which it starts."""
    return _between(s.dice[:, 4:5], 8, 11), _between(s.dice[:, 5:6], 0.2, 0.6)


def _distance(shape, x, y, r):
    """Returns the signed distance to the outline of a shape of radius r, negative inside."""
    length = (x * x + y * y).sqrt()
    circle, square = length - r, torch.maximum(x.abs(), y.abs()) - 0.88 * r
    triangle = torch.maximum(y - 0.62 * r, 0.866 * x.abs() - 0.5 * y - 0.62 * r)
    # A star is ten mirrored wedges from the tip at 1.2 r to the notch at 0.52 r.
    wedge = math.pi / 5
    turn = ((torch.atan2(x, -y) + wedge) % (2 * wedge) - wedge).abs()
    along, aside = 0.52 * math.cos(wedge) - 1.2, 0.52 * math.sin(wedge)
    star = (aside * (length * turn.cos() - 1.2 * r) - along * length * turn.sin()) / math.hypot(along, aside)
    return torch.where(shape == 3, star, torch.where(shape == 0, circle, torch.where(shape == 1, square, triangle)))


def render(s, scale=1):
    """Returns frames [batch, 3, frames, height, width] in -1..1 and the moving shape's coverage; `scale`: pixels per unit."""
    device = s.dice.device
    cx, cy, r, opacity = (v[:, :, None, None] for v in path(s, torch.arange(FRAMES, device=device, dtype=torch.float32)))
    y, x = torch.meshgrid(*((torch.arange(n * scale, device=device) + 0.5) / scale for n in (HEIGHT, WIDTH)), indexing="ij")
    covered = lambda distance: (0.5 - scale * distance).clamp(0, 1)
    colours = torch.tensor(list(COLOURS.values()), device=device) / 127.5 - 1
    back = torch.tensor(list(BACKGROUNDS.values()), device=device) / 127.5 - 1
    pick = lambda i: i.clamp(min=0)[:, None, None, None]
    # Brighter at the top, darker at the bottom, with a floor for bouncing shapes.
    light = 0.10 - 0.2 * y / HEIGHT
    floor = 0.12 * (y - FLOOR).clamp(0, 1)[None] * (s.motion == MOTIONS.index("bounce"))[:, None, None]
    frames = (back[s.background][:, :, None, None] + light - floor[:, None])[:, :, None]
    ox = torch.where(s.corner % 2 == 0, 13.0, WIDTH - 13.0)[:, None, None, None]
    oy = torch.where(s.corner < 2, 13.0, HEIGHT - 13.0)[:, None, None, None]
    other = covered(_distance(pick(s.other_shape), x - ox, y - oy, torch.tensor(8.0, device=device)))
    other = (other * (s.other_shape >= 0)[:, None, None, None])[:, None]
    frames = frames + other * (colours[s.other_colour][:, :, None, None, None] - frames)
    cover = (covered(_distance(pick(s.shape), x - cx, y - cy, r)) * opacity)[:, None]
    frames = frames + cover * (colours[s.colour][:, :, None, None, None] - frames)
    return frames.clamp(-1, 1), cover


def _tables(rate, device):
    """Returns one 400 Hz period of every (shape, size), [4, 3, rate / 400]."""
    n, rows = torch.arange(rate // 400, device=device) / rate, []
    for shape, pitch in itertools.product(range(4), PITCHES.values()):
        wave = torch.zeros_like(n)
        for k in range(1, 41):
            height = (k == 1, k % 2 / k, k % 2 / k**2, 1 / k)[shape]
            if height and k * pitch < min(0.94 * rate / 2, 16_000):
                wave = wave + height * torch.sin(2 * math.pi * k * pitch * n)
        rows.append(wave / wave.square().mean().sqrt())
    return torch.stack(rows).reshape(4, 3, -1)


def sound(s, rate=16_000):
    """Returns stereo samples [batch, 2, n] at 16 or 48 kHz."""
    device = s.dice.device
    n = torch.arange(SAMPLES * (rate // 16_000), device=device)
    seconds = n / rate
    wave = _tables(rate, device)[s.shape, s.size][:, n % (rate // 400)]
    cx, _, _, opacity = path(s, torch.arange(0, FRAMES + 2, device=device, dtype=torch.float32))
    share = (seconds * FPS / (FRAMES - 1)).clamp(max=1)[None]
    grow = torch.where((s.motion == MOTIONS.index("grow"))[:, None], 0.25 + 0.75 * share, 1.0)
    fade = torch.where((s.motion == MOTIONS.index("fade"))[:, None], _at(opacity, seconds) ** 1.5, 1.0)
    hum = grow * fade * (seconds / 0.03).clamp(max=1)
    # The frames at which a shape touches the floor, [batch, 4]; infinity if it does not.
    period, phase = _bounce(s)
    hits = (torch.arange(1, 5, device=device)[None] - phase) * period
    real = (hits < FRAMES - 0.5) & (s.motion == MOTIONS.index("bounce"))[:, None]
    since = seconds[None, None] - torch.where(real, hits, math.inf)[:, :, None] / FPS
    beep = ((since / 0.004).clamp(0, 1) * torch.exp(-since.clamp(0, 1) / 0.045)).amax(1) * (since > 0).any(1)
    loud = torch.where((s.motion == MOTIONS.index("bounce"))[:, None], 1.4 * beep, hum) * (1 - s.silent)[:, None]
    side = _at(cx, seconds) / WIDTH
    return 0.16 * torch.stack([1.2 - 0.7 * side, 0.5 + 0.7 * side], 1) * (wave * loud)[:, None]


def _at(values, seconds):
    """Interpolates values [batch, frames] at `seconds`."""
    place = (seconds * FPS).clamp(max=values.shape[1] - 1.001)
    low = place.floor().long()
    return values[:, low] + (values[:, low + 1] - values[:, low]) * (place - low)

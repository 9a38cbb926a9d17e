"""Draws the training logs of a folder: python curves.py benchmarks/nano > benchmarks/nano/curves.svg"""

import json
import math
import pathlib
import sys

PANELS = (
    ("vae", "video autoencoder", (("near", "#3b7dbd"), ("rims", "#e59a3c"))),
    ("audio", "audio autoencoder, vocoder", (("mel", "#3b7dbd"), ("first", "#e59a3c"), ("second", "#c0504d"))),
    ("flow", "text encoder, connectors, transformer", (("video", "#3b7dbd"), ("audio", "#e59a3c"), ("large", "#8064a2"))),
    ("upsampler", "upsampler", (("loss", "#3b7dbd"),)),
)
WIDTH, HEIGHT, LEFT, TOP = 420, 150, 44, 26


def curve(path):
    """Lines of a log with a clock that goes on over phases and slices, each of which starts anew at step 1."""
    rows, before, last = [], 0.0, 0.0
    for line in map(json.loads, path.read_text().splitlines()):
        if "step" in line:
            if line["step"] == 1:
                before += last
            last = line["seconds"]
            rows.append((before + last, line))
    return rows


def panel(path, title, keys, top):
    rows = curve(path)
    values = [line[key] for _, line in rows for key, _ in keys if key in line]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    x = lambda seconds: LEFT + seconds / rows[-1][0] * WIDTH
    y = lambda value: top + HEIGHT * (high - math.log10(value)) / (high - low)
    yield f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{title}, {rows[-1][0]:.0f} s</text>'
    for power in range(low, high + 1):
        yield f'<path d="M{LEFT} {y(10.0**power):.1f}h{WIDTH}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 6}" y="{y(10.0**power) + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
    for place, (key, colour) in enumerate(keys):
        points = " ".join(f"{x(seconds):.1f},{y(line[key]):.1f}" for seconds, line in rows if key in line)
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.3"/>'
        yield f'<text x="{LEFT + WIDTH - 8}" y="{top + 16 + 14 * place}" text-anchor="end" fill="{colour}">{key}</text>'


def main():
    folder = pathlib.Path(sys.argv[1])
    high = len(PANELS) * (HEIGHT + 44)
    print(f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + LEFT + 12}" height="{high}" font-family="sans-serif" font-size="11">')
    print(f'<rect width="100%" height="{high}" fill="white"/>')
    for place, (stage, title, keys) in enumerate(PANELS):
        print("\n".join(panel(folder / f"{stage}.jsonl", title, keys, TOP + place * (HEIGHT + 44))))
    print("</svg>")


if __name__ == "__main__":
    main()

"""Bars of `ltx2 bench` beside diffusers: figure.py FOLDER > FILE.svg, FOLDER holding SIZE.ltx2.json and
SIZE.diffusers.json, as scripts/gpu/bench.sh writes them."""

import json
import pathlib
import sys

ROWS = [
    ("one step, 768x512, 121 frames", "768x512x121", "denoise_loop", "denoise_compiled"),
    ("one step, 1280x768, 121 frames", "1280x768x121", "denoise_loop", "denoise_compiled"),
    ("one step, 384x256, 121 frames", "384x256x121", "denoise_loop", "denoise_compiled"),
    ("text encoder, both prompts", "768x512x121", "text_encoder", "text_encoder"),
    ("video decoder, 121 frames", "768x512x121", "video_decoder", "video_decoder"),
]
LEFT, WIDTH, BAR, GAP, TOP = 230, 380, 16, 26, 40


def read(folder, size, kind):
    path = folder / f"{size}.{kind}.json"
    return json.loads(path.read_text()) if path.exists() else None


def medians(folder):
    """(what, our seconds, diffusers' seconds) of each row that was measured."""
    for what, size, ours, theirs in ROWS:
        found = (read(folder, size, "ltx2") or {"programs": {}})["programs"].get(ours, {}).get("median")
        peer = (read(folder, size, "diffusers") or {"seconds": {}})["seconds"].get(theirs)
        if found and peer:
            yield what, found, peer


def main():
    rows = list(medians(pathlib.Path(sys.argv[1])))
    height = TOP + len(rows) * (2 * BAR + GAP)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 110} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{LEFT + WIDTH + 110}" height="{height}" fill="#ffffff"/>',
        f'<rect x="{LEFT}" y="12" width="12" height="12" fill="#2a6fb0"/><text x="{LEFT + 18}" y="23">ltx2</text>',
        f'<rect x="{LEFT + 70}" y="12" width="12" height="12" fill="#b9bfc6"/>'
        f'<text x="{LEFT + 88}" y="23">diffusers, compiled; seconds, each row to its own scale</text>',
    ]
    for i, (what, ours, theirs) in enumerate(rows):
        y = TOP + i * (2 * BAR + GAP)
        out.append(f'<text x="{LEFT - 10}" y="{y + BAR + 5}" text-anchor="end">{what}</text>')
        for n, (seconds, colour) in enumerate([(ours, "#2a6fb0"), (theirs, "#b9bfc6")]):
            width, at = WIDTH * seconds / max(ours, theirs), y + n * (BAR + 2)
            out.append(f'<rect x="{LEFT}" y="{at}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
            out.append(f'<text x="{LEFT + width + 6:.1f}" y="{at + 13}">{seconds:.3f}</text>')
    print("\n".join(out + ["</svg>"]))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes image conditioning: files as Lightricks reads them, H.264 round trips, and a request from an image.

Reading files needs release 1.2.0: LTX_OFFICIAL is the `packages` folder of a checkout. Without it, those cases are kept.
"""

import io
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from unittest.mock import MagicMock

import av
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "images"


def smooth_and_sharp(height, width):
    """Returns gradients, waves and an edge from integer arithmetic."""
    y, x = np.mgrid[0:height, 0:width]
    disc = ((x - width * 2 // 5) ** 2 + (y - height // 2) ** 2 < 300) * 220 + 30
    waves = (x * x // 7 + y * 3) % 97 + (x * y // 5) % 61
    return np.stack([x * 255 // (width - 1), y * 255 // (height - 1), np.where(x < width // 2, disc, waves)], -1).astype(np.uint8)


def through_h264():
    """Encodes and decodes by Lightricks' PyAV code. The slices of a frame depend on its height and the number of cores."""
    from ltx_pipelines.utils.media_io import encode_single_frame, preprocess

    from common import show, write_case

    image, scalars, outputs = smooth_and_sharp(129, 49), {}, {}
    for crf in (33, 18):
        with io.BytesIO() as file:
            encode_single_frame(file, image, crf)
            said = file.getvalue()
        scalars |= {key: int(re.search(rf"{key}[= ](\d+)".encode(), said)[1]) for key in ("core", "threads", "slices")}
        outputs[f"crf_{crf}"] = torch.from_numpy(preprocess(image, crf))
    write_case(
        "images", "h264", {"image": torch.from_numpy(image)}, outputs, script=__file__, model="none", seed=0,
        scalars=scalars, extra={"av": av.__version__},
    )
    show(f"images/h264 {json.dumps(scalars)}")


def image_to_video():
    """Writes a request from a first frame that was compressed by H.264. The file has the video's size, as diffusers resizes
    differently."""
    from diffusers import LTX2ImageToVideoPipeline

    import models
    from cases_pipeline import _neutral, _request, run_pipeline
    from common import show, write_case

    file = FOLDER / "frame.png"
    Image.fromarray(smooth_and_sharp(64, 96)).save(file, optimize=True)
    # No rescaling, for which diffusers and Lightricks treat the frame differently.
    guidance = {"video": _neutral(4.0), "audio": _neutral(3.0)}
    request = _request(width=96, height=64, num_frames=9, steps=2, guidance=guidance)
    request |= dict(images=[dict(path="frame.png", frame=0, strength=1.0, crf=33)], cross_timestep="cross")
    pipeline = LTX2ImageToVideoPipeline(**models.load_pipeline("tiny_a").components)
    pipeline.set_progress_bar_config(disable=True)
    outputs = run_pipeline(pipeline, request, image=Image.open(file))
    kept = {name: outputs[name] for name in ("latents.video", "latents.audio", "sigmas")}
    write_case("images", "image_to_video", {}, kept, script=__file__, model="tiny_a", seed=request["seed"], scalars=request)
    show("images/image_to_video", *kept.values())


def _chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _deep_png(path):
    """Writes a PNG with 16 bits per channel, which Pillow cannot."""
    values = [(i * 9973 + c * 4001) % 65536 for i in range(12) for c in range(3)]
    rows = b"".join(b"\0" + struct.pack(">12H", *values[row * 12 : row * 12 + 12]) for row in range(3))
    parts = [(b"IHDR", struct.pack(">IIBBBBB", 4, 3, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts))


def wide_gamut(grey=False):
    """Returns an ICC profile with gamma 2.2 and the primaries of Adobe RGB (1998) at D50."""
    s15 = lambda v: struct.pack(">i", round(v * 65536))
    xyz = lambda *v: b"XYZ \0\0\0\0" + b"".join(map(s15, v))
    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(2.2 * 256)) + b"\0\0"
    tags = {b"wtpt": xyz(0.9642, 1.0, 0.8249)}
    if grey:
        tags[b"kTRC"] = curve
    else:
        primaries = (0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457)
        tags |= {name: xyz(*values) for name, values in zip((b"rXYZ", b"gXYZ", b"bXYZ"), primaries)}
        tags |= {name: curve for name in (b"rTRC", b"gTRC", b"bTRC")}
    table, blob, at = b"", b"", 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        table += name + struct.pack(">II", at + len(blob), len(data))
        blob += data
    header = struct.pack(">I4sI4s4s4s", at + len(blob), b"\0\0\0\0", 0x02400000, b"mntr", b"GRAY" if grey else b"RGB ", b"XYZ ")
    header += struct.pack(">6H4s", 2020, 1, 1, 0, 0, 0, b"acsp") + bytes(28) + s15(0.9642) + s15(1.0) + s15(0.8249)
    return header.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + blob


def write_files():
    """Writes small images for every way in which images are read."""
    image = Image.fromarray(smooth_and_sharp(10, 14))
    ramp = Image.fromarray(np.tile(np.arange(0, 252, 18, dtype=np.uint8), (10, 1)))
    alpha = image.copy()
    alpha.putalpha(ramp)
    files = {"alpha": alpha, "grey": ramp, "palette": image.quantize(7), "bits": ramp.convert("1")}
    files["grey_alpha"] = Image.merge("LA", (ramp, ramp.rotate(180)))
    for name, made in files.items():
        made.save(FOLDER / f"{name}.png", optimize=True)
    for orientation in range(2, 9):
        exif = Image.Exif()
        exif[274] = orientation
        image.save(FOLDER / f"turned_{orientation}.png", optimize=True, exif=exif)
    image.save(FOLDER / "wide_gamut.png", optimize=True, icc_profile=wide_gamut())
    ramp.save(FOLDER / "grey_gamut.png", optimize=True, icc_profile=wide_gamut(grey=True))
    image.save(FOLDER / "other_gamut.png", optimize=True, icc_profile=wide_gamut(grey=True))
    _deep_png(FOLDER / "deep.png")
    exif = Image.Exif()
    exif[274] = 6
    image.resize((56, 40)).save(FOLDER / "turned_6.jpg", quality=95, subsampling=0, exif=exif)


def decoded():
    """Reads all files by release 1.2.0, in a separate process because the other cases import 1.0.0."""
    from common import show, write_case

    official = os.environ.get("LTX_OFFICIAL")
    if not official:
        print("images: LTX_OFFICIAL is not set, what is read from files stays")
        return
    write_files()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "decoded.safetensors"
        subprocess.run([sys.executable, __file__, official, out], check=True)
        outputs = load_file(out)
    write_case("images", "decoded", {}, outputs, script=__file__, model="none", seed=0, extra={"ltx-pipelines": "1.2.0"})
    show("images/decoded", *outputs.values())


def decode_with(packages, out):
    sys.path[:0] = [str(Path(packages) / name / "src") for name in ("ltx-core", "ltx-pipelines")]
    # Needed only for EXR files.
    sys.modules["OpenImageIO"] = MagicMock()
    from ltx_pipelines.utils.media_io.decode import decode_image

    files = [file for file in sorted(FOLDER.iterdir()) if file.name not in ("shapes.png", "frame.png")]
    save_file({file.name: torch.from_numpy(decode_image(str(file))) for file in files}, out)


def images():
    through_h264()
    image_to_video()
    decoded()


COMPONENTS = {"images": images}

if __name__ == "__main__":
    decode_with(sys.argv[1], sys.argv[2])

"""Writes image conditioning: files as Lightricks 1.2.0 reads them, H.264 round trips, and a request from an image."""

import io
import re
from functools import partial

import av
import numpy as np
import torch
from diffusers import LTX2ImageToVideoPipeline
from PIL import Image

import models
from cases_pipeline import request_of, run_pipeline, scales
from common import FIXTURES, write_case

write = partial(write_case, "images")
FOLDER = FIXTURES / "images"


def h264():
    """Encodes and decodes by Lightricks' PyAV code. The slices of a frame depend on its height and the number of cores."""
    from ltx_pipelines.utils.media_io import encode_single_frame, preprocess

    # Gradients, waves and an edge from integer arithmetic.
    height, width, scalars, outputs = 129, 49, {}, {}
    y, x = np.mgrid[0:height, 0:width]
    disc = ((x - width * 2 // 5) ** 2 + (y - height // 2) ** 2 < 300) * 220 + 30
    blue = np.where(x < width // 2, disc, (x * x // 7 + y * 3) % 97 + (x * y // 5) % 61)
    image = np.stack([x * 255 // (width - 1), y * 255 // (height - 1), blue], -1).astype(np.uint8)
    for crf in (33, 18):
        with io.BytesIO() as file:
            encode_single_frame(file, image, crf)
            said = file.getvalue()
        scalars |= {key: int(re.search(rf"{key}[= ](\d+)".encode(), said)[1]) for key in ("core", "threads", "slices")}
        outputs[f"crf_{crf}"] = torch.from_numpy(preprocess(image, crf))
    write("h264", {"image": torch.from_numpy(image)}, outputs, scalars=scalars, extra={"av": av.__version__})


def image_to_video():
    """Writes a request from an H.264-compressed first frame. It has the video's size, as diffusers resizes differently."""
    # No rescaling, for which diffusers and Lightricks treat the frame differently.
    guidance, images = {"video": scales(4.0), "audio": scales(3.0)}, [dict(path="frame.png", frame=0, strength=1.0, crf=33)]
    request = request_of(width=96, height=64, guidance=guidance, cross_timestep="cross", images=images)
    pipeline = models.load_pipeline("tiny_a", kind=LTX2ImageToVideoPipeline)
    outputs = run_pipeline(pipeline, request, image=Image.open(FOLDER / "frame.png"))
    kept = {name: outputs[name] for name in ("latents.video", "latents.audio", "sigmas")}
    write("image_to_video", {}, kept, model="tiny_a", seed=request["seed"], scalars=request)


def decoded_images():
    from ltx_pipelines.utils.media_io.decode import decode_image

    files = [file for file in sorted(FOLDER.iterdir()) if file.name not in ("shapes.png", "frame.png")]
    outputs = {file.name: torch.from_numpy(decode_image(str(file))) for file in files}
    write("decoded", {}, outputs, extra={"ltx-pipelines": "1.2.0"})

#!/usr/bin/env python3
"""Writes requests by Lightricks' pipelines with the latents after every step.

    cases_official.py --official FOLDER     release 1.2.0: `reference: official`
    cases_official.py                       release 1.0.0: `reference: official_1_0`
"""

import json

import official_pipelines
import torch
from PIL import Image

import models
from cases_decoders import thin
from cases_text import NEGATIVE, POSITIVE, encode, tokenize
from cases_transformer import inputs_for, run, scalars_for
from common import FIXTURES, REPOSITORY, relative_l2, show, write_case
from official_file import write_model, write_upsampler

IMAGE = FIXTURES / "images" / "shapes.png"
SOUND = FIXTURES / "sounds" / "given.flac"
UPSAMPLERS = {"tiny_a": "upsampler_rational", "tiny_2_3": "upsampler_plain"}
_PRESETS = {
    "image_to_video": "", "two_stage": "_two_stage", "keyframes": "_two_stage", "distilled": "_distilled", "hq": "_hq",
    "audio_to_video": "_two_stage",
}
_LENGTH = 64
# Strides of the stored frames and samples.
_STRIDES = {"video": (1, 4, 1, 9, 9), "audio": (1, 1, 37)}


def write_image():
    IMAGE.parent.mkdir(parents=True, exist_ok=True)
    pixels = [
        (255 * x // 39, 255 * y // 29, 220 if (x - 12) ** 2 + (y - 15) ** 2 < 60 else 30) for y in range(30) for x in range(40)
    ]
    image = Image.new("RGB", (40, 30))
    image.putdata(pixels)
    image.save(IMAGE)


def scales(cfg=1.0, stg=0.0, modality=1.0, rescale=0.0, stg_blocks=()):
    return dict(cfg=cfg, stg=stg, modality=modality, rescale=rescale, stg_blocks=list(stg_blocks))


def image(frame, strength=1.0):
    return dict(path=IMAGE, frame=frame, strength=strength)


def request(pipeline, **more):
    """Returns a request of the smallest size whose height, width and time differ."""
    size = (96, 64) if pipeline == "image_to_video" else (128, 64)
    known = dict(
        pipeline=pipeline, prompt=POSITIVE, negative_prompt=NEGATIVE, seed=4, width=size[0], height=size[1], num_frames=9,
        frame_rate=24.0, images=[], audio=None, steps=2, cross_timestep=None, guidance={"video": scales(), "audio": scales()},
    )
    return {**known, **more}


class Model:
    """A fixture model in the formats of both sides."""

    runs = official_pipelines.Run

    def __init__(self, name, folder):
        self.name, self.path, self.upsampler = name, folder / f"{name}.safetensors", folder / f"{name}_up.safetensors"
        write_model(self.path, name)
        write_upsampler(self.upsampler, UPSAMPLERS[name])
        parts = {part: models.load(name, part) for part in ("text_encoder", "connectors", "vae", "audio_vae")}
        self.vae, self.audio_vae = parts["vae"], parts["audio_vae"]
        self.contexts = []
        for text in (POSITIVE, NEGATIVE):
            ids, mask = tokenize(name, [text], _LENGTH)
            embeds = encode(parts["text_encoder"], parts["connectors"], ids, mask)["prompt_embeds"]
            video, audio, _ = parts["connectors"](embeds, mask, padding_side="left")
            self.contexts.append({"video": video, "audio": audio})
        config = models.AUDIO_VAE[name]
        self.bins, self.sound = config["mel_bins"] // 4, config["latent_channels"]
        self.channels = models.VAE[name]["latent_channels"]
        official_pipelines.set_channels(self.channels, self.bins, self.sound)

    def sizes(self, request):
        """Returns the latent shapes of each pass."""
        frames = (request["num_frames"] - 1) // 8 + 1
        length = round(request["num_frames"] / request["frame_rate"] * 25)
        once = [32] if request["pipeline"] == "image_to_video" else [64, 32]
        size = [(request["height"] // unit, request["width"] // unit) for unit in once]
        return [((1, self.channels, frames, *hw), (1, self.sound, length, self.bins)) for hw in size]

    def unpacked(self, tokens, shapes):
        """Unpacks normalised tokens of both streams to latents as in a dump."""
        video, audio = (t.float() for t in tokens)
        (_, c, f, h, w), (_, channels, length, bins) = shapes
        video = video[:, : f * h * w].transpose(1, 2).reshape(1, c, f, h, w)
        video = video * self.vae.latents_std.view(1, -1, 1, 1, 1) + self.vae.latents_mean.view(1, -1, 1, 1, 1)
        audio = audio * self.audio_vae.latents_std + self.audio_vae.latents_mean
        return {"latents.video": video, "latents.audio": audio.reshape(1, length, channels, bins).transpose(1, 2)}

    def decoded(self, tokens, shapes, streams=("video", "audio")):
        """Decodes normalised tokens to frames and samples."""
        (_, c, f, h, w), (_, channels, length, bins) = shapes
        unpack = {
            "video": lambda: tokens[0][:, : f * h * w].transpose(1, 2).reshape(1, c, f, h, w),
            "audio": lambda: tokens[-1].reshape(1, length, channels, bins).transpose(1, 2),
        }
        vocoder = models.load(self.name, "vocoder")
        return official_pipelines.decoded(self.path, vocoder, **{name: unpack[name]() for name in streams})

    def run(self, request, decode=False):
        """Returns latents by the names of a dump, after every step and at the end; with `decode`, also frames and samples."""
        sizes = self.sizes(request)
        theirs = self.runs(self.path, self.upsampler, request, self.contexts, sizes)
        passes, kept = theirs()
        outputs = {}
        for prefix, shapes, steps in zip(("", "stage_2.")[: len(sizes)], sizes, passes, strict=True):
            for step, tokens in enumerate(steps):
                named = self.unpacked(tokens, shapes).items()
                outputs.update({f"{prefix}step_{step}.{name}": value for name, value in named})
        # Input sound is not decoded.
        sound = kept["audio"].transpose(1, 2).flatten(2) if "audio" in kept else passes[-1][-1][1]
        final = [kept["video"].flatten(2).transpose(1, 2), sound]
        outputs.update(self.unpacked(final, sizes[-1]))
        if decode:
            outputs |= self.decoded(final, sizes[-1])
        outputs.update({"stage_2.noise.video": video for video, _ in theirs.noise.drawn[1:]})
        if request["audio"] and not theirs.wheels:
            frames = self.vae.decode(outputs["latents.video"], None, return_dict=False)[0]
            outputs["video"] = (frames / 2 + 0.5).clamp(0, 1).transpose(1, 2)
            outputs["audio"] = theirs.returned[1].waveform[None]
        return {name: value.contiguous() for name, value in outputs.items()}


def keys(request, reference):
    """Returns the request as settings of ltx2."""
    settings = {f"request.{key}": request[key] for key in ("prompt", "negative_prompt", "seed", "width", "height")}
    settings |= {f"request.{key}": request[key] for key in ("num_frames", "frame_rate")}
    pipeline = request["pipeline"] if request["images"] or request["pipeline"] != "image_to_video" else "text_to_video"
    pipeline = "two_stage" if pipeline == "audio_to_video" else pipeline
    settings |= {"pipeline": pipeline, "reference": reference, "request.max_sequence_length": _LENGTH}
    if request["cross_timestep"]:
        settings["conditioning.cross_timestep"] = request["cross_timestep"]
    if request["pipeline"] != "distilled":
        settings["sampler.steps"] = request["steps"]
        guidance = request["guidance"]
        for stream, values in guidance.items():
            settings |= {f"guidance.{stream}.{key}": value for key, value in values.items()}
        if guidance["video"]["stg_blocks"] == guidance.get("audio", {}).get("stg_blocks"):
            settings["guidance.stg_blocks"] = settings.pop("guidance.video.stg_blocks")
            del settings["guidance.audio.stg_blocks"]
    if request["images"]:
        given = [{**i, "path": str(i["path"].relative_to(REPOSITORY)), "crf": 0} for i in request["images"]]
        settings["request.images"] = json.dumps(given)
    if request["audio"]:
        settings["request.audio"] = json.dumps({**request["audio"], "path": str(request["audio"]["path"].relative_to(REPOSITORY))})
    return [f"{key}={value}" for key, value in settings.items()]


_GUIDED = {
    "video": scales(cfg=3.0, modality=3.0, rescale=0.45), "audio": scales(cfg=7.0, modality=3.0, rescale=1.0),
}
_FULL = {
    "video": scales(cfg=3.0, stg=1.0, modality=3.0, rescale=0.7, stg_blocks=[1]),
    "audio": scales(cfg=7.0, stg=1.0, modality=3.0, rescale=0.7, stg_blocks=[1]),
}
_GIVEN = request("audio_to_video", guidance={"video": _FULL["video"]}, images=[image(0)], audio=dict(path=SOUND, start=0.05))
_CFG = {"video": scales(cfg=4.0), "audio": scales(cfg=4.0)}
_IMAGE = request("image_to_video", guidance=_GUIDED, images=[image(0)])
OFFICIAL = {
    "image": request("image_to_video", steps=3, guidance=_FULL, images=[image(0)]),
    "images": request("image_to_video", guidance=_CFG, images=[image(0, 0.75), image(8), image(5, 0.5)]),
    "image_gate_only": _IMAGE,
    "image_own": {**_IMAGE, "cross_timestep": "own"},
    "two_stage": request("two_stage", guidance=_GUIDED, images=[image(0)]),
    "distilled": request("distilled", images=[image(0, 0.8)]),
    "hq": request("hq", steps=5, guidance=_GUIDED, images=[image(8, 0.9)]),
    "keyframes": request("keyframes", guidance=_CFG, images=[image(0), image(8, 0.6)]),
    "audio": _GIVEN,
}
# 1.0.0 differs in the noise levels between the streams and of input sound, keyframes of eight frames, and the
# noiser.
OFFICIAL_1_0 = {
    "image_cross": _IMAGE,
    "images": request("image_to_video", guidance=_CFG, images=[image(0, 0.75), image(8), image(5, 0.5)]),
    "two_stage": request("two_stage", guidance=_CFG, images=[image(0, 0.6), image(8, 0.75)]),
    "keyframes": request("keyframes", guidance=_CFG, images=[image(0), image(8, 0.6)]),
    "audio": _GIVEN,
}

# Values of the guidance terms for video and audio; perturbed blocks per stream.
_TERMS = {
    "cfg": (3.0, 5.0), "stg": (1.0, 0.75), "modality": (2.5, 3.0), "rescale": (0.7, 0.4),
}
_BOTH, _VIDEO, _AUDIO = ([1], [0, 2]), ([1], None), (None, [0])
_PERTURBED = {"stg": _BOTH, "cfg_stg": _VIDEO, "stg_modality": _AUDIO, "cfg_stg_modality": _BOTH}


def guided(terms, blocks=None):
    blocks = blocks or _PERTURBED.get("_".join(t for t in terms if t != "rescale"), (None, None))
    streams = {}
    for at, stream in enumerate(("video", "audio")):
        on = {term: _TERMS[term][at] for term in terms if term != "stg" or blocks[at] is not None}
        streams[stream] = scales(**on, stg_blocks=blocks[at] or [])
    return streams


def subsets():
    """Returns guidance by name: every subset of the terms, then terms of one stream."""
    table = {}
    for bits in range(16):
        terms = [term for at, term in enumerate(_TERMS) if bits >> at & 1]
        table["_".join(terms) or "none"] = guided(terms)
    table["stg_of_video"] = guided(["stg"], _VIDEO)
    table["stg_of_audio"] = guided(["stg"], _AUDIO)
    table["cfg_of_video"] = {"video": scales(cfg=3.0), "audio": scales()}
    table["modality_of_audio"] = {"video": scales(), "audio": scales(modality=3.0)}
    return table


def write(component, case, model, tables, reference, source):
    """Runs the requests `{prefix: request}` and writes them to one file."""
    outputs, settings = {}, {}
    for prefix, asked in tables.items():
        made = model.run(asked)
        if len(tables) > 1:
            made = {name: value for name, value in made.items() if name.startswith("latents.")}
        outputs.update({f"{prefix}{name}": value for name, value in made.items()})
        settings[prefix] = keys(asked, reference)
    outputs, kept = thin(outputs, _STRIDES, limit=0)
    common = [key for key in next(iter(settings.values())) if all(key in own for own in settings.values())]
    settings = {prefix: [key for key in own if key not in common] for prefix, own in settings.items()}
    preset = official_pipelines.PRESETS[model.name] + _PRESETS[next(iter(tables.values()))["pipeline"]]
    scalars = {"preset": preset, "common": common, "keys": settings, "upsampler": UPSAMPLERS[model.name]}
    write_case(
        component, f"{model.name}_{case}", {}, outputs, script=__file__, model=model.name, seed=4, scalars=scalars,
        extra={"ltx-pipelines": source, **kept},
    )
    show(f"{component}/{model.name}_{case}: {len(outputs)} tensors", *list(outputs.values())[-2:])


def cross_timestep(model, kinds):
    """Writes a forward pass in which own, cross and gate_only differ; own is diffusers', the others Lightricks'."""
    shape, seed = dict(frames=2, height=2, width=3, audio_frames=6), 61
    own = models.load(model.name, "transformer")
    values = inputs_for(models.TRANSFORMER[model.name], seed=seed, batch=1, text=8, **shape)
    mask = torch.ones(1, 12, 1)
    mask[:, :5], mask[:, 5:7] = 0.0, 0.5
    sigma, sound = torch.tensor([0.7]), torch.tensor([0.3])
    levels = [mask * sigma, torch.ones(1, 6, 1) * sound]
    values |= {"timestep": 1000 * levels[0][..., 0], "audio_timestep": 1000 * levels[1][..., 0]}
    values |= {"sigma": 1000 * sigma, "audio_sigma": 1000 * sound}
    coords = own.rope.prepare_video_coords(1, 2, 2, 3, "cpu", fps=24.0), own.audio_rope.prepare_audio_coords(1, 6, "cpu")
    streams = [
        dict(latent=values[f"{p}hidden_states"], context=values[f"{p}encoder_hidden_states"], sigma=s, timesteps=t, positions=c)
        for p, s, t, c in zip(("", "audio_"), (sigma, sound), levels, coords)
    ]
    scalars = scalars_for(**shape)
    made = {}
    for kind in kinds:
        undo = official_pipelines.gate_by_own_level() if kind == "own" else lambda: None
        made[kind] = dict(zip(("video", "audio"), official_pipelines.velocity(model.path, streams)))
        undo()
    if "own" in made:
        theirs, made["own"] = made["own"], run(own, values, {**scalars, "use_cross_timestep": False})
        assert all(relative_l2(theirs[name], made["own"][name]) < 1e-5 for name in theirs)
    for kind, outputs in made.items():
        write_case(
            "cross_timestep", f"{model.name}_{kind}", values, outputs, script=__file__, model=model.name, seed=seed,
            scalars={**scalars, "cross_timestep": kind},
        )
        show(f"cross_timestep/{model.name}_{kind}", *outputs.values())


def main():
    only = ("--only", dict(nargs="+", help="write only these cases"))
    given = official_pipelines.prepare(__doc__, False, only)
    folder, wanted = given.official, given.only
    write_image()
    component, table = ("official", OFFICIAL) if folder else ("official_1_0", OFFICIAL_1_0)
    source = official_pipelines.RELEASE if folder else "1.0.0"
    if not wanted:
        official_pipelines.clear(component)

    def run(model):
        if not wanted:
            cross_timestep(model, ("own", "gate_only") if folder else ("cross",))
        for case, asked in table.items():
            if not wanted or case in wanted:
                write(component, case, model, {"": asked}, component, source)
        if folder and not wanted:
            tables = {f"{k}.": request("image_to_video", guidance=g) for k, g in subsets().items()}
            write("official_guidance", "subsets", model, tables, component, source)

    official_pipelines.for_each_model(Model, run)


if __name__ == "__main__":
    main()

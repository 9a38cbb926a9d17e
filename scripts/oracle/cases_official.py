"""Writes requests by Lightricks' pipelines on the fixture models: latents after every step, guidance subsets, noise levels.

Release 1.2.0 writes `official` and `official_guidance`, 1.0.0 `official_1_0`; both write `cross_timestep`."""

import json

import official_pipelines
import torch

import cases_pipeline
import models
from cases_text import NEGATIVE, POSITIVE, encode, tokenize
from cases_transformer import inputs_for, run, scalars_for
from common import FIXTURES, REPOSITORY, relative_l2, write_case
from official_file import write_model, write_upsampler

IMAGE = FIXTURES / "images" / "shapes.png"
SOUND = FIXTURES / "sounds" / "given.flac"
UPSAMPLERS = {"tiny_a": "upsampler_rational", "tiny_2_3": "upsampler_plain"}
# Presets of pipelines; of others, `_two_stage`.
_PRESETS = {"image_to_video": "", "distilled": "_distilled", "hq": "_hq"}
_LENGTH = 64


def scales(*values, stg_blocks=(), **more):
    return cases_pipeline.scales(*values, **more, stg_blocks=list(stg_blocks))


def image(frame, strength=1.0):
    return dict(path=IMAGE, frame=frame, strength=strength)


def request(pipeline, **more):
    """Returns a request of the smallest size whose height, width and time differ."""
    return dict(
        pipeline=pipeline, prompt=POSITIVE, negative_prompt=NEGATIVE, seed=4, width=96 if pipeline == "image_to_video" else 128,
        height=64, num_frames=9, frame_rate=24.0, images=[], audio=None, steps=2, cross_timestep=None,
        guidance={"video": scales(), "audio": scales()},
    ) | more


class Model:
    runs = official_pipelines.Run

    def __init__(self, name, folder):
        self.name, self.path, self.upsampler = name, folder / f"{name}.safetensors", folder / f"{name}_up.safetensors"
        write_model(self.path, name)
        write_upsampler(self.upsampler, UPSAMPLERS[name])
        parts = (models.load(name, part) for part in ("text_encoder", "connectors", "vae", "audio_vae"))
        encoder, connectors, self.vae, self.audio_vae = parts
        self.contexts = []
        for text in (POSITIVE, NEGATIVE):
            ids, mask = tokenize(name, [text], _LENGTH)
            made = connectors(encode(encoder, connectors, ids, mask)["prompt_embeds"], mask, padding_side="left")
            self.contexts.append(dict(zip(("video", "audio"), made)))
        config = models.config(name, "audio_vae")
        self.bins, self.sound = config["mel_bins"] // 4, config["latent_channels"]
        self.channels = models.config(name, "vae")["latent_channels"]
        official_pipelines.set_channels(self.channels, self.bins, self.sound)

    def sizes(self, request):
        frames, length = (request["num_frames"] - 1) // 8 + 1, round(request["num_frames"] / request["frame_rate"] * 25)
        once = [32] if request["pipeline"] == "image_to_video" else [64, 32]
        size = [(request["height"] // unit, request["width"] // unit) for unit in once]
        return [((1, self.channels, frames, *hw), (1, self.sound, length, self.bins)) for hw in size]

    def unpacked(self, tokens, shapes, normalised=False):
        """Unpacks normalised tokens of both streams to latents, as in a dump or still normalised."""
        video, audio = (t.float() for t in tokens)
        (_, c, f, h, w), (_, channels, length, bins) = shapes
        video = video[:, : f * h * w].transpose(1, 2).reshape(1, c, f, h, w)
        if not normalised:
            video = video * self.vae.latents_std.view(1, -1, 1, 1, 1) + self.vae.latents_mean.view(1, -1, 1, 1, 1)
            audio = audio[:, :length] * self.audio_vae.latents_std + self.audio_vae.latents_mean
        return {"latents.video": video, "latents.audio": audio[:, :length].reshape(1, length, channels, bins).transpose(1, 2)}

    def decoded(self, tokens, shapes, streams=("video", "audio")):
        latents, vocoder = self.unpacked(tokens, shapes, normalised=True), models.load(self.name, "vocoder")
        return official_pipelines.decoded(self.path, vocoder, **{name: latents[f"latents.{name}"] for name in streams})

    def steps(self, passes, sizes):
        return {
            f"{prefix}step_{step}.{name}": value
            for prefix, shapes, steps in zip(("", "stage_2."), sizes, passes) for step, tokens in enumerate(steps)
            for name, value in self.unpacked(tokens, shapes).items()
        }

    def run(self, request, decode=False):
        """Returns latents by the names of a dump, after every step and at the end; with `decode`, also frames and samples."""
        sizes = self.sizes(request)
        theirs = self.runs(self.path, self.upsampler, request, self.contexts, sizes)
        passes, kept = theirs()
        assert len(passes) == len(sizes)
        # Input sound is not decoded.
        sound = kept["audio"].transpose(1, 2).flatten(2) if "audio" in kept else passes[-1][-1][1]
        final = [kept["video"].flatten(2).transpose(1, 2), sound]
        outputs = self.steps(passes, sizes) | self.unpacked(final, sizes[-1])
        if decode:
            outputs |= self.decoded(final, sizes[-1])
        outputs |= {"stage_2.noise.video": video for video, _ in theirs.noise.drawn[1:]}
        if request["audio"] and not theirs.wheels:
            outputs |= {"video": self.frames(outputs), "audio": theirs.returned[1].waveform[None]}
        return outputs

    def frames(self, outputs):
        frames = self.vae.decode(outputs["latents.video"], None, return_dict=False)[0]
        return (frames / 2 + 0.5).clamp(0, 1).transpose(1, 2).contiguous()


def keys(request, reference, without=()):
    """Returns a request as settings of ltx2, except those that begin with one of `without`."""
    names = ("prompt", "negative_prompt", "seed", "width", "height", "num_frames", "frame_rate")
    settings = {f"request.{key}": request[key] for key in names}
    pipeline = request["pipeline"] if request["images"] or request["pipeline"] != "image_to_video" else "text_to_video"
    pipeline = "two_stage" if pipeline == "audio_to_video" else pipeline
    settings |= {"pipeline": pipeline, "reference": reference, "request.max_sequence_length": _LENGTH}
    if request["cross_timestep"]:
        settings["conditioning.cross_timestep"] = request["cross_timestep"]
    if request["pipeline"] != "distilled":
        settings["sampler.steps"], guidance = request["steps"], request["guidance"]
        for stream, values in guidance.items():
            settings |= {f"guidance.{stream}.{key}": value for key, value in values.items()}
        if guidance["video"]["stg_blocks"] == guidance.get("audio", {}).get("stg_blocks"):
            settings["guidance.stg_blocks"] = settings.pop("guidance.video.stg_blocks")
            del settings["guidance.audio.stg_blocks"]
    in_repository = lambda file: {**file, "path": str(file["path"].relative_to(REPOSITORY))}
    if request["images"]:
        settings["request.images"] = json.dumps([{**in_repository(own), "crf": 0} for own in request["images"]])
    if request["audio"]:
        settings["request.audio"] = json.dumps(in_repository(request["audio"]))
    return [f"{key}={value}" for key, value in settings.items() if not key.startswith(without)]


GUIDED = {"video": scales(3.0, modality=3.0, rescale=0.45), "audio": scales(7.0, modality=3.0, rescale=1.0)}
# The presets' guidance, with a block that the fixture models have.
FULL = {stream: scales(cfg, 1.0, 3.0, 0.7, stg_blocks=[1]) for stream, cfg in (("video", 3.0), ("audio", 7.0))}
_CFG = {"video": scales(4.0), "audio": scales(4.0)}
_IMAGE = request("image_to_video", guidance=GUIDED, images=[image(0)])
_BOTH_RELEASES = {
    "images": request("image_to_video", guidance=_CFG, images=[image(0, 0.75), image(8), image(5, 0.5)]),
    "keyframes": request("keyframes", guidance=_CFG, images=[image(0), image(8, 0.6)]),
    "audio": request("audio_to_video", guidance={"video": FULL["video"]}, images=[image(0)], audio=dict(path=SOUND, start=0.05)),
}
OFFICIAL = _BOTH_RELEASES | {
    "image": request("image_to_video", steps=3, guidance=FULL, images=[image(0)]),
    "image_gate_only": _IMAGE, "image_own": {**_IMAGE, "cross_timestep": "own"},
    "two_stage": request("two_stage", guidance=GUIDED, images=[image(0)]),
    "distilled": request("distilled", images=[image(0, 0.8)]),
    "hq": request("hq", steps=5, guidance=GUIDED, images=[image(8, 0.9)]),
}
# 1.0.0 differs in the noise levels between the streams and of input sound, keyframes of eight frames, and the noiser.
OFFICIAL_1_0 = _BOTH_RELEASES | {
    "image_cross": _IMAGE, "two_stage": request("two_stage", guidance=_CFG, images=[image(0, 0.6), image(8, 0.75)]),
}

# Values of the guidance terms for video and audio; perturbed blocks per stream.
_TERMS = {"cfg": (3.0, 5.0), "stg": (1.0, 0.75), "modality": (2.5, 3.0), "rescale": (0.7, 0.4)}
_BOTH, _VIDEO, _AUDIO = ([1], [0, 2]), ([1], None), (None, [0])
_PERTURBED = {"stg": _BOTH, "cfg_stg": _VIDEO, "stg_modality": _AUDIO, "cfg_stg_modality": _BOTH}


def guided(terms, blocks=None):
    blocks, streams = blocks or _PERTURBED.get("_".join(t for t in terms if t != "rescale"), (None, None)), {}
    for at, stream in enumerate(("video", "audio")):
        on = {term: _TERMS[term][at] for term in terms if term != "stg" or blocks[at] is not None}
        streams[stream] = scales(**on, stg_blocks=blocks[at] or [])
    return streams


def subsets():
    """Returns guidance by name: every subset of the terms, then terms of one stream."""
    every = [[term for at, term in enumerate(_TERMS) if bits >> at & 1] for bits in range(16)]
    return {"_".join(terms) or "none": guided(terms) for terms in every} | {
        "stg_of_video": guided(["stg"], _VIDEO), "stg_of_audio": guided(["stg"], _AUDIO),
        "cfg_of_video": {"video": scales(3.0), "audio": scales()},
        "modality_of_audio": {"video": scales(), "audio": scales(modality=3.0)},
    }


def write_requests(component, case, model, outputs, common, kind="", keys=None, more=None, extra=None, **options):
    """Writes a case of one or more requests, whose settings are `common` and, by prefix of the outputs, `keys`."""
    scalars = {"preset": official_pipelines.PRESETS[model.name] + kind, "common": common, "keys": keys or {"": []}}
    write_case(
        component, f"{model.name}_{case}", {}, outputs, model=model.name, seed=4,
        scalars=scalars | (more or {"upsampler": UPSAMPLERS[model.name]}),
        extra={"ltx-pipelines": official_pipelines.release(), **(extra or {})}, **{"limit": 0, **options},
    )


def write(component, case, model, tables, reference):
    outputs, settings = {}, {}
    for prefix, asked in tables.items():
        made = model.run(asked)
        if len(tables) > 1:
            made = {name: value for name, value in made.items() if name.startswith("latents.")}
        outputs |= {f"{prefix}{name}": value for name, value in made.items()}
        settings[prefix] = keys(asked, reference)
    common = [key for key in next(iter(settings.values())) if all(key in own for own in settings.values())]
    settings = {prefix: [key for key in own if key not in common] for prefix, own in settings.items()}
    pipeline, strides = next(iter(tables.values()))["pipeline"], {"video": (1, 4, 1, 9, 9), "audio": (1, 1, 37)}
    write_requests(component, case, model, outputs, common, _PRESETS.get(pipeline, "_two_stage"), settings, strides=strides)


def cross_timestep(model, kinds):
    """Writes a forward pass in which own, cross and gate_only differ; own is diffusers', the others Lightricks'."""
    shape, seed = dict(frames=2, height=2, width=3, audio_frames=6), 61
    own = models.load(model.name, "transformer")
    values = inputs_for(models.config(model.name, "transformer"), seed=seed, batch=1, text=8, **shape)
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
    scalars, made = scalars_for(**shape), {}
    for kind in kinds:
        undo = official_pipelines.gate_by_own_level() if kind == "own" else lambda: None
        made[kind] = dict(zip(("video", "audio"), official_pipelines.velocity(model.path, streams)))
        undo()
    if "own" in made:
        theirs, made["own"] = made["own"], run(own, values, {**scalars, "use_cross_timestep": False})
        assert all(relative_l2(theirs[name], made["own"][name]) < 1e-5 for name in theirs)
    for kind, outputs in made.items():
        own = {**scalars, "cross_timestep": kind}
        write_case("cross_timestep", f"{model.name}_{kind}", values, outputs, model=model.name, seed=seed, scalars=own)


def official():
    component, table, kinds = "official", OFFICIAL, ("own", "gate_only")
    if official_pipelines.wheels():
        component, table, kinds = "official_1_0", OFFICIAL_1_0, ("cross",)
    for model in official_pipelines.each_model(Model):
        cross_timestep(model, kinds)
        for case, asked in table.items():
            write(component, case, model, {"": asked}, component)
        if component == "official":
            tables = {f"{name}.": request("image_to_video", guidance=guidance) for name, guidance in subsets().items()}
            write("official_guidance", "subsets", model, tables, component)

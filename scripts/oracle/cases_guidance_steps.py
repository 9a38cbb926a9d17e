#!/usr/bin/env python3
"""Writes image-to-video requests with step-dependent guidance and with Lightricks' other guiders and loops (release 1.2.0)."""

import functools
import importlib
import json
from contextlib import nullcontext
from unittest.mock import patch

import cases_official
import official_pipelines
from cases_decoders import thin
from cases_official import Model, image, request, scales
from common import show, write_case

COMPONENT = "official_by_step"
_DECODED = ("apg", "cfg_pp")
_STRIDES = {"video": (1, 4, 1, 17, 17), "audio": (1, 1, 101)}
_GUIDED = {
    "video": scales(cfg=3.0, stg=1.0, modality=3.0, rescale=0.7, stg_blocks=[1]),
    "audio": scales(cfg=7.0, stg=0.75, rescale=0.4, stg_blocks=[0]),
}
_CFG = {"video": scales(cfg=3.0, rescale=0.5), "audio": scales(cfg=5.0)}


def by_step(video, audio):
    return {"video": {**_GUIDED["video"], **video}, "audio": {**_GUIDED["audio"], **audio}}


def gradient_estimation(gamma):
    """Replaces the Euler loop by Lightricks' gradient-estimating loop."""
    return lambda own: functools.partial(own.gradient_estimating_euler_denoising_loop, ge_gamma=gamma)


def cfg_pp(eta, seed):
    """Replaces the Euler loop and step by Lightricks' CFG++, in float32, seeded like ltx2."""

    def loop(own):
        step = importlib.import_module("ltx_core.components.diffusion_steps").EulerCfgPpDiffusionStep(eta=eta)
        torch = importlib.import_module("torch")
        return lambda **given: own.euler_cfg_pp_denoising_loop(
            **{**given, "stepper": step}, noise_seed=seed + 10_000, model_dtype=torch.float32
        )

    return loop


def guided_by(kind, **settings):
    """Makes Lightricks' guider `kind` compute the negative-prompt term, one guider per stream."""
    guiders = importlib.import_module("ltx_core.components.guiders")
    of_scale = {}

    def calculate(self, cond, uncond_text, uncond_perturbed, uncond_modality):
        own = of_scale.setdefault(self.params.cfg_scale, getattr(guiders, kind)(self.params.cfg_scale, **settings))
        pred = cond + own.delta(cond, uncond_text)
        pred = pred + self.params.stg_scale * (cond - uncond_perturbed)
        pred = pred + (self.params.modality_scale - 1) * (cond - uncond_modality)
        factor = self.params.rescale_scale * cond.std() / pred.std() + (1 - self.params.rescale_scale)
        return pred * factor if self.params.rescale_scale else pred

    return patch.object(guiders.MultiModalGuider, "calculate", calculate)


def table(model):
    """Returns requests by name, each with settings of ltx2 and a patch."""
    levels = {
        "video": [dict(sigma=1.0), dict(sigma=0.95, stg=0.0), dict(sigma=0.8, cfg=1.0, stg=0.0, modality=1.0, rescale=0.0)],
        "audio": [dict(sigma=0.97), dict(sigma=0.9, cfg=1.0, stg=0.0)],
    }
    by_sigma = request("image_to_video", steps=5, guidance=by_step(*({"by_sigma": own} for own in levels.values())))
    whole = lambda **more: request("image_to_video", **{"steps": 4, "guidance": _CFG, **more})
    given = dict(images=[image(0, 0.75)])
    apg = lambda **s: {f"guidance.apg.{k.removeprefix('norm_')}": v for k, v in s.items()}
    guider = lambda kind, name, **s: (
        whole(steps=3), {"guidance.kind": name, **apg(**s)}, functools.partial(guided_by, kind, **s)
    )
    named = lambda kind, **s: {f"sampler.{k}": v for k, v in {"kind": kind, **s}.items()}
    both = {
        "by_sigma": (by_sigma, {}, None),
        "gradient_estimation": (
            whole(loop=gradient_estimation(1.75), **given), named("gradient_estimation", gamma=1.75), None
        ),
        "cfg_pp": (whole(loop=cfg_pp(0.5, 4), **given), named("cfg_pp", eta=0.5), None),
        "cfg_star": guider("CFGStarRescalingGuider", "cfg_star"),
        "apg": guider("LtxAPGGuider", "apg", eta=0.5, norm_threshold=4.0),
    }
    if model == "tiny_a":
        apart = request("image_to_video", steps=6, guidance=by_step({"skip": 1}, {"skip": 2}))
        return {"skip_apart": (apart, {}, None), **both}
    return {
        **both,
        "skip_both": (whole(guidance=by_step({"skip": 1}, {"skip": 1}), **given), {}, None),
        "skip_video": (whole(guidance=by_step({"skip": 1}, {"skip": 0})), {}, None),
        "legacy_apg": guider("LegacyStatefulAPGGuider", "legacy_apg", eta=0.5, norm_threshold=4.0, momentum=0.5),
    }


def keys(asked, more):
    plain = {stream: {k: v for k, v in own.items() if k != "by_sigma"} for stream, own in asked["guidance"].items()}
    settings = cases_official.keys({**asked, "guidance": plain}, "official")
    for stream, own in asked["guidance"].items():
        if "by_sigma" in own:
            settings.append(f"guidance.{stream}.by_sigma={json.dumps(own['by_sigma'])}")
    return settings + [f"{key}={value}" for key, value in more.items()]


def write(model):
    outputs, settings, kept = {}, {}, {}
    for case, (asked, more, guider) in table(model.name).items():
        with guider() if guider else nullcontext():
            made = model.run(asked, decode=case in _DECODED)
        wanted = lambda key: key in _STRIDES or key.startswith("step_") and not key.startswith("step_0")
        own = {f"{case}.{key}": value.contiguous() for key, value in made.items() if wanted(key)}
        own, extra = thin(own, {f"{case}.{key}": strides for key, strides in _STRIDES.items()}, limit=0)
        outputs |= own
        kept |= extra
        settings[f"{case}."] = keys(asked, more)
    preset, upsampler = official_pipelines.PRESETS[model.name], cases_official.UPSAMPLERS[model.name]
    scalars = {"preset": preset, "common": [], "keys": settings, "upsampler": upsampler}
    write_case(
        COMPONENT, f"{model.name}_steps", {}, outputs, script=__file__, model=model.name, seed=4, scalars=scalars,
        extra={"ltx-pipelines": official_pipelines.RELEASE, **kept},
    )
    show(f"{COMPONENT}/{model.name}_steps: {len(outputs)} tensors", *list(outputs.values())[-2:])


if __name__ == "__main__":
    official_pipelines.prepare(__doc__, required=True)
    official_pipelines.clear(COMPONENT)
    official_pipelines.for_each_model(Model, write)

"""Writes image-to-video requests with step-dependent guidance and with Lightricks' other guiders and loops (release 1.2.0)."""

import functools
import json
from contextlib import nullcontext
from unittest.mock import patch

import official_pipelines
import torch
from official_pipelines import ltx

import cases_official
from cases_official import Model, image, request, scales, write_requests

_STRIDES = {"video": (1, 4, 1, 17, 17), "audio": (1, 1, 101)}
_CFG = {"video": scales(3.0, rescale=0.5), "audio": scales(5.0)}


def by_step(video, audio):
    own = scales(3.0, 1.0, 3.0, 0.7, stg_blocks=[1]), scales(7.0, stg=0.75, rescale=0.4, stg_blocks=[0])
    return {"video": own[0] | video, "audio": own[1] | audio}


def cfg_pp(eta, seed):
    """Replaces the Euler loop and step by Lightricks' CFG++, in float32, seeded like ltx2."""
    step = ltx("core.components.diffusion_steps").EulerCfgPpDiffusionStep(eta=eta)
    more = dict(stepper=step, noise_seed=seed + 10_000, model_dtype=torch.float32)
    return lambda own: lambda **given: own.euler_cfg_pp_denoising_loop(**{**given, **more})


def guided_by(kind, **settings):
    """Makes Lightricks' guider `kind` compute the negative-prompt term, one guider per stream."""
    guiders, of_scale = ltx("core.components.guiders"), {}

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
    by_sigma = by_step(
        {"by_sigma": [dict(sigma=1.0), dict(sigma=0.95, stg=0.0), dict(sigma=0.8, cfg=1.0, stg=0.0, modality=1.0, rescale=0.0)]},
        {"by_sigma": [dict(sigma=0.97), dict(sigma=0.9, cfg=1.0, stg=0.0)]},
    )
    whole = lambda **more: request("image_to_video", **{"steps": 4, "guidance": _CFG, **more})
    given = dict(images=[image(0, 0.75)])
    apg = lambda **s: {f"guidance.apg.{k.removeprefix('norm_')}": v for k, v in s.items()}
    guider = lambda kind, name, **s: (whole(steps=3), {"guidance.kind": name, **apg(**s)}, guided_by(kind, **s))
    named = lambda kind, **s: {f"sampler.{k}": v for k, v in {"kind": kind, **s}.items()}
    estimating = lambda own: functools.partial(own.gradient_estimating_euler_denoising_loop, ge_gamma=1.75)
    none = nullcontext()
    both = {
        "by_sigma": (whole(steps=5, guidance=by_sigma), {}, none),
        "gradient_estimation": (whole(loop=estimating, **given), named("gradient_estimation", gamma=1.75), none),
        "cfg_pp": (whole(loop=cfg_pp(0.5, 4), **given), named("cfg_pp", eta=0.5), none),
        "cfg_star": guider("CFGStarRescalingGuider", "cfg_star"),
        "apg": guider("LtxAPGGuider", "apg", eta=0.5, norm_threshold=4.0),
    }
    if model == "tiny_a":
        return {"skip_apart": (whole(steps=6, guidance=by_step({"skip": 1}, {"skip": 2})), {}, none), **both}
    return {
        **both,
        "skip_both": (whole(guidance=by_step({"skip": 1}, {"skip": 1}), **given), {}, none),
        "skip_video": (whole(guidance=by_step({"skip": 1}, {"skip": 0})), {}, none),
        "legacy_apg": guider("LegacyStatefulAPGGuider", "legacy_apg", eta=0.5, norm_threshold=4.0, momentum=0.5),
    }


def keys(asked, more):
    plain = {stream: {k: v for k, v in own.items() if k != "by_sigma"} for stream, own in asked["guidance"].items()}
    levels = {stream: json.dumps(own["by_sigma"]) for stream, own in asked["guidance"].items() if "by_sigma" in own}
    more = {f"guidance.{stream}.by_sigma": own for stream, own in levels.items()} | more
    return cases_official.keys({**asked, "guidance": plain}, "official") + [f"{key}={value}" for key, value in more.items()]


def official_by_step():
    for model in official_pipelines.each_model(Model):
        outputs, settings, strides = {}, {}, {}
        for case, (asked, more, guider) in table(model.name).items():
            with guider:
                made = model.run(asked, decode=case in ("apg", "cfg_pp"))
            wanted = lambda key: key in _STRIDES or key.startswith("step_") and not key.startswith("step_0")
            outputs |= {f"{case}.{key}": value for key, value in made.items() if wanted(key)}
            strides |= {f"{case}.{key}": own for key, own in _STRIDES.items()}
            settings[f"{case}."] = keys(asked, more)
        write_requests("official_by_step", "steps", model, outputs, [], keys=settings, strides=strides)

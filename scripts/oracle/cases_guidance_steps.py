#!/usr/bin/env python3
"""Writes tests/fixtures/cases/official_by_step: every step of Lightricks' own image-to-video pipeline, of a checkout of their
repository (1.2.0), with guidance that changes from step to step, with their other guiders, and with their other loops; of some also
frames and samples.

Pipelines, guiders, loops and steps are theirs; their guiders that no pipeline uses replace the term of the negative prompt.
"""

import argparse
import functools
import importlib
import json
import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

import cases_official
import official_pipelines
from cases_decoders import thin
from cases_official import Model, image, request, scales
from common import CASES, fix_numerics, show, write_case

COMPONENT = "official_by_step"
_DECODED = ("apg", "cfg_pp")
_STRIDES = {"video": (1, 4, 1, 17, 17), "audio": (1, 1, 101)}
_GUIDED = {
    "video": scales(cfg=3.0, stg=1.0, modality=3.0, rescale=0.7, stg_blocks=[1]),
    "audio": scales(cfg=7.0, stg=0.75, rescale=0.4, stg_blocks=[0]),
}
_CFG = {"video": scales(cfg=3.0, rescale=0.5), "audio": scales(cfg=5.0)}


def by_step(video, audio):
    """Full guidance with more keys of either stream."""
    return {"video": {**_GUIDED["video"], **video}, "audio": {**_GUIDED["audio"], **audio}}


def gradient_estimation(gamma):
    """Their gradient-estimating loop in Euler's place."""
    return lambda own: functools.partial(own.gradient_estimating_euler_denoising_loop, ge_gamma=gamma)


def cfg_pp(eta, seed):
    """Their CFG++ loop and step in Euler's place, in float32, with noise of this project's seed."""

    def loop(own):
        step = importlib.import_module("ltx_core.components.diffusion_steps").EulerCfgPpDiffusionStep(eta=eta)
        torch = importlib.import_module("torch")
        return lambda **given: own.euler_cfg_pp_denoising_loop(
            **{**given, "stepper": step}, noise_seed=seed + 10_000, model_dtype=torch.float32
        )

    return loop


def guided_by(kind, **settings):
    """Has their guider `kind` make the term of the negative prompt, one of each stream for each pass."""
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
    """Requests by name: theirs, settings of this project beside those of guidance, and a patch."""
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
    """A request as settings of this project."""
    plain = {stream: {k: v for k, v in own.items() if k != "by_sigma"} for stream, own in asked["guidance"].items()}
    settings = cases_official.keys({**asked, "guidance": plain}, "official")
    for stream, own in asked["guidance"].items():
        if "by_sigma" in own:
            settings.append(f"guidance.{stream}.by_sigma={json.dumps(own['by_sigma'])}")
    return settings + [f"{key}={value}" for key, value in more.items()]


def main():
    """A case for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--official", metavar="FOLDER", required=True, help="a checkout of Lightricks/LTX-2 at 400fd31")
    fix_numerics()
    official_pipelines.find_packages(parser.parse_args().official)
    shutil.rmtree(CASES / COMPONENT, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("tiny_a", "tiny_2_3"):
            model, outputs, settings, kept = Model(name, Path(scratch)), {}, {}, {}
            for case, (asked, more, guider) in table(name).items():
                with guider() if guider else tempfile.TemporaryDirectory():
                    made = model.run(asked, decode=case in _DECODED)
                wanted = lambda key: key in _STRIDES or key.startswith("step_") and not key.startswith("step_0")
                own = {f"{case}.{key}": value.contiguous() for key, value in made.items() if wanted(key)}
                own, extra = thin(own, {f"{case}.{key}": strides for key, strides in _STRIDES.items()}, limit=0)
                outputs |= own
                kept |= extra
                settings[f"{case}."] = keys(asked, more)
            preset = {"tiny_a": "ltx2", "tiny_2_3": "ltx2_3"}[name]
            scalars = {"preset": preset, "common": [], "keys": settings, "upsampler": cases_official.UPSAMPLERS[name]}
            write_case(
                COMPONENT, f"{name}_steps", {}, outputs, script=__file__, model=name, seed=4, scalars=scalars,
                extra={"ltx-pipelines": "1.2.0 (400fd31)", **kept},
            )
            show(f"{COMPONENT}/{name}_steps: {len(outputs)} tensors", *list(outputs.values())[-2:])


if __name__ == "__main__":
    main()

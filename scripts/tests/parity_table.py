"""Writes docs/reference/distances.md: how far each feature is from the references, as measured by its tests.

Runs the tests of `ROWS` in full, then writes the page: python3 scripts/tests/parity_table.py. `Case::within` (tests/support)
appends distances to `LTX2_PARITY_LOG`. To add a feature, add a line to `ROWS`."""

import datetime
import json
import os
import re
import struct
import subprocess
import sys
from collections import defaultdict, namedtuple
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOG = ROOT / "target" / "tests" / "parity.jsonl"
PAGE = ROOT / "docs" / "reference" / "distances.md"
MODELS = {"tiny_a": "2.0", "tiny_2_3": "2.3", "tiny_2_5": "2.5"}
_WHEELS = "Lightricks 1.0.0"
# Feature, test, a pattern for `component/case output` (`None`: bit-identical to the reference), and the reference if the file's
# metadata does not name it.
Row = namedtuple("Row", "feature test cases reference", defaults=[None])
ROWS = [
    Row("sound to spectrogram", "it sound::", r"mel/", _WHEELS),
    Row("audio encoder", "it parity::audio_encoder_matches_reference", r"audio-encoder/"),
    Row("input audio to tokens", "it sound::", r"given-sound/", _WHEELS),
    Row("audio to video", "it official_steps::", r"official(_1_0)?/tiny_\w+_audio "),
    *(Row(feature, "it given_video::", rf"given_video(_1_0)?/tiny_\w+?_{case} ") for feature, case in {
        "audio to video, one pass": "audio_to_video", "retake": r"retake\w*", "extend after the end": r"extend(_\d+)?",
        "extend before the start": r"extend_before\w*", "inpaint": r"inpaint\w*", "video to audio": "video_to_audio",
        "text to audio": "text_to_audio",
    }.items()),
    Row("dub_it", "it dub_it::", r"dub_it/"),
    Row("reference videos (IC-LoRA)", "it references::", r"references/"),
    Row("image conditioning", "it official_steps::", r"official(_1_0)?/tiny_\w+?_(image\w*) "),
    Row("keyframes", "it official_steps::", r"official(_1_0)?/tiny_\w+_keyframes "),
    Row("conditioning strength below 1, motion speed other than 1", "it by_diffusers::",
        r"by_diffusers/\w+_(first|strengths|motion|reference) "),
    Row("prompts with a tokenizer without BOS", "it by_diffusers::", r"by_diffusers/\w+_no_bos "),
    Row("two stages", "it official_steps::", r"official(_1_0)?/tiny_\w+_two_stage "),
    Row("distilled", "it official_steps::", r"official/tiny_\w+_distilled "),
    Row("HQ: `res_2s`", "it official_steps::", r"official/tiny_\w+_hq "),
    Row("terms of guidance, every subset", "it official_guidance::", r"official_guidance/"),
    Row("guidance by step: skipped steps, scales by sigma", "it guidance_steps::ltx2_", r"official_by_step/\w+ (skip|by_sigma)"),
    Row("guiders: APG, legacy APG, CFG*", "it guidance_steps::ltx2_", r"official_by_step/\w+ (apg|legacy_apg|cfg_star)"),
    Row("gradient estimation", "it guidance_steps::ltx2_", r"official_by_step/\w+ gradient_estimation"),
    Row("CFG++", "it guidance_steps::ltx2_", r"official_by_step/\w+ cfg_pp"),
    Row("ancestral Euler (LTX-2.5's distilled)", "it pipeline_2_5::", r"pipeline_2_5/distilled "),
    Row("ancestral Euler in two passes, diffusion decoder", "it by_diffusers::", r"by_diffusers/\w+_ancestral "),
    Row("schedules: beta, linear-quadratic",
        "lib sampling::schedules::tests::beta_and_linear_quadratic_match_reference_bitwise", None, _WHEELS),
    Row("schedule of the models", "lib sampling::sigmas::tests::schedules_match_references_bitwise", None,
        f"{_WHEELS}, diffusers 0.42.1"),
    Row("upsamplers: x2, x1.5, temporal", "it parity::upsampler_matches_reference", r"upsampler/"),
    Row("upsampling between two stages: x1.5, temporal, both", "it upsampling::", r"upsampling/"),
    Row("upsampling by x1.5, LTX-2.5's distilled", "it pipeline_2_5::", r"pipeline_2_5/distilled_x1_5 "),
    Row("temporal rounds (DFR)", "it dfr::", r"dfr/"),
]


def run(tests):
    LOG.parent.mkdir(parents=True, exist_ok=True)
    LOG.unlink(missing_ok=True)
    env = os.environ | {"LTX2_PARITY_LOG": str(LOG), "LTX2_TEST_FULL": "1", "LTX2_REQUIRE": "cpu"}
    for test in tests:
        binary, name = test.split(" ")
        command = ["cargo", "test", "--locked", *(["--lib"] if binary == "lib" else ["--test", binary]), "--", name]
        print(f"== {' '.join(command)}", flush=True)
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode or not re.search(r"^test result: ok\. [1-9]\d* passed", done.stdout, re.M):
            sys.exit(f"{done.stdout[-4000:]}\n{test}: failed, or no test ran")


def metadata(case):
    with open(ROOT / "tests/fixtures/cases" / f"{case}.safetensors", "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(size))["__metadata__"]


def reference(about):
    official = about.get("ltx-pipelines")
    if not official:
        return f"diffusers {about['diffusers']}"
    return f"Lightricks {official.split(' ')[0]}" + (", assembled" if about.get("assembled") else "")


def what(output):
    for part, kind in (("noise", "noise"), ("latents", "latents"), ("keyframes", "latents")):
        if part in output:
            return kind
    last = output.split(".")[-1]
    return {"video": "frames", "audio": "samples", "mel": "spectrogram"}.get(last, last)


def lines(row, measured):
    """Yields table lines: one per reference and kind of output."""
    if not row.cases:
        yield f"| {row.feature} | {row.reference} | – | tables | 0 | 0 | `{row.test}` |"
        return
    found = defaultdict(list)
    for one in measured:
        if re.match(row.cases, f"{one['case']} {one['output']}"):
            about = metadata(one["case"])
            found[row.reference or reference(about), what(one["output"])].append((one, MODELS.get(about["model"])))
    if not found:
        sys.exit(f"{row.feature}: no comparison matches {row.cases}")
    for (whose, kind), group in sorted(found.items()):
        models = ", ".join(sorted({model for _, model in group if model})) or "–"
        distance, limit = (max(one[key] for one, _ in group) for key in ("distance", "limit"))
        yield f"| {row.feature} | {whose} | {models} | {len(group)} {kind} | {distance:.1e} | {limit:.0e} | `{row.test}` |"


if sys.argv[1:]:
    sys.exit(__doc__)
run(dict.fromkeys(row.test for row in ROWS))
measured = [json.loads(line) for line in LOG.read_text().splitlines()]
table = "\n".join(line for row in ROWS for line in lines(row, measured))
PAGE.write_text(f"""# Distances from the references

Relative L2 distance of this program's results from those of the reference implementations: small models with random weights,
f32, CPU. Each row shows the largest distance of all cases, and the limit of the test. If the reference is Lightricks' code,
latents are compared after every step of every pass. *Assembled*: Lightricks' code has no such pipeline, so the reference is
assembled from parts of its pipelines; [the oracle's page](../../scripts/oracle/README.md#which-source-a-case-comes-from) lists
what was added.

| feature | reference | LTX | compared | largest distance | limit | test |
|---|---|---|---|---|---|---|
{table}

Written by `python3 scripts/tests/parity_table.py` on {datetime.date.today()}: it runs the tests of the last column with all their
cases, and takes what they measured. [Which keys are whose convention](../guides/references.md).
""")
print(f"{PAGE.relative_to(ROOT)}: {len(measured)} comparisons")

"""Runs the reference for verify_real.sh, in its venv: reference.py PLAN.json.

Writes `reference.safetensors` for each case; in bf16 also `reference_again.safetensors` by another attention kernel, whose
distance is the limit."""

import gc
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")
import torch  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "oracle"))
from diffusers import LTX2Pipeline  # noqa: E402
from PIL import Image  # noqa: E402

import official_run  # noqa: E402
from common import fix_numerics, relative_l2, write_safetensors  # noqa: E402
from official_package import Package, upsampler  # noqa: E402

# The fastest attention kernel and the plainest, which sum in another order.
KERNELS = {"reference": None, "reference_again": SDPBackend.MATH}


class Given:
    """A model folder with the interface that official_run.py needs."""

    def __init__(self, plan, dtype):
        self.dtype = dtype
        # Loads to the GPU without a copy on the host.
        where = {"device_map": "cuda"} if plan["device"] == "cuda" else {}
        self.pipeline = LTX2Pipeline.from_pretrained(plan["folder"], dtype=self.dtype, **where)
        self.pipeline.set_progress_bar_config(disable=True)
        self.config = {name: dict(getattr(self.pipeline, name).config) for name in ("vae", "audio_vae")}
        self.upsampler, self.request, self.images, self.loras = None, None, [], []
        self.plan, self.image = plan, Path(plan["image"])
        if plan["upsampler"]:
            self.upsampler = upsampler(Path(plan["upsampler"])).to(plan["device"], self.dtype).eval()

    def run(self, request):
        self.request, self.images = request, [self.image] * len(request["images"])
        self.loras = [Path(self.plan["lora"]) for _ in request["loras"]]
        return {name: tensor.cpu() for name, tensor in official_run.run(self, self.dtype).items()}


def write_whole(path, write):
    """Writes a file and renames it at the end, as its existence marks a case as done."""
    part = path.with_name(f"{path.name}.part")
    write(part)
    part.rename(path)


def run_case(model, case, dtype):
    folder, made = Path(case["folder"]), {}
    for name in ["reference"] if dtype == "f32" else KERNELS:
        print(f"  {folder.name}: {name.replace('_', ', ')}", flush=True)
        with sdpa_kernel(KERNELS[name]) if KERNELS[name] else nullcontext():
            made[name] = model.run(case["request"])
        write_whole(folder / f"{name}.safetensors", lambda part, name=name: write_safetensors(part, made[name]))
    if len(made) == 2:
        again = made["reference_again"]
        spread = {name: relative_l2(again[name], x) for name, x in made["reference"].items()}
        # Root mean square error of frames, like the PSNR of `ltx2 compare`.
        spread["video"] = (again["video"].double() - made["reference"]["video"].double()).square().mean().sqrt().item()
        write_whole(folder / "spread.json", lambda part: part.write_text(json.dumps(spread, indent=1) + "\n"))


plan = json.loads(Path(sys.argv[1]).read_text())
fix_numerics()
torch.set_num_threads(plan["threads"])
torch.use_deterministic_algorithms(plan["device"] == "cpu")
if not (path := Path(plan["image"])).exists():
    y, x = torch.meshgrid(torch.linspace(0, 1, 320), torch.linspace(0, 1, 480), indexing="ij")
    red = torch.where((x - 0.7) ** 2 + (y - 0.3) ** 2 < 0.02, 0.95, 0.2 + 0.3 * y)
    image = torch.stack([red, 0.3 + 0.4 * (y > 0.55) * x, 0.8 - 0.5 * y], -1)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((image * 255).round().to(torch.uint8).numpy()).save(path)
dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[plan["dtype"]]
# Lightricks' package loads its own networks, so diffusers' are freed first.
for kind in (Given, Package):
    if cases := [c for c in plan["cases"] if (c["request"]["reference"] == "official_1_0") == (kind is Package)]:
        model = kind(plan, dtype)
        for case in cases:
            run_case(model, case, plan["dtype"])
        del model
        gc.collect()
        if plan["device"] == "cuda":
            torch.cuda.empty_cache()

"""Shared by the oracle scripts: determinism, random weights, the fixture file format."""

import hashlib
import json
import math
import os
import struct
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import diffusers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]
FIXTURES = REPOSITORY / "tests" / "fixtures"
MODELS = FIXTURES / "models"
CASES = FIXTURES / "cases"
# Odd strides meet every phase of the power-of-two upsampling.
STRIDES = {"video": (1, 1, 1, 5, 7), "audio": (1, 1, 7)}
FULL_LIMIT = 24_000
# The script whose component make_fixtures.py writes.
SCRIPT = None


def fix_numerics():
    """Selects one thread and deterministic kernels, so that runs on one machine give the same bytes."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    for package in (diffusers, transformers):
        package.utils.logging.set_verbosity_error()
        package.utils.logging.disable_progress_bar()


def generator(seed, name):
    """Returns a CPU generator; values drawn from it depend only on seed and name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "little"))


def randn(seed, name, *shape, scale=1.0):
    return torch.randn(*shape, generator=generator(seed, name)) * scale


def rand(seed, name, *shape):
    return torch.rand(*shape, generator=generator(seed, name))


def pattern(frames, height, width, offset=0):
    """Returns a video of bytes, `[frames, height, width, 3]`."""
    f, y, x, c = torch.meshgrid(*(torch.arange(n) for n in (frames, height, width, 3)), indexing="ij")
    return ((f * 11 + y * 5 + x * 3 + c * 40 + offset) % 256).to(torch.uint8)


# Standard deviations of parameters by name.
_DEVIATIONS = {"latents_mean": 0.5, "learnable_registers": 0.7, "bias": 0.15}


def _value(name, tensor, seed):
    """Returns a weight that keeps activations near 1 and is not neutral."""
    shape, last = tuple(tensor.shape), name.rsplit(".", 1)[-1]
    draw = randn(seed, name, shape)
    if last == "timestep_scale_multiplier":
        return tensor.clone()
    if last == "latents_std":
        return 0.6 + 0.8 * rand(seed, name, shape)
    if last == "filter":
        # Without a low-pass filter the waveform would grow at every activation.
        return tensor * (1 + 0.1 * draw)
    if last == "mel_basis":
        return draw.abs() / math.sqrt(shape[1])
    if "scale_shift_table" in last:
        return 0.4 * draw
    if tensor.ndim == 1 and last == "weight":
        # A Gemma norm multiplies by 1 + weight, every other norm by weight.
        gemma = any(part in name for part in ("layernorm", "language_model", "q_norm", "k_norm"))
        return 0.3 * draw if gemma else 1.0 + 0.25 * draw
    if last in _DEVIATIONS or tensor.ndim < 2 or last.startswith("per_channel_scale") or "embed_tokens" in name:
        return _DEVIATIONS.get(last, 0.3) * draw
    fan_in, gain = math.prod(shape[1:]), {2: 1.0, 3: 1.42}.get(tensor.ndim, 1.3)
    if "upsamplers" in name and tensor.ndim == 3:
        # Transposed convolution, [in, out, kernel]: about half of the taps apply to a sample.
        fan_in = shape[0] * shape[2] / 4
    if name == "decoder.conv_out.conv.weight" and tensor.ndim == 5:
        gain = 0.6  # few pixels beyond -1..1, where clamping would hide errors
    return draw * (gain / math.sqrt(fan_in))


def randomise(module, seed):
    """Overwrites every parameter and persistent buffer; returns the module in eval mode."""
    for name, tensor in module.state_dict().items():
        tensor.copy_(_value(name, tensor, seed).to(tensor.dtype))
    return module.eval()


_DTYPES = {torch.float32: "F32", torch.int64: "I64", torch.bfloat16: "BF16", torch.uint8: "U8"}


def write_safetensors(path, tensors, metadata=None):
    """Writes a safetensors file whose bytes depend only on its content (sorted keys, header padded to 8)."""
    header, blobs, offset = {}, [], 0
    if metadata:
        header["__metadata__"] = {key: str(metadata[key]) for key in sorted(metadata)}
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().cpu()
        blobs.append(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
        start, offset = offset, offset + len(blobs[-1])
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, offset]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def thin(outputs, strides=STRIDES, limit=FULL_LIMIT):
    """Thins outputs of more than `limit` bytes to `<name>.strided`; returns the outputs and metadata about it."""
    kept, extra = {}, {}
    for name, tensor in outputs.items():
        if name in strides and tensor.numel() * 4 > limit:
            kept[f"{name}.strided"] = tensor[tuple(slice(None, None, stride) for stride in strides[name])]
            extra |= {f"strides.{name}": json.dumps(strides[name]), f"shape.{name}": json.dumps(list(tensor.shape))}
        else:
            kept[name] = tensor
    return kept, extra


def write_case(
    component, case, inputs, outputs, *, model="none", seed=0, scalars=None, extra=None, strides=None, limit=FULL_LIMIT
):
    """Writes tests/fixtures/cases/<component>/<case>.safetensors with `in.*`, `out.*` (thinned by `strides`) and metadata."""
    kept, thinned = thin(outputs, strides or {}, limit)
    tensors = {f"in.{key}": value for key, value in inputs.items()} | {f"out.{key}": value for key, value in kept.items()}
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{component}/{case}: {name} is not finite")
    metadata = {
        "script": SCRIPT, "diffusers": diffusers.__version__, "model": model, "seed": seed,
        "transformers": transformers.__version__, "torch": torch.__version__.split("+")[0],
        "scalars": json.dumps(scalars or {}, sort_keys=True), **thinned, **(extra or {}),
    }
    write_safetensors(CASES / component / f"{case}.safetensors", tensors, metadata)
    deviations = [f"{t.std(correction=0).item():.3f}" for t in outputs.values() if t.is_floating_point()]
    print(f"{component}/{case}: {len(outputs)} outputs, std {' '.join(deviations[-4:])}", flush=True)


def spread(half, outputs, rows=...):
    """Returns metadata with the distance of bfloat16 outputs from float32 outputs."""
    return {f"bf16_spread.{key}": f"{relative_l2(half[key][rows], outputs[key][rows]):.6f}" for key in outputs}


def float_bits(tensor):
    """Returns the float32 bits of a tensor, flat, and their sha256."""
    bits = tensor.float().contiguous().view(torch.int32).numpy().reshape(-1).astype("<u4")
    return bits, hashlib.sha256(bits.tobytes()).hexdigest()


def write_json(path, data, breaks=()):
    """Writes compact JSON that names the script, with a line break before every occurrence of the `breaks`."""
    text = json.dumps({"script": SCRIPT} | data if isinstance(data, dict) else data, separators=(",", ":"))
    for mark in breaks:
        text = text.replace(mark, "\n" + mark)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def relative_l2(actual, expected):
    actual, expected = actual.double(), expected.double()
    return (torch.linalg.vector_norm(actual - expected) / torch.linalg.vector_norm(expected).clamp_min(1e-30)).item()

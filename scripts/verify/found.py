"""Inspects a model's files by names, sizes and headers, and the machine."""

import json
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

PARTS = ("transformer", "connectors", "text_encoder", "vae", "audio_vae", "vocoder")


class Refused(Exception):
    """An error for the user. Exit code 2: arguments, 3: the machine."""

    def __init__(self, line, code=2):
        super().__init__(line)
        self.code = code


@dataclass
class Found:
    given: Path  # what ltx2 runs
    folder: Path  # the same weights in the diffusers layout, which the reference reads
    generation: str
    distilled: bool
    text_encoder: Path | None  # of a single file
    upsampler: Path | None
    lora: Path | None

    def is_file(self):
        return self.given.is_file()

    def weights(self):
        folders = [self.text_encoder if name == "text_encoder" and self.text_encoder else self.folder / name for name in PARTS]
        files = [file for folder in folders for file in sorted(folder.glob("*.safetensors"))]
        return files + [file for file in (self.upsampler, self.lora) if file and file.is_file()]

    def bytes(self):
        return sum(file.stat().st_size for file in self.weights())


def header(file):
    try:
        with open(file, "rb") as source:
            (size,) = struct.unpack("<Q", source.read(8))
            return json.loads(source.read(min(size, 100 << 20))).get("__metadata__", {})
    except (struct.error, ValueError) as e:
        raise Refused(f"{file}: not a safetensors file: {e}") from None


def _is_2_5(config):
    return config.get("use_keyframes_abs_pos_embedding") or config.get("ff_bias") is False


def generation_of_folder(folder):
    path = folder / "transformer" / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise Refused(f"{path}: {e}") from None
    return "2.0" if config.get("use_prompt_embeddings", True) else "2.5" if _is_2_5(config) else "2.3"


def generation_of_file(file):
    described = json.loads(header(file).get("config", "{}")).get("transformer")
    if described is None:
        raise Refused(f"{file}: its header describes no transformer; a published model's single file has one in `config`")
    if _is_2_5(described):
        raise Refused(f"{file}: of LTX-2.5 folders in diffusers' layout are compared, not Lightricks' files: give the folder")
    return "2.3" if described.get("caption_proj_before_connector") else "2.0"


def _beside(folder, *words):
    """Returns the file whose name has all words; the last one by name is the newest release."""
    fits = [f for f in sorted(folder.glob("*.safetensors")) if all(word in f.name.lower() for word in words)]
    return fits[-1] if fits else None


def find(model, diffusers=None, text_encoder=None, upsampler=None, lora=None):
    if not model.exists():
        raise Refused(f"{model}: no such file or folder; give the folder that `ltx2 pull --dir` made, or a .safetensors file")
    for path in filter(None, [diffusers, text_encoder, upsampler, lora]):
        if not path.exists():
            raise Refused(f"{path}: no such file or folder")
    is_file = model.is_file()
    folders = [each for each in (diffusers, model.parent) if each and (each / "transformer" / "config.json").exists()]
    if is_file and not folders:
        raise Refused(
            f"{model}: the reference reads the diffusers layout, and there is none beside it: give the folder of the same "
            "weights by --diffusers (Lightricks/LTX-2, or diffusers/LTX-2.3-Diffusers)"
        )
    folder = folders[0] if is_file else model
    generation = generation_of_file(model) if is_file else generation_of_folder(folder)
    if is_file and (other := generation_of_folder(folder)) != generation:
        raise Refused(f"{model} is LTX-{generation}, {folder} is LTX-{other}: give the folder of the same weights by --diffusers")
    lacking = [name for name in PARTS if not any((folder / name).glob("*.safetensors"))]
    if lacking:
        raise Refused(f"{folder}: no weights of {', '.join(lacking)}; the reference needs the whole diffusers layout")
    near = model.parent if is_file else model
    own, beside = folder / "latent_upsampler", _beside(near, "spatial", "x2")
    upsampler = upsampler or (beside if is_file and beside else own if own.is_dir() else beside)
    lora = lora or _beside(near, "distilled", "lora")
    # The folder may be named `diffusers`, with the model's name in its parent.
    name = model.stem if is_file else f"{model.resolve().parent.name}/{model.name}"
    return Found(
        given=model.resolve(), folder=folder.resolve(), generation=generation, distilled="distilled" in name.lower(),
        text_encoder=(text_encoder or folder / "text_encoder").resolve() if is_file else None,
        upsampler=upsampler and upsampler.resolve(), lora=lora and lora.resolve(),
    )


def gpu():
    """Returns name and memory of the first NVIDIA GPU, or None."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True) if shutil.which("nvidia-smi") else None
    if not done or done.returncode != 0 or not done.stdout.strip():
        return None
    name, mib = done.stdout.splitlines()[0].rsplit(",", 1)
    return name.strip(), int(mib) << 20

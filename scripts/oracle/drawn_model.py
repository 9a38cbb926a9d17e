"""A drawn model in memory and on disk, with upsampler, LoRAs, images and the YAML of its request."""

import json
import shutil

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTX2Pipeline
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel
from PIL import Image
from transformers import AutoTokenizer

import cases_gemma4
from common import MODELS, generator, randn, write_safetensors
from drawn_request import write_configuration
from models import PARTS, VOCABULARY, build, build_text_encoder, copy_tokenizer, gemma_config

# Linear layers that a LoRA may update, by diffusers' names; layers outside of blocks with Lightricks' names.
LORA_MODULES = (
    "attn1.to_q", "attn1.to_out.0", "audio_attn1.to_v", "attn2.to_k", "audio_to_video_attn.to_q", "video_to_audio_attn.to_v",
    "ff.net.2", "audio_ff.net.0.proj",
)
LORA_OUTER = {
    "proj_in": "patchify_proj", "time_embed.linear": "adaln_single.linear",
    "av_cross_attn_video_scale_shift.linear": "av_ca_video_scale_shift_adaln_single.linear",
}


class Model:
    def __init__(self, seed, config, request, folder, coarse=False):
        """With `coarse`, weights have one mantissa bit and images no noise, which compresses to a quarter."""
        self.coarse = coarse
        self.config, self.seed, self.request, self.folder = config, seed, request, folder
        self._save({name: build(name, config[name], seed) for name in PARTS})
        self.load(torch.float32)
        self.images = [self._image(index, image) for index, image in enumerate(request["images"])]
        self.loras = [self._lora(index, lora) for index, lora in enumerate(request["loras"])]

    def _save(self, parts):
        parts["text_encoder"] = self._text_encoder()
        upsampler = build("latent_upsampler", self.config["latent_upsampler"], self.seed)
        for part in (*parts.values(), upsampler) if self.request["stored"] == "bf16" else ():
            part.to(torch.bfloat16)
            for tensor in part.state_dict().values() if self.coarse else ():
                tensor.view(torch.int16).bitwise_and_(-64)
        tokenizer = AutoTokenizer.from_pretrained(MODELS / "tiny_a" / "tokenizer")
        scheduler = FlowMatchEulerDiscreteScheduler(**self.config["scheduler"])
        LTX2Pipeline(scheduler=scheduler, tokenizer=tokenizer, **parts).save_pretrained(self.folder)
        upsampler.save_pretrained(self.folder / "latent_upsampler")
        config = dict(self.config["latent_upsampler"], spatial_upsample=False, temporal_upsample=True, use_rational_resampler=False)
        self.temporal = build("latent_upsampler", config, f"{self.seed}/temporal")
        self.temporal.save_pretrained(self.folder / "temporal_latent_upsampler")
        # transformers saved the tokenizer in its own spelling.
        shutil.rmtree(self.folder / "tokenizer")
        copy_tokenizer(self.folder / "tokenizer")

    def _text_encoder(self):
        text = dict(self.config["text_encoder"], vocab_size=VOCABULARY, max_position_embeddings=256)
        if "use_keyframes_abs_pos_embedding" not in self.config["transformer"]:
            special = {f"{name}_token_index": VOCABULARY - n for name, n in (("boi", 3), ("eoi", 2), ("image", 1))}
            return build_text_encoder(gemma_config(text, **special), self.seed)
        encoder = cases_gemma4.text_encoder(str(self.seed), gemma_config(text))
        for key, tensor in encoder.state_dict().items():
            # Small query and key norms, as Gemma 4 does not divide its scores by the root of the head size.
            if key.endswith(("q_norm.weight", "k_norm.weight")):
                tensor *= tensor.numel() ** -0.25
        return encoder

    def load(self, dtype):
        self.pipeline = LTX2Pipeline.from_pretrained(self.folder, dtype=dtype)
        self.pipeline.set_progress_bar_config(disable=True)
        self.parts = {name: getattr(self.pipeline, name).eval() for name in (*PARTS, "text_encoder")}
        self.upsampler = LTX2LatentUpsamplerModel.from_pretrained(self.folder / "latent_upsampler", dtype=dtype).eval()

    def sound(self, latents):
        return self.parts["vocoder"](self.parts["audio_vae"].decode(latents, return_dict=False)[0])

    def _image(self, index, image):
        noise = randn(self.seed, f"image {index}", image["height"], image["width"], 3) * (0 if self.coarse else 12)
        smooth = randn(self.seed, f"colours {index}", 1, 3, 4, 4) * 60 + 120
        smooth = torch.nn.functional.interpolate(smooth, (image["height"], image["width"]), mode="bilinear")[0].permute(1, 2, 0)
        path = self.folder / f"image_{index}.png"
        Image.fromarray((smooth + noise).clamp(0, 255).to(torch.uint8).numpy()).save(path)
        return path

    def _lora(self, index, lora):
        weights, pairs, modules = self.parts["transformer"].state_dict(), {}, []
        blocks = [f"transformer_blocks.{b}.{m}" for b in range(self.config["transformer"]["num_layers"]) for m in LORA_MODULES]
        source = generator(self.seed, f"lora {index}")
        for module in (*blocks, *LORA_OUTER):
            weight = weights.get(f"{module}.weight")
            if weight is None or torch.rand((), generator=source) < 0.5:
                continue
            theirs = module if "transformer_blocks" in module else LORA_OUTER[module]
            prefix = f"transformer.{module}" if lora["keys"] == "diffusers" else f"diffusion_model.{theirs}"
            rank, size = lora["rank"], 0.3 / (lora["rank"] * weight.shape[1]) ** 0.5
            pairs[f"{prefix}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=source)
            pairs[f"{prefix}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=source) * size
            modules.append(module)
            if lora["alpha"] and lora["alpha_in"] == "tensors":
                pairs[f"{prefix}.alpha"] = torch.tensor(lora["alpha"])
        header = {}
        if lora["alpha"] and lora["alpha_in"] == "header":
            adapter = dict(r=lora["rank"], lora_alpha=lora["alpha"], target_modules=modules, use_rslora=False)
            header["lora_adapter_metadata"] = json.dumps({f"transformer.{key}": value for key, value in adapter.items()})
        path = self.folder / f"lora_{index}.safetensors"
        write_safetensors(path, pairs, header)
        return path

    def yaml(self, path):
        here = lambda file: str(file.relative_to(path.parent))
        loras, images = (list(map(here, files)) for files in (self.loras, self.images))
        write_configuration(path, self.request, {"path": here(self.folder)}, loras, images, "cpu")

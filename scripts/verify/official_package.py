"""Runs requests by Lightricks' pipelines 1.0.0 on their own networks, read from their single file.

Replaced: Gemma-3, which transformers loads; the noise; float32 for bfloat16; constant sizes; frames are kept as floats."""

import gc
import importlib
import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import Gemma3ForConditionalGeneration

from drawn_request import TWO_PASSES
from official_pipelines import PIPELINES, Noise, build_arguments, call_arguments, set_channels, torch_with
from official_run import HostNoise
from ltx_core.components import noisers
from ltx_core.model.audio_vae import decode_audio
from ltx_core.model.audio_vae import model_configurator as vocoders
from ltx_core.model.transformer import X0Model
from ltx_core.model.upsampler import LatentUpsamplerConfigurator
from ltx_core.text_encoders.gemma import GemmaTextEncoder, embeddings_connector
from ltx_core.text_encoders.gemma.config import GEMMA3_CONFIG_FOR_LTX
from ltx_core.text_encoders.gemma.tokenizer import LTXVGemmaTokenizer
from ltx_core.types import AudioLatentShape, VideoLatentShape, VideoPixelShape
from ltx_pipelines.utils import ModelLedger, samplers, types

_REGISTERS = "model.diffusion_model.video_embeddings_connector.learnable_registers"


def upsampler(path):
    if path.is_dir():
        return LTX2LatentUpsamplerModel.from_pretrained(path)
    with safe_open(path, "pt") as file:
        config = json.loads((file.metadata() or {}).get("config", "{}"))
    network = LatentUpsamplerConfigurator.from_config(config)
    network.load_state_dict(load_file(path))
    return network


def _vocoder(own, bins, config, *arguments, **more):
    made = own(config, *arguments, **more)
    made.conv_pre = torch.nn.Conv1d(2 * config.get("num_mels", bins), made.conv_pre.out_channels, 7, padding=3)
    return made


class Package:
    def __init__(self, plan, dtype):
        self.plan, self.dtype, self.device = plan, dtype, torch.device(plan["device"])
        with safe_open(plan["file"], "pt") as file:
            config, registers = json.loads(file.metadata()["config"]), file.get_slice(_REGISTERS).get_shape()[0]
        sound = config["audio_vae"]["model"]["params"]["ddconfig"]
        # Same lookup as Lightricks' decoder.
        bins = sound.get("mel_bins") or config["audio_vae"]["preprocessing"]["mel"]["n_mel_channels"]
        types.VIDEO_LATENT_CHANNELS = config["vae"]["latent_channels"]
        set_channels(types.VIDEO_LATENT_CHANNELS, bins // 4, sound["z_channels"])
        connector = embeddings_connector.Embeddings1DConnector
        embeddings_connector.Embeddings1DConnector = partial(connector, num_learnable_registers=registers)
        vocoders._vocoder_from_config = partial(_vocoder, vocoders._vocoder_from_config, bins)
        asked = [case["request"] for case in plan["cases"]]
        self.states = self._states({r[key] for r in asked for key in ("prompt", "negative_prompt")}, asked[0])

    def _states(self, texts, request):
        """Returns Gemma's hidden states of each text, then frees the model."""
        folder = Path(self.plan["text_encoder"])
        places = [folder, folder / "tokenizer", folder.parent / "tokenizer", Path(self.plan["folder"]) / "tokenizer"]
        tokenizer = next(place for place in places if (place / "tokenizer.json").exists())
        gemma = Gemma3ForConditionalGeneration.from_pretrained(folder, dtype=self.dtype, device_map=self.plan["device"]).eval()
        sizes, own = GEMMA3_CONFIG_FOR_LTX.text_config, gemma.config.text_config
        sizes.hidden_size, sizes.num_hidden_layers = own.hidden_size, own.num_hidden_layers
        encoder = GemmaTextEncoder(gemma, LTXVGemmaTokenizer(str(tokenizer), request["max_sequence_length"]))
        states = {text: encoder.encode(text) for text in texts}
        del gemma, encoder
        gc.collect()
        return states

    def _contexts(self, prompts, ledger, **_):
        processor = ledger.gemma_embeddings_processor()
        return [processor.process_hidden_states(*self.states[prompt]) for prompt in prompts]

    def _placed(self, network):
        return network.to(self.device, self.dtype).eval()

    def _noise(self, request):
        divisors = (2, 1) if request["pipeline"] in TWO_PASSES else (1,)
        size = (request["height"], request["width"])
        pixels = [VideoPixelShape(1, request["num_frames"], *(s // d for s in size), request["frame_rate"]) for d in divisors]
        shapes = [(VideoLatentShape.from_pixel_shape(p), AudioLatentShape.from_video_pixel_shape(p)) for p in pixels]
        sizes = [[shape.to_torch_shape() for shape in both] for both in shapes]
        return Noise(sizes, torch.Generator("cpu").manual_seed(request["seed"]))

    def run(self, request):
        name = request["pipeline"]
        module, kind = PIPELINES[name]
        module = importlib.import_module(f"ltx_pipelines.{module}")
        noise, kept = self._noise(request), {}

        def video(latents, decoder, *_, **__):
            kept["latents.video"] = decoder.per_channel_statistics.un_normalize(latents)
            kept["video"] = ((decoder(latents) + 1) / 2).clamp(0, 1).transpose(1, 2)

        def audio(latents, decoder, vocoder):
            kept["latents.audio"] = decoder._denormalize_latents(latents)[0]
            kept["audio"] = decode_audio(latents, decoder, vocoder).waveform[None]

        replaced = dict(encode_prompts=self._contexts, vae_decode_video=video, vae_decode_audio=audio)
        replaced["torch"] = torch_with(bfloat16=self.dtype)
        if self.device.type == "cpu":
            cuda = SimpleNamespace(synchronize=lambda: None)
            replaced |= dict(torch=torch_with(bfloat16=self.dtype, cuda=cuda), cleanup_memory=lambda: None)
        if name == "hq":
            loop = samplers.res2s_audio_video_denoising_loop
            # Each pass has its own generators.
            again = lambda **given: loop(**given, model_dtype=self.dtype, new_noise_fn=HostNoise())
            replaced["res2s_audio_video_denoising_loop"] = again
        strengths = [lora["strength"] for lora in request["loras"]]
        made = build_arguments(name, self.plan["upsampler"], self.plan["lora"], strengths, self.device)
        made["distilled_checkpoint_path" if name == "distilled" else "checkpoint_path"] = self.plan["file"]
        images = [image | {"path": self.plan["image"]} for image in request["images"]]
        guidance = {s: own | {"stg_blocks": request["stg_blocks"][s]} for s, own in request["guidance"].items()}
        with ExitStack() as stack:
            stack.enter_context(patch.multiple(module, **replaced))
            stack.enter_context(patch.object(noisers, "torch", torch_with(randn=noise.randn)))
            # Builds the transformer after merging in the file's types.
            build = lambda ledger: self._placed(X0Model(ledger.transformer_builder.build(device=self.device)))
            stack.enter_context(patch.object(ModelLedger, "transformer", build))
            if self.plan["upsampler"] and (folder := Path(self.plan["upsampler"])).is_dir():
                stack.enter_context(patch.object(ModelLedger, "spatial_upsampler", lambda _: self._placed(upsampler(folder))))
            arguments = call_arguments({**request, "images": images, "guidance": guidance})
            getattr(module, kind)(gemma_root=None, **made)(**arguments)
        if name in TWO_PASSES:
            kept["stage_2.noise.video"] = noise.drawn[1][0]
        else:
            kept["noise.video"], kept["noise.audio"] = noise.drawn[0]
        return {name: tensor.float().cpu().contiguous() for name, tensor in kept.items()}

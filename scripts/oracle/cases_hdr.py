"""Writes HDR video by Lightricks' `HDRICLoraPipeline`, and its curves and 10-bit planes for codes from 0 to 1."""

from pathlib import Path
from unittest.mock import patch

import official_pipelines
import torch
from official_pipelines import ltx

from cases_official import UPSAMPLERS, Model, keys, request
from cases_references import by_frame, video
from common import FIXTURES, write_case, write_safetensors

NAME, LORA = "tiny_2_3", FIXTURES / "lora" / "hdr_tiny_2_3.safetensors"


class Hdr(official_pipelines.Run):
    def _arguments(self, upsampler):
        path, text = str(Path(upsampler).with_name("context.safetensors")), self.text[0]
        write_safetensors(path, {"video_context": text.video_encoding, "audio_context": text.audio_encoding})
        files = dict(spatial_upsampler_path=upsampler, hdr_lora=LORA, text_embeddings_path=path)
        return dict(files, device=torch.device("cpu"), quantization=None)

    def __call__(self):
        arguments = {key: self.request[key] for key in ("seed", "height", "width", "num_frames", "frame_rate")}
        given = [(v["path"], v["strength"]) for v in self.request["references"]]
        self.pipeline._decode_video = lambda latents, *_, **__: self._keep("video", latents)
        with patch.object(ltx("pipelines.utils.media_io.decode"), "decode_video_by_frame", by_frame):
            self.pipeline(**arguments, video_conditioning=given, tiling_config=None)
        return self.passes, self.kept


class VideoNoise(official_pipelines.Noise):
    def randn(self, *shape, **given):
        self.audio = None
        return super().randn(*shape, **given)


def hdr():
    transfers, hlg, yuv = ltx("core.hdr").HDRTransfer, ltx("core.color.hlg"), ltx("core.color.yuv")
    codes = torch.cat([torch.linspace(0, 1, 1024), torch.rand(1024, generator=torch.Generator().manual_seed(5))])
    light = codes[-768:].view(1, 3, 16, 16)
    linear = transfers.LOGC3.decompress(light).clamp(min=0)
    planes = yuv.rgb_to_yuv420p10(
        hlg.HlgGpuConverter.create(device="cpu").to_hlg_signal_(linear), yuv.ColorSpace.BT_2020_NCL, yuv.ColorRange.MPEG)
    outputs = {f"{t.value}.{way}": getattr(t, way)(x) for t in transfers for way, x in (("decompress", codes), ("compress", 8 * codes))}
    outputs |= {f"hlg.{name}": plane[0].float() for name, plane in zip("yuv", planes)}
    write_case("hdr_curves", "curves", {"codes": codes}, outputs, limit=1 << 20, extra={"ltx-core": official_pipelines.release()})
    official_pipelines.PIPELINES["hdr"] = ("hdr_ic_lora", "HDRICLoraPipeline")
    official_pipelines.Noise = VideoNoise
    for model in official_pipelines.each_model(Model):
        if model.name == NAME:
            asked = request("distilled", width=128, height=128, num_frames=17, references=[video("wide"), video("tall", 0.75)])
            one, two = ((video, (1, model.sound, 0, model.bins)) for video, _ in model.sizes(asked))
            sizes = [one, *[((*two[0][:2], 2, 3, 3), two[1])] * 8]
            passes, kept = Hdr(model.path, model.upsampler, {**asked, "pipeline": "hdr"}, model.contexts, sizes)()
            names = ["", *(f"stage_2.tile_{at}." for at in range(8))]
            mute = lambda tokens: [tokens[0], torch.zeros(1, 0, model.sound * model.bins)]
            outputs = {
                f"{name}step_{step}.latents.video": model.unpacked(mute(tokens), shapes)["latents.video"]
                for name, shapes, steps in zip(names, sizes, passes, strict=True) for step, tokens in enumerate(steps)
            }
            final = mute([kept["video"].flatten(2).transpose(1, 2)])
            outputs |= {"latents.video": model.unpacked(final, two)["latents.video"], **model.decoded(final, two, ["video"])}
            outputs["linear"] = ltx("core.hdr").to_hdr_linear(outputs["video"].transpose(1, 2)).transpose(1, 2)
            own = [*keys(asked, "official", "pipeline"), "pipeline=hdr", f"model.loras=[{{path: {LORA.relative_to(FIXTURES.parents[1])}}}]"]
            scalars = dict(preset="ltx2_3_distilled", common=own, keys={"": []}, references=asked["references"], upsampler=UPSAMPLERS[NAME])
            extra, strides = {"ltx-pipelines": official_pipelines.release()}, {"video": (1, 3, 1, 5, 7), "linear": (1, 3, 1, 5, 7)}
            write_case("hdr", NAME, {}, outputs, model=NAME, seed=asked["seed"], scalars=scalars, strides=strides, extra=extra)

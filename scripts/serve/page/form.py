"""The form: choices, errors, files, texts; videos from input videos and sounds."""

import io
import json
import struct
import wave
from collections import Counter

from harness import CLIP, World, case, press
from server import equal, png, until

MARKUP = "<img src=x onerror=\"window.hacked=1\"> <script>window.hacked=1</script> </p><b>bold</b> &amp; ${1} \u202e "
STRANGE = "[window.hacked, document.querySelectorAll('img[src=x], b, .words > *, .row script').length]"
PREVIEWS = "[...document.querySelectorAll('#images img')].filter((i) => i.naturalWidth === 64).length"
# Values of a selection, each with whether it is disabled.
CHOICES = "(id) => [...document.getElementById(id).options].filter((o) => o.value !== 'own').map((o) => [o.value, o.disabled])"
LARGEST = 2**64 - 1


class Form(World):
    def markup_stays_text(self, page):
        """5,000 characters with markup are sent completely and shown as text."""
        prompt = (MARKUP + "word " * 1000)[:5000]
        page.send(prompt)
        page.row("window.hacked").wait_for()
        assert self.server.newest()["prompt"] == prompt
        press(page.wait_tile("window.hacked"), "Larger")
        assert page.tile("window.hacked").first.locator(".words").evaluate("(node) => node.textContent") == prompt
        equal(page.evaluate(STRANGE), [None, 0], "the global name and foreign elements")
        assert page.wide() == 0 and page.input_value("#prompt") == prompt
        self.axe(page, "a large card")

    @case(statuses=(400,))
    def errors_by_their_field(self, page):
        """An error is shown at its field, which has the focus, and in one alert; the draft stays."""
        page.click("summary")
        page.write("a fox")
        found = []
        for box, value in [("video_cfg_scale", "99"), ("fps", "99"), ("seed", str(LARGEST + 1))]:
            page.submit(**{box: value})
            until(f"an error of {box}", lambda box=box: page.get_attribute(f"#{box}", "aria-invalid") == "true", 10)
            text = page.inner_text("#" + page.get_attribute(f"#{box}", "aria-describedby"))
            assert text and page.focused() == box, (box, text)
            assert text in page.alert() and page.locator("[role=alert]").count() == 1
            found.append(text)
            self.axe(page, f"an error of {box}")
            page.enter(**{box: ""})
        page.submit(prompt="   ")
        assert page.focused() == "prompt" and "prompt" in page.alert()
        assert page.locator(".row").count() == 0
        return "; ".join(found)

    def images_by_choice_drop_and_paste(self, page):
        """Images can be chosen, dropped and pasted; they have previews and are sent as form parts."""
        page.set_input_files("#pick", [{"name": "a.png", "mimeType": "image/png", "buffer": png()}])
        page.bring("drop", "b.png", "image/png", png(colour=(20, 90, 200)))
        page.bring("paste", "c.png", "image/png", png(colour=(20, 160, 60)))
        until("three previews", lambda: page.evaluate(PREVIEWS) == 3, 10)
        self.axe(page, "images")
        press(page, "Remove image 3")
        page.bring("drop", "d.txt", "text/plain", b"no image")
        until("a text is refused", lambda: "not PNG" in page.inner_text("#e-images"), 5)
        page.send("between two images")
        video, request = self.finished(page, "between two images")
        assert video["pipeline"] == "image_to_video", video
        frames = [image["frame"] for image in request["images"]]
        assert frames == [0, video["num_frames"] - 1], frames
        for _ in frames:
            press(page, "Remove image 1")
        return f"frames {frames}"

    def seeds(self, page):
        """Dice and lock work; several videos get consecutive seeds; the largest seed keeps all digits."""
        page.click("#dice")
        first = page.input_value("#seed")
        page.click("#dice")
        assert first.isdigit() and page.input_value("#seed") != first
        assert page.get_attribute("#lock", "aria-pressed") == "true"
        page.click("#lock")
        assert page.input_value("#seed") == ""
        page.enter(seed=str(LARGEST - 1)).select(number="2").send("seeded")
        until("both", lambda: len(self.server.videos("limit=9", "seeded")) == 2, 20)
        found = sorted(video["seed"] for video in self.server.videos("limit=9", "seeded"))
        assert found == [LARGEST - 1, LARGEST], found
        tile = page.wait_tile(str(LARGEST))
        page.select(number="1").context.grant_permissions(["clipboard-read", "clipboard-write"])
        press(tile, "Copy seed")
        until("it is copied", lambda: page.evaluate("navigator.clipboard.readText()") == str(LARGEST), 5)
        page.reload()
        page.wait_tile(f"seed {LARGEST}", 20)

    def fixed_requests(self, page):
        """A request has only values that differ from the preset."""
        self.made(page, "plain")
        sent = []
        page.page.on("request", lambda r: r.method == "POST" and sent.append(r.post_data))
        page.send("as it is")
        until("it is sent", lambda: sent, 5)
        plain = json.loads(sent[0])
        assert set(plain) <= {"prompt", "size", "num_frames", "num_inference_steps", "pipeline"}, plain
        page.click("summary")
        page.uncheck("#sound")
        page.submit(negative="", audio_cfg_scale="2.5")
        until("it is sent", lambda: len(sent) == 2, 5)
        other = json.loads(sent[1])
        assert other["audio_cfg_scale"] == 2.5 and other["generate_audio"] is False, other
        return f"{sorted(plain)}; {sorted(set(other) - set(plain))} more"


def sound(rate=48000):
    data = io.BytesIO()
    with wave.open(data, "wb") as out:
        out.setparams((1, 2, rate, 0, "NONE", None))
        out.writeframes(b"".join(struct.pack("<h", 4000 if n // 60 % 2 else -4000) for n in range(rate)))
    return data.getvalue()


class Sources(World):
    flags = ("--max-steps", "1000", "--set", "serve.pipelines=[retake, extend, audio_to_video]")

    def edit_a_finished_video(self, page):
        """Edit fills the form; without seconds everything after the first frame is regenerated, else that span."""
        source = self.server.video(self.made(page, CLIP))
        press(page.tile(CLIP).first, "Edit")
        assert page.input_value("#pipeline") == "retake" and page.input_value("#prompt") == CLIP
        assert not page.is_visible("#size") and page.is_visible("#start") and CLIP in page.inner_text("#clip-shown")
        self.axe(page, "an edit")
        spans = [("it turns green", "", "", (0.042, None)), ("it turns black", "0.25", "0.5", (0.25, 0.5))]
        for prompt, start, end, span in spans:
            video, request = self.finished(page.submit(prompt=prompt, start=start, end=end, steps="2"), prompt)
            found = (video["pipeline"], video["remixed_from_video_id"], video["size"])
            equal(found, ("retake", source["id"], source["size"]), "pipeline, source and size")
            equal((request["retake"]["from"], request["retake"].get("to")), span, "the span")

    def extend_a_video_and_a_file(self, page):
        """Extends a finished video, then a dropped MP4 before its start."""
        source = self.server.video(self.made(page, CLIP))
        press(page.tile(CLIP).first, "Extend")
        longer, _ = self.finished(page.submit(added="1", steps="2", prompt="it goes on"), "it goes on")
        assert longer["num_frames"] == source["num_frames"] + round(source["fps"]), longer
        press(page, "Remove")
        page.bring("drop", "own.mp4", "video/mp4", self.server.content(source["id"]))
        until("the file is named", lambda: "own.mp4" in page.inner_text("#clip-shown"), 5)
        page.check("#before")
        video, request = self.finished(page.submit(prompt="it came from afar"), "it came from afar")
        assert (video["remixed_from_video_id"], request["extend"]["at"]) == (None, "start"), (video, request)
        return f"{source['num_frames']} frames become {longer['num_frames']}"

    def a_video_to_a_sound(self, page):
        """A video is made for an uploaded sound."""
        page.select(pipeline="audio_to_video")
        page.set_input_files("#tone", [{"name": "tone.wav", "mimeType": "audio/wav", "buffer": sound()}])
        until("it is named", lambda: "tone.wav" in page.inner_text("#tone-shown"), 5)
        self.axe(page, "a sound")
        video, request = self.finished(page.submit(prompt="a disc dances", steps="2"), "a disc dances")
        assert video["pipeline"] == "audio_to_video" and request["audio"]["path"], (video, request)

    def what_is_missing_is_said(self, page):
        """Without an input video or sound nothing is sent, and the field shows the error."""
        page.enter(prompt="from nothing")
        missing = [("retake", "clip", "a video"), ("extend", "clip", "a video"), ("audio_to_video", "tone", "an audio file")]
        for pipeline, field, word in missing:
            page.select(pipeline=pipeline).submit()
            assert word in page.inner_text(f"#e-{field}") and page.focused() == field, pipeline
        assert page.locator(".row").count() == 0


class Limited(World):
    flags = ("--warm", "none", "--max-tokens", "3000", "--max-frames", "121")

    @case(statuses=(400,))
    def only_legal_combinations(self, page):
        """The server accepts every size and length that can be selected, and refuses the disabled ones."""
        counts = Counter()
        for size, off in page.evaluate(CHOICES, "size"):
            lengths = [["9", True]]
            if not off:
                lengths = page.select(size=size).evaluate(CHOICES, "length")
                assert not page.evaluate("document.querySelector('#length').selectedOptions[0].disabled")
            for frames, illegal in lengths:
                status, body = self.server.ask("POST", "v1/videos", {"prompt": "a fox", "size": size, "num_frames": int(frames)})
                assert status == (400 if illegal else 200), (size, frames, body)
                counts[status] += 1
                if status == 200:
                    self.server.ask("DELETE", f"v1/videos/{body['id']}")
        page.select(size="own").enter(width="101").keys("Tab")
        assert page.input_value("#width") == "96"
        page.enter(width="4096", height="4096").keys("Tab")
        assert "tokens are more than" in page.inner_text("#e-length")
        assert counts[200] > 5 and counts[400] > 5, counts
        return f"{counts[200]} combinations accepted, {counts[400]} refused"

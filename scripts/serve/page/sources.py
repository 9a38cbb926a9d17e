"""Videos from input videos and sounds: edit, extend, audio to video."""

import io
import json
import struct
import wave

from harness import bring, case, made, press, row, tile
from server import until

CLIP = "a red circle bounces on blue, low beeps"
STEPS = "2"


def sound(seconds=1.0, rate=48000):
    data = io.BytesIO()
    with wave.open(data, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(b"".join(struct.pack("<h", 4000 if n // 60 % 2 else -4000) for n in range(int(seconds * rate))))
    return data.getvalue()


def finished(world, page, prompt):
    """Returns the finished video and its request; checks that its size did not change."""
    until("it is accepted", lambda: row(page, prompt).count() or tile(page, prompt).count() or page.inner_text("#alert"), 10)
    assert page.inner_text("#alert") == "", page.inner_text("#alert")
    accepted = next(v for v in world.server.ask("GET", "v1/videos?limit=20")[1]["data"] if v["prompt"] == prompt)
    until("it is made", lambda: world.server.video(accepted["id"])["status"] in ("completed", "failed"), 120)
    video = world.server.video(accepted["id"])
    assert video["status"] == "completed", video
    for what in ("width", "height", "num_frames", "fps"):
        assert video[what] == accepted[what], (what, accepted[what], video[what])
    return video, json.loads(world.server.content(video["id"], "sidecar"))["config"]["request"]


@case("sources")
def edit_a_finished_video(world):
    """Edit fills the form; without seconds everything after the first frame is regenerated, else that span."""
    page = world.open()
    source = world.server.video(made(page, world.server, CLIP))
    press(tile(page, CLIP).first, "Edit")
    assert page.input_value("#pipeline") == "retake" and page.input_value("#prompt") == CLIP
    assert not page.is_visible("#size") and page.is_visible("#start") and CLIP in page.inner_text("#clip-shown")
    world.axe(page, "an edit")
    page.fill("#steps", STEPS)
    found = []
    for prompt, start, end in [("it turns green", "", ""), ("it turns black", "0.25", "0.5")]:
        page.fill("#prompt", prompt)
        page.fill("#start", start)
        page.fill("#end", end)
        page.click("#send")
        video, request = finished(world, page, prompt)
        assert (video["pipeline"], video["remixed_from_video_id"], video["size"]) == ("retake", source["id"], source["size"]), video
        span = (request["retake"]["from"], request["retake"].get("to"))
        assert span == ((float(start), float(end)) if start else (0.042, None)), span
        found.append(span)
    return f"spans {found}"


@case("sources")
def extend_a_video_and_a_file(world):
    """Extends a finished video, then a dropped MP4 before its start."""
    page = world.open()
    source = world.server.video(made(page, world.server, CLIP))
    press(tile(page, CLIP).first, "Extend")
    page.fill("#added", "1")
    page.fill("#steps", STEPS)
    page.fill("#prompt", "it goes on")
    page.click("#send")
    longer, _ = finished(world, page, "it goes on")
    assert longer["num_frames"] == source["num_frames"] + round(source["fps"]), longer
    press(page, "Remove")
    bring(page, "drop", "own.mp4", "video/mp4", world.server.content(source["id"]))
    until("the file is named", lambda: "own.mp4" in page.inner_text("#clip-shown"), 5)
    page.check("#before")
    page.fill("#prompt", "it came from afar")
    page.click("#send")
    video, request = finished(world, page, "it came from afar")
    assert (video["remixed_from_video_id"], request["extend"]["at"]) == (None, "start"), (video, request)
    return f"{source['num_frames']} frames become {longer['num_frames']}"


@case("sources")
def a_video_to_a_sound(world):
    page = world.open()
    page.select_option("#pipeline", "audio_to_video")
    page.set_input_files("#tone", [{"name": "tone.wav", "mimeType": "audio/wav", "buffer": sound()}])
    until("it is named", lambda: "tone.wav" in page.inner_text("#tone-shown"), 5)
    world.axe(page, "a sound")
    page.fill("#prompt", "a disc dances")
    page.fill("#steps", STEPS)
    page.click("#send")
    video, request = finished(world, page, "a disc dances")
    assert video["pipeline"] == "audio_to_video" and request["audio"]["path"], (video, request)
    return request["audio"]["path"]


@case("sources")
def what_is_missing_is_said(world):
    """Without an input video or sound nothing is sent, and the field shows the error."""
    page = world.open()
    page.fill("#prompt", "from nothing")
    for pipeline, field, word in [("retake", "clip", "a video"), ("extend", "clip", "a video"), ("audio_to_video", "tone", "an audio file")]:
        page.select_option("#pipeline", pipeline)
        page.click("#send")
        assert word in page.inner_text(f"#e-{field}") and page.evaluate("document.activeElement.id") == field, pipeline
    assert page.locator(".row").count() == 0
    return "three pipelines"

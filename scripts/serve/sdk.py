#!/usr/bin/env python3
"""Runs OpenAI's unmodified Python client against `ltx2 serve` on the toy model: `make serve-sdk`.

    sdk.py --ltx2 target/debug/ltx2 [--record FILE]

Prints a line per check. `--record` writes the requests for `cargo test --test serve recorded::`. Exit code 1 if a check fails.
"""

import argparse
import asyncio
import base64
import io
import json
import re
import tempfile
import threading
import time
import warnings
from pathlib import Path

import openai
from openai import AsyncOpenAI, OpenAI

import recorded
from server import Checks, Proxy, Server, equal, png

# The client warns that OpenAI's own service has ended.
warnings.filterwarnings("ignore", category=DeprecationWarning)

SIZE, FRAMES, STEPS = "64x64", 9, 2
ID = re.compile(r"video_[0-9a-hjkmnp-tv-z]{26}")
QUICK = {"num_frames": FRAMES, "steps": STEPS}
# The scripted device of `cargo test --test serve` reads steps and time from the prompt.
LONG = "a red circle that takes its time: steps=100 ms=50"
STATUSES = {"queued", "in_progress", "completed", "failed"}
DATA_URL = "data:image/png;base64," + base64.b64encode(png(64, 64)).decode()


class Wire:
    """A server, the proxy in front of it, and a client of the proxy."""

    def __init__(self, server, proxy, key="none"):
        self.server, self.proxy, self.key = server, proxy, key
        self.client = self.of(OpenAI)

    def of(self, kind, **more):
        return kind(base_url=f"http://127.0.0.1:{self.proxy.port}/v1", **{"api_key": self.key, **more})

    def create(self, prompt="a red circle bounces on blue", size=SIZE, extra=None, **more):
        return self.client.videos.create(prompt=prompt, size=size, extra_body=QUICK | (extra or {}), **more)

    def finish(self, video):
        done = self.client.videos.poll(video.id, poll_interval_ms=100)
        equal((done.status, done.error), ("completed", None), "the video")
        return done

    def sent(self, ending="/videos"):
        """Returns the fields of the last form, and the call."""
        call = self.proxy.of("POST", ending)[-1]
        return call.fields(), call

    def sidecar(self, video):
        return json.loads(self.client.videos.download_content(video.id, variant="sidecar").read())


def raised(kind, function, *arguments, **more):
    """Returns the exception that a call raises."""
    try:
        function(*arguments, **more)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def texts(fields):
    return [(name, value.decode()) for name, filename, _, value in fields if filename is None]


def a_form_is_answered_with_a_video(wire):
    """create: a form without a file; 200 with OpenAI's object, Location, x-request-id"""
    raw = wire.client.videos.with_raw_response.create(
        prompt="a red circle bounces on blue", size=SIZE, seconds="1", model="nano", extra_body=QUICK | {"seed": 7}
    )
    video, (fields, call) = raw.parse(), wire.sent()
    assert ID.fullmatch(video.id), video.id
    equal((video.object, video.status, video.progress, video.model), ("video", "queued", 0, "nano"), "the video")
    equal((video.prompt, video.size, video.seconds), ("a red circle bounces on blue", SIZE, "1"), "the request's fields")
    equal((video.error, video.completed_at, video.remixed_from_video_id), (None, None, None), "what is not yet")
    assert abs(video.created_at - time.time()) < 60, video.created_at
    equal(raw.headers["location"], f"/v1/videos/{video.id}", "Location")
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", raw.headers["x-request-id"]), raw.headers["x-request-id"]
    # The client always sends a form with text values and no idempotency key.
    assert call.header("content-type").startswith("multipart/form-data; boundary="), call.header("content-type")
    equal(dict(texts(fields))["seed"], "7", "a number in a form")
    equal(call.header("idempotency-key"), None, "Idempotency-Key")
    done = wire.finish(video)
    equal((done.progress, done.id), (100, video.id), "the end")
    assert done.completed_at >= done.created_at and done.expires_at > done.completed_at, done
    equal(done.model_extra["seed"], 7, "the seed")
    equal(done.model_extra["num_frames"], FRAMES, "num_frames wins over seconds")
    assert any("seconds" in warning for warning in done.model_extra["warnings"]), done.model_extra["warnings"]


def polling_is_told_when(wire):
    """retrieve and poll: openai-poll-after-ms on an unfinished video is obeyed, Cache-Control: no-store"""
    video = wire.create(extra={"seed": 8})
    raw = wire.client.videos.with_raw_response.retrieve(video.id)
    if raw.parse().status in ("queued", "in_progress"):
        equal(raw.headers["openai-poll-after-ms"], "1000", "openai-poll-after-ms")
    equal(raw.headers["cache-control"], "no-store", "Cache-Control")
    equal(wire.client.videos.poll(video.id).status, "completed", "the video")
    polls = [e for e in wire.proxy.of("GET", video.id) if e.header("x-stainless-poll-helper") == "true"]
    assert polls and {e.json()["status"] for e in polls} <= STATUSES
    waits = [e for e in polls if e.json()["status"] in ("queued", "in_progress")]
    assert all(e.answered("openai-poll-after-ms") == "1000" for e in waits)


def a_video_is_created_and_polled(wire):
    """create_and_poll, download_content of all variants, write_to_file, stream_to_file"""
    video = wire.client.videos.create_and_poll(
        prompt="a white disc", size=SIZE, extra_body=QUICK | {"seed": 9}, poll_interval_ms=100
    )
    equal(video.status, "completed", "the video")
    begins = {
        "video": ("video/mp4", b"ftyp", 4),
        "thumbnail": ("image/jpeg", b"\xff\xd8\xff", 0),
        "spritesheet": ("image/jpeg", b"\xff\xd8\xff", 0),
        "sidecar": ("application/json", b"{", 0),
        "audio": ("audio/wav", b"RIFF", 0),
    }
    for variant, (kind, magic, at) in begins.items():
        content = wire.client.videos.download_content(video.id, variant=variant)
        call = wire.proxy.of("GET", "/content")[-1]
        equal(call.header("accept"), "application/binary", "what the client accepts")
        equal(content.response.headers["content-type"], kind, f"the type of {variant}")
        equal(content.content[at : at + len(magic)], magic, f"the first bytes of {variant}")
        assert content.response.headers["etag"].startswith('"'), content.response.headers
        assert "nosniff" in content.response.headers["x-content-type-options"]
    whole = wire.client.videos.download_content(video.id).read()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("written.mp4", "streamed.mp4"):
            if name == "written.mp4":
                wire.client.videos.download_content(video.id).write_to_file(f"{folder}/{name}")
            else:
                with wire.client.videos.with_streaming_response.download_content(video.id) as response:
                    response.stream_to_file(f"{folder}/{name}")
            equal(Path(f"{folder}/{name}").read_bytes(), whole, name)
    ranged = wire.client.videos.download_content(video.id, extra_headers={"Range": "bytes=4-7"})
    equal((ranged.response.status_code, ranged.content), (206, b"ftyp"), "a range")
    sidecar = wire.client.videos.download_content(video.id, variant="sidecar").text
    equal(json.loads(sidecar)["config"]["request"]["seed"], 9, "the sidecar's seed")
    assert str(wire.server.state) not in sidecar, "the sidecar names a folder of the server"


def nested_fields_arrive(wire):
    """extra_body: nested fields arrive in brackets, true as text, null not at all; as flat fields and as JSON text they mean the same"""
    nested = {"extra_params": {"stg_scale": 1.0, "stg_blocks": [1, 2]}, "generate_audio": True, "negative_prompt": None}
    first = wire.create(extra=nested | {"seed": 11})
    fields = texts(wire.sent()[0])
    equal(dict(fields)["extra_params[stg_scale]"], "1.0", "a nested number")
    equal([v for n, v in fields if n == "extra_params[stg_blocks][]"], ["1", "2"], "a nested list")
    equal(dict(fields)["generate_audio"], "true", "true")
    assert "negative_prompt" not in dict(fields), fields
    flat = wire.create(extra={"stg_scale": 1.0, "stg_blocks": [1, 2], "seed": 11})
    text = wire.create(extra={"extra_params": '{"stg_scale":1.0,"stg_blocks":[1,2]}', "seed": 11})
    deep = wire.create(extra={"ltx2": {"guidance": {"stg_blocks": [1, 2], "video": {"stg": 1.0}, "audio": {"stg": 1.0}}}, "seed": 11})
    names = [name for name, _ in texts(wire.sent()[0])]
    assert "ltx2[guidance][video][stg]" in names and names.count("ltx2[guidance][stg_blocks][]") == 2, names
    sidecars = [wire.sidecar(wire.finish(video)) for video in (first, flat, text, deep)]
    guidance = sidecars[0]["config"]["guidance"]
    equal((guidance["video"]["stg"], guidance["audio"]["stg"], guidance["stg_blocks"]), (1.0, 1.0, [1, 2]), "guidance")
    for other in sidecars[1:]:
        equal(other["config"]["guidance"], guidance, "guidance")
        equal(other["sha256"], sidecars[0]["sha256"], "frames and samples")


def lists_of_objects_need_json(wire):
    """extra_body: a list of objects loses its grouping in a form; as JSON text it arrives whole"""
    wire.create(extra={"images": [{"data": DATA_URL, "frame": 0}], "seed": 12})
    names = [name for name, _ in texts(wire.sent()[0])]
    assert "images[][data]" in names and "images[][frame]" in names, names
    video = wire.create(extra={"images": json.dumps([{"data": DATA_URL, "frame": 0, "strength": 0.5}]), "seed": 12})
    images = wire.sidecar(wire.finish(video))["config"]["request"]["images"]
    equal([(image["frame"], image["strength"]) for image in images], [(0, 0.5)], "the images")


def an_image_is_given(wire):
    """input_reference: a file as a part with its name and type; image_url is refused by the client itself, and taken in extra_body"""
    for given in [("first.png", png(64, 64), "image/png"), io.BytesIO(png(64, 64))]:
        video = wire.create(input_reference=given, extra={"seed": 13})
        files = [(name, kind, value) for name, filename, kind, value in wire.sent()[0] if filename]
        equal([(name, value) for name, _, value in files], [("input_reference", png(64, 64))], "the file's part")
    done = wire.finish(video)
    equal(done.model_extra["pipeline"], "image_to_video", "the pipeline")
    before = len(wire.proxy.of("POST", "/videos"))
    raised((TypeError, RuntimeError), wire.create, input_reference={"image_url": DATA_URL})
    equal(len(wire.proxy.of("POST", "/videos")), before, "requests of a call that the client refuses")
    url = wire.create(extra={"input_reference": {"image_url": DATA_URL}, "seed": 13})
    assert "input_reference[image_url]" in dict(texts(wire.sent()[0]))
    equal(wire.sidecar(wire.finish(url))["sha256"], wire.sidecar(done)["sha256"], "frames by either way")
    remote = raised(openai.BadRequestError, wire.create, extra={"input_reference": {"image_url": "https://example.com/a.png"}})
    equal(remote.param, "input_reference", "the field of a remote image")


def a_video_is_remixed(wire):
    """remix: JSON; the source's seed and size under a new prompt"""
    source = wire.finish(wire.create(extra={"seed": 14}))
    remix = wire.client.videos.remix(source.id, prompt="the circle turns green")
    call = wire.proxy.of("POST", "/remix")[-1]
    equal(call.header("content-type"), "application/json", "the body of remix")
    equal(json.loads(call.body), {"prompt": "the circle turns green"}, "the body of remix")
    equal((remix.remixed_from_video_id, remix.size, remix.model_extra["seed"]), (source.id, SIZE, 14), "the remix")
    equal(wire.finish(remix).prompt, "the circle turns green", "its prompt")
    waiting = wire.create(LONG, extra={"seed": 15, "steps": 100})
    early = raised(openai.APIStatusError, wire.client.videos.remix, waiting.id, prompt="too early")
    assert 400 <= early.status_code < 409, early
    wire.client.videos.delete(waiting.id)


def lists_go_over_pages(wire):
    """list: pages by last_id and has_more, both orders, behind an id that is gone"""
    made = [wire.finish(wire.create(extra={"seed": 20 + at})) for at in range(4)]
    ids = [video.id for video in made]
    newest = [video.id for video in wire.client.videos.list(limit=3)]
    equal(newest[:4], ids[::-1], "newest first")
    equal(newest, sorted(newest, reverse=True), "the order")
    pages = [e for e in wire.proxy.of("GET", "/videos") if "limit=3" in e.path]
    for page, after in zip(pages, pages[1:]):
        body = page.json()
        equal((body["object"], body["has_more"]), ("list", True), "a page")
        equal((body["first_id"], body["last_id"]), (body["data"][0]["id"], body["data"][-1]["id"]), "first_id, last_id")
        assert f"after={body['last_id']}" in after.path, after.path
    equal(pages[-1].json()["has_more"], False, "the last page")
    equal([video.id for video in wire.client.videos.list(order="asc", limit=100)], newest[::-1], "oldest first")
    wire.client.videos.delete(ids[1])
    after = wire.client.videos.list(order="asc", after=ids[1], limit=2)
    equal([video.id for video in after.data], ids[2:4], "behind a deleted id")
    wrong = raised(openai.BadRequestError, wire.client.videos.list, limit=1000)
    equal(wrong.param, "limit", "the field of a wrong limit")


def a_video_is_deleted(wire):
    """delete: video.deleted; afterwards 404"""
    video = wire.finish(wire.create(extra={"seed": 30}))
    gone = wire.client.videos.delete(video.id)
    equal((gone.id, gone.object, gone.deleted), (video.id, "video.deleted", True), "the answer")
    for call in (wire.client.videos.retrieve, wire.client.videos.delete, wire.client.videos.download_content):
        equal(raised(openai.NotFoundError, call, video.id).code, "video_not_found", call.__name__)


def a_cancelled_video_ends_poll(wire):
    """poll: a cancelled video ends it as failed, error.code cancelled; its content is 404 video_failed"""
    video = wire.create(LONG, extra={"seed": 31, "steps": 100})
    early = raised(openai.NotFoundError, wire.client.videos.download_content, video.id)
    equal(early.code, "video_not_ready", "the content of a video that is not ready")
    cancel = threading.Timer(0.5, lambda: wire.client.post(f"/videos/{video.id}/cancel", cast_to=object))
    cancel.start()
    done = wire.client.videos.poll(video.id, poll_interval_ms=100)
    cancel.join()
    equal((done.status, done.error.code), ("failed", "cancelled"), "the video")
    equal(raised(openai.NotFoundError, wire.client.videos.download_content, video.id).code, "video_failed", "its content")
    equal(wire.client.videos.retrieve(video.id).status, "failed", "a failed video is no error to ask for")


def errors_are_read(wire):
    """errors: message, type, param, code and request id are the client's; 4xx are not tried again"""
    before = len(wire.proxy.of("POST", "/videos"))
    wrong = raised(openai.BadRequestError, wire.create, size="100x64")
    equal((wrong.code, wrong.param, wrong.type), ("invalid_size", "size", "invalid_request_error"), "the error")
    assert "96" in wrong.message and "128" in wrong.message, wrong.message
    equal(wrong.request_id, wire.proxy.of("POST", "/videos")[-1].answered("x-request-id"), "the request id")
    unknown = raised(openai.BadRequestError, wire.create, extra={"sede": 1})
    equal((unknown.code, unknown.param), ("unknown_field", "sede"), "an unknown field")
    assert "seed" in unknown.message, unknown.message
    model = raised(openai.NotFoundError, wire.create, model="sora-2")
    equal(model.code, "model_not_found", "another model")
    equal(raised(openai.BadRequestError, wire.create, prompt="").param, "prompt", "an empty prompt")
    equal(len(wire.proxy.of("POST", "/videos")), before + 4, "requests")
    characters = raised(openai.NotFoundError, wire.client.videos.create_character, name="a", video=b"none")
    equal(characters.code, "unsupported_endpoint", "characters")


def repeated_creates_are_one(wire):
    """extra_headers: an Idempotency-Key makes a repeated create one video; another body is 409 and not tried again"""
    key = {"Idempotency-Key": f"sdk-{time.time_ns()}"}
    first = wire.create(extra={"seed": 32}, extra_headers=key)
    equal(wire.create(extra={"seed": 32}, extra_headers=key).id, first.id, "the same body")
    before = len(wire.proxy.of("POST", "/videos"))
    conflict = raised(openai.ConflictError, wire.create, extra={"seed": 33}, extra_headers=key)
    equal((conflict.code, conflict.response.headers["x-should-retry"]), ("idempotency_conflict", "false"), "another body")
    equal(len(wire.proxy.of("POST", "/videos")), before + 1, "requests")
    wire.finish(first)


def videos_are_edited_and_extended(wire):
    """edit, extend: the client's own arguments are enough; frames are those that were told; a span in extra_body"""
    source = wire.finish(wire.create(extra={"seed": 34, "num_frames": 17}))
    mp4 = wire.client.videos.download_content(source.id).content
    given = ("a.mp4", mp4, "video/mp4")
    longer = wire.client.videos.extend(prompt="it goes on", seconds="1", video=given, extra_body={"steps": STEPS, "overlap": 9})
    fields, _ = wire.sent("/extensions")
    equal([(name, kind) for name, filename, kind, _ in fields if filename], [("video", "video/mp4")], "the video's part")
    done = wire.finish(longer)
    equal((longer.model_extra["num_frames"], done.model_extra["num_frames"]), (17 + 24, 17 + 24), "frames when accepted and when done")
    for video in (given, {"id": source.id}):
        edit = wire.client.videos.edit(prompt="it turns green", video=video)
        done = wire.finish(edit)
        equal((edit.model_extra["num_frames"], done.model_extra["num_frames"]), (17, 17), "frames of an edited video")
        assert any("no span" in warning for warning in done.model_extra["warnings"]), done.model_extra["warnings"]
    edit = wire.client.videos.edit(
        prompt="it turns green", video=("a.mp4", mp4, "video/mp4"), extra_body={"steps": STEPS, "start": 0.3, "end": 0.7}
    )
    equal(wire.finish(edit).model_extra["num_frames"], 17, "frames of an edited video")


def models_are_listed(wire):
    """models: list and retrieve"""
    models = wire.client.models.list().data
    assert [model.object for model in models] and models[0].id == "nano", models
    card = wire.client.models.retrieve("nano").model_extra
    assert {"pipelines", "shapes", "defaults", "limits", "loras", "size_aliases"} <= card.keys(), card.keys()
    equal(raised(openai.NotFoundError, wire.client.models.retrieve, "sora-2").code, "model_not_found", "another model")


def the_async_client_works(wire):
    """the async client: three at once, create_and_poll, list over pages, download, delete"""

    async def use():
        async with wire.of(AsyncOpenAI) as client:
            calls = [
                client.videos.create_and_poll(
                    prompt=f"disc {seed}", size=SIZE, extra_body=QUICK | {"seed": seed}, poll_interval_ms=100
                )
                for seed in (40, 41, 42)
            ]
            made = await asyncio.gather(*calls)
            equal([video.status for video in made], ["completed"] * 3, "three at once")
            listed = [video.id async for video in client.videos.list(limit=2)]
            assert {video.id for video in made} <= set(listed), listed
            content = await client.videos.download_content(made[0].id)
            equal((await content.aread())[4:8], b"ftyp", "its content")
            equal((await client.videos.delete(made[0].id)).deleted, True, "deleted")
            try:
                await client.videos.retrieve(made[0].id)
                raise AssertionError("a deleted video is there")
            except openai.NotFoundError as error:
                equal(error.code, "video_not_found", "afterwards")

    asyncio.run(use())


def keys_are_asked_for(wire):
    """api_key: a wrong one is 401 and not tried again; each sees its own videos"""
    stranger = wire.of(OpenAI, api_key="wrong")
    before = len(wire.proxy.calls)
    error = raised(openai.AuthenticationError, stranger.videos.list)
    equal((error.code, error.type), ("invalid_api_key", "authentication_error"), "the error")
    assert error.response.headers["www-authenticate"].startswith("Bearer"), error.response.headers
    equal(len(wire.proxy.calls), before + 1, "requests")
    own = wire.create(extra={"seed": 50})
    other = wire.of(OpenAI, api_key="second-key-of-the-test")
    equal(raised(openai.NotFoundError, other.videos.retrieve, own.id).code, "video_not_found", "another's video")
    equal(other.videos.list().data, [], "another's list")
    wire.finish(own)


def a_full_queue_is_waited_for(wire):
    """429: Retry-After is obeyed, and the request goes through once there is room; nothing is left of those refused"""
    # Long enough that the queue is full for the third request.
    running = wire.create(LONG, extra={"seed": 51, "steps": 100})
    while wire.client.videos.retrieve(running.id).status == "queued":
        time.sleep(0.05)
    waiting = wire.create(extra={"seed": 52})
    refused = raised(openai.RateLimitError, wire.of(OpenAI, max_retries=0).videos.create, prompt="full", size=SIZE)
    equal(refused.code, "queue_full", "the error")
    assert 1 <= int(refused.response.headers["retry-after"]) <= 120, refused.response.headers
    listed = {video.id for video in wire.client.videos.list(limit=100)}
    threading.Timer(0.5, lambda: wire.client.post(f"/videos/{running.id}/cancel", cast_to=object)).start()
    patient = wire.of(OpenAI, max_retries=20)
    raw = patient.videos.with_raw_response.create(prompt="patient", size=SIZE, extra_body=QUICK | {"seed": 53})
    assert raw.retries_taken >= 1, raw.retries_taken
    refusals = [e for e in wire.proxy.of("POST", "/videos") if e.status == 429]
    assert len(refusals) >= 2 and all(e.answered("retry-after") for e in refusals)
    created = raw.parse()
    wire.finish(waiting), wire.finish(created)
    equal({video.id for video in wire.client.videos.list(limit=100)} - listed, {created.id}, "videos of refused requests")


ALONE = [
    a_form_is_answered_with_a_video,
    polling_is_told_when,
    a_video_is_created_and_polled,
    nested_fields_arrive,
    lists_of_objects_need_json,
    an_image_is_given,
    a_video_is_remixed,
    lists_go_over_pages,
    a_video_is_deleted,
    a_cancelled_video_ends_poll,
    errors_are_read,
    repeated_creates_are_one,
    videos_are_edited_and_extended,
    models_are_listed,
    the_async_client_works,
]
WITH_KEYS = [keys_are_asked_for, a_full_queue_is_waited_for]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ltx2", required=True)
    parser.add_argument("--record", help="writes the requests of these checks")
    parser.add_argument("--only", help="checks whose names have this in them")
    arguments = parser.parse_args()
    chosen = lambda checks: [c for c in checks if not arguments.only or arguments.only in c.__name__]  # noqa: E731
    checks, calls = Checks(), []
    print(f"openai {openai.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("first:first-key-of-the-test\nsecond:second-key-of-the-test\n")
        keys.chmod(0o600)
        warm = ["--served-model-name", "nano", "--warm", f"{SIZE}x{FRAMES}", "--set", "serve.pipelines=[retake, extend]"]
        for group, key, more in [
            (ALONE, "none", []),
            (WITH_KEYS, "first-key-of-the-test", ["--api-key-file", keys, "--queue", "1"]),
        ]:
            if not chosen(group):
                continue
            with Server(arguments.ltx2, folder, *warm, *more) as server, Proxy(server.port) as proxy:
                wire = Wire(server, proxy, key)
                for check in chosen(group):
                    start = len(proxy.calls)
                    checks.run(check, wire)
                    calls.append((check.__name__, proxy.calls[start:]))
                if checks.failed:
                    print(server.tail())
    if arguments.record:
        recorded.write(arguments.record, f"openai {openai.__version__}", calls)
    return checks.end("serve-sdk")


if __name__ == "__main__":
    raise SystemExit(main())

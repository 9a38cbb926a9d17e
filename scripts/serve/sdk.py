"""Runs OpenAI's unmodified Python client against `ltx2 serve` on the toy model: `make serve-sdk`.

    sdk.py --ltx2 target/debug/ltx2 [--record FILE] [--only WORD]"""

import asyncio
import base64
import io
import json
import re
import threading
import time
import warnings
from pathlib import Path

import openai
from openai import AsyncOpenAI, BadRequestError, ConflictError, NotFoundError, OpenAI, RateLimitError

from clients import Client, Run
from server import equal, png

# The client warns that OpenAI's own service has ended.
warnings.filterwarnings("ignore", category=DeprecationWarning)

SIZE, FRAMES, STEPS = "64x64", 9, 2
PROMPT = "a red circle bounces on blue"
QUICK = {"num_frames": FRAMES, "steps": STEPS}
# The scripted device of `cargo test --test serve` reads steps and time from the prompt.
LONG = "a red circle that takes its time: steps=100 ms=50"
STATUSES = {"queued", "in_progress", "completed", "failed"}
DATA_URL = "data:image/png;base64," + base64.b64encode(png(64, 64)).decode()
FIRST, SECOND = "first-key-of-the-test", "second-key-of-the-test"
FLAGS = ["--served-model-name", "nano", "--warm", f"{SIZE}x{FRAMES}", "--set", "serve.pipelines=[retake, extend]"]
# First bytes and their offset by variant of the content.
_JPEG = ("image/jpeg", b"\xff\xd8\xff", 0)
CONTENT = {
    "video": ("video/mp4", b"ftyp", 4), "thumbnail": _JPEG, "spritesheet": _JPEG, "sidecar": ("application/json", b"{", 0),
    "audio": ("audio/wav", b"RIFF", 0),
}


def refused(kind, expected, function, *arguments, **more):
    """Returns the exception that a call raises; checks its fields."""
    try:
        function(*arguments, **more)
    except kind as error:
        equal({name: getattr(error, name) for name in expected}, expected, "the error")
        return error
    raise AssertionError(f"no {kind}")


class Wire(Client):
    """OpenAI's client of the proxy, with the key `api_key`."""

    api_key = "none"

    def __init__(self, server, proxy):
        super().__init__(server, proxy)
        self.videos = self.of(OpenAI).videos

    def of(self, kind=OpenAI, **more):
        return kind(base_url=f"{self.address}/v1", **{"api_key": self.api_key} | more)

    def create(self, prompt=PROMPT, size=SIZE, extra=None, api=None, **more):
        return (api or self.videos).create(prompt=prompt, size=size, extra_body=QUICK | (extra or {}), **more)

    def create_long(self, seed):
        return self.create(LONG, extra={"seed": seed, "steps": 100})

    def finish(self, video):
        done = self.videos.poll(video.id, poll_interval_ms=100)
        equal((done.status, done.error), ("completed", None), "the video")
        return done

    def made(self, **extra):
        return self.finish(self.create(extra=extra))

    def cancel_soon(self, video):
        timer = threading.Timer(0.5, lambda: self.of().post(f"/videos/{video.id}/cancel", cast_to=object))
        timer.start()
        return timer

    def posts(self):
        return self.proxy.of("POST", "/videos")

    def sent(self):
        """Returns names and texts of the last create's form."""
        return [(name, value.decode()) for name, filename, _, value in self.posts()[-1].fields() if filename is None]

    def sidecar(self, video):
        return json.loads(self.videos.download_content(video.id, variant="sidecar").read())


class Open(Wire):
    def a_form_is_answered_with_a_video(self):
        """create: a form without a file; 200 with OpenAI's object, Location, x-request-id"""
        raw = self.create(extra={"seed": 7}, api=self.videos.with_raw_response, seconds="1", model="nano")
        video, call = raw.parse(), self.posts()[-1]
        assert re.fullmatch(r"video_[0-9a-hjkmnp-tv-z]{26}", video.id), video.id
        equal((video.object, video.status, video.progress, video.model), ("video", "queued", 0, "nano"), "the video")
        equal((video.prompt, video.size, video.seconds), (PROMPT, SIZE, "1"), "the request's fields")
        equal((video.error, video.completed_at, video.remixed_from_video_id), (None, None, None), "what is not yet")
        assert abs(video.created_at - time.time()) < 60, video.created_at
        equal(raw.headers["location"], f"/v1/videos/{video.id}", "Location")
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", raw.headers["x-request-id"]), raw.headers["x-request-id"]
        # The client always sends a form with text values and no idempotency key.
        assert call.headers["content-type"].startswith("multipart/form-data; boundary="), call.headers["content-type"]
        equal(dict(self.sent())["seed"], "7", "a number in a form")
        equal(call.headers.get("idempotency-key"), None, "Idempotency-Key")
        done = self.finish(video)
        equal((done.progress, done.id), (100, video.id), "the end")
        assert done.completed_at >= done.created_at and done.expires_at > done.completed_at, done
        equal((done.model_extra["seed"], done.model_extra["num_frames"]), (7, FRAMES), "seed; num_frames wins over seconds")
        assert any("seconds" in warning for warning in done.model_extra["warnings"]), done.model_extra["warnings"]

    def polling_is_told_when(self):
        """retrieve and poll: openai-poll-after-ms on an unfinished video is obeyed, Cache-Control: no-store"""
        video = self.create(extra={"seed": 8})
        raw = self.videos.with_raw_response.retrieve(video.id)
        if raw.parse().status in ("queued", "in_progress"):
            equal(raw.headers["openai-poll-after-ms"], "1000", "openai-poll-after-ms")
        equal(raw.headers["cache-control"], "no-store", "Cache-Control")
        equal(self.videos.poll(video.id).status, "completed", "the video")
        polls = [e for e in self.proxy.of("GET", video.id) if e.headers.get("x-stainless-poll-helper") == "true"]
        assert polls and {e.json()["status"] for e in polls} <= STATUSES
        waits = [e for e in polls if e.json()["status"] in ("queued", "in_progress")]
        assert all(e.answer_headers.get("openai-poll-after-ms") == "1000" for e in waits)

    def a_video_is_created_and_polled(self):
        """create_and_poll, download_content of all variants, write_to_file, stream_to_file"""
        extra = QUICK | {"seed": 9}
        video = self.videos.create_and_poll(prompt="a white disc", size=SIZE, extra_body=extra, poll_interval_ms=100)
        equal(video.status, "completed", "the video")
        download = self.videos.download_content
        for variant, (kind, magic, at) in CONTENT.items():
            content = download(video.id, variant=variant)
            headers = content.response.headers
            equal(self.proxy.of("GET", "/content")[-1].headers.get("accept"), "application/binary", "what the client accepts")
            equal(headers["content-type"], kind, f"the type of {variant}")
            equal(content.content[at : at + len(magic)], magic, f"the first bytes of {variant}")
            assert headers["etag"].startswith('"') and "nosniff" in headers["x-content-type-options"], headers
        whole = download(video.id).read()
        written, streamed = self.work / "written.mp4", self.work / "streamed.mp4"
        download(video.id).write_to_file(written)
        with self.videos.with_streaming_response.download_content(video.id) as response:
            response.stream_to_file(streamed)
        equal((written.read_bytes(), streamed.read_bytes()), (whole, whole), "the files")
        ranged = download(video.id, extra_headers={"Range": "bytes=4-7"})
        equal((ranged.response.status_code, ranged.content), (206, b"ftyp"), "a range")
        sidecar = download(video.id, variant="sidecar").text
        equal(json.loads(sidecar)["config"]["request"]["seed"], 9, "the sidecar's seed")
        assert str(self.server.state) not in sidecar, "the sidecar names a folder of the server"

    def nested_fields_arrive(self):
        """extra_body: nested fields arrive in brackets, true as text, null not at all; flat fields and JSON text mean the same"""
        params = {"stg_scale": 1.0, "stg_blocks": [1, 2]}
        made = [self.create(extra={"extra_params": params, "generate_audio": True, "negative_prompt": None, "seed": 11})]
        fields = self.sent()
        equal(dict(fields)["extra_params[stg_scale]"], "1.0", "a nested number")
        equal([v for n, v in fields if n == "extra_params[stg_blocks][]"], ["1", "2"], "a nested list")
        equal(dict(fields)["generate_audio"], "true", "true")
        assert "negative_prompt" not in dict(fields), fields
        deep = {"guidance": {"stg_blocks": [1, 2], "video": {"stg": 1.0}, "audio": {"stg": 1.0}}}
        for extra in (params, {"extra_params": '{"stg_scale":1.0,"stg_blocks":[1,2]}'}, {"ltx2": deep}):
            made.append(self.create(extra=extra | {"seed": 11}))
        names = [name for name, _ in self.sent()]
        assert "ltx2[guidance][video][stg]" in names and names.count("ltx2[guidance][stg_blocks][]") == 2, names
        first, *others = [self.sidecar(self.finish(video)) for video in made]
        guidance = first["config"]["guidance"]
        equal((guidance["video"]["stg"], guidance["audio"]["stg"], guidance["stg_blocks"]), (1.0, 1.0, [1, 2]), "guidance")
        for other in others:
            equal((other["config"]["guidance"], other["sha256"]), (guidance, first["sha256"]), "guidance, frames and samples")

    def lists_of_objects_need_json(self):
        """extra_body: a list of objects loses its grouping in a form; as JSON text it arrives whole"""
        self.create(extra={"images": [{"data": DATA_URL, "frame": 0}], "seed": 12})
        names = [name for name, _ in self.sent()]
        assert "images[][data]" in names and "images[][frame]" in names, names
        video = self.made(images=json.dumps([{"data": DATA_URL, "frame": 0, "strength": 0.5}]), seed=12)
        images = self.sidecar(video)["config"]["request"]["images"]
        equal([(image["frame"], image["strength"]) for image in images], [(0, 0.5)], "the images")

    def an_image_is_given(self):
        """input_reference: a file as a part with name and type; image_url is refused by the client, and taken in extra_body"""
        for given in [("first.png", png(64, 64), "image/png"), io.BytesIO(png(64, 64))]:
            video = self.create(input_reference=given, extra={"seed": 13})
            files = [(name, value) for name, filename, _, value in self.posts()[-1].fields() if filename]
            equal(files, [("input_reference", png(64, 64))], "the file's part")
        done = self.finish(video)
        equal(done.model_extra["pipeline"], "image_to_video", "the pipeline")
        before = len(self.posts())
        refused((TypeError, RuntimeError), {}, self.create, input_reference={"image_url": DATA_URL})
        equal(len(self.posts()), before, "requests of a call that the client refuses")
        url = self.create(extra={"input_reference": {"image_url": DATA_URL}, "seed": 13})
        assert "input_reference[image_url]" in dict(self.sent())
        equal(self.sidecar(self.finish(url))["sha256"], self.sidecar(done)["sha256"], "frames by either way")
        reference = {"image_url": "https://example.com/a.png"}
        refused(BadRequestError, {"param": "input_reference"}, self.create, extra={"input_reference": reference})

    def a_video_is_remixed(self):
        """remix: JSON; the source's seed and size under a new prompt"""
        source = self.made(seed=14)
        remix = self.videos.remix(source.id, prompt="the circle turns green")
        call = self.proxy.of("POST", "/remix")[-1]
        equal(call.headers.get("content-type"), "application/json", "the body of remix")
        equal(json.loads(call.body), {"prompt": "the circle turns green"}, "the body of remix")
        equal((remix.remixed_from_video_id, remix.size, remix.model_extra["seed"]), (source.id, SIZE, 14), "the remix")
        equal(self.finish(remix).prompt, "the circle turns green", "its prompt")
        waiting = self.create_long(15)
        early = refused(openai.APIStatusError, {}, self.videos.remix, waiting.id, prompt="too early")
        assert 400 <= early.status_code < 409, early
        self.videos.delete(waiting.id)

    def lists_go_over_pages(self):
        """list: pages by last_id and has_more, both orders, behind an id that is gone"""
        ids, newest = [self.made(seed=20 + at).id for at in range(4)], [video.id for video in self.videos.list(limit=3)]
        equal(newest[:4], ids[::-1], "newest first")
        equal(newest, sorted(newest, reverse=True), "the order")
        pages = [e for e in self.proxy.of("GET", "/videos") if "limit=3" in e.path]
        for page, after in zip(pages, pages[1:]):
            body = page.json()
            equal((body["object"], body["has_more"]), ("list", True), "a page")
            equal((body["first_id"], body["last_id"]), (body["data"][0]["id"], body["data"][-1]["id"]), "first_id, last_id")
            assert f"after={body['last_id']}" in after.path, after.path
        equal(pages[-1].json()["has_more"], False, "the last page")
        equal([video.id for video in self.videos.list(order="asc", limit=100)], newest[::-1], "oldest first")
        self.videos.delete(ids[1])
        after = self.videos.list(order="asc", after=ids[1], limit=2)
        equal([video.id for video in after.data], ids[2:4], "behind a deleted id")
        refused(BadRequestError, {"param": "limit"}, self.videos.list, limit=1000)

    def a_video_is_deleted(self):
        """delete: video.deleted; afterwards 404"""
        video = self.made(seed=30)
        gone = self.videos.delete(video.id)
        equal((gone.id, gone.object, gone.deleted), (video.id, "video.deleted", True), "the answer")
        for call in (self.videos.retrieve, self.videos.delete, self.videos.download_content):
            refused(NotFoundError, {"code": "video_not_found"}, call, video.id)

    def a_cancelled_video_ends_poll(self):
        """poll: a cancelled video ends it as failed, error.code cancelled; its content is 404 video_failed"""
        video = self.create_long(31)
        refused(NotFoundError, {"code": "video_not_ready"}, self.videos.download_content, video.id)
        cancel, done = self.cancel_soon(video), self.videos.poll(video.id, poll_interval_ms=100)
        cancel.join()
        equal((done.status, done.error.code), ("failed", "cancelled"), "the video")
        refused(NotFoundError, {"code": "video_failed"}, self.videos.download_content, video.id)
        equal(self.videos.retrieve(video.id).status, "failed", "a failed video is no error to ask for")

    def errors_are_read(self):
        """errors: message, type, param, code and request id are the client's; 4xx are not tried again"""
        before = len(self.posts())
        expected = {"code": "invalid_size", "param": "size", "type": "invalid_request_error"}
        wrong = refused(BadRequestError, expected, self.create, size="100x64")
        assert "96" in wrong.message and "128" in wrong.message, wrong.message
        equal(wrong.request_id, self.posts()[-1].answer_headers.get("x-request-id"), "the request id")
        unknown = refused(BadRequestError, {"code": "unknown_field", "param": "sede"}, self.create, extra={"sede": 1})
        assert "seed" in unknown.message, unknown.message
        refused(NotFoundError, {"code": "model_not_found"}, self.create, model="sora-2")
        refused(BadRequestError, {"param": "prompt"}, self.create, prompt="")
        equal(len(self.posts()), before + 4, "requests")
        refused(NotFoundError, {"code": "unsupported_endpoint"}, self.videos.create_character, name="a", video=b"none")

    def repeated_creates_are_one(self):
        """extra_headers: an Idempotency-Key makes a repeated create one video; another body is 409 and not tried again"""
        key = {"Idempotency-Key": f"sdk-{time.time_ns()}"}
        first = self.create(extra={"seed": 32}, extra_headers=key)
        equal(self.create(extra={"seed": 32}, extra_headers=key).id, first.id, "the same body")
        before = len(self.posts())
        conflict = refused(ConflictError, {"code": "idempotency_conflict"}, self.create, extra={"seed": 33}, extra_headers=key)
        equal(conflict.response.headers["x-should-retry"], "false", "x-should-retry")
        equal(len(self.posts()), before + 1, "requests")
        self.finish(first)

    def videos_are_edited_and_extended(self):
        """edit, extend: the client's own arguments are enough; frames are those that were told; a span in extra_body"""
        source = self.made(seed=34, num_frames=17)
        given = ("a.mp4", self.videos.download_content(source.id).content, "video/mp4")
        longer = self.videos.extend(prompt="it goes on", seconds="1", video=given, extra_body={"steps": STEPS, "overlap": 9})
        fields = self.proxy.of("POST", "/extensions")[-1].fields()
        equal([(name, kind) for name, filename, kind, _ in fields if filename], [("video", "video/mp4")], "the video's part")
        frames = [video.model_extra["num_frames"] for video in (longer, self.finish(longer))]
        equal(frames, [17 + 24, 17 + 24], "frames when accepted and when done")
        for video in (given, {"id": source.id}):
            edit = self.videos.edit(prompt="it turns green", video=video)
            done = self.finish(edit)
            equal((edit.model_extra["num_frames"], done.model_extra["num_frames"]), (17, 17), "frames of an edited video")
            assert any("no span" in warning for warning in done.model_extra["warnings"]), done.model_extra["warnings"]
        edit = self.videos.edit(prompt="it turns green", video=given, extra_body={"steps": STEPS, "start": 0.3, "end": 0.7})
        equal(self.finish(edit).model_extra["num_frames"], 17, "frames of an edited video")

    def models_are_listed(self):
        """models: list and retrieve"""
        api = self.of().models
        models = api.list().data
        assert [model.object for model in models] and models[0].id == "nano", models
        card = api.retrieve("nano").model_extra
        assert {"pipelines", "shapes", "defaults", "limits", "loras", "size_aliases"} <= card.keys(), card.keys()
        refused(NotFoundError, {"code": "model_not_found"}, api.retrieve, "sora-2")

    def the_async_client_works(self):
        """the async client: three at once, create_and_poll, list over pages, download, delete"""

        async def made(videos, seed):
            extra = QUICK | {"seed": seed}
            return await videos.create_and_poll(prompt=f"disc {seed}", size=SIZE, extra_body=extra, poll_interval_ms=100)

        async def use():
            async with self.of(AsyncOpenAI) as client:
                three = await asyncio.gather(*(made(client.videos, seed) for seed in (40, 41, 42)))
                equal([video.status for video in three], ["completed"] * 3, "three at once")
                listed = {video.id async for video in client.videos.list(limit=2)}
                assert {video.id for video in three} <= listed, listed
                content = await client.videos.download_content(three[0].id)
                equal((await content.aread())[4:8], b"ftyp", "its content")
                equal((await client.videos.delete(three[0].id)).deleted, True, "deleted")
                try:
                    await client.videos.retrieve(three[0].id)
                    raise AssertionError("a deleted video is there")
                except NotFoundError as error:
                    equal(error.code, "video_not_found", "afterwards")

        asyncio.run(use())


class WithKeys(Wire):
    api_key = FIRST

    def keys_are_asked_for(self):
        """api_key: a wrong one is 401 and not tried again; each sees its own videos"""
        before = len(self.proxy.calls)
        expected = {"code": "invalid_api_key", "type": "authentication_error"}
        error = refused(openai.AuthenticationError, expected, self.of(api_key="wrong").videos.list)
        assert error.response.headers["www-authenticate"].startswith("Bearer"), error.response.headers
        equal(len(self.proxy.calls), before + 1, "requests")
        own, other = self.create(extra={"seed": 50}), self.of(api_key=SECOND)
        refused(NotFoundError, {"code": "video_not_found"}, other.videos.retrieve, own.id)
        equal(other.videos.list().data, [], "another's list")
        self.finish(own)

    def a_full_queue_is_waited_for(self):
        """429: Retry-After is obeyed, and the request goes through once there is room; nothing is left of those refused"""
        # Long enough that the queue is full for the third request.
        running = self.create_long(51)
        while self.videos.retrieve(running.id).status == "queued":
            time.sleep(0.05)
        waiting = self.create(extra={"seed": 52})
        full = refused(RateLimitError, {"code": "queue_full"}, self.of(max_retries=0).videos.create, prompt="full", size=SIZE)
        assert 1 <= int(full.response.headers["retry-after"]) <= 120, full.response.headers
        listed = {video.id for video in self.videos.list(limit=100)}
        self.cancel_soon(running)
        raw = self.create("patient", extra={"seed": 53}, api=self.of(max_retries=20).videos.with_raw_response)
        assert raw.retries_taken >= 1, raw.retries_taken
        refusals = [e for e in self.posts() if e.status == 429]
        assert len(refusals) >= 2 and all(e.answer_headers.get("retry-after") for e in refusals)
        created = raw.parse()
        self.finish(waiting), self.finish(created)
        equal({video.id for video in self.videos.list(limit=100)} - listed, {created.id}, "videos of refused requests")


run = Run("sdk", __doc__)
print(f"openai {openai.__version__}")
keys = Path(run.temporary.name) / "keys"
keys.write_text(f"first:{FIRST}\nsecond:{SECOND}\n")
keys.chmod(0o600)
run.group(Open, *FLAGS)
run.group(WithKeys, *FLAGS, "--api-key-file", keys, "--queue", "1")
run.end(f"openai {openai.__version__}")

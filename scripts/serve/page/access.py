"""Keys, full queues, and many jobs."""

import base64
import json
import os
import re
import shutil
import time

from harness import MANY, World, case
from server import until

HEAP = 50_000_000
MANY_JOBS = 1000
KEY = "a-key-of-the-page's-test"
KEPT = "[document.cookie, JSON.stringify(localStorage), document.querySelector('#key').value]"
ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
FILES = ("video.mp4", "video.json", "thumb.jpg", "sprite.jpg", "audio.wav")


class Full(World):
    flags = ("--queue", "1", "--max-steps", "1000")

    @case(statuses=(429,))
    def queue_full(self, page):
        """A full queue is reported with a retry time; no row or draft is lost; the request is accepted later."""
        late = "one too many"
        page.send("the running one", MANY).wait_running("the running one")
        page.send("the waiting one", MANY).row("the waiting one").wait_for()
        page.send(late, MANY)
        until("it is refused", lambda: "Not sent" in page.alert(), 10)
        text = page.alert()
        assert re.search(r"Try again in \d+ s", text), text
        assert page.row(late).count() == 0 and page.input_value("#prompt") == late
        page.select(number="4")
        self.clear(page)
        page.select(number="1").submit().row(late).wait_for()
        assert page.alert() == ""
        return text


class Keyed(World):
    flags = ("--max-steps", "1000")
    key = KEY

    @case(statuses=(401,), live=False)
    def key_and_cookie(self, page):
        """The page asks for a key and exchanges it for an HttpOnly cookie, with which images and videos load."""
        dialog = page.locator("#key-dialog")
        dialog.wait_for()
        self.axe(page, "the key's dialog")
        page.click("#key-close")
        until("it says so", lambda: page.inner_text("#link-text") == "No key", 5)
        page.click("#sign-in")
        dialog.wait_for()
        page.enter(key="wrong").keys("Enter")
        until("a wrong one is refused", lambda: "invalid API key" in page.inner_text("#e-key"), 5)
        page.enter(key=KEY).click("#key-send")
        page.wait_live().wait_for_selector(".card")
        assert not dialog.is_visible()
        until("thumbnails load", lambda: page.evaluate("document.querySelector('.card img')?.naturalWidth > 0"), 10)
        page.locator(".go").first.click()
        page.wait_playing()
        cookie, stored, box = page.evaluate(KEPT)
        assert cookie == "" and KEY not in stored and box == "", (cookie, stored, box)
        cookies = page.context.cookies()
        assert len(cookies) == 1 and cookies[0]["httpOnly"] and cookies[0]["sameSite"] == "Strict", cookies
        assert KEY not in json.dumps(cookies)
        page.send("with a key", MANY).wait_running("with a key").reload_live()
        # When the cookie is gone, the dialog opens and the draft is kept.
        page.context.clear_cookies()
        page.submit(prompt="kept over the dialog")
        dialog.wait_for()
        page.enter(key=KEY).keys("Enter").row("kept over the dialog").wait_for()
        return f"cookie {cookies[0]['name']}, HttpOnly, SameSite=Strict"


class Stored(World):
    flags = ("--queue", "2000", "--queue-per-key", "2000", "--warm", "none")

    def prepare(self):
        """Copies a finished video `MANY_JOBS` times as finished and as queued jobs; makes it if needed."""
        jobs = self.server.state / "jobs"
        if not any(jobs.glob("*/video.mp4")):
            self.server.start("--warm", "none", ready=False)
            video = self.server.ask("POST", "v1/videos", {"prompt": "to be copied", "num_inference_steps": 2})[1]["id"]
            until("it is made", lambda: self.is_completed(video), 120)
            self.server.stop()
        wholes = [file.parent for file in sorted(jobs.glob("*/video.mp4"))]
        whole = next(job for job in wholes if "hacked" not in (job / "request.json").read_text())
        request, record = (json.loads((whole / name).read_text()) for name in ("request.json", "job.json"))
        for job in jobs.iterdir():
            if job != whole:
                shutil.rmtree(job)
        start = int(time.time() * 1000) - 2 * MANY_JOBS
        for n in range(2 * MANY_JOBS):
            value = ((start + n) << 80) | n
            folder = jobs / ("video_" + "".join(ALPHABET[value >> (5 * place) & 31] for place in range(25, -1, -1)))
            folder.mkdir(mode=0o700)
            request |= {"id": folder.name, "idempotency_key": None}
            request["config"]["request"]["prompt"] = f"copy {n}: {base64.b32encode(os.urandom(60)).decode()}"
            (folder / "request.json").write_text(json.dumps(request))
            if n < MANY_JOBS:
                (folder / "job.json").write_text(json.dumps(record))
                for name in FILES:
                    if (whole / name).exists():
                        os.link(whole / name, folder / name)

    def a_thousand_jobs(self, page):
        """1,000 finished and 1,000 queued videos are paged and scrolled in less than 50 MB of heap, with at most 24 cards."""
        heaps, pages, cards = [page.heap()], 0, 0
        started = time.monotonic()
        while True:
            page.mouse.move(700, 600)
            for _ in range(4):
                page.mouse.wheel(0, 900)
                page.wait_for_timeout(15)
            cards = max(cards, page.locator(".card").count())
            assert page.locator("#rows > li").count() <= 41
            pages += 1
            if pages % 10 == 0:
                heaps.append(page.heap())
            if page.is_disabled("#older"):
                break
            number = page.inner_text("#page")
            page.click("#older")
            page.wait_for_function("(before) => document.querySelector('#page').textContent !== before", arg=number)
            assert pages < 60
        taken = time.monotonic() - started
        heaps.append(page.heap())
        waiting = page.inner_text("#count")
        assert cards == 24 and pages >= MANY_JOBS // 24, (cards, pages)
        assert "of at most" in waiting and int(re.search(r"(\d+) waiting", waiting)[1]) > MANY_JOBS - 100, waiting
        assert max(heaps) < HEAP, heaps
        self.axe(page, "the last page")
        first, last, most = (f"{heap / 1e6:.1f}" for heap in (heaps[0], heaps[-1], max(heaps)))
        return f"{pages} pages in {taken:.0f} s, heap {first} MB at first, {most} at most, {last} at last; {waiting}"

"""Keys, full queues, and many jobs."""

import base64
import json
import os
import pathlib
import re
import shutil
import time

from harness import MANY, case, row, running, send, write
from server import until

HEAP = 50_000_000
MANY_JOBS = 1000
KEY = "a-key-of-the-page's-test"


@case("full", statuses=(429,))
def queue_full(world):
    """A full queue is reported with a retry time; no row or draft is lost; the request is accepted later."""
    page = world.open()
    send(page, "the running one", MANY)
    running(page, "the running one")
    send(page, "the waiting one", MANY)
    row(page, "the waiting one").wait_for()
    send(page, "one too many", MANY)
    until("it is refused", lambda: "Not sent" in page.inner_text("#alert"), 10)
    text = page.inner_text("#alert")
    assert re.search(r"Try again in \d+ s", text), text
    assert row(page, "one too many").count() == 0 and page.input_value("#prompt") == "one too many"
    page.select_option("#number", "4")
    world.server.clear()
    page.locator(".empty", has_text="Nothing is waiting").wait_for()
    page.select_option("#number", "1")
    page.click("#send")
    row(page, "one too many").wait_for()
    assert page.inner_text("#alert") == ""
    world.server.clear()
    return text


@case("keyed", statuses=(401,))
def key_and_cookie(world):
    """The page asks for a key and exchanges it for an HttpOnly cookie, with which images and videos load."""
    page = world.open(live=False)
    dialog = page.locator("#key-dialog")
    dialog.wait_for()
    world.axe(page, "the key's dialog")
    page.click("#key-close")
    until("it says so", lambda: page.inner_text("#link-text") == "No key", 5)
    page.click("#sign-in")
    dialog.wait_for()
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    until("a wrong one is refused", lambda: "invalid API key" in page.inner_text("#e-key"), 5)
    page.fill("#key", KEY)
    page.click("#key-send")
    page.wait_for_selector("#link[data-state=live]")
    page.wait_for_selector(".card")
    assert not dialog.is_visible()
    until("thumbnails load", lambda: page.evaluate("document.querySelector('.card img')?.naturalWidth > 0"), 10)
    page.locator(".go").first.click()
    until("a video plays", lambda: page.evaluate("document.querySelector('video').currentTime") > 0, 20)
    held = page.evaluate("[document.cookie, JSON.stringify(localStorage), document.querySelector('#key').value]")
    cookies = page.context.cookies()
    assert held[0] == "" and KEY not in held[1] and held[2] == "", held
    assert len(cookies) == 1 and cookies[0]["httpOnly"] and cookies[0]["sameSite"] == "Strict", cookies
    assert KEY not in json.dumps(cookies)
    write(page, "with a key", MANY)
    page.click("#send")
    running(page, "with a key")
    page.reload()
    page.wait_for_selector("#link[data-state=live]")
    # When the cookie is gone, the dialog opens and the draft is kept.
    page.context.clear_cookies()
    page.fill("#prompt", "kept over the dialog")
    page.click("#send")
    dialog.wait_for()
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    row(page, "kept over the dialog").wait_for()
    world.server.clear()
    return f"cookie {cookies[0]['name']}, HttpOnly, SameSite=Strict"


def a_video(server):
    """Makes sure that the server's state has a finished video."""
    if not any(pathlib.Path(server.state).glob("jobs/*/video.mp4")):
        server.start("--warm", "none", ready=False)
        video = server.ask("POST", "v1/videos", {"prompt": "to be copied", "num_inference_steps": 2})[1]["id"]
        until("it is made", lambda: server.video(video)["status"] == "completed", 120)
        server.stop()


def clone(state, count):
    """Copies a finished job `count` times as finished and as queued jobs."""
    jobs = pathlib.Path(state) / "jobs"
    whole = next(job for job in sorted(jobs.iterdir()) if (job / "video.mp4").exists() and "hacked" not in (job / "request.json").read_text())
    request, record = (json.loads((whole / name).read_text()) for name in ("request.json", "job.json"))
    for job in jobs.iterdir():
        if job != whole:
            shutil.rmtree(job)
    alphabet = "0123456789abcdefghjkmnpqrstvwxyz"
    now = int(time.time() * 1000)
    for n in range(2 * count):
        value = ((now - 2 * count + n) << 80) | n
        digits = "".join(alphabet[value >> (5 * place) & 31] for place in range(25, -1, -1))
        folder = jobs / f"video_{digits}"
        folder.mkdir(mode=0o700)
        own = {**request, "id": folder.name, "idempotency_key": None}
        own["config"] = {**request["config"], "request": {**request["config"]["request"], "prompt": f"copy {n}: {base64.b32encode(os.urandom(60)).decode()}"}}
        (folder / "request.json").write_text(json.dumps(own))
        if n < count:
            (folder / "job.json").write_text(json.dumps(record))
            for name in ("video.mp4", "video.json", "thumb.jpg", "sprite.jpg", "audio.wav"):
                if (whole / name).exists():
                    os.link(whole / name, folder / name)


@case("stored")
def a_thousand_jobs(world):
    """1,000 finished and 1,000 queued videos are paged and scrolled in less than 50 MB of heap, with at most 24 cards."""
    page = world.open()
    first = page.heap()
    peak, pages, cards = first, 0, 0
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
            peak = max(peak, page.heap())
        if page.is_disabled("#older"):
            break
        number = page.inner_text("#page")
        page.click("#older")
        page.wait_for_function("(before) => document.querySelector('#page').textContent !== before", arg=number)
        assert pages < 60
    taken = time.monotonic() - started
    last = page.heap()
    peak = max(peak, last)
    waiting = page.inner_text("#count")
    assert cards == 24 and pages >= MANY_JOBS // 24, (cards, pages)
    assert "of at most" in waiting and int(re.search(r"(\d+) waiting", waiting)[1]) > MANY_JOBS - 100, waiting
    assert peak < HEAP, peak
    world.axe(page, "the last page")
    return f"{pages} pages in {taken:.0f} s, heap {first / 1e6:.1f} MB at first, {peak / 1e6:.1f} at most, {last / 1e6:.1f} at last; {waiting}"

"""Jobs on the page: sending, progress, cancelling, reloads and restarts."""

import json
import signal
import time

from harness import FEW, MANY, bring, case, made, press, row, running, send, state, tile, write
from server import until

CLIP = "a red circle bounces on blue, low beeps"


@case("open")
def send_and_play(world):
    """A sent prompt gets a row at once and a playable video later; the draft survives a reload."""
    page = world.open()
    assert page.evaluate("document.activeElement.id") == "prompt", "the prompt has no focus"
    write(page, CLIP)
    page.keyboard.press("Control+Enter")
    row(page, CLIP).wait_for(timeout=1000)
    tile(page, CLIP).wait_for(timeout=90_000)
    tile(page, CLIP).locator(".go").click()
    until("the video plays", lambda: page.evaluate("document.querySelector('video').currentTime") > 0.2, 20)
    size = page.evaluate("(() => { const v = document.querySelector('video'); return [v.videoWidth, v.videoHeight, v.preload, v.controls, v.loop]; })()")
    assert size == [128, 96, "none", True, True], size
    page.reload()
    page.wait_for_selector("#link[data-state=live]")
    assert page.input_value("#prompt") == CLIP and page.input_value("#steps") == str(FEW)
    video = world.server.newest()
    assert video["prompt"] == CLIP and video["steps"] == FEW and video["size"] == "128x96", video
    return f"row < 1 s, {video['width']}x{video['height']} plays"


@case("open")
def progress_is_live(world):
    """Bar, step and title follow the server without layout shifts; the live region is updated at most once a second."""
    page = world.open()
    page.evaluate("""() => { window.spoken = [];
      new MutationObserver(() => { if (say.textContent) spoken.push([performance.now(), say.textContent]); }).observe(say, { childList: true, characterData: true, subtree: true }); }""")
    page.wait_for_timeout(300)
    before, _ = page.shift()
    send(page, "long one", MANY)
    for n in range(3):
        send(page, f"behind {n}", MANY)
    running(page, "long one")
    seen, texts, titles = [], set(), set()
    end = time.monotonic() + 6
    while time.monotonic() < end:
        seen.append(int(row(page, "long one").locator("progress").get_attribute("value")))
        texts.add(state(page, "long one"))
        titles.add(page.title())
        page.wait_for_timeout(200)
    after, nodes = page.shift()
    assert seen == sorted(seen) and seen[-1] > seen[0], seen
    assert any("step " in text and f"of {MANY}" in text for text in texts), texts
    assert any(title.endswith(" % · ltx2") for title in titles), titles
    assert state(page, "behind 0") == "Waiting, next" and state(page, "behind 2") == "Waiting, position 3"
    assert after - before < 0.001, f"the page shifted by {after - before}: {nodes}"
    world.axe(page, "a running queue")
    world.server.clear()
    page.locator(".empty", has_text="Nothing is waiting").wait_for()
    spoken = page.evaluate("spoken")
    gaps = [b[0] - a[0] for a, b in zip(spoken, spoken[1:])]
    assert len(spoken) > 1 and min(gaps) > 950, spoken
    return f"{seen[0]} to {seen[-1]} %, shift {after - before:.4f}, {len(spoken)} texts, {min(gaps) / 1000:.2f} s apart or more"


@case("open")
def cancel_and_undo(world):
    """A cancellation can be undone for five seconds; then the video stops."""
    page = world.open()
    send(page, "to be kept", MANY)
    send(page, "to be cancelled", MANY)
    running(page, "to be kept")
    ids = {v["prompt"]: v["id"] for v in world.server.ask("GET", "v1/videos?limit=2")[1]["data"]}
    status = lambda prompt: world.server.video(ids[prompt])["status"]  # noqa: E731
    press(row(page, "to be kept"), "Cancel")
    press(row(page, "to be cancelled"), "Cancel")
    started = time.monotonic()
    until("it is marked", lambda: state(page, "to be kept") == "Will be cancelled", 2)
    press(row(page, "to be kept"), "Undo")
    until("the waiting one is cancelled", lambda: status("to be cancelled") == "failed", 8)
    waited = time.monotonic() - started
    page.wait_for_timeout(500)
    assert "step" in state(page, "to be kept") and status("to be kept") == "in_progress", state(page, "to be kept")
    press(row(page, "to be kept"), "Cancel")
    until("the running one is cancelled", lambda: status("to be kept") == "failed", 30)
    assert world.server.video(ids["to be kept"])["error"]["code"] == "cancelled"
    page.locator(".empty", has_text="Nothing is waiting").wait_for()
    page.click("#show-failed")
    tile(page, "to be kept").first.wait_for()
    assert 4.8 < waited < 8, waited
    world.axe(page, "the failed ones")
    return f"sent after {waited:.1f} s; undone: it ran on"


@case("open")
def leaving_sends_the_cancel(world):
    """A pending cancellation is sent when the page is left."""
    page = world.open()
    send(page, "left behind", MANY)
    running(page, "left behind")
    press(row(page, "left behind"), "Cancel")
    page.goto("about:blank")
    video = world.server.newest()["id"]
    until("it is cancelled", lambda: world.server.video(video)["status"] == "failed", 8)
    return "cancelled"


@case("open")
def reload_in_the_middle(world):
    """Rows and progress survive a reload."""
    page = world.open()
    send(page, "reloaded", MANY)
    send(page, "behind it", MANY)
    running(page, "reloaded")
    before = int(row(page, "reloaded").locator("progress").get_attribute("value"))
    page.reload()
    running(page, "reloaded")
    after = int(row(page, "reloaded").locator("progress").get_attribute("value"))
    assert after >= before and state(page, "behind it") == "Waiting, next"
    world.server.clear()
    return f"{before} % before, {after} % after"


def restarted(world, how):
    page = world.open()
    name = f"over a restart by {how.name}"
    send(page, name, 30)
    running(page, name)
    video = world.server.newest()["id"]
    world.server.stop(how)
    page.wait_for_selector("#link[data-state=lost]")
    assert page.inner_text("#link-text").startswith("Reconnecting in"), page.inner_text("#link-text")
    world.axe(page, "without a server")
    # A request that is sent now is kept in a row that can be retried with the same key.
    send(page, "sent into the gap", FEW)
    until("it stays", lambda: state(page, "sent into the gap").startswith("Not sent"), 10)
    world.restart()
    # The page may have reconnected already.
    page.evaluate("document.querySelector('#again').click()")
    page.wait_for_selector("#link[data-state=live]", timeout=40_000)
    press(row(page, "sent into the gap"), "Retry")
    tile(page, name).wait_for(timeout=120_000)
    tile(page, "sent into the gap").first.wait_for(timeout=90_000)
    found = world.server.video(video)
    assert found["status"] == "completed", found
    return f"{how.name}: completed at attempt {found['attempts']}, reconnected, the one sent into the gap is there"


@case("open", statuses=(0, 503))
def server_restart(world):
    """After a drained restart the page reconnects, and nothing is lost."""
    return restarted(world, signal.SIGTERM)


@case("open", statuses=(0, 503))
def server_crash(world):
    """The same with a killed server."""
    return restarted(world, signal.SIGKILL)


@case("open")
def reuse_makes_the_same_video(world):
    """A video's settings, by button or by its sidecar, reproduce it bit for bit."""
    page = world.open()
    first = made(page, world.server, CLIP)
    sidecar = world.server.content(first, "sidecar")
    page.click("#reset")
    press(tile(page, CLIP).first, "Reuse")
    until("the form is filled", lambda: page.input_value("#prompt") == CLIP, 10)
    by_button = page.evaluate("JSON.stringify(Object.fromEntries([...document.querySelectorAll('#form input, #form select, #form textarea')].map((i) => [i.id, i.value])))")
    page.click("#reset")
    assert page.input_value("#prompt") == ""
    bring(page, "drop", "a.json", "application/json", sidecar)
    until("the form is filled", lambda: page.input_value("#prompt") == CLIP, 10)
    by_drop = page.evaluate("JSON.stringify(Object.fromEntries([...document.querySelectorAll('#form input, #form select, #form textarea')].map((i) => [i.id, i.value])))")
    assert by_button == by_drop, (by_button, by_drop)
    last = world.server.newest()["id"]
    page.click("#send")
    until("a second one", lambda: world.server.newest()["id"] != last, 20)
    second = world.server.newest()["id"]
    until("it is made", lambda: world.server.video(second)["status"] == "completed", 90)
    assert world.server.content(first, "audio") == world.server.content(second, "audio")
    sheets = [world.server.content(v, "spritesheet") for v in (first, second)]
    assert sheets[0] == sheets[1]
    bring(page, "drop", "b.json", "application/json", b"[1, 2]")
    until("it is refused", lambda: "not a sidecar" in page.inner_text("#alert"), 5)
    return "the same frames and samples: seed " + str(json.loads(sidecar)["config"]["request"]["seed"])


@case("open")
def delete_with_confirmation(world):
    """Deleting asks first, then removes record and files."""
    page = world.open()
    video = made(page, world.server, "soon deleted")
    page.reload()
    own = tile(page, "soon deleted").first
    press(own, "Delete")
    press(own, "Keep")
    assert world.server.video(video)["status"] == "completed"
    press(own, "Delete")
    assert page.evaluate("document.activeElement.textContent") == "Delete"
    page.keyboard.press("Enter")
    until("it is gone", lambda: world.server.ask("GET", f"v1/videos/{video}")[0] in (404, 410), 10)
    until("its card is gone", lambda: tile(page, "soon deleted").count() == 0, 10)
    return "kept, then deleted"

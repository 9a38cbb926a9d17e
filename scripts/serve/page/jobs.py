"""Jobs on the page: sending, progress, cancelling, reloads and restarts."""

import json
import signal
import time

from harness import CLIP, FEW, MANY, World, case, press
from server import equal, until

PLAYER = "['videoWidth', 'videoHeight', 'preload', 'controls', 'loop'].map((name) => document.querySelector('video')[name])"
SPOKEN = """() => {
  window.spoken = [];
  const note = () => { if (say.textContent) spoken.push([performance.now(), say.textContent]); };
  new MutationObserver(note).observe(say, { childList: true, characterData: true, subtree: true });
}"""
# Size of a canvas and number of its distinct colours.
PICTURE = """(film) => {
  const { data } = film.getContext('2d').getImageData(0, 0, film.width, film.height);
  return [film.width, film.height, new Set(new Uint32Array(data.buffer)).size];
}"""
BOXES = "[...document.querySelectorAll('#form input, #form select, #form textarea')]"
VALUES = f"JSON.stringify(Object.fromEntries({BOXES}.map((i) => [i.id, i.value])))"


class Jobs(World):
    def send_and_play(self, page):
        """A sent prompt gets a row at once and a playable video later; the draft survives a reload."""
        assert page.focused() == "prompt", "the prompt has no focus"
        page.write(CLIP).keys("Control+Enter")
        page.row(CLIP).wait_for(timeout=1000)
        page.tile(CLIP).wait_for(timeout=90_000)
        page.tile(CLIP).locator(".go").click()
        page.wait_playing(after=0.2)
        equal(page.evaluate(PLAYER), [128, 96, "none", True, True], "size, preload, controls and loop")
        page.reload_live()
        assert page.input_value("#prompt") == CLIP and page.input_value("#steps") == str(FEW)
        video = self.server.newest()
        equal((video["prompt"], video["steps"], video["size"]), (CLIP, FEW, "128x96"), "the video")

    def progress_is_live(self, page):
        """Bar, step and title follow the server without layout shifts; the live region is updated at most once a second."""
        page.evaluate(SPOKEN)
        page.wait_for_timeout(300)
        before, _ = page.shift()
        for prompt in ("long one", "behind 0", "behind 1", "behind 2"):
            page.send(prompt, MANY)
        page.wait_running("long one")
        seen, texts, titles = [], set(), set()
        end = time.monotonic() + 6
        while time.monotonic() < end:
            seen.append(page.progress("long one"))
            texts.add(page.state("long one"))
            titles.add(page.title())
            page.wait_for_timeout(200)
        after, nodes = page.shift()
        assert seen == sorted(seen) and seen[-1] > seen[0], seen
        assert any("step " in text and f"of {MANY}" in text for text in texts), texts
        assert any(title.endswith(" % · ltx2") for title in titles), titles
        assert page.state("behind 0") == "Waiting, next" and page.state("behind 2") == "Waiting, position 3"
        assert after - before < 0.001, f"the page shifted by {after - before}: {nodes}"
        self.axe(page, "a running queue")
        self.clear(page)
        spoken = page.evaluate("spoken")
        gaps = [b[0] - a[0] for a, b in zip(spoken, spoken[1:])]
        assert len(spoken) > 1 and min(gaps) > 950, spoken
        shown = f"{seen[0]} to {seen[-1]} %, shift {after - before:.4f}"
        return f"{shown}, {len(spoken)} texts, {min(gaps) / 1000:.2f} s apart or more"

    def preview_plays_while_running(self, page):
        """The row of a running video plays its latest preview."""
        prompt = "a large green square grows on black, a low hum"
        page.send(prompt, 60).wait_running(prompt)
        film = page.row(prompt).locator("canvas")
        step = lambda: int(film.get_attribute("data-step") or 0)  # noqa: E731
        first = until("a preview", step, 90)
        width, height, colours = film.evaluate(PICTURE)
        equal([width, height], [16, 12], "an eighth of the size")
        assert colours > 1, "the preview has only one colour"
        until("a later preview", lambda: step() > first, 90)
        self.axe(page, "a preview")
        self.clear(page)
        return f"from step {first}, {colours} colours"

    def cancel_and_undo(self, page):
        """A cancellation can be undone for five seconds; then the video stops."""
        kept, cancelled = "to be kept", "to be cancelled"
        page.send(kept, MANY).send(cancelled, MANY).wait_running(kept)
        ids = {v["prompt"]: v["id"] for v in self.server.videos("limit=2")}
        status = lambda prompt: self.server.video(ids[prompt])["status"]  # noqa: E731
        press(page.row(kept), "Cancel")
        press(page.row(cancelled), "Cancel")
        started = time.monotonic()
        until("it is marked", lambda: page.state(kept) == "Will be cancelled", 2)
        press(page.row(kept), "Undo")
        until("the waiting one is cancelled", lambda: status(cancelled) == "failed", 8)
        waited = time.monotonic() - started
        page.wait_for_timeout(500)
        assert "step" in page.state(kept) and status(kept) == "in_progress", page.state(kept)
        press(page.row(kept), "Cancel")
        until("the running one is cancelled", lambda: status(kept) == "failed", 30)
        assert self.server.video(ids[kept])["error"]["code"] == "cancelled"
        page.locator(".empty", has_text="Nothing is waiting").wait_for()
        page.click("#show-failed")
        page.wait_tile(kept, 20)
        assert 4.8 < waited < 8, waited
        self.axe(page, "the failed ones")
        return f"sent after {waited:.1f} s; undone: it ran on"

    def leaving_sends_the_cancel(self, page):
        """A pending cancellation is sent when the page is left."""
        page.send("left behind", MANY).wait_running("left behind")
        press(page.row("left behind"), "Cancel")
        page.goto("about:blank")
        video = self.server.newest()["id"]
        until("it is cancelled", lambda: self.server.video(video)["status"] == "failed", 8)

    def reload_in_the_middle(self, page):
        """Rows and progress survive a reload."""
        page.send("reloaded", MANY).send("behind it", MANY).wait_running("reloaded")
        before = page.progress("reloaded")
        page.reload()
        page.wait_running("reloaded")
        after = page.progress("reloaded")
        assert after >= before and page.state("behind it") == "Waiting, next"
        return f"{before} % before, {after} % after"

    @case(statuses=(0, 503))
    def server_restart(self, page):
        """After a drained restart the page reconnects, and nothing is lost."""
        return self._restarted(page, signal.SIGTERM)

    @case(statuses=(0, 503))
    def server_crash(self, page):
        """The same with a killed server."""
        return self._restarted(page, signal.SIGKILL)

    def _restarted(self, page, how):
        name, missed = f"over a restart by {how.name}", "sent into the gap"
        page.send(name, 30).wait_running(name)
        video = self.server.newest()["id"]
        self.server.stop(how)
        page.wait_for_selector("#link[data-state=lost]")
        assert page.inner_text("#link-text").startswith("Reconnecting in"), page.inner_text("#link-text")
        self.axe(page, "without a server")
        # A request that is sent now is kept in a row that can be retried with the same key.
        page.send(missed)
        until("it stays", lambda: page.state(missed).startswith("Not sent"), 10)
        self.start()
        # The page may have reconnected already.
        page.evaluate("document.querySelector('#again').click()")
        page.wait_live(40)
        press(page.row(missed), "Retry")
        page.tile(name).wait_for(timeout=120_000)
        page.wait_tile(missed)
        found = self.server.video(video)
        assert found["status"] == "completed", found
        return f"{how.name}: completed at attempt {found['attempts']}, reconnected, the one {missed} is there"

    def reuse_makes_the_same_video(self, page):
        """A video's settings, by button or by its sidecar, reproduce it bit for bit."""
        first = self.made(page, CLIP)
        sidecar, by_way = self.server.content(first, "sidecar"), []
        for reuse in (
            lambda: press(page.tile(CLIP).first, "Reuse"),
            lambda: page.bring("drop", "a.json", "application/json", sidecar),
        ):
            page.click("#reset")
            assert page.input_value("#prompt") == ""
            reuse()
            until("the form is filled", lambda: page.input_value("#prompt") == CLIP, 10)
            by_way.append(page.evaluate(VALUES))
        assert by_way[0] == by_way[1], by_way
        last = self.server.newest()["id"]
        page.submit()
        until("a second one", lambda: self.server.newest()["id"] != last, 20)
        second = self.server.newest()["id"]
        until("it is made", lambda: self.is_completed(second), 90)
        for variant in ("audio", "spritesheet"):
            assert self.server.content(first, variant) == self.server.content(second, variant), variant
        page.bring("drop", "b.json", "application/json", b"[1, 2]")
        until("it is refused", lambda: "not a sidecar" in page.alert(), 5)
        return "the same frames and samples: seed " + str(json.loads(sidecar)["config"]["request"]["seed"])

    def delete_with_confirmation(self, page):
        """Deleting asks first, then removes record and files."""
        video = self.made(page, "soon deleted")
        page.reload()
        own = page.tile("soon deleted")
        press(own.first, "Delete")
        press(own.first, "Keep")
        assert self.is_completed(video)
        press(own.first, "Delete")
        assert page.evaluate("document.activeElement.textContent") == "Delete"
        page.keys("Enter")
        until("it is gone", lambda: self.server.ask("GET", f"v1/videos/{video}")[0] in (404, 410), 10)
        until("its card is gone", lambda: own.count() == 0, 10)

"""The server's page and the groups of its cases.

A group derives from `World`; its public methods are cases. A case is given the opened page; it may return what it found."""

import json
import re

from browser import Page, Pages
from server import equal, until

# Steps of a quick video, and of a longer one that is still running when a test looks at it.
FEW, MANY = 2, 250
LENGTHS = {FEW: "25", MANY: "121"}
CLIP = "a red circle bounces on blue, low beeps"
DROP = """([kind, name, type, bytes]) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([new Uint8Array(bytes)], name, { type }));
  const event = kind === 'paste' ? new ClipboardEvent(kind, { clipboardData: transfer, bubbles: true, cancelable: true })
    : new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true });
  document.body.dispatchEvent(event);
}"""


def case(statuses=(), **options):
    """Sets the error statuses that a case expects, and options of its page."""

    return lambda function: vars(function).update(statuses=statuses, options=options) or function


def press(where, text):
    where.get_by_role("button", name=re.compile(f"^{text}\\b")).click()


class ServerPage(Page):
    """The server's page; actions return it, so that they can be chained."""

    def wait_live(self, seconds=20):
        self.wait_for_selector("#link[data-state=live]", timeout=seconds * 1000)
        return self

    def reload_live(self):
        self.reload()
        return self.wait_live()

    def enter(self, **values):
        for box, value in values.items():
            self.fill(f"#{box}", value)
        return self

    def select(self, **values):
        for box, value in values.items():
            self.select_option(f"#{box}", value)
        return self

    def write(self, prompt, steps=FEW):
        self.enter(prompt=prompt, steps=str(steps))
        return self.select(length=LENGTHS[steps]) if steps in LENGTHS else self

    def send(self, prompt, steps=FEW):
        return self.write(prompt, steps).submit()

    def submit(self, **values):
        self.enter(**values).click("#send")
        return self

    def bring(self, how, name, media_type, data):
        self.evaluate(DROP, [how, name, media_type, list(data)])

    def keys(self, *names):
        for name in names:
            self.keyboard.press(name)
        return self

    def focused(self):
        return self.evaluate("document.activeElement.id")

    def alert(self):
        return self.inner_text("#alert")

    def row(self, prompt):
        return self.locator(".row", has_text=prompt)

    def tile(self, prompt):
        return self.locator(".card", has_text=prompt)

    def wait_tile(self, prompt, seconds=90):
        self.tile(prompt).first.wait_for(timeout=seconds * 1000)
        return self.tile(prompt).first

    def state(self, prompt):
        return self.row(prompt).locator(".state").inner_text()

    def progress(self, prompt):
        return int(self.row(prompt).locator("progress").get_attribute("value") or 0)

    def wait_running(self, prompt):
        until("a step", lambda: self.row(prompt).count() and self.progress(prompt) > 0, 90)
        return self

    def wait_playing(self, after=0.0):
        until("the video plays", lambda: (self.evaluate("document.querySelector('video')?.currentTime") or 0) > after, 20)


class World(Pages):
    """A group of cases on a server with `flags`; groups with the same flags share it."""

    flags = ("--queue", "16", "--max-steps", "1000")
    key = None

    def __init__(self, browser, server):
        super().__init__(browser)
        self.server = server

    def prepare(self):
        """Prepares the stopped server's state."""

    def start(self):
        self.server.start(*self.flags, key=self.key)

    def open(self, live=True, **options):
        page = self.open_url(self.server.url, kind=ServerPage, **options)
        if live:
            page.wait_live()
            # The form and the first page of videos are loaded.
            page.wait_for_selector("#cards > li")
        return page

    def call(self, function):
        return function(self, self.open(**getattr(function, "options", {})))

    def clear(self, page):
        self.server.clear()
        page.locator(".empty", has_text="Nothing is waiting").wait_for()

    def is_completed(self, video):
        return self.server.video(video)["status"] == "completed"

    def made(self, page, prompt):
        """Returns the id of a finished video with this prompt; makes it if needed."""
        found = self.server.videos("status=completed&limit=100", prompt)
        if not found:
            page.send(prompt)
            page.wait_tile(prompt)
            found = [self.server.newest()]
        return found[0]["id"]

    def finished(self, page, prompt):
        """Returns the finished video and its request; checks that its size did not change."""
        until("it is shown", lambda: page.row(prompt).count() or page.tile(prompt).count() or page.alert(), 10)
        equal(page.alert(), "", "the alert")
        accepted = until("it is accepted", lambda: self.server.videos("limit=20", prompt), 10)[0]
        until("it is made", lambda: self.server.video(accepted["id"])["status"] in ("completed", "failed"), 120)
        video = self.server.video(accepted["id"])
        expected = {"status": "completed"} | {name: accepted[name] for name in ("width", "height", "num_frames", "fps")}
        equal({name: video[name] for name in expected}, expected, "the video")
        return video, json.loads(self.server.content(video["id"], "sidecar"))["config"]["request"]

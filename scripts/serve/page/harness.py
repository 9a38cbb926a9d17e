"""What the cases share: their list, a page on a server, and what holds at the end of each."""

import re
import struct
import zlib
from dataclasses import dataclass

from server import until

CASES = []
# Of steps of the toy model: a video that is soon there, and one that is still under way when a test has looked; that is longer, too.
FEW, MANY = 2, 250
LENGTHS = {FEW: "25", MANY: "121"}


@dataclass
class Case:
    name: str
    group: str
    statuses: tuple
    run: object


def case(group, statuses=()):
    """Registers a test of the page on the group's server. `statuses` are those of answers that it brings about."""

    def register(function):
        CASES.append(Case(function.__name__, group, statuses, function))
        return function

    return register


class World:
    """A browser on a server, and the pages that a case opened."""

    def __init__(self, browser, server):
        self.browser, self.server, self.pages = browser, server, []

    def open(self, live=True, **options):
        page = self.browser.open(self.server.url, **options)
        self.pages.append(page)
        if live:
            page.wait_for_selector("#link[data-state=live]")
            # The form is built, the first page of videos is there.
            page.wait_for_selector("#cards > li")
        return page

    def end(self, statuses):
        """Closes a case's pages; what was wrong with any."""
        problems = [problem for page in self.pages for problem in page.problems(statuses)]
        for page in self.pages:
            self.browser.close(page)
        self.pages.clear()
        return problems

    def axe(self, page, where):
        found = page.axe(self.browser.axe)
        assert not found, f"axe, {where}: {found}"


def write(page, prompt, steps=FEW):
    page.fill("#prompt", prompt)
    page.fill("#steps", str(steps))
    if steps in LENGTHS:
        page.select_option("#length", LENGTHS[steps])


def send(page, prompt, steps=FEW):
    write(page, prompt, steps)
    page.click("#send")


def row(page, prompt):
    return page.locator(".row", has_text=prompt)


def tile(page, prompt):
    return page.locator(".card", has_text=prompt)


def press(where, text):
    """Clicks a button by what it says; its name goes on with its video's prompt."""
    where.get_by_role("button", name=re.compile(f"^{text}\\b")).click()


def state(page, prompt):
    return row(page, prompt).locator(".state").inner_text()


def running(page, prompt):
    """Waits until a row says a step behind its first."""
    until("a step", lambda: row(page, prompt).count() and int(row(page, prompt).locator("progress").get_attribute("value") or 0) > 0, 90)


def made(page, server, prompt):
    """A video that is finished and shown; its id."""
    found = [v for v in server.ask("GET", "v1/videos?status=completed&limit=100")[1]["data"] if v["prompt"] == prompt]
    if not found:
        send(page, prompt)
        tile(page, prompt).first.wait_for(timeout=90_000)
        found = [server.newest()]
    return found[0]["id"]


def png(width=64, height=48, color=(200, 60, 40)):
    """An image of one color."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes(color) * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


DROP = """([kind, name, type, bytes]) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([new Uint8Array(bytes)], name, { type }));
  const event = kind === 'paste' ? new ClipboardEvent(kind, { clipboardData: transfer, bubbles: true, cancelable: true })
    : new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true });
  document.body.dispatchEvent(event);
}"""


def bring(page, how, name, media_type, data):
    """Drops or pastes a file onto the page."""
    page.evaluate(DROP, [how, name, media_type, list(data)])

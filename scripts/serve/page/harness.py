"""The registry of test cases, and helpers for the server's page."""

import re
from dataclasses import dataclass

from browser import Pages
from server import until

CASES = []
# Steps of a quick video, and of a longer one that is still running when a test looks at it.
FEW, MANY = 2, 250
LENGTHS = {FEW: "25", MANY: "121"}


@dataclass
class Case:
    name: str
    group: str
    statuses: tuple
    run: object


def case(group, statuses=()):
    """Registers a test for a server group. `statuses` are expected error statuses."""

    def register(function):
        CASES.append(Case(function.__name__, group, statuses, function))
        return function

    return register


class World(Pages):
    def __init__(self, browser, server):
        super().__init__(browser)
        self.server = server

    def open(self, live=True, **options):
        page = self.open_url(self.server.url, **options)
        if live:
            page.wait_for_selector("#link[data-state=live]")
            # The form and the first page of videos are loaded.
            page.wait_for_selector("#cards > li")
        return page

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
    """Clicks the button whose name starts with `text`."""
    where.get_by_role("button", name=re.compile(f"^{text}\\b")).click()


def state(page, prompt):
    return row(page, prompt).locator(".state").inner_text()


def running(page, prompt):
    """Waits until a row shows progress."""
    until("a step", lambda: row(page, prompt).count() and int(row(page, prompt).locator("progress").get_attribute("value") or 0) > 0, 90)


def made(page, server, prompt):
    """Returns the id of a finished video with this prompt; makes it if needed."""
    found = [v for v in server.ask("GET", "v1/videos?status=completed&limit=100")[1]["data"] if v["prompt"] == prompt]
    if not found:
        send(page, prompt)
        tile(page, prompt).first.wait_for(timeout=90_000)
        found = [server.newest()]
    return found[0]["id"]


DROP = """([kind, name, type, bytes]) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([new Uint8Array(bytes)], name, { type }));
  const event = kind === 'paste' ? new ClipboardEvent(kind, { clipboardData: transfer, bubbles: true, cancelable: true })
    : new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true });
  document.body.dispatchEvent(event);
}"""


def bring(page, how, name, media_type, data):
    page.evaluate(DROP, [how, name, media_type, list(data)])

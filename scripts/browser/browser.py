"""The Chromium and the axe of scripts/browser/setup.sh, for tests of pages: a server's, or a file.

    with Browser("target/browser") as browser:
        page = browser.open("http://127.0.0.1:8000/", color_scheme="dark")
        page.click("#send")                      # what playwright's Page has
        page.problems()                          # errors of its console, requests to elsewhere

Its network ends at this machine. Rules of content security hold for the page as in any browser: what is asked of it here goes
by the debugger.
"""

import os
import pathlib
import urllib.parse

from playwright.sync_api import sync_playwright

# WCAG 2.2 AA, and what axe's authors hold for good practice.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
SHIFTS = """
window.shifts = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput)
    window.shifts.push({ value: entry.value, at: entry.startTime, nodes: entry.sources.map((s) => s.node && (s.node.id || s.node.className || s.node.nodeName)) });
}).observe({ type: 'layout-shift', buffered: true });
"""


class Page:
    """A page of playwright's that remembers what it said and where it asked."""

    def __init__(self, page, origin):
        self.page = page
        self.origin = origin
        self.said = []
        self.asked = []
        page.on("console", lambda message: self.said.append((message.type, message.text)))
        page.on("pageerror", lambda error: self.said.append(("error", f"{error.message} {error.stack or ''}".strip())))
        page.on("request", lambda request: self.asked.append(request.url))

    def __getattr__(self, name):
        return getattr(self.page, name)

    def foreign(self):
        """Requests to another origin than the page's; a file may ask for nothing at all."""
        own = [url for url in self.asked if not url.startswith(("data:", "blob:", "about:"))]
        return [url for url in own if origin_of(url) != self.origin]

    def problems(self, statuses=()):
        """Errors and warnings of its console and requests to elsewhere. Chromium reports each answer with a status of 400 and
        more as an error; those of `statuses`, which a test brings about, are none; 0 is a connection that is refused or cut."""
        shown = [f"{kind}: {text}" for kind, text in self.said if kind in ("error", "warning") and not meant(text, statuses)]
        return shown + [f"request to {url}" for url in self.foreign()]

    def axe(self, source):
        """What axe finds wrong, as `rule: element`."""
        self.page.evaluate(source)
        found = self.page.evaluate("(tags) => axe.run(document, { runOnly: tags, resultTypes: ['violations'] })", RULES)
        return [f"{v['id']}: {node['html'][:160]} {node['failureSummary'].splitlines()[-1].strip()}" for v in found["violations"] for node in v["nodes"]]

    def heap(self):
        """Bytes of JavaScript that are still in use once the rest is collected."""
        session = self.page.context.new_cdp_session(self.page)
        for _ in range(3):
            session.send("HeapProfiler.collectGarbage")
        used = session.send("Runtime.getHeapUsage")["usedSize"]
        session.detach()
        return int(used)

    def shift(self):
        """Sum of the layout shifts that no input explains, with their elements."""
        shifts = self.page.evaluate("window.shifts")
        return sum(s["value"] for s in shifts), [s["nodes"] for s in shifts]

    def wide(self):
        """Pixels by which the page is wider than its window."""
        return self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def shot(self, path, limit=150_000):
        """Writes an image of the window."""
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(path), animations="disabled", caret="hide")
        size = path.stat().st_size
        assert size <= limit, f"{path}: {size} bytes are more than {limit}"
        return size


def origin_of(url):
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def meant(text, statuses):
    """Whether a line of the console is about a status that the test brings about."""
    if not text.startswith("Failed to load resource:"):
        return False
    refused = 0 in statuses and "net::ERR_" in text
    return refused or any(f"status of {status}" in text for status in statuses)


class Browser:
    """The pinned Chromium in the folder that setup.sh made."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder).resolve()
        self.axe = (self.folder / "axe.min.js").read_text()

    def __enter__(self):
        self.driver = sync_playwright().start()
        own = {"FONTCONFIG_PATH": str(self.folder / "fontconfig"), "LD_LIBRARY_PATH": str(self.folder / "lib")}
        self.chromium = self.driver.chromium.launch(
            executable_path=str(self.folder / "chromium"),
            # Names are not looked up, so nothing but this machine is reached.
            args=["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"],
            env={**os.environ, **own},
        )
        self.version = self.chromium.version
        return self

    def __exit__(self, *_):
        self.chromium.close()
        self.driver.stop()

    def open(self, url, width=1280, height=860, **options):
        """A page in a profile of its own, without cookies and storage of others."""
        context = self.chromium.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(20_000)
        context.add_init_script(SHIFTS)
        page = Page(context.new_page(), origin_of(url))
        page.goto(url)
        return page

    def close(self, page):
        page.context.close()

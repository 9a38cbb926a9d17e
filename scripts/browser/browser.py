"""Opens pages in the Chromium that scripts/browser/setup.sh installed, with playwright."""

import os
import pathlib
import urllib.parse

from playwright.sync_api import sync_playwright

# WCAG 2.2 AA and axe's best practices.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
SHIFTS = """
window.shifts = [];
const nameOf = ({ node }) => node && (node.id || node.className || node.nodeName);
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput)
    window.shifts.push({ value: entry.value, nodes: entry.sources.map(nameOf) });
}).observe({ type: 'layout-shift', buffered: true });
"""
MOVING = """(() => {
  const moves = (s) => parseFloat(s.transitionDuration) > 0 || s.animationName !== 'none';
  const bar = getComputedStyle(document.querySelector('#say') || document.body, '::-webkit-progress-value');
  const moving = [...document.querySelectorAll('*')].filter((e) => moves(getComputedStyle(e)));
  return moving.length + (bar.transitionDuration === '0.3s');
})()"""


class Page:
    """A playwright page that records console messages and requests."""

    def __init__(self, page, origin):
        self.page, self.origin, self.said, self.asked = page, origin, [], []
        page.on("console", lambda message: self.said.append((message.type, message.text)))
        page.on("pageerror", lambda error: self.said.append(("error", f"{error.message} {error.stack or ''}".strip())))
        page.on("request", lambda request: self.asked.append(request.url))

    def __getattr__(self, name):
        return getattr(self.page, name)

    def problems(self, statuses=()):
        """Returns console errors, warnings and requests to other origins (a file may request nothing).

        Ignores failed requests with one of `statuses`; 0 is a refused connection."""
        meant = ["net::ERR_" if status == 0 else f"status of {status}" for status in statuses]
        is_meant = lambda text: text.startswith("Failed to load resource:") and any(part in text for part in meant)  # noqa: E731
        shown = [f"{kind}: {text}" for kind, text in self.said if kind in ("error", "warning") and not is_meant(text)]
        asked = [url for url in self.asked if not url.startswith(("data:", "blob:", "about:"))]
        return shown + [f"request to {url}" for url in asked if origin_of(url) != self.origin]

    def axe(self, source):
        """Returns axe's violations as `rule: element`."""
        self.page.evaluate(source)
        found = self.page.evaluate("(tags) => axe.run(document, { runOnly: tags, resultTypes: ['violations'] })", RULES)
        nodes = [(violation["id"], node) for violation in found["violations"] for node in violation["nodes"]]
        return [f"{rule}: {node['html'][:160]} {node['failureSummary'].splitlines()[-1].strip()}" for rule, node in nodes]

    def heap(self):
        """Returns the bytes of JavaScript in use after garbage collection."""
        session = self.page.context.new_cdp_session(self.page)
        for _ in range(3):
            session.send("HeapProfiler.collectGarbage")
        return int(session.send("Runtime.getHeapUsage")["usedSize"])

    def shift(self):
        """Returns the sum of unexpected layout shifts and their elements."""
        shifts = self.page.evaluate("window.shifts")
        return sum(s["value"] for s in shifts), [s["nodes"] for s in shifts]

    def moving(self):
        """Returns how many elements have transitions or animations."""
        return self.page.evaluate(MOVING)

    def wide(self):
        return self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def shot(self, path, limit=150_000):
        """Writes a screenshot; returns its size."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(path), animations="disabled", caret="hide")
        size = path.stat().st_size
        assert size <= limit, f"{path}: {size} bytes are more than {limit}"
        return size


def origin_of(url):
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


class Browser:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder).resolve()
        self.axe = (self.folder / "axe.min.js").read_text()

    def __enter__(self):
        self.driver = sync_playwright().start()
        own = {"FONTCONFIG_PATH": str(self.folder / "fontconfig"), "LD_LIBRARY_PATH": str(self.folder / "lib")}
        self.chromium = self.driver.chromium.launch(
            executable_path=str(self.folder / "chromium"),
            # No host names resolve, so only this machine can be reached.
            args=["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"],
            env={**os.environ, **own},
        )
        self.version = self.chromium.version
        return self

    def __exit__(self, *_):
        self.chromium.close()
        self.driver.stop()

    def open(self, url, width=1280, height=860, kind=Page, **options):
        context = self.chromium.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(20_000)
        context.add_init_script(SHIFTS)
        page = kind(context.new_page(), origin_of(url))
        page.goto(url)
        return page


class Pages:
    """Opens pages for test cases; the base class of their worlds."""

    def __init__(self, browser):
        self.browser, self.pages = browser, []

    def call(self, function):
        return function(self)

    def axe(self, page, where):
        found = page.axe(self.browser.axe)
        assert not found, f"axe, {where}: {len(found)}: {found[:4]}"

    def open_url(self, url, **options):
        self.pages.append(self.browser.open(url, **options))
        return self.pages[-1]

    def end(self, statuses=()):
        problems = [problem for page in self.pages for problem in page.problems(statuses)]
        for page in self.pages:
            page.context.close()
        self.pages.clear()
        return problems

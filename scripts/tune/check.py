"""Tests an experiment's report in a browser: `make report-page`.

    check.py REPORTS BROWSER OUT [--only WORD]
    check.py REPORT.html BROWSER FOLDER        writes the screenshots tuning-*.png: `make tuning-image`

REPORTS has the files that `LTX2_WRITE_REPORTS=REPORTS cargo test --lib tune::html` writes. A case also fails on console errors
and requests; OUT gets screenshots of failures."""

import pathlib
import re
import statistics
import sys
from itertools import product

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1] / folder) for folder in ("browser", "serve")]

from browser import Browser, Pages  # noqa: E402
from cases import arguments, cases_of, exit_with, run_case  # noqa: E402
from server import until  # noqa: E402

# Milliseconds by number of cases until the first plot is drawn.
LIMITS = {60: 1000, 400: 2000}
OPENINGS = 5
FIRST = "performance.getEntriesByName('first-plot')"
LOADED = f"Math.max(performance.getEntriesByType('navigation')[0].loadEventEnd, {FIRST}[0].startTime)"
NEXT = "const undrawn = document.querySelector('figure:not([hidden]) .drawing:not(:has(svg))'); undrawn?.scrollIntoView()"
UNFOLD = "document.querySelectorAll('details').forEach((d) => (d.open = true)); document.querySelector('#one').scrollIntoView()"
NARROWER = "[...document.querySelectorAll('.drawing > svg')].%s((s) => s.getBoundingClientRect().width %s 360)"
# Counts texts of plots; finds overlapping ones and ones outside their plot.
TEXTS = """() => {
  const found = { count: 0, wrong: [] };
  for (const plot of document.querySelectorAll('.drawing > svg')) {
    const frame = plot.getBoundingClientRect();
    const texts = [...plot.querySelectorAll('text')].filter((t) => t.textContent.trim());
    const boxes = texts.map((t) => [t.textContent, t.getBoundingClientRect()]);
    found.count += boxes.length;
    boxes.forEach(([text, a], n) => {
      if (a.left < frame.left - 1 || a.right > frame.right + 1) found.wrong.push(`outside: ${text}`);
      for (const [other, b] of boxes.slice(n + 1)) {
        const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (x > 0.5 && y > 0.5) found.wrong.push(`${text} | ${other}: ${x.toFixed(1)} x ${y.toFixed(1)}`);
      }
    });
  }
  return found;
}"""
FILTERED = """() => {
  const start = performance.now(), f = document.getElementById('filter-0');
  f.value = 'ring';
  f.dispatchEvent(new Event('input'));
  document.body.offsetHeight;
  return performance.now() - start;
}"""
CHOSEN = "['before', 'after'].map((id) => document.getElementById(id).selectedOptions[0].textContent)"
LOOKS = {
    "light": {"color_scheme": "light"}, "dark": {"color_scheme": "dark"}, "narrow": {"width": 320, "height": 700},
    "wide": {"width": 1900, "height": 1000},
}
# Options of the window, and the element that it is scrolled to, of each screenshot of the guide; bytes of the largest.
SHOTS = {
    "light": (dict(width=1300, height=1150, color_scheme="light"), None),
    "dark": (dict(width=1300, height=900, color_scheme="dark"), ".figures"),
    "narrow": (dict(width=360, height=900, color_scheme="light"), ".figures"),
}
LARGEST = 300_000
# Title of a plot, hovered element, and a word in its tip.
HOVERED = [
    ("Step time by part", ".bar rect >> nth=6", "compute"), ("Memory per device", ".bar rect >> nth=6", "temporaries"),
    ("Roofline of a step", "circle >> nth=0", "TFLOP/s"), ("Measured against predicted", "circle >> nth=-1", "predicted"),
]


def wait_for(page, holds):
    """Waits until an expression holds. Playwright's own wait compiles code in the page, which its content policy forbids."""
    until(holds, lambda: page.evaluate(holds), 20, 0.01)


def plotted(page):
    wait_for(page, f"(() => {{ {NEXT}; return !undrawn; }})()")
    return page.locator(".drawing > svg").count()


def texts(page, where=""):
    """Returns how many texts the plots have, none of which overlap or leave their plot."""
    found = page.evaluate(TEXTS)
    assert not found["wrong"], f"{where}{found['wrong'][:5]}"
    return found["count"]


def labels(page):
    return page.locator("#group-0 .cases tbody th").all_inner_texts()


def press(page, text, key):
    """Tabs to the control whose text starts with `text` and presses a key."""
    for _ in range(400):
        page.keyboard.press("Tab")
        if page.evaluate("(document.activeElement.textContent || '').trim() || document.activeElement.id").startswith(text):
            return page.keyboard.press(key)
    raise AssertionError(f"no control '{text}' is reached by Tab")


class World(Pages):
    def __init__(self, browser, reports):
        super().__init__(browser)
        self.reports = reports

    def open(self, count=60, **options):
        page = self.open_url((self.reports / f"report-{count}.html").resolve().as_uri(), **options)
        page.wait_for_selector(".cases tbody tr")
        return page

    def drawn(self, **options):
        page = self.open(**options)
        plotted(page)
        return page

    def end(self, statuses=()):
        asked = [url for page in self.pages for url in page.asked if not url.endswith(".html")]
        return super().end(statuses) + [f"request to {url}" for url in asked]


class Cases(World):
    """Every method is a test case; it returns what it found."""

    def opens_fast(self):
        """Loads and draws the first plot within the limit: median of five openings."""
        said = []
        for count, limit in LIMITS.items():
            times = []
            for _ in range(OPENINGS):
                page = self.open(count)
                wait_for(page, f"{FIRST}.length > 0")
                times.append(page.evaluate(LOADED))
            size, median = page.evaluate("document.documentElement.outerHTML.length"), statistics.median(times)
            assert median < limit, f"{count} cases: {[round(t) for t in times]} ms"
            spread = f"{min(times):.0f} to {max(times):.0f}; limit {limit}; {size // 1000} kB"
            said.append(f"{count} cases in {median:.0f} ms ({spread})")
        return "; ".join(said)

    def texts_do_not_overlap(self):
        """No two texts of a plot overlap, and none leaves the plot."""
        said = []
        for count, name in product(LIMITS, LOOKS):
            page = self.open(count, **LOOKS[name])
            if name == "wide":
                # The maximum number of bars.
                page.select_option("#group-0 .controls select", "100")
            plots, found = plotted(page), texts(page, f"{count} cases, {name}: ")
            assert found > 20 * plots / 2, found
            said.append(f"{count} {name}: {found} texts of {plots} plots")
        return "; ".join(said)

    def a_narrower_window_redraws(self):
        """Plots and their labels follow the window's width."""
        page = self.drawn()
        page.set_viewport_size({"width": 360, "height": 800})
        wait_for(page, NARROWER % ("some", "<"))
        page.evaluate("document.querySelector('#group-0 figure').scrollIntoView()")
        page.wait_for_timeout(200)
        for _ in range(40):
            if page.evaluate(NARROWER % ("every", "<=")):
                break
            page.mouse.wheel(0, 600)
            page.wait_for_timeout(50)
        assert page.wide() == 0, page.wide()
        return f"{texts(page)} texts"

    def axe_finds_nothing(self):
        """Light, dark and narrow, with all details open; nothing is wider than the window."""
        for name in ("light", "dark", "narrow"):
            page = self.drawn(**LOOKS[name])
            page.evaluate(UNFOLD)
            page.wait_for_selector("#tensors table")
            assert page.wide() == 0, f"{name}: {page.wide()} pixels wider than the window"
            self.axe(page, name)
        return f"0 violations; Chromium {self.browser.version}"

    def hovering_shows_figures(self):
        """Tips of bars and points have label and figures and stay inside the window."""
        for name in ("light", "narrow"):
            page = self.drawn(**LOOKS[name])
            width = page.viewport_size["width"]
            for title, pointed, word in HOVERED:
                figure = page.locator("#group-0 figure", has=page.get_by_role("heading", name=title))
                figure.locator(f".drawing {pointed}").hover(force=True)
                tip = figure.locator(".tip text")
                tip.wait_for()
                page.wait_for_timeout(50)
                text, box = tip.text_content(), tip.bounding_box()
                assert word in text and re.search(r"\d", text), text
                assert box["x"] >= 0 and box["x"] + box["width"] <= width, f"{name}, {title}: {box}"
            assert page.wide() == 0, page.wide()
        return f"{len(HOVERED)} plots, in two widths"

    def tables_beside_plots_have_their_numbers(self):
        figures = self.drawn().locator("figure:not([hidden])")
        for figure in figures.all():
            figure.locator("summary").click()
            figure.locator("details tbody tr").first.wait_for()
            rows = figure.locator("details tbody tr").count()
            named = int(re.search(r", (\d+) cases", figure.locator("svg").first.get_attribute("aria-label"))[1])
            assert rows == named > 0, f"{rows} rows of {named}"
        return f"{figures.count()} plots"

    def filter_and_sort_by_keyboard(self):
        """Filtering and sorting change table and plots; missing values come last."""
        page = self.open()
        whole = labels(page)
        page.focus("#filter-0")
        page.keyboard.type("ulysses cfg=2")
        shown = labels(page)
        assert shown == [name for name in whole if "ulysses" in name and "cfg=2" in name] and 0 < len(shown) < len(whole), shown
        assert page.locator("#group-0 .controls [role=status]").first.inner_text() == f"{len(shown)} of {len(whole)}"
        plotted(page)
        assert page.locator("#group-0 .drawing .text text", has_text="hybrid").count() == 0
        page.focus("#filter-0")
        page.keyboard.press("ControlOrMeta+a")
        page.keyboard.press("Delete")
        assert labels(page) == whole
        press(page, "case", "Enter")
        head = page.locator("#group-0 .cases th", has=page.get_by_role("button", name=re.compile("^case")))
        assert head.get_attribute("aria-sort") == "ascending"
        ascending = labels(page)
        names = [text.splitlines()[0] for text in ascending]
        assert sorted(names, key=lambda n: n.split()[0]) == names and ascending != whole, names[:5]
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == "descending" and labels(page)[0] == ascending[-1]
        press(page, "measured ms", "Space")
        cells = page.locator("#group-0 .cases tbody tr").evaluate_all("(rows) => rows.map((row) => row.cells[7].textContent)")
        times = [float(c) for c in cells if c]
        assert times == sorted(times) and cells[len(times):] == [""] * (len(cells) - len(times)), cells
        assert page.locator("#group-0 .cases [aria-sort=ascending]").count() == 1
        return f"{len(shown)} of {len(whole)} by words, {len(times)} measured in order"

    def failures_show_their_error(self):
        page = self.open()
        row = page.locator(".cases tbody tr", has_text="RESOURCE_EXHAUSTED")
        assert row.count() == 3, row.count()
        page.fill("#filter-0", "ran out of memory")
        assert len(labels(page)) == 3
        return "3 failures"

    def two_cases_are_compared(self):
        """Any two cases: figures, added and removed collectives, tensors placed differently."""
        page = self.open()
        page.focus("#before")
        page.wait_for_selector("#changes table")
        page.keyboard.press("End")
        page.focus("#after")
        page.keyboard.press("Home")
        chosen = page.evaluate(CHOSEN)
        heads = page.locator("#changes table").first.locator("thead th").all_inner_texts()
        assert [re.split(", [ct]pu", h)[0] for h in heads[1:3]] == chosen and chosen[0] != chosen[1], (heads, chosen)
        words = ("predicted ms", "GiB per device", "Collectives removed", "Collectives added", "Tensors placed differently")
        missing = [word for word in words if word not in page.inner_text("#changes")]
        assert not missing, missing
        page.select_option("#before", page.input_value("#after"))
        assert "Tensors placed differently: 0 of" in page.inner_text("#changes")
        return " and ".join(chosen)

    def suggestions_are_there(self):
        """Sorted by gain, the free one marked, in the target's unit; the layout can be opened and copied by keyboard."""
        page = self.open()
        for group, unit in ((0, "ms"), (1, "MB received")):
            items = page.locator(f"#group-{group} .suggestions ol > li")
            gains = [float(re.search(r"−([\d.]+) %", text)[1]) for text in items.all_inner_texts()]
            assert gains == sorted(gains, reverse=True) == [21.4, 7.1, 3.2], gains
            assert items.nth(0).locator(".badge").inner_text() == "free" and unit in items.nth(0).inner_text()
        page.evaluate("document.querySelector('#suggestion-0-0').scrollIntoView()")
        first = page.locator("#suggestion-0-0")
        first.locator("summary", has_text="Layout file").press("Enter")
        press(page, "Copy", "Enter")
        wait_for(page, "document.querySelector('#suggestion-0-0 [role=status]').textContent !== ''")
        assert "mesh: {context: 8}" in page.inner_text("#suggestion-0-0 pre")
        first.locator("summary", has_text="Collectives").press("Enter")
        assert "all-gather" in first.locator("details").first.inner_text()
        return f"3 a group; '{first.locator('[role=status]').inner_text()}'"

    def tensors_are_searched(self):
        page = self.open()
        page.focus("#search")
        page.wait_for_selector("#tensors table")
        page.keyboard.type("audio_attn1 fsdp stored")
        rows = page.locator("#tensors tbody tr").all_inner_texts()
        assert 0 < len(rows) < 120 and page.inner_text("#count") == f"{len(rows)} of 120", page.inner_text("#count")
        assert all("audio_attn1" in text for text in rows)
        assert "all-gather" in page.inner_text("#collectives")
        return f"{len(rows)} of 120"

    def less_motion(self):
        moving = self.open(reduced_motion="reduce").moving()
        assert moving == 0, moving
        return "0 transitions"

    def hundreds_are_filtered_at_once(self):
        """Filtering 400 cases takes at most 100 ms."""
        took = self.open(400).evaluate(FILTERED)
        assert took < 100, took
        return f"{took:.0f} ms"


args = arguments(__doc__)
args.out.mkdir(parents=True, exist_ok=True)
with Browser(args.browser) as browser:
    if args.tested.is_file():
        problems = []
        for name, (options, at) in SHOTS.items():
            page, file = browser.open(args.tested.resolve().as_uri(), **options), args.out / f"tuning-{name}.png"
            page.wait_for_load_state("networkidle")
            if at:
                page.locator(at).first.evaluate("(element) => element.scrollIntoView()")
                # Waits for plots that are drawn when they become visible.
                page.wait_for_timeout(500)
            print(f"{file}: {page.shot(file, LARGEST)} bytes")
            problems += [f"{name}: {problem}" for problem in page.problems() + page.axe(browser.axe)]
        sys.exit("\n".join(problems) or None)
    cases = cases_of(Cases, args.only)
    results = [run_case("report", case, Cases(browser, args.tested), args.out) for case in cases]
exit_with(results, args.out)

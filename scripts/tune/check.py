#!/usr/bin/env python3
"""Tests an experiment's report in a browser: `make report-page`.

    check.py REPORTS BROWSER OUT [--only WORD]

REPORTS has the files that `LTX2_WRITE_REPORTS=REPORTS cargo test --lib tune::html` writes. A case also fails on console errors
and
requests; OUT gets screenshots of failures.
"""

import argparse
import pathlib
import re
import statistics
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "browser"))

from browser import Browser, Pages, exit_with, run_case  # noqa: E402

# Milliseconds by number of cases until the first plot is drawn.
LIMITS = {60: 1000, 400: 2000}
OPENINGS = 5
LOADED = "Math.max(performance.getEntriesByType('navigation')[0].loadEventEnd, performance.getEntriesByName('first-plot')[0].startTime)"
FIRST = "performance.getEntriesByName('first-plot').length > 0"
NEXT = "const undrawn = document.querySelector('figure:not([hidden]) .drawing:not(:has(svg))'); undrawn?.scrollIntoView()"
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
        const [x, y] = [Math.min(a.right, b.right) - Math.max(a.left, b.left), Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top)];
        if (x > 0.5 && y > 0.5) found.wrong.push(`${text} | ${other}: ${x.toFixed(1)} x ${y.toFixed(1)}`);
      }
    });
  }
  return found;
}"""
LOOKS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "narrow": {"width": 320, "height": 700},
    "wide": {"width": 1900, "height": 1000},
}
CASES = []


def case(function):
    CASES.append(function)
    return function


def until(page, holds, seconds=20):
    """Waits until an expression holds. Playwright's own wait compiles code in the page, which its content policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(holds):
        assert time.monotonic() < end, f"not within {seconds} s: {holds}"
        page.wait_for_timeout(10)


class World(Pages):
    def __init__(self, browser, reports):
        super().__init__(browser)
        self.reports = reports

    def open(self, count, **options):
        page = self.open_url((self.reports / f"report-{count}.html").resolve().as_uri(), **options)
        page.wait_for_selector(".cases tbody tr")
        return page

    def end(self, statuses=()):
        asked = [url for page in self.pages for url in page.asked if not url.endswith(".html")]
        return super().end(statuses) + [f"request to {url}" for url in asked]


def plotted(page):
    """Scrolls until every plot is drawn; returns their number."""
    until(page, f"(() => {{ {NEXT}; return !undrawn; }})()")
    return page.locator(".drawing > svg").count()


def unfold(page):
    page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true)); document.querySelector('#one').scrollIntoView()")
    page.wait_for_selector("#tensors table")


def labels(page, group=0):
    return page.locator(f"#group-{group} .cases tbody th").all_inner_texts()


def focus(page, text):
    """Tabs to the control whose text starts with `text`."""
    for _ in range(400):
        page.keyboard.press("Tab")
        if page.evaluate("(document.activeElement.textContent || '').trim() || document.activeElement.id").startswith(text):
            return
    raise AssertionError(f"no control '{text}' is reached by Tab")


@case
def opens_fast(world):
    """Loads and draws the first plot within the limit: median of five openings."""
    said = []
    for count, limit in LIMITS.items():
        times = []
        for _ in range(OPENINGS):
            page = world.open(count)
            until(page, FIRST)
            times.append(page.evaluate(LOADED))
            size = page.evaluate("document.documentElement.outerHTML.length")
        median = statistics.median(times)
        assert median < limit, f"{count} cases: {[round(t) for t in times]} ms"
        said.append(f"{count} cases in {median:.0f} ms ({min(times):.0f} to {max(times):.0f}; limit {limit}; {size // 1000} kB)")
    return "; ".join(said)


@case
def texts_do_not_overlap(world):
    """No two texts of a plot overlap, and none leaves the plot."""
    said = []
    for count in LIMITS:
        for name, options in LOOKS.items():
            page = world.open(count, **options)
            if name == "wide":
                # The maximum number of bars.
                page.select_option("#group-0 .controls select", "100")
            plots = plotted(page)
            found = page.evaluate(TEXTS)
            assert not found["wrong"], f"{count} cases, {name}: {found['wrong'][:5]}"
            assert found["count"] > 20 * plots / 2, found["count"]
            said.append(f"{count} {name}: {found['count']} texts of {plots} plots")
    return "; ".join(said)


@case
def a_narrower_window_redraws(world):
    """Plots and their labels follow the window's width."""
    page = world.open(60)
    plotted(page)
    page.set_viewport_size({"width": 360, "height": 800})
    until(page, "[...document.querySelectorAll('.drawing > svg')].some((s) => s.getBoundingClientRect().width < 360)")
    page.evaluate("document.querySelector('#group-0 figure').scrollIntoView()")
    page.wait_for_timeout(200)
    for _ in range(40):
        if page.evaluate("[...document.querySelectorAll('.drawing > svg')].every((s) => s.getBoundingClientRect().width <= 360)"):
            break
        page.mouse.wheel(0, 600)
        page.wait_for_timeout(50)
    assert page.wide() == 0, page.wide()
    found = page.evaluate(TEXTS)
    assert not found["wrong"], found["wrong"][:5]
    return f"{found['count']} texts"


@case
def narrow_has_nothing_to_scroll_sideways(world):
    page = world.open(60, **LOOKS["narrow"])
    plotted(page)
    unfold(page)
    assert page.wide() == 0, f"{page.wide()} pixels wider than the window"
    return "320 pixels"


@case
def axe_finds_nothing(world):
    """Light, dark and narrow, with all details open."""
    for name in ("light", "dark", "narrow"):
        page = world.open(60, **LOOKS[name])
        plotted(page)
        unfold(page)
        found = page.axe(world.browser.axe)
        assert not found, f"{name}: {len(found)}: {found[:4]}"
    return f"0 violations; Chromium {world.browser.version}"


# Title of a plot, hovered element, and a word in its tip.
HOVERED = [
    ("Step time by part", ".bar rect >> nth=6", "compute"),
    ("Memory per device", ".bar rect >> nth=6", "temporaries"),
    ("Roofline of a step", "circle >> nth=0", "TFLOP/s"),
    ("Measured against predicted", "circle >> nth=-1", "predicted"),
]


@case
def hovering_shows_figures(world):
    """Tips of bars and points have label and figures and stay inside the window."""
    for name in ("light", "narrow"):
        page = world.open(60, **LOOKS[name])
        plotted(page)
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


@case
def tables_beside_plots_have_their_numbers(world):
    page = world.open(60)
    plotted(page)
    figures = page.locator("figure:not([hidden])")
    for n in range(figures.count()):
        figure = figures.nth(n)
        figure.locator("summary").click()
        figure.locator("details tbody tr").first.wait_for()
        rows = figure.locator("details tbody tr").count()
        named = int(re.search(r", (\d+) cases", figure.locator("svg").first.get_attribute("aria-label"))[1])
        assert rows == named > 0, f"{rows} rows of {named}"
    return f"{figures.count()} plots"


@case
def filter_and_sort_by_keyboard(world):
    """Filtering and sorting change table and plots; missing values come last."""
    page = world.open(60)
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
    focus(page, "case")
    page.keyboard.press("Enter")
    head = page.locator("#group-0 .cases th", has=page.get_by_role("button", name=re.compile("^case")))
    assert head.get_attribute("aria-sort") == "ascending"
    ascending = labels(page)
    names = [text.splitlines()[0] for text in ascending]
    assert sorted(names, key=lambda n: n.split()[0]) == names and ascending != whole, names[:5]
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending" and labels(page)[0] == ascending[-1]
    focus(page, "measured ms")
    page.keyboard.press("Space")
    cells = page.locator("#group-0 .cases tbody tr").evaluate_all("(rows) => rows.map((row) => row.cells[7].textContent)")
    times = [float(c) for c in cells if c]
    assert times == sorted(times) and cells[len(times):] == [""] * (len(cells) - len(times)), cells
    assert page.locator("#group-0 .cases [aria-sort=ascending]").count() == 1
    return f"{len(shown)} of {len(whole)} by words, {len(times)} measured in order"


@case
def failures_show_their_error(world):
    page = world.open(60)
    row = page.locator(".cases tbody tr", has_text="RESOURCE_EXHAUSTED")
    assert row.count() == 3, row.count()
    page.fill("#filter-0", "ran out of memory")
    assert len(labels(page)) == 3
    return "3 failures"


@case
def two_cases_are_compared(world):
    """Any two cases: figures, added and removed collectives, tensors placed differently."""
    page = world.open(60)
    page.focus("#before")
    page.wait_for_selector("#changes table")
    page.keyboard.press("End")
    page.focus("#after")
    page.keyboard.press("Home")
    chosen = page.evaluate("['before', 'after'].map((id) => document.getElementById(id).selectedOptions[0].textContent)")
    heads = page.locator("#changes table").first.locator("thead th").all_inner_texts()
    assert [h.split(", cpu")[0].split(", tpu")[0] for h in heads[1:3]] == chosen and chosen[0] != chosen[1], (heads, chosen)
    text = page.inner_text("#changes")
    for wanted in ("predicted ms", "GiB per device", "Collectives removed", "Collectives added", "Tensors placed differently"):
        assert wanted in text, wanted
    page.select_option("#before", page.input_value("#after"))
    assert "Tensors placed differently: 0 of" in page.inner_text("#changes")
    return " and ".join(chosen)


@case
def suggestions_are_there(world):
    """Sorted by gain, the free one marked, in the target's unit; the layout can be opened and copied by keyboard."""
    page = world.open(60)
    for group, unit in ((0, "ms"), (1, "MB received")):
        items = page.locator(f"#group-{group} .suggestions ol > li")
        gains = [float(re.search(r"−([\d.]+) %", text)[1]) for text in items.all_inner_texts()]
        assert gains == sorted(gains, reverse=True) == [21.4, 7.1, 3.2], gains
        assert items.nth(0).locator(".badge").inner_text() == "free" and unit in items.nth(0).inner_text()
    page.evaluate("document.querySelector('#suggestion-0-0').scrollIntoView()")
    page.locator("#suggestion-0-0 summary", has_text="Layout file").focus()
    page.keyboard.press("Enter")
    focus(page, "Copy")
    page.keyboard.press("Enter")
    status = page.locator("#suggestion-0-0 [role=status]")
    until(page, "document.querySelector('#suggestion-0-0 [role=status]').textContent !== ''")
    assert "mesh: {context: 8}" in page.inner_text("#suggestion-0-0 pre")
    page.locator("#suggestion-0-0 summary", has_text="Collectives").focus()
    page.keyboard.press("Enter")
    assert "all-gather" in page.locator("#suggestion-0-0 details").first.inner_text()
    return f"3 a group; '{status.inner_text()}'"


@case
def tensors_are_searched(world):
    page = world.open(60)
    page.focus("#search")
    page.wait_for_selector("#tensors table")
    page.keyboard.type("audio_attn1 fsdp stored")
    rows = page.locator("#tensors tbody tr")
    count = rows.count()
    assert 0 < count < 120 and page.inner_text("#count") == f"{count} of 120", page.inner_text("#count")
    assert all("audio_attn1" in text for text in rows.all_inner_texts())
    assert "all-gather" in page.inner_text("#collectives")
    return f"{count} of 120"


@case
def less_motion(world):
    page = world.open(60, reduced_motion="reduce")
    moving = page.evaluate("""[...document.querySelectorAll('*')].filter((e) => { const s = getComputedStyle(e);
      return parseFloat(s.transitionDuration) > 0 || s.animationName !== 'none'; }).length""")
    assert moving == 0, moving
    return "0 transitions"


@case
def hundreds_are_filtered_at_once(world):
    """Filtering 400 cases takes at most 100 ms."""
    page = world.open(400)
    started = "const start = performance.now(); const f = document.getElementById('filter-0'); f.value = 'ring'; f.dispatchEvent(new Event('input'));"
    took = page.evaluate(f"(() => {{ {started} document.body.offsetHeight; return performance.now() - start; }})()")
    assert took < 100, took
    return f"{took:.0f} ms"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", type=pathlib.Path)
    parser.add_argument("browser", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cases = [function for function in CASES if args.only in function.__name__]
    with Browser(args.browser) as browser:
        results = [run_case("report", function, World(browser, args.reports), args.out) for function in cases]
    exit_with(results, args.out)


if __name__ == "__main__":
    main()

"""Keyboard, colours, widths and motion; the guide's screenshots."""

import pathlib

from harness import CLIP, MANY, World, case, press
from server import equal, tone, until

FOCUSED = """() => {
  const e = document.activeElement, s = getComputedStyle(e);
  const name = e.id || e.getAttribute('aria-label') || e.textContent.slice(0, 30) || e.nodeName;
  return [name, s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2, e === document.body];
}"""
CONTROLS = """[...document.querySelectorAll('button, input, select, textarea, summary, a[href]')]
  .filter((e) => !e.disabled && e.checkVisibility({ contentVisibilityAuto: true, opacityProperty: false })).length"""
CUT = """[...document.querySelectorAll('button, input, select, textarea, .words, progress')].filter((e) => e.checkVisibility())
  .filter((e) => { const r = e.getBoundingClientRect(); return r.width && (r.left < 0 || r.right > innerWidth); })
  .map((e) => e.id || e.textContent)"""
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
IS_ON = "(kind) => document.activeElement.classList.contains(kind)"
THUMBNAILS = """[...document.querySelectorAll('.card img')]
  .filter((i) => i.loading !== 'lazy' || i.getBoundingClientRect().top < innerHeight).every((i) => i.complete)"""


class Looks(World):
    def keyboard_alone(self, page):
        """Tab reaches every control with a visible focus; shortcuts move, cancel, undo, reuse and play."""
        name = "by keys alone"
        self.made(page, CLIP)
        page.reload()
        page.wait_tile(CLIP, 20)
        page.evaluate("document.activeElement.blur()")
        page.keys("Home").click("summary")
        page.evaluate("document.activeElement.blur(); getSelection().removeAllRanges(); scrollTo(0, 0)")
        wanted, reached, unseen = page.evaluate(CONTROLS), 0, []
        page.keys("Tab")
        first = page.evaluate(FOCUSED)[0]
        for _ in range(wanted + 60):
            control, visible, body = page.evaluate(FOCUSED)
            reached += not body
            if not body and not visible:
                unseen.append(control)
            page.keys("Tab")
            if page.evaluate(FOCUSED)[0] == first:
                break
        assert not unseen, f"no visible focus: {unseen}"
        assert reached >= wanted, f"{reached} of {wanted} controls by Tab"
        page.locator("#queue-title").focus()
        page.keys("/", "ControlOrMeta+a")
        page.keyboard.type(name)
        page.enter(steps=str(MANY)).keys("Control+Enter").wait_running(name).keys("Escape", "j")
        assert page.evaluate(IS_ON, "row")
        for keys, what, holds, seconds in [
            ("x", "it is marked", lambda: page.state(name) == "Will be cancelled", 3),
            ("x", "it is taken back", lambda: "step" in page.state(name), 3),
            ("x", "it is cancelled", lambda: not self.server.waiting(), 40),
            ("", "the focus is kept", lambda: page.evaluate("document.activeElement !== document.body"), 3),
            ("j", "a card", lambda: page.keys("j").evaluate(IS_ON, "card"), 3),
            ("kjr", "its settings", lambda: page.input_value("#prompt") not in ("", name), 5),
        ]:
            page.keys(*keys)
            until(what, holds, seconds)
        page.keys("Escape", "j")
        until("a card", lambda: page.evaluate(IS_ON, "card") or not page.keys("j"), 3)
        page.keys("Enter").wait_playing()
        page.evaluate("document.activeElement.blur()")
        page.keys("?")
        assert page.locator("#help-dialog").is_visible()
        self.axe(page, "the help")
        page.keys("Escape")
        assert not page.locator("#help-dialog").is_visible()
        return f"{reached} stops for {wanted} controls"

    def _busy(self, page):
        self.made(page, CLIP)
        page.enter(seed="").send("under way", MANY).send("waiting", MANY).wait_running("under way")

    @case(color_scheme="dark")
    def dark_and_light(self, page):
        """The system's colour scheme and the switch work; the choice is kept; axe accepts the contrast of both."""
        self._busy(page)
        dark = page.evaluate(BACKGROUND)
        self.axe(page, "dark")
        page.click("#theme")
        assert page.inner_text("#theme-name") == "Light"
        light = page.evaluate(BACKGROUND)
        page.reload()
        page.wait_for_selector("#cards > .card")
        assert page.evaluate(BACKGROUND) == light != dark
        self.axe(page, "light")
        page.click("#theme")
        assert page.evaluate(BACKGROUND) == dark and page.inner_text("#theme-name") == "Dark"
        return f"{dark} and {light}"

    @case(width=320, height=700)
    def narrow(self, page):
        """At 320 pixels nothing scrolls sideways."""
        self._busy(page)
        page.click("summary")
        page.select(size="own", length="own")
        page.tile(CLIP).first.locator(".wider").click()
        press(page.tile(CLIP).first, "Delete")
        equal((page.wide(), page.evaluate(CUT)), (0, []), "excess pixels, and controls that are cut")
        self.axe(page, "narrow")

    @case(reduced_motion="reduce")
    def reduced_motion(self, page):
        """With reduced motion there are no transitions or loops."""
        self.made(page, CLIP)
        page.reload()
        equal(page.moving(), 0, "transitions and animations")
        page.tile(CLIP).first.locator(".go").click()
        page.wait_for_selector("video")
        assert page.evaluate("document.querySelector('video').loop") is False

    @case(width=1600, height=900)
    def axe_at_rest(self, page):
        """Axe finds nothing in a wide window with all details open."""
        self.made(page, CLIP)
        page.click("summary")
        self.axe(page, "wide")
        return f"axe of {len(self.browser.axe) // 1000} kB, Chromium {self.browser.version}"


UNDER_WAY = [
    "a large blue ring grows on white, a rising hum",
    "two red squares cross on gray, short clicks",
    "a yellow disc falls on green, a low beep",
]
SHOTS = {
    "light": {"color_scheme": "light", "height": 720},
    "dark": {"color_scheme": "dark", "width": 1400, "height": 640},
    "narrow": {"color_scheme": "light", "width": 320, "height": 820},
}


class Images(World):
    flags = ("--queue", "64")
    folder = None

    def prepare(self):
        self.server.state = self.server.log.parent / "images"

    def _shot(self, page, name):
        file = self.folder / f"{name}.png"
        print(f"    {file}: {page.shot(file)} bytes")

    def images_of_the_guide(self, page):
        """Makes videos, then writes screenshots while others are in progress."""
        for seed, prompt in enumerate(pathlib.Path("docs/images/nano.txt").read_text().splitlines()):
            status, body = self.server.ask("POST", "v1/videos", {"prompt": prompt, "seed": seed, "num_inference_steps": 12})
            assert status == 200, body
        until("the videos are made", lambda: not self.server.waiting(), 400)
        for prompt in UNDER_WAY:
            page.send(prompt, 60)
        page.wait_running(UNDER_WAY[0])
        for name, options in SHOTS.items():
            self.end()
            page = self.open(**options)
            page.enter(prompt="a small yellow star moves right on purple, a high hum")
            until("a few per cent", lambda page=page: page.progress(UNDER_WAY[0]) > 10, 90)
            until("thumbnails", lambda page=page: page.evaluate(THUMBNAILS), 10)
            self._shot(page, f"serve-{name}")

    @case(color_scheme="light", width=700, height=330)
    def image_of_preview(self, page):
        """Writes a screenshot of the queue while a video with previews runs."""
        self.server.clear()
        prompt = "a large green square grows on black, a low hum"
        page.send(prompt, 60)
        film = page.row(prompt).locator("canvas")
        until("a late preview", lambda: int(film.get_attribute("data-step") or 0) >= 40, 120)
        page.locator("#queue-title").scroll_into_view_if_needed()
        page.evaluate("document.querySelector('#queue-title').closest('section').scrollIntoView()")
        self._shot(page, "preview")


class FilledForms(Images):
    flags = ("--queue", "64", "--set", "serve.pipelines=[retake, extend, audio_to_video]")

    @case(color_scheme="light", width=700, height=560)
    def images_of_filled_forms(self, page):
        """Writes screenshots of the form with the source of an edit, of an extension and of a video for a sound."""
        self.made(page, CLIP)

        def shot(name):
            page.locator("#form").scroll_into_view_if_needed()
            self._shot(page, f"serve-{name}")

        press(page.tile(CLIP).first, "Edit")
        page.enter(prompt="the circle turns green", start="0.25", end="0.5")
        shot("edit")
        press(page.tile(CLIP).first, "Extend")
        page.enter(prompt="the circle rolls away", added="1")
        shot("extend")
        page.select(pipeline="audio_to_video").enter(prompt="a disc dances")
        page.set_input_files("#tone", [{"name": "drums.wav", "mimeType": "audio/wav", "buffer": tone()}])
        until("it is named", lambda: "drums.wav" in page.inner_text("#tone-shown"), 5)
        shot("sound")

"""Keyboard, colours, widths and motion."""

from harness import MANY, case, made, press, running, send, state, tile
from server import until

CLIP = "a red circle bounces on blue, low beeps"
FOCUSED = """() => { const e = document.activeElement, s = getComputedStyle(e);
  return [e.id || e.getAttribute('aria-label') || e.textContent.slice(0, 30) || e.nodeName, s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2, e === document.body]; }"""
CONTROLS = "[...document.querySelectorAll('button, input, select, textarea, summary, a[href]')].filter((e) => !e.disabled && e.checkVisibility({ contentVisibilityAuto: true, opacityProperty: false })).length"


@case("open")
def keyboard_alone(world):
    """Tab reaches every control with a visible focus; shortcuts move, cancel, undo, reuse and play."""
    page = world.open()
    made(page, world.server, CLIP)
    page.reload()
    tile(page, CLIP).first.wait_for()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Home")
    page.click("summary")
    page.evaluate("document.activeElement.blur(); getSelection().removeAllRanges(); scrollTo(0, 0)")
    wanted, reached, unseen = page.evaluate(CONTROLS), 0, []
    page.keyboard.press("Tab")
    first = page.evaluate(FOCUSED)[0]
    for _ in range(wanted + 60):
        name, visible, body = page.evaluate(FOCUSED)
        if not body:
            reached += 1
            if not visible:
                unseen.append(name)
        page.keyboard.press("Tab")
        if page.evaluate(FOCUSED)[0] == first:
            break
    assert not unseen, f"no visible focus: {unseen}"
    assert reached >= wanted, f"{reached} of {wanted} controls by Tab"
    page.locator("#queue-title").focus()
    page.keyboard.press("/")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("by keys alone")
    page.fill("#steps", str(MANY))
    page.keyboard.press("Control+Enter")
    running(page, "by keys alone")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.classList.contains('row')")
    page.keyboard.press("x")
    until("it is marked", lambda: state(page, "by keys alone") == "Will be cancelled", 3)
    page.keyboard.press("x")
    until("it is taken back", lambda: "step" in state(page, "by keys alone"), 3)
    page.keyboard.press("x")
    until("it is cancelled", lambda: not world.server.waiting(), 40)
    until("the focus is kept", lambda: page.evaluate("document.activeElement !== document.body"), 3)
    page.keyboard.press("j")
    until("a card", lambda: page.keyboard.press("j") or page.evaluate("document.activeElement.classList.contains('card')"), 3)
    page.keyboard.press("k")
    page.keyboard.press("j")
    page.keyboard.press("r")
    until("its settings", lambda: page.input_value("#prompt") not in ("", "by keys alone"), 5)
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    until("a card", lambda: page.evaluate("document.activeElement.classList.contains('card')") or page.keyboard.press("j"), 3)
    page.keyboard.press("Enter")
    until("it plays", lambda: (page.evaluate("document.querySelector('video')?.currentTime") or 0) > 0, 20)
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    assert page.locator("#help-dialog").is_visible()
    world.axe(page, "the help")
    page.keyboard.press("Escape")
    assert not page.locator("#help-dialog").is_visible()
    return f"{reached} stops for {wanted} controls"


def busy(world, page):
    made(page, world.server, CLIP)
    page.fill("#seed", "")
    send(page, "under way", MANY)
    send(page, "waiting", MANY)
    running(page, "under way")


@case("open")
def dark_and_light(world):
    """The system's colour scheme and the switch work; the choice is kept; axe accepts the contrast of both."""
    page = world.open(color_scheme="dark")
    busy(world, page)
    back = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(back)
    world.axe(page, "dark")
    page.click("#theme")
    assert page.inner_text("#theme-name") == "Light"
    light = page.evaluate(back)
    page.reload()
    page.wait_for_selector("#cards > .card")
    assert page.evaluate(back) == light != dark
    world.axe(page, "light")
    page.click("#theme")
    assert page.evaluate(back) == dark and page.inner_text("#theme-name") == "Dark"
    world.server.clear()
    return f"{dark} and {light}"


@case("open")
def narrow(world):
    """At 320 pixels nothing scrolls sideways."""
    page = world.open(width=320, height=700)
    busy(world, page)
    page.click("summary")
    page.select_option("#size", "own")
    page.select_option("#length", "own")
    tile(page, CLIP).first.locator(".wider").click()
    press(tile(page, CLIP).first, "Delete")
    assert page.wide() == 0, page.wide()
    cut = page.evaluate("""[...document.querySelectorAll('button, input, select, textarea, .words, progress')].filter((e) => e.checkVisibility())
      .filter((e) => { const r = e.getBoundingClientRect(); return r.width && (r.left < 0 || r.right > innerWidth); }).map((e) => e.id || e.textContent)""")
    assert not cut, cut
    world.axe(page, "narrow")
    world.server.clear()
    return "no control beyond 320 pixels"


@case("open")
def reduced_motion(world):
    """With reduced motion there are no transitions or loops."""
    page = world.open(reduced_motion="reduce")
    made(page, world.server, CLIP)
    page.reload()
    moving = page.evaluate("""[...document.querySelectorAll('*')].filter((e) => { const s = getComputedStyle(e);
      return parseFloat(s.transitionDuration) > 0 || s.animationName !== 'none'; }).length + (getComputedStyle(document.querySelector('#say') || document.body, '::-webkit-progress-value').transitionDuration === '0.3s')""")
    assert moving == 0, moving
    tile(page, CLIP).first.locator(".go").click()
    page.wait_for_selector("video")
    assert page.evaluate("document.querySelector('video').loop") is False
    return "0 transitions, no loop"


@case("open")
def axe_at_rest(world):
    """Axe finds nothing in a wide window with all details open."""
    page = world.open(width=1600, height=900)
    made(page, world.server, CLIP)
    page.click("summary")
    world.axe(page, "wide")
    return f"axe of {len(world.browser.axe) // 1000} kB, Chromium {world.browser.version}"

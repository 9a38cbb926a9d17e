"""Takes the guide's screenshots of the page with videos of the toy model."""

import pathlib

from harness import row, running, send
from server import until

PROMPTS = pathlib.Path("docs/images/nano.txt")
UNDER_WAY = ["a large blue ring grows on white, a rising hum", "two red squares cross on gray, short clicks", "a yellow disc falls on green, a low beep"]
STEPS = 12
SHOTS = {
    "light": {"color_scheme": "light", "height": 720},
    "dark": {"color_scheme": "dark", "width": 1400, "height": 640},
    "narrow": {"color_scheme": "light", "width": 320, "height": 820},
}


def take(world, folder):
    """Makes the videos, then writes the screenshots while others are in progress."""
    for seed, prompt in enumerate(PROMPTS.read_text().splitlines()):
        status, body = world.server.ask("POST", "v1/videos", {"prompt": prompt, "seed": seed, "num_inference_steps": STEPS})
        assert status == 200, body
    until("the videos are made", lambda: not world.server.waiting(), 400)
    page = world.open()
    for prompt in UNDER_WAY:
        send(page, prompt, 60)
    running(page, UNDER_WAY[0])
    for name, options in SHOTS.items():
        world.browser.close(world.pages.pop())
        page = world.open(**options)
        page.fill("#prompt", "a small yellow star moves right on purple, a high hum")
        until("a few per cent", lambda: int(row(page, UNDER_WAY[0]).locator("progress").get_attribute("value") or 0) > 10, 90)
        until("thumbnails", lambda: page.evaluate("[...document.querySelectorAll('.card img')].filter((i) => i.loading !== 'lazy' || i.getBoundingClientRect().top < innerHeight).every((i) => i.complete)"), 10)
        size = page.shot(folder / f"serve-{name}.png")
        print(f"{folder}/serve-{name}.png: {size} bytes")
    problems = world.end(())
    assert not problems, problems
    world.server.clear()

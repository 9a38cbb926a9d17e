"""The form: choices, errors, files, texts."""

import json

from harness import bring, case, made, press, row, send, tile, write
from server import png, until

MARKUP = "<img src=x onerror=\"window.hacked=1\"> <script>window.hacked=1</script> </p><b>bold</b> &amp; ${1} \u202e "


@case("open")
def markup_stays_text(world):
    """5,000 characters with markup are sent completely and shown as text."""
    page = world.open()
    prompt = (MARKUP + "word " * 1000)[:5000]
    send(page, prompt)
    row(page, "window.hacked").wait_for()
    assert world.server.newest()["prompt"] == prompt
    tile(page, "window.hacked").first.wait_for(timeout=90_000)
    press(tile(page, "window.hacked").first, "Larger")
    shown = tile(page, "window.hacked").first.locator(".words").evaluate("(node) => node.textContent")
    assert shown == prompt
    strange = page.evaluate("[window.hacked, document.querySelectorAll('img[src=x], b, .words > *, .row script').length]")
    assert strange == [None, 0], strange
    assert page.wide() == 0 and page.input_value("#prompt") == prompt
    world.axe(page, "a large card")
    return f"{len(prompt)} characters"


@case("open", statuses=(400,))
def errors_by_their_field(world):
    """An error is shown at its field, which has the focus, and in one alert; the draft stays."""
    page = world.open()
    page.click("summary")
    write(page, "a fox")
    found = []
    for box, value in [("video_cfg_scale", "99"), ("fps", "99"), ("seed", "18446744073709551616")]:
        page.fill(f"#{box}", value)
        page.click("#send")
        until(f"an error of {box}", lambda: page.get_attribute(f"#{box}", "aria-invalid") == "true", 10)
        error = page.get_attribute(f"#{box}", "aria-describedby")
        text = page.inner_text(f"#{error}")
        assert text and page.evaluate("document.activeElement.id") == box, (box, text)
        assert text in page.inner_text("#alert") and page.locator("[role=alert]").count() == 1
        found.append(text)
        world.axe(page, f"an error of {box}")
        page.fill(f"#{box}", "")
    page.fill("#prompt", "   ")
    page.click("#send")
    assert page.evaluate("document.activeElement.id") == "prompt" and "prompt" in page.inner_text("#alert")
    assert page.locator(".row").count() == 0
    return "; ".join(found)


@case("limited", statuses=(400,))
def only_legal_combinations(world):
    """The server accepts every size and length that can be selected, and refuses the disabled ones."""
    page = world.open()
    sizes = page.evaluate("[...size.options].filter((o) => o.value !== 'own').map((o) => [o.value, o.disabled])")
    accepted = refused = 0
    for size, off in sizes:
        lengths = [["9", True]]
        if not off:
            page.select_option("#size", size)
            lengths = page.evaluate("[...document.querySelector('#length').options].filter((o) => o.value !== 'own').map((o) => [o.value, o.disabled])")
            assert not page.evaluate("document.querySelector('#length').selectedOptions[0].disabled")
        for frames, illegal in lengths:
            status, body = world.server.ask("POST", "v1/videos", {"prompt": "a fox", "size": size, "num_frames": int(frames)})
            if illegal:
                assert status == 400, (size, frames, body)
                refused += 1
            else:
                assert status == 200, (size, frames, body)
                world.server.ask("DELETE", f"v1/videos/{body['id']}")
                accepted += 1
    page.select_option("#size", "own")
    page.fill("#width", "101")
    page.keyboard.press("Tab")
    assert page.input_value("#width") == "96"
    page.fill("#width", "4096")
    page.fill("#height", "4096")
    page.keyboard.press("Tab")
    assert "tokens are more than" in page.inner_text("#e-length")
    assert accepted > 5 and refused > 5, (accepted, refused)
    return f"{accepted} combinations accepted, {refused} refused"


@case("open")
def images_by_choice_drop_and_paste(world):
    """Images can be chosen, dropped and pasted; they have previews and are sent as form parts."""
    page = world.open()
    page.set_input_files("#pick", [{"name": "a.png", "mimeType": "image/png", "buffer": png()}])
    bring(page, "drop", "b.png", "image/png", png(colour=(20, 90, 200)))
    bring(page, "paste", "c.png", "image/png", png(colour=(20, 160, 60)))
    until("three previews", lambda: page.evaluate("[...document.querySelectorAll('#images img')].filter((i) => i.naturalWidth === 64).length") == 3, 10)
    world.axe(page, "images")
    press(page, "Remove image 3")
    bring(page, "drop", "d.txt", "text/plain", b"no image")
    until("a text is refused", lambda: "not PNG" in page.inner_text("#e-images"), 5)
    send(page, "between two images")
    until("it is accepted", lambda: row(page, "between two images").count() or page.inner_text("#alert"), 10)
    assert page.inner_text("#alert") == "", page.inner_text("#alert")
    video = world.server.newest()
    assert video["pipeline"] == "image_to_video", video
    until("it is made", lambda: world.server.video(video["id"])["status"] == "completed", 120)
    images = json.loads(world.server.content(video["id"], "sidecar"))["config"]["request"]["images"]
    assert [image["frame"] for image in images] == [0, video["num_frames"] - 1], images
    press(page, "Remove image 1")
    press(page, "Remove image 1")
    return f"frames {[image['frame'] for image in images]}"


@case("open")
def seeds(world):
    """Dice and lock work; several videos get consecutive seeds; the largest seed keeps all digits."""
    page = world.open()
    page.click("#dice")
    first = page.input_value("#seed")
    page.click("#dice")
    assert first.isdigit() and page.input_value("#seed") != first
    assert page.get_attribute("#lock", "aria-pressed") == "true"
    page.click("#lock")
    assert page.input_value("#seed") == ""
    page.fill("#seed", "18446744073709551614")
    page.select_option("#number", "2")
    send(page, "seeded")
    until("two are sent", lambda: len(world.server.waiting()) + len(world.server.ask("GET", "v1/videos?status=completed&limit=2")[1]["data"]) >= 2, 10)
    found = []
    until("both", lambda: len(found.clear() or [found.append(v["seed"]) for v in world.server.ask("GET", "v1/videos?limit=9")[1]["data"] if v["prompt"] == "seeded"]) == 2, 20)
    assert sorted(found) == [18446744073709551614, 18446744073709551615], found
    tile(page, "18446744073709551615").first.wait_for(timeout=90_000)
    page.select_option("#number", "1")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    press(tile(page, "18446744073709551615").first, "Copy seed")
    until("it is copied", lambda: page.evaluate("navigator.clipboard.readText()") == "18446744073709551615", 5)
    page.reload()
    tile(page, "seed 18446744073709551615").first.wait_for()
    return f"{found}"


@case("open")
def fixed_requests(world):
    """A request has only values that differ from the preset."""
    page = world.open()
    made(page, world.server, "plain")
    sent = []
    page.page.on("request", lambda r: r.method == "POST" and sent.append(r.post_data))
    send(page, "as it is")
    until("it is sent", lambda: sent, 5)
    plain = json.loads(sent[0])
    assert set(plain) <= {"prompt", "size", "num_frames", "num_inference_steps", "pipeline"}, plain
    page.click("summary")
    page.fill("#negative", "")
    page.fill("#audio_cfg_scale", "2.5")
    page.uncheck("#sound")
    page.click("#send")
    until("it is sent", lambda: len(sent) == 2, 5)
    other = json.loads(sent[1])
    assert other["audio_cfg_scale"] == 2.5 and other["generate_audio"] is False, other
    world.server.clear()
    return f"{sorted(plain)}; {sorted(set(other) - set(plain))} more"

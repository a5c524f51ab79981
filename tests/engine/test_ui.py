"""The page at `/ui` in a real browser, on real engines: an image is dropped, answered, and its way seen."""

import base64
import os
import shutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.real.system import System, image_part

pytestmark = pytest.mark.engine

TIMEOUT_MS = 60_000
QUESTION = "read the digits"
# Without a sandbox of its own, since tests may run as root; without Chromium's own requests to other hosts.
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
DROP = """([zone, [name, base64]]) => {
    const bytes = Uint8Array.from(atob(base64), (each) => each.charCodeAt(0));
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([bytes], name, { type: "image/png" }));
    for (const type of ["dragover", "drop"]) {
        zone.dispatchEvent(new DragEvent(type, { dataTransfer, bubbles: true, cancelable: true }));
    }
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    chromium = os.environ.get("TRIPTYCH_TEST_CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Chromium: none on the PATH, and TRIPTYCH_TEST_CHROMIUM is not set")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=chromium, args=FLAGS)
        try:
            yield running
        finally:
            running.close()


@pytest.fixture
def page(browser: Any, system: System) -> Iterator[Any]:
    """Opened at `/ui`; what the browser complained about, and what it asked for, is looked at in the end."""
    origin = "{0.scheme}://{0.netloc}".format(urlsplit(system.base_url))
    context = browser.new_context(viewport={"width": 1280, "height": 1100})
    opened = context.new_page()
    opened.set_default_timeout(TIMEOUT_MS)
    complaints: list[str] = []
    asked: list[str] = []
    opened.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(f"{origin}/ui")
    yield opened
    context.close()
    assert not complaints, complaints
    others = [url for url in asked if not url.startswith((f"{origin}/ui", f"{origin}/v1/", "blob:", "data:"))]
    assert asked
    assert not others, others


def drop_image(page: Any, png: bytes) -> None:
    zone = page.locator(".drop").element_handle()
    page.evaluate(DROP, [zone, ["strip.png", base64.b64encode(png).decode()]])
    page.locator(".drop img").wait_for()


def ask(page: Any) -> str:
    """Ask about the image that was dropped; the whole answer."""
    page.get_by_role("button", name="Ask", exact=True).click()
    page.locator('.answer[data-state="ended"]').wait_for()
    assert page.get_by_role("alert").count() == 0, page.locator(".answer").inner_text()
    return str(page.locator(".answer .text").inner_text())


def test_an_image_is_dropped_answered_and_its_way_is_seen(
    page: Any, system: System, strips: ModuleType
) -> None:
    (strip,) = strips.held_out_strips(1, seed=81)
    for role in ("gateway-0", "encoder-0", "prefill_decode-0"):
        page.locator(f'[data-instance="{role}"] .dot.ready').wait_for()
    page.locator(".store .meter").wait_for()

    drop_image(page, strip.png)
    page.get_by_label("Question").fill(QUESTION)
    answer = ask(page)
    shown = page.locator(".waterfall[data-of]")
    page.locator(".waterfall .state.done").wait_for()
    first_id = shown.get_attribute("data-of")
    spans = system.trace(first_id, "encoder.encode", "gateway.stream")
    assert any(span.name == "encoder.encode" for span in spans)
    for stage in ("media", "sizes", "prefill", "stream"):
        assert page.locator(f'.waterfall [data-stage="{stage}"] .bar').count() >= 1, stage
    assert page.locator(".waterfall [data-item] .bar.encode").count() == 1
    assert "encoder-0" in page.locator(".waterfall [data-item] .facts").inner_text()

    assert ask(page) == answer  # the same again: known, and not encoded
    page.wait_for_function(
        "before => document.querySelector('.waterfall').dataset.of !== before"
        " && document.querySelector('.waterfall .state.done')",
        arg=first_id,
    )
    assert "known here" in page.locator(".waterfall [data-item] .facts").inner_text()
    page.locator(f'tr[data-request="{first_id}"]').click()
    page.locator(f'.waterfall[data-of="{first_id}"]').wait_for()
    assert answer == system.ask([image_part(strip.png), {"type": "text", "text": QUESTION}]).text

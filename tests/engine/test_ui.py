"""The page at `/ui` in a real browser, on real engines: an image is dropped, answered, and its way seen."""

import base64
import importlib.util
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.chromium import require_chromium
from tests.support.real.system import System, image_part
from triptych_cli.commands.demo import PROMPT

HAS_PLAYWRIGHT = importlib.util.find_spec("playwright") is not None

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not HAS_PLAYWRIGHT, reason="needs the package playwright"),
]

TIMEOUT_MS = 60_000
# Without a sandbox of its own, since tests may run as root; without Chromium's own requests to other hosts.
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
DROP = """([zone, [name, type, base64]]) => {
    const bytes = Uint8Array.from(atob(base64), (each) => each.charCodeAt(0));
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([bytes], name, { type }));
    for (const event of ["dragover", "drop"]) {
        zone.dispatchEvent(new DragEvent(event, { dataTransfer, bubbles: true, cancelable: true }));
    }
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    chromium = require_chromium()
    environment = {**os.environ, **chromium.environment}
    with sync_playwright() as started:
        running = started.chromium.launch(executable_path=chromium.path, args=FLAGS, env=environment)
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


def drop(page: Any, name: str, media_type: str, content: bytes) -> None:
    zone = page.locator(".drop").element_handle()
    page.evaluate(DROP, [zone, [name, media_type, base64.b64encode(content).decode()]])


def drop_image(page: Any, png: bytes) -> None:
    drop(page, "strip.png", "image/png", png)
    page.locator(".drop img").wait_for()


def ask(page: Any) -> tuple[str, str]:
    """Ask about the image that was dropped; the request's id, and its whole answer."""
    with page.expect_response("**/v1/chat/completions") as answered:
        page.get_by_role("button", name="Ask", exact=True).click()
    page.locator('.answer[data-state="ended"]').wait_for()
    assert page.get_by_role("alert").count() == 0, page.locator(".answer").inner_text()
    return answered.value.headers["x-request-id"], str(page.locator(".answer .text").inner_text())


def wait_waterfall(page: Any, request_id: str, source: str) -> Any:
    """The waterfall of a request that has ended, as soon as it says that its item came from `source`."""
    from playwright.sync_api import TimeoutError as WaitTimeoutError  # where the package is missing: skipped

    waterfall = page.locator(f'.waterfall[data-of="{request_id}"]')
    waterfall.locator(".state.done").wait_for()
    try:
        waterfall.locator("[data-item] .facts", has_text=source).wait_for()
    except WaitTimeoutError:
        pytest.fail(f"no item came from {source!r}: {waterfall.inner_text()}")
    return waterfall


def test_an_image_is_dropped_answered_and_its_way_is_seen(
    page: Any, system: System, strips: ModuleType
) -> None:
    (strip,) = strips.held_out_strips(1, seed=81_000)  # no other test has asked about it
    for instance in ("gateway-0", "encoder-0", "prefill_decode-0"):
        page.locator(f'[data-instance="{instance}"] .dot.ready').wait_for()
    page.locator(".store .meter").wait_for()

    drop_image(page, strip.png)
    assert page.get_by_label("Question").input_value() == PROMPT, "the documents' example"
    first_id, answer = ask(page)
    waterfall = wait_waterfall(page, first_id, "encoder-0")
    assert waterfall.locator("[data-item] .bar.encode").count() == 1
    for stage in ("media", "sizes", "prefill", "stream"):
        assert waterfall.locator(f'[data-stage="{stage}"] .bar').count() >= 1, stage
    names = waterfall.locator(".row .label").all_inner_texts()
    assert len(names) == len(set(names)), names
    ticks = waterfall.locator(".tick").all_inner_texts()
    assert ticks[0] == "0", ticks
    assert 2 <= len(ticks) <= 7, ticks
    assert any(span.name == "encoder.encode" for span in system.trace(first_id, "encoder.encode"))

    second_id, again = ask(page)  # the same once more: known, and not encoded
    assert second_id != first_id
    assert wait_waterfall(page, second_id, "known here").locator("[data-item] .bar.encode").count() == 0
    avoided = [page.locator(f'tr[data-request="{each}"] td').nth(5) for each in (first_id, second_id)]
    assert [each.inner_text() for each in avoided] == ["0", "1"]
    page.locator(f'tr[data-request="{first_id}"]').click()
    wait_waterfall(page, first_id, "encoder-0")

    expected = system.ask([image_part(strip.png), {"type": "text", "text": PROMPT}]).text
    assert (answer, again) == (expected, expected)


def test_a_file_that_is_no_image_is_refused_and_nothing_is_sent(page: Any, strips: ModuleType) -> None:
    """Until it is removed or replaced: a question about it would be answered without it."""
    button = page.get_by_role("button", name="Ask", exact=True)
    drop(page, "notes.txt", "text/plain", b"no image")
    page.get_by_role("alert").filter(has_text="not an image; nothing is sent").wait_for()
    assert button.is_disabled()
    page.get_by_role("button", name="remove", exact=True).click()
    assert page.get_by_role("alert").count() == 0
    assert button.is_enabled()
    drop(page, "notes.txt", "text/plain", b"no image")
    assert button.is_disabled()
    drop_image(page, strips.held_out_strips(1, seed=81_001)[0].png)
    assert button.is_enabled()


def test_the_request_id_can_be_copied_and_the_api_documentation_found(page: Any, system: System) -> None:
    answer = system.ask("hello")
    page.locator(f'tr[data-request="{answer.request_id}"]').click()
    page.get_by_role("button", name="copy", exact=True).click()
    page.get_by_role("button", name="copied", exact=True).wait_for()
    question = page.get_by_label("Question")
    question.fill("")
    question.press("Control+V")
    assert question.input_value() == answer.request_id
    link = page.get_by_role("link", name="API documentation").evaluate("(link) => link.href")
    assert urlsplit(link).path == "/docs"
    assert httpx.get(link, trust_env=False).status_code == 200

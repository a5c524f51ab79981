"""The next turn of a conversation goes to the instance that decoded the last one, as long as it holds it."""

from typing import Any

from tests.integration.gateway.stages.conftest import Staged
from tests.support.gateway.media_samples import image_part
from tests.support.gateway.serving import MODEL

TEXT = {"type": "text", "text": "what is it"}


async def say(staged: Staged, messages: list[dict[str, Any]], text: str | None = None) -> None:
    """One turn; the answer, and `text` if there is some, are in `messages` afterwards."""
    answer = await staged.system.openai.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    if text is not None:
        messages.append({"role": "user", "content": text})


def sent(staged: Staged) -> tuple[int, int]:
    return len(staged.prefill.bodies), len(staged.decode.bodies)


async def test_a_new_turn_of_text_needs_no_prefill(staged: Staged) -> None:
    staged.decode.holds_items = True
    messages: list[dict[str, Any]] = [{"role": "user", "content": [image_part(3), TEXT]}]
    await say(staged, messages, "and then?")
    assert sent(staged) == (1, 1)
    await say(staged, messages, "and then?")
    await say(staged, messages)
    assert sent(staged) == (1, 3)
    assert "kv_transfer_params" not in staged.decode.bodies[-1]
    assert staged.decode.bodies[-1]["ec_transfer_params"]["items"]
    assert len(staged.system.encoder.jobs) == 1
    assert await staged.total("routes_total", way="decode", reason="prefix_held") == 2


async def test_what_it_holds_no_more_is_prefilled(staged: Staged) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": [image_part(3), TEXT]}]
    await say(staged, messages, "and then?")
    await say(staged, messages)
    assert sent(staged) == (2, 3)
    assert await staged.total("stage_retries_total", stage="decode", reason="prefix_not_held") == 1
    assert staged.prefill.kept == {}


async def test_a_new_item_is_prefilled(staged: Staged) -> None:
    staged.decode.holds_items = True
    messages: list[dict[str, Any]] = [{"role": "user", "content": [image_part(3), TEXT]}]
    await say(staged, messages)
    messages.append({"role": "user", "content": [image_part(4), TEXT]})
    await say(staged, messages)
    assert sent(staged) == (2, 2)


async def test_much_new_text_is_prefilled(staged: Staged) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    await say(staged, messages, "and then? " * 2000)
    await say(staged, messages)
    assert sent(staged) == (2, 2)

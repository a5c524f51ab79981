"""When a stage fails: what the caller sees, and that nothing is left."""

import asyncio
import time
from typing import Any

import openai
import pytest

from tests.integration.gateway.stages.conftest import Staged
from tests.integration.gateway.stages.test_two_stages import ANSWER, IMAGE, TEXT, WORDS, streamed
from tests.support.waiting import until


@pytest.mark.parametrize("behaviour", ["fail", "busy", "no_handover"])
async def test_another_prefills(staged: Staged, behaviour: str) -> None:
    other = await staged.another_prefill()
    staged.prefill.behaviour = behaviour
    answers = [await streamed(staged, [IMAGE, TEXT]) for _ in range(2)]
    assert answers == [ANSWER] * 2
    assert len(other.bodies) == 2
    assert len(staged.prefill.bodies) >= 1
    assert await staged.total("stage_retries_total", stage="prefill") >= 1


async def test_what_is_wrong_with_the_request_is_told(staged: Staged) -> None:
    await staged.another_prefill()
    staged.prefill.behaviour = staged.decode.prefills[1].behaviour = "refuse"
    with pytest.raises(openai.BadRequestError) as caught:
        await staged.system.ask("hello")
    assert caught.value.param == "max_tokens"
    assert sum(len(each.bodies) for each in staged.decode.prefills) == 1


@pytest.mark.parametrize(
    ("behaviour", "stream"),
    [
        *((each, is_stream) for each in ("lost", "lacks", "dead", "fail") for is_stream in (True, False)),
        ("error_first", True),
    ],
)
async def test_a_handover_that_fails_begins_again_at_others(
    staged: Staged, behaviour: str, stream: bool
) -> None:
    await staged.another_prefill()
    other = await staged.another_decode()
    staged.decode.behaviour = behaviour
    for number in range(2):
        content = [IMAGE, {"type": "text", "text": f"question {number}"}]
        if stream:
            assert await streamed(staged, content) == ANSWER
        else:
            answer = await staged.system.ask(content)
            assert answer.choices[0].message.content == ANSWER
    assert len(other.bodies) == 2
    assert await staged.total("stage_retries_total", stage="decode") >= 1


async def test_a_kv_cache_whose_lease_has_ended_is_made_again(staged: Staged) -> None:
    staged.prefill.before_answer.clear()
    asking = asyncio.ensure_future(streamed(staged, "hello"))
    await until(lambda: len(staged.prefill.bodies) == 1)
    lost = staged.prefill.kept
    staged.prefill.kept = _Forgetful(lost)
    staged.prefill.before_answer.set()
    assert await asking == WORDS
    assert len(staged.prefill.bodies) == 2


class _Forgetful(dict[str, list[Any]]):
    """Loses what is put into it first."""

    _has_lost = False

    def __setitem__(self, key: str, value: list[Any]) -> None:
        if self._has_lost:
            super().__setitem__(key, value)
        self._has_lost = True


@pytest.mark.parametrize("behaviour", ["lost", "lacks"])
async def test_the_number_of_tries_is_bounded(staged: Staged, behaviour: str) -> None:
    staged.decode.behaviour = behaviour
    with pytest.raises(openai.APIStatusError) as caught:
        await streamed(staged, [IMAGE, TEXT])
    assert (caught.value.status_code, caught.value.code) == (503, "handover_failed")
    assert len(staged.prefill.bodies) == 2


@pytest.mark.parametrize("staged", [{"suspect_s": 600.0}], indirect=True)
async def test_a_decode_instance_whose_engine_is_dead_is_avoided(staged: Staged) -> None:
    """By others, too: it has fewest requests."""
    other = await staged.another_decode()
    staged.decode.behaviour = other.behaviour = "dead"
    with pytest.raises(openai.APIStatusError) as caught:
        await streamed(staged, [IMAGE, TEXT])
    assert (caught.value.status_code, caught.value.code) == (503, "instance_unreachable")
    assert (len(staged.decode.bodies), len(other.bodies)) == (1, 1)
    assert await staged.total("stage_retries_total", stage="decode", reason="unreachable") == 2
    router, now = staged.system.gateway.router, time.monotonic()
    assert [router.is_suspect(each, now) for each in ("p-0", "d-0", "d-1")] == [False, True, True]


@pytest.mark.parametrize(
    ("behaviour", "code"), [("fail", "generation_failed"), ("no_handover", "handover_failed")]
)
async def test_a_request_that_fails_everywhere_makes_no_instance_suspect(
    staged: Staged, behaviour: str, code: str
) -> None:
    other = await staged.another_prefill()
    staged.prefill.behaviour = other.behaviour = behaviour
    with pytest.raises(openai.APIStatusError) as caught:
        await streamed(staged, "hello")
    assert (caught.value.status_code, caught.value.code) == (503, code)
    assert (len(staged.prefill.bodies), len(other.bodies)) == (1, 1)
    router, now = staged.system.gateway.router, time.monotonic()
    assert not any(router.is_suspect(each, now) for each in ("p-0", "p-1"))


async def test_what_a_draining_instance_did_not_take_another_decodes(staged: Staged) -> None:
    staged.decode.behaviour = "drains"
    other = await staged.another_decode()
    for _ in range(2):
        assert await streamed(staged, [IMAGE, TEXT]) == ANSWER
    assert (len(staged.prefill.bodies), len(other.taken), staged.prefill.kept) == (2, 2, {})
    assert len(staged.decode.bodies) >= 1


@pytest.mark.parametrize("staged", [{"first_token_timeout_s": 1.0}], indirect=True)
async def test_a_stream_that_shows_no_token_goes_on(staged: Staged) -> None:
    """As while reasoning is hidden, or a tool's call is put together: the engine generates."""
    staged.decode.behaviour = "quiet"
    chunks = aiter(await staged.system.ask("hello", stream=True))
    assert (await anext(chunks)).choices[0].delta.role == "assistant"
    staged.decode.release.set()
    words = [chunk.choices[0].delta.content or "" async for chunk in chunks]
    assert "".join(words).strip() == WORDS


@pytest.mark.parametrize("where", ["prefill", "decode", "stream"])
async def test_a_caller_that_leaves_ends_the_stage(staged: Staged, where: str) -> None:
    victim = staged.prefill if where == "prefill" else staged.decode
    victim.behaviour = "stall" if where == "stream" else "hang"
    asking = asyncio.ensure_future(streamed(staged, [IMAGE, TEXT]))
    await until(lambda: len(victim.bodies) == 1)
    if where == "stream":
        await until(lambda: staged.system.gateway.router.num_in_flight("d-0") == 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: victim.num_disconnects == 1)


@pytest.mark.parametrize("staged", [{"first_token_timeout_s": 0.5}], indirect=True)
async def test_a_prefill_that_takes_too_long(staged: Staged) -> None:
    staged.prefill.behaviour = "hang"
    with pytest.raises(openai.APIStatusError) as caught:
        await streamed(staged, "hello")
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    await until(lambda: staged.prefill.num_disconnects == 1)

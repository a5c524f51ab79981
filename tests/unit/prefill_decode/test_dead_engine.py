"""What a host answers to its requests once its engine is dead: 503, or nothing more."""

from typing import Any

import pytest

from triptych_prefill_decode.engine_health import DeadEngineMiddleware

START = {"type": "http.response.start", "status": 200, "headers": []}
TOKEN = {"type": "http.response.body", "body": b"data: token\n\n", "more_body": True}
ERROR = {"type": "http.response.body", "body": b'data: {"error": {}}\n\ndata: [DONE]\n\n', "more_body": False}


class Host:
    """An answer in three messages; the engine dies before the one with number `dies_at`."""

    def __init__(self, dies_at: int | None, *, raises: bool = False) -> None:
        self._dies_at = dies_at
        self._raises = raises
        self.is_dead = False
        self.sent: list[Any] = []

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        for number, message in enumerate((START, TOKEN, ERROR)):
            self.is_dead = self.is_dead or number == self._dies_at
            if self.is_dead and self._raises:
                raise RuntimeError("the engine is dead")
            await send(message)

    async def answer(self, kind: str = "http") -> list[Any]:
        async def send(message: Any) -> None:
            self.sent.append(message)

        async def receive() -> Any:
            raise AssertionError("not called here")

        await DeadEngineMiddleware(self.app, lambda: self.is_dead)({"type": kind}, receive, send)
        return self.sent


async def test_a_living_engine_answers_everything() -> None:
    assert await Host(dies_at=None).answer() == [START, TOKEN, ERROR]


async def test_before_the_answer_has_begun_it_is_503() -> None:
    start, body = await Host(dies_at=0).answer()
    assert start["status"] == 503
    assert (b"connection", b"close") in start["headers"]
    assert b'"engine_died"' in body["body"]  # the request may be at fault


async def test_a_request_that_comes_later_is_told_apart() -> None:
    host = Host(dies_at=0)
    host.is_dead = True
    _, body = await host.answer()
    assert b'"engine_dead"' in body["body"]


@pytest.mark.parametrize("dies_at", [1, 2])
async def test_an_answer_that_has_begun_breaks_off(dies_at: int) -> None:
    sent = await Host(dies_at).answer()
    assert sent == [START, TOKEN, ERROR][:dies_at]


async def test_what_is_raised_because_of_it_is_503_too() -> None:
    start, _ = await Host(dies_at=0, raises=True).answer()
    assert start["status"] == 503


async def test_what_is_raised_after_the_beginning_is_left_to_the_server() -> None:
    host = Host(dies_at=1, raises=True)
    with pytest.raises(RuntimeError):
        await host.answer()
    assert host.sent == [START]


async def test_what_is_not_http_passes() -> None:
    assert await Host(dies_at=0).answer(kind="lifespan") == [START, TOKEN, ERROR]

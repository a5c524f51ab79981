"""Whether an encoder that is missing may come back."""

import asyncio
from typing import Any

import pytest

from triptych_common.domain.errors import BusUnavailableError
from triptych_gateway.decision import redis_reads
from triptych_gateway.decision.redis_reads import EncoderReturn


class Registry:
    """`Registry`, of which one method is used."""

    def __init__(self, answer: bool | Exception | None) -> None:
        self.answer = answer  # None: none comes
        self.num_reads = 0

    async def had_encoder(self, namespace_digest: str) -> bool:
        self.num_reads += 1
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return bool(self.answer)


@pytest.mark.parametrize("answer", [True, False])
async def test_redis_is_asked_once_in_a_while(answer: bool) -> None:
    registry: Any = Registry(answer)
    known = EncoderReturn(registry)
    for _ in range(3):
        assert await known.may_return("a") is answer
    assert registry.num_reads == 1
    await known.may_return("b")
    assert registry.num_reads == 2


@pytest.mark.parametrize("answer", [None, BusUnavailableError("away")])
async def test_without_an_answer_an_encoder_may_come_back(
    answer: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_reads, "RETURN_LIMIT_S", 0.01)
    registry: Any = Registry(answer)
    assert await EncoderReturn(registry).may_return("a")


async def test_on_demand_an_encoder_may_always_come() -> None:
    registry: Any = Registry(answer=False)
    assert await EncoderReturn(registry, on_demand=True).may_return("a")
    assert registry.num_reads == 0

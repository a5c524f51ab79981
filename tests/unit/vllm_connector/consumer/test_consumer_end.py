"""The consumer: a request that ends, at any point, gives everything back and sends its acks."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.vllm_connector.fake_engine import FakeRequest, fake_request, metadata, pinned
from tests.support.vllm_connector.played_engine import IDLE, A, Engine
from triptych_common.protocol.messages import ItemAck, Preallocation


def abort_while_watching(engine: Engine, request: FakeRequest) -> list[tuple[str, Any]]:
    engine.consumer.admit_request(request, 0)
    return [("unwatch", A)]


def abort_while_pinned(engine: Engine, request: FakeRequest) -> list[tuple[str, Any]]:
    engine.consumer.admit_request(request, 0)
    engine.replies(A, pinned(A, 1))
    return [("unpin", 1)]


def abort_while_resident(engine: Engine, request: FakeRequest) -> list[tuple[str, Any]]:
    engine.consumer.admit_request(request, 0)
    engine.replies(A, pinned(A, 1))
    engine.loads(request, A)
    return []


@pytest.mark.parametrize("reach", [abort_while_watching, abort_while_pinned, abort_while_resident])
def test_an_abort_gives_everything_back(
    engine: Engine, reach: Callable[[Engine, FakeRequest], list[tuple[str, Any]]]
) -> None:
    request = fake_request("r1", [(A, 4)])
    engine.receives(metadata(A, ("wire-r1", 0)))
    expected = reach(engine, request)
    engine.pins.take(), engine.sender.take()
    engine.finish(request, 0)
    assert engine.pins.take() == expected
    assert engine.sender.take_short() == ["declined 0", "skipped 0"]
    assert engine.consumer.counts() == IDLE
    engine.finish(request, 0)  # twice is harmless
    assert engine.consumer.counts() == IDLE


@pytest.mark.parametrize("is_metadata_first", [True, False])
def test_a_request_that_ends_before_it_was_ever_admitted_declines(
    engine: Engine, is_metadata_first: bool
) -> None:
    request = fake_request("r1", [(A, 4)])
    if is_metadata_first:
        engine.receives(metadata(A, ("wire-r1", 0)))
    engine.finish(request, 0)
    if not is_metadata_first:
        engine.receives(metadata(A, ("wire-r1", 0)))
    messages = [message for _, message in engine.sender.take()]
    assert [type(message) for message in messages] == [Preallocation, ItemAck]
    assert messages[0].reason == "request_gone"  # type: ignore[attr-defined]
    assert engine.consumer.counts() == IDLE

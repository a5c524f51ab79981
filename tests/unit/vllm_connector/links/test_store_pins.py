"""Store pins over a fake session: commands, and replies with their item."""

from typing import Any

import pytest

from tests.support.vllm_connector.fake_engine import FakeStoreSession, mm_hash
from triptych_common.domain.errors import StoreUnavailableError
from triptych_vllm_connector.links.readable_pins import StorePins

A = mm_hash("a")


@pytest.fixture
def session() -> FakeStoreSession:
    return FakeStoreSession()


@pytest.fixture
def replies() -> list[Any]:
    return []


@pytest.fixture
def pins(session: FakeStoreSession, replies: list[Any]) -> StorePins:
    return StorePins(session, 2, lambda mm_hash, reply: replies.append((mm_hash, reply)))


def test_a_broken_session_comes_as_the_reply(
    pins: StorePins, session: FakeStoreSession, replies: list[Any]
) -> None:
    pins.pin_or_watch(A)
    error = StoreUnavailableError("gone")
    session.sent[0][1].set_exception(error)
    assert replies == [(A, error)]


def test_a_pin_ends_once_per_rank(pins: StorePins, session: FakeStoreSession) -> None:
    pins.unpin(7)
    pins.unwatch(A)
    assert [command.kind for command, _ in session.sent] == ["unpin", "unpin", "unwatch"]

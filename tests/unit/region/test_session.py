"""Requests, replies and pushes of one session, without a socket."""

import pytest

from triptych_common.domain.errors import MalformedMessageError, StoreProtocolError
from triptych_common.protocol.codec import FrameDecoder, decode_command, frame
from triptych_common.protocol.store import Done, Ping, StoreFailure, StoreStats, Unpin, Welcome, WriterLost
from triptych_common.region.session import SessionMatcher

HASH = "ab" * 32


@pytest.fixture
def matcher() -> SessionMatcher[str]:
    return SessionMatcher()


def test_each_command_has_a_seq_of_its_own(matcher: SessionMatcher[str]) -> None:
    data = matcher.stamp(Ping(seq=0), "a") + matcher.stamp(Unpin(seq=0, pin_id=3), "b")
    commands = [decode_command(body) for body in FrameDecoder().feed(data)]
    assert commands == [Ping(seq=1), Unpin(seq=2, pin_id=3)]
    assert matcher.num_pending == 2


def test_replies_in_any_order_and_any_pieces(matcher: SessionMatcher[str]) -> None:
    for name in "abc":
        matcher.stamp(Ping(seq=0), name)
    data = frame(Done(seq=3)) + frame(WriterLost(seq=0, mm_hash=HASH)) + frame(Done(seq=1))
    events = [event for n in range(len(data)) for event in matcher.feed(data[n : n + 1])]
    assert events == [("c", Done(seq=3)), (None, WriterLost(seq=0, mm_hash=HASH)), ("a", Done(seq=1))]
    assert matcher.take_pending() == ["b"]
    assert matcher.num_pending == 0


@pytest.mark.parametrize(
    "reply",
    [
        Done(seq=7),
        Done(seq=0),
        StoreFailure(seq=0, code="bad_frame", detail="no"),
        Welcome(seq=0, store="s", generation=1, region_path="", region_num_bytes=1, block_num_bytes=1),
    ],
)
def test_a_reply_to_nothing_ends_the_session(
    matcher: SessionMatcher[str], reply: Done | StoreFailure | StoreStats
) -> None:
    with pytest.raises(StoreProtocolError):
        list(matcher.feed(frame(reply)))


def test_bytes_that_are_no_reply(matcher: SessionMatcher[str]) -> None:
    with pytest.raises(MalformedMessageError):
        list(matcher.feed(b"\x00\x00\x00\x02{}"))
    with pytest.raises(MalformedMessageError):
        list(SessionMatcher[str]().feed(b"\xff\xff\xff\xff"))

"""A request whose video is in pieces: it begins with the first, and asks and replies for the video as one."""

from dataclasses import replace

import pytest

from tests.support.vllm_connector.fake_engine import (
    FakeRequest,
    fake_request,
    metadata,
    mm_hash,
    pinned,
    sealed,
    watching,
    writer_lost,
)
from tests.support.vllm_connector.played_engine import Engine
from triptych_common.protocol.messages import EncodeNeeded, ItemAck, Preallocation
from triptych_vllm_connector.consumer.overlap import OverlapPolicy
from triptych_vllm_connector.pieces import piece_hashes

VIDEO = mm_hash("d")
PIECES = piece_hashes(VIDEO, (3, 3, 3))
GAP = 4  # tokens of text in front of each, and behind it two


@pytest.fixture
def request_of_pieces() -> FakeRequest:
    request = fake_request("r1", [(each, 3) for each in PIECES], request_id="req-1", gap=GAP)
    request.mm_features = [replace(each, mm_hash=VIDEO) for each in request.mm_features]
    return request


def sent(engine: Engine) -> list[str]:
    """Kinds of messages about the video as a whole; none is about a piece."""
    found = []
    for _, message in engine.sender.take():
        assert isinstance(message, Preallocation | ItemAck | EncodeNeeded)
        assert (message.request_id, message.item_index, message.mm_hash) == ("req-1", 0, VIDEO)
        found.append(message.TYPE)
    return found


def test_prefill_begins_with_the_first_piece(engine: Engine, request_of_pieces: FakeRequest) -> None:
    consumer = engine.consumer
    consumer.use_overlap(OverlapPolicy(min_tokens=1))
    engine.receives(metadata(VIDEO, ("req-1", 0)))
    consumer.on_request_added(request_of_pieces)
    assert consumer.admit_request(request_of_pieces, 0), "the text in front of it"
    assert sent(engine) == ["Preallocation"]
    for each in PIECES:
        engine.replies(each, watching(each))
    computed = request_of_pieces.mm_features[0].mm_position.offset
    assert not consumer.admit_request(request_of_pieces, computed)
    for number, each in enumerate(PIECES):
        assert engine.receives(sealed(each, number + 1)) == ["r1"], "each piece wakes it"
        assert consumer.admit_request(request_of_pieces, computed)
        assert engine.loads(request_of_pieces, each) == [number + 1]
        computed = request_of_pieces.mm_features[number].mm_position.offset + 5
        consumer.on_item_computed("r1", number)
        assert sent(engine) == (["ItemAck"] if each == PIECES[-1] else []), "acked with the last"
        if each != PIECES[-1]:
            assert not consumer.admit_request(request_of_pieces, computed + GAP)
    engine.finish(request_of_pieces)
    assert sent(engine) == []
    assert set(consumer.counts().values()) == {0}


def test_a_gateway_is_asked_for_the_video(engine: Engine, request_of_pieces: FakeRequest) -> None:
    """The store has evicted some of its pieces, or their encoder died: the others are kept."""
    engine.consumer.admit_request(request_of_pieces, 0)
    engine.receives(metadata(VIDEO, ("req-1", 0)))
    assert sent(engine) == ["Preallocation"]
    engine.replies(PIECES[0], pinned(PIECES[0], 1))
    engine.replies(PIECES[1], watching(PIECES[1], writing=False))
    assert sent(engine) == ["EncodeNeeded"]
    engine.replies(PIECES[2], watching(PIECES[2]))
    engine.receives(writer_lost(PIECES[2]))
    assert sent(engine) == ["EncodeNeeded"]
    assert engine.receives(sealed(PIECES[1], 2)) == []
    assert engine.receives(sealed(PIECES[2], 3)) == ["r1"]
    assert engine.consumer.admit_request(request_of_pieces, 0)


def test_a_request_that_leaves_gives_every_piece_back(engine: Engine, request_of_pieces: FakeRequest) -> None:
    engine.consumer.admit_request(request_of_pieces, 0)
    engine.receives(metadata(VIDEO, ("req-1", 0)))
    engine.replies(PIECES[0], pinned(PIECES[0], 1))
    engine.replies(PIECES[1], watching(PIECES[1]))
    sent(engine)
    engine.finish(request_of_pieces, 0)
    assert sent(engine) == ["Preallocation", "ItemAck"], "declined and skipped, once"
    assert ("unpin", 1) in engine.pins.take()
    assert set(engine.consumer.counts().values()) == {0}

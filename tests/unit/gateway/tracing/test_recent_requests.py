"""The ring of recent requests: bounded, apart for each API key, and what a listener is told."""

import orjson
import pytest

from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import EncodeCompleted
from triptych_gateway.tracing.recent_requests import RecentRequest, RecentRequests
from triptych_gateway.tracing.timings import FirstTokenStages, ItemSource, ItemTiming, Stage

ALICE, BOB = "a" * 32, "b" * 32
ROUTE = "/v1/chat/completions"
BEGAN = 100.0


def begin(ring: RecentRequests, request_id: str, owner: str = ALICE) -> RecentRequest:
    return ring.begin_request(request_id, ROUTE, owner, FirstTokenStages(BEGAN))


def ids(requests: list[RecentRequest]) -> list[str]:
    return [each.request_id for each in requests]


def test_the_oldest_goes_when_the_ring_is_full() -> None:
    ring = RecentRequests(3, 1)
    for number in range(10):
        begin(ring, f"req-{number}")
    assert ids(ring.visible_to(None)) == ["req-7", "req-8", "req-9"]


async def test_a_listener_is_told_of_its_owners_requests_alone_and_once_of_many_changes() -> None:
    ring = RecentRequests(10, 2)
    with ring.listen(ALICE) as alice, ring.listen(None) as all_keys:
        own, other = begin(ring, "req-1", ALICE), begin(ring, "req-2", BOB)
        for _ in range(5):
            own.touch()
            other.touch()
        await alice.wait_changes(60)
        assert alice.take_changes() == [own]
        assert all_keys.take_changes() == [own, other]
        assert alice.take_changes() == []
        await alice.wait_changes(0.0)  # nothing new: it ends by its limit


async def test_a_listener_that_does_not_look_holds_no_more_than_the_ring() -> None:
    ring = RecentRequests(3, 1)
    with ring.listen(None) as listener:
        for number in range(100):
            begin(ring, f"req-{number}")
        assert ids(listener.take_changes()) == ["req-97", "req-98", "req-99"]


def test_what_a_request_is_at_follows_its_stages() -> None:
    request = begin(RecentRequests(3, 1), "req-1")
    states = [request.state]
    request.stages.end(Stage.BODY, 100.1)
    request.is_stream, request.num_items = True, 1
    states.append(request.state)
    request.model = "m"
    states.append(request.state)
    request.stages.end(Stage.MEDIA, 100.2)
    states.append(request.state)
    request.way = "remote"
    states.append(request.state)
    request.stages.end(Stage.SIZES, 100.3)
    states.append(request.state)
    request.first_token_at = BEGAN + request.stages.end_first_chunk(100.5, 100.6)
    states.append(request.state)
    request.end(200, 101.0)
    states.append(request.state)
    assert states == ["body", "queue", "media", "queue", "sizes", "prefill", "streaming", "done"]
    shown = request.as_json(now=500.0)
    assert (shown["first_token_ms"], shown["duration_ms"]) == (600.0, 1000.0)
    assert [each["stage"] for each in shown["stages"]] == [
        "body", "media", "sizes", "encode", "prefill", "stream",
    ]  # fmt: skip
    assert shown["stages"][0]["from_ms"] == 0.0
    assert shown["stages"][-1]["to_ms"] == 1000.0
    gaps = [b["from_ms"] - a["to_ms"] for a, b in zip(shown["stages"], shown["stages"][1:], strict=False)]
    assert gaps == [0.0] * 5


def test_its_json_is_made_once_per_change_for_all_that_look() -> None:
    request = begin(RecentRequests(3, 1), "req-1")
    first = request.as_fragment(now=BEGAN)
    assert request.as_fragment(now=BEGAN + 0.4) is first
    aged = request.as_fragment(now=BEGAN + 0.6)  # it runs, so its duration grows
    assert orjson.loads(orjson.dumps(aged))["duration_ms"] == 600.0
    request.model = "m"
    request.touch()
    changed = request.as_fragment(now=BEGAN + 0.7)
    assert orjson.loads(orjson.dumps(changed))["model"] == "m"
    request.end(200, BEGAN + 0.8)
    ended = request.as_fragment(now=BEGAN + 0.9)
    assert request.as_fragment(now=BEGAN + 1000) is ended
    assert orjson.loads(orjson.dumps(ended)) == request.as_json(BEGAN + 1000)


@pytest.mark.parametrize(
    ("status", "state"), [(200, "done"), (400, "refused"), (499, "left"), (500, "failed"), (503, "failed")]
)
def test_how_a_request_has_ended(status: int, state: str) -> None:
    request = begin(RecentRequests(3, 1), "req-1")
    request.end(status, 101.0)
    request.end(200, 102.0)  # the first call counts
    assert (request.state, request.status, request.ended_at) == (state, status, 101.0)


def test_avoided_encodes_are_counted_at_the_end() -> None:
    ring = RecentRequests(3, 1)
    request = begin(ring, "req-1")
    request.num_items, request.way = 5, "remote"
    request.items = {
        MmHash("1" * 64): ItemTiming("image", 1, source=ItemSource.ENCODED),
        MmHash("2" * 64): ItemTiming("image", 1, source=ItemSource.MEMORY, num_places=2),
        MmHash("3" * 64): ItemTiming("image", 1, source=ItemSource.STORE),
        MmHash("4" * 64): ItemTiming("image", 1),
    }
    assert request.avoided == {"repeated": 1, "memory": 1, "store": 1}
    assert not ring.avoided
    request.end(200, 101.0)
    assert (ring.num_requests, ring.num_items, ring.avoided.total()) == (1, 5, 3)


def test_an_instance_that_encodes_itself_avoids_nothing() -> None:
    request = begin(RecentRequests(3, 1), "req-1")
    request.way = "local"
    request.items = {MmHash("1" * 64): ItemTiming("image", 1, source=ItemSource.MEMORY)}
    assert not request.avoided


def test_a_seal_counts_for_those_that_asked_for_it_also_after_their_end() -> None:
    ring = RecentRequests(3, 1)
    asked, joined, knew = begin(ring, "req-1"), begin(ring, "req-2"), begin(ring, "req-3")
    mm_hash = MmHash("1" * 64)
    asked.items = {mm_hash: ItemTiming("image", 1, source=ItemSource.ENCODED, ordered_at=BEGAN)}
    joined.items = {mm_hash: ItemTiming("image", 1, source=ItemSource.JOINED)}
    knew.items = {mm_hash: ItemTiming("image", 1, source=ItemSource.MEMORY)}
    asked.end(200, 101.0)
    with ring.listen(None) as listener:
        ring.on_encode_result(
            EncodeCompleted(job_id="job-1", mm_hash=mm_hash, encoder="encoder-1", encode_s=0.2)
        )
        assert listener.take_changes() == [asked, joined]
    assert [each.items[mm_hash].encoder for each in (asked, joined, knew)] == ["encoder-1", "encoder-1", ""]
    assert knew.items[mm_hash].sealed_at is None


def test_the_store_may_be_found_to_have_it_after_the_requests_end() -> None:
    ring = RecentRequests(3, 1)
    request, mm_hash = begin(ring, "req-1"), MmHash("1" * 64)
    request.way, request.num_items = "remote", 1
    request.items = {mm_hash: ItemTiming("image", 1, source=ItemSource.ENCODED, ordered_at=BEGAN)}
    request.end(200, 101.0)
    assert not ring.avoided
    ring.on_encode_result(EncodeCompleted(job_id="job-1", mm_hash=mm_hash, encoder="encoder-1", encode_s=0))
    assert ring.avoided == request.avoided == {"store": 1}

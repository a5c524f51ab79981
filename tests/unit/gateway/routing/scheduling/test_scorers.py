"""Each scorer: from 0 to 1, one score for each candidate, in their order."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.gateway.routing import candidate, request
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import Compute, Sharing
from triptych_gateway.routing.scheduling.candidates import RoutingRequest
from triptych_gateway.routing.scheduling.profiles import (
    NUM_BYTES,
    SCORERS,
    score_hardware,
    score_kv,
    score_lora,
    score_media,
    score_media_near,
    score_prefix,
    score_queue,
    score_session,
    score_tokens,
)

ASKED = request(b"text" * 100, items=("h1", "h2"), session="s", num_prompt_bytes=400)
NAMES = ("a", "b", "c")

A, B = MmHash("a" * 64), MmHash("b" * 64)


def multiprocessors(number: int) -> dict[str, Any]:
    return {"compute": Compute(sharing=Sharing.MPS, num_multiprocessors=number), "num_slots": 1}


def test_prefix() -> None:
    known = [candidate("a", prefix_share=lambda prompt: prompt.num_bytes / 800), candidate("b")]
    assert score_prefix(ASKED, known) == [0.5, 0.0]
    known = [
        candidate("a", prefix_share=lambda prompt: 0.24),
        candidate("b", prefix_share=lambda prompt: 0.25),
    ]
    assert score_prefix(ASKED, known) == [0.0, 0.25], "a beginning that all have does not count"


def test_session_is_one_instance_and_others_stay_when_one_leaves() -> None:
    everyone = [candidate(name) for name in NAMES]
    sessions = [request(session=f"s{number}") for number in range(300)]
    owners = [score_session(each, everyone) for each in sessions]
    assert all(sorted(scores) == [0.0, 0.0, 1.0] for scores in owners)
    shares = [sum(scores[index] for scores in owners) for index in range(3)]
    assert all(60 < share < 140 for share in shares), shares
    left = [score_session(each, everyone[:2]) for each in sessions]
    assert all(new == old[:2] for new, old in zip(left, owners, strict=True) if not old[2])
    assert score_session(request(), everyone) == [0.0, 0.0, 0.0]


def test_media() -> None:
    known = [candidate("a", holds_item={"h1"}.__contains__), candidate("b", holds_item=lambda item: True)]
    assert score_media(ASKED, known) == [0.5, 1.0]
    assert score_media(request(items=("h1", "h1")), known) == [1.0, 1.0]
    assert score_media(request(), known) == [0.0, 0.0]


def test_queue_goes_by_what_there_is_beyond_the_fewest() -> None:
    known = [
        candidate(name, num_requests=100 + number) for name, number in zip(NAMES, (0, 2, 50), strict=True)
    ]
    assert score_queue(ASKED, known) == [1.0, 0.75, 0.0]


def test_media_near() -> None:
    known = [candidate("a", {"store": "store-a"}), candidate("b", {"store": "store-b"}), candidate("c")]
    at = {"store-a": {A, B}, "store-b": {B, MmHash("9" * 64)}}
    asked = RoutingRequest("m", items=(A, B, A), items_at=at)
    assert score_media_near(asked, known) == [1.0, 0.5, 0.0]
    assert score_media_near(RoutingRequest("m", items=(A, B)), known) == [0.0] * 3, "one store"
    assert score_media_near(RoutingRequest("m", items_at=at), known) == [0.0] * 3


def test_kv() -> None:
    known = [candidate("a", kv_usage=0.25), candidate("b", kv_usage=1.0), candidate("c")]
    assert score_kv(ASKED, known) == [0.75, 0.0, 1.0]


def test_lora() -> None:
    known = [candidate("a", used_adapter={"french"}.__contains__), candidate("b")]
    assert score_lora(request(model="french"), known) == [1.0, 0.0]
    assert score_lora(request(model="m"), known) == [1.0, 1.0]


def test_hardware() -> None:
    slots = [candidate("a", {"num_slots": 64}), candidate("b", {"num_slots": 16})]
    assert score_hardware(ASKED, slots) == [1.0, 0.25]
    gpus = [candidate("a", multiprocessors(132)), candidate("b", multiprocessors(66))]
    assert score_hardware(ASKED, gpus) == [1.0, 0.5]
    assert score_hardware(ASKED, [gpus[1], slots[0]]) == [1 / 64, 1.0], "by slots, where one says no more"
    assert score_hardware(ASKED, [candidate("a"), candidate("b")]) == [1.0, 1.0]


def test_tokens() -> None:
    known = [
        candidate(name, num_prompt_bytes=size)
        for name, size in zip(NAMES, (9, 9 + NUM_BYTES // 2, 10**9), strict=True)
    ]
    assert score_tokens(ASKED, known) == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize("asked", [ASKED, RoutingRequest("m"), request(model="french")])
def test_scores_are_from_0_to_1(name: str, asked: RoutingRequest) -> None:
    share: Callable[[object], float] = lambda prompt: 1.0  # noqa: E731
    known = [
        candidate("a"),
        candidate("b", num_requests=10**6, num_prompt_bytes=10**12, kv_usage=1.0, prefix_share=share),
        candidate("c", {"num_slots": 10**6}, holds_item=lambda item: True, kv_usage=0.0),
    ]
    scores = SCORERS[name](asked, known)
    assert len(scores) == len(known)
    assert all(0.0 <= score <= 1.0 for score in scores), scores

"""The model of the protocol must notice when overlap is wrong: each of these breaks it on purpose."""

from dataclasses import replace

import pytest

from tests.property.protocol.test_protocol_mutations import (
    LARGE,
    SHARED,
    Mutation,
    _parts_to_any_request,
    assert_noticed,
    empty,
    nothing,
    yes,
)
from tests.support.protocol_world.kv_room import KvRoom
from triptych_vllm_connector.consumer.item_grants import ItemGrants
from triptych_vllm_connector.consumer.preallocator import Preallocator
from triptych_vllm_connector.scheduler.partial_preemption import PartialRequests

OVERLAP = replace(
    SHARED,
    requests=((0, 1), (1, 0), (2,)),
    rows=(2, 2, 2),
    budget=12,
    overlap=True,
    num_kv_blocks=22,
    max_faults=0,
)
STALLED = replace(OVERLAP, requests=((0, 1), (1, 0), (2,), (3,)), rows=(2, 2, 2, 2))
"""One request more, so that more of them stall at a time: about one walk in 30 comes to where it matters."""
LARGE_OVERLAP = replace(LARGE, overlap=True)


MUTATIONS: dict[str, Mutation] = {
    "parts of requests are granted to any request": Mutation(
        Preallocator, "preallocate", _parts_to_any_request, LARGE_OVERLAP
    ),
    "no stalled request is woken": Mutation(ItemGrants, "_wake_if_ready", nothing, OVERLAP),
    "requests that miss an item may hold all of the KV cache": Mutation(
        PartialRequests, "may_begin", yes, OVERLAP
    ),
    "stalled requests keep their KV blocks from those that can run": Mutation(
        KvRoom, "victims", empty, STALLED
    ),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_model_notices_that(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_noticed(MUTATIONS[name], monkeypatch)

"""Requests that hold parts of what they need, and a store that has no room for the rest."""

from dataclasses import replace
from typing import Any

import pytest

from tests.property.protocol.test_protocol_model import OVERLAP, SHARED
from tests.property.protocol.test_protocol_mutations import Mutation, assert_noticed
from tests.support.protocol_world.config import Config
from tests.support.protocol_world.random_walk import walk
from triptych_cache_store.entries.space import Space

FIVE = replace(OVERLAP, requests=((0, 1), (2, 3), (4,)), rows=(2,) * 5)  # in a store of four blocks
SIX = replace(SHARED, requests=((0, 1), (2, 3), (4, 5)), rows=(2,) * 6, num_blocks=3)
RESERVE = replace(SIX, num_reserve_blocks=2)  # as much as prefill_decode grants at once
LARGE_BUDGET = replace(
    SIX, budget=12, num_reserve_blocks=2, is_tight=True
)  # all are granted, and take it all
NUM_WALKS = 25
SYSTEMS = {
    "one item more than the store has room for": FIVE,
    "likewise, without overlap": replace(FIVE, overlap=False),
    "half of each request fills the store, but for the reserve": RESERVE,
}


def outcomes(config: Config) -> set[str | None]:
    found: set[str | None] = set()
    for seed in range(NUM_WALKS):
        found |= {each.outcome for each in walk(config, seed, 0.0).requests.values()}
    return found


@pytest.mark.parametrize("name", SYSTEMS)
def test_all_are_answered_as_soon_as_an_encoder_asks_again(name: str) -> None:
    """No wait lasts until a limit: the walk's end holds it."""
    assert outcomes(SYSTEMS[name]) == {"answer"}


def test_parts_of_granted_requests_that_fill_the_store_end_at_the_encoders_deadline() -> None:
    """Each holds what another needs: one of them fails, the others go on, and nothing is kept."""
    assert outcomes(LARGE_BUDGET) == {"answer", "store_full"}


def _keeps_no_reserve(self: Space, num_blocks: int, *, may_use_reserve: bool) -> bool:
    return self.num_available_blocks >= num_blocks


def test_the_model_notices_that_the_reserve_is_for_anyone(monkeypatch: pytest.MonkeyPatch) -> None:
    mutant: Any = _keeps_no_reserve
    assert_noticed(Mutation(Space, "may_take", mutant, RESERVE), monkeypatch)

"""From where an item may be taken: living places of all its entries, the best first."""

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from tests.support.gateway.routing import record_of
from triptych_common.domain.hashing import entry_hashes
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import FabricEndpoint, InstanceRecord, Role
from triptych_common.protocol.transfers import EntryPlace
from triptych_gateway.locality.item_places import ItemPlace
from triptych_gateway.transfers.fabric_view import FabricView, LinkRates
from triptych_gateway.transfers.next_step import TransferSource, find_sources

A = MmHash("a" * 64)
TARGET = "store-t"


def agent(store: str, generation: int = 1, **fields: Any) -> InstanceRecord:
    endpoint = FabricEndpoint(host="10.0.0.1", port=7420, generation=generation)
    return record_of(f"fabric-{store}", role=Role.FABRIC, store=store, fabric=endpoint, **fields)


@dataclass
class Records:
    """Of `RegistryView`, what a `FabricView` reads."""

    records: tuple[InstanceRecord, ...] = field(
        default_factory=lambda: tuple(agent(each) for each in ("store-1", "store-2", TARGET))
    )


@pytest.fixture
def view() -> Records:
    return Records()


@pytest.fixture
def fabric(view: Records) -> FabricView:
    return FabricView(cast("Any", view))


def at(store: str, generation: int = 1, num_bytes: int = 100) -> EntryPlace:
    return EntryPlace(store=store, generation=generation, num_bytes=num_bytes)


def made_at(store: str, *, is_sealed: bool, pieces: tuple[int, ...] = ()) -> ItemPlace:
    return ItemPlace(A, store, 700, 7, pieces, is_sealed, "job-1")


def stores(
    fabric: FabricView,
    known: ItemPlace | None = None,
    *places: EntryPlace,
    rates: LinkRates | None = None,
    now: float = 0.0,
) -> list[str]:
    found = find_sources(TARGET, known, {A: places}, (A,), fabric, rates or LinkRates(), now)
    return [each.store for each in found]


def test_places_of_another_life_are_none(fabric: FabricView, view: Records) -> None:
    assert stores(fabric, None, at("store-1"), at("store-2", 2)) == ["store-1"]
    view.records = (agent("store-2", 2),)
    assert stores(fabric, None, at("store-1"), at("store-2", 2)) == ["store-2"]


def test_the_target_itself_comes_first(fabric: FabricView) -> None:
    assert stores(fabric, made_at("store-1", is_sealed=True), at(TARGET))[0] == TARGET
    assert stores(fabric, made_at(TARGET, is_sealed=False), at("store-1")) == [TARGET, "store-1"]


def test_what_is_sealed_comes_before_what_is_being_made(fabric: FabricView) -> None:
    assert stores(fabric, made_at("store-1", is_sealed=False), at("store-2")) == ["store-2", "store-1"]
    assert stores(fabric, made_at("store-1", is_sealed=False)) == ["store-1"]


def test_links_that_failed_come_last_and_fast_ones_first(fabric: FabricView) -> None:
    rates = LinkRates()
    for second in range(5):
        rates.observe(("store-1", TARGET), 1_000_000, 1.0, float(second))
        rates.observe(("store-2", TARGET), 1_000_000, 0.1, float(second))
    both = (at("store-1", num_bytes=1_000_000), at("store-2", num_bytes=1_000_000))
    assert stores(fabric, None, *both, rates=rates, now=5.0) == ["store-2", "store-1"]
    rates.avoid(("store-2", TARGET), 5.0)
    assert stores(fabric, None, *both, rates=rates, now=5.0) == ["store-1", "store-2"]


@pytest.mark.parametrize("gone", [(), (agent("store-1", draining=True),)])
def test_a_store_whose_agent_takes_no_orders_comes_last(
    fabric: FabricView, view: Records, gone: tuple[InstanceRecord, ...]
) -> None:
    view.records = (*gone, agent("store-2"), agent(TARGET))
    assert stores(fabric, made_at("store-1", is_sealed=True), at("store-2")) == ["store-2", "store-1"]


def test_a_place_of_some_pieces_is_none(fabric: FabricView) -> None:
    first, second = entry_hashes(A, (3, 4))
    places = {first: (at("store-1"), at("store-2")), second: (at("store-1"),)}
    found = find_sources(TARGET, None, places, (first, second), fabric, LinkRates(), 0.0)
    assert found == [TransferSource("store-1", 200, is_sealed=True, is_new=False)]


def test_bytes_of_pieces_are_in_proportion_to_their_rows() -> None:
    place = made_at("store-1", is_sealed=True, pieces=(3, 4))
    assert place.entry_bytes() == (300, 400)
    assert place.entries == entry_hashes(A, (3, 4))
    assert made_at("store-1", is_sealed=True).entry_bytes() == (700,)


def test_one_store_is_no_fabric(view: Records, fabric: FabricView) -> None:
    assert fabric.are_apart
    view.records = (record_of("pd-0", store="store-1"), record_of("pd-1"), agent("store-1", draining=True))
    assert not fabric.are_apart
    assert fabric.store_of("pd-0") == "store-1"
    assert fabric.store_of("pd-1") is None
    assert fabric.agent_of("store-1") is None, "it is about to end"
    assert fabric.generation_of("store-1") == 1

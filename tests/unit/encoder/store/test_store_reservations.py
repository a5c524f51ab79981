"""What is reserved and pinned has one owner, whatever comes in between."""

import asyncio
from typing import Any

import pytest

from tests.support.encoder.encoder_bench import HASH, FakeStoreClient
from triptych_common.protocol.store import SHM, AlreadySealed, Reserved, TensorSpec
from triptych_encoder.store.store_reservations import StoreReservations

SPEC = TensorSpec.model_validate({"shape": (3, 4), "dtype": "float32", "num_bytes": 48})


async def memories() -> list[str]:
    return [SHM]


@pytest.fixture
def store_client() -> FakeStoreClient:
    return FakeStoreClient()


def reserve(store_client: Any, deadline: float = float("inf")) -> Any:
    reservations = StoreReservations(store_client, memories)
    return reservations.reserve_item(HASH, SPEC, is_granted=False, deadline=deadline)


async def test_a_seal_between_two_looks_is_not_lost(store_client: FakeStoreClient) -> None:
    """Sealed, evicted before our watch, sealed again before we could reserve: the push brought our pin."""
    reserve_blocks = store_client.reserve_blocks

    async def sealed_meanwhile(*args: Any, **options: Any) -> Reserved | AlreadySealed:
        if store_client.futures:
            store_client.pin(store_client.futures[0])
            store_client.is_sealed = True
        return await reserve_blocks(*args, **options)

    store_client.answers = ["already sealed"]
    store_client.reserve_blocks = sealed_meanwhile  # type: ignore[method-assign]
    reservation, pin = await reserve(store_client)
    assert isinstance(reservation, AlreadySealed)
    assert pin.result() == 1
    assert store_client.num_pins == 1, "a second pin would have no owner"


async def test_a_cancel_between_reservation_and_watch_gives_the_blocks_back(
    store_client: FakeStoreClient,
) -> None:
    is_watching = asyncio.Event()

    async def hang(mm_hash: str, timeout_s: float) -> Any:
        is_watching.set()
        await asyncio.Event().wait()

    store_client.watch_item = hang  # type: ignore[method-assign]
    task = asyncio.ensure_future(reserve(store_client))
    await is_watching.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store_client.unwatched == [(HASH, 1)]


@pytest.mark.parametrize("is_sealed", [False, True])
async def test_what_is_given_back_is_all_of_it(store_client: FakeStoreClient, is_sealed: bool) -> None:
    reservation, pin = await reserve(store_client)
    if is_sealed:
        store_client.pin(pin)
    StoreReservations(store_client, memories).give_back(HASH, reservation, pin)
    assert store_client.unwatched == ([] if is_sealed else [(HASH, 1)])
    assert (store_client.ended_pins, store_client.cancelled) == (([1], [1]) if is_sealed else ([], []))

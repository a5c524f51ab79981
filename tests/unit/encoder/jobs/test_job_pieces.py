"""A job whose item is in pieces: reserved together, encoded and sealed in order, one item to all others."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.encoder.encoder_bench import HASH, Bench, FakeStoreClient, delivery_of
from tests.support.item_records import item_record
from triptych_common.domain.errors import StoreError, StoreFullError
from triptych_common.protocol.messages import EncodeJob, FailureKind
from triptych_common.protocol.store import AlreadySealed, Reserved, TensorSpec
from triptych_encoder.encoding import EncodeRefusedError, PreparedItem
from triptych_encoder.store.store_reservations import StoreReservations
from triptych_vllm_connector.pieces import piece_hashes
from triptych_vllm_connector.step_orders import WriteOrder

ROWS = (4, 2, 3)
PIECES = piece_hashes(HASH, ROWS)
KEY = ("req-1", 0)


class PiecesStore(FakeStoreClient):
    """A store of several items, each sealed by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.sealed: set[str] = set()
        self.reserved: list[str] = []
        self.watches: dict[str, asyncio.Future[int]] = {}
        self.is_tight = False  # each reservation evicts what is not pinned

    async def find_sealed(self, mm_hashes: Sequence[str], timeout_s: float) -> set[str]:
        return self.sealed & set(mm_hashes)

    async def reserve_blocks(
        self, mm_hash: str, spec: TensorSpec, **options: Any
    ) -> Reserved | AlreadySealed:
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        if mm_hash in self.sealed:
            return AlreadySealed(seq=1, spec=spec)
        self.reserved.append(mm_hash)
        if self.is_tight:
            self.sealed &= self.watches.keys()  # those are pinned
        return Reserved(seq=1, reservation_id=len(self.reserved), offset=0, generation=1)

    async def watch_item(self, mm_hash: str, timeout_s: float) -> "asyncio.Future[int]":
        future = self.watches[mm_hash] = asyncio.get_running_loop().create_future()
        if mm_hash in self.sealed:
            self.pin(future)
        return future

    async def seal(self, order: WriteOrder) -> None:
        self.sealed.add(order.mm_hash)
        future = self.watches.get(order.mm_hash)
        if future is not None and not future.done():
            self.pin(future)

    def unwatch_item(self, mm_hash: str, reservation_id: int | None) -> None:
        self.unwatched.append((mm_hash, reservation_id))
        self.watches.pop(mm_hash, None)


@pytest.fixture
def store() -> PiecesStore:
    return PiecesStore()


@pytest.fixture
def bench(store: PiecesStore) -> Bench:
    bench = Bench()
    runner: Any = bench.runner
    bench.store_client = store
    runner._store_client = store
    runner._reservations = StoreReservations(store, runner._reservations._memories)

    async def preprocess(job: EncodeJob, media: bytes) -> PreparedItem:
        record = item_record(sum(ROWS)).model_copy(update={"pieces": ROWS})
        pieces = tuple(PreparedItem({}, rows, rows + 2, bench.engine.width, record) for rows in ROWS)
        return PreparedItem({}, sum(ROWS), sum(ROWS) + 2, bench.engine.width, record, pieces)

    bench.engine.preprocess = preprocess  # type: ignore[method-assign]
    bench.engine.on_encode = store.seal
    return bench


async def test_pieces_are_encoded_in_order_and_reported_as_one_item(bench: Bench, store: PiecesStore) -> None:
    async def encode(order: WriteOrder) -> None:
        assert store.reserved == PIECES, "all are reserved before the first is encoded"
        assert store.sealed == set(PIECES[: PIECES.index(order.mm_hash)]), "one is sealed after the other"
        await store.seal(order)

    bench.engine.on_encode = encode
    await bench.run(delivery_of())
    orders = bench.engine.orders
    assert [(order.mm_hash, order.num_embeds) for order in orders] == list(zip(PIECES, ROWS, strict=True))
    assert len({order.job_id for order in orders}) == len(ROWS), "vLLM takes no name twice"
    assert bench.reporter.kinds == ["EncoderCacheMetadata", "EncodeCompleted"]
    metadata, completed = bench.reporter.sent
    assert (metadata.mm_hash, metadata.num_embeds, metadata.record.pieces) == (HASH, sum(ROWS), ROWS)
    assert completed.mm_hash == HASH
    assert bench.runner.num_encodes == 1
    assert bench.ledger.remove_requesters(HASH, {KEY}) == [1, 2, 3], "the pins of all pieces"


async def test_pieces_that_are_there_are_not_encoded_again(bench: Bench, store: PiecesStore) -> None:
    """Another encoder made them, and died; or the store has evicted the others."""
    store.sealed |= {PIECES[0], PIECES[2]}
    await bench.run(delivery_of())
    assert [order.mm_hash for order in bench.engine.orders] == [PIECES[1]]
    assert not bench.reporter.sent[0].sealed
    assert len(bench.ledger.remove_requesters(HASH, {KEY})) == len(ROWS)


async def test_an_item_of_which_all_pieces_are_there_is_sealed(bench: Bench, store: PiecesStore) -> None:
    store.sealed |= set(PIECES)
    await bench.run(delivery_of())
    assert bench.engine.orders == []
    assert bench.reporter.sent[0].sealed


async def test_making_a_missing_piece_does_not_evict_those_that_are_there(
    bench: Bench, store: PiecesStore
) -> None:
    store.sealed |= {PIECES[1], PIECES[2]}
    store.is_tight = True
    await bench.run(delivery_of())
    assert store.reserved == [PIECES[0]]
    assert [order.mm_hash for order in bench.engine.orders] == [PIECES[0]]
    assert bench.ledger.remove_requesters(HASH, {KEY}) == [3, 1, 2], "in the order of the pieces"


async def test_pieces_that_never_fit_together_are_refused_before_anything_is_evicted(
    bench: Bench, store: PiecesStore
) -> None:
    store.capacity = sum(ROWS) * bench.engine.width * 4 - 1
    await bench.run(delivery_of())
    assert store.reserved == []
    assert bench.reporter.kinds == [FailureKind.TOO_LARGE]


async def test_pieces_that_just_fit_together_are_encoded(bench: Bench, store: PiecesStore) -> None:
    store.capacity = sum(ROWS) * bench.engine.width * 4
    await bench.run(delivery_of())
    assert bench.reporter.kinds == ["EncoderCacheMetadata", "EncodeCompleted"]


async def test_without_room_for_all_pieces_none_is_held(bench: Bench, store: PiecesStore) -> None:
    store.answers = [None, StoreFullError("full", "no room"), None, None, StoreFullError("full", "no room")]
    await bench.run(delivery_of())
    assert store.reserved == [PIECES[0], PIECES[0], PIECES[1], *PIECES]
    assert store.unwatched == [(PIECES[0], 1), (PIECES[0], 2), (PIECES[1], 3)]
    assert bench.reporter.kinds[-1] == "EncodeCompleted"


@pytest.mark.parametrize("number", range(len(ROWS)))
async def test_a_piece_that_is_refused_fails_the_item_and_frees_the_others(
    bench: Bench, store: PiecesStore, number: int
) -> None:
    async def encode(order: WriteOrder) -> None:
        if order.mm_hash == PIECES[number]:
            raise EncodeRefusedError("the tower raised")
        await store.seal(order)

    bench.engine.on_encode = encode
    await bench.run(delivery_of())
    assert bench.reporter.kinds == ["EncoderCacheMetadata", FailureKind.ENCODER_ERROR]
    assert store.ended_pins == list(range(1, number + 1)), "of the pieces before it"
    assert store.unwatched == [(each, PIECES.index(each) + 1) for each in PIECES[number:]], (
        "of it, and behind it"
    )
    assert len(bench.ledger) == 0


async def test_a_piece_whose_blocks_are_lost_is_not_encoded(bench: Bench, store: PiecesStore) -> None:
    async def encode(order: WriteOrder) -> None:
        await store.seal(order)
        store.watches[PIECES[1]].set_exception(StoreError("unknown_reservation", "the writer went away"))

    bench.engine.on_encode = encode
    await bench.run(delivery_of())
    assert [order.mm_hash for order in bench.engine.orders] == [PIECES[0]]
    assert bench.reporter.kinds == ["EncoderCacheMetadata", FailureKind.ENCODER_ERROR]
    assert store.ended_pins == [1]


async def test_a_job_that_is_cancelled_between_two_pieces_holds_nothing(
    bench: Bench, store: PiecesStore
) -> None:
    is_at_second = asyncio.Event()

    async def encode(order: WriteOrder) -> None:
        if order.mm_hash == PIECES[1]:
            is_at_second.set()
            await asyncio.Event().wait()
        await store.seal(order)

    bench.engine.on_encode = encode
    delivery = delivery_of()
    bench.publish(delivery)
    running = asyncio.get_running_loop().create_task(bench.runner.run(delivery))
    await is_at_second.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert delivery.num_hand_backs == 1
    assert store.ended_pins == [1]
    # The second one's blocks are the worker's, which may still write them.
    assert store.unwatched == [(PIECES[1], None), (PIECES[2], 3)]

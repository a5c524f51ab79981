"""A tensor goes from one session to another through a real daemon and real shared memory."""

import gc
import stat
import threading
from collections.abc import Callable

import pytest
import torch

from tests.integration.cache_store.samples import mapping_of, put
from tests.support.stores import PushLog, StoreProcess
from triptych_common.domain.errors import (
    ItemTooLargeError,
    NotOwnerError,
    StoreFullError,
    StoreUnavailableError,
    UnknownHandleError,
)
from triptych_common.protocol.store import (
    AlreadySealed,
    Cancel,
    Done,
    EntrySealed,
    Evict,
    Pinned,
    PinOrWatch,
    Reserve,
    Reserved,
    Seal,
    StoreReply,
    TensorSpec,
    Unpin,
    Watching,
    WriterLost,
)
from triptych_common.region.tensor_view import address_range, tensor_spec, tensor_view
from triptych_common.store_session import AsyncStoreSession, StoreSession

HASH = "ab" * 32


def reserve(session: StoreSession, mm_hash: str, spec: TensorSpec, **fields: str) -> StoreReply:
    return session.request(Reserve(seq=0, mm_hash=mm_hash, spec=spec, **fields))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_view_is_the_tensor_and_lies_in_the_mapping(daemon: StoreProcess, dtype: torch.dtype) -> None:
    producer, consumer = daemon.connect("encoder-0/worker-0"), daemon.connect("pd-0/engine")
    tensor = torch.randn(300, 128).to(dtype)
    put(producer, HASH, tensor)
    pinned = consumer.request(PinOrWatch(seq=0, mm_hash=HASH))
    assert isinstance(pinned, Pinned)
    mapping = mapping_of(consumer)

    view = tensor_view(mapping, pinned.descriptor)

    assert view.shape == (300, 128)
    assert torch.equal(view, tensor)
    first, last = address_range(view)
    assert first == mapping.address + pinned.descriptor.offset
    assert last <= mapping.address + mapping.num_bytes
    assert first % 4096 == 0


def test_writing_takes_any_strides(daemon: StoreProcess) -> None:
    producer = daemon.connect("encoder-0/worker-0")
    tensor = torch.randn(64, 32).t()
    put(producer, HASH, tensor)
    pinned = producer.request(PinOrWatch(seq=0, mm_hash=HASH))
    assert isinstance(pinned, Pinned)
    assert torch.equal(tensor_view(mapping_of(producer), pinned.descriptor), tensor)


def test_release_waits_for_the_last_slice_even_after_the_mapping_is_closed(daemon: StoreProcess) -> None:
    session = daemon.connect("pd-0/engine")
    tensor = torch.randn(16, 16)
    put(session, HASH, tensor)
    pinned = session.request(PinOrWatch(seq=0, mm_hash=HASH))
    assert isinstance(pinned, Pinned)
    mapping = mapping_of(session)
    released = threading.Event()

    view = tensor_view(mapping, pinned.descriptor, released.set)
    row, split = view[3], view.split(4)[1]
    mapping.close()
    del view, mapping
    gc.collect()
    assert not released.is_set()
    assert torch.equal(row, tensor[3])
    del row
    assert not released.is_set()
    del split
    assert released.is_set()


def test_release_can_unpin_from_the_finalizer(daemon: StoreProcess) -> None:
    session = daemon.connect("pd-0/engine")
    put(session, HASH, torch.randn(16, 16))
    pinned = session.request(PinOrWatch(seq=0, mm_hash=HASH))
    assert isinstance(pinned, Pinned)
    unpinned = []
    view = tensor_view(
        mapping_of(session),
        pinned.descriptor,
        lambda: unpinned.append(session.submit(Unpin(seq=0, pin_id=pinned.pin_id))),
    )
    assert daemon.stats().num_pins == 1
    del view
    assert isinstance(unpinned[0].result(5), Done)
    assert daemon.stats().num_pins == 0


def test_a_watcher_gets_the_pinned_descriptor_on_seal(daemon: StoreProcess) -> None:
    pushes = PushLog()
    producer = daemon.connect("encoder-0/worker-0")
    consumer = daemon.connect("pd-0/engine", on_push=pushes)
    watching = consumer.request(PinOrWatch(seq=0, mm_hash=HASH, num_holders=2))
    assert watching == Watching(seq=watching.seq, mm_hash=HASH, writing=False)
    tensor = torch.randn(32, 8)

    put(producer, HASH, tensor)

    sealed = pushes.wait_next()
    assert isinstance(sealed, EntrySealed)
    assert torch.equal(tensor_view(mapping_of(consumer), sealed.descriptor), tensor)
    consumer.request(Unpin(seq=0, pin_id=sealed.pin_id))
    assert daemon.stats().num_pins == 1
    consumer.request(Unpin(seq=0, pin_id=sealed.pin_id))
    assert daemon.stats().num_pins == 0
    assert pushes.is_empty


def test_a_reservation_for_a_named_writer_is_sealed_by_it_alone(daemon: StoreProcess) -> None:
    host = daemon.connect("encoder-0/host")
    worker = daemon.connect("encoder-0/worker-0")
    tensor = torch.randn(8, 8)
    reserved = reserve(host, HASH, tensor_spec(tensor), writer="encoder-0/worker-0")
    assert isinstance(reserved, Reserved)
    with pytest.raises(NotOwnerError):
        host.request(Seal(seq=0, reservation_id=reserved.reservation_id))
    host.close()
    assert daemon.stats().num_reservations == 1
    worker.request(Seal(seq=0, reservation_id=reserved.reservation_id))
    assert isinstance(reserve(worker, HASH, tensor_spec(tensor)), AlreadySealed)
    with pytest.raises(UnknownHandleError):
        reserve(worker, "cd" * 32, tensor_spec(tensor), writer="nobody")


def test_cancel_by_another_leaves_the_blocks_to_the_writer(daemon: StoreProcess) -> None:
    pushes = PushLog()
    host = daemon.connect("encoder-0/host")
    worker = daemon.connect("encoder-0/worker-0")
    stranger = daemon.connect("pd-0/engine", on_push=pushes)
    spec = tensor_spec(torch.empty(8, 8))
    reserved = reserve(host, HASH, spec, writer="encoder-0/worker-0")
    assert isinstance(reserved, Reserved)
    watching = stranger.request(PinOrWatch(seq=0, mm_hash=HASH))
    assert isinstance(watching, Watching)
    assert watching.writing
    with pytest.raises(NotOwnerError):
        stranger.request(Cancel(seq=0, reservation_id=reserved.reservation_id))

    host.request(Cancel(seq=0, reservation_id=reserved.reservation_id))

    assert pushes.wait_next() == WriterLost(seq=0, mm_hash=HASH)
    assert daemon.stats().abandoned_num_bytes == daemon.block_bytes
    worker.request(Cancel(seq=0, reservation_id=reserved.reservation_id))
    stats = daemon.stats()
    assert (stats.abandoned_num_bytes, stats.free_num_bytes) == (0, stats.region_num_bytes)


def test_errors_have_their_classes(daemon: StoreProcess) -> None:
    session = daemon.connect("encoder-0/worker-0")
    with pytest.raises(UnknownHandleError):
        session.request(Seal(seq=0, reservation_id=77))
    with pytest.raises(UnknownHandleError):
        session.request(Unpin(seq=0, pin_id=77))
    with pytest.raises(ItemTooLargeError):
        reserve(session, HASH, TensorSpec(shape=(1 << 15, 1 << 10), dtype="float16", num_bytes=1 << 26))
    half = TensorSpec(shape=(1 << 13, 1 << 10), dtype="float16", num_bytes=1 << 24)
    reserve(session, HASH, half)
    with pytest.raises(StoreFullError):
        reserve(session, "cd" * 32, half)
    with pytest.raises(NotOwnerError, match="live session"):
        daemon.connect("encoder-0/worker-0")


def test_the_full_region_evicts_the_least_recently_used_but_nothing_pinned(daemon: StoreProcess) -> None:
    session = daemon.connect("encoder-0/worker-0")
    hashes = [f"{n:064x}" for n in range(12)]
    for mm_hash in hashes[:3]:
        put(session, mm_hash, torch.zeros(1 << 10, 1 << 10))
    pinned = session.request(PinOrWatch(seq=0, mm_hash=hashes[0]))
    assert isinstance(pinned, Pinned)
    for mm_hash in hashes[3:]:
        put(session, mm_hash, torch.zeros(1 << 10, 1 << 10))
    assert isinstance(session.request(PinOrWatch(seq=0, mm_hash=hashes[0])), Pinned)
    assert isinstance(session.request(PinOrWatch(seq=0, mm_hash=hashes[-1])), Pinned)
    assert isinstance(session.request(PinOrWatch(seq=0, mm_hash=hashes[1])), Watching)
    stats = daemon.stats()
    assert stats.num_evictions_total == 5
    session.request(Evict(seq=0))
    assert daemon.stats().ready_num_bytes == 0


def test_region_and_socket_are_for_their_owner_only(daemon: StoreProcess) -> None:
    for path in (daemon.socket, daemon.run_dir / "region"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert daemon.stop() == 0
    assert [path.name for path in daemon.run_dir.iterdir()] == ["log"]


def test_the_session_ends_with_the_store(daemon: StoreProcess) -> None:
    ended: list[Exception | None] = []
    done = threading.Event()
    session = daemon.connect("pd-0/engine", on_disconnect=lambda error: (ended.append(error), done.set()))
    daemon.stop()
    assert done.wait(5)
    assert isinstance(ended[0], StoreUnavailableError)
    with pytest.raises(StoreUnavailableError):
        session.request(PinOrWatch(seq=0, mm_hash=HASH))


async def test_asyncio_session(daemon: StoreProcess) -> None:
    pushes: list[object] = []
    async with (
        await AsyncStoreSession.connect(daemon.socket, "encoder-0/host") as producer,
        await AsyncStoreSession.connect(daemon.socket, "pd-0/host", on_push=pushes.append) as consumer,
    ):
        await consumer.request(PinOrWatch(seq=0, mm_hash=HASH))
        spec = TensorSpec(shape=(2, 2), dtype="float32", num_bytes=16)
        reserved = await producer.request(Reserve(seq=0, mm_hash=HASH, spec=spec))
        assert isinstance(reserved, Reserved)
        await producer.request(Seal(seq=0, reservation_id=reserved.reservation_id))
        await consumer.request(Unpin(seq=0, pin_id=reserved.reservation_id + 1))
        assert [type(push) for push in pushes] == [EntrySealed]
        with pytest.raises(UnknownHandleError):
            await consumer.request(Unpin(seq=0, pin_id=99))
    with pytest.raises(StoreUnavailableError):
        await consumer.request(Unpin(seq=0, pin_id=99))


def test_many_small_entries_from_many_threads(make_daemon: Callable[..., StoreProcess]) -> None:
    daemon = make_daemon(region_bytes=8 << 20, block_bytes=4096)
    session = daemon.connect("encoder-0/worker-0")
    spec = TensorSpec(shape=(8, 8), dtype="float32", num_bytes=256)
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for n in range(50):
                reserved = reserve(session, f"{thread * 1000 + n:064x}", spec)
                assert isinstance(reserved, Reserved)
                session.request(Seal(seq=0, reservation_id=reserved.reservation_id))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert daemon.stats().num_entries == 400

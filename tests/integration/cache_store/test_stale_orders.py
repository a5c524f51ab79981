"""An order to write whose reservation is gone: its place is another item's by now, which stays as it is."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.integration.cache_store.samples import mapping_of
from tests.support.cuda.fake_cuda import FakeDevice, FakeDriver, FakeGpu
from tests.support.stores import StoreProcess
from triptych_common.protocol.store import Cancel, Done, Reserve, Reserved, Seal
from triptych_common.region import RegionMapping
from triptych_common.region.cuda.transports import PinnedWriter, RegisteredRegion
from triptych_common.region.fence import StaleReservationError
from triptych_common.region.tensor_view import tensor_spec
from triptych_common.region.transport import SharedMemoryWriter, TensorWriter
from triptych_common.store_session import StoreSession
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.step_orders import WriteOrder
from triptych_vllm_connector.worker.writing import WritingWorker

A, B = "ab" * 32, "cd" * 32
OLD, NEW = torch.full((64, 32), 1.0), torch.full((64, 32), 2.0)


def plain(mapping: RegionMapping) -> TensorWriter:
    return SharedMemoryWriter(mapping)


def registered(mapping: RegionMapping) -> TensorWriter:
    """From a GPU. The tensors of this test are on it."""
    driver = FakeDriver(FakeGpu(runs_by_itself=True))
    device = FakeDevice(driver)
    for tensor in (OLD, NEW):
        device.own(tensor)
    return PinnedWriter(driver, device, RegisteredRegion(driver, mapping))


def order_for(session: StoreSession, mm_hash: str, tensor: torch.Tensor, writer: str = "e-0/w") -> WriteOrder:
    spec = tensor_spec(tensor)
    reserved = session.request(Reserve(seq=0, mm_hash=mm_hash, spec=spec, writer=writer))
    assert isinstance(reserved, Reserved)
    return WriteOrder(
        mm_hash, "job", reserved.reservation_id, reserved.offset, *spec.shape, spec.dtype,
        generation=reserved.generation,
    )  # fmt: skip


def bytes_at(mapping: RegionMapping, order: WriteOrder) -> bytes:
    return bytes(mapping.view(order.offset, NEW.nbytes))


@pytest.mark.parametrize("make", [plain, registered])
def test_a_reservation_that_was_taken_back(
    daemon: StoreProcess, make: Callable[[RegionMapping], TensorWriter]
) -> None:
    host, worker = daemon.connect("e-0/host"), daemon.connect("e-0/w")
    mapping = mapping_of(worker)
    writer = make(mapping)
    stale = order_for(host, A, OLD)
    host.request(Cancel(seq=0, reservation_id=stale.reservation_id, is_unwritten=True))
    order = order_for(host, B, NEW)
    assert order.offset == stale.offset, "the same blocks"
    with pytest.raises(StaleReservationError):
        writer.write(stale, OLD)
    writer.write(order, NEW)
    with pytest.raises(StaleReservationError):
        writer.write(stale, OLD)
    assert bytes_at(mapping, order) == NEW.numpy().tobytes()
    assert isinstance(worker.request(Seal(seq=0, reservation_id=order.reservation_id)), Done)
    with pytest.raises(StaleReservationError):
        writer.write(order, OLD)
    assert bytes_at(mapping, order) == NEW.numpy().tobytes(), "sealed: it never changes again"


@pytest.mark.parametrize("make", [plain, registered])
def test_a_reservation_that_lives_on_in_a_restarted_store(
    make_daemon: Callable[..., StoreProcess], make: Callable[[RegionMapping], TensorWriter]
) -> None:
    """The region outlives its store, and so do the reservations of writers that live: no false alarm."""
    daemon = make_daemon("--keep-region")
    host, worker = (
        daemon.connect(name, reconnect_timeout_s=30.0) for name in ("e-0/host", "e-0/w")
    )  # fmt: skip
    mapping = mapping_of(worker)
    order = order_for(host, A, NEW)
    daemon.stop()
    daemon.start()
    make(mapping).write(order, NEW)
    assert isinstance(worker.request(Seal(seq=0, reservation_id=order.reservation_id)), Done)
    assert bytes_at(mapping, order) == NEW.numpy().tobytes()


def test_the_worker_cancels_and_goes_on(daemon: StoreProcess, tmp_path: Path) -> None:
    """From the order to the store: nothing is sealed, nothing is left reserved."""
    host = daemon.connect("e-0/host")
    config = ConnectorConfig(
        instance="e-0",
        deployment="d",
        redis_url=f"unix://{tmp_path}/nowhere",
        store_socket=daemon.socket,
        namespace_digest="0" * 64,
    )
    with closing(WritingWorker(config, 0)) as worker:
        stale = order_for(host, A, OLD, "e-0/worker-0")
        host.request(Cancel(seq=0, reservation_id=stale.reservation_id, is_unwritten=True))
        order = order_for(host, B, NEW, "e-0/worker-0")
        worker.write_order(order, NEW)
        worker.write_order(stale, OLD)
        mapping = mapping_of(host)
        assert bytes_at(mapping, order) == NEW.numpy().tobytes()
        assert worker.num_transferred == 1
    assert daemon.stats().num_pins == 0

"""prefill_decode's worker: puts tensors from the transports into vLLM's encoder cache, and ends the pins."""

import functools
import queue
import threading
import time
from collections.abc import Sequence

import torch

from triptych_common.domain.transports import transport_of
from triptych_common.protocol.store import Unpin
from triptych_common.region.tensor_view import TORCH_DTYPES
from triptych_common.region.transport import OnRelease, StartedCopy, StartingReader
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.config import StoreConfig
from triptych_vllm_connector.step_orders import LoadedTensor, LoadOrder
from triptych_vllm_connector.worker.containment import check_device
from triptych_vllm_connector.worker.store_worker import TRANSFER_ERRORS, StoreWorker

log = get_logger(__name__)


class LoadingWorker(StoreWorker):
    """A pin ends when the last slice of its view is gone: the finalizer sits on the view's exporter.

    It may run anywhere, even inside the session's own code, so it only puts the pin's id into a `SimpleQueue`
    (whose `put` is reentrant); a thread sends it on.

    A tensor that cannot be read must not end the engine, which has planned this step with it: zeros take its
    place, and `take_failed_loads` names it, so that the scheduler fails the requests that need it before
    anything of theirs is sent.
    """

    def __init__(self, config: StoreConfig, rank: int, device_type: str) -> None:
        super().__init__(config, rank, device_type)
        self._device_type = device_type
        self._failed: set[str] = set()
        self._loaded: list[LoadedTensor] = []
        self._started: dict[str, tuple[int, StartedCopy]] = {}  # by mm_hash; pin and copy
        self._released: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._releaser = threading.Thread(target=self._release_pins, name="triptych-release", daemon=True)
        self._releaser.start()
        self.num_injected = 0

    def start_copies(self, orders: Sequence[LoadOrder]) -> None:
        """Start copies that later steps will load, where a GPU makes them; the pins stay the scheduler's.

        Raises:
            torch.AcceleratorError: the device is lost, and the engine ends with it.
        """
        for order in orders:
            try:
                reader = self._transports.reader(order.descriptor.memory)
                if isinstance(reader, StartingReader):
                    self._started[order.mm_hash] = order.pin_id, reader.start(order.descriptor)
            except torch.AcceleratorError:
                raise
            except TRANSFER_ERRORS as error:  # the load tries it again, and fails its requests
                check_device()
                log.info("copy not started ahead", mm_hash=order.mm_hash, error=str(error))

    def drop_copies(self, mm_hashes: Sequence[str]) -> None:
        for mm_hash in mm_hashes:
            self._started.pop(mm_hash, None)

    def load_orders(self, encoder_cache: dict[str, torch.Tensor], orders: list[LoadOrder]) -> None:
        """Inject one tensor per order.

        Raises:
            torch.AcceleratorError: the device is lost, and the engine ends with it.
        """
        for order in orders:
            start_ns = time.time_ns()
            on_release = functools.partial(self._released.put, order.pin_id)
            descriptor = order.descriptor
            try:
                injected = self._open(order, on_release)
            except torch.AcceleratorError:
                raise
            except TRANSFER_ERRORS as error:
                check_device()
                log.warning("tensor not loaded", mm_hash=order.mm_hash, error=str(error))
                encoder_cache[order.mm_hash] = self._zeros(order)
                self._failed.add(order.mm_hash)
                on_release()
                continue
            encoder_cache[order.mm_hash] = injected
            self.num_injected += 1
            end_ns, transport = time.time_ns(), transport_of(descriptor.memory).value
            self._loaded.append(LoadedTensor(transport, injected.nbytes, max(0, end_ns - start_ns) / 1e9))
            address, num_bytes = self._transports.extent(descriptor.memory) or (0, 0)
            self._span(
                "prefill.inject",
                start_ns,
                end_ns,
                order.traceparent,
                order.mm_hash,
                num_bytes=injected.nbytes,
                view_address=injected.data_ptr(),
                region_address=address,
                region_num_bytes=num_bytes,
                transport=transport,
            )

    def _open(self, order: LoadOrder, on_release: OnRelease) -> torch.Tensor:
        reader = self._transports.reader(order.descriptor.memory)
        pin_id, started = self._started.pop(order.mm_hash, (None, None))
        if started is not None and pin_id == order.pin_id and isinstance(reader, StartingReader):
            return reader.finish(started, on_release)
        return reader.open(order.descriptor, on_release)

    def take_failed_loads(self) -> frozenset[str]:
        """mm_hashes of this step whose tensors are zeros, because they could not be read."""
        failed, self._failed = frozenset(self._failed), set()
        return failed

    def take_loaded(self) -> tuple[LoadedTensor, ...]:
        loaded, self._loaded = tuple(self._loaded), []
        return loaded

    def _zeros(self, order: LoadOrder) -> torch.Tensor:
        """Zeros in the order's shape, with one element of storage: the load may have failed for lack of
        memory."""
        spec = order.descriptor.spec
        zero = torch.zeros(1, 1, dtype=TORCH_DTYPES[spec.dtype], device=self._device_type)
        return zero.expand(spec.shape)

    def _release_pins(self) -> None:
        while (pin_id := self._released.get()) is not None:
            self._session.submit(Unpin(seq=0, pin_id=pin_id))  # a store that is gone has no pins either

    def close(self) -> None:
        self._released.put(None)
        self._releaser.join(timeout=2)
        super().close()

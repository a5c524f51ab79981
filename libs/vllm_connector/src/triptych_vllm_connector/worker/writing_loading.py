"""The worker's two ends of the hand-over: write and seal (encoder), inject and release (prefill_decode).

Both run inside vLLM's step, on its thread. Neither waits for the store: commands are sent, answers are
read by the session's thread. How bytes travel is the transport's matter (`worker_transports`).
"""

import functools
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import torch

from triptych_common.domain.errors import TriptychError
from triptych_common.domain.transports import transport_of
from triptych_common.protocol.store import Cancel, Done, Seal, StoreReply, Unpin
from triptych_common.region.tensor_view import TORCH_DTYPES
from triptych_common.store_session import StoreSession
from triptych_common.telemetry import record_span
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.config import STORE_RECONNECT_S, ConnectorConfig, worker_session_name
from triptych_vllm_connector.host.transport_capabilities import SlabVerdict
from triptych_vllm_connector.step_orders import LoadOrder, WriteOrder
from triptych_vllm_connector.worker.containment import check_device
from triptych_vllm_connector.worker.encode_clock import clock_of
from triptych_vllm_connector.worker.transports import WorkerTransports

log = get_logger(__name__)

TRANSFER_ERRORS = (TriptychError, ValueError, RuntimeError, MemoryError)
"""What a transfer may end with: torch's own errors, out of memory among them, are RuntimeErrors.

One of them is not survived: after `torch.AcceleratorError` nothing on the device can be trusted."""


class _RegionWorker:
    """A store session and the transports, of one worker."""

    def __init__(self, config: ConnectorConfig, rank: int, device_type: str) -> None:
        self._config = config
        self._session = StoreSession.connect(
            config.store_socket,
            worker_session_name(config.instance, rank),
            on_push=lambda push: None,
            on_disconnect=self._on_disconnect,
            timeout_s=config.store_timeout_s,
            reconnect_timeout_s=STORE_RECONNECT_S,
            namespace_digest=config.namespace_digest,
        )
        self._transports = WorkerTransports(config, self._session, device_type)
        self._rank = rank

    def probe_slab(self) -> SlabVerdict:
        """Whether this worker can use the store's memory on its GPU."""
        return self._transports.probe_slab()

    def close(self) -> None:
        self._transports.close()
        self._session.close()

    def _on_disconnect(self, error: Exception | None) -> None:
        if error is not None:
            log.error("store session lost", instance=self._config.instance, error=str(error))

    def _span(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        traceparent: str | None,
        mm_hash: str,
        **attributes: str | int,
    ) -> None:
        record_span(
            name,
            start_ns,
            end_ns,
            traceparent=traceparent,
            attributes={
                "triptych.instance": self._config.instance,
                "triptych.mm_hash": mm_hash,
                **{f"triptych.{key}": value for key, value in attributes.items()},
            },
        )


class WritingWorker(_RegionWorker):
    """Encoder: one copy into the reservation, then the seal. Rank 0 writes; every rank has the same rows.

    Each order of a step ends with it: written, or cancelled. vLLM's newer runner does not encode what its
    cache has, and says nothing of it, so what is left at the end of the step is written from there.
    """

    def __init__(self, config: ConnectorConfig, rank: int, device_type: str = "cpu") -> None:
        super().__init__(config, rank, device_type)
        self._orders: dict[str, list[WriteOrder]] = {}  # of the step under way, by mm_hash
        self._encoder_cache: Mapping[str, torch.Tensor] = {}
        self._clock = clock_of(device_type)
        self.num_transferred = 0

    def encode_started(self) -> None:
        """The runner wrapper: the encoder runs now, for every item of this step."""
        self._clock.start()

    def step_started(
        self, orders: Mapping[str, Sequence[WriteOrder]], encoder_cache: Mapping[str, torch.Tensor]
    ) -> None:
        """`orders` are those of the step, by mm_hash; `encoder_cache` is vLLM's."""
        self._orders = {mm_hash: list(each) for mm_hash, each in orders.items()}
        self._encoder_cache = encoder_cache

    def encoded(self, mm_hash: str, tensor: torch.Tensor) -> None:
        """vLLM has the item: write it for whoever ordered it. Called again for the same item: nothing."""
        for order in self._orders.pop(mm_hash, ()):
            self.write(order, mm_hash, tensor)

    def step_ended(self) -> None:
        """Nothing more is encoded: an order that is left is written from vLLM's cache, or cancelled."""
        for mm_hash in list(self._orders):
            if mm_hash in self._encoder_cache:
                self.encoded(mm_hash, self._encoder_cache[mm_hash])
                continue
            for order in self._orders.pop(mm_hash):
                if self._rank == 0:
                    log.warning("item not encoded", mm_hash=mm_hash, job_id=order.job_id)
                    self._session.submit(Cancel(seq=0, reservation_id=order.reservation_id))

    def refuse(self, mm_hash: str, error: Exception) -> None:
        """The tower raised `error` for this item: cancel its reservations, and the host fails the jobs."""
        for order in self._orders.pop(mm_hash, ()):
            if self._rank == 0:
                log.error(
                    "encoder refused item", mm_hash=mm_hash, job_id=order.job_id, error=repr(error)[:500]
                )
                self._session.submit(Cancel(seq=0, reservation_id=order.reservation_id))

    def write(self, order: WriteOrder | None, mm_hash: str, tensor: torch.Tensor) -> None:
        """Copy `tensor` [num_embeds, width] to its place and seal it.

        A tensor that does not fit its reservation, or that the transport cannot take, is not written, and the
        reservation is cancelled: the host learns it from the store, and fails the job.

        Raises:
            torch.AcceleratorError: the device is lost, and the engine ends with it.
        """
        if self._rank != 0 or order is None:
            return
        self._clock.mark_end()  # the first write of a step: all its items are encoded by now, or launched
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != (order.num_embeds, order.width) or dtype != order.dtype:
            log.error(
                "encoder output does not fit its reservation",
                mm_hash=mm_hash,
                shape=list(tensor.shape),
                dtype=dtype,
                expected=[order.num_embeds, order.width],
                expected_dtype=order.dtype,
            )
            self._record_encode(order)
            self._session.submit(Cancel(seq=0, reservation_id=order.reservation_id))
            return
        start_ns = time.time_ns()
        try:
            self._transports.writer(order.memory).write(order, tensor)
        except torch.AcceleratorError:
            raise
        except TRANSFER_ERRORS as error:
            check_device()
            log.warning("encoder output not written", mm_hash=mm_hash, memory=order.memory, error=str(error))
            self._record_encode(order)
            self._session.submit(Cancel(seq=0, reservation_id=order.reservation_id))
            return
        written_ns = time.time_ns()
        encoded_ns = self._record_encode(order)
        self._span(
            "encoder.write",
            min(max(start_ns, encoded_ns), written_ns),
            written_ns,
            order.traceparent,
            mm_hash,
            num_bytes=tensor.nbytes,
            transport=transport_of(order.memory).value,
        )
        future = self._session.submit(Seal(seq=0, reservation_id=order.reservation_id))
        future.add_done_callback(lambda done: self._sealed(done, order, written_ns))
        self.num_transferred += 1

    def _record_encode(self, order: WriteOrder) -> int:
        """The span of the step's encoding, once its item was written, or could not be; when it ended."""
        start_ns, end_ns = self._clock.span_ns()
        self._span("encoder.encode", start_ns, end_ns, order.traceparent, order.mm_hash)
        return end_ns

    def _sealed(self, done: "Future[StoreReply]", order: WriteOrder, start_ns: int) -> None:
        error: object = done.exception() or done.result()
        if not isinstance(error, Done):
            log.error("seal failed", mm_hash=order.mm_hash, job_id=order.job_id, error=str(error))
            return
        self._span("encoder.seal", start_ns, time.time_ns(), order.traceparent, order.mm_hash)


class LoadingWorker(_RegionWorker):
    """prefill_decode: puts what the transports give into vLLM's encoder cache, and ends the pins.

    A pin ends when the last slice of its view is gone: the finalizer sits on the view's exporter. It
    may run anywhere, even inside the session's own code, so it only drops the pin's id into a
    `SimpleQueue` (whose `put` is reentrant); a thread sends it on.

    A tensor that cannot be had must not end the engine, which has planned this step with it: zeros take its
    place, and `take_lost` names it, so that the scheduler fails who waits for it before anything of theirs
    is sent.
    """

    def __init__(self, config: ConnectorConfig, rank: int, device_type: str) -> None:
        super().__init__(config, rank, device_type)
        self._device_type = device_type
        self._lost: set[str] = set()
        self._released: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._releaser = threading.Thread(target=self._release, name="triptych-release", daemon=True)
        self._releaser.start()
        self.num_injected = 0

    def load(self, encoder_cache: dict[str, torch.Tensor], orders: list[LoadOrder]) -> None:
        """Inject one tensor per order.

        Raises:
            torch.AcceleratorError: the device is lost, and the engine ends with it.
        """
        for order in orders:
            start_ns = time.time_ns()
            on_release = functools.partial(self._released.put, order.pin_id)
            descriptor = order.descriptor
            try:
                injected = self._transports.reader(descriptor.memory).open(descriptor, on_release)
            except torch.AcceleratorError:
                raise
            except TRANSFER_ERRORS as error:
                check_device()
                log.warning("tensor cannot be had", mm_hash=order.mm_hash, error=str(error))
                encoder_cache[order.mm_hash] = self._stand_in(order)
                on_release()
                continue
            encoder_cache[order.mm_hash] = injected
            self.num_injected += 1
            address, num_bytes = self._transports.extent(descriptor.memory) or (0, 0)
            self._span(
                "prefill.inject",
                start_ns,
                time.time_ns(),
                order.traceparent,
                order.mm_hash,
                num_bytes=injected.nbytes,
                view_address=injected.data_ptr(),
                region_address=address,
                region_num_bytes=num_bytes,
                transport=transport_of(descriptor.memory).value,
            )

    def take_lost(self) -> frozenset[str]:
        """The mm_hashes of this step that are zeros instead of what they should be."""
        lost, self._lost = frozenset(self._lost), set()
        return lost

    def _stand_in(self, order: LoadOrder) -> torch.Tensor:
        self._lost.add(order.mm_hash)
        spec = order.descriptor.spec
        # One element, seen as all of them: memory may be what there was too little of.
        zero = torch.zeros(1, 1, dtype=TORCH_DTYPES[spec.dtype], device=self._device_type)
        return zero.expand(spec.shape)

    def _release(self) -> None:
        while (pin_id := self._released.get()) is not None:
            self._session.submit(Unpin(seq=0, pin_id=pin_id))  # a store that is gone has no pins either

    def close(self) -> None:
        self._released.put(None)
        self._releaser.join(timeout=2)
        super().close()

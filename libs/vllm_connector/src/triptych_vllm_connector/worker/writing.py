"""Encoder's worker: writes an encoder output to its reservation, and seals it.

order --written--> Seal sent        order --not encoded, refused, unfit, not written--> Cancel sent

On a GPU the copies of a step are queued behind its kernels, one event is recorded at the end of the step, and
a thread seals when the GPU has come to it: vLLM's thread waits for nothing and launches the next step.
"""

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch

from triptych_common.domain.transports import transport_of
from triptych_common.protocol.store import Cancel, Done, Seal, StoreReply
from triptych_common.region.cuda.driver import CudaError
from triptych_common.region.transport import OnWritten, QueuingWriter
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.config import StoreConfig
from triptych_vllm_connector.step_orders import WriteOrder
from triptych_vllm_connector.worker.containment import check_device
from triptych_vllm_connector.worker.cores.compute_share import CoreRange
from triptych_vllm_connector.worker.store_worker import TRANSFER_ERRORS, StoreWorker

log = get_logger(__name__)


class EncodeClock(Protocol):
    """Measures the encoding of one step at a time."""

    def start(self) -> None:
        """Mark the start of the encoder, for every item of this step."""

    def mark_end(self) -> None:
        """Mark the end: items are encoded, or will be by work now on the stream. The first call counts."""

    def span_ns(self) -> tuple[int, int]:
        """Start and end in Unix nanoseconds; called once the GPU has written the item."""


class HostClock:
    """Clock for CPUs, where calls return when the work is done."""

    def __init__(self) -> None:
        self._start_ns = 0
        self._end_ns = 0

    def start(self) -> None:
        self._start_ns, self._end_ns = time.time_ns(), 0

    def mark_end(self) -> None:
        if self._end_ns == 0:
            self._end_ns = time.time_ns()

    def span_ns(self) -> tuple[int, int]:
        return self._start_ns or self._end_ns, self._end_ns


class TimedEvent(Protocol):
    """A point on a stream; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """True once the stream has reached the event."""
        ...

    def elapsed_time(self, end_event: "TimedEvent") -> float:
        """Milliseconds between two reached events."""
        ...


class DeviceClock:
    """Clock for GPUs: two events around the encoder's kernels, which the host does not wait for.

    If the stream has not reached the second event, because nothing was written, the launches are measured.
    """

    def __init__(self, record: Callable[[], TimedEvent]) -> None:
        """`record` returns an event on the current stream."""
        self._record = record
        self._host = HostClock()
        self._first: TimedEvent | None = None
        self._last: TimedEvent | None = None

    def start(self) -> None:
        self._host.start()
        self._first, self._last = self._record(), None

    def mark_end(self) -> None:
        self._host.mark_end()
        if self._last is None:
            self._last = self._record()

    def span_ns(self) -> tuple[int, int]:
        start_ns, end_ns = self._host.span_ns()
        if self._first is not None and self._last is not None and self._last.query():
            end_ns = start_ns + int(self._first.elapsed_time(self._last) * 1e6)
        return start_ns, end_ns


def clock_of(device_type: str) -> EncodeClock:
    return HostClock() if device_type == "cpu" else DeviceClock(_record_on_gpu)


def _record_on_gpu() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True)
class _Write:
    """One order whose copy is done or queued, with the clock of its step."""

    order: WriteOrder
    num_bytes: int
    start_ns: int
    clock: EncodeClock
    cores: CoreRange | None
    on_written: OnWritten | None  # None: nothing is queued


class WritingWorker(StoreWorker):
    """One copy into the reservation, then the seal. Rank 0 writes; every rank has the same rows.

    Each order of a step ends with it: written, queued for the GPU, or cancelled. vLLM's newer runner does not
    encode what its cache has, and reports nothing of it, so what is left at the end of the step is written
    from there.
    """

    def __init__(self, config: StoreConfig, rank: int, device_type: str = "cpu") -> None:
        super().__init__(config, rank, device_type)
        self._orders: dict[str, list[WriteOrder]] = {}  # of the step under way, by mm_hash
        self._encoder_cache: Mapping[str, torch.Tensor] = {}
        self._device_type = device_type
        self._clock = clock_of(device_type)
        self._num_cores: CoreRange | None = None
        self._queued: list[_Write] = []  # of the step under way
        self._has_written = threading.Condition()
        self._num_unwritten = 0  # queued writes, of earlier steps too
        self._failure: CudaError | None = None  # of the GPU: nothing is sealed after it
        self.num_transferred = 0

    def on_step_start(
        self, orders: Mapping[str, Sequence[WriteOrder]], encoder_cache: Mapping[str, torch.Tensor]
    ) -> None:
        """Start a step with its `orders` by mm_hash; `encoder_cache` is vLLM's.

        Raises:
            CudaError: the GPU failed in an earlier step, and the engine ends with it.
        """
        self._check_gpu()
        self._orders = {mm_hash: list(each) for mm_hash, each in orders.items()}
        self._encoder_cache = encoder_cache

    def on_encode_start(self, cores: CoreRange | None = None) -> None:
        """Mark the start of the encoder, for every item of this step.

        `cores` is complete once the step is done (shared CPU only).
        """
        self._clock = clock_of(self._device_type)  # one for each step: the one before may still be read
        self._clock.start()
        self._num_cores = cores

    def on_encoded(self, mm_hash: str, tensor: torch.Tensor) -> None:
        """Write each order of an encoded item. Idempotent."""
        for order in self._orders.pop(mm_hash, ()):
            self.write_order(order, tensor)

    def on_item_error(self, mm_hash: str, error: Exception) -> None:
        """Cancel the reservations of an item for which the tower raised `error`; the host fails the jobs."""
        for order in self._orders.pop(mm_hash, ()):
            if self._rank == 0:
                log.error(
                    "encoder refused item", mm_hash=mm_hash, job_id=order.job_id, error=repr(error)[:500]
                )
                self._cancel(order)

    def on_step_end(self) -> None:
        """Write or cancel the orders that are left; vLLM's cache may have their items."""
        for mm_hash in list(self._orders):
            if mm_hash in self._encoder_cache:
                self.on_encoded(mm_hash, self._encoder_cache[mm_hash])
                continue
            for order in self._orders.pop(mm_hash):
                if self._rank == 0:
                    log.warning("item not encoded", mm_hash=mm_hash, job_id=order.job_id)
                    self._cancel(order)
        self.seal_when_done()

    def seal_when_done(self) -> None:
        """Have a thread seal what was queued since the last call, once the GPU has written it."""
        if self._queued:
            queued, self._queued = self._queued, []
            self._transports.call_when_done(functools.partial(self._on_done, queued))

    def wait_written(self, timeout_s: float) -> bool:
        """True if no copy is queued any more after at most `timeout_s`: their seals are sent.

        Raises:
            CudaError: the GPU has failed, and the engine ends with it.
        """
        with self._has_written:
            is_written = self._has_written.wait_for(lambda: self._num_unwritten == 0, timeout_s)
        self._check_gpu()
        return is_written

    def write_order(self, order: WriteOrder, tensor: torch.Tensor) -> None:
        """Copy `tensor` [num_embeds, width] to its place and seal it, or queue the copy for `seal_when_done`.

        A tensor that does not fit its reservation, or that the transport cannot take, is not written, and the
        reservation is cancelled: the store reports that to the host, which fails the job.

        Raises:
            torch.AcceleratorError: the device is lost, and the engine ends with it.
        """
        if self._rank != 0:
            return
        self._clock.mark_end()  # the first write of a step: all its items are encoded by now, or launched
        start_ns = time.time_ns()
        if not self._fits(order, tensor):
            self._refuse(order)
            return
        try:
            writer = self._transports.writer(order.memory)
            on_written = None
            if isinstance(writer, QueuingWriter):
                on_written = writer.queue(order, tensor)
            else:
                writer.write(order, tensor)
        except torch.AcceleratorError:
            raise
        except TRANSFER_ERRORS as error:
            check_device()
            log.warning(
                "encoder output not written", mm_hash=order.mm_hash, memory=order.memory, error=str(error)
            )
            self._refuse(order)
            return
        write = _Write(order, tensor.nbytes, start_ns, self._clock, self._num_cores, on_written)
        if on_written is None:
            self._seal(write)
            return
        with self._has_written:
            self._num_unwritten += 1
        self._queued.append(write)

    def close(self) -> None:
        """Seal what the GPU still writes, in bounded time, and end the session."""
        self.seal_when_done()
        super().close()

    def _fits(self, order: WriteOrder, tensor: torch.Tensor) -> bool:
        """True if the tensor is as its reservation says."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) == (order.num_embeds, order.width) and dtype == order.dtype:
            return True
        log.error(
            "encoder output does not fit its reservation",
            mm_hash=order.mm_hash,
            shape=list(tensor.shape),
            dtype=dtype,
            expected=[order.num_embeds, order.width],
            expected_dtype=order.dtype,
        )
        return False

    def _refuse(self, order: WriteOrder) -> None:
        self._record_encode(order, self._clock, self._num_cores)
        self._cancel(order)

    def _on_done(self, queued: Sequence[_Write], failure: CudaError | None) -> None:
        """Seal a step's queued writes, in the events' thread; the store ends those of a GPU that failed."""
        try:
            for write in queued:
                if write.on_written is not None:
                    write.on_written()
                if failure is None:
                    self._seal(write)
        finally:
            with self._has_written:
                self._failure = self._failure or failure
                self._num_unwritten -= len(queued)
                self._has_written.notify_all()

    def _seal(self, write: _Write) -> None:
        order, written_ns = write.order, time.time_ns()
        encoded_ns = self._record_encode(order, write.clock, write.cores)
        self._span(
            "encoder.write",
            min(max(write.start_ns, encoded_ns), written_ns),
            written_ns,
            order.traceparent,
            order.mm_hash,
            num_bytes=write.num_bytes,
            transport=transport_of(order.memory).value,
        )
        future = self._session.submit(Seal(seq=0, reservation_id=order.reservation_id))
        future.add_done_callback(lambda done: self._on_seal_answer(done, order, written_ns))
        self.num_transferred += 1

    def _check_gpu(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _cancel(self, order: WriteOrder) -> None:
        self._session.submit(Cancel(seq=0, reservation_id=order.reservation_id))

    def _record_encode(self, order: WriteOrder, clock: EncodeClock, num_cores: CoreRange | None) -> int:
        """Record the span of the step's encoding for one item; returns its end."""
        start_ns, end_ns = clock.span_ns()
        cores = {"fewest_cores": num_cores.fewest, "most_cores": num_cores.most} if num_cores else {}
        self._span("encoder.encode", start_ns, end_ns, order.traceparent, order.mm_hash, **cores)
        return end_ns

    def _on_seal_answer(self, done: "Future[StoreReply]", order: WriteOrder, start_ns: int) -> None:
        error: object = done.exception() or done.result()
        if not isinstance(error, Done):
            log.error("seal failed", mm_hash=order.mm_hash, job_id=order.job_id, error=str(error))
            return
        self._span("encoder.seal", start_ns, time.time_ns(), order.traceparent, order.mm_hash)

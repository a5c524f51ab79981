"""Message bus for code that must never block: inside an inference engine's processes.

One thread runs an event loop with an `AsyncBus`; callers only put into a bounded queue.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from triptych_common.bus.async_bus import AsyncBus
from triptych_common.bus.publisher import NewEntry
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol import codec
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import Message
from triptych_common.redis_client.commands import reconnect_backoff
from triptych_common.redis_client.server_watch import OnServerChanged
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_BATCH = 128
READER_PREFETCH = 64
MAX_QUEUED_S = 120.0  # for messages without a limit of their own; older ones are worthless
Callback = Callable[[Envelope], None]


@dataclass(frozen=True)
class _Outgoing:
    stream: str
    fields: Mapping[bytes, bytes]
    deadline: float  # monotonic seconds
    has_limit: bool  # the receiver gets the time that is left


@dataclass(frozen=True)
class _Subscription:
    stream: str
    group: str
    consumer: str
    callback: Callback


class ThreadedBus:
    """Bus whose `publish` and `subscribe` return at once, from any thread.

    Redis may be away at any time, also at the start: messages wait in the queue; those that do not fit are
    dropped, counted in `num_dropped` and logged.
    """

    def __init__(self, url: str, deployment: str, *, client_name: str, max_queued: int = 10_000) -> None:
        self._url = url
        self._deployment = deployment
        self._client_name = client_name
        self._queue: queue.Queue[_Outgoing] = queue.Queue(max_queued)
        self._lock = threading.Lock()
        self._num_dropped = 0
        self._closed = False
        self._started: queue.Queue[asyncio.AbstractEventLoop | BaseException] = queue.Queue(1)
        self._flush_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"bus {client_name}", daemon=True)
        self._thread.start()
        started = self._started.get(timeout=30.0)
        if isinstance(started, BaseException):
            raise started
        self._loop = started

    @property
    def num_dropped(self) -> int:
        """Number of messages that were never sent: queue or stream full, too old, or bus closed."""
        return self._num_dropped

    @property
    def num_queued(self) -> int:
        return self._queue.qsize()

    def publish(
        self,
        stream: str,
        message: Message,
        *,
        traceparent: str | None = None,
        remaining_ms: int | None = None,
        blob: bytes | None = None,
    ) -> bool:
        """Queue `message` for `stream`; never blocks. Return False if it was dropped, counted and logged."""
        fields = codec.encode(message, traceparent=traceparent, remaining_ms=remaining_ms, blob=blob)
        limit_s = MAX_QUEUED_S if remaining_ms is None else remaining_ms / 1000
        outgoing = _Outgoing(stream, fields, time.monotonic() + limit_s, remaining_ms is not None)
        try:
            if self._closed:
                raise queue.Full
            self._queue.put_nowait(outgoing)
        except queue.Full:
            self._drop("message dropped, queue is full or closed", stream)
            return False
        self._wake(self._wake_writer)
        return True

    def subscribe(self, stream: str, *, group: str, consumer: str, callback: Callback) -> None:
        """Call `callback` for each entry of `stream`, in order, on the bus's thread; then ack the entry.

        `callback` must not block. If it raises, the entry goes to the dead letters.
        """
        subscription = _Subscription(stream, group, consumer, callback)
        self._wake(lambda: self._start_reader(subscription))

    def on_server_changed(self, callback: OnServerChanged) -> None:
        self._wake(lambda: self._bus.on_server_changed(callback))

    def close(self, flush_s: float = 2.0) -> None:
        """Send what is queued, for at most `flush_s`, and end the thread. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._flush_s = flush_s
        self._wake(self._wake_writer)
        self._thread.join(flush_s + 10.0)
        if self._thread.is_alive():
            log.error("bus thread did not end", client=self._client_name)

    def _wake(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            log.warning("bus thread has ended", client=self._client_name)

    def _drop(self, text: str, stream: str) -> None:
        with self._lock:
            self._num_dropped += 1
            num_dropped = self._num_dropped
        if num_dropped & (num_dropped - 1) == 0:  # 1st, 2nd, 4th, 8th …: a full queue must not flood the log
            log.warning("message dropped", cause=text, stream=stream, num_dropped=num_dropped)

    # ---- on the bus's thread ----
    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception:
            log.exception("bus thread failed", client=self._client_name)

    async def _main(self) -> None:
        try:
            self._bus = AsyncBus(self._url, self._deployment, client_name=self._client_name)
            self._work = asyncio.Event()
            self._readers: list[asyncio.Task[None]] = []
        except BaseException as error:
            self._started.put(error)
            raise
        self._started.put(asyncio.get_running_loop())
        async with self._bus:
            try:
                await self._write_until_closed()
            finally:
                for reader in self._readers:
                    reader.cancel()
                await asyncio.gather(*self._readers, return_exceptions=True)

    def _wake_writer(self) -> None:
        self._work.set()

    def _start_reader(self, subscription: _Subscription) -> None:
        if not self._closed:
            self._readers.append(asyncio.get_running_loop().create_task(self._read(subscription)))

    async def _write_until_closed(self) -> None:
        while not self._closed:
            self._work.clear()
            if self._queue.empty() and not self._closed:
                await self._work.wait()
            await self._send_queued()

    async def _send_queued(self) -> None:
        """Send until the queue is empty; while Redis is away, keep trying until closed and out of time."""
        batch: list[_Outgoing] = []
        backoff, num_failures = reconnect_backoff(), 0
        give_up_at: float | None = None
        while True:
            while len(batch) < MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            batch = self._without_expired(batch)
            if not batch:
                return
            if self._closed and give_up_at is None:
                give_up_at = time.monotonic() + self._flush_s
            if give_up_at is not None and time.monotonic() >= give_up_at:
                for each in batch:
                    self._drop("bus closed before it could be sent", each.stream)
                batch = []
                continue
            batch = await self._send(batch)
            if not batch:
                num_failures = 0
                continue
            num_failures += 1
            if num_failures == 1:
                log.warning("messages wait for redis", client=self._client_name, num_queued=self.num_queued)
            self._work.clear()
            wait_s = backoff.compute(num_failures)
            try:
                async with asyncio.timeout(wait_s):
                    await self._work.wait()
            except TimeoutError:
                pass

    async def _send(self, batch: list[_Outgoing]) -> list[_Outgoing]:
        entries: list[NewEntry] = [(each.stream, _with_remaining(each)) for each in batch]
        try:
            refused = await self._bus.publish_encoded(entries)
        except BusUnavailableError:
            return batch
        except Exception:  # the thread serves all callers: it must not end with one batch
            log.exception("messages not sent", client=self._client_name)
            return batch
        is_final = {id(refusal.entry): refusal.is_final for refusal in refused}
        again: list[_Outgoing] = []
        for each, entry in zip(batch, entries, strict=True):
            if is_final.get(id(entry)):
                self._drop("the stream is full, its reader has stopped", each.stream)
            elif id(entry) in is_final:
                again.append(each)
        return again

    def _without_expired(self, batch: list[_Outgoing]) -> list[_Outgoing]:
        now = time.monotonic()
        kept = [each for each in batch if each.deadline > now]
        for each in batch:
            if each.deadline <= now:
                self._drop("deadline passed", each.stream)
        return kept

    async def _read(self, subscription: _Subscription) -> None:
        """Read until cancelled, and restart a failed reader, since its owner would hear nothing."""
        backoff, num_failures = reconnect_backoff(), 0
        while True:
            try:
                await self._read_entries(subscription)
            except Exception:
                log.exception("stream reader failed, starts again", stream=subscription.stream)
            num_failures += 1
            await asyncio.sleep(backoff.compute(num_failures))

    async def _read_entries(self, subscription: _Subscription) -> None:
        consumer = self._bus.consumer(
            subscription.stream,
            group=subscription.group,
            consumer=subscription.consumer,
            prefetch=READER_PREFETCH,
        )
        async with consumer:
            async for delivery in consumer:
                try:
                    subscription.callback(delivery.envelope)
                except Exception as error:
                    log.exception("callback failed", stream=subscription.stream)
                    await delivery.reject(f"callback failed: {type(error).__name__}")
                else:
                    delivery.ack_soon()


def _with_remaining(outgoing: _Outgoing) -> Mapping[bytes, bytes]:
    """Return fields with the time that is left now, not when the message was queued."""
    if not outgoing.has_limit:
        return outgoing.fields
    remaining_ms = max(0, int((outgoing.deadline - time.monotonic()) * 1000))
    return {**outgoing.fields, b"ttl_ms": str(remaining_ms).encode()}

"""Registry of living instances: one record each, renewed by heartbeats, expiring soon after they stop."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio.client import Pipeline
from redis.exceptions import ResponseError

from triptych_common.bus.async_bus import AsyncBus
from triptych_common.domain.errors import (
    BusUnavailableError,
    MixedVersionsError,
    ProtocolError,
    UnsupportedVersionError,
)
from triptych_common.protocol import codec
from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_common.protocol.names import DEFAULT_STORE, INBOX_TTL_S, JOBS_TTL_S, inboxes
from triptych_common.redis_client.commands import is_out_of_memory, run_command, send_command, unlink_all
from triptych_common.redis_client.scripts import EXTEND_EXPIRY, load_script
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

INTERVAL_S = 1.0
TTL_S = 4.0
MAX_BEATS = 3  # for one heartbeat that is due
MAX_TTL_S = 30.0  # for a process that rarely gets a core; its death is noticed as late
NUM_PACED = 60  # heartbeats
_FORGET_AFTER_S = 3600.0

BEAT, DEREGISTER = (load_script(__package__, name) for name in ("beat", "deregister"))


class BeatPace:
    """Computes how long a record must live so that a process that is only slow is not taken for dead.

    On a machine with other work a process may get no core for seconds. Its record then outlives such a pause:
    its time to live grows by twice the longest of the last `NUM_PACED` delays of a heartbeat.
    """

    def __init__(self, interval_s: float, ttl_s: float) -> None:
        self._interval_s, self._ttl_s = interval_s, ttl_s
        self._delays_s: deque[float] = deque(maxlen=NUM_PACED)
        self._last: float | None = None

    def ttl_s(self, now: float) -> float:
        """Return the time to live for a heartbeat that is sent at `now`, seconds of any clock."""
        if self._last is not None:
            self._delays_s.append(max(now - self._last - self._interval_s, 0.0))
        self._last = now
        return min(self._ttl_s + 2 * max(self._delays_s, default=0.0), max(self._ttl_s, MAX_TTL_S))


class Registration:
    def __init__(
        self,
        registry: "Registry",
        record: InstanceRecord,
        ttl_s: float,
        read_fields: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """Store the record; `read_fields` returns changing fields, read for each heartbeat."""
        self._registry = registry
        self.ttl_s = ttl_s  # seconds that the record lives after each heartbeat
        self._read_fields = read_fields
        self._is_registered = False
        self.record = record

    async def update(self, **changes: Any) -> None:
        """Change fields of the record (e.g. `draining=True`) and publish them at once.

        Raises:
            ValidationError: a change is not valid.
            BusUnavailableError: the change is kept, and goes out with the next heartbeat.
        """
        self.record = InstanceRecord.model_validate({**self.record.model_dump(), **changes})
        await self.beat()

    async def announce_draining(self) -> None:
        """Announce that this instance takes nothing new; with the next heartbeat if Redis is away."""
        try:
            await self.update(draining=True)
        except BusUnavailableError as error:
            log.warning("draining not announced yet", instance=self.record.instance, error=str(error))

    async def beat(self) -> None:
        if self._read_fields is not None:
            self.record = self.record.model_copy(update=dict(self._read_fields()))
        previous = await self._registry.register(self.record, ttl_s=self.ttl_s)
        if self._is_registered and previous not in (None, self.record.boot_id):
            log.warning(
                "another process uses this instance's name", instance=self.record.instance, boot_id=previous
            )
        self._is_registered = True

    async def beat_in_time(self) -> None:
        """Publish the record, with another heartbeat for each quarter of its lifetime without an answer.

        The network may have lost an answer, or TCP may wait longer than the record lives before it sends
        again. A reachable Redis answers on a new connection at once; pooled ones may be dead too, hence up to
        `MAX_BEATS`.

        Raises:
            BusUnavailableError: none was answered.
        """
        loop = asyncio.get_running_loop()
        beats = [loop.create_task(self.beat())]
        pending = set(beats)
        pause_s = self.ttl_s / (MAX_BEATS + 1)
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done and len(beats) < MAX_BEATS:
                    beats.append(loop.create_task(self.beat()))
                    pending.add(beats[-1])
                errors = [each.exception() for each in done]
                if None in errors:
                    return
                for error in errors:
                    if error is not None and not (pending and isinstance(error, BusUnavailableError)):
                        raise error
        finally:
            for each in beats:
                each.cancel()
            await asyncio.gather(*beats, return_exceptions=True)


class Registry:
    def __init__(self, bus: AsyncBus) -> None:
        self._bus = bus
        self._names = bus.names

    @asynccontextmanager
    async def keep_registered(
        self,
        record: InstanceRecord,
        *,
        interval_s: float = INTERVAL_S,
        ttl_s: float = TTL_S,
        read_fields: Callable[[], Mapping[str, Any]] | None = None,
    ) -> AsyncIterator[Registration]:
        """Keep the instance registered inside the body, over losses of Redis; deregister at its end.

        Args:
            read_fields: valid fields of the record that change all the time; called for each heartbeat.

        Raises:
            BusUnavailableError: the first registration failed.
            MixedVersionsError: a registered instance speaks another schema version.
        """
        await self._refuse_other_versions()
        registration = Registration(self, record, ttl_s, read_fields)
        await registration.beat()
        heartbeat = asyncio.get_running_loop().create_task(self._heartbeat(registration, interval_s))
        try:
            yield registration
        finally:
            heartbeat.cancel()
            await asyncio.gather(heartbeat, return_exceptions=True)
            try:
                await self.deregister(registration.record)
            except BusUnavailableError as error:
                log.warning(
                    "instance not deregistered, its record expires", error=str(error)
                )  # the record expires by itself

    async def register(self, record: InstanceRecord, *, ttl_s: float = TTL_S) -> str | None:
        """Send one heartbeat.

        Returns:
            The boot id that was registered under this name before, if any.
        """
        key, value, now = self._names.instance(record.instance), codec.encode_record(record), time.time()
        beat = BEAT.arguments(
            value=value, ttl_ms=int(ttl_s * 1000), instance=record.instance, now=str(now),
            before=str(now - _FORGET_AFTER_S), record_prefix=self._names.instance(""),
        )  # fmt: skip

        async def send() -> bytes | None:
            async with self._bus.client.pipeline(transaction=False) as pipe:
                pipe.eval(BEAT.text, 2, key, self._names.instances, *beat)
                if (namespace_digest := _encodes_for(record)) is not None:
                    pipe.set(self._names.had_encoder(namespace_digest), store_of(record), ex=JOBS_TTL_S)
                self._renew_streams(pipe, record)
                try:
                    previous: bytes | None = (await pipe.execute())[0]
                except ResponseError as error:
                    if is_out_of_memory(error):  # Redis stores nothing new, but renews existing records
                        await self._renew(record, ttl_s)
                    raise
                return previous

        previous = await run_command("register", send)
        if previous is None:
            return None
        try:
            return codec.decode_record(previous).boot_id
        except ProtocolError:
            return None

    async def _renew(self, record: InstanceRecord, ttl_s: float) -> None:
        async with self._bus.client.pipeline(transaction=False) as pipe:
            pipe.pexpire(self._names.instance(record.instance), int(ttl_s * 1000))
            self._renew_streams(pipe, record)
            await pipe.execute()

    def _renew_streams(self, pipe: Pipeline, record: InstanceRecord) -> None:
        for inbox in inboxes(self._names, record.instance):
            pipe.expire(inbox, INBOX_TTL_S)
        if (namespace_digest := _encodes_for(record)) is not None:
            jobs = self._names.encode_jobs(namespace_digest, store_of(record))
            pipe.expire(self._names.had_encoder(namespace_digest), JOBS_TTL_S)
            pipe.eval(EXTEND_EXPIRY.text, 1, jobs, *EXTEND_EXPIRY.arguments(ttl_ms=JOBS_TTL_S * 1000))

    async def deregister(self, record: InstanceRecord) -> None:
        """Remove `record`, unless a later boot of the same instance has registered."""
        keys = (self._names.instance(record.instance), self._names.instances)
        arguments = DEREGISTER.arguments(boot_id=record.boot_id, instance=record.instance)
        client = self._bus.client
        await run_command(
            "deregister", lambda: send_command(client, "EVAL", DEREGISTER.text, 2, *keys, *arguments)
        )

    async def clear_inboxes(self, instance: str) -> None:
        """Delete the streams that only `instance` read, unless it is registered (again).

        Call it when its readers have ended. If Redis is away they expire, `INBOX_TTL_S` later.
        """
        client, key = self._bus.client, self._names.instance(instance)

        async def clear() -> None:  # a start in between makes its streams again, as after any loss of them
            if not await send_command(client, "EXISTS", key):
                await unlink_all(client, inboxes(self._names, instance))

        try:
            await run_command("clear_inboxes", clear)
        except BusUnavailableError as error:
            log.warning("inboxes not deleted, they expire", instance=instance, error=str(error))

    async def list_instances(self) -> list[InstanceRecord]:
        """Return the living instances, by name; records of another version are left out and logged."""
        records: list[InstanceRecord] = []
        for name, value in await self._living():
            try:
                records.append(codec.decode_record(value))
            except ProtocolError as error:
                log.warning("instance record refused", instance=name, error=str(error))
        return records

    async def _refuse_other_versions(self) -> None:
        for name, value in await self._living():
            try:
                codec.decode_record(value)
            except UnsupportedVersionError as error:
                raise MixedVersionsError(name, error) from error
            except ProtocolError:  # not of a service; `list_instances` logs it
                continue

    async def _living(self) -> list[tuple[str, bytes]]:
        client = self._bus.client
        reply: list[bytes] = await run_command(
            "list_instances", lambda: send_command(client, "ZRANGE", self._names.instances, 0, -1)
        )
        names = sorted(reply)
        keys = [self._names.instance(name.decode()) for name in names]
        values: list[bytes | None] = []
        if keys:
            values = await run_command("list_instances", lambda: send_command(client, "MGET", *keys))
        pairs = zip(names, values, strict=True)
        return [(name.decode(), value) for name, value in pairs if value is not None]

    async def had_encoder(self, namespace_digest: str) -> bool:
        """Return whether the namespace had an encoder, of any store, in the last `JOBS_TTL_S`."""
        client, key = self._bus.client, self._names.had_encoder(namespace_digest)
        return bool(await run_command("had_encoder", lambda: send_command(client, "EXISTS", key)))

    async def _heartbeat(self, registration: Registration, interval_s: float) -> None:
        instance, num_failures = registration.record.instance, 0
        pace, loop = BeatPace(interval_s, registration.ttl_s), asyncio.get_running_loop()
        while True:
            await asyncio.sleep(interval_s)
            registration.ttl_s = pace.ttl_s(loop.time())
            try:
                await registration.beat_in_time()
            except BusUnavailableError as error:
                num_failures += 1
                if num_failures & (num_failures - 1) == 0:  # 1st, 2nd, 4th, 8th …
                    log.warning(
                        "heartbeat failed", instance=instance, error=str(error), num_failures=num_failures
                    )
                continue
            except Exception:  # without heartbeats the instance would go on, unseen by all others
                log.exception("heartbeat failed", instance=instance)
                continue
            if num_failures:
                log.info("heartbeat works again", instance=instance, num_failures=num_failures)
                num_failures = 0


def _encodes_for(record: InstanceRecord) -> str | None:
    """Return the namespace whose jobs the instance takes, or None."""
    return record.namespace_digest if record.role is Role.ENCODE else None


def store_of(record: InstanceRecord) -> str:
    """Return the store whose stream of jobs an encoder reads."""
    return record.store or DEFAULT_STORE


def is_registered(url: str, deployment: str, instance: str) -> bool | None:
    """Return whether `instance` has a fresh record; None if Redis cannot be reached.

    Runs an event loop of its own, for scripts.
    """
    return asyncio.run(_is_registered(url, deployment, instance))


async def _is_registered(url: str, deployment: str, instance: str) -> bool | None:
    try:
        async with await AsyncBus.connect(url, deployment, client_name=f"{instance}/healthcheck") as bus:
            return any(record.instance == instance for record in await Registry(bus).list_instances())
    except BusUnavailableError:
        return None

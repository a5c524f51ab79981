"""Probes for the conditions of `topology.Readiness`, one per process, created before its start.

A probe answers quickly: every check is bounded by `CHECK_TIMEOUT_S`, and a peer that is not there yet
means "not met", never an error.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, Self

import httpx

from triptych_cli.system.topology import HttpReady, Readiness, RedisAnswers, Registered, StoreAnswers
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry
from triptych_common.coordination.registry import TTL_S
from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.messages import InstanceRecord
from triptych_common.protocol.store import Ping
from triptych_common.store_session import AsyncStoreSession

CHECK_TIMEOUT_S = 5.0
OLD_RECORD_S = TTL_S + 1.0  # by then the record of a process that is no more has expired
ListInstances = Callable[[], Awaitable[list[InstanceRecord] | None]]
_NOT_MET = (TriptychError, OSError, TimeoutError, httpx.TransportError)


class Probe(Protocol):
    """Readiness condition of one start of a service."""

    condition: str  # the reason while it is not met, for the user

    async def is_met(self) -> bool: ...

    async def answers(self) -> bool | None:
        """True if a service that was ready still answers, even with a refusal; None if unknown."""
        ...


@asynccontextmanager
async def probe_for(readiness: Readiness) -> AsyncIterator[Probe]:
    """Probe for `readiness`, entered before the service starts: it records the state before."""
    async with AsyncExitStack() as stack:
        match readiness:
            case RedisAnswers(url):
                yield RedisProbe(await stack.enter_async_context(RegistryReader(url, "default")))
            case StoreAnswers(socket):
                yield StoreProbe(str(socket))
            case HttpReady(url):
                yield HttpProbe(url, await stack.enter_async_context(httpx.AsyncClient(trust_env=False)))
            case Registered(url, deployment, instance):
                reader = await stack.enter_async_context(RegistryReader(url, deployment))
                yield await RegistryProbe.before_start(reader.list_instances, instance)


@dataclass
class RedisProbe:
    """Met once Redis accepts a connection and a command."""

    reader: "RegistryReader"
    condition: str = "Redis does not answer"

    async def is_met(self) -> bool:
        return await self.reader.list_instances() is not None

    answers = is_met


@dataclass
class StoreProbe:
    """Met once the cache_store answers a ping on its socket."""

    socket: str
    condition: str = "the store's socket does not answer"

    async def is_met(self) -> bool:
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                # A name of its own per check: the store keeps names unique among live sessions.
                name = f"supervisor/{uuid.uuid4().hex[:8]}"
                async with await AsyncStoreSession.connect(self.socket, name) as session:
                    await session.request(Ping(seq=0))
        except _NOT_MET:
            return False
        return True

    answers = is_met


class HttpProbe:
    """Met once a GET of `url` answers 200."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self.condition = f"{url} was never asked"
        self._url, self._client = url, client

    async def is_met(self) -> bool:
        return await self._status() == httpx.codes.OK

    async def answers(self) -> bool:
        return await self._status() is not None

    async def _status(self) -> int | None:
        try:
            answer = await self._client.get(self._url, timeout=CHECK_TIMEOUT_S)
        except _NOT_MET as error:
            self.condition = f"{self._url} does not answer ({type(error).__name__})"
            return None
        self.condition = f"{self._url} answers {answer.status_code}: {answer.text[:200]}"
        return answer.status_code


class RegistryReader:
    """Reads the registry over one connection: a starting engine is asked for ten times a second."""

    def __init__(self, url: str, deployment: str) -> None:
        self._url, self._deployment = url, deployment
        self._bus: AsyncBus | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._disconnect()

    async def list_instances(self) -> list[InstanceRecord] | None:
        """Registered instances; None while Redis does not answer."""
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                if self._bus is None:
                    self._bus = await AsyncBus.connect(self._url, self._deployment, client_name="supervisor")
                return await Registry(self._bus).list_instances()
        except _NOT_MET:
            await self._disconnect()
            return None

    async def _disconnect(self) -> None:
        bus, self._bus = self._bus, None
        if bus is not None:
            await bus.close()


class RegistryProbe:
    """Met once `instance` has registered under a boot id that is new since the probe was made.

    If Redis did not answer then, the first answer may hold the record of the previous process or of a quick
    new one. It counts as old until an old one would have expired.
    """

    def __init__(
        self, list_instances: ListInstances, instance: str, old_boots: frozenset[str] | None
    ) -> None:
        self.condition = f"{instance} has not registered in Redis"
        self._list_instances, self._instance = list_instances, instance
        self._old_boots = old_boots  # None: Redis has not answered yet
        self._old_until = float("inf")

    @classmethod
    async def before_start(cls, list_instances: ListInstances, instance: str) -> Self:
        return cls(list_instances, instance, await _boots(list_instances, instance))

    async def is_met(self) -> bool:
        boots = await _boots(self._list_instances, self._instance)
        if boots is None:
            return False
        if self._old_boots is None:
            self._old_boots, self._old_until = boots, time.monotonic() + OLD_RECORD_S
        elif time.monotonic() > self._old_until:
            self._old_boots = frozenset()
        return bool(boots - self._old_boots)

    async def answers(self) -> bool | None:
        self.condition = f"{self._instance} sends no heartbeats to Redis"
        boots = await _boots(self._list_instances, self._instance)
        return None if boots is None else bool(boots)


async def _boots(list_instances: ListInstances, instance: str) -> frozenset[str] | None:
    """Boot ids under which `instance` is registered; None while Redis does not answer."""
    records = await list_instances()
    if records is None:
        return None
    return frozenset(record.boot_id for record in records if record.instance == instance)

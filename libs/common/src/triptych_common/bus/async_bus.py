"""Message bus for asyncio services."""

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from redis.asyncio import Redis

from triptych_common.bus.consumer_group import ConsumerGroup
from triptych_common.bus.consumer_options import ConsumerOptions, FindPeers, OnDeadLetter
from triptych_common.bus.publisher import NewEntry, Publisher, RefusedEntry, StreamBounds
from triptych_common.bus.stream_consumer import StreamConsumer
from triptych_common.domain.errors import BusRefusedError, BusUnavailableError
from triptych_common.protocol import codec
from triptych_common.protocol.messages import Message
from triptych_common.protocol.names import INBOX_TTL_S, JOBS_TTL_S, StreamNames, is_inbox, is_jobs
from triptych_common.redis_client.address import RedisAddress
from triptych_common.redis_client.commands import run_command
from triptych_common.redis_client.rights import Right, find_missing
from triptych_common.redis_client.server_watch import OnServerChanged, ServerWatch
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

CONNECT_RETRY_S = 1.0  # a Redis that is not there yet: the supervisor starts the service again


class AsyncBus:
    """Publish to the streams of one deployment, and make their consumers. Belongs to one event loop.

    Every command is bounded by `COMMAND_LIMIT_S` and raises `BusUnavailableError` when it fails.
    """

    def __init__(self, url: str, deployment: str, *, client_name: str) -> None:
        """Store the address; `connect` reaches Redis.

        Raises:
            ValueError: `url` or `deployment` cannot be used.
        """
        self.names = StreamNames(deployment)
        self._address = RedisAddress.parse(url)
        self._client_name = client_name
        self._watch = ServerWatch()
        self._client = self._address.client(client_name, self._watch)
        is_of_instance = partial(is_inbox, self.names)
        self._publisher = Publisher(self._client, StreamBounds(is_of_instance), is_of_instance)

    @classmethod
    async def connect(cls, url: str, deployment: str, *, client_name: str) -> Self:
        """Return a bus that has reached Redis once and has the rights that it needs there (`rights`).

        Raises:
            BusRefusedError: login, rights or certificate are wrong.
            BusUnavailableError: Redis cannot be reached.
        """
        bus = cls(url, deployment, client_name=client_name)
        try:
            missing = await bus.check()
        except BaseException:
            await bus.close()
            raise
        for right in missing:
            log.info("the user of redis lacks a right", right=f"+{right.command}", without=right.without)
        return bus

    async def close(self) -> None:
        """Close the connections; consumers close their own."""
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def client(self) -> Redis:
        return self._client

    def on_server_changed(self, callback: OnServerChanged) -> None:
        """Call `callback` whenever Redis was restarted, failed over or emptied.

        Messages published before may be lost: publish unanswered ones again. It is called on
        the bus's event loop, must not block, and may be called more than once for one change. A bus
        notices a change with its next command; one that has a consumer, within the block time.
        """
        self._watch.on_changed(callback)

    async def check(self) -> tuple[Right, ...]:
        """Try every right that is needed; return the optional ones that are missing.

        Raises:
            BusRefusedError: a required right is missing; the error names it.
            BusUnavailableError: Redis cannot be reached.
        """
        return await run_command(
            "connect", lambda: find_missing(self._client, self.names), retry_for_s=CONNECT_RETRY_S
        )

    async def publish(
        self,
        stream: str,
        message: Message,
        *,
        traceparent: str | None = None,
        remaining_ms: int | None = None,
        blob: bytes | None = None,
    ) -> str:
        """Append `message` to `stream` at least once: after an error it may have been appended.

        Returns:
            The entry's id.

        Raises:
            StreamFullError: the stream's reader has stopped; nothing was appended.
            BusUnavailableError
        """
        fields = codec.encode(message, traceparent=traceparent, remaining_ms=remaining_ms, blob=blob)
        return await self._publisher.append(stream, fields)

    async def publish_encoded(self, entries: Sequence[NewEntry]) -> list[RefusedEntry]:
        """Append entries in one round trip, without a retry.

        Returns:
            The refused entries, in order.

        Raises:
            BusUnavailableError: any of them may have been appended.
        """
        return await self._publisher.append_all(entries)

    def _lasts_s(self, stream: str) -> int | None:
        """Return the lifetime of a new stream of jobs or of an instance; other streams stay."""
        if is_jobs(self.names, stream):
            return JOBS_TTL_S
        return INBOX_TTL_S if is_inbox(self.names, stream) else None

    async def stream_length(self, stream: str) -> int:
        """Return the number of entries in `stream` that are not read, or read and not acked."""
        return await self._publisher.length(stream)

    def consumer(
        self,
        stream: str,
        *,
        group: str,
        consumer: str,
        prefetch: int = 1,
        min_idle_ms: int | None = None,
        max_deliveries: int | None = None,
        on_dead_letter: OnDeadLetter | None = None,
        find_peers: FindPeers | None = None,
        num_elsewhere: Callable[[], int] = lambda: 0,
        on_room: Callable[[], None] = lambda: None,
    ) -> StreamConsumer:
        """Return a consumer named `consumer` of `group`; `ConsumerOptions` describes the rest.

        The name must be stable over restarts of its owner, and unique among living ones: entries delivered to
        that name and never acked come first.
        """
        options = ConsumerOptions(
            prefetch, min_idle_ms, max_deliveries, on_dead_letter, find_peers, num_elsewhere, on_room
        )
        reader = self._address.client(f"{self._client_name}/{consumer}", self._watch)
        return StreamConsumer(
            reader,
            ConsumerGroup(self._client, reader, stream, group, consumer, lasts_s=self._lasts_s(stream)),
            self.names.dead_letters,
            options,
            self._watch,
        )


async def check_login(url: str, deployment: str, *, client_name: str) -> None:
    """Connect to Redis once and close; a Redis that cannot be reached yet is no error.

    Raises:
        BusRefusedError: login, rights or certificate are wrong.
    """
    try:
        async with await AsyncBus.connect(url, deployment, client_name=client_name):
            return
    except BusRefusedError:
        raise
    except BusUnavailableError as error:
        log.warning("redis is not reachable yet", error=str(error))

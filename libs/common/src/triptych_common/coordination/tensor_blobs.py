"""Bytes of tensors in Redis, for the transport `redis`: the fallback where no memory can be shared.

Synchronous, for vLLM's workers. Each call ends in bounded time: one repetition on a new connection, and a
limit on every wait for the network.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from redis import Redis, exceptions

from triptych_common.domain.errors import BusUnavailableError, ItemTooLargeError
from triptych_common.protocol.names import StreamNames
from triptych_common.redis_client.address import RedisAddress
from triptych_common.redis_client.blocking import BlockingClients
from triptych_common.redis_client.commands import refusal, unavailable

SOCKET_TIMEOUT_S = 2.0  # without any progress
NUM_ATTEMPTS = 2
TTL_S = 600  # renewed whenever the tensor is pinned
NOT_PRIMARY = (
    exceptions.ReadOnlyError
    | exceptions.MasterDownError
    | exceptions.TryAgainError
    | exceptions.ClusterDownError
    | exceptions.AskError  # and MovedError
)
MAX_BLOB_BYTES = 256 << 20  # Redis itself takes no value above 512 MiB

T = TypeVar("T")


class BlobMissingError(BusUnavailableError):
    """The bytes are not in Redis: they were lost or have expired."""


class BlobStore:
    """Tensors of one deployment, by place (`Descriptor`: mm_hash, generation, offset). Thread-safe."""

    def __init__(self, url: str, deployment: str, *, client_name: str) -> None:
        self._names = StreamNames(deployment)
        self._clients = BlockingClients(
            RedisAddress.parse(url), client_name, socket_timeout_s=SOCKET_TIMEOUT_S
        )

    def put(self, place: str, data: memoryview) -> None:
        """Store `data` for `TTL_S` seconds.

        Raises:
            ItemTooLargeError: more than `MAX_BLOB_BYTES`.
            BusUnavailableError: Redis cannot be reached, or is out of memory.
        """
        if data.nbytes > MAX_BLOB_BYTES:
            raise ItemTooLargeError("too_large", f"{data.nbytes} bytes are too many for Redis")
        key = self._names.tensor(place)
        self._call("put tensor", key, lambda client: client.set(key, data, ex=TTL_S))

    def get(self, place: str, num_bytes: int) -> bytes:
        """Return the bytes at `place`.

        Raises:
            BlobMissingError: they are gone, or are not `num_bytes` long.
            BusUnavailableError: Redis cannot be reached.
        """
        key = self._names.tensor(place)
        data = cast("bytes | None", self._call("get tensor", key, lambda client: client.get(key)))
        if data is None or len(data) != num_bytes:
            raise BlobMissingError(f"no tensor of {num_bytes} bytes at {place}")
        return data

    def renew_tensor(self, place: str, num_bytes: int) -> bool:
        """Return whether `num_bytes` are there; if so, keep them for another `TTL_S` seconds.

        Raises:
            BusUnavailableError: Redis cannot be reached.
        """
        key = self._names.tensor(place)

        def ask(client: Redis) -> list[Any]:
            # A pipeline of its own for each attempt: one that failed is empty.
            with client.pipeline(transaction=False) as pipe:
                pipe.strlen(key)
                pipe.expire(key, TTL_S)
                return pipe.execute()

        found, _ = self._call("renew tensor", key, ask)
        return bool(found == num_bytes)

    def close(self) -> None:
        self._clients.close()

    def _call(self, action: str, key: str, call: Callable[[Redis], T]) -> T:
        for attempt in range(NUM_ATTEMPTS):
            try:
                return call(self._clients.client_of(key))
            except (exceptions.RedisError, OSError) as error:
                is_lost = isinstance(error, exceptions.ConnectionError | NOT_PRIMARY)
                if attempt + 1 == NUM_ATTEMPTS or not is_lost or refusal(error) is not None:
                    raise unavailable(action, error) from error
                self._clients.reconnect()
        raise BusUnavailableError(f"{action}: not tried")

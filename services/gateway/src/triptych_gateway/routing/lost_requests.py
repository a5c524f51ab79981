"""Requests whose instances ended while they had them: the same request again would end the next instance.

    two instances within `MEMORY_S` ended with equal bodies of one API key --> refused until that time is over

A body that is answered meanwhile is forgotten: it was not at fault.
"""

import time
from collections.abc import Callable, Iterable

from blake3 import blake3
from cachetools import TTLCache

from triptych_gateway.routing.instances import InstanceLosses, Life
from triptych_gateway.routing.router import ServingStage

MEMORY_S = 300.0
MAX_REQUESTS = 1024
MAX_HASHED_BYTES = 4 << 20  # of a body, beside its length; longer ones hold raw media
_OWN_FIELDS = b',"ec_transfer_params":'  # the gateway's, last in a body: they differ with each request


class LostRequests:
    """Digests of recent requests with which instances ended, of one gateway."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lives: TTLCache[bytes, frozenset[Life]] = TTLCache(MAX_REQUESTS, MEMORY_S, clock)

    def __len__(self) -> int:
        """Return the number of remembered requests; at 0 callers spare themselves the parts of a request."""
        return len(self._lives)

    def check(self, *parts: bytes) -> None:
        """Refuse a request with which as many instances have ended as one request may end.

        Args:
            parts: what makes a request the same: its key, its path and its body, in this order.

        Raises:
            RequestError: 502.
        """
        if lives := self._lives.get(_digest(*parts)):
            losses = InstanceLosses(dict.fromkeys(lives, ServingStage.WHOLE))
            if losses.are_too_many:
                raise losses.error()

    def add(self, lives: Iterable[Life], *parts: bytes) -> None:
        """Note which instances have ended with a request."""
        digest = _digest(*parts)
        self._lives[digest] = self._lives.get(digest, frozenset()) | frozenset(lives)

    def discard(self, *parts: bytes) -> None:
        """Forget a request that was answered."""
        self._lives.pop(_digest(*parts), None)


def without_own_fields(body: bytes) -> bytes:
    """Return the part of a body with metadata that is the same each time.

    It takes 0.4 ms per MB, so bodies with raw media are to be left out.
    """
    end = body.rfind(_OWN_FIELDS)
    return body if end < 0 else body[:end]


def _digest(*parts: bytes) -> bytes:
    *names, body = parts
    hasher = blake3(b"\0".join(names) + b"\0%d\0" % len(body))
    return hasher.update(memoryview(body)[:MAX_HASHED_BYTES]).digest()

"""Reopens objects built on a store session, on demand and after the session is over.

A session survives a store that restarts with its region; with another region it is over. Opening does not
wait: where no store listens, the attempt fails at once, and the next one is made some time later.
"""

import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from triptych_common.domain.errors import TriptychError
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 1.0


class OverStore(Protocol):
    @property
    def has_ended(self) -> bool: ...

    def close(self) -> None: ...


Opened = TypeVar("Opened", bound=OverStore)


class Reopened(Generic[Opened]):
    """Holds one such object; `open_anew` raises TriptychError if it cannot be opened."""

    def __init__(self, open_anew: Callable[[], Opened], now: Callable[[], float] = time.monotonic) -> None:
        self._open_anew = open_anew
        self._now = now
        self._opened: Opened | None = None
        self._retry_s = FIRST_RETRY_S
        self._retry_at = float("-inf")

    @property
    def opened(self) -> Opened | None:
        """The object as last opened, ended or not."""
        return self._opened

    def try_get(self) -> Opened | None:
        """The open object; None without a store."""
        if self._opened is not None and not self._opened.has_ended:
            return self._opened
        if self._now() < self._retry_at:
            return None
        try:
            return self.get()
        except TriptychError as error:
            if self._retry_s == FIRST_RETRY_S:  # once for each time that it goes away
                log.warning("no session with the store", error=str(error))
            self._retry_at = self._now() + self._retry_s
            self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
            return None

    def get(self) -> Opened:
        """The open object; raises TriptychError if it cannot be opened."""
        if self._opened is None or self._opened.has_ended:
            self.close()
            self._opened = self._open_anew()
            self._retry_s = FIRST_RETRY_S
        return self._opened

    def close(self) -> None:
        """Close the object; the next use opens it again. Idempotent."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

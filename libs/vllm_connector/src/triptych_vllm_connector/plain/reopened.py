"""What has a session with the store, opened when it is needed, and again when the session is over.

A session outlives a store that comes back with its region; with another region it is over. Opening does not
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
    """A session, or what is built on one."""

    @property
    def has_ended(self) -> bool: ...

    def close(self) -> None: ...


Opened = TypeVar("Opened", bound=OverStore)


class Reopened(Generic[Opened]):
    """`open_anew` raises TriptychError where it cannot."""

    def __init__(self, open_anew: Callable[[], Opened], now: Callable[[], float] = time.monotonic) -> None:
        self._open_anew = open_anew
        self._now = now
        self._opened: Opened | None = None
        self._retry_s = FIRST_RETRY_S
        self._retry_at = float("-inf")

    @property
    def opened(self) -> Opened | None:
        """As it was opened last, ended or not."""
        return self._opened

    def try_get(self) -> Opened | None:
        """None: no store is there."""
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
        """Raises TriptychError where it cannot be opened."""
        if self._opened is None or self._opened.has_ended:
            self.close()
            self._opened = self._open_anew()
            self._retry_s = FIRST_RETRY_S
        return self._opened

    def close(self) -> None:
        """May be called twice. It is opened again when it is asked for."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

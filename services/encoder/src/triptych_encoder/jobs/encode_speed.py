"""Speed of this encoder, announced to the others of its namespace: seconds for a row in recent encodes.

Announced when it has changed by `CHANGE`, so that noise is not announced.
"""

import asyncio

from triptych_common.coordination import Registration
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

MIN_ENCODES = 4  # the first ones take longer
FADE = 0.9  # of what was known, with each encode
CHANGE = 1.25
ANNOUNCE_S = 5.0


class EncodeSpeed:
    """Measured speed of one encoder, used in one event loop; `run` announces it."""

    def __init__(self) -> None:
        self._num_encodes = 0
        self._rows = 0.0
        self._seconds = 0.0
        self._announced: float | None = None

    def observe(self, num_rows: int, seconds: float) -> None:
        """Record vLLM's seconds for an item of `num_rows` rows."""
        if num_rows <= 0 or seconds <= 0:
            return
        self._num_encodes += 1
        if self._num_encodes > 1:
            self._rows = FADE * self._rows + num_rows
            self._seconds = FADE * self._seconds + seconds

    @property
    def row_s(self) -> float | None:
        """Seconds for a row; None until measured."""
        return self._seconds / self._rows if self._num_encodes >= MIN_ENCODES else None

    def poll_change(self) -> float | None:
        """Value to announce; None if it has not changed enough."""
        row_s, known = self.row_s, self._announced
        if row_s is None or (known is not None and known / CHANGE < row_s < known * CHANGE):
            return None
        self._announced = row_s
        return row_s

    async def run(self, registration: Registration) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_S)
            if (row_s := self.poll_change()) is not None:
                try:
                    await registration.update(row_s=row_s)
                except BusUnavailableError as error:
                    log.info("encoder's speed not announced yet", error=str(error))

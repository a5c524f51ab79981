"""Bounded log lines that callers cause: the first few of each reason, then a count.

Without it, requests with a wrong key write 10 GB a day.
"""

import asyncio
from collections import Counter
from typing import LiteralString

from triptych_common.telemetry.logs import Logger

BURST = 20  # lines of one reason in an interval
INTERVAL_S = 60.0
MAX_REASONS = 64  # in an interval; further ones share one
OTHERS = ("others",)


class LimitedLog:
    """Log to `target` from an event loop: `BURST` lines of each reason per `INTERVAL_S`, then a count.

    A reason is the line's text with the `reason` arguments of `info`.
    """

    def __init__(self, target: Logger) -> None:
        self._target = target
        self._counts: Counter[tuple[str, ...]] = Counter()  # lines of this interval, by reason
        self._timer: asyncio.TimerHandle | None = None

    def info(self, text: LiteralString, /, *reason: str, **fields: object) -> None:
        """Write the line, or count it if its reason has reached `BURST`."""
        key = (text, *reason)
        if key not in self._counts and len(self._counts) >= MAX_REASONS:
            key = OTHERS
        self._counts[key] += 1
        if self._counts[key] <= BURST:
            self._target.info(text, **fields)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self.end_interval)

    def end_interval(self) -> None:
        """Write the number of suppressed lines, and start again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for (text, *reason), count in self._counts.items():
            if count > BURST:
                num_left_out = count - BURST
                self._target.info("log lines left out", of=text, reason=reason, num_left_out=num_left_out)
        self._counts.clear()

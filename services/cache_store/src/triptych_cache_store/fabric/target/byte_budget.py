"""Budget of bytes reserved for other agents' entries and not yet sealed. Pure but for futures.

An offer is `ACCEPTED` when it gets its part; the source sends nothing before. More urgent classes come first,
then earlier offers. Entries not yet sealed at their source may take three quarters, so that entries ready to
be sent do not wait for encoders. An entry larger than the budget may take all of it.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from triptych_common.domain.fair_turns import LEVELS
from triptych_common.protocol.messages import EncodeClass

UNSEALED_SHARE = 0.75


@dataclass(order=True)
class _Claim:
    level: int
    order: int
    num_bytes: int = field(compare=False)
    is_sealed: bool = field(compare=False)
    granted: "asyncio.Future[None]" = field(compare=False)


class ByteBudget:
    """Budget of `max_bytes`, used in one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._claims: list[_Claim] = []
        self._orders = itertools.count()
        self.num_bytes = 0

    @asynccontextmanager
    async def hold(
        self, num_bytes: int, encode_class: EncodeClass, *, is_sealed: bool
    ) -> AsyncIterator[None]:
        """Hold `num_bytes` of the budget during the body, after waiting for them."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        claim = _Claim(LEVELS[encode_class], next(self._orders), num_bytes, is_sealed, granted)
        self._claims.append(claim)
        self._grant()
        try:
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():
                self.num_bytes -= num_bytes
            else:
                self._claims.remove(claim)
            self._grant()

    def _grant(self) -> None:
        for claim in sorted(self._claims):
            if claim.granted.done():  # cancelled: its owner is about to remove it
                continue
            limit = self._max_bytes * (1.0 if claim.is_sealed else UNSEALED_SHARE)
            if self.num_bytes and self.num_bytes + claim.num_bytes > limit:
                if claim.is_sealed:
                    return  # it is the next one; what comes after it does not pass it
                continue
            self.num_bytes += claim.num_bytes
            self._claims.remove(claim)
            claim.granted.set_result(None)

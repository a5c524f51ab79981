"""Wait of a request for encoders: for its sizes, and later for the tensors it was sent without.

It gives up, with an `EncodeUnavailableError`, when

    no encoder was registered for `encoder_grace_s`; later on, only where there is another way
    an item failed, all attempts used up (`MediaWait.wait_failure`)
    the deadline has passed: that of the first token, or `local_encode_after_s` where an instance has a tower

Faulty media are another error.
"""

import asyncio
import time
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass, field

from triptych_gateway.encode.encode_orders import EncodeOrders
from triptych_gateway.encode.media_wait import MediaWait
from triptych_gateway.errors import EncodeUnavailableError
from triptych_gateway.race import race
from triptych_gateway.routing.pairs import has_tower
from triptych_gateway.routing.registry_view import RegistryView


@dataclass(frozen=True, slots=True)
class EncodeWait:
    """Wait of one request, from now on."""

    view: RegistryView
    orders: EncodeOrders
    media_wait: MediaWait
    model: str
    encoder_grace_s: float
    local_encode_after_s: float
    may_go_local: bool = True  # False: no instance could encode it, there is no other way left
    only: Set[str] | None = None  # the instances that it may go to; None: all of its namespace
    may_go_elsewhere: Callable[[], bool] = lambda: False  # to another version of its model, with encoders
    began_at: float = field(default_factory=time.monotonic)

    @property
    def has_local_encode(self) -> bool:
        """True if an instance could encode the media; media with options are for encoders alone."""
        if not self.may_go_local:
            return False
        if any(item.needs_encoder for item in self.media_wait.items):
            return False
        records = self.view.records
        if self.only is not None:
            records = tuple(record for record in records if record.instance in self.only)
        return has_tower(records, self.model, self.media_wait.namespace_digest, self.media_wait.modalities)

    async def wait_sizes(self) -> None:
        """Order items without sizes, and return when all sizes are known.

        Raises:
            RequestError: an item failed, or `EncodeUnavailableError`.
        """
        media_wait, orders = self.media_wait, self.orders
        until = media_wait.deadline
        if self.has_local_encode:
            until = min(until, self.began_at + self.local_encode_after_s)
        try:
            async with asyncio.timeout(until - time.monotonic()):
                if orders.lacks_job(media_wait):  # without an encoder, jobs would pile up in Redis
                    await race(self._wait_encoder(), media_wait.wait_failure())
                orders.order_missing(media_wait)
                await race(
                    media_wait.wait_sizes(),
                    media_wait.wait_failure(),
                    self._wait_encoder(),
                    self.wait_left(),
                )
        except TimeoutError as error:
            raise _too_late(media_wait.first_without_sizes) from error

    async def wait_given_up(self) -> None:
        """Watch a request sent before its tensors are ready; return at once if no instance can encode it.

        Raises:
            EncodeUnavailableError: an encode takes too long, or its namespace has no encoder.
        """
        if not self.has_local_encode:
            return
        without_encoder_since: float | None = None
        while True:
            await self._wait_refresh(self._give_up_at)
            now = time.monotonic()
            if not self.orders.awaits_job(self.media_wait):
                without_encoder_since = None
                continue
            if now >= self._give_up_at:
                raise _too_late(None)
            if self.view.has_encoder(self.media_wait.namespace_digest):
                without_encoder_since = None
            elif without_encoder_since is None:
                without_encoder_since = now
            elif now - without_encoder_since >= self.encoder_grace_s:
                raise _no_encoder()

    async def wait_left(self) -> None:
        """Guard for the end of the last encoder while another version of the model has encoders.

        Never returns: another version may come.

        Raises:
            EncodeUnavailableError: none was there for `encoder_grace_s`.
        """
        since: float | None = None
        while True:
            await self._wait_refresh(self.media_wait.deadline)
            now = time.monotonic()
            has_encoder = self.view.has_encoder(self.media_wait.namespace_digest)
            if has_encoder or not self.orders.awaits_job(self.media_wait):
                since = None
            elif since is None:
                since = now
            elif now - since >= self.encoder_grace_s and self.may_go_elsewhere():
                raise _no_encoder()

    @property
    def _give_up_at(self) -> float:
        """Return the time limit, from the last `EncodeNeeded`, since a late one is no slow encode."""
        return max(self.began_at, self.media_wait.needed_at) + self.local_encode_after_s

    async def _wait_refresh(self, until: float) -> None:
        remaining_s = until - time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(remaining_s if remaining_s > 0 else None):
                await self.view.wait_for_refresh()

    async def _wait_encoder(self) -> None:
        """Wait for an encoder; as a guard, raise when none registers in time."""
        try:
            async with asyncio.timeout(self.encoder_grace_s):
                await self.view.wait_for_encoder(self.media_wait.namespace_digest)
        except TimeoutError as error:
            raise _no_encoder() from error


def _no_encoder() -> EncodeUnavailableError:
    return EncodeUnavailableError("no_encoder", "no encoder is available")


def _too_late(path: str | None) -> EncodeUnavailableError:
    message = f"{path or 'the media'} could not be encoded in time"
    return EncodeUnavailableError("deadline_exceeded", message, path)

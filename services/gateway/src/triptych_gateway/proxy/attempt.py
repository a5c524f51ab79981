"""Attempt: what a request with media chooses anew on each try; EncodeWait: its wait for encoders.

The wait is for the sizes, and later for the tensors that the request was sent without. It gives up, with an
`EncodeUnavailableError`, when

    no encoder was registered for `encoder_grace_s`; later on, only where there is another way
    an item failed, all attempts used up (`ItemWait.wait_failure`)
    the deadline has passed: that of the first token, or `local_encode_after_s` where an instance has a tower

Faulty media are another error.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Set
from contextlib import suppress
from dataclasses import dataclass, field

from triptych_common.protocol.messages import InstanceRecord
from triptych_gateway.decision.encode_decisions import DecidedRequest
from triptych_gateway.encode.encode_orders import EncodeOrders
from triptych_gateway.encode.item_wait import ItemWait
from triptych_gateway.errors import EncodeUnavailableError
from triptych_gateway.race import race
from triptych_gateway.routing.pairs import has_tower
from triptych_gateway.routing.registry_view import RegistryView
from triptych_gateway.routing.scheduling.candidates import RoutingRequest
from triptych_gateway.settings import EncodeSettings


@dataclass(slots=True)
class Attempt:
    """One try of a request at its variant: the instance, the wait for its items and the decision."""

    routing: RoutingRequest
    chosen: InstanceRecord  # gets the request if encoders encode
    item_wait: ItemWait  # open while encoders are waited for
    decided: DecidedRequest

    @property
    def is_local(self) -> bool:
        """True if the instance is to encode by decision, not because encoders have failed."""
        return self.decided.decision.is_local


@dataclass(frozen=True, slots=True)
class EncodeWait:
    view: RegistryView
    orders: EncodeOrders
    item_wait: ItemWait
    model: str
    settings: EncodeSettings
    may_go_local: bool = True  # False: no instance could encode it, there is no other way left
    only: Set[str] | None = None  # the instances that it may go to; None: all of its namespace
    may_go_elsewhere: Callable[[], bool] = lambda: False  # to another version of its model, with encoders
    keep_open: Callable[[], Awaitable[None]] | None = None  # called now and then while there is no encoder
    began_at: float = field(default_factory=time.monotonic)

    @property
    def has_local_encode(self) -> bool:
        """True if an instance could encode the media; media with options are for encoders alone."""
        if not self.may_go_local:
            return False
        if any(item.needs_encoder for item in self.item_wait.items):
            return False
        records = self.view.records
        if self.only is not None:
            records = tuple(record for record in records if record.instance in self.only)
        return has_tower(records, self.model, self.item_wait.namespace_digest, self.item_wait.modalities)

    async def wait_sizes(self) -> None:
        """Order items without sizes, and return when all sizes are known.

        Raises:
            RequestError: an item failed, or `EncodeUnavailableError`.
        """
        item_wait, orders = self.item_wait, self.orders
        until = item_wait.deadline
        if self.has_local_encode:
            until = min(until, self.began_at + self.settings.local_encode_after_s)
        try:
            async with asyncio.timeout(until - time.monotonic()):
                if orders.lacks_job(item_wait):  # without an encoder, jobs would pile up in Redis
                    await race(self._wait_encoder(), item_wait.wait_failure())
                orders.order_missing(item_wait)
                await race(
                    item_wait.wait_sizes(), item_wait.wait_failure(), self._wait_encoder(), self.wait_left()
                )
        except TimeoutError as error:
            raise _too_late(item_wait.first_without_sizes) from error

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
            if not self.orders.awaits_job(self.item_wait):
                without_encoder_since = None
                continue
            if now >= self._give_up_at:
                raise _too_late(None)
            if self.view.has_encoder(self.item_wait.namespace_digest):
                without_encoder_since = None
            elif without_encoder_since is None:
                without_encoder_since = now
            elif now - without_encoder_since >= self.settings.encoder_grace_s:
                raise _no_encoder()

    async def wait_left(self) -> None:
        """Guard for the end of the last encoder while another version of the model has encoders.

        Never returns: another version may come.

        Raises:
            EncodeUnavailableError: none was there for `encoder_grace_s`.
        """
        since: float | None = None
        while True:
            await self._wait_refresh(self.item_wait.deadline)
            now = time.monotonic()
            has_encoder = self.view.has_encoder(self.item_wait.namespace_digest)
            if has_encoder or not self.orders.awaits_job(self.item_wait):
                since = None
                continue
            if self.keep_open is not None:
                await self.keep_open()
            if since is None:
                since = now
            elif now - since >= self.settings.encoder_grace_s and self.may_go_elsewhere():
                raise _no_encoder()

    @property
    def _give_up_at(self) -> float:
        """Return the time limit, from the last `EncodeNeeded`, since a late one is no slow encode."""
        return max(self.began_at, self.item_wait.needed_at) + self.settings.local_encode_after_s

    async def _wait_refresh(self, until: float) -> None:
        remaining_s = until - time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(remaining_s if remaining_s > 0 else None):
                await self.view.wait_for_refresh()

    async def _wait_encoder(self) -> None:
        """Wait for an encoder; as a guard, raise when none registers in time."""
        try:
            async with asyncio.timeout(self.settings.encoder_grace_s):
                while not self.view.has_encoder(self.item_wait.namespace_digest):
                    if self.keep_open is not None:
                        await self.keep_open()
                    await self.view.wait_for_refresh()
        except TimeoutError as error:
            raise _no_encoder() from error


def _no_encoder() -> EncodeUnavailableError:
    return EncodeUnavailableError("no_encoder", "no encoder is available")


def _too_late(path: str | None) -> EncodeUnavailableError:
    message = f"{path or 'the media'} could not be encoded in time"
    return EncodeUnavailableError("deadline_exceeded", message, path)

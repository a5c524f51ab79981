"""How long a request waits for encoders: for its sizes, and later for the tensors that it was sent without.

    lost hope   no encoder registered for `encoder_grace_s`
                an item failed, all attempts used up (the ticket tells)
                the deadline: of the first token; earlier where another way is left (`local_encode_after_s`)

Lost hope is an `EncodeUnavailableError`. What is wrong with the media themselves is another error.
"""

import asyncio
import time

from triptych_gateway.chat.race import race
from triptych_gateway.encode.encode_orders import EncodeOrders
from triptych_gateway.encode.media_wait import MediaWait
from triptych_gateway.openai_errors import EncodeUnavailableError
from triptych_gateway.routing.registry_view import RegistryView
from triptych_gateway.routing.router import has_tower
from triptych_gateway.settings import GatewaySettings


class EncodeWait:
    """One request's wait, from now on."""

    def __init__(
        self,
        settings: GatewaySettings,
        view: RegistryView,
        orders: EncodeOrders,
        ticket: MediaWait,
        *,
        model: str,
        namespace_digest: str,
    ) -> None:
        self._grace_s = settings.encoder_grace_s
        self._view = view
        self._orders = orders
        self._ticket = ticket
        self._model = model
        self._digest = namespace_digest
        self._patience_s = settings.local_encode_after_s
        self._give_up_at = time.monotonic() + self._patience_s

    @property
    def has_other_way(self) -> bool:
        """An instance could encode the request's media itself. Media with options are for encoders alone."""
        if any(item.processor_options or item.media_io_options for item in self._ticket.items):
            return False
        return has_tower(self._view.records, self._model, self._digest)

    async def sizes(self) -> None:
        """Order what is not known, and return when the sizes of all items are.

        Raises:
            RequestError: an item failed, or `EncodeUnavailableError`.
        """
        ticket, orders = self._ticket, self._orders
        until = min(ticket.deadline, self._give_up_at) if self.has_other_way else ticket.deadline
        try:
            async with asyncio.timeout_at(_loop_time(until)):
                if orders.lacks_job(ticket):  # without an encoder, jobs would pile up in Redis
                    await race(self._encoder(), ticket.wait_failure())
                orders.order(ticket)
                await race(ticket.wait_sizes(), ticket.wait_failure(), self._encoder())
        except TimeoutError as error:
            raise _too_late(ticket.first_without_sizes) from error

    async def hopeless(self) -> None:
        """A guard for a request that was sent without its tensors. Returns where there is no other way.

        Raises:
            EncodeUnavailableError: an encode is under way for too long, or by nobody.
        """
        if not self.has_other_way:
            return
        alone_since: float | None = None
        while True:
            await self._next_look()
            now = time.monotonic()
            if not self._orders.awaits_job(self._ticket):
                alone_since = None
                continue
            if now >= self._hopeless_at:
                raise _too_late(None)
            if self._view.has_encoder(self._digest):
                alone_since = None
            elif alone_since is None:
                alone_since = now
            elif now - alone_since >= self._grace_s:
                raise _no_encoder()

    @property
    def _hopeless_at(self) -> float:
        """Counted anew from each `EncodeNeeded`: one that comes late is no encode that takes too long."""
        return max(self._give_up_at, self._ticket.needed_at + self._patience_s)

    async def _next_look(self) -> None:
        """After the next look at the registry, at the latest when the time is up."""
        remaining_s = self._hopeless_at - time.monotonic()
        try:
            async with asyncio.timeout(remaining_s if remaining_s > 0 else None):
                await self._view.wait_for_look()
        except TimeoutError:
            return

    async def _encoder(self) -> None:
        """Also a guard: without any encoder there is little sense in waiting for long."""
        try:
            async with asyncio.timeout(self._grace_s):
                await self._view.wait_for_encoder(self._digest)
        except TimeoutError as error:
            raise _no_encoder() from error


def _no_encoder() -> EncodeUnavailableError:
    return EncodeUnavailableError("no_encoder", "no encoder is available")


def _too_late(path: str | None) -> EncodeUnavailableError:
    message = f"{path or 'the media'} could not be encoded in time"
    return EncodeUnavailableError("deadline_exceeded", message, path)


def _loop_time(monotonic_s: float) -> float:
    return asyncio.get_running_loop().time() + monotonic_s - time.monotonic()

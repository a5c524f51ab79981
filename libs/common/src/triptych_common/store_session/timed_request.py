"""One command of an asyncio session within a time limit; a late answer is undone."""

import asyncio
from collections.abc import Callable

from triptych_common.domain.errors import StoreUnavailableError, store_error
from triptych_common.protocol.store import StoreCommand, StoreFailure, StoreReply
from triptych_common.store_session.async_session import AsyncStoreSession


async def request_within(
    session: AsyncStoreSession, command: StoreCommand, timeout_s: float, undo: Callable[[StoreReply], None]
) -> StoreReply:
    """Return the store's answer, after its restart if need be.

    An answer that is late, or follows a cancellation of the caller, goes to `undo`: nothing stays held.

    Raises:
        StoreError: the store refused, is gone, or did not answer within `timeout_s` seconds.
    """

    def undo_late(late: "asyncio.Future[StoreReply]") -> None:
        if not late.cancelled() and late.exception() is None:
            undo(late.result())

    future = session.submit(command)
    try:
        await asyncio.wait({future}, timeout=timeout_s)
    except asyncio.CancelledError:  # the answer may have arrived just now: undo it
        future.add_done_callback(undo_late)
        raise
    if not future.done():
        future.add_done_callback(undo_late)
        raise StoreUnavailableError(f"no answer in {timeout_s:g} s", code="timeout")
    reply = future.result()
    if isinstance(reply, StoreFailure):
        raise store_error(reply)
    return reply

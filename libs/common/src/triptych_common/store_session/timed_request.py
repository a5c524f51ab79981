"""Commands of an asyncio session: one within a time limit, whose late answer is undone, and final ones."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from triptych_common.domain.errors import StoreProtocolError, StoreUnavailableError, store_error
from triptych_common.protocol.store import StoreCommand, StoreFailure, StoreFrame, StoreReply
from triptych_common.store_session.async_session import AsyncStoreSession
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

Expected = TypeVar("Expected", bound=StoreFrame)


async def request_within(
    session: AsyncStoreSession,
    command: StoreCommand,
    timeout_s: float,
    undo: Callable[[StoreReply], None],
    *expected: type[Expected],
) -> Expected:
    """Return the store's answer of one of the `expected` types, after its restart if need be.

    An answer that is late, or follows a cancellation of the caller, goes to `undo`: nothing stays held.

    Raises:
        StoreProtocolError: the answer has another type.
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
    if not isinstance(reply, expected):
        raise StoreProtocolError("bad_frame", f"the store answered {reply.kind!r} to {command.kind!r}")
    return reply


def submit_final(session: AsyncStoreSession, command: StoreCommand) -> None:
    """Send a command that ends something; if it is lost, the end of the session has the same effect."""
    session.submit(command).add_done_callback(_log_failure)


def _log_failure(future: "asyncio.Future[StoreReply]") -> None:
    if not future.cancelled() and future.exception() is not None:
        log.info("store command not sent", error=str(future.exception()))

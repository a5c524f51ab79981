"""Calls to the store inside an engine's step, with a time limit.

A late reply brings a pin, a watch or a reservation that no caller waits for any more, and is given back.
Until it has come, no further calls are made: a store that hangs costs one wait, not one for each item.
"""

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.store import (
    Cancel,
    Pinned,
    PinOrWatch,
    Reserve,
    Reserved,
    StoreCommand,
    StoreReply,
    Unpin,
    Unwatch,
    Watching,
)
from triptych_common.store_session import StoreSession
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)


class BoundedCalls:
    """Calls with a time limit, for one thread."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._late: Future[StoreReply] | None = None

    @property
    def is_store_late(self) -> bool:
        """True while a late reply is still due."""
        return self._late is not None and not self._late.done()

    def try_call(self, session: StoreSession, command: StoreCommand) -> StoreReply | None:
        """The store's reply, or its refusal; None if it is unreachable or late."""
        if self.is_store_late or not session.is_connected:
            return None
        future = session.submit(command)
        try:
            return future.result(self._timeout_s)
        except FutureTimeoutError:
            log.warning("store does not answer in time", kind=command.kind, timeout_s=self._timeout_s)
        except TriptychError:
            return None
        self._late = future
        future.add_done_callback(lambda done: _give_back(session, command, done))
        return None


def _give_back(session: StoreSession, command: StoreCommand, done: "Future[StoreReply]") -> None:
    """Give back what the late reply to `command` brought. Runs on the session's thread."""
    if done.exception() is not None:
        return  # the session is over, and all that it held
    reply = done.result()
    if isinstance(command, PinOrWatch) and isinstance(reply, Pinned):
        end_pin(session, reply.pin_id, command.num_holders)
    elif isinstance(command, PinOrWatch) and isinstance(reply, Watching):
        session.submit(Unwatch(seq=0, mm_hash=command.mm_hash))
    elif isinstance(command, Reserve) and isinstance(reply, Reserved):
        session.submit(Cancel(seq=0, reservation_id=reply.reservation_id))


def end_pin(session: StoreSession, pin_id: int, num_holders: int) -> None:
    """End a pin for every rank, without waiting."""
    for _ in range(num_holders):
        session.submit(Unpin(seq=0, pin_id=pin_id))

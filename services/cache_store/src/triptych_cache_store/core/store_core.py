"""Core of the store: takes commands, returns replies and pushes. No I/O, no clock, never awaits.

Commands are handled one at a time, so each is atomic: nothing can be sealed between the lookup and the
watch of `PinOrWatch`. `now` is in monotonic seconds everywhere.
"""

from collections.abc import Callable

from triptych_cache_store.core.commands import Commands
from triptych_cache_store.core.sessions import Sessions
from triptych_cache_store.core.state import Out, Outgoing, Refusal, StoreState
from triptych_cache_store.entries.entry_table import EntryTable
from triptych_cache_store.entries.leases import LeaseTable, SessionId
from triptych_cache_store.entries.space import Space
from triptych_common.protocol.store import Hello, StoreCommand, StoreFailure, StoreReply


class StoreCore:
    """Entry points to the state: commands, ends of connections, checks for dead clients."""

    def __init__(
        self, state: StoreState, *, is_connected: Callable[[SessionId], bool], is_alive: Callable[[int], bool]
    ) -> None:
        self.state = state
        self._commands = Commands(state)
        self._sessions = Sessions(state, is_connected=is_connected, is_alive=is_alive)

    def handle(self, session_id: SessionId, command: StoreCommand, now: float) -> Out:
        """Execute `command`; its reply is first in the result, or comes later (`Verify`)."""
        out: Out = []
        for space in self.state.spaces:
            space.free_held(now)
        try:
            reply = self._reply_to(session_id, command, now, out)
        except Refusal as refusal:
            self.state.counters.num_refused[command.kind, refusal.code] += 1
            failure = StoreFailure(seq=command.seq, code=refusal.code, detail=refusal.detail)
            out.insert(0, Outgoing(session_id, failure, refusal.closes))
        else:
            if reply is not None:
                out.insert(0, Outgoing(session_id, reply))
        return out

    def disconnect(self, session_id: SessionId, now: float) -> Out:
        """Handle the end of a connection; its leases end unless the client lives."""
        out: Out = []
        self._sessions.disconnect(session_id, now, out)
        return out

    def reap(self, now: float) -> Out:
        """End the leases of clients that died after losing their connection."""
        out: Out = []
        self._sessions.reap(now, out)
        return out

    @property
    def num_detached(self) -> int:
        """Number of living clients without a connection; while there are any, `reap` must be called."""
        return self.leases.num_detached

    @property
    def leases(self) -> LeaseTable:
        return self.state.leases

    @property
    def space(self) -> Space:
        return self.state.space

    @property
    def table(self) -> EntryTable:
        return self.state.table

    def _reply_to(
        self, session_id: SessionId, command: StoreCommand, now: float, out: Out
    ) -> StoreReply | None:
        if isinstance(command, Hello):
            return self._sessions.hello(session_id, command, now, out)
        lease = self.leases.find_by_session(session_id)
        if lease is None:
            raise Refusal("not_hello", "the first frame of a session must be hello", closes=True)
        lease.last_seq = command.seq
        self.state.journal.note_seq(lease.slot, command.seq)
        return self._commands.handlers[type(command)](lease, command, now, out)

"""State by which a session survives a restart of the store. Pure.

A session that lost its connection connects again, resumes its lease, and sends again what was not
answered. The store has first undone every `Reserve` and `PinOrWatch` whose answer (or push) did not
arrive, so that nothing is held twice, and nothing without a holder.

    unanswered command    carried out (seq <= last_seq)       not carried out
    Reserve, PinOrWatch   undone by the store, sent again     sent again
    Unpin, Unwatch        a ping is sent, for the answer      sent again
    Seal, Cancel          sent again; unknown_reservation     sent again
                          then means: done
    others                sent again                          sent again
    (open watches)        PinOrWatch sent again; its answer becomes the push
"""

from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from triptych_common.protocol.store import (
    Cancel,
    Done,
    EntrySealed,
    Ping,
    Pinned,
    PinOrWatch,
    Reserve,
    Resume,
    Seal,
    StoreCommand,
    StoreFailure,
    StoreReply,
    Unpin,
    Unwatch,
    Watching,
    Welcome,
    WriterLost,
)

Pending = TypeVar("Pending")
MAX_UNDO_SEQS = 50_000


@dataclass(frozen=True, slots=True)
class Request(Generic[Pending]):
    """Command to send; without `pending` it repeats a watch, whose answer becomes a push."""

    command: StoreCommand
    pending: Pending | None
    is_repeated_end: bool = False  # a seal or cancel that was perhaps carried out before


class Watched(NamedTuple):
    seq: int
    num_holders: int


class WatchLog:
    """Watches of a session, as replies and pushes report them.

    An ending watch is kept until the store answers: its entry may have been sealed and pinned before the
    store got the unwatch. `note_sent` is called by the sender, the rest by the session's one reader.
    """

    def __init__(self) -> None:
        self._watches: dict[str, Watched] = {}
        self._ending: dict[str, int] = {}  # mm_hash -> seq of its latest `Unwatch`, until it is answered

    def note_sent(self, command: StoreCommand, seq: int) -> None:
        if isinstance(command, Unwatch):
            self._ending[command.mm_hash] = seq

    def note_answer(self, command: StoreCommand, reply: StoreReply) -> None:
        if isinstance(command, PinOrWatch) and isinstance(reply, Watching):
            self._watches[command.mm_hash] = Watched(reply.seq, command.num_holders)
        elif isinstance(command, Unwatch):
            if self._is_ended(command.mm_hash, reply.seq):
                del self._watches[command.mm_hash]
            if self._ending.get(command.mm_hash) == reply.seq:
                del self._ending[command.mm_hash]

    def note_push(self, push: EntrySealed | WriterLost) -> None:
        if isinstance(push, EntrySealed):
            self._watches.pop(push.descriptor.mm_hash, None)

    def all(self) -> dict[str, Watched]:
        return dict(self._watches)

    def take_all(self) -> dict[str, Watched]:
        """Return and clear the watches, without those that are ending."""
        ending, self._ending = self._ending, {}
        taken = {
            mm_hash: watched
            for mm_hash, watched in self._watches.items()
            if not self._is_ended(mm_hash, ending.get(mm_hash, 0))
        }
        self._watches = {}
        return taken

    def _is_ended(self, mm_hash: str, unwatch_seq: int) -> bool:
        watched = self._watches.get(mm_hash)
        return watched is not None and watched.seq < unwatch_seq


def resume_of(welcome: Welcome, requests: dict[int, Request[Pending]], watches: dict[str, Watched]) -> Resume:
    """Return the `Resume` for the next hello: the session to resume, and commands for the store to undo."""
    undo = [seq for seq, each in requests.items() if isinstance(each.command, Reserve | PinOrWatch)]
    undo += [watched.seq for watched in watches.values()]
    return Resume(
        region_id=welcome.region_id, lease_id=welcome.lease_id, undo_seqs=tuple(undo[:MAX_UNDO_SEQS])
    )


def is_resumed(before: Welcome, after: Welcome) -> bool:
    """Return whether the session still owns everything it held."""
    return (before.region_id, before.lease_id) == (after.region_id, after.lease_id)


def to_repeat(request: Request[Pending], was_carried_out: bool) -> Request[Pending]:
    """Return the request to send in place of an unanswered one."""
    if was_carried_out and isinstance(request.command, Unpin | Unwatch):
        return replace(request, command=Ping(seq=0))
    if was_carried_out and isinstance(request.command, Seal | Cancel):
        return replace(request, is_repeated_end=True)
    return request


def watch_again(mm_hash: str, watched: Watched) -> Request[Pending]:
    command = PinOrWatch(seq=0, mm_hash=mm_hash, num_holders=watched.num_holders)
    return Request(command, pending=None)


def final_reply(request: Request[Pending], reply: StoreReply) -> StoreReply:
    was_unknown = isinstance(reply, StoreFailure) and reply.code == "unknown_reservation"
    return Done(seq=reply.seq) if request.is_repeated_end and was_unknown else reply


def push_of(command: StoreCommand, reply: StoreReply) -> EntrySealed | WriterLost | None:
    """Return the push for a watcher from the reply to its repeated watch; None: it waits on."""
    if not isinstance(command, PinOrWatch) or (isinstance(reply, Watching) and reply.writing):
        return None
    if isinstance(reply, Pinned):
        return EntrySealed(seq=0, pin_id=reply.pin_id, descriptor=reply.descriptor)
    return WriterLost(seq=0, mm_hash=command.mm_hash)

"""Requests, replies and pushes of one session, without a socket."""

import pytest

from triptych_common.domain.errors import (
    MalformedMessageError,
    NotOwnerError,
    StoreProtocolError,
    StoreUnavailableError,
)
from triptych_common.protocol.codec import FrameDecoder, decode_command, frame
from triptych_common.protocol.store import (
    Descriptor,
    Done,
    EntrySealed,
    Hello,
    Ping,
    Pinned,
    PinOrWatch,
    Reserve,
    Resume,
    Seal,
    StoreCommand,
    StoreFailure,
    StoreReply,
    TensorSpec,
    Unpin,
    Unwatch,
    Watching,
    Welcome,
    WriterLost,
)
from triptych_common.store_session.resumption import Request
from triptych_common.store_session.session_state import SessionState

HASHES = [f"{n:064x}" for n in range(6)]
SPEC = TensorSpec(shape=(1, 1), dtype="float32", num_bytes=4)


def welcome(**fields: object) -> Welcome:
    defaults: dict[str, object] = {
        "seq": 1, "store": "store-0", "generation": 1, "region_path": "/r", "region_num_bytes": 1,
        "block_num_bytes": 1, "region_id": "r1", "lease_id": 7,
    }  # fmt: skip
    return Welcome.model_validate(defaults | fields)


@pytest.fixture
def session() -> SessionState[str]:
    state: SessionState[str] = SessionState("pd-0/engine", None)
    state.begin_connection()
    assert state.on_welcome(frame(welcome())) == []
    return state


def sent(session: SessionState[str], command: StoreCommand, name: str) -> int:
    """Send it; its seq."""
    [body] = FrameDecoder().feed(session.frame_request(Request(command, name)))
    return decode_command(body).seq


def fed(session: SessionState[str], *replies: StoreReply) -> list[tuple[str | None, StoreReply]]:
    return list(session.on_data(b"".join(map(frame, replies))))


def test_replies_in_any_order_and_any_pieces(session: SessionState[str]) -> None:
    a, _, c = (sent(session, Ping(seq=0), name) for name in "abc")
    lost = WriterLost(seq=0, mm_hash=HASHES[0])
    data = frame(Done(seq=c)) + frame(lost) + frame(Done(seq=a))
    events = [event for n in range(len(data)) for event in session.on_data(data[n : n + 1])]
    assert events == [("c", Done(seq=c)), (None, lost), ("a", Done(seq=a))]
    assert session.take_pending() == ["b"]
    assert session.num_pending == 0


@pytest.mark.parametrize("reply", [Done(seq=7), StoreFailure(seq=0, code="bad_frame", detail="no")])
def test_a_reply_to_nothing_ends_the_session(session: SessionState[str], reply: StoreReply) -> None:
    with pytest.raises(StoreProtocolError):
        fed(session, reply)


def test_what_is_no_reply_and_no_push(session: SessionState[str]) -> None:
    for data in (b"\x00\x00\x00\x02{}", b"\xff\xff\xff\xff", frame(Done(seq=0))):
        session.begin_connection()  # a fresh decoder
        with pytest.raises(MalformedMessageError):
            list(session.on_data(data))


def test_hello_is_answered_by_welcome_or_refusal() -> None:
    session: SessionState[str] = SessionState("pd-0/engine", "digest")
    [body] = FrameDecoder().feed(session.begin_connection())
    assert decode_command(body) == Hello(seq=1, version=1, client="pd-0/engine", namespace_digest="digest")
    data = frame(welcome())
    assert session.on_welcome(data[:9]) is None
    assert session.on_welcome(data[9:]) == []
    refused: SessionState[str] = SessionState("pd-0/engine", None)
    with pytest.raises(NotOwnerError):
        refused.on_welcome(frame(StoreFailure(seq=1, code="not_owner", detail="taken")))
    with pytest.raises(StoreProtocolError):
        refused.on_welcome(frame(Done(seq=1)))


def test_after_a_break_the_unanswered_is_undone_and_sent_again(session: SessionState[str]) -> None:
    reserve = Reserve(seq=0, mm_hash=HASHES[0], spec=SPEC)
    carried_out = [
        sent(session, reserve, "reserve"),
        sent(session, Unpin(seq=0, pin_id=5), "unpin"),
        sent(session, Seal(seq=0, reservation_id=6), "seal"),
    ]
    pin = PinOrWatch(seq=0, mm_hash=HASHES[1])
    not_carried_out = [sent(session, pin, "pin"), sent(session, Unpin(seq=0, pin_id=8), "unpin again")]

    [body] = FrameDecoder().feed(session.begin_connection())

    hello = decode_command(body)
    assert isinstance(hello, Hello)
    assert hello.resume == Resume(region_id="r1", lease_id=7, undo_seqs=(carried_out[0], not_carried_out[0]))
    repeats = session.on_welcome(frame(welcome(seq=hello.seq, last_seq=carried_out[-1])))
    assert repeats is not None
    assert [(request.command, request.pending) for request in repeats] == [
        (reserve, "reserve"),
        (Ping(seq=0), "unpin"),
        (Seal(seq=0, reservation_id=6), "seal"),
        (pin, "pin"),
        (Unpin(seq=0, pin_id=8), "unpin again"),
    ]
    # A seal that had been carried out is not known any more: that means done.
    [_, _, seal, *_] = repeats
    [body] = FrameDecoder().feed(session.frame_request(seal))
    seq = decode_command(body).seq
    unknown = StoreFailure(seq=seq, code="unknown_reservation", detail="")
    assert fed(session, unknown) == [("seal", Done(seq=seq))]


def test_open_watches_are_watched_again_and_their_answers_become_pushes(session: SessionState[str]) -> None:
    descriptor = Descriptor(mm_hash=HASHES[4], spec=SPEC, offset=0, generation=1)
    seqs = []
    for mm_hash in HASHES[:5]:
        seqs.append(sent(session, PinOrWatch(seq=0, mm_hash=mm_hash, num_holders=2), mm_hash))
        fed(session, Watching(seq=seqs[-1], mm_hash=mm_hash, writing=False))
    ended = sent(session, Unwatch(seq=0, mm_hash=HASHES[3]), "unwatch")
    fed(session, Done(seq=ended))
    fed(session, EntrySealed(seq=0, pin_id=1, descriptor=descriptor))  # of HASHES[4]

    [body] = FrameDecoder().feed(session.begin_connection())
    hello = decode_command(body)
    assert isinstance(hello, Hello)
    assert hello.resume is not None
    assert hello.resume.undo_seqs == tuple(seqs[:3])
    repeats = session.on_welcome(frame(welcome(seq=hello.seq)))
    assert repeats is not None
    watches = [request for request in repeats if request.pending is None]
    assert [request.command for request in watches] == [
        PinOrWatch(seq=0, mm_hash=mm_hash, num_holders=2) for mm_hash in HASHES[:3]
    ]
    first = [decode_command(FrameDecoder().feed(session.frame_request(each))[0]).seq for each in watches]
    pinned = Pinned(seq=first[0], pin_id=9, descriptor=descriptor)
    assert fed(session, pinned) == [(None, EntrySealed(seq=0, pin_id=9, descriptor=descriptor))]
    assert fed(session, Watching(seq=first[1], mm_hash=HASHES[1], writing=True)) == []
    lost = WriterLost(seq=0, mm_hash=HASHES[2])
    assert fed(session, Watching(seq=first[2], mm_hash=HASHES[2], writing=False)) == [(None, lost)]


def test_a_watch_that_has_ended_is_forgotten(session: SessionState[str]) -> None:
    watch = sent(session, PinOrWatch(seq=0, mm_hash=HASHES[0]), "watch")
    unwatch = sent(session, Unwatch(seq=0, mm_hash=HASHES[0]), "unwatch")
    again = sent(session, PinOrWatch(seq=0, mm_hash=HASHES[1]), "watch another")
    fed(session, Watching(seq=watch, mm_hash=HASHES[0], writing=True), Done(seq=unwatch))
    fed(session, Watching(seq=again, mm_hash=HASHES[1], writing=True))
    [body] = FrameDecoder().feed(session.begin_connection())
    hello = decode_command(body)
    assert isinstance(hello, Hello)
    assert hello.resume is not None
    assert hello.resume.undo_seqs == (again,)


@pytest.mark.parametrize("fields", [{"region_id": "r2"}, {"lease_id": 8}])
def test_another_lease_or_region_is_the_end(session: SessionState[str], fields: dict[str, object]) -> None:
    sent(session, Ping(seq=0), "a")
    session.begin_connection()
    with pytest.raises(StoreUnavailableError) as caught:
        session.on_welcome(frame(welcome(**fields)))
    assert caught.value.code == "lease_lost"
    assert session.take_pending() == ["a"]

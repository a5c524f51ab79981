"""100,000 hostile frames against decoder and core, as one client among others: nothing else changes.

No socket: what the server does with bytes, done here. The bystander holds a pin and a reservation; after
every burst it must still hold them, and its own commands must still work.
"""

import json
import random

import orjson

from tests.support.stores import core_on
from triptych_cache_store.entries.leases import SessionId
from triptych_common.domain.errors import MalformedMessageError
from triptych_common.protocol import store as wire
from triptych_common.protocol.codec import FrameDecoder, decode_command, frame
from triptych_common.region.layout import RegionLayout

LAYOUT = RegionLayout(4096, 64, num_pin_records=64, num_client_slots=8)
HASHES = [f"{n:064x}" for n in range(8)]
SPEC = wire.TensorSpec(shape=(4, 4), dtype="float32", num_bytes=64)
BYSTANDER = SessionId(1)
WRITERS = [None, "hostile", "x"]
NUM_FRAMES = 100_000
NUMBERS = [-1, 0, 1, 2, 3, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 2**200, 1.5, 1e300]
VALUES = [None, True, *NUMBERS, "", "a", "ready", "\0", HASHES[0], HASHES[1], [], [1], {}]


class Hostile:
    """Sends anything, as the server would let it: after a refused frame the session is over."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.core = core_on(bytearray(LAYOUT.data_offset), LAYOUT)
        self.num_frames = self.num_carried_out = 0
        self._next_session = 2
        self.bystander(wire.Hello(seq=1, version=1, client="bystander"))
        for mm_hash in HASHES[:2]:
            reserved = self.bystander(wire.Reserve(seq=2, mm_hash=mm_hash, spec=SPEC))
            assert isinstance(reserved, wire.Reserved)
            self.reservation_id = reserved.reservation_id
            if mm_hash == HASHES[0]:
                self.bystander(wire.Seal(seq=3, reservation_id=reserved.reservation_id))
        pinned = self.bystander(wire.PinOrWatch(seq=4, mm_hash=HASHES[0]))
        assert isinstance(pinned, wire.Pinned)
        self.pin_id = pinned.pin_id

    def bystander(self, command: wire.StoreCommand) -> wire.StoreReply:
        return self.core.handle(BYSTANDER, command, 0.0)[0].reply

    def session(self) -> None:
        """One connection of the hostile client, to its end."""
        session_id = SessionId(self._next_session)
        self._next_session += 1
        decoder = FrameDecoder()
        greets = self.random.random() < 0.9
        data = frame(wire.Hello(seq=1, version=1, client="hostile")) if greets else b""
        try:
            while self._received(session_id, decoder, data):
                data = self._bytes()
        finally:
            self.core.disconnect(session_id, 0.0)

    def _received(self, session_id: SessionId, decoder: FrameDecoder, data: bytes) -> bool:
        """False: the server would have ended the session."""
        cut = self.random.randrange(len(data) + 1)
        try:
            bodies = [*decoder.feed(data[:cut]), *decoder.feed(data[cut:])]
        except MalformedMessageError:
            self.num_frames += 1
            return False
        for body in bodies:
            self.num_frames += 1
            try:
                command = decode_command(body)
            except MalformedMessageError:
                return False
            out = self.core.handle(session_id, command, 0.0)
            assert out[0].reply.seq == command.seq
            for each in out:
                frame(each.reply)  # whatever is answered fits into a frame
            self.num_carried_out += 1
            if out[0].closes:
                return False
        return self.random.random() > 0.02

    def _bytes(self) -> bytes:
        kind = self.random.random()
        if kind < 0.80:
            return self._frame(self._command())
        if kind < 0.90:
            return self._frame(self._mutated(self._command()))
        if kind < 0.94:
            return self.random.randbytes(self.random.randrange(200))
        if kind < 0.97:
            return self._frame(self._command())[: self.random.randrange(40)]
        return self.random.choice([2**20 + 1, 2**31, 2**32 - 1]).to_bytes(4, "big") + b"{}"

    @staticmethod
    def _frame(body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + body

    def _command(self) -> bytes:
        """A command that is valid in form, with ids that belong to the bystander, to no client, or to us."""
        pick = self.random.choice
        number = pick([self.pin_id, self.reservation_id, self.random.randrange(1 << 20, 1 << 21), 1, 2**63])
        mm_hash = pick(HASHES)
        body: dict[str, object] = {"seq": self.random.randrange(5)} | pick(
            [
                {"kind": "hello", "version": 1, "client": pick(["hostile", "bystander"])},
                {"kind": "ping"},
                {"kind": "reserve", "mm_hash": mm_hash, "spec": SPEC.model_dump(), "writer": pick(WRITERS)},
                {"kind": "seal", "reservation_id": number},
                {"kind": "cancel", "reservation_id": number},
                {"kind": "pin_or_watch", "mm_hash": mm_hash, "num_holders": pick([1, 2, 2**31])},
                {"kind": "unwatch", "mm_hash": mm_hash},
                {"kind": "unpin", "pin_id": number},
                {"kind": "lookup", "mm_hashes": [mm_hash] * self.random.randrange(3)},
                {"kind": "stats"},
                {"kind": "list", "limit": pick([1, 10**9])},
                {"kind": "evict", "mm_hash": pick([None, mm_hash])},
            ]
        )
        return orjson.dumps(body)

    def _mutated(self, body: bytes) -> bytes:
        kind = self.random.random()
        if kind < 0.5:
            fields = orjson.loads(body)
            fields[self.random.choice([*fields, "more"])] = self.random.choice(VALUES)
            return json.dumps(fields).encode()
        if kind < 0.8:
            position = self.random.randrange(len(body))
            return body[:position] + self.random.randbytes(1) + body[position + 1 :]
        return body[: self.random.randrange(len(body))]


def test_no_crash_and_no_effect_on_others() -> None:
    hostile = Hostile(seed=7)
    while hostile.num_frames < NUM_FRAMES:
        hostile.session()
        assert hostile.core.leases.num_sessions == 1
        assert hostile.core.leases.find_pin(hostile.pin_id) is not None
        assert hostile.core.table.find_reservation(hostile.reservation_id) is not None
        assert hostile.core.leases.num_pins == 1
        assert hostile.core.leases.num_watches == 0
    assert isinstance(hostile.bystander(wire.Seal(seq=9, reservation_id=hostile.reservation_id)), wire.Done)
    assert isinstance(hostile.bystander(wire.Unpin(seq=9, pin_id=hostile.pin_id)), wire.Done)
    hostile.bystander(wire.Evict(seq=9))
    assert hostile.core.space.pool.num_free_blocks == LAYOUT.num_blocks
    assert hostile.num_carried_out > NUM_FRAMES // 2

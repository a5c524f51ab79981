"""100,000 hostile frames through the socket of a real daemon, while another client works on.

Malformed, oversized, truncated and out-of-order frames; no crash, no hang, and the other client gets
right answers in bounded time.
"""

import json
import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.stores import StoreProcess
from triptych_common.protocol.store import (
    MAX_FRAME_BYTES,
    Evict,
    Pinned,
    PinOrWatch,
    Reserve,
    Reserved,
    Seal,
    TensorSpec,
    Unpin,
)
from triptych_common.region import RegionMapping
from triptych_common.store_session import StoreSession

NUM_FRAMES = 100_000
FRAMES_PER_SESSION = 120
NUM_BYTES = 4096
SPEC = TensorSpec(shape=(16, 64), dtype="float32", num_bytes=NUM_BYTES)
LONGEST_ANSWER_S = 30.0  # generous: machines that run tests are busy
HASHES = [f"{n:064x}" for n in range(1 << 40, (1 << 40) + 16)]  # not those of the bystander


class Bystander:
    """Reserves, writes, seals, pins, reads, unpins; remembers the slowest answer."""

    def __init__(self, session: StoreSession) -> None:
        self._session = session
        welcome = session.welcome
        self._mapping = RegionMapping.open(welcome.region_path, welcome.region_num_bytes)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.slowest_s = 0.0
        self.num_cycles = 0
        self.faults: list[str] = []

    def __enter__(self) -> "Bystander":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopping.set()
        self._thread.join(60)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._cycle(f"{self.num_cycles:064x}")
        except Exception as error:
            self.faults.append(repr(error))

    def _cycle(self, mm_hash: str) -> None:
        reserved = self._ask(Reserve(seq=0, mm_hash=mm_hash, spec=SPEC))
        content = mm_hash.encode() * (NUM_BYTES // 64)
        assert isinstance(reserved, Reserved)
        self._mapping.view(reserved.offset, NUM_BYTES)[:] = content
        self._ask(Seal(seq=0, reservation_id=reserved.reservation_id))
        pinned = self._ask(PinOrWatch(seq=0, mm_hash=mm_hash))
        assert isinstance(pinned, Pinned)
        if self._mapping.view(pinned.descriptor.offset, NUM_BYTES) != content:
            self.faults.append(f"{mm_hash}: other bytes")
        self._ask(Unpin(seq=0, pin_id=pinned.pin_id))
        self._ask(Evict(seq=0, mm_hash=mm_hash))
        self.num_cycles += 1

    def _ask(self, command: Reserve | Seal | PinOrWatch | Unpin | Evict) -> object:
        started_at = time.monotonic()
        reply = self._session.request(command)
        self.slowest_s = max(self.slowest_s, time.monotonic() - started_at)
        return reply


class Hostile:
    """One session after the other, each to its bad end."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path = str(path)
        self._random = random.Random(seed)
        self.num_frames = self.num_ended_by_store = 0

    def session(self) -> None:
        """Send, and read until the store has hung up or answered everything."""
        data, num_frames, is_fatal = self._burst()
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(30)
            client.connect(self._path)
            try:
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                while client.recv(1 << 16):
                    pass
            except (BrokenPipeError, ConnectionResetError):
                pass
        self.num_frames += num_frames
        self.num_ended_by_store += is_fatal

    def _burst(self) -> tuple[bytes, int, bool]:
        """Frames of a session; only its last one may be so bad that the store hangs up on it."""
        if self._random.random() < 0.3:  # hung up on at once
            return self._fatal(), 1, True
        frames = [_framed({"kind": "hello", "seq": 1, "version": 1, "client": f"h{self._random.random()}"})]
        frames += [self._out_of_order() for _ in range(FRAMES_PER_SESSION)]
        ends_badly = self._random.random() < 0.9
        frames += [self._fatal()] * ends_badly
        return b"".join(frames), len(frames) - 1, ends_badly

    def _out_of_order(self) -> bytes:
        """A command that is right in form and wrong in place: nothing of the kind was reserved or pinned."""
        pick, number = self._random.choice, self._random.randrange(1, 1 << 62)
        if self._random.random() < 0.01:
            return _framed({"seq": 1, "kind": pick(["verify", "metrics", "stats", "list"])})
        return _framed(
            {"seq": self._random.randrange(3)}
            | pick(
                [
                    {"kind": "seal", "reservation_id": number},
                    {"kind": "cancel", "reservation_id": number},
                    {"kind": "unpin", "pin_id": number},
                    {"kind": "unwatch", "mm_hash": pick(HASHES)},
                    {"kind": "pin_or_watch", "mm_hash": pick(HASHES)},
                    {
                        "kind": "reserve",
                        "mm_hash": pick(HASHES),
                        "spec": {**SPEC.model_dump(), "num_bytes": 7},
                    },
                    {
                        "kind": "reserve",
                        "mm_hash": pick(HASHES),
                        "spec": SPEC.model_dump(),
                        "writer": "nobody",
                    },
                ]
            )
        )

    def _fatal(self) -> bytes:
        match self._random.randrange(6):
            case 0:
                return self._random.choice([MAX_FRAME_BYTES + 1, 2**31, 2**32 - 1]).to_bytes(4, "big") + b"{}"
            case 1:
                return self._out_of_order()[: self._random.randrange(1, 40)]  # truncated
            case 2:
                return b"\0\0\0\x10" + self._random.randbytes(16)
            case 3:
                return _framed({"kind": "hello", "seq": 1, "version": 99, "client": "h"})
            case 4:
                return _framed({"kind": "seal", "seq": -1, "reservation_id": "x", "more": [{}] * 50})
            case _:
                return _framed({"kind": "hello", "seq": 1, "version": 1, "client": "\0" * 5000})


def _framed(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    return len(data).to_bytes(4, "big") + data


@pytest.mark.slow
def test_others_do_not_notice(make_daemon: Callable[..., StoreProcess]) -> None:
    daemon = make_daemon("--log-level=ERROR")
    hostile = Hostile(daemon.socket, seed=5)
    before = daemon.stats()
    with Bystander(daemon.connect("bystander")) as bystander:
        while hostile.num_frames < NUM_FRAMES:
            hostile.session()
    assert bystander.faults == []
    assert bystander.num_cycles > 50
    assert bystander.slowest_s < LONGEST_ANSWER_S
    assert hostile.num_ended_by_store > 500
    after = daemon.stats()
    assert (after.num_sessions, after.num_watches, after.num_pins, after.num_reservations) == (2, 0, 0, 0)
    assert after.free_num_bytes == before.free_num_bytes
    assert daemon.log() == ""
    print(f"{hostile.num_frames} frames, {bystander.num_cycles} cycles, slowest {bystander.slowest_s:.3f} s")
    assert daemon.stop() == 0

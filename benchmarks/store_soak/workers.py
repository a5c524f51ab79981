"""The processes of the soak: each a session and a mapping, and steps without end."""

import queue
import random
import sys
import threading
import time
from pathlib import Path
from typing import cast

from triptych_common.domain.errors import StoreError
from triptych_common.protocol.store import (
    AlreadySealed,
    Cancel,
    Descriptor,
    EntrySealed,
    Pinned,
    PinOrWatch,
    Reserve,
    Reserved,
    Seal,
    TensorSpec,
    Unpin,
    Unwatch,
    Verified,
    Verify,
)
from triptych_common.region import RegionMapping
from triptych_common.region.fence import check_descriptor
from triptych_common.store_session import Push, StoreSession

NUM_HASHES = 60
UNIT = 64  # bytes of the pattern of an mm_hash
WRONG_BYTES_STATUS = 3
VERIFY_SHARE = 0.01  # of a consumer's steps
pause = threading.Event().wait


def spec_of(number: int) -> TensorSpec:
    """16 KiB to 4 MiB, always the same for a number."""
    rows = int(4 * 256 ** (number / (NUM_HASHES - 1)))
    return TensorSpec(shape=(rows, 2048), dtype="bfloat16", num_bytes=rows * 4096)


def bytes_of(mm_hash: str, num_bytes: int) -> bytes:
    return mm_hash.encode() * (num_bytes // UNIT)


class Worker:
    """One process of the soak: a session, a mapping, and a tally of what was seen."""

    def __init__(self, socket: str, name: str, seed: int, tally: Path) -> None:
        self._socket, self._name, self._tally = socket, name, tally
        self._random = random.Random(seed)
        self._pushes: queue.SimpleQueue[Push] = queue.SimpleQueue()

    def run(self) -> None:
        while True:
            try:
                self._session = StoreSession.connect(
                    self._socket, self._name, on_push=self._pushes.put, reconnect_timeout_s=30
                )
            except StoreError:
                pause(0.05)
                continue
            welcome = self._session.welcome
            self._mapping = RegionMapping.open(welcome.region_path, welcome.region_num_bytes)
            try:
                while True:
                    self.step(self._random.randrange(NUM_HASHES))
            except StoreError as error:
                self.record("session", error.code)
            finally:
                self._session.close()

    def step(self, number: int) -> None:
        raise NotImplementedError

    def record(self, kind: str, what: object) -> None:
        """One line in the tally, in one append: no reader gets a part of it."""
        with self._tally.open("a") as tally:
            tally.write(f"{kind} {self._name} {what}\n")


class ProducerWorker(Worker):
    def step(self, number: int) -> None:
        mm_hash, spec = f"{number:064x}", spec_of(number)
        try:
            reserved = self._session.request(Reserve(seq=0, mm_hash=mm_hash, spec=spec), 30)
        except StoreError as error:
            if error.code != "full":
                raise
            pause(0.005)
            return
        if isinstance(reserved, AlreadySealed):
            pause(0.001)
            return
        reserved = cast(Reserved, reserved)
        if self._random.random() < 0.1:
            self._session.request(Cancel(seq=0, reservation_id=reserved.reservation_id), 30)
            return
        data = bytes_of(mm_hash, spec.num_bytes)
        for start in range(0, len(data), 1 << 18):  # in pieces, so that a kill hits the middle
            piece = data[start : start + (1 << 18)]
            self._mapping.view(reserved.offset + start, len(piece))[:] = piece
        self._session.request(Seal(seq=0, reservation_id=reserved.reservation_id), 30)
        self.record("done", 1)


class ConsumerWorker(Worker):
    def step(self, number: int) -> None:
        if self._random.random() < VERIFY_SHARE:
            self._verify()
        mm_hash = f"{number:064x}"
        reply = self._session.request(PinOrWatch(seq=0, mm_hash=mm_hash), 30)
        if isinstance(reply, Pinned):
            self._use(reply.pin_id, reply.descriptor)
            return
        self._take_pushes(time.monotonic() + 0.1)
        self._session.request(Unwatch(seq=0, mm_hash=mm_hash), 30)
        self._take_pushes(0.0)

    def _verify(self) -> None:
        verified = cast(Verified, self._session.request(Verify(seq=0), 30))
        self.record("verified", 1)
        if verified.num_damaged:
            self.record("damaged", verified.damaged)

    def _take_pushes(self, deadline: float) -> None:
        while True:
            try:
                push = self._pushes.get(timeout=max(0.0001, deadline - time.monotonic()))
            except queue.Empty:
                return
            if isinstance(push, EntrySealed):
                self._use(push.pin_id, push.descriptor)
                deadline = 0.0

    def _use(self, pin_id: int, descriptor: Descriptor) -> None:
        check_descriptor(self._mapping, descriptor)
        expected = bytes_of(descriptor.mm_hash, descriptor.spec.num_bytes)
        for _ in range(2):
            if self._mapping.view(descriptor.offset, len(expected)) != expected:
                self.record("wrong", descriptor.mm_hash)
                sys.exit(WRONG_BYTES_STATUS)
            pause(self._random.random() * 0.02)
        self._session.request(Unpin(seq=0, pin_id=pin_id), 30)
        self.record("done", 1)


ROLES: dict[str, type[Worker]] = {"producer": ProducerWorker, "consumer": ConsumerWorker}

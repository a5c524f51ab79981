"""A peer that has the key and breaks every rule: the agent does not crash, writes nowhere but into
reservations of its own, and keeps nothing afterwards.
"""

import asyncio
import contextlib
import random
import socket
import struct
import time
from pathlib import Path

import pytest
import xxhash

from tests.integration.fabric.conftest import MakeHost
from tests.support.fabric.fabric_host import FabricHost, spec_of
from tests.support.fabric.orders import OrderingGateway, completed
from triptych_common.protocol.messages import EncodeClass
from triptych_common.protocol.store import Cancel, Reserve, Reserved, StatsQuery, TensorSpec
from triptych_common.region.layout import RegionLayout
from triptych_fabric.wire.channel import ChannelError, FabricChannel
from triptych_fabric.wire.frames import (
    MAX_CHUNK_BYTES,
    FrameKind,
    Offer,
    frame_header,
    json_frame,
    short_frame,
)
from triptych_fabric.wire.handshake import greet_receiver
from triptych_fabric.wire.keys import load_credentials

FRAMES_OF_A_CONNECTION = 20
NUM_ACCEPTED = 4  # in every other connection
MAGIC = b"\x5a"


class HostilePeer:
    """Speaks the handshake, and then whatever it likes."""

    def __init__(self, target: FabricHost, key_file: Path) -> None:
        channel = FabricChannel(socket.create_connection(("127.0.0.1", target.port)))
        credentials = load_credentials(key_file, None, None, None)
        generation = target.session.welcome.generation
        deadline = time.monotonic() + 10
        greet_receiver(channel, "store-evil", target.store_name, generation, credentials, deadline)
        self._channel = channel
        channel._sock.settimeout(10.0)

    def send(self, data: bytes) -> bool:
        """False: it has been cut off."""
        try:
            self._channel._sock.sendall(data)
        except OSError:
            return False
        return True

    def read_kind(self) -> FrameKind:
        """Of the next frame but keepalives; bodies are skipped."""
        while True:
            header = b""
            while len(header) < 16:
                part = self._channel._sock.recv(16 - len(header))
                if not part:
                    raise ChannelError("cut off")
                header += part
            kind, _, _, num_bytes, _ = struct.unpack(">BBHIQ", header)
            if num_bytes:
                self._channel._sock.recv(num_bytes, socket.MSG_WAITALL)
            if kind != FrameKind.KEEPALIVE:
                return FrameKind(kind)

    def is_cut_off(self) -> bool:
        try:
            while self._channel._sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
        return True

    def read_to_end(self) -> None:
        """All that it is told, until it is cut off; it says that it sends no more."""
        with contextlib.suppress(OSError):
            self._channel._sock.shutdown(socket.SHUT_WR)
        assert self.is_cut_off()

    def close(self) -> None:
        self._channel.close()


def offer_of(mm_hash: str, num_bytes: int = 4096, *, remaining_ms: int = 5000) -> Offer:
    return Offer(
        mm_hash=mm_hash,
        spec=spec_of(num_bytes),
        is_sealed=True,
        encode_class=EncodeClass.INTERACTIVE,
        remaining_ms=remaining_ms,
    )


def offer_frame(number: int, num_bytes: int = 4096) -> bytes:
    return json_frame(FrameKind.OFFER, number, offer_of(f"{number:064x}", num_bytes))


BAD = {
    "unknown kind": struct.pack(">BBHIQ", 77, 0, 0, 0, 1),
    "not zero": struct.pack(">BBHIQ", FrameKind.OFFER, 1, 0, 4, 1) + b"{}  ",
    "a target's frame": short_frame(FrameKind.STORED, 1),
    "an offer that is huge": struct.pack(">BBHIQ", FrameKind.OFFER, 0, 0, 1 << 31, 1),
    "a chunk that is huge": offer_frame(1) + frame_header(FrameKind.CHUNK, 1, MAX_CHUNK_BYTES + 1),
    "an offer that is no JSON": short_frame(FrameKind.OFFER, 1, b"pickle"),
    "a chunk of nothing that was offered": short_frame(FrameKind.CHUNK, 9, b"x"),
    "number 0": short_frame(FrameKind.CANCEL, 0),
    "a short digest": offer_frame(1) + struct.pack(">BBHIQ", FrameKind.END, 0, 0, 3, 1) + b"abc",
    "the same number again": offer_frame(5) + offer_frame(5),
    "a number before": offer_frame(5) + offer_frame(4),
}


@pytest.fixture
def target(make_host: MakeHost) -> FabricHost:
    return make_host("b", "--log-level=ERROR")


def test_rules_that_are_broken_end_the_connection(target: FabricHost, key_file: Path) -> None:
    for what, data in BAD.items():
        peer = HostilePeer(target, key_file)
        peer.send(data)
        assert peer.is_cut_off(), what
        peer.close()
    for what, after in {
        "more bytes than it has": short_frame(FrameKind.CHUNK, 1, bytes(4097)),
        "fewer bytes than it has": short_frame(FrameKind.CHUNK, 1, b"x")
        + short_frame(FrameKind.END, 1, bytes(16)),
    }.items():
        peer = HostilePeer(target, key_file)
        peer.send(offer_frame(1))
        assert peer.read_kind() is FrameKind.ACCEPTED, what
        peer.send(after)
        assert peer.is_cut_off(), what
        peer.close()
    target.wait_no_leftovers()
    assert target.store.stats().num_seals_total == 0


def test_a_wrong_checksum_is_not_sealed(target: FabricHost, key_file: Path) -> None:
    peer = HostilePeer(target, key_file)
    peer.send(offer_frame(1) + offer_frame(2))
    assert {peer.read_kind(), peer.read_kind()} == {FrameKind.ACCEPTED}
    peer.send(short_frame(FrameKind.CHUNK, 1, bytes(4096)) + short_frame(FrameKind.END, 1, bytes(16)))
    assert peer.read_kind() is FrameKind.FAILED
    checksum = xxhash.xxh3_128()
    checksum.update(memoryview(bytes(4096)))
    peer.send(short_frame(FrameKind.CHUNK, 2, bytes(4096)) + short_frame(FrameKind.END, 2, checksum.digest()))
    assert peer.read_kind() is FrameKind.STORED
    peer.close()
    assert target.store.stats().num_seals_total == 1
    target.wait_no_leftovers()


def test_a_spec_that_lies_and_one_that_is_too_large(target: FabricHost, key_file: Path) -> None:
    lying = TensorSpec(shape=(1, 1), dtype="float32", num_bytes=1 << 20)
    peer = HostilePeer(target, key_file)
    peer.send(json_frame(FrameKind.OFFER, 1, offer_of(f"{1:064x}").model_copy(update={"spec": lying})))
    assert peer.read_kind() is FrameKind.FAILED
    peer.send(offer_frame(2, 1 << 40))
    assert peer.read_kind() is FrameKind.FAILED
    peer.close()
    target.wait_no_leftovers()


def test_numbers_beyond_all_bounds_cost_the_connection_alone(target: FabricHost, key_file: Path) -> None:
    body = offer_of(f"{1:064x}").model_dump_json()
    for before, after in (
        ('"shape":[1,2048]', f'"shape":[{2**64},1]'),
        ('"num_bytes":4096', f'"num_bytes":{2**64}'),
        ('"remaining_ms":5000', f'"remaining_ms":{10**400}'),
    ):
        assert before in body
        peer = HostilePeer(target, key_file)
        peer.send(short_frame(FrameKind.OFFER, 1, body.replace(before, after).encode()))
        assert peer.is_cut_off(), after
        peer.close()
    peer = HostilePeer(target, key_file)
    peer.send(offer_frame(1))
    assert peer.read_kind() is FrameKind.ACCEPTED, "the agent lives on"
    peer.close()
    target.wait_no_leftovers()
    assert "Traceback" not in target.agent.log()


def random_frames(seed: int, number: int) -> bytes:
    """Some that are right in parts: offers after `number`, chunks and ends of them, and noise."""
    rng = random.Random(seed)
    data = b""
    for _ in range(FRAMES_OF_A_CONNECTION):
        choice = rng.random()
        named = rng.randint(0, number + 1)
        if choice < 0.35:
            number += rng.choice([1, 1, 1, 2])
            data += offer_frame(number, 2 * rng.choice([1, 100, 40_000]))
        elif choice < 0.6:
            data += short_frame(FrameKind.CHUNK, named, MAGIC * rng.choice([1, 2, 200, 80_000]))
        elif choice < 0.7:
            data += short_frame(FrameKind.END, named, rng.randbytes(16))
        elif choice < 0.8:
            data += short_frame(FrameKind.CANCEL, named)
        elif choice < 0.9:
            data += struct.pack(
                ">BBHIQ", rng.randint(0, 10), 0, 0, rng.choice([0, 2, 16, rng.getrandbits(32)]), named
            )
        else:
            frame = bytearray(offer_frame(number + 1))
            frame[rng.randrange(len(frame))] = rng.randrange(256)
            data += bytes(frame) if rng.random() < 0.7 else rng.randbytes(rng.randint(1, 60))
    return data


async def fuzz(
    target: FabricHost, source: FabricHost, gateway: OrderingGateway, key: Path, frames: int
) -> None:
    """Everything of the region that is not free, and everything that others wrote, is as before."""
    kept = {f"{number + 10_000:064x}": random.Random(number).randbytes(50_000) for number in range(20)}
    for mm_hash, data in kept.items():
        target.encode(mm_hash, data)
    written = target.session.request(Reserve(seq=0, mm_hash=f"{1 << 200:064x}", spec=spec_of(1 << 20)))
    assert isinstance(written, Reserved)
    target.mapping.view(written.offset, 1 << 20)[:] = b"\x11" * (1 << 20)
    for seed in range(frames // FRAMES_OF_A_CONNECTION):
        peer = HostilePeer(target, key)
        if seed % 2:  # what was accepted has blocks when the rest comes
            for number in range(1, NUM_ACCEPTED + 1):
                offer = offer_of(f"{(1 << 128) + number:064x}", 80_000)
                peer.send(json_frame(FrameKind.OFFER, number, offer))
            kinds = [peer.read_kind() for _ in range(NUM_ACCEPTED)]
            assert kinds == [FrameKind.ACCEPTED] * NUM_ACCEPTED
        peer.send(random_frames(seed, NUM_ACCEPTED if seed % 2 else 0))
        peer.read_to_end()
        peer.close()
    assert bytes(target.mapping.view(written.offset, 1 << 20)) == b"\x11" * (1 << 20)
    target.session.request(Cancel(seq=0, reservation_id=written.reservation_id))
    assert {mm_hash: target.read(mm_hash) for mm_hash in kept} == kept
    await asyncio.to_thread(target.wait_no_leftovers)
    stats = target.session.request(StatsQuery(seq=0))
    assert stats.num_seals_total == len(kept)
    good = f"{1 << 220:064x}"
    source.encode(good, b"cd" * 500_000)
    completed(await gateway.transfer(source, target, good))
    assert target.read(good) == b"cd" * 500_000
    assert "failed" not in target.agent.log()
    assert "Traceback" not in target.agent.log()


async def test_fuzzed_frames(
    target: FabricHost, make_host: MakeHost, gateway: OrderingGateway, key_file: Path
) -> None:
    await fuzz(target, make_host("a"), gateway, key_file, 2_000)


@pytest.mark.long
async def test_100_000_fuzzed_frames(
    target: FabricHost, make_host: MakeHost, gateway: OrderingGateway, key_file: Path
) -> None:
    await fuzz(target, make_host("a"), gateway, key_file, 100_000)


def test_nothing_is_written_outside_of_a_reservation(target: FabricHost, key_file: Path) -> None:
    """Chunks of what is not reserved, on every way, leave every free block as it was."""
    welcome = target.session.welcome
    layout = RegionLayout.fit(welcome.region_num_bytes, welcome.block_num_bytes)
    before = bytes(target.mapping.view(layout.data_offset, layout.data_num_bytes))
    assert MAGIC * 64 not in before
    for data in (
        short_frame(FrameKind.CHUNK, 1, MAGIC * 5000),
        offer_frame(1, 1 << 40) + short_frame(FrameKind.CHUNK, 1, MAGIC * 5000),
        offer_frame(1) + short_frame(FrameKind.CANCEL, 1) + short_frame(FrameKind.CHUNK, 1, MAGIC * 5000),
    ):
        peer = HostilePeer(target, key_file)
        peer.send(data)
        peer.close()
    target.wait_no_leftovers()
    after = bytes(target.mapping.view(layout.data_offset, layout.data_num_bytes))
    assert MAGIC * 64 not in after

"""What two agents write to a link's streams: who has Redis, and not the key, cannot add to it."""

import pytest

from triptych_cache_store.fabric.wire.channel import ChannelError
from triptych_cache_store.fabric.wire.redis_entries import (
    MAX_PAYLOAD_BYTES,
    EntryKind,
    EntrySeal,
    LinkEntry,
)

KEY = b"k" * 32


def seals(key: bytes = KEY, other: bytes = KEY) -> tuple[EntrySeal, EntrySeal]:
    """Of the writer, and of its reader."""
    writer, reader = EntrySeal(), EntrySeal()
    writer.start(key)
    reader.start(other)
    return writer, reader


def packed(seal: EntrySeal, payload: bytes = b"abcd", num_taken: int = 7) -> bytes:
    return seal.pack(EntryKind.BYTES, num_taken, [memoryview(payload[:2]), memoryview(payload[2:])])


def test_entries_are_read_as_they_were_written() -> None:
    writer, reader = seals()
    for payload in (b"abcd", b"", b"x" * MAX_PAYLOAD_BYTES):
        read = reader.unpack(packed(writer, payload))
        assert read == LinkEntry(EntryKind.BYTES, 7, memoryview(payload))
    end = reader.unpack(writer.pack(EntryKind.END, 9, ()))
    assert (end.kind, end.num_taken, bytes(end.payload)) == (EntryKind.END, 9, b"")


def test_the_handshake_comes_without_a_proof() -> None:
    writer, reader = EntrySeal(), EntrySeal()
    assert bytes(reader.unpack(packed(writer)).payload) == b"abcd"
    writer.start(KEY)
    reader.start(KEY)
    assert bytes(reader.unpack(packed(writer)).payload) == b"abcd"


@pytest.mark.parametrize("position", [0, 8, 9, 12, 13, -1])
def test_a_changed_byte_is_noticed(position: int) -> None:
    writer, reader = seals()
    data = bytearray(packed(writer))
    data[position] ^= 1
    with pytest.raises(ChannelError):
        reader.unpack(bytes(data))


def test_entries_of_another_key_are_refused() -> None:
    writer, reader = seals(other=b"j" * 32)
    with pytest.raises(ChannelError):
        reader.unpack(packed(writer))


def test_entries_without_a_proof_are_refused() -> None:
    _, reader = seals()
    with pytest.raises(ChannelError):
        reader.unpack(packed(EntrySeal()))


@pytest.mark.parametrize("order", [(0, 0), (1,), (0, 2)])
def test_entries_that_come_again_or_are_left_out_are_noticed(order: tuple[int, ...]) -> None:
    writer, reader = seals()
    entries = [packed(writer) for _ in range(3)]
    *good, bad = order
    for number in good:
        reader.unpack(entries[number])
    with pytest.raises(ChannelError):
        reader.unpack(entries[bad])


@pytest.mark.parametrize("num_bytes", [0, 8, 40, 9 + 32 + MAX_PAYLOAD_BYTES + 1])
def test_entries_of_a_wrong_size_are_refused(num_bytes: int) -> None:
    with pytest.raises(ChannelError):
        EntrySeal().unpack(bytes(num_bytes))

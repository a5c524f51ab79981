"""What the codec refuses, and with which error."""

import time

import pytest

from triptych_common.domain.errors import MalformedMessageError, ProtocolError, UnsupportedVersionError
from triptych_common.protocol import codec
from triptych_common.protocol.messages import EncodeCompleted, InstanceRecord, Role
from triptych_common.protocol.store import MAX_FRAME_BYTES, Ping, StoreFailure

HASH = "ab" * 32
MESSAGE = EncodeCompleted(job_id="job-1", mm_hash=HASH, encoder="encoder-0", encode_s=0.5)


def fields(**changes: bytes | None) -> dict[bytes, bytes]:
    good = codec.encode(MESSAGE, remaining_ms=1000)
    for name, value in changes.items():
        if value is None:
            good.pop(name.encode())
        else:
            good[name.encode()] = value
    return good


def test_deadline_counts_from_publication() -> None:
    before = time.monotonic()
    envelope = codec.decode(fields(), queued_s=0.25)
    assert envelope.deadline is not None
    assert before + 0.74 < envelope.deadline <= time.monotonic() + 0.75


def test_another_version_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedVersionError, match="schema version 3, this process speaks 2") as caught:
        codec.decode(fields(v=b"3"))
    assert caught.value.version == "3"


def test_fields_of_a_later_release_are_ignored() -> None:
    body = codec.encode(MESSAGE)[b"body"][:-1] + b',"extra":1}'
    assert codec.decode(fields(body=body, extra=b"1")).message == MESSAGE
    record = InstanceRecord(instance="i", boot_id="b", role=Role.ENCODE)
    value = (
        codec.encode_record(record).replace(b'{"instance"', b'{"extra":1,"instance"')[:-1] + b',"extra":1}'
    )
    assert codec.decode_record(value) == record
    assert codec.decode_command(codec.frame(Ping(seq=1))[4:-1] + b',"extra":1}') == Ping(seq=1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"v": None}, "field v is missing"),
        ({"type": None}, "field type is missing"),
        ({"type": b"EncodeEverything"}, "unknown message type 'EncodeEverything'"),
        ({"type": b"\xff"}, "field type is not UTF-8"),
        ({"type": b"InstanceRecord"}, "unknown message type"),
        ({"body": None}, "field body is missing"),
        ({"body": b"{"}, "EncodeCompleted: body: Invalid JSON"),
        ({"body": b"[]"}, "EncodeCompleted: body"),
        (
            {"body": b'{"job_id":1,"mm_hash":"x","encoder":"e","encode_s":-1}'},
            "job_id: Input should be a valid string",
        ),
        ({"ttl_ms": b"soon"}, "field ttl_ms is not a whole number"),
        ({"ttl_ms": b"1" * 40}, "field ttl_ms is not a whole number"),
        ({"tp": b"\xff"}, "field tp is not UTF-8"),
    ],
)
def test_malformed_entries_are_refused(changes: dict[str, bytes | None], text: str) -> None:
    with pytest.raises(MalformedMessageError) as caught:
        codec.decode(fields(**changes))
    assert text in str(caught.value)


def test_values_are_not_repeated_in_errors() -> None:
    with pytest.raises(MalformedMessageError) as caught:
        codec.decode(fields(body=b'{"job_id":"job-1","mm_hash":"SECRET","encoder":"e","encode_s":1}'))
    assert "SECRET" not in str(caught.value)


def test_only_bus_messages_can_be_published() -> None:
    with pytest.raises(TypeError, match="Ping does not travel on the bus"):
        codec.encode(Ping(seq=1))


@pytest.mark.parametrize(
    "value", [b"", b"{}", b"[1]", b'{"v":2,"record":{"instance":"i"}}', b'{"v":2,"record":3}']
)
def test_malformed_records_are_refused(value: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        codec.decode_record(value)


def test_record_of_another_version_is_refused() -> None:
    value = codec.encode_record(InstanceRecord(instance="i", boot_id="b", role=Role.ENCODE))
    with pytest.raises(UnsupportedVersionError):
        codec.decode_record(value.replace(b'"v":2', b'"v":3'))


class TestFrameDecoder:
    def test_unfinished_frame_is_seen(self) -> None:
        decoder = codec.FrameDecoder()
        assert decoder.feed(codec.frame(Ping(seq=1))[:-1]) == []
        assert len(decoder._buffer) > 0

    def test_announced_size_is_limited_before_it_arrives(self) -> None:
        with pytest.raises(MalformedMessageError, match="exceeds"):
            codec.FrameDecoder().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))

    def test_too_large_message_is_not_framed(self) -> None:
        with pytest.raises(MalformedMessageError, match="exceeds"):
            codec.frame(StoreFailure(seq=1, code="internal", detail="x" * MAX_FRAME_BYTES))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"{}",
        b'{"kind":"ping"}',
        b'{"kind":"pong","seq":1}',
        b'{"kind":"ping","seq":"1"}',
        b'{"kind":"ping","seq":1.5}',
        b'{"kind":"ping","seq":-1}',
        b'{"kind":"done","seq":1}',
        b"\xff\xfe",
        b"[" * 10_000,
    ],
)
def test_bad_commands_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.decode_command(body)

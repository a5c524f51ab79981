"""Frames between agents: what is refused, before anything is allocated for it."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych_common.domain.errors import MalformedMessageError
from triptych_common.protocol.messages import EncodeClass
from triptych_common.protocol.store import TensorSpec
from triptych_fabric.wire.frames import (
    BODY_BOUNDS,
    FROM_RECEIVER,
    FROM_RECEIVER_OF_NIXL,
    FROM_SENDER,
    FROM_SENDER_OF_NIXL,
    HEADER_BYTES,
    MAX_OFFER_MS,
    FrameKind,
    Offer,
    frame_header,
    json_frame,
    read_body,
    read_header,
)

OFFER = Offer(
    mm_hash="ab" * 32,
    spec=TensorSpec(shape=(2, 3), dtype="float32", num_bytes=24),
    is_sealed=False,
    encode_class=EncodeClass.BATCH,
    remaining_ms=1000,
    traceparent="00-1-2-01",
)


SIDES = (FROM_SENDER, FROM_RECEIVER, FROM_SENDER_OF_NIXL, FROM_RECEIVER_OF_NIXL)


def number_of(kind: FrameKind) -> int:
    return 0 if kind in (FrameKind.KEEPALIVE, FrameKind.REGION) else 1


@pytest.mark.parametrize("kind", list(FrameKind))
def test_bodies_are_bounded(kind: FrameKind) -> None:
    least, most = BODY_BOUNDS[kind]
    number = number_of(kind)
    side = next(each for each in SIDES if kind in each)
    assert read_header(frame_header(kind, number, most), side).body_num_bytes == most
    for wrong in {least - 1, most + 1} - {-1}:
        with pytest.raises(MalformedMessageError):
            read_header(frame_header(kind, number, wrong), side)


@pytest.mark.parametrize("kind", list(FrameKind))
def test_a_frame_comes_from_its_side_alone(kind: FrameKind) -> None:
    header = frame_header(kind, number_of(kind), BODY_BOUNDS[kind][0])
    for side in SIDES:
        if kind in side:
            read_header(header, side)
        else:
            with pytest.raises(MalformedMessageError):
                read_header(header, side)


def test_every_kind_has_a_side_and_bounds() -> None:
    assert frozenset().union(*SIDES) == set(FrameKind) == set(BODY_BOUNDS)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_header_is_read_or_refused(data: bytes) -> None:
    try:
        header = read_header(data, FROM_SENDER)
    except MalformedMessageError:
        return
    assert header.kind in FROM_SENDER
    assert header.body_num_bytes <= BODY_BOUNDS[header.kind][1]
    assert struct.pack(">BBHIQ", header.kind, 0, 0, header.body_num_bytes, header.number) == data


@pytest.mark.parametrize(
    ("known", "too_large"),
    [
        ('"shape":[2,', f'"shape":[{2**63},'),
        ('"num_bytes":24', f'"num_bytes":{2**63}'),
        ('"remaining_ms":1000', f'"remaining_ms":{MAX_OFFER_MS + 1}'),
        ('"remaining_ms":1000', f'"remaining_ms":{10**400}'),
    ],
)
def test_numbers_are_bounded(known: str, too_large: str) -> None:
    body = json_frame(FrameKind.OFFER, 7, OFFER)[HEADER_BYTES:].decode()
    assert known in body
    with pytest.raises(MalformedMessageError):
        read_body(Offer, body.replace(known, too_large).encode())


@given(st.binary(max_size=200))
def test_any_body_is_read_or_refused(body: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        read_body(Offer, body)

"""Whatever bytes arrive, the codec answers with a message or a ProtocolError, nothing else."""

import contextlib

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from triptych_common.domain.errors import ProtocolError
from triptych_common.protocol import codec
from triptych_common.protocol.codec import BUS_MESSAGES
from triptych_common.protocol.store import Ping

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
).map(lambda value: orjson.dumps(value) if _fits(value) else b"null")
BODIES = st.binary(max_size=200) | JSON
TYPES = st.sampled_from([cls.TYPE.encode() for cls in BUS_MESSAGES]) | st.binary(max_size=20)


def _fits(value: object) -> bool:
    """orjson refuses integers beyond 64 bits and lone surrogates."""
    try:
        orjson.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


@settings(max_examples=examples(75))
@given(
    version=st.just(b"1") | st.binary(max_size=5),
    name=TYPES,
    body=BODIES,
    extra=st.dictionaries(st.sampled_from([b"tp", b"ttl_ms", b"blob"]), st.binary(max_size=20)),
)
def test_entries(version: bytes, name: bytes, body: bytes, extra: dict[bytes, bytes]) -> None:
    with contextlib.suppress(ProtocolError):
        codec.decode({b"v": version, b"type": name, b"body": body, **extra})


@settings(max_examples=examples(75))
@given(body=BODIES)
def test_bodies(body: bytes) -> None:
    for decode in (codec.decode_command, codec.decode_reply, codec.decode_record):
        with contextlib.suppress(ProtocolError):
            decode(body)


@settings(max_examples=examples(75))
@given(chunks=st.lists(st.binary(max_size=50), max_size=10))
def test_byte_streams(chunks: list[bytes]) -> None:
    decoder = codec.FrameDecoder(max_frame_bytes=1000)
    with contextlib.suppress(ProtocolError):
        for chunk in chunks:
            assert all(len(body) <= 1000 for body in decoder.feed(chunk))


@settings(max_examples=examples(50))
@given(seqs=st.lists(st.integers(0, 2**31)), cuts=st.lists(st.integers(1, 40), min_size=1))
def test_frames_come_back(seqs: list[int], cuts: list[int]) -> None:
    stream = b"".join(codec.frame(Ping(seq=seq)) for seq in seqs)
    decoder, bodies, at = codec.FrameDecoder(), [], 0
    while at < len(stream):
        size = cuts[at % len(cuts)]
        bodies += decoder.feed(stream[at : at + size])
        at += size
    assert [codec.decode_command(body) for body in bodies] == [Ping(seq=seq) for seq in seqs]

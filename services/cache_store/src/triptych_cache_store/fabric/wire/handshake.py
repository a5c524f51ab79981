"""Handshake of a connection, in bounded time; the source's agent has connected.

    source                                              target
      LinkHello{version, stores, generation, transport, nonce} ──▶
                                         ◀── LinkChallenge{nonce}             or LinkRefusal
      LinkProof{proof} ──────────────────────────────────────────▶
                                         ◀── LinkWelcome{generation, proof}   or LinkRefusal

Each message is JSON behind its length. Who cannot prove that it belongs to the fabric learns a random number,
and that it is refused. A source that expects another store, or another generation of it, than this agent has
is told the generation, after its proof, and nothing is taken from it.
"""

import ssl
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, TypeVar

from pydantic import PositiveInt, StringConstraints

from triptych_cache_store.fabric.wire.channel import (
    ChannelClosedError,
    ChannelError,
    FabricChannel,
    PeerAlertError,
    PeerSilentError,
)
from triptych_cache_store.fabric.wire.frames import FABRIC_VERSION, read_body
from triptych_cache_store.fabric.wire.keys import Credentials, Transcript, certificate_digest, new_nonce
from triptych_cache_store.fabric.wire.tcp_channel import TcpChannel
from triptych_common.domain.errors import MalformedMessageError
from triptych_common.protocol.ids import Name
from triptych_common.protocol.messages import FabricTransport, Message

MAX_HANDSHAKE_BYTES = 2048
_LENGTH = struct.Struct(">I")
Nonce = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Proof = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")]
Sent = TypeVar("Sent", bound=Message)


class LinkHello(Message):
    version: PositiveInt
    source: Name
    target: Name
    target_generation: PositiveInt  # as it stands in the registry
    transport: FabricTransport  # by which the bytes of entries go
    nonce: Nonce


class LinkChallenge(Message):
    nonce: Nonce


class LinkProof(Message):
    proof: Proof


class LinkWelcome(Message):
    generation: PositiveInt
    proof: Proof


class RefusalReason(StrEnum):
    VERSION = "version"
    KEY = "key"
    STORE = "store"  # another store, or another generation of it
    TRANSPORT = "transport"  # not one of ours
    BUSY = "busy"  # draining, or it has as many connections as it may


class LinkRefusal(Message):
    reason: RefusalReason
    generation: PositiveInt | None = None  # of the store, only for authenticated peers


class LinkRefusedError(ChannelError):
    """One agent refuses the other; `reason` is None for TLS failures or a peer that is no agent."""

    def __init__(self, detail: str, reason: RefusalReason | None = None) -> None:
        super().__init__(detail)
        self.reason = reason


class Identity:
    """An agent's own store, that store's current generation, and its transports."""

    def __init__(
        self,
        store: str,
        generation: int,
        transports: Collection[FabricTransport] = (FabricTransport.TCP,),
    ) -> None:
        self.store = store
        self.generation = generation
        self.transports = frozenset(transports)
        self.is_draining = False


@dataclass(frozen=True)
class Admitted:
    """Admitted peer and how its entries arrive."""

    source: str  # store
    generation: int  # of this agent's store, as announced to the peer
    transport: FabricTransport


def greet_target(
    channel: FabricChannel,
    source: str,
    target: str,
    generation: int,
    credentials: Credentials,
    deadline: float,
    transport: FabricTransport = FabricTransport.TCP,
) -> None:
    """Run the source's side of the handshake.

    Args:
        deadline: monotonic second.

    Raises:
        LinkRefusedError: one of the two does not let the other in.
        ChannelError: it broke, or took too long.
    """
    binding = channel.binding
    try:
        if credentials.client_tls is not None and isinstance(channel, TcpChannel):
            tls = channel.start_tls(credentials.client_tls, server_side=False)
            _finish_tls(channel, deadline)
            binding = certificate_digest(tls.getpeercert(binary_form=True) or b"")
        hello = LinkHello(
            version=FABRIC_VERSION,
            source=source,
            target=target,
            target_generation=generation,
            transport=transport,
            nonce=new_nonce(),
        )
        _send(channel, hello, deadline)
        challenge = _receive_answer(channel, LinkChallenge, deadline)
        transcript = _transcript(hello, challenge, binding)
        _send(channel, LinkProof(proof=credentials.proof("source", transcript)), deadline)
        welcome = _receive_answer(channel, LinkWelcome, deadline)
    except (ssl.SSLError, PeerAlertError, MalformedMessageError) as error:
        raise LinkRefusedError(f"no agent of this fabric answers there: {_describe(error)}") from error
    if not credentials.is_proof(welcome.proof, "target", transcript):
        raise LinkRefusedError("the target's agent does not have our key", RefusalReason.KEY)
    if welcome.generation != generation:
        raise LinkRefusedError("the target's store is of another generation", RefusalReason.STORE)
    channel.protect(credentials.link_key("source", transcript), credentials.link_key("target", transcript))


def admit_source(
    channel: FabricChannel, own: Identity, credentials: Credentials, deadline: float
) -> Admitted:
    """Run the target's side of the handshake.

    Raises:
        LinkRefusedError: the peer is not let in; it has been told.
        ChannelError: it broke, or took too long.
    """
    binding = channel.binding
    try:
        if credentials.server_tls is not None and isinstance(channel, TcpChannel):
            channel.start_tls(credentials.server_tls, server_side=True)
            _finish_tls(channel, deadline)
            binding = certificate_digest(credentials.own_certificate)
        hello = read_body(LinkHello, _receive(channel, deadline))
        if hello.version != FABRIC_VERSION:
            _refuse(channel, "it speaks another version", RefusalReason.VERSION, deadline)
        challenge = LinkChallenge(nonce=new_nonce())
        _send(channel, challenge, deadline)
        transcript = _transcript(hello, challenge, binding)
        proof = read_body(LinkProof, _receive(channel, deadline))
    except (ssl.SSLError, MalformedMessageError) as error:
        raise LinkRefusedError(f"the peer is no agent of this fabric: {_describe(error)}") from error
    if not credentials.is_proof(proof.proof, "source", transcript):
        _refuse(channel, "its proof is wrong", RefusalReason.KEY, deadline)
    generation = own.generation
    if (hello.target, hello.target_generation) != (own.store, generation):
        _refuse(channel, "it wants another store", RefusalReason.STORE, deadline, generation)
    if hello.transport not in own.transports or not _is_carried(channel, hello.transport):
        _refuse(
            channel,
            f"entries do not come by {hello.transport}",
            RefusalReason.TRANSPORT,
            deadline,
            generation,
        )
    if own.is_draining:
        _refuse(channel, "this agent is draining", RefusalReason.BUSY, deadline, generation)
    _send(
        channel,
        LinkWelcome(generation=generation, proof=credentials.proof("target", transcript)),
        deadline,
    )
    channel.protect(credentials.link_key("target", transcript), credentials.link_key("source", transcript))
    return Admitted(hello.source, generation, hello.transport)


def _describe(error: Exception) -> str:
    """TLS error as text that names whose certificate is not trusted."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted here ({error.verify_message})"
    reason = (error.reason or "") if isinstance(error, ssl.SSLError) else str(error)
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return f"it does not trust our certificate ({reason})"
    return str(error)


def _is_carried(channel: FabricChannel, transport: FabricTransport) -> bool:
    """True if `channel` can carry `transport`; NIXL uses a TCP connection beside it."""
    return (transport is FabricTransport.REDIS) == (channel.carrier is FabricTransport.REDIS)


def _transcript(hello: LinkHello, challenge: LinkChallenge, binding: bytes) -> Transcript:
    return Transcript(
        FABRIC_VERSION,
        hello.source,
        hello.target,
        hello.nonce,
        challenge.nonce,
        hello.transport.value,
        binding,
    )


def _refuse(
    channel: FabricChannel, detail: str, reason: RefusalReason, deadline: float, generation: int | None = None
) -> None:
    _send(channel, LinkRefusal(reason=reason, generation=generation), deadline)
    raise LinkRefusedError(f"the peer is refused: {detail}", reason)


def _receive_answer(channel: FabricChannel, cls: type[Sent], deadline: float) -> Sent:
    body = _receive(channel, deadline)
    try:
        refusal = read_body(LinkRefusal, body)
    except MalformedMessageError:
        return read_body(cls, body)
    raise LinkRefusedError(f"the target's agent refuses us: {refusal.reason}", refusal.reason)


def _send(channel: FabricChannel, message: Message, deadline: float) -> None:
    body = message.model_dump_json().encode()
    left = memoryview(_LENGTH.pack(len(body)) + body)
    while left:
        try:
            num_sent = channel.try_send([left])
        except ChannelClosedError:
            _read_alert(channel)
            raise
        left = left[num_sent:]
        if left and not num_sent:
            _wait(channel, deadline, writable=True)


def _read_alert(channel: FabricChannel) -> None:
    """Raise PeerAlertError if the peer sent a TLS alert, which in TLS 1.3 comes after the handshake."""
    try:
        channel.try_receive(memoryview(bytearray(1)))
    except PeerAlertError:
        raise
    except ChannelClosedError:
        return


def _receive(channel: FabricChannel, deadline: float) -> bytes:
    (num_bytes,) = _LENGTH.unpack(_receive_exactly(channel, _LENGTH.size, deadline))
    if not 2 <= num_bytes <= MAX_HANDSHAKE_BYTES:
        raise MalformedMessageError("what it sends is no handshake")
    return _receive_exactly(channel, num_bytes, deadline)


def _receive_exactly(channel: FabricChannel, num_bytes: int, deadline: float) -> bytes:
    data = bytearray(num_bytes)
    left = memoryview(data)
    while left:
        num_read = channel.try_receive(left)
        left = left[num_read:]
        if left and not num_read:
            _wait(channel, deadline, writable=False)
    return bytes(data)


def _finish_tls(channel: TcpChannel, deadline: float) -> None:
    while not channel.try_handshake():
        _wait(channel, deadline, writable=False)


def _wait(channel: FabricChannel, deadline: float, *, writable: bool) -> None:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise PeerSilentError("the peer took too long to say who it is")
    channel.wait(left_s, writable=writable)

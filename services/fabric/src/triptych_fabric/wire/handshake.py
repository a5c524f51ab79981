"""Handshake of a connection, in bounded time; the sender's agent has connected.

    sender                                              receiver
      LinkHello{version, stores, generation, transport, nonce} ──▶
                                         ◀── LinkChallenge{nonce}             or LinkRefusal
      LinkProof{proof} ──────────────────────────────────────────▶
                                         ◀── LinkWelcome{generation, proof}   or LinkRefusal

Each message is JSON behind its length. A peer that cannot prove that it belongs to the fabric receives a
random number and a refusal. A sender that expects another store, or another generation of it, than this
agent has receives the generation, after its proof, and no entry is accepted from it.
"""

import hashlib
import ssl
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, NoReturn

from pydantic import PositiveInt, StringConstraints

from triptych_common.domain.errors import MalformedMessageError
from triptych_common.protocol.ids import Name
from triptych_common.protocol.messages import FabricTransport, Message
from triptych_fabric.wire.channel import (
    ChannelClosedError,
    ChannelError,
    FabricChannel,
    PeerAlertError,
    PeerSilentError,
)
from triptych_fabric.wire.frames import FABRIC_VERSION, Body, read_body
from triptych_fabric.wire.keys import Credentials, new_nonce, transcript

MAX_HANDSHAKE_BYTES = 2048
_LENGTH = struct.Struct(">I")
Nonce = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Proof = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")]


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
        self, store: str, generation: int, transports: Collection[FabricTransport] = (FabricTransport.TCP,)
    ) -> None:
        self.store = store
        self.generation = generation
        self.transports = frozenset(transports)
        self.is_draining = False


@dataclass(frozen=True)
class Admitted:
    """Admitted peer and how its entries arrive."""

    sender: str  # store
    generation: int  # of this agent's store, as announced to the peer
    transport: FabricTransport


def greet_receiver(
    channel: FabricChannel,
    sender: str,
    receiver: str,
    generation: int,
    credentials: Credentials,
    deadline: float,
    transport: FabricTransport = FabricTransport.TCP,
) -> None:
    """Run the sender's side of the handshake, by the monotonic second `deadline`.

    Raises:
        LinkRefusedError: one of the two does not let the other in.
        ChannelError: it broke, or took too long.
    """
    talk = _Talk(channel, deadline)
    try:
        certificate = b""
        if credentials.client_tls is not None:
            tls = talk.start_tls(credentials.client_tls, server_side=False)
            certificate = tls.getpeercert(binary_form=True) or b""
        hello = LinkHello(
            version=FABRIC_VERSION,
            source=sender,
            target=receiver,
            target_generation=generation,
            transport=transport,
            nonce=new_nonce(),
        )
        talk.send(hello)
        challenge = talk.receive_answer(LinkChallenge)
        facts = transcript_of(hello, challenge, certificate)
        talk.send(LinkProof(proof=credentials.proof("source", facts)))
        welcome = talk.receive_answer(LinkWelcome)
    except (ssl.SSLError, PeerAlertError, MalformedMessageError) as error:
        raise LinkRefusedError(f"no agent of this fabric answers there: {_describe(error)}") from error
    if not credentials.is_proof(welcome.proof, "target", facts):
        raise LinkRefusedError("the receiver's agent does not have our key", RefusalReason.KEY)
    if welcome.generation != generation:
        raise LinkRefusedError("the receiver's store is of another generation", RefusalReason.STORE)


def admit_sender(
    channel: FabricChannel, own: Identity, credentials: Credentials, deadline: float
) -> Admitted:
    """Run the receiver's side of the handshake, by the monotonic second `deadline`.

    Raises:
        LinkRefusedError: the peer is not let in, and has received the reason.
        ChannelError: it broke, or took too long.
    """
    talk = _Talk(channel, deadline)
    try:
        certificate = b""
        if credentials.server_tls is not None:
            talk.start_tls(credentials.server_tls, server_side=True)
            certificate = credentials.own_certificate
        hello = read_body(LinkHello, talk.receive())
        if hello.version != FABRIC_VERSION:
            talk.refuse("it speaks another version", RefusalReason.VERSION)
        challenge = LinkChallenge(nonce=new_nonce())
        talk.send(challenge)
        facts = transcript_of(hello, challenge, certificate)
        proof = read_body(LinkProof, talk.receive())
    except (ssl.SSLError, MalformedMessageError) as error:
        raise LinkRefusedError(f"the peer is no agent of this fabric: {_describe(error)}") from error
    if not credentials.is_proof(proof.proof, "source", facts):
        talk.refuse("its proof is wrong", RefusalReason.KEY)
    generation = own.generation
    if (hello.target, hello.target_generation) != (own.store, generation):
        talk.refuse("it wants another store", RefusalReason.STORE, generation)
    if hello.transport not in own.transports:
        talk.refuse(f"entries do not come by {hello.transport}", RefusalReason.TRANSPORT, generation)
    if own.is_draining:
        talk.refuse("this agent is draining", RefusalReason.BUSY, generation)
    talk.send(LinkWelcome(generation=generation, proof=credentials.proof("target", facts)))
    return Admitted(hello.source, generation, hello.transport)


def _describe(error: Exception) -> str:
    """TLS error as text that names whose certificate is not trusted."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted here ({error.verify_message})"
    reason = (error.reason or "") if isinstance(error, ssl.SSLError) else str(error)
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return f"it does not trust our certificate ({reason})"
    return str(error)


def transcript_of(hello: LinkHello, challenge: LinkChallenge, certificate: bytes) -> bytes:
    """Return the facts of a connection, with the DER certificate of the receiver's agent."""
    binding = hashlib.sha256(certificate).digest() if certificate else b""
    facts = hello.source, hello.target, hello.nonce, challenge.nonce, hello.transport.value
    return transcript(str(FABRIC_VERSION), *facts, binding=binding)


class _Talk:
    """Messages of one handshake; each call waits until the deadline at most."""

    def __init__(self, channel: FabricChannel, deadline: float) -> None:
        self._channel = channel
        self._deadline = deadline

    def start_tls(self, context: ssl.SSLContext, *, server_side: bool) -> ssl.SSLSocket:
        tls = self._channel.start_tls(context, server_side=server_side)
        while not self._channel.try_handshake():
            self._wait()
        return tls

    def send(self, message: Message) -> None:
        body = message.model_dump_json().encode()
        left = memoryview(_LENGTH.pack(len(body)) + body)
        while left:
            try:
                num_sent = self._channel.try_send([left])
            except ChannelClosedError:
                self._read_alert()
                raise
            left = left[num_sent:]
            if left and not num_sent:
                self._wait(writable=True)

    def refuse(self, detail: str, reason: RefusalReason, generation: int | None = None) -> NoReturn:
        self.send(LinkRefusal(reason=reason, generation=generation))
        raise LinkRefusedError(f"the peer is refused: {detail}", reason)

    def receive(self) -> bytes:
        (num_bytes,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
        if not 2 <= num_bytes <= MAX_HANDSHAKE_BYTES:
            raise MalformedMessageError("what it sends is no handshake")
        return self._receive_exactly(num_bytes)

    def receive_answer(self, cls: type[Body]) -> Body:
        body = self.receive()
        try:
            refusal = read_body(LinkRefusal, body)
        except MalformedMessageError:
            return read_body(cls, body)
        raise LinkRefusedError(f"the receiver's agent refuses us: {refusal.reason}", refusal.reason)

    def _receive_exactly(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        left = memoryview(data)
        while left:
            num_read = self._channel.try_receive(left)
            left = left[num_read:]
            if left and not num_read:
                self._wait()
        return bytes(data)

    def _read_alert(self) -> None:
        """Raise PeerAlertError if the peer sent a TLS alert, which in TLS 1.3 comes after the handshake."""
        try:
            self._channel.try_receive(memoryview(bytearray(1)))
        except PeerAlertError:
            raise
        except ChannelClosedError:
            return

    def _wait(self, *, writable: bool = False) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise PeerSilentError("the peer took too long to say who it is")
        self._channel.wait(left_s, writable=writable)

"""Proofs are good for one connection and one side; keys that others can read are refused."""

from pathlib import Path
from typing import Any

import pytest

from triptych_common.protocol.messages import FabricTransport
from triptych_fabric.wire.frames import FABRIC_VERSION
from triptych_fabric.wire.handshake import LinkChallenge, LinkHello, transcript_of
from triptych_fabric.wire.keys import Credentials, FabricKeyError, load_credentials, new_nonce, transcript

KEY = Credentials(b"k" * 32)
FACTS = ("1", "store-a", "store-b", "11", "22", "tcp")
TRANSCRIPT = transcript(*FACTS, binding=b"")


@pytest.mark.parametrize(
    "changed",
    [
        *(transcript(*FACTS[:at], FACTS[at] + "x", *FACTS[at + 1 :], binding=b"") for at in range(6)),
        transcript(*FACTS, binding=b"x"),
        transcript("1", "store-as", "tore-b", *FACTS[3:], binding=b""),
    ],
)
def test_a_proof_is_of_one_connection(changed: bytes) -> None:
    proof = KEY.proof("source", TRANSCRIPT)
    assert KEY.is_proof(proof, "source", TRANSCRIPT)
    assert not KEY.is_proof(proof, "source", changed)


HELLO = LinkHello(
    version=FABRIC_VERSION,
    source="store-a",
    target="store-b",
    target_generation=1,
    transport=FabricTransport.TCP,
    nonce="1" * len(new_nonce()),
)
CHALLENGE = LinkChallenge(nonce="2" * len(HELLO.nonce))


@pytest.mark.parametrize(
    ("hello", "nonce", "certificate"),
    [
        ({"source": "store-c"}, CHALLENGE.nonce, b"certificate"),
        ({"target": "store-c"}, CHALLENGE.nonce, b"certificate"),
        ({"transport": FabricTransport.NIXL}, CHALLENGE.nonce, b"certificate"),
        ({"nonce": "3" * len(HELLO.nonce)}, CHALLENGE.nonce, b"certificate"),
        ({}, "3" * len(HELLO.nonce), b"certificate"),
        ({}, CHALLENGE.nonce, b"another"),
        ({}, CHALLENGE.nonce, b""),
    ],
)
def test_both_sides_prove_all_of_a_handshake(hello: dict[str, Any], nonce: str, certificate: bytes) -> None:
    changed = HELLO.model_copy(update=hello), LinkChallenge(nonce=nonce), certificate
    assert transcript_of(HELLO, CHALLENGE, b"certificate") == transcript_of(HELLO, CHALLENGE, b"certificate")
    assert transcript_of(*changed) != transcript_of(HELLO, CHALLENGE, b"certificate")


def test_a_proof_is_of_one_side_and_key() -> None:
    proof = KEY.proof("source", TRANSCRIPT)
    assert not KEY.is_proof(proof, "target", TRANSCRIPT), "it cannot be sent back"
    assert not Credentials(b"j" * 32).is_proof(proof, "source", TRANSCRIPT)
    assert not KEY.is_proof("", "source", TRANSCRIPT)


def key_at(path: Path, content: bytes = b"k" * 32, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_key_is_read(tmp_path: Path) -> None:
    assert load_credentials(key_at(tmp_path / "key", b"k" * 32 + b"\n"), None, None, None) == KEY


def test_neither_key_nor_certificates(tmp_path: Path) -> None:
    with pytest.raises(FabricKeyError, match="needs"):
        load_credentials(None, None, None, None)
    with pytest.raises(FabricKeyError, match="together"):
        load_credentials(None, tmp_path / "cert", None, None)
    with pytest.raises(FabricKeyError, match="cannot be read"):
        load_credentials(tmp_path / "gone", None, None, None)

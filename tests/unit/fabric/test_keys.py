"""Proofs are good for one connection and one side; keys that others can read are refused."""

from pathlib import Path

import pytest

from triptych_fabric.wire.keys import Credentials, FabricKeyError, load_credentials, transcript

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

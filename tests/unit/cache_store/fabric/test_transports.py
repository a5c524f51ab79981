"""By which transports an agent sends and takes entries."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from triptych_cache_store.fabric import service
from triptych_cache_store.fabric.service import usable_transports
from triptych_cache_store.fabric.settings import FabricSettings
from triptych_cache_store.fabric.wire.keys import FabricKeyError
from triptych_cache_store.fabric.wire.nixl_memory import NixlError
from triptych_common.protocol.messages import FabricTransport

TCP, NIXL, REDIS = FabricTransport.TCP, FabricTransport.NIXL, FabricTransport.REDIS


def test_without_nixl_the_others_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NixlError("not here")

    monkeypatch.setattr(service, "load_nixl", fail)
    assert usable_transports((NIXL, TCP)) == (TCP,)
    assert usable_transports((TCP, REDIS)) == (TCP, REDIS)
    with pytest.raises(NixlError):
        usable_transports((NIXL,))


def test_a_list_that_names_one_twice_is_refused() -> None:
    with pytest.raises(ValidationError):
        FabricSettings(fabric_transports=(TCP, TCP))


def test_an_agent_of_redis_alone_listens_nowhere() -> None:
    assert FabricSettings(fabric_transports=(REDIS, TCP)).listens
    assert not FabricSettings(fabric_transports=(REDIS,)).listens
    FabricSettings(fabric_transports=(REDIS,), fabric_listen_host="0.0.0.0")  # which nobody calls


def test_redis_needs_the_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    assert FabricSettings(fabric_transports=(REDIS,), fabric_key_file=key).credentials().key == b"k" * 32
    with pytest.raises(FabricKeyError):
        FabricSettings(fabric_transports=(TCP, REDIS)).credentials()

"""The choice of the transports by which an agent sends and takes entries."""

import pytest
from pydantic import ValidationError

from triptych_common.protocol.messages import FabricTransport
from triptych_fabric.settings import FabricSettings
from triptych_fabric.transports import nixl
from triptych_fabric.transports.nixl import usable_transports
from triptych_fabric.transports.nixl_memory import NixlError

TCP, NIXL = FabricTransport.TCP, FabricTransport.NIXL


def test_without_nixl_the_others_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NixlError("not here")

    monkeypatch.setattr(nixl, "load_nixl", fail)
    assert usable_transports((NIXL, TCP)) == (TCP,)
    assert usable_transports((TCP,)) == (TCP,)
    with pytest.raises(NixlError):
        usable_transports((NIXL,))


def test_nixl_whose_ports_authenticate_nobody_is_used_only_if_it_is_named() -> None:
    assert FabricSettings().fabric_transports == (TCP,)


@pytest.mark.parametrize(("host", "devices"), [("127.0.0.1", "lo"), ("::1", "lo"), ("192.0.2.1", None)])
def test_ucx_listens_on_loopback_alone_beside_an_agent_that_does(
    monkeypatch: pytest.MonkeyPatch, host: str, devices: str | None
) -> None:
    monkeypatch.setattr(nixl, "load_nixl", lambda: None)
    environment: dict[str, str] = {}
    monkeypatch.setattr("os.environ", environment)
    usable_transports((NIXL, TCP), host)
    assert environment.get("UCX_NET_DEVICES") == devices


def test_a_list_that_names_one_twice_is_refused() -> None:
    with pytest.raises(ValidationError):
        FabricSettings(fabric_transports=(TCP, TCP))

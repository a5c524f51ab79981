"""Which services `restart` means."""

import pytest

from triptych_cli.commands.scale import chosen
from triptych_cli.supervisor.state import STANDS_BY, ServiceState, ServiceStatus, SystemStatus

NAMES = ("redis", "cache_store-0", "encoder-0", "encoder-1", "gateway-0")
STATUS = SystemStatus(
    supervisor_pid=1,
    endpoint="",
    redis_url="",
    deployment="",
    store_socket="",
    traces_dir="",
    model="",
    services=tuple(
        ServiceStatus(name=name, state=ServiceState.READY, since=0, log_file="") for name in NAMES
    ),
)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([], NAMES[1:]),
        (["encoder"], ("encoder-0", "encoder-1")),
        (["gateway-0", "encoder-1", "encoder-1"], ("encoder-1", "gateway-0")),
        (["redis"], ("redis",)),
    ],
)
def test_by_name_or_by_kind(wanted: list[str], expected: tuple[str, ...]) -> None:
    assert chosen(STATUS, wanted) == expected


def test_others_are_refused() -> None:
    with pytest.raises(ValueError, match="no service decoder"):
        chosen(STATUS, ["decoder"])


def test_those_that_stand_by_are_left_alone_unless_named() -> None:
    away = STATUS.services[3].model_copy(update={"state": ServiceState.STOPPED, "detail": STANDS_BY})
    status = STATUS.model_copy(update={"services": (*STATUS.services[:3], away, STATUS.services[4])})
    assert chosen(status, []) == ("cache_store-0", "encoder-0", "gateway-0")
    assert chosen(status, ["encoder"]) == ("encoder-0",)
    assert chosen(status, ["encoder-1"]) == ("encoder-1",)

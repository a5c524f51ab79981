"""Which services `restart` means."""

import pytest

from triptych_cli.commands.restart import chosen
from triptych_cli.supervisor.state import ServiceState, ServiceStatus, SystemStatus

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

"""Every form of address reaches Redis, and has a name and a database of its own."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from tests.conftest import EmbeddedRedis, embedded_redis
from tests.integration.common.samples import STREAM, ids, message, take
from tests.support.waiting import free_port
from triptych_common.bus import AsyncBus


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with embedded_redis(port=free_port()) as running:
        yield running


@pytest.mark.parametrize(
    "form",
    [
        "redis://127.0.0.1:{port}/3",
        "redis://[::1]:{port}/3",
        "redis://localhost:{port}?db=3",
        "unix://{socket}?db=3",
    ],
)
async def test_every_form_works(server: EmbeddedRedis, form: str) -> None:
    if "::1" in form and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    url = form.format(port=server.port, socket=server.socket_path)
    async with (
        await AsyncBus.connect(url, "test", client_name="a name") as bus,
        bus.consumer(STREAM, group="g", consumer="c") as consumer,
    ):
        await bus.publish(STREAM, message(1))
        assert await take(consumer, 1) == ids(1)
        own = await bus.client.client_info()
        assert (own["db"], own["name"]) == (3, "a_name")

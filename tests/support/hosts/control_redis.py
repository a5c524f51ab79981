"""Redis on a host of its own: what all hosts talk to, over the network."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from tests.conftest import EmbeddedRedis
from tests.support.hosts.network import Host

PORT = 6379


class ControlRedis(EmbeddedRedis):
    """`url` is the test's own way to it, by a Unix socket, which no fault of the network touches."""

    def __init__(self, host: Host) -> None:
        # Of options that are given twice the last one counts.
        super().__init__("--bind", str(host.address), "--protected-mode", "no", port=PORT)
        self._host = host
        self.service_url = f"redis://{host.address}:{PORT}/0"

    def start(self) -> None:
        """There; see `EmbeddedRedis.start`."""
        self._host.call(super().start)


@contextmanager
def control_redis(host: Host) -> Iterator[ControlRedis]:
    """It runs; gone at the end."""
    with closing(ControlRedis(host)) as server:
        server.start()
        yield server

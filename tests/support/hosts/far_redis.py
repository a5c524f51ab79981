"""Hosts whose Redis is far away: a proxy delays all that passes between it and the services."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.faults.distance import DistantRedis, distant_redis
from tests.support.hosts.control_redis import control_redis
from tests.support.hosts.layout import CONTROL, HostsLayout
from tests.support.hosts.network import Network
from tests.support.hosts.system import HostsSystem

PORT = 6380
"""Of the proxy, on the host of Redis."""


@contextmanager
def running_far_from_redis(layout: HostsLayout) -> Iterator[tuple[HostsSystem, DistantRedis]]:
    """As `running_hosts`; Redis is near at first. The test itself does not pass the proxy."""
    with Network([*layout.places, CONTROL]) as network, control_redis(network[CONTROL]) as server:
        address = (str(network[CONTROL].address), PORT)
        listener = network[CONTROL].call(lambda: socket.create_server(address))
        with listener, distant_redis(server.socket_path, listener) as far:
            server.service_url = f"redis://{address[0]}:{PORT}/0"
            with HostsSystem(network, server, layout) as system:
                yield system, far

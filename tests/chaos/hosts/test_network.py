"""The network of these tests itself: cut by direction, slowed, with losses; and gone afterwards."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts.namespaces import require_namespaces
from tests.support.hosts.network import Host, Network

pytestmark = pytest.mark.chaos

PORT = 5000
LIMIT_S = 20.0
SILENCE_S = 0.4
NUM_DATAGRAMS = 2000


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    require_namespaces()
    with Network(["a", "b", "c"]) as made:
        yield made


@pytest.fixture(autouse=True)
def _whole(network: Network) -> Iterator[None]:
    yield
    network.mend_all()


def opened(host: Host) -> socket.socket:
    """For datagrams to and from `host`."""

    def bound() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        made.bind((str(host.address), PORT))
        return made

    return host.call(bound)


def num_arriving(network: Network, source: str, target: str, number: int = 1) -> int:
    """Of `number` datagrams."""
    with opened(network[source]) as sender, opened(network[target]) as receiver:
        receiver.settimeout(SILENCE_S)
        for _ in range(number):
            sender.sendto(b"x", (str(network[target].address), PORT))
        found = 0
        while found < number:
            try:
                receiver.recv(16)
            except TimeoutError:
                break
            found += 1
        return found


def seconds_for(network: Network, source: str, target: str, num_bytes: int) -> float:
    """From the first byte to the last, over one TCP connection."""
    address = (str(network[target].address), PORT)
    ended: list[float] = []

    def receive(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            left = num_bytes
            while left:
                left -= len(connection.recv(1 << 20))
        ended.append(time.monotonic())

    with network[target].call(lambda: socket.create_server(address)) as listener:
        thread = threading.Thread(target=receive, args=(listener,), daemon=True)
        thread.start()
        with network[source].call(lambda: socket.create_connection(address, LIMIT_S)) as connection:
            began = time.monotonic()
            connection.sendall(bytes(num_bytes))
            thread.join(LIMIT_S)
    return ended[0] - began


def test_hosts_reach_each_other_and_this_machine_reaches_them(network: Network) -> None:
    assert num_arriving(network, "a", "b") == 1
    with network["c"].call(lambda: socket.create_server((str(network["c"].address), PORT))):
        socket.create_connection((str(network["c"].address), PORT), LIMIT_S).close()


def test_a_host_sees_nothing_of_this_machine(network: Network) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with pytest.raises(ConnectionRefusedError):
            network["a"].call(lambda: socket.create_connection(address, LIMIT_S))


def test_one_direction_is_cut_alone(network: Network) -> None:
    network.cut("a", "b", both_ways=False)
    assert num_arriving(network, "a", "b") == 0
    assert num_arriving(network, "b", "a") == 1
    assert num_arriving(network, "a", "c") == 1
    network.cut("a", "c")
    assert [num_arriving(network, "a", "b"), num_arriving(network, "c", "a")] == [0, 0]
    network.mend("a", "b")
    assert [num_arriving(network, "a", "b"), num_arriving(network, "a", "c")] == [1, 0]


def test_some_packets_are_lost(network: Network) -> None:
    with network.lossy("a", "b", 0.25):
        assert 0.6 < num_arriving(network, "a", "b", NUM_DATAGRAMS) / NUM_DATAGRAMS < 0.9
    with network.lossy("a", "b", 0.02):
        assert seconds_for(network, "b", "a", 1 << 20) > 0  # TCP sends again
    assert num_arriving(network, "a", "b", NUM_DATAGRAMS) == NUM_DATAGRAMS


def test_a_slow_host_is_slow_in_both_directions(network: Network) -> None:
    """Never faster than its rate, beyond what its queue takes at once."""
    num_bytes = 4 << 20
    least_s = (num_bytes - (1 << 20)) * 8 / 20e6
    with network.slow("a", 20_000_000):
        assert seconds_for(network, "a", "b", num_bytes) > least_s
        assert seconds_for(network, "b", "a", num_bytes) > least_s


def test_a_process_starts_inside(network: Network, tmp_path: Path) -> None:
    process = network["b"].start(["ip", "-brief", "address"], tmp_path / "log")
    assert process.wait(LIMIT_S) == 0
    assert str(network["b"].address) in (tmp_path / "log").read_text()


def test_nothing_stays_of_a_network(network: Network) -> None:
    before = {name for _, name in socket.if_nameindex()}
    with Network(["a"]):
        assert len({name for _, name in socket.if_nameindex()} - before) == 1
    assert {name for _, name in socket.if_nameindex()} == before

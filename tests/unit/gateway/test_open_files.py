"""The limit on open files, and what connections get of it."""

import resource

import pytest

from triptych_gateway import open_files
from triptych_gateway.open_files import (
    BACKLOG,
    MIN_IDLE,
    OTHERS,
    ConnectionLimits,
    IdleConnections,
    allow_open_files,
)

INFINITE = resource.RLIM_INFINITY
MAX_IDLE = 2000


class Log:
    """What is warned of."""

    def __init__(self) -> None:
        self.warnings: list[tuple[str, dict[str, int]]] = []

    def warning(self, message: str, **fields: int) -> None:
        self.warnings.append((message, fields))


@pytest.mark.parametrize(
    ("limits", "num_requests", "reached", "fitting"),
    [
        ((1024, 524_288), 256, 524_288, ConnectionLimits(MAX_IDLE)),
        ((1024, 1024), 256, 1024, ConnectionLimits(192, 64)),
        ((1024, 4096), 256, 4096, ConnectionLimits(MAX_IDLE, 4096 - 2 * 256 - OTHERS - MAX_IDLE)),
        ((1024, 4096), 10_000, 4096, ConnectionLimits(MIN_IDLE, MIN_IDLE)),
        ((1024, INFINITE), 256, 512 + OTHERS + MAX_IDLE + BACKLOG, ConnectionLimits(MAX_IDLE)),
        ((INFINITE, INFINITE), 10_000, INFINITE, ConnectionLimits(MAX_IDLE)),
    ],
)
def test_as_far_as_it_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[int, int],
    num_requests: int,
    reached: int,
    fitting: ConnectionLimits,
) -> None:
    now, log = [limits], Log()
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: now.append(both))
    monkeypatch.setattr(open_files, "log", log)
    assert allow_open_files(num_requests, MAX_IDLE) == fitting
    assert now[-1] == (reached, limits[1])
    needed = 2 * num_requests + OTHERS + MAX_IDLE + BACKLOG
    told = {"limit": reached, "needed": needed, "max_idle_connections": fitting.max_idle}
    wanted = [("too few files may be open", told)] if fitting != ConnectionLimits(MAX_IDLE) else []
    assert log.warnings == wanted


class Connection:
    """One that is idle until it is closed."""

    def __init__(self) -> None:
        self.is_closed = False

    def close_idle(self) -> None:
        self.is_closed = True


def closed(connections: list[Connection]) -> list[int]:
    return [number for number, each in enumerate(connections) if each.is_closed]


@pytest.mark.parametrize("has_answered", [True, False])
def test_the_oldest_idle_connection_ends(has_answered: bool) -> None:
    idle, connections = IdleConnections(3), [Connection() for _ in range(5)]
    for each in connections:
        idle.add(each, has_answered=has_answered)
    assert (closed(connections), len(idle)) == ([0, 1], 3)


@pytest.mark.parametrize("flood_has_answered", [True, False])
def test_a_flood_of_one_kind_ends_its_own(flood_has_answered: bool) -> None:
    idle, others = IdleConnections(10), [Connection() for _ in range(5)]
    for each in others:
        idle.add(each, has_answered=not flood_has_answered)
    flood = [Connection() for _ in range(100)]
    for each in flood:
        idle.add(each, has_answered=flood_has_answered)
    assert closed(others) == []
    assert closed(flood) == list(range(95))


def test_a_connection_with_a_request_is_not_idle() -> None:
    idle, connections = IdleConnections(1), [Connection() for _ in range(2)]
    idle.add(connections[0], has_answered=False)
    idle.discard(connections[0])
    idle.add(connections[1], has_answered=False)
    assert closed(connections) == []
    idle.add(connections[0], has_answered=True)
    assert len(idle) == 1

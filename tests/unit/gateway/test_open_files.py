"""The limit on open files, raised as far as requests need it."""

import resource

import pytest

from triptych_gateway import open_files
from triptych_gateway.open_files import OTHERS, allow_open_files


class Log:
    """What is warned of."""

    def __init__(self) -> None:
        self.warnings: list[tuple[str, dict[str, int]]] = []

    def warning(self, message: str, **fields: int) -> None:
        self.warnings.append((message, fields))


@pytest.mark.parametrize(
    ("limits", "num_requests", "reached", "warned"),
    [
        ((1024, 4096), 256, 1024, False),
        ((1024, 4096), 1000, 2000 + OTHERS, False),
        ((1024, 4096), 10_000, 4096, True),
        ((1024, resource.RLIM_INFINITY), 10_000, 20_000 + OTHERS, False),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 10_000, resource.RLIM_INFINITY, False),
    ],
)
def test_as_far_as_it_is_needed_and_allowed(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], num_requests: int, reached: int, warned: bool
) -> None:
    now, log = [limits], Log()
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: now.append(both))
    monkeypatch.setattr(open_files, "log", log)
    allow_open_files(num_requests)
    assert now[-1] == (reached, limits[1])
    needed = 2 * num_requests + OTHERS
    wanted = [("too few files may be open", {"limit": reached, "needed": needed})] if warned else []
    assert log.warnings == wanted

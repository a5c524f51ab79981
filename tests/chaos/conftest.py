"""One running system for the cases of a file; each case leaves it whole and idle."""

from collections.abc import Iterator

import pytest
from support.fast.faults import Faults
from support.fast.layout import Layout
from support.fast.scenario import Scenario
from support.fast.system import FastSystem

from tests.conftest import embedded_redis


@pytest.fixture(scope="module")
def system(request: pytest.FixtureRequest) -> Iterator[FastSystem]:
    """Parametrise indirectly with a `Layout`."""
    with embedded_redis() as server, FastSystem(server, getattr(request, "param", Layout())) as running:
        yield running


@pytest.fixture(scope="module")
def faults(system: FastSystem) -> Iterator[Faults]:
    opened = Faults(system)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def scenario(system: FastSystem, faults: Faults) -> Scenario:
    return Scenario(system, faults)

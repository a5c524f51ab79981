"""One running system for the cases of a file; each case leaves it whole and idle."""

from collections.abc import Iterator

import pytest

from tests.conftest import embedded_redis
from tests.support.fast.faults import Faults
from tests.support.fast.layout import Layout
from tests.support.fast.scenario import Scenario
from tests.support.fast.system import FastSystem


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

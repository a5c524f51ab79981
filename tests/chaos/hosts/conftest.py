"""One running system on several hosts for all cases of these files; each case leaves it whole and idle."""

from collections.abc import Iterator

import pytest

from tests.support.fast.faults import Faults
from tests.support.fast.scenario import Scenario
from tests.support.hosts.layout import HostsLayout
from tests.support.hosts.namespaces import require_namespaces
from tests.support.hosts.network import Network
from tests.support.hosts.system import HostsSystem, running_hosts


@pytest.fixture(scope="session")
def system(request: pytest.FixtureRequest) -> Iterator[HostsSystem]:
    """Parametrise indirectly with a `HostsLayout`."""
    require_namespaces()
    with running_hosts(getattr(request, "param", HostsLayout())) as running:
        yield running


@pytest.fixture
def network(system: HostsSystem) -> Iterator[Network]:
    """Whole again after the test."""
    yield system.network
    system.network.mend_all()


@pytest.fixture(scope="session")
def faults(system: HostsSystem) -> Iterator[Faults]:
    opened = Faults(system)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def scenario(system: HostsSystem, faults: Faults) -> Scenario:
    return Scenario(system, faults)

"""A service's delays between restarts, and every step that its states do not allow."""

from itertools import product
from pathlib import Path

import pytest

from triptych_cli.supervisor.service import Backoff, Service
from triptych_cli.supervisor.state import ALLOWED, ServiceState
from triptych_cli.system.topology import HttpReady, ServiceSpec
from triptych_common.domain.errors import IllegalTransitionError

EVERY_STEP = list(product(ServiceState, ServiceState))


def test_delays_double_up_to_a_limit() -> None:
    backoff = Backoff(first_s=0.5, limit_s=4.0, stable_s=60.0)
    assert [backoff.next_delay_s(1.0) for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, 4.0]


def test_a_long_good_run_starts_the_delays_over() -> None:
    backoff = Backoff(first_s=0.5, limit_s=4.0, stable_s=60.0)
    for _ in range(3):
        backoff.next_delay_s(1.0)
    assert backoff.next_delay_s(61.0) == 0.5


def make_service(changes: list[ServiceState], state: ServiceState | None = None) -> Service:
    """A service in `state` that reports each change of it to `changes`; no process is started."""
    spec = ServiceSpec("one", ("true",), HttpReady("http://x/"))
    service = Service(
        spec,
        env={},
        cwd=Path("/"),
        log_file=Path("/one.log"),
        on_change=lambda: changes.append(service.status.state),
    )
    if state is not None:
        service.status = service.status.model_copy(update={"state": state})
    return service


def test_a_service_begins_as_the_first_state_of_the_table() -> None:
    assert make_service([]).status.state is next(iter(ALLOWED))
    assert ALLOWED.keys() == set(ServiceState)


@pytest.mark.parametrize(("state", "to"), [each for each in EVERY_STEP if each[1] not in ALLOWED[each[0]]])
def test_a_step_that_is_not_in_the_table_is_refused(state: ServiceState, to: ServiceState) -> None:
    changes: list[ServiceState] = []
    service = make_service(changes, state)
    with pytest.raises(IllegalTransitionError, match=f"one: {state.name} -> {to.name}"):
        service._move_to(to)
    assert service.status.state is state
    assert changes == []


@pytest.mark.parametrize(("state", "to"), [each for each in EVERY_STEP if each[1] in ALLOWED[each[0]]])
def test_every_other_step_is_taken_and_reported(state: ServiceState, to: ServiceState) -> None:
    changes: list[ServiceState] = []
    service = make_service(changes, state)
    service._move_to(to)
    assert service.status.state is to
    assert changes == [to]

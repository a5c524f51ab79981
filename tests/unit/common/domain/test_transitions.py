"""The check that every state machine calls before it assigns a state."""

from enum import Enum, auto

import pytest

from triptych_common.domain.errors import IllegalTransitionError
from triptych_common.domain.transitions import check_transition


class Light(Enum):
    RED = auto()
    GREEN = auto()
    OFF = auto()


ALLOWED = {
    Light.RED: frozenset({Light.GREEN, Light.OFF}),
    Light.GREEN: frozenset({Light.RED}),
    Light.OFF: frozenset[Light](),
}
LEGAL = {(None, Light.RED), (Light.RED, Light.GREEN), (Light.RED, Light.OFF), (Light.GREEN, Light.RED)}


@pytest.mark.parametrize("to", Light)
@pytest.mark.parametrize("state", [None, *Light])
def test_only_steps_of_the_table_are_allowed(state: Light | None, to: Light) -> None:
    if (state, to) in LEGAL:
        check_transition(ALLOWED, "lamp", state, to)
        return
    with pytest.raises(IllegalTransitionError, match="lamp"):
        check_transition(ALLOWED, "lamp", state, to)

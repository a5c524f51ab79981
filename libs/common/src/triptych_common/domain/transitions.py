"""State machines as tables: the states that may follow each state, and the one check of a step. Pure.

A machine is an Enum of states and a table `ALLOWED` beside it; the record's owner has one function that
assigns the state, and it asks here first. docs/design/architecture.md draws each machine, and
`tests/contract/test_state_machines.py` holds drawings, tables and owners together.
"""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from triptych_common.domain.errors import IllegalTransitionError

State = TypeVar("State", bound=Enum)


def check_transition(
    allowed: Mapping[State, frozenset[State]], subject: str, state: State | None, to: State
) -> None:
    """Check that `to` may follow `state`; `subject` names the record in the error.

    `state` None: there is no record yet; only the table's first state may begin one.

    Raises:
        IllegalTransitionError: `to` cannot follow `state`.
    """
    follows = {next(iter(allowed))} if state is None else allowed[state]
    if to not in follows:
        raise IllegalTransitionError(subject, None if state is None else state.name, to.name)

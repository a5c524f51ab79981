"""Requests in the hands of a played vLLM, and the steps that its worker has."""

from dataclasses import dataclass
from typing import NamedTuple

from tests.support.vllm_connector.scheduled import Scheduled


@dataclass(kw_only=True)
class Running(Scheduled):
    """One request in vLLM's hands."""

    gateway: str
    request_id: str
    attempt: int
    has_begun: bool = False  # its first token is out
    is_done: bool = False  # its last token is computed with a step under way
    is_wrong: bool = False  # a step of it read zeros


class Window(NamedTuple):
    """Tokens of a request that a step computes; of a decode, the last step, none."""

    engine_request_id: str
    epoch: int
    start: int
    end: int


class Step(NamedTuple):
    """One that the worker has, and of which no output was handled."""

    windows: tuple[Window, ...]
    loads: frozenset[str]
    lost: frozenset[str]  # of these: zeros were put in their place

"""Instances for the choice among them, without a registry."""

from typing import Any

from triptych_common.protocol.messages import InstanceRecord, Role, ServingLoad
from triptych_gateway.routing.scheduling.candidates import (
    Candidate,
    PromptBlocks,
    RoutingRequest,
    divide_prompt,
)

NAMESPACE = "0" * 64


def record_of(name: str, **fields: Any) -> InstanceRecord:
    values: dict[str, Any] = {
        "boot_id": "b",
        "role": Role.PREFILL_DECODE,
        "url": "http://x",
        "model": "m",
        "namespace_digest": NAMESPACE,
    } | fields
    return InstanceRecord(instance=name, **values)


def candidate(name: str, record: dict[str, Any] | None = None, **known: Any) -> Candidate:
    return Candidate(record_of(name, **(record or {})), **known)


def load_of(num_beats: int, num_running: int = 0, num_waiting: int = 0, kv_usage: float = 0.0) -> ServingLoad:
    return ServingLoad(
        num_beats=num_beats, num_running=num_running, num_waiting=num_waiting, kv_usage=kv_usage
    )


def prompt(*parts: str | bytes, seed: object = "m") -> PromptBlocks:
    """Texts as bytes; media by their mm_hash."""
    return divide_prompt(parts, seed)  # type: ignore[arg-type]


def request(*parts: str | bytes, seed: object = "m", **known: Any) -> RoutingRequest:
    """One whose prompt is these parts."""
    values: dict[str, Any] = {"model": "m", "read_prompt": lambda: prompt(*parts, seed=seed)} | known
    return RoutingRequest(**values)

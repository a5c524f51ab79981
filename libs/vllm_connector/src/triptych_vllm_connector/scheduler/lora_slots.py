"""LoRA adapters of stalled requests: they keep their slots.

vLLM lets a waiting request in while the requests of this step have fewer than `max_loras` adapters. A stalled
request is in no step: another adapter would take its slot, and when the stalled one goes on, a step has more
adapters than there are slots, which ends the engine (an assertion in `Scheduler.schedule`).
"""

from collections.abc import Iterable

from vllm.v1.request import Request


class LoraSlots:
    """`max_loras`: how many adapters a step may have."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras

    def has_room(self, request: Request, running: Iterable[Request]) -> bool:
        """Is there a slot for the adapter of this waiting request, beside those of all that run?"""
        adapter = _adapter_of(request)
        held = {_adapter_of(each) for each in running} - {0}
        return not adapter or adapter in held or len(held) < self._max_loras


def _adapter_of(request: Request) -> int:
    """0: none."""
    return request.lora_request.lora_int_id if request.lora_request is not None else 0

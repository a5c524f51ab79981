"""The KV blocks of a played engine that prefills: what lies in them, and until when it is kept for a reader.

A page holds one prompt's. The one with the lowest number is used first, so that what was freed is soon
another's; what lies there stays until then, as in memory.
"""

from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

from tests.support.protocol_world.virtual_loop import CLOCK
from tests.support.vllm_connector.fake_engine import FakeRequest
from triptych_vllm_connector.scheduler.kv_refusals import describe_kv_caches

LEASE_S = 8  # longer than a flight's check
EXTENSION_S = LEASE_S * 2 // 3  # by a heartbeat, as vLLM counts it
HEARTBEAT_S = LEASE_S // 6


@dataclass
class KvPages:
    """`owners`: engine request ids."""

    owners: dict[int, str] = field(default_factory=dict)  # by page
    contents: dict[int, tuple[int, ...]] = field(default_factory=dict)  # the tokens that are computed there

    def take(self, owner: str, tokens: tuple[int, ...]) -> None:
        page = next(number for number in count() if number not in self.owners)
        self.owners[page] = owner
        self.contents[page] = tokens

    def page_of(self, owner: str) -> int | None:
        return next((page for page, each in self.owners.items() if each == owner), None)

    def free(self, owner: str) -> None:
        page = self.page_of(owner)
        if page is not None:
            del self.owners[page]


class KvOwner:
    """vLLM's NIXL connector of an engine that prefills, with our answers in front of its own.

    `leases`: until when each KV cache is kept, by its engine request id.
    """

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.leases: dict[str, float] = {}
        self._reqs_need_send = self.leases
        describe_kv_caches(SimpleNamespace(connector_scheduler=self))

    def request_finished(self, request: FakeRequest, page: int) -> tuple[bool, dict[str, Any] | None]:
        """Of one whose token is made."""
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        self.leases[request.request_id] = CLOCK.now + LEASE_S
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [page],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request.request_id,
            "remote_blocks_expiry_time": None,  # ours says it
        }

    def on_heartbeat(self, engine_request_ids: tuple[str, ...]) -> None:
        for each in engine_request_ids:
            if each in self.leases:
                self.leases[each] = max(self.leases[each], CLOCK.now + EXTENSION_S)

    def take_expired(self) -> list[str]:
        expired = [each for each, until in self.leases.items() if CLOCK.now >= until]
        for each in expired:
            del self.leases[each]
        return expired

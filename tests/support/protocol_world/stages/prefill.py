"""An instance that prefills: the real `Consumer`, whose KV caches others read. It makes one token.

What a reader tells it lies in a mailbox, as NIXL's notifications do, until its next step.
"""

from typing import Any

from tests.support.protocol_world.config import Config
from tests.support.protocol_world.consumer import ConsumerActor
from tests.support.protocol_world.network import Network
from tests.support.protocol_world.stages.kv_pages import KvOwner, KvPages
from tests.support.protocol_world.stages.prompts import prompt_of
from tests.support.protocol_world.steps import Running
from tests.support.protocol_world.store import StoreActor


class StageConsumer(ConsumerActor):
    """A prefill_decode that gets requests' bodies; one that only prefills, by its name."""

    def __init__(self, name: str, network: Network, store: StoreActor, config: Config) -> None:
        self.is_prefill = name.startswith("p-")
        self.num_lives = 0
        super().__init__(name, network, store, config)

    def start(self) -> None:
        self.num_lives += 1
        self.renders_otherwise = False
        self.pages = KvPages()
        self.owner = KvOwner(f"{self.name}/{self.num_lives}")
        self.mailbox: list[tuple[str, tuple[str, ...]]] = []
        super().start()

    @property
    def boot_id(self) -> str:
        return self.owner.engine_id

    # ---- what others do --------------------------------------------------------------------------
    def hear_http(self, gateway: str, frame: tuple[str, str, int, Any]) -> None:
        what, request_id, attempt, body = frame
        if what == "abort":
            super().hear_http(gateway, frame)
            return
        self.has_news = True
        prompt = prompt_of(body)
        added = self._add(
            gateway, request_id, attempt, prompt.remaining_ms, prompt.rows, len(prompt.texts)
        ).request
        added.kv_transfer_params = prompt.kv_transfer_params
        added.prompt_token_ids = list(prompt.tokens(attempt if self.renders_otherwise else 0))
        self.renders_otherwise = False

    def tell(self, what: str, engine_request_ids: tuple[str, ...]) -> None:
        """A reader: `heartbeat`, or `read`: the KV caches are needed no more."""
        self.mailbox.append((what, engine_request_ids))
        self.has_news = True

    def will_free(self, engine_request_id: str) -> bool:
        return any(what == "read" and engine_request_id in ids for what, ids in self.mailbox)

    # ---- the engine ------------------------------------------------------------------------------
    def step(self) -> None:
        mailbox, self.mailbox = self.mailbox, []
        for what, engine_request_ids in mailbox:
            if what == "heartbeat":
                self.owner.on_heartbeat(engine_request_ids)
                continue
            for each in engine_request_ids:
                if self.owner.leases.pop(each, None) is not None:  # else: another's may have been read
                    self.pages.free(each)
        for each in self.owner.take_expired():
            self.pages.free(each)
        super().step()

    @property
    def num_free_kv_blocks(self) -> int:
        kept = sum(
            len(self.pages.contents[page])
            for page, owner in self.pages.owners.items()
            if owner in self.owner.leases
        )
        return super().num_free_kv_blocks - kept

    def take_blocks(self, each: Running) -> None:
        self.pages.take(each.engine_request_id, tuple(each.request.prompt_token_ids or ()))

    def free_blocks(self, engine_request_id: str) -> None:
        if engine_request_id not in self.owner.leases:
            self.pages.free(engine_request_id)

    def _on_first_token(self, each: Running) -> None:
        if not self.is_prefill:
            super()._on_first_token(each)
            return
        page = self.pages.page_of(each.engine_request_id)
        assert page is not None
        _, params = self.owner.request_finished(each.request, page)
        self._send(each, "prefilled", params)
        self._finish(each.engine_request_id)

    def next_timer(self, *, with_upkeep: bool = True) -> float | None:
        both = super().next_timer(with_upkeep=with_upkeep), self.next_lease_end
        return min((when for when in both if when is not None), default=None)

    @property
    def next_lease_end(self) -> float | None:
        return min(self.owner.leases.values(), default=None)

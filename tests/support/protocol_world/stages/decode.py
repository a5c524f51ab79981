"""An instance that decodes: the real `KvRefusals` and `KvLeases`; vLLM's scheduler and NIXL are played.

A read goes on between its engine's steps: it takes what lies in the owner's blocks at that moment, and tells
the owner that it is done. Whether that was in time is known at the engine's next step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.protocol_world.network import Network
from tests.support.protocol_world.stages.kv_pages import EXTENSION_S, HEARTBEAT_S
from tests.support.protocol_world.stages.prefill import StageConsumer
from tests.support.protocol_world.stages.prompts import prompt_of
from tests.support.protocol_world.virtual_loop import CLOCK
from tests.support.vllm_connector.fake_engine import FakeFeature
from triptych_vllm_connector.scheduler.kv_refusals import KvRefusals
from triptych_vllm_connector.worker.kv.leases import KvLeases, KvName

Find = Callable[[str], StageConsumer | None]  # a living owner, by its engine id


@dataclass
class Decoding:
    """One request in vLLM's hands."""

    gateway: str
    request_id: str
    attempt: int
    tokens: tuple[int, ...]
    features: list[FakeFeature]
    params: dict[str, Any] | None
    state: str = "waiting"  # then `reading`, where it reads, and `running`
    computed: tuple[int, ...] | None = None  # the tokens that its KV blocks are of
    is_broken: bool = False  # the read has failed
    is_first: bool = False  # no request has named its KV cache before, so that it is this one's to end
    is_lost: bool = False  # whatever it named was not read, and its owner is not told
    has_begun: bool = False

    @property
    def engine_request_id(self) -> str:
        return f"{self.request_id}-{self.attempt}"

    @property
    def asks(self) -> bool:
        """vLLM's connector would read what it names, or have it freed."""
        return bool(self.params and self.params["do_remote_prefill"])

    @property
    def name(self) -> KvName:
        assert self.params is not None
        return self.params["remote_engine_id"], self.params["remote_request_id"]


class DecodeActor:
    """One of them. `sessions`: with the store, none."""

    sessions: tuple[Any, ...] = ()

    def __init__(self, name: str, network: Network, find_owner: Find) -> None:
        self.name = name
        self._network = network
        self._find_owner = find_owner
        self.num_lives = 0
        self.is_up = False
        self.start()

    def start(self) -> None:
        self.num_lives += 1
        self.is_up, self.must_end, self.has_news, self.is_draining = True, False, False, False
        self.renders_otherwise = False
        self.refusals = KvRefusals()
        self.leases = KvLeases(EXTENSION_S)
        self.beat_at = float("-inf")
        self.live: dict[str, Decoding] = {}  # by engine request id
        self.aborted: dict[str, Decoding] = {}  # what they read is waited for
        self.held: dict[tuple[int, ...], tuple[int, ...]] = {}  # prefix cache: what lies there, by prompt
        self.named: set[KvName] = set()  # by its requests
        self.done_with: set[KvName] = set()  # that it has read, or will not: their owners are to free them

    @property
    def boot_id(self) -> str:
        return f"{self.name}/{self.num_lives}"

    def crash(self) -> None:
        self.is_up = False
        broken = [(each.gateway, each.request_id, each.attempt) for each in self.live.values()]
        for way in self._network.ways_to(self.name):
            broken += [
                (way[0], frame[1], frame[2]) for frame in self._network.drop(way) if frame[0] != "abort"
            ]
        for gateway, request_id, attempt in broken:
            self._network.send((self.name, gateway, "http"), ("broken", request_id, attempt))

    # ---- what others do --------------------------------------------------------------------------
    def hear_http(self, gateway: str, frame: tuple[str, str, int, Any]) -> None:
        what, request_id, attempt, body = frame
        if what == "abort":
            each = self.live.get(f"{request_id}-{attempt}")
            if each is not None:
                self._end(each)
            return
        if self.is_draining:
            self._network.send((self.name, gateway, "http"), ("draining", request_id, attempt))
            return
        prompt = prompt_of(body)
        tokens = prompt.tokens(attempt if self.renders_otherwise else 0)
        self.renders_otherwise = False
        each = Decoding(gateway, request_id, attempt, tokens, prompt.features(), prompt.kv_transfer_params)
        while each.engine_request_id in self.live:  # vLLM's own ids differ
            each.attempt += 100
        self.live[each.engine_request_id] = each
        each.is_first = each.asks and each.name not in self.named
        if each.asks:
            self.named.add(each.name)
        self.refusals.on_added(each.engine_request_id, each.params, each.tokens)
        self.has_news = True

    def drain(self) -> None:
        self.is_draining = True
        self.must_end = not self.live

    @property
    def reading(self) -> list[Decoding]:
        """The transfers that go on."""
        both = [*self.live.values(), *self.aborted.values()]
        return [each for each in both if each.state == "reading" and not self._is_over(each)]

    @staticmethod
    def _is_over(each: Decoding) -> bool:
        return each.computed is not None or each.is_broken

    def read(self, engine_request_id: str) -> None:
        """NIXL: what lies in the owner's blocks now."""
        each = self.live.get(engine_request_id) or self.aborted[engine_request_id]
        owner = self._find_owner(each.name[0])
        if owner is None or each.params is None:
            each.is_broken = True
        else:
            (page,) = each.params["remote_block_ids"]
            each.computed = owner.pages.contents[page]
            self._tell(each)
            self.done_with.add(each.name)
        self.has_news = True
        self.aborted.pop(engine_request_id, None)

    def lose_read(self, engine_request_id: str) -> None:
        """The transfer breaks off: the owner is told nothing."""
        self.live[engine_request_id].is_broken = True
        self.has_news = True

    def _tell(self, each: Decoding) -> None:
        """The owner may free what it names."""
        owner = self._find_owner(each.name[0])
        if owner is not None:
            owner.tell("read", (each.name[1],))

    # ---- the engine ------------------------------------------------------------------------------
    @property
    def can_step(self) -> bool:
        return self.is_up and self.has_news

    def step(self) -> None:
        self.has_news = False
        self._beat()
        for each in list(self.live.values()):
            if each.state == "running":
                self._decode(each)
        for each in list(self.live.values()):
            if each.state == "waiting":
                self._schedule(each)
            elif each.state == "reading" and self._is_over(each):
                self._end_read(each)
        self.has_news |= any(each.state == "running" for each in self.live.values())

    def _beat(self) -> None:
        names = [each.name for each in self.live.values() if each.asks or each.state == "reading"]
        if not names or CLOCK.now - self.beat_at < HEARTBEAT_S:
            return
        self.beat_at = CLOCK.now
        self.leases.on_heartbeats(names, CLOCK.now)
        for engine_id in dict.fromkeys(name[0] for name in names):
            owner = self._find_owner(engine_id)
            if owner is not None:
                owner.tell("heartbeat", tuple(name[1] for name in names if name[0] == engine_id))

    def _schedule(self, each: Decoding) -> None:
        covered = len(each.tokens) if each.asks else self._num_held(each.tokens)
        failure = self.refusals.check(each.engine_request_id, each.features, covered, len(each.tokens))
        if failure is not None:
            self._refuse(each)
        elif not each.asks:
            self._check_items(each, covered)
            each.state = "running"
            each.computed = self._held(each.tokens)[:covered] + each.tokens[covered:]
        elif self._is_late(each):
            self._fail_read(each)
        else:
            assert each.params is not None
            each.params["do_remote_prefill"] = False  # as vLLM's connector notes that it reads
            each.state = "reading"

    def _check_items(self, each: Decoding, covered: int) -> None:
        for feature in each.features:
            position = feature.mm_position
            assert position.offset + 1 + position.num_embeds <= covered, (
                "computes an item, and has no encoder"
            )

    def _is_late(self, each: Decoding) -> bool:
        assert each.params is not None
        return self.leases.is_over(each.name, each.params.get("remote_blocks_expiry_time"), CLOCK.now)

    def _end_read(self, each: Decoding) -> None:
        if each.is_broken or self._is_late(each):
            self._fail_read(each)
        else:
            each.state = "running"

    def _fail_read(self, each: Decoding) -> None:
        self.refusals.on_load_failed([each.engine_request_id])
        assert each.params is not None
        each.params["do_remote_prefill"] = False  # its worker has had it: nothing is told to the owner
        each.is_lost = True
        self._refuse(each)

    def _refuse(self, each: Decoding) -> None:
        failure = self.refusals.take(each.engine_request_id)
        assert failure is not None
        self._send(each, "refused", failure.value)
        self._end(each)

    def _decode(self, each: Decoding) -> None:
        assert each.computed == each.tokens, "answered from the KV cache of another prompt"
        if not each.has_begun:
            each.has_begun = True
            self.held[each.tokens] = each.computed
            self._send(each, "first")
        else:
            self._send(each, "answer")
            self._end(each)

    def _end(self, each: Decoding) -> None:
        """Finished, refused or aborted. vLLM has the owner free what was not read, and waits for a read."""
        del self.live[each.engine_request_id]
        self.refusals.take(each.engine_request_id)
        is_reading = each.state == "reading" and not self._is_over(each)
        if each.is_first and not each.is_lost and not each.is_broken and not is_reading:
            self.done_with.add(each.name)
        if each.asks:
            self._tell(each)
        elif is_reading:
            self.aborted[each.engine_request_id] = each
        self.must_end |= self.is_draining and not self.live
        self.has_news = True

    def _send(self, each: Decoding, what: str, *more: Any) -> None:
        way = (self.name, each.gateway, "http")
        self._network.send(way, (what, each.request_id, each.attempt % 100, *more))

    # ---- the prefix cache ------------------------------------------------------------------------
    def _held(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """What lies there of the longest beginning of a prompt."""
        best: tuple[int, ...] = ()
        for prompt, computed in self.held.items():
            num = next((i for i, (a, b) in enumerate(zip(prompt, tokens, strict=False)) if a != b), None)
            num = min(len(prompt), len(tokens)) if num is None else num
            best = max(best, computed[:num], key=len)
        return best

    def _num_held(self, tokens: tuple[int, ...]) -> int:
        return min(len(self._held(tokens)), len(tokens) - 1)

    # ---- time ------------------------------------------------------------------------------------
    def next_timer(self, *, with_upkeep: bool = True) -> float | None:
        """When it is to be told that a KV cache is still waited for."""
        if not with_upkeep or not self.is_up:
            return None
        return (
            self.beat_at + HEARTBEAT_S
            if any(e.asks or e.state == "reading" for e in self.live.values())
            else None
        )

    def run_due(self) -> None:
        when = self.next_timer()
        if when is not None and when <= CLOCK.now:
            self.has_news = True

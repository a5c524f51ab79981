"""EncodeDecisions: gather facts for each decision, hand out estimates, and learn from their outcome."""

import asyncio
import time
from collections.abc import Set
from dataclasses import dataclass, replace

from cachetools import LRUCache

from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import EncodeCompleted, InstanceRecord, Message, Modality, Role
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.decision.decision_policy import (
    DecisionFacts,
    DecisionMode,
    DecisionReason,
    EncodeDecision,
    EncodeOverride,
    EncodeWay,
    cannot_encode_here,
)
from triptych_gateway.decision.instance_load import InstanceLoad, LocalRoom
from triptych_gateway.decision.namespace_decisions import Answering, LearnedAnswering, NamespaceDecisions
from triptych_gateway.decision.prediction import (
    CostEstimate,
    CostKind,
    Demand,
    EncoderQueue,
    Load,
    text_tokens,
)
from triptych_gateway.decision.prefixes import LocalPrefixes
from triptych_gateway.decision.redis_reads import EncoderReturn, SharedQueue
from triptych_gateway.encode.encode_orders import EncodeOrders
from triptych_gateway.encode.item_wait import ItemWait
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.request.item_checks import check_counts
from triptych_gateway.request.media import TakenItem
from triptych_gateway.routing.instances import incarnation_of
from triptych_gateway.routing.pairs import towers_of, widest_limits
from triptych_gateway.routing.registry_view import RegistryView
from triptych_gateway.routing.router import Router, shares_compute
from triptych_gateway.tracing import attributes

log = get_logger(__name__)

MAX_NAMESPACES = 64


@dataclass(frozen=True, slots=True)
class DecidedRequest:
    """Decision for a request, and the instance that it goes to first."""

    decision: EncodeDecision
    instance: InstanceRecord
    estimate: CostEstimate
    figures: dict[str, float | int | bool]  # that it was made from, for the trace


class EncodeDecisions:
    def __init__(
        self,
        *,
        mode: DecisionMode,
        override: EncodeOverride,
        view: RegistryView,
        router: Router,
        orders: EncodeOrders,
        encoder_return: EncoderReturn,
        shared_queue: SharedQueue,
        metrics: GatewayMetrics,
    ) -> None:
        self._mode: DecisionMode = mode
        self.override = override
        self._learns = mode == "auto" or override.is_possible  # what both ways take
        self._view = view
        self._router = router
        self._orders = orders
        self._encoder_return = encoder_return
        self._shared_queue = shared_queue
        self._metrics = metrics
        self._namespaces: LRUCache[str, NamespaceDecisions] = LRUCache(MAX_NAMESPACES)
        self._prefixes = LocalPrefixes()
        self.load = InstanceLoad()
        self._room = LocalRoom()

    def namespace(self, digest: str) -> NamespaceDecisions:
        known: NamespaceDecisions | None = self._namespaces.get(digest)
        if known is None:
            known = self._namespaces[digest] = NamespaceDecisions(self._mode)
        return known

    # ---- a request's side ------------------------------------------------------------------------
    async def decide(
        self,
        request: ChatRequest,
        item_wait: ItemWait,
        chosen: InstanceRecord,
        asked: DecisionMode | None = None,
        only: Set[str] | None = None,
    ) -> DecidedRequest:
        """Decide which process encodes the media of `request`, whose wait is open and without orders.

        Where it waits for room at its instance, it is decided anew when there is some: texts may be computed
        there by then.

        Args:
            chosen: instance that gets it if encoders encode.
            asked: the request's own choice.
            only: instances that may get it; None: all of its namespace.

        Raises:
            RequestError: 400, it asks for what cannot be, or for media that no instance takes; 503, there was
                no room before its deadline.
        """
        decided = await self._decide(request, item_wait, chosen, asked, only)
        while decided.decision.needs_room:
            instance = decided.instance.instance
            must_wait = self._room.is_full(instance)
            place = await self._room.take_place(instance, item_wait.fair_key, item_wait.deadline)
            if must_wait:
                decided = await self._decide(request, item_wait, chosen, asked, only)
            if decided.decision.needs_room and decided.instance.instance == instance:
                prediction = decided.decision.prediction
                if not request.stream and prediction is not None:
                    # Its first token shows with its last one: a place until then would hold up the others.
                    asyncio.get_running_loop().call_later(prediction.local_s, place.leave)
                decided = replace(decided, estimate=replace(decided.estimate, place=place))
                break
            place.leave()
        return self._counted(decided)

    async def _decide(
        self,
        request: ChatRequest,
        item_wait: ItemWait,
        chosen: InstanceRecord,
        asked: DecisionMode | None,
        only: Set[str] | None,
    ) -> DecidedRequest:
        digest = item_wait.namespace_digest
        namespace, now = self.namespace(digest), time.monotonic()
        unknown = {each for each in item_wait.mm_hashes if each not in item_wait.sizes}
        new = {each for each in unknown if not self._is_in_flight(each)}
        found = self._prefixes.find(request, item_wait.items) if self._learns else None
        life, num_items_here = found if found is not None else (None, 0)
        target = self._tower(request.model, digest, item_wait.modalities, chosen, life, only)
        if target is None or incarnation_of(target) != life:
            num_items_here = 0
        has_encoder = self._view.has_encoder(digest)
        encoder_may_return = has_encoder or await self._encoder_return.may_return(digest)
        if not encoder_may_return:
            able = towers_of(self._records(only), request.model, digest, frozenset())
            check_counts((item.part for item in item_wait.items), widest_limits(able))
        is_shared = target is not None and shares_compute(target, self._encoders_of(digest))
        facts = DecisionFacts(
            num_items=len(item_wait.items),
            num_new_items=len(new),
            num_unknown_items=len(unknown),
            has_tower=target is not None,
            needs_encoder=any(item.needs_encoder for item in item_wait.items),
            is_predictable=item_wait.modalities <= {Modality.IMAGE},
            has_encoder=has_encoder,
            encoder_may_return=encoder_may_return,
            is_stream=request.stream,
            is_idle=target is not None
            and self.load.is_idle(target.instance)
            and not self._room.num_requests(target.instance)
            # Where compute is shared, of those that came at once none is alone.
            and not (is_shared and self._num_requests_with_media() > 1),
            shares_compute=is_shared,
            shares_cores=is_shared
            and target is not None
            and target.compute is not None
            and target.compute.gpu is None,
            is_covered=num_items_here == len(item_wait.items),
        )
        if asked == "local" and (not facts.has_tower or facts.needs_encoder):
            raise cannot_encode_here()
        num_tokens = text_tokens(request.num_prompt_bytes)
        decision = namespace.policy.rule(facts, asked)
        if decision is not None and not decision.is_local:
            estimate = CostEstimate(CostKind.REMOTE, now)
            if decision.reason is DecisionReason.SIZES_KNOWN:
                estimate = namespace.text_estimate(CostKind.SIZES_KNOWN, num_tokens, now)
            return _decided(decision, chosen, estimate, facts)
        first = target or chosen
        if decision is not None and not facts.is_predictable:
            return _decided(decision, first, CostEstimate(CostKind.LOCAL, now), facts)
        demand = self._demand(namespace, item_wait, new, num_tokens, num_items_here)
        load: Load | None = None
        if decision is None:
            load = await self._load_before(item_wait, new, chosen, first, now)
            decision = namespace.decide(facts, load, demand, now)
        estimate = namespace.estimate(decision, demand, now)
        return _decided(decision, first if decision.is_local else chosen, estimate, facts, demand, load)

    def settle(self, instance: InstanceRecord, *, is_local: bool) -> DecidedRequest:
        """Return the fixed decision for a request that continues a response of `instance`."""
        kind = CostKind.LOCAL if is_local else CostKind.REMOTE
        way = EncodeWay.LOCAL if is_local else EncodeWay.REMOTE
        decision = EncodeDecision(way, DecisionReason.STORED_RESPONSE)
        return self._counted(_decided(decision, instance, CostEstimate(kind, time.monotonic())))

    def on_sizes(self, item_wait: ItemWait) -> None:
        costs = self.namespace(item_wait.namespace_digest).costs
        for item in item_wait.items:
            if item.mm_hash in item_wait.sizes and item.image is not None:
                costs.on_sizes(_num_pixels(item), item_wait.sizes[item.mm_hash].num_embeds)

    def on_encoded_here(self, request: ChatRequest, item_wait: ItemWait, record: InstanceRecord) -> None:
        """Record that the instance of `record` encoded the request's media and answered."""
        if not self._learns:
            return
        self._prefixes.remember(request, item_wait.items, incarnation_of(record))

    def begin_request(
        self, record: InstanceRecord, estimate: CostEstimate | None, num_prompt_bytes: int
    ) -> Answering:
        """Begin a request at the instance of `record`; without media, `estimate` is None."""
        if not self._learns:
            return Answering()
        digest = record.namespace_digest
        namespace = None if digest is None else self.namespace(digest)
        if estimate is None:
            estimate = CostEstimate(CostKind.TEXT)
            if namespace is not None:
                num_tokens = text_tokens(num_prompt_bytes)
                estimate = namespace.text_estimate(CostKind.TEXT, num_tokens, time.monotonic())
        return LearnedAnswering(self.load, namespace, record.instance, estimate)

    # ---- encoders' messages ----------------------------------------------------------------------
    def on_encode_result(self, message: Message) -> None:
        """Learn from a result before `EncodeOrders` gets it: afterwards the item's sizes may be gone."""
        if not self._learns or not isinstance(message, EncodeCompleted):
            return
        item = self._orders.table.get(MmHash(message.mm_hash))
        if item is None or item.sizes is None or not item.in_flight:
            return  # unknown, or nothing was encoded: the store had it
        digest = self._orders.namespace_of(item)
        if digest is not None and message.encode_s > 0:  # 0: another encoder made it meanwhile
            is_alone = not any(each.in_flight for each in self._orders.table if each is not item)
            self.namespace(digest).costs.on_completed(
                message.encoder,
                item.sizes.num_embeds,
                message.encode_s,
                time.monotonic(),
                item.ordered_at if is_alone else None,
            )

    # ---- parts -----------------------------------------------------------------------------------
    def _counted(self, decided: DecidedRequest) -> DecidedRequest:
        decision = decided.decision
        self._metrics.encode_decisions.labels(decision.way.value, decision.reason.value).inc()
        return decided

    def _is_in_flight(self, mm_hash: MmHash) -> bool:
        item = self._orders.table.get(mm_hash)
        return item is not None and item.in_flight

    def _num_requests_with_media(self) -> int:
        return len({each for item in self._orders.table for each in item.request_ids})

    def _encoders_of(self, digest: str) -> list[InstanceRecord]:
        return [record for record in self._view.encoding if record.namespace_digest == digest]

    def _records(self, only: Set[str] | None) -> tuple[InstanceRecord, ...]:
        records = self._view.records
        return records if only is None else tuple(each for each in records if each.instance in only)

    def _tower(
        self,
        model: str,
        digest: str,
        modalities: Set[Modality],
        chosen: InstanceRecord,
        life: tuple[str, str] | None,
        only: Set[str] | None,
    ) -> InstanceRecord | None:
        """Return the instance that would encode: one with the prompt's beginning, `chosen`, or another."""
        able = towers_of(self._records(only), model, digest, modalities)
        if not able:
            return None
        for record in able:
            if incarnation_of(record) == life:
                return record
        if any(record.instance == chosen.instance for record in able):
            return chosen
        return min(able, key=lambda record: self._router.num_in_flight(record.instance))

    async def _load_before(
        self,
        item_wait: ItemWait,
        new: Set[MmHash],
        chosen: InstanceRecord,
        target: InstanceRecord,
        now: float,
    ) -> Load:
        """Return the load before the request: encoders' items, orders ahead of `new`, and transfers."""
        digest, orders = item_wait.namespace_digest, self._orders.queue
        costs = self.namespace(digest).costs
        own = [
            item
            for item in self._orders.table
            if item.mm_hash in orders.window and self._orders.namespace_of(item) == digest
        ]
        num_rows = sum(item.sizes.num_embeds if item.sizes is not None else costs.mean_rows for item in own)
        num_others = 0
        if sum(record.role is Role.GATEWAY for record in self._view.records) > 1:
            num_others = await self._shared_queue.num_others(digest, orders.window.num_jobs(digest))
        ahead = orders.orders_ahead(digest, item_wait.fair_key, item_wait.deadline, len(new))
        num_unseen = num_others + ahead.num_orders
        num_requests = len(set().union(*(item.request_ids for item in own)))
        queue = EncoderQueue(
            num_encoders=len(self._encoders_of(digest)),
            num_items=len(own) + num_unseen,
            num_rows=num_rows + num_unseen * costs.mean_rows,
            num_requests=num_requests + num_others + ahead.num_requests,
        )
        transfers_s = (
            ()
            if chosen.store is None
            else self._orders.flight_requests.predict_transfers(item_wait, new, chosen.store)
        )
        return Load(
            queue,
            self.load.work_ahead(chosen.instance, now),
            self.load.work_ahead(target.instance, now),
            self.load.num_streams(target.instance),
            self.load.num_texts(target.instance),
            self._room.num_held(target.instance),
            tuple(transfers_s),
        )

    def _demand(
        self,
        namespace: NamespaceDecisions,
        item_wait: ItemWait,
        new: set[MmHash],
        num_tokens: float,
        num_items_here: int,
    ) -> Demand:
        costs = namespace.costs
        rows = [
            item_wait.sizes[item.mm_hash].num_embeds
            if item.mm_hash in item_wait.sizes
            else costs.rows_of(_num_pixels(item))
            for item in item_wait.items
        ]
        of_hash = {item.mm_hash: num for item, num in zip(item_wait.items, rows, strict=True)}
        return Demand(
            num_items=len(rows),
            num_rows=sum(rows),
            num_new_items=len(new),
            num_new_rows=sum(of_hash[each] for each in new),
            num_text_tokens=num_tokens,
            num_rows_here=sum(rows[:num_items_here]),
        )


def _decided(
    decision: EncodeDecision,
    instance: InstanceRecord,
    estimate: CostEstimate,
    facts: DecisionFacts | None = None,
    demand: Demand | None = None,
    load: Load | None = None,
) -> DecidedRequest:
    return DecidedRequest(decision, instance, estimate, _figures(decision, facts, demand, load))


def _num_pixels(item: TakenItem) -> int:
    """Return the item's pixels; 0 without an image, whose rows cannot be estimated."""
    return 0 if item.image is None else item.image.width * item.image.height


def _figures(
    decision: EncodeDecision,
    facts: DecisionFacts | None,
    demand: Demand | None = None,
    load: Load | None = None,
) -> dict[str, float | int | bool]:
    """Return the figures by attribute, without those that the decision did not need."""
    found: dict[str, float | int | bool] = {}
    if facts is not None:
        found |= {
            attributes.DECISION_NUM_NEW_ITEMS: facts.num_new_items,
            attributes.DECISION_NUM_UNKNOWN_ITEMS: facts.num_unknown_items,
            attributes.DECISION_HAS_ENCODER: facts.has_encoder,
            attributes.DECISION_HAS_TOWER: facts.has_tower,
            attributes.DECISION_SHARES_COMPUTE: facts.shares_compute,
        }
    if demand is not None:
        found |= {
            attributes.DECISION_NUM_ROWS: demand.num_rows,
            attributes.DECISION_NUM_ROWS_HERE: demand.num_rows_here,
        }
    if load is not None:
        found |= {
            attributes.DECISION_NUM_ENCODERS: load.queue.num_encoders,
            attributes.DECISION_NUM_QUEUED_ITEMS: load.queue.num_items,
            attributes.DECISION_NUM_STREAMS: load.num_streams,
        }
    if decision.prediction is not None:
        found |= {
            attributes.DECISION_QUEUE_S: decision.prediction.queue_s,
            attributes.DECISION_ENCODE_S: decision.prediction.encode_s,
            attributes.DECISION_TRANSFER_S: decision.prediction.transfer_s,
            attributes.DECISION_LOCAL_WORK_S: decision.prediction.local_work_s,
            attributes.DECISION_IS_LOCAL_MEASURED: decision.prediction.is_local_measured,
        }
    return found

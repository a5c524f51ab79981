"""What must hold in a world after every step, and what at its end."""

import itertools
from collections import Counter
from collections.abc import Set as AbstractSet
from typing import Any

from tests.support.protocol_world.config import (
    ERRORS,
    HARMLESS,
    ONCE,
    PROMPT,
    REDIS,
    SLOW,
    Config,
    Enabled,
    Key,
)
from tests.support.protocol_world.consumer import ConsumerActor
from tests.support.protocol_world.encoder import EncoderActor
from tests.support.protocol_world.gateway import ClientRequest, GatewayActor
from tests.support.protocol_world.network import Network
from tests.support.protocol_world.store import StoreActor
from triptych_cache_store.entries.entry_table import EntryState
from triptych_common.protocol.store import EntrySealed, Pinned, PinOrWatch, Unpin
from triptych_vllm_connector.consumer.consumer import PinReply
from triptych_vllm_connector.consumer.item_pins import EngineItemState


class Choices:
    """The part of `World` that lists what can happen."""

    config: Config
    network: Network
    stores: dict[str, StoreActor]
    gateways: dict[str, GatewayActor]
    requests: dict[str, ClientRequest]
    encoders: dict[str, EncoderActor]
    consumers: dict[str, ConsumerActor]
    to_arrive: list[str]
    faults: Counter[str]

    @property
    def engines(self) -> list[EncoderActor | ConsumerActor]:
        return [*self.encoders.values(), *self.consumers.values()]

    def enabled(self) -> list[Enabled]:
        """Every step that can be taken now, faults last."""
        found = [*self._deliveries(), *self._work(), *self._restarts()]
        if not found:
            found = self._time()
        if self.faults.total() < self.config.max_faults:
            found += self._faults(bool(found))
        return [self._coarse(each) for each in found] if self.config.is_coarse else found

    def _coarse(self, each: Enabled) -> Enabled:
        """Return `each` with the actors that its consequences change: the store, perhaps all its clients."""
        if each.key.kind == "deliver" and each.key.how == "metadata":
            return each
        if each.actors <= self.gateways.keys():
            return each._replace(actors=each.actors | {REDIS})
        if each.key.kind in ("encode", "reap", "start", "end", "reconnect") or each.is_fault:
            return each._replace(actors=each.actors | self._everybody())
        is_encoders = bool(each.actors & self.encoders.keys())
        return each._replace(actors=each.actors | ({*self.stores, REDIS} if is_encoders else {*self.stores}))

    def _deliveries(self) -> list[Enabled]:
        found = [
            Enabled(Key("arrive", request_id), frozenset({name}))
            for name, gateway in self.gateways.items()
            for request_id in [each for each in self.to_arrive if self.requests[each].gateway == name][:1]
            if gateway.is_up
        ]
        found += [
            Enabled(Key("redis", name, mm_hash), frozenset({name, REDIS}))
            for name, mm_hash in self._scripts()
        ]
        found += [
            Enabled(Key("deliver", *way), frozenset({way[1]}))
            for way in sorted(self.network.queues)
            if self._moves(way[1])
        ]
        for store in self.stores.values():
            for session_id in store.busy:
                key = Key("command", store.sessions[session_id].client, str(session_id))
                found.append(Enabled(key, frozenset({store.name})))
        found += [
            Enabled(Key("push", session.client), frozenset({engine.name}))
            for engine in self.engines
            for session in engine.sessions
            if session.from_store and self._moves(engine.name)
        ]
        return found

    def _scripts(self) -> list[tuple[str, str]]:
        """(process, item) of all that Redis could run now."""
        users: list[GatewayActor | EncoderActor] = [*self.gateways.values(), *self.encoders.values()]
        return [
            (each.name, mm_hash)
            for each in users
            if self._moves(each.name)
            for mm_hash in sorted(each.redis.scripts)
        ]

    def _work(self) -> list[Enabled]:
        found: list[Enabled] = []
        for encoder in self.encoders.values():
            if not self._moves(encoder.name):
                continue
            actors = frozenset({encoder.name, REDIS})
            takes = encoder.takes()
            if len(encoder.outstanding) < self.config.num_slots:
                takes += [
                    (entry, "takeover")
                    for entry in self.network.jobs.values()
                    if entry.stream == encoder.stream
                    and entry.owner not in (None, encoder.name)
                    and not self._is_renewed(entry.number)
                ]
            found += [
                Enabled(Key("job", encoder.name, str(entry.number), how), actors) for entry, how in takes
            ]
            actors = frozenset({encoder.name})
            found += [Enabled(Key("encode", encoder.name, each), actors) for each in encoder.engine.pending]
        for consumer in self.consumers.values():
            if consumer.can_step:
                found.append(Enabled(Key("step", consumer.name), frozenset({consumer.name})))
        found += [
            Enabled(Key("reap", name), frozenset({name}))
            for name, store in self.stores.items()
            if store.needs_reaping
        ]
        return found

    def _is_renewed(self, number: int) -> bool:
        """A living encoder works on the job."""
        return any(
            self._moves(encoder.name) and number in encoder.outstanding for encoder in self.encoders.values()
        )

    def _restarts(self) -> list[Enabled]:
        found: list[Enabled] = []
        for engine in self.engines:
            store = getattr(engine, "store", None)  # an instance that decodes has none
            both = frozenset({engine.name, *(self.stores if store is None else [store.name])})
            if not engine.is_up:
                found.append(Enabled(Key("start", engine.name), both))
                continue
            if not self._moves(engine.name):
                found.append(Enabled(Key("thaw", engine.name), frozenset({engine.name, REDIS})))
                continue
            found += [
                Enabled(Key("reconnect", session.client), both)
                for session in engine.sessions
                if not session.is_connected and not session.is_over
            ]
            if engine.must_end:
                found.append(Enabled(Key("end", engine.name), frozenset({engine.name, *self.gateways})))
        found += [
            Enabled(Key("start", name), frozenset({name}))
            for name, gateway in self.gateways.items()
            if not gateway.is_up
        ]
        return found

    def _time(self) -> list[Enabled]:
        """Time passes when nothing else can happen."""
        return [Enabled(Key("time"), self._everybody())] if self._next_timer() is not None else []

    def _everybody(self) -> frozenset[str]:
        return frozenset({*self.stores, REDIS, *self.gateways, *self.encoders, *self.consumers})

    def _next_timer(self, *, with_upkeep: bool = True) -> float | None:
        actors: list[GatewayActor | EncoderActor | ConsumerActor] = [*self.gateways.values(), *self.engines]
        times = [each.next_timer(with_upkeep=with_upkeep) for each in actors if self._moves(each.name)]
        return min((when for when in times if when is not None), default=None)

    def _moves(self, name: str) -> bool:
        """Return whether the process runs."""
        if name in self.gateways:
            return self.gateways[name].is_up
        if name in self.encoders:
            return self.encoders[name].is_up and not self.encoders[name].is_frozen
        return self.consumers[name].is_up

    def _faults(self, is_busy: bool) -> list[Enabled]:
        found: list[Enabled] = []

        def add(
            kind: str, actors: AbstractSet[str], subject: str = "", what: str = "", how: str = ""
        ) -> None:
            if kind in self.config.faults:
                found.append(Enabled(Key(kind, subject, what, how), frozenset(actors), is_fault=True))

        for encoder in self.encoders.values():
            if encoder.is_up:
                add("crash_encoder", {encoder.name, REDIS}, encoder.name)
            if self._moves(encoder.name):
                add("freeze_encoder", {encoder.name, REDIS}, encoder.name)
                for each in encoder.engine.pending:
                    add("refuse", {encoder.name}, encoder.name, each)
                    add("unfit", {encoder.name}, encoder.name, each)
        for consumer in self.consumers.values():
            if consumer.is_up:
                add("crash_consumer", {consumer.name, *self.gateways}, consumer.name)
                for engine_request_id in consumer.running:
                    add("preempt", {consumer.name}, consumer.name, engine_request_id)
                if (consumer.waiting or consumer.running) and not consumer.preempts_late:
                    add("preempt_late", {consumer.name}, consumer.name)
                for request_id in self.requests:
                    add("whole", {consumer.name}, consumer.name, request_id)
                if consumer.cached:
                    add("empty_cache", {consumer.name}, consumer.name)
                if consumer.live and not consumer.loses_load:
                    add("lose_load", {consumer.name}, consumer.name)
                for engine_request_id in [*consumer.waiting, *consumer.parked]:
                    add("prefix", {consumer.name}, consumer.name, engine_request_id)
        for name, gateway in self.gateways.items():
            if gateway.is_up:
                add("crash_gateway", {name, REDIS, *self.consumers}, name)
            for request in gateway.open.values():
                add("cancel", {name}, request.request_id)
        for name, store in self.stores.items():
            for session_id in store.busy:
                client = store.sessions[session_id].client
                is_pin = isinstance(store.sessions[session_id].to_store[0], PinOrWatch)
                if is_pin and client.endswith("/engine"):
                    add("refuse_pin", {name}, client, str(session_id))
            add("restart_store", self._everybody(), name)
            add("lose_region", self._everybody(), name)
        if self.network.flights.flights:
            add("lose_flights", {REDIS}, REDIS)
        add("lose_redis", self._everybody(), REDIS)
        for way in sorted(self.network.queues):
            if way[2] != "http":
                add("duplicate", {way[1]}, *way)
                add("lose_message", {way[1]}, *way)
        for name, store in self.stores.items():
            for entry in store.core.table.all_sealed():
                if entry.state is EntryState.READY:
                    add("evict", {name}, name, entry.mm_hash)
        if is_busy and (limit := self._next_timer(with_upkeep=False)) is not None:
            add("hurry", set(self._everybody()), how="limit")
            if self._next_timer() != limit:
                add("hurry", set(self._everybody()))
        return found


class Checks(Choices):
    """The part of `World` that knows right from wrong."""

    hashes: list[str]
    rows: dict[str, int]
    coverage: Counter[str]
    crashed: set[str]
    num_takeovers: int
    num_owned_waits: int
    num_lost_entries: int

    # ---- what always holds -----------------------------------------------------------------------
    def check(self) -> None:
        for consumer in self.consumers.values():
            if consumer.is_up:
                self._check_space(consumer)
                consumer.check_kv_room()
        if all(s.is_connected for engine in self.engines if engine.is_up for s in engine.sessions):
            self._check_pins()

    def check_wanted(self, mm_hash: str) -> None:
        """An encoder begins to work on the item."""
        flight = self.network.flights.find(mm_hash)
        is_wanted = flight is not None and bool(flight.requesters)
        assert is_wanted or self._are_flights_doubtful, "a job without requesters is done"

    @property
    def _are_flights_doubtful(self) -> bool:
        """Redis may keep requesters that do not wait: a dead gateway's, or those of a lost flight.

        And a renewal that comes after the flight was lost and claimed again makes it run for a lease more.
        """
        return bool(
            self.crashed or any(self.faults[each] for each in ("lose_flights", "lose_redis", "hurry"))
        )

    def _check_space(self, consumer: ConsumerActor) -> None:
        items = consumer.consumer._pins
        held = {each for each in self.hashes if items.requests_of(each)}
        admissions = consumer.consumer._requests._admissions
        for admission in admissions.values():
            if admission.is_local:
                held |= {admission.features[place].mm_hash for place in admission.granted}
        used = consumer.preallocator.num_embeds_used
        assert used == sum(self.rows[item] for item in held), "space is not what is held"
        assert consumer.budget is None or used <= consumer.budget, "more space than there is"
        halves = [
            engine_request_id
            for engine_request_id, admission in admissions.items()
            if admission.granted and engine_request_id in consumer.preallocator._pending
        ]
        assert len(halves) <= 1, "two requests hold a part, and wait for the rest"
        for each in self.hashes:
            for engine_request_id in items.requests_of(each):
                assert engine_request_id in consumer.live, "held by no live request"

    def _check_pins(self) -> None:
        """Every pin has one owner: a frame under way, a command to end it, or the process that has it."""
        for store in self.stores.values():
            engines = [each for each in self.engines if getattr(each, "store", None) is store]
            owners = list(itertools.chain.from_iterable(map(self._pins_of, engines)))
            pins = [
                pin_id
                for lease in store.core.leases.all_leases()
                if lease.slot in store._slots and not store._slots[lease.slot].is_over
                for pin_id in lease.pins
            ]
            assert sorted(owners) == sorted(pins), "pins without an owner, or pins that are not there"

    def _pins_of(self, engine: EncoderActor | ConsumerActor) -> list[int]:
        if not engine.is_up:
            return []
        owners = self._under_way(engine)
        if isinstance(engine, EncoderActor):
            known = {pin_id for item in engine.ledger._items.values() for pin_id in item.pin_ids}
            assert known <= engine.host.held, "the ledger has a pin that it was not given"
            with_jobs = engine.host.held - known  # of entries that were sealed before the job's end
            assert len(with_jobs) <= len(engine.outstanding), "pins that neither ledger nor job has"
            return owners + sorted(engine.host.held)
        consumer = engine.consumer
        for event in engine.inbox._events:
            match event:
                case EntrySealed():
                    owners.append(event.pin_id)
                case PinReply(reply=Pinned() as reply):
                    owners.append(reply.pin_id)
        for item in consumer._pins._items.values():
            if item.state is EngineItemState.PINNED and item.pin_id is not None:
                owners.append(item.pin_id)
        owners += [order.pin_id for order in consumer._pins._loads]
        owners += [pin_id for pin_id in engine.views.values() if pin_id]
        return owners

    def _under_way(self, engine: Any) -> list[int]:
        """Pins that it is about to hear of, or to end."""
        if not engine.is_up:
            return []
        owners: list[int] = []
        for session in engine.sessions:
            owners += [each.pin_id for each in session.from_store if isinstance(each, Pinned | EntrySealed)]
            owners += [each.pin_id for each in session.to_store if isinstance(each, Unpin)]
        return owners

    # ---- at the end ------------------------------------------------------------------------------
    def check_quiet(self) -> None:
        """Nothing is left to happen: every requester has its answer, and nothing is held."""
        for request in self.requests.values():
            assert request.outcome is not None, f"{request.request_id} waits for ever"
            allowed = {"answer", *(() if self._is_harmless else self._errors)}
            if self.faults["cancel"]:
                allowed.add("cancelled")
            if request.gateway in self.crashed:
                allowed.add("connection lost")
            assert request.outcome in allowed, f"{request.request_id} ended with {request.outcome}"
        if self._is_prompt:
            # An owner that left before it published is found at the next check.
            assert self.coverage["time"] <= self.num_owned_waits, "a wait had no end but its limit"
        for consumer in self.consumers.values():
            assert not any(consumer.consumer.counts().values()), f"{consumer.name} holds something"
            left = [*consumer.live, *consumer.parked, *consumer.views, *consumer.cached]
            assert not left, f"{consumer.name} has {left}"
        for encoder in self.encoders.values():
            assert not len(encoder.ledger), f"{encoder.name} still waits for acks"
            assert not encoder.loop.tasks, f"a job of {encoder.name} never ends"
            assert not encoder.store_client._pins
        for store in self.stores.values():
            state = store.core.state
            assert not state.leases.num_pins, "the store has a pin"
            assert not state.leases.num_watches, "the store has a watch"
            assert not state.table.num_reservations, "the store has a reservation"
        for gateway in self.gateways.values():
            assert not len(gateway.orders.table), "the gateway waits for an item"
            assert not len(gateway.media_cache), "the gateway keeps media"
            assert not len(gateway.orders.flight_requests), "Redis still has requesters that do not wait"
        assert not self.network.jobs, "a job was never done"
        self._check_flights()
        self._check_encodes()

    @property
    def _errors(self) -> frozenset[str]:
        """What a caller may get in place of an answer."""
        return ERRORS

    @property
    def _is_harmless(self) -> bool:
        """Was nothing lost that could not be made again in time? A failed encode is tried again so often."""
        return self._are_all_of(HARMLESS)

    @property
    def _is_prompt(self) -> bool:
        """Was every failure announced? Then no wait ends by its limit."""
        return self._are_all_of(HARMLESS - SLOW | PROMPT)

    def _are_all_of(self, kinds: frozenset[str]) -> bool:
        num_failed = self.faults["refuse"] + self.faults["unfit"]
        others = self.faults.keys() - kinds - {"refuse", "unfit"}
        return not others and num_failed < self.config.max_attempts and not self.config.is_tight

    def _check_flights(self) -> None:
        """A result may still be there, for requesters that it did not reach; none waits.

        But for those of a gateway that died, and the requesters of a job that came to an encoder after its
        flight had ended, or was lost: they are forgotten in time.
        """
        if self._are_flights_doubtful:
            return
        for mm_hash in self.hashes:
            flight = self.network.flights.find(mm_hash)
            if flight is None:
                continue
            came_late = bool(self.num_takeovers)
            assert not flight.requesters or came_late, "Redis has requesters that do not wait"
            assert flight.state in ("finished", "failed")[: 1 + came_late], f"a flight is left {flight.state}"

    def _check_encodes(self) -> None:
        for each in self.hashes:
            num_encodes = sum(encoder.num_encodes.get(each, 0) for encoder in self.encoders.values())
            num_evictions = sum(store.num_evictions for store in self.stores.values())
            allowed = 1 + self.num_takeovers + num_evictions + self.num_lost_entries
            allowed += self._num_more_encodes(each)
            allowed += sum(num for kind, num in self.faults.items() if kind not in ONCE)
            assert num_encodes <= allowed, f"{num_encodes} encodes of one item"

    def _num_more_encodes(self, mm_hash: str) -> int:
        """For which no fault of `faults` is needed."""
        return 0

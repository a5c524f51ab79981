"""Every step that can be taken in a world now."""

from collections import Counter
from collections.abc import Set as AbstractSet

from tests.support.protocol_world.config import REDIS, Config, Enabled, Key
from tests.support.protocol_world.consumer import ConsumerActor
from tests.support.protocol_world.encoder import EncoderActor
from tests.support.protocol_world.gateway import ClientRequest, GatewayActor
from tests.support.protocol_world.network import Network
from tests.support.protocol_world.store import StoreActor
from triptych_cache_store.entries.entry_table import EntryState
from triptych_common.protocol.store import PinOrWatch


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
        """What follows at once changes the store too, and perhaps all of its clients."""
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
        """Does the process run?"""
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

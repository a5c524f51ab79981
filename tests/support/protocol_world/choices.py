"""Every step that can be taken in a world now."""

from collections import Counter

from support.protocol_world.config import JOBS, Config, Enabled, Key
from support.protocol_world.consumer import ConsumerActor
from support.protocol_world.encoder import EncoderActor
from support.protocol_world.gateway import GatewayActor
from support.protocol_world.network import GATEWAY, STORE, Network
from support.protocol_world.store import StoreActor
from triptych_cache_store.entry_table import EntryState


class Choices:
    """The part of `World` that says what can happen."""

    config: Config
    network: Network
    store: StoreActor
    gateway: GatewayActor
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
        if each.actors <= {GATEWAY} or (each.key[0] == "deliver" and each.key.how == "metadata"):
            return each
        touches_all = each.key.kind in ("encode", "reap", "start", "end", "reconnect") or each.is_fault
        return each._replace(actors=each.actors | (self._everybody() if touches_all else {STORE}))

    def _deliveries(self) -> list[Enabled]:
        found = [
            Enabled(Key("arrive", request_id), frozenset({GATEWAY}))
            for request_id in self.to_arrive[:1]
            if self.gateway.is_up
        ]
        found += [
            Enabled(Key("deliver", *way), frozenset({way[1]}))
            for way in sorted(self.network.queues)
            if self._moves(way[1])
        ]
        for session_id in self.store.busy:
            key = Key("command", self.store.sessions[session_id].client, str(session_id))
            found.append(Enabled(key, frozenset({STORE})))
        found += [
            Enabled(Key("hear", session.client), frozenset({engine.name}))
            for engine in self.engines
            for session in engine.sessions
            if session.from_store and self._moves(engine.name)
        ]
        return found

    def _work(self) -> list[Enabled]:
        found: list[Enabled] = []
        for encoder in self.encoders.values():
            if not self._moves(encoder.name):
                continue
            actors = frozenset({encoder.name, JOBS})
            takes = encoder.takes()
            if len(encoder.outstanding) < self.config.num_slots:
                takes += [
                    (entry, "takeover")
                    for entry in self.network.jobs.values()
                    if entry.owner not in (None, encoder.name) and not self._is_renewed(entry.number)
                ]
            found += [
                Enabled(Key("job", encoder.name, str(entry.number), how), actors) for entry, how in takes
            ]
            actors = frozenset({encoder.name})
            found += [Enabled(Key("encode", encoder.name, each), actors) for each in encoder.engine.pending]
        for consumer in self.consumers.values():
            if consumer.can_step:
                found.append(Enabled(Key("step", consumer.name), frozenset({consumer.name})))
        if self.store.needs_reaping:
            found.append(Enabled(Key("reap", STORE), frozenset({STORE})))
        return found

    def _is_renewed(self, number: int) -> bool:
        """A living encoder works on the job."""
        return any(
            self._moves(encoder.name) and number in encoder.outstanding for encoder in self.encoders.values()
        )

    def _restarts(self) -> list[Enabled]:
        found: list[Enabled] = []
        for engine in self.engines:
            both = frozenset({engine.name, STORE})
            if not engine.is_up:
                found.append(Enabled(Key("start", engine.name), both))
                continue
            if not self._moves(engine.name):
                found.append(Enabled(Key("thaw", engine.name), frozenset({engine.name, JOBS})))
                continue
            found += [
                Enabled(Key("reconnect", session.client), both)
                for session in engine.sessions
                if not session.is_connected and not session.is_over
            ]
            if engine.must_end:
                found.append(Enabled(Key("end", engine.name), frozenset({engine.name, GATEWAY})))
        if not self.gateway.is_up:
            found.append(Enabled(Key("start", GATEWAY), frozenset({GATEWAY})))
        return found

    def _time(self) -> list[Enabled]:
        """Time passes when nothing else can happen."""
        return [Enabled(Key("time"), self._everybody())] if self._next_timer() is not None else []

    def _everybody(self) -> frozenset[str]:
        return frozenset({GATEWAY, STORE, JOBS, *self.encoders, *self.consumers})

    def _next_timer(self) -> float | None:
        moving = [engine for engine in self.engines if self._moves(engine.name)]
        times = [self.gateway.next_timer(), *(engine.next_timer() for engine in moving)]
        return min((when for when in times if when is not None), default=None)

    def _moves(self, name: str) -> bool:
        """Does the process run?"""
        if name == GATEWAY:
            return self.gateway.is_up
        if name in self.encoders:
            return self.encoders[name].is_up and not self.encoders[name].is_frozen
        return self.consumers[name].is_up

    def _faults(self, is_busy: bool) -> list[Enabled]:
        found: list[Enabled] = []

        def add(kind: str, actors: set[str], who: str = "", what: str = "", how: str = "") -> None:
            if kind in self.config.faults:
                found.append(Enabled(Key(kind, who, what, how), frozenset(actors), is_fault=True))

        for encoder in self.encoders.values():
            if encoder.is_up:
                add("crash_encoder", {encoder.name, JOBS}, encoder.name)
            if self._moves(encoder.name):
                add("freeze_encoder", {encoder.name, JOBS}, encoder.name)
                for each in encoder.engine.pending:
                    add("refuse", {encoder.name}, encoder.name, each)
                    add("unfit", {encoder.name}, encoder.name, each)
        for consumer in self.consumers.values():
            if consumer.is_up:
                add("crash_consumer", {consumer.name, GATEWAY}, consumer.name)
                for rid in consumer.running:
                    add("preempt", {consumer.name}, consumer.name, rid)
                if (consumer.waiting or consumer.running) and not consumer.preempts_late:
                    add("preempt_late", {consumer.name}, consumer.name)
                for rid in [*consumer.waiting, *consumer.parked]:
                    add("prefix", {consumer.name}, consumer.name, rid)
        if self.gateway.is_up:
            add("crash_gateway", {GATEWAY, *self.consumers}, GATEWAY)
        add("restart_store", self._everybody(), STORE)
        add("lose_region", self._everybody(), STORE)
        for request in self.gateway.open.values():
            add("cancel", {GATEWAY}, request.request_id)
        for way in sorted(self.network.queues):
            if way[2] != "http":
                add("duplicate", {way[1]}, *way)
                add("lose_message", {way[1]}, *way)
        for entry in self.store.core.table.all_sealed():
            if entry.state is EntryState.READY:
                add("evict", {STORE}, STORE, entry.mm_hash)
        if is_busy and self._next_timer() is not None:
            add("hurry", set(self._everybody()))
        return found

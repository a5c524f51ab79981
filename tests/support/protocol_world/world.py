"""The world: gateway, encoders, prefill_decodes and the store, and every step that one of them can take.

`enabled` lists the steps that can be taken now, `take` takes one, `check` has what must always hold, and
`check_quiet` what must hold when nothing is left to happen. The same steps from the same start lead to the
same state.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.support.flight_model import OVER
from tests.support.protocol_steps import Channel
from tests.support.protocol_world.checks import Checks
from tests.support.protocol_world.config import ALL_FAULTS, Config, Key
from tests.support.protocol_world.consumer import ConsumerActor, EngineDiedError
from tests.support.protocol_world.encoder import EncoderActor
from tests.support.protocol_world.gateway import ClientRequest, GatewayActor
from tests.support.protocol_world.network import STORE, Network, Way, step_of
from tests.support.protocol_world.store import ClientSession, StoreActor
from tests.support.protocol_world.virtual_loop import CLOCK
from tests.support.vllm_connector.fake_engine import mm_hash
from triptych_common.protocol.store import Unpin
from triptych_vllm_connector.consumer.consumer import BusChanged


class World(Checks):
    """See the module docstring. Only one world lives at a time: they share the clock."""

    def __init__(self, config: Config) -> None:
        CLOCK.reset()
        self.config = config
        self.coverage: Counter[str] = Counter()
        self.hashes = [mm_hash(index + 1) for index in range(len(config.rows))]
        self.rows = dict(zip(self.hashes, config.rows, strict=True))
        self.network = Network(CLOCK.monotonic)
        self.stores = self._new_stores()
        self.store = next(iter(self.stores.values()))
        self.encoders = {
            name: EncoderActor(
                name, self.network, self._store_at(config.encoders_at, index), self.rows, config.num_slots
            )
            for index, name in enumerate(f"encoder-{index}" for index in range(config.num_encoders))
        }
        self.consumers = self._new_consumers()
        self.gateways = self._new_gateways()
        self.requests = {
            f"req-{index}": self._request(index, items) for index, items in enumerate(config.requests)
        }
        self.to_arrive = list(self.requests)
        self.faults: Counter[str] = Counter()
        self.crashed: set[str] = set()  # gateways that were ever
        self.num_takeovers = 0
        self.num_owned_waits = 0  # times that nothing could happen until the wait's owner looked again
        self.num_lost_entries = 0
        self.path: list[Key] = []  # steps that were taken
        self.last_actor = ""

    def _new_stores(self) -> dict[str, StoreActor]:
        config = self.config
        return {STORE: StoreActor(config.num_blocks, config.num_reserve_blocks, self.hashes, self.coverage)}

    def _store_at(self, places: tuple[int, ...], index: int) -> StoreActor:
        return list(self.stores.values())[places[index]] if places else self.store

    def _new_consumers(self) -> dict[str, ConsumerActor]:
        names = [f"pd-{index}" for index in range(self.config.num_consumers)]
        return {
            name: ConsumerActor(
                name, self.network, self._store_at(self.config.consumers_at, index), self.config
            )
            for index, name in enumerate(names)
        }

    def _new_gateways(self) -> dict[str, GatewayActor]:
        names = [f"gateway-{index}" for index in range(self.config.num_gateways)]
        return {
            name: GatewayActor(
                name, self.network, lambda name: self.consumers[name].is_up, self.config.max_attempts
            )
            for name in names
        }

    def _request(self, index: int, items: tuple[int, ...]) -> ClientRequest:
        names = list(self.consumers)
        start = 0 if self.config.shares_consumer else index % len(names)
        hashes = tuple(self.hashes[item] for item in items)
        gateway = list(self.gateways)[index % len(self.gateways)]
        return ClientRequest(f"req-{index}", gateway, hashes, (*names[start:], *names[:start]))

    def close(self) -> None:
        """End all coroutines."""
        for encoder in self.encoders.values():
            encoder.crash()
        for gateway in self.gateways.values():
            gateway.crash()

    # ---- taking a step ---------------------------------------------------------------------------
    def take(self, key: Key) -> None:
        """Take a step that is enabled."""
        self.coverage[key.kind] += 1
        self.path.append(key)
        if key.kind in ALL_FAULTS:
            self.faults[key.kind] += 1
        getattr(self, f"_do_{key.kind}")(key)
        if self.config.is_coarse:
            self._settle()

    def _settle(self) -> None:
        """Coarse: the store serves encoders and unpins at once, its clients receive at once. So does Redis.

        What is left to be delayed are the messages on the streams and HTTP, what consumers ask the store
        for, and the engines' steps.
        """
        moved = True
        while moved:
            moved = False
            for store in self.stores.values():
                for session_id in store.busy:
                    session = store.sessions[session_id]
                    if session.client.startswith("encoder") or isinstance(session.to_store[0], Unpin | None):
                        store.run_next(session_id)
                        moved = True
            for name, item in self._scripts():
                self._run_script(name, item)
                moved = True
            for engine in self.engines:
                for session in engine.sessions:
                    while session.from_store and self._moves(engine.name):
                        self._do_push(Key("push", session.client))
                        moved = True

    def _do_arrive(self, key: Key) -> None:
        self.coverage["request"] += 1
        self.to_arrive.remove(key.subject)
        request = self.requests[key.subject]
        self.gateways[request.gateway].arrive(request)

    def _do_deliver(self, key: Key) -> None:
        self._deliver((key.subject, key.what, key.how), self.network.take((key.subject, key.what, key.how)))

    def _deliver(self, way: Way, message: Any) -> None:
        sender, receiver, kind = way
        if kind == "http":
            self.coverage[self._http_step(way, message[0])] += 1
            if receiver in self.gateways:
                self.gateways[receiver].receive_frame(message)
            else:
                self._instance(receiver).hear_http(sender, message)
            return
        self.coverage[step_of(Channel.STREAM, sender, receiver, message)] += 1
        if receiver in self.gateways:
            self.gateways[receiver].receive_result(message)
        else:
            (self.encoders.get(receiver) or self.consumers[receiver]).receive(message)

    def _do_command(self, key: Key) -> None:
        self._store_of(key.subject).run_next(int(key.what))  # type: ignore[arg-type]

    def _do_redis(self, key: Key) -> None:
        self._run_script(key.subject, key.what)

    def _run_script(self, name: str, mm_hash: str) -> None:
        talker = self.gateways.get(name) or self.encoders[name]
        outcome = talker.redis.run_next(mm_hash)
        self.coverage[outcome] += 1
        if outcome == "start, started":
            self.check_wanted(mm_hash)

    def _do_push(self, key: Key) -> None:
        session = self._session(key.subject)
        self._in_process(key.subject, session.receive_push)

    def _in_process(self, client: str, action: Callable[[], None]) -> None:
        """As the process of that client does it: in its event loop, if it has one."""
        loop = getattr(self._engine(client.split("/")[0]), "loop", None)
        if loop is None:
            action()
        else:
            loop.run(action)

    def _do_job(self, key: Key) -> None:
        if key.how == "takeover":
            self.num_takeovers += 1
        if key.how == "own":
            self.num_takeovers += 1  # from itself, as it was before its restart
        self.coverage[f"job, {key.how}"] += 1
        entry = self.network.jobs[int(key.what)]
        self.coverage[step_of(Channel.STREAM, "gateway-0", key.subject, entry.message)] += 1
        self.encoders[key.subject].take(entry)

    def _do_encode(self, key: Key) -> None:
        self.encoders[key.subject].encode(key.what)

    def _do_step(self, key: Key) -> None:
        try:
            self.consumers[key.subject].step()
        except EngineDiedError:
            self.consumers[key.subject].must_end = True

    def _do_reap(self, key: Key) -> None:
        self.stores[key.subject].reap()

    def _do_start(self, key: Key) -> None:
        (self.gateways.get(key.subject) or self._engine(key.subject)).start()

    def _do_end(self, key: Key) -> None:
        self._engine(key.subject).crash()

    def _do_reconnect(self, key: Key) -> None:
        session = self._session(key.subject)
        self._in_process(key.subject, lambda: self._store_of(key.subject).connect(session))

    def _do_time(self, key: Key) -> None:
        flights = self.network.flights.flights.values()
        is_claim = any(each.state == "claimed" and each.until == OVER for each in flights)
        self.num_owned_waits += is_claim or self._asks_again(self._next_timer())
        self._pass_time(self._next_timer())

    def _asks_again(self, when: float | None) -> bool:
        """The store was full, and an encoder asks it again then."""
        waiting = {client.split("/")[0] for store in self.stores.values() for client, _ in store.waiting}
        return any(
            name in waiting and encoder.next_timer() == when for name, encoder in self.encoders.items()
        )

    def _pass_time(self, when: float | None) -> None:
        assert when is not None
        CLOCK.now = max(when, CLOCK.now)
        for gateway in self.gateways.values():
            gateway.run_due()
        for engine in self.engines:
            if self._moves(engine.name):
                engine.run_due()

    # ---- faults ----------------------------------------------------------------------------------
    def _do_hurry(self, key: Key) -> None:
        """A party was so slow that a time ran out first: one until a check, or a limit."""
        self._pass_time(self._next_timer(with_upkeep=key.how != "limit"))

    def _do_crash_encoder(self, key: Key) -> None:
        self.encoders[key.subject].crash()

    def _do_freeze_encoder(self, key: Key) -> None:
        """It stands still, and its jobs are not renewed; its kernel keeps its connections."""
        self.encoders[key.subject].is_frozen = True

    def _do_thaw(self, key: Key) -> None:
        self.encoders[key.subject].is_frozen = False

    def _do_crash_consumer(self, key: Key) -> None:
        self.consumers[key.subject].crash()

    def _do_crash_gateway(self, key: Key) -> None:
        for consumer in self.consumers:
            self.network.drop((consumer, key.subject, "http"))
        self.gateways[key.subject].crash()
        self.crashed.add(key.subject)

    def _do_restart_store(self, key: Key) -> None:
        self.stores[key.subject].restart(keeps_region=True)

    def _do_lose_region(self, key: Key) -> None:
        store = self.stores[key.subject]
        self.num_lost_entries += store.core.table.num_entries
        store.restart(keeps_region=False)

    def _do_cancel(self, key: Key) -> None:
        self.coverage["disconnect"] += 1
        request = self.requests[key.subject]
        self.gateways[request.gateway].cancel(request)

    def _do_lose_flights(self, key: Key) -> None:
        """Redis keeps the streams, and forgets the requesters: its memory was short, or a replica's."""
        self.network.flights.flights.clear()

    def _do_lose_redis(self, key: Key) -> None:
        """Restarted, without data. All its clients notice it."""
        self.network.lose_redis()
        for gateway in self.gateways.values():
            if gateway.is_up:
                gateway.loop.run(gateway.orders.check_all)
        for consumer in self.consumers.values():
            if consumer.is_up:
                consumer.inbox.post_event(BusChanged())

    def _do_duplicate(self, key: Key) -> None:
        way = (key.subject, key.what, key.how)
        self._deliver(way, self.network.peek(way))

    def _do_lose_message(self, key: Key) -> None:
        self.network.take((key.subject, key.what, key.how))

    def _do_refuse(self, key: Key) -> None:
        self.encoders[key.subject].encode(key.what, "refused")

    def _do_unfit(self, key: Key) -> None:
        self.encoders[key.subject].encode(key.what, "unfit")

    def _do_refuse_pin(self, key: Key) -> None:
        self._store_of(key.subject).refuse(int(key.what))  # type: ignore[arg-type]

    def _do_preempt(self, key: Key) -> None:
        self.consumers[key.subject].preempt(key.what)

    def _do_preempt_late(self, key: Key) -> None:
        self.consumers[key.subject].preempts_late = True

    def _do_lose_load(self, key: Key) -> None:
        self.consumers[key.subject].loses_load = True

    def _do_whole(self, key: Key) -> None:
        """A request with the media of another one comes straight to the instance, which has a tower."""
        rows = [(each, self.rows[each]) for each in self.requests[key.what].hashes]
        self.consumers[key.subject].add_whole(rows)

    def _do_empty_cache(self, key: Key) -> None:
        self.consumers[key.subject].empty_cache()

    def _do_prefix(self, key: Key) -> None:
        self.consumers[key.subject].change_prefix(key.what)

    def _do_evict(self, key: Key) -> None:
        self.stores[key.subject].evict(key.what)

    def _engine(self, name: str) -> EncoderActor | ConsumerActor:
        return self.encoders.get(name) or self.consumers[name]

    def _store_of(self, client: str) -> StoreActor:
        """That the client has a session with."""
        return self._engine(client.split("/")[0]).store

    def _session(self, client: str) -> ClientSession:
        engine = self._engine(client.split("/")[0])
        return next(session for session in engine.sessions if session.client == client)

    def _instance(self, name: str) -> Any:
        """That has an HTTP server."""
        return self.consumers[name]

    def _http_step(self, way: Way, what: str) -> str:
        return {"first": "first_token", "error": "answer", "broken": "answer"}.get(what, what)

"""A world whose requests are served in two stages: its parties' steps, their faults, and what must hold."""

from typing import Any

from tests.support.protocol_world.config import Enabled, Key
from tests.support.protocol_world.consumer import ConsumerActor
from tests.support.protocol_world.gateway import ClientRequest, GatewayActor
from tests.support.protocol_world.network import DIGEST, Way
from tests.support.protocol_world.stages.decode import DecodeActor
from tests.support.protocol_world.stages.gateway import MAX_ATTEMPTS, MODEL, StageGateway
from tests.support.protocol_world.stages.kv_pages import LEASE_S
from tests.support.protocol_world.stages.prefill import StageConsumer
from tests.support.protocol_world.world import World
from triptych_common.protocol.messages import InstanceRecord, KvTransfer, Role
from triptych_vllm_connector.worker.kv.leases import KvName

KV_TRANSFER = KvTransfer(connector="Played", compatibility="fits", lease_s=float(LEASE_S))
STEPS = {
    ("p", "abort"): "abort_prefill",
    ("d", "abort"): "abort_decode",
    ("p", "prefilled"): "prefilled",
    ("d", "first"): "first_decoded",
    ("pd", "first"): "first_token",
}  # by kind of instance and frame; others have the frame's name
LEAVES_KV = ("cancel", "lose_read")
"""After these a KV cache may be kept until its lease ends; and after faults that may cost any time."""
FAILURES = ("broken", "error")  # of what a request was sent: how an instance fails


class StageWorld(World):
    """See the module docstring. Its consumers are those that prefill, and those that do all."""

    consumers: dict[str, Any]
    gateways: dict[str, Any]

    def _new_consumers(self) -> dict[str, ConsumerActor]:
        config = self.config
        self.named_by: dict[KvName, str] = {}  # the life of an instance that has heard of a KV cache first
        self.decodes = {
            name: DecodeActor(name, self.network, self._find_owner)
            for name in (f"d-{index}" for index in range(config.num_decodes))
        }
        names = [f"p-{index}" for index in range(config.num_prefills)]
        names += [f"pd-{index}" for index in range(config.num_consumers)]
        return {name: StageConsumer(name, self.network, self.store, config) for name in names}

    def _new_gateways(self) -> dict[str, GatewayActor]:
        return {
            name: StageGateway(
                name,
                self.network,
                lambda name: self._instance(name).is_up,
                self.config.max_attempts,
                self._records,
                lambda request_id: self.requests[request_id],
            )
            for name in (f"gateway-{index}" for index in range(self.config.num_gateways))
        }

    def _request(self, index: int, items: tuple[int, ...]) -> ClientRequest:
        request = super()._request(index, items)
        first = index
        while (before := self._before(first)) is not None:
            request.num_turns += 1
            first = before
        request.conversation = f"question {first}"
        return request

    def _before(self, index: int) -> int | None:
        """The turn before."""
        before = self.config.follows[index] if index < len(self.config.follows) else -1
        return before if before >= 0 else None

    # ---- parties ---------------------------------------------------------------------------------
    def _instance(self, name: str) -> Any:
        return self.decodes.get(name) or self.consumers[name]

    def _engine(self, name: str) -> Any:
        return self.decodes.get(name) or super()._engine(name)

    @property
    def engines(self) -> list[Any]:
        return [*super().engines, *self.decodes.values()]

    def _everybody(self) -> frozenset[str]:
        return super()._everybody() | self.decodes.keys()

    def _moves(self, name: str) -> bool:
        return self.decodes[name].is_up if name in self.decodes else super()._moves(name)

    def _find_owner(self, engine_id: str) -> StageConsumer | None:
        """The life of an instance that has this KV connector."""
        found = (each for each in self.consumers.values() if each.is_up and each.boot_id == engine_id)
        return next(found, None)

    def _records(self) -> list[InstanceRecord]:
        """The registry's."""
        found = [
            InstanceRecord(instance=each.name, boot_id=each.name, role=Role.ENCODE, namespace_digest=DIGEST)
            for each in self.encoders.values()
        ]
        for each in (*self.consumers.values(), *self.decodes.values()):
            if not each.is_up:
                continue
            is_whole = each.name.startswith("pd-")
            role = Role.DECODE if each.name in self.decodes else Role.PREFILL
            found.append(
                InstanceRecord(
                    instance=each.name,
                    boot_id=each.boot_id,
                    role=Role.PREFILL_DECODE if is_whole else role,
                    url=f"http://{each.name}",
                    model=MODEL,
                    namespace_digest=DIGEST,
                    kv_transfer=None if is_whole else KV_TRANSFER,
                    draining=getattr(each, "is_draining", False),
                )
            )
        return found

    # ---- steps -----------------------------------------------------------------------------------
    def _deliveries(self) -> list[Enabled]:
        found = [each for each in super()._deliveries() if each.key.kind != "arrive" or self._may_ask(each)]
        return found + [
            Enabled(Key("registry", name), frozenset({name}))
            for name, gateway in self.gateways.items()
            if gateway.is_up and gateway.is_outdated
        ]

    def _may_ask(self, each: Enabled) -> bool:
        before = self._before(list(self.requests).index(each.key.subject))
        return before is None or self.requests[f"req-{before}"].outcome is not None

    def _work(self) -> list[Enabled]:
        found = super()._work()
        for decode in self.decodes.values():
            if not decode.is_up:
                continue
            owners = frozenset(self.consumers)
            if decode.can_step:
                found.append(Enabled(Key("step", decode.name), owners | {decode.name}))
            found += [
                Enabled(Key("read", decode.name, each.engine_request_id), owners | {decode.name})
                for each in decode.reading
            ]
        return found

    def _faults(self, is_busy: bool) -> list[Enabled]:
        found = super()._faults(is_busy)

        def add(kind: str, actors: set[str], subject: str, what: str = "") -> None:
            if kind in self.config.faults:
                found.append(Enabled(Key(kind, subject, what), frozenset(actors), is_fault=True))

        for name, decode in self.decodes.items():
            if not decode.is_up:
                continue
            add("crash_decode", {name, *self.gateways}, name)
            if not decode.is_draining:
                add("drain_decode", {name, *self.gateways}, name)
            if decode.held:
                add("forget_prefix", {name}, name)
            for each in decode.reading:
                if each.engine_request_id in decode.live:
                    add("lose_read", {name}, name, each.engine_request_id)
            for way in self.network.ways_to(name):
                if self.network.peek(way)[0] == "decode":
                    add("repeat_decode", {name}, name, way[0])
        for name, each in (self.consumers | self.decodes).items():
            if each.is_up and not each.renders_otherwise and not name.startswith("pd-"):
                add("render_otherwise", {name}, name)
        return found

    def _do_registry(self, key: Key) -> None:
        self.gateways[key.subject].read_registry()

    def _do_read(self, key: Key) -> None:
        self.decodes[key.subject].read(key.what)

    def _do_step(self, key: Key) -> None:
        if key.subject in self.decodes:
            self.decodes[key.subject].step()
        else:
            super()._do_step(key)

    def _do_crash_decode(self, key: Key) -> None:
        self.decodes[key.subject].crash()

    def _do_drain_decode(self, key: Key) -> None:
        self.decodes[key.subject].drain()

    def _do_forget_prefix(self, key: Key) -> None:
        self.decodes[key.subject].held.clear()

    def _do_lose_read(self, key: Key) -> None:
        self.decodes[key.subject].lose_read(key.what)

    def _do_repeat_decode(self, key: Key) -> None:
        """A proxy sends the request twice, at once."""
        way = key.what, key.subject, "http"
        self.decodes[key.subject].hear_http(key.what, self.network.peek(way))
        self._deliver(way, self.network.take(way))

    def _do_render_otherwise(self, key: Key) -> None:
        """The template of its next prompt puts the time into it."""
        self._instance(key.subject).renders_otherwise = True

    def _do_crash_gateway(self, key: Key) -> None:
        for decode in self.decodes:
            self.network.drop((decode, key.subject, "http"))
        super()._do_crash_gateway(key)

    def _do_time(self, key: Key) -> None:
        """A request waits for a new view, too, and a KV cache that no instance has heard of for its end."""
        when = self._next_timer()
        readings = [each.next_reading for each in self.gateways.values() if each.is_up]
        ends = [each.next_lease_end for each in self.consumers.values() if each.is_up]
        is_left = any(self.faults[each] for each in LEAVES_KV)
        is_left |= any(request.ends["broken"] for request in self.requests.values())
        self.num_owned_waits += when in readings or (when in ends and is_left)
        super()._do_time(key)

    def _http_step(self, way: Way, what: str) -> str:
        is_answer = way[0] not in self.gateways
        instance = way[0] if is_answer else way[1]
        if is_answer and what in ("refused", "draining", "error", "broken"):
            return f"{instance.split('-')[0]}, {what}"
        return STEPS.get((instance.split("-")[0], what), what)

    # ---- what must hold --------------------------------------------------------------------------
    def check(self) -> None:
        super().check()
        for way in self.network.queues:
            assert way[2] == "http" or way[1] not in self.decodes, "an instance that decodes gets items"
        for consumer in self.consumers.values():
            if consumer.is_up:
                self._check_kept(consumer)
        self._check_named()
        for request in self.requests.values():
            num_handovers = request.ends["refused"]
            num_alone = 1 if request.num_turns else 0  # a conversation that is held no more is no handover
            assert num_handovers <= MAX_ATTEMPTS + num_alone, "too many handovers"
            assert sum(request.ends[each] for each in FAILURES) <= MAX_ATTEMPTS, "too many attempts"

    def _check_named(self) -> None:
        """A KV cache goes to one instance that decodes, and to one life of that."""
        for decode in self.decodes.values():
            for name in decode.named:
                first = self.named_by.setdefault(name, decode.boot_id)
                assert first == decode.boot_id, "a KV cache is handed over twice"

    def _check_kept(self, consumer: StageConsumer) -> None:
        used = set(consumer.pages.owners.values())
        leases = consumer.owner.leases.keys()
        assert used == leases | set(consumer.running), "KV blocks without an owner"
        for each in leases:
            name = consumer.boot_id, each
            is_left = any(each.is_up and name in each.done_with for each in self.decodes.values())
            assert not is_left or consumer.will_free(each), "a KV cache is kept that nobody will read"

    def _pins_of(self, engine: Any) -> list[int]:
        return [] if isinstance(engine, DecodeActor) else super()._pins_of(engine)

    def check_quiet(self) -> None:
        super().check_quiet()
        for consumer in self.consumers.values():
            assert not consumer.pages.owners, f"{consumer.name} keeps KV blocks"
        for decode in self.decodes.values():
            assert not decode.live, f"{decode.name} has {[*decode.live]}"
            assert not decode.aborted
            assert not len(decode.refusals), f"{decode.name} remembers refusals"
        for gateway in self.gateways.values():
            assert not gateway.connections.open, "a connection to an instance stays open"
            for name in (*self.consumers, *self.decodes):
                assert not gateway.router.num_in_flight(name), f"{name} counts as busy"

    def _are_all_of(self, kinds: frozenset[str]) -> bool:
        """Faults of stages that cost time alone: while another instance is there, and attempts are left."""
        num_handovers = sum(self.faults[each] for each in ("render_otherwise", "lose_read", "repeat_decode"))
        if num_handovers >= MAX_ATTEMPTS or self.faults["drain_decode"] >= self.config.num_decodes:
            return False
        if self.faults["lose_load"]:  # what has failed at an instance waits for the item's own failure
            return False
        stages = frozenset(
            {"render_otherwise", "lose_read", "drain_decode", "forget_prefix", "repeat_decode"}
        )
        return super()._are_all_of(kinds | stages)

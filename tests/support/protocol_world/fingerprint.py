"""Two worlds that will behave alike have one fingerprint. Taken from the real objects, whatever they hold.

Left out: numbers of commands, places in the region, recency, and what only counts. A coroutine counts by
where it stands, a future by what came of it.
"""

import asyncio
from collections import OrderedDict, deque
from enum import Enum
from types import CoroutineType
from typing import Any

from pydantic import BaseModel

from tests.support.protocol_world.config import REDIS
from tests.support.protocol_world.consumer import ConsumerActor
from tests.support.protocol_world.encoder import EncoderActor
from tests.support.protocol_world.flights import FlightLink
from tests.support.protocol_world.gateway import GatewayActor
from tests.support.protocol_world.stages import prints
from tests.support.protocol_world.stages.gateway import StageGateway
from tests.support.protocol_world.stages.prefill import StageConsumer
from tests.support.protocol_world.stages.world import StageWorld
from tests.support.protocol_world.store import ClientSession
from tests.support.protocol_world.transfers import prints as transfer_prints
from tests.support.protocol_world.transfers.agent import AgentActor
from tests.support.protocol_world.transfers.gateway import TransferGateway
from tests.support.protocol_world.transfers.world import TransferWorld
from tests.support.protocol_world.virtual_loop import CLOCK
from tests.support.protocol_world.world import World

ORDERED = frozenset({"needed_by", "_to_wake", "_pending", "parked"})  # dicts whose order matters
LEFT_OUT = frozenset(
    {
        "seq", "origin_seq", "last_seq", "offset", "blocks", "traceparent", "envelope", "published_at",
        "num_attempts_total", "first_seen_ns", "parked_ns", "parked_at_step", "is_grant_recorded",
        "opened_at", "reserved_at", "last_used_at", "sealed_at", "requester_lease", "descriptor",
        "generation", "slot", "_since", "_answered_at",
        "refreshed_at", "detail", "_log", "encode_s", "ordered_at",
    }
)  # fmt: skip
_PLAIN = (str, int, float, bytes, type(None))


def digest(value: Any) -> Any:
    """`value` as nested tuples that can be compared and hashed."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        if isinstance(value, OrderedDict):
            return tuple((digest(key), digest(each)) for key, each in value.items())
        return tuple(sorted(((digest(key), digest(each)) for key, each in value.items()), key=repr))
    if isinstance(value, list | tuple | deque):
        return tuple([digest(each) for each in value])
    if isinstance(value, set | frozenset):
        return tuple(sorted(digest(each) for each in value))
    if isinstance(value, asyncio.Future):
        return _future(value)
    if isinstance(value, BaseModel):
        return (type(value).__name__, *[digest(v) for k, v in value.__dict__.items() if k not in LEFT_OUT])
    if isinstance(value, asyncio.Event):
        return value.is_set()
    if callable(value):
        return None
    if isinstance(value, Exception):
        return repr(value)
    if not type(value).__module__.startswith(("triptych", "tests.support")):
        raise TypeError(f"{type(value)} cannot be part of a fingerprint")
    return _object(value)


def _object(value: Any) -> Any:
    fields = getattr(value, "__dict__", None)
    if fields is None:
        names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
        fields = {name: getattr(value, name, None) for name in names}
    found: list[Any] = [type(value).__name__]
    for name, each in fields.items():
        if name not in LEFT_OUT:
            found.append(tuple(map(digest, each.items())) if name in ORDERED else digest(each))
    return tuple(found)


def _future(future: "asyncio.Future[Any]") -> Any:
    if not future.done():
        return "open"
    if future.cancelled():
        return "cancelled"
    error = future.exception()
    return repr(error) if error is not None else digest(future.result())


def _stands(task: "asyncio.Task[Any]") -> Any:
    """Where the coroutine, and those it waits for, stand."""
    found: list[Any] = []
    coroutine: Any = task.get_coro()
    while isinstance(coroutine, CoroutineType) and coroutine.cr_frame is not None:
        found += [coroutine.cr_code.co_name, coroutine.cr_frame.f_lasti]
        coroutine = coroutine.cr_await
    return tuple(found)


def _session(session: ClientSession) -> Any:
    return (
        session.is_connected,
        session.is_over,
        digest(session.to_store),
        digest(session.from_store),
        digest([(each.command, each.is_repeated_end) for each in session.state._requests.values()]),
        digest([each.command for each in session.unsent]),
        digest(session.state._watches._watches.keys() | set()),
    )


def of_actor(world: World, name: str) -> Any:
    """The part of one actor, with what is under way to it on the store's socket."""
    if name in world.gateways:
        return _gateway(world, world.gateways[name])
    if name in world.stores:
        state = world.stores[name].core.state
        return (
            digest(state.table._sealed),
            digest(state.table._unsealed),
            [
                (lease.client, lease.session_id is None, digest(lease.watches), digest(lease.reservations),
                 sorted(pin.pin_id for pin in lease.pins.values()))
                for lease in state.leases.all_leases()
            ],
        )  # fmt: skip
    if name == REDIS:
        jobs = world.network.jobs.values()
        return (
            [(each.number, each.owner, each.num_deliveries, digest(each.message)) for each in jobs],
            digest(world.network.flights.flights),
            digest(world.network.places),
            sorted(world.blocked.items()) if isinstance(world, TransferWorld) else None,
        )
    if name in world.encoders:
        return _encoder(world.encoders[name])
    if isinstance(world, StageWorld) and name in world.decodes:
        return prints.of_decode(world.decodes[name])
    if isinstance(world, TransferWorld) and name in world.agents:
        agent = world.agents[name]
        return (transfer_prints.of_agent(agent, digest, _stands), _session(agent.session))
    consumer = world.consumers[name]
    return (_consumer(consumer), prints.of_prefill(consumer) if isinstance(consumer, StageConsumer) else None)


def _gateway(world: World, gateway: GatewayActor) -> Any:
    requests = [each for each in world.requests.values() if each.gateway == gateway.name]
    queue = gateway.orders.queue
    return (
        prints.of_gateway(gateway) if isinstance(gateway, StageGateway) else None,
        transfer_prints.of_gateway(gateway, digest) if isinstance(gateway, TransferGateway) else None,
        gateway.is_up,
        digest(gateway.orders.table._items),
        digest(gateway.orders._item_waits),
        digest(gateway.final_acks._pending),
        digest(set(gateway.orders.sizes._local)),
        [(each.outcome, each.has_begun, tuple(each.dispatched)) for each in requests],
        [each.request_id for each in requests if each.request_id in world.to_arrive],
        sorted(map(_stands, gateway.loop.all_tasks)),
        digest(
            [gateway.orders.flight_requests._sent, queue._unchecked, queue._round, queue._busy, queue._again]
        ),
        # Whose turn is next is left out: all are of one fair key, and the window has room for all.
        [(name, list(each.items), each.is_busy, each.has_begun) for name, each in queue._requests.items()],
        (digest(queue.window._jobs), tuple(queue._others)),
        _scripts(gateway.redis),
    )


def _scripts(link: FlightLink) -> Any:
    return [
        (mm_hash, [(each.name, digest(each.arguments), each.reply.done()) for each in scripts])
        for mm_hash, scripts in sorted(link.scripts.items())
    ]


def _encoder(encoder: EncoderActor) -> Any:
    return (
        encoder.is_up,
        encoder.must_end,
        encoder.is_frozen,
        digest(encoder.ledger),
        digest(encoder.store_client._pins),
        sorted((mm_hash, order.reservation_id) for mm_hash, (order, _) in encoder.engine.pending.items()),
        sorted(encoder.outstanding),
        sorted(map(_stands, encoder.loop.all_tasks)),
        digest(encoder.num_encodes),
        sorted(
            (each.entry_id, tuple(sorted(each._waiting)), tuple(sorted(each._informed)))
            for each in encoder.leases._renewed
        ),
        _scripts(encoder.redis),
        [_session(session) for session in encoder.sessions],
    )


def _consumer(actor: ConsumerActor) -> Any:
    consumer = actor.consumer
    return (
        (actor.is_up, actor.must_end, actor.has_news, actor.preempts_late, actor.loses_load,
         consumer.is_store_lost),
        digest(consumer._pins._items),
        digest(consumer._pins._loads),
        digest(consumer._replies._replies),
        digest(actor.preallocator),
        digest(consumer._requests._admissions),
        digest(consumer._deadlines._by_request),
        digest([_inbox_event(each) for each in actor.inbox._events]),
        (tuple(consumer._requests._to_wake), tuple(sorted(consumer._requests._failed))),
        (tuple(actor.waiting), tuple(actor.running), tuple(actor.parked)),
        tuple(actor.partial.ids()),
        digest(actor.in_flight),
        digest(actor.loads_in_flight),
        digest(actor.cached),
        tuple(actor.freed),
        digest(actor.views),
        [
            (
                *(e.engine_request_id, e.computed, e.epoch, e.prefix),
                *(e.has_begun, e.is_done, e.is_wrong, sorted(e.inputs)),
            )
            for e in actor.live.values()
        ],
        [_session(session) for session in actor.sessions],
    )  # fmt: skip


def _inbox_event(event: Any) -> Any:
    return event if isinstance(event, BaseModel) else (type(event).__name__, vars(event))


class Fingerprints:
    """Of one world as it goes on; parts of actors that did nothing are not hashed again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._parts: dict[str, int] = {}

    def take(self, changed: frozenset[str]) -> int:
        """After a step of `changed`; an empty set: of any party."""
        world = self._world
        names = (*world.stores, REDIS, *world.gateways, *world.encoders, *world.consumers)
        if isinstance(world, StageWorld):
            names += (*world.decodes,)
        elif isinstance(world, TransferWorld):
            names += (*world.agents,)
        for name in names:
            if not changed or name in changed or name not in self._parts:
                self._parts[name] = hash(repr(of_actor(world, name)))
        network = world.network
        sessions = [
            (len(session.to_store), len(session.from_store), session.is_connected)
            for engine in world.engines
            for session in engine.sessions
        ]
        queues = [(way, digest(queue)) for way, queue in sorted(network.queues.items())]
        actors: list[GatewayActor | EncoderActor | AgentActor] = [
            *world.gateways.values(),
            *world.encoders.values(),
        ]
        if isinstance(world, TransferWorld):
            actors += world.agents.values()
        timers = [each.next_timer() for each in actors]
        whole = (sorted(self._parts.items()), queues, sorted(network.keys), timers, CLOCK.now, sessions)
        return hash(repr((whole, sorted(world.faults.items()))))

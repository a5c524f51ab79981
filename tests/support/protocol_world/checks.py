"""What must hold in a world after every step, and what at its end."""

import itertools
from collections import Counter
from typing import Any

from tests.support.protocol_world.choices import Choices
from tests.support.protocol_world.config import ERRORS, HARMLESS, ONCE, PROMPT, SLOW
from tests.support.protocol_world.consumer import ConsumerActor
from tests.support.protocol_world.encoder import EncoderActor
from triptych_common.protocol.store import EntrySealed, Pinned, Unpin
from triptych_vllm_connector.consumer.consumer import PinReply
from triptych_vllm_connector.consumer.item_pins import EngineItemState


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

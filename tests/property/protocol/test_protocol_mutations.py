"""The model of the protocol must notice when the code is wrong: each of these breaks it on purpose.

A mutation is put into the real code, or into the twin of the scripts that Redis runs; random orders are
tried until one of them shows it.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.support.flight_model import Flight as KeptFlight
from tests.support.flight_model import FlightModel
from tests.support.protocol_world import consumer as played_consumer
from tests.support.protocol_world.config import Config
from tests.support.protocol_world.explore import BrokenError
from tests.support.protocol_world.random_walk import walk
from triptych_cache_store.core.state import StoreState
from triptych_cache_store.entries.leases import LeaseTable
from triptych_common.coordination import ClaimResult, FlightClaim, StartResult
from triptych_common.domain.errors import IllegalTransitionError
from triptych_common.protocol.store import Resume
from triptych_common.store_session import session_state
from triptych_common.store_session.resumption import WatchLog
from triptych_encoder.jobs import held_parts
from triptych_encoder.jobs.active_job import ActiveJob
from triptych_encoder.jobs.ledger import Ledger
from triptych_encoder.store.store_client import StoreClient
from triptych_gateway.encode import flight_requests
from triptych_gateway.encode.encode_orders import EncodeOrders
from triptych_gateway.encode.final_acks import FinalAcks
from triptych_gateway.encode.flight_requests import FlightRequests
from triptych_gateway.encode.item_table import Item as GatewayItem
from triptych_gateway.encode.item_table import ItemFailure
from triptych_gateway.encode.item_table import ItemTable as GatewayTable
from triptych_gateway.encode.item_wait import ItemWait
from triptych_gateway.encode.media_cache import MediaCache
from triptych_vllm_connector.consumer.item_grants import ItemGrants
from triptych_vllm_connector.consumer.item_pins import EngineItemState, ItemPins
from triptych_vllm_connector.consumer.item_replies import ItemReplies
from triptych_vllm_connector.consumer.preallocator import ItemSpace, Preallocator
from triptych_vllm_connector.links.readable_pins import StorePins
from triptych_vllm_connector.scheduler.failed_loads import LoadsInFlight

MAX_WALKS = 500
NOTICED = (AssertionError, IllegalTransitionError, ValueError)
APART = Config(requests=((0, 1), (1, 0)), num_consumers=2, num_encoders=2, max_faults=3)
SHARED = replace(APART, shares_consumer=True)
ASYNC = replace(SHARED, steps_in_flight=2, step_tokens=7, max_faults=0)
LARGE = replace(
    SHARED, requests=((0, 1), (2, 3)), rows=(3, 4, 3, 4), budget=6, num_blocks=8, max_faults=0
)  # each request is larger than the budget
ONE = Config(requests=((0,),), rows=(2,))
SAME = replace(APART, requests=((0,), (0,), (0,)), rows=(2,))
TWO_GATEWAYS = replace(APART, requests=((0,), (0,)), rows=(2,), num_gateways=2)
TIGHT = replace(SHARED, requests=((0, 1), (2, 3)), rows=(2, 2, 2, 2), max_faults=0)


def nothing(*args: Any, **kwargs: Any) -> None:
    """What should have been done is not."""


def empty(*args: Any, **kwargs: Any) -> list[Any]:
    return []


def yes(*args: Any, **kwargs: Any) -> bool:
    return True


def no(*args: Any, **kwargs: Any) -> bool:
    return False


def with_faults(config: Config, *faults: str) -> Config:
    return replace(config, faults=faults, max_faults=6)


@dataclass(frozen=True)
class Mutation:
    owner: Any
    name: str
    mutant: Any
    config: Config
    fault_share: float = 0.06
    slow: str = ""  # a party that goes on only when no other can


def _all_that_is_asked(self: Preallocator, needs: Any) -> Any:
    return list(needs)


def _parts_to_any_request(self: Preallocator, request_id: str, needs: Any) -> Any:
    granted = self._fitting(needs)
    for need in granted:
        if need.mm_hash not in self._spaces:
            self._used += need.num_embeds
        space = self._spaces.setdefault(need.mm_hash, ItemSpace(need.mm_hash, need.num_embeds))
        space.engine_request_ids.add(request_id)
    self._pending[request_id] = tuple(needs[len(granted) :])
    if not self._pending[request_id]:
        del self._pending[request_id]
    return granted


def _pinned_too_early(self: ItemPins, mm_hash: str) -> EngineItemState | None:
    state = _STATE(self, mm_hash)
    return EngineItemState.PINNED if state is EngineItemState.WATCHING else state


def _holds_for_one_choice(self: ItemPins, mm_hash: str, engine_request_id: str) -> None:
    _ACQUIRE(self, mm_hash, engine_request_id.removeprefix("1"))


def _forgets_the_encoder_before(self: ItemReplies, metadata: Any) -> None:
    for reply in self._replies.values():
        for key in [key for key in reply.jobs if key[0] == metadata.job_id]:
            del reply.jobs[key]
    _ON_METADATA(self, metadata)


def _undoes_nothing(welcome: Any, requests: Any, watches: Any) -> Resume:
    return Resume(region_id=welcome.region_id, lease_id=welcome.lease_id)


def _forgets_the_unanswered(self: WatchLog, command: Any, seq: int) -> None:
    """As it was once: an end that was sent counted as an end."""
    if type(command).__name__ == "Unwatch":
        self._watches.pop(command.mm_hash, None)


def _takes_metadata_and_sends_nothing(self: ItemReplies, metadata: Any) -> None:
    send, self._send_news = self._send_news, nothing  # type: ignore[method-assign]
    try:
        _ON_METADATA(self, metadata)
    finally:
        self._send_news = send  # type: ignore[method-assign]


async def _claims_its_own(self: FlightModel, mm_hash: str, requesters: Any, **options: Any) -> FlightClaim:
    """As without flights: the flights of other gateways do not count."""
    if options["mode"] != "check":
        self.flights.pop(mm_hash, None)
    return await _CLAIM(self, mm_hash, requesters, **options)


async def _retries_what_is_retried(
    self: FlightModel, mm_hash: str, requesters: Any, **options: Any
) -> FlightClaim:
    if options["mode"] == "retry":
        self.flights.pop(mm_hash, None)
    return await _CLAIM(self, mm_hash, requesters, **options)


async def _retries_nothing(self: FlightModel, mm_hash: str, requesters: Any, **options: Any) -> FlightClaim:
    """The second claim counts as joined; and so does the first."""
    flight = self.find(mm_hash)
    if flight is None or flight.state != "failed":
        return await _CLAIM(self, mm_hash, requesters, **options)
    self._join(flight, requesters, options["ttl_s"])
    return self._answer(flight, ClaimResult.JOINED)


async def _keeps_claims(self: FlightModel, mm_hash: str, requesters: Any, **options: Any) -> FlightClaim:
    """No lease ends; no job is published with its claim, since then none waits for its owner."""
    self._is_over = no  # type: ignore[method-assign]
    return await _CLAIM(self, mm_hash, requesters, **{**options, "offer": None})


async def _takes_the_end_for_the_result(
    self: FlightModel, mm_hash: str, requesters: Any, **options: Any
) -> FlightClaim:
    flight = self.find(mm_hash)
    if flight is None or flight.state != "finished":
        return await _CLAIM(self, mm_hash, requesters, **options)
    self._join(flight, requesters, options["ttl_s"])
    return self._answer(flight, ClaimResult.JOINED)


async def _drops_the_requesters_of_others(self: FlightModel, mm_hash: str, keys: Any, **options: Any) -> bool:
    flight = self.find(mm_hash)
    if flight is not None and flight.state == "queued":
        flight.remove_requesters(list(flight.ends))
    return await _LEAVE(self, mm_hash, keys, **options)


async def _keeps_a_flight_without_requesters(
    self: FlightModel, mm_hash: str, keys: Any, **options: Any
) -> bool:
    flight = self.find(mm_hash)
    if flight is not None:
        flight.remove_requesters(keys)
    return False


async def _starts_whatever_comes(
    self: FlightModel,
    job: Any,
    entry_id: str,
    encoder: str,
    *,
    lease_s: float,
    ttl_s: float,
    stream: str | None = None,
    metadata: Any = None,
) -> Any:
    flight = self.flights.setdefault(job.mm_hash, KeptFlight(job.job_id, job.attempt))
    self._run(flight, entry_id, stream or "", encoder, lease_s)
    self._live_for(flight, ttl_s)
    return StartResult.STARTED, flight.waiting()


async def _never_ends(self: FlightModel, metadata: Any, served: Any, **options: Any) -> Any:
    return True, None


async def _leaves_nothing(self: FlightRequests, mm_hash: str, wanted: Any) -> None:
    """Redis keeps its requesters."""


async def _checks_nothing(self: EncodeOrders) -> None:
    """Only messages about jobs count."""


def _refreshes_no_requesters(self: ActiveJob, requesters: Any) -> None:
    """The requesters of the job's start stay."""


def _the_first_alone(self: KeptFlight) -> Any:
    return tuple(self.requesters.values())[:1]


def _blames_the_next_job(self: EncodeOrders, message: Any) -> None:
    item = self.table.get(message.mm_hash)
    if item is not None and item.job_id is not None:
        self._fail_job(item.mm_hash, item.job_id, ItemFailure(message.kind, message.detail))


_CLAIM, _LEAVE = FlightModel.claim_flight, FlightModel.leave_flight
_ACQUIRE = ItemPins.acquire_item
_STATE = ItemPins.state_of
_ON_METADATA = ItemReplies.on_metadata

MUTATIONS: dict[str, Mutation] = {
    # ---- prefill_decode ----
    "a pin that is not needed any more is not given back": Mutation(
        StorePins, "unpin", nothing, with_faults(APART, "cancel", "preempt")
    ),
    "a watch that is not needed any more goes on": Mutation(
        StorePins, "unwatch", nothing, with_faults(APART, "cancel", "refuse", "unfit")
    ),
    "space is granted beyond the budget": Mutation(Preallocator, "_fitting", _all_that_is_asked, TIGHT),
    "parts of requests are granted to any request": Mutation(
        Preallocator, "preallocate", _parts_to_any_request, LARGE
    ),
    "space that was given back is granted to no request": Mutation(
        ItemGrants, "_grant_pending", nothing, TIGHT
    ),
    "space is not given back": Mutation(Preallocator, "deallocate", nothing, TIGHT),
    "an item counts as pinned while it is watched": Mutation(ItemPins, "state_of", _pinned_too_early, APART),
    "no request is woken when an item is pinned": Mutation(ItemGrants, "_wake_if_ready", nothing, APART),
    "a request that ends keeps what it held": Mutation(
        ItemGrants, "give_back_request", nothing, with_faults(APART, "cancel")
    ),
    "a lost writer is ignored": Mutation(
        ItemGrants, "_order_again", nothing, with_faults(APART, "evict", "crash_encoder")
    ),
    "a load that no worker will see is not taken back": Mutation(
        ItemPins, "_withdraw_load", nothing, with_faults(APART, "preempt_late")
    ),
    "an item is not dropped with its last holder": Mutation(ItemPins, "release_item", nothing, APART),
    "an encoder whose metadata come late gets no reply": Mutation(
        ItemReplies,
        "on_metadata",
        _takes_metadata_and_sends_nothing,
        with_faults(APART, "prefix"),
        fault_share=0.2,
    ),
    "an encoder whose job was taken over is forgotten": Mutation(
        ItemReplies, "on_metadata", _forgets_the_encoder_before, with_faults(APART, "freeze_encoder")
    ),
    "an item that is being loaded is given back": Mutation(
        LoadsInFlight,
        "is_loading",
        no,
        with_faults(replace(ASYNC, requests=((0, 1),)), "lose_load"),
        fault_share=0.2,
    ),
    "a load that is lost is not noted": Mutation(
        played_consumer, "undo_failed_loads", nothing, with_faults(ASYNC, "lose_load"), fault_share=0.1
    ),
    "the ack is not sent": Mutation(ItemReplies, "ack_item", nothing, APART),
    # ---- encoder ----
    "a pin is not given back after the acks of all requesters": Mutation(
        Ledger, "remove_requesters", empty, APART
    ),
    "pins of requesters that never answer stay": Mutation(
        Ledger, "expire", empty, with_faults(APART, "lose_message")
    ),
    "a second pin of an entry is forgotten": Mutation(StoreClient, "end_pins", nothing, APART),
    "an item that is here is encoded, and its pin forgotten": Mutation(
        held_parts,
        "is_pinned",
        no,
        with_faults(replace(SAME, num_gateways=2), "lose_flights", "crash_gateway", "refuse"),
        fault_share=0.2,
    ),
    "a failed job keeps its reservation": Mutation(
        StoreClient, "unwatch_item", nothing, with_faults(APART, "refuse", "unfit")
    ),
    # ---- store and sessions ----
    "a watcher gets no push of a lost writer": Mutation(
        StoreState, "push_writer_lost", nothing, with_faults(APART, "unfit")
    ),
    "a watcher gets no push of a seal": Mutation(LeaseTable, "take_watchers", empty, APART),
    "watches of the dead stay": Mutation(
        StoreState, "end_watches", nothing, with_faults(APART, "crash_consumer")
    ),
    "nothing is undone for a session that resumes": Mutation(
        session_state, "resume_of", _undoes_nothing, with_faults(APART, "restart_store")
    ),
    "watches are not taken up again": Mutation(
        WatchLog, "take_all", lambda self: {}, with_faults(APART, "restart_store")
    ),
    "an unwatch counts before it is answered": Mutation(
        WatchLog,
        "note_sent",
        _forgets_the_unanswered,
        with_faults(SHARED, "hurry", "restart_store", "cancel"),
    ),
    # ---- gateway ----
    "a failed encode is not tried again": Mutation(
        flight_requests, "RETRIED_KINDS", frozenset(), with_faults(APART, "refuse")
    ),
    "an item is ordered once per request": Mutation(GatewayItem, "in_flight", property(no), APART),
    "what prefill_decode needs is not ordered": Mutation(
        EncodeOrders, "_on_needed", nothing, with_faults(APART, "evict", "crash_encoder")
    ),
    # ---- flights ----
    "an item is encoded once per gateway": Mutation(
        FlightModel, "claim_flight", _claims_its_own, TWO_GATEWAYS
    ),
    "a failed encode is tried again by all gateways that received the failure": Mutation(
        FlightModel, "claim_flight", _retries_what_is_retried, with_faults(TWO_GATEWAYS, "refuse"), 0.2
    ),
    "a failed encode is tried again by none of the gateways that received the failure": Mutation(
        FlightModel, "claim_flight", _retries_nothing, with_faults(TWO_GATEWAYS, "refuse")
    ),
    "a late failure counts for the job that is in flight now": Mutation(
        EncodeOrders, "_on_failed", _blames_the_next_job, with_faults(TWO_GATEWAYS, "refuse", "duplicate")
    ),
    "a failure is sent to one gateway": Mutation(
        KeptFlight, "waiting", _the_first_alone, with_faults(TWO_GATEWAYS, "refuse")
    ),
    "metadata are sent only to the requesters of the job's start": Mutation(
        ActiveJob, "set_waiting", _refreshes_no_requesters, TWO_GATEWAYS
    ),
    "a flight does not end": Mutation(FlightModel, "finish_flight", _never_ends, TWO_GATEWAYS),
    "a claim that its owner left stays its owner's": Mutation(
        FlightModel, "claim_flight", _keeps_claims, with_faults(TWO_GATEWAYS, "crash_gateway")
    ),
    "jobs without any message are waited for": Mutation(
        EncodeOrders,
        "run_checks",
        _checks_nothing,
        with_faults(TWO_GATEWAYS, "crash_gateway", "lose_flights"),
    ),
    "a result of which nothing is left counts as received": Mutation(
        FlightModel, "claim_flight", _takes_the_end_for_the_result, with_faults(TWO_GATEWAYS, "lose_redis")
    ),
    "a requester that leaves takes the job of the others along": Mutation(
        FlightModel, "leave_flight", _drops_the_requesters_of_others, with_faults(TWO_GATEWAYS, "cancel")
    ),
    "a job that all requesters left is done": Mutation(
        FlightModel, "start_job", _starts_whatever_comes, with_faults(TWO_GATEWAYS, "cancel")
    ),
    "a flight that all requesters left is kept": Mutation(
        FlightModel,
        "leave_flight",
        _keeps_a_flight_without_requesters,
        with_faults(TWO_GATEWAYS, "cancel", "refuse"),
    ),
    "a request that waits no more stays in the flight": Mutation(
        FlightRequests, "leave_all_but", _leaves_nothing, with_faults(TWO_GATEWAYS, "cancel")
    ),
    "requests that a refused pin ends are not ended": Mutation(
        ItemGrants, "_fail_requests_of", nothing, with_faults(SHARED, "refuse_pin")
    ),
    "answers of one request hold its items as one": Mutation(
        ItemPins, "acquire_item", _holds_for_one_choice, replace(SHARED, num_choices=2)
    ),
    "sizes that came are not passed on": Mutation(ItemWait, "on_sized", nothing, APART),
    "an encoder gets no final ack of requests that ended elsewhere": Mutation(
        FinalAcks, "_queue_ack", nothing, with_faults(APART, "cancel")
    ),
    "a request leaves its items behind": Mutation(GatewayTable, "leave_item", nothing, APART),
    "media stay in the cache": Mutation(MediaCache, "release_media", nothing, APART),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_model_notices_that(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_noticed(MUTATIONS[name], monkeypatch)


def assert_noticed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Walks break with the mutant, and in the way that a check would find."""
    walk(mutation.config, 0, mutation.fault_share, mutation.slow)  # as it is, nothing is wrong
    monkeypatch.setattr(mutation.owner, mutation.name, mutation.mutant)
    with pytest.raises(BrokenError) as broken:
        walk_on(mutation)
    assert isinstance(broken.value.__cause__, NOTICED)


def walk_on(mutation: Mutation) -> None:
    for seed in range(MAX_WALKS):
        walk(mutation.config, seed, mutation.fault_share, mutation.slow)

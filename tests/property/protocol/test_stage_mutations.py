"""The model must notice when a rule of the two stages is taken out: each of these breaks it on purpose."""

from dataclasses import replace
from typing import Any

import pytest

from tests.property.protocol.test_protocol_mutations import Mutation, assert_noticed, no, nothing, yes
from tests.property.protocol.test_stage_model import PAIRS, TURNS
from tests.support.protocol_world.config import Config
from tests.support.protocol_world.stages import kv_pages
from triptych_gateway.proxy.stages import StageFailedError, Stages
from triptych_gateway.proxy.upstream import Answer
from triptych_gateway.routing.routes import RouteChoice
from triptych_gateway.routing.scheduling.candidates import ServingStage
from triptych_vllm_connector.kv_failures import KvFailure
from triptych_vllm_connector.scheduler import kv_refusals
from triptych_vllm_connector.scheduler.kv_refusals import KvReads, KvRefusals
from triptych_vllm_connector.worker.kv.leases import MARGIN_S, KvLeases

SLOW = replace(PAIRS, requests=((0,), (1,), (0,), (1,)), follows=(-1, -1, 1, 2))
"""One instance that decodes is late: the last two, of which one follows the other, go past it."""
SINGLE = replace(PAIRS, requests=((0,),), num_decodes=1)


def _with(config: Config, *faults: str) -> Config:
    return replace(config, faults=faults, max_faults=6)


def _counts_heartbeats_that_were_late(self: KvLeases, name: Any, first_end: float) -> float:
    sent = self._heartbeats.get(name, ())
    return max([first_end, *(each + self._extension_s for each in sent)]) - MARGIN_S


def _says_no_date(kv_connector: Any) -> None:
    _DESCRIBE(kv_connector)
    scheduler = kv_connector.connector_scheduler
    finish = scheduler.request_finished

    def request_finished(request: Any, page: int) -> Any:
        is_kept, params = finish(request, page)
        return is_kept, params and {**params, "remote_blocks_expiry_time": None}

    scheduler.request_finished = request_finished


def _has_it_freed_by_the_second(self: KvRefusals, engine_request_id: str, params: Any, token_ids: Any) -> Any:
    failure = _ON_ADDED(self, engine_request_id, params, token_ids)
    if failure is KvFailure.KV_TAKEN:
        params["do_remote_prefill"] = True
    return failure


def _has_nothing_freed(self: KvRefusals, engine_request_id: str, params: Any, token_ids: Any) -> Any:
    failure = _ON_ADDED(self, engine_request_id, params, token_ids)
    if failure is KvFailure.KV_LOAD_FAILED:
        params["do_remote_prefill"] = False
    return failure


async def _offers_it_again(self: Stages, upstream: Any, route: Any, handover: Any = None) -> Any:
    """Whatever has become of the KV cache."""
    if route.decode is not None and handover is None:
        handover = await self._prefill(upstream, route.first)
    try:
        return await _BEGIN(self, upstream, route, handover)
    except StageFailedError as error:
        if error.stage is ServingStage.DECODE:
            error.handover = handover
        raise


def _counts_no_handover(self: RouteChoice, route: Any) -> None:
    """It is only avoided."""
    self._doubtful |= {(each.instance, each.boot_id) for each in (route.first, route.answering)}


def _counts_no_failure(self: RouteChoice, record: Any) -> None:
    self._may_refresh = True


_DESCRIBE, _ON_ADDED = kv_refusals.describe_kv_caches, KvRefusals.on_added
_BEGIN = Stages.begin

MUTATIONS: dict[str, Mutation] = {
    # ---- the lease ----
    "what was read after the lease counts": Mutation(
        KvLeases, "is_over", no, _with(SLOW, "hurry"), slow="d-0"
    ),
    "the owner does not say when the lease ends": Mutation(
        kv_pages, "describe_kv_caches", _says_no_date, _with(SLOW, "hurry"), slow="d-0"
    ),
    "a heartbeat after the lease lengthens it": Mutation(
        KvLeases, "end_of", _counts_heartbeats_that_were_late, _with(SLOW, "hurry"), slow="d-0"
    ),
    # ---- the prompt ----
    "a KV cache is taken whatever prompt it is of": Mutation(
        kv_refusals, "is_of_prompt", yes, _with(PAIRS, "render_otherwise")
    ),
    "the owner does not say which prompt it is of": Mutation(
        kv_refusals, "_description", nothing, _with(PAIRS, "render_otherwise")
    ),
    "a KV cache of another prompt is not freed": Mutation(
        KvRefusals, "on_added", _has_nothing_freed, _with(PAIRS, "render_otherwise")
    ),
    # ---- refusals ----
    "a KV cache is read twice": Mutation(
        KvReads, "name", yes, _with(PAIRS, "repeat_decode"), fault_share=0.2
    ),
    "a KV cache is freed by whom it is refused": Mutation(
        KvRefusals, "on_added", _has_it_freed_by_the_second, _with(PAIRS, "repeat_decode"), fault_share=0.2
    ),
    "an instance that decodes begins without the items": Mutation(
        kv_refusals, "covers_items", yes, _with(TURNS, "forget_prefix")
    ),
    # ---- the gateway ----
    "a KV cache that was not taken is offered again": Mutation(
        Stages, "begin", _offers_it_again, _with(PAIRS, "crash_decode"), fault_share=0.1
    ),
    "handovers that failed are not counted": Mutation(
        RouteChoice,
        "on_handover_failed",
        _counts_no_handover,
        _with(SINGLE, "render_otherwise"),
        fault_share=0.4,
    ),
    "instances that failed are not counted": Mutation(
        RouteChoice, "on_unreachable", _counts_no_failure, _with(SINGLE, "crash_decode"), slow="d-0"
    ),
    "a caller that leaves leaves the stage behind": Mutation(
        Answer, "close", nothing, _with(PAIRS, "cancel"), fault_share=0.1
    ),
    "a draining instance costs the KV cache": Mutation(
        RouteChoice, "pick_decode", nothing, _with(PAIRS, "drain_decode"), fault_share=0.02
    ),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_model_notices_that(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_noticed(MUTATIONS[name], monkeypatch)

"""Requests that a decode engine ends before computing anything, with the reasons. Pure.

A KV cache is read once: its owner frees it as soon as one reader is done. So a second request that names it
is ended, and does not read reused blocks. A request whose prompt was rendered to other tokens than the KV
cache's is ended, and the owner frees the cache. A request that needs an item computed is ended, because there
is no encoder and no encoder output here.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from triptych_vllm_connector.kv_failures import KvFailure
from triptych_vllm_connector.seams.replacing import replace

PROMPT = "remote_prompt"  # of `kv_transfer_params`

MAX_REMEMBERED = 16_384  # KV caches that were read last


def describe_kv_caches(kv_connector: Any) -> None:
    """Add `remote_blocks_expiry_time` and `PROMPT` to the answers of vLLM's `kv_connector` (or None).

    vLLM's NIXL connector sends the first for KV caches of decode engines only. The lease ends by this
    engine's own clock. Both engines render a request, and a template may put the time into it: without a
    description of the prompt, KV blocks of other tokens would be taken unnoticed.
    """
    scheduler = getattr(kv_connector, "connector_scheduler", None)
    if scheduler is None or not hasattr(scheduler, "_reqs_need_send"):
        return
    finish = scheduler.request_finished

    def request_finished(request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        is_kept, params = finish(request, block_ids)
        if is_kept and params is not None:
            params["remote_blocks_expiry_time"] = scheduler._reqs_need_send[request.request_id]
            if request.prompt_token_ids is not None:
                # vLLM takes the last tokens off a prompt that the other engine computes again.
                is_cut = (request.kv_transfer_params or {}).get("_p_side_truncated")
                num_cut = scheduler._prefill_backoff() if is_cut else 0
                params[PROMPT] = _description(request.prompt_token_ids, num_cut)
        return is_kept, params

    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector

    users = (NixlBaseConnector.request_finished, NixlBaseConnector.request_finished_all_groups)
    replace(scheduler, "request_finished", request_finished, used_by=users)


def is_of_prompt(params: dict[str, Any], token_ids: Sequence[int] | None) -> bool:
    """True if the KV cache that `params` name is of this prompt, as far as its owner describes it."""
    said = params.get(PROMPT)
    if said is None or token_ids is None:
        return True
    num_computed = said.get("num_computed") if isinstance(said, dict) else None
    if not isinstance(num_computed, int) or not 0 <= num_computed <= len(token_ids):
        return False
    return _description(token_ids[:num_computed], len(token_ids) - num_computed) == said


def _description(computed: Sequence[int], num_cut: int) -> dict[str, Any]:
    """Description of a prompt whose last `num_cut` tokens are not in the KV cache."""
    return {
        "num_tokens": len(computed) + num_cut,
        "num_computed": len(computed),
        "sha256": hashlib.sha256(array("q", computed).tobytes()).hexdigest(),
    }


def covers_items(mm_features: Sequence[Any], num_computed_tokens: int, num_tokens: int) -> bool:
    """True if the KV cache covers every item of `mm_features` (vLLM's).

    vLLM computes the last token again where all of them are there.
    """
    first = min(num_computed_tokens, num_tokens - 1)
    return not any(_has_embeds_from(feature.mm_position, first) for feature in mm_features)


def _has_embeds_from(position: Any, first_token: int) -> bool:
    start = max(0, first_token - position.offset)
    if start >= position.length:
        return False
    first_embed, end_embed = position.get_embeds_indices_in_range(start, position.length)
    return bool(end_embed > first_embed)


class KvReads:
    """KV caches that requests have named; each may be read once."""

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._max_remembered = max_remembered
        self._named: OrderedDict[tuple[str, str], None] = OrderedDict()

    def name(self, params: dict[str, Any]) -> bool:
        """Record the KV cache that `kv_transfer_params` name; False if a request has named it before."""
        key = (str(params.get("remote_engine_id")), str(params.get("remote_request_id")))
        if key in self._named:
            return False
        self._named[key] = None
        if len(self._named) > self._max_remembered:
            self._named.popitem(last=False)
        return True


class KvRefusals:
    """Refusals of one engine, by engine request id."""

    def __init__(self) -> None:
        self._reads = KvReads()
        self._failures: dict[str, KvFailure] = {}  # of living requests

    def __len__(self) -> int:
        return len(self._failures)

    def on_added(
        self, engine_request_id: str, params: dict[str, Any] | None, token_ids: Sequence[int] | None
    ) -> KvFailure | None:
        """Check a new request; returns the reason to end it, or None so far.

        Args:
            params: `kv_transfer_params`. If the KV cache may not be read they ask for none afterwards,
                because vLLM's connector would tell the owner to free it.
            token_ids: tokens of the prompt; None if there are none or the request is aborted on arrival.
        """
        if not params or not params.get("do_remote_prefill"):
            return None
        failure: KvFailure | None = None
        if not self._reads.name(params):
            params["do_remote_prefill"] = False
            failure = KvFailure.KV_TAKEN
        elif not is_of_prompt(params, token_ids):
            failure = KvFailure.KV_LOAD_FAILED
        if failure is not None:
            self._failures[engine_request_id] = failure
        return failure

    def check(
        self, engine_request_id: str, mm_features: Sequence[Any], num_computed_tokens: int, num_tokens: int
    ) -> KvFailure | None:
        """Reason to end a request before it gets KV blocks; None if it may continue from this KV cache."""
        failure = self._failures.get(engine_request_id)
        if failure is None and not covers_items(mm_features, num_computed_tokens, num_tokens):
            failure = self._failures[engine_request_id] = KvFailure.PREFIX_NOT_HELD
        return failure

    def on_load_failed(self, engine_request_ids: Iterable[str]) -> None:
        """Record KV caches that could not be read, or not within their lease."""
        self._failures |= dict.fromkeys(engine_request_ids, KvFailure.KV_LOAD_FAILED)

    def take(self, engine_request_id: str) -> KvFailure | None:
        """Remove and return the reason for which the request ended; None if it ended otherwise."""
        return self._failures.pop(engine_request_id, None)
